"""The call of the kernels for exact transport: assignments along shortest paths, all else by the network simplex."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from otloss._numba.threads import Work, run_on_threads
from otloss.solvers.exact.results import OUTCOME, Results

Arrays = tuple[np.ndarray, ...]
SIMPLEX = "pivots of the network simplex, the error is a reduced cost below zero"


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
    # A kernel that is called by its address is compiled for contiguous arrays.
    problems = tuple(map(np.ascontiguousarray, (p, q, matrices, owners)))
    if not _are_assignments(p, q):
        _run_simplex(start, problems, results, max_pivots=max_pivots)
        return results
    _run_assignment(start, problems, results, max_pivots=max_pivots)
    stopped = np.flatnonzero(results.outcome[:, OUTCOME.pivots] < 0)
    if stopped.size:
        by_simplex = Results(*(array[stopped] for array in results))
        _run_simplex(
            start[stopped], (p[stopped], q[stopped], matrices, owners[stopped]), by_simplex, max_pivots=max_pivots
        )
        for array, part in zip(results, by_simplex, strict=True):
            array[stopped] = part
    return results


def _are_assignments(p: np.ndarray, q: np.ndarray) -> bool:
    """Whether all problems have as many bins on either side, all of one mass above zero."""
    if p.shape != q.shape or not p.size or p[0, 0] != p[0, -1] or q[0, 0] != q[0, -1]:
        return False
    return all(bool((w[:, 0] > 0).all()) and bool((w == w[:, :1]).all()) for w in (p, q))


def _run_assignment(start: np.ndarray, problems: Arrays, results: Results, *, max_pivots: int) -> None:
    from otloss._numba.compile import addresses_of
    from otloss.solvers.exact.assignment_numba import assign_problems, scratch
    from otloss.solvers.exact.simplex_numba import build_search_call

    count, n = problems[0].shape
    dtype, counter = problems[2].dtype, np.zeros(3, np.int64)
    arguments = start, problems, tuple(results)  # numba takes longer to read a NamedTuple
    simplex = _simplex(start, problems, results, max_pivots=max_pivots)
    # The simplex may take over at any step of a loop over problems of one shape, so it is compiled with the first.
    addresses_of(
        (assign_problems, dtype, start.shape[1] > 0),
        lambda _: (assign_problems, (counter, *arguments, scratch(1))),
        lambda: (build_search_call(dtype), simplex.build_call((0, 0))),
    )
    work = Work("shortest paths of an assignment", count * n * n)
    run_on_threads(assign_problems, count, arguments, lambda: (scratch(n),), work=work)


def _run_simplex(start: np.ndarray, problems: Arrays, results: Results, *, max_pivots: int) -> None:
    from otloss._numba.compile import addresses_of
    from otloss.solvers.exact.simplex_numba import build_search_call, scratch

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
    simplex = _simplex(start, problems, results, max_pivots=max_pivots)
    dtype = matrices.dtype
    addresses = addresses_of(
        (simplex.kernel, dtype), lambda addresses: simplex.build_call(*addresses), lambda: (build_search_call(dtype),)
    )
    run_on_threads(
        simplex.kernel, count, (*addresses, *simplex.arguments), lambda: (scratch(n, m, dtype),),
        work=Work(SIMPLEX, count * n * m),
    )  # fmt: skip
    empty = ~(p.any(1) & q.any(1))
    if empty.any():
        # Without mass f_i + g_j <= C_ij is the only condition: the derivative in p_i is the least cost of its row.
        f[empty], g[empty] = matrices[owners[empty]].min(-1), 0.0
        cells[empty], flows[empty], outcome[empty] = 0, 0.0, 0.0


class _Simplex(NamedTuple):
    """A kernel, and its arguments between the address of the search and the memory of a thread."""

    kernel: Any
    arguments: tuple[Any, ...]
    dtype: np.dtype

    def build_call(self, search_address: tuple[int, int]) -> tuple[Any, tuple[Any, ...]]:
        """Return the kernel, and arguments that decide about all types."""
        from otloss.solvers.exact.simplex_numba import scratch

        return self.kernel, (np.zeros(3, np.int64), search_address, *self.arguments, scratch(1, 1, self.dtype))


def _simplex(start: np.ndarray, problems: Arrays, results: Results, *, max_pivots: int) -> _Simplex:
    from otloss.solvers.exact.simplex_numba import solve_problems, solve_problems_from

    shared: Any = (problems, max_pivots, tuple(results))
    kernel, arguments = (solve_problems_from, (start, *shared)) if start.shape[1] else (solve_problems, shared)
    return _Simplex(kernel, arguments, problems[2].dtype)
