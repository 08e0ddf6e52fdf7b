"""solve and Transport: what it tells of a solution is true, and what has no derivative raises."""

import copy
import itertools
import pickle
import re
import sys
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import otloss
from otloss.costs import CosineCost, GridCost, PointCost
from tests.otloss.draws import draw, normal, transport_problem
from tests.otloss.oracles import as_double, central_gradients, linprog_value
from tests.otloss.strategies import problems

TIGHT: dict[str, Any] = {"tolerance": 1e-11, "max_iterations": 100_000}
PENALTIES = (None, 0.4)


def kl(a: Tensor, b: Tensor) -> Tensor:
    """KL between measures, over all axes but the first."""
    inner = torch.xlogy(a, a) - torch.xlogy(a, b).where(a > 1e-60, 0.0) - a + b
    return inner.flatten(1).sum(-1)


def objective(plan: Tensor, problem: tuple[Tensor, ...], epsilon: float, marginal_penalty: float | None) -> Tensor:
    p, q, matrix = problem
    value = (plan * matrix).sum((-2, -1)) + epsilon * kl(plan, p.unsqueeze(-1) * q.unsqueeze(-2))
    return value if marginal_penalty is None else value + marginal_penalty * (kl(plan.sum(-1), p) + kl(plan.sum(-2), q))


def close(a: Any, b: Any, tolerance: float = 1e-9) -> None:
    np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=tolerance, atol=tolerance)


@settings(max_examples=25, deadline=None)
@given(problems())
def test_exact_solution(problem: tuple[np.ndarray, np.ndarray, np.ndarray]) -> None:
    p, q, matrix = map(as_double, problem)
    answer = otloss.solve(p, q, matrix)
    plan, (f, g) = answer.plan(), answer.potentials
    assert (plan >= 0).all()
    close(plan.sum(-1), p)
    close(plan.sum(-2), q)
    close(answer.value, linprog_value(*problem), 1e-6)
    close((plan * matrix).sum(), answer.linear_cost)
    close(f @ p + g @ q, answer.value, 1e-7 * (1 + matrix.max()))
    assert (f.unsqueeze(-1) + g <= matrix + 1e-12 * (1 + matrix.max())).all()  # also at bins that are empty in both
    assert bool(answer.converged)
    assert float(answer.marginal_error) < 1e-9
    assert abs(float(answer.gap)) < 1e-7 * (1 + float(matrix.max()))
    close(answer.dual_value + answer.gap, answer.value)
    lower, upper = answer.certificate
    assert lower <= answer.value + 1e-9
    assert upper >= answer.value - 1e-9


def test_what_has_no_derivative_or_no_answer_raises() -> None:
    exact = otloss.solve(*(t.requires_grad_() for t in transport_problem((3,))))
    products = exact.apply(torch.ones(5, 1)), exact.apply_transpose(torch.ones(4, 1))
    for actual in (exact.plan(), *products, *exact.potentials):
        with pytest.raises(RuntimeError, match="no derivative"):
            actual.sum().backward()
    for k, part in itertools.product(range(3), PARTS):
        inputs = list(transport_problem((3,)))
        inputs[k].requires_grad_()
        answer = otloss.solve(*inputs, epsilon=0.1, marginal_penalty=0.4 if part in ("plan", "f") else None)
        with pytest.raises(RuntimeError, match='grad="implicit"'):
            weighed(answer, part).backward()
        answer.value.sum().backward()
        assert inputs[k].grad is not None
    with pytest.raises(ValueError, match=r"\['tolerance'\]"):
        otloss.solve(*transport_problem((3,)), tolerance=1e-3)
    with pytest.raises(ValueError, match="unbalanced"):
        _ = otloss.solve(*transport_problem((3,)), epsilon=0.1, marginal_penalty=0.4).certificate


@pytest.mark.parametrize(("grad", "epsilon"), [("envelope", 0.02), ("implicit", 0.5)])
@pytest.mark.parametrize("marginal_penalty", PENALTIES)
def test_entropic_solution(grad: str, epsilon: float, marginal_penalty: float | None) -> None:
    p, q, matrix = transport_problem((3,))
    p = p if marginal_penalty is None else 1.5 * p
    answer = otloss.solve(p, q, matrix, epsilon=epsilon, marginal_penalty=marginal_penalty, grad=grad, **TIGHT)
    plan, (f, g) = answer.plan(), answer.potentials
    expected = p.unsqueeze(-1) * q.unsqueeze(-2) * ((f.unsqueeze(-1) + g.unsqueeze(-2) - matrix) / epsilon).exp()
    close(plan, expected, 1e-8)
    # Unbalanced, each marginal is exp(-potential / marginal_penalty) of the given one.
    close(plan.sum(-1), p if marginal_penalty is None else p * (-f / marginal_penalty).exp(), 1e-8)
    close(plan.sum(-2), q if marginal_penalty is None else q * (-g / marginal_penalty).exp(), 1e-8)
    assert (plan[:, 1] == 0).all()
    assert (plan[:, :, -2] == 0).all()
    close(answer.value, objective(plan, (p, q, matrix), epsilon, marginal_penalty), 1e-8)
    close(answer.linear_cost, (plan * matrix).sum((-2, -1)), 1e-9)
    close(answer.dual_value, answer.value, 1e-8)
    assert answer.converged.all()
    assert (answer.marginal_error <= 1e-11).all()
    assert ((answer.gap >= 0) & (answer.gap < 1e-8)).all()
    assert answer.iterations.shape == answer.converged.shape == answer.marginal_error.shape == (3,)
    assert "converged=3/3" in repr(answer)


@settings(max_examples=25, deadline=None)
@given(problems(), st.sampled_from([0.02, 0.2, 2.0]), st.integers(1, 30), st.sampled_from(PENALTIES))
def test_the_optimum_lies_in_the_gap_at_any_iteration(
    problem: tuple[np.ndarray, np.ndarray, np.ndarray], epsilon: float, iterations: int, marginal_penalty: float | None
) -> None:
    given: Any = map(as_double, problem)
    solved = partial(otloss.solve, *given, epsilon=epsilon, marginal_penalty=marginal_penalty)
    slack = 1e-7 * (1 + float(problem[2].max()))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", otloss.ConvergenceWarning)
        best = solved(tolerance=1e-9, max_iterations=20_000)
        for impl in ("torch", "auto"):
            loose = solved(max_iterations=iterations, impl=impl, tolerance=1e-12)
            assert float(loose.gap) >= 0
            assert float(loose.dual_value) <= float(best.dual_value + best.gap) + slack
            assert float(loose.dual_value + loose.gap) >= float(best.dual_value) - slack
            if marginal_penalty is None:
                lower, upper = (float(t) for t in loose.certificate)
                assert lower - slack <= linprog_value(*problem) <= upper + slack


GENERATOR = torch.Generator().manual_seed(3)
CLOUDS = [torch.rand(k, 3, generator=GENERATOR, dtype=torch.float64) for k in (4, 5)]


def weighed(answer: otloss.Transport, part: str) -> Tensor:
    """A number made of that part, with non-uniform factors; potentials are meant up to a constant."""
    if part in ("f", "g"):
        t = answer.potentials["fg".index(part)]
        t = t - t.mean(-1, keepdim=True)
    elif part in ("apply", "apply_transpose"):
        t = getattr(answer, part)(CLOUDS[part == "apply"])
    else:
        t = answer.plan() if part == "plan" else answer.linear_cost
    return (t * torch.linspace(0.5, 2.0, t.numel(), dtype=t.dtype).reshape(t.shape).cos()).sum()


# Costs that make the products with the plan in ways of their own, and the exact solver.
PRODUCTS: list[tuple[Any, dict[str, Any]]] = [
    (PointCost(*CLOUDS), {"epsilon": 0.1}),
    (CosineCost(CLOUDS[0] - 0.5), {"epsilon": 0.1, "grad": "implicit"}),
    (GridCost((2, 2)), {"epsilon": 0.1}),
    (PointCost(*CLOUDS), {}),
]


@pytest.mark.parametrize(("cost", "options"), PRODUCTS)
def test_products_with_the_plan_and_the_plan_in_blocks(cost: Any, options: Any, request: pytest.FixtureRequest) -> None:
    n, m = cost.shape
    p, q, _ = transport_problem((3,), n=n, m=m)
    v, u = torch.rand(3, m, 2, dtype=torch.float64), torch.rand(n, 2, dtype=torch.float64)
    whole = otloss.solve(p, q, cost, **options)
    request.getfixturevalue("small_blocks")
    for answer in (whole, otloss.solve(p, q, cost, **options)):
        close(answer.plan(), whole.plan(), 1e-12)
        close(answer.linear_cost, whole.linear_cost, 1e-12)
        close(answer.apply(v), whole.plan() @ v, 1e-12)
        close(answer.apply(v[0]), whole.plan() @ v[0], 1e-12)
        close(answer.apply_transpose(u), whole.plan().mT @ u, 1e-12)
    with pytest.raises(ValueError, match=r"v\[\.\.\., None\]"):
        whole.apply(v[0, :, 0])


PARTS = ("linear_cost", "plan", "apply", "apply_transpose", "f", "g")


@pytest.mark.parametrize(
    ("part", "marginal_penalty"),  # linear_cost is in the gradient matrix
    [("plan", None), ("plan", 0.4), ("apply", 0.4), ("apply_transpose", None), ("f", 0.4), ("g", None)],
)
def test_gradients_through_the_plan(part: str, marginal_penalty: float | None) -> None:
    problem = transport_problem((2,))
    inputs = [t.clone().requires_grad_() for t in problem]
    options: dict[str, Any] = {"epsilon": 0.2, "marginal_penalty": marginal_penalty, "tolerance": 1e-10}
    actual = torch.autograd.grad(weighed(otloss.solve(*inputs, grad="implicit", **options), part), inputs)
    for k in range(3):

        def value(point: np.ndarray, k: int = k) -> float:
            moved = as_double(point)
            if k < 2 and marginal_penalty is None:  # along the simplex: what goes in comes from all bins with mass
                moved = problem[k] + (moved - problem[k]) - (moved - problem[k]).sum(-1, keepdim=True) * problem[k]
            return float(weighed(otloss.solve(*problem[:k], moved, *problem[k + 1 :], **options), part))

        point = problem[k].numpy()
        expected = central_gradients(value, point.clip(1e-6) if k < 2 else point, 1e-6 if k < 2 else 1e-5)
        gradient = actual[k]
        if k < 2 and marginal_penalty is None:
            gradient = gradient - (gradient * problem[k]).sum(-1, keepdim=True)
        close(gradient, expected, 2e-4)


def test_implicit_gradients_between_bins_without_mass() -> None:
    """Their potentials change by 1e70 and more with a weight, which must not reach the bins with mass."""
    p, q = draw(12, seed=4).double(), draw(12, seed=5).double()
    p[::3], q[1::3] = 0.0, 0.0
    p, q = p / p.sum(), q / q.sum()
    cost = PointCost(*torch.rand(2, 12, 2, generator=torch.Generator().manual_seed(4), dtype=torch.float64))
    weights = p.clone().requires_grad_()
    solution = otloss.solve(weights, q, cost, epsilon=3e-4, grad="implicit")
    (gradient,) = torch.autograd.grad(solution.linear_cost, weights)
    for empty in (0, 3, 6):
        change = torch.zeros_like(p)
        change[empty], change[1] = 1e-6, -1e-6
        here, near, far = (
            otloss.solve(p + k * change, q, cost, epsilon=3e-4, tolerance=1e-13).linear_cost for k in range(3)
        )
        close(gradient @ change, 2 * near - 1.5 * here - far / 2, 1e-9)


@pytest.mark.parametrize("epsilon", [None, 0.1])
def test_answers_have_the_dtype_of_the_inputs_and_bounds_float64(epsilon: float | None) -> None:
    wide = transport_problem((3,))
    assert otloss.sinkhorn(*(t[:0] for t in wide), epsilon=torch.ones(0)).shape == (0,)
    answer = otloss.solve(*(t.bfloat16() for t in wide), epsilon=epsilon)
    for actual in (answer.value, answer.linear_cost, answer.marginal_error, answer.plan(), *answer.potentials):
        assert actual.dtype == torch.bfloat16
    assert answer.dual_value.dtype == answer.gap.dtype == answer.certificate.lower.dtype == torch.float64
    close(answer.plan().double(), otloss.solve(*wide, epsilon=epsilon).plan(), 2e-2)


def test_answers_after_a_change_in_place_raise() -> None:
    p, q, matrix = transport_problem((3,))
    exact, read, late = (otloss.solve(p, q, matrix, epsilon=epsilon) for epsilon in (None, 0.1, 0.1))
    gap = read.gap.clone()
    matrix.mul_(2)
    assert torch.equal(read.gap, gap)
    # The problem has bins without mass on both sides, whose exact potentials read the costs.
    for answer, ask in [(exact, "potentials"), *((late, a) for a in ("gap", "dual_value", "certificate", "plan"))]:
        with pytest.raises(RuntimeError, match="changed in place"):
            late.plan() if ask == "plan" else getattr(answer, ask)


@pytest.mark.parametrize("log", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("kind", ["matrix", "mass", "grid"])
def test_a_part_that_was_logged_keeps_its_gradient(kind: str, dtype: torch.dtype, log: Any) -> None:
    """Parts are computed once, at their first reading, which may be under `no_grad`."""
    cost: Any = GridCost((24, 24), spacing=1 / 23).to(dtype) if kind == "grid" else draw(6, 6, seed=2).to(dtype)
    p, q = (w.to(dtype) / w.to(dtype).sum() for w in draw(2, cost.shape[-1]) + 0.1)
    p, options = p.requires_grad_(), {"epsilon": 0.1, "mass": 0.6 if kind == "mass" else None}
    v = draw(len(p), 2).to(dtype)
    parts: dict[str, Callable[[otloss.Transport], Tensor]] = {
        "linear_cost": lambda t: t.linear_cost, "potentials": lambda t: t.potentials[0], "plan": lambda t: t.plan(),
        "apply": lambda t: t.apply(v), "barycentric_map": lambda t: t.barycentric_map(v),
    }  # fmt: skip
    for name, part in parts.items():
        plain, logged = (otloss.solve(p, q, cost, grad="implicit", **options) for _ in range(2))
        with log():
            logged.potential_error, logged.linear_cost, logged.plan(), part(logged)
        expected, actual = (torch.autograd.grad(part(t).square().sum(), p)[0] for t in (plain, logged))
        torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5, msg=name)
        with torch.no_grad():
            made = otloss.solve(p, q, cost, grad="implicit", **options)
        assert not part(made).requires_grad
        envelope = otloss.solve(p, q, cost, **options)
        with log():
            part(envelope)
        with pytest.raises(RuntimeError, match="gives the derivative of `value` alone"):
            part(envelope).sum().backward()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("options", [{}, {"epsilon": 0.1}, {"epsilon": 0.1, "marginal_penalty": 0.5}, {"mass": 0.7}])
def test_a_part_that_is_changed_in_place_changes_no_other(options: dict[str, Any], dtype: torch.dtype) -> None:
    """As in `loss = answer.value; loss += penalty`, or where potentials are centred for a plot."""
    problem = [t.to(dtype) for t in transport_problem((3,))]
    parts = ("value", "potentials", "linear_cost", "marginal_error", "converged", "iterations", "potential_error")
    parts += ("gap", "dual_value") if "marginal_penalty" in options else ("gap", "dual_value", "certificate")

    def read(answer: otloss.Transport) -> dict[str, Tensor]:
        values = {name: getattr(answer, name) for name in parts} | {"plan": answer.plan()}
        return {name: torch.cat([*t], -1) if isinstance(t, tuple) else t.clone() for name, t in values.items()}

    expected = read(otloss.solve(*problem, **options))
    for name in parts:
        answer = otloss.solve(*problem, **options)
        part = getattr(answer, name)
        for tensor in part if isinstance(part, tuple) else [part]:
            tensor.zero_()
        actual = read(answer)
        for other in expected.keys() - ({name} & {"value", "potentials", "linear_cost"}):  # which are the user's own
            torch.testing.assert_close(actual[other], expected[other], rtol=0, atol=0, msg=f"{name} changed {other}")


@pytest.mark.parametrize("as_pair", [False, True])
def test_a_penalty_may_be_changed_after_the_call(as_pair: bool) -> None:
    """As where it falls from step to step, and losses of several steps are summed."""
    p, q, matrix = transport_problem((3,))
    penalty, p = torch.full((), 0.5, dtype=torch.float64), p.requires_grad_()
    options = {"epsilon": 0.1, "marginal_penalty": (penalty, None) if as_pair else penalty}
    expected_answer, answer = (otloss.solve(p, q, matrix, **options) for _ in range(2))
    (expected,) = torch.autograd.grad(expected_answer.value.sum(), p)
    gap = expected_answer.gap
    penalty *= 0.1
    (actual,) = torch.autograd.grad(answer.value.sum(), p)
    torch.testing.assert_close(actual, expected, rtol=0, atol=0)
    torch.testing.assert_close(answer.gap, gap, rtol=0, atol=0)


@pytest.mark.parametrize("grad", ["envelope", "implicit"])
def test_a_linear_cost_after_a_step_raises(grad: str) -> None:
    x, y = normal(4, 2).requires_grad_(), normal(5, 2, seed=1)
    answer = otloss.solve(None, None, PointCost(x, y), epsilon=0.3, grad=grad)
    answer.value.backward()
    torch.optim.SGD([x], lr=0.1).step()
    with pytest.raises(RuntimeError, match=r"linear_cost was asked for after a tensor .* was changed in place"):
        answer.linear_cost  # noqa: B018


@pytest.mark.parametrize("epsilon", [None, 0.1])
def test_copies_of_answers_know_what_was_changed(epsilon: float | None) -> None:
    p, q, matrix = transport_problem((3,))
    answer = otloss.solve(p, q, matrix.mul_(1), epsilon=epsilon)
    copies = [copy.copy(answer), copy.deepcopy(answer), pickle.loads(pickle.dumps(answer))]
    for copied in copies:
        close(copied.plan(), answer.plan(), 0.0)
        close(copied.gap, answer.gap, 0.0)
    changed = otloss.solve(p, q, matrix, epsilon=epsilon)
    matrix.mul_(2)
    for copied in (copy.deepcopy(changed), pickle.loads(pickle.dumps(changed))):
        with pytest.raises(RuntimeError, match="changed in place"):
            copied.certificate  # noqa: B018


def test_barycentric_maps_divide_by_the_mass_that_is_moved() -> None:
    x, y, p = normal(2, 5, 3), normal(2, 5, 3, seed=1), draw(2, 5)
    p[0, 1] = 0
    p = p / p.sum(-1, keepdim=True)
    cost = PointCost(x, y)
    cases: list[dict[str, Any]] = [{}, {"mass": 0.5}, {"epsilon": 0.5, "grad": "implicit"}]
    for options in (*cases, {"epsilon": 0.5, "marginal_penalty": 1.0}):
        actual = otloss.solve(p, None, cost, **options)
        plan = actual.plan().detach()
        held = plan.sum(-1, keepdim=True)
        expected = torch.where(held > 0, plan @ y / held, torch.nan)
        torch.testing.assert_close(actual.barycentric_map(y).detach(), expected, equal_nan=True)
    leaf = x.clone().requires_grad_()
    mapped = otloss.solve(p, None, PointCost(leaf, y), epsilon=0.5, grad="implicit").barycentric_map(y)
    assert torch.autograd.grad(mapped[p > 0].sum(), leaf)[0].isfinite().all()


def test_masses_that_are_one_up_to_rounding_add_nothing() -> None:
    p, q, matrix = (t.float() for t in transport_problem(n=100, m=100))
    wide = [w.double() / w.double().sum() for w in (p, q)]
    for epsilon in (1e4, 1e6, 1e8, 1e12):
        answer = otloss.solve(p, q, matrix, epsilon=epsilon)
        torch.testing.assert_close(answer.value.double(), wide[0] @ matrix.double() @ wide[1], rtol=1e-4, atol=0)
        assert answer.gap < 1e-4
        torch.testing.assert_close(otloss.sinkhorn(p, q, matrix, epsilon=epsilon), answer.value, rtol=1e-5, atol=0)


@pytest.mark.parametrize(("name", "options"), [("emd", {}), ("sinkhorn", {"epsilon": 0.1})])
def test_docs_list_the_files_on_the_path_of_a_call(name: str, options: dict[str, float]) -> None:
    p, q, matrix = transport_problem()
    visited: set[str] = set()
    package = str(Path(otloss.__file__).parent) + "/"
    getattr(otloss, name)(p.requires_grad_(), q, matrix, **options).backward()  # imports the kernel
    sys.setprofile(lambda frame, *_: visited.add(frame.f_code.co_filename))
    try:
        getattr(otloss, name)(p, q, matrix, **options).backward()
    finally:
        sys.setprofile(None)
    visited = {path.removeprefix(package) for path in visited if path.startswith(package)}
    text = (Path(__file__).parents[3] / "docs/contributors/design.md").read_text(encoding="utf-8")
    (row,) = re.findall(rf"^    {name}  +(.*)$", text, re.MULTILINE)
    listed = {f"{stem}.py" if stem.startswith("_") else f"solvers/{stem}.py" for stem in row.split(", ")}
    assert listed <= visited
    assert len(listed) <= 9


@pytest.mark.parametrize("kind", ["grid", "price"])
def test_the_derivative_in_epsilon_keeps_its_digits_where_costs_are_many_epsilons(kind: str) -> None:
    """It is a sum of P (f + g - C) / epsilon, whose parts are thousands of times larger than it."""
    if kind == "grid":
        places = torch.arange(32.0)
        p, q = (
            torch.exp(-((places[:, None] - at) ** 2 + (places - at) ** 2) / 4).clamp(min=1e-6).flatten()
            for at in (2.0, 29.0)
        )
        p, q = (torch.where(w > 1e-3, w, 0.0) / w[w > 1e-3].sum() for w in (p, q))
        cost: Any = GridCost((32, 32), spacing=2.0)
    else:  # each plan pays the price of the last bin
        p, q = torch.tensor([0.5, 0.25, 0.25]), torch.tensor([0.25, 0.5, 0.25])
        cost = torch.tensor([[0.0, 1.0, 1e6], [1.0, 0.0, 1e6], [1e6, 1e6, 1e6]])

    def value(epsilon: float) -> float:
        wide = cost if isinstance(cost, GridCost) else cost.double()
        double = [w.double() / w.double().sum() for w in (p, q)]
        return float(otloss.sinkhorn(*double, wide, epsilon=epsilon, tolerance=1e-11, max_iterations=10**5))

    epsilon = torch.tensor(1.0, requires_grad=True)
    otloss.sinkhorn(p, q, cost, epsilon=epsilon).backward()
    assert float(epsilon.grad) == pytest.approx((value(1.01) - value(0.99)) / 0.02, rel=2e-3)
