"""Settings of all tests of `otloss`."""

import pytest

from otloss.costs.distances import Products
from otloss.solvers.barycenter.problem import Numbers

# Sizes at which work is split into blocks or given to kernels, so small that the problems of tests are split.
SMALL_BLOCKS = {
    "otloss._numba.threads.MIN_ENTRIES": 1,
    "otloss.costs.cost._BLOCK_ENTRIES": 20,
    "otloss.costs.distances.PRODUCTS": Products(block_entries=90 * 3 * 7),
    "otloss.losses.number_tokens._PIECE_ON_CPU": 30,
    "otloss.solvers.barycenter.iteration.NUMBERS": Numbers(largest_matrix=0),
    "otloss.solvers.entropic.objectives._PLAN_BLOCK_ENTRIES": 1,
    "otloss.solvers.entropic.implicit.grid.MIN_CELLS": 1,
    "otloss.solvers.closed_forms.line._SMALL": 0,
    "otloss.solvers.closed_forms.sliced._BLOCK": 1,
}


@pytest.fixture(autouse=True)
def kernels_for_small_problems(monkeypatch: pytest.MonkeyPatch) -> None:
    """Test the kernels of soft minima on small problems, where torch is used otherwise."""
    monkeypatch.setattr("otloss._numba.SMALL", 0)


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Split small problems as large ones are. `request.getfixturevalue` asks for it after a run on the whole."""
    for name, size in SMALL_BLOCKS.items():
        monkeypatch.setattr(name, size)
