"""Settings of all tests: no example downloads anything."""

import sys
from collections.abc import Iterator

import data
import pytest


@pytest.fixture(autouse=True)
def no_downloads(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Nothing answers at the addresses of data, the cache is empty, and no folder is set in the environment."""
    monkeypatch.setattr(data, "ADDRESS", "http://127.0.0.1:9/{source}/{commit}/{path}")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.getbasetemp() / "no_cache"))
    monkeypatch.delenv("OTLOSS_DATA", raising=False)


@pytest.fixture(autouse=True)
def closed_figures() -> Iterator[None]:
    """Close what a test drew: matplotlib warns of more than 20 open figures, and tests of one process share them."""
    yield
    if pyplot := sys.modules.get("matplotlib.pyplot"):
        pyplot.close("all")
