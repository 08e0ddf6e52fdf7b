"""Barycenters of histograms: the histogram that is nearest to several ones on average.

    min over a of  sum_k w_k OT(a, p_k)        OT(a, p) = min <C, P> + epsilon sum P (log P - 1)

The entropy blurs a; debiased, a is the minimum of the weighted Sinkhorn divergences, and the barycenter of equal
histograms is that histogram. Both are found by the plain iteration (`iteration`: J.-D. Benamou et al., Iterative
Bregman Projections for Regularized Transportation Problems, 2015; H. Janati, M. Cuturi, A. Gramfort, Debiased Sinkhorn
barycenters, 2020). Where it is slow Newton's method follows: on the dual of plain barycenters (`ascent`), and on the
equations of debiased ones (`newton`). These equations (`equations`) also give the error of debiased barycenters
(`debiased_error`) and the derivatives (`gradient`).
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from otloss._autograd import check_first_derivative, check_no_transform
from otloss._checks import (
    check_broadcast,
    check_count,
    check_finite,
    check_floating,
    check_last_axis,
    check_positive,
    has_tangent,
)
from otloss._public import public
from otloss.costs import Cost, as_cost
from otloss.costs.cost import makes_graph
from otloss.solvers.barycenter.ascent import ascend_once_compiled
from otloss.solvers.barycenter.gradient import attach_gradient
from otloss.solvers.barycenter.iteration import iterate
from otloss.solvers.barycenter.newton import take_newton_steps
from otloss.solvers.barycenter.problem import NUMBERS, BarycenterProblem, BarycenterResult
from otloss.solvers.convergence import ConvergenceWarning, level_of_the_caller
from otloss.solvers.histograms import MASS_TOLERANCE
from otloss.solvers.options import DEFAULT_TOLERANCE


@public
def barycenter(
    p: Float[Tensor, "*batch k m"],
    cost: Cost | Float[Tensor, "n m"],
    weights: Float[Tensor, "*batch k"] | None = None,
    *,
    epsilon: float,
    debiased: bool = False,
    tolerance: float | None = None,
    max_iterations: int = 10_000,
) -> Float[Tensor, "*batch n"]:
    """Return the entropic barycenter of k histograms, per problem.

    Args:
        p: (..., k, m) histograms of one mass.
        cost: (n, m), or a cost object; C[i, j] is the price from bin i of the barycenter to bin j of the histograms.
        weights: (..., k) of the histograms, >= 0 with sum 1; 1 / k each by default.
        epsilon: above 0, in the unit of the cost. It blurs the barycenter, by about sqrt(epsilon / 2) for squared
            distances.
        debiased: whether to take that blur out; for a symmetric cost between the same bins. Where exp(-cost / epsilon)
            has negative eigenvalues there may be several barycenters: a `ConvergenceWarning` tells it up to 256 bins.
        tolerance: None for 1e-5 in float32, 1e-8 in float64: of the error, an estimate of the sum of the absolute
            errors of the barycenter as a share of its mass. Debiased with more than 256 bins it may be too low where
            the blur is far wider than the details of the histograms.
        max_iterations: at most; a `ConvergenceWarning` tells where they are not enough, or where rounding does not
            determine a debiased barycenter to the tolerance: at an epsilon whose blur is far wider than the bins.

    Returns:
        (..., n), in the promoted dtype, of the mass of the histograms whether it converged or not. It is found by
        iteration; Newton's method follows where that is slow, debiased with at most 256 bins. Differentiable once in p,
        the weights and the cost; the gradient holds the plans, k n m entries per problem, and inverts k n x n matrices.
        Bins with less than 1e-12 of the mass count as empty there. Debiased, with at most 256 bins, the search goes
        on to an error of 1e-10 for it, and a `ConvergenceWarning` tells where rounding is more than 1 % of it in random
        directions. With more bins a tolerance of 1e-8 or less may be needed.

    Raises:
        TypeError: if p, the weights or a cost matrix is not a floating tensor.
        ValueError: if shapes or masses do not fit, a number is negative or not finite, or debiased=True and the cost is
            not square and symmetric.
        RuntimeError: if a second derivative is asked for, or a gradient is singular to rounding.

    Source:
        J.-D. Benamou et al., 2015; H. Janati, M. Cuturi, A. Gramfort, Debiased Sinkhorn barycenters, 2020.

    Example:
        >>> from otloss.costs import LineCost
        >>> ends = torch.eye(5)[[0, 4]]
        >>> barycenter(ends, LineCost(torch.arange(5.0), power=2), epsilon=0.1, debiased=True).round(decimals=4)
        tensor([0., 0., 1., 0., 0.])
    """
    max_iterations = check_count("max_iterations", max_iterations)
    problem = read_problem(p, cost, weights, epsilon, debiased)
    default = DEFAULT_TOLERANCE[torch.promote_types(problem.dtype, torch.float32)]
    tolerance = default if tolerance is None else check_positive("tolerance", tolerance)
    if not problem.p.numel():  # no problems
        nothing = problem.p.sum((-2, -1)).unsqueeze(-1)
        return nothing.expand(*nothing.shape[:-1], problem.cost.shape[0]).to(problem.dtype)
    inputs = problem.p, problem.weights, *problem.cost.tensors()
    with_graph = makes_graph(*inputs)
    if with_graph and not has_tangent(*inputs):
        check_no_transform()  # torch.func differentiates as create_graph=True does
    check_first_derivative(*inputs)
    with torch.no_grad(), np.errstate(all="ignore"):
        fixed = problem.detach()
        warn_of_several_barycenters(fixed)
        result = find_barycenter(fixed, tolerance, max_iterations, with_graph=with_graph)
    if not bool((result.error <= tolerance).all()):
        warn_of_convergence(result, tolerance, max_iterations, debiased=debiased)
    a = attach_gradient(problem, result) if with_graph else problem.give_mass(result.potentials.log_a)
    return a.to(problem.dtype)


def find_barycenter(
    problem: BarycenterProblem, tolerance: float, max_iterations: int, *, with_graph: bool
) -> BarycenterResult:
    """Return the best result of the plain iteration, Newton's method where that is slow, and more iterations.

    Newton's method fails for many debiased problems at a small epsilon, and for plain ones whose histograms lie nearly
    in one bin each (48 of 3,000 of 2 to 8 bins; with more iterations 6 do not converge). Extrapolations may keep an
    iteration that is slow at first from converging, so the last one has none.

    For gradients of debiased problems the search goes on to a smaller error. An error that the tolerance allows may be
    far larger in the derivatives, where eigenvalues of the equations are small: at a tolerance of 1e-5 derivatives were
    more than 2 % off in 15 of 144 problems, at 1e-8 in 3, at 1e-10 in one.
    """
    batch, problem = problem.p.shape[:-2], problem.flatten()
    if with_graph and problem.suits_newton:
        tolerance = min(tolerance, NUMBERS.gradient_tolerance)
    start = problem.first_potentials()
    if not (problem.suits_ascent or problem.suits_newton):
        return iterate(problem, start, tolerance, max_iterations).reshape(batch)
    checked_after = NUMBERS.debiased_checked_after if problem.debiased else NUMBERS.window
    first = iterate(
        problem, start, tolerance, max_iterations, patience=NUMBERS.patience, checked_after=checked_after
    )  # fmt: skip
    remaining_iterations = max_iterations - first.iterations
    plainly = partial(iterate, plain_after=0 if problem.debiased else NUMBERS.plain_after)
    # The methods, and the error above which a problem takes each.
    methods: list[tuple[Callable[..., BarycenterResult], float]]
    if problem.debiased:
        goes_on = partial(iterate, patience=remaining_iterations, checked_after=NUMBERS.hard_checked_after)
        # Smaller errors are the rounding that Newton's method ends with.
        near, near_plain = max(tolerance, NUMBERS.near), max(tolerance, NUMBERS.near_plain)
        methods = [(take_newton_steps, tolerance), (goes_on, near), (plainly, near_plain)]
    else:
        methods = [(partial(ascend_once_compiled, with_graph=with_graph), tolerance), (plainly, tolerance)]
    result = first
    for method, largest_error in methods:
        is_open, remaining_iterations = ~(result.error <= largest_error), max_iterations - result.iterations
        if remaining_iterations <= 0 or not bool(is_open.any()):
            continue
        chosen = problem.choose(is_open)
        if method is plainly and len(chosen.p) * chosen.plan_entries > NUMBERS.iterated_entries:
            continue
        best = (first if problem.debiased else result).potentials.choose(is_open)
        other = method(chosen, best, tolerance, remaining_iterations)
        # Where neither error is known, Newton's method has the better guess.
        result = result.choose_better(is_open, other, at_ties=method is take_newton_steps)
    return result.reshape(batch)


def warn_of_convergence(result: BarycenterResult, tolerance: float, max_iterations: int, *, debiased: bool) -> None:
    fix = (
        "Raise max_iterations; if that changes nothing, the blur hides details of the answer: lower epsilon, or raise "
        "the tolerance."
        if debiased
        else "Raise epsilon, max_iterations or the tolerance."
    )
    warnings.warn(
        f"the barycenter did not converge: an error of {float(result.error.max()):.3g} where {tolerance:.3g} was asked "
        f"for, after at most {max_iterations} iterations. {fix}",
        ConvergenceWarning,
        stacklevel=level_of_the_caller(),
    )


def warn_of_several_barycenters(problem: BarycenterProblem) -> None:
    """Warn where exp(-C / epsilon) has a negative eigenvalue: the objective of debiased barycenters is not convex."""
    n = problem.cost.shape[0]
    if not problem.debiased or n > NUMBERS.newton_bins:
        return
    cost = problem.cost.dense()
    kernel = ((cost.amin() - cost) / problem.epsilon).exp()  # at most 1
    smallest = max(NUMBERS.negative_eigenvalue, n * torch.finfo(problem.dtype).eps)
    eye = torch.eye(n, dtype=kernel.dtype, device=kernel.device)
    if bool(torch.linalg.cholesky_ex(kernel + smallest * eye)[1]):
        warnings.warn(
            "the debiased barycenter may be one of several: exp(-cost / epsilon) has a negative eigenvalue, so that "
            "the objective is not convex. Use distances or squared distances of points, or zeros on the diagonal of "
            "the cost and a smaller epsilon.",
            ConvergenceWarning,
            stacklevel=level_of_the_caller(),
        )


def read_problem(p: Any, cost: Any, weights: Any, epsilon: Any, debiased: bool) -> BarycenterProblem:
    """Check the arguments of `barycenter`, and return them in one precision and batch shape."""
    fitted = as_cost(cost)
    mass = check_histograms(p, fitted)
    if weights is None:
        weights = p.new_full((p.shape[-2],), 1 / p.shape[-2])
    else:
        check_weights(weights, p.shape[-2])
    check_cost(fitted, debiased=debiased)
    dtype = torch.promote_types(torch.promote_types(p.dtype, weights.dtype), cost.dtype)
    wide = torch.float64 if p.device.type != "mps" else torch.float32
    batch = check_broadcast(p=p.shape[:-2], weights=weights.shape[:-1])
    # Masses, and the sum of the weights, agree up to rounding, which may exceed the tolerance.
    p = p.to(wide) * (mass.mean(-1, keepdim=True) / mass).to(wide).unsqueeze(-1)
    weights = weights.to(wide) / weights.detach().to(wide).sum(-1, keepdim=True)
    p, weights = p.expand(*batch, *p.shape[-2:]), weights.expand(*batch, p.shape[-2])
    epsilon = float(check_positive("epsilon", epsilon))
    return BarycenterProblem(p, fitted.to(p.device, wide), weights, epsilon, debiased, dtype)


def check_histograms(p: Any, cost: Cost) -> Tensor:
    """Return the masses (..., k) of the histograms."""
    check_floating("p", p)
    if p.dim() < 2 or 0 in p.shape[-2:]:
        raise ValueError(
            f"p has shape {tuple(p.shape)}, expected (..., k, bins): k histograms of one problem; join single ones "
            "with torch.stack."
        )
    check_last_axis("p", p, cost.shape[1])
    mass = p.detach().sum(-1, dtype=torch.float64)
    is_equal = (mass - mass[..., :1]).abs() <= MASS_TOLERANCE[p.dtype] * mass  # not for NaN and infinity
    if not bool(is_equal.all()) or (p.numel() and bool(p.detach().amin() < 0)):
        check_finite("p", p)
        raise ValueError(
            f"p holds weights from {float(p.min()):.3g} and masses from {float(mass.min()):.6g} to "
            f"{float(mass.max()):.6g}, expected weights >= 0 and one mass: p = p.clamp(min=0), then "
            "p / p.sum(-1, keepdim=True)."
        )
    if bool((mass == 0).any()):
        raise ValueError("p holds a histogram without mass, expected some; leave that problem out.")
    return mass


def check_weights(weights: Any, count: int) -> None:
    check_last_axis("weights", check_floating("weights", weights), count)
    total = weights.detach().sum(-1, dtype=torch.float64)
    if bool((weights < 0).any()) or not bool(((total - 1).abs() <= MASS_TOLERANCE[weights.dtype]).all()):
        raise ValueError(f"weights have sums of {total.tolist()}, expected weights >= 0 with sum 1; normalise them.")


def check_cost(cost: Cost, *, debiased: bool) -> None:
    if debiased and cost.shape[0] != cost.shape[1]:
        raise ValueError(f"debiased=True needs the costs among the same bins, but the cost has shape {cost.shape}.")
    if cost.batch_shape:
        raise ValueError(f"the cost has leading axes {tuple(cost.batch_shape)}, expected one matrix (n, m) for all.")
    if debiased and not cost.is_symmetric():
        raise ValueError(
            "debiased=True needs the costs among the same bins, but C[i, j] and C[j, i] differ; pass "
            "(cost + cost.mT) / 2, or PointCost(x)."
        )
