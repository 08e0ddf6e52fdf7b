"""The compiled ranked probability score against its slow twin in float64: values, first and second derivatives."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from otloss import ordinal_loss
from otloss.losses import _ordinal

SHAPES = [(1, 9000), (64, 130), (1000, 9), (4097, 2), (129, 65)]


def problem(rows: int, classes: int, dtype: torch.dtype, scale: float = 3.0) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(rows + classes)
    z = scale * torch.randn(rows, classes, generator=generator, dtype=torch.float64)
    y = torch.randint(classes, (rows,), generator=generator)
    y[0], y[-1] = 0, classes - 1
    x = torch.rand(classes, generator=generator, dtype=torch.float64).add(0.1).cumsum(0)
    return z.to(dtype), y, x.to(dtype)


def by_twin(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_ordinal, "_SMALL", 2**62)


def value_and_slope(z: Tensor, y: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    leaf = z.clone().requires_grad_()
    values = ordinal_loss(leaf, y, reduction="none", **options)
    upstream = torch.linspace(-1, 2, values.numel(), dtype=values.dtype)
    return values.detach(), torch.autograd.grad(values, leaf, upstream)[0]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("mix", [0.0, 0.7])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_equals_its_twin(shape: tuple[int, int], mix: float, dtype: torch.dtype, monkeypatch: Any) -> None:
    z, y, x = problem(*shape, dtype)
    found = value_and_slope(z, y, x=x, cross_entropy=mix)
    alone = ordinal_loss(z, y, x=x, cross_entropy=mix, reduction="none")  # without a gradient
    torch.testing.assert_close(alone, found[0], rtol=1e-6, atol=0)
    by_twin(monkeypatch)
    naive = value_and_slope(z, y, x=x, cross_entropy=mix)
    exact = value_and_slope(z.double(), y, x=x.double(), cross_entropy=mix)
    for quick, slow, true in zip(found, naive, exact, strict=True):
        size = float(true.abs().max())
        ulps = 30 + shape[1] / 20  # running sums of so many terms
        allowed = 2 * (slow.double() - true).abs().max() + ulps * torch.finfo(dtype).eps * size
        assert (quick.double() - true).abs().max() <= allowed


def test_nearly_right_predictions_keep_their_relative_accuracy(monkeypatch: Any) -> None:
    z, y, x = problem(1000, 9, torch.float64, scale=0.3)
    z = z + 20 * torch.nn.functional.one_hot(y, 9)
    found = value_and_slope(z.float(), y, x=x.float(), cross_entropy=0.5)
    by_twin(monkeypatch)
    expected = value_and_slope(z.float().double(), y, x=x.float().double())
    nll = torch.nn.functional.cross_entropy  # cancels, even in float64
    wide = z.float().double()
    others = (wide - wide.gather(1, y[:, None])).exp().scatter(1, y[:, None], 0.0).sum(1)
    torch.testing.assert_close(found[0].double(), expected[0] + 0.5 * others.log1p(), rtol=1e-5, atol=0)
    upstream = torch.linspace(-1, 2, 1000, dtype=torch.float64)
    leaf = wide.clone().requires_grad_()
    (slope,) = torch.autograd.grad(nll(leaf, y, reduction="none"), leaf, upstream)
    torch.testing.assert_close(found[1].double(), expected[1] + 0.5 * slope, rtol=3e-5, atol=1e-14)


def test_second_derivatives_are_those_of_the_twin(monkeypatch: Any) -> None:
    z, y, x = problem(1000, 9, torch.float64)
    direction = torch.randn(z.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))

    def product() -> tuple[Tensor, Tensor]:
        leaf = z.clone().requires_grad_()
        value = ordinal_loss(leaf, y, x=x, cross_entropy=0.3)
        (slope,) = torch.autograd.grad(value, leaf, create_graph=True)
        return slope.detach(), torch.autograd.grad((slope * direction).sum(), leaf)[0]

    quick = product()
    by_twin(monkeypatch)
    torch.testing.assert_close(quick, product())


def test_layouts_threads_repeated_passes_and_frozen_logits() -> None:
    z, y, x = problem(1000, 9, torch.float32)
    expected = value_and_slope(z, y, x=x)
    strided = value_and_slope(z.T.contiguous().T, y.int(), x=x)
    torch.testing.assert_close(strided, expected)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        assert all(torch.equal(a, b) for a, b in zip(value_and_slope(z, y, x=x), expected, strict=True))
    finally:
        torch.set_num_threads(before)
    leaf = z.clone().requires_grad_()
    value = ordinal_loss(leaf, y, x=x)
    first, again = (torch.autograd.grad(value, leaf, retain_graph=True)[0] for _ in range(2))
    assert torch.equal(first, again)
    assert not ordinal_loss(z, y, x=x).requires_grad
    with torch.no_grad():
        assert not ordinal_loss(leaf, y, x=x).requires_grad


def test_learned_class_values_get_their_gradient() -> None:
    z, y, x = problem(1000, 9, torch.float64)
    leaf = x.clone().requires_grad_()
    (slope,) = torch.autograd.grad(ordinal_loss(z, y, x=leaf), leaf)
    steps = torch.eye(9, dtype=torch.float64) * 1e-6
    expected = torch.stack([(ordinal_loss(z, y, x=x + s) - ordinal_loss(z, y, x=x - s)) / 2e-6 for s in steps])
    torch.testing.assert_close(slope, expected, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize(
    ("spoil", "options", "message"),
    [
        (torch.nan, {}, "logits holds 1 NaN"),
        (torch.inf, {}, r"logits holds 1 NaN or \+inf"),
        (-torch.inf, {"cross_entropy": 1.0}, "cross-entropy of row 0"),
    ],
)
def test_bad_logits_are_found(spoil: float, options: dict[str, float], message: str) -> None:
    z, y, _ = problem(1000, 9, torch.float32)
    z[0, 0] = spoil
    with pytest.raises(ValueError, match=message):
        ordinal_loss(z, y, **options)  # type: ignore[arg-type]
    z[5] = -torch.inf
    z[0, 0] = 0
    with pytest.raises(ValueError, match=r"logits of row 5 .* are -inf for every class"):
        ordinal_loss(z, y)
