"""Transport between histograms on the line, in closed form.

With positions sorted, F and G the cumulative sums of p and q, and gap_k = x_{k+1} - x_k,

    sum_k gap_k |F_k - G_k|^power                        power 1 is W_1; power 2 is the ranked probability score

and for a convex cost |x - y|^order the optimal plan matches quantiles: merge the levels F_i and G_j; the mass between
two neighbouring levels costs |x_i - y_j|^order (C. Villani, Topics in Optimal Transportation, 2.2).
The merged path is a basis of the transport problem, so its derivatives in the weights are dual potentials.

A bin without mass gets the one-sided derivative: what an infinitesimal mass there costs with the cheapest partner among
the bins that hold mass. Bins without mass are no partners, hence `_to_occupied` below; for W_1 the same rule fixes the
derivative of |F - G| where both histograms are empty up to a bin, or from it on.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar, cast

import torch
from jaxtyping import Float, Int
from torch import Tensor

from otloss._checks import (
    broadcast_shape,
    check_broadcast,
    check_finite,
    check_last_axis,
    check_not_recorded,
    check_number,
    check_tensor,
)
from otloss._numba import may_run_on
from otloss._per_example import per_example
from otloss._public import public
from otloss.solvers.histograms import MASS_TOLERANCE, histogram_pair

_P = ParamSpec("_P")
_R = TypeVar("_R")
# Bins below which the operations of torch for `cdf_distance` take no longer than starting a kernel.
_SMALL = 2**13
_OF_SAMPLES = "If they are samples u and v, call wasserstein_1d(None, None, u, v)."


@public
@per_example(p=1, q=1, x=1)
def cdf_distance(
    p: Float[Tensor, "*batch bins"] | None,
    q: Float[Tensor, "*batch bins"] | None,
    x: Float[Tensor, "*batch bins"] | None = None,
    *,
    power: float = 2,
) -> Float[Tensor, "*batch"]:
    """Return the distance between cumulative distributions, sum_k gap_k |F_k - G_k|^power, per problem.

    Power 1 is the Wasserstein-1 distance; power 2 the ranked probability score ("squared EMD loss").

    Formulas: docs/guide/definitions.md#def-line

    Args:
        p: (..., n) weights >= 0, or None for 1 / n each. The leading axes of p, q and x broadcast.
        q: (..., n) weights >= 0 with the mass of p, up to rounding, or None for 1 / n each.
        x: (n,) or (..., n) positions, 0 to n - 1 by default; unsorted positions are sorted, repeated ones may occur.
        power: at least 1.

    Returns:
        (...), in the promoted dtype; its unit is the unit of x times the unit of the mass to the power `power`.
        Differentiable in p, q (centred over all bins) and x. Where F = G at power 1 the value has a kink, and the
        gradient is a subgradient; for bins without mass beyond the others' mass it is the one-sided derivative.

    Raises:
        TypeError: if p or q is not a floating tensor.
        ValueError: if the bins or masses of p and q differ, a weight is negative, a number is not finite, or the value
            overflows.

    Source:
        L. Hou, C.-P. Yu, D. Samaras, Squared Earth Mover's Distance-based Loss, arXiv 1611.05916, eq. 6.

    Example:
        >>> p, q = torch.tensor([1.0, 0.0, 0.0]), torch.tensor([0.0, 0.5, 0.5])
        >>> cdf_distance(p, q)
        tensor(1.2500)
        >>> cdf_distance(p, q, torch.tensor([0.0, 1.0, 3.0]), power=1)
        tensor(2.)
    """
    check_not_recorded()
    check_exponent("power", power)
    p, q, dtype = both_or_uniform(p, q, x, None)
    return _closed_form(_cdf_distance, (p, q, x), power, dtype)


def _cdf_distance(p: Tensor, q: Tensor, x: Tensor | None, power: float) -> Tensor:
    pair = histogram_pair(p, q, *_position_dtypes(x=x))
    if p.shape[-1] != q.shape[-1]:
        raise ValueError(
            f"p has {p.shape[-1]} bins and q {q.shape[-1]}, expected the same bins; "
            "for different bins use wasserstein_1d with positions x and y."
        )
    p, q = pair.in_float64
    x = checked_positions("x", torch.arange(p.shape[-1], device=p.device) if x is None else x, p)
    x_sorted, order = x.sort(dim=-1, stable=True)
    # The last bin has no gap behind it; a gap of 0 there is cheaper than slicing the histograms.
    gaps = x_sorted.diff(dim=-1, append=x_sorted[..., -1:])
    weights_p, weights_q = _in_order(p, order), _in_order(q, order)
    if power == 1:
        apart = _absolute_cdf_difference(weights_p, weights_q)
    else:
        apart = (weights_p - weights_q).cumsum(-1)
        if power < 2:  # the derivative at rounding errors is large: their power - 1
            apart = apart.masked_fill(_empty_ends(weights_p)[1] & _empty_ends(weights_q)[1], 0.0)
        apart = power_of(apart, power)
    return (gaps * apart).sum(-1).to(pair.dtype)


def _weights_first(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Decorate `wasserstein_1d`: raise where four arguments without a name are in the order of `ot.wasserstein_1d`.

    Two arguments that are no weights of the same bins may be samples, as of `scipy.stats.wasserstein_distance`.
    """

    @functools.wraps(function)
    def call(*args: _P.args, **settings: _P.kwargs) -> _R:
        if len(args) == 4 and all(map(_is_plain, args)):
            p, q, x, y = (cast(Tensor, t) for t in args)
            if not (_sums_to_one(p) or _sums_to_one(q)) and all(
                _sums_to_one(t) and bool((t >= 0).all()) for t in (x, y)
            ):
                raise ValueError(
                    "p and q do not sum to 1, and the positions x and y do: positions stand first in POT's "
                    "ot.wasserstein_1d(x, y, p, q); expected wasserstein_1d(p, q, x, y), or p=, q=, x= and y= by name."
                )
        try:
            return function(*args, **settings)
        except ValueError as error:
            if len(args) != 2 or settings.keys() & {"x", "y"} or not str(error).startswith(("p ", "q ")):
                raise
            raise ValueError(f"{error} {_OF_SAMPLES}") from None

    return call


def _is_plain(t: Any) -> bool:
    return isinstance(t, Tensor) and t.layout is torch.strided and not t.is_meta and t.dtype in MASS_TOLERANCE


@public
@per_example(p=1, q=1, x=1, y=1)
@_weights_first
def wasserstein_1d(
    p: Float[Tensor, "*batch n"] | None,
    q: Float[Tensor, "*batch m"] | None,
    x: Float[Tensor, "*batch n"] | None = None,
    y: Float[Tensor, "*batch m"] | None = None,
    *,
    order: float = 1,
) -> Float[Tensor, "*batch"]:
    """Return W_order^order between histograms on the line, the minimal cost of moving p to q at |x - y|^order per unit.

    Formulas: docs/guide/definitions.md#def-line

    Args:
        p: (..., n) weights >= 0, or None for 1 / n each: of samples u and v the distance is
            `wasserstein_1d(None, None, u, v)`. The leading axes of p, q, x and y broadcast.
        q: (..., m) weights >= 0 with the mass of p, up to rounding, or None for 1 / m each.
        x: (n,) or (..., n) positions of p's bins, 0 to n - 1 by default; any order, repeated ones may occur.
        y: (m,) or (..., m) positions of q's bins, the positions of p by default.
        order: at least 1.

    Returns:
        (...), in the promoted dtype; its unit is the unit of x to the power `order`, times the unit of the mass.
        Differentiable in p, q (centred over all bins; one-sided derivatives at bins without mass), x and y. Where
        levels of F and G coincide the value has a kink, and the gradient is a subgradient.

    Raises:
        TypeError: if p or q is not a floating tensor.
        ValueError: if the masses differ, a weight is negative, a number is not finite, positions do not fit, or the
            value overflows.

    Source:
        C. Villani, Topics in Optimal Transportation, 2003, theorem 2.18.

    Example:
        >>> p, q = torch.tensor([0.5, 0.5]), torch.tensor([0.25, 0.75])
        >>> wasserstein_1d(p, q, torch.tensor([0.0, 4.0]))
        tensor(1.)
        >>> wasserstein_1d(p, torch.tensor([1.0]), torch.tensor([0.0, 4.0]), torch.tensor([1.0]), order=2)
        tensor(5.)
    """
    check_not_recorded()
    check_exponent("order", order)
    if order == 1 and y is None:
        return cdf_distance(p, q, x, power=1)
    p, q, dtype = both_or_uniform(p, q, x, y)
    return _closed_form(_wasserstein_1d, (p, q, x, y), order, dtype)


def _wasserstein_1d(p: Tensor, q: Tensor, x: Tensor | None, y: Tensor | None, order: float) -> Tensor:
    pair = histogram_pair(p, q, *_position_dtypes(x=x, y=y))
    if y is None and p.shape[-1] != q.shape[-1]:
        raise ValueError(
            f"p has {p.shape[-1]} bins and q {q.shape[-1]}, expected the same bins when y is not given; "
            "pass y, the positions of q's bins."
        )
    p, q = pair.in_float64
    x = checked_positions("x", torch.arange(p.shape[-1], device=p.device) if x is None else x, p)
    y = x if y is None else checked_positions("y", y, q)
    check_broadcast(x=x.shape[:-1], y=y.shape[:-1])
    x_sorted, order_x = x.sort(dim=-1, stable=True)
    y_sorted, order_y = y.sort(dim=-1, stable=True)
    value = _quantile_cost(_in_order(p, order_x), _in_order(q, order_y), x_sorted, y_sorted, order)
    return value.to(pair.dtype)


def _sums_to_one(weights: Tensor) -> bool:
    totals = weights.detach().sum(-1)
    # Numbers are read one by one: for a single problem a comparison by torch takes longer.
    return not totals.numel() or all(abs(total.item() - 1) < 1e-3 for total in torch.aminmax(totals))


def both_or_uniform(
    p: Tensor | None, q: Tensor | None, x: Tensor | None, y: Tensor | None
) -> tuple[Tensor, Tensor, torch.dtype]:
    """Return the weights, equal ones where they are None, and the promoted dtype of what is given, for the answer."""
    named = {"p": p, "q": q, "x": x, "y": y}
    given = [check_tensor(name, value, is_read=False).dtype for name, value in named.items() if value is not None]
    both = _or_uniform("p", p, x, q), _or_uniform("q", q, x if y is None else y, p)
    dtype = functools.reduce(torch.promote_types, given, torch.bool)
    return *both, dtype if dtype.is_floating_point else torch.float32


def _or_uniform(name: str, weights: Tensor | None, positions: Tensor | None, other: Tensor | None) -> Tensor:
    """The weights, or 1 / n each for the bins at the positions, or without any for the bins of the other side.

    They are at least in float32: of many bins float16 would round 1 / n to another mass, or to 0.
    """
    if weights is not None:
        return weights
    if not any(isinstance(t, Tensor) and t.dim() for t in (positions, other)):
        raise ValueError(f"{name} is None, which is for equal weights at given positions; pass x, or {name}.")
    like = other if positions is None else positions
    assert like is not None
    dtype = next((t.dtype for t in (positions, other) if t is not None and t.is_floating_point()), torch.float32)
    dtype = torch.promote_types(dtype, torch.float32)
    return torch.full(like.shape[-1:], 1 / max(1, like.shape[-1]), dtype=dtype, device=like.device)


def _closed_form(
    reference: Callable[..., Tensor], inputs: tuple[Tensor | None, ...], exponent: float, dtype: torch.dtype
) -> Tensor:
    """Return the value by a kernel; of small problems, and to raise errors, by the reference implementation."""
    value = _by_kernel(reference, inputs, exponent) if _suits_kernel(*inputs) else None
    value = reference(*inputs, exponent) if value is None else value
    return finite_in(dtype, value, exponent)


def finite_in(dtype: torch.dtype, value: Tensor, exponent: float) -> Tensor:
    """Return the value in this dtype; raise ValueError if it overflows."""
    value = value.to(dtype)
    if not torch.isfinite(value.detach()).all():
        other = "" if dtype == torch.float64 else ", or pass float64"
        raise ValueError(
            f"distances to the power {exponent} overflow {dtype}; expected points nearer to each other: rescale "
            f"them{other}."
        )
    return value


def _suits_kernel(p: Any, q: Any, *places: Any) -> bool:
    inputs = [t for t in (p, q, *places) if t is not None]
    if not all(isinstance(t, Tensor) and t.dim() > 0 for t in inputs):
        return False
    if len(places) == 1 and all(t.dim() == 1 for t in inputs) and p.shape[0] + q.shape[0] < _SMALL:
        return False
    if not (p.is_floating_point() and q.is_floating_point() and may_run_on(*inputs)):
        return False
    if any((t.is_floating_point() or t.is_complex()) and t.dtype not in MASS_TOLERANCE for t in inputs):
        return False
    n, m = p.shape[-1], q.shape[-1]
    is_shared = len(places) == 1 or places[1] is None  # positions of both sides
    fits = all(t is None or t.shape[-1] == size for t, size in zip(places, (n, m), strict=False))
    if 0 in (n, m) or (is_shared and n != m) or not fits:
        return False
    try:
        problems = broadcast_shape(*(t.shape[:-1] for t in inputs)).numel()
    except RuntimeError:
        return False
    return problems > 0 and (len(places) == 2 or problems * (n + m) >= _SMALL)


def _by_kernel(reference: Callable[..., Tensor], inputs: tuple[Tensor | None, ...], exponent: float) -> Tensor | None:
    """Return the value, or None if the numbers are no transport problem."""
    from otloss.solvers.closed_forms.line_cpu import line_value

    tensors = [t for t in inputs if t is not None]
    p, q = tensors[:2]
    dtype = functools.reduce(torch.promote_types, (t.dtype for t in tensors))
    arithmetic = torch.promote_types(dtype, torch.float32)
    x = (torch.arange(p.shape[-1], device=p.device) if inputs[2] is None else inputs[2]).to(arithmetic)
    places = [x if place is None or place is inputs[2] else place.to(arithmetic) for place in inputs[2:]]
    value = line_value(
        lambda *rows: reference(*rows, exponent),
        (p.to(arithmetic), q.to(arithmetic), *places),
        exponent=exponent,
        tolerance=max(MASS_TOLERANCE[t.dtype] for t in (p, q)),
    )
    return None if value is None else value.to(dtype)


def _quantile_cost(p: Tensor, q: Tensor, x: Tensor, y: Tensor, order: float) -> Tensor:
    x, y = _to_shape_of(x, p), _to_shape_of(y, q)
    if not ((p == 0).any() or (q == 0).any()):
        widths, costs = _merged_path(p, q, x, y, order)
        return (widths * costs).sum(-1)
    # Three paths of one value. The gradient in p comes from a path on which every bin of q holds mass, that in q
    # from a path on which every bin of p does, and those in the positions from the path on which all do.
    x_occupied, y_occupied = _to_occupied(p, x), _to_occupied(q, y)
    widths, costs = _merged_path(p.detach(), q.detach(), x_occupied, y_occupied, order)
    widths_p, costs_p = _merged_path(p, q.detach(), x, y_occupied, order)
    widths_q, costs_q = _merged_path(p.detach(), q, x_occupied, y, order)
    by_weights = (widths_p - widths_p.detach()) * costs_p + (widths_q - widths_q.detach()) * costs_q  # 0, with a graph
    return (widths * costs + by_weights).sum(-1)


def _merged_path(p: Tensor, q: Tensor, x: Tensor, y: Tensor, order: float) -> tuple[Tensor, Tensor]:
    """Return the masses (..., n + m) between neighbouring merged levels and the price of each."""
    n, m = p.shape[-1], q.shape[-1]
    batch = broadcast_shape(p.shape[:-1], q.shape[:-1])
    p, x = p.expand(*batch, n), x.expand(*batch, n)
    q, y = q.expand(*batch, m), y.expand(*batch, m)
    levels, origin = torch.cat([p.cumsum(-1), q.cumsum(-1)], dim=-1).sort(dim=-1, stable=True)
    widths = levels.diff(dim=-1, prepend=torch.zeros_like(levels[..., :1]))
    # Counting the levels passed, and not searching for them, keeps one cell per step where levels coincide:
    # that makes the path a basis, and its derivatives dual potentials.
    from_p = origin < n
    passed_p = from_p.cumsum(-1).sub_(from_p.long())
    passed_q = torch.arange(n + m, device=p.device) - passed_p
    prices = power_of(x.gather(-1, passed_p.clamp_(max=n - 1)) - y.gather(-1, passed_q.clamp_(max=m - 1)), order)
    return widths, prices


def _to_occupied(weights: Tensor, positions: Tensor) -> Tensor:
    """Move bins without mass to the next bin that holds mass, the last ones back to the previous."""
    n = weights.shape[-1]
    index = torch.arange(n, device=weights.device).expand(weights.shape)
    occupied = weights.detach() > 0
    following = index.masked_fill(~occupied, n).flip(-1).cummin(-1).values.flip(-1)
    last = index.masked_fill(~occupied, 0).amax(-1, keepdim=True)
    return positions.gather(-1, torch.minimum(following, last))


def _absolute_cdf_difference(p: Tensor, q: Tensor) -> Tensor:
    """Return |F - G|; its derivative is one-sided where no mass lies up to the bin, or none behind it."""
    front_p, back_p = _empty_ends(p)
    front_q, back_q = _empty_ends(q)
    front, back = front_p & front_q, back_p & back_q
    # Rounding of the last sums must not choose a side.
    apart = (p - q).cumsum(-1).masked_fill(front | back, 0.0)
    # Mass that arrives in the empty front of either histogram raises |F - G|; in the empty back it lowers F or G
    # there, and raises |F - G| again. The difference from the detached sum adds these derivatives and no value.
    both = (p + q).cumsum(-1)
    return apart.abs() + (front.to(p.dtype) - back.to(p.dtype)) * (both - both.detach())


def _empty_ends(weights: Tensor) -> tuple[Tensor, Tensor]:
    occupied = (weights.detach() > 0).long().cumsum(-1)
    return occupied == 0, occupied == occupied[..., -1:]


def power_of(difference: Tensor, power: float) -> Tensor:
    if power == 1:
        return difference.abs()
    if power == 2:
        return difference.square()
    return difference.abs() ** power


def _in_order(weights: Tensor, order: Int[Tensor, "*batch n"]) -> Tensor:
    if order.dim() == 1:
        return weights.index_select(-1, order)
    batch = broadcast_shape(weights.shape[:-1], order.shape[:-1])
    return weights.expand(*batch, -1).gather(-1, order.expand(*batch, -1))


def _to_shape_of(positions: Tensor, weights: Tensor) -> Tensor:
    return positions.expand(broadcast_shape(positions.shape, weights.shape))


def _position_dtypes(**inputs: Any) -> list[torch.dtype]:
    return [check_tensor(name, positions).dtype for name, positions in inputs.items() if positions is not None]


def checked_positions(name: str, positions: Tensor, weights: Tensor) -> Tensor:
    """Return checked positions in the dtype of `weights`."""
    check_finite(name, positions)
    check_last_axis(name, positions, weights.shape[-1])
    check_broadcast(**{name: positions.shape[:-1], "its weights": weights.shape[:-1]})
    return positions.to(weights.dtype)


def check_exponent(name: str, value: float) -> None:
    if not 1 <= check_number(name, value) < float("inf"):
        raise ValueError(f"{name} is {value}, expected a finite number of at least 1.")
