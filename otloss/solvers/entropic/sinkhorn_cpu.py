"""Sinkhorn on a CPU, by the numba kernels for matrices: one problem per thread."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from otloss._numba import may_run_on
from otloss._numba.threads import PASSES, Work, run_on_threads
from otloss.solvers.entropic.equations.updates import build_updates
from otloss.solvers.entropic.interface import (
    ERROR,
    ITERATIONS,
    LEAST_EIGENVALUE,
    POTENTIAL_ERROR,
    POTENTIAL_RANGE,
    Budget,
    Method,
    SearchResult,
    in_float64,
)
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
        largest_ratio: of epsilon to a marginal penalty. The kernel iterates potentials over epsilon, and the mass of
            the plan multiplies their rounding by the ratio. Above, they are updated once more in float64.
    """

    largest_matrix: int = 2**24
    max_entries: int = 2**28
    largest_image: int = 2**20
    largest_unbalanced_image: int = 2**17
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
        largest = (
            MATRIX_LIMITS.largest_image if problem.marginal_penalty is None else MATRIX_LIMITS.largest_unbalanced_image
        )
        if cost.softmin_work() < n * m and n * m > largest:
            return False
        return n * m <= MATRIX_LIMITS.largest_matrix and cost.batch_shape.numel() * n * m <= MATRIX_LIMITS.max_entries

    def run(self, problem: Problem, previous: SearchResult | None, budget: Budget) -> SearchResult:
        """Search from where another search ended, else in stages of epsilon; see `interface.Method`."""
        (n, m), batch = problem.cost.shape, problem.batch
        p, q = (w.detach().reshape(-1, w.shape[-1]) for w in (problem.p, problem.q))
        costs = problem.cost.dense().detach()
        owner = np.arange(costs.shape[:-2].numel())
        if costs.shape[:-2] != batch:
            owner = np.ascontiguousarray(np.broadcast_to(owner.reshape(costs.shape[:-2]), batch)).reshape(-1)
        f, g, outcome = run_kernel(
            p, q, costs.reshape(-1, n, m), owner=owner,
            epsilon=problem.epsilon.detach().reshape(-1).double().contiguous().numpy(),
            g=None if previous is None else previous.start[1].reshape(-1, m),
            penalties=None if problem.marginal_penalty is None else penalties_of(problem),
            symmetric=problem.is_symmetric, budget=budget,
        )  # fmt: skip
        error, iterations = (outcome[:, column].reshape(batch) for column in (ERROR, ITERATIONS))
        f, g = f.reshape(*batch, n), g.reshape(*batch, m)
        penalty = problem.marginal_penalty
        penalty_limit = None if penalty is None else of_batch(penalty.least)
        if penalty_limit is not None and bool((problem.epsilon > MATRIX_LIMITS.largest_ratio * penalty_limit).any()):
            updates = build_updates(in_float64(problem))
            g = updates.g_from(f)
            f = updates.f_from(g)
        result = SearchResult(f, g, error, iterations.long())
        if not budget.is_accurate or problem.is_symmetric:  # no estimate of the error of g
            return result
        columns = (POTENTIAL_ERROR, POTENTIAL_RANGE, LEAST_EIGENVALUE)
        potential_error, range_of_g, eigenvalue = (outcome[:, column].reshape(batch) for column in columns)
        return dataclasses.replace(
            result, potential_error=potential_error, potential_range=range_of_g, least_eigenvalue=eigenvalue
        )


def iterate(problem: Problem, previous: SearchResult | None, budget: Budget) -> SearchResult:
    """Run Sinkhorn's iteration by the kernel where it applies, else in torch."""
    method: Method = SinkhornOnCPU() if SinkhornOnCPU().applies(problem) else Sinkhorn()
    return method.run(problem, previous, budget)


def penalties_of(problem: Problem) -> Float[np.ndarray, "problems 2"]:
    """Return rho_p and rho_q of each problem, infinite for a side that is kept."""
    penalty = problem.marginal_penalty or BOTH_KEPT
    penalties = np.empty((problem.batch.numel(), 2))
    for side, rho in enumerate((penalty.p, penalty.q)):
        penalties[:, side] = rho.reshape(-1).cpu().numpy() if isinstance(rho, Tensor) else rho
    return penalties


class KernelResults(NamedTuple):
    """What the kernels write.

    Attributes:
        f, g: (problems, n) and (problems, m), the potentials.
        outcome: (problems, 5), the columns `ERROR`, `ITERATIONS`, `POTENTIAL_ERROR`, `POTENTIAL_RANGE` and
            `LEAST_EIGENVALUE` of `interface`.
    """

    f: Float[Tensor, "problems n"]
    g: Float[Tensor, "problems m"]
    outcome: Float[Tensor, "problems 5"]


def run_kernel(
    p: Float[Tensor, "problems n"],
    q: Float[Tensor, "problems m"],
    costs: Float[Tensor, "matrices n m"],
    *,
    owner: np.ndarray,
    epsilon: np.ndarray,
    budget: Budget,
    g: Float[Tensor, "problems m"] | None = None,
    symmetric: bool = False,
    penalties: Float[np.ndarray, "problems 2"] | None = None,
) -> KernelResults:
    """Run the kernels for matrices, without a graph.

    Problem k has the cost matrix `costs[owner[k]]` and `epsilon[k]`; owner and epsilon are (problems,). Without a start
    `g`, epsilon falls in stages. The error is infinite where a number is not valid. `symmetric` is for p = q at
    symmetric costs. With marginal penalties (rho_p, rho_q) problems are unbalanced: the error is infinite too where a
    side has no mass.

    If the budget asks for accurate potentials or the eigenvalue, the largest error of g is estimated. It is a bound in
    unbalanced problems. The least eigenvalue is the one of the equations for g, estimated from above.
    """
    from otloss._numba.compile import addresses_of
    from otloss.solvers.entropic.sinkhorn_kernels.balanced_numba import (
        KernelBudget,
        empty_results,
        sinkhorn_problems,
        symmetric_problems,
    )
    from otloss.solvers.entropic.sinkhorn_kernels.shared_numba import build_calls, empty_arrays
    from otloss.solvers.entropic.sinkhorn_kernels.unbalanced_numba import build_unbalanced_calls, unbalanced_problems

    (count, n), m = p.shape, q.shape[1]
    results = empty_results(count, n, m, None if g is None else g.detach().numpy())
    matrices = costs.contiguous().numpy()
    kernel = sinkhorn_problems if penalties is None else unbalanced_problems
    if symmetric and penalties is None:
        kernel = symmetric_problems
    problems: tuple[np.ndarray, ...] = (p.contiguous().numpy(), q.contiguous().numpy(), matrices, owner, epsilon)
    if penalties is not None:
        problems = (*problems, penalties)
    last = int(min(budget.max_iterations, budget.patience))
    limits = KernelBudget(
        tolerance=budget.tolerance,
        largest_change=budget.largest_change,
        max_iterations=last,
        patience=float(budget.patience),
        is_warm=g is not None,
        estimates_error=budget.is_accurate,
    )
    passes = min(last, max(PASSES, last // 50))  # a limit of iterations is rarely reached
    counter, arguments = np.zeros(3, np.int64), (problems, tuple(limits), results)
    shared = addresses_of(
        (kernel, problems[0].dtype, matrices.dtype),
        lambda addresses: (kernel, (counter, addresses, *arguments, *empty_arrays(1, 1, matrices.dtype))),
        lambda: (build_calls if penalties is None else build_unbalanced_calls)(problems[0].dtype, matrices.dtype),
    )
    run_on_threads(
        kernel, count, (shared, *arguments), lambda: empty_arrays(n, m, matrices.dtype),
        work=Work("Sinkhorn iterations", count * n * m, budget.tolerance, passes=passes),
    )  # fmt: skip
    return KernelResults(*map(torch.from_numpy, results))
