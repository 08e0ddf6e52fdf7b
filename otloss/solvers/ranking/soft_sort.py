"""Sorting, ranking and picking the largest entries, made smooth.

By entropic transport, with derivatives of every order; or regularised by squares (`ranking.permutahedron`), piecewise
linear and as fast as sorting.

The n entries of a row x, of weight 1/n each, are transported to increasing places on the line at a squared cost. With
u = (x - min x) / width, so that nothing depends on the offset and scale of x,

    sort, rank    places t_j = (j - 1) / (n - 1) for j = 1, ..., n, of weight 1/n, and S = n P:
                  S_ij = exp(2 u_i t_j / epsilon + a_i + b_j)       rows and columns sum to one
                  soft_sort(x) = S^T x,   soft_rank(x) = S (1, ..., n)
    top k         places 0 and 1, of weights (n - k)/n and k/n; the mass sent to 1 is
                  mask_i = 1 / (1 + exp(theta - 2 u_i / epsilon))    theta such that they sum to k

The width is the range of the row, max x - min x, but at most three times (n - 1) / (n - 1 - 2 t) the range without the
t = floor(n / 10) entries at each end: so one outlier does not decide what counts as near.

(M. Cuturi, O. Teboul, J.-P. Vert, Differentiable Ranking and Sorting using Optimal Transport, 2019, arXiv 1905.11885;
Y. Xie et al., Differentiable Top-k with Optimal Transport, 2020, arXiv 2002.06504.) As epsilon falls to 0, S becomes
the permutation that sorts x, with equal shares among equal entries.

b solves n equations by Newton's method, from the potentials of the exact problem, where places j and j + 1 cost the
same for a value halfway between the j-th and the (j + 1)-th smallest. About six steps suffice whatever epsilon is.
Derivatives follow from the equations at the solution. For a change dZ of the scores 2 u_i t_j / epsilon,

    dS = S * (dZ + da 1^T + 1 db^T),    da + S db = -(S * dZ) 1,    S^T da + db = -(S * dZ)^T 1

and d theta = sum_i w_i dz_i / sum_i w_i with w = mask (1 - mask). All of it is computed in float64.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from numbers import Integral
from typing import Any, NoReturn

import torch
from jaxtyping import Float
from torch import Tensor

from otloss._autograd import check_no_forward_in_forward
from otloss._checks import check_finite, check_floating, check_number, check_positive, raise_inside_vmap
from otloss._public import public
from otloss.solvers.entropic.dense_newton import safe_share
from otloss.solvers.linear_systems import product_with_itself, solve
from otloss.solvers.ranking.permutahedron import check_range, quadratic_rank, quadratic_sort, quadratic_top_k, trim


@dataclass(frozen=True)
class Limits:
    """Numbers of the methods.

    Attributes:
        largest_plan: entries of a row that a plan is made for: two matrices of this size take a quarter of a GiB.
        smallest_epsilon: scores of up to 2 / epsilon are rounded such that sums are right to 1e-8 and better.
        newton_steps, bisections: the steps after which the search for b, or for the threshold, is given up; about six
            and ten suffice.
        tolerance, rounding: the error of the columns' sums. The scores are rounded to 2e-16 of 2 / epsilon, and the
            sums with them.
        widest_gap: relative to n epsilon: entries farther apart exchange exp(-40) of their mass at most.
        ridge: added to the diagonal of the equations, which are singular to rounding where the plan falls into parts
            that hardly exchange mass. The plan and its derivatives stay the same.
    """

    largest_plan: int = 4096
    smallest_epsilon: float = 1e-7
    newton_steps: int = 50
    bisections: int = 200
    tolerance: float = 1e-11
    rounding: float = 1e-15
    widest_gap: float = 20.0
    ridge: float = 1e-12


LIMITS = Limits()
_EPSILON = {"entropy": 0.01, "quadratic": 0.5}  # the default for each regularization


@public
def soft_sort(
    x: Float[Tensor, "*batch n"],
    *,
    epsilon: float | None = None,
    regularization: str = "entropy",
    descending: bool = False,
) -> Float[Tensor, "*batch n"]:
    """Return the sorted entries of each row, each a mean over the entries that are near it in value.

    Args:
        x: (..., n) finite, n at least 1, and at most 4096 with "entropy".
        epsilon: at least 1e-7, relative to the row's width, so that nothing depends on its scale. The width is the
            range, but at most 3 (n - 1) / (n - 1 - 2 t) times the range without the t = floor(n / 10) entries at each
            end, where that is not 0: about 3.75 times the distance from the 10th to the 90th percentile. Uniform and
            normal rows have less, so it is the range there, as it is for n below 10; elsewhere outliers do not decide
            it, as long as they are at most a tenth of the row at each end. Beyond that, and for n below 10, one far
            entry makes the others nearly equal: clamp x to what counts as far.
            "entropy" (default 0.01): entries about sqrt(epsilon / 2) of the width apart mix; much less than that yields
            the sorted entries and derivatives that nearly belong to a permutation. The sums over S are right to
            1e-11, or 1e-15 / epsilon where that is more.
            "quadratic" (default 0.5), relative to the range itself: neighbours farther apart than 1 / epsilon times the
            mean distance of neighbours are drawn together, so an outlier draws some to itself; where none are, these
            are the sorted entries themselves. At a large epsilon all are (from 1 on if evenly spaced).
        regularization: "entropy", smooth, O(n^3) per row (about 1 ms for n = 100 and 0.3 s for n = 1000 on one core)
            and half as much for the gradient, for which it holds n^2 numbers per row; or "quadratic", piecewise linear,
            O(n log n).
        descending: largest first.

    Returns:
        (..., n) in the dtype and unit of x, with the sum of x. `soft_sort(a x + b) = a soft_sort(x) + b` for a > 0.
        Differentiable any number of times, except where entries that determine the width are shared: it has a kink
        there, and the gradient is a subgradient. The width is part of the derivative. With "quadratic" differentiable
        once, with such kinks at every tie and where entries begin to mix, and computed on the CPU. A row of equal
        entries is returned as it is, with "entropy" every entry with the gradient of the mean.

    Raises:
        TypeError: if x is not a floating tensor, or epsilon not a number.
        ValueError: if x has no entries or too many, or is not finite, epsilon is too small, or the regularization is
            unknown.

    Source:
        M. Cuturi, O. Teboul, J.-P. Vert, Differentiable Ranking and Sorting using Optimal Transport, 2019 ("entropy");
        M. Blondel et al., Fast Differentiable Sorting and Ranking, 2020 ("quadratic").

    Example:
        >>> soft_sort(torch.tensor([3.0, 1.0, 2.0]), epsilon=1e-3)
        tensor([1., 2., 3.])
        >>> soft_sort(torch.tensor([3.0, 1.0, 2.0]), epsilon=0.5)
        tensor([1.4674, 2.0000, 2.5326])
        >>> soft_sort(torch.tensor([3.0, 1.0, 2.0]), epsilon=2.0, regularization="quadratic")
        tensor([1.5000, 2.0000, 2.5000])
    """
    epsilon = _check("soft_sort", x, epsilon, regularization)
    if regularization == "quadratic":
        falling = quadratic_sort(x, epsilon)
        return (falling if descending else falling.flip(-1)).to(x.dtype)
    low, width, u = _in_units_of_width(x)
    sorted_values = low + width * (_plan(u, epsilon).mT @ u.unsqueeze(-1)).squeeze(-1)
    return (sorted_values.flip(-1) if descending else sorted_values).to(x.dtype)


@public
def soft_rank(
    x: Float[Tensor, "*batch n"],
    *,
    epsilon: float | None = None,
    regularization: str = "entropy",
    descending: bool = False,
) -> Float[Tensor, "*batch n"]:
    """Return the rank of each entry in its row, from 1 for the smallest to n for the largest, made smooth.

    Args:
        x: (..., n) finite, n at least 1, and at most 4096 with "entropy".
        epsilon: at least 1e-7; as it falls to 0, equal entries get the mean of the ranks they take up.
            "entropy" (default 0.01): as for `soft_sort`.
            "quadratic" (default 0.5): entries nearer than epsilon times the width / (n - 1), the mean distance of
            neighbours without outliers, share ranks in proportion to their distance. Where none are, the ranks are the
            usual ones and the gradient is 0; at a large epsilon all entries do, and ranks are linear in them (from 1 on
            where they are evenly spaced).
        regularization: as for `soft_sort`.
        descending: 1 for the largest.

    Returns:
        (..., n) in the dtype of x, between 1 and n, with the sum n (n + 1) / 2; unchanged by `a x + b` with a > 0.
        Differentiable as `soft_sort` is, at its price. In a row of equal entries every rank is (n + 1) / 2; ranks jump
        there, so there is no derivative, and the gradient is 0.

    Raises:
        TypeError, ValueError: as for `soft_sort`.

    Source:
        As for `soft_sort`.

    Example:
        >>> soft_rank(torch.tensor([10.0, -5.0, 10.0, 40.0]), epsilon=1e-3)
        tensor([2.5000, 1.0000, 2.5000, 4.0000])
        >>> soft_rank(torch.tensor([10.0, -5.0, 11.0, 40.0]), regularization="quadratic")
        tensor([2.4333, 1.0000, 2.5667, 4.0000])
    """
    epsilon = _check("soft_rank", x, epsilon, regularization)
    n = x.shape[-1]
    if regularization == "quadratic":
        ranks = quadratic_rank(x, epsilon)
    else:
        _, _, u = _in_units_of_width(x)
        ranks = _plan(u, epsilon) @ torch.arange(1, n + 1, dtype=u.dtype, device=u.device)
    return (n + 1 - ranks if descending else ranks).to(x.dtype)


@public
def soft_top_k(
    x: Float[Tensor, "*batch n"], k: int, *, epsilon: float = 0.1, regularization: str = "entropy"
) -> Float[Tensor, "*batch n"]:
    """Return a mask of the k largest entries of each row, made smooth: shares in [0, 1] that sum to k.

    Args:
        x: (..., n) finite, n at least 1.
        k: from 0 to n.
        epsilon: relative to the width of the row (see `soft_sort`), at least 1e-7. Shares go from 0.1 to 0.9 over 2.2
            epsilon of the width with "entropy", and from 0 to 1 over epsilon with "quadratic"; as it falls to 0 the k
            largest get 1, and those that tie for the last places equal parts.
        regularization: "entropy", smooth; or "quadratic", piecewise linear, with shares and gradients of exactly 0.

    Returns:
        (..., n) in the dtype of x, unchanged by `a x + b` with a > 0. Differentiable as `soft_rank` is; in a row of
        equal entries every share is k / n, with the gradient 0. Costs O(n) per row after a sort.

    Raises:
        TypeError: if x is not a floating tensor, epsilon not a number, or k not a whole number.
        ValueError: if k is not within 0 to n, x has no entries or is not finite, epsilon is too small, or the
            regularization is unknown.

    Source:
        Y. Xie et al., Differentiable Top-k with Optimal Transport, 2020; M. Blondel et al., 2020 ("quadratic").

    Example:
        >>> soft_top_k(torch.tensor([0.1, 0.9, 0.4, 0.8]), 2, epsilon=1e-3)
        tensor([0., 1., 0., 1.])
        >>> soft_top_k(torch.tensor([0.0, 1.0, 0.5, 0.7]), 2, epsilon=0.2)
        tensor([0.0026, 0.9827, 0.2764, 0.7384])
        >>> soft_top_k(torch.tensor([0.0, 1.0, 0.5, 0.7]), 2, epsilon=0.25, regularization="quadratic")
        tensor([0.0000, 1.0000, 0.1000, 0.9000])
    """
    if regularization == "quadratic":
        _check_top_k(x, k, epsilon, regularization)
        return quadratic_top_k(x, k, epsilon).to(x.dtype)
    return torch.sigmoid(_top_k_logits(x, k, epsilon, regularization)).to(x.dtype)


def _top_k_logits(x: Tensor, k: int, epsilon: float, regularization: str) -> Float[Tensor, "*batch n"]:
    """Return log(share / (1 - share)), in float64."""
    _check_top_k(x, k, epsilon, regularization)
    _, _, u = _in_units_of_width(x)
    if k in (0, x.shape[-1]):
        return 0 * u + (torch.inf if k else -torch.inf)  # It is the same for every x, and part of the graph.
    beside = u.detach().topk(k + 1, dim=-1).values[..., k - 1 :].mean(-1, keepdim=True)
    # A constant subtracted from all of u does not change the mask; with the threshold near 0 it loses no digits.
    scores = 2 * (u - beside) / epsilon
    check_no_forward_in_forward()
    threshold: Tensor = _Threshold.apply(scores, k)
    return scores - threshold


def _check_top_k(x: Any, k: Any, epsilon: Any, regularization: str) -> None:
    _check("soft_top_k", x, check_number("epsilon", epsilon), regularization)
    if isinstance(k, bool) or not isinstance(k, Integral):
        raise TypeError(f"k is a {type(k).__name__}, expected a whole number.")
    if not 0 <= int(k) <= x.shape[-1]:
        raise ValueError(f"k is {k}, expected 0 to {x.shape[-1]}, the number of entries in a row of x.")


def _check(function: str, x: Any, epsilon: Any, regularization: str) -> float:
    check_floating("x", x)
    if x.dim() == 0 or x.shape[-1] == 0:
        raise ValueError(f"x has shape {tuple(x.shape)}, expected (..., n) with at least one entry.")
    if regularization not in _EPSILON:
        raise ValueError(f"regularization is {regularization!r}, expected one of {tuple(_EPSILON)}.")
    if function != "soft_top_k" and regularization == "entropy" and x.shape[-1] > LIMITS.largest_plan:
        raise ValueError(
            f"x has {x.shape[-1]} entries in a row, expected at most {LIMITS.largest_plan}: {function} solves n "
            'equations with an n x n matrix. regularization="quadratic" takes rows of any length.'
        )
    epsilon = _EPSILON[regularization] if epsilon is None else epsilon
    if check_positive("epsilon", epsilon) < LIMITS.smallest_epsilon:
        raise ValueError(
            f"epsilon is {epsilon}, expected at least {LIMITS.smallest_epsilon}; the limit 0 is torch.sort."
        )
    check_finite("x", x)
    return epsilon


def _in_units_of_width(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the smallest entry, the width and u, in float64; u is 0, without a gradient, where the range is 0."""
    wide = x.to(torch.float64)
    low = wide.amin(-1, keepdim=True)
    width = wide.amax(-1, keepdim=True) - low
    check_range(width)
    cut, share = trim(x.shape[-1])
    if cut:
        ascending = wide.sort(-1).values
        middle = share * (ascending[..., -1 - cut] - ascending[..., cut]).unsqueeze(-1)
        width = torch.where((middle > 0) & (middle < width), middle, width)
    flat = width == 0
    u = (wide - low) / width.masked_fill(flat, 1.0)
    return low, width, u.masked_fill(flat, 0.0)


def _without_wide_gaps(u: Tensor, widest: float) -> Tensor:
    """Return u with gaps between neighbours of at most `widest`; wider ones have the derivative 0."""
    order = u.detach().argsort(-1)
    gaps = u.gather(-1, order).diff(dim=-1)
    if not bool((gaps > widest).any()):
        return u
    ascending = torch.cat([torch.zeros_like(u[..., :1]), gaps.clamp(max=widest).cumsum(-1)], -1)
    return ascending.gather(-1, order.argsort(-1))


def _plan(u: Tensor, epsilon: float) -> Float[Tensor, "*batch n n"]:
    """Return S, with its graph in u."""
    n = u.shape[-1]
    # Entries exchange exp(-2 gap / (n epsilon)) of their mass at most: beyond, wider gaps only cost digits.
    u = _without_wide_gaps(u, max(1.0, LIMITS.widest_gap * n * epsilon))
    places = torch.linspace(0, 1, n, dtype=u.dtype, device=u.device)
    scores = (2 / epsilon) * u.unsqueeze(-1) * places
    ascending = u.detach().sort(-1).values
    between = (ascending[..., 1:] + ascending[..., :-1]) / (epsilon * max(n - 1, 1))
    start = -torch.cat([torch.zeros_like(u[..., :1]), between.cumsum(-1)], -1).detach()
    largest = max(1.0, float(ascending.amax())) if u.numel() else 1.0
    check_no_forward_in_forward()
    plan: Tensor = _Balanced.apply(scores, start, max(LIMITS.tolerance, LIMITS.rounding * largest / epsilon))
    return plan


class _Balanced(torch.autograd.Function):
    """The matrix exp(scores + a_i + b_j) whose rows and columns sum to one."""

    @staticmethod
    def forward(scores: Tensor, start: Tensor, tolerance: float) -> Tensor:
        return _balance(scores, start, tolerance)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        # The plan is an output of this function, so its derivative can be differentiated again.
        ctx.save_for_backward(output)
        ctx.save_for_forward(output)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        return _plan_change(ctx.saved_tensors[0], gradients[0]), None, None

    @staticmethod
    def jvp(ctx: Any, scores: Tensor, *_: None) -> Tensor:
        return _plan_change(ctx.saved_tensors[0], scores)

    @staticmethod
    def vmap(*_: Any) -> NoReturn:
        raise_inside_vmap()


def _plan_change(plan: Tensor, change: Tensor) -> Tensor:
    """Return dS for a change dZ of the scores, a linear map that is its own transpose: so it is the gradient too."""
    weighted = plan * change
    by_rows, by_columns = weighted.sum(-1, keepdim=True), weighted.sum(-2).unsqueeze(-1)
    b = solve(_exchange(plan), by_columns - plan.mT @ by_rows)
    a = by_rows - plan @ b
    return plan * (change - a - b.mT)


def _balance(scores: Tensor, b: Tensor, tolerance: float) -> Tensor:
    """Apply Newton's method to b; a keeps the rows' sums at one throughout.

    The columns' errors are the gradient of the dual. Its Hessian by `entropic.equations.dual`, for masses and penalties
    of any kind, takes 1.2 to 1.6 times as long; the step is shortened as there.
    """
    shifted = torch.empty_like(scores)  # Allocating new memory would take as long as the sum.
    for _ in range(LIMITS.newton_steps):
        plan = torch.softmax(torch.add(scores, b.unsqueeze(-2), out=shifted), -1)
        lack = 1 - plan.sum(-2)
        error = lack.abs().amax(-1, keepdim=True)
        unfinished = error > tolerance
        if not bool(unfinished.any()):
            return plan
        step = solve(_exchange(plan), lack.unsqueeze(-1)).squeeze(-1)
        b = torch.where(unfinished, b + safe_share(step, is_balanced=True).unsqueeze(-1) * step, b)
    raise RuntimeError(
        f"{int(unfinished.sum())} rows were not sorted to the tolerance in {LIMITS.newton_steps} steps of Newton's "
        f"method, the worst with an error of {float(error.max()):.3g}, expected {tolerance:.3g}; raise epsilon."
    )


def _exchange(plan: Tensor) -> Tensor:
    """Return diag(S^T 1) - S^T S, what columns exchange through rows, made regular: it leaves a constant undecided."""
    exchange = product_with_itself(plan).neg_().add_(1 / plan.shape[-1])
    exchange.diagonal(dim1=-2, dim2=-1).add_(plan.sum(-2) + LIMITS.ridge)
    return exchange


class _Threshold(torch.autograd.Function):
    """The threshold theta (..., 1) with sum_i sigmoid(scores_i - theta) = k."""

    @staticmethod
    def forward(scores: Tensor, k: int) -> Tensor:
        return _find_threshold(scores, k)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.save_for_backward(inputs[0], output)
        ctx.save_for_forward(inputs[0], output)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0] * _threshold_weights(*ctx.saved_tensors), None

    @staticmethod
    def jvp(ctx: Any, scores: Tensor, _: None) -> Tensor:
        return (scores * _threshold_weights(*ctx.saved_tensors)).sum(-1, keepdim=True)

    @staticmethod
    def vmap(*_: Any) -> NoReturn:
        raise_inside_vmap()


def _threshold_weights(scores: Tensor, threshold: Tensor) -> Tensor:
    """Return the derivatives of theta in the scores."""
    logits = scores - threshold
    # Weights are logarithms: beside a wide gap all of them would underflow.
    log_weights = torch.nn.functional.logsigmoid(logits) + torch.nn.functional.logsigmoid(-logits)
    return torch.softmax(log_weights, -1)


def _find_threshold(scores: Tensor, k: int) -> Tensor:
    """Return theta by Newton's method from 0, the middle of two scores; a bisection where it leaves the bracket."""
    n, enough = scores.shape[-1], 4 * torch.finfo(scores.dtype).eps
    # Beyond log n from these two scores the shares add to more, or less, than k whatever the others are.
    high, low = scores.topk(k + 1, dim=-1).values[..., k - 1 :].split(1, -1)
    low, high = low - math.log(n) - 1, high + math.log(n) + 1
    theta = torch.zeros_like(low)
    for _ in range(LIMITS.bisections):
        shares = torch.sigmoid(scores - theta)
        excess = shares.sum(-1, keepdim=True) - k
        low, high = torch.where(excess > 0, theta, low), torch.where(excess < 0, theta, high)
        done = (excess.abs() <= enough * k) | (high - low <= enough * theta.abs())
        if bool(done.all()):
            break
        newton = theta + excess / (shares * (1 - shares)).sum(-1, keepdim=True)
        inside = (newton > low) & (newton < high)
        theta = torch.where(done, theta, torch.where(inside, newton, (low + high) / 2))
    return theta
