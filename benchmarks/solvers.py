"""Transport solvers compared with POT and GeomLoss: exact, entropic, on the line, and a divergence of large clouds.

Every number is a ratio of times in interleaved rounds at a stated accuracy: exact and line solvers by their values, the
entropic ones by a duality gap that is computed alike for all (`solver_cases`), the divergence by its errors in value
and gradient (`solver_clouds`). A contestant with a setting gets the cheapest one that is accurate enough, found by a
sweep. Peers whose gradients are not correct run without them, and ours are then timed both ways. Limits apply to the
fastest peer that is accurate enough; both of POT's entropic methods are listed too.
"""

from __future__ import annotations

import statistics
from functools import partial

import numpy as np
import ot
import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor

import otloss
from benchmarks import solver_clouds
from benchmarks.bench import OURS, Bench, at_least, peers_of
from benchmarks.measure import (
    TURN,
    Limit,
    Settings,
    Timing,
    keep,
    ratios,
    report_slowdowns,
    say,
    slowdowns,
    timed_rounds,
)
from benchmarks.solver_cases import Gaps, Problems
from benchmarks.solver_peers import (
    OURS_GRADIENTS,
    POT_METHODS,
    Contestant,
    Found,
    Lines,
    Step,
    cheapest,
    emd_steps,
    geomloss_batch,
    line_steps,
    ours,
    ours_with_gradients,
    pot,
)
from otloss.costs import PointCost

NAME = "solvers"
ROUNDS, SMALL_ROUNDS, LONG_ROUNDS = 11, 1, 3  # long: steps of seconds
GAP = 1e-3
CLOSER_GAP = 1e-5  # shows what two more digits cost a first-order method
PATIENCE = 100.0  # the time that a peer may take to reach the gap, in units of ours
CLOUD_PATIENCE = 10.0
CLOUD_REPEATED = 3.0  # a peer that takes longer than this, in units of our time, is timed by one run
EPSILONS = {0.1: 4.0, 0.01: 40.0, 0.001: 100.0}  # relative to the cost range, and how many times faster we are to be
PENALTY = 1.0  # relative to the cost range, for unbalanced problems
SAME_VALUE = 1e-4  # relative, between float32 contestants without a setting


def unreached(limit: Limit, patience: float) -> list[str]:
    """No peer was accurate enough in `patience` times our time."""
    verdict = "met" if patience >= limit.limit else "unknown"
    return [limit.what, limit.goal, f"no peer is accurate enough in {patience:.3g} x our time, {verdict}"]


def compare(bench: Bench, what: str, ours: Timing, peers: dict[str, Timing], *, otherwise: str) -> None:
    """A row without a limit: the name of the fastest peer, and its ratio."""
    name = min(peers, key=lambda name: peers[name].median, default=None)
    results = otherwise if name is None else f"{statistics.median(ratios(peers[name], ours)):.2f} x, {name}"
    bench.verdicts.append([what, "", results])


def same_values(answers: dict[str, Tensor]) -> dict[str, str]:
    """Largest relative difference from the first one's values; raises if it is more than rounding."""
    first = next(iter(answers.values())).double()
    notes = {}
    for name, values in answers.items():
        difference = float(((values.double() - first) / first).abs().max())
        if not difference <= SAME_VALUE:
            raise RuntimeError(f"{name} differs by {difference:.2g} from the others, expected at most {SAME_VALUE:g}.")
        notes[name] = f"{difference:.1e}"
    return notes


# ---- exact -----------------------------------------------------------------------------------------------------------


def exact_case(bench: Bench, case: str, limit: Limit, steps: dict[str, Step], *, long: bool = False) -> None:
    notes = same_values({name: step() for name, step in steps.items()})
    timings = bench.timed(f"exact, {case}", steps, notes=notes, most=LONG_ROUNDS if long else None)
    bench.judge(limit, timings[OURS], *peers_of(timings))


def busy_case(bench: Bench, problems: Problems) -> None:
    """All threads, and one, beside one busy process per core; torch's softmax of as many entries for comparison."""
    batch, n = problems.p.shape
    arguments = (problems.p, problems.q, problems.cost)

    def on_one_thread() -> None:
        torch.set_num_threads(1)
        otloss.emd(*arguments)

    steps = {OURS: lambda: otloss.emd(*arguments), "otloss, one thread": on_one_thread,
             "torch softmax": lambda: problems.cost.softmax(-1)}  # fmt: skip
    results = slowdowns(steps, rounds=bench.rounds, turn=TURN)
    report_slowdowns(NAME, f"exact, {batch} problems {n} x {n}, values", results, output=bench.settings.output)
    row = at_least("exact values beside busy processes: one thread / all threads", 0.8)
    bench.verdicts.append(row.verdict(*ratios(results["otloss, one thread"][1], results[OURS][1])))


def assignment_case(bench: Bench, batch: int, n: int, dim: int) -> None:
    """Uniform weights, from points, compared with scipy's assignment of one problem after the other."""
    generator = torch.Generator().manual_seed(0)
    x, y = (torch.randn(batch, n, dim, generator=generator) for _ in range(2))
    uniform = torch.full((batch, n), 1 / n)

    def by_scipy() -> Tensor:
        costs = torch.cdist(x, y).square().numpy()
        return torch.tensor([cost[linear_sum_assignment(cost)].mean() for cost in costs])

    steps = {OURS: lambda: otloss.emd(uniform, uniform, PointCost(x, y)), "scipy's assignment": by_scipy}
    case = f"{batch} assignments {n} x {n}, points in {dim} dimensions, values"
    exact_case(bench, case, at_least(case, 1.0), steps)


def exact_cases(bench: Bench) -> None:
    small = bench.settings.small
    batch, n = (4, 8) if small else (64, 64)
    problems = Problems.random(batch, n)
    case = f"{batch} problems {n} x {n}, values and gradients in p, q, cost"
    exact_case(bench, case, at_least(f"{batch} exact problems {n} x {n}, with gradients", 4.0), emd_steps(problems))
    busy_case(bench, problems)
    for assignments in ((4, 4, 2), (1, 8, 20)) if small else ((64, 16, 2), (1, 256, 2), (1, 256, 784)):
        assignment_case(bench, *assignments)
    for kind in ("normal", "apart", "clustered"):
        moving_case(bench, kind)
    n = 30 if small else 2000
    for weights in ("uniform", "random"):
        steps = emd_steps(Problems.random(1, n, dim=3, uniform=weights == "uniform"))
        case = f"one problem n={n} in 3-D, {weights} weights, value and gradients in p, q, cost"
        limit = at_least(f"one exact problem n={n}, {weights} weights, with gradients", 1.0)
        exact_case(bench, case, limit, steps, long=True)


def moving_case(bench: Bench, kind: str) -> None:
    """Moving clouds of one weight per point: values and gradients in the points, compared with a loop of POT."""
    batch, n = (2, 16) if bench.settings.small else (8, 1024)
    generator = torch.Generator().manual_seed(0)
    x, y = (torch.randn(batch, n, 3, generator=generator) for _ in range(2))
    if kind == "apart":
        y += torch.tensor([6.0, 0.0, 0.0])
    if kind == "clustered":  # about ten clusters each, in shares that differ
        centres = 5 * torch.randn(2, 10, 3, generator=generator)
        for points, own in zip((x, y), centres, strict=True):
            points.mul_(0.3).add_(own[torch.randint(10, (batch, n), generator=generator)])
    x.requires_grad_()
    uniform = torch.full((n,), 1 / n)

    def our_step() -> Tensor:
        values = otloss.cloud_loss(x, y, kind="emd")
        torch.autograd.grad(values.sum(), x)
        return values.detach()

    def pot_step() -> Tensor:
        costs = [ot.dist(one, other) for one, other in zip(x, y, strict=True)]
        values = torch.stack([ot.emd2(uniform, uniform, cost, numItermax=10_000_000) for cost in costs])
        torch.autograd.grad(values.sum(), x)
        return values.detach()

    case = f"{batch} moving clouds of {n} points, {kind}, values and gradients in x"
    exact_case(bench, case, at_least(case, 3.0), {OURS: our_step, "POT emd2": pot_step}, long=True)


# ---- entropic --------------------------------------------------------------------------------------------------------


def entropic_case(bench: Bench, problems: Problems, epsilon: float, limit: Limit, *, gap: float = GAP) -> None:
    batch, n = problems.p.shape
    case = f"entropic, {batch} problems {n} x {n}, epsilon {epsilon:g} of the cost range, gap {gap:g}"
    gaps = Gaps(problems, epsilon)
    say(f"\n{case}; measured to {gaps.own.max():.1e}")
    mine = ours(problems, epsilon, gaps)
    results: dict[Contestant, Found] = {mine: cheapest(mine, [gap], max_seconds=60.0)}
    setting = results[mine].setting
    if setting is None:
        bench.verdicts.append([limit.what, limit.goal, f"ours reaches a gap of {results[mine].errors[0]:.1e}"])
        return
    our_seconds = timed_rounds({OURS: partial(mine.solve, setting)}, rounds=5)[OURS].median
    for peer in [*pot(problems, epsilon, gaps), geomloss_batch(problems, epsilon, gaps)]:
        results[peer] = cheapest(peer, [gap], max_seconds=PATIENCE * our_seconds)
    steps: dict[str, Step] = {c.name: partial(c.solve, f.setting) for c, f in results.items() if f.setting is not None}
    steps[OURS_GRADIENTS] = partial(ours_with_gradients(problems, epsilon), setting)
    notes = {c.name: f"{f.errors[0]:.1e}" for c, f in results.items()}
    timings = bench.timed(case, steps, notes=notes)
    peers = {name: timing for name, timing in timings.items() if not name.startswith(OURS)}
    if peers:
        bench.judge(limit, timings[OURS], *peers.values())
    else:
        bench.verdicts.append(unreached(limit, PATIENCE))
    for method, what in POT_METHODS.items():
        its = {name: timing for name, timing in peers.items() if name.startswith(f"POT {method},")}
        compare(bench, f"- values, POT {method} ({what})", timings[OURS], its,
                      otherwise=f"not accurate enough in {PATIENCE:g} x our time")  # fmt: skip
    compare(bench, "- ours values and gradients, fastest peer values", timings[OURS_GRADIENTS], peers,
                  otherwise=f"no peer is accurate enough in {PATIENCE:g} x our time for values")  # fmt: skip


def entropic_cases(bench: Bench) -> None:
    batch, n = (4, 8) if bench.settings.small else (64, 64)
    problems = Problems.random(batch, n)
    for epsilon, faster in EPSILONS.items():
        limit = at_least(f"{batch} entropic problems {n} x {n}, epsilon {epsilon:g}", faster)
        entropic_case(bench, problems, epsilon, limit)
    for epsilon in (0.1, 0.01):
        limit = at_least(f"the same, epsilon {epsilon:g}, gap {CLOSER_GAP:g}", 1.0)
        entropic_case(bench, problems, epsilon, limit, gap=CLOSER_GAP)


def unbalanced_case(bench: Bench) -> None:
    """Beside our own balanced time at the same epsilon and tolerance; POT solves the first problem alone."""
    batch, n = (4, 8) if bench.settings.small else (64, 64)
    problems, options = Problems.random(batch, n), {"epsilon": 0.1, "marginal_penalty": PENALTY}
    p, q, cost = (t[0].numpy() for t in (problems.p, problems.q, problems.cost))
    mine = otloss.solve(problems.p, problems.q, problems.cost, **options).plan()[0].numpy()

    def pot_alone() -> np.ndarray:
        plan: np.ndarray = ot.unbalanced.sinkhorn_unbalanced(p, q, cost, 0.1, PENALTY, stopThr=1e-5)
        return plan

    away = float(np.abs(pot_alone() - mine).sum() / mine.sum())
    balanced, with_gradients = partial(otloss.sinkhorn, epsilon=0.1), ours_with_gradients(problems, 0.1)
    unbalanced = partial(otloss.sinkhorn, **options)
    graded, tolerance = ours_with_gradients(problems, **options), 1e-5
    case = f"{batch} unbalanced problems {n} x {n}, epsilon 0.1 of the cost range, penalty {PENALTY:g}"
    pot_name = f"POT sinkhorn_unbalanced, 1 problem of {batch}"
    steps: dict[str, Step] = {
        "balanced": lambda: balanced(problems.p, problems.q, problems.cost),
        "balanced, gradients": lambda: with_gradients(tolerance),
        OURS: lambda: unbalanced(problems.p, problems.q, problems.cost),
        OURS_GRADIENTS: lambda: graded(tolerance),
        pot_name: pot_alone,
    }
    timings = bench.timed(case, steps, notes={pot_name: f"plan differs by {away:.1e} of its mass"})
    for own, other in ((OURS, "balanced"), (OURS_GRADIENTS, "balanced, gradients")):
        limit = Limit(f"{case}: {own}, in times of {other}", 3.0)
        bench.verdicts.append(limit.verdict(*ratios(timings[own], timings[other])))
    each = statistics.median(ratios(timings[pot_name], timings[OURS])) * batch
    bench.verdicts.append([f"- {pot_name}, a problem", "", f"{each:.3g} x"])


# ---- the line, and clouds --------------------------------------------------------------------------------------------


def line_case(bench: Bench, lines: Lines, case: str, limit: float) -> None:
    for gradients in (False, True):
        steps = line_steps(lines, gradients=gradients)
        notes = same_values({name: step() for name, step in steps.items()})
        what = f"{case}, values{' and gradients' if gradients else ''}"
        timings = bench.timed(f"line, {what}", steps, notes=notes, most=LONG_ROUNDS)
        for name in steps:
            if name.startswith(OURS):  # the limit is for values; with gradients ours are to be no slower
                row = at_least(f"{name.removeprefix(f'{OURS} ')}, {what}", 1.0 if gradients else limit)
                bench.judge(row, timings[name], *peers_of(timings))


def line_cases(bench: Bench) -> None:
    small = bench.settings.small
    batch, bins = (8, 20) if small else (1024, 1000)
    line_case(bench, Lines.random(batch, bins, shared=True), f"{batch} x {bins}, one support", 100.0)
    batch, samples = (8, 16) if small else (4096, 256)
    line_case(
        bench, Lines.random(batch, samples, shared=False), f"{batch} pairs of {samples} samples, two supports", 5.0
    )


def gromov_case(bench: Bench) -> None:
    """Pairs of graphs of some ten nodes, padded; local minima differ, so the mean value is beside the time."""
    batch, n = (4, 6) if bench.settings.small else (256, 12)
    generator = torch.Generator().manual_seed(0)
    points = torch.randn(2, batch, n, 3, generator=generator, dtype=torch.float64)
    nodes = torch.randint(n - 4, n + 1, (2, batch), generator=generator)
    weights = (torch.arange(n) < nodes.unsqueeze(-1)) / nodes.unsqueeze(-1).double()
    C, D, M = torch.cdist(points[0], points[0]), torch.cdist(points[1], points[1]), torch.cdist(*points)

    def by_pot() -> Tensor:
        values = []
        for k, (a, b) in enumerate(nodes.T.tolist()):
            parts = (M[k, :a, :b], C[k, :a, :a], D[k, :b, :b], weights[0, k, :a], weights[1, k, :b])
            values.append(ot.gromov.fused_gromov_wasserstein2(*(part.numpy() for part in parts), alpha=0.5))
        return torch.tensor(values)

    steps = {OURS: lambda: otloss.fused_gromov(C, D, M, *weights, alpha=0.5).value, "POT, a loop": by_pot}
    case = f"fused Gromov, {batch} pairs of graphs of {n - 4} to {n} nodes, values"
    notes = {name: f"{float(step().mean()):.4f}" for name, step in steps.items()}
    bench.row(at_least(case, 5.0), steps, notes=notes)


def cloud_case(bench: Bench) -> None:
    n = 40 if bench.settings.small else 10_000
    clouds, tiny = solver_clouds.Clouds.random(n), solver_clouds.Clouds.random(16)
    for cloud in (tiny, clouds):  # the first compiles
        exact = solver_clouds.reference(cloud)
        mine = solver_clouds.ours(cloud, exact)
        peers = [solver_clouds.geomloss(cloud, exact, backend) for backend in solver_clouds.BACKENDS]
        if cloud is tiny:
            for contestant in (mine, *peers):
                contestant.solve(contestant.settings[0])
    case = f"divergence, n={n} in 3-D, blur {solver_clouds.BLUR:g}, value and gradient in x"
    say(f"\n{case}: errors of at most {solver_clouds.LIMITS[0]:g} and {solver_clouds.LIMITS[1]:g}")
    results = {mine: cheapest(mine, solver_clouds.LIMITS, max_seconds=600.0)}
    for peer in peers:
        results[peer] = cheapest(peer, solver_clouds.LIMITS, max_seconds=CLOUD_PATIENCE * results[mine].seconds)
    verdict = judge_clouds(bench, case, at_least(f"divergence, n={n}, value and gradient", 1.0), mine, results)
    bench.verdicts.append([*verdict[:2], f"{verdict[2]} ({solver_clouds.WHICH})"])


def planar_cases(bench: Bench) -> None:
    """GeomLoss' multiscale solver with its default settings, and ours with errors of at most the same."""
    if not solver_clouds.HAS_KEOPS:
        say("\nplanar clouds: skipped, GeomLoss' multiscale solver needs KeOps")
        return
    for n in (40,) if bench.settings.small else (5_000, 10_000, 20_000):
        clouds = solver_clouds.Clouds.random(n, axes=2)
        for blur in (0.05, 0.01):
            case = f"divergence, n={n} in 2-D, blur {blur:g}, value and gradient in x"
            exact = solver_clouds.reference(clouds, blur=blur)
            mine = solver_clouds.ours(clouds, exact, blur=blur)
            peer = solver_clouds.geomloss(clouds, exact, "multiscale", blur=blur)
            limits = peer.errors(peer.solve(peer.settings[0]))
            say(f"\n{case}: errors of at most {limits[0]:.1e} and {limits[1]:.1e}, the errors of {peer.name}")
            results = {mine: cheapest(mine, limits, max_seconds=600.0), peer: Found(peer.settings[0], limits, 0.0)}
            limit = at_least(f"divergence, n={n} in 2-D, blur {blur:g}", 1.0)
            bench.verdicts.append(judge_clouds(bench, case, limit, mine, results))


def judge_clouds(
    bench: Bench, case: str, limit: Limit, mine: Contestant, results: dict[Contestant, Found]
) -> list[str]:
    """Time all that are accurate enough, but take the one run of the sweep for far slower peers; return the verdict."""
    if results[mine].setting is None:
        return [limit.what, limit.goal, "ours is not accurate enough"]
    accurate = {c: f for c, f in results.items() if f.setting is not None}
    notes = {c.name: f"{f.errors[1]:.1e}" for c, f in accurate.items()}
    slow = {c.name: f for c, f in accurate.items() if f.seconds > CLOUD_REPEATED * results[mine].seconds}
    steps: dict[str, Step] = {c.name: partial(c.solve, f.setting) for c, f in accurate.items() if c.name not in slow}
    timings = bench.timed(case, steps, notes=notes, most=LONG_ROUNDS)
    our_seconds = timings[mine.name].median
    for name, one in slow.items():
        ratio = one.seconds / our_seconds
        say(f"  {name:<34} {one.seconds * 1000:10.2f} ms, one run {ratio:8.2f} x {mine.name}   {notes[name]}")
        keep(bench.settings.output, NAME, case, [{"name": name, "seconds": f"{one.seconds:.6f}", "rounds": 1,
             "ratio": f"{ratio:.4f}", "peer": mine.name, "error": notes[name]}])  # fmt: skip
    if len(timings) > 1:
        best = min((t for name, t in timings.items() if name != mine.name), key=lambda timing: timing.median)
        return limit.verdict(*ratios(best, timings[mine.name]))
    if slow:
        return limit.verdict(min(one.seconds for one in slow.values()) / our_seconds)
    # Settings are in order of cost: an accurate one takes longer than the last that was tried.
    return unreached(limit, min(f.seconds for c, f in results.items() if c is not mine) / our_seconds)


def main(settings: Settings) -> None:
    bench = Bench(settings, NAME, rounds=ROUNDS, small_rounds=SMALL_ROUNDS)
    for cases in (exact_cases, entropic_cases, unbalanced_case, line_cases, gromov_case, cloud_case, planar_cases):
        cases(bench)
    bench.report("work: how many times as long the fastest peer takes")
