"""Regression by classification over bins: a histogram is predicted, and scored against a number or a histogram."""

from __future__ import annotations

import functools
from typing import Any

import torch
from jaxtyping import Float, Real
from torch import Tensor
from torch.nn.functional import one_hot

from otloss._checks import check_reduction, check_tensor
from otloss.losses.bins import Bins, check_form, check_values, labels_of
from otloss.losses.geometry import geometry
from otloss.losses.labels import check_cross_entropy, check_logits, class_count, dtype_of_loss, labelled
from otloss.losses.ordinal import reduced_loss
from otloss.losses.real import check_real


def histogram_loss(
    logits: Float[Tensor, "*batch bins"],
    target: Real[Tensor, "*batch"] | Float[Tensor, "*batch bins"],
    bins: Real[Tensor, " bins_or_edges"],
    *,
    labels: str = "two_hot",
    sigma: float | None = None,
    outside: str = "error",
    power: float = 2,
    cross_entropy: float = 0.0,
    sample_weight: Float[Tensor, "*batch"] | None = None,
    reduction: str = "mean",
) -> Float[Tensor, "*batch"]:
    """Return how far predicted histograms softmax(logits) lie from real values or from histograms, on the number line.

    The loss is that of `ordinal_loss` over the centres of the bins: power 2 is the ranked probability score in the unit
    of the bins, power 1 is W_1. The prediction as a number is `histogram_mean(logits, bins)`.

    Args:
        logits: (..., K); a bin with -inf takes no part.
        target: (...) real values in the unit of the bins, or (..., K) histograms that sum to 1.
        bins: (K,) centres or (K + 1,) edges, strictly increasing. The edges of centres lie midway between them, the
            outermost ones as far out as the next ones are in; the centres of edges lie midway too.
        labels: how a value becomes a histogram. "two_hot" splits its mass between the two nearest centres so that the
            mean is the value; "one_hot" gives it to its bin; "gaussian" smooths it with `sigma` (known as HL-Gauss).
        sigma: deviation in the unit of the bins; 0.75 mean widths of a bin by default.
        outside: "error" refuses values beyond the outermost edges (with "two_hot" the outermost centres, beyond which
            no mean lies); "clamp" moves them there.
        power: at least 1, as for `ordinal_loss`.
        cross_entropy: weight of the cross-entropy that is added.
        sample_weight, reduction: as for `ordinal_loss`.

    Returns:
        A scalar, or (...), in the promoted dtype of logits, target histograms, bins and weights.
        Differentiable in logits, in target histograms, and in target values but for "one_hot", where that raises.

    Raises:
        TypeError: if logits are not floating, or a tensor is none.
        ValueError: if a value is outside of the bins, a histogram does not sum to 1, bins do not increase strictly or
            are not K or K + 1, a number is NaN or infinite, or a setting is unknown.

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
    classes = class_count(logits)
    check_reduction(reduction)
    check_form(labels, sigma, outside)
    mix = check_cross_entropy(cross_entropy)
    dtype = _promoted(
        logits, target=check_real("target", target), bins=check_real("bins", bins), sample_weight=sample_weight
    )
    placed = Bins.of(bins, classes, torch.promote_types(dtype, torch.float32))
    apart = geometry(classes, logits.device, x=placed.centres, power=power)
    made = target.shape != logits.shape
    if made:
        check_values(target, logits)
        target = labels_of(target, placed, form=labels, sigma=sigma, outside=outside)
    rows = labelled(logits, target, placed.centres.dtype, sure=made, sample_weight=sample_weight)
    return reduced_loss(rows, apart.to(rows.logits.dtype), mix, reduction).to(dtype)


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
    dtype = _promoted(logits, bins=check_real("bins", bins))
    arithmetic = torch.promote_types(dtype, torch.float32)
    placed = Bins.of(bins, classes, arithmetic)
    check_logits(logits.reshape(-1, classes))
    return (logits.to(arithmetic).softmax(-1) * placed.centres).sum(-1).to(dtype)


def histogram_labels(
    values: Real[Tensor, "*batch"],
    bins: Real[Tensor, " bins_or_edges"],
    count: int,
    *,
    labels: str = "two_hot",
    sigma: float | None = None,
    outside: str = "error",
) -> Float[Tensor, "*batch bins"]:
    """Return real values as histograms over the bins, as `histogram_loss` makes them.

    Args:
        values: (...) real values in the unit of the bins.
        bins: (count,) centres or (count + 1,) edges, as for `histogram_loss`.
        count: number of bins.
        labels, sigma, outside: as for `histogram_loss`.

    Returns:
        (..., count) of mass one, in the promoted dtype, float32 for integers; differentiable but for "one_hot".

    Raises:
        TypeError, ValueError: as for `histogram_loss`.

    Example:
        >>> histogram_labels(torch.tensor([2.5]), torch.tensor([0.0, 2.0, 4.0]), 3)
        tensor([[0.0000, 0.7500, 0.2500]])
    """
    check_form(labels, sigma, outside)
    floating = [t.dtype for t in (check_real("values", values), check_real("bins", bins)) if t.is_floating_point()]
    dtype = functools.reduce(torch.promote_types, floating) if floating else torch.get_default_dtype()
    placed = Bins.of(bins, count, torch.promote_types(dtype, torch.float32))
    found = labels_of(values, placed, form=labels, sigma=sigma, outside=outside)
    return (one_hot(found, count) if labels == "one_hot" else found).to(dtype)


def _promoted(logits: Tensor, **others: Any) -> torch.dtype:
    """Check dtypes and devices beside the logits, and return the dtype of the answer."""
    dtype = dtype_of_loss(logits)
    for name, tensor in others.items():
        if tensor is None:
            continue
        if check_tensor(name, tensor).device != logits.device:
            raise ValueError(f"{name} is on {tensor.device}, logits on {logits.device}, expected one device; move one.")
        if tensor.is_floating_point():
            dtype = torch.promote_types(dtype, tensor.dtype)
    return dtype
