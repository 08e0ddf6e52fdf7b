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
            f"the costs among the bins of p and among the bins of q do not follow from {cost!r}, {_difference(cost)}; "
            "give them with cost_p= and cost_q=, or use a PointCost."
        )
    return both


def _difference(cost: Cost) -> str:
    """Return what tells a cost from the costs among equal bins."""
    if cost.shape[0] != cost.shape[1]:
        return "which is not square"
    if not cost.is_symmetric():
        return "which is not symmetric"
    return (
        f"with up to {float(cost.diagonal().detach().amax()):.2g} on its diagonal where 0 was expected (distances by "
        'torch.cdist have zeros there with compute_mode="donot_use_mm_for_euclid_dist")'
    )
