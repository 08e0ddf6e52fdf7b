"""grad="implicit" by streamed products against the dense equations in float64; in Triton's interpreter, or on a GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from otloss import sinkhorn_divergence, solve
from otloss.costs import Cost, DenseCost, PointCost
from otloss.solvers import derivatives
from otloss.solvers.entropic import sinkhorn_gpu
from otloss.solvers.entropic.implicit import products
from otloss.solvers.entropic.implicit.products import RoundTrip
from otloss.solvers.options import Settings
from otloss.solvers.problem import pose
from tests.largest_tensor import LargestTensor
from tests.samples import sampled

pytest.importorskip("triton")
N, M = 7, 9
TOLERANCE = 5e-5  # beside 1.5 times the error of the dense equations for the same float32 inputs, and of the size


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(sinkhorn_gpu, "LARGEST_SIDE", 4)
    if request.param == "cpu":
        monkeypatch.setenv("TRITON_INTERPRET", "1")
    elif not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    return str(request.param)


@pytest.fixture
def no_dense_equations(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise AssertionError("the dense equations were solved")

    monkeypatch.setattr(derivatives, "log_ratio_of", fail)


def draw(device: str, *, axes: int = 2) -> list[Tensor]:
    """Return weights, some of them 0, and clouds of two problems."""
    generator = torch.Generator().manual_seed(3)
    p, q = (torch.rand(2, k, generator=generator) + 0.1 for k in (N, M))
    p[0, 3], q[-1, :4] = 0.0, 0.0
    x, y = (torch.randn(2, k, axes, generator=generator) for k in (N, M))
    return [t.to(device) for t in (p / p.sum(-1, keepdim=True), q / q.sum(-1, keepdim=True), x, y)]


def between(x: Tensor, y: Tensor, kind: str) -> Cost:
    if kind != "matrix":
        return PointCost(x, y, metric=kind)
    return DenseCost((x.unsqueeze(-2) - y.unsqueeze(-3)).square().sum(-1) + 0.1)


def random_sum(tensors: tuple[Tensor, ...]) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    weights = [torch.randn(t.shape, generator=generator).to(t) for t in tensors]
    # A constant may go from f to g.
    return sum((t * (w - w.mean(-1, keepdim=True))).sum() for t, w in zip(tensors, weights, strict=True))


def results(inputs: list[Tensor], kind: str, *, dtype: torch.dtype, has_plan: bool, **options: Any) -> list[Tensor]:
    """Return values, first derivatives of the value and of a sum of all that has some, and second derivatives.

    The sum has the linear cost, the potentials and the plan in it, by random weights, so that one walk through the
    graph has them all: each takes a second in the interpreter.
    """
    leaves = [t.to(dtype).requires_grad_() for t in inputs]
    tolerance = 1e-6 if dtype == torch.float32 else 1e-10
    answer = solve(
        *leaves[:2], between(*leaves[2:], kind), epsilon=1.5, grad="implicit", tolerance=tolerance, **options
    )
    part = answer.linear_cost.sum() + random_sum(answer.potentials)
    part = part + random_sum((answer.plan(),)) if has_plan else part
    got = [answer.value, answer.linear_cost]
    for total in (answer.value.sum(), part):
        got += torch.autograd.grad(total, leaves, retain_graph=True)
    first = torch.autograd.grad(random_sum((answer.value, answer.linear_cost)), leaves, create_graph=True)
    got += torch.autograd.grad(random_sum(first), leaves, retain_graph=True)
    return [t.detach() for t in got]


@pytest.mark.parametrize(
    ("kind", "axes", "penalty", "dtype"),
    sampled(
        1,  # the other tests of this file are of points, with potentials in float64
        [
            ("matrix", 2, (None, 2.0), torch.float32),
            ("euclidean", 2, None, torch.float64),
            ("sqeuclidean", 2, 0.7, torch.float32),
            ("cosine", 10, None, torch.float64),
            ("l1", 1, (0.5, None), torch.float32),
        ],
    ),
)
def test_derivatives_of_both_orders(
    kind: str, axes: int, penalty: Any, dtype: torch.dtype, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With potentials in the dtype that they have on a GPU, of two problems, and on a CPU, of one.

    For the plan, its matrix is formed.
    """
    monkeypatch.setattr(products, "dtype_of_potentials", lambda _: dtype)
    inputs = [t if dtype == torch.float32 else t[-1:] for t in draw(device, axes=axes)]
    solved = []
    run = products.with_graph_by_products
    monkeypatch.setattr(derivatives, "with_graph_by_products", lambda *given: solved.append(run(*given)) or solved[-1])
    options = {"marginal_penalty": penalty, "has_plan": True}
    ours = results(inputs, kind, dtype=torch.float32, impl="triton", **options)
    assert len(solved) == 1
    assert solved[0] is not None
    naive = results(inputs, kind, dtype=torch.float32, impl="torch", **options)
    exact = results(inputs, kind, dtype=torch.float64, impl="torch", **options)
    for got, dense, want in zip(ours, naive, exact, strict=True):
        limit = 1.5 * float((dense - want).abs().max()) + TOLERANCE * (1 + float(want.abs().max()))
        assert float((got - want).abs().max()) <= limit


@pytest.mark.parametrize("penalty", [None, (0.7, 0.3)])
def test_the_transpose_of_the_solution(penalty: Any, device: str) -> None:
    """By inner products, at potentials that are no solution; and A times the solution is the right-hand side."""
    p, q, x, y = draw(device)
    problem = pose(p, q, PointCost(x, y), epsilon=2.0, settings=Settings(impl="torch", marginal_penalty=penalty))
    f, g = 0.3 * torch.rand_like(p, dtype=torch.float64), 0.3 * torch.rand_like(q, dtype=torch.float64)
    round_trip = RoundTrip.build(problem, f, g)
    assert round_trip.is_well_conditioned()
    u, v = torch.randn_like(g), torch.randn_like(g)
    forward, back = (v * round_trip.solve(u)).sum(-1), (round_trip.solve_transposed(v) * u).sum(-1)
    torch.testing.assert_close(forward, back, atol=1e-5, rtol=1e-5)
    solution = round_trip.solve(u)
    apart = solution - round_trip._round_trip(solution) - u
    if penalty is None:
        apart = apart - apart[:, -1:]
    torch.testing.assert_close(apart, torch.zeros_like(u), atol=1e-5, rtol=0)


@pytest.mark.usefixtures("no_dense_equations")
def test_first_derivatives_of_points_make_no_matrix(device: str) -> None:
    generator = torch.Generator().manual_seed(0)
    x, y = (torch.randn(n, 2, generator=generator).to(device).requires_grad_() for n in (40, 45))
    p = torch.softmax(torch.rand(40, generator=generator), -1).to(device).requires_grad_()
    answer = solve(p, None, PointCost(x, y), epsilon=10.0, grad="implicit", impl="triton")
    with LargestTensor() as largest:
        random_sum(answer.potentials).backward(retain_graph=True)
        answer.value.backward()
    assert largest.entries < 40 * 45 / 4
    assert all(float(t.grad.abs().max()) > 0 for t in (p, x, y))  # type: ignore[union-attr]


def test_parts_that_exchange_nothing_go_to_the_dense_equations(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = []
    run = products.with_graph_by_products
    monkeypatch.setattr(derivatives, "with_graph_by_products", lambda *given: runs.append(run(*given)) or runs[-1])
    p, q, x, y = (t[-1:] for t in draw(device))
    x[:, :3], y[:, 3:6] = x[:, :3] + 7, y[:, 3:6] + 7
    mass_x = p[:, :3].sum(-1, keepdim=True)
    q = q + 0.1
    q = torch.cat([q[:, :3], q[:, 3:6] * 0, q[:, 6:]], -1) / (q.sum(-1, keepdim=True) - q[:, 3:6].sum(-1, keepdim=True))
    q = q * (1 - mass_x)
    q[:, 3:6] = mass_x / 3
    gradients = []
    for dtype, impl in ((torch.float32, "triton"), (torch.float64, "torch")):
        leaf = x.to(dtype).requires_grad_()
        answer = solve(p.to(dtype), q.to(dtype), PointCost(leaf, y.to(dtype)), epsilon=1.0, grad="implicit", impl=impl)
        gradients += torch.autograd.grad(answer.linear_cost.sum(), leaf)
    torch.testing.assert_close(gradients[0].double(), gradients[1], atol=1e-3, rtol=1e-3)
    assert runs == [None]


def test_divergences(device: str) -> None:
    """Second derivatives in one cloud, whose points stand on both sides of a term."""
    p, q, x, y = (t[-1:] for t in draw(device))
    second = []
    for dtype, impl in ((torch.float32, "triton"), (torch.float64, "torch")):
        leaf = x.to(dtype).requires_grad_()
        value = sinkhorn_divergence(
            p.to(dtype), q.to(dtype), PointCost(leaf, y.to(dtype)), epsilon=3.0, grad="implicit", impl=impl
        )
        first = torch.autograd.grad(value.sum(), leaf, create_graph=True)
        second += torch.autograd.grad(random_sum(first), leaf)
    torch.testing.assert_close(second[0].double(), second[1], atol=1e-4, rtol=1e-4)
