"""The numbers of Newton's method, which its kernels read as constants."""

from __future__ import annotations

from typing import NamedTuple


class NewtonNumbers(NamedTuple):
    """The numbers of `newton_numba` and of the files that it calls.

    Where a row of `benchmarks.hard_clouds` is named ("divergence 500 0.05": work, size, blur), the kernel takes so much
    more time in it with the other value. The rest are guards: no row changes with them.

    Attributes:
        stage_factor: epsilon of a stage over epsilon of the stage after it. 16: 1.5 times in divergence 16x256 0.05.
        stages_from_exact: stages before the last, from an exact start. None: 1.4 times in divergence 500 0.01; two:
            1.5 times in divergence 2000.
        tolerance_of_stage: the tolerance of the stages before the last. 0.1 and 0.001: 1.5 times in divergence 500 0.01
            and 2000.
        first_epsilon_over_penalty: from a start of zeros, epsilon of the first stage over the marginal penalty, at
            most. 0.5: 2.0 times in unbalanced 16x256 0.05.
        max_steps_of_round: the largest number of steps on the same cells. 2: 1.4 times in divergence 500 0.01.
        steps_before_size: steps of the last stage before the size of potentials may end it.
        updates: exact updates of both sides before each step. None: 1.2 to 1.4 times in divergence 2000 0.05.
        error_reduction, error_share: a round ends when its error on the cells is this share of the error at its start,
            or this share of the tolerance. 0.1 and 0.9: 1.5 and 1.2 times in divergence 16x256 0.05.
        omitted_share: what the cells that are left out hold, as a share of the error that the round aims at.
        ridge, smallest_ridge: (ridge error + smallest_ridge) t is added to the diagonal of H, which shortens steps of
            columns that hardly exchange mass with others. Without `ridge` divergence 500 0.01 does not converge.
        max_products, residual: conjugate gradients end after so many products with H, or at the share
            residual^2 min(1, error) of the energy.
        largest_update: the largest change of b by an update. Masses of columns that are farther away underflow.
        remaining_derivative: a search allows a derivative down to minus this share of the first one. 0.1: 1.2 times in
            divergence 16x256 0.05.
        max_trials: the largest number of lengths that a search tries.
        octaves, shares_of_octave: in rows of many cells, so many shares of each of these octaves enter the factor, and
            all of them where conjugate gradients then take more than `max_products`. All at once: 1.4 times in
            unbalanced 16x256 0.05.
        max_sorted: rows of at most so many cells enter the factor as they are.
        golden_ratio: the fractional parts of its multiples stand for random numbers.
        relative_rounding: the rounding of potentials, relative to the largest.
        negligible: the share of a row that may be left out of its sum, and the share of its weight below which a
            column counts as empty.
    """

    stage_factor: float = 4.0
    stages_from_exact: int = 1
    tolerance_of_stage: float = 1e-2
    first_epsilon_over_penalty: float = 0.05
    max_steps_of_round: int = 6
    steps_before_size: int = 10
    updates: int = 2
    error_reduction: float = 1e-2
    error_share: float = 0.3
    omitted_share: float = 1e-2
    ridge: float = 0.02
    smallest_ridge: float = 1e-13
    max_products: int = 150
    residual: float = 0.3
    largest_update: float = 50.0
    remaining_derivative: float = 0.5
    max_trials: int = 40
    octaves: int = 64
    shares_of_octave: int = 4
    max_sorted: int = 16
    golden_ratio: float = 0.6180339887498949
    relative_rounding: float = 1e-14
    negligible: float = 1e-17


NEWTON = NewtonNumbers()
