"""Second derivatives: right, or refused, never with a term left out."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

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
    loss,
    transport_case,
    weights,
)


def second_derivatives_are_right(case: Case) -> None:
    """The slopes of `sum of gradient * direction` against central differences of the gradients."""
    generator = torch.Generator().manual_seed(9)
    directions = {k: torch.rand(t.shape, generator=generator, dtype=t.dtype) for k, t in case.inputs.items()}

    def slopes(inputs: Inputs, create_graph: bool) -> tuple[Inputs, Tensor]:
        leaves = {name: tensor.clone().requires_grad_() for name, tensor in inputs.items()}
        found = torch.autograd.grad(loss(case.value(leaves)), list(leaves.values()), create_graph=create_graph)
        return leaves, torch.stack([(g * directions[k]).sum() for k, g in zip(leaves, found, strict=True)]).sum()

    leaves, along = slopes(case.inputs, True)
    found = torch.autograd.grad(along, list(leaves.values()), allow_unused=True)
    for (name, point), gradient in zip(case.inputs.items(), found, strict=True):
        way = torch.rand(point.shape, generator=generator, dtype=point.dtype) * (point > 0 if name in WEIGHTS else 1)
        if name in WEIGHTS and case.held:
            way = way - (point > 0) * way.sum(-1, keepdim=True) / (point > 0).sum(-1, keepdim=True)
        ahead, behind = (float(slopes({**case.inputs, name: point + h * way}, False)[1]) for h in (1e-5, -1e-5))
        expected = (ahead - behind) / 2e-5
        analytic = 0.0 if gradient is None else float((gradient * way).sum())
        np.testing.assert_allclose(analytic, expected, rtol=1e-4, atol=1e-4, err_msg=f"second derivative in {name}")


TWICE = [name for name in COSTS if name != "one cloud"]


@pytest.mark.parametrize("grad", ["implicit"])
@pytest.mark.parametrize("marginal_penalty", [None, 0.5])
@pytest.mark.parametrize("name", TWICE)
@pytest.mark.parametrize("function", ENTROPIC)
def test_entropic_second_derivatives(function: str, name: str, marginal_penalty: float | None, grad: str) -> None:
    case = entropic_case(function, name, 0.3, marginal_penalty, grad)
    if grad == "unrolled":
        case = Case({**case.inputs, **weights(4, COSTS[name][0], empty=False)}, case.value, case.exact, case.held)
    second_derivatives_are_right(case)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("name", CLOSED_FORMS)
def test_second_derivatives_of_closed_forms(name: str, compiled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if compiled:
        monkeypatch.setattr(_onedim, "_SMALL", 0)
    make, value = CLOSED_FORMS[name]
    second_derivatives_are_right(Case(make(), value, value))


@pytest.mark.parametrize("name", ["matrix", "sqeuclidean", "cosine"])
@pytest.mark.parametrize("function", ["emd", "solve"])
def test_exact_transport_refuses_second_derivatives(function: str, name: str) -> None:
    with pytest.raises(RuntimeError, match="second derivative"):
        second_derivatives_are_right(transport_case(PLAIN[function], name))


@pytest.mark.parametrize("name", TWICE)
@pytest.mark.parametrize("function", ["independent", "residual", "best"])
def test_second_derivatives_of_bounds(function: str, name: str) -> None:
    if function == "residual" and name not in SQUARE:
        pytest.skip("needs the same bins on both sides")
    second_derivatives_are_right(transport_case(PLAIN[function], name))


@pytest.mark.parametrize("name", ["matrix", "sqeuclidean", "euclidean", "cosine", "line"])
@pytest.mark.parametrize("function", ["sinkhorn", "divergence"])
@pytest.mark.parametrize("marginal_penalty", [None, 0.5])
def test_the_envelope_refuses_second_derivatives(function: str, name: str, marginal_penalty: float | None) -> None:
    with pytest.raises(RuntimeError, match='grad="implicit"'):
        second_derivatives_are_right(entropic_case(function, name, 0.3, marginal_penalty, "envelope"))
