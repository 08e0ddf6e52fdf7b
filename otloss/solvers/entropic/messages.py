"""What an entropic search tells its caller: errors and warnings."""

from __future__ import annotations

import math
import warnings
from typing import NamedTuple

import torch
from jaxtyping import Bool
from torch import Tensor

from otloss._numba import may_run_on
from otloss.solvers.convergence import ConvergenceWarning, level_of_the_caller
from otloss.solvers.entropic.dense_newton import DENSE_NEWTON_LIMITS
from otloss.solvers.entropic.implicit.grid import suits_axes
from otloss.solvers.entropic.interface import SearchResult
from otloss.solvers.options import BOTH_KEPT, Settings, SmallEpsilonError
from otloss.solvers.problem import Problem, tolerance_of


class WarningLimits(NamedTuple):
    """When a call warns or raises.

    Attributes:
        slow_pairs, slow_system: work on a CPU of some ten seconds: pairs of cells in line for the iterations of a small
            epsilon, and cells to the power of three for the linear system of "implicit".
        uncertain: a larger error of potentials, as a share of their range, gives a warning.
        smallest_epsilon, largest_smallest: epsilon over the largest potential must be at least `smallest_epsilon` over
            the tolerance, or `largest_smallest` if that is less. Below, rounding in float64 changes entries of the plan
            by more than the tolerance.
        astray: no balanced problem has larger potentials, as a multiple of the largest cost plus a hundred epsilons.
        no_mass: a bin with a larger potential over the marginal penalty keeps less than exp(-40) of its weight.
    """

    slow_pairs: int = 2**21
    slow_system: int = 10**10
    uncertain: float = 1e-2
    smallest_epsilon: float = 1e-15
    largest_smallest: float = 1e-8
    astray: float = 100.0
    no_mass: float = 40.0


WARNING_LIMITS = WarningLimits()


def warn_of_slow_images(problem: Problem, grad: str) -> None:
    """Warn of problems between the cells of a grid where products along the axes do not apply: these take long."""
    cost = problem.cost.as_grid()
    if cost is None or len(cost.cells) < 2 or not may_run_on(problem.p):
        return
    cells, problems = cost.shape[0], problem.batch.numel()
    what = f"{' x '.join(map(str, cost.cells))} cells ({problems} problem{'s' * (problems > 1)})"
    if grad == "implicit" and problems * cells**3 >= WARNING_LIMITS.slow_system and not suits_axes(problem):
        warnings.warn(
            f'grad="implicit" between {what} forms and solves dense systems of {cells} equations here: the time grows '
            'with the number of cells to the power of three. Use grad="envelope" if first derivatives are enough, or '
            "sum blocks of cells to a coarser grid; balanced problems at an epsilon that is a number, of at least "
            f"{_rounded_up(cost.smallest_epsilon_for_products)}, need no dense system.",
            stacklevel=level_of_the_caller(),
        )
    limit = cost.smallest_epsilon_for_products
    smallest = float(problem.epsilon.detach().amin()) if problems else limit
    if smallest < limit and problems * cells * sum(cost.cells) >= WARNING_LIMITS.slow_pairs:
        warnings.warn(
            f"epsilon is {smallest:.3g} between {what}: below {_rounded_up(limit)} products along the axes would "
            "underflow, an iteration takes about ten times as long, and hundreds to thousands of them are needed. "
            f"Raise epsilon to {_rounded_up(limit)}, or sum blocks of cells to a coarser grid.",
            stacklevel=level_of_the_caller(),
        )


def _rounded_up(number: float) -> str:
    """Return a number of three digits that is not below this one."""
    text = f"{number:.3g}"
    return text if float(text) >= number else f"{number + 10.0 ** (math.floor(math.log10(number)) - 2):.3g}"


def smallest_epsilon_over_potential(tolerance: float) -> float:
    """Return the share of the largest potential below which epsilon is too small for float64."""
    return min(WARNING_LIMITS.smallest_epsilon / tolerance, WARNING_LIMITS.largest_smallest)


def is_astray(problem: Problem, result: SearchResult) -> Bool[Tensor, "*batch"]:
    """Return whether a search ended where no solution is: Newton's method may overflow, or drift along a constant."""
    explained = WARNING_LIMITS.astray * (problem.cost.largest() + 100 * problem.epsilon.detach())
    size = torch.maximum(result.f.abs().amax(-1), result.g.abs().amax(-1))
    is_too_large = ~(size <= explained)
    # With a marginal penalty potentials may be as large as that times the logarithm of a mass.
    return is_too_large if problem.marginal_penalty is None else is_too_large & ~result.error.isfinite()


def check_epsilon(problem: Problem, result: SearchResult, tolerance: float) -> None:
    """Raise if epsilon is so small, relative to the potentials, that their rounding decides the plan.

    The potentials count and not the costs, since a large cost that forbids a pair is harmless where no mass has to take
    it. For the same reason, with a marginal penalty, potentials of bins that keep no mass are cut off. A search that
    went astray says nothing of epsilon.
    """
    epsilon, smallest_ratio = problem.epsilon.detach(), smallest_epsilon_over_potential(tolerance)
    if not result.f.numel() or not result.g.numel():
        return
    largest = max(potential.abs().amax().item() for potential in (result.f, result.g))
    if epsilon.amin().item() >= smallest_ratio * largest:
        return
    penalty = problem.marginal_penalty or BOTH_KEPT
    size = torch.maximum(*(
        potential.masked_fill(weights.detach() == 0, 0.0).clamp(max=WARNING_LIMITS.no_mass * rho).abs().amax(-1)
        for potential, weights, rho in ((result.f, problem.p, penalty.p), (result.g, problem.q, penalty.q))
    ))  # fmt: skip
    is_outside = (epsilon < smallest_ratio * size) & ~is_astray(problem, result)
    if is_outside.any():
        least = 1.05 * smallest_ratio * float(size.max())  # Another search ends at slightly other potentials.
        raise SmallEpsilonError(
            f"epsilon is {float(epsilon[is_outside][0]):.3g} where potentials are as large as "
            f"{float(size[is_outside][0]):.3g}, expected at least {least:.3g}: rounding in float64 "
            "would decide the answer. Use emd or solve(..., epsilon=None), or a larger epsilon.",
            least,
        )


def warn_of_errors(problem: Problem, result: SearchResult, settings: Settings) -> None:
    """Warn of the worst problem that did not converge."""
    tolerance = tolerance_of(problem, settings)
    converged = result.error <= tolerance
    error = result.error.nan_to_num(nan=torch.inf)
    error = error if problem.share_moved is None else error / problem.share_moved.to(error)
    worst = tuple(int(i) for i in (error == error.max()).nonzero()[0])
    name = f"problem {worst}" if worst else "the problem"
    count = int((~converged).sum())
    message = (
        f"{count} of {converged.numel()} entropic problems did not converge; worst is {name}, with a marginal "
        f"error of {float(error[worst]):.3g} where {tolerance / problem.smallest_share_moved:.3g} was asked for, after "
        f"{int(result.iterations[worst])} iterations. Raise epsilon (blur, for cloud_loss), raise max_iterations (now "
        f"{settings.max_iterations}), or accept a larger tolerance; solve() gives the duality gap of each problem."
    )
    warnings.warn(message, ConvergenceWarning, stacklevel=level_of_the_caller())


def warn_of_uncertain(problem: Problem, result: SearchResult) -> None:
    error, range_of_g = result.potential_error, result.potential_range
    is_uncertain = (
        error > WARNING_LIMITS.uncertain * range_of_g + DENSE_NEWTON_LIMITS.negligible_error * problem.epsilon.detach()
    )
    if bool(is_uncertain.any()):
        share = float((error / range_of_g)[is_uncertain].amax())
        size = f"by {100 * share:.2g} %" if math.isfinite(share) else "by an unknown amount"
        warnings.warn(
            f"the gradients of the weights are uncertain in {int(is_uncertain.sum())} of {is_uncertain.numel()} "
            f"entropic problems, {size} in the worst: the plan falls into parts that hardly exchange mass. Raise "
            "epsilon; solve(...).potential_error gives it for each problem. Values and gradients of costs are right.",
            ConvergenceWarning,
            stacklevel=level_of_the_caller(),
        )
