"""Entropic transport and its debiased divergence. The formulas are in `otloss.solvers.entropic`."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

from jaxtyping import Float
from torch import Tensor

from otloss._autograd import check_no_tangent, eager
from otloss._foreign import explains_foreign_keywords
from otloss.costs import Cost, DenseCost, PointCost, as_cost, costs_within
from otloss.solvers.entropic.dense import dense_value
from otloss.solvers.entropic.geomloss import with_start
from otloss.solvers.entropic.gradients import GraphState, envelope_value, implicit_state
from otloss.solvers.entropic.potentials import Found, Potentials, find_potentials
from otloss.solvers.entropic.problem import EntropicProblem, Settings, entropic_problem
from otloss.solvers.histograms import weights_or_uniform
from otloss.solvers.partial import partial_entropic_problem, partial_value
from otloss.solvers.plain import is_plain


@explains_foreign_keywords
@eager
def sinkhorn(
    p: Float[Tensor, "*batch n"] | None,
    q: Float[Tensor, "*batch m"] | None,
    cost: Cost | Float[Tensor, "*batch n m"],
    *,
    epsilon: float | Float[Tensor, "*batch"],
    mass: float | Float[Tensor, "*batch"] | None = None,
    epsilon_relative_to: str | None = None,
    marginal_penalty: float | None = None,
    grad: str = "envelope",
    tolerance: float | None = None,
    max_iterations: int = 10_000,
    start: tuple[Tensor, Tensor] | None = None,
    strict: bool = False,
    impl: str = "auto",
    reach: float | None = None,
) -> Float[Tensor, "*batch"]:
    """Return the entropic transport cost, min over plans P of `<C, P> + epsilon sum P log(P / p q^T)`, per problem.

    The sum is `KL(P | p q^T)`; masses other than one would add `mass^2 - mass` to the latter, which no plan can change.

    Args:
        p: (..., n) weights >= 0, or None for 1 / n each. The leading axes of p, q and the cost broadcast.
        q: (..., m) weights >= 0, with the mass of p up to rounding unless `marginal_penalty` is given; or None for
            1 / m each.
        cost: (n, m), one matrix per problem (..., n, m), or a cost object; C[i, j] is the price per unit of mass.
            A matrix may have +inf for pairs that may not exchange mass, and, without `marginal_penalty`, negative
            entries.
        epsilon: above 0, in the unit of the cost; a number, or one per problem (...). Balanced problems are solved for
            1e8 times the largest cost where it is above that: the limit, the product of the weights, is as near.
        mass: the amount that is moved, as for `emd`; None for all. The KL then also counts what stays: see
            `otloss.solvers.partial`.
        epsilon_relative_to: "mean_cost" takes epsilon as a share of the mean of all entries of C.
        marginal_penalty: rho, the price of mass that appears or vanishes, in the unit of the cost: adds
            `rho KL(P 1 | p) + rho KL(P^T 1 | q)` in place of the marginal constraints. All three KL are then those
            between measures, `KL(a | b) = sum a log(a / b) - a + b`.
        grad: "envelope", first derivatives, exact at convergence, no history held; "implicit", also second ones, by a
            linear system of the size of the smaller side.
        tolerance: sum of the errors of both marginals relative to the mass; None for 1e-5 in float32, 1e-8 in float64.
        max_iterations: at most. After a thousand, balanced problems of up to 2**20 entries go to Newton's method.
        start: potentials (f, g) of a similar problem.
        strict: raise where a problem does not converge, in place of a `ConvergenceWarning`.
        impl: "compiled", scaling form on the CPU, for matrices; "torch", log domain, any cost and device; "geomloss",
            the same from a start by GeomLoss, for one pair of clouds; "auto", the first for problems of up to
            2**24 entries on a CPU, the last for large clouds on a GPU that has KeOps, else the second. Balanced
            problems between two clouds of a `PointCost` ("sqeuclidean" or "euclidean", up to three axes, at least
            2**22 pairs) on a CPU start from clusters of points; the tolerance means the same.
        reach: the old name of `marginal_penalty`, for one more release.

    Returns:
        (...), in the promoted dtype; its unit is that of the cost times that of the mass. Differentiable in p and q
        (gradients centred over the bins unless `marginal_penalty` is given, one-sided at bins without mass), the cost,
        and what a cost object was built from. Where p and q hold no mass the value and its gradients are 0.

    Raises:
        TypeError: if p, q or a cost matrix is not a floating tensor.
        ValueError: if shapes or masses differ, a weight is negative, a number is not finite or in range, no plan avoids
            the pairs that +inf forbids, or epsilon is below 1e-8 of the potentials, where their rounding decides the
            plan.
        NotImplementedError: if a derivative in forward mode is asked of grad="envelope".
        RuntimeError: with strict=True, if a problem does not converge; if a second derivative of "envelope" is asked
            for, or "implicit" meets equations that are singular to rounding.

    Source:
        M. Cuturi, Sinkhorn Distances: Lightspeed Computation of Optimal Transport, 2013.

    Example:
        >>> import torch
        >>> p, q = torch.tensor([0.5, 0.5]), torch.tensor([0.25, 0.75])
        >>> cost = torch.tensor([[0.0, 1.0], [1.0, 0.0]])
        >>> sinkhorn(p, q, cost, epsilon=0.01), sinkhorn(p, q, cost, epsilon=100.0)
        (tensor(0.2522), tensor(0.4991))
    """
    settings = Settings(
        epsilon_relative_to, marginal_penalty, grad, tolerance, max_iterations, start, strict, impl, reach
    )
    p, q = weights_or_uniform(p, q, cost)
    found = dense_value(p, q, cost, epsilon=epsilon, settings=settings) if mass is None else None
    if isinstance(found, Tensor):
        return found
    if found is None and not is_plain(cost):
        from otloss.solvers.solve import transport  # which imports this module

        return transport(p, q, cost, epsilon=epsilon, mass=mass, settings=settings, settle=None).value
    if mass is not None:
        part = partial_entropic_problem(p, q, cost, mass, epsilon=epsilon, settings=settings)
        return partial_value(solved(part, settings).value, part, settings).to(part.dtype)
    problem = entropic_problem(p, q, cost, epsilon=epsilon, settings=settings)
    return solved(problem, settings, begun=found).value.to(problem.dtype)


@explains_foreign_keywords
@eager
def sinkhorn_divergence(
    p: Float[Tensor, "*batch n"] | None,
    q: Float[Tensor, "*batch m"] | None,
    cost: Cost | Float[Tensor, "*batch n m"],
    *,
    epsilon: float | Float[Tensor, "*batch"],
    cost_p: Cost | Float[Tensor, "*batch n n"] | None = None,
    cost_q: Cost | Float[Tensor, "*batch m m"] | None = None,
    epsilon_relative_to: str | None = None,
    marginal_penalty: float | None = None,
    grad: str = "envelope",
    tolerance: float | None = None,
    max_iterations: int = 10_000,
    start: tuple[Tensor, Tensor] | None = None,
    strict: bool = False,
    impl: str = "auto",
    reach: float | None = None,
) -> Float[Tensor, "*batch"]:
    """Return the debiased divergence `S(p, q) - S(p, p) / 2 - S(q, q) / 2`, S the entropic transport cost, per problem.

    It is zero at p = q, and at least zero where `exp(-C / epsilon)` is positive definite: for distances, squared
    distances and the cosine cost, not for every matrix.

    Args:
        p, q, cost, epsilon: as for `sinkhorn`, but costs are finite and at least 0; with `marginal_penalty`,
            `epsilon (mass_p - mass_q)^2 / 2` is added.
        cost_p, cost_q: the costs among the bins of p, and among those of q. A cost object and a symmetric matrix imply
            them; with a rectangular or asymmetric matrix they are required.
        epsilon_relative_to: as for `sinkhorn`; the mean cost is that of `cost`, for all three.
        start: as for `sinkhorn`, of S(p, q) alone.
        marginal_penalty, grad, tolerance, max_iterations, strict, impl, reach: as for `sinkhorn`.

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
    settings = Settings(
        epsilon_relative_to, marginal_penalty, grad, tolerance, max_iterations, start, strict, impl, reach
    )
    p, q = weights_or_uniform(p, q, cost)
    among_p, among_q = _among(as_cost(cost), cost_p, cost_q)
    problem = entropic_problem(p, q, cost, epsilon=epsilon, settings=settings)
    alone = dataclasses.replace(settings, start=None, epsilon_relative_to=None)
    value = solved(problem, settings).value
    for weights, among in ((problem.p, among_p), (problem.q, among_q)):
        with_itself = dataclasses.replace(problem, p=weights, q=weights, cost=among.to(problem.cost.dtype))
        value = value - solved(with_itself, alone, symmetric=True).value / 2
    if settings.marginal_penalty is not None:
        apart = problem.p.sum(-1) - problem.q.sum(-1)
        value = value + problem.epsilon * apart.square() / 2
    return value.to(problem.dtype)


def _among(cost: Cost, cost_p: Cost | Tensor | None, cost_q: Cost | Tensor | None) -> tuple[Cost, Cost]:
    if cost_p is None or cost_q is None:
        if (cost_p is None) != (cost_q is None):
            raise ValueError("only one of cost_p and cost_q is given, expected both or none.")
        return costs_within(cost)
    found = []
    for name, given, size in (("cost_p", cost_p, cost.shape[0]), ("cost_q", cost_q, cost.shape[1])):
        among = as_cost(given)
        if among.shape != (size, size):
            raise ValueError(f"{name} has shape {among.shape}, expected {(size, size)}: the costs among those bins.")
        if not _is_symmetric(among):
            raise ValueError(
                f"{name} is not symmetric, expected the costs among the same bins; pass a matrix ({name} + {name}.mT) "
                "/ 2, or PointCost(x)."
            )
        found.append(among)
    return found[0], found[1]


def _is_symmetric(cost: Cost) -> bool:
    if isinstance(cost, DenseCost):
        matrix = cost.matrix.detach()
        return bool(((matrix - matrix.mT).abs() <= 1e-5 * matrix.amax()).all()) if matrix.numel() else True
    # A cost between two clouds is its own transpose where both are the same tensor.
    return not isinstance(cost, PointCost) or cost.x is cost.y


class Solved(NamedTuple):
    """A solved problem: its potentials, with "implicit" a state with a graph, and its value.

    The value is in the dtype of the arithmetic, with the graph that was asked for.
    """

    found: Potentials
    state: GraphState | None
    value: Float[Tensor, "*batch"]


def solved(
    problem: EntropicProblem,
    settings: Settings,
    *,
    symmetric: bool = False,
    settle: bool | None = None,
    begun: Found | None = None,
) -> Solved:
    """Solve a problem; `symmetric`, `settle` and `begun` as for `find_potentials`."""
    if settings.grad == "envelope":
        advice = 'use grad="implicit" of sinkhorn, sinkhorn_divergence or solve, or reverse mode.'
        check_no_tangent(advice, *problem.inputs, *problem.cost.tensors())
    found = find_potentials(problem, with_start(problem, settings), symmetric=symmetric, settle=settle, begun=begun)
    if settings.grad == "implicit":
        state = implicit_state(problem, found)
        return Solved(found, state, state.value(problem))
    return Solved(found, None, envelope_value(problem, found.f, found.g))
