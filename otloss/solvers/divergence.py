"""The Sinkhorn divergence: the entropic transport cost without its bias, from three problems on the path of `solve`."""

from __future__ import annotations

import dataclasses

import torch
from jaxtyping import Float
from torch import Tensor

from otloss._checks import float64_or, needs_torch
from otloss._per_example import per_example
from otloss._public import public
from otloss.costs import Cost, as_cost, costs_within
from otloss.solvers.histograms import weights_or_uniform
from otloss.solvers.options import BOTH_KEPT, MarginalPenalty, Penalty, Settings, is_kept
from otloss.solvers.problem import Problem, tolerance_of
from otloss.solvers.reductions.large_epsilon import reduce as reduce_epsilon
from otloss.solvers.solve import check_is_entropic, is_implicit, pose_for_device, solve_problem
from otloss.solvers.transport import Transport

ROUNDINGS = 10.0  # so many roundings of terms of the size of epsilon, which cancel in a divergence, count as error


@public
@per_example(
    is_traced=is_implicit, p=1, q=1, cost=2, epsilon=0, cost_p=2, cost_q=2, marginal_penalty=(0, 0), start=(1, 1),
)  # fmt: skip
def sinkhorn_divergence(
    p: Float[Tensor, "*batch n"] | None,
    q: Float[Tensor, "*batch m"] | None,
    cost: Cost | Float[Tensor, "*batch n m"],
    *,
    epsilon: float | Float[Tensor, "*batch"],
    cost_p: Cost | Float[Tensor, "*batch n n"] | None = None,
    cost_q: Cost | Float[Tensor, "*batch m m"] | None = None,
    epsilon_relative_to: str | None = None,
    marginal_penalty: Penalty = None,
    grad: str = "envelope",
    tolerance: float | None = None,
    max_iterations: int = 10_000,
    start: tuple[Tensor, Tensor] | None = None,
    impl: str = "auto",
) -> Float[Tensor, "*batch"]:
    """Return the debiased divergence `S(p, q) - S(p, p) / 2 - S(q, q) / 2`, S the entropic transport cost, per problem.

    It is zero at p = q, and at least zero where `exp(-C / epsilon)` is positive definite: for distances, squared
    distances and the cosine cost, not for every matrix. What the duality gaps of the three terms explain below zero is
    zero, with its gradient. A root is safe as `(value + 1e-6).sqrt()`: errors above zero remain.

    Formulas: docs/guide/definitions.md#def-entropic

    Args:
        p, q, cost, epsilon: as for `sinkhorn`, but costs are finite and at least 0; with `marginal_penalty`,
            `epsilon (mass_p - mass_q)^2 / 2` is added. S(p, p) has the penalty of p on both sides, and S(q, q) the one
            of q; where they differ, the value is still at least 0, but above 0 at p = q.
        cost_p, cost_q: the costs among the bins of p, and among the bins of q. A cost object and a symmetric matrix
            imply them; with a rectangular or asymmetric matrix they are required.
        epsilon_relative_to: as for `sinkhorn`; it is the mean of `cost`, for all three.
        start: as for `sinkhorn`, of S(p, q) alone.
        marginal_penalty, grad, tolerance, max_iterations, impl: as for `sinkhorn`.

    Returns:
        (...), in the promoted dtype, differentiable as `sinkhorn` is.

    Raises:
        TypeError, RuntimeError: as for `sinkhorn`.
        ValueError: as for `sinkhorn`; if the costs among the bins are not known, or not symmetric.

    Source:
        J. Feydy et al., Interpolating between Optimal Transport and MMD using Sinkhorn Divergences, 2019.

    Example:
        >>> import torch
        >>> from otloss.costs import PointCost
        >>> x, y = torch.tensor([[0.0], [1.0]]), torch.tensor([[0.0], [3.0]])
        >>> p = torch.tensor([0.5, 0.5])
        >>> round(float(sinkhorn_divergence(p, p, PointCost(x, y), epsilon=0.1)), 4)
        2.0
    """
    check_is_entropic(epsilon)
    settings = Settings(epsilon_relative_to, marginal_penalty, grad, tolerance, max_iterations, start, impl)
    weights_or_uniform(p, q, cost)  # which checks the order of the arguments
    among_p, among_q = _among(as_cost(cost), cost_p, cost_q)
    problem = pose_for_device(p, q, cost, epsilon=epsilon, settings=settings)
    problem, _ = reduce_epsilon(problem, settings) or (problem, None)  # for all three alike
    settings = dataclasses.replace(settings, tolerance=tolerance_of(problem, settings))
    dtype, wide = problem.dtype, float64_or(problem.p.dtype, problem.p.device)
    problem = dataclasses.replace(problem, dtype=wide)  # the difference would lose digits
    return _debiased(problem, among_p, among_q, settings).to(dtype)


def _debiased(problem: Problem, among_p: Cost, among_q: Cost, settings: Settings) -> Float[Tensor, "*batch"]:
    """Return S(p, q) - S(p, p) / 2 - S(q, q) / 2, and what the masses add in unbalanced problems."""
    between = solve_problem(problem, settings)
    value, terms = between.value, [between]
    penalty = problem.marginal_penalty or BOTH_KEPT
    for weights, among, rho in ((problem.p, among_p, penalty.p), (problem.q, among_q, penalty.q)):
        penalties = None if is_kept(rho) else MarginalPenalty(rho, rho)
        terms.append(solve_problem(_with_itself(problem, weights, among, penalties), settings))
        value = value - terms[-1].value / 2
        if problem.marginal_penalty is not None and is_kept(rho):  # the KL with M = 1
            mass = weights.sum(-1)
            value = value - problem.epsilon * (mass.square() - mass - torch.xlogy(mass, mass)) / 2
    if problem.marginal_penalty is not None:
        apart = problem.p.sum(-1) - problem.q.sum(-1)
        value = value + problem.epsilon * apart.square() / 2
    return _without_error_below_zero(problem, value, terms)


def _with_itself(problem: Problem, weights: Tensor, cost: Cost, penalty: MarginalPenalty | None) -> Problem:
    """Return the problem of the weights of one side with themselves."""
    return dataclasses.replace(
        problem, p=weights, q=weights, cost=cost.to(problem.cost.dtype), marginal_penalty=penalty, start=None,
        is_symmetric=True,
    )  # fmt: skip


def _without_error_below_zero(problem: Problem, value: Tensor, terms: list[Transport]) -> Float[Tensor, "*batch"]:
    """Return the value, or 0 with its gradient where gaps and rounding of its terms explain that it is below 0."""
    if needs_torch(value) or not bool((value.detach() < 0).any()):
        return value
    mass_p, mass_q = problem.p.detach().sum(-1), problem.q.detach().sum(-1)
    sizes = sum(term.value.detach().abs() for term in terms)
    sizes = sizes + ROUNDINGS * problem.epsilon.detach() * (mass_p + mass_q + mass_p * mass_q)
    error = sum(term.gap for term in terms) + torch.finfo(problem.cost.dtype).eps * sizes
    is_error = (value.detach() < 0) & (value.detach() >= -error)
    return value - value.detach().where(is_error, 0.0)


def _among(cost: Cost, cost_p: Cost | Tensor | None, cost_q: Cost | Tensor | None) -> tuple[Cost, Cost]:
    if cost_p is None or cost_q is None:
        if (cost_p is None) != (cost_q is None):
            raise ValueError("only one of cost_p and cost_q is given, expected both or none.")
        among_both = costs_within(cost)
        if not all(among is cost or among.is_symmetric() for among in among_both):  # of a function of two clouds
            raise ValueError(
                "the metric gives other costs of x to y than of y to x, and a divergence needs the same ones; pass "
                "their mean, lambda x, y: (metric(x, y) + metric(y, x).mT) / 2, or take sinkhorn."
            )
        return among_both
    both = []
    for name, matrix, size in (("cost_p", cost_p, cost.shape[0]), ("cost_q", cost_q, cost.shape[1])):
        among = as_cost(matrix)
        if among.shape != (size, size):
            raise ValueError(f"{name} has shape {among.shape}, expected {(size, size)}: the costs among those bins.")
        if not among.is_symmetric():
            raise ValueError(
                f"{name} is not symmetric, expected the costs among the same bins; pass a matrix ({name} + {name}.mT) "
                "/ 2, or PointCost(x)."
            )
        both.append(among)
    return both[0], both[1]
