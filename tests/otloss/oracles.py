"""Slow, independent answers: linear programming, and one-sided finite differences of it."""

from collections.abc import Callable

import numpy as np
import torch
from scipy.optimize import linprog
from torch import Tensor

from otloss.costs import Cost


def linprog_value(p: np.ndarray, q: np.ndarray, matrix: np.ndarray) -> float:
    """The optimum of the transport problem by scipy's HiGHS, exact to about 1e-7."""
    n, m = matrix.shape
    marginals = np.zeros((n + m, n * m))
    for i in range(n):
        marginals[i, i * m : (i + 1) * m] = 1
    for j in range(m):
        marginals[n + j, j::m] = 1
    # One marginal follows from the others; leaving it out lets masses differ by rounding.
    result = linprog(
        matrix.ravel(), A_eq=marginals[:-1], b_eq=np.concatenate([p, q])[:-1], bounds=(0, None), method="highs"
    )
    assert result.status == 0, result.message
    return float(result.fun)


def central_gradients(value: Callable[[np.ndarray], float], point: np.ndarray, step: float) -> np.ndarray:
    """Return the central finite differences of `value` at `point`, entry by entry."""
    gradients = np.zeros(point.shape)
    for index in np.ndindex(*point.shape):
        ahead, behind = point.copy(), point.copy()
        ahead[index] += step
        behind[index] -= step
        gradients[index] = (value(ahead) - value(behind)) / (2 * step)
    return gradients


def cosine_matrix(embedding: Tensor) -> Tensor:
    """1 - cos by float64 loops over pairs; zero rows cost 1 to others, 0 to themselves."""
    rows = embedding.double()
    size = rows.shape[0]
    matrix = torch.zeros(size, size, dtype=torch.float64)
    for i in range(size):
        for j in range(size):
            if i != j:
                lengths = float(rows[i].norm()) * float(rows[j].norm())
                matrix[i, j] = 1.0 if lengths == 0 else 1.0 - float(rows[i] @ rows[j]) / lengths
    return matrix


def as_double(array: np.ndarray, *, grad: bool = False) -> Tensor:
    """A float64 tensor, optionally a leaf with a gradient."""
    return torch.tensor(array, dtype=torch.float64, requires_grad=grad)


def check_questions(cost: Cost, dense: Tensor) -> None:
    """All that a cost answers is that of its matrix."""
    n, m = dense.shape
    assert cost.shape == (n, m)
    torch.testing.assert_close(cost.dense(), dense)
    index = torch.tensor([n - 1, 0, 0])
    torch.testing.assert_close(cost.rows(index), dense[index])
    assert cost.rows(index[:0]).shape == (0, m)
    assert cost.largest() >= dense.max() - 1e-9
    v = torch.randn(2, 3, m, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    torch.testing.assert_close(cost.apply(v), v @ dense.T)
    torch.testing.assert_close(cost.T.dense(), dense.T)
    torch.testing.assert_close(cost.T.apply(v[..., :1].expand(2, 3, n)), v[..., :1].expand(2, 3, n) @ dense)
    for epsilon in (10.0, 0.1, 1e-4):
        expected = -epsilon * torch.logsumexp((v.unsqueeze(-2) - dense) / epsilon, -1)
        torch.testing.assert_close(cost.softmin(v, epsilon), expected)
    if n == m:
        torch.testing.assert_close(cost.diagonal(), dense.diagonal())
