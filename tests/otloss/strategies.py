"""Hypothesis strategies for transport problems, degenerate ones included."""

import numpy as np
from hypothesis import strategies as st

# Multiples of 1/8 make ties, between weights and between cumulative sums, the rule and not the exception.
_tied_weight = st.integers(0, 4).map(lambda eighths: eighths / 8)
_free_weight = st.one_of(st.just(0.0), st.floats(1e-3, 1.0))
_tied_cost = st.integers(0, 6).map(float)
_free_cost = st.floats(0.0, 10.0)


@st.composite
def weights(draw: st.DrawFn, size: int) -> np.ndarray:
    """Weights of mass 1: general, tied, with zeros, or a Dirac."""
    if draw(st.integers(0, 4)) == 0:
        return np.eye(size)[draw(st.integers(0, size - 1))]
    entry = draw(st.sampled_from([_tied_weight, _free_weight]))
    raw = np.array(draw(st.lists(entry, min_size=size, max_size=size)))
    return raw / raw.sum() if raw.sum() > 0 else np.eye(size)[0]


@st.composite
def positions(draw: st.DrawFn, size: int) -> np.ndarray:
    """Positions in any order, often repeated."""
    entry = draw(st.sampled_from([st.integers(-3, 3).map(float), st.floats(-5, 5)]))
    return np.array(draw(st.lists(entry, min_size=size, max_size=size)))


@st.composite
def problems(draw: st.DrawFn, max_size: int = 6) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(p, q, matrix) with n and m apart or equal, and tied or general costs."""
    n, m = draw(st.integers(1, max_size)), draw(st.integers(1, max_size))
    entry = draw(st.sampled_from([_tied_cost, _free_cost]))
    flat = draw(st.lists(entry, min_size=n * m, max_size=n * m))
    return draw(weights(n)), draw(weights(m)), np.array(flat).reshape(n, m)


@st.composite
def line_problems(draw: st.DrawFn, max_size: int = 6) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(p, q, x) on shared bins."""
    n = draw(st.integers(1, max_size))
    return draw(weights(n)), draw(weights(n)), draw(positions(n))


@st.composite
def square_problems(draw: st.DrawFn, max_size: int = 6) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(p, q, points) with points (n, d) for metric, squared and cosine costs; some points repeat or are zero."""
    n, d = draw(st.integers(1, max_size)), draw(st.integers(1, 3))
    entry = draw(st.sampled_from([st.integers(-2, 2).map(float), st.floats(-3, 3)]))
    flat = draw(st.lists(entry, min_size=n * d, max_size=n * d))
    return draw(weights(n)), draw(weights(n)), np.array(flat).reshape(n, d)
