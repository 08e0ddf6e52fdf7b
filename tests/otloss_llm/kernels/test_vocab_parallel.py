"""A head spread over 2 or 3 processes (gloo) against the same head in one, and errors in every process at once."""

import os
from pathlib import Path

import pytest
import torch.distributed as dist

from tests.otloss_llm.conftest import launch

pytest.importorskip("transformers")
pytestmark = [
    pytest.mark.distributed,
    pytest.mark.skipif(not hasattr(os, "fork"), reason="forks"),
    pytest.mark.skipif(not dist.is_available() or not dist.is_gloo_available(), reason="needs torch.distributed, gloo"),
]
WORKER = Path(__file__).with_name("vocab_parallel_worker.py")


@pytest.mark.parametrize("processes", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_as_in_one_process(processes: int) -> None:
    """Every check of the worker; what failed is in its output."""
    printed = launch(WORKER, processes)
    assert len(printed.split()) == 14
