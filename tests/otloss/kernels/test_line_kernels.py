"""Kernels of the closed forms on the line against their reference implementation; more in solvers/test_line.py."""

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numba import njit

from otloss import wasserstein_1d
from otloss._kernels import histograms, line_gradients
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
