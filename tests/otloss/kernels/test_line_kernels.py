"""Kernels of the closed forms on the line against their reference implementation; more in solvers/test_line.py."""

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numba import njit

from otloss import wasserstein_1d
from otloss._kernels import histograms, line_gradients
from otloss.solvers import line
from tests.otloss.linear_programs import sparse_weights

Leaves = list[torch.Tensor]


def general(batch: int, n: int, m: int, dtype: torch.dtype = torch.float64) -> Leaves:
    """Leaves p, q, x, y with general weights, a third of them zero, and general positions."""
    rng = np.random.default_rng(batch + n + m)
    made = [np.stack([sparse_weights(rng, size) for _ in range(batch)]) for size in (n, m)]
    made += [rng.normal(size=(batch, n)), rng.normal(size=(batch, m)) + 0.3]
    return [torch.tensor(a, dtype=dtype, requires_grad=True) for a in made]


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
    for drawn in ([np.inf], [1.0]):
        assert np.isnan(balance(np.array(drawn), np.array([np.inf]), 1e-9)).all()


def test_far_from_the_origin_and_with_wide_weights_float32_is_as_good_as_its_inputs() -> None:
    p, q, x, y = (t.detach().float() for t in general(40, 300, 200))
    for shift in (0.0, 1e6):
        here = [p, q, x + shift, y + shift]
        exact = line._wasserstein_1d(
            *(t.double() / (t.double().sum(-1, keepdim=True) if t is p or t is q else 1) for t in here), 2
        )
        actual = wasserstein_1d(*here, order=2)
        torch.testing.assert_close(actual, exact.float(), rtol=1e-6, atol=1e-7)
        threads = torch.get_num_threads()
        try:
            for count in (1, 2):
                torch.set_num_threads(count)
                assert torch.equal(wasserstein_1d(*here, order=2), actual)
        finally:
            torch.set_num_threads(threads)
