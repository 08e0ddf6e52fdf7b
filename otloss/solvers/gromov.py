"""Fused Gromov-Wasserstein: transport between two spaces that are known by distances within each, and by features.

With C and D the distances within the two spaces and M the cost between their features,

    E(P) = (1 - alpha) <M, P> + alpha sum_ijkl (C_ik - D_jl)^2 P_ij P_kl,     P 1 = p,  P^T 1 = q

For marginals that are held the square opens into `C^2 p 1^T + 1 (D^2 q)^T - 2 C P D^T`, so that a gradient costs two
products of matrices. E is not convex: what is found is a local minimum, the best of several starts. Each start goes by
conditional gradients: the plan of transport at the cost `grad E(P)`, and an exact search on the segment to it. With an
epsilon, `epsilon KL(P | p q^T)` is added, and P is the entropic plan at the cost `grad E(P)` of the one before it.

At a local minimum, P is an optimal plan at the cost G = grad E(P), with potentials f and g, so that

    dE/dp = f,   dE/dq = g,   dE/dM = (1 - alpha) P,   and dE/dC, dE/dD of the formula at fixed P

Source: T. Vayer et al., Optimal Transport for structured data with application on graphs, ICML 2019.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from otloss._checks import check_broadcast, check_finite, check_floating
from otloss._kernels import may_run_on
from otloss.costs.cost import makes_graph
from otloss.solvers.solve import solve


class FusedGromov(NamedTuple):
    """What `fused_gromov` found.

    Attributes:
        value: (...), E at the plan, with the entropy where there is an epsilon; differentiable.
        plan: (..., n, m), without a graph.
        converged: (...), whether the last step changed the value by no more than the tolerance.
    """

    value: Float[Tensor, "*batch"]
    plan: Float[Tensor, "*batch n m"]
    converged: Tensor


def fused_gromov(
    C_x: Float[Tensor, "*batch n n"],
    C_y: Float[Tensor, "*batch m m"],
    feature_cost: Float[Tensor, "*batch n m"] | None = None,
    p: Float[Tensor, "*batch n"] | None = None,
    q: Float[Tensor, "*batch m"] | None = None,
    *,
    alpha: float = 0.5,
    epsilon: float | None = None,
    starts: int = 1,
    max_iterations: int = 200,
    tolerance: float = 1e-9,
    generator: torch.Generator | None = None,
) -> FusedGromov:
    """Return the fused Gromov-Wasserstein value of pairs of spaces, and the plan that reaches it.

    Args:
        C_x, C_y: (..., n, n), (..., m, m) distances within the spaces (or any similarity); need not be symmetric.
        feature_cost: (..., n, m) between the features; None for Gromov-Wasserstein alone, with alpha = 1.
        p, q: (..., n), (..., m) weights of equal mass, uniform where None. Bins without mass (padding) take no part.
        alpha: from 0 (features alone) to 1 (distances alone).
        epsilon: weight of the entropy; None for none.
        starts: the product plan, the plan of the features, and then random ones; the best of them is returned.
        max_iterations, tolerance: of each start; the latter relative to the value.
        generator: of the random starts.

    Returns:
        A `FusedGromov`. The value is differentiable once in C_x, C_y, feature_cost, p and q (at the local minimum that
        was found; centred in the weights).

    Raises:
        TypeError, ValueError: shapes that do not fit, numbers that are not finite, alpha outside of [0, 1], no feature
            cost with alpha < 1, masses that differ.

    Example:
        >>> x = torch.tensor([[0.0], [1.0], [3.0]])
        >>> D = torch.cdist(x, x)
        >>> found = fused_gromov(D, D.flip(0, 1), alpha=1.0, starts=4, generator=torch.Generator().manual_seed(0))
        >>> bool(found.value < 1e-6)
        True
    """
    C, D, M, p, q = _checked(C_x, C_y, feature_cost, p, q, alpha)
    if starts < 1 or max_iterations < 1:
        raise ValueError(f"starts is {starts} and max_iterations {max_iterations}, expected 1 or more.")
    energy = _Energy(C.detach().double(), D.detach().double(), M.detach().double(), float(alpha))
    a, b = p.detach().double(), q.detach().double()
    with torch.no_grad():
        compiled = epsilon is None and may_run_on(C, D, M, p, q)
        found = [
            _compiled_descent(energy, plan, a, b, max_iterations, tolerance)
            if compiled
            else _descend(energy, plan, a, b, epsilon, max_iterations, tolerance)
            for plan in _starts(energy, a, b, starts, generator)
        ]
        values = torch.stack([value for _, value, _ in found])
        best = values.argmin(0)
        plan = _picked(torch.stack([plan for plan, _, _ in found]), best)
        converged = _picked(torch.stack([done for _, _, done in found]), best)
    value = values.amin(0)
    if makes_graph(C, D, M, p, q):
        value = _value(C, D, M, p, q, alpha, epsilon, plan)
    return FusedGromov(value.to(C_x.dtype), plan.to(C_x.dtype), converged)


class _Energy(NamedTuple):
    C: Tensor
    D: Tensor
    M: Tensor
    alpha: float

    def gradient(self, plan: Tensor) -> Tensor:
        """(..., n, m): what E changes by per mass, at a plan with any marginals."""
        found = (1 - self.alpha) * self.M
        for C, D in ((self.C, self.D), (self.C.mT, self.D.mT)):
            rows, columns = plan.sum(-1, keepdim=True), plan.sum(-2).unsqueeze(-1)
            squares = C.square() @ rows + (D.square() @ columns).mT
            found = found + self.alpha * (squares - 2 * C @ plan @ D.mT)
        return found

    def value(self, plan: Tensor) -> Tensor:
        linear = (1 - self.alpha) * (self.M * plan).sum((-2, -1))
        return (linear + (self.gradient(plan) * plan).sum((-2, -1))) / 2


def _descend(
    energy: _Energy, plan: Tensor, p: Tensor, q: Tensor, epsilon: float | None, most: int, tolerance: float
) -> tuple[Tensor, Tensor, Tensor]:
    value = energy.value(plan) + _entropy(plan, p, q, epsilon)
    done = torch.zeros_like(value, dtype=torch.bool)
    for _ in range(most):
        gradient = energy.gradient(plan)
        target = solve(p, q, _from_zero(gradient), epsilon=epsilon).plan()
        if epsilon is None:
            step = target - plan
            # E on the segment is a + b t + c t^2, whose least point in [0, 1] is exact.
            b = (gradient * step).sum((-2, -1))
            c = energy.value(target) - value - b
            t = torch.where(c > 0, (-b / (2 * c)).clamp(0, 1), (b + c < 0).to(b.dtype))
            target = plan + t[..., None, None] * step
        new = energy.value(target) + _entropy(target, p, q, epsilon)
        plan = torch.where(done[..., None, None], plan, target)
        done = done | ((value - new).abs() <= tolerance * new.abs() + 1e-15)
        value = torch.where(done, torch.minimum(value, new), new)
        if bool(done.all()):
            break
    return plan, energy.value(plan) + _entropy(plan, p, q, epsilon), done


def _compiled_descent(
    energy: _Energy, plan: Tensor, p: Tensor, q: Tensor, most: int, tolerance: float
) -> tuple[Tensor, Tensor, Tensor]:
    """`_descend` without an epsilon, on a CPU."""
    from otloss._kernels._threads import ENTRIES, run_on_threads
    from otloss._kernels.gromov import descend_problems, scratch

    batch, (n, m) = p.shape[:-1], plan.shape[-2:]
    count = batch.numel()
    matrices = [
        (t if t.dim() == 2 else t.expand(*batch, *t.shape[-2:])).reshape(-1, *t.shape[-2:]).contiguous().numpy()
        for t in (energy.C, energy.D, energy.M)
    ]
    weights = [t.reshape(count, t.shape[-1]).contiguous().numpy() for t in (p, q)]
    plans = plan.expand(*batch, n, m).reshape(count, n, m).clone()
    values, done = p.new_empty(count), torch.empty(count, dtype=torch.bool)
    arguments = (*matrices, *weights, energy.alpha, most, tolerance, plans.numpy(), values.numpy(), done.numpy())
    one_thread = count * n * m * (n + m) < ENTRIES
    run_on_threads(descend_problems, count, arguments, lambda: scratch(n, m), one_thread=one_thread)
    return plans.reshape(*batch, n, m), values.reshape(batch), done.reshape(batch)


def _from_zero(cost: Tensor) -> Tensor:
    """The cost less its least entry, which moves no plan: costs of solvers are not negative."""
    return cost - cost.amin((-2, -1), keepdim=True)


def _entropy(plan: Tensor, p: Tensor, q: Tensor, epsilon: float | None) -> Tensor | float:
    if epsilon is None:
        return 0.0
    product = p.unsqueeze(-1) * q.unsqueeze(-2)
    return epsilon * torch.xlogy(plan, torch.where(product > 0, plan / product, 1.0)).sum((-2, -1))


def _starts(energy: _Energy, p: Tensor, q: Tensor, count: int, generator: torch.Generator | None) -> list[Tensor]:
    mass = p.sum(-1)[..., None, None].clamp(min=torch.finfo(p.dtype).tiny)
    plans = [p.unsqueeze(-1) * q.unsqueeze(-2) / mass]
    if count > 1:
        plans.append(solve(p, q, _from_zero(energy.M.expand(*p.shape, q.shape[-1]))).plan())
    shape = (*p.shape, q.shape[-1])
    for _ in range(count - 2):
        costs = torch.rand(shape, dtype=p.dtype, generator=generator, device="cpu").to(p.device)
        plans.append(solve(p, q, costs).plan())
    return plans


def _picked(stacked: Tensor, best: Tensor) -> Tensor:
    index = best.reshape(1, *best.shape, *[1] * (stacked.dim() - 1 - best.dim()))
    return stacked.gather(0, index.expand(1, *stacked.shape[1:])).squeeze(0)


def _value(
    C: Tensor, D: Tensor, M: Tensor, p: Tensor, q: Tensor, alpha: float, epsilon: float | None, plan: Tensor
) -> Tensor:
    """E at the plan, with the derivatives that hold at a local minimum."""
    energy = _Energy(C.double(), D.double(), M.double(), alpha)
    value = energy.value(plan) + _entropy(plan, p.detach().double(), q.detach().double(), epsilon)
    if torch.is_grad_enabled() and (p.requires_grad or q.requires_grad):
        with torch.no_grad():
            cost = energy.gradient(plan)
            f, g = solve(p.detach().double(), q.detach().double(), _from_zero(cost), epsilon=epsilon).potentials
        for weights, potential in ((p, f), (q, g)):
            centred = potential - potential.mean(-1, keepdim=True)
            value = value + (centred * (weights.double() - weights.detach().double())).sum(-1)
    return value


def _checked(
    C: Tensor, D: Tensor, M: Tensor | None, p: Tensor | None, q: Tensor | None, alpha: float
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    for name, square in (("C_x", C), ("C_y", D)):
        check_finite(name, check_floating(name, square))
        if square.dim() < 2 or square.shape[-1] != square.shape[-2]:
            raise ValueError(f"{name} has shape {tuple(square.shape)}, expected (..., n, n): distances within a space.")
    n, m = C.shape[-1], D.shape[-1]
    if not 0 <= alpha <= 1:
        raise ValueError(f"alpha is {alpha}, expected a number from 0 (features alone) to 1 (distances alone).")
    if M is None:
        if alpha < 1:
            raise ValueError(f"alpha is {alpha} without a feature_cost; give one, or alpha=1.0 for distances alone.")
        M = C.new_zeros(n, m)
    check_finite("feature_cost", check_floating("feature_cost", M))
    if M.shape[-2:] != (n, m):
        raise ValueError(f"feature_cost has shape {tuple(M.shape)}, expected (..., {n}, {m}).")
    p = C.new_full((n,), 1 / n) if p is None else check_floating("p", p)
    q = C.new_full((m,), 1 / m) if q is None else check_floating("q", q)
    if p.shape[-1] != n or q.shape[-1] != m:
        raise ValueError(f"p and q have {p.shape[-1]} and {q.shape[-1]} bins, expected {n} and {m}.")
    batch = check_broadcast(
        C_x=C.shape[:-2], C_y=D.shape[:-2], feature_cost=M.shape[:-2], p=p.shape[:-1], q=q.shape[:-1]
    )
    return C, D, M, p.expand(*batch, n), q.expand(*batch, m)
