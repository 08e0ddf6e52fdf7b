"""Numbers of three digits, a token each: does a weight for the place of a digit help the number loss?

A small Llama reads two numbers and writes a third one. The weights of its digits, through `token_weight=`, are
alike or by place: 4, 2, 1, divided by their mean, exponential as in NTIL (arXiv 2505.13077).

    ARM            mle, number_token, and its controls number_token/shuffled, /equal
    ARM, place     all weights by place: token_weight= multiplies cross-entropy and number loss alike
    ARM, reverse   the same with the weights of the other end
    ARM, distance  by place for the number loss alone, as NTIL has it

    sums           a + b < 1000: there is one right answer
    regression     (a + b) / 2 with noise, a standard deviation of 50: an error costs its size

The distribution over all 1000 numbers, the product of three digits' conditional ones, is decoded like the one of
`benchmarks.number_regression`. Each run is a row of place_values.csv; --resume continues with those that are there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from benchmarks.measure import Settings
from benchmarks.number_regression import WEIGHT, Rows, fit, measures, rows_of, small_llama
from benchmarks.paper.arms import parse_arm
from benchmarks.runs import Runs
from otloss_llm import NumberCost, parse_objective, token_loss

NAME = "place_values"
DIGITS, SIZE = 3, 1000
PLUS, ASK = 10, 11
PLACE = torch.tensor([4.0, 2.0, 1.0]) * 3 / 7
WEIGHTS = {"": torch.ones(DIGITS), "place": PLACE, "reverse": PLACE.flip(0)}
ARMS = ("mle", "mle, place", "mle, reverse", "number_token", "number_token, place", "number_token, distance",
        "number_token/shuffled", "number_token/shuffled, distance", "number_token/equal")  # fmt: skip
MEASURES = ("exact", "mae greedy", "mae median", "nll", "crps", "within_90")
TEST = 250
NOISE = 50.0


def drawn(case: str, count: int, seed: int) -> Rows:
    """Rows of two numbers, and the third."""
    random = np.random.default_rng(seed)
    x = random.integers(0, SIZE // 2, (count, 2)) if case == "sums" else random.integers(0, SIZE, (count, 2))
    exact = x.sum(axis=1).astype(float)
    if case != "sums":
        exact = np.clip((exact / 2 + NOISE * random.standard_normal(count)).round(), 0, SIZE - 1)
    return rows_of(x, exact)


def digits(numbers: Tensor) -> Tensor:
    """(n,) to (n, 3), the hundreds first."""
    return torch.stack([numbers // 100, numbers // 10 % 10, numbers % 10], dim=-1)


def prompts(x: Tensor) -> Tensor:
    sign, ask = (torch.full((len(x), 1), token) for token in (PLUS, ASK))
    return torch.cat([digits(x[:, 0]), sign, digits(x[:, 1]), ask], dim=1)


def loss_of(arm: str, seed: int) -> Callable[[Tensor, Tensor], Tensor]:
    """The loss of an arm, from logits (B, 3, V) and digits (B, 3)."""
    name, _, weights = arm.partition(", ")
    read = parse_arm(name)
    values = torch.cat([torch.arange(10.0), torch.full((2,), torch.nan)])
    cost = NumberCost(values)
    if read.control == "shuffled":
        cost = cost.shuffled(torch.Generator().manual_seed(seed))
    elif read.control == "equal":
        cost = cost.equal()
    if weights == "distance":
        return lambda z, y: (
            cross_entropy(z.flatten(0, 1), y.flatten())
            + WEIGHT * token_loss(z, y, objective=distance, cost=cost, token_weight=PLACE.expand_as(y)).loss
        )
    objective, weight = parse_objective(read.objective), WEIGHTS[weights]
    return lambda z, y: token_loss(z, y, objective=objective, cost=cost, token_weight=weight.expand_as(y)).loss


def distance(nll: Tensor, cost: Tensor) -> Tensor:
    """An objective: the number loss alone."""
    return cost


def trained(arm: str, train: Rows, *, steps: int, seed: int) -> Any:
    model, loss = small_llama(12, seed), loss_of(arm, seed)
    answer = digits(train.y)
    ids = torch.cat([prompts(train.x), answer], dim=1)

    def of_batch(batch: Tensor) -> Tensor:
        hidden = model.model(input_ids=ids[batch, :-1], use_cache=False).last_hidden_state
        return loss(model.lm_head(hidden[:, -DIGITS:]), answer[batch])

    fit(list(model.parameters()), of_batch, len(ids), steps=steps, seed=seed)
    return model.eval()


@torch.no_grad()
def distributions(model: Any, x: Tensor) -> Tensor:
    """Log probabilities (rows, 1000) of the numbers, and nothing else: digits alone are renormalised."""
    beginnings = digits(torch.arange(0, SIZE, 10))[:, :-1]  # the two first digits of all numbers
    parts = []
    for prompt in prompts(x):
        ids = torch.cat([prompt.expand(len(beginnings), -1), beginnings], dim=1)
        hidden = model.model(input_ids=ids, use_cache=False).last_hidden_state
        log_q = model.lm_head(hidden[:, -DIGITS:])[..., :10].double().log_softmax(-1)  # (100, 3, 10)
        first = log_q[0, 0].repeat_interleave(10)
        second = log_q[::10, 1].flatten()
        parts.append((first + second)[:, None] + log_q[:, 2])
    return torch.stack(parts).flatten(1)


def measured(log_p: Tensor, test: Rows) -> dict[str, float]:
    of = measures(log_p, test, numbers=SIZE)
    exact = float((log_p.argmax(-1) == test.y).double().mean())
    return {"exact": exact, "mae greedy": of["greedy", "mae"], "mae median": of["median", "mae"],
            "nll": of["", "nll"], "crps": of["", "crps"], "within_90": of["", "within 90 %"]}  # fmt: skip


def main(settings: Settings, arms: tuple[str, ...] = ARMS) -> None:
    runs = Runs(NAME, MEASURES, settings)
    held_out, seeds = (8, 2) if settings.small else (TEST, 3)
    for case, count, steps in (("sums", 2000, 800), ("regression", 1000, 600)):
        count, steps = (64, 2) if settings.small else (count, steps)
        for seed in range(seeds):
            rows = drawn(case, count + held_out, seed)
            train, test = rows.part(torch.arange(count)), rows.part(torch.arange(count, len(rows.x)))
            for arm in arms:
                if runs.lacks(case, arm, seed):
                    model = trained(arm, train, steps=steps, seed=seed)
                    runs.add(case, arm, seed, measured(distributions(model, test.x), test))
        runs.report(case, arms, [("mae median", "mle", "mae greedy"), *((name, "mle", name) for name in MEASURES)])
