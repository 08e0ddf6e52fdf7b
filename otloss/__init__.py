"""Optimal transport as a loss, for PyTorch."""
