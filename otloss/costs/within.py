"""The costs among the bins of one side, which debiasing needs beside those between both sides."""

from __future__ import annotations

from otloss.costs.cost import Cost


def costs_within(cost: Cost) -> tuple[Cost, Cost]:
    """Return the costs among the bins of p and among the bins of q.

    A `PointCost` has the points of both, and a symmetric cost with zeros on the diagonal is taken to be between equal
    bins.

    Raises:
        ValueError: if the cost is neither.
    """
    both = cost.costs_within()
    if both is None:
        raise ValueError(
            f"the costs among the bins of p and among the bins of q do not follow from {cost!r}, not square and "
            "symmetric with a diagonal of zeros; give them with cost_p= and cost_q=, or use a PointCost."
        )
    return both
