"""Transport on a tree against linear programming and the line; more of its gradients is in test_gradient_matrix."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from otloss import wasserstein_1d
from otloss.solvers.tree import wasserstein_tree
from tests.errors import raising
from tests.otloss.linear_programs import check_subgradients
from tests.otloss.oracles import as_double, linprog_value
from tests.otloss.strategies import weights


def random_parents(rng: np.random.Generator, n: int) -> np.ndarray:
    """A random tree whose nodes come in any order."""
    grown = np.array([max(0, rng.integers(max(0, i - 3), max(1, i))) for i in range(n)])
    names = rng.permutation(n)
    parent = np.empty(n, dtype=np.int64)
    parent[names] = names[grown]
    return parent


def path_lengths(parent: np.ndarray, length: np.ndarray) -> np.ndarray:
    """Distances between all nodes, by walking up."""
    n = parent.size

    def edges(node: int) -> set[int]:
        walked = set()
        while parent[node] not in (node, -1):
            walked.add(node)
            node = int(parent[node])
        return walked

    above = [edges(i) for i in range(n)]
    return np.array([[sum(length[e] for e in above[i] ^ above[j]) for j in range(n)] for i in range(n)])


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_is_the_linear_program_and_gradients_are_subgradients(data: st.DataObject) -> None:
    n = data.draw(st.integers(1, 8))
    rng = np.random.default_rng(data.draw(st.integers(0, 10_000)))
    parent, length = random_parents(rng, n), rng.integers(0, 4, size=n).astype(float)
    p, q = data.draw(weights(n)), data.draw(weights(n))

    def value(p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
        return wasserstein_tree(p, q, torch.tensor(parent), as_double(length))

    expected = linprog_value(p, q, path_lengths(parent, length))
    assert value(as_double(p), as_double(q)).item() == pytest.approx(expected, abs=1e-6)
    check_subgradients(value, p, q)


@pytest.mark.parametrize("n", [1, 64, 65])
def test_a_path_is_a_line(n: int) -> None:
    generator = torch.Generator().manual_seed(n)
    p, q = torch.rand(2, 3, n, generator=generator, dtype=torch.float64).softmax(-1)
    gaps = torch.rand(n, generator=generator, dtype=torch.float64)
    x = torch.cat([gaps[:1] * 0, gaps[1:].cumsum(0)])
    for root in (-1, 0):
        parent = torch.arange(-1, n - 1)
        parent[0] = root
        torch.testing.assert_close(wasserstein_tree(p, q, parent.int(), gaps), wasserstein_1d(p, q, x))


third = torch.full((3,), 1 / 3)
ones = torch.ones(3)


test_bad_trees = raising(
    ([0, 2, 1], ones, "parent has a cycle above node 1"),
    ([1, 2, 0], ones, r"parent has 0 roots \[\], expected one"),
    ([-1, 0, -1], ones, r"parent has 2 roots \[0, 2\], expected one"),
    ([0, 0, 3], ones, r"parent\[2\] is 3, expected 0 to 2"),
    ([0, 0, 0], -ones, r"length\[0\] is -1.0"),
    ([0, 0, 0], ones, torch.ones(1), "p has 3 nodes and q 1"),
    call=lambda parent, length, q=third: wasserstein_tree(third, q, torch.tensor(parent), length),
)
