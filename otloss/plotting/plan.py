"""A transport plan and its marginals."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from jaxtyping import Float
from numpy.typing import ArrayLike

from otloss.plotting.axes import ORANGE, axes_to_draw_on, colour_bar, inches_wide
from otloss.solvers.solve import Transport

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_MARGINAL = 0.16  # a share of the width and the height of the axes


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
        ValueError: if the plan is not one matrix, holds negative, infinite or only zero masses, or positions misfit.
        ImportError: without matplotlib.

    Example:
        >>> ax = plot_transport_plan([[0.5, 0.0], [0.25, 0.25]])
        >>> ax.get_xlabel(), ax.get_ylabel()
        ('y, to', 'x, from')
    """
    masses = _masses(plan)
    rows, columns = _positions("x", x, masses.shape[0]), _positions("y", y, masses.shape[1])
    masses = masses[np.argsort(rows)][:, np.argsort(columns)]
    rows, columns = np.sort(rows), np.sort(columns)
    ax = axes_to_draw_on(ax)
    from matplotlib.colors import PowerNorm
    from matplotlib.ticker import MaxNLocator

    edges_x, edges_y = _cell_edges(rows), _cell_edges(columns)
    mesh = ax.pcolormesh(edges_y, edges_x, masses, cmap="Blues", norm=PowerNorm(0.5, 0, masses.max()))
    ax.set(xlabel="y, to", ylabel="x, from")
    colour_bar(ax, mesh, "mass")
    max_ticks = int(np.clip(2.5 * inches_wide(ax), 2, 6))
    # The marginals are inside the axes, above and to the right of the plan.
    for axis, edges, positions in ((ax.xaxis, edges_y, y), (ax.yaxis, edges_x, x)):
        low, high = edges[[0, -1]]
        axis.axes.set(**{f"{axis.axis_name}lim": (low, low + (high - low) / (1 - _MARGINAL - 0.02))})
        ticks = MaxNLocator(max_ticks, integer=positions is None).tick_values(low, high)
        axis.set_ticks(ticks[(low <= ticks) & (ticks <= high)])
    top = ax.inset_axes((0, 1 - _MARGINAL, 1, _MARGINAL), sharex=ax)
    top.stairs(masses.sum(0), edges_y, fill=True, color=ORANGE)
    side = ax.inset_axes((1 - _MARGINAL, 0, _MARGINAL, 1), sharey=ax)
    side.stairs(masses.sum(1), edges_x, fill=True, color=ORANGE, orientation="horizontal")
    for marginal in (top, side):
        marginal.set_axis_off()
    ax.spines[["top", "right"]].set_visible(False)
    ax.set_title("Transport plan")
    return ax


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


def _positions(name: str, places: ArrayLike | None, count: int) -> Float[np.ndarray, " count"]:
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
