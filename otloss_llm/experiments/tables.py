"""What all reports share: runs by arm, means with deviations, Markdown tables, and figures if matplotlib is there."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from scipy.special import stdtrit

from otloss.extending import install_hint


class Mean(NamedTuple):
    """A mean over seeds and their standard deviation, NaN for one seed."""

    mean: float
    deviation: float = math.nan

    @classmethod
    def of(cls, values: Sequence[float]) -> Mean:
        return cls(statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else math.nan)

    def shown(self, form: str) -> str:
        """Return the text of a table's cell, with numbers in the format `form`, such as "{:.3f}"."""
        deviation = "" if math.isnan(self.deviation) else f" ± {form.format(self.deviation)}"
        return form.format(self.mean) + deviation


def half_interval(values: Sequence[float]) -> Mean:
    """Return a mean with half of its 95 % interval, Student's t, in place of the deviation."""
    mean, deviation = Mean.of(values)
    return Mean(mean, deviation * float(stdtrit(len(values) - 1, 0.975)) / math.sqrt(len(values)))


def mean_cell(values: Sequence[float], form: str = "{:.3f}") -> str:
    """Return mean and deviation as the text of a cell, "" without values."""
    return Mean.of(values).shown(form) if values else ""


def markdown_table(heads: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """Return a Markdown table whose first column holds names, the others numbers."""
    heads = list(heads)
    first, *others = (f"| {' | '.join(cells)} |\n" for cells in (heads, *rows))
    return "".join([first, "|---|", "---:|" * (len(heads) - 1), "\n", *others])


def runs_by_arm(results: dict[str, Any]) -> dict[str, list[dict[str, Any]]]:
    """Return the runs of each arm, arms in the order of their first runs."""
    arms: dict[str, list[dict[str, Any]]] = {}
    for run in results["runs"]:
        arms.setdefault(run["arm"], []).append(run)
    return arms


def save_figure(draw: Callable[[], Any], path: Path) -> str:
    """Save the figure that `draw` returns; return Markdown that shows it, or says what to install."""
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError:
        return f"(no figure: {install_hint('plot')})\n"
    draw().savefig(path, dpi=130)
    return f"![figure]({path.name})\n"
