"""Calls that take long say so once, and end on Ctrl-C while a numba kernel runs."""

import logging
import signal
import subprocess
import sys
import time

import pytest
import torch

from otloss import _progress
from otloss.extending import eager

# Each would take far longer than the test waits, on any processor.
LONG_CALLS = {
    "an endless kernel": """
from otloss._kernels._compile import compiled
from otloss._kernels._threads import LONG, Work, is_stopped, run_on_threads
@compiled()
def endless(counter):
    while not is_stopped(counter, 0.5, 0.25):
        pass
call = otloss.extending.eager(lambda: run_on_threads(endless, 1, (), work=Work("a loop", LONG)))
""",
    "Sinkhorn": """
cost = otloss.costs.PointCost(torch.randn(1000, 3), torch.randn(1000, 3))
def call(): otloss.sinkhorn(None, None, cost, epsilon=1e-3, tolerance=1e-300, max_iterations=10**9)
""",
    "emd": """
p, q = (torch.rand(8000).softmax(0) for _ in range(2))
def call(): otloss.emd(p, q, torch.rand(8000, 8000))
""",
}
PROGRAM = """
import torch, otloss, otloss.extending
from otloss import _progress
_progress.SECONDS = 1.0
{call}
try:
    print("begins", flush=True)
    call()
except KeyboardInterrupt:
    print("interrupted", flush=True)
print(float(otloss.emd(None, None, torch.rand(700, 700))) > 0, flush=True)
"""


@pytest.mark.slow
@pytest.mark.parametrize("name", LONG_CALLS)
def test_an_interrupt_ends_a_kernel(name: str) -> None:
    program = PROGRAM.format(call=LONG_CALLS[name])
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


def test_a_long_call_says_once_how_long_it_will_take(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From 1 at 6 s to 0.01 at 11 s: three more powers of ten take 7.5 s."""
    clock = iter([0.0, 1.0, 6.0, 9.0, 11.0, 12.0])
    monkeypatch.setattr(time, "perf_counter", lambda: next(clock))

    @eager
    def solves_slowly() -> None:
        for off in (1.0, 1.0, 0.1, 0.01, 1e-3):
            _progress.report("iterations", torch.tensor([off, off / 2]), tolerance=1e-5)

    with caplog.at_level(logging.WARNING, "otloss"):
        _progress.report("outside of calls")
        eager(solves_slowly)()
    (message,) = caplog.messages
    assert message.startswith("solves_slowly runs for 11 s: iterations, error 0.01 (to fall to 1e-05)")
    assert message.endswith("about 7.5 s left")
