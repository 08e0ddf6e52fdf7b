"""Recalibrated ensembles against a linear program, and planted errors recovered; PITs against drawn ones."""

import numpy as np
import pytest
import torch
from scipy.optimize import linprog
from sklearn.base import clone

from otloss.estimators import EnsembleRecalibration
from otloss.losses import crps
from otloss.metrics import pit_histogram
from tests.errors import raising


def score(ensemble: np.ndarray, y: np.ndarray, weight: np.ndarray | None = None) -> float:
    scores = crps(torch.as_tensor(ensemble), torch.as_tensor(y)).numpy()
    return float(np.average(scores, weights=weight))


def drawn(seed: int, n: int, members: int) -> tuple[np.ndarray, np.ndarray]:
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
    columns = np.stack([np.ones((n, m)), np.tile(mean[:, None], m), residual, residual / spread[:, None]], -1)
    A, b = columns.reshape(n * m, 4), np.repeat(y, m)
    weight = weight / weight.sum()
    goal = np.concatenate([[0, 0, -weight @ spread, -weight.sum()], np.repeat(weight, m) / m])
    rows = np.block([[A, -np.eye(n * m)], [-A, -np.eye(n * m)]])
    free = [(None, None)] * 2 + [(0, None)] * (2 + n * m)
    return float(linprog(goal, rows, np.concatenate([b, -b]), bounds=free, method="highs").fun)


@pytest.mark.parametrize("seed", range(4))
def test_the_optimum_of_a_linear_program(seed: int) -> None:
    ensemble, y = drawn(seed, 9, 4)
    ensemble = 0.6 * ensemble + np.linspace(3, 4, 9)[:, None]
    weight = np.random.default_rng(seed).random(9)
    fitted = EnsembleRecalibration(shrinkage=0).fit(ensemble, y, weight)
    assert score(fitted.predict(ensemble), y, weight) == pytest.approx(best_score(ensemble, y, weight), rel=2e-4)


def test_a_planted_map_is_recovered() -> None:
    ensemble, y = drawn(0, 4000, 100)
    mean = ensemble.mean(1, keepdims=True)
    wrong = (mean + 4) / 0.8 + 0.5 * (ensemble - mean)  # factor 0.8, offset -4, scale 2
    fitted = EnsembleRecalibration(shrinkage=0).fit(wrong, y)
    actual = [fitted.offset_, fitted.factor_, fitted.scale_, fitted.added_]
    np.testing.assert_allclose(actual, [-4, 0.8, 2, 0], atol=0.1)
    assert score(fitted.predict(wrong), y) < 1.01 * score(ensemble, y)
    assert np.abs(pit_histogram(y, fitted.predict(wrong)) - 0.1).max() < 0.02


@pytest.mark.parametrize("shrinkage", [0.0, 4.0, 1e9])
@pytest.mark.parametrize("equal", [False, True])
def test_never_worse_on_its_own_data(shrinkage: float, equal: bool) -> None:
    for n in (1, 2, 7):
        ensemble, y = drawn(n, n, 3)
        if equal:
            ensemble[0] = 2.0
        fitted = EnsembleRecalibration(shrinkage=shrinkage).fit(ensemble, y)
        after = fitted.predict(ensemble)
        assert score(after, y) <= score(ensemble, y) + 1e-12
        assert np.isfinite(after).all()
        if shrinkage == 1e9:
            np.testing.assert_allclose(after, ensemble, atol=1e-6)
        for unit in (7.0, 1e-9, 1e6):  # the unit is free
            moved = clone(fitted).fit(unit * (15 + ensemble), unit * (15 + y)).predict(unit * (15 + ensemble))
            np.testing.assert_allclose(moved / unit, 15 + after, atol=0.02 * np.ptp(after) + 1e-6)


def test_pit_of_calibrated_ensembles_is_flat_and_ties_are_shared() -> None:
    ensemble, y = drawn(1, 20_000, 7)
    assert np.abs(pit_histogram(y, ensemble, bins=8) - 1 / 8).max() < 0.01
    ensemble, y = np.round(ensemble), np.round(y)  # ties are the rule
    weight = np.random.default_rng(0).random(len(y))
    rng = np.random.default_rng(1)
    low, high = (ensemble < y[:, None]).sum(1), (ensemble <= y[:, None]).sum(1) + 1
    pit = rng.uniform(low, high) / 8
    expected = np.histogram(pit, np.linspace(0, 1, 6), weights=weight / weight.sum())[0]
    np.testing.assert_allclose(pit_histogram(y, ensemble, bins=5, sample_weight=weight), expected, atol=0.01)


TWO = np.ones((2, 3))


test_bad_input = raising(
    (lambda: EnsembleRecalibration().fit(TWO[0], [1.0]), r"ensemble has shape \(3,\)"),
    (lambda: EnsembleRecalibration().fit(TWO, [1.0]), r"y has shape \(1,\)"),
    (lambda: EnsembleRecalibration().fit(TWO * np.inf, [1.0, 2.0]), r"ensemble holds inf at \(0, 0\)"),
    (lambda: EnsembleRecalibration().predict(TWO), "not fitted"),
)
