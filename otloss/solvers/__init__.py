"""Solvers of transport problems, a file each; their functions are public as `otloss.emd`, `otloss.solve` and so on."""
