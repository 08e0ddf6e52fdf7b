"""The public face: every name resolves, and importing the package stays light."""

from __future__ import annotations

import subprocess
import sys

import pytest

import otloss


@pytest.mark.parametrize("name", otloss.__all__)
def test_every_name_resolves(name: str) -> None:
    assert getattr(otloss, name) is not None


def test_all_lists_every_public_name() -> None:
    public = {
        name
        for name, value in vars(otloss).items()
        if not name.startswith("_") and (callable(value) or name in ("costs", "nn"))
    }
    assert public | {"__version__"} == set(otloss.__all__)
    assert list(otloss.__all__) == sorted(otloss.__all__)


def test_import_loads_no_heavy_package() -> None:
    heavy = ("transformers", "matplotlib", "pykeops", "geomloss", "ot", "sklearn", "numba", "torch._dynamo")
    code = f"import sys, otloss; print([name for name in {heavy} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
