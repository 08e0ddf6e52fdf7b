"""A numba kernel: conditional gradients for fused Gromov-Wasserstein problems, one problem per thread.

`fused_gromov` has the formulas and the reference implementation. For fixed marginals the gradient is

    G(P) = fixed - 2 alpha T(P),    T(P) = C P D^T + C^T P D

Only T changes from step to step, and T is linear in P. So a step costs one product and one transport problem, whose
plan is the target of the step. The kernel calls the kernel of the network simplex for it, with a batch of one problem.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from otloss._numba.compile import call_at, compiled, inner
from otloss._numba.tasks import is_stopped, next_task
from otloss.solvers.exact.results import OUTCOME
from otloss.solvers.exact.simplex_numba import allocate_results as allocate_exact_results
from otloss.solvers.exact.simplex_numba import build_search_call, solve_problems
from otloss.solvers.exact.simplex_numba import scratch as scratch_of_exact
from otloss.solvers.gromov.ties import APART, BITS, COLUMN, DIRECTION, NUDGE, ROW, SPREAD, TRIES


class Problems(NamedTuple):
    """C, D and M of all problems, (B, ...) or (1, ...), and their weights (B, n) and (B, m)."""

    C: Any
    D: Any
    M: Any
    p: Any
    q: Any


class Scratch(NamedTuple):
    """The memory of a thread.

    Attributes:
        matrices: seven matrices (n, m), in the order in which `_descend` names them.
        C, D: distances within the spaces of the bins with mass.
        rows, columns: the places of the bins with mass.
        counter, problem, result, memory: the arguments of `solve_problems` for one problem: the weights of the bins
            with mass, and the gradient.
    """

    matrices: Any
    C: Any
    D: Any
    rows: Any
    columns: Any
    counter: Any
    problem: Any
    result: Any
    memory: Any


MAX_PIVOTS = 10_000_000


def scratch(n: int, m: int) -> tuple[Scratch]:
    """Return the memory of a thread."""
    problem = np.empty((1, n)), np.empty((1, m)), np.zeros((1, n, m)), np.zeros(1, np.int64)
    return (Scratch(
        tuple(np.zeros((7, n, m))), np.empty((n, n)), np.empty((m, m)), np.empty(n, np.int64), np.empty(m, np.int64),
        np.zeros(3, np.int64), problem, allocate_exact_results(1, n, m), scratch_of_exact(n, m, np.float64),
    ),)  # fmt: skip


def build_solver_calls() -> tuple[tuple[Any, tuple[Any, ...]], ...]:
    """Return the kernel of the network simplex and the search that it calls, each with arguments."""
    work = scratch(1, 1)[0]
    solver = solve_problems, (work.counter, (0, 0), work.problem, MAX_PIVOTS, work.result, work.memory)
    return solver, build_search_call(np.float64)


def allocate_results(problems: int) -> tuple[np.ndarray, np.ndarray]:
    """Return `values` and `converged` for `descend_problems`."""
    return np.empty(problems), np.empty(problems, np.bool_)


@inner()
def _gather(weights: Any, square: Any, masses: Any, compact: Any, places: Any) -> int:
    """Write weights, places and the part of the matrix of the bins with mass; return the number of these bins."""
    count = 0
    for k in range(weights.shape[0]):
        masses[k] = 0.0
        if weights[k] > 0:
            places[count], count = k, count + 1
    for i in range(count):
        masses[i] = weights[places[i]]
        for j in range(count):
            compact[i, j] = square[places[i], places[j]]
    return count


@inner()
def _product(C: Any, D: Any, P: Any, n: int, m: int, half: Any, T: Any) -> None:
    """T = C P D^T + C^T P D."""
    for i in range(n):
        for j in range(m):
            T[i, j] = 0.0
    for turn in range(2):
        for i in range(n):
            for j in range(m):
                half[i, j] = 0.0
            for k in range(n):
                c = C[i, k] if turn == 0 else C[k, i]
                for j in range(m):
                    half[i, j] += c * P[k, j]
            for j in range(m):
                total = 0.0
                for k in range(m):
                    total += half[i, k] * (D[j, k] if turn == 0 else D[k, j])
                T[i, j] += total


@inner()
def _fixed(C: Any, D: Any, M: Any, p: Any, q: Any, n: int, m: int, alpha: float, fixed: Any) -> None:
    """Write (1 - alpha) M + alpha times the squares of both orientations against the marginals."""
    for i in range(n):
        side = 0.0
        for k in range(n):
            side += (C[i, k] ** 2 + C[k, i] ** 2) * p[k]
        for j in range(m):
            fixed[i, j] = (1 - alpha) * M[i, j] + alpha * side
    for j in range(m):
        side = 0.0
        for k in range(m):
            side += (D[j, k] ** 2 + D[k, j] ** 2) * q[k]
        for i in range(n):
            fixed[i, j] += alpha * side


@inner()
def _energy(M: Any, fixed: Any, P: Any, T: Any, n: int, m: int, alpha: float) -> float:
    total = 0.0
    for i in range(n):
        for j in range(m):
            total += P[i, j] * ((1 - alpha) * M[i, j] + fixed[i, j] - 2 * alpha * T[i, j])
    return total / 2


@inner()
def _rounding(M: Any, fixed: Any, P: Any, n: int, m: int, alpha: float) -> float:
    """Return the rounding of E: 1e-15 of `_Energy.size` of the reference implementation."""
    total = 0.0
    for i in range(n):
        for j in range(m):
            features = (1 - alpha) * M[i, j]
            total += P[i, j] * (abs(features) + (fixed[i, j] - features) / 2)
    return 1e-15 * total


@inner()
def _gradient(fixed: Any, T: Any, n: int, m: int, alpha: float, gradient: Any) -> None:
    """Write the gradient less its smallest entry: costs of the solver are not negative."""
    smallest = np.inf
    for i in range(n):
        for j in range(m):
            gradient[i, j] = fixed[i, j] - 2 * alpha * T[i, j]
            smallest = gradient[i, j] if gradient[i, j] < smallest else smallest
    for i in range(n):
        for j in range(m):
            gradient[i, j] -= smallest


@inner()
def _nudge(gradient: Any, rows: Any, columns: Any, n: int, m: int, direction: int) -> None:
    """Move costs in a direction, as `ties.nudged`."""
    largest = 0.0
    for i in range(n):
        for j in range(m):
            largest = max(largest, gradient[i, j])
    size = NUDGE * (largest if largest > 0 else 1.0)
    for i in range(n):
        for j in range(m):
            code = (rows[i] * ROW) ^ (columns[j] * COLUMN) ^ (direction * DIRECTION)
            gradient[i, j] += size * ((code * SPREAD) % 2**BITS) / 2**BITS


@inner()
def _has_ties(gradient: Any, f: Any, g: Any, n: int, m: int) -> bool:
    """Return whether more cells cost nothing beyond the potentials than a plan needs."""
    largest, cells = 0.0, 0
    for i in range(n):
        for j in range(m):
            largest = max(largest, gradient[i, j])
    for i in range(n):
        for j in range(m):
            cells += gradient[i, j] - f[i] - g[j] <= APART * largest
    return cells > n + m - 1


@inner()
def _segment(
    P: Any, Q: Any, T: Any, T_target: Any, gradient: Any, n: int, m: int, alpha: float
) -> tuple[float, float, float]:
    """Return b and c of E(P + t (Q - P)) = E(P) + b t + c t^2, and the mass by which Q differs from P."""
    b, c, moved = 0.0, 0.0, 0.0
    for i in range(n):
        for j in range(m):
            step = Q[i, j] - P[i, j]
            b += gradient[i, j] * step
            c -= alpha * step * (T_target[i, j] - T[i, j])
            moved += abs(step) / 2
    return b, c, moved


@inner()
def _gather_problem(problems: Any, k: int, plan: Any, work: Any) -> tuple[int, int]:
    """Write the bins with mass of problem k, its matrices and its plan there; return the numbers of these bins."""
    P, features, rows, columns = work.matrices[0], work.matrices[3], work.rows, work.columns
    p, q, _, _ = work.problem
    n = _gather(problems.p[k], problems.C[k if problems.C.shape[0] > 1 else 0], p[0], work.C, rows)
    m = _gather(problems.q[k], problems.D[k if problems.D.shape[0] > 1 else 0], q[0], work.D, columns)
    M = problems.M[k if problems.M.shape[0] > 1 else 0]
    for i in range(n):
        for j in range(m):
            features[i, j], P[i, j] = M[rows[i], columns[j]], plan[rows[i], columns[j]]
    return n, m


@inner()
def _descend(
    counter: Any, solver: Any, n: int, m: int, alpha: float, max_iterations: int, tolerance: float, work: Any
) -> tuple[float, bool]:
    """Descend from the plan among the matrices, which is overwritten; return the value, and whether it converged."""
    P, target, fixed, features, T, T_target, half = work.matrices
    C, D, (p, q, gradients, _), (f, g, cells, flows, outcome) = work.C, work.D, work.problem, work.result
    gradient, (solve, search) = gradients[0], solver
    _fixed(C, D, features, p[0], q[0], n, m, alpha, fixed)
    _product(C, D, P, n, m, half, T)
    value = _energy(features, fixed, P, T, n, m, alpha)
    rounding = _rounding(features, fixed, P, n, m, alpha)
    mass = p[0, :n].sum()
    converged, tries, iteration = n == 0 or m == 0, 0, 0
    while iteration < max_iterations and not converged and not is_stopped(counter, np.nan, np.nan):
        iteration += 1
        _gradient(fixed, T, n, m, alpha, gradient)
        if tries > 0:
            _nudge(gradient, work.rows, work.columns, n, m, tries)
        work.counter[0] = 0
        call_at(solve, (work.counter, search, work.problem, MAX_PIVOTS, work.result, work.memory))
        if outcome[0, OUTCOME.pivots] < 0:
            break
        for i in range(n):
            for j in range(m):
                target[i, j] = 0.0
        for k in range(n + m - 1):
            target[cells[0, 0, k], cells[0, 1, k]] += flows[0, k]
        _product(C, D, target, n, m, half, T_target)
        if tries > 0:
            _gradient(fixed, T, n, m, alpha, gradient)
        b, c, moved = _segment(P, target, T, T_target, gradient, n, m, alpha)
        limit = tolerance * abs(value) + 4 * rounding
        if -b > limit or -(b + c) >= limit:
            t = 1.0 if c <= 0 or -b <= limit else min(-b / (2 * c), 1.0)
            converged, tries = abs(b * t + c * t * t) <= limit, 0
        else:
            # P is optimal at its gradient, and this target is no better. Another optimal plan may be.
            goes_on = iteration < max_iterations and tries < TRIES
            if tries == 0:
                goes_on = goes_on and _has_ties(gradient, f[0], g[0], n, m)
            t = 1.0 if goes_on and b + c <= rounding and moved > APART * mass else 0.0
            converged, tries = not goes_on, tries + 1
        for i in range(n):
            for j in range(m):
                P[i, j] += t * (target[i, j] - P[i, j])
                T[i, j] += t * (T_target[i, j] - T[i, j])
        value += b * t + c * t * t
    return _energy(features, fixed, P, T, n, m, alpha), converged


@compiled()
def descend_problems(
    counter: Any, solver: Any, problems: Any, alpha: float, max_iterations: int, tolerance: float, plans: Any,
    values: Any, converged: Any, work: Any,
) -> None:  # fmt: skip
    """Descend from plans (B, n, m), which are overwritten, in at most `max_iterations` steps each.

    Fills `values` and `converged`. `solver` has the addresses of the kernels of `build_solver_calls`.
    """
    while True:
        k = next_task(counter)
        if k >= plans.shape[0]:
            return
        plan = plans[k]
        n, m = _gather_problem(problems, k, plan, work)
        values[k], converged[k] = _descend(counter, solver, n, m, alpha, max_iterations, tolerance, work)
        for i in range(n):
            for j in range(m):
                plan[work.rows[i], work.columns[j]] = work.matrices[0][i, j]
