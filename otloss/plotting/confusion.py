"""The confusion matrix, coloured by the distance between true and predicted rank."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from jaxtyping import Float
from numpy.typing import ArrayLike

from otloss.metrics.arrays import read_weights
from otloss.metrics.inputs import read_decisions
from otloss.plotting.axes import BLUE, MAX_NAMES, VERMILION, axes_to_draw_on, colour_bar, inches_wide, name_classes

if TYPE_CHECKING:
    from matplotlib.axes import Axes


_MAX_COLOURS = 256  # in the legend


def plot_confusion_matrix(
    y_true: ArrayLike,
    y_pred: ArrayLike,
    *,
    labels: ArrayLike | None = None,
    sample_weight: ArrayLike | None = None,
    ax: Axes | None = None,
) -> Axes:
    """Draw the confusion matrix: the hue of a cell is its distance from the truth, its strength the share of its row.

    Of a range of whole numbers it shows the classes that occur, and the distances count the others.

    Args:
        y_true: (n,) labels, the rows.
        y_pred: (n,) labels, the columns.
        labels, sample_weight: as for `otloss.metrics.ordinal_mae`.
        ax: where to draw; a new figure by default.

    Raises:
        ValueError, TypeError: as `otloss.metrics.ordinal_mae`.
        ImportError: without matplotlib.

    Example:
        >>> ax = plot_confusion_matrix([0, 1, 2], [0, 2, 2])
        >>> ax.get_xlabel(), ax.get_ylabel()
        ('predicted class', 'true class')
    """
    true, predicted, order = read_decisions(y_true, y_pred, labels)
    table = np.zeros((order.labels.size, order.labels.size))
    np.add.at(table, (true, predicted), read_weights(sample_weight, true.size))
    ax = axes_to_draw_on(ax)
    totals = table.sum(1, keepdims=True)
    shares = np.divide(table, totals, out=np.zeros_like(table), where=totals > 0)
    distance = np.abs(np.subtract.outer(order.ranks, order.ranks))
    strength = np.sqrt(shares)[..., None]  # a share of 1 % is still visible
    image = (1 - strength) + strength * _distance_colours(distance, order.count)
    ax.imshow(image, interpolation="nearest")
    if len(table) <= MAX_NAMES:
        _write_cells(ax, table, shares, image)
    ax.set(xlabel="predicted class", ylabel="true class")
    name_classes(ax.xaxis, np.arange(len(table)), order.labels)
    name_classes(ax.yaxis, np.arange(len(table)), order.labels)
    _legend_of_distances(ax, order.count)
    ax.set_title("Confusion matrix")
    return ax


def _distance_colours(distance: Float[np.ndarray, "..."], classes: int) -> Float[np.ndarray, "... rgb"]:
    """Return blue for distance 0, from yellow to dark red beyond, the distance of the first class and the last."""
    from matplotlib.colors import LinearSegmentedColormap, to_rgb

    errors = LinearSegmentedColormap.from_list("errors", ["#F0C24B", VERMILION, "#6B2300"])
    colours: np.ndarray = errors((distance - 1).clip(min=0) / max(classes - 2, 1))[..., :3]
    return np.where(distance[..., None] > 0, colours, to_rgb(BLUE))


def _write_cells(ax: Axes, table: np.ndarray, shares: np.ndarray, image: np.ndarray) -> None:
    luminance = image @ np.array([0.299, 0.587, 0.114])
    texts = {(i, j): _amount(table[i, j]) for i, j in zip(*np.nonzero(table), strict=True)}
    # Points of a cell's width without what is beside the axes; a digit takes 0.65 of the font's size.
    cell = 0.6 * inches_wide(ax) * 72 / len(table)
    size = min(8.5 if len(table) <= 8 else 6, cell / (0.65 * max(map(len, texts.values()))), 0.45 * cell)
    for (i, j), text in texts.items():
        colour = "black" if luminance[i, j] > 0.55 else "white"
        share = f"\n{shares[i, j]:.0%}" if len(table) <= 8 else ""
        ax.text(j, i, text + share, ha="center", va="center", color=colour, fontsize=size)


def _amount(weight: float) -> str:
    """Return a count, or a sum of weights; large ones without their fraction."""
    return f"{weight:.0f}" if weight >= 1000 or weight == round(weight) else f"{weight:.3g}"


def _legend_of_distances(ax: Axes, classes: int) -> None:
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import BoundaryNorm, ListedColormap

    count = min(classes, _MAX_COLOURS)
    colours = _distance_colours(np.linspace(0, float(classes - 1), count), classes)
    edges = np.linspace(0, float(classes), count + 1) - 0.5
    scale = ScalarMappable(BoundaryNorm(edges, count), ListedColormap(colours))
    bar = colour_bar(ax, scale, "ranks from the truth")
    bar.set_ticks(np.arange(0, float(classes), float(-(-classes // 10))))
    bar.ax.tick_params(length=0)
