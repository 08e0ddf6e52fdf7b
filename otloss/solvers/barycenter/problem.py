"""What the algorithms for barycenters share: the problem, the potentials, the result and the thresholds.

Small problems on a CPU are arrays of numpy, whose calls take a third of the time: an `Array` is one of these or a
tensor, and `xp` is numpy or torch.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from otloss._checks import needs_torch
from otloss.costs import Cost

Array = Any


@dataclass(frozen=True)
class Numbers:
    """The thresholds of the algorithms. Errors, changes and masses are shares of the mass of the histograms."""

    # The plain iteration (`iteration`)
    cycle: int = 10  # iterations between two extrapolations; 5 take twice the iterations, 20 are too long for easy ones
    largest_extrapolation: float = 2.0  # The logarithm of a bin moves by no more, or a bin may lose its mass for good.
    ridge: float = 1e-12  # It keeps the equations of an extrapolation and of a step regular.
    largest_contraction: float = 0.999  # the factor of one iteration or cycle; an error is measured no better
    window: int = 3  # cycles over which ratios are measured at least
    patience: int = 500  # Newton's method follows where more iterations are left than what one of its runs costs.
    # Extrapolations make the errors of debiased barycenters irregular, so that their fall is checked after more cycles,
    # and after still more where Newton's method has failed.
    debiased_checked_after: int = 20
    hard_checked_after: int = 150
    tiny: float = float(np.finfo(np.float32).tiny)  # in place of 0 in quotients and logarithms, in float32 too
    # Arrays of numpy take a third to half of the time of tensors up to these entries of the histograms and of one
    # factor of exp(-C / epsilon); matrices of 784 x 784 take nearly twice the time.
    numpy_entries: int = 2**14
    numpy_kernel: int = 2**18
    largest_matrix: int = 2**24  # entries of exp(-C / epsilon) that are held
    smallest_exponent: float = -690.0  # exp of it is near the least normal number; products with smaller ones are slow.
    negligible_share: float = 1e-17  # of a sum, below its rounding
    # Newton's method on the dual, for plain barycenters (`ascent`)
    ascent_entries: int = 2**24  # plans of one problem; each entry takes 20 bytes on each thread
    entries_until_check: int = 2**24  # plans times iterations, a few tenths of a second, until its kernel is looked for
    ascent_steps: int = 1000  # Hard clouds take up to a hundred.
    # Errors of barycenters over errors of the marginals: up to 1.5 for 69 of 70 random problems, 4.4 for one
    ascent_factor: float = 2.0
    plain_after: int = 1500  # iterations where Newton's method has failed: extrapolations have helped by then
    near_plain: float = 1e-5  # Errors of debiased barycenters may be told ten times too small where methods fail.
    iterated_entries: int = 2**16  # plans of the problems that are open, whose 10,000 iterations take seconds
    # Newton's method for debiased barycenters (`newton`)
    newton_bins: int = 256  # A step costs k bins^3.
    newton_entries: int = 2**22  # plans of all problems together, which a step holds several times
    steps: int = 60  # at each tau, at most
    first_tau: float = 0.01  # 0.25 takes up to twice the time; at 1e-4 some do not converge.
    fall_of_tau: float = 32.0  # Smaller falls take more steps, and end at a larger tau, as rounding adds up.
    smallest_tau: float = 5e-15  # Rounding hides the equations below.
    sufficient_change: float = 1e-5  # ends the steps at one tau, unless the tolerance is smaller
    smallest_change: float = 1e-12  # Smaller changes are rounding.
    stalled_steps: int = 3  # steps whose change does not halve: rounding stops Newton's method at this tau
    near: float = 3e-3  # Smaller errors that stop to fall are the rounding that the methods end with.
    fruitless_steps: int = 1  # steps in a row that do not halve the error
    longest_step: float = 2.0  # in the logarithm of a bin with mass; steps twice as long diverge for some problems
    empty_log: float = (
        -25.0
    )  # the logarithm of a bin over the largest one below which its mass counts as none in a step
    small_change: float = 1e-3  # Steps with larger ones have not converged.
    empty_bin: float = 80.0  # log of the largest d over the least one that is told from 0
    # The error of debiased barycenters (`debiased_error`)
    # Ten times closer ones tell the same errors within a factor of 2.
    taus: tuple[float, ...] = (1e-6, 1e-8, 1e-10, 1e-12, 1e-14)
    share_of_step: float = 0.9  # of the error: from there on smaller tau are not tried
    iterations_of_plan: int = 10  # The plan of a histogram to itself converges by a factor of 2 in each.
    error_margin: float = 1.5  # Without it a few errors are too small by a few per cent, as a step is linear.
    negative_eigenvalue: float = 1e-8  # of exp(-C / epsilon), over its largest entry: distances round to smaller ones
    # Derivatives (`gradient`)
    gradient_tolerance: float = 1e-10  # of debiased barycenters with few bins (`find_barycenter`)
    gradient_entries: int = 2**26  # plans of all problems together, which the gradient holds
    # With the ridge of a step the derivatives of 8 of 80 hostile debiased problems are more than 0.5 % off, whatever
    # the tau, and with this one of none. Fine details may then be 1 % off.
    debiased_gradient_ridge: float = 1e-10
    gradient_taus: tuple[float, ...] = (1e-6, 1e-7, 1e-8, 1e-9, 1e-10, 1e-11, 1e-12, 1e-13, 1e-14)
    directions: int = 4  # in which the derivatives at these tau are compared
    gradient_change: float = 0.01  # Larger ones warn.
    no_mass: float = 1e-12  # the share of the mass below which a bin counts as empty
    compared_mass: float = 1e-30  # Potentials of bins with less are cut off; the gradient there tells nothing.


NUMBERS = Numbers()
UNKNOWN = 2.0  # the error where nothing is known: two histograms of mass one differ by no more


def put(t: Array, choice: Array, part: Array) -> Array:
    """Return a copy of t with the part in the chosen places."""
    t = t.clone() if isinstance(t, Tensor) else t.copy()
    t[choice] = part
    return t


def from_tensor(xp: Any, t: Tensor) -> Array:
    return t if xp is torch else t.numpy()


def to_tensor(t: Array) -> Tensor:
    """Return a tensor where the numbers lie, whatever the default device is."""
    return t if isinstance(t, Tensor) else torch.from_numpy(t)


@dataclass(frozen=True)
class Potentials:
    """The logarithms of u (..., k, n), d (..., n) and the barycenter a (..., n)."""

    log_u: Array
    log_d: Array
    log_a: Array

    def map(self, function: Callable[[Array], Array]) -> Potentials:
        return Potentials(*(function(t) for t in (self.log_u, self.log_d, self.log_a)))

    def choose(self, choice: Array) -> Potentials:
        return self.map(lambda t: t[choice])

    def replace(self, choice: Array, other: Potentials) -> Potentials:
        """Return these potentials, with the other ones in the places of the chosen problems."""
        pairs = ((self.log_u, other.log_u), (self.log_d, other.log_d), (self.log_a, other.log_a))
        return Potentials(*(put(t, choice, part) for t, part in pairs))


@dataclass(frozen=True)
class BarycenterResult:
    """What an algorithm returns.

    Attributes:
        potentials: the last potentials, or the potentials of the least error.
        error: (...), an estimate of the sum of the absolute errors of the barycenter, as a share of its mass. The
            equations give it for debiased barycenters with few bins (`debiased_error`). For others it is what the last
            steps changed, and what steps with their contraction still change.
        iterations: how many iterations or steps were taken.
    """

    potentials: Potentials
    error: Array
    iterations: int

    def choose_better(self, choice: Array, other: BarycenterResult, *, at_ties: bool = False) -> BarycenterResult:
        """Return this result, with the other one, of the chosen problems, where its error is smaller, or equal too."""
        is_better = other.error <= self.error[choice] if at_ties else other.error < self.error[choice]
        return self.replace(put(choice, choice, is_better), other.choose(is_better))

    def choose(self, choice: Array) -> BarycenterResult:
        return BarycenterResult(self.potentials.choose(choice), self.error[choice], self.iterations)

    def replace(self, choice: Array, other: BarycenterResult) -> BarycenterResult:
        """Return this result, with the other one in the places of the chosen problems."""
        return BarycenterResult(
            self.potentials.replace(choice, other.potentials),
            put(self.error, choice, other.error),
            self.iterations + other.iterations,
        )

    def reshape(self, batch: tuple[int, ...]) -> BarycenterResult:
        """Return the result of a flat batch in the shape of the batch."""
        potentials = self.potentials.map(lambda t: t.reshape(*batch, *t.shape[1:]))
        return BarycenterResult(potentials, self.error.reshape(batch), self.iterations)

    def restore(self, problem: BarycenterProblem) -> BarycenterResult:
        """Return the result as tensors."""
        return BarycenterResult(self.potentials.map(problem.restore), problem.restore(self.error), self.iterations)


@dataclass(frozen=True)
class BarycenterProblem:
    """Histograms p and their weights of one precision and batch shape, and a cost without a batch."""

    p: Float[Tensor, "*batch k m"]
    cost: Cost
    weights: Float[Tensor, "*batch k"]
    epsilon: float
    debiased: bool
    dtype: torch.dtype  # the dtype of the barycenter

    @property
    def mass(self) -> Float[Tensor, "*batch"]:
        return self.p.sum((-2, -1)) / self.p.shape[-2]

    @property
    def xp(self) -> Any:
        """Numpy, or torch where arrays of numpy do not serve."""
        is_small = self.p.numel() <= NUMBERS.numpy_entries and self.p.device.type == "cpu"
        return np if is_small and not needs_torch(self.p, self.weights) else torch

    def restore(self, t: Array) -> Tensor:
        """Return the array as a tensor of the kind of p."""
        return torch.as_tensor(t, dtype=self.p.dtype, device=self.p.device)

    @property
    def plan_entries(self) -> int:
        """The entries of the plans of one problem."""
        return self.p.shape[-2] * math.prod(self.cost.shape)

    @property
    def suits_ascent(self) -> bool:
        """Whether Newton's method on the dual applies."""
        if self.debiased or self.plan_entries > NUMBERS.ascent_entries or self.p.dtype != torch.float64:
            return False
        return not needs_torch(self.p, self.weights, *self.cost.tensors())

    @property
    def suits_newton(self) -> bool:
        """Whether Newton's method at falling tau applies."""
        n = self.cost.shape[0]
        is_small = n <= NUMBERS.newton_bins and self.p.numel() * n <= NUMBERS.newton_entries
        return self.debiased and is_small and self.p.dtype == torch.float64

    def detach(self) -> BarycenterProblem:
        """Return the problem without a graph and without tangents."""
        cost = self.cost.with_tensors({id(t): t.detach() for t in self.cost.tensors()})
        return dataclasses.replace(self, p=self.p.detach(), weights=self.weights.detach(), cost=cost)

    def flatten(self) -> BarycenterProblem:
        """Return the problem with one axis of batch."""
        p = self.p.reshape(-1, *self.p.shape[-2:])
        return dataclasses.replace(self, p=p, weights=self.weights.reshape(len(p), -1))

    def choose(self, choice: Bool[Tensor, "*batch"]) -> BarycenterProblem:
        return dataclasses.replace(self, p=self.p[choice], weights=self.weights[choice])

    def give_mass(self, log_a: Float[Tensor, "*batch n"]) -> Float[Tensor, "*batch n"]:
        """Return a with the mass of the histograms."""
        return torch.softmax(log_a, -1) * self.mass.unsqueeze(-1)

    def first_potentials(self) -> Potentials:
        log_u = torch.zeros_like(self.p[..., :1]).expand(*self.p.shape[:-1], self.cost.shape[0])
        return Potentials(log_u, log_u[..., 0, :], log_u[..., 0, :])
