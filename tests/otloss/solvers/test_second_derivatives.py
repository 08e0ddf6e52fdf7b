"""Second derivatives: right, or an error, never with a term left out."""

from contextlib import nullcontext

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.otloss.gradient_cases import (
    CLOSED_FORMS,
    COSTS,
    ENTROPIC,
    PLAIN,
    WEIGHTS,
    Case,
    Inputs,
    entropic_case,
    loss,
    transport_case,
)


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
_ENTROPIC = [
    (function, name, (None, 0.5)[(i + j) % 2]) for i, function in enumerate(ENTROPIC) for j, name in enumerate(_COSTS)
]


@pytest.mark.parametrize(("function", "name", "marginal_penalty"), _ENTROPIC)
def test_entropic_second_derivatives(function: str, name: str, marginal_penalty: float | None) -> None:
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
