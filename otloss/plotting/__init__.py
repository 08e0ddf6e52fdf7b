"""Figures of ordinal forecasts, ensembles and transport plans; every function draws on one Axes and returns it.

Colours are by M. Okabe and K. Ito (2008), and viridis, which the colour-blind can distinguish.
"""

from typing import TYPE_CHECKING as _TYPE_CHECKING

from otloss._foreign import missing_name as _missing_name
from otloss.plotting.confusion import plot_confusion_matrix as plot_confusion_matrix
from otloss.plotting.forecasts import plot_cdfs as plot_cdfs
from otloss.plotting.forecasts import plot_reliability as plot_reliability
from otloss.plotting.pit import plot_pit as plot_pit
from otloss.plotting.plan import plot_transport_plan as plot_transport_plan

__all__ = ["plot_cdfs", "plot_confusion_matrix", "plot_pit", "plot_reliability", "plot_transport_plan"]

if not _TYPE_CHECKING:  # for type checkers a module with this function has every name

    def __getattr__(name: str) -> object:
        """Raise an error that says what to call in place of a name of another package."""
        raise _missing_name(__name__, name, __all__)
