"""Regression by classification over bins: a histogram is predicted, and scored against a number or a histogram.

With centres c_k and edges e_k of the bins, a value v becomes the soft label

    "two_hot"    mass (c_{k+1} - v) / (c_{k+1} - c_k) on bin k and the rest on bin k + 1, for c_k <= v <= c_{k+1}:
                 its mean is v, so nothing is lost
    "one_hot"    all mass on the bin that holds v
    "gaussian"   the mass of a normal distribution of mean v and deviation sigma in each bin, as a share of that within
                 all bins

Sources: two-hot, M. Bellemare, W. Dabney, R. Munos, A Distributional Perspective on Reinforcement Learning, arXiv
1707.06887, where values are projected on atoms; gaussian, E. Imani, M. White, Improving Regression Performance with
Distributional Losses, arXiv 1806.04613.
"""

from __future__ import annotations

import functools
import math
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Real
from torch import Tensor
from torch.nn.functional import one_hot

from otloss._checks import check_count, check_finite, check_positive, check_tensor, is_differentiated, significant_bits
from otloss._ordered_classes import check_choice
from otloss._public import public
from otloss.losses.geometry import Line, check_power, increasing
from otloss.losses.ordinal import ordinal_loss_of_rows
from otloss.losses.rows import check_cross_entropy, check_logits, class_count, dtype_of_loss, posed_rows

ENCODINGS = ("two_hot", "one_hot", "gaussian")
OUTSIDE = ("error", "clamp")
# Deviation in mean bin widths; J. Farebrother et al., Stop Regressing, arXiv 2403.03950, section 3.1.
_SIGMA = 0.75
_DTYPES = {8: torch.bfloat16, 11: torch.float16, 24: torch.float32, 53: torch.float64}  # by significant bits


class Bins(NamedTuple):
    """Neighbouring bins: centres (K,), where the mass of a bin is taken to lie, and edges (K + 1,), both increasing."""

    centres: Float[Tensor, " bins"]
    edges: Float[Tensor, " edges"]


@public
def histogram_loss(
    logits: Float[Tensor, "*batch bins"],
    target: Real[Tensor, "*batch"] | Float[Tensor, "*batch bins"],
    bins: Real[Tensor, " bins_or_edges"],
    *,
    encoding: str = "two_hot",
    sigma: float | None = None,
    outside: str = "error",
    power: float = 2,
    cross_entropy: float = 0.0,
    sample_weight: Float[Tensor, "*batch"] | None = None,
    reduction: str = "mean",
) -> Float[Tensor, "*batch"]:
    """Return how far predicted histograms softmax(logits) lie from real values or from histograms, on the number line.

    The loss is `ordinal_loss` over the centres of the bins: power 2 is the ranked probability score in the unit
    of the bins, power 1 is W_1. The prediction as a number is `histogram_mean(logits, bins)`.

    Valid values lie between the outermost edges, but with the default encoding "two_hot" between the outermost
    *centres*, beyond which no mean lies: half a bin less at each end. `outside` says what happens to the others.

    Formulas: docs/guide/definitions.md#def-ordinal

    Args:
        logits: (..., K); a bin with -inf takes no part.
        target: (...) real values in the unit of the bins, or (..., K) histograms that sum to 1.
        bins: (K,) centres or (K + 1,) edges, strictly increasing. The edges of centres lie midway between them, the
            outermost ones as far out as the next ones are in; the centres of edges lie midway too.
        encoding: how a value becomes a histogram. "two_hot" splits its mass between the two nearest centres so that the
            mean is the value; "one_hot" gives it to its bin; "gaussian" smooths it with `sigma` (known as HL-Gauss).
        sigma: deviation in the unit of the bins; 0.75 mean widths of a bin by default.
        outside: "error" raises for values outside of the valid range, "clamp" takes its nearest end for them, with a
            gradient of 0.
        power: at least 1, as for `ordinal_loss`.
        cross_entropy: weight of the cross-entropy that is added.
        sample_weight, reduction: as for `ordinal_loss`.

    Returns:
        A scalar, or (...), in the promoted dtype of logits, target histograms, bins and weights.
        Differentiable in logits, in target histograms, and in target values but for "one_hot", where that raises.

    Raises:
        TypeError: if logits are not floating, or bins and target not tensors.
        ValueError: if a value is outside of the valid range and not clamped, a histogram does not sum to 1, bins do
            not increase strictly or are not K or K + 1, a number is NaN or infinite, or a setting is unknown.

    Sources:
        E. Imani, M. White, Improving Regression Performance with Distributional Losses, arXiv 1806.04613;
        L. Hou, C.-P. Yu, D. Samaras, Squared Earth Mover's Distance-based Loss, arXiv 1611.05916.

    Example:
        >>> ages = torch.tensor([10.0, 20.0, 30.0, 40.0])
        >>> logits = torch.tensor([[0.0, 9.0, 9.0, 0.0]])
        >>> histogram_loss(logits, torch.tensor([25.0]), ages)
        tensor(7.6131e-08)
        >>> histogram_loss(logits, torch.tensor([40.0]), ages, power=1)
        tensor(15.0000)
    """
    mix, power = check_cross_entropy(cross_entropy), check_power(power)
    _check_options(encoding, sigma, outside)
    classes = class_count(logits)
    check_tensor("target", target)
    dtype = _promoted(dtype_of_loss(logits), target=target, bins=bins, sample_weight=sample_weight)
    wide = torch.promote_types(dtype, torch.float32)
    placed = _bins(bins, classes, wide)
    if target.shape != logits.shape:
        if target.shape != logits.shape[:-1]:
            raise ValueError(
                f"target has shape {tuple(target.shape)}, expected values {tuple(logits.shape[:-1])} or histograms "
                f"{tuple(logits.shape)} for logits {tuple(logits.shape)}; target.squeeze(-1) drops an axis of one."
            )
        target = _labels(target, placed, bins, encoding=encoding, sigma=sigma, outside=outside)
        target = target.to(wide) if target.is_floating_point() else target
    rows = posed_rows(logits.to(wide), target, sample_weight=sample_weight, reduction=reduction, dim=-1)
    rows = replace(rows, geometry=Line(placed.centres.diff().to(wide), power))
    return ordinal_loss_of_rows(rows, mix).to(dtype)


def histogram_mean(
    logits: Float[Tensor, "*batch bins"], bins: Real[Tensor, " bins_or_edges"]
) -> Float[Tensor, "*batch"]:
    """Return the mean of the histograms softmax(logits), in the unit of the bins: the way back to a number.

    Args:
        logits: (..., K), finite or -inf.
        bins: (K,) centres or (K + 1,) edges, as for `histogram_loss`.

    Returns:
        (...), in the promoted dtype, differentiable in the logits.

    Raises:
        TypeError, ValueError: as for `histogram_loss`.

    Example:
        >>> histogram_mean(torch.tensor([0.0, 0.0, -torch.inf]), torch.tensor([0.0, 10.0, 20.0, 30.0]))
        tensor(10.)
    """
    classes = class_count(logits)
    dtype = _promoted(dtype_of_loss(logits), bins=bins)
    wide = torch.promote_types(dtype, torch.float32)
    centres = _bins(bins, classes, wide).centres
    check_logits(logits.reshape(-1, classes))
    return (logits.to(wide).softmax(-1) * centres.to(wide)).sum(-1).to(dtype)


def histogram_labels(
    values: Real[Tensor, "*batch"],
    bins: Real[Tensor, " bins_or_edges"],
    count: int,
    *,
    encoding: str = "two_hot",
    sigma: float | None = None,
    outside: str = "error",
) -> Float[Tensor, "*batch bins"]:
    """Return real values as histograms over the bins, as `histogram_loss` makes them.

    Args:
        values: (...) real values in the unit of the bins.
        bins: (count,) centres or (count + 1,) edges, as for `histogram_loss`.
        count: number of bins.
        encoding, sigma, outside: as for `histogram_loss`.

    Returns:
        (..., count) of mass one, in the promoted dtype, float32 for integers; differentiable but for "one_hot".

    Raises:
        TypeError, ValueError: as for `histogram_loss`.

    Example:
        >>> histogram_labels(torch.tensor([2.5]), torch.tensor([0.0, 2.0, 4.0]), 3)
        tensor([[0.0000, 0.7500, 0.2500]])
    """
    _check_options(encoding, sigma, outside)
    dtype = _promoted(None, values=values, bins=bins)
    count = check_count("count", count)
    placed = _bins(bins, count, torch.promote_types(dtype, torch.float32))
    labels = _labels(values, placed, bins, encoding=encoding, sigma=sigma, outside=outside)
    return (one_hot(labels, count) if encoding == "one_hot" else labels).to(dtype)


def _promoted(dtype: torch.dtype | None, **tensors: Any) -> torch.dtype:
    """Return the promoted dtype of the floating tensors; the default one without any."""
    floating = [check_tensor(name, t).dtype for name, t in tensors.items() if t is not None]
    floating = [other for other in (dtype, *floating) if other is not None and other.is_floating_point]
    return functools.reduce(torch.promote_types, floating) if floating else torch.get_default_dtype()


def _bins(bins: Any, count: int, dtype: torch.dtype) -> Bins:
    """Return K centres or K + 1 edges as bins, in `dtype` or wider; the edges of centres lie midway between them."""
    if is_differentiated(check_tensor("bins", bins)):
        raise ValueError("bins require a gradient or carry a tangent, which is not supported; pass bins.detach().")
    bins = increasing("bins", bins, (count,), (count + 1,))
    bins = bins.to(torch.promote_types(bins.dtype, dtype))
    if bins.shape[0] == count + 1:
        return Bins((bins[:-1] + bins[1:]) / 2, bins)
    if count == 1:
        raise ValueError("bins holds one centre, which leaves the width of its bin open; pass its two edges.")
    halves = bins.diff() / 2
    return Bins(bins, torch.cat([bins[:1] - halves[:1], bins[:-1] + halves, bins[-1:] + halves[-1:]]))


def _check_options(encoding: str, sigma: float | None, outside: str) -> None:
    check_choice("encoding", encoding, ENCODINGS)
    check_choice("outside", outside, OUTSIDE)
    if sigma is not None and encoding != "gaussian":
        raise ValueError(f'sigma={sigma} is given with encoding={encoding!r}; it belongs to encoding="gaussian".')


def _labels(
    values: Tensor, bins: Bins, bins_as_given: Tensor, *, encoding: str, sigma: float | None, outside: str
) -> Tensor:
    """Return real values (...) as bin positions ("one_hot") or soft labels (..., K)."""
    check_finite("target", values)
    limits = bins.centres if encoding == "two_hot" else bins.edges
    compared = _dtype_to_compare(values.dtype, bins_as_given, limits)
    values = values if values.is_floating_point() else values.double()
    dtype = torch.promote_types(values.dtype, bins.centres.dtype)
    rounded, ends = values.detach().to(compared), limits.to(compared)
    beyond = (rounded < ends[0]) | (rounded > ends[-1])
    values, bins, limits = values.to(dtype), Bins(bins.centres.to(dtype), bins.edges.to(dtype)), limits.to(dtype)
    low, high = float(limits[0]), float(limits[-1])
    if outside != "clamp" and beyond.any():
        first = tuple(int(i) for i in beyond.nonzero()[0])
        what = "centres of the bins, between which two_hot keeps the mean" if encoding == "two_hot" else "bins"
        raise ValueError(
            f"target holds {int(beyond.sum())} values outside of [{low:g}, {high:g}], the {what}; the first at index "
            f"{first} is {float(values.detach()[first]):g}. Widen the bins, or take the nearest valid values by "
            'outside="clamp".'
        )
    within = values.clamp(low, high)
    # What is beyond an end by rounding alone keeps its gradient.
    values = within if outside == "clamp" else values + (within - values).detach()
    if encoding == "gaussian":
        return _gaussian(values, bins, sigma)
    if encoding == "two_hot":
        return _two_hot(values, bins.centres)
    _check_no_gradient(values)
    return torch.searchsorted(bins.edges[1:-1].to(compared), rounded.contiguous(), right=True)


def _dtype_to_compare(values: torch.dtype, bins: Tensor, limits: Tensor) -> torch.dtype:
    """Return the narrower dtype of values and bins, in which 0.7 is one number.

    The wider one for whole numbers beside bins of 32 or 64 bits, since float32 rounds those above 2^24, and where the
    narrower one cannot tell the bins apart.
    """
    if values == limits.dtype == bins.dtype == torch.float32:  # nearly always
        return values
    of_values = values if values.is_floating_point else torch.float64
    wide = torch.promote_types(of_values, limits.dtype)
    if not values.is_floating_point and bins.dtype not in (torch.float16, torch.bfloat16):
        return wide
    # float32 in float64, as in a module after `.double()`, is known by its digits; functorch has no `.numpy()`
    bits = significant_bits(np.array(bins.detach().tolist(), dtype=np.float64), bins.dtype)
    narrow = max(of_values, _DTYPES[bits], key=lambda dtype: torch.finfo(dtype).eps)
    return narrow if bool((limits.to(narrow).diff() > 0).all()) else wide


def _check_no_gradient(values: Tensor) -> None:
    if is_differentiated(values):
        raise ValueError(
            'target requires a gradient or carries a tangent, which encoding="one_hot" does not give; pass '
            'target.detach(), or use "two_hot".'
        )


def _two_hot(values: Tensor, centres: Tensor) -> Tensor:
    count = centres.shape[0]
    if count == 1:
        return torch.ones_like(values).unsqueeze(-1)
    left = torch.searchsorted(centres[1:-1].contiguous(), values.detach().contiguous(), right=True)
    share = (values - centres[left]) / (centres[left + 1] - centres[left])
    both = torch.stack([left, left + 1], dim=-1), torch.stack([1 - share, share], dim=-1)
    return values.new_zeros(*values.shape, count).scatter(-1, *both)


def _gaussian(values: Tensor, bins: Bins, sigma: float | None) -> Tensor:
    edges = bins.edges
    if sigma is None:
        sigma = _SIGMA * float(edges[-1] - edges[0]) / bins.centres.shape[0]
    check_positive("sigma", sigma)
    tiny = torch.finfo(edges.dtype).tiny
    if sigma < tiny:
        raise ValueError(f'sigma is {sigma}, expected at least {tiny:g} in {edges.dtype}; use encoding="one_hot".')
    scaled = (edges - values.unsqueeze(-1)) / sigma  # (..., K + 1)
    lower, upper = scaled[..., :-1], scaled[..., 1:]
    # Right of the value both tails are near one and would cancel; the mirrored tails are small.
    mirrored = lower > 0
    near, far = torch.where(mirrored, -upper, lower), torch.where(mirrored, -lower, upper)
    mass = (torch.erfc(-far / math.sqrt(2)) - torch.erfc(-near / math.sqrt(2))) / 2
    total = mass.sum(-1, keepdim=True)
    # Each difference has an absolute error of one rounding, which must stay small beside the sum.
    if total.numel() and not total.detach().amin() >= torch.finfo(edges.dtype).eps ** 0.5:
        raise ValueError(
            f"sigma is {sigma}, so wide beside the bins from {float(edges[0]):g} to {float(edges[-1]):g} that too "
            f"little of the normal distribution lies within them for {edges.dtype}; expected a deviation in the unit "
            "of the bins, less than 100 times their span."
        )
    return mass / total
