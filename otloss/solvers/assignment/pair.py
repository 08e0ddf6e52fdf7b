"""Pairs of a minibatch: which sample of x1 goes with each sample of x0, by transport of the squared distances.

    exact       the permutation s with the smallest  sum_i |x0_i - x1_s(i)|^2
    entropic    s(i) drawn from row i of the plan of entropic transport, s(i) ~ P_i. / sum_j P_ij

Every sample of x0 is used once. Exact pairs use every sample of x1 once too, which draws with replacement from a plan
do not.

Sources: A. Tong et al., Improving and Generalizing Flow-Based Generative Models with Minibatch Optimal Transport, 2024,
arXiv 2302.00482; A. Pooladian et al., Multisample Flow Matching, 2023, arXiv 2304.14772.
"""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor

from otloss._autograd import check_no_transform
from otloss._checks import check_finite, check_floating, check_integers, check_positive
from otloss._public import public
from otloss.costs.distances import distances
from otloss.solvers.assignment.match import match
from otloss.solvers.closed_forms.line import finite_in
from otloss.solvers.solve import solve

# A pair that disagrees without need is drawn with e^-40 of the probability of one that agrees.
_EPSILONS_OF_PENALTY = 40


@public
def pair(
    x0: Float[Tensor, "n ..."],
    x1: Float[Tensor, "m ..."],
    *,
    epsilon: float | None = None,
    condition: tuple[Int[Tensor, " n"], Int[Tensor, " m"]] | None = None,
    generator: torch.Generator | None = None,
) -> Int[Tensor, " n"]:
    """Return for each sample of x0 the place of its partner in x1, so that x1[pair(x0, x1)] lies along x0.

    Args:
        x0: (n, ...) samples, say of noise or of a source domain; axes but the first are one.
        x1: (m, ...) samples of data or of a target domain, m >= n for exact pairs.
        epsilon: None for exact pairs; above 0 for pairs drawn from an entropic plan, in the unit of squared distances.
        condition: labels of x0 and of x1, of any integers. As many pairs as possible agree in theirs, and among those
            pairings the nearest is taken.
        generator: for the draws with epsilon.

    Returns:
        (n,) in int64, each place at most once (m = n: a permutation) unless epsilon is given.

    Raises:
        TypeError: if samples are not floating tensors, or conditions not integers.
        ValueError: if shapes do not fit, there are none, a number is not finite, squared distances overflow, or epsilon
            is not above 0.

    Source:
        A. Tong et al., Improving and Generalizing Flow-Based Generative Models with Minibatch Optimal Transport, 2024.

    Example:
        >>> x0, x1 = torch.tensor([[0.0], [5.0], [9.0]]), torch.tensor([[8.0], [1.0], [4.0]])
        >>> pair(x0, x1)
        tensor([1, 2, 0])
        >>> pair(x0, x1, condition=(torch.tensor([0, 1, 1]), torch.tensor([0, 1, 1])))
        tensor([0, 1, 2])
    """
    check_no_transform()
    for name, x in (("x0", x0), ("x1", x1)):
        check_finite(name, check_floating(name, x))
    if 0 in (x0.dim(), x1.dim()) or x0.shape[1:] != x1.shape[1:] or 0 in (*x0.shape, *x1.shape):
        raise ValueError(
            f"x0 has shape {tuple(x0.shape)} and x1 {tuple(x1.shape)}, expected (n, ...) and (m, ...) with n, m >= 1 "
            "and the same axes after the first."
        )
    n, m = len(x0), len(x1)
    width = 0.0 if epsilon is None else check_positive("epsilon", epsilon)
    cost = _squared_distances(x0.detach().reshape(n, -1), x1.detach().reshape(m, -1))
    # The same pairs, of costs whose range is smaller: penalties follow it, and exact pairs are found in less time.
    cost = cost - cost.amin(-1, keepdim=True)
    if epsilon is not None or n == m:
        cost = cost - cost.amin(0)
    if condition is not None:
        cost = cost.double() + _penalty(condition, cost, width)
    if epsilon is not None:
        plan = solve(None, None, cost, epsilon=width).plan()
        return torch.multinomial(plan / plan.amax(-1, keepdim=True), 1, generator=generator).squeeze(-1)
    if n > m:
        raise ValueError(
            f"x0 has {n} samples and x1 {m}, expected at least as many of x1: an exact partner is used once. Exchange "
            "the two, or give an epsilon."
        )
    columns = match(cost)[1]
    assert isinstance(columns, Tensor)
    return columns


def _squared_distances(x0: Tensor, x1: Tensor) -> Float[Tensor, "n m"]:
    dtype = torch.promote_types(torch.promote_types(x0.dtype, x1.dtype), torch.float32)
    return finite_in(dtype, distances(x0.to(dtype), x1.to(dtype), squared=True), 2)


def _penalty(condition: tuple[Tensor, Tensor], cost: Tensor, epsilon: float) -> Tensor:
    """Return for pairs that disagree more than any pairing can gain, in the unit of the cost."""
    if not isinstance(condition, list | tuple) or len(condition) != 2:
        got = f"{type(condition).__name__}{f' of {len(condition)}' if isinstance(condition, list | tuple) else ''}"
        raise TypeError(f"condition is a {got}, expected a pair: the labels of x0 and the labels of x1.")
    for name, labels, size in zip(("condition[0]", "condition[1]"), condition, cost.shape, strict=True):
        if check_integers(name, labels).shape != (size,):
            raise ValueError(f"{name} has shape {tuple(labels.shape)}, expected ({size},), one for each sample.")
    differ = condition[0].unsqueeze(-1) != condition[1]
    largest = cost.amax().double()
    largest = torch.where(largest > 0, largest, 1.0)  # where all points are equal, any penalty will do
    return differ * ((1 + min(cost.shape)) * largest + _EPSILONS_OF_PENALTY * epsilon)
