"""The call of the Sinkhorn kernels on tensors."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from otloss._numba import may_run_on
from otloss._numba.threads import PASSES, Work, run_on_threads
from otloss.costs import GridCost
from otloss.solvers.entropic.interface import (
    ERROR,
    ITERATIONS,
    LEAST_EIGENVALUE,
    POTENTIAL_ERROR,
    SPREAD,
    Goal,
    SearchResult,
    in_float64,
)
from otloss.solvers.entropic.sinkhorn import Sweep
from otloss.solvers.problem import Problem

# A few steps of Lanczos' method tell this eigenvalue apart from smaller ones.
RESOLVED_EIGENVALUE = 0.005


def run_kernel(
    p: Float[Tensor, "problems n"],
    q: Float[Tensor, "problems m"],
    costs: Float[Tensor, "matrices n m"],
    *,
    owner: np.ndarray,
    epsilon: np.ndarray,
    g: Float[Tensor, "problems m"] | None = None,
    tolerance: float,
    most: int,
    settled: float = math.inf,
    patience: float = math.inf,
    symmetric: bool = False,
    plans: Float[Tensor, "problems n m"] | None = None,
    rho: float | None = None,
) -> tuple[Float[Tensor, "problems n"], Float[Tensor, "problems m"], Float[Tensor, "problems 5"]]:
    """Return f, g and (error, iterations, error and spread of g, least eigenvalue), without a graph.

    Problem k has the cost matrix `costs[owner[k]]` and `epsilon[k]`; owner and epsilon are (problems,). Without a start
    `g`, epsilon falls in stages. The error is infinite where a number is not valid. `symmetric` is for p = q at
    symmetric costs. `plans` is filled with the plans, which are those of the potentials up to rounding. With the
    marginal penalty `rho` problems are unbalanced: `symmetric` changes nothing then, and the error is infinite too
    where a side has no mass.

    A problem also ends where its contraction says that more than `patience` iterations are left to the tolerance.

    With `settled`, iterations go on until the last exact update changes no factor of the plan by a larger share. Then
    the largest error of g is estimated; it is a bound in unbalanced problems. The spread is the largest g minus the
    least. The least eigenvalue is that of the equations for g, estimated from above; below `RESOLVED_EIGENVALUE` it is
    uncertain. The last two are NaN in unbalanced problems.
    """
    from otloss.solvers.entropic.sinkhorn_numba import answers, scratch, sinkhorn_problems, symmetric_problems
    from otloss.solvers.entropic.sinkhorn_unbalanced_numba import unbalanced_problems

    (count, n), m = p.shape, q.shape[1]
    potential_p, potential_q, outcome = answers(count, n, m, None if g is None else g.detach().numpy())
    matrices = costs.contiguous().numpy()
    kernel = sinkhorn_problems if rho is None else unbalanced_problems
    if symmetric and rho is None:
        kernel = symmetric_problems
    posed = (p.contiguous().numpy(), q.contiguous().numpy(), matrices, owner, epsilon)
    limits = (tolerance, settled, most, float(patience), g is not None, 0.0 if rho is None else float(rho))
    wanted = np.empty((1, 0, 0), matrices.dtype) if plans is None else plans.numpy()
    passes = min(most, max(PASSES, most // 50))  # a limit of iterations is rarely reached
    run_on_threads(
        kernel, count, (posed, limits, (potential_p, potential_q, wanted, outcome)),
        lambda: scratch(n, m, matrices.dtype),
        work=Work("Sinkhorn iterations", count * n * m, tolerance, passes=passes),
    )  # fmt: skip
    return torch.from_numpy(potential_p), torch.from_numpy(potential_q), torch.from_numpy(outcome)


# Entries of a matrix. Above, the kernel on one thread takes longer than soft minima on all threads.
LARGEST_FOR_KERNEL = 2**24
# Costs of all problems together that may be held as matrices for the numba kernel: 1 GiB in float32.
MOST_FOR_KERNEL = 2**28
# Entries of all plans together that may be kept for the backward pass. Larger ones are computed there.
MOST_FOR_PLANS = 2**22
# Entries of the cost of unbalanced images up to which the numba kernel is faster than products along the axes.
LARGEST_UNBALANCED_GRID = 2**17
LARGEST_GRID = 2**20  # entries of the cost of images up to which matrices are faster than products along the axes
# Above this ratio of epsilon to the marginal penalty, the potentials of the kernel are updated once more. The kernel
# iterates potentials over epsilon, and the mass of the plan multiplies their rounding by the ratio.
LARGEST_RATIO_OF_PENALTY = 1e3


def runs_on_kernel(problem: Problem, impl: str) -> bool:
    """Return whether the numba kernel solves this problem; raise ValueError if impl="compiled" and it cannot."""
    n, m = problem.cost.shape
    able = may_run_on(problem.p)
    if impl == "compiled":
        if not able:
            raise ValueError(
                f'impl="compiled" runs on the CPU, outside of torch.func transforms; got tensors on '
                f'{problem.p.device}. Use impl="torch" or "auto".'
            )
        return True
    matrices = problem.cost.batch_shape.numel()
    most = LARGEST_GRID if problem.marginal_penalty is None else LARGEST_UNBALANCED_GRID
    if isinstance(problem.cost, GridCost) and len(problem.cost.cells) > 1 and n * m > most:
        able = False  # products along the axes are faster
    return impl == "auto" and able and n * m <= LARGEST_FOR_KERNEL and matrices * n * m <= MOST_FOR_KERNEL


def _by_kernel(problem: Problem, start: tuple[Tensor, Tensor] | None, goal: Goal) -> SearchResult:
    (n, m), batch = problem.cost.shape, problem.batch
    p, q = (w.detach().reshape(-1, w.shape[-1]) for w in (problem.p, problem.q))
    costs = problem.cost.dense().detach()
    owner = np.arange(costs.shape[:-2].numel())
    if costs.shape[:-2] != batch:
        owner = np.ascontiguousarray(np.broadcast_to(owner.reshape(costs.shape[:-2]), batch)).reshape(-1)
    plan = torch.empty(costs.shape, dtype=costs.dtype, device="cpu") if goal.with_plan else None
    f, g, outcome = run_kernel(
        p, q, costs.reshape(-1, n, m), owner=owner, plans=None if plan is None else plan.view(-1, n, m),
        epsilon=problem.epsilon.detach().reshape(-1).double().contiguous().numpy(),
        g=None if start is None else start[1].reshape(-1, m), rho=problem.marginal_penalty,
        tolerance=goal.tolerance, most=goal.most, settled=goal.settled, patience=goal.patience,
        symmetric=goal.symmetric,
    )  # fmt: skip
    error, iterations = (outcome[:, column].reshape(batch) for column in (ERROR, ITERATIONS))
    f, g = f.reshape(*batch, n), g.reshape(*batch, m)
    rho = problem.marginal_penalty
    if rho is not None and bool((problem.epsilon > LARGEST_RATIO_OF_PENALTY * rho).any()):
        sweep = Sweep.of(in_float64(problem))
        g = sweep.g_from(f)
        f = sweep.f_from(g)
    result = SearchResult(f, g, error, iterations.long(), plan=plan)
    if goal.settled == math.inf or goal.symmetric:  # the kernel has not estimated the error of g
        return result
    uncertain, spread, least = (outcome[:, k].reshape(batch) for k in (POTENTIAL_ERROR, SPREAD, LEAST_EIGENVALUE))
    return dataclasses.replace(result, potential_error=uncertain, spread=spread, least_eigenvalue=least)
