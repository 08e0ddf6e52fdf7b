"""Slow, independent answers: linear programming, one-sided finite differences of it, and what needs no oracle."""

from collections.abc import Callable
from typing import Any

import mpmath
import numpy as np
import torch
from scipy.optimize import linprog
from torch import Tensor

from otloss.costs import Cost


def linprog_value(p: np.ndarray, q: np.ndarray, matrix: np.ndarray) -> float:
    """The optimum of the transport problem by scipy's HiGHS, exact to about 1e-7; infinite where no plan is allowed."""
    n, m = matrix.shape
    allowed = np.isfinite(matrix).ravel()
    marginals = np.vstack([np.kron(np.eye(n), np.ones(m)), np.kron(np.ones(n), np.eye(m))])[:, allowed]
    # One marginal follows from the others; leaving it out lets masses differ by rounding.
    result = linprog(matrix.ravel()[allowed], A_eq=marginals[:-1], b_eq=np.concatenate([p, q])[:-1], method="highs")
    assert result.status in (0, 2), result.message
    return float(result.fun) if result.status == 0 else np.inf


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
    """1 - cos in float64, from products over lengths; zero rows cost 1 to others, every row 0 to itself."""
    rows = embedding.double()
    lengths = rows.norm(dim=1, keepdim=True) * rows.norm(dim=1)
    return (1 - rows @ rows.T / lengths.where(lengths > 0, 1.0)).fill_diagonal_(0.0)


def as_double(array: np.ndarray, *, grad: bool = False) -> Tensor:
    """A float64 tensor, optionally a leaf with a gradient."""
    return torch.tensor(array, dtype=torch.float64, requires_grad=grad)


def check_questions(cost: Cost, dense: Tensor) -> None:
    """All that a cost returns equals the same number from its matrix."""
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
        torch.testing.assert_close(cost.softmin_at(v.new_full((2, 3), epsilon))(v), expected)
    if n == m:
        torch.testing.assert_close(cost.diagonal(), dense.diagonal())


def check_subgradients(
    value: Callable[[Tensor, Tensor], Tensor], p: np.ndarray, q: np.ndarray, slack: float = 1e-9
) -> None:
    """f.(p' - p) <= value(p') - value(p) for every vertex p', degenerate optima included; the same for q."""
    P, Q = as_double(p, grad=True), as_double(q, grad=True)
    here = value(P, Q)
    by_p, by_q = torch.autograd.grad(here, [P, Q])
    for there in torch.eye(p.size, dtype=torch.float64):
        assert by_p @ (there - P) <= value(there, Q) - here + slack
    for there in torch.eye(q.size, dtype=torch.float64):
        assert by_q @ (there - Q) <= value(P, there) - here + slack


def sparse_weights(rng: np.random.Generator, n: int) -> np.ndarray:
    """General weights of mass 1, a third of them zero."""
    p = rng.dirichlet(np.ones(n))
    p[rng.permutation(n)[: n // 3]] = 0
    weights: np.ndarray = p / p.sum()
    return weights


def precise_potentials(
    p: list[float], q: list[float], cost: list[list[float]], epsilon: float,
    rho: float | tuple[float, float] | None, g: list[float],
) -> tuple[list[Any], list[Any], Any]:  # fmt: skip
    """Return f, g and the optimum of an entropic problem with weights above 0, in 50 digits; ValueError if singular.

    Newton's method on the dual as a function of g, from a g near the optimum. `rho` is the marginal penalty, or one for
    each side, infinite for a side that is kept.
    """
    with mpmath.workdps(50):
        a, b, C = mpmath.matrix(p), mpmath.matrix(q), mpmath.matrix(cost)
        n, m, mass = len(p), len(q), mpmath.fsum(p) if rho is None else mpmath.mpf(1)
        rho_p, rho_q = map(mpmath.mpf, rho if isinstance(rho, tuple) else (rho or mpmath.inf, rho or mpmath.inf))
        damping = 1 / (1 + epsilon / rho_p)
        if rho is None:
            b = b * (mpmath.fsum(a) / mpmath.fsum(b))
        x = mpmath.matrix(g)
        for _ in range(200):
            scores = [[(x[j] - C[i, j]) / epsilon for j in range(m)] for i in range(n)]
            tops = [max(row) for row in scores]
            sums = [mpmath.fsum(b[j] * mpmath.exp(scores[i][j] - tops[i]) for j in range(m)) for i in range(n)]
            f = [-damping * epsilon * (tops[i] + mpmath.log(sums[i] / mass)) for i in range(n)]
            rows = [a[i] * mpmath.exp(-f[i] / rho_p) for i in range(n)]
            share = [[b[j] * mpmath.exp(scores[i][j] - tops[i]) / sums[i] for j in range(m)] for i in range(n)]
            target = [b[j] * mpmath.exp(-x[j] / rho_q) for j in range(m)]
            columns = [mpmath.fsum(rows[i] * share[i][j] for i in range(n)) for j in range(m)]
            system = mpmath.matrix(m, m)
            for j in range(m):
                for k in range(m):
                    system[j, k] = -damping * mpmath.fsum(rows[i] * share[i][j] * share[i][k] for i in range(n))
                    system[j, k] += target[j] * target[k] / mpmath.fsum(target) if rho is None else 0
                system[j, j] += columns[j] + target[j] * epsilon / rho_q
            try:
                step = mpmath.lu_solve(system, mpmath.matrix([t - c for t, c in zip(target, columns, strict=True)]))
            except ZeroDivisionError as error:
                raise ValueError("no digit is left") from error
            size = max(abs(s) for s in step)
            x += epsilon * step * (1 if size < 0.5 else mpmath.log1p(size) / size)
            if size < mpmath.mpf(10) ** -30:
                break
        if rho is None:
            value = mpmath.fdot(a, f) + mpmath.fdot(b, x)
        else:
            sides = ((a, rows, f, rho_p), (b, target, x, rho_q))
            gains = [
                w * t if r == mpmath.inf else r * (w - kept)
                for weights, masses, potential, r in sides
                for w, kept, t in zip(weights, masses, potential, strict=True)
            ]  # fmt: skip
            value = mpmath.fsum(gains) - epsilon * (mpmath.fsum(rows) - mpmath.fsum(a) * mpmath.fsum(b))
        return f, list(x), value
