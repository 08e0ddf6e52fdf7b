"""Fused Gromov-Wasserstein: transport between two spaces that are known by distances within each, and by features.

Let C and D be the distances within the two spaces, M the cost between their features, and p, q the weights. A plan P
has

    E(P) = (1 - alpha) <M, P> + alpha sum_ijkl (C_ik - D_jl)^2 P_ij P_kl,     P 1 = p,  P^T 1 = q

E depends on the differences of C and D alone: a number that is common to both is subtracted, since its square would
round the others away. For fixed marginals the square gives C^2 p 1^T + 1 (D^2 q)^T - 2 C P D^T, so the gradient of E
costs two products of matrices. E is not convex, so the result is a local minimum, the best one of several starts.

Each start descends by conditional gradients. The target of a step is an optimal plan at the cost grad E(P), and the
step goes to the smallest E on the segment from P to the target, where E is a + b t + c t^2. With an epsilon,
epsilon KL(P | p q^T / m) is added to E, m the mass, and the target is the entropic plan at the cost grad E(P). Let the
fall be -b plus the decrease of the entropy term, which the gradient promises; the actual decrease at the target is the
fall less c. Where c is at most half of the fall, as between distances, where c <= 0, the next P is the target. Where it
is more, the target may lie above P, and have P as its own target: the step goes to the smallest value on the segment,
which is convex there, by bisection.

Without an epsilon, a P that is optimal at the cost grad E(P) may have other optimal plans (`gromov.ties`), of a lower
E, or of the same E and not optimal at their own cost. The search goes on from such a plan; it ends where a few tries
find none.

A local minimum P is an optimal plan at the cost grad E(P). With the potentials f and g of that plan,

    dE/dp = f,   dE/dq = g,   dE/dM = (1 - alpha) P

and dE/dC, dE/dD are the derivatives of the formula of E at fixed P.

Source: T. Vayer et al., Optimal Transport for structured data with application on graphs, ICML 2019.
"""

from __future__ import annotations

import functools
import warnings
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from otloss._autograd import check_no_transform, once_only, release
from otloss._checks import (
    check_broadcast,
    check_count,
    check_finite,
    check_floating,
    check_last_axis,
    check_not_negative,
    check_number,
    check_positive,
)
from otloss._numba import may_run_on
from otloss._numba.threads import Work, run_on_threads
from otloss._public import public
from otloss.costs.cost import makes_graph
from otloss.solvers.convergence import ConvergenceWarning, level_of_the_caller
from otloss.solvers.gromov.ties import APART, TRIES, direction_of_costs, nudged
from otloss.solvers.histograms import histogram_pair
from otloss.solvers.solve import solve

ROUNDING = 1e-13  # relative to the sizes of the terms of a value, as they cancel
_BESIDE = 1e-3  # the share of a plan without symmetries in the start of an entropic search: more leads elsewhere
# Of the bisection of an entropic step: it need not be precise, since another one follows.
_STEP_PRECISION, _SMALLEST_STEP = 1e-3, 1e-9


class FusedGromov(NamedTuple):
    """The result of `fused_gromov`.

    Attributes:
        value: (...), E at the plan, plus the entropy term if there is an epsilon; differentiable.
        plan: (..., n, m), without a graph.
        converged: (...), whether the last step changed the value by no more than the tolerance, and with an epsilon
            could not have lowered it by more at the gradient of E. Without one, a few of the plans that are optimal at
            that gradient are tried where there are several, as for graphs: a lower one may remain.
    """

    value: Float[Tensor, "*batch"]
    plan: Float[Tensor, "*batch n m"]
    converged: Tensor

    def __repr__(self) -> str:
        return f"FusedGromov(value={self.value}, plan of shape {tuple(self.plan.shape)}, converged={self.converged})"


@public
def fused_gromov(
    C_x: Float[Tensor, "*batch n n"],
    C_y: Float[Tensor, "*batch m m"],
    feature_cost: Float[Tensor, "*batch n m"] | None = None,
    p: Float[Tensor, "*batch n"] | None = None,
    q: Float[Tensor, "*batch m"] | None = None,
    *,
    alpha: float | None = None,
    epsilon: float | None = None,
    starts: int = 1,
    max_iterations: int = 200,
    tolerance: float = 1e-9,
    generator: torch.Generator | None = None,
) -> FusedGromov:
    """Return the fused Gromov-Wasserstein value of pairs of spaces, and the plan that reaches it.

    Args:
        C_x, C_y: (..., n, n), (..., m, m) distances within the spaces (or any similarity); need not be symmetric.
        feature_cost: (..., n, m) between the features; None for Gromov-Wasserstein alone.
        p, q: (..., n), (..., m) weights of equal mass, uniform if None. Bins without mass (padding) take no part.
        alpha: from 0 (features alone) to 1 (distances alone); None for 0.5, or 1 without features.
        epsilon: weight of the entropy against p q^T over the mass, as for `sinkhorn`; None for exact plans.
        starts: the number of starts: the product plan (with an epsilon one beside it), then the plan of the features,
            then random plans. The best local minimum is returned.
        max_iterations, tolerance: of each start. It ends when an iteration changes the value by no more than this share
            of it and, with an epsilon, its target promised no more; a `ConvergenceWarning` says where max_iterations
            did not suffice.
        generator: of the random starts.

    Returns:
        A `FusedGromov`, in the promoted dtype. The value is differentiable once in C_x, C_y, feature_cost, p and q. The
        gradients hold at the local minimum; gradients in the weights are centred over all bins.

    Raises:
        TypeError, ValueError: shapes that do not fit, numbers that are not finite or whose squares overflow, alpha
            outside of [0, 1], no feature cost with alpha < 1, weights below 0, masses that differ.
        RuntimeError: if a second derivative is asked for.

    Example:
        >>> x = torch.tensor([[0.0], [1.0], [3.0]])
        >>> D = torch.cdist(x, x)
        >>> solution = fused_gromov(D, D.flip(0, 1), starts=4, generator=torch.Generator().manual_seed(0))
        >>> bool(solution.value < 1e-6)
        True
    """
    alpha = (1.0 if feature_cost is None else 0.5) if alpha is None else alpha
    _check_order(C_x, C_y, feature_cost)
    inputs, dtype = _checked(C_x, C_y, feature_cost, p, q, alpha)
    check_count("starts", starts)
    check_count("max_iterations", max_iterations)
    check_not_negative("tolerance", tolerance)
    if epsilon is not None:
        check_positive("epsilon", epsilon)
    check_no_transform()
    C, D, M, a, b = (t.detach() for t in inputs)
    energy = _Energy(*_centred(C, D, a, b), M, float(alpha))
    plan, value, converged = _best_minimum(energy, a, b, starts, generator, epsilon, max_iterations, tolerance)
    if not bool(converged.all()):
        warnings.warn(
            f"{int((~converged).sum())} of {converged.numel()} fused Gromov problems did not converge: the last of "
            f"{max_iterations} iterations changed the value by more than {tolerance:g} of it, or could have. Raise "
            f"max_iterations{'' if epsilon is None else ' or epsilon'}, or accept a larger tolerance.",
            ConvergenceWarning,
            stacklevel=level_of_the_caller(),
        )
    if makes_graph(*inputs):
        value = _AtLocalMinimum.apply(value, energy, plan, epsilon, *inputs)
    if not bool(value.to(dtype).isfinite().all()):
        raise ValueError(
            f"the value is up to {float(value.detach().abs().max()):.3g}, beyond {dtype}, since it has squares of "
            "distances; rescale them, or pass float64."
        )
    return FusedGromov(value.to(dtype), plan.to(dtype), converged)


class _Energy(NamedTuple):
    C: Tensor
    D: Tensor
    M: Tensor
    alpha: float

    def gradient(self, plan: Tensor) -> Tensor:
        """Return dE/dP (..., n, m), for a plan with any marginals."""
        gradient = (1 - self.alpha) * self.M
        for C, D in ((self.C, self.D), (self.C.mT, self.D.mT)):
            rows, columns = plan.sum(-1, keepdim=True), plan.sum(-2).unsqueeze(-1)
            squares = C.square() @ rows + (D.square() @ columns).mT
            gradient = gradient + self.alpha * (squares - 2 * C @ plan @ D.mT)
        return gradient

    def linear(self, plan: Tensor) -> Tensor:
        return (1 - self.alpha) * (self.M * plan).sum((-2, -1))

    def value(self, plan: Tensor, gradient: Tensor) -> Tensor:
        """Return E (...) at a plan, of which the gradient is known."""
        return (self.linear(plan) + (gradient * plan).sum((-2, -1))) / 2

    def curvature(self, step: Tensor) -> Tensor:
        """Return (...) the c of E(P + t S) = E(P) + b t + c t^2, for a step S between plans."""
        return ((self.gradient(step) * step).sum((-2, -1)) - self.linear(step)) / 2

    def size(self, plan: Tensor) -> Tensor:
        """Return (...) the sum of the terms of E by their size, before they cancel: the rounding of E follows it."""
        rows, columns = plan.sum(-1, keepdim=True), plan.sum(-2).unsqueeze(-1)
        squares = (rows.mT @ self.C.square() @ rows + columns.mT @ self.D.square() @ columns)[..., 0, 0]
        return (1 - self.alpha) * (self.M.abs() * plan).sum((-2, -1)) + self.alpha * squares


def _centred(C: Tensor, D: Tensor, p: Tensor, q: Tensor) -> tuple[Tensor, Tensor]:
    """Return both less the mean between the bins with mass of one of them, the one that more problems share."""
    matrix, weights = (C, p) if C.dim() <= D.dim() else (D, q)
    if matrix.dim() == 2:
        weights = weights.reshape(-1, weights.shape[-1]).sum(0)
    share = weights / weights.sum(-1, keepdim=True).clamp(min=torch.finfo(weights.dtype).tiny)
    centre = (share.unsqueeze(-2) @ matrix @ share.unsqueeze(-1)).detach()
    return C - centre, D - centre


@torch.no_grad()
def _best_minimum(
    energy: _Energy, p: Tensor, q: Tensor, starts: int, generator: torch.Generator | None, epsilon: float | None,
    max_iterations: int, tolerance: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Return the plan, the value, and whether the search converged, of the best of the starts."""
    plans = _starts(energy, p, q, epsilon, starts, generator)
    if epsilon is None:
        find = _descend_by_kernel if may_run_on(energy.C, energy.D, energy.M, p, q) else _descend
        results = [find(energy, plan, p, q, max_iterations, tolerance) for plan in plans]
    else:
        results = [_descend_with_entropy(energy, plan, p, q, epsilon, max_iterations, tolerance) for plan in plans]
    plan, value, converged = functools.reduce(_better, results)
    # Between equal spaces the terms of the value cancel.
    return plan, value.masked_fill((value < 0) & (value >= -ROUNDING * energy.size(plan)), 0.0), converged


def _descend(
    energy: _Energy, plan: Tensor, p: Tensor, q: Tensor, max_iterations: int, tolerance: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the plan, the value and whether the search converged, of one start, with exact steps."""
    mass, has_mass, gradient = p.sum(-1), _product_plan(p, q) > 0, energy.gradient(plan)
    value, rounding = energy.value(plan, gradient), 1e-15 * energy.size(plan)
    done, tries = torch.zeros_like(value, dtype=torch.bool), torch.zeros_like(value, dtype=torch.int64)
    for iteration in range(max_iterations):
        step = solve(p, q, nudged(_from_zero(gradient), tries, has_mass=has_mass)).plan() - plan
        b, c = (gradient * step).sum((-2, -1)), energy.curvature(step)
        limit = tolerance * value.abs() + 4 * rounding
        falls = (-b > limit) | (-(b + c) >= limit)
        t_of_fall = torch.where((c <= 0) | (-b <= limit), 1.0, (-b / (2 * c)).clamp(max=1))
        # Elsewhere the plan is optimal at its gradient, and this target is no better. Another optimal plan may be.
        goes_on = (tries < TRIES) & (iteration + 1 < max_iterations)
        is_another = (b + c <= rounding) & (step.abs().sum((-2, -1)) / 2 > APART * mass)
        t = torch.where(falls, t_of_fall, (goes_on & is_another).to(b.dtype)).masked_fill(done, 0.0)
        plan = plan + t[..., None, None] * step
        gradient = torch.where((t > 0)[..., None, None], energy.gradient(plan), gradient)
        change = b * t + c * t * t
        done, value = done | torch.where(falls, change.abs() <= limit, ~goes_on), value + change
        tries = torch.where(falls, 0, tries + 1)
        if bool(done.all()):
            break
    return plan, energy.value(plan, gradient), done


def _descend_with_entropy(
    energy: _Energy, plan: Tensor, p: Tensor, q: Tensor, epsilon: float, max_iterations: int, tolerance: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the plan, the value and whether the search converged, of one start, with entropic steps."""
    product = _product_plan(p, q)
    gradient, entropy = energy.gradient(plan), _entropy(plan, product, epsilon)
    value = energy.value(plan, gradient) + entropy
    done, rounding = torch.zeros_like(value, dtype=torch.bool), 1e-15 * energy.size(plan)
    for _ in range(max_iterations):
        target = solve(p, q, _from_zero(gradient), epsilon=epsilon).plan()
        step = target - plan
        b, c = (gradient * step).sum((-2, -1)), energy.curvature(step)
        fall = entropy - _entropy(target, product, epsilon) - b
        t = _entropic_step(plan, step, b, c, product, epsilon, where=~done & (c > 0) & (c > fall / 2))
        is_done = done[..., None, None]
        plan = torch.where(is_done, plan, torch.lerp(plan, target, t[..., None, None]))
        gradient, entropy = torch.where(is_done, gradient, energy.gradient(plan)), _entropy(plan, product, epsilon)
        new = energy.value(plan, gradient) + entropy
        limit = tolerance * value.abs() + 4 * rounding
        done, value = done | (torch.maximum((value - new).abs(), fall) <= limit), new
        if bool(done.all()):
            break
    return plan, value, done


def _entropic_step(
    plan: Tensor, step: Tensor, b: Tensor, c: Tensor, product: Tensor, epsilon: float, *, where: Tensor
) -> Tensor:
    """Return t (...): where asked, just before the smallest value on the segment, by bisection; 1 elsewhere."""
    low, high = torch.zeros_like(b), torch.ones_like(b)
    t, is_sought = high, where
    while bool(is_sought.any()):
        ratio = torch.where(product > 0, (plan + t[..., None, None] * step) / product, 1.0).clamp(min=0)
        derivative = b + 2 * c * t + epsilon * torch.xlogy(step, ratio).sum((-2, -1))
        low, high = torch.where(derivative <= 0, t, low), torch.where(derivative <= 0, high, t)
        is_sought = is_sought & (high - low > _STEP_PRECISION * high) & (high > _SMALLEST_STEP)
        t = (low + high) / 2
    return torch.where(where, low, 1.0)


def _descend_by_kernel(
    energy: _Energy, plan: Tensor, p: Tensor, q: Tensor, max_iterations: int, tolerance: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Do the same as `_descend`, on a CPU, by the numba kernel."""
    from otloss._numba.compile import addresses_of
    from otloss.solvers.gromov.descent_numba import (
        Problems,
        allocate_results,
        build_solver_calls,
        descend_problems,
        scratch,
    )

    batch, (n, m) = p.shape[:-1], plan.shape[-2:]
    count = batch.numel()
    matrices = [
        (t if t.dim() == 2 else t.expand(*batch, *t.shape[-2:])).reshape(-1, *t.shape[-2:]).contiguous().numpy()
        for t in (energy.C, energy.D, energy.M)
    ]
    weights = [t.reshape(count, t.shape[-1]).contiguous().numpy() for t in (p, q)]
    plans = plan.expand(*batch, n, m).reshape(count, n, m).clone()
    values, converged = (torch.from_numpy(array) for array in allocate_results(count))
    problems = Problems(*matrices, *weights)
    arguments = (
        problems, energy.alpha, max_iterations, tolerance, plans.numpy(), values.numpy(), converged.numpy(),
    )  # fmt: skip
    solver = addresses_of(
        descend_problems,
        lambda addresses: (descend_problems, (np.zeros(3, np.int64), addresses, *arguments, *scratch(1, 1))),
        build_solver_calls,
    )
    work = Work("steps of Frank and Wolfe", count * n * m * (n + m))
    run_on_threads(descend_problems, count, (solver, *arguments), lambda: scratch(n, m), work=work)
    return plans.reshape(*batch, n, m), values.reshape(batch), converged.reshape(batch)


def _from_zero(cost: Tensor) -> Tensor:
    """Return the cost minus its smallest entry. Solvers take no negative costs, and the optimal plan stays the same."""
    return cost - cost.amin((-2, -1), keepdim=True)


def _product_plan(p: Tensor, q: Tensor) -> Tensor:
    mass = p.sum(-1, keepdim=True).clamp(min=torch.finfo(p.dtype).tiny)
    return p.unsqueeze(-1) * (q / mass).unsqueeze(-2)


def _entropy(plan: Tensor, product: Tensor, epsilon: float) -> Tensor:
    return epsilon * torch.xlogy(plan, torch.where(product > 0, plan / product, 1.0)).sum((-2, -1))


def _starts(
    energy: _Energy, p: Tensor, q: Tensor, epsilon: float | None, count: int, generator: torch.Generator | None
) -> list[Tensor]:
    """Return the plans to start from; with an epsilon the first is beside the product plan.

    Steps from the product plan of symmetric spaces keep the symmetry, also where it is a saddle.
    """
    plans = [_product_plan(p, q)]
    if epsilon is not None:
        number = torch.zeros((), dtype=torch.int64, device=p.device)
        costs = direction_of_costs(p.shape[-1], q.shape[-1], number).expand(plans[0].shape)
        plans[0] = torch.lerp(plans[0], solve(p, q, costs, epsilon=0.1).plan(), _BESIDE)
    if count > 1:
        plans.append(solve(p, q, _from_zero(energy.M.expand(*p.shape, q.shape[-1]))).plan())
    shape = (*p.shape, q.shape[-1])
    for _ in range(count - 2):
        costs = torch.rand(shape, dtype=p.dtype, generator=generator, device="cpu").to(p.device)
        plans.append(solve(p, q, costs).plan())
    return plans


def _better(one: tuple[Tensor, Tensor, Tensor], other: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    is_lower = other[1] < one[1]
    plan = torch.where(is_lower[..., None, None], other[0], one[0])
    return plan, torch.where(is_lower, other[1], one[1]), torch.where(is_lower, other[2], one[2])


class _AtLocalMinimum(torch.autograd.Function):
    """The value, with its derivatives at a local minimum."""

    @staticmethod
    def forward(
        ctx: Any, value: Tensor, energy: _Energy, plan: Tensor, epsilon: float | None, *inputs: Tensor
    ) -> Tensor:
        ctx.save_for_backward(plan, *inputs)
        ctx.save_for_forward(plan, *inputs)
        ctx.energy, ctx.epsilon = energy, epsilon
        return value.clone()

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        plan, *inputs = ctx.saved_tensors
        needed = ctx.needs_input_grad[4:]
        with torch.no_grad():
            derivatives = _derivatives(ctx.energy, plan, inputs[3:] if any(needed[3:]) else None, ctx.epsilon)
        release(ctx, "energy")
        message = (
            "a second derivative of fused_gromov was asked for, which is differentiable once: the gradients are those "
            "at a fixed plan; drop create_graph=True."
        )
        gradients: list[Tensor | None] = [None] * 4
        for derivative, tensor, is_needed in zip(derivatives, inputs, needed, strict=True):
            if derivative is None or not is_needed:
                gradients.append(None)
                continue
            scale = upstream[0].detach()[(..., *[None] * (derivative.dim() - upstream[0].dim()))]
            gradient = (scale * derivative).sum_to_size(tensor.shape)
            gradients.append(once_only(gradient, message, upstream[0], *inputs))
        return tuple(gradients)

    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor | None) -> Tensor:
        plan, *inputs = ctx.saved_tensors
        by_weights = any(t is not None for t in tangents[7:])
        total = plan.new_zeros(plan.shape[:-2])
        for derivative, tangent in zip(
            _derivatives(ctx.energy, plan, inputs[3:] if by_weights else None, ctx.epsilon), tangents[4:], strict=True
        ):
            if derivative is not None and tangent is not None:
                total = total + (derivative * tangent).flatten(len(total.shape)).sum(-1)
        return total


def _derivatives(
    energy: _Energy, plan: Tensor, weights: list[Tensor] | None, epsilon: float | None
) -> tuple[Tensor | None, ...]:
    """Return the derivatives in C, D, M, and in p and q if the weights are given."""
    C, D, alpha = energy.C, energy.D, energy.alpha
    rows, columns = plan.sum(-1, keepdim=True), plan.sum(-2, keepdim=True)
    f, g = None, None
    if weights is not None:
        p, q = (w.detach() for w in weights)
        f, g = solve(p, q, _from_zero(energy.gradient(plan)), epsilon=epsilon).potentials
    return (
        2 * alpha * (C * rows * rows.mT - plan @ D @ plan.mT),
        2 * alpha * (D * columns.mT * columns - plan.mT @ C @ plan),
        (1 - alpha) * plan,
        f,
        g,
    )


def _check_order(C: Any, D: Any, M: Any) -> None:
    """Raise where the arguments stand in the order of POT's functions."""
    if not all(isinstance(t, Tensor) and t.dim() for t in (C, D, M)):
        return
    shapes = ", ".join(str(tuple(t.shape)) for t in (C, D, M))
    if M.dim() == 1:
        raise ValueError(
            f"the arguments have the shapes {shapes}: weights stand third, as in POT's "
            "gromov_wasserstein(C1, C2, p, q); expected fused_gromov(C1, C2, p=p, q=q)."
        )
    if C.shape[-2:] == (D.shape[-1], M.shape[-1]) != (C.shape[-1], C.shape[-1]):
        raise ValueError(
            f"the arguments have the shapes {shapes}: the feature cost stands first, as in POT's "
            "fused_gromov_wasserstein(M, C1, C2, p, q); expected fused_gromov(C1, C2, M, p, q)."
        )


def _checked(
    C: Any, D: Any, M: Any, p: Any, q: Any, alpha: Any
) -> tuple[tuple[Tensor, Tensor, Tensor, Tensor, Tensor], torch.dtype]:
    """Return the inputs in float64, the weights expanded to the batch and of equal mass; and the promoted dtype."""
    for name, square in (("C_x", C), ("C_y", D)):
        check_floating(name, square)
        if square.dim() < 2 or square.shape[-1] != square.shape[-2] or square.shape[-1] == 0:
            raise ValueError(
                f"{name} has shape {tuple(square.shape)}, expected (..., n, n) with n >= 1: distances within a space."
            )
    n, m = C.shape[-1], D.shape[-1]
    if not 0 <= check_number("alpha", alpha) <= 1:
        raise ValueError(f"alpha is {alpha}, expected a number from 0 (features alone) to 1 (distances alone).")
    others = [check_floating(name, t) for name, t in (("feature_cost", M), ("p", p), ("q", q)) if t is not None]
    dtype = functools.reduce(torch.promote_types, (t.dtype for t in (C, D, *others)))
    if M is None:
        if alpha < 1:
            raise ValueError(f"alpha is {alpha} without a feature_cost; give one, or alpha=1.0 for distances alone.")
        M = C.new_zeros(n, m)
    if M.shape[-2:] != (n, m):
        raise ValueError(f"feature_cost has shape {tuple(M.shape)}, expected (..., {n}, {m}).")
    p, q = (
        torch.full((size,), 1 / size, dtype=torch.float64, device=C.device) if w is None else w
        for w, size in ((p, n), (q, m))
    )
    pair = histogram_pair(p, q, torch.float64)
    check_last_axis("p", p, n)
    check_last_axis("q", q, m)
    batch = check_broadcast(
        C_x=C.shape[:-2], C_y=D.shape[:-2], feature_cost=M.shape[:-2], p=p.shape[:-1], q=q.shape[:-1]
    )
    inputs = (C.double(), D.double(), M.double(), pair.p.expand(*batch, n), pair.q.expand(*batch, m))
    _check_range(*inputs[:4])
    return inputs, dtype


def _check_range(C: Tensor, D: Tensor, M: Tensor, p: Tensor) -> None:
    """Raise ValueError for a NaN or an infinity, or if squares of the numbers, or sums of squares, may overflow."""
    with torch.no_grad():
        c, d, cost = (float(t.abs().amax()) if t.numel() else 0.0 for t in (C, D, M))
        mass = max(1.0, float(p.sum()))
    largest = cost + 4 * (c + d) * (c + d)
    if sum(M.shape[-2:]) * mass * mass * largest < 1e300:  # the solver adds some of these numbers
        return
    for name, tensor in (("C_x", C), ("C_y", D), ("feature_cost", M)):
        check_finite(name, tensor)
    raise ValueError(
        f"C_x, C_y and feature_cost hold numbers of up to {c:.3g}, {d:.3g} and {cost:.3g}, for masses of up to "
        f"{mass:.3g}: sums of their squares overflow float64. Rescale them."
    )
