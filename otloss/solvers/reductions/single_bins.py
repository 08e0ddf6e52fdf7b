"""Balanced entropic problems with one bin on a side and a tiny epsilon: their plan does not depend on it.

All mass goes to that bin, or comes from it: P = p q^T / M for every epsilon, the entropy term is 0, and the potentials
of the other side are the costs up to a constant. Beside a tiny epsilon, potentials as large as the costs would have
roundings that change the plan (`SmallEpsilonError`), so a larger one takes its place.
"""

from __future__ import annotations

import dataclasses

import torch

from otloss.solvers.options import Settings
from otloss.solvers.problem import Problem
from otloss.solvers.reductions.way_back import WayBack

SMALLEST_RATIO = 1e-7  # of epsilon to the largest cost: 10 times what float64 needs; errors of potentials stay small


def reduce(problem: Problem, settings: Settings) -> tuple[Problem, WayBack] | None:
    """Reduce such problems to an epsilon that rounding allows."""
    if problem.is_exact or problem.marginal_penalty is not None or 1 not in problem.cost.shape:
        return None
    epsilon = torch.maximum(problem.epsilon, SMALLEST_RATIO * problem.largest_cost.to(problem.epsilon))
    return dataclasses.replace(problem, epsilon=epsilon), WayBack()
