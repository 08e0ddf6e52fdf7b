"""Distributions over ordered classes from one score and ordered thresholds, and the class to choose from one.

    P(y <= k) = sigmoid(a_k),    a_k = theta_k - score,    theta_0 = 0,    theta_k = theta_{k-1} + exp(log_gap_k)

the model of proportional odds. log P_k is computed without a difference of probabilities near one, and without losing
digits where classes are narrow:

    log P_k = log sigmoid(a_k) + log sigmoid(-a_{k-1}) + log(1 - exp(-exp(log_gap_k)))

Source: P. McCullagh, Regression models for ordinal data, JRSS B 42 (1980), 109-142.
"""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import logsigmoid

from otloss._checks import check_floating
from otloss.losses.ordinal_distance import increasing
from otloss.losses.targets import check_logits, class_count

RULES = ("argmax", "median", "mean")
_WIDEST = 30.0  # a log-gap: probabilities are 0 and 1 long before, and squares of thresholds are finite in float32
_NARROW = -7.0  # Below this log-gap, log(1 - exp(-gap)) is computed by its series.


def cumulative_log_probabilities(
    score: Float[Tensor, "*batch"], log_gaps: Float[Tensor, " gaps"]
) -> Float[Tensor, "*batch classes"]:
    """Return log-probabilities (..., K) of ordered classes; as logits of `otloss.ordinal_loss` they are valid as well.

    Args:
        score: (...) of each example; a larger one moves mass to higher classes.
        log_gaps: (K - 2,) logarithms of the gaps between the K - 1 thresholds, of which the first is 0.

    Returns:
        (..., K), at least in float32; differentiable in score and log_gaps.

    Raises:
        TypeError: if score or log_gaps are not floating.
        ValueError: if log_gaps does not have one axis.

    Example:
        >>> cumulative_log_probabilities(torch.tensor([0.0, 2.0]), torch.zeros(1))
        tensor([[-0.6931, -1.4651, -1.3133],
                [-2.1269, -1.8989, -0.3133]])
    """
    for name, tensor in (("score", score), ("log_gaps", log_gaps)):
        check_floating(name, tensor)
    if log_gaps.dim() != 1:
        raise ValueError(f"log_gaps has shape {tuple(log_gaps.shape)}, expected (K - 2,) for K classes.")
    dtype = torch.promote_types(torch.promote_types(score.dtype, log_gaps.dtype), torch.float32)
    log_gaps = log_gaps.to(dtype).clamp(max=_WIDEST)
    gaps = log_gaps.exp()
    a = torch.cat([gaps.new_zeros(1), gaps.cumsum(0)]) - score.to(dtype).unsqueeze(-1)  # (..., K - 1)
    zeros = torch.zeros_like(a[..., :1])
    between = torch.cat([gaps.new_zeros(1), _log_one_minus_exp(log_gaps, gaps), gaps.new_zeros(1)])
    return torch.cat([logsigmoid(a), zeros], -1) + torch.cat([zeros, logsigmoid(-a)], -1) + between


def decode_classes(
    logits: Float[Tensor, "*batch classes"], rule: str = "median", *, x: Float[Tensor, " classes"] | None = None
) -> Int[Tensor, "*batch"]:
    """Return one class position for each row of logits or log-probabilities over ordered classes.

    Args:
        logits: (..., K).
        rule: "argmax" has the least expected share of errors, "median" the least expected absolute error in ranks, and
            "mean" is the class whose value is nearest to the expected one. Ties go to the lower class.
        x: (K,) strictly increasing class values of "mean", 0 to K - 1 by default.

    Raises:
        TypeError: if logits are not floating.
        ValueError: if the rule is unknown, x is given to another rule or does not fit, or logits hold NaN or infinity.

    Example:
        >>> logits = torch.tensor([0.45, 0.15, 0.4]).log()
        >>> [int(decode_classes(logits, rule)) for rule in ("argmax", "median", "mean")]
        [0, 1, 1]
    """
    if rule not in RULES:
        raise ValueError(f"rule is {rule!r}, expected one of {RULES}.")
    if x is not None and rule != "mean":
        raise ValueError(f"x is given with rule={rule!r}, which does not use class values; leave it out.")
    classes = class_count(logits)
    check_logits(logits.reshape(-1, classes))
    if rule == "argmax":
        return logits.argmax(-1)
    P = logits.detach().double().softmax(-1)
    if rule == "median":
        # Rounding may put a sum such as 0.1 + 0.4 slightly below one half.
        rounding = 4 * torch.finfo(logits.dtype).eps if logits.dtype in (torch.float32, torch.float64) else 1e-6
        return (P.cumsum(-1) < 0.5 - rounding).sum(-1)
    values = torch.arange(classes, device=logits.device) if x is None else increasing("x", x, (classes,)).detach()
    values = values.double()
    return ((P * values).sum(-1, keepdim=True) - values).abs().argmin(-1)


def _log_one_minus_exp(log_gaps: Tensor, gaps: Tensor) -> Tensor:
    """Return log(1 - exp(-gap)), which is finite where the gap itself underflows."""
    series = log_gaps - gaps / 2 + gaps.square() / 24
    wide = log_gaps.clamp(min=_NARROW).exp()  # torch.where differentiates both branches, so both must be finite.
    return torch.where(log_gaps < _NARROW, series, torch.log(-torch.expm1(-wide)))
