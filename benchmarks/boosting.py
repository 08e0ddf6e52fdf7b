"""Training time of XGBoost and LightGBM with our objectives against their own, in interleaved rounds.

The verdict is on XGBoost at power 2: at most 1.5 times as long as its own multi:softprob. All arms take the same data,
already binned, the same number of trees and of threads.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch

from benchmarks.measure import Settings, Timing, heading, keep, ratios, say, table, timed_rounds

NAME = "boosting"
ROUNDS, SMALL_ROUNDS = 7, 1
ROWS, FEATURES, CLASSES, TREES = 100_000, 10, 5, 100
SMALL_ROWS, SMALL_TREES = 2_000, 5
LIMIT = 1.5
OWN = {"xgboost": "multi:softprob", "lightgbm": "multiclass"}
VARIANTS: dict[str, dict[str, Any]] = {"power 2": {}, "power 1": {"power": 1}, "power 2 + CE": {"cross_entropy": 0.5}}


def main(settings: Settings) -> None:
    rows, trees = (SMALL_ROWS, SMALL_TREES) if settings.small else (ROWS, TREES)
    rounds = settings.rounds or (SMALL_ROUNDS if settings.small else ROUNDS)
    features, labels = problem(rows)
    case = f"n={rows}, {FEATURES} features, K={CLASSES}, {trees} rounds"
    heading(NAME, case, f"{rounds} interleaved rounds")
    for library, arms in (("xgboost", xgboost_arms), ("lightgbm", lightgbm_arms)):
        timings = timed_rounds(arms(features, labels, trees), rounds=rounds)
        report(library, case, timings, rounds=rounds, settings=settings)


def problem(rows: int) -> tuple[np.ndarray, np.ndarray]:
    """Features, and labels of one class too many or too few here and there."""
    rng = np.random.default_rng(0)
    X = rng.normal(size=(rows, FEATURES)).astype(np.float32)
    score = X[:, 0] + 0.7 * X[:, 1] * X[:, 2] + np.sin(2 * X[:, 3]) + 0.7 * rng.normal(size=rows)
    return X, np.digitize(score, np.quantile(score, [0.1, 0.3, 0.7, 0.9]))


def xgboost_arms(features: np.ndarray, labels: np.ndarray, trees: int) -> dict[str, Callable[[], Any]]:
    import xgboost

    from otloss.boosting import xgboost_objective

    data = xgboost.QuantileDMatrix(features, labels)
    parameters = {"objective": OWN["xgboost"], "num_class": CLASSES, "base_score": 0.5, "tree_method": "hist",
                  "nthread": torch.get_num_threads(), "disable_default_eval_metric": True}  # fmt: skip
    train = partial(xgboost.train, parameters, data, trees)
    return {OWN["xgboost"]: train} | {
        name: partial(train, obj=xgboost_objective(CLASSES, **variant)) for name, variant in VARIANTS.items()
    }


def lightgbm_arms(features: np.ndarray, labels: np.ndarray, trees: int) -> dict[str, Callable[[], Any]]:
    import lightgbm

    from otloss.boosting import lightgbm_objective

    fixed = {"verbose": -1, "num_threads": torch.get_num_threads(), "force_row_wise": True}
    data = lightgbm.Dataset(features, labels, params=fixed, free_raw_data=False).construct()
    parameters = {"num_class": CLASSES, "metric": "none", **fixed}

    def train(objective: Any) -> Any:
        return lightgbm.train({**parameters, "objective": objective}, data, trees)

    return {OWN["lightgbm"]: partial(train, OWN["lightgbm"])} | {
        name: partial(train, lightgbm_objective(CLASSES, **variant)) for name, variant in VARIANTS.items()
    }


def report(library: str, case: str, timings: dict[str, Timing], *, rounds: int, settings: Settings) -> None:
    own, kept, lines = OWN[library], [], [("objective", "seconds", "spread", "ratio", "verdict")]
    for name, timing in timings.items():
        ratio = statistics.median(ratios(timing, timings[own]))
        judged = library == "xgboost" and name == "power 2" and not settings.small
        verdict = f"at most {LIMIT}: {'yes' if ratio <= LIMIT else 'no'}" if judged else ""
        lines.append((name, f"{timing.median:.2f}", f"{timing.spread:.0%}", f"{ratio:.2f}", verdict))
        kept.append({"name": f"{library} {name}", "seconds": f"{timing.median:.6f}", "ratio": f"{ratio:.4f}",
                     "peer": f"{library} {own}", "rounds": rounds, "spread": f"{timing.spread:.3f}"})  # fmt: skip
    say(f"\n  {library}: ratios to {own}, median of rounds")
    table(lines)
    keep(settings.output, NAME, case, kept)


if __name__ == "__main__":
    main(Settings())
