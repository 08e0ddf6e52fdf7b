"""Exact transport between histograms.

    emd(p, q, C) = min <C, P>  over  P >= 0,  P 1 = p,  P^T 1 = q
                 = max f.p + g.q  over  f_i + g_j <= C_ij

Gradients by duality: f for p, g for q, the plan P for C. The solver sees only the bins that hold mass, in float64, with
costs and masses scaled to one. Its potentials are then extended to every bin by the c-transform

    f_i = min over j with q_j > 0 of C_ij - g_j        g_j = min over i with p_i > 0 of C_ij - f_i

which at a bin without mass is the one-sided derivative of the value (the price of the first grain that arrives there),
and which is feasible whatever the solver returned. So `<C, P> - (f.p + g.q)` certifies each answer, and is checked.

Where the optimum is degenerate (a proper part of p's mass equals a part of q's, as in assignment problems), potentials
are not unique and the value has a kink in the weights: the gradient is one of its subgradients.

A `LineCost` of power >= 1 has a closed form (`wasserstein_1d`). Uniform weights on equally many bins are assigned along
shortest paths (`_kernels.assignment`), and all else is solved by the network simplex (`_kernels.exact`), one problem
per thread.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from otloss._autograd import eager, once_only
from otloss._checks import broadcast_shape, check_broadcast, check_finite, check_floating, check_potentials
from otloss._kernels import may_run_on
from otloss._kernels.problems import FlatProblems, owners_of, solve_compiled
from otloss.costs import Cost, LineCost, as_cost
from otloss.costs.cost import makes_graph
from otloss.solvers.histograms import HistogramPair, histogram_pair
from otloss.solvers.line import wasserstein_1d

# Pivots, not problems; the simplex needs a small multiple of n + m, so this only stops a cycle.
_MAX_PIVOTS = 10_000_000
# Entries of costs that are checked by one thread.
_SMALL = 2**20
# Duality gap allowed, relative to the largest cost times the mass.
_GAP_TOLERANCE = 1e-7


@eager
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
        where the optimum is degenerate) and in the cost, or whatever the cost object was built from. A `LineCost` of
        power >= 1 is solved and differentiated by `wasserstein_1d`.

    Raises:
        TypeError: if p, q or a cost matrix is no floating tensor.
        ValueError: if shapes or masses differ, a weight or a cost is negative, or a number is not finite.
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
    if type(cost) is LineCost and cost.power >= 1:
        return _emd_on_line(p, q, cost)
    pair, matrix = exact_problem(p, q, cost)
    return exact_value(pair, matrix, solve_exact(pair.p, pair.q, matrix))


@dataclass(frozen=True)
class ExactSolution:
    """Optima of a batch of problems, in float64 on the CPU and without a graph; each is made a tensor when read."""

    work: FlatProblems
    batch: torch.Size

    @property
    def value(self) -> Float[Tensor, "*batch"]:
        """The least costs."""
        return self.work.ends[:, 0].reshape(self.batch)

    @property
    def gap(self) -> Float[Tensor, "*batch"]:
        """The duality gap, 0 up to rounding."""
        return self.work.ends[:, 1].reshape(self.batch)

    @property
    def iterations(self) -> Int[Tensor, "*batch"]:
        """Pivots of the simplex; for an assignment, the columns that were looked at beyond one for each row."""
        return self.work.ends[:, 3].long().reshape(self.batch)

    @property
    def f(self) -> Float[Tensor, "*batch n"]:
        """Dual potentials, the derivatives of the value in p, one-sided at bins without mass.

        f_i + g_j <= C_ij wherever bin i or bin j holds mass.
        """
        return self._of_problems(self.work.f)

    @property
    def g(self) -> Float[Tensor, "*batch m"]:
        """Dual potentials, the derivatives of the value in q."""
        return self._of_problems(self.work.g)

    @property
    def rows(self) -> Int[Tensor, "*batch cells"]:
        """Rows of the n + m - 1 cells of the plan that hold mass; cells beyond them are empty."""
        return self._of_problems(self.work.cells[:, 0])

    @property
    def columns(self) -> Int[Tensor, "*batch cells"]:
        """Columns of these cells."""
        return self._of_problems(self.work.cells[:, 1])

    @property
    def flows(self) -> Float[Tensor, "*batch cells"]:
        """The mass in these cells."""
        return self._of_problems(self.work.flows)

    def plan(self) -> Float[Tensor, "*batch n m"]:
        """Return the optimal plan as a dense tensor."""
        n, m = self.f.shape[-1], self.g.shape[-1]
        flat = self.flows.new_zeros(*self.batch, n * m)
        return flat.scatter_add_(-1, self.rows * m + self.columns, self.flows).unflatten(-1, (n, m))

    def _of_problems(self, flat: Tensor) -> Tensor:
        return flat.reshape(*self.batch, flat.shape[-1])


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
        RuntimeError: if the optimum of a problem is not reached; the message names the problem.
    """
    batch = broadcast_shape(p.shape[:-1], q.shape[:-1], matrix.shape[:-2])
    if start is not None:
        check_potentials(start, (p.shape[-1], q.shape[-1]), batch)
    work = FlatProblems.of(p, q, matrix, batch=batch, g=None if start is None else start[1])
    solve_compiled(work, most=_MAX_PIVOTS)
    _check_ends(work, batch)
    return ExactSolution(work, batch)


def _check_ends(work: FlatProblems, batch: torch.Size) -> None:
    value, gap, scale, pivots = work.ends.numpy().T
    stopped = pivots < 0
    # Not "gap > ...": an overflow leaves a NaN, or an infinity in both.
    apart = ~(np.abs(gap) <= _GAP_TOLERANCE * np.maximum(scale, np.finfo(np.float64).tiny)) | ~np.isfinite(value)
    if not (stopped | apart).any():
        return
    k = int((stopped | apart).argmax())
    if stopped[k]:
        sizes = " by ".join(str(int((w[k] > 0).sum())) for w in (work.p, work.q))
        raise RuntimeError(
            f"the exact solver stopped early on {_name(k, batch)}, {sizes} bins with mass: "
            f"{_MAX_PIVOTS} pivots were not enough; use an entropic transport cost for problems of this size."
        )
    raise RuntimeError(
        f"the exact solver left a duality gap of {float(gap[k]):.3g} at a value of {float(value[k]):.6g} in "
        f"{_name(k, batch)}, expected at most {_GAP_TOLERANCE:g} of the largest cost times the mass, "
        f"{float(scale[k]):.3g}; rescale costs or masses that overflow float64."
    )


def exact_problem(p: Any, q: Any, cost: Any) -> tuple[HistogramPair, Tensor]:
    """Return the checked histograms and the cost as a matrix in its arithmetic dtype, with its graph."""
    matrix = _checked_matrix(cost)
    pair = histogram_pair(p, q, cost.dtype)
    _check_fit(pair, tuple(matrix.shape), matrix.device)
    check_broadcast(p=pair.p.shape[:-1], q=pair.q.shape[:-1], cost=matrix.shape[:-2])
    return pair, matrix


def _checked_matrix(cost: Any) -> Tensor:
    """The dense cost in the arithmetic dtype; good ones are recognised in one pass over them."""
    matrix = cost.dense() if isinstance(cost, Cost) else cost
    if isinstance(matrix, Tensor) and check_floating("cost", matrix).dim() >= 2 and matrix.numel():
        low, high = _ends_of(matrix.detach())
        if low >= 0 and high < torch.inf:
            return matrix.to(torch.promote_types(matrix.dtype, torch.float32))
    matrix = as_cost(cost).dense()
    check_finite("cost", matrix)
    return matrix


def _ends_of(matrix: Tensor) -> tuple[Any, Any]:
    """The least and the largest entry; NaN where one is."""
    # NumPy works on the calling thread: waiting for another one takes longer, up to 20 ms where the cores are busy.
    plain = matrix.dtype in (torch.float32, torch.float64) and may_run_on(matrix) and not matrix.is_neg()
    if plain and matrix.numel() <= _SMALL:
        entries = matrix.numpy()
        return entries.min(), entries.max()
    return torch.aminmax(matrix)


def _check_fit(pair: HistogramPair, shape: tuple[int, ...], device: torch.device) -> None:
    expected = (pair.p.shape[-1], pair.q.shape[-1])
    if shape[-2:] != expected:
        raise ValueError(
            f"the cost has shape {shape}, expected a last two axes of {expected}: "
            "rows for the bins of p, columns for those of q."
        )
    if device != pair.p.device:
        raise ValueError(f"the cost is on {device} and p on {pair.p.device}, expected one device.")


def _emd_on_line(p: Any, q: Any, cost: LineCost) -> Tensor:
    pair = histogram_pair(p, q, cost.dtype)
    _check_fit(pair, cost.shape, cost.device)
    wide = pair.p.dtype if cost.device.type == "mps" else torch.float64
    # Masses that agreed up to the rounding of their own dtype must now do so in a wider one.
    sources, targets = (w.to(wide) * _ratio(pair.mass.to(wide), w.detach().to(wide).sum(-1)) for w in (pair.p, pair.q))
    return wasserstein_1d(sources, targets, cost.x.to(wide), order=cost.power).to(pair.dtype)


def _ratio(mass: Tensor, found: Tensor) -> Tensor:
    return torch.where(found > 0, mass / found.masked_fill(found == 0, 1.0), 1.0).unsqueeze(-1)


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
        ctx.solution = solution
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


def _by_weights(upstream: Tensor, potential: Tensor, like: Tensor) -> Tensor:
    return (upstream.unsqueeze(-1) * potential).sum_to_size(like.shape).to(like)


def _by_cost(upstream: Tensor, solution: ExactSolution, like: Tensor) -> Tensor:
    n, m = like.shape[-2:]
    owners = owners_of(like.shape[:-2], upstream.shape)
    cells = owners.unsqueeze(-1) * (n * m) + solution.rows * m + solution.columns
    amounts = upstream.unsqueeze(-1) * solution.flows
    # A matrix of its own per problem gets one flow per cell; where problems share one, flows add up in float64.
    alone = like.shape[:-2].numel() == upstream.numel()
    flat = torch.zeros(like.numel(), dtype=like.dtype if alone else torch.float64, device="cpu")
    flat.index_add_(0, cells.flatten(), amounts.flatten().to(flat.dtype))
    return flat.reshape(like.shape).to(like)


def _name(problem: int, batch: torch.Size) -> str:
    if not batch:
        return "the problem"
    return f"problem {tuple(int(i) for i in np.unravel_index(problem, batch))}"
