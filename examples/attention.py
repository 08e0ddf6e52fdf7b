"""Attention by transport: slots that compete for digits learn to sort them, slots of softmax attention do not.

Softmax attention normalises over the keys, for each query alone: nothing prevents that two slots take the same image.
Sinkhorn attention is the plan of entropic transport, so that each image is used up by the slots:

    P = argmin <C, P> + epsilon KL(P | p q^T),   P 1 = p,  P^T 1 = q,   C = -query.key / sqrt(d)

`solve(...).plan()` with `grad="implicit"` is differentiable, by the implicit function theorem and not through the
iterations (Mena et al., 2018; Sander et al., 2022). Slot k of a set shall hold the k-th smallest digit; the loss is the
squared error of the attended labels alone, so the network learns to read digits and to sort them.

Data: scikit-learn's 8 x 8 digits, 1,200 for training; sets of six are drawn from the others for the test.

Result (5 seeds, 400 steps): 76 % of the slots hold the right digit with Sinkhorn attention, and 49 % with softmax
attention. Training takes four times as long.

Deviations are 1 %. Whole sets are sorted in 36 % and 0.5 % of the cases.

    python examples/attention.py
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import numpy as np
import torch
from matplotlib import pyplot as plt
from sklearn.datasets import load_digits
from torch import Tensor, nn

from otloss import solve

SLOTS, WIDTH, BATCH = 6, 32, 64
KINDS = {"softmax": "0.5", "Sinkhorn": "C0"}


class Attention(nn.Module):
    """Slots with learned queries over the images of a set."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.keys = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, WIDTH))
        self.queries = nn.Parameter(torch.randn(SLOTS, WIDTH))

    def forward(self, images: Tensor) -> Tensor:
        """(..., images, 64) -> (..., slots, images), rows of sum one."""
        scores = self.queries @ self.keys(images).mT / WIDTH**0.5
        if self.kind == "softmax":
            return scores.softmax(-1)
        costs = scores.detach().amax((-2, -1), keepdim=True) - scores  # a constant moves no plan
        return SLOTS * solve(None, None, costs, epsilon=1.0, grad="implicit").plan()


def sets(images: Tensor, labels: Tensor, count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    chosen = torch.randint(len(images), (count, SLOTS), generator=generator)
    return images[chosen], labels[chosen]


def judge(model: Attention, images: Tensor, labels: Tensor) -> tuple[float, float]:
    """Return the share of slots that hold their digit, by the largest weight, and of sets that are sorted."""
    with torch.no_grad():
        right = labels.gather(-1, model(images).argmax(-1)) == labels.sort(-1).values
    return float(right.float().mean()), float(right.all(-1).float().mean())


def train(kind: str, seed: int, steps: int, every: int) -> tuple[np.ndarray, Tensor, float]:
    """Return rows of (step, slots right, sets sorted) on test images, the attention to one set, and the seconds."""
    digits = load_digits()
    images, labels = torch.from_numpy(digits.data / 16).float(), torch.from_numpy(digits.target)
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    images, labels = images[order], labels[order]
    test = sets(images[1200:], labels[1200:], 1000, torch.Generator().manual_seed(1))
    torch.manual_seed(seed)
    model, generator = Attention(kind), torch.Generator().manual_seed(seed)
    optimiser = torch.optim.Adam(model.parameters(), 3e-3)
    rows, seconds = [(0, *judge(model, *test))], 0.0
    for step in range(1, steps + 1):
        start = time.process_time()
        batch, digit = sets(images[:1200], labels[:1200], BATCH, generator)
        attended = (model(batch) @ digit.float().unsqueeze(-1)).squeeze(-1)
        loss = (attended - digit.sort(-1).values).square().mean()
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        seconds += time.process_time() - start
        if step % every == 0:
            rows.append((step, *judge(model, *test)))
    with torch.no_grad():
        by_digit = test[1][0].argsort()
        plan = model(test[0][0][by_digit])
    return np.array(rows), torch.cat([plan, test[1][0][by_digit].unsqueeze(0)]), seconds


def draw(path: Path, curves: dict[str, np.ndarray], plans: dict[str, Tensor]) -> None:
    figure, axes = plt.subplots(1, 3, figsize=(11, 3.4), layout="constrained", width_ratios=[1.5, 1, 1])
    for (name, results), colour in zip(curves.items(), KINDS.values(), strict=True):
        steps, mean, spread = results[0, :, 0], results[..., 1].mean(0), results[..., 1].std(0)
        axes[0].plot(steps, mean, color=colour, label=name)
        axes[0].fill_between(steps, mean - spread, mean + spread, color=colour, alpha=0.2, linewidth=0)
    axes[0].set(xlabel="step of training", ylabel="share of slots with the right digit", ylim=(0, 1))
    axes[0].set_title("Slots that compete learn to sort")
    axes[0].legend(title="attention", frameon=False)
    for ax, (name, plan) in zip(axes[1:], plans.items(), strict=True):
        shown = ax.imshow(plan[:-1].numpy(), vmin=0, vmax=1, cmap="Blues")
        ax.set_xticks(range(SLOTS), [str(int(digit)) for digit in plan[-1]])
        ax.set_yticks(range(SLOTS), [str(slot + 1) for slot in range(SLOTS)])
        ax.set(title=f"{name} attention", xlabel="digit of the image", ylabel="slot")
    figure.colorbar(shown, ax=axes[1:], label="weight", shrink=0.8)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=100)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--output", type=Path, default=Path("gallery-output"), help="folder of the figure")
    parser.add_argument("--quick", action="store_true", help="few steps and one seed")
    options = parser.parse_args(arguments)
    steps, every, seeds = (20, 10, 1) if options.quick else (400, 40, 5)
    curves, plans = {}, {}
    print(f"{'attention':12}{'slots right':>16}{'sets sorted':>16}{'seconds':>9}   mean ± deviation of {seeds} seed(s)")
    for kind in KINDS:
        runs = [train(kind, seed, steps, every) for seed in range(seeds)]
        curves[kind], plans[kind] = np.stack([rows for rows, _, _ in runs]), runs[0][1]
        last = curves[kind][:, -1, 1:]
        cells = "".join(f"{m:9.3f} ±{s:.3f}" for m, s in zip(last.mean(0), last.std(0), strict=True))
        print(f"{kind:12}{cells}{np.mean([seconds for _, _, seconds in runs]):9.1f}", flush=True)
    draw(options.output / "attention.png", curves, plans)


if __name__ == "__main__":
    main()
