"""Figures of the benchmarks: panels in one style, with a legend of all lines below."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def panels(width: float, height: float, rows: int = 1, columns: int = 1, **shared: Any) -> tuple[Any, Any]:
    """Return a figure and its axes (rows, columns). Needs no screen; raises ImportError without matplotlib."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    grid = figure.subplots(rows, columns, squeeze=False, **shared)
    for axes in grid.flat:
        axes.grid(color="0.9", linewidth=0.7)
        axes.spines[["top", "right"]].set_visible(False)
    return figure, grid


def line(axes: Any, x: Any, y: Any, name: str, color: str, marker: str) -> None:
    axes.plot(x, y, color=color, marker=marker, markersize=4.5, linewidth=1.5, label=name)


def save(figure: Any, path: Path, *, title: str, legend_of: Any = None) -> None:
    """Write the figure, with the legend of these axes below all panels."""
    if legend_of is not None:
        handles, names = legend_of.get_legend_handles_labels()
        figure.legend(handles, names, loc="outside lower center", ncols=len(names), frameon=False, fontsize=9)
    figure.suptitle(title, fontsize=10)
    figure.savefig(path, dpi=130)
