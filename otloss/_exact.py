"""Exact transport between histograms, and the only door to POT's network simplex.

    emd(p, q, C) = min <C, P>  over  P >= 0,  P 1 = p,  P^T 1 = q
                 = max f.p + g.q  over  f_i + g_j <= C_ij

Gradients by duality: f for p, g for q, the plan P for C. The solver sees only the bins that hold mass, in float64, with
costs and masses scaled to one. Its potentials are then extended to every bin by the c-transform

    f_i = min over j with q_j > 0 of C_ij - g_j        g_j = min over i with p_i > 0 of C_ij - f_i

which at a bin without mass is the one-sided derivative of the value (the price of the first grain that arrives there),
and which is feasible whatever the solver returned. So `<C, P> - (f.p + g.q)` certifies each answer, and is checked.

Where the optimum is degenerate (a proper part of p's mass equals a part of q's, as in assignment problems), potentials
are not unique and the value has a kink in the weights: the gradient is one of its subgradients.

Routes: a `LineCost` of power >= 1 has a closed form (`wasserstein_1d`). All else goes to the compiled network simplex of
`_kernels.exact`, one problem per thread; where compiled kernels may not run, POT solves the problems one by one.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from otloss._checks import check_broadcast, check_finite
from otloss._histograms import HistogramPair, histogram_pair
from otloss.costs import Cost, as_cost

# Pivots, not problems; the simplex needs a small multiple of n + m, so this only stops a cycle.
_MAX_PIVOTS = 10_000_000
# Duality gap allowed, relative to the largest cost times the mass.
_GAP_TOLERANCE = 1e-7


def emd(
    p: Float[Tensor, "*batch n"],
    q: Float[Tensor, "*batch m"],
    cost: Cost | Float[Tensor, "*batch n m"],
) -> Float[Tensor, "*batch"]:
    """Return the least cost of transporting p to q, exactly, per problem.

    Args:
        p: (..., n) weights >= 0. The leading axes of p, q and the cost broadcast.
        q: (..., m) weights >= 0 with the mass of p, up to rounding.
        cost: (n, m), one matrix per problem (..., n, m), or a cost object; C[i, j] is the price per unit of mass.

    Returns:
        (...), in the promoted dtype; its unit is that of the cost times that of the mass. Solved in float64 on the CPU.
        Differentiable once in p, q (centred over the bins; one-sided derivatives at bins without mass; a subgradient
        where the optimum is degenerate) and in the cost, or whatever the cost object was built from.

    Raises:
        TypeError: if p, q or a cost matrix is no floating tensor.
        ValueError: if shapes or masses differ, a weight or a cost is negative, or a number is not finite.
        RuntimeError: if the solver does not reach the optimum of a problem, or a second derivative is asked for.

    Source:
        N. Bonneel et al., Displacement Interpolation Using Lagrangian Mass Transport, 2011, as implemented in POT.

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
    pair, matrix = _problem(p, q, cost)
    value: Tensor = _ExactTransport.apply(pair.p, pair.q, matrix)
    return value.to(pair.dtype)


@dataclass(frozen=True)
class ExactSolution:
    """Optima of a batch of problems, in float64 on the CPU and without a graph.

    Attributes:
        value: (...), the least costs.
        f: (..., n), g: (..., m): dual potentials, the derivatives of the value in p and q, one-sided at bins without
            mass. f_i + g_j <= C_ij wherever bin i or bin j holds mass.
        rows, columns, flows: (..., n + m - 1), the cells of the plan that hold mass, padded with empty ones.
        gap: (...), the duality gap, 0 up to rounding.
        iterations: (...), pivots of the simplex.
    """

    value: Float[Tensor, "*batch"]
    f: Float[Tensor, "*batch n"]
    g: Float[Tensor, "*batch m"]
    rows: Int[Tensor, "*batch cells"]
    columns: Int[Tensor, "*batch cells"]
    flows: Float[Tensor, "*batch cells"]
    gap: Float[Tensor, "*batch"]
    iterations: Int[Tensor, "*batch"]

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
        start: potentials (f, g) of similar problems, whose axes broadcast likewise; they save pivots and change no value.

    Raises:
        RuntimeError: if the optimum of a problem is not reached; the message names the problem.
    """
    batch = torch.broadcast_shapes(p.shape[:-1], q.shape[:-1], matrix.shape[:-2])
    sources, targets = (_flat(t, batch) for t in (p, q))
    matrices = _to_numpy(matrix.reshape(-1, *matrix.shape[-2:]))
    owners = _owners(matrix.shape[:-2], batch)
    answers = [_solve(sources[k], targets[k], matrices[o], _name(k, batch)) for k, o in enumerate(owners.tolist())]
    n, m = matrix.shape[-2:]
    sizes = ((), (n,), (m,), (n + m - 1,), (n + m - 1,), (n + m - 1,), (), ())
    kinds = (float, float, float, np.int64, np.int64, float, float, np.int64)
    fields = []
    for k, (size, kind) in enumerate(zip(sizes, kinds, strict=True)):
        column = np.array([answer[k] for answer in answers], dtype=kind)
        fields.append(torch.from_numpy(column).reshape(*batch, *size) if batch + size else torch.from_numpy(column)[0])
    return ExactSolution(*fields)


def _problem(p: Any, q: Any, cost: Any) -> tuple[HistogramPair, Tensor]:
    matrix = as_cost(cost).dense()
    pair = histogram_pair(p, q, cost.dtype)
    shape = (pair.p.shape[-1], pair.q.shape[-1])
    if matrix.shape[-2:] != shape:
        raise ValueError(
            f"the cost has shape {tuple(matrix.shape)}, expected a last two axes of {shape}: "
            "rows for the bins of p, columns for those of q."
        )
    if matrix.device != pair.p.device:
        raise ValueError(f"the cost is on {matrix.device} and p on {pair.p.device}, expected one device.")
    check_broadcast(p=pair.p.shape[:-1], q=pair.q.shape[:-1], cost=matrix.shape[:-2])
    check_finite("cost", matrix)
    return pair, matrix


class _ExactTransport(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, p: Tensor, q: Tensor, matrix: Tensor) -> Tensor:
        solution = solve_exact(p, q, matrix)
        ctx.save_for_backward(p, q, matrix)
        ctx.solution = solution
        # A copy: the output gets a graph, which the solution must not hold.
        return solution.value.to(p, copy=True)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        p, q, matrix = ctx.saved_tensors
        upstream = gradients[0].detach().to("cpu", torch.float64)
        found = (
            _by_weights(upstream, ctx.solution.f, p) if ctx.needs_input_grad[0] else None,
            _by_weights(upstream, ctx.solution.g, q) if ctx.needs_input_grad[1] else None,
            _by_cost(upstream, ctx.solution, matrix) if ctx.needs_input_grad[2] else None,
        )
        return tuple(None if g is None else _OnceOnly.apply(g, gradients[0], p, q, matrix) for g in found)


class _OnceOnly(torch.autograd.Function):
    """Hold a gradient to the graph, so that differentiating it is an error and not a silent zero."""

    @staticmethod
    def forward(ctx: Any, gradient: Tensor, *inputs: Tensor) -> Tensor:
        return gradient.view_as(gradient)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> None:
        raise RuntimeError(
            "a second derivative of emd was asked for, but emd is piecewise linear and gives first derivatives only; "
            "drop create_graph=True, or use a smooth (entropic) transport cost."
        )


def _by_weights(upstream: Tensor, potential: Tensor, like: Tensor) -> Tensor:
    return (upstream.unsqueeze(-1) * potential).sum_to_size(like.shape).to(like)


def _by_cost(upstream: Tensor, solution: ExactSolution, like: Tensor) -> Tensor:
    n, m = like.shape[-2:]
    owners = _owners(like.shape[:-2], upstream.shape)
    cells = owners.reshape(*upstream.shape, 1) * (n * m) + solution.rows * m + solution.columns
    amounts = upstream.unsqueeze(-1) * solution.flows
    flat = torch.zeros(like.numel(), dtype=torch.float64)
    return flat.index_add_(0, cells.flatten(), amounts.flatten()).reshape(like.shape).to(like)


def _solve(p: np.ndarray, q: np.ndarray, matrix: np.ndarray, name: str) -> tuple[Any, ...]:
    """The slow twin: POT on the bins with mass; the fields of `ExactSolution` for one problem."""
    n, m = matrix.shape
    cells, flows = np.zeros((2, n + m - 1), dtype=np.int64), np.zeros(n + m - 1)
    rows, columns = np.flatnonzero(p), np.flatnonzero(q)
    if rows.size == 0:
        # Without mass there is no plan and f_i + g_j <= C_ij is all that is left: the first grain pays its row's least.
        return 0.0, matrix.min(axis=1), np.zeros(m), *cells, flows, 0.0, 0
    mass = p.sum()
    block = matrix[np.ix_(rows, columns)]
    a, b = p[rows] / mass, q[columns] / q.sum()
    plan, g = _block_plan(a, b, block, name)
    f = (block - g).min(axis=1)
    g = (block - f[:, None]).min(axis=0)
    value = float((block * plan).sum())
    gap = value - float(f @ a + g @ b)
    if gap > _GAP_TOLERANCE * max(float(block.max()), np.finfo(np.float64).tiny):
        raise RuntimeError(f"the exact solver left a duality gap of {gap:.3g} at a value of {value:.6g} in {name}.")
    f_all = (matrix[:, columns] - g).min(axis=1)
    g_all = (matrix[rows] - f[:, None]).min(axis=0)
    at_rows, at_columns = np.nonzero(plan)
    cells[:, : at_rows.size] = rows[at_rows], columns[at_columns]
    flows[: at_rows.size] = plan[at_rows, at_columns] * mass
    return value * mass, f_all, g_all, *cells, flows, gap * mass, 0


def _block_plan(a: np.ndarray, b: np.ndarray, block: np.ndarray, name: str) -> tuple[np.ndarray, np.ndarray]:
    """Return the optimal plan and column potentials between positive weights that sum to one."""
    if a.size == 1 or b.size == 1:
        # The only plan there is; every column (or the one) is paired with the first row.
        return np.outer(a, b), block[0].copy() if a.size == 1 else np.zeros(1)
    from ot.lp import emd as solve  # POT takes a second to import

    scale = float(block.max()) or 1.0
    with warnings.catch_warnings():
        # The outcome is read from the log, and checked by its duality gap.
        warnings.simplefilter("ignore")
        plan, log = solve(a, b, np.ascontiguousarray(block / scale), numItermax=_MAX_PIVOTS, log=True)
    if log["warning"] is not None:
        raise RuntimeError(
            f"the exact solver stopped early on {name}, {a.size} by {b.size} bins with mass: {log['warning']}"
        )
    return plan, scale * log["v"]


def _flat(weights: Tensor, batch: torch.Size) -> np.ndarray:
    return _to_numpy(weights.expand(*batch, weights.shape[-1]).reshape(-1, weights.shape[-1]))


def _owners(own: torch.Size, batch: torch.Size) -> Int[Tensor, " problems"]:
    """Which matrix each problem uses: a shared one is neither copied nor given a gradient per problem."""
    return torch.arange(own.numel()).reshape(own).expand(batch).reshape(-1)


def _to_numpy(tensor: Tensor) -> np.ndarray:
    array: np.ndarray = tensor.detach().to("cpu", torch.float64).numpy()
    return array


def _name(problem: int, batch: torch.Size) -> str:
    if not batch:
        return "the problem"
    return f"problem {tuple(int(i) for i in np.unravel_index(problem, batch))}"
