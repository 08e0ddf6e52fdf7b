"""Predict the age distribution of neighbourhoods from six features, offline, in seconds.

The true distribution of a neighbourhood has three parts (families, working people, the retired), whose shares and ages
depend on the features. The network is trained on surveys only: histograms of a few dozen people over bins of five
years. It is evaluated on the true distributions of other neighbourhoods.

    python examples/age_histogram.py                     # four losses, three seeds
    python examples/age_histogram.py --quick             # a quick test of the code
    python examples/age_histogram.py --figure ages.png   # predicted and true distributions of some neighbourhoods
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from otloss import cdf_distance
from otloss.losses import histogram_mean
from otloss.nn import HistogramLoss

EDGES = torch.arange(0.0, 101.0, 5.0)
CENTRES = (EDGES[1:] + EDGES[:-1]) / 2
LOSSES = {
    "cross-entropy": {"power": 2, "cross_entropy": 1e4},  # the transport term is then negligible
    "EMD, power 2": {"power": 2},
    "EMD, power 2 + CE": {"power": 2, "cross_entropy": 1.0},
    "EMD, power 1 + CE": {"power": 1, "cross_entropy": 1.0},
}


@dataclass(frozen=True)
class Neighbourhoods:
    features: Tensor  # (n, 6)
    truth: Tensor  # (n, bins), the true distributions
    surveyed: Tensor  # (n, bins), histograms of the surveyed people


def draw_neighbourhoods(count: int, people: int, generator: torch.Generator) -> Neighbourhoods:
    """Draw neighbourhoods and a survey of each, one random bin per person."""
    features = torch.randn(count, 6, generator=generator)
    a, b, c, d, e, f = features.unbind(-1)
    shares = torch.stack([a + 0.5 * b * c, 1.0 + 0.5 * d, -a + 0.7 * torch.sin(2 * e)], dim=-1).softmax(-1)
    middles = torch.stack([9 + 3 * torch.tanh(b), 38 + 8 * torch.tanh(c + d * e), 72 + 6 * torch.tanh(f)], dim=-1)
    spread = torch.tensor([5.0, 9.0, 7.0])
    below = torch.distributions.Normal(middles.unsqueeze(-1), spread.unsqueeze(-1)).cdf(EDGES)  # (n, 3, edges)
    truth = (shares.unsqueeze(-1) * below.diff(dim=-1)).sum(1)
    truth = truth / truth.sum(-1, keepdim=True)
    seen = torch.multinomial(truth, people, replacement=True, generator=generator)
    surveyed = nn.functional.one_hot(seen, len(CENTRES)).float().mean(1)
    return Neighbourhoods(features, truth, surveyed)


def train(data: Neighbourhoods, loss: HistogramLoss, *, steps: int, seed: int) -> nn.Module:
    torch.manual_seed(seed)
    network = nn.Sequential(nn.Linear(6, 64), nn.SiLU(), nn.Linear(64, 64), nn.SiLU(), nn.Linear(64, len(CENTRES)))
    # Adam does not depend on the scale of a loss, so one learning rate fits all of them.
    optimiser = torch.optim.AdamW(network.parameters(), lr=3e-3, weight_decay=1e-2)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, steps)
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        batch = torch.randint(len(data.features), (64,), generator=generator)
        optimiser.zero_grad()
        loss(network(data.features[batch]), data.surveyed[batch]).backward()
        optimiser.step()
        schedule.step()
    return network


def judge(logits: Tensor, truth: Tensor) -> dict[str, float]:
    """Mean distances of the predictions from the true distributions."""
    p = logits.softmax(-1)
    entropy = -(truth * truth.clamp(min=1e-30).log()).sum(-1)
    return {
        "W1 (years)": float(cdf_distance(p, truth, CENTRES, power=1).mean()),
        "RPS (years)": float(cdf_distance(p, truth, CENTRES, power=2).mean()),
        "mean age (years)": float((histogram_mean(logits, CENTRES) - truth @ CENTRES).abs().mean()),
        "KL (nats)": float((-(truth * logits.log_softmax(-1)).sum(-1) - entropy).mean()),
    }


def draw_figure(path: str, test: Neighbourhoods, predictions: dict[str, Tensor]) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(2, 3, figsize=(11, 5.5), sharex=True, sharey=True, layout="constrained")
    for k, axis in enumerate(axes.flat):
        axis.bar(CENTRES.numpy(), test.truth[k].numpy(), width=4.6, color="0.85", label="true")
        for name in ("cross-entropy", "EMD, power 2"):
            axis.stairs(predictions[name][k].softmax(-1).numpy(), EDGES.numpy(), linewidth=1.5, label=name)
        axis.set_title(f"neighbourhood {k + 1}", fontsize=10)
    for axis in axes[-1]:
        axis.set_xlabel("age in years")
    for axis in axes[:, 0]:
        axis.set_ylabel("share of people")
    axes[0, 0].legend(frameon=False)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="few steps and one seed")
    parser.add_argument("--people", default=20, type=int, help="people surveyed in each neighbourhood")
    parser.add_argument("--figure", help="file for a figure of predicted and true distributions")
    options = parser.parse_args()
    steps, seeds = (60, 1) if options.quick else (1000, 3)
    scores: dict[str, list[dict[str, float]]] = {name: [] for name in LOSSES}
    for seed in range(seeds):
        generator = torch.Generator().manual_seed(seed)
        train_data = draw_neighbourhoods(500, options.people, generator)
        test_data = draw_neighbourhoods(1000, options.people, generator)
        predictions = {}
        for name, settings in LOSSES.items():
            network = train(train_data, HistogramLoss(bins=EDGES, **settings), steps=steps, seed=seed)
            with torch.no_grad():
                predictions[name] = network(test_data.features)
            scores[name].append(judge(predictions[name], test_data.truth))
    print(f"Distance from the true distributions of 1000 new neighbourhoods, mean and deviation over {seeds} seed(s):")
    print(f"{'':20s}" + "".join(f"{name:>20s}" for name in scores["cross-entropy"][0]))
    for name, found in scores.items():
        columns = [torch.tensor([score[key] for score in found]) for key in found[0]]
        print(f"{name:20s}" + "".join(f"{c.mean():13.3f} ± {c.std(correction=0):.3f}" for c in columns))
    if options.figure:
        draw_figure(options.figure, test_data, predictions)
        print(f"Figure: {options.figure}")


if __name__ == "__main__":
    main()
