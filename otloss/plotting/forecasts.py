"""Probabilities beside what came true: cumulative distributions and reliability."""

from __future__ import annotations

from textwrap import fill
from typing import TYPE_CHECKING

import numpy as np
from jaxtyping import Float
from numpy.typing import ArrayLike

from otloss.metrics import threshold_reliability
from otloss.metrics.inputs import Forecast, read_forecast
from otloss.plotting.axes import BLUE, GREY, ORANGE, PALE, axes_to_draw_on, legend, name_classes, names_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def plot_cdfs(
    y_true: ArrayLike,
    proba: ArrayLike,
    *,
    labels: ArrayLike | None = None,
    columns: ArrayLike = "sorted",
    values: ArrayLike | None = None,
    sample_weight: ArrayLike | None = None,
    ax: Axes | None = None,
) -> Axes:
    """Draw predicted and true cumulative distributions over the classes, and the area between them.

    For one example the area is its earth mover's distance. For many, the lines are the mean forecast and the observed
    frequencies, and a band holds the middle 80 % of the forecasts.

    Args:
        y_true: (n,) labels.
        proba: (n, K) probabilities.
        labels, columns, values, sample_weight: as for `otloss.metrics.ranked_probability_score`; values also place the
            classes on the axis.
        ax: where to draw; a new figure by default. The legend is beside it if the figure has a layout, as by
            `pyplot.subplots(layout="constrained")`, else inside.

    Raises:
        ValueError, TypeError: as `otloss.metrics.ranked_probability_score`.
        ImportError: without matplotlib.

    Example:
        >>> ax = plot_cdfs(["high"], [[0.5, 0.3, 0.2]], labels=["low", "mid", "high"], columns="rank")
        >>> ax.get_ylabel()
        'P(Y ≤ class)'
    """
    forecast = read_forecast(y_true, proba, labels, columns, sample_weight, every_class=True)
    x = forecast.order.values(values)
    ax = axes_to_draw_on(ax)
    below, was_below = _with_ends(forecast.below), _with_ends(forecast.was_below)  # (n, K)
    predicted, observed = forecast.weight @ below, forecast.weight @ was_below
    # One more step after the last class, where both are 1.
    edges = np.append(x, x[-1] + (0.5 * np.diff(x).mean() if x.size > 1 else 1))
    area = float(np.abs(predicted - observed)[:-1] @ np.diff(x))
    single = len(below) == 1
    if not single:
        low, high = _quantiles(forecast, below)
        ax.fill_between(edges, _ended(low), _ended(high), step="post", color=BLUE, alpha=0.15, linewidth=0,
                        label="middle 80 %\nof forecasts")  # fmt: skip
    ax.fill_between(edges, _ended(predicted), _ended(observed), step="post", color=ORANGE, alpha=0.45, linewidth=0,
                    label=f"area: {area:.3g}" + ("\n(earth mover's distance)" if single else ""))  # fmt: skip
    ax.step(edges, _ended(predicted), where="post", color=BLUE, linewidth=2, label="predicted")
    ax.step(edges, _ended(observed), where="post", color="black", linewidth=2, linestyle="--", label="true")
    ax.set(xlabel="class", ylabel="P(Y ≤ class)")
    ax.set_ylim(-0.02, 1.05)
    name_classes(ax.xaxis, x, forecast.order.labels)
    legend(ax)
    ax.set_title("Cumulative distributions")
    return ax


def plot_reliability(
    y_true: ArrayLike,
    proba: ArrayLike,
    *,
    labels: ArrayLike | None = None,
    columns: ArrayLike = "sorted",
    bins: int = 10,
    strategy: str = "uniform",
    sample_weight: ArrayLike | None = None,
    ax: Axes | None = None,
) -> Axes:
    """Draw how often the true class is at most each threshold, against how often that was forecast.

    A calibrated forecaster is on the diagonal; a flat curve is too sure. Markers grow with the weight of their bin, a
    vertical line is the 95 % interval of the observed frequency (Wilson's; long where a bin holds few examples), and
    the legend gives each threshold's expected calibration error. Of more than eight thresholds, six are coloured and
    the others are pale.

    Args:
        y_true: (n,) labels.
        proba: (n, K) probabilities.
        labels, columns, bins, strategy, sample_weight: as for `otloss.metrics.threshold_calibration_error`.
        ax: where to draw; a new figure by default. The legend is beside it if the figure has a layout, as by
            `pyplot.subplots(layout="constrained")`, else inside.

    Raises:
        ValueError, TypeError: as `otloss.metrics.threshold_calibration_error`.
        ImportError: without matplotlib.

    Example:
        >>> ax = plot_reliability([0, 1, 2], [[0.7, 0.2, 0.1], [0.2, 0.6, 0.2], [0.1, 0.3, 0.6]])
        >>> len(ax.get_lines())  # two thresholds and the diagonal
        3
    """
    curves = threshold_reliability(
        y_true, proba, labels=labels, columns=columns, bins=bins, strategy=strategy, sample_weight=sample_weight
    )
    ax = axes_to_draw_on(ax)
    from matplotlib import colormaps

    ax.plot([0, 1], [0, 1], color=GREY, linestyle="--", linewidth=1, zorder=1)
    names = names_of(np.array([curve.threshold for curve in curves]))
    drawn = np.arange(len(curves)) if len(curves) <= 8 else np.linspace(0, len(curves) - 1, 6).round().astype(int)
    # The light end of viridis is too pale for a line on white.
    for k, colour in zip(drawn, colormaps["viridis"](np.linspace(0, 0.85, len(drawn))), strict=True):
        curve = curves[k]
        label = fill(f"≤ {names[k]}: {curve.error:.3f}", 22, subsequent_indent="    ")
        ax.plot(curve.forecast, curve.observed, color=colour, linewidth=1.5, zorder=3, label=label)
        ax.vlines(curve.forecast, *curve.interval, color=colour, linewidth=1, alpha=0.5, zorder=2)
        sizes = 8 + 150 * curve.share
        ax.scatter(curve.forecast, curve.observed, s=sizes, color=[colour], edgecolor="white", linewidth=0.6, zorder=4)
    for n, k in enumerate(np.setdiff1d(np.arange(len(curves)), drawn)):
        others = None if n else f"the other {len(curves) - len(drawn)}"
        ax.plot(curves[k].forecast, curves[k].observed, color=PALE, linewidth=0.7, zorder=2, label=others)
    ax.set(xlabel="forecast P(Y ≤ class)", ylabel="observed frequency")
    ax.set(xlim=(-0.03, 1.03), ylim=(-0.03, 1.03), aspect="equal")
    legend(ax, title="calibration error")
    ax.set_title("Reliability by threshold")
    return ax


def _with_ends(thresholds: Float[np.ndarray, "n thresholds"]) -> Float[np.ndarray, "n classes"]:
    return np.concatenate([thresholds, np.ones((len(thresholds), 1))], axis=1)


def _ended(steps: Float[np.ndarray, " classes"]) -> Float[np.ndarray, " edges"]:
    return np.append(steps, steps[-1])


def _quantiles(forecast: Forecast, below: Float[np.ndarray, "n classes"]) -> list[Float[np.ndarray, " classes"]]:
    order = np.argsort(below, axis=0)
    mass = forecast.weight[order].cumsum(0)
    rows = [np.minimum((mass < level - 1e-12).sum(0), len(below) - 1) for level in (0.1, 0.9)]
    ordered = np.take_along_axis(below, order, axis=0)
    return [np.take_along_axis(ordered, row[None], axis=0)[0] for row in rows]
