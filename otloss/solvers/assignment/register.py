"""Rigid registration: the rotation R and translation t that bring one cloud onto another.

    min over R, t and plans P of  sum_ij P_ij |R x_i + t - y_j|^2 + epsilon KL(P | a b^T)
                                  + rho KL(P 1 | a) + rho KL(P^T 1 | b)

alternates two exact minima. The plan is the entropic plan between R x + t and y, unbalanced where a marginal
penalty rho lets parts without a partner stay. R and t are the least squares fit of the pairs weighed by P, by a
singular value decomposition (B. Horn, H. Hilden, S. Negahdaripour, Closed-form solution of absolute orientation using
orthonormal matrices, 1988). Epsilon falls from a share of the size of the clouds to the one asked for, and the marginal
penalty with it: a blurred plan sees the whole shape, and a fine one fits it. The minimum is local, so several starts
are tried at once, as a batch. As epsilon falls, the starts with the largest values are left out; at the end the least
wins.

Two samplings of one shape have their minimum a little away from the truth, for their points lie differently on it. A
marginal penalty lessens that, for whole shapes too, and so do weights by the area around each point.
"""

from __future__ import annotations

import dataclasses
import math
import warnings
from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from otloss._autograd import check_no_tangent, check_no_transform
from otloss._checks import check_cloud, check_count, check_positive, device_of, float64_or
from otloss._public import public
from otloss.costs import PointCost
from otloss.costs.products import product
from otloss.solvers.convergence import ConvergenceWarning
from otloss.solvers.histograms import check_masses, weights_or_uniform
from otloss.solvers.options import Settings
from otloss.solvers.problem import pose
from otloss.solvers.solve import solve, solve_problem
from otloss.solvers.transport import Transport


@dataclass(frozen=True)
class Limits:
    """Numbers of the search.

    Attributes:
        tolerance, max_iterations: of the plans before the last one, which need not be exact.
        first_epsilon: the first epsilon, relative to the largest squared distance from the centre: a plan that sees the
            whole shape.
        first_epsilon_of_mean, first_epsilon_of_penalty: with a marginal penalty the first epsilon is smaller, as blur
            makes parts without a partner count: the larger of these shares of the mean squared distance and of the
            penalty.
        penalty_of_excess: the penalty on the way, relative to the excess of epsilon over the last one. A smaller one
            would drop parts with a partner.
        share_of_last: the share of the steps at the last epsilon.
        last_starts: the number of starts at the last epsilon.
        first_turn: the angle by which the first start is turned from where x lies: steps from a pose that is as
            symmetric as both clouds would keep that symmetry, also where it is a saddle or a maximum.
    """

    tolerance: float = 1e-3
    max_iterations: int = 100
    first_epsilon: float = 0.1
    first_epsilon_of_mean: float = 0.06
    first_epsilon_of_penalty: float = 2.0
    penalty_of_excess: float = 0.5
    share_of_last: float = 0.3
    last_starts: int = 2
    first_turn: float = 1e-3


LIMITS = Limits()


@dataclass(frozen=True)
class Registration:
    """The best fit of `register`: y is near `x @ rotation.mT + translation`.

    Attributes:
        rotation: (d, d), orthogonal with determinant 1.
        translation: (d,).
        transport: between the moved x and y; its `value` is the minimum that was found.
    """

    rotation: Float[Tensor, "d d"]
    translation: Float[Tensor, " d"]
    transport: Transport

    def apply(self, x: Float[Tensor, "*batch d"]) -> Float[Tensor, "*batch d"]:
        """Return points moved by the fit."""
        return product(x, self.rotation.mT) + self.translation


@public
@torch.no_grad()
def register(
    x: Float[Tensor, "n d"],
    y: Float[Tensor, "m d"],
    a: Float[Tensor, " n"] | None = None,
    b: Float[Tensor, " m"] | None = None,
    *,
    epsilon: float,
    marginal_penalty: float | None = None,
    steps: int = 100,
    restarts: int = 0,
    generator: torch.Generator | None = None,
) -> Registration:
    """Return the rotation and translation that bring the cloud x onto y, with the plan between them.

    Args:
        x: (n, d) points.
        y: (m, d) points.
        a, b: (n,) and (m,) weights >= 0, 1 / n and 1 / m by default.
        epsilon: at the end, above 0, in squared units of the points; the squared distance of neighbours is usual.
        marginal_penalty: the price of mass that has no partner, in the unit of epsilon: points farther than about its
            root from the other cloud drop out. None holds all mass, for whole shapes only.
        steps: of plan and fit; fewer than the default end beside the minimum more often.
        restarts: starts from random rotations, by up to half a turn, beside the one from where x lies, as one batch. 80
            found the minimum of a shape without symmetries in nine of ten cases, at ten times the time of one start.
        generator: source of the rotations.

    Returns:
        A `Registration`, without a graph.

    Raises:
        TypeError, ValueError: as `solve`; ValueError also if x or y is not (n, d), if a cloud has no mass, or a count
            is too small.

    Source:
        H. Chui, A. Rangarajan, Point matching for non-rigid registration, 2003, for the falling epsilon.

    Example:
        >>> x = torch.tensor([[0.0, 0.0], [1.0, 0.0], [0.0, 2.0]])
        >>> turn = torch.tensor([[0.8, -0.6], [0.6, 0.8]])
        >>> fit = register(x, x @ turn.mT + 5, epsilon=0.01)
        >>> torch.allclose(fit.rotation, turn, atol=1e-3), torch.allclose(fit.apply(x), x @ turn.mT + 5, atol=1e-2)
        (True, True)
    """
    _check(x, y, steps, restarts)
    epsilon = float(check_positive("epsilon", epsilon))
    if marginal_penalty is not None:
        check_positive("marginal_penalty", marginal_penalty)
    dtype, wide = torch.promote_types(x.dtype, y.dtype), float64_or(torch.float32, x.device)
    # Far points have the weight exp(-distance / marginal_penalty), which underflows in float32.
    cost = PointCost(x.to(wide), y.to(wide))
    x, y = cost.x, cost.y
    a, b = (w.to(wide) for w in _checked_weights(a, b, cost, balanced=marginal_penalty is None))
    check_no_transform()
    check_no_tangent("its result has no graph; pass detached tensors.", x, y, a, b)
    centre_x, centre_y = (a @ x) / a.sum(), (b @ y) / b.sum()
    x_c, y_c = x - centre_x, y - centre_y
    squares = [cloud.square().sum(-1) for cloud in (x_c, y_c)]
    first = _rotations([LIMITS.first_turn], x.shape[1], torch.Generator("cpu").manual_seed(0))
    others = _rotations([math.pi * k / restarts for k in range(1, restarts + 1)], x.shape[1], generator)
    rotations = torch.cat([first.to(x), others.to(x)])
    course = _build_course(squares, steps, epsilon, marginal_penalty, restarts + 1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)  # Intermediate plans need not be exact.
        rotations, shifts = _search((x_c, y_c), (a, b), rotations, course)
    rotation, shift = rotations[0], shifts[0]
    moved = PointCost(x_c @ rotation.mT + shift, y_c)
    transport = solve(a, b, moved, epsilon=epsilon, marginal_penalty=marginal_penalty)
    translation = centre_y + shift - rotation @ centre_x
    return Registration(rotation.to(dtype), translation.to(dtype), transport)


class _Step(NamedTuple):
    """The settings of one step, and how many starts go on after it."""

    epsilon: float
    marginal_penalty: float | None
    starts: int


def _build_course(
    squares: list[Tensor], steps: int, epsilon: float, marginal_penalty: float | None, starts: int
) -> list[_Step]:
    """Return the steps for clouds of these squared distances from the centre: epsilon falls, and then stays."""
    first = LIMITS.first_epsilon * max(float(square.amax()) for square in squares)
    if marginal_penalty is not None:
        mean = max(float(square.mean()) for square in squares)
        first = min(first, max(LIMITS.first_epsilon_of_mean * mean, LIMITS.first_epsilon_of_penalty * marginal_penalty))
    falling, course = max(1, round(steps * (1 - LIMITS.share_of_last))), []
    for step in range(steps):
        share = min(1.0, step / falling)
        width = epsilon * max(1.0, first / epsilon) ** (1 - share)
        excess = LIMITS.penalty_of_excess * (width - epsilon)
        penalty = None if marginal_penalty is None else max(marginal_penalty, excess)
        course.append(_Step(width, penalty, math.ceil(starts * (LIMITS.last_starts / starts) ** share)))
    return course


def _search(
    clouds: tuple[Tensor, Tensor], weights: tuple[Tensor, Tensor], rotations: Tensor, course: list[_Step]
) -> tuple[Float[Tensor, "starts d d"], Float[Tensor, "starts d"]]:
    """Return the fits after plans and fits in turn, in rising order of their values."""
    (x, y), shifts = clouds, torch.zeros_like(rotations[:, 0])
    columns = torch.cat([y, torch.ones_like(y[:, :1])], -1)
    settings = Settings(tolerance=LIMITS.tolerance, max_iterations=LIMITS.max_iterations)
    for step in course:
        settings = dataclasses.replace(settings, marginal_penalty=step.marginal_penalty)
        moved = PointCost(x @ rotations.mT + shifts.unsqueeze(-2), y)
        problem = pose(*weights, moved, epsilon=step.epsilon, settings=settings)
        transport = solve_problem(problem, settings)
        received, (f, g) = transport.apply(columns), transport.potentials
        rotations, shifts = _fit(x, received[..., :-1], received[..., -1:])
        best = transport.value.argsort()[: step.starts]
        rotations, shifts = rotations[best], shifts[best]
        settings = dataclasses.replace(settings, start=(f[best], g[best]))
    return rotations, shifts


def _fit(x: Tensor, moved: Tensor, weights: Tensor) -> tuple[Float[Tensor, "starts d d"], Float[Tensor, "starts d"]]:
    """Return the least squares fits for plans P: `moved` is P y, and `weights` (starts, n, 1) are the sums of rows."""
    mass = weights.sum(-2, keepdim=True).clamp(min=torch.finfo(x.dtype).tiny)
    mean_x, mean_y = (weights * x).sum(-2, keepdim=True) / mass, moved.sum(-2, keepdim=True) / mass
    u, _, vh = torch.linalg.svd((x - mean_x).mT @ (moved - weights * mean_y))
    sign = torch.ones_like(u[..., 0])
    sign[..., -1] = torch.linalg.det(u @ vh).sign()
    rotation = (u * sign.unsqueeze(-2) @ vh).mT
    return rotation, (mean_y - mean_x @ rotation.mT).squeeze(-2)


def _rotations(angles: list[float], d: int, generator: torch.Generator | None) -> Float[Tensor, "count d d"]:
    """Return rotations by these angles about random axes."""
    device = device_of(generator)
    drawn = torch.randn(len(angles), d, d, generator=generator, dtype=torch.float64, device=device)
    turns = drawn - drawn.mT
    largest = torch.linalg.matrix_norm(turns, ord=2).clamp(min=torch.finfo(turns.dtype).tiny)
    return torch.linalg.matrix_exp(turns * (turns.new_tensor(angles) / largest)[:, None, None])


def _check(x: Tensor, y: Tensor, steps: int, restarts: int) -> None:
    for name, cloud in (("x", x), ("y", y)):
        if check_cloud(name, cloud).dim() != 2:
            raise ValueError(f"{name} has shape {tuple(cloud.shape)}, expected (n, d): one cloud at a time.")
    check_count("steps", steps)
    check_count("restarts", restarts, 0)


def _checked_weights(a: Tensor | None, b: Tensor | None, cost: PointCost, *, balanced: bool) -> tuple[Tensor, Tensor]:
    """Return the weights, uniform by default; ValueError unless there is one >= 0 for each point, and some above 0."""
    a, b = weights_or_uniform(a, b, cost)
    masses = check_masses(a, b, ("a", "b"), balanced=balanced)
    for name, weights, mass, size in zip(("a", "b"), (a, b), masses, cost.shape, strict=True):
        if weights.shape != (size,):
            raise ValueError(f"{name} has shape {tuple(weights.shape)}, expected ({size},), a weight for each point.")
        if not mass:
            raise ValueError(f"{name} has no mass, expected some: without it a cloud has no centre.")
    return a, b
