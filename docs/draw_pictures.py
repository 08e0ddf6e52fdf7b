"""Draw the figures of README.md and docs/guide/transport_in_pictures.md: python docs/draw_pictures.py [FOLDER].

Blue is what this library computes, grey what it starts from or is compared with. No data is needed.
"""

from __future__ import annotations

import sys
from pathlib import Path

import matplotlib as mpl

mpl.use("agg")

import matplotlib.pyplot as plt
import torch
from matplotlib.axes import Axes
from torch import Tensor

import otloss
from otloss.costs import LineCost, PointCost
from otloss.plotting import plot_transport_plan

FOLDER = Path(__file__).parent / "pictures"
BLUE, GREY, DARK = "#0072B2", "#9a9a9a", "#333333"
STYLE = {
    "figure.dpi": 130, "font.size": 9.5, "axes.titlesize": 10.5, "axes.spines.top": False, "axes.spines.right": False,
}  # fmt: skip


def near_and_far() -> None:
    """Two forecasts of one grade: cross-entropy takes them for equal, transport does not."""
    grades, truth = range(1, 6), 1
    forecasts = torch.tensor([[0.3, 0.4, 0.3, 0.0, 0.0], [0.0, 0.4, 0.0, 0.0, 0.6]])
    target = torch.full((2,), truth)
    transport = otloss.ordinal_loss(forecasts.clamp_min(1e-9).log(), target, power=1, reduction="none")
    likelihood = torch.nn.functional.nll_loss(forecasts.clamp_min(1e-9).log(), target, reduction="none")
    figure, axes = plt.subplots(1, 2, figsize=(7.6, 2.7), sharey=True, layout="constrained")
    for ax, forecast, name, cost, nll in zip(axes, forecasts, "AB", transport, likelihood, strict=True):
        bars = ax.bar(grades, forecast.tolist(), color=BLUE, width=0.7)
        bars[truth].set_color(DARK)
        ax.set(xlabel="grade", ylim=(0, 0.95), xticks=grades)
        ax.set_title(f"Forecast {name}: transport {float(cost):.1f}, cross-entropy {float(nll):.2f}")
        arrows = [(place, mass) for place, mass in enumerate(forecast.tolist()) if mass > 0 and place != truth]
        for place, mass in arrows:
            style = {
                "arrowstyle": "->",
                "color": GREY,
                "connectionstyle": f"arc3,rad={0.35 if place > truth else -0.35}",
            }
            ax.annotate("", (truth + 1, 0.43), (place + 1, mass + 0.02), arrowprops=style)
            text = f"{mass:.1f} x {abs(place - truth)}"
            ax.text((place + truth) / 2 + 1, 0.52 + 0.09 * abs(place - truth), text, ha="center", color=DARK)
    axes[0].set_ylabel("probability")
    axes[0].annotate("true grade", (2, 0.05), (2, 0.05), ha="center", color="white", rotation=90, va="bottom")
    figure.savefig(FOLDER / "near_and_far.png")


def line_problem() -> tuple[Tensor, Tensor, Tensor]:
    x = torch.linspace(0, 1, 60, dtype=torch.float64)
    bump = lambda centre, width: torch.exp(-(((x - centre) / width) ** 2))  # noqa: E731
    p, q = bump(0.25, 0.09) + 1e-4, bump(0.45, 0.05) + 0.7 * bump(0.8, 0.06) + 1e-4
    return x, p / p.sum(), q / q.sum()


def plan() -> None:
    x, p, q = line_problem()
    answer = otloss.solve(p, q, LineCost(x, power=2))
    figure, axes = plt.subplots(1, 2, figsize=(7.6, 3.1), layout="constrained")
    axes[0].fill_between(x, p, color=GREY, alpha=0.7, label="p, from")
    axes[0].fill_between(x, q, color=BLUE, alpha=0.7, label="q, to")
    axes[0].set(xlabel="position", ylabel="mass in a bin", title="Two histograms of mass 1")
    axes[0].legend(frameon=False)
    plot_transport_plan(answer, x=x, y=x, ax=axes[1])
    axes[1].set_title(
        f"The cheapest plan says which mass goes where\n(mean squared distance {float(answer.value):.3f})"
    )
    figure.savefig(FOLDER / "plan.png")


def epsilon() -> None:
    x, p, q = line_problem()
    figure, axes = plt.subplots(1, 3, figsize=(9, 3.1), layout="constrained")
    for ax, size in zip(axes, (0.001, 0.01, 0.1), strict=True):
        answer = otloss.solve(p, q, LineCost(x, power=2), epsilon=size)
        plot_transport_plan(answer, x=x, y=x, ax=ax)
        ax.set_title(f"epsilon {size:g}: length {size**0.5:.2f}\ntransport cost {float(answer.linear_cost):.3f}")
    figure.suptitle("A larger epsilon gives a smoother and more expensive plan", fontsize=10.5)
    figure.savefig(FOLDER / "epsilon.png")


def clouds() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    angle = torch.linspace(0, 3.1, 40, dtype=torch.float64)
    noise = 0.06 * torch.randn(2, 40, 2, generator=generator, dtype=torch.float64)
    x = torch.stack([angle.cos(), angle.sin()], -1) + noise[0]
    y = torch.stack([1 - angle.cos(), 0.4 - angle.sin()], -1) + noise[1]
    return x, y


def draw_clouds(ax: Axes, x: Tensor, y: Tensor, to: Tensor, title: str) -> None:
    ax.plot(*torch.stack([x, to]).permute(2, 0, 1), color=BLUE, alpha=0.35, lw=0.8)
    ax.plot(*x.T, "o", color=GREY, ms=4, label="x")
    ax.plot(*y.T, "o", mfc="none", mec=DARK, ms=4.5, label="y")
    ax.plot(*to.T, ".", color=BLUE, ms=4.5, label="where x goes")
    ax.set(title=title, aspect="equal", xlabel="first coordinate")


def transport_map() -> None:
    x, y = clouds()
    figure, axes = plt.subplots(1, 2, figsize=(8, 3.2), sharey=True, layout="constrained")
    for ax, size in zip(axes, (None, 0.3), strict=True):
        answer = otloss.solve(None, None, PointCost(x, y), epsilon=size)
        title = "Exact: every point has a partner" if size is None else f"epsilon {size}: targets are averages of y"
        draw_clouds(ax, x, y, answer.barycentric_map(y), title)
    axes[0].set_ylabel("second coordinate")
    axes[0].legend(frameon=False, loc="lower left")
    figure.savefig(FOLDER / "map.png")


def unbalanced() -> None:
    x, y = clouds()
    y = torch.stack([y[:, 0] - 0.7, 0.7 - y[:, 1]], -1)  # the arc of x, moved to the right
    x = torch.cat([x, torch.tensor([[2.6, 0.1], [2.8, 0.0], [2.7, 0.2], [0.2, -0.8]], dtype=x.dtype)])
    figure, axes = plt.subplots(1, 2, figsize=(8, 3.4), sharey=True, layout="constrained")
    for ax, penalty in zip(axes, (None, 0.5), strict=True):
        answer = otloss.solve(None, None, PointCost(x, y), epsilon=0.02, marginal_penalty=penalty)
        share = answer.plan().sum(-1) * len(x)
        draw_clouds(ax, x, y, answer.barycentric_map(y), "")
        ax.scatter(*x.T, s=110 * share, facecolor="none", edgecolor=GREY, lw=0.8)
        left_out = int((share < 0.5).sum())
        ax.set_title(
            "All mass moves, outliers too" if penalty is None else f"A penalty of {penalty}: {left_out} points stay out"
        )
    axes[0].set_ylabel("second coordinate")
    axes[0].legend(frameon=False, loc="lower right")
    figure.savefig(FOLDER / "unbalanced.png")


def main(folder: Path = FOLDER) -> None:
    global FOLDER
    FOLDER = folder
    FOLDER.mkdir(parents=True, exist_ok=True)
    with plt.rc_context(STYLE):
        for draw in (near_and_far, plan, epsilon, transport_map, unbalanced):
            draw()
    plt.close("all")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else FOLDER)
