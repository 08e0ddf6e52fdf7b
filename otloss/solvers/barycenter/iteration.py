"""The plain iteration for barycenters, with extrapolation.

With K = exp(-C / epsilon) the plans are diag(u_k) K diag(v_k), and an iteration is

    v_k = p_k / K^T u_k,   a = d prod_k (K v_k)^w_k,   u_k = a / K v_k,   d = 1, or debiased sqrt(d a / K d)

It runs in products with K, for images axis by axis, as long as its numbers fit float64, and then in logarithms.

Ten iterations are a cycle. Let x_i = (log u_k, log d) be its iterates, and r_i = x_(i+1) - x_i. The next cycle starts
at the sum of s_i x_(i+1), with the s_i of sum one for which the sum of s_i r_i is least in squares weighted by the
masses (R. P. Eddy, Extrapolating to the limit of a vector sequence, 1979): exact for a linear iteration with few
contractions.

The error of a cycle is the change in its last iteration over one minus the contraction, and at least the distance to
the extrapolation. It is divided by one minus the ratio of the errors of cycles: where they fall slowly, each of them
misses what the later cycles still change.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from otloss.costs import Cost
from otloss.solvers.barycenter.debiased_error import HistogramDetails, find_error
from otloss.solvers.barycenter.equations import DenseProblem, linearise, softmax
from otloss.solvers.barycenter.problem import (
    NUMBERS,
    UNKNOWN,
    Array,
    BarycenterProblem,
    BarycenterResult,
    Potentials,
    from_tensor,
    to_tensor,
)


def iterate(
    problem: BarycenterProblem,
    start: Potentials,
    tolerance: float,
    max_iterations: int,
    *,
    patience: float = math.inf,
    checked_after: int = 0,
    plain_after: float = math.inf,
) -> BarycenterResult:
    """Iterate until the error of all problems is small, or one of them needs more than `patience` further iterations.

    The latter is checked after `checked_after` cycles. Iterations after `plain_after` are not extrapolated. The error
    of the result is by the equations where these are small.
    """
    step = choose_step(problem)
    xp, count = step.xp, problem.p.shape[-2]
    rows = [start.log_u, start.log_d.unsqueeze(-2)] if problem.debiased else [start.log_u]
    logs = begin = from_tensor(xp, torch.cat(rows, -2))
    errors = CycleErrors(xp, xp.full_like(from_tensor(xp, problem.mass), UNKNOWN), problem.debiased)
    log_a, iterations = from_tensor(xp, start.log_a), 0
    length = NUMBERS.cycle
    while iterations < max_iterations:
        cycle, length = step.run(begin, min(length, max_iterations - iterations)), NUMBERS.cycle
        if not cycle.is_finite(xp):
            if isinstance(step, LogStep):
                break
            step, begin = LogStep.build(problem, xp), logs
            continue
        iterations, logs, log_a = iterations + cycle.count, cycle.logs[..., -1, :, :], cycle.log_a
        error, extrapolation = judge_cycle(xp, step.weights, cycle, tolerance, debiased=problem.debiased)
        begin = extrapolation if iterations < plain_after else logs
        errors.append(error)
        is_open = ~(errors.current <= tolerance)
        is_checked = len(errors.all) > checked_after
        if not is_open.any() and isinstance(step, ProductStep) and step.has_underflow(logs):
            step, begin, length = LogStep.build(problem, xp), logs, 2  # to see whether mass moves where products are 0
        elif not is_open.any() or (is_checked and errors.is_slow(is_open, tolerance, patience)):
            break
    log_d, error = logs[..., -1, :] if problem.debiased else start.log_d, errors.current
    last = Potentials(logs[..., :count, :], log_d, log_a)
    if problem.suits_newton:  # The changes of iterations miss what is very slow.
        dense = DenseProblem.build(problem, xp)
        error, _ = find_error(HistogramDetails.build(dense), linearise(dense, last), tolerance)
    return BarycenterResult(last, error, iterations).restore(problem)


@dataclass(frozen=True)
class Cycle:
    """The iterates of a cycle.

    Attributes:
        logs: (..., count + 1, rows, n), log u_k and debiased log d, with the start.
        log_a: (..., n), after the last iteration.
    """

    logs: Array
    log_a: Array

    @property
    def count(self) -> int:
        return self.logs.shape[-3] - 1

    def is_finite(self, xp: Any) -> bool:
        return bool(xp.isfinite(self.logs[..., -1, :, :]).all() and xp.isfinite(self.log_a).all())


@dataclass
class CycleErrors:
    """The errors of the last cycles.

    Errors of debiased barycenters are irregular, as an extrapolation may come back near the iterate by chance: there
    the error is the larger one of two cycles in a row.
    """

    xp: Any
    current: Array  # (...), an estimate of the error
    is_irregular: bool
    latest: Array = UNKNOWN  # the estimate of the last cycle alone
    ratio: Array = 0.0  # the errors of two cycles divided, over the later half of the cycles
    all: list[Array] = field(default_factory=list)

    def append(self, error: Array) -> None:
        error = self.xp.where(error < UNKNOWN, error, UNKNOWN)  # also where it is NaN
        self.all.append(error)
        if span := min(len(self.all) - 1, max(NUMBERS.window, len(self.all) // 2)):
            ratio = error / self.all[-1 - span].clip(min=NUMBERS.tiny)
            self.ratio = (ratio ** (1 / span)).clip(max=NUMBERS.largest_contraction)
        previous, self.latest = self.latest, (error / (1 - self.ratio)).clip(max=UNKNOWN)
        self.current = self.latest.clip(min=previous) if self.is_irregular else self.latest

    def is_slow(self, is_open: Array, tolerance: float, patience: float) -> bool:
        """Return whether one of the open problems needs more than `patience` further iterations."""
        logarithms = self.xp.log(tolerance / self.current) / self.xp.log(self.ratio + 0 * self.current)
        return bool((is_open & (NUMBERS.cycle * logarithms > patience)).any())


def judge_cycle(xp: Any, weights: Array, cycle: Cycle, tolerance: float, *, debiased: bool) -> tuple[Array, Array]:
    """Return the error (...) after a cycle, and the logarithms from which the next one starts.

    The error is the last change over one minus the contraction, and at least the distance to the extrapolation.
    """
    last = cycle.logs[..., -1, :, :]
    if cycle.count == 1:
        return xp.full_like(cycle.log_a[..., 0], UNKNOWN), last
    masses = weights * softmax(xp, cycle.log_a)[0][..., None, :]  # the marginal of the rows
    changes = cycle.logs[..., 1:, :, :] - cycle.logs[..., :-1, :, :]
    previous_change, last_change = ((masses * abs(changes[..., place, :, :])).sum(-1).sum(-1) for place in (-2, -1))
    contraction = (last_change / previous_change.clip(min=NUMBERS.tiny)).clip(max=NUMBERS.largest_contraction)
    error = last_change / (1 - contraction)
    # An extrapolation costs as much as a cycle of few bins, and may spare one. It also shows the slow changes of
    # debiased barycenters that hide in fast ones.
    if not debiased and not (error * contraction**NUMBERS.cycle > tolerance).any():
        return error, last
    move = extrapolate(xp, masses, changes)
    return xp.maximum(error, (masses * abs(move)).sum(-1).sum(-1)), last + move


def extrapolate(xp: Any, masses: Array, changes: Array) -> Array:
    """Return the move from the last iterate to the extrapolation."""
    root = masses[..., None, :, :] ** 0.5
    rows = (changes[..., 1:, :, :] - changes[..., :-1, :, :]) * root
    shape = rows.shape
    rows = rows.reshape(*shape[:-2], -1)
    scale = ((rows * rows).sum(-1) ** 0.5).clip(min=NUMBERS.tiny)[..., None]
    rows = rows / scale
    system = rows @ rows.swapaxes(-1, -2)
    places = range(shape[-3])
    system[..., places, places] += NUMBERS.ridge
    right = rows @ (changes[..., -1:, :, :] * root).reshape(*shape[:-3], -1, 1)
    share = xp.linalg.solve(system, right) / scale
    move = -(share.swapaxes(-1, -2) @ changes[..., 1:, :, :].reshape(*shape[:-2], -1)).reshape(*shape[:-3], *shape[-2:])
    return move.clip(-NUMBERS.largest_extrapolation, NUMBERS.largest_extrapolation)


def choose_step(problem: BarycenterProblem) -> LogStep | ProductStep:
    """Return the step in products, where the kernel can be held, or in logarithms."""
    is_wide = problem.p.dtype == torch.float64
    kernel = build_gibbs_kernel(problem.cost, problem.epsilon) if is_wide else None
    if kernel is None:
        return LogStep.build(problem, problem.xp)
    is_small = max(factor.numel() for factor in kernel.factors) <= NUMBERS.numpy_kernel
    xp = problem.xp if is_small else torch
    kernel = replace(kernel, factors=tuple(from_tensor(xp, factor) for factor in kernel.factors))
    p, shares = from_tensor(xp, problem.p), from_tensor(xp, problem.weights)[..., None, :]
    return ProductStep(xp, weigh_rows(problem, xp), kernel, p, shares, problem.debiased)


def weigh_rows(problem: BarycenterProblem, xp: Any) -> Array:
    ones = torch.ones_like(problem.weights[..., :1])
    rows = torch.cat([problem.weights, ones], -1) if problem.debiased else problem.weights
    return from_tensor(xp, rows.unsqueeze(-1))


@dataclass(frozen=True)
class LogStep:
    """Iterations in logarithms, by torch."""

    xp: Any
    weights: Array
    problem: BarycenterProblem
    transposed: Cost
    log_p: Tensor

    @staticmethod
    def build(problem: BarycenterProblem, xp: Any = torch) -> LogStep:
        return LogStep(xp, weigh_rows(problem, xp), problem, problem.cost.T, problem.p.log())

    def run(self, logs: Array, iterations: int) -> Cycle:
        count, debiased = self.problem.p.shape[-2], self.problem.debiased
        now = Potentials(logs[..., :count, :], logs[..., -1, :], logs[..., -1, :])
        history = [logs]
        for _ in range(iterations):
            now = self.update(now)
            history.append(self.xp.concatenate([now.log_u, now.log_d[..., None, :]], -2) if debiased else now.log_u)
        return Cycle(self.xp.stack(history, -3), now.log_a)

    def update(self, potentials: Potentials) -> Potentials:
        cost, epsilon, weights = self.problem.cost, self.problem.epsilon, self.problem.weights.unsqueeze(-1)
        log_u, log_d = (to_tensor(t) for t in (potentials.log_u, potentials.log_d))
        log_v = self.transposed.softmin(epsilon * log_u, epsilon) / epsilon
        log_kv = cost.softmin(epsilon * (self.log_p + log_v), epsilon) / -epsilon
        log_a = (weights * log_kv).sum(-2)
        if self.problem.debiased:
            log_a = log_d + log_a
            log_d = (log_d + log_a + cost.softmin(epsilon * log_d, epsilon) / epsilon) / 2
        updated = Potentials(log_a.unsqueeze(-2) - log_kv, log_d, log_a)
        return updated.map(lambda t: from_tensor(self.xp, t))


@dataclass(frozen=True)
class ProductStep:
    """Iterations of u, d and a themselves; d and a have an axis of length one for the histograms."""

    xp: Any
    weights: Array
    kernel: GibbsKernel
    p: Array
    shares: Array  # (..., 1, k), the weights of the histograms
    debiased: bool

    def has_underflow(self, logs: Array) -> bool:
        """Whether entries and clamps that products take for smallest numbers may have a share in a sum of products."""
        if self.kernel.smallest_log - float(abs(logs).max()) >= NUMBERS.smallest_exponent:
            return False
        count, tiny = self.p.shape[-2], math.exp(NUMBERS.smallest_exponent)
        u = self.xp.exp(logs[..., :count, :])
        sums = self.kernel.transposed_product(u)
        v = self.p / sums
        factors_and_sums = [(u, sums[self.p > 0]), (v, self.kernel.product(v))]
        if self.debiased:
            d = self.xp.exp(logs[..., count:, :])
            factors_and_sums.append((d, self.kernel.product(d)))
        return any(
            tiny * max(float(factor.max()), 1.0) * factor.shape[-1]
            > NUMBERS.negligible_share * max(float(total.min()), tiny)
            for factor, total in factors_and_sums
        )

    def run(self, logs: Array, iterations: int) -> Cycle:
        xp, count, tiny = self.xp, self.p.shape[-2], math.exp(NUMBERS.smallest_exponent)
        at_least = np.maximum if xp is np else torch.clamp_min  # `clip` of numpy takes four times as long
        start = at_least(xp.exp(logs), tiny)
        u, d = start[..., :count, :], start[..., count:, :]
        a, us, ds = d, [u], [d]
        for _ in range(iterations):
            kv = self.kernel.product(self.p / self.kernel.transposed_product(u))
            a = xp.exp(self.shares @ xp.log(kv))
            if self.debiased:  # Debiased barycenters have empty bins, where u, d and a fall below all numbers.
                a = at_least(a * d, tiny)
                d = at_least(xp.sqrt(d) * xp.sqrt(a / self.kernel.product(d)), tiny)
                ds.append(d)
            u = at_least(a / kv, tiny)
            us.append(u)
        rows = xp.stack(us, -3)
        if self.debiased:
            rows = xp.concatenate([rows, xp.stack(ds, -3)], -2)
        return Cycle(xp.log(rows), xp.log(a)[..., 0, :])


@dataclass(frozen=True)
class GibbsKernel:
    """Products with K = exp(-C / epsilon), as one matrix, or for images as one matrix for each axis.

    Attributes:
        smallest_log: the logarithm of the smallest entry, which may be 0 in the matrix.
    """

    factors: tuple[Array, ...]
    cells: tuple[int, ...]
    smallest_log: float

    def product(self, v: Array) -> Array:
        """K v, for v (..., m)."""
        if len(self.factors) == 1:
            return v @ self.factors[0].T
        shape = v.shape
        image = v.reshape(*shape[:-1], *self.cells) @ self.factors[-1]  # The factors of images are symmetric.
        for axis, factor in enumerate(self.factors[:-1]):
            image = factor @ image.reshape(*shape[:-1], *self.cells[:axis], self.cells[axis], -1)
        return image.reshape(shape)

    def transposed_product(self, u: Array) -> Array:
        """K^T u, for u (..., n)."""
        return u @ self.factors[0] if len(self.factors) == 1 else self.product(u)


def build_gibbs_kernel(cost: Cost, epsilon: float) -> GibbsKernel | None:
    """Return None where the matrix is too large to be held."""
    grid = cost.as_grid()
    n, m = cost.shape
    if grid is not None:
        costs, cells = [grid.axis_costs(axis) for axis in range(len(grid.cells))], grid.cells
    elif n * m <= NUMBERS.largest_matrix:
        costs, cells = [cost.dense()], (m,)
    else:
        return None
    smallest_log = sum(float(matrix.max()) for matrix in costs) / -epsilon
    return GibbsKernel(tuple(exponentiate(matrix, epsilon) for matrix in costs), cells, smallest_log)


def exponentiate(cost: Tensor, epsilon: float) -> Tensor:
    """Return exp(-C / epsilon), and 0 below the normal numbers, products with which are slow."""
    return torch.nn.functional.threshold((cost.double() / -epsilon).exp(), math.exp(NUMBERS.smallest_exponent), 0.0)
