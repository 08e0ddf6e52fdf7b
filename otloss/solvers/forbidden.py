"""Costs with forbidden pairs (+inf) or negative entries, made finite and non-negative.

A constant in the costs changes no optimal plan: with l = min(0, min C) and t the mass that is moved,

    value(C) = value(C - l) + l t

A forbidden pair gets a price B instead of +inf. A plan with mass on such pairs, where another plan avoids them, differs
from that one by a cycle of at most 2 min(n, m) pairs. So with B above min(n, m) times the largest cost the optimum
avoids every forbidden pair if any plan does, and the mass that is found there otherwise tells that none does. The
entropic plan has exp(-B / epsilon) on each, spread over the pairs of such a cycle: B has a multiple of epsilon more.
With a marginal penalty rho the plan has exp(-B / (2 rho + epsilon)) of the mass where no pair is allowed.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from otloss._checks import check_floating

_EPSILONS = 40.0  # per pair of a cycle: exp(-40) of the mass
# Share of the mass that rounding of the weights may force onto forbidden pairs.
_LEAK = {torch.float32: 1e-5, torch.float64: 1e-6}


class FiniteCost(NamedTuple):
    """A matrix of costs that are finite and at least 0, and how it differs from the one that was given.

    Attributes:
        matrix: (..., n, m), C - low, and `price` at forbidden pairs; with the graph of C.
        low: (...), the least cost or 0, without a graph.
        forbidden: (..., n, m), where C is +inf.
        price: (...), B.
    """

    matrix: Float[Tensor, "*batch n m"]
    low: Float[Tensor, "*batch"]
    forbidden: Bool[Tensor, "*batch n m"]
    price: Float[Tensor, "*batch"]

    def check_avoids(self, plan: Float[Tensor, "*batch n m"], mass: Tensor | float) -> Float[Tensor, "*batch"]:
        """Return the mass that the plan has on forbidden pairs, which must be rounding of `mass`, that of p and q.

        Raises:
            ValueError: if it is more; the message names the worst problem.
        """
        leaked = (plan * self.forbidden).sum((-2, -1))
        mass = torch.as_tensor(mass).detach().to(leaked).expand_as(leaked)
        excess = leaked - _LEAK[self.matrix.dtype] * mass
        if (excess > 0).any():
            worst = tuple(int(i) for i in (excess == excess.max()).nonzero()[0])
            raise ValueError(
                f"{f'problem {worst}' if worst else 'the problem'} has {float(leaked[worst]):.3g} of its mass "
                f"{float(mass[worst]):.3g} on forbidden pairs (cost +inf): no plan avoids them. Forbid fewer pairs, or "
                "let mass stay where it is with mass= or marginal_penalty=."
            )
        return leaked


def is_finite_cost(cost: Any) -> bool:
    """Whether a cost is ordinary: no matrix with a negative, infinite or NaN entry."""
    if not isinstance(cost, Tensor) or not check_floating("cost", cost).numel():
        return True
    entries = cost.detach()
    return bool(entries.amin() >= 0 and entries.amax() < torch.inf)


def finite_cost(
    cost: Float[Tensor, "*batch n m"], *, epsilon: Any = None, marginal_penalty: float | None = None
) -> FiniteCost:
    """Return the cost made finite and non-negative.

    Raises:
        ValueError: if an entry is NaN or -inf, if one is negative in an unbalanced problem, or fewer than two axes.
    """
    if cost.dim() < 2:
        raise ValueError(f"the cost matrix has shape {tuple(cost.shape)}, expected (..., n, m) with n, m >= 1.")
    cost = cost.to(torch.promote_types(cost.dtype, torch.float32))
    entries = cost.detach()
    bad = entries.isnan() | (entries == -torch.inf)
    if bad.any():
        first = tuple(int(i) for i in bad.nonzero()[0])
        raise ValueError(
            f"the cost matrix holds {float(entries[first])} at index {first}, expected finite costs, or +inf to forbid "
            "a pair."
        )
    forbidden = entries == torch.inf
    low = entries.amin((-2, -1)).clamp(max=0.0)
    if marginal_penalty is not None and (low < 0).any():
        raise ValueError(
            f"the cost matrix holds {float(low.min())} in an unbalanced problem, expected costs >= 0 with "
            "marginal_penalty: a constant that is added changes how much mass moves."
        )
    shifted = cost - low[..., None, None]
    largest = shifted.detach().masked_fill(forbidden, 0.0).amax((-2, -1))
    width = 0.0 if epsilon is None else torch.as_tensor(epsilon).detach().to(largest).amax()
    pairs = min(cost.shape[-2:]) + 1
    price = pairs * (torch.where(largest > 0, largest, 1.0) + _EPSILONS * width)
    if marginal_penalty is not None:
        price = price + 2 * _EPSILONS * marginal_penalty
    return FiniteCost(torch.where(forbidden, price[..., None, None], shifted), low, forbidden, price)
