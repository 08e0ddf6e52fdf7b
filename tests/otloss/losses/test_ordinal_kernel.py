"""The numba kernel of the ranked probability score against the reference implementation in float64."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd.functional import jacobian

from otloss import ordinal_loss


def problem(rows: int, classes: int, dtype: torch.dtype, scale: float = 3.0) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(rows + classes)
    z = scale * torch.randn(rows, classes, generator=generator, dtype=torch.float64)
    y = torch.randint(classes, (rows,), generator=generator)
    y[0], y[-1] = 0, classes - 1
    x = torch.rand(classes, generator=generator, dtype=torch.float64).add(0.1).cumsum(0)
    return z.to(dtype), y, x.to(dtype)


def by_reference(x: Tensor) -> Tensor:
    """Class values with a gradient, which the kernel does not give: the reference implementation computes the loss."""
    return x.clone().requires_grad_()


def value_and_gradient(z: Tensor, y: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    leaf = z.clone().requires_grad_()
    values = ordinal_loss(leaf, y, reduction="none", **options)
    upstream = torch.linspace(-1, 2, values.numel(), dtype=values.dtype)
    return values.detach(), torch.autograd.grad(values, leaf, upstream)[0]


def soft_labels(rows: int, classes: int, z: Tensor) -> Tensor:
    """Labels of every kind: nearly one class, nearly the prediction, some classes empty, spread out."""
    generator = torch.Generator().manual_seed(rows)
    t = (4 * torch.randn(rows, classes, generator=generator, dtype=torch.float64)).softmax(-1)
    t[1::4] = (50 * t[1::4]).softmax(-1)
    t[2::4] = (z[2::4].double() + 1e-3 * t[2::4]).softmax(-1)
    t[3::4, ::2] = 0
    t[3::4, -1] += 0.1
    t = t / t.sum(-1, keepdim=True)
    return t.to(z.dtype)


NARROW, WIDE = torch.float32, torch.float64
PROBLEMS = [((1, 9000), 0.0, NARROW, False), ((3, 5), 0.7, NARROW, True), ((1000, 9), 0.7, WIDE, False)]
PROBLEMS += [((4097, 2), 0.7, NARROW, False), ((129, 65), 0.0, NARROW, True), ((129, 65), 0.7, WIDE, True)]


@pytest.mark.parametrize(("shape", "mix", "dtype", "soft"), PROBLEMS)
def test_equals_its_reference(shape: tuple[int, int], mix: float, dtype: torch.dtype, soft: bool) -> None:
    z, y, x = problem(*shape, dtype)
    t = soft_labels(*shape, z) if soft else y
    actual = value_and_gradient(z, t, x=x, cross_entropy=mix)
    alone = ordinal_loss(z, t, x=x, cross_entropy=mix, reduction="none")  # without a gradient
    torch.testing.assert_close(alone, actual[0], rtol=1e-6, atol=0)
    naive = value_and_gradient(z, t, x=by_reference(x), cross_entropy=mix)
    wide = by_reference(x.double())
    true_t = t.double() / t.double().sum(-1, keepdim=True) if soft else y
    exact = value_and_gradient(z.double(), true_t, x=wide, cross_entropy=mix)
    for quick, slow, true in zip(actual, naive, exact, strict=True):
        size = float(true.abs().max())
        ulps = 30 + shape[1] / 20  # running sums of so many terms
        allowed = 2 * (slow.double() - true).abs().max() + ulps * torch.finfo(dtype).eps * size
        assert (quick.double() - true).abs().max() <= allowed


class Named(Tensor):
    pass


def test_subclasses_batches_of_gradients_and_repeated_passes() -> None:
    z, y, _ = problem(3, 5, torch.float32)
    assert type(ordinal_loss(z.as_subclass(Named), y)) is Named
    rows = jacobian(lambda z: ordinal_loss(z, y, reduction="none"), z, vectorize=True)
    leaf = z.clone().requires_grad_()
    value = ordinal_loss(leaf, y, reduction="sum")
    for _ in range(2):
        torch.testing.assert_close(rows.sum(0), torch.autograd.grad(value, leaf, retain_graph=True)[0])
    with torch.no_grad():
        assert not ordinal_loss(leaf, y).requires_grad
