"""Every gradient of every function, against finite differences with their size, and second derivatives.

Errors are relative to the largest gradient of that input (of at least 1e-3, costs being about 1): at most 2e-5 in
float64 and 2e-3 in float32. Second derivatives are right, or an error, never with a term left out.
"""

from contextlib import nullcontext

import numpy as np
import pytest
import torch
from torch import Tensor

import otloss
from otloss.solvers.options import Penalty
from tests.otloss.gradient_cases import (
    CLOSED_FORMS,
    COSTS,
    ENTROPIC,
    PLAIN,
    SQUARE,
    WEIGHTS,
    Case,
    Inputs,
    entropic_case,
    finite_differences,
    gradients,
    loss,
    transport_case,
)
from tests.samples import sampled

TOLERANCE = {torch.float64: 2e-5, torch.float32: 2e-3}


def truth_of(case: Case) -> Inputs:
    return {name: finite_differences(case, name) for name in case.inputs}


def check(case: Case, truth: Inputs | None = None) -> None:
    truth = truth or truth_of(case)
    for dtype in TOLERANCE:
        compare(case, truth, dtype)


def compare(case: Case, truth: Inputs, dtype: torch.dtype, *, skip: tuple[str, ...] = ()) -> None:
    for name, gradient in gradients(case, dtype, skip=skip).items():
        if name in WEIGHTS and case.held:
            assert float(gradient.mean(-1).abs().max()) < 1e-6, f"the gradient in {name} is not centred"
            heaviest = case.inputs[name].argmax(-1, keepdim=True)
            gradient = gradient - gradient.gather(-1, heaviest)
        error = float((gradient - truth[name]).abs().max() / truth[name].abs().max().clamp(min=1e-3))
        assert error < TOLERANCE[dtype], f"relative error {error:.2g} in {name}:\n{gradient}\n{truth[name]}"


# Each cost with the exact solver and the lower bound, which differs by cost; the others with every second one: their
# gradients in p, q and C are made apart from the cost's own.
_EXACT = [(function, name) for function in ("emd", "lower") for name in COSTS] + [
    (function, name)
    for k, function in enumerate(("solve", "independent", "residual", "best"))
    for name in (SQUARE if function == "residual" else list(COSTS))[k % 2 :: 2]
]


@pytest.mark.parametrize(("function", "name"), _EXACT)
def test_exact_and_bounds(function: str, name: str) -> None:
    # The relaxed bound jumps where a bin gets its first mass.
    check(transport_case(PLAIN[function], name, empty=function != "lower", as_given=function == "lower"))


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("name", CLOSED_FORMS)
def test_closed_forms(name: str, compiled: bool, request: pytest.FixtureRequest) -> None:
    if compiled and name in ("circle", "tree"):
        pytest.skip("has no compiled form")
    make, value = CLOSED_FORMS[name]
    case = Case(make(), value, value)
    truth = truth_of(case)
    if compiled:
        request.getfixturevalue("small_blocks")
    check(case, truth)


# Pairwise: every two of function, cost, penalty, share and grad meet, and every function meets every cost.
_SETTINGS = [
    (None, 0.01, "envelope"),
    ((None, 0.5), 1.0, "envelope"),
    ((0.5, 2.0), 0.01, "implicit"),
    (None, 1.0, "implicit"),
]
_NO_GRADIENT = ("linear_cost", "envelope")
_ENTROPIC = [
    (function, name, *_SETTINGS[(i + k) % 4])
    for i, function in enumerate(ENTROPIC)
    for j, name in enumerate(COSTS)
    for k in ((j, j + 2) if function == "sinkhorn" else (j,))
]
_ENTROPIC = sampled(len(_ENTROPIC) // 2, _ENTROPIC[::2] + _ENTROPIC[1::2])


@pytest.mark.parametrize(("function", "name", "marginal_penalty", "share", "grad"), _ENTROPIC)
def test_entropic(function: str, name: str, marginal_penalty: Penalty, share: float, grad: str) -> None:
    case = entropic_case(function, name, share, marginal_penalty, grad)
    with pytest.raises(RuntimeError, match="implicit") if (function, grad) == _NO_GRADIENT else nullcontext():
        check(case)


@pytest.mark.parametrize("marginal_penalty", [None, 0.5])
@pytest.mark.parametrize("name", ["matrix", "one cloud"])
def test_implicit_gradients_where_bins_hardly_exchange_mass(name: str, marginal_penalty: Penalty) -> None:
    """S(p, p) at 1 % of the range hardly moves mass between bins, but has one potential on both sides."""
    case = entropic_case("divergence", name, 0.01, marginal_penalty, "implicit")
    check(case)
    second_derivatives_are_right(case)


def test_implicit_gradients_of_weights_that_rounding_decides_raise() -> None:
    """The derivatives in the cost alone are still right."""
    cost = 1 - torch.eye(3, dtype=torch.float64)
    p = torch.full((3,), 1 / 3, dtype=torch.float64)
    with pytest.raises(RuntimeError, match="singular to rounding"):
        otloss.sinkhorn(p.requires_grad_(), p.detach(), cost, epsilon=0.01, grad="implicit")
    cost.requires_grad_()
    otloss.sinkhorn(p.detach(), p.detach(), cost, epsilon=0.01, grad="implicit").backward()
    torch.testing.assert_close(cost.grad, torch.eye(3, dtype=torch.float64) / 3)


@pytest.mark.parametrize(
    ("function", "name", "marginal_penalty", "grad", "per"),
    [
        ("sinkhorn", "matrix", None, "envelope", "tensor"),
        ("sinkhorn", "sqeuclidean", 0.5, "envelope", "mean_cost"),
        ("sinkhorn", "grid", None, "implicit", "tensor"),
        ("linear_cost", "one matrix", 0.5, "implicit", "tensor"),
        ("linear_cost", "one matrix", None, "implicit", "mean_cost"),
        ("divergence", "matrix", None, "envelope", "mean_cost"),
        ("sinkhorn", "matrix", (0.5, None), "envelope", "tensor"),
        ("divergence", "sqeuclidean", (0.5, None), "envelope", "tensor"),
        ("divergence", "one cloud", None, "implicit", "mean_cost"),
    ],
)
def test_epsilon(function: str, name: str, marginal_penalty: Penalty, grad: str, per: str) -> None:
    case = entropic_case(function, name, 0.3, marginal_penalty, grad, per=per)
    assert ("epsilon" in case.inputs) == (per == "tensor")
    check(case)


def second_derivatives_are_right(case: Case) -> None:
    """The derivatives of `sum of gradient * direction` against central differences of the gradients."""
    generator = torch.Generator().manual_seed(9)
    directions = {k: torch.rand(t.shape, generator=generator, dtype=t.dtype) for k, t in case.inputs.items()}

    def derivatives(inputs: Inputs, create_graph: bool) -> tuple[Inputs, Tensor]:
        leaves = {name: tensor.clone().requires_grad_() for name, tensor in inputs.items()}
        actual = torch.autograd.grad(loss(case.value(leaves)), list(leaves.values()), create_graph=create_graph)
        return leaves, torch.stack([(g * directions[k]).sum() for k, g in zip(leaves, actual, strict=True)]).sum()

    leaves, along = derivatives(case.inputs, True)
    actual = torch.autograd.grad(along, list(leaves.values()), allow_unused=True)
    for (name, point), gradient in zip(case.inputs.items(), actual, strict=True):
        way = torch.rand(point.shape, generator=generator, dtype=point.dtype) * (point > 0 if name in WEIGHTS else 1)
        if name in WEIGHTS and case.held:
            way = way - (point > 0) * way.sum(-1, keepdim=True) / (point > 0).sum(-1, keepdim=True)
        ahead, behind = (float(derivatives({**case.inputs, name: point + h * way}, False)[1]) for h in (1e-5, -1e-5))
        expected = (ahead - behind) / 2e-5
        analytic = 0.0 if gradient is None else float((gradient * way).sum())
        np.testing.assert_allclose(analytic, expected, rtol=1e-4, atol=1e-4, err_msg=f"second derivative in {name}")


# Pairwise over function, cost and penalty; "one cloud" twice in a cost has no unambiguous direction.
_COSTS = [name for name in COSTS if name != "one cloud"]
_PAIRS = [(function, name, (i + j) % 2) for i, function in enumerate(ENTROPIC) for j, name in enumerate(_COSTS)]
_IMPLICIT = [(function, name, (None, (0.5, 2.0))[which]) for function, name, which in _PAIRS]
_IMPLICIT = sampled(len(_IMPLICIT) // 3, [case for k in range(3) for case in _IMPLICIT[k::3]])


@pytest.mark.parametrize(("function", "name", "marginal_penalty"), _IMPLICIT)
def test_entropic_second_derivatives(function: str, name: str, marginal_penalty: Penalty) -> None:
    second_derivatives_are_right(entropic_case(function, name, 0.3, marginal_penalty, "implicit"))


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("name", CLOSED_FORMS)
def test_second_derivatives_of_closed_forms(name: str, compiled: bool, request: pytest.FixtureRequest) -> None:
    if compiled:
        request.getfixturevalue("small_blocks")
    make, value = CLOSED_FORMS[name]
    second_derivatives_are_right(Case(make(), value, value))


BOUNDS = [("independent", "matrix"), ("independent", "euclidean"), ("residual", "cosine"), ("residual", "line")]


@pytest.mark.parametrize(("function", "name"), [*BOUNDS, ("best", "l1"), ("emd", "sqeuclidean")])
def test_second_derivatives_of_bounds_and_none_of_exact_transport(function: str, name: str) -> None:
    with pytest.raises(RuntimeError, match="second derivative") if function == "emd" else nullcontext():
        second_derivatives_are_right(transport_case(PLAIN[function], name))
