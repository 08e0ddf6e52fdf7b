"""Modules against their functions: values and gradients, moves, copies and files."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from otloss import (
    cdf_distance,
    emd,
    sinkhorn,
    sinkhorn_divergence,
    sliced_wasserstein,
    wasserstein_1d,
    wasserstein_circular,
    wasserstein_tree,
)
from otloss import nn as modules
from otloss.costs import CosineCost, Cost, DenseCost, GridCost, LineCost, PointCost
from otloss.solvers.sorting import soft_rank, soft_sort, soft_top_k


def drawn(*shape: int, seed: int) -> Tensor:
    return torch.rand(*shape, generator=torch.Generator().manual_seed(seed))


# Of mass one in float32 and in float64.
P = torch.tensor([[4, 0, 3, 1, 8], [1, 5, 7, 2, 1], [0, 0, 9, 6, 1]]) / 16
Q = torch.tensor([[2, 7, 1, 6, 0], [3, 3, 3, 3, 4], [5, 1, 0, 2, 8]]) / 16
X, Y = drawn(5, seed=2) * 4, drawn(5, seed=3) * 4
PARENT, LENGTH = torch.tensor([-1, 0, 0, 1, 1]), drawn(5, seed=4)
MATRIX = drawn(5, 5, seed=5)
CLOUD, OTHER = drawn(5, 2, seed=6), drawn(5, 2, seed=7)
DIRECTIONS = drawn(4, 2, seed=8)
COST = PointCost(CLOUD)
CLOUDS = drawn(3, 5, 2, seed=9), drawn(3, 5, 2, seed=10)


@dataclass
class Case:
    """A module, its function, and what both are called with."""

    name: str
    make: Callable[..., torch.nn.Module]
    call: Callable[..., Tensor]
    inputs: tuple[Tensor, ...] = (P, Q)
    is_loss: bool = True


CASES = [
    Case(
        "Wasserstein1d",
        lambda **o: modules.Wasserstein1d(x=X, y=Y, order=2, **o),
        lambda p, q: wasserstein_1d(p, q, X, Y, order=2),
    ),
    Case(
        "CdfDistance", lambda **o: modules.CdfDistance(x=X, power=1, **o), lambda p, q: cdf_distance(p, q, X, power=1)
    ),
    Case(
        "WassersteinCircular",
        lambda **o: modules.WassersteinCircular(x=X, period=5.0, **o),
        lambda p, q: wasserstein_circular(p, q, X, period=5.0),
    ),
    Case(
        "WassersteinTree",
        lambda **o: modules.WassersteinTree(parent=PARENT, length=LENGTH, **o),
        lambda p, q: wasserstein_tree(p, q, PARENT, LENGTH),
    ),
    Case(
        "SlicedWasserstein",
        lambda **o: modules.SlicedWasserstein(projections=DIRECTIONS, order=1, **o),
        lambda x, y, a, b: sliced_wasserstein(x, y, a, b, projections=DIRECTIONS, order=1),
        (*CLOUDS, P, Q),
    ),
    Case("Emd", lambda **o: modules.Emd(cost=MATRIX, **o), lambda p, q: emd(p, q, MATRIX)),
    Case(
        "Sinkhorn",
        lambda **o: modules.Sinkhorn(cost=COST, epsilon=0.3, grad="implicit", marginal_penalty=2.0, **o),
        lambda p, q: sinkhorn(p, q, COST, epsilon=0.3, grad="implicit", marginal_penalty=2.0),
    ),
    Case(
        "SinkhornDivergence",
        lambda **o: modules.SinkhornDivergence(cost=COST, epsilon=torch.tensor([0.3, 0.2, 0.1]), **o),
        lambda p, q: sinkhorn_divergence(p, q, COST, epsilon=torch.tensor([0.3, 0.2, 0.1])),
    ),
    Case(
        "SinkhornDivergence of matrices",
        lambda **o: modules.SinkhornDivergence(
            cost=MATRIX, cost_p=COST, cost_q=COST.dense(), epsilon=0.3, epsilon_relative_to="mean_cost", **o
        ),
        lambda p, q: sinkhorn_divergence(
            p, q, MATRIX, cost_p=COST, cost_q=COST.dense(), epsilon=0.3, epsilon_relative_to="mean_cost"
        ),
    ),
    Case(
        "SoftSort",
        lambda: modules.SoftSort(epsilon=0.05, descending=True),
        lambda x: soft_sort(x, epsilon=0.05, descending=True),
        (P,),
        is_loss=False,
    ),
    Case(
        "SoftRank",
        lambda: modules.SoftRank(epsilon=0.05, descending=True),
        lambda x: soft_rank(x, epsilon=0.05, descending=True),
        (P,),
        is_loss=False,
    ),
    Case("SoftTopK", lambda: modules.SoftTopK(k=2, epsilon=0.2), lambda x: soft_top_k(x, 2, epsilon=0.2), (P,), False),
]
every_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
every_loss = pytest.mark.parametrize("case", [c for c in CASES if c.is_loss], ids=lambda case: case.name)


def unreduced(case: Case) -> torch.nn.Module:
    return case.make(reduction="none") if case.is_loss else case.make()


@every_case
def test_modules_equal_their_functions(case: Case) -> None:
    leaves = [t.clone().requires_grad_() for t in case.inputs]
    value, expected = unreduced(case)(*leaves), case.call(*leaves)
    assert torch.equal(value, expected)
    weights = drawn(*value.shape, seed=11)
    found = torch.autograd.grad((value * weights).sum(), leaves)
    for by_module, by_function in zip(found, torch.autograd.grad((expected * weights).sum(), leaves), strict=True):
        assert torch.equal(by_module, by_function)


@every_loss
def test_reductions(case: Case) -> None:
    values = case.call(*case.inputs)
    torch.testing.assert_close(case.make()(*case.inputs), values.mean())
    torch.testing.assert_close(case.make(reduction="sum")(*case.inputs), values.sum())
    with pytest.raises(ValueError, match="reduction is 'median', expected one of"):
        case.make(reduction="median")


def test_the_mean_of_nothing_is_refused() -> None:
    empty = torch.zeros(0, 5)
    with pytest.raises(ValueError, match=r"mean\" over an empty batch of shape \(0,\)"):
        modules.CdfDistance()(empty, empty)
    assert modules.CdfDistance(reduction="sum")(empty, empty).item() == 0


@every_case
def test_copies_and_files_give_the_same(case: Case) -> None:
    module = unreduced(case)
    expected = module(*case.inputs)
    for twin in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert repr(twin) == repr(module)
        assert torch.equal(twin(*case.inputs), expected)
    file = io.BytesIO()
    torch.save(module.state_dict(), file)
    file.seek(0)
    for held in copy.deepcopy(module).state_dict().values():
        assert isinstance(held, Tensor)
    other = copy.deepcopy(module)
    for buffer in other.buffers():
        buffer.zero_()
    other.load_state_dict(torch.load(file))
    assert torch.equal(other(*case.inputs), expected)


@every_case
def test_moves_to_other_dtypes(case: Case) -> None:
    module, wide = unreduced(case), [t.double() for t in case.inputs]
    expected = module(*case.inputs)
    for moved in (copy.deepcopy(module).double(), copy.deepcopy(module).to(torch.float64)):
        assert all(t.dtype == torch.float64 for t in moved.buffers() if t.is_floating_point())
        value = moved(*wide)
        assert value.dtype == torch.float64
        torch.testing.assert_close(value.float(), expected, rtol=1e-3, atol=1e-4)
    # In half precision what is held keeps its digits.
    for moved in (copy.deepcopy(module).half(), copy.deepcopy(module).to(torch.bfloat16)):
        assert torch.equal(moved(*case.inputs), expected)
    assert torch.nn.Sequential(copy.deepcopy(module)).to("meta")[0].state_dict().keys() == module.state_dict().keys()
    assert all(t.device.type == "meta" for t in copy.deepcopy(module).to("meta").buffers())


COSTS: list[Cost] = [
    DenseCost(MATRIX),
    LineCost(X, 2),
    PointCost(CLOUD, OTHER, metric="euclidean"),
    PointCost(CLOUD, metric="cosine"),
    CosineCost(CLOUD),
    GridCost((5, 1), spacing=(2.0, 1.0)),
]


@pytest.mark.parametrize("cost", COSTS, ids=repr)
def test_every_cost_is_held(cost: Cost) -> None:
    module = modules.Sinkhorn(cost=cost, epsilon=0.5, reduction="none")
    expected = sinkhorn(P, Q, cost, epsilon=0.5)
    assert torch.equal(module(P, Q), expected)
    assert torch.equal(pickle.loads(pickle.dumps(module))(P, Q), expected)
    assert cost.dtype == torch.float32
    moved = module.double()
    assert moved.cost().dtype == torch.float64
    assert cost.dtype == torch.float32, "the cost that was given stays as it was"
    torch.testing.assert_close(moved(P.double(), Q.double()).float(), expected, rtol=1e-4, atol=1e-5)
    assert module.cost().shape == cost.shape
    assert repr(cost) in repr(modules.Emd(cost=cost))


class Doubled(Cost):
    """A cost made of another one."""

    def __init__(self, inner: Cost) -> None:
        self.inner = inner

    @property
    def shape(self) -> tuple[int, int]:
        return self.inner.shape

    @property
    def _data(self) -> Tensor:
        return self.inner._data

    @property
    def T(self) -> Doubled:  # noqa: N802
        return Doubled(self.inner.T)

    def rows(self, index: Tensor) -> Tensor:
        return 2 * self.inner.rows(index)


def test_costs_within_costs_are_held() -> None:
    module = modules.Emd(cost=Doubled(LineCost(X)), reduction="none")
    assert list(module.state_dict()) == ["cost.inner.x"]
    torch.testing.assert_close(module(P, Q), 2 * wasserstein_1d(P, Q, X))
    assert module.double().cost().dtype == torch.float64


def test_one_cloud_stays_one() -> None:
    held = copy.deepcopy(modules.SinkhornDivergence(cost=COST, epsilon=0.3)).double()
    assert held.cost().x is held.cost().y
    assert list(held.state_dict()) == ["cost.x"]


def test_parameters_are_trained() -> None:
    places = torch.nn.Parameter(CLOUD.clone())
    loss = modules.Sinkhorn(cost=PointCost(places, OTHER), epsilon=0.1)
    assert [p is places for p in loss.parameters()] == [True]
    optimiser = torch.optim.Adam(loss.parameters(), lr=0.05)
    before = float(loss(P, Q).detach())
    for _ in range(20):
        optimiser.zero_grad()
        loss(P, Q).backward()
        optimiser.step()
    assert float(loss(P, Q).detach()) < 0.7 * before
    lengths = torch.nn.Parameter(LENGTH.clone())
    modules.WassersteinTree(parent=PARENT, length=lengths)(P, Q).backward()
    assert lengths.grad is not None
    assert lengths.grad.abs().sum() > 0
    assert modules.Wasserstein1d(x=torch.nn.Parameter(X)).half().x.dtype == torch.float32  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: modules.Emd(cost=MATRIX.clone().requires_grad_()), ValueError, "matrix requires a gradient and is no"),
        (lambda: modules.CdfDistance(x=2 * X.clone().requires_grad_()), ValueError, "x requires a gradient"),
        (lambda: modules.CdfDistance(x=[0.0, 1.0]), TypeError, "x is a list"),  # type: ignore[arg-type]
        (lambda: modules.WassersteinTree(parent=None, length=LENGTH), TypeError, "parent is a NoneType"),  # type: ignore[arg-type]
        (lambda: modules.Sinkhorn(cost=MATRIX, epsilon=1.0, gard="implicit"), TypeError, r"unknown options \['gard'\]"),  # type: ignore[call-arg]
        (lambda: modules.Sinkhorn(cost=MATRIX, epsilon=1.0, grad="exact"), ValueError, "grad is 'exact'"),
        (lambda: modules.Sinkhorn(cost=MATRIX, epsilon=1.0, start=(P[0], Q[0])), ValueError, "start belongs to one"),
        (lambda: modules.Emd(cost=-MATRIX), ValueError, "expected costs >= 0"),
        (lambda: modules.Emd(MATRIX), TypeError, "positional argument"),  # type: ignore[misc]
    ],
)
def test_bad_settings(make: Callable[[], Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        make()


def test_representations() -> None:
    assert repr(modules.Wasserstein1d()) == "Wasserstein1d(order=1, reduction='mean')"
    assert repr(modules.SoftTopK(k=3)) == "SoftTopK(k=3, epsilon=0.1)"
    shown = repr(modules.Sinkhorn(cost=LineCost(X), epsilon=0.1, grad="implicit"))
    assert "epsilon=0.1, grad='implicit', reduction='mean'" in shown
    assert "(cost): HeldCost(LineCost(shape=(5, 5)" in shown
    assert "projections=(4, 2) float32" in repr(modules.SlicedWasserstein(projections=DIRECTIONS))


def test_generators_and_numbers_of_directions() -> None:
    loss = modules.SlicedWasserstein(projections=8)
    values = [loss(*CLOUDS, generator=torch.Generator().manual_seed(seed)) for seed in (0, 0, 1)]
    assert torch.equal(values[0], values[1])
    assert not torch.equal(values[0], values[2])


def test_soft_operators_fit_into_a_sequence() -> None:
    network = torch.nn.Sequential(torch.nn.Linear(4, 6), modules.SoftRank(), torch.nn.Linear(6, 1))
    network(drawn(7, 4, seed=12)).sum().backward()
    assert all(p.grad is not None and torch.isfinite(p.grad).all() for p in network.parameters())


def test_every_module_is_public() -> None:
    assert list(modules.__all__) == sorted(modules.__all__)
    # test_nn_ordinal.py, test_nn_numbers.py, test_cumulative_head.py
    elsewhere = {"OrdinalLoss", "HistogramLoss", "NumberTokenLoss", "CumulativeLinkHead"}
    assert {case.name.split()[0] for case in CASES} | elsewhere == set(modules.__all__)
    assert all(issubclass(getattr(modules, name), torch.nn.Module) for name in modules.__all__)
