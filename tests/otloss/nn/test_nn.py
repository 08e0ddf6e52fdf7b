"""Modules against their functions: values and gradients, moves, copies and files."""

import copy
import io
import pickle
from collections.abc import Callable
from dataclasses import dataclass, field
from inspect import signature
from typing import Any

import pytest
import torch
from torch import Tensor

import otloss
from otloss import nn as modules
from otloss.costs import LineCost, PointCost
from otloss.losses import histogram_mean
from tests.errors import raising


def drawn(*shape: int, seed: int) -> Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed))


# Of mass one in float32 and in float64.
P = torch.tensor([[4, 0, 3, 1, 8], [1, 5, 7, 2, 1], [0, 0, 9, 6, 1]]) / 16
Q = torch.tensor([[2, 7, 1, 6, 0], [3, 3, 3, 3, 4], [5, 1, 0, 2, 8]]) / 16
X, Y = drawn(5, seed=2) * 4, drawn(5, seed=3) * 4
PARENT, LENGTH = torch.tensor([-1, 0, 0, 1, 1]), drawn(5, seed=4)
MATRIX = drawn(5, 5, seed=5)
CLOUD, OTHER = drawn(5, 2, seed=6), drawn(5, 2, seed=7)
COST = PointCost(CLOUD)
CLOUDS = drawn(3, 5, 2, seed=9), drawn(3, 5, 2, seed=10)
Z, LABELS, WEIGHT = 4 * drawn(3, 5, seed=11), torch.tensor([0, -100, 3]), drawn(3, seed=12)
NUMBERS = torch.tensor([3.0, torch.nan, 0.0, 2049.0, 7.5])  # 2049 is not a number of float16


PLAIN = (modules.SoftSort, modules.SoftRank, modules.SoftTopK, modules.JdotLoss)  # without a reduction


@dataclass
class Case:
    """A module, its function by the same settings, and what both are called with."""

    make: Callable[..., torch.nn.Module]
    function: Callable[..., Tensor]
    settings: dict[str, Any]
    inputs: tuple[Tensor, ...] = (P, Q)
    weights: dict[str, Tensor] = field(default_factory=dict)

    @property
    def unreduced(self) -> torch.nn.Module:
        return self.make(**self.settings) if self.make in PLAIN else self.make(**self.settings, reduction="none")

    def of_function(self, *inputs: Tensor, **reduction: str) -> Tensor:
        return self.function(*inputs, **self.settings, **self.weights, **reduction)


WEIGHED: dict[str, Any] = {"inputs": (Z, LABELS), "weights": {"sample_weight": WEIGHT}}
CASES = {
    "Wasserstein1d": Case(modules.Wasserstein1d, otloss.wasserstein_1d, {"x": X, "y": Y, "order": 2}),
    "CdfDistance": Case(modules.CdfDistance, otloss.cdf_distance, {"x": X, "power": 1}),
    "WassersteinCircular": Case(modules.WassersteinCircular, otloss.wasserstein_circular, {"x": X, "period": 5.0}),
    "WassersteinTree": Case(modules.WassersteinTree, otloss.wasserstein_tree, {"parent": PARENT, "length": LENGTH}),
    "SlicedWasserstein": Case(
        modules.SlicedWasserstein, otloss.sliced_wasserstein, {"projections": drawn(4, 2, seed=8), "order": 1},
        (*CLOUDS, P, Q),
    ),
    "CloudLoss": Case(modules.CloudLoss, otloss.cloud_loss, {"blur": 0.3, "tolerance": 1e-6}, (*CLOUDS, P, Q)),
    "CloudLoss of slices": Case(
        modules.CloudLoss, otloss.cloud_loss, {"kind": "sliced", "projections": drawn(4, 2, seed=8)}, (*CLOUDS, P, Q)
    ),
    "Emd": Case(modules.Emd, otloss.emd, {"cost": MATRIX}),
    "Sinkhorn": Case(
        modules.Sinkhorn, otloss.sinkhorn, {"cost": COST, "epsilon": 0.3, "grad": "implicit", "marginal_penalty": 2.0}
    ),
    "SinkhornDivergence": Case(
        modules.SinkhornDivergence, otloss.sinkhorn_divergence, {"cost": COST, "epsilon": torch.tensor([0.3, 0.2, 0.1])}
    ),
    "SinkhornDivergence of matrices": Case(
        modules.SinkhornDivergence, otloss.sinkhorn_divergence,
        {"cost": MATRIX, "cost_p": COST, "cost_q": COST.dense(), "epsilon": 0.3, "epsilon_relative_to": "mean_cost"},
    ),
    "OrdinalLoss": Case(
        modules.OrdinalLoss, otloss.ordinal_loss,
        {"x": X.sort().values, "power": 1, "cross_entropy": 0.3, "class_weight": Y, "ignore_index": -100}, **WEIGHED,
    ),
    "OrdinalLoss of a circle": Case(
        modules.OrdinalLoss, otloss.ordinal_loss, {"circular": True, "period": 12.0, "x": X.sort().values, "dim": 1},
        (Z, P), {"sample_weight": WEIGHT},
    ),
    "OrdinalLoss of a cost": Case(
        modules.OrdinalLoss, otloss.ordinal_loss, {"cost": LineCost(X), "ignore_index": -100}, **WEIGHED
    ),
    "ThresholdLoss": Case(
        modules.ThresholdLoss, otloss.losses.threshold_loss,
        {"kind": "immediate", "class_weight": Y, "ignore_index": -100}, **WEIGHED,
    ),
    "HistogramLoss": Case(
        modules.HistogramLoss, otloss.histogram_loss,
        {"bins": X.sort().values, "encoding": "gaussian", "sigma": 0.7, "cross_entropy": 0.2},
        (Z, X.mean() + torch.tensor([0.0, 0.1, -0.1])), {"sample_weight": WEIGHT},
    ),
    "NumberTokenLoss": Case(modules.NumberTokenLoss, otloss.number_token_loss, {"values": NUMBERS}, **WEIGHED),
    "NumberTokenLoss of the mean": Case(
        modules.NumberTokenLoss, otloss.number_token_loss,
        {"values": NUMBERS, "form": "mse", "scaling": "log", "text": 2.0, "ignore_index": 3},
        (Z, LABELS.clamp(min=0)), {"sample_weight": WEIGHT},
    ),
    "SoftSort": Case(modules.SoftSort, otloss.soft_sort, {"epsilon": 0.05, "descending": True}, (P,)),
    "SoftRank": Case(modules.SoftRank, otloss.soft_rank, {"epsilon": 0.05, "descending": True}, (P,)),
    "SoftTopK": Case(modules.SoftTopK, otloss.soft_top_k, {"k": 2, "regularization": "quadratic"}, (P,)),
    "SetLoss": Case(modules.SetLoss, otloss.losses.set_loss, {"epsilon": 0.1}, (CLOUDS[0], P)),
    "Crps": Case(modules.Crps, otloss.losses.crps, {"fair": True}, (Z, WEIGHT, P)),
    "JdotLoss": Case(
        modules.JdotLoss, otloss.losses.jdot_loss, {"feature_weight": 0.5, "epsilon": 0.2, "marginal_penalty": 2.0},
        (CLOUD, OTHER[:3], torch.tensor([4, 0, 1, 3, 3]), Z),
    ),
    "DocumentDistance": Case(modules.DocumentDistance, otloss.losses.document_distance, {"embedding": CLOUD}),
    "NgramDistance": Case(
        modules.NgramDistance, otloss.losses.ngram_distance, {"n": 2, "order_weight": 0.5, "metric": "l1"}, CLOUDS
    ),
}  # fmt: skip
every_case = pytest.mark.parametrize("case", CASES.values(), ids=CASES)


@every_case
def test_modules_equal_their_functions(case: Case) -> None:
    inputs = [t.clone().requires_grad_(t.is_floating_point()) for t in case.inputs]
    leaves = [t for t in inputs if t.requires_grad]
    own = {"reduction": "none"} if "reduction" in signature(case.function).parameters else {}
    value, expected = case.unreduced(*inputs, **case.weights), case.of_function(*inputs, **own)
    assert torch.equal(value, expected)
    weights = drawn(*value.shape, seed=11)
    gradients = [torch.autograd.grad((v * weights).sum(), leaves, allow_unused=True) for v in (value, expected)]
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))
    if case.make in PLAIN:
        return
    reductions = {"mean": value.mean(), "sum": value.sum()}
    for reduction, plain in reductions.items():
        module = case.make(**case.settings, reduction=reduction)
        by_function = case.of_function(*inputs, reduction=reduction) if own else plain
        torch.testing.assert_close(module(*inputs, **case.weights), by_function)


@every_case
def test_copies_files_and_moves(case: Case) -> None:
    """In half precision what is held keeps its digits."""
    module = case.unreduced
    expected = module(*case.inputs, **case.weights)
    loaded = copy.deepcopy(module)
    for buffer in loaded.buffers():
        buffer.zero_()
    file = io.BytesIO()
    torch.save(module.state_dict(), file)
    file.seek(0)
    loaded.load_state_dict(torch.load(file))
    moved = (copy.deepcopy(module).half(), copy.deepcopy(module).to(torch.bfloat16))
    for again in (copy.deepcopy(module), pickle.loads(pickle.dumps(module)), loaded, *moved):
        assert torch.equal(again(*case.inputs, **case.weights), expected)
    wide = [t.double() if t.is_floating_point() else t for t in case.inputs]
    value = copy.deepcopy(module).double()(*wide, **case.weights)
    assert value.dtype == torch.float64
    torch.testing.assert_close(value.float(), expected, rtol=1e-3, atol=1e-4)
    assert all(t.device.type == "meta" for t in torch.nn.Sequential(module).to("meta").buffers())


def test_names_in_files_stay_and_every_module_is_public() -> None:
    names = {name: list(case.unreduced.state_dict()) for name, case in CASES.items()}
    assert names["Emd"] == ["cost.matrix"]
    assert names["Sinkhorn"] == ["cost.x"]
    assert names["SinkhornDivergence"] == ["epsilon", "cost.x"]
    assert names["OrdinalLoss"] == ["x", "class_weight"]
    assert names["HistogramLoss"] == ["bins"]
    assert names["NumberTokenLoss"] == ["values"]
    assert list(modules.__all__) == sorted(modules.__all__)
    assert {case.make.__name__ for case in CASES.values()} | {"CornHead", "CumulativeLinkHead"} == set(modules.__all__)


def test_parameters_are_trained_and_other_calls() -> None:
    for options in ({"x": torch.nn.Parameter(X.sort().values)}, {"cost": torch.nn.Parameter(MATRIX.clone())}):
        ordinal = modules.OrdinalLoss(**options)  # type: ignore[arg-type]
        ordinal(Z, P).backward()
        assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in ordinal.parameters())
    with pytest.raises(ValueError, match=r"mean\" over an empty batch of shape \(0,\)"):
        modules.CdfDistance()(P[:0], P[:0])
    assert modules.CdfDistance(reduction="sum")(P[:0], P[:0]).item() == 0
    loss = modules.SlicedWasserstein(projections=8)
    values = [loss(*CLOUDS, generator=torch.Generator().manual_seed(seed)) for seed in (0, 0, 1)]
    assert values[0] == values[1] != values[2]
    assert torch.equal(modules.HistogramLoss(bins=LENGTH.cumsum(0)).mean(Z), histogram_mean(Z, LENGTH.cumsum(0)))


test_bad_settings = raising(
    (lambda: modules.Emd(cost=MATRIX.clone().requires_grad_()), "matrix requires a gradient but is not"),
    (lambda: modules.CdfDistance(x=2 * X.clone().requires_grad_()), "x requires a gradient"),
    (lambda: modules.Emd(cost=MATRIX)(P, Q, MATRIX), TypeError, r"Emd got 3 inputs, expected at most \('p', 'q'\)"),
)


@every_case
def test_settings_are_those_of_the_function(case: Case) -> None:
    own, of_function = (signature(f).parameters for f in (case.make, case.function))
    added = set() if case.make in PLAIN or "reduction" in of_function else {"reduction"}
    assert set(own) - added == {name for name in own if name in of_function}
    assert all(own[name].default == of_function[name].default for name in set(own) - added)
    with pytest.raises(TypeError, match=rf"{case.make.__name__}.* 'sigmaa'"):
        case.make(**case.settings, sigmaa=1)
