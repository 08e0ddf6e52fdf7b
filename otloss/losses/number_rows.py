"""The number-token loss of some positions of a batch of logits, and its slopes, without a copy of those positions.

Notation: of one position, z the logits, e = exp(z - max z), E_n and E_t the sums of e over numbers and text, m = E_n /
(E_n + E_t) the mass on numbers, p the softmax over the numbers alone, a_j = |x_j - x_y| (with its sign where the form
bends the mean), D = sum_j p_j a_j, and L = D, or phi(D) of such a form. s = 1, or phi'(D).

    over="numbers"      L                       dL/dz_j = p_j s (a_j - D) on numbers, 0 on text
    over="vocabulary"   m L + (1 - m) text      dL/dz_j = m p_j (s (a_j - D) - (1 - m) (text - L)) on numbers
                                                dL/dz_j = e_j / (E_n + E_t) m (text - L) on text

Logits are read once for the value and once for the slopes, a few rows at a time. Rows without a number are not read,
and get zeros. Second derivatives are those of the same formulas in operations that torch differentiates.
"""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.autograd.forward_ad import unpack_dual

from otloss.losses.number_line import NumberLine

# Logits in one piece of work: within the caches of a processor, but enough to keep an accelerator busy.
_PIECE_ON_CPU, _PIECE = 2**19, 2**25

Where = tuple[Tensor, ...]  # the positions that are numbers, one index (rows,) for each leading axis


def loss_of_rows(
    logits: Float[Tensor, "*batch vocab"], where: Where, y: Int[Tensor, " rows"], line: NumberLine, over: str
) -> Float[Tensor, " rows"]:
    """Return the loss at the positions `where`, whose labels y are numbers, in the dtype of the line.

    It is NaN or infinite where the logits make no distribution.
    """
    if torch._C._are_functorch_transforms_active() or unpack_dual(logits).tangent is not None:
        return plain_loss_of_rows(logits, where, y, line, over)
    found: Tensor = _LossOfRows.apply(logits, where, y, line, over)
    return found


def plain_loss_of_rows(
    logits: Float[Tensor, "*batch vocab"], where: Where, y: Int[Tensor, " rows"], line: NumberLine, over: str
) -> Float[Tensor, " rows"]:
    """The same in operations that torch differentiates, at a few times the memory of the rows."""
    z = logits[where].to(line.x.dtype)
    z_numbers = z[:, line.columns]
    found = _of_numbers(z_numbers, y, line, over)[0]
    if over == "numbers":
        return found
    # Mass on text is summed by itself: 1 - m would have no digit left where m is near 1.
    z_text = z.index_fill(-1, line.columns, -torch.inf)
    top = z.detach().amax(-1, keepdim=True)
    e_text, e_numbers = (z_text - top).exp().sum(-1), (z_numbers - top).exp().sum(-1)
    return _mixed(found, line.text, e_numbers, e_text)


def _mixed(of_numbers: Tensor, of_text: float, e_numbers: Tensor, e_text: Tensor) -> Float[Tensor, " rows"]:
    """m L + (1 - m) text, rounded about once: as a small change of the heavier of the two."""
    total, worse = e_numbers + e_text, of_text - of_numbers
    return torch.where(e_numbers < e_text, of_text - e_numbers / total * worse, of_numbers + e_text / total * worse)


def _of_numbers(
    z_numbers: Float[Tensor, "rows numbers"], y: Int[Tensor, " rows"], line: NumberLine, over: str
) -> tuple[Tensor, Tensor, Tensor]:
    """L (rows,), p and s (a - D) (rows, numbers)."""
    if over == "vocabulary":  # where every number is masked out, softmax would be NaN: they have no mass
        z_numbers = z_numbers.masked_fill(z_numbers.detach().amax(-1, keepdim=True) == -torch.inf, 0.0)
    p, apart = z_numbers.softmax(-1), line.distances(y)
    mean = (p * apart).sum(-1, keepdim=True)
    if line.form == "wasserstein":
        return mean.squeeze(-1), p, apart - mean
    value, slope = line.charge(mean)
    return value.squeeze(-1), p, slope * (apart - mean)


class _LossOfRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, where: Where, y: Tensor, line: NumberLine, over: str) -> Tensor:
        values = line.x.new_empty(len(y))
        sums = line.x.new_empty((3, len(y)))  # max z, E_n, E_t
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
            found = _of_numbers(z_numbers, y[piece], line, over)[0]
            values[piece] = _mixed(found, line.text, e_numbers, e_text)
            sums[:, piece] = torch.stack((top.squeeze(-1), e_numbers, e_text))
        ctx.save_for_backward(logits, y, sums, *where)
        ctx.line, ctx.over = line, over
        return values

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> Any:
        logits, y, sums, *where = ctx.saved_tensors
        line, over = ctx.line, ctx.over
        if torch.is_grad_enabled():
            value = plain_loss_of_rows(logits, tuple(where), y, line, over)
            slopes = torch.autograd.grad(value, logits, upstream[0], create_graph=True)[0]
            return slopes, None, None, None, None
        slopes = torch.zeros(logits.shape, dtype=logits.dtype, device=logits.device)
        for piece in _pieces(logits, len(y)):
            at, weight = tuple(axis[piece] for axis in where), upstream[0][piece].unsqueeze(-1)
            if over == "numbers":
                at = _at_numbers(at, line)
                _, p, bent = _of_numbers(logits[at].to(line.x.dtype), y[piece], line, over)
                slopes[at] = (weight * p * bent).to(slopes.dtype)
            else:
                slopes[at] = _slopes(logits[at], y[piece], sums[:, piece], weight, line).to(slopes.dtype)
        return slopes, None, None, None, None


def _slopes(
    rows: Float[Tensor, "rows vocab"], y: Tensor, sums: Float[Tensor, "3 rows"], weight: Tensor, line: NumberLine
) -> Float[Tensor, "rows vocab"]:
    """Those over the whole vocabulary; rows is overwritten where it has the dtype of the line."""
    z = rows.to(line.x.dtype)
    z_numbers = z[:, line.columns]
    value, _, bent = _of_numbers(z_numbers, y, line, "vocabulary")
    top, e_numbers, e_text = sums.unsqueeze(-1)
    total = e_numbers + e_text
    mass, worse = e_numbers / total, line.text - value.unsqueeze(-1)
    of_numbers = weight * ((z_numbers - top).exp() / total) * (bent - e_text / total * worse)
    of_text = z.sub_(top).exp_().mul_(weight * mass * worse / total)
    return of_text.index_copy_(-1, line.columns, of_numbers)


def _at_numbers(at: Where, line: NumberLine) -> Where:
    """The index of the number tokens at these positions, (rows, numbers)."""
    return (*(axis.unsqueeze(-1) for axis in at), line.columns)


def _pieces(logits: Tensor, rows: int) -> list[slice]:
    most = _PIECE_ON_CPU if logits.device.type == "cpu" else _PIECE
    step = max(1, most // logits.shape[-1])
    return [slice(start, start + step) for start in range(0, rows, step)]
