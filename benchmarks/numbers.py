"""Time and memory that number losses add to cross-entropy: ours in the fused loss, and ntloss beside dense logits.

Labels are GPT-2 tokens of GSM8K, in blocks of 256; about one label in six is a number. The added time is the difference
between two contestants of the same round:

    ours      (number_token - MLE) and (emo+number - EMO) through `linear_token_loss`
    ntloss    (F.cross_entropy + 0.3 NTLoss) - F.cross_entropy, from dense logits, with its defaults
    logits    (F.cross_entropy + 0.3 number_token_loss) - F.cross_entropy, from dense logits

What numbers add to MLE, or to EMO, is less than the noise of the matrix products. It does not depend on the width of
the hidden states, so it is also timed at a small width, and given in percent of MLE's time at the full width.

ntloss finds 10 number tokens with its default `digit_level`, and the hundreds without a blank with `digit_level=False`;
ours finds all 1691. Both are timed with both.
"""

from __future__ import annotations

import json
import os
import statistics
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import cached_property
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.bench import Bench
from benchmarks.contestants import DENSE, EMO_OURS, MLE_OURS, Loss, Problem, dense, step
from benchmarks.labels import BLOCK, share_distinct
from benchmarks.measure import (
    Limit,
    Settings,
    Timing,
    ratios,
    report_memory,
    say,
    table,
)
from benchmarks.memory import MALLOC, peak_growth
from otloss import number_token_loss
from otloss._checks import install_hint
from otloss_llm import EMO, MLE, EmbeddingCost, MixedCost, NumberCost, NumberToken, linear_token_loss

NAME = "numbers"
ROUNDS, SMALL_ROUNDS, NARROW_ROUNDS = 5, 2, 15
DIGITS, ALL, MIXED = "number_token, 10 digits", "number_token, all numbers", "emo+number"
NTLOSS, NTLOSS_ALL, LOGITS, LOGITS_ALL = "ntloss digits", "ntloss numbers", "from logits, digits", "from logits, all"
WEIGHT = 0.3
TIME_LIMIT, ADDED_LIMIT = 1.05, 0.20
WIDTH, SMALL_WIDTH, NARROW = 768, 32, 8
PAIRS = ((DIGITS, MLE_OURS), (ALL, MLE_OURS), (MIXED, EMO_OURS))  # and what each adds to


def main(settings: Settings) -> None:
    if settings.data is None:
        return
    case = Case(settings.data, settings.small, SMALL_WIDTH if settings.small else WIDTH)
    names = [DENSE, MLE_OURS, EMO_OURS, DIGITS, ALL, MIXED, LOGITS, LOGITS_ALL]
    names += [NTLOSS, NTLOSS_ALL] if has_ntloss() else []
    timings = timed(case, names, NAME, settings, ROUNDS)
    verdicts(timings)
    narrow = timed(case.at_width(NARROW), [MLE_OURS, EMO_OURS, DIGITS, ALL, MIXED], f"{NAME} narrow", settings,
                   NARROW_ROUNDS)  # fmt: skip
    added_at_full_width(narrow, timings[MLE_OURS])
    memory(case, [name for name in (DENSE, MLE_OURS, ALL, NTLOSS) if name in names], settings)


class Case:
    """One size: the tokenizer, the text and the problem."""

    def __init__(self, data: Path, small: bool, width: int) -> None:
        from transformers import AutoTokenizer

        self.data, self.small, self.width = data, small, width
        self.tokens = 256 if small else 4096
        self.tokenizer = AutoTokenizer.from_pretrained(data / "tokenizers/gpt2")
        lines = (data / "math/gsm8k-train.jsonl").read_text(encoding="utf-8").splitlines()
        pairs = [json.loads(line) for line in (lines[:500] if small else lines)]
        ids = self.tokenizer([f"{pair['question']}\n{pair['answer']}" for pair in pairs])["input_ids"]
        self.ids = torch.tensor([token for row in ids for token in row])
        self.vocab = len(self.tokenizer)
        self.numbers = NumberCost.from_tokenizer(self.tokenizer)
        texts = [text or "" for text in self.numbers.tokens.texts]
        digits = torch.tensor([len(text) == 1 and text != " " for text in texts])
        self.digits = NumberCost(self.numbers.values.where(digits, torch.nan))  # the ten that ntloss finds

    @cached_property
    def problem(self) -> Problem:
        return Problem.random(self.vocab, self.width, self.draw(0))

    def at_width(self, width: int) -> Case:
        return Case(self.data, self.small, width)

    @property
    def name(self) -> str:
        labels = self.draw(0)
        return (
            f"N={self.tokens} V={self.vocab} d={self.width} float32, GPT-2 tokens of GSM8K, "
            f"u={share_distinct(labels):.2f}, "
            f"{float(self.numbers.is_number[labels].float().mean()):.0%} of labels numbers, "
            f"{float(self.digits.is_number[labels].float().mean()):.0%} single digits without a blank"
        )

    def draw(self, seed: int) -> Tensor:
        generator = torch.Generator().manual_seed(seed)
        starts = torch.randint(len(self.ids) - BLOCK + 1, (self.tokens // BLOCK, 1), generator=generator)
        return self.ids[starts + torch.arange(BLOCK)].flatten()

    def loss(self, name: str) -> Loss:
        fused: dict[str, tuple[Any, Any]] = {
            MLE_OURS: (MLE(), None),
            EMO_OURS: (EMO(), self.problem.cost),
            DIGITS: (NumberToken(WEIGHT), self.digits),
            ALL: (NumberToken(WEIGHT), self.numbers),
            MIXED: (EMO(), MixedCost(self.numbers, EmbeddingCost(self.problem.weight))),
        }
        if name in fused:
            objective, cost = fused[name]
            return lambda p: linear_token_loss(p.hidden, p.weight, p.labels, objective=objective, cost=cost).loss
        if name == DENSE:
            return dense
        added = self._from_logits(name)

        def loss(problem: Problem) -> Tensor:
            logits = problem.hidden @ problem.weight.T
            likelihood = torch.nn.functional.cross_entropy(logits, problem.labels)
            return likelihood + WEIGHT * added(logits, problem.labels)

        return loss

    def _from_logits(self, name: str) -> Callable[[Tensor, Tensor], Tensor]:
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
        print(f"ntloss is not measured: {install_hint('bench')}")
        return False
    logger.disable("ntloss")
    return True


def timed(case: Case, names: list[str], benchmark: str, settings: Settings, rounds: int) -> dict[str, Timing]:
    """Forward and backward pass of each, with new labels every round."""

    def new_labels(i: int) -> None:
        case.problem.labels = case.draw(i)

    steps = {name: step(case.loss(name), case.problem) for name in names}
    bench = Bench(settings, benchmark, rounds=rounds, small_rounds=SMALL_ROUNDS)
    return bench.timed(case.name, steps, peer=MLE_OURS, turn=0.0, before_round=new_labels)


def _peak(name: str, data: Path, small: bool, width: int) -> int:
    """Bytes beyond inputs and gradients of one pass, in its own process."""
    case = Case(data, small, width)
    loss, problem = case.loss(name), case.problem
    if name != NTLOSS:  # compile, and allocate what stays
        loss(Problem.random(case.vocab, 8, problem.labels[:64])).backward()
    grown = peak_growth(lambda: loss(problem).backward())
    return grown - problem.hidden.nbytes - problem.weight.nbytes


def memory(case: Case, names: list[str], settings: Settings) -> None:
    os.environ.update(MALLOC)
    measured = {}
    for name in names:
        with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
            measured[name] = pool.submit(_peak, name, case.data, case.small, case.width).result()
    report_memory(NAME, case.name, measured, peer=DENSE, output=settings.output)


def _added(name: str, base: str, timings: dict[str, Timing]) -> list[float]:
    return [a - b for a, b in zip(timings[name].seconds, timings[base].seconds, strict=True)]


def verdicts(timings: dict[str, Timing]) -> None:
    """Ratios to MLE and EMO, and the added time over ntloss's."""
    rows = [["quantity", "limit", "median (quartiles)"]]
    for name, base in (*PAIRS, (MIXED, MLE_OURS)):
        rows.append(Limit(f"{name} / {base}", TIME_LIMIT).verdict(*ratios(timings[name], timings[base])))
    if NTLOSS in timings:
        for ours, base, peer in ((DIGITS, MLE_OURS, NTLOSS), (ALL, MLE_OURS, NTLOSS), (ALL, MLE_OURS, NTLOSS_ALL),
                                 (LOGITS, DENSE, NTLOSS), (LOGITS_ALL, DENSE, NTLOSS_ALL)):  # fmt: skip
            mine, theirs = (statistics.median(x) for x in (_added(ours, base, timings), _added(peer, DENSE, timings)))
            row = Limit(f"added by {ours} / added by {peer}", ADDED_LIMIT).verdict(mine / theirs)
            rows.append([*row[:2], f"{row[2]} ({1e3 * mine:.0f} of {1e3 * theirs:.0f} ms)"])
    say("")
    table(rows)


def added_at_full_width(narrow: dict[str, Timing], wide: Timing) -> None:
    """The time that numbers add at a small width, relative to MLE at the full width."""
    rows = [[f"added by numbers, timed at width {NARROW}", "limit", "median (quartiles)"]]
    for name, base in PAIRS:
        shares = [added / wide.median for added in _added(name, base, narrow)]
        low, median, high = np.quantile(shares, (0.25, 0.5, 0.75))
        limit, results = f"<= {TIME_LIMIT - 1:.0%}", f"{median:.2%} ({low:.2%} to {high:.2%})"
        rows.append([f"({name} - {base}) / {MLE_OURS}", limit, results])
    say("")
    table(rows)
