"""Wine quality by ordinal classifiers in a scikit-learn pipeline with a grid search.

A grid search by the ranked probability score (RPS, the sum over grades k of (F_k - 1[y <= k])^2) chooses the loss and
the penalty of a linear model, a multi-layer perceptron and boosted trees; logistic regression is the peer.

Data: physical measurements of red wines and their grades (Cortez et al., 2009), one row per distinct wine, a quarter of
them for the test. Without them: scikit-learn's diabetes in five grades, to which the result does not apply.

Result: all models are within two standard errors of logistic regression (RPS 0.311, theirs 0.305 to 0.315): with 1,000
rows and strong features the loss hardly matters.

    python examples/wine_quality.py --data winequality-red.csv     # that of UCI, or the grade in "response"
"""

from __future__ import annotations

import argparse
import warnings
from pathlib import Path
from typing import Any

import data
import numpy as np
from matplotlib import pyplot as plt
from sklearn.exceptions import ConvergenceWarning
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import cohen_kappa_score
from sklearn.model_selection import GridSearchCV, StratifiedKFold, train_test_split
from sklearn.pipeline import Pipeline
from sklearn.preprocessing import StandardScaler
from stand_ins import graded_diabetes

from otloss.estimators import OrdinalBoostingClassifier, OrdinalClassifier
from otloss.metrics import scorer

WINES = "ordinal/gagolews/winequality-red.csv"


def read(chosen: Path | None) -> tuple[np.ndarray, np.ndarray]:
    """Return the features and the integer grades."""
    try:
        return data.read_grades(data.file(WINES, chosen))
    except data.MissingError as missing:
        data.say_other("diabetes of scikit-learn in five grades", missing)
        return graded_diabetes()


def candidates(grades: list[int], quick: bool) -> dict[str, tuple[Any, dict[str, list[Any]]]]:
    """Name, model, and the grid to search."""
    linear = OrdinalClassifier(categories=grades, decode="median", standardize=False)  # the pipeline standardises
    network = OrdinalClassifier(
        categories=grades,
        decode="median",
        standardize=False,
        hidden_layer_sizes=(16 if quick else 100,),
        max_iter=20 if quick else 1000,
        random_state=0,
    )
    trees = OrdinalBoostingClassifier(
        categories=grades,
        decode="median",
        n_estimators=20 if quick else 500,
        early_stopping=not quick,
        random_state=0,
    )
    penalties = [1.0] if quick else [0.1, 1.0, 10.0]
    losses = [0.0, 0.2]
    return {
        "logistic regression": (LogisticRegression(max_iter=2000), {"C": [1 / alpha for alpha in penalties]}),
        "linear": (linear, {"cross_entropy": losses, "alpha": penalties, "model": ["softmax", "cumulative"]}),
        "perceptron": (network, {"cross_entropy": losses, "model": ["softmax", "cumulative"]}),
        "boosted trees": (trees, {"cross_entropy": losses, "max_depth": [2] if quick else [2, 4]}),
    }


def errors(P: np.ndarray, predicted: np.ndarray, y: np.ndarray, grades: list[int]) -> np.ndarray:
    """Return the ranked probability score and the absolute error of each row, (2, rows)."""
    return np.stack([((P.cumsum(1) - (y[:, None] <= np.array(grades))) ** 2).sum(1), np.abs(predicted - y)])


def draw(path: Path, results: dict[str, np.ndarray]) -> None:
    """Save the mean errors, with bars of two standard errors of the differences from the first model."""
    figure, axes = plt.subplots(1, 2, figsize=(9, 3), sharey=True, layout="constrained")
    first, names = next(iter(results.values())), list(results)[::-1]
    for k, (ax, score) in enumerate(
        zip(axes, ("ranked probability score", "mean absolute error in grades"), strict=True)
    ):
        for row, name in enumerate(names):
            apart = results[name][k] - first[k]
            bar = 2 * apart.std() / len(apart) ** 0.5
            colour = "0.5" if results[name] is first else "C0"
            ax.errorbar(results[name][k].mean(), row, xerr=bar, fmt="o", capsize=4, color=colour)
        ax.axvline(first[k].mean(), color="0.8", zorder=0)
        ax.set(xlabel=score, yticks=range(len(names)), ylim=(-0.5, len(names) - 0.5))
    axes[0].set_yticklabels(names)
    figure.suptitle(
        f"{len(first[0])} test rows; bars: two standard errors of the difference from {names[-1]}", fontsize=10
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=100)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    data.add_argument(parser, "CSV file of wines, or folder")
    parser.add_argument("--output", type=Path, default=Path("gallery-output"), help="folder of the figure")
    parser.add_argument("--quick", action="store_true", help="small models, two folds")
    options = parser.parse_args(arguments)
    X, y = read(options.data)
    if options.quick:
        X, y = X[:300], y[:300]
    grades, counts = np.unique(y, return_counts=True)
    kept, grades = np.isin(y, grades[counts >= 4]), grades[counts >= 4].tolist()  # three wines cannot be in all parts
    X, y = X[kept], y[kept]
    X_train, X_test, y_train, y_test = train_test_split(X, y, test_size=0.25, stratify=y, random_state=0)
    print(f"{len(y_train)} training rows, {len(y_test)} test rows, grades {grades}")
    print(f"{'model':20s} {'RPS':>7s} {'MAE':>7s} {'kappa':>7s}  best settings")
    folds, results = StratifiedKFold(2 if options.quick else 5, shuffle=True, random_state=0), {}
    for name, (model, grid) in candidates(grades, options.quick).items():
        pipeline = Pipeline([("scale", StandardScaler()), ("model", model)])
        choices = {f"model__{key}": values for key, values in grid.items()}
        search = GridSearchCV(pipeline, choices, scoring=scorer("ranked_probability_score", labels=grades), cv=folds)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ConvergenceWarning)
            search.fit(X_train, y_train)
        predicted = search.predict(X_test)
        results[name] = errors(search.predict_proba(X_test), predicted, y_test, grades)
        kappa = cohen_kappa_score(y_test, predicted, labels=grades, weights="quadratic")
        settings = ", ".join(f"{key.removeprefix('model__')}={value}" for key, value in search.best_params_.items())
        print(f"{name:20s} {results[name][0].mean():7.4f} {results[name][1].mean():7.4f} {kappa:7.4f}  {settings}")
    draw(options.output / "wine_quality.png", results)


if __name__ == "__main__":
    main()
