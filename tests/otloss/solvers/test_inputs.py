"""Inputs at the public edges: masses that differ by the rounding of narrower dtypes; sparse, meta and 8-bit tensors."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import otloss
from otloss.costs import PointCost

COST = torch.tensor([[0.0, 1.0, 4.0], [1.0, 0.0, 1.0], [4.0, 1.0, 0.0]])


@pytest.mark.parametrize(
    ("dtype", "valid", "invalid"),
    [
        (torch.float64, 5e-7, 2e-6),
        (torch.float32, 5e-6, 2e-5),
        (torch.float16, 2e-3, 1e-2),
        (torch.bfloat16, 1e-2, 0.1),
    ],
)
def test_masses_may_differ_by_rounding(dtype: torch.dtype, valid: float, invalid: float) -> None:
    p, q = (torch.tensor([0.25, 0.25, 0.5], dtype=torch.float64) for _ in range(2))
    assert otloss.emd(p.to(dtype), (q * (1 + valid)).to(dtype), COST).isfinite()
    for wider in {dtype, torch.float64}:
        with pytest.raises(ValueError, match=r"p and q hold different masses.*Normalise both"):
            otloss.emd(p.to(dtype).to(wider), (q * (1 + invalid)).to(dtype).to(wider), COST)


P, Q, C, Y = (
    torch.tensor([0.25, 0.25, 0.5]),
    torch.tensor([0.5, 0.25, 0.25]),
    COST,
    torch.tensor([0, 2]),
)
CLOUD, Z = torch.eye(3), torch.eye(3)[:2]
CALLS: dict[str, Callable[[Callable[[Tensor], Tensor]], object]] = {
    "emd p": lambda odd: otloss.emd(odd(P), Q, C),
    "sinkhorn q": lambda odd: otloss.sinkhorn(P, odd(Q), C, epsilon=0.1),
    "solve cost": lambda odd: otloss.solve(P, Q, odd(C)),
    "line x": lambda odd: otloss.wasserstein_1d(P, Q, odd(P)),
    "cdf q": lambda odd: otloss.cdf_distance(P, odd(Q)),
    "tree p": lambda odd: otloss.wasserstein_tree(odd(P), Q, torch.zeros(3, dtype=torch.long), P),
    "sliced x": lambda odd: otloss.sliced_wasserstein(odd(CLOUD), CLOUD),
    "upper bound": lambda odd: otloss.upper_bound(P, Q, odd(C)),
    "sort": lambda odd: otloss.soft_sort(odd(CLOUD)),
    "points": lambda odd: PointCost(odd(CLOUD)),
    "logits": lambda odd: otloss.ordinal_loss(odd(Z), Y),
}


ODD: dict[str, tuple[Callable[[Tensor], Tensor], str]] = {
    "sparse": (Tensor.to_sparse, r"layout torch.sparse_coo, expected a dense tensor; call \w+.to_dense\(\)"),
    "rows": (lambda t: t.reshape(-1, t.shape[-1]).to_sparse_csr(), "layout torch.sparse_csr, expected a dense tensor"),
    "meta": (lambda t: t.to("meta"), "on the meta device, which holds no numbers; expected a tensor on a CPU or GPU"),
    "8 bits": (lambda t: t.to(torch.float8_e4m3fn), r"dtype torch.float8_e4m3fn, expected float16.*call \w+.float\(\)"),
}


@pytest.mark.filterwarnings("ignore:Sparse")
@pytest.mark.parametrize("name", CALLS)
def test_tensors_that_are_not_plain_are_named(name: str) -> None:
    for change, message in ODD.values():
        with pytest.raises((TypeError, ValueError), match=message):
            CALLS[name](change)
