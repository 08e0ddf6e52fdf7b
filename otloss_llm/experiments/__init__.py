"""Comparisons of objectives: arms, measurements, reports."""
