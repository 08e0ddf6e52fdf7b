"""Ordinal metrics against scikit-learn, scipy and sums over pairs, and scorers within model selection."""

import pickle
import tracemalloc
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats
from scipy.stats import wasserstein_distance
from sklearn.calibration import calibration_curve
from sklearn.linear_model import LinearRegression, LogisticRegression
from sklearn.metrics import mean_absolute_error
from sklearn.model_selection import GridSearchCV
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

import otloss
from otloss import metrics
from otloss.estimators import OrdinalClassifier
from otloss.metrics import scorer
from tests.errors import raising

NAMES = ["low", "mid", "high", "top", "best"]  # not in the order of the alphabet
OF_LABELS = [metrics.ordinal_mae, metrics.macro_mae, metrics.maximum_mae]
OF_LABELS += [metrics.minimum_sensitivity, metrics.off_by_one_accuracy]
OF_PROBABILITIES = [
    metrics.ranked_probability_score,
    metrics.ordinal_emd,
    metrics.threshold_calibration_error,
    lambda *args, **kwargs: metrics.threshold_calibration_error(*args, strategy="quantile", bins=4, **kwargs),
]


def draw(seed: int, n: int = 40, classes: int = 5) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    proba = rng.dirichlet(np.full(classes, 0.6), n)
    y = np.array([rng.choice(classes, p=row) for row in proba])
    return y, np.clip(y + rng.integers(-1, 3, n), 0, classes - 1), proba


rows = st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4), st.integers(0, 4)), min_size=1, max_size=30)


@given(rows)
def test_against_peers_on_weighted_examples_with_absent_classes(drawn: Any) -> None:
    y, predicted, weight = np.array(drawn).T
    if weight.sum() == 0:
        weight[0] = 1
    given: dict[str, Any] = {"labels": range(5), "sample_weight": weight}
    copies = y.repeat(weight), predicted.repeat(weight)
    assert metrics.ordinal_mae(y, predicted, **given) == pytest.approx(mean_absolute_error(*copies))
    errors = [np.abs(copies[0] - copies[1])[copies[0] == c].mean() for c in np.unique(copies[0])]
    assert metrics.macro_mae(y, predicted, **given) == pytest.approx(np.mean(errors))
    assert metrics.maximum_mae(y, predicted, **given) == pytest.approx(np.max(errors))
    recalls = [np.mean(copies[1][copies[0] == c] == c) for c in np.unique(copies[0])]
    assert metrics.minimum_sensitivity(y, predicted, **given) == pytest.approx(np.min(recalls))
    near = np.mean(np.abs(copies[0] - copies[1]) <= 1)
    assert metrics.off_by_one_accuracy(y, predicted, **given) == pytest.approx(near)


def test_scores_of_probabilities_against_sums_over_pairs_of_outcomes() -> None:
    y, _, proba = draw(0)
    values = np.array([0.0, 1.0, 1.5, 4.0, 10.0])
    rng = np.random.default_rng(0)
    weight = rng.integers(0, 4, len(y)).astype(float)
    to_truth = np.abs(values - values[y][:, None])
    apart = np.abs(values[:, None] - values)
    emd = (proba * to_truth).sum(1)
    # E|X - y| - E|X - X'| / 2, T. Gneiting and A. E. Raftery (2007), eq. 21.
    rps = emd - 0.5 * np.einsum("ni,ij,nj->n", proba, apart, proba)
    given: dict[str, Any] = {"labels": range(5), "values": values, "sample_weight": weight}
    assert metrics.ordinal_emd(y, proba, **given) == pytest.approx(np.average(emd, weights=weight))
    assert metrics.ranked_probability_score(y, proba, **given) == pytest.approx(np.average(rps, weights=weight))
    for score in (metrics.ordinal_emd, metrics.ranked_probability_score):
        assert score(y, proba, normalize=True, **given) == pytest.approx(score(y, proba, **given) / 10)
    one = wasserstein_distance(values, values[y[:1]], proba[0])
    assert metrics.ordinal_emd(y[:1], proba[:1], labels=range(5), values=values) == pytest.approx(one)
    p, q, x = (torch.tensor(a) for a in (proba, np.eye(5)[y], values))
    ours = metrics.ranked_probability_score(y, proba, labels=range(5), values=values)
    assert ours == pytest.approx(otloss.cdf_distance(p, q, x).mean().item())


@pytest.mark.parametrize(("strategy", "bins"), [("uniform", 10), ("uniform", 3), ("quantile", 5)])
def test_reliability_against_scikit_learn(strategy: str, bins: int) -> None:
    y, _, proba = draw(7, n=200)
    curves = metrics.threshold_reliability(y, proba, bins=bins, strategy=strategy)
    below = proba.cumsum(1)
    errors = []
    for k, curve in enumerate(curves):
        observed, forecast = calibration_curve(y <= k, below[:, k].clip(max=1), n_bins=bins, strategy=strategy)
        np.testing.assert_allclose(curve.forecast, forecast)
        np.testing.assert_allclose(curve.observed, observed)
        assert curve.threshold == k
        assert curve.share.sum() == pytest.approx(1)
        errors.append(curve.error)
    error = metrics.threshold_calibration_error(y, proba, bins=bins, strategy=strategy)
    assert error == pytest.approx(np.mean(errors))


@pytest.mark.parametrize("dtype", [np.float64, np.float32, np.float16])
@pytest.mark.parametrize("strategy", ["uniform", "quantile"])
def test_forecasts_that_differ_by_rounding_share_a_bin(strategy: str, dtype: type) -> None:
    """0.1 + 0.2 is not 0.3; forecasts of 10 neighbours, as whole numbers, have the exact answer."""
    random = np.random.default_rng(0)
    votes = random.multinomial(10, [0.1, 0.2, 0.3, 0.4], 300)
    y, table = random.integers(0, 4, 300), (votes / 10).astype(dtype)
    curves = metrics.threshold_reliability(y, table, bins=5, strategy=strategy)
    for k, curve in enumerate(curves):
        below = votes[:, : k + 1].sum(1)
        middle = [(below < vote).sum() + (below == vote).sum() / 2 for vote in below]
        index = np.minimum(below // 2 if strategy == "uniform" else (np.array(middle) / 60).astype(int), 4)
        expected = [np.mean(y[index == each] <= k) for each in np.unique(index)]
        np.testing.assert_allclose(curve.observed, expected, rtol=1e-6)


def test_an_interval_holds_the_share_that_was_observed() -> None:
    """`matplotlib.pyplot.errorbar` raises for one that misses it by rounding."""
    for count in range(1, 60):
        for y in (np.zeros(count, int), np.ones(count, int)):
            (curve,) = metrics.threshold_reliability(y, np.full((count, 2), 0.5), labels=[0, 1])
            low, high = curve.interval
            assert (low <= curve.observed).all()
            assert (curve.observed <= high).all()


def test_small_forecasts_that_differ_do_not_share_a_bin() -> None:
    forecast = np.repeat(np.float32([1e-6, 4e-6]), 500)
    y = np.where(np.arange(1000) < 100, 0, 1)
    table = np.stack([forecast, 1 - forecast], 1)
    for same in (table, table.tolist(), table.astype(np.float64), torch.from_numpy(table)):
        (curve,) = metrics.threshold_reliability(y, same, bins=2, strategy="quantile")
        np.testing.assert_allclose(curve.forecast, [1e-6, 4e-6], rtol=1e-5)
        np.testing.assert_allclose(curve.observed, [0.2, 0.0])
    dense = np.sort(np.random.default_rng(0).random(100_000)).astype(np.float32)
    (curve,) = metrics.threshold_reliability(dense > 0.5, np.stack([dense, 1 - dense], 1), strategy="quantile")
    np.testing.assert_allclose(curve.share, 0.1, atol=1e-4)


def test_intervals_are_those_of_wilson_and_uneven_weights_count_less() -> None:
    proba = np.repeat([[0.1, 0.9], [0.19, 0.81], [0.95, 0.05]], [100, 100, 3], axis=0)
    y = np.repeat([0, 1, 0, 1], [30, 170, 2, 1])
    weight = np.r_[np.full(200, 3.0), 1.0, 2.0, 3.0]
    (plain,), (weighted,) = (metrics.threshold_reliability(y, proba, sample_weight=w) for w in (None, weight))
    np.testing.assert_allclose(plain.count, [200, 3])
    np.testing.assert_allclose(weighted.count, [200, 36 / 14])
    np.testing.assert_allclose(weighted.observed, [0.15, 0.5])
    exact = [stats.binomtest(hits, n).proportion_ci(method="wilson") for hits, n in ((30, 200), (2, 3))]
    np.testing.assert_allclose(plain.interval, np.transpose([(e.low, e.high) for e in exact]), rtol=1e-6)
    (sure,) = metrics.threshold_reliability([0, 0, 1], [[1.0, 0.0]] * 2 + [[0.0, 1.0]])
    np.testing.assert_allclose(sure.interval, [[0.0, 0.342380], [0.793451, 1.0]], atol=1e-6)
    assert metrics.ranked_probability_score([0], [[1.0]], labels=[0], normalize=True) == 0
    assert metrics.threshold_calibration_error(y, proba) == pytest.approx(plain.error)


def test_calibrated_and_miscalibrated_forecasts() -> None:
    y, _, proba = draw(3, n=40_000)
    sharp = proba**3 / (proba**3).sum(1, keepdims=True)
    assert metrics.threshold_calibration_error(y, proba) < 0.01
    assert metrics.threshold_calibration_error(y, sharp) > 0.04
    # Bins take their own lower edge, sums of thirds and tenths included.
    (curve,) = metrics.threshold_reliability([0, 1, 1], [[0.1 + 0.2, 0.7]] * 3, bins=10)
    assert curve.share.tolist() == [1.0]


@pytest.mark.parametrize("metric", [*OF_LABELS, *OF_PROBABILITIES])
def test_weights_are_copies_and_names_do_not_matter(metric: Callable[..., float]) -> None:
    y, predicted, proba = draw(11)
    given = predicted if metric in OF_LABELS else proba
    weight = np.random.default_rng(0).integers(0, 3, len(y))
    plain = metric(y, given, labels=range(5), sample_weight=weight)
    assert metric(y.repeat(weight), given.repeat(weight, axis=0), labels=range(5)) == pytest.approx(plain)
    for unit in (1e307, 2.0**-1072):
        assert metric(y, given, labels=range(5), sample_weight=weight * unit) == pytest.approx(plain)
    names = np.array(NAMES)[y]
    if metric in OF_LABELS:
        named = [metric(names, np.array(NAMES)[predicted], labels=NAMES, sample_weight=weight)]
        named += [metric(list(names), pd.Series(np.array(NAMES)[predicted]), labels=NAMES, sample_weight=weight)]
    else:
        alphabet = np.argsort(NAMES)
        named = [
            metric(names, proba, labels=NAMES, columns="rank", sample_weight=weight),
            metric(names, proba[:, alphabet], labels=NAMES, sample_weight=weight),
            metric(pd.Series(names), proba[:, ::-1], labels=NAMES, columns=NAMES[::-1], sample_weight=weight),
        ]
    assert named == pytest.approx([plain] * len(named))


@pytest.mark.parametrize("metric", OF_LABELS + OF_PROBABILITIES)
def test_classes_have_the_place_of_their_number_or_their_order(metric: Callable[..., float]) -> None:
    """Whole numbers have their distances, absent ones in between too; text without an order raises."""
    y, predicted, proba = draw(3, classes=3)
    numbers, texts = np.array([1, 2, 10]), np.array(NAMES[:3])
    of_labels = metric in OF_LABELS
    given, columns = (numbers[predicted], {}) if of_labels else (proba, {"columns": numbers})
    whole = metric(numbers[y], given, labels=range(1, 11), **columns)
    assert metric(numbers[y], given) == metric(numbers[y] * 1.0, given) == pytest.approx(whole)
    for unordered in (texts, np.array(["1", "2", "10"])):
        with pytest.raises(ValueError, match=r"are text, whose rank order is not known.* Pass labels="):
            metric(pd.Series(pd.Categorical(unordered[y])), unordered[predicted] if of_labels else proba)
    if of_labels:
        ordered = [pd.Categorical(texts[k], categories=NAMES, ordered=True) for k in (y, predicted)]
        for same in ((*ordered,), (pd.DataFrame({"grade": ordered[0]}), list(ordered[1]))):
            assert metric(*same) == pytest.approx(metric(y, predicted, labels=range(5)))
    else:  # a model has not seen every class
        seen = proba[:2, :2] / proba[:2, :2].sum(1, keepdims=True)
        partial = metric(["mid", "low"], seen, labels=NAMES[:3], columns=["high", "low"])
        assert partial == metric(["mid", "low"], np.insert(seen[:, ::-1], 1, 0, 1), labels=NAMES[:3], columns="rank")


@pytest.mark.parametrize("metric", OF_LABELS + OF_PROBABILITIES)
def test_integers_far_apart_count_their_gaps_and_take_no_memory_for_them(metric: Callable[..., float]) -> None:
    y, predicted, proba = draw(4, classes=3)
    near, far = np.array([-1, 0, 2]), np.array([-(10**12), 0, 2 * 10**12])
    given = [numbers[predicted] if metric in OF_LABELS else proba for numbers in (near, far)]
    shares = (metrics.minimum_sensitivity, metrics.off_by_one_accuracy, *OF_PROBABILITIES[2:])
    expected = metric(near[y], given[0]) * (1 if metric in shares else 10**12)
    if metric is metrics.off_by_one_accuracy:
        expected = np.mean(y == predicted)
    tracemalloc.start()
    actual = metric(far[y], given[1])
    assert tracemalloc.get_traced_memory()[1] < 1e6
    tracemalloc.stop()
    assert actual == pytest.approx(expected)
    ends = np.array([np.iinfo(np.int64).min, 5, np.iinfo(np.int64).max])
    assert np.isfinite(metric(ends[y], ends[predicted] if metric in OF_LABELS else proba))


def test_curves_are_of_classes_that_occur() -> None:
    y, _, proba = draw(4, classes=3)
    numbers = np.array([3, 4, 9])
    curves = metrics.threshold_reliability(numbers[y], proba)
    every = metrics.threshold_reliability(numbers[y], proba, labels=range(3, 10), columns=numbers)
    assert [curve.threshold for curve in curves] == [3, 4]
    assert len(every) == 6
    for k, curve in enumerate(every):
        np.testing.assert_array_equal(curve.observed, curves[min(k, 1)].observed)


def test_narrow_and_torch_probabilities_whose_sum_is_one_but_for_rounding() -> None:
    y, _, proba = draw(5)
    exact = metrics.ranked_probability_score(y, proba, labels=range(5))
    soft = torch.tensor(proba, dtype=torch.float32, requires_grad=True).log().softmax(-1)  # with a graph
    for rounded, tolerance in ((soft, 1e-6), (soft.half(), 1e-3), (soft.bfloat16(), 1e-2)):
        actual = metrics.ranked_probability_score(torch.tensor(y), rounded, labels=range(5))
        assert actual == pytest.approx(exact, rel=tolerance)
    for dtype, off, fine in (("float64", 1e-3, 9e-5), ("float32", -1e-3, 9e-5), ("float16", 2e-2, 6e-3)):
        with pytest.raises(ValueError, match="expected probabilities >= 0 of sum 1"):
            metrics.ordinal_emd([0], np.array([[0.5, 0.5 + off]], dtype), labels=[0, 1])
        assert metrics.ordinal_emd([0], np.array([[0.5, 0.5 + fine]], dtype)[:, ::-1], labels=[0, 1]) < 0.51


LOW, MID = (pd.Categorical(["a"], categories=c, ordered=True) for c in (["a", "b"], ["b", "a"]))
half = [[0.5, 0.5]]
test_bad_input = raising(
    (lambda: metrics.ordinal_mae([0, np.nan], [0, 1]), r"y_true\[1\] is missing"),
    (lambda: metrics.ordinal_mae([0, 1], ["0", "1"]), TypeError, "y_true holds numbers and y_pred holds strings"),
    (lambda: metrics.ordinal_mae([0, 5], [0, 1], labels=[1, 0]), r"y_true\[1\] is 5, .*\[1, 0\]"),
    (lambda: metrics.ordinal_mae([0, 1, 2], [0.5, 1, 2]), "hold 0.5, which is no whole number"),
    (lambda: metrics.ordinal_mae([0, 1], [0.5, 1], labels=[0, 1]), "is 0.5, .*; bring continuous predictions to the"),
    (lambda: metrics.ordinal_mae(LOW, MID), r"\['a', 'b'\] and \['b', 'a'\].*labels="),
    (lambda: metrics.ordinal_mae([0], [0], sample_weight=[-1]), r"sample_weight\[0\] is -1"),
    (lambda: metrics.ordinal_emd([0], half), "2 columns but y_true holds 1 classes.*Pass labels="),
    (lambda: metrics.threshold_calibration_error([0, 1], half * 2, strategy="x"), "strategy is 'x'"),
    (lambda: metrics.ordinal_emd([0], half, labels=[0, 1, 2]), "2 columns, expected 3.*model.classes_"),
    (lambda: metrics.ordinal_emd([0], [[2.0, -1.0]], labels=[0, 1]), r"proba\[0\] .* softmax"),
)
GRADES = ["low", "mid", "high"]
ALL = [
    "off_by_one_accuracy", "minimum_sensitivity", "ordinal_mae", "macro_mae", "maximum_mae",
    "ranked_probability_score", "ordinal_emd", "threshold_calibration_error",
]  # fmt: skip
LESS_IS_BETTER = ALL[2:]


def data(seed: int = 0, n: int = 90) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    X = rng.normal(size=(n, 2))
    return X, np.array(GRADES)[np.digitize(X[:, 0] + 0.5 * rng.normal(size=n), [-0.5, 0.7])]


@pytest.mark.parametrize("name", ALL)
def test_is_the_metric_of_the_predictions(name: str) -> None:
    X, y = data()
    model = LogisticRegression().fit(X[:60], y[:60])
    predictions: Any = model.predict(X) if name in ALL[:5] else model.predict_proba(X)
    value = getattr(metrics, name)(y, predictions, labels=GRADES)
    sign = -1 if name in LESS_IS_BETTER else 1
    score = scorer(name, labels=GRADES)
    assert score(model, X, y) == sign * value
    again = pickle.loads(pickle.dumps(score))
    assert again(model, X, y) == sign * value
    weight = np.arange(len(y))
    weighted = getattr(metrics, name)(y, predictions, labels=GRADES, sample_weight=weight)
    assert score(model, X, y, sample_weight=weight) == sign * weighted


def test_folds_without_some_class_and_predictors_without_classes() -> None:
    X, y = data()
    model = LogisticRegression().fit(X[y != "mid"], y[y != "mid"])
    proba = np.insert(model.predict_proba(X), 2, 0, axis=1)  # sorted: high, low, mid
    score = scorer("ranked_probability_score", labels=GRADES, normalize=True)
    assert score(model, X, y) == -metrics.ranked_probability_score(y, proba, labels=GRADES, normalize=True)
    rounded = SimpleNamespace(predict=lambda X: np.full(len(X), 3))
    assert scorer("ordinal_mae")(rounded, np.zeros(2), np.array([1, 3])) == -1.0


test_bad_scorers = raising(
    (lambda: scorer("ordinal_emd", labels=GRADES)(StandardScaler(), *data()), TypeError, "StandardScaler has no"),
    (
        lambda: scorer("ordinal_mae")(LinearRegression().fit([[0.0], [1], [3]], [0, 1, 2]), [[0.5], [1]], [0, 2]),
        "no whole number; bring continuous predictions to the nearest class",
    ),
    (lambda: scorer("ordinal_mae", vlues=[1, 2]), TypeError, "'vlues' is not an argument of ordinal_mae"),
    (lambda: scorer("ordinal_mae")(LogisticRegression().fit(*data()), *data()), "are text, .* Pass labels="),
)


def test_the_order_that_a_model_was_told_is_the_default() -> None:
    X, y = data()
    model = OrdinalClassifier(categories=GRADES)
    search = GridSearchCV(make_pipeline(model), {"ordinalclassifier__alpha": [1.0]}, cv=2)
    for fitted in (make_pipeline(StandardScaler(), model).fit(X, y), search.fit(X, y)):
        for name in ("ordinal_mae", "ranked_probability_score"):
            by_default, ordered, other = (scorer(name, labels=k)(fitted, X, y) for k in (None, GRADES, sorted(GRADES)))
            assert by_default == ordered != other


def test_labels_of_floats_are_whole_numbers_as_far_as_their_dtype_tells_them_apart() -> None:
    for dtype, largest in ((np.float16, 2048), (np.float32, 2.0**24)):
        near, far = np.array([0, 3, largest - 1], dtype), np.array([0, 3, largest], dtype)
        assert metrics.ordinal_mae(near, near[::-1]) == pytest.approx(2 * (largest - 1) / 3)
        with pytest.raises(ValueError, match="too large for floats to tell integers apart"):
            metrics.ordinal_mae(far, far[::-1])


def test_whole_numbers_that_only_the_fold_has_extend_the_range() -> None:
    X, y = data()
    ranks = np.array([2, 3, 7])[np.searchsorted(sorted(GRADES), y)]
    for model in (OrdinalClassifier(), LogisticRegression()):
        model.fit(X[ranks < 7], ranks[ranks < 7])
        for name in ("ordinal_mae", "ranked_probability_score"):
            assert scorer(name)(model, X, ranks) == scorer(name, labels=range(2, 8))(model, X, ranks)
        for name in ("ranked_probability_score", "threshold_calibration_error"):  # a range of 5,000 classes
            model.fit(X, 1000 * ranks)
            tracemalloc.start()
            score = scorer(name)(model, X, 1000 * ranks)
            assert tracemalloc.get_traced_memory()[1] < 1e6
            tracemalloc.stop()
            columns = {"columns": model.classes_, "labels": range(2000, 7001)}
            assert score == pytest.approx(-getattr(metrics, name)(1000 * ranks, model.predict_proba(X), **columns))
    with pytest.raises(ValueError, match="expected one of the labels"):
        scorer("ordinal_mae")(OrdinalClassifier(categories=[2, 3]).fit(X[ranks < 7], ranks[ranks < 7]), X, ranks)


@pytest.mark.parametrize("metric", [metrics.ranked_probability_score, metrics.ordinal_emd])
def test_classes_that_neither_occur_nor_are_predicted_take_no_memory(metric: Any) -> None:
    """Three of 10,000 classes: as much as a table of three columns, and the same number as with all of them."""
    rng = np.random.default_rng(0)
    table, labels = rng.dirichlet(np.ones(3), 500), np.arange(10_000)
    y = rng.choice([2, 5_000, 9_990], 500)
    tracemalloc.start()
    actual = metric(y, table, labels=labels, columns=[2, 5_000, 9_990])
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2e6
    every = np.full((500, labels.size), 1e-300)
    every[:, [2, 5_000, 9_990]] = table
    assert actual == pytest.approx(metric(y, every, labels=labels), rel=1e-9)
    normalized = metric(y, table, labels=labels, columns=[2, 5_000, 9_990], normalize=True)
    assert normalized == pytest.approx(actual / 9_999, rel=1e-12)


def test_the_accuracy_of_perfect_decisions_is_1() -> None:
    for n in range(1, 300):
        assert metrics.off_by_one_accuracy(np.arange(n) % 3, np.arange(n) % 3) == 1


def test_text_of_pyarrow_is_labels() -> None:
    pyarrow = pytest.importorskip("pyarrow")
    labels = ["low", "mid", "high", "high"]
    predicted = ["low", "low", "high", "mid"]
    for array in (pyarrow.array(labels), pyarrow.chunked_array([labels[:1], labels[1:]])):
        assert metrics.ordinal_mae(array, predicted, labels=["low", "mid", "high"]) == 0.5
    names, table = ["low", "mid"], np.array([[0.9, 0.1], [0.2, 0.8]])
    forecast = pyarrow.table(dict(zip(names, table.T, strict=True)))
    score = metrics.ranked_probability_score(names, forecast, labels=names, columns=names)
    assert score == metrics.ranked_probability_score(names, table, labels=names, columns=names)


def test_labels_in_a_list_of_tensors() -> None:
    """As predictions that a loop appends."""
    predicted = [torch.tensor(k) for k in (0, 2, 2, 1)]
    array = np.empty(4, dtype=object)
    array[:] = predicted
    half = [torch.tensor(float(k), requires_grad=True, dtype=torch.bfloat16) for k in (0, 2, 2, 1)]
    for each in (predicted, tuple(predicted), array, half):
        assert metrics.ordinal_mae([0, 1, 2, 2], each, labels=list(torch.arange(3))) == 0.5
    with pytest.raises(ValueError, match=r"y_pred is a list whose entries differ in length.*numpy\.concatenate"):
        metrics.ordinal_mae([0, 1, 2], [torch.tensor([0, 1]), torch.tensor([2])])


@pytest.mark.parametrize("columns", [["low", "mid", "top"], "rank"])
def test_columns_that_contradict_the_names_of_the_table_raise(columns: Any) -> None:
    names, own = ["low", "mid", "top"], ["mid", "low", "top"]
    table = np.array([[0.1, 0.8, 0.1], [0.7, 0.2, 0.1]])
    y = ["low", "mid"]
    frame = pd.DataFrame(table, columns=own)
    expected = metrics.ranked_probability_score(y, table, labels=names, columns=own)
    assert metrics.ranked_probability_score(y, frame, labels=names, columns=own) == expected
    for proba in (frame, metrics.Distribution(table, labels=own)):
        with pytest.raises(ValueError, match=r"names them \['mid', 'low', 'top'\]; pass columns=\['mid', 'low'"):
            metrics.ranked_probability_score(y, proba, labels=names, columns=columns)
    unnamed = pd.DataFrame(table)
    assert metrics.ranked_probability_score([0, 1], unnamed, labels=[0, 1, 2], columns=[1, 0, 2]) == expected
    for turned in (unnamed.iloc[:, ::-1], pd.DataFrame(table, columns=["1", "0", "2"])):  # of polars names are text
        with pytest.raises(ValueError, match=r"the columns are taken to be \[0, 1, 2\], and proba names them"):
            metrics.ranked_probability_score([0, 1], turned, labels=[0, 1, 2], columns="rank")


def test_labels_of_a_distribution_are_its_own() -> None:
    labels = np.array([1, 2])
    metrics.Distribution([[0.5, 0.5]], labels=labels).labels[:] = 0
    assert labels.tolist() == [1, 2]


def test_labels_of_an_ordered_categorical_have_its_order() -> None:
    """`unique` has them as they appear."""
    pandas = pytest.importorskip("pandas")
    order = ["low", "mid", "high"]
    y = pandas.Series(pandas.Categorical(["high", "low", "mid", "mid"], categories=order, ordered=True))
    predicted = ["mid", "low", "low", "high"]
    expected = metrics.ordinal_mae(y, predicted, labels=order)
    for labels in (y.unique(), y.drop_duplicates(), y.dtype):
        assert metrics.ordinal_mae(y, predicted, labels=labels) == expected
        model = OrdinalClassifier(categories=labels).fit(np.eye(4), y)
        assert model.categories_.tolist() == order
    assert metrics.Distribution(np.eye(3), labels=y.cat.categories).labels.tolist() == order
    with pytest.raises(ValueError, match="their Categorical has the order"):
        metrics.Distribution(np.eye(3), labels=y.unique())


def test_values_in_a_series_go_by_its_index() -> None:
    y_true, y_pred, order = ["a", "c", "b", "b"], ["c", "c", "a", "b"], ["c", "a", "b"]
    expected = metrics.ordinal_mae(y_true, y_pred, labels=order, values=[0.0, 3.0, 10.0])
    for values in (pd.Series({"b": 10.0, "c": 0.0, "a": 3.0}), pd.Series([0.0, 3.0, 10.0])):
        assert metrics.ordinal_mae(y_true, y_pred, labels=order, values=values) == expected
    whole = pd.Series([0.0, 1.0, 5.0, 9.0], index=[3, 4, 5, 6])
    assert metrics.ordinal_mae([3, 6], [5, 6], values=whole.iloc[[2, 0, 3, 1]]) == 2.5
    far, near = np.array([0, 127], np.int8), pd.Series(np.arange(128.0))
    assert metrics.ordinal_mae(far, far[::-1], values=near) == 127
    with pytest.raises(ValueError, match=r"values has shape \(2,\), expected \(10000001,\)"):
        metrics.ordinal_mae([0, 10**7], [0, 0], values=pd.Series([0.0, 1.0]))
    with pytest.raises(ValueError, match=r"values has the index .*, expected all of .*lacks 'a'. .*array goes by rank"):
        metrics.ordinal_mae(y_true, y_pred, labels=order, values=pd.Series({"b": 1.0, "c": 2.0, "z": 0.0}))


def test_what_is_no_table_of_probabilities_any_more_is_rounded() -> None:
    table = metrics.Distribution([[0.25, 0.75], [0.5, 0.5]], labels=["no", "yes"])
    assert table.round(1).labels.tolist() == ["no", "yes"]
    np.testing.assert_array_equal(table.dot([1.0, 3.0]).round(1), [2.5, 2.0])
    np.testing.assert_array_equal(np.round(table.flatten(), 1), [0.2, 0.8, 0.5, 0.5])
    np.testing.assert_array_equal(pd.Series(table.dot([1.0, 3.0])).round(), [2.0, 2.0])


def test_a_distribution_does_not_rename_columns() -> None:
    table, order = np.array([[0.7, 0.1, 0.2], [0.1, 0.6, 0.3]]), ["poor", "fair", "good"]
    frame = pd.DataFrame(table, columns=sorted(order))
    for named in (frame, metrics.Distribution(table, labels=sorted(order))):
        with pytest.raises(ValueError, match=r"the table names its columns \['fair', 'good', 'poor'\]; expected"):
            metrics.Distribution(named, labels=order)
    tenths = np.float32([0.1, 0.2, 0.3])
    for names, labels in (
        ([0, 1, 2], [2, 1, 0]),
        ([3, 2, 1], [1.0, 2.0, 3.0]),
        (["3.0", "2.0", "1.0"], [1.0, 2.0, 3.0]),
        ([0.3, 0.2, 0.1], tenths),
        (["0.3", "0.2", "0.1"], tenths),
        (tenths[::-1], tenths),
        ([1234568.5, 1234567.5, 0.5], [1234567.5, 1234568.5, 0.5]),
    ):
        with pytest.raises(ValueError, match="the table names its columns"):
            metrics.Distribution(pd.DataFrame(table, columns=names), labels=labels)
    for names in (["0", "1", "2"], ["2", "0", "1"]):  # text, which pandas does not give by itself
        with pytest.raises(ValueError, match="the columns are taken to be"):
            metrics.ranked_probability_score([2, 1], pd.DataFrame(table, columns=names), columns=[2, 1, 0])
    same = metrics.Distribution(frame[order], labels=order)
    np.testing.assert_array_equal(same, frame[order])
    half = torch.tensor(table, dtype=torch.bfloat16, requires_grad=True)
    np.testing.assert_allclose(metrics.Distribution(half, labels=order), table, rtol=1e-2)


def test_scorers_keep_an_order_that_wraps_in_its_dtype() -> None:
    X = np.random.default_rng(0).normal(size=(90, 2))
    ranks = np.digitize(X[:, 0], [-0.5, 0.5])
    order = np.array([255, 0, 1], dtype=np.uint8)
    found = scorer("ordinal_mae")(OrdinalClassifier(categories=order).fit(X, order[ranks]), X, order[ranks])
    assert found == scorer("ordinal_mae")(OrdinalClassifier().fit(X, ranks), X, ranks)


def test_several_scorers_in_a_search_with_weights() -> None:
    generator = np.random.default_rng(0)
    X, weight = generator.normal(size=(90, 2)), generator.random(90)
    y = np.digitize(X[:, 0], [-0.5, 0.5])
    found = {}
    for scoring in ({"mae": scorer("ordinal_mae"), "rps": scorer("ranked_probability_score")}, scorer("ordinal_mae")):
        search = GridSearchCV(OrdinalClassifier(), {"alpha": [1.0]}, scoring=scoring, refit="mae", cv=3)
        found |= search.fit(X, y, sample_weight=weight).cv_results_
    assert found["mean_test_mae"] == found["mean_test_score"]


def test_labels_with_fractions_are_the_same_in_each_precision() -> None:
    labels = np.array([0.1, 0.2, 0.3, 0.7])
    y, table = np.repeat(labels, 3), np.full((12, 4), 0.1) + 0.6 * np.eye(4)[np.repeat(range(4), 3)]
    expected = metrics.ranked_probability_score(y, table)
    for other in (y.astype(np.float32), torch.tensor(y, dtype=torch.float32)):
        assert metrics.ranked_probability_score(other, table, columns=labels) == pytest.approx(expected)
        assert metrics.ordinal_mae(other, y, labels=labels) == metrics.ordinal_mae(y, other, labels=labels) == 0
    X = np.random.default_rng(0).normal(size=(12, 2)) + 9 * y[:, None]
    with pytest.warns(UserWarning, match="numbers with fractions"):
        model = OrdinalClassifier().fit(X, y)
    for other in (y.astype(np.float32), pd.Series(y).astype("Float32"), y.astype(np.float32).tolist()):
        assert model.score(X, other) == model.score(X, y) > 0


def test_ordered_categoricals_of_arrow_have_their_order() -> None:
    pyarrow = pytest.importorskip("pyarrow")
    frame = pd.DataFrame({"y": pd.Categorical([10, 30, 20, 30], [10, 20, 30], ordered=True)})
    table = pyarrow.Table.from_pandas(frame)
    own = pd.Categorical([30, 10, 20, 30], [10, 20, 30], ordered=True)
    expected = metrics.ordinal_mae(frame["y"], own)
    assert expected == 1
    in_pandas = table.to_pandas(types_mapper=pd.ArrowDtype)["y"]
    for column in (
        table["y"],
        table["y"].chunk(0),
        in_pandas,
        in_pandas.values,
        pyarrow.chunked_array([[], table["y"].chunk(0)], table["y"].type),
    ):
        assert metrics.ordinal_mae(column, own) == expected
        model = OrdinalClassifier().fit([[1.0], [3.0], [2.0], [3.5]], column)
        assert model.categories_.tolist() == [10, 20, 30]
    for dtype in (in_pandas.dtype, table["y"].type):  # which has no categories
        with pytest.raises(ValueError, match="expected a list or array of labels"):
            metrics.ordinal_mae([10, 20], [10, 20], labels=dtype)
    lacking = pyarrow.Table.from_pandas(frame.assign(y=frame["y"].where([True, False, True, True])))
    assert metrics.ordinal_mae(table, own) == metrics.ordinal_mae(table.to_batches()[0], own) == expected
    in_pandas = lacking.to_pandas(types_mapper=pd.ArrowDtype)["y"]
    for column in (lacking, lacking["y"], lacking["y"].chunk(0), in_pandas):
        with pytest.raises(ValueError, match=r"y_true\[1\] is missing"):  # numpy takes it for the last category
            metrics.ordinal_mae(column, own, labels=[10, 20, 30])
        with pytest.raises(ValueError, match=r"NaN|missing"):
            OrdinalClassifier().fit([[1.0], [3.0], [2.0], [3.5]], column)
    others = pyarrow.Table.from_pandas(pd.DataFrame({"y": pd.Categorical([10, 30], [10, 30], ordered=True)}))
    with pytest.raises(ValueError, match=r"parts of a column of Arrow have the categories \[10, 30\] and others"):
        metrics.ordinal_mae(pyarrow.concat_tables([others, table])["y"], [10] * 6)
