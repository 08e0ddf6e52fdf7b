"""Precision and recall of generated texts from nearest neighbours of their features.

The support of a set of texts is taken to be the union of balls, one around each text, with the distance to its k-th
nearest neighbour in the set as radius. Precision is the share of generated texts in the support of the real ones,
recall the share of real texts in the support of the generated ones. Features are reduced as for MAUVE.

Both depend on the numbers of texts and on k, and single texts far from the others have large balls: compare with the
numbers of two sets from one source.

Sources: T. Kynkaanniemi et al., Improved Precision and Recall Metric for Assessing Generative Models, NeurIPS 2019;
F. Le Bronnec et al., Exploring Precision and Recall to Assess the Quality and Diversity of LLMs, ACL 2024
(arXiv 2402.10693), from which k = 4 is.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from jaxtyping import Float
from scipy.spatial.distance import cdist

from benchmarks.paper.evaluation.mauve import principal_components

AT_ONCE = 2**22  # distances in a temporary: 32 MiB


@dataclass(frozen=True)
class NeighbourOverlap:
    """Which share of each set of texts lies in the support of the other.

    Attributes:
        precision: of the generated texts.
        recall: of the real texts.
    """

    precision: float
    recall: float


def neighbour_overlap(
    real_features: Float[np.ndarray, "n width"], generated_features: Float[np.ndarray, "m width"], *, k: int = 4
) -> NeighbourOverlap:
    """Return precision and recall of generated texts from the k nearest neighbours of their features.

    Args:
        real_features, generated_features: a row for each text, as for `mauve`.
        k: the neighbour whose distance is the radius of a text's ball.

    Raises:
        ValueError: sets of another width, k below 1 or not below the smaller number of texts, or features that are not
            finite.
    """
    real, generated = principal_components(real_features, generated_features)
    if not 1 <= k < min(len(real), len(generated)):
        raise ValueError(
            f"k is {k} for {len(real)} and {len(generated)} texts; expected 1 or more, below the smaller number."
        )
    return NeighbourOverlap(_share_in_balls(generated, real, k), _share_in_balls(real, generated, k))


def _share_in_balls(points: np.ndarray, centres: np.ndarray, k: int) -> float:
    """Return the share of the points within a centre's distance to its k-th nearest other centre."""
    step = max(1, AT_ONCE // max(len(points), len(centres)))
    covered = np.zeros(len(points), dtype=bool)
    for start in range(0, len(centres), step):
        some = centres[start : start + step]
        radii = np.partition(cdist(some, centres), k, axis=1)[:, k]  # its own distance, 0, is one of the k + 1 least
        covered |= (cdist(points, some) <= radii).any(1)
    return float(covered.mean())
