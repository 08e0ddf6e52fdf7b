"""How kernels are distributed over threads, in the process itself and in forked ones."""

import subprocess
import sys
import threading
import time

import numpy as np
import pytest
import torch

import otloss
from otloss._kernels import _threads
from otloss._kernels._compile import compiled
from otloss._kernels._threads import next_task, run_on_threads


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
def pool(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    wait_for_threads()
    if request.param == "a pool of Python's threads":
        monkeypatch.setattr(_threads, "_openmp", None)
    elif _threads._openmp is None:
        pytest.skip("torch uses another OpenMP than GNU's")


@pytest.mark.usefixtures("pool")
@pytest.mark.parametrize("tasks", [0, 1, 10_000])
def test_each_task_is_done_once(tasks: int) -> None:
    done = np.zeros(tasks, np.int64)
    results = run_on_threads(_count, tasks, (done, tasks), lambda: (np.zeros(1, np.int64),))
    assert (done == 1).all()
    assert sum(results) == tasks
    assert len(results) == min(torch.get_num_threads(), tasks)


@pytest.mark.usefixtures("pool")
def test_errors_are_raised_and_after_a_long_wait_the_calling_thread_works_alone() -> None:
    """What a thread that does not get its turn looks like: time goes by in which neither works."""
    caller = threading.get_ident()

    def kernel(counter: np.ndarray) -> bool:
        if threading.get_ident() != caller:
            time.sleep(0.04)
        return threading.get_ident() == caller

    def fails(counter: np.ndarray) -> None:
        raise KeyError("wrong")

    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        with pytest.raises(KeyError, match="wrong"):
            run_on_threads(fails, 5, ())
        assert run_on_threads(kernel, 9, (), one_thread=True) == [True]
        assert sorted(run_on_threads(kernel, 4, ())) == [False, True]
        assert 0.5 < _threads._alone_until - time.perf_counter() < 60
        assert run_on_threads(kernel, 4, ()) == [True]
        wait_for_threads()
        assert sorted(run_on_threads(kernel, 4, ())) == [False, True]
    finally:
        torch.set_num_threads(threads)


@pytest.mark.usefixtures("pool")
def test_calls_from_several_threads_do_not_mix() -> None:
    def call(seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        p, q = (torch.rand(30, 12, generator=generator).softmax(-1) for _ in range(2))
        cost = torch.rand(30, 12, 12, generator=generator)
        for _ in range(20):
            actual[seed].append(torch.stack([otloss.emd(p, q, cost), otloss.sinkhorn(p, q, cost, epsilon=0.1)]))

    actual: list[list[torch.Tensor]] = [[] for _ in range(4)]
    threads = [threading.Thread(target=call, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for values in actual:
        assert len(values) == 20
        assert all(torch.equal(value, values[0]) for value in values)


FORK = """
import os, threading, torch, otloss
from otloss._kernels._threads import run_on_threads
from otloss.costs import PointCost
generator = torch.Generator().manual_seed(0)
p, q = (torch.rand(40, 30, generator=generator).softmax(-1) for _ in range(2))
x = torch.rand(40, 30, 2, generator=generator)
cost = PointCost(x, x + 0.1)
labels = torch.zeros(9000, dtype=torch.long)
logits = torch.randn(9000, 5, generator=generator)

def values():
    return torch.stack([
        otloss.emd(p, q, cost).sum(), otloss.sinkhorn(p, q, cost, epsilon=0.05).sum(),
        otloss.wasserstein_1d(p, q, x[..., 0]).sum(), cost.softmin(q, 0.1).sum(), otloss.ordinal_loss(logits, labels),
    ])

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
