"""Partial transport: derivatives in the weights of bins without mass."""

import random

import numpy as np
import pytest
import torch
from scipy.optimize import linprog
from torch.autograd import forward_ad

import otloss
from otloss import ConvergenceWarning
from tests.otloss.draws import draw


def value(p: np.ndarray, q: np.ndarray, cost: np.ndarray, mass: float) -> float:
    """The linear program itself, without dummy bins."""
    (n, m), size = cost.shape, cost.size
    sums = np.vstack([np.kron(np.eye(n), np.ones(m)), np.kron(np.ones(n), np.eye(m))])
    weights = np.concatenate([p, q])
    result = linprog(cost.ravel(), A_ub=sums, b_ub=weights, A_eq=np.ones((1, size)), b_eq=[mass], method="highs")
    assert result.status == 0, result.message
    return float(result.fun)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("transposed", [False, True])
def test_empty_bins_where_a_side_moves_all_its_mass(transposed: bool, dtype: torch.dtype) -> None:
    """More mass in an empty bin may stay there, so a far bin has the derivative 0, and a near one what it saves."""
    step, signs = 1e-3, set()
    for seed in range(12):
        chosen, generator = random.Random(seed), np.random.default_rng(seed)
        n, m = chosen.randint(2, 4), chosen.randint(1, 4)
        p, q, cost = (generator.random(s).astype(np.float32).astype(float) + 0.125 for s in (n, m, (n, m)))
        p[0] = 0.0
        cost[0] *= (1e6, 9.0, 0.01)[seed % 3]
        q *= np.ceil(2 * p.sum() / q.sum())  # without rounding
        leaves = [torch.tensor(w, dtype=dtype, requires_grad=True) for w in ((q, p) if transposed else (p, q))]
        matrix = torch.tensor(cost.T if transposed else cost, dtype=dtype)
        otloss.emd(*leaves, matrix, mass=p.sum()).backward()
        gradient = leaves[transposed].grad
        assert gradient is not None
        more = p + step * (np.arange(n) == 0)
        expected = (value(more, q, cost, p.sum()) - value(p, q, cost, p.sum())) / step
        assert float(gradient[0]) == pytest.approx(expected, abs=1e-4)
        signs.add(expected < -1e-3)
    assert signs == {False, True}


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*")
def test_the_derivative_along_more_mass_of_an_empty_bin() -> None:
    p, q = torch.tensor([1.0, 0.0]), torch.tensor([2.0])
    cost = torch.tensor([[1.0], [5.0]])
    with forward_ad.dual_level():
        value = otloss.emd(forward_ad.make_dual(p, torch.tensor([0.0, 1.0])), q, cost, mass=1.0)
        assert float(forward_ad.unpack_dual(value).tangent) == 0.0


def test_a_mass_that_exceeds_a_side_by_rounding() -> None:
    """The derivatives are those at the mass itself."""
    p, q, cost = torch.tensor([0.5, 0.25]), torch.tensor([1.0, 0.5]), torch.tensor([[1.0, 2.0], [5.0, 9.0]])
    gradients = []
    for excess in (0.0, 1e-7):
        leaf = p.clone().requires_grad_()
        otloss.emd(leaf, q, cost, mass=0.75 + excess).backward()
        gradients.append(leaf.grad)
    torch.testing.assert_close(*gradients)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_little_mass_that_moves_beside_much_that_stays(dtype: torch.dtype) -> None:
    """The error counts beside what is moved. float32 moved nothing: errors of all of it are 1e-6 of what stays."""
    p, q = torch.tensor([700.0, 40.0, 7.0], dtype=dtype), torch.tensor([0.002, 0.007, 0.0006], dtype=dtype)
    cost = torch.tensor([[20.0, 18.0, 25.0], [29.0, 19.0, 17.0], [22.0, 16.0, 21.0]], dtype=dtype)
    solution = otloss.solve(p, q, cost, epsilon=0.01, mass=2e-4)
    moved = solution.plan().double().sum()
    assert abs(float(moved) / 2e-4 - 1) < 1e-5
    assert bool(solution.converged)
    assert float(solution.marginal_error) < 1e-5
    assert float(solution.gap) < 1e-5 * float(solution.value)


def test_the_plan_of_a_mass_far_below_what_stays_is_not_rounding() -> None:
    generator = torch.Generator().manual_seed(0)
    p, q = (torch.rand(n, generator=generator, dtype=torch.float64) + 0.1 for n in (6, 5))
    cost = torch.rand(6, 5, generator=generator, dtype=torch.float64) + 0.5
    mass = torch.tensor(1e-13, dtype=torch.float64, requires_grad=True)
    p.requires_grad_()
    solution = otloss.solve(300 * p, q, cost, mass=mass)
    by_mass, by_p = torch.autograd.grad(solution.value, (mass, p))
    assert float(solution.value.detach()) == pytest.approx(1e-13 * float(cost.min()), rel=1e-12)
    assert float(solution.plan().detach().sum()) == pytest.approx(1e-13, rel=1e-12)
    assert float(by_mass) == pytest.approx(float(cost.min()), rel=1e-12)
    torch.testing.assert_close(by_p, torch.zeros_like(by_p))
    torch.testing.assert_close(solution.potentials[0].detach(), torch.zeros(6, dtype=torch.float64))


def test_gradients_of_empty_bins_beside_a_bin_that_gives_all_that_is_moved() -> None:
    """The first bin of p would give what the last one gives for less: its derivative was -0.05."""
    p, q = torch.tensor([0.0, 30.0, 5.0], dtype=torch.float64), torch.tensor([2.0, 0.1], dtype=torch.float64)
    cost = torch.tensor([[0.25, 0.9], [0.3, 0.5], [0.2, 0.1]], dtype=torch.float64)
    for first in (p, p[[2, 1, 0]]):
        leaf = first.clone().requires_grad_()
        value = otloss.emd(leaf, q, cost, mass=0.9)
        (gradient,) = torch.autograd.grad(value, leaf)
        for i in range(3):
            step = torch.zeros(3, dtype=torch.float64)
            step[i] = 0.01
            change = (otloss.emd(first + step, q, cost, mass=0.9) - value.detach()) / 0.01
            assert float(gradient[i]) == pytest.approx(float(change), abs=1e-9)


def test_the_warning_names_the_error_and_the_tolerance_of_what_is_moved() -> None:
    p, q, cost = draw(2, 9).softmax(-1), draw(2, 9, seed=1).softmax(-1), draw(2, 9, 9, seed=2)
    mass = torch.tensor([0.3, 0.002], dtype=torch.float64)
    with pytest.warns(ConvergenceWarning) as warned:
        solution = otloss.solve(p, q, cost, epsilon=0.01, mass=mass, tolerance=1e-4, max_iterations=3)
    error = float(solution.marginal_error.max())
    assert f"a marginal error of {error:.3g} where 0.0001 was asked for" in str(warned[0].message)


def test_newtons_method_converges_where_light_cells_join_the_columns() -> None:
    """Beside dummy bins all cells are light. By the factor that leaves out most of them it took 171 steps, now 5."""
    generator = torch.Generator().manual_seed(0)
    x, y = (torch.randn(300, 2, generator=generator, dtype=torch.float64) + shift for shift in (0, 1))
    cost = torch.cdist(x, y).square()
    p, q = (torch.rand(300, generator=generator, dtype=torch.float64) for _ in range(2))
    solution = otloss.solve(p / p.sum(), q / q.sum(), cost / cost.mean(), mass=0.01, epsilon=0.004)
    assert bool(solution.converged)
    assert int(solution.iterations) < 100
