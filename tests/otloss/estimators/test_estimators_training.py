"""What the linear and multi-layer models learn, against closed forms, other packages and finite differences."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import minimize
from scipy.special import expit, log_expit
from sklearn.exceptions import ConvergenceWarning
from sklearn.linear_model import LogisticRegression

from otloss.estimators import OrdinalClassifier
from otloss.estimators.criterion import Criterion
from otloss.estimators.decode import decode
from otloss.estimators.labels import label_order
from otloss.estimators.scores import ScoreFunction
from otloss.estimators.training import Objective, Rows
from otloss.estimators.weights import split_off
from tests.otloss.estimators.test_estimators import ordered_rows


def ranked_probability_score(P: np.ndarray, y: np.ndarray, values: Any) -> np.ndarray:
    below = P.cumsum(1)[:, :-1] - (y[:, None] <= np.arange(P.shape[1] - 1))
    return below**2 @ np.diff(values)


# ---- optima --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("alpha", [0.3, 3.0])
def test_cross_entropy_alone_is_logistic_regression(alpha: float) -> None:
    X, y = ordered_rows(120, 4)
    weight = np.random.default_rng(1).exponential(size=len(y)) * (np.arange(len(y)) % 7 > 0)
    ours = OrdinalClassifier(transport=0.0, cross_entropy=1.0, alpha=alpha, standardize=False, tol=1e-8)
    theirs = LogisticRegression(C=1 / alpha, tol=1e-10, max_iter=1000)
    np.testing.assert_allclose(
        ours.fit(X, y, weight).predict_proba(X), theirs.fit(X, y, weight).predict_proba(X), atol=1e-5
    )


@pytest.mark.parametrize("scale", [1.0, 2.5])
def test_the_scale_of_the_loss_matters_only_against_the_penalty(scale: float) -> None:
    X, y = ordered_rows()
    plain = OrdinalClassifier(alpha=0.5, cross_entropy=0.2, tol=1e-9).fit(X, y)
    scaled = OrdinalClassifier(alpha=0.5 * scale, transport=scale, cross_entropy=0.2 * scale, tol=1e-9).fit(X, y)
    np.testing.assert_allclose(plain.predict_proba(X), scaled.predict_proba(X), atol=1e-5)


def test_cumulative_cross_entropy_is_the_ordered_logit() -> None:
    X, y = ordered_rows(150, 4)

    def loss(parameters: np.ndarray) -> float:
        theta = np.r_[-np.inf, np.sort(parameters[:3]), np.inf]
        f = X @ parameters[3:]
        return -np.log(np.maximum(expit(theta[y + 1] - f) - expit(theta[y] - f), 1e-300)).mean()

    oracle = minimize(loss, [-1, 0, 1, 0, 0, 0], method="BFGS", options={"gtol": 1e-7})
    theta, f = np.r_[-np.inf, oracle.x[:3], np.inf], X @ oracle.x[3:]
    expected = np.diff(expit(theta - f[:, None]), axis=1)
    model = OrdinalClassifier(model="cumulative", transport=0.0, cross_entropy=1.0, alpha=0.0, tol=1e-8).fit(X, y)
    np.testing.assert_allclose(model.predict_proba(X), expected, atol=1e-4)


@pytest.mark.parametrize("model", ["softmax", "cumulative"])
@pytest.mark.parametrize("power", [1, 2])
def test_no_small_step_lowers_the_objective(model: str, power: int) -> None:
    """At the optimum, by the naive formula in numpy."""
    X, y = ordered_rows(80, 4)
    values, weight = np.array([0.0, 0.5, 2.0, 3.0]), np.random.default_rng(0).exponential(size=80)  # of mean gap 1
    settings = {"model": model, "power": power, "values": values, "cross_entropy": 0.3, "alpha": 0.7}
    fitted = OrdinalClassifier(**settings, tol=1e-9).fit(X, y, weight)

    def naive(parameters: np.ndarray) -> float:
        P = np.exp(fitted._scores(torch.from_numpy(parameters), torch.from_numpy(fitted._features(X))).numpy())
        P = P / P.sum(1, keepdims=True)
        below = np.abs(P.cumsum(1)[:, :-1] - (y[:, None] <= np.arange(3)))
        losses = below**power @ np.diff(values) - 0.3 * np.log(P[np.arange(80), y])
        penalty = 0.35 * (fitted._scores.penalised() * parameters**2).sum()
        return float((weight @ losses + penalty) / weight.sum())

    least = naive(fitted._parameters)
    random = np.random.default_rng(1)
    steps = random.normal(size=(30, len(fitted._parameters))) * 10.0 ** random.uniform(-4, -1, (30, 1))
    assert all(naive(fitted._parameters + step) >= least - 1e-12 for step in steps)


def test_without_features_that_matter_it_predicts_the_frequencies() -> None:
    """The ranked probability score is proper."""
    y = np.repeat([0, 1, 2, 3], [10, 40, 30, 20])
    weight = np.where(y == 3, 2.0, 1.0)
    for model in ("softmax", "cumulative"):
        fitted = OrdinalClassifier(model=model, values=[0, 2, 3, 7], cross_entropy=0.0).fit(
            np.zeros((100, 2)), y, weight
        )
        np.testing.assert_allclose(
            fitted.predict_proba(np.zeros((1, 2)))[0], np.array([10, 40, 30, 40]) / 120, atol=1e-5
        )


def test_class_weights_are_sample_weights() -> None:
    X, y = ordered_rows(100, 4)
    y = np.maximum(y, 1)
    mass = np.bincount(y)
    for chosen, factor in (({1: 0.5, 3: 4.0}, [1, 0.5, 1, 4.0]), ("balanced", 100 / 3 / np.maximum(mass, 1))):
        weighted = OrdinalClassifier(class_weight=chosen).fit(X, y)
        by_rows = OrdinalClassifier().fit(X, y, np.asarray(factor)[y])
        np.testing.assert_allclose(weighted.predict_proba(X), by_rows.predict_proba(X), rtol=1e-6)
    names = np.array(["d", "c", "b", "a"])
    named = OrdinalClassifier(categories=names, class_weight={"c": 0.5, "a": 4.0}).fit(X, names[y])
    by_rows = OrdinalClassifier(categories=range(4), class_weight={1: 0.5, 3: 4.0}).fit(X, y)
    np.testing.assert_array_equal(named.predict_distribution(X), by_rows.predict_distribution(X))


def test_a_cost_matrix_moves_decisions_its_way() -> None:
    X, y = ordered_rows(200)
    dear_to_miss_high = np.array([[0.0, 1, 2], [1, 0, 1], [20, 10, 0]])
    plain = OrdinalClassifier(cost=dear_to_miss_high.T * 0 + [[0, 1, 2], [1, 0, 1], [2, 1, 0]]).fit(X, y)
    bent = OrdinalClassifier(cost=dear_to_miss_high).fit(X, y)
    assert (bent.predict(X) == 2).sum() > (plain.predict(X) == 2).sum()
    assert dear_to_miss_high[y, bent.predict(X)].mean() < dear_to_miss_high[y, plain.predict(X)].mean()


# ---- scores --------------------------------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(st.lists(st.floats(-3, 3), min_size=1, max_size=4), st.floats(-700, 700))
def test_cumulative_log_probabilities_in_both_tails(log_gaps: list[float], f: float) -> None:
    scores = ScoreFunction(1, (), len(log_gaps) + 2, "cumulative")
    parameters = torch.tensor([1.0, 0.0, *log_gaps], dtype=torch.float64)
    got = scores(parameters, torch.tensor([[f]], dtype=torch.float64))[0].numpy()
    gaps = np.exp(log_gaps)
    a = np.r_[0, gaps.cumsum()] - f
    between = log_expit(a[1:]) + log_expit(-a[:-1]) + np.log1p(-np.exp(-gaps))
    np.testing.assert_allclose(got, np.r_[log_expit(a[0]), between, log_expit(-a[-1])], rtol=1e-12)
    assert np.exp(got).sum() == pytest.approx(1, rel=1e-12)


@pytest.mark.parametrize("model", ["softmax", "cumulative"])
@pytest.mark.parametrize("hidden", [(), (4, 3)])
def test_start_and_gradient_and_new_standardisation(model: str, hidden: tuple[int, ...]) -> None:
    random = np.random.RandomState(0)
    scores = ScoreFunction(3, hidden, 4, model)
    prior = np.array([0.1, 0.2, 0.3, 0.4])
    start = scores.start(prior, random)
    X, y = ordered_rows(20, 4)
    if not hidden:
        P = torch.softmax(scores(torch.from_numpy(start), torch.from_numpy(X)), -1)
        np.testing.assert_allclose(P.numpy(), np.tile(prior, (20, 1)), rtol=1e-12)
    parameters = start + 0.3 * random.normal(size=start.shape)
    shift, stretch = random.normal(size=3), random.uniform(0.5, 2, 3)
    moved = scores.restandardised(parameters, shift=shift, stretch=stretch)
    np.testing.assert_allclose(
        scores(torch.from_numpy(moved), torch.from_numpy((X - shift) / stretch)).numpy(),
        scores(torch.from_numpy(parameters), torch.from_numpy(X)).numpy(),
        atol=1e-12,
    )
    objective = Objective(scores, Criterion(np.array([0, 1, 1.5, 4.0]), 2, None, 0.8, 0.3), alpha=0.6)
    rows = Rows.of(X, y, random.exponential(size=20))
    _, gradient = objective.value_and_gradient(parameters, rows, 9.0)
    for index in range(len(parameters)):
        step = 1e-6 * (np.arange(len(parameters)) == index)
        high, low = (objective.value_and_gradient(parameters + sign * step, rows, 9.0)[0] for sign in (1, -1))
        assert gradient[index] == pytest.approx((high - low) / 2e-6, abs=1e-7)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.lists(st.integers(0, 9), min_size=4, max_size=4).filter(any), min_size=1, max_size=5))
def test_decoding_is_the_best_answer_by_enumeration(counts: list[list[int]]) -> None:
    P = np.array(counts) / np.sum(counts, 1, keepdims=True)
    values, ranks = np.array([0.0, 1, 3, 7]), np.arange(4)
    cost = np.random.default_rng(0).uniform(size=(4, 4))
    best = {
        "median": P @ np.abs(ranks[:, None] - ranks),
        "mean": P @ (values[:, None] - values) ** 2,
        "cost": P @ cost,
        "argmax": 1 - P,
    }
    for rule, expected in best.items():
        chosen = decode(P, rule, values=values, cost=cost)
        np.testing.assert_allclose(expected[np.arange(len(P)), chosen], expected.min(1), atol=1e-12)


# ---- training ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("model", ["softmax", "cumulative"])
def test_hidden_layers_learn_what_no_linear_model_can(model: str) -> None:
    random = np.random.default_rng(0)
    X = random.uniform(-2, 2, size=(400, 2))
    y = np.digitize(np.hypot(*X.T), [0.8, 1.4])
    mlp = OrdinalClassifier(model=model, hidden_layer_sizes=(30,), learning_rate=0.02, random_state=0, max_iter=150)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        mlp.fit(X[:300], y[:300])
    assert mlp.score(X[300:], y[300:]) > 0.9
    assert OrdinalClassifier(model=model).fit(X[:300], y[:300]).score(X[300:], y[300:]) < 0.7


def test_early_stopping_ends_before_max_iter_and_keeps_the_best() -> None:
    X, y = ordered_rows(300)
    noise = np.random.default_rng(0).permutation(y)
    settings_ = {"hidden_layer_sizes": 50, "learning_rate": 0.02, "max_iter": 200, "random_state": 0, "alpha": 0.0}
    stopped = OrdinalClassifier(early_stopping="auto", **settings_).fit(X, noise)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        gone_on = OrdinalClassifier(early_stopping=False, **settings_).fit(X, noise)
    assert stopped.n_iter_ < 40
    prior = np.bincount(noise) / 300
    surprise = [np.abs(model.predict_proba(X) - prior).mean() for model in (stopped, gone_on)]
    assert surprise[0] < 0.5 * surprise[1]


def test_refit_trains_on_all_rows_for_the_best_number_of_epochs() -> None:
    X, y = ordered_rows(150)  # one batch, whose order does not matter
    settings_ = {"hidden_layer_sizes": 20, "learning_rate": 0.02, "random_state": 0}
    searched, again = (OrdinalClassifier(refit=refit, **settings_).fit(X, y) for refit in (False, True))
    assert searched.n_iter_ == again.n_iter_ > 1
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        plain = OrdinalClassifier(early_stopping=False, max_iter=again.n_iter_, **settings_).fit(X, y)
    np.testing.assert_allclose(again.predict_proba(X), plain.predict_proba(X), rtol=1e-9)
    assert np.abs(again.predict_proba(X) - searched.predict_proba(X)).max() > 1e-3


def test_not_converged_is_said() -> None:
    X, y = ordered_rows()
    for settings_ in ({"max_iter": 1}, {"max_iter": 1, "solver": "adam"}):
        with pytest.warns(ConvergenceWarning, match="did not converge in max_iter=1"):
            OrdinalClassifier(**settings_).fit(X, y)


def test_warm_start_goes_on_and_refuses_other_shapes() -> None:
    X, y = ordered_rows(200)
    model = OrdinalClassifier(warm_start=True).fit(X, y)
    cold = model.n_iter_
    assert model.fit(X, y).n_iter_ < cold / 2
    shifted = X * 3 + 5  # standardisation moves, and what was learnt with it
    expected = OrdinalClassifier(tol=1e-8).fit(shifted, y).predict_proba(shifted)
    np.testing.assert_allclose(model.set_params(tol=1e-8).fit(shifted, y).predict_proba(shifted), expected, atol=1e-5)
    with pytest.raises(ValueError, match="expected those of the last fit"):
        model.fit(X, y + 1)
    with pytest.raises(ValueError, match="warm_start=False"):
        model.fit(X[:, :2], y)


@pytest.mark.parametrize("hidden", [(), (8,)])
def test_partial_fit_comes_near_to_fit(hidden: tuple[int, ...]) -> None:
    X, y = ordered_rows(400)
    X = X * [1, 100, 0.01] + [0, 1000, 5]
    model = OrdinalClassifier(learning_rate=0.1, hidden_layer_sizes=hidden, random_state=0)
    for epoch in range(15):
        for part in np.array_split(np.random.default_rng(epoch).permutation(400), 10):
            model.partial_fit(X[part], y[part], classes=[0, 1, 2])
    assert model.n_iter_ == 150
    np.testing.assert_allclose(model._scaler.mean_, X.mean(0))
    assert model.score(X, y) > OrdinalClassifier().fit(X, y).score(X, y) - 0.05


def test_partial_fit_starts_with_few_labels_and_says_what_it_cannot() -> None:
    X, y = ordered_rows()
    model = OrdinalClassifier(categories=["c", "b", "a"]).partial_fit(X[:1], ["b"])
    assert model.classes_.tolist() == ["a", "b", "c"]
    model.partial_fit(X, np.array(["c", "b", "a"])[y])
    with pytest.raises(ValueError, match="holds the label 'd'"):
        model.partial_fit(X[:1], ["d"])
    with pytest.raises(ValueError, match=r"expected .* as in the first call"):
        model.partial_fit(X, np.array(["c", "b", "a"])[y], classes=["a", "b"])
    with pytest.raises(ValueError, match=r"is none of classes=\[1, 2\]"):
        OrdinalClassifier().partial_fit(X, y, classes=[1, 2])
    with pytest.raises(AttributeError, match="has no attribute 'partial_fit'") as caught:
        OrdinalClassifier(calibration="ordinal").partial_fit(X, y)
    assert "partial_fit has no rows to hold out" in str(caught.value.__cause__)
    fitted = OrdinalClassifier().fit(X, y)
    before = fitted.predict_proba(X)
    after = fitted.set_params(learning_rate=1e-5).partial_fit(X, y).predict_proba(X)
    assert 0 < np.abs(after - before).max() < 1e-3


@pytest.mark.parametrize("calibration", ["temperature", "ordinal"])
def test_calibration_mends_overconfidence(calibration: str) -> None:
    """Power 1 alone drives probabilities to 0 and 1."""
    X, y = ordered_rows(900, 4)
    X = X[:, :1]
    train, test = slice(0, 600), slice(600, None)
    settings_ = {"power": 1, "cross_entropy": 0.0, "alpha": 0.01, "random_state": 0}
    raw = OrdinalClassifier(**settings_).fit(X[train], y[train])
    mended = OrdinalClassifier(calibration=calibration, **settings_).fit(X[train], y[train])
    scores = [
        ranked_probability_score(model.predict_proba(X[test]), y[test], range(4)).mean() for model in (raw, mended)
    ]
    assert scores[1] < 0.9 * scores[0]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 4), min_size=2, max_size=80), st.floats(0.05, 0.9), st.integers(0, 5))
def test_rows_held_out(labels: list[int], fraction: float, seed: int) -> None:
    positions = np.array(labels)
    random = np.random.RandomState(seed)
    if np.unique(positions).size == len(labels):
        with pytest.raises(ValueError, match="leave none to hold out for testing"):
            split_off(positions, fraction, random=random, purpose="testing")
        return
    kept, held = split_off(positions, fraction, random=random, purpose="testing")
    assert sorted([*kept, *held]) == list(range(len(labels)))
    assert set(positions[kept]) == set(labels)
    assert 1 <= len(held) <= fraction * len(labels) + 1


@given(st.lists(st.integers(0, 6), min_size=1, max_size=30), st.permutations(range(7)))
def test_positions_follow_ranks(y: list[int], categories: list[int]) -> None:
    labels = np.array(y)
    order = label_order(labels, categories)
    positions = order.positions(labels)
    np.testing.assert_array_equal(order.by_position[positions], labels)
    np.testing.assert_array_equal(order.ranks[positions], [categories.index(label) for label in y])
    np.testing.assert_array_equal(order.by_position[order.columns], order.classes)
