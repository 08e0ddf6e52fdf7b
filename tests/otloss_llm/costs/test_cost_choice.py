"""Which cost an objective is given, and which errors name a cost that cannot be made."""

from typing import Any

import pytest

pytest.importorskip("transformers")

import torch

from otloss_llm import EmbeddingCost, MixedCost, NumberCost
from otloss_llm.costs.choice import NumberSettings, choose_cost, number_cost, number_values
from otloss_llm.data import train_bpe_tokenizer
from tests.errors import raising


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    """Byte-level: 10 digits, and no number of several."""
    return train_bpe_tokenizer(["a b 1 2 1 2"], 260, split_digits=True)


def made(tokenizer: Any, kind: str, **settings: Any) -> Any:
    size = len(tokenizer) + 3  # a head padded beyond the tokenizer
    embedding = torch.randn(size, 4, generator=torch.Generator().manual_seed(0))
    numbers = NumberSettings(**settings) if settings else None
    return choose_cost(
        kind, embedding=lambda: EmbeddingCost(embedding), tokenizer=tokenizer, vocab_size=size, numbers=numbers
    )


def test_each_kind_over_a_padded_head(tokenizer: Any) -> None:
    size = len(tokenizer) + 3
    for kind, expected in (("embedding", EmbeddingCost), ("number", NumberCost), ("mixed", MixedCost)):
        cost = made(tokenizer, kind)
        assert type(cost) is expected
        assert cost.shape == (size, size)
    cost = made(tokenizer, "number")
    assert cost.settings == {"scaling": "symlog", "squash": None}
    assert set(cost.values[cost.is_number].tolist()) == set(range(10))
    assert not cost.is_number[-3:].any()
    assert made(tokenizer, "mixed", scaling="log").numbers.settings["scaling"] == "log"
    assert (str(NumberSettings()), str(NumberSettings("log"))) == ("", "log")


def test_controls_of_numbers(tokenizer: Any) -> None:
    """Shuffled values are others of the same; equal numbers leave the price of text alone."""
    plain, again, other = (
        number_cost(tokenizer, 300, NumberSettings(control=control), seed=seed)
        for control, seed in ((None, 0), ("shuffled", 1), ("shuffled", 2))
    )
    equal = number_cost(tokenizer, 300, NumberSettings(control="equal"))
    ids = plain.is_number.nonzero().squeeze(-1)
    for cost in (again, other, equal):
        torch.testing.assert_close(cost.is_number, plain.is_number)
        assert cost.text == plain.text
        assert cost.tokens is plain.tokens
    for cost in (again, other):
        assert sorted(cost.values[ids].tolist()) == sorted(plain.values[ids].tolist())
        assert cost.values[ids].tolist() != plain.values[ids].tolist()
    assert again.values[ids].tolist() != other.values[ids].tolist()
    rows = equal.rows(ids)
    assert not rows[:, ids].any()
    assert rows[:, ~equal.is_number] == pytest.approx(plain.text)
    mixed = made(tokenizer, "mixed", control="equal")
    assert mixed.scale == made(tokenizer, "mixed").scale
    assert str(NumberSettings("log", "equal")) == "equal/log"


def test_tokens_of_one_value_keep_one_value_when_shuffled() -> None:
    values = torch.tensor([7.0, 1.0, float("nan"), 7.0, 3.0])
    for seed in range(5):
        got = NumberCost(values).shuffled(torch.Generator().manual_seed(seed)).values
        assert got[0] == got[3]
        assert sorted(got[[0, 1, 4]].tolist()) == [1.0, 3.0, 7.0]


def test_values_of_a_tokenizer_without_numbers(tokenizer: Any) -> None:
    assert number_values(tokenizer, 3) is None
    few = number_values(tokenizer, tokenizer.convert_tokens_to_ids("1") + 1)
    assert few is not None
    assert few[~few.isnan()].tolist() == [0.0, 1.0]


test_costs_that_cannot_be_made = raising(
    (lambda t: NumberSettings("linear"), r"scaling of numbers is 'linear', expected one of \('absolute', 'symlog'"),
    (lambda t: NumberSettings(control="random"), r"control of numbers is 'random', expected None or one of"),
    (lambda t: made(t, "embedding", control="equal"), r"control='equal' .*embedding cost"),
    (lambda t: made(t, "embedding", scaling="log"), r"scaling='log', .*number_token or emo"),
    (lambda t: number_cost(None, 300, NumberSettings()), r"none was given; give the trainer processing_class"),
    (lambda t: number_cost(t, 100, NumberSettings()), "100"),
    call=lambda make: make(train_bpe_tokenizer(["1 2"], 260, split_digits=True)),
)
