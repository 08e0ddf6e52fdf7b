"""What surrounds a call must not change its numbers: autocast, and a default device that is not the inputs' own."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import otloss
from otloss.costs import CosineCost, DenseCost, GridCost, LineCost, PointCost, graph_cost

Tensors = dict[str, Tensor]


def draw(*shape: int, seed: int) -> Tensor:
    return torch.rand(*shape, generator=torch.Generator().manual_seed(seed))


def inputs(n: int = 6) -> Tensors:
    p, q = draw(3, n, seed=0) + 0.1, draw(n, seed=1) + 0.1
    p[:, 1] = 0
    return {
        "p": p / p.sum(-1, keepdim=True),
        "q": q / q.sum(),
        "place": draw(n, seed=2),
        "other": draw(3, n, seed=3),
        "x": draw(n, 4, seed=4),
        "y": draw(n, 4, seed=5),
        "length": draw(n, seed=6),
        "matrix": draw(n if n < 100 else 1, n, seed=7),
    }


COSTS: dict[str, Callable[[Tensors], otloss.costs.Cost]] = {
    "matrix": lambda t: DenseCost(t["matrix"]),
    "sqeuclidean": lambda t: PointCost(t["x"], t["y"]),
    "euclidean": lambda t: PointCost(t["x"], t["y"], metric="euclidean"),
    "cosine points": lambda t: PointCost(t["x"], t["y"], metric="cosine"),
    "cosine": lambda t: CosineCost(t["x"]),
    "line": lambda t: LineCost(t["place"]),
    "line 1.5": lambda t: LineCost(t["place"], power=1.5),
    "grid": lambda t: GridCost((2, 3)),
    "graph": lambda t: graph_cost(t["matrix"] + 0.1),
}
OF_COSTS: dict[str, Callable[[Tensor, Tensor, otloss.costs.Cost], Tensor]] = {
    "emd": otloss.emd,
    "sinkhorn": lambda p, q, cost: otloss.sinkhorn(p, q, cost, epsilon=0.3),
    "sinkhorn implicit": lambda p, q, cost: otloss.solve(p, q, cost, epsilon=0.3, grad="implicit").linear_cost,
    "lower bound": otloss.lower_bound,
    "upper bound": otloss.upper_bound,
    "product": lambda p, q, cost: cost.apply(q) * p,
    "soft minimum": lambda p, q, cost: cost.softmin(q, 0.1) * p,
    "hard minimum": lambda p, q, cost: cost.softmin(p, 0.0),
}
PARENT = torch.tensor([2, 0, 2, 0, 1, 2])
OTHERS: dict[str, tuple[int, Callable[[Tensors], Tensor]]] = {
    "cdf": (6, lambda t: otloss.cdf_distance(t["p"], t["q"], t["place"])),
    "cdf compiled": (4000, lambda t: otloss.cdf_distance(t["p"], t["q"])),
    "line": (6, lambda t: otloss.wasserstein_1d(t["p"], t["q"], t["place"], t["other"], order=2)),
    "line compiled": (4000, lambda t: otloss.wasserstein_1d(t["p"], t["q"], t["place"], t["other"], order=2)),
    "circle": (6, lambda t: otloss.wasserstein_circular(t["p"], t["q"])),
    "tree": (6, lambda t: otloss.wasserstein_tree(t["p"], t["q"], PARENT, t["length"])),
    "sliced": (
        6,
        lambda t: otloss.sliced_wasserstein(t["x"], t["y"], t["p"], generator=torch.Generator().manual_seed(0)),
    ),
    "divergence": (6, lambda t: otloss.sinkhorn_divergence(t["p"], t["q"], PointCost(t["x"], t["y"]), epsilon=0.3)),
    "soft sort": (6, lambda t: otloss.soft_sort(t["other"])),
    "soft rank": (6, lambda t: otloss.soft_rank(t["other"])),
    "soft top k": (6, lambda t: otloss.soft_top_k(t["other"], 2)),
}
# Pairwise: every function of costs with two of them, every cost with a few functions.
_PAIRS = [(function, list(COSTS)[(i + k) % len(COSTS)]) for i, function in enumerate(OF_COSTS) for k in (0, 3)]
CALLS: dict[str, tuple[int, Callable[[Tensors], Tensor]]] = {
    **OTHERS,
    **{
        f"{function} of {cost}": (
            6, lambda t, call=OF_COSTS[function], build=COSTS[cost]: call(t["p"], t["q"], build(t))
        )
        for function, cost in _PAIRS
    },
}  # fmt: skip


# Made before any surrounding.
CASES = {6: inputs(), 4000: {name: t for name, t in inputs(4000).items() if name in ("p", "q", "place", "other")}}


def forward(name: str) -> tuple[Tensor, list[Tensor]]:
    size, call = CALLS[name]
    leaves = {key: t.clone().requires_grad_() for key, t in CASES[size].items()}
    return call(leaves), list(leaves.values())


def gradients(value: Tensor, leaves: list[Tensor]) -> tuple[Tensor, ...]:
    upstream = torch.linspace(-1, 2, value.numel(), device="cpu").reshape(value.shape)
    return torch.autograd.grad(value, leaves, upstream, materialize_grads=True)


@pytest.mark.parametrize("name", CALLS)
def test_autocast_and_default_device_change_nothing(name: str) -> None:
    expected, expected_leaves = forward(name)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        value, leaves = forward(name)
    # Backward passes belong outside of autocast: torch would run those of its own products in bfloat16.
    with torch.device("meta"):
        other, other_leaves = forward(name)
        other_gradients = gradients(other, other_leaves)
    by_leaves = gradients(expected, expected_leaves)
    for found, found_gradients in ((value, gradients(value, leaves)), (other, other_gradients)):
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(found_gradients, by_leaves, rtol=1e-6, atol=1e-6)
