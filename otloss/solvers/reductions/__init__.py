"""Reduce: problems that solvers do not take become balanced or unbalanced ones with costs that are finite and >= 0.

A reduction takes a `Problem` and returns another one with the `WayBack` from its solution, or None where it does not
apply. `reduce` tries them in this order:

    plain_costs     costs below 0 are shifted, and +inf becomes a price that no optimal plan pays
    partial_mass    a part of the mass: a dummy bin on each side takes what stays
    empty_sides     entropic problems without mass on a side are solved for uniform weights instead
    large_epsilon   epsilon is capped where the limit is reached; wide problems are solved in float64
    single_bins     entropic problems with one bin on a side, whose plan does not depend on epsilon
    priced_blocks   entropic problems whose bins fall into blocks of equal mass, between which costs are far larger

Where an entropic search fails because epsilon is too small, `forbidden_prices` puts +inf for costs that no plan needs,
and the problem is reduced again.
"""

from __future__ import annotations

from otloss.solvers.options import Settings
from otloss.solvers.problem import Problem
from otloss.solvers.reductions import empty_sides, large_epsilon, partial_mass, plain_costs, priced_blocks, single_bins
from otloss.solvers.reductions.way_back import WayBack


def reduce(problem: Problem, settings: Settings) -> tuple[Problem, list[WayBack]]:
    """Return the problem for the solvers, and the ways back, the one of the first reduction first."""
    ways_back: list[WayBack] = []
    for reduction in (plain_costs, partial_mass, empty_sides, large_epsilon, single_bins, priced_blocks):
        reduced = reduction.reduce(problem, settings)
        if reduced is not None:
            problem, way_back = reduced
            ways_back.append(way_back)
    return problem, ways_back
