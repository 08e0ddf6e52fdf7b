"""Ordinal labels: our estimators compared with cross-entropy in the same models, and with other packages.

Thirty stratified holdouts (a quarter of the rows) of every set of `ordinal_data`, the same for all contestants of
`ordinal_models`. Scores: the ranked probability score (sum over thresholds of squared differences of the cumulative
distributions, not divided by their number), the mean absolute error of the median of the forecast and of the
contestant's own `predict`, and the quadratic weighted kappa of the latter.

Every fit is appended to ordinal_fits.csv (`--resume` continues from it); ordinal.csv has means and deviations by set.
Differences between our loss and cross-entropy in the same model are tested over the holdouts by the corrected resampled
t-test (C. Nadeau, Y. Bengio, Inference for the generalization error, 2003), which allows for the rows that holdouts
share. All contestants are compared by their mean ranks over the sets.

`times` is another benchmark (`python -m benchmarks ordinal_loss`): value and gradient of `ordinal_loss` on small
batches, dlordinal's loss of the same formula, and torch's cross-entropy.
"""

from __future__ import annotations

import csv
import statistics
import time
import warnings
from collections import defaultdict
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy import stats
from sklearn.metrics import cohen_kappa_score
from sklearn.model_selection import train_test_split

from benchmarks.bench import Bench, one_thread
from benchmarks.measure import Row, Settings, append, hardware, say, table
from benchmarks.ordinal_data import OrdinalSet, ordinal_sets
from benchmarks.ordinal_models import CROSS_ENTROPY, OURS, PEER, Model, fitted, models
from otloss import ordinal_loss
from otloss.metrics import ranked_probability_score

NAME = "ordinal"
HOLDOUTS, HELD_OUT = 30, 0.25
SMALL_HOLDOUTS, SMALL_SETS = 2, 1
SCORES = ("rps", "mae", "mae_predict", "qwk")  # lower is better, but for qwk
FITS, MEANS = "ordinal_fits.csv", "ordinal.csv"
FIT_FIELDS = ("set", "holdout", "model", *SCORES, "seconds")
MEAN_FIELDS = ("set", "rows", "classes", "model", "holdouts", *(f"{s}_{k}" for s in SCORES for k in ("mean", "std")),
               "seconds")  # fmt: skip
SIGNIFICANT = 0.05
BATCHES = ((32, 5), (256, 5), (1024, 10), (64, 100))  # rows, classes
TIMING_ROUNDS = 100

Fits = dict[tuple[str, str], dict[int, dict[str, float]]]  # (set, model) -> holdout -> scores


def main(settings: Settings) -> None:
    sets = list(ordinal_sets(None if settings.data is None else settings.data / NAME))
    holdouts = settings.rounds or (SMALL_HOLDOUTS if settings.small else HOLDOUTS)
    contestants = models()
    if settings.small:
        sets = sets[:SMALL_SETS]
    say(f"\n{NAME}: {len(sets)} sets, {holdouts} holdouts, {len(contestants)} contestants\n  {hardware()}")
    fits = _known(settings)
    _run(sets, contestants, holdouts, fits, settings.output)
    if settings.output is not None:
        _keep_means(settings.output / MEANS, sets, contestants, fits)
    _tables(sets, contestants, fits)


def times(settings: Settings) -> None:
    """Value and gradient on one thread; ratios to dlordinal's EMDLoss."""
    from dlordinal.losses import EMDLoss

    bench, peer = Bench(settings, "ordinal_loss", rounds=TIMING_ROUNDS, small_rounds=2), "dlordinal EMDLoss"
    with one_thread():
        for rows, classes in BATCHES:
            generator = torch.Generator().manual_seed(rows)
            logits = torch.randn(rows, classes, generator=generator).requires_grad_()
            labels = torch.randint(classes, (rows,), generator=generator)
            losses = {"otloss ordinal_loss": ordinal_loss, peer: EMDLoss(classes),
                      "torch cross_entropy": torch.nn.functional.cross_entropy}  # fmt: skip
            steps = {name: partial(_step, loss, logits, labels) for name, loss in losses.items()}
            for step in steps.values():
                step()  # compiles or loads the kernel; the number of calls in a turn follows from one call
            bench.timed(f"N={rows} K={classes} float32", steps, peer=peer)


def _step(loss: Any, logits: torch.Tensor, labels: torch.Tensor) -> None:
    logits.grad = None
    loss(logits, labels).backward()


def _known(settings: Settings) -> Fits:
    fits: Fits = defaultdict(dict)
    path = None if settings.output is None else settings.output / FITS
    if path is None or not path.exists():
        return fits
    if not settings.resume:
        raise FileExistsError(f"{path} holds the fits of an earlier run; resume it with --resume, or move the file.")
    with path.open(newline="", encoding="utf-8") as stream:
        for row in csv.DictReader(stream):
            fits[row["set"], row["model"]][int(row["holdout"])] = _numbers(row)
    return fits


def _numbers(row: Row) -> dict[str, float]:
    return {name: float(row[name]) for name in (*SCORES, "seconds")}


def _run(sets: list[OrdinalSet], contestants: list[Model], holdouts: int, fits: Fits, output: Path | None) -> None:
    """Holdout by holdout, so that an interrupted run has complete holdouts of every set."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # such small tables are not faster with more
    try:
        for holdout in range(holdouts):
            started = time.perf_counter()
            for one in sets:
                if all(holdout in fits[one.name, model.name] for model in contestants):
                    continue
                rows = _holdout(one, contestants, holdout)
                for row in rows:
                    fits[row["set"], row["model"]][holdout] = _numbers(row)
                if output is not None:
                    append(output / FITS, FIT_FIELDS, rows)
            say(f"  holdout {holdout + 1} of {holdouts}: {time.perf_counter() - started:.0f} s")
    finally:
        torch.set_num_threads(threads)


def _holdout(one: OrdinalSet, contestants: list[Model], holdout: int) -> list[dict[str, Any]]:
    """The scores of all contestants on one split of one set."""
    X, X_out, y, y_out = train_test_split(one.X, one.y, test_size=HELD_OUT, stratify=one.y, random_state=holdout)
    forecasts: dict[str, np.ndarray] = {}
    chosen: dict[str, np.ndarray] = {}
    seconds: dict[str, float] = {}
    for model in contestants:
        if model.members:
            continue
        started = time.perf_counter()
        results = fitted(model, X, y, seed=holdout, classes=one.classes)
        seconds[model.name] = time.perf_counter() - started
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            proba, chosen[model.name] = results.predict_proba(X_out), np.asarray(results.predict(X_out))
        forecasts[model.name] = _checked(np.asarray(proba, np.float64), (len(y_out), one.classes), model.name, one.name)
    for model in contestants:
        if model.members:
            forecasts[model.name] = np.mean([forecasts[member] for member in model.members], 0)
            chosen[model.name] = _median(forecasts[model.name])
            seconds[model.name] = sum(seconds[member] for member in model.members)
    rows = []
    for model in contestants:
        scores = _scores(y_out, forecasts[model.name], chosen[model.name])
        numbers = {name: f"{value:.5f}" for name, value in {**scores, "seconds": seconds[model.name]}.items()}
        rows.append({"set": one.name, "holdout": holdout, "model": model.name, **numbers})
    return rows


def _checked(proba: np.ndarray, shape: tuple[int, int], model: str, name: str) -> np.ndarray:
    if proba.shape != shape or not np.isfinite(proba).all():
        raise RuntimeError(f"{model} on {name}: forecasts of shape {proba.shape}, expected finite ones of {shape}.")
    proba = np.clip(proba, 0, None)  # float32 differences may be -1e-8
    return proba / proba.sum(1, keepdims=True)


def _median(proba: np.ndarray) -> np.ndarray:
    return (proba.cumsum(1) >= 0.5 - 1e-9).argmax(1)


def _scores(y: np.ndarray, proba: np.ndarray, chosen: np.ndarray) -> dict[str, float]:
    classes = np.arange(proba.shape[1])
    return {
        "rps": ranked_probability_score(y, proba, labels=classes),
        "mae": np.abs(_median(proba) - y).mean(),
        "mae_predict": np.abs(chosen - y).mean(),
        "qwk": cohen_kappa_score(y, chosen, weights="quadratic", labels=classes),
    }


def _keep_means(path: Path, sets: list[OrdinalSet], contestants: list[Model], fits: Fits) -> None:
    rows = []
    for one in sets:
        for model in contestants:
            known = list(fits[one.name, model.name].values())
            row: dict[str, Any] = {"set": one.name, "rows": len(one.y), "classes": one.classes, "model": model.name,
                                   "holdouts": len(known)}  # fmt: skip
            for score in SCORES:
                values = [fit[score] for fit in known]
                row[f"{score}_mean"] = f"{statistics.fmean(values):.4f}"
                row[f"{score}_std"] = f"{statistics.pstdev(values):.4f}"
            rows.append({**row, "seconds": f"{statistics.median(fit['seconds'] for fit in known):.3f}"})
    path.unlink(missing_ok=True)
    append(path, MEAN_FIELDS, rows)


# ---- tables ----------------------------------------------------------------------------------------------------------


def _mean(fits: Fits, one: OrdinalSet, model: Model, score: str) -> float:
    return statistics.fmean(fit[score] for fit in fits[one.name, model.name].values())


def mean_ranks(sets: Iterable[OrdinalSet], contestants: list[Model], fits: Fits, score: str) -> dict[str, float]:
    """Over the sets, of the means over the holdouts; 1 is best."""
    sign = -1 if score == "qwk" else 1
    ranks = [stats.rankdata([sign * _mean(fits, one, model, score) for model in contestants]) for one in sets]
    return {model.name: float(rank) for model, rank in zip(contestants, np.mean(ranks, 0), strict=True)}


def resampled_t_test(differences: np.ndarray) -> float:
    """The p-value of paired differences over random holdouts of the same rows."""
    if np.ptp(differences) == 0:
        return 1.0 if differences[0] == 0 else 0.0
    shared = HELD_OUT / (1 - HELD_OUT)
    scale = np.sqrt((1 / len(differences) + shared) * differences.var(ddof=1))
    return float(2 * stats.t.sf(abs(differences.mean() / scale), len(differences) - 1))


def _tables(sets: list[OrdinalSet], contestants: list[Model], fits: Fits) -> None:
    ranks = {score: mean_ranks(sets, contestants, fits, score) for score in SCORES}
    say(f"\nmean rank of {len(contestants)} over {len(sets)} sets; 1 is best")
    names = sorted(contestants, key=lambda model: ranks["rps"][model.name] + ranks["mae"][model.name])
    rows = [["model", "family", *SCORES, "median s per fit"]]
    for model in names:
        seconds = statistics.median(fit["seconds"] for one in sets for fit in fits[one.name, model.name].values())
        rows.append([model.name, model.family, *(f"{ranks[s][model.name]:.2f}" for s in SCORES), f"{seconds:.2f}"])
    table(rows)
    _verdict(contestants, ranks)
    _against_cross_entropy(sets, contestants, fits)


def _verdict(contestants: list[Model], ranks: dict[str, dict[str, float]]) -> None:
    """Our best model, by the sum of both ranks, and the best other package by each; without and with votes."""
    for kind, votes in (("without votes", (False,)), ("with votes", (False, True))):
        entered = [model for model in contestants if bool(model.members) in votes]
        ours = [model.name for model in entered if model.whose == OURS]
        peers = [model.name for model in entered if model.whose == PEER]
        best = min(ours, key=lambda name: ranks["rps"][name] + ranks["mae"][name])
        for score in ("rps", "mae"):
            peer = min(peers, key=ranks[score].__getitem__)
            met = "not worse" if ranks[score][best] <= ranks[score][peer] else "WORSE"
            say(
                f"  {kind}, {score}: {best} {ranks[score][best]:.2f}; best of other packages {peer} "
                f"{ranks[score][peer]:.2f}: {met}"
            )


def _against_cross_entropy(sets: list[OrdinalSet], contestants: list[Model], fits: Fits) -> None:
    say(f"\nour loss and cross-entropy in the same model: sets won / lost (of these with p < {SIGNIFICANT})")
    rows = [["model", *SCORES]]
    mine = [model for model in contestants if model.whose == OURS]
    references = [model for model in contestants if model.whose == CROSS_ENTROPY]
    for model, reference in zip(mine, references, strict=True):
        row = [model.name]
        for score in SCORES:
            counts = dict.fromkeys(("won", "lost", "won clearly", "lost clearly"), 0)
            for one in sets:
                a, b = (
                    np.array([fit[score] for _, fit in sorted(fits[one.name, m.name].items())])
                    for m in (model, reference)
                )
                gain = (a - b) if score == "qwk" else (b - a)
                if gain.mean() == 0:
                    continue
                outcome = "won" if gain.mean() > 0 else "lost"
                counts[outcome] += 1
                counts[f"{outcome} clearly"] += len(gain) > 1 and resampled_t_test(gain) < SIGNIFICANT
            row.append(f"{counts['won']} / {counts['lost']} ({counts['won clearly']} / {counts['lost clearly']})")
        rows.append(row)
    table(rows)
