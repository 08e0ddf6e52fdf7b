"""Optimal-transport training of causal language models."""
