"""The loss of a distribution over tokens where the label is a number: how far off the numbers are that it predicts.

Notation: z the logits of a position, q = softmax(z), y its label, m = sum of q over the number tokens, p = q / m there.

    over="vocabulary"   m L(p, y) + (1 - m) text        L by `_number_line`: the transport cost, or of the mean number
    over="numbers"      L(p, y)

For the transport cost the former is sum_i q_i c(i, y) with one row of costs over the whole vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from otloss._autograd import eager
from otloss._checks import check_below_infinity, check_floating, check_reduction, check_tensor
from otloss.losses.labels import check_ignore_index
from otloss.losses.number_line import number_line
from otloss.losses.number_rows import loss_of_rows
from otloss.losses.real import check_not_complex

OVER = ("vocabulary", "numbers")
_LABELS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


@eager
def number_token_loss(
    logits: Float[Tensor, "*batch vocab"],
    labels: Int[Tensor, "*batch"],
    values: Float[Tensor, " vocab"],
    *,
    form: str = "wasserstein",
    over: str = "vocabulary",
    delta: float = 1.0,
    scaling: str = "absolute",
    squash: float | None = None,
    text: float | None = None,
    sample_weight: Float[Tensor, "*batch"] | None = None,
    ignore_index: int | None = -100,
    reduction: str = "mean",
) -> Float[Tensor, "*batch"]:
    """Return how far the numbers that `softmax(logits)` predicts are from the number that is the label.

    It is no loss to train with alone: positions whose label is text take no part, and tokens of equal value ("7" and
    " 7") are one to it. Add it to the cross-entropy, at a weight of 0.3, say.

    Args:
        logits: (..., V), aligned with the labels: position t is scored against label t. -inf masks a token out.
        labels: (...) token ids; `ignore_index` leaves a position out, and so does a label that is no number.
        values: (V,) value of each token, NaN where it is no number.
        form: "wasserstein" is the expected distance sum_j p_j |x_j - x_y|; "mse", "mae" and "huber" charge the distance
            of the *mean* number, and are 0 for half the mass on 0 and half on 8 where 4 is right.
        over: "vocabulary" counts the probability m of number tokens: m times the form, and (1 - m) times `text`;
            "numbers" renormalises over the number tokens, whatever their mass.
        delta: where form "huber" becomes linear, in units of the scaled values; 1.0 with any other form.
        scaling: "absolute" takes values as they are; "symlog" is the same between the digits 0 to 9 and logarithmic
            beyond, where a factor of ten costs 9, as does whatever is farther, so that a weight means the same with any
            vocabulary; "log" sign(v) log(1 + |v|); "rank" their rank among the distinct values, in [0, 1]; "squash" is
            "absolute" with squash=9. Vocabularies with "123" need one of these: take "symlog".
        squash: factor above 1: distances between numbers are mapped to 1 (the nearest pair) up to this (the farthest).
            Only with form "wasserstein".
        text: what mass on no number is charged; None takes 1.01 times the worst number (with "symlog" the worst digit).
            Only over "vocabulary".
        sample_weight: (...) weights >= 0.
        ignore_index: label that leaves a position out, whatever its logits hold; None leaves none out.
        reduction: "mean" is sum(weight * loss) / sum(weight) over the *number* positions, "sum" the former alone,
            "none" gives weight * loss in the shape of the labels, 0 where there is no number.

    Returns:
        A scalar, or (...), in the promoted dtype of logits, values and weights; 16 bits are computed in float32.
        Differentiable in logits and weights, twice. A batch without numbers gives 0 with a graph and zero gradients.

    Raises:
        TypeError: if logits or values are not floating, or labels not integers.
        ValueError: if shapes do not fit, a label is out of range, values hold an infinity or no number, a setting is
            unknown or meets another that leaves it without effect, a weight is negative or not finite, logits that
            count are NaN, +inf or all -inf, or the answer exceeds its dtype. Those that count are of positions whose
            label is a number; with over="numbers", of the number tokens alone.

    Source:
        J. Zausinger et al., Regress, Don't Guess: a Regression-like Loss on Number Tokens for Language Models,
        arXiv 2411.02083.

    Example:
        >>> values = torch.tensor([5.0, 6.0, 9.0, float("nan")])
        >>> logits = torch.tensor([[0.0, 2.0, 0.0, 0.0], [0.0, 0.0, 2.0, 0.0]])  # 6 for 5 is nearer than 9 for 5
        >>> number_token_loss(logits, torch.tensor([0, 0]), values, reduction="none")
        tensor([1.4851, 3.3301])
    """
    check_reduction(reduction)
    check_over(over, text)
    dtype = _dtype_of_answer(check_floating("logits", logits), check_floating("values", values), sample_weight)
    wide = torch.promote_types(dtype, torch.float32)
    line = number_line(values.to(wide), form=form, delta=delta, scaling=scaling, squash=squash, text=text)
    line = line.to(logits.device)
    labels, kept = _taking_part(logits, labels, len(values), ignore_index)
    kept = kept & line.is_number(labels.masked_fill(~kept, 0))
    weight = _weights(sample_weight, labels, kept, wide)
    # A position by itself is a batch of one.
    rows, at = (logits.unsqueeze(0), kept.unsqueeze(0)) if kept.dim() == 0 else (logits, kept)
    where = at.nonzero(as_tuple=True)
    losses = loss_of_rows(rows, where, labels[kept], line, over)
    if not torch.isfinite(losses.detach()).all():
        read = rows[where] if over == "vocabulary" else rows[where][:, line.columns]
        _raise_not_finite(read.detach(), ~torch.isfinite(losses), kept)
    reduced = _reduced(losses, weight, kept, reduction)
    answer = reduced.to(dtype)
    if not torch.isfinite(answer.detach()).all():
        _raise_too_large(reduced.detach(), dtype, reduction)
    return answer


def check_over(over: Any, text: float | None) -> None:
    """Raise ValueError unless it is one of `OVER`, and one where `text`, if given, is charged."""
    if over not in OVER:
        raise ValueError(f"over is {over!r}, expected one of {', '.join(map(repr, OVER))}.")
    if over == "numbers" and text is not None:
        raise ValueError(
            f'text={text} is charged for mass on no number, which over="numbers" leaves out; leave text at None, or '
            'use over="vocabulary".'
        )


def _dtype_of_answer(logits: Tensor, values: Tensor, sample_weight: Any) -> torch.dtype:
    dtype = torch.promote_types(logits.dtype, values.dtype)
    if isinstance(sample_weight, Tensor) and sample_weight.is_floating_point():
        return torch.promote_types(dtype, sample_weight.dtype)
    return dtype


def _reduced(losses: Tensor, weight: Tensor | None, kept: Tensor, reduction: str) -> Tensor:
    weighted = losses if weight is None else losses * weight
    if reduction == "none":
        return weighted.new_zeros(kept.shape).masked_scatter(kept, weighted)
    total = weighted.sum()
    if reduction == "sum":
        return total
    if weight is None:
        return total / max(1, len(losses))
    mass = weight.sum()
    return total / mass.masked_fill(mass == 0, 1.0)


def _weights(sample_weight: Any, labels: Tensor, kept: Tensor, dtype: torch.dtype) -> Tensor | None:
    if sample_weight is None:
        return None
    _check_place("sample_weight", sample_weight, labels.device)
    if sample_weight.shape != labels.shape:
        raise ValueError(
            f"sample_weight has shape {tuple(sample_weight.shape)}, expected {tuple(labels.shape)}, that of the labels."
        )
    weight = check_not_complex("sample_weight", sample_weight)[kept].to(dtype)
    wrong = ~(weight.isfinite() & (weight >= 0))
    if wrong.any():
        raise ValueError(
            f"sample_weight holds {float(weight[wrong][0])} at a number, expected finite weights >= 0; where a "
            "position is to be left out, give it 0."
        )
    return weight


def _taking_part(logits: Tensor, labels: Any, vocab: int, ignore_index: Any) -> tuple[Tensor, Tensor]:
    """The labels in int64, and which of them are not ignored."""
    _check_place("labels", labels, logits.device)
    check_ignore_index(ignore_index)
    if logits.dim() == 0 or logits.shape[-1] != vocab:
        raise ValueError(
            f"values have {vocab} entries, logits shape {tuple(logits.shape)}, expected one value per token, (..., "
            f"{vocab}); where the head is padded beyond the tokenizer, pad the values with NaN."
        )
    if labels.dtype not in _LABELS:
        raise TypeError(f"labels have dtype {labels.dtype}, expected token ids in int64; call labels.long().")
    if labels.shape != logits.shape[:-1]:
        raise ValueError(
            f"labels have shape {tuple(labels.shape)}, expected {tuple(logits.shape[:-1])}, the leading axes of logits."
        )
    labels = labels.long()  # in a narrow dtype, comparisons would be modulo its width
    kept = torch.ones_like(labels, dtype=torch.bool) if ignore_index is None else labels != ignore_index
    outside = kept & ((labels < 0) | (labels >= vocab))
    if outside.any():
        first = tuple(int(i) for i in outside.nonzero()[0])
        raise ValueError(
            f"labels hold {int(outside.sum())} ids outside the vocabulary, the first at {first}: {int(labels[first])}; "
            f"expected 0..{vocab - 1} or ignore_index={ignore_index}. Ids of another tokenizer?"
        )
    return labels, kept


def _check_place(name: str, value: Any, device: torch.device) -> None:
    if check_tensor(name, value).device != device:
        raise ValueError(f"{name} is on {value.device}, logits on {device}, expected one device; move one.")


def _raise_too_large(reduced: Tensor, dtype: torch.dtype, reduction: str) -> None:
    bad = float(reduced[~torch.isfinite(reduced.to(dtype))][0])
    mend = "give values in float32, and the answer is float32"
    if torch.promote_types(dtype, torch.float32) == dtype:
        mend = 'give smaller weights, values in float64, or use scaling="log" or "rank"'
    raise ValueError(
        f'the loss with reduction="{reduction}" is {bad:.6g}, expected at most {torch.finfo(dtype).max:.6g}, the '
        f"largest {dtype}; {mend}."
    )


def _raise_not_finite(read: Tensor, bad: Tensor, kept: Tensor) -> None:
    check_below_infinity("logits", read)
    row = int(bad.nonzero()[0])
    place = tuple(int(i) for i in kept.nonzero()[row])
    if read[row].amax() > -torch.inf:
        raise ValueError(
            f"the loss of position {place} exceeds the range of its dtype, expected values and text= whose costs fit; "
            'use scaling="log" or "rank".'
        )
    raise ValueError(
        f"the logits of position {place} are -inf for all tokens that count, expected a finite one; leave a number to "
        "choose, or leave the position out with ignore_index."
    )
