"""Columns so light that their marginals are below the rounding of the heaviest one, as softmax makes them.

Where rows are as light, Newton's steps may go astray in them. Without these columns they do not, and the light
columns follow: an entry of the plan is at most the weight of its row and of its column, so that heavier rows decide a
light column, and heavier columns a light row. Plain updates with all weights pass this on, from heavy to light bins.
They are slow only where light bins exchange most of their mass with each other.
"""

from __future__ import annotations

import dataclasses

import torch

from otloss.solvers.entropic.equations.dual import estimate_error, range_over_mass
from otloss.solvers.entropic.equations.updates import build_updates
from otloss.solvers.entropic.interface import Budget, SearchResult
from otloss.solvers.problem import Problem

MAX_UPDATES = 300


def drop_light_columns(problem: Problem) -> Problem:
    """Return a balanced problem without the mass of its light columns."""
    lightest = torch.finfo(torch.float64).eps * problem.q.amax(-1, keepdim=True)
    return dataclasses.replace(problem, q=problem.q.masked_fill(problem.q < lightest, 0.0))


def restore_light_columns(problem: Problem, searched: Problem, result: SearchResult, budget: Budget) -> SearchResult:
    """Return a result of `searched`, the problem without its light columns, with the potentials of the whole problem.

    The error of potentials is infinite where the updates still change g by more than the budget allows.
    """
    updates = build_updates(problem)
    g = torch.where(searched.q == 0, updates.g_from(result.f), result.g)
    for count in range(MAX_UPDATES + 1):
        f = updates.f_from(g)
        received = updates.g_from(f)
        is_inaccurate = ~(updates.largest_change(g, received, updates.log_q) <= budget.largest_change)
        if count == MAX_UPDATES or not bool(is_inaccurate.any()):
            break
        g = torch.where(is_inaccurate.unsqueeze(-1), received, g)
    g = torch.where(problem.q == 0, received, g)
    return dataclasses.replace(
        result,
        f=f,
        g=g,
        error=updates.error_of_columns(g, received),
        potential_error=estimate_error(searched, g).masked_fill(is_inaccurate, torch.inf),
        potential_range=range_over_mass(problem, g),
        smallest_eigenvalue=torch.ones_like(result.error),
    )
