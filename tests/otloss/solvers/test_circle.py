"""Transport on the circle against linear programming; more of its gradients is in test_gradient_matrix."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from otloss import wasserstein_circular
from tests.errors import raising
from tests.otloss.linear_programs import check_subgradients
from tests.otloss.oracles import as_double, linprog_value
from tests.otloss.strategies import line_problems

Problem = tuple[np.ndarray, np.ndarray, np.ndarray]


def arcs(x: np.ndarray, period: float) -> np.ndarray:
    apart = np.abs(np.subtract.outer(x, x)) % period
    return np.minimum(apart, period - apart)


@settings(max_examples=100, deadline=None)
@given(line_problems(max_size=7), st.sampled_from([1.0, 2.5, 7.0, 100.0]))
def test_is_the_linear_program_and_gradients_are_subgradients(problem: Problem, period: float) -> None:
    p, q, x = problem

    def value(p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
        return wasserstein_circular(p, q, as_double(x), period=period)

    expected = linprog_value(p, q, arcs(x, period))
    assert value(as_double(p), as_double(q)).item() == pytest.approx(expected, abs=1e-6 * period)
    check_subgradients(value, p, q, slack=1e-10 * (10 + period))


third = torch.full((3,), 1 / 3)


test_bad_input = raising(
    ((third, third, third), {}, "x is given without a period"),
    ((third, third), {"period": 0}, "period is 0, expected a finite number above"),
    ((third, torch.ones(1)), {}, "p has 3 bins and q 1"),
    call=lambda arguments, options: wasserstein_circular(*arguments, **options),
)
