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

    potentials      the search, its accuracy, warnings      ladder      which methods, in which order, and when it ends
    interface       what all methods share                  solution    value, plan, <C, P>, duality gap, bounds

The methods of the ladder are

    sinkhorn        any cost and device: the reference      sinkhorn_cpu, sinkhorn_gpu      matrices; small problems
    clusters        large clouds                            coarse_images       large images
    newton          on the cells of a plan                  newton_products     by products with the plan, on a device
    sinkhorn_last_resort    in float64, where others end

and `dense_newton` makes potentials accurate after it. The folders have what several files or one algorithm need:

    equations           the two updates, Newton's equations, and the error of potentials
    sinkhorn_kernels    for sinkhorn_cpu, sinkhorn_gpu      newton_kernels      for newton and barycenters
    implicit            potentials with a graph

Newton's method starts from exact potentials, so this folder imports `exact`. An exact solver that starts from entropic
potentials therefore gets `assignment_start` as an argument from its caller, and does not import it.
"""
