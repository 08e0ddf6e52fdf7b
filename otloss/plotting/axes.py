"""The Axes that is drawn on, names of classes that do not overlap, and legends beside the data."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from jaxtyping import Float

from otloss._checks import install_hint, missing_package

if TYPE_CHECKING:
    from matplotlib.axes import Axes

BLUE, ORANGE, VERMILION, GREY, PALE = "#0072B2", "#E69F00", "#D55E00", "#767676", "#D8D8D8"
MAX_NAMES = 15  # classes beyond which names, and numbers in cells, are too small to read


def axes_to_draw_on(ax: Axes | None) -> Axes:
    """Return `ax`, or the axes of a new figure."""
    try:
        from matplotlib import pyplot
    except ImportError as error:
        missing_package(error, "matplotlib")
        raise ImportError(f"figures need matplotlib: {install_hint('plot')}") from error
    return pyplot.subplots(layout="constrained")[1] if ax is None else ax


def names_of(labels: np.ndarray) -> list[str]:
    """Return labels as text, floats in six digits; dollar signs are escaped, so that matplotlib reads no formula."""
    names = (f"{label:.6g}" if isinstance(label, float) else str(label) for label in labels.tolist())
    return [name.replace("$", r"\$") for name in names]


def name_classes(axis: Any, places: Float[np.ndarray, " classes"], labels: np.ndarray) -> None:
    """Name the classes, those too near to the last one named left out; on the x axis aslant where names would touch."""
    names = names_of(labels)
    nearest = np.ptp(places) / (MAX_NAMES + 1)
    kept = [0]
    for k in range(1, len(places)):
        if places[k] - places[kept[-1]] >= (1 - 1e-9) * nearest:
            kept.append(k)
    axis.set_ticks(places[kept], [names[k] for k in kept])
    axis.set_ticks(np.delete(places, kept), minor=True)
    # A letter of 10 points is about 1/12 inch wide; what is beside the axes will take a fifth of the width or so.
    letters = 0.8 * inches_wide(axis.axes) * 12 / len(kept)
    if axis.axis_name == "x" and max(len(names[k]) for k in kept) + 1 > letters:
        axis.set_tick_params(rotation=30)
        for text in axis.get_ticklabels():
            text.set(horizontalalignment="right", rotation_mode="anchor")


def legend(ax: Axes, title: str | None = None) -> None:
    """Put the legend beside the axes, or inside where the figure has no layout and others may be beside them."""
    if ax.get_figure(root=True).get_layout_engine() is None:  # type: ignore[union-attr]
        ax.legend(loc="best", framealpha=0.7, fontsize="x-small", title=title, title_fontsize="x-small")
    else:
        ax.legend(loc="upper left", bbox_to_anchor=(1.01, 1), frameon=False, fontsize="small", title=title)


def colour_bar(ax: Axes, scale: Any, label: str) -> Any:
    """Return a colour bar of `scale`, in space taken from the axes."""
    return ax.get_figure(root=False).colorbar(scale, ax=ax, shrink=0.8, label=label)  # type: ignore[union-attr]


def inches_wide(ax: Axes) -> float:
    """Return the width of the axes, as it is before the figure is laid out."""
    return float(ax.get_window_extent().width / ax.get_figure(root=False).dpi)  # type: ignore[union-attr]
