"""Derivatives of the value of an entropic problem.

Envelope. At the optimum the dual D does not change with its potentials, so only its explicit dependence counts:

    dV/dp = f,   dV/dq = g,   dV/dC = P,   dV/depsilon = KL(P | p q^T)

and, with a marginal penalty rho, `dV/dp_i = rho (1 - exp(-f_i / rho)) - epsilon (exp(-f_i / rho) - mass of q)`.
These are first derivatives, exact at convergence, and hold no history of the iterations.

Implicit. At the solution (f, g) write a = (f' - f) / epsilon and b = (g' - g) / epsilon for the solution f', g' of a
changed problem, and G = exp((f + g - C) / epsilon). Balanced, they solve

    a = -log(G (q e^b)),   b = -log(G^T (p e^a))

and unbalanced the same with `k (-f / rho - log ...)`. Newton's method on b, from b = 0 and with every step in the
graph, gives the derivatives of b by p, q, C and epsilon: one step the first, two steps the second and third, for the
error of a step is the square of that before. Weights stand as factors, not as logarithms, so that bins without mass
have their one-sided derivatives. The system has the size of the smaller side.

Where epsilon is small the plan falls into parts that hardly exchange mass, and the system is singular to rounding: it
does not determine how potentials of one part compare with those of another. Neither the plan nor its derivatives in
the costs depend on that, so a tiny multiple of the identity is added and changes nothing. Derivatives in the weights do
depend on it (mass that must move from one part to another): they raise RuntimeError.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from otloss._autograd import check_no_transform, once_only
from otloss._checks import is_differentiated
from otloss.solvers.entropic.potentials import Potentials
from otloss.solvers.entropic.problem import EntropicProblem, check_mass, dual_term, has_float64
from otloss.solvers.entropic.value import dual_value, relative_entropy

SECOND_DERIVATIVE = (
    'a second derivative of an entropic transport value was asked for, and grad="envelope" gives first ones only; use '
    'grad="implicit", or drop create_graph=True.'
)
LARGEST_EXPONENT = 80.0  # of a derivative; exp of it is below the largest float32
NEWTON_STEPS = 2
SMALL_STEP = 0.1  # of g / epsilon
RIDGE = 1e-11
LARGEST_CONDITION = 1e13


# ---- envelope ----------------------------------------------------------------------------------------------------


def envelope_value(problem: EntropicProblem, f: Tensor, g: Tensor) -> Float[Tensor, "*batch"]:
    """Return D with its first derivatives in p, q, epsilon and the cost's tensors, at fixed potentials."""
    if not (torch.is_grad_enabled() and any(t.requires_grad for t in problem.inputs)):
        return dual_value(problem, f, g)
    if problem.marginal_penalty is not None:
        check_mass(
            problem,
            "the value falls infinitely fast with the first mass that appears there; leave such problems out, or "
            "detach those weights.",
            only_with_gradient=True,
        )
    check_no_transform()
    value: Tensor = _EnvelopeValue.apply(problem, f, g, *problem.inputs)
    return value


class _EnvelopeValue(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, problem: EntropicProblem, f: Tensor, g: Tensor, *inputs: Tensor) -> Tensor:
        ctx.problem, ctx.count = problem, len(inputs)
        # Those without a gradient too: torch then notices where one of them was changed in place in between.
        ctx.save_for_backward(f, g, *inputs, *problem.cost.tensors())
        return dual_value(problem, f, g)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        f, g, *held = ctx.saved_tensors
        inputs = held[: ctx.count]
        problem: EntropicProblem = ctx.problem
        upstream = gradients[0].detach()
        wanted = ctx.needs_input_grad[3:]
        found: list[Tensor | None] = [None] * len(inputs)
        with torch.no_grad():
            epsilon, rho = problem.epsilon.detach().to(f.dtype), problem.marginal_penalty
            for k, (potential, other) in enumerate(((f, problem.q), (g, problem.p))):
                if wanted[k]:
                    mass = other.detach().to(f.dtype).sum(-1)
                    found[k] = upstream.unsqueeze(-1) * weight_gradient(potential, mass, epsilon, rho)
            if wanted[2]:
                found[2] = upstream * relative_entropy(problem, f, g)
        if any(wanted[3:]):
            log_p, log_q = (w.detach().to(f.dtype).log() for w in (problem.p, problem.q))
            found[3:] = problem.cost.plan_gradients(f, g, log_p, log_q, epsilon=epsilon, upstream=upstream)
        return None, None, None, *(
            None if t is None else once_only(t.to(i.dtype), SECOND_DERIVATIVE, gradients[0], *inputs)
            for t, i in zip(found, inputs, strict=True)
        )  # fmt: skip


def weight_gradient(potential: Tensor, mass: Tensor, epsilon: Tensor, rho: float | None) -> Tensor:
    """Return dV/dp from f, or dV/dq from g, where `mass` (...) is that of the other side."""
    if rho is None:
        return potential  # up to a constant, which does not count where masses are held
    # At bins without mass this may exceed all numbers: cut off, so that a mask of zeros still makes it vanish.
    potential = potential.clamp(min=-LARGEST_EXPONENT * rho)
    share = (-potential / rho).exp()
    gradient = dual_term(potential, rho) - epsilon.unsqueeze(-1) * (share - mass.unsqueeze(-1))
    return gradient.masked_fill((mass == 0).unsqueeze(-1), rho)


# ---- implicit ----------------------------------------------------------------------------------------------------


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


def implicit_state(problem: EntropicProblem, found: Potentials) -> GraphState:
    """Return the solution with derivatives of first, second and third order by the implicit function theorem."""
    check_mass(problem, 'expected some in each with grad="implicit".')
    wide = torch.float64 if has_float64(found.f.device) else found.f.dtype
    f, g, p, q, epsilon = (t.to(wide) for t in (found.f, found.g, problem.p, problem.q, problem.epsilon))
    matrix = problem.cost.dense().to(wide)
    ratio = ((f.unsqueeze(-1) + g.unsqueeze(-2) - matrix) / epsilon[..., None, None]).exp()  # G
    equations = _Equations(epsilon.unsqueeze(-1), problem.marginal_penalty, is_differentiated(p, q))
    if p.shape[-1] >= q.shape[-1]:
        a, b = equations.newton(ratio, (p, q), (f, g))
    else:
        b, a = equations.newton(ratio.mT, (q, p), (g, f))
    plan = (p * a.exp()).unsqueeze(-1) * ratio * (q * b.exp()).unsqueeze(-2)
    return GraphState(f + epsilon.unsqueeze(-1) * a, g + epsilon.unsqueeze(-1) * b, plan, matrix)


@dataclass(frozen=True)
class _Equations:
    epsilon: Tensor  # (..., 1)
    rho: float | None
    through_weights: bool

    def newton(
        self, ratio: Tensor, weights: tuple[Tensor, Tensor], held: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, Tensor]:
        (p, q), (f, g), rho = weights, held, self.rho
        damping = torch.ones_like(self.epsilon) if rho is None else rho / (rho + self.epsilon)  # k
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
        # Steps from far away lead nowhere: then they give derivatives alone, and the potentials stay.
        near = b.detach().abs().amax(-1, keepdim=True) < SMALL_STEP
        b = torch.where(near, b, b - b.detach())
        return damping * (offset_f - (ratio * (q * b.exp()).unsqueeze(-2)).sum(-1).log()), b

    def solve(self, system: Tensor, right: Tensor, identity: Tensor) -> Tensor:
        if not self.through_weights:
            system = system + RIDGE * identity
        try:
            answer: Tensor = torch.linalg.solve(system, right.unsqueeze(-1)).squeeze(-1)
            valid = bool(torch.isfinite(answer).all())
            if self.through_weights and valid and system.numel():
                valid = float(torch.linalg.cond(system.detach(), 1).amax()) < LARGEST_CONDITION
        except torch.linalg.LinAlgError:
            valid = False
        if not valid:
            raise RuntimeError(
                'grad="implicit" has no answer here: the plan falls into parts that hardly exchange mass (or has not '
                "converged), and the equations for its derivatives in the weights are singular to rounding. Raise "
                'epsilon or max_iterations, use grad="envelope", or detach the weights if only the cost is to be '
                "differentiated."
            )
        return answer
