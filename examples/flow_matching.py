"""Flow matching with paired minibatches: one Euler step from eight Gaussians to two moons.

A network v learns the velocity of straight lines from x0 to x1,

    loss = mean |v((1 - t) x0 + t x1, t) - (x1 - x0)|^2,     sample: x <- x + v(x, t) / steps

In each minibatch x0 and x1 are taken as they come, so that lines cross and v is a mean over them; or they are paired by
exact transport, `x1[otloss.pair(x0, x1)]`: lines hardly cross, and one step along them is nearly right.

Data: the setting of Tong et al. (arXiv 2302.00482), eight Gaussians on a circle of radius 5 to two moons of about
that size. W2 is exact, between 1,000 samples and 1,000 points of the moons. Time is processor time.

Result (5 seeds, 2,000 steps of training): pairing lowers W2 from 1.61 to 0.44 with one Euler step, and from 0.43 to
0.34 with 16. Training takes three times as long.

After 8 steps W2 falls from 0.58 to 0.35. Two samples of the moons are 0.24 apart. The network is so small that the
pairs take most of the time. On digits, in 64 dimensions, pairs helped with one step alone.
"""

from __future__ import annotations

import argparse
import math
import time
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
from sklearn.datasets import make_moons
from torch import Tensor, nn

import otloss

BATCH, STEPS = 256, (1, 2, 4, 8, 16)
KINDS = {"independent": "0.5", "paired": "C0"}


def gaussians(count: int, generator: torch.Generator | None = None) -> Tensor:
    angle = torch.randint(8, (count,), generator=generator) * math.pi / 4
    means = 5 * torch.stack([angle.cos(), angle.sin()], 1)
    return means + 0.1**0.5 * torch.randn(count, 2, generator=generator)


def moons(count: int, seed: int) -> Tensor:
    return torch.from_numpy(make_moons(count, noise=0.2, random_state=seed)[0]).float() * 3 - 1


def w2(x: Tensor, y: Tensor) -> float:
    return float(otloss.emd(None, None, otloss.costs.PointCost(x, y))) ** 0.5


def train(kind: str, seed: int, data: Tensor, steps: int) -> tuple[nn.Module, float]:
    """Return the velocity and the seconds of the processor."""
    torch.manual_seed(seed)
    sizes = (3, 64, 64, 64, 2)
    layers = [part for a, b in pairwise(sizes) for part in (nn.Linear(a, b), nn.SiLU())]
    velocity = nn.Sequential(*layers[:-1])
    optimizer = torch.optim.Adam(velocity.parameters(), 4e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    start = time.process_time()
    for _ in range(steps):
        x0, x1 = gaussians(BATCH), data[torch.randint(len(data), (BATCH,))]
        if kind == "paired":
            x1 = x1[otloss.pair(x0, x1)]
        t = torch.rand(BATCH, 1)
        loss = (velocity(torch.cat([(1 - t) * x0 + t * x1, t], 1)) - (x1 - x0)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    return velocity, time.process_time() - start


@torch.no_grad()
def sample(velocity: nn.Module, x: Tensor, steps: int) -> Tensor:
    for k in range(steps):
        x = x + velocity(torch.cat([x, torch.full((len(x), 1), k / steps)], 1)) / steps
    return x


def draw(results: dict[str, Tensor], shown: dict[str, Tensor], data: Tensor, between: float, path: Path) -> None:
    from matplotlib import pyplot as plt

    figure, axes = plt.subplot_mosaic("AA;BC", figsize=(8.4, 7.4), layout="constrained", height_ratios=[1, 1.1])
    top, *below = axes.values()
    for kind, values in results.items():  # (seeds, STEPS)
        top.plot(STEPS, values.mean(0), "o-", color=KINDS[kind], label=kind)
        top.fill_between(STEPS, values.amin(0), values.amax(0), color=KINDS[kind], alpha=0.2, lw=0)
    top.axhline(between, color="0.7", lw=1, linestyle=":", label="two samples of the moons")
    top.set_xscale("log", base=2)
    top.set_xticks(STEPS, [str(s) for s in STEPS])
    top.set(xlabel="Euler steps of a sample", ylabel="W2 to the moons:\nmean and range over seeds", ylim=(0, None))
    top.set_title("Pairs help where steps are few")
    top.legend(frameon=False)
    for ax, (kind, samples) in zip(below, shown.items(), strict=True):
        ax.scatter(*data.T, s=3, color="0.85", label="moons")
        ax.scatter(*samples.T, s=3, color=KINDS[kind] if kind == "paired" else "0.3", label="samples")
        ax.set(title=f"{kind}, one step", xlabel="$x_1$", ylabel="$x_2$", aspect="equal")
        ax.legend(frameon=False, loc="lower left", markerscale=4)
    figure.savefig(path, dpi=110)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="few training steps, one seed")
    parser.add_argument("--output", type=Path, default=Path("gallery-output"), help="folder of the figure")
    options = parser.parse_args(argv)
    steps, seeds, count = (30, 1, 100) if options.quick else (2000, 5, 1000)
    data, held_out = moons(10_000, 0), moons(count, 1)
    between = w2(moons(count, 2), held_out)
    print(f"W2 of two samples of the moons: {between:.2f}. Mean ± deviation over {seeds} seed(s), by Euler steps:")
    print(f"{'':12s}" + "".join(f"{s:>13d}" for s in STEPS) + f"{'seconds':>10s}")
    results, shown = {}, {}
    start = gaussians(count, torch.Generator().manual_seed(0))
    for kind in KINDS:
        runs = [train(kind, seed, data, steps) for seed in range(seeds)]
        results[kind] = torch.tensor([[w2(sample(v, start, s), held_out) for s in STEPS] for v, _ in runs])
        cells = "".join(f"{f'{c.mean():.2f} ± {c.std(correction=0):.2f}':>13s}" for c in results[kind].T)
        print(f"{kind:12s}{cells}{np.mean([seconds for _, seconds in runs]):10.1f}")
        shown[kind] = sample(runs[0][0], start, 1)
    options.output.mkdir(parents=True, exist_ok=True)
    draw(results, shown, held_out, between, options.output / "flow_matching.png")


if __name__ == "__main__":
    main()
