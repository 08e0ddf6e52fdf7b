"""Whole small problems on a GPU: Sinkhorn's iteration in the log domain, one program for each problem of a batch.

All iterations run in one launch, and each problem ends by its own error. The formulas, stages of epsilon and
over-relaxation equal the ones of `sinkhorn`, the reference implementation. Arithmetic is float32, in base-2 logarithms:

    updated_i = -k E log2 sum_j 2^(h_j - C_ij / E),    h_j = g_j / E + log2 q_j,    E = epsilon log 2

A pass of the loop is one half-step: side 0 updates f from g, side 1 g from f. Potentials, weights, points and both
orders of a matrix lie one side after the other, so that the sides differ by offsets alone. A tile has one column for
each thread, and each thread its own sums, which are added up after the last tile. A program's barrier separates what it
has stored from what it loads. Phases:

    0  a stage of epsilon      1  over-relaxed iterations
    2  exact updates of both   3  an exact update of f, and the error of the columns      4  the end

This module imports Triton, so it is imported late. On CPU tensors the kernel runs in Triton's interpreter
(TRITON_INTERPRET=1), for tests: it checks values, not races.
"""

from __future__ import annotations

import functools
import math
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor

from otloss.costs.order import METRIC_NUMBERS
from otloss.costs.points import PointCost
from otloss.costs.streams_triton import interpreted
from otloss.solvers.entropic.arithmetic import log_weights
from otloss.solvers.entropic.interface import Budget, SearchResult, Start
from otloss.solvers.entropic.sinkhorn_kernels.numbers import CHECK_EVERY, SCHEDULE, STAGE_ITERATIONS
from otloss.solvers.options import BOTH_KEPT
from otloss.solvers.problem import Problem

try:
    import triton
    import triton.language as tl
except ImportError:  # no wheels for this system
    triton = tl = None

LARGEST_DIMENSION = 8
# The finite numbers that stand for log 0 and for infinity.
NEVER = -1e30
LARGE = 1e30


class Tile(NamedTuple):
    """Rows and columns of a tile. Compiled for sm_90, it takes up to 128 registers a thread, none spilled."""

    rows: int = 16
    columns: int = 128


TILE = Tile()


def solve_small(problem: Problem, start: Start | None, budget: Budget) -> SearchResult:
    """Return where the iteration ends, from a start or in stages of epsilon; the host does not wait for it."""
    (n, m), batch, device = problem.cost.shape, problem.batch, problem.p.device
    count = batch.numel()
    potentials = torch.zeros(count, n + m, dtype=torch.float32, device=device)
    if start is not None:
        potentials.copy_(torch.cat((start.f, start.g), -1).reshape(count, n + m))
    logs = torch.cat([log.expand(*batch, log.shape[-1]) for log in log_weights(problem, torch.float32)], -1)
    weights = (logs.reshape(count, n + m) / math.log(2)).clamp(min=NEVER)
    costs, metric = _costs(problem)
    owner = torch.arange(costs.shape[0], device=device)
    if costs.shape[0] != count:
        owner = owner.reshape(problem.cost.batch_shape).expand(batch).reshape(-1).contiguous()
    outcome = torch.empty(count, 2, dtype=torch.float32, device=device)
    if count:
        options = _options(problem, metric, costs.shape[-1])
        with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
            _kernel(interpreted())[(count,)](
                potentials, weights, costs, owner, costs.stride(0), _numbers(problem, start is None), outcome, n, m,
                budget.tolerance, min(budget.largest_change, LARGE), min(budget.patience, LARGE),
                int(min(budget.max_iterations, 2**30)), **options,
            )  # fmt: skip
    return _result(problem, potentials, outcome)


def _result(problem: Problem, potentials: Tensor, outcome: Tensor) -> SearchResult:
    (n, m), batch = problem.cost.shape, problem.batch
    error = outcome[:, 0].reshape(batch)
    error = torch.where(error.isfinite(), error, torch.inf)
    f, g = potentials[:, :n].reshape(*batch, n), potentials[:, n:].reshape(*batch, m)
    f, g = (torch.where(error.isfinite().unsqueeze(-1), potential, torch.nan) for potential in (f, g))
    return SearchResult.without_estimates(f, g, error, outcome[:, 1].reshape(batch).long())


def _costs(problem: Problem) -> tuple[Tensor, str | None]:
    """Return the points of both sides, (clouds, n + m, d), or the matrices and their transposes, (matrices, 2, n m)."""
    cost = problem.cost
    points = cost.as_points()
    if points is not None and _streams(points):
        sides = [side.detach().expand(*cost.batch_shape, *side.shape[-2:]) for side in (points.x, points.y)]
        both = torch.cat(sides, -2)
        return both.reshape(-1, *both.shape[-2:]).contiguous(), str(points.metric)
    matrices = cost.dense().detach()
    both = torch.stack([matrices.flatten(-2), matrices.mT.flatten(-2)], -2)
    return both.reshape(-1, *both.shape[-2:]).contiguous(), None


def _streams(points: PointCost) -> bool:
    return points.metric in METRIC_NUMBERS and points.x.shape[-1] <= LARGEST_DIMENSION


def _numbers(problem: Problem, is_cold: bool) -> Tensor:
    """Return epsilon, the epsilon of the first stage, 1 / rho_p and 1 / rho_q of each problem, in columns."""
    epsilon = problem.epsilon.detach().float()
    first = epsilon
    if is_cold and not problem.is_symmetric:
        largest = SCHEDULE.first_epsilon_over_cost * problem.cost.largest().float()
        if problem.marginal_penalty is not None:
            rho = problem.marginal_penalty.largest
            largest = largest.clamp(max=rho.squeeze(-1) if isinstance(rho, Tensor) else rho)
        stages = ((largest / epsilon).log() / -math.log(SCHEDULE.stage_factor)).floor().clamp(min=0)
        first = epsilon * SCHEDULE.stage_factor**-stages
    penalty = problem.marginal_penalty or BOTH_KEPT
    inverse = [
        (1 / rho).squeeze(-1).float() if isinstance(rho, Tensor) else torch.full_like(epsilon, 1 / rho)
        for rho in (penalty.p, penalty.q)
    ]
    columns = [column.expand(problem.batch).reshape(-1) for column in (epsilon, first, *inverse)]
    return torch.stack(columns, -1).contiguous()


def _options(problem: Problem, metric: str | None, width: int) -> dict[str, Any]:
    rows = TILE.rows if metric is None or width <= 4 else max(1, TILE.rows // 2)
    return {
        "METRIC": 0 if metric is None else 1 + METRIC_NUMBERS[metric],
        "DIM": 0 if metric is None else width,
        "SYMMETRIC": problem.is_symmetric,
        "BALANCED": problem.marginal_penalty is None,
        "ROWS": rows, "COLUMNS": TILE.columns,
        "num_warps": max(1, TILE.columns // 32), "enable_fp_fusion": True,
        **_CONSTANTS,
    }  # fmt: skip


_CONSTANTS = {
    "STAGE_FACTOR": SCHEDULE.stage_factor, "STAGE_ITERATIONS": STAGE_ITERATIONS, "CHECK_EVERY": CHECK_EVERY,
    "FULL_CHECK": SCHEDULE.full_check, "EARLY_CHECK": SCHEDULE.early_check, "EARLY_FACTOR": SCHEDULE.early_factor,
    "EXTRA": SCHEDULE.extra_iterations, "OVERSHOOT": SCHEDULE.overshoot, "SMALLEST_CHANGE": SCHEDULE.smallest_change,
    "LARGEST_STEP": SCHEDULE.largest_relaxed_step,
}  # fmt: skip


# ---- the kernel ------------------------------------------------------------------------------------------------------
# Sums and maxima are spelled `tl.reduce`: whether `tl.sum` is compiled or interpreted is settled when Triton is first
# imported, by whoever does that. Offsets into costs are int64.


def _whole(  # type: ignore[no-untyped-def]
    potentials, weights, costs, owner, cost_stride, numbers, outcome, n, m,
    tolerance, largest_change, patience, max_iterations,
    METRIC: tl.constexpr, DIM: tl.constexpr, SYMMETRIC: tl.constexpr, BALANCED: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    STAGE_FACTOR: tl.constexpr, STAGE_ITERATIONS: tl.constexpr, CHECK_EVERY: tl.constexpr, FULL_CHECK: tl.constexpr,
    EARLY_CHECK: tl.constexpr, EARLY_FACTOR: tl.constexpr, EXTRA: tl.constexpr, OVERSHOOT: tl.constexpr,
    SMALLEST_CHANGE: tl.constexpr, LARGEST_STEP: tl.constexpr,
):  # fmt: skip
    problem = tl.program_id(0).to(tl.int64)
    potentials += problem * (n + m)
    weights += problem * (n + m)
    costs += tl.load(owner + problem) * cost_stride
    epsilon = tl.load(numbers + 4 * problem)
    at = tl.load(numbers + 4 * problem + 1)  # epsilon of the stage
    inverse_p = tl.load(numbers + 4 * problem + 2)
    inverse_q = tl.load(numbers + 4 * problem + 3)
    zero, none = tl.full((), 0.0, tl.float32), tl.full((), 0, tl.int32)
    phase = tl.where(at > 1.5 * epsilon, 0, 1)
    side, iterations, count, count_within = none, none, none, none
    w, error, change, mass_of_rows = zero + 1.0, zero, zero, zero
    previous, smallest = zero + 1e30, zero + 1e30
    settling = none == 0
    slow = none == 1
    while phase < 4:
        rows, columns = tl.where(side == 0, n, m), tl.where(side == 0, m, n)
        own, other = tl.where(side == 0, 0, n), tl.where(side == 0, n, 0)
        inverse = tl.where(side == 0, inverse_p, inverse_q)
        damping = 1.0 / (1.0 + at * inverse)
        unit = at * 0.6931471805599453
        scale = 1.0 / unit
        averages = SYMMETRIC & (phase == 1)
        factor = tl.where(averages, 0.5, tl.where(phase == 1, w, tl.where((phase == 3) & (side == 1), 0.0, 1.0)))
        top, mass, excess, mean = zero - 1e30, zero, zero, zero
        new_top, new_mass, largest = zero - 1e30, zero, zero
        for start in range(0, rows, ROWS):
            i = start + tl.arange(0, ROWS)
            is_row = i < rows
            peak = tl.full((ROWS, COLUMNS), -1e30, tl.float32)
            total = tl.full((ROWS, COLUMNS), 0.0, tl.float32)
            x = ()
            for k in tl.static_range(DIM):
                x = x + (tl.load(costs + (own + i) * DIM + k, mask=is_row, other=0.0),)  # type: ignore[assignment]  # noqa: RUF005
            for first in range(0, columns, COLUMNS):
                j = first + tl.arange(0, COLUMNS)
                is_column = j < columns
                h = tl.load(potentials + other + j, mask=is_column, other=0.0) * scale
                h += tl.load(weights + other + j, mask=is_column, other=-1e30)
                if METRIC == 0:
                    entry = side.to(tl.int64) * n * m + i[:, None].to(tl.int64) * columns + j[None, :]
                    c = tl.load(costs + entry, mask=is_row[:, None] & is_column[None, :], other=0.0)
                else:
                    c = tl.full((ROWS, COLUMNS), 0.0, tl.float32)
                    for k in tl.static_range(DIM):
                        y = tl.load(costs + (other + j) * DIM + k, mask=is_column, other=0.0)
                        d = x[k][:, None] - y[None, :]
                        c += tl.abs(d) if METRIC == 3 else d * d
                    if METRIC == 2:
                        c = tl.sqrt(c)
                z = h[None, :] - c * scale
                e = tl.exp2(-tl.abs(z - peak))  # one exponential for the sum and its maximum
                total = tl.where(z > peak, total * e + 1.0, total + e)
                peak = tl.maximum(peak, z)
            highest = tl.reduce(peak, 1, tl.standard._elementwise_max)
            total = tl.reduce(total * tl.exp2(peak - highest[:, None]), 1, tl.standard._sum_combine)
            updated = -damping * unit * (highest + tl.log2(total))
            old = tl.load(potentials + own + i, mask=is_row, other=0.0)
            log_weight = tl.load(weights + own + i, mask=is_row, other=-1e30)
            has_mass = log_weight > -1e29
            base = old
            if SYMMETRIC:
                base = tl.where(averages, tl.load(potentials + other + i, mask=is_row, other=0.0), old)
            step = updated - base
            is_relaxed = averages | (tl.abs(factor * step) < LARGEST_STEP * at)
            result = tl.where(is_relaxed, base + factor * step, updated)
            tl.store(potentials + own + i, result, mask=is_row)
            largest = tl.maximum(
                largest, tl.reduce(tl.where(has_mass, tl.abs(step), 0.0), 0, tl.standard._elementwise_max)
            )
            # Shares of the mass that the side has, p exp(-f / rho), and what the plan has beyond it.
            share = log_weight - old * inverse * 1.4426950408889634
            risen = tl.maximum(top, tl.reduce(share, 0, tl.standard._elementwise_max))
            shrink = tl.exp2(top - risen)
            share = tl.where(has_mass, tl.exp2(share - risen), 0.0)
            beyond = tl.abs(tl.exp2(tl.minimum(-step * scale / damping, 115.0)) - 1.0)
            excess = excess * shrink + tl.reduce(share * beyond, 0, tl.standard._sum_combine)
            mean = mean * shrink + tl.reduce(share * result, 0, tl.standard._sum_combine)
            mass = mass * shrink + tl.reduce(share, 0, tl.standard._sum_combine)
            top = risen
            if not BALANCED:
                share = log_weight - result * inverse * 1.4426950408889634
                risen = tl.maximum(new_top, tl.reduce(share, 0, tl.standard._elementwise_max))
                share = tl.where(has_mass, tl.exp2(share - risen), 0.0)
                new_mass = new_mass * tl.exp2(new_top - risen) + tl.reduce(share, 0, tl.standard._sum_combine)
                new_top = risen
        tl.debug_barrier()
        part = excess / mass
        log_mass = new_top + tl.log2(tl.maximum(new_mass, 1e-37))
        error = tl.where((side == 1) & (phase < 3), error + part, part)
        change = tl.where((side == 1) & (phase < 3), tl.maximum(change, largest), tl.where(phase == 3, change, largest))
        if side == 1:
            iterations += tl.where(phase < 2, 1, 0)
            count += tl.where(phase < 2, 1, 0)
            is_within, is_broken = error <= tolerance, error != error
            is_last = (iterations >= max_iterations) | (count >= patience) | slow | is_broken
            shift = zero
            if phase == 0:
                is_last = is_last | (iterations >= max_iterations - 1)
                if (count == STAGE_ITERATIONS) | is_last:
                    at = tl.where(is_last, epsilon, at * STAGE_FACTOR)
                    phase = tl.where(at > 1.5 * epsilon, 0, 1)
                    at = tl.where(phase == 1, epsilon, at)
                    count = none
                    if BALANCED:  # without its mean, g does not keep the size that it had at a large epsilon
                        shift = mean / mass
            elif phase == 1:
                if not BALANCED and not SYMMETRIC:  # the best constant between f and g
                    shift = (mass_of_rows - log_mass) * 0.6931471805599453 / (inverse_p + inverse_q)
                if is_within | is_last:
                    phase = none + 2
                elif count % CHECK_EVERY == 0:
                    speed = tl.log2(previous / tl.maximum(error, 1e-30)) / CHECK_EVERY
                    needed = tl.where(speed > 0.0, tl.log2(error / tolerance) / tl.maximum(speed, 1e-30), 1e30)
                    allowed = patience * tl.where(count >= FULL_CHECK, 1.0, EARLY_FACTOR)
                    slow = (needed > allowed) & (count >= EARLY_CHECK) & (settling == 0)
                    c = tl.exp2(-speed)
                    is_worse = error > OVERSHOOT * smallest
                    eigenvalue = tl.minimum((c + w - 1.0) * (c + w - 1.0) / (w * w * tl.maximum(c, 1e-30)), 1.0)
                    best = tl.minimum(2.0 / (1.0 + tl.sqrt(1.0 - eigenvalue)), 1.0 + w / 2.0)
                    is_usable = (c > w - 1.0) & (c < 1.0) & (is_worse == 0) & (settling == 0)
                    is_raised = is_usable & (best > w + SMALLEST_CHANGE)
                    w = tl.where(is_worse, (1.0 + w) / 2.0, tl.where(is_raised, best, w))
                    settling = is_worse | is_raised
                    smallest = tl.where(is_worse, error, tl.minimum(smallest, error))
                    previous = error
            elif phase == 2:
                phase = none + 3
            else:
                count_within += tl.where(is_within, 1, 0)
                is_accurate = (change <= largest_change * epsilon) | (count_within > EXTRA)
                phase = tl.where(is_last | (is_within & is_accurate), 4, 1)
            if shift != 0.0:
                for start in range(0, n + m, COLUMNS):
                    i = start + tl.arange(0, COLUMNS)
                    value = tl.load(potentials + i, mask=i < n + m, other=0.0)
                    tl.store(potentials + i, value + tl.where(i < n, shift, -shift), mask=i < n + m)
                tl.debug_barrier()
        mass_of_rows = log_mass
        side = 1 - side
    tl.store(outcome + 2 * problem, error)
    tl.store(outcome + 2 * problem + 1, iterations.to(tl.float32))


@functools.cache
def _kernel(interpreted: bool) -> Any:
    """Return the kernel, compiled or interpreted: `triton.jit` looks itself, the argument keeps the two apart."""
    return triton.jit(_whole)
