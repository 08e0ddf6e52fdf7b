"""Regression in text with few data: number losses and decodings beside their controls.

A row of a table is written as text, `x1 37 x2 5 ... ?`, and a small Llama predicts the next token, a number from 0 to
99, one token each. Every arm has the start, the batches and the steps of the others of its seed:

    mle                      cross-entropy
    number_token             plus 0.3 sum_i q_i |x_i - x_y|, x on the line of `NumberCost`
    number_token:1           the same with weight 1
    number_token/shuffled    with permuted values: the same sharpening, no meaning
    number_token/equal       all numbers alike, the same price of text: "be a number", and no more
    NTL-MSE                  plus a multiple of the squared error of the mean number, in units of 9 (the published form)
    regression head          a linear layer in place of the vocabulary, trained by the absolute error
    constant                 the median of the targets in training, whatever the row

Each distribution over numbers is decoded greedily, by its mean and by its median. Errors are in units of the target.
Seeds draw other data (or another split), start and batches; intervals are of Student's t over the seeds, at 95 %, and
gains are paired within a seed. Results: number_regression.csv, whose cases --resume leaves out.
"""

from __future__ import annotations

import csv
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from benchmarks.measure import Settings, hardware, say, table
from benchmarks.paper.arms import parse_arm
from benchmarks.paper.tables import half_interval
from otloss import number_token_loss
from otloss_llm import NumberCost, parse_objective, token_loss

NAME = "number_regression"
NUMBERS = 100  # the tokens "0" to "99"
FLOOR_SD = 5.0  # the noise of the synthetic targets, whose mean absolute error is 4.0
WEIGHT, MSE_UNIT = 0.3, 9.0
ARMS = ("mle", "number_token", "number_token/shuffled", "number_token/equal", "number_token:1",
        "number_token:1/shuffled", "number_token:1/equal", "NTL-MSE", "regression head", "constant")  # fmt: skip
WEIGHT_1 = ("mle", "number_token:1", "number_token:1/shuffled", "number_token:1/equal", "NTL-MSE", "regression head",
            "constant")  # fmt: skip
# Where the gain is to be gone.
ENOUGH = ("mle", "number_token:1", "number_token:1/shuffled", "number_token:1/equal", "constant")
DECODINGS = ("greedy", "mean", "median")
TEST, BATCH, RATE, WIDTH = 500, 32, 2e-3, 64
FIELDS = ("case", "arm", "decoding", "measure", "mean", "half_interval", "gain", "gain_half_interval", "seeds",
          "hardware", "torch")  # fmt: skip


@dataclass(frozen=True)
class Rows:
    """Rows as numbers from 0 to 99, and what one step of the target is in its own unit.

    Attributes:
        x: (n, columns); y: (n,), the target's step.
        exact: (n,) the target before rounding, in steps.
        unit: of one step.
    """

    x: Tensor
    y: Tensor
    exact: Tensor
    unit: float = 1.0

    def part(self, index: Tensor) -> Rows:
        return replace(self, x=self.x[index], y=self.y[index], exact=self.exact[index])


@dataclass(frozen=True)
class Case:
    """A task: `draw(seed)` gives the rows to train on and to test on."""

    name: str
    draw: Callable[[int], tuple[Rows, Rows]]
    steps: int
    seeds: int
    arms: tuple[str, ...] = ARMS


def rows_of(x: np.ndarray, exact: np.ndarray, unit: float = 1.0) -> Rows:
    return Rows(torch.from_numpy(x), torch.from_numpy(exact.round().astype(np.int64)), torch.from_numpy(exact), unit)


def synthetic(count: int) -> Callable[[int], tuple[Rows, Rows]]:
    """Return a draw of `count` rows: the mean of two numbers of 0 to 99 with noise, a third number beside them."""

    def draw(seed: int) -> tuple[Rows, Rows]:
        random = np.random.default_rng(seed)
        x = random.integers(0, NUMBERS, (count + TEST, 3))
        noisy = x[:, :2].mean(axis=1) + FLOOR_SD * random.standard_normal(len(x))
        exact = np.clip(noisy.round(), 0, NUMBERS - 1)
        rows = rows_of(x, exact)
        return rows.part(torch.arange(count)), rows.part(torch.arange(count, count + TEST))

    return draw


def real(features: np.ndarray, target: np.ndarray) -> Callable[[int], tuple[Rows, Rows]]:
    """Return splits of a table, a quarter to test on; columns by rank, the target in 100 equal steps of its range."""
    ranks = features.argsort(axis=0).argsort(axis=0) * NUMBERS // len(features)
    unit = float(np.ptp(target)) / (NUMBERS - 1)
    exact = (target - target.min()) / unit
    rows = rows_of(ranks, exact, unit)

    def draw(seed: int) -> tuple[Rows, Rows]:
        order = torch.from_numpy(np.random.default_rng(seed).permutation(len(target)))
        cut = len(target) // 4
        return rows.part(order[cut:]), rows.part(order[:cut])

    return draw


def cases(small: bool) -> list[Case]:
    from sklearn.datasets import load_breast_cancer, load_diabetes

    steps = 3 if small else 400
    seeds = 2 if small else 3
    cells = load_breast_cancer().data  # from the mean of five measures of cells to the radius of the largest
    means, radius = cells[:, [0, 1, 4, 5, 6]], cells[:, 20]
    made = [
        Case("1,000 rows, 400 steps", synthetic(64 if small else 1000), steps, seeds),
        Case("diabetes", real(*load_diabetes(return_X_y=True)), steps // 2, seeds),
        Case("radius of cells", real(means, radius), steps, seeds, WEIGHT_1),
    ]
    return made if small else [*made, Case("8,000 rows, 1,200 steps", synthetic(8000), 3 * steps, seeds, ENOUGH)]


class Encoder:
    """Words as tokens: the numbers 0 to 99, the names of columns, the question mark."""

    def __init__(self, columns: int) -> None:
        self.names = NUMBERS + torch.arange(columns)
        self.ask = NUMBERS + columns
        self.size = NUMBERS + columns + 1
        numbers = torch.arange(float(NUMBERS))
        self.values = torch.cat([numbers, torch.full((columns + 1,), torch.nan)])

    def __call__(self, x: Tensor) -> Tensor:
        pairs = torch.stack([self.names.expand_as(x), x], dim=-1).flatten(1)
        return torch.cat([pairs, torch.full((len(x), 1), self.ask)], dim=1)


def small_llama(vocabulary: int, seed: int) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    return LlamaForCausalLM(LlamaConfig(
        vocab_size=vocabulary, hidden_size=WIDTH, intermediate_size=2 * WIDTH, num_hidden_layers=2,
        num_attention_heads=4, max_position_embeddings=64, bos_token_id=None, eos_token_id=None,
    ))  # fmt: skip


def loss_of(arm: str, values: Tensor, seed: int) -> Callable[[Tensor, Tensor], Tensor]:
    """The loss of an arm, from logits (B, V) and tokens (B,), the mean over the batch."""
    if arm == "mle":
        return cross_entropy
    if arm == "NTL-MSE":  # with the squares of numbers to 99 as they are, it would be all of the loss
        line = values / values[~values.isnan()].max() * MSE_UNIT
        return lambda z, y: cross_entropy(z, y) + WEIGHT * number_token_loss(z, y, line, form="mse", scaling="absolute")
    read, cost = parse_arm(arm), NumberCost(values)
    if read.control == "shuffled":
        cost = cost.shuffled(torch.Generator().manual_seed(seed))
    elif read.control == "equal":
        cost = cost.equal()
    objective = parse_objective(read.objective)
    return lambda z, y: token_loss(z, y, objective=objective, cost=cost).loss


def fit(parameters: list[Tensor], loss: Callable[[Tensor], Tensor], count: int, *, steps: int, seed: int) -> None:
    """Minimise the loss of batches, drawn from `count` rows in the same order for all arms of a seed."""
    optimizer = torch.optim.AdamW(parameters, lr=RATE, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, RATE, total_steps=steps + 1)
    order = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        batch = torch.randint(count, (BATCH,), generator=order)
        optimizer.zero_grad()
        loss(batch).backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        schedule.step()


def trained(arm: str, encoder: Encoder, train: Rows, *, steps: int, seed: int) -> Callable[[Rows], Tensor]:
    """Train an arm; returns the function from rows to logits over the vocabulary, or to the target's steps."""
    if arm == "constant":
        return lambda rows: train.exact.median().expand(len(rows.x))
    model = small_llama(encoder.size, seed)

    def last(ids: Tensor) -> Tensor:
        return model.model(input_ids=ids, use_cache=False).last_hidden_state[:, -1]

    parameters = list(model.parameters())
    if arm == "regression head":
        head = torch.nn.Linear(WIDTH, 1)
        parameters += list(head.parameters())
        centre, spread = train.exact.mean().item(), train.exact.std().item()
        of = lambda ids: centre + spread * head(last(ids)).squeeze(-1)  # noqa: E731
        loss: Any = lambda z, y: (z - y).abs().mean() / spread  # noqa: E731
        target = train.exact.float()
    else:
        of = lambda ids: model.lm_head(last(ids))  # noqa: E731
        loss, target = loss_of(arm, encoder.values, seed), train.y
    ids = encoder(train.x)
    fit(parameters, lambda batch: loss(of(ids[batch]), target[batch]), len(ids), steps=steps, seed=seed)

    @torch.no_grad()
    def predict(rows: Rows) -> Tensor:
        model.eval()
        return of(encoder(rows.x))

    return predict


def measures(output: Tensor, test: Rows, *, numbers: int = NUMBERS) -> dict[tuple[str, str], float]:
    """Return `{(decoding, measure): value}` of logits, whose first are of the numbers 0, 1, ..., or of values."""
    if output.dim() == 1:
        return {("value", "mae"): test.unit * float((output - test.exact).abs().mean())}
    share = output[:, :numbers].double().softmax(dim=-1)
    values, below = torch.arange(numbers, dtype=torch.float64), share.cumsum(dim=-1)
    decoded = {
        "greedy": share.argmax(dim=-1).double(),
        "mean": share @ values,
        "median": (below < 0.5).sum(dim=-1).clamp(max=numbers - 1).double(),
    }
    apart = (values - test.exact.unsqueeze(1)).abs()
    step = (below - (values >= test.y.unsqueeze(1)).double()).square()
    within = (below.gather(1, test.y.unsqueeze(1)) - share.gather(1, test.y.unsqueeze(1)) / 2).squeeze(1)
    own = {
        "nll": float(cross_entropy(output.double(), test.y)),
        "crps": test.unit * float(step.sum(dim=-1).mean()),
        "expected error": test.unit * float((share * apart).sum(dim=-1).mean()),
        "within 90 %": float(((within > 0.05) & (within < 0.95)).double().mean()),
    }
    results = {("", name): value for name, value in own.items()}
    for name, value in decoded.items():
        results[name, "mae"] = test.unit * float((value - test.exact).abs().mean())
    return results


def run_case(case: Case) -> dict[str, list[dict[tuple[str, str], float]]]:
    """The measures of every arm, by seed."""
    results: dict[str, list[dict[tuple[str, str], float]]] = {arm: [] for arm in case.arms}
    for seed in range(case.seeds):
        train, test = case.draw(seed)
        encoder = Encoder(train.x.shape[1])
        for arm in case.arms:
            predict = trained(arm, encoder, train, steps=case.steps, seed=seed)
            results[arm].append(measures(predict(test), test))
    return results


def summary(case: Case, results: dict[str, list[dict[tuple[str, str], float]]]) -> list[dict[str, Any]]:
    """A row for each arm, decoding and measure; gains are over MLE's own, for errors its greedy decoding."""
    rows = []
    for arm, runs in results.items():
        for decoding, measure in runs[0]:
            base = ("greedy" if measure == "mae" else "", measure)
            mean = half_interval([run[decoding, measure] for run in runs])
            pairs = zip(results["mle"], runs, strict=True)
            gain = half_interval([mle[base] - run[decoding, measure] for mle, run in pairs])
            rows.append(dict(zip(FIELDS, (
                case.name, arm, decoding, measure, f"{mean.mean:.4g}", f"{mean.deviation:.2g}",
                f"{gain.mean:.3g}", f"{gain.deviation:.2g}", mean.count, hardware(), torch.__version__,
            ), strict=True)))  # fmt: skip
    return rows


def report(case: Case, rows: list[dict[str, Any]], seconds: float) -> None:
    """Print the errors by decoding, and the measures of the distribution."""
    say(
        f"\n{NAME}: {case.name}, {case.seeds} seeds, {seconds:.0f} s; mean ± half of the 95 % interval; lower is better"
    )
    columns = [("greedy", "mae"), ("mean", "mae"), ("median", "mae"), ("", "nll"), ("", "crps"), ("", "within 90 %")]
    cells = {(row["arm"], row["decoding"], row["measure"]): f"{row['mean']} ± {row['half_interval']}" for row in rows}
    lines = [["", *(" ".join(filter(None, reversed(column))) for column in columns)]]
    for arm in case.arms:
        line = [cells.get((arm, *column), "-") for column in columns]
        if (arm, "value", "mae") in cells:
            line[0] = cells[arm, "value", "mae"]
        lines.append([arm, *line])
    table(lines)
    gains = [f"{row['arm']} {row['decoding']} {row['gain']} ± {row['gain_half_interval']}" for row in rows
             if row["measure"] == "mae"]  # fmt: skip
    say("gain in mae over MLE's greedy decoding: " + "; ".join(gains))


def main(settings: Settings) -> None:
    run(cases(settings.small), settings)


def run(cases: list[Case], settings: Settings) -> None:
    path = None if settings.output is None else settings.output / f"{NAME}.csv"
    for case in cases:
        if settings.resume and path is not None and any(row["case"] == case.name for row in kept_rows(path)):
            continue
        started = time.perf_counter()
        rows = summary(case, run_case(case))
        report(case, rows, time.perf_counter() - started)
        if path is not None:
            keep(case, rows, path)


def kept_rows(path: Path) -> list[dict[str, Any]]:
    if not path.exists():
        return []
    with path.open(newline="", encoding="utf-8") as stream:
        return list(csv.DictReader(stream))


def keep(case: Case, rows: list[dict[str, Any]], path: Path) -> None:
    """Write the rows of this case to the file in place of its earlier ones."""
    kept = [row for row in kept_rows(path) if row["case"] != case.name]
    with path.open("w", newline="", encoding="utf-8") as stream:
        writer = csv.DictWriter(stream, FIELDS, lineterminator="\n")
        writer.writeheader()
        writer.writerows([*kept, *rows])
