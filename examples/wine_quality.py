"""Predict wine quality with ordinal classifiers in a scikit-learn pipeline with a grid search.

Searches the loss and the penalty of a linear model, a multi-layer perceptron and boosted trees by the ranked
probability score, compares them with logistic regression, and prints errors on a test set.

    python examples/wine_quality.py --data winequality-red.csv     # quality in a column "quality" or "response"
    python examples/wine_quality.py                                # offline: diabetes of scikit-learn, in five grades

Files may start with comment lines (#) and separate columns by commas or semicolons.
"""

from __future__ import annotations

import argparse
import csv
import io
import warnings
from pathlib import Path
from typing import Any

import numpy as np
from sklearn.datasets import load_diabetes
from sklearn.exceptions import ConvergenceWarning
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import cohen_kappa_score
from sklearn.model_selection import GridSearchCV, StratifiedKFold, train_test_split
from sklearn.pipeline import Pipeline
from sklearn.preprocessing import StandardScaler

from otloss.estimators import OrdinalBoostingClassifier, OrdinalClassifier
from otloss.metrics import ordinal_mae, scorer

LABELS = ("quality", "response")


def read_table(path: Path) -> tuple[np.ndarray, np.ndarray]:
    """Features and integer grades of a CSV file with a header."""
    lines = [line for line in path.read_text(encoding="utf-8").splitlines() if line and not line.startswith("#")]
    rows = list(csv.reader(io.StringIO("\n".join(lines)), delimiter=";" if ";" in lines[0] else ","))
    header, body = rows[0], rows[1:]
    column = next((header.index(name) for name in LABELS if name in header), None)
    if column is None:
        raise SystemExit(f"{path} has the columns {header}, expected one of {LABELS}.")
    table = np.array(body, dtype=float)
    return np.delete(table, column, axis=1), table[:, column].astype(int)


def graded_diabetes() -> tuple[np.ndarray, np.ndarray]:
    """Disease progression after one year, in five grades of equal size."""
    X, progress = load_diabetes(return_X_y=True)
    return X, np.searchsorted(np.quantile(progress, [0.2, 0.4, 0.6, 0.8]), progress)


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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--data", type=Path, help="a CSV file of wine quality")
    parser.add_argument("--quick", action="store_true", help="small models, two folds")
    options = parser.parse_args()
    X, y = read_table(options.data) if options.data else graded_diabetes()
    if options.quick:
        X, y = X[:300], y[:300]
    grades, counts = np.unique(y, return_counts=True)
    kept = np.isin(y, grades[counts >= 4])  # a grade with three wines cannot be in all parts
    X, y, grades = X[kept], y[kept], grades[counts >= 4].tolist()
    X_train, X_test, y_train, y_test = train_test_split(X, y, test_size=0.25, stratify=y, random_state=0)
    print(f"{len(y_train)} training rows, {len(y_test)} test rows, grades {grades}")
    by_score = scorer("ranked_probability_score", labels=grades)
    print(f"{'model':20s} {'RPS':>7s} {'MAE':>7s} {'kappa':>7s}  best settings")
    folds = StratifiedKFold(2 if options.quick else 5, shuffle=True, random_state=0)
    for name, (model, grid) in candidates(grades, options.quick).items():
        pipeline = Pipeline([("scale", StandardScaler()), ("model", model)])
        search = GridSearchCV(
            pipeline,
            {f"model__{key}": choices for key, choices in grid.items()},
            scoring=by_score,
            cv=folds,
        )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ConvergenceWarning)
            search.fit(X_train, y_train)
        predicted = search.predict(X_test)
        kappa = cohen_kappa_score(y_test, predicted, labels=grades, weights="quadratic")
        settings = ", ".join(f"{key.removeprefix('model__')}={value}" for key, value in search.best_params_.items())
        print(
            f"{name:20s} {-by_score(search, X_test, y_test):7.4f} "
            f"{ordinal_mae(y_test, predicted, labels=grades):7.4f} {kappa:7.4f}  {settings}"
        )


if __name__ == "__main__":
    main()
