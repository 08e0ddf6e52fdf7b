"""Potentials with a graph, for second derivatives and for what the envelope theorem does not cover.

Implicit: at the solution (f, g) write a = (f' - f) / epsilon and b = (g' - g) / epsilon for the solution f', g' of a
changed problem, and G = exp((f + g - C) / epsilon). Balanced, they solve

    a = -log(G (q e^b)),   b = -log(G^T (p e^a))

and unbalanced the same with `k (-f / reach - log ...)`. Newton's method on b, from b = 0 and with every step in the graph,
gives the derivatives of b by p, q, C and epsilon: one step the first, two steps the second and third, for the error of
a step is the square of that before. Weights stand as factors, not as logarithms, so that bins without mass have their
one-sided derivatives. The system has the size of the smaller side.

Unrolled: the iterations themselves, every one in the graph.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from otloss._entropic.problem import DEFAULT_TOLERANCE, EntropicProblem, Settings
from otloss._entropic.search import Potentials

NEWTON_STEPS = 2
RESIDUAL = 1e-6  # of the linear system, in float64; a thousand times that in float32


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
        mass = p.sum(-1) * q.sum(-1)
        reach = problem.reach
        f = self.f if reach is None else -reach * torch.expm1(-self.f / reach)
        g = self.g if reach is None else -reach * torch.expm1(-self.g / reach)
        return (f * p).sum(-1) + (g * q).sum(-1) - epsilon * (self.plan.sum((-2, -1)) - mass)


def check_mass(problem: EntropicProblem) -> None:
    """Raise where a problem holds no mass: only the envelope gradient knows what to do there."""
    for name, weights in (("p", problem.p), ("q", problem.q)):
        if bool((weights.detach().sum(-1) == 0).any()):
            raise ValueError(f'{name} holds no mass in a problem; grad="implicit" and "unrolled" need some in each.')


def implicit_state(problem: EntropicProblem, found: Potentials) -> GraphState:
    """Return the solution with derivatives of first, second and third order by the implicit function theorem."""
    check_mass(problem)
    f, g = found.f, found.g
    p, q, epsilon = (t.to(f.dtype) for t in (problem.p, problem.q, problem.epsilon))
    matrix = problem.cost.dense().to(f.dtype)
    width = epsilon[..., None, None]
    ratio = ((f.unsqueeze(-1) + g.unsqueeze(-2) - matrix) / width).exp()  # G
    if p.shape[-1] >= q.shape[-1]:
        a, b = _newton(ratio, (p, q), (f, g), epsilon.unsqueeze(-1), problem.reach)
    else:
        b, a = _newton(ratio.mT, (q, p), (g, f), epsilon.unsqueeze(-1), problem.reach)
    plan = (p * a.exp()).unsqueeze(-1) * ratio * (q * b.exp()).unsqueeze(-2)
    return GraphState(f + epsilon.unsqueeze(-1) * a, g + epsilon.unsqueeze(-1) * b, plan, matrix)


def _newton(
    ratio: Tensor, weights: tuple[Tensor, Tensor], held: tuple[Tensor, Tensor], epsilon: Tensor, reach: float | None
) -> tuple[Tensor, Tensor]:
    (p, q), (f, g) = weights, held
    damping = torch.ones_like(epsilon) if reach is None else reach / (reach + epsilon)
    offset_f, offset_g = (torch.zeros_like(t) if reach is None else -t / reach for t in (f, g))
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
        if reach is None:
            # A constant in b changes nothing; q is what the round trip leaves as it is.
            system = system + share.unsqueeze(-2).expand_as(system)
            missing = missing - (share * missing).sum(-1, keepdim=True)
        b = b + _solve(system, missing)
    return damping * (offset_f - (ratio * (q * b.exp()).unsqueeze(-2)).sum(-1).log()), b


def _solve(system: Tensor, right: Tensor) -> Tensor:
    try:
        answer: Tensor = torch.linalg.solve(system, right.unsqueeze(-1)).squeeze(-1)
        fits = bool(torch.isfinite(answer).all()) and _condition(system.detach()) < 0.01 / torch.finfo(right.dtype).eps
    except torch.linalg.LinAlgError:
        fits = False
    if not fits:
        raise RuntimeError(
            'grad="implicit" is out of reach: the plan falls into parts that hardly exchange mass, and the equations '
            'for its derivatives are singular to rounding. Raise epsilon, use float64, or use grad="envelope".'
        )
    return answer


def _condition(system: Tensor) -> float:
    return float(torch.linalg.cond(system, 1).amax()) if system.numel() else 1.0


def unrolled_state(problem: EntropicProblem, settings: Settings) -> tuple[GraphState, Potentials]:
    """Return the solution as a function of everything that made it: plain iterations, all of them in the graph."""
    check_mass(problem)
    for name, weights in (("p", problem.p), ("q", problem.q)):
        if weights.requires_grad and bool((weights.detach() == 0).any()):
            raise ValueError(
                f'{name} has bins without mass and requires a gradient: grad="unrolled" goes through log {name} and has '
                'no derivative there. Use grad="implicit" or "envelope".'
            )
    dtype = torch.float64 if problem.p.device.type == "cpu" else problem.cost.dtype
    p, q, epsilon = (t.to(dtype) for t in (problem.p, problem.q, problem.epsilon))
    matrix, width = problem.cost.dense().to(dtype), epsilon.unsqueeze(-1)
    scores, log_p, log_q = -matrix / width.unsqueeze(-1), p.log(), q.log()
    damping = 1.0 if problem.reach is None else problem.reach / (problem.reach + width)
    tolerance = settings.tolerance or DEFAULT_TOLERANCE[problem.cost.dtype]
    f, g = torch.zeros_like(p), torch.zeros_like(q)
    if settings.start is not None:
        g = g + settings.start[1].detach().to(dtype)
    done = torch.zeros(problem.batch, dtype=torch.int64, device=p.device)
    error = torch.full(problem.batch, torch.inf, dtype=dtype, device=p.device)
    for _ in range(settings.max_iterations):
        f = -damping * width * torch.logsumexp(scores + (g / width + log_q).unsqueeze(-2), -1)
        updated = -damping * width * torch.logsumexp(scores.mT + (f / width + log_p).unsqueeze(-2), -1)
        with torch.no_grad():
            goal = q if problem.reach is None else q * (-g / problem.reach).exp()
            off = (((g - updated) / (damping * width)).clamp(max=80.0).expm1().abs() * goal).sum(-1)
            error = off / goal.sum(-1)
        if bool((error <= tolerance).all()):
            break
        g, done = updated, done + (error > tolerance)
    plan = (scores + (f / width + log_p).unsqueeze(-1) + (g / width + log_q).unsqueeze(-2)).exp()
    found = Potentials(f.detach(), g.detach(), error, error <= tolerance, done)
    return GraphState(f, g, plan, matrix), found
