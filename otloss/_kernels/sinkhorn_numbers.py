"""Numbers that the Sinkhorn kernels share with their callers and with the same iterations in torch."""

# The columns of what the kernels write for each problem; `sinkhorn_call.run_kernel` explains them.
ERROR, ITERATIONS, POTENTIAL_ERROR, SPREAD, LEAST_EIGENVALUE = range(5)

STAGE_FACTOR = 0.25  # epsilon of a stage over that of the stage before
FIRST_EPSILON = 0.25  # of the first stage over the largest cost, at most
LEAST_ITERATIONS, FEWEST, CLEARLY = 60, 20, 8.0  # before a problem may end as slow; FEWEST at CLEARLY the patience
SETTLING = 200  # iterations at most, once within the tolerance, until light bins have settled too
OVERSHOOT = 3.0  # an error this many times the least one shows that w is too large
LEAST_CHANGE = 0.02  # of w
LARGEST_RELAXED_STEP = 1.5  # larger steps of a potential over epsilon are not over-relaxed
# Of the error of g / epsilon by a linear model: larger ones count as infinite. The second order is the square of this.
LARGEST_ESTIMATE = 0.1
