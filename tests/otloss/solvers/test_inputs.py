"""Inputs at the public edges: masses that differ by the rounding of narrower dtypes; sparse, meta and 8-bit tensors."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import otloss
from otloss.costs import CosineCost, DenseCost, LineCost, PointCost, graph_cost

N = 100
X = torch.linspace(0, 1, N, dtype=torch.float64)
COST = (X.unsqueeze(-1) - X).square()
PARENT = torch.arange(N).sub(1).clamp(min=0)

OF_HISTOGRAMS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "emd": lambda p, q: otloss.emd(p, q, COST),
    "emd on a line": lambda p, q: otloss.emd(p, q, LineCost(X, power=2)),
    "sinkhorn": lambda p, q: otloss.sinkhorn(p, q, COST, epsilon=0.05),
    "sinkhorn in torch": lambda p, q: otloss.sinkhorn(p, q, COST, epsilon=0.05, impl="torch"),
    "divergence": lambda p, q: otloss.sinkhorn_divergence(p, q, PointCost(X.unsqueeze(-1)), epsilon=0.05),
    "line": lambda p, q: otloss.wasserstein_1d(p, q, X, order=2),
    "cdf": lambda p, q: otloss.cdf_distance(p, q, X),
    "circle": lambda p, q: otloss.wasserstein_circular(p, q),
    "tree": lambda p, q: otloss.wasserstein_tree(p, q, PARENT, X),
    "lower bound": lambda p, q: otloss.lower_bound(p, q, COST),
    "upper bound": lambda p, q: otloss.upper_bound(p, q, COST),
}


def rounded_histograms() -> tuple[Tensor, Tensor]:
    """Normalised in float32, then cast; their masses differ by 4e-7."""
    generator = torch.Generator().manual_seed(0)
    p, q = (torch.randn(N, generator=generator).mul(2).softmax(-1) for _ in range(2))
    p, q = p.double(), q.double() * (1 + 4e-7)
    assert 1e-7 < abs(p.sum() - q.sum()) < 1e-6
    return p, q


@pytest.mark.parametrize("name", OF_HISTOGRAMS)
def test_histograms_of_float32_in_float64(name: str) -> None:
    call = OF_HISTOGRAMS[name]
    p, q = rounded_histograms()
    mean = (p.sum() + q.sum()) / 2
    balanced = [(w * (mean / w.sum())).requires_grad_() for w in (p, q)]
    given = [w.clone().requires_grad_() for w in (p, q)]
    value, expected = call(*given), call(*balanced)
    torch.testing.assert_close(value, expected, rtol=1e-12, atol=0)
    for got, right in zip(torch.autograd.grad(value, given), torch.autograd.grad(expected, balanced), strict=True):
        torch.testing.assert_close(got, right, rtol=1e-6, atol=1e-9)
        assert abs(got.mean()) < 1e-12


def test_gradients_through_the_rescaling() -> None:
    """Differences of the gradient tell what moving mass between bins does; the masses stay as unequal as they are."""
    p, q = rounded_histograms()
    p.requires_grad_()
    for name in ("sinkhorn", "cdf", "divergence"):
        (gradient,) = torch.autograd.grad(OF_HISTOGRAMS[name](p, q), p)
        step = torch.zeros(N, dtype=torch.float64)
        step[20], step[70] = 1e-5, -1e-5
        with torch.no_grad():
            expected = (OF_HISTOGRAMS[name](p + step, q) - OF_HISTOGRAMS[name](p - step, q)) / 2
        assert expected.item() == pytest.approx((gradient * step).sum().item(), rel=1e-5)


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
    cost = COST[:3, :3]
    assert otloss.emd(p.to(dtype), (q * (1 + valid)).to(dtype), cost).isfinite()
    for wider in {dtype, torch.float64}:
        with pytest.raises(ValueError, match=r"p and q hold different masses.*Normalise both"):
            otloss.emd(p.to(dtype).to(wider), (q * (1 + invalid)).to(dtype).to(wider), cost)


P, Q, C, Y = (
    torch.tensor([0.25, 0.25, 0.5]),
    torch.tensor([0.5, 0.25, 0.25]),
    COST[:3, :3].float(),
    torch.tensor([0, 2]),
)
CLOUD, Z = torch.eye(3), torch.eye(3)[:2]
CALLS: dict[str, Callable[[Callable[[Tensor], Tensor]], object]] = {
    "emd p": lambda odd: otloss.emd(odd(P), Q, C),
    "emd cost": lambda odd: otloss.emd(P, Q, odd(C)),
    "sinkhorn q": lambda odd: otloss.sinkhorn(P, odd(Q), C, epsilon=0.1),
    "sinkhorn cost": lambda odd: otloss.sinkhorn(P, Q, odd(C), epsilon=0.1),
    "divergence p": lambda odd: otloss.sinkhorn_divergence(odd(P), Q, PointCost(CLOUD), epsilon=0.1),
    "solve cost": lambda odd: otloss.solve(P, Q, odd(C)),
    "line p": lambda odd: otloss.wasserstein_1d(odd(P), Q),
    "line x": lambda odd: otloss.wasserstein_1d(P, Q, odd(P)),
    "cdf q": lambda odd: otloss.cdf_distance(P, odd(Q)),
    "circle p": lambda odd: otloss.wasserstein_circular(odd(P), Q),
    "tree p": lambda odd: otloss.wasserstein_tree(odd(P), Q, torch.zeros(3, dtype=torch.long), P),
    "sliced x": lambda odd: otloss.sliced_wasserstein(odd(CLOUD), CLOUD),
    "upper bound": lambda odd: otloss.upper_bound(P, Q, odd(C)),
    "sort": lambda odd: otloss.soft_sort(odd(CLOUD)),
    "points": lambda odd: PointCost(odd(CLOUD)),
    "matrix": lambda odd: DenseCost(odd(C)),
    "directions": lambda odd: CosineCost(odd(CLOUD)),
    "graph": lambda odd: graph_cost(odd(C)),
    "logits": lambda odd: otloss.ordinal_loss(odd(Z), Y),
    "number logits": lambda odd: otloss.number_token_loss(odd(Z), Y, P),
    "histogram logits": lambda odd: otloss.histogram_loss(odd(Z), torch.tensor([0.4, 0.5]), torch.linspace(0, 1, 4)),
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
