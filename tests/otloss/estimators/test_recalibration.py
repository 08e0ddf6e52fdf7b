"""Recalibration: never a worse score on its own data, the truth recovered on many, little harm on few."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import linprog, minimize, minimize_scalar
from scipy.special import expit, softmax
from sklearn.base import clone

from otloss.estimators import EnsembleRecalibration, OrdinalRecalibration, Temperature
from otloss.losses import crps
from otloss.metrics import Distribution, pit_histogram, ranked_probability_score
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


@given(held_out(), st.sampled_from([0.0, 2.0]))
def test_score_on_the_own_data_is_never_worse(data: Any, shrinkage: float) -> None:
    proba, y, weight, values = data
    before = rps(y, proba, values=values, sample_weight=weight)
    for family in FAMILIES[:2]:
        corrected = family(values=values, shrinkage=shrinkage).fit(proba, y, weight).predict(proba)
        assert (corrected >= 0).all()
        np.testing.assert_allclose(corrected.sum(1), 1)
        assert rps(y, corrected, values=values, sample_weight=weight) <= before * (1 + 1e-12) + 1e-15


def test_temperature_is_recovered_and_the_minimum_of_the_score() -> None:
    for temperature, criterion in ((0.4, "nll"), (3.0, "rps")):
        proba, y = draw(0, 20_000, lambda p, t=temperature: p**t)
        assert Temperature(criterion=criterion).fit(proba, y).temperature_ == pytest.approx(temperature, rel=0.05)
    proba, y = draw(1, 300, leaning)
    given = {"values": [0.0, 1.0, 2.0, 5.0, 9.0], "sample_weight": np.random.default_rng(0).random(300)}

    def score(t: float) -> float:
        return rps(y, softmax(np.log(proba) / t, axis=1), **given)

    best = minimize_scalar(score, bounds=(0.2, 5), method="bounded", options={"xatol": 1e-8})
    fitted = Temperature(values=given["values"], shrinkage=0).fit(proba, y, given["sample_weight"])
    assert fitted.temperature_ == pytest.approx(best.x, rel=1e-4)


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


@pytest.mark.parametrize(("offset", "slope"), [(1.1, 1.0), (0.0, 0.6)])
def test_the_map_of_a_rare_event_has_the_least_score(offset: float, slope: float) -> None:
    rng = np.random.default_rng(0)
    truth = expit(-5.8 + rng.normal(size=100_000))
    happened = rng.random(100_000) < truth
    logits = (np.log(truth / (1 - truth)) - offset) / slope

    def score(parameters: np.ndarray) -> float:
        return 1e3 * float(((expit(parameters[0] + np.exp(parameters[1]) * logits) - happened) ** 2).mean())

    forecast = np.column_stack([expit(logits), 1 - expit(logits)])
    fitted = OrdinalRecalibration(shrinkage=0).fit(forecast, 1 - happened)
    reached = score(np.array([fitted.offset_[0], np.log(fitted.slope_[0])]))
    least = minimize(score, [offset, np.log(slope)], method="Nelder-Mead", options={"xatol": 1e-6, "fatol": 1e-10}).fun
    assert reached - least < 1e-3 * (score(np.zeros(2)) - least)


@pytest.mark.parametrize("seed", [2, 5, 6])
def test_forecasts_far_too_low_do_not_end_in_a_worse_local_minimum(seed: int) -> None:
    """One frequency for all beats what a descent from the forecasts themselves ends at (slope 10)."""
    rng = np.random.default_rng(seed)
    forecast, happened = expit(2 * rng.normal(size=200) - 6), rng.random(200) < 0.06
    proba = np.column_stack([1 - forecast, forecast])
    after = OrdinalRecalibration(shrinkage=0).fit(proba, happened).predict(proba)[:, 1]
    assert np.mean((after - happened) ** 2) < happened.var() + 3e-4


@pytest.mark.parametrize(("kind", "seed"), [
    ("clusters", 17), ("clusters", 113), ("clusters", 132), ("heavy", 12), ("heavy", 24), ("far", 16), ("far", 58),
])  # fmt: skip
def test_maps_have_the_least_score_that_many_descents_find(kind: str, seed: int) -> None:
    """Draws with several local minima; the score of one threshold is descended from all places of a grid of maps."""
    rng = np.random.default_rng(seed)
    normal = rng.normal(size=40)
    logit = {
        "clusters": rng.choice([-3.0, 0.0, 4.0], 40) + 0.1 * normal,
        "heavy": 3 * rng.standard_t(1.5, 40),
        "far": np.where(rng.random(40) < 0.1, 20 * normal, normal),
    }[kind].clip(-30, 30)
    happened = rng.random(40) < expit(2 * rng.normal() + logit * np.exp(rng.normal()))
    if rng.random() < 0.5:
        happened = ~happened if rng.random() < 0.5 else rng.random(40) < 0.2

    def score(p: np.ndarray) -> float:
        return float(np.mean((expit(p[0] + np.exp(p[1]) * logit) - happened) ** 2))

    starts = [(a, b) for a in range(-18, 19, 6) for b in range(-3, 4)]
    least = min(minimize(score, start, method="L-BFGS-B", bounds=[(-20, 20), (-3, 3)]).fun for start in starts)
    model = OrdinalRecalibration(shrinkage=0).fit(np.column_stack([expit(-logit), expit(logit)]), happened)
    # These forecasts are of the class 1, and the map is of P(Y <= 0).
    assert score(np.array([-model.offset_[0], np.log(model.slope_[0])])) < least + 1e-4


def test_certain_and_wrong_forecasts_are_corrected() -> None:
    rng = np.random.default_rng(8)
    y = rng.integers(0, 3, 600)
    seen = np.where(rng.random(600) < 0.7, y, rng.integers(0, 3, 600))
    for forecasts in (np.eye(3), softmax(12 * np.eye(3), axis=1)):
        corrected = OrdinalRecalibration().fit(forecasts[seen], y).predict(forecasts)
        np.testing.assert_allclose(np.diag(corrected), 0.8, atol=0.06)
        assert (corrected > 0).all()
    proba = np.array([[1.0, 5e-324], [1.0, 0.0], [0.6, 0.4], [0.7, 0.3], [0.2, 0.8]])
    corrected = OrdinalRecalibration().fit(proba, [1, 0, 1, 0, 1]).predict(proba)
    np.testing.assert_allclose(corrected.sum(1), 1)
    assert rps([1, 0, 1, 0, 1], corrected) < rps([1, 0, 1, 0, 1], proba)


@pytest.mark.parametrize("family", FAMILIES)
def test_rows_without_weight_and_the_unit_of_weights_do_not_count(family: Any) -> None:
    proba, y = draw(11, 60, leaning)
    new, _ = draw(12, 5)
    weight = np.random.default_rng(1).integers(0, 2, 60)
    fitted = family().fit(proba, y, weight)
    kept = weight > 0
    np.testing.assert_allclose(fitted.predict(new), family().fit(proba[kept], y[kept]).predict(new), atol=1e-6)
    np.testing.assert_allclose(fitted.predict(new), family().fit(proba, y, 7.5 * weight).predict(new), atol=1e-6)


def crps_of(ensemble: np.ndarray, y: np.ndarray, weight: np.ndarray | None = None) -> float:
    scores = crps(torch.as_tensor(ensemble), torch.as_tensor(y)).numpy()
    return float(np.average(scores, weights=weight))


def calibrated(seed: int, n: int, members: int) -> tuple[np.ndarray, np.ndarray]:
    """Calibrated ensembles of different spread."""
    rng = np.random.default_rng(seed)
    level, spread = rng.normal(5, 3, n), rng.uniform(0.5, 2, n)
    return level[:, None] + spread[:, None] * rng.normal(size=(n, members)), level + spread * rng.normal(size=n)


def best_score(ensemble: np.ndarray, y: np.ndarray, weight: np.ndarray) -> float:
    """The least weighted score of any map, by a linear program in the four numbers and all absolute errors."""
    n, m = ensemble.shape
    mean = ensemble.mean(1)
    residual = ensemble - mean[:, None]
    spread = np.abs(ensemble[:, :, None] - ensemble[:, None]).mean((1, 2)) / 2
    level = (mean - mean.mean()) / mean.std()
    columns = np.stack([np.ones((n, m)), np.tile(level[:, None], m), residual, residual / spread[:, None]], -1)
    A, b = columns.reshape(n * m, 4), np.repeat(y - y.mean(), m)
    weight = weight / weight.sum()
    goal = np.concatenate([[0, 0, -weight @ spread, -weight.sum()], np.repeat(weight, m) / m])
    rows = np.block([[A, -np.eye(n * m)], [-A, -np.eye(n * m)]])
    free = [(None, None)] * 2 + [(0, None)] * (2 + n * m)
    return float(linprog(goal, rows, np.concatenate([b, -b]), bounds=free, method="highs").fun)


@pytest.mark.parametrize("seed", range(4))
def test_ensembles_have_the_optimum_of_a_linear_program(seed: int) -> None:
    ensemble, y = calibrated(seed, 9, 4)
    ensemble = 0.6 * ensemble + np.linspace(3, 4, 9)[:, None]
    weight = np.random.default_rng(seed).random(9)
    fitted = EnsembleRecalibration(shrinkage=0).fit(ensemble, y, weight)
    assert crps_of(fitted.predict(ensemble), y, weight) == pytest.approx(best_score(ensemble, y, weight), rel=2e-4)


@pytest.mark.parametrize(("factor", "spread"), [(1.0, 0.1), (1.0, 5.0), (1.3, 0.1), (0.5, 5.0)])
@pytest.mark.parametrize(("far", "start"), [(1e3, 1e3), (1e4, 10.0), (100.0, 1e5)])
def test_levels_may_vary_far_more_than_the_error(far: float, start: float, factor: float, spread: float) -> None:
    ensemble, y = calibrated(5, 30, 4)
    level = start + far * np.random.default_rng(6).normal(size=30)
    mean = ensemble.mean(1, keepdims=True)
    ensemble, y = factor * (level[:, None] + mean) + spread * (ensemble - mean), level + y
    fitted = EnsembleRecalibration(shrinkage=0).fit(ensemble, y)
    assert crps_of(fitted.predict(ensemble), y) == pytest.approx(best_score(ensemble, y, np.ones(30)), rel=2e-3)


@pytest.mark.parametrize("shrinkage", [0.0, 4.0, 1e9])
def test_ensembles_are_never_worse_on_their_own_data_in_any_unit(shrinkage: float) -> None:
    for n in (1, 2, 7):
        ensemble, y = calibrated(n, n, 3)
        ensemble[0] = 2.0 if n == 7 else ensemble[0]
        fitted = EnsembleRecalibration(shrinkage=shrinkage).fit(ensemble, y)
        after = fitted.predict(ensemble)
        assert crps_of(after, y) <= crps_of(ensemble, y) + 1e-12
        if shrinkage == 1e9:
            np.testing.assert_allclose(after, ensemble, atol=1e-6)
        for unit in (7.0, 1e-9, 1e6):
            moved = clone(fitted).fit(unit * (15 + ensemble), unit * (15 + y)).predict(unit * (15 + ensemble))
            np.testing.assert_allclose(moved / unit, 15 + after, atol=0.02 * np.ptp(after) + 1e-6)


def test_pit_of_calibrated_ensembles_is_flat_and_ties_are_shared() -> None:
    ensemble, y = calibrated(1, 20_000, 7)
    assert np.abs(pit_histogram(y, ensemble, bins=8) - 1 / 8).max() < 0.01
    ensemble, y = np.round(ensemble), np.round(y)  # ties are the rule
    weight = np.random.default_rng(0).random(len(y))
    rng = np.random.default_rng(1)
    low, high = (ensemble < y[:, None]).sum(1), (ensemble <= y[:, None]).sum(1) + 1
    pit = rng.uniform(low, high) / 8
    expected = np.histogram(pit, np.linspace(0, 1, 6), weights=weight / weight.sum())[0]
    np.testing.assert_allclose(pit_histogram(y, ensemble, bins=5, sample_weight=weight), expected, atol=0.01)
    tenths = (ensemble / 10).astype(np.float32), y / 10  # 0.7 is not 0.7 in float64
    for members, true in (
        tenths,
        (torch.from_numpy(tenths[0]), tenths[1]),
        (ensemble / 10, (y / 10).astype(np.float32)),
    ):
        np.testing.assert_allclose(pit_histogram(true, members, bins=5, sample_weight=weight), expected, atol=0.01)


@pytest.mark.parametrize("unit", [0.1, 10.01, 10_132.53])
def test_pit_of_float32_does_not_depend_on_the_order_or_the_size_of_numbers(unit: float) -> None:
    counts = np.r_[np.zeros((500, 9), int), np.random.default_rng(0).integers(0, 9, (500, 9))]
    y = counts[:, 0]
    expected = pit_histogram(y, counts[:, 1:])
    members = (counts[:, 1:] * unit).astype(np.float32)
    for same in (members, members.astype(float), members.tolist(), torch.from_numpy(members)):
        np.testing.assert_array_equal(pit_histogram(y * unit, same), expected)
    np.testing.assert_allclose(pit_histogram(y[::-1] * unit, members[::-1]), expected)


def test_pit_of_large_whole_numbers_is_exact() -> None:
    y = np.array([1e8, 2e8, 3e8])
    members = y[:, None] + [-2, -1, 1, 2]
    for whole in (members, members.astype(int)):
        np.testing.assert_array_equal(pit_histogram(y, whole, bins=5), [0, 0, 1, 0, 0])
    ticks = np.array([1_000_000.25, 1_000_001.5, 1_000_002.75])  # exact in float32
    found = pit_histogram(ticks, ticks[:, None] + [-0.02, -0.01, 0.01, 0.02], bins=5)
    np.testing.assert_array_equal(found, [0, 0, 1, 0, 0])
    seconds = 86_400.0 * np.arange(20_000, 20_010)
    np.testing.assert_array_equal(pit_histogram(seconds, seconds[:, None] - [10, 20, 30, 50], bins=5), [0, 0, 0, 0, 1])


two, TWO = [[0.5, 0.5]], np.ones((2, 3))
test_bad_input = raising(
    (lambda: Temperature(criterion="nll").fit([[1.0, 0.0]], [1]), 'probability 0, so "nll" is infinite'),
    (lambda: Temperature().fit(two, ["low"]), r"y\[0\] is 'low', expected 0 to 1, .* \[order.index\(label\)"),
    (lambda: Temperature().fit(two, [0.5]), r"y\[0\] is 0.5, expected 0 to 1"),
    (lambda: OrdinalRecalibration().fit(two, [0]).predict([[1.0]]), "proba has 1 columns, expected 2"),
    (lambda: EnsembleRecalibration().fit(TWO * 1e200, [1.0, 2.0]), "ensemble holds numbers up to 1e.200 in size"),
    (lambda: EnsembleRecalibration().fit(TWO * np.inf, [1.0, 2.0]), r"ensemble holds inf at \(0, 0\)"),
)


@pytest.mark.parametrize(("n", "members"), [(9, 1), (4, 3)])
def test_the_rounding_of_equal_forecasts_is_not_stretched(n: int, members: int) -> None:
    """Deviations of their means, or of the members, are not quite 0: the factor was -2e15, or the scale 1e15."""
    for value in (0.1, 7.7, 1e6 + 0.1):
        ensemble, y = np.full((n, members), value), value / 2 + 0.1 * np.random.default_rng(0).normal(size=n)
        model = EnsembleRecalibration(shrinkage=0.0).fit(ensemble, y)
        assert (model.factor_, model.scale_, model.added_) == (1.0, 1.0, 0.0)


@pytest.mark.parametrize("other", [1.0, 1e18, 1e200])
@pytest.mark.parametrize("members", [1, 3])
def test_ensembles_without_weight_do_not_count(other: float, members: int) -> None:
    """Beside one, equal forecasts were not equal: the factor was -1e15; one of 1e200 kept the fit from ending."""
    for ensemble in (np.full((9, members), 0.1), calibrated(3, 9, 4)[0][:, :members]):
        y = 0.05 + 0.1 * np.random.default_rng(0).normal(size=9)
        model = EnsembleRecalibration(shrinkage=0)
        expected = vars(clone(model).fit(ensemble, y))
        more = np.vstack([ensemble, np.full((1, members), other)]), np.append(y, 1.0)
        assert vars(model.fit(*more, np.append(np.ones(9), 0.0))) == expected


@pytest.mark.parametrize("family", [Temperature, OrdinalRecalibration])
def test_data_frames_name_their_columns_in_rank_order(family: Any) -> None:
    pd = pytest.importorskip("pandas")
    proba, y = draw(0, 200, leaning)
    model = family().fit(proba, y)
    frame = pd.DataFrame(proba)
    np.testing.assert_array_equal(family().fit(frame, y).predict(frame), model.predict(proba))
    for other in (frame[frame.columns[::-1]], frame.set_axis(list("abcde"), axis=1)):
        for call in (lambda x=other: family().fit(x, y), lambda x=other: model.predict(x)):
            with pytest.raises(ValueError, match=r"data frame with the columns .* rank order; pass .*to_numpy"):
                call()


@pytest.mark.parametrize("family", [Temperature, OrdinalRecalibration])
@pytest.mark.parametrize("names", [["low", "mid", "high", "more", "most"], [1, 2, 3, 4, 5]], ids=["words", "numbers"])
def test_labels_of_a_distribution_are_kept(family: Any, names: list[Any]) -> None:
    """Metrics read the recalibrated columns by the alphabet, or took labels for positions."""
    proba, y = draw(0, 200, leaning)
    forecast, outcomes = Distribution(proba, labels=names), np.array(names)[y]
    model = family().fit(forecast, y)
    after = model.predict(forecast)
    np.testing.assert_array_equal(after.labels, names)
    np.testing.assert_array_equal(np.asarray(after), family().fit(proba, y).predict(proba))
    assert ranked_probability_score(outcomes, after) == pytest.approx(rps(y, np.asarray(after)))
    assert ranked_probability_score(outcomes, after) < ranked_probability_score(outcomes, forecast)
    one_class_absent = y < 4
    with pytest.raises(ValueError, match=r"y holds labels of proba, .*positions from 0|is '[a-z]+', expected 0 to 4"):
        family().fit(forecast[one_class_absent], outcomes[one_class_absent])
    for call in (lambda: family().fit(forecast[:, ::-1], y), lambda: model.predict(forecast[:, ::-1])):
        with pytest.raises(ValueError, match="result of an operation on a Distribution"):
            call()
    if family is OrdinalRecalibration:
        with pytest.raises(ValueError, match=r"proba has the labels .*, expected .* as in the fit"):
            model.predict(Distribution(proba, labels=names[::-1]))
