"""Entropic transport: the problem, its potentials, its value, and its gradients.

    value = min over P >= 0 of  <C, P> + epsilon KL(P | p q^T)  and  P 1 = p, P^T 1 = q              (balanced)
                                                  or  + rho KL(P 1 | p) + rho KL(P^T 1 | q)      (unbalanced)

with `KL(a | b) = sum a log(a / b) - a + b` and rho the option `marginal_penalty`. Balanced, where both masses are
given, the last two terms of KL are a constant, and left out. The optimal plan is
`P_ij = p_i q_j exp((f_i + g_j - C_ij) / epsilon)`, where the potentials solve, with
`softmin(g)_i = -epsilon log sum_j q_j exp((g_j - C_ij) / epsilon)`,

    f = k softmin(g),  g = k softmin(f),     k = 1, or rho / (rho + epsilon)

and the value is the dual's, `D = f.p + g.q - epsilon (sum P - mass)`; unbalanced, `rho (1 - exp(-f / rho))` stands
in place of f, and of g, and mass_p mass_q in place of the mass. Sources: M. Cuturi, Sinkhorn Distances, 2013;
T. Séjourné, J. Feydy, F.-X. Vialard, A. Trouvé, G. Peyré, Sinkhorn Divergences for Unbalanced Optimal Transport,
arXiv 1910.12958.

    problem      the checked problem and its options     dense      small dense problems in one call of the kernel
    potentials   which search, and when it ends          value      D, marginals, <C, P>, KL, the duality gap
    log_domain   Sinkhorn for any cost and device        gradients  envelope theorem, implicit derivatives
    multiscale   from clusters to points                 geomloss   the adapter for GeomLoss and KeOps
    newton       Newton's method on the dual
"""
