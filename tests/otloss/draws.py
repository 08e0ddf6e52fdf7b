"""Numbers that tests draw: reproducible, in float64 unless they ask for another dtype."""

import torch
from torch import Tensor


def draw(*shape: int, seed: int = 0) -> Tensor:
    """Uniform in the unit interval."""
    return torch.rand(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def normal(*shape: int, seed: int = 0, scale: float = 1.0, dtype: torch.dtype = torch.float64) -> Tensor:
    numbers = torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return (scale * numbers).to(dtype)


def weights(*shape: int, seed: int = 5) -> Tensor:
    """Return weights of mass one, none near zero."""
    numbers = draw(*shape, seed=seed) + 0.1
    return numbers / numbers.sum(-1, keepdim=True)


def transport_problem(batch: tuple[int, ...] = (), *, n: int = 4, m: int = 5, zeros: bool = True) -> tuple[Tensor, ...]:
    """Weights p and q, with an empty bin each, and costs."""
    p, q = weights(*batch, n), weights(*batch, m, seed=6)
    if zeros:
        p[..., 1], q[..., -2] = 0.0, 0.0
    return p / p.sum(-1, keepdim=True), q / q.sum(-1, keepdim=True), draw(*batch, n, m)
