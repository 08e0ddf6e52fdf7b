"""What number costs add to cross-entropy, in time and memory: ours in the fused loss, and ntloss beside dense logits.

Labels are GPT-2 tokens of GSM8K, in blocks of 256: real positions of numbers, about one label in six. The price is a
difference between two contestants of the same round:

    ours      (number_token - MLE) through `linear_token_loss`; likewise emo+number beside EMO
    ntloss    (F.cross_entropy + 0.3 NTLoss) - F.cross_entropy, from dense logits, with its defaults
    logits    (F.cross_entropy + 0.3 number_token_loss) - F.cross_entropy, where a loop has dense logits anyway

What numbers add to MLE, or to EMO, is less than what their matrix products vary by. It does not depend on the width of
the hidden states, so it is also timed at a width where products take little time, and given in percent of MLE.

ntloss finds 10 number tokens with its default `digit_level`, and the hundreds without a blank with `digit_level=False`;
ours all 1691. Both are timed with both.
"""

from __future__ import annotations

import json
import os
import statistics
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from copy import copy
from dataclasses import dataclass, replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812 - the name everybody uses

from benchmarks.contestants import Problem
from benchmarks.labels import BLOCK, share_distinct
from benchmarks.measure import Settings, Timing, heading, keep, report_times, say, table, timed_rounds
from benchmarks.memory import MALLOC, MIB, peak_growth
from otloss import number_token_loss
from otloss_llm import EMO, MLE, EmbeddingCost, MixedCost, NumberCost, NumberToken, linear_token_loss

NAME = "numbers"
ROUNDS, SMALL_ROUNDS = 5, 2
DENSE, MLE_OURS, EMO_OURS = "dense cross-entropy", "otloss MLE", "otloss EMO"
DIGITS, ALL, MSE, MIXED = (
    "number_token, 10 digits",
    "number_token, all numbers",
    "number_token mse, all numbers",
    "emo+number",
)
NTLOSS, NTLOSS_ALL, LOGITS, LOGITS_ALL = "ntloss digits", "ntloss numbers", "from logits, digits", "from logits, all"
WEIGHT = 0.3
TIME_LIMIT, PRICE_LIMIT = 1.05, 0.20


@dataclass(frozen=True)
class Size:
    tokens: int
    width: int


SIZE, SMALL = Size(4096, 768), Size(256, 32)
NARROW, NARROW_ROUNDS = 8, 15
Loss = Callable[[Problem], Tensor]


def main(settings: Settings) -> None:
    folder = None if settings.data is None else settings.data / "tokenizers/gpt2"
    text = None if settings.data is None else settings.data / "math/gsm8k-train.jsonl"
    if folder is None or text is None or not folder.is_dir() or not text.is_file():
        say(f"\n{NAME}: left out, it needs --data with tokenizers/gpt2 and math/gsm8k-train.jsonl")
        return
    size = SMALL if settings.small else SIZE
    case = _Case(folder, text, size)
    names = [DENSE, MLE_OURS, EMO_OURS, DIGITS, ALL, MSE, MIXED, LOGITS, LOGITS_ALL]
    names += [NTLOSS, NTLOSS_ALL] if has_ntloss() else []
    rounds = settings.rounds or (SMALL_ROUNDS if settings.small else ROUNDS)
    timings = _timed(case, names, rounds)
    report_times(NAME, case.name, timings, peer=MLE_OURS, rounds=rounds, output=settings.output)
    _verdicts(timings)
    narrow = case.at_width(NARROW)
    rounds = settings.rounds or (SMALL_ROUNDS if settings.small else NARROW_ROUNDS)
    apart = _timed(narrow, [MLE_OURS, EMO_OURS, DIGITS, ALL, MSE, MIXED], rounds)
    report_times(f"{NAME} narrow", narrow.name, apart, peer=MLE_OURS, rounds=rounds, output=settings.output)
    _extra_at_full_width(apart, timings[MLE_OURS])
    _memory(case, [name for name in (DENSE, MLE_OURS, ALL, NTLOSS) if name in names], folder, text, settings)


def _timed(case: _Case, names: list[str], rounds: int) -> dict[str, Timing]:
    """Forward and backward of each, with new labels every round."""

    def step(loss: Loss) -> Callable[[], None]:
        def run() -> None:
            case.problem.hidden.grad = case.problem.weight.grad = None
            loss(case.problem).backward()

        return run

    def new_labels(i: int) -> None:
        case.problem.labels = case.draw(i)

    contestants = {name: step(case.loss(name)) for name in names}
    return timed_rounds(contestants, rounds=rounds, before_round=new_labels)


class _Case:
    """One size: the tokenizer, the text and the problem."""

    def __init__(self, folder: Path, text: Path, size: Size) -> None:
        from transformers import AutoTokenizer

        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        lines = [json.loads(line) for line in text.read_text(encoding="utf-8").splitlines()]
        ids = self.tokenizer([f"{line['question']}\n{line['answer']}" for line in lines])["input_ids"]
        self.ids = torch.tensor([token for row in ids for token in row])
        self.vocab = len(self.tokenizer)
        self.numbers = NumberCost.from_tokenizer(self.tokenizer)
        values = self.numbers.values
        single = torch.tensor([len((text or "").strip()) == 1 for text in self.numbers.tokens.texts])
        blank = torch.tensor([(text or " ").startswith(" ") for text in self.numbers.tokens.texts])
        self.digits = NumberCost(values.where(single & ~blank, torch.nan))  # the ten that ntloss finds
        self.size = size
        self.problem = self._problem()

    def _problem(self) -> Problem:
        return Problem.random(self.size.tokens, self.vocab, self.size.width, self.draw(0))

    def at_width(self, width: int) -> _Case:
        """The same tokens with hidden states of another width."""
        other = copy(self)
        other.size = replace(self.size, width=width)
        other.problem = other._problem()
        return other

    @property
    def name(self) -> str:
        labels = self.draw(0)
        return (
            f"N={self.size.tokens} V={self.vocab} d={self.size.width} float32, GPT-2 tokens of GSM8K, "
            f"u={share_distinct(labels):.2f}, "
            f"{float(self.numbers.is_number[labels].float().mean()):.0%} of labels numbers, "
            f"{float(self.digits.is_number[labels].float().mean()):.0%} single digits without a blank"
        )

    def draw(self, seed: int) -> Tensor:
        generator = torch.Generator().manual_seed(seed)
        block = min(BLOCK, self.size.tokens)
        starts = torch.randint(len(self.ids) - block + 1, (-(-self.size.tokens // block), 1), generator=generator)
        return self.ids[starts + torch.arange(block)].flatten()[: self.size.tokens].clone()

    def loss(self, name: str) -> Loss:
        fused: dict[str, tuple[Any, Any]] = {
            MLE_OURS: (MLE(), None),
            EMO_OURS: (EMO(), self.problem.cost),
            DIGITS: (NumberToken(WEIGHT), self.digits),
            ALL: (NumberToken(WEIGHT), self.numbers),
            MSE: (NumberToken(WEIGHT), NumberCost(self.numbers.values, form="mse", scaling="log")),
            MIXED: (EMO(), MixedCost(self.numbers, EmbeddingCost(self.problem.weight))),
        }
        if name in fused:
            objective, cost = fused[name]
            return lambda p: linear_token_loss(p.hidden, p.weight, p.labels, objective=objective, cost=cost).loss
        beside = self._beside_dense(name)

        def dense(problem: Problem) -> Tensor:
            logits = problem.hidden @ problem.weight.T
            loss = F.cross_entropy(logits, problem.labels)
            return loss if beside is None else loss + WEIGHT * beside(logits, problem.labels)

        return dense

    def _beside_dense(self, name: str) -> Callable[[Tensor, Tensor], Tensor] | None:
        if name == DENSE:
            return None
        if name in (LOGITS, LOGITS_ALL):
            values = (self.digits if name == LOGITS else self.numbers).values
            return lambda logits, labels: number_token_loss(logits, labels, values, squash=9.0)
        from ntloss import NTLoss

        peer = NTLoss(self.tokenizer, digit_level=name == NTLOSS, squash_factor=9.0)
        return lambda logits, labels: peer(logits[None], labels[None])


def has_ntloss() -> bool:
    try:
        from loguru import logger
        from ntloss import NTLoss  # noqa: F401
    except ImportError:
        print('ntloss is left out: pip install "otloss[bench]"')
        return False
    logger.disable("ntloss")
    return True


def _peak(name: str, folder: Path, text: Path, size: Size) -> int:
    """Bytes beyond inputs and gradients of one pass, in a process of its own."""
    case = _Case(folder, text, size)
    loss, problem = case.loss(name), case.problem
    tiny = Problem.random(64, case.vocab, 8, problem.labels[:64])
    if name != NTLOSS:  # compile and fill caches
        loss(tiny).backward()
    grown = peak_growth(lambda: loss(problem).backward())
    return grown - problem.hidden.nbytes - problem.weight.nbytes


def _memory(case: _Case, names: list[str], folder: Path, text: Path, settings: Settings) -> None:
    os.environ.update(MALLOC)
    measured = {}
    for name in names:
        with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
            measured[name] = pool.submit(_peak, name, folder, text, case.size).result()
    heading(f"{NAME} memory", case.name, "peak beyond inputs and gradients")
    rows = []
    logits = 4 * case.size.tokens * case.vocab
    for name, peak in measured.items():
        say(
            f"  {name:<30} {peak / MIB:9.1f} MiB   {peak / logits:6.3f} x all logits   "
            f"{peak / measured[DENSE]:6.3f} x {DENSE}"
        )
        rows.append(
            {"name": name, "mebibytes": f"{peak / MIB:.1f}", "ratio": f"{peak / measured[DENSE]:.4f}", "peer": DENSE}
        )
    keep(settings.output, f"{NAME} memory", case.name, rows)


def _ratio(name: str, peer: str, timings: dict[str, Timing]) -> tuple[float, float, float]:
    ratios = [a / b for a, b in zip(timings[name].seconds, timings[peer].seconds, strict=True)]
    return _quartiles(ratios)


def _extra(name: str, peer: str, timings: dict[str, Timing]) -> list[float]:
    return [a - b for a, b in zip(timings[name].seconds, timings[peer].seconds, strict=True)]


def _quartiles(numbers: list[float]) -> tuple[float, float, float]:
    low, _, high = statistics.quantiles(numbers, n=4, method="inclusive")
    return statistics.median(numbers), low, high


def _verdicts(timings: dict[str, Timing]) -> None:
    rows = [["quantity", "limit", "median (quartiles)"]]
    for name, peer in ((DIGITS, MLE_OURS), (ALL, MLE_OURS), (MSE, MLE_OURS), (MIXED, EMO_OURS), (MIXED, MLE_OURS)):
        median, low, high = _ratio(name, peer, timings)
        rows.append([f"{name} / {peer}", f"<= {TIME_LIMIT:.2f}", f"{median:.3f} ({low:.3f} to {high:.3f})"])
    if NTLOSS in timings:
        for ours, base, peer in ((DIGITS, MLE_OURS, NTLOSS), (ALL, MLE_OURS, NTLOSS), (ALL, MLE_OURS, NTLOSS_ALL),
                                 (LOGITS, DENSE, NTLOSS), (LOGITS_ALL, DENSE, NTLOSS_ALL)):  # fmt: skip
            mine, theirs = (statistics.median(x) for x in (_extra(ours, base, timings), _extra(peer, DENSE, timings)))
            found = f"{mine / theirs:.3f} ({1e3 * mine:.0f} of {1e3 * theirs:.0f} ms)"
            rows.append([f"extra of {ours} / extra of {peer}", f"<= {PRICE_LIMIT:.2f}", found])
    say("")
    table(rows)


def _extra_at_full_width(narrow: dict[str, Timing], wide: Timing) -> None:
    """What numbers add where products take no time, beside MLE at the width of the benchmark."""
    rows = [[f"what numbers add, timed at width {NARROW}", "limit", "median (quartiles)"]]
    for name, base in ((DIGITS, MLE_OURS), (ALL, MLE_OURS), (MSE, MLE_OURS), (MIXED, EMO_OURS)):
        median, low, high = (x / wide.median for x in _quartiles(_extra(name, base, narrow)))
        limit, found = f"<= {TIME_LIMIT - 1:.0%}", f"{median:.2%} ({low:.2%} to {high:.2%})"
        rows.append([f"({name} - {base}) / {MLE_OURS}", limit, found])
    say("")
    table(rows)
