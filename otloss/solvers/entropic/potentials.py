"""The potentials of entropic problems: by the numba kernel, or in the log domain on any device."""

from __future__ import annotations

import dataclasses
import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from otloss._kernels import may_run_on
from otloss._kernels.sinkhorn_call import (
    ERROR,
    ITERATIONS,
    LEAST_EIGENVALUE,
    POTENTIAL_ERROR,
    RESOLVED,
    SPREAD,
    run_kernel,
)
from otloss.costs import DenseCost, GridCost
from otloss.costs.cost import makes_graph
from otloss.solvers.entropic.grids import start_from_blocks, takes_blocks, warn_where_slow
from otloss.solvers.entropic.log_domain import Sweep, iterate_in_logs
from otloss.solvers.entropic.multiscale import search_from_clusters, takes_clusters
from otloss.solvers.entropic.newton import error_of_potential, newton_search
from otloss.solvers.entropic.problem import (
    EntropicProblem,
    Settings,
    check_not_too_small,
    check_start,
    has_float64,
    in_float64,
    level_of_the_caller,
    settled_from,
    tolerance_of,
)

# Matrices up to this many entries: beyond, a single problem on one thread takes longer than soft minima on all of them.
LARGEST_FOR_KERNEL = 2**24
# Costs of all problems together that may be held as matrices for the numba kernel: 1 GiB in float32.
MOST_FOR_KERNEL = 2**28
# Iterations after which Newton's method solves problems of up to so many entries: a step takes as long as a hundred
# iterations.
PATIENCE, LARGEST_NEWTON = 1000, 2**20
# Entries of the cost of unbalanced images up to which the numba kernel is faster than products along the axes.
LARGEST_UNBALANCED_GRID = 2**17
UNCERTAIN = 1e-2  # share of their spread, from which an error of potentials is worth a warning
LITTLE = 1e-5  # of epsilon: an error that does not count, where potentials hardly differ


class ConvergenceWarning(UserWarning):
    """A transport problem was not solved to the tolerance."""


@dataclass(frozen=True)
class Potentials:
    """Where the search ended, per problem and without a graph.

    Attributes:
        f: (..., n), g: (..., m), finite on all bins; f is an exact update from g. NaN where the error is not finite.
        error: (...), sum of the errors of both marginals relative to the mass.
        converged: (...), whether that is within the tolerance.
        iterations: (...).
        potential_error: (...), an estimate of the largest error of g; None where it was not asked for or is not known.
        spread: (...), the largest g minus the least, of bins that hold mass.
    """

    f: Float[Tensor, "*batch n"]
    g: Float[Tensor, "*batch m"]
    error: Float[Tensor, "*batch"]
    converged: Bool[Tensor, "*batch"]
    iterations: Int[Tensor, "*batch"]
    potential_error: Float[Tensor, "*batch"] | None = None
    spread: Float[Tensor, "*batch"] | None = None


@dataclass(frozen=True)
class _Goal:
    """When a search may end: at the tolerance, or after `most` iterations.

    `settled`: and, where it is finite, when the last update changed no factor of the plan by a larger share.
    """

    tolerance: float
    most: int
    settled: float = math.inf
    symmetric: bool = False

    @property
    def options(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


def find_potentials(
    problem: EntropicProblem,
    settings: Settings,
    *,
    symmetric: bool = False,
    settle: bool | None = None,
    begun: Found | None = None,
) -> Potentials:
    """Solve for the potentials; a problem without mass on a side gets potentials of zero.

    Args:
        symmetric: p and q are the same and so is the cost of either way; saves iterations.
        settle: whether the potentials themselves are asked for, and not only the value, which is far less sensitive;
            None where a gradient of the weights is.
        begun: where up to PATIENCE iterations of the kernel have ended, which are not made again.
    """
    if not symmetric:  # a few iterations
        warn_where_slow(problem, settings.grad)
    tolerance = tolerance_of(problem, settings)
    start = check_start(settings.start, problem)
    if settle is None:
        settle = _takes_weight_gradients(problem)
    settled = settled_from(tolerance, problem.cost.dtype) if settle else math.inf
    goal = _Goal(tolerance, settings.max_iterations, settled, symmetric)
    with torch.no_grad():
        search = _by_kernel if runs_on_kernel(problem, settings.impl) else _in_logs
        from_clusters = settings.impl == "auto" and start is None and takes_clusters(problem)
        in_order = _from_clusters if from_clusters else _in_turns
        found = (
            in_order(problem, start, search, goal) if begun is None else _in_turns(problem, None, search, goal, begun)
        )
        f, g, error, iterations, uncertain = found
        check_not_too_small(problem, f, g)
        if settle and uncertain is not None:
            f, g, error, iterations, uncertain = _settled(problem, (f, g, error, iterations, uncertain), goal)
        # A value whose error is not known must be NaN.
        f, g = (potential.masked_fill(~error.isfinite().unsqueeze(-1), torch.nan) for potential in (f, g))
        answer = Potentials(f, g, error, error <= tolerance, iterations, *(uncertain or ())[:2])
    report(answer, problem, settings)
    return answer


# Where a search ended: f, g, the marginal error, iterations, and where they are known (the error of g, its spread, the
# least eigenvalue).
Found = tuple[Tensor, Tensor, Tensor, Tensor, tuple[Tensor, Tensor, Tensor] | None]
_Search = Callable[[EntropicProblem, tuple[Tensor, Tensor] | None, "_Goal"], Found]


def _from_clusters(
    problem: EntropicProblem, start: tuple[Tensor, Tensor] | None, search: _Search, goal: _Goal
) -> Found:
    """The search from clusters to points; the other one continues where that ends early."""

    def solve_clusters(between: EntropicProblem, *, tolerance: float, most: int, symmetric: bool) -> Any:
        return _by_kernel(between, None, _Goal(tolerance, most, symmetric=symmetric))[:4]

    found = search_from_clusters(
        problem, solve_clusters, tolerance=goal.tolerance, most=goal.most, symmetric=goal.symmetric,
        only_resolved=search is _by_kernel,
    )  # fmt: skip
    if found is None:
        return _in_turns(problem, None, search, goal)
    f, g, error, iterations = found
    left = goal.most - int(iterations.amax())
    if left > 0 and not bool((error <= goal.tolerance).all()):
        f, g, error, more, known = _in_turns(problem, (f, g), search, dataclasses.replace(goal, most=left))
        return f, g, error, iterations + more, known
    return f, g, error, iterations, None


def _in_turns(
    problem: EntropicProblem,
    start: tuple[Tensor, Tensor] | None,
    search: _Search,
    goal: _Goal,
    begun: Found | None = None,
) -> Found:
    """Sinkhorn; after a while Newton's method, if it applies; then Sinkhorn again, in float64, unbalanced in logs."""
    tolerance, most = goal.tolerance, goal.most
    newton = not goal.symmetric and _can_take_newton(problem)
    narrow = search is _in_logs and problem.cost.dtype == torch.float32 and has_float64(problem.p.device)
    other = problem.marginal_penalty is not None and search is _by_kernel
    first = min(most, PATIENCE) if newton or narrow or other or begun is not None else most
    if begun is None:
        begun = search(problem, start, dataclasses.replace(goal, most=first))
    f, g, error, iterations, uncertain = begun
    left = most - first
    if left == 0 or (error <= tolerance).all():  # NaN is not
        return f, g, error, iterations, uncertain
    if newton:
        stuck = ~(error <= tolerance)
        rest = dataclasses.replace(goal, most=left, settled=math.inf)
        f, g, error, steps, _ = _by_newton(problem, (f, g, error), stuck, rest)
        iterations, left = iterations + steps, left - int(steps.amax())
    if other:  # what does not fit the kernel, or is slow there
        known = error.isfinite().unsqueeze(-1)
        f, g, search = torch.where(known, f, 0.0), torch.where(known, g, 0.0), _in_logs
    if left > 0 and not bool((error <= tolerance).all()):
        again = in_float64(problem) if narrow or other else problem
        f, g, error, more, uncertain = search(again, (f, g), dataclasses.replace(goal, most=left))
        iterations = iterations + more
    return f, g, error, iterations, uncertain


def _can_take_newton(problem: EntropicProblem) -> bool:
    n, m = problem.cost.shape
    return problem.marginal_penalty is None and n * m <= LARGEST_NEWTON and has_float64(problem.p.device)


def _by_newton(
    problem: EntropicProblem, found: tuple[Tensor, Tensor, Tensor], chosen: Bool[Tensor, "*batch"], goal: _Goal
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Newton's method for the chosen problems, kept where it lessens the error; also the error of g."""
    f, g, error = found
    costs = problem.cost.dense().expand(*problem.batch, *problem.cost.shape)[chosen]
    hard = EntropicProblem(
        problem.p[chosen].double(), problem.q[chosen].double(), DenseCost(costs.double()),
        problem.epsilon[chosen].double(), None, problem.dtype,
    )  # fmt: skip
    new_f, new_g, new_error, steps, new_uncertain = newton_search(
        hard, g[chosen].double(), tolerance=goal.tolerance, most=goal.most, settled=goal.settled
    )
    better = ~(torch.clamp(error[chosen], min=goal.tolerance) < new_error)
    f, g, error, counted = f.clone(), g.clone(), error.clone(), torch.zeros_like(error, dtype=torch.int64)
    f[chosen] = torch.where(better.unsqueeze(-1), new_f.to(f.dtype), f[chosen])
    g[chosen] = torch.where(better.unsqueeze(-1), new_g.to(g.dtype), g[chosen])
    error[chosen] = torch.where(better, new_error.to(error.dtype), error[chosen])
    counted[chosen] = steps
    uncertain = torch.full_like(error, torch.inf)
    uncertain[chosen] = torch.where(better, new_uncertain.to(error.dtype), torch.inf)
    return f, g, error, counted, uncertain


def _settled(problem: EntropicProblem, found: Found, goal: _Goal) -> Found:
    """Newton's method where g is uncertain: slow modes hardly count in the marginal error."""
    f, g, error, iterations, known = found
    assert known is not None
    uncertain, spread, eigenvalue = known
    enough = goal.settled * spread + LITTLE * problem.epsilon.detach()
    poor = (~(uncertain <= enough) | (eigenvalue < RESOLVED)) & (error <= goal.tolerance)
    goal = dataclasses.replace(goal, most=goal.most - int(iterations.amax()) if iterations.numel() else 0)
    if goal.most < 1 or goal.symmetric or not _can_take_newton(problem) or not bool(poor.any()):
        return found
    f, g, error, steps, better = _by_newton(problem, (f, g, error), poor, goal)
    return f, g, error, iterations + steps, (torch.where(poor, better, uncertain), spread, eigenvalue)


def runs_on_kernel(problem: EntropicProblem, impl: str) -> bool:
    """Whether the numba kernel solves this problem; ValueError if impl="compiled" and it cannot."""
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
    most = LARGEST_NEWTON if problem.marginal_penalty is None else LARGEST_UNBALANCED_GRID
    if isinstance(problem.cost, GridCost) and len(problem.cost.cells) > 1 and n * m > most:
        able = False  # products along the axes are faster
    return impl == "auto" and able and n * m <= LARGEST_FOR_KERNEL and matrices * n * m <= MOST_FOR_KERNEL


def _by_kernel(problem: EntropicProblem, start: tuple[Tensor, Tensor] | None, goal: _Goal) -> Found:
    (n, m), batch = problem.cost.shape, problem.batch
    p, q = (w.detach().reshape(-1, w.shape[-1]) for w in (problem.p, problem.q))
    costs = problem.cost.dense().detach()
    owner = torch.arange(costs.shape[:-2].numel(), device="cpu")
    if costs.shape[:-2] != batch:
        owner = owner.reshape(costs.shape[:-2]).expand(batch).reshape(-1)
    f, g, ends = run_kernel(
        p, q, costs.reshape(-1, n, m), owner=owner.contiguous().numpy(),
        epsilon=problem.epsilon.detach().reshape(-1).double().contiguous().numpy(),
        g=None if start is None else start[1].reshape(-1, m), rho=problem.marginal_penalty, **goal.options,
    )  # fmt: skip
    judged = goal.settled < math.inf and not goal.symmetric
    return found_by_kernel(f, g, ends, batch, judged=judged)


def found_by_kernel(f: Tensor, g: Tensor, ends: Tensor, batch: torch.Size, *, judged: bool) -> Found:
    """What `run_kernel` returned, in the shape of the problems; `judged` where it estimated the error of g."""
    error, iterations, *known = (
        ends[:, column].reshape(batch) for column in (ERROR, ITERATIONS, POTENTIAL_ERROR, SPREAD, LEAST_EIGENVALUE)
    )
    certainty = (known[0], known[1], known[2]) if judged else None
    return f.reshape(*batch, f.shape[-1]), g.reshape(*batch, g.shape[-1]), error, iterations.long(), certainty


def _in_logs(problem: EntropicProblem, start: tuple[Tensor, Tensor] | None, goal: _Goal) -> Found:
    p, q = problem.p.detach(), problem.q.detach()
    empty = (p.sum(-1) == 0) | (q.sum(-1) == 0)
    # Uniform weights in place of zeros: the answer of that problem is replaced below.
    p, q = (torch.where(empty.unsqueeze(-1), 1.0 / w.shape[-1], w) for w in (p, q))
    solid = EntropicProblem(p, q, problem.cost, problem.epsilon.detach(), problem.marginal_penalty, problem.dtype)
    w = None
    if start is None and takes_blocks(solid):
        start, w = start_from_blocks(solid, _solve_blocks, symmetric=goal.symmetric)
    f, g, error, iterations = iterate_in_logs(solid, start, **goal.options, relaxation=w)
    known = None
    if goal.settled < math.inf and not goal.symmetric and problem.marginal_penalty is not None:
        sweep = Sweep.of(solid)
        off = (sweep.g_from(sweep.f_from(g)) - g).abs().masked_fill(q == 0, 0.0).amax(-1)
        bound = (off / (1 - sweep.damping.squeeze(-1) ** 2)).masked_fill(
            empty, 0.0
        )  # two updates contract by damping^2
        known = (bound, torch.full_like(bound, torch.nan), torch.full_like(bound, torch.nan))
    elif goal.settled < math.inf and not goal.symmetric and p.device.type == "cpu" and _can_take_newton(problem):
        held = q > 0
        spread = g.masked_fill(~held, -torch.inf).amax(-1) - g.masked_fill(~held, torch.inf).amin(-1)
        known = (error_of_potential(solid, g).masked_fill(empty, 0.0), spread, torch.ones_like(spread))
    f, g = (potential.masked_fill(empty.unsqueeze(-1), 0.0) for potential in (f, g))
    return f, g, error.masked_fill(empty, 0.0), iterations.masked_fill(empty, 0), known


def _solve_blocks(problem: EntropicProblem, **options: Any) -> tuple[Tensor, Tensor, Tensor]:
    f, g, error, _, known = _by_kernel(problem, None, _Goal(**options, settled=1e3))
    return f, g, torch.ones_like(error) if known is None else known[2]


def report(found: Potentials, problem: EntropicProblem, settings: Settings) -> None:
    """Warn of the worst problem that did not converge, or raise with strict=True."""
    tolerance = tolerance_of(problem, settings)
    if found.converged.all():
        if settings.grad == "envelope" and _takes_weight_gradients(problem):  # "implicit" raises instead
            _warn_of_uncertain(problem, found)
        return
    error = found.error.nan_to_num(nan=torch.inf)
    worst = tuple(int(i) for i in (error == error.max()).nonzero()[0])
    name = f"problem {worst}" if worst else "the problem"
    count = int((~found.converged).sum())
    message = (
        f"{count} of {found.converged.numel()} entropic problems did not converge; worst is {name}, with a marginal "
        f"error of {float(found.error[worst]):.3g} where {tolerance:.3g} was asked for, after "
        f"{int(found.iterations[worst])} iterations. Raise epsilon (blur, for cloud_loss), raise max_iterations (now "
        f"{settings.max_iterations}), or accept a larger tolerance; solve() gives the duality gap of each problem."
    )
    if settings.strict:
        raise RuntimeError(message)
    warnings.warn(message, ConvergenceWarning, stacklevel=level_of_the_caller())


def _takes_weight_gradients(problem: EntropicProblem) -> bool:
    return makes_graph(problem.p, problem.q)


def _warn_of_uncertain(problem: EntropicProblem, found: Potentials) -> None:
    error, spread = found.potential_error, found.spread
    if error is None or spread is None:
        return
    poor = error > UNCERTAIN * spread + LITTLE * problem.epsilon.detach()
    if bool(poor.any()):
        share = (error / spread)[poor].amax()
        warnings.warn(
            f"the gradients of the weights are uncertain in {int(poor.sum())} of {poor.numel()} entropic problems, by "
            f"{100 * float(share):.2g} % in the worst: the plan falls into parts that hardly exchange mass. Raise "
            "epsilon; solve(...).potential_error gives it for each problem. Values and gradients of costs are right.",
            ConvergenceWarning,
            stacklevel=level_of_the_caller(),
        )
