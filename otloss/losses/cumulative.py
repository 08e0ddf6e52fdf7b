"""Distributions over ordered classes from one score and ordered thresholds, and the class to choose from one.

    P(y <= k) = H(a_k),    a_k = theta_k - score,    theta_0 = 0,    theta_k = theta_{k-1} + exp(log_gap_k)

    logit     H(a) = sigmoid(a)               proportional odds
    probit    H(a) = Phi(a)                   the class of a normal variable
    cloglog   H(a) = 1 - exp(-exp(a))         complementary log-log, proportional hazards

log P_k is computed without a difference of probabilities near one, and without losing digits where classes are narrow:

    logit     log P_k = log sigmoid(a_k) + log sigmoid(-a_{k-1}) + log(1 - exp(-gap_k))
    cloglog   log P_k = -exp(a_{k-1}) + log(1 - exp(-exp(a_{k-1}) (exp(gap_k) - 1)))
    probit    log P_k = log Phi(u) + log(1 - Phi(l) / Phi(u)) with both ends of the interval in the lower tail; in
              narrow ones log gap_k + log phi(m) + log(1 + gap_k^2 (m^2 - 1) / 24), m their middle

Source: P. McCullagh, Regression models for ordinal data, JRSS B 42 (1980), 109-142.
"""

from __future__ import annotations

import math

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import logsigmoid, pad

from otloss._checks import check_floating, is_recorded
from otloss._ordered_classes import check_choice
from otloss.losses.geometry import increasing
from otloss.losses.rows import check_logits, class_count

RULES = ("argmax", "median", "mean")
LINKS = ("logit", "probit", "cloglog")
_WIDEST = 30.0  # a log-gap: probabilities are 0 and 1 long before, and squares of thresholds are finite in float32
_NARROW = -7.0  # Below this log-gap, log(1 - exp(-gap)) is computed by its series.
_NARROW_NORMAL = -4.0  # Below this log-gap, the mass of a normal variable in the gap is computed by its series.
_LARGEST_NORMAL = 1e18  # Squares of scores are finite in float32; log-probabilities of -1e35 are zero enough.
_LARGEST_LOG_HAZARD = 60.0  # Its exponential is finite in float32; log-probabilities of -1e26 are zero enough.


def cumulative_log_probabilities(
    score: Float[Tensor, "*batch"], log_gaps: Float[Tensor, " gaps"], link: str = "logit"
) -> Float[Tensor, "*batch classes"]:
    """Return log-probabilities (..., K) of ordered classes; as logits of `otloss.ordinal_loss` they are valid as well.

    Args:
        score: (...) of each example; a larger one moves mass to higher classes.
        log_gaps: (K - 2,) logarithms of the gaps between the K - 1 thresholds, of which the first is 0.
        link: "logit", "probit" or "cloglog", the distribution H of the formulas above.

    Returns:
        (..., K), at least in float32; differentiable in score and log_gaps.

    Raises:
        TypeError: if score or log_gaps are not floating.
        ValueError: if log_gaps does not have one axis, or the link is unknown.

    Example:
        >>> cumulative_log_probabilities(torch.tensor([0.0, 2.0]), torch.zeros(1))
        tensor([[-0.6931, -1.4651, -1.3133],
                [-2.1269, -1.8989, -0.3133]])
    """
    for name, tensor in (("score", score), ("log_gaps", log_gaps)):
        check_floating(name, tensor, is_read=False)
    check_choice("link", link, LINKS)
    if log_gaps.dim() != 1:
        raise ValueError(f"log_gaps has shape {tuple(log_gaps.shape)}, expected (K - 2,) for K classes.")
    dtype = torch.promote_types(torch.promote_types(score.dtype, log_gaps.dtype), torch.float32)
    log_gaps = log_gaps.to(dtype).clamp(max=_WIDEST)
    gaps, score = log_gaps.exp(), score.to(dtype)
    if link == "probit":
        score = score.clamp(-_LARGEST_NORMAL, _LARGEST_NORMAL)
    a = torch.cat([gaps.new_zeros(1), gaps.cumsum(0)]) - score.unsqueeze(-1)  # (..., K - 1)
    if link == "logit":
        return pad(log_sigmoid(a), (0, 1)) + pad(log_sigmoid(-a), (1, 0)) + pad(_log_one_minus_exp(log_gaps), (1, 1))
    if link == "cloglog":
        increase = a[..., :-1] + gaps + _log_one_minus_exp(log_gaps)  # log(exp(a_k) - exp(a_{k-1}))
        below = _log_one_minus_exp(torch.cat([a[..., :1], increase], -1))
        return pad(below, (0, 1)) + pad(-a.clamp(max=_LARGEST_LOG_HAZARD).exp(), (1, 0))
    return torch.cat(
        [_log_ndtr(a[..., :1]), _log_normal_mass(a[..., :-1], a[..., 1:], log_gaps), _log_ndtr(-a[..., -1:])], -1
    )


def decode_classes(
    logits: Float[Tensor, "*batch classes"], rule: str = "median", *, x: Float[Tensor, " classes"] | None = None
) -> Int[Tensor, "*batch"]:
    """Return one class position for each row of logits or log-probabilities over ordered classes.

    Without `x` it goes through `torch.export`, `torch.onnx.export` and `torch.jit.trace`, which record no checks.

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
    checks = not is_recorded()
    classes = class_count(logits, is_read=checks)
    if checks:
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


def quantiles(below: Float[Tensor, " thresholds"], link: str) -> Float[Tensor, " thresholds"]:
    """Return the a with H(a) = below."""
    if link == "cloglog":
        return torch.log(-torch.log1p(-below))
    return torch.special.ndtri(below) if link == "probit" else torch.logit(below)


def log_sigmoid(x: Tensor) -> Tensor:
    """Return log(sigmoid(x)); `logsigmoid` becomes Log(Sigmoid(x)) in ONNX, which is -inf from -20 on."""
    return torch.minimum(x, torch.zeros_like(x)) - torch.log1p(torch.exp(-x.abs())) if is_recorded() else logsigmoid(x)


def _log_one_minus_exp(log_x: Tensor) -> Tensor:
    """Return log(1 - exp(-x)), which is finite where x itself underflows."""
    log_x = log_x.clamp(max=_WIDEST)  # The result is 0 long before.
    x = log_x.exp()
    series = log_x - x / 2 + x.square() / 24
    wide = log_x.clamp(min=_NARROW).exp()  # torch.where differentiates both branches, so both must be finite.
    return torch.where(log_x < _NARROW, series, torch.log(-torch.expm1(-wide)))


def _log_normal_mass(low: Tensor, high: Tensor, log_gaps: Tensor) -> Tensor:
    """Return log(Phi(high) - Phi(low)) for high = low + exp(log_gaps)."""
    middle = (low + high) / 2
    upper = torch.minimum(high, -low)  # The upper end, or that of the mirrored interval, if it lies above 0.
    narrow = log_gaps < _NARROW_NORMAL
    gaps = log_gaps.clamp(max=_NARROW_NORMAL).exp()  # Both branches must be finite, as above.
    correction = torch.log1p(gaps.square() * (middle.square() - 1) / 24)
    series = log_gaps - middle.square() / 2 - math.log(2 * math.pi) / 2 + correction
    width = log_gaps.clamp(min=_NARROW_NORMAL).exp()
    at_upper = _log_ndtr(upper)
    ratio = at_upper - _log_ndtr(upper - width)
    ratio = ratio.clamp(min=torch.finfo(ratio.dtype).tiny)  # It is 0 where rounding merges both ends.
    return torch.where(narrow, series, at_upper + _log_one_minus_exp(ratio.log()))


def _log_ndtr(x: Tensor) -> Tensor:
    """Return log Phi(x), in the tail by Laplace's continued fraction: phi(x) / (|x| + 1 / (|x| + 2 / (|x| + ...))).

    The derivative of torch's `log_ndtr` loses all digits far out and is NaN in the end; in ONNX it is NaN in the tail.
    """
    start, terms = (-3.0, 20) if is_recorded() else (-30.0, 4)  # nine digits or more
    low, body = x.clamp(max=start), x.clamp(min=start)
    fraction = -low
    for k in range(terms, 0, -1):
        fraction = k / fraction - low
    tail = -low.square() / 2 - math.log(2 * math.pi) / 2 - fraction.log()
    log_body = torch.log(torch.erfc(-body / math.sqrt(2)) / 2) if is_recorded() else torch.special.log_ndtr(body)
    return torch.where(x < start, tail, log_body)
