"""Costs that are one number per token but in a few columns: every sweep against the formula written out in float64."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from otloss import number_token_loss
from otloss.costs import Cost
from otloss_llm import EMO, NumberCost, NumberToken, TokenLoss, linear_token_loss, token_loss
from otloss_llm.costs.few_columns import FewColumns
from tests.otloss_llm.oracles import OBJECTIVES, Problem, problem
from tests.otloss_llm.scoring import assert_all_close, fused, gradients

FORMS = ["wasserstein", "mse", "mae", "huber"]
KERNELS = ["reference", "chunked", "triton"]


class Given(Cost):
    """A cost whose few columns are as given, whatever the labels."""

    def __init__(self, vocab: int, few: FewColumns) -> None:
        self.vocab, self.few = vocab, few

    shape = property(lambda self: (self.vocab, self.vocab))  # type: ignore[assignment]
    _data = property(lambda self: self.few.rows)  # type: ignore[assignment]
    T = property(lambda self: self)  # type: ignore[assignment]

    def rows(self, index: Tensor) -> Tensor:
        raise AssertionError("no row over the whole vocabulary is to be made")

    def few_columns(self, labels: Tensor, valid: Tensor) -> FewColumns:
        return self.few


def few_columns(given: Problem, few: int, *, zeros: bool) -> FewColumns:
    """Random rows, shared by some tokens, one of them 0 throughout; the label may be in any column."""
    generator = torch.Generator().manual_seed(0)
    vocab, tokens = given.weight.shape[0], int((given.labels >= 0).sum())
    kinds = tokens // 2 + 1
    rows = torch.rand(kinds, few, generator=generator, dtype=torch.float64) * 3
    rest = torch.rand(kinds, generator=generator, dtype=torch.float64)
    if zeros:
        rows[0], rest[0] = 0.0, 0.0
    columns = torch.randperm(vocab, generator=generator)[:few]
    which = torch.randint(kinds, (tokens,), generator=generator)
    dtype = given.weight.dtype
    return FewColumns(columns, rows.to(dtype), rest.to(dtype), which)


def written_out(given: Problem, few: FewColumns, formula: Any) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Mean value, D and gradients from a dense row for each token, in float64."""
    wide = given.to(torch.float64)
    leaves = wide.leaves()
    hidden, weight, *bias = leaves
    kept = given.labels >= 0
    logits = torch.nn.functional.linear(hidden[kept], weight, bias[0] if bias else None)
    q, y = logits.softmax(-1), given.labels[kept].long()
    costs = few.rest.double()[few.which][:, None].repeat(1, logits.shape[1])
    costs[:, few.columns] = few.rows.double()[few.which]
    transport = (q * costs).sum(-1)
    nll = -logits.log_softmax(-1)[torch.arange(len(y)), y]
    value = formula((-nll).exp(), nll, transport).mean()
    return value.detach(), transport.detach(), gradients(value, leaves)


@pytest.mark.parametrize("few", [1, 5, 41])
@pytest.mark.parametrize("impl", KERNELS)
@pytest.mark.parametrize("name", ["emo", "number-token", "user", "mle"])
def test_against_the_formula(monkeypatch: pytest.MonkeyPatch, name: str, impl: str, few: int) -> None:
    if impl == "triton":
        pytest.importorskip("triton")
        monkeypatch.setenv("TRITON_INTERPRET", "1")
    objective, formula = OBJECTIVES[name]
    for dtype, tolerance in ((torch.float64, 1e-11), (torch.float32, 3e-5)):
        if impl == "triton" and dtype == torch.float64:
            continue
        given = problem(3, dtype=dtype)
        rows = few_columns(given, few, zeros=name != "emo")  # whose formula divides by D
        value, transport, expected = written_out(given, rows, formula)
        leaves = given.leaves()
        out = fused(leaves, given, objective=objective, cost=Given(41, rows), impl=impl)
        assert out.cost is not None
        torch.testing.assert_close(out.loss.double(), value, rtol=tolerance, atol=tolerance)
        torch.testing.assert_close(out.cost[given.labels >= 0].double(), transport, rtol=tolerance, atol=tolerance)
        got = [gradient.double() for gradient in gradients(out.loss, leaves)]
        assert_all_close(got, expected, tolerance)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("impl", KERNELS)
def test_every_form_is_that_of_the_loss_from_logits(monkeypatch: pytest.MonkeyPatch, impl: str, form: str) -> None:
    """`nll + w D` against cross-entropy and `number_token_loss`, which bends the mean by autograd."""
    if impl == "triton":
        pytest.importorskip("triton")
        monkeypatch.setenv("TRITON_INTERPRET", "1")
    dtype, tolerance = (torch.float32, 3e-5) if impl == "triton" else (torch.float64, 1e-11)
    values = torch.tensor(([math.nan, 0.0, 7.0, 3.5, math.nan, -2.0, 7.0] * 6)[:41], dtype=dtype)
    all_settings: list[dict[str, Any]] = [{}, {"scaling": "log"}, {"scaling": "rank", "text": 3.0}]
    for settings in all_settings + ([{"delta": 0.5}] if form == "huber" else []):
        given = problem(5, dtype=dtype)
        leaves, again = given.leaves(), given.leaves()
        cost = NumberCost(values, form=form, **settings)
        out = fused(leaves, given, objective=NumberToken(0.3), cost=cost, impl=impl, reduction="sum")
        logits = torch.nn.functional.linear(again[0], again[1], again[2])
        expected = torch.nn.functional.cross_entropy(logits, given.labels, reduction="sum")
        expected = expected + 0.3 * number_token_loss(
            logits, given.labels, values, form=form, reduction="sum", **settings
        )
        torch.testing.assert_close(out.loss, expected, rtol=tolerance, atol=tolerance)
        assert_all_close(gradients(out.loss, leaves), gradients(expected, again), tolerance)


def test_second_derivatives_of_the_specification() -> None:
    values = torch.tensor([math.nan, 0.0, 7.0, 3.5, -2.0], dtype=torch.float64)
    labels = torch.tensor([1, 2, 0])
    logits = torch.randn(3, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).requires_grad_()
    for form in FORMS:
        cost = NumberCost(values, form=form)

        def loss(z: Tensor, cost: NumberCost = cost) -> Tensor:
            return token_loss(z, labels, objective=NumberToken(), cost=cost).loss

        assert torch.autograd.gradcheck(loss, logits)
        assert torch.autograd.gradgradcheck(loss, logits)


@pytest.mark.parametrize("impl", ["chunked", "reference"])
def test_masked_logits_of_text_and_of_numbers(impl: str) -> None:
    """-inf in the bias takes columns out: all of the text, all numbers but the label, single ones."""
    values = torch.tensor([math.nan, 0.0, 7.0, 3.5, math.nan], dtype=torch.float32)
    hidden, weight = torch.randn(3, 4), torch.randn(5, 4)
    labels = torch.tensor([1, 1, 1])
    for masked in ([0, 4], [2, 3], [0, 2, 3, 4], [3]):
        bias = torch.zeros(5)
        bias[masked] = -math.inf
        given = Problem(hidden, weight, bias, labels, weight)
        out = fused(given.leaves(), given, objective=NumberToken(), cost=NumberCost(values), impl=impl)
        logits = (hidden @ weight.T + bias).double()
        expected = number_token_loss(logits, labels, values.double(), reduction="none", text=1.01 * 7)
        assert out.cost is not None
        torch.testing.assert_close(out.cost.double(), expected, rtol=1e-5, atol=1e-6)


def test_small_masses_keep_their_digits() -> None:
    """Mass of 1e-12 on text, and on numbers: a difference from 1 would be noise in float32."""
    values = torch.tensor([math.nan, 2.0, 7.0])
    cost = NumberCost(values, text=10.0)
    logits = torch.tensor([[-28.0, 0.0, -60.0], [-60.0, 0.0, -28.0]])
    for out in (
        token_loss(logits, torch.tensor([1, 1]), objective=NumberToken(), cost=cost),
        fused([logits, torch.eye(3)], Problem(logits, torch.eye(3), None, torch.tensor([1, 1]), torch.eye(3)),
              objective=NumberToken(), cost=cost),
    ):  # fmt: skip
        assert isinstance(out, TokenLoss)
        assert out.cost is not None
        torch.testing.assert_close(out.cost, torch.tensor([10.0, 5.0]) * math.exp(-28), rtol=1e-5, atol=0.0)


def hardly_a_number(z: list[float], y: int, values: list[float], form: str) -> tuple[float, list[float]]:
    """D and its slopes in the logits by the closed form, in Python numbers; text is charged 100, huber bends at 1."""
    numbers = [j for j, v in enumerate(values) if not math.isnan(v)]
    top, top_number = max(z), max(z[j] for j in numbers)
    total = math.fsum(math.exp(entry - top) for entry in z)
    q = [math.exp(entry - top) / total for entry in z]
    p = {j: math.exp(z[j] - top_number) for j in numbers}
    p = {j: mass / math.fsum(p.values()) for j, mass in p.items()}
    gap = {j: values[j] - values[y] for j in numbers}
    if form == "wasserstein":
        gap = {j: abs(g) for j, g in gap.items()}
    mean = math.fsum(p[j] * gap[j] for j in numbers)
    bent = 0.5 * mean * mean if abs(mean) <= 1 else abs(mean) - 0.5
    sign = math.copysign(1.0, mean)
    value, slope = {
        "wasserstein": (mean, 1.0),
        "mse": (mean * mean, 2 * mean),
        "mae": (abs(mean), sign),
        "huber": (bent, min(1.0, max(-1.0, mean))),
    }[form]
    few = math.fsum(q[j] for j in numbers)
    text = math.fsum(q[j] for j in range(len(z)) if j not in numbers)
    slopes = [
        q[j] * (slope * (gap[j] - mean) - text * (100.0 - value)) if j in numbers else q[j] * few * (100.0 - value)
        for j in range(len(z))
    ]
    return few * value + text * 100.0, slopes


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("impl", ["logits", *KERNELS])
def test_numbers_of_subnormal_mass(monkeypatch: pytest.MonkeyPatch, impl: str, form: str) -> None:
    """To the last digit that the mass on numbers has: a mean of `q / sum q` would overflow in the backward pass."""
    if impl == "triton":
        pytest.importorskip("triton")
        monkeypatch.setenv("TRITON_INTERPRET", "1")
    values, y = [math.nan, 0.0, 5.0, 9.0, math.nan, 9.0], 2
    objectives: Any = (((lambda nll, cost: cost), 0.0), (NumberToken(1.0), 1.0))
    for dtype, gaps in ((torch.float32, (0, 80, 95, 100, 120)), (torch.float64, (0, 700, 720, 740, 800))):
        if impl == "triton" and dtype == torch.float64:
            continue
        cost = NumberCost(torch.tensor(values, dtype=dtype), form=form, text=100.0)
        eps, smallest = torch.finfo(dtype).eps, torch.finfo(dtype).tiny
        for gap, (objective, of_nll) in itertools.product(gaps, objectives):
            z = [0.0, -gap + 0.25, -gap - 0.5, -gap + 1.0, 1.0, -math.inf]
            value, slopes = hardly_a_number(z, y, values, form)
            leaf, label = torch.tensor(z, dtype=dtype, requires_grad=True), torch.tensor([y])
            if impl == "logits":
                out = token_loss(leaf[None], label, objective=objective, cost=cost)
            else:
                nothing = torch.zeros(6, 1, dtype=dtype)
                out = linear_token_loss(
                    nothing[:1], nothing, label, bias=leaf, objective=objective, cost=cost, impl=impl
                )
            assert out.cost is not None
            assert float(out.cost) == pytest.approx(value, rel=16 * eps)
            got = torch.autograd.grad(out.loss, leaf)[0].double()
            wide = leaf.detach().double()
            wanted = wide.new_tensor(slopes) + of_nll * (wide.softmax(-1) - wide.new_tensor([0, 0, 1, 0, 0, 0]))
            # Text has the cancelling `100 - D`; numbers have what is representable of their mass.
            bound = wide.new_tensor([1e3 * eps if math.isnan(v) else 1e3 * smallest for v in values])
            off = (got - wanted).abs()
            assert (off <= bound + 8 * eps * (1 + gap) * wanted.abs()).all(), (dtype, gap, got, wanted)


def test_nan_and_infinity_are_refused() -> None:
    values = torch.tensor([math.nan, 0.0, 7.0])
    for column in range(3):
        for bad, message in ((math.nan, "hidden holds.*nan"), (math.inf, "hidden holds.*inf")):
            hidden = torch.zeros(2, 3)
            hidden[1, column] = bad
            given = Problem(hidden, torch.eye(3), None, torch.tensor([1, 2]), torch.eye(3))
            with pytest.raises(ValueError, match=message):
                fused(given.leaves(), given, objective=NumberToken(), cost=NumberCost(values))


def test_no_labels_and_labels_of_text_only() -> None:
    values = torch.tensor([math.nan, 0.0, 7.0])
    for labels in (torch.full((2,), -100), torch.tensor([0, 0])):
        given = Problem(torch.randn(2, 3), torch.randn(3, 3), None, labels, torch.eye(3))
        leaves = given.leaves()
        out = fused(leaves, given, objective=NumberToken(), cost=NumberCost(values))
        assert out.cost is not None
        assert not out.cost.any()
        plain = fused(given.leaves(), given, objective=EMO(0.0), cost=NumberCost(values))
        torch.testing.assert_close(out.loss, plain.loss)
        assert all(gradient.isfinite().all() for gradient in gradients(out.loss, leaves))


def test_emo_by_ratio_is_refused_where_text_has_no_cost() -> None:
    """D is 0 at every label that is text: the ratio would halve the nll there, and the other mode drop it."""
    cost = NumberCost(torch.tensor([1.0, 2.0, math.nan]))
    for weighting in ("ratio", "transport"):
        with pytest.raises(ValueError, match="would hardly train text; use MixedCost"):
            token_loss(torch.zeros(2, 3), torch.tensor([0, 2]), objective=EMO(weighting), cost=cost)
    out = token_loss(torch.zeros(2, 3), torch.tensor([0, 2]), objective=EMO(0.5), cost=cost, reduction="none")
    assert float(out.loss[1]) == pytest.approx(math.log(3))


def test_forms_that_bend_the_mean_have_no_rows() -> None:
    cost = NumberCost(torch.tensor([1.0, math.nan]), form="mse")
    with pytest.raises(ValueError, match='form="mse" charges the mean number and has no cost of single tokens'):
        cost.rows(torch.tensor([0]))
