"""Whether the equations of the implicit function theorem determine derivatives in the weights.

Parts of a plan that hardly exchange mass leave the potentials of one part undetermined against another: the
system's smallest eigenvalue is the share of the mass that they exchange. Its inverse, the condition, multiplies the
rounding errors. Rounding alone makes the condition of a singular system about 1e15 in float64, so a bound far below
decides the same for every processor, and at the bound the derivatives have lost at most ten of their sixteen digits.

A solution within the tolerance may be far from the optimum along such a mode, and its plan exchange much more mass than
the optimal one. So the condition is taken at potentials from which Newton's method takes a small step.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

SMALL_STEP = 0.1  # a change of g / epsilon, after which the next step of Newton's method is about its square
MAX_CORRECTIONS = 50


def largest_condition(dtype: torch.dtype) -> float:
    """Return the condition up to which derivatives are given: 6e9 in float64, 2e4 in float32."""
    return float(torch.finfo(dtype).eps ** -0.625)


def check_condition(condition: Tensor) -> None:
    """Raise RuntimeError where the condition of a problem is above the bound, or is not a number."""
    if condition.numel() and not float(condition.detach().amax()) < largest_condition(condition.dtype):
        raise singular_equations_error()


def corrected(step_from: Callable[[Tensor], Tensor], b: Tensor) -> Tensor:
    """Return b = g / epsilon (..., m) after Newton's method, whose last step was small.

    Along a slow mode the dual objective is a sum of two exponentials, where a full step is at most one.

    Raises:
        RuntimeError: if the equations are singular to rounding, or the steps do not get small.
    """
    if not b.numel():
        return b
    for _ in range(MAX_CORRECTIONS):
        step = step_from(b)
        size = step.abs().amax(-1, keepdim=True)
        b = b + step / size.clamp(min=1.0)
        if bool((size < SMALL_STEP).all()):
            return b
    raise singular_equations_error()


def singular_equations_error() -> RuntimeError:
    return RuntimeError(
        'grad="implicit" has no answer here: the plan falls into parts that hardly exchange mass (or has not '
        "converged), and the equations for its derivatives in the weights are singular to rounding. Raise epsilon or "
        'max_iterations, use grad="envelope", or detach the weights if only the cost is to be differentiated.'
    )
