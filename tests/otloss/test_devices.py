"""Values and gradients of tensors on a GPU are those on the CPU, and which problems of a GPU are searched there."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import otloss
from otloss import costs
from otloss.costs import Cost
from otloss.solvers.convergence import ConvergenceWarning
from otloss.solvers.entropic import potentials as search
from otloss.solvers.problem import Problem


def uniform(*shape: int, seed: int) -> Tensor:
    return torch.rand(*shape, generator=torch.Generator().manual_seed(seed))


def histograms(*shape: int, seed: int) -> Tensor:
    made = uniform(*shape, seed=seed) + 0.05
    return made / made.sum(-1, keepdim=True)


def squares(h: Tensor) -> Tensor:
    at = torch.arange(h.shape[-1], device=h.device, dtype=h.dtype) / h.shape[-1]
    return (at[:, None] - at).square()


def clusters(seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    centres = 5 * torch.randn(8, 3, generator=torch.Generator().manual_seed(10))
    return centres[torch.randint(8, (2100,), generator=generator)] + 0.3 * torch.randn(2100, 3, generator=generator)


P, Q, C = histograms(3, 20, seed=1), histograms(3, 20, seed=2), uniform(20, 20, seed=3)
X, Y = uniform(60, 3, seed=4), uniform(50, 3, seed=5) + 0.3
SCORES, LOGITS = uniform(5, 12, seed=6), uniform(7, 5, seed=7)
GRAPHS = uniform(12, 12, seed=8), uniform(10, 10, seed=9), uniform(12, 10, seed=10)

CASES: dict[str, tuple[Callable[..., Tensor], tuple[Tensor, ...]]] = {
    "emd": (otloss.emd, (P, Q, C)),
    "emd of points": (lambda x, y: otloss.emd(None, None, costs.PointCost(x, y)), (X, Y)),
    "sinkhorn": (lambda p, q, c: otloss.sinkhorn(p, q, c, epsilon=0.1), (P, Q, C)),
    "small epsilon": (lambda p, q, c: otloss.sinkhorn(p, q, c, epsilon=0.002), (P, Q, C)),
    "in logarithms": (lambda p, q, c: otloss.sinkhorn(p, q, c, epsilon=0.1, impl="torch"), (P, Q, C)),
    "unbalanced": (lambda p, q, c: otloss.sinkhorn(p, 1.3 * q, c, epsilon=0.05, marginal_penalty=1.0), (P, Q, C)),
    "part of the mass": (lambda p, q, c: otloss.solve(p, q, c, epsilon=0.05, mass=0.6).value, (P, Q, C)),
    "a start": (lambda p, q, c: otloss.solve(p, q, c, epsilon=0.01, start=(p, q)).value, (P, Q, C)),
    "two epsilons": (lambda p, q, c: otloss.sinkhorn(p, q, c, epsilon=p.new_tensor([0.1, 0.01, 0.1])), (P, Q, C)),
    "divergence": (lambda p, q: otloss.sinkhorn_divergence(p, q, squares(p), epsilon=0.05), (P, Q)),
    "implicit": (lambda p, q, c: otloss.solve(p, q, c, epsilon=0.1, grad="implicit").linear_cost, (P, Q, C)),
    "images": (
        lambda p, q: otloss.sinkhorn(p, q, costs.GridCost((4, 5)).to(p.device), epsilon=0.5),
        (P, Q),
    ),
    "clouds": (lambda x, y: otloss.cloud_loss(x, y, blur=0.1), (X, Y)),
    "clusters": (lambda x, y: otloss.cloud_loss(x, y, blur=0.3), (clusters(1), clusters(2))),
    "sorted": (lambda x: otloss.soft_sort(x, epsilon=0.1), (SCORES,)),
    "ranks": (lambda x: otloss.soft_rank(x, epsilon=0.1, regularization="quadratic"), (SCORES,)),
    "barycenter": (lambda h: otloss.barycenter(h, squares(h), epsilon=0.01), (P,)),
    "debiased": (lambda h: otloss.barycenter(h, squares(h), epsilon=0.01, debiased=True), (P,)),
    "graphs": (lambda a, b, c: otloss.fused_gromov(a + a.T, b + b.T, c).value, GRAPHS),
    "order 2": (lambda p, q: otloss.wasserstein_1d(p, q, order=2), (P, Q)),
    "circle": (otloss.wasserstein_circular, (P, Q)),
    "bounds": (lambda p, q, c: otloss.upper_bound(p, q, c) - otloss.lower_bound(p, q, c), (P, Q, C)),
    "ordinal": (lambda z: otloss.ordinal_loss(z, torch.arange(7, device=z.device) % 5), (LOGITS,)),
}


@pytest.mark.gpu
@pytest.mark.parametrize("name", list(CASES))
def test_answers_are_those_of_the_cpu(name: str) -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    function, inputs = CASES[name]
    here, there = ([t.clone().to(device).requires_grad_() for t in inputs] for device in ("cpu", "cuda"))
    value, on_gpu = function(*here), function(*there)
    assert on_gpu.device.type == "cuda"
    weights = torch.linspace(0.5, 1.5, value.numel()).reshape(value.shape)
    torch.testing.assert_close(on_gpu.cpu(), value, rtol=1e-4, atol=1e-5)
    gradients = torch.autograd.grad((value * weights).sum(), here)
    made = torch.autograd.grad((on_gpu * weights.cuda()).sum(), there)
    for got, wanted in zip(made, gradients, strict=True):
        assert got.device.type == "cuda"
        assert (got.cpu() - wanted).norm() <= 2e-3 * wanted.norm()


@pytest.mark.gpu
def test_what_does_not_converge_says_so() -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    with pytest.warns(ConvergenceWarning, match="after 3 iterations"):
        otloss.sinkhorn(P.cuda(), Q.cuda(), C.cuda(), epsilon=0.002, max_iterations=3)


@pytest.mark.parametrize("narrow", [True, False])
def test_a_problem_moves_whole(monkeypatch: pytest.MonkeyPatch, narrow: bool) -> None:
    """Start, penalty and one epsilon for each problem equal the ones before the move; and so do dtype and graph."""
    p, q, c, x, y = (t if narrow else t.double() for t in (P, Q, C, X, Y))
    cases: list[tuple[Cost, dict[str, object]]] = [
        (costs.DenseCost(c.clone().requires_grad_()), {"epsilon": torch.tensor([0.1, 1e-3, 0.01])}),
        (costs.DenseCost(c), {"epsilon": 0.05, "start": (3 * c.mean(-1) + 0 * p, c.mean(0) + 0 * q)}),
        (costs.DenseCost(c), {"epsilon": 0.05, "marginal_penalty": 0.3}),
        (costs.PointCost(x[:20].clone().requires_grad_(), 100 + y[:20]), {"epsilon": 0.05}),  # in float64
    ]
    for cost, settings in cases:
        answers = []
        for is_faster in (False, True):
            monkeypatch.setattr(search, "is_faster_on_cpu", lambda problem, there=is_faster: there)
            leaves = [w.clone().requires_grad_() for w in (p, q)]
            solution = otloss.solve(*leaves, cost, **settings)
            answers.append((solution.value, solution.iterations, *torch.autograd.grad(solution.value.sum(), leaves)))
        torch.testing.assert_close(answers[1], answers[0])


def test_which_problems_of_a_gpu_are_searched_on_the_cpu() -> None:
    """Weights without memory stand for those on a GPU."""

    def is_moved(cost: Cost, *batch: int, impl: str = "auto") -> bool:
        p, q = (torch.empty(*batch, size, device="meta") for size in cost.shape)
        return search.is_faster_on_cpu(Problem(p, q, cost, p.sum(-1), p.dtype, impl=impl))

    def matrix(size: int) -> Cost:
        return costs.DenseCost(torch.zeros(()).expand(size, size))

    def points(size: int) -> Cost:
        return costs.PointCost(torch.zeros(size, 3))

    assert is_moved(matrix(64), 256)
    assert is_moved(matrix(4096))
    assert is_moved(points(16384))
    assert not is_moved(matrix(4097))
    assert not is_moved(matrix(4096), 17)
    assert not is_moved(points(16385))
    assert not is_moved(costs.GridCost((8, 8)))
    assert not is_moved(matrix(64), impl="torch")
    assert not search.is_faster_on_cpu(Problem(P, Q, costs.DenseCost(C), P.sum(-1), P.dtype))


def second_derivative(weights: Tensor, q: Tensor) -> Tensor:
    p = weights.clone().requires_grad_()
    grid = costs.GridCost((32, 32), spacing=1 / 32)
    value = otloss.sinkhorn(p, q, grid, epsilon=0.05, grad="implicit")
    (first,) = torch.autograd.grad(value, p, create_graph=True)
    (second,) = torch.autograd.grad(first.square().sum(), p)
    return second


def far_clusters() -> tuple[Tensor, Tensor]:
    """Clouds that exact transport solves block by block."""
    x, y = (uniform(count, 2, seed=count) for count in (300, 280))
    return tuple(t + 1e4 * (torch.arange(len(t)) % 2)[:, None] for t in (x, y))  # type: ignore[return-value]


@pytest.mark.parametrize(
    ("value", "inputs"),
    [
        (lambda x, y: otloss.cloud_loss(x, y, kind="emd"), far_clusters()),
        (lambda x, y: otloss.cloud_loss(x, y, blur=0.5), (clusters(1), clusters(2))),
        (second_derivative, histograms(2, 1024, seed=1).unbind()),
    ],
    ids=["exact blocks", "sums through a grid", "implicit derivatives of images"],
)
def test_a_default_device_changes_nothing_of_large_problems(
    value: Callable[..., Tensor], inputs: tuple[Tensor, ...]
) -> None:
    """`test_every_function` has small ones; a tensor without numbers stands for one on another device."""
    with torch.device("meta"):
        actual = value(*inputs)
    torch.testing.assert_close(actual, value(*inputs), rtol=1e-6, atol=0)
