"""The script of win rates: verdicts in both orders, and ties."""

import runpy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("transformers")

import torch
import transformers

from otloss_llm.data import train_bpe_tokenizer
from tests.otloss_llm.conftest import Tiny, tiny  # noqa: F401  # a fixture

SCRIPT = runpy.run_path(str(Path(__file__).parents[2] / "examples/win_rate.py"))


class Judge(transformers.GPT2LMHeadModel):
    """Prefers "good", and otherwise position A."""

    def forward(self, input_ids: Any, **_: Any) -> Any:
        logits = torch.zeros(*input_ids.shape, self.config.vocab_size)
        for row, ids in zip(logits, input_ids, strict=True):
            a, b = ("good" in part for part in self.tokenizer.decode(ids).split("A: ")[1].split("B: "))
            row[:, self.tokenizer("B" if b and not a else "A")["input_ids"]] = 5.0
        return SimpleNamespace(logits=logits)


def test_a_win_needs_both_orders() -> None:
    judge = Judge(transformers.GPT2Config(vocab_size=257, n_positions=200, n_embd=4, n_layer=1, n_head=1))
    tokenizer = judge.tokenizer = train_bpe_tokenizer(["a"], 257)
    pairs = [("good", "bad"), ("bad", "good"), ("bad", "worse"), ("good", "bad"), ("x" * 200, "y")]
    first, second = zip(*pairs, strict=True)
    actual = SCRIPT["judge_pairs"](judge, tokenizer, ["?"] * 5, first, second, 4)
    assert (actual.wins, actual.ties, actual.losses, actual.left_out) == (2, 1, 1, 1)
    assert actual.rate == pytest.approx(2.5 / 4)
    assert actual.standard_error == pytest.approx(torch.tensor([1, 0, 0.5, 1]).std().item() / 2)
    assert actual.for_a == pytest.approx(5 / 8)
