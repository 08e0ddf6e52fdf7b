"""Costs between cells of a grid against loops over pairs, and against the same cells as points."""

from __future__ import annotations

import itertools
import math
import pickle
import sys
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from otloss.costs import Cost, GridCost, LineCost, PointCost, costs_within

SHAPES = [(5,), (3, 4), (1, 6), (2, 3, 4), (1,)]


def loop(cells: tuple[int, ...], power: float, spacing: tuple[float, ...]) -> Tensor:
    where = list(itertools.product(*map(range, cells)))
    rows = [
        [sum((s * abs(i - j)) ** power for s, i, j in zip(spacing, a, b, strict=True)) for b in where] for a in where
    ]
    return torch.tensor(rows, dtype=torch.float64)


@pytest.mark.parametrize(("cells", "power"), [((5,), 1), ((3, 4), 0.5), ((1, 6), 2), ((2, 3, 4), 1.7), ((1,), 2)])
def test_every_question_agrees_with_loops(cells: tuple[int, ...], power: float) -> None:
    spacing = (0.1, 2.0, 0.7)[: len(cells)]
    cost = GridCost(cells, power=power, spacing=spacing).to(torch.float64)
    matrix = loop(cells, power, spacing)
    n = len(matrix)
    torch.testing.assert_close(cost.dense(), matrix)
    assert cost.shape == (n, n)
    assert (cost.T, costs_within(cost)) == (cost, (cost, cost))
    index = torch.tensor([n - 1, 0, 0])
    torch.testing.assert_close(cost.rows(index), matrix[index])
    assert cost.rows(index[:0]).shape == (0, n)
    assert cost.diagonal().tolist() == [0.0] * n
    assert cost.largest() == matrix.max()
    v = torch.randn(2, 3, n, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    torch.testing.assert_close(cost.apply(v), v @ matrix)
    for epsilon in (1e-6, 0.1, 10.0):
        expected = -epsilon * torch.logsumexp((v.unsqueeze(-2) - matrix) / epsilon, -1)
        torch.testing.assert_close(cost.softmin(v, epsilon), expected)
    torch.testing.assert_close(cost.softmin(v, 0.0), (matrix - v.unsqueeze(-2)).amin(-1))
    each = torch.tensor([[0.2, 1.0, 0.0]], dtype=torch.float64)
    torch.testing.assert_close(cost.softmin(v, each)[1, 1], cost.softmin(v[1, 1], 1.0))
    torch.testing.assert_close(cost.softmin(v, each)[0, 2], cost.softmin(v[0, 2], 0.0))


@settings(max_examples=20, deadline=None)
@given(st.sampled_from(SHAPES), st.sampled_from([1.0, 2.0]), st.integers(0, 100))
def test_the_same_cells_as_points(cells: tuple[int, ...], power: float, seed: int) -> None:
    where = torch.cartesian_prod(*(torch.arange(float(size)) for size in cells)).reshape(-1, len(cells)).double()
    points = PointCost(where, metric="l1" if power == 1 else "sqeuclidean")
    grid = GridCost(cells, power=power).to(torch.float64)
    v = torch.randn(len(where), generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    v[::3] = -torch.inf
    torch.testing.assert_close(grid.softmin(v, 0.4), points.softmin(v, 0.4))
    v = v.nan_to_num(neginf=0.0)
    torch.testing.assert_close(grid.apply(v), points.apply(v))
    if len(cells) == 1:
        torch.testing.assert_close(grid.dense(), LineCost(where[:, 0], power=power).dense())


@pytest.mark.parametrize("entries", [2**22, 20])
def test_gradients(entries: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules[Cost.__module__], "_BLOCK_ENTRIES", entries)
    cost = GridCost((3, 4), spacing=0.5).to(torch.float64)
    v = torch.randn(2, 12, generator=torch.Generator().manual_seed(0), dtype=torch.float64, requires_grad=True)
    epsilon = torch.tensor([0.1, 2.0], dtype=torch.float64)
    assert torch.autograd.gradcheck(lambda v: cost.softmin(v, epsilon), v)
    assert torch.autograd.gradcheck(cost.apply, v)
    torch.testing.assert_close(cost.softmin(v, epsilon).detach(), cost.softmin(v.detach(), epsilon))


def test_images_are_quick_and_never_dense(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(GridCost, "rows", lambda *_: pytest.fail("formed rows"))
    cost = GridCost((256, 256), spacing=1 / 256)
    v = torch.rand(65536)
    assert cost.softmin(v, 1e-3).shape == cost.apply(v).shape == (65536,)
    # Between cells far apart in units of epsilon the soft minimum is the hard one.
    assert (cost.softmin(v, 1e-9) - cost.softmin(v, 0.0)).abs().max() < 1e-6
    assert (cost.softmin(torch.zeros(65536), 0.0) == 0).all()


def test_degenerate_potentials_and_dtypes() -> None:
    cost = GridCost((2, 3))
    nothing = torch.full((6,), -torch.inf)
    for grad in (False, True):
        assert (cost.softmin(nothing.clone().requires_grad_(grad), 0.1) == torch.inf).all()
    one = nothing.clone()
    one[4] = 1.0
    torch.testing.assert_close(cost.softmin(one, 0.1), cost.dense()[4] - 1)
    assert cost.softmin(torch.zeros(0, 6), 0.1).shape == (0, 6)
    assert cost.softmin(torch.zeros(6, dtype=torch.float64), 0.1).dtype == torch.float64
    assert cost.apply(torch.zeros(6, dtype=torch.bfloat16)).dtype == torch.float32
    wide = GridCost((2, 3), spacing=0.1).to(torch.float64)
    assert wide.rows(torch.tensor([0]))[0, 1].item() == pytest.approx(0.01, rel=1e-15)  # 0.1 with all its digits
    again = pickle.loads(pickle.dumps(wide))
    assert repr(again) == repr(wide)
    assert repr(cost).endswith("cells=(2, 3), power=2, spacing=(1.0, 1.0))")
    assert cost.shape == (math.prod(cost.cells),) * 2


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: GridCost(64), TypeError, "shape of the grid is 64, expected whole numbers"),
        (lambda: GridCost(()), ValueError, r"grid has shape \(\) and 0 spacings, expected at least one axis"),
        (lambda: GridCost((3, 0)), ValueError, r"\(3, 0\).*least one cell"),
        (lambda: GridCost((3, 2), power=0), ValueError, "power is 0"),
        (lambda: GridCost((3, 2), spacing=-1.0), ValueError, "spacing is -1.0"),
        (
            lambda: GridCost((3, 2), spacing=(1.0, 1.0, 1.0)),
            ValueError,
            "3 spacings, expected .* one spacing or one per axis",
        ),
    ],
)
def test_bad_input(call: Callable[[], object], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call()
