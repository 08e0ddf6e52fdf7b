"""Bins of a number line: real values as labels over them, and back.

With centres c_k and edges e_k, a value v becomes

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

import math
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from otloss._checks import check_finite, check_positive
from otloss.losses.real import check_real, wide_enough

FORMS = ("two_hot", "one_hot", "gaussian")
# Deviation in mean bin widths; J. Farebrother et al., Stop Regressing, arXiv 2403.03950, section 3.1.
_SIGMA = 0.75


@dataclass(frozen=True)
class Bins:
    """Neighbouring bins.

    Attributes:
        centres: (K,) strictly increasing, where the mass of a bin is taken to lie.
        edges: (K + 1,) strictly increasing.
    """

    centres: Float[Tensor, " bins"]
    edges: Float[Tensor, " edges"]

    @staticmethod
    def of(bins: Any, count: int, dtype: torch.dtype) -> Bins:
        """Take K centres or K + 1 edges, in `dtype` or wider; the edges of centres lie midway between them.

        Whole numbers that `dtype` would round, such as seconds since 1970 in float32, become float64.

        Raises:
            TypeError: if `bins` is no tensor of real numbers.
            ValueError: if its length is neither, it does not increase strictly, or a number is not finite.
        """
        if check_real("bins", bins).shape not in ((count,), (count + 1,)):
            raise ValueError(
                f"bins has shape {tuple(bins.shape)}, expected ({count},) centres or ({count + 1},) edges for logits "
                f"over {count} bins."
            )
        if bins.requires_grad:
            raise ValueError("bins require a gradient, which is not given; pass bins.detach().")
        check_finite("bins", bins)
        bins = bins if bins.is_floating_point() else bins.long()
        down = bins[1:] <= bins[:-1]  # differences of whole numbers may wrap around
        if down.any():
            k = int(down.nonzero()[0])
            raise ValueError(
                f"bins[{k}] is {bins[k].item():.9g} and bins[{k + 1}] {bins[k + 1].item():.9g}, expected strictly "
                "increasing centres or edges; sort them, and drop repeated ones."
            )
        wide = torch.promote_types(bins.dtype, dtype) if bins.is_floating_point() else dtype
        bins = bins.to(wide_enough("bins", bins, wide))
        if bins.shape[0] == count + 1:
            return Bins((bins[:-1] + bins[1:]) / 2, bins)
        if count == 1:
            raise ValueError("bins holds one centre, which leaves the width of its bin open; pass its two edges.")
        halves = bins.diff() / 2
        return Bins(bins, torch.cat([bins[:1] - halves[:1], bins[:-1] + halves, bins[-1:] + halves[-1:]]))


def labels_of(values: Tensor, bins: Bins, *, form: str, sigma: float | None, outside: str) -> Tensor:
    """Return real values (...) as bin positions ("one_hot") or soft labels (..., K).

    Raises:
        ValueError: if a value is not finite, or outside of the bins and `outside` is "error"; or a setting is unknown.
    """
    check_form(form, sigma, outside)
    check_finite("target", values)
    values = values.to(wide_enough("target", values, bins.centres.dtype))
    bins = Bins(bins.centres.to(values.dtype), bins.edges.to(values.dtype))
    ends = bins.centres if form == "two_hot" else bins.edges
    low, high = float(ends[0]), float(ends[-1])
    beyond = ((values < low) | (values > high)).detach()
    if outside == "error" and beyond.any():
        first = tuple(int(i) for i in beyond.nonzero()[0])
        what = "centres of the bins, between which two_hot keeps the mean" if form == "two_hot" else "bins"
        raise ValueError(
            f"target holds {int(beyond.sum())} values outside of [{low:g}, {high:g}], the {what}; the first at index "
            f'{first} is {float(values.detach()[first]):g}. Widen the bins, or clamp such values with outside="clamp".'
        )
    values = values.clamp(low, high)
    if form == "gaussian":
        return _gaussian(values, bins, sigma)
    return _two_hot(values, bins.centres) if form == "two_hot" else _one_hot(values, bins)


def check_values(values: Tensor, logits: Tensor) -> None:
    """Raise ValueError unless there is one value for each row of the logits."""
    if values.shape != logits.shape[:-1]:
        raise ValueError(
            f"target has shape {tuple(values.shape)}, expected values {tuple(logits.shape[:-1])} or histograms "
            f"{tuple(logits.shape)} for logits {tuple(logits.shape)}; call target.squeeze(-1) to drop an axis of one."
        )


def check_form(form: str, sigma: float | None, outside: str) -> None:
    """Raise unless the settings of `labels_of` are known and fit each other."""
    if form not in FORMS:
        raise ValueError(f"labels is {form!r}, expected one of {FORMS}.")
    if outside not in ("error", "clamp"):
        raise ValueError(f'outside is {outside!r}, expected "error" or "clamp".')
    if sigma is not None:
        if form != "gaussian":
            raise ValueError(f'sigma={sigma} is given with labels={form!r}; it belongs to labels="gaussian".')
        check_positive("sigma", sigma)


def _one_hot(values: Tensor, bins: Bins) -> Tensor:
    if values.requires_grad:
        raise ValueError(
            'target requires a gradient, and labels="one_hot" has none; pass target.detach(), or use "two_hot".'
        )
    return torch.searchsorted(bins.edges[1:-1].contiguous(), values.contiguous(), right=True)


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
    least = torch.finfo(edges.dtype).tiny
    if sigma < least:
        raise ValueError(f'sigma is {sigma}, expected at least {least:g} in {edges.dtype}; use labels="one_hot".')
    scaled = (edges - values.unsqueeze(-1)) / sigma  # (..., K + 1)
    lower, upper = scaled[..., :-1], scaled[..., 1:]
    # Far to the right both tails are near one: there the mirrored tails are subtracted, which are small.
    mirrored = lower > 0
    near, far = torch.where(mirrored, -upper, lower), torch.where(mirrored, -lower, upper)
    mass = (torch.erfc(-far / math.sqrt(2)) - torch.erfc(-near / math.sqrt(2))) / 2
    within = mass.sum(-1, keepdim=True)
    # Each difference of tails is off by a rounding of one, which must stay small beside their sum.
    if within.numel() and not within.detach().amin() >= torch.finfo(edges.dtype).eps ** 0.5:
        raise ValueError(
            f"sigma is {sigma}, so wide beside the bins from {float(edges[0]):g} to {float(edges[-1]):g} that too "
            f"little of the normal distribution lies within them for {edges.dtype}; expected a deviation in the unit "
            "of the bins, less than 100 times their span."
        )
    return mass / within
