"""Sets with ordinal labels for `benchmarks.ordinal`: files of `ordinal/` in the data folder, and sets of packages.

Features are float64, text columns one-hot; labels are ranks 0..K-1. Classes with fewer than `FEWEST` members are left
out (a stratified holdout needs two, early stopping another one). Large sets are reduced to a fixed random subset, so
that thirty holdouts of every contestant take minutes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd

FEWEST = 4
MAX_ROWS = 1000


@dataclass(frozen=True)
class OrdinalSet:
    """X (n, features) in float64, y (n,) ranks 0..K-1."""

    name: str
    X: np.ndarray
    y: np.ndarray

    @property
    def classes(self) -> int:
        return int(self.y.max()) + 1

    @staticmethod
    def of(name: str, features: pd.DataFrame, labels: np.ndarray) -> OrdinalSet:
        values, counts = np.unique(labels, return_counts=True)
        kept = np.isin(labels, values[counts >= FEWEST])
        places = np.flatnonzero(kept)
        if len(places) > MAX_ROWS:
            places = np.sort(np.random.default_rng(0).choice(places, MAX_ROWS, replace=False))
            values, counts = np.unique(labels[places], return_counts=True)
            places = places[np.isin(labels[places], values[counts >= FEWEST])]
        X = pd.get_dummies(features.iloc[places]).to_numpy(np.float64)
        return OrdinalSet(name, X, np.unique(labels[places], return_inverse=True)[1])


def ordinal_sets(folder: Path | None) -> Iterator[OrdinalSet]:
    """All sets in order of size; without a folder only sets of scikit-learn and statsmodels."""
    results = [*_of_packages()]
    if folder is not None:
        results += _of_files(folder)
    yield from sorted(results, key=lambda one: len(one.y))


def _of_files(folder: Path) -> Iterator[OrdinalSet]:
    for path in sorted((folder / "ben-david").glob("*.csv")):
        rows = pd.read_csv(path, skiprows=1, header=None)
        yield OrdinalSet.of(path.stem.replace("_", "-"), rows.iloc[:, :-1], rows.iloc[:, -1].to_numpy())
    for path in sorted((folder / "gagolews").glob("*.csv")):
        rows = pd.read_csv(path, comment="#")
        yield OrdinalSet.of(path.stem, rows.drop(columns="response"), rows["response"].to_numpy())


def _of_packages() -> Iterator[OrdinalSet]:
    from sklearn.datasets import load_diabetes
    from statsmodels.datasets import anes96, fair

    X, progression = load_diabetes(return_X_y=True, as_frame=True)
    edges = np.quantile(progression, [0.2, 0.4, 0.6, 0.8])
    yield OrdinalSet.of("diabetes-5", X, np.searchsorted(edges, progression))
    votes = anes96.load_pandas().data
    yield OrdinalSet.of("anes96-party", votes.drop(columns=["PID", "vote"]), votes["PID"].to_numpy())
    couples = fair.load_pandas().data
    yield OrdinalSet.of("fair-marriage", couples.drop(columns="rate_marriage"), couples["rate_marriage"].to_numpy())
