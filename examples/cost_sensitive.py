"""Errors with prices: take the decision of least expected cost, with any loss.

With costs C[true, predicted] there are two remedies: a decision that knows them, the class of least expected cost,
argmin_j sum_i P_i C[i, j]; and a loss that knows them, cross-entropy with the expected cost of the label added,
sum_i P_i C[y, i], by `ordinal_loss` with `cost=`. The decision costs nothing and needs no training, so try it first.
`OrdinalClassifier(decode="cost")` has it too.

Data: the digits of scikit-learn, where one that is read too high costs 10 and too low 1, and its breast cancer set,
where a missed cancer costs 10 and a false alarm 1. A network of 32 hidden units, half of the data for the test, over
ten splits.

Result: the decision of least expected cost lowers the mean cost from .171 to .090 on digits. Costs in the loss alone
lower it to .124.

On cancer the decision lowers it from .205 to .169, the loss alone to .193. Both together gain nothing more: .096 and
.182.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from sklearn.datasets import load_breast_cancer, load_digits
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from otloss import ordinal_loss

LOSSES = ("cross-entropy", "transport added")
DECISIONS = ("most likely class", "least expected cost")


@dataclass(frozen=True)
class Task:
    """Features (n, d), classes (n,) and the cost of each error, cost[true, predicted]."""

    X: Tensor
    y: Tensor
    cost: Tensor


def load() -> dict[str, Task]:
    digits, cancer = load_digits(), load_breast_cancer()  # class 0 is malignant
    too_high = torch.arange(10.0)[:, None] < torch.arange(10.0)
    amounts = torch.where(too_high, 10.0, 1.0).fill_diagonal_(0)
    return {
        "digits": Task(torch.tensor(digits.data / 16).float(), torch.tensor(digits.target), amounts),
        "breast cancer": Task(
            torch.tensor((cancer.data - cancer.data.mean(0)) / cancer.data.std(0)).float(),
            torch.tensor(cancer.target), torch.tensor([[0.0, 10.0], [1.0, 0.0]]),
        ),
    }  # fmt: skip


def train(task: Task, loss: str, rows: Tensor, seed: int, steps: int) -> nn.Module:
    torch.manual_seed(seed)
    network = nn.Sequential(nn.Linear(task.X.shape[1], 32), nn.ReLU(), nn.Linear(32, len(task.cost)))
    optimiser = torch.optim.Adam(network.parameters(), lr=1e-2, weight_decay=1e-4)
    for _ in range(steps):
        batch = rows[torch.randint(len(rows), (128,))]
        logits, target = network(task.X[batch]), task.y[batch]
        if loss == "cross-entropy":
            value = cross_entropy(logits, target)
        else:
            value = ordinal_loss(logits, target, cost=task.cost, cross_entropy=1.0)
        optimiser.zero_grad()
        value.backward()
        optimiser.step()
    return network


def judge(network: nn.Module, task: Task, rows: Tensor) -> list[float]:
    """Return the mean cost of the most likely class, the one of the least expected cost, and the nll."""
    with torch.no_grad():
        logits, y = network(task.X[rows]), task.y[rows]
    decisions = logits.argmax(-1), (logits.softmax(-1) @ task.cost).argmin(-1)
    return [float(task.cost[y, chosen].mean()) for chosen in decisions] + [float(cross_entropy(logits, y))]


def draw(results: dict[str, dict[str, np.ndarray]], path: Path) -> None:
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(1, len(results), figsize=(11, 3.4), layout="constrained", sharey=True)
    arms = [(loss, k) for k in range(2) for loss in LOSSES]
    for ax, (name, by_loss) in zip(axes, results.items(), strict=True):
        for row, (loss, k) in enumerate(arms):
            values, colour = by_loss[loss][:, k], "0.5" if (loss, k) == arms[0] else "C0"
            ax.plot(values, [row] * len(values), "o", color=colour, alpha=0.4)
            ax.plot(values.mean(), row, "|", color=colour, markersize=22, mew=2)
        ax.set(title=name, xlabel="mean cost of a test row (splits and their mean)", xlim=(0, None))
    axes[0].set(yticks=range(len(arms)), yticklabels=[f"{loss},\n{DECISIONS[k]}" for loss, k in arms], ylim=(3.5, -0.5))
    figure.suptitle("The decision of least expected cost saves more than costs in the loss")
    figure.savefig(path, dpi=110)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="few steps and one split")
    parser.add_argument("--output", type=Path, default=Path("gallery-output"), help="folder of the figure")
    options = parser.parse_args(argv)
    splits, steps = (1, 60) if options.quick else (10, 400)
    results: dict[str, dict[str, np.ndarray]] = {}
    print(
        f"{'mean cost ± deviation, ' + str(splits) + ' splits':34s}"
        + "".join(f"{d:>22s}" for d in DECISIONS)
        + "   nll"
    )
    for name, task in load().items():
        results[name] = {}
        for loss in LOSSES:
            scores_per_seed = []
            for seed in range(splits):
                order = torch.randperm(len(task.y), generator=torch.Generator().manual_seed(seed))
                half = len(order) // 2
                scores_per_seed.append(judge(train(task, loss, order[:half], seed, steps), task, order[half:]))
            scores = results[name][loss] = np.array(scores_per_seed)
            cells = "".join(f"{c.mean():14.3f} ± {c.std():.3f}" for c in scores.T[:2])
            print(f"{name + ', ' + loss:34s}{cells}{scores[:, 2].mean():6.2f}")
    options.output.mkdir(parents=True, exist_ok=True)
    draw(results, options.output / "cost_sensitive.png")


if __name__ == "__main__":
    main()
