"""What the metrics take for labels, probabilities, weights and values, and what they say of anything else."""

from __future__ import annotations

from collections.abc import Callable
from datetime import date

import numpy as np
import pandas as pd
import pytest

from otloss import metrics


def test_dates_are_labels() -> None:
    days = [date(2020, 1, 1), date(2021, 1, 1), date(2022, 1, 1)]
    stamps = [pd.Timestamp(day) for day in days]
    arrays = [np.array(days, dtype=f"M8[{unit}]") for unit in ("D", "ns")]
    for labels in (days, stamps, pd.Series(stamps), *arrays):
        assert metrics.ordinal_mae(labels, list(labels)[::-1], labels=labels) == pytest.approx(4 / 3)
        assert metrics.ordinal_mae(labels, arrays[0][::-1]) == pytest.approx(4 / 3)
    (first, _) = metrics.threshold_reliability(arrays[1], np.eye(3))
    assert first.threshold == np.datetime64("2020-01-01")
    with pytest.raises(ValueError, match=r"y_pred.*'2023.*expected one of the labels \['2020-01-01'"):
        metrics.ordinal_mae(arrays[0], np.array(["2023-01-01"] * 3, dtype="M8[ns]"), labels=arrays[0])
    with pytest.raises(TypeError, match="y_true holds dates with a time zone"):
        metrics.ordinal_mae([pd.Timestamp("2020", tz="UTC")], days[:1])


@pytest.mark.parametrize(("dtype", "off", "fine"), [
    ("float64", 1e-3, 9e-5), ("float32", 1e-3, 9e-5), ("float16", 2e-2, 6e-3),
])  # fmt: skip
def test_sums_of_probabilities_are_one_but_for_rounding(dtype: str, off: float, fine: float) -> None:
    for error in (off, -off):
        with pytest.raises(ValueError, match="expected probabilities >= 0 of sum 1"):
            metrics.ordinal_emd([0], np.array([[0.5, 0.5 + error]], dtype), labels=[0, 1])
    assert metrics.ordinal_emd([0], np.array([[0.5, 0.5 + fine]], dtype), labels=[0, 1]) == pytest.approx(0.5, abs=fine)


LOW, MID = (pd.Categorical(["a"], categories=c, ordered=True) for c in (["a", "b"], ["b", "a"]))
half = [[0.5, 0.5]]


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: metrics.ordinal_mae([0, 1], [0]), ValueError, "y_true has 2 labels and y_pred 1"),
        (lambda: metrics.ordinal_mae([], []), ValueError, "y_true is empty"),
        (lambda: metrics.ordinal_mae([[0]], [0]), ValueError, r"y_true has shape \(1, 1\), expected one axis"),
        (
            lambda: metrics.ordinal_mae([0], [[0.1, 2.0]]),
            ValueError,
            r"of scores of classes take y_pred.argmax\(axis=1\)",
        ),
        (lambda: metrics.ordinal_mae([0, np.nan], [0, 1]), ValueError, r"y_true\[1\] is missing"),
        (lambda: metrics.ordinal_mae(["a", None], ["a", "a"]), ValueError, r"y_true\[1\] is missing"),
        (lambda: metrics.ordinal_mae(pd.array([0, pd.NA]), [0, 1]), ValueError, r"y_true\[1\] is missing"),
        (lambda: metrics.ordinal_mae(["a", 1], ["a", "a"]), TypeError, "y_true mixes strings with other types"),
        (lambda: metrics.ordinal_mae([0, 1], ["0", "1"]), TypeError, "y_true holds numbers and y_pred holds strings"),
        (lambda: metrics.ordinal_mae([0], [0], labels=["0"]), TypeError, "y_true holds numbers and labels holds str"),
        (lambda: metrics.ordinal_mae([0, 5], [0, 1], labels=[1, 0]), ValueError, r"y_true\[1\] is 5, .*\[1, 0\]"),
        (lambda: metrics.ordinal_mae(["x"], ["y"], labels=["x"]), ValueError, r"y_pred\[0\] is 'y'"),
        (
            lambda: metrics.ordinal_mae([0], [0], labels=[0, 0]),
            ValueError,
            r"labels is \[0, 0\], expected each class once",
        ),
        (lambda: metrics.ordinal_mae([0, 1, 2], [0.5, 1, 2]), ValueError, "hold 0.5, which is no whole number"),
        (lambda: metrics.ordinal_mae([0], [10**9]), ValueError, "go from 0 to 1000000000"),
        (lambda: metrics.ordinal_mae([0], [0], sample_weight=[-1]), ValueError, r"sample_weight\[0\] is -1"),
        (lambda: metrics.ordinal_mae([0], [0], sample_weight=[0]), ValueError, "sample_weight is 0 everywhere"),
        (lambda: metrics.ordinal_mae([0], [0], sample_weight=[1, 1]), ValueError, r"sample_weight has shape \(2,\)"),
        (lambda: metrics.ordinal_mae([0, 1], [0, 1], values=[1, 1]), ValueError, r"values is \[1. 1.\], .*increasing"),
        (
            lambda: metrics.ordinal_mae([0, 1], [0, 1], values=[1]),
            ValueError,
            r"values has shape \(1,\), expected \(2,\)",
        ),
        (lambda: metrics.ordinal_emd([0], half), ValueError, "2 columns but y_true holds 1 classes.*Pass labels="),
        (lambda: metrics.ordinal_emd([0], half, labels=[0, 1, 2]), ValueError, "2 columns, expected 3.*model.classes_"),
        (lambda: metrics.ordinal_emd([0, 1], half), ValueError, "y_true has 2 labels and proba 1 rows"),
        (lambda: metrics.ordinal_emd([0], half, labels=[0, 1], columns="x"), ValueError, "columns is 'x'"),
        (lambda: metrics.ordinal_emd([0], half, labels=[0, 1], columns=[0, 0]), ValueError, "expected each label once"),
        (lambda: metrics.ordinal_emd([0], half, labels=[0, 1], columns=[0, 2]), ValueError, r"columns\[1\] is 2"),
        (lambda: metrics.ordinal_emd([0], [[2.0, -1.0]], labels=[0, 1]), ValueError, r"proba\[0\] .* softmax"),
        (lambda: metrics.ordinal_emd([0], [[0.5, 0.6]], labels=[0, 1]), ValueError, "of sum 1.1"),
        (lambda: metrics.ordinal_emd([0], [[np.nan, 1.0]], labels=[0, 1]), ValueError, r"proba\[0\]"),
        (
            lambda: metrics.ordinal_emd([0], [0.5], labels=[0, 1]),
            ValueError,
            r"proba has shape \(1,\), expected \(n, K\)",
        ),
        (lambda: metrics.ordinal_mae(["a"], ["a"], labels={"a"}), TypeError, "labels is {'a'}, a set; expected a list"),
        (lambda: metrics.ordinal_mae(["a"], ["a"], labels={"a": 0}), TypeError, "a dict; expected a list"),
        (lambda: metrics.ordinal_mae("a", "a"), TypeError, "y_true is 'a', a str; expected a list"),
        (lambda: metrics.ordinal_mae([1j], [0]), TypeError, r"y_true holds .*1j.*, a complex128, expected labels that"),
        (
            lambda: metrics.ordinal_mae([0, 1], [0, 1], values={0: 0, 1: 1}),
            TypeError,
            r"values is {0: 0, 1: 1}, a dict; expected numbers of shape \(2,\).*values\[c\] for c in labels",
        ),
        (
            lambda: metrics.ordinal_mae([0, 1], [0, 1], values=["0", "1"]),
            TypeError,
            "values is .*, a list; expected num",
        ),
        (lambda: metrics.ordinal_mae([0, 1], [0, 1], values=[False, True]), TypeError, "values is .*expected numbers"),
        (lambda: metrics.ordinal_mae([0, 1], [0, 1], values=[-1e308, 1e308]), ValueError, "expected finite"),
        (
            lambda: metrics.ordinal_mae([0], [0], sample_weight=["a"]),
            TypeError,
            r"sample_weight is \['a'\].*\(1,\): one",
        ),
        (lambda: metrics.ordinal_mae([0], [0], sample_weight=np.array(["1"], object)), TypeError, "sample_weight is"),
        (lambda: metrics.ordinal_mae(LOW, MID), ValueError, r"y_true .*\['a', 'b'\] and y_pred \['b', 'a'\].*labels="),
        (
            lambda: metrics.ordinal_emd(
                ["a"], pd.DataFrame(half, columns=["b", "a"]), labels=["a", "b"], columns="rank"
            ),
            ValueError,
            r"columns stands for \['a', 'b'\], but the columns of proba are \['b', 'a'\]; leave columns out",
        ),
        (
            lambda: metrics.ordinal_emd(["a"], pd.DataFrame(half, columns=["a", "c"]), labels=["a", "b"]),
            ValueError,
            r"the columns of proba are \['a', 'c'\], of which \['c'\] are no labels",
        ),
        (lambda: metrics.threshold_calibration_error([0], [[1.0]]), ValueError, "at least two classes"),
        (lambda: metrics.threshold_calibration_error([0, 1], half * 2, bins=0), ValueError, "bins is 0"),
        (lambda: metrics.threshold_calibration_error([0, 1], half * 2, strategy="x"), ValueError, "strategy is 'x'"),
    ],
)
def test_bad_input(call: Callable[[], object], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call()


def test_a_frame_of_one_column_is_its_column() -> None:
    grades = ["low", "mid", "high"]
    true, predicted = (pd.Categorical(labels, grades, ordered=True) for labels in (["low", "high"], ["mid", "high"]))
    frame = pd.DataFrame({"grade": true})
    assert metrics.ordinal_mae(frame, predicted) == 0.5
    assert metrics.ordinal_mae(predicted, frame) == 0.5
    assert metrics.ranked_probability_score(frame, np.eye(3)[[1, 2]], columns="rank") == 0.5
    np.testing.assert_array_equal(metrics.ordinal_confusion_matrix(frame, frame), np.diag([1, 0, 1]))
    with pytest.raises(ValueError, match=r"y_true has shape \(2, 2\)"):
        metrics.ordinal_mae(frame.assign(again=true), predicted)


def test_intervals_are_labels() -> None:
    ages = pd.Series(pd.cut([3, 14, 15, 30], [0, 10, 20, 40]))
    ranks = ages.cat.codes.to_numpy()
    predicted = np.asarray(ages)[::-1]
    proba = np.random.default_rng(0).dirichlet([1.0, 1.0, 1.0], size=4)
    named = pd.DataFrame(proba[:, ::-1], columns=ages.cat.categories[::-1])
    for labels in (None, ages.cat.categories, list(ages.cat.categories)):
        assert metrics.ordinal_mae(ages, predicted, labels=labels) == metrics.ordinal_mae(ranks, ranks[::-1])
        expected = metrics.ranked_probability_score(ranks, proba)
        assert metrics.ranked_probability_score(ages, proba, labels=labels) == expected
        assert metrics.ranked_probability_score(np.asarray(ages), named, labels=labels) == expected
    assert metrics.threshold_reliability(ages, proba)[1].threshold == pd.Interval(10, 20)
    with pytest.raises(ValueError, match=r"y_true\[1\] is missing"):
        metrics.ordinal_mae(pd.cut([3, 50], [0, 10, 20]), predicted[:2])
    with pytest.raises(TypeError, match="y_true holds intervals and y_pred holds numbers"):
        metrics.ordinal_mae(np.asarray(ages), ranks)
    with pytest.raises(TypeError, match=r"y_true holds \{1\}, a set, expected .* or the intervals of pandas.cut"):
        metrics.ordinal_mae(np.array([{1}]), predicted[:1])
