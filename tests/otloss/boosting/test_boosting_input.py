"""Boosting callables as objects, what they refuse and how they say so, and the scores to start from."""

from __future__ import annotations

import pickle
import subprocess
import sys
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

from otloss.boosting import lightgbm_metric, lightgbm_objective, start_scores, xgboost_metric, xgboost_objective
from otloss.boosting import rows as rows_module
from tests.otloss.boosting.boosting_cases import VALUES, K, scores_and_labels

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
        ({"x": [0, None, 2]}, "x holds nan at index"),
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
        ({"class_weight": {True: 2.0}}, "the key True, expected class positions 0 to 2"),
        ({"class_weight": pd.Series([1, 2, 3], index=list("abc"))}, "the index of class_weight is .*to_numpy"),
        ({"class_weight": pd.Series([1, 2], index=[0, 2])}, r"the index of class_weight is \[0, 2\], expected each"),
        ({"class_weight": pd.Series([1, 2, 3], index=[0, 1, 1])}, r"the index of class_weight is \[0, 1, 1\]"),
        ({"cost": pd.DataFrame(np.eye(3), columns=list("bac"))}, "the index of cost is .*'b', 'a', 'c'"),
        ({"cost": 1e300 * np.eye(3)}, r"gradients reach 1e\+300: .*the largest cost 1e\+300"),
        ({"x": [0, 1e300, 1.7e308]}, r"the span of x 1\.7e\+308"),
        ({"x": [-1.7e308, 0, 1.7e308]}, "gradients reach inf: .*the span of x inf"),
        ({"x": [-1.7e308, 0, 1.7e308], "power": 1}, "gradients reach inf"),
        ({"transport": 1e300}, r"transport 1e\+300"),
        ({"cross_entropy": 1e19}, r"cross_entropy 1e\+19, .*expected at most 1e\+18"),
        ({"class_weight": [1, 1e300, 1]}, r"the largest class weight 1e\+300"),
        ({"hessian": "exact"}, "hessian is 'exact', expected one of"),
        ({"hessian": "gauss-newton", "power": 1}, "linear in the probabilities"),
        ({"interface": "keras"}, "interface is 'keras', expected one of"),
    ],
)
def test_settings_that_cannot_be(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        xgboost_objective(3, **settings)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"power": True}, r"power is a bool \(True\), expected a number"),
        ({"power": np.array([1, 2])}, "power is a ndarray .*, expected a number"),
        ({"x": ["0", "1", "2"]}, "x: found '0', expected numbers"),
        ({"x": np.array(["2020", "2021", "2022"], dtype="M8[Y]")}, r"x: found values of dtype datetime64\[Y\]"),
        ({"x": [0, [1], 2]}, "x cannot be read: .*expected numbers"),
        ({"x": torch.arange(3.0, requires_grad=True)}, "x cannot be read: .*detach"),
        ({"cost": np.eye(3).astype(complex)}, "cost: found values of dtype complex128"),
        ({"class_weight": {0: "2"}}, "class_weight: found '2', expected numbers"),
    ],
)
def test_settings_that_are_no_numbers(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(TypeError, match=message):
        xgboost_objective(3, **settings)


def test_what_has_an_index_goes_by_it() -> None:
    y = pd.Series([0] * 50 + [1] * 10 + [2] * 40)
    balanced = len(y) / (3 * y.value_counts())  # in the order 0, 2, 1
    objective = xgboost_objective(3, class_weight=balanced)
    np.testing.assert_allclose(objective.loss.class_weight, 100 / np.array([150, 30, 120]))
    assert objective == xgboost_objective(3, class_weight=balanced.to_dict())
    assert objective != xgboost_objective(3, class_weight=balanced.to_numpy())
    assert xgboost_metric(3, x=pd.Series({1: 4, 0: 2, 2: 9}, dtype="Int64")).loss.x == (2, 4, 9)
    cost = pd.DataFrame(np.arange(9.0).reshape(3, 3))
    shuffled = cost.loc[[2, 0, 1], [1, 2, 0]]
    assert lightgbm_metric(3, cost=shuffled) == lightgbm_metric(3, cost=cost.to_numpy())


@pytest.mark.parametrize("classes", [1, 2.5, float("nan"), float("inf")])
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
        ([0, 1], np.zeros((2, 3)), [1, 1e300], r"weight of row 1 is 1e\+300, expected weights from 0 to 1e\+12"),
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


@pytest.mark.parametrize(
    ("labels", "scores", "weights", "message"),
    [
        (["low", "high"], np.zeros((2, 3)), None, "labels: found 'low', expected numbers; number the classes"),
        (["0", "1"], np.zeros((2, 3)), None, "labels: found '0'"),
        ([0, 1], np.full((2, 3), "a"), None, "predictions: found 'a'"),
        ([0, 1], np.zeros((2, 3)), ["1", "2"], "weights: found '1'"),
    ],
)
def test_rows_that_are_no_numbers(labels: Any, scores: Any, weights: Any, message: str) -> None:
    for f in (xgboost_objective(3, interface="sklearn"), lightgbm_metric(3, interface="sklearn")):
        with pytest.raises(TypeError, match=message):
            f(labels, scores, weights)


def test_predictions_of_the_other_kind_are_told() -> None:
    z, y = scores_and_labels()
    P = torch.tensor(z).softmax(-1).numpy()
    with pytest.raises(ValueError, match='choose predictions="probabilities"'):
        xgboost_metric(K, interface="sklearn")(y, P)
    with pytest.raises(ValueError, match='choose predictions="scores"'):
        xgboost_metric(K, interface="sklearn", predictions="probabilities")(y, z)
    for classes, mean in ((2, 0.25), (4, 0.625)):  # equal scores, before anything is learnt
        metric = xgboost_metric(classes, interface="sklearn")
        assert metric([0, 1], np.full((2, classes), 1 / classes)) == pytest.approx(mean)


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


def test_xgboost_splits_up_to_the_largest_sums_of_gradients_and_beyond_is_told() -> None:
    """It squares them in float32: from an overflow on each tree is one leaf, without a word."""
    xgb = pytest.importorskip("xgboost")
    rng = np.random.default_rng(0)
    X, y = rng.normal(size=(600, 3)), rng.integers(0, 2, size=600)
    data = xgb.DMatrix(X, y + 2 * (X[:, 0] > 0))
    settings = {"num_class": 4, "nthread": 1, "disable_default_eval_metric": True}
    history: dict[str, Any] = {}
    most = 1e19 / (600 * 3)
    for scale in (1e6, 0.99 * most):
        xgb.train(
            settings, data, 5, obj=xgboost_objective(4, transport=scale), custom_metric=xgboost_metric(4),
            evals=[(data, f"{scale:g}")], evals_result=history, verbose_eval=False,
        )  # fmt: skip
    small, large = (each["rps"] for each in history.values())
    np.testing.assert_allclose(large, small, rtol=0.05)  # where splits are equally good, rounding chooses
    assert large[-1] < 0.7 * large[0]
    for transport, weight in ((1.01 * most, 1.0), (1e11, 1e6)):
        data.set_weight(np.full(600, weight))
        with pytest.raises(ValueError, match=r"gradients of 600 rows may sum to .*finds no split"):
            xgb.train(settings, data, 1, obj=xgboost_objective(4, transport=transport))


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
        (([0, 1], 3), {"sample_weight": [1e308, 1e308]}, r"weight of row 0 is 1e\+308"),
        (([0, 1], 3), {"single": True}, "single is asked of 3 classes"),
        (([[0, 1]], 3), {}, "labels has shape"),
    ],
)
def test_starts_that_cannot_be(arguments: Any, settings: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        start_scores(*arguments, **settings)


def test_starts_of_words_are_told() -> None:
    with pytest.raises(TypeError, match=r"labels: found 'low', expected numbers; number the classes .*OrdinalEncoder"):
        start_scores(["low", "high"], 2)
    with pytest.raises(TypeError, match="sample_weight: found 'a', expected numbers"):
        start_scores([0, 1], 2, sample_weight=["a", "b"])
