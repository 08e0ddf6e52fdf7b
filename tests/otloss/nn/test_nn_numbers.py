"""The module of the number-token loss against its function; moves, copies and files."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch

from otloss import nn, number_token_loss

NAN = float("nan")
VALUES = torch.tensor([NAN, 3.0, 0.0, 2049.0, 7.5, NAN])  # 2049 is none of float16
GENERATOR = torch.Generator().manual_seed(0)
Z, Y = torch.randn(6, 6, generator=GENERATOR), torch.tensor([1, 2, 3, 0, -100, 4])
WEIGHT = torch.rand(6, generator=GENERATOR)
CASES: dict[str, dict[str, Any]] = {
    "defaults": {},
    "huber": {"form": "huber", "delta": 2.0, "over": "numbers", "scaling": "log"},
    "squash": {"scaling": "squash", "squash": 4.0, "text": 3.0},
    "ignored": {"form": "mse", "scaling": "rank", "ignore_index": 1},
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_it_is_the_function(name: str, reduction: str) -> None:
    options = {**CASES[name], "reduction": reduction}
    y = Y.masked_fill(Y == -100, 1) if name == "ignored" else Y
    module = nn.NumberTokenLoss(VALUES, **options)
    leaves = Z.clone().requires_grad_(), Z.clone().requires_grad_()
    found = module(leaves[0], y, sample_weight=WEIGHT)
    expected = number_token_loss(leaves[1], y, VALUES, **options, sample_weight=WEIGHT)
    assert torch.equal(found, expected)
    assert torch.equal(*(torch.autograd.grad(v.sum(), z)[0] for v, z in zip((found, expected), leaves, strict=True)))
    assert torch.equal(module(Z, y), number_token_loss(Z, y, VALUES, **options))
    for twin in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert repr(twin) == repr(module)
        assert torch.equal(twin(Z, y, sample_weight=WEIGHT), found)
    other = nn.NumberTokenLoss(torch.arange(6.0), **options)
    assert not torch.equal(other(Z, y, sample_weight=WEIGHT), found)
    other.load_state_dict(module.state_dict())
    assert torch.equal(other(Z, y, sample_weight=WEIGHT), found)


def test_moves() -> None:
    module = nn.NumberTokenLoss(VALUES)
    assert list(module.state_dict()) == ["values"]
    assert not list(module.parameters())
    wide = copy.deepcopy(module).double()
    assert wide.values.dtype == torch.float64
    torch.testing.assert_close(wide(Z.double(), Y).float(), module(Z, Y))
    for narrow in (copy.deepcopy(module).half(), copy.deepcopy(module).bfloat16()):
        assert narrow.values.dtype == torch.float32
        assert torch.equal(narrow(Z, Y), module(Z, Y))
    around = torch.nn.Sequential(torch.nn.Linear(6, 6), module)
    assert around.to("meta")[1].values.is_meta


def test_representations() -> None:
    shown = "NumberTokenLoss(values=(6,) float32, form='wasserstein', over='vocabulary', reduction='mean')"
    assert repr(nn.NumberTokenLoss(VALUES)) == shown
    assert "over='numbers', delta=2.0, scaling='log', reduction" in repr(nn.NumberTokenLoss(VALUES, **CASES["huber"]))
    assert "scaling='squash', squash=4.0, text=3.0" in repr(nn.NumberTokenLoss(VALUES, **CASES["squash"]))
    assert "ignore_index=1" in repr(nn.NumberTokenLoss(VALUES, **CASES["ignored"]))
    assert "ignore_index=None" in repr(nn.NumberTokenLoss(VALUES, ignore_index=None))


def make(values: Any = VALUES, **options: Any) -> Callable[[], Any]:
    return lambda: nn.NumberTokenLoss(values, **options)


@pytest.mark.parametrize(
    ("bad", "error", "message"),
    [
        (make([1.0]), TypeError, "values is a list"),
        (make(VALUES * NAN), ValueError, "none of the 6 values is a number"),
        (make(torch.nn.Parameter(VALUES)), ValueError, "values require a gradient"),
        (make(form="l1"), ValueError, "form is 'l1'"),
        (make(over="text"), ValueError, "over is 'text'"),
        (make(scaling="sqrt"), ValueError, "scaling is 'sqrt'"),
        (make(squash=0.5), ValueError, "squash is 0.5"),
        (make(delta=-1.0), ValueError, "delta is -1.0"),
        (make(delta=2.0), ValueError, 'delta=2.0 .*form="wasserstein"'),
        (make(text=0.0), ValueError, "text is 0.0"),
        (make(text=2.0, over="numbers"), ValueError, 'text=2.0 .*over="numbers"'),
        (make(ignore_index=0.5), TypeError, "ignore_index is 0.5"),
        (make(reduction="median"), ValueError, "reduction is 'median'"),
    ],
)
def test_bad_settings_are_refused_at_construction(bad: Callable[[], Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        bad()


def test_bad_batches() -> None:
    with pytest.raises(ValueError, match=r"values have 6 entries, logits shape \(6, 5\)"):
        nn.NumberTokenLoss(VALUES)(Z[:, :5], Y)
