"""Costs that are one number per token but in a few columns: every sweep against the formula written out in float64."""

import math
from typing import Any

import pytest
import torch

from otloss import number_token_loss
from otloss.costs import DenseCost
from otloss_llm import EmbeddingCost, MixedCost, NumberCost, NumberToken
from tests.otloss_llm.oracles import OBJECTIVES, Problem, problem
from tests.otloss_llm.scoring import assert_all_close, from_logits, fused, gradients

KERNELS = ["reference", "chunked", "triton"]
VALUES = [math.nan, 0.0, 7.0, 3.5, math.nan]


@pytest.fixture(params=KERNELS)
def impl(request: pytest.FixtureRequest) -> str:
    if request.param == "triton":
        request.getfixturevalue("interpreter")
    return request.param


@pytest.mark.parametrize(
    ("name", "kind"), [("number-token", "numbers"), ("user", "numbers"), ("emo", "mixed"), ("mle", "mixed-dense")]
)
def test_objectives_against_dense_rows(name: str, kind: str, impl: str) -> None:
    """The same costs as a matrix, in float64, by the reference implementation."""
    objective, _ = OBJECTIVES[name]
    for dtype, tolerance in ((torch.float64, 1e-11), (torch.float32, 2e-4)):
        if impl == "triton" and dtype == torch.float64:
            continue
        given = problem(40, dtype=dtype)
        numbers = NumberCost(torch.tensor((VALUES * 9)[:41], dtype=dtype))
        matrix = torch.rand(41, 41, dtype=dtype)
        other = DenseCost(matrix) if kind == "mixed-dense" else EmbeddingCost(given.embedding)
        cost: Any = numbers if kind == "numbers" else MixedCost(numbers, other)
        dense, wide = DenseCost(cost.rows(torch.arange(41)).double()), given.to(torch.float64)
        leaves, again = given.leaves(), wide.leaves()
        out = fused(leaves, given, objective=objective, cost=cost, impl=impl)
        want = fused(again, wide, objective=objective, cost=dense, impl="reference")
        assert out.cost is not None
        made = [out.loss, out.cost, *gradients(out.loss, leaves)]
        assert want.cost is not None
        expected = [want.loss, want.cost, *gradients(want.loss, again)]
        assert_all_close([tensor.double() for tensor in made], expected, tolerance)


@pytest.mark.parametrize("settings", [{}, {"scaling": "log"}, {"scaling": "symlog", "text": 3.0}, {"squash": 4.0}])
def test_it_is_the_loss_from_logits(settings: dict[str, Any]) -> None:
    """`nll + w D` against cross-entropy and `number_token_loss`."""
    given = problem(5)
    values = torch.tensor(([math.nan, 0.0, 7.0, 3.5, math.nan, -2.0, 70.0] * 6)[:41], dtype=torch.float64)
    leaves, again = given.leaves(), given.leaves()
    out = fused(leaves, given, objective=NumberToken(0.3), cost=NumberCost(values, **settings), reduction="sum")
    logits = torch.nn.functional.linear(again[0], again[1], again[2])
    expected = torch.nn.functional.cross_entropy(logits, given.labels, reduction="sum")
    expected = expected + 0.3 * number_token_loss(logits, given.labels, values, reduction="sum", **settings)
    torch.testing.assert_close(out.loss, expected, rtol=1e-11, atol=1e-11)
    assert_all_close(gradients(out.loss, leaves), gradients(expected, again), 1e-11)


@pytest.mark.parametrize("masked", [[0, 4], [2, 3], [0, 2, 3, 4], [3]])
def test_masked_logits_of_text_and_of_numbers(masked: list[int]) -> None:
    """-inf in the bias takes columns out: all of the text, all numbers but the label, single ones."""
    values, bias = torch.tensor(VALUES, dtype=torch.float32), torch.zeros(5)
    bias[masked] = -math.inf
    given = Problem(torch.randn(3, 4), torch.randn(5, 4), bias, torch.tensor([1, 1, 1]), torch.eye(5))
    logits = (given.hidden @ given.weight.T + bias).double()
    absolute: Any = {"scaling": "absolute"}
    expected = number_token_loss(logits, given.labels, values.double(), reduction="none", text=1.01 * 7, **absolute)
    for impl in ("chunked", "reference"):
        cost = NumberCost(values, **absolute)
        out = fused(given.leaves(), given, objective=NumberToken(), cost=cost, impl=impl)
        assert out.cost is not None
        torch.testing.assert_close(out.cost.double(), expected, rtol=1e-5, atol=1e-6)


def test_small_mass_on_text_keeps_its_digits() -> None:
    """Mass of 1e-12: a difference from 1 would be noise in float32."""
    cost = NumberCost(torch.tensor([math.nan, 2.0, 7.0]), text=10.0)
    logits, labels = torch.tensor([[-28.0, 0.0, -60.0], [-60.0, 0.0, -28.0]]), torch.tensor([1, 1])
    for impl in ("logits", "chunked"):
        out = from_logits(logits, labels, impl, objective=NumberToken(), cost=cost)
        torch.testing.assert_close(out.cost, torch.tensor([10.0, 5.0]) * math.exp(-28), rtol=1e-5, atol=0.0)
