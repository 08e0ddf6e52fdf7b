"""A head spread over 2 or 3 processes (gloo) against the same head in one, and errors in every process at once."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed as dist

pytest.importorskip("transformers")
pytestmark = [
    pytest.mark.distributed,
    pytest.mark.skipif(not dist.is_available() or not dist.is_gloo_available(), reason="needs torch.distributed, gloo"),
]
WORKER = Path(__file__).with_name("vocab_parallel_worker.py")


@pytest.mark.parametrize("processes", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_as_in_one_process(processes: int) -> None:
    """Every check of the worker; what failed is in its output."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "NUMBA_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [*command, str(WORKER)], env=environment, capture_output=True, text=True, timeout=180, check=False
    )
    assert done.returncode == 0, done.stdout[-1000:] + done.stderr[-6000:]
    assert len(done.stdout.split()) == 14
