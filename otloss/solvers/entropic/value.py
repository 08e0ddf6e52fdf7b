"""The value of an entropic problem at given potentials, and its duality gap.

All of it is made of soft minima and products, so that costs without a matrix stay without.

The gap needs a plan that keeps the marginals. Where f is an exact update the rows of P are right, and only its
columns are off. With `y = min(1, q / P^T 1)` the plan `A = P diag(y)` is too small everywhere. The missing mass, r in
the rows and s in the columns, d in all, is moved by `B = r s^T / d`. A + B is feasible, and by the convexity of the
entropy

    primal(A + B) <= <C, A> + epsilon sum A log(A / (t p q^T)) + <C, B> + epsilon sum B log(B / ((1 - t) p q^T)) + ...

for every t; `t = sum A / mass` is the best. In the first sum the costs cancel, for `log(A / p q^T)` is made of f, g
and C; the second takes one product with C.
"""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from otloss.solvers.entropic.log_domain import Sweep
from otloss.solvers.entropic.problem import EntropicProblem, dual_sum

_BLOCK_ENTRIES = 2**20  # of a block of the plan; several arrays of it are alive


def dual_value(problem: EntropicProblem, f: Tensor, g: Tensor) -> Float[Tensor, "*batch"]:
    """Return D at potentials of which f is an exact update from g."""
    rho = problem.marginal_penalty
    if rho is None:
        return (f * problem.p.detach()).sum(-1) + (g * problem.q.detach()).sum(-1)
    p, q, epsilon = (t.detach().to(f.dtype) for t in (problem.p, problem.q, problem.epsilon))
    mass_p, mass_q = p.sum(-1), q.sum(-1)
    (from_p, kept), (from_q, _) = dual_sum(p, f, rho), dual_sum(q, g, rho)
    value = from_p + from_q - epsilon * (kept - mass_p * mass_q)
    return torch.where((mass_p == 0) | (mass_q == 0), rho * (mass_p + mass_q), value)


def column_marginal(problem: EntropicProblem, f: Tensor, g: Tensor) -> Tensor:
    """P^T 1."""
    sweep = Sweep.of(problem)
    return sweep.log_q.exp() * ((g - sweep.softmin_columns(f)) / sweep.epsilon).exp()


def row_marginal(problem: EntropicProblem, f: Tensor, g: Tensor) -> Tensor:
    """P 1."""
    sweep = Sweep.of(problem)
    return sweep.log_p.exp() * ((f - sweep.softmin_rows(g)) / sweep.epsilon).exp()


def linear_cost(problem: EntropicProblem, f: Tensor, g: Tensor) -> Float[Tensor, "*batch"]:
    """Return `<C, P>`, block by block of rows."""
    total = f.new_zeros(problem.batch)
    for _, plan, rows in plan_blocks(problem, f, g):
        total += (plan * rows).sum((-2, -1))
    return total


def relative_entropy(problem: EntropicProblem, f: Tensor, g: Tensor) -> Float[Tensor, "*batch"]:
    """Return the entropy term, `sum P log(P / p q^T)` or KL: the derivative of the value in epsilon."""
    rows, columns = row_marginal(problem, f, g), column_marginal(problem, f, g)
    inner = (f * rows).sum(-1) + (g * columns).sum(-1) - linear_cost(problem, f, g)
    entropy = inner / problem.epsilon.detach().to(f.dtype)
    if problem.marginal_penalty is None:
        return entropy
    mass = problem.p.detach().to(f.dtype).sum(-1) * problem.q.detach().to(f.dtype).sum(-1)
    return entropy - rows.sum(-1) + mass


def plan_blocks(problem: EntropicProblem, f: Tensor, g: Tensor) -> Any:
    """Yield (slice of rows, P there, C there), in the dtype of the potentials."""
    n, m = problem.cost.shape
    log_p, log_q = (w.detach().to(f.dtype).log() for w in (problem.p, problem.q))
    epsilon = problem.epsilon.detach().to(f.dtype)[..., None, None]
    step = max(1, _BLOCK_ENTRIES // max(1, m * problem.batch.numel()))
    for start in range(0, n, step):
        part = slice(start, min(start + step, n))
        with torch.no_grad():
            rows = problem.cost.row_block(part.start, part.stop).to(f.dtype)
            exponent = (f[..., part, None] + g[..., None, :] - rows) / epsilon
            exponent = exponent + log_p[..., part, None] + log_q[..., None, :]
            # exp is ten times slower where its result underflows, and an entry of exp(-200) counts as 0.
            nothing = exponent <= -200.0
            yield part, exponent.clamp_(min=-200.0).exp_().masked_fill_(nothing, 0.0), rows


def duality_gap(problem: EntropicProblem, f: Tensor, g: Tensor) -> Float[Tensor, "*batch"]:
    """Return a bound of primal minus dual at a feasible plan, at least 0, in the unit of the value."""
    with torch.no_grad():
        gap = _gap_unbalanced(problem, f, g) if problem.marginal_penalty is not None else _gap_balanced(problem, f, g)
        return gap.clamp(min=0)


def _rounding(problem: EntropicProblem, f: Tensor, g: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """log y, and the masses r and s that `P diag(y)` lacks in its rows and columns."""
    sweep = Sweep.of(problem)
    p, q = sweep.log_p.exp(), sweep.log_q.exp()
    log_ratio = (sweep.softmin_columns(f) - g) / sweep.epsilon  # of q to P^T 1
    log_y = log_ratio.clamp(max=0.0)
    columns = torch.minimum(q, q * (-log_ratio).exp())
    rows = p * ((f - sweep.softmin_rows(g + sweep.epsilon * log_y)) / sweep.epsilon).exp()
    return log_y, p - torch.minimum(rows, p), q - columns


def _moved(problem: EntropicProblem, r: Tensor, s: Tensor) -> Tensor:
    """`<C, r s^T / d>`."""
    lack = (r.sum(-1) + s.sum(-1)) / 2
    return (r * problem.cost.apply(s)).sum(-1) / lack.clamp(min=torch.finfo(r.dtype).tiny)


def rounded_linear_cost(problem: EntropicProblem, f: Tensor, g: Tensor) -> Float[Tensor, "*batch"]:
    """Return the cost of the plan made feasible, A + B: an upper bound of the exact transport cost."""
    log_y, r, s = _rounding(problem, f, g)
    kept = linear_cost(problem, f, g + problem.epsilon.detach().to(f.dtype).unsqueeze(-1) * log_y)
    return kept + _moved(problem, r, s)


def _gap_balanced(problem: EntropicProblem, f: Tensor, g: Tensor) -> Tensor:
    log_y, r, s = _rounding(problem, f, g)
    p, q, epsilon = (t.detach().to(f.dtype) for t in (problem.p, problem.q, problem.epsilon))
    lack, mass = (r.sum(-1) + s.sum(-1)) / 2, p.sum(-1)
    share = (lack / mass.clamp(min=torch.finfo(mass.dtype).tiny)).clamp(max=1.0)
    spread = torch.xlogy(r, r / p).nan_to_num(nan=0.0).sum(-1) + torch.xlogy(s, s / q).nan_to_num(nan=0.0).sum(-1)
    entropy = spread - torch.xlogy(lack, lack) - torch.xlogy(lack, share)
    # The dual's own terms are left out of both sides, so that what remains is small where the gap is.
    kept = -(f * r).sum(-1) - (g * s).sum(-1) + epsilon * (log_y * (q - s)).sum(-1)
    kept = kept - epsilon * torch.xlogy(mass - lack, 1 - share)
    return torch.where(lack == 0, 0.0, kept + _moved(problem, r, s) + epsilon * entropy)


def _gap_unbalanced(problem: EntropicProblem, f: Tensor, g: Tensor) -> Tensor:
    rho, empty = problem.marginal_penalty, (problem.p.sum(-1) == 0) | (problem.q.sum(-1) == 0)
    assert rho is not None
    rows, columns = row_marginal(problem, f, g), column_marginal(problem, f, g)
    p, q, epsilon = (t.detach().to(f.dtype) for t in (problem.p, problem.q, problem.epsilon))
    mass = p.sum(-1) * q.sum(-1)
    primal = (f * rows).sum(-1) + (g * columns).sum(-1) - epsilon * (rows.sum(-1) - mass)
    for held, weights in ((rows, p), (columns, q)):
        ratio = torch.where(weights > 0, held / weights, 1.0)
        primal = primal + rho * (torch.xlogy(held, ratio) - held + weights).sum(-1)
    dual = dual_sum(p, f, rho)[0] + dual_sum(q, g, rho)[0] - epsilon * (rows.sum(-1) - mass)
    return torch.where(empty, 0.0, primal - dual)
