"""Transport between clouds of points that move: a loss of the positions, with ragged batches.

    divergence   S(a, b) - S(a, a) / 2 - S(b, b) / 2, S the entropic transport cost: smooth, zero at equal clouds
    emd          min <C, P>, exact: W_2^2 for squared distances, W_1 for distances
    sliced       the mean of exact costs along random directions: W_2^2 for squared distances, W_1 for distances

Clouds of different sizes are padded by a copy of a point of their own, without weight: it neither takes part nor gets a
gradient.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from otloss._checks import check_broadcast, check_cloud, check_floating, check_last_axis, check_positive, check_tensor
from otloss._per_example import per_example
from otloss._public import public
from otloss.costs import PointCost
from otloss.costs.points import Metric, check_metric
from otloss.solvers.closed_forms.line import finite_in
from otloss.solvers.closed_forms.sliced import sliced_wasserstein
from otloss.solvers.divergence import sinkhorn_divergence
from otloss.solvers.histograms import centre_gradient_over, check_masses
from otloss.solvers.options import Penalty, Settings, SmallEpsilonError
from otloss.solvers.solve import emd

KINDS = ("divergence", "emd", "sliced")
# Epsilon over blur to the power of the exponent, and that exponent: GeomLoss's cost is |x - y|^p / p.
_OF_BLUR = {"sqeuclidean": (2.0, 2), "euclidean": (1.0, 1)}
_ORDER = {"sqeuclidean": 2, "euclidean": 1}
_BLUR = 0.05  # The default.
_SMALLEST_EPSILON = 1e-200  # in place of the square of a tiny blur, which may vanish

Clouds = Float[Tensor, "*batch n d"] | Sequence[Tensor]
Weights = Float[Tensor, "*batch n"] | Sequence[Tensor] | None


@public
@per_example(
    is_traced=lambda settings: settings.get("kind") == "sliced", x=2, y=2, a=1, b=1, epsilon=0, marginal_penalty=(0, 0),
    mask_x=1, mask_y=1,
)  # fmt: skip
def cloud_loss(
    x: Clouds,
    y: Clouds,
    a: Weights = None,
    b: Weights = None,
    *,
    kind: str = "divergence",
    metric: Metric = "sqeuclidean",
    epsilon: float | Float[Tensor, "*batch"] | None = None,
    blur: float | None = None,
    marginal_penalty: Penalty = None,
    tolerance: float | None = None,
    impl: str = "auto",
    projections: int | Float[Tensor, "k d"] | None = None,
    generator: torch.Generator | None = None,
    mask_x: Bool[Tensor, "*batch n"] | None = None,
    mask_y: Bool[Tensor, "*batch m"] | None = None,
    empty: str = "error",
) -> Float[Tensor, "*batch"]:
    """Return the transport cost between two clouds of points, per pair of clouds, differentiable in the points.

    Formulas: docs/guide/definitions.md#def-entropic

    Args:
        x: (..., n, d) points, or a list of clouds (n_k, d) of different sizes. The leading axes of all arguments
            broadcast; a list is one axis, and two lists are taken in pairs.
        y: (..., m, d) points, or a list of clouds.
        a: (..., n) weights >= 0 of x, or a list of (n_k,) for a list of clouds; 1 / n each by default.
        b: (..., m) weights >= 0 of y, or a list, with the mass of a up to rounding; 1 / m each by default.
        kind: "divergence", the debiased entropic cost, as `sinkhorn_divergence`; "emd", exact, as `emd`; "sliced", as
            `sliced_wasserstein`.
        metric: "sqeuclidean", |x - y|^2 without a factor 1/2, so that "emd" and "sliced" give W_2^2 and not W_2;
            "euclidean", |x - y|, W_1; but for "sliced" also "l1", "cosine", or a function of two clouds (`PointCost`).
        epsilon: of the divergence, above 0, in the unit of the cost; a number, or one per pair of clouds.
        blur: in place of epsilon, the length in `geomloss.SamplesLoss(blur=)`, and the value is as by `SamplesLoss`:
            for "euclidean" epsilon = blur; for "sqeuclidean", where GeomLoss has the cost |x - y|^2 / 2, epsilon =
            2 blur^2 and half of the value.
        marginal_penalty: of the divergence, the price of mass that appears or vanishes, or (price of x, price of y), in
            the unit of the cost, as for `sinkhorn_divergence`. GeomLoss's `reach` is 2 reach^2 here for "sqeuclidean",
            also with blur.
        tolerance, impl: of the divergence, as for `sinkhorn`.
        projections: of "sliced", 128 by default, as for `sliced_wasserstein`; so is `generator`.
        mask_x: (..., n), True where a place of x holds a point; what is elsewhere is not read. mask_y: (..., m), for y.
        empty: "error" raises if a cloud has no point; "zero" gives 0 for such a pair, without a gradient.

    Returns:
        (...), in the promoted dtype, where 16-bit points count as float32 unless "sliced". Differentiable in the
        points, and in weights that are given (centred over the points unless `marginal_penalty` is given).

    Raises:
        TypeError: if points or weights are not floating tensors, or a mask is not boolean.
        ValueError: if shapes or masses do not fit, a number is not finite or not in range, a cloud is empty, an option
            is not one of this kind, or the divergence has both epsilon and blur, or neither at a metric without blur.

    Source:
        J. Feydy et al., Interpolating between Optimal Transport and MMD using Sinkhorn Divergences, 2019.

    Example:
        >>> x = torch.tensor([[0.0, 0.0], [1.0, 0.0]], requires_grad=True)
        >>> value = cloud_loss(x, torch.tensor([[0.0, 2.0], [1.0, 2.0]]), kind="emd")
        >>> value.item(), torch.autograd.grad(value, x)[0]
        (4.0, tensor([[ 0., -2.],
                [ 0., -2.]]))
        >>> clouds = [torch.zeros(1, 2), torch.ones(3, 2)]
        >>> cloud_loss(clouds, torch.zeros(4, 2), epsilon=0.1)
        tensor([0.0000, 2.0000])
    """
    check_options(
        kind, empty, metric, divergence={"epsilon": epsilon, "blur": blur, "marginal_penalty": marginal_penalty,
        "tolerance": tolerance, "impl": impl}, sliced={"projections": projections, "generator": generator},
    )  # fmt: skip
    _check_lists(x, y)
    _check_order(x, y, a, b)
    balanced = Settings(marginal_penalty=marginal_penalty).marginal_penalty is None
    one = _Cloud.make("x", x, ("a", a), ("mask_x", mask_x), empty, balanced=balanced)
    other = _Cloud.make("y", y, ("b", b), ("mask_y", mask_y), empty, balanced=balanced)
    one, other = _both_or_neither(one, other)
    if a is not None or b is not None:
        masked = [f"mask_{k}" for k, w, mask in (("x", a, mask_x), ("y", b, mask_y)) if w is not None is not mask]
        hint = f" Weights where {' or '.join(masked)} is False do not count." if masked else ""
        check_masses(one.weights, other.weights, ("a", "b"), balanced=balanced, hint=hint)

    def distances(cloud_x: _Cloud, cloud_y: _Cloud, epsilon: Any, marginal_penalty: Any) -> Tensor:
        if kind == "sliced":
            order, dtype = _ORDER[str(metric)], torch.promote_types(cloud_x.dtype, cloud_y.dtype)
            value = sliced_wasserstein(
                cloud_x.points, cloud_y.points, cloud_x.weights, cloud_y.weights, order=order,
                projections=128 if projections is None else projections, generator=generator,
            )  # fmt: skip
            return finite_in(dtype, value, order)
        cost = PointCost(cloud_x.points, cloud_y.points, metric=metric)
        if kind == "emd":
            return emd(cloud_x.weights, cloud_y.weights, cost)
        options: dict[str, Any] = {"marginal_penalty": marginal_penalty, "tolerance": tolerance, "impl": impl}
        if epsilon is not None:
            return sinkhorn_divergence(cloud_x.weights, cloud_y.weights, cost, epsilon=epsilon, **options)
        return _at_width(cloud_x, cloud_y, cost, blur, options)

    is_filled = one.filled & other.filled
    if bool(is_filled.all()):
        return distances(one, other, epsilon, marginal_penalty)
    penalty_p, penalty_q = marginal_penalty if isinstance(marginal_penalty, tuple | list) else (marginal_penalty, None)
    options = {"epsilon": epsilon, "marginal_penalty of a": penalty_p, "marginal_penalty of b": penalty_q}
    shapes = {name: option.shape for name, option in options.items() if isinstance(option, Tensor)}
    batch = check_broadcast(x=one.batch_shape, y=other.batch_shape, **shapes)
    pairs = is_filled.expand(batch or (1,))
    values = distances(
        one.picked(pairs), other.picked(pairs), _picked(epsilon, pairs), _picked(marginal_penalty, pairs)
    )
    return values.new_zeros(pairs.shape).masked_scatter(pairs, values).reshape(batch)


def _picked(option: Any, pairs: Bool[Tensor, "*batch"]) -> Any:
    """Return an option, or a pair of them, for some pairs of clouds."""
    if isinstance(option, tuple | list):
        return tuple(_picked(one, pairs) for one in option)
    return option.expand(pairs.shape)[pairs] if isinstance(option, Tensor) else option


def _at_width(one: _Cloud, other: _Cloud, cost: PointCost, blur: float | None, options: dict[str, Any]) -> Tensor:
    """Return the divergence at the epsilon that stands for a blur, divided by the factor of the metric."""
    factor, exponent = _OF_BLUR[str(cost.metric)]
    width = _BLUR if blur is None else blur
    epsilon = max(factor * width**exponent, _SMALLEST_EPSILON)
    try:
        value = sinkhorn_divergence(one.weights, other.weights, cost, epsilon=epsilon, **options)
    except SmallEpsilonError as error:
        limit = 1.05 * (error.least / factor) ** (1 / exponent)  # The number in the message must not be rounded down.
        raise SmallEpsilonError(
            f"blur is {width:g}{' by default' if blur is None else ''}, expected at least {limit:.2g} for "
            "clouds of this size: rounding would decide the answer. "
            'Give a larger blur (a tenth of the size of the clouds is usual), rescale the points, or use kind="emd".',
            limit,
        ) from error
    return value / factor


def _check_lists(x: Any, y: Any) -> None:
    both = isinstance(x, list | tuple) and isinstance(y, list | tuple)
    if both and len(x) != len(y):
        raise ValueError(
            f"x is a list of {len(x)} clouds and y of {len(y)}, expected as many: they are taken in pairs. For one "
            "cloud against each of several pass it as a tensor (n, d)."
        )


def _check_order(*arguments: Any) -> None:
    """Raise ValueError for weights before the points of each cloud, unless the shapes fit our order too."""
    if not all(isinstance(t, Tensor) for t in arguments):
        return
    a, x, b, y = (tuple(t.shape) for t in arguments)
    are_theirs = a == x[:-1] and b == y[:-1] and x[-1:] == y[-1:] and min(len(a), len(b)) > 0
    are_ours = a[-1:] == x[-1:] and a[-2:-1] == b[-1:] and x[-2:-1] == y[-1:] and min(map(len, (a, x))) > 1
    if are_theirs and not are_ours:
        raise ValueError(
            f"x has shape {a}, y {x}, a {b} and b {y}: weights stand before the points of each cloud in GeomLoss's "
            "SamplesLoss()(a, x, b, y); expected points first, cloud_loss(x, y, a, b)."
        )


def check_options(kind: str, empty: str, metric: Metric, *, divergence: dict[str, Any], sliced: dict[str, Any]) -> None:
    """Raise ValueError if an option is not valid, or not one of this kind."""
    for name, value, allowed in (("kind", kind, KINDS), ("empty", empty, ("error", "zero"))):
        if value not in allowed:
            raise ValueError(f"{name} is {value!r}, expected one of {allowed}.")
    check_metric(metric)
    for owner, options in (("divergence", divergence), ("sliced", sliced)):
        present = [n for n, value in options.items() if value is not None and not (n == "impl" and value == "auto")]
        if present and kind != owner:
            raise ValueError(
                f'{", ".join(present)} given for kind="{kind}", but only kind="{owner}" takes it; leave it out.'
            )
    has_epsilon, has_blur = divergence["epsilon"] is not None, divergence["blur"] is not None
    if has_epsilon and has_blur:
        raise ValueError(
            "both epsilon and blur are given; expected one of them: blur, a length, stands for an epsilon."
        )
    if has_blur:
        check_positive("blur", divergence["blur"])
    if metric in _OF_BLUR or kind == "emd" or (kind == "divergence" and has_epsilon):
        return
    if kind == "divergence" and not has_blur:
        raise ValueError(f"metric={metric!r} has no default blur; give epsilon, in the unit of the cost.")
    what = 'kind="sliced"' if kind == "sliced" else "blur"
    raise ValueError(f"{what} is defined for the metrics {tuple(_OF_BLUR)}; got {metric!r}.")


@dataclass(frozen=True)
class _Cloud:
    """Padded clouds with their weights, 0 at places without a point.

    filled (...) is False where a cloud is empty, and dtype the promoted one of what was given.
    """

    points: Float[Tensor, "*batch n d"]
    weights: Float[Tensor, "*batch n"]
    filled: Bool[Tensor, "*batch"]
    dtype: torch.dtype

    @property
    def batch_shape(self) -> torch.Size:
        return torch.broadcast_shapes(self.points.shape[:-2], self.weights.shape[:-1])

    def picked(self, pairs: Bool[Tensor, "*batch"]) -> _Cloud:
        """Return the clouds of some pairs; points that all pairs share stay as they are."""
        points, weights = self.points, self.weights.expand(*pairs.shape, -1)[pairs]
        if points.dim() > 2:
            points = points.expand(*pairs.shape, *points.shape[-2:])[pairs]
        return replace(self, points=points, weights=weights, filled=pairs[pairs])

    @staticmethod
    def make(
        name: str, points: Any, named_weights: tuple[str, Any], named_mask: tuple[str, Any], empty: str, *,
        balanced: bool,
    ) -> _Cloud:  # fmt: skip
        (name_w, weights), (name_m, mask) = named_weights, named_mask
        if isinstance(points, list | tuple):
            if mask is not None:
                raise ValueError(f"{name_m} is given for a list of clouds, which needs none; leave it out.")
            points, weights, mask = _padded(name, points, name_w, weights)
        check_floating(name, points)
        if points.dim() >= 2 and points.shape[-2] == 0:  # a place for the solvers, which is masked
            points = torch.cat([points, points.new_zeros(*points.shape[:-2], 1, points.shape[-1])], -2)
            mask = torch.zeros(points.shape[:-1], dtype=torch.bool, device=points.device)
            weights = None if weights is None else points.new_zeros(points.shape[:-1])
        is_padded = mask is not None
        if mask is None:
            mask = torch.ones(points.shape[-2:-1], dtype=torch.bool, device=points.device)
        else:
            points = _without_padding(name, points, name_m, mask)
        check_cloud(name, points)
        filled = mask.any(-1)
        if empty == "error" and not bool(filled.all()):
            where = tuple(int(i) for i in (~filled).nonzero()[0]) if filled.dim() else ()
            raise ValueError(
                f"{name} has no point{f' in cloud {where}' if where else ''}, expected at least one; leave that pair "
                'out, or pass empty="zero" to count it as 0.'
            )
        dtype = points.dtype
        if weights is None:
            wide = torch.promote_types(points.dtype, torch.float32)  # float16 would round 1 / n to another mass
            weights = (mask.double() / mask.sum(-1, keepdim=True).clamp(min=1)).to(wide)
        else:
            check_last_axis(name_w, check_floating(name_w, weights), points.shape[-2])
            dtype = torch.promote_types(dtype, weights.dtype)
            weights = torch.where(mask, weights, 0.0)
            if balanced and is_padded:  # solvers centre its gradient over all places
                weights = centre_gradient_over(mask, weights)
        return _Cloud(points, weights, filled, dtype)


def _padded(name: str, clouds: Sequence[Any], name_w: str, weights: Any) -> tuple[Tensor, Tensor | None, Tensor]:
    if not clouds:
        raise ValueError(f"{name} is an empty list, expected at least one cloud (n, d).")
    for k, cloud in enumerate(clouds):
        check_floating(f"{name}[{k}]", cloud)
        if cloud.dim() != 2 or cloud.shape[1] != clouds[0].shape[-1]:
            raise ValueError(
                f"{name}[{k}] has shape {tuple(cloud.shape)}, expected (n, d), with the d of {name}[0] of shape "
                f"{tuple(clouds[0].shape)}."
            )
    sizes = [len(cloud) for cloud in clouds]
    mask = torch.arange(max(1, *sizes), device="cpu") < torch.tensor(sizes, device="cpu").unsqueeze(-1)
    if weights is not None:
        shapes = [tuple(w.shape) for w in weights] if isinstance(weights, list | tuple) else type(weights).__name__
        if shapes != [(size,) for size in sizes]:
            raise ValueError(f"{name_w} has shapes {shapes}, expected a list of one (n,) for each cloud, of {sizes}.")
        weights = _stacked(list(weights), mask.shape[1])
    return _stacked(list(clouds), mask.shape[1]), weights, mask.to(clouds[0].device)


def _stacked(parts: list[Tensor], size: int) -> Tensor:
    return torch.stack([torch.cat([t, t.new_zeros(size - len(t), *t.shape[1:])]) for t in parts])


def _without_padding(name: str, points: Tensor, name_m: str, mask: Any) -> Tensor:
    """Return the points with a copy of a cloud's first one in the places that hold none."""
    if check_tensor(name_m, mask).dtype != torch.bool:
        raise TypeError(f"{name_m} has dtype {mask.dtype}, expected torch.bool, True where there is a point.")
    check_last_axis(name_m, mask, points.shape[-2] if points.dim() > 1 else 0)
    batch = check_broadcast(**{name: points.shape[:-2], name_m: mask.shape[:-1]})
    points, mask = points.expand(*batch, *points.shape[-2:]), mask.expand(*batch, mask.shape[-1])
    first = mask.int().argmax(-1)[..., None, None].expand(*batch, 1, points.shape[-1])
    filling = points.detach().gather(-2, first).masked_fill(~mask.any(-1)[..., None, None], 0.0)
    return torch.where(mask.unsqueeze(-1), points, filling)


def _both_or_neither(one: _Cloud, other: _Cloud) -> tuple[_Cloud, _Cloud]:
    """Without weights in the pairs that lack a cloud: nothing is moved there."""
    if bool(one.filled.all()) and bool(other.filled.all()):
        return one, other
    filled = (one.filled & other.filled).unsqueeze(-1)
    cleared = [replace(c, weights=torch.where(filled, c.weights, 0.0)) for c in (one, other)]
    return cleared[0], cleared[1]
