"""What holds for every distance between histograms: batches, layouts, dtypes, missing weights, no mass, rounding."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import otloss
from otloss.costs import CosineCost, LineCost, PointCost

# Of p, q and positions, each (..., 6).
Distance = Callable[[Tensor | None, Tensor | None, Tensor], Tensor]
PARENT = torch.tensor([1, 1, 0, 1, 3, 0])
DIRECTIONS = torch.tensor([[1.0, 0.3], [-0.2, 1.0]])


def curve(x: Tensor) -> Tensor:
    """Points in the plane."""
    return torch.stack([x, x.square()], -1)


def squares(x: Tensor) -> Tensor:
    return (x.unsqueeze(-1) - x.unsqueeze(-2)).square()


def entropic(function: Callable[..., Tensor], **options: Any) -> Distance:
    def value(p: Tensor | None, q: Tensor | None, x: Tensor) -> Tensor:
        tight = {"tolerance": 1e-10} if x.dtype == torch.float64 else {}
        return function(p, q, PointCost(x.unsqueeze(-1)), epsilon=0.3, **options, **tight)

    return value


EXACT: dict[str, Distance] = {
    "emd": lambda p, q, x: otloss.emd(p, q, squares(x)),
    "emd of points": lambda p, q, x: otloss.emd(p, q, PointCost(x.unsqueeze(-1))),
    "solve": lambda p, q, x: otloss.solve(p, q, squares(x)).value,
    "quantiles 1": lambda p, q, x: otloss.wasserstein_1d(p, q, x),
    "quantiles 2": lambda p, q, x: otloss.wasserstein_1d(p, q, x, x.clone(), order=2),
    "cdf 1": lambda p, q, x: otloss.cdf_distance(p, q, x, power=1),
    "cdf 2": lambda p, q, x: otloss.cdf_distance(p, q, x),
    "circle": lambda p, q, x: otloss.wasserstein_circular(p, q, x, period=2.0),
    "sliced": lambda p, q, x: otloss.sliced_wasserstein(curve(x), curve(x), p, q, projections=DIRECTIONS),
    "lower": lambda p, q, x: otloss.lower_bound(p, q, squares(x)),
    "residual": lambda p, q, x: otloss.upper_bound(p, q, squares(x), coupling="residual"),
}  # fmt: skip
OTHERS: dict[str, Distance] = {
    "independent": lambda p, q, x: otloss.upper_bound(p, q, squares(x), coupling="independent"),
    "sinkhorn": entropic(otloss.sinkhorn, impl="compiled"),
    "sinkhorn in logs": entropic(otloss.sinkhorn, impl="torch"),
    "unbalanced": entropic(otloss.sinkhorn, marginal_penalty=1.0),
    "divergence": entropic(otloss.sinkhorn_divergence),
    "linear cost": entropic(lambda *a, **k: otloss.solve(*a, grad="implicit", **k).linear_cost),
}
# All problems share their positions.
SHARED: dict[str, Distance] = {
    "tree": lambda p, q, x: otloss.wasserstein_tree(p, q, PARENT, x.abs()),
    "circle, equal steps": lambda p, q, x: otloss.wasserstein_circular(p, q) * x.abs().sum(),
    "emd on a line": lambda p, q, x: otloss.emd(p, q, LineCost(x)),
    "lower, cosine": lambda p, q, x: otloss.lower_bound(p, q, CosineCost(curve(x))),
    "upper, line": lambda p, q, x: otloss.upper_bound(p, q, LineCost(x)),
}
BY_KERNEL = {f"{name}, by kernel": EXACT[name] for name in ("quantiles 1", "quantiles 2", "cdf 1", "cdf 2")}
DISTANCES = {**EXACT, **BY_KERNEL, **OTHERS, **SHARED}
# A cost object answers in its own precision, at least float32.
OF_COSTS = {"emd of points", "emd on a line", "lower, cosine", "upper, line", *OTHERS} - {"independent"}
every_distance = pytest.mark.parametrize("name", DISTANCES)


@pytest.fixture(autouse=True)
def kernels_of_lines(request: pytest.FixtureRequest) -> None:
    if "by kernel" in request.node.name:
        request.getfixturevalue("small_blocks")


def problem(dtype: torch.dtype = torch.float64, mass: float = 2.0) -> tuple[Tensor, Tensor, Tensor]:
    """p (3, 1, 6), q (4, 6), some entries zero, and positions (6,) out of order."""
    generator = torch.Generator().manual_seed(0)
    p, q = (torch.rand(*shape, generator=generator, dtype=torch.float64) + 0.05 for shape in ((3, 1, 6), (4, 6)))
    p[1, 0, :2], q[2, 3:], q[1, 0] = 0.0, 0.0, 0.0
    x = torch.tensor([0.3, -0.2, 0.9, 0.1, 0.6, 1.1], dtype=torch.float64)
    p, q = (mass * w / w.sum(-1, keepdim=True) for w in (p, q))
    return p.to(dtype), q.to(dtype), x.to(dtype)


@every_distance
def test_batches_broadcast_and_equal_a_loop(name: str) -> None:
    """Values, and gradients in all inputs with their sums over broadcast axes; positions of all and of each problem."""
    p, q, x = problem()
    upstream = torch.linspace(-1, 2, 12, dtype=torch.float64).reshape(3, 4)
    for places in (x,) if name in SHARED else (x, x + torch.rand(3, 1, 6, generator=torch.Generator().manual_seed(1))):
        leaves = [t.clone().requires_grad_() for t in (p, q, places)]
        batched = DISTANCES[name](*leaves)
        assert batched.shape == (3, 4)
        again = [t.clone().requires_grad_() for t in (p, q, places.expand(3, 1, 6))]
        rows = [[DISTANCES[name](again[0][i, 0], again[1][j], again[2][i, 0]) for j in range(4)] for i in range(3)]
        looped = torch.stack([torch.stack(row) for row in rows])
        torch.testing.assert_close(batched, looped, rtol=1e-8, atol=1e-9)
        actual = torch.autograd.grad((batched * upstream).sum(), leaves)
        expected = list(torch.autograd.grad((looped * upstream).sum(), again))
        expected[2] = expected[2].sum_to_size(places.shape)
        torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-6)


@every_distance
def test_empty_and_strided_batches(name: str) -> None:
    p, q, x = problem()
    leaf = p[:0].requires_grad_()
    value = DISTANCES[name](leaf, q, x)
    assert value.shape == (0, 4)
    assert torch.autograd.grad(value.sum(), leaf)[0].shape == (0, 1, 6)
    strided = p.squeeze(1).T.contiguous().T
    assert not strided.is_contiguous()
    twice = torch.stack([q[:3], q[:3]], -1)[..., 0]
    torch.testing.assert_close(DISTANCES[name](strided, twice, x), DISTANCES[name](p.squeeze(1), q[:3], x))


@every_distance
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_narrow_dtypes(name: str, dtype: torch.dtype) -> None:
    """The value has the dtype of the inputs, and the error is at most one rounding of masses and value."""
    p, q, x = problem(dtype, mass=1.0)
    p.requires_grad_()
    value = DISTANCES[name](p, q, x)
    assert value.dtype == (torch.float32 if name in OF_COSTS else dtype)
    (gradient,) = torch.autograd.grad(value.sum(), p)
    assert gradient.dtype == dtype
    assert gradient.isfinite().all()
    wide = [w.detach().double() / w.detach().double().sum(-1, keepdim=True) for w in (p, q)]
    rounding = 4 * torch.finfo(dtype).eps + (1e-4 if name in OTHERS else 1e-5)
    torch.testing.assert_close(value.double(), DISTANCES[name](*wide, x.double()), rtol=rounding, atol=rounding)


@pytest.mark.parametrize("name", [*EXACT, *BY_KERNEL, *SHARED])
@pytest.mark.parametrize("spread", [1.0, 20.0])
def test_float32_histograms_that_nearly_agree(name: str, spread: float) -> None:
    """Float32 cannot scale masses that differ by a rounding: an upper bound was 0, below the exact cost."""
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randn(2, 4, 6, generator=generator)
    p = torch.softmax(spread * drawn[0], -1)
    q = p * (1 + 1e-4 * drawn[1])
    q, x = q / q.sum(-1, keepdim=True), problem()[2].float()
    expected = DISTANCES[name](p.double(), q.double(), x.double())
    torch.testing.assert_close(DISTANCES[name](p, q, x).double(), expected, rtol=3e-6, atol=0.0)


@every_distance
def test_equal_histograms_and_no_mass_have_finite_gradients(name: str) -> None:
    weights = torch.tensor([[0.2, 0.5, 0.3, 0.0, 0.0, 0.0], [0.0, 1.0, 0.0, 0.0, 0.0, 0.0], [0.0] * 6]).double()
    if name in ("unbalanced", "linear cost"):  # raise where a side without mass needs a gradient
        weights = weights[:2]
    leaves = [t.clone().requires_grad_() for t in (weights, weights, problem()[2])]
    value = DISTANCES[name](*leaves)
    assert (value if name not in OTHERS or name == "divergence" else value[2:]).abs().sum() < 1e-9
    assert all(g.isfinite().all() for g in torch.autograd.grad(value.sum(), leaves, materialize_grads=True))


@pytest.mark.parametrize("name", sorted({*EXACT, *OTHERS} - {"circle"}))
def test_no_weights_are_equal_ones(name: str) -> None:
    p, q, x = problem(mass=1.0)
    even = torch.full((6,), 1 / 6, dtype=torch.float64)
    for given, same in (((None, q), (even, q)), ((p, None), (p, even)), ((None, None), (even, even))):
        torch.testing.assert_close(DISTANCES[name](*given, x), DISTANCES[name](*same, x), rtol=1e-9, atol=1e-12)


@every_distance
def test_masses_off_by_rounding_are_balanced(name: str) -> None:
    p, q, x = problem()
    p, q = p.squeeze(1)[:3], q[:3]
    expected = DISTANCES[name](p, q, x)
    for pair in ((p, q * (1 + 8e-10)), (p * (1 + 8e-10), q)):
        torch.testing.assert_close(DISTANCES[name](*pair, x), expected, rtol=1e-8, atol=1e-9)
