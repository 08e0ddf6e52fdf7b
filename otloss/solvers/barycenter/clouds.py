"""Barycenters of clouds with free support: the points that are nearest to several clouds on average.

    min over points x of  V = sum_k w_k W(x, cloud k)        W: emd, or the divergence, of |x - y|^2

At given plans the best points are the means of where their mass goes, x_i <- sum_k w_k T_k(x)_i with the barycentric
maps T_k, after which V is not larger (M. Cuturi, A. Doucet, Fast Computation of Wasserstein Barycenters, 2014; P.
Alvarez-Esteban et al., A fixed-point approach to barycenters in Wasserstein space, 2016). The divergence also has the
map T of x to itself: sum_k w_k T_k(x)_i - T(x)_i is minus the gradient of V over twice the mass, and L-BFGS takes such
steps, which alone would go on for hundreds where the points are many or epsilon is large. All points have the same
mass; or, for emd, the masses that are best for their places (`masses`), found before each step: V falls at both.
"""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from otloss._checks import (
    check_broadcast,
    check_cloud,
    check_count,
    check_finite,
    check_floating,
    check_last_axis,
    check_positive,
    float64_or,
    is_differentiated,
)
from otloss._public import public
from otloss.costs import PointCost
from otloss.solvers.barycenter.masses import Masses, find_masses
from otloss.solvers.closed_forms.line import finite_in
from otloss.solvers.convergence import ConvergenceWarning, level_of_the_caller
from otloss.solvers.divergence import sinkhorn_divergence
from otloss.solvers.histograms import MASS_TOLERANCE, centre_gradient_over, centre_of
from otloss.solvers.solve import emd, solve

_NUDGE = 1e-6  # of the unit of steps: how far from points that stand other optimal plans are looked for
_NUDGE_OF_START = 1e-3  # of the unit of steps: how far a start is moved if there is an epsilon
# Of L-BFGS: changes that it keeps, the part of a step below which it is given up, and the least curvature it believes.
_PAIRS, _SHORTEST, _SMALLEST_CURVATURE = 40, 1 / 16, 1e-4


class CloudBarycenter(NamedTuple):
    """The barycenter of clouds, per problem.

    Attributes:
        points: (..., s, d), without a graph.
        masses: (..., s) of the points, without a graph, with the sum of each cloud's masses.
        value: (...), what they minimise, differentiable in the clouds, their masses and the weights.
        iterations, converged: (...).
    """

    points: Float[Tensor, "*batch s d"]
    masses: Float[Tensor, "*batch s"]
    value: Float[Tensor, "*batch"]
    iterations: Int[Tensor, "*batch"]
    converged: Bool[Tensor, "*batch"]


@public
def cloud_barycenter(
    clouds: Float[Tensor, "*batch k n d"] | Sequence[Tensor],
    masses: Float[Tensor, "*batch k n"] | Sequence[Tensor] | None = None,
    weights: Float[Tensor, "*batch k"] | None = None,
    *,
    start: int | Float[Tensor, "*batch s d"],
    optimize: str = "points",
    epsilon: float | None = None,
    tolerance: float = 1e-5,
    max_iterations: int = 200,
    generator: torch.Generator | None = None,
) -> CloudBarycenter:
    """Return points that minimise the weighted sum of the transport costs to k clouds, for squared distances.

    Args:
        clouds: (..., k, n, d), or a list of k clouds (n_k, d) of different sizes.
        masses: (..., k, n) >= 0, of one mass for all clouds, or a list of (n_k,) for a list; equal ones by default.
        weights: (..., k) of the clouds, >= 0 with sum 1 (divided by it, up to rounding); 1 / k each by default.
        start: (..., s, d), the points to begin with; or their number, drawn from the clouds with `generator`. Its
            leading axes broadcast with the leading axes of the other arguments: several starts are one call. With an
            epsilon they are moved by about a thousandth of the clouds' size.
        optimize: "points", of equal masses; "masses", of the points of `start`; or "both", with a value that is at most
            the one of "points" and of "masses". For epsilon=None: a linear programme of at most s sum_k n_k unknowns in
            each iteration finds the masses.
        epsilon: None for `emd`, else the divergence of `sinkhorn_divergence`, above 0 in the unit of |x - y|^2.
        tolerance: of the last step of the points that have mass, over the distance from the median of the clouds that
            half of their mass keeps, and of what other masses may still lower the value, over the value.
        max_iterations: at most; a `ConvergenceWarning` tells where they are not enough.

    Returns:
        The barycenter, in the dtype of the clouds (float32 for 16 bits). The best masses of given points are a global
        minimum; the points are at a local one: another start may lead to a lower value. Points that are better without
        mass stay where they are. By the envelope theorem the value has the right derivatives where points and masses
        have converged.

    Raises:
        TypeError: if clouds, masses or weights are not floating tensors.
        ValueError: if shapes or masses do not fit, a number is not finite or in range, weights do not sum to 1, or
            masses are asked for with an epsilon.

    Source:
        M. Cuturi, A. Doucet, Fast Computation of Wasserstein Barycenters, 2014; E. Anderes, S. Borgwardt, J. Miller,
        Discrete Wasserstein barycenters, 2016.

    Example:
        >>> clouds = torch.tensor([[[0.0, 0.0], [2.0, 0.0]], [[0.0, 4.0], [4.0, 4.0]]])
        >>> cloud_barycenter(clouds, start=clouds[0]).points
        tensor([[0., 2.],
                [3., 2.]])
        >>> ends = torch.tensor([[[0.0], [1.0]], [[0.0], [1.0]]])  # a quarter of the mass at 0
        >>> cloud_barycenter(ends, torch.tensor([[0.25, 0.75]] * 2), start=ends[0], optimize="both").masses
        tensor([0.2500, 0.7500])
    """
    check_count("max_iterations", max_iterations)
    check_positive("tolerance", tolerance)
    if epsilon is not None:
        check_positive("epsilon", epsilon)
    _check_optimize(optimize, epsilon)
    problem = _posed(clouds, masses, weights, epsilon, start)
    x = _first_points(problem, start, generator)
    with torch.no_grad():
        solution = _search(problem.detached(), x.detach().clone(), optimize, tolerance, max_iterations)
    if not bool(solution.converged.all()):
        message = _explain(solution, optimize, max_iterations)
        warnings.warn(message, ConvergenceWarning, stacklevel=level_of_the_caller())
    dtype = problem.dtype
    value = finite_in(dtype, problem.value_of_best(solution), 2)
    return CloudBarycenter(
        solution.x.to(dtype), solution.a.to(dtype).contiguous(), value, solution.iterations, solution.converged
    )


@dataclass(frozen=True)
class _Clouds:
    """Clouds (..., k, n, d), masses (..., k, n) and weights (..., k) of one batch, in float64 where there is one."""

    clouds: Tensor
    masses: Tensor
    weights: Tensor
    epsilon: float | None
    dtype: torch.dtype

    def detached(self) -> _Clouds:
        return _Clouds(self.clouds.detach(), self.masses.detach(), self.weights.detach(), self.epsilon, self.dtype)

    @cached_property
    def median_deviation(self) -> Tensor:
        """Return how far half of the mass is from its median, along the axis where that is largest.

        A few points far away do not change it. If it is 0, the largest distance from the median is in its place.
        """
        points = self.clouds.flatten(-3, -2)
        shares = (self.masses * self.weights.unsqueeze(-1)).flatten(-2).unsqueeze(-1)
        distances = (points - _weighted_median(points, shares)).abs()
        half = _weighted_median(distances, shares).amax((-2, -1))
        extent = torch.where(shares > 0, distances, 0.0).amax((-2, -1))
        return torch.where(half > 0, half, extent)

    @property
    def unit(self) -> Tensor:
        """Return what steps (...) are compared with: the median deviation, or 1 where all points are one."""
        return torch.where(self.median_deviation > 0, self.median_deviation, 1.0)

    @cached_property
    def diameter(self) -> Tensor:
        """Return the diagonal (...) of the box around the points with mass."""
        points, has_mass = self.clouds.flatten(-3, -2), (self.masses * self.weights.unsqueeze(-1)).flatten(-2) > 0
        has_mass = has_mass.unsqueeze(-1)
        highest, lowest = points.masked_fill(~has_mass, -torch.inf), points.masked_fill(~has_mass, torch.inf)
        return (highest.amax(-2) - lowest.amin(-2)).square().sum(-1).sqrt()

    def equal_masses(self, x: Tensor) -> Tensor:
        """Return masses (..., s) of the points, all the same."""
        mass = self.masses[..., 0, :].detach().sum(-1, keepdim=True)
        return (mass / x.shape[-2]).expand(x.shape[:-1])

    def value(self, x: Tensor, a: Tensor) -> Tensor:
        cost, a = PointCost(x.unsqueeze(-3), self.clouds), a.unsqueeze(-2)
        if self.epsilon is None:
            return (self.weights * emd(a, self.masses, cost)).sum(-1)
        return (self.weights * sinkhorn_divergence(a, self.masses, cost, epsilon=self.epsilon)).sum(-1)

    def value_of_best(self, solution: _Solution) -> Tensor:
        """Return the value, whose derivatives in the masses of the clouds are the potentials that are not NaN."""
        value, g = self.value(solution.x, solution.a), solution.potentials
        if not bool((~g.isnan()).any()) or not is_differentiated(self.masses):
            return value
        fixed = self.detached()
        with torch.enable_grad():
            masses = fixed.masses.clone().requires_grad_()
            (own,) = torch.autograd.grad(replace(fixed, masses=masses).value(solution.x, solution.a).sum(), masses)
        change = torch.where(g.isnan(), 0.0, g - centre_of(g, masses) - own).detach()
        return value + (change * (self.masses - self.masses.detach())).sum((-2, -1))

    def moved(self, x: Tensor, a: Tensor) -> Tensor:
        """Return where the points of masses a go next, by `emd`; those without mass stay."""
        across = solve(a.unsqueeze(-2), self.masses, PointCost(x.unsqueeze(-3), self.clouds))
        moved = (self.weights[..., None, None] * across.barycentric_map(self.clouds)).sum(-3)
        return torch.where(a.unsqueeze(-1) > 0, moved, x)

    def evaluate(self, x: Tensor, a: Tensor) -> _Evaluation:
        """Return the value and the step along its gradient, by the divergence, at points that all have mass."""
        across = solve(a.unsqueeze(-2), self.masses, PointCost(x.unsqueeze(-3), self.clouds), epsilon=self.epsilon)
        self_term = solve(a, a, PointCost(x), epsilon=self.epsilon)
        to_clouds = (self.weights[..., None, None] * across.barycentric_map(self.clouds)).sum(-3)
        step = to_clouds - self_term.barycentric_map(x)
        value = (self.weights * across.value).sum(-1) - self_term.value / 2
        error = (self.weights * across.gap).sum(-1) + self_term.gap / 2
        return _Evaluation(value, error, step)

    def best_masses(self, x: Tensor, active: Tensor, *, guess: Tensor | None = None) -> Masses:
        """Return the masses that are best for the points of the active problems; by default guess from equal masses."""
        cost = PointCost(x.unsqueeze(-3), self.clouds)
        if guess is None:
            across = solve(self.equal_masses(x).unsqueeze(-2), self.masses, cost)
            guess = self.weights.unsqueeze(-1) * across.potentials[1]
        return find_masses(cost.dense(), self.masses, self.weights, active=active, guess=guess)


class _Evaluation(NamedTuple):
    """The value (...) but for a constant, its error (...), and the step (..., s, d) to where the mass of points goes.

    The step is minus the gradient over twice the masses of the points.
    """

    value: Tensor
    error: Tensor
    step: Tensor


@dataclass(frozen=True)
class _Solution:
    """Points (..., s, d) and masses (..., s), the iterations, and whether both converged, per problem.

    The potentials (..., k, n) of `find_masses` are NaN where the masses are not the best ones.
    """

    x: Tensor
    a: Tensor
    potentials: Tensor
    iterations: Tensor
    converged: Tensor


def _explain(solution: _Solution, optimize: str, max_iterations: int) -> str:
    open_ones = ~solution.converged
    count = f"{int(open_ones.sum())} of {open_ones.numel()} barycenters of clouds did not converge"
    if optimize != "masses" and bool((solution.iterations[open_ones] >= max_iterations).any()):
        fix = "raise max_iterations or the tolerance, or give a start that is nearer."
        return f"{count} in {max_iterations} iterations; {fix}"
    return (
        f"{count}: the linear programme does not tell masses apart where the largest costs are so much larger than the "
        "value; leave out points that are far away or have little mass, or raise the tolerance."
    )


def _search(problem: _Clouds, start: Tensor, optimize: str, tolerance: float, max_iterations: int) -> _Solution:
    """Optimise both from the start, or from the points that equal masses lead to: where the best masses cost less."""
    everywhere = torch.ones(problem.weights.shape[:-1], dtype=torch.bool, device=start.device)
    if optimize == "masses":
        best = problem.best_masses(start, everywhere)
        converged = best.gap <= tolerance * best.value
        return _Solution(start, best.masses, best.potentials, everywhere.long(), converged)
    find = _move if problem.epsilon is None else _descend
    equal = find(problem, start, tolerance, max_iterations)
    if optimize == "points":
        return equal
    at_start, at_equal = (problem.best_masses(x, everywhere) for x in (start, equal.x))
    is_lower = at_start.value < at_equal.value
    x = torch.where(is_lower[..., None, None], start, equal.x)
    best = _choose(is_lower, at_start, at_equal)
    return _move_with_masses(problem, x, best, equal.iterations, tolerance=tolerance, max_iterations=max_iterations)


def _choose(is_first: Tensor, first: Masses, second: Masses) -> Masses:
    """Return the first masses of some problems, and the second ones of the others."""
    conditions = is_first.unsqueeze(-1), is_first[..., None, None], is_first, is_first
    return Masses(*(torch.where(*each) for each in zip(conditions, first, second, strict=True)))


def _move(problem: _Clouds, x: Tensor, tolerance: float, max_iterations: int) -> _Solution:
    """Move points of equal masses until they stand."""
    a, iterations = problem.equal_masses(x), problem.weights.new_zeros(problem.weights.shape[:-1], dtype=torch.int64)
    stands = torch.zeros_like(iterations, dtype=torch.bool)
    active = ~stands
    while bool(active.any()):
        x, step = _step(problem, x, a, active)
        iterations = iterations + active
        stands = stands | active & (step <= tolerance)
        active = active & ~stands & (iterations < max_iterations)
        if not bool(active.any()):
            x, is_lower = _leave_kinks(problem, x, a, tolerance, where=stands)
            stands = stands & ~is_lower
            active = is_lower & (iterations < max_iterations)
    return _Solution(x, a, torch.full_like(problem.masses, torch.nan), iterations, stands)


def _leave_kinks(problem: _Clouds, x: Tensor, a: Tensor, tolerance: float, *, where: Tensor) -> tuple[Tensor, Tensor]:
    """Return points that other optimal plans lead to, where costs tie and the value is lower there, and where that is.

    One plan may keep the points where another one does not. Points next to them have one of those plans alone.
    """
    nudges = _nudges(problem, x, _NUDGE)
    value, is_lower = None, torch.zeros_like(where)
    for nudge in (nudges, -nudges):
        moved = problem.moved(x + nudge, a)
        is_apart = where & ~is_lower & (_largest(moved - x) > tolerance * problem.unit)
        if bool(is_apart.any()):
            value = problem.value(x, a) if value is None else value
            is_better = is_apart & (problem.value(moved, a) < (1 - _NUDGE) * value)
            x, is_lower = torch.where(is_better[..., None, None], moved, x), is_lower | is_better
    return x, is_lower


def _nudges(problem: _Clouds, x: Tensor, size: float) -> Tensor:
    """Return moves (..., s, d) of the points in random directions, always the same; size is in the unit of steps."""
    generator = torch.Generator("cpu").manual_seed(0)
    direction = torch.randn(x.shape[-2:], generator=generator, dtype=x.dtype, device="cpu").to(x.device)
    return size * problem.unit[..., None, None] * direction


def _descend(problem: _Clouds, x: Tensor, tolerance: float, max_iterations: int) -> _Solution:
    """Move points of equal masses by L-BFGS, of which the first step is the one to where their mass goes.

    Steps are shortened where the value rises; after three of those one goes to where the mass goes, as a whole.
    From a start that is as symmetric as the clouds steps lead to points that are so too, also where they are a saddle;
    so the start is moved first.
    """
    a, iterations = problem.equal_masses(x), problem.weights.new_zeros(problem.weights.shape[:-1], dtype=torch.int64)
    x, unit = x + _nudges(problem, x, _NUDGE_OF_START), problem.unit
    current, length, pairs = problem.evaluate(x, a), torch.ones_like(unit), deque[_Pair](maxlen=_PAIRS)
    active = _largest(current.step) > tolerance * unit
    while bool(active.any()):
        direction = _direction(current.step, pairs)
        is_plain = (length < _SHORTEST) | ~(_inner(direction, current.step) > 0)
        direction = torch.where(is_plain[..., None, None], current.step, direction)
        # Along a direction that is nearly flat a step would leave the clouds.
        longest = torch.maximum(problem.diameter, _largest(current.step)) / _largest(direction).clamp(min=1e-300)
        length = torch.where(is_plain, 1.0, length)
        moved = x + (torch.where(is_plain, 1.0, length * longest.clamp(max=1.0)) * active)[..., None, None] * direction
        new = problem.evaluate(moved, a)
        is_accepted = active & (is_plain | (new.value <= current.value + current.error + new.error))
        pairs.append(_Pair.from_step(moved - x, current.step - new.step, is_accepted))
        wide = is_accepted[..., None, None]
        x = torch.where(wide, moved, x)
        choices = zip((is_accepted, is_accepted, wide), new, current, strict=True)
        current = _Evaluation(*(torch.where(*choice) for choice in choices))
        length, iterations = torch.where(is_accepted, 1.0, length / 4), iterations + active
        active = active & (_largest(current.step) > tolerance * unit) & (iterations < max_iterations)
    stands = _largest(current.step) <= tolerance * unit
    return _Solution(x, a, torch.full_like(problem.masses, torch.nan), iterations, stands)


class _Pair(NamedTuple):
    """A change of points, and of the step there (..., s, d), and one over their product; 0 where it tells nothing."""

    change: Tensor
    response: Tensor
    inverse: Tensor

    @staticmethod
    def from_step(change: Tensor, response: Tensor, is_accepted: Tensor) -> _Pair:
        product = _inner(change, response)
        is_valid = is_accepted & (product > _SMALLEST_CURVATURE * _inner(change, change).clamp(min=1e-300))
        return _Pair(change, response, torch.where(is_valid, 1 / torch.where(is_valid, product, 1.0), 0.0))


def _direction(step: Tensor, pairs: Sequence[_Pair]) -> Tensor:
    """Return the product of the step with the inverse Hessian that pairs tell of, in units of the step."""
    factors = []
    for pair in reversed(pairs):
        factors.append(pair.inverse * _inner(pair.change, step))
        step = step - factors[-1][..., None, None] * pair.response
    for pair, factor in zip(pairs, reversed(factors), strict=True):
        step = step + (factor - pair.inverse * _inner(pair.response, step))[..., None, None] * pair.change
    return step


def _inner(a: Tensor, b: Tensor) -> Tensor:
    return (a * b).sum((-2, -1))


def _largest(step: Tensor) -> Tensor:
    """Return the longest way (...) of a point in steps (..., s, d)."""
    return step.square().sum(-1).sqrt().amax(-1)


def _move_with_masses(
    problem: _Clouds, x: Tensor, best: Masses, iterations: Tensor, *, tolerance: float, max_iterations: int
) -> _Solution:
    """Move the points and give them their best masses in turns, until they stand."""
    converged = torch.zeros_like(iterations, dtype=torch.bool)
    active = iterations < max_iterations
    while bool(active.any()):
        x, step = _step(problem, x, best.masses, active)
        iterations = iterations + active
        stands = active & (step <= tolerance)
        converged = converged | stands & (best.gap <= tolerance * best.value)
        active = active & ~stands
        best = _choose(active, problem.best_masses(x, active, guess=best.potentials), best)
        active = active & (iterations < max_iterations)
    return _Solution(x, best.masses, best.potentials, iterations, converged)


def _step(problem: _Clouds, x: Tensor, a: Tensor, active: Tensor) -> tuple[Tensor, Tensor]:
    """Return the points after a step of the active problems, and the largest step over the spread of the clouds."""
    moved = torch.where(active[..., None, None], problem.moved(x, a), x)
    return moved, _largest(moved - x) / problem.unit


def _check_optimize(optimize: str, epsilon: float | None) -> None:
    if optimize not in ("points", "masses", "both"):
        raise ValueError(f'optimize is {optimize!r}, expected "points", "masses" or "both".')
    if optimize != "points" and epsilon is not None:
        raise ValueError(
            f'optimize is "{optimize}" and epsilon is {epsilon}, but masses are optimised for `emd` alone; leave '
            'epsilon out, or give optimize="points".'
        )


def _weighted_median(values: Tensor, shares: Tensor) -> Tensor:
    """Return medians (..., 1, d) of values (..., n, d) with shares (..., n, 1) of the mass."""
    values, order = values.sort(-2)
    sums = shares.expand(values.shape).gather(-2, order).cumsum(-2)
    place = (sums < sums[..., -1:, :] / 2).sum(-2, keepdim=True)
    return values.gather(-2, place)


def _posed(
    clouds: Tensor | Sequence[Tensor],
    masses: Tensor | Sequence[Tensor] | None,
    weights: Tensor | None,
    epsilon: float | None,
    start: int | Tensor,
) -> _Clouds:
    if isinstance(clouds, Tensor):
        points = check_cloud("clouds", clouds)
    else:
        points, masses = _padded(clouds, masses)
    if points.dim() < 3 or points.shape[-3] == 0:
        raise ValueError(f"clouds have shape {tuple(points.shape)}, expected (..., k, n, d), several clouds.")
    k, n = points.shape[-3:-1]
    wide = float64_or(torch.float32, points.device)
    dtype = torch.promote_types(points.dtype, torch.float32)
    if masses is None:
        masses = points.new_full((k, n), 1 / n, dtype=wide)
    if weights is None:
        weights = points.new_full((k,), 1 / k, dtype=wide)
    masses = _with_one_sum(check_floating("masses", masses), n, wide)
    check_last_axis("weights", check_floating("weights", weights), k)
    check_finite("weights", weights)
    totals = weights.to(wide).sum(-1, keepdim=True)
    tolerance = max(1e-3, MASS_TOLERANCE[weights.dtype])
    if bool((weights < 0).any()) or bool(((totals - 1).abs() > tolerance).any()):
        raise ValueError(f"weights sum to {totals.flatten()[0].item():.6g}, expected numbers >= 0 with sum 1.")
    shapes = {"clouds": points.shape[:-3], "masses": masses.shape[:-2], "weights": weights.shape[:-1]}
    if isinstance(start, Tensor):
        check_last_axis("start", check_cloud("start", start), points.shape[-1])
        shapes["start"] = start.shape[:-2]
    batch = check_broadcast(**shapes)
    return _Clouds(
        points.to(wide).expand(*batch, -1, -1, -1), masses.expand(*batch, k, n),
        (weights.to(wide) / totals).expand(*batch, k), epsilon, dtype,
    )  # fmt: skip


def _with_one_sum(masses: Tensor, n: int, wide: torch.dtype) -> Tensor:
    """Return masses (..., k, n) of one sum for each problem, from which they may differ by rounding in their dtype."""
    check_last_axis("masses", masses, n)
    check_finite("masses", masses)
    sums = masses.detach().sum(-1, keepdim=True, dtype=wide)
    if bool((masses < 0).any()) or not bool((sums > 0).all()):
        raise ValueError("masses have a negative entry or a cloud without mass, expected numbers >= 0, some above 0.")
    first, tolerance = sums[..., :1, :] if masses.dim() > 1 else sums, MASS_TOLERANCE[masses.dtype]
    if bool(((sums - first).abs() > tolerance * first).any()):
        raise ValueError(
            f"masses have sums from {float(sums.min()):.9g} to {float(sums.max()):.9g}, expected one sum for clouds of "
            f"a problem, up to {tolerance:g} of it; normalise them: masses / masses.sum(-1, keepdim=True)."
        )
    return masses.to(wide) * (first / sums)


def _padded(clouds: Sequence[Tensor], masses: Tensor | Sequence[Tensor] | None) -> tuple[Tensor, Tensor]:
    """Return the clouds of a list as one tensor with their masses, 0 at places without a point."""
    each = [check_cloud(f"clouds[{k}]", cloud) for k, cloud in enumerate(clouds)]
    shapes = [tuple(cloud.shape) for cloud in each]
    if not each or any(len(shape) != 2 or shape[1] != shapes[0][1] for shape in shapes):
        raise ValueError(f"clouds is a list of shapes {shapes}, expected at least one cloud (n_k, d), of one d.")
    if masses is None:
        wide = float64_or(torch.float32, each[0].device)
        masses = [torch.full_like(cloud[:, 0].detach(), 1 / len(cloud), dtype=wide) for cloud in each]
    if not isinstance(masses, Tensor):
        masses = [check_floating(f"masses[{k}]", each) for k, each in enumerate(masses)]
    if isinstance(masses, Tensor) or [tuple(w.shape) for w in masses] != [shape[:1] for shape in shapes]:
        raise ValueError("masses do not fit the list of clouds, expected a list with one (n_k,) for each cloud.")
    # Places without mass repeat a point, so that costs are no larger.
    sizes = torch.tensor([len(cloud) for cloud in each], device=each[0].device)
    longest = int(sizes.max())
    points = torch.stack([torch.cat([t, t[:1].detach().expand(longest - len(t), -1)]) for t in each])
    is_point = torch.arange(longest, device=sizes.device) < sizes.unsqueeze(-1)
    return points, centre_gradient_over(is_point, pad_sequence(masses, batch_first=True))


def _first_points(problem: _Clouds, start: int | Tensor, generator: torch.Generator | None) -> Tensor:
    *batch, _, _, d = problem.clouds.shape
    if isinstance(start, Tensor):
        return start.to(problem.clouds).expand(*batch, -1, -1)
    check_count("start", start)
    shares = (problem.masses * problem.weights.unsqueeze(-1)).detach().flatten(-2)
    shares = shares.reshape(-1, shares.shape[-1])
    device = shares.device if generator is None else generator.device
    # Two points at one place stay together.
    with_replacement = bool(((shares > 0).sum(-1) < start).any())
    index = torch.multinomial(shares.to(device), start, replacement=with_replacement, generator=generator).to(
        shares.device
    )
    index = index.reshape(*batch, start, 1).expand(*batch, start, d)
    return problem.clouds.flatten(-3, -2).gather(-2, index)
