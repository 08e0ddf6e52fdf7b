"""What the decision earns beside the loss, by model and rule: `python -m benchmarks.decisions` writes decisions.csv.

Five grades of the diabetes table of scikit-learn, by quintiles of its target; the mean of 20 holdouts of a quarter.
Then networks on few rows of handwritten digits, whose ten classes are taken for grades: `nn.OrdinalLoss` alone, with
cross-entropy added, and cross-entropy alone.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator

import numpy as np
import torch
from sklearn.datasets import load_diabetes, load_digits
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import StratifiedShuffleSplit
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from tqdm import tqdm

from benchmarks.measure import FOLDER
from benchmarks.paper.tables import half_interval
from otloss.estimators import OrdinalBoostingClassifier, OrdinalClassifier, OrdinalNetworkClassifier
from otloss.estimators.decode import decode
from otloss.losses import decode_classes
from otloss.nn import OrdinalLoss

GRADES, HOLDOUTS = 5, 20


def table() -> tuple[np.ndarray, np.ndarray]:
    """Features and grades 0 to 4."""
    X, target = load_diabetes(return_X_y=True)
    return X, np.searchsorted(np.quantile(target, np.linspace(0, 1, GRADES + 1)[1:-1]), target)


def contestants(seed: int) -> Iterator[tuple[str, object]]:
    """Names and models that are not fitted yet."""
    from xgboost import XGBClassifier

    yield "XGBClassifier", XGBClassifier(n_jobs=1, random_state=seed)
    yield "LogisticRegression", make_pipeline(StandardScaler(), LogisticRegression())
    yield "OrdinalBoostingClassifier", OrdinalBoostingClassifier(n_jobs=1, random_state=seed)
    yield "OrdinalClassifier", OrdinalClassifier(random_state=seed)
    network = {"hidden_layer_sizes": (64,), "random_state": seed}
    yield "network, cross-entropy", OrdinalNetworkClassifier(**network, transport=0.0, cross_entropy=1.0)
    yield "OrdinalNetworkClassifier", OrdinalNetworkClassifier(**network)


def measure() -> dict[tuple[str, str], list[float]]:
    """Accuracy, mean absolute error and share of errors of three and more grades, by model and rule."""
    X, y = table()
    results: dict[tuple[str, str], list[list[float]]] = {}
    splits = StratifiedShuffleSplit(HOLDOUTS, test_size=0.25, random_state=0).split(X, y)
    for seed, (train, test) in enumerate(tqdm(splits, total=HOLDOUTS)):
        for name, model in contestants(seed):
            proba = model.fit(X[train], y[train]).predict_proba(X[test])  # type: ignore[attr-defined]
            for rule in ("argmax", "median"):
                error = np.abs(decode(proba, rule, values=np.arange(float(GRADES))) - y[test])
                scores = [float((error == 0).mean()), float(error.mean()), float((error >= 3).mean())]
                results.setdefault((name, rule), []).append(scores)
    return {key: np.mean(scores, axis=0).tolist() for key, scores in results.items()}


def few_rows(*, balanced: bool, seed: int) -> dict[str, float]:
    """Absolute error of the median of a network, trained on 300 digits or on fewer of each further class."""
    X, y = (torch.from_numpy(part) for part in load_digits(return_X_y=True))
    X = X.float() / 16
    order = torch.from_numpy(np.random.default_rng(seed).permutation(len(y)))
    counts = [30] * 10 if balanced else [max(2, 40 // (k + 1)) for k in range(10)]
    train = torch.cat([order[y[order] == k][: counts[k]] for k in range(10)])
    test = order[~torch.isin(order, train)]
    losses = {
        "OrdinalLoss()": OrdinalLoss(),
        "OrdinalLoss(cross_entropy=0.2)": OrdinalLoss(cross_entropy=0.2),
        "cross-entropy": torch.nn.CrossEntropyLoss(),
    }
    errors = {}
    for name, loss in losses.items():
        torch.manual_seed(seed)
        network = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10))
        optimizer = torch.optim.Adam(network.parameters(), lr=3e-3)
        for _ in range(300):
            optimizer.zero_grad()
            loss(network(X[train]), y[train]).backward()
            optimizer.step()
        with torch.no_grad():
            errors[name] = float((decode_classes(network(X[test]), "median") - y[test]).abs().double().mean())
    return errors


def rows() -> Iterator[tuple[str, str, str, str]]:
    """Table, model, measure and value."""
    for (name, rule), (accuracy, absolute, large) in measure().items():
        values = {"accuracy": f"{accuracy:.3f}", "absolute error": f"{absolute:.3f}", "large errors, %": f"{large:.1%}"}
        for what, value in values.items():
            yield "diabetes", name, f"{what}, {rule}", value.rstrip("%")
    for balanced, rows_a_class in ((True, "30 rows a class"), (False, "40, 20, 13, ... rows")):
        runs = [few_rows(balanced=balanced, seed=seed) for seed in range(10)]
        for name in runs[0]:
            yield "digits", name, rows_a_class, half_interval([run[name] for run in runs]).shown("{:.3f}")


def main() -> None:
    """Write decisions.csv."""
    with (FOLDER / "decisions.csv").open("w", newline="", encoding="utf-8") as stream:
        writer = csv.writer(stream, lineterminator="\n")
        writer.writerow(("table", "model", "measure", "value"))
        writer.writerows(rows())


if __name__ == "__main__":
    main()
