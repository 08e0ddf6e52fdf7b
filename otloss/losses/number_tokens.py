"""The number-token loss: how far the numbers that a model predicts are from the number that is the label.

Notation: of one position, z the logits, q = softmax(z), y the label, m the mass of q on number tokens, p = q / m there,
x_j positions and d distances of `otloss.losses.number_line`, text the cost of mass on text.

    form="wasserstein"  L = sum_j p_j d_jy                 NTL-WAS: the transport cost to the label
    form="mse"          L = (sum_j p_j (x_j - x_y))^2      NTL-MSE: of the mean number

    over="numbers"      L                       dL/dz_j = p_j s (a_j - D) on numbers, 0 on text
    over="vocabulary"   m L + (1 - m) text      dL/dz_j = m p_j (s (a_j - D) - (1 - m) (text - L)) on numbers
                                                dL/dz_j = q_j m (text - L) on text

with a_j = d_jy (for "mse" x_j - x_y), D = sum_j p_j a_j, s = 1 (for "mse" 2 D). With the transport cost, the second one
is sum_i q_i c(i, y) with one row of costs over the whole vocabulary.

The gradient is computed here and not by torch, so that no copy of the rows with numbers is kept: logits are read once
for the value and once for the gradient, a few rows at a time. Second derivatives follow from the same formulas in
torch operations.
"""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from otloss._autograd import release
from otloss._checks import check_below_infinity, check_floating, check_reduction, check_tensor, needs_torch
from otloss._public import public
from otloss.losses.number_line import NumberLine, number_line
from otloss.losses.rows import Positions, check_ignore_index, check_positions, position_weights

OVER = ("vocabulary", "numbers")
# Logits in one piece of work: within the caches of a processor, but enough to keep an accelerator busy.
_PIECE_ON_CPU, _PIECE = 2**19, 2**25

Where = tuple[Tensor, ...]  # the positions that are numbers, one index (rows,) for each leading axis


@public
def number_token_loss(
    logits: Float[Tensor, "*batch vocab"],
    labels: Int[Tensor, "*batch"],
    values: Float[Tensor, " vocab"],
    *,
    form: str = "wasserstein",
    over: str = "vocabulary",
    scaling: str | None = None,
    squash: float | None = None,
    text: float | None = None,
    sample_weight: Float[Tensor, "*batch"] | None = None,
    ignore_index: int | None = -100,
    reduction: str = "mean",
) -> Float[Tensor, "*batch"]:
    """Return how far the numbers that `softmax(logits)` predicts are from the number that is the label.

    Do not train with it alone: it ignores positions whose label is text, and does not tell tokens of equal value ("7"
    and " 7") apart. Add it to the cross-entropy, for example with a weight of 0.3.

    Formulas: docs/guide/definitions.md#def-numbers

    Args:
        logits: (..., V), aligned with the labels: position t is scored against label t. -inf masks a token out.
        labels: (...) token ids; positions whose label is `ignore_index` or not a number are left out.
        values: (V,) value of each token, NaN where it is not a number.
        form: "wasserstein" is the expected distance sum_j p_j |x_j - x_y|; "mse" the squared distance of the *mean*
            number, which is 0 for half the mass on 0 and half on 8 where 4 is right.
        over: "vocabulary" counts the probability m of number tokens: m times the form, and (1 - m) times `text`;
            "numbers" renormalises over the number tokens, whatever their mass.
        scaling: "symlog" takes values as they are between the digits 0 to 9, and logarithms beyond, where a factor of
            ten costs 9, as do larger distances, so that a weight means the same with any vocabulary. "absolute" takes
            all values as they are, as published: with the tokens of GPT-2 a distance may be 66 666 666. "log" takes
            sign(v) log(1 + |v|); "squash" is "absolute" with squash=9. None is "symlog", or with `squash`, which bounds
            distances itself, "absolute".
        squash: factor above 1: distances between numbers are mapped to 1 (the nearest pair) up to this (the farthest).
            Only with form "wasserstein".
        text: cost of mass on text; None takes 1.01 times the worst number (with "symlog" the worst digit). Only with
            over="vocabulary".
        sample_weight: (...) weights >= 0.
        ignore_index: label that leaves a position out, whatever its logits hold; None leaves none out.
        reduction: "mean" is sum(weight * loss) / sum(weight) over the *number* positions, "sum" the former alone,
            "none" gives weight * loss in the shape of the labels, 0 where the label is not a number.

    Returns:
        A scalar, or (...), in the promoted dtype of logits, values and weights; 16 bits are computed in float32.
        Differentiable in logits and weights, twice. A batch without numbers gives 0 with zero gradients.

    Raises:
        TypeError: if logits or values are not floating, or labels not integers.
        ValueError: if shapes do not fit, a label is out of range, values hold an infinity or no number, a setting is
            unknown or has no effect beside another, a weight is negative or not finite, logits are NaN, +inf or all
            -inf, or the loss exceeds its dtype. Only logits of positions whose label is a number are read; with
            over="numbers" only the number tokens.

    Source:
        J. Zausinger et al., Regress, Don't Guess: a Regression-like Loss on Number Tokens for Language Models,
        arXiv 2411.02083.

    Example:
        >>> values = torch.tensor([5.0, 6.0, 9.0, float("nan")])
        >>> logits = torch.tensor([[0.0, 2.0, 0.0, 0.0], [0.0, 0.0, 2.0, 0.0]])  # 6 for 5 is nearer than 9 for 5
        >>> number_token_loss(logits, torch.tensor([0, 0]), values, reduction="none")
        tensor([1.9712, 3.8162])
    """
    check_reduction(reduction)
    check_ignore_index(ignore_index)
    if over not in OVER:
        raise ValueError(f"over is {over!r}, expected one of {', '.join(map(repr, OVER))}.")
    if over == "numbers" and text is not None:
        raise ValueError(f'text={text} is given with over="numbers", which leaves text out; use over="vocabulary".')
    dtype = torch.promote_types(check_floating("logits", logits).dtype, check_floating("values", values).dtype)
    if isinstance(sample_weight, Tensor) and sample_weight.is_floating_point():
        dtype = torch.promote_types(dtype, sample_weight.dtype)
    wide = torch.promote_types(dtype, torch.float32)
    line = number_line(values.to(wide), form=form, scaling=scaling, squash=squash, text=text).to(logits.device)
    labels = _checked_labels(logits, labels, len(values))
    kept = torch.ones_like(labels, dtype=torch.bool) if ignore_index is None else labels != ignore_index
    check_positions("labels", labels, len(values), ignore_index)
    kept = kept & line.is_number(labels.masked_fill(~kept, 0))
    weight = position_weights(sample_weight, labels.shape, kept, wide)
    # A single position is a batch of one.
    rows, at = (logits.unsqueeze(0), kept.unsqueeze(0)) if kept.dim() == 0 else (logits, kept)
    where = at.nonzero(as_tuple=True)
    losses = loss_of_rows(rows, where, labels[kept], line, over)
    loss = Positions(kept.shape, kept, weight, reduction, dtype).reduced(losses)
    if not torch.isfinite(loss.detach()).all():
        read = rows[where] if over == "vocabulary" else rows[where][:, line.columns]
        _raise_not_finite(read.detach(), ~torch.isfinite(losses), kept, dtype)
    return loss


def loss_of_rows(
    logits: Float[Tensor, "*batch vocab"], where: Where, y: Int[Tensor, " rows"], line: NumberLine, over: str
) -> Float[Tensor, " rows"]:
    """Return the loss at the positions `where`, whose labels y are numbers, in the dtype of the line.

    It is NaN or infinite where the logits define no distribution.
    """
    if needs_torch(logits):
        return plain_loss_of_rows(logits, where, y, line, over)
    losses: Tensor = _LossOfRows.apply(logits, where, y, line, over)
    return losses


def plain_loss_of_rows(
    logits: Float[Tensor, "*batch vocab"], where: Where, y: Int[Tensor, " rows"], line: NumberLine, over: str
) -> Float[Tensor, " rows"]:
    """Return the same from operations that torch differentiates, at a few times the memory of the rows."""
    z = logits[where].to(line.x.dtype)
    z_numbers = z[:, line.columns]
    losses = _of_numbers(z_numbers, y, line, over)[0]
    if over == "numbers":
        return losses
    # The mass on text is a sum of its own: 1 - m would lose all digits for m near 1.
    z_text = z.index_fill(-1, line.columns, -torch.inf)
    top = z.detach().amax(-1, keepdim=True)
    e_text, e_numbers = (z_text - top).exp().sum(-1), (z_numbers - top).exp().sum(-1)
    return _mixed(losses, line.text, e_numbers, e_text)


def _of_numbers(
    z_numbers: Float[Tensor, "rows numbers"], y: Int[Tensor, " rows"], line: NumberLine, over: str
) -> tuple[Tensor, Tensor, Tensor]:
    """Return L (rows,), p and s (a - D) (rows, numbers)."""
    if over == "vocabulary":  # If every number is masked out, softmax would be NaN; the numbers have no mass then.
        z_numbers = z_numbers.masked_fill(z_numbers.detach().amax(-1, keepdim=True) == -torch.inf, 0.0)
    p, apart = z_numbers.softmax(-1), line.distances(y)
    mean = (p * apart).sum(-1, keepdim=True)
    if line.form == "wasserstein":
        return mean.squeeze(-1), p, apart - mean
    return mean.square().squeeze(-1), p, 2 * mean * (apart - mean)


def _mixed(of_numbers: Tensor, of_text: float, e_numbers: Tensor, e_text: Tensor) -> Float[Tensor, " rows"]:
    """Return m L + (1 - m) text, as a small change of the heavier of the two, so that it is rounded about once."""
    total, worse = e_numbers + e_text, of_text - of_numbers
    return torch.where(e_numbers < e_text, of_text - e_numbers / total * worse, of_numbers + e_text / total * worse)


class _LossOfRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, where: Where, y: Tensor, line: NumberLine, over: str) -> Tensor:
        values = line.x.new_empty(len(y))
        sums = line.x.new_empty((3, len(y)))  # max z, sums of exp(z - max z) over numbers and over text
        for piece in _pieces(logits, len(y)):
            at = tuple(axis[piece] for axis in where)
            if over == "numbers":
                z_numbers = logits[_at_numbers(at, line)].to(line.x.dtype)
                values[piece] = _of_numbers(z_numbers, y[piece], line, over)[0]
                continue
            z = logits[at].to(line.x.dtype)
            z_numbers = z[:, line.columns]
            top = z.amax(-1, keepdim=True)
            e_numbers = (z_numbers - top).exp().sum(-1)
            e_text = z.sub_(top).exp_().index_fill_(-1, line.columns, 0.0).sum(-1)
            losses = _of_numbers(z_numbers, y[piece], line, over)[0]
            values[piece] = _mixed(losses, line.text, e_numbers, e_text)
            sums[:, piece] = torch.stack((top.squeeze(-1), e_numbers, e_text))
        ctx.save_for_backward(logits, y, sums, *where)
        ctx.line, ctx.over = line, over
        return values

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> Any:
        logits, y, sums, *where = ctx.saved_tensors
        line, over = ctx.line, ctx.over
        release(ctx, "line")
        if torch.is_grad_enabled():
            value = plain_loss_of_rows(logits, tuple(where), y, line, over)
            gradient = torch.autograd.grad(value, logits, upstream[0], create_graph=True)[0]
            return gradient, None, None, None, None
        gradient = torch.zeros(logits.shape, dtype=logits.dtype, device=logits.device)
        for piece in _pieces(logits, len(y)):
            at, weight = tuple(axis[piece] for axis in where), upstream[0][piece].unsqueeze(-1)
            if over == "numbers":
                at = _at_numbers(at, line)
                _, p, by_p = _of_numbers(logits[at].to(line.x.dtype), y[piece], line, over)
                gradient[at] = (weight * p * by_p).to(gradient.dtype)
            else:
                gradient[at] = _gradient(logits[at], y[piece], sums[:, piece], weight, line).to(gradient.dtype)
        return gradient, None, None, None, None


def _gradient(
    rows: Float[Tensor, "rows vocab"], y: Tensor, sums: Float[Tensor, "3 rows"], weight: Tensor, line: NumberLine
) -> Float[Tensor, "rows vocab"]:
    """Return the gradient over the whole vocabulary; `rows` is overwritten where it has the dtype of the line."""
    z = rows.to(line.x.dtype)
    z_numbers = z[:, line.columns]
    value, _, by_p = _of_numbers(z_numbers, y, line, "vocabulary")
    top, e_numbers, e_text = sums.unsqueeze(-1)
    total = e_numbers + e_text
    mass, worse = e_numbers / total, line.text - value.unsqueeze(-1)
    of_numbers = weight * ((z_numbers - top).exp() / total) * (by_p - e_text / total * worse)
    of_text = z.sub_(top).exp_().mul_(weight * mass * worse / total)
    return of_text.index_copy_(-1, line.columns, of_numbers)


def _at_numbers(at: Where, line: NumberLine) -> Where:
    """Return the index of the number tokens at these positions, (rows, numbers)."""
    return (*(axis.unsqueeze(-1) for axis in at), line.columns)


def _pieces(logits: Tensor, rows: int) -> list[slice]:
    max_entries = _PIECE_ON_CPU if logits.device.type == "cpu" else _PIECE
    step = max(1, max_entries // logits.shape[-1])
    return [slice(start, start + step) for start in range(0, rows, step)]


def _checked_labels(logits: Tensor, labels: Any, vocab: int) -> Int[Tensor, "*batch"]:
    if logits.dim() == 0 or logits.shape[-1] != vocab:
        raise ValueError(
            f"values have {vocab} entries, logits shape {tuple(logits.shape)}, expected one value per token, (..., "
            f"{vocab}); where the head is padded beyond the tokenizer, pad the values with NaN."
        )
    if check_tensor("labels", labels).is_floating_point() or labels.dtype == torch.bool:
        raise TypeError(f"labels have dtype {labels.dtype}, expected token ids in int64; call labels.long().")
    if labels.shape != logits.shape[:-1]:
        raise ValueError(
            f"labels have shape {tuple(labels.shape)}, expected {tuple(logits.shape[:-1])}, the leading axes of logits."
        )
    return labels.long()  # In a narrow dtype -100 would be compared modulo its width.


def _raise_not_finite(read: Tensor, bad: Tensor, kept: Tensor, dtype: torch.dtype) -> None:
    check_below_infinity("logits", read)
    if bad.any():
        row = int(bad.nonzero()[0])
        if read[row].amax() == -torch.inf:
            raise ValueError(
                f"the logits of position {tuple(int(i) for i in kept.nonzero()[row])} are -inf for all tokens that "
                "count, expected a finite one; leave a number to choose, or leave the position out with ignore_index."
            )
    raise ValueError(
        f"the loss exceeds {torch.finfo(dtype).max:.6g}, the largest number of {dtype}; expected a loss within its "
        'range. Pass values in float32 for a loss in float32, or use smaller weights or scaling="symlog".'
    )
