"""Problems and contestants of the gradients benchmark: otloss, POT and GeomLoss with their best documented settings.

A contestant is a function of named tensors. `value` is differentiated; finite differences are taken of `exact`, the
same library's value solved as tightly as it allows, or with the settings of `value` if there is no tolerance to set.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import otloss
from otloss.costs import PointCost

PENALTY = 0.5  # the penalty of marginals that differ
Inputs = dict[str, Tensor]
Value = Callable[[Inputs], Tensor]


@dataclass(frozen=True)
class Contestant:
    name: str
    value: Value
    exact: Value


@dataclass(frozen=True)
class Family:
    """One table: its problems are the columns; contestants depend on a number (epsilon, or the order)."""

    title: str
    problems: dict[str, tuple[Callable[[], Inputs], float]]
    contestants: Callable[[float], list[Contestant]]
    fixed: bool = True  # the masses of p and q


def _draw(*shape: int, seed: int) -> Tensor:
    return torch.rand(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def _weights(*, empty: bool, scale: float = 1.0, n: int = 4, m: int = 5) -> Inputs:
    p, q = _draw(n, seed=1) + 0.1, _draw(m, seed=2) + 0.1
    if empty:
        p[1] = q[-2] = 0.0
    return {"p": scale * p / p.sum(), "q": q / q.sum()}


def _matrix(*, empty: bool = False, scale: float = 1.0) -> Callable[[], Inputs]:
    return lambda: {**_weights(empty=empty, scale=scale), "cost": _draw(4, 5, seed=3)}


def _clouds(*, coincide: bool = False, empty: bool = False) -> Callable[[], Inputs]:
    def make() -> Inputs:
        x, y = _draw(4, 2, seed=4), _draw(5, 2, seed=5)
        if coincide:
            y[2] = x[1]
        return {**_weights(empty=empty), "x": x, "y": y}

    return make


def _line(*, empty: bool = False) -> Callable[[], Inputs]:
    return lambda: {**_weights(empty=empty), "x": _draw(4, seed=6), "y": _draw(5, seed=7)}


def _same(name: str, value: Value) -> Contestant:
    return Contestant(name, value, value)


def _tolerance(t: Inputs, *, wide: float = 1e-12, narrow: float = 1e-6) -> float:
    return wide if t["p"].dtype == torch.float64 else narrow


# ---- exact -------------------------------------------------------------------------------------------------------


def _exact(_: float) -> list[Contestant]:
    import ot

    return [
        _same("otloss.emd", lambda t: otloss.emd(t["p"], t["q"], t["cost"])),
        _same("ot.emd2", lambda t: ot.emd2(t["p"], t["q"], t["cost"])),
        _same("ot.solve", lambda t: ot.solve(t["cost"], t["p"], t["q"]).value),
    ]


# ---- entropic ----------------------------------------------------------------------------------------------------


def _ours(epsilon: float, **options: Any) -> Value:
    def value(t: Inputs) -> Tensor:
        cost = t["cost"] if "cost" in t else PointCost(t["x"], t["y"], metric="euclidean")
        tolerance = _tolerance(t, wide=1e-10)
        return otloss.sinkhorn(t["p"], t["q"], cost, epsilon=epsilon, tolerance=tolerance, **options)

    return value


def _pot_solve(epsilon: float, grad: str, part: str = "value", **options: Any) -> Value:
    import ot

    def value(t: Inputs) -> Tensor:
        cost = t["cost"] if "cost" in t else ot.dist(t["x"], t["y"], metric="euclidean")
        solution = ot.solve(cost, t["p"], t["q"], reg=epsilon, grad=grad, max_iter=20_000, tol=_tolerance(t), **options)
        return getattr(solution, part)

    return value


def _pot_batch(epsilon: float, grad: str, kind: str) -> Value:
    import ot

    def value(t: Inputs) -> Tensor:
        p, q, cost = (t[name].unsqueeze(0) for name in ("p", "q", "cost"))
        options = {"reg": epsilon, "reg_type": kind, "grad": grad, "max_iter": 20_000, "tol": _tolerance(t)}
        return ot.solve_batch(cost, a=p, b=q, **options).value[0]

    return value


def _pot_sinkhorn2(epsilon: float, method: str) -> Value:
    import ot

    def value(t: Inputs) -> Tensor:
        return ot.sinkhorn2(t["p"], t["q"], t["cost"], epsilon, method=method, numItermax=20_000, stopThr=_tolerance(t))

    return value


def _geomloss(epsilon: float, unbalanced: float | None = None) -> Value:
    from geomloss.ot import solve

    # It has no stopping rule: epsilon decreases from the largest cost over the iterations.
    def value(t: Inputs) -> Tensor:
        return solve(t["cost"], reg=epsilon, a=t["p"], b=t["q"], unbalanced=unbalanced, max_iter=2000).value

    return value


def _entropic(epsilon: float) -> list[Contestant]:
    ours, theirs = _ours(epsilon), _pot_solve(epsilon, "detach")
    return [
        Contestant("otloss.sinkhorn", ours, ours),
        Contestant('otloss.sinkhorn, grad="implicit"', _ours(epsilon, grad="implicit"), ours),
        *(
            Contestant(f'ot.solve, KL, grad="{grad}"', _pot_solve(epsilon, grad), theirs)
            for grad in ("envelope", "autodiff", "implicit", "last_step")
        ),
        *(
            _same(f'ot.solve_batch, {kind}, grad="{grad}"', _pot_batch(epsilon, grad, kind))
            for kind in ("kl", "entropy")
            for grad in ("envelope", "autodiff")
        ),
        _same("geomloss.ot.solve", _geomloss(epsilon)),
    ]


def _our_linear(epsilon: float, **options: Any) -> Value:
    def value(t: Inputs) -> Tensor:
        tolerance = _tolerance(t, wide=1e-10)
        solution = otloss.solve(
            t["p"], t["q"], t["cost"], epsilon=epsilon, grad="implicit", tolerance=tolerance, **options
        )
        return solution.linear_cost

    return value


def _linear(epsilon: float) -> list[Contestant]:
    exact = _pot_solve(epsilon, "detach", "value_linear")
    return [
        _same('otloss.solve(grad="implicit").linear_cost', _our_linear(epsilon)),
        *(
            Contestant(f'ot.solve(grad="{grad}").value_linear', _pot_solve(epsilon, grad, "value_linear"), exact)
            for grad in ("autodiff", "implicit", "last_step")
        ),
        _same("ot.sinkhorn2", _pot_sinkhorn2(epsilon, "sinkhorn")),
        _same("ot.sinkhorn2, sinkhorn_log", _pot_sinkhorn2(epsilon, "sinkhorn_log")),
    ]


def _unbalanced(epsilon: float) -> list[Contestant]:
    ours = _ours(epsilon, marginal_penalty=PENALTY)
    return [
        Contestant("otloss.sinkhorn(marginal_penalty=)", ours, ours),
        Contestant(
            'otloss.sinkhorn(marginal_penalty=, grad="implicit")',
            _ours(epsilon, marginal_penalty=PENALTY, grad="implicit"),
            ours,
        ),
        _same("ot.solve(unbalanced=)", _pot_solve(epsilon, "autodiff", unbalanced=PENALTY)),
        _same("geomloss.ot.solve(unbalanced=)", _geomloss(epsilon, PENALTY)),
    ]


def _unbalanced_linear(epsilon: float) -> list[Contestant]:
    import ot

    def pot(t: Inputs, method: str) -> Tensor:
        options = {"method": method, "numItermax": 20_000, "stopThr": _tolerance(t)}
        return ot.unbalanced.sinkhorn_unbalanced2(t["p"], t["q"], t["cost"], epsilon, PENALTY, **options)

    return [
        _same(
            'otloss.solve(marginal_penalty=, grad="implicit").linear_cost',
            _our_linear(epsilon, marginal_penalty=PENALTY),
        ),
        _same("ot.unbalanced.sinkhorn_unbalanced2", lambda t: pot(t, "sinkhorn")),
        _same("ot.unbalanced.sinkhorn_unbalanced2, sinkhorn_stabilized", lambda t: pot(t, "sinkhorn_stabilized")),
    ]


# ---- points and lines --------------------------------------------------------------------------------------------


def _euclidean(epsilon: float) -> list[Contestant]:
    ours, theirs = _ours(epsilon), _pot_solve(epsilon, "detach")
    return [
        Contestant('otloss.sinkhorn, PointCost(metric="euclidean")', ours, ours),
        Contestant('ot.solve(ot.dist(metric="euclidean")), autodiff', _pot_solve(epsilon, "autodiff"), theirs),
    ]


def _divergence(epsilon: float) -> list[Contestant]:
    import ot
    from geomloss import SamplesLoss

    def ours(t: Inputs) -> Tensor:
        options = {"epsilon": epsilon, "tolerance": _tolerance(t, wide=1e-10)}
        return otloss.sinkhorn_divergence(t["p"], t["q"], PointCost(t["x"], t["y"]), **options)  # type: ignore[arg-type]

    def pot(t: Inputs) -> Tensor:
        options = {"numIterMax": 20_000, "stopThr": _tolerance(t), "method": "sinkhorn_log"}
        return ot.bregman.empirical_sinkhorn_divergence(t["x"], t["y"], epsilon, a=t["p"], b=t["q"], **options)

    def samples(scaling: float) -> Value:
        # Their cost is |x - y|^2 / 2, and blur^2 its epsilon.
        loss = SamplesLoss("sinkhorn", p=2, blur=(epsilon / 2) ** 0.5, scaling=scaling, backend="tensorized")

        def value(t: Inputs) -> Tensor:
            return loss(t["p"], t["x"], t["q"], t["y"])

        return value

    return [
        _same("otloss.sinkhorn_divergence", ours),
        _same("ot.bregman.empirical_sinkhorn_divergence", pot),
        _same("geomloss.SamplesLoss, default scaling 0.5", samples(0.5)),
        _same("geomloss.SamplesLoss, scaling 0.99", samples(0.99)),
    ]


def _lines(order: float) -> list[Contestant]:
    import ot

    def pot(t: Inputs) -> Tensor:
        return ot.wasserstein_1d(t["x"], t["y"], t["p"], t["q"], p=order)

    return [
        _same("otloss.wasserstein_1d", lambda t: otloss.wasserstein_1d(t["p"], t["q"], t["x"], t["y"], order=order)),
        _same("ot.wasserstein_1d", pot),
    ]


def _sliced(order: float) -> list[Contestant]:
    import ot

    directions = _draw(7, 2, seed=8) - 0.5
    directions = directions / directions.norm(dim=1, keepdim=True)

    def ours(t: Inputs) -> Tensor:
        return otloss.sliced_wasserstein(t["x"], t["y"], t["p"], t["q"], order=order, projections=directions.to(t["x"]))

    def pot(t: Inputs) -> Tensor:
        options = {"p": order, "projections": directions.to(t["x"]).T}
        return ot.sliced_wasserstein_distance(t["x"], t["y"], t["p"], t["q"], **options)

    return [_same("otloss.sliced_wasserstein", ours), _same("ot.sliced_wasserstein_distance (a root)", pot)]


def _epsilons(scale: float = 1.0) -> dict[str, tuple[Callable[[], Inputs], float]]:
    return {
        "epsilon 1": (_matrix(scale=scale), 1.0),
        "epsilon 0.01": (_matrix(scale=scale), 0.01),
        "epsilon 0.1, empty bins": (_matrix(scale=scale, empty=True), 0.1),
    }


FAMILIES = [
    Family("Exact transport", {"": (_matrix(), 0.0), "empty bins": (_matrix(empty=True), 0.0)}, _exact),
    Family("Entropic transport, the regularised value", _epsilons(), _entropic),
    Family("Entropic transport, the cost of its plan", _epsilons(), _linear),
    Family(
        f"Unbalanced (penalty {PENALTY}, masses 1.5 and 1), the regularised value",
        _epsilons(1.5),
        _unbalanced,
        fixed=False,
    ),
    Family("Unbalanced, the cost of its plan", _epsilons(1.5), _unbalanced_linear, fixed=False),
    Family(
        "Points, Euclidean distance",
        {"epsilon 0.1": (_clouds(), 0.1), "two points coincide": (_clouds(coincide=True), 0.1)},
        _euclidean,
    ),
    Family(
        "Debiased divergence, squared distance",
        {
            "epsilon 1": (_clouds(), 1.0),
            "epsilon 0.01": (_clouds(), 0.01),
            "epsilon 1, empty bins": (_clouds(empty=True), 1.0),
        },
        _divergence,
    ),
    Family(
        "Histograms on the line",
        {"order 1": (_line(), 1), "order 2": (_line(), 2), "order 2, empty bins": (_line(empty=True), 2)},
        _lines,
    ),
    Family("Sliced, 7 directions", {"order 2": (_clouds(), 2), "empty bins": (_clouds(empty=True), 2)}, _sliced),
]
