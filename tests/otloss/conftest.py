"""Settings of all tests of `otloss`."""

import pytest


@pytest.fixture(autouse=True)
def kernels_for_small_clouds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Test the kernels of point clouds on small clouds, where torch is used otherwise."""
    monkeypatch.setattr("otloss.costs._point.SMALL", 0)
