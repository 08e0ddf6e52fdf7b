"""Exact transport: the network simplex, assignments along shortest paths, and clouds on few cells."""
