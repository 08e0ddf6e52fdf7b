"""Peak memory of one forward and backward pass beyond inputs and gradients, each contestant in a fresh process.

The process makes the inputs (and EMO's cost object), runs a tiny problem to initialise the libraries, resets the peak
of resident memory (/proc/self/clear_refs; without it the growth of getrusage's maximum is taken), and runs one pass.
The sizes of dh and dW are subtracted. MALLOC_MMAP_THRESHOLD_ = 128 KiB makes glibc return freed memory at once, so that
a pass cannot reuse memory of earlier work.
"""

from __future__ import annotations

import gc
import json
import os
import re
import resource
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.contestants import EMO_OURS, Problem, steps

MALLOC = {"MALLOC_MMAP_THRESHOLD_": "131072", "MALLOC_TRIM_THRESHOLD_": "131072"}
STATUS, CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def _status(field: str) -> int:
    match = re.search(rf"{field}:\s+(\d+) kB", STATUS.read_text())
    assert match is not None
    return int(match[1]) * 1024


def peak_growth(run: Callable[[], object]) -> int:
    """Largest growth of resident memory, in bytes, during `run`."""
    gc.collect()
    try:
        CLEAR.write_text("5")  # sets VmHWM to VmRSS
    except OSError:
        unit = 1 if sys.platform == "darwin" else 1024
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        run()
        return (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * unit
    before = _status("VmRSS")
    run()
    return _status("VmHWM") - before


def _extra(name: str, problem: Problem) -> int:
    tiny = Problem.random(512, problem.hidden.shape[1], torch.arange(64))
    steps([name], tiny)[name]()
    if name == EMO_OURS:
        _ = problem.cost
    problem.hidden.grad = problem.weight.grad = None
    grown = peak_growth(steps([name], problem)[name])
    return grown - problem.hidden.nbytes - problem.weight.nbytes


def _worker() -> None:
    """Read the task from standard input and print bytes by contestant, both JSON; runs in its own process."""
    task = json.loads(sys.stdin.read())
    torch.set_num_threads(task["threads"])
    problem = Problem.random(task["vocab"], task["width"], torch.tensor(task["labels"]))
    print(json.dumps({name: _extra(name, problem) for name in task["names"]}))


def extra_bytes(
    names: Sequence[str], labels: Tensor, vocab: int, width: int, *, processes: str = "each"
) -> dict[str, int]:
    """Peak bytes of each contestant beyond inputs and gradients.

    `processes`: "each" contestant in a fresh process, "one" for all, or "here" in this one (for tests).
    """
    if processes == "here":
        problem = Problem.random(vocab, width, labels)
        return {name: _extra(name, problem) for name in names}
    measured: dict[str, int] = {}
    for group in [[name] for name in names] if processes == "each" else [list(names)]:
        task = {"names": group, "vocab": vocab, "width": width, "labels": labels.tolist(),
                "threads": torch.get_num_threads()}  # fmt: skip
        done = subprocess.run([sys.executable, "-m", "benchmarks.memory"], input=json.dumps(task), text=True,
                              stdout=subprocess.PIPE, check=True, env=os.environ | MALLOC,
                              cwd=Path(__file__).parents[1])  # fmt: skip
        measured |= json.loads(done.stdout)
    return measured


if __name__ == "__main__":
    _worker()
