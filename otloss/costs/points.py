"""Costs between two clouds of points, without their matrix.

    sqeuclidean   |x_i - y_j|^2            no factor 1/2
    euclidean     |x_i - y_j|              gradient 0 where two points coincide
    l1            sum_k |x_ik - y_jk|      gradient 0 where two coordinates coincide
    cosine        1 - cos(x_i, y_j)        a point at the origin costs 1, and 0 to others at the origin

Distances are right to a few roundings also far from the origin and between near points (`costs.distances`). With c
the centre of y, and u, v for points of length one, products with a vector w need no distances:

    sum_j w_j |x_i - y_j|^2 = |x_i - c|^2 sum_j w_j - 2 (x_i - c).sum_j w_j (y_j - c) + sum_j w_j |y_j - c|^2
    sum_j w_j (1 - u_i.v_j) = sum_j w_j - u_i.sum_j w_j v_j
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from otloss._checks import (
    broadcast_shape,
    check_broadcast,
    check_cloud,
    check_epsilon,
    check_floating,
    check_not_meta,
    float64_or,
    is_differentiated,
    needs_torch,
)
from otloss._numba import is_small, may_run_on
from otloss._numba.background import StillCompilingError, declining
from otloss.costs.centroids import between_directions, drift, power_of_drift
from otloss.costs.cost import (
    CentroidBound,
    Cost,
    above_rounding,
    arithmetic_dtype,
    is_symmetric_matrix,
    makes_graph,
    scaled_plan_rows,
    softmin_of,
    unit_rows,
)
from otloss.costs.distances import PRODUCTS, are_near, by_problems, distances, suit_products
from otloss.costs.gaussian_sums import SUMMATION, GaussianSums, in_blocks
from otloss.costs.order import METRIC_NUMBERS, can_leave_out, order_of
from otloss.costs.products import product

if TYPE_CHECKING:
    from otloss.costs.streams_triton import Points

Metric = str | Callable[[Tensor, Tensor], Tensor]
METRICS = ("sqeuclidean", "euclidean", "l1", "cosine")
MAX_AXES_OF_BOXES = 8  # up to which the boxes around clouds are no larger than the balls, or hardly
_SYMMETRY_SAMPLE = 256  # points among which the costs of a function are compared
# Shares of the largest cost. Mahalanobis distances by products in float32 are 8e-5 apart in both directions.
_ROUNDING_OF_FUNCTIONS = {torch.float64: 1e-5, torch.float32: 1e-3}
_KEPT_ORDERS = 8  # two clouds, two functions, two dtypes
# The relative error of the sums that gradients through a grid are made of.
_GRADIENT_SHARE = {torch.float32: 1e-6, torch.float64: 1e-10}


def check_metric(metric: Metric) -> None:
    """Raise ValueError for a name that is none of METRICS."""
    if not callable(metric) and metric not in METRICS:
        raise ValueError(f"metric is {metric!r}, expected one of {METRICS} or a function of two clouds.")


class PointCost(Cost):
    """The cost between the points of two clouds, by their distance or another function of both.

    Powers of other functions: docs/guide/definitions.md#def-orders

    Args:
        x: (n, d), or (..., n, d) for one cloud per problem; finite. The graphs of `x` and `y` are kept.
        y: (m, d) or (..., m, d), `x` by default.
        metric: "sqeuclidean" (no 1/2), "euclidean", "l1", "cosine" (zero rows cost 1 to others, 0 to each other); or a
            function of (n, d) and (m, d) that gives the (n, m) costs, finite and >= 0 (of (..., n, d) and (..., m, d)
            if there is a cloud per problem). It is called with part of the points at a time.

    Attributes:
        x, y: the clouds, with rows of length one for "cosine", where zero rows are on an axis that is added; one object
            if `y` was left out.

    Raises:
        TypeError: if x or y is not a floating tensor.
        ValueError: if their shapes or devices do not fit, or a coordinate is NaN or infinite, or the metric is unknown.

    Example:
        >>> cost = PointCost(torch.tensor([[0.0, 0.0], [3.0, 4.0]]), torch.tensor([[0.0, 0.0]]), metric="euclidean")
        >>> cost.dense()
        tensor([[0.],
                [5.]])
    """

    def __init__(
        self,
        x: Float[Tensor, "*batch n d"],
        y: Float[Tensor, "*batch m d"] | None = None,
        *,
        metric: Metric = "sqeuclidean",
    ) -> None:
        check_metric(metric)
        check_cloud("x", x, may_be_meta=metric != "cosine")
        self.metric = metric
        if y is None or y is x:
            self.x = self.y = x.to(arithmetic_dtype(x.dtype))
        else:
            check_cloud("y", y, may_be_meta=metric != "cosine" and x.is_meta)
            if not y.is_meta:  # a sentence that says more than that the devices differ
                check_not_meta("x", x)
            if x.shape[-1] != y.shape[-1] or x.device != y.device:
                raise ValueError(
                    f"x has {x.shape[-1]} coordinates on {x.device}, y {y.shape[-1]} on {y.device}, expected the same."
                )
            check_broadcast(x=x.shape[:-2], y=y.shape[:-2])
            dtype = arithmetic_dtype(torch.promote_types(x.dtype, y.dtype))
            self.x, self.y = x.to(dtype), y.to(dtype)
        self._input_dtype = self.x.dtype
        if metric == "cosine":
            self.x, self.y = _directions(self.x, self.y)
        # Clouds and their orders for the kernels, shared with what is made of this cost. An order stays a permutation
        # where a cloud is changed in place, so it can be out of date, but not wrong.
        self._orders: list[tuple[Tensor, Callable[[Tensor], Tensor], Tensor]] = []
        self._matrices: _Matrices | None = None  # which `with_matrix` made
        self._is_transposed = False

    @property
    def shape(self) -> tuple[int, int]:
        return self.x.shape[-2], self.y.shape[-2]

    @property
    def batch_shape(self) -> torch.Size:
        return broadcast_shape(self.x.shape[:-2], self.y.shape[:-2])

    @property
    def _data(self) -> Tensor:
        return self.x

    @property
    def T(self) -> PointCost:  # noqa: N802
        if callable(self.metric):
            return self.between(self.y, self.x, _Swapped(self.metric))
        if self.x is self.y:
            return self
        transposed = self.between(self.y, self.x, self.metric)
        transposed._matrices, transposed._is_transposed = self._matrices, not self._is_transposed
        return transposed

    def rows(self, index: Int[Tensor, " picked"]) -> Float[Tensor, "picked m"]:
        index = self._checked_index(index)
        return self._costs(self.x[index], index)

    def row_block(self, start: int, stop: int) -> Float[Tensor, "*batch block m"]:
        matrix = self._matrix()
        if matrix is not None:
            return matrix[..., start:stop, :]
        return self._costs(self.x[..., start:stop, :], torch.arange(start, stop, device=self.device))

    def diagonal(self) -> Float[Tensor, "*batch n"]:
        if callable(self.metric):
            return super().diagonal()
        if self.x is self.y:
            return torch.zeros(self.x.shape[:-1], dtype=self.dtype, device=self.device)
        if self.metric == "cosine":
            return (1 - (self.x * self.y).sum(-1)).clamp(0, 2)
        return _plain_distances(self.x - self.y, self.metric)

    def pairs(
        self, rows: Int[Tensor, "*batch cells"], columns: Int[Tensor, "*batch cells"]
    ) -> Float[Tensor, "*batch cells"]:
        """Return the costs `C[rows, columns]` of single pairs, with their graph; for a metric with a name."""
        assert not callable(self.metric)
        x, y = _picked(self.x, rows), _picked(self.y, columns)
        if self.metric != "cosine":
            return _plain_distances(x - y, self.metric)
        costs = (1 - (x * y).sum(-1)).clamp(0, 2)
        return costs.masked_fill((rows == columns).to(self.device), 0.0) if self.x is self.y else costs

    def apply(self, v: Float[Tensor, "*batch m"]) -> Float[Tensor, "*batch n"]:
        """Return C v: in O((n + m) d) for "sqeuclidean" and "cosine", by blocks of rows otherwise.

        The short forms cancel: their absolute error is as large as for a sum over `|v|` times the largest cost, for
        "sqeuclidean" in float64 where the device has it.
        """
        if self.metric not in ("sqeuclidean", "cosine"):
            return super().apply(v)
        cost, v = self._product_arguments(v)
        return _cosine_product(cost, v) if self.metric == "cosine" else _square_product(cost, v)

    def softmin(
        self, potential: Float[Tensor, "*batch m"], epsilon: float | Tensor, *, left_out: float = 0.0
    ) -> Float[Tensor, "*batch n"]:
        """Return `Cost.softmin`, where large clouds may leave out pairs of at most `left_out` of a row's sum."""
        check_floating("potential", potential)
        if (costs := self._stream()) is not None and not makes_graph(potential, self.x, self.y):
            from otloss.costs import streams_triton as streams

            potential, epsilon, _ = self._softmin_arguments(potential, epsilon)
            return streams.softmin(costs, potential, streams.Epsilon.build(epsilon, self.device))
        matrix = None if makes_graph(potential) else self._matrix()
        if matrix is not None:
            potential, epsilon, _ = self._softmin_arguments(potential, epsilon)
            return softmin_of(matrix, potential, epsilon)
        if makes_graph(potential, self.x, self.y) or not self._has_kernel(potential) or self._suits_products():
            return super().softmin(potential, epsilon)
        from otloss.costs.points_numba import points_softmin

        potential, epsilon, _ = self._softmin_arguments(potential, epsilon)
        orders = self._orders_of(self.x, self.y)
        with suppress(StillCompilingError), declining(self._entries()):
            return points_softmin(
                self.x, self.y, potential, epsilon=epsilon, metric=str(self.metric), orders=orders, left_out=left_out
            )
        return super().softmin(potential, epsilon)

    def _entries(self) -> int:
        return self.batch_shape.numel() * math.prod(self.shape)

    def _orders_of(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor] | None:
        return (self._order(x, order_of), self._order(y, order_of)) if can_leave_out(x, y) else None

    def _order(self, cloud: Tensor, by: Callable[[Tensor], Tensor]) -> Tensor:
        for points, function, order in self._orders:
            if points is cloud and function is by:
                return order
        order = by(cloud)
        self._orders.append((cloud, by, order))
        del self._orders[:-_KEPT_ORDERS]  # solvers ask for those of copies, which are new in each call
        return order

    def parameters(self) -> tuple[Tensor, ...]:
        if callable(self.metric):
            with torch.enable_grad():
                probe = self._of_metric(self.x.detach()[..., :1, :], self.y.detach()[..., :1, :])
            if is_differentiated(probe):
                raise ValueError(
                    "the metric has parameters of its own that require gradients, which would get none here; "
                    "pass the matrix PointCost(...).dense() as the cost of emd, sinkhorn or sinkhorn_divergence (there "
                    "with cost_p= and cost_q=), or turn off their requires_grad."
                )
        return super().parameters()

    def plan_gradients(
        self,
        f: Float[Tensor, "*batch n"],
        g: Float[Tensor, "*batch m"],
        log_p: Float[Tensor, "*batch n"],
        log_q: Float[Tensor, "*batch m"],
        *,
        epsilon: float | Tensor,
        upstream: Float[Tensor, "*batch"],
    ) -> tuple[Tensor, ...]:
        parameters = self.parameters()
        if parameters and self._may_stream():
            epsilon = check_epsilon(epsilon, above_zero=True)
            return self._streamed_gradients((f, g), (log_p, log_q), epsilon, upstream)
        if not parameters or not self._has_kernel(f, g):
            return super().plan_gradients(f, g, log_p, log_q, epsilon=epsilon, upstream=upstream)
        epsilon = check_epsilon(epsilon, above_zero=True)
        if self._suits_products():
            return self._gradients_by_products((f, g), (log_p, log_q), epsilon, upstream)
        with suppress(StillCompilingError), declining(self._entries()):
            return self._gradients_by_kernel((f, g), (log_p, log_q), epsilon, upstream)
        return super().plan_gradients(f, g, log_p, log_q, epsilon=epsilon, upstream=upstream)

    def _gradients_by_kernel(
        self, potentials: tuple[Tensor, Tensor], log_weights: tuple[Tensor, Tensor], epsilon: float | Tensor,
        upstream: Tensor,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        """Return the gradients of `plan_gradients` by the kernel for points, or through a grid."""
        from otloss.costs.points_numba import gradients_in_x

        f, g = potentials
        width = epsilon.unsqueeze(-1) if isinstance(epsilon, Tensor) else epsilon
        a, b = (h + width * log_w for h, log_w in zip(potentials, log_weights, strict=True))
        by_points: dict[int, Tensor] = {}
        sums = None
        if a.dim() == b.dim() == 1:
            sums = self.sums_near(f, g, epsilon=float(epsilon), share=_GRADIENT_SHARE[self.dtype])
        for points, others, mine, theirs, through_grid in (
            (self.x, self.y, a, b, sums), (self.y, self.x, b, a, None if sums is None else sums.T)
        ):  # fmt: skip
            if points.requires_grad:
                gradient = None if through_grid is None else through_grid.gradients_in_x(mine, theirs)
                if gradient is None:
                    gradient = gradients_in_x(
                        points, others, mine, theirs,
                        epsilon=epsilon, metric=str(self.metric), orders=self._orders_of(points, others),
                    )  # fmt: skip
                gradient = (gradient * upstream[..., None, None].to(gradient)).sum_to_size(points.shape)
                by_points[id(points)] = by_points[id(points)] + gradient if id(points) in by_points else gradient
        return tuple(by_points[id(t)] for t in self.parameters())

    def _streamed_gradients(
        self, potentials: tuple[Tensor, Tensor], log_weights: tuple[Tensor, Tensor], epsilon: float | Tensor,
        upstream: Tensor,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        """Return the gradients of `plan_gradients` by the kernels of `streams_triton`."""
        from otloss.costs import streams_triton as streams

        prepared = streams.Epsilon.build(epsilon, self.device)
        width = epsilon.unsqueeze(-1) if isinstance(epsilon, Tensor) else epsilon
        a, b = (h + width * log_w for h, log_w in zip(potentials, log_weights, strict=True))
        totals = {id(t): torch.zeros_like(t, requires_grad=False) for t in self.parameters()}
        for cost, mine, theirs in ((self, a, b), (self.between(self.y, self.x, self.metric), b, a)):
            if cost.x.requires_grad:
                costs = cost._stream()
                assert costs is not None
                gradient = streams.plan_sums(costs, "gradient", mine, theirs, prepared).values
                totals[id(cost.x)] += (gradient * upstream[..., None, None].to(gradient)).sum_to_size(cost.x.shape)
        return tuple(totals.values())

    def _gradients_by_products(
        self, potentials: tuple[Tensor, Tensor], log_weights: tuple[Tensor, Tensor], epsilon: float | Tensor,
        upstream: Tensor,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        """Return the gradients by forces F_ij = upstream P_ij dC_ij / d(x_i - y_j) over x_i - y_j."""
        (f, g), (log_p, log_q) = potentials, log_weights
        totals = {id(t): torch.zeros_like(t, requires_grad=False) for t in self.parameters()}
        batch = broadcast_shape(f.shape[:-1], g.shape[:-1], self.batch_shape, upstream.shape)
        for start, stop in self.row_blocks(batch):
            rows, part = self.row_block(start, stop), slice(start, stop)
            weights = scaled_plan_rows(rows, f[..., part], g, (log_p[..., part], log_q), epsilon, upstream)
            if self.x is self.y:  # both ends of a pair move
                back = (log_q[..., part], log_p)
                weights += scaled_plan_rows(rows, g[..., part], f, back, epsilon, upstream)
                weights.diagonal(start, -2, -1).fill_(0.0)  # which cancels, and in the products not to the last digit
            forces = 2 * weights
            if self.metric == "euclidean":  # where near pairs count without being many
                forces = weights.double() / rows.masked_fill(rows == 0, torch.inf)
            x, y = self.x[..., part, :], self.y
            if self.x.requires_grad:
                totals[id(self.x)][..., part, :] += _pulls(forces, x, y).sum_to_size(x.shape)
            if self.y.requires_grad and self.y is not self.x:
                totals[id(self.y)] += _pulls(forces.mT, y, x).sum_to_size(y.shape)
        return tuple(totals.values())

    def sums_near(
        self, f: Float[Tensor, " n"], g: Float[Tensor, " m"], *, epsilon: float, share: float, is_bound: bool = True
    ) -> GaussianSums | None:
        """Return soft minima through a grid (`GaussianSums.build`); None where sums over pairs take less time."""
        if self.metric != "sqeuclidean" or self.x.dim() != 2 or self.y.dim() != 2 or not may_run_on(self.x, self.y):
            return None
        if self.x.shape[1] > SUMMATION.max_axes or self.shape[0] * self.shape[1] < SUMMATION.min_pairs:
            return None
        x, y = ((cloud, self._order(cloud, in_blocks)) for cloud in (self.x, self.y))
        return GaussianSums.build(x, y, f, g, epsilon=epsilon, share=share, is_bound=is_bound)

    def largest(self) -> Float[Tensor, "*batch"]:
        """Return a bound of the largest cost, per problem and without a graph.

        It follows from the boxes around the clouds. With many axes balls are smaller: points rarely reach the corners.
        """
        if callable(self.metric):
            return super().largest()
        if self.metric == "cosine":
            return torch.full(self.batch_shape, 2.0, dtype=self.dtype, device=self.device)
        x, y = self.x.detach(), self.y.detach()
        wide = float64_or(self.dtype, self.device)
        width = torch.maximum(x.amax(-2) - y.amin(-2), y.amax(-2) - x.amin(-2)).to(wide)  # (..., d)
        distance = torch.linalg.vector_norm(width, ord=1 if self.metric == "l1" else 2, dim=-1)
        if x.shape[-1] > MAX_AXES_OF_BOXES and self.metric != "l1":
            centre = ((x.mean(-2) + y.mean(-2)) / 2).unsqueeze(-2)
            radii = [torch.linalg.vector_norm(cloud - centre, dim=-1, dtype=wide).amax(-1) for cloud in (x, y)]
            distance = torch.minimum(distance, radii[0] + radii[1])
        if self.metric == "l1":
            return above_rounding(distance, terms=x.shape[-1], like=x)
        squared = above_rounding(distance.square(), terms=x.shape[-1], like=x)  # what squares overflow is infinite
        return squared if self.metric == "sqeuclidean" else squared.sqrt()

    def as_points(self) -> PointCost | None:
        return self if type(self) is PointCost and not callable(self.metric) else None

    def is_symmetric(self) -> bool:
        return self.x is self.y and (not callable(self.metric) or self._is_symmetric_function())

    def _is_symmetric_function(self) -> bool:
        """Return whether the metric gives some of the points the same costs in both directions, up to rounding."""
        some = self.x.detach()
        if some.shape[-2] > _SYMMETRY_SAMPLE:  # at random: the direction may follow the order of the points
            generator = torch.Generator("cpu").manual_seed(0)
            places = torch.randint(some.shape[-2], (_SYMMETRY_SAMPLE,), generator=generator, device="cpu")
            some = some[..., places.to(some.device), :]
        costs = self.between(some, some, self.metric).dense().detach()
        if is_symmetric_matrix(costs, _ROUNDING_OF_FUNCTIONS[torch.float64]):
            return True
        wide = some.to(float64_or(some.dtype, some.device))
        if wide.dtype == some.dtype:
            return False
        in_wide = self._of_metric(wide, wide).detach()  # far from the origin the rounding of float32 is not symmetric
        return is_symmetric_matrix(in_wide, _ROUNDING_OF_FUNCTIONS[in_wide.dtype])

    def costs_within(self) -> tuple[Cost, Cost] | None:
        return self.between(self.x, self.x, self.metric), self.between(self.y, self.y, self.metric)

    def centroid_bound(
        self, p: Float[Tensor, "*batch n"], q: Float[Tensor, "*batch m"], mass: Float[Tensor, "*batch"]
    ) -> CentroidBound | None:
        if self.as_points() is None:
            return None
        if self.metric == "cosine":
            return CentroidBound(between_directions(p, q, mass, self.x, self.y), is_smooth=True)
        moved = drift(p, q, self.x, self.y)
        if self.metric == "sqeuclidean":
            return CentroidBound(power_of_drift(moved, mass.unsqueeze(-1), 2).sum(-1), is_smooth=True)
        value = moved.abs().sum(-1) if self.metric == "l1" else torch.linalg.vector_norm(moved, dim=-1)
        return CentroidBound(value, is_smooth=False)

    def _has_kernel(self, *potentials: Tensor) -> bool:
        problems = broadcast_shape(self.batch_shape, *(t.shape[:-1] for t in potentials)).numel()
        if self.metric not in METRIC_NUMBERS or is_small(problems * self.shape[0] * self.shape[1]):
            return False
        return may_run_on(self.x, self.y, *potentials)

    def _suits_products(self) -> bool:
        return self.metric in ("sqeuclidean", "euclidean") and suit_products(self.x, self.y)

    def with_matrix(self) -> PointCost:
        """Return a cost that keeps its matrix where distances are products (`costs.distances`) and fit the memory."""
        if self._may_stream():
            return self
        if self._matrices is not None or needs_torch(self.x, self.y) or self._entries() > PRODUCTS.max_kept_entries:
            return self
        if not (self._suits_products() or (self.metric == "cosine" and suit_products(self.x, self.y))):
            return self
        cost = copy.copy(self)
        cost._matrices = _Matrices()
        return cost

    def kernel_inputs(self) -> Points | None:
        if callable(self.metric):
            return None
        from otloss.costs.streams_triton import Points

        return Points(self.x, self.y, self.metric, is_one_cloud=self.x is self.y)

    def _matrix(self) -> Float[Tensor, "*batch n m"] | None:
        """Return the matrix that is kept, without a graph; None where none is, or a graph is wanted."""
        if self._matrices is None or makes_graph(self.x, self.y):
            return None
        return self._matrices.read(self, is_transposed=self._is_transposed)

    def _entries_to_keep(self) -> Float[Tensor, "*batch n m"]:
        if self.metric == "cosine":
            return self._costs(self.x, torch.arange(self.shape[0], device=self.device))
        return distances(self.x, self.y, squared=self.metric == "sqeuclidean", for_search=True)

    def without_graph(self) -> PointCost:
        """Return the same cost of points that have no graph."""
        x = self.x.detach()
        return self.between(x, x if self.y is self.x else self.y.detach(), self.metric)

    def between(self, x: Tensor, y: Tensor, metric: Metric) -> PointCost:
        """The cost between clouds that are already checked and, for "cosine", of length one."""
        cost = copy.copy(self)
        cost.x, cost.y, cost.metric = x, y, metric
        cost._matrices, cost._is_transposed = None, False
        return cost

    def _costs(self, x: Tensor, index: Tensor) -> Tensor:
        """The costs of these points, which are `x[index]`, to all of y."""
        if not callable(self.metric):
            costs = _distances(x, self.y, self.metric)
            if self.metric != "cosine" or self.x is not self.y:
                return costs
            return costs.masked_fill(index.unsqueeze(-1) == torch.arange(self.shape[1], device=self.device), 0.0)
        costs = self._of_metric(x, self.y)
        expected = (*broadcast_shape(x.shape[:-2], self.y.shape[:-2]), x.shape[-2], self.shape[1])
        if costs.shape != expected:
            raise ValueError(f"the metric gave costs of shape {tuple(costs.shape)}, expected {expected}.")
        if costs.numel() and not (costs.detach().amin() >= 0 and costs.detach().amax() < torch.inf):
            raise ValueError(
                f"the metric gave costs from {float(costs.detach().amin())} to {float(costs.detach().amax())}, "
                "expected finite costs >= 0; clamp rounding errors with .clamp(min=0)."
            )
        return costs.to(self.dtype)

    def _of_metric(self, x: Tensor, y: Tensor) -> Tensor:
        """Return what a function of two clouds gives, in the dtype of the user's clouds if it takes no wider one."""
        assert callable(self.metric)
        try:  # a function with parameters in float32 cannot take points in float64
            return self.metric(x, y)
        except RuntimeError as error:
            if x.dtype == self._input_dtype or isinstance(error, torch.OutOfMemoryError):
                raise
        return self.metric(x.to(self._input_dtype), y.to(self._input_dtype))

    def __repr__(self) -> str:
        name = self.metric if isinstance(self.metric, str) else getattr(self.metric, "__name__", "a function")
        return super().__repr__()[:-1] + f", metric={name!r}, axes={self.x.shape[-1]})"


def _directions(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Return the points at length one; those at the origin, which have no direction, share an axis that is added."""
    sides = [unit_rows("x", x)] if y is x else [unit_rows("x", x), unit_rows("y", y)]
    units = [unit for unit, _ in sides]
    if any(bool(is_zero.any()) for _, is_zero in sides):
        units = [torch.cat([unit, is_zero.unsqueeze(-1).to(unit.dtype)], -1) for unit, is_zero in sides]
    return units[0], units[-1]


class _Matrices:
    """The matrix of a cost and its transpose, each computed when it is first asked for.

    Where float32 points need products in float64, the matrix is kept in both dtypes: Newton's method asks for float64.
    """

    def __init__(self) -> None:
        self._kept: dict[tuple[torch.dtype, bool], Tensor] = {}

    def read(self, cost: PointCost, *, is_transposed: bool) -> Tensor:
        key = cost.dtype, is_transposed
        if key not in self._kept:
            self._keep(key, self._make(cost, key))
        return self._kept[key]

    def _make(self, cost: PointCost, key: tuple[torch.dtype, bool]) -> Tensor:
        dtype, is_transposed = key
        if (other := self._kept.get((dtype, not is_transposed))) is not None:
            return other.mT.contiguous()
        wide = torch.float64, is_transposed
        if dtype == torch.float32 and wide not in self._kept and are_near(cost.x.detach(), cost.y.detach()):
            self._keep(wide, cost.to(torch.float64)._entries_to_keep())
        return self._kept[wide].to(dtype) if wide in self._kept else cost._entries_to_keep()

    def _keep(self, key: tuple[torch.dtype, bool], matrix: Tensor) -> None:
        if matrix.numel() > PRODUCTS.max_entries_in_both:
            self._kept = {other: kept for other, kept in self._kept.items() if other[0] == key[0]}
        self._kept[key] = matrix


def _picked(points: Float[Tensor, "*own n d"], index: Int[Tensor, "*batch cells"]) -> Float[Tensor, "*batch cells d"]:
    d, batch = points.shape[-1], index.shape[:-1]
    at = index.to(points.device).unsqueeze(-1).expand(*index.shape, d)
    return points.expand(*batch, *points.shape[-2:]).gather(-2, at)


class _Swapped:
    """A metric with its arguments exchanged; picklable where the metric is."""

    def __init__(self, metric: Callable[[Tensor, Tensor], Tensor]) -> None:
        self.metric = metric

    def __call__(self, x: Tensor, y: Tensor) -> Tensor:
        return self.metric(y, x).mT


class _SquaredDistances(torch.autograd.Function):
    """|x_i - y_j|^2, with gradients from products: no n m d array in either pass, and both smooth."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor) -> Tensor:
        ctx.save_for_backward(x, y)
        return distances(x, y, squared=True)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, Tensor | None]:
        x, y = ctx.saved_tensors
        upstream, (needs_x, needs_y) = 2 * gradients[0], ctx.needs_input_grad
        return (
            _pulls(upstream, x, y).sum_to_size(x.shape) if needs_x else None,
            _pulls(upstream.mT, y, x).sum_to_size(y.shape) if needs_y else None,
        )


def _pulls(forces: Float[Tensor, "*batch n m"], x: Tensor, y: Tensor) -> Float[Tensor, "*batch n d"]:
    """Return sum_j F_ij (x_i - y_j) in the dtype of x, by a product.

    It cancels where pairs that are near each other count and lie far from the centre. float64 then replaces float32.
    """
    dtype, wide_y = forces.dtype, y.to(forces.dtype)
    centre = wide_y.detach().mean(-2, keepdim=True)
    a, b = x.to(dtype) - centre, wide_y - centre
    terms = forces.sum(-1).unsqueeze(-1) * a
    pulls = terms - product(forces, b)
    if dtype != torch.float32 or not (x.numel() and y.numel()) or x.device.type == "mps":
        return pulls.to(x.dtype)
    sizes, means = terms.detach().abs().amax((-2, -1)), pulls.detach().abs().mean((-2, -1))
    if bool((sizes <= 1e3 * means).all()):
        return pulls  # with four digits of the mean of each problem
    return _pulls(forces.double(), x.double(), y.double()).to(x.dtype)


def _distances(x: Tensor, y: Tensor, metric: str) -> Tensor:
    if metric == "cosine":
        return (1 - product(x, y.mT)).clamp(0, 2)
    if needs_torch(x, y):
        return _plain_distances(x.unsqueeze(-2) - y.unsqueeze(-3), metric)
    if metric == "sqeuclidean":
        squares: Tensor = _SquaredDistances.apply(x, y)
        return squares
    lengths: Tensor = _Distances.apply(x, y, 2.0 if metric == "euclidean" else 1.0)
    return lengths


def _plain_distances(apart: Tensor, metric: str) -> Tensor:
    """Return the distances with derivatives of every kind, from an array of n m d."""
    if metric == "sqeuclidean":
        return apart.square().sum(-1)
    if metric == "l1":
        return apart.abs().sum(-1)
    coincide = (apart == 0).all(-1)  # a norm of 0 has a gradient, and no second derivative
    return torch.linalg.vector_norm(apart.masked_fill(coincide.unsqueeze(-1), 1.0), dim=-1).masked_fill(coincide, 0.0)


class _Distances(torch.autograd.Function):
    """Euclidean or l1 distances with gradient 0 where points coincide; torch.cdist is differentiable once only."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor, p: float) -> Tensor:
        lengths = distances(x, y, order=p)
        ctx.save_for_backward(x, y, lengths)
        ctx.p = p
        return lengths

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None]:
        x, y, lengths = ctx.saved_tensors
        (upstream,) = gradients
        by_products = (
            ctx.p == 2
            and x.dtype == torch.float32
            and suit_products(x, y, coordinates=PRODUCTS.min_coordinates_of_gradients)
        )
        if not torch.is_grad_enabled() and by_products:
            by_x, by_y = by_problems(_gradients_of_lengths, x, y, lengths, upstream)
        elif not torch.is_grad_enabled():
            batch = lengths.shape[:-2]
            wide_x, wide_y = (t.expand(*batch, *t.shape[-2:]).contiguous() for t in (x, y))
            backward = torch.ops.aten._cdist_backward
            by_x = backward(upstream.contiguous(), wide_x, wide_y, ctx.p, lengths)
            by_y = backward(upstream.mT.contiguous(), wide_y, wide_x, ctx.p, lengths.mT.contiguous())
        else:  # with a graph, and an array of n m d
            apart = x.unsqueeze(-2) - y.unsqueeze(-3)
            if ctx.p == 1:
                direction = apart.detach().sign()
            else:
                near = lengths == 0
                direction = (apart / lengths.masked_fill(near, 1.0).unsqueeze(-1)).masked_fill(near.unsqueeze(-1), 0)
            forces = upstream.unsqueeze(-1) * direction
            by_x, by_y = forces.sum(-2), -forces.sum(-3)
        return by_x.sum_to_size(x.shape), by_y.sum_to_size(y.shape), None


def _gradients_of_lengths(x: Tensor, y: Tensor, lengths: Tensor, upstream: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients through float32 distances, by products in float64: these keep the digits that near points cancel."""
    forces = upstream.double() / lengths.masked_fill(lengths == 0, torch.inf)
    return _pulls(forces, x, y), _pulls(forces.mT, y, x)


def _square_product(cost: PointCost, v: Tensor) -> Tensor:
    # Where v has mass near each other and far from the centre, float32 would lose all digits.
    dtype, wide = v.dtype, float64_or(v.dtype, v.device)
    x, y, v = cost.x.to(wide), cost.y.to(wide), v.to(wide)
    centre = y.detach().mean(-2, keepdim=True)
    x, y = x - centre, y - centre
    moment = product(v.unsqueeze(-2), y).squeeze(-2)  # (..., d)
    square = (v * y.square().sum(-1)).sum(-1, keepdim=True)
    mixed = product(x, moment.unsqueeze(-1)).squeeze(-1)  # (..., n)
    return (x.square().sum(-1) * v.sum(-1, keepdim=True) - 2 * mixed + square).to(dtype)


def _cosine_product(cost: PointCost, v: Tensor) -> Tensor:
    moment = product(v.unsqueeze(-2), cost.y).squeeze(-2)  # (..., d)
    return v.sum(-1, keepdim=True) - product(cost.x, moment.unsqueeze(-1)).squeeze(-1)
