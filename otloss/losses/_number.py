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

from otloss._checks import check_below_infinity, check_floating, check_reduction, check_tensor
from otloss.losses._labels import check_ignore_index
from otloss.losses._number_line import NumberLine, number_line

OVER = ("vocabulary", "numbers")


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
    ignore_index: int = -100,
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
        delta: of form "huber", where it becomes linear; in units of the scaled values.
        scaling: "absolute" takes values as they are; "log" sign(v) log(1 + |v|); "rank" their rank among the distinct
            values, in [0, 1]; "squash" is "absolute" with squash=9. Vocabularies with "123" need one of these.
        squash: factor above 1: distances between numbers are mapped to 1 (the nearest pair) up to this (the farthest).
            Only with form "wasserstein".
        text: what mass on no number is charged; None takes 1.01 times the worst number.
        sample_weight: (...) weights >= 0.
        ignore_index: label that leaves a position out, whatever its logits hold.
        reduction: "mean" is sum(weight * loss) / sum(weight) over the *number* positions, "sum" the former alone,
            "none" gives weight * loss in the shape of the labels, 0 where there is no number.

    Returns:
        A scalar, or (...), in the promoted dtype of logits, values and weights; computed in float32 or wider.
        Differentiable in logits and weights, twice. A batch without numbers gives 0 with a graph and zero gradients.

    Raises:
        TypeError: if logits or values are not floating, or labels not integers.
        ValueError: if shapes do not fit, a label is out of range, values hold an infinity or no number, a setting is
            unknown, a weight is negative, or logits of a number position are NaN, +inf, or -inf for all that counts.

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
    if over not in OVER:
        raise ValueError(f"over is {over!r}, expected one of {', '.join(map(repr, OVER))}.")
    line = number_line(values, form=form, delta=delta, scaling=scaling, squash=squash, text=text)
    _check_positions(logits, labels, len(values), ignore_index)
    line = line.to(logits.device)
    kept = labels != ignore_index
    kept = kept & line.is_number(labels.long().masked_fill(~kept, 0))
    rows = logits[kept]
    z = rows.to(torch.promote_types(rows.dtype, line.x.dtype))
    losses = _of_rows(z, labels[kept].long(), line.to(z.dtype), over)
    if not torch.isfinite(losses.detach()).all():
        _raise_not_finite(rows, losses)
    weight = _weights(sample_weight, labels, kept)
    dtype = torch.promote_types(logits.dtype, values.dtype)
    return _reduced(losses, weight, kept, reduction).to(
        dtype if weight is None else torch.promote_types(dtype, weight.dtype)
    )


def _of_rows(
    z: Float[Tensor, "rows vocab"], y: Int[Tensor, " rows"], line: NumberLine, over: str
) -> Float[Tensor, " rows"]:
    """The loss of positions whose label is a number."""
    z_numbers = z[:, line.columns]
    apart = line.distances(y)
    if over == "vocabulary":  # where every number is masked out, softmax would be NaN: they have no mass below
        p = z_numbers.masked_fill(z_numbers.detach().amax(-1, keepdim=True) == -torch.inf, 0.0).softmax(-1)
    else:
        p = z_numbers.softmax(-1)
    of_numbers = (p * apart).sum(-1)
    if line.form != "wasserstein":
        of_numbers = line.charge(of_numbers)[0]
    if over == "numbers":
        return of_numbers
    # Mass on text is summed by itself: 1 - m would have no digit left where m is near 1.
    z_text = z.index_fill(-1, line.columns, -torch.inf)
    top = z.detach().amax(-1, keepdim=True)
    e_text, e_numbers = (z_text - top).exp().sum(-1), (z_numbers - top).exp().sum(-1)
    total = e_text + e_numbers
    return (e_numbers * of_numbers + e_text * line.text) / total


def _reduced(losses: Tensor, weight: Tensor | None, kept: Tensor, reduction: str) -> Tensor:
    weighted = losses if weight is None else losses * weight
    if reduction == "none":
        return weighted.new_zeros(kept.shape).masked_scatter(kept, weighted)
    total = weighted.sum()
    if reduction == "sum":
        return total
    mass = torch.tensor(float(len(losses))) if weight is None else weight.sum()
    return total / mass.masked_fill(mass == 0, 1.0).to(total.device)


def _weights(sample_weight: Any, labels: Tensor, kept: Tensor) -> Tensor | None:
    if sample_weight is None:
        return None
    check_tensor("sample_weight", sample_weight)
    if sample_weight.shape != labels.shape:
        raise ValueError(
            f"sample_weight has shape {tuple(sample_weight.shape)}, expected {tuple(labels.shape)}, that of the labels."
        )
    if sample_weight.is_complex():
        raise TypeError(f"sample_weight has dtype {sample_weight.dtype}, expected real weights.")
    weight = sample_weight[kept]
    weight = weight.to(torch.promote_types(weight.dtype, torch.float32))
    wrong = ~(weight.isfinite() & (weight >= 0))
    if wrong.any():
        raise ValueError(f"sample_weight holds {float(weight[wrong][0])}, expected finite weights >= 0.")
    return weight


def _check_positions(logits: Any, labels: Any, vocab: int, ignore_index: Any) -> None:
    check_floating("logits", logits)
    check_tensor("labels", labels)
    check_ignore_index(ignore_index)
    if logits.dim() == 0 or logits.shape[-1] != vocab:
        raise ValueError(
            f"values have {vocab} entries, logits shape {tuple(logits.shape)}, expected one value per token, (..., "
            f"{vocab}); where the head is padded beyond the tokenizer, pad the values with NaN."
        )
    if labels.dtype not in (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8):
        raise TypeError(f"labels have dtype {labels.dtype}, expected int64 token ids.")
    if labels.shape != logits.shape[:-1]:
        raise ValueError(
            f"labels have shape {tuple(labels.shape)}, expected {tuple(logits.shape[:-1])}, the leading axes of logits."
        )
    outside = (labels != ignore_index) & ((labels < 0) | (labels >= vocab))
    if outside.any():
        first = tuple(int(i) for i in outside.nonzero()[0])
        raise ValueError(
            f"labels hold {int(outside.sum())} ids outside the vocabulary, the first at {first}: {int(labels[first])}; "
            f"expected 0..{vocab - 1} or ignore_index={ignore_index}."
        )


def _raise_not_finite(rows: Tensor, losses: Tensor) -> None:
    check_below_infinity("logits", rows)
    row = int((~torch.isfinite(losses)).nonzero()[0])
    raise ValueError(
        f"the logits of number position {row} are -inf for all tokens that count, expected a finite one; leave a "
        "number to choose, or leave the position out with ignore_index."
    )
