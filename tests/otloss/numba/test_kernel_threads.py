"""How kernels run: on threads, in forked processes, until Ctrl-C, and from files that may be damaged."""

import logging
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

import otloss
from otloss import _progress
from otloss._numba import threads as _threads
from otloss._numba.compile import compiled
from otloss._numba.tasks import next_task
from otloss._numba.threads import run_on_threads
from otloss._public import public
from tests.otloss.draws import draw, normal


@compiled()
def _count(counter, done, tasks, own):  # type: ignore[no-untyped-def]
    finished = 0
    while True:
        task = next_task(counter)
        if task >= tasks:
            return finished
        done[task] += 1
        own[0] += 1
        finished += 1


def wait_for_threads() -> None:
    """After a region that was late the calling thread works alone for a while."""
    time.sleep(max(0.0, _threads._alone_until - time.perf_counter()))


@pytest.fixture(params=["torch's OpenMP", "a pool of Python's threads"])
def two_threads(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    wait_for_threads()
    if request.param == "a pool of Python's threads":
        monkeypatch.setattr(_threads, "_openmp", None)
    elif _threads._openmp is None:
        pytest.skip("torch uses another OpenMP than GNU's")
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(threads)


@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize("tasks", [0, 1, 10_000])
def test_each_task_is_done_once(tasks: int) -> None:
    done = np.zeros(tasks, np.int64)
    results = run_on_threads(_count, tasks, (done, tasks), lambda: (np.zeros(1, np.int64),))
    assert (done == 1).all()
    assert sum(results) == tasks
    assert len(results) == min(2, tasks)


@pytest.mark.usefixtures("two_threads")
def test_errors_are_raised_and_after_a_long_wait_the_calling_thread_works_alone() -> None:
    """What a thread that does not get its turn looks like: time goes by in which neither works."""
    caller = threading.get_ident()

    def kernel(counter: np.ndarray) -> bool:
        if threading.get_ident() != caller:
            time.sleep(0.04)
        return threading.get_ident() == caller

    with pytest.raises(ZeroDivisionError):
        run_on_threads(lambda counter: 1 // 0, 5, ())
    assert run_on_threads(kernel, 9, (), one_thread=True) == [True]
    assert sorted(run_on_threads(kernel, 4, ())) == [False, True]
    assert 0.5 < _threads._alone_until - time.perf_counter() < 60
    assert run_on_threads(kernel, 4, ()) == [True]
    wait_for_threads()
    assert sorted(run_on_threads(kernel, 4, ())) == [False, True]


def values() -> torch.Tensor:
    """Return what one kernel of each kind computes."""
    p, q, x = (draw(40, 30, seed=s).softmax(-1) for s in (0, 1, 2))
    cost = otloss.costs.PointCost(x.unsqueeze(-1))
    logits, labels = normal(9000, 5), torch.arange(9000) % 5
    return torch.stack([
        otloss.emd(p, q, cost).sum(), otloss.sinkhorn(p, q, cost, epsilon=0.05).sum(), cost.softmin(q, 0.1).sum(),
        otloss.wasserstein_1d(p, q, x, x + 0.1, order=2).sum(), otloss.ordinal_loss(logits, labels),
    ])  # fmt: skip


@pytest.mark.usefixtures("two_threads")
def test_calls_from_several_threads_do_not_mix_and_the_number_of_threads_is_no_matter() -> None:
    actual: list[torch.Tensor] = []
    tasks: Callable[[], None] = lambda: actual.extend(values() for _ in range(5))  # noqa: E731
    threads = [threading.Thread(target=tasks) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    torch.set_num_threads(1)
    assert len(actual) == 20
    assert all(torch.equal(value, values()) for value in actual)


FORK = """
import os, threading, torch
from otloss._numba.threads import run_on_threads
from tests.otloss.numba.test_kernel_threads import values
expected = values()
def thread(counter):
    return threading.get_ident()
torch.set_num_threads(2)
run_on_threads(thread, 8, ())  # the pool has started: it does not outlive the fork
child = os.fork()
if child == 0:
    torch.set_num_threads(1)  # as a DataLoader does: the OpenMP of torch does not outlive a fork
    alone = run_on_threads(thread, 8, ()) == [threading.get_ident()]
    os._exit(0 if alone and torch.allclose(values(), expected) else 1)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


def test_kernels_run_in_a_forked_process() -> None:
    done = subprocess.run([sys.executable, "-c", FORK], capture_output=True, text=True, check=True, timeout=300)
    assert done.stdout.strip() == "0"


# Both would take far longer than the test waits, on any processor.
SINKHORN = "otloss.sinkhorn(None, None, x, epsilon=1e-3, tolerance=1e-300, max_iterations=10**9)"
PROGRAM = """
import torch, otloss
from otloss import _progress
_progress.SECONDS = 1.0
p, q, cost = torch.rand(8000).softmax(0), torch.rand(8000).softmax(0), torch.rand(8000, 8000)
x = otloss.costs.PointCost(torch.randn(1000, 3), torch.randn(1000, 3))
try:
    print("begins", flush=True)
    {call}
except KeyboardInterrupt:
    print("interrupted", flush=True)
print(float(otloss.emd(None, None, torch.rand(700, 700))) > 0, flush=True)
"""


@pytest.mark.slow
@pytest.mark.parametrize("call", ["otloss.emd(p, q, cost)", SINKHORN])
def test_an_interrupt_ends_a_kernel(call: str) -> None:
    program = PROGRAM.format(call=call)
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", program], **pipes) as process:  # type: ignore[call-overload]
        try:
            assert process.stdout.readline() == "begins\n"
            lines = []
            while not lines or " runs for " not in lines[-1]:
                lines.append(process.stderr.readline())
                assert lines[-1], lines
            assert " left" in lines[-1] or "not known" in lines[-1]
            process.send_signal(signal.SIGINT)
            out, _ = process.communicate(timeout=60)
        finally:
            process.kill()
    assert out == "interrupted\nTrue\n"


@public
def solves_slowly(steps: tuple[Callable[[], None] | float, ...]) -> None:
    for step in steps:
        if callable(step):
            step()
        else:
            _progress.report("iterations", torch.tensor([step, step / 2]), tolerance=1e-5)


def lines_at(caplog: Any, monkeypatch: pytest.MonkeyPatch, seconds: list[float], *steps: Any) -> list[str]:
    """The lines of a call whose clock shows these seconds at its start and at each step."""
    clock = iter(seconds)
    monkeypatch.setattr(time, "perf_counter", lambda: next(clock))
    with caplog.at_level(logging.WARNING, "otloss"):
        _progress.report("outside of calls")
        solves_slowly(steps)
    assert next(clock, None) is None
    return list(caplog.messages)


def test_a_long_call_says_how_long_it_will_take(caplog: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """From 1 at 6 s to 0.01 at 11 s: three more powers of ten take 7.5 s."""
    seconds, errors = [0.0, 1.0, 6.0, 9.0, 11.0, 12.0], (1.0, 1.0, 0.1, 0.01, 1e-3)
    (message,) = lines_at(caplog, monkeypatch, seconds, *errors)
    assert message.startswith("solves_slowly runs for 11 s: iterations, error 0.01 (to fall to 1e-05)")
    assert message.endswith("about 7 s left")


def test_a_long_call_within_its_tolerance_says_why_it_goes_on(caplog: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    seconds, errors = [0.0, 1.0, 6.0, 9.0, 11.0], (1.0, 1e-6, 1e-7, 1e-7)
    (message,) = lines_at(caplog, monkeypatch, seconds, *errors)
    assert "error 1e-07 (within 1e-05: further steps make the potentials more accurate)" in message
    assert message.endswith("the time left is not known")


def test_a_long_call_says_so_each_time_that_it_has_taken_twice_as_long(caplog: Any, monkeypatch: Any) -> None:
    """Each estimate is of the last half: the error falls more slowly from 10 s on."""
    seconds = [0.0, *range(1, 100)]
    errors = [10 ** (-0.1 * t if t < 10 else -1 - 0.01 * (t - 10)) for t in seconds[1:]]
    lines = lines_at(caplog, monkeypatch, seconds, *errors)
    assert [line.partition(" s:")[0] for line in lines] == [f"solves_slowly runs for {t}" for t in (10, 20, 40, 80)]
    assert [line.rpartition("about ")[2] for line in lines] == [
        "40 s left",
        "390 s left",
        "370 s left",
        "330 s left",
    ]


def test_an_error_that_hardly_falls_gives_no_estimate(caplog: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    seconds, errors = [0.0, 1.0, 6.0, 9.0, 11.0], (1.0, 1.7e-4, 1.699e-4, 1.69e-4)
    (message,) = lines_at(caplog, monkeypatch, seconds, *errors)
    assert message.endswith("the time left is not known")
