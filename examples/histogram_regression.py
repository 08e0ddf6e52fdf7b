"""Regression by histograms: the transport loss beside HL-Gauss cross-entropy and plain absolute error.

A network predicts a histogram over bins of a number. HL-Gauss is cross-entropy with a Gaussian label (Imani and White,
2018; Farebrother et al., arXiv 2403.03950). `histogram_loss` is sum_k d_k |F_k - G_k|^power, the transport between the
histogram and the value, in the unit of the number; some cross-entropy (0.3 bin widths a nat) is added. All predict the
median of their histogram, which is what the absolute error asks for. With few rows there is no gain: on 442 diabetics
no loss was better than another.

Data: ages of 4,177 abalones by seven measures, in ten bins of 2.8 years (UCI, in the form of M. Gagolewski's ordinal
sets), a quarter for the test, over ten splits. Without it: the disease progression of 442 diabetics (scikit-learn).

Result: the mean absolute error falls from 1.54 years with HL-Gauss to 1.46 by transport of power 1, whose histograms
are too narrow.

These are ages of abalones. Power 2 has 1.51, absolute error as a loss 1.56; both powers are better than HL-Gauss in 10
of 10 splits. The ranked probability score is best with power 2, 1.00 in place of 1.10.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import data
import numpy as np
import torch
from matplotlib import pyplot as plt
from sklearn.datasets import load_diabetes
from torch import Tensor, nn

from otloss.losses import histogram_loss

ABALONE = "ordinal/gagolews/abalone_ord.csv"
# Settings of histogram_loss, the weight of cross-entropy in bin widths; of the first one the rest is negligible.
LOSSES: dict[str, dict[str, Any]] = {
    "HL-Gauss cross-entropy": {"encoding": "gaussian", "cross_entropy": 1e6},
    "transport, power 2": {"cross_entropy": 0.3},
    "transport, power 1": {"power": 1, "cross_entropy": 0.3},
    "absolute error": {},
}
COLOURS = dict(zip(LOSSES, ("0.5", "C0", "C0", "0.5"), strict=True))


@dataclass(frozen=True)
class Numbers:
    """Features (n, d) and a number (n,) in a unit, to be predicted over bins."""

    X: np.ndarray
    y: Tensor
    edges: Tensor
    unit: str
    steps: int


def load(chosen: Path | None) -> Numbers:
    try:
        table = np.loadtxt(data.file(ABALONE, chosen), delimiter=",", skiprows=1)
    except data.MissingError as missing:
        data.say_other("the disease progression of 442 diabetics", missing)
        X, y = load_diabetes(return_X_y=True)
        return Numbers(X, torch.tensor(y).float(), torch.linspace(20, 350, 23), "points of the score", 200)
    edges = torch.linspace(2.5, 30.5, 11)  # rings 1 to 29 in ten bins of 2.8; the age is 1.5 years more
    ages = ((edges[1:] + edges[:-1]) / 2)[table[:, 0].astype(int) - 1]
    return Numbers(table[:, 1:], ages, edges, "years", 1000)


def medians(p: Tensor, edges: Tensor) -> Tensor:
    """The medians of histograms (n, K) whose mass is uniform within a bin."""
    k = (p.cumsum(-1) < 0.5).sum(-1, keepdim=True).clamp(max=p.shape[-1] - 1)
    mass = p.gather(-1, k)
    below = p.cumsum(-1).gather(-1, k) - mass
    return (edges[k] + (edges[k + 1] - edges[k]) * (0.5 - below) / mass)[:, 0]


def errors(numbers: Numbers, name: str, split: int, steps: int) -> tuple[np.ndarray, Tensor, Tensor]:
    """Return mean absolute error and ranked probability score of the test, its histograms, and its numbers."""
    order = np.random.default_rng(split).permutation(len(numbers.y))
    train, test = np.split(order, [len(order) * 3 // 4])
    X = torch.tensor((numbers.X - numbers.X[train].mean(0)) / numbers.X[train].std(0)).float()
    y, edges, width = numbers.y, numbers.edges, float(numbers.edges[1] - numbers.edges[0])
    settings = {**LOSSES[name], "cross_entropy": LOSSES[name].get("cross_entropy", 0.0) * width}
    as_number = name == "absolute error"
    torch.manual_seed(split)
    last = nn.Linear(64, 1 if as_number else len(edges) - 1)
    network = nn.Sequential(nn.Linear(X.shape[1], 64), nn.SiLU(), nn.Linear(64, 64), nn.SiLU(), last)
    optimiser = torch.optim.AdamW(network.parameters(), lr=3e-3, weight_decay=1e-2)  # the scale of a loss has no effect
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, steps)
    inside = y.clamp(float(edges[0]) + width / 2, float(edges[-1]) - width / 2)
    for _ in range(steps):
        batch = train[torch.randint(len(train), (64,)).numpy()]
        out = network(X[batch])
        if as_number:
            loss = (out[:, 0] * y[train].std() + y[train].mean() - y[batch]).abs().mean()
        else:
            loss = histogram_loss(out, inside[batch], edges, **settings)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        schedule.step()
    out = network(X[test]).detach()
    if as_number:
        guess, score = out[:, 0] * y[train].std() + y[train].mean(), np.nan
    else:
        guess, score = medians(out.softmax(-1), edges), histogram_loss(out, inside[test], edges)
    return np.array([(guess - y[test]).abs().mean(), score]), out.softmax(-1), y[test]


def draw(results: dict[str, np.ndarray], unit: str, shown: dict[str, Any], edges: Tensor, path: Path) -> None:
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 3.8), layout="constrained")
    for row, (name, scores) in enumerate(results.items()):
        left.plot(scores[:, 0], np.full(len(scores), row), "o", color=COLOURS[name], alpha=0.4)
        left.plot(scores[:, 0].mean(), row, "|", color=COLOURS[name], markersize=22, mew=2)
    left.set(yticks=range(len(LOSSES)), yticklabels=LOSSES, ylim=(len(LOSSES) - 0.5, -0.5))
    left.set(xlabel=f"mean absolute error ({unit}): splits and their mean", title="Transport predicts better")
    for name, line in zip(LOSSES, ("-", "-", ":"), strict=False):
        right.stairs(shown[name][0][0], edges, color=COLOURS[name], label=name, lw=1.5, linestyle=line)
    right.axvline(shown[name][1][0], color="black", linestyle="--", label="true")
    right.set(
        xlabel=f"predicted number ({unit})", ylabel="probability", title="Power 1 narrows the histograms (one row)"
    )
    right.legend(frameon=False, fontsize=8)
    figure.savefig(path, dpi=110)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    data.add_argument(parser)
    parser.add_argument("--quick", action="store_true", help="few steps and one split")
    parser.add_argument("--output", type=Path, default=Path("gallery-output"), help="folder of the figure")
    options = parser.parse_args(argv)
    numbers = load(options.data)
    splits, steps = (1, 20) if options.quick else (10, numbers.steps)
    results: dict[str, np.ndarray] = {}
    shown: dict[str, Any] = {}
    print(f"{'mean ± deviation over splits':36s}{'MAE':>16s}{'RPS':>16s}   lower MAE than HL-Gauss")
    for name in LOSSES:
        runs = [errors(numbers, name, split, steps) for split in range(splits)]
        results[name] = scores = np.stack([run[0] for run in runs])
        shown[name] = runs[0][1].numpy(), runs[0][2].numpy()
        cells = [f"{c.mean():.3f} ± {c.std():.3f}".replace("nan ± nan", "-") for c in scores.T]
        better = (scores[:, 0] < next(iter(results.values()))[:, 0]).sum()
        print(f"{name:36s}{cells[0]:>16s}{cells[1]:>16s}   {better} of {splits} splits")
    options.output.mkdir(parents=True, exist_ok=True)
    draw(results, numbers.unit, shown, numbers.edges, options.output / "histogram_regression.png")


if __name__ == "__main__":
    main()
