"""The kernels of Newton's method on the cells of a plan, for `newton` and for barycenters.

    newton_numba    the notation, stages, rounds and the search along a step    numbers             the constants
    cells_numba     the plan on few cells or over all pairs                     equations_numba     Newton's equations

tests/otloss/newton_reference.py has the reference implementation, with dense matrices.
"""
