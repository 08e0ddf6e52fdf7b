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
from dataclasses import dataclass, field
from typing import Protocol

import torch
from jaxtyping import Float
from torch import Tensor

from otloss.costs import Cost, GridCost
from otloss.solvers.barycenter.problem import NUMBERS, UNKNOWN, BarycenterProblem, BarycenterResult, Potentials


def iterate(
    problem: BarycenterProblem,
    start: Potentials,
    tolerance: float,
    max_iterations: int,
    *,
    patience: float = math.inf,
    judged_after: int = 0,
) -> BarycenterResult:
    """Iterate until the error of all problems is small, or one of them has more than `patience` iterations left.

    That is judged after `judged_after` cycles.
    """
    potentials, errors, iterations = start, CycleErrors(torch.full_like(problem.mass, UNKNOWN)), 0
    kernel = build_gibbs_kernel(problem.cost, problem.epsilon) if problem.p.dtype == torch.float64 else None
    step: Step = LogStep(problem, problem.cost.T, problem.p.log()) if kernel is None else ProductStep(problem, kernel)
    while iterations < max_iterations:
        cycle = step.run(start, min(NUMBERS.cycle, max_iterations - iterations))
        if not cycle.last.is_finite:
            if isinstance(step, LogStep):
                break
            step, start = LogStep(problem, problem.cost.T, problem.p.log()), potentials
            continue
        iterations, potentials = iterations + cycle.count, cycle.last
        start, error = potentials, torch.full_like(errors.current, UNKNOWN)
        if cycle.count > 1:
            masses, changes = weigh_changes(problem, cycle)
            error, contraction = find_error(masses, changes)
            # An extrapolation costs as much as a cycle of few bins, and may spare one. It also shows the slow changes
            # of debiased barycenters that hide in fast ones.
            if problem.debiased or bool((error * contraction**NUMBERS.cycle > tolerance).any()):
                start, distance = extrapolate(potentials, masses, changes)
                error = torch.maximum(error, distance)
        errors.append(error)
        is_open = ~(errors.current <= tolerance)
        is_judged = len(errors.all) > judged_after
        if not bool(is_open.any()) or (is_judged and errors.is_slow(is_open, tolerance, patience)):
            break
    tau = torch.full_like(potentials.log_a[..., :1], NUMBERS.gradient_tau)
    return BarycenterResult(potentials, errors.current, iterations, tau)


@dataclass(frozen=True)
class Cycle:
    """The iterates of a cycle.

    Attributes:
        log_u: (..., count + 1, k, n), with the start.
        log_d: (..., count + 1, 1, n), or (..., 1, 1, n) of plain barycenters.
        log_a: (..., n), after the last iteration.
    """

    log_u: Float[Tensor, "*batch iterates k n"]
    log_d: Float[Tensor, "*batch iterates 1 n"]
    log_a: Float[Tensor, "*batch n"]

    @property
    def count(self) -> int:
        return self.log_u.shape[-3] - 1

    @property
    def last(self) -> Potentials:
        return Potentials(self.log_u[..., -1, :, :], self.log_d[..., -1, 0, :], self.log_a)


@dataclass
class CycleErrors:
    """The errors of the last cycles."""

    current: Float[Tensor, "*batch"]  # an estimate of what is left of the error
    ratio: Float[Tensor, "*batch"] | float = 0.0  # of the errors of two cycles, over the later half of the cycles
    all: list[Tensor] = field(default_factory=list)

    def append(self, error: Float[Tensor, "*batch"]) -> None:
        error = error.nan_to_num(UNKNOWN).clamp(max=UNKNOWN)
        self.all.append(error)
        if span := min(len(self.all) - 1, max(NUMBERS.window, len(self.all) // 2)):
            ratio = (error / self.all[-1 - span]).nan_to_num(0.0) ** (1 / span)
            self.ratio = ratio.clamp(max=NUMBERS.largest_contraction)
        self.current = (error / (1 - self.ratio)).clamp(max=UNKNOWN)

    def is_slow(self, is_open: Tensor, tolerance: float, patience: float) -> bool:
        """Return whether one of the open problems has more than `patience` iterations left."""
        ratio = torch.as_tensor(self.ratio, dtype=self.current.dtype, device=self.current.device)
        iterations_left = NUMBERS.cycle * (torch.log(tolerance / self.current) / ratio.log())
        return bool((is_open & (iterations_left > patience)).any())


def weigh_changes(problem: BarycenterProblem, cycle: Cycle) -> tuple[Tensor, Tensor]:
    """Return the changes of log u_k and log d (..., count, rows, n), and before them the masses that weigh them."""
    masses = torch.softmax(cycle.log_a, -1).unsqueeze(-2)
    of_u = problem.weights.unsqueeze(-1) * masses
    if not problem.debiased:
        return of_u, cycle.log_u.diff(dim=-3)
    return torch.cat([of_u, masses], -2), torch.cat([cycle.log_u, cycle.log_d], -2).diff(dim=-3)


def find_error(masses: Tensor, changes: Tensor) -> tuple[Tensor, Tensor]:
    """Return the last change over one minus the contraction (...), and the contraction."""
    sums = (masses.unsqueeze(-3) * changes[..., -2:, :, :].abs()).sum((-2, -1))
    contraction = (sums[..., 1] / sums[..., 0]).nan_to_num(0.0).clamp(max=NUMBERS.largest_contraction)
    return sums[..., 1] / (1 - contraction), contraction


def extrapolate(last: Potentials, masses: Tensor, changes: Tensor) -> tuple[Potentials, Float[Tensor, "*batch"]]:
    """Return the potentials from which the next cycle starts, and their distance to the last ones."""
    root = masses.sqrt()
    rows = (changes.diff(dim=-3) * root.unsqueeze(-3)).flatten(-2)
    scale = torch.linalg.vector_norm(rows, dim=-1, keepdim=True).clamp(min=torch.finfo(rows.dtype).tiny)
    rows = rows / scale
    system = rows @ rows.mT + NUMBERS.ridge * torch.eye(rows.shape[-2], dtype=rows.dtype, device=rows.device)
    right = rows @ (changes[..., -1, :, :] * root).flatten(-2).unsqueeze(-1)
    share = torch.linalg.solve_ex(system, right).result / scale
    move = -(share.unsqueeze(-1) * changes[..., 1:, :, :]).sum(-3).nan_to_num(0.0)
    move = move.clamp(-NUMBERS.largest_extrapolation, NUMBERS.largest_extrapolation)
    count = last.log_u.shape[-2]
    log_d = last.log_d + move[..., count, :] if move.shape[-2] > count else last.log_d
    start = Potentials(last.log_u + move[..., :count, :], log_d, last.log_a)
    return start, (masses * move.abs()).sum((-2, -1))


class Step(Protocol):
    def run(self, potentials: Potentials, iterations: int) -> Cycle:
        """Return the iterates from the potentials on."""


@dataclass(frozen=True)
class LogStep:
    """Iterations of logarithms."""

    problem: BarycenterProblem
    transposed: Cost
    log_p: Float[Tensor, "*batch k m"]

    def run(self, potentials: Potentials, iterations: int) -> Cycle:
        history = [potentials]
        for _ in range(iterations):
            history.append(self.update(history[-1]))
        log_d = torch.stack([p.log_d for p in history], -2).unsqueeze(-2)
        return Cycle(torch.stack([p.log_u for p in history], -3), log_d, history[-1].log_a)

    def update(self, potentials: Potentials) -> Potentials:
        cost, epsilon, log_d = self.problem.cost, self.problem.epsilon, potentials.log_d
        log_v = self.transposed.softmin(epsilon * potentials.log_u, epsilon) / epsilon
        log_kv = cost.softmin(epsilon * (self.log_p + log_v), epsilon) / -epsilon
        log_a = log_d + (self.problem.weights.unsqueeze(-1) * log_kv).sum(-2)
        if self.problem.debiased:
            log_d = (log_d + log_a + cost.softmin(epsilon * log_d, epsilon) / epsilon) / 2
        return Potentials(log_a.unsqueeze(-2) - log_kv, log_d, log_a)


@dataclass(frozen=True)
class ProductStep:
    """Iterations of u, d and a themselves; d and a have the axis of one histogram."""

    problem: BarycenterProblem
    kernel: GibbsKernel

    def run(self, potentials: Potentials, iterations: int) -> Cycle:
        p, weights = self.problem.p, self.problem.weights.unsqueeze(-2)
        a = d = potentials.log_d.exp().unsqueeze(-2)
        us, ds = [potentials.log_u.exp()], [d]
        for _ in range(iterations):
            kv = self.kernel.product(p / self.kernel.transposed_product(us[-1]))
            a = (weights @ kv.log()).exp_()
            if self.problem.debiased:
                a = a.mul_(d)
                d = self.kernel.product(d).reciprocal_().mul_(d).mul_(a).sqrt_()
                ds.append(d)
            us.append(a / kv)
        return Cycle(torch.stack(us, -3).log_(), torch.stack(ds, -3).log_(), a.log().squeeze(-2))


@dataclass(frozen=True)
class GibbsKernel:
    """Products with K = exp(-C / epsilon), as one matrix, or for images as one matrix for each axis."""

    factors: tuple[Tensor, ...]
    cells: tuple[int, ...]

    def product(self, v: Float[Tensor, "*batch m"]) -> Float[Tensor, "*batch n"]:
        """K v."""
        if len(self.factors) == 1:
            return v @ self.factors[0].mT
        image = v.unflatten(-1, self.cells)
        for axis, factor in enumerate(self.factors):
            image = (image.movedim(axis - len(self.cells), -1) @ factor).movedim(-1, axis - len(self.cells))
        return image.flatten(-len(self.cells))

    def transposed_product(self, u: Float[Tensor, "*batch n"]) -> Float[Tensor, "*batch m"]:
        """K^T u; the factors of images are symmetric."""
        return u @ self.factors[0] if len(self.factors) == 1 else self.product(u)


def build_gibbs_kernel(cost: Cost, epsilon: float) -> GibbsKernel | None:
    """Return None where the matrix is too large to be held."""
    if isinstance(cost, GridCost):
        factors = tuple(exponentiate(cost.axis_costs(axis), epsilon) for axis in range(len(cost.cells)))
        return GibbsKernel(factors, cost.cells)
    n, m = cost.shape
    return GibbsKernel((exponentiate(cost.dense(), epsilon),), (m,)) if n * m <= NUMBERS.largest_matrix else None


def exponentiate(cost: Tensor, epsilon: float) -> Tensor:
    """Return exp(-C / epsilon), and 0 below the normal numbers, products with which are slow."""
    exponent, least = cost.double() / -epsilon, NUMBERS.least_exponent
    return torch.where(exponent > least, exponent.clamp(min=least).exp(), 0.0)
