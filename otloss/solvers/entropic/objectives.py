"""The objectives of an entropic problem at potentials of which f is an exact update from g, and the plan's sums.

All of it is computed from soft minima and products, so a cost without a matrix needs none here. The value is the dual
objective at the potentials, D = f.p + g.q - epsilon (sum P - mass). In unbalanced problems rho_p (1 - exp(-f / rho_p))
replaces f, rho_q (1 - exp(-g / rho_q)) replaces g, and mass_p mass_q replaces the mass. On a side that is kept the
potential stays.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from jaxtyping import Float
from torch import Tensor

from otloss._checks import float64_or
from otloss.solvers.entropic.arithmetic import potential_of_plan
from otloss.solvers.entropic.equations.updates import build_updates
from otloss.solvers.options import is_kept
from otloss.solvers.problem import Problem

_MOST_ENTRIES_BY_THEMSELVES = 2**28  # two grids of 128 x 128: seconds of a processor
_PLAN_BLOCK_ENTRIES = 2**20  # several arrays of this size exist at a time


def dual_term(potential: Tensor, rho: float | Tensor) -> Tensor:
    """Return a potential's term in the dual: `rho (1 - exp(-f / rho))`, or itself for a side that is kept."""
    return potential if is_kept(rho) else -rho * torch.expm1(-potential / rho)


def kept_mass(weights: Tensor, potential: Tensor, rho: float | Tensor) -> Tensor:
    """Return w_i exp(-f_i / rho), 0 at bins without mass: exp(-f_i / rho) alone may overflow at light bins."""
    return (weights.log() - potential / rho).exp()


def dual_sum(weights: Tensor, potential: Tensor, rho: float | Tensor) -> tuple[Tensor, Tensor]:
    """Return sum_i w_i rho (1 - exp(-f_i / rho)) and the mass sum_i w_i exp(-f_i / rho)."""
    if is_kept(rho):
        return (weights * potential).sum(-1), weights.sum(-1)
    exponent, mass = -potential / rho, kept_mass(weights, potential, rho)
    gain = torch.where(exponent > 1, mass - weights, weights * exponent.clamp(max=1.0).expm1())
    return (-rho * gain).sum(-1), mass.sum(-1)


def sizes_of_terms(problem: Problem, f: Tensor, g: Tensor) -> Float[Tensor, "*batch"]:
    """Return the sum of the sizes of all terms of the primal and dual objectives, each times its own conditioning."""
    p, q, epsilon = (t.detach().to(f.dtype) for t in (problem.p, problem.q, problem.epsilon))
    penalty, mass_p, mass_q = problem.marginal_penalty, p.sum(-1), q.sum(-1)
    if penalty is None:
        return (p * f.abs()).sum(-1) + (q * g.abs()).sum(-1) + epsilon * (mass_p + mass_q)
    total = epsilon * mass_p * mass_q
    for weights, potential, rho in ((p, f, penalty.p), (q, g, penalty.q)):
        kept, size = kept_mass(weights, potential, rho), potential.abs()
        # The exponential in the kept mass has the relative error of its exponent.
        gain = torch.where(size > rho, rho * (weights + kept), weights * size)
        total = total + (gain + kept * (size + epsilon.unsqueeze(-1) * (1 + size / rho))).sum(-1)
    return total


def balanced_value(p: Tensor, q: Tensor, f: Tensor, g: Tensor) -> Float[Tensor, "*batch"]:
    """Return f.p + g.q for p and q scaled to the mean of their masses.

    The masses differ by the rounding of the dtype that p and q were given in. Where potentials are as large as a price,
    their constant times that rounding is more than the rounding of the value.
    """
    mass_p, mass_q = p.detach().sum(-1), q.detach().sum(-1)
    half, tiny = (mass_q - mass_p) / 2, torch.finfo(p.dtype).tiny
    scale_p, scale_q = 1 + half / mass_p.clamp(min=tiny), 1 - half / mass_q.clamp(min=tiny)
    return scale_p * (f * p).sum(-1) + scale_q * (g * q).sum(-1)


def dual_value(problem: Problem, f: Tensor, g: Tensor) -> Float[Tensor, "*batch"]:
    """Return D at potentials of which f is an exact update from g."""
    penalty = problem.marginal_penalty
    p, q, epsilon = (t.detach().to(f.dtype) for t in (problem.p, problem.q, problem.epsilon))
    if penalty is None:
        return balanced_value(p, q, f, g)
    mass_p, mass_q = p.sum(-1), q.sum(-1)
    (from_p, kept), (from_q, _) = dual_sum(p, f, penalty.p), dual_sum(q, g, penalty.q)
    return from_p + from_q - epsilon * (kept - mass_p * mass_q)


def log_marginal_ratios(problem: Problem, f: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
    """Return log(P 1 / p) and log(P^T 1 / q), as their limits at bins without mass."""
    updates = build_updates(problem)
    return (f - updates.softmin_rows(g)) / updates.epsilon, (g - updates.softmin_columns(f)) / updates.epsilon


def marginals(problem: Problem, f: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
    """Return P 1 and P^T 1."""
    ratios = log_marginal_ratios(problem, f, g)
    p, q = ((w.detach().to(f.dtype).log() + x).exp() for w, x in zip((problem.p, problem.q), ratios, strict=True))
    return p, q


def linear_cost(problem: Problem, f: Tensor, g: Tensor) -> Float[Tensor, "*batch"]:
    """Return `<C, P>`, block by block of rows, or by the rows that a kernel sums."""
    log_p, log_q = (w.detach().to(f.dtype).log() for w in (problem.p, problem.q))
    with torch.no_grad():
        epsilon = problem.epsilon.detach().to(f.dtype)
        costs = problem.cost.plan_costs(potential_of_plan(problem, f), g, log_p, log_q, epsilon=epsilon)
    if costs is not None:
        return costs.sum(-1)
    total = f.new_zeros(problem.batch)
    for _, plan, rows in plan_blocks(problem, f, g):
        total += (plan * rows).sum((-2, -1))
    return total


def relative_entropy(problem: Problem, f: Tensor, g: Tensor) -> Float[Tensor, "*batch"]:
    """Return the entropy term, `sum P log(P / p q^T)` or KL: the derivative of the value in epsilon.

    It is a sum of P (f + g - C) / epsilon, whose three parts may be far larger than it where costs are many epsilons.
    Entry by entry nothing cancels; for more entries than that is worth they are summed by themselves.
    """
    if math.prod(problem.cost.shape) * problem.batch.numel() <= _MOST_ENTRIES_BY_THEMSELVES:
        wide = float64_or(f.dtype, f.device)
        f, g = f.to(wide), g.to(wide)
        inner, mass_of_plan = f.new_zeros(problem.batch), f.new_zeros(problem.batch)
        for part, plan, rows in plan_blocks(problem, f, g):
            excess = (f[..., part, None] + g[..., None, :] - rows).masked_fill_(plan == 0, 0.0)
            inner += (plan * excess).sum((-2, -1))
            mass_of_plan += plan.sum((-2, -1))
    else:
        rows_of_plan, columns = marginals(problem, f, g)
        inner = (f * rows_of_plan).sum(-1) + (g * columns).sum(-1) - linear_cost(problem, f, g)
        mass_of_plan = rows_of_plan.sum(-1)
    entropy = inner / problem.epsilon.detach().to(f.dtype)
    if problem.marginal_penalty is None:
        return entropy
    return entropy - mass_of_plan + problem.p.detach().to(f.dtype).sum(-1) * problem.q.detach().to(f.dtype).sum(-1)


def plan_blocks(problem: Problem, f: Tensor, g: Tensor) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """Yield (slice of rows, P there, C there), in the dtype of the potentials."""
    n, m = problem.cost.shape
    log_p, log_q = (w.detach().to(f.dtype).log() for w in (problem.p, problem.q))
    f, epsilon = potential_of_plan(problem, f), problem.epsilon.detach().to(f.dtype)[..., None, None]
    step = max(1, _PLAN_BLOCK_ENTRIES // max(1, m * problem.batch.numel()))
    for start in range(0, n, step):
        part = slice(start, min(start + step, n))
        with torch.no_grad():
            rows = problem.cost.row_block(part.start, part.stop).to(f.dtype)
            exponent = (f[..., part, None] + g[..., None, :] - rows) / epsilon
            exponent = exponent + log_p[..., part, None] + log_q[..., None, :]
            # exp is ten times slower where its result underflows, and an entry of exp(-200) counts as 0.
            nothing = exponent <= -200.0
            yield part, exponent.clamp_(min=-200.0).exp_().masked_fill_(nothing, 0.0), rows
