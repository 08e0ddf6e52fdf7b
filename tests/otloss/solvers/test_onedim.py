"""Closed forms on the line against linear programming, scipy and finite differences."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import wasserstein_distance

from otloss import cdf_distance, emd, wasserstein_1d
from otloss.costs import LineCost
from tests.otloss.oracles import as_double, central_gradients, linprog_value, weight_gradients
from tests.otloss.strategies import line_problems, positions, weights

Problem = tuple[np.ndarray, np.ndarray, np.ndarray]
orders = st.sampled_from([1, 1.5, 2, 3.7])


def line_matrix(x: np.ndarray, y: np.ndarray, order: float) -> np.ndarray:
    return np.abs(np.subtract.outer(x, y)) ** order


def dirichlet_problem(seed: int, n: int, m: int) -> tuple[np.ndarray, ...]:
    rng = np.random.default_rng(seed)
    p, q = rng.dirichlet(np.ones(n)), rng.dirichlet(np.ones(m))
    p[rng.permutation(n)[: n // 3]] = 0
    q[rng.permutation(m)[: m // 3]] = 0
    return p / p.sum(), q / q.sum(), rng.normal(size=n), rng.normal(size=m)


@settings(max_examples=200, deadline=None)
@given(line_problems())
def test_power_one_is_scipys_distance(problem: Problem) -> None:
    p, q, x = problem
    expected = wasserstein_distance(x, x, p, q)
    assert cdf_distance(*map(as_double, problem), power=1).item() == pytest.approx(expected, abs=1e-12)
    assert wasserstein_1d(*map(as_double, problem)).item() == pytest.approx(expected, abs=1e-12)
    assert wasserstein_1d(*map(as_double, problem), as_double(x)).item() == pytest.approx(expected, abs=1e-12)


def test_scipy_called_with_histograms_as_values_is_nonsense() -> None:
    p, q = np.eye(5)[0], np.eye(5)[4]
    assert wasserstein_distance(p, q) == 0.0  # the peer called as often seen: the weights are taken for positions
    assert wasserstein_1d(as_double(p), as_double(q)).item() == 4.0


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_quantile_merge_is_the_linear_programme(data: st.DataObject) -> None:
    n, m, order = data.draw(st.integers(1, 6)), data.draw(st.integers(1, 6)), data.draw(orders)
    p, q, x, y = (data.draw(s) for s in (weights(n), weights(m), positions(n), positions(m)))
    matrix = line_matrix(x, y, order)
    value = wasserstein_1d(*map(as_double, (p, q, x, y)), order=order)
    assert value.item() == pytest.approx(linprog_value(p, q, matrix), abs=1e-6 * max(1.0, matrix.max()))


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_weight_gradients_are_subgradients(data: st.DataObject) -> None:
    n, m, order = data.draw(st.integers(1, 6)), data.draw(st.integers(1, 6)), data.draw(orders)
    shared = data.draw(st.booleans())
    n = m if shared else n
    x, y = data.draw(positions(n)), data.draw(positions(m))
    p, q = as_double(data.draw(weights(n)), grad=True), as_double(data.draw(weights(m)), grad=True)
    place = (as_double(x),) if shared else (as_double(x), as_double(y))
    value = wasserstein_1d(p, q, *place, order=order)
    by_p, by_q = torch.autograd.grad(value, [p, q])
    slack = 1e-9 * (1 + float(line_matrix(x, x if shared else y, order).max()))
    for there in torch.eye(n, dtype=torch.float64):
        assert by_p @ (there - p) <= wasserstein_1d(there, q, *place, order=order) - value + slack
    for there in torch.eye(m, dtype=torch.float64):
        assert by_q @ (there - q) <= wasserstein_1d(p, there, *place, order=order) - value + slack


@pytest.mark.parametrize("order", [1, 1.5, 2, 3])
@pytest.mark.parametrize(("n", "m", "shared"), [(6, 6, True), (4, 7, False), (7, 3, False), (1, 4, False)])
def test_gradients_match_finite_differences(n: int, m: int, shared: bool, order: float) -> None:
    for seed in range(4):
        p, q, x, y = dirichlet_problem(seed, n, m)
        leaves = [as_double(a, grad=True) for a in ((p, q, x) if shared else (p, q, x, y))]
        found = [g.numpy() for g in torch.autograd.grad(wasserstein_1d(*leaves, order=order), leaves)]
        end = x if shared else y

        def value(p: np.ndarray, q: np.ndarray, x: np.ndarray, y: np.ndarray) -> float:
            return linprog_value(p, q, line_matrix(x, y, order))

        k, slopes = weight_gradients(lambda w: value(w, q, x, end), p, 1e-6)  # noqa: B023
        np.testing.assert_allclose(found[0] - found[0][k], slopes, atol=5e-5)
        k, slopes = weight_gradients(lambda w: value(p, w, x, end), q, 1e-6)  # noqa: B023
        np.testing.assert_allclose(found[1] - found[1][k], slopes, atol=5e-5)
        slopes = central_gradients(lambda x: value(p, q, x, x if shared else end), x, 1e-6)  # noqa: B023
        np.testing.assert_allclose(found[2], slopes, atol=5e-5)
        if not shared:
            np.testing.assert_allclose(found[3], central_gradients(lambda y: value(p, q, x, y), y, 1e-6), atol=5e-5)  # noqa: B023
        assert abs(found[0].sum()) < 1e-12
        assert abs(found[1].sum()) < 1e-12


@pytest.mark.parametrize("power", [1, 1.3, 2, 3])
def test_cdf_distance_gradients(power: float) -> None:
    for seed in range(4):
        p, q, x, _ = dirichlet_problem(seed, 6, 6)

        def value(p: np.ndarray, q: np.ndarray, x: np.ndarray) -> float:
            order = np.argsort(x)
            gaps, apart = np.diff(x[order]), np.abs(np.cumsum(p[order] - q[order]))[:-1]
            return float((gaps * apart**power).sum())

        leaves = [as_double(a, grad=True) for a in (p, q, x)]
        distance = cdf_distance(*leaves, power=power)
        assert distance.item() == pytest.approx(value(p, q, x))
        found = [g.numpy() for g in torch.autograd.grad(distance, leaves)]
        k, slopes = weight_gradients(lambda w: value(w, q, x), p, 1e-8)  # noqa: B023
        np.testing.assert_allclose(found[0] - found[0][k], slopes, atol=1e-5 if power >= 2 else 5e-3)
        k, slopes = weight_gradients(lambda w: value(p, w, x), q, 1e-8)  # noqa: B023
        np.testing.assert_allclose(found[1] - found[1][k], slopes, atol=1e-5 if power >= 2 else 5e-3)
        np.testing.assert_allclose(found[2], central_gradients(lambda x: value(p, q, x), x, 1e-7), atol=1e-6)  # noqa: B023


def test_second_derivatives_where_smooth() -> None:
    p, q, x, y = dirichlet_problem(2, 5, 6)
    p, q = (p + 0.1) / (p + 0.1).sum(), (q + 0.1) / (q + 0.1).sum()
    fixed = as_double(x), as_double(y)

    def of_scores(a: torch.Tensor, b: torch.Tensor, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return wasserstein_1d(a.softmax(-1), b.softmax(-1), x, y, order=2)

    inputs = [t.clone().requires_grad_() for t in (as_double(p).log(), as_double(q).log(), *fixed)]
    assert torch.autograd.gradgradcheck(of_scores, inputs)
    assert torch.autograd.gradgradcheck(
        lambda a, b, x: cdf_distance(a.softmax(-1), b.softmax(-1), x), inputs[:1] * 2 + inputs[2:3]
    )


def test_bins_without_mass_keep_mixed_second_derivatives() -> None:
    p, q = as_double(np.array([0.0, 0.7, 0.3]), grad=True), as_double(np.array([0.4, 0.0, 0.6]))
    x = as_double(np.array([0.0, 1.0, 3.0]), grad=True)

    def by_weights(x: torch.Tensor) -> torch.Tensor:
        value = wasserstein_1d(p, q, x, order=2)
        return torch.autograd.grad(value, p, create_graph=True)[0]

    assert torch.autograd.gradcheck(by_weights, x)


@pytest.mark.parametrize("power", [1, 1.2, 1.9, 2, 5])
def test_equal_histograms_have_finite_gradients(power: float) -> None:
    for weights_ in (torch.tensor([0.2, 0.5, 0.3]), torch.tensor([0.0, 1.0, 0.0]), torch.zeros(3)):
        leaves = [
            weights_.clone().requires_grad_(),
            weights_.clone().requires_grad_(),
            torch.arange(3.0).requires_grad_(),
        ]
        for distance in (cdf_distance(*leaves, power=power), wasserstein_1d(*leaves, leaves[2], order=power)):
            assert distance.item() == 0.0
            assert all(torch.isfinite(g).all() for g in torch.autograd.grad(distance, leaves))


@settings(max_examples=100, deadline=None)
@given(line_problems(), orders)
def test_agrees_with_emd_and_is_invariant(problem: Problem, order: float) -> None:
    p, q, x = map(as_double, problem)
    value = wasserstein_1d(p, q, x, order=order)
    scale = 1 + float(LineCost(x, power=order).dense().max())
    torch.testing.assert_close(value, emd(p, q, LineCost(x, power=order)), atol=1e-9 * scale, rtol=0)
    shuffle = torch.randperm(x.numel(), generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(wasserstein_1d(p[shuffle], q[shuffle], x[shuffle], order=order), value)
    torch.testing.assert_close(wasserstein_1d(p, q, 7 - x, order=order), value, atol=1e-9 * scale, rtol=0)
    torch.testing.assert_close(wasserstein_1d(q, p, x, order=order), value)


@pytest.mark.parametrize("order", [1, 2])
def test_batches_broadcast_and_equal_a_loop(order: float) -> None:
    generator = torch.Generator().manual_seed(0)
    p = torch.rand(3, 1, 5, generator=generator).softmax(-1)
    q = torch.rand(4, 5, generator=generator).softmax(-1)
    for x in (None, torch.rand(5, generator=generator), torch.rand(2, 1, 1, 5, generator=generator)):
        batched = wasserstein_1d(p, q, x, order=order)
        assert batched.shape == ((3, 4) if x is None or x.dim() == 1 else (2, 3, 4))
        own = x if x is None or x.dim() == 1 else x[1, 0, 0]
        got = batched[2, 3] if batched.dim() == 2 else batched[1, 2, 3]
        torch.testing.assert_close(got, wasserstein_1d(p[2, 0], q[3], own, order=order))
    y = torch.rand(4, 7, generator=generator)
    q = torch.rand(7, generator=generator).softmax(-1)
    batched = wasserstein_1d(p, q, None, y, order=order)
    assert batched.shape == (3, 4)
    torch.testing.assert_close(batched[1, 2], wasserstein_1d(p[1, 0], q, None, y[2], order=order))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_dtypes_and_layouts(dtype: torch.dtype) -> None:
    p = torch.rand(9, 4, dtype=torch.float64).softmax(0).T.to(dtype).requires_grad_()  # strided
    q = torch.rand(4, 9, dtype=torch.float64).softmax(-1).to(dtype)
    for distance in (cdf_distance, wasserstein_1d, lambda *a: wasserstein_1d(*a, order=2)):
        value = distance(p, q)
        assert value.dtype == dtype
        assert torch.autograd.grad(value.sum(), p)[0].dtype == dtype
        # Rounding the answer once is all that half precision may cost, the rescaled masses aside.
        wide = distance(*(w.detach().double() / w.detach().double().sum(-1, keepdim=True) for w in (p, q)))
        torch.testing.assert_close(value.double(), wide, rtol=3 * torch.finfo(dtype).eps + 1e-6, atol=1e-7)
    assert cdf_distance(p[:0], q[:0]).shape == (0,)


def test_float32_is_as_good_as_its_inputs_on_many_bins() -> None:
    p, q = (torch.rand(50_000, generator=torch.Generator().manual_seed(s)).softmax(-1) for s in (0, 1))
    exact = cdf_distance(p.double() / p.double().sum(), q.double() / q.double().sum(), power=1)
    assert cdf_distance(p, q, power=1).item() == pytest.approx(exact.item(), rel=1e-4)


@pytest.mark.parametrize("order", [1, 1.5, 2])
def test_bins_before_and_behind_all_mass_have_one_sided_gradients(order: float) -> None:
    p, q = np.array([0.0, 0.0, 0.5, 0.5, 0.0, 0.0]), np.array([0.0, 0.0, 0.2, 0.4, 0.4, 0.0])
    x = np.array([0.0, 1.0, 3.0, 4.0, 6.0, 7.0])
    matrix = line_matrix(x, x, order)
    P, Q = as_double(p, grad=True), as_double(q, grad=True)
    by_p, by_q = torch.autograd.grad(wasserstein_1d(P, Q, as_double(x), order=order), [P, Q])
    k, slopes = weight_gradients(lambda w: linprog_value(w, q, matrix), p, 1e-5)
    np.testing.assert_allclose((by_p - by_p[k]).numpy(), slopes, atol=1e-4)
    k, slopes = weight_gradients(lambda w: linprog_value(p, w, matrix), q, 1e-5)
    np.testing.assert_allclose((by_q - by_q[k]).numpy(), slopes, atol=1e-4)
    assert abs(slopes[0]) >= 1


def test_masses_off_by_rounding_are_balanced() -> None:
    p, q = (
        torch.tensor([0.1, 0.2, 0.7], dtype=torch.float64),
        torch.tensor([0.3, 0.4, 0.3], dtype=torch.float64) * (1 + 8e-10),
    )
    assert wasserstein_1d(p, q).item() == pytest.approx(0.6 * (1 + 4e-10), rel=1e-13)
    assert wasserstein_1d(q, p).item() == pytest.approx(0.6 * (1 + 4e-10), rel=1e-13)
    p = torch.tensor([0.1, 0.2, 0.7], dtype=torch.float64)
    assert cdf_distance(p, p * (1 + 1e-10)).item() < 1e-30
    assert wasserstein_1d(p, p * (1 + 1e-10), torch.arange(3), torch.arange(3), order=2).item() < 1e-12
    torch.testing.assert_close(cdf_distance(3 * p, 3 * p.flip(0)), 9 * cdf_distance(p, p.flip(0)))


def test_integer_and_repeated_positions() -> None:
    p, q = torch.tensor([0.5, 0.25, 0.25]), torch.tensor([0.25, 0.5, 0.25])
    assert cdf_distance(p, q, torch.tensor([0, 0, 5]), power=1).item() == 0.0
    assert wasserstein_1d(p, q, torch.tensor([0, 2, 5]), order=2).item() == 1.0


third = torch.full((3,), 1 / 3)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (
            lambda: cdf_distance(third, third, power=0.5),
            ValueError,
            "power is 0.5, expected a finite number of at least 1",
        ),
        (lambda: wasserstein_1d(third, third, order=float("inf")), ValueError, "order is inf"),
        (lambda: wasserstein_1d(third, third, order="1"), TypeError, r"order is a str \('1'\), expected a number"),  # type: ignore[arg-type]
        (lambda: cdf_distance(third, third, power=True), TypeError, "power is a bool"),
        (lambda: cdf_distance(third, torch.ones(1)), ValueError, "p has 3 bins and q 1.*wasserstein_1d"),
        (lambda: wasserstein_1d(third, torch.ones(1), order=2), ValueError, "pass y, the positions of q's bins"),
        (
            lambda: cdf_distance(third, third, torch.arange(4.0)),
            ValueError,
            r"x has shape \(4,\), expected a last axis of 3",
        ),
        (lambda: wasserstein_1d(third, third, third, torch.ones(2)), ValueError, r"y has shape \(2,\)"),
        (lambda: cdf_distance(third, third, third * torch.nan), ValueError, "x holds 3 NaN"),
        (lambda: cdf_distance(third, third, [0, 1, 2]), TypeError, "x is a list"),  # type: ignore[arg-type]
        (lambda: cdf_distance(torch.ones(3).long(), third), TypeError, "p has dtype torch.int64"),
        (
            lambda: cdf_distance(third, third * 2),
            ValueError,
            "p and q hold different masses: 1.* and 2.*relative difference",
        ),
        (lambda: cdf_distance(third, third - 0.5), ValueError, "q holds -0.1666.* in bin 0"),
        (lambda: cdf_distance(third.expand(2, 3), third.expand(5, 3)), ValueError, r"p \(2,\), q \(5,\)"),
        (
            lambda: cdf_distance(third.expand(2, 3), third, torch.rand(5, 3)),
            ValueError,
            r"x \(5,\), its weights \(2,\)",
        ),
    ],
)
def test_bad_input(call: object, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call()  # type: ignore[operator]
