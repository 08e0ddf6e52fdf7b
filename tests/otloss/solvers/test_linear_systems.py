"""Equations of a batch, with torch's threads, against each problem by itself."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import otloss
from otloss.solvers import linear_systems


@pytest.fixture
def two_threads():
    count = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(count)


@pytest.mark.parametrize("n", [3, 200])
def test_a_batch_equals_each_problem_with_two_threads(n, two_threads):
    # Each call to torch.linalg with all of the larger matrices gave wrong factors, or did not return.
    generator = torch.Generator().manual_seed(0)
    root = torch.randn(2, 2, n, n, generator=generator, dtype=torch.float64)
    matrix = root @ root.mT / n + torch.eye(n, dtype=torch.float64)
    right = torch.randn(2, 2, n, 1, generator=generator, dtype=torch.float64)
    factors, pivots, failed = linear_systems.factor(matrix)
    by_vector, failed_too = linear_systems.solve_ex(matrix, right.squeeze(-1))
    solutions = {
        "solve": linear_systems.solve(matrix, right),
        "solve_ex": by_vector.unsqueeze(-1),
        "invert": linear_systems.invert(matrix) @ right,
        "solve_factored": linear_systems.solve_factored(factors, pivots, right),
    }
    assert failed.shape == failed_too.shape == (2, 2)
    assert not bool((failed | failed_too).any())
    torch.testing.assert_close(linear_systems.product_with_itself(root), root.mT @ root)
    for name, x in solutions.items():
        torch.testing.assert_close(matrix @ x, right, rtol=1e-9, atol=1e-9, msg=name)


def test_derivatives_and_failures_of_larger_batches():
    matrix = 3 * torch.eye(101, dtype=torch.float64).repeat(2, 1, 1)
    matrix[1] = 0
    assert linear_systems.factor(matrix)[2].ne(0).tolist() == [False, True]
    with pytest.raises(torch.linalg.LinAlgError):
        linear_systems.solve(matrix, matrix[..., :1])
    leaf = matrix[:1].repeat(2, 1, 1).requires_grad_()
    right = torch.ones(2, 101, 1, dtype=torch.float64)
    (gradient,) = torch.autograd.grad(linear_systems.solve(leaf, right).sum(), leaf)
    torch.testing.assert_close(gradient, torch.full_like(gradient, -1 / 9))


def test_no_operation_of_a_soft_rank_takes_the_products_of_many_large_problems():
    """An interrupt waits for the end of an operation: with 40 rows of 1,200 numbers it took seconds."""
    sizes = []

    class Products(TorchDispatchMode):
        def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
            if operation is torch.ops.aten.bmm.default and args[1].shape[-1] > 1:
                sizes.append(len(args[0]))
            return operation(*args, **(kwargs or {}))

    with Products():
        otloss.soft_rank(torch.randn(3, 150), epsilon=0.1)
    assert max(sizes, default=1) == 1
