"""Soft sorting against the operators in the limit, generic root finding, and finite differences with their size."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import brentq, root
from scipy.special import expit, logsumexp, softmax
from scipy.stats import rankdata
from torch import Tensor

from otloss.applications.sorting import soft_rank, soft_sort, soft_top_k
from tests.errors import raising
from tests.otloss.draws import normal
from tests.otloss.oracles import central_gradients

F64 = torch.float64


def third_of(x: Tensor, **options: float) -> Tensor:
    return soft_top_k(x, (x.shape[-1] + 2) // 3, **options)


OPERATORS: dict[str, Callable[..., Tensor]] = {"sort": soft_sort, "rank": soft_rank, "top": third_of}
every_operator = pytest.mark.parametrize("operator", OPERATORS.values(), ids=OPERATORS)


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


def sort_oracle(x: np.ndarray, epsilon: float) -> np.ndarray:
    n = x.size
    return n * plan_by_roots(x, epsilon, np.linspace(0, 1, n), np.full(n, 1 / n)).T @ x


def rank_oracle(x: np.ndarray, epsilon: float) -> np.ndarray:
    n = x.size
    return n * plan_by_roots(x, epsilon, np.linspace(0, 1, n), np.full(n, 1 / n)) @ np.arange(1, n + 1)


def top_oracle(x: np.ndarray, epsilon: float) -> np.ndarray:
    n = x.size
    k = (n + 2) // 3
    return n * plan_by_roots(x, epsilon, np.array([0.0, 1.0]), np.array([n - k, k]) / n)[:, 1]


ORACLES = {"sort": sort_oracle, "rank": rank_oracle, "top": top_oracle}


@pytest.mark.parametrize(("n", "epsilon"), [(2, 0.1), (8, 0.02), (8, 100.0)])
@pytest.mark.parametrize("name", OPERATORS)
def test_values_and_gradients_are_those_of_the_transport_plan(name: str, n: int, epsilon: float) -> None:
    x = normal(n, seed=n) * 3 + 1
    leaf = x.clone().requires_grad_()
    value = OPERATORS[name](leaf, epsilon=epsilon)
    np.testing.assert_allclose(value.detach(), ORACLES[name](x.numpy(), epsilon), rtol=1e-9, atol=1e-9)
    weights = normal(n, seed=n + 1)
    (actual,) = torch.autograd.grad((value * weights).sum(), leaf)
    expected_gradient = central_gradients(lambda t: float(ORACLES[name](t, epsilon) @ weights.numpy()), x.numpy(), 1e-5)
    np.testing.assert_allclose(actual, expected_gradient, rtol=1e-6, atol=1e-7)


@every_operator
def test_second_derivatives(operator: Callable[..., Tensor]) -> None:
    x = normal(2, 5, seed=1).requires_grad_()
    for epsilon in (1e-2, 1.0):
        assert torch.autograd.gradgradcheck(lambda t, e=epsilon: operator(t, epsilon=e), x, atol=1e-4, rtol=1e-4)


@every_operator
def test_gradients_at_ties_and_at_small_epsilon(operator: Callable[..., Tensor]) -> None:
    tied = torch.tensor([0.3, -1.0, 0.3, 2.0, 0.3, 0.5], dtype=F64)
    for x, epsilon in ((tied, 0.1), (tied, 1e-3), (normal(40, seed=2), 1e-3), (normal(12, seed=3), 1e-4)):
        leaf, weights = x.clone().requires_grad_(), normal(x.numel(), seed=4)
        (actual,) = torch.autograd.grad((operator(leaf, epsilon=epsilon) * weights).sum(), leaf)

        def value(t: np.ndarray, weights: Tensor = weights, epsilon: float = epsilon) -> float:
            return float((operator(torch.tensor(t), epsilon=epsilon) * weights).sum())

        expected_gradient = central_gradients(value, x.numpy(), 1e-7)
        np.testing.assert_allclose(
            actual, expected_gradient, rtol=1e-4, atol=1e-5 * max(1.0, float(np.abs(expected_gradient).max()))
        )


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.integers(-20, 20), min_size=1, max_size=12),
    st.sampled_from([torch.float32, F64]),
    st.sampled_from([1e-5, 1e-6, 1e-7]),
    st.data(),
)
def test_the_limit_is_the_operator_itself(
    entries: list[int], dtype: torch.dtype, epsilon: float, data: st.DataObject
) -> None:
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
    u = (x - x.min()) / (x.max() - x.min())
    theta = brentq(lambda t: expit((2 * u - t) / epsilon).sum() - k, -100 * epsilon - 1, 3 + 100 * epsilon, xtol=1e-16)
    actual = soft_top_k(torch.tensor(x), k, epsilon=epsilon)
    np.testing.assert_allclose(actual, expit((2 * u - theta) / epsilon), atol=1e-9 + 1e-15 / epsilon)
    assert float(actual.sum()) == pytest.approx(k, rel=1e-12)


def test_hard_rows_are_solved_and_keep_their_order() -> None:
    x, far = normal(3, 60, seed=6), normal(3, 60, seed=6)
    far[:, 0] = 1e9
    for hard in (x.round() + 1e-7 * x, x / normal(3, 60, seed=7).abs(), far, torch.arange(60, dtype=F64)):
        for epsilon in (1e-7, 1e-5, 1e-3, 1.0):
            actual = soft_rank(hard, epsilon=epsilon)
            torch.testing.assert_close(actual.sum(-1), torch.full_like(actual.sum(-1), 60 * 61 / 2))
            assert (actual.gather(-1, hard.argsort(-1)).diff(dim=-1) >= -1e-6).all()


def test_descending() -> None:
    x = normal(3, 6, seed=12)
    torch.testing.assert_close(soft_sort(x, descending=True), -soft_sort(-x))
    torch.testing.assert_close(soft_rank(x, descending=True), soft_rank(-x))


@every_operator
def test_batches_equal_a_loop_whatever_the_layout(operator: Callable[..., Tensor]) -> None:
    x = normal(6, 3, 4, seed=8).permute(1, 2, 0)
    assert not x.is_contiguous()
    leaf = x.clone().requires_grad_()
    value = operator(x)
    looped = torch.stack([torch.stack([operator(row) for row in block]) for block in leaf])
    torch.testing.assert_close(value, looped)
    weights = normal(3, 4, 6, seed=9)
    again = x.clone().requires_grad_()
    (by_batch,) = torch.autograd.grad((operator(again) * weights).sum(), again)
    (by_loop,) = torch.autograd.grad((looped * weights).sum(), leaf)
    torch.testing.assert_close(by_batch, by_loop)
    for shape in ((0, 5), (2, 0, 3), (0, 1)):
        empty = torch.zeros(shape, requires_grad=True)
        actual = operator(empty)
        assert actual.shape == shape
        assert torch.autograd.grad(actual.sum(), empty)[0].shape == shape


def test_rows_of_equal_entries_and_none_or_all_of_a_row() -> None:
    x = torch.full((2, 5), 7.0, requires_grad=True)
    assert torch.equal(soft_sort(x), x)
    (expected_gradient,) = torch.autograd.grad(soft_sort(x)[0, 1], x)
    torch.testing.assert_close(expected_gradient, torch.tensor([[0.2] * 5, [0.0] * 5]))
    torch.testing.assert_close(soft_rank(x), torch.full((2, 5), 3.0))
    torch.testing.assert_close(soft_top_k(x, 2), torch.full((2, 5), 0.4))
    for value in (soft_rank(x), soft_top_k(x, 2)):
        assert torch.equal(torch.autograd.grad(value[0, 1], x)[0], torch.zeros(2, 5))
    for k, share in ((0, 0.0), (5, 1.0)):
        assert torch.equal(soft_top_k(normal(2, 5), k), torch.full((2, 5), share, dtype=F64))
    single = torch.tensor([3.0], requires_grad=True)
    assert (soft_sort(single).item(), soft_rank(single).item(), soft_top_k(single, 1).item()) == (3.0, 1.0, 1.0)
    assert torch.autograd.grad(soft_sort(single).sum(), single)[0].item() == 1.0


ramp = torch.arange(4.0)


test_bad_input = raising(
    (lambda: soft_rank(ramp[0]), ValueError, r"x has shape \(\), expected \(..., n\)"),
    (lambda: soft_sort(torch.zeros(5000)), ValueError, "5000 entries in a row, expected at most 4096: soft_sort"),
    (lambda: soft_sort(ramp, epsilon=1e-8), ValueError, "epsilon is 1e-08, expected at least 1e-07"),
    (lambda: soft_top_k(ramp, 5), ValueError, "k is 5, expected 0 to 4"),
    (lambda: soft_top_k(ramp, 2.0), TypeError, "k is a float, expected a whole number"),  # type: ignore[arg-type]
    (
        lambda: soft_sort(torch.tensor([-1.7e308, 1.7e308], dtype=F64)),
        ValueError,
        "the range of a row of x is beyond float64",
    ),
)
