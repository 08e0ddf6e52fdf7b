"""Entropic problems without mass on a side: nothing is moved, and the value is the price of the mass that is given up.

They are solved for uniform weights, so that no solver divides by a mass of zero, and the result is replaced:

    value = 0    or, with marginal penalties, rho_p (mass of p) + rho_q (mass of q)        f = g = 0    P = 0

With penalties, a side that is kept needs mass on the other one.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from otloss.solvers.options import MarginalPenalty, Settings, is_kept
from otloss.solvers.problem import Problem
from otloss.solvers.reductions.way_back import WayBack


def reduce(problem: Problem, settings: Settings) -> tuple[Problem, WayBack] | None:
    """Reduce entropic problems of which some hold no mass on a side.

    Raises:
        ValueError: with grad="implicit", and where the derivative in the weights of such a side is infinite.
    """
    if problem.is_exact or not problem.has_empty_side:  # the exact solver takes them
        return None
    empty_p, empty_q = (w.detach().sum(-1, keepdim=True) == 0 for w in (problem.p, problem.q))
    empty = empty_p | empty_q
    if not bool(empty.any()):
        return None
    _check_derivatives(problem, (empty_p, empty_q), settings)
    p, q = (torch.where(empty, 1.0 / w.shape[-1], w) for w in (problem.p, problem.q))
    empty_value = problem.p.sum(-1) * 0
    if (penalty := problem.marginal_penalty) is not None:
        _check_kept(penalty, (empty_p, empty_q))
        for weights, rho in ((problem.p, penalty.p), (problem.q, penalty.q)):
            if not is_kept(rho):
                empty_value = empty_value + (rho * weights).sum(-1)
    reduced = dataclasses.replace(problem, p=p, q=q, has_empty_side=False)
    return reduced, _EmptySides(empty.squeeze(-1), empty_value)


def _check_kept(penalty: MarginalPenalty, empty: tuple[Tensor, Tensor]) -> None:
    empty_p, empty_q = empty
    for name, rho, is_stuck in (("p", penalty.p, empty_q & ~empty_p), ("q", penalty.q, empty_p & ~empty_q)):
        if is_kept(rho) and bool(is_stuck.any()):
            raise ValueError(
                f"marginal_penalty keeps {name}, but the other side holds no mass in a problem: its mass cannot go "
                "anywhere. Give a number in place of None, or leave such problems out."
            )


def _check_derivatives(problem: Problem, empty: tuple[Tensor, Tensor], settings: Settings) -> None:
    is_implicit = settings.grad == "implicit"
    if problem.marginal_penalty is None and not is_implicit:
        return
    for name, weights, is_empty in zip(("p", "q"), (problem.p, problem.q), empty, strict=True):
        wanted = is_implicit or (torch.is_grad_enabled() and weights.requires_grad)
        if wanted and bool(is_empty.any()):
            advice = (
                'expected some in each with grad="implicit".'
                if is_implicit
                else "the value falls infinitely fast with the first mass that appears there; leave such problems out, "
                "or detach those weights."
            )
            raise ValueError(f"{name} holds no mass in a problem: {advice}")


@dataclass(frozen=True)
class _EmptySides(WayBack):
    empty: Bool[Tensor, "*batch"]
    empty_value: Float[Tensor, "*batch"]

    def value(self, value: Tensor) -> Tensor:
        return torch.where(self.empty, self.empty_value.to(value), value)

    def bound(self, bound: Tensor, plan: Callable[[], Tensor]) -> Tensor:
        return bound.masked_fill(self.empty, 0.0)

    def gap(self, gap: Tensor) -> Tensor:
        return gap.masked_fill(self.empty, 0.0)

    def potentials(self, f: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
        empty = self.empty.unsqueeze(-1)
        return f.masked_fill(empty, 0.0), g.masked_fill(empty, 0.0)

    def plan(self, plan: Tensor) -> Tensor:
        return plan.masked_fill(self.empty[..., None, None], 0.0)
