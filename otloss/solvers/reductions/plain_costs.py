"""Cost matrices with forbidden pairs (+inf) or negative entries become plain ones: finite and at least 0.

A constant in the costs changes no optimal plan: with l = min(0, min C) and t the mass that is moved,

    value(C) = value(C - l) + l t

With penalties on both sides the mass t is not known. There the constant scales the masses: with

    a = -l / (rho_p + rho_q + 2 epsilon),    p' = p exp(a),    q' = q exp(a),    f' = f + rho_p a,    g' = g + rho_q a

both problems have the same plan, and with masses M

    value(p, q, C) = value(p', q', C - l) + rho_p (M_p - M_p') + rho_q (M_q - M_q') + epsilon (M_p M_q - M_p' M_q')

A forbidden pair gets a price B instead of +inf. A plan with mass on such pairs, where another plan avoids them, differs
from that one by a cycle of at most 2 min(n, m) pairs. So with B above min(n, m) times the largest cost the optimum
avoids every forbidden pair if any plan does; if mass is there, none does. The entropic plan has exp(-B / epsilon) on
each, spread over the pairs of such a cycle, so a multiple of epsilon is added to B.
With marginal penalties the plan has exp(-B / (rho_p + rho_q + epsilon)) of the mass where no pair is allowed.

The plain matrix is in float64 where that is possible: an entry of -1e8 between bins without mass must not round the
others away.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from otloss.costs import DenseCost
from otloss.solvers.histograms import of_equal_mass
from otloss.solvers.options import Settings, is_kept, of_batch
from otloss.solvers.problem import Problem
from otloss.solvers.reductions.way_back import WayBack

LARGEST_LOSS = 1e-4  # the share of a value that rounding may decide where costs below 0 scale the masses
EPSILONS_PER_PAIR = 40.0  # the price holds so many for each pair of a cycle, which leaves exp(-40) of the mass


def reduce(problem: Problem, settings: Settings) -> tuple[Problem, WayBack] | None:
    """Reduce problems whose cost has entries below 0 or +inf.

    Raises:
        ValueError: if costs are so far apart, or so far below 0 with a marginal penalty, that they overflow. The way
            back raises it where rounding would decide the value.
    """
    cost, penalty = problem.cost, problem.marginal_penalty
    if cost.has_plain_entries:
        return None
    wide = problem.dtype_of_sums
    matrix = cost.dense().to(wide)
    forbidden = matrix.detach() == torch.inf
    low = matrix.detach().amin((-2, -1)).clamp(max=0.0)
    shifted = matrix - low[..., None, None]
    largest = shifted.detach().masked_fill(forbidden, 0.0).amax((-2, -1))
    epsilon = problem.epsilon.detach().to(wide)
    pairs = min(cost.shape) + 1
    price = pairs * (
        torch.where(largest > 0, largest, 1.0) + EPSILONS_PER_PAIR * (epsilon.amax() if epsilon.numel() else 0.0)
    )
    if penalty is not None:
        price = price + EPSILONS_PER_PAIR * of_batch(penalty.sum_of_finite)
    if not torch.isfinite(price).all():
        raise ValueError(
            f"the finite costs are up to {float(largest.max()):.3g} apart, which overflows; rescale them (and epsilon)."
        )
    has_forbidden = bool(forbidden.any())
    if has_forbidden and price.dim() < forbidden.dim() - 2:
        price = price.expand(forbidden.shape[:-2])
    plain = torch.where(forbidden, price[..., None, None], shifted) if has_forbidden else shifted
    wide_problem = dataclasses.replace(
        problem, p=problem.p.to(wide), q=problem.q.to(wide), epsilon=problem.epsilon.to(wide),
        cost=DenseCost.unchecked(plain),
    )  # fmt: skip
    reduced, shift = _shifted(wide_problem, low)
    if (start := problem.start) is not None:
        start = start[0].to(wide) - shift.of_f.detach(), start[1].to(wide) - shift.of_g.detach()
    way_back = _PlainCosts(shift, forbidden if has_forbidden else None, price, problem.dtype)
    return dataclasses.replace(reduced, start=start), way_back


@dataclass(frozen=True)
class _Shift:
    """What the constant l in the costs changes.

    Attributes:
        of_value: (...), what a value of the plain costs lacks, with its graph.
        of_f, of_g: (..., 1), what the potentials lack.
        mass: (...), what is moved; the masses of p and q on average where the plan decides it.
        low_of_plan: (...), l where the plan decides how much is moved; None elsewhere.
        rounding: (...), what the rounding of scaled weights may change in a value.
    unmoved: (...), the value if nothing were moved, where the weights are scaled.
    """

    of_value: Float[Tensor, "*batch"]
    of_f: Float[Tensor, "*batch 1"]
    of_g: Float[Tensor, "*batch 1"]
    mass: Float[Tensor, "*batch"]
    low_of_plan: Float[Tensor, "*batch"] | None = None
    rounding: Float[Tensor, "*batch"] | float = 0.0
    unmoved: Float[Tensor, "*batch"] | float = 0.0

    def check(self, value: Tensor) -> None:
        """Raise ValueError where values are differences of far larger numbers, of which rounding leaves no digits."""
        if self.low_of_plan is None:
            return
        lost = self.rounding > LARGEST_LOSS * (value.detach().abs() + self.unmoved)
        if bool(lost.any()):
            raise ValueError(_far_below_zero(self.low_of_plan, "rounding would decide the value"))


def _far_below_zero(low: Tensor, consequence: str) -> str:
    return (
        f"the cost matrix holds {float(low.min()):.3g}, far below 0 for this marginal_penalty: {consequence}; expected "
        "larger costs, or larger penalties."
    )


def _shifted(problem: Problem, low: Tensor) -> tuple[Problem, _Shift]:
    """Return the problem, whose costs have been shifted by l, with the weights for them."""
    penalty, none = problem.marginal_penalty, torch.zeros_like(low).unsqueeze(-1)
    mass_p, mass_q = problem.p.sum(-1), problem.q.sum(-1)
    average = (mass_p.detach() + mass_q.detach()) / 2
    if problem.mass is not None:  # its derivative takes the constant, which derivatives in the weights lack
        return problem, _Shift(low * problem.mass, none, none, problem.mass.detach())
    if penalty is None:
        balanced = dataclasses.replace(problem, q=of_equal_mass(problem.p, problem.q))
        return balanced, _Shift(low * average, low.unsqueeze(-1), none, average)
    if not bool((low < 0).any()):
        return problem, _Shift(low * average, none, none, average)
    if is_kept(penalty.p):
        return problem, _Shift(low * mass_p, low.unsqueeze(-1), none, mass_p.detach())
    if is_kept(penalty.q):
        return problem, _Shift(low * mass_q, none, low.unsqueeze(-1), mass_q.detach())
    rho_p, rho_q, epsilon = of_batch(penalty.p), of_batch(penalty.q), problem.epsilon
    a = -low / (rho_p + rho_q + 2 * epsilon)
    factor = a.exp().unsqueeze(-1)
    p, q = problem.p * factor, problem.q * factor
    product = p.sum(-1) * q.sum(-1)
    if not bool((product <= torch.finfo(problem.dtype).max).all()):
        raise ValueError(_far_below_zero(low, f"the mass of the plan overflows {problem.dtype}"))
    # Differences bin by bin keep the digits where the penalty is large and the factor near one.
    of_value = rho_p * (problem.p - p).sum(-1) + rho_q * (problem.q - q).sum(-1) + epsilon * (mass_p * mass_q - product)
    by_a = -a.unsqueeze(-1)
    unmoved, scaled = (
        (rho_p * a.sum(-1) + rho_q * b.sum(-1) + epsilon * a.sum(-1) * b.sum(-1)).detach()
        for a, b in ((problem.p, problem.q), (p, q))
    )
    rounding = 2 * torch.finfo(p.dtype).eps * scaled
    shift = _Shift(of_value, by_a * penalty.p, by_a * penalty.q, average, low, rounding, unmoved)
    return dataclasses.replace(problem, p=p, q=q), shift


@dataclass(frozen=True)
class _PlainCosts(WayBack):
    """Attributes:
    shift: by the smallest cost.
    forbidden: (..., n, m), where C is +inf; None if nowhere.
    price: (...), B.
    dtype: of the output.
    forbidden_cost: (...), the cost of the mass on forbidden pairs, which is rounding.
    left_out: (...), what of the mass that is.
    """

    shift: _Shift
    forbidden: Bool[Tensor, "*batch n m"] | None
    price: Float[Tensor, "*batch"]
    dtype: torch.dtype
    forbidden_cost: Float[Tensor, "*batch"] | float = 0.0
    left_out: Float[Tensor, "*batch"] | float = 0.0

    def after(self, plan: Callable[[], Tensor]) -> WayBack:
        """Take off the price of the mass on forbidden pairs, which must be rounding."""
        if self.forbidden is None:
            return self
        whole = plan().detach()
        leaked = (whole * self.forbidden).sum((-2, -1))
        mass = self.shift.mass.expand_as(leaked)
        if self.shift.low_of_plan is not None:
            mass = torch.maximum(mass, whole.sum((-2, -1)))
        # Rounding of the weights may force this share of the mass onto forbidden pairs.
        excess = leaked - (1e-6 if self.dtype == torch.float64 else 1e-5) * mass
        if (excess > 0).any():
            worst = tuple(int(i) for i in (excess == excess.max()).nonzero()[0])
            raise ValueError(
                f"{f'problem {worst}' if worst else 'the problem'} has {float(leaked[worst]):.3g} of its mass "
                f"{float(mass[worst]):.3g} on forbidden pairs (cost +inf): no plan avoids them. Forbid fewer pairs, or "
                "let mass stay where it is with mass= or marginal_penalty=."
            )
        left_out = leaked / mass.clamp(min=torch.finfo(mass.dtype).tiny)
        return dataclasses.replace(self, forbidden_cost=self.price * leaked, left_out=left_out)

    def value(self, value: Tensor) -> Tensor:
        value = value + self.shift.of_value - self.forbidden_cost
        self.shift.check(value)
        return value

    def dual_value(self, value: Tensor) -> Tensor:
        return self.value(value) - self.shift.rounding

    def gap(self, gap: Tensor) -> Tensor:
        return gap + 2 * self.shift.rounding

    def marginal_error(self, error: Tensor) -> Tensor:
        return error + 2 * self.left_out  # on both sides

    def bound(self, bound: Tensor, plan: Callable[[], Tensor]) -> Tensor:
        if (low := self.shift.low_of_plan) is None:
            return bound + self.shift.of_value - self.forbidden_cost
        return bound + low * plan().sum((-2, -1)) - self.forbidden_cost

    def potentials(self, f: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
        return f + self.shift.of_f, g + self.shift.of_g

    def plan(self, plan: Tensor) -> Tensor:
        return plan if self.forbidden is None else plan.masked_fill(self.forbidden, 0.0)
