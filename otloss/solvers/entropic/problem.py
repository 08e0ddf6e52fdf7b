"""An entropic problem, checked, and the options of its solution."""

from __future__ import annotations

import sys
import warnings
from dataclasses import InitVar, dataclass, fields
from numbers import Real
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from otloss._checks import check_broadcast, check_floating, check_positive, check_potentials
from otloss.costs import Cost, as_cost, cost_between
from otloss.solvers.histograms import histogram_pair, weights_or_uniform

GRADS = ("envelope", "implicit")
IMPLS = ("auto", "compiled", "torch", "geomloss")
RELATIVE_TO = (None, "mean_cost")
# Sum of the errors of both marginals relative to the mass: in float32 about 100 roundings.
DEFAULT_TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-8}
# Potentials are settled where the last update changes a factor of the plan by no larger share, and where their error is
# no larger share of their spread.
SETTLED = {torch.float32: 1e-3, torch.float64: 1e-5}
# Over the largest cost plus a hundred epsilons: starts beyond are not those of a similar problem.
SANE_START = 100.0
# Epsilon over the largest cost from which float32 problems are solved in float64.
WIDE_FROM = 10.0
# Epsilon over the largest potential: below, its rounding in float64 changes entries of the plan by more than the
# tolerance. Epsilon over the largest cost: above, that is what is solved for.
LEAST_RATIO, LARGEST_RATIO = 1e-8, 1e8
GONE = 40.0  # potential over marginal penalty from which a bin keeps no mass, exp(-GONE) of its weight


class SmallEpsilonError(ValueError):
    """Epsilon is too small for the arithmetic; `least` is the least one that would do."""

    def __init__(self, message: str, least: float) -> None:
        super().__init__(message)
        self.least = least


@dataclass(frozen=True)
class Settings:
    """The options of `sinkhorn`, `sinkhorn_divergence` and `solve`, in their order and checked."""

    epsilon_relative_to: str | None = None
    marginal_penalty: float | None = None
    grad: str = "envelope"
    tolerance: float | None = None
    max_iterations: int = 10_000
    start: tuple[Tensor, Tensor] | None = None
    strict: bool = False
    impl: str = "auto"
    reach: InitVar[float | None] = None

    def __post_init__(self, reach: float | None) -> None:
        if reach is not None:
            self._take_reach(reach)
        for name, allowed in (("grad", GRADS), ("impl", IMPLS), ("epsilon_relative_to", RELATIVE_TO)):
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name} is {getattr(self, name)!r}, expected one of {allowed}.")
        for name in ("marginal_penalty", "tolerance"):
            number = getattr(self, name)
            if number is None:
                continue
            if isinstance(number, bool) or not isinstance(number, Real):
                raise TypeError(f"{name} is a {type(number).__name__}, expected a number; a tensor gives .item().")
            object.__setattr__(self, name, float(check_positive(name, float(number))))
        if not isinstance(self.strict, bool):
            raise TypeError(f"strict is {self.strict!r}, expected True or False.")
        if isinstance(self.max_iterations, bool) or not isinstance(self.max_iterations, int) or self.max_iterations < 1:
            raise ValueError(f"max_iterations is {self.max_iterations!r}, expected a whole number of at least 1.")

    def _take_reach(self, reach: float) -> None:
        if self.marginal_penalty is not None:
            raise TypeError("reach and marginal_penalty are the same option; give marginal_penalty alone.")
        warnings.warn(
            "reach= is now called marginal_penalty= and means the same; the old name goes with the next release.",
            DeprecationWarning,
            stacklevel=level_of_the_caller(),
        )
        object.__setattr__(self, "marginal_penalty", reach)

    @property
    def changed(self) -> set[str]:
        """The names of the options that differ from their defaults."""
        return {field.name for field in fields(self) if getattr(self, field.name) != field.default}


def level_of_the_caller() -> int:
    """The stack level, for a warning of the function that asks, of the first frame outside this library and torch."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] in ("otloss", "torch"):
        level, frame = level + 1, frame.f_back
    return level


@dataclass(frozen=True)
class EntropicProblem:
    """A batch of problems in one arithmetic dtype.

    Attributes:
        p, q: (..., n), (..., m), expanded to the whole batch, with their graphs.
        cost: of the same dtype, with its graph.
        epsilon: (...), above 0; with a graph where it follows the cost.
        marginal_penalty: the price of a unit of mass that appears or vanishes, in units of the cost, rho in formulas;
            None holds the marginals.
        dtype: of the answer; the arithmetic is in that of p, q and the cost.
    """

    p: Float[Tensor, "*batch n"]
    q: Float[Tensor, "*batch m"]
    cost: Cost
    epsilon: Float[Tensor, "*batch"]
    marginal_penalty: float | None
    dtype: torch.dtype

    @property
    def batch(self) -> torch.Size:
        return self.p.shape[:-1]

    @property
    def inputs(self) -> tuple[Tensor, ...]:
        """The tensors that an answer depends on."""
        return (self.p, self.q, self.epsilon, *self.cost.parameters())


def entropic_problem(p: Any, q: Any, cost: Any, *, epsilon: Any, settings: Settings) -> EntropicProblem:
    """Check everything, and bring it to one dtype and one batch shape."""
    p, q = weights_or_uniform(p, q, cost)
    fitted = as_cost(cost)
    pair = histogram_pair(p, q, cost.dtype, balanced=settings.marginal_penalty is None)
    fitted = cost_between(pair.p, pair.q, fitted)
    width = _epsilon(epsilon, fitted, settings)
    p, q = pair.p, pair.q
    highest = fitted.largest()
    if settings.marginal_penalty is None:
        # The value has a limit for large epsilon, and is nearer to it than 1e-8 of the largest cost; rounding grows.
        width = torch.where(highest > 0, torch.minimum(width, LARGEST_RATIO * highest), width)
    if fitted.dtype == torch.float32 and has_float64(fitted.device) and _is_wide(width.detach(), highest):
        # Potentials are epsilon log(...): in float32 their rounding would be larger than the costs.
        p, q, fitted, width = p.double(), q.double(), fitted.to(torch.float64), width.double()
        q = q if settings.marginal_penalty is not None else _of_the_mass_of(p, q)
    shape = fitted.shape
    batch = check_broadcast(
        p=pair.p.shape[:-1], q=pair.q.shape[:-1], cost=fitted.batch_shape, epsilon=tuple(width.shape)
    )
    return EntropicProblem(
        p=p.expand(*batch, shape[0]),
        q=q.expand(*batch, shape[1]),
        cost=fitted,
        epsilon=width.expand(batch),
        marginal_penalty=settings.marginal_penalty,
        dtype=pair.dtype,
    )


def _is_wide(width: Tensor, highest: Tensor) -> bool:
    wide = width > WIDE_FROM * highest
    return bool(wide.any()) and bool((wide & (highest > 0)).any())  # the second is seldom asked


def check_not_too_small(problem: EntropicProblem, f: Tensor, g: Tensor) -> None:
    """Raise where epsilon is so small beside the potentials that their rounding decides the plan.

    Potentials and not costs: a large cost that forbids a pair is harmless where no mass has to take it. For the same
    reason, with a marginal penalty, the potentials of bins that keep no mass count no more than those that keep little.
    """
    most = torch.inf if problem.marginal_penalty is None else GONE * problem.marginal_penalty
    size = torch.maximum(*(
        potential.masked_fill(weights.detach() == 0, 0.0).clamp(max=most).abs().amax(-1)
        for potential, weights in ((f, problem.p), (g, problem.q))
    ))  # fmt: skip
    outside = problem.epsilon.detach() < LEAST_RATIO * size
    if outside.any():
        raise SmallEpsilonError(
            f"epsilon is {float(problem.epsilon.detach()[outside][0]):.3g} where potentials are as large as "
            f"{float(size[outside][0]):.3g}, expected at least {LEAST_RATIO:g} times that: rounding in float64 would "
            "decide the answer. Use emd or solve(..., epsilon=None), or a larger epsilon.",
            least=LEAST_RATIO * float(size.max()),
        )


def check_mass(problem: EntropicProblem, advice: str, *, only_with_gradient: bool = False) -> None:
    """Raise ValueError where p or q (if it requires a gradient) holds no mass in a problem."""
    for name, weights in (("p", problem.p), ("q", problem.q)):
        asked = weights.requires_grad or not only_with_gradient
        if asked and bool((weights.detach().sum(-1) == 0).any()):
            raise ValueError(f"{name} holds no mass in a problem: {advice}")


def dual_term(potential: Tensor, rho: float | None) -> Tensor:
    """Return a potential's term in the dual: itself, or `rho (1 - exp(-f / rho))` with the marginal penalty rho."""
    return potential if rho is None else -rho * torch.expm1(-potential / rho)


def dual_sum(weights: Tensor, potential: Tensor, rho: float) -> tuple[Tensor, Tensor]:
    """Return sum_i w_i rho (1 - exp(-f_i / rho)) and the mass sum_i w_i exp(-f_i / rho), 0 at bins without mass."""
    exponent = -potential / rho
    # The share exp(-f / rho) of a light bin may overflow where its mass does not.
    mass = torch.where(weights > 0, (weights.log() + exponent).exp(), 0.0)
    gain = torch.where(exponent > 1, mass - weights, weights * exponent.clamp(max=1.0).expm1())
    return -rho * gain.sum(-1), mass.sum(-1)


def tolerance_of(problem: EntropicProblem, settings: Settings) -> float:
    """Return the tolerance that was asked for, or the default of the answer's dtype."""
    return settings.tolerance or default_tolerance(problem.dtype)


def default_tolerance(dtype: torch.dtype) -> float:
    """Return the tolerance of answers in this dtype."""
    return DEFAULT_TOLERANCE[torch.promote_types(dtype, torch.float32)]


def settled_from(tolerance: float, dtype: torch.dtype) -> float:
    """Return the change of a factor below which potentials count as settled, for problems solved in this dtype."""
    return max(SETTLED[dtype], 100 * tolerance)


def has_float64(device: torch.device) -> bool:
    """Whether there are float64 numbers on this device."""
    return device.type != "mps"


def in_float64(problem: EntropicProblem) -> EntropicProblem:
    """Return the same problem, without a graph, in float64 where the device has it."""
    wide = torch.float64 if has_float64(problem.p.device) else problem.cost.dtype
    p, q, epsilon = (t.detach().to(wide) for t in (problem.p, problem.q, problem.epsilon))
    if problem.marginal_penalty is None:
        q = _of_the_mass_of(p, q)
    with torch.no_grad():
        cost = problem.cost if problem.cost.dtype == wide else problem.cost.to(wide)
    return EntropicProblem(p, q, cost, epsilon, problem.marginal_penalty, problem.dtype)


def _of_the_mass_of(p: Tensor, q: Tensor) -> Tensor:
    """q for masses that agreed up to the rounding of a narrower dtype."""
    mass_p, mass_q = (w.detach().sum(-1, keepdim=True) for w in (p, q))
    return q * torch.where(mass_q > 0, mass_p / mass_q.masked_fill(mass_q == 0, 1.0), 1.0)


def _epsilon(epsilon: Any, cost: Cost, settings: Settings) -> Tensor:
    if isinstance(epsilon, Tensor):
        check_floating("epsilon", epsilon)
        bad = ~((epsilon > 0) & (epsilon < torch.inf))
        if bad.any():
            raise ValueError(
                f"epsilon holds {float(epsilon.detach()[bad][0])}, expected finite numbers above 0; "
                "solve(..., epsilon=None) is exact transport."
            )
        width = epsilon.to(cost.device, cost.dtype)
    else:
        if isinstance(epsilon, bool) or not isinstance(epsilon, Real):
            raise TypeError(f"epsilon is a {type(epsilon).__name__}, expected a number or a tensor of one per problem.")
        width = torch.tensor(check_positive("epsilon", float(epsilon)), dtype=cost.dtype, device=cost.device)
    tiny = torch.finfo(cost.dtype).tiny
    least = float(epsilon.detach().min()) if isinstance(epsilon, Tensor) and epsilon.numel() else epsilon
    if not isinstance(least, Tensor) and least < tiny:
        raise SmallEpsilonError(
            f"epsilon is {least:.3g}, expected at least {tiny:.3g}, the least normal number of {cost.dtype}; rescale "
            "the costs and epsilon alike.",
            least=tiny,
        )
    if settings.epsilon_relative_to is None:
        return width
    m = cost.shape[1]
    mean = cost.apply(torch.full((m,), 1 / m, dtype=cost.dtype, device=cost.device)).mean(-1)
    if not (mean > 0).all():
        raise ValueError('the mean cost is 0, and epsilon_relative_to="mean_cost" asks for a share of it.')
    return width * mean


def check_start(start: Any, problem: EntropicProblem) -> tuple[Tensor, Tensor] | None:
    """Return the potentials to start from, expanded to the batch and without a graph."""
    if start is None:
        return None
    bins = (problem.p.shape[-1], problem.q.shape[-1])
    fitted = []
    potentials = check_potentials(start, bins, problem.batch)
    for name, potential, weights in zip(("f", "g"), potentials, (problem.p, problem.q), strict=True):
        potential = potential.detach().to(weights)
        if not torch.isfinite(potential).all():
            raise ValueError(
                f"start {name} holds a NaN or an infinity (in {weights.dtype}), expected the potentials of a similar "
                "problem."
            )
        fitted.append(potential.expand(weights.shape))
    return _within_reason(problem, fitted[0], fitted[1])


def _within_reason(problem: EntropicProblem, f: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
    """Starts without the constant that moves from f to g, whose rounding would stay; zeros for those far too large."""
    q = problem.q.detach()
    if problem.marginal_penalty is None:
        shift = (g * q).sum(-1, keepdim=True) / q.sum(-1, keepdim=True).clamp(min=torch.finfo(q.dtype).tiny)
        f, g = f + shift, g - shift
    # Potentials differ by no more than the costs do, and by the logarithms of weights times epsilon.
    most = SANE_START * (problem.cost.largest() + 100 * problem.epsilon.detach()).unsqueeze(-1)
    sane = (g.masked_fill(q == 0, 0.0).abs() <= most).all(-1, keepdim=True)
    g = torch.where(sane & (g.abs() <= most), g, 0.0)
    return torch.where(sane, f, 0.0), g
