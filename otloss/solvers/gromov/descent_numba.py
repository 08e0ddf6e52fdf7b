"""A numba kernel: conditional gradients for fused Gromov-Wasserstein problems, one problem per thread.

`fused_gromov` has the formulas and the reference implementation. For fixed marginals the gradient is

    G(P) = fixed - 2 alpha T(P),    T(P) = C P D^T + C^T P D

Only T changes from step to step, and T is linear in P. So a step costs one product and one transport problem, whose
plan is the target of the step.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from otloss._numba.compile import compiled, inner
from otloss._numba.tasks import is_stopped, next_task
from otloss.solvers.exact.simplex_numba import PIVOTS, solve_one
from otloss.solvers.exact.simplex_numba import answers as answers_of_exact
from otloss.solvers.exact.simplex_numba import scratch as scratch_of_exact

# Scratch matrices (n, m), and those of two sides.
PLAN, TARGET, FIXED, FEATURES, MOVED, MOVED_TARGET, GRADIENT, HALF = range(8)
MOST_PIVOTS = 10_000_000


class Problems(NamedTuple):
    """C, D and M of all problems, (B, ...) or (1, ...), and their weights (B, n) and (B, m)."""

    C: Any
    D: Any
    M: Any
    p: Any
    q: Any


class Scratch(NamedTuple):
    """Memory of a thread: `solver` of the exact solver, matrices (8, n, m), and the bins with mass of one problem."""

    solver: Any
    matrices: Any
    C: Any
    D: Any
    p: Any
    q: Any
    f: Any
    g: Any
    cells: Any
    flows: Any
    outcome: Any


def scratch(n: int, m: int) -> tuple[Scratch]:
    """Return the memory of a thread."""
    solver = tuple(scratch_of_exact(n, m, np.float64))
    squares = np.empty((n, n)), np.empty((m, m))
    answer = (array[0] for array in answers_of_exact(1, n, m))
    return (Scratch(solver, np.zeros((8, n, m)), *squares, np.empty(n), np.empty(m), *answer),)


def answers(problems: int) -> tuple[np.ndarray, np.ndarray]:
    """Return `values` and `converged` for `descend_problems`."""
    return np.empty(problems), np.empty(problems, np.bool_)


@inner()
def _gathered(weights: Any, square: Any, masses: Any, compact: Any, places: Any) -> int:
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
    """(1 - alpha) M + alpha times the squares of both orientations against the marginals."""
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
    """1e-15 of `_Energy.size` of the reference implementation."""
    total = 0.0
    for i in range(n):
        for j in range(m):
            features = (1 - alpha) * M[i, j]
            total += P[i, j] * (abs(features) + (fixed[i, j] - features) / 2)
    return 1e-15 * total


@inner()
def _gradient(fixed: Any, T: Any, n: int, m: int, alpha: float, gradient: Any) -> None:
    """The gradient less its least entry: costs of the solver are not negative."""
    least = np.inf
    for i in range(n):
        for j in range(m):
            gradient[i, j] = fixed[i, j] - 2 * alpha * T[i, j]
            least = gradient[i, j] if gradient[i, j] < least else least
    for i in range(n):
        for j in range(m):
            gradient[i, j] -= least


@inner()
def _length(P: Any, Q: Any, gradient: Any, n: int, m: int, value: float, target: float) -> tuple[float, float]:
    """Return how far to go from P to Q, and the value there: E on the segment is a parabola."""
    b = 0.0
    for i in range(n):
        for j in range(m):
            b += gradient[i, j] * (Q[i, j] - P[i, j])
    c = target - value - b
    t = (1.0 if b + c < 0 else 0.0) if c <= 0 else min(max(-b / (2 * c), 0.0), 1.0)
    return t, value + b * t + c * t * t


@compiled(seconds=6)
def descend_problems(
    counter: Any, problems: Any, alpha: float, most: int, tolerance: float, plans: Any, values: Any, converged: Any,
    work: Any,
) -> None:  # fmt: skip
    """Descend from plans (B, n, m), which are overwritten, in at most `most` steps. Fills values and converged."""
    P, Q, fixed = work.matrices[PLAN], work.matrices[TARGET], work.matrices[FIXED]
    features, T, T_target = work.matrices[FEATURES], work.matrices[MOVED], work.matrices[MOVED_TARGET]
    gradient, half, C, D, a, b = work.matrices[GRADIENT], work.matrices[HALF], work.C, work.D, work.p, work.q
    rows, columns = np.empty(a.shape[0], np.int64), np.empty(b.shape[0], np.int64)
    answer = work.f, work.g, work.cells, work.flows, work.outcome
    while True:
        at = next_task(counter)
        if at >= plans.shape[0]:
            return
        n = _gathered(problems.p[at], problems.C[at if problems.C.shape[0] > 1 else 0], a, C, rows)
        m = _gathered(problems.q[at], problems.D[at if problems.D.shape[0] > 1 else 0], b, D, columns)
        wide, plan = problems.M[at if problems.M.shape[0] > 1 else 0], plans[at]
        for i in range(n):
            for j in range(m):
                features[i, j], P[i, j] = wide[rows[i], columns[j]], plan[rows[i], columns[j]]
        _fixed(C, D, features, a, b, n, m, alpha, fixed)
        _product(C, D, P, n, m, half, T)
        value = _energy(features, fixed, P, T, n, m, alpha)
        rounding = _rounding(features, fixed, P, n, m, alpha)
        converged[at] = n == 0 or m == 0
        steps = 0
        while steps < most and not converged[at] and not is_stopped(counter, np.nan, np.nan):
            steps += 1
            _gradient(fixed, T, n, m, alpha, gradient)
            solve_one(counter, a, b, gradient, MOST_PIVOTS, answer, work.solver)
            if work.outcome[PIVOTS] < 0:  # or stopped
                break
            for i in range(n):
                for j in range(m):
                    Q[i, j] = 0.0
            for k in range(n + m - 1):
                Q[work.cells[0, k], work.cells[1, k]] += work.flows[k]
            _product(C, D, Q, n, m, half, T_target)
            t, new = _length(P, Q, gradient, n, m, value, _energy(features, fixed, Q, T_target, n, m, alpha))
            for i in range(n):
                for j in range(m):
                    P[i, j] += t * (Q[i, j] - P[i, j])
                    T[i, j] += t * (T_target[i, j] - T[i, j])
            converged[at] = abs(value - new) <= tolerance * abs(new) + rounding
            value = new
        for i in range(n):
            for j in range(m):
                plan[rows[i], columns[j]] = P[i, j]
        values[at] = _energy(features, fixed, P, T, n, m, alpha)
