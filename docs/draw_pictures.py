"""Draw the figures of README.md and of the guide: python docs/draw_pictures.py [FOLDER].

Blue is what this library computes, grey what it starts from or is compared with. No data is downloaded.
"""

from __future__ import annotations

import inspect
import sys
import timeit
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from pathlib import Path
from textwrap import fill

import matplotlib as mpl

mpl.use("agg")

import matplotlib.pyplot as plt
import numpy as np
import torch
from matplotlib.axes import Axes
from sklearn.datasets import load_diabetes
from sklearn.model_selection import cross_val_predict
from torch import Tensor
from torch.nn.functional import cross_entropy

import otloss
from otloss.costs import LineCost, PointCost
from otloss.estimators import OrdinalClassifier
from otloss.plotting import plot_cdfs, plot_confusion_matrix, plot_transport_plan
from otloss.solvers.entropic.ladder import LADDER, PATIENCE
from otloss_llm import EMO, MLE, EmbeddingCost, TokenLoss, linear_token_loss

FOLDER = Path(__file__).parent / "pictures"
BLUE, ORANGE, GREY, DARK, PALE, LIGHT = "#0072B2", "#D55E00", "#9a9a9a", "#333333", "#eeeeee", "#dcebf5"
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
    figure, axes = plt.subplots(1, 2, figsize=(8, 2.7), sharey=True, layout="constrained")
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
    figure, axes = plt.subplots(1, 2, figsize=(8, 2.9), sharey=True, layout="constrained")
    for ax, penalty in zip(axes, (None, 0.5), strict=True):
        answer = otloss.solve(None, None, PointCost(x, y), epsilon=0.02, marginal_penalty=penalty)
        share = answer.plan().sum(-1) * len(x)
        goals = torch.where(share.unsqueeze(-1) < 0.5, x, answer.barycentric_map(y))  # most of the mass stays
        draw_clouds(ax, x, y, goals, "")
        ax.scatter(*x.T, s=110 * share, facecolor="none", edgecolor=GREY, lw=0.8)
        left_out = int((share < 0.5).sum())
        ax.set_title(
            "All mass moves, outliers too" if penalty is None else f"A penalty of {penalty}: {left_out} points stay out"
        )
    axes[0].set_ylabel("second coordinate")
    axes[0].legend(frameon=False, loc="lower right")
    figure.savefig(FOLDER / "unbalanced.png")


def grades() -> None:
    """Where the predictions of a classifier fall, and the forecast of one patient as a distribution."""
    X, progression = load_diabetes(return_X_y=True)
    y = np.digitize(progression, [70, 110, 170, 240])
    forecast = cross_val_predict(OrdinalClassifier(), X, y, method="predict_proba")
    figure, axes = plt.subplots(1, 2, figsize=(8.6, 3.5), layout="constrained", width_ratios=(1, 1.05))
    plot_confusion_matrix(y, (forecast.cumsum(1) >= 0.5).argmax(1), ax=axes[0])
    axes[0].set_title("Predicted and true stages of all patients")
    patient = 6
    plot_cdfs(y[[patient]], forecast[[patient]], labels=range(5), ax=axes[1])
    axes[1].set_title("The forecast of one patient")
    axes[1].axhline(0.5, color=GREY, lw=0.8, ls=":")
    figure.savefig(FOLDER / "grades.png")


def moving_cloud() -> None:
    """Gradient steps of `cloud_loss` move a cloud onto a ring."""
    torch.manual_seed(0)
    x, angle = torch.randn(150, 2), 2 * torch.pi * torch.rand(120)
    goal = torch.stack([4 + 1.5 * angle.cos(), 1 + 1.5 * angle.sin()], 1) + 0.05 * torch.randn(120, 2)
    x.requires_grad_()
    optimizer = torch.optim.Adam([x], lr=0.15)
    figure, axes = plt.subplots(1, 4, figsize=(10, 2.5), layout="constrained", sharex=True, sharey=True)
    frames = iter(axes)
    for step in range(61):
        loss = otloss.cloud_loss(x, goal, blur=0.1)
        if step in (0, 10, 25, 60):
            ax = next(frames)
            ax.scatter(*goal.T, s=7, color=GREY, label="y, where to")
            ax.scatter(*x.detach().T, s=7, color=BLUE, label="x, moving")
            ax.set(title=f"step {step}: loss {loss.item():.2g}", xlabel="first coordinate", aspect="equal")
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    axes[0].set_ylabel("second coordinate")
    axes[3].legend(frameon=False, loc="lower left", fontsize=8, handletextpad=0)
    figure.savefig(FOLDER / "moving_cloud.png")


def numbers_to_learn(rows: int) -> tuple[Tensor, Tensor]:
    """Features, and labels among the numbers 0 to 20 that depend on them with some noise."""
    generator = torch.Generator().manual_seed(1)
    features = torch.rand(rows, 4, generator=generator)
    exact = 20 * (features[:, 0] * features[:, 1] + features[:, 2]) / 2
    noise = 1.5 * torch.randn(rows, generator=generator)
    return features, (exact + noise).round().clamp(0, 20).long()


def mass_of_misses(model: torch.nn.Module, features: Tensor, labels: Tensor) -> Tensor:
    """Return the mean mass that a model puts at each distance -20 to 20 from the label."""
    mass = torch.zeros(len(labels), 41)
    places = torch.arange(21) - labels.unsqueeze(-1) + 20
    return mass.scatter(1, places, model(features).softmax(-1).detach()).mean(0)


def number_line() -> None:
    """The mass of a small network over number tokens, before training and after two losses."""
    features, labels = numbers_to_learn(360)
    panels = {"before training": None, "after cross-entropy": 0.0, "with the number loss": 1.0}
    figure, axes = plt.subplots(1, 3, figsize=(9, 2.8), layout="constrained", sharex=True, sharey=True)
    for ax, (title, weight) in zip(axes, panels.items(), strict=True):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(4, 64), torch.nn.GELU(), torch.nn.Linear(64, 21))
        optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
        for _ in range(0 if weight is None else 120):
            logits = model(features[:24])
            distance = otloss.number_token_loss(logits, labels[:24], torch.arange(21.0))
            optimizer.zero_grad()
            (cross_entropy(logits, labels[:24]) + (weight or 0.0) * distance).backward()
            optimizer.step()
        mass = mass_of_misses(model, features[60:], labels[60:])
        misses = torch.arange(-20, 21)
        colours = [DARK if miss == 0 else BLUE for miss in misses.tolist()]
        ax.bar(misses.tolist(), mass.tolist(), color=colours, width=0.9)
        far = mass[misses.abs() > 4].sum()
        ax.set(xlabel="predicted minus true number", title=f"{title}:\n{far:.0%} off by more than 4")
    axes[0].set_ylabel("mean mass")
    figure.savefig(FOLDER / "number_line.png")


def sums() -> Tensor:
    """Return the rows "00+00=000" to "99+99=198" of the characters 0 to 9, + and =, in random order."""
    rows = [f"{a:02d}+{b:02d}={a + b:03d}" for a, b in (divmod(k, 100) for k in torch.randperm(10_000).tolist())]
    return torch.tensor([["0123456789+=".index(character) for character in row] for row in rows])


class Characters(torch.nn.Module):
    """A small recurrent model of the next character."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.body = torch.nn.Embedding(12, 48), torch.nn.GRU(48, 96, batch_first=True)
        self.head = torch.nn.Linear(96, 12, bias=False)

    def loss(self, rows: Tensor, objective: MLE | EMO, cost: EmbeddingCost | None) -> TokenLoss:
        hidden, _ = self.body(self.embed(rows[:, :-1]))
        return linear_token_loss(hidden, self.head.weight, rows[:, 1:], objective=objective, cost=cost)


def curves(objective: MLE | EMO) -> list[tuple[int, float, float]]:
    """Return (step, nll, transport cost) on new rows; the objective takes over where nll alone has trained the head."""
    torch.manual_seed(0)
    (new_rows, rows), model, cost = sums().tensor_split([300]), Characters(), None
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    points = []
    for step in range(-30, 121):
        if step == 0:
            cost = EmbeddingCost(model.head.weight, near_duplicates="keep")
        if cost is not None and step % 10 == 0:
            with torch.no_grad():
                out = model.loss(new_rows, EMO(), cost)
            points.append((step, out.nll.mean().item(), out.cost.mean().item()))
        optimizer.zero_grad()
        part = rows[torch.randint(len(rows), (64,))]
        model.loss(part, MLE() if cost is None else objective, cost).loss.backward()
        optimizer.step()
    return points


def training() -> None:
    """Likelihood and transport cost on new rows, with maximum likelihood and with EMO."""
    figure, axes = plt.subplots(1, 2, figsize=(8, 2.9), layout="constrained")
    for name, objective, colour in (("maximum likelihood", MLE(), GREY), ("EMO", EMO(), BLUE)):
        steps, *statistics = zip(*curves(objective), strict=True)
        for ax, values in zip(axes, statistics, strict=True):
            ax.plot(steps, values, color=colour, label=name)
    axes[0].set(xlabel="steps", ylabel="nats per token", title="Negative log-likelihood")
    axes[1].set(xlabel="steps", ylabel="transport cost D", title="Transport cost")
    axes[0].legend(frameon=False)
    figure.savefig(FOLDER / "training.png")


def milliseconds(call: Callable[[], object]) -> float:
    """Return the shortest time of many calls, which other processes hardly change."""
    return 1000 * min(timeit.repeat(call, number=1, repeat=50))


def three_solvers() -> None:
    """The plans of three ways to solve one problem, their costs and times."""
    x, p, q = line_problem()
    cost = (x[:, None] - x).square()
    figure, axes = plt.subplots(1, 3, figsize=(9, 3.2), layout="constrained")
    for ax, size in zip(axes, (None, 0.001, 0.02), strict=True):
        answer = otloss.solve(p, q, cost, epsilon=size)
        value = otloss.emd if size is None else partial(otloss.sinkhorn, epsilon=size)
        took = milliseconds(partial(value, p, q, cost))
        plot_transport_plan(answer, x=x, y=x, ax=ax)
        name = "Exact" if size is None else f"Entropic, epsilon {size:g}"
        ax.set_title(f"{name}: {took:.1f} ms\ntransport cost {float(answer.linear_cost):.4f}")
    figure.savefig(FOLDER / "three_solvers.png")


def cumulative() -> None:
    """One area between two cumulative curves, read in two directions."""
    x = np.array([0.0, 1.0, 2.0, 3.0, 4.0])
    p, q = np.array([0.35, 0.3, 0.2, 0.1, 0.05]), np.array([0.05, 0.1, 0.15, 0.4, 0.3])
    edges = np.append(x, 5.0)
    F, G = (np.append(w.cumsum(), 1.0) for w in (p, q))
    figure, axes = plt.subplots(1, 2, figsize=(8, 3), layout="constrained", sharey=True)
    for ax in axes:
        ax.step(edges, F, where="post", color=GREY, lw=2, label="F, of p")
        ax.step(edges, G, where="post", color=DARK, lw=2, ls="--", label="G, of q")
        ax.set(xlabel="position x", ylim=(0, 1.05), xticks=x)
    for k in range(4):
        axes[0].fill_between([x[k], x[k + 1]], G[k], F[k], color=BLUE, alpha=0.25 + 0.1 * (k % 2), lw=0)
    levels = np.unique(np.concatenate([[0.0], p.cumsum(), q.cumsum()]).round(9))
    for low, high in pairwise(levels):
        middle = (low + high) / 2
        ends = [x[min(np.searchsorted(w.cumsum(), middle), 4)] for w in (p, q)]
        axes[1].fill_betweenx([low + 0.004, high - 0.004], *ends, color=BLUE, alpha=0.35, lw=0)
    axes[0].set(ylabel="cumulative mass", title="Columns: gap times |F - G| to a power\ncdf_distance, ordinal_loss")
    axes[1].set(title="Rows: mass times distance to an order\nwasserstein_1d")
    axes[0].legend(frameon=False)
    figure.savefig(FOLDER / "cumulative.png")


def kink() -> None:
    """The value between a cloud and its shifted copy: exact transport by distances, entropic, and debiased."""
    x = torch.linspace(0, 1, 30, dtype=torch.float64).unsqueeze(-1)
    shifts = torch.linspace(-0.5, 0.5, 41, dtype=torch.float64)
    costs = [PointCost(x, x + shift, metric="euclidean") for shift in shifts]
    figure, ax = plt.subplots(figsize=(6, 3), layout="constrained")
    for label, colour, value_of in (
        ("Exact: a kink at p = q", DARK, lambda cost: otloss.emd(None, None, cost)),
        ("Entropic: above 0 at p = q", ORANGE, lambda cost: otloss.sinkhorn(None, None, cost, epsilon=0.1)),
        ("Divergence: smooth", BLUE, lambda cost: otloss.sinkhorn_divergence(None, None, cost, epsilon=0.1)),
    ):
        ax.plot(shifts.tolist(), [value_of(cost).item() for cost in costs], color=colour, label=label)
    ax.set(
        xlabel="shift of the copy", ylabel="value", ylim=(0, None), title="A cloud and its shifted copy, epsilon 0.1"
    )
    ax.legend(frameon=False)
    figure.savefig(FOLDER / "kink.png")


def words() -> None:
    """A plan of three by four bins, with the names of its parts."""
    p, q = torch.tensor([0.5, 0.3, 0.2]), torch.tensor([0.3, 0.3, 0.2, 0.2])
    C = torch.tensor([[0.0, 1.0, 2.0, 3.0], [1.0, 0.0, 1.0, 2.0], [3.0, 2.0, 1.0, 0.0]])
    answer = otloss.solve(p, q, C)
    figure, axes = plt.subplots(1, 2, figsize=(7.6, 3), layout="constrained")
    tables = ((C, "cost matrix C", "Greys", "{:.0f}"), (answer.plan(), "plan P", "Blues", "{:.1f}"))
    for ax, (table, title, colours, form) in zip(axes, tables, strict=True):
        ax.imshow(table.numpy(), cmap=colours, vmin=0, vmax=1.3 * float(table.max()), aspect="auto")
        for (i, j), entry in np.ndenumerate(table.numpy()):
            colour = "white" if entry > 0.7 * float(table.max()) else "black"
            ax.text(j, i, form.format(entry), ha="center", va="center", color=colour)
        ax.set(title=title, xticks=range(4), yticks=range(3))
        ax.set_xticklabels([f"bin {j}\nq = {mass:.1f}" for j, mass in enumerate(q.tolist())])
        ax.set_yticklabels([f"bin {i}\np = {mass:.1f}" for i, mass in enumerate(p.tolist())])
        ax.spines[:].set_visible(False)
        ax.tick_params(length=0)
    figure.suptitle(f"Transport cost <C, P>, the sum of the products: {float(answer.value):.1f}", fontsize=10.5)
    figure.savefig(FOLDER / "words.png")


# ---- charts: boxes and arrows, narrow enough for a telephone ---------------------------------------------------------


def box(ax: Axes, x: float, y: float, text: str, colour: str = LIGHT) -> None:
    style = {"boxstyle": "round,pad=0.45", "facecolor": colour, "edgecolor": GREY, "linewidth": 0.8}
    align = "left" if text.count("\n") > 2 else "center"
    ax.text(x, y, text, ha="center", va="center", multialignment=align, bbox=style, linespacing=1.25)


def arrow(ax: Axes, start: tuple[float, float], end: tuple[float, float], text: str = "") -> None:
    """Draw an arrow below all boxes, so that it may begin in the middle of one; the text is in its middle."""
    style = {"arrowstyle": "-|>", "color": DARK, "lw": 1, "shrinkA": 0, "shrinkB": 0}
    ax.annotate("", end, start, arrowprops=style, zorder=0)
    x, y = ((a + b) / 2 for a, b in zip(start, end, strict=True))
    ax.text(x, y, text, ha="center", va="center", fontsize=9, color=DARK, backgroundcolor="white", zorder=1)


def blank(width: float, height: float) -> Axes:
    """Return axes without lines, in inches from the upper left corner."""
    ax = plt.subplots(figsize=(width, height), layout="constrained")[1]
    ax.set(xlim=(0, width), ylim=(height, 0))
    ax.axis("off")
    return ax


QUESTIONS = {
    "Are all errors\nequally bad?": "cross-entropy:\nyou need no transport",
    "Do you predict a\nclass with an order?": (
        "table: OrdinalClassifier\nXGBoost, LightGBM:\nOrdinalBoostingClassifier\nnetwork: ordinal_loss"
    ),
    "Do you predict\na number?": "with bins: histogram_loss\nas text: decode_numbers,\nthen number_token",
    "Do you train a\nlanguage model?": 'objective="emo", compared\nwith objective="mle"',
    "Do points move?": "loss: cloud_loss\nwho goes where: solve, match\nrigid motion: register",
    "Does mass lie on\nfixed bins?": "line: wasserstein_1d\nany cost: emd\nsmooth: sinkhorn_divergence",
}


def chart() -> None:
    """Which loss: one question after the other, from the left column to names in the right one."""
    ax = blank(5.2, 7.1)
    for number, (question, answer) in enumerate(QUESTIONS.items()):
        y = 0.4 + 1.06 * number
        arrow(ax, (1.2, y), (2.75, y), "       yes")
        arrow(ax, (1.2, y), (1.2, y + 0.78), "no")
        box(ax, 1.2, y, question, PALE)
        box(ax, 3.85, y, answer)
    box(ax, 2.5, 6.76, "graphs: fused_gromov   sets: set_loss\ntexts: document_search   ensembles: crps")
    ax.figure.savefig(FOLDER / "chart.png")


def about(method: object) -> str:
    """Return the name of a method, and what the first line of its docstring says that it is for."""
    what = (inspect.getdoc(type(method)) or "").partition("\n")[0].removeprefix("The method for ")
    what = what.partition(":")[0].partition(", which")[0].rstrip(".")
    return fill(f"{type(method).__name__}: {what}", 44, subsequent_indent="    ")


def ladder() -> None:
    """How the solver decides, with the methods of `LADDER` in their order."""
    ax = blank(5.2, 10.0)
    arrow(ax, (1.5, 0.3), (3.25, 0.3), "        None")
    arrow(ax, (1.5, 0.3), (1.5, 1.1), "a number")
    box(ax, 1.5, 0.3, "Is epsilon given?", PALE)
    box(ax, 4.1, 0.3, "exact: assignment,\nnetwork simplex")
    box(ax, 2.2, 1.3, "device, float32 or float64, start", PALE)
    rungs = [("the first that applies:\n" if len(rung) > 1 else "") + "\n".join(map(about, rung)) for rung in LADDER]
    heights = [0.18 * (text.count("\n") + 1) + 0.12 for text in rungs]
    top, bottom, reason = 2.0, 9.3, f"too slow: over {PATIENCE} iterations"
    gap = (bottom - top - sum(heights)) / len(rungs)
    arrow(ax, (2.2, 1.3), (2.2, top))
    arrow(ax, (4.5, top + heights[0] / 2), (4.5, bottom))
    ax.text(4.5, 3.7, "within\nthe\ntolerance", ha="center", va="center", fontsize=9, backgroundcolor="white")
    for number, (text, height) in enumerate(zip(rungs, heights, strict=True)):
        y, end = top + height / 2, top + height
        top = end + gap
        arrow(ax, (2.2, end), (2.2, top), reason if number < len(rungs) - 1 else "")
        arrow(ax, (2.2, y), (4.5, y))
        box(ax, 2.2, y, text)
        reason = "not within the tolerance"
    box(ax, 2.75, 9.55, "accurate potentials, if gradients of weights are wanted;\nthen value, gap and warnings", PALE)
    ax.figure.savefig(FOLDER / "ladder.png")


def devices() -> None:
    """The head of a model in the rows of two processes, and what they exchange."""
    ax = blank(5.6, 2.6)
    for x, name in ((1.4, "process 1"), (4.2, "process 2")):
        arrow(ax, (x, 0.4), (x, 1.05))
        box(ax, x, 0.4, f"{name}: all tokens,\nhalf of the vocabulary", PALE)
        arrow(ax, (x, 1.3), (2.8 + 0.3 * (x - 2.8), 1.95))
        box(ax, x, 1.3, "maximum and sums\nof its logits")
    box(ax, 2.8, 2.2, "one collective for each chunk:\nequal statistics, equal derivatives", PALE)
    ax.figure.savefig(FOLDER / "devices.png")


PICTURES = (
    near_and_far, plan, epsilon, transport_map, unbalanced, grades, moving_cloud, number_line, training, three_solvers,
    cumulative, kink, words, chart, ladder, devices,
)  # fmt: skip


def main(folder: Path = FOLDER) -> None:
    global FOLDER
    FOLDER = folder
    FOLDER.mkdir(parents=True, exist_ok=True)
    with plt.rc_context(STYLE):
        for draw in PICTURES:
            draw()
    plt.close("all")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else FOLDER)
