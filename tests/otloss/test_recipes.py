"""Errors of recipes for transport losses that circulate: each raises here, or cannot be made.

Those of critics are in losses/test_critic.py.
"""

from __future__ import annotations

import pytest
import torch

import otloss
from otloss.costs import PointCost


def test_scores_without_softmax_are_no_histogram() -> None:
    scores, label = torch.tensor([[2.0, -1.0, 0.5]]), torch.tensor([[0.0, 1.0, 0.0]])
    for distance in (otloss.cdf_distance, otloss.wasserstein_1d):
        with pytest.raises(ValueError, match=r"p.* is -1|p has|p holds"):
            distance(scores, label)
    bins, value = torch.tensor([0.0, 1.0, 2.0]), torch.tensor([1.0])
    loss = otloss.histogram_loss(scores, value, bins)  # takes the softmax itself: a shift changes nothing
    torch.testing.assert_close(otloss.histogram_loss(scores + 9, value, bins), loss)


def test_order_two_is_the_square_of_a_distance() -> None:
    """Without its root a sum of two distances may be below the direct one; with it, never."""
    ends = torch.eye(3)
    there, first, second = (otloss.wasserstein_1d(ends[i], ends[j], order=2) for i, j in ((0, 2), (0, 1), (1, 2)))
    assert there > first + second
    assert there.sqrt() <= first.sqrt() + second.sqrt()
    assert otloss.wasserstein_1d(ends[0], ends[2]) == 2  # order 1 is a distance, and gets no root


def test_distances_of_near_points_far_from_the_origin() -> None:
    """The product form of torch.cdist loses them."""
    x = 100 + 1e-3 * torch.randn(30, 3, generator=torch.Generator().manual_seed(0))
    exact = (x.double()[:, None] - x.double()).norm(dim=-1)
    product = torch.cdist(x, x, compute_mode="use_mm_for_euclid_dist")
    assert (product - exact).abs().max() > 1e-4
    torch.testing.assert_close(PointCost(x, metric="euclidean").dense().double(), exact, atol=1e-7, rtol=1e-5)
