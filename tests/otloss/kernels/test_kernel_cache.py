"""Files of compiled kernels: damaged ones are replaced, a full disk stops no call, and processes disturb no other."""

import errno
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numba
import numpy as np
import pytest

from otloss._kernels import _cache
from otloss._kernels._compile import compiled

DTYPES = (np.float32, np.float64)


def doubled(x: np.ndarray) -> float:
    return x.itemsize * 2 * x[0]


def is_right(kernel: Any, dtypes: Any = DTYPES) -> bool:
    return all(kernel(np.full(3, 1.5, dtype)) == 3 * np.dtype(dtype).itemsize for dtype in dtypes)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path))
    return tmp_path


@pytest.fixture
def compilations(folder: Path) -> Callable[[], int]:
    """Call the kernel as a new process does, for two dtypes; return how often it was compiled."""

    def count() -> int:
        kernel = compiled()(doubled)
        assert is_right(kernel)
        return sum(kernel.stats.cache_misses.values())

    return count


def test_damaged_files_and_those_of_other_sources_are_compiled_again(
    folder: Path, compilations: Callable[[], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert [compilations(), compilations()] == [2, 0]
    damages: list[Callable[[bytes], bytes]] = [lambda b: b[: len(b) // 2], lambda b: b"", lambda b: b[:-1] + b"?"]
    for damage in damages:
        for path in folder.rglob("*.nb?"):
            path.write_bytes(damage(path.read_bytes()))
        assert [compilations(), compilations()] == [2, 0]
    monkeypatch.setattr(_cache, "_digest_of_sources", lambda folder: "another")
    assert [compilations(), compilations()] == [2, 0]


def test_a_full_disk_stops_no_call(
    folder: Path, compilations: Callable[[], int], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(_cache.KernelCache, "_reported", False)
    monkeypatch.setattr(os, "replace", fails)
    assert [compilations(), compilations()] == [2, 2]
    assert sum("cannot be written to" in line for line in caplog.messages) == 1
    assert not any(path.is_file() for path in folder.rglob("*"))


PROCESSES = """
import multiprocessing, sys
import numba
from otloss._kernels._compile import compiled
from tests.otloss.kernels.test_kernel_cache import DTYPES, doubled, is_right

numba.config.CACHE_DIR = sys.argv[1]
context = multiprocessing.get_context("fork")
start = context.Barrier(8)

def compile(k):
    kernel = compiled()(doubled)
    start.wait()
    assert is_right(kernel, DTYPES[:: 1 if k % 2 else -1])

processes = [context.Process(target=compile, args=(k,)) for k in range(8)]
[process.start() for process in processes]
[process.join() for process in processes]
sys.exit(max(process.exitcode for process in processes))
"""


def test_processes_compile_one_kernel_at_once(folder: Path, compilations: Callable[[], int]) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    subprocess.run([sys.executable, "-c", PROCESSES, str(folder)], env=environment, check=True, timeout=300)
    assert compilations() == 0
