"""Labels that are read wrongly by themselves: codes in place of numbers, orders that are lost, tables with an index."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from sklearn.base import clone
from sklearn.ensemble import VotingClassifier

from otloss.estimators import EncodedLabelsWarning, LabelOrderWarning, OrdinalBoostingClassifier, OrdinalClassifier
from tests.otloss.estimators.test_estimators import BOTH, NAMES, both, ordered_rows

X, RANK = ordered_rows()


@BOTH
def test_numbers_that_are_no_categories_are_said_to_be_read_as_indices(index: int) -> None:
    model = both(categories=[1, 2, 3])[index]
    with pytest.warns(EncodedLabelsWarning, match=r"y holds \[0, 1, 2\] and none of .*0 = 1, 1 = 2, 2 = 3") as caught:
        model.fit(X, RANK)
    assert caught[0].filename == __file__
    with pytest.warns(EncodedLabelsWarning, match="0 = 0.5"):
        both(categories=[0.5, 1.5, 2.5])[index].fit(X, RANK)


@pytest.mark.parametrize("categories", [[1, 2, 3, 4], [4, 3, 2, 1], [0, 1, 3, 5]])
def test_labels_that_may_be_indices_are_said_to_be_read_as_labels(categories: list[int]) -> None:
    y = np.array([1, 3])[np.minimum(RANK, 1)]
    with pytest.warns(EncodedLabelsWarning, match=r"y holds \[1, 3\] out of .*: read as these labels") as caught:
        model = OrdinalClassifier(categories=categories).fit(X, y)
    assert caught[0].filename == __file__
    assert model.classes_.tolist() == [1, 3]
    OrdinalClassifier(categories=range(4)).fit(X, y)  # the same either way: no warning


def test_partial_fit_warns_where_it_was_called() -> None:
    with pytest.warns(EncodedLabelsWarning) as caught:
        OrdinalClassifier(categories=[1, 2, 3]).partial_fit(X, RANK, classes=[0, 1, 2])
    assert caught[0].filename == __file__


@BOTH
@pytest.mark.parametrize("class_weight", [{1: 50.0}, {1: 50.0, 2: 1.0, 3: 1.0}, {3: 20.0}], ids=str)
@pytest.mark.filterwarnings("ignore::otloss.estimators.EncodedLabelsWarning")
def test_class_weights_name_the_users_labels_also_where_codes_come(index: int, class_weight: dict[int, float]) -> None:
    model = both(categories=[1, 2, 3], class_weight=class_weight)[index]
    alone = model.fit(X, RANK + 1).predict_proba(X)
    voting = VotingClassifier([("one", model)], voting="soft").fit(X, RANK + 1)
    np.testing.assert_array_equal(voting.predict_proba(X), alone)
    by_code = both(categories=[7, 8, 9], class_weight={0: 50.0})[index].fit(X, RANK).predict_proba(X)
    np.testing.assert_array_equal(by_code, both(class_weight={0: 50.0})[index].fit(X, RANK).predict_proba(X))


@BOTH
@pytest.mark.filterwarnings("ignore::sklearn.exceptions.DataConversionWarning")
def test_a_data_frame_of_one_column_keeps_its_order(index: int) -> None:
    pandas = pytest.importorskip("pandas")
    y = pandas.DataFrame({"grade": pandas.Categorical(np.array(NAMES)[RANK], categories=NAMES, ordered=True)})
    assert both()[index].fit(X, y).categories_.tolist() == NAMES
    with pytest.warns(LabelOrderWarning):
        assert both()[index].fit(X, y.astype(str)).categories_.tolist() == sorted(NAMES)


@pytest.mark.parametrize("kind", [OrdinalClassifier, OrdinalBoostingClassifier])
def test_the_docstring_says_where_an_order_is_lost(kind: Any) -> None:
    assert "drop the order of a Categorical: name `categories` there" in kind.__doc__


COST = np.array([[0.0, 1, 2], [1, 0, 1], [20, 10, 0]])


def test_labelled_costs_and_values_go_by_their_index() -> None:
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame(COST, index=NAMES, columns=NAMES)
    y = np.array(NAMES)[RANK]
    plain = OrdinalClassifier(categories=NAMES, cost=COST).fit(X, y).predict_proba(X)
    for table in (frame.loc[sorted(NAMES), sorted(NAMES)], frame.loc[:, sorted(NAMES)], pandas.DataFrame(COST)):
        labelled = OrdinalClassifier(categories=NAMES, cost=table).fit(X, y)
        np.testing.assert_array_equal(labelled.predict_proba(X), plain)
    values = pandas.Series({"high": 7.0, "low": 0.0, "medium": 1.0, "other": 3.0})
    expected = OrdinalClassifier(categories=NAMES, values=[0, 1, 7]).fit(X, y).expected_value(X)
    np.testing.assert_array_equal(
        OrdinalClassifier(categories=NAMES, values=values).fit(X, y).expected_value(X), expected
    )


def test_tables_whose_index_lacks_a_category_are_refused() -> None:
    pandas = pytest.importorskip("pandas")
    y = np.array(NAMES)[RANK]
    for index in (["low", "high", "mid"], ["low", "low", "medium"], [1, 2, 3]):
        with pytest.raises(ValueError, match=r"the index of values is .* expected each of the categories"):
            OrdinalClassifier(categories=NAMES, values=pandas.Series([0.0, 1, 2], index=index)).fit(X, y)
    with pytest.raises(ValueError, match="the columns of cost is "):
        OrdinalClassifier(categories=NAMES, cost=pandas.DataFrame(COST, index=NAMES, columns=list("abc"))).fit(X, y)


@BOTH
def test_an_ordered_dtype_is_a_rank_order(index: int) -> None:
    pandas = pytest.importorskip("pandas")
    y = np.array(NAMES)[RANK]
    wanted = [*NAMES, "very high"]
    model = both(categories=pandas.CategoricalDtype(wanted, ordered=True))[index].fit(X, y)
    assert model.categories_.tolist() == wanted
    np.testing.assert_array_equal(model.predict_proba(X), both(categories=wanted)[index].fit(X, y).predict_proba(X))
    clone(model).fit(X, pandas.Categorical(y))
    with pytest.raises(ValueError, match=r"categories is CategoricalDtype.* has no order, expected .*ordered=True"):
        both(categories=pandas.CategoricalDtype(wanted))[index].fit(X, y)
    with pytest.raises(ValueError, match="categories is None, expected a sequence of labels"):
        both(categories=pandas.CategoricalDtype(ordered=True))[index].fit(X, y)


def test_an_ordered_dtype_names_the_classes_of_a_stream() -> None:
    pandas = pytest.importorskip("pandas")
    dtype = pandas.CategoricalDtype(NAMES, ordered=True)
    model = OrdinalClassifier(categories=dtype).partial_fit(X[:1], ["low"])
    assert model.classes_.tolist() == sorted(NAMES)


@pytest.mark.parametrize("labels", [["1", "2", "10"], ["-3", "1", "02"], ["0.5", "1.5", "10.0"]], ids=str)
def test_numbers_as_text_are_ordered_as_numbers(labels: list[str]) -> None:
    """As text they sort as "1", "10", "2"; no warning, for their order is known."""
    numbers = np.array([float(label) for label in labels])
    expected = OrdinalClassifier(categories=None if (numbers % 1 == 0).all() else numbers).fit(X, numbers[RANK])
    for dtype in (str, object):
        model = OrdinalClassifier().fit(X, np.array(labels, dtype=dtype)[RANK])
        assert [float(label) for label in model.categories_.tolist()] == expected.categories_.tolist()
        assert set(labels) <= set(model.categories_.tolist())
        np.testing.assert_array_equal(model.predict_distribution(X), expected.predict_distribution(X))
        np.testing.assert_array_equal(model.predict(X).astype(float), expected.predict(X))


def test_text_without_an_order_warns_once_per_fit_where_it_was_called() -> None:
    pandas = pytest.importorskip("pandas")
    y = np.array(NAMES)[RANK]
    message = r"\['high', 'low', 'medium'\] are text, .* ordered as \['high', 'low', 'medium'\].*pass categories="
    for labels in (y, pandas.Series(pandas.Categorical(y, NAMES)), y.astype(object)):
        for model in both(calibration="temperature", early_stopping=False):
            with pytest.warns(LabelOrderWarning, match=message) as caught:
                model.fit(X, labels)
            assert [warning.filename for warning in caught] == [__file__]
    with pytest.warns(LabelOrderWarning, match=message) as caught:
        OrdinalClassifier().partial_fit(X, y).partial_fit(X, y)
    assert [warning.filename for warning in caught] == [__file__]
    for doubtful in (["1", "01", "2"], [0, 1, 10**6]):
        with pytest.warns(LabelOrderWarning, match="one number|every integer between would be a class"):
            assert len(OrdinalClassifier().fit(X, np.array(doubtful)[RANK]).categories_) == 3


@BOTH
def test_whole_numbers_keep_their_distances_and_their_unit_is_the_mean_gap(index: int) -> None:
    with_gaps = both()[index].fit(X, np.array([1, 2, 5])[RANK])
    same = both(values=[0, 0.5, 2])[index].fit(X, RANK)  # the mean gap of the labels, 2, is 1 in training
    assert with_gaps.categories_.tolist() == [1, 2, 3, 4, 5]
    np.testing.assert_allclose(with_gaps.predict_proba(X), same.predict_proba(X), atol=1e-6)
    tens = both()[index].fit(X, np.array([10, 20, 30], dtype=np.uint8)[RANK])
    assert tens.categories_.dtype == np.uint8
    np.testing.assert_allclose(tens.predict_proba(X), both()[index].fit(X, RANK).predict_proba(X), atol=1e-6)
