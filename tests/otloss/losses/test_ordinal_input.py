"""What the ordinal loss is called with: whole numbers of every dtype, weights, positions to leave out, bad input."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from otloss import histogram_loss, nn, ordinal_loss

Z, Y = torch.zeros(2, 3), torch.tensor([0, 1])
T = torch.full((2, 3), 1 / 3)
SQUARE = torch.ones(3, 3)


def drawn(*shape: int, seed: int) -> Tensor:
    return 1.5 * torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


WHOLE = [1_700_000_000, 1_700_000_010, 1_700_000_025], [20240101, 20240102, 20240103], [-(2**53), -(2**53) + 1, 0]


@pytest.mark.parametrize("x", WHOLE, ids=str)
@pytest.mark.parametrize(
    "options", [{}, {"power": 1}, {"power": 1.5}, {"circular": True}, {"circular": True, "power": 1}]
)
@pytest.mark.parametrize("rows", [1, 4000])
def test_large_whole_class_values_keep_their_gaps(x: list[int], options: dict[str, Any], rows: int) -> None:
    z, y = drawn(rows, 3, seed=30).float(), torch.arange(rows) % 3
    from_zero = torch.tensor([k - x[0] for k in x]).double()
    if options.get("circular"):
        options = {**options, "period": float(from_zero[-1]) + 7}
    for target in (y, drawn(rows, 3, seed=31).softmax(-1).float()):
        found = ordinal_loss(z, target, x=torch.tensor(x), **options, reduction="none")
        exact = target.double() if target.is_floating_point() else target
        if target.is_floating_point():
            exact = exact / exact.sum(-1, keepdim=True)
        expected = ordinal_loss(z.double(), exact, x=from_zero, **options, reduction="none")
        assert found.dtype == torch.float32
        torch.testing.assert_close(found.double(), expected, rtol=2e-5, atol=1e-6 * float(from_zero[-1]))


def test_gaps_that_a_narrow_dtype_rounds_are_kept() -> None:
    z, x = (
        torch.tensor([[-50.0, 0.0, -50.0]]),
        torch.tensor([0, 20_000_000, 20_000_003]),
    )  # the last: ..._004 in float32
    assert ordinal_loss(z, torch.tensor([2]), x=x).item() == 3
    assert ordinal_loss(z, torch.tensor([2]), x=x, power=1).item() == 3


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.uint16, torch.int16, torch.uint32, torch.int32])
def test_narrow_targets_and_class_values_are_what_they_are_in_int64(dtype: torch.dtype) -> None:
    z, y = drawn(2, 200, seed=32), torch.tensor([100, 127])
    found = ordinal_loss(z, y.to(dtype), ignore_index=-100, reduction="none")
    torch.testing.assert_close(found, ordinal_loss(z, y, reduction="none"))
    if dtype == torch.uint8:  # 156 is -100 modulo 256
        y = torch.tensor([156, 199])
        found = ordinal_loss(z, y.to(dtype), ignore_index=-100, reduction="none")
        torch.testing.assert_close(found, ordinal_loss(z, y, reduction="none"))
    x = torch.tensor([0, 1, 7], dtype=dtype)
    torch.testing.assert_close(ordinal_loss(Z, Y, x=x), ordinal_loss(Z, Y, x=x.float()))
    with pytest.raises(ValueError, match=r"x\[0\] is 7 and x\[1\] 1"):
        ordinal_loss(Z, Y, x=torch.tensor([7, 1, 0], dtype=dtype))


def test_truth_values_may_weigh() -> None:
    z, y = drawn(4, 3, seed=33), torch.tensor([0, 1, 2, 0])
    kept = torch.tensor([True, False, True, True])
    torch.testing.assert_close(ordinal_loss(z, y, sample_weight=kept), ordinal_loss(z[kept], y[kept]))


@pytest.mark.parametrize("n", [8, 4000])
def test_sample_weights_count_as_copies(n: int) -> None:
    z, y = drawn(n, 5, seed=17), torch.arange(n) % 5
    copies = torch.arange(n) % 4
    weight, by_class = copies.double(), torch.tensor([1.0, 2.0, 0.5, 3.0, 0.0], dtype=torch.float64)
    for reduction in ("mean", "sum"):
        leaf = z.clone().requires_grad_()
        weighted = ordinal_loss(leaf, y, sample_weight=weight, class_weight=by_class, reduction=reduction)
        again = z.clone().requires_grad_()
        repeated = ordinal_loss(
            again.repeat_interleave(copies, 0), y.repeat_interleave(copies), class_weight=by_class, reduction=reduction
        )
        torch.testing.assert_close(weighted, repeated)
        (slope,), (expected,) = torch.autograd.grad(weighted, leaf), torch.autograd.grad(repeated, again)
        torch.testing.assert_close(slope, expected)


def test_the_axis_of_the_classes() -> None:
    z, y = drawn(2, 3, 4, 5, seed=40).float(), torch.arange(40).reshape(2, 4, 5) % 3
    last = z.movedim(1, -1)
    soft, weight = drawn(2, 3, 4, 5, seed=41).float().softmax(1), torch.rand(2, 4, 5)
    for target, moved in ((y, y), (soft, soft.movedim(1, -1))):
        leaves = z.clone().requires_grad_(), last.clone().requires_grad_()
        found = ordinal_loss(leaves[0], target, dim=1, sample_weight=weight, reduction="none")
        expected = ordinal_loss(leaves[1], moved, sample_weight=weight, reduction="none")
        assert torch.equal(found, expected)
        slope, expected = (
            torch.autograd.grad(v.sum(), leaf)[0] for v, leaf in zip((found, expected), leaves, strict=True)
        )
        assert torch.equal(slope.movedim(1, -1), expected)
        assert torch.equal(
            nn.OrdinalLoss(dim=-3, reduction="none")(z, target), ordinal_loss(last, moved, reduction="none")
        )
    # (N, K, K) with (N, K) fits both ways, with different losses.
    z, y = drawn(2, 3, 3, seed=42), torch.tensor([[0, 1, 2], [2, 2, 1]])
    with pytest.raises(ValueError, match=r"logits have shape \(2, 3, 3\) and target \(2, 3\), .*: dim=-1 or dim=1"):
        ordinal_loss(z, y)
    with pytest.raises(ValueError, match="dim=-1 or dim=1"):
        nn.OrdinalLoss()(z, y)
    assert torch.equal(ordinal_loss(z, y, dim=1), ordinal_loss(z.mT, y, dim=-1))
    assert ordinal_loss(z, y, dim=-1) != ordinal_loss(z, y, dim=1)


def test_under_autocast_the_answer_is_that_of_cross_entropy() -> None:
    z, y = drawn(4, 3, seed=43).bfloat16(), torch.tensor([0, 1, 2, 0])
    with torch.autocast("cpu", dtype=torch.bfloat16):
        for found in (
            ordinal_loss(z, y),
            ordinal_loss(z, y, power=1),
            histogram_loss(z, y, torch.arange(3.0).bfloat16()),
        ):
            assert found.dtype == torch.nn.functional.cross_entropy(z, y).dtype == torch.float32
        assert torch.equal(ordinal_loss(z, y), ordinal_loss(z.float(), y))
        assert ordinal_loss(z.double(), y).dtype == torch.float64


def test_soft_labels_take_the_expected_class_weight() -> None:
    z, t = drawn(6, 5, seed=18), drawn(6, 5, seed=19).softmax(-1)
    by_class = torch.tensor([1.0, 2.0, 0.5, 3.0, 0.0], dtype=torch.float64)
    plain_values = ordinal_loss(z, t, reduction="none")
    weight = t @ by_class
    torch.testing.assert_close(ordinal_loss(z, t, class_weight=by_class, reduction="none"), weight * plain_values)
    torch.testing.assert_close(ordinal_loss(z, t, class_weight=by_class), (weight * plain_values).sum() / weight.sum())


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
    found = ordinal_loss(z, y, ignore_index=ignored)
    torch.testing.assert_close(found, expected)
    (slope,) = torch.autograd.grad(found, z)
    assert torch.equal(slope[left_out], torch.zeros_like(slope[left_out]))
    torch.testing.assert_close(slope, torch.autograd.grad(expected, z)[0])


def test_nothing_to_learn_is_zero_with_zero_slopes() -> None:
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
    empty = torch.zeros(0, 5, requires_grad=True)
    assert ordinal_loss(empty, torch.zeros(0, dtype=torch.long)).item() == 0


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (
            lambda: ordinal_loss(Z, torch.tensor([0, 3])),
            ValueError,
            r"1 positions outside of the 3 classes, the first at \(1,\): 3; expected 0 to 2",
        ),
        (
            lambda: ordinal_loss(Z, torch.tensor([-100, 3]), ignore_index=-100),
            ValueError,
            r"\(1,\): 3; expected 0 to 2 or ignore_index=-100",
        ),
        (lambda: ordinal_loss(Z, torch.tensor([0, -100])), ValueError, "-100; expected 0 to 2. .* ignore_index="),
        (
            lambda: ordinal_loss(Z, torch.tensor([0.0, 1.0])),
            TypeError,
            "target has dtype torch.float32 .* histogram_loss",
        ),
        (lambda: ordinal_loss(Z, torch.tensor([True, False])), TypeError, "target has dtype torch.bool"),
        (lambda: ordinal_loss(Z, torch.eye(3)[:2].long()), TypeError, r"target.float\(\) for one-hot"),
        (
            lambda: ordinal_loss(Z, torch.tensor([[0], [1]])),
            ValueError,
            r"target has shape \(2, 1\), expected class positions \(2,\)",
        ),
        (lambda: ordinal_loss(Z, torch.full((2, 4), 0.25)), ValueError, r"target has shape \(2, 4\)"),
        (lambda: ordinal_loss(Z, [0, 1]), TypeError, "target is a list"),  # type: ignore[arg-type]
        (lambda: ordinal_loss(Z, T * torch.nan), ValueError, "target holds 6 NaN"),
        (lambda: ordinal_loss(Z, 2 * T), ValueError, "soft labels of row 0 sum to 2"),
        (
            lambda: ordinal_loss(Z, torch.tensor([[1.0, 0, 0], [1.5, -0.5, 0]])),
            ValueError,
            r"-0.5 for class 1 of row 1",
        ),
        (lambda: ordinal_loss(Z, T, ignore_index=-100), ValueError, "ignore_index=-100 leaves class positions out"),
        (lambda: ordinal_loss(Z, Y, ignore_index=1.5), TypeError, "ignore_index is 1.5"),  # type: ignore[arg-type]
        (lambda: ordinal_loss(Z.long(), Y), TypeError, "logits has dtype torch.int64"),
        (lambda: ordinal_loss(torch.zeros(2, 0), Y), ValueError, r"logits have shape \(2, 0\)"),
        (lambda: ordinal_loss(torch.tensor(1.0), Y), ValueError, r"logits have shape \(\)"),
        (lambda: ordinal_loss(Z * torch.nan, Y), ValueError, "logits holds 6 NaN"),
        (lambda: ordinal_loss(Z + torch.inf, Y), ValueError, r"logits holds 6 NaN or \+inf"),
        (lambda: ordinal_loss(Z - torch.inf, Y), ValueError, "logits of row 0 .* are -inf for every class"),
        (
            lambda: ordinal_loss(torch.tensor([[-torch.inf, 0.0]]), torch.tensor([0]), cross_entropy=1.0),
            ValueError,
            "cross-entropy of row 0",
        ),
        (lambda: ordinal_loss(Z, Y, power=0.5), ValueError, "power is 0.5, expected a finite number of at least 1"),
        (lambda: ordinal_loss(Z, Y, power="2"), TypeError, "power is a str"),  # type: ignore[arg-type]
        (lambda: ordinal_loss(Z, Y, circular=True, power=3), ValueError, "power is 3, expected 1 or 2"),
        (lambda: ordinal_loss(Z, Y, period=3.0), ValueError, "period=3.0 is given for classes on a line"),
        (lambda: ordinal_loss(Z, Y, circular=True, period=2.0), ValueError, "period is 2.0, expected more than 2"),
        (lambda: ordinal_loss(Z, Y, circular=True, x=torch.tensor([0.0, 1, 2])), ValueError, "without period="),
        (
            lambda: ordinal_loss(Z, Y, x=torch.tensor([0.0, 2, 1])),
            ValueError,
            r"x\[1\] is 2 and x\[2\] 1, expected strictly",
        ),
        (
            lambda: ordinal_loss(Z, Y, x=torch.tensor([0.0, 1, 1])),
            ValueError,
            r"x\[1\] is 1 and x\[2\] 1, expected strictly",
        ),
        (lambda: ordinal_loss(Z, Y, x=torch.tensor([0.0, 1])), ValueError, r"x has shape \(2,\), expected \(3,\)"),
        (lambda: ordinal_loss(Z, Y, x=torch.tensor([0.0, torch.nan, 1])), ValueError, "x holds 1 NaN"),
        (lambda: ordinal_loss(Z, Y, x=[0, 1, 2]), TypeError, "x is a list"),  # type: ignore[arg-type]
        (lambda: ordinal_loss(Z, Y, cost=SQUARE, x=torch.arange(3)), ValueError, "cost and x are both given"),
        (lambda: ordinal_loss(Z, Y, cost=SQUARE, power=1), ValueError, "cost and power are both given"),
        (lambda: ordinal_loss(Z, Y, cost=SQUARE, circular=True), ValueError, "cost and circular are both given"),
        (lambda: ordinal_loss(Z, Y, cost=torch.ones(4, 4)), ValueError, r"cost has shape \(4, 4\), expected \(3, 3\)"),
        (
            lambda: ordinal_loss(Z, Y, cost=torch.ones(2, 3, 3)),
            ValueError,
            r"cost has shape \(2, 3, 3\), expected \(3, 3\)",
        ),
        (lambda: ordinal_loss(Z, Y, cost=-SQUARE), ValueError, r"-1.0 at index \(0, 0\), expected costs >= 0"),
        (lambda: ordinal_loss(Z, Y, cost=SQUARE * torch.nan), ValueError, "cost matrix holds 9 NaN"),
        (lambda: ordinal_loss(Z, Y, cost=np.ones((3, 3))), TypeError, "cost is a ndarray"),  # type: ignore[arg-type]
        (lambda: ordinal_loss(Z, Y, cross_entropy=-1.0), ValueError, "cross_entropy is -1.0"),
        (
            lambda: ordinal_loss(Z, Y, class_weight=torch.ones(2)),
            ValueError,
            r"class_weight has shape \(2,\), expected \(3,\)",
        ),
        (
            lambda: ordinal_loss(Z, Y, class_weight=-torch.ones(3)),
            ValueError,
            r"class_weight holds -1.0 at index \(0,\)",
        ),
        (
            lambda: ordinal_loss(Z, Y, sample_weight=torch.ones(3)),
            ValueError,
            r"sample_weight has shape \(3,\), expected \(2,\)",
        ),
        (lambda: ordinal_loss(Z, Y, sample_weight=torch.ones(2, 1)), ValueError, r"sample_weight has shape \(2, 1\)"),
        (
            lambda: ordinal_loss(Z, Y, sample_weight=torch.tensor([1.0, -2.0])),
            ValueError,
            r"sample_weight holds -2.0 at index \(1,\)",
        ),
        (
            lambda: ordinal_loss(Z, Y, sample_weight=torch.tensor([1.0, torch.nan])),
            ValueError,
            "sample_weight holds 1 NaN",
        ),
        (lambda: ordinal_loss(Z, Y, sample_weight=[1.0, 2.0]), TypeError, "sample_weight is a list"),  # type: ignore[arg-type]
        (lambda: ordinal_loss(Z, Y, reduction="median"), ValueError, "reduction is 'median'"),
        (lambda: ordinal_loss(Z, Y, x=torch.tensor([0, 1, 2]).cfloat()), TypeError, r"x has dtype .*64.* pass x.real"),
        (lambda: ordinal_loss(Z, Y, x=torch.tensor([False, True, True])), TypeError, "x has dtype torch.bool"),
        (lambda: ordinal_loss(Z, Y, x=torch.tensor([0, 1, 2**60])), ValueError, r"to 1152921504606846976, .* 2\^53"),
        (lambda: ordinal_loss(Z, Y, x=torch.tensor([-(2**63), 0, 2**63 - 1])), ValueError, "x reaches from -92233720"),
        (
            lambda: ordinal_loss(Z, Y, x=torch.tensor([1.7e9, 1.7e9 + 1, 1.8e9])),
            ValueError,
            r"x\[0\] is 1.7e\+09 and x\[1\] 1.7e\+09.* rounding to torch.float32 .* pass x - x\[0\]",
        ),
        (lambda: ordinal_loss(Z, Y, class_weight=torch.ones(3).cfloat()), TypeError, "pass class_weight.real"),
        (lambda: ordinal_loss(Z, Y, sample_weight=torch.ones(2).cfloat()), TypeError, "pass sample_weight.real"),
        (
            lambda: ordinal_loss(torch.tensor([[-torch.inf, 0.0]], requires_grad=True), Y[:1], cross_entropy=1.0),
            ValueError,
            "cross-entropy of row 0 .* is inf",
        ),
        (lambda: ordinal_loss(torch.zeros(2, 5, 4, 3), torch.zeros(2, 4, 3).long()), ValueError, "pass dim=1 if it is"),
        (
            lambda: ordinal_loss(torch.zeros(2, 5, 4), torch.zeros(2, 5).long(), dim=1),
            ValueError,
            r"target has shape \(2, 5\), expected class positions \(2, 4\) or soft labels \(2, 5, 4\) .* dim=1",
        ),
        (lambda: ordinal_loss(Z, Y, dim=2), ValueError, r"dim is 2, expected an axis of the logits \(2, 3\)"),
        (lambda: ordinal_loss(Z, Y, dim=1.0), TypeError, "dim is 1.0"),  # type: ignore[arg-type]
        (lambda: nn.OrdinalLoss(dim="1"), TypeError, "dim is '1'"),  # type: ignore[arg-type]
        (lambda: ordinal_loss(Z, Y.to("meta")), ValueError, "target is on meta, logits on cpu"),
        (lambda: ordinal_loss(Z, Y, x=torch.arange(3, device="meta")), ValueError, "x is on meta, logits on cpu"),
    ],
)
def test_bad_input(call: Callable[[], Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call()
