"""The columns of what the Sinkhorn kernels write for each problem; `sinkhorn_call.run_kernel` explains them."""

ERROR, ITERATIONS, POTENTIAL_ERROR, SPREAD, LEAST_EIGENVALUE = range(5)
