"""The functions of Newton's kernel, run as plain Python, beside the dense reference."""

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from otloss.costs.softmin_numba import as_columns
from tests.otloss.newton_reference import DenseDual, solve_in_stages
from tests.otloss.uncompiled_kernels import import_uncompiled

sparse, equations, newton, ascent = import_uncompiled(
    "otloss.solvers.entropic.newton_kernels.cells_numba", "otloss.solvers.entropic.newton_kernels.equations_numba",
    "otloss.solvers.entropic.newton_kernels.newton_numba", "otloss.solvers.barycenter.ascent_numba",
)  # fmt: skip
COUNTER = np.zeros(8, np.int64)
KERNELS = newton.NewtonKernels(*(kernel for kernel, _ in newton.build_calls()))
NO_POINTS = np.empty((0, 0)), np.empty((0, 0)), 0


def problem(kind: str) -> DenseDual:
    draw = np.random.default_rng(2)
    n, m = (1, 6) if kind == "one row" else (9, 7)
    x, y, p, q = draw.random((n, 2)), draw.random((m, 2)), draw.random(n) + 0.1, draw.random(m) + 0.1
    if kind == "zeros":
        p[[0, 4]], q[[1, 6]] = 0, 0
    if kind == "parts":
        x[:4], y[:3] = x[:4] + 1.7, y[:3] + 1.7
    if kind == "duplicates":
        x[1], y[3], y[4] = x[0], y[2], y[2]
    rho = PENALTIES.get(kind, (math.inf, math.inf))
    cost = np.square(x[:, None] - y).sum(-1)
    return DenseDual(p / p.sum(), q / q.sum() * (1 if min(rho) == math.inf else 1.6), cost, 0.05, *rho)


PENALTIES = {
    "unbalanced": (0.7, 2.5), "zeros": (1.3, 1.3), "rows kept": (math.inf, 0.6), "columns kept": (4.0, math.inf),
}  # fmt: skip
KINDS = ("balanced", "unbalanced", "rows kept", "columns kept", "zeros", "parts", "duplicates", "one row")


class State:
    """The arrays of the kernel at a random b."""

    def __init__(self, dual: DenseDual, b: np.ndarray | None = None) -> None:
        self.dual, (n, m) = dual, dual.cost.shape
        self.b = np.random.default_rng(3).normal(size=m) if b is None else b
        self.rows = sparse.build_side(dual.p, np.full(n, np.nan), dual.rho_p)
        self.columns = sparse.build_side(dual.q, self.b * dual.epsilon, dual.rho_q)
        self.epsilon = dual.epsilon
        self.pairs = sparse.Pairs(dual.cost, *NO_POINTS)
        self.none = sparse.Cells(np.zeros(n + 1, np.int64), np.empty(0, np.int32), np.empty(0), np.empty(0))

    def select(self, cut: float, previous: Any = None) -> Any:
        return sparse.select_cells(
            self.pairs, self.rows, self.columns, self.epsilon, cut, self.none if previous is None else previous
        )  # fmt: skip

    def all_cells(self) -> Any:
        """All cells, in a random order within each row."""
        (n, m), draw = self.dual.cost.shape, np.random.default_rng(4)
        columns = np.concatenate([draw.permutation(m) for _ in range(n)]).astype(np.int32)
        costs = self.dual.cost[np.repeat(np.arange(n), m), columns]
        return sparse.Cells(np.arange(0, n * m + 1, m), columns, costs, np.full(n * m, np.nan))

    @property
    def current(self) -> np.ndarray:
        return self.columns.potential / self.dual.epsilon


def places(cells: Any) -> np.ndarray:
    return np.repeat(np.arange(len(cells.starts) - 1), np.diff(cells.starts))


def as_mask(cells: Any, shape: tuple[int, int]) -> np.ndarray:
    mask = np.zeros(shape, int)
    np.add.at(mask, (places(cells), cells.columns), 1)
    assert mask.max(initial=0) <= 1
    return mask == 1


def close(actual: Any, expected: Any, rtol: float = 1e-10, atol: float = 1e-13) -> None:
    np.testing.assert_allclose(actual, expected, rtol=rtol, atol=atol)


@pytest.fixture(params=KINDS)
def state(request: pytest.FixtureRequest) -> State:
    return State(problem(request.param))


# ---- the reference ---------------------------------------------------------------------------------------------------


def test_the_reference_has_the_derivatives_of_the_dual(state: State) -> None:
    dual, b, h = state.dual, state.b, 1e-5
    directions = h * np.eye(len(b))
    gradient = [(dual.value(b + x) - dual.value(b - x)) / (2 * h) for x in directions]
    close(dual.plan(b).t - dual.plan(b).c, gradient, rtol=1e-5, atol=1e-8)
    gradients = [dual.plan(b + x) for x in directions], [dual.plan(b - x) for x in directions]
    ahead, behind = ([plan.t - plan.c for plan in plans] for plans in gradients)
    close(dual.curvature(b), -(np.array(ahead) - np.array(behind)) / (2 * h), rtol=1e-5, atol=1e-8)


# ---- cells -----------------------------------------------------------------------------------------------------------


def test_selected_cells(state: State) -> None:
    plan, cut = state.dual.plan(state.b), 0.03
    mass = plan.shares * plan.r[:, None]
    expected = ((plan.shares > cut) | (mass > cut * plan.t)) & (plan.r > 0)[:, None]
    assert 0 < expected.sum() < expected.size
    previous = State(state.dual, np.zeros_like(state.b)).select(0.2)
    for cells, wanted in (
        (state.select(cut), expected),
        (state.select(cut, previous), expected | as_mask(previous, expected.shape)),
        (state.select(cut, state.all_cells()), np.ones_like(expected) & (plan.r > 0)[:, None]),
    ):
        assert (as_mask(cells, expected.shape) == wanted).all()
        close(cells.costs, state.dual.cost[places(cells), cells.columns])
    close(state.rows.potential, plan.f)
    close(state.rows.mass, plan.r)
    close(state.columns.mass, plan.c)
    close(sparse.column_error(state.columns), plan.error)


@pytest.mark.parametrize("metric", [0, 1, 2])
def test_selected_cells_between_points(metric: int) -> None:
    draw = np.random.default_rng(0)
    x, y, p, q = draw.random((40, 2)), draw.random((30, 2)), draw.random(40), draw.random(30)
    difference = x[:, None] - y
    squares = np.square(difference).sum(-1)
    cost = (squares, np.sqrt(squares), np.abs(difference).sum(-1))[metric]
    matrix, points = (State(DenseDual(p / p.sum(), q / q.sum(), cost, 0.1, 0.9, 1.8)) for _ in range(2))
    points.pairs = sparse.Pairs(np.empty((0, 0)), x, as_columns(y, scratch=1), metric)
    previous = matrix.select(0.3)
    selected = [side.select(0.02, previous) for side in (matrix, points)]
    assert (as_mask(selected[0], cost.shape) == as_mask(selected[1], cost.shape)).all()
    close(selected[1].costs, cost[places(selected[1]), selected[1].columns])
    close(points.columns.mass, matrix.columns.mass)
    close(points.rows.potential, matrix.rows.potential)


def test_many_cells_outgrow_the_first_space() -> None:
    draw = np.random.default_rng(0)
    state = State(DenseDual(np.full(70, 1 / 70), np.full(60, 1 / 60), draw.random((70, 60)), 10.0))
    assert len(state.select(1e-9).columns) == 70 * 60


def test_evaluate(state: State) -> None:
    cells = state.select(0.05)
    dual = state.dual.on_cells(as_mask(cells, state.dual.cost.shape) | (state.dual.p == 0)[:, None])
    plan, alive = dual.plan(state.b), state.dual.p > 0
    close(sparse.evaluate(cells, state.rows, state.columns, state.epsilon), plan.error)
    close(cells.shares, plan.shares[places(cells), cells.columns])
    close(state.rows.potential[alive], plan.f[alive])
    close(state.rows.mass, plan.r)
    close(state.columns.mass, plan.c)


def test_update_of_columns(state: State) -> None:
    cells, q = state.all_cells(), state.dual.q
    sparse.evaluate(cells, state.rows, state.columns, state.epsilon)
    expected = state.dual.update(state.b)
    kept = state.dual.plan(state.b).t > 0
    largest = sparse.largest_change(state.columns, state.epsilon)
    close(largest, np.abs(expected - state.b)[kept].max())
    sparse.update_columns(state.columns, state.epsilon)
    close(state.current[q > 0], expected[q > 0])
    close(state.current[q == 0], state.b[q == 0])


def test_far_columns_are_updated_exactly(state: State) -> None:
    m, far = len(state.b), 2
    state.columns.potential[far] -= 900 * state.dual.epsilon
    start = state.current
    state.select(0.1)
    assert sparse.update_far_columns(state.pairs, state.rows, state.columns, state.epsilon) == 1
    close(state.current, state.dual.update(start, np.arange(m) == far))
    state.select(0.1)
    close(state.columns.mass[far], state.dual.plan(state.current).c[far])
    assert sparse.update_far_columns(state.pairs, state.rows, state.columns, state.epsilon) == 0


def test_outdated_masses_are_noticed() -> None:
    state = State(problem("balanced"))
    cells, x = state.all_cells(), np.zeros(7)
    sparse.evaluate(cells, state.rows, state.columns, state.epsilon)
    sparse.update_columns(state.columns, state.epsilon)
    order = equations.elimination_order(cells, 7)
    with pytest.raises(AssertionError):
        equations.find_step(COUNTER, cells, state.rows, state.columns, order, state.epsilon, 0.1, x)
    selected = state.select(0.1)
    with pytest.raises(AssertionError):  # these cells have no shares yet
        equations.find_step(COUNTER, selected, state.rows, state.columns, order, state.epsilon, 0.1, x)


# ---- the factor ------------------------------------------------------------------------------------------------------


def plan_of(kind: str, n: int, m: int) -> np.ndarray:
    """A plan with some zeros: on a line with few cells, dense, or of two parts that hardly exchange mass."""
    draw = np.random.default_rng(1)
    x, y = np.sort(draw.random(n)), np.sort(draw.random(m))
    width = {"line": 0.02, "dense": 0.5, "parts": 0.1}[kind]
    plan = np.exp(-(((x[:, None] - y) / width) ** 2)) * draw.random((n, m))
    if kind == "parts":
        plan *= np.where((x[:, None] < 0.4) == (y < 0.4), 1, 1e-7)
    plan[plan < 1e-12] = 0
    return plan / plan.sum()


def inverse_of_factor(plan: np.ndarray, damping: float, excess: np.ndarray) -> np.ndarray:
    mass, columns = plan.sum(1), [np.flatnonzero(row) for row in plan]
    shares = np.concatenate([row[row > 0] / row.sum() for row in plan])
    starts = np.cumsum([0, *map(len, columns)])
    cells = sparse.Cells(starts, np.concatenate(columns).astype(np.int32), shares, shares)
    rows, m = sparse.Side(mass, mass, mass, mass, np.inf), len(excess)
    factor = equations.factorise(cells, rows, damping, excess.copy(), equations.elimination_order(cells, m), 4)
    inverse = np.empty((m, m))
    for j in range(m):
        equations.precondition(factor, np.eye(m)[j], inverse[j])
    return inverse


def curvature(plan: np.ndarray, damping: float, excess: np.ndarray) -> np.ndarray:
    return np.diag(excess + damping * plan.sum(0)) - damping * (plan.T / plan.sum(1)) @ plan


@pytest.mark.parametrize("damping", [1.0, 0.7])
@pytest.mark.parametrize("kind", ["line", "dense", "parts"])
def test_the_factor_is_near_the_matrix(kind: str, damping: float) -> None:
    plan = plan_of(kind, 90, 70)
    excess = (1 - damping + 1e-9) * plan.sum(0)
    inverse, matrix = inverse_of_factor(plan, damping, excess), curvature(plan, damping, excess)
    close(inverse, inverse.T, rtol=1e-6, atol=1e-9 * np.abs(inverse).max())
    root = np.linalg.cholesky(matrix)
    eigenvalues = np.linalg.eigvalsh(root.T @ inverse @ root)
    assert eigenvalues[0] > 0.1
    assert eigenvalues[-1] < 10


@pytest.mark.parametrize("damping", [1.0, 0.7])
def test_the_factor_of_a_chain_is_exact(damping: float) -> None:
    """Rows of two cells join the columns to a chain. No elimination then joins more than two neighbours."""
    draw = np.random.default_rng(5)
    plan = np.zeros((8, 9))
    for i, j in enumerate(draw.permutation(8)):
        plan[i, [j, j + 1]] = draw.random(2)
    excess = 0.1 * draw.random(9)
    close(inverse_of_factor(plan, damping, excess) @ curvature(plan, damping, excess), np.eye(9), atol=1e-10)


def test_trees_have_the_laplacian_of_all_edges_as_their_mean() -> None:
    shares, scale, count = np.array([0.3, 0.05, 0.25, 0.4]), 1.7, 4000
    columns, ranks = np.array([5, 2, 0, 3], np.int32), np.array([3, 0, 5, 1, 2, 4])
    total, phase, work = np.zeros((6, 6)), 0.5, equations.build_thinning(6, 4)
    for _ in range(count):
        edges = equations.Edges(np.full(7, -1), np.arange(-1, 9), np.empty(10, np.int32), np.empty(10))
        edges.heads[6] = 9
        phase = equations.add_tree(edges, ranks, columns, shares, scale, work, phase)
        assert 0 <= phase < 1
        for j in range(6):
            e = edges.heads[j]
            while e >= 0:
                assert ranks[j] < ranks[edges.columns[e]]
                total[j, edges.columns[e]] += edges.weights[e] / count
                e = edges.nexts[e]
    expected = np.zeros((6, 6))
    expected[np.ix_(columns, columns)] = scale * np.outer(shares, shares)
    np.fill_diagonal(expected, 0)
    close(total + total.T, expected, rtol=0.02)


def test_edges_are_taken_once_and_freed() -> None:
    edges = equations.Edges(np.full(5, -1), np.arange(-1, 5), np.empty(6, np.int32), np.empty(6))
    edges.heads[4] = 5
    work, ranks, columns = equations.build_thinning(4, 4), np.arange(4), np.array([0, 3], np.int32)
    for weight in (1.0, 2.0, 4.0):
        equations.add_tree(edges, ranks, columns, np.array([1.0, weight]), 1.0, work, 0.5)
    seen, near, weights = np.full(4, -1), np.empty(4, np.int64), np.empty(4)
    assert equations.remove_neighbours(edges, 0, seen, near, weights) == 1
    assert (near[0], weights[0]) == (3, 7.0)
    assert (seen == -1).all()
    free, e = 0, edges.heads[4]
    while e >= 0:
        free, e = free + 1, edges.nexts[e]
    assert free == 6


def test_few_shares_stand_for_many() -> None:
    """The sum of each octave is kept, and no share where there are few."""
    shares = np.concatenate([np.full(50, 0.01), np.full(3, 0.1), np.full(40, 1e-6), [1e-30]])
    shares /= shares.sum()
    work = equations.build_thinning(len(shares), 4)
    count = equations.thin_out(shares, work, 0.5)
    kept, kept_places = work.kept[:count], work.places[:count]
    assert len(set(kept_places)) == count == 1 + 4 + 4 + 3
    close(kept.sum(), 1)
    assert kept[0] == shares[-1]
    close(kept[1:5].sum(), shares[53:93].sum())
    close(shares[kept_places[5:]], kept[5:], rtol=14)


def test_shares_of_an_octave_stay_where_there_are_no_more_than_stand_for_it() -> None:
    shares = np.array([0.35, 0.13, 0.2, 0.15, 0.17])
    work = equations.build_thinning(5, 4)
    assert equations.thin_out(shares, work, 0.5) == 5
    assert sorted(work.places) == list(range(5))
    close(work.kept, shares[work.places])


@pytest.mark.parametrize(("share", "number"), [(1.0, 63), (0.6, 63), (0.5, 63), (0.4999, 62), (0.25, 62), (0.0, 0)])
def test_octaves(share: float, number: int) -> None:
    assert equations.octave(share) == (number if share != 0.25 else 62)
    assert equations.octave(2.0**-40) == 63 - 39
    assert equations.octave(2.0**-90) == 0


def test_shares_are_sorted_with_their_places() -> None:
    shares = np.array([0.3, 0.1, 0.3, 0.05, 0.25])
    work = equations.build_thinning(5, 4)
    equations.sort_shares(shares, work)
    close(work.kept, np.sort(shares))
    close(shares[work.places], work.kept)
    assert sorted(work.places) == list(range(5))


def test_first_value_at_most_a_bound() -> None:
    values = np.array([9.0, 5.0, 5.0, 2.0, 0.0])
    for start in range(5):
        for bound in (0.0, 1.0, 2.0, 5.0, 7.0, 10.0):
            expected = next(b for b in range(start, 5) if values[b] <= bound)
            assert equations.first_at_most(values, start, 5, bound) == expected


# ---- steps -----------------------------------------------------------------------------------------------------------


def test_products_and_derivative(state: State) -> None:
    cells, (damping, ratio) = state.all_cells(), state.dual.ratios
    sparse.evaluate(cells, state.rows, state.columns, state.epsilon)
    plan, x = state.dual.plan(state.b), np.random.default_rng(6).normal(size=len(state.b))
    out = np.empty_like(x)
    equations.apply_curvature(cells, state.rows, plan.c + ratio * plan.t, damping, x, out)
    close(out, state.dual.curvature(state.b) @ x)
    close(newton.derivative_along(state.columns, x), (plan.t - plan.c) @ x)


def preconditioned(matrix: np.ndarray, right: np.ndarray, share: float) -> tuple[np.ndarray, list[float]]:
    """The iterates of textbook conjugate gradients with the diagonal, and the energies of their residuals."""
    x, residual, energies, scale = np.zeros_like(right), right.copy(), [], np.diag(matrix)
    direction = residual / scale
    while True:
        energies.append(residual @ (residual / scale))
        if energies[-1] <= share * energies[0]:
            return x, energies
        length = energies[-1] / (direction @ matrix @ direction)
        x, residual = x + length * direction, residual - length * matrix @ direction
        direction = residual / scale + residual @ (residual / scale) / energies[-1] * direction


@pytest.mark.parametrize("share", [0.3, 1e-2, 1e-22])
def test_conjugate_gradients(state: State, share: float) -> None:
    cells, (damping, ratio) = state.all_cells(), state.dual.ratios
    sparse.evaluate(cells, state.rows, state.columns, state.epsilon)
    plan, m = state.dual.plan(state.b), len(state.b)
    ridge = 1e-3 * np.maximum(plan.t, 1e-3)
    matrix, right, x = state.dual.curvature(state.b) + np.diag(ridge), plan.t - plan.c, np.empty(m)
    diagonal, none = plan.c + ratio * plan.t + ridge, np.zeros(m + 1, np.int64)
    factor = equations.Factor(np.arange(m), np.diag(matrix), none, cells.columns[:0], cells.shares[:0])
    residual = right.copy()
    equations.solve_equations(
        COUNTER, cells, state.rows, diagonal, damping, factor, residual, share, 0.1, x
    )  # fmt: skip
    expected, energies = preconditioned(matrix, right, share)
    close(x, expected, rtol=1e-6, atol=1e-9)
    close(residual, right - matrix @ x, atol=1e-11)
    assert len(energies) <= newton.NEWTON.max_products


def test_a_step_solves_the_equations(state: State) -> None:
    cells, m = state.all_cells(), len(state.b)
    error, x = sparse.evaluate(cells, state.rows, state.columns, state.epsilon), np.empty(m)
    order = equations.elimination_order(cells, m)
    for told, bound in ((error, 0.5), (1e-6, 1e-2)):
        equations.find_step(COUNTER, cells, state.rows, state.columns, order, state.epsilon, told, x)
        ridge = newton.NEWTON.ridge * told + newton.NEWTON.smallest_ridge
        expected, plan = state.dual.step(state.b, ridge), state.dual.plan(state.b)
        matrix = state.dual.curvature(state.b) + ridge * np.diag(plan.t)
        difference = x - expected
        assert difference @ matrix @ difference <= bound**2 * (expected @ matrix @ expected) + 1e-25


@pytest.mark.parametrize("length", [1.0, 0.01, 300.0])
def test_a_search_shortens_steps_that_are_too_long(state: State, length: float) -> None:
    """A step is shortened only where ten times the length that is taken is too long."""
    cells, plan = state.all_cells(), state.dual.plan(state.b)
    sparse.evaluate(cells, state.rows, state.columns, state.epsilon)
    x = length * state.dual.step(state.b, 1e-3)
    first = (plan.t - plan.c) @ x
    newton.search_along(cells, state.rows, state.columns, state.epsilon, x, first)
    moved = state.dual.plan(state.current)
    ratio = (moved.t - moved.c) @ x / first
    longer = state.dual.plan(state.b + 10.01 * (state.current - state.b))
    assert ratio >= -0.5 - 1e-9
    is_moved = np.abs(x) > 1e-9 * np.abs(x).max()  # the others are rounding of 0
    lengths = (state.current - state.b)[is_moved] / x[is_moved]
    close(lengths, lengths[0], rtol=1e-7)
    assert lengths[0] <= 1 + 1e-9
    assert lengths[0] > 1 - 1e-9 or (longer.t - longer.c) @ x / first < -0.5
    close(state.columns.mass, moved.c)
    close(state.rows.mass, moved.r)
    assert state.dual.value(state.current) >= state.dual.value(state.b)


@pytest.mark.parametrize("length", [3.0, 300.0])
def test_a_search_goes_to_the_zero_of_the_secant(state: State, length: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Within a tenth and half of the length before it."""
    cells, plan, trials, evaluate = state.all_cells(), state.dual.plan(state.b), [], sparse.evaluate

    def recorded(*arguments: Any) -> float:
        trials.append(state.current)
        return float(evaluate(*arguments))

    monkeypatch.setattr(newton, "evaluate", recorded)
    x = length * state.dual.step(state.b, 1e-3)
    first, expected = (plan.t - plan.c) @ x, [1.0]
    newton.search_along(cells, state.rows, state.columns, state.epsilon, x, first)
    for _ in trials[1:]:
        moved = state.dual.plan(state.b + expected[-1] * x)
        current = (moved.t - moved.c) @ x
        expected.append(expected[-1] * np.clip(first / (first - current) if current < 0 else 0.0, 0.1, 0.5))
    close([(b - state.b) @ x / (x @ x) for b in trials], expected, rtol=1e-6)


@pytest.mark.parametrize("tolerance", [1e-9, 10.0])
def test_updates_go_before_a_step(state: State, tolerance: float) -> None:
    """Without any step: two updates, or fewer where the error on the cells is small, and one at the end."""
    cells, b, dual = state.all_cells(), state.b, state.dual
    goal = max(tolerance, 1e-2 * dual.plan(b).error)
    for _ in range(2):
        b = dual.update(b) if dual.plan(b).error > goal else b
    newton.steps_on_cells(COUNTER, KERNELS, cells, state.rows, state.columns, state.epsilon, tolerance, 0)
    close(state.current[dual.q > 0], dual.update(b)[dual.q > 0], rtol=1e-8, atol=1e-8)


def test_steps_on_cells_end_at_the_goal(state: State) -> None:
    cells, tolerance = state.all_cells(), 1e-9
    start = state.dual.plan(state.b).error
    for limit in (0, 1, 60):
        steps = newton.steps_on_cells(
            COUNTER, KERNELS, cells, state.rows, state.columns, state.epsilon, tolerance, limit
        )  # fmt: skip
        assert steps <= limit
        assert np.isnan(state.columns.mass).all()  # g has been updated since
    assert sparse.evaluate(cells, state.rows, state.columns, state.epsilon) <= 1e-2 * start
    close(state.columns.mass, state.dual.plan(state.current).c)


# ---- stages ----------------------------------------------------------------------------------------------------------


def test_cells_of_an_exact_plan() -> None:
    support = sparse.build_support(np.array([[2, 0, 2, 3, 0], [1, 4, 0, 2, 3]]), 5)
    assert list(support.starts) == [0, 2, 2, 4, 5, 5]
    assert list(support.columns) == [4, 3, 1, 0, 2]


def same_potentials(dual: DenseDual, f: np.ndarray, g: np.ndarray, atol: float) -> None:
    """Compare with the reference; in balanced problems up to a constant."""
    b = solve_in_stages(dual, 1e-12)
    plan, kept = dual.plan(b), dual.q > 0
    shift = (g - b * dual.epsilon)[kept].mean() if dual.is_balanced else 0.0
    close(g[kept], (b * dual.epsilon + shift)[kept], rtol=0, atol=atol)
    close(f, plan.f - shift, rtol=0, atol=atol)


def stage(state: State, limits: Any) -> Any:
    return newton.solve_stage(
        COUNTER, KERNELS, state.pairs, state.rows, state.columns, state.epsilon, limits, state.none
    )  # fmt: skip


@pytest.mark.parametrize("allowed_change", [math.inf, 1e-7])
def test_a_stage(state: State, allowed_change: float) -> None:
    error, steps = stage(state, newton.NewtonLimits(1e-9, allowed_change, 100))
    plan = state.dual.plan(state.current)
    assert error <= 1e-9
    assert 1 <= steps < 30
    close(error, plan.error, rtol=1e-3, atol=1e-13)
    close(state.rows.potential, plan.f)
    if allowed_change < math.inf:
        change = np.abs(state.dual.update(state.current) - state.current)
        assert change[state.dual.q > 0].max() <= allowed_change * (1 + 1e-6)
        same_potentials(state.dual, state.rows.potential, state.columns.potential, 1e-4)


def test_a_stage_ends_at_its_limits() -> None:
    state = State(problem("parts"))
    error, steps = stage(state, newton.NewtonLimits(1e-9, math.inf, 0))
    assert steps == 0
    close(error, state.dual.plan(state.b).error)
    error, steps = stage(state, newton.NewtonLimits(1e-9, math.inf, 1))
    assert steps == 1
    assert error > 1e-9
    close(error, state.dual.plan(state.current).error)


def test_cells_of_a_round_leave_out_a_share_of_the_error_that_it_aims_at(state: State) -> None:
    """A hundredth of a hundredth of the error before it, which counts as 1 at first, over all rows and columns."""
    shares, errors = [], [1.0]

    def begin_round(*arguments: Any) -> Any:
        cells = KERNELS.round(*arguments)
        shares.append(arguments[4])
        errors.append(sparse.column_error(state.columns))
        return cells

    kernels, limits = KERNELS._replace(round=begin_round), newton.NewtonLimits(1e-9, math.inf, 100)
    newton.solve_stage(
        COUNTER, kernels, state.pairs, state.rows, state.columns, state.epsilon, limits, state.none
    )  # fmt: skip
    close(shares, [max(1e-9, 1e-4 * error) / sum(state.dual.cost.shape) for error in errors[:-1]])


@pytest.mark.parametrize("kind", ["balanced", "unbalanced", "parts"])
def test_a_stage_goes_on_where_only_its_potentials_are_inaccurate(kind: str) -> None:
    first = State(problem(kind))
    error, steps = stage(first, newton.NewtonLimits(1e-2, math.inf, 100))
    change = np.abs(first.dual.update(first.current) - first.current).max()
    assert min(error, change) > 0
    assert stage(State(first.dual), newton.NewtonLimits(1e-2, 1.001 * change, 100)) == (error, steps)
    assert stage(State(first.dual), newton.NewtonLimits(1e-2, 0.999 * change, 100)).steps > steps


def test_a_stage_ends_where_potentials_are_large(monkeypatch: pytest.MonkeyPatch) -> None:
    """After some steps, and not within the tolerance."""
    numbers = newton.NEWTON._replace(steps_before_size=2, max_steps_of_round=1)
    monkeypatch.setattr(newton, "NEWTON", numbers)
    few = State(problem("unbalanced"))
    error, steps = stage(few, newton.NewtonLimits(1e-9, math.inf, 2))
    assert (steps, error > 1e-9) == (2, True)
    size = max(np.abs(few.rows.potential).max(), np.abs(few.columns.potential).max()) / few.epsilon
    for largest, is_left in ((0.999 * size, True), (1.001 * size, False), (0.0, True)):
        state = State(few.dual)
        error, steps = stage(state, newton.NewtonLimits(1e-9, math.inf, 100, largest))
        assert (steps == 2) == (error > 1e-9) == is_left
    assert stage(State(few.dual), newton.NewtonLimits(1.0, math.inf, 100, 0.0)).error <= 1.0


def test_the_largest_size_is_of_bins_with_mass() -> None:
    weights, potential = np.array([0.2, 0.0, 0.3, 0.5]), np.array([1.0, 9.0, -4.0, 3.0])
    assert newton.largest_size(sparse.Side(weights, weights, potential, weights, math.inf)) == 4.0


@pytest.mark.parametrize(
    ("penalties", "has_start", "cells", "stages"),
    [
        ((math.inf, math.inf), False, 0, 0), ((math.inf, math.inf), True, 1, 1), ((0.7, 2.5), True, 0, 0),
        ((0.7, 2.5), False, 0, 3), ((2.5, 0.7), False, 1, 3), ((math.inf, 0.6), False, 0, 2),
        ((4.0, math.inf), False, 0, 3), ((0.002, 0.003), False, 0, 0), ((0.08, 0.08), False, 0, 1),
    ],
)  # fmt: skip
def test_the_stages_of_a_problem(
    penalties: tuple[float, float], has_start: bool, cells: int, stages: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each is at 4 times the epsilon of the next one, and has the steps that the ones before it have left."""
    runs = []

    def run(*arguments: Any) -> Any:
        runs.append(arguments[5:7])
        return newton.Progress(0.1 * len(runs), 3)

    monkeypatch.setattr(newton, "solve_stage", run)
    sides = [sparse.build_side(np.ones(2), np.zeros(2), rho) for rho in penalties]
    support, limits = sparse.build_support(np.zeros((2, cells), np.int64), 2), newton.NewtonLimits(1e-9, 1e-3, 40, 50.0)
    progress = newton.solve_problem(COUNTER, KERNELS, None, *sides, 0.001, has_start, support, limits)
    close([width for width, _ in runs], [0.001 * 4**stage for stage in range(stages, -1, -1)])
    for k, (_, given) in enumerate(runs):
        last = (1e-9, 1e-3, 40 - 3 * k, 50.0)
        assert given == (last if k == stages else (1e-2, math.inf, 40 - 3 * k, math.inf))
    assert progress == (0.1 * (stages + 1), 3 * (stages + 1))


def calls(kind: str) -> Iterator[tuple[bool, np.ndarray, np.ndarray]]:
    """Whether there is a start, the start, and the cells of an exact plan."""
    dual = problem(kind)
    m = dual.cost.shape[1]
    none = np.empty((1, 2, 0), np.int64)
    yield True, np.zeros((1, m)), none
    yield False, np.zeros((1, m)), none
    if dual.is_balanced:
        nearest = np.stack([np.arange(len(dual.p)), dual.cost.argmin(1)])
        yield True, np.zeros((1, m)), nearest[None]


@pytest.mark.parametrize("kind", KINDS)
def test_problems(kind: str) -> None:
    dual = problem(kind)
    for has_start, g, cells in calls(kind):
        results = newton.build_results(len(dual.p), np.repeat(g, 2, 0))
        problems = newton.NewtonProblems(
            p=np.stack([dual.p, dual.p]), q=np.stack([dual.q, dual.q]),
            pairs=sparse.Pairs(np.stack([7 + dual.cost, dual.cost]), *NO_POINTS), owner=np.array([1, 0]),
            epsilon=np.array([dual.epsilon, 2 * dual.epsilon]), penalties=np.array([[dual.rho_p, dual.rho_q]] * 2),
            has_start=np.array([has_start] * 2), plans=np.repeat(cells, 2, 0),
        )  # fmt: skip
        limits = newton.NewtonLimits(1e-10, 1e-7, 100)
        newton.newton_problems(np.zeros(8, np.int64), KERNELS, problems, limits, results)
        f, g, outcome = results
        same_potentials(dual, f[0], g[0], 1e-4)
        other = DenseDual(dual.p, dual.q, 7 + dual.cost, 2 * dual.epsilon, dual.rho_p, dual.rho_q)
        same_potentials(other, f[1], g[1], 1e-4)
        assert (outcome[:, 0] <= 1e-10).all()
        assert (outcome[:, 1] <= 30).all()
        close(dual.plan(g[0] / dual.epsilon).f, f[0])


# ---- barycenters -----------------------------------------------------------------------------------------------------


def test_conjugate_gradients_of_several_histograms() -> None:
    """The step of the equations H_k x_k = c - c_k with sum_k w_k x_k = 0, by a dense solve with a multiplier."""
    draw, count, n = np.random.default_rng(8), 3, 5
    weights, cost, p = np.array([0.2, 0.5, 0.3]), draw.random((4, n)), draw.random((count, 4)) + 0.1
    p /= p.sum(1, keepdims=True)
    rows = sparse.Side((p * weights[:, None]).ravel(), *np.zeros((3, count * 4)), np.inf)
    size = count * n
    potential = 0.05 * draw.normal(size=size)
    columns = sparse.Side(np.full(size, 1 / n), np.zeros(size), potential, np.zeros(size), np.inf)
    cells, x = ascent.all_cells(cost, count), np.empty(size)
    error = ascent.find_targets(cells, rows, columns, weights, 0.1)
    blocks = [DenseDual(weights[k] * p[k], np.ones(n), cost, 0.1) for k in range(count)]
    system, right = np.zeros((size + n, size + n)), np.zeros(size + n)
    ridge = newton.NEWTON.ridge * error + newton.NEWTON.smallest_ridge
    for k, block in enumerate(blocks):
        place, b = slice(k * n, (k + 1) * n), potential[k * n : (k + 1) * n] / 0.1
        system[place, place] = block.curvature(b) + ridge * np.diag(columns.weights[place])
        system[place, size:], system[size:, place] = weights[k] * np.eye(n), weights[k] * np.eye(n)
        right[place] = columns.weights[place] - block.plan(b).c
    expected = np.linalg.solve(system, right)[:size]
    ascent.find_joint_step(COUNTER, cells, rows, columns, weights, error, x)
    matrix, difference = system[:size, :size], x - expected
    assert difference @ matrix @ difference <= 0.05 * (expected @ matrix @ expected)
    close((weights[:, None] * x.reshape(count, n)).sum(0), 0, atol=1e-12)
