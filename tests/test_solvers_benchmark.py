"""The solvers benchmark runs at tiny sizes, its ruler measures rightly, and the page on solvers runs as it stands."""

from __future__ import annotations

import csv
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import ot
import pytest
import torch

pytest.importorskip("matplotlib")

from benchmarks import epsilon_plot, solver_clouds, solvers
from benchmarks.measure import Settings
from benchmarks.solver_cases import Problems, Ruler, objective, plan_of, rounded
from benchmarks.solver_peers import Contestant, cheapest, geomloss_batch, ours, pot

ROOT = Path(__file__).parents[1]
ONE_THREAD = {"OMP_NUM_THREADS": "1", "NUMBA_NUM_THREADS": "1"}
PAGE = ROOT / "docs" / "solvers.md"


def test_all_of_it_small(tmp_path: Path) -> None:
    ended = subprocess.run(
        [sys.executable, "-m", "benchmarks", "solvers", "--small", "--rounds", "1", "--output", str(tmp_path)],
        cwd=ROOT, env=os.environ | ONE_THREAD, capture_output=True, text=True,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    assert "| work" not in ended.stdout, "toy sizes get no verdict"
    with (tmp_path / "results.csv").open(newline="", encoding="utf-8") as stream:
        rows = list(csv.DictReader(stream))
    cases = {row["case"].split(",")[0] for row in rows}
    assert cases == {"exact", "entropic", "line", "divergence"}
    assert all(float(row["seconds"]) > 0 for row in rows if row["seconds"])
    assert all(row["hardware"] for row in rows)


def test_rounded_plans_keep_the_marginals() -> None:
    p, q, _ = Problems.random(3, 6).arrays()
    plan = rounded(np.random.default_rng(0).random((3, 6, 6)), p, q)
    np.testing.assert_allclose(plan.sum(-1), p, rtol=1e-12)
    np.testing.assert_allclose(plan.sum(-2), q, rtol=1e-12)
    assert (plan >= 0).all()
    np.testing.assert_array_equal(rounded(plan, p, q).round(12), plan.round(12))
    np.testing.assert_allclose(rounded(np.zeros((3, 6, 6)), p, q), p[..., None] * q[..., None, :], rtol=1e-12)


@pytest.mark.parametrize("epsilon", [0.1, 0.01])
def test_the_ruler_agrees_with_another_solver(epsilon: float) -> None:
    problems = Problems.random(2, 5)
    arrays, ruler = problems.arrays(), Ruler(problems, epsilon)
    for k in range(2):
        p, q, cost = (array[k] for array in arrays)
        plan = ot.sinkhorn(p, q, cost, epsilon, method="sinkhorn_log", numItermax=100_000, stopThr=1e-13)
        best = objective(plan, (p, q, cost), epsilon)
        np.testing.assert_allclose(ruler.dual[k], best, rtol=1e-7)
    assert ruler.own.min() > -1e-14
    assert ruler.own.max() < 1e-7
    independent = arrays[0][..., None] * arrays[1][..., None, :]
    assert (ruler.gaps(independent) > 0.01).all()
    broken = independent.copy()
    broken[0, 0, 0] = np.nan
    assert ruler.gaps(broken)[0] == np.inf
    assert ruler.gaps(broken)[1] == ruler.gaps(independent)[1]


def test_every_contestant_solves_the_same_problem() -> None:
    """Given patience, gaps of all of them vanish; a wrong convention would leave one."""
    problems, epsilon = Problems.random(2, 5), 0.1
    ruler = Ruler(problems, epsilon)
    for contestant in [ours(problems, epsilon), *pot(problems, epsilon), geomloss_batch(problems, epsilon)]:
        found = cheapest(contestant, ruler, gap=1e-5, most_seconds=60.0)
        assert found.setting is not None, contestant.name
        assert found.gap <= 1e-5


def test_iterations_are_the_least_that_are_enough() -> None:
    problems, gap = Problems.random(2, 8), 1e-4
    ruler = Ruler(problems, 0.02)
    for contestant in pot(problems, 0.02)[:6:5]:
        found = cheapest(contestant, ruler, gap=gap, most_seconds=60.0).setting
        assert found is not None
        gaps = [float(ruler.gaps(contestant.plan(contestant.solve(found - k))).max()) for k in (0, 1)]
        assert gaps[0] <= gap < gaps[1]


def test_slow_clouds_run_once() -> None:
    runs: list[float] = []

    def contestant(name: str, error: float, pause: float) -> solver_clouds.CloudContestant:
        def solve(setting: float) -> solver_clouds.Answer:
            runs.append(setting)
            time.sleep(pause)
            return 1 + error, torch.ones(2, 3)

        return solver_clouds.CloudContestant(name, "knob", [pause], solve)

    truth = (1.0, torch.ones(2, 3).double())
    limit, bench = solvers.AtLeast("work", 1.0), solvers.Bench(Settings(rounds=1))
    mine = contestant("ours", 0.0, 0.002)
    for error, told in ((0.0, "x, met"), (0.1, "x our time, met")):
        peer = contestant("peer", error, 0.1)
        found = {c: solver_clouds.cheapest(c, truth, most_seconds=1.0) for c in (mine, peer)}
        verdict = solvers.clouds_judged(bench, "case", limit, mine, found)[-1]
        assert verdict.endswith(told)
    assert runs.count(0.1) == 2  # one in each search, and none after


def test_impatience_is_told() -> None:
    problems = Problems.random(2, 5)
    ruler = Ruler(problems, 0.1)
    p, q, _ = problems.arrays()
    stuck = Contestant("stuck", "tries", [1, 2, 3], lambda tries: tries, lambda _: p[..., None] * q[..., None, :])
    assert cheapest(stuck, ruler, gap=1e-3, most_seconds=60.0).setting is None
    limit = solvers.AtLeast("work", 4.0)
    assert limit.unreached(100.0)[-1] == "no peer got there in 100 x our time, met"
    assert limit.unreached(2.0)[-1] == "no peer got there in 2 x our time, unknown"
    assert limit.judged(5.0)[-1] == "5.00 x, met"
    assert limit.judged(2.0, 3.0, 5.0)[-1] == "3.00 x, missed (2.50 to 4.00, within noise)"


def test_clouds_are_one_problem_for_both() -> None:
    clouds = solver_clouds.Clouds.random(30)
    value, gradient = solver_clouds.reference(clouds)
    slow = solver_clouds.geomloss(clouds, "tensorized").solve(0.999)
    assert abs(slow[0] / value - 1) < 1e-3
    assert (slow[1].double() - gradient).norm() < 2e-2 * gradient.norm()


def test_potentials_give_the_plan() -> None:
    problems = Problems.random(1, 4)
    arrays = problems.arrays()
    plan = plan_of(torch.zeros(1, 4), torch.zeros(1, 4), arrays, 1e9)
    np.testing.assert_allclose(plan, arrays[0][..., None] * arrays[1][..., None, :], rtol=1e-6)


def test_the_figure(tmp_path: Path) -> None:
    epsilons = [1.0, 0.1]
    found = epsilon_plot.measured(epsilons, batch=2, n=6, rounds=1)
    epsilon_plot.draw(tmp_path / "figure.png", epsilons, found, title="small")
    assert (tmp_path / "figure.png").stat().st_size > 10_000
    errors = found["errors"]
    assert (errors["value"][1] < errors["value"][0]).all()
    assert (errors["linear"] < errors["value"]).all()
    assert found["converged"] == [2, 2]


def test_the_page_runs() -> None:
    blocks = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    assert len(blocks) >= 6
    names: dict[str, object] = {}
    for block in blocks:
        exec(compile(block, str(PAGE), "exec"), names)
