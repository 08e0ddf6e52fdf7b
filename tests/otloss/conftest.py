"""Settings of all tests of `otloss`."""

import pytest


@pytest.fixture(autouse=True)
def kernels_for_small_problems(monkeypatch: pytest.MonkeyPatch) -> None:
    """Test the kernels of soft minima on small problems, where torch is used otherwise."""
    monkeypatch.setattr("otloss._kernels.SMALL", 0)
