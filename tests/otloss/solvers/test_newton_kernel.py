"""The approximate factor of Newton's equations, beside the matrix itself."""

from typing import Any

import numba
import numpy as np
import pytest

from otloss.solvers.entropic import newton_numba as newton
from otloss.solvers.entropic.newton_numba import Cells, Side


@numba.njit
def inverse_of(starts: Any, columns: Any, shares: Any, mass: Any, damping: float, excess: Any) -> Any:
    m = excess.shape[0]
    cells, rows, made = Cells(starts, columns, shares, shares), Side(mass, mass, mass, mass), np.empty((m, m))
    factor = newton.factorise(cells, rows, damping, excess, newton.order_of_elimination(cells, m))
    for j in range(m):
        unit = np.zeros(m)
        unit[j] = 1
        newton.precondition(factor, unit, made[j])
    return made


@numba.njit
def thinned(shares: Any) -> Any:
    work = newton.thinning_of(shares.shape[0])
    count = newton.thin_out(shares, work, 0.5)
    return work.kept[:count], work.places[:count]


def plan(kind: str, n: int, m: int) -> np.ndarray:
    """A plan with some zeros: on a line with few cells, dense, or of two parts that hardly exchange mass."""
    draw = np.random.default_rng(1)
    x, y = np.sort(draw.random(n)), np.sort(draw.random(m))
    width = {"line": 0.02, "dense": 0.5, "parts": 0.1}[kind]
    made = np.exp(-(((x[:, None] - y) / width) ** 2)) * draw.random((n, m))
    if kind == "parts":
        made *= np.where((x[:, None] < 0.4) == (y < 0.4), 1, 1e-7)
    made[made < 1e-12] = 0
    return made / made.sum()


@pytest.mark.parametrize("damping", [1.0, 0.7])
@pytest.mark.parametrize("kind", ["line", "dense", "parts"])
def test_the_factor_is_near_the_matrix(kind: str, damping: float) -> None:
    n, m = 90, 70
    p = plan(kind, n, m)
    mass, columns = p.sum(1), [np.flatnonzero(row) for row in p]
    starts = np.cumsum([0, *map(len, columns)])
    shares = np.concatenate([row[row > 0] / row.sum() for row in p])
    excess = (1 - damping + 1e-9) * p.sum(0)
    matrix = np.diag(excess + damping * p.sum(0)) - damping * (p.T / mass) @ p
    inverse = inverse_of(starts, np.concatenate(columns).astype(np.int32), shares, mass, damping, excess)
    np.testing.assert_allclose(inverse, inverse.T, rtol=1e-6, atol=1e-9 * np.abs(inverse).max())
    root = np.linalg.cholesky(matrix)
    eigenvalues = np.linalg.eigvalsh(root.T @ inverse @ root)
    assert eigenvalues[0] > 0.1
    assert eigenvalues[-1] < 10


def test_few_shares_stand_for_many() -> None:
    """The sum of each octave is kept, and no share where there are few."""
    shares = np.concatenate([np.full(50, 0.01), np.full(3, 0.1), np.full(40, 1e-6), [1e-30]])
    shares /= shares.sum()
    kept, places = thinned(shares)
    assert len(set(places)) == len(kept) == 1 + 4 + 4 + 3
    np.testing.assert_allclose(kept.sum(), 1, rtol=1e-12)
    assert kept[0] == shares[-1]
    np.testing.assert_allclose(kept[1:5].sum(), shares[53:93].sum(), rtol=1e-12)
