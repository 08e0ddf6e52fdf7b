"""NumberCost and MixedCost: the rows written out once more, and through the fused loss with every objective."""

from __future__ import annotations

import math
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor

from otloss.costs import Cost, DenseCost
from otloss_llm import EMO, EmbeddingCost, MixedCost, NumberCost
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
