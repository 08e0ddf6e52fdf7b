"""The options of transport problems, checked."""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import cached_property
from numbers import Real

import torch
from torch import Tensor

from otloss._checks import check_positive

# The sum of the errors of both marginals relative to the mass: in float32 about 100 roundings.
DEFAULT_TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-8}


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
    impl: str = "auto"

    def __post_init__(self) -> None:
        values: dict[str, tuple[str | None, ...]] = {
            "grad": ("envelope", "implicit"),
            "impl": ("auto", "compiled", "torch"),
            "epsilon_relative_to": (None, "mean_cost"),
        }
        for name, allowed in values.items():
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name} is {getattr(self, name)!r}, expected one of {allowed}.")
        for name in ("marginal_penalty", "tolerance"):
            number = getattr(self, name)
            if number is None:
                continue
            if isinstance(number, bool) or not isinstance(number, Real):
                raise TypeError(f"{name} is a {type(number).__name__}, expected a number; a tensor gives .item().")
            object.__setattr__(self, name, float(check_positive(name, float(number))))
        if isinstance(self.max_iterations, bool) or not isinstance(self.max_iterations, int) or self.max_iterations < 1:
            raise ValueError(f"max_iterations is {self.max_iterations!r}, expected a whole number of at least 1.")

    @cached_property
    def changed(self) -> set[str]:
        """The names of the options that differ from their defaults."""
        return {field.name for field in fields(self) if getattr(self, field.name) != field.default}
