"""The call of the kernels for exact transport: assignments along shortest paths, all else by the network simplex."""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import numpy as np

from otloss._numba.threads import Work, run_on_threads
from otloss.solvers.exact.results import OUTCOME, Results

Arrays = tuple[np.ndarray, ...]
SIMPLEX = "pivots of the network simplex, the error is a reduced cost below zero"
# The assignments whose kernels are compiled, by the dtype of the costs and whether there is a start.
_compiled: set[tuple[np.dtype, bool]] = set()


def solve_batch(
    p: np.ndarray, q: np.ndarray, matrices: np.ndarray, owners: np.ndarray, *, start: np.ndarray | None, max_pivots: int
) -> Results:
    """Solve B problems on torch's number of threads.

    Args:
        p, q: (B, n) and (B, m), float64 weights of equal mass.
        matrices: (K, n, m), float32 or float64; problem k uses matrices[owners[k]].
        start: (B, m), potentials of q's bins to start from.
        max_pivots: pivots of the simplex for each problem.

    Returns:
        The results; the pivots of a problem are -1 where they did not suffice.
    """
    from otloss.solvers.exact.simplex_numba import allocate_results

    (count, n), m = p.shape, q.shape[1]
    start = np.empty((count, 0)) if start is None else start
    results = Results(*allocate_results(count, n, m))
    problems = (p, q, matrices, owners)
    if not _are_assignments(p, q):
        _run_simplex(start, problems, results, max_pivots=max_pivots)
        return results
    _run_assignment(start, problems, results, max_pivots=max_pivots)
    stopped = np.flatnonzero(results.outcome[:, OUTCOME.pivots] < 0)
    if stopped.size:
        again = Results(*(array[stopped] for array in results))
        _run_simplex(start[stopped], (p[stopped], q[stopped], matrices, owners[stopped]), again, max_pivots=max_pivots)
        for array, part in zip(results, again, strict=True):
            array[stopped] = part
    return results


def _are_assignments(p: np.ndarray, q: np.ndarray) -> bool:
    """Whether all problems have as many bins on either side, all of one mass above zero."""
    if p.shape != q.shape or not p.size or p[0, 0] != p[0, -1] or q[0, 0] != q[0, -1]:
        return False
    return all(bool((w[:, 0] > 0).all()) and bool((w == w[:, :1]).all()) for w in (p, q))


def _run_assignment(start: np.ndarray, problems: Arrays, results: Results, *, max_pivots: int) -> None:
    from otloss._numba.background import check_compiled
    from otloss._numba.notices import compile_together
    from otloss.solvers.exact.assignment_numba import assign_problems, scratch

    count, n = problems[0].shape
    arguments = start, problems, tuple(results)  # numba takes longer to read a NamedTuple
    work = Work("shortest paths of an assignment", count * n * n)
    kind = problems[2].dtype, start.shape[1] > 0
    if kind not in _compiled:
        counter = np.zeros(3, np.int64)
        simplex = _simplex(start, problems, results, max_pivots=max_pivots)
        calls = (
            (assign_problems, (counter, *arguments, scratch(1))),
            (simplex.kernel, (counter, *simplex.arguments, simplex.scratch(1, 1))),
        )
        check_compiled(*((kernel, values, partial(tuple, values)) for kernel, values in calls))
        compile_together(*calls)
        _compiled.add(kind)
    run_on_threads(assign_problems, count, arguments, lambda: (scratch(n),), work=work)


def _run_simplex(start: np.ndarray, problems: Arrays, results: Results, *, max_pivots: int) -> None:
    p, q, matrices, owners = problems
    f, g, cells, flows, outcome = results
    (count, n), m = p.shape, q.shape[1]
    # With far more rows than columns the transposed problem takes less time: pivots change shorter trees.
    if n > 16 * m and not start.shape[1]:
        transposed_cells = np.empty_like(cells)
        columns = np.ascontiguousarray(matrices.swapaxes(1, 2))
        transposed = Results(g, f, transposed_cells, flows, outcome)
        _run_simplex(start, (q, p, columns, owners), transposed, max_pivots=max_pivots)
        cells[:] = transposed_cells[:, ::-1]
        return
    call = _simplex(start, problems, results, max_pivots=max_pivots)
    run_on_threads(call.kernel, count, call.arguments, lambda: (call.scratch(n, m),), work=Work(SIMPLEX, count * n * m))
    empty = ~(p.any(1) & q.any(1))
    if empty.any():
        # Without mass f_i + g_j <= C_ij is the only condition: the derivative in p_i is the least cost of its row.
        f[empty], g[empty] = matrices[owners[empty]].min(-1), 0.0
        cells[empty], flows[empty], outcome[empty] = 0, 0.0, 0.0


class _SimplexCall(NamedTuple):
    """A kernel, its arguments, and the function of n and m that makes the memory of a thread."""

    kernel: Any
    arguments: Arrays
    scratch: Any


def _simplex(start: np.ndarray, problems: Arrays, results: Results, *, max_pivots: int) -> _SimplexCall:
    from otloss.solvers.exact.simplex_numba import scratch, solve_problems, solve_problems_from

    shared: Any = (problems, max_pivots, tuple(results))
    kernel, arguments = (solve_problems_from, (start, *shared)) if start.shape[1] else (solve_problems, shared)
    return _SimplexCall(kernel, arguments, lambda n, m: scratch(n, m, problems[2].dtype))
