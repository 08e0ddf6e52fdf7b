"""Checks of weight gradients that need no oracle, and weights for them."""

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from tests.otloss.oracles import as_double


def check_subgradients(
    value: Callable[[Tensor, Tensor], Tensor], p: np.ndarray, q: np.ndarray, slack: float = 1e-9
) -> None:
    """f.(p' - p) <= value(p') - value(p) for every vertex p', degenerate optima included; the same for q."""
    P, Q = as_double(p, grad=True), as_double(q, grad=True)
    here = value(P, Q)
    by_p, by_q = torch.autograd.grad(here, [P, Q])
    for there in torch.eye(p.size, dtype=torch.float64):
        assert by_p @ (there - P) <= value(there, Q) - here + slack
    for there in torch.eye(q.size, dtype=torch.float64):
        assert by_q @ (there - Q) <= value(P, there) - here + slack


def sparse_weights(rng: np.random.Generator, n: int) -> np.ndarray:
    """General weights of mass 1, a third of them zero."""
    p = rng.dirichlet(np.ones(n))
    p[rng.permutation(n)[: n // 3]] = 0
    weights: np.ndarray = p / p.sum()
    return weights
