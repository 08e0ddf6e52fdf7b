"""Settings of all tests: nothing is downloaded, and figures need no screen."""

import gc
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

# What imports and tests make while they are collected stays: searches for garbage would take a quarter of that time.
gc.disable()

# Before a library reads them. Without HF_HUB_OFFLINE the hub is asked for a minute.
CACHE = tempfile.TemporaryDirectory()
os.environ |= {"HF_ENDPOINT": "http://127.0.0.1:9", "HF_HUB_CACHE": f"{CACHE.name}/hub", "MPLBACKEND": "agg"}
os.environ |= {"HF_DATASETS_CACHE": f"{CACHE.name}/datasets", "HF_HUB_OFFLINE": "1"}

import data  # noqa: E402
import pytest  # noqa: E402
from hypothesis import settings  # noqa: E402

# The same few examples in every run; `make test-all` draws more, and others.
settings.register_profile("few", derandomize=True, deadline=None, max_examples=30)
settings.register_profile("many", deadline=None, max_examples=200)
settings.load_profile("few")


def pytest_collectstart() -> None:
    """Let no other process compile: which kernel answers does not depend on time.

    Here and not above, since the process that hands out the tests to others collects none, and starts without torch.
    """
    from otloss._numba import background

    background.SWITCH.is_on = False


def pytest_collection_finish() -> None:
    """Keep what all imports have made out of later searches for garbage, each of which would take a second."""
    gc.freeze()
    gc.enable()


def pytest_unconfigure() -> None:
    gc.unfreeze()


@pytest.fixture(autouse=True)
def no_downloads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing answers at the addresses of data, the cache is empty, and no folder is set in the environment."""
    monkeypatch.setattr(data, "ADDRESS", "http://127.0.0.1:9/{source}/{commit}/{path}")
    monkeypatch.setenv("XDG_CACHE_HOME", f"{CACHE.name}/none")
    monkeypatch.delenv("OTLOSS_DATA", raising=False)


@pytest.fixture
def no_data(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """There is no folder of data beside the repository; returns the place where one could be made."""
    monkeypatch.setattr(data, "BESIDE", tmp_path / "none")
    return tmp_path / "none"


@pytest.fixture
def without(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """`without("matplotlib")`: imports of the module fail, as where its package is not installed."""
    return lambda module: monkeypatch.setitem(sys.modules, module, None)


@pytest.fixture(autouse=True)
def closed_figures() -> Iterator[None]:
    """Close what a test drew: matplotlib warns of more than 20 open figures, and tests of one process share them."""
    yield
    if pyplot := sys.modules.get("matplotlib.pyplot"):
        pyplot.close("all")


@pytest.fixture(autouse=True, scope="module")
def kernels_are_compiled_for_one_layout() -> Iterator[None]:
    """Fail where a kernel was called with an array in pieces, or one that is read-only, after the tests of a file.

    For each of these a user waits for another compilation, whatever `warm_up` has compiled.
    """
    yield
    kernels = [
        (module.__name__, name, kernel)
        for key, module in list(sys.modules.items())
        if key.startswith("otloss") and key.endswith("_numba")
        for name, kernel in vars(module).items()
        if type(getattr(kernel, "_cache", None)).__name__ == "KernelCache"
    ]
    wrong = {
        (*named, str(array))
        for *named, kernel in kernels
        for signature in kernel.overloads
        for array in arrays_among(signature)
        if array.layout == "A" or not array.mutable
    }
    assert wrong == set()


def arrays_among(kinds: Any) -> Iterator[Any]:
    """The types of arrays in a signature, also of those in tuples."""
    from numba import types

    for kind in kinds:
        if isinstance(kind, types.Array):
            yield kind
        elif isinstance(kind, types.BaseTuple):
            yield from arrays_among(kind)
