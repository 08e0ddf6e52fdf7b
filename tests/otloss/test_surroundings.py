"""What surrounds a call must not change its numbers: autocast, and a default device that is not the inputs' own."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor

import otloss
from otloss.costs import as_cost
from tests.otloss.gradient_cases import (
    CLOSED_FORMS,
    ENTROPIC,
    PLAIN,
    Case,
    draw,
    entropic_case,
    transport_case,
    weights,
)

OF_COSTS: dict[str, Callable[..., Tensor]] = {
    **PLAIN,
    "product": lambda p, q, cost: as_cost(cost).apply(q) * p,
    "soft minimum": lambda p, q, cost: as_cost(cost).softmin(q, 0.1) * p,
    "hard minimum": lambda p, q, cost: as_cost(cost).softmin(q, 0.0) * p,
}
# Every function and every cost.
PAIRS = [
    ("sinkhorn", "matrix"), ("residual", "one matrix"), ("divergence", "sqeuclidean"), ("linear_cost", "euclidean"),
    ("emd", "l1"), ("lower", "cosine points"), ("product", "one cloud"), ("soft minimum", "cosine"), ("emd", "line"),
    ("best", "line squared"), ("hard minimum", "grid"), ("solve", "graph"), ("soft minimum", "callable"),
    ("lower", "cosine"), ("product", "line"), ("independent", "sqeuclidean"), ("lower", "grid"),
]  # fmt: skip


def cases() -> dict[str, Case]:
    """Made before any surrounding."""
    found = {name: Case(make(), value, value) for name, (make, value) in CLOSED_FORMS.items()}
    many = {**weights(5000, 5000), "x": draw(2, 5000)}  # so many that kernels take them
    for name in ("cdf 2", "quantiles of one place"):
        value = CLOSED_FORMS[name][1]
        found[f"{name} by the kernel"] = Case(many, value, value)
    for function, cost in PAIRS:
        if function in ENTROPIC:
            grad = "implicit" if function == "linear_cost" else "envelope"
            found[f"{function} of {cost}"] = entropic_case(function, cost, 0.3, None, grad)
        else:
            found[f"{function} of {cost}"] = transport_case(OF_COSTS[function], cost)
    quadratic = partial(otloss.soft_rank, regularization="quadratic")
    for sort in (otloss.soft_sort, otloss.soft_rank, lambda x: otloss.soft_top_k(x, 2), quadratic):
        found[f"sort {len(found)}"] = Case({"x": draw(3, 6)}, lambda t, sort=sort: sort(t["x"]), sort)
    return found


CASES = cases()


def forward(case: Case) -> tuple[Tensor, list[Tensor]]:
    leaves = {name: t.to("cpu", torch.float32, copy=True).requires_grad_() for name, t in case.inputs.items()}
    return case.value(leaves), list(leaves.values())


def gradients(value: Tensor, leaves: list[Tensor]) -> tuple[Tensor, ...]:
    upstream = torch.linspace(-1, 2, value.numel(), device="cpu").reshape(value.shape)
    return torch.autograd.grad(value, leaves, upstream, materialize_grads=True)


@pytest.mark.parametrize("name", CASES)
def test_autocast_and_default_device_change_nothing(name: str) -> None:
    expected, expected_leaves = forward(CASES[name])
    with torch.autocast("cpu", dtype=torch.bfloat16):
        value, leaves = forward(CASES[name])
    # Backward passes belong outside of autocast: torch would run those of its own products in bfloat16.
    with torch.device("meta"):
        other, other_leaves = forward(CASES[name])
        other_gradients = gradients(other, other_leaves)
    by_leaves = gradients(expected, expected_leaves)
    for found, found_gradients in ((value, gradients(value, leaves)), (other, other_gradients)):
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(found_gradients, by_leaves, rtol=1e-6, atol=1e-6)
