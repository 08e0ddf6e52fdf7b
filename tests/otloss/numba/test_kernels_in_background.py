"""Kernels that another process compiles: what calls do meanwhile, and afterwards."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import torch

import otloss
from otloss._numba import background, notices
from otloss._numba.background import StillCompilingError
from otloss.solvers.barycenter import ascent
from otloss.solvers.barycenter import barycenter as barycenters
from otloss.solvers.entropic import newton
from otloss.solvers.entropic.newton import SparseNewton
from otloss.solvers.entropic.newton_kernels import newton_numba
from otloss.solvers.entropic.sinkhorn import Sinkhorn
from otloss.solvers.entropic.sinkhorn_cpu import SinkhornOnCPU
from tests.samples import sampled

SCRIPT = """
import logging, sys, torch, otloss
from otloss._numba import background
lines = []
handler = logging.Handler()
handler.emit = lambda record: lines.append(record.getMessage())
logging.getLogger("otloss").addHandler(handler)
logging.getLogger("otloss").setLevel(logging.INFO)
costs = torch.rand(4, 30, 40, generator=torch.Generator().manual_seed(0))
first = {call}
(compilation,) = {{id(each): each for each in background._compilations.values()}}.values()
assert [process.wait() for process in compilation.processes] == [0] * len(compilation.processes)
again = {call}
from {module} import {kernel}
assert sum({kernel}.stats.cache_hits.values()) == 1, {kernel}.stats
assert len(lines) == 1, lines
assert "another process" in lines[0]
torch.testing.assert_close(first, again, rtol=1e-5, atol=0)
"""
CALLS = [
    (
        "otloss.costs.DenseCost(costs.repeat(1, 9, 9)).softmin(torch.zeros(360), 0.1)",
        "otloss.costs.softmin_numba",
        "matrix_softmin",
    ),
    (
        "otloss.sinkhorn(None, None, costs, epsilon=0.1)",
        "otloss.solvers.entropic.sinkhorn_kernels.balanced_numba",
        "sinkhorn_problems",
    ),
]
FIRST_CALLS = """
import sys, torch, otloss
from otloss.costs import GridCost
x, y = torch.rand(4, 20, 2, requires_grad=True), torch.rand(4, 30, 2)
p = torch.rand(3, 16).softmax(-1)
def call():
    otloss.cloud_loss(x, y, blur=0.1).sum().backward()
    otloss.sinkhorn_divergence(p, p.flip(-1), GridCost((4, 4)), epsilon=0.1)
    otloss.sliced_wasserstein(x, y)
    otloss.emd(p, p[:1], torch.rand(16, 16))
call()
assert not {"sympy", "scipy.linalg"} & set(sys.modules)
"""


def problems(count: int = 3) -> torch.Tensor:
    return torch.rand(count, 12, 15, generator=torch.Generator().manual_seed(count), dtype=torch.float64)


@pytest.mark.parametrize("method", [SinkhornOnCPU, SparseNewton])
@pytest.mark.parametrize("epsilon", [0.1, 1e-3])
def test_iterations_go_on_without_a_kernel(monkeypatch: pytest.MonkeyPatch, method: type, epsilon: float) -> None:
    expected = otloss.solve(None, None, problems(), epsilon=epsilon)
    run, waits = method.run, []

    def not_yet(self: Any, *arguments: Any) -> Any:
        waits.append(1)
        if len(waits) < 4:
            raise StillCompilingError
        return run(self, *arguments)

    monkeypatch.setattr(method, "run", not_yet)
    found = otloss.solve(None, None, problems(), epsilon=epsilon)
    assert bool(found.converged.all())
    torch.testing.assert_close(found.value, expected.value, rtol=1e-6, atol=0)


def test_exact_transport_is_solved_once_however_long_newtons_kernel_is_awaited(monkeypatch: pytest.MonkeyPatch) -> None:
    find_kernels, solve, looks, solutions = newton_numba.find_kernels, newton.solve_exactly, [], []

    def not_yet() -> Any:
        looks.append(1)
        if len(looks) < 4:
            raise StillCompilingError
        return find_kernels()

    monkeypatch.setattr(newton_numba, "find_kernels", not_yet)
    monkeypatch.setattr(newton, "solve_exactly", lambda *a, **k: solutions.append(1) or solve(*a, **k))
    assert bool(otloss.solve(None, None, problems(), epsilon=1e-3).converged.all())
    assert len(looks) > 4
    assert len(solutions) == 1


@pytest.mark.parametrize("epsilon", [0.003, 0.0003])
def test_barycenters_are_iterated_without_a_kernel(monkeypatch: pytest.MonkeyPatch, epsilon: float) -> None:
    """At the larger epsilon the iterations reach the tolerance; at the smaller one they use up their share."""
    p = problems()[0][:3].softmax(-1)
    cost = otloss.costs.LineCost(torch.linspace(0, 1, 15, dtype=torch.float64), power=2)
    monkeypatch.setattr(barycenters, "NUMBERS", dataclasses.replace(barycenters.NUMBERS, patience=0))
    expected = otloss.barycenter(p, cost, epsilon=epsilon, max_iterations=1000)
    run, calls, waits = ascent.ascend, [], []

    def not_yet(*arguments: Any, **options: Any) -> Any:
        calls.append(1)
        if not waits:
            raise StillCompilingError
        return run(*arguments, **options)

    monkeypatch.setattr(ascent, "ascend", not_yet)
    monkeypatch.setattr(StillCompilingError, "wait", lambda self: waits.append(1))
    actual = otloss.barycenter(p, cost, epsilon=epsilon, max_iterations=1000)
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-7)
    assert calls
    assert bool(waits) == (epsilon < 0.001)


@pytest.mark.parametrize(("call", "module", "kernel"), sampled(1, CALLS))
def test_another_process_compiles(call: str, module: str, kernel: str, tmp_path: Path) -> None:
    done = run(SCRIPT.format(call=call, module=module, kernel=kernel), NUMBA_CACHE_DIR=str(tmp_path))
    assert done.returncode == 0, done.stderr


def run(script: str, **environment: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **environment}
    return subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=False)


def test_large_problems_wait_for_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    run_kernel, waits = SinkhornOnCPU.run, []

    def not_yet(self: Any, *arguments: Any) -> Any:
        if len(waits) < 3:
            raise StillCompilingError
        return run_kernel(self, *arguments)

    monkeypatch.setattr(SinkhornOnCPU, "run", not_yet)
    monkeypatch.setattr(StillCompilingError, "wait", lambda self: waits.append(1))
    monkeypatch.setattr(Sinkhorn, "run", None)
    costs = torch.rand(32, 200, 200, generator=torch.Generator().manual_seed(0))
    assert bool(otloss.solve(None, None, costs, epsilon=0.1).converged.all())
    assert len(waits) == 3


@pytest.mark.skipif(bool(os.environ.get("NUMBA_BOUNDSCHECK")), reason="numba imports more to raise IndexError")
def test_compiled_kernels_are_read_without_what_compiling_needs() -> None:
    """What is not compiled yet is compiled by a first process, for which numba imports much."""
    done = run(FIRST_CALLS)
    if done.returncode:
        done = run(FIRST_CALLS)
    assert done.returncode == 0, done.stderr


def test_kernels_are_announced_once_though_some_are_compiled_before_others(monkeypatch: pytest.MonkeyPatch) -> None:
    class Process:
        def poll(self) -> None:
            return None

    started, announced, process = [], [], Process()
    monkeypatch.setattr(background, "_compilations", {})
    monkeypatch.setattr(background, "_start", lambda kernels, _: started.append(kernels) or [process])
    monkeypatch.setattr(notices, "announce", lambda kernels, **_: announced.append(kernels))
    first, second, third = (("first", ()), ("second", ()), ("third", ()))
    for missing in ((first, second), (second,), (second, third), (third,)):
        assert process in background._processes_for(missing)
    assert announced == [(first, second), (third,)]
    assert started == [(first, second)]  # the other one waits for this process


def test_threads_that_need_a_kernel_start_its_processes_once(monkeypatch: pytest.MonkeyPatch) -> None:
    started = []

    def start(*_: Any) -> list[subprocess.Popen[bytes]]:
        started.append(subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE))
        time.sleep(0.2)  # in which the other thread arrives
        return started[-1:]

    monkeypatch.setattr(background, "_compilations", {})
    monkeypatch.setattr(background, "_is_ready", lambda *_: False)
    monkeypatch.setattr(background, "_start", start)
    monkeypatch.setattr(notices, "announce", lambda *_, **__: None)
    raised = []

    def call() -> None:
        with background.declining():
            try:
                background.check_compiled((Kernel, (), tuple))
            except StillCompilingError:
                raised.append(1)

    monkeypatch.setattr(background.SWITCH, "is_on", True)
    threads = [threading.Thread(target=call) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for process in started:
        process.communicate(b"\n")
    assert (len(started), len(raised)) == (1, 2)


class Kernel:
    stats = type("Stats", (), {"cache_path": "a folder"})
    overloads = MappingProxyType[Any, Any]({})
    _cache = None
    typeof_pyval = staticmethod(type)


@pytest.mark.parametrize(("name", "value"), [("executable", ""), ("executable", None), ("frozen", True)])
def test_a_process_without_python_compiles_for_itself(monkeypatch: pytest.MonkeyPatch, name: str, value: Any) -> None:
    """A frozen program would start itself, and that one the next."""
    monkeypatch.setattr(sys, name, value, raising=False)
    monkeypatch.setattr(background, "_compilations", {})
    monkeypatch.setattr(background, "_ready", set())
    monkeypatch.setattr(background.SWITCH, "is_on", True)
    with background.declining():
        background.check_compiled((Kernel, (), tuple))


def test_processes_find_the_modules_of_this_one_and_no_others(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The current folder may have a module of the same name; and paths that are not strings are ignored by imports."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "filelock.py").write_text("raise RuntimeError")
    code = "import filelock, importlib.util; assert importlib.util.find_spec('otloss')"
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path] + [tmp_path])
    assert background.start_python("-c", code).wait() == 0
    monkeypatch.setattr(sys, "path", ["", *sys.path])
    assert background.start_python("-c", code).wait() == 1
