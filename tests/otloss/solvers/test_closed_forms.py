"""Closed forms on lines, circles, trees and slices against linear programs; in torch, and by the kernels.

More of their gradients is in test_gradient_matrix.
"""

import math
from functools import partial
from typing import Any

import numpy as np
import ot
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

import otloss
from otloss import cdf_distance, sliced_wasserstein, wasserstein_1d, wasserstein_circular, wasserstein_tree
from tests.errors import raising
from tests.otloss.oracles import as_double, central_gradients, check_subgradients, linprog_value, sparse_weights
from tests.otloss.strategies import line_problems, positions, weights

Problem = tuple[np.ndarray, np.ndarray, np.ndarray]
drawn = settings(suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture(params=["torch", "kernels"])
def implementation(request: pytest.FixtureRequest) -> None:
    if request.param == "kernels":
        request.getfixturevalue("small_blocks")


@pytest.mark.usefixtures("implementation")
@drawn
@given(st.data(), st.sampled_from([1, 1.5, 2, 3.7]), st.booleans())
def test_quantile_merge_is_the_linear_program(data: st.DataObject, order: float, shared: bool) -> None:
    m = data.draw(st.integers(1, 6))
    n = m if shared else data.draw(st.integers(1, 6))
    p, q, x, y = (data.draw(s) for s in (weights(n), weights(m), positions(n), positions(m)))
    places = (as_double(x),) if shared else (as_double(x), as_double(y))
    matrix = np.abs(np.subtract.outer(x, x if shared else y)) ** order
    value = wasserstein_1d(as_double(p), as_double(q), *places, order=order)
    assert value.item() == pytest.approx(linprog_value(p, q, matrix), abs=1e-6 * max(1.0, matrix.max()))
    slack = 1e-9 * (1 + float(matrix.max()))
    check_subgradients(lambda p, q: wasserstein_1d(p, q, *places, order=order), p, q, slack)


@pytest.mark.usefixtures("implementation")
@drawn
@given(line_problems(), st.sampled_from([1, 1.3, 2, 3]))
def test_cdf_distance_is_its_definition_and_gradients_are_subgradients(problem: Problem, power: float) -> None:
    p, q, x = problem
    order = np.argsort(x, kind="stable")
    gaps, apart = np.diff(x[order]), np.abs(np.cumsum(p[order] - q[order]))[:-1]
    actual = cdf_distance(*map(as_double, problem), power=power)
    assert actual.item() == pytest.approx((gaps * apart**power).sum(), abs=1e-12)
    check_subgradients(lambda p, q: cdf_distance(p, q, as_double(x), power=power), p, q, slack=1e-8)


@pytest.mark.usefixtures("implementation")
def test_float32_is_as_good_as_its_inputs() -> None:
    """On many bins, far from the origin, with wide weights; dtypes are promoted, masses balanced."""
    rng = np.random.default_rng(0)
    p, q = (torch.tensor(np.stack([sparse_weights(rng, k) for _ in range(40)])).float() for k in (300, 200))
    x, y = torch.tensor(rng.normal(size=(40, 300))).float(), torch.tensor(rng.normal(size=(40, 200))).float()
    for shift in (0.0, 1e6):
        wide = [(w.double() / w.double().sum(-1, keepdim=True)) for w in (p, q)]
        exact = wasserstein_1d(*wide, (x + shift).double(), (y + shift).double(), order=2)
        actual = wasserstein_1d(p, q, x + shift, y + shift, order=2)
        torch.testing.assert_close(actual, exact.float(), rtol=1e-6, atol=1e-7)
    p, q = (torch.rand(50_000, generator=torch.Generator().manual_seed(s)).softmax(-1) for s in (0, 1))
    exact = cdf_distance(p.double() / p.double().sum(), q.double() / q.double().sum(), power=1)
    assert cdf_distance(p, q, power=1).item() == pytest.approx(exact.item(), rel=1e-4)
    p, q = torch.tensor([[0.1, 0.2, 0.7], [0.3, 0.4, 0.3]], dtype=torch.float64)
    assert wasserstein_1d(p, q * (1 + 8e-10)).item() == pytest.approx(0.6 * (1 + 4e-10), rel=1e-12)
    torch.testing.assert_close(cdf_distance(3 * p, 3 * p.flip(0)), 9 * cdf_distance(p, p.flip(0)))
    assert wasserstein_1d(p, q, torch.tensor([0, 2, 5])).item() == pytest.approx(1.6)  # positions of integers
    assert wasserstein_1d(p.float(), q.float(), torch.arange(3), torch.arange(3).double()).dtype == torch.float64


@given(line_problems(max_size=7), st.sampled_from([1.0, 2.5, 7.0, 100.0]))
def test_the_circle_is_the_linear_program_and_gradients_are_subgradients(problem: Problem, period: float) -> None:
    p, q, x = problem
    apart = np.abs(np.subtract.outer(x, x)) % period

    def value(p: Tensor, q: Tensor) -> Tensor:
        return wasserstein_circular(p, q, as_double(x), period=period)

    expected = linprog_value(p, q, np.minimum(apart, period - apart))
    assert value(as_double(p), as_double(q)).item() == pytest.approx(expected, abs=1e-6 * period)
    check_subgradients(value, p, q, slack=1e-10 * (10 + period))


@given(st.data(), st.sampled_from([1, 1.4, 2, 3]), st.sampled_from([1.0, 2.5, 100.0]), st.booleans())
def test_the_circle_of_two_sides_is_the_linear_program(
    data: st.DataObject, order: float, period: float, shared: bool
) -> None:
    m = data.draw(st.integers(1, 6))
    n = m if shared else data.draw(st.integers(1, 6))
    p, q, x, y = (data.draw(s) for s in (weights(n), weights(m), positions(n), positions(m)))
    apart = np.abs(np.subtract.outer(x, x if shared else y)) % period
    matrix = np.minimum(apart, period - apart) ** order
    places = (as_double(x),) if shared else (as_double(x), as_double(y))
    value = partial(wasserstein_circular, x=places[0], y=None if shared else places[1], order=order, period=period)
    assert value(as_double(p), as_double(q)).item() == pytest.approx(
        linprog_value(p, q, matrix), abs=1e-6 * period**order
    )
    check_subgradients(value, p, q, slack=1e-9 * (1 + matrix.max()) * (1 + order))


def test_samples_on_the_circle() -> None:
    """Arrays, None as weights, batches, ties; POT's value; the derivatives in the positions by finite differences."""
    draw = np.random.default_rng(5)
    u, v = draw.random((2, 6)) * 30 - 10, draw.random(9) * 12
    for order in (1, 2):
        values = wasserstein_circular(None, None, u, v, order=order, period=12)
        for k in range(2):
            theirs = ot.wasserstein_circle(u[k] % 12 / 12, v / 12, p=order) * 12**order
            assert values[k].item() == pytest.approx(np.ravel(theirs)[0], rel=1e-6)
        x, y = as_double(u[0], grad=True), as_double(v, grad=True)
        distance = partial(wasserstein_circular, None, None, order=order, period=12)
        of_x, of_y = (lambda t, f=distance: f(t, v).item()), (lambda t, f=distance: f(u[0], t).item())
        by_x, by_y = torch.autograd.grad(distance(x, y), (x, y))
        np.testing.assert_allclose(by_x, central_gradients(of_x, u[0], 1e-6), atol=1e-6)
        np.testing.assert_allclose(by_y, central_gradients(of_y, v, 1e-6), atol=1e-6)
    same = wasserstein_circular(None, None, u, u + 24, order=2, period=12)
    np.testing.assert_allclose(same, 0, atol=1e-12)
    turned = wasserstein_circular(None, None, u[0] + 1.0, v + 1.0, order=2, period=12)
    assert turned.item() == pytest.approx(wasserstein_circular(None, None, u[0], v, order=2, period=12).item())


def path_lengths(parent: np.ndarray, length: np.ndarray) -> np.ndarray:
    """Distances between all nodes, by walking up."""

    def edges(node: int) -> set[int]:
        walked = set()
        while parent[node] not in (node, -1):
            walked.add(node)
            node = int(parent[node])
        return walked

    above = [edges(i) for i in range(parent.size)]
    return np.array([[sum(length[e] for e in a ^ b) for b in above] for a in above])


@given(st.data(), st.integers(1, 8), st.integers(0, 10_000))
def test_the_tree_is_the_linear_program_and_gradients_are_subgradients(data: st.DataObject, n: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    grown = np.array([max(0, rng.integers(max(0, i - 3), max(1, i))) for i in range(n)])
    names, parent = rng.permutation(n), np.empty(n, dtype=np.int64)  # nodes come in any order
    parent[names] = names[grown]
    length, p, q = rng.integers(0, 4, size=n).astype(float), data.draw(weights(n)), data.draw(weights(n))

    def value(p: Tensor, q: Tensor) -> Tensor:
        return wasserstein_tree(p, q, torch.tensor(parent), as_double(length))

    expected = linprog_value(p, q, path_lengths(parent, length))
    assert value(as_double(p), as_double(q)).item() == pytest.approx(expected, abs=1e-6)
    check_subgradients(value, p, q)


@pytest.mark.parametrize("n", [1, 64, 65, 128])
def test_a_path_is_a_line(n: int) -> None:
    generator = torch.Generator().manual_seed(n)
    p, q = torch.rand(2, 3, n, generator=generator, dtype=torch.float64).softmax(-1)
    gaps = torch.rand(n, generator=generator, dtype=torch.float64)
    x = torch.cat([gaps[:1] * 0, gaps[1:].cumsum(0)])
    for root, kind in ((-1, torch.int8), (0, torch.uint8)):
        parent = torch.arange(-1, n - 1)
        parent[0] = root
        torch.testing.assert_close(wasserstein_tree(p, q, parent.int(), gaps), wasserstein_1d(p, q, x))
        of_root = gaps.clone().masked_fill(torch.arange(len(gaps)) == 0, torch.nan)  # as files of trees have it
        torch.testing.assert_close(wasserstein_tree(p, q, parent.to(kind), of_root), wasserstein_1d(p, q, x))


@pytest.mark.parametrize(("n", "m", "d", "order"), [(5, 5, 2, 2), (4, 6, 3, 1), (4, 3, 2, 1.5), (1, 3, 1, 2)])
def test_slices_are_means_of_linear_programs(n: int, m: int, d: int, order: float) -> None:
    rng = np.random.default_rng(n + m)
    x, y, along = (rng.normal(size=(k, d)) for k in (n, m, 3))
    a, b = sparse_weights(rng, n), sparse_weights(rng, m)
    unit = along / np.linalg.norm(along, axis=1, keepdims=True)
    costs = [np.abs(np.subtract.outer(x @ u, y @ u)) ** order for u in unit]
    expected = np.mean([linprog_value(a, b, cost) for cost in costs])
    value = sliced_wasserstein(*map(as_double, (x, y, a, b)), order=order, projections=as_double(along))
    assert value.item() == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("block", [2**23, 1])
def test_directions_have_a_gradient(block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """For the distance along the best direction; a length other than 1 has no influence."""
    monkeypatch.setattr("otloss.solvers.closed_forms.sliced._BLOCK", block)
    rng = np.random.default_rng(0)
    x, y, along = (as_double(rng.normal(size=(k, 3))) for k in (4, 5, 2))
    for call in (sliced_wasserstein, partial(otloss.cloud_loss, kind="sliced")):
        directions = along.clone().requires_grad_()
        assert torch.autograd.gradcheck(lambda t, call=call: call(x, y, projections=t), (directions,))
        gradient = torch.autograd.grad(call(x, y, projections=directions), directions)[0]
        assert (gradient * directions).sum(-1).abs().max() < 1e-12 < gradient.abs().max()


def test_drawn_directions_are_uniform_and_of_the_generator() -> None:
    x = torch.randn(30, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    shift = torch.tensor([3.0, 0.0, -1.0, 2.0], dtype=torch.float64)
    mean = math.gamma(2) / (math.sqrt(math.pi) * math.gamma(2.5))
    for order, expected in ((2, float(shift @ shift) / 4), (1, float(shift.norm()) * mean)):
        drawn = partial(sliced_wasserstein, x, x + shift, order=order, projections=20_000)
        values = [float(drawn(generator=torch.Generator().manual_seed(seed))) for seed in (1, 1, 2)]
        assert values[0] == values[1] != values[2]
        assert values[0] == pytest.approx(expected, rel=0.02)


def test_slices_of_large_numbers_in_float32() -> None:
    x = torch.randn(2, 50, 3, generator=torch.Generator().manual_seed(0))
    along = torch.eye(3).repeat(9, 1)
    for points in (x + 1e6, 1e19 * x):
        actual, exact = (sliced_wasserstein(t, t.flip(0), projections=along) for t in (points, points.double()))
        torch.testing.assert_close(actual, exact.float(), rtol=1e-5, atol=0)
    on_line, sliced = partial(wasserstein_1d, None, None, order=2), partial(otloss.cloud_loss, kind="sliced")
    for call in (sliced_wasserstein, sliced, on_line, otloss.cloud_loss, partial(otloss.cloud_loss, kind="emd")):
        with pytest.raises(ValueError, match=r"overflow torch\.float32; .* pass float64|cost .*inf.* expected finite"):
            call(1e21 * x, 1e21 * x + 1e21)
    with pytest.raises(ValueError, match=r"overflow torch\.float64; .*: rescale them\.$"):
        on_line(1e160 * x.double(), 1e160 * x.double().flip(0))


@pytest.mark.parametrize("d", [1, 8])
def test_slices_of_far_clusters_in_float32(d: int) -> None:
    x, along = torch.randn(40, d, generator=torch.Generator().manual_seed(0)), torch.randn(9, d)
    x[20:] += 1e4
    y = x + 0.05 * torch.randn(40, d, generator=torch.Generator().manual_seed(1))
    values, gradients = [], []
    for dtype in (torch.float32, torch.float64):
        points = x.to(dtype).requires_grad_()
        values.append(sliced_wasserstein(points, y.to(dtype), projections=along))
        gradients.append(torch.autograd.grad(values[-1], points)[0].double())
    torch.testing.assert_close(values[0].double(), values[1], rtol=1e-6, atol=0)
    torch.testing.assert_close(gradients[0], gradients[1], rtol=0, atol=1e-6 * float(gradients[1].abs().max()))


third, ones, square = torch.full((3,), 1 / 3), torch.ones(3), torch.rand(4, 2)
test_bad_input = raising(
    (cdf_distance, (third, third), {"power": 0.5}, "power is 0.5, expected a finite number of at"),
    (cdf_distance, (third, torch.ones(1)), {}, "p has 3 bins and q 1.*wasserstein_1d"),
    (cdf_distance, (third, third * 2), {}, "different masses: 1.* and 2.*relative difference"),
    (wasserstein_1d, (third, third - 0.5), {"order": 2}, "q holds -0.1666.* in bin 0"),
    (wasserstein_circular, (third, third, third), {}, "x is given without a period"),
    (wasserstein_tree, (third, third, torch.tensor([0, 2, 1]), ones), {}, "parent has a cycle above node 1"),
    (
        wasserstein_tree,
        (third, third, torch.tensor([-1, 0, -1]), ones),
        {},
        r"parent has 2 roots \[0, 2\], expected one",
    ),
    (wasserstein_tree, (third, third, torch.tensor([0, 0, 0]), -ones), {}, r"length\[1\] is -1.0"),
    (sliced_wasserstein, (square, square), {"projections": torch.zeros(2, 2)}, r"projections\[0\] is zero"),
    (sliced_wasserstein, (square, square, torch.ones(4), 2 * torch.ones(4)), {}, "^a and b hold different masses: 4"),
    (sliced_wasserstein, (square, square, -torch.ones(4)), {}, "^a holds -1.0 in bin 0, "),
    call=lambda function, arguments, options: function(*arguments, **options),
)


def test_a_list_of_positions_is_named() -> None:
    for name, arguments in (("x", ([1.0], torch.ones(2))), ("y", (torch.ones(2), [1.0]))):
        for function, options in ((otloss.wasserstein_circular, {"period": 6.0}), (otloss.wasserstein_1d, {})):
            with pytest.raises(TypeError, match=f"{name} is a list"):
                function(None, None, *arguments, **options)


@pytest.mark.parametrize(
    "distance",
    [
        cdf_distance, partial(cdf_distance, power=1), partial(cdf_distance, power=1.5), wasserstein_circular,
        partial(wasserstein_circular, order=2),
        lambda p, q: wasserstein_tree(p, q, torch.arange(-1, 999), torch.ones(1000, dtype=p.dtype)),
    ],
)  # fmt: skip
def test_rounding_of_float32_masses_moves_nowhere(distance: Any) -> None:
    """Beside histograms that are nearly equal it would be a thousandth of the value."""
    generator = torch.Generator().manual_seed(0)
    p = torch.rand(1000, generator=generator, dtype=torch.float64)
    q = p * (1 + 1e-3 * torch.randn(1000, generator=generator, dtype=torch.float64))
    p, q = (p / p.sum()).float(), (q / q.sum()).float()
    exact_q = q.double() * (p.double().sum() / q.double().sum())
    assert exact_q.sum() - q.double().sum() != 0
    torch.testing.assert_close(distance(p, q).double(), distance(p.double(), exact_q), rtol=1e-5, atol=0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_equal_weights_of_16_bit_samples_have_the_mass_one(dtype: torch.dtype) -> None:
    """In float16 1 / n of 50,000 samples was 4 % off, and in bfloat16 that of any number up to 0.4 %."""
    generator = torch.Generator().manual_seed(0)
    u, v = (torch.randn(n, generator=generator).to(dtype) for n in (50_000, 30_000))
    u2, v2 = u[:600].reshape(-1, 2), v[:514].reshape(-1, 2)
    cost = torch.rand(30_000, 1, generator=generator).to(dtype)
    functions = {
        "wasserstein_1d": lambda t, s: wasserstein_1d(None, None, t, s),
        "wasserstein_circular": lambda t, s: wasserstein_circular(None, None, t, s, period=1),
        "cloud_loss, sliced": lambda t, s: otloss.cloud_loss(t[:, None], s[:, None], kind="sliced", projections=1),
    }
    for name, function in functions.items():
        actual, expected = function(u, v), function(u.float(), v.float())
        assert actual.dtype == dtype, name
        torch.testing.assert_close(actual, expected.to(dtype), msg=name)
    for kind in ("emd", "divergence"):
        expected = otloss.cloud_loss(u2.float(), v2.float(), kind=kind)
        torch.testing.assert_close(otloss.cloud_loss(u2, v2, kind=kind), expected, rtol=1e-5, atol=1e-6)
    for penalty in (None, 1.0):
        solution = otloss.solve(None, None, cost, epsilon=0.1, marginal_penalty=penalty)
        expected = otloss.solve(None, None, cost.float(), epsilon=0.1, marginal_penalty=penalty)
        assert solution.value.dtype == solution.plan().dtype == dtype
        torch.testing.assert_close(solution.value, expected.value.to(dtype))
