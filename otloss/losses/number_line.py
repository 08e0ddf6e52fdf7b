"""Number tokens as points on a line, what lies between two of them, and what a distribution over them is charged.

Notation: v_j the value of token j, x_j its position, y the label, p the distribution over the number tokens (of mass
one), mu = sum_j p_j x_j, d_ij = |x_i - x_j|.

    absolute   x = v                    log    x = sign(v) log(1 + |v|)
    rank       x = rank of v among the distinct values, / (their number - 1): in [0, 1]
    symlog     x = v for |v| <= 9, sign(v) 9 (1 + log10(|v| / 9)) beyond; d = min(|x_i - x_j|, 9)
    squash f   distances go to 1 + (d - d_min) (f - 1) / (d_max - d_min), and 0 stays 0: the farthest number is f times
               as wrong as the nearest one

    wasserstein   sum_j p_j d_jy         the transport cost
    mse           (mu - x_y)^2           zero for half the mass on 0 and half on 8 at 4: of the mean number only
    mae           |mu - x_y|
    huber         (mu - x_y)^2 / 2 up to delta, linear beyond

"symlog" has one meaning in every vocabulary: between the digits 0 to 9 it is |v_i - v_j|; a factor of ten costs 9, as
much as from 0 to 9, so that 100 to 900 in one token are about as far apart as the digits 1 to 9; what is farther costs
9 too, and text 1.01 phi(9). No other token of the vocabulary has a say in it. Signed distances are cut at 9 on either
side where the form bends their mean.

The last three are phi(mu - x_y), and `tangent` gives costs of each number, phi + phi' (x_j - mu), whose mean is phi and
whose slopes in p are those of phi.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from otloss._checks import check_floating, check_number, check_positive

FORMS = ("wasserstein", "mse", "mae", "huber")
SCALINGS = ("absolute", "symlog", "log", "rank", "squash")
DELTA = 1.0
SQUASH = 9.0  # what the ten digits have by themselves
FARTHEST_DIGITS = 9.0  # from 0 to 9
# Text is a little worse than the worst number, as in the published loss.
TEXT_OVER_WORST = 1.01


@dataclass(frozen=True, eq=False)
class NumberLine:
    """The number tokens of a vocabulary on a scaled line.

    Attributes:
        columns: the tokens that are numbers, ascending.
        x: their positions.
        place: (V,) which of them each token is, -1 where it is none.
        shift, slope: between different positions the distance is shift + slope |x_i - x_j|.
        bound: of the distances.
        form, delta: what a distribution is charged.
        text: what mass on no number is charged.
    """

    columns: Int[Tensor, " numbers"]
    x: Float[Tensor, " numbers"]
    place: Int[Tensor, " vocab"]
    shift: float
    slope: float
    bound: float
    form: str
    delta: float
    text: float

    def is_number(self, labels: Int[Tensor, "*batch"]) -> Bool[Tensor, "*batch"]:
        """Whether each label is a number."""
        return self.place[labels] >= 0

    def distances(self, labels: Int[Tensor, " picked"]) -> Float[Tensor, "picked numbers"]:
        """From labels that are numbers to all numbers; `x_j - x_y` with its sign where the form bends the mean."""
        apart = self.x - self.x[self.place[labels]].unsqueeze(1)
        if self.bound < float("inf"):
            apart = apart.clamp_(-self.bound, self.bound)
        if self.form != "wasserstein":
            return apart
        apart = apart.abs_()
        if self.shift == 0.0 and self.slope == 1.0:
            return apart
        return torch.where(apart == 0, 0.0, self.shift + self.slope * apart)

    def tangent(self, mean: Tensor) -> tuple[Tensor, Tensor]:
        """Intercept and slope of the tangent's costs in `x_j - x_y`, at this mean of it."""
        value, slope = self.charge(mean)
        return value - slope * mean, slope

    def charge(self, gap: Tensor) -> tuple[Tensor, Tensor]:
        """phi and phi' of a signed gap; the forms that bend the mean only."""
        if self.form == "mse":
            return gap * gap, 2 * gap
        if self.form == "mae":
            return gap.abs(), gap.sign()
        far = gap.abs() > self.delta
        value = torch.where(far, self.delta * (gap.abs() - 0.5 * self.delta), 0.5 * gap * gap)
        return value, gap.clamp(-self.delta, self.delta)

    def to(self, *args: Any, **kwargs: Any) -> NumberLine:
        """The same line on another device, or in another floating dtype."""
        x = self.x.to(*args, **kwargs)
        return replace(self, x=x, columns=self.columns.to(x.device), place=self.place.to(x.device))


def number_line(
    values: Float[Tensor, " vocab"],
    *,
    form: str = "wasserstein",
    delta: float = DELTA,
    scaling: str = "absolute",
    squash: float | None = None,
    text: float | None = None,
) -> NumberLine:
    """Put the values of the tokens on a line.

    Raises:
        TypeError, ValueError: as `number_token_loss` says of these arguments.
    """
    values = checked_values(values)
    _check_choice("form", form, FORMS)
    _check_choice("scaling", scaling, SCALINGS)
    squash = SQUASH if squash is None and scaling == "squash" else squash
    if squash is not None and not 1.0 < check_number("squash", squash) < float("inf"):
        raise ValueError(
            f"squash is {squash}, expected a finite factor above 1: how much worse the farthest number is."
        )
    if squash is not None and form != "wasserstein":
        raise ValueError(
            f'squash={squash} maps distances between two numbers, and form="{form}" has none, only the mean number; '
            'use form="wasserstein", or scaling="log" or "rank".'
        )
    if squash is not None and scaling == "symlog":
        raise ValueError(
            f'squash={squash} and scaling="symlog" each bound the distances; leave one of them out, or use '
            'scaling="absolute" with squash.'
        )
    delta = check_positive("delta", delta)
    if delta != DELTA and form != "huber":
        raise ValueError(
            f'delta={delta} is where form="huber" becomes linear, and form="{form}" has no such place; leave delta at '
            f'{DELTA}, or use form="huber".'
        )
    columns = (~values.isnan()).nonzero().squeeze(-1)
    x = _scaled(values[columns], scaling)
    bound = FARTHEST_DIGITS if scaling == "symlog" else float("inf")
    shift, slope, widest = 0.0, 1.0, bound if scaling == "symlog" else float(x.amax() - x.amin())
    if squash is not None:
        shift, slope, widest = _squashed(x, float(squash), widest)
    line = NumberLine(columns, x, _places(columns, len(values)), shift, slope, bound, form, delta, text=1.0)
    # Where all numbers are equal, 1: text is to be worse than they are.
    worst = (widest if form == "wasserstein" else float(line.charge(torch.tensor(widest, dtype=x.dtype))[0])) or 1.0
    if not TEXT_OVER_WORST * worst < torch.finfo(x.dtype).max:
        low, high = (float(end) for end in torch.aminmax(values[columns]))
        raise ValueError(
            f'values reach from {low:.6g} to {high:.6g}, and form="{form}" of that is out of the range of {x.dtype}, '
            'expected costs within; use scaling="log" or "rank".'
        )
    text = TEXT_OVER_WORST * worst if text is None else check_positive("text", text)
    return replace(line, text=text)


def checked_values(values: Any) -> Float[Tensor, " vocab"]:
    """Values of the tokens in float32 or wider; raises unless there is a number, and none is infinite."""
    check_floating("values", values)
    if values.dim() != 1 or not len(values):
        raise ValueError(f"values have shape {tuple(values.shape)}, expected (V,): the value of each token.")
    if values.requires_grad:
        raise ValueError("values require a gradient, which is not given; pass values.detach().")
    values = values.to(torch.promote_types(values.dtype, torch.float32))
    if values.isinf().any():
        first = int(values.isinf().nonzero()[0])
        raise ValueError(
            f"values hold {float(values[first])} at token {first}, expected finite values, or NaN for a token that is "
            "no number."
        )
    if values.isnan().all():
        raise ValueError(
            f"none of the {len(values)} values is a number (all are NaN), expected the value of at least one token; "
            "NaN stands for tokens that are no numbers."
        )
    return values


def _check_choice(name: str, value: Any, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ValueError(f"{name} is {value!r}, expected one of {', '.join(map(repr, choices))}.")


def _places(columns: Tensor, vocab: int) -> Tensor:
    place = torch.full((vocab,), -1, dtype=torch.long, device=columns.device)
    place[columns] = torch.arange(len(columns), device=columns.device)
    return place


def signed_log(v: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """sign(v) log(1 + |v|): the logarithm of a large value, and 0 of 0."""
    return v.sign() * v.abs().log1p()


def _symlog(v: Float[Tensor, " numbers"]) -> Float[Tensor, " numbers"]:
    beyond = FARTHEST_DIGITS * (1.0 + (v.abs().clamp(min=FARTHEST_DIGITS) / FARTHEST_DIGITS).log10())
    return torch.where(v.abs() <= FARTHEST_DIGITS, v, v.sign() * beyond)


def _scaled(v: Float[Tensor, " numbers"], scaling: str) -> Float[Tensor, " numbers"]:
    if scaling == "symlog":
        return _symlog(v)
    if scaling == "log":
        return signed_log(v)
    if scaling == "rank":
        distinct, rank = v.unique(return_inverse=True)
        return rank.to(v.dtype) / max(1, len(distinct) - 1)
    return v


def _squashed(x: Float[Tensor, " numbers"], factor: float, widest: float) -> tuple[float, float, float]:
    """Shift, slope and the largest distance of the squashed line."""
    gaps = x.unique().diff()
    if not len(gaps):
        return 1.0, 0.0, 1.0
    nearest = float(gaps.amin())
    if widest == nearest:  # two values: one distance
        return 1.0, 0.0, 1.0
    slope = (factor - 1.0) / (widest - nearest)
    return 1.0 - slope * nearest, slope, factor
