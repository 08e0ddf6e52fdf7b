"""Boosting objectives: their derivatives by differences and autograd, their bounds by eigenvalues, their messages."""

from __future__ import annotations

import pickle
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import torch

from otloss.boosting import _rows as rows_module
from otloss.boosting import lightgbm_metric, lightgbm_objective, start_scores, xgboost_metric, xgboost_objective
from otloss.boosting._rows import curvature, slopes_in_numpy, values_in_numpy
from otloss.boosting._settings import RowLoss, row_loss

NONE = np.zeros(0)
K = 5
VALUES = np.array([-1.0, 0.0, 0.5, 3.0, 4.5])
COST = np.random.default_rng(5).uniform(0, 3, size=(K, K))

LOSSES: dict[str, dict[str, Any]] = {
    "power 2": {},
    "power 1": {"power": 1},
    "power 2, uneven": {"x": VALUES},
    "power 1, uneven": {"power": 1, "x": VALUES},
    "a cost": {"cost": COST},
    "power 2 and cross-entropy": {"x": VALUES, "cross_entropy": 0.3},
    "a cost and cross-entropy": {"cost": COST, "cross_entropy": 0.7, "transport": 2.0},
    "cross-entropy": {"transport": 0.0, "cross_entropy": 1.5},
    "classes that weigh": {"class_weight": [1.0, 0.0, 2.0, 0.5, 3.0], "cross_entropy": 0.1},
}  # fmt: skip


def make(classes: int = K, **settings: Any) -> RowLoss:
    defaults: dict[str, Any] = {
        "power": 2, "x": None, "cost": None, "transport": 1.0, "cross_entropy": 0.0, "class_weight": None,
    }  # fmt: skip
    return row_loss(classes, **(defaults | settings))


def scores_and_labels(rows: int = 60, classes: int = K, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """From undecided rows to certain ones, right and wrong."""
    rng = np.random.default_rng(seed)
    spread = np.repeat([0.1, 1.0, 6.0], -(-rows // 3))[:rows, None]
    return rng.normal(size=(rows, classes)) * spread, rng.integers(0, classes, size=rows).astype(float)


def torch_loss(z: torch.Tensor, y: int, loss: RowLoss) -> torch.Tensor:
    """One row, straight from the definition."""
    log_p = torch.log_softmax(z, -1)
    p, classes = log_p.exp(), loss.num_classes
    x = torch.arange(classes, dtype=z.dtype) if loss.x is None else torch.tensor(loss.x, dtype=z.dtype)
    if loss.cost is not None:
        moved = (p * torch.tensor(loss.cost[y], dtype=z.dtype)).sum()
    else:
        apart = p.cumsum(0)[:-1] - (torch.arange(classes - 1) >= y).to(z.dtype)
        moved = ((x[1:] - x[:-1]) * apart.abs() ** loss.power).sum()
    weight = 1.0 if loss.class_weight is None else loss.class_weight[y]
    return weight * (loss.transport * moved - loss.cross_entropy * log_p[y])


def spec(loss: RowLoss, hessian: str = "auto", **where: Any) -> Any:
    return curvature(loss, hessian, **({"library": "xgboost", "single": False} | where))


# ---- the derivatives ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", LOSSES)
def test_gradients_are_the_slopes_of_the_loss(name: str) -> None:
    loss = make(**LOSSES[name])
    z, y = scores_and_labels()
    weights = np.random.default_rng(1).uniform(0, 2, size=len(y))
    gradient, _ = slopes_in_numpy(z, y, weights, loss=loss, curvature=spec(loss))

    def total(scores: np.ndarray) -> np.ndarray:
        return weights * loss.class_weights[y.astype(int)] * values_in_numpy(scores, y, loss=loss)

    step = 1e-5
    for k in range(K):
        move = step * np.eye(K)[k]
        slope = (total(z + move) - total(z - move)) / (2 * step)
        np.testing.assert_allclose(gradient[:, k], slope, atol=3e-9, rtol=1e-6)
    assert np.abs(gradient).max() > 0.1


@pytest.mark.parametrize("name", LOSSES)
def test_values_are_the_definition(name: str) -> None:
    loss = make(**LOSSES[name])
    z, y = scores_and_labels()
    expected = [torch_loss(torch.tensor(row), int(label), loss).item() for row, label in zip(z, y, strict=True)]
    weights = loss.class_weights[y.astype(int)]
    np.testing.assert_allclose(weights * values_in_numpy(z, y, loss=loss), expected, atol=1e-12, rtol=1e-10)


@pytest.mark.parametrize("name", LOSSES)
def test_diagonals_against_the_whole_hessian(name: str) -> None:
    loss = make(**LOSSES[name])
    z, y = scores_and_labels()
    exact = np.stack([
        torch.autograd.functional.hessian(lambda s, y=int(label): torch_loss(s, y, loss), torch.tensor(row)).numpy()
        for row, label in zip(z, y, strict=True)
    ])  # fmt: skip
    weights = loss.class_weights[y.astype(int)]
    scale = np.abs(exact).max()
    _, bound = slopes_in_numpy(z, y, NONE, loss=loss, curvature=spec(loss, "bound"))
    least = np.linalg.eigvalsh(bound[:, :, None] * np.eye(K) - exact).min()
    assert least >= -1e-12 * scale
    _, absolute = slopes_in_numpy(z, y, NONE, loss=loss, curvature=spec(loss, "absolute"))
    floor = weights[:, None] * spec(loss).floor
    diagonal = np.abs(np.diagonal(exact, axis1=1, axis2=2))
    np.testing.assert_allclose(absolute, np.maximum(diagonal, floor), atol=1e-12 * scale, rtol=1e-7)
    if loss.transport:
        assert spec(loss).floor == pytest.approx(0.01 * loss.transport * moved_one_class(loss))


def moved_one_class(loss: RowLoss) -> float:
    return (loss.gaps.sum() if loss.is_square else loss.costs.max()) / (K - 1)


@pytest.mark.parametrize("seed", range(5))
def test_the_bound_holds_without_its_floor_for_any_cost(seed: int) -> None:
    """And no smaller multiple of it does: somewhere it is within a factor of two."""
    classes = 2 + seed
    loss = make(classes, cost=np.random.default_rng(seed).exponential(size=(classes, classes)) ** 3)
    z, y = scores_and_labels(200, classes, seed)
    chosen = type(spec(loss))(rows_module.BOUND, 1.0, 2.0, 0.0)
    _, bound = slopes_in_numpy(z, y, NONE, loss=loss, curvature=chosen)
    ratios = []
    for row, label, diagonal in zip(z, y, bound, strict=True):
        exact = torch.autograd.functional.hessian(
            lambda s, y=int(label): torch_loss(s, y, loss), torch.tensor(row)
        ).numpy()
        assert np.linalg.eigvalsh(np.diag(diagonal) - exact).min() >= -1e-12 * np.abs(exact).max() - 1e-15
        if np.abs(row).max() < 5:  # what is left of certain rows is rounding
            root = np.diag(1 / np.sqrt(diagonal))
            ratios.append(np.linalg.eigvalsh(root @ exact @ root).max())
    assert 0.5 <= max(ratios) <= 1 + 1e-9


@pytest.mark.parametrize("x", [None, VALUES])
def test_gauss_newton_is_the_diagonal_of_the_squares_curvature(x: np.ndarray | None) -> None:
    loss = make(x=x)
    z, y = scores_and_labels()
    _, ours = slopes_in_numpy(z, y, NONE, loss=loss, curvature=spec(loss, "gauss-newton"))
    gaps = torch.tensor(loss.gaps)
    for row, diagonal in zip(z, ours, strict=True):
        J = torch.autograd.functional.jacobian(lambda s: s.softmax(0).cumsum(0)[:-1], torch.tensor(row))
        expected = 2 * (gaps[:, None] * J**2).sum(0)
        np.testing.assert_allclose(diagonal, expected.clamp(min=0.01 * float(gaps.mean())), rtol=1e-9)
    _, twice = slopes_in_numpy(z, y, NONE, loss=loss, curvature=spec(loss))
    large = ours > 1.01 * spec(loss).floor
    np.testing.assert_allclose(twice[large], 2 * ours[large], rtol=1e-12)
    assert large.mean() > 0.2


@pytest.mark.parametrize("name", ["power 2", "power 1", "a cost and cross-entropy"])
def test_one_score_for_two_classes_is_bounded_alike(name: str) -> None:
    settings = dict(LOSSES[name])
    if "cost" in settings:
        settings["cost"] = COST[:2, :2]
    loss = make(2, **settings)
    margins, y = np.linspace(-6, 6, 25), np.tile([0.0, 1.0], 13)[:25]
    for library in (xgboost_objective, lightgbm_objective):
        for hessian in ("auto", "bound", "absolute"):
            objective = library(2, hessian=hessian, interface="sklearn", **settings)
            gradient, bend = objective(y, margins)
            assert gradient.shape == bend.shape == (25,)
            column, _ = objective(y, margins[:, None])
            assert column.shape == (25, 1)
            for m, label, g, h in zip(margins, y, gradient, bend, strict=True):

                def of(s: torch.Tensor, label: int = int(label)) -> torch.Tensor:
                    return torch_loss(torch.stack([torch.zeros_like(s), s]), label, loss)

                point = torch.tensor(m, requires_grad=True)
                (slope,) = torch.autograd.grad(of(point), point)
                assert g == pytest.approx(slope.item(), rel=1e-5, abs=1e-7)
                exact = torch.autograd.functional.hessian(of, torch.tensor(m)).item()
                if hessian == "bound":
                    assert h >= exact * (1 - 1e-6)
                if hessian == "absolute":
                    assert h == pytest.approx(max(abs(exact), spec(loss).floor), rel=1e-4)


# ---- the kernel and its twin -------------------------------------------------------------------------------------


@pytest.mark.parametrize("library", ["xgboost", "lightgbm"])
@pytest.mark.parametrize("name", LOSSES)
def test_the_kernel_is_its_twin(name: str, library: str, monkeypatch: pytest.MonkeyPatch) -> None:
    objective = {"xgboost": xgboost_objective, "lightgbm": lightgbm_objective}[library]
    metric = {"xgboost": xgboost_metric, "lightgbm": lightgbm_metric}[library]
    z, y = scores_and_labels(333)
    z = z.astype(np.float32) if library == "xgboost" else np.asfortranarray(z)
    weights = np.random.default_rng(2).uniform(size=333)
    hessians = ["auto", "bound", "absolute"] + ["gauss-newton"] * ("power 2" in name)
    for hessian in hessians:
        f = objective(K, hessian=hessian, interface="sklearn", **LOSSES[name])
        compiled = f(y, z, weights)
        with monkeypatch.context() as patch:
            patch.setattr(rows_module, "may_run_on", lambda: False)
            twin = f(y, z, weights)
        for ours, theirs in zip(compiled, twin, strict=True):
            assert ours.dtype == theirs.dtype == np.float32
            assert ours.flags.f_contiguous == theirs.flags.f_contiguous == (library == "lightgbm")
            np.testing.assert_allclose(ours, theirs, rtol=3e-7, atol=1e-12)
    f = metric(K, interface="sklearn", **LOSSES[name])
    compiled = f(y, z, weights)
    monkeypatch.setattr(rows_module, "may_run_on", lambda: False)
    ours, theirs = (a[1] if library == "lightgbm" else a for a in (compiled, f(y, z, weights)))
    assert ours == pytest.approx(theirs, rel=1e-12)


@pytest.mark.parametrize("rows", [0, 1, 31, 32, 63, 64, 65, 1000])
def test_any_number_of_rows_in_any_layout(rows: int) -> None:
    z, y = scores_and_labels(rows)
    objective = xgboost_objective(K, interface="sklearn", cross_entropy=0.2)
    expected = np.stack([np.concatenate(objective(y[i : i + 1], z[i : i + 1]), 1) for i in range(rows)] or [NONE])
    whole = np.zeros((rows, 2 * K))
    whole[:, ::2] = z
    whole.flags.writeable = False
    got = np.concatenate(objective(y, whole[:, ::2]), axis=1)
    np.testing.assert_allclose(got, expected.reshape(got.shape), rtol=3e-7, atol=1e-12)


@pytest.mark.parametrize("scale", [1e2, 1e4, 1e30])
@pytest.mark.parametrize("name", LOSSES)
def test_large_scores_are_no_trouble(name: str, scale: float) -> None:
    z, y = scores_and_labels()
    for hessian in ("auto", "bound", "absolute"):
        objective = lightgbm_objective(K, hessian=hessian, interface="sklearn", **LOSSES[name])
        for answer in objective(y, z * scale):
            assert np.isfinite(answer).all()
        _, bend = objective(y, z * scale)
        weights = make(**LOSSES[name]).class_weights[y.astype(int)]
        assert (bend[weights > 0] > 0).all()


def test_weights_are_repeated_rows() -> None:
    z, y = scores_and_labels(30)
    times = np.random.default_rng(0).integers(0, 4, size=30)
    repeated = np.repeat(np.arange(30), times)
    objective = xgboost_objective(K, interface="sklearn", x=VALUES)
    for weighted, plain in zip(objective(y, z, times), objective(y[repeated], z[repeated]), strict=True):
        sums = np.zeros((30, K))
        np.add.at(sums, repeated, plain)
        np.testing.assert_allclose(weighted, sums, rtol=1e-5, atol=1e-7)
    metric = xgboost_metric(K, interface="sklearn", x=VALUES)
    assert metric(y, z, times) == pytest.approx(metric(y[repeated], z[repeated]), rel=1e-12)


def test_the_metric_is_the_mean_loss_with_weights() -> None:
    z, y = scores_and_labels()
    weights = np.random.default_rng(3).uniform(size=len(y))
    for settings in LOSSES.values():
        loss = make(**settings)
        lost = np.array([torch_loss(torch.tensor(a), int(b), loss).item() for a, b in zip(z, y, strict=True)])
        expected = (weights * lost).sum() / (weights * loss.class_weights[y.astype(int)]).sum()
        assert xgboost_metric(K, interface="sklearn", **settings)(y, z, weights) == pytest.approx(expected, rel=1e-9)
        P = torch.tensor(z).softmax(-1).numpy()
        by_probabilities = lightgbm_metric(K, interface="sklearn", predictions="probabilities", **settings)
        assert by_probabilities(y, P, weights)[1] == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("power", [1, 2])
def test_the_recipe_that_circulates_ascends_where_ours_descends(power: int) -> None:
    """sign(F - G) for a gradient and ones for a Hessian: no sums from the other end, no Jacobian of the softmax."""
    rng, classes = np.random.default_rng(0), 8
    z, y = rng.normal(size=(2000, classes)), rng.integers(0, classes, size=2000).astype(float)
    loss, step = make(classes, power=power), 1e-4
    before = values_in_numpy(z, y, loss=loss)
    F = np.cumsum(np.exp(z) / np.exp(z).sum(1, keepdims=True), axis=1)[:, :-1]
    recipe = np.concatenate([np.sign(F - (y[:, None] <= np.arange(classes - 1))), np.zeros((2000, 1))], axis=1)
    assert (values_in_numpy(z - step * recipe, y, loss=loss) > before).mean() > 0.1
    gradient, hessian = xgboost_objective(classes, power=power, interface="sklearn")(y, z)
    assert (values_in_numpy(z - step * gradient / hessian, y, loss=loss) < before).all()


def test_a_whole_newton_step_with_the_bound_descends_from_undecided_rows() -> None:
    y = np.arange(K, dtype=float)
    z = np.random.default_rng(0).normal(size=(K, K)) * 0.3
    for settings in LOSSES.values():
        if "class_weight" in settings:
            continue
        loss = make(**settings)
        gradient, hessian = slopes_in_numpy(z, y, NONE, loss=loss, curvature=spec(loss, "bound"))
        after = values_in_numpy(z - gradient / hessian, y, loss=loss)
        assert (after <= values_in_numpy(z, y, loss=loss) + 1e-12).all()


# ---- the objects -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("interface", ["native", "sklearn"])
@pytest.mark.parametrize("make_one", [xgboost_objective, xgboost_metric, lightgbm_objective, lightgbm_metric])
def test_callables_are_values(make_one: Any, interface: str) -> None:
    one = make_one(3, x=[0, 1, 3], cross_entropy=0.5, interface=interface)
    again = pickle.loads(pickle.dumps(one))
    assert again == one == eval(repr(one), {make_one.__name__: make_one})
    assert hash(again) == hash(one)
    assert one != make_one(3, interface=interface)
    assert isinstance(one.__name__, str)
    with pytest.raises(AttributeError):
        one.loss = None


def test_repr_names_what_was_chosen() -> None:
    assert repr(xgboost_objective(4, power=1)) == 'xgboost_objective(4, power=1, hessian="auto")'
    assert "cost=((0.0, 1.0), (2.0, 0.0))" in repr(lightgbm_metric(2, cost=[[0, 1], [2, 0]]))


def test_importing_boosting_imports_no_library() -> None:
    code = (
        "import sys, otloss.boosting\n"
        "print([m for m in ('xgboost', 'lightgbm', 'numba', 'sklearn', 'matplotlib') if m in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"power": 3}, "power is 3, expected 1 or 2"),
        ({"x": [0, 1, 1]}, r"x\[1\] is 1.0 and x\[2\] is 1.0, expected strictly increasing"),
        ({"x": [0, 1]}, r"x has shape \(2,\), expected \(3,\)"),
        ({"x": [0, 1, np.nan]}, "x holds nan at index"),
        ({"cost": np.ones((3, 2))}, r"cost has shape \(3, 2\), expected \(3, 3\)"),
        ({"cost": -np.eye(3)}, r"cost\[0, 0\] is -1.0, expected costs >= 0"),
        ({"cost": np.full((3, 3), np.nan)}, "cost holds nan"),
        ({"cost": np.eye(3), "x": [0, 1, 2]}, "both cost and x"),
        ({"cross_entropy": -1}, "cross_entropy is -1"),
        ({"cross_entropy": np.inf}, "cross_entropy is inf"),
        ({"transport": 0}, "transport and cross_entropy are both 0"),
        ({"class_weight": [1, 2]}, r"class_weight has shape \(2,\)"),
        ({"class_weight": [1, 2, -1]}, r"class_weight\[2\] is -1.0"),
        ({"class_weight": "balanced"}, "compute_class_weight"),
        ({"class_weight": {7: 2.0}}, "the key 7"),
        ({"hessian": "exact"}, "hessian is 'exact', expected one of"),
        ({"hessian": "gauss-newton", "power": 1}, "linear in the probabilities"),
        ({"interface": "keras"}, "interface is 'keras', expected one of"),
    ],
)
def test_settings_that_cannot_be(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        xgboost_objective(3, **settings)


@pytest.mark.parametrize("classes", [1, 2.5])
def test_numbers_of_classes_that_cannot_be(classes: Any) -> None:
    with pytest.raises(ValueError, match=f"num_classes is {classes}, expected a whole number, at least 2"):
        xgboost_objective(classes)
    with pytest.raises(ValueError, match="num_classes"):
        start_scores([0], classes)


@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize(
    ("labels", "scores", "weights", "message"),
    [
        ([0, 3], np.zeros((2, 3)), None, "label of row 1 is 3, expected whole numbers 0 to 2"),
        ([0, -1], np.zeros((2, 3)), None, "label of row 1 is -1"),
        ([0.5, 1], np.zeros((2, 3)), None, "label of row 0 is 0.5"),
        ([0, np.nan], np.zeros((2, 3)), None, "label of row 1 is nan"),
        ([0, 1], np.zeros((2, 4)), None, r"shape \(2, 4\) beside labels of shape \(2,\), expected 3 scores"),
        ([0, 1], np.zeros(6), None, r"shape \(6,\)"),
        ([0, 1], np.zeros((2, 3)), [1, -1], "weight of row 1 is -1"),
        ([0, 1], np.zeros((2, 3)), [np.nan, 1], "weight of row 0 is nan"),
        ([0, 1], np.zeros((2, 3)), [1, 1, 1], r"weights have shape \(3,\), expected \(2,\)"),
        ([0, 1], np.array([[0, 0, 0], [0, np.nan, 0]]), None, "scores of row 1"),
        ([0, 1], np.array([[0, 0, 0], [0, 0, -np.inf]]), None, "scores of row 1"),
    ],
)
def test_rows_that_cannot_be(
    labels: Any, scores: Any, weights: Any, message: str, compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rows_module, "_SMALL", 2 if compiled else 1000)
    for f in (xgboost_objective(3, interface="sklearn"), lightgbm_metric(3, interface="sklearn")):
        with pytest.raises(ValueError, match=message):
            f(labels, scores, weights)


def test_predictions_of_the_other_kind_are_told() -> None:
    z, y = scores_and_labels()
    P = torch.tensor(z).softmax(-1).numpy()
    with pytest.raises(ValueError, match='choose predictions="probabilities"'):
        xgboost_metric(K, interface="sklearn")(y, P)
    with pytest.raises(ValueError, match='choose predictions="scores"'):
        xgboost_metric(K, interface="sklearn", predictions="probabilities")(y, z)
    assert xgboost_metric(2, interface="sklearn")([0, 1], np.full((2, 2), 0.5)) == pytest.approx(0.25)


def test_the_other_interface_is_told() -> None:
    class Data:
        def get_label(self) -> Any: ...

    z, y = scores_and_labels()
    with pytest.raises(TypeError, match='choose interface="sklearn"'):
        xgboost_objective(K)(y, z)
    with pytest.raises(TypeError, match='choose interface="native"'):
        xgboost_objective(K, interface="sklearn")(z, Data())


def test_weights_of_zero_have_no_mean() -> None:
    with pytest.raises(ValueError, match="the weights of 2 rows sum to 0"):
        xgboost_metric(3, interface="sklearn")([0, 1], np.zeros((2, 3)), [0, 0])


# ---- the start ---------------------------------------------------------------------------------------------------


def test_starts_are_least_in_mean_loss() -> None:
    rng = np.random.default_rng(0)
    y, weights = rng.choice(K, p=[0.4, 0.1, 0.1, 0.3, 0.1], size=500), rng.uniform(size=500)
    start = start_scores(y, K, sample_weight=weights)
    assert np.exp(start).sum() == pytest.approx(1)
    for settings in ({}, {"x": VALUES}, {"transport": 0, "cross_entropy": 1}):
        gradient, _ = xgboost_objective(K, interface="sklearn", **settings)(y, np.tile(start, (500, 1)), weights)
        np.testing.assert_allclose(gradient.sum(0, dtype=float), 0, atol=1e-5)


def test_starts_with_absent_classes_are_finite() -> None:
    np.testing.assert_allclose(start_scores([1, 1, 1], 3), np.log([0.125, 0.75, 0.125]))
    np.testing.assert_allclose(start_scores([0, 1, 1, 1], 2, single=True), [np.log(3)])
    np.testing.assert_allclose(start_scores([1, 1, 0], 2, sample_weight=[4, 4, 0]), np.log([1 / 5, 4 / 5]))


@pytest.mark.parametrize(
    ("arguments", "settings", "message"),
    [
        (([0, 3], 3), {}, "label of row 1 is 3"),
        (([], 3), {}, "labels are empty"),
        (([0, 1], 3), {"sample_weight": [1]}, "sample_weight has shape"),
        (([0, 1], 3), {"sample_weight": [0, 0]}, "sample_weight is 0 everywhere"),
        (([0, 1], 3), {"sample_weight": [-1, 0]}, "weight of row 0 is -1"),
        (([0, 1], 3), {"single": True}, "single is asked of 3 classes"),
        (([[0, 1]], 3), {}, "labels has shape"),
    ],
)
def test_starts_that_cannot_be(arguments: Any, settings: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        start_scores(*arguments, **settings)
