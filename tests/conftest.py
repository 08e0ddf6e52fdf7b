"""Settings of all tests: no example downloads anything."""

import data
import pytest


@pytest.fixture(autouse=True)
def no_downloads(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Nothing answers at the addresses of data, the cache is empty, and no folder is set in the environment."""
    monkeypatch.setattr(data, "ADDRESS", "http://127.0.0.1:9/{source}/{commit}/{path}")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.getbasetemp() / "no_cache"))
    monkeypatch.delenv("OTLOSS_DATA", raising=False)
