"""Kernels of the line, the check of pairs of histograms, and the logarithm of kernels."""

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numba import njit

from otloss import wasserstein_1d
from otloss._kernels import histograms, line_gradients
from otloss._kernels._compile import log64
from otloss.solvers.problem import histogram_pair
from tests.errors import raising
from tests.otloss.linear_programs import sparse_weights


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


def test_invalid_numbers_are_found() -> None:
    for bad in (torch.nan, torch.inf, -torch.inf):
        for dtype in (torch.float32, torch.float64):
            good, wrong = torch.zeros(2, 2, dtype=dtype), torch.tensor([[0.0, 1.0], [bad, 2.0]], dtype=dtype)
            assert line_gradients._orders([good, wrong]) is None
            assert line_gradients._orders([good, wrong[1:]]) is None
            assert line_gradients._orders([wrong]) is None
    for drawn, balanced in [([1.0, 2.0], True), ([-1.0, 4.0], False), ([torch.nan, 3.0], False), ([1.0, 2.1], False)]:
        scales = balance(np.array([1.0, 2.0]), np.array(drawn), 1e-9)
        assert scales == (1.0, 1.0, 3.0) if balanced else np.isnan(scales).all()


def test_threads_change_nothing() -> None:
    rng = np.random.default_rng(0)
    p, q = (torch.tensor(np.stack([sparse_weights(rng, n) for _ in range(40)])) for n in (300, 200))
    x, y = (torch.tensor(rng.normal(size=(40, n))) for n in (300, 200))
    threads, actual = torch.get_num_threads(), []
    try:
        for count in (1, 2):
            torch.set_num_threads(count)
            actual.append(wasserstein_1d(p, q, x, y, order=2))
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(*actual)


def invalid(dtype: torch.dtype, row: list[float]) -> None:
    histogram_pair(*torch.tensor([[[0.25] * 4] * 2, [[0.25] * 4, row]], dtype=dtype))


test_invalid_histograms = raising(
    (torch.float32, [0.25, 0.25, 0.25, 0.251], r"different masses of row 1: 1 and 1.00\d+"),
    (torch.float32, [0.25, 0.25, -0.25, 0.75], r"q holds -0.25 in bin 2 of row 1, expected weights >= 0"),
    (torch.float64, [0.25, 0.25, torch.nan, 0.25], r"q holds 1 NaN or infinite values, the first at index \(1, 2\)"),
    (torch.float64, [1e308] * 4, "q has a mass beyond float64"),
    call=invalid,
)


def test_histograms_are_balanced_to_their_mean_and_without_mass_stay_so() -> None:
    p, q = torch.rand(2, 5, 70, generator=torch.Generator().manual_seed(0))
    q = q * (p.sum(-1) / q.sum(-1)).unsqueeze(-1) * (1 + 1e-6)
    pair = histogram_pair(p, q.requires_grad_())
    mean = (p.double().sum(-1) + q.double().sum(-1)) / 2
    for actual in (pair.p.double().sum(-1), pair.q.double().sum(-1), pair.mass.double()):
        torch.testing.assert_close(actual, mean, rtol=1e-7, atol=0)
    (gradient,) = torch.autograd.grad((pair.q * torch.arange(70)).sum(), q)
    torch.testing.assert_close(gradient, (torch.arange(70) - 34.5).expand(5, 70), rtol=1e-5, atol=0)
    empty = histogram_pair(torch.zeros(2, 3), torch.zeros(2, 4))
    assert not any(t.any() for t in (empty.p, empty.q, empty.mass))
    assert histogram_pair(torch.zeros(0, 3), torch.zeros(0, 4)).mass.shape == (0,)


def test_the_logarithm() -> None:
    numbers = np.exp(np.random.default_rng(0).uniform(-700, 700, 20_000))
    numbers = np.concatenate([numbers, [1.0, np.nextafter(1, 2), np.nextafter(1, 0), 2.0, 0.5, np.sqrt(0.5), 2.3e-308]])

    @njit
    def logs(x, out):  # type: ignore[no-untyped-def]
        for k in range(x.shape[0]):
            out[k] = log64(x[k])

    actual = np.empty_like(numbers)
    logs(numbers, actual)
    expected = np.log(numbers)
    assert (np.abs(actual - expected) <= 1e-15 * np.maximum(1, np.abs(expected))).all()
    assert actual[-7] == 0.0
