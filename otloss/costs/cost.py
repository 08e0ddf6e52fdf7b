"""What a cost is: rows, products, soft minima and gradients, and the matrix only when asked for.

Notation: n bins of p, m bins of q, h a potential over the bins of q, `top_i = max_j h_j - C_ij`. The soft minimum is

    -eps log sum_j exp((h_j - C_ij) / eps) = -top_i - eps log sum_j exp((h_j - C_ij - top_i) / eps)

and its terms lie in (0, 1]. Those below exp(-80) are counted as exp(-80): that changes no float64 sum, and exp in torch
on a CPU is ten times slower where it underflows.
"""

from __future__ import annotations

import copy
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NamedTuple, Self, TypeVar

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from otloss._checks import (
    broadcast_shape,
    check_below_infinity,
    check_broadcast,
    check_epsilon,
    check_floating,
    check_index,
    check_last_axis,
    has_float64,
    has_tangent,
    needs_torch,
)
from otloss._numba import is_small, may_run_on
from otloss._numba.background import StillCompilingError, declining
from otloss.costs.products import product

if TYPE_CHECKING:
    from otloss.costs.grid import GridCost
    from otloss.costs.line import LineCost
    from otloss.costs.points import PointCost
    from otloss.costs.streams_triton import Matrix, Points

# Work goes through blocks of rows of about this many entries, 16 MiB in float32.
_BLOCK_ENTRIES = 2**22
_SMALLEST_EXPONENT = -80.0
_LARGEST_RATIO = 1e3  # of an ordinary cost over the median
_SAMPLE = 2**14  # entries of a matrix for its median
_SMALL_PLAN = 2**13  # entries up to which torch takes less time than a call of the kernel of plans
FROM_ROWS: set[str] = set()
_Method = TypeVar("_Method", bound=Callable[..., Any])


def _from_rows(method: _Method) -> _Method:
    """Mark a method of `Cost` that follows from the rows: a class with other rows gets it, not its base's formula."""
    FROM_ROWS.add(method.__name__)
    return method


class CentroidBound(NamedTuple):
    """A lower bound of exact transport, and whether it is differentiable everywhere in the weights."""

    value: Float[Tensor, "*batch"]
    is_smooth: bool


class PlanProducts(NamedTuple):
    """P v, and the sums of the rows of P."""

    values: Float[Tensor, "*batch n k"]
    of_rows: Float[Tensor, "*batch n"]


class Cost(ABC):
    """A cost between n bins of p and m bins of q.

    A subclass gives `shape`, `rows` and `T`, and holds its floating tensors (float32 or float64, one at least) as
    attributes; docs/contributors/design.md has an example. It is its own transpose, `T` returning `self`, only where it
    is the cost among the bins of one side: symmetric, with zeros on the diagonal.

    Solvers ask a cost for all else, and never look at its class. The other methods have defaults, which are right for
    every cost; overriding one saves time. A class that overrides `rows` gets the defaults of all methods that are
    marked as `_from_rows`, and a class that overrides `softmin` the defaults of what computes soft minima, unless it
    overrides these too.
    """

    def __init_subclass__(cls, **settings: Any) -> None:
        super().__init_subclass__(**settings)
        own = vars(cls)
        # The formulas of its base are for other costs. T and the costs within a side are of the class itself.
        names = FROM_ROWS if "rows" in own or "row_block" in own else set()
        if "softmin" in own:
            names = names | {"softmin_at", "kernel_inputs"}
        for name in names.difference(own):
            setattr(cls, name, vars(Cost)[name])

    _is_streamed = False

    @property
    @abstractmethod
    def shape(self) -> tuple[int, int]:
        """(n, m)."""

    @property
    def batch_shape(self) -> torch.Size:
        """Leading axes, empty unless the cost holds one matrix per problem."""
        return torch.Size()

    @property
    def _data(self) -> Tensor:
        """The tensor that has the dtype and device of the costs."""
        tensors = self.tensors()
        if not tensors:
            raise TypeError(
                f"{type(self).__name__} has no floating tensor among its attributes, expected at least one: its dtype "
                "and device the cost has. Hold a tensor instead of a list or a number."
            )
        return tensors[0]

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the costs: float32 or float64."""
        return self._data.dtype

    @property
    def device(self) -> torch.device:
        """The device of the costs."""
        return self._data.device

    @property
    @abstractmethod
    def T(self) -> Cost:  # noqa: N802 - the name tensors use
        """The cost of moving mass the other way."""

    @abstractmethod
    def rows(self, index: Int[Tensor, " picked"]) -> Float[Tensor, "picked m"]:
        """Return the rows `C[index, :]` of a cost without leading axes."""

    @_from_rows
    def row_block(self, start: int, stop: int) -> Float[Tensor, "*batch block m"]:
        """Return the rows start to stop - 1, of every problem where the cost holds one matrix per problem."""
        rows = self.rows(torch.arange(start, stop, device=self.device))
        if rows.shape[-2:] != (stop - start, self.shape[1]):  # a kernel would read beyond them
            raise ValueError(
                f"{type(self).__name__}.rows returned shape {tuple(rows.shape)} for {stop - start} rows, expected "
                f"(..., {stop - start}, {self.shape[1]})."
            )
        return rows

    @_from_rows
    def dense(self) -> Float[Tensor, "*batch n m"]:
        """Return the whole matrix."""
        return self.row_block(0, self.shape[0])

    @_from_rows
    def diagonal(self) -> Float[Tensor, "*batch n"]:
        """Return the costs of staying, C[i, i], of a square cost, block by block of rows."""

        def part(start: int, stop: int) -> Tensor:
            return self.row_block(start, stop).diagonal(start, dim1=-2, dim2=-1)

        return join_blocks(part, self.row_blocks(self.batch_shape), recompute=False)

    def _zeros(self) -> Float[Tensor, " n"]:
        """The diagonal of a cost at which staying is free."""
        return torch.zeros(self.shape[0], dtype=self.dtype, device=self.device)

    @_from_rows
    def apply(self, v: Float[Tensor, "*batch m"]) -> Float[Tensor, "*batch n"]:
        """Return C v over the last axis, in the promoted dtype of the cost and `v`, block by block of rows."""
        cost, v = self._product_arguments(v)
        column = v.unsqueeze(-1)

        def part(start: int, stop: int) -> Tensor:
            return product(cost.row_block(start, stop), column).squeeze(-1)

        return join_blocks(part, cost.row_blocks(cost.batch_shape), recompute=False)

    @_from_rows
    def softmin(self, potential: Float[Tensor, "*batch m"], epsilon: float | Tensor) -> Float[Tensor, "*batch n"]:
        """Return -epsilon logsumexp_j((potential_j - C_ij) / epsilon), block by block of rows.

        Args:
            potential: (..., m), -inf at bins that take no part. A row without a bin that takes part gives +inf.
            epsilon: at least 0, in the unit of the cost; a number, or (...) with one per problem, without a graph. At 0
                it is the hard minimum, min_j C_ij - potential_j.

        Returns:
            (..., n) in the promoted dtype, differentiable in the potential and the cost. Its error is the error of one
            rounding of the costs in their own dtype, also for a potential in float64, plus 1e-6 epsilon in float32.

        Raises:
            TypeError: if the potential is not a floating tensor, or epsilon not a number.
            ValueError: if the potential holds a NaN or +inf, epsilon is negative or infinite, or shapes do not fit.
        """
        potential, epsilon, batch = self._softmin_arguments(potential, epsilon)

        def part(start: int, stop: int) -> Tensor:
            return softmin_of(self.row_block(start, stop), potential, epsilon)

        recompute = makes_graph(potential, *Cost.parameters(self))
        return join_blocks(part, self.row_blocks(batch), recompute=recompute)

    def tensors(self) -> tuple[Tensor, ...]:
        """Return the floating tensors that this cost is made of, each once."""
        distinct: dict[int, Tensor] = {}
        for value in vars(self).values():
            if isinstance(value, Cost):
                distinct.update({id(t): t for t in value.tensors()})
            elif isinstance(value, Tensor) and value.is_floating_point():
                distinct[id(value)] = value
        return tuple(distinct.values())

    def parameters(self) -> tuple[Tensor, ...]:
        """Return the `tensors()` that require a gradient."""
        return tuple(t for t in self.tensors() if t.requires_grad)

    @_from_rows
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
        """Return the gradients of `sum upstream <C, P>` at fixed P, one for each tensor of `parameters()`.

        P_ij = exp(log_p_i + log_q_j + (f_i + g_j - C_ij) / epsilon), of which no more than a block of rows is formed.

        Args:
            f, log_p: (..., n); g, log_q: (..., m). Log weights are -inf at bins without mass, f and g finite.
            epsilon: above 0; a number, or (...) with one per problem.
            upstream: (...), a factor per problem.
        """
        parameters = self.parameters()
        epsilon = check_epsilon(epsilon, above_zero=True)
        if not parameters:
            return ()
        leaves = [t.detach().requires_grad_() for t in parameters]
        copied = self.with_tensors({id(t): leaf for t, leaf in zip(parameters, leaves, strict=True)})
        totals = [torch.zeros_like(t) for t in leaves]
        batch = broadcast_shape(f.shape[:-1], g.shape[:-1], self.batch_shape, upstream.shape)
        for start, stop in self.row_blocks(batch):
            with torch.enable_grad():
                rows = copied.row_block(start, stop)
            part = slice(start, stop)
            plan = plan_rows(rows.detach(), f[..., part], g, (log_p[..., part], log_q), epsilon)
            weights = (plan * upstream[..., None, None]).sum_to_size(rows.shape).to(rows.dtype)
            with torch.enable_grad():
                # In place of `torch.autograd.grad` with weights, for which torch would import sympy: 0.5 s.
                value = torch.dot(rows.reshape(-1), weights.reshape(-1))
            gradients = torch.autograd.grad(value, leaves, allow_unused=True)
            for total, gradient in zip(totals, gradients, strict=True):
                if gradient is not None:
                    total += gradient
        return tuple(totals)

    @_from_rows
    def largest(self) -> Float[Tensor, "*batch"]:
        """Return the largest cost, or a bound of it, per matrix and without a graph."""
        with torch.no_grad():
            largest = [self.row_block(*block).amax((-2, -1)) for block in self.row_blocks(self.batch_shape)]
            return torch.stack(largest).amax(0)

    @_from_rows
    def softmin_at(self, epsilon: Float[Tensor, "*batch"]) -> Callable[[Tensor], Tensor]:
        """Return the soft minimum at one epsilon, for many potentials (..., m); it may compute once what they share."""
        costs = self._stream()
        if costs is None:
            return lambda potential: self.softmin(potential, epsilon)
        from otloss.costs import streams_triton as streams

        prepared = streams.Epsilon.build(epsilon, self.device)
        return lambda potential: streams.softmin(costs, potential, prepared)

    @_from_rows
    def plan_costs(
        self,
        f: Float[Tensor, "*batch n"],
        g: Float[Tensor, "*batch m"],
        log_p: Float[Tensor, "*batch n"],
        log_q: Float[Tensor, "*batch m"],
        *,
        epsilon: Float[Tensor, "*batch"],
    ) -> Float[Tensor, "*batch n"] | None:
        """Return sum_j P_ij C_ij for the plan of `plan_gradients`, where a kernel sums it; None elsewhere."""
        sums = self._streamed_sums((f, g), (log_p, log_q), epsilon)
        return None if sums is None else sums("cost").values.squeeze(-1).to(f.dtype)

    @_from_rows
    def plan_products(
        self,
        f: Float[Tensor, "*batch n"],
        g: Float[Tensor, "*batch m"],
        log_p: Float[Tensor, "*batch n"],
        log_q: Float[Tensor, "*batch m"],
        *,
        epsilon: Float[Tensor, "*batch"],
    ) -> Callable[[Tensor], PlanProducts]:
        """Return v (..., m, k) to its products with the plan of `plan_gradients`, without a graph or a whole matrix."""
        sums = self._streamed_sums((f, g), (log_p, log_q), epsilon)
        if sums is None:
            return lambda v: self._products_by_blocks((f, g), (log_p, log_q), epsilon, v)

        def products(v: Tensor) -> PlanProducts:
            result = sums("product", v.detach())
            return PlanProducts(result.values.to(f.dtype), result.of_rows.to(f.dtype))

        return products

    def _streamed_sums(
        self, potentials: tuple[Tensor, Tensor], log_weights: tuple[Tensor, Tensor], epsilon: Tensor
    ) -> Callable[..., Any] | None:
        """Return `streams_triton.plan_sums` for one plan, from a job and its vectors; None without kernels."""
        costs = self._stream()
        if costs is None:
            return None
        from otloss.costs import streams_triton as streams

        (f, g), (log_p, log_q), width = potentials, log_weights, epsilon.unsqueeze(-1)
        a, h, prepared = f + width * log_p, g + width * log_q, streams.Epsilon.build(epsilon, self.device)
        return lambda job, v=None: streams.plan_sums(costs, job, a, h, prepared, v)

    @torch.no_grad()
    def _products_by_blocks(
        self, potentials: tuple[Tensor, Tensor], log_weights: tuple[Tensor, Tensor], epsilon: Tensor, v: Tensor
    ) -> PlanProducts:
        (f, g), (log_p, log_q) = potentials, log_weights
        batch = broadcast_shape(f.shape[:-1], g.shape[:-1], self.batch_shape, v.shape[:-2])
        products, row_sums = [], []
        with torch.autocast(self.device.type, enabled=False):
            for start, stop in self.row_blocks(batch):
                part, rows = slice(start, stop), self.row_block(start, stop).to(f.dtype)
                plan = plan_rows(rows, f[..., part], g, (log_p[..., part], log_q), epsilon)
                products.append(plan @ v.to(plan))
                row_sums.append(plan.sum(-1))
        return PlanProducts(torch.cat(products, -2), torch.cat(row_sums, -1))

    @_from_rows
    def softmin_work(self) -> int:
        """Return how many terms a soft minimum sums, n m by default; with fewer, large problems do without a matrix."""
        return math.prod(self.shape)

    @_from_rows
    def stored_matrix(self) -> Float[Tensor, "*batch n m"] | None:
        """Return the matrix, with its graph, if the cost holds one; None if it computes entries in its own dtype.

        `dense` takes no time or memory for a matrix that is held, and float64 makes only computed entries more
        accurate. A subclass of `DenseCost` returns None until it overrides this.
        """
        return None

    @_from_rows
    def contiguous(self) -> Cost:
        """Return the same cost for many soft minima: a matrix that is held lies in memory row by row."""
        return self

    @_from_rows
    def with_matrix(self) -> Self:
        """Return the same cost for a whole search; entries that take long to compute are computed once, and kept.

        The search and its derivatives use the result. It does not outlive them, since the tensors that it is made of
        may change in place.
        """
        return self

    def streamed(self) -> Self | None:
        """Return the same cost, which computes soft minima and sums with plans by Triton kernels in float32.

        None if there are no kernels for it. In float64, and where a graph is made, it computes as before.
        """
        if self.kernel_inputs() is None:
            return None
        cost = copy.copy(self)
        cost._is_streamed = True
        return cost

    @_from_rows
    def kernel_inputs(self) -> Points | Matrix | None:
        """Return what the kernels of `streams_triton` read; None if they do not know such costs."""
        return None

    def _stream(self) -> Points | Matrix | None:
        """Return what the kernels read where this cost is streamed, and they run; else None."""
        return self.kernel_inputs() if self._may_stream() else None

    def _may_stream(self) -> bool:
        return self._is_streamed and self.dtype == torch.float32 and not needs_torch(*self.tensors())

    @property
    @_from_rows
    def has_plain_entries(self) -> bool:
        """Whether all entries are finite and at least 0. Solvers see no other cost (`reductions.plain_costs`)."""
        return True

    @_from_rows
    def is_symmetric(self) -> bool:
        """Return whether C[i, j] = C[j, i] up to rounding, as for the costs among the bins of one side."""
        if self.T is self:
            return True
        return is_symmetric_matrix(self.dense().detach(), 1e-5)

    def costs_within(self) -> tuple[Cost, Cost] | None:
        """Return the costs among the bins of p and among the bins of q, which divergences need; None if not known."""
        return (self, self) if self.T is self else None

    @_from_rows
    def centroid_bound(
        self, p: Float[Tensor, "*batch n"], q: Float[Tensor, "*batch m"], mass: Float[Tensor, "*batch"]
    ) -> CentroidBound | None:
        """Return the bound of `otloss.lower_bound` by the means of p and q, for weights of this mass, with its graph.

        It holds for costs that are convex functions of the difference of two positions. None for others.
        """
        return None

    def as_points(self) -> PointCost | None:
        """Return the cost as a `PointCost` of a metric with a name, for methods that work with the points.

        They look at `x`, `y` and `metric`, and take the costs of other points to be distances of the metric. So a
        subclass of `PointCost` returns None until it overrides this.
        """
        return None

    def as_grid(self) -> GridCost | None:
        """Return the cost as a `GridCost`, for methods that work along the axes or with a coarser grid.

        A subclass of `GridCost` returns None until it overrides this.
        """
        return None

    def as_line(self) -> LineCost | None:
        """Return the cost as a `LineCost` of power >= 1, for which exact transport has a closed form.

        A subclass of `LineCost` returns None until it overrides this.
        """
        return None

    def to(self, *args: Any, **kwargs: Any) -> Self:
        """Return the same cost elsewhere: arguments as for `Tensor.to`, dtypes float32 or float64."""
        moved = self.with_tensors({id(t): t.to(*args, **kwargs) for t in self.tensors()})
        if moved.dtype not in (torch.float32, torch.float64):
            raise ValueError(
                f"the cost was asked for in {moved.dtype}, expected float32 or float64: near costs are equal in 16 "
                "bits; cast the answer instead."
            )
        for name, value in vars(self).items():
            if isinstance(value, Tensor) and not value.is_floating_point():
                setattr(moved, name, value.to(moved.device))
        return moved

    def _checked_index(self, index: Any) -> Tensor:
        if self.batch_shape:
            raise ValueError(
                f"rows of a cost with batch axes {tuple(self.batch_shape)} are ambiguous; expected a cost of one "
                "problem. Build it from the data of one problem first."
            )
        return check_index("index", index, self.shape[0])

    def _product_arguments(self, v: Any) -> tuple[Self, Tensor]:
        """The cost and the checked `v`, both in the promoted dtype."""
        check_last_axis("v", check_floating("v", v), self.shape[1])
        dtype = torch.promote_types(self.dtype, v.dtype)
        return self if dtype == self.dtype else self.to(dtype), v.to(dtype)

    def _softmin_arguments(self, potential: Any, epsilon: Any) -> tuple[Tensor, float | Tensor, torch.Size]:
        """Checked, with the potential in the promoted dtype; and the batch shape of the answer."""
        check_last_axis("potential", check_floating("potential", potential), self.shape[1])
        check_below_infinity("potential", potential)
        epsilon = check_epsilon(epsilon)
        batch = check_broadcast(
            potential=potential.shape[:-1],
            cost=self.batch_shape,
            epsilon=epsilon.shape if isinstance(epsilon, Tensor) else (),
        )
        return potential.to(torch.promote_types(potential.dtype, self.dtype)), epsilon, batch

    def row_blocks(self, batch: torch.Size) -> Iterator[tuple[int, int]]:
        """Yield the rows (start, stop) of each block, for the matrices of a batch of problems at a time."""
        n, m = self.shape
        step = max(1, block_entries() // max(1, m * batch.numel()))
        for start in range(0, n, step):
            yield start, min(start + step, n)

    def with_tensors(self, new: dict[int, Tensor]) -> Self:
        """Return the same cost with other tensors in place of the ones with these ids."""
        copied = copy.copy(self)
        for name, value in vars(self).items():
            if isinstance(value, Cost):
                setattr(copied, name, value.with_tensors(new))
            elif id(value) in new:
                setattr(copied, name, new[id(value)])
        return copied

    def __repr__(self) -> str:
        return f"{type(self).__name__}(shape={self.shape}, dtype={self.dtype}, device='{self.device}')"


def recomputed(function: Callable[..., Tensor], *args: Any) -> Tensor:
    """Return `function(*args)`, computed again in the backward pass in place of what its graph would hold."""
    result: Tensor = checkpoint(function, *args, use_reentrant=False, preserve_rng_state=False)
    return result


def join_blocks(
    part: Callable[[int, int], Tensor], blocks: Iterable[tuple[int, int]], *, recompute: bool
) -> Float[Tensor, "*batch n"]:
    """Return what `part` gives for blocks of rows, side by side along the last axis.

    With `recompute` the graph, which would hold the whole matrix, is computed again in the backward pass. Without one
    the parts are copied one by one: an allocator would put the small parts into the memory that large blocks have left,
    which then fits no block any more, and the memory of the whole matrix would be taken.
    """
    (start, stop), *others = blocks
    if not others:
        return part(start, stop)
    if recompute:
        return torch.cat([recomputed(part, *block) for block in ((start, stop), *others)], dim=-1)
    first = part(start, stop)
    if needs_torch(first) or first.requires_grad:
        return torch.cat([first, *(part(*block) for block in others)], dim=-1)
    joined = first.new_empty(*first.shape[:-1], others[-1][1])
    joined[..., start:stop] = first
    del first
    for start, stop in others:
        joined[..., start:stop] = part(start, stop)
    return joined


def arithmetic_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype costs of such data are computed in."""
    return torch.promote_types(dtype, torch.float32)


def above_rounding(bound: Float[Tensor, "*batch"] | float, terms: float, like: Tensor) -> Float[Tensor, "*batch"]:
    """Return a bound of the costs as a bound of what is computed for them: of so many terms, in the dtype of `like`.

    Subnormal numbers are rounded by absolute amounts, and powers by a share as large as their logarithm. A bound of 0
    stays 0.
    """
    info = torch.finfo(like.dtype)
    wide = torch.as_tensor(bound, dtype=torch.float64 if has_float64(like.device) else None, device=like.device)
    size = wide.clamp(min=info.tiny, max=info.max)
    raised = wide + (8 + terms + size.log().abs()) * info.eps * size
    return torch.where(wide == 0, 0.0, raised).to(like.dtype)


def softmin_of(
    rows: Float[Tensor, "*batch n m"], potential: Float[Tensor, "*batch m"], epsilon: float | Tensor
) -> Float[Tensor, "*batch n"]:
    """Return the soft minimum over the last axis of `rows - potential`, in the dtype of the potential."""
    entries = broadcast_shape(rows.shape[:-2], potential.shape[:-1]).numel() * rows.shape[-2:].numel()
    if not is_small(entries) and may_run_on(rows, potential) and not makes_graph(rows, potential):
        from otloss.costs.softmin_numba import dense_softmin

        with suppress(StillCompilingError), declining(entries):
            return dense_softmin(rows, potential, epsilon)
    return softmin_in_torch(rows, potential, epsilon)


def softmin_in_torch(
    rows: Float[Tensor, "*batch n m"], potential: Float[Tensor, "*batch m"], epsilon: float | Tensor
) -> Float[Tensor, "*batch n"]:
    """The reference implementation of the kernels: any device, and differentiable."""
    scores = potential.unsqueeze(-2) - rows
    hard = -scores.amax(-1)  # (*batch, n)
    if not isinstance(epsilon, Tensor):
        epsilon = potential.new_tensor(epsilon)
    epsilon = epsilon.to(scores)[..., None]  # (*batch or nothing, 1)
    is_soft = epsilon >= torch.finfo(scores.dtype).tiny
    if not is_soft.any():
        return hard.expand(broadcast_shape(hard.shape, epsilon.shape[:-1] + hard.shape[-1:]))
    width = torch.where(is_soft, epsilon, 1.0)
    empty = hard.detach() == torch.inf
    shift = hard.detach().masked_fill(empty, 0.0)  # -top, and no difference of infinities
    terms = ((scores + shift.unsqueeze(-1)) / width.unsqueeze(-1)).clamp(min=_SMALLEST_EXPONENT).exp()
    soft = (shift - width * terms.sum(-1).log()).masked_fill(empty, torch.inf)
    return torch.where(is_soft, soft, hard)


def plan_rows(
    rows: Tensor, f: Tensor, g: Tensor, log_weights: tuple[Tensor, Tensor], epsilon: float | Tensor
) -> Tensor:
    width = epsilon[..., None, None] if isinstance(epsilon, Tensor) else epsilon
    log_p, log_q = log_weights
    exponent = (f.unsqueeze(-1) + g.unsqueeze(-2) - rows) / width + log_p.unsqueeze(-1) + log_q.unsqueeze(-2)
    plan = exponent.clamp_(min=_SMALLEST_EXPONENT).exp_()
    return torch.threshold_(plan, 1.01 * math.exp(_SMALLEST_EXPONENT), 0.0)


def scaled_plan_rows(
    rows: Tensor, f: Tensor, g: Tensor, log_weights: tuple[Tensor, Tensor], epsilon: float | Tensor, upstream: Tensor
) -> Tensor:
    """Return these rows of the plans times `upstream`, summed over the problems that share a matrix."""
    own = rows.shape[:-2]
    is_small = rows.numel() <= _SMALL_PLAN and rows.device.type == "cpu"
    if is_small or (may_run_on(rows, f) and broadcast_shape(f.shape[:-1], g.shape[:-1], upstream.shape, own) == own):
        inverse = 1 / torch.as_tensor(epsilon, dtype=torch.float64, device=rows.device)
        a, b = (h * inverse[..., None] + log_w for h, log_w in zip((f, g), log_weights, strict=True))
        if not is_small:
            from otloss.costs.plan_numba import scaled_plans

            return scaled_plans(rows, (a, b), inverse, upstream)
        plan = (a.unsqueeze(-1) + b.unsqueeze(-2) - rows.detach() * inverse[..., None, None]).exp_()
    else:
        plan = plan_rows(rows, f, g, log_weights, epsilon)
    return (plan * upstream[..., None, None]).sum_to_size(rows.shape).to(rows.dtype)


def block_entries() -> int:
    """How many entries of a matrix to form at a time."""
    return _BLOCK_ENTRIES


def makes_graph(*tensors: Tensor) -> bool:
    """Whether what is computed from the tensors has a derivative, in reverse or in forward mode."""
    return (torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)) or has_tangent(*tensors)


def is_symmetric_matrix(matrix: Float[Tensor, "*batch n m"], rounding: float) -> bool:
    """Return whether each matrix is symmetric up to a share of its entries, or of `usual_entry` where that is more."""
    if matrix.shape[-2] != matrix.shape[-1] or not matrix.numel():
        return matrix.shape[-2] == matrix.shape[-1]
    apart = (matrix - matrix.mT).abs()
    if not bool(apart.any()):
        return True
    size = usual_entry(matrix)
    if bool((apart.amax((-2, -1)) <= rounding * size).all()):
        return True
    return bool((apart <= rounding * torch.maximum(matrix.abs(), size[..., None, None])).all())


def usual_entry(matrix: Float[Tensor, "*batch n m"]) -> Float[Tensor, "*batch"]:
    """Return the largest entry of each matrix, or 1,000 times the median of those above 0 where that is less.

    Rounding beside the price of a pair that must not be is no rounding beside ordinary costs.
    """
    entries = matrix.abs().flatten(-2)
    sample = entries[..., :: entries.shape[-1] // _SAMPLE | 1]  # an odd step, so that it meets many columns
    median = sample.masked_fill(sample <= 0, torch.nan).nanmedian(-1).values
    return torch.minimum(entries.amax(-1), torch.nan_to_num(_LARGEST_RATIO * median))


def unit_rows(name: str, data: Float[Tensor, "*batch rows d"]) -> tuple[Tensor, Tensor]:
    """Return the rows scaled to length one, and which of them are zero and stay so."""
    norm = torch.linalg.vector_norm(data, dim=-1, keepdim=True)  # (*batch, rows, 1)
    smallest = torch.finfo(data.dtype).tiny ** 0.4  # about 1e-15 in float32
    if ((norm > smallest) & (norm < 1 / smallest)).all():
        return data / norm, torch.zeros_like(norm.squeeze(-1), dtype=torch.bool)
    # Squares overflow at 1e20 and vanish at 1e-23 in float32, so each row is first scaled by its largest entry.
    # The direction does not depend on that scale, so no gradient flows through it.
    largest = data.detach().abs().amax(-1, keepdim=True)  # (*batch, rows, 1)
    if not torch.isfinite(largest).all():
        *_, row, _ = (int(i) for i in (~torch.isfinite(largest)).nonzero()[0])
        raise ValueError(
            f"{name} row {row} holds a NaN or an infinity, expected finite numbers; "
            "fix that row (a zero row is allowed) before building the cost."
        )
    zero = largest == 0
    scaled = (data / largest.masked_fill(zero, 1.0)).masked_fill(zero, 1.0)  # a norm of 0 has no second derivative
    norm = torch.linalg.vector_norm(scaled, dim=-1, keepdim=True)
    return (scaled / norm).masked_fill(zero, 0.0), zero.squeeze(-1)
