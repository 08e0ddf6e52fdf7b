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

A `LineCost` of power >= 1 has a closed form (`wasserstein_1d`). Uniform weights on equally many bins are assigned along
shortest paths (`_kernels.assignment`), and all other problems are solved by the network simplex (`_kernels.exact`), one
problem per thread.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from otloss._autograd import check_no_transform, eager, once_only
from otloss._checks import broadcast_shape, check_finite, check_potentials
from otloss._foreign import explains_foreign_keywords
from otloss._kernels.problems import solve_batch
from otloss.costs import Cost, DenseCost, LineCost
from otloss.costs.cost import makes_graph
from otloss.solvers.histograms import HistogramPair, pair_and_cost
from otloss.solvers.line import wasserstein_1d
from otloss.solvers.partial import partial_problem
from otloss.solvers.plain import is_plain

# Per problem; the simplex needs a small multiple of n + m.
_MAX_PIVOTS = 10_000_000
# Duality gap allowed, relative to the largest cost times the mass.
_GAP_TOLERANCE = 1e-7


@explains_foreign_keywords
@eager
def emd(
    p: Float[Tensor, "*batch n"] | None,
    q: Float[Tensor, "*batch m"] | None,
    cost: Cost | Float[Tensor, "*batch n m"],
    *,
    mass: float | Float[Tensor, "*batch"] | None = None,
) -> Float[Tensor, "*batch"]:
    """Return the least cost of transporting p to q, exactly, per problem.

    Args:
        p: (..., n) weights >= 0, or None for 1 / n each. The leading axes of p, q and the cost broadcast.
        q: (..., m) weights >= 0 with the mass of p, up to rounding, or None for 1 / m each.
        cost: (n, m), one matrix per problem (..., n, m), or a cost object; C[i, j] is the price per unit of mass.
            A matrix may have negative entries, and +inf for pairs that may not exchange mass.
        mass: the amount that is moved, a number or (...), from 0 to the lesser mass of p and q, which may differ then
            (partial transport: what is cheapest to leave stays); None for all. Differentiable, and the gradients of p
            and q are not centred.

    Returns:
        (...), in the promoted dtype; its unit is that of the cost times that of the mass. Solved in float64 on the CPU.
        Differentiable once in p, q (centred over the bins; one-sided derivatives at bins without mass; a subgradient
        where the optimum is degenerate) and in the cost, or whatever the cost object was built from. A `LineCost` of
        power >= 1 is solved and differentiated by `wasserstein_1d`.

    Raises:
        TypeError: if p, q or a cost matrix is not a floating tensor.
        ValueError: if shapes or masses differ, a weight is negative, a number is not in range, or no plan avoids the
            pairs that +inf forbids.
        RuntimeError: if the solver does not reach the optimum of a problem, or a second derivative is asked for.

    Source:
        R. Ahuja, T. Magnanti, J. Orlin, Network Flows, 1993, chapter 11.

    Example:
        >>> p = torch.tensor([0.5, 0.5, 0.0], requires_grad=True)
        >>> q = torch.tensor([0.0, 0.25, 0.75])
        >>> value = emd(p, q, torch.tensor([[0.0, 1.0, 4.0], [1.0, 0.0, 1.0], [4.0, 1.0, 0.0]]))
        >>> value.item()
        1.75
        >>> value.backward()
        >>> p.grad
        tensor([ 2.3333, -0.6667, -1.6667])
    """
    if type(cost) is LineCost and cost.power >= 1 and mass is None:
        return _emd_on_line(p, q, cost)
    if not is_plain(cost):
        from otloss.solvers.solve import Settings, transport  # which imports this module

        return transport(p, q, cost, epsilon=None, mass=mass, settings=Settings()).value
    pair, matrix = exact_problem(p, q, cost) if mass is None else partial_problem(p, q, cost, mass)
    return exact_value(pair, matrix, solve_exact(pair.p, pair.q, matrix))


@dataclass(frozen=True)
class ExactSolution:
    """Optima of a batch of problems, on the CPU and without a graph.

    Attributes:
        value: the least costs.
        gap: the duality gap, 0 up to rounding.
        iterations: pivots of the simplex; for an assignment, the columns that were visited beyond one for each row.
        f, g: potentials, the derivatives of the value in p and q, one-sided at bins without mass. f_i + g_j <= C_ij
            wherever bin i or bin j holds mass.
        rows, columns, flows: the n + m - 1 cells of the plan that may hold mass, and the mass there.
    """

    value: Float[Tensor, "*batch"]
    gap: Float[Tensor, "*batch"]
    iterations: Int[Tensor, "*batch"]
    f: Float[Tensor, "*batch n"]
    g: Float[Tensor, "*batch m"]
    rows: Int[Tensor, "*batch cells"]
    columns: Int[Tensor, "*batch cells"]
    flows: Float[Tensor, "*batch cells"]

    def plan(self) -> Float[Tensor, "*batch n m"]:
        """Return the optimal plan as a dense tensor."""
        n, m = self.f.shape[-1], self.g.shape[-1]
        flat = self.flows.new_zeros(*self.value.shape, n * m)
        return flat.scatter_add_(-1, self.rows * m + self.columns, self.flows).unflatten(-1, (n, m))


def solve_exact(
    p: Float[Tensor, "*batch n"],
    q: Float[Tensor, "*batch m"],
    matrix: Float[Tensor, "*batch n m"],
    *,
    start: tuple[Float[Tensor, "*batch n"], Float[Tensor, "*batch m"]] | None = None,
) -> ExactSolution:
    """Solve checked problems (weights as `histogram_pair` returns them, finite costs), without a graph.

    Args:
        p, q, matrix: as for `emd`; their leading axes broadcast.
        start: potentials (f, g) of similar problems, with axes that broadcast likewise. They save pivots and change no
            value.

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
    matrices = matrix.detach().cpu().reshape(matrix.shape[:-2].numel(), n, m).contiguous().numpy()
    owners = _owners(matrix.shape[:-2], batch).reshape(-1).numpy()
    prices = None if start is None else _flat(start[1], batch)
    found = solve_batch(weights[0], weights[1], matrices, owners, start=prices, most=_MAX_PIVOTS)
    _check_ends(found[-1], weights, batch)
    f, g, cells, flows, ends = found
    pivots = ends[:, 3].astype(np.int64)
    answer = (ends[:, 0], ends[:, 1], pivots, f, g, cells[:, 0], cells[:, 1], flows)
    return ExactSolution(*(torch.from_numpy(a.reshape((*batch, *a.shape[1:]))) for a in answer))


def _flat(weights: Tensor, batch: torch.Size) -> np.ndarray:
    flat = weights.detach().to("cpu", torch.float64).expand(*batch, weights.shape[-1])
    array: np.ndarray = flat.reshape(batch.numel(), weights.shape[-1]).contiguous().numpy()
    return array


def _owners(own: torch.Size, batch: torch.Size) -> Int[Tensor, "*batch"]:
    """Which matrix each problem uses, as an index into the flattened axes `own`; a shared one is not copied."""
    return torch.arange(own.numel(), device="cpu").reshape(own).expand(batch).contiguous()


def _check_ends(ends: np.ndarray, weights: list[np.ndarray], batch: torch.Size) -> None:
    value, gap, scale, pivots = ends.T
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


def exact_problem(p: Any, q: Any, cost: Any) -> tuple[HistogramPair, Tensor]:
    """Return the checked histograms and the cost as a matrix in their arithmetic dtype, with its graph."""
    pair, fitted = pair_and_cost(p, q, cost)
    matrix = fitted.dense()
    if not isinstance(fitted, DenseCost):
        check_finite("cost", matrix)
    return pair, matrix


def _emd_on_line(p: Any, q: Any, cost: LineCost) -> Tensor:
    pair, fitted = pair_and_cost(p, q, cost)
    assert isinstance(fitted, LineCost)
    wide = pair.p.dtype if cost.device.type == "mps" else torch.float64
    value = wasserstein_1d(pair.p.to(wide), pair.q.to(wide), fitted.x.to(wide), order=cost.power)
    return value.to(pair.dtype)


def exact_value(pair: HistogramPair, matrix: Tensor, solution: ExactSolution) -> Float[Tensor, "*batch"]:
    """Return the value of a solved problem with its first derivatives: the potentials, and the plan."""
    if not makes_graph(pair.p, pair.q, matrix):
        return solution.value.to(pair.p.device, pair.dtype, copy=True)
    value: Tensor = _ExactTransport.apply(solution, pair.p, pair.q, matrix)
    return value.to(pair.dtype)


class _ExactTransport(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, solution: ExactSolution, p: Tensor, q: Tensor, matrix: Tensor) -> Tensor:
        ctx.save_for_backward(p, q, matrix)
        ctx.solution, ctx.device, ctx.dtype = solution, p.device, p.dtype
        # A copy: the output gets a graph, which the solution must not hold.
        return solution.value.to(p, copy=True)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        p, q, matrix = ctx.saved_tensors
        upstream = gradients[0].detach().to("cpu", torch.float64)
        found = (
            _by_weights(upstream, ctx.solution.f, p) if ctx.needs_input_grad[1] else None,
            _by_weights(upstream, ctx.solution.g, q) if ctx.needs_input_grad[2] else None,
            _by_cost(upstream, ctx.solution, matrix) if ctx.needs_input_grad[3] else None,
        )
        message = (
            "a second derivative of emd was asked for, but emd is piecewise linear and gives first derivatives only; "
            "drop create_graph=True, or use a smooth (entropic) transport cost."
        )
        held = (None if g is None else once_only(g, message, gradients[0], p, q, matrix) for g in found)
        return (None, *held)

    @staticmethod
    def jvp(ctx: Any, _: None, p: Tensor | None, q: Tensor | None, matrix: Tensor | None) -> Tensor:
        solution: ExactSolution = ctx.solution
        found = torch.zeros_like(solution.value)
        for tangent, potential in ((p, solution.f), (q, solution.g)):
            if tangent is not None:
                found = found + (tangent.to(potential) * potential).sum(-1)
        if matrix is not None:
            moved = matrix.to(solution.flows).reshape(-1)[_cells(solution, matrix.shape)]
            found = found + (moved * solution.flows).sum(-1)
        return found.to(ctx.device, ctx.dtype)


def _by_weights(upstream: Tensor, potential: Tensor, like: Tensor) -> Tensor:
    return (upstream.unsqueeze(-1) * potential).sum_to_size(like.shape).to(like)


def _by_cost(upstream: Tensor, solution: ExactSolution, like: Tensor) -> Tensor:
    cells = _cells(solution, like.shape)
    amounts = upstream.unsqueeze(-1) * solution.flows
    # A matrix of its own per problem gets one flow per cell; where problems share one, flows add up in float64.
    alone = like.shape[:-2].numel() == upstream.numel()
    flat = torch.zeros(like.numel(), dtype=like.dtype if alone else torch.float64, device="cpu")
    flat.index_add_(0, cells.flatten(), amounts.flatten().to(flat.dtype))
    return flat.reshape(like.shape).to(like)


def _cells(solution: ExactSolution, shape: torch.Size) -> Int[Tensor, "*batch cells"]:
    """Where the cells of the plan are in the flattened matrices of this shape, one of each problem or shared."""
    n, m = shape[-2:]
    owners = _owners(shape[:-2], solution.value.shape)
    return owners.unsqueeze(-1) * (n * m) + solution.rows * m + solution.columns
