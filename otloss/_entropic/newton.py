"""Newton's method on the dual, for problems that Sinkhorn settles too slowly.

Where the plan falls into parts that hardly exchange mass, as between clouds of equal weights that nearly match point to
point, an iteration moves next to nothing between the parts. With b = g / epsilon and S the rows of the plan scaled to
one, the dual in b has the slope q - S^T p, and the curvature

    H = diag(S^T p) - S^T diag(p) S

It is a sum of logarithms of sums of exponentials, whose third derivative along a step h is at most the spread of h
(largest minus smallest entry) times the second: a step shortened to log(1 + spread) / spread goes uphill always
(F. Bach, Self-concordant analysis for logistic regression, 2010).
"""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor

from otloss._entropic.log_domain import Sweep
from otloss._entropic.problem import EntropicProblem

STEPS = 40
RIDGE = 1e-13  # of the mass: the constant in b, and parts that exchange nothing, are left undecided by H


def newton_search(
    problem: EntropicProblem, g: Float[Tensor, "*batch m"], *, tolerance: float, most: int
) -> tuple[Float[Tensor, "*batch n"], Float[Tensor, "*batch m"], Float[Tensor, "*batch"], Int[Tensor, "*batch"]]:
    """Return f, g, the marginal error and the number of steps; balanced problems with mass, in float64."""
    sweep = Sweep.of(problem)
    p, q = sweep.log_p.exp(), sweep.log_q.exp()
    mass = p.sum(-1, keepdim=True)
    scores = -problem.cost.dense() / problem.epsilon[..., None, None] + sweep.log_q.unsqueeze(-2)
    b = g / sweep.epsilon
    done = torch.zeros(problem.batch, dtype=torch.int64, device=p.device)
    for _ in range(min(STEPS, most)):
        rows = torch.softmax(scores + b.unsqueeze(-2), -1)
        received = (p.unsqueeze(-2) @ rows).squeeze(-2)
        lack = q - received
        # A tenth of the tolerance: the last exact update of f is measured on its own.
        unfinished = lack.abs().sum(-1) > 0.1 * tolerance * mass.squeeze(-1)
        if not bool(unfinished.any()):
            break
        curvature = torch.diag_embed(received + RIDGE * mass) - (rows * p.unsqueeze(-1)).mT @ rows
        curvature = curvature + q.unsqueeze(-1) * q.unsqueeze(-2) / mass.unsqueeze(-1)
        step, failed = torch.linalg.solve_ex(curvature, lack)
        spread = (step.amax(-1) - step.amin(-1)).clamp(min=torch.finfo(b.dtype).tiny)
        usable = unfinished & (failed == 0) & torch.isfinite(spread)
        if not bool(usable.any()):
            break
        shortened = (torch.log1p(spread) / spread).unsqueeze(-1) * step
        b = torch.where(usable.unsqueeze(-1), b + shortened, b)
        done = done + usable
    f = sweep.f_from(torch.where(q > 0, b * sweep.epsilon, g))
    held = torch.where(q > 0, b * sweep.epsilon, sweep.g_from(f))
    return f, held, sweep.error(held, sweep.g_from(f), sweep.log_q), done
