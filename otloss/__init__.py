"""Optimal transport as a loss, for PyTorch."""

from importlib.metadata import version as _version

from otloss import costs as costs
from otloss._bounds import lower_bound as lower_bound
from otloss._bounds import upper_bound as upper_bound
from otloss._exact import emd as emd
from otloss._onedim import cdf_distance as cdf_distance
from otloss._onedim import wasserstein_1d as wasserstein_1d

__version__ = _version("otloss")

__all__ = [
    "__version__",
    "cdf_distance",
    "costs",
    "emd",
    "lower_bound",
    "upper_bound",
    "wasserstein_1d",
]
