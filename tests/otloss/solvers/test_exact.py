"""emd against linear programming: values, one-sided weight gradients, plans, shapes, dtypes, messages."""

from __future__ import annotations

import numpy as np
import ot
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import otloss
from otloss.costs import CosineCost, DenseCost, LineCost
from otloss.solvers.exact import emd
from tests.otloss.oracles import as_double, central_gradients, linprog_value, weight_gradients
from tests.otloss.strategies import problems, weights


def random_problem(seed: int, n: int, m: int, zeros: bool = False) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    p, q = rng.dirichlet(np.ones(n)), rng.dirichlet(np.ones(m))
    if zeros:
        p[rng.permutation(n)[: n // 3]] = 0
        q[rng.permutation(m)[: m // 3]] = 0
    return p / p.sum(), q / q.sum(), rng.random((n, m)) * 3


@settings(max_examples=300, deadline=None)
@given(problems())
def test_value_is_the_linear_programme(problem: tuple[np.ndarray, np.ndarray, np.ndarray]) -> None:
    p, q, matrix = problem
    value = emd(as_double(p), as_double(q), as_double(matrix))
    assert value.item() == pytest.approx(linprog_value(p, q, matrix), abs=1e-6)


@settings(max_examples=300, deadline=None)
@given(problems())
def test_weight_gradients_are_subgradients(problem: tuple[np.ndarray, np.ndarray, np.ndarray]) -> None:
    # f.(p' - p) <= value(p') - value(p) for every p', degenerate optima included: f is dual feasible on q's support.
    p, q, matrix = problem
    P, Q = as_double(p, grad=True), as_double(q, grad=True)
    value = emd(P, Q, as_double(matrix))
    by_p, by_q = torch.autograd.grad(value, [P, Q])
    for i in range(p.size):
        there = torch.eye(p.size, dtype=torch.float64)[i]
        assert by_p @ (there - P) <= emd(there, Q, as_double(matrix)) - value + 1e-9
    for j in range(q.size):
        there = torch.eye(q.size, dtype=torch.float64)[j]
        assert by_q @ (there - Q) <= emd(P, there, as_double(matrix)) - value + 1e-9


@pytest.mark.parametrize("zeros", [False, True])
@pytest.mark.parametrize(("n", "m"), [(2, 2), (3, 6), (7, 4), (1, 5), (5, 1), (8, 8)])
def test_gradients_match_finite_differences(n: int, m: int, zeros: bool) -> None:
    for seed in range(5):
        p, q, matrix = random_problem(seed, n, m, zeros)
        leaves = [as_double(a, grad=True) for a in (p, q, matrix)]
        by_p, by_q, by_cost = (g.numpy() for g in torch.autograd.grad(emd(*leaves), leaves))
        heaviest, slopes = weight_gradients(lambda w, q=q, c=matrix: linprog_value(w, q, c), p, 1e-6)
        np.testing.assert_allclose(by_p - by_p[heaviest], slopes, atol=2e-5)
        heaviest, slopes = weight_gradients(lambda w, p=p, c=matrix: linprog_value(p, w, c), q, 1e-6)
        np.testing.assert_allclose(by_q - by_q[heaviest], slopes, atol=2e-5)
        slopes = central_gradients(lambda c, p=p, q=q: linprog_value(p, q, c), matrix, 1e-6)
        np.testing.assert_allclose(by_cost, slopes, atol=2e-5)


def test_weight_gradients_are_centred_and_plan_has_the_marginals() -> None:
    p, q, matrix = random_problem(0, 6, 4, zeros=True)
    leaves = [as_double(a, grad=True) for a in (3 * p, 3 * q, matrix)]
    by_p, by_q, plan = torch.autograd.grad(emd(*leaves), leaves)
    assert abs(by_p.sum().item()) < 1e-12
    assert abs(by_q.sum().item()) < 1e-12
    np.testing.assert_allclose(plan.sum(1).numpy(), 3 * p, atol=1e-12)
    np.testing.assert_allclose(plan.sum(0).numpy(), 3 * q, atol=1e-12)


def test_zero_mass_bin_where_pot_has_the_wrong_sign() -> None:
    # On a line, mass in bin 0 is farther from q than mass in bin 1: moving some there costs 1 per unit.
    p, q = np.array([0.0, 0.5, 0.5, 0.0]), np.array([0.0, 0.2, 0.8, 0.0])
    matrix = np.abs(np.subtract.outer(np.arange(4.0), np.arange(4.0)))
    heaviest, slopes = weight_gradients(lambda w: linprog_value(w, q, matrix), p, 1e-5)
    gradients = {}
    for name, solve in (("otloss", emd), ("POT", ot.emd2)):
        leaf = as_double(p, grad=True)
        (gradient,) = torch.autograd.grad(solve(leaf, as_double(q), as_double(matrix)), leaf)
        gradients[name] = (gradient - gradient[heaviest]).numpy()
    np.testing.assert_allclose(slopes, [1, 0, -1, 0], atol=1e-6)
    np.testing.assert_allclose(gradients["otloss"], slopes, atol=1e-6)
    assert gradients["POT"][0] == -1.0  # the peer, for comparison


@settings(max_examples=50, deadline=None)
@given(st.data())
def test_one_hot_target_costs_its_row(data: st.DataObject) -> None:
    n = data.draw(st.integers(1, 6))
    q, target = as_double(data.draw(weights(n))), data.draw(st.integers(0, n - 1))
    cost = DenseCost(torch.rand(n, n, dtype=torch.float64, generator=torch.Generator().manual_seed(n)))
    one_hot = torch.eye(n, dtype=torch.float64)[target]
    expected = cost.rows(torch.tensor([target]))[0] @ q
    assert emd(one_hot, q, cost).item() == pytest.approx(expected.item(), abs=1e-12)


def test_batches_broadcast_and_equal_a_loop() -> None:
    generator = torch.Generator().manual_seed(1)
    p = torch.rand(3, 1, 5, generator=generator, dtype=torch.float64).softmax(-1).requires_grad_()
    q = torch.rand(4, 6, generator=generator, dtype=torch.float64).softmax(-1).requires_grad_()
    shared = torch.rand(5, 6, generator=generator, dtype=torch.float64, requires_grad=True)
    upstream = torch.rand(3, 4, generator=generator, dtype=torch.float64)
    batched = emd(p, q, shared)
    assert batched.shape == (3, 4)
    looped = torch.stack([torch.stack([emd(p[i, 0], q[j], shared) for j in range(4)]) for i in range(3)])
    torch.testing.assert_close(batched, looped)
    expected = torch.autograd.grad((looped * upstream).sum(), [p, q, shared])
    for got, want in zip(torch.autograd.grad((batched * upstream).sum(), [p, q, shared]), expected, strict=True):
        torch.testing.assert_close(got, want)
    own = torch.rand(3, 1, 5, 6, generator=generator, dtype=torch.float64, requires_grad=True)
    value = emd(p, q, own)
    assert value[2, 3].item() == pytest.approx(emd(p[2, 0], q[3], own[2, 0]).item())
    (by_cost,) = torch.autograd.grad(value.sum(), own)
    torch.testing.assert_close(by_cost.sum(-1), 4 * p.detach())


def test_empty_non_contiguous_and_massless() -> None:
    cost = torch.rand(4, 3)
    assert emd(torch.zeros(0, 4), torch.ones(3) / 3, cost).shape == (0,)
    p = torch.rand(4, 5).softmax(0).T  # (5, 4), strided
    q = torch.rand(5, 6).softmax(-1)[:, ::2]
    q = q / q.sum(-1, keepdim=True)
    torch.testing.assert_close(emd(p, q, cost), emd(p.contiguous(), q.contiguous(), cost))
    zeros = [torch.zeros(2, 4, requires_grad=True), torch.zeros(2, 3, requires_grad=True)]
    value = emd(*zeros, cost)
    assert value.tolist() == [0.0, 0.0]
    assert all(torch.isfinite(g).all() for g in torch.autograd.grad(value.sum(), zeros))


def test_empty_batch_has_gradients() -> None:
    p, cost = torch.zeros(0, 4, requires_grad=True), torch.rand(4, 3, requires_grad=True)
    by_p, by_cost = torch.autograd.grad(emd(p, torch.ones(3) / 3, cost).sum(), [p, cost])
    assert by_p.shape == (0, 4)
    assert by_cost.abs().sum() == 0


def test_permutation_and_scale() -> None:
    p, q, matrix = (as_double(a) for a in random_problem(3, 6, 5, zeros=True))
    rows, columns = torch.randperm(6), torch.randperm(5)
    value = emd(p, q, matrix)
    torch.testing.assert_close(emd(p[rows], q[columns], matrix[rows][:, columns]), value)
    torch.testing.assert_close(emd(q, p, matrix.T), value)
    torch.testing.assert_close(emd(p, q, matrix + 2), value + 2)
    for scale in (1e-300, 1e-30, 1e30, 1e300):
        torch.testing.assert_close(emd(p, q, matrix * scale) / scale, value)
        torch.testing.assert_close(emd(p * scale, q * scale, matrix) / scale, value)


@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [(torch.float64, 1e-12), (torch.float32, 1e-6), (torch.float16, 2e-3), (torch.bfloat16, 2e-2)],
)
def test_dtypes(dtype: torch.dtype, tolerance: float) -> None:
    p, q, matrix = random_problem(5, 6, 7)
    p, q, matrix = (as_double(a).to(dtype) for a in (p, q, matrix))
    value = emd(p.requires_grad_(), q, matrix)
    assert value.dtype == dtype
    shares = [w.detach().double() / w.detach().double().sum() for w in (p, q)]
    mean_mass = (p.detach().double().sum() + q.double().sum()).item() / 2
    assert value.item() == pytest.approx(mean_mass * emd(*shares, matrix.double()).item(), rel=tolerance)
    (by_p,) = torch.autograd.grad(value, p)
    assert by_p.dtype == dtype


def test_mixed_dtypes_promote() -> None:
    p = torch.tensor([0.25, 0.75], dtype=torch.bfloat16)
    assert emd(p, p.float(), torch.ones(2, 2)).dtype == torch.float32
    assert emd(p, p, torch.ones(2, 2, dtype=torch.bfloat16)).dtype == torch.bfloat16
    assert emd(p, p, torch.ones(2, 2, dtype=torch.float64)).dtype == torch.float64


def test_cost_objects_carry_gradients_to_what_they_hold() -> None:
    p, q, _ = random_problem(7, 5, 5)
    embedding = torch.randn(5, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0), requires_grad=True)
    torch.autograd.gradcheck(lambda e: emd(as_double(p), as_double(q), CosineCost(e)), embedding)
    x = torch.tensor([0.0, 2.5, 1.0, 4.0, 7.0], dtype=torch.float64, requires_grad=True)
    torch.autograd.gradcheck(lambda x: emd(as_double(p), as_double(q), LineCost(x, power=2)), x)
    on_line = otloss.wasserstein_1d(as_double(p), as_double(q), x, order=2)
    assert emd(as_double(p), as_double(q), LineCost(x, power=2)).item() == pytest.approx(on_line.item())


@pytest.mark.gpu
def test_cuda_tensors_come_back_on_their_device() -> None:
    p, q, matrix = (as_double(a).cuda().requires_grad_() for a in random_problem(0, 5, 6, zeros=True))
    value = emd(p, q, matrix)
    assert value.device == p.device
    torch.testing.assert_close(value.cpu(), emd(p.cpu(), q.cpu(), matrix.cpu()))
    assert all(g.device == p.device for g in torch.autograd.grad(value, [p, q, matrix]))
    with pytest.raises(ValueError, match="expected one device"):
        emd(p, q.cpu(), matrix)


def test_second_derivative_is_refused() -> None:
    p = torch.tensor([0.25, 0.75], requires_grad=True)
    (by_p,) = torch.autograd.grad(emd(p, torch.tensor([0.5, 0.5]), torch.rand(2, 2)), p, create_graph=True)
    with pytest.raises(RuntimeError, match="second derivative of emd"):
        by_p.sum().backward()


def test_solver_that_stops_early_says_which_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("otloss.solvers.exact._MAX_PIVOTS", 1)
    p = torch.rand(2, 3, 30).softmax(-1)
    with pytest.raises(RuntimeError, match=r"stopped early on problem \(0, 0\), 30 by 30 bins with mass"):
        emd(p, torch.rand(30).softmax(-1), torch.rand(30, 30))


half = torch.tensor([0.5, 0.5])


@pytest.mark.parametrize(
    ("p", "q", "cost", "error", "message"),
    [
        (torch.tensor([1, 0]), half, torch.ones(2, 2), TypeError, r"p has dtype torch.int64.*p.float\(\)"),
        ([0.5, 0.5], half, torch.ones(2, 2), TypeError, "p is a list"),
        (half, half, torch.ones(2, 2).long(), TypeError, "cost has dtype torch.int64"),
        (half, half, [[0.0]], TypeError, "cost is a list, expected a cost object"),
        (half, torch.tensor([0.5, torch.nan]), torch.ones(2, 2), ValueError, r"q holds 1 NaN.*\(1,\)"),
        (torch.tensor([[0.5, 0.5], [1.5, -0.5]]), half, torch.ones(2, 2), ValueError, r"-0.5 in bin 1 of row 1"),
        (torch.tensor([-0.5, 1.5]), half, torch.ones(2, 2), ValueError, r"p holds -0.5 in bin 0, expected"),
        (torch.stack([half, half * 2]), half, torch.ones(2, 2), ValueError, "masses of row 1: 2 and 1, .* 0.5"),
        (half * 1.001, half, torch.ones(2, 2), ValueError, r"at most 1e-05. Normalise both"),
        (half, torch.zeros(2), torch.ones(2, 2), ValueError, "1 and 0"),
        (half, half, torch.ones(2, 3), ValueError, r"shape \(2, 3\), expected \(2, 2\)"),
        (half, half, -torch.ones(2, 2), ValueError, r"holds -1.0 at index \(0, 0\), expected costs >= 0"),
        (half, half, torch.full((2, 2), torch.inf), ValueError, "cost matrix holds 4 NaN or infinite"),
        (half.expand(3, 2), half.expand(4, 2), torch.ones(2, 2), ValueError, r"p \(3,\), q \(4,\)"),
        (half.expand(3, 2), half, torch.ones(4, 2, 2), ValueError, r"cost \(4,\)"),
        (torch.tensor(1.0), half, torch.ones(2, 2), ValueError, r"p has shape \(\), expected"),
    ],
)
def test_bad_input(p: object, q: object, cost: object, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        emd(p, q, cost)  # type: ignore[arg-type]


@pytest.mark.parametrize("uniform", [True, False])
def test_agrees_with_scipy_in_several_dimensions(uniform: bool) -> None:
    """`scipy.stats.wasserstein_distance_nd` solves a linear program of its own."""
    from scipy.stats import wasserstein_distance_nd

    from otloss.costs import PointCost

    rng = np.random.default_rng(0)
    x, y = rng.random((7, 3)), rng.random((9, 3))
    p, q = (np.ones(7), np.ones(9)) if uniform else (rng.random(7), rng.random(9))
    p, q = p / p.sum(), q / q.sum()
    cost = PointCost(as_double(x), as_double(y), metric="euclidean")
    value = emd(as_double(p), as_double(q), cost)
    assert float(value) == pytest.approx(wasserstein_distance_nd(x, y, p, q), rel=1e-9)
