"""The call of the kernels for exact transport: assignments along shortest paths, all else by the network simplex."""

from __future__ import annotations

from typing import Any

import numpy as np

from otloss._numba.threads import Work, run_on_threads

# Rows of a matrix over its columns, above which the transposed problem takes less time: pivots change shorter trees.
MOST_ROWS = 16
Arrays = tuple[np.ndarray, ...]
SIMPLEX = "pivots of the network simplex, the error is a reduced cost below zero"
_compiled: set[tuple[np.dtype, bool]] = set()  # dtypes of costs, and whether there is a start, of assignments so far


def solve_batch(
    p: np.ndarray, q: np.ndarray, matrices: np.ndarray, owners: np.ndarray, *, start: np.ndarray | None, most: int
) -> tuple[np.ndarray, ...]:
    """Solve B problems on torch's number of threads.

    Args:
        p, q: (B, n) and (B, m), float64 weights of equal mass.
        matrices: (K, n, m), float32 or float64; problem k uses matrices[owners[k]].
        start: (B, m), potentials of q's bins to start from.
        most: pivots of the simplex for each problem.

    Returns:
        f, g: (B, n) and (B, m), the potentials.
        cells, flows: (B, 2, n + m - 1) and (B, n + m - 1), rows and columns of the plan's cells and the mass there.
        outcome: (B, 4), value, duality gap, the scale to judge the gap by, and pivots, -1 where they did not suffice.
    """
    from otloss.solvers.exact.simplex_numba import answers

    (count, n), m = p.shape, q.shape[1]
    start = np.empty((count, 0)) if start is None else start
    filled = answers(count, n, m)
    problems = (p, q, matrices, owners)
    if not _are_assignments(p, q):
        _run_simplex(start, problems, filled, most=most)
        return filled
    _run_assignment(start, problems, filled, most=most)
    rest = np.flatnonzero(filled[-1][:, 3] < 0)  # given up
    if rest.size:
        of_rest = tuple(array[rest] for array in filled)
        _run_simplex(start[rest], (p[rest], q[rest], matrices, owners[rest]), of_rest, most=most)
        for array, part in zip(filled, of_rest, strict=True):
            array[rest] = part
    return filled


def _are_assignments(p: np.ndarray, q: np.ndarray) -> bool:
    """Whether all problems have as many bins on either side, all of one mass above zero."""
    if p.shape != q.shape or not p.size or p[0, 0] != p[0, -1] or q[0, 0] != q[0, -1]:
        return False
    return all(bool((w[:, 0] > 0).all()) and bool((w == w[:, :1]).all()) for w in (p, q))


def _run_assignment(start: np.ndarray, problems: Arrays, answers: Arrays, *, most: int) -> None:
    from otloss._numba.notices import compile_together
    from otloss.solvers.exact.assignment_numba import assign_problems, scratch

    count, n = problems[0].shape
    arguments, work = (start, problems, answers), Work("shortest paths of an assignment", count * n * n)
    kind = problems[2].dtype, start.shape[1] > 0
    if kind not in _compiled:
        counter = np.zeros(3, np.int64)
        kernel, given, memory = _simplex(start, problems, answers, most=most)
        compile_together(
            (assign_problems, (counter, *arguments, scratch(1))), (kernel, (counter, *given, memory(1, 1)))
        )
        _compiled.add(kind)
    run_on_threads(assign_problems, count, arguments, lambda: (scratch(n),), work=work)


def _run_simplex(start: np.ndarray, problems: Arrays, answers: Arrays, *, most: int) -> None:

    p, q, matrices, owners = problems
    f, g, cells, flows, outcome = answers
    (count, n), m = p.shape, q.shape[1]
    if n > MOST_ROWS * m and not start.shape[1]:
        turned = np.empty_like(cells)
        columns = np.ascontiguousarray(matrices.swapaxes(1, 2))
        _run_simplex(start, (q, p, columns, owners), (g, f, turned, flows, outcome), most=most)
        cells[:] = turned[:, ::-1]
        return
    kernel, arguments, scratch = _simplex(start, problems, answers, most=most)
    run_on_threads(kernel, count, arguments, lambda: (scratch(n, m),), work=Work(SIMPLEX, count * n * m))
    empty = ~(p.any(1) & q.any(1))
    if empty.any():
        # Without mass f_i + g_j <= C_ij is the only condition: the derivative in p_i is the least cost of its row.
        f[empty], g[empty] = matrices[owners[empty]].min(-1), 0.0
        cells[empty], flows[empty], outcome[empty] = 0, 0.0, 0.0


def _simplex(start: np.ndarray, problems: Arrays, answers: Arrays, *, most: int) -> tuple[Any, Arrays, Any]:
    """Return the kernel, its arguments, and the function of n and m that makes the memory of a thread."""
    from otloss.solvers.exact.simplex_numba import scratch, solve_problems, solve_problems_from

    shared: Any = (problems, most, answers)
    kernel, arguments = (solve_problems_from, (start, *shared)) if start.shape[1] else (solve_problems, shared)
    return kernel, arguments, lambda n, m: scratch(n, m, problems[2].dtype)
