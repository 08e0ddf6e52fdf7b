"""The compiled closed forms on the line against their slow twins, linear programming and finite differences."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numba import njit

from otloss import cdf_distance, wasserstein_1d
from otloss._kernels import histograms, line_gradients
from otloss.solvers import line as _onedim
from tests.otloss.oracles import as_double, central_gradients, linprog_value, weight_gradients
from tests.otloss.strategies import line_problems, positions, weights

exponents = st.sampled_from([1, 1.5, 2, 3])


@pytest.fixture(autouse=True, scope="module")
def kernels_for_all_sizes() -> Iterator[None]:
    size, _onedim._SMALL = _onedim._SMALL, 0
    yield
    _onedim._SMALL = size


def merged(tensors: list[torch.Tensor], order: float) -> tuple[torch.Tensor, torch.Tensor]:
    """The kernel's value, and the twin's."""
    return _onedim._by_kernel(_onedim._wasserstein_1d, tuple(tensors), order), _onedim._wasserstein_1d(*tensors, order)


def cdf(tensors: list[torch.Tensor], power: float) -> tuple[torch.Tensor, torch.Tensor]:
    return _onedim._by_kernel(_onedim._cdf_distance, tuple(tensors), power), _onedim._cdf_distance(*tensors, power)


def general(batch: int, n: int, m: int, dtype: torch.dtype = torch.float64) -> list[torch.Tensor]:
    """Leaves p, q, x, y with general weights, a third of them zero, and general positions."""
    rng = np.random.default_rng(batch + n + m)
    made = []
    for size in (n, m):
        w = rng.dirichlet(np.ones(size), size=batch)
        w[rng.uniform(size=w.shape) < 1 / 3] = 0
        w[:, rng.integers(size)] += 0.1
        made.append(w / w.sum(1, keepdims=True))
    made += [rng.normal(size=(batch, n)), rng.normal(size=(batch, m)) + 0.3]
    return [torch.tensor(a, dtype=dtype, requires_grad=True) for a in made]


def assert_same(one: torch.Tensor, other: torch.Tensor, leaves: list[torch.Tensor], **tolerance: float) -> None:
    torch.testing.assert_close(one, other, **tolerance)
    upstream = torch.linspace(0.5, 2, max(1, one.numel()), dtype=one.dtype).reshape(one.shape)
    for a, b in zip(
        torch.autograd.grad(one, leaves, upstream), torch.autograd.grad(other, leaves, upstream), strict=True
    ):
        torch.testing.assert_close(a, b, **tolerance)


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_quantiles_are_the_twins_and_the_linear_programme(data: st.DataObject) -> None:
    n, m, order = data.draw(st.integers(1, 6)), data.draw(st.integers(1, 6)), data.draw(exponents)
    drawn = [data.draw(s) for s in (weights(n), weights(m), positions(n), positions(m))]
    value, twin = merged([as_double(a) for a in drawn], order)
    torch.testing.assert_close(value, twin, atol=1e-9, rtol=1e-9)
    matrix = np.abs(np.subtract.outer(drawn[2], drawn[3])) ** order
    assert value.item() == pytest.approx(linprog_value(*drawn[:2], matrix), abs=1e-6 * max(1.0, matrix.max()))


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_weight_gradients_are_subgradients(data: st.DataObject) -> None:
    n, m, order = data.draw(st.integers(1, 6)), data.draw(st.integers(1, 6)), data.draw(exponents)
    p, q = as_double(data.draw(weights(n)), grad=True), as_double(data.draw(weights(m)), grad=True)
    x, y = as_double(data.draw(positions(n))), as_double(data.draw(positions(m)))
    value = wasserstein_1d(p, q, x, y, order=order)
    by_p, by_q = torch.autograd.grad(value, [p, q])
    slack = 1e-9 * (1 + float((x[:, None] - y).abs().max() ** order))
    for there in torch.eye(n, dtype=torch.float64):
        assert by_p @ (there - p) <= wasserstein_1d(there, q, x, y, order=order) - value + slack
    for there in torch.eye(m, dtype=torch.float64):
        assert by_q @ (there - q) <= wasserstein_1d(p, there, x, y, order=order) - value + slack


@settings(max_examples=150, deadline=None)
@given(line_problems(), exponents)
def test_cumulative_distributions_are_the_twins(problem: tuple[np.ndarray, ...], power: float) -> None:
    leaves = [as_double(a, grad=True) for a in problem]
    assert cdf([t.detach() for t in leaves], power)[0].item() == pytest.approx(
        _onedim._cdf_distance(*leaves, power).item(), abs=1e-11
    )
    # Where F = G up to rounding at power 1, either slope is right: ties are left to the test of subgradients.
    p, q, x = leaves
    value = cdf_distance(p, q, x, power=power)
    by_p, by_q = torch.autograd.grad(value, [p, q])
    for there in torch.eye(p.numel(), dtype=torch.float64):
        assert by_p @ (there - p) <= cdf_distance(there, q, x, power=power) - value + 1e-8
        assert by_q @ (there - q) <= cdf_distance(p, there, x, power=power) - value + 1e-8


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("order", [1, 1.5, 2])
@pytest.mark.parametrize(("n", "m"), [(1, 1), (1, 5), (7, 3), (40, 33)])
def test_gradients_are_the_twins(n: int, m: int, order: float, dtype: torch.dtype) -> None:
    tolerance = {"atol": 1e-11, "rtol": 1e-11} if dtype == torch.float64 else {"atol": 3e-5, "rtol": 1e-4}
    leaves = general(9, n, m, dtype)
    assert_same(*merged(leaves, order), leaves, **tolerance)
    p, q, x, _ = general(9, n, n, dtype)
    assert_same(*cdf([p, q, x], order), [p, q, x], **tolerance)
    # One row that serves all problems: a shared support, a shared target.
    shared = [p, q.detach()[0].clone().requires_grad_(), x.detach()[0].clone().requires_grad_()]
    assert_same(*cdf(shared, order), shared, **tolerance)
    assert_same(*merged([*shared, shared[2]], order), shared, **tolerance)


@pytest.mark.parametrize("order", [1, 1.5, 2])
def test_gradients_match_finite_differences_of_the_linear_programme(order: float) -> None:
    leaves = general(1, 6, 8)
    value = wasserstein_1d(*leaves, order=order)
    found = [g[0].numpy() for g in torch.autograd.grad(value.sum(), leaves)]
    p, q, x, y = (t.detach()[0].numpy() for t in leaves)

    def exact(p: np.ndarray, q: np.ndarray, x: np.ndarray, y: np.ndarray) -> float:
        return linprog_value(p, q, np.abs(np.subtract.outer(x, y)) ** order)

    k, slopes = weight_gradients(lambda w: exact(w, q, x, y), p, 1e-6)
    np.testing.assert_allclose(found[0] - found[0][k], slopes, atol=5e-5)
    k, slopes = weight_gradients(lambda w: exact(p, w, x, y), q, 1e-6)
    np.testing.assert_allclose(found[1] - found[1][k], slopes, atol=5e-5)
    np.testing.assert_allclose(found[2], central_gradients(lambda a: exact(p, q, a, y), x, 1e-6), atol=5e-5)
    np.testing.assert_allclose(found[3], central_gradients(lambda a: exact(p, q, x, a), y, 1e-6), atol=5e-5)


def test_second_derivatives_are_the_twins() -> None:
    leaves = general(2, 4, 5)
    assert torch.autograd.gradgradcheck(
        lambda a, b, x, y: wasserstein_1d(a.softmax(-1), b.softmax(-1), x, y, order=2), leaves
    )
    p, q, x, _ = general(2, 5, 5)
    assert torch.autograd.gradgradcheck(lambda a, b, x: cdf_distance(a.softmax(-1), b.softmax(-1), x), [p, q, x])
    assert torch.autograd.gradgradcheck(  # one tensor for both positions
        lambda a, b, x: wasserstein_1d(a.softmax(-1), b.softmax(-1), x, order=2), [p, q, x[0].detach().requires_grad_()]
    )


@settings(max_examples=100, deadline=None)
@given(st.lists(st.one_of(st.floats(width=32, allow_nan=False, allow_infinity=False), st.just(-0.0)), min_size=1))
def test_rows_are_sorted_stably(row: list[float]) -> None:
    for dtype in (torch.float32, torch.float64):
        x = torch.tensor([row, row[::-1], sorted(row)], dtype=dtype)
        (order,) = line_gradients._orders([x])
        assert np.array_equal(order, x.sort(dim=-1, stable=True).indices.numpy())


@njit
def balance(p: np.ndarray, q: np.ndarray, tolerance: float) -> tuple[float, float, float]:
    return histograms.balance(p, q, tolerance)


def test_numbers_that_are_not_valid_are_found() -> None:
    for bad in (torch.nan, torch.inf, -torch.inf):
        for dtype in (torch.float32, torch.float64):
            good, wrong = torch.zeros(2, 2, dtype=dtype), torch.tensor([[0.0, 1.0], [bad, 2.0]], dtype=dtype)
            assert line_gradients._orders([good, wrong]) is None
            assert line_gradients._orders([good, wrong[1:]]) is None
            assert line_gradients._orders([wrong]) is None
    for drawn, balanced in [([1.0, 2.0], True), ([-1.0, 4.0], False), ([torch.nan, 3.0], False), ([1.0, 2.1], False)]:
        scales = balance(np.array([1.0, 2.0]), np.array(drawn), 1e-9)
        assert scales == (1.0, 1.0, 3.0) if balanced else np.isnan(scales).all()
    for drawn in ([np.inf], [1.0]):
        assert np.isnan(balance(np.array(drawn), np.array([np.inf]), 1e-9)).all()


def test_messages_are_the_twins() -> None:
    p, q, x, y = (t.detach() for t in general(3, 4, 4))
    for bad, message in [
        ((p, q * 2, x, y), "p and q hold different masses"),
        ((p - 0.5, q, x, y), "p holds -"),
        ((p, q * torch.nan, x, y), "q holds 12 NaN"),
        ((p, q, x, y / 0), "y holds 12 NaN"),
        ((p, q[:2], x, y), "do not broadcast"),
        ((p, q, x[:, :2], y), r"x has shape \(3, 2\), expected a last axis of 4"),
    ]:
        with pytest.raises(ValueError, match=message):
            wasserstein_1d(*bad, order=2)


def test_far_from_the_origin_and_with_wide_weights_float32_is_as_good_as_its_inputs() -> None:
    p, q, x, y = (t.detach().float() for t in general(4, 300, 200))
    for shift in (0.0, 1e6):
        here = [p, q, x + shift, y + shift]
        exact = _onedim._wasserstein_1d(
            *(t.double() / (t.double().sum(-1, keepdim=True) if t is p or t is q else 1) for t in here), 2
        )
        torch.testing.assert_close(wasserstein_1d(*here, order=2), exact.float(), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_dtypes_layouts_and_threads(dtype: torch.dtype) -> None:
    p = torch.rand(9, 4, dtype=torch.float64).softmax(0).T.to(dtype).requires_grad_()  # strided
    q = torch.rand(2, 1, 9, dtype=torch.float64).softmax(-1).to(dtype)
    value = wasserstein_1d(p, q, order=2)
    assert value.dtype == dtype
    assert value.shape == (2, 4)
    (slope,) = torch.autograd.grad(value.sum(), p)
    assert slope.dtype == dtype
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        assert torch.equal(wasserstein_1d(p, q, order=2), value)
    finally:
        torch.set_num_threads(threads)
    assert wasserstein_1d(p, q, torch.arange(9), torch.arange(9).double()).dtype == torch.float64


def test_empty_batches_and_nothing_to_move() -> None:
    assert wasserstein_1d(torch.rand(0, 3), torch.rand(0, 3), order=2).shape == (0,)
    zeros = [
        torch.zeros(2, 3, requires_grad=True),
        torch.zeros(2, 3, requires_grad=True),
        torch.rand(2, 3, requires_grad=True),
    ]
    for value in (wasserstein_1d(*zeros, zeros[2], order=2), cdf_distance(*zeros), cdf_distance(*zeros, power=1)):
        assert (value == 0).all()
        assert all(torch.isfinite(g).all() for g in torch.autograd.grad(value.sum(), zeros))
