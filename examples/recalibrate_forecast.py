"""An overconfident ordinal classifier, recalibrated by thresholds.

Disease progression after one year (scikit-learn's diabetes data) in five grades, predicted by naive Bayes. It treats
correlated features as independent, so its probabilities are too close to 0 and 1. A third of the patients is for
training, a third for recalibration, a third for the test, over many splits. A map of the
logits per threshold is compared with one temperature, the usual remedy.

Result (30 splits): the ranked probability score (RPS) falls from 0.70 to 0.60 and the calibration error from 0.15 to
0.08, in every split; a temperature does as well. The earth mover's distance (EMD) rises: it is not a proper score.

    python examples/recalibrate_forecast.py
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
from sklearn.base import clone
from sklearn.datasets import load_diabetes
from sklearn.model_selection import train_test_split
from sklearn.naive_bayes import GaussianNB

from otloss.estimators import OrdinalRecalibration, Temperature
from otloss.metrics import ordinal_emd, ranked_probability_score, threshold_calibration_error

GRADES = ["mild", "slight", "moderate", "marked", "severe"]
RANKS = np.arange(len(GRADES))
RECALIBRATIONS = {
    "temperature": Temperature(),
    "temperature (nll)": Temperature(criterion="nll"),
    "by threshold": OrdinalRecalibration(),
}
SCORES = {
    "RPS": ranked_probability_score,
    "EMD": ordinal_emd,
    "calibration error": threshold_calibration_error,
}


def graded_patients() -> tuple[np.ndarray, np.ndarray]:
    """Return the features and ranks 0 to 4, a fifth of the patients each."""
    X, progression = load_diabetes(return_X_y=True)
    return X, np.searchsorted(np.quantile(progression, [0.2, 0.4, 0.6, 0.8]), progression)


def forecasts(seed: int) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """Return the true ranks of the test third, and its forecasts before and after recalibration."""
    X, y = graded_patients()
    X_train, X_rest, y_train, y_rest = train_test_split(X, y, train_size=1 / 3, stratify=y, random_state=seed)
    X_held, X_test, y_held, y_test = train_test_split(
        X_rest, y_rest, train_size=0.5, stratify=y_rest, random_state=seed
    )
    model = GaussianNB().fit(X_train, y_train)
    proba_held_out, test = model.predict_proba(X_held), model.predict_proba(X_test)
    return y_test, {
        "as it is": test,
        **{name: clone(method).fit(proba_held_out, y_held).predict(test) for name, method in RECALIBRATIONS.items()},
    }


def compare(splits: int) -> None:
    """Print the mean scores over splits, and in how many splits recalibration lowers the RPS."""
    results: dict[str, list[list[float]]] = {}
    for seed in range(splits):
        y, by_name = forecasts(seed)
        for name, proba in by_name.items():
            results.setdefault(name, []).append([score(y, proba, labels=RANKS) for score in SCORES.values()])
    width = max(map(len, results))
    print(f"{'lower is better':{width}}  " + "  ".join(f"{name:>17}" for name in SCORES) + "   RPS better in")
    before = np.array(results["as it is"])
    for name, rows in results.items():
        scores = np.array(rows)
        cells = [f"{m:.3f} ± {s:.3f}" for m, s in zip(scores.mean(0), scores.std(0), strict=True)]
        better = int((scores[:, 0] < before[:, 0]).sum())
        print(f"{name:{width}}  " + "  ".join(f"{cell:>17}" for cell in cells) + f"   {better} of {splits} splits")


def draw(path: Path, seed: int = 0) -> None:
    """Save the reliability of one split, before and after."""
    from matplotlib import pyplot as plt

    from otloss.plotting import plot_reliability

    y, by_name = forecasts(seed)
    figure, axes = plt.subplots(1, 2, figsize=(12, 4.5), layout="constrained")
    for ax, name in zip(axes, ("as it is", "by threshold"), strict=True):
        plot_reliability(np.array(GRADES)[y], by_name[name], labels=GRADES, columns="rank", bins=5, ax=ax)
        score = ranked_probability_score(y, by_name[name], labels=RANKS)
        ax.set_title(f"{name}: ranked probability score {score:.3f}")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=100)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--output", type=Path, default=Path("gallery-output"), help="folder of the figure")
    parser.add_argument("--quick", action="store_true", help="two splits")
    options = parser.parse_args(arguments)
    compare(2 if options.quick else 30)
    draw(options.output / "recalibrate_forecast.png")


if __name__ == "__main__":
    main()
