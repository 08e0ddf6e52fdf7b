"""Fused Gromov-Wasserstein transport."""
