"""Cost matrices with forbidden pairs (+inf) or negative entries, as plain ones: finite and at least 0.

A constant in the costs changes no optimal plan: with l = min(0, min C) and t the mass that is moved,

    value(C) = value(C - l) + l t

A forbidden pair gets a price B instead of +inf. A plan with mass on such pairs, where another plan avoids them, differs
from that one by a cycle of at most 2 min(n, m) pairs. So with B above min(n, m) times the largest cost the optimum
avoids every forbidden pair if any plan does, and the mass that is found there otherwise tells that none does. The
entropic plan has exp(-B / epsilon) on each, spread over the pairs of such a cycle: B has a multiple of epsilon more.
With a marginal penalty rho the plan has exp(-B / (2 rho + epsilon)) of the mass where no pair is allowed.

The plain matrix is in float64: an entry of -1e8 between bins without mass must not round the others away.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from otloss._checks import check_epsilon, check_floating

_EPSILONS = 40.0  # per pair of a cycle: exp(-40) of the mass
# Share of the mass that rounding of the weights may force onto forbidden pairs.
_LEAK = {torch.float64: 1e-6}
_LEAK_OF_OTHERS = 1e-5


class PlainCost(NamedTuple):
    """A plain matrix, and how it differs from the one that was given.

    Attributes:
        matrix: (..., n, m), C - low, and `price` at forbidden pairs; in float64, with the graph of C.
        low: (...), the least cost or 0, without a graph.
        forbidden: (..., n, m), where C is +inf; None if nowhere.
        price: (...), B.
    """

    matrix: Float[Tensor, "*batch n m"]
    low: Float[Tensor, "*batch"]
    forbidden: Bool[Tensor, "*batch n m"] | None
    price: Float[Tensor, "*batch"]

    def check_avoids(
        self, plan: Float[Tensor, "*batch n m"], mass: Tensor | float, dtype: torch.dtype
    ) -> Float[Tensor, "*batch"]:
        """Return the mass that the plan has on forbidden pairs, which must be rounding of `mass`, that of p and q.

        Raises:
            ValueError: if it is more; the message names the worst problem.
        """
        assert self.forbidden is not None
        leaked = (plan * self.forbidden).sum((-2, -1))
        mass = torch.as_tensor(mass, dtype=leaked.dtype, device=leaked.device).detach().expand_as(leaked)
        excess = leaked - _LEAK.get(dtype, _LEAK_OF_OTHERS) * mass
        if (excess > 0).any():
            worst = tuple(int(i) for i in (excess == excess.max()).nonzero()[0])
            raise ValueError(
                f"{f'problem {worst}' if worst else 'the problem'} has {float(leaked[worst]):.3g} of its mass "
                f"{float(mass[worst]):.3g} on forbidden pairs (cost +inf): no plan avoids them. Forbid fewer pairs, or "
                "let mass stay where it is with mass= or marginal_penalty=."
            )
        return leaked


def is_plain(cost: Any) -> bool:
    """Whether a cost is no matrix with a negative, infinite or NaN entry."""
    if not isinstance(cost, Tensor) or not check_floating("cost", cost).numel():
        return True
    entries = cost.detach()
    return bool(entries.amin() >= 0 and entries.amax() < torch.inf)


def plain_cost(
    cost: Float[Tensor, "*batch n m"], *, epsilon: Any = None, marginal_penalty: float | None = None
) -> PlainCost:
    """Return the matrix made plain.

    Raises:
        TypeError: if epsilon is no number.
        ValueError: if an entry is NaN or -inf, if one is negative in an unbalanced problem, or fewer than two axes; if
            epsilon is not above 0; if costs are so far apart that their differences overflow.
    """
    width = torch.zeros((), dtype=torch.float64, device=cost.device)
    if epsilon is not None:
        width = torch.as_tensor(
            check_epsilon(_detached(epsilon), above_zero=True), dtype=torch.float64, device=cost.device
        )
    if cost.dim() < 2:
        raise ValueError(f"the cost matrix has shape {tuple(cost.shape)}, expected (..., n, m) with n, m >= 1.")
    entries = cost.detach().double()
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
    shifted = cost.double() - low[..., None, None]
    largest = shifted.detach().masked_fill(forbidden, 0.0).amax((-2, -1))
    pairs = min(cost.shape[-2:]) + 1
    price = pairs * (torch.where(largest > 0, largest, 1.0) + _EPSILONS * (width.amax() if width.numel() else 0.0))
    if marginal_penalty is not None:
        price = price + 2 * _EPSILONS * marginal_penalty
    if not torch.isfinite(price).all():
        raise ValueError(
            f"the finite costs are up to {float(largest.max()):.3g} apart, which overflows; rescale them (and epsilon)."
        )
    if not forbidden.any():
        return PlainCost(shifted, low, None, price)
    return PlainCost(torch.where(forbidden, price[..., None, None], shifted), low, forbidden, price)


def _detached(epsilon: Any) -> Any:
    return epsilon.detach() if isinstance(epsilon, Tensor) else epsilon
