"""Modules of the ordinal and histogram losses against their functions; moves, copies and files."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from otloss import histogram_loss, nn, ordinal_loss
from otloss.costs import LineCost
from otloss.losses import histogram_mean

GENERATOR = torch.Generator().manual_seed(0)
Z, Y = torch.randn(6, 4, generator=GENERATOR), torch.tensor([0, 1, 2, 3, -100, 1])
SOFT = torch.randn(6, 4, generator=GENERATOR).softmax(-1)
WEIGHT, X = torch.rand(6, generator=GENERATOR), torch.tensor([0.0, 1.0, 4.0, 9.0])
COST, BY_CLASS = torch.rand(4, 4, generator=GENERATOR), torch.tensor([1.0, 2.0, 0.5, 1.0])
VALUES = torch.tensor([0.0, 1.5, 3.0, 4.5, 8.0, 9.0])

CASES: dict[str, tuple[Callable[..., nn.OrdinalLoss], dict[str, Any]]] = {
    "line": (nn.OrdinalLoss, {"x": X, "power": 1, "cross_entropy": 0.3, "class_weight": BY_CLASS}),
    "circle": (nn.OrdinalLoss, {"circular": True, "period": 12.0, "x": X}),
    "matrix": (nn.OrdinalLoss, {"cost": COST, "class_weight": BY_CLASS}),
    "cost object": (nn.OrdinalLoss, {"cost": LineCost(X), "cross_entropy": 1.0}),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_ordinal_loss(name: str, reduction: str) -> None:
    make, options = CASES[name]
    for target, ignored in ((Y, -100), (SOFT, None)):
        module = make(**options, ignore_index=ignored, reduction=reduction)
        leaves = Z.clone().requires_grad_(), Z.clone().requires_grad_()
        found = module(leaves[0], target, sample_weight=WEIGHT)
        expected = ordinal_loss(
            leaves[1], target, **options, ignore_index=ignored, reduction=reduction, sample_weight=WEIGHT
        )
        assert torch.equal(found, expected)
        assert torch.equal(
            *(torch.autograd.grad(v.sum(), z)[0] for v, z in zip((found, expected), leaves, strict=True))
        )
        for twin in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
            assert repr(twin) == repr(module)
            assert torch.equal(twin(Z, target, sample_weight=WEIGHT), found)
        other = copy.deepcopy(module)
        for buffer in other.buffers():
            buffer.fill_(1.0)
        other.load_state_dict(module.state_dict())
        assert torch.equal(other(Z, target, sample_weight=WEIGHT), found)
        wide = copy.deepcopy(module).double()
        assert all(b.dtype == torch.float64 for b in wide.buffers())
        torch.testing.assert_close(wide(Z.double(), target, sample_weight=WEIGHT).float(), found)
        assert all(b.dtype == torch.float32 for b in copy.deepcopy(module).half().buffers())


@pytest.mark.parametrize("labels", ["two_hot", "one_hot", "gaussian"])
@pytest.mark.parametrize("bins", [X, torch.tensor([0.0, 1, 2, 5, 9])], ids=["centres", "edges"])
def test_histogram_loss(labels: str, bins: Tensor) -> None:
    options: dict[str, Any] = {"labels": labels, "power": 1, "cross_entropy": 0.2, "outside": "clamp"}
    module = nn.HistogramLoss(bins=bins, **options, reduction="none")
    found = module(Z, VALUES, sample_weight=WEIGHT)
    assert torch.equal(found, histogram_loss(Z, VALUES, bins, **options, reduction="none", sample_weight=WEIGHT))
    assert torch.equal(module(Z, SOFT), histogram_loss(Z, SOFT, bins, **options, reduction="none"))
    assert torch.equal(module.mean(Z), histogram_mean(Z, bins))
    assert torch.equal(pickle.loads(pickle.dumps(module))(Z, VALUES, sample_weight=WEIGHT), found)
    assert list(module.state_dict()) == ["bins"]


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: nn.OrdinalLoss(power=0.5), ValueError, "power is 0.5"),
        (lambda: nn.OrdinalLoss(x=X, cost=COST), ValueError, "cost and x are both given"),
        (lambda: nn.OrdinalLoss(x=X > 1), TypeError, "x has dtype torch.bool"),
        (lambda: nn.OrdinalLoss(x=X, circular=True), ValueError, "without period="),
        (lambda: nn.OrdinalLoss(circular=True, period=-1.0), ValueError, "period is -1.0"),
        (lambda: nn.OrdinalLoss(class_weight=X.cfloat()), TypeError, "class_weight has dtype torch.complex64"),
        (lambda: nn.OrdinalLoss(ignore_index=0.5), TypeError, "ignore_index is 0.5"),  # type: ignore[arg-type]
        (lambda: nn.OrdinalLoss(cross_entropy=-1.0), ValueError, "cross_entropy is -1.0"),
        (lambda: nn.HistogramLoss(bins=X, power=0.5), ValueError, "power is 0.5"),
        (lambda: nn.HistogramLoss(bins=X, labels="hard"), ValueError, "labels is 'hard'"),
        (lambda: nn.HistogramLoss(bins=X, sigma=1.0), ValueError, "sigma=1.0 is given"),
    ],
)
def test_bad_settings_are_refused_at_construction(
    call: Callable[[], Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        call()


def test_representations() -> None:
    assert repr(nn.OrdinalLoss()) == "OrdinalLoss(power=2, reduction='mean')"
    assert "circular=True, period=12.0" in repr(nn.OrdinalLoss(circular=True, x=X, period=12.0))
    shown = repr(nn.OrdinalLoss(cost=COST, ignore_index=-1))
    assert "ignore_index=-1" in shown
    assert "power" not in shown
    assert "(cost): HeldCost(DenseCost(shape=(4, 4)" in shown
    assert "bins=(4,) float32, labels='two_hot'" in repr(nn.HistogramLoss(bins=X))


def test_parameters_are_trained() -> None:
    for options in ({"x": torch.nn.Parameter(X.clone()), "power": 2}, {"cost": torch.nn.Parameter(COST.clone())}):
        loss = nn.OrdinalLoss(**options)  # type: ignore[arg-type]
        assert len(list(loss.parameters())) == 1
        loss(Z, SOFT).backward()
        assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in loss.parameters())


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: nn.OrdinalLoss(reduction="median"), ValueError, "reduction is 'median'"),
        (lambda: nn.OrdinalLoss(x=[0, 1]), TypeError, "x is a list"),  # type: ignore[arg-type]
        (lambda: nn.OrdinalLoss(cost=-COST), ValueError, "expected costs >= 0"),
        (lambda: nn.OrdinalLoss(cost=COST, x=X)(Z, SOFT), ValueError, "cost and x are both given"),
        (lambda: nn.HistogramLoss(bins=None), TypeError, "bins is a NoneType"),  # type: ignore[arg-type]
        (lambda: nn.HistogramLoss(bins=X, labels="hard")(Z, VALUES), ValueError, "labels is 'hard'"),
    ],
)
def test_bad_settings(make: Callable[[], Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        make()


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # both by the compiler itself
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize("name", ["line", "circle", "matrix", "histogram"])
def test_compiled_graphs_and_surroundings_change_nothing(name: str) -> None:
    if name == "histogram":
        module: torch.nn.Module = nn.HistogramLoss(bins=X)
        target: Tensor = VALUES
    else:
        make, options = CASES[name]
        module, target = make(**options, ignore_index=-100), Y
    torch._dynamo.reset()
    leaf = Z.clone().requires_grad_()
    expected = module(leaf, target)
    (slope,) = torch.autograd.grad(expected, leaf)
    for call in (torch.compile(module, backend="aot_eager"), module):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=call is module):
            again = Z.clone().requires_grad_()
            value = call(again, target)
        torch.testing.assert_close(value, expected)
        torch.testing.assert_close(torch.autograd.grad(value, again)[0], slope)
    with torch.device("meta"):
        torch.testing.assert_close(module(leaf, target), expected)
