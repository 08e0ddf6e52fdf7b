"""Input of the ordinal loss: integers of every dtype, weights, positions to leave out, errors."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from otloss import histogram_loss, ordinal_loss
from tests.errors import raising

Z, Y = torch.zeros(2, 3), torch.tensor([0, 1])
T = torch.full((2, 3), 1 / 3)
SQUARE = torch.ones(3, 3)


def drawn(*shape: int, seed: int) -> Tensor:
    return 1.5 * torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_integers_of_every_dtype_are_what_they_are_in_int64() -> None:
    z, y, x = drawn(40, 3, seed=30).float(), torch.arange(40) % 3, torch.tensor([0.0, 10.0, 25.0])
    for options in ({}, {"power": 1}, {"circular": True, "period": 32.0}):
        for given in (x.long() + 1_700_000_000, x.to(torch.uint8)):  # computed in float64
            actual = ordinal_loss(z, y, x=given, **options, reduction="none")  # type: ignore[arg-type]
            assert actual.dtype == torch.float32
            torch.testing.assert_close(actual, ordinal_loss(z, y, x=x, **options, reduction="none"))  # type: ignore[arg-type]
    z = drawn(2, 200, seed=32)
    for dtype, labels in ((torch.uint8, [156, 199]), (torch.int8, [100, 127]), (torch.int32, [156, 199])):
        y = torch.tensor(labels)  # 156 is -100 modulo 256
        actual = ordinal_loss(z, y.to(dtype), ignore_index=-100, reduction="none")
        torch.testing.assert_close(actual, ordinal_loss(z, y, reduction="none"))


@pytest.mark.parametrize("n", [8, 4000])
def test_weights_count_as_copies(n: int) -> None:
    z, y, copies = drawn(n, 5, seed=17), torch.arange(n) % 5, torch.arange(n) % 4
    by_class = torch.tensor([1.0, 2.0, 0.5, 3.0, 0.0], dtype=torch.float64)
    for weight in (copies, copies.double(), copies > 0):
        for reduction in ("mean", "sum"):
            options: dict[str, Any] = {"class_weight": by_class, "reduction": reduction}
            leaf, again = z.clone().requires_grad_(), z.clone().requires_grad_()
            weighted = ordinal_loss(leaf, y, sample_weight=weight, **options)
            repeated = ordinal_loss(*(t.repeat_interleave(weight.long(), 0) for t in (again, y)), **options)
            torch.testing.assert_close(weighted, repeated)
            torch.testing.assert_close(
                *(torch.autograd.grad(v, t)[0] for v, t in ((weighted, leaf), (repeated, again)))
            )
    z, t = drawn(6, 5, seed=18), drawn(6, 5, seed=19).softmax(-1)  # soft labels take the expected class weight
    actual, weight = ordinal_loss(z, t, class_weight=by_class), t @ by_class
    torch.testing.assert_close(actual, (weight * ordinal_loss(z, t, reduction="none")).sum() / weight.sum())
    torch.testing.assert_close(actual, ordinal_loss(z, t, sample_weight=weight))


def test_the_axis_of_the_classes() -> None:
    z, y = drawn(2, 3, 4, 5, seed=40).float(), torch.arange(40).reshape(2, 4, 5) % 3
    soft, weight = drawn(2, 3, 4, 5, seed=41).float().softmax(1), torch.rand(2, 4, 5)
    for target, moved in ((y, y), (soft, soft.movedim(1, -1))):
        leaf = z.clone().requires_grad_()
        actual = ordinal_loss(leaf, target, dim=1, sample_weight=weight, reduction="none")
        expected = ordinal_loss(leaf.movedim(1, -1), moved, sample_weight=weight, reduction="none")
        assert torch.equal(actual, expected)
        assert torch.equal(*(torch.autograd.grad(v.sum(), leaf, retain_graph=True)[0] for v in (actual, expected)))
    # (N, K, K) with (N, K) fits both ways, with different losses.
    z, y = drawn(2, 3, 3, seed=42), torch.tensor([[0, 1, 2], [2, 2, 1]])
    with pytest.raises(match=r"logits have shape \(2, 3, 3\) and target \(2, 3\), .* dim=-1 or dim=1"):
        ordinal_loss(z, y)
    assert torch.equal(ordinal_loss(z, y, dim=1), ordinal_loss(z.mT, y, dim=-1))
    assert ordinal_loss(z, y, dim=-1) != ordinal_loss(z, y, dim=1)


def test_under_autocast_the_answer_is_that_of_cross_entropy() -> None:
    z, y = drawn(4, 3, seed=43).bfloat16(), torch.tensor([0, 1, 2, 0])
    with torch.autocast("cpu", dtype=torch.bfloat16):
        for actual in (
            ordinal_loss(z, y),
            ordinal_loss(z, y, power=1),
            histogram_loss(z, y, torch.arange(3.0).bfloat16()),
        ):
            assert actual.dtype == torch.nn.functional.cross_entropy(z, y).dtype == torch.float32
        assert torch.equal(ordinal_loss(z, y), ordinal_loss(z.float(), y))
        assert ordinal_loss(z.double(), y).dtype == torch.float64


@pytest.mark.parametrize("ignored", [-100, 2, 7])
@pytest.mark.parametrize("n", [20, 4000])
def test_ignored_positions_are_not_looked_at(ignored: int, n: int) -> None:
    z, y = drawn(n, 5, seed=20), torch.arange(n) % 5
    y[3::6] = ignored
    left_out = y == ignored
    z[left_out] = torch.nan
    z.requires_grad_()
    values = ordinal_loss(z, y, ignore_index=ignored, reduction="none")
    assert torch.equal(values == 0, left_out)
    expected = ordinal_loss(z[~left_out], y[~left_out])
    actual = ordinal_loss(z, y, ignore_index=ignored)
    torch.testing.assert_close(actual, expected)
    (gradient,) = torch.autograd.grad(actual, z)
    assert torch.equal(gradient[left_out], torch.zeros_like(gradient[left_out]))
    torch.testing.assert_close(gradient, torch.autograd.grad(expected, z)[0])


def test_nothing_to_learn_is_zero_with_zero_gradients() -> None:
    z = drawn(4, 5, seed=21).requires_grad_()
    for options in (
        {"target": torch.full((4,), -100), "ignore_index": -100},
        {"target": torch.zeros(4, dtype=torch.long), "sample_weight": torch.zeros(4)},
        {"target": torch.zeros(4, dtype=torch.long), "class_weight": torch.tensor([0.0, 1, 1, 1, 1])},
    ):
        for reduction in ("mean", "sum"):
            value = ordinal_loss(z, **options, reduction=reduction)
            assert value.item() == 0
            assert torch.equal(torch.autograd.grad(value, z)[0], torch.zeros_like(z))
    for shape in ((0, 5), (3, 1)):  # no rows, and one class
        z = torch.zeros(shape, requires_grad=True)
        value = ordinal_loss(z, torch.zeros(shape[0], dtype=torch.long), cross_entropy=1.0)
        assert value.item() == 0
        assert torch.equal(torch.autograd.grad(value, z)[0], torch.zeros(shape))


def call(z: Any = Z, target: Any = Y, **options: Any) -> Callable[[], Tensor]:
    return lambda: ordinal_loss(z, target, **options)


MASKED = torch.tensor([[-torch.inf, 0.0]])


test_bad_input = raising(
    (call(target=torch.tensor([0, 3])), r"1 values out of range, the first at \(1,\): 3; .* 0 to 2"),
    (call(target=torch.tensor([0, -100])), "-100; expected 0 to 2. .* ignore_index"),
    (call(target=Y.float()), TypeError, "target has dtype torch.float32 .* target.long.* histogram_loss"),
    (call(target=torch.eye(3)[:2].long()), TypeError, r"target.float\(\) for one-hot"),
    (call(target=Y[:, None]), r"target has shape \(2, 1\), expected class positions \(2,\)"),
    (call(target=T * torch.nan), "target holds 6 NaN"),
    (call(target=torch.stack([T[0], 2 * T[0]])), "soft labels of row 1 sum to 2"),
    (call(target=torch.tensor([[1.0, 0, 0], [1.5, -0.5, 0]])), "-0.5 for class 1 of row 1"),
    (call(target=T, ignore_index=-100), "ignore_index=-100 is given with soft labels"),
    (call(target=torch.zeros(2, 3) > 0), TypeError, "target has dtype torch.bool"),
    (call(z=Z[:, :0]), "expected .* with at least one class"),
    (call(dim=2), "dim is 2, expected an axis"),
    (call(z=Z.long()), TypeError, "logits has dtype torch.int64"),
    (call(z=Z * torch.nan), "logits holds 6 NaN"),
    (call(z=Z - torch.inf), "logits of row 0 .* are -inf for every class"),
    (call(z=MASKED, target=Y[:1], cross_entropy=1.0), "cross-entropy of row 0 .* is inf"),
    (call(power=0.5), "power is 0.5, expected a finite number of at least 1"),
    (call(circular=True, power=3), "power is 3, expected 1 or 2"),
    (call(period=3.0), "period=3.0 is given for classes on a line"),
    (call(circular=True, period=2.0), "period is 2.0, expected more than 2"),
    (call(circular=True, x=torch.arange(3.0)), "without period="),
    (call(x=torch.tensor([0.0, 2, 1])), r"x\[1\] is 2 and x\[2\] is 1, expected strictly increasing"),
    (call(x=torch.tensor([1.7e9, 1.7e9 + 1, 1.8e9])), r"x\[0\] is 1.7e\+09 .* subtract x\[0\] in"),
    (call(x=torch.tensor([0.0, 1])), r"x has shape \(2,\), expected \(3,\)"),
    (call(x=[0, 1, 2]), TypeError, "x is a list"),
    (call(cost=SQUARE, x=torch.arange(3)), "cost and x are both given"),
    (call(cost=torch.ones(2, 3, 3)), r"cost has shape \(2, 3, 3\), expected \(3, 3\)"),
    (call(cost=-SQUARE), r"-1.0 at index \(0, 0\), expected costs >= 0"),
    (call(cross_entropy=-1.0), "cross_entropy is -1.0"),
    (call(class_weight=torch.ones(2)), r"class_weight has shape \(2,\), expected \(3,\)"),
    (call(class_weight=torch.tensor([1.0, -1.0, 2.0])), "class_weight holds -1.0, expected weights >= 0"),
    (call(sample_weight=torch.ones(3)), r"sample_weight has shape \(3,\), expected \(2,\)"),
    (call(sample_weight=torch.tensor([1.0, torch.nan])), "sample_weight holds 1 NaN"),
    (call(torch.zeros(2, 5, 4, 3), torch.zeros(2, 4, 3).long()), "pass dim=1 if they are on axis 1"),
    (call(torch.zeros(2, 5, 4), torch.zeros(2, 5).long(), dim=1), r"positions \(2, 4\) or .* dim=1"),
)
