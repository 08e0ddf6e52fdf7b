"""Optimal transport as a loss, for PyTorch."""

from importlib.metadata import version as _version

from otloss import costs as costs

__version__ = _version("otloss")

__all__ = ["__version__", "costs"]
