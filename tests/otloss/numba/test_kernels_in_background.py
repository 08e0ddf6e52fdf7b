"""Kernels that another process compiles: what calls do meanwhile, and afterwards."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import otloss
from otloss._numba.background import StillCompilingError
from otloss.solvers.entropic.newton import SparseNewton
from otloss.solvers.entropic.sinkhorn_cpu import SinkhornOnCPU

SCRIPT = """
import logging, sys, torch, otloss
from otloss._numba import background
lines = []
handler = logging.Handler()
handler.emit = lambda record: lines.append(record.getMessage())
logging.getLogger("otloss").addHandler(handler)
logging.getLogger("otloss").setLevel(logging.INFO)
costs = torch.rand(4, 30, 40, generator=torch.Generator().manual_seed(0))
first = otloss.sinkhorn(None, None, costs, epsilon=0.1)
(compilation,) = background._compilations.values()
assert compilation.process.wait() == 0
again = otloss.sinkhorn(None, None, costs, epsilon=0.1)
from otloss.solvers.entropic.sinkhorn_numba import sinkhorn_problems
assert sum(sinkhorn_problems.stats.cache_hits.values()) == 1, sinkhorn_problems.stats
assert len(lines) == 1, lines
assert "another process" in lines[0]
torch.testing.assert_close(first, again, rtol=1e-5, atol=0)
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


def test_another_process_compiles(tmp_path: Path) -> None:
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", SCRIPT], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
