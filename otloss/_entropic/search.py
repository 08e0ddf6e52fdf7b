"""The potentials of entropic problems: by the compiled kernel, or in the log domain on any device."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from otloss._entropic.log_domain import iterate_in_logs
from otloss._entropic.multiscale import search_from_clusters, takes_clusters
from otloss._entropic.newton import newton_search
from otloss._entropic.problem import EntropicProblem, Settings, check_start, has_float64, in_float64, tolerance_of
from otloss._kernels import may_run_on
from otloss._kernels.sinkhorn_call import ERROR, ITERATIONS, run_kernel
from otloss.costs import DenseCost

# Matrices up to this many entries: beyond, a single problem on one thread takes longer than soft minima on all of them.
LARGEST_COMPILED = 2**24
# Costs of all problems together that may be held as matrices for the compiled kernel: 1 GiB in float32.
MOST_COMPILED = 2**28
# Iterations after which problems of up to so many entries are handed to Newton's method: a step costs as much as a
# hundred of them.
PATIENCE, LARGEST_NEWTON = 1000, 2**20


class ConvergenceWarning(UserWarning):
    """A transport problem was not solved to the tolerance."""


@dataclass(frozen=True)
class Potentials:
    """Where the search ended, per problem and without a graph.

    Attributes:
        f: (..., n), g: (..., m), finite on all bins; f is an exact update from g.
        error: (...), sum of the errors of both marginals relative to the mass.
        converged: (...), whether that is within the tolerance.
        iterations: (...).
    """

    f: Float[Tensor, "*batch n"]
    g: Float[Tensor, "*batch m"]
    error: Float[Tensor, "*batch"]
    converged: Bool[Tensor, "*batch"]
    iterations: Int[Tensor, "*batch"]


def find_potentials(problem: EntropicProblem, settings: Settings, *, symmetric: bool = False) -> Potentials:
    """Solve for the potentials; a problem without mass on a side gets potentials of zero.

    Args:
        symmetric: p and q are the same and so is the cost of either way; saves iterations.
    """
    tolerance = tolerance_of(problem, settings)
    start = check_start(settings.start, problem)
    with torch.no_grad():
        search = _compiled if runs_compiled(problem, settings.impl) else _in_logs
        most = settings.max_iterations
        if settings.impl == "auto" and start is None and takes_clusters(problem):
            f, g, error, iterations = _from_clusters(
                problem, search, tolerance=tolerance, most=most, symmetric=symmetric
            )
        else:
            f, g, error, iterations = _in_turns(
                problem, start, search, tolerance=tolerance, most=most, symmetric=symmetric
            )
        found = Potentials(f, g, error, error <= tolerance, iterations)
    report(found, problem, settings)
    return found


def _from_clusters(
    problem: EntropicProblem,
    search: Callable[..., tuple[Tensor, Tensor, Tensor, Tensor]],
    *,
    tolerance: float,
    most: int,
    symmetric: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The search from clusters to points; the other one goes on where that ends early."""
    found = search_from_clusters(
        problem, _compiled, tolerance=tolerance, most=most, symmetric=symmetric, only_resolved=search is _compiled
    )
    if found is None:
        return _in_turns(problem, None, search, tolerance=tolerance, most=most, symmetric=symmetric)
    f, g, error, iterations = found
    left = most - int(iterations.amax())
    if left > 0 and not bool((error <= tolerance).all()):
        f, g, error, more = _in_turns(problem, (f, g), search, tolerance=tolerance, most=left, symmetric=symmetric)
        iterations = iterations + more
    return f, g, error, iterations


def _in_turns(
    problem: EntropicProblem,
    start: tuple[Tensor, Tensor] | None,
    search: Callable[..., tuple[Tensor, Tensor, Tensor, Tensor]],
    *,
    tolerance: float,
    most: int,
    symmetric: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Sinkhorn; after a while Newton's method, where it can be had; then Sinkhorn again, in float64."""
    newton = not symmetric and _can_take_newton(problem)
    narrow = search is _in_logs and problem.cost.dtype == torch.float32 and has_float64(problem.p.device)
    first = min(most, PATIENCE) if newton or narrow else most
    f, g, error, iterations = search(problem, start, tolerance=tolerance, most=first, symmetric=symmetric)
    left = most - first
    if left == 0 or not (error > tolerance).any():
        return f, g, error, iterations
    if newton:
        f, g, error, steps = _by_newton(problem, (f, g, error), tolerance=tolerance, most=left)
        iterations, left = iterations + steps, left - int(steps.amax())
    if left > 0 and bool((error > tolerance).any()):
        again = in_float64(problem) if narrow else problem
        f, g, error, more = search(again, (f, g), tolerance=tolerance, most=left, symmetric=symmetric)
        iterations = iterations + more
    return f, g, error, iterations


def _can_take_newton(problem: EntropicProblem) -> bool:
    n, m = problem.cost.shape
    return problem.reach is None and n * m <= LARGEST_NEWTON and has_float64(problem.p.device)


def _by_newton(
    problem: EntropicProblem, found: tuple[Tensor, Tensor, Tensor], *, tolerance: float, most: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Newton's method for the problems whose error is beyond the tolerance; kept where it lessens that."""
    f, g, error = found
    stuck = error > tolerance
    costs = problem.cost.dense().expand(*problem.batch, *problem.cost.shape)[stuck]
    hard = EntropicProblem(
        problem.p[stuck].double(), problem.q[stuck].double(), DenseCost(costs.double()),
        problem.epsilon[stuck].double(), None, problem.dtype,
    )  # fmt: skip
    new_f, new_g, new_error, steps = newton_search(hard, g[stuck].double(), tolerance=tolerance, most=most)
    better = new_error < error[stuck]
    f, g, error, counted = f.clone(), g.clone(), error.clone(), torch.zeros_like(error, dtype=torch.int64)
    f[stuck] = torch.where(better.unsqueeze(-1), new_f.to(f.dtype), f[stuck])
    g[stuck] = torch.where(better.unsqueeze(-1), new_g.to(g.dtype), g[stuck])
    error[stuck] = torch.where(better, new_error.to(error.dtype), error[stuck])
    counted[stuck] = steps
    return f, g, error, counted


def runs_compiled(problem: EntropicProblem, impl: str) -> bool:
    """Whether the compiled kernel is for this problem; raises where it was asked for and cannot run."""
    n, m = problem.cost.shape
    able = problem.reach is None and may_run_on(problem.p)
    if impl == "compiled":
        if not able:
            raise ValueError(
                f'impl="compiled" solves balanced problems on the CPU, outside of torch.func transforms; got '
                f'reach={problem.reach} on {problem.p.device}. Use impl="torch" or "auto".'
            )
        return True
    matrices = problem.cost.batch_shape.numel()
    return impl == "auto" and able and n * m <= LARGEST_COMPILED and matrices * n * m <= MOST_COMPILED


def _compiled(
    problem: EntropicProblem, start: tuple[Tensor, Tensor] | None, *, tolerance: float, most: int, symmetric: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    (n, m), batch = problem.cost.shape, problem.batch
    p, q = (w.detach().reshape(-1, w.shape[-1]) for w in (problem.p, problem.q))
    costs = problem.cost.dense().detach()
    owner = torch.arange(costs.shape[:-2].numel(), device="cpu")
    if costs.shape[:-2] != batch:
        owner = owner.reshape(costs.shape[:-2]).expand(batch).reshape(-1)
    f, g, ends = run_kernel(
        p, q, costs.reshape(-1, n, m), owner=owner.contiguous().numpy(),
        epsilon=problem.epsilon.detach().reshape(-1).double().contiguous().numpy(),
        g=None if start is None else start[1].reshape(-1, m), tolerance=tolerance, most=most, symmetric=symmetric,
    )  # fmt: skip
    error, iterations = ends[:, ERROR].reshape(batch), ends[:, ITERATIONS].long().reshape(batch)
    return f.reshape(*batch, n), g.reshape(*batch, m), error, iterations


def _in_logs(
    problem: EntropicProblem, start: tuple[Tensor, Tensor] | None, *, tolerance: float, most: int, symmetric: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    p, q = problem.p.detach(), problem.q.detach()
    empty = (p.sum(-1) == 0) | (q.sum(-1) == 0)
    # Weights of one in the place of none: the answer of that problem is not looked at.
    p, q = (torch.where(empty.unsqueeze(-1), 1.0 / w.shape[-1], w) for w in (p, q))
    solid = EntropicProblem(p, q, problem.cost, problem.epsilon.detach(), problem.reach, problem.dtype)
    f, g, error, iterations = iterate_in_logs(solid, start, tolerance=tolerance, most=most, symmetric=symmetric)
    f, g = (potential.masked_fill(empty.unsqueeze(-1), 0.0) for potential in (f, g))
    return f, g, error.masked_fill(empty, 0.0), iterations.masked_fill(empty, 0)


def report(found: Potentials, problem: EntropicProblem, settings: Settings) -> None:
    """Warn of the worst problem that did not converge, or raise with strict=True."""
    tolerance = tolerance_of(problem, settings)
    if found.converged.all():
        return
    error = found.error.nan_to_num(nan=torch.inf)
    worst = tuple(int(i) for i in (error == error.max()).nonzero()[0])
    name = f"problem {worst}" if worst else "the problem"
    count = int((~found.converged).sum())
    message = (
        f"{count} of {found.converged.numel()} entropic problems did not converge; worst is {name}, with a marginal "
        f"error of {float(found.error[worst]):.3g} where {tolerance:.3g} was asked for, after "
        f"{int(found.iterations[worst])} iterations. Raise epsilon, raise max_iterations (now "
        f"{settings.max_iterations}), or accept a larger tolerance; solve() tells the duality gap of each problem."
    )
    if settings.strict:
        raise RuntimeError(message)
    warnings.warn(message, ConvergenceWarning, stacklevel=_level_of_the_caller())


def _level_of_the_caller() -> int:
    """The stack level, for a warning of the function that asks, of the first frame outside this library and torch."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] in ("otloss", "torch"):
        level, frame = level + 1, frame.f_back
    return level
