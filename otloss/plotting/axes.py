"""The Axes that is drawn on, names of classes that do not overlap, and legends beside the data."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from jaxtyping import Float, Int

if TYPE_CHECKING:
    from matplotlib.axes import Axes

BLUE, ORANGE, VERMILION, GREY, PALE = "#0072B2", "#E69F00", "#D55E00", "#767676", "#D8D8D8"
MOST_NAMES = 15  # classes beyond which names, and numbers in cells, are too small to read
_LONGEST = 30  # letters of a name


def axes_to_draw_on(ax: Axes | None) -> Axes:
    """Return `ax`, or that of a new figure."""
    try:
        from matplotlib import pyplot
        from matplotlib.axes import Axes
    except ImportError as error:
        raise ImportError('figures need matplotlib: pip install "otloss[plot]"') from error
    if ax is None:
        return pyplot.subplots(layout="constrained")[1]
    if not isinstance(ax, Axes):
        raise TypeError(
            f"ax is a {type(ax).__name__}, expected one matplotlib Axes, such as figure.add_subplot() of a figure or "
            "axes[0] of an array."
        )
    return ax


def figure_of(ax: Axes) -> Any:
    """Return the figure, or the part of one, that holds `ax`."""
    return ax.get_figure(root=False)


def names_of(labels: np.ndarray) -> list[str]:
    """Return labels as text: dates and floats as short as tells them apart, very long names without their middle."""
    if labels.dtype.kind == "M":
        return [str(name) for name in np.datetime_as_string(labels, unit="auto")]
    names = [str(label) for label in labels.tolist()]
    if labels.dtype.kind == "f":
        shorter = ([f"{label:.{digits}g}" for label in labels] for digits in (6, 9))
        names = next((short for short in shorter if len(set(short)) == len(names)), names)
    return [name if len(name) <= _LONGEST else f"{name[:18].rstrip()} … {name[-9:].lstrip()}" for name in names]


def name_classes(axis: Any, places: Float[np.ndarray, " classes"], labels: np.ndarray) -> None:
    """Name the classes, those too near to the last one named left out; on the x axis aslant where names would touch."""
    names = names_of(labels)
    nearest = np.ptp(places) / (MOST_NAMES + 1)
    chosen = [0]
    for k in range(1, len(places)):
        if places[k] - places[chosen[-1]] >= nearest:
            chosen.append(k)
    axis.set_ticks(places[chosen], [names[k] for k in chosen])
    axis.set_ticks(np.delete(places, chosen), minor=True)
    if axis.axis_name == "x" and len(chosen) > 1:
        low, high = axis.axes.get_xlim()
        # A letter of 10 points is about 1/12 inch wide; what is beside the axes will take a fifth of the width or so.
        letters = 0.8 * inches_wide(axis.axes) * 12 * np.diff(places[chosen]).min() / (high - low)
        if max(len(names[k]) for k in chosen) + 1 > letters:
            axis.set_tick_params(rotation=30)
            for text in axis.get_ticklabels():
                text.set(horizontalalignment="right", rotation_mode="anchor")


def every(count: int, most: int) -> Int[np.ndarray, " chosen"]:
    """Return positions 0 to count - 1, or every second or third and so on where they are more than `most`."""
    return np.arange(0, count, -(-count // most))


def legend(ax: Axes, title: str | None = None) -> None:
    """Put the legend beside the axes, or inside where the figure has no layout and others may be beside them."""
    if _has_layout(ax):
        ax.legend(loc="upper left", bbox_to_anchor=(1.01, 1), frameon=False, fontsize="small", title=title)
    else:
        ax.legend(loc="best", framealpha=0.7, fontsize="x-small", title=title, title_fontsize="x-small",
                  handlelength=1.2, borderpad=0.3, labelspacing=0.3)  # fmt: skip


def colour_bar(ax: Axes, scale: Any, label: str) -> Any:
    """Return a colour bar of `scale`, in space taken from the axes."""
    if _has_layout(ax):
        return figure_of(ax).colorbar(scale, ax=ax, shrink=0.8, label=label)
    # Numbers and label are on the inner side, 0.6 inches wide: neighbouring axes may begin at the outer one.
    pad = min(0.35, 0.62 / inches_wide(ax))
    bar = figure_of(ax).colorbar(scale, ax=ax, shrink=0.8, label=label, pad=pad, fraction=0.06)
    bar.ax.yaxis.set_ticks_position("left")
    bar.ax.yaxis.set_label_position("left")
    return bar


def entitle(ax: Axes, title: str) -> None:
    """Write the title, in letters that fit the width of the axes."""
    text = ax.set_title(title)
    fitting = 72 * inches_wide(ax) / (0.55 * len(title))
    text.set_fontsize(min(text.get_fontsize(), max(fitting, 7.0)))


def inches_wide(ax: Axes) -> float:
    """Return the width of the axes, as it is before the figure is laid out."""
    return float(ax.get_window_extent().width / figure_of(ax).dpi)


def _has_layout(ax: Axes) -> bool:
    """Whether the figure moves its axes apart until what is drawn around them fits."""
    figure = ax.get_figure(root=True)
    assert figure is not None
    return figure.get_layout_engine() is not None
