"""Modules against their functions, moves, copies and files; the heads of ordered classes."""

import copy
import io
import itertools
import pickle
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from inspect import signature
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.utils.parametrize import register_parametrization

import otloss
from otloss import nn
from otloss import nn as modules
from otloss.costs import CosineCost, DenseCost, LineCost, PointCost
from otloss.losses import cumulative_log_probabilities, decode_classes, histogram_mean
from tests.errors import raising
from tests.samples import sampled


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


def test_arrays_of_numpy_are_buffers_of_their_own() -> None:
    x = np.array([0.0, 1.0, 4.0])
    for module in (nn.OrdinalLoss(x=x), nn.Wasserstein1d(x), nn.Emd(abs(x[:, None] - x))):
        (expected,) = module.state_dict().values()
        expected = expected.clone()
        x += 1
        torch.testing.assert_close(*module.state_dict().values(), expected, rtol=0, atol=0)


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
    (lambda: modules.Emd(CosineCost(torch.nn.Parameter(torch.eye(3)))), "unit of CosineCost .* would not follow"),
    (lambda: modules.Emd(2 * MATRIX.clone().requires_grad_()), "matrix of DenseCost .* call the function"),
    (lambda: modules.CdfDistance(x=2 * X.clone().requires_grad_()), "x requires a gradient"),
    (lambda: modules.Emd(cost=MATRIX)(P, Q, MATRIX), TypeError, r"Emd.forward\(\) takes 3 positional arguments"),
    (lambda: modules.Emd(MATRIX, masss=0.5), TypeError, "did you mean mass="),  # type: ignore[call-arg]
)


CHANGED = {
    "exact": lambda cost: modules.Emd(cost=cost, reduction="none"),
    "entropic": lambda cost: modules.Sinkhorn(cost=cost, epsilon=0.1, reduction="none"),
    "ordinal": lambda cost: modules.OrdinalLoss(cost=cost, reduction="none"),
    "divergence": lambda cost: modules.SinkhornDivergence(cost=cost, epsilon=0.1, reduction="none"),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("entry", [torch.nan, torch.inf, -torch.inf, -0.25])
@pytest.mark.parametrize("name", CHANGED)
def test_costs_that_training_has_changed_are_checked_as_those_of_the_function(
    name: str, entry: float, dtype: torch.dtype
) -> None:
    """Kernels read the entries of a matrix as they are."""
    matrix = ((MATRIX + MATRIX.mT) * (1 - torch.eye(5))).to(dtype)
    loss = CHANGED[name](torch.nn.Parameter(matrix.clone()))
    with torch.no_grad():
        loss.cost.matrix[0, 1] = loss.cost.matrix[1, 0] = matrix[0, 1] = matrix[1, 0] = entry
    inputs = (Z, torch.tensor([0, 1, 3])) if name == "ordinal" else (P.to(dtype), Q.to(dtype))
    if name in ("exact", "entropic") and entry in (torch.inf, -0.25):
        function = otloss.emd if name == "exact" else partial(otloss.sinkhorn, epsilon=0.1)
        for p, q in (inputs, (None, inputs[1])):
            torch.testing.assert_close(loss(p, q).detach(), function(p, q, matrix))
    else:
        with pytest.raises(ValueError, match="cost matrix holds"):
            loss(*inputs)


def test_parts_of_costs_have_parametrizations() -> None:
    class Symmetric(torch.nn.Module):
        def forward(self, matrix: Tensor) -> Tensor:
            return matrix.triu(1) + matrix.triu(1).mT

    loss = modules.SinkhornDivergence(cost=torch.nn.Parameter(Symmetric()(MATRIX)), epsilon=0.1)
    register_parametrization(loss.cost, "matrix", Symmetric())
    optimizer = torch.optim.SGD(loss.parameters(), lr=0.1)
    values = []
    for _ in range(3):
        optimizer.zero_grad()
        values.append(loss(P, Q))
        values[-1].backward()
        optimizer.step()
    assert values[0] > values[1] > values[2]
    cost = modules.Emd(cost=PointCost(torch.nn.Parameter(CLOUD))).cost
    register_parametrization(cost, "x", torch.nn.Dropout())
    present = cost()
    assert present.x is present.y


HELD: dict[str, Callable[[], torch.nn.Module]] = {
    "matrix": lambda: modules.Emd(cost=torch.rand(5, 5)),
    "signed matrix": lambda: modules.Sinkhorn(cost=torch.rand(5, 5) - 1, epsilon=0.1),
    "parameter": lambda: modules.Sinkhorn(cost=torch.nn.Parameter(torch.rand(5, 5)), epsilon=0.1),
    "object": lambda: modules.Emd(cost=DenseCost(torch.rand(5, 5))),
    "clouds": lambda: modules.SinkhornDivergence(cost=PointCost(torch.rand(5, 2), torch.rand(5, 2)), epsilon=0.1),
    "line": lambda: modules.Emd(cost=LineCost(torch.rand(5))),
}


@pytest.mark.parametrize("kind", HELD)
def test_costs_on_the_meta_device_are_loaded_later(kind: str) -> None:
    """As models of transformers are made by `from_pretrained`."""
    loss = HELD[kind]()
    with torch.device("meta"):
        empty = HELD[kind]()
    with pytest.raises(ValueError, match=r"on the meta device|one device"):
        empty(P, Q)
    empty.load_state_dict(loss.state_dict(), assign=True)
    assert torch.equal(empty(P, Q), loss(P, Q))


@pytest.mark.parametrize("cost", [torch.nn.Parameter(MATRIX), PointCost(torch.nn.Parameter(CLOUD), OTHER)])
def test_costs_of_several_models_are_not_mapped(cost: Any) -> None:
    models = [modules.Sinkhorn(cost=copy.deepcopy(cost), epsilon=0.1) for _ in range(2)]
    parameters, buffers = torch.func.stack_module_state(models)

    def of_one(own: dict[str, Tensor], fixed: dict[str, Tensor], p: Tensor) -> Tensor:
        return torch.func.functional_call(models[0], (own, fixed), (p, Q[0]))

    for p, axis in ((P[:2], 0), (P[0], None)):
        with pytest.raises(NotImplementedError, match=r"does not work inside torch.vmap.* pass the batch itself"):
            torch.vmap(of_one, in_dims=(0, 0, axis))(parameters, buffers, p)


@every_case
def test_settings_are_those_of_the_function(case: Case) -> None:
    own, of_function = (signature(f).parameters for f in (case.make, case.function))
    added = set() if case.make in PLAIN or "reduction" in of_function else {"reduction"}
    assert set(own) - added == {name for name in own if name in of_function}
    assert all(own[name].default == of_function[name].default for name in set(own) - added)
    with pytest.raises(TypeError, match=rf"{case.make.__name__}.* 'sigmaa'"):
        case.make(**case.settings, sigmaa=1)


mpmath = pytest.importorskip("mpmath")
SCORES = [-100.0, -9.0, -0.3, 0.0, 1.7, 30.0, 100.0]
GAPS = [-90.0, -12.0, -7.1, -6.9, 0.0, 2.0, 4.5, 100.0]  # logarithms


def exactly(score: float, log_gaps: Tensor, link: str) -> list[float]:
    """log P in 150 digits; where it has too many, the log of the smallest probability of so many digits."""
    with mpmath.workdps(150):
        distribution = {
            "logit": lambda a: (1 / (1 + mpmath.exp(-a)), 1 / (1 + mpmath.exp(a))),
            "probit": lambda a: (mpmath.ncdf(a), mpmath.ncdf(-a)),
            "cloglog": lambda a: (-mpmath.expm1(-mpmath.exp(a)), mpmath.exp(-mpmath.exp(a))),
        }[link]
        thresholds = [mpmath.mpf(0)]
        for gap in log_gaps.tolist():
            thresholds.append(thresholds[-1] + mpmath.exp(gap))
        both = [distribution(t - mpmath.mpf(score)) for t in thresholds]
        below = [mpmath.mpf(0), *(b for b, _ in both), mpmath.mpf(1)]
        above = [mpmath.mpf(1), *(a for _, a in both), mpmath.mpf(0)]
        pairs = zip(itertools.pairwise(below), itertools.pairwise(above), strict=True)
        return [float(mpmath.log(max(hi - lo, over - under))) for (lo, hi), (over, under) in pairs]


@pytest.mark.parametrize("link", ["logit", "probit", "cloglog"])
def test_log_probabilities_keep_their_digits_in_both_tails(link: str) -> None:
    for gaps in (torch.tensor(GAPS[:-1]), torch.tensor([0.5]), torch.tensor([9.0]), torch.zeros(0)):
        score = torch.tensor(SCORES, requires_grad=True)
        leaf = gaps.clone().requires_grad_()
        actual = cumulative_log_probabilities(score, leaf, link)
        expected = torch.tensor([exactly(s, gaps, link) for s in SCORES], dtype=torch.float64)
        assert actual.dtype == torch.float32
        shown = expected > -1e20  # Hazards of exp(100) end at -1e26.
        tolerance = 1e-5 if link == "probit" else 3e-6
        torch.testing.assert_close(actual.double()[shown], expected[shown], rtol=tolerance, atol=tolerance)
        assert (actual[~shown] < -1e20).all()
        torch.testing.assert_close(actual.exp().sum(-1), torch.ones(len(SCORES)))
        gradients = torch.autograd.grad(actual.clamp(min=-1e9).sum(), (score, leaf))
        assert all(torch.isfinite(gradient).all() for gradient in gradients)
    gaps = torch.tensor(GAPS, requires_grad=True)  # the last one ends beyond all scores
    actual = cumulative_log_probabilities(torch.tensor(SCORES), gaps, link)
    assert torch.isfinite(actual).all()
    assert torch.isfinite(torch.autograd.grad(actual.sum(), gaps)[0]).all()


def test_corn_head_has_the_loss_of_coral_pytorch() -> None:
    """0.680427193185849 is corn_loss of coral-pytorch 1.4.0, a mean over the 13 binary tasks of four rows."""
    z = [[2.1, 1.8, -2.1, -1.8], [1.9, 0.4, -1.5, -1.3], [1.9, 1.8, 1.7, -1.6], [-0.5, -0.2, 0.3, 0.8]]
    features = torch.tensor(z, dtype=torch.float64)
    y = torch.tensor([2, 0, 4, 3])
    head = nn.CornHead(4, 5, dtype=torch.float64)
    with torch.no_grad():
        head.scores.weight.copy_(torch.eye(4))
        head.scores.bias.zero_()
    actual = head(features).detach()
    tasks = (y + 1).clamp(max=4).sum()
    loss = torch.nn.functional.nll_loss(actual, y, reduction="sum") / tasks
    torch.testing.assert_close(float(loss), 0.680427193185849)
    torch.testing.assert_close(actual.exp().sum(-1), torch.ones(4).double())
    above = 1 - actual.exp().cumsum(-1)[:, :-1]
    torch.testing.assert_close(above, features.sigmoid().cumprod(-1))
    assert torch.equal(head.predict(features), (above > 0.5).sum(-1))  # as corn_label_from_logits


def test_decisions() -> None:
    P = np.random.default_rng(1).dirichlet(np.full(5, 0.6), 60)
    P[0], P[1] = [0.1, 0.4, 0.5, 0, 0], [0.25, 0.25, 0.0, 0.5, 0.0]  # ties go to the lower class
    x = np.array([0.0, 1.0, 2.0, 4.0, 8.0])
    expected = {"argmax": P.argmax(1), "median": (P.cumsum(1) < 0.5 - 1e-12).sum(1)}
    expected["mean"] = np.abs(x - (P @ x)[:, None]).argmin(1)
    assert (expected["median"][:2] == 1).all()
    for rule, classes in expected.items():
        for dtype in (torch.float32, torch.float64):
            given = torch.tensor(x, dtype=dtype) if rule == "mean" else None
            logits = torch.from_numpy(P).log().to(dtype).reshape(30, 2, 5)
            np.testing.assert_array_equal(decode_classes(logits, rule, x=given).reshape(60), classes)


def test_state() -> None:
    head = nn.CumulativeLinkHead(3, 5)
    features = torch.randn(2, 4, 3, generator=torch.Generator().manual_seed(0))
    actual = head(features)
    assert actual.shape == (2, 4, 5)
    assert (head.thresholds.diff() > 0).all()
    assert torch.equal(head.predict(features), decode_classes(actual))
    for link in ("logit", "probit", "cloglog"):
        start = nn.CumulativeLinkHead(3, 5, link=link)
        torch.testing.assert_close(start(torch.zeros(3)).exp(), torch.full((5,), 0.2))
    assert list(head.state_dict()) == ["log_gaps", "score.weight", "score.bias"]
    empty = nn.CumulativeLinkHead(3, 5, device="meta").to_empty(device="cpu")
    empty.load_state_dict(head.state_dict())
    for again in (copy.deepcopy(head), pickle.loads(pickle.dumps(head)), empty):
        assert torch.equal(again(features), actual)
    torch.testing.assert_close(copy.deepcopy(head).double()(features.double()).float(), actual)
    half = copy.deepcopy(head).bfloat16()
    assert half(features.bfloat16()).dtype == half.thresholds.dtype == torch.float32
    for autocast in (head, nn.CornHead(3, 5)):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert autocast(features).dtype == torch.float32


def test_settings_are_shown() -> None:
    shown = repr(nn.CloudLoss(marginal_penalty=(0.5, torch.ones(2)), blur=0.1))
    assert "blur=0.1, " in shown
    assert "marginal_penalty=(0.5, (2,) float32), " in shown


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_probit_derivatives_far_out(dtype: torch.dtype) -> None:
    """d log Phi(-x) / dx is -x - 1 / x up to x^-3, where the derivative of torch's log_ndtr has lost its digits."""
    score = torch.tensor([1e2, 1e3, 1e5, 1e8], dtype=dtype, requires_grad=True)
    lowest = cumulative_log_probabilities(score, torch.zeros(2, dtype=dtype), "probit")[:, 0]
    (actual,) = torch.autograd.grad(lowest.sum(), score)
    torch.testing.assert_close(actual, (-score - 1 / score).detach(), rtol=1e-6, atol=0)
    gaps = torch.tensor([30.0, 0.0], dtype=dtype, requires_grad=True)
    score = torch.cat([score.detach(), torch.tensor([1e30, -1e30], dtype=dtype)]).requires_grad_()
    values = cumulative_log_probabilities(score, gaps, "probit")
    assert torch.isfinite(values).all()
    assert all(torch.isfinite(g).all() for g in torch.autograd.grad(values.sum(), [score, gaps]))


HEADS = {"corn": nn.CornHead(3, 5)} | {
    link: nn.CumulativeLinkHead(3, 5, link=link) for link in ("logit", "probit", "cloglog")
}


@pytest.mark.filterwarnings("ignore")  # the compilers warn
@pytest.mark.parametrize("head", sampled(2, HEADS.values()), ids=HEADS)
def test_heads_are_exported_traced_and_compiled_whole(head: torch.nn.Module) -> None:
    """Deployed models have heads as last layers: also for other numbers of rows, and for scores far out."""
    example, features = torch.randn(2, 3), torch.tensor([[0.1, -0.4, 0.3], [40.0, 9, 2], [-40.0, 3, 8], [-9.0, 1, 3]])
    rows = {0: torch.export.Dim("rows")}
    exported = torch.export.export(head, (example,), dynamic_shapes=(rows,))
    torch._dynamo.reset()
    compiled = torch.compile(head, fullgraph=True, backend="eager")
    for recorded in (exported.module(), torch.jit.trace(head, (example,)), compiled):
        torch.testing.assert_close(recorded(features), head(features), rtol=1e-5, atol=1e-5)
    decision = _Decision(head)
    for rule in ("argmax", "median", "mean"):
        decision.rule = rule
        exported_decision = torch.export.export(decision, (example,), dynamic_shapes=(rows,)).module()
        for recorded in (exported_decision, torch.jit.trace(decision, (example,))):
            torch.testing.assert_close(recorded(features), head.predict(features, rule))
    operations = {str(node.target) for node in exported.graph.nodes}
    # ONNX makes NaN and infinity of them.
    assert not {name for name in operations if any(op in name for op in ("erfcx", "log_ndtr", "log_sigmoid"))}


class _Decision(torch.nn.Module):
    def __init__(self, head: torch.nn.Module) -> None:
        super().__init__()
        self.head, self.rule = head, "median"

    def forward(self, features: Tensor) -> Tensor:
        return self.head.predict(features, self.rule)


class _AllHeads(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.heads = torch.nn.ModuleList(HEADS.values())

    def forward(self, features: Tensor) -> Tensor:
        return torch.stack([head(features) for head in self.heads])


@pytest.mark.filterwarnings("ignore")  # the exporter warns
def test_heads_in_onnx(tmp_path: Path) -> None:
    runtime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    heads, rows = copy.deepcopy(_AllHeads()), {0: torch.export.Dim("rows")}
    for name, parameter in heads.named_parameters():  # scores far out, whatever the random weights are
        if name.endswith("weight"):
            torch.nn.init.constant_(parameter, 0.5)
    program = torch.onnx.export(heads, (torch.randn(2, 3),), dynamo=True, dynamic_shapes=(rows,), verbose=False)
    program.save(tmp_path / "heads.onnx")
    session = runtime.InferenceSession(tmp_path / "heads.onnx")
    features = 30 * torch.randn(200, 3, generator=torch.Generator().manual_seed(0))
    (actual,) = session.run(None, {session.get_inputs()[0].name: features.numpy()})
    expected = copy.deepcopy(heads).double()(features.double()).detach()
    assert expected.amin((1, 2)).max() < -30
    torch.testing.assert_close(torch.as_tensor(actual).double(), expected, rtol=1e-4, atol=1e-4)


test_bad_heads = raising(
    (lambda: nn.CumulativeLinkHead(3, 4)(torch.zeros(2, 4)), r"features has shape \(2, 4\)"),
    (lambda: decode_classes(torch.zeros(2, 3), x=torch.arange(3)), "x is given with rule='median'"),
)
