"""The equations that potentials solve, how they are solved or tested without a matrix, and how far off potentials are.

updates     f = k_p softmin(g), g = k_q softmin(f)      dual        Newton's equations, and the error of potentials
conjugate_gradients     equations known by products     slow_modes  the error of potentials by products
looks       when the host looks at a solution on a device
"""
