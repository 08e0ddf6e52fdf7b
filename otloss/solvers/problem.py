"""Pose: what the user gave becomes one checked `Problem`, here and nowhere else.

    min over P >= 0 of  <C, P> + epsilon KL(P | p q^T / M)    and  P 1 = p, P^T 1 = q           (balanced)
                                                  or  P 1 <= p, P^T 1 <= q, sum P = mass         (partial)
                                                  or  + rho_p KL(P 1 | p) + rho_q KL(P^T 1 | q)  (unbalanced)

For a mass M of p and q the balanced entropy is against p q^T / M: the value is M times the value of p / M and q / M,
and a mass that is one up to rounding adds nothing, however large epsilon is. Exact transport is epsilon = 0. A matrix
may have negative entries and +inf; `otloss.solvers.reductions` turns such problems, and problems of a part of the mass,
into balanced ones with costs that are finite and at least 0.

Balanced transport needs equal masses, and float sums never agree to the last bit. Masses that agree within
`MASS_TOLERANCE` are rescaled to their mean, both sides alike, so that d(p, q) = d(q, p); larger differences are an
error. The value is defined on pairs of equal mass only, so its weight gradient is defined up to a constant (which a
softmax removes). `centre_gradient` gives the one with mean zero over the bins, so that functions and solvers agree.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from otloss._checks import (
    check_broadcast,
    check_floating,
    check_number,
    check_positive,
    check_potentials,
    float64_or,
    is_number,
)
from otloss.costs import Cost
from otloss.solvers.histograms import MASS_ROUNDING, pair_and_cost
from otloss.solvers.options import DEFAULT_TOLERANCE, MarginalPenalty, Settings, SmallEpsilonError

ROUNDING_OF_MARGINALS = 1e-13  # of float64, relative to the mass with what stays


@dataclass(frozen=True)
class Problem:
    """A batch of transport problems in one arithmetic dtype.

    Attributes:
        p, q: (..., n), (..., m), expanded to the whole batch, with their graphs; of equal masses if balanced.
        cost: of the same dtype, with its graph.
        epsilon: (...), above 0, with a graph where it follows the cost; 0 for exact transport.
        is_exact: whether epsilon is 0.
        marginal_penalty: the prices of a unit of mass that appears or vanishes on each side, rho_p and rho_q in
            formulas, where they are tensors (..., 1) for the whole batch; None keeps both marginals.
        mass: (...), the amount that is moved, with its graph; None for all.
        start: potentials (f, g) of a similar problem, of the whole batch and without a graph, or None.
        has_empty_side: whether p or q holds no mass in a problem.
        has_dummy_bins: whether the last bins of p and q take the mass that partial transport leaves.
        share_moved: (...), above 0, the share of the mass that is no dummy bin's alone, which errors and the tolerance
            are relative to. None for all of the mass, and inside of transforms, where it cannot be read.
        weight_rounding: the rounding unit of the weights as they were given.
        is_symmetric: whether p equals q and the cost its transpose, which saves iterations.
        impl: the implementation that was asked for.
        dtype: of the output; the arithmetic is in the dtype of p, q and the cost.
    """

    p: Float[Tensor, "*batch n"]
    q: Float[Tensor, "*batch m"]
    cost: Cost
    epsilon: Float[Tensor, "*batch"]
    dtype: torch.dtype
    is_exact: bool = False
    marginal_penalty: MarginalPenalty | None = None
    mass: Float[Tensor, "*batch"] | None = None
    start: tuple[Float[Tensor, "*batch n"], Float[Tensor, "*batch m"]] | None = None
    has_empty_side: bool = False
    has_dummy_bins: bool = False
    share_moved: Float[Tensor, "*batch"] | None = None
    weight_rounding: float = 0.0
    is_symmetric: bool = False
    impl: str = "auto"

    @property
    def batch(self) -> torch.Size:
        return self.p.shape[:-1]

    @property
    def dtype_of_sums(self) -> torch.dtype:
        """Return the dtype in which a reduction makes sums: float64 if the device has it, float32 for impl="triton"."""
        return self.cost.dtype if self.impl == "triton" else float64_or(self.cost.dtype, self.p.device)

    @cached_property
    def largest_cost(self) -> Float[Tensor, "*batch"]:
        """The largest cost or a bound of it, per matrix and without a graph."""
        return self.cost.largest()

    @property
    def smallest_share_moved(self) -> float:
        return float(self.share_moved.min()) if self.share_moved is not None and self.share_moved.numel() else 1.0

    @property
    def inputs(self) -> tuple[Tensor, ...]:
        """The tensors that a value depends on: p, q, epsilon, and tensors of the cost that require a gradient."""
        return (self.p, self.q, self.epsilon, *self.cost.parameters())


def pose(p: Any, q: Any, cost: Any, *, epsilon: Any, mass: Any = None, settings: Settings) -> Problem:
    """Check everything, fill in uniform weights, and bring it to one dtype and one batch shape.

    Args:
        p, q, cost, epsilon, mass: as for `otloss.solve`.

    Raises:
        TypeError, ValueError: as `otloss.solve`.
    """
    _check_combination(epsilon, mass, settings)
    balanced = mass is None and settings.marginal_penalty is None
    pair, fitted = pair_and_cost(p, q, cost, balanced=balanced, signed=True)
    (n, m), batch = fitted.shape, pair.p.shape[:-1]
    is_exact = epsilon is None
    weights_p, weights_q = pair.in_float64 if is_exact and balanced else (pair.p, pair.q)
    width = pair.p.new_zeros(()) if is_exact else _checked_epsilon(epsilon, fitted, settings)
    moved = None if mass is None else _checked_mass(mass, pair.p, pair.q)
    shapes: dict[str, Any] = {"p": batch, "q": pair.q.shape[:-1], "cost": fitted.batch_shape, "epsilon": width.shape}
    if moved is not None:
        shapes["mass"] = moved.shape
    if (penalty := settings.marginal_penalty) is not None:
        assert isinstance(penalty, MarginalPenalty)
        shapes |= {f"marginal_penalty[{side}]": rho.shape[:-1] for side, rho in enumerate(penalty.tensors)}
    batch = check_broadcast(**shapes)
    if penalty is not None:
        wide = float64_or(fitted.dtype, fitted.device)
        penalty = penalty.map(lambda rho: rho.to(fitted.device, wide).expand(*batch, 1))
    start = None
    if settings.start is not None:
        f, g = check_potentials(settings.start, (n, m), batch)
        start = f.detach().expand(*batch, n), g.detach().expand(*batch, m)
        if balanced:
            start = _centred(*start, pair.q)
    return Problem(
        p=weights_p.expand(*batch, n),
        q=weights_q.expand(*batch, m),
        cost=fitted,
        epsilon=width.expand(batch),
        dtype=pair.dtype,
        is_exact=is_exact,
        marginal_penalty=penalty,
        mass=moved if moved is None else moved.expand(batch),
        start=start,
        has_empty_side=pair.has_empty_side,
        weight_rounding=pair.rounding,
        impl=settings.impl,
    )


def _centred(f: Tensor, g: Tensor, q: Tensor) -> tuple[Tensor, Tensor]:
    """Return potentials with a constant moved from g to f, so that a large one brings no rounding."""
    weights = q.detach().to(g)
    shift = (g * weights).sum(-1, keepdim=True) / weights.sum(-1, keepdim=True).clamp(min=torch.finfo(g.dtype).tiny)
    return f + shift.to(f), g - shift


def tolerance_of(problem: Problem, settings: Settings) -> float:
    """Return the tolerance that was asked for, or the default of the output's dtype, for the mass that is moved."""
    tolerance = settings.tolerance or DEFAULT_TOLERANCE[torch.promote_types(problem.dtype, torch.float32)]
    return max(tolerance * problem.smallest_share_moved, min(tolerance, ROUNDING_OF_MARGINALS))


def _check_combination(epsilon: Any, mass: Any, settings: Settings) -> None:
    if epsilon is None:
        unsupported = sorted(settings.non_defaults - {"start"})
        if unsupported:
            raise ValueError(
                f"exact transport (epsilon=None) does not take {unsupported}; give an epsilon, or drop them."
            )
    if mass is not None and settings.start is not None:
        raise ValueError("start is given with mass=, expected none: what stays has potentials of its own.")
    if mass is not None and settings.marginal_penalty is not None:
        raise ValueError("mass and marginal_penalty are both given, expected one: both let mass stay where it is.")


def _checked_epsilon(epsilon: Any, cost: Cost, settings: Settings) -> Tensor:
    if isinstance(epsilon, Tensor):
        check_floating("epsilon", epsilon)
        bad = ~((epsilon > 0) & (epsilon < torch.inf))
        if bad.any():
            raise ValueError(
                f"epsilon holds {float(epsilon.detach()[bad][0])}, expected finite numbers above 0; "
                "solve(..., epsilon=None) is exact transport."
            )
        width = epsilon.to(cost.device, cost.dtype)
        smallest = float(epsilon.detach().min()) if epsilon.numel() else torch.inf
    else:
        if not is_number(epsilon):
            raise TypeError(f"epsilon is a {type(epsilon).__name__}, expected a number or a tensor of one per problem.")
        smallest = float(check_positive("epsilon", epsilon))
        width = torch.tensor(smallest, dtype=cost.dtype, device=cost.device)
    tiny = torch.finfo(cost.dtype).tiny
    if smallest < tiny:
        raise SmallEpsilonError(
            f"epsilon is {smallest:.3g}, expected at least {tiny:.3g}, the least normal number of {cost.dtype}; "
            "rescale the costs and epsilon alike.",
            least=tiny,
        )
    if settings.epsilon_relative_to is None:
        return width
    if not cost.has_plain_entries:
        raise ValueError(
            "the cost matrix has negative or infinite entries, and the mean of those is no scale; give epsilon itself "
            "in place of epsilon_relative_to."
        )
    m = cost.shape[1]
    mean = cost.apply(torch.full((m,), 1 / m, dtype=cost.dtype, device=cost.device)).mean(-1)
    if not (mean > 0).all():
        raise ValueError('the mean cost is 0, and epsilon_relative_to="mean_cost" asks for a share of it.')
    return width * mean


def _checked_mass(mass: Any, p: Tensor, q: Tensor) -> Tensor:
    wide = float64_or(p.dtype, p.device)
    if isinstance(mass, Tensor):
        moved = check_floating("mass", mass).to(p.device, wide, copy=True)  # which bounds read after the call
    else:
        moved = torch.tensor(float(check_number("mass", mass)), dtype=wide, device=p.device)
    lesser_mass = torch.minimum(p.detach().to(wide).sum(-1), q.detach().to(wide).sum(-1))
    check_broadcast(p=p.shape[:-1], q=q.shape[:-1], mass=moved.shape)
    bad = ~((moved.detach() >= 0) & (moved.detach() <= lesser_mass * (1 + MASS_ROUNDING)))
    if bad.any():
        got, limit = (float(t.expand(bad.shape)[bad][0]) for t in (moved.detach(), lesser_mass))
        raise ValueError(
            f"mass is {got:.6g}, expected 0 to {limit:.6g}, the lesser of the masses of p and q; it is an amount: a "
            "share s of p is s * p.sum(-1)."
        )
    return moved
