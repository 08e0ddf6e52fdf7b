"""What the linear and multi-layer models learn, against closed forms, other packages and finite differences."""

from typing import Any

import numpy as np
import pytest
import torch
from scipy.sparse import csr_matrix
from scipy.special import expit, log_softmax, softmax
from sklearn.base import clone
from sklearn.exceptions import ConvergenceWarning, NotFittedError
from sklearn.linear_model import LogisticRegression
from torch.nn.utils import parameters_to_vector, vector_to_parameters
from torch.optim.optimizer import register_optimizer_step_pre_hook

from otloss.estimators import (
    CumulativeLinkClassifier,
    OrdinalBoostingClassifier,
    OrdinalClassifier,
    OrdinalNetworkClassifier,
)
from otloss.estimators.criterion import Criterion
from otloss.estimators.training import OrdinalNetwork, PenalisedLoss, Rows, train_adam
from tests.otloss.estimators.test_estimators import NAMES, both, ordered_rows

X, Y = ordered_rows(150)


def test_cross_entropy_alone_is_logistic_regression() -> None:
    X, y = ordered_rows(120, 4)
    weight = np.random.default_rng(1).exponential(size=len(y)) * (np.arange(len(y)) % 7 > 0)
    ours = OrdinalClassifier(transport=0.0, cross_entropy=1.0, alpha=3.0, standardize=False, tol=1e-8)
    theirs = LogisticRegression(C=1 / 3, tol=1e-10, max_iter=1000)
    actual, expected = (model.fit(X, y, weight).predict_proba(X) for model in (ours, theirs))
    np.testing.assert_allclose(actual, expected, atol=1e-5)


@pytest.mark.parametrize("model", [OrdinalClassifier, CumulativeLinkClassifier])
@pytest.mark.parametrize("power", [1, 2])
def test_no_small_step_lowers_the_objective(model: Any, power: int) -> None:
    X, y = ordered_rows(80, 4)
    values, weight = np.array([0.0, 0.5, 2.0, 3.0]), np.random.default_rng(0).exponential(size=80)  # the mean gap is 1
    settings = {"power": power, "values": values, "cross_entropy": 0.3, "alpha": 0.7}
    fitted = model(**settings, tol=1e-9, max_iter=5000).fit(X, y, weight)

    network, features = fitted._network, torch.from_numpy(fitted._scaler.transform(X))
    parameters = list(network.parameters())

    def naive(vector: np.ndarray) -> float:
        vector_to_parameters(torch.from_numpy(vector), parameters)
        P = softmax(network(features).detach().numpy(), 1)
        below = np.abs(P.cumsum(1)[:, :-1] - (y[:, None] <= np.arange(3)))
        losses = below**power @ np.diff(values) - 0.3 * np.log(P[np.arange(80), y])
        penalty = 0.35 * network.layers[0].weight.square().sum().item()
        return float((weight @ losses + penalty) / weight.sum())

    best = parameters_to_vector(parameters).detach().numpy().copy()
    smallest = naive(best)
    random = np.random.default_rng(1)
    steps = random.normal(size=(30, len(best))) * 10.0 ** random.uniform(-4, -1, (30, 1))
    assert all(naive(best + step) >= smallest - 1e-12 for step in steps)


@pytest.mark.filterwarnings("ignore::sklearn.exceptions.ConvergenceWarning")
@pytest.mark.parametrize(("head", "linear"), [("softmax", OrdinalClassifier), ("cumulative", CumulativeLinkClassifier)])
def test_hidden_layers_learn_what_no_linear_model_can(head: str, linear: Any) -> None:
    random = np.random.default_rng(0)
    X = random.uniform(-2, 2, size=(400, 2))
    y = np.digitize(np.hypot(*X.T), [0.8, 1.4])
    mlp = OrdinalNetworkClassifier(head=head, hidden_layer_sizes=(30,), learning_rate=0.02, random_state=0, max_iter=80)
    assert mlp.fit(X[:300], y[:300]).score(X[300:], y[300:]) > 0.9
    assert linear().fit(X[:300], y[:300]).score(X[300:], y[300:]) < 0.7


def test_batches_count_by_their_weight() -> None:
    weight = np.random.default_rng(0).exponential(size=60) ** 3
    rows = Rows.from_arrays(X[:60], Y[:60], weight)
    objective = PenalisedLoss(Criterion(np.arange(3.0), 2, None, 1.0, 0.2), 0.6, float(weight.sum()))
    network = OrdinalNetwork((3, 4), np.full(3, 1 / 3), "softmax", np.random.RandomState(0))
    met: list[np.ndarray] = []

    def before_step(*_: Any) -> None:
        met.append(parameters_to_vector([p.grad for p in network.parameters()]).numpy())

    hook = register_optimizer_step_pre_hook(before_step)
    settings: dict[str, Any] = {"learning_rate": 0.0, "random": np.random.RandomState(0)}
    train_adam(network, objective, rows, held_out=None, epochs=1, patience=1, batch_size=12, **settings)
    hook.remove()
    assert len(met) == 5
    whole = torch.autograd.grad(objective.of_batch(network, rows, repeated=1.0), list(network.parameters()))
    np.testing.assert_allclose(np.mean(met, 0), parameters_to_vector(whole).numpy(), atol=1e-12)


@pytest.mark.filterwarnings("ignore::sklearn.exceptions.ConvergenceWarning")
def test_early_stopping_trains_on_all_rows_and_touches_no_global_state() -> None:
    X, y = ordered_rows(150)
    settings_ = {"hidden_layer_sizes": 20, "learning_rate": 0.02, "random_state": 0}
    before = torch.get_rng_state(), np.random.get_state()[1].copy()
    torch.set_default_dtype(torch.float64)
    try:
        with torch.inference_mode():
            again = OrdinalNetworkClassifier(**settings_).fit(X, y)
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.equal(torch.get_rng_state(), before[0])
    np.testing.assert_array_equal(np.random.get_state()[1], before[1])
    plain = OrdinalNetworkClassifier(early_stopping=False, max_iter=again.n_iter_, **settings_).fit(X, y)
    np.testing.assert_allclose(again.predict_proba(X), plain.predict_proba(X), rtol=1e-9)


def test_linear_models_show_their_coefficients() -> None:
    X, y = ordered_rows()
    X, labels = X * [1, 3, 0.5] + [5, 0, 9], np.array(NAMES)[y]
    classes: Any = OrdinalClassifier, CumulativeLinkClassifier
    plain, shared = (model(categories=NAMES).fit(X, labels) for model in classes)
    np.testing.assert_allclose(softmax(X @ plain.coef_.T + plain.intercept_, 1), plain.predict_proba(X), rtol=1e-9)
    at_most = expit(shared.thresholds_ - X @ shared.coef_.T)
    np.testing.assert_allclose(at_most, shared.predict_distribution(X).cumsum(1)[:, :-1], rtol=1e-9)
    np.testing.assert_array_equal(shared.intercept_, -shared.thresholds_)
    with pytest.warns(ConvergenceWarning, match="did not converge in max_iter=2") as caught:
        OrdinalNetworkClassifier(hidden_layer_sizes=3, max_iter=2, random_state=0).fit(X, y)
    assert caught[0].filename == __file__
    with pytest.raises(AttributeError, match=r"coef_ is of models of two classes or more"):
        OrdinalClassifier(categories=NAMES).fit(X, ["low"] * len(X)).coef_  # noqa: B018
    with pytest.raises(NotFittedError):
        CumulativeLinkClassifier().thresholds_  # noqa: B018


def test_logarithms_of_probabilities_do_not_overflow_and_scores_that_do_raise() -> None:
    model = OrdinalClassifier().fit(X, Y)
    far = 1e4 * X
    assert (model.predict_proba(far) == 0).any()
    expected = log_softmax(far @ model.coef_.T + model.intercept_, 1)
    np.testing.assert_allclose(model.predict_log_proba(far), expected, rtol=1e-6, atol=1e-9)
    for calibrated in both(calibration="temperature", random_state=0):
        calibrated.fit(X, Y)
        np.testing.assert_allclose(np.exp(calibrated.predict_log_proba(X)), calibrated.predict_proba(X), rtol=1e-12)
    far[2] = 1.7e308
    with np.errstate(all="ignore"), pytest.raises(ValueError, match="the scores of row 2 overflow"):
        OrdinalClassifier(random_state=0).fit(X * 1e-3, Y).predict_proba(far)


class Sparse(csr_matrix):
    """Counts how often it is made dense."""

    made = 0

    def toarray(self, *arguments: Any, **options: Any) -> np.ndarray:
        Sparse.made += 1
        return super().toarray(*arguments, **options)


@pytest.mark.filterwarnings("ignore::sklearn.exceptions.ConvergenceWarning")
@pytest.mark.parametrize("model", [
    OrdinalClassifier(tol=1e-7), CumulativeLinkClassifier(tol=1e-7),
    OrdinalClassifier(tol=1e-7, standardize=False, calibration="temperature", random_state=0),
    OrdinalClassifier(tol=1e-7, class_weight="balanced", power=1, cross_entropy=0.5),
    OrdinalNetworkClassifier(hidden_layer_sizes=3, random_state=0),
], ids=str)  # fmt: skip
def test_sparse_features_are_dense_ones_and_linear_models_never_make_them_dense(model: Any) -> None:
    """Few entries in a row, as counts of words, in columns of which some are frequent."""
    random, share = np.random.default_rng(0), 1 / np.arange(1, 41)
    columns = random.choice(40, size=960, p=share / share.sum())
    X = csr_matrix((random.exponential(size=960), (np.repeat(np.arange(120), 8), columns)), shape=(120, 40))
    scores = X @ random.normal(size=40) + random.normal(size=120)
    y, weight = np.digitize(scores, np.quantile(scores, [0.3, 0.6, 0.8])), random.exponential(size=120)
    weight[::9] = 0
    rows, Sparse.made = Sparse(X), 0
    dense, sparse = (clone(model).fit(given, y, weight) for given in (X.toarray(), rows))
    for fitted, given in ((dense, rows), (sparse, rows), (sparse, X.toarray())):
        np.testing.assert_allclose(fitted.predict_proba(given), dense.predict_proba(X.toarray()), atol=1e-5)
    assert bool(Sparse.made) == isinstance(model, OrdinalNetworkClassifier)


@pytest.mark.parametrize("model", [OrdinalClassifier(), CumulativeLinkClassifier()], ids=str)
def test_sparse_features_may_have_a_mean_far_beyond_their_deviation(model: Any) -> None:
    """Times, beside columns of few entries: products of them with the weights cancelled, and fits ended early."""
    random = np.random.default_rng(0)
    small = np.column_stack([random.integers(-(2**20), 2**20, 400) / 2**18, random.random(400) < 0.2])
    y = np.digitize(small.sum(1) + random.logistic(size=400), [-1, 0, 1])
    expected = clone(model).fit(small, y).predict_proba(small)
    rows = csr_matrix(small + np.array([1e9, 0]))
    fitted = clone(model).fit(rows, y)
    np.testing.assert_allclose(fitted.predict_proba(rows), expected, atol=1e-5)
    np.testing.assert_allclose(fitted.predict_proba(rows.toarray()), expected, atol=1e-5)


@pytest.mark.parametrize("model", [
    OrdinalClassifier(calibration="ordinal"), OrdinalNetworkClassifier(), OrdinalBoostingClassifier(n_jobs=1),
])  # fmt: skip
def test_of_a_table_of_counts_a_part_of_each_cell_is_held_out(model: Any) -> None:
    """Without whole cells training learnt that their labels never occur, and early stopping ended it."""
    random = np.random.default_rng(0)
    kinds = np.array(list(np.ndindex(3, 4, 2)), dtype=float)
    expected = np.diff(expit(np.array([-30, -1, 1, 30.0]) - (kinds @ [0.9, -0.7, 0.8] - 0.5)[:, None]), axis=1)
    counts = np.array([random.multinomial(70, share) for share in expected])
    rows, labels = np.repeat(kinds, 3, axis=0), np.tile(np.arange(3), len(kinds))
    drawn = counts.ravel() > 0
    model = clone(model).set_params(random_state=0)
    by_weights = model.fit(rows[drawn], labels[drawn], counts.ravel()[drawn]).predict_proba(kinds)
    copies = random.permutation(np.repeat(np.arange(len(rows)), counts.ravel()))
    by_rows = clone(model).fit(rows[copies], labels[copies]).predict_proba(kinds)
    errors = [np.square((one - expected).cumsum(1)).sum(1).mean() for one in (by_weights, by_rows)]
    assert errors[0] < errors[1] + 0.004
