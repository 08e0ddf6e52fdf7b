"""Peak memory of one forward and backward pass beyond inputs and gradients, each contestant in a fresh process.

The process makes the inputs (and EMO's cost object), runs a tiny problem so that libraries are initialised, resets the
kernel's peak of resident memory (/proc/self/clear_refs; where that cannot be had, the growth of getrusage's maximum
stands in), and runs one pass. The sizes of dh and dW are subtracted. glibc gives back what is freed at once
(MALLOC_MMAP_THRESHOLD_ = 128 KiB), so that memory of earlier work is never reused unseen.
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

from benchmarks.contestants import (
    DENSE,
    EMO_OURS,
    MLE_OURS,
    PUBLISHED,
    TORCH,
    Problem,
    our_chunk,
    steps,
)

MALLOC = {"MALLOC_MMAP_THRESHOLD_": "131072", "MALLOC_TRIM_THRESHOLD_": "131072"}
MIB = 2**20
STATUS, CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def _status(field: str) -> int:
    found = re.search(rf"{field}:\s+(\d+) kB", STATUS.read_text())
    assert found is not None
    return int(found[1]) * 1024


def peak_growth(run: Callable[[], object]) -> int:
    """Bytes by which resident memory grew at most while `run` ran."""
    gc.collect()
    try:
        CLEAR.write_text("5")  # VmHWM starts again at VmRSS
    except OSError:
        unit = 1 if sys.platform == "darwin" else 1024
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        run()
        return (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * unit
    before = _status("VmRSS")
    run()
    return _status("VmHWM") - before


def _extra(name: str, problem: Problem) -> int:
    tiny = Problem.random(64, 512, problem.hidden.shape[1], torch.arange(64))
    steps([name], tiny)[name]()
    if name == EMO_OURS:
        _ = problem.cost
    problem.hidden.grad = problem.weight.grad = None
    grown = peak_growth(steps([name], problem)[name])
    return grown - problem.hidden.nbytes - problem.weight.nbytes


def _worker() -> None:
    """One process: the task on standard input, bytes per contestant on standard output, both JSON."""
    task = json.loads(sys.stdin.read())
    torch.set_num_threads(task["threads"])
    problem = Problem.random(task["tokens"], task["vocab"], task["width"], torch.tensor(task["labels"]))
    print(json.dumps({name: _extra(name, problem) for name in task["names"]}))


def extra_bytes(
    names: Sequence[str], labels: Tensor, vocab: int, width: int, *, processes: str = "each"
) -> dict[str, int]:
    """Peak bytes of each beyond inputs and gradients.

    `processes`: a fresh process for "each", "one" for all of them, or all "here" (for a quick look only).
    """
    if processes == "here":
        problem = Problem.random(len(labels), vocab, width, labels)
        return {name: _extra(name, problem) for name in names}
    measured: dict[str, int] = {}
    for group in [[name] for name in names] if processes == "each" else [list(names)]:
        task = {"names": group, "tokens": len(labels), "vocab": vocab, "width": width, "labels": labels.tolist(),
                "threads": torch.get_num_threads()}  # fmt: skip
        done = subprocess.run([sys.executable, "-m", "benchmarks.memory"], input=json.dumps(task), text=True,
                              stdout=subprocess.PIPE, check=True, env=os.environ | MALLOC,
                              cwd=Path(__file__).parents[1])  # fmt: skip
        measured |= json.loads(done.stdout)
    return measured


def counted_bytes(name: str, tokens: int, vocab: int, width: int, share: float) -> int | None:
    """The same from what the code keeps alive at once in float32; None where it was not read.

    Dense: log-probabilities, their gradient and the logits' gradient, before dh and dW exist. EMOLoss: the logits, two
    log-softmaxes, a one-hot matrix and its sum with 1e-15 before and after division, and the normalised head. Ours:
    the logits of a chunk, for EMO also the cost rows of its labels (a share u of its tokens; chunks differ a little).
    `F.linear_cross_entropy`: the logits of a chunk, or dh and dW once more, which autograd copies in the end.
    """
    entry, gradients = 4 * vocab, 4 * (vocab + tokens) * width
    chunk = our_chunk(tokens, vocab)
    counts = {
        DENSE: max(3 * tokens * entry - gradients, tokens * entry),
        PUBLISHED: 6 * tokens * entry + 4 * vocab * width - gradients,
        MLE_OURS: chunk * entry,
        EMO_OURS: round((1 + share) * chunk * entry),
    }
    named = re.fullmatch(re.escape(TORCH) + r" c=(\d+)", name)
    return counts.get(name) if named is None else max(min(tokens, int(named[1])) * entry, gradients)


if __name__ == "__main__":
    _worker()
