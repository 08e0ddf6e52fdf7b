"""Recalibration: never a worse score on its own data, the truth recovered on many, little harm on few."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import minimize_scalar
from scipy.special import expit, softmax

from otloss.estimators import OrdinalRecalibration, Temperature
from otloss.metrics import ranked_probability_score
from tests.errors import raising


def draw(seed: int, n: int, distort: Callable[[np.ndarray], np.ndarray] = lambda p: p) -> tuple[np.ndarray, np.ndarray]:
    """Forecasts from cumulative logits, distorted, and outcomes drawn from the undistorted ones."""
    rng = np.random.default_rng(seed)
    below = expit(1.5 * (np.linspace(-1.5, 1.5, 4) - 1.5 * rng.normal(size=(n, 1))))
    truth = np.diff(below, axis=1, prepend=0, append=1)
    y = (rng.random((n, 1)) > below).sum(1)
    forecast = distort(truth)
    return forecast / forecast.sum(1, keepdims=True), y


def leaning(p: np.ndarray) -> np.ndarray:
    return p**2 * np.array([4.0, 3.0, 2.0, 1.0, 1.0])


def rps(y: Any, proba: Any, **given: Any) -> float:
    return ranked_probability_score(y, proba, labels=range(np.shape(proba)[1]), **given)


FAMILIES = [Temperature, OrdinalRecalibration, lambda **given: Temperature(criterion="nll", **given)]


@st.composite
def held_out(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    classes, n = draw(st.integers(1, 5)), draw(st.integers(1, 12))
    rng = np.random.default_rng(draw(st.integers(0, 10**6)))
    proba = softmax(rng.normal(size=(n, classes)) * draw(st.sampled_from([0.1, 2, 20, 300])), axis=1)
    if draw(st.booleans()):
        proba = np.round(proba)  # certain forecasts, ties of more than 1/2 left out
        proba[proba.sum(1) != 1] = np.eye(classes)[0]
    y = np.where(rng.random(n) < draw(st.sampled_from([0, 0.5, 1])), proba.argmax(1), rng.integers(0, classes, n))
    weight = rng.integers(0, 3, n) + (np.arange(n) == 0)
    return proba, y, weight, np.sort(rng.choice(50, classes, replace=False)).astype(float)


@settings(deadline=None, max_examples=80)
@given(held_out(), st.sampled_from([0.0, 2.0]))
def test_score_on_the_own_data_is_never_worse(data: Any, shrinkage: float) -> None:
    proba, y, weight, values = data
    before = rps(y, proba, values=values, sample_weight=weight)
    for family in FAMILIES[:2]:
        corrected = family(values=values, shrinkage=shrinkage).fit(proba, y, weight).predict(proba)
        assert (corrected >= 0).all()
        np.testing.assert_allclose(corrected.sum(1), 1)
        assert rps(y, corrected, values=values, sample_weight=weight) <= before * (1 + 1e-12) + 1e-15


@pytest.mark.parametrize(("temperature", "criterion"), [(0.4, "nll"), (3.0, "rps")])
def test_temperature_is_recovered(temperature: float, criterion: str) -> None:
    proba, y = draw(0, 20_000, lambda p: p**temperature)
    fitted = Temperature(criterion=criterion).fit(proba, y)
    assert fitted.temperature_ == pytest.approx(temperature, rel=0.05)


def test_temperature_is_the_minimum_of_the_score() -> None:
    proba, y = draw(1, 300, leaning)
    weight, values = np.random.default_rng(0).random(300), [0.0, 1.0, 2.0, 5.0, 9.0]

    def score(t: float) -> float:
        return rps(y, softmax(np.log(proba) / t, axis=1), values=values, sample_weight=weight)

    best = minimize_scalar(score, bounds=(0.2, 5), method="bounded", options={"xatol": 1e-8})
    fitted = Temperature(values=values, shrinkage=0).fit(proba, y, weight)
    assert fitted.temperature_ == pytest.approx(best.x, rel=1e-4)
    assert score(fitted.temperature_) <= best.fun + 1e-10


def test_the_deepest_of_several_valleys() -> None:
    # Right by a logit of 0.6, wrong by 0.3, wrong by 11.5: sharp forecasts are best, very flat ones next.
    logits, weight = np.array([0.6, -0.3, -11.5]), [0.72, 0.15, 0.13]
    proba = expit(np.stack([logits, -logits], axis=1))
    fitted = Temperature(shrinkage=0).fit(proba, [0, 0, 0], weight)
    grid = np.exp(np.linspace(-3, 3, 500))
    scores = [weight @ expit(-logits / t) ** 2 for t in grid]
    assert fitted.temperature_ == pytest.approx(grid[np.argmin(scores)], rel=0.02)
    assert fitted.temperature_ < 0.5
    assert rps([0] * 3, fitted.predict(proba), sample_weight=weight) <= min(scores) + 1e-12


def test_maps_of_thresholds_are_recovered() -> None:
    offset, slope = np.array([0.8, 0.5, 0.2, -0.1]), np.array([0.5, 0.6, 0.7, 0.8])
    rng = np.random.default_rng(2)
    truth = expit(np.linspace(-2, 2, 4) - rng.normal(size=(60_000, 1)))
    y = (rng.random((60_000, 1)) > truth).sum(1)
    below = expit((np.log(truth / (1 - truth)) - offset) / slope)
    assert (np.diff(below, axis=1) >= 0).all()
    fitted = OrdinalRecalibration().fit(np.diff(below, axis=1, prepend=0, append=1), y)
    np.testing.assert_allclose(fitted.offset_, offset, atol=0.06)
    np.testing.assert_allclose(fitted.slope_, slope, atol=0.06)


def test_certain_and_wrong_forecasts_are_corrected() -> None:
    rng = np.random.default_rng(8)
    y = rng.integers(0, 3, 600)
    seen = np.where(rng.random(600) < 0.7, y, rng.integers(0, 3, 600))
    corrected = OrdinalRecalibration().fit(np.eye(3)[seen], y).predict(np.eye(3))
    np.testing.assert_allclose(np.diag(corrected), 0.8, atol=0.06)
    assert (corrected > 0).all()
    # All but certain: the score is flat where the descent would start.
    nearly = softmax(12 * np.eye(3), axis=1)
    corrected = OrdinalRecalibration().fit(nearly[seen], y).predict(nearly)
    np.testing.assert_allclose(np.diag(corrected), 0.8, atol=0.06)


def test_least_floats_are_probabilities() -> None:
    proba = np.array([[1.0, 5e-324], [1.0, 0.0], [0.6, 0.4], [0.7, 0.3], [0.2, 0.8]])
    for y in ([0, 0, 1, 0, 1], [1, 0, 1, 0, 1]):
        corrected = OrdinalRecalibration().fit(proba, y).predict(proba)
        assert np.isfinite(corrected).all()
        np.testing.assert_allclose(corrected.sum(1), 1)
        assert rps(y, corrected) < rps(y, proba)


def test_no_class_of_positive_probability_ends_with_none() -> None:
    proba, y = draw(9, 50, lambda p: p**4)
    corrected = OrdinalRecalibration(shrinkage=0).fit(proba, y).predict(proba)
    assert (corrected >= proba * 0.9e-3).all()


@pytest.mark.parametrize("family", FAMILIES)
def test_rows_without_weight_and_the_unit_of_weights_do_not_count(family: Any) -> None:
    proba, y = draw(11, 60, leaning)
    new, _ = draw(12, 5)
    weight = np.random.default_rng(1).integers(0, 2, 60)
    fitted = family().fit(proba, y, weight)
    kept = weight > 0
    np.testing.assert_allclose(fitted.predict(new), family().fit(proba[kept], y[kept]).predict(new), atol=1e-6)
    np.testing.assert_allclose(fitted.predict(new), family().fit(proba, y, 7.5 * weight).predict(new), atol=1e-6)


def test_identity_is_exact() -> None:
    proba = np.array([[0.5, 0.3, 0.2]])
    for family in FAMILIES[:2]:
        np.testing.assert_array_equal(family(shrinkage=1e9).fit(proba, [0]).predict(proba).round(6), proba)
    certain = np.eye(3)
    np.testing.assert_array_equal(OrdinalRecalibration().fit(certain, [0, 1, 2]).predict(proba), proba)
    np.testing.assert_array_equal(Temperature().fit(certain, [0, 1, 2]).predict(proba), proba)


two = [[0.5, 0.5]]


test_bad_input = raising(
    (lambda: Temperature(criterion="nll").fit([[1.0, 0.0]], [1]), 'probability 0, so "nll" is infinite'),
    (lambda: OrdinalRecalibration().fit(two, [2]), r"y\[0\] is 2, expected 0 to 1, the column of proba"),
    (lambda: Temperature().fit(two, ["low"]), r"y\[0\] is 'low', expected 0 to 1, .* \[order.index\(label\)"),
    (lambda: Temperature().fit(two, [0.5]), r"y\[0\] is 0.5, expected 0 to 1"),
    (lambda: OrdinalRecalibration().fit(two, [0, 1]), "y has 2 classes and proba 1 rows"),
    (lambda: OrdinalRecalibration().fit(two, [0]).predict([[1.0]]), "proba has 1 columns, expected 2"),
)
