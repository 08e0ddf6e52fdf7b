"""`python -m benchmarks.gpu transport`: entropic transport on one GPU, ours beside its peers.

Each row is a loss and its gradient in the points (or in the matrices); rows "softmin" are one soft minimum, without a
gradient. Ours runs by `impl="triton"`, by `impl="torch"`, and on the CPU; the peers are FlashSinkhorn (as it is called,
which rounds to TF32, and without TF32), GeomLoss (tensorized, and online by KeOps) and OTT-JAX, as far as they are
installed. Seconds are between CUDA events, and of OTT and the CPU by the clock. Errors of value and gradient are
relative, against our float64 result on the CPU in rows of up to `LARGEST_REFERENCE` pairs, and for the first
`REFERENCE_ROWS` soft minima.

Contestants run in a process beside this one, which ends it where a call hangs or the time of the run is over. Every
result is appended to `gpu_transport.csv` when it is there, and a further run on the same hardware goes on after the
last one. Small rows where the kernel took less time than our CPU path are written to `gpu_sizes.csv`, in the format of
the table that `impl="auto"` reads.
"""

from __future__ import annotations

import csv
import importlib
import math
import multiprocessing
import os
import statistics
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from datetime import date
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

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
FLASH, FLASH_FLOAT32 = "FlashSinkhorn", "FlashSinkhorn, float32"
TENSORIZED, ONLINE, OTT = "GeomLoss tensorized", "GeomLoss online", "OTT-JAX"
LARGEST_REFERENCE = 4e7
REFERENCE_ROWS = 1000
# No contestant gets a row of more pairs: it would not fit the memory, or take minutes.
MAX_PAIRS = {TORCH: 2e8, CPU: 3e9, TENSORIZED: 4e8, OTT: 4e8, ONLINE: 2e10, FLASH: 2e10, FLASH_FLOAT32: 2e10,
              TRITON: 2e12}  # fmt: skip
SECONDS = 450.0  # a run takes no longer; what is not measured by then is left to the next one
LIMIT = 45.0  # seconds of one contestant, with its compilation
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
DRY = (
    Row("softmin", 1, 12, 3, 1.0),
    Row("matrices", 2, 6, 1, 1.0),
    Row("uniform", 2, 8, 2, 1.0),
    Row("uniform", 1, 8, 3, 1.0),
)


class Answer(NamedTuple):
    """A value and its gradient; for "softmin" all soft minima, and None."""

    value: Tensor
    gradient: Tensor | None


Call = Callable[[], Answer]


# ---- contestants -----------------------------------------------------------------------------------------------------


def ours(row: Row, x: Tensor, y: Tensor, *, impl: str, tolerance: float | None = None) -> Answer:
    """Value and gradient of our loss, on the device of the points."""
    if row.kind == "softmin":
        cost = PointCost(x, y)
        chosen = cost.streamed() if impl == "triton" else cost
        assert chosen is not None
        return Answer(chosen.softmin(y.new_zeros(y.shape[-2]), 2 * row.blur**2), None)
    leaf = x.detach().clone().requires_grad_()
    if row.kind == "matrices":
        leaf = (x - y.mT).square().detach().requires_grad_()
        value = otloss.sinkhorn(None, None, DenseCost(leaf), epsilon=row.blur, impl=impl, tolerance=tolerance).sum()
    else:
        value = otloss.cloud_loss(leaf, y, blur=row.blur, impl=impl, tolerance=tolerance).sum()
    return Answer(value.detach(), torch.autograd.grad(value, leaf)[0])


def samples_loss(row: Row, x: Tensor, y: Tensor, package: str, **options: Any) -> Call:
    """Return what calls `SamplesLoss` of GeomLoss or of FlashSinkhorn."""
    loss = importlib.import_module(package).SamplesLoss("sinkhorn", p=2, blur=row.blur, **options)

    def call() -> Answer:
        leaf = x.detach().clone().requires_grad_()
        value = loss(leaf, y).sum()
        return Answer(value.detach(), torch.autograd.grad(value, leaf)[0])

    return call


def flash_sinkhorn(row: Row, x: Tensor, y: Tensor, *, allow_tf32: bool) -> Call:
    """Return what calls FlashSinkhorn: its loss, or its kernel of soft minima, which leaves out |x|^2."""
    if row.kind != "softmin":
        return samples_loss(row, x, y, "flash_sinkhorn", half_cost=True, debias=True, allow_tf32=allow_tf32)
    kernel = importlib.import_module("flash_sinkhorn.kernels.sinkhorn_flashstyle_sqeuclid").flashsinkhorn_lse
    epsilon = 2 * row.blur**2

    def call() -> Answer:
        bias = y.square().sum(-1) / -epsilon
        return Answer(x.square().sum(-1) + kernel(x, y, bias, epsilon, allow_tf32=allow_tf32), None)

    return call


def ott(row: Row, x: Tensor, y: Tensor) -> Call:
    """Return what calls OTT-JAX, whose cost has no factor 1/2; one pair of clouds."""
    jax = importlib.import_module("jax")
    divergence = importlib.import_module("ott.tools.sinkhorn_divergence").sinkdiv
    one, other = (jax.numpy.asarray(t.cpu().numpy()) for t in (x, y))
    step = jax.jit(jax.value_and_grad(lambda z, w: divergence(z, w, epsilon=2 * row.blur**2)[0] / 2))

    def call() -> Answer:
        value, gradient = jax.block_until_ready(step(one, other))
        return Answer(torch.tensor(float(value)), torch.from_numpy(jax.device_get(gradient).copy()))

    return call


def contestants(row: Row, x: Tensor, y: Tensor, device: str) -> dict[str, Callable[[], Call]]:
    """Return what prepares the calls for each name, in the order of the report."""
    there = x.to(device), y.to(device)
    makers: dict[str, Callable[[], Call]] = {
        TRITON: lambda: lambda: ours(row, *there, impl="triton"),
        TORCH: lambda: lambda: ours(row, *there, impl="torch"),
        CPU: lambda: lambda: ours(row, x, y, impl="auto"),
    }
    if row.kind == "matrices":
        return makers
    makers[FLASH] = lambda: flash_sinkhorn(row, *there, allow_tf32=True)
    makers[FLASH_FLOAT32] = lambda: flash_sinkhorn(row, *there, allow_tf32=False)
    if row.kind == "softmin":
        return makers
    makers[TENSORIZED] = lambda: samples_loss(row, *there, "geomloss", backend="tensorized")
    if row.problems == 1:
        makers[ONLINE] = lambda: samples_loss(row, *there, "geomloss", backend="online")
        makers[OTT] = lambda: ott(row, *there)
    return makers


def names_of(row: Row) -> list[str]:
    return list(contestants(row, torch.empty(0), torch.empty(0), "cpu"))


# ---- measuring -------------------------------------------------------------------------------------------------------


def seconds_of(call: Call, *, by_events: bool) -> float:
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


def reference_of(row: Row) -> Answer | None:
    """Return our result in float64 on the CPU, None for rows that would take too long."""
    x, y = (cloud.double() for cloud in row.clouds())
    if row.kind == "softmin":
        return ours(row, x[:REFERENCE_ROWS], y, impl="auto")
    return ours(row, x, y, impl="auto", tolerance=1e-8) if row.pairs <= LARGEST_REFERENCE else None


def measured(task: Task) -> dict[str, Any]:
    """Return the fields of a contestant, after a first call; ends between repetitions when its time is over."""
    row, device, started = task.row, task.device, time.perf_counter()
    make = contestants(row, *row.clouds(), device)[task.name]
    if device == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated() if device == "cuda" else 0
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        call = make()
        first_started = time.perf_counter()
        answer = call()
        first = time.perf_counter() - first_started
    by_events = device == "cuda" and task.name not in (CPU, OTT)
    seconds: list[float] = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        while len(seconds) < (1 if first > LONG else task.rounds):
            if seconds and time.perf_counter() - started + 2 * max(seconds) > task.limit:
                break
            seconds.append(seconds_of(call, by_events=by_events))
    note = "; ".join(sorted({w.category.__name__ for w in caught if "Convergence" in w.category.__name__}))
    fields = {"milliseconds": f"{1000 * statistics.median(seconds):.3f}", "note": note}
    if by_events:
        fields["mebibytes"] = f"{(torch.cuda.max_memory_allocated() - before) / 2**20:.0f}"
    return fields | (errors_of(answer, task.reference) if task.reference is not None else {})


def errors_of(answer: Answer, exact: Answer) -> dict[str, str]:
    """Return the relative errors of value and gradient; of soft minima those that the reference has."""
    errors = {}
    for field, got, true in (
        ("value_error", answer.value, exact.value),
        ("gradient_error", answer.gradient, exact.gradient),
    ):
        if got is not None and true is not None:
            got = got.cpu().double()[: len(true)] if true.dim() else got.cpu().double()
            errors[field] = f"{float((got - true).norm() / true.norm()):.1e}"
    return errors


# ---- the process beside this one -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Task:
    """What a contestant is asked: `rounds` repetitions of a row within `limit` seconds."""

    row: Row
    name: str
    device: str
    rounds: int
    limit: float
    reference: Answer | None


def work(pipe: Connection) -> None:
    """Answer what is asked; a failure is a note."""
    os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"  # the others need memory too
    while True:
        function, argument = pipe.recv()
        try:
            pipe.send(function(argument))
        except ImportError as error:
            pipe.send({"note": f"not installed ({error.name})"})
        except Exception as error:
            pipe.send({"note": f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:80]}"})


class Worker:
    """A process that measures; it is ended where an answer takes longer than its limit, or where the process dies."""

    def __init__(self) -> None:
        self._process: Any = None

    def ask(self, function: Callable[[Any], Any], argument: Any, *, limit: float) -> Any:
        """Return what the function returns, or a note."""
        if self._process is None:
            self._start()
        try:
            self._pipe.send((function, argument))
            if self._pipe.poll(limit):
                return self._pipe.recv()
            note = f"ended after {limit:.0f} s"
        except (EOFError, OSError):
            note = "the process died"
        self.end()
        return {"note": note}

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, other = context.Pipe()
        self._process = context.Process(target=work, args=(other,), daemon=True)
        self._process.start()
        other.close()

    def end(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.join()
            self._process = None


# ---- the table -------------------------------------------------------------------------------------------------------


def finished_results(file: Path | None) -> dict[tuple[str, str], dict[str, Any]]:
    """Return the results that an earlier run on this hardware has measured, by row and contestant."""
    if file is None or not file.exists():
        return {}
    with file.open(encoding="utf-8", newline="") as text:
        rows = [row for row in csv.DictReader(text) if row["hardware"] == hardware()]
    return {(row["row"], row["name"]): row for row in rows}


def size_of(row: Row, results: dict[str, dict[str, Any]]) -> MeasuredSize | None:
    """Return the row for `gpu_sizes.csv`, where the kernel took less time than our CPU path and converged."""
    if row.kind == "softmin" or row.points > 1024 or not torch.cuda.is_available() or TRITON not in results:
        return None
    times = [float(results.get(name, {}).get("milliseconds") or math.inf) for name in (TRITON, CPU)]
    if results[TRITON].get("note") or not times[0] < times[1]:
        return None
    kind = "matrix" if row.kind == "matrices" else "points"
    return MeasuredSize(torch.cuda.get_device_name(), kind, row.problems, row.points)


def measure_row(row: Row, names: list[str], run: Run) -> dict[str, dict[str, Any]]:
    """Measure contestants of a row until the time is over; each result is saved at once."""
    common = {"date": date.today().isoformat(), "row": row.name, "hardware": hardware(), "torch": torch.__version__}
    results: dict[str, dict[str, Any]] = {}
    reference = run.worker.ask(reference_of, row, limit=run.limit())
    if isinstance(reference, dict):
        say(f"  no float64 result: {reference['note']}")
        reference = None
    for name in names:
        limit = run.limit()
        if row.pairs > MAX_PAIRS[name]:
            fields: dict[str, Any] = {"note": "not tried: too many pairs"}
        elif limit < 1:
            say("  out of time: a further run goes on here")
            break
        else:
            fields = run.worker.ask(measured, Task(row, name, run.device, run.rounds, limit, reference), limit=limit)
        say(f"  {name:<22} {fields.get('milliseconds', '-'):>12} ms  errors {fields.get('value_error', '-')}, "
            f"{fields.get('gradient_error', '-')}  {fields.get('note', '')}")  # fmt: skip
        results[name] = {**common, "name": name, **fields}
        if run.file is not None:
            append(run.file, FIELDS, [results[name]])
    return results


@dataclass(frozen=True)
class Run:
    """What the rows of a run share."""

    device: str
    rounds: int
    file: Path | None
    worker: Worker
    deadline: float

    def limit(self) -> float:
        """Seconds that the next contestant may take."""
        return max(0.0, min(LIMIT, self.deadline - time.perf_counter()))


def run(*, dry: bool, rounds: int, output: Path | None) -> None:
    """Measure what `gpu_transport.csv` of the folder does not have yet."""
    device, rows = ("cpu", DRY) if dry else ("cuda", ROWS)
    file = None if output is None else output / "gpu_transport.csv"
    finished = finished_results(file)
    this = Run(device, rounds, file, Worker(), time.perf_counter() + SECONDS)
    try:
        for row in rows:
            earlier = {name: finished[row.name, name] for name in names_of(row) if (row.name, name) in finished}
            missing = [name for name in names_of(row) if name not in earlier]
            say(f"{row.name}{'' if missing else ': measured before'}")
            if not missing:
                continue
            if this.limit() < 1:
                say("  out of time: a further run goes on here")
                return
            results = earlier | measure_row(row, missing, this)
            size = size_of(row, results)
            if file is not None and size is not None:
                append(file.parent / "gpu_sizes.csv", MeasuredSize._fields, [size._asdict()])
    finally:
        this.worker.end()
