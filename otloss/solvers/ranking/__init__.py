"""Differentiable sorting, ranks and top-k."""
