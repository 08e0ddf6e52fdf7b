"""Ordinal grades in XGBoost and LightGBM: cross-validation with our objective and our metric.

Both libraries take an objective and a metric of the user, also in their `cv`. The objective is the ranked probability
score of a softmax, sum_k (F_k - 1[y <= k])^2 over the grades k with F the cumulative probabilities; the metric is the
same score, so that cross-entropy, the libraries' own objective, is judged and stopped by it too. All arms have the same
five folds, and start from the frequencies of the grades.

Data: measurements of white wines and their grades (Cortez et al., 2009), one row per distinct wine; without them
scikit-learn's diabetes in five grades.

Result: our objective lowers the score by 0.001 in XGBoost and by 0.004 in LightGBM, of 0.354, about a deviation of the
folds. A round takes as long as with cross-entropy.

    python examples/boosting.py --data winequality-white.csv     # that of UCI, or the grade in "response"
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import data
import lightgbm
import numpy as np
import xgboost
from matplotlib import pyplot as plt
from sklearn.model_selection import StratifiedKFold
from stand_ins import graded_diabetes

from otloss.boosting import (
    lightgbm_metric,
    lightgbm_objective,
    start_scores,
    xgboost_metric,
    xgboost_objective,
)

WINES = "ordinal/gagolews/winequality-white.csv"
CE, RPS = "cross-entropy", "ranked probability score"
PATIENCE = 30
Folds = list[tuple[np.ndarray, np.ndarray]]
Curve = tuple[np.ndarray, np.ndarray]  # mean and deviation over the folds, per round


def read(chosen: Path | None) -> tuple[np.ndarray, np.ndarray]:
    """Return the features, and the labels 0 to K - 1 in the order of the grades; an empty feature is missing, NaN."""
    try:
        X, grades = data.read_grades(data.file(WINES, chosen))
    except data.MissingError as missing:
        data.say_other("diabetes of scikit-learn in five grades", missing)
        X, grades = graded_diabetes()
    return X, np.unique(grades, return_inverse=True)[1]


def xgboost_curve(X: np.ndarray, y: np.ndarray, folds: Folds, objective: str, rounds: int) -> Curve:
    classes = int(y.max()) + 1
    parameters = {
        "objective": "multi:softprob",  # beside ours, it only says what `predict` returns
        "num_class": classes,
        "base_score": start_scores(y, classes).tolist(),
        "max_depth": 6,
        "eta": 0.1,
        "disable_default_eval_metric": True,
        "nthread": 1,  # waiting threads would count as processor time
    }
    # XGBoost passes probabilities to metrics with its own objective, raw scores with ours.
    metric = xgboost_metric(classes, predictions="probabilities" if objective == CE else "scores")
    results = xgboost.cv(
        parameters, xgboost.DMatrix(X, y), rounds, folds=folds, custom_metric=metric,
        obj=None if objective == CE else xgboost_objective(classes), early_stopping_rounds=PATIENCE, as_pandas=False,
    )  # fmt: skip
    return tuple(np.array(results[f"test-{metric.__name__}-{kind}"]) for kind in ("mean", "std"))


def lightgbm_curve(X: np.ndarray, y: np.ndarray, folds: Folds, objective: str, rounds: int) -> Curve:
    classes = int(y.max()) + 1
    # LightGBM adds no start of its own to the objective of a user.
    start = None if objective == CE else np.tile(start_scores(y, classes), (len(y), 1))
    metric = lightgbm_metric(classes, predictions="probabilities" if objective == CE else "scores")
    parameters = {
        "objective": "multiclass" if objective == CE else lightgbm_objective(classes),
        "num_class": classes,
        "metric": "none",
        "num_leaves": 31,
        "learning_rate": 0.1,
        "verbose": -1,
        "num_threads": 1,
    }
    stop = lightgbm.early_stopping(PATIENCE, verbose=False)
    wines = lightgbm.Dataset(X, y, init_score=start)
    results = lightgbm.cv(parameters, wines, rounds, folds=folds, feval=metric, callbacks=[stop])
    return tuple(np.array(results[f"valid {metric.__name__}-{kind}"]) for kind in ("mean", "stdv"))


def draw(path: Path, curves: dict[tuple[str, str], Curve]) -> None:
    figure, axes = plt.subplots(1, 2, figsize=(10, 3.6), sharey=True, layout="constrained")
    for ax, library in zip(axes, ("XGBoost", "LightGBM"), strict=True):
        for objective, colour in ((CE, "0.5"), (RPS, "C0")):
            mean, deviation = curves[library, objective]
            rounds = np.arange(1, len(mean) + 1)
            ax.plot(rounds, mean, color=colour, label=objective)
            ax.fill_between(rounds, mean - deviation, mean + deviation, color=colour, alpha=0.15, linewidth=0)
            ax.plot(mean.argmin() + 1, mean.min(), "o", color=colour)
        ax.set(title=f"{library.lower()}.cv", xlabel="round")
    axes[0].set_ylabel("ranked probability score,\nmean and deviation of 5 folds")
    axes[0].legend(title="objective", frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=100)


def main(arguments: list[str] | None = None) -> dict[tuple[str, str], Curve]:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    data.add_argument(parser, "CSV file of wines, or folder")
    parser.add_argument("--output", type=Path, default=Path("gallery-output"), help="folder of the figure")
    parser.add_argument("--quick", action="store_true", help="400 rows and 10 rounds")
    options = parser.parse_args(arguments)
    X, y = read(options.data)
    X, y = (X[:400], np.unique(y[:400], return_inverse=True)[1]) if options.quick else (X, y)
    common = np.flatnonzero(np.bincount(y)[y] >= 5)  # a grade with fewer rows cannot be in all folds
    X, y = X[common], np.unique(y[common], return_inverse=True)[1]
    folds = list(StratifiedKFold(5, shuffle=True, random_state=0).split(X, y))
    print(f"{len(y)} rows, {y.max() + 1} grades, 5 folds\n{'':36}{'best score':>16}{'round':>7}{'seconds':>9}")
    curves = {}
    for library, curve in (("XGBoost", xgboost_curve), ("LightGBM", lightgbm_curve)):
        for objective in (CE, RPS):
            start = time.process_time()
            mean, deviation = curves[library, objective] = curve(X, y, folds, objective, 10 if options.quick else 500)
            best, seconds = int(mean.argmin()), time.process_time() - start
            print(f"{library:10}{objective:26}{mean[best]:8.4f} ±{deviation[best]:.4f}{best + 1:7}{seconds:9.1f}")
    draw(options.output / "boosting.png", curves)
    return curves


if __name__ == "__main__":
    main()
