"""What transport is used for: clouds, matchings, sorting, graphs, texts, critics, ensembles.

Each file is one application of the solvers, and an example of how to build another. Import the functions from `otloss`
and `otloss.losses`; nothing in the core imports this folder but the files that hand names on.
"""
