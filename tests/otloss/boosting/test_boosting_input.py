"""Boosting callables as objects, their errors, and the scores to start from."""

import pickle
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

from otloss.boosting import lightgbm_metric, start_scores, xgboost_metric, xgboost_objective
from tests.errors import raising
from tests.otloss.boosting.boosting_cases import VALUES, K, scores_and_labels


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
    ({"class_weight": pd.Series([1, 2, 3], index=[0, 2, 1])}, TypeError, r"Series.*class_weight.sort_index\(\)"),
    ({"num_classes": 2.5}, "num_classes is 2.5, expected a whole number, at least 2"),
    call=lambda settings: xgboost_objective(**({"num_classes": 3} | settings)),
)


TWO = np.zeros((2, 3))


def on_bad_rows(labels: Any, scores: Any, weights: Any) -> None:
    """By numpy and, from 32 rows on, by the kernel; objective and metric raise the same error, that of the metric."""
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
    ([0, 1], TWO, [1, -1], "weight of row 1 is -1"),
    ([0, 1], TWO, [1, 1, 1], r"weights have shape \(\d+,\), expected \(\d+,\)"),
    ([0, 1], np.array([[0, 0, 0], [0, np.nan, 0]]), None, "scores of row 1"),
    call=on_bad_rows,
)


def test_predictions_of_the_other_kind_and_the_other_interface_raise() -> None:
    class Data:
        def get_label(self) -> Any: ...

    z, y = scores_and_labels()
    P = torch.tensor(z).softmax(-1).numpy()
    with pytest.raises(ValueError, match='choose predictions="probabilities"'):
        xgboost_metric(K, interface="sklearn")(y, P)
    with pytest.raises(ValueError, match='choose predictions="scores"'):
        xgboost_metric(K, interface="sklearn", predictions="probabilities")(y, z)
    for classes, mean in ((2, 0.25), (4, 0.625)):  # equal scores, before anything is learnt
        metric = xgboost_metric(classes, interface="sklearn")
        assert metric([0, 1], np.full((2, classes), 1 / classes)) == pytest.approx(mean)
    # Two scores from 1/2 each always sum to 1, as probabilities do.
    assert xgboost_metric(2, interface="sklearn")([0, 1], np.array([[0.2, 0.8], [0.4, 0.6]])) > 0
    with pytest.raises(TypeError, match='choose interface="sklearn"'):
        xgboost_objective(K)(y, z)
    with pytest.raises(TypeError, match='choose interface="native"'):
        xgboost_objective(K, interface="sklearn")(z, Data())
    with pytest.raises(ValueError, match="the weights of 2 rows sum to 0"):
        xgboost_metric(3, interface="sklearn")([0, 1], np.zeros((2, 3)), [0, 0])


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
    ([], {}, r"labels have shape \(0,\)"),
    ([0, 1], {"sample_weight": [0, 0]}, "some weight above 0"),
    call=lambda labels, settings: start_scores(labels, 3, **settings),
)
