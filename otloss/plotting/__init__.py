"""Figures of ordinal forecasts, ensembles and transport plans; every function draws on one Axes and returns it.

Colours are by M. Okabe and K. Ito (2008), and viridis, which the colour-blind can distinguish.
"""

from otloss._foreign import explain_missing_names as _explain_missing_names
from otloss.plotting.confusion import plot_confusion_matrix as plot_confusion_matrix
from otloss.plotting.forecasts import plot_cdfs as plot_cdfs
from otloss.plotting.forecasts import plot_reliability as plot_reliability
from otloss.plotting.pit import plot_pit as plot_pit
from otloss.plotting.plan import plot_transport_plan as plot_transport_plan

__all__ = ["plot_cdfs", "plot_confusion_matrix", "plot_pit", "plot_reliability", "plot_transport_plan"]

_explain_missing_names(__name__, __all__)
