"""Curves with known differences."""

import math

import numpy as np
import pytest

from benchmarks.paper.frontier import Frontier, at_equal_recall, over_range


def _frontier(forward: list[float], reverse: list[float]) -> Frontier:
    zeros = [0.0] * len(forward)
    return Frontier([1.0 - 0.1 * k for k in range(len(forward))], forward, reverse, zeros, zeros)


def test_points_that_another_beats_are_left_out() -> None:
    curve = _frontier([1.0, 0.9, 1.2, 1.5], [2.0, 3.0, 2.5, 1.0])  # (1.2, 2.5) is worse than (1.0, 2.0) in both
    forward, reverse = curve.efficient()
    assert forward.tolist() == [0.9, 1.0, 1.5]
    assert reverse.tolist() == [3.0, 2.0, 1.0]
    assert 1.0 < curve.at(1.25) < 2.0
    assert np.isnan(curve.at(np.array([0.8, 1.6]))).all()


def test_curves_with_points_at_different_places_are_compared_without_bias() -> None:
    """A line between points of a convex curve lies above it."""
    x = np.linspace(0.7, 1.0, 7)
    curve = _frontier(list(x), list(0.6 + 0.1 / x**6))
    between = (x[1:] + x[:-1]) / 2
    lines = (np.array(curve.reverse)[1:] + np.array(curve.reverse)[:-1]) / 2 - (0.6 + 0.1 / between**6)
    assert np.abs(curve.at(between) - (0.6 + 0.1 / between**6)).max() < 0.3 * lines.max()


def test_a_shift_is_found_with_its_interval() -> None:
    other = [_frontier([1, 2, 3], [3 + s, 2 + s, 1 + s]) for s in (0.0, 0.3, -0.2)]
    shifts = (-0.11, -0.09, -0.10)
    arm = [_frontier(list(o.forward), [r + s for r in o.reverse]) for o, s in zip(other, shifts, strict=True)]
    for actual in (at_equal_recall(arm, other, 1.7), over_range(arm, other)):
        assert actual is not None
        assert actual.mean == pytest.approx(-0.10)
        assert actual.high - actual.mean == pytest.approx(
            4.302653 * 0.01 / math.sqrt(3), rel=1e-5
        )  # t table, 2 degrees
        assert actual.is_real
        assert actual.seeds == 3


def test_a_curve_that_has_turned_is_known_at_all_lower_recalls() -> None:
    """Its last temperature is worse in both, so none below is better: the best before it stays within reach."""
    turned, falling = _frontier([1, 2, 3], [3, 1, 1.5]), _frontier([1, 2, 3], [3, 1.2, 0.8])
    assert turned.covered == (1.0, math.inf)
    assert falling.covered == (1.0, 3.0)
    np.testing.assert_allclose(turned.at(np.array([0.5, 2.0, 9.0])), [np.nan, 1.0, 1.0])
    actual = over_range([falling], [turned])
    assert actual is not None
    assert actual.share == pytest.approx(1.0)
    grid = np.linspace(1, 3, 64)
    assert actual.mean == pytest.approx(np.trapezoid(falling.at(grid) - turned.at(grid), grid) / 2)


def test_curves_that_do_not_meet_are_not_compared() -> None:
    low, high = [_frontier([1, 2], [2, 1])], [_frontier([3, 4], [2, 1])]
    assert over_range(low, high) is None
    assert at_equal_recall(low, high, 1.5) is None
    half = over_range(low, [_frontier([1.5, 2.5], [2, 1])])
    assert half is not None
    assert half.share == pytest.approx(1 / 3)
    assert half.mean == pytest.approx(-0.5)
    assert not half.is_real  # one seed
    with pytest.raises(ValueError, match="1 and 2 seeds"):
        over_range(low, high * 2)
