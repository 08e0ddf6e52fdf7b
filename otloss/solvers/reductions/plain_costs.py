"""Cost matrices with forbidden pairs (+inf) or negative entries become plain ones: finite and at least 0.

A constant in the costs changes no optimal plan: with l = min(0, min C) and t the mass that is moved,

    value(C) = value(C - l) + l t

A forbidden pair gets a price B instead of +inf. A plan with mass on such pairs, where another plan avoids them, differs
from that one by a cycle of at most 2 min(n, m) pairs. So with B above min(n, m) times the largest cost the optimum
avoids every forbidden pair if any plan does; if mass is there, none does. The entropic plan has exp(-B / epsilon) on
each, spread over the pairs of such a cycle, so a multiple of epsilon is added to B.
With a marginal penalty rho the plan has exp(-B / (2 rho + epsilon)) of the mass where no pair is allowed.

The plain matrix is in float64: an entry of -1e8 between bins without mass must not round the others away.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from otloss._checks import has_float64
from otloss.costs import DenseCost
from otloss.solvers.histograms import of_equal_mass
from otloss.solvers.options import Settings
from otloss.solvers.problem import Problem
from otloss.solvers.reductions.way_back import WayBack

EPSILONS_PER_PAIR = 40.0  # the price holds so many for each pair of a cycle, which leaves exp(-40) of the mass


def reduce(problem: Problem, settings: Settings) -> tuple[Problem, WayBack] | None:
    """Reduce problems whose cost has entries below 0 or +inf.

    Raises:
        ValueError: if an entry is negative in an unbalanced problem, or costs are so far apart that they overflow.
    """
    cost, rho = problem.cost, problem.marginal_penalty
    if cost.has_plain_entries:
        return None
    wide = torch.float64 if has_float64(cost.device) else cost.dtype
    matrix = cost.dense().to(wide)
    forbidden = matrix.detach() == torch.inf
    low = matrix.detach().amin((-2, -1)).clamp(max=0.0)
    if rho is not None and (low < 0).any():
        raise ValueError(
            f"the cost matrix holds {float(low.min())} in an unbalanced problem, expected costs >= 0 with "
            "marginal_penalty: a constant that is added changes how much mass moves."
        )
    shifted = matrix - low[..., None, None]
    largest = shifted.detach().masked_fill(forbidden, 0.0).amax((-2, -1))
    epsilon = problem.epsilon.detach().to(wide)
    pairs = min(cost.shape) + 1
    price = pairs * (
        torch.where(largest > 0, largest, 1.0) + EPSILONS_PER_PAIR * (epsilon.amax() if epsilon.numel() else 0.0)
    )
    if rho is not None:
        price = price + 2 * EPSILONS_PER_PAIR * rho
    if not torch.isfinite(price).all():
        raise ValueError(
            f"the finite costs are up to {float(largest.max()):.3g} apart, which overflows; rescale them (and epsilon)."
        )
    has_forbidden = bool(forbidden.any())
    plain = torch.where(forbidden, price[..., None, None], shifted) if has_forbidden else shifted
    p, q = problem.p.to(wide), problem.q.to(wide)
    if problem.mass is None:
        moved = (p.detach().sum(-1) + q.detach().sum(-1)) / 2
        q = q if rho is not None else of_equal_mass(p, q)
    else:
        moved = problem.mass
    start = problem.start
    if start is not None:
        start = start[0].to(wide) - low.unsqueeze(-1), start[1]
    reduced = dataclasses.replace(
        problem, p=p, q=q, cost=DenseCost.unchecked(plain), epsilon=problem.epsilon.to(wide), start=start
    )
    # With a mass to be moved its derivative takes the constant, and those of the weights have none.
    low_of_f = low.unsqueeze(-1) if problem.mass is None else torch.zeros_like(low).unsqueeze(-1)
    return reduced, _PlainCosts(
        low * moved, low_of_f, forbidden if has_forbidden else None, price, moved.detach(), problem.dtype
    )


@dataclass(frozen=True)
class _PlainCosts(WayBack):
    """Attributes:
    shift: (...), what a value of the plain costs lacks.
    low: (..., 1), what f lacks.
    forbidden: (..., n, m), where C is +inf; None if nowhere.
    price: (...), B.
    mass: (...), what is moved.
    dtype: of the answer.
    """

    shift: Float[Tensor, "*batch"]
    low: Float[Tensor, "*batch 1"]
    forbidden: Bool[Tensor, "*batch n m"] | None
    price: Float[Tensor, "*batch"]
    mass: Float[Tensor, "*batch"]
    dtype: torch.dtype

    def after(self, plan: Callable[[], Tensor]) -> WayBack:
        """Take off the price of the mass on forbidden pairs, which must be rounding."""
        if self.forbidden is None:
            return self
        leaked = (plan().detach() * self.forbidden).sum((-2, -1))
        mass = self.mass.expand_as(leaked)
        # Rounding of the weights may force this share of the mass onto forbidden pairs.
        excess = leaked - (1e-6 if self.dtype == torch.float64 else 1e-5) * mass
        if (excess > 0).any():
            worst = tuple(int(i) for i in (excess == excess.max()).nonzero()[0])
            raise ValueError(
                f"{f'problem {worst}' if worst else 'the problem'} has {float(leaked[worst]):.3g} of its mass "
                f"{float(mass[worst]):.3g} on forbidden pairs (cost +inf): no plan avoids them. Forbid fewer pairs, or "
                "let mass stay where it is with mass= or marginal_penalty=."
            )
        return dataclasses.replace(self, shift=self.shift - self.price * leaked)

    def value(self, value: Tensor) -> Tensor:
        return value + self.shift

    def bound(self, bound: Tensor) -> Tensor:
        return bound + self.shift.detach()

    def potentials(self, f: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
        return f + self.low, g

    def plan(self, plan: Tensor) -> Tensor:
        return plan if self.forbidden is None else plan.masked_fill(self.forbidden, 0.0)
