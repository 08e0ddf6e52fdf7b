"""Entropic values in one compiled call against the usual way, which a gradient that is asked for takes."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import otloss
from otloss import ConvergenceWarning
from otloss.solvers import sinkhorn as _sinkhorn
from otloss.solvers.entropic.direct import direct_value
from otloss.solvers.entropic.problem import WIDE_FROM, Settings, entropic_problem
from otloss.solvers.entropic.search import PATIENCE, find_potentials

DTYPES = (torch.float32, torch.float64)


def _problems(
    *batch: int, n: int = 6, m: int = 5, dtype: torch.dtype = torch.float64, seed: int = 0
) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    p, q = (torch.rand(*batch, size, generator=generator, dtype=dtype) + 0.01 for size in (n, m))
    cost = torch.rand(*batch, n, m, generator=generator, dtype=dtype)
    return p / p.sum(-1, keepdim=True), q / q.sum(-1, keepdim=True), cost


def _directly(p: Any, q: Any, cost: Any, epsilon: Any, **options: Any) -> Tensor | None:
    return direct_value(p, q, cost, epsilon=epsilon, settings=Settings.of(options))


def _usually(p: Tensor, q: Tensor, cost: Tensor, epsilon: float, **options: Any) -> Tensor:
    value = otloss.sinkhorn(p.clone().requires_grad_(), q, cost, epsilon=epsilon, **options)
    assert value.requires_grad
    return value.detach()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("batch", [(), (1,), (7,), (2, 3), (40,)])
@pytest.mark.parametrize("epsilon", [1.0, 0.1, 0.01, 0.002])
def test_it_gives_what_the_usual_way_gives(dtype: torch.dtype, batch: tuple[int, ...], epsilon: float) -> None:
    p, q, cost = _problems(*batch, n=9, m=17, dtype=dtype)
    value = _directly(p, q, cost, epsilon, tolerance=1e-4)
    if value is None:  # one of them is left to Newton's method
        assert epsilon < 0.1
        assert otloss.solve(p, q, cost, epsilon=epsilon, tolerance=1e-4).iterations.max() > PATIENCE
        return
    assert value.dtype == dtype
    assert value.shape == batch
    torch.testing.assert_close(value, _usually(p, q, cost, epsilon, tolerance=1e-4), rtol=3e-6, atol=1e-6)
    torch.testing.assert_close(value, otloss.sinkhorn(p, q, cost, epsilon=epsilon, tolerance=1e-4), rtol=0, atol=0)


@settings(max_examples=60, deadline=None)
@given(
    n=st.integers(1, 12), m=st.integers(1, 12), mass=st.sampled_from([1e-6, 1.0, 3.0, 1e5]),
    zeros=st.floats(0, 0.9), unit=st.sampled_from([1e-3, 1.0, 1e4]), share=st.sampled_from([0.03, 0.3, 3.0, 30.0]),
    seed=st.integers(0, 1000),
)  # fmt: skip
def test_weights_without_mass_other_masses_other_units(
    n: int, m: int, mass: float, zeros: float, unit: float, share: float, seed: int
) -> None:
    p, q, cost = _problems(3, n=n, m=m, seed=seed)
    generator = torch.Generator().manual_seed(seed)
    p, q = (w * (torch.rand(w.shape, generator=generator) >= zeros) for w in (p, q))
    p, q = (torch.where(w.sum(-1, keepdim=True) > 0, w, torch.ones_like(w)) for w in (p, q))
    p, q = (mass * w / w.sum(-1, keepdim=True) for w in (p, q))
    p[2], q[2] = 0, 0
    value = _directly(p, q, unit * cost, unit * share)
    if value is None:
        wide = share > WIDE_FROM * cost.amax((-2, -1)).min()
        assert wide or otloss.solve(p, q, unit * cost, epsilon=unit * share).iterations.max() > PATIENCE
        return
    expected = _usually(p, q, unit * cost, unit * share)
    torch.testing.assert_close(value, expected, rtol=1e-6, atol=1e-7 * mass * unit)
    assert value[2] == 0


def test_masses_that_differ_by_rounding_are_balanced_alike() -> None:
    p, q, cost = _problems(5)
    q = q * (1 + 8e-10)
    torch.testing.assert_close(_directly(p, q, cost, 0.1), _usually(p, q, cost, 0.1), rtol=1e-12, atol=0)
    torch.testing.assert_close(_directly(q, p, cost.mT, 0.1), _usually(q, p, cost.mT, 0.1), rtol=1e-12, atol=0)


def test_strides_do_not_matter() -> None:
    p, q, cost = _problems(4)
    wide = torch.stack([cost, -torch.ones_like(cost)], -1)[..., 0]
    torch.testing.assert_close(_directly(p, q, wide, 0.1), _directly(p, q, cost, 0.1), rtol=0, atol=0)


@pytest.mark.parametrize("wrong", ["negative weight", "nan weight", "masses", "negative cost", "nan cost", "inf cost"])
def test_what_is_wrong_is_said_as_usual(wrong: str) -> None:
    p, q, cost = _problems(3)
    if "cost" in wrong:
        cost[1, 2, 3] = {"negative cost": -0.1, "nan cost": torch.nan, "inf cost": torch.inf}[wrong]
    else:
        p[1, 2] = {"negative weight": -0.1, "nan weight": torch.nan, "masses": 0.9}[wrong]
    assert _directly(p, q, cost, 0.1) is None
    with pytest.raises(ValueError) as raised:
        otloss.sinkhorn(p, q, cost, epsilon=0.1)
    with pytest.raises(ValueError) as usual:
        otloss.sinkhorn(p.requires_grad_(), q, cost, epsilon=0.1)
    assert str(raised.value) == str(usual.value)


def test_what_does_not_converge_is_said() -> None:
    p, q, cost = _problems(3)
    assert _directly(p, q, cost, 1e-3, max_iterations=2) is None
    with pytest.warns(ConvergenceWarning, match="of 3 entropic problems did not converge"):
        otloss.sinkhorn(p, q, cost, epsilon=1e-3, max_iterations=2)
    with pytest.raises(RuntimeError, match="did not converge"):
        otloss.sinkhorn(p, q, cost, epsilon=1e-3, max_iterations=2, strict=True)


def test_everything_else_goes_the_usual_way(monkeypatch: pytest.MonkeyPatch) -> None:
    p, q, cost = _problems(3)
    assert _directly(p, q, cost, 0.1) is not None
    for options in (
        {"reach": 1.0}, {"grad": "implicit"}, {"grad": "unrolled"}, {"impl": "torch"},
        {"epsilon_relative_to": "mean_cost"}, {"start": (torch.zeros(3, 6), torch.zeros(3, 5))},
    ):  # fmt: skip
        assert _directly(p, q, cost, 0.1, **options) is None
    for epsilon in (0.0, -1.0, float("nan"), float("inf"), True, "0.1", torch.tensor(0.1), 1e6):
        assert _directly(p, q, cost, epsilon) is None
    half, learnt = torch.float16, [t.clone().requires_grad_() for t in (p, cost)]
    for given_instead in (
        (p.float(), q, cost),
        (p.to(half), q.to(half), cost.to(half)),
        (p[0], q, cost),
        (p, q, cost[0]),
        (p, q, cost[..., :4]),
        (p.numpy(), q, cost),
        (p, q, otloss.costs.DenseCost(cost)),
        (p[:0], q[:0], cost[:0]),
        (p[..., :0], q, cost),
        (learnt[0], q, cost),
        (p, q, learnt[1]),
    ):
        assert _directly(*given_instead, 0.1) is None
    with torch.no_grad():
        assert _directly(p.clone().requires_grad_(), q, cost, 0.1) is not None
    monkeypatch.setattr(_sinkhorn, "direct_value", lambda *arguments, **options: None)
    assert otloss.sinkhorn(p, q, cost, epsilon=0.1).shape == (3,)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_cost_that_is_negative_or_not_finite_gives_no_value(dtype: torch.dtype) -> None:
    p, q, cost = _problems(3, n=5, m=37, dtype=dtype)
    assert _directly(p, q, cost, 0.1) is not None
    assert _directly(p, q, torch.zeros_like(cost), 0.1) is not None
    for bad in (torch.nan, torch.inf, -1e-30, -torch.inf, -torch.nan):
        wrong = cost.clone()
        wrong[1, 2, 20] = bad
        assert _directly(p, q, wrong, 0.1) is None


def test_zeros_may_have_a_sign_and_tensors_the_negative_bit() -> None:
    p, q, cost = _problems(3)
    cost[1, 2, 3] = -0.0
    assert _directly(p, q, cost, 0.1) is not None
    negated = torch.complex(torch.zeros_like(p), -p).conj().imag
    assert negated.is_neg()
    torch.testing.assert_close(otloss.sinkhorn(negated, q, cost, epsilon=0.1), otloss.sinkhorn(p, q, cost, epsilon=0.1))


def test_an_epsilon_that_is_no_normal_number_of_the_dtype_is_refused() -> None:
    p, q, cost = _problems(2, dtype=torch.float32)
    for epsilon in (1e-50, torch.tensor(1e-50, dtype=torch.float64)):
        with pytest.raises(ValueError, match="rescale the costs"):
            otloss.sinkhorn(p, q, cost, epsilon=epsilon)


@pytest.mark.parametrize("tolerance", [1e-3, 1e-4])
def test_errors_are_honest_from_rough_starts(tolerance: float) -> None:
    p, q, cost = _problems(20, n=30, m=30, dtype=torch.float32)
    start = (torch.zeros(20, 30), torch.zeros(20, 30))
    start[1][:, 0] = 50
    options = Settings.of({"tolerance": tolerance, "start": start})
    problem = entropic_problem(p, q, cost, epsilon=2.1e-3, settings=options)
    found = find_potentials(problem, options)
    p, q = problem.p.double(), problem.q.double()
    plan = ((found.f[..., None] + found.g[..., None, :] - cost) / 2.1e-3).exp() * p[..., None] * q[..., None, :]
    off = (plan.sum(-1) - p).abs().sum(-1) + (plan.sum(-2) - q).abs().sum(-1)
    assert (off[found.converged] <= 1.5 * tolerance).all()
    assert found.converged.any()


def test_costs_of_bins_without_mass_make_no_difference() -> None:
    p, q, cost = _problems(4)
    p[:, -1], q[:, -1] = 0, 0
    p, q = p / p.sum(-1, keepdim=True), q / q.sum(-1, keepdim=True)
    plain = otloss.solve(p, q, cost, epsilon=0.02)
    cost[:, -1], cost[..., -1] = 1e12, 1e12
    padded = otloss.solve(p, q, cost, epsilon=0.02)
    torch.testing.assert_close(padded.value, plain.value)
    assert torch.equal(padded.iterations, plain.iterations)
