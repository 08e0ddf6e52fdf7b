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


@pytest.mark.parametrize(
    ("kind", "reduction"), [("plain", "mean"), ("spaced", "sum"), ("soft", "mean"), ("soft", "none")]
)
def test_reductions_and_second_derivatives_are_those_of_the_reference(kind: str, reduction: str) -> None:
    z, y, x = problem(70, 5, torch.float64)
    target = soft_labels(70, 5, z) if kind == "soft" else y
    direction = z.roll(1, 0)

    def derivatives(**options: Tensor) -> tuple[Tensor, ...]:
        leaf = z.clone().requires_grad_()
        value = ordinal_loss(leaf, target, cross_entropy=0.3, reduction=reduction, **options)  # type: ignore[arg-type]
        (first,) = torch.autograd.grad(value.square().sum(), leaf, create_graph=True)
        return value.detach(), first.detach(), torch.autograd.grad((first * direction).sum(), leaf)[0]

    quick = derivatives(**({} if kind == "plain" else {"x": x}))
    values = torch.arange(5.0, dtype=torch.float64) if kind == "plain" else x
    torch.testing.assert_close(quick, derivatives(x=by_reference(values)))


def test_layouts_repeated_passes_and_frozen_logits() -> None:
    z, y, x = problem(1000, 9, torch.float32)
    expected = value_and_gradient(z, y, x=x)
    torch.testing.assert_close(value_and_gradient(z.T.contiguous().T, y.int(), x=x), expected)
    leaf = z.clone().requires_grad_()
    value = ordinal_loss(leaf, y, x=x)
    first, again = (torch.autograd.grad(value, leaf, retain_graph=True)[0] for _ in range(2))
    assert torch.equal(first, again)
    with torch.no_grad():
        assert not ordinal_loss(leaf, y, x=x).requires_grad


class Named(Tensor):
    pass


def test_subclasses_and_batches_of_gradients() -> None:
    z, y, _ = problem(3, 5, torch.float32)
    assert type(ordinal_loss(z.as_subclass(Named), y)) is Named
    rows = jacobian(lambda z: ordinal_loss(z, y, reduction="none"), z, vectorize=True)  # a batch of gradients
    leaf = z.clone().requires_grad_()
    torch.testing.assert_close(rows.sum(0), torch.autograd.grad(ordinal_loss(leaf, y, reduction="sum"), leaf)[0])
