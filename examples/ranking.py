"""Rank by losses of ranks: Spearman's coefficient and recall of the first tenth, beside errors and cross-entropy.

A linear model scores patients, from ten features, by how far their disease progressed after one year.
Scores are judged by their order alone: Spearman's coefficient with the progression, and the share of the tenth of the
patients with the largest progression that is found in the tenth with the largest scores. Losses of a batch:

    mean squared error     of the standardised progression
    cross-entropy          softmax of the scores against softmax of the progression (ListNet)
    spearman_loss          1 - correlation of soft ranks with ranks
    top_k_loss             -log share of the right ones among the k largest
    both                   spearman_loss + top_k_loss / 10

Data: diabetes of scikit-learn, 442 patients, half of them for the test; splits and starts by seed.

Result (20 splits): no loss of ranks beats the simple peers here. Spearman's coefficient is 0.682 by the squared error,
0.681 by `spearman_loss`; recall of the first tenth 0.473 by cross-entropy, 0.450 by `top_k_loss`, 0.441 by the squared
error, with standard errors of 0.02.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from scipy.stats import spearmanr
from sklearn.datasets import load_diabetes
from torch import Tensor, nn

from otloss.losses import spearman_loss, top_k_loss

Data = tuple[Tensor, Tensor]


def tenth(y: Tensor) -> tuple[Tensor, int]:
    """Return the mask of the tenth with the largest values, and how many they are."""
    k = len(y) // 10
    return torch.zeros(len(y), dtype=torch.bool).index_fill(0, y.topk(k).indices, True), k


def top_tenth(scores: Tensor, y: Tensor) -> Tensor:
    right, k = tenth(y)
    return top_k_loss(scores, right, k, epsilon=0.3)


LOSSES = {
    "mean squared error": lambda s, y: (s - y).square().mean(),
    "cross-entropy": lambda s, y: -(y.softmax(-1) * s.log_softmax(-1)).sum(),
    "spearman_loss": spearman_loss,
    "top_k_loss": top_tenth,
    "both": lambda s, y: spearman_loss(s, y) + top_tenth(s, y) / 10,
}


def split(seed: int) -> tuple[Data, Data]:
    features, progress = load_diabetes(return_X_y=True, scaled=True)
    x, y = torch.tensor(features * 21).float(), torch.tensor((progress - progress.mean()) / progress.std()).float()
    order = torch.randperm(len(y), generator=torch.Generator().manual_seed(seed))
    return (x[order[:221]], y[order[:221]]), (x[order[221:]], y[order[221:]])


def errors(scores: Tensor, y: Tensor) -> tuple[float, float]:
    """Spearman's coefficient, and the recall of the first tenth."""
    return spearmanr(scores, y).statistic, (tenth(scores)[0] & tenth(y)[0]).sum().item() / tenth(y)[1]


def train(loss: str, seed: int, steps: int) -> list[tuple[float, float]]:
    """Return the two figures on the test half over the training."""
    (x, y), (x_test, y_test) = split(seed)
    torch.manual_seed(seed)
    model = nn.Linear(10, 1)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2, weight_decay=0.1)
    curve = []
    for step in range(steps + 1):
        if step % (steps // 10) == 0:
            with torch.no_grad():
                curve.append(errors(model(x_test).squeeze(-1), y_test))
        picked = torch.randperm(len(y))[:128]
        value = LOSSES[loss](model(x[picked]).squeeze(-1), y[picked])
        optimizer.zero_grad()
        value.backward()
        optimizer.step()
    return curve


def draw(curves: dict[str, Tensor], steps: int, path: Path) -> None:
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(12, 4.4), layout="constrained")
    titles = "Spearman's coefficient", "Recall of the first tenth"
    for k, (axis, title) in enumerate(zip(axes, titles, strict=True)):
        for name, values in curves.items():  # (seeds, times, 2)
            times, error = torch.linspace(0, steps, values.shape[1]), values[..., k].std(0) / len(values) ** 0.5
            mean = values[..., k].mean(0)
            (line,) = axis.plot(times, mean, label=name)
            axis.fill_between(times, mean - error, mean + error, color=line.get_color(), alpha=0.15, lw=0)
        low = min(float(values[:, 1:, k].mean(0).min()) for values in curves.values())
        axis.set(xlabel="training steps", ylabel=f"{title}, test half", title=f"{title}: mean ± standard error",
                 ylim=(low - 0.02, None))  # fmt: skip
    axes[0].legend(frameon=False, loc="lower right")
    figure.savefig(path, dpi=110)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a few steps and two seeds")
    parser.add_argument("--output", type=Path, default=Path("gallery-output"), help="folder of the figure")
    options = parser.parse_args(argv)
    steps, seeds = (20, 2) if options.quick else (200, 20)
    curves = {name: torch.tensor([train(name, seed, steps) for seed in range(seeds)]) for name in LOSSES}
    print(f"Test half, after {steps} steps, mean ± deviation over {seeds} splits; difference to the squared error")
    print(f"{'loss':20s}{'Spearman':>16s}{'difference':>18s}{'recall of tenth':>18s}{'difference':>18s}")
    base = curves["mean squared error"][:, -1]
    for name, values in curves.items():
        last, apart = values[:, -1], values[:, -1] - base
        cells = "".join(
            f"{f'{last[:, k].mean():.3f} ± {last[:, k].std():.3f}':>{16 + 2 * k}s}"
            f"{f'{apart[:, k].mean():+.3f} ± {apart[:, k].std() / seeds**0.5:.3f}':>18s}" for k in range(2)
        )  # fmt: skip
        print(f"{name:20s}{cells}")
    options.output.mkdir(parents=True, exist_ok=True)
    draw(curves, steps, options.output / "ranking.png")


if __name__ == "__main__":
    main()
