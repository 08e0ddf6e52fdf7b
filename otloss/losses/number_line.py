"""Number tokens as points on a line, and the distances between them.

Notation: v_j the value of token j, x_j its position, d_ij the distance between tokens i and j.

    absolute   x = v,  d = |x_i - x_j|
    log        x = sign(v) log(1 + |v|)
    symlog     x = v for |v| <= 9, sign(v) 9 (1 + log10(|v| / 9)) beyond; d = min(|x_i - x_j|, 9)
    squash f   d = 1 + (|x_i - x_j| - d_min) (f - 1) / (d_max - d_min) between different values: the farthest number is
               f times as wrong as the nearest one

"symlog" has one meaning in every vocabulary: between the digits 0 to 9 it is |v_i - v_j|, and a factor of ten costs 9,
as much as from 0 to 9. Larger distances cost 9 too, and text 1.01 times that. The other tokens of the vocabulary do not
matter. Signed distances are clamped to [-9, 9].
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from otloss._checks import check_floating, check_number, check_positive, is_differentiated

FORMS = ("wasserstein", "mse")
SCALINGS = ("absolute", "symlog", "log", "squash")
SQUASH = 9.0  # The unit is the span of the ten digits.
FARTHEST_DIGITS = 9.0  # 0 to 9
TEXT_OVER_WORST = 1.01  # Text costs slightly more than the farthest number, as in the published loss.


@dataclass(frozen=True, eq=False)
class NumberLine:
    """The number tokens of a vocabulary on a scaled line.

    Attributes:
        columns: the tokens that are numbers, ascending.
        x: their positions.
        place: (V,) index of each token in `columns`, -1 for text.
        shift, factor: between different positions the distance is shift + factor |x_i - x_j|.
        bound: the largest distance.
        form: "wasserstein" or "mse", see `otloss.losses.number_tokens`.
        text: cost of mass on text.
        scaling: the one that was taken.
    """

    columns: Int[Tensor, " numbers"]
    x: Float[Tensor, " numbers"]
    place: Int[Tensor, " vocab"]
    shift: float
    factor: float
    bound: float
    form: str
    text: float
    scaling: str

    def is_number(self, labels: Int[Tensor, "*batch"]) -> Bool[Tensor, "*batch"]:
        """Return whether each label is a number."""
        return self.place[labels] >= 0

    def distances(self, labels: Int[Tensor, " picked"]) -> Float[Tensor, "picked numbers"]:
        """Return the distances from labels that are numbers to all numbers; signed, x_j - x_y, for form "mse"."""
        apart = self.x - self.x[self.place[labels]].unsqueeze(1)
        if self.bound < float("inf"):
            apart = apart.clamp_(-self.bound, self.bound)
        if self.form == "mse":
            return apart
        apart = apart.abs_()
        if self.shift == 0.0 and self.factor == 1.0:
            return apart
        return torch.where(apart == 0, 0.0, self.shift + self.factor * apart)

    def to(self, *args: Any, **kwargs: Any) -> NumberLine:
        """Return the same line on another device, or in another floating dtype."""
        x = self.x.to(*args, **kwargs)
        return replace(self, x=x, columns=self.columns.to(x.device), place=self.place.to(x.device))


def number_line(
    values: Float[Tensor, " vocab"],
    *,
    form: str = "wasserstein",
    scaling: str | None = None,
    squash: float | None = None,
    text: float | None = None,
) -> NumberLine:
    """Return the values of the tokens as positions on a line; settings as of `number_token_loss`.

    Raises:
        TypeError, ValueError: as `number_token_loss`.
    """
    values = checked_values(values)
    if scaling is None:
        scaling = "symlog" if squash is None else "absolute"
    for name, choice, choices in (("form", form, FORMS), ("scaling", scaling, SCALINGS)):
        if choice not in choices:
            raise ValueError(f"{name} is {choice!r}, expected one of {', '.join(map(repr, choices))}.")
    squash = SQUASH if squash is None and scaling == "squash" else squash
    if squash is not None:
        _check_squash(squash, form, scaling)
    columns = (~values.isnan()).nonzero().squeeze(-1)
    place = torch.full((len(values),), -1, dtype=torch.long, device=values.device)
    place[columns] = torch.arange(len(columns), device=values.device)
    x = _scaled(values[columns], scaling)
    bound = FARTHEST_DIGITS if scaling == "symlog" else float("inf")
    shift, factor, widest = 0.0, 1.0, bound if scaling == "symlog" else float(x.amax() - x.amin())
    if squash is not None:
        shift, factor, widest = _squashed(x, float(squash), widest)
    # It is 1 if all numbers are equal: text has to cost more than they do.
    worst = (widest if form == "wasserstein" else widest * widest) or 1.0
    if not TEXT_OVER_WORST * worst < torch.finfo(x.dtype).max:
        low, high = (float(end) for end in torch.aminmax(values[columns]))
        raise ValueError(
            f'values range from {low:.6g} to {high:.6g}, and form="{form}" of that exceeds {x.dtype}, expected costs '
            'within its range; use scaling="symlog" or "log".'
        )
    text = TEXT_OVER_WORST * worst if text is None else check_positive("text", text)
    return NumberLine(columns, x, place, shift, factor, bound, form, text, scaling)


def checked_values(values: Any) -> Float[Tensor, " vocab"]:
    """Return the values of the tokens in float32 or wider; raise if there is no number, or an infinite one."""
    check_floating("values", values)
    if values.dim() != 1 or not len(values):
        raise ValueError(f"values have shape {tuple(values.shape)}, expected (V,): the value of each token.")
    if is_differentiated(values):
        raise ValueError("values require a gradient or carry a tangent, which is not supported; pass values.detach().")
    values = values.to(torch.promote_types(values.dtype, torch.float32))
    if values.isinf().any():
        first = int(values.isinf().nonzero()[0])
        raise ValueError(
            f"values hold {float(values[first])} at token {first}, expected finite values, or NaN for tokens that are "
            "not numbers."
        )
    if values.isnan().all():
        raise ValueError(f"all {len(values)} values are NaN (text), expected the value of at least one token.")
    return values


def signed_log(v: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """Return sign(v) log(1 + |v|)."""
    return v.sign() * v.abs().log1p()


def _check_squash(squash: Any, form: str, scaling: str) -> None:
    if not 1.0 < check_number("squash", squash) < float("inf"):
        raise ValueError(f"squash is {squash}, expected a finite factor above 1: cost of the farthest number.")
    if form != "wasserstein":
        raise ValueError(
            f'squash={squash} maps distances between two numbers, and form="{form}" uses the mean number only; use '
            'form="wasserstein", or scaling="log".'
        )
    if scaling == "symlog":
        raise ValueError(f'squash={squash} and scaling="symlog" each bound the distances; leave one of them out.')


def _scaled(v: Float[Tensor, " numbers"], scaling: str) -> Float[Tensor, " numbers"]:
    if scaling == "log":
        return signed_log(v)
    if scaling == "symlog":
        beyond = FARTHEST_DIGITS * (1.0 + (v.abs().clamp(min=FARTHEST_DIGITS) / FARTHEST_DIGITS).log10())
        return torch.where(v.abs() <= FARTHEST_DIGITS, v, v.sign() * beyond)
    return v


def _squashed(x: Float[Tensor, " numbers"], squash: float, widest: float) -> tuple[float, float, float]:
    """Return shift, factor and the largest distance of the squashed line."""
    gaps = x.unique().diff()
    nearest = float(gaps.amin()) if len(gaps) else widest
    if widest == nearest:  # One or two values have one distance.
        return 1.0, 0.0, 1.0
    factor = (squash - 1.0) / (widest - nearest)
    return 1.0 - factor * nearest, factor, squash
