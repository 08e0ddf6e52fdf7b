"""Pose and reduce: what a loss over ordered classes was given becomes rows, and their values become the answer.

    pose      logits, targets, weights, distances -> Rows     checked and in one dtype, here and nowhere else
    value     Rows -> a value per row                         the loss: `ordinal`, `threshold`, `histogram`
    reduce    values -> the answer                            `Positions.reduced`

A position is one row of logits with its target. Positions that are left out are not read: their logits and weights may
hold anything, and their gradient is zero. The numbers of the others are read once, by a kernel or by `Rows.checked`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from otloss._checks import (
    check_below_infinity,
    check_finite,
    check_floating,
    check_not_batched,
    check_not_meta,
    check_not_negative,
    check_not_recorded,
    check_reduction,
    check_tensor,
    check_whole,
    numbers,
)
from otloss.losses.geometry import Geometry, GeometrySettings
from otloss.solvers.histograms import MASS_TOLERANCE, over_largest


@dataclass(frozen=True)
class Positions:
    """The positions of a batch, those among them that take part, and how their values become the answer.

    Attributes:
        shape: the shape of the positions.
        kept: which of them take part, or None for all of them.
        weight: (rows,) weights >= 0 of those, or None where all are one.
        reduction: "mean", "sum" or "none".
        dtype: of the answer.
    """

    shape: torch.Size
    kept: Bool[Tensor, "*batch"] | None
    weight: Float[Tensor, " rows"] | None
    reduction: str
    dtype: torch.dtype

    def divisor(self, rows: int) -> int | None:
        """Return what an unweighted mean or sum of so many rows divides by; None with weights, or for "none"."""
        if self.weight is not None or self.reduction == "none":
            return None
        return max(1, rows) if self.reduction == "mean" else 1

    def reduced(self, values: Float[Tensor, " rows"]) -> Tensor:
        """Return the weighted mean or sum of the values, or the weighted values at their positions and 0 elsewhere."""
        weight = self.weight
        if weight is not None and weight.numel() and self.reduction == "mean":
            weight = over_largest(weight)
        weighted = values if weight is None else values * weight
        if self.reduction == "none":
            if self.kept is not None:
                weighted = weighted.new_zeros(self.shape).masked_scatter(self.kept, weighted)
            return weighted.reshape(self.shape).to(self.dtype)
        total = weighted.sum()
        if self.reduction == "mean":
            mass = max(1, len(values)) if weight is None else weight.sum()
            total = total / (mass if isinstance(mass, int) else mass.masked_fill(mass == 0, 1.0))
        return total.to(self.dtype)


@dataclass(frozen=True)
class Rows:
    """The positions that take part, in one row each. Shapes and dtypes are checked, numbers by `checked` only.

    Attributes:
        positions: where the rows come from, and how their values become the answer.
        logits: (rows, K), at least float32.
        target: (rows,) class positions in int64, or (rows, K) soft labels as they were given.
        geometry: the distances between the classes in the dtype of the logits, if the loss has any.
    """

    positions: Positions
    logits: Float[Tensor, "rows classes"]
    target: Tensor
    geometry: Geometry | None

    @property
    def is_soft(self) -> bool:
        return self.target.is_floating_point()

    def checked(self) -> Rows:
        """Return the rows with soft labels of mass one; raise ValueError if a logit or a label is invalid."""
        label = self.target
        if self.is_soft:
            label = normalised(label, self.logits.dtype)
        else:
            check_positions("target", label, self.logits.shape[-1], None)
        check_logits(self.logits)
        return replace(self, target=label)


def posed_rows(
    logits: Any,
    target: Any,
    distances: GeometrySettings | None = None,
    *,
    class_weight: Any = None,
    sample_weight: Any = None,
    ignore_index: int | None = None,
    reduction: str,
    dim: int | None = None,
) -> Rows:
    """Return what the user gave as rows: checked but for the numbers, in one dtype, without what is left out.

    Raises:
        TypeError, ValueError: as `ordinal_loss`.
    """
    # What follows runs inside torch.vmap too: what it reads, it reads by `numbers`.
    check_not_recorded()
    check_floating("logits", logits, is_read=False)
    check_not_meta("target", check_tensor("target", target, is_read=False))
    check_reduction(reduction)
    logits, target = _classes_last(logits, target, dim)
    classes, shape = _last_axis(logits), logits.shape[:-1]
    geometry = None if distances is None else distances.geometry(classes, logits.device)
    soft = _is_soft(target, logits)
    weights = {"class_weight": class_weight, "sample_weight": sample_weight}
    others = [check_tensor(name, w, is_read=False).dtype for name, w in weights.items() if w is not None]
    dtype = dtype_of_loss(logits)
    for other in (target.dtype, *others, *(() if distances is None else distances.dtypes)):
        if other.is_floating_point:
            dtype = torch.promote_types(dtype, other)
    arithmetic = torch.promote_types(dtype, torch.float32)
    if not soft:
        target = target.long()  # In a narrow dtype -100 would be compared modulo its width.
    kept = _kept(target, ignore_index, soft)
    rows = (_in_rows(logits) if kept is None else logits[kept]).to(arithmetic)
    label = _in_rows(target) if soft else target.reshape(-1) if kept is None else target[kept]
    weight = position_weights(sample_weight, shape, kept, arithmetic)
    if class_weight is not None:
        of_class = _weights_by_class(class_weight, label, classes, arithmetic)
        weight = of_class if weight is None else weight * of_class
    geometry = None if geometry is None else geometry.to(arithmetic)
    return Rows(Positions(shape, kept, weight, reduction, dtype), rows, label, geometry)


def _kept(target: Tensor, ignore_index: int | None, soft: bool) -> Bool[Tensor, "*batch"] | None:
    """Return which positions are not ignored, or None where none is."""
    if ignore_index is None:
        return None
    check_ignore_index(ignore_index)
    if soft:
        raise ValueError(
            f"ignore_index={ignore_index} is given with soft labels, expected class positions; leave positions with "
            "soft labels out by sample_weight 0."
        )
    kept = target != ignore_index
    if numbers(kept).all():
        return None
    check_not_batched(kept)  # the number of positions that are left differs between the examples
    return kept


def _weights_by_class(weights: Tensor, label: Tensor, classes: int, dtype: torch.dtype) -> Float[Tensor, " rows"]:
    """Return the weight of each row by its label: of a soft label the expected one."""
    if weights.shape != (classes,):
        raise ValueError(f"class_weight has shape {tuple(weights.shape)}, expected ({classes},), one a class.")
    by_class = _check_weights("class_weight", weights).to(dtype)
    if label.is_floating_point():
        return (normalised(label, dtype) * by_class).sum(-1)
    check_positions("target", label, classes, None)
    return by_class[label]


def position_weights(
    sample_weight: Any, shape: torch.Size, kept: Tensor | None, dtype: torch.dtype
) -> Float[Tensor, " rows"] | None:
    """Return the weights of the positions that take part, or None without any."""
    if sample_weight is None:
        return None
    try:
        weights = check_tensor("sample_weight", sample_weight, is_read=False).expand(shape)
    except RuntimeError:
        raise ValueError(
            f"sample_weight has shape {tuple(sample_weight.shape)}, expected {tuple(shape)}, one a position."
        ) from None
    return _check_weights("sample_weight", weights.reshape(-1) if kept is None else weights[kept]).to(dtype)


def _check_weights(name: str, weights: Tensor) -> Tensor:
    check_finite(name, weights)
    if weights.numel() and (smallest := float(numbers(weights).amin())) < 0:
        raise ValueError(f"{name} holds {smallest}, expected weights >= 0.")
    return weights


def class_count(logits: Any, *, is_read: bool = True) -> int:
    """Return K for logits (..., K); `is_read` as for `check_tensor`."""
    return _last_axis(check_floating("logits", logits, is_read=is_read))


def _last_axis(logits: Tensor) -> int:
    if logits.dim() == 0 or logits.shape[-1] == 0:
        raise ValueError(f"logits have shape {tuple(logits.shape)}, expected (..., K) with at least one class.")
    return int(logits.shape[-1])


def dtype_of_loss(logits: Tensor) -> torch.dtype:
    """Return the dtype of a loss of these logits: their own, but at least float32 under autocast, as torch does."""
    wide, device = torch.promote_types(logits.dtype, torch.float32), logits.device.type
    if wide == logits.dtype or not torch.amp.is_autocast_available(device) or not torch.is_autocast_enabled(device):
        return logits.dtype
    return wide


def _classes_last(logits: Tensor, target: Tensor, dim: int | None) -> tuple[Tensor, Tensor]:
    """Return logits and target with the classes moved from axis `dim` to the last one."""
    shape = tuple(logits.shape)
    if dim is None:
        # The losses of torch expect the classes on axis 1.
        if len(shape) > 2 and target.shape == shape[:-1] == (shape[0], *shape[2:]):
            raise ValueError(
                f"logits have shape {shape} and target {tuple(target.shape)}, which fits classes on the last axis and "
                "on axis 1; choose one by dim=-1 or dim=1."
            )
        return logits, target
    check_whole("dim", dim, "an axis of the logits, or None")
    if not -len(shape) <= dim < len(shape):
        raise ValueError(f"dim is {dim}, expected an axis of the logits {shape}.")
    axis = dim % len(shape)
    positions = shape[:axis] + shape[axis + 1 :]
    if target.shape not in (shape, positions):
        raise ValueError(
            f"target has shape {tuple(target.shape)}, expected class positions {positions} or soft labels {shape} for "
            f"logits {shape} with the classes on axis dim={dim}."
        )
    return logits.movedim(axis, -1), target.movedim(axis, -1) if target.shape == shape else target


def _in_rows(tensor: Tensor) -> Float[Tensor, "rows classes"]:
    # A view would be one more operation for autograd.
    return tensor if tensor.dim() == 2 else tensor.reshape(-1, tensor.shape[-1])


def _is_soft(target: Tensor, logits: Tensor) -> bool:
    """Return whether the target holds soft labels; raise if it holds neither those nor class positions."""
    shape, positions = tuple(logits.shape), tuple(logits.shape[:-1])
    soft = target.shape == logits.shape
    if not soft and target.shape != positions:
        elsewhere = len(shape) > 2 and tuple(target.shape) == (shape[0], *shape[2:])
        raise ValueError(
            f"target has shape {tuple(target.shape)}, expected class positions {positions} or soft labels {shape} for "
            f"logits {shape} with the classes last{'; pass dim=1 if they are on axis 1' if elsewhere else ''}."
        )
    if soft != target.is_floating_point() or target.dtype == torch.bool:
        fix = "target.float() for one-hot labels, or target.argmax(-1)" if soft else "target.long() for class positions"
        raise TypeError(
            f"target has dtype {target.dtype} and shape {tuple(target.shape)}, expected class positions {positions} in "
            f"an integer dtype or soft labels {shape} in a floating one; call {fix}. Real values belong to "
            "histogram_loss."
        )
    return soft


def check_ignore_index(ignore_index: Any) -> None:
    """Raise TypeError unless it is None or an integer, such as labels are."""
    if ignore_index is not None:
        check_whole("ignore_index", ignore_index, "an int, as the labels are, or None")


def check_positions(name: str, target: Tensor, classes: int, ignore_index: int | None) -> None:
    """Raise ValueError if a class position or token id is out of range and not ignored."""
    target = numbers(target)
    outside = (target < 0) | (target >= classes)
    if ignore_index is not None:
        outside &= target != ignore_index
    if outside.any():
        first = tuple(int(i) for i in outside.nonzero()[0])
        ignored = "" if ignore_index is None else f" or ignore_index={ignore_index}"
        raise ValueError(
            f"{name} holds {int(outside.sum())} values out of range, the first at {first}: {int(target[first])}; "
            f"expected 0 to {classes - 1}{ignored}. Number the classes by rank from 0 (token ids: use the tokenizer of "
            "the model), and pass the value that marks positions to leave out as ignore_index."
        )


def check_logits(rows: Float[Tensor, "rows classes"]) -> None:
    """Raise ValueError if an entry is NaN or +inf, or a row is -inf throughout."""
    top = numbers(rows).amax(-1).flatten()  # It is NaN if an entry is NaN.
    if torch.isfinite(top).all():
        return
    check_below_infinity("logits", rows)
    row = int((top == -torch.inf).nonzero()[0])
    raise ValueError(
        f"the logits of row {row} (of the positions that take part) are -inf for every class, expected a finite one; "
        "leave a class to choose, or leave the position out."
    )


def normalised(target: Tensor, dtype: torch.dtype) -> Float[Tensor, "rows classes"]:
    """Return soft labels in `dtype` with mass one; raise ValueError if the mass is not one up to rounding."""
    # The mass is detached, as it is for histograms in the solvers.
    mass = target.detach().sum(-1, dtype=torch.float64)
    _check_soft(numbers(target).flatten(0, -2), numbers(mass).flatten())
    return target.to(dtype) / mass.unsqueeze(-1).to(dtype)


def _check_soft(target: Float[Tensor, "rows classes"], mass: Float[Tensor, " rows"]) -> None:
    excess = (mass - 1).abs()
    # A NaN or an infinity makes the mass NaN or infinite, and the comparison false.
    if target.numel() and not (target.amin() >= 0 and excess.amax() <= MASS_TOLERANCE[target.dtype]):
        check_finite("target", target)
        if target.amin() < 0:
            row, k = (int(i) for i in (target < 0).nonzero()[0])
            raise ValueError(
                f"target holds {float(target[row, k])} for class {k} of row {row}, expected soft labels >= 0; clamp "
                "rounding errors with target.clamp(min=0)."
            )
        row = int(excess.argmax())
        raise ValueError(
            f"the soft labels of row {row} sum to {float(mass[row]):.9g}, expected 1; normalise them with "
            "target / target.sum(-1, keepdim=True)."
        )


def check_cross_entropy(weight: Any) -> float:
    """Return the weight of the cross-entropy if it is finite and at least zero."""
    return float(check_not_negative("cross_entropy", weight))
