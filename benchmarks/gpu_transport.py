"""`python -m benchmarks.gpu transport`: entropic transport on one GPU, ours beside its peers.

Each row is a loss and its gradient in the points (or in the matrices). Ours runs by `impl="triton"`, by `impl="torch"`,
and on the CPU; the peers are FlashSinkhorn, GeomLoss (tensorized, and online by KeOps) and OTT-JAX, as far as they are
installed. Seconds are between CUDA events, and of OTT and the CPU by the clock. Errors of value and gradient are
relative, against our float64 result on the CPU in rows of up to `LARGEST_REFERENCE` pairs.

Every row is appended to `gpu_transport.csv` when it is measured, and a further run goes on after the last one. Small
rows where the kernel took less time than our CPU path are written to `gpu_sizes.csv`, in the format of the table that
`impl="auto"` reads.
"""

from __future__ import annotations

import csv
import importlib
import math
import statistics
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import otloss
from benchmarks.hard_kinds import Hard
from benchmarks.measure import append, hardware, say
from otloss.costs import DenseCost, PointCost
from otloss.solvers.entropic.sinkhorn_gpu import MeasuredSize

FIELDS = (
    "date",
    "row",
    "name",
    "milliseconds",
    "value_error",
    "gradient_error",
    "mebibytes",
    "note",
    "hardware",
    "torch",
)
TRITON, TORCH, CPU = "otloss, triton", "otloss, torch", "otloss, CPU"
FLASH, TENSORIZED, ONLINE, OTT = "FlashSinkhorn", "GeomLoss tensorized", "GeomLoss online", "OTT-JAX"
LARGEST_REFERENCE = 4e7
# No contestant gets a row of more pairs: it would not fit the memory, or take minutes.
MOST_PAIRS = {TORCH: 2e8, CPU: 3e9, TENSORIZED: 4e8, OTT: 4e8, ONLINE: 2e10, FLASH: 2e10, TRITON: 2e12}
SECONDS = 450.0  # no contestant begins after this time
LONG = 2.0  # seconds of a call that is not repeated


@dataclass(frozen=True)
class Row:
    """A problem: `problems` clouds or matrices of `points`, in `axes` dimensions; `blur` or an epsilon of matrices."""

    kind: str
    problems: int
    points: int
    axes: int
    blur: float

    @property
    def name(self) -> str:
        return f"{self.kind} {self.problems} x {self.points}, d={self.axes}, {self.blur:g}"

    @property
    def pairs(self) -> float:
        return float(self.problems) * self.points**2

    def clouds(self) -> tuple[Tensor, Tensor]:
        """Return x and y on the CPU; "softmin" rows are uniform."""
        if self.kind in ("clusters", "heavy", "outlier"):
            hard = Hard.of(self.kind, f"{self.problems}x{self.points}" if self.problems > 1 else str(self.points))
            return hard.x, hard.y
        generator = torch.Generator().manual_seed(0)
        shape = (self.problems, self.points, self.axes) if self.problems > 1 else (self.points, self.axes)
        x, y = (torch.rand(shape, generator=generator) for _ in range(2))
        return x, 0.2 + 0.7 * y


ROWS = (
    *(Row("softmin", 1, points, axes, 0.05) for points in (10_000, 50_000) for axes in (3, 64)),
    *(Row("matrices", 64, 64, 1, epsilon) for epsilon in (0.1, 0.01)),
    *(Row(kind, 256, 256, 2, 0.05) for kind in ("uniform", "clusters", "heavy")),
    *(Row(kind, 16, 1024, 2, 0.05) for kind in ("uniform", "clusters", "heavy")),
    *(Row(kind, 1, points, 3, 0.05) for points in (2000, 6000) for kind in ("clusters", "heavy", "outlier")),
    *(Row("uniform", 1, points, 3, 0.05) for points in (10_000, 50_000, 100_000)),
    Row("uniform", 1, 1_000_000, 3, 0.1),
)
DRY = (Row("softmin", 1, 12, 3, 1.0), Row("matrices", 2, 6, 1, 1.0), Row("uniform", 2, 8, 2, 1.0))
Answer = tuple[Tensor, Tensor]  # the value, and its gradient


# ---- contestants -----------------------------------------------------------------------------------------------------


def ours(row: Row, x: Tensor, y: Tensor, *, impl: str, tolerance: float | None = None) -> Answer:
    """Value and gradient of our loss, on the device of the points."""
    leaf = x.detach().clone().requires_grad_()
    if row.kind == "softmin":
        value = PointCost(leaf, y).softmin(y.new_zeros(row.points), 2 * row.blur**2).sum()
    elif row.kind == "matrices":
        leaf = (x - y.mT).square().detach().requires_grad_()
        value = otloss.sinkhorn(None, None, DenseCost(leaf), epsilon=row.blur, impl=impl, tolerance=tolerance).sum()
    else:
        value = otloss.cloud_loss(leaf, y, blur=row.blur, impl=impl, tolerance=tolerance).sum()
    return value.detach(), torch.autograd.grad(value, leaf)[0]


def samples_loss(row: Row, x: Tensor, y: Tensor, package: str, **options: Any) -> Answer:
    """Value and gradient of `SamplesLoss` of GeomLoss or of FlashSinkhorn."""
    loss = importlib.import_module(package).SamplesLoss("sinkhorn", blur=row.blur, **options)
    leaf = x.detach().clone().requires_grad_()
    value = loss(leaf, y).sum()
    return value.detach(), torch.autograd.grad(value, leaf)[0]


def ott(row: Row, x: Tensor, y: Tensor) -> Answer:
    """Value and gradient by OTT-JAX, whose cost has no factor 1/2; one pair of clouds."""
    jax = importlib.import_module("jax")
    divergence = importlib.import_module("ott.tools.sinkhorn_divergence").sinkdiv
    one, other = (jax.numpy.asarray(t.cpu().numpy()) for t in (x, y))
    step = jax.jit(jax.value_and_grad(lambda z: divergence(z, other, epsilon=2 * row.blur**2)[0] / 2))
    value, gradient = jax.block_until_ready(step(one))
    return torch.tensor(float(value)), torch.from_numpy(jax.device_get(gradient).copy())


def contestants(row: Row, x: Tensor, y: Tensor, device: str) -> dict[str, Callable[[], Answer]]:
    """Return what is called for each name, in the order of the report."""
    there = x.to(device), y.to(device)
    calls: dict[str, Callable[[], Answer]] = {
        TRITON: lambda: ours(row, *there, impl="triton"),
        TORCH: lambda: ours(row, *there, impl="torch"),
        CPU: lambda: ours(row, x, y, impl="auto"),
    }
    if row.kind == "softmin":
        return {name: calls[name] for name in (TORCH, CPU)}
    if row.kind == "matrices":
        return calls
    calls[TENSORIZED] = lambda: samples_loss(row, *there, "geomloss", p=2, backend="tensorized")
    if row.problems == 1:
        calls[ONLINE] = lambda: samples_loss(row, *there, "geomloss", p=2, backend="online")
        calls[FLASH] = lambda: samples_loss(row, *there, "flash_sinkhorn", half_cost=True, debias=True)
        calls[OTT] = lambda: ott(row, *there)
    return calls


# ---- measuring -------------------------------------------------------------------------------------------------------


def seconds_of(call: Callable[[], Answer], *, by_events: bool) -> float:
    if not by_events:
        started = time.perf_counter()
        call()
        return time.perf_counter() - started
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    call()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1000


def measured(name: str, call: Callable[[], Answer], exact: Answer | None, device: str, rounds: int) -> dict[str, Any]:
    """Return the fields of a contestant, after a first call; a failure is a note."""
    if device == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated() if device == "cuda" else 0
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            started = time.perf_counter()
            value, gradient = call()
            first = time.perf_counter() - started
        note = "; ".join(sorted({w.category.__name__ for w in caught if "Convergence" in w.category.__name__}))
        by_events = device == "cuda" and name not in (CPU, OTT)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            seconds = [seconds_of(call, by_events=by_events) for _ in range(1 if first > LONG else rounds)]
    except ImportError as error:
        return {"note": f"not installed ({error.name})"}
    except Exception as error:
        return {"note": f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:80]}"}
    fields = {"milliseconds": f"{1000 * statistics.median(seconds):.3f}", "note": note}
    if device == "cuda":
        fields["mebibytes"] = f"{(torch.cuda.max_memory_allocated() - before) / 2**20:.0f}"
    if exact is not None:
        for field, got, true in zip(("value_error", "gradient_error"), (value, gradient), exact, strict=True):
            fields[field] = f"{float((got.cpu().double() - true).norm() / true.norm()):.1e}"
    return fields


def finished_rows(file: Path | None) -> set[str]:
    """Return the names of the rows that an earlier run has measured."""
    if file is None or not file.exists():
        return set()
    with file.open(encoding="utf-8", newline="") as text:
        return {row["row"] for row in csv.DictReader(text)}


def measure_row(row: Row, device: str, rounds: int, deadline: float) -> list[dict[str, Any]]:
    """Return the fields of all contestants of a row."""
    x, y = row.clouds()
    exact = None
    if row.pairs <= LARGEST_REFERENCE:
        exact = ours(row, x.double(), y.double(), impl="auto", tolerance=1e-8)
    common = {"date": date.today().isoformat(), "row": row.name, "hardware": hardware(), "torch": torch.__version__}
    results: list[dict[str, Any]] = []
    for name, call in contestants(row, x, y, device).items():
        if row.pairs > MOST_PAIRS[name]:
            fields: dict[str, Any] = {"note": "not tried: too many pairs"}
        elif time.perf_counter() > deadline:
            fields = {"note": "not tried: out of time"}
        else:
            fields = measured(name, call, exact, device, rounds)
        say(f"  {name:<20} {fields.get('milliseconds', '-'):>12} ms  errors {fields.get('value_error', '-')}, "
            f"{fields.get('gradient_error', '-')}  {fields.get('note', '')}")  # fmt: skip
        results.append({**common, "name": name, **fields})
    return results


def size_of(row: Row, results: list[dict[str, Any]]) -> MeasuredSize | None:
    """Return the row for `gpu_sizes.csv`, where the kernel took less time than our CPU path and converged."""
    if row.kind == "softmin" or row.points > 1024 or not torch.cuda.is_available():
        return None
    by_name = {fields["name"]: fields for fields in results}
    times = [float(by_name[name].get("milliseconds", math.inf)) for name in (TRITON, CPU)]
    if by_name[TRITON].get("note") or not times[0] < times[1]:
        return None
    kind = "matrix" if row.kind == "matrices" else "points"
    return MeasuredSize(torch.cuda.get_device_name(), kind, row.problems, row.points)


def run(*, dry: bool, rounds: int, output: Path | None) -> None:
    """Measure all rows that are not in `gpu_transport.csv` of the folder yet."""
    device, rows = ("cpu", DRY) if dry else ("cuda", ROWS)
    deadline = time.perf_counter() + SECONDS
    file = None if output is None else output / "gpu_transport.csv"
    finished = finished_rows(file)
    for row in rows:
        if row.name in finished:
            say(f"{row.name}: measured before")
            continue
        say(row.name)
        results = measure_row(row, device, rounds, deadline)
        if file is not None:
            append(file, FIELDS, results)
            size = size_of(row, results)
            if size is not None:
                append(file.parent / "gpu_sizes.csv", MeasuredSize._fields, [size._asdict()])
