"""The exact solver by POT's network simplex, in the place of `otloss._kernels.problems.solve_compiled`."""

from __future__ import annotations

import warnings

import numpy as np
import torch
from ot.lp import emd as solve

from otloss._kernels.problems import FlatProblems


def solve_by_pot(work: FlatProblems, *, most: int) -> None:
    """Fill `work` as `solve_compiled` does, one problem after the other."""
    for k in range(len(work.p)):
        _solve_one(work, k)


def _solve_one(work: FlatProblems, k: int) -> None:
    """POT on the bins with mass of problem k."""
    p, q, matrix = (t.numpy() for t in (work.p[k], work.q[k], work.matrices[work.owners[k]].double()))
    f, g, cells, flows = (t[k].numpy() for t in (work.f, work.g, work.cells, work.flows))
    cells[:], flows[:] = 0, 0.0
    rows, columns = np.flatnonzero(p), np.flatnonzero(q)
    if rows.size == 0:
        # Without mass f_i + g_j <= C_ij is the only condition: the derivative in p_i is the least cost of its row.
        f[:], g[:] = matrix.min(axis=1), 0.0
        work.ends[k] = 0.0
        return
    mass, block = p.sum(), matrix[np.ix_(rows, columns)]
    a, b = p[rows] / mass, q[columns] / q.sum()
    plan, g_block, pivots = _plan(a, b, block)
    f_block = (block - g_block).min(axis=1)
    g_block = (block - f_block[:, None]).min(axis=0)
    f[:] = (matrix[:, columns] - g_block).min(axis=1)
    g[:] = (matrix[rows] - f_block[:, None]).min(axis=0)
    at_rows, at_columns = np.nonzero(plan)
    cells[:, : at_rows.size] = rows[at_rows], columns[at_columns]
    flows[: at_rows.size] = plan[at_rows, at_columns] * mass
    value = float((block * plan).sum())
    gap = value - float(f_block @ a + g_block @ b)
    work.ends[k] = torch.tensor([value * mass, gap * mass, np.abs(block).max() * mass, pivots], device="cpu")


def _plan(a: np.ndarray, b: np.ndarray, block: np.ndarray) -> tuple[np.ndarray, np.ndarray, int]:
    """Return an optimal plan between positive weights of sum one, column potentials, and -1 for too many pivots."""
    if a.size == 1 or b.size == 1:
        # The only plan there is; every column (or the one) is paired with the first row.
        return np.outer(a, b), block[0].copy() if a.size == 1 else np.zeros(1), 0
    scale = float(np.abs(block).max()) or 1.0
    with warnings.catch_warnings():
        # The outcome is read from the log, and checked by its duality gap.
        warnings.simplefilter("ignore")
        plan, log = solve(a, b, np.ascontiguousarray(block / scale), numItermax=10_000_000, log=True)
    return plan, scale * log["v"], 0 if log["warning"] is None else -1
