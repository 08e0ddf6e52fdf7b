"""Where the observations came true among the members of their ensembles."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import ArrayLike

from otloss.metrics import pit_histogram
from otloss.metrics.arrays import as_array, read_shares
from otloss.metrics.forecasts import NORMAL_95
from otloss.plotting.axes import BLUE, ORANGE, axes_to_draw_on, legend

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def plot_pit(
    y_true: ArrayLike,
    ensemble: ArrayLike,
    *,
    bins: int = 10,
    sample_weight: ArrayLike | None = None,
    ax: Axes | None = None,
) -> Axes:
    """Draw the histogram of the probability integral transform: flat where the ensembles are calibrated.

    High ends say that ensembles are too sure, a high middle that they are not sure enough, a tilt that they lean to one
    side. The band holds 95 % of the bars of calibrated ensembles.

    Args:
        y_true, ensemble, bins, sample_weight: as for `otloss.metrics.pit_histogram`.
        ax: where to draw; a new figure by default.

    Raises:
        ValueError: as `otloss.metrics.pit_histogram`.
        ImportError: without matplotlib.

    Example:
        >>> ax = plot_pit([0.5, 9.0], [[1.0, 2.0, 3.0], [1.0, 2.0, 3.0]], bins=4)
        >>> ax.get_ylabel()
        'share of observations'
    """
    shares = pit_histogram(y_true, ensemble, bins=bins, sample_weight=sample_weight)
    weight = read_shares(sample_weight, len(as_array(y_true)))
    ax = axes_to_draw_on(ax)
    level = 1 / bins
    half = NORMAL_95 * np.sqrt(level * (1 - level) * (weight @ weight))
    ax.axhspan(max(level - half, 0), level + half, color=ORANGE, alpha=0.35, lw=0, zorder=3, label="calibrated: 95 %")
    ax.axhline(level, color=ORANGE, linestyle="--", linewidth=1, zorder=3)
    ax.bar((np.arange(bins) + 0.5) / bins, shares, width=0.92 / bins, color=BLUE, zorder=2)
    ax.set(xlabel="probability integral transform of the observation", ylabel="share of observations", xlim=(0, 1))
    legend(ax)
    ax.set_title("Calibration of ensembles")
    return ax
