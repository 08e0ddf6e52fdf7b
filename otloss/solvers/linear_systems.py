"""Linear equations and products of a batch of problems, with larger matrices one after the other.

`torch.linalg` factors the matrices of a batch on a CPU in parallel. With torch 2.13, MKL and two threads, the factors
of two or more matrices of 150 rows are wrong, or the call does not return. Single matrices are right, and so are the
ones with at most 128 rows. One after the other, Python also sees an interrupt (Ctrl-C) between two of them.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from jaxtyping import Float
from torch import Tensor

LARGEST_IN_BATCH = 100  # rows of matrices that are factored together


def solve(matrix: Float[Tensor, "*batch n n"], right: Float[Tensor, "*batch n k"]) -> Float[Tensor, "*batch n k"]:
    """Return the solutions; raises LinAlgError if a matrix is singular."""
    return _per_problem(lambda *one: (torch.linalg.solve(*one),), matrix, right)[0]


def solve_ex(
    matrix: Float[Tensor, "*batch n n"], right: Float[Tensor, "*batch n"]
) -> tuple[Float[Tensor, "*batch n"], Tensor]:
    """Return the solutions for one right side each, and where they failed, a number other than 0."""
    x, failed = _per_problem(torch.linalg.solve_ex, matrix, right.unsqueeze(-1))
    return x.squeeze(-1), failed


def invert(matrix: Float[Tensor, "*batch n n"]) -> Float[Tensor, "*batch n n"]:
    """Return the inverses, without a check."""
    return _per_problem(torch.linalg.inv_ex, matrix)[0]


def factor(matrix: Float[Tensor, "*batch n n"]) -> tuple[Tensor, Tensor, Tensor]:
    """Return the factors and pivots of `torch.linalg.lu_factor_ex`, and where they failed."""
    factors, pivots, failed = _per_problem(torch.linalg.lu_factor_ex, matrix)
    return factors, pivots, failed


def solve_factored(factors: Tensor, pivots: Tensor, right: Float[Tensor, "*batch n k"]) -> Float[Tensor, "*batch n k"]:
    """Return the solutions by the results of `factor`."""

    def solve_one(factors: Tensor, right: Tensor, pivots: Tensor) -> tuple[Tensor]:
        return (torch.linalg.lu_solve(factors, pivots.squeeze(-1), right),)

    return _per_problem(solve_one, factors, right, pivots.unsqueeze(-1))[0]


def product_with_itself(matrix: Float[Tensor, "*batch n m"]) -> Float[Tensor, "*batch m m"]:
    """Return A^T A."""
    return _per_problem(lambda one: (one.mT @ one,), matrix)[0]


def _per_problem(function: Callable[..., tuple[Tensor, ...]], *operands: Tensor) -> tuple[Tensor, ...]:
    """Return the results of `function` for a batch of matrices, in one call or in one for each problem."""
    matrix, batch = operands[0], operands[0].shape[:-2]
    if matrix.device.type != "cpu" or matrix.shape[-1] <= LARGEST_IN_BATCH or batch.numel() <= 1:
        return tuple(function(*operands))
    flat = [operand.expand(*batch, *operand.shape[-2:]).reshape(-1, *operand.shape[-2:]) for operand in operands]
    results = [function(*one) for one in zip(*flat, strict=True)]
    stacked = (torch.stack(parts) for parts in zip(*results, strict=True))
    return tuple(part.reshape(*batch, *part.shape[1:]) for part in stacked)
