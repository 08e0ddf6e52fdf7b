"""Ordinal labels in XGBoost: our objective, start scores, and early stopping on the ranked probability score.

    python examples/xgboost_early_stopping.py                 # synthetic grades
    python examples/xgboost_early_stopping.py wine.csv        # a CSV file: numbers, the grade in the column "response"

Two models are trained on the same rows, one by cross-entropy, the other by the ranked probability score, and both stop
when the latter no longer decreases on held-out rows. Which one is better depends on the data; often they are equal.
"""

from __future__ import annotations

import argparse
import csv
from pathlib import Path
from typing import Any

import numpy as np
import xgboost
from sklearn.model_selection import train_test_split

from otloss.boosting import start_scores, xgboost_metric, xgboost_objective

PATIENCE = 20


def made_up(rows: int, *, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Six features, of which four matter, and five grades."""
    rng = np.random.default_rng(seed)
    X = rng.normal(size=(rows, 6))
    quality = X[:, 0] + X[:, 1] * X[:, 2] + np.abs(X[:, 3]) + 0.7 * rng.normal(size=rows)
    return X, 3 + np.digitize(quality, np.quantile(quality, [0.05, 0.3, 0.7, 0.95]))


def from_csv(path: Path) -> tuple[np.ndarray, np.ndarray]:
    """Features and grades of a file; an empty feature is missing, NaN."""
    with path.open(newline="", encoding="utf-8") as stream:
        lines = list(csv.reader(stream))
    if not lines or "response" not in lines[0]:
        raise ValueError(f"{path} has the columns {lines[:1]}, expected one named 'response'.")
    table = np.array([numbers(line, lines[0], where=f"row {k} of {path}") for k, line in enumerate(lines[1:], 1)])
    response = lines[0].index("response")
    return np.delete(table, response, axis=1), table[:, response]


def numbers(cells: list[str], names: list[str], *, where: str) -> list[float]:
    """The cells of a row as numbers. Raises ValueError with the name of a cell that is not a number."""
    if len(cells) != len(names):
        raise ValueError(f"{where} has {len(cells)} cells, expected {len(names)}: {', '.join(names)}.")
    row = []
    for name, cell in zip(names, cells, strict=True):
        try:
            row.append(float(cell if cell.strip() or name == "response" else "nan"))
        except ValueError:
            raise ValueError(
                f"{where} holds {cell!r} as {name!r}, expected a number; encode words as numbers."
            ) from None
    return row


def train(
    data: dict[str, xgboost.DMatrix], num_classes: int, *, objective: Any, metric: Any, rounds: int
) -> tuple[xgboost.Booster, list[float]]:
    """Train until the metric on data["valid"] stops decreasing; return the model and the metric by round."""
    start = start_scores(data["train"].get_label(), num_classes)
    history: dict[str, Any] = {}
    booster = xgboost.train(
        {
            "objective": "multi:softprob",  # if obj= is ours, this only determines what predict() returns
            "num_class": num_classes,
            "base_score": start.tolist(),  # kept in the model, so predict() uses it too
            "max_depth": 4,
            "eta": 0.1,
            "disable_default_eval_metric": True,
        },
        data["train"],
        num_boost_round=rounds,
        obj=objective,
        custom_metric=metric,
        evals=[(data["valid"], "valid")],
        early_stopping_rounds=PATIENCE,
        evals_result=history,
        verbose_eval=False,
    )
    return booster, history["valid"][metric.__name__]


def judged(P: np.ndarray, labels: np.ndarray) -> tuple[float, float]:
    """The ranked probability score, and the mean absolute error of the median grade in steps."""
    F = np.cumsum(P, axis=1)
    score = ((F[:, :-1] - (labels[:, None] <= np.arange(P.shape[1] - 1))) ** 2).sum(1).mean()
    return float(score), float(np.abs((F[:, :-1] < 0.5).sum(1) - labels).mean())


def main(arguments: list[str] | None = None) -> dict[str, tuple[float, float]]:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file", nargs="?", type=Path, help="CSV file with the grade in the column 'response'")
    parser.add_argument("--rows", type=int, default=4000, help="of the made-up data (%(default)s)")
    parser.add_argument("--rounds", type=int, default=1000, help="at most (%(default)s)")
    options = parser.parse_args(arguments)

    X, grades = from_csv(options.file) if options.file else made_up(options.rows)
    values, labels = np.unique(grades, return_inverse=True)  # labels are positions in the order of the grades
    rest, test = train_test_split(np.arange(len(X)), test_size=0.25, random_state=0, stratify=labels)
    fit, valid = train_test_split(rest, test_size=0.25, random_state=0, stratify=labels[rest])
    data = {name: xgboost.DMatrix(X[at], labels[at]) for name, at in (("train", fit), ("valid", valid), ("test", test))}
    num_classes = len(values)
    arms = {
        # XGBoost passes probabilities to metrics with its own objective, raw scores with ours.
        "cross-entropy": (None, xgboost_metric(num_classes, predictions="probabilities")),
        "ranked probability score": (xgboost_objective(num_classes), xgboost_metric(num_classes)),
    }
    print(f"{len(fit)} training rows, grades {', '.join(f'{value:g}' for value in values)}")
    results = {}
    for name, (objective, metric) in arms.items():
        booster, history = train(data, num_classes, objective=objective, metric=metric, rounds=options.rounds)
        P = booster.predict(data["test"], iteration_range=(0, booster.best_iteration + 1))
        results[name] = judged(P.astype(np.float64), labels[test])
        print(
            f"{name:<26} stopped at round {booster.best_iteration + 1:4d} ({history[booster.best_iteration]:.4f})   "
            f"test: RPS {results[name][0]:.4f}, MAE of the median {results[name][1]:.4f}"
        )
    return results


if __name__ == "__main__":
    main()
