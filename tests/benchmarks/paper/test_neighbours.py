"""Precision and recall of nearest neighbours against a loop over all pairs, and on sets whose overlap is known."""

import numpy as np
import pytest

pytest.importorskip("sklearn")

from benchmarks.paper.evaluation import neighbours as module
from benchmarks.paper.evaluation.mauve import principal_components
from benchmarks.paper.evaluation.neighbours import neighbour_overlap


def _share(points: np.ndarray, centres: np.ndarray, k: int) -> float:
    """The definition, one pair at a time."""
    inside = 0
    for point in points:
        for centre in centres:
            radius = sorted(float(np.linalg.norm(centre - other)) for other in centres)[k]
            if float(np.linalg.norm(point - centre)) <= radius:
                inside += 1
                break
    return inside / len(points)


@pytest.mark.parametrize("k", [1, 4])
def test_shares_are_those_of_all_pairs(k: int, small_blocks: None) -> None:
    rng = np.random.default_rng(k)
    real, generated = rng.normal(size=(40, 5)), rng.normal(size=(30, 5)) * 0.4 + 0.5
    actual = neighbour_overlap(real, generated, k=k)
    p, q = principal_components(real, generated)
    assert actual.precision == pytest.approx(_share(q, p, k))
    assert actual.recall == pytest.approx(_share(p, q, k))
    assert actual.recall < actual.precision  # the generated texts are narrower


def test_components_keep_nine_tenths_of_the_variance_of_both() -> None:
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(50, 6)) * [9, 5, 3, 1, 0.1, 0.1], rng.normal(size=(30, 6)) + 1
    both = np.concatenate([x / np.linalg.norm(x, axis=1)[:, None], y / np.linalg.norm(y, axis=1)[:, None]])
    both = both - both.mean(0)
    values = np.linalg.svd(both, compute_uv=False) ** 2
    kept = int((np.cumsum(values) / values.sum() < 0.9).sum()) + 1
    p, q = principal_components(x, y)
    assert (p.shape, q.shape) == ((50, kept), (30, kept))
    assert (np.concatenate([p, q]) ** 2).sum() == pytest.approx(values[:kept].sum())


def test_equal_and_disjoint_sets() -> None:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(60, 4))
    assert neighbour_overlap(x, x[::-1]) == module.NeighbourOverlap(1.0, 1.0)
    x[:, 0] = abs(x[:, 0]) + 9
    assert neighbour_overlap(x, -x) == module.NeighbourOverlap(0.0, 0.0)
    repeated = np.repeat(x[:6], 10, axis=0)  # radii of 0: only equal texts are inside
    assert neighbour_overlap(x, repeated).recall == pytest.approx(0.1)
