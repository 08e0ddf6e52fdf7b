"""Figures of ordinal forecasts and transport plans; every function draws on one Axes and returns it.

Colours are those of M. Okabe and K. Ito (2008) and of viridis, which the colour-blind can tell apart.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from jaxtyping import Float
from numpy.typing import ArrayLike

from otloss._solve import Transport
from otloss.metrics import ordinal_confusion_matrix, threshold_reliability
from otloss.metrics._inputs import Forecast, read_forecast
from otloss.metrics._labels import rank_order
from otloss.metrics._numbers import read_values

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_BLUE, _ORANGE, _VERMILION, _GREY = "#0072B2", "#E69F00", "#D55E00", "#767676"
_MOST_TEXTS = 15  # classes beyond which numbers in cells are too small to read


def plot_cdfs(
    proba: ArrayLike,
    y_true: ArrayLike,
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
        proba: (n, K) probabilities.
        y_true: (n,) labels.
        labels, columns, values, sample_weight: as for `otloss.metrics.ranked_probability_score`; values also place the
            classes on the axis.
        ax: where to draw; a new figure by default.

    Raises:
        ValueError, TypeError: as `otloss.metrics.ranked_probability_score`.
        ImportError: without matplotlib.

    Example:
        >>> ax = plot_cdfs([[0.5, 0.3, 0.2]], ["high"], labels=["low", "mid", "high"], columns="rank")
        >>> ax.get_ylabel()
        'P(Y ≤ class)'
    """
    forecast = read_forecast(y_true, proba, labels, columns, sample_weight)
    x = read_values(values, forecast.labels.size)
    ax = _axes(ax)
    below, was_below = _with_ends(forecast.below), _with_ends(forecast.was_below)  # (n, K)
    predicted, observed = forecast.weight @ below, forecast.weight @ was_below
    # Steps run on behind the last class, where both are 1.
    edges = np.append(x, x[-1] + 0.5 * np.diff(x)[-1:].sum() if x.size > 1 else x[-1] + 1)
    area = float(np.abs(predicted - observed)[:-1] @ np.diff(x))
    single = len(below) == 1
    if not single:
        low, high = _quantiles(forecast, below)
        ax.fill_between(edges, _ended(low), _ended(high), step="post", color=_BLUE, alpha=0.15, linewidth=0,
                        label="middle 80 %\nof forecasts")  # fmt: skip
    ax.fill_between(edges, _ended(predicted), _ended(observed), step="post", color=_ORANGE, alpha=0.45, linewidth=0,
                    label=f"area: {area:.3g}" + ("\n(earth mover's distance)" if single else ""))  # fmt: skip
    ax.step(edges, _ended(predicted), where="post", color=_BLUE, linewidth=2, label="predicted")
    ax.step(edges, _ended(observed), where="post", color="black", linewidth=2, linestyle="--", label="true")
    ax.set(title="Predicted and true cumulative distributions", xlabel="class", ylabel="P(Y ≤ class)")
    ax.set_ylim(-0.02, 1.05)
    _name_classes(ax.xaxis, x, forecast.labels)
    _legend_beside(ax)
    return ax


def plot_confusion_matrix(
    y_true: ArrayLike,
    y_pred: ArrayLike,
    *,
    labels: ArrayLike | None = None,
    sample_weight: ArrayLike | None = None,
    ax: Axes | None = None,
) -> Axes:
    """Draw the confusion matrix: the hue of a cell is its distance from the truth, its strength the share of its row.

    Args:
        y_true: (n,) labels, the rows.
        y_pred: (n,) labels, the columns.
        labels, sample_weight: as for `otloss.metrics.ordinal_confusion_matrix`.
        ax: where to draw; a new figure by default.

    Raises:
        ValueError, TypeError: as `otloss.metrics.ordinal_confusion_matrix`.
        ImportError: without matplotlib.

    Example:
        >>> ax = plot_confusion_matrix([0, 1, 2], [0, 2, 2])
        >>> ax.get_xlabel(), ax.get_ylabel()
        ('predicted class', 'true class')
    """
    table = ordinal_confusion_matrix(y_true, y_pred, labels=labels, sample_weight=sample_weight)
    order = rank_order(labels, y_true=y_true, y_pred=y_pred)
    ax = _axes(ax)
    totals = table.sum(1, keepdims=True)
    shares = np.divide(table, totals, out=np.zeros_like(table), where=totals > 0)
    colours = _distance_colours(len(table))
    distance = np.abs(np.subtract.outer(np.arange(len(table)), np.arange(len(table))))
    strength = np.sqrt(shares)[..., None]  # a share of 1 % is still seen
    image = (1 - strength) + strength * colours[distance]
    ax.imshow(image, interpolation="nearest")
    if len(table) <= _MOST_TEXTS:
        _write_cells(ax, table, shares, image)
    ax.set(title="Confusion matrix by distance of ranks", xlabel="predicted class", ylabel="true class")
    _name_classes(ax.xaxis, np.arange(len(table)), order)
    _name_classes(ax.yaxis, np.arange(len(table)), order)
    _legend_of_distances(ax, colours)
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

    A calibrated forecaster is on the diagonal; a flat curve is too sure. Markers grow with the weight of their bin, and
    the legend gives each threshold's expected calibration error.

    Args:
        y_true: (n,) labels.
        proba: (n, K) probabilities.
        labels, columns, bins, strategy, sample_weight: as for `otloss.metrics.threshold_calibration_error`.
        ax: where to draw; a new figure by default.

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
    ax = _axes(ax)
    from matplotlib import colormaps

    ax.plot([0, 1], [0, 1], color=_GREY, linestyle="--", linewidth=1, zorder=1)
    # The light end of viridis is too pale for a line on white.
    colours = colormaps["viridis"](np.linspace(0, 0.85, len(curves)))
    named = np.unique(np.linspace(0, len(curves) - 1, 9).round())
    for k, (curve, colour) in enumerate(zip(curves, colours, strict=True)):
        label = f"≤ {curve.threshold}: {curve.error:.3f}" if k in named else None
        ax.plot(curve.forecast, curve.observed, color=colour, linewidth=1.5, zorder=2, label=label)
        sizes = 8 + 150 * curve.share
        ax.scatter(curve.forecast, curve.observed, s=sizes, color=[colour], edgecolor="white", linewidth=0.6, zorder=3)
    ax.set(title="Reliability by threshold", xlabel="forecast P(Y ≤ class)", ylabel="observed frequency")
    ax.set(xlim=(-0.03, 1.03), ylim=(-0.03, 1.03), aspect="equal")
    _legend_beside(ax, title="calibration error")
    return ax


def plot_transport_plan(
    plan: Transport | Float[torch.Tensor, "n m"] | ArrayLike,
    *,
    x: ArrayLike | None = None,
    y: ArrayLike | None = None,
    ax: Axes | None = None,
) -> Axes:
    """Draw a transport plan: mass from each row's position to each column's, its marginals beside it.

    Args:
        plan: (n, m) masses >= 0, or the `Transport` of one problem.
        x: (n,) positions of the rows, drawn upwards; 0 to n - 1 by default. Rows are put in the order of positions.
        y: (m,) positions of the columns, drawn to the right; 0 to m - 1 by default.
        ax: where to draw; a new figure by default.

    Raises:
        ValueError: if the plan is no single matrix, holds negative or infinite masses or none, or positions do not fit.
        ImportError: without matplotlib.

    Example:
        >>> ax = plot_transport_plan([[0.5, 0.0], [0.25, 0.25]])
        >>> ax.get_xlabel(), ax.get_ylabel()
        ('y, to', 'x, from')
    """
    masses = _masses(plan)
    rows, columns = _places("x", x, masses.shape[0]), _places("y", y, masses.shape[1])
    masses = masses[np.argsort(rows)][:, np.argsort(columns)]
    rows, columns = np.sort(rows), np.sort(columns)
    ax = _axes(ax)
    from matplotlib.colors import PowerNorm
    from matplotlib.ticker import MaxNLocator

    edges_x, edges_y = _cell_edges(rows), _cell_edges(columns)
    mesh = ax.pcolormesh(edges_y, edges_x, masses, cmap="Blues", norm=PowerNorm(0.5, 0, masses.max()))
    ax.set(xlabel="y, to", ylabel="x, from", xlim=edges_y[[0, -1]], ylim=edges_x[[0, -1]])
    ax.set_title("Transport plan", y=1.21)
    top = ax.inset_axes((0, 1.02, 1, 0.18), sharex=ax)
    top.stairs(masses.sum(0), edges_y, fill=True, color=_ORANGE)
    side = ax.inset_axes((1.02, 0, 0.18, 1), sharey=ax)
    side.stairs(masses.sum(1), edges_x, fill=True, color=_ORANGE, orientation="horizontal")
    for marginal in (top, side):
        marginal.set_axis_off()
    for axis, given in ((ax.xaxis, y), (ax.yaxis, x)):
        if given is None:
            axis.set_major_locator(MaxNLocator(integer=True))
    _figure(ax).colorbar(mesh, ax=ax, label="mass", shrink=0.8)
    return ax


# ---- what is drawn -------------------------------------------------------------------------------------------------


def _masses(plan: Any) -> Float[np.ndarray, "n m"]:
    if isinstance(plan, Transport):
        plan = plan.plan()
    masses = np.asarray(plan.detach().double().cpu() if isinstance(plan, torch.Tensor) else plan, dtype=float)
    if masses.ndim > 2 and masses[..., 0, 0].size == 1:
        masses = masses.reshape(masses.shape[-2:])
    if masses.ndim != 2 or masses.size == 0:
        raise ValueError(f"plan has shape {masses.shape}, expected (n, m); of a batch, draw plan()[0] and so on.")
    if not np.isfinite(masses).all() or masses.min() < 0 or masses.max() == 0:
        raise ValueError(
            f"plan holds masses from {masses.min()} to {masses.max()}, expected finite ones >= 0, some > 0."
        )
    return masses


def _places(name: str, places: ArrayLike | None, count: int) -> Float[np.ndarray, " count"]:
    if places is None:
        return np.arange(float(count))
    array = np.asarray(places.detach().cpu() if isinstance(places, torch.Tensor) else places, dtype=float)
    if array.shape != (count,) or not np.isfinite(array).all():
        raise ValueError(f"{name} has shape {array.shape}, expected ({count},) finite positions on the line.")
    if np.unique(array).size != count:
        raise ValueError(f"{name} holds a position twice; add up the plan's rows or columns of one position first.")
    return array


def _cell_edges(places: Float[np.ndarray, " n"]) -> Float[np.ndarray, " n+1"]:
    if places.size == 1:
        return np.array([places[0] - 0.5, places[0] + 0.5])
    middles = (places[1:] + places[:-1]) / 2
    return np.concatenate([[2 * places[0] - middles[0]], middles, [2 * places[-1] - middles[-1]]])


def _with_ends(thresholds: Float[np.ndarray, "n thresholds"]) -> Float[np.ndarray, "n classes"]:
    return np.concatenate([thresholds, np.ones((len(thresholds), 1))], axis=1)


def _ended(steps: Float[np.ndarray, " classes"]) -> Float[np.ndarray, " edges"]:
    return np.append(steps, steps[-1])


def _quantiles(forecast: Forecast, below: Float[np.ndarray, "n classes"]) -> list[Float[np.ndarray, " classes"]]:
    order = np.argsort(below, axis=0)
    mass = forecast.weight[order].cumsum(0)
    rows = [np.minimum((mass < level).sum(0), len(below) - 1) for level in (0.1, 0.9)]
    ordered = np.take_along_axis(below, order, axis=0)
    return [np.take_along_axis(ordered, row[None], axis=0)[0] for row in rows]


# ---- how -----------------------------------------------------------------------------------------------------------


def _axes(ax: Axes | None) -> Axes:
    try:
        from matplotlib import pyplot
    except ImportError as error:
        raise ImportError('figures need matplotlib: pip install "otloss[plot]"') from error
    return pyplot.subplots(layout="constrained")[1] if ax is None else ax


def _figure(ax: Axes) -> Any:
    return ax.get_figure(root=False)


def _name_classes(axis: Any, places: np.ndarray, labels: np.ndarray) -> None:
    """Name every class, or every second or third and so on where they are many; aslant where names would touch."""
    chosen = _every(len(labels), _MOST_TEXTS)
    names = [str(label) for label in labels[chosen].tolist()]
    axis.set_ticks(places[chosen], names)
    if axis.axis_name == "x" and _touch(axis.axes, places[chosen], names):
        axis.set_tick_params(rotation=30)
        for text in axis.get_ticklabels():
            text.set_horizontalalignment("right")


def _every(count: int, most: int) -> np.ndarray:
    return np.arange(0, count, -(-count // most))


def _touch(ax: Axes, places: np.ndarray, names: list[str]) -> bool:
    low, high = ax.get_xlim()
    # A letter is about 0.6 of the font's size, here 10 points, or 1/72 of 10 inches.
    letters = ax.get_window_extent().width / _figure(ax).dpi * 72 / 6
    room = np.diff(places) / (high - low) * letters
    lengths = np.array([len(name) for name in names])
    return bool((room < (lengths[1:] + lengths[:-1]) / 2 + 1).any())


def _legend_beside(ax: Axes, title: str | None = None) -> None:
    """Put the legend beside the axes, where it covers nothing."""
    ax.legend(loc="upper left", bbox_to_anchor=(1.01, 1), frameon=False, fontsize="small", title=title)


def _distance_colours(classes: int) -> Float[np.ndarray, "classes rgb"]:
    """Blue for distance 0, from yellow to dark red beyond."""
    from matplotlib.colors import LinearSegmentedColormap, to_rgb

    errors = LinearSegmentedColormap.from_list("errors", ["#F0C24B", _VERMILION, "#6B2300"])
    return np.array([to_rgb(_BLUE), *errors(np.linspace(0, 1, max(classes - 1, 1)))[: classes - 1, :3]])


def _write_cells(ax: Axes, table: np.ndarray, shares: np.ndarray, image: np.ndarray) -> None:
    luminance = image @ np.array([0.299, 0.587, 0.114])
    for i, j in zip(*np.nonzero(table), strict=True):
        colour = "black" if luminance[i, j] > 0.55 else "white"
        size = "small" if len(table) <= 8 else "xx-small"
        text = f"{table[i, j]:.4g}" + (f"\n{shares[i, j]:.0%}" if len(table) <= 8 else "")
        ax.text(j, i, text, ha="center", va="center", color=colour, fontsize=size)


def _legend_of_distances(ax: Axes, colours: np.ndarray) -> None:
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import BoundaryNorm, ListedColormap

    count = len(colours)
    scale = ScalarMappable(BoundaryNorm(np.arange(count + 1) - 0.5, count), ListedColormap(colours))
    bar = _figure(ax).colorbar(scale, ax=ax, shrink=0.8, label="ranks from the truth")
    bar.set_ticks(_every(count, 10))
    bar.ax.tick_params(length=0)
