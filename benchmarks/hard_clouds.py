"""Entropic transport on clouds as users have them (`hard_kinds`), beside GeomLoss, POT, OTT and our exact solver.

    divergence   `cloud_loss(x, y, blur=...)` of the pairs of clouds, and its gradient in x
    unbalanced   the same with marginal_penalty 1
    barycenter   of 4 histograms with random weights on 256 points, at epsilon 2 blur^2

Errors are relative, of the values (the worst) and of the gradient, from references that were made by another algorithm
(`hard_references`). The marginal error is of the plan between x and y, summed from the potentials. Seconds are
of the processor, one thread, medians of some calls; what does not end within the limit is told as such.

    python -m benchmarks hard_clouds --kinds clusters heavy --sizes 16x256 500 --blurs 0.05 --names otloss
"""

from __future__ import annotations

import argparse
import csv
import importlib.util
import math
import multiprocessing
import statistics
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import date
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.hard_kinds import AXES_OF_DATA, BLURS, KINDS, MANY_AXES, MANY_AXES_SIZES, SIZES, Hard, data_of
from benchmarks.hard_references import marginal_error, references
from benchmarks.measure import SMALL_SIZES, Limit, Settings, hardware, heading, say, table

FILE = "hard_clouds.csv"
KEYS = ("work", "kind", "size", "blur", "name")
MEASURES = ("seconds", "marginal_error", "converged", "value_error", "gradient_error", "note")
FIELDS = (*KEYS, *MEASURES, "date", "hardware", "torch")
DIVERGENCE, UNBALANCED, BARYCENTER = WORKS = ("divergence", "unbalanced", "barycenter")
PENALTY = 1.0
OURS, EXACT, POT, OTT = "otloss", "otloss emd", "POT stabilised", "OTT"
GEOMLOSS = {"GeomLoss 0.5": 0.5, "GeomLoss 0.9": 0.9}
NAMES = (OURS, *GEOMLOSS, POT, OTT, EXACT)
POT_POINTS, POT_ITERATIONS = 500, 2000
TURN, CALLS = 1.0, 5  # a cell is repeated until it took so many seconds, or so often
SMALL = ("2x32", "64")
Answer = tuple[Tensor, Tensor]  # values, and the gradient of their sum in x


@dataclass(frozen=True)
class Cell:
    work: str
    kind: str
    size: str
    blur: float
    name: str

    @property
    def key(self) -> tuple[str, ...]:
        return (self.work, self.kind, self.size, f"{self.blur:g}", self.name)

    @property
    def reference(self) -> tuple[str, str, str, str]:
        """Its key in the file of references."""
        return (self.kind, self.size, f"{self.blur:g}", "" if self.penalty is None else f"{self.penalty:g}")

    @property
    def penalty(self) -> float | None:
        return PENALTY if self.work == UNBALANCED else None


# ---- contestants -----------------------------------------------------------------------------------------------------


def step_of(cell: Cell, clouds: Hard) -> Callable[[], Answer]:
    blur = cell.blur * clouds.unit
    if cell.work == BARYCENTER:
        return lambda: _barycenter(clouds, blur)
    if cell.name == OURS:
        return lambda: _ours(clouds, blur, cell.penalty)
    if cell.name == EXACT:
        return lambda: _exact(clouds)
    if cell.name in GEOMLOSS:
        return lambda: _geomloss(clouds, blur, cell.penalty, GEOMLOSS[cell.name])
    if cell.name == OTT:
        return lambda: _ott(clouds, blur)
    return lambda: _pot(clouds, blur)[:2]


def potentials_of(cell: Cell, clouds: Hard) -> tuple[Tensor, Tensor] | None:
    """Return the potentials of the transport from x to y alone, which no contestant returns with the divergence."""
    blur = cell.blur * clouds.unit
    if cell.name == OURS:
        import otloss

        cost, options = otloss.costs.PointCost(clouds.x, clouds.y), {"marginal_penalty": cell.penalty}
        return otloss.solve(clouds.p, clouds.q, cost, epsilon=2 * blur**2, **options).potentials
    if cell.name in GEOMLOSS:
        from geomloss import SamplesLoss

        loss = SamplesLoss("sinkhorn", p=2, blur=blur, scaling=GEOMLOSS[cell.name], reach=_reach(cell.penalty),
                           debias=False, potentials=True, backend="tensorized")  # fmt: skip
        f, g = loss(clouds.p, clouds.x, clouds.q, clouds.y)
        return 2 * f.reshape(clouds.p.shape), 2 * g.reshape(clouds.q.shape)
    if cell.name == POT:
        return _pot(clouds, blur)[2:]
    return None


def takes(cell: Cell) -> bool:
    if "d" in cell.size or cell.kind in MANY_AXES:
        if cell.kind not in MANY_AXES or "d" not in cell.size or cell.work != DIVERGENCE or cell.blur != 0.05:
            return False
        axes = AXES_OF_DATA.get(cell.kind)
        if axes is not None and (data_of(cell.kind) is None or not cell.size.endswith(axes)):
            return False
        return cell.name not in (POT, OTT)
    *batch, n = map(int, cell.size.split("x"))
    if (cell.work != DIVERGENCE and not batch) or (cell.name == EXACT and cell.work != DIVERGENCE):
        return False
    if cell.work == BARYCENTER:
        return cell.name == OURS
    if cell.name == OTT:
        return importlib.util.find_spec("ott") is not None and not batch and cell.work == DIVERGENCE
    if cell.name == POT:
        return n <= POT_POINTS and cell.work == DIVERGENCE
    return True


def _ours(clouds: Hard, blur: float, penalty: float | None) -> Answer:
    import otloss

    x = clouds.x.clone().requires_grad_()
    values = otloss.cloud_loss(x, clouds.y, clouds.p, clouds.q, blur=blur, marginal_penalty=penalty)
    return values.detach(), torch.autograd.grad(values.sum(), x)[0]


def _barycenter(clouds: Hard, blur: float) -> Answer:
    """Return the barycenter of histograms on the first cloud; they have no gradient here."""
    import otloss

    points = clouds.x[0]
    p = torch.rand(4, len(points), generator=torch.Generator().manual_seed(0)) + 0.01
    values = otloss.barycenter(p / p.sum(-1, keepdim=True), otloss.costs.PointCost(points, points), epsilon=2 * blur**2)
    return values, torch.zeros_like(points)


def _exact(clouds: Hard) -> Answer:
    import otloss

    x = clouds.x.clone().requires_grad_()
    values = otloss.cloud_loss(x, clouds.y, clouds.p, clouds.q, kind="emd")
    return values.detach(), torch.autograd.grad(values.sum(), x)[0]


def _reach(penalty: float | None) -> float | None:
    return None if penalty is None else math.sqrt(penalty / 2)


def _geomloss(clouds: Hard, blur: float, penalty: float | None, scaling: float) -> Answer:
    from geomloss import SamplesLoss

    x = clouds.x.clone().requires_grad_()
    loss = SamplesLoss("sinkhorn", p=2, blur=blur, scaling=scaling, reach=_reach(penalty), backend="tensorized")
    values = loss(clouds.p, x, clouds.q, clouds.y)
    return values.detach(), torch.autograd.grad(values.sum(), x)[0]


def _pot(clouds: Hard, blur: float) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Values, gradient and the potentials between x and y, one pair of clouds after the other, in float64."""
    import ot

    epsilon, found = 2 * blur**2, []
    parts = (t.double().reshape(-1, *t.shape[clouds.p.dim() - 1 :]) for t in (clouds.x, clouds.y, clouds.p, clouds.q))
    for x, y, p, q in zip(*parts, strict=True):
        p, q = p / p.sum(), q / q.sum()
        value, gradient, fg = 0.0, torch.zeros_like(x), []
        for one, other, a, b, share in ((x, y, p, q, 0.5), (x, x, p, p, -0.25), (y, y, q, q, -0.25)):
            cost = (one.unsqueeze(-2) - other).square().sum(-1)
            plan, log = ot.bregman.sinkhorn_stabilized(
                a.numpy(), b.numpy(), cost.numpy(), epsilon, numItermax=POT_ITERATIONS, log=True, warn=False
            )
            plan = torch.from_numpy(plan)
            product = a.unsqueeze(-1) * b
            divergence = torch.special.xlogy(plan, plan / product).sum() - plan.sum() + 1
            value += share * float((plan * cost).sum() + epsilon * divergence)
            sides = 1 if other is y and one is x else 2
            if one is x:
                gradient += share * sides * 2 * (plan.sum(-1, keepdim=True) * one - plan @ other)
                fg = fg or [epsilon * (torch.from_numpy(np.asarray(log[name])) - w.log())
                            for name, w in (("logu", a), ("logv", b))]  # fmt: skip
        found.append((torch.tensor(value), gradient, *fg))
    values, gradients, f, g = (torch.stack(column) for column in zip(*found, strict=True))
    return values, gradients, f.reshape(clouds.p.shape), g.reshape(clouds.q.shape)


def _ott(clouds: Hard, blur: float) -> Answer:
    """Compiled once, outside of the time."""
    import jax
    from ott.geometry.pointcloud import PointCloud
    from ott.tools.sinkhorn_divergence import sinkhorn_divergence

    def value(x: Any, y: Any, p: Any, q: Any) -> Any:
        return sinkhorn_divergence(PointCloud, x, y, epsilon=2 * blur**2, a=p, b=q)[0] / 2

    key = (clouds.x.shape, blur)
    if key not in _COMPILED:
        _COMPILED[key] = jax.jit(jax.value_and_grad(value))
    found, gradient = _COMPILED[key](*(t.numpy() for t in (clouds.x, clouds.y, clouds.p, clouds.q)))
    return torch.tensor(float(found)), torch.from_numpy(np.array(gradient))


_COMPILED: dict[Any, Callable[..., Any]] = {}


# ---- cells, each in a process that can be ended ----------------------------------------------------------------------


def measured(cell: Cell) -> dict[str, Any]:
    """Seconds and errors of a cell, without the marginal error."""
    from otloss import ConvergenceWarning

    clouds = Hard.of(cell.kind, cell.size)
    step, seconds = step_of(cell, clouds), []
    if cell.name == OTT:
        step()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        while not seconds or (sum(seconds) < TURN and len(seconds) < CALLS):
            started = time.process_time()
            values, gradient = step()
            seconds.append(time.process_time() - started)
    row: dict[str, Any] = {"seconds": f"{statistics.median(seconds):.4f}"}
    if cell.name == OURS:
        late = [str(w.message) for w in caught if issubclass(w.category, ConvergenceWarning)]
        row["converged"] = "no" if late else "yes"
    reference = None if cell.work == BARYCENTER else references().get(cell.reference)
    if cell.name != EXACT and reference is not None:
        row["value_error"] = f"{reference.value_error(values):.1e}"
        row["gradient_error"] = f"{reference.gradient_error(gradient):.1e}"
    return row


def error_of_marginals(cell: Cell) -> dict[str, Any]:
    clouds = Hard.of(cell.kind, cell.size)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = potentials_of(cell, clouds)
    if found is None:
        return {}
    blur = cell.blur * clouds.unit
    return {"marginal_error": f"{marginal_error(clouds, *found, 2 * blur**2, cell.penalty):.1e}"}


def work(pipe: Connection) -> None:
    """Measure in a process of its own: first a small cell of every contestant, which compiles, then each cell sent."""
    torch.set_num_threads(1)
    while True:
        measure, cell = pipe.recv()
        try:
            pipe.send(measure(cell))
        except Exception as error:
            pipe.send({"note": f"{type(error).__name__}: {str(error).splitlines()[0][:120]}"})


class Worker:
    """A process that measures cells; it is ended where a cell takes longer than the limit."""

    def __init__(self, limit: float) -> None:
        self.limit, self._process, self._pipe = limit, None, None

    def ask(self, measure: Callable[[Cell], dict[str, Any]], cell: Cell) -> dict[str, Any] | None:
        """What `measure` returns, None after the limit."""
        if self._process is None:
            self._start()
        if self._warm != cell.name:
            self._pipe.send((measured, Cell(cell.work, "uniform", SMALL["x" not in cell.size], 0.5, cell.name)))
            self._pipe.recv()
            self._warm = cell.name
        self._pipe.send((measure, cell))
        if self._pipe.poll(self.limit):
            return self._pipe.recv()
        self.end()
        return None

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, other = context.Pipe()
        self._process, self._warm = context.Process(target=work, args=(other,), daemon=True), ""
        self._process.start()

    def end(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.join()
            self._process = None


def row_of(cell: Cell, worker: Worker) -> dict[str, Any]:
    row = worker.ask(measured, cell)
    if row is None:
        return {"seconds": f"{worker.limit:g}", "converged": "no", "note": f"over {worker.limit:g} s"}
    if "note" not in row and cell.name != EXACT and cell.work != BARYCENTER:
        row |= worker.ask(error_of_marginals, cell) or {}
    return row


# ---- the table -------------------------------------------------------------------------------------------------------


def parsed(arguments: Sequence[str], *, small: bool) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks hard_clouds", allow_abbrev=False)
    parser.add_argument("--works", nargs="+", default=WORKS, choices=WORKS)
    parser.add_argument("--kinds", nargs="+", default=("uniform", "clusters") if small else (*KINDS, *MANY_AXES),
                        choices=(*KINDS, *MANY_AXES))  # fmt: skip
    parser.add_argument("--sizes", nargs="+", default=SMALL if small else (*SIZES, *MANY_AXES_SIZES),
                        help="points, PROBLEMSxPOINTS, or POINTSdAXES")  # fmt: skip
    parser.add_argument("--blurs", nargs="+", type=float, default=(0.5,) if small else BLURS)
    parser.add_argument("--names", nargs="+", default=NAMES, choices=NAMES)
    parser.add_argument("--limit", type=float, default=60.0, help="seconds for a cell (%(default)s)")
    return parser.parse_args(arguments)


def cells_of(options: argparse.Namespace) -> list[Cell]:
    """Return the cells in an order in which what is compared is measured one after the other."""
    every = [
        Cell(work, kind, size, blur, name)
        for work in options.works
        for size in options.sizes
        for blur in options.blurs
        for kind in options.kinds
        for name in options.names
    ]
    return [cell for cell in every if takes(cell)]


def main(settings: Settings, arguments: Sequence[str] = ()) -> None:
    options = parsed(arguments, small=settings.small)
    heading("hard_clouds", ", ".join(options.works), "one thread, seconds of the processor")
    worker, rows = Worker(options.limit), {}
    kept = None if settings.output is None else Kept(settings.output / FILE)
    for cell in cells_of(options):
        row = rows[cell.key] = row_of(cell, worker)
        say(shown(cell, row))
        if kept is not None:
            kept.add(cell, row)
    worker.end()
    if settings.small:
        say(SMALL_SIZES)
        return
    say("")
    table([["work", "limit", "measured"], *verdicts(rows)])


def shown(cell: Cell, row: dict[str, Any]) -> str:
    parts = {"value": "value_error", "gradient": "gradient_error", "marginals": "marginal_error"}
    errors = "".join(f"  {what} {row.get(field) or '-':>7}" for what, field in parts.items())
    late = " NOT CONVERGED" if row.get("converged") == "no" else ""
    where = f"{cell.work} {cell.size} {cell.blur:g} {cell.kind}"
    return f"{where:<36} {cell.name:<15} {float(row.get('seconds', 'nan')):9.4f} s{errors}{late} {row.get('note', '')}"


class Kept:
    """The rows of a file; one that is measured again is replaced."""

    def __init__(self, path: Path) -> None:
        self.path, self.rows = path, dict[tuple[str, ...], dict[str, str]]()
        if path.exists():
            with path.open(newline="", encoding="utf-8") as stream:
                self.rows = {tuple(row[key] for key in KEYS): row for row in csv.DictReader(stream)}

    def add(self, cell: Cell, row: dict[str, Any]) -> None:
        machine = {"date": date.today().isoformat(), "hardware": hardware(), "torch": torch.__version__}
        self.rows[cell.key] = dict(zip(KEYS, cell.key, strict=True)) | row | machine
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("w", newline="", encoding="utf-8") as stream:
            writer = csv.DictWriter(stream, FIELDS, restval="", lineterminator="\n")
            writer.writeheader()
            writer.writerows(self.rows.values())


def verdicts(rows: dict[tuple[str, ...], dict[str, Any]]) -> list[list[str]]:
    """The worst kind of each size, work and blur, over what it is compared with."""
    found = []
    seconds = {key: float(row["seconds"]) for key, row in rows.items() if "seconds" in row}
    ours = [key for key in seconds if key[-1] == OURS]
    late = sum(rows[key].get("converged") == "no" for key in ours)
    found.append([f"rows of {OURS} that do not converge, of {len(ours)}", "0", str(late)])
    for work, size, blur in dict.fromkeys((key[0], key[2], key[3]) for key in ours):
        for what, limit in limits_of(work, size):
            ratios = {}
            for key in ours:
                peer = (work, "uniform" if what == OURS else key[1], size, blur, what)
                if (key[0], key[2], key[3]) == (work, size, blur) and peer in seconds and peer != key:
                    ratios[key[1]] = seconds[key] / seconds[peer]
            if ratios:
                worst = max(ratios, key=lambda kind: ratios[kind])
                of = "ours of uniform clouds" if what == OURS else what
                row = Limit(f"{work} {size}, blur {blur}: worst kind ({worst}) / {of}", limit)
                found.append(row.verdict(ratios[worst]))
    return found


def limits_of(work: str, size: str) -> list[tuple[str, float]]:
    """What the time of a kind is compared with, and how many times that it may take."""
    if work != DIVERGENCE or "x" in size:
        return [(OURS, {DIVERGENCE: 4.0, UNBALANCED: 5.0, BARYCENTER: 10.0}[work])]
    default = next(iter(GEOMLOSS))
    if "d" in size:
        return [(default, 0.5), (EXACT, 3.0)]
    if int(size) >= 20_000:
        return [(OURS, 5.0)]
    return [(default, 1.0), *([(EXACT, 3.0)] if int(size) >= 6000 else [])]
