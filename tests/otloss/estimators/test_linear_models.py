"""Linear cumulative models against statsmodels and mord, their standard errors, warm starts, decision functions.

The numbers come from `OrderedModel` of statsmodels 0.15.0 (thresholds by the delta method) and from mord 0.7.
"""

import warnings
from typing import Any

import numpy as np
import pytest
from scipy.optimize import OptimizeResult
from scipy.sparse import csr_matrix
from sklearn.base import clone
from sklearn.calibration import CalibratedClassifierCV
from sklearn.datasets import load_diabetes
from sklearn.exceptions import ConvergenceWarning

from otloss.estimators import CumulativeLinkClassifier, OrdinalClassifier, OrdinalNetworkClassifier
from otloss.estimators.likelihood import separates
from tests.errors import raising
from tests.samples import sampled

X, progression = load_diabetes(return_X_y=True)
X = X[:, [2, 3, 8]] * 10
y = np.searchsorted(np.quantile(progression, [0.25, 0.5, 0.75]), progression)
LIKELIHOOD: dict[str, Any] = {"transport": 0, "cross_entropy": 1, "alpha": 0, "tol": 1e-8}
ORDERED_MODEL = {
    "logit": (-486.36919077562436, [1.768562, 0.795344, 1.845, -1.653656, -0.103859, 1.587995],
              [0.243189, 0.221002, 0.243139, 0.137354, 0.114725, 0.140085]),
    "probit": (-484.050055217524, [1.032847, 0.504325, 1.096095, -0.967388, -0.056433, 0.94312],
               [0.139637, 0.129577, 0.137627, 0.077122, 0.068183, 0.079831]),
    "cloglog": (-486.93533481472934, [1.066946, 0.521925, 1.181114, -1.56995, -0.497354, 0.569563],
                [0.156464, 0.144664, 0.155301, 0.1095, 0.0812, 0.073661]),
}  # fmt: skip


def separated_or_overlapping(seed: int) -> tuple[np.ndarray, np.ndarray, dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Features, and labels that they separate, wholly or in part, and such that they do not."""
    rng = np.random.default_rng(seed)
    n, classes = 40 + 60 * (seed % 2), 2 + seed % 3
    X = rng.normal(size=(n, 1 + seed % 4)) * 10.0 ** rng.integers(-3, 4, 1 + seed % 4) + 5
    z = ((X - X.mean(0)) / X.std(0)).sum(1)
    cuts = np.quantile(z, np.arange(1, classes) / classes)
    mixed, middle = np.digitize(z + rng.logistic(size=n), cuts), np.median(z)
    apart = {
        "complete": np.digitize(z, cuts),
        "tied": np.where(z == np.sort(z)[n // 2], rng.integers(0, 2, n), z > middle),
    }
    return (
        X,
        (mixed == classes - 1) & (rng.random(n) < 0.5),
        apart,
        {"mixed": mixed, "drawn": rng.integers(0, classes, n)},
    )


@pytest.mark.filterwarnings("ignore:CumulativeLinkClassifier did not converge")
@pytest.mark.parametrize("seed", sampled(4, range(12)))
def test_a_summary_raises_where_the_features_separate_the_classes_and_only_there(seed: int) -> None:
    X, top, apart, overlapping = separated_or_overlapping(seed)
    with_dummy = np.column_stack([X, top])
    separated = [*((X, y) for y in apart.values()), (with_dummy, overlapping["mixed"])]
    model = CumulativeLinkClassifier(link=["logit", "probit", "cloglog"][seed % 3], **LIKELIHOOD)
    for features, y in separated:
        with pytest.raises(ValueError, match="the features separate the classes, or some of them"):
            model.fit(features, y).summary(features, y)
    for y in overlapping.values():
        assert np.isfinite(model.fit(X, y).summary(X, y).standard_errors).all()


def test_separation_is_found_in_many_rows_and_where_some_of_them_leave_directions_undetermined() -> None:
    rng = np.random.default_rng(0)
    X = np.column_stack([rng.normal(size=9000), np.zeros(9000)])
    y = rng.integers(0, 3, 9000)
    X[[5, 6], 1] = 1
    y[[5, 6]] = 0, 2
    assert not separates(X, y)
    y[[5, 6]] = 2
    assert separates(X, y)


@pytest.mark.filterwarnings("ignore:CumulativeLinkClassifier did not converge")
@pytest.mark.parametrize("weight", [0.0, 1e-300, 1e300])
@pytest.mark.parametrize("link", ORDERED_MODEL)
def test_classes_of_any_weight_give_finite_coefficients(link: str, weight: float) -> None:
    for label, settings in ((0, LIKELIHOOD), (1, {"loss": "all_threshold"}), (3, {"power": 1}), (1, {"alpha": 1.0})):
        weights = np.where(y == label, weight, 1.0)
        model = CumulativeLinkClassifier(**{"max_iter": 100, **settings}, link=link)
        model.fit(X, y, sample_weight=weights)
        assert np.isfinite(model.predict_proba(X)).all()
        assert np.isfinite(np.concatenate([model.coef_[0], model.thresholds_])).all()


@pytest.mark.parametrize("link", ORDERED_MODEL)
def test_likelihood_and_standard_errors_are_those_of_statsmodels(link: str) -> None:
    value, estimates, errors = ORDERED_MODEL[link]
    model = CumulativeLinkClassifier(link=link, **LIKELIHOOD).fit(X, y)
    summary = model.summary(X, y)
    np.testing.assert_allclose(summary.log_likelihood, value, atol=1e-6)
    np.testing.assert_allclose(summary.estimates, estimates, atol=1e-5)
    np.testing.assert_allclose(summary.standard_errors, errors, atol=1e-5)
    np.testing.assert_allclose(summary.estimates, [*model.coef_[0], *model.thresholds_])
    if link == "logit":
        np.testing.assert_allclose((summary.aic, summary.bic), (984.7383815512487, 1009.286240843715))
        np.testing.assert_allclose(summary.p_values[1], 0.00032, atol=2e-6)
        np.testing.assert_allclose(summary.interval()[0], [1.292, 2.245], atol=1e-3)
        with pytest.raises(ValueError, match="level is 95, expected a share between 0 and 1"):
            summary.interval(95)
        assert "1 | 2        -0.1039     0.1147" in str(summary)


def test_a_weight_counts_rows_and_units_change_nothing_else() -> None:
    weight = np.arange(len(y)) % 3
    whole = CumulativeLinkClassifier(**LIKELIHOOD).fit(np.repeat(X, weight, 0), np.repeat(y, weight))
    repeated = whole.summary(np.repeat(X, weight, 0), np.repeat(y, weight))
    units = np.array([1e-6, 1.0, 1e6])
    weighted = CumulativeLinkClassifier(**LIKELIHOOD).fit(X * units, y, weight).summary(X * units, y, weight)
    np.testing.assert_allclose(weighted.standard_errors[:3] * units, repeated.standard_errors[:3], rtol=1e-4)
    np.testing.assert_allclose(weighted.log_likelihood, repeated.log_likelihood, rtol=1e-9)
    assert weighted.rows == repeated.rows == weight.sum()


@pytest.mark.parametrize("link", ORDERED_MODEL)
@pytest.mark.parametrize("layout", [np.asarray, csr_matrix])
def test_features_that_are_not_standardised_may_have_any_units(link: str, layout: Any) -> None:
    value, estimates, errors = ORDERED_MODEL[link]
    units = np.array([1e4, 1.0, 1e-5])
    features = layout(X * units)
    summary = CumulativeLinkClassifier(link=link, standardize=False, **LIKELIHOOD).fit(features, y).summary(features, y)
    np.testing.assert_allclose(summary.log_likelihood, value, atol=1e-6)
    np.testing.assert_allclose(summary.estimates[:3] * units, estimates[:3], atol=1e-5)
    np.testing.assert_allclose(summary.standard_errors[:3] * units, errors[:3], atol=1e-5)


@pytest.mark.parametrize("model", [OrdinalClassifier(), CumulativeLinkClassifier(link="cloglog")])
def test_a_penalty_on_features_that_are_not_standardised_is_on_their_coefficients(model: Any) -> None:
    penalised = clone(model).set_params(tol=1e-7, alpha=0.3).fit(X, y)
    coefficients = penalised.coef_ * X.std(0)
    units = 100 / X.std(0)  # in which a penalty of 0.3 * 100^2 is one of 0.3 on standardised features
    given = clone(model).set_params(tol=1e-7, alpha=0.3 * 100**2, standardize=False).fit(X * units, y)
    np.testing.assert_allclose(given.coef_ * 100, coefficients, atol=1e-5)


@pytest.mark.parametrize(
    "model", [OrdinalClassifier(), CumulativeLinkClassifier(), OrdinalNetworkClassifier(random_state=0, max_iter=40)]
)
def test_the_unit_of_the_loss_is_free(model: Any) -> None:
    unit = 2.0**-40
    small = clone(model).set_params(transport=unit, cross_entropy=unit / 4, alpha=unit / 4)
    first = clone(model).set_params(transport=0.5, cross_entropy=0.125, alpha=0.125)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)  # 40 epochs are few
        np.testing.assert_allclose(small.fit(X, y).predict_proba(X), first.fit(X, y).predict_proba(X), atol=1e-6)


def test_a_line_search_that_ends_far_from_a_minimum_is_warned_of(monkeypatch: pytest.MonkeyPatch) -> None:
    def abnormal(function: Any, start: np.ndarray, **_: Any) -> OptimizeResult:
        return OptimizeResult(x=start, jac=function(start)[1], nit=1, success=False)

    monkeypatch.setattr("otloss.estimators.training.minimize", abnormal)
    with pytest.warns(ConvergenceWarning, match="did not converge"):
        OrdinalClassifier().fit(X, y)


TWICE = np.column_stack([X, X[:, 0]])
test_where_there_are_no_standard_errors_and_settings_that_cannot_be = raising(
    (LIKELIHOOD, X, X[:300], "not the maximum of the likelihood of these rows"),
    (LIKELIHOOD, TWICE, TWICE, "Hessian of the likelihood is singular"),
    ({"alpha": 0}, X, X, "expected transport=0, and it is 1"),
    ({"link": "log"}, X, X, "link is 'log'"),
    ({"loss": "all_threshold", "values": range(4)}, X, X, "leave cost and values out"),
    call=lambda given, rows, of: CumulativeLinkClassifier(**given).fit(rows, y).summary(of, y[: len(of)]),
)


def test_rows_that_lack_a_class_are_named() -> None:
    model = CumulativeLinkClassifier(**LIKELIHOOD).fit(X, y)
    for lacking in range(4):
        with pytest.raises(ValueError, match=f"no row is of the class {lacking} of fit; pass the rows and weights"):
            model.summary(X[y != lacking], y[y != lacking])


OF_MORD = {  # LogisticIT and LogisticAT
    "immediate_threshold": ([1.095076, 0.518350, 1.120292], [-0.561032, -0.141570, 0.575886]),
    "all_threshold": ([1.689881, 0.836516, 1.866567], [-1.634543, -0.037178, 1.620684]),
}


@pytest.mark.parametrize("loss", OF_MORD)
def test_threshold_losses_are_those_of_mord(loss: str) -> None:
    settings: dict[str, Any] = {"cross_entropy": 0, "alpha": 1, "standardize": False, "tol": 1e-9}
    model = CumulativeLinkClassifier(loss=loss, **settings).fit(X, y)
    np.testing.assert_allclose(model.coef_[0], OF_MORD[loss][0], atol=3e-6)
    np.testing.assert_allclose(model.thresholds_, OF_MORD[loss][1], atol=3e-6)


def test_thresholds_that_meet_beside_narrow_gaps_are_those_of_mord() -> None:
    """In logarithms of gaps the descent ended with all six at 0.018."""
    rng = np.random.default_rng(1191)
    rows, axes, classes = (int(rng.integers(*limits)) for limits in ((100, 400), (1, 6), (4, 8)))
    features = rng.normal(size=(rows, axes))
    latent = features @ rng.normal(size=axes) + rng.normal(size=rows) * rng.uniform(0.5, 2)
    labels = np.digitize(latent, np.quantile(latent, np.arange(1, classes) / classes))
    model = CumulativeLinkClassifier(loss="immediate_threshold", cross_entropy=0, alpha=1, standardize=False, tol=1e-9)
    np.testing.assert_allclose(model.fit(features, labels).coef_, [[0.090082]], atol=3e-6)
    of_mord = [0.002799, 0.002799, 0.023701, 0.023701, 0.027232, 0.027232]
    np.testing.assert_allclose(model.thresholds_, of_mord, atol=3e-6)


def test_warm_start() -> None:
    cold = CumulativeLinkClassifier(**LIKELIHOOD | {"tol": 1e-6}, warm_start=True)
    first = cold.fit(X, y).n_iter_
    assert cold.fit(X, y).n_iter_ < first / 3
    other = cold.fit(X, np.minimum(y, 2))  # other classes: a new start
    assert other.predict_proba(X).shape == (len(X), 3)


@pytest.mark.parametrize("grades", [2, 4])
def test_calibration_of_scikit_learn_is_the_same_for_every_decision(grades: int) -> None:
    """It reads `decision_function`, the log-probabilities, whose softmax is the forecast."""
    labels, gaps = np.minimum(y, grades - 1), np.arange(grades)[:, None] - np.arange(grades)
    options: dict[str, Any] = {"cost": np.where(gaps > 0, 3.0 * gaps, -gaps)}
    models = [OrdinalClassifier(decode=rule, **options) for rule in ("argmax", "median", "mean", "cost")]
    for model in models:
        logs = model.fit(X, labels).predict_log_proba(X)
        np.testing.assert_allclose(model.decision_function(X), logs[:, 1] - logs[:, 0] if grades == 2 else logs)
    (methods,) = CalibratedClassifierCV._parameter_constraints["method"]
    for method in methods.options:  # "temperature" is new in scikit-learn 1.8
        calibrated = (CalibratedClassifierCV(model, method=method, cv=3) for model in models)
        first, *others = (model.fit(X, labels).predict_proba(X) for model in calibrated)
        for other in others:
            np.testing.assert_array_equal(other, first)


@pytest.mark.parametrize("model", [OrdinalClassifier(), CumulativeLinkClassifier(), OrdinalNetworkClassifier()])
@pytest.mark.parametrize("layout", [np.asarray, csr_matrix])
def test_features_whose_deviation_underflows_are_warned_of(model: Any, layout: Any) -> None:
    with pytest.warns(UserWarning, match=r"column 1 of X holds numbers up to 1.*e-200 in size \(1 such") as caught:
        model.fit(layout(X * [1, 1e-200, 0]), y)
    assert [warning.filename for warning in caught] == [__file__]


def test_small_features_are_not_lost() -> None:
    expected = OrdinalClassifier().fit(X, y).predict_proba(X)
    np.testing.assert_allclose(OrdinalClassifier().fit(X * 1e-140, y).predict_proba(X * 1e-140), expected, atol=1e-4)


@pytest.mark.parametrize("model", [OrdinalClassifier(), CumulativeLinkClassifier(), OrdinalNetworkClassifier()])
def test_weights_that_vanish_beside_the_penalty_are_warned_of(model: Any) -> None:
    with pytest.warns(UserWarning, match=r"the weights of the rows sum to 4.*e-38, .* beside alpha=0.3"):
        model.fit(X, y, sample_weight=np.full(len(X), 1e-40))
    with pytest.warns(UserWarning, match=r"and those of the two losses to 1e-12, .* beside alpha=0.3"):
        clone(model).set_params(transport=1e-12, cross_entropy=0).fit(X, y)
    clone(model).set_params(transport=1e9, alpha=3e8).fit(X, y)  # warnings are errors


@pytest.mark.parametrize("model", [OrdinalClassifier(), CumulativeLinkClassifier(), OrdinalNetworkClassifier()])
@pytest.mark.parametrize("class_weight", [None, "balanced"])
@pytest.mark.parametrize("weight", [1e-320, 1e-310, 1e301, 1e308])
def test_weights_beyond_the_range_of_float64_are_the_cause_that_is_named(
    model: Any, class_weight: Any, weight: float
) -> None:
    model = clone(model).set_params(class_weight=class_weight)
    with pytest.raises(ValueError, match=r"(weights .* sum to|sample_weight) .*divide (sample_weight|the weights) by"):
        model.fit(X, y, sample_weight=np.full(len(X), weight))
