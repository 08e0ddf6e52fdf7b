"""Transport solvers against POT and GeomLoss: exact, entropic, on the line, and a divergence between large clouds.

Every number is a ratio of times in interleaved rounds at an accuracy that is stated: exact and line solvers by their
values, the entropic ones by a duality gap that is measured alike for all (`solver_cases`), the divergence by its errors
in value and gradient (`solver_clouds`). A contestant with a knob gets the cheapest setting that is accurate enough, of
a sweep of its own. Peers run without gradients where they have none that are right, and ours are then timed both ways.
The verdict is on the fastest peer that is accurate enough; both of POT's entropic methods stand beside it.
"""

from __future__ import annotations

import statistics
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from scipy.optimize import linear_sum_assignment

import otloss
from benchmarks import solver_clouds
from benchmarks.measure import (
    Settings,
    Timing,
    heading,
    keep,
    ratios,
    report_slowdowns,
    say,
    slowdowns,
    table,
    timed_rounds,
)
from benchmarks.solver_cases import Problems, Ruler
from benchmarks.solver_peers import (
    OURS,
    OURS_GRADIENTS,
    POT_METHODS,
    Contestant,
    Found,
    Lines,
    cheapest,
    emd_steps,
    geomloss_batch,
    our_lines,
    ours,
    ours_with_gradients,
    pot,
    pot_lines,
    say_found,
)
from otloss.costs import PointCost

NAME = "solvers"
ROUNDS, SMALL_ROUNDS, LONG_ROUNDS = 11, 1, 3  # long: steps of seconds
TURN = 0.02  # seconds of calls that are one measurement
GAP = 1e-3
CLOSER_GAP = 1e-5  # what a first-order method pays for two more digits
PATIENCE = 100.0  # times our time, that a peer may take to reach the gap
CLOUD_PATIENCE = 10.0
CLOUD_REPEATED = 3.0  # times our time, beyond which a peer's one run in the sweep is its timing
EPSILONS = {0.1: 4.0, 0.01: 40.0, 0.001: 100.0}  # of the cost range, and how many times faster we are to be
SAME_VALUE = 1e-4  # relative, between float32 contestants without a knob


@dataclass(frozen=True)
class AtLeast:
    """A row of the table: peers are to take at least `limit` times as long as we do."""

    what: str
    limit: float

    def judged(self, *faster: float) -> list[str]:
        """The median, with its quartiles where there are several."""
        goal = f">= {self.limit:g} x"
        if not faster:
            return [self.what, goal, "not measured"]
        ratio = statistics.median(faster)
        verdict = f"{ratio:.2f} x, {'met' if ratio >= self.limit else 'missed'}"
        if len(faster) > 1:
            low, _, high = statistics.quantiles(faster, n=4, method="inclusive")
            noise = ", within noise" if low < self.limit <= high else ""
            verdict += f" ({low:.2f} to {high:.2f}{noise})"
        return [self.what, goal, verdict]

    def unreached(self, patience: float) -> list[str]:
        """No peer was accurate enough in `patience` times our time."""
        verdict = "met" if patience >= self.limit else "unknown"
        return [self.what, f">= {self.limit:g} x", f"no peer got there in {patience:g} x our time, {verdict}"]


class Bench:
    """Runs cases, prints and keeps them, and collects the verdicts."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.verdicts: list[list[str]] = []

    def rounds(self, *, long: bool = False) -> int:
        most = self.settings.rounds or (SMALL_ROUNDS if self.settings.small else ROUNDS)
        return min(most, LONG_ROUNDS) if long else most

    def timed(
        self, case: str, steps: dict[str, Callable[[], Any]], *, notes: dict[str, str], rounds: int
    ) -> dict[str, Timing]:
        """Time, print and keep; ratios are to the first of the steps."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            timings = timed_rounds(steps, rounds=rounds, turn=TURN)
        heading(NAME, case, f"{rounds} rounds")
        first = next(iter(steps))
        rows = []
        for name, timing in timings.items():
            ratio = statistics.median(ratios(timing, timings[first]))
            say(f"  {name:<34} {timing.median * 1000:10.2f} ms ± {timing.spread:4.0%}   {ratio:8.2f} x {first}"
                f"   {notes.get(name, '')}")  # fmt: skip
            rows.append({"name": name, "seconds": f"{timing.median:.6f}", "ratio": f"{ratio:.4f}", "peer": first,
                         "rounds": rounds, "spread": f"{timing.spread:.3f}", "error": notes.get(name, "")})  # fmt: skip
        keep(self.settings.output, NAME, case, rows)
        return timings

    def judge(self, limit: AtLeast, ours: Timing, peers: list[Timing]) -> None:
        best = min(peers, key=lambda peer: peer.median)
        self.verdicts.append(limit.judged(*ratios(best, ours)))

    def compare(self, what: str, ours: Timing, peers: dict[str, Timing], *, unreached: str) -> None:
        """A row without a limit: the fastest of these, by name."""
        if not peers:
            self.verdicts.append([what, "", unreached])
            return
        name = min(peers, key=lambda name: peers[name].median)
        ratio = statistics.median(ratios(peers[name], ours))
        self.verdicts.append([what, "", f"{ratio:.2f} x, {name}"])


def _agreement(answers: dict[str, torch.Tensor]) -> dict[str, str]:
    """Largest relative difference of each one's values from the first one's; raises where that is no rounding."""
    first = next(iter(answers.values())).double()
    notes = {}
    for name, values in answers.items():
        off = float(((values.double() - first) / first).abs().max())
        if not off <= SAME_VALUE:
            raise RuntimeError(f"{name} is off by {off:.2g} from the others, expected at most {SAME_VALUE:g}.")
        notes[name] = f"{off:.1e}"
    return notes


# ---- exact -------------------------------------------------------------------------------------------------------


def exact_case(bench: Bench, problems: Problems, case: str, limit: AtLeast, *, long: bool = False) -> None:
    steps = emd_steps(problems)
    notes = _agreement({name: step()[0] for name, step in steps.items()})
    timings = bench.timed(case, steps, notes=notes, rounds=bench.rounds(long=long))
    bench.judge(limit, timings[OURS], [timing for name, timing in timings.items() if name != OURS])


def assignment_case(bench: Bench, batch: int, n: int, dim: int) -> None:
    """Uniform weights, from points: scipy's assignment is a peer, one problem after the other."""
    generator = torch.Generator().manual_seed(0)
    x, y = (torch.randn(batch, n, dim, generator=generator) for _ in range(2))
    uniform = torch.full((batch, n), 1 / n)

    def by_scipy() -> torch.Tensor:
        costs = torch.cdist(x, y).square().numpy()
        return torch.tensor([cost[linear_sum_assignment(cost)].mean() for cost in costs])

    steps = {OURS: lambda: otloss.emd(uniform, uniform, PointCost(x, y)), "scipy's assignment": by_scipy}
    notes = _agreement({name: step() for name, step in steps.items()})
    case = f"exact, {batch} assignments {n} x {n}, points in {dim} dimensions, values"
    ours, peer = bench.timed(case, steps, notes=notes, rounds=bench.rounds()).values()
    bench.judge(AtLeast(case.removeprefix("exact, "), 1.0), ours, [peer])


def busy_case(bench: Bench, problems: Problems) -> None:
    """All threads and one, where every core has another process to run; torch's softmax of as many entries beside."""
    batch, n = problems.p.shape
    given = (problems.p, problems.q, problems.cost)

    def on_one_thread() -> None:
        torch.set_num_threads(1)
        otloss.emd(*given)

    steps = {OURS: lambda: otloss.emd(*given), "otloss, one thread": on_one_thread,
             "torch softmax": lambda: problems.cost.softmax(-1)}  # fmt: skip
    found = slowdowns(steps, rounds=bench.rounds(), turn=TURN)
    case = f"exact, {batch} problems {n} x {n}, values"
    report_slowdowns(NAME, case, found, rounds=bench.rounds(), output=bench.settings.output)
    row = AtLeast("exact values beside busy processes: one thread, all threads", 0.8)
    bench.judge(row, found[OURS][1], [found["otloss, one thread"][1]])


def exact_cases(bench: Bench) -> None:
    small = bench.settings.small
    batch, n = (4, 8) if small else (64, 64)
    exact_case(
        bench, Problems.random(batch, n), f"exact, {batch} problems {n} x {n}, values and gradients in p, q, cost",
        AtLeast(f"{batch} exact problems {n} x {n}, with gradients", 4.0),
    )  # fmt: skip
    busy_case(bench, Problems.random(batch, n))
    for assignments in ((4, 4, 2), (1, 8, 20)) if small else ((64, 16, 2), (1, 256, 2), (1, 256, 784)):
        assignment_case(bench, *assignments)
    n = 30 if small else 2000
    for uniform in (True, False):
        weights = "uniform" if uniform else "random"
        exact_case(
            bench, Problems.random(1, n, dim=3, uniform=uniform),
            f"exact, one problem n={n} in 3-D, {weights} weights, value and gradients in p, q, cost",
            AtLeast(f"one exact problem n={n}, {weights} weights, with gradients", 1.0), long=True,
        )  # fmt: skip


# ---- entropic ----------------------------------------------------------------------------------------------------


def _seconds(run: Callable[[], Any]) -> float:
    started = time.perf_counter()
    run()
    return time.perf_counter() - started


def entropic_case(bench: Bench, problems: Problems, epsilon: float, limit: AtLeast, *, gap: float = GAP) -> None:
    batch, n = problems.p.shape
    case = f"entropic, {batch} problems {n} x {n}, epsilon {epsilon:g} of the cost range, gap {gap:g}"
    ruler = Ruler(problems, epsilon)
    say(f"\n{case}; the ruler is off by {ruler.own.max():.1e} at most")
    mine = ours(problems, epsilon)
    found: dict[Contestant, Found] = {mine: cheapest(mine, ruler, gap=gap, most_seconds=60.0)}
    setting = found[mine].setting
    if setting is None:
        say_found(mine, found[mine], gap)
        bench.verdicts.append([limit.what, f">= {limit.limit:g} x", f"ours got to a gap of {found[mine].gap:.1e}"])
        return
    our_seconds = min(_seconds(lambda: mine.solve(setting)) for _ in range(5))
    for peer in [*pot(problems, epsilon), geomloss_batch(problems, epsilon)]:
        found[peer] = cheapest(peer, ruler, gap=gap, most_seconds=PATIENCE * our_seconds)
    for contestant, what in found.items():
        say_found(contestant, what, gap)
    steps: dict[str, Callable[[], Any]] = {
        c.name: partial(c.solve, what.setting) for c, what in found.items() if what.setting is not None
    }
    gradients = ours_with_gradients(problems, epsilon)
    steps[OURS_GRADIENTS] = lambda: gradients(setting)
    notes = {c.name: f"{what.gap:.1e}" for c, what in found.items()}
    timings = bench.timed(case, steps, notes=notes, rounds=bench.rounds())
    peers = {name: timing for name, timing in timings.items() if name not in (OURS, OURS_GRADIENTS)}
    if peers:
        bench.judge(limit, timings[OURS], list(peers.values()))
    else:
        bench.verdicts.append(limit.unreached(PATIENCE))
    entropic_rows(bench, timings, peers)


def entropic_rows(bench: Bench, timings: dict[str, Timing], peers: dict[str, Timing]) -> None:
    """Beside the verdict: POT's methods each, and ours with gradients (theirs stay values only)."""
    unreached = f"did not get there in {PATIENCE:g} x our time"
    for method, what in POT_METHODS.items():
        its = {name: timing for name, timing in peers.items() if name.startswith(f"POT {method},")}
        bench.compare(f"- values, POT {method} ({what})", timings[OURS], its, unreached=unreached)
    unreached = f"no peer got there in {PATIENCE:g} x our time for values"
    bench.compare(
        "- ours values and gradients, fastest peer values", timings[OURS_GRADIENTS], peers, unreached=unreached
    )


def entropic_cases(bench: Bench) -> None:
    batch, n = (4, 8) if bench.settings.small else (64, 64)
    problems = Problems.random(batch, n)
    for epsilon, faster in EPSILONS.items():
        entropic_case(
            bench, problems, epsilon, AtLeast(f"{batch} entropic problems {n} x {n}, epsilon {epsilon:g}", faster)
        )
    for epsilon in (0.1, 0.01):
        what = f"the same, epsilon {epsilon:g}, gap {CLOSER_GAP:g}"
        entropic_case(bench, problems, epsilon, AtLeast(what, 1.0), gap=CLOSER_GAP)
    memory_case(bench, problems)


def saved_bytes(problems: Problems, *, iterations: int) -> int:
    """What the graph of the values holds for the backward pass, each storage once."""
    inputs = problems.with_gradients()
    saved: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    with warnings.catch_warnings(), torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        warnings.simplefilter("ignore", otloss.ConvergenceWarning)
        value = otloss.sinkhorn(*inputs, epsilon=1e-3, tolerance=1e-13, max_iterations=iterations)
    del value
    return sum(saved.values())


def memory_case(bench: Bench, problems: Problems) -> None:
    batch, n = problems.p.shape
    few, many = (saved_bytes(problems, iterations=count) for count in (5, 500))
    case = f"entropic, {batch} problems {n} x {n}, held for the backward pass after 5 and after 500 iterations"
    heading(NAME, case, "saved tensors")
    rows = []
    for name, size in (("5 iterations", few), ("500 iterations", many)):
        say(f"  {name:<34} {size / 2**20:10.3f} MiB, {size / problems.cost.nbytes:.2f} x the costs")
        rows.append({"name": f"{OURS}, {name}", "mebibytes": f"{size / 2**20:.3f}"})
    keep(bench.settings.output, NAME, case, rows)
    verdict = f"{many / few:.2f} x, {'met' if many <= few else 'missed'}"
    bench.verdicts.append(["memory held after 500 iterations / after 5", "<= 1 x", verdict])


# ---- the line, and clouds ----------------------------------------------------------------------------------------


def line_case(bench: Bench, lines: Lines, case: str, limit: float) -> None:
    for gradients in (False, True):
        mine, peers = our_lines(lines, gradients=gradients), pot_lines(lines, gradients=gradients)
        steps = mine | peers
        notes = _agreement({name: step() for name, step in steps.items()})
        what = f"{case}, values{' and gradients' if gradients else ''}"
        timings = bench.timed(f"line, {what}", steps, notes=notes, rounds=bench.rounds(long=True))
        for name in mine:
            # The limit is for values; gradients, that one peer has as well, are to come no slower.
            row = AtLeast(f"{name.removeprefix('otloss ')}, {what}", 1.0 if gradients else limit)
            bench.judge(row, timings[name], [timings[peer] for peer in peers])


def line_cases(bench: Bench) -> None:
    small = bench.settings.small
    batch, bins = (8, 20) if small else (1024, 1000)
    line_case(bench, Lines.shared(batch, bins), f"{batch} x {bins}, one support", 100.0)
    batch, samples = (8, 16) if small else (4096, 256)
    line_case(bench, Lines.apart(batch, samples), f"{batch} pairs of {samples} samples, supports apart", 5.0)


def cloud_case(bench: Bench) -> None:
    n = 40 if bench.settings.small else 10_000
    clouds, tiny = solver_clouds.Clouds.random(n), solver_clouds.Clouds.random(16)
    for contestant in [solver_clouds.ours(tiny), *solver_clouds.peers(tiny)]:
        contestant.solve(contestant.settings[0])  # compiles
    case = f"divergence, n={n} in 3-D, blur {solver_clouds.BLUR:g}, value and gradient in x"
    say(f"\n{case}: errors of at most {solver_clouds.VALUE_ERROR:g} and {solver_clouds.GRADIENT_ERROR:g}")
    truth = solver_clouds.reference(clouds)
    mine = solver_clouds.ours(clouds)
    found = {mine: solver_clouds.cheapest(mine, truth, most_seconds=600.0)}
    for peer in solver_clouds.peers(clouds):
        found[peer] = solver_clouds.cheapest(peer, truth, most_seconds=CLOUD_PATIENCE * found[mine].seconds)
    limit = AtLeast(f"divergence, n={n}, value and gradient", 1.0)
    bench.verdicts.append(clouds_judged(bench, case, limit, mine, found))
    bench.verdicts[-1][-1] += f" ({solver_clouds.WHICH})"


def planar_cases(bench: Bench) -> None:
    """GeomLoss' multiscale solver with its default settings, and ours with errors of at most the same."""
    if not solver_clouds.HAS_KEOPS:
        say("\nplanar clouds: KeOps is not installed, so GeomLoss' multiscale solver does not run")
        return
    for n in (40,) if bench.settings.small else (5_000, 10_000, 20_000):
        clouds = solver_clouds.Clouds.random(n, axes=2)
        for blur in (0.05, 0.01):
            case = f"divergence, n={n} in 2-D, blur {blur:g}, value and gradient in x"
            truth = solver_clouds.reference(clouds, blur=blur)
            mine, peer = solver_clouds.ours(clouds, blur=blur), solver_clouds.geomloss(clouds, "multiscale", blur=blur)
            limits = solver_clouds.errors_of(peer.solve(peer.settings[0]), truth)
            say(f"\n{case}: errors of at most {limits[0]:.1e} and {limits[1]:.1e}, those of {peer.name}")
            found = solver_clouds.cheapest(mine, truth, most_seconds=600.0, limits=limits)
            limit = AtLeast(f"divergence, n={n} in 2-D, blur {blur:g}", 1.0)
            if found.setting is None:
                bench.verdicts.append([limit.what, ">= 1 x", "ours was not accurate enough"])
                continue
            steps = {mine.name: partial(mine.solve, found.setting), peer.name: partial(peer.solve, peer.settings[0])}
            notes = {mine.name: f"{found.gradient_error:.1e}", peer.name: f"{limits[1]:.1e}"}
            timings = bench.timed(case, steps, notes=notes, rounds=bench.rounds(long=True))
            bench.judge(limit, timings[mine.name], [timings[peer.name]])


def clouds_judged(
    bench: Bench,
    case: str,
    limit: AtLeast,
    mine: solver_clouds.CloudContestant,
    found: dict[solver_clouds.CloudContestant, solver_clouds.CloudFound],
) -> list[str]:
    """Time whoever is accurate enough, peers that are far slower by the one run that found it; return the verdict."""
    if found[mine].setting is None:
        return [limit.what, ">= 1 x", "ours was not accurate enough"]
    reached = {c.name: what for c, what in found.items() if what.setting is not None}
    again = CLOUD_REPEATED * found[mine].seconds
    notes = {name: f"{what.gradient_error:.1e}" for name, what in reached.items()}
    steps: dict[str, Callable[[], Any]] = {
        c.name: partial(c.solve, what.setting)
        for c, what in found.items()
        if what.setting is not None and (c is mine or what.seconds <= again)
    }
    timings = bench.timed(case, steps, notes=notes, rounds=bench.rounds(long=True))
    ours_took = timings.pop(mine.name)
    once = {name: what.seconds for name, what in reached.items() if name not in steps}
    rows = []
    for name, seconds in once.items():
        ratio = seconds / ours_took.median
        say(f"  {name:<34} {seconds * 1000:10.2f} ms, one run {ratio:8.2f} x {mine.name}   {notes[name]}")
        rows.append({"name": name, "seconds": f"{seconds:.6f}", "ratio": f"{ratio:.4f}", "peer": mine.name,
                     "rounds": 1, "error": notes[name]})  # fmt: skip
    keep(bench.settings.output, NAME, case, rows)
    if timings:
        best = min(timings.values(), key=lambda timing: timing.median)
        return limit.judged(*ratios(best, ours_took))
    if once:
        return limit.judged(min(once.values()) / ours_took.median)
    # Each setting costs more than the one before: one that is accurate enough takes longer than the last that was not.
    longest = min(what.seconds for c, what in found.items() if c is not mine) / ours_took.median
    return limit.unreached(float(f"{longest:.3g}"))


def main(settings: Settings) -> None:
    bench = Bench(settings)
    for cases in (exact_cases, entropic_cases, line_cases, cloud_case, planar_cases):
        cases(bench)
    if settings.small:
        say("\nThese sizes are there to see that everything runs; they say nothing about the limits.")
        return
    say("\nHow many times as long the fastest peer takes: medians of the ratios in each round (and their quartiles)")
    table([["work", "limit", "measured"], *bench.verdicts])
