"""emd against linear programming: values, one-sided weight gradients, plans, shapes, dtypes, messages."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings

from otloss.solvers.solve import emd
from tests.errors import raising
from tests.otloss.oracles import as_double, check_subgradients, linprog_value, sparse_weights
from tests.otloss.strategies import problems


def random_problem(seed: int, n: int, m: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    return sparse_weights(rng, n), sparse_weights(rng, m), rng.random((n, m)) * 3


@settings(max_examples=200, deadline=None)
@given(problems())
def test_value_is_the_linear_program_and_gradients_are_subgradients(problem: tuple[np.ndarray, ...]) -> None:
    p, q, matrix = problem
    C = as_double(matrix)
    assert emd(as_double(p), as_double(q), C).item() == pytest.approx(linprog_value(p, q, matrix), abs=1e-6)
    check_subgradients(lambda p, q: emd(p, q, C), p, q)


def test_scale() -> None:
    p, q, matrix = (as_double(a) for a in random_problem(3, 6, 5))
    value = emd(p, q, matrix)
    for scale in (1e-300, 1e-30, 1e30, 1e300):
        torch.testing.assert_close(emd(p, q, matrix * scale) / scale, value)
        torch.testing.assert_close(emd(p * scale, q * scale, matrix) / scale, value)


@pytest.mark.gpu
def test_cuda_tensors_come_back_on_their_device() -> None:
    p, q, matrix = (as_double(a).cuda().requires_grad_() for a in random_problem(0, 5, 6))
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
    (half, half, [[0.0]], TypeError, "cost is a list, expected a cost object"),
    (torch.tensor([[0.5, 0.5], [1.5, -0.5]]), half, square, r"-0.5 in bin 1 of row 1"),
    (torch.stack([half, half * 2]), half, square, "masses of row 1: 2 and 1, .* 0.5"),
    call=lambda p, q, cost: emd(p, q, cost),
)
