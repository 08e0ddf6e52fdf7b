"""NumberCost and MixedCost: the rows written out once more, and through the fused loss with every objective."""

from __future__ import annotations

import math
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from otloss import nn, number_token_loss
from otloss.costs import Cost, DenseCost
from otloss_llm import EMO, EmbeddingCost, MixedCost, NumberCost, NumberToken, token_loss
from tests.otloss_llm.oracles import OBJECTIVES, problem
from tests.otloss_llm.scoring import assert_all_close, fused, gradients

VALUES = [math.nan, 0.0, 7.0, 3.5, math.nan, -2.0, 7.0]  # token 2 and 6: the same number, with and without a space


def values(vocab: int = 7, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.tensor((VALUES * vocab)[:vocab], dtype=dtype)


def test_rows_of_numbers() -> None:
    dense = NumberCost(values()).dense()
    for y, v in enumerate(VALUES):
        for j, w in enumerate(VALUES):
            expected = 0.0 if math.isnan(v) else 1.01 * 9.0 if math.isnan(w) else abs(v - w)
            assert float(dense[y, j]) == pytest.approx(expected, abs=1e-15), (y, j)


def test_rows_of_a_mixture() -> None:
    other = EmbeddingCost(torch.randn(7, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0)))
    plain = other.dense()
    for scale in (None, 0.25):
        dense = MixedCost(NumberCost(values()), other, scale=scale).dense()
        for y, v in enumerate(VALUES):
            for j, w in enumerate(VALUES):
                text = math.isnan(v) or math.isnan(w)
                expected = float(plain[y, j]) if text else abs(v - w) * (scale or 1 / 9)
                assert float(dense[y, j]) == pytest.approx(expected, abs=1e-15), (y, j)
    assert torch.equal(other.dense(), plain)


class Kept(Cost):
    """A cost that hands out rows it still needs."""

    def __init__(self, matrix: Tensor) -> None:
        self.matrix = matrix

    shape = property(lambda self: tuple(self.matrix.shape))  # type: ignore[assignment]
    _data = property(lambda self: self.matrix)  # type: ignore[assignment]
    T = property(lambda self: Kept(self.matrix.T))  # type: ignore[assignment]

    def rows(self, index: Tensor) -> Tensor:
        return self.matrix if torch.equal(index, torch.arange(len(self.matrix))) else self.matrix[index]


def test_a_mixture_leaves_the_other_cost_alone() -> None:
    kept = Kept(torch.rand(7, 7))
    before = kept.matrix.clone()
    assert not torch.equal(MixedCost(NumberCost(values()), kept).dense(), before)
    assert torch.equal(kept.matrix, before)


@pytest.mark.parametrize("kind", ["numbers", "mixed", "mixed-dense"])
@pytest.mark.parametrize("name", OBJECTIVES)
def test_every_objective_through_the_fused_loss(name: str, kind: str) -> None:
    objective, _ = OBJECTIVES[name]
    if kind == "numbers" and isinstance(objective, EMO) and isinstance(objective.weighting, str):
        pytest.skip("refused: the cost is 0 where the label is text")
    for dtype, tolerance in ((torch.float64, 1e-11), (torch.float32, 2e-4)):
        given = problem(40, dtype=dtype)
        numbers = NumberCost(values(41, dtype))
        other = DenseCost(torch.rand(41, 41, dtype=dtype)) if kind == "mixed-dense" else EmbeddingCost(given.embedding)
        cost: Any = numbers if kind == "numbers" else MixedCost(numbers, other)
        dense = DenseCost(cost.dense())
        leaves, again = given.leaves(), given.leaves()
        out = fused(leaves, given, objective=objective, cost=cost)
        want = fused(again, given, objective=objective, cost=dense, impl="reference")
        assert out.cost is not None
        torch.testing.assert_close(out.loss, want.loss, rtol=tolerance, atol=tolerance)
        torch.testing.assert_close(out.cost, want.cost, rtol=tolerance, atol=tolerance)
        assert_all_close(gradients(out.loss, leaves), gradients(want.loss, again), tolerance)


def test_labels_that_are_no_numbers_have_no_transport() -> None:
    given = problem(41)
    cost = NumberCost(values(41))
    out = fused(given.leaves(), given, objective=EMO(0.3), cost=cost, reduction="none")
    text = (given.labels >= 0) & ~cost.is_number[given.labels.clamp(min=0)]
    assert text.any()
    assert out.cost is not None
    assert (out.cost[text] == 0).all()
    torch.testing.assert_close(out.loss[text], out.nll[text])
    assert (out.cost[(given.labels >= 0) & ~text] > 0).all()


def test_elsewhere_and_back() -> None:
    numbers = NumberCost(values(dtype=torch.float32))
    for cost in (numbers, MixedCost(numbers, EmbeddingCost(torch.randn(7, 2)))):
        wide = cost.to(torch.float64)
        assert wide.dtype == torch.float64
        torch.testing.assert_close(wide.dense().float(), cost.dense())
        assert torch.equal(pickle.loads(pickle.dumps(cost)).dense(), cost.dense())
        assert "numbers=5" in repr(cost)


def test_refusals() -> None:
    for bad, message in (
        (torch.full((3,), math.nan), "none of the 3 values is a number"),
        (torch.ones(2, 2), r"shape \(2, 2\)"),
        (torch.tensor([1.0, math.inf]), "inf at token 1"),
    ):
        with pytest.raises(ValueError, match=message):
            NumberCost(bad)
    with pytest.raises(TypeError, match="floating"):
        NumberCost(torch.arange(3))
    for text in (0.0, -1.0, math.nan):
        with pytest.raises(ValueError, match="text"):
            NumberCost(values(), text=text)
    with pytest.raises(ValueError, match="7 tokens, the other cost over 3"):
        MixedCost(NumberCost(values()), EmbeddingCost(torch.eye(3)))
    with pytest.raises(TypeError, match="EmbeddingCost and NumberCost, expected a NumberCost and another"):
        MixedCost(EmbeddingCost(torch.eye(7)), NumberCost(values()))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="no transpose"):
        _ = NumberCost(values()).T
    assert NumberCost(torch.tensor([3.0, math.nan])).rows(torch.tensor([0])).tolist() == [[0.0, pytest.approx(1.01)]]


def tokenizer(words: list[str]) -> Any:
    transformers = pytest.importorskip("transformers")
    from tokenizers import Tokenizer, models

    vocabulary = {word: i for i, word in enumerate(words)}
    return transformers.PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel(vocabulary, words[0])))


DIGITS = [*map(str, range(10))]


def test_costs_of_digits_do_not_depend_on_the_other_tokens() -> None:
    """One weight means the same with every tokenizer: the published costs of digits, and one price of text."""
    expected = (torch.arange(10.0)[:, None] - torch.arange(10.0)).abs()
    for others in (
        [],
        ["100"],
        ["\uff11\uff10", "\uff12\uff10"],
        [*map(str, range(10, 1000)), "66666666"],
        ["-7", "ten"],
    ):
        words = ["a", *DIGITS, *others]
        given = {len(words) - 1: 10.0} if "ten" in others else None
        cost = NumberCost.from_tokenizer(tokenizer(words), values=given)
        rows = cost.rows(torch.arange(1, 11))
        torch.testing.assert_close(rows[:, 1:11], expected, rtol=0, atol=0)
        torch.testing.assert_close(rows[:, 0], torch.full((10,), 9.09))
        assert (rows[:, cost.is_number] < cost.text).all()
        assert not cost.is_number[[word.startswith("\uff11") for word in words]].any()
        assert MixedCost(cost, EmbeddingCost(torch.randn(len(words), 3))).scale == pytest.approx(1 / 9)


def test_a_factor_of_ten_costs_as_much_as_all_digits_of_a_place() -> None:
    words = ["a", "5", "12", "100", "200", "900", "999", "1000", "-100"]
    cost = NumberCost.from_tokenizer(tokenizer(words))
    rows = cost.rows(torch.arange(len(words)))
    for a, b, expected in (
        ("100", "900", 9 * math.log10(9)), ("100", "200", 9 * math.log10(2)), ("100", "1000", 9.0),
        ("5", "12", 4 + 9 * math.log10(12 / 9)), ("5", "999", 9.0), ("100", "-100", 9.0), ("999", "a", 9.09),
    ):  # fmt: skip
        assert float(rows[words.index(a), words.index(b)]) == pytest.approx(expected, rel=1e-5), (a, b)
    bent = NumberCost.from_tokenizer(tokenizer(words), form="mse")
    assert bent.text == pytest.approx(1.01 * 81)
    assert NumberCost.from_tokenizer(tokenizer(words), squash=5.0).settings["scaling"] == "absolute"


def test_the_loss_from_logits_is_that_of_the_cost() -> None:
    """With the scaling of the cost alone: no statistic of the vocabulary has a say in the price of text."""
    words = ["a", "b", *map(str, range(200)), "66666666"]
    numbers = NumberCost.from_tokenizer(tokenizer(words))
    logits = torch.randn(9, len(words), generator=torch.Generator().manual_seed(0))
    logits[:, :2] += 5.0  # about half of the mass
    labels = torch.tensor([7, 2, 0, -100, 202, 201, 101, 1, 52])
    given: dict[str, Any] = {"scaling": numbers.settings["scaling"], "reduction": "none"}
    for form in ("wasserstein", "mse"):
        cost = NumberCost.from_tokenizer(tokenizer(words), form=form)
        expected = token_loss(logits, labels, objective=NumberToken(), cost=cost).cost
        found = number_token_loss(logits, labels, numbers.values, form=form, **given)
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
        module = nn.NumberTokenLoss(numbers.values, form=form, **given)
        torch.testing.assert_close(module(logits, labels), expected, rtol=1e-5, atol=1e-5)


def test_the_published_recipe_on_single_digits() -> None:
    """Cross-entropy and 0.3 times the mean over number positions of the loss in |v_j - v_y|: value and gradient."""
    numbers = NumberCost.from_tokenizer(tokenizer(["a", "b", *DIGITS])).to(torch.float64)
    logits = torch.randn(9, 12, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).requires_grad_()
    labels = torch.tensor([7, 2, 0, 1, 1, 11, 0, 1, 5])
    published = cross_entropy(logits, labels) + 0.3 * number_token_loss(logits, labels, numbers.values)
    objective = NumberToken(0.3).per_number(tokens=9, numbers=4)
    ours = token_loss(logits, labels, objective=objective, cost=numbers).loss
    torch.testing.assert_close(ours, published, rtol=1e-12, atol=0)
    assert_all_close(torch.autograd.grad(ours, logits), torch.autograd.grad(published, logits), 1e-12)


def test_values_are_scaled_before_they_are_rounded() -> None:
    given = tokenizer(["a", "256", "257", "16777216", "16777217"])
    for dtype in (torch.bfloat16, torch.float16, torch.float64):
        before = torch.get_default_dtype()
        torch.set_default_dtype(dtype)
        try:
            cost = NumberCost.from_tokenizer(given, scaling="rank")
        finally:
            torch.set_default_dtype(before)
        assert cost.dtype == torch.promote_types(dtype, torch.float32)
        torch.testing.assert_close(cost.rows(torch.tensor([1]))[0, 1:].double(), torch.arange(4).double() / 3)


def test_coverage_says_what_distances_are(capsys: pytest.CaptureFixture[str]) -> None:
    for words in (DIGITS, [*DIGITS, "100"]):
        cost = NumberCost.from_tokenizer(tokenizer(["a", *words]), vocab_size=16)
        assert cost.shape == (16, 16)
        coverage = cost.coverage()
        printed = capsys.readouterr().out
        assert str(coverage) in printed
        assert f"{len(words)} of 16 tokens are numbers" in printed
        assert "distances: form wasserstein, scaling symlog; a token that is no number costs 9.09" in printed
        assert printed.count("scaling") == 1
    with pytest.raises(ValueError, match=r"expected one of NumberCost.from_tokenizer"):
        NumberCost(torch.tensor([1.0])).coverage()
    assert "delta=0.5" in repr(NumberCost(torch.tensor([1.0]), form="huber", delta=0.5))
