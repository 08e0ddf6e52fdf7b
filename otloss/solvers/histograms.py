"""Weights of both sides: checks, equal masses, batches and gradients."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from otloss._autograd import change_gradient
from otloss._checks import check_broadcast, check_finite, check_floating, float64_or, needs_torch
from otloss.costs import Cost, as_cost, cost_between
from otloss.costs.dense import posed_cost

# Relative difference of the two masses that rounding explains: entries of a normalised histogram carry one rounding
# each, and a histogram normalised in its own dtype carries the rounding of its sum too. Histograms in float64 were
# often normalised in float32, which leaves 1e-7 or so. Normalising in 16 bits leaves as much as a mistake would: cast
# to float32, such histograms have to be normalised again.
MASS_TOLERANCE = {torch.bfloat16: 3e-2, torch.float16: 4e-3, torch.float32: 1e-5, torch.float64: 1e-6}
_LOST_SHARE = 1e-4  # the rounding of a constant may lose no larger share of most differences of a gradient
_ZERO_ROUNDINGS = 16.0  # by as many roundings of their size derivatives of equal points may differ
_LARGEST_DERIVATIVE = 1e100  # second derivatives between two bins without mass are exponentials that may overflow
_LIGHT = 1e-5  # a share of the mean weight: a bin that is no lighter pays so much for a price that the value is a price
MASS_ROUNDING = 1e-5  # relative, by which the mass to be moved may exceed the mass of a side


def of_equal_mass(p: Tensor, q: Tensor) -> Tensor:
    """Return q with the mass of p, from which it differs by the rounding of a narrower dtype."""
    mass_p, mass_q = (w.detach().sum(-1, keepdim=True) for w in (p, q))
    return q * torch.where(mass_q > 0, mass_p / mass_q.masked_fill(mass_q == 0, 1.0), 1.0)


@dataclass(frozen=True)
class HistogramPair:
    """Two histograms in the arithmetic dtype with equal masses, and the dtype of the output.

    Attributes:
        p: (..., n).
        q: (..., m), the leading axes broadcast against the ones of p.
        dtype: the promoted dtype of the inputs.
        has_empty_side: whether a histogram holds no mass.
        rounding: the rounding unit of the weights in the dtypes that they were given in; float32 for 16 bits, which are
            too few to tell a difference.
        in_float64: p and q computed in float64 where the device has it: float32 cannot scale by 1 + 1e-8, and what that
            leaves counts beside histograms that are nearly equal.
    """

    p: Float[Tensor, "*batch n"]
    q: Float[Tensor, "*batch m"]
    dtype: torch.dtype
    has_empty_side: bool = False
    rounding: float = 0.0
    balanced_in: Callable[[torch.dtype], tuple[Tensor, Tensor]] | None = None

    @cached_property
    def in_float64(self) -> tuple[Float[Tensor, "*batch n"], Float[Tensor, "*batch m"]]:
        wide = float64_or(self.p.dtype, self.p.device)
        if self.p.dtype == wide:
            return self.p, self.q
        return (self.p.to(wide), self.q.to(wide)) if self.balanced_in is None else self.balanced_in(wide)

    @property
    def mass(self) -> Float[Tensor, "*batch"]:
        """The mean of both masses, without a graph."""
        mass_p, mass_q = (w.detach().sum(-1, dtype=torch.float64) for w in (self.p, self.q))
        return ((mass_p + mass_q) / 2).to(self.p.dtype)


def histogram_pair(p: Any, q: Any, *others: torch.dtype, balanced: bool = True) -> HistogramPair:
    """Check, promote and balance `p` and `q`; `others` are dtypes of further inputs that take part in the promotion.

    Not balanced, they keep their own masses, and their gradients are not centred: every mass has a value then.

    Raises:
        TypeError: if p or q is not a floating tensor.
        ValueError: if an entry is NaN, infinite or negative, if the masses differ by more than `MASS_TOLERANCE`,
            or if the batch axes or the devices do not fit.
    """
    masses = _checked_masses(p, q, ("p", "q"), balanced=balanced)
    has_empty_side = masses.has_empty_side
    dtype = functools.reduce(torch.promote_types, (p.dtype, q.dtype, *others))
    arithmetic = torch.promote_types(dtype, torch.float32)
    rounding = max(torch.finfo(torch.promote_types(w.dtype, torch.float32)).eps for w in (p, q))
    if not balanced:
        return HistogramPair(_widened(p, arithmetic), _widened(q, arithmetic), dtype, has_empty_side, rounding)
    balanced_in = functools.partial(_balanced, p, q, masses)
    return HistogramPair(*balanced_in(arithmetic), dtype, has_empty_side, rounding, balanced_in)


def _widened(weights: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the weights in the dtype; what float16 cannot hold of a gradient is cut off, which may be at bins of 0."""
    wide = weights.to(dtype)
    if weights.dtype == torch.float16:
        largest = torch.finfo(torch.float16).max
        change_gradient(wide, lambda gradient: gradient.clamp(-largest, largest))
    return wide


def check_masses(
    p: Any, q: Any, names: tuple[str, str] = ("p", "q"), *, balanced: bool = True, hint: str = ""
) -> tuple[Tensor, Tensor]:
    """Return both masses (...); `hint` ends the message where they differ. Raises as `histogram_pair`."""
    masses = _checked_masses(p, q, names, balanced=balanced, hint=hint)
    return masses.p, masses.q


class _Masses(NamedTuple):
    p: Float[Tensor, "*batch"]
    q: Float[Tensor, "*batch"]
    has_empty_side: bool
    has_light_bins: bool


def _checked_masses(p: Any, q: Any, names: tuple[str, str], *, balanced: bool, hint: str = "") -> _Masses:
    masses = _mass(names[0], p), _mass(names[1], q)
    if p.device != q.device:
        raise ValueError(
            f"{names[0]} is on {p.device} and {names[1]} on {q.device}, expected one device; move one with .to()."
        )
    check_broadcast(**{names[0]: p.shape[:-1], names[1]: q.shape[:-1]})
    tolerance = max(MASS_TOLERANCE.get(t.dtype, 0.0) for t in (p, q)) if balanced else torch.inf
    # Numbers are read one by one: for a single problem a comparison by torch takes longer.
    if masses[0].numel() and masses[1].numel():
        ratios = masses[0] / masses[1]
        smallest, largest = (ratio.item() for ratio in (torch.aminmax(ratios) if ratios.dim() else (ratios, ratios)))
        is_equal = smallest >= 1 - tolerance and largest * (1 - tolerance) <= 1  # not NaN, and then neither mass is 0
        weights = [w.detach().amin().item() for w in (p, q)]
        if is_equal and smallest > 0 and largest < torch.inf and all(weight >= 0 for weight in weights):
            limits = (_LIGHT / w.shape[-1] * mass.amax().item() for w, mass in zip((p, q), masses, strict=True))
            has_light_bins = any(weight < limit for weight, limit in zip(weights, limits, strict=True))
            return _Masses(*masses, has_empty_side=False, has_light_bins=has_light_bins)
    for name, weights, mass in zip(names, (p, q), masses, strict=True):
        _check_weights(name, weights.detach(), mass)
    if balanced:
        _check_equal_mass(masses, names, tolerance, hint)
    return _Masses(*masses, has_empty_side=not all(_is_positive(mass) for mass in masses), has_light_bins=True)


def pair_and_cost(
    p: Any, q: Any, cost: Any, *, balanced: bool = True, signed: bool = False
) -> tuple[HistogramPair, Cost]:
    """Return the checked pair, and the cost between them in their arithmetic dtype.

    With `signed` a matrix may have negative entries and +inf: it becomes a `SignedCost` then.

    Raises:
        TypeError, ValueError: as `histogram_pair`, `as_cost` and `cost_between`, and if the batch axes do not fit.
    """
    given = [cost.dtype, *(w.dtype for w in (p, q) if isinstance(w, Tensor))] if p is None or q is None else []
    p, q = weights_or_uniform(p, q, cost)
    fitted = posed_cost(cost) if signed else as_cost(cost)
    pair = histogram_pair(p, q, cost.dtype, balanced=balanced)
    if given:
        pair = replace(pair, dtype=functools.reduce(torch.promote_types, given))
    fitted = cost_between(pair.p, pair.q, fitted)
    check_broadcast(p=pair.p.shape[:-1], q=pair.q.shape[:-1], cost=fitted.batch_shape)
    return pair, fitted


def weights_or_uniform(p: Any, q: Any, cost: Any) -> tuple[Any, Any]:
    """Return p and q; in place of None, weights of 1 / n each for the bins of the cost, at least in float32.

    Of many bins float16 would round 1 / n to another mass, or to 0.

    Raises:
        ValueError: if the cost stands first, or images have axes of their own.
    """
    if not _fit(p, q, cost):
        _check_order(p, q, cost)
        _check_flat(p, q, cost)
    if p is not None and q is not None:
        return p, q
    has_shape = isinstance(cost, Cost) or (isinstance(cost, Tensor) and cost.dim() > 1)
    shape = cost.shape[-2:] if has_shape else as_cost(cost).shape
    like = next((w for w in (p, q, cost) if isinstance(w, Tensor)), cost)
    dtype = torch.promote_types(cost.dtype, torch.float32)
    p, q = (
        torch.full((size,), 1 / size, dtype=dtype, device=like.device) if weights is None and size else weights
        for weights, size in zip((p, q), shape, strict=True)
    )
    return p, q


def _fit(p: Any, q: Any, cost: Any) -> bool:
    """Whether all three are tensors of as many bins: most calls need no further check of their order."""
    if not (isinstance(p, Tensor) and isinstance(q, Tensor) and isinstance(cost, Tensor)) or cost.dim() < 2:
        return False
    return p.dim() > 0 and q.dim() > 0 and (p.shape[-1], q.shape[-1]) == cost.shape[-2:]


def _check_order(p: Any, q: Any, cost: Any) -> None:
    """Raise where the cost stands first and q last, the order of `ot.solve`."""
    if isinstance(p, Cost):
        is_first = True
    elif all(isinstance(t, Tensor) and t.dim() for t in (p, q, cost)):
        is_first = p.shape[-2:] == (q.shape[-1], cost.shape[-1]) and cost.shape[-2:] != (p.shape[-1], q.shape[-1])
    else:
        return
    if is_first:
        got = ", ".join(str(tuple(t.shape)) if isinstance(t, Tensor | Cost) else type(t).__name__ for t in (p, q, cost))
        raise ValueError(
            f"the arguments have the shapes {got}: the cost stands first, as in POT's ot.solve(C, p, q); expected the "
            "order (p, q, C), as in emd(p, q, C)."
        )


def _check_flat(p: Any, q: Any, cost: Any) -> None:
    """Raise where the bins of p or q lie along several axes, as in images."""
    if not isinstance(cost, Cost) and not (isinstance(cost, Tensor) and cost.dim() > 1):
        return
    for name, weights, size in zip(("p", "q"), (p, q), cost.shape[-2:], strict=True):
        if not isinstance(weights, Tensor) or weights.dim() < 2 or weights.shape[-1] == size:
            continue
        for axes in (2, 3):
            if weights.dim() >= axes and weights.shape[-axes:].numel() == size:
                raise ValueError(
                    f"{name} has shape {tuple(weights.shape)}, expected (..., {size}), a bin for each cell of the "
                    f"cost; flatten the axes of images: images.flatten({-axes})."
                )


def over_largest(weights: Float[Tensor, "*batch n"]) -> Float[Tensor, "*batch n"]:
    """Return the weights over the largest of each row, so that their sum does not overflow."""
    largest = weights.detach().amax(-1, keepdim=True)
    return weights / largest.masked_fill(largest == 0, 1.0)


def centre_gradient(weights: Float[Tensor, "*batch bins"], *, has_light_bins: bool) -> Float[Tensor, "*batch bins"]:
    """Return `weights` unchanged; its gradient loses its mean over the bins, or `centre_of` where bins are light."""
    if needs_torch(weights):
        change = weights - weights.detach()  # 0, with the derivatives
        return weights.detach() + (change - change.mean(-1, keepdim=True))
    if not (torch.is_grad_enabled() and weights.requires_grad):
        return weights
    centred: Tensor = _CentreGradient.apply(weights, has_light_bins)
    return centred


def centre_gradient_over(
    is_point: Bool[Tensor, "*batch bins"], weights: Float[Tensor, "*batch bins"]
) -> Float[Tensor, "*batch bins"]:
    """Return `weights` unchanged; its gradient loses its mean over the points of padded clouds, and is 0 elsewhere."""
    is_number = is_point & weights.detach().isfinite()  # others are named later
    change = torch.where(is_number, weights - weights.detach(), 0.0)  # 0, with the derivatives
    mean = change.sum(-1, keepdim=True) / is_point.sum(-1, keepdim=True).clamp(min=1)
    return weights.detach() + torch.where(is_point, change - mean, 0.0)


class _CentreGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weights: Tensor, has_light_bins: bool) -> Tensor:
        ctx.has_light_bins = has_light_bins
        if has_light_bins:
            ctx.save_for_backward(weights)
        return weights.view_as(weights)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (gradient,) = gradients
        if not ctx.has_light_bins:
            return gradient - gradient.mean(-1, keepdim=True), None
        (weights,) = ctx.saved_tensors
        return gradient - centre_of(gradient, weights), None


def centre_of(
    gradient: Float[Tensor, "*batch bins"], weights: Float[Tensor, "*batch bins"]
) -> Float[Tensor, "*batch 1"]:
    """Return the constant that centres a gradient: its mean over the bins, or the median over those that are not light.

    The median where the mean is so large, beside most differences of bins that are not light, that these would lose
    their digits: a bin without mass that only pairs of a price reach has a derivative of the size of the price, and a
    second derivative between bins without mass may be above `_LARGEST_DERIVATIVE`. Bins
    that differ by rounding alone, as bins at equal points do, have no digits to lose.
    """
    mean = gradient.mean(-1, keepdim=True)
    limit = _LIGHT / weights.shape[-1] * weights.detach().sum(-1, keepdim=True)
    is_heavy = (weights.detach() != 0) & (weights.detach() >= limit)
    of_heavy = torch.where(is_heavy, gradient.detach(), torch.nan)
    median = of_heavy.nanmedian(-1, keepdim=True).values
    differences, distance = (of_heavy - median).abs(), (mean.detach() - median).abs()
    smallest = torch.finfo(torch.float32).eps * distance / _LOST_SHARE  # the weights may be float32
    zero = _ZERO_ROUNDINGS * (
        torch.finfo(gradient.dtype).eps * median.abs() + torch.finfo(torch.float64).eps * distance
    )
    differs = differences > zero
    lost = (differs & (differences < smallest)).sum(-1, keepdim=True)
    is_lost = (2 * lost > differs.sum(-1, keepdim=True)) | (distance > _LARGEST_DERIVATIVE)
    is_far = distance > differences.nan_to_num(nan=0.0).amax(-1, keepdim=True)
    return torch.where(is_far & is_lost, median, mean)


def _mass(name: str, weights: Any) -> Tensor:
    check_floating(name, weights)
    if weights.dim() == 0 or weights.shape[-1] == 0:
        raise ValueError(f"{name} has shape {tuple(weights.shape)}, expected (..., bins) with at least one bin.")
    mass: Tensor = weights.detach().sum(-1, dtype=torch.float64)
    return mass


def _check_weights(name: str, weights: Tensor, mass: Tensor) -> None:
    if not mass.numel() or (weights.amin().item() >= 0 and mass.amax().item() < torch.inf):
        return
    check_finite(name, weights)
    if weights.amin() < 0:
        *row, bin_index = _first(weights < 0)
        raise ValueError(
            f"{name} holds {float(weights[*row, bin_index])} in bin {bin_index}{_at(tuple(row))}, "
            "expected weights >= 0; clamp rounding errors with .clamp(min=0), or turn scores into weights with softmax."
        )
    raise ValueError(f"{name} has a mass beyond float64, expected finite sums; rescale it.")


def _check_equal_mass(masses: tuple[Tensor, Tensor], names: tuple[str, str], tolerance: float, hint: str) -> None:
    mass_p, mass_q = masses
    larger = torch.maximum(mass_p, mass_q)
    if ((mass_p - mass_q).abs() > tolerance * larger).any():
        # The worst row relative to its own mass, so that one heavy problem does not hide a light one.
        relative = (mass_p - mass_q).abs() / larger.clamp(min=torch.finfo(torch.float64).tiny)
        row = _first(relative == relative.max())
        got_p, got_q = (float(mass.expand(relative.shape)[row]) for mass in (mass_p, mass_q))
        raise ValueError(
            f"{names[0]} and {names[1]} hold different masses{_at(row)}: {got_p:.9g} and {got_q:.9g}, a relative "
            f"difference of {float(relative[row]):.2g}; expected at most {tolerance:g}. Normalise both, for example "
            f"{names[0]} / {names[0]}.sum(-1, keepdim=True).{hint}"
        )


def _is_positive(mass: Tensor) -> bool:
    return not mass.numel() or mass.amin().item() > 0


def _balanced(p: Tensor, q: Tensor, masses: _Masses, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return p and q scaled to the mean of both masses, with gradients that are centred."""
    mass_p, mass_q = masses.p, masses.q
    is_batch = mass_p.dim() or mass_q.dim()
    # Numbers for a single problem, as in `_checked_masses`.
    of_p, of_q = (mass_p, mass_q) if is_batch else (mass_p.item(), mass_q.item())
    both: Any = (of_p + of_q) / 2
    scaled = (_rescaled(weights, mass, both, dtype, masses.has_empty_side) for weights, mass in ((p, of_p), (q, of_q)))
    balanced_p, balanced_q = (centre_gradient(weights, has_light_bins=masses.has_light_bins) for weights in scaled)
    return balanced_p, balanced_q


def _rescaled(weights: Tensor, mass: Any, target: Any, dtype: torch.dtype, has_empty_side: bool) -> Tensor:
    # The scale carries no graph: its gradient is the same for every bin, and centring removes it.
    scale = target / (mass + (mass == 0) if has_empty_side else mass)
    return weights.to(dtype) * (scale.to(dtype).unsqueeze(-1) if isinstance(scale, Tensor) else scale)


def _first(mask: Tensor) -> tuple[int, ...]:
    return tuple(int(i) for i in mask.nonzero()[0])


def _at(row: tuple[int, ...]) -> str:
    return f" of row {row[0] if len(row) == 1 else row}" if row else ""
