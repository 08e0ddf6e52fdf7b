"""Rigid registration against motions that are known, and a loop of plans and fits."""

import pytest
import torch
from torch import Tensor

from otloss import register
from tests.errors import raising


def shape(n: int, d: int = 3, seed: int = 0) -> Tensor:
    """A bent cloud, unlike any rotation of itself."""
    t = torch.rand(n, d, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    t[:, 0] = 3 * t[:, 0].square()
    t[:, 1] = t[:, 1] + t[:, 0].square() / 3
    return t


def motion(d: int, angle: float) -> tuple[Tensor, Tensor]:
    turn = torch.zeros(d, d, dtype=torch.float64)
    turn[0, 1], turn[1, 0] = -angle, angle
    return torch.linalg.matrix_exp(turn), torch.full((d,), 7.0, dtype=torch.float64)


@pytest.mark.parametrize(("d", "angle", "restarts"), [(2, 0.6, 0), (3, 0.6, 0), (3, 2.4, 12)])
def test_known_motions_are_found(d: int, angle: float, restarts: int) -> None:
    x, (rotation, translation) = shape(120, d), motion(d, angle)
    order = torch.randperm(120, generator=torch.Generator().manual_seed(1))
    y = (x @ rotation.mT + translation)[order]
    a = torch.rand(120, generator=torch.Generator().manual_seed(2), dtype=torch.float64) + 0.1
    actual = register(
        x, y, a / a.sum(), (a / a.sum())[order], epsilon=1e-3, restarts=restarts,
        generator=torch.Generator().manual_seed(0),
    )  # fmt: skip
    torch.testing.assert_close(actual.rotation, rotation, atol=1e-3, rtol=0)
    torch.testing.assert_close(actual.translation, translation, atol=1e-2, rtol=0)
    torch.testing.assert_close(actual.apply(x)[order], y, atol=1e-2, rtol=0)
    assert torch.linalg.det(actual.rotation) > 0.99
    assert actual.transport.plan().shape == (120, 120)


@pytest.mark.parametrize(("angle", "restarts"), [(0.3, 0), (2.0, 30)])
def test_parts_without_a_partner_drop_out(angle: float, restarts: int) -> None:
    x, (rotation, translation) = shape(200), motion(3, angle)
    y = x @ rotation.mT + translation
    along = x[:, 0].argsort()
    left, right = x[along[20:]], y[along[:-20]]  # a tenth is missing on each side, at either end
    errors = []
    for penalty in (0.02, None):
        actual = register(
            left, right, epsilon=2e-3, marginal_penalty=penalty, steps=60, restarts=restarts,
            generator=torch.Generator().manual_seed(0),
        )  # fmt: skip
        errors.append((actual.rotation - rotation).norm())
    assert errors[0] < 0.05
    assert errors[0] < 0.3 * errors[1]


test_bad_input = raising(
    ({"x": torch.zeros(2, 4, 3)}, r"x has shape \(2, 4, 3\), expected \(n, d\)"),
    ({"y": torch.zeros(4, 2)}, "x has 3 coordinates"),
    ({"steps": 0}, "steps is 0, expected a whole number of at least 1"),
    call=lambda change: register(**({"x": torch.rand(4, 3), "y": torch.rand(5, 3), "epsilon": 0.1} | change)),
)
