"""Problems with an epsilon far above all costs: the limit is reached, and float32 cannot hold the potentials.

Potentials are epsilon log(...). Epsilon is capped at 1e8 times the largest cost in balanced problems: beyond it the
plan equals p q^T / M to rounding, M the mass, so neither plan nor value changes. Float32 problems above 10 times the
largest cost are solved in float64.
"""

from __future__ import annotations

import dataclasses
import math

import torch

from otloss._checks import has_float64
from otloss.solvers.histograms import of_equal_mass
from otloss.solvers.options import Settings
from otloss.solvers.problem import Problem
from otloss.solvers.reductions.way_back import WayBack

CAP = 1e8  # the largest epsilon over the largest cost
WIDE_FROM = 10.0  # epsilon over the largest cost, from which float32 problems are solved in float64


def reduce(problem: Problem, settings: Settings) -> tuple[Problem, WayBack] | None:
    """Reduce entropic problems above those ratios; raise ValueError if a cost overflows."""
    if problem.is_exact:
        return None
    highest, epsilon = problem.largest_cost, problem.epsilon.detach()
    if not highest.numel() or not epsilon.numel():
        return None
    if not math.isfinite(highest.amax().item()):
        raise ValueError(
            f"the largest cost is {highest.amax().item()} in {highest.dtype}, expected finite costs; rescale the "
            f"points or costs, and epsilon with them{', or pass float64' if highest.dtype == torch.float32 else ''}."
        )
    # Two numbers first: for a single problem a comparison by torch takes longer.
    if epsilon.amax().item() <= WIDE_FROM * highest.amin().item():
        return None
    if not bool(((epsilon > WIDE_FROM * highest) & (highest > 0)).any()):
        return None
    if problem.marginal_penalty is None:
        # Beyond the cap the plan moves by less than 1e-8 of the mass; rounding would grow.
        capped = torch.where(highest > 0, torch.minimum(problem.epsilon, CAP * highest), problem.epsilon)
        problem = dataclasses.replace(problem, epsilon=capped)
    if problem.cost.dtype == torch.float32 and has_float64(problem.cost.device):
        p, q = problem.p.double(), problem.q.double()
        problem = dataclasses.replace(
            problem,
            p=p,
            q=q if problem.marginal_penalty is not None else of_equal_mass(p, q),
            cost=problem.cost.to(torch.float64),
            epsilon=problem.epsilon.double(),
        )
    return problem, WayBack()
