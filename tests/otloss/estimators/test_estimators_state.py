"""What an estimator holds after calls that fail, and how it says that it has not converged."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import joblib
import numpy as np
import pytest
from sklearn.exceptions import ConvergenceWarning

from otloss.estimators import OrdinalClassifier
from otloss.estimators.decode import decode
from tests.otloss.estimators.test_estimators import BOTH, both, ordered_rows

X, Y = ordered_rows(150)


@BOTH
@pytest.mark.parametrize("calibration", [None, "temperature"])
def test_a_fit_that_fails_leaves_what_was_learnt(index: int, calibration: str | None) -> None:
    model = both(calibration=calibration, power=1, random_state=0)[index].fit(X, Y)
    before = model.predict_proba(X)
    bad: list[tuple[Any, ...]] = [
        (X, np.array(["7", "8", "9"])[Y], -np.ones(150)),
        (X, np.minimum(Y, 1), -np.ones(150)),
        (X[:, :2], Y, -np.ones(150)),
        (X[:, :2], Y, np.ones(3)),
    ]
    if calibration:
        bad.append((X[:3], [0, 1, 2]))  # none to hold out
    for arguments in bad:
        with pytest.raises(ValueError):
            model.fit(*arguments)
        np.testing.assert_array_equal(model.predict_proba(X), before)
        assert model.classes_.tolist() == [0, 1, 2]
        assert model.n_features_in_ == 3


def test_training_that_fails_leaves_what_was_learnt(monkeypatch: pytest.MonkeyPatch) -> None:
    model = OrdinalClassifier(calibration="ordinal", random_state=0).fit(X, Y)
    before = model.predict_proba(X)
    monkeypatch.setattr("otloss.estimators.base.fit_calibration", lambda *_, **__: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        model.fit(X * 2 + 1, Y)
    np.testing.assert_array_equal(model.predict_proba(X), before)


def test_a_first_part_that_fails_leaves_nothing() -> None:
    models = [OrdinalClassifier(learning_rate=0.1, batch_size=50, random_state=0) for _ in range(2)]
    with pytest.raises(ValueError, match="expected finite weights >= 0"):
        models[0].partial_fit(X, Y, sample_weight=-np.ones(150))
    assert not hasattr(models[0], "classes_")
    for model in models:
        model.partial_fit(X, Y)
    adam = models[0]._adam.steps
    with pytest.raises(ValueError, match="expected finite weights >= 0"):
        models[0].partial_fit(X, Y, sample_weight=-np.ones(150))
    assert models[0]._adam.steps == adam
    np.testing.assert_array_equal(models[0].predict_proba(X), models[1].predict_proba(X))


def test_balanced_parts_are_refused() -> None:
    with pytest.raises(ValueError, match="class_weight is 'balanced', which partial_fit cannot know"):
        OrdinalClassifier(class_weight="balanced").partial_fit(X, Y)


@pytest.mark.parametrize("settings", [{}, {"solver": "adam"}], ids=str)
def test_the_warning_points_to_the_call(settings: dict[str, Any]) -> None:
    with pytest.warns(ConvergenceWarning, match="did not converge in max_iter=1") as caught:
        OrdinalClassifier(max_iter=1, **settings).fit(X, Y)
    assert caught[0].filename == __file__


@pytest.mark.parametrize("offset", [1e3, 1e4, 1e7])
def test_features_far_from_zero_reach_the_optimum_also_as_they_are(offset: float) -> None:
    settings: dict[str, Any] = {"standardize": False, "tol": 1e-7}
    near = OrdinalClassifier(**settings).fit(X, Y).predict_proba(X)
    far = OrdinalClassifier(**settings).fit(X + offset, Y).predict_proba(X + offset)
    np.testing.assert_allclose(far, near, atol=1e-5)


def test_slopes_that_stay_above_tol_are_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """A relative fall of the loss below 1e-14 is no proof of an optimum."""
    from otloss.estimators import training as _training

    found = _training.minimize(lambda x: (float(x @ x), 2 * x), [1.0], jac=True, method="L-BFGS-B")

    def stuck(loss: Any, start: np.ndarray, **_: Any) -> Any:
        found.x, (found.fun, found.jac), found.nit, found.success = start, loss(start), 3, True
        return found

    monkeypatch.setattr(_training, "minimize", stuck)
    with pytest.warns(ConvergenceWarning, match=r"to tol=1e-06: at slopes of 0\.\d+ the loss falls no more"):
        OrdinalClassifier().fit(X, Y)


def test_descent_begins_again_where_it_gained_little(monkeypatch: pytest.MonkeyPatch) -> None:
    from otloss.estimators import training as _training

    calls, minimize = [], _training.minimize

    def lazy(*arguments: Any, options: dict[str, Any], **rest: Any) -> Any:
        calls.append(options["ftol"])
        return minimize(*arguments, options=options if options["ftol"] == 0 else {**options, "ftol": 1e-3}, **rest)

    expected = OrdinalClassifier(tol=1e-7).fit(X, Y)
    monkeypatch.setattr(_training, "minimize", lazy)
    again = OrdinalClassifier(tol=1e-7).fit(X, Y)
    assert len(calls) > 1
    np.testing.assert_allclose(again.predict_proba(X), expected.predict_proba(X), atol=1e-5)


@pytest.mark.parametrize("settings", [{}, {"hidden_layer_sizes": 4, "max_iter": 5}, {"model": "cumulative"}], ids=str)
def test_memory_that_must_not_be_written_serves(settings: dict[str, Any], tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        model = OrdinalClassifier(random_state=0, **settings).fit(X, Y)
    joblib.dump(model, tmp_path / "model")
    loaded = joblib.load(tmp_path / "model", mmap_mode="r")
    np.testing.assert_array_equal(loaded.predict_proba(X), model.predict_proba(X))


def test_ties_of_the_median_go_down() -> None:
    P = np.array([[0.5, 0.0, 0.5], [0.25, 0.25, 0.5], [0.1, 0.4, 0.5]])
    assert decode(P, "median", values=np.arange(3.0)).tolist() == [0, 1, 1]
