"""What the losses over classes share: checked logits and labels, the weights of the positions, and the reduction.

A position is one label with its row of logits. Positions that are left out are not looked at: their logits may hold
anything, and get a gradient of zero.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from otloss._checks import check_below_infinity, check_finite, check_floating, check_number, check_tensor
from otloss.losses.real import check_not_complex
from otloss.solvers.histograms import MASS_TOLERANCE


@dataclass(frozen=True)
class Labelled:
    """The positions that take part, in one row each.

    Attributes:
        logits: (rows, K), not looked at yet: see `check_logits`.
        target: (rows,) class positions in int64, not looked at yet: see `check_positions`; or (rows, K) soft labels,
            not looked at yet: see `histograms`.
        given: the target as it was given.
        ignore_index: target of the positions that are left out.
        sure: whether soft labels were made here, so that nothing can be wrong with them.
        weight: (rows,) weights >= 0, or None where all are one.
        kept: which positions these are, or None for all of them.
        shape: that of the positions.
        dtype: that of the answer; everything floating here has at least float32.
    """

    logits: Float[Tensor, "rows classes"]
    target: Tensor
    given: Tensor
    ignore_index: int | None
    sure: bool
    weight: Float[Tensor, " rows"] | None
    kept: Bool[Tensor, "*batch"] | None
    shape: torch.Size
    dtype: torch.dtype

    @property
    def is_soft(self) -> bool:
        return self.target.is_floating_point()

    def check_positions(self) -> None:
        """Raise ValueError if a class position is out of range."""
        if not self.is_soft:
            _check_positions(self.given, self.logits.shape[-1], self.ignore_index)

    def histograms(self) -> Float[Tensor, "rows classes"]:
        """Return soft labels of mass one in the dtype of the logits; raises where they are none."""
        return self.target if self.sure else normalised(self.target, self.logits.dtype)

    def unweighted_divisor(self, reduction: str) -> int | None:
        """Return what a mean or a sum divides the sum of the values by; None for a weighted one or for no reduction."""
        if self.weight is not None or reduction == "none":
            return None
        return max(1, self.logits.shape[0]) if reduction == "mean" else 1

    def reduced(self, values: Float[Tensor, " rows"], reduction: str) -> Tensor:
        """Return the weighted mean, the weighted sum, or the weighted values at their positions."""
        weighted = values if self.weight is None else values * self.weight
        if reduction == "none":
            if self.kept is not None:
                weighted = weighted.new_zeros(self.shape).masked_scatter(self.kept, weighted)
            return weighted.reshape(self.shape).to(self.dtype)
        total = weighted.sum()
        divisor = self.unweighted_divisor(reduction)
        if divisor is not None:
            total = total / divisor
        elif reduction == "mean":
            assert self.weight is not None
            mass = self.weight.sum()
            total = total / mass.masked_fill(mass == 0, 1.0)
        return total.to(self.dtype)


def class_count(logits: Any) -> int:
    """Return K for logits (..., K), else raise."""
    check_floating("logits", logits)
    if logits.dim() == 0 or logits.shape[-1] == 0:
        raise ValueError(f"logits have shape {tuple(logits.shape)}, expected (..., K) with at least one class.")
    return int(logits.shape[-1])


def dtype_of_loss(logits: Tensor) -> torch.dtype:
    """Return the dtype of a loss of these logits: their own, but at least float32 under autocast, as torch does."""
    wide, device = torch.promote_types(logits.dtype, torch.float32), logits.device.type
    if wide == logits.dtype or not torch.amp.is_autocast_available(device) or not torch.is_autocast_enabled(device):
        return logits.dtype
    return wide


def classes_last(logits: Any, target: Any, dim: Any) -> tuple[Any, Any]:
    """Return logits and target with the classes on the last axis, from axis `dim`, or the last one if it is None.

    Raises:
        TypeError, ValueError: if dim is no axis of the logits, the target does not fit it, or it has to be given.
    """
    check_dim(dim)
    if not isinstance(target, Tensor) or not isinstance(logits, Tensor) or logits.dim() == 0:
        return logits, target  # which `labelled` says is wrong
    shape = tuple(logits.shape)
    if dim is None:
        # At axis 1 the losses of torch expect the classes.
        if len(shape) > 2 and target.shape == shape[:-1] == (shape[0], *shape[2:]):
            raise ValueError(
                f"logits have shape {shape} and target {tuple(target.shape)}, which fits classes on the last axis and "
                "on axis 1; say which one it is: dim=-1 or dim=1."
            )
        return logits, target
    if not -len(shape) <= dim < len(shape):
        raise ValueError(
            f"dim is {dim}, expected an axis of the logits {shape}, from {-len(shape)} to {len(shape) - 1}."
        )
    axis = dim % len(shape)
    positions = shape[:axis] + shape[axis + 1 :]
    if target.shape == shape:
        return logits.movedim(axis, -1), target.movedim(axis, -1)
    if target.shape != positions:
        raise ValueError(
            f"target has shape {tuple(target.shape)}, expected class positions {positions} or soft labels {shape} for "
            f"logits {shape} with the classes on axis dim={dim}."
        )
    return logits.movedim(axis, -1), target


def labelled(
    logits: Any,
    target: Any,
    *others: torch.dtype,
    sure: bool = False,
    class_weight: Any = None,
    sample_weight: Any = None,
    ignore_index: int | None = None,
) -> Labelled:
    """Check and flatten what a loss over classes is called with; `others` are dtypes that take part.

    Soft labels that are `sure` have a mass of one, and are checked nowhere.

    Raises:
        TypeError, ValueError: as `ordinal_loss` says.
    """
    classes, shape = class_count(logits), logits.shape[:-1]
    soft = _is_soft(check_tensor("target", target), logits)
    given = [("target", target), ("class_weight", class_weight), ("sample_weight", sample_weight)]
    for name, tensor in given:
        if tensor is not None and check_not_complex(name, tensor).device != logits.device:
            raise ValueError(f"{name} is on {tensor.device}, logits on {logits.device}, expected one device; move one.")
    dtype = dtype_of_loss(logits)
    for other in (*(tensor.dtype for _, tensor in given if tensor is not None), *others):
        if other.is_floating_point:
            dtype = torch.promote_types(dtype, other)
    arithmetic = torch.promote_types(dtype, torch.float32)
    # In a narrow dtype, comparisons would be modulo its width.
    target = target if soft else target.long()
    kept = None if soft else _kept(target, ignore_index)
    if soft and ignore_index is not None:
        raise ValueError(
            f"ignore_index={ignore_index} leaves class positions out, and target holds soft labels; give the positions "
            "to leave out sample_weight 0."
        )
    rows = (_in_rows(logits) if kept is None else logits[kept]).to(arithmetic)
    if soft:
        labels = _in_rows(target)
        if sure or class_weight is not None:
            labels, sure = labels.to(arithmetic) if sure else normalised(labels, arithmetic), True
    else:
        labels = target.reshape(-1) if kept is None else target[kept]
    if class_weight is not None and not soft:
        _check_positions(target, classes, ignore_index)
    weight = _weights(class_weight, sample_weight, labels, kept, shape, classes, arithmetic)
    return Labelled(rows, labels, target, ignore_index, sure, weight, kept, shape, dtype)


def _in_rows(tensor: Tensor) -> Float[Tensor, "rows classes"]:
    # A view is one more operation to differentiate.
    return tensor if tensor.dim() == 2 else tensor.reshape(-1, tensor.shape[-1])


def _is_soft(target: Tensor, logits: Tensor) -> bool:
    """Whether the target holds soft labels; raises where it holds neither those nor class positions."""
    classes = logits.shape[-1]
    if target.is_complex() or target.dtype == torch.bool:
        raise TypeError(f"target has dtype {target.dtype}, expected integer class positions or floating soft labels.")
    expected = (
        f"expected class positions {tuple(logits.shape[:-1])} in an integer dtype or soft labels {tuple(logits.shape)} "
        "in a floating one, for logits"
    )
    if target.shape == logits.shape:
        if not target.is_floating_point():
            raise TypeError(
                f"target has shape {tuple(target.shape)} and dtype {target.dtype}, {expected} of that shape; call "
                "target.float() for one-hot labels, or target.argmax(-1) for their positions."
            )
        return True
    if target.shape != logits.shape[:-1]:
        elsewhere = logits.dim() > 2 and target.shape == (logits.shape[0], *logits.shape[2:])
        raise ValueError(
            f"target has shape {tuple(target.shape)}, {expected} {tuple(logits.shape)}: the last axis of the logits "
            f"is that of the {classes} classes{'; pass dim=1 if it is axis 1' if elsewhere else ''}."
        )
    if target.is_floating_point():
        raise TypeError(
            f"target has dtype {target.dtype} and shape {tuple(target.shape)}, {expected} {tuple(logits.shape)}; call "
            "target.long() if these are whole class positions; for real values use histogram_loss."
        )
    return False


def _kept(target: Tensor, ignore_index: int | None) -> Tensor | None:
    check_ignore_index(ignore_index)
    if ignore_index is None:
        return None
    kept = target != ignore_index
    return None if kept.all() else kept


def _check_positions(target: Tensor, classes: int, ignore_index: int | None) -> None:
    outside = (target < 0) | (target >= classes)
    if ignore_index is not None:
        outside &= target != ignore_index
    if outside.any():
        first = tuple(int(i) for i in outside.nonzero()[0])
        ignored = "" if ignore_index is None else f" or ignore_index={ignore_index}"
        raise ValueError(
            f"target holds {int(outside.sum())} positions outside of the {classes} classes, the first at {first}: "
            f"{int(target[first])}; expected 0 to {classes - 1}{ignored}. Number the classes by rank from 0, and name "
            "the label of positions to leave out with ignore_index=."
        )


def check_ignore_index(ignore_index: Any) -> None:
    """Raise TypeError unless it is a whole number or None."""
    if ignore_index is not None and (not isinstance(ignore_index, int) or isinstance(ignore_index, bool)):
        raise TypeError(f"ignore_index is {ignore_index!r}, expected a whole number such as -100, or None.")


def check_dim(dim: Any) -> None:
    """Raise TypeError unless it is a whole number or None."""
    if dim is not None and (not isinstance(dim, int) or isinstance(dim, bool)):
        raise TypeError(f"dim is {dim!r}, expected the axis of the classes, such as 1 or -1, or None.")


def check_logits(rows: Float[Tensor, "rows classes"]) -> None:
    """Raise ValueError if an entry is NaN or +inf, or a row is -inf throughout."""
    top = rows.detach().amax(-1)  # NaN where any entry is
    if torch.isfinite(top).all():
        return
    check_below_infinity("logits", rows)
    row = int((top == -torch.inf).nonzero()[0])
    raise ValueError(
        f"the logits of row {row} (of the positions that take part) are -inf for every class, expected a finite one; "
        "leave a class to choose, or leave the position out."
    )


def normalised(target: Tensor, dtype: torch.dtype) -> Tensor:
    """Return soft labels in `dtype` with a mass of one; raises where the mass is not one up to rounding."""
    held = target.detach()
    mass = held.sum(-1, dtype=torch.float64)
    off = (mass - 1).abs()
    # NaN and infinity show in the mass, and in their comparison.
    if held.numel() and not (held.amin() >= 0 and off.amax() <= MASS_TOLERANCE[target.dtype]):
        check_finite("target", target)
        if held.amin() < 0:
            row, k = (int(i) for i in (held < 0).nonzero()[0])
            raise ValueError(
                f"target holds {float(held[row, k])} for class {k} of row {row}, expected soft labels >= 0; clamp "
                "rounding errors with target.clamp(min=0)."
            )
        row = int(off.argmax())
        raise ValueError(
            f"the soft labels of row {row} sum to {float(mass[row]):.9g}, expected 1; normalise them with "
            "target / target.sum(-1, keepdim=True)."
        )
    # The mass carries no graph, as that of a histogram in transport does not.
    return target.to(dtype) / mass.unsqueeze(-1).to(dtype)


def _weights(
    class_weight: Tensor | None,
    sample_weight: Tensor | None,
    labels: Tensor,
    kept: Tensor | None,
    shape: torch.Size,
    classes: int,
    dtype: torch.dtype,
) -> Tensor | None:
    """Return the product of both weights per row, or None without any."""
    weight = None
    if class_weight is not None:
        if class_weight.shape != (classes,):
            raise ValueError(f"class_weight has shape {tuple(class_weight.shape)}, expected ({classes},), one a class.")
        by_class = _check_weights("class_weight", class_weight).to(dtype)
        weight = (labels * by_class).sum(-1) if labels.is_floating_point() else by_class[labels]
    if sample_weight is not None:
        _check_weights("sample_weight", sample_weight)
        try:
            spread = sample_weight.expand(shape)
        except RuntimeError:
            raise ValueError(
                f"sample_weight has shape {tuple(sample_weight.shape)}, expected {tuple(shape)}, one a position."
            ) from None
        by_sample = (spread.reshape(-1) if kept is None else spread[kept]).to(dtype)
        weight = by_sample if weight is None else weight * by_sample
    return weight


def _check_weights(name: str, weights: Tensor) -> Tensor:
    check_finite(name, weights)
    if weights.numel() and weights.detach().amin() < 0:
        first = tuple(int(i) for i in (weights < 0).nonzero()[0])
        raise ValueError(f"{name} holds {float(weights.detach()[first])} at index {first}, expected weights >= 0.")
    return weights


def check_cross_entropy(weight: Any) -> float:
    """Return the weight of cross-entropy if it is a finite number of at least zero, else raise."""
    if not 0 <= check_number("cross_entropy", weight) < float("inf"):
        raise ValueError(f"cross_entropy is {weight}, expected a finite weight of at least 0.")
    return float(weight)
