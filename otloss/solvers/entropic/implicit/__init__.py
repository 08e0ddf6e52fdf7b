"""Potentials with a graph by the implicit function theorem, where the dense equations of `derivatives` are too large.

grid    between the cells of large grids, along axes    products    any cost, by streamed products with the plan
"""
