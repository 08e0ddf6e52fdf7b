"""Rows without weight, weights of held-out rows, and units of the loss."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.exceptions import ConvergenceWarning

from otloss.estimators import OrdinalBoostingClassifier, OrdinalClassifier, OrdinalRecalibration, Temperature
from otloss.estimators.calibrated import above_zero
from otloss.estimators.criterion import Criterion
from otloss.estimators.scores import ScoreFunction
from otloss.estimators.training import Adam, EarlyStopping, Objective, Rows, train_adam, train_epoch
from otloss.estimators.weights import row_weights, split_off
from tests.otloss.estimators.test_estimators import BOTH, both, ordered_rows

NETWORK: dict[str, Any] = {"hidden_layer_sizes": (6,), "learning_rate": 0.03, "max_iter": 15, "random_state": 0}


def proba(model: Any, *rows: Any, of: np.ndarray) -> np.ndarray:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        return model.fit(*rows).predict_proba(of)


# ---- no weight, no row ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "model",
    [
        OrdinalClassifier(calibration="temperature", random_state=0),
        OrdinalClassifier(**NETWORK),
        OrdinalClassifier(**NETWORK, early_stopping=False, batch_size=30),
        OrdinalBoostingClassifier(n_estimators=10, calibration="ordinal", random_state=0),
        OrdinalBoostingClassifier(booster="lightgbm", n_estimators=10, random_state=0),
    ],
    ids=str,
)
def test_rows_without_weight_are_rows_left_out(model: Any) -> None:
    if isinstance(model, OrdinalBoostingClassifier):
        pytest.importorskip(model.booster)
    X, y = ordered_rows(150)
    weight = np.random.default_rng(0).exponential(size=150)
    weight[::3] = 0
    kept = weight > 0
    expected = proba(model, X[kept], y[kept], weight[kept], of=X)
    np.testing.assert_array_equal(proba(model, X, y, weight, of=X), expected)


def test_rows_without_weight_are_left_out_of_a_part() -> None:
    X, y = ordered_rows(60)
    weight = np.where(np.arange(60) % 3, 1.0, 0.0)
    models = [OrdinalClassifier(batch_size=10, random_state=0, learning_rate=0.1) for _ in range(2)]
    models[0].partial_fit(X, y, sample_weight=weight)
    models[1].partial_fit(X[weight > 0], y[weight > 0])
    np.testing.assert_array_equal(models[0].predict_proba(X), models[1].predict_proba(X))


@pytest.mark.parametrize("seed", range(20))
def test_one_row_at_least_is_held_out_of_the_largest_class(seed: int) -> None:
    for positions in (np.zeros(5, dtype=int), np.array([0, 1, 1, 1, 2])):
        kept, held = split_off(positions, 0.1, random=np.random.RandomState(seed), purpose="testing")
        assert len(held) == 1
        assert len(kept) == 4
        assert np.bincount(positions)[positions[held[0]]] > 1


def test_balanced_counts_by_weight() -> None:
    X, y = ordered_rows(60)
    weight = np.random.default_rng(0).exponential(size=60) * np.array([1.0, 5.0, 0.2])[y]
    order = OrdinalClassifier().fit(X, y)._order
    balanced = row_weights(weight, "balanced", order=order, positions=y)
    np.testing.assert_allclose(np.bincount(y, weights=balanced), weight.sum() / 3)


# ---- units ---------------------------------------------------------------------------------------------------------


@BOTH
@pytest.mark.parametrize("scale", [2.0**-20, 2.0**20])
def test_the_unit_of_values_and_costs_is_no_matter(index: int, scale: float) -> None:
    X, y = ordered_rows(120, 4)
    values = np.array([0.0, 1.0, 4.0, 5.0])
    for settings in ({"values": values}, {"values": values, "power": 1}, {"cost": np.abs(values[:, None] - values)}):
        name = next(iter(settings))
        scaled = {**settings, name: np.asarray(settings[name]) * scale}
        plain, other = (both(cross_entropy=0.1, **chosen)[index].fit(X, y) for chosen in (settings, scaled))
        np.testing.assert_array_equal(plain.predict_proba(X), other.predict_proba(X))
        if name == "values":
            np.testing.assert_allclose(other.expected_value(X), scale * plain.expected_value(X))


def test_a_cost_of_distances_has_the_unit_of_its_values() -> None:
    X, y = ordered_rows(120, 4)
    values = np.array([10.0, 30.0, 31.0, 70.0])
    by_values = OrdinalClassifier(values=values, power=1).fit(X, y).predict_proba(X)
    by_cost = OrdinalClassifier(cost=np.abs(values[:, None] - values)).fit(X, y).predict_proba(X)
    np.testing.assert_allclose(by_values, by_cost, atol=1e-4)


def test_small_gaps_are_trained_on() -> None:
    X, y = ordered_rows()
    model = OrdinalClassifier(values=[0, 1e-5, 2e-5], cross_entropy=0.0, alpha=0.0).fit(X, y)
    assert model.n_iter_ > 5
    small = OrdinalClassifier(transport=1e-5, cross_entropy=0.0, alpha=1e-5).fit(X, y).predict_proba(X)
    np.testing.assert_allclose(
        small, OrdinalClassifier(cross_entropy=0.0, alpha=1.0).fit(X, y).predict_proba(X), atol=1e-4
    )


# ---- weights and parts in calibration ------------------------------------------------------------------------------


@BOTH
@pytest.mark.parametrize(("kind", "method"), [("temperature", Temperature), ("ordinal", OrdinalRecalibration)])
def test_calibration_is_that_of_the_rows_held_out(
    index: int, kind: str, method: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By weight and class values, on rows that training did not see; and predictions follow it."""
    X, y = ordered_rows(160, 4)
    weight, values = np.random.default_rng(0).exponential(size=160), np.array([0.0, 1.0, 8.0, 9.0])
    trained: list[np.ndarray] = []
    model = both(calibration=kind, values=values, power=1, decode="mean")[index]
    train = model._train
    monkeypatch.setattr(model, "_train", lambda X, *rest, **more: (trained.append(X), train(X, *rest, **more)), False)
    model.random_state = 0
    model.fit(X, y, weight)
    kept = (X[:, None] == trained[0]).all(2).any(1)
    assert 20 < (~kept).sum() < 44
    raw = above_zero(model._raw_distribution(X))
    expected = method(values=values).fit(raw[~kept], y[~kept], sample_weight=weight[~kept]).predict(raw)
    np.testing.assert_allclose(model.predict_proba(X), expected, rtol=1e-9)
    np.testing.assert_array_equal(model._calibration.values, values)
    for wrong in (
        method(values=values).fit(raw[kept], y[kept], sample_weight=weight[kept]),
        method(values=values).fit(raw[~kept], y[~kept]),
    ):
        assert np.abs(wrong.predict(raw) - expected).max() > 1e-6
    decoded = np.abs((expected @ values)[:, None] - values).argmin(1)
    np.testing.assert_array_equal(model.predict(X), decoded)
    assert (decoded != np.abs((raw @ values)[:, None] - values).argmin(1)).any()


# ---- Adam ----------------------------------------------------------------------------------------------------------


def objective_and_rows(alpha: float = 0.6) -> tuple[Objective, Rows, np.ndarray]:
    X, y = ordered_rows(60, 3)
    scores = ScoreFunction(3, (), 3, "softmax")
    objective = Objective(scores, Criterion(np.arange(3.0), 2, None, 1.0, 0.2), alpha=alpha)
    rows = Rows.of(X, y, np.random.default_rng(0).exponential(size=60) ** 3)
    return objective, rows, scores.start(np.full(3, 1 / 3), np.random.RandomState(0))


def test_batches_count_by_their_weight(monkeypatch: pytest.MonkeyPatch) -> None:
    """The gradients of the batches of an epoch sum to that of all rows, times the number of batches."""
    objective, rows, parameters = objective_and_rows()
    met: list[np.ndarray] = []
    monkeypatch.setattr(Adam, "step", lambda self, gradient: met.append(gradient) or np.zeros_like(gradient))
    parameters = parameters + 0.3
    after, loss = train_epoch(
        objective, parameters, rows, adam=Adam(), learning_rate=1.0, batch_size=12, random=np.random.RandomState(0)
    )
    np.testing.assert_array_equal(after, parameters)
    assert len(met) == 5
    _, whole = objective.value_and_gradient(parameters, rows, float(rows.weight.sum()))
    np.testing.assert_allclose(np.mean(met, 0), whole, atol=1e-12)
    with torch.no_grad():
        assert loss > float(objective.data_loss(torch.from_numpy(parameters), rows))


def test_adam_returns_the_best_parameters_and_not_the_last() -> None:
    objective, rows, start = objective_and_rows(alpha=0.0)
    losses: list[float] = []
    noise = Rows(rows.features[:20], rows.target[20:40], rows.weight[:20])
    found = train_adam(
        objective, start, rows[np.arange(20, 60)], held_out=noise, max_iter=30, n_iter_no_change=30, tol=0.0, verbose=0,
        learning_rate=0.3, batch_size=60, random=np.random.RandomState(0),
    )  # fmt: skip
    parameters, adam = start, Adam()
    for _ in range(30):
        parameters, _ = train_epoch(
            objective, parameters, rows[np.arange(20, 60)], adam=adam, learning_rate=0.3, batch_size=60,
            random=np.random.RandomState(0),
        )  # fmt: skip
        with torch.no_grad():
            losses.append(float(objective.data_loss(torch.from_numpy(parameters), noise)))
    assert found.epochs == int(np.argmin(losses)) + 1 < 30
    with torch.no_grad():
        assert float(objective.data_loss(torch.from_numpy(found.parameters), noise)) == min(losses)


def test_the_best_round_is_remembered() -> None:
    stopping = EarlyStopping(patience=2, tol=0.1)
    assert [stopping.stop_after(loss, np.array(loss)) for loss in (3.0, 1.0, 0.95, 0.97)] == [False, False, False, True]
    assert (stopping.best, stopping.round, float(stopping.parameters)) == (0.95, 3, 0.95)


def test_partial_fit_shares_the_penalty_among_the_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    X, y = ordered_rows(80)
    weight = np.random.default_rng(0).exponential(size=80)
    pulls: list[float] = []
    epoch = train_epoch

    def spy(objective: Objective, *rest: Any, **more: Any) -> Any:
        pulls.append(objective.alpha)
        return epoch(objective, *rest, **more)

    monkeypatch.setattr("otloss.estimators.classifier.train_epoch", spy)
    model = OrdinalClassifier(alpha=2.0)
    for part in (slice(0, 50), slice(50, 80)):
        model.partial_fit(X[part], y[part], classes=[0, 1, 2], sample_weight=weight[part])
    np.testing.assert_allclose(pulls, [2.0, 2.0 * weight[50:].sum() / weight.sum()])
