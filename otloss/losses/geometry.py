"""How far apart classes are, and what a distribution over them costs against a label.

With P = softmax(z) over K classes of values x, gaps d_k = x_{k+1} - x_k, F the cumulative sum of P, G that of the label
and r = F - G:

    on the line      sum_k d_k |r_k|^power                       power 1 is W_1, power 2 the ranked probability score
    on the circle    W_1, or min over m of sum_k d_k (r_k - m)^2, d_{K-1} = period - (x_{K-1} - x_0) closing it
    by a cost        sum_i P_i C[y, i]                           exact: one class is transported in one way only;
                     min <C, plan>                               for soft labels

At power 1 and for one class y, the first line is sum_i P_i |x_i - x_y| too, and on the circle sum_i P_i arc(i, y).

|r_k| is made of that tail which is small: F_k below the label's class and 1 - F_k above it, each a sum of positive
terms. So a prediction that is nearly right keeps its relative accuracy, where F_k - 1 would cancel. Its derivative in
P is then a sum of positive terms as well, zero at the label's class.

Source: L. Hou, C.-P. Yu, D. Samaras, Squared Earth Mover's Distance-based Loss, arXiv 1611.05916, eq. 6.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import pad

from otloss._checks import check_finite, check_number, check_positive
from otloss.costs import Cost, as_cost
from otloss.losses.real import check_real, wide_enough
from otloss.solvers.circle import wasserstein_circular
from otloss.solvers.exact import emd
from otloss.solvers.histograms import centre_gradient
from otloss.solvers.line import cdf_distance


@dataclass(frozen=True)
class Geometry:
    """How far apart the classes are: values on the line, values on a circle, or a cost.

    Attributes:
        x: (K,) class values, strictly increasing; whole ones start at 0. None with a cost.
        power: at least 1; 1 or 2 on a circle.
        period: the circumference, or None on the line.
        cost: (K, K) costs[true, predicted] >= 0, or None.
    """

    x: Float[Tensor, " classes"] | None
    power: float = 2
    period: float | None = None
    cost: Float[Tensor, "classes classes"] | None = None

    def to(self, dtype: torch.dtype) -> Geometry:
        """Return the geometry in `dtype`; class values in float64 where `dtype` would round whole ones."""
        x = None if self.x is None else self.x.to(wide_enough("x - x[0]", self.x, dtype))
        return Geometry(x, self.power, self.period, None if self.cost is None else self.cost.to(dtype))

    def from_classes(self, P: Float[Tensor, "rows classes"], y: Tensor) -> Float[Tensor, " rows"]:
        """Return the distance of each row of P to the class y of that row."""
        if self.cost is not None:
            return (P * self.cost[y]).sum(-1)
        assert self.x is not None
        if self.power == 1:
            apart = (self.x - self.x[y].unsqueeze(-1)).abs()  # (rows, classes)
            if self.period is not None:
                apart = torch.minimum(apart, self.period - apart)
            return (P * apart).sum(-1)
        above, behind = P[:, :-1].cumsum(-1), P[:, 1:].flip(-1).cumsum(-1).flip(-1)
        is_below = torch.arange(P.shape[-1] - 1, device=P.device) < y.unsqueeze(-1)
        if self.period is None:
            return (self.x.diff() * _raised(torch.where(is_below, above, behind), self.power)).sum(-1)
        return self._around(torch.where(is_below, above, -behind))

    def from_histograms(self, P: Float[Tensor, "rows classes"], T: Tensor) -> Float[Tensor, " rows"]:
        """Return the distance of each row of P to that row of soft labels T."""
        T = centre_gradient(T)
        if self.cost is not None:
            return emd(T, P, self.cost)
        assert self.x is not None
        if self.period is not None and self.power == 1:
            return wasserstein_circular(P, T, self.x, period=self.period)
        if self.period is None and T.requires_grad:  # labels without mass have slopes too: one-sided ones
            return cdf_distance(P, T, self.x, power=self.power)
        apart = _difference(P, T)
        if self.period is None:
            return (self.x.diff() * _raised(apart, self.power)).sum(-1)
        return self._around(apart)

    def _around(self, apart: Float[Tensor, "rows gaps"]) -> Float[Tensor, " rows"]:
        assert self.x is not None
        assert self.period is not None
        gaps = torch.cat([self.x.diff(), self.period - (self.x[-1:] - self.x[:1])])
        apart = pad(apart, (0, 1))  # behind the last class F = G
        mean = (gaps * apart).sum(-1, keepdim=True) / self.period
        return (gaps * (apart - mean).square()).sum(-1)


def _difference(P: Tensor, T: Tensor) -> Tensor:
    """Return F - G (rows, classes - 1), from that end of the classes which has less mass."""
    above, behind = (P - T)[:, :-1].cumsum(-1), (T - P)[:, 1:].flip(-1).cumsum(-1).flip(-1)
    is_low = (P + T).detach()[:, :-1].cumsum(-1) <= 1
    return torch.where(is_low, above, behind)


def _raised(apart: Tensor, power: float) -> Tensor:
    if power == 2:
        return apart.square()
    size = apart.abs()
    if power == 1:
        return size
    # The second slope at 0 may be infinite; where the tail underflows it is none.
    some = size > torch.finfo(size.dtype).tiny
    return torch.where(some, size, 1.0) ** power * some


def geometry(
    classes: int,
    device: torch.device,
    *,
    x: Any = None,
    power: Any = 2,
    cost: Any = None,
    circular: bool = False,
    period: Any = None,
) -> Geometry:
    """Check the settings of `ordinal_loss` that say how far apart the classes are.

    Raises:
        TypeError, ValueError: as `ordinal_loss` says.
    """
    check_settings(x=x, power=power, cost=cost, circular=circular, period=period)
    for name, tensor in (("x", x), ("cost", cost)):
        if isinstance(tensor, Tensor | Cost) and tensor.device != device:
            raise ValueError(f"{name} is on {tensor.device}, logits on {device}, expected one device; move one.")
    if cost is not None:
        return Geometry(None, cost=_cost_matrix(cost, classes))
    values = torch.arange(classes, device=device, dtype=torch.float32) if x is None else _class_values(x, classes)
    if not circular:
        return Geometry(values, power)
    if period is None:
        period = float(classes)
    length = float((values[-1] - values[0]).detach())
    if not length < period:
        raise ValueError(f"period is {period}, expected more than {length:g}, the span of x; give one turn of classes.")
    return Geometry(values, power, float(period))


def check_settings(
    *, x: Any = None, power: Any = 2, cost: Any = None, circular: bool = False, period: Any = None
) -> None:
    """Raise unless the settings of `ordinal_loss` that say how far apart classes are go together."""
    _check_power(power, circular)
    if x is not None:
        check_real("x", x)
    if cost is not None:
        for name, given in (("x", x is not None), ("power", power != 2), ("circular", circular), ("period", period)):
            if given:
                raise ValueError(f"cost and {name} are both given; a cost says all about distances: leave {name} out.")
    if period is not None:
        if not circular:
            raise ValueError(f"period={period} is given for classes on a line; add circular=True, or leave it out.")
        check_positive("period", period)
    elif circular and x is not None:
        raise ValueError("x is given on a circle without period=, its circumference (such as 24, 360 or 2 pi).")


def _check_power(power: Any, circular: bool) -> None:
    if not 1 <= check_number("power", power) < float("inf"):
        raise ValueError(f"power is {power}, expected a finite number of at least 1.")
    if circular and power not in (1, 2):
        raise ValueError(f"power is {power}, expected 1 or 2 for classes on a circle.")


def _class_values(x: Any, classes: int) -> Tensor:
    if x.shape != (classes,):
        raise ValueError(
            f"x has shape {tuple(x.shape)}, expected ({classes},), one value for each class of the logits."
        )
    if x.is_floating_point():
        check_finite("x", x)
    held = x.detach() if x.is_floating_point() else x.long()
    down = held[1:] <= held[:-1]  # differences of whole numbers may wrap around
    if down.any():
        k = int(down.nonzero()[0])
        raise ValueError(
            f"x[{k}] is {held[k].item():.9g} and x[{k + 1}] {held[k + 1].item():.9g}, expected strictly increasing "
            "class values; sort the classes by value, and merge those that share one; where rounding to "
            f"{x.dtype} has merged them, pass x - x[0] of the values before."
        )
    if x.is_floating_point():
        return x
    # From the first one on: years or seconds are then as small as they can be, and their gaps exact.
    values = held - held[:1]
    if values.amin() < 0:
        raise ValueError(
            f"x reaches from {int(held[0])} to {int(held[-1])}, expected whole numbers less than 2^53 = {2**53} apart; "
            "count in a coarser unit."
        )
    return values


def _cost_matrix(cost: Any, classes: int) -> Tensor:
    matrix = as_cost(cost).dense()
    if matrix.shape != (classes, classes):
        raise ValueError(
            f"the cost has shape {tuple(matrix.shape)}, expected ({classes}, {classes}): a row for each true class, a "
            "column for each predicted one."
        )
    check_finite("cost", matrix)
    return matrix
