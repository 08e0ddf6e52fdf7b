"""Exact transport against linear programming; costs of +inf, negative costs, and a part of the mass."""

import numpy as np
import ot
import pytest
import torch
from hypothesis import given
from torch import Tensor

import otloss
from otloss.solvers.solve import emd
from tests.errors import raising
from tests.otloss.draws import transport_problem, weights
from tests.otloss.oracles import as_double, check_subgradients, linprog_value
from tests.otloss.strategies import problems
from tests.samples import sampled


@given(problems())
def test_value_is_the_linear_program_and_gradients_are_subgradients(problem: tuple[np.ndarray, ...]) -> None:
    p, q, matrix = problem
    C = as_double(matrix)
    assert emd(as_double(p), as_double(q), C).item() == pytest.approx(linprog_value(p, q, matrix), abs=1e-6)
    check_subgradients(lambda p, q: emd(p, q, C), p, q)


def test_scale() -> None:
    p, q, matrix = transport_problem(n=6)
    value = emd(p, q, matrix)
    for scale in (1e-300, 1e-30, 1e30, 1e300):
        torch.testing.assert_close(emd(p, q, matrix * scale) / scale, value)
        torch.testing.assert_close(emd(p * scale, q * scale, matrix) / scale, value)


@pytest.mark.gpu
def test_cuda_tensors_come_back_on_their_device() -> None:
    p, q, matrix = (t.cuda().requires_grad_() for t in transport_problem())
    value = emd(p, q, matrix)
    assert value.device == p.device
    torch.testing.assert_close(value.cpu(), emd(p.cpu(), q.cpu(), matrix.cpu()))
    assert all(g.device == p.device for g in torch.autograd.grad(value, [p, q, matrix]))
    with pytest.raises(ValueError, match="expected one device"):
        emd(p, q.cpu(), matrix)


LIMITS = {"float64": (5e-7, 2e-6), "float32": (5e-6, 2e-5), "float16": (2e-3, 1e-2), "bfloat16": (0.01, 0.1)}


@pytest.mark.parametrize("name", LIMITS)
def test_masses_may_differ_by_rounding(name: str) -> None:
    dtype, (valid, invalid) = getattr(torch, name), LIMITS[name]
    cost = torch.tensor([[0.0, 1.0, 4.0], [1.0, 0.0, 1.0], [4.0, 1.0, 0.0]])
    p, q = (torch.tensor([0.25, 0.25, 0.5], dtype=torch.float64) for _ in range(2))
    assert emd(p.to(dtype), (q * (1 + valid)).to(dtype), cost).isfinite()
    for wider in {dtype, torch.float64}:
        with pytest.raises(ValueError, match=r"p and q hold different masses.*Normalise both"):
            emd(p.to(dtype).to(wider), (q * (1 + invalid)).to(dtype).to(wider), cost)


half, square = torch.tensor([0.5, 0.5]), torch.ones(2, 2)
test_bad_input = raising(
    (torch.tensor([1, 0]), half, square, TypeError, r"p has dtype torch.int64.*p.float\(\)"),
    (half.expand(2, 2), half.expand(3, 2), square, r"do not broadcast: got p \(2,\), q \(3,\)"),
    (None, half, torch.ones(0, 2), r"shape \(0, 2\), expected .* n, m >= 1"),
    (half[:0], half, square, r"p has shape \(0,\), expected .* at least one bin"),
    (square / 4, torch.ones(4) / 4, torch.ones(4, 4), r"flatten the axes of images: images.flatten\(-2\)"),
    (torch.ones(3, 3) / 3, half, square, r"expected \(3, 2\)"),
    (half, half, [[0.0]], TypeError, "cost is a list, expected a cost object"),
    (torch.tensor([[0.5, 0.5], [1.5, -0.5]]), half, square, r"-0.5 in bin 1 of row 1"),
    (torch.stack([half, half * 2]) / 1000, half / 1000, square, "masses of row 1: 0.002.* and 0.001.*, .* 0.5"),
    (torch.tensor([[1.0, 0.0], [1e308, 1e308]], dtype=torch.float64), half, square, "p has a mass beyond float64"),
    call=lambda p, q, cost: emd(p, q, cost),
)
INF = torch.inf


def random_cost(*shape, share, smallest=-3.0):
    cost = torch.rand(*shape, dtype=torch.float64) * 6 + smallest
    return cost.masked_fill(torch.rand(*shape) < share, INF)


@pytest.mark.parametrize("seed", sampled(15, range(40)))
def test_against_linear_programming(seed):
    torch.manual_seed(seed)
    n, m = (int(k) for k in torch.randint(1, 9, (2,)))
    p, q, cost = weights(n, seed=seed), weights(m, seed=seed + 100), random_cost(n, m, share=(0.0, 0.2, 0.5)[seed % 3])
    expected = linprog_value(p.numpy(), q.numpy(), cost.numpy()) if (cost < INF).any() else np.inf
    if expected == np.inf:
        for call in (lambda: otloss.emd(p, q, cost), lambda: otloss.sinkhorn(p, q, cost, epsilon=0.1)):
            with pytest.raises(ValueError, match=r"on forbidden pairs \(cost \+inf\): no plan avoids them"):
                call()
        return
    exact = otloss.solve(p, q, cost)
    assert float(exact.value) == pytest.approx(expected, abs=1e-7) == float(otloss.emd(p, q, cost))
    f, g = exact.potentials
    assert (f[:, None] + g <= cost + 1e-9).all()
    assert float(f @ p + g @ q) == pytest.approx(expected, abs=1e-7)
    actual = otloss.solve(p, q, cost, epsilon=0.1)
    plan = actual.plan()
    assert (plan[cost == INF] == 0).all()
    torch.testing.assert_close(plan.sum(-1), p, atol=1e-7, rtol=0)
    linear = (plan * cost.masked_fill(cost == INF, 0.0)).sum()
    entropy = torch.special.xlogy(plan, plan / (p[:, None] * q)).sum()
    torch.testing.assert_close(actual.linear_cost, linear, atol=1e-7, rtol=0)
    torch.testing.assert_close(actual.value, linear + 0.1 * entropy, atol=1e-7, rtol=0)
    torch.testing.assert_close(actual.value, otloss.sinkhorn(p, q, cost, epsilon=0.1), atol=1e-9, rtol=0)
    assert actual.dual_value - 1e-9 <= actual.value <= actual.dual_value + actual.gap + 1e-9
    assert actual.certificate.lower - 1e-7 <= expected <= actual.certificate.upper + 1e-7


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("n", [2, 64])
def test_one_plan_only(n, dtype):
    """Equal weights and a triangle of allowed pairs: mass can only stay, though halves of the pairs are allowed."""
    torch.manual_seed(0)
    cost = torch.rand(n, n, dtype=dtype).masked_fill(torch.ones(n, n).triu(1) > 0, INF)
    stays = cost.diagonal().mean()
    torch.testing.assert_close(otloss.emd(None, None, cost), stays)
    actual = otloss.solve(None, None, cost, epsilon=0.05)
    assert actual.converged
    torch.testing.assert_close(actual.linear_cost, stays, atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(actual.value, stays + 0.05 * np.log(n), atol=1e-5, rtol=1e-5)


def test_unbalanced():
    torch.manual_seed(0)
    p, q, cost = weights(2, 4), 2 * weights(2, 5), random_cost(2, 4, 5, share=0.3, smallest=0.0)
    cost[0] = INF  # no pair at all: all mass vanishes and appears
    actual = otloss.sinkhorn(p, q, cost, epsilon=0.1, marginal_penalty=1.0)
    far = otloss.sinkhorn(p, q, cost.clamp(max=1e3), epsilon=0.1, marginal_penalty=1.0)
    torch.testing.assert_close(actual, far, atol=1e-9, rtol=0)


def test_entries_far_from_the_others():
    p, q = torch.tensor([0.0, 0.5, 0.5]), torch.tensor([0.0, 0.25, 0.75])
    cost = torch.tensor([[-1e8, 1.0, 1.0], [1.0, 0.1, 0.3], [1.0, 0.7, 0.2]])
    torch.testing.assert_close(otloss.emd(p, q, cost), torch.tensor(0.2))
    cost[0, 0] = torch.finfo(torch.float32).max
    cost[2, 0] = INF
    torch.testing.assert_close(otloss.emd(p, q, cost), torch.tensor(0.2))
    with pytest.raises(ValueError, match="which overflows; rescale them"):
        otloss.emd(p, q, cost.double() * 5e269)
    cross = torch.tensor([[INF, 1.0], [1.0, INF]])
    actual = otloss.sinkhorn(None, None, cross, epsilon=1e6)
    torch.testing.assert_close(actual, torch.tensor(1 + 1e6 * np.log(2), dtype=torch.float32))


def test_dtypes_and_potentials_of_a_part():
    torch.manual_seed(0)
    p, q, cost = weights(4), weights(5), random_cost(4, 5, share=0.1)
    actual = otloss.solve(p.float(), q.float(), cost.float(), epsilon=0.5)
    assert actual.value.dtype == actual.linear_cost.dtype == actual.plan().dtype == torch.float32
    assert otloss.emd(halves, halves, diagonal) == 0.5
    part = otloss.solve(p.requires_grad_(), q, cost, mass=0.4)
    torch.testing.assert_close(part.potentials[0].detach(), torch.autograd.grad(part.value, p)[0])


halves, diagonal = torch.tensor([0.5, 0.5]).bfloat16(), torch.tensor([[-1.0, INF], [INF, 2.0]]).bfloat16()
test_invalid = raising(
    (otloss.emd, -diagonal, {}, r"holds -inf at index \(0, 1\), expected finite costs, or \+inf"),
    (otloss.emd, diagonal * torch.nan, {}, r"holds nan at index \(0, 0\)"),
    (otloss.sinkhorn, diagonal, {"epsilon_relative_to": "mean_cost"}, "is no scale"),
    (otloss.sinkhorn_divergence, diagonal, {}, "cost matrix holds 2 NaN or infinite"),
    call=lambda f, cost, given: f(halves, halves, cost, **({} if f is otloss.emd else {"epsilon": 1.0}), **given),
)


def problem(batch: int = 3) -> list[Tensor]:
    """Non-uniform weights of different masses, costs, and the mass to move, which differs by problem."""
    generator = torch.Generator().manual_seed(4)
    p, q, cost = (torch.rand(batch, *s, generator=generator, dtype=torch.float64) for s in ((5,), (6,), (5, 6)))
    q = 0.7 * q
    shares = torch.tensor([0.3, 0.6, 0.95], dtype=torch.float64)[:batch]
    return [p, q, cost, shares * torch.minimum(p.sum(-1), q.sum(-1))]


def test_exact_is_that_of_pot_at_every_mass() -> None:
    p, q, cost, mass = problem()
    solution = otloss.solve(p, q, cost, mass=mass)
    for k in range(3):
        theirs = ot.partial.partial_wasserstein(p[k].numpy(), q[k].numpy(), cost[k].numpy(), m=float(mass[k]))
        np.testing.assert_allclose(float(solution.value[k]), (theirs * cost[k].numpy()).sum(), rtol=1e-9)
    torch.testing.assert_close(solution.value, otloss.emd(p, q, cost, mass=mass))
    plan = solution.plan()
    torch.testing.assert_close(plan.sum((-2, -1)), mass)
    assert (plan.sum(-1) <= p + 1e-12).all()
    assert (plan.sum(-2) <= q + 1e-12).all()
    assert (otloss.emd(p, q, cost, mass=0.0) == 0).all()
    as_tensor = otloss.emd(p, q, cost, mass=torch.tensor(0.3, dtype=torch.float64))
    torch.testing.assert_close(otloss.emd(p, q, cost, mass=0.3), as_tensor, rtol=1e-12, atol=0)
    same = p * (q.sum(-1) / p.sum(-1)).unsqueeze(-1)
    torch.testing.assert_close(otloss.emd(same, q, cost, mass=q.sum(-1)), otloss.emd(same, q, cost))


def test_entropic_tends_to_exact_and_moves_the_mass() -> None:
    p, q, cost, mass = problem()
    for dtype, rtol in ((torch.float64, 1e-4), (torch.float32, 1e-3)):
        given = [t.to(dtype) for t in (p, q, cost)]
        solution = otloss.solve(*given, epsilon=1e-3, mass=mass.to(dtype))
        expected = otloss.emd(p, q, cost, mass=mass)
        torch.testing.assert_close(solution.linear_cost.double(), expected, rtol=rtol, atol=1e-3)
        torch.testing.assert_close(solution.plan().sum((-2, -1)).double(), mass, rtol=1e-5, atol=0.0)


p0, q0, cost0, mass0 = problem()
test_bad_masses = raising(
    (lambda: otloss.emd(p0, q0, cost0, mass=mass0 * torch.tensor([1, 1, 2])), "the lesser of the masses"),
    (lambda: otloss.emd(p0, q0, cost0, mass=-0.1), "mass"),
    (lambda: otloss.emd(p0, q0, cost0, mass=torch.ones(2)), r"do not broadcast: got p \(3,\), q \(3,\), mass \(2,\)"),
    (lambda: otloss.sinkhorn(p0, q0, cost0, epsilon=0.1, mass=mass0, marginal_penalty=1.0), "expected one"),
)
