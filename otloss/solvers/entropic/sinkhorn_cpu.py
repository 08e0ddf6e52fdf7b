"""Sinkhorn on a CPU, by the numba kernels for matrices: one problem per thread."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from otloss._numba import may_run_on
from otloss._numba.threads import PASSES, Work, run_on_threads
from otloss.solvers.entropic.arithmetic import detached_in_float64
from otloss.solvers.entropic.equations.updates import build_updates
from otloss.solvers.entropic.interface import Budget, Method, SearchResult, Start
from otloss.solvers.entropic.sinkhorn import Sinkhorn
from otloss.solvers.options import BOTH_KEPT, of_batch
from otloss.solvers.problem import Problem


@dataclass(frozen=True)
class MatrixLimits:
    """The sizes at which the kernels are faster than soft minima in torch.

    Attributes:
        largest_matrix: entries of one matrix. Above, the kernel on one thread takes longer than soft minima on all.
        max_entries: of all matrices together: 1 GiB in float32.
        largest_image: entries of the cost of images, above which products along the axes are faster.
        largest_unbalanced_image: the same for unbalanced problems, which take more iterations in the kernel.
        most_rows, most_columns: of problems in float32. Sums of more terms have roundings near the tolerance, so that
            the iteration seemed to end, and float64 takes over. Columns are added in lanes, and rows one after another.
        largest_ratio: of epsilon to a marginal penalty. The kernel iterates potentials over epsilon, and the mass of
            the plan multiplies their rounding by the ratio. Above, they are updated once more in float64.
    """

    largest_matrix: int = 2**24
    max_entries: int = 2**28
    largest_image: int = 2**20
    largest_unbalanced_image: int = 2**17
    most_rows: int = 2**14
    most_columns: int = 2**18
    largest_ratio: float = 1e3


MATRIX_LIMITS = MatrixLimits()


class SinkhornOnCPU(Method):
    """The method for matrices and costs whose matrix fits the memory."""

    def applies(self, problem: Problem) -> bool:
        if problem.is_symmetric and problem.marginal_penalty is not None:
            return False  # the kernels do not know these, and logarithms take few iterations
        if problem.impl == "compiled":
            return True
        cost, (n, m) = problem.cost, problem.cost.shape
        if problem.impl != "auto" or not may_run_on(problem.p):
            return False
        limits, is_balanced = MATRIX_LIMITS, problem.marginal_penalty is None
        if is_faster_on_axes(problem, limits.largest_image if is_balanced else limits.largest_unbalanced_image):
            return False
        return n * m <= limits.largest_matrix and cost.batch_shape.numel() * n * m <= limits.max_entries

    def run(self, problem: Problem, start: Start | None, budget: Budget) -> SearchResult:
        """Search from the start, or without one in stages of epsilon; see `interface.Method`."""
        (n, m), batch = problem.cost.shape, problem.batch
        g = None if start is None else start.g.reshape(-1, m)
        results = run_kernel(build_matrix_problems(problem), budget, g=g)
        f, g = results.f.reshape(*batch, n), results.g.reshape(*batch, m)
        if _rounds_potentials(problem):
            updates = build_updates(detached_in_float64(problem))
            g = updates.g_from(f)
            f = updates.f_from(g)
        error, iterations, *estimates = (column.reshape(batch) for column in results.outcome.unbind(-1))
        return SearchResult(f, g, error, iterations.long(), *estimates)


def is_faster_on_axes(problem: Problem, largest_image: int = MATRIX_LIMITS.largest_image) -> bool:
    """Return whether updates along the axes of images are faster than updates by a matrix."""
    entries = math.prod(problem.cost.shape)
    return problem.cost.softmin_work() < entries and entries > largest_image


def _rounds_potentials(problem: Problem) -> bool:
    """Return whether the mass of the plan multiplies the rounding of potentials by more than `largest_ratio`."""
    penalty = problem.marginal_penalty
    if penalty is None:
        return False
    return bool((problem.epsilon > MATRIX_LIMITS.largest_ratio * of_batch(penalty.smallest)).any())


def run_sinkhorn(problem: Problem, start: Start | None, budget: Budget) -> SearchResult:
    """Run Sinkhorn's iteration by the kernel where it applies, else in torch."""
    method: Method = SinkhornOnCPU() if SinkhornOnCPU().applies(problem) else Sinkhorn()
    return method.run(problem, start, budget)


def penalties_of(problem: Problem) -> Float[np.ndarray, "problems 2"]:
    """Return rho_p and rho_q of each problem, infinite for a side that is kept."""
    penalty = problem.marginal_penalty or BOTH_KEPT
    penalties = np.empty((problem.batch.numel(), 2))
    for side, rho in enumerate((penalty.p, penalty.q)):
        penalties[:, side] = rho.reshape(-1).cpu().numpy() if isinstance(rho, Tensor) else rho
    return penalties


class MatrixProblems(NamedTuple):
    """Entropic problems with matrices, without a graph. With `penalties` they are unbalanced.

    Attributes:
        p, q: (problems, n) and (problems, m).
        costs: (matrices, n, m). Problem k has the matrix `costs[owner[k]]`.
        owner, epsilon: (problems,).
        penalties: (problems, 2), the marginal penalties rho_p and rho_q.
        is_symmetric: whether p = q and the costs are symmetric.
    """

    p: Float[Tensor, "problems n"]
    q: Float[Tensor, "problems m"]
    costs: Float[Tensor, "matrices n m"]
    owner: np.ndarray
    epsilon: np.ndarray
    penalties: Float[np.ndarray, "problems 2"] | None = None
    is_symmetric: bool = False


def build_matrix_problems(problem: Problem) -> MatrixProblems:
    """Return the problems of a batch, which may share matrices."""
    costs = problem.cost.dense().detach()
    owner = np.arange(costs.shape[:-2].numel())
    if costs.shape[:-2] != problem.batch:
        # A copy in any case: a read-only array would be another type, for which the kernel is compiled again.
        owner = np.broadcast_to(owner.reshape(costs.shape[:-2]), problem.batch).flatten()
    p, q = (w.detach().reshape(-1, w.shape[-1]) for w in (problem.p, problem.q))
    if p.shape[-1] > MATRIX_LIMITS.most_rows or q.shape[-1] > MATRIX_LIMITS.most_columns:
        p, q, costs = p.double(), q.double(), costs.double()
    return MatrixProblems(
        p, q, costs.reshape(-1, *costs.shape[-2:]), owner,
        epsilon=problem.epsilon.detach().reshape(-1).double().contiguous().numpy(),
        penalties=None if problem.marginal_penalty is None else penalties_of(problem),
        is_symmetric=problem.is_symmetric,
    )  # fmt: skip


class KernelResults(NamedTuple):
    """What the kernels write.

    Attributes:
        f, g: (problems, n) and (problems, m), the potentials.
        outcome: (problems, 5), the columns `ERROR` and `ITERATIONS` of `interface`, and the others of
            `sinkhorn_kernels.numbers`. The error is infinite where a number is not valid, and in unbalanced problems
            where a side has no mass. If the budget asks for accurate potentials, `POTENTIAL_ERROR` is an estimate of
            the largest error of g, and a bound in unbalanced problems. `SMALLEST_EIGENVALUE` belongs to the equations
            for g, and is an estimate from above. They are NaN otherwise.
    """

    f: Float[Tensor, "problems n"]
    g: Float[Tensor, "problems m"]
    outcome: Float[Tensor, "problems 5"]


def run_kernel(
    problems: MatrixProblems, budget: Budget, *, g: Float[Tensor, "problems m"] | None = None
) -> KernelResults:
    """Run the kernel for such problems from a start `g`, or without one in falling stages of epsilon."""
    from otloss._numba.compile import addresses_of
    from otloss.solvers.entropic.sinkhorn_kernels.balanced_numba import empty_results
    from otloss.solvers.entropic.sinkhorn_kernels.shared_numba import empty_arrays

    (count, n), m = problems.p.shape, problems.q.shape[1]
    kernel, called = _choose_kernel(problems)
    inputs: tuple[np.ndarray, ...] = tuple(t.contiguous().numpy() for t in (problems.p, problems.q, problems.costs))
    weights, costs = inputs[0].dtype, inputs[2].dtype
    inputs += (problems.owner, problems.epsilon)
    if problems.penalties is not None:
        inputs += (problems.penalties,)
    results = empty_results(count, n, m, None if g is None else g.detach().numpy())
    arguments = (inputs, _kernel_limits(budget, is_warm=g is not None), results)
    addresses = addresses_of(
        (kernel, weights, costs),
        lambda unknown: (kernel, (np.zeros(3, np.int64), unknown, *arguments, *empty_arrays(1, 1, costs))),
        lambda: called(weights, costs),
    )
    last = budget.last_iteration
    passes = min(last, max(PASSES, last // 50))  # a limit of iterations is rarely reached
    run_on_threads(
        kernel, count, (addresses, *arguments), lambda: empty_arrays(n, m, costs),
        work=Work("Sinkhorn iterations", count * n * m, budget.tolerance, passes=passes),
    )  # fmt: skip
    return KernelResults(*map(torch.from_numpy, results))


def _choose_kernel(problems: MatrixProblems) -> tuple[Any, Any]:
    """Return the kernel for such problems, and the function that returns the kernels that it calls."""
    from otloss.solvers.entropic.sinkhorn_kernels.balanced_numba import sinkhorn_problems, symmetric_problems
    from otloss.solvers.entropic.sinkhorn_kernels.shared_numba import build_calls
    from otloss.solvers.entropic.sinkhorn_kernels.unbalanced_numba import build_unbalanced_calls, unbalanced_problems

    if problems.penalties is not None:
        return unbalanced_problems, build_unbalanced_calls
    return (symmetric_problems if problems.is_symmetric else sinkhorn_problems), build_calls


def _kernel_limits(budget: Budget, *, is_warm: bool) -> tuple[Any, ...]:
    """Return the fields of `SinkhornLimits`."""
    from otloss.solvers.entropic.sinkhorn_kernels.balanced_numba import SinkhornLimits

    return tuple(
        SinkhornLimits(
            budget.tolerance, budget.largest_change, max_iterations=budget.last_iteration,
            patience=float(budget.patience), is_warm=is_warm, estimates_error=budget.is_accurate,
        )
    )  # fmt: skip
