"""Every gradient of every function, against finite differences with their size (see `gradient_cases`).

Errors are relative to the largest slope of that input (of at least 1e-3, costs being about 1): at most 2e-5 in float64
and 2e-3 in float32.
"""

from __future__ import annotations

from functools import cache

import pytest
import torch

from otloss.solvers import line as _onedim
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
    transport_case,
)

TOLERANCE = {torch.float64: 2e-5, torch.float32: 2e-3}
# What has no implicit derivatives in the weights at 1 % of the range: S(p, p) hardly moves mass between bins, save
# between neighbours on a line. All else has them.
REFUSED = {("divergence", name) for name in COSTS if not name.startswith("line")}


def compare(case: Case, truth: Inputs, dtype: torch.dtype, *, skip: tuple[str, ...] = ()) -> None:
    for name, gradient in gradients(case, dtype, skip=skip).items():
        if name in WEIGHTS and case.held:
            assert float(gradient.mean(-1).abs().max()) < 1e-6, f"the gradient in {name} is not centred"
            heaviest = case.inputs[name].argmax(-1, keepdim=True)
            gradient = gradient - gradient.gather(-1, heaviest)
        error = float((gradient - truth[name]).abs().max() / truth[name].abs().max().clamp(min=1e-3))
        assert error < TOLERANCE[dtype], f"relative error {error:.2g} in {name}:\n{gradient}\n{truth[name]}"


@pytest.mark.parametrize("name", COSTS)
@pytest.mark.parametrize("function", PLAIN)
def test_exact_and_bounds(function: str, name: str) -> None:
    if function == "residual" and name not in SQUARE:
        pytest.skip("needs the same bins on both sides")
    # The relaxed bound jumps where a bin gets its first mass.
    case = transport_case(PLAIN[function], name, empty=function != "lower", as_given=function == "lower")
    truth = {key: finite_differences(case, key) for key in case.inputs}
    for dtype in TOLERANCE:
        compare(case, truth, dtype)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("name", CLOSED_FORMS)
def test_closed_forms(name: str, compiled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if compiled and name in ("circle", "tree"):
        pytest.skip("has no compiled form")
    make, value = CLOSED_FORMS[name]
    case = Case(make(), value, value)
    truth = {key: finite_differences(case, key) for key in case.inputs}
    if name == "tree":
        assert truth["length"][2] == 0  # of the root
    if compiled:
        monkeypatch.setattr(_onedim, "_SMALL", 0)
    for dtype in TOLERANCE:
        compare(case, truth, dtype)


@cache
def entropic_truth(function: str, name: str, share: float, reach: float | None) -> Inputs:
    case = entropic_case(function, name, share, reach, "envelope")
    return {key: finite_differences(case, key) for key in case.inputs}


@pytest.mark.parametrize("grad", ["envelope", "implicit"])
@pytest.mark.parametrize("share", [0.01, 1.0])
@pytest.mark.parametrize("reach", [None, 0.5])
@pytest.mark.parametrize("name", COSTS)
@pytest.mark.parametrize("function", ENTROPIC)
def test_entropic(function: str, name: str, reach: float | None, share: float, grad: str) -> None:
    case = entropic_case(function, name, share, reach, grad)
    for dtype in TOLERANCE:
        if function == "linear_cost" and grad == "envelope":
            with pytest.raises(RuntimeError, match="implicit"):
                gradients(case, dtype)
            continue
        truth = entropic_truth(function, name, share, reach)
        if (grad, share, reach) != ("implicit", 0.01, None) or (function, name) not in REFUSED:
            compare(case, truth, dtype)
            continue
        with pytest.raises(RuntimeError, match="singular to rounding"):
            gradients(case, dtype)
        if set(truth) > set(WEIGHTS):  # the derivatives in the cost alone are not refused
            compare(case, truth, dtype, skip=WEIGHTS)


@pytest.mark.parametrize(
    ("function", "name", "reach"),
    [
        ("sinkhorn", "matrix", None),
        ("sinkhorn", "sqeuclidean", 0.5),
        ("linear_cost", "one matrix", 0.5),
        ("linear_cost", "sqeuclidean", None),
        ("divergence", "sqeuclidean", 0.5),
        ("divergence", "line", None),
    ],
)
def test_unrolled(function: str, name: str, reach: float | None) -> None:
    case = entropic_case(function, name, 0.3, reach, "unrolled", empty=False)
    truth = {key: finite_differences(case, key) for key in case.inputs}
    for dtype in TOLERANCE:
        compare(case, truth, dtype)


def test_unrolled_refuses_slopes_at_empty_bins() -> None:
    with pytest.raises(ValueError, match="bins without mass"):
        gradients(entropic_case("sinkhorn", "matrix", 0.3, None, "unrolled"), torch.float64)


@pytest.mark.parametrize("per", ["tensor", "mean_cost"])
@pytest.mark.parametrize(
    ("function", "name", "reach", "grad"),
    [
        ("sinkhorn", "matrix", None, "envelope"),
        ("sinkhorn", "sqeuclidean", 0.5, "envelope"),
        ("sinkhorn", "grid", None, "implicit"),
        ("sinkhorn", "euclidean", None, "unrolled"),
        ("linear_cost", "one matrix", 0.5, "implicit"),
        ("linear_cost", "cosine points", None, "unrolled"),
        ("divergence", "matrix", None, "envelope"),
        ("divergence", "sqeuclidean", 0.5, "envelope"),
        ("divergence", "one cloud", None, "implicit"),
    ],
)
def test_epsilon(function: str, name: str, reach: float | None, grad: str, per: str) -> None:
    """As a tensor it has a gradient of its own; as a share of the mean cost it is part of the gradient in the cost."""
    case = entropic_case(function, name, 0.3, reach, grad, per=per, empty=grad != "unrolled")
    assert ("epsilon" in case.inputs) == (per == "tensor")
    truth = {key: finite_differences(case, key) for key in case.inputs}
    for dtype in TOLERANCE:
        compare(case, truth, dtype)
