"""The options of transport problems, checked."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from otloss._checks import check_count, check_floating, check_positive, is_number

# The sum of the errors of both marginals relative to the mass: in float32 about 100 roundings.
DEFAULT_TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-8}


Price = float | Float[Tensor, "*batch"]
Penalty = Price | tuple[Price | None, Price | None] | None  # the option `marginal_penalty`


class SmallEpsilonError(ValueError):
    """Epsilon, or a blur, is too small for the arithmetic; `least`, in its unit, is about the smallest that would do.

    With `epsilon_relative_to` it is in the unit of the cost.
    """

    def __init__(self, message: str, least: float) -> None:
        super().__init__(message, least)
        self.least = least

    def __str__(self) -> str:
        return str(self.args[0])


@dataclass(frozen=True)
class MarginalPenalty:
    """The prices rho_p and rho_q of a unit of mass that appears or vanishes on a side, in the unit of the cost.

    Each is a number, or (..., 1) with one for each problem; infinity for a side that is kept exactly.
    """

    p: float | Float[Tensor, "*batch 1"]
    q: float | Float[Tensor, "*batch 1"]

    @property
    def swapped(self) -> MarginalPenalty:
        """The penalties of the transposed problem."""
        return MarginalPenalty(self.q, self.p)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return tuple(rho for rho in (self.p, self.q) if isinstance(rho, Tensor))

    def map(self, change: Callable[[Tensor], Tensor]) -> MarginalPenalty:
        """Return the penalties with their tensors changed."""
        if not self.tensors:
            return self
        return MarginalPenalty(*(change(rho) if isinstance(rho, Tensor) else rho for rho in (self.p, self.q)))

    @property
    def largest(self) -> float | Float[Tensor, "*batch 1"]:
        if not self.tensors:
            return max(self.p, self.q)
        first = self.tensors[0]
        both = (torch.as_tensor(rho, dtype=first.dtype, device=first.device) for rho in (self.p, self.q))
        return torch.maximum(*both)

    @property
    def smallest(self) -> float | Float[Tensor, "*batch 1"]:
        return 1 / MarginalPenalty(1 / self.p, 1 / self.q).largest

    @property
    def sum_of_finite(self) -> float | Float[Tensor, "*batch 1"]:
        """The sum of both, a side that is kept left out."""
        return sum(0.0 if is_kept(rho) else rho for rho in (self.p, self.q))

    @property
    def of_constant(self) -> float | Float[Tensor, "*batch 1"]:
        """The price of a constant that is moved from one potential to the other: 1 / (1 / rho_p + 1 / rho_q)."""
        return 1 / (1 / self.p + 1 / self.q)


BOTH_KEPT = MarginalPenalty(math.inf, math.inf)


def is_kept(rho: float | Tensor) -> bool:
    """Return whether the penalty stands for a side that is kept exactly."""
    return isinstance(rho, float) and rho == math.inf


def of_batch(rho: float | Float[Tensor, "*batch 1"]) -> float | Float[Tensor, "*batch"]:
    """Return the penalty of a side without its last axis."""
    return rho.squeeze(-1) if isinstance(rho, Tensor) else rho


def _checked_penalty(penalty: Any) -> MarginalPenalty | None:
    """Return the penalties of both sides; None where both are kept."""
    if isinstance(penalty, MarginalPenalty) or penalty is None:
        return penalty
    name, sides = "marginal_penalty", (penalty, penalty)
    if isinstance(penalty, (tuple, list)):
        if len(penalty) != 2:
            raise ValueError(
                f"{name} has {len(penalty)} entries, expected two, (rho_p, rho_q); for one per problem give a tensor."
            )
        sides = tuple(penalty)
        if sides == (None, None):
            return None
    return MarginalPenalty(*(_checked_side(name, side) for side in sides))


def _checked_side(name: str, rho: Any) -> float | Tensor:
    if rho is None:
        return math.inf
    if not isinstance(rho, Tensor):
        if not is_number(rho):
            raise TypeError(
                f"{name} is a {type(rho).__name__}, expected a number, a tensor of one per problem, or a pair of these "
                "or None, (rho_p, rho_q)."
            )
        return float(check_positive(name, rho))
    check_floating(name, rho)
    if rho.requires_grad and torch.is_grad_enabled():
        raise ValueError(f"{name} requires a gradient, which is not given; expected {name}.detach().")
    bad = ~((rho > 0) & (rho < torch.inf))
    if bad.any():
        raise ValueError(
            f"{name} holds {float(rho.detach()[bad][0])}, expected finite numbers above 0; None keeps a side exactly."
        )
    return rho.detach().clone().unsqueeze(-1)  # derivatives and bounds read it after the call


@dataclass(frozen=True)
class Settings:
    """The options of `sinkhorn`, `sinkhorn_divergence` and `solve`, in their order and checked."""

    epsilon_relative_to: str | None = None
    marginal_penalty: Penalty | MarginalPenalty = None
    grad: str = "envelope"
    tolerance: float | None = None
    max_iterations: int = 10_000
    start: tuple[Tensor, Tensor] | None = None
    impl: str = "auto"

    def __post_init__(self) -> None:
        values: dict[str, tuple[str | None, ...]] = {
            "grad": ("envelope", "implicit"),
            "impl": ("auto", "compiled", "torch", "triton"),
            "epsilon_relative_to": (None, "mean_cost"),
        }
        for name, allowed in values.items():
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name} is {getattr(self, name)!r}, expected one of {allowed}.")
        if (tolerance := self.tolerance) is not None:
            if not is_number(tolerance):
                kind = type(tolerance).__name__
                raise TypeError(f"tolerance is a {kind}, expected a number; a tensor gives .item().")
            object.__setattr__(self, "tolerance", float(check_positive("tolerance", tolerance)))
        object.__setattr__(self, "marginal_penalty", _checked_penalty(self.marginal_penalty))
        check_count("max_iterations", self.max_iterations)

    @cached_property
    def non_defaults(self) -> set[str]:
        """The names of the options that differ from their defaults."""
        return {field.name for field in fields(self) if getattr(self, field.name) != field.default}
