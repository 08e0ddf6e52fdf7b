"""Soft sorting against root finding, isotonic regression, quadratic programs and finite differences."""

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import brentq, isotonic_regression, root
from scipy.special import expit, logsumexp, softmax
from scipy.stats import rankdata
from torch import Tensor

from otloss.solvers.ranking.soft_sort import soft_rank, soft_sort, soft_top_k
from tests.errors import raising
from tests.otloss.draws import normal
from tests.otloss.oracles import central_gradients

F64 = torch.float64


def third_of(x: Tensor, **options: float) -> Tensor:
    return soft_top_k(x, (x.shape[-1] + 2) // 3, **options)


OPERATORS: dict[str, Callable[..., Tensor]] = {"sort": soft_sort, "rank": soft_rank, "top": third_of}
every_operator = pytest.mark.parametrize("name", OPERATORS)


def plan_by_roots(x: np.ndarray, epsilon: float, places: np.ndarray, share: np.ndarray) -> np.ndarray:
    """The transport plan for the squared cost in units of the range, the weights of x being 1 / n."""
    u = (x - x.min()) / (x.max() - x.min())
    scores = -(np.subtract.outer(u, places) ** 2) / epsilon

    def plan(b: np.ndarray) -> np.ndarray:
        return softmax(scores + np.append(b, 0.0), axis=1) / x.size

    start = np.zeros(places.size - 1)
    for _ in range(100):
        column = scores - logsumexp(scores + np.append(start, 0.0), axis=1, keepdims=True)
        start = (np.log(x.size * share) - logsumexp(column, axis=0))[:-1] - np.log(x.size * share[-1])
        start = start + logsumexp(column[:, -1])
    actual = root(lambda b: plan(b).sum(axis=0)[:-1] - share[:-1], start, tol=1e-14)
    assert np.abs(actual.fun).max() < 1e-12
    return plan(actual.x)


def by_plan(name: str, x: np.ndarray, epsilon: float) -> np.ndarray:
    """The operator by its plan, whose places for sorting are the places for ranks, and for the top two."""
    n, k = x.size, (x.size + 2) // 3
    if name == "top":
        return n * plan_by_roots(x, epsilon, np.array([0.0, 1.0]), np.array([n - k, k]) / n)[:, 1]
    plan = n * plan_by_roots(x, epsilon, np.linspace(0, 1, n), np.full(n, 1 / n))
    return plan.T @ x if name == "sort" else plan @ np.arange(1, n + 1)


@every_operator
@pytest.mark.parametrize(("n", "epsilon"), [(2, 0.1), (5, 0.02), (5, 100.0)])
def test_values_and_derivatives_are_those_of_the_transport_plan(name: str, n: int, epsilon: float) -> None:
    x = normal(n, seed=n) * 3 + 1
    leaf, weights = x.clone().requires_grad_(), normal(n, seed=n + 1)
    value = OPERATORS[name](leaf, epsilon=epsilon)
    np.testing.assert_allclose(value.detach(), by_plan(name, x.numpy(), epsilon), rtol=1e-9, atol=1e-9)
    (actual,) = torch.autograd.grad((value * weights).sum(), leaf)
    expected = central_gradients(lambda t: float(by_plan(name, t, epsilon) @ weights.numpy()), x.numpy(), 1e-5)
    np.testing.assert_allclose(actual, expected, rtol=1e-6, atol=1e-7)
    rows, near = normal(2, 5, seed=1).requires_grad_(), {"atol": 1e-4, "rtol": 1e-4}
    assert torch.autograd.gradgradcheck(lambda t: OPERATORS[name](t, epsilon=epsilon), rows, fast_mode=True, **near)


@every_operator
def test_gradients_at_ties_and_at_small_epsilon(name: str) -> None:
    tied = torch.tensor([0.3, -1.0, 0.3, 2.0, 0.3, 0.5], dtype=F64)
    for x, epsilon in ((tied, 0.1), (tied, 1e-3), (normal(40, seed=2), 1e-3), (normal(12, seed=3), 1e-4)):
        leaf, weights = x.clone().requires_grad_(), normal(x.numel(), seed=4)

        def value(t: Any, weights: Tensor = weights, epsilon: float = epsilon) -> Tensor:
            return (OPERATORS[name](torch.as_tensor(t), epsilon=epsilon) * weights).sum()

        (actual,) = torch.autograd.grad(value(leaf), leaf)
        expected = central_gradients(lambda t: float(value(t)), x.numpy(), 1e-7)
        np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=1e-5 * max(1.0, float(np.abs(expected).max())))


@given(st.lists(st.integers(-20, 20), min_size=1, max_size=12), st.sampled_from([1e-5, 1e-6, 1e-7]), st.data())
def test_the_limit_is_the_operator_itself(entries: list[int], epsilon: float, data: st.DataObject) -> None:
    dtype = data.draw(st.sampled_from([torch.float32, F64]))
    x = torch.tensor(entries, dtype=dtype, requires_grad=True)
    spread = max(entries) - min(entries)
    # Whole numbers in a range of 40 for 12 places: a swap costs at least 2 / (40 * 11), or 450 epsilon.
    actual = soft_sort(x, epsilon=epsilon)
    torch.testing.assert_close(actual, x.sort().values, rtol=0, atol=1e-5 * max(spread, 1))
    ranks = torch.tensor(rankdata(entries), dtype=dtype)
    torch.testing.assert_close(soft_rank(x, epsilon=epsilon), ranks, rtol=0, atol=1e-5)
    k = data.draw(st.integers(0, len(entries)))
    # Of the entries at the threshold each gets an equal part of what the larger ones leave.
    larger = np.array([sum(e > entry for e in entries) for entry in entries])
    equal = np.array([sum(e == entry for e in entries) for entry in entries])
    expected = torch.tensor(np.clip((k - larger) / equal, 0, 1), dtype=dtype)
    torch.testing.assert_close(soft_top_k(x, k, epsilon=epsilon), expected, rtol=0, atol=1e-5)
    for value in (actual, soft_rank(x, epsilon=epsilon), soft_top_k(x, k, epsilon=epsilon)):
        (expected_gradient,) = torch.autograd.grad(value @ torch.arange(1.0, 1.0 + len(x), dtype=dtype), x)
        assert torch.isfinite(expected_gradient).all()


@pytest.mark.parametrize(("k", "epsilon"), [(1, 0.1), (7, 1e-6), (500, 1e-3), (999, 10.0)])
def test_top_k_of_long_rows_against_a_root_finder(k: int, epsilon: float) -> None:
    x = np.random.default_rng(k).standard_cauchy(1000)
    ascending = np.sort(x)
    u = (x - x.min()) / min(np.ptp(x), 3 * 999 / 799 * (ascending[-101] - ascending[100]))
    theta = brentq(
        lambda t: expit((2 * u - t) / epsilon).sum() - k,
        -100 * epsilon - 1,
        2 * u.max() + 1 + 100 * epsilon,
        xtol=1e-16,
    )
    actual = soft_top_k(torch.tensor(x), k, epsilon=epsilon)
    np.testing.assert_allclose(actual, expit((2 * u - theta) / epsilon), atol=1e-9 + 1e-15 / epsilon)
    assert float(actual.sum()) == pytest.approx(k, rel=1e-12)


@pytest.mark.parametrize("regularization", ["entropy", "quadratic"])
@pytest.mark.parametrize("outliers", [(1e2,), (-1e4, 1e4), (1e8, 1e8, -1e6)])
def test_outliers_leave_the_others_their_ranks(outliers: tuple[float, ...], regularization: str) -> None:
    """Beside one of them in a row of the batch alone; epsilon is relative to a width that they do not decide."""
    ordinary = normal(100, seed=5)
    rows = torch.cat([ordinary, torch.tensor(outliers, dtype=F64)]).repeat(2, 1)
    rows[0, 100:] = ordinary[: len(outliers)]
    rows.requires_grad_()
    ranks, below = soft_rank(rows, regularization=regularization), sum(x < 0 for x in outliers)
    torch.testing.assert_close(ranks.sum(-1), torch.full((2,), (n := rows.shape[-1]) * (n + 1) / 2, dtype=F64))
    alone = soft_rank(ordinary, regularization=regularization)
    assert ranks[1, :100].std(correction=0) > 0.6 * alone.std(correction=0)
    expected = torch.tensor(rankdata(rows[1].detach()))
    torch.testing.assert_close(ranks[1, 100:], expected[100:], rtol=0, atol=0.05)
    assert (ranks[1, :100].detach() - below - expected[:100].add(-below)).abs().mean() < 10
    torch.testing.assert_close(ranks[1], soft_rank(rows[1], regularization=regularization))
    narrow = soft_rank(rows.float(), regularization=regularization)
    torch.testing.assert_close(narrow.double(), ranks, rtol=0, atol=1e-2)
    weights = normal(n, seed=6)

    def total(x: Any) -> Tensor:
        return (soft_rank(torch.as_tensor(x), regularization=regularization) * weights).sum()

    (actual,) = torch.autograd.grad(total(rows[1]), rows)
    numbers = [3, 50, *range(100, n)]  # where the width is a distance of ordinary entries, they have its derivative too
    step = 1e-5
    for i in (*numbers, *torch.tensor(rankdata(rows[1].detach())).argsort()[[n // 10, n - 1 - n // 10]].tolist()):
        ends = [total(rows[1].detach() + s * step * (torch.arange(n) == i)) for s in (1, -1)]
        torch.testing.assert_close(actual[1, i], (ends[0] - ends[1]) / (2 * step), rtol=1e-2, atol=0.05)


@every_operator
def test_batches_equal_a_loop_whatever_the_layout(name: str) -> None:
    leaf = normal(6, 3, 4, seed=8).permute(1, 2, 0).requires_grad_()
    assert not leaf.is_contiguous()
    operator, weights = OPERATORS[name], normal(3, 4, 6, seed=9)
    looped = torch.stack([torch.stack([operator(row) for row in block]) for block in leaf])
    torch.testing.assert_close(operator(leaf), looped)
    by_batch, by_loop = (torch.autograd.grad((v * weights).sum(), leaf)[0] for v in (operator(leaf), looped))
    torch.testing.assert_close(by_batch, by_loop)
    for shape in ((0, 5), (2, 0, 3), (0, 1)):
        empty = torch.zeros(shape, requires_grad=True)
        assert torch.autograd.grad(operator(empty).sum(), empty)[0].shape == shape
    if name != "top":
        expected = -operator(-leaf) if name == "sort" else operator(-leaf)
        torch.testing.assert_close(operator(leaf, descending=True), expected)


def test_rows_of_equal_entries_and_none_or_all_of_a_row() -> None:
    x = torch.full((2, 5), 7.0, requires_grad=True)
    assert torch.equal(soft_sort(x), x)
    torch.testing.assert_close(torch.autograd.grad(soft_sort(x)[0, 1], x)[0], torch.tensor([[0.2] * 5, [0.0] * 5]))
    for value, expected in ((soft_rank(x), 3.0), (soft_top_k(x, 2), 0.4)):
        torch.testing.assert_close(value, torch.full((2, 5), expected))
        assert torch.equal(torch.autograd.grad(value[0, 1], x)[0], torch.zeros(2, 5))
    for k, share in ((0, 0.0), (5, 1.0)):
        assert torch.equal(soft_top_k(normal(2, 5), k), torch.full((2, 5), share, dtype=F64))


ramp = torch.arange(4.0)
test_bad_input = raising(
    (lambda: soft_sort(torch.zeros(5000)), "5000 entries in a row, expected at most 4096: soft_sort"),
    (lambda: soft_sort(ramp, epsilon=1e-8), "epsilon is 1e-08, expected at least 1e-07"),
    (lambda: soft_top_k(ramp, 5), "k is 5, expected 0 to 4"),
    (lambda: soft_sort(torch.tensor([-1.7e308, 1.7e308], dtype=F64)), "the range of a row of x is beyond float64"),
)
rank = partial(soft_rank, regularization="quadratic")
sort = partial(soft_sort, regularization="quadratic", descending=True)


def top_two(x: Tensor, *, epsilon: float) -> Tensor:
    return soft_top_k(x, min(2, x.shape[-1]), epsilon=epsilon, regularization="quadratic")


every_quadratic_operator = pytest.mark.parametrize("operator", [rank, sort, top_two])


def projected(z: np.ndarray, w: np.ndarray) -> np.ndarray:
    """The convex combination of the permutations of falling w nearest to z, by scipy's isotonic regression."""
    order = np.argsort(-z, kind="stable")
    actual = np.empty_like(z)
    actual[order] = z[order] - isotonic_regression(z[order] - w, increasing=False).x
    return actual


@given(st.lists(st.tuples(*[st.integers(-4, 4)] * 5), min_size=1, max_size=40), st.sampled_from([1e-7, 0.3, 1.0, 7.0]))
def test_quadratic_operators_are_projections_of_rows_with_ties(entries: list[tuple[int, ...]], epsilon: float) -> None:
    x, places = torch.tensor(entries, dtype=torch.float32), np.arange(5.0, 0.0, -1.0)
    values = (operator(x, epsilon=epsilon) for operator in (rank, sort, top_two))
    for row, *actual in zip(x.double().numpy(), *values, strict=True):
        falling, spread = -np.sort(-row), np.ptp(row)
        u = (row - row.min()) / (spread or 1.0)
        np.testing.assert_allclose(actual[0], projected(4 * u / epsilon, places), rtol=1e-5)
        np.testing.assert_allclose(actual[1], projected(places / 4 / epsilon * spread, falling), atol=1e-5)
        np.testing.assert_allclose(actual[2], projected(u / epsilon, np.array([1.0, 1, 0, 0, 0])), atol=1e-5)
        if epsilon < 1e-6:
            np.testing.assert_array_equal(actual[0], rankdata(row))
            np.testing.assert_array_equal(actual[1], falling)


@every_quadratic_operator
def test_derivatives(operator: Callable[..., Tensor]) -> None:
    leaf = normal(3, 7).requires_grad_()
    for epsilon in (0.05, 3.0):
        assert torch.autograd.gradcheck(lambda t, e=epsilon: operator(t, epsilon=e), leaf)
    (actual,) = torch.autograd.grad(operator(leaf, epsilon=0.7).square().sum(), leaf, create_graph=True)
    with pytest.raises(RuntimeError, match="a second derivative"):
        actual.sum().backward()
    # Entries that tie and share no places have no gradient, and neither have rows of equal ones.
    tied = torch.tensor([[5.0, 5.0, 1.0, 0.0], [2.0, 2.0, 2.0, 2.0]], requires_grad=True)
    for value in (top_two(tied, epsilon=0.1)[:, 0].sum(), rank(tied, epsilon=1.0)[1, 0]):
        assert not torch.autograd.grad(value, tied)[0].any()


@every_quadratic_operator
@pytest.mark.parametrize("n", [1, 2, 1_000_000])
def test_sizes_and_scale(n: int, operator: Callable[..., Tensor]) -> None:
    x = normal(n, seed=1).requires_grad_()
    actual, scaled = operator(x, epsilon=1e-3), operator(4 * x + 1, epsilon=1e-3)
    torch.testing.assert_close(scaled, 4 * actual + 1 if operator is sort else actual)
    assert torch.autograd.grad(actual.square().sum(), x)[0].isfinite().all()
    assert operator(torch.zeros(2, 0, 3), epsilon=1.0).shape == (2, 0, 3)


def test_quadratic_operators_of_rows_whose_range_has_no_inverse() -> None:
    entries = torch.tensor([1.0, 0.0, 2.0, 5.0]).double()
    for operator in (rank, top_two):
        actual = operator((entries * 2.0**-1030).requires_grad_(), epsilon=0.5)
        torch.testing.assert_close(actual.detach(), operator(entries, epsilon=0.5))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own rules use torch.jit
@pytest.mark.parametrize("function", [soft_sort, soft_rank, partial(soft_top_k, k=2)])
def test_jacobians_and_hessians_in_forward_mode(function: Callable[[Tensor], Tensor]) -> None:
    x = normal(5)

    def value(x: Tensor) -> Tensor:
        return (function(x) * torch.linspace(-1, 2, 5, dtype=x.dtype)).sum()

    jacobian = torch.autograd.functional.jacobian(function, x)
    torch.testing.assert_close(torch.func.jacfwd(function)(x), jacobian, rtol=1e-9, atol=1e-9)
    hessian = torch.autograd.functional.hessian(value, x)
    torch.testing.assert_close(
        torch.func.hessian(value)(x), hessian, rtol=1e-7, atol=1e-7 * float(hessian.abs().amax())
    )
    with pytest.raises(NotImplementedError, match="no derivative by forward mode inside forward mode"):
        torch.func.jacfwd(torch.func.jacfwd(value))(x)
