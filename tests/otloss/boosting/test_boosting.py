"""Boosting objectives: derivatives by differences and autograd, bounds by eigenvalues, kernels by their reference."""

import pickle
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

from otloss.boosting import lightgbm_metric, lightgbm_objective, start_scores, xgboost_metric, xgboost_objective
from otloss.boosting.derivatives import Curvature, curvature, gradients_in_numpy, values_in_numpy
from otloss.boosting.settings import RowLoss, row_loss
from tests.errors import raising

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
}


def scores_and_labels(rows: int = 60, classes: int = K, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """From undecided rows to certain ones, right and wrong."""
    rng = np.random.default_rng(seed)
    spread = np.repeat([0.1, 1.0, 6.0], -(-rows // 3))[:rows, None]
    return rng.normal(size=(rows, classes)) * spread, rng.integers(0, classes, size=rows).astype(float)


def torch_loss(z: torch.Tensor, y: int, settings: dict[str, Any]) -> torch.Tensor:
    """One row, straight from the definition."""
    log_p = torch.log_softmax(z, -1)
    p, classes = log_p.exp(), len(z)
    x = torch.as_tensor(settings.get("x", np.arange(classes)), dtype=z.dtype)
    if "cost" in settings:
        moved = (p * torch.tensor(settings["cost"][y], dtype=z.dtype)).sum()
    else:
        apart = p.cumsum(0)[:-1] - (torch.arange(classes - 1) >= y).to(z.dtype)
        moved = ((x[1:] - x[:-1]) * apart.abs() ** settings.get("power", 2)).sum()
    weight = settings["class_weight"][y] if "class_weight" in settings else 1.0
    return weight * (settings.get("transport", 1.0) * moved - settings.get("cross_entropy", 0.0) * log_p[y])


def spec(loss: RowLoss) -> Curvature:
    return curvature(loss, library="xgboost", single=False)


@pytest.mark.parametrize("name", LOSSES)
def test_values_are_the_definition_and_gradients_their_differences(name: str) -> None:
    loss = row_loss(K, **LOSSES[name])
    z, y = scores_and_labels()
    expected = [torch_loss(torch.tensor(a), int(b), LOSSES[name]).item() for a, b in zip(z, y, strict=True)]
    by_class = loss.class_weights[y.astype(int)]
    np.testing.assert_allclose(by_class * values_in_numpy(z, y, loss=loss), expected, atol=1e-12, rtol=1e-10)
    weights = np.random.default_rng(1).uniform(0, 2, size=len(y))
    gradient, _ = gradients_in_numpy(z, y, weights, loss=loss, curvature=spec(loss))
    step = 1e-5
    for k in range(K):
        move = step * np.eye(K)[k]
        difference = (values_in_numpy(z + move, y, loss=loss) - values_in_numpy(z - move, y, loss=loss)) / (2 * step)
        np.testing.assert_allclose(gradient[:, k], weights * by_class * difference, atol=3e-9, rtol=1e-6)
    assert np.abs(gradient).max() > 0.1
    gradient, _ = gradients_in_numpy(*scores_and_labels(3000), NONE, loss=loss, curvature=spec(loss))
    assert 0.2 * loss.largest_gradient < np.abs(gradient).max() <= loss.largest_gradient


@pytest.mark.parametrize("seed", [0, 3])
def test_the_bound_holds_without_its_clamp_for_any_cost(seed: int) -> None:
    classes = 2 + seed
    settings = {"cost": np.random.default_rng(seed).exponential(size=(classes, classes)) ** 3}
    loss = row_loss(classes, **settings)
    assert spec(loss) == Curvature(1.0, 2.0, pytest.approx(0.01 * settings["cost"].max() / (classes - 1)))
    z, y = scores_and_labels(200, classes, seed)
    _, bound = gradients_in_numpy(z, y, NONE, loss=loss, curvature=Curvature(1.0, 2.0, 0.0))
    ratios = []
    for row, label, diagonal in zip(z, y, bound, strict=True):
        of_row = lambda s, y=int(label): torch_loss(s, y, settings)  # noqa: E731
        exact = torch.autograd.functional.hessian(of_row, torch.tensor(row)).numpy()
        assert np.linalg.eigvalsh(np.diag(diagonal) - exact).min() >= -1e-12 * np.abs(exact).max() - 1e-15
        if np.abs(row).max() < 5:  # what is left of certain rows is rounding
            root = np.diag(1 / np.sqrt(diagonal))
            ratios.append(np.linalg.eigvalsh(root @ exact @ root).max())
    assert 0.5 <= max(ratios) <= 1 + 1e-9


@pytest.mark.parametrize("x", [None, VALUES])
def test_at_power_2_the_hessian_is_twice_the_diagonal_of_gauss_newton(x: np.ndarray | None) -> None:
    loss = row_loss(K, x=x)
    z, y = scores_and_labels()
    _, actual = gradients_in_numpy(z, y, NONE, loss=loss, curvature=spec(loss))
    gaps = torch.tensor(loss.gaps)
    for row, diagonal in zip(z, actual, strict=True):
        J = torch.autograd.functional.jacobian(lambda s: s.softmax(0).cumsum(0)[:-1], torch.tensor(row))
        expected = 4 * (gaps[:, None] * J**2).sum(0)
        np.testing.assert_allclose(diagonal, expected.clamp(min=0.01 * float(gaps.mean())), rtol=1e-9)
    assert (actual > 1.01 * spec(loss).smallest).mean() > 0.2


@pytest.mark.parametrize("name", ["power 2", "power 1", "a cost and cross-entropy"])
def test_one_score_for_two_classes(name: str) -> None:
    settings = dict(LOSSES[name])
    if "cost" in settings:
        settings["cost"] = COST[:2, :2]
    margins, y = np.linspace(-6, 6, 25), np.tile([0.0, 1.0], 13)[:25]
    for library in (xgboost_objective, lightgbm_objective):
        objective = library(2, interface="sklearn", **settings)
        gradient, hessian = objective(y, margins)
        assert gradient.shape == hessian.shape == (25,)
        assert objective(y, margins[:, None])[0].shape == (25, 1)
        for m, label, g, h in zip(margins, y, gradient, hessian, strict=True):

            def of(s: torch.Tensor, label: int = int(label)) -> torch.Tensor:
                return torch_loss(torch.stack([torch.zeros_like(s), s]), label, settings)

            point = torch.tensor(m, requires_grad=True)
            (exact,) = torch.autograd.grad(of(point), point)
            assert g == pytest.approx(exact.item(), rel=1e-5, abs=1e-7)
            if name == "power 2":
                p = 1 / (1 + np.exp(-m))
                assert h == pytest.approx(max(2 * (p * (1 - p)) ** 2, 0.01), rel=1e-5)
            else:
                assert h >= torch.autograd.functional.hessian(of, torch.tensor(m)).item() * (1 - 1e-6)


@pytest.mark.parametrize("library", ["xgboost", "lightgbm"])
@pytest.mark.parametrize("name", LOSSES)
def test_kernels_equal_their_reference_for_any_number_of_rows_in_any_layout(name: str, library: str) -> None:
    objective = {"xgboost": xgboost_objective, "lightgbm": lightgbm_objective}[library]
    loss = row_loss(K, **LOSSES[name])
    shape = {"loss": loss, "curvature": curvature(loss, library=library, single=False)}
    for rows in (0, 1, 65, 333):
        z, y = scores_and_labels(rows)
        whole = np.zeros((rows, 2 * K), np.float32 if library == "xgboost" else float)
        whole[:, ::2] = z
        whole.flags.writeable = False
        weights = np.random.default_rng(2).uniform(size=rows)
        for given in (whole[:, ::2], np.asfortranarray(whole[:, ::2])):
            ours = objective(K, interface="sklearn", **LOSSES[name])(y, given, weights)
            for actual, expected in zip(ours, gradients_in_numpy(given, y, weights, **shape), strict=True):
                assert actual.dtype == np.float32
                assert rows < 2 or actual.flags.f_contiguous == (library == "lightgbm")
                np.testing.assert_allclose(actual, expected.astype(np.float32), rtol=3e-7, atol=1e-12)


@pytest.mark.parametrize("scale", [1e2, 1e30])
@pytest.mark.parametrize("name", LOSSES)
def test_large_scores_give_finite_derivatives_and_keep_the_logarithm(name: str, scale: float) -> None:
    z, y = scores_and_labels()
    gradient, hessian = lightgbm_objective(K, interface="sklearn", **LOSSES[name])(y, z * scale)
    assert np.isfinite(gradient).all()
    assert np.isfinite(hessian).all()
    assert (hessian[row_loss(K, **LOSSES[name]).class_weights[y.astype(int)] > 0] > 0).all()
    metric = xgboost_metric(3, transport=0, cross_entropy=1, interface="sklearn")
    for rows in (1, 40):
        assert metric(np.zeros(rows), np.tile([1e17, 1e17, 0], (rows, 1))) == pytest.approx(np.log(2), rel=1e-12)
        assert metric(np.zeros(rows), np.tile([0, 1e17, 1e17], (rows, 1))) == 1e17


def test_the_metric_is_the_mean_loss_with_weights() -> None:
    z, y = scores_and_labels()
    weights = np.random.default_rng(3).uniform(size=len(y))
    for settings in LOSSES.values():
        lost = np.array([torch_loss(torch.tensor(a), int(b), settings).item() for a, b in zip(z, y, strict=True)])
        expected = (weights * lost).sum() / (weights * row_loss(K, **settings).class_weights[y.astype(int)]).sum()
        assert xgboost_metric(K, interface="sklearn", **settings)(y, z, weights) == pytest.approx(expected, rel=1e-9)
        P = torch.tensor(z).softmax(-1).numpy()
        by_probabilities = lightgbm_metric(K, interface="sklearn", predictions="probabilities", **settings)
        assert by_probabilities(y, P, weights)[1] == pytest.approx(expected, rel=1e-9)


def test_one_probability_for_two_classes_is_that_of_the_second() -> None:
    nll = -(np.log(0.8) + np.log(0.6)) / 2
    for settings, expected in (({}, (0.2**2 + 0.4**2) / 2), ({"transport": 0, "cross_entropy": 1}, nll)):
        metric = xgboost_metric(2, predictions="probabilities", interface="sklearn", **settings)
        for shape in ((2,), (2, 1)):
            assert metric([0, 1], np.array([0.2, 0.6]).reshape(shape)) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("make_one", [xgboost_objective, lightgbm_metric])
def test_callables_are_pickled_and_tell_catboost_what_they_are_for(make_one: Any) -> None:
    """CatBoost sets attributes of a function without `no_jit`, and these are immutable."""
    one = make_one(3, x=[0, 1, 3], cross_entropy=0.5, interface="sklearn")
    z, y = scores_and_labels(4, 3)
    np.testing.assert_equal(pickle.loads(pickle.dumps(one))(y, z), one(y, z))
    assert one.no_jit is True
    for method in (one.calc_ders_multi, one.calc_ders_range, one.evaluate, one.is_max_optimal):
        with pytest.raises(TypeError, match=r"CatBoost was given a function that .*Use XGBoost or LightGBM"):
            method([0.0, 0.0, 0.0], 1.0, 1.0)


test_bad_settings = raising(
    ({"x": [0, None, 2]}, r"x\[1\] is nan, expected finite numbers"),
    ({"cost": np.eye(3), "x": [0, 1, 2]}, "both cost and x"),
    ({"class_weight": "balanced"}, TypeError, "class_weight cannot be read: .*expected numbers"),
    # Of value_counts, by frequency and not by class.
    ({"class_weight": pd.Series([1, 2, 3], index=[0, 2, 1])}, TypeError, r"Series.*class_weight.loc\[order\].to_numpy"),
    call=lambda settings: xgboost_objective(**({"num_classes": 3} | settings)),
)
TWO = np.zeros((2, 3))


def on_bad_rows(labels: Any, scores: Any, weights: Any) -> None:
    """By numpy and, from 32 rows on, by the kernel; objective and metric raise the error of the metric."""
    many = None if weights is None else [*weights, *[1.0] * (20 * len(labels) - 2)]
    metric = lightgbm_metric(3, interface="sklearn")
    for given in ((labels, scores, weights), (list(labels) * 20, np.tile(scores, (20, 1)), many)):
        errors = []
        for f in (xgboost_objective(3, interface="sklearn"), metric):
            with pytest.raises((ValueError, TypeError)) as caught:
                f(*given)
            errors.append(str(caught.value))
        assert errors[0] == errors[1]
    metric(labels, scores, weights)


test_bad_rows = raising(
    ([0, 3], TWO, None, "label of row 1 is 3, expected whole numbers 0 to 2"),
    (["low", "high"], TWO, None, TypeError, "labels cannot be read: .*'low'; .*number the classes"),
    ([0, 1], np.zeros((2, 4)), None, r"shape \(\d+, 4\) beside labels of shape .*, expected 3 scores"),
    ([], np.zeros((2, 3)), None, "the data set has no labels"),
    ([0, 1], TWO, [1, -1], "weight of row 1 is -1"),
    ([0, 1], np.array([[0, 0, 0], [0, np.nan, 0]]), None, "scores of row 1"),
    call=on_bad_rows,
)


def test_predictions_of_the_other_kind_and_the_other_interface_raise() -> None:
    z, y = scores_and_labels()
    P = torch.tensor(z).softmax(-1).numpy()
    with pytest.raises(ValueError, match='choose predictions="probabilities"'):
        xgboost_metric(K, interface="sklearn")(y, P)
    with pytest.raises(ValueError, match='choose predictions="scores"'):
        xgboost_metric(K, interface="sklearn", predictions="probabilities")(y, z)
    for classes, mean in ((2, 0.25), (4, 0.625)):  # equal scores, before anything is learnt
        metric = xgboost_metric(classes, interface="sklearn")
        assert metric([0, 1], np.full((2, classes), 1 / classes)) == pytest.approx(mean)
    with pytest.raises(TypeError, match='choose interface="sklearn"'):
        xgboost_objective(K)(y, z)
    with pytest.raises(TypeError, match='choose interface="native"'):
        xgboost_objective(K, interface="sklearn")(z, SimpleNamespace(get_label=lambda: y))


def test_sums_of_gradients_whose_square_overflows_raise() -> None:
    """XGBoost squares them in float32: after an overflow each tree is one leaf, without an error."""
    z, y = scores_and_labels()
    assert len(y) == 60
    for scale, weights in ((1.01e19 / (60 * (K - 1)), None), (1e11, np.full(60, 1e6))):
        with pytest.raises(ValueError, match=r"gradients of 60 rows may sum to .*no split is found"):
            xgboost_objective(K, transport=scale, interface="sklearn")(y, z, weights)
    gradient, _ = xgboost_objective(K, transport=0.99e19 / (60 * (K - 1)), interface="sklearn")(y, z)
    assert np.isfinite(gradient).all()


def test_starts_are_least_in_mean_loss() -> None:
    rng = np.random.default_rng(0)
    y, weights = rng.choice(K, p=[0.4, 0.1, 0.1, 0.3, 0.1], size=500), rng.uniform(size=500)
    start = start_scores(y, K, sample_weight=weights)
    assert np.exp(start).sum() == pytest.approx(1)
    for settings in ({}, {"x": VALUES}, {"transport": 0, "cross_entropy": 1}):
        gradient, _ = xgboost_objective(K, interface="sklearn", **settings)(y, np.tile(start, (500, 1)), weights)
        np.testing.assert_allclose(gradient.sum(0, dtype=float), 0, atol=1e-5)
    np.testing.assert_allclose(start_scores([1, 1, 1], 3), np.log([0.125, 0.75, 0.125]))  # absent classes
    np.testing.assert_allclose(start_scores([1, 1, 0], 2, sample_weight=[4, 4, 0]), np.log([1 / 5, 4 / 5]))


test_bad_starts = raising(
    ([0, 3], {}, "label of row 1 is 3"),
    ([0, 1], {"sample_weight": [0, 0]}, "some weight above 0"),
    call=lambda labels, settings: start_scores(labels, 3, **settings),
)
