"""The kernels of Sinkhorn's iteration, for `sinkhorn_cpu` (numba) and `sinkhorn_gpu` (Triton).

    balanced_numba      the notation, balanced and symmetric problems       unbalanced_numba    unbalanced problems
    shared_numba        what they compute once a problem or an absorption   steps_numba         the updates
    small_triton        whole small problems in one launch

`sinkhorn` is the reference implementation of all.
"""
