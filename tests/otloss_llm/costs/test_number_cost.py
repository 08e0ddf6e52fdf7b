"""NumberCost and MixedCost: the rows written out once more, and through the fused loss."""

import math
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor

from otloss.costs import DenseCost
from otloss_llm import EMO, EmbeddingCost, MixedCost, NumberCost
from tests.errors import raising
from tests.otloss_llm.oracles import problem
from tests.otloss_llm.scoring import fused

VALUES = [math.nan, 0.0, 7.0, 3.5, math.nan, -2.0, 7.0]  # token 2 and 6: the same number, with and without a space
EVERY = torch.arange(7)


def values(vocab: int = 7, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.tensor((VALUES * vocab)[:vocab], dtype=dtype)


@pytest.mark.parametrize("scale", [None, 0.25])
def test_rows_of_numbers_and_of_a_mixture(scale: float | None) -> None:
    other = EmbeddingCost(torch.randn(7, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0)))
    plain, numbers = other.dense(), NumberCost(values())
    rows, mixed = numbers.rows(EVERY), MixedCost(numbers, other, scale=scale).dense()
    for y, v in enumerate(VALUES):
        for j, w in enumerate(VALUES):
            of_number = 0.0 if math.isnan(v) else 1.01 * 9.0 if math.isnan(w) else abs(v - w)
            assert float(rows[y, j]) == pytest.approx(of_number, abs=1e-15), (y, j)
            text = math.isnan(v) or math.isnan(w)
            expected = float(plain[y, j]) if text else abs(v - w) * (scale or 1 / 9)
            assert float(mixed[y, j]) == pytest.approx(expected, abs=1e-15), (y, j)
    assert torch.equal(other.dense(), plain)


def test_a_mixture_does_not_write_into_the_other_cost() -> None:
    class Kept(DenseCost):
        """A cost that returns rows it still needs."""

        def rows(self, index: Tensor) -> Tensor:
            return self.matrix

    kept = Kept(torch.rand(7, 7))
    before = kept.matrix.clone()
    assert not torch.equal(MixedCost(NumberCost(values()), kept).rows(EVERY), before)
    assert torch.equal(kept.matrix, before)


def test_labels_that_are_text_have_no_transport_cost() -> None:
    given = problem(41)
    cost = NumberCost(values(41))
    out = fused(given.leaves(), given, objective=EMO(0.3), cost=cost, reduction="none")
    valid = given.labels >= 0
    about = cost.positions(given.labels, valid)
    assert torch.equal(about, valid & cost.is_number[given.labels.clamp(min=0)])
    assert out.cost is not None
    assert torch.equal(out.cost > 0, about)
    assert 0 < about.sum() < valid.sum()
    for weighting in ("ratio", "transport"):  # would halve the nll there, or drop it
        with pytest.raises(ValueError, match="would hardly train text; use MixedCost"):
            fused(given.leaves(), given, objective=EMO(weighting), cost=cost)


def test_elsewhere_and_back() -> None:
    numbers = NumberCost(values(dtype=torch.float32))
    for cost in (numbers, MixedCost(numbers, EmbeddingCost(torch.randn(7, 2)))):
        wide = cost.to(torch.float64)
        assert wide.dtype == torch.float64
        torch.testing.assert_close(wide.rows(EVERY).float(), cost.rows(EVERY))
        assert torch.equal(pickle.loads(pickle.dumps(cost)).rows(EVERY), cost.rows(EVERY))


test_invalid_arguments = raising(
    (lambda: NumberCost(torch.full((3,), math.nan)), ValueError, "all 3 values are NaN"),
    (lambda: NumberCost(torch.tensor([1.0, math.inf])), ValueError, "inf at token 1"),
    (lambda: NumberCost(values(), text=0.0), ValueError, "text"),
    (lambda: NumberCost(values()).rows(torch.tensor([7])), ValueError, "expected 0 to 6"),
    (lambda: NumberCost(values()).to(torch.bfloat16), ValueError, "expected float32 or float64"),  # 257 would be 256
    (lambda: MixedCost(NumberCost(values()), EmbeddingCost(torch.eye(3))), ValueError, "7 tokens, the other .* 3"),
)


def tokenizer(words: list[str]) -> Any:
    transformers = pytest.importorskip("transformers")
    from tokenizers import Tokenizer, models

    vocabulary = {word: i for i, word in enumerate(words)}
    return transformers.PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel(vocabulary, words[0])))


DIGITS = [*map(str, range(10))]


@pytest.mark.parametrize(
    "others", [[], ["100"], ["\uff11\uff10"], [*map(str, range(10, 1000)), "66666666"], ["-7", "ten"]], ids=len
)
def test_costs_of_digits_do_not_depend_on_the_other_tokens(others: list[str]) -> None:
    """One weight means the same with every tokenizer: the published costs of digits, and one cost of text."""
    words = ["a", *DIGITS, *others]
    cost = NumberCost.from_tokenizer(tokenizer(words), values={len(words) - 1: 10.0} if "ten" in others else None)
    rows = cost.rows(torch.arange(1, 11))
    torch.testing.assert_close(rows[:, 1:11], (torch.arange(10.0)[:, None] - torch.arange(10.0)).abs(), rtol=0, atol=0)
    torch.testing.assert_close(rows[:, 0], torch.full((10,), 9.09))
    assert (rows[:, cost.is_number] < cost.text).all()
    assert not cost.is_number[[word.startswith("\uff11") for word in words]].any()
    assert MixedCost(cost, EmbeddingCost(torch.randn(len(words), 3))).scale == pytest.approx(1 / 9)


def test_a_factor_of_ten_costs_as_much_as_all_digits_of_a_place() -> None:
    words = ["a", "5", "12", "100", "200", "900", "999", "1000", "-100"]
    rows = NumberCost.from_tokenizer(tokenizer(words)).rows(torch.arange(len(words)))
    for a, b, expected in (
        ("100", "900", 9 * math.log10(9)), ("100", "200", 9 * math.log10(2)), ("100", "1000", 9.0),
        ("5", "12", 4 + 9 * math.log10(12 / 9)), ("5", "999", 9.0), ("100", "-100", 9.0), ("999", "a", 9.09),
    ):  # fmt: skip
        assert float(rows[words.index(a), words.index(b)]) == pytest.approx(expected, rel=1e-5), (a, b)
    assert NumberCost.from_tokenizer(tokenizer(words), squash=5.0).settings["scaling"] == "absolute"
