"""Exact transport between histograms.

    emd(p, q, C) = min <C, P>  over  P >= 0,  P 1 = p,  P^T 1 = q
                 = max f.p + g.q  over  f_i + g_j <= C_ij

Gradients by duality: f for p, g for q, the plan P for C. The solver sees only the bins that hold mass, in float64, with
costs and masses scaled to one. Its potentials are then extended to every bin by the c-transform

    f_i = min over j with q_j > 0 of C_ij - g_j        g_j = min over i with p_i > 0 of C_ij - f_i

which at a bin without mass is the one-sided derivative of the value (the price of an infinitesimal mass there), and
which is feasible whatever the solver returned. So `<C, P> - (f.p + g.q)` certifies each answer, and is checked.

Where the optimum is degenerate (a proper part of p's mass equals a part of q's, as in assignment problems), potentials
are not unique and the value has a kink in the weights: the gradient is one of its subgradients.

Uniform weights on equally many bins are assigned along shortest paths (`assignment_numba`), and all other problems
are solved by the network simplex (`simplex_numba`), one problem per thread. Assignments between large clouds that
differ in their means and spread start from the potentials of a few Sinkhorn iterations, on costs less the means of
their rows and columns: that changes no plan, and what is left is small also for clouds that lie apart (for squared
distances it is -2 (x_i - mean x).(y_j - mean y)). They change no value, and shorten the search (docs/guide/clouds.md).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import ClassVar

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from otloss._autograd import Unchanged, check_no_transform
from otloss._checks import broadcast_shape, check_finite, check_potentials
from otloss.costs import DenseCost
from otloss.costs.cost import makes_graph
from otloss.solvers.exact.batch import solve_batch
from otloss.solvers.exact.blocks import LIMITS as PRICES
from otloss.solvers.exact.blocks import (
    Blocks,
    blocks_of_matrix,
    price_of,
    rounding_of_flows,
    shift_blocks,
    warn_of_prices,
    with_lowered_prices,
)
from otloss.solvers.histograms import centre_of
from otloss.solvers.problem import Problem

FindStart = Callable[[Problem, Tensor], tuple[Tensor, Tensor] | None]  # from the problem and its matrix
# Per problem; the simplex needs a small multiple of n + m.
_MAX_PIVOTS = 10_000_000
# Duality gap allowed, relative to the largest cost times the mass.
_GAP_TOLERANCE = 1e-7


@dataclass(frozen=True)
class Optimum:
    """Optima of a batch of problems, on the CPU and without a graph.

    Attributes:
        value: the least costs.
        gap: the duality gap, 0 up to rounding.
        payment: what the rounding of the weights may pay at prices between blocks of bins, which the value leaves out.
        iterations: pivots of the simplex; for an assignment, the columns that were visited beyond one for each row.
        f, g: potentials, the derivatives of the value in p and q, one-sided at bins without mass. f_i + g_j <= C_ij
            wherever bin i or bin j holds mass.
        rows, columns, flows: the n + m - 1 cells of the plan that may hold mass, and the mass there.
        largest_potential: the largest number that the potentials were computed with.
    """

    value: Float[Tensor, "*batch"]
    gap: Float[Tensor, "*batch"]
    payment: Float[Tensor, "*batch"]
    iterations: Int[Tensor, "*batch"]
    f: Float[Tensor, "*batch n"]
    g: Float[Tensor, "*batch m"]
    rows: Int[Tensor, "*batch cells"]
    columns: Int[Tensor, "*batch cells"]
    flows: Float[Tensor, "*batch cells"]
    largest_potential: Float[Tensor, "*batch"]

    def plan(self) -> Float[Tensor, "*batch n m"]:
        """Return the optimal plan as a dense tensor."""
        n, m = self.f.shape[-1], self.g.shape[-1]
        flat = self.flows.new_zeros(*self.value.shape, n * m)
        return flat.scatter_add_(-1, self.rows * m + self.columns, self.flows).unflatten(-1, (n, m))


@dataclass(frozen=True)
class ExactSolution:
    """The solution of an exact problem, as `otloss.solvers.transport.Solution` describes it.

    Attributes:
        problem: its cost is a matrix. With `cell_costs` the matrix has no graph.
        cell_costs: (..., cells), the costs of the cells of the plan, with the graph of the points: the value depends on
            no other costs.
    """

    problem: Problem
    optimum: Optimum
    value: Float[Tensor, "*batch"]
    cell_costs: Float[Tensor, "*batch cells"] | None = None
    _unchanged: Unchanged = field(init=False, repr=False)

    only_value_has_gradients: ClassVar[str | None] = (
        "an exact plan and its potentials jump where they change at all, so they have no derivative; use `value`, "
        'or an epsilon with grad="implicit".'
    )

    def __post_init__(self) -> None:
        object.__setattr__(self, "_unchanged", Unchanged(*self.problem.cost.tensors()))

    @property
    def inputs(self) -> tuple[Tensor, ...]:
        """The tensors that the value depends on, and epsilon."""
        costs = self.problem.cost.dense() if self.cell_costs is None else self.cell_costs
        return (self.problem.p, self.problem.q, self.problem.epsilon, costs)

    @property
    def iterations(self) -> Tensor:
        return self.optimum.iterations.to(self.problem.p.device)

    @property
    def converged(self) -> Tensor:
        return torch.ones(self.problem.batch, dtype=torch.bool, device=self.problem.p.device)

    @property
    def potential_error(self) -> Tensor:
        """The rounding of the potentials: while they are computed, and in the dtype of the answer.

        The latter is without the constant that may be moved.
        """
        sizes = []
        for potential, weights in ((self.optimum.f, self.problem.p), (self.optimum.g, self.problem.q)):
            has_mass = (weights.detach() > 0).to(potential.device)
            deviation = potential - centre_of(potential.to(self.problem.dtype), has_mass).to(potential)
            sizes.append(deviation.abs().masked_fill(~has_mass, 0.0).amax(-1))
        rounding = torch.finfo(self.problem.dtype).eps * torch.maximum(*sizes)
        rounding = rounding + torch.finfo(torch.float64).eps * self.optimum.largest_potential
        return rounding.to(self.problem.p.device)

    @cached_property
    def marginal_error(self) -> Tensor:
        optimum = self.optimum
        p, q = (w.detach().to(optimum.flows) for w in (self.problem.p, self.problem.q))
        sums = (
            torch.zeros_like(w).scatter_add_(-1, ends, optimum.flows)
            for w, ends in ((p, optimum.rows), (q, optimum.columns))
        )
        off = sum((total - w).abs().sum(-1) for total, w in zip(sums, (p, q), strict=True))
        return off / p.sum(-1).clamp(min=torch.finfo(p.dtype).tiny)

    @cached_property
    def potentials(self) -> tuple[Tensor, Tensor]:
        """f and g, lowered at bins without mass so that f + g <= C holds too where both bins have none."""
        f, g = self.optimum.f, self.optimum.g
        p, q = (w.detach().to("cpu") for w in (self.problem.p, self.problem.q))
        if not bool((p == 0).any() and (q == 0).any()):
            return f, g
        self._unchanged.check("potentials of bins without mass")
        slack = self.problem.cost.dense().detach().to("cpu", torch.float64) - f.unsqueeze(-1)
        least = slack.masked_fill((p > 0).unsqueeze(-1), torch.inf).amin(-2)
        return f, torch.where(q == 0, torch.minimum(g, least), g)

    @property
    def linear_cost(self) -> Tensor:
        return self.value

    @cached_property
    def dual_value(self) -> Tensor:
        return (self.optimum.value - self.optimum.gap).to(self.problem.p.device)

    @cached_property
    def gap(self) -> Tensor:
        return (self.optimum.gap.clamp(min=0) + self.optimum.payment).to(self.problem.p.device)

    @property
    def bounds(self) -> tuple[Tensor, Tensor]:
        return self.dual_value, self.dual_value + self.gap

    def plan_blocks(self) -> Iterator[tuple[slice, Tensor]]:
        yield slice(None), self.optimum.plan().to(self.problem.p.device)

    # ---- derivatives of the value ----

    @property
    def weight_gradients(self) -> tuple[Tensor, Tensor]:
        return self.optimum.f, self.optimum.g

    def cost_gradients(self, upstream: Float[Tensor, "*batch"]) -> tuple[Tensor, ...]:
        """The plan: in the shape of the matrix, or the mass of its cells."""
        flows = self.optimum.flows
        amounts = upstream.to(flows).unsqueeze(-1) * flows
        if self.cell_costs is not None:
            return (amounts.to(self.cell_costs.device),)
        matrix = self.problem.cost.dense()
        # A matrix of its own per problem gets one flow per cell; where problems share one, flows add up in float64.
        alone = matrix.shape[:-2].numel() == upstream.numel()
        flat = torch.zeros(matrix.numel(), dtype=matrix.dtype if alone else torch.float64, device="cpu")
        flat.index_add_(0, self._cells.flatten(), amounts.flatten().to(flat.dtype))
        return (flat.reshape(matrix.shape).to(matrix),)

    def cost_tangent(self, *tangents: Tensor) -> Float[Tensor, "*batch"]:
        """The change of the value along a change of the matrix, or of the costs of the cells."""
        flows = self.optimum.flows
        if self.cell_costs is not None:
            return (tangents[0].to(flows) * flows).sum(-1)
        return (tangents[0].to(flows).reshape(-1)[self._cells] * flows).sum(-1)

    @property
    def _cells(self) -> Int[Tensor, "*batch cells"]:
        """Where the cells of the plan are in the flattened matrices, one of each problem or shared."""
        (n, m), own = self.problem.cost.shape, self.problem.cost.batch_shape
        owners = torch.from_numpy(_owners(own, self.problem.batch))
        return owners.unsqueeze(-1) * (n * m) + self.optimum.rows * m + self.optimum.columns


def solve_exactly(problem: Problem, *, find_start: FindStart | None = None, warns: bool = True) -> ExactSolution:
    """Solve a reduced problem; its cost becomes a matrix.

    The value between points is differentiated through the costs of the pairs that exchange mass alone. `find_start`
    looks for potentials to start from where the problem has none. With `warns`, mass that may be rounding and pays a
    price is named.
    """
    cost, start = problem.cost, problem.start
    points = cost.as_points()
    moving = points if points is not None and makes_graph(points.x, points.y) else None
    matrix = cost.dense() if moving is None else moving.without_graph().dense()
    is_stored = cost.stored_matrix() is not None
    if not is_stored:
        check_finite("cost", matrix)
    if start is None and find_start is not None:
        start = find_start(problem, matrix.detach())
    problem = problem if is_stored else replace(problem, cost=DenseCost.unchecked(matrix))
    optimum = solve_exact(problem.p, problem.q, matrix, start=start, rounding=problem.weight_rounding, warns=warns)
    cell_costs = None if moving is None else moving.pairs(optimum.rows, optimum.columns)
    return ExactSolution(problem, optimum, optimum.value.to(problem.p), cell_costs)


def solve_exact(
    p: Float[Tensor, "*batch n"],
    q: Float[Tensor, "*batch m"],
    matrix: Float[Tensor, "*batch n m"],
    *,
    start: tuple[Float[Tensor, "*batch n"], Float[Tensor, "*batch m"]] | None = None,
    rounding: float | None = None,
    warns: bool = False,
) -> Optimum:
    """Solve checked problems (weights as `histogram_pair` returns them, finite costs), without a graph.

    Args:
        p, q, matrix: as for `emd`; their leading axes broadcast.
        start: potentials (f, g) of similar problems, with axes that broadcast likewise. They save pivots and change no
            value.
        rounding: the rounding unit of the weights as they were given, which may leave mass over in a block; that of
            the dtype of p by default.
        warns: whether mass that may be rounding and pays a price is named.

    Raises:
        ValueError: if `start` holds a NaN or an infinity.
        RuntimeError: if the optimum of a problem is not found; the message names the problem.
    """
    check_no_transform()
    n, m = matrix.shape[-2:]
    batch = broadcast_shape(p.shape[:-1], q.shape[:-1], matrix.shape[:-2])
    if start is not None:
        check_potentials(start, (n, m), batch)
    weights = [_flat(w, batch) for w in (p, q)]
    matrices = matrix.detach().cpu().contiguous().view(matrix.shape[:-2].numel(), n, m).numpy()
    owners = _owners(matrix.shape[:-2], batch).reshape(-1)
    prices = None if start is None else _flat(start[1], batch)
    arrays = solve_batch(weights[0], weights[1], matrices, owners, start=prices, max_pivots=_MAX_PIVOTS)
    check_outcome(arrays[-1], weights, batch)
    f, g, cells, flows, outcome = arrays
    unit = torch.finfo(p.dtype).eps if rounding is None else rounding
    largest, payments = _settle_prices(weights, matrices, owners, arrays, unit, warns=warns)
    pivots = outcome[:, 3].astype(np.int64)
    results = (outcome[:, 0], outcome[:, 1], payments, pivots, f, g, cells[:, 0], cells[:, 1], flows, largest)
    return Optimum(*(torch.from_numpy(a.reshape((*batch, *a.shape[1:]))) for a in results))


def _largest_potential(f: np.ndarray, g: np.ndarray) -> np.ndarray:
    """Return the largest absolute value (...) of f and g."""
    return np.maximum(np.abs(f).max(-1, initial=0.0), np.abs(g).max(-1, initial=0.0))


def _settle_prices(
    weights: list[np.ndarray], matrices: np.ndarray, owners: np.ndarray, results: tuple[np.ndarray, ...],
    rounding: float, *, warns: bool,
) -> tuple[np.ndarray, np.ndarray]:  # fmt: skip
    """Solve problems again whose bins fall into blocks that only priced pairs connect; fill their results.

    The second time the masses of both sides agree in each block where rounding explains their difference.

    Returns:
        `Optimum.largest_potential` and `Optimum.payment`.
    """
    f, g, cells, flows, outcome = results
    largest, payments = _largest_potential(f, g), np.zeros(len(outcome))
    candidates = np.flatnonzero(outcome[:, 2] > PRICES.price_ratio * outcome[:, 0])
    if not candidates.size:
        return largest, payments
    payments[candidates] = (
        sum(w.shape[1] for w in weights) * np.finfo(np.float64).eps * outcome[candidates, 2]
    )  # by rounding, at prices
    masses = weights[0][candidates].sum(1)
    costs = matrices[owners[candidates][:, None], cells[candidates, 0], cells[candidates, 1]]
    prices = price_of(costs, flows[candidates], masses, rounding)
    has_prices = outcome[candidates, 2] >= prices * masses
    for k, price in zip(candidates[has_prices], prices[has_prices], strict=True):
        p, q, matrix = weights[0][k], weights[1][k], matrices[owners[k]]
        blocks = blocks_of_matrix(matrix < price)
        balanced, differs, _ = blocks.balanced(p, q, rounding)
        if warns and differs.any():
            warn_of_prices(blocks, p, q, flows[k], cells[k], matrix, price=price, rounding=rounding)
        if blocks.count == 1 or differs.all():
            continue
        first_value = outcome[k, 0]
        again = (
            _solve_single(p, balanced, matrix) if differs.any() else _avoid_prices(p, balanced, matrix, price, blocks)
        )
        for old, new in zip(results, again, strict=True):
            old[k] = new[0]
        largest[k] = _largest_potential(f[k], g[k])
        joined = blocks.joined_by(cells[k], flows[k], differs, rounding_of_flows(p, balanced))
        shift_blocks(joined, p, balanced, matrix, f=f[k], g=g[k])
        outcome[k, 1] = outcome[k, 0] - (p @ f[k] + balanced @ g[k])
        check_outcome(outcome[k][None], [p[None], balanced[None]], torch.Size())
        payments[k] += abs(first_value - outcome[k, 0])
        if not differs.any():
            payments[k] += blocks.payment(p, q, float(matrix.max()))
    return largest, payments


def _solve_single(p: np.ndarray, q: np.ndarray, matrix: np.ndarray) -> tuple[np.ndarray, ...]:
    results = solve_batch(p[None], q[None], matrix[None], np.zeros(1, np.int64), start=None, max_pivots=_MAX_PIVOTS)
    check_outcome(results[-1], [p[None], q[None]], torch.Size())
    return results


def _avoid_prices(
    p: np.ndarray, q: np.ndarray, matrix: np.ndarray, price: float, blocks: Blocks
) -> tuple[np.ndarray, ...]:
    """Return results of a problem whose blocks have equal masses, where no mass pays a price between blocks."""
    crosses, rounding = blocks.rows[:, None] != blocks.columns, rounding_of_flows(p, q)
    for is_price in (matrix >= price, crosses):  # within a block some mass may have to pay one
        lowered = with_lowered_prices(matrix, is_price)
        results = _solve_single(p, q, lowered)
        _, _, ((rows, columns),), (flows,), outcome = results
        is_lowered = lowered[rows, columns] < matrix[rows, columns]
        if flows[is_lowered].max(initial=0.0) <= rounding:
            break
    is_rounding = is_lowered & (flows <= rounding)
    outcome[0, 0] -= flows[is_rounding] @ lowered[rows, columns][is_rounding]
    flows[is_rounding] = 0.0
    return results


def _flat(weights: Tensor, batch: torch.Size) -> np.ndarray:
    bins = weights.shape[-1]
    array: np.ndarray = (
        weights.detach().to("cpu", torch.float64).expand(*batch, bins).reshape(-1, bins).contiguous().numpy()
    )
    return array


def _owners(own: torch.Size, batch: torch.Size) -> np.ndarray:
    """Which matrix each problem (*batch) uses, an index into the flattened axes `own`; a shared one is not copied."""
    owners = np.arange(own.numel()).reshape(own)
    return owners if own == batch else np.array(np.broadcast_to(owners, batch))


def check_outcome(outcome: np.ndarray, weights: list[np.ndarray], batch: torch.Size) -> None:
    value, gap, scale, pivots = outcome.T
    if len(outcome) == 1 and pivots[0] >= 0 and abs(gap[0]) <= _GAP_TOLERANCE * scale[0] < math.inf:
        return  # as below, for a single problem
    stopped = pivots < 0
    # Not "gap > ...": an overflow leaves a NaN, or an infinity in both.
    apart = ~(np.abs(gap) <= _GAP_TOLERANCE * np.maximum(scale, np.finfo(np.float64).tiny)) | ~np.isfinite(value)
    if not (stopped | apart).any():
        return
    k = int((stopped | apart).argmax())
    name = f"problem {tuple(int(i) for i in np.unravel_index(k, batch))}" if batch else "the problem"
    if stopped[k]:
        sizes = " by ".join(str(int((w[k] > 0).sum())) for w in weights)
        raise RuntimeError(
            f"the exact solver stopped early on {name}, {sizes} bins with mass: "
            f"{_MAX_PIVOTS} pivots were not enough; use an entropic transport cost for problems of this size."
        )
    raise RuntimeError(
        f"the exact solver left a duality gap of {float(gap[k]):.3g} at a value of {float(value[k]):.6g} in "
        f"{name}, expected at most {_GAP_TOLERANCE:g} of the largest cost times the mass, "
        f"{float(scale[k]):.3g}; rescale costs or masses that overflow float64."
    )
