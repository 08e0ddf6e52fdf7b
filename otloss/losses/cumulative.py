"""Distributions over ordered classes from one score and ordered thresholds, and the class to choose from one.

    P(y <= k) = H(a_k),    a_k = theta_k - score,    theta_0 = 0,    theta_k = theta_{k-1} + exp(log_gap_k)

with H the logistic distribution ("logit", proportional odds) or the normal one ("probit"). log P_k = log(H(a_k) -
H(a_{k-1})) is computed without a difference of probabilities near one, and without losing digits where classes are
narrow:

    logit     log sigmoid(a_k) + log sigmoid(-a_{k-1}) + log(1 - exp(-exp(log_gap_k)))
    probit    log Phi(hi) + log(1 - exp(log Phi(lo) - log Phi(hi))),  lo and hi in the lower tail by symmetry;
              log phi(m) + log_gap_k + gap_k^2 (m^2 - 1) / 24 where the gap about m is too narrow for that difference

Source: P. McCullagh, Regression models for ordinal data, JRSS B 42 (1980), 109-142.
"""

from __future__ import annotations

import math

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import logsigmoid

from otloss._checks import check_floating
from otloss.losses.geometry import increasing
from otloss.losses.labels import check_logits, class_count

LINKS = ("logit", "probit")
RULES = ("argmax", "median", "mean")
_WIDEST = 30.0  # a log-gap: probabilities are 0 and 1 long before, and squares of thresholds are finite in float32
_NARROW = -7.0  # a log-gap below which log(1 - exp(-gap)) is its series
_FAR = -100.0  # where four terms of the asymptotic series of log Phi are exact in float64
_THIN = 1e-2  # gap (1 + |middle|) below which the probability of a normal variable is its series in the gap


def cumulative_log_probabilities(
    score: Float[Tensor, "*batch"], log_gaps: Float[Tensor, " gaps"], *, link: str = "logit"
) -> Float[Tensor, "*batch classes"]:
    """Return log-probabilities (..., K) of ordered classes; as logits of `otloss.ordinal_loss` they are valid as well.

    Args:
        score: (...) of each example; a larger one moves mass to higher classes.
        log_gaps: (K - 2,) logarithms of the gaps between the K - 1 thresholds, of which the first is 0.
        link: "logit" (proportional odds) or "probit".

    Returns:
        (..., K), at least in float32; differentiable in score and log_gaps.

    Raises:
        TypeError: if score or log_gaps are not floating.
        ValueError: if the link is unknown or log_gaps does not have one axis.

    Example:
        >>> cumulative_log_probabilities(torch.tensor([0.0, 2.0]), torch.zeros(1))
        tensor([[-0.6931, -1.4651, -1.3133],
                [-2.1269, -1.8989, -0.3133]])
    """
    if link not in LINKS:
        raise ValueError(f"link is {link!r}, expected one of {LINKS}.")
    for name, tensor in (("score", score), ("log_gaps", log_gaps)):
        check_floating(name, tensor)
    if log_gaps.dim() != 1:
        raise ValueError(f"log_gaps has shape {tuple(log_gaps.shape)}, expected (K - 2,) for K classes.")
    dtype = torch.promote_types(torch.promote_types(score.dtype, log_gaps.dtype), torch.float32)
    # Differences of log Phi need the digits of float64.
    arithmetic = torch.float64 if link == "probit" else dtype
    log_gaps = log_gaps.to(arithmetic).clamp(max=_WIDEST)
    gaps = log_gaps.exp()
    a = torch.cat([gaps.new_zeros(1), gaps.cumsum(0)]) - score.to(arithmetic).unsqueeze(-1)  # (..., K - 1)
    if link == "logit":
        ends = torch.zeros_like(a[..., :1])
        between = torch.cat([gaps.new_zeros(1), _log_one_minus_exp(log_gaps, gaps), gaps.new_zeros(1)])
        return torch.cat([logsigmoid(a), ends], -1) + torch.cat([ends, logsigmoid(-a)], -1) + between
    first, last = _log_normal_below(a[..., :1]), _log_normal_below(-a[..., -1:])
    return torch.cat([first, _log_normal_between(a[..., :-1], a[..., 1:], log_gaps), last], -1).to(dtype)


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
        # Sums such as 0.1 + 0.4 may end a rounding below one half.
        rounding = 4 * torch.finfo(logits.dtype).eps if logits.dtype in (torch.float32, torch.float64) else 1e-6
        return (P.cumsum(-1) < 0.5 - rounding).sum(-1)
    values = torch.arange(classes, device=logits.device) if x is None else increasing("x", x, (classes,)).detach()
    values = values.double()
    return ((P * values).sum(-1, keepdim=True) - values).abs().argmin(-1)


def _log_one_minus_exp(log_gaps: Tensor, gaps: Tensor) -> Tensor:
    """Return log(1 - exp(-gap)), which is finite where the gap itself underflows."""
    series = log_gaps - gaps / 2 + gaps.square() / 24
    wide = log_gaps.clamp(min=_NARROW).exp()  # the other branch must have a finite derivative too
    return torch.where(log_gaps < _NARROW, series, torch.log(-torch.expm1(-wide)))


def _log_normal_between(lo: Tensor, hi: Tensor, log_gaps: Tensor) -> Tensor:
    """Return log(Phi(hi) - Phi(lo)) for hi - lo = exp(log_gaps)."""
    middle = (lo + hi) / 2
    is_high = middle > 0
    low, high = torch.where(is_high, -hi, lo), torch.where(is_high, -lo, hi)
    thin = log_gaps + torch.log1p(middle.abs().detach()) < math.log(_THIN)
    top = _log_normal_below(high)
    apart = torch.where(thin, 1.0, top - _log_normal_below(low))  # > 0
    square = middle.square()
    gaps = torch.where(thin, log_gaps, 0.0).exp()
    series = log_gaps - square / 2 - math.log(2 * math.pi) / 2 + gaps.square() * (square - 1) / 24
    return torch.where(thin, series, top + torch.log(-torch.expm1(-apart)))


def _log_normal_below(a: Tensor) -> Tensor:
    """Return log Phi(a); the derivative of torch's own loses its digits below -1e7."""
    far = a.clamp(max=_FAR)
    inverse = far.reciprocal().square()
    tail = -far.square() / 2 - torch.log(-far) - math.log(2 * math.pi) / 2
    tail = tail + torch.log1p(inverse * (-1 + inverse * (3 - 15 * inverse)))
    return torch.where(a < _FAR, tail, torch.special.log_ndtr(a.clamp(min=_FAR)))
