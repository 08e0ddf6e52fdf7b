"""Potentials with a graph, for second derivatives and for what the envelope theorem does not cover.

Implicit: at the solution (f, g) write a = (f' - f) / epsilon and b = (g' - g) / epsilon for the solution f', g' of a
changed problem, and G = exp((f + g - C) / epsilon). Balanced, they solve

    a = -log(G (q e^b)),   b = -log(G^T (p e^a))

and unbalanced the same with `k (-f / rho - log ...)`. Newton's method on b, from b = 0 and with every step in the
graph, gives the derivatives of b by p, q, C and epsilon: one step the first, two steps the second and third, for the
error of a step is the square of that before. Weights stand as factors, not as logarithms, so that bins without mass
have their one-sided derivatives. The system has the size of the smaller side.

Where epsilon is small the plan falls into parts that hardly exchange mass, and the system is singular to rounding: how
potentials of one part stand to those of another is then all but undetermined. The plan does not feel that, nor do its
derivatives in the costs, so a tiny multiple of the identity is added and changes nothing. Derivatives in the weights do
feel it (mass that must move from one part to another): they raise RuntimeError.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from otloss.solvers.entropic.problem import EntropicProblem, dual_term, has_float64
from otloss.solvers.entropic.search import Potentials

NEWTON_STEPS = 2
SMALL_STEP = 0.1  # of g / epsilon
RIDGE = 1e-11
LARGEST_CONDITION = 1e13


@dataclass(frozen=True)
class GraphState:
    """A solution with a graph: potentials, plan and cost matrix in the arithmetic dtype of the potentials."""

    f: Float[Tensor, "*batch n"]
    g: Float[Tensor, "*batch m"]
    plan: Float[Tensor, "*batch n m"]
    matrix: Float[Tensor, "*batch n m"]

    @property
    def linear_cost(self) -> Float[Tensor, "*batch"]:
        return (self.plan * self.matrix).sum((-2, -1))

    def value(self, problem: EntropicProblem) -> Float[Tensor, "*batch"]:
        """D, whose derivatives in the potentials vanish."""
        p, q, epsilon = (t.to(self.f.dtype) for t in (problem.p, problem.q, problem.epsilon))
        rho = problem.marginal_penalty
        mass = p.sum(-1) if rho is None else p.sum(-1) * q.sum(-1)
        outside = (dual_term(self.f, rho) * p).sum(-1) + (dual_term(self.g, rho) * q).sum(-1)
        return outside - epsilon * (self.plan.sum((-2, -1)) - mass)


def check_mass(problem: EntropicProblem) -> None:
    """Raise where a problem holds no mass: only the envelope gradient knows what to do there."""
    for name, weights in (("p", problem.p), ("q", problem.q)):
        if bool((weights.detach().sum(-1) == 0).any()):
            raise ValueError(f'{name} holds no mass in a problem; expected some in each with grad="implicit".')


def implicit_state(problem: EntropicProblem, found: Potentials) -> GraphState:
    """Return the solution with derivatives of first, second and third order by the implicit function theorem."""
    check_mass(problem)
    wide = torch.float64 if has_float64(found.f.device) else found.f.dtype
    f, g, p, q, epsilon = (t.to(wide) for t in (found.f, found.g, problem.p, problem.q, problem.epsilon))
    matrix = problem.cost.dense().to(wide)
    ratio = ((f.unsqueeze(-1) + g.unsqueeze(-2) - matrix) / epsilon[..., None, None]).exp()  # G
    system = _System(epsilon.unsqueeze(-1), problem.marginal_penalty, p.requires_grad or q.requires_grad)
    if p.shape[-1] >= q.shape[-1]:
        a, b = system.newton(ratio, (p, q), (f, g))
    else:
        b, a = system.newton(ratio.mT, (q, p), (g, f))
    plan = (p * a.exp()).unsqueeze(-1) * ratio * (q * b.exp()).unsqueeze(-2)
    return GraphState(f + epsilon.unsqueeze(-1) * a, g + epsilon.unsqueeze(-1) * b, plan, matrix)


@dataclass(frozen=True)
class _System:
    epsilon: Tensor  # (..., 1)
    rho: float | None
    through_weights: bool

    def newton(
        self, ratio: Tensor, weights: tuple[Tensor, Tensor], held: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, Tensor]:
        (p, q), (f, g), rho = weights, held, self.rho
        damping = torch.ones_like(self.epsilon) if rho is None else rho / (rho + self.epsilon)
        offset_f, offset_g = (torch.zeros_like(t) if rho is None else -t / rho for t in (f, g))
        b = torch.zeros_like(g)
        identity = torch.eye(g.shape[-1], dtype=g.dtype, device=g.device)
        share = q / q.sum(-1, keepdim=True)
        for _ in range(NEWTON_STEPS):
            along = ratio * (q * b.exp()).unsqueeze(-2)
            total = along.sum(-1)
            a = damping * (offset_f - total.log())
            across = ratio * (p * a.exp()).unsqueeze(-1)
            received = across.sum(-2)
            missing = damping * (offset_g - received.log()) - b
            # Row-stochastic: what a change of b does to b in one round.
            round_trip = (across / received.unsqueeze(-2)).mT @ (along / total.unsqueeze(-1))
            system = identity - damping.unsqueeze(-1) ** 2 * round_trip
            if rho is None:
                # A constant in b changes nothing; q is what the round trip leaves as it is.
                system = system + share.unsqueeze(-2).expand_as(system)
                missing = missing - (share * missing).sum(-1, keepdim=True)
            b = b + self.solve(system, missing, identity)
        # Far from a solution the steps lead nowhere: then they give derivatives alone, and the potentials stay.
        near = b.detach().abs().amax(-1, keepdim=True) < SMALL_STEP
        b = torch.where(near, b, b - b.detach())
        return damping * (offset_f - (ratio * (q * b.exp()).unsqueeze(-2)).sum(-1).log()), b

    def solve(self, system: Tensor, right: Tensor, identity: Tensor) -> Tensor:
        if not self.through_weights:
            system = system + RIDGE * identity
        try:
            answer: Tensor = torch.linalg.solve(system, right.unsqueeze(-1)).squeeze(-1)
            fits = bool(torch.isfinite(answer).all())
            if self.through_weights:
                fits = fits and _condition(system.detach()) < LARGEST_CONDITION
        except torch.linalg.LinAlgError:
            fits = False
        if not fits:
            raise RuntimeError(
                'grad="implicit" cannot be computed: the plan falls into parts that hardly exchange mass (or has not '
                "converged), and the equations for its derivatives in the weights are singular to rounding. Raise "
                'epsilon or max_iterations, use grad="envelope", or detach the weights if only the cost is to be '
                "differentiated."
            )
        return answer


def _condition(system: Tensor) -> float:
    return float(torch.linalg.cond(system, 1).amax()) if system.numel() else 1.0
