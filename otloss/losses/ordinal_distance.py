"""Distances between classes, and the distance of a distribution over classes to a label.

With P = softmax(z) over K classes of values x, gaps d_k = x_{k+1} - x_k, F the cumulative sum of P, G that of the label
and r = F - G:

    on the line      sum_k d_k |r_k|^power                       power 1 is W_1, power 2 the ranked probability score
    on the circle    W_1, or min over m of sum_k d_k (r_k - m)^2, d_{K-1} = period - (x_{K-1} - x_0) closing it
    by a cost        sum_i P_i C[y, i]                           exact: one class is transported in one way only;
                     min <C, plan>                               for soft labels

At power 1 the distance to one class y is sum_i P_i |x_i - x_y| too, and on the circle sum_i P_i arc(i, y).

r_k is summed from that end of the classes which holds less mass: for one class F_k below it and -(1 - F_k) from it on,
each a sum of terms of one sign. So a prediction that is nearly right keeps its relative accuracy, where F_k - 1 would
cancel. Its derivative in P is then a sum of terms of one sign as well, zero at the label's class.

This is the reference implementation of the kernel `otloss._kernels.ordinal`.

Source: L. Hou, C.-P. Yu, D. Samaras, Squared Earth Mover's Distance-based Loss, arXiv 1611.05916, eq. 6.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import pad

from otloss._checks import check_finite, check_number, check_positive, check_tensor, is_differentiated
from otloss._ordered_classes import check_increasing, check_table_shape
from otloss.costs import as_cost
from otloss.solvers.circle import wasserstein_circular
from otloss.solvers.line import cdf_distance
from otloss.solvers.problem import centre_gradient
from otloss.solvers.solve import emd


@dataclass(frozen=True)
class Geometry:
    """Distances between classes: gaps on the line or around a circle, or a cost matrix.

    Attributes:
        gaps: (K - 1,) between neighbouring class values; (K,) on a circle, the last one closes it. None with a cost.
        power: at least 1; 1 or 2 on a circle.
        circular: whether the last class is next to the first.
        cost: (K, K) costs[true, predicted] >= 0, or None.
    """

    gaps: Float[Tensor, " gaps"] | None
    power: float = 2
    circular: bool = False
    cost: Float[Tensor, "classes classes"] | None = None

    def to(self, dtype: torch.dtype) -> Geometry:
        gaps, cost = (None if t is None else t.to(dtype) for t in (self.gaps, self.cost))
        return Geometry(gaps, self.power, self.circular, cost)

    def distance(self, P: Float[Tensor, "rows classes"], label: Tensor) -> Float[Tensor, " rows"]:
        """Return the distance of each row of P to its label: class positions (rows,), or soft labels (rows, K)."""
        soft = label.is_floating_point()
        label = centre_gradient(label) if soft else label
        if self.cost is not None:
            return emd(label, P, self.cost) if soft else (P * self.cost[label]).sum(-1)
        assert self.gaps is not None
        if self.power == 1 and not soft:  # This is cheaper than cumulative sums.
            apart = (self.x - self.x[label].unsqueeze(-1)).abs()  # (rows, classes)
            if self.circular:
                apart = torch.minimum(apart, self.gaps.sum() - apart)
            return (P * apart).sum(-1)
        if self.power == 1 and self.circular:
            return wasserstein_circular(P, label, self.x, period=float(self.gaps.detach().sum()))
        # It gives one-sided derivatives at labels without mass.
        if soft and is_differentiated(label) and not self.circular:
            return cdf_distance(P, label, self.x, power=self.power)
        r = _cdf_difference(P, label)
        if not self.circular:
            return (self.gaps * _raised(r, self.power)).sum(-1)
        r = pad(r, (0, 1))  # F = G after the last class.
        mean = (self.gaps * r).sum(-1, keepdim=True) / self.gaps.sum()
        return (self.gaps * (r - mean).square()).sum(-1)

    @cached_property
    def x(self) -> Float[Tensor, " classes"]:
        """The class values, from 0 on."""
        assert self.gaps is not None
        return pad((self.gaps[:-1] if self.circular else self.gaps).cumsum(0), (1, 0))


def _cdf_difference(P: Tensor, label: Tensor) -> Float[Tensor, "rows gaps"]:
    """Return F - G, summed from that end of the classes which holds less mass."""
    if label.is_floating_point():
        moved, is_low = P - label, (P + label).detach()[:, :-1].cumsum(-1) <= 1
    else:
        moved, is_low = P, torch.arange(P.shape[-1] - 1, device=P.device) < label.unsqueeze(-1)
    before, after = moved[:, :-1].cumsum(-1), moved[:, 1:].flip(-1).cumsum(-1).flip(-1)
    return torch.where(is_low, before, -after)


def _raised(r: Tensor, power: float) -> Tensor:
    if power == 2:
        return r.square()
    size = r.abs()
    if power == 1:
        return size
    # The second derivative at 0 may be infinite; it is set to 0 where the tail underflows.
    some = size > torch.finfo(size.dtype).tiny
    return torch.where(some, size, 1.0) ** power * some


def class_geometry(
    classes: int,
    device: torch.device,
    *,
    x: Any = None,
    power: Any = 2,
    cost: Any = None,
    circular: bool = False,
    period: Any = None,
) -> Geometry:
    """Return the distances that the settings of `ordinal_loss` describe.

    Raises:
        TypeError, ValueError: as `ordinal_loss`.
    """
    if not 1 <= check_number("power", power) < float("inf"):
        raise ValueError(f"power is {power}, expected a finite number of at least 1.")
    if cost is not None:
        for name, is_set in (("x", x is not None), ("power", power != 2), ("circular", circular), ("period", period)):
            if is_set:
                raise ValueError(f"cost and {name} are both given, expected a cost alone; leave {name} out.")
        return Geometry(None, cost=_cost_matrix(cost, classes))
    values = torch.arange(classes, device=device, dtype=torch.float32) if x is None else increasing("x", x, (classes,))
    if not circular:
        if period is not None:
            raise ValueError(f"period={period} is given for classes on a line; add circular=True, or leave it out.")
        return Geometry(values.diff(), power)
    if power not in (1, 2):
        raise ValueError(f"power is {power}, expected 1 or 2 for classes on a circle.")
    if period is None:
        if x is not None:
            raise ValueError("x is given on a circle without period=, its circumference (such as 24, 360 or 2 pi).")
        period = float(classes)
    span = values[-1:] - values[:1]
    if not float(span.detach()) < check_positive("period", period):
        raise ValueError(f"period is {period}, expected more than {float(span.detach()):g}, the span of x.")
    return Geometry(torch.cat([values.diff(), period - span]), power, circular=True)


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
