"""Documents as weighted words, compiled: distances between the words of pairs, and bounds from a table of distances.

`costs.PointCost` is the reference implementation of the distances. A bound is the larger dual objective p.f + q.g of
two feasible pairs of potentials. Each pair begins with a relaxed bound of one side and adds one c-transform:

    f_i = min_j C_ij,  g_j = min_i C_ij - f_i        and        g_j = min_i C_ij,  f_i = min_j C_ij - g_j
"""

from __future__ import annotations

from typing import Any

import numpy as np

from otloss._numba.compile import compiled
from otloss._numba.tasks import next_task
from otloss.solvers.exact.tree_numba import lower, min_difference


def answers(words_p: np.ndarray, words_q: np.ndarray, dtype: Any) -> np.ndarray:
    """Return the array for the costs of `pair_distances`."""
    (problems,) = np.broadcast_shapes(words_p.shape[:1], words_q.shape[:1])
    return np.empty((problems, words_p.shape[1], words_q.shape[1]), dtype)


@compiled(fastmath={"contract", "nsz", "reassoc"})
def pair_distances(counter: Any, vectors: Any, words_p: Any, words_q: Any, costs: Any) -> None:
    """Fill costs (B, n, m) with the distances of words_p (B or 1, n) to words_q (B or 1, m); 0 at negative words."""
    while True:
        k = next_task(counter)
        if k >= costs.shape[0]:
            return
        mine, theirs = words_p[k if words_p.shape[0] > 1 else 0], words_q[k if words_q.shape[0] > 1 else 0]
        for i in range(mine.shape[0]):
            row = costs[k, i]
            for j in range(row.shape[0]):
                row[j] = 0.0
            if mine[i] < 0:
                continue
            x = vectors[mine[i]]
            for j in range(row.shape[0]):
                if theirs[j] >= 0:
                    y, square = vectors[theirs[j]], 0.0
                    for axis in range(x.shape[0]):
                        apart = np.float64(x[axis]) - np.float64(y[axis])
                        square += apart * apart
                    row[j] = np.sqrt(square)


@compiled(allocates=True)
def dual_bounds(table: Any, p: Any, starts: Any, words: Any, masses: Any) -> Any:
    """Return bounds (N,), one for each document.

    Document k has the words and masses from starts[k] to starts[k + 1]. table (n, V) holds the distances of the n words
    of p to all words.
    """
    n, longest = table.shape[0], 0
    for k in range(starts.shape[0] - 1):
        longest = max(longest, starts[k + 1] - starts[k])
    bounds, block, f, g = np.empty(starts.shape[0] - 1), np.empty((n, longest)), np.empty(n), np.empty(longest)
    for k in range(bounds.shape[0]):
        first, m = starts[k], starts[k + 1] - starts[k]
        for j in range(m):
            g[j] = 0.0
        for i in range(n):
            for j in range(m):
                block[i, j] = table[i, words[first + j]]
            f[i] = min_difference(block[i], g, m)
        from_p, from_q = 0.0, 0.0
        for j in range(m):
            g[j] = np.inf
        for i in range(n):
            lower(g, block[i], f[i], m)
            from_p += p[i] * f[i]
        for j in range(m):
            from_p += masses[first + j] * g[j]
            g[j] = np.inf
        for i in range(n):
            lower(g, block[i], 0.0, m)
        for j in range(m):
            from_q += masses[first + j] * g[j]
        for i in range(n):
            from_q += p[i] * min_difference(block[i], g, m)
        bounds[k] = from_p if from_p > from_q else from_q
    return bounds
