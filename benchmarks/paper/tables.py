"""What all reports share: runs by arm, means with deviations, Markdown tables, and figures if matplotlib is there."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from scipy.special import stdtrit

from otloss._checks import install_hint


@dataclass(frozen=True)
class Mean:
    """A mean over seeds and their standard deviation.

    Attributes:
        mean: over the seeds whose figure is a number; NaN without one.
        deviation: of these; NaN for fewer than two, and where a figure is infinite.
        count: how many these are.
        left_out: how many seeds have NaN for a figure.
    """

    mean: float
    deviation: float = math.nan
    count: int = 1
    left_out: int = 0

    @classmethod
    def of(cls, values: Sequence[float]) -> Mean:
        numbers = [value for value in values if not math.isnan(value)]
        mean = statistics.fmean(numbers) if numbers else math.nan
        deviation = statistics.stdev(numbers) if len(numbers) > 1 and math.isfinite(mean) else math.nan
        return cls(mean, deviation, len(numbers), len(values) - len(numbers))

    def shown(self, form: str, form_of_deviation: str | None = None) -> str:
        """Return the text of a table's cell, with numbers in the format `form`, such as "{:.3f}"."""
        deviation = "" if math.isnan(self.deviation) else f" ± {(form_of_deviation or form).format(self.deviation)}"
        seeds = f" ({self.count} of {self.count + self.left_out} seeds)" if self.left_out else ""
        return form.format(self.mean) + deviation + seeds


def half_interval(values: Sequence[float]) -> Mean:
    """Return a mean with half of its 95 % interval, Student's t, in place of the deviation."""
    mean = Mean.of(values)
    if mean.count < 2:
        return mean
    return replace(mean, deviation=mean.deviation * float(stdtrit(mean.count - 1, 0.975)) / math.sqrt(mean.count))


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
