"""The continuous ranked probability score of an ensemble: how far a weighted sample lies from what was observed.

With members x_i of weights w_i (sum 1), F their distribution function and y the observation,

    CRPS = integral of (F(t) - 1[y <= t])^2 dt = sum_i w_i |x_i - y| - S,     S = 1/2 sum_ij w_i w_j |x_i - x_j|

a proper score: the power-2 distance of distribution functions (`otloss.cdf_distance`) between F and a point at y. It is
computed from the gaps of the sorted members, in O(m log m) and without cancellation of large numbers; so is S =
sum_k F_k (1 - F_k) gap_k.

"fair" replaces S by S / (1 - sum_i w_i^2), an unbiased estimate for the distribution that the members are drawn from:
otherwise small ensembles look worse than they are.

Sources: J. Matheson, R. Winkler, Scoring rules for continuous probability distributions, Management Science 22 (1976);
T. Gneiting, A. Raftery, Strictly proper scoring rules, JASA 102 (2007); C. Ferro, Fair scores for ensemble forecasts,
QJRMS 140 (2014).
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from otloss._checks import broadcast_shape, check_broadcast, check_finite, check_floating, check_last_axis
from otloss._numba import may_run_on
from otloss._public import public
from otloss.solvers.histograms import over_largest


@public
def crps(
    ensemble: Float[Tensor, "*batch members"],
    observation: Float[Tensor, "*batch"],
    weights: Float[Tensor, "*batch members"] | None = None,
    *,
    fair: bool = False,
) -> Float[Tensor, "*batch"]:
    """Return the continuous ranked probability score of each ensemble; the lower, the better.

    Formulas: docs/guide/definitions.md#def-ordinal

    Args:
        ensemble: (..., m) members in any order. The leading axes of all three broadcast.
        observation: (...) what came true, in the unit of the members.
        weights: (m,) or (..., m) weights >= 0 of the members, of which only the ratios matter; equal by default.
        fair: score the distribution that the members are drawn from, rather than the ensemble itself; may be below 0.

    Returns:
        (...), in the promoted dtype and the unit of the members. Differentiable in all three (a subgradient where
        members are equal to each other or to the observation).

    Raises:
        TypeError: if an argument is not a floating tensor.
        ValueError: if shapes do not fit (observations (n, 1) for n ensembles do not), there is no member, a number is
            not finite, a weight is negative, the weights of an ensemble are all 0, or fair is asked of a single member
            with weight.

    Source:
        T. Gneiting, A. Raftery, Strictly proper scoring rules, JASA 102 (2007), eq. 21; C. Ferro, 2014, for fair.

    Example:
        >>> ensemble = torch.tensor([[1.0, 2.0, 6.0], [3.0, 3.0, 3.0]])
        >>> crps(ensemble, torch.tensor([2.0, 5.0]))
        tensor([0.5556, 2.0000])
        >>> crps(ensemble[0], torch.tensor(4.0), fair=True)
        tensor(0.6667)
    """
    inputs = _checked(ensemble, observation, weights)
    dtype = functools.reduce(torch.promote_types, (t.dtype for t in inputs))
    arithmetic = torch.promote_types(dtype, torch.float32)
    x, y = ensemble.to(arithmetic), observation.to(arithmetic).unsqueeze(-1)
    order = _order(x) if may_run_on(*inputs) else x.argsort(-1)
    x = x.gather(-1, order)
    share = None if weights is None else _shares(weights.to(arithmetic), order)
    members = x.shape[-1]
    if share is None:
        below = torch.arange(1, members, dtype=arithmetic, device=x.device) / members  # F in each gap
        above = 1 - below
    else:  # each side by its own weights: a member may have all but a rounding of the weight
        below, above = share.cumsum(-1)[..., :-1], share.flip(-1).cumsum(-1).flip(-1)[..., 1:]
    left, right = torch.minimum(x, y).diff(dim=-1), torch.maximum(x, y).diff(dim=-1)  # sides of y
    value = (left * below.square() + right * above.square()).sum(-1)
    value = value + (y[..., 0] - x[..., -1]).clamp(min=0) + (x[..., 0] - y[..., 0]).clamp(min=0)
    if fair:
        share = x.new_full((members,), 1 / members) if share is None else share
        differing = _probability_of_two(share)
        _check_fair(differing.detach())
        spread = (x.diff(dim=-1) * below * above).sum(-1)
        value = value - spread * share.square().sum(-1) / differing
    return value.to(dtype)


def _order(x: Tensor) -> Tensor:
    """`x.argsort(-1)` by numpy, which takes a fifth of the time on a CPU."""
    return torch.from_numpy(x.detach().numpy().argsort(-1))


def _shares(weights: Tensor, order: Tensor) -> Tensor:
    """Return the weights of sum 1, in this order of the members."""
    share = over_largest(weights)
    share = share / share.sum(-1, keepdim=True)
    batch = broadcast_shape(share.shape, order.shape)
    return share.expand(batch).gather(-1, order.expand(batch))


def _checked(ensemble: Any, observation: Any, weights: Any) -> list[Tensor]:
    """Return the tensors that are given, checked."""
    tensors = {"ensemble": ensemble, "observation": observation, "weights": weights}
    tensors = {name: check_floating(name, t) for name, t in tensors.items() if name != "weights" or t is not None}
    for name, tensor in tensors.items():
        check_finite(name, tensor)
    if ensemble.dim() == 0 or not ensemble.shape[-1]:
        raise ValueError(
            f"ensemble has shape {tuple(ensemble.shape)}, expected (..., m) with at least one member for each forecast."
        )
    shapes = {"ensemble": ensemble.shape[:-1], "observation": observation.shape}
    if weights is not None:
        check_last_axis("weights", weights, ensemble.shape[-1])
        shapes["weights"] = weights.shape[:-1]
        if weights.numel() and not (weights.amin() >= 0 and weights.sum(-1).amin() > 0):
            raise ValueError(
                f"weights has the least entry {float(weights.detach().amin())} and the least sum "
                f"{float(weights.detach().sum(-1).amin())}, expected weights >= 0 of a sum above 0 for each forecast."
            )
    if observation.dim() > 1 and observation.shape[:-1] == ensemble.shape:
        raise ValueError(
            f"ensemble has shape {tuple(ensemble.shape)} and observation {tuple(observation.shape)}, expected the "
            "ensembles first, crps(ensemble, observation). One ensemble for a table of observations is "
            "crps(ensemble[None], observation)."
        )
    shape, leading = observation.shape, ensemble.shape[:-1]
    if leading.numel() > 1 and shape == (*leading, 1):
        raise ValueError(
            f"observation has shape {tuple(shape)} for ensembles {tuple(ensemble.shape)}, expected {tuple(leading)}; "
            "call observation.squeeze(-1). Each ensemble against each observation is crps(ensemble[None], observation)."
        )
    check_broadcast(**shapes)
    return list(tensors.values())


def _probability_of_two(share: Tensor) -> Tensor:
    """Return 1 - sum w^2, the probability that two draws are two members, without the difference."""
    largest = share.detach().argmax(-1, keepdim=True)
    others = share.scatter(-1, largest, 0.0)
    return share.gather(-1, largest).squeeze(-1) * others.sum(-1) + (others * (1 - others)).sum(-1)


def _check_fair(differing: Tensor) -> None:
    if differing.numel() and not differing.amin() > 0:
        raise ValueError(
            "fair is True, but an ensemble has a single member with weight, whose spread is not known; expected at "
            "least two. Use fair=False."
        )
