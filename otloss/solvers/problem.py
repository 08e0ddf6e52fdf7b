"""Pose: what the user gave becomes one checked `Problem`, here and nowhere else.

    min over P >= 0 of  <C, P> + epsilon KL(P | p q^T / M)    and  P 1 = p, P^T 1 = q           (balanced)
                                                  or  P 1 <= p, P^T 1 <= q, sum P = mass         (partial)
                                                  or  + rho KL(P 1 | p) + rho KL(P^T 1 | q)      (unbalanced)

For a mass M of p and q the balanced entropy is that against p q^T / M: the value is M times that of p / M and q / M,
and a mass that is one up to rounding adds nothing, however large epsilon is. Exact transport is epsilon = 0. A matrix
may have negative entries and +inf; `otloss.solvers.reductions` turns such problems, and those of a part of the mass,
into balanced ones with costs that are finite and at least 0.

Balanced transport needs equal masses, and float sums never agree to the last bit. Masses that agree within
`MASS_TOLERANCE` are rescaled to their mean, both sides alike, so that d(p, q) = d(q, p); larger differences are an
error. The value is defined on pairs of equal mass only, so its weight gradient is defined up to a constant (which a
softmax removes). `centre_gradient` gives the one with mean zero over the bins, so that functions and solvers agree.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, fields
from functools import cached_property
from numbers import Real
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from otloss._checks import (
    check_broadcast,
    check_finite,
    check_floating,
    check_number,
    check_positive,
    check_potentials,
    needs_torch,
)
from otloss.costs import Cost, as_cost, cost_between
from otloss.costs.dense import SignedCost, posed_cost

GRADS = ("envelope", "implicit")
IMPLS = ("auto", "compiled", "torch")
RELATIVE_TO = (None, "mean_cost")
# Sum of the errors of both marginals relative to the mass: in float32 about 100 roundings.
DEFAULT_TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-8}
# Relative difference of the two masses that rounding explains: entries of a normalised histogram carry one rounding
# each, and a histogram normalised in its own dtype carries that of its sum too. Histograms in float64 were often
# normalised in float32, which leaves 1e-7 or so. Normalising in 16 bits leaves as much as a mistake would: cast to
# float32, such histograms have to be normalised again.
MASS_TOLERANCE = {torch.bfloat16: 3e-2, torch.float16: 4e-3, torch.float32: 1e-5, torch.float64: 1e-6}
MASS_ROUNDING = 1e-5  # relative, by which the mass to be moved may exceed that of a side


class SmallEpsilonError(ValueError):
    """Epsilon is too small for the arithmetic; `least` is the least one that would do."""

    def __init__(self, message: str, least: float) -> None:
        super().__init__(message)
        self.least = least


@dataclass(frozen=True)
class Settings:
    """The options of `sinkhorn`, `sinkhorn_divergence` and `solve`, in their order and checked."""

    epsilon_relative_to: str | None = None
    marginal_penalty: float | None = None
    grad: str = "envelope"
    tolerance: float | None = None
    max_iterations: int = 10_000
    start: tuple[Tensor, Tensor] | None = None
    impl: str = "auto"

    def __post_init__(self) -> None:
        for name, allowed in (("grad", GRADS), ("impl", IMPLS), ("epsilon_relative_to", RELATIVE_TO)):
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name} is {getattr(self, name)!r}, expected one of {allowed}.")
        for name in ("marginal_penalty", "tolerance"):
            number = getattr(self, name)
            if number is None:
                continue
            if isinstance(number, bool) or not isinstance(number, Real):
                raise TypeError(f"{name} is a {type(number).__name__}, expected a number; a tensor gives .item().")
            object.__setattr__(self, name, float(check_positive(name, float(number))))
        if isinstance(self.max_iterations, bool) or not isinstance(self.max_iterations, int) or self.max_iterations < 1:
            raise ValueError(f"max_iterations is {self.max_iterations!r}, expected a whole number of at least 1.")

    @cached_property
    def changed(self) -> set[str]:
        """The names of the options that differ from their defaults."""
        return {field.name for field in fields(self) if getattr(self, field.name) != field.default}


@dataclass(frozen=True)
class Problem:
    """A batch of transport problems in one arithmetic dtype.

    Attributes:
        p, q: (..., n), (..., m), expanded to the whole batch, with their graphs; of equal masses if balanced.
        cost: of the same dtype, with its graph.
        epsilon: (...), above 0, with a graph where it follows the cost; 0 for exact transport.
        is_exact: whether epsilon is 0.
        marginal_penalty: the price of a unit of mass that appears or vanishes, in units of the cost, rho in formulas;
            None holds the marginals.
        mass: (...), the amount that is moved, with its graph; None for all.
        start: potentials (f, g) of a similar problem, of the whole batch and without a graph, or None.
        has_empty_side: whether p or q holds no mass in a problem.
        dtype: of the answer; the arithmetic is in that of p, q and the cost.
    """

    p: Float[Tensor, "*batch n"]
    q: Float[Tensor, "*batch m"]
    cost: Cost
    epsilon: Float[Tensor, "*batch"]
    dtype: torch.dtype
    is_exact: bool = False
    marginal_penalty: float | None = None
    mass: Float[Tensor, "*batch"] | None = None
    start: tuple[Float[Tensor, "*batch n"], Float[Tensor, "*batch m"]] | None = None
    has_empty_side: bool = False

    @property
    def batch(self) -> torch.Size:
        return self.p.shape[:-1]

    @cached_property
    def largest_cost(self) -> Float[Tensor, "*batch"]:
        """The largest cost or a bound of it, per matrix and without a graph."""
        return self.cost.largest()

    @property
    def inputs(self) -> tuple[Tensor, ...]:
        """The tensors that a value depends on: p, q, epsilon, and those of the cost that require a gradient."""
        return (self.p, self.q, self.epsilon, *self.cost.parameters())


def pose(p: Any, q: Any, cost: Any, *, epsilon: Any, mass: Any = None, settings: Settings) -> Problem:
    """Check everything, fill in uniform weights, and bring it to one dtype and one batch shape.

    Args:
        p, q, cost, epsilon, mass: as for `otloss.solve`.

    Raises:
        TypeError, ValueError: as `otloss.solve`.
    """
    _check_combination(epsilon, mass, settings)
    balanced = mass is None and settings.marginal_penalty is None
    pair, fitted = pair_and_cost(p, q, cost, balanced=balanced, signed=True)
    (n, m), batch = fitted.shape, pair.p.shape[:-1]
    is_exact = epsilon is None
    width = pair.p.new_zeros(()) if is_exact else _checked_epsilon(epsilon, fitted, settings)
    moved = None if mass is None else _checked_mass(mass, pair.p, pair.q)
    shapes: dict[str, Any] = {"p": batch, "q": pair.q.shape[:-1], "cost": fitted.batch_shape, "epsilon": width.shape}
    if moved is not None:
        shapes["mass"] = moved.shape
    batch = check_broadcast(**shapes)
    start = None
    if settings.start is not None:
        f, g = check_potentials(settings.start, (n, m), batch)
        start = f.detach().expand(*batch, n), g.detach().expand(*batch, m)
    return Problem(
        p=pair.p.expand(*batch, n),
        q=pair.q.expand(*batch, m),
        cost=fitted,
        epsilon=width.expand(batch),
        dtype=pair.dtype,
        is_exact=is_exact,
        marginal_penalty=settings.marginal_penalty,
        mass=moved if moved is None else moved.expand(batch),
        start=start,
        has_empty_side=pair.has_empty_side,
    )


def tolerance_of(problem: Problem, settings: Settings) -> float:
    """Return the tolerance that was asked for, or the default of the answer's dtype."""
    return settings.tolerance or DEFAULT_TOLERANCE[torch.promote_types(problem.dtype, torch.float32)]


def has_float64(device: torch.device) -> bool:
    """Whether there are float64 numbers on this device."""
    return device.type != "mps"


def of_equal_mass(p: Tensor, q: Tensor) -> Tensor:
    """Return q for masses that agreed up to the rounding of a narrower dtype."""
    mass_p, mass_q = (w.detach().sum(-1, keepdim=True) for w in (p, q))
    return q * torch.where(mass_q > 0, mass_p / mass_q.masked_fill(mass_q == 0, 1.0), 1.0)


def _check_combination(epsilon: Any, mass: Any, settings: Settings) -> None:
    if epsilon is None:
        not_taken = sorted(settings.changed - {"start"})
        if not_taken:
            raise ValueError(
                f"exact transport (epsilon=None) does not take {not_taken}; give an epsilon, or drop them."
            )
    if mass is not None and settings.start is not None:
        raise ValueError("start is given with mass=, expected none: the dummy bins have potentials of their own.")
    if mass is not None and settings.marginal_penalty is not None:
        raise ValueError("mass and marginal_penalty are both given, expected one: both let mass stay where it is.")


def _checked_epsilon(epsilon: Any, cost: Cost, settings: Settings) -> Tensor:
    if isinstance(epsilon, Tensor):
        check_floating("epsilon", epsilon)
        bad = ~((epsilon > 0) & (epsilon < torch.inf))
        if bad.any():
            raise ValueError(
                f"epsilon holds {float(epsilon.detach()[bad][0])}, expected finite numbers above 0; "
                "solve(..., epsilon=None) is exact transport."
            )
        width = epsilon.to(cost.device, cost.dtype)
        least = float(epsilon.detach().min()) if epsilon.numel() else torch.inf
    else:
        if isinstance(epsilon, bool) or not isinstance(epsilon, Real):
            raise TypeError(f"epsilon is a {type(epsilon).__name__}, expected a number or a tensor of one per problem.")
        least = float(check_positive("epsilon", float(epsilon)))
        width = torch.tensor(least, dtype=cost.dtype, device=cost.device)
    tiny = torch.finfo(cost.dtype).tiny
    if least < tiny:
        raise SmallEpsilonError(
            f"epsilon is {least:.3g}, expected at least {tiny:.3g}, the least normal number of {cost.dtype}; rescale "
            "the costs and epsilon alike.",
            least=tiny,
        )
    if settings.epsilon_relative_to is None:
        return width
    if isinstance(cost, SignedCost):
        raise ValueError(
            "the cost matrix has negative or infinite entries, and the mean of those is no scale; give epsilon itself "
            "in place of epsilon_relative_to."
        )
    m = cost.shape[1]
    mean = cost.apply(torch.full((m,), 1 / m, dtype=cost.dtype, device=cost.device)).mean(-1)
    if not (mean > 0).all():
        raise ValueError('the mean cost is 0, and epsilon_relative_to="mean_cost" asks for a share of it.')
    return width * mean


def _checked_mass(mass: Any, p: Tensor, q: Tensor) -> Tensor:
    wide = torch.float64 if has_float64(p.device) else p.dtype
    if isinstance(mass, Tensor):
        moved = check_floating("mass", mass).to(p.device, wide)
    else:
        moved = torch.tensor(float(check_number("mass", mass)), dtype=wide, device=p.device)
    least = torch.minimum(p.detach().to(wide).sum(-1), q.detach().to(wide).sum(-1))
    check_broadcast(p=p.shape[:-1], q=q.shape[:-1], mass=moved.shape)
    bad = ~((moved.detach() >= 0) & (moved.detach() <= least * (1 + MASS_ROUNDING)))
    if bad.any():
        got, most = (float(t.expand(bad.shape)[bad][0]) for t in (moved.detach(), least))
        raise ValueError(
            f"mass is {got:.6g}, expected 0 to {most:.6g}, the lesser of the masses of p and q; it is an amount: a "
            "share s of p is s * p.sum(-1)."
        )
    return moved


# ---- pairs of histograms ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class HistogramPair:
    """Two histograms in the arithmetic dtype with equal masses, and the dtype that the answer takes.

    Attributes:
        p: (..., n).
        q: (..., m), the leading axes broadcast against those of p.
        dtype: the promoted dtype of the inputs.
        has_empty_side: whether a histogram holds no mass.
    """

    p: Float[Tensor, "*batch n"]
    q: Float[Tensor, "*batch m"]
    dtype: torch.dtype
    has_empty_side: bool = False

    @property
    def mass(self) -> Float[Tensor, "*batch"]:
        """The mean of both masses, without a graph."""
        mass_p, mass_q = (w.detach().sum(-1, dtype=torch.float64) for w in (self.p, self.q))
        return ((mass_p + mass_q) / 2).to(self.p.dtype)


def histogram_pair(p: Any, q: Any, *others: torch.dtype, balanced: bool = True) -> HistogramPair:
    """Check, promote and balance `p` and `q`; `others` are dtypes of further inputs that take part in the promotion.

    Not balanced, they keep their own masses, and their gradients are not centred: every mass has a value then.

    Raises:
        TypeError: if p or q is not a floating tensor.
        ValueError: if an entry is NaN, infinite or negative, if the masses differ by more than `MASS_TOLERANCE`,
            or if the batch axes or the devices do not fit.
    """
    (mass_p, mass_q), has_empty_side = _checked_masses(p, q, ("p", "q"), balanced=balanced)
    dtype = functools.reduce(torch.promote_types, (p.dtype, q.dtype, *others))
    arithmetic = torch.promote_types(dtype, torch.float32)
    if not balanced:
        return HistogramPair(p.to(arithmetic), q.to(arithmetic), dtype, has_empty_side)
    of_p, of_q = (mass_p, mass_q) if mass_p.dim() or mass_q.dim() else (mass_p.item(), mass_q.item())  # as below
    both: Any = (of_p + of_q) / 2
    return HistogramPair(
        p=centre_gradient(_rescaled(p, of_p, both, arithmetic, has_empty_side)),
        q=centre_gradient(_rescaled(q, of_q, both, arithmetic, has_empty_side)),
        dtype=dtype,
        has_empty_side=has_empty_side,
    )


def check_masses(
    p: Any, q: Any, names: tuple[str, str] = ("p", "q"), *, balanced: bool = True, hint: str = ""
) -> tuple[Tensor, Tensor]:
    """Return both masses (...); `hint` ends the message where they differ. Raises as `histogram_pair`."""
    return _checked_masses(p, q, names, balanced=balanced, hint=hint)[0]


def _checked_masses(
    p: Any, q: Any, names: tuple[str, str], *, balanced: bool, hint: str = ""
) -> tuple[tuple[Tensor, Tensor], bool]:
    """Return both masses, and whether one of them is 0."""
    masses = _mass(names[0], p), _mass(names[1], q)
    if p.device != q.device:
        raise ValueError(
            f"{names[0]} is on {p.device} and {names[1]} on {q.device}, expected one device; move one with .to()."
        )
    check_broadcast(**{names[0]: p.shape[:-1], names[1]: q.shape[:-1]})
    tolerance = max(MASS_TOLERANCE.get(t.dtype, 0.0) for t in (p, q)) if balanced else torch.inf
    # Numbers are read one by one: for a single problem a comparison by torch takes longer.
    if masses[0].numel() and masses[1].numel():
        ratios = masses[0] / masses[1]
        least, largest = (ratio.item() for ratio in (torch.aminmax(ratios) if ratios.dim() else (ratios, ratios)))
        is_equal = least >= 1 - tolerance and largest * (1 - tolerance) <= 1  # not NaN, and then neither mass is 0
        if is_equal and least > 0 and largest < torch.inf and all(w.detach().amin().item() >= 0 for w in (p, q)):
            return masses, False
    for name, weights, mass in zip(names, (p, q), masses, strict=True):
        _check_weights(name, weights.detach(), mass)
    if balanced:
        _check_equal_mass(masses, names, tolerance, hint)
    return masses, not all(_is_positive(mass) for mass in masses)


def pair_and_cost(
    p: Any, q: Any, cost: Any, *, balanced: bool = True, signed: bool = False
) -> tuple[HistogramPair, Cost]:
    """Return the checked pair, and the cost between them in their arithmetic dtype.

    With `signed` a matrix may have negative entries and +inf: it becomes a `SignedCost` then.

    Raises:
        TypeError, ValueError: as `histogram_pair`, `as_cost` and `cost_between`, and if the batch axes do not fit.
    """
    p, q = weights_or_uniform(p, q, cost)
    fitted = posed_cost(cost) if signed else as_cost(cost)
    pair = histogram_pair(p, q, cost.dtype, balanced=balanced)
    fitted = cost_between(pair.p, pair.q, fitted)
    check_broadcast(p=pair.p.shape[:-1], q=pair.q.shape[:-1], cost=fitted.batch_shape)
    return pair, fitted


def weights_or_uniform(p: Any, q: Any, cost: Any) -> tuple[Any, Any]:
    """Return p and q; in place of None, weights of 1 / n each for the bins of the cost.

    Raises:
        ValueError: if the cost stands first, or images have axes of their own.
    """
    if not _fit(p, q, cost):
        _check_order(p, q, cost)
        _check_flat(p, q, cost)
    if p is not None and q is not None:
        return p, q
    is_matrix = isinstance(cost, Tensor) and cost.dim() > 1
    shape = cost.shape[-2:] if is_matrix else as_cost(cost).shape
    like = next((w for w in (p, q, cost) if isinstance(w, Tensor)), cost)
    p, q = (
        torch.full((size,), 1 / size, dtype=cost.dtype, device=like.device) if weights is None and size else weights
        for weights, size in zip((p, q), shape, strict=True)
    )
    return p, q


def _fit(p: Any, q: Any, cost: Any) -> bool:
    """Whether all three are tensors of as many bins: most calls need no further check of their order."""
    if not (isinstance(p, Tensor) and isinstance(q, Tensor) and isinstance(cost, Tensor)) or cost.dim() < 2:
        return False
    return p.dim() > 0 and q.dim() > 0 and (p.shape[-1], q.shape[-1]) == cost.shape[-2:]


def _check_order(p: Any, q: Any, cost: Any) -> None:
    """Raise where the cost stands first and q last, the order of `ot.solve`."""
    if isinstance(p, Cost):
        is_first = True
    elif all(isinstance(t, Tensor) and t.dim() for t in (p, q, cost)):
        is_first = p.shape[-2:] == (q.shape[-1], cost.shape[-1]) and cost.shape[-2:] != (p.shape[-1], q.shape[-1])
    else:
        return
    if is_first:
        got = ", ".join(str(tuple(t.shape)) if isinstance(t, Tensor | Cost) else type(t).__name__ for t in (p, q, cost))
        raise ValueError(
            f"the arguments have the shapes {got}: the cost stands first, as in POT's ot.solve(C, p, q); expected the "
            "order (p, q, C), as in emd(p, q, C)."
        )


def _check_flat(p: Any, q: Any, cost: Any) -> None:
    """Raise where the bins of p or q are spread over several axes, as those of images are."""
    if not isinstance(cost, Cost) and not (isinstance(cost, Tensor) and cost.dim() > 1):
        return
    for name, weights, size in zip(("p", "q"), (p, q), cost.shape[-2:], strict=True):
        if not isinstance(weights, Tensor) or weights.dim() < 2 or weights.shape[-1] == size:
            continue
        for axes in (2, 3):
            if weights.dim() >= axes and weights.shape[-axes:].numel() == size:
                raise ValueError(
                    f"{name} has shape {tuple(weights.shape)}, expected (..., {size}), a bin for each cell of the "
                    f"cost; flatten the axes of images: images.flatten({-axes})."
                )


def centre_gradient(weights: Float[Tensor, "*batch bins"]) -> Float[Tensor, "*batch bins"]:
    """Return `weights` unchanged; its gradient loses its mean over the bins."""
    if needs_torch(weights):
        change = weights - weights.detach()  # 0, with the derivatives
        return weights.detach() + (change - change.mean(-1, keepdim=True))
    if not (torch.is_grad_enabled() and weights.requires_grad):
        return weights
    centred: Tensor = _CentreGradient.apply(weights)
    return centred


class _CentreGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weights: Tensor) -> Tensor:
        return weights.view_as(weights)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        (gradient,) = gradients
        return gradient - gradient.mean(-1, keepdim=True)


def _mass(name: str, weights: Any) -> Tensor:
    check_floating(name, weights)
    if weights.dim() == 0 or weights.shape[-1] == 0:
        raise ValueError(f"{name} has shape {tuple(weights.shape)}, expected (..., bins) with at least one bin.")
    mass: Tensor = weights.detach().sum(-1, dtype=torch.float64)
    return mass


def _check_weights(name: str, weights: Tensor, mass: Tensor) -> None:
    if not mass.numel() or (weights.amin().item() >= 0 and mass.amax().item() < torch.inf):
        return
    check_finite(name, weights)
    if weights.amin() < 0:
        *row, bin_index = _first(weights < 0)
        raise ValueError(
            f"{name} holds {float(weights[*row, bin_index])} in bin {bin_index}{_at(tuple(row))}, "
            "expected weights >= 0; clamp rounding errors with .clamp(min=0), or turn scores into weights with softmax."
        )
    raise ValueError(f"{name} has a mass beyond float64, expected finite sums; rescale it.")


def _check_equal_mass(masses: tuple[Tensor, Tensor], names: tuple[str, str], tolerance: float, hint: str) -> None:
    mass_p, mass_q = masses
    larger = torch.maximum(mass_p, mass_q)
    if ((mass_p - mass_q).abs() > tolerance * larger).any():
        # The worst row relative to its own mass, so that one heavy problem does not hide a light one.
        relative = (mass_p - mass_q).abs() / larger.clamp(min=torch.finfo(torch.float64).tiny)
        row = _first(relative == relative.max())
        got_p, got_q = (float(mass.expand(relative.shape)[row]) for mass in (mass_p, mass_q))
        raise ValueError(
            f"{names[0]} and {names[1]} hold different masses{_at(row)}: {got_p:.9g} and {got_q:.9g}, a relative "
            f"difference of {float(relative[row]):.2g}; expected at most {tolerance:g}. Normalise both, for example "
            f"{names[0]} / {names[0]}.sum(-1, keepdim=True).{hint}"
        )


def _is_positive(mass: Tensor) -> bool:
    return not mass.numel() or mass.amin().item() > 0


def _rescaled(weights: Tensor, mass: Any, target: Any, dtype: torch.dtype, has_empty_side: bool) -> Tensor:
    # The scale carries no graph: its gradient is the same for every bin, and centring removes it.
    scale = target / (mass + (mass == 0) if has_empty_side else mass)
    return weights.to(dtype) * (scale.to(dtype).unsqueeze(-1) if isinstance(scale, Tensor) else scale)


def _first(mask: Tensor) -> tuple[int, ...]:
    return tuple(int(i) for i in mask.nonzero()[0])


def _at(row: tuple[int, ...]) -> str:
    return f" of row {row[0] if len(row) == 1 else row}" if row else ""
