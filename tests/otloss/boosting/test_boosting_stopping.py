"""Early stopping of LGBMClassifier by our metric, and what it does where its own metric is left on."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from scipy.special import softmax

from otloss.boosting import lightgbm_metric, lightgbm_objective, start_scores
from otloss.metrics import ranked_probability_score

lgb = pytest.importorskip("lightgbm")

K = 4


@pytest.mark.filterwarnings("ignore:Cannot compute class probabilities", "ignore::FutureWarning")
def test_the_classifier_of_lightgbm_stops_early_by_our_metric_alone() -> None:
    rng = np.random.default_rng(0)
    X = rng.normal(size=(600, 5))
    y = np.clip(np.round(X[:, 0] + X[:, 1] * X[:, 2] + rng.normal(size=600) * 0.5 + 1.5), 0, K - 1).astype(int)
    start = np.tile(start_scores(y[:400], K), (600, 1))

    def stopped(**settings: Any) -> tuple[Any, dict[str, list[float]]]:
        model = lgb.LGBMClassifier(
            objective=lightgbm_objective(K, interface="sklearn"), n_estimators=300, num_leaves=7, n_jobs=1, verbose=-1,
            deterministic=True, force_row_wise=True, **settings,
        )  # fmt: skip
        model.fit(
            X[:400],
            y[:400],
            init_score=start[:400],
            eval_set=[(X[400:], y[400:])],
            eval_init_score=[start[400:]],
            eval_metric=lightgbm_metric(K, interface="sklearn"),
            callbacks=[lgb.early_stopping(10, verbose=False)],
        )
        return model, next(iter(model.evals_result_.values()))

    model, history = stopped(metric="None")
    assert list(history) == ["rps"]
    assert model.best_iteration_ == np.argmin(history["rps"]) + 1 > 20
    scores = model.predict(X)
    assert scores.shape == (600, K)
    np.testing.assert_array_equal(scores, model.predict_proba(X))
    proba = softmax(scores[400:] + start[400:], axis=1)
    assert min(history["rps"]) == pytest.approx(ranked_probability_score(y[400:], proba, labels=range(K)), rel=1e-6)
    # What the docstring warns of: its own metric on raw scores ends it at once.
    assert stopped()[0].best_iteration_ < 5
