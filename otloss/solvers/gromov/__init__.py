"""Fused Gromov-Wasserstein transport."""

APART = 1e-9  # Plans that differ by more of their mass are two.
