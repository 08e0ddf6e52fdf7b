"""MAUVE on shares whose curve is known and against the published package; divergences of clusters from counts."""

import numpy as np
import pytest
from scipy.integrate import quad
from scipy.spatial.distance import jensenshannon
from scipy.stats import entropy
from sklearn import config_context

pytest.importorskip("sklearn")

from benchmarks.paper.evaluation.mauve import SCALE, area_of_shares, cluster_divergence, mauve, principal_components


def test_the_area_of_two_bins_is_its_integral() -> None:
    p, q = np.array([0.7, 0.3]), np.array([0.4, 0.6])

    def point(w: float) -> tuple[float, float]:
        r = w * p + (1 - w) * q
        return float(np.exp(-SCALE * np.sum(q * np.log(q / r)))), float(np.exp(-SCALE * np.sum(p * np.log(p / r))))

    # The area between the axes and the curve: of y over x up to the ends, and the flat and steep parts beyond them.
    def integrand(w: float) -> float:
        step = 1e-6
        return point(w)[1] * (point(w - step)[0] - point(w + step)[0]) / (2 * step)

    inner = quad(integrand, 2e-6, 1 - 2e-6)[0]
    (x1, y1), (x0, y0) = point(0.0), point(1.0)
    ends = x0 * (1 + y0) / 2 + (1 - x1) * y1 / 2
    assert area_of_shares(p, q) == pytest.approx(inner + ends, abs=2e-3)
    assert area_of_shares(p, q) == pytest.approx(area_of_shares(q, p), abs=1e-12)


def test_limits_and_order() -> None:
    p = np.array([0.5, 0.5, 0.0, 0.0])
    assert area_of_shares(p, p) == pytest.approx(1.0)
    near, far = np.array([0.4, 0.6, 0.0, 0.0]), np.array([0.1, 0.4, 0.25, 0.25])
    assert 0 < area_of_shares(p, p[::-1]) < area_of_shares(p, far) < area_of_shares(p, near) < 1
    rng = np.random.default_rng(0)
    x, y, z = rng.normal(size=(300, 6)), rng.normal(size=(300, 6)), rng.normal(size=(300, 6)) + 1.5
    same, other = mauve(x, y, seeds=[0, 1]), mauve(x, z, seeds=[0, 1])
    assert same.clusters == 30
    assert same.mean > 0.9
    assert other.mean < same.mean - 0.2


def test_divergences_of_clusters_are_those_of_their_counts() -> None:
    """Four far groups are the four clusters, whatever the seed."""
    groups, noise = np.eye(4) * 50, np.random.default_rng(0).normal(size=(100, 4))
    p, q = [20, 15, 5, 0], [10, 10, 20, 20]
    x, y = (np.repeat(groups, counts, axis=0) + noise[: sum(counts)] for counts in (p, q))
    actual = cluster_divergence(x, y + 1, clusters=4, seeds=[0, 1, 2])
    assert actual.clusters == 4
    assert actual.js == pytest.approx(jensenshannon(p, q) ** 2)
    assert actual.js_std == pytest.approx(0, abs=1e-12)
    assert actual.forward == pytest.approx(entropy(np.add(p, 1), np.add(q, 1)))
    assert actual.reverse == pytest.approx(entropy(np.add(q, 1), np.add(p, 1)))
    equal, apart = cluster_divergence(x, x, clusters=4), cluster_divergence(x[:20], y[40:], clusters=2)
    assert (equal.js, equal.forward, equal.reverse) == (0.0, 0.0, 0.0)
    assert apart.js == pytest.approx(np.log(2))


def test_the_global_output_of_scikit_learn_changes_nothing() -> None:
    p, q = np.random.default_rng(0).normal(size=(2, 20, 4))
    expected = principal_components(p, q)
    with config_context(transform_output="pandas"):
        np.testing.assert_array_equal(principal_components(p, q), expected)
