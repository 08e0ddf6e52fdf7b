"""Sinkhorn's iteration on a GPU: whole small problems in one launch of a Triton kernel.

`impl="triton"` asks for it. "auto" takes it where `gpu_sizes.csv` says that it was measured to be faster. A row

    device, kind, problems, side

holds for that GPU, batches of at least so many problems between "points" or with a "matrix", and sides of at most so
many bins. `python -m benchmarks.gpu transport` writes such rows. Without one for a device, "auto" does not take the
kernel there.

`LARGEST_SIDE` is where one launch is still faster for a batch of 16 problems on a GPU of 132 multiprocessors. There a
problem has one multiprocessor for itself: 2 n^2 / 16 clocks an iteration. Step by step all of them share the work, but
an iteration is about 85 launches of torch. At n = 1,024 each launch may take 1,355 clocks, less than a microsecond,
which no launch does; at 2,048 it may take 5,421. These are counts: nothing was measured on a device. Programs that
share a problem within a launch would have to wait for each other, for which Triton has no barrier.
"""

from __future__ import annotations

import csv
import functools
from pathlib import Path
from typing import NamedTuple

import torch

from otloss._checks import needs_torch
from otloss.solvers.entropic.interface import Budget, Method, SearchResult, Start
from otloss.solvers.problem import Problem

SIZES = Path(__file__).parent / "gpu_sizes.csv"
LARGEST_SIDE = 1024  # one program solves problems up to it; the module docstring has the reason


class MeasuredSize(NamedTuple):
    """A row of `gpu_sizes.csv`; the module docstring explains it."""

    device: str
    kind: str
    problems: int
    side: int


class SinkhornOnGPU(Method):
    """The method for small problems on a GPU, by name or where it was measured to be faster.

    Larger ones of impl="triton" are iterated step by step (`Sinkhorn`).
    """

    def applies(self, problem: Problem) -> bool:
        return is_small(problem) if problem.impl == "triton" else is_measured_faster(problem)

    def run(self, problem: Problem, start: Start | None, budget: Budget) -> SearchResult:
        """Search from the start, or without one in stages of epsilon; see `interface.Method`."""
        from otloss.solvers.entropic.sinkhorn_kernels.small_triton import solve_small

        return solve_small(problem, start, budget)


def is_small(problem: Problem) -> bool:
    """Return whether the kernel is for problems of this size and arithmetic."""
    return problem.cost.dtype == torch.float32 and max(problem.cost.shape) <= LARGEST_SIDE


def check_usable(problem: Problem) -> None:
    """Raise ValueError unless the Triton kernel runs on such tensors here."""
    from otloss.solvers.entropic.sinkhorn_kernels import small_triton

    device, dtype, other = problem.p.device, problem.cost.dtype, 'use impl="torch" or "auto"'
    if small_triton.triton is None:
        raise ValueError(
            f'impl="triton" needs Triton, which builds of torch for CUDA install on Linux; install one of them, or '
            f"{other}."
        )
    if needs_torch(problem.p, problem.q, *problem.cost.tensors()):
        raise ValueError(f'impl="triton" runs outside of torch.func transforms only; got one, {other}.')
    if dtype != torch.float32:
        raise ValueError(f'impl="triton" got {dtype}, expected float32, its arithmetic; convert the cost, or {other}.')
    if device.type != "cuda" and not (device.type == "cpu" and small_triton.interpreted()):
        raise ValueError(
            f'impl="triton" got device {device}, expected CUDA tensors; move them, set TRITON_INTERPRET=1 (slow, for '
            f"tests), or {other}."
        )


def is_measured_faster(problem: Problem) -> bool:
    """Return whether "auto" takes the kernel for a problem: on a device and of a size where it was measured faster."""
    device = problem.p.device
    if problem.impl != "auto" or device.type != "cuda":
        return False
    if needs_torch(problem.p, problem.q, *problem.cost.tensors()) or not is_small(problem):
        return False
    kind = "matrix" if problem.cost.as_points() is None else "points"
    return is_listed(torch.cuda.get_device_name(device), kind, problem.batch.numel(), max(problem.cost.shape))


def is_listed(device: str, kind: str, problems: int, side: int) -> bool:
    """Return whether the table has a row for so many problems of this kind and largest side on the device."""
    return any(
        row.device == device and row.kind == kind and problems >= row.problems and side <= row.side
        for row in measured_sizes(SIZES)
    )


@functools.cache
def measured_sizes(file: Path) -> tuple[MeasuredSize, ...]:
    """Return the rows of the table."""
    with file.open(encoding="utf-8", newline="") as text:
        rows = csv.DictReader(text)
        return tuple(MeasuredSize(row["device"], row["kind"], int(row["problems"]), int(row["side"])) for row in rows)
