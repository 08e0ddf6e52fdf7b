"""Costs of +inf and negative costs, against linear programming over the allowed pairs."""

import pickle

import numpy as np
import pytest
import torch
from scipy.optimize import linprog

import otloss
from otloss.nn import Emd, Sinkhorn
from tests.errors import raising
from tests.otloss.draws import weights

INF = torch.inf


def cheapest(p, q, cost):
    """The optimum over the allowed pairs, or None if none of their plans keeps the marginals."""
    n, m = cost.shape
    allowed = np.isfinite(cost).ravel()
    if not allowed.any():
        return None
    sums = np.vstack([np.kron(np.eye(n), np.ones(m)), np.kron(np.ones(n), np.eye(m))])
    actual = linprog(cost.ravel()[allowed], A_eq=sums[:, allowed], b_eq=np.r_[p, q], method="highs")
    return actual.fun if actual.status == 0 else None


def random_cost(*shape, share, least=-3.0):
    cost = torch.rand(*shape, dtype=torch.float64) * 6 + least
    return cost.masked_fill(torch.rand(*shape) < share, INF)


@pytest.mark.parametrize("seed", range(40))
def test_against_linear_programming(seed):
    torch.manual_seed(seed)
    n, m = (int(k) for k in torch.randint(1, 9, (2,)))
    p, q, cost = weights(n, seed=seed), weights(m, seed=seed + 100), random_cost(n, m, share=(0.0, 0.2, 0.5)[seed % 3])
    expected = cheapest(p.numpy(), q.numpy(), cost.numpy())
    if expected is None:
        for call in (lambda: otloss.emd(p, q, cost), lambda: otloss.sinkhorn(p, q, cost, epsilon=0.1)):
            with pytest.raises(ValueError, match=r"on forbidden pairs \(cost \+inf\): no plan avoids them"):
                call()
        return
    exact = otloss.solve(p, q, cost)
    assert float(exact.value) == pytest.approx(expected, abs=1e-10) == float(otloss.emd(p, q, cost))
    f, g = exact.potentials
    assert (f[:, None] + g <= cost + 1e-9).all()
    assert float(f @ p + g @ q) == pytest.approx(expected, abs=1e-9)
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
    assert actual.certificate.lower - 1e-9 <= expected <= actual.certificate.upper + 1e-9


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("n", [2, 64])
def test_one_plan_only(n, dtype):
    """Equal weights and a triangle of allowed pairs: mass can only stay, though half of the pairs are allowed."""
    torch.manual_seed(0)
    cost = torch.rand(n, n, dtype=dtype).masked_fill(torch.ones(n, n).triu(1) > 0, INF)
    stays = cost.diagonal().mean()
    torch.testing.assert_close(otloss.emd(None, None, cost), stays)
    actual = otloss.solve(None, None, cost, epsilon=0.05)
    assert actual.converged
    torch.testing.assert_close(actual.linear_cost, stays, atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(actual.value, stays + 0.05 * np.log(n), atol=1e-5, rtol=1e-5)


def test_unbalanced_and_modules():
    torch.manual_seed(0)
    p, q, cost = weights(2, 4), 2 * weights(2, 5), random_cost(2, 4, 5, share=0.3, least=0.0)
    cost[0] = INF  # no pair at all: all mass vanishes and appears
    actual = otloss.sinkhorn(p, q, cost, epsilon=0.1, marginal_penalty=1.0)
    far = otloss.sinkhorn(p, q, cost.clamp(max=1e3), epsilon=0.1, marginal_penalty=1.0)
    torch.testing.assert_close(actual, far, atol=1e-9, rtol=0)
    one = cost[1] - 1.0
    for module, function in (
        (Emd(cost=one, reduction="none"), lambda: otloss.emd(p, q / 2, one)),
        (Sinkhorn(cost=one, epsilon=0.3, reduction="none"), lambda: otloss.sinkhorn(p, q / 2, one, epsilon=0.3)),
    ):
        copied = pickle.loads(pickle.dumps(module))
        torch.testing.assert_close(copied(p, q / 2), function())


half, diagonal = torch.tensor([0.5, 0.5]), torch.tensor([[-1.0, INF], [INF, 2.0]])
test_invalid = raising(
    (lambda: otloss.emd(half, half, -diagonal), r"holds -inf at index \(0, 1\), expected finite costs, or \+inf"),
    (lambda: otloss.emd(half, half, diagonal * torch.nan), r"holds nan at index \(0, 0\)"),
    (lambda: otloss.emd(half, half, torch.tensor([-1.0])), r"shape \(1,\), expected \(\.\.\., n, m\)"),
    (lambda: otloss.sinkhorn(half, half, diagonal, epsilon=1.0, marginal_penalty=1.0), "-1.0 in an unbalanced problem"),
    (lambda: otloss.sinkhorn(half, half, diagonal, epsilon=1.0, epsilon_relative_to="mean_cost"), "is no scale"),
    (lambda: otloss.sinkhorn_divergence(half, half, diagonal, epsilon=1.0), "cost matrix holds 2 NaN or infinite"),
    (lambda: otloss.solve(None, None, diagonal, epsilon=1.0, start=5), TypeError, "start is a int"),
)


def test_entries_far_from_the_others():
    p, q = torch.tensor([0.0, 0.5, 0.5]), torch.tensor([0.0, 0.25, 0.75])
    cost = torch.tensor([[-1e8, 1.0, 1.0], [1.0, 0.1, 0.3], [1.0, 0.7, 0.2]])
    torch.testing.assert_close(otloss.emd(p, q, cost), torch.tensor(0.2))
    cost[0, 0] = torch.finfo(torch.float32).max
    cost[2, 0] = INF
    torch.testing.assert_close(otloss.emd(p, q, cost), torch.tensor(0.2))
    cross = torch.tensor([[INF, 1.0], [1.0, INF]])
    actual = otloss.sinkhorn(None, None, cross, epsilon=1e6)
    torch.testing.assert_close(actual, torch.tensor(1 + 1e6 * np.log(2), dtype=torch.float32))
    with pytest.raises(ValueError, match="which overflows; rescale them"):
        otloss.emd(p, q, cost.double() * 5e269)
    assert otloss.emd(half, half, diagonal) == 0.5
    assert otloss.emd(half.bfloat16(), half.bfloat16(), diagonal.bfloat16()) == 0.5


def test_dtypes_and_potentials_of_a_part():
    torch.manual_seed(0)
    p, q, cost = weights(4), weights(5), random_cost(4, 5, share=0.1)
    for dtype in (torch.bfloat16, torch.float32):
        given = (p.to(dtype), (q / q.sum() * p.to(dtype).sum()).to(dtype), cost.to(dtype))
        if dtype == torch.float32:
            actual = otloss.solve(*given, epsilon=0.5)
            assert {actual.value.dtype, actual.linear_cost.dtype, actual.plan().dtype, actual.potentials[0].dtype} == {
                dtype
            }
        assert otloss.emd(None, None, given[2].clamp(max=9)).dtype == dtype
    part = otloss.solve(p.requires_grad_(), q, cost, mass=0.4)
    torch.testing.assert_close(part.potentials[0].detach(), torch.autograd.grad(part.value, p)[0])
