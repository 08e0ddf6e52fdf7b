"""sinkhorn and sinkhorn_divergence against POT, closed forms and matrices; gradients are in test_gradient_matrix."""

import math
import warnings
from typing import Any

import numpy as np
import ot
import pytest
import torch
from torch import Tensor

from otloss.costs import CosineCost, DenseCost, LineCost, PointCost
from otloss.solvers.convergence import ConvergenceWarning
from otloss.solvers.solve import sinkhorn, sinkhorn_divergence, solve
from tests.errors import raising

TIGHT: dict[str, Any] = {"tolerance": 1e-11, "max_iterations": 100_000}
IMPLS = ("compiled", "torch")


def case(*, n: int = 4, m: int = 5, batch: tuple[int, ...] = (), seed: int = 0, zeros: bool = True) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    p, q = (torch.rand(*batch, k, generator=generator, dtype=torch.float64) + 0.05 for k in (n, m))
    if zeros:
        p[..., 1], q[..., -2] = 0.0, 0.0
    matrix = torch.rand(*batch, n, m, generator=generator, dtype=torch.float64)
    return [p / p.sum(-1, keepdim=True), q / q.sum(-1, keepdim=True), matrix]


def pot_value(p: np.ndarray, q: np.ndarray, matrix: np.ndarray, epsilon: float) -> float:
    """POT in logs, without the bins that hold no mass, of which POT makes NaN."""
    rows, columns = p > 0, q > 0
    a, b, block = p[rows], q[columns], matrix[np.ix_(rows, columns)]
    _, log = ot.sinkhorn(a, b, block, epsilon, method="sinkhorn_log", numItermax=200_000, stopThr=1e-13, log=True)
    f, g = epsilon * log["log_u"], epsilon * log["log_v"]  # of the plan without p q^T
    plan = np.exp((f[:, None] + g - block) / epsilon)
    kept = plan > 0
    return float((block * plan).sum() + epsilon * (plan[kept] * np.log((plan / (a[:, None] * b))[kept])).sum())


# ---- values ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("impl", "epsilon"), [("compiled", 0.02), ("compiled", 1.0), ("torch", 0.02), ("torch", 0.1)])
def test_equals_pot(impl: str, epsilon: float) -> None:
    p, q, matrix = case(batch=(3,))
    ours = sinkhorn(p, q, matrix, epsilon=epsilon, impl=impl, **TIGHT)
    theirs = [pot_value(p[k].numpy(), q[k].numpy(), matrix[k].numpy(), epsilon) for k in range(3)]
    np.testing.assert_allclose(ours.numpy(), theirs, rtol=1e-9)


@pytest.mark.parametrize(("impl", "width"), [("compiled", 0.05), ("torch", 0.4)])
def test_gaussians_in_closed_form(impl: str, width: float) -> None:
    """H. Janati et al., Entropic Optimal Transport between (Unbalanced) Gaussian Measures, 2020, theorem 1."""
    a, b, mean = 0.8, 1.5, 0.7  # variances, and the difference of the means
    x = torch.linspace(-9, 9, 500, dtype=torch.float64)
    p, q = (torch.exp(-((x - c) ** 2) / (2 * v)) for c, v in ((0.0, a), (mean, b)))
    value = sinkhorn(p / p.sum(), q / q.sum(), LineCost(x, power=2), epsilon=2 * width, impl=impl, tolerance=1e-10)
    d = np.sqrt(4 * a * b + width**2)
    expected = mean**2 + a + b - d + width * (1 - np.log(2 * width)) + width * np.log(d + width)
    np.testing.assert_allclose(float(value), expected, rtol=1e-6)


def test_a_mass_other_than_one() -> None:
    """The value is homogeneous in the mass; POT's entropy is that against p q^T, which is less by log(mass) a unit."""
    p, q, matrix = case(zeros=False)
    for mass in (0.01, 7.0):
        values = [sinkhorn(mass * p, mass * q, matrix, epsilon=0.1, impl=impl, **TIGHT) for impl in IMPLS]
        theirs = ot.solve(matrix.numpy(), (mass * p).numpy(), (mass * q).numpy(), reg=0.1, max_iter=100_000, tol=1e-12)
        expected = theirs.value + 0.1 * mass * math.log(mass)
        np.testing.assert_allclose([float(v) for v in values], expected, rtol=1e-7)


GENERATOR = torch.Generator().manual_seed(3)
X, Y = torch.rand(4, 3, generator=GENERATOR, dtype=torch.float64), torch.rand(5, 3, generator=GENERATOR).double()


# ---- gradients ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_kernel_equals_the_log_domain(dtype: torch.dtype) -> None:
    """Many problems, costs with a large constant, masses that differ by rounding, light and empty bins."""
    p, q, matrix = (t.to(dtype) for t in case(n=20, m=30, batch=(6, 2)))
    p[0, :, 3], p[1] = 1e-30, 0.0
    p[0, :, 4:], q[1] = p[0, :, 4:] * (1 + 4e-6), 0.0
    p, q = p / p.sum(-1, keepdim=True).clamp(min=1e-9), q / q.sum(-1, keepdim=True).clamp(min=1e-9)
    matrix[2] += 100
    tight, rtol, atol = (1e-6, 1e-4, 2e-5) if dtype == torch.float32 else (1e-11, 1e-8, 1e-9)
    results = []
    for impl in ("compiled", "torch"):
        inputs = [t.clone().requires_grad_() for t in (p, q, matrix)]
        value = sinkhorn(*inputs, epsilon=0.1, impl=impl, tolerance=tight)
        weights = torch.linspace(-1, 1, 12, dtype=dtype).reshape(6, 2)
        results.append((value.detach(), *torch.autograd.grad((value * weights).sum(), inputs)))
    for from_kernel, from_logs in zip(*results, strict=True):
        torch.testing.assert_close(from_kernel, from_logs, rtol=rtol, atol=atol)


def test_the_backward_pass_of_the_envelope_holds_no_history() -> None:
    """What is saved does not grow with the iterations: potentials, weights and costs, once."""
    p, q, matrix = case(n=40, m=40, zeros=False)
    matrix.requires_grad_()
    sizes = []
    for iterations in (5, 500):
        saved: dict[int, int] = {}

        def pack(tensor: Tensor, saved: dict[int, int] = saved) -> Tensor:
            saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        with warnings.catch_warnings(), torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            warnings.simplefilter("ignore", ConvergenceWarning)
            sinkhorn(p, q, matrix, epsilon=0.005, tolerance=1e-13, max_iterations=iterations, impl="torch")
        sizes.append(sum(saved.values()))
    assert sizes[0] == sizes[1]
    assert sizes[0] <= 3 * matrix.nbytes


# ---- the divergence ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("marginal_penalty", [None, 0.5])
def test_divergence_is_zero_at_equality_and_positive_else(marginal_penalty: float | None) -> None:
    p, _, _ = case(n=5, batch=(3,))
    for cost in (PointCost(Y), PointCost(Y, metric="euclidean"), CosineCost(Y), LineCost(Y[:, 0], power=1)):
        same = sinkhorn_divergence(p, p, cost, epsilon=0.1, marginal_penalty=marginal_penalty)
        np.testing.assert_allclose(same, 0.0, atol=1e-8)
        apart = sinkhorn_divergence(p, p.flip(-1), cost, epsilon=0.1, marginal_penalty=marginal_penalty)
        assert (apart > 1e-4).all()


def test_divergence_tends_to_transport_and_to_a_kernel_norm() -> None:
    p, q, _ = case(zeros=False)
    cost = PointCost(X, Y)
    exact = ot.emd2(p.numpy(), q.numpy(), cost.dense().numpy())
    small = sinkhorn_divergence(p, q, cost, epsilon=1e-3, tolerance=1e-6)
    np.testing.assert_allclose(float(small), exact, atol=2e-3)
    drift = (p @ X - q @ Y).square().sum()  # MMD of the kernel -|x - y|^2 / 2
    np.testing.assert_allclose(float(sinkhorn_divergence(p, q, cost, epsilon=1e5)), float(drift), rtol=1e-4)


def test_divergence_needs_the_costs_among_the_bins() -> None:
    p, q, matrix = case()
    with pytest.raises(ValueError, match="cost_p"):
        sinkhorn_divergence(p, q, matrix, epsilon=0.1)
    with pytest.raises(ValueError, match="only one"):
        sinkhorn_divergence(p, q, matrix, epsilon=0.1, cost_p=torch.zeros(4, 4))
    skew = torch.rand(4, 4, dtype=torch.float64)
    with pytest.raises(ValueError, match="not symmetric"):
        sinkhorn_divergence(p, q, matrix, epsilon=0.1, cost_p=skew, cost_q=torch.zeros(5, 5))
    given_both = sinkhorn_divergence(
        p, q, DenseCost(PointCost(X, Y).dense()), epsilon=0.1, cost_p=PointCost(X), cost_q=PointCost(Y).dense()
    )
    np.testing.assert_allclose(float(given_both), float(sinkhorn_divergence(p, q, PointCost(X, Y), epsilon=0.1)))


# ---- batches, dtypes, options ------------------------------------------------------------------------------------


@pytest.mark.parametrize("impl", IMPLS)
def test_a_start_saves_iterations_and_changes_nothing(impl: str) -> None:
    p, q, matrix = case(n=30, m=30, batch=(4,))
    first = solve(p, q, matrix, epsilon=0.01, impl=impl)
    near = solve(p, q, matrix * 1.001, epsilon=0.01, impl=impl)
    again = solve(p, q, matrix * 1.001, epsilon=0.01, impl=impl, start=first.potentials)
    np.testing.assert_allclose(again.value, near.value, rtol=1e-8)
    assert again.iterations.sum() < 0.9 * near.iterations.sum()


@pytest.mark.parametrize("impl", IMPLS)
def test_what_does_not_converge_says_so(impl: str) -> None:
    p, q, matrix = case(n=30, m=30, batch=(3,))
    epsilon = torch.tensor([1.0, 1e-3, 1.0], dtype=torch.float64)
    with pytest.warns(ConvergenceWarning, match=r"1 of 3 .* problem \(1,\).*Raise epsilon"):
        sinkhorn(p, q, matrix, epsilon=epsilon, max_iterations=15, tolerance=1e-4, impl=impl)


@pytest.mark.parametrize(
    ("impl", "epsilon", "n"), [("compiled", 1e-3, 3), ("compiled", 1e-4, 20), ("torch", 1e-2, 20), ("torch", 1e-4, 3)]
)
def test_nearly_matched_points_converge(impl: str, epsilon: float, n: int) -> None:
    """Equal weights, points that match: after 10 000 iterations Sinkhorn is not there; Newton's method ends it."""
    x = torch.rand(4, n, 1, generator=torch.Generator().manual_seed(n), dtype=torch.float64)
    places = torch.linspace(0, 1, n, dtype=torch.float64)
    cost = (x - places).square()
    weights = torch.full((4, n), 1 / n, dtype=torch.float64)
    weights[1] = torch.linspace(1, 2, n, dtype=torch.float64) / torch.linspace(1, 2, n, dtype=torch.float64).sum()
    answer = solve(weights, weights, cost, epsilon=epsilon, impl=impl)
    assert answer.converged.all()
    assert (answer.gap < 1e-8).all()
    assert (answer.iterations < 1100).all()


# ---- what was wrong once -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("scale", "impl", "kind"),
    [(1e6, "compiled", "noise"), (1e16, "compiled", "constant"), (1e16, "torch", "noise"), (1e10, "torch", "constant")],
)
def test_a_start_of_any_size_leads_to_the_same(scale: float, impl: str, kind: str) -> None:
    p, q, matrix = case()
    generator = torch.Generator().manual_seed(0)
    f, g = (torch.randn(k, generator=generator, dtype=torch.float64) for k in (4, 5))
    if kind == "constant":
        f, g = -torch.ones_like(f), torch.ones_like(g)
    expected = sinkhorn(p, q, matrix, epsilon=0.05, **TIGHT)
    value = sinkhorn(p, q, matrix, epsilon=0.05, start=(scale * f, scale * g), impl=impl, **TIGHT)
    np.testing.assert_allclose(float(value), float(expected), rtol=1e-9)
    with pytest.raises(ValueError, match="float32"):
        sinkhorn(p.float(), q.float(), matrix.float(), epsilon=0.05, start=(1e300 * f, 1e300 * g))
    # So far off that no entry of the kernel can be held in float32.
    single = sinkhorn(p.float(), q.float(), matrix.float(), epsilon=0.05, start=(0 * f, 50 * g), impl=impl)
    np.testing.assert_allclose(float(single), float(expected), rtol=1e-4)


@pytest.mark.parametrize(("iterations", "marginal_penalty"), [(1, None), (10, None), (3, 0.5)])
def test_implicit_without_convergence_keeps_the_value(iterations: int, marginal_penalty: float | None) -> None:
    """Newton's steps from far away lead nowhere."""
    p, q, matrix = case(n=30, m=30)
    for epsilon in (0.01, 0.001):
        options: dict[str, Any] = {
            "epsilon": epsilon,
            "marginal_penalty": marginal_penalty,
            "max_iterations": iterations,
        }
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ConvergenceWarning)
            envelope = sinkhorn(p, q, matrix, grad="envelope", **options)
            try:
                implicit = sinkhorn(p, q, matrix, grad="implicit", **options)
            except RuntimeError as error:
                assert "has no answer here" in str(error)  # noqa: PT017 - a value or this error
                continue
        assert implicit.isfinite()
        assert abs(float(implicit - envelope)) < 0.02 * float(envelope)


def test_inputs_changed_in_place_are_noticed() -> None:
    p, q, matrix = case()
    y = Y.clone()
    value = sinkhorn(p, q, PointCost(X.clone().requires_grad_(), y), epsilon=0.05)
    y.add_(5)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        value.backward()
    width = torch.tensor(0.05, dtype=torch.float64, requires_grad=True)
    value = sinkhorn(p, q, matrix, epsilon=width)
    matrix.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        value.backward()


def test_iterations_stay_within_what_was_allowed() -> None:
    p, q, matrix = case(n=30, m=30)
    for impl in IMPLS:
        for most in (1, 5, 1001):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", ConvergenceWarning)
                answer = solve(p, q, matrix, epsilon=1e-4, impl=impl, max_iterations=most, tolerance=1e-15)
            assert 0 < int(answer.iterations) <= most


def test_the_warning_names_the_line_of_the_caller() -> None:
    p, q, matrix = case(n=30, m=30)
    for function in (sinkhorn, sinkhorn_divergence):
        cost = PointCost(torch.rand(30, 2, dtype=torch.float64)) if function is sinkhorn_divergence else matrix
        with pytest.warns(ConvergenceWarning) as caught:
            function(p, q, cost, epsilon=1e-3, max_iterations=2)
        assert {warning.filename for warning in caught} == {__file__}


p0, q0, matrix0 = case()


test_bad_input = raising(
    ({"epsilon": torch.tensor([-1.0])}, "epsilon holds -1"),
    ({"epsilon": torch.tensor([0.1, torch.inf])}, "epsilon holds"),
    ({"epsilon": "small"}, TypeError, "epsilon is a str"),
    ({"epsilon": None}, TypeError, "epsilon is None.*emd"),
    ({"grad": "unrolled"}, "grad is 'unrolled', expected one of"),
    ({"start": (torch.zeros(4), torch.zeros(4))}, "start g has shape"),
    ({"epsilon_relative_to": "max"}, "epsilon_relative_to"),
    ({"q": 1.1 * q0}, "different masses"),
    call=lambda change: sinkhorn(**({"p": p0, "q": q0, "cost": matrix0, "epsilon": 0.1} | change)),
)
