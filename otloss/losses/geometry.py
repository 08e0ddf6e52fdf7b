"""Distances between classes, and the distance of a distribution over classes to a label.

With P = softmax(z) over K classes of values x, gaps d_k = x_{k+1} - x_k, F the cumulative sum of P, G the one of the
label and r = F - G:

    on the line      sum_k d_k |r_k|^power                       power 1 is W_1, power 2 the ranked probability score
    on the circle    W_1, or min over m of sum_k d_k (r_k - m)^2, d_{K-1} = period - (x_{K-1} - x_0) closing it
    by a cost        sum_i P_i C[y, i]                           exact: one class is transported in one way only;
                     min <C, plan>                               for soft labels

At power 1 the distance to one class y is sum_i P_i |x_i - x_y| too, and on the circle sum_i P_i arc(i, y).

r_k is summed from that end of the classes which holds less mass: for one class F_k below it and -(1 - F_k) from it on,
each a sum of terms of one sign. So a prediction that is nearly right keeps its relative accuracy, where F_k - 1 would
cancel. Its derivative in P is then a sum of terms of one sign as well, zero at the label's class.

This is the reference implementation of the kernel `otloss.losses.ordinal_numba`.

Source: L. Hou, C.-P. Yu, D. Samaras, Squared Earth Mover's Distance-based Loss, arXiv 1611.05916, eq. 6.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import pad

from otloss._checks import check_finite, check_number, check_positive, check_tensor, float64_or, is_differentiated
from otloss._ordered_classes import check_increasing, check_table_shape
from otloss.costs import as_cost
from otloss.solvers.closed_forms.circle import wasserstein_circular
from otloss.solvers.closed_forms.line import cdf_distance
from otloss.solvers.histograms import centre_gradient
from otloss.solvers.solve import emd


class Geometry(ABC):
    """Distances between K ordered classes."""

    @abstractmethod
    def to(self, dtype: torch.dtype) -> Geometry:
        """Return the same distances in another dtype."""

    @abstractmethod
    def to_class(self, P: Float[Tensor, "rows classes"], y: Int[Tensor, " rows"]) -> Float[Tensor, " rows"]:
        """Return the distance of each row of P to one class."""

    @abstractmethod
    def to_soft(self, P: Float[Tensor, "rows classes"], label: Float[Tensor, "rows classes"]) -> Float[Tensor, " rows"]:
        """Return the distance of each row of P to a soft label; the gradient in the label is centred."""

    def distance(self, P: Float[Tensor, "rows classes"], label: Tensor) -> Float[Tensor, " rows"]:
        """Return the distance of each row of P to its label: class positions (rows,), or soft labels (rows, K)."""
        return self.to_soft(P, label) if label.is_floating_point() else self.to_class(P, label)


@dataclass(frozen=True)
class Line(Geometry):
    """sum_k d_k |F_k - G_k|^power, with `gaps` d (K - 1,) between neighbouring class values."""

    gaps: Float[Tensor, " gaps"]
    power: float = 2

    def to(self, dtype: torch.dtype) -> Line:
        return self if self.gaps.dtype == dtype else Line(self.gaps.to(dtype), self.power)

    def to_class(self, P: Tensor, y: Tensor) -> Tensor:
        if self.power == 1:  # This is cheaper than cumulative sums.
            x = _positions(self.gaps)
            return (P * (x - x[y].unsqueeze(-1)).abs()).sum(-1)
        return (self.gaps * _raised(_cdf_difference(P, y), self.power)).sum(-1)

    def to_soft(self, P: Tensor, label: Tensor) -> Tensor:
        if is_differentiated(label):  # This has one-sided derivatives at classes of the label without mass.
            return cdf_distance(P, label, _positions(self.gaps), power=self.power)
        return (self.gaps * _raised(_cdf_difference(P, label), self.power)).sum(-1)


@dataclass(frozen=True)
class Circle(Geometry):
    """W_1 or, at power 2, min over m of sum_k d_k (F_k - G_k - m)^2; `gaps` d (K,), of which the last closes it."""

    gaps: Float[Tensor, " classes"]
    power: float = 2

    def to(self, dtype: torch.dtype) -> Circle:
        return self if self.gaps.dtype == dtype else Circle(self.gaps.to(dtype), self.power)

    def to_class(self, P: Tensor, y: Tensor) -> Tensor:
        if self.power == 2:
            return self._smallest_square(_cdf_difference(P, y))
        x = _positions(self.gaps[:-1])
        apart = (x - x[y].unsqueeze(-1)).abs()
        return (P * torch.minimum(apart, self.gaps.sum() - apart)).sum(-1)

    def to_soft(self, P: Tensor, label: Tensor) -> Tensor:
        if self.power == 2:
            return self._smallest_square(_cdf_difference(P, centre_gradient(label, has_light_bins=False)))
        return wasserstein_circular(P, label, _positions(self.gaps[:-1]), period=float(self.gaps.detach().sum()))

    def _smallest_square(self, r: Float[Tensor, "rows gaps"]) -> Float[Tensor, " rows"]:
        r = pad(r, (0, 1))  # F = G after the last class.
        mean = (self.gaps * r).sum(-1, keepdim=True) / self.gaps.sum()
        return (self.gaps * (r - mean).square()).sum(-1)


@dataclass(frozen=True)
class CostMatrix(Geometry):
    """The least cost of moving P to the label, by costs (K, K) [true, predicted] >= 0."""

    cost: Float[Tensor, "classes classes"]

    def to(self, dtype: torch.dtype) -> CostMatrix:
        return self if self.cost.dtype == dtype else CostMatrix(self.cost.to(dtype))

    def to_class(self, P: Tensor, y: Tensor) -> Tensor:
        return (P * self.cost[y]).sum(-1)

    def to_soft(self, P: Tensor, label: Tensor) -> Tensor:
        return emd(label, P, self.cost)


def _positions(gaps: Float[Tensor, " gaps"]) -> Float[Tensor, " classes"]:
    """Return the class values, from 0 on."""
    return pad(gaps.cumsum(0), (1, 0))


def _cdf_difference(P: Tensor, label: Tensor) -> Float[Tensor, "rows gaps"]:
    """Return F - G, summed from that end of the classes which holds less mass."""
    if label.is_floating_point():
        moved, is_low = P - label, (P + label).detach()[:, :-1].cumsum(-1) <= 1
    else:
        moved, is_low = P, torch.arange(P.shape[-1] - 1, device=P.device) < label.unsqueeze(-1)
    from_first, from_last = moved[:, :-1].cumsum(-1), moved[:, 1:].flip(-1).cumsum(-1).flip(-1)
    return torch.where(is_low, from_first, -from_last)


def _raised(r: Tensor, power: float) -> Tensor:
    if power == 2:
        return r.square()
    size = r.abs()
    if power == 1:
        return size
    # The second derivative at 0 may be infinite; it is set to 0 where the tail underflows.
    some = size > torch.finfo(size.dtype).tiny
    return torch.where(some, size, 1.0) ** power * some


@dataclass(frozen=True)
class GeometrySettings:
    """The options of `ordinal_loss` that say how far classes are apart, by their names there."""

    x: Any = None
    power: Any = 2
    cost: Any = None
    circular: bool = False
    period: Any = None

    def geometry(self, classes: int, device: torch.device) -> Geometry:
        """Return the distances between so many classes.

        Raises:
            TypeError, ValueError: as `ordinal_loss`.
        """
        x, power, period = self.x, self.power, self.period
        check_power(power)
        if self.cost is not None:
            others = {"x": x is not None, "power": power != 2, "circular": self.circular, "period": period is not None}
            for name in (name for name, is_set in others.items() if is_set):
                raise ValueError(f"cost and {name} are both given, expected a cost alone; leave {name} out.")
            return CostMatrix(_cost_matrix(self.cost, classes))
        values = torch.arange(classes, device=device, dtype=torch.float32)
        if x is not None:
            values = increasing("x", x, (classes,))
        if not self.circular:
            if period is not None:
                raise ValueError(f"period={period} is given for classes on a line; add circular=True, or leave it out.")
            return Line(values.diff(), power)
        if power not in (1, 2):
            raise ValueError(f"power is {power}, expected 1 or 2 for classes on a circle.")
        if period is None:
            if x is not None:
                raise ValueError("x is given on a circle without period=, its circumference (such as 24, 360 or 2 pi).")
            period = float(classes)
        values = values.to(float64_or(values.dtype, values.device))  # the period is a number of float64
        span = values[-1:] - values[:1]
        if not float(span.detach()) < check_positive("period", period):
            raise ValueError(f"period is {period}, expected more than {float(span.detach()):g}, the span of x.")
        return Circle(torch.cat([values.diff(), period - span]), power)

    @property
    def dtypes(self) -> list[torch.dtype]:
        """Return the dtypes that take part in the promotion, for settings that are valid."""
        return [setting.dtype for setting in (self.x, self.cost) if setting is not None]


def check_power(power: Any) -> float:
    """Return the power if it is finite and at least 1."""
    if not 1 <= check_number("power", power) < float("inf"):
        raise ValueError(f"power is {power}, expected a finite number of at least 1.")
    return float(power)


def increasing(name: str, values: Any, *shapes: tuple[int, ...]) -> Float[Tensor, " values"]:
    """Return finite, strictly increasing numbers of one of the shapes, with their graph; integers as float64."""
    check_table_shape(name, check_tensor(name, values).shape, *shapes, fix="They have to fit the logits.")
    check_finite(name, values)
    values = values if values.is_floating_point() else values.double()
    check_increasing(name, np.array(values.detach().tolist()))
    return values


def _cost_matrix(cost: Any, classes: int) -> Float[Tensor, "classes classes"]:
    matrix = as_cost(cost).dense()
    check_table_shape("cost", matrix.shape, (classes, classes))
    check_finite("cost", matrix)
    return matrix
