"""Costs that are one number per token but in a few columns: every sweep against the formula written out in float64."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from otloss import number_token_loss
from otloss_llm import EMO, NumberCost, NumberToken, linear_token_loss, token_loss
from otloss_llm.costs.vocabulary import FewColumns, VocabularyCost
from tests.otloss_llm.oracles import OBJECTIVES, Problem, problem
from tests.otloss_llm.scoring import assert_all_close, fused, gradients

KERNELS = ["reference", "chunked", "triton"]
VALUES = [math.nan, 0.0, 7.0, 3.5, math.nan]


@pytest.fixture(params=KERNELS)
def impl(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "triton":
        pytest.importorskip("triton")
        monkeypatch.setenv("TRITON_INTERPRET", "1")
    return request.param


class Given(VocabularyCost):
    """A cost whose few columns are as given, whatever the labels."""

    shape, dtype, device = (41, 41), torch.float64, torch.device("cpu")  # type: ignore[assignment]

    def __init__(self, few: FewColumns) -> None:
        self.few = few

    def to(self, *args: Any, **kwargs: Any) -> Given:
        return self

    def for_labels(self, labels: Tensor, shard: Any = None) -> FewColumns:
        return self.few


def few_columns(given: Problem, few: int, *, zeros: bool) -> FewColumns:
    """Random costs, shared by some tokens, of one kind 0 throughout; the label may be in any column."""
    generator = torch.Generator().manual_seed(0)
    tokens = int((given.labels >= 0).sum())
    kinds = tokens // 2 + 1
    costs = torch.rand(kinds, few, generator=generator, dtype=torch.float64) * 3
    rest = torch.rand(kinds, generator=generator, dtype=torch.float64)
    if zeros:
        costs[0], rest[0] = 0.0, 0.0
    columns = torch.randperm(given.weight.shape[0], generator=generator)[:few]
    which = torch.randint(kinds, (tokens,), generator=generator)
    dtype = given.weight.dtype
    return FewColumns(columns, costs.to(dtype), rest.to(dtype), which)


def written_out(given: Problem, few: FewColumns, formula: Any) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Mean value, D and gradients from a dense row for each token, in float64."""
    wide = given.to(torch.float64)
    leaves = wide.leaves()
    hidden, weight, *bias = leaves
    kept = given.labels >= 0
    logits = torch.nn.functional.linear(hidden[kept], weight, bias[0] if bias else None)
    q, y = logits.softmax(-1), given.labels[kept].long()
    costs = few.rest.double()[few.which][:, None].repeat(1, logits.shape[1])
    costs[:, few.columns] = few.costs.double()[few.which]
    transport = (q * costs).sum(-1)
    nll = -logits.log_softmax(-1)[torch.arange(len(y)), y]
    value = formula((-nll).exp(), nll, transport).mean()
    return value.detach(), transport.detach(), gradients(value, leaves)


@pytest.mark.parametrize(("name", "few"), [("emo", 5), ("number-token", 1), ("user", 41), ("mle", 5)])
def test_against_the_formula(name: str, few: int, impl: str) -> None:
    objective, formula = OBJECTIVES[name]
    for dtype, tolerance in ((torch.float64, 1e-11), (torch.float32, 3e-5)):
        if impl == "triton" and dtype == torch.float64:
            continue
        given = problem(3, dtype=dtype)
        rows = few_columns(given, few, zeros=name != "emo")  # whose formula divides by D
        value, transport, expected = written_out(given, rows, formula)
        leaves = given.leaves()
        out = fused(leaves, given, objective=objective, cost=Given(rows), impl=impl)
        assert out.cost is not None
        torch.testing.assert_close(out.loss.double(), value, rtol=tolerance, atol=tolerance)
        torch.testing.assert_close(out.cost[given.labels >= 0].double(), transport, rtol=tolerance, atol=tolerance)
        assert_all_close([gradient.double() for gradient in gradients(out.loss, leaves)], expected, tolerance)


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
    expected = number_token_loss(logits, given.labels, values.double(), reduction="none", text=1.01 * 7)
    for impl in ("chunked", "reference"):
        out = fused(given.leaves(), given, objective=NumberToken(), cost=NumberCost(values), impl=impl)
        assert out.cost is not None
        torch.testing.assert_close(out.cost.double(), expected, rtol=1e-5, atol=1e-6)


def hardly_a_number(z: list[float], y: int, values: list[float]) -> tuple[float, list[float]]:
    """D and its gradient in the logits by the closed form, in Python numbers; text costs 100."""
    numbers = [j for j, v in enumerate(values) if not math.isnan(v)]
    top = max(z)
    total = math.fsum(math.exp(entry - top) for entry in z)
    q = [math.exp(entry - top) / total for entry in z]
    cost = [abs(values[j] - values[y]) if j in numbers else 100.0 for j in range(len(z))]
    text = math.fsum(q[j] for j in range(len(z)) if j not in numbers)
    less = math.fsum(q[j] * (100.0 - cost[j]) for j in numbers)  # 100 - D, without cancellation
    on_numbers = math.fsum(q[j] * cost[j] for j in numbers)
    gradient = [q[j] * (cost[j] - 100.0 + less) if j in numbers else q[j] * less for j in range(len(z))]
    return on_numbers + text * 100.0, gradient


def test_numbers_of_tiny_mass(impl: str) -> None:
    """To the last digit that the mass on numbers has."""
    values, y = [math.nan, 0.0, 5.0, 9.0, math.nan, 9.0], 2
    objectives: Any = (((lambda nll, cost: cost), 0.0), (NumberToken(1.0), 1.0))
    for dtype, gaps in ((torch.float32, (0, 80, 95, 100, 120)), (torch.float64, (0, 700, 720, 740, 800))):
        if impl == "triton" and dtype == torch.float64:
            continue
        cost = NumberCost(torch.tensor(values, dtype=dtype), text=100.0)
        eps, smallest = torch.finfo(dtype).eps, torch.finfo(dtype).tiny
        for gap, (objective, of_nll) in itertools.product(gaps, objectives):
            z = [0.0, -gap + 0.25, -gap - 0.5, -gap + 1.0, 1.0, -math.inf]
            value, expected = hardly_a_number(z, y, values)
            leaf, nothing = torch.tensor(z, dtype=dtype, requires_grad=True), torch.zeros(6, 1, dtype=dtype)
            out = linear_token_loss(
                nothing[:1], nothing, torch.tensor([y]), bias=leaf, objective=objective, cost=cost, impl=impl
            )
            assert out.cost is not None
            assert float(out.cost) == pytest.approx(value, rel=16 * eps)
            got, wide = torch.autograd.grad(out.loss, leaf)[0].double(), leaf.detach().double()
            wanted = wide.new_tensor(expected) + of_nll * (wide.softmax(-1) - wide.new_tensor([0, 0, 1, 0, 0, 0]))
            # Text has the cancelling `100 - D`; numbers have what is representable of their mass.
            bound = wide.new_tensor([1e3 * eps if math.isnan(v) else 1e3 * smallest for v in values])
            off = (got - wanted).abs()
            assert (off <= bound + 8 * eps * (1 + gap) * wanted.abs()).all(), (dtype, gap, got, wanted)


def test_small_mass_on_text_keeps_its_digits() -> None:
    """Mass of 1e-12: a difference from 1 would be noise in float32."""
    cost = NumberCost(torch.tensor([math.nan, 2.0, 7.0]), text=10.0)
    logits, labels = torch.tensor([[-28.0, 0.0, -60.0], [-60.0, 0.0, -28.0]]), torch.tensor([1, 1])
    given = Problem(logits, torch.eye(3), None, labels, torch.eye(3))
    for out in (
        token_loss(logits, labels, objective=NumberToken(), cost=cost),
        fused([logits, torch.eye(3)], given, objective=NumberToken(), cost=cost),
    ):
        assert out.cost is not None
        torch.testing.assert_close(out.cost, torch.tensor([10.0, 5.0]) * math.exp(-28), rtol=1e-5, atol=0.0)


@pytest.mark.parametrize("labels", [[-100, -100], [0, 0]])
def test_no_labels_and_labels_of_text_only(labels: list[int]) -> None:
    cost = NumberCost(torch.tensor([math.nan, 0.0, 7.0]))
    given = Problem(torch.randn(2, 3), torch.randn(3, 3), None, torch.tensor(labels), torch.eye(3))
    leaves = given.leaves()
    out = fused(leaves, given, objective=NumberToken(), cost=cost)
    assert out.cost is not None
    assert not out.cost.any()
    torch.testing.assert_close(out.loss, fused(given.leaves(), given, objective=EMO(0.0), cost=cost).loss)
    assert all(gradient.isfinite().all() for gradient in gradients(out.loss, leaves))
