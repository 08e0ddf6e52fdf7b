"""The public functions of optimal transport but for the divergence (`divergence`), and the path that each problem goes.

pose            `problem.pose`: what the user gave becomes one checked `Problem`
reduce          `reductions.reduce`: signed costs, a part of the mass, empty sides, a large epsilon
solve           `_solve`: exact, or entropic
differentiate   `derivatives`: the envelope theorem, or the implicit function theorem
restore         `transport.Transport`: the way back through the reductions, and the result
"""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from otloss._per_example import per_example
from otloss._public import public
from otloss.costs import Cost, LineCost
from otloss.solvers.closed_forms.line import finite_in, wasserstein_1d
from otloss.solvers.derivatives import with_envelope, with_implicit_derivatives
from otloss.solvers.entropic.assignment_start import assignment_start
from otloss.solvers.entropic.messages import warn_of_errors
from otloss.solvers.entropic.potentials import find_potentials
from otloss.solvers.entropic.sinkhorn_gpu import check_usable
from otloss.solvers.entropic.solution import solution_of
from otloss.solvers.exact.clouds import solve_between_clouds, suits_clouds
from otloss.solvers.exact.solution import solve_exactly
from otloss.solvers.options import Penalty, Settings, SmallEpsilonError
from otloss.solvers.problem import Problem, pose, tolerance_of
from otloss.solvers.reductions import reduce
from otloss.solvers.reductions.forbidden_prices import without_prices
from otloss.solvers.transport import Solution, Transport

_DEFAULTS = Settings()


def is_implicit(settings: dict[str, Any]) -> bool:
    """Return whether the derivatives of a call go through autograd."""
    return settings.get("grad") == "implicit"


@public
def solve(
    p: Float[Tensor, "*batch n"] | None,
    q: Float[Tensor, "*batch m"] | None,
    cost: Cost | Float[Tensor, "*batch n m"],
    *,
    epsilon: float | Float[Tensor, "*batch"] | None = None,
    mass: float | Float[Tensor, "*batch"] | None = None,
    epsilon_relative_to: str | None = None,
    marginal_penalty: Penalty = None,
    grad: str = "envelope",
    tolerance: float | None = None,
    max_iterations: int = 10_000,
    start: tuple[Tensor, Tensor] | None = None,
    impl: str = "auto",
) -> Transport:
    """Return the solutions of transport problems, exact or entropic, with an error bound for each.

    Formulas: docs/guide/definitions.md#def-transport

    Args:
        p, q, cost: as for `emd` and `sinkhorn`.
        epsilon: None for exact transport, else as for `sinkhorn`.
        mass: the amount that is moved, as for `emd` and `sinkhorn`; None for all.
        grad: as for `sinkhorn`. "implicit" makes `linear_cost`, `potentials`, `plan()` and its products differentiable
            too; with "envelope" a backward pass through them raises RuntimeError.
        start: potentials (f, g) of a similar problem, for exact transport too.
        epsilon_relative_to, marginal_penalty, tolerance, max_iterations, impl: as for `sinkhorn`. Exact transport
            takes none of them.

    Returns:
        A `Transport`.

    Raises:
        TypeError, ValueError, RuntimeError: as `emd` and `sinkhorn`; ValueError also for an option that exact
            transport does not take.

    Example:
        >>> p, q = torch.tensor([0.5, 0.5]), torch.tensor([0.25, 0.75])
        >>> cost = torch.tensor([[0.0, 1.0], [1.0, 0.0]])
        >>> solution = solve(p, q, cost, epsilon=0.1)
        >>> solution.converged, solution.gap < 1e-5
        (tensor(True), tensor(True))
        >>> solve(p, q, cost).plan()
        tensor([[0.2500, 0.2500],
                [0.0000, 0.5000]])
    """
    settings = Settings(epsilon_relative_to, marginal_penalty, grad, tolerance, max_iterations, start, impl)
    return solve_problem(
        pose_for_device(p, q, cost, epsilon=epsilon, mass=mass, settings=settings), settings, is_accurate=True
    )


@public
@per_example(is_traced=lambda settings: False, p=1, q=1, cost=2, mass=0)
def emd(
    p: Float[Tensor, "*batch n"] | None,
    q: Float[Tensor, "*batch m"] | None,
    cost: Cost | Float[Tensor, "*batch n m"],
    *,
    mass: float | Float[Tensor, "*batch"] | None = None,
) -> Float[Tensor, "*batch"]:
    """Return the minimal cost of transporting p to q, exactly, per problem.

    Formulas: docs/guide/definitions.md#def-transport

    Args:
        p: (..., n) weights >= 0, or None for 1 / n each. The leading axes of p, q and the cost broadcast.
        q: (..., m) weights >= 0 with the mass of p, or None for 1 / m each. Masses may differ by a share of 1e-6
            (float64), 1e-5 (float32), 4e-3 (float16) or 3e-2 (bfloat16): both are then scaled to their mean.
        cost: (n, m), one matrix per problem (..., n, m), or a cost object; C[i, j] is the price per unit of mass.
            A matrix may have negative entries, and +inf for pairs that may not exchange mass. Where these split the
            bins into blocks, the value has no finite derivative in the weights, and gets one as large as the price that
            stands for +inf. A share of at most 1e-6 of the mass (float32: 1e-5) that no plan keeps from such pairs is
            not moved; `solve` tells it in `marginal_error`. Where finite prices (a thousand times any cost that mass
            pays) split them, masses of a block that differ by rounding alone pay no price, and the derivatives are
            those within the blocks.
        mass: the amount that is moved, a number or (...), from 0 to the lesser mass of p and q, which may differ then
            (partial transport: what is cheapest to leave stays); None for all. Differentiable, and the gradients of p
            and q are not centred.

    Returns:
        (...), in the promoted dtype (16-bit points of a cost object count as float32); its unit is the unit of the
        cost times the unit of the mass. Solved in float64 on the CPU.
        Differentiable once in p, q (centred over all bins, with and without mass, or by the median over those with mass
        where the mean would cost most of them their digits; one-sided derivatives at bins without mass; a subgradient
        where the optimum is degenerate, so at p = q a step against it may lead away from that minimum; order 1 of
        `wasserstein_1d` has 0 there) and in the cost, or whatever the cost object was built from.
        One problem between two large clouds of a `PointCost` is solved without a matrix, in memory that grows with
        n + m. A `LineCost` of power >= 1 is solved and differentiated by `wasserstein_1d`.

    Raises:
        TypeError: if p, q or a cost matrix is not a floating tensor.
        ValueError: if shapes or masses differ, a weight is negative, a number is not in range, or no plan avoids the
            pairs that +inf forbids.
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
    problem = pose(p, q, cost, epsilon=None, mass=mass, settings=_DEFAULTS)
    line = problem.cost.as_line()
    if line is not None and mass is None:
        return _on_line(problem, line)
    return solve_problem(problem, _DEFAULTS).value


@public
@per_example(is_traced=is_implicit, p=1, q=1, cost=2, epsilon=0, mass=0, marginal_penalty=(0, 0), start=(1, 1))
def sinkhorn(
    p: Float[Tensor, "*batch n"] | None,
    q: Float[Tensor, "*batch m"] | None,
    cost: Cost | Float[Tensor, "*batch n m"],
    *,
    epsilon: float | Float[Tensor, "*batch"],
    mass: float | Float[Tensor, "*batch"] | None = None,
    epsilon_relative_to: str | None = None,
    marginal_penalty: Penalty = None,
    grad: str = "envelope",
    tolerance: float | None = None,
    max_iterations: int = 10_000,
    start: tuple[Tensor, Tensor] | None = None,
    impl: str = "auto",
) -> Float[Tensor, "*batch"]:
    """Return the entropic transport cost, min over plans P of `<C, P> + epsilon KL(P | p q^T / M)`, per problem.

    M is the mass of p and of q, so the value is M times the value of p / M and q / M, and a mass that is one up to
    rounding adds nothing at a large epsilon.

    Formulas: docs/guide/definitions.md#def-entropic

    Args:
        p: (..., n) weights >= 0, or None for 1 / n each. The leading axes of p, q and the cost broadcast.
        q: (..., m) weights >= 0, with the mass of p up to rounding unless `marginal_penalty` is given; or None for
            1 / m each.
        cost: (n, m), one matrix per problem (..., n, m), or a cost object; C[i, j] is the price per unit of mass.
            A matrix may have +inf for pairs that may not exchange mass, and negative entries.
        epsilon: above 0, in the unit of the cost; a number, or one per problem (...). In balanced problems the plan of
            1e8 times the largest cost stands for the plans of larger epsilons: all equal p q^T / mass to rounding.
        mass: the amount that is moved, as for `emd`; None for all. The KL then also counts what stays: see
            `otloss.solvers.reductions.partial_mass`.
        epsilon_relative_to: "mean_cost" takes epsilon as a share of the mean of all entries of C. Bins without
            mass count: the padding of ragged batches changes it.
        marginal_penalty: (rho_p, rho_q), the prices of mass that appears or vanishes on either side, in the unit of the
            cost: adds `rho_p KL(P 1 | p) + rho_q KL(P^T 1 | q)` in place of the marginal constraints. Each is a number,
            one per problem (...), or None for a side that is kept exactly; a single one is for both sides. All three KL
            are then those between measures, `KL(a | b) = sum a log(a / b) - a + b`.
        grad: "envelope", first derivatives, exact at convergence, no history held; "implicit", also second ones, by a
            linear system of the size of the smaller side; for balanced problems on large grids by products along the
            axes, and for large ones with impl="triton" by streamed products where float32 determines them.
        tolerance: sum of the errors of both marginals relative to the mass; None for 1e-5 in float32, 1e-8 in float64.
        max_iterations: at most, of all methods together. Where Sinkhorn's iterations are slow, Newton's method takes
            over early, unless it would need a matrix that does not fit the memory.
        start: potentials (f, g) of a similar problem.
        impl: "auto" chooses by size, cost and device: for CUDA tensors it searches the potentials of small problems,
            and between points, on the CPU, which is faster; and between large clouds sums may go through a grid, whose
            error is a part of the marginal error. "compiled", numba kernels on the CPU, which need the matrix;
            "torch", the log domain, any cost and device; "triton", kernels for float32 CUDA tensors, not measured yet.
            With every `impl` Newton's method is on the CPU, and with "triton" on the device first.

    Returns:
        (...), in the promoted dtype; its unit is the unit of the cost times the unit of the mass. Where the rounding of
        float32 costs between points would change the plan, the arithmetic is in float64. Differentiable in p and q
        (gradients centred over all bins, with and without mass, unless `mass` or `marginal_penalty` is given; one-sided
        at bins without mass), the cost, and what a cost object was built from. Where p and q hold no mass the value of
        a balanced problem and its gradients are 0; with `marginal_penalty` they have none, and "implicit" raises.

    Raises:
        TypeError: if p, q or a cost matrix is not a floating tensor.
        ValueError: if shapes or masses differ, a weight is negative, a number is not finite or in range, no plan avoids
            the pairs that +inf forbids, or epsilon is below 1e-15 / tolerance of the potentials (1e-8 at most), where
            their rounding decides the plan.
        NotImplementedError: if a derivative in forward mode is asked of grad="envelope".
        RuntimeError: if a second derivative of "envelope" is asked for, or "implicit" meets equations that are singular
            to rounding. A problem that does not converge gives a `ConvergenceWarning`.

    Source:
        M. Cuturi, Sinkhorn Distances: Lightspeed Computation of Optimal Transport, 2013.

    Example:
        >>> import torch
        >>> p, q = torch.tensor([0.5, 0.5]), torch.tensor([0.25, 0.75])
        >>> cost = torch.tensor([[0.0, 1.0], [1.0, 0.0]])
        >>> sinkhorn(p, q, cost, epsilon=0.01), sinkhorn(p, q, cost, epsilon=100.0)
        (tensor(0.2522), tensor(0.4991))
    """
    check_is_entropic(epsilon)
    settings = Settings(epsilon_relative_to, marginal_penalty, grad, tolerance, max_iterations, start, impl)
    return solve_problem(pose_for_device(p, q, cost, epsilon=epsilon, mass=mass, settings=settings), settings).value


def pose_for_device(p: Any, q: Any, cost: Any, *, epsilon: Any, mass: Any = None, settings: Settings) -> Problem:
    """Return the problem of `pose`; raise ValueError if impl="triton" cannot run on the tensors."""
    problem = pose(p, q, cost, epsilon=epsilon, mass=mass, settings=settings)
    if problem.impl == "triton":  # before a reduction needs float64, where torch takes over
        check_usable(problem)
    return problem


def solve_problem(problem: Problem, settings: Settings, *, is_accurate: bool = False) -> Transport:
    """Reduce, solve, differentiate and restore a posed problem; `is_accurate` as for `find_potentials`."""
    try:
        reduced, ways_back = reduce(problem, settings)
        return Transport(problem, _solve(reduced, settings, is_accurate=is_accurate), ways_back)
    except SmallEpsilonError as error:
        forbidden = without_prices(problem)
        if forbidden is None:
            raise
        try:
            reduced, ways_back = reduce(forbidden, settings)
            return Transport(problem, _solve(reduced, settings, is_accurate=is_accurate), ways_back)
        except ValueError:  # about costs that were not given
            raise error from None


def _solve(problem: Problem, settings: Settings, *, is_accurate: bool) -> Solution:
    """Solve a reduced problem, with the derivatives that were asked for."""
    if problem.is_exact:
        if suits_clouds(problem):
            return with_envelope(solve_between_clouds(problem))
        return with_envelope(solve_exactly(problem, find_start=assignment_start))
    problem, result = find_potentials(problem, settings, is_accurate=is_accurate)
    solution = solution_of(problem, result, tolerance_of(problem, settings))
    if solution.search is not result and result.is_within(solution.tolerance):
        warn_of_errors(problem, solution.search, settings)  # no value, though the marginals are within the tolerance
    return with_envelope(solution) if settings.grad == "envelope" else with_implicit_derivatives(solution)


def check_is_entropic(epsilon: object) -> None:
    if epsilon is None:
        raise TypeError(
            "epsilon is None, expected a number above 0 or a tensor of one per problem; emd and solve(..., "
            "epsilon=None) give exact transport."
        )


def _on_line(problem: Problem, cost: LineCost) -> Float[Tensor, "*batch"]:
    """The closed form of exact transport on a line."""
    wide = problem.p.dtype if cost.device.type == "mps" else torch.float64
    value = wasserstein_1d(problem.p.to(wide), problem.q.to(wide), cost.x.to(wide), order=cost.power)
    return finite_in(problem.dtype, value, cost.power)
