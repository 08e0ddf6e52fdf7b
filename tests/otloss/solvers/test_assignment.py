"""Uniform weights on equally many bins, against scipy's assignment: values, potentials, what goes to the simplex."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from otloss import emd
from otloss._kernels import problems
from otloss.solvers.exact import solve_exact

SHIFTS = {"points": 0.0, "shifted": 0.3, "clouds apart": 5.0}


def costs(kind: str, n: int, seed: int = 0) -> Tensor:
    rng = np.random.default_rng(seed)
    if kind == "random":
        return torch.from_numpy(rng.random((n, n)))
    if kind == "tied":
        return torch.from_numpy(np.floor(3 * rng.random((n, n))))
    if kind in SHIFTS:
        x, y = rng.normal(size=(2, n, 2))
        return torch.from_numpy(((x[:, None] - y - SHIFTS[kind]) ** 2).sum(-1))
    if kind == "nearly equal":
        return torch.from_numpy(1 + 1e-13 * rng.random((n, n)))
    rows = torch.arange(1.0, n + 1, dtype=torch.float64)
    return rows.unsqueeze(-1) * rows  # "products": all rows agree on the order of the columns


KINDS = ["random", "tied", "points", "clouds apart", "nearly equal", "products"]


def uniform(*shape: int) -> Tensor:
    return torch.full(shape, 1 / shape[-1], dtype=torch.float64)


def by_scipy(matrix: Tensor) -> float:
    rows, columns = linear_sum_assignment(matrix.numpy())
    return float(matrix[torch.from_numpy(rows), torch.from_numpy(columns)].mean())


def check(matrix: Tensor) -> None:
    n = len(matrix)
    found, scale = solve_exact(uniform(n), uniform(n), matrix), float(matrix.max())
    assert float(found.value) == pytest.approx(by_scipy(matrix), rel=1e-12)
    assert abs(float(found.gap)) <= 1e-14 * scale
    assert (matrix - found.f.unsqueeze(-1) - found.g).min() >= -1e-14 * scale
    used = found.plan() * n
    assert set(used.flatten().round(decimals=12).tolist()) <= {0.0, 1.0}
    assert (used.sum(0) - 1).abs().max() < 1e-12 > (used.sum(1) - 1).abs().max()


@pytest.mark.parametrize("kind", KINDS)
def test_assignments_are_optimal(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(problems, "_run_simplex", lambda *_, **__: pytest.fail("given to the simplex"))
    for n in (1, 2, 3, 17, 120):
        check(costs(kind, n, seed=n))
        assert emd(*uniform(2, n).float(), costs(kind, n, n).float()).item() == pytest.approx(
            by_scipy(costs(kind, n, n).float()), rel=1e-5
        )


def test_hard_problems_are_left_to_the_simplex(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before the first path where many rows are left for paths, and on the way where these visit too many columns."""
    run, given = problems._run_simplex, []
    monkeypatch.setattr(
        problems, "_run_simplex", lambda s, p, *more, **o: (given.append(len(p)), run(s, p, *more, **o))
    )
    for n, kinds, expected in ((300, ("random", "products", "points", "clouds apart"), [2]), (800, ("shifted",), [1])):
        given.clear()
        matrices = torch.stack([costs(kind, n) for kind in kinds])
        found = solve_exact(uniform(len(kinds), n), uniform(len(kinds), n), matrices)
        assert given == expected
        for value, gap, matrix in zip(found.value, found.gap, matrices, strict=True):
            assert float(value) == pytest.approx(by_scipy(matrix), rel=1e-12)
            assert abs(float(gap)) <= 1e-12 * float(matrix.max())


def test_gradients_are_subgradients() -> None:
    """The value is convex in the weights: it lies above each of its tangents, on either side of the kink."""
    rng = np.random.default_rng(0)
    matrix = costs("points", 12).requires_grad_()
    p, q = (uniform(12).requires_grad_() for _ in range(2))
    value = emd(p, q, matrix)
    by_p, by_q, by_cost = torch.autograd.grad(value, (p, q, matrix))
    torch.testing.assert_close(by_cost, solve_exact(p.detach(), q.detach(), matrix.detach()).plan())
    for _ in range(20):
        off_p, off_q = (torch.from_numpy(w - w.mean()) for w in 0.05 * rng.random((2, 12)))
        moved = emd(p.detach() + off_p, q.detach() + off_q, matrix.detach())
        assert moved >= value.detach() + off_p @ by_p + off_q @ by_q - 1e-12


def test_batches_and_starts() -> None:
    matrices = torch.stack([costs(kind, 30, seed=3) for kind in KINDS])
    weights = uniform(2, len(KINDS), 30)
    found = solve_exact(weights[0], weights[1], matrices)
    shared = solve_exact(weights[0], weights[1], matrices[2])
    again = solve_exact(weights[0], weights[1], matrices, start=(found.f, found.g + 7.0))
    torch.testing.assert_close(again.value, found.value, rtol=1e-12, atol=0)
    for kind in ("random", "points", "clouds apart"):
        assert again.iterations[KINDS.index(kind)] < found.iterations[KINDS.index(kind)]
    for k, matrix in enumerate(matrices):
        assert float(found.value[k]) == pytest.approx(by_scipy(matrix), rel=1e-12)
        assert float(shared.value[k]) == pytest.approx(by_scipy(matrices[2]), rel=1e-12)


def test_costs_beyond_float64_raise() -> None:
    with pytest.raises(RuntimeError, match=r"left a duality gap of|stopped early"):
        emd(uniform(4), uniform(4), torch.full((4, 4), 1.7e308, dtype=torch.float64))
