"""Problems, functions and finite differences behind the tests of gradients.

Truth is a finite difference of the float64 value at a tight tolerance, along e_i - e_k with k the heaviest bin where
masses are held, and one-sided at bins without mass. The loss weighs its problems differently, so that upstream
gradients count; q is shared by the problems, so that sums over broadcast axes count.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

import otloss
from otloss.costs import CosineCost, DenseCost, GridCost, LineCost, PointCost, graph_cost
from otloss.solvers.options import Penalty
from tests.otloss.draws import draw

Inputs = dict[str, Tensor]
WEIGHTS = ("p", "q")
# Inputs that take no batch axes, with those they have.
ALONE = {"embedding": 2, "adjacency": 2, "place": 1, "length": 1}
TIGHT: dict[str, Any] = {"tolerance": 1e-10, "max_iterations": 100_000}
STEP = 1e-5
UPSTREAM = torch.tensor([1.0, -0.6], dtype=torch.float64)


@dataclass(frozen=True)
class Case:
    """A function of named inputs; `exact` is its value solved tightly, `value` the one whose gradient is judged."""

    inputs: Inputs
    value: Callable[[Inputs], Tensor]
    exact: Callable[[Inputs], Tensor]
    held: bool = True  # the masses of p and q
    one_by_one: tuple[str, ...] = ("length",)  # inputs in which `exact` takes no further axis of problems


def loss(value: Tensor) -> Tensor:
    assert value.shape[-1:] == UPSTREAM.shape
    return (value.double() * UPSTREAM).sum(-1)


def finite_differences(case: Case, name: str) -> Tensor:
    point = case.inputs[name]
    directions, offsets = [], []
    for index in np.ndindex(*point.shape):
        along = torch.zeros_like(point)
        along[index] = 1
        if name in WEIGHTS and case.held:
            along[(*index[:-1], int(point[index[:-1]].argmax()))] -= 1
        directions.append(along)
        one_sided = name in WEIGHTS and point[index] == 0
        offsets.append((STEP, 2 * STEP) if one_sided else (STEP, -STEP))
    moved = torch.stack([point + h * d for d, pair in zip(directions, offsets, strict=True) for h in pair])
    if name in case.one_by_one:
        actual = torch.stack([loss(case.exact({**case.inputs, name: one})) for one in moved])
    else:  # all at once, on an axis before the axis of the problems
        moved = moved if point.shape[0] == len(UPSTREAM) else moved.unsqueeze(1)
        actual = loss(case.exact({**case.inputs, name: moved}))
    base = loss(case.exact(case.inputs))
    first, second = actual.reshape(-1, 2).unbind(-1)
    one_sided = torch.tensor([pair[1] > 0 for pair in offsets])
    gradient = torch.where(one_sided, 4 * first - second - 3 * base, first - second) / (2 * STEP)
    return gradient.reshape(point.shape)


def gradients(case: Case, dtype: torch.dtype, *, skip: tuple[str, ...] = ()) -> Inputs:
    inputs = {name: tensor.to(dtype, copy=True) for name, tensor in case.inputs.items()}
    leaves = {name: tensor.requires_grad_() for name, tensor in inputs.items() if name not in skip}
    value = case.value(inputs)
    assert value.dtype == dtype
    actual = torch.autograd.grad(loss(value), list(leaves.values()))
    assert all(gradient.dtype == dtype for gradient in actual)
    return dict(zip(leaves, actual, strict=True))


def weights(n: int, m: int, *, empty: bool = True) -> Inputs:
    """p (2, n) and q (m,), non-uniform and (if empty) with bins without mass."""
    generator = torch.Generator().manual_seed(n + 10 * m)
    p = torch.rand(2, n, generator=generator, dtype=torch.float64) + 0.1
    q = torch.rand(m, generator=generator, dtype=torch.float64) + 0.1
    if empty:
        p[0, 1] = p[1, n - 1] = q[m - 2] = 0.0
    return {"p": p / p.sum(-1, keepdim=True), "q": q / q.sum()}


def symmetric(matrix: Tensor) -> Tensor:
    """With a diagonal of zeros: the costs among bins."""
    return (matrix + matrix.mT) * (1 - torch.eye(matrix.shape[-1], dtype=matrix.dtype, device=matrix.device)) / 2


def quartic(x: Tensor, y: Tensor) -> Tensor:
    """A metric as users give it."""
    return (x.unsqueeze(-2) - y.unsqueeze(-3)).pow(4).sum(-1)


def _points(metric: Any, x: tuple[int, ...], y: tuple[int, ...], shift: float, size: float) -> tuple[Any, ...]:
    def inputs() -> Inputs:
        return {"x": draw(*x) - shift, "y": draw(*y, seed=1) - shift}

    return 5, inputs, lambda t: PointCost(t["x"], t["y"], metric=metric), size


# Name -> bins of q, inputs of the cost, the cost, and its range.
COSTS: dict[str, tuple[int, Callable[[], Inputs], Callable[[Inputs], Any], float]] = {
    "matrix": (5, lambda: {"matrix": draw(2, 4, 5)}, lambda t: t["matrix"], 1.0),
    "one matrix": (4, lambda: {"matrix": draw(4, 4)}, lambda t: DenseCost(t["matrix"]), 1.0),
    "sqeuclidean": _points("sqeuclidean", (2, 4, 3), (5, 3), 0.0, 1.5),
    "euclidean": _points("euclidean", (4, 3), (2, 5, 3), 0.0, 1.2),
    "l1": _points("l1", (4, 3), (5, 3), 0.0, 2.0),
    "cosine points": _points("cosine", (4, 3), (5, 3), 0.5, 2.0),
    "one cloud": (4, lambda: {"x": draw(2, 4, 3)}, lambda t: PointCost(t["x"]), 1.5),
    "cosine": (4, lambda: {"embedding": draw(4, 3) - 0.5}, lambda t: CosineCost(t["embedding"]), 2.0),
    "line": (4, lambda: {"place": draw(4)}, lambda t: LineCost(t["place"]), 1.0),
    "line squared": (4, lambda: {"place": draw(4)}, lambda t: LineCost(t["place"], power=2), 1.0),
    "grid": (4, dict, lambda t: GridCost((2, 2), spacing=(1.0, 0.7)), 1.5),
    "graph": (4, lambda: {"adjacency": draw(4, 4) + 0.5}, lambda t: graph_cost(t["adjacency"]), 1.5),
    "callable": _points(quartic, (4, 3), (5, 3), 0.0, 1.0),
}
SQUARE = [name for name, (m, *_) in COSTS.items() if m == 4]


def transport_case(
    value: Callable[..., Tensor],
    name: str,
    exact: Callable[..., Tensor] | None = None,
    *,
    held: bool = True,
    empty: bool = True,
    as_given: bool = False,
    extra: Inputs | None = None,
) -> Case:
    """value(p, q, cost, **extra) on the problem of that name; as_given, it hangs on what kind of cost it is."""
    extra = extra or {}
    m, make, cost, _ = COSTS[name]
    pair = weights(4, m, empty=empty)
    if not held:
        pair["p"] = 1.6 * pair["p"]

    def exactly(t: Inputs) -> Tensor:
        # Where the cost itself takes no batch, its matrices do.
        alone = [] if as_given else [key for key in t if key in ALONE]
        fitted = matrices(cost, alone[0], t[alone[0]]) if alone else cost(t)
        return (exact or value)(t["p"], t["q"], fitted, **{key: t[key] for key in extra})

    def given(t: Inputs) -> Tensor:
        return value(t["p"], t["q"], cost(t), **{key: t[key] for key in extra})

    one_by_one = tuple(ALONE) if as_given else ("length",)
    return Case({**pair, **make(), **extra}, given, exactly, held, one_by_one)


def matrices(cost: Callable[[Inputs], Any], name: str, data: Tensor) -> Tensor:
    if data.dim() == ALONE[name]:
        return cost({name: data}).dense()
    return torch.stack([matrices(cost, name, one) for one in data])


PLAIN: dict[str, Callable[..., Tensor]] = {
    "emd": otloss.emd,
    "solve": lambda p, q, cost: otloss.solve(p, q, cost).value,
    "lower": otloss.lower_bound,
    "independent": lambda p, q, cost: otloss.upper_bound(p, q, cost, coupling="independent"),
    "residual": lambda p, q, cost: otloss.upper_bound(p, q, cost, coupling="residual"),
    "best": otloss.upper_bound,
}


def _line(n: int, m: int, *, shared: bool) -> Inputs:
    places = {"x": draw(2, n)} if shared else {"x": draw(n), "y": draw(2, m, seed=1)}
    return {**weights(n, m), **places}


def _cloud() -> Inputs:
    return {**weights(4, 5), "x": draw(2, 4, 3), "y": draw(5, 3, seed=1)}


def _slices(order: float, t: Inputs) -> Tensor:
    return otloss.sliced_wasserstein(t["x"], t["y"], t["p"], t["q"], order=order, projections=DIRECTIONS)


PARENT = torch.tensor([2, 0, 2, 0, 1, 2])
DIRECTIONS = draw(7, 3, seed=2) - 0.5
CLOSED_FORMS: dict[str, tuple[Callable[[], Inputs], Callable[[Inputs], Tensor]]] = {
    **{
        f"cdf {power}": (lambda: _line(6, 6, shared=True), lambda t, k=power: otloss.cdf_distance(**t, power=k))
        for power in (1, 2, 1.5)
    },
    **{
        f"quantiles {k}": (lambda: _line(4, 5, shared=False), lambda t, k=k: otloss.wasserstein_1d(**t, order=k))
        for k in (1, 2, 3)
    },
    "quantiles of one place": (lambda: _line(5, 5, shared=True), lambda t: otloss.wasserstein_1d(**t, order=2)),
    "circle": (lambda: _line(6, 6, shared=True), lambda t: otloss.wasserstein_circular(**t, period=1.0)),
    "tree": (
        lambda: {**weights(6, 6), "length": draw(6)},
        lambda t: otloss.wasserstein_tree(t["p"], t["q"], PARENT, t["length"]),
    ),
    **{f"sliced {order}": (_cloud, partial(_slices, order)) for order in (1, 2)},
}


# The value of one function, by whatever gradient; True asks for a tight solve.
ENTROPIC = ("sinkhorn", "divergence", "linear_cost")


def entropic_case(
    function: str,
    name: str,
    share: float,
    marginal_penalty: Penalty,
    grad: str,
    *,
    per: str = "range",
    empty: bool = True,
) -> Case:
    """Epsilon is that share of the range of the costs; of their mean; or a tensor, which is then an input too."""
    tensor = torch.tensor([share, 1.5 * share], dtype=torch.float64) * COSTS[name][3]
    fixed: dict[str, Any] = {"marginal_penalty": marginal_penalty, "epsilon": share * COSTS[name][3]}
    if per == "mean_cost":
        fixed |= {"epsilon": share, "epsilon_relative_to": per}
    if function == "divergence" and COSTS[name][0] != 4 and "matrix" in name:
        among: dict[str, Any] = {"cost_p": symmetric(draw(4, 4, seed=2)), "cost_q": symmetric(draw(5, 5, seed=3))}
    else:
        among = {}

    def value(p: Tensor, q: Tensor, cost: Any, **options: Any) -> Tensor:
        options = {**fixed, **options}
        if function == "sinkhorn":
            return otloss.sinkhorn(p, q, cost, **options)
        if function == "linear_cost":
            return otloss.solve(p, q, cost, **options).linear_cost
        if name in ("one matrix", "graph"):
            cost = symmetric(cost if isinstance(cost, Tensor) else cost.dense())
        return otloss.sinkhorn_divergence(p, q, cost, **options, **{k: v.to(p.dtype) for k, v in among.items()})

    return transport_case(
        lambda p, q, cost, **extra: value(
            p, q, cost, grad=grad, **extra, **(TIGHT if p.dtype == torch.float64 else {})
        ),
        name,
        lambda p, q, cost, **extra: value(p, q, cost, **extra, **TIGHT),
        held=marginal_penalty is None,
        # Where points are far apart, a grain in an empty bin pays for its neighbours only as long as it is smaller than
        # exp(-2 distance / epsilon): no finite difference sees that derivative of S(p, p).
        empty=empty and (function != "divergence" or share == 1.0),
        extra={"epsilon": tensor} if per == "tensor" else None,
    )
