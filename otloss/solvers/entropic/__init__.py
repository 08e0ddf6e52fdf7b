"""Entropic transport: the potentials of a reduced problem, and its solution.

    value = min over P >= 0 of  <C, P> + epsilon KL(P | p q^T / M)  and  P 1 = p, P^T 1 = q          (balanced)
                                                  or  + rho_p KL(P 1 | p) + rho_q KL(P^T 1 | q)  (unbalanced)

Here KL(a | b) = sum a log(a / b) - a + b, and rho_p and rho_q are the option `marginal_penalty`, infinite for a side
that is kept. M is the mass of p and q in balanced problems, and one in unbalanced ones. The optimal plan is
P_ij = p_i q_j / M exp((f_i + g_j - C_ij) / epsilon). With

    softmin(g)_i = -epsilon log sum_j q_j / M exp((g_j - C_ij) / epsilon)

and k = 1 in balanced problems, k_p = rho_p / (rho_p + epsilon) in unbalanced ones and k_q from rho_q, potentials solve

    f = k_p softmin(g),  g = k_q softmin(f)

Sources: M. Cuturi, Sinkhorn Distances, 2013; T. Séjourné, J. Feydy, F.-X. Vialard, A. Trouvé, G. Peyré, Sinkhorn
Divergences for Unbalanced Optimal Transport, arXiv 1910.12958.

    potentials      the search from a problem to its potentials: the place to begin reading
    ladder          which methods search, in which order, and when the search ends
    interface       what all methods share: start, budget, result, `applies` and `run`
    objectives      the value and the sums of the plan at potentials
    gap             a bound of how far the value is from the optimum
    solution        all of these for the caller

The methods are in these files; the docstring of `ladder` says when each runs:

    sinkhorn, sinkhorn_cpu, sinkhorn_gpu    Sinkhorn's iteration in torch, by numba kernels, and by a Triton kernel
    sinkhorn_float64                        Sinkhorn's iteration in float64, of images and as the last method
    clusters, coarse_images                 Sinkhorn's iteration with the help of a coarser problem
    newton, newton_products                 Newton's method on cells of the plan, and by products with the plan

Before the ladder `equal_points` merges equal points of clouds. Around it `meanwhile` iterates while a kernel is
compiled, `newton_batch` takes the problems of Newton's method out of a batch, `dense_newton` makes potentials accurate,
`messages` has the warnings and errors of a search, and `arithmetic` the dtypes. `assignment_start` is for exact
assignments.

    equations/          the two updates, Newton's equations, and the error of potentials
    sinkhorn_kernels/   for sinkhorn_cpu and sinkhorn_gpu
    newton_kernels/     for newton and for barycenters
    implicit/           potentials with a graph

Newton's method starts from exact potentials, so this folder imports `exact`. An exact solver that starts from entropic
potentials therefore gets `assignment_start` as an argument from its caller, and does not import it.
"""
