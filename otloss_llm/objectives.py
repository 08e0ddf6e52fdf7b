"""Training objectives of language models: small pure functions of per-token statistics, one value per token.

Notation: `z` are the logits of a token over a vocabulary of V tokens, `q = softmax(z)`, `y` the label. The statistics
are vectors with one entry per token. `sg` is stop-gradient (`detach`).

    nll           -log q_y, in nats
    cost          D = sum_i q_i c(i, y), the transport cost to the one-hot target
    entropy       H = -sum_i q_i log q_i, in nats
    logsumexp     Z = log sum_i exp(z_i)
    mean_logit    M = sum_i z_i / V
    tempered_logsumexp    Z_T = T log sum_i exp(z_i / T), at the objective's own `temperature` T

    D          sum_i q_i c(i, y)                                               EMO's Eq. 14, in `kernels/reference.py`
    MLE        nll
    TaiLr      sg(clamp(q_y / (gamma + (1 - gamma) q_y), min_weight, 1)) nll   Ji et al. 2023, arXiv 2302.13344
    MixCE      (gamma + (1 - gamma) sg(q_y)) nll                               Zhang et al. 2023, arXiv 2305.16958
    EMO        0.5 (nll + sg(min(nll / D, clip)) D)                            Ren et al. 2023, arXiv 2310.04691, Eq. 19
    Number     nll + w D, D between the values of number tokens                Zausinger et al. 2024, arXiv 2411.02083
    DFT        sg(q_y) nll, which is MixCE(0)                                  Wu et al. 2025, arXiv 2508.05629
    Power      -q_y^k                                                          Li et al. 2025, arXiv 2510.00526
    Expected   nll + w (sum_i q_i v_i - v_y)^2, v the values of ratings        RAFT, TRACT: arXiv 2503.04381
    EAFT       sg(min(H / log 20, 1)) nll                                      arXiv 2601.02151
    GEM        nll + Z_beta - Z = beta CE(z / beta)                            Li et al. 2024, arXiv 2408.16673

Where D > 0 and nothing is clipped the *value* of EMO equals nll; only its gradient differs. Where the ratio is clipped
the value is less than nll. A loss that is equal to nll in the logs thus does not mean that EMO is off; watch
`TokenLoss.cost` to see its effect.

Any callable of these is an objective, and the names of its parameters say what it reads: `lambda nll, entropy: ...`
gets these two. Two positional parameters of other names are `(nll, cost)`. What reads `tempered_logsumexp` has an
attribute `temperature`. The kernels compute what is named only, and obtain the derivatives of the value by autograd on
the vectors, so a new objective needs nothing else. It must treat tokens independently: entry `t` of the value may
depend on entry `t` of its arguments only, because the kernels pass the tokens in chunks, in any order.
`check_tokenwise` raises an error for an objective that does not.
"""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from difflib import get_close_matches
from numbers import Real
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from otloss.extending import check_not_negative, check_number, check_positive

Objective = Callable[..., Tensor]

DEFAULT_CLIP = 3.0  # of EMO's ratio


class Statistics(NamedTuple):
    """The statistics of some tokens, one vector each, or the derivatives in them; None where it is not computed."""

    nll: Tensor
    cost: Tensor | None = None
    entropy: Tensor | None = None
    logsumexp: Tensor | None = None
    mean_logit: Tensor | None = None
    tempered_logsumexp: Tensor | None = None

    def map(self, function: Callable[[Tensor], Tensor]) -> Statistics:
        """The function of each vector."""
        return Statistics(**{name: function(vector) for name, vector in self._asdict().items() if vector is not None})


def statistics_read(objective: Objective) -> tuple[str, ...]:
    """The statistics that `objective` names by its parameters.

    Parameters with a default and another name keep their default.

    Raises:
        ValueError: another parameter has no default, and the objective is not one of `(nll, cost)`.

    Example:
        >>> statistics_read(MLE()), statistics_read(lambda nll, entropy: nll), statistics_read(lambda n, d: n)
        (('nll', 'cost'), ('nll', 'entropy'), ('nll', 'cost'))
    """
    return _signature(objective)[0]


def _signature(objective: Objective) -> tuple[tuple[str, ...], bool]:
    """The statistics that an objective reads, and whether they are passed by name."""
    if isinstance(objective, LabelSmoothing | ZLoss):
        return objective.reads, True
    try:
        parameters = list(inspect.signature(objective).parameters.values())
    except (TypeError, ValueError):  # a builtin, which has no signature
        return Statistics._fields[:2], False
    named = tuple(p.name for p in parameters if p.name in Statistics._fields and p.kind in _BY_NAME)
    places = [p.name for p in parameters if p.kind in _BY_PLACE and (p.default is p.empty or p.name in named)]
    others = [p.name for p in parameters if p.name not in named and p.kind in _MUST if p.default is p.empty]
    if named and not others:
        return named, True
    pair = len(places) == 2 and set(others) <= set(places)
    pair = pair and all(place in (*others, own) for place, own in zip(places, Statistics._fields, strict=False))
    if pair:
        _check_names(objective, places)
    if pair or (not places and any(p.kind is p.VAR_POSITIONAL for p in parameters)):
        return Statistics._fields[:2], False
    raise ValueError(
        f"objective {objective!r} has parameters {[p.name for p in parameters]}, expected some of "
        f"{list(Statistics._fields)}, or two positional parameters, which get nll and cost; give others a default."
    )


def _check_names(objective: Objective, pair: list[str]) -> None:
    """Raise ValueError if one of the names of nll and cost is almost that of another statistic, which was meant."""
    for name, own in zip(pair, Statistics._fields, strict=False):
        near = get_close_matches(name, Statistics._fields, n=1, cutoff=0.75)
        if near and near[0] != own:
            raise ValueError(
                f"objective {objective!r} has a parameter {name!r} in the place of {own}, did you mean {near[0]}? Two "
                "positional parameters of other names get nll and cost."
            )


_BY_PLACE = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
_BY_NAME = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
_MUST = (*_BY_PLACE, inspect.Parameter.KEYWORD_ONLY)  # be given, if there is no default


def needs_cost(objective: Objective) -> bool:
    """Whether `objective` reads the transport cost: it names it, and does not say `needs_cost = False`."""
    objective = innermost(objective)
    stated = getattr(objective, "needs_cost", None)
    return "cost" in statistics_read(objective) if stated is None else bool(stated)


def _required(cost: Tensor | None) -> Tensor:
    if cost is None:
        raise ValueError("this objective needs the transport cost; pass cost=, for example EmbeddingCost(embedding).")
    return cost


def _check_share(name: str, value: float) -> None:
    if not 0.0 <= check_number(name, value) <= 1.0:
        raise ValueError(f"{name} is {value}, expected a number in [0, 1].")


def _ratio(numerator: Tensor, denominator: Tensor, largest: float | None) -> Tensor:
    """`sg(numerator / denominator)`, 0 where the denominator is 0, at most `largest`."""
    numerator, denominator = numerator.detach(), denominator.detach()
    zero = denominator == 0
    ratio = torch.where(zero, 0.0, numerator / torch.where(zero, 1.0, denominator))
    return ratio if largest is None else ratio.clamp(max=largest)


@dataclass(frozen=True)
class MLE:
    """Maximum likelihood: the value is nll itself.

    Example:
        >>> MLE()(torch.tensor([0.5]), None)
        tensor([0.5000])
    """

    needs_cost: ClassVar[bool] = False

    def __call__(self, nll: Tensor, cost: Tensor | None) -> Tensor:
        return nll


@dataclass(frozen=True)
class TaiLr:
    """Total-variation training: nll weighted by how well the model already predicts the token.

    Args:
        gamma: 0 is MLE; 1 weighs by the probability itself, the gradient of the total variation distance.
        min_weight: lower clamp of the weight, in [0, 1]; keeps improbable tokens from being ignored.

    Example:
        >>> TaiLr(gamma=1.0)(torch.tensor([0.0, 20.0]), None)
        tensor([0.0000e+00, 4.1223e-08])
    """

    gamma: float
    min_weight: float = 0.0
    needs_cost: ClassVar[bool] = False

    def __post_init__(self) -> None:
        _check_share("gamma", self.gamma)
        _check_share("min_weight", self.min_weight)

    def __call__(self, nll: Tensor, cost: Tensor | None) -> Tensor:
        # q / (gamma + (1 - gamma) q) = 1 / (1 - gamma + gamma / q): no 0 / 0 when q underflows.
        weight = 1.0 / (1.0 - self.gamma + self.gamma * nll.detach().exp()) if self.gamma else torch.ones_like(nll)
        return weight.clamp(self.min_weight, 1.0) * nll


@dataclass(frozen=True)
class MixCE:
    """Forward and (self-reinforced) reverse cross-entropy mixed: nll weighted by `gamma + (1 - gamma) q`.

    Args:
        gamma: share of the forward cross-entropy; 1 is MLE.

    Example:
        >>> MixCE(gamma=0.5)(torch.tensor([0.0, 0.6931]), None)
        tensor([0.0000, 0.5198])
    """

    gamma: float
    needs_cost: ClassVar[bool] = False

    def __post_init__(self) -> None:
        _check_share("gamma", self.gamma)

    def __call__(self, nll: Tensor, cost: Tensor | None) -> Tensor:
        q = (-nll.detach()).exp()
        return (self.gamma + (1.0 - self.gamma) * q) * nll


@dataclass(frozen=True)
class EMO:
    """Earth mover distance optimization: likelihood and transport cost at equal weight.

    Args:
        weighting: "ratio" is Eq. 19 of the paper per token, `0.5 (nll + sg(nll / D) D)`; "transport" is the second
            mode of the published code, `sg(D / nll) nll + D`; a float `w` is a fixed weight, `nll + w D`.
        ratio_clip: upper bound of the detached ratio, or None for no bound. "default" is 3 with "ratio", as in the
            published package, and None otherwise. `EMO(ratio_clip=None)` is Eq. 19 as published: training with it can
            collapse onto tokens that lie near to all others (`docs/reports/evidence.md`). Not with a fixed weight.

    Where the ratio's denominator is 0 the ratio is 0. Where the ratio is clipped the value is less than nll; elsewhere
    the two are equal, and only the gradients differ.

    Example:
        >>> EMO()(torch.tensor([0.7, 0.7]), torch.tensor([0.5, 0.1]))
        tensor([0.7000, 0.5000])
    """

    weighting: str | float = "ratio"
    ratio_clip: float | str | None = "default"
    needs_cost: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.ratio_clip == "default":
            object.__setattr__(self, "ratio_clip", DEFAULT_CLIP if self.weighting == "ratio" else None)
        fixed = isinstance(self.weighting, Real)
        if self.weighting not in ("ratio", "transport") and not (fixed and 0.0 <= float(self.weighting) < math.inf):
            raise ValueError(
                f'weighting is {self.weighting!r}, expected "ratio", "transport" or a finite, non-negative number.'
            )
        clip = self.ratio_clip
        if clip is not None and (fixed or isinstance(clip, str) or not clip > 0):
            raise ValueError(
                f"ratio_clip is {clip} with weighting={self.weighting!r}, expected None, or a positive "
                'number with "ratio" or "transport".'
            )

    def __call__(self, nll: Tensor, cost: Tensor | None) -> Tensor:
        D = _required(cost)
        assert not isinstance(self.ratio_clip, str)
        if self.weighting == "ratio":  # Eq. 19; the ratio is constant for the gradient
            return 0.5 * (nll + _ratio(nll, D, self.ratio_clip) * D)
        if self.weighting == "transport":
            return _ratio(D, nll, self.ratio_clip) * nll + D
        return nll + float(self.weighting) * D


@dataclass(frozen=True)
class NumberToken:
    """Likelihood plus the distance of the predicted numbers: `nll + weight D` with a `NumberCost`.

    D is 0 at labels that are not numbers. The published loss is the mean of nll over all tokens plus `weight` times the
    mean of D over the number positions alone: `ObjectiveTrainer`, `train` and `compare` minimise it, with `per_number`.
    The mean of this value over all tokens, as in `token_loss` and `linear_token_loss`, weighs D less, by the share of
    labels that are numbers. The weight is in nats per unit of the cost, and `NumberCost.from_tokenizer` has one unit
    for every tokenizer. With an embedding cost it equals `EMO(weight)`; a trainer raises ValueError for that pair.

    Example:
        >>> NumberToken()(torch.tensor([0.7]), torch.tensor([2.0]))
        tensor([1.3000])
    """

    weight: float = 0.3
    needs_cost: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_not_negative("weight", self.weight)

    def __call__(self, nll: Tensor, cost: Tensor | None) -> Tensor:
        return nll + self.weight * _required(cost)

    def per_number(self, tokens: float, numbers: float) -> NumberToken:
        """The objective whose mean over `tokens` tokens has `weight` times the mean of D over `numbers` of them."""
        return NumberToken(self.weight * tokens / max(1, numbers))


@dataclass(frozen=True)
class Power:
    """The power of the probability, `-q_y^k`: a larger k trains less on tokens that the model finds improbable.

    Args:
        k: exponent > 0; 1 is the probability itself. As k goes to 0 the gradient, divided by k, becomes that of nll.

    Example:
        >>> Power(2.0)(torch.tensor([0.0, 0.6931]))
        tensor([-1.0000, -0.2500])
    """

    k: float = 1.0

    def __post_init__(self) -> None:
        check_positive("k", self.k)

    def __call__(self, nll: Tensor) -> Tensor:
        return -(-self.k * nll).exp()


@dataclass(frozen=True)
class EAFT:
    """nll weighted by the entropy of the model's distribution: `sg(min(H / log 20, 1)) nll`.

    Tokens that the model is sure about train less, so that a confident answer is not overwritten. The published weight
    is the entropy of the 20 largest probabilities over log 20. The entropy here is of the whole vocabulary, which needs
    no search for the largest, and at most 1: the two are equal for up to 20 tokens, and close where the 20 largest hold
    nearly all of q. Where q is flatter the weight here is larger.

    Example:
        >>> EAFT()(torch.tensor([2.0, 2.0]), torch.tensor([1.498, 0.0]))
        tensor([1.0001, 0.0000])
    """

    def __call__(self, nll: Tensor, entropy: Tensor) -> Tensor:
        return (entropy.detach() / math.log(20)).clamp(0.0, 1.0) * nll


@dataclass(frozen=True)
class GEM:
    """Fine-tuning that keeps the entropy: the cross-entropy at a temperature beta, `beta CE(z / beta)`.

    The gradient `softmax(z / beta) - e_y` is exactly that of the linear form of GEM, which weighs the log-ratios
    `log q_i - log q_y` by `sg(softmax(z / beta))`; its published value is another. nll in the results and logs is that
    of q itself. Temperature acts after the scale and the soft cap of the model's logits.

    Args:
        beta: > 0; 1 is MLE, and less leaves more probability to other tokens than the label. The paper takes 0.7.

    Example:
        >>> nll, total, tempered = torch.tensor([0.5]), torch.tensor([2.0]), torch.tensor([1.8])
        >>> GEM(0.7)(nll, total, tempered)
        tensor([0.3000])
    """

    beta: float = 0.7

    def __post_init__(self) -> None:
        check_positive("beta", self.beta)

    @property
    def temperature(self) -> float:
        return self.beta

    def __call__(self, nll: Tensor, logsumexp: Tensor, tempered_logsumexp: Tensor) -> Tensor:
        return nll + (tempered_logsumexp - logsumexp)


@dataclass(frozen=True)
class ExpectedValue:
    """Likelihood plus the squared error of the expected rating: `nll + weight D^2` with a `RatingCost`.

    D is `sum_i q_i v_i - v_y`, v the values of the rating tokens, and 0 at labels that are no ratings. The weight is in
    nats per squared unit of the ratings; a mean over tokens counts labels of both sorts.

    Example:
        >>> ExpectedValue(0.5)(torch.tensor([0.7]), torch.tensor([-2.0]))
        tensor([2.7000])
    """

    weight: float = 1.0
    needs_cost: ClassVar[bool] = True
    signed_cost: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_not_negative("weight", self.weight)

    def __call__(self, nll: Tensor, cost: Tensor | None) -> Tensor:
        return nll + self.weight * _required(cost).square()


@dataclass(frozen=True)
class LabelSmoothing:
    """Any objective with label smoothing: `(1 - epsilon) value + epsilon (Z - M)`.

    Z - M is the cross-entropy to the uniform distribution over the vocabulary, `-sum_i log q_i / V`: around `MLE()` it
    is `cross_entropy(label_smoothing=epsilon)` of torch, and the `label_smoothing_factor` of transformers.

    Example:
        >>> nll, zero, uniform = torch.tensor([0.5]), torch.tensor([0.0]), torch.tensor([2.5])
        >>> LabelSmoothing(MLE(), 0.1)(nll=nll, cost=None, logsumexp=uniform, mean_logit=zero)
        tensor([0.7000])
    """

    objective: Objective
    epsilon: float

    def __post_init__(self) -> None:
        _check_share("epsilon", self.epsilon)

    @property
    def reads(self) -> tuple[str, ...]:
        return _joined(self.objective, "logsumexp", "mean_logit")

    def __call__(self, **statistics: Tensor | None) -> Tensor:
        of_tokens = Statistics(**statistics)  # type: ignore[arg-type]
        assert of_tokens.logsumexp is not None
        assert of_tokens.mean_logit is not None
        uniform = of_tokens.logsumexp - of_tokens.mean_logit
        return (1.0 - self.epsilon) * value_of(self.objective, of_tokens) + self.epsilon * uniform


@dataclass(frozen=True)
class ZLoss:
    """Any objective with a penalty that keeps logits near 0: `value + weight Z^2` (PaLM, arXiv 2204.02311, section 5).

    Example:
        >>> ZLoss(MLE(), 0.1)(nll=torch.tensor([0.5]), cost=None, logsumexp=torch.tensor([2.0]))
        tensor([0.9000])
    """

    objective: Objective
    weight: float = 1e-4

    def __post_init__(self) -> None:
        check_not_negative("weight", self.weight)

    @property
    def reads(self) -> tuple[str, ...]:
        return _joined(self.objective, "logsumexp")

    def __call__(self, **statistics: Tensor | None) -> Tensor:
        of_tokens = Statistics(**statistics)  # type: ignore[arg-type]
        assert of_tokens.logsumexp is not None
        return value_of(self.objective, of_tokens) + self.weight * of_tokens.logsumexp.square()


def _joined(objective: Objective, *own: str) -> tuple[str, ...]:
    """nll, what the objective reads and what its wrapper does, in the order of `Statistics`."""
    return tuple(name for name in Statistics._fields if name in ("nll", *statistics_read(objective), *own))


def innermost(objective: Objective) -> Objective:
    """The objective without the wrappers around it."""
    while isinstance(objective, LabelSmoothing | ZLoss):
        objective = objective.objective
    return objective


def temperature_of(objective: Objective) -> float | None:
    """The temperature of `tempered_logsumexp` where `objective` reads it; None where it does not.

    Raises:
        ValueError: it is read, and the attribute `temperature` of the objective is no positive, finite number.
    """
    if "tempered_logsumexp" not in statistics_read(objective):
        return None
    temperature = getattr(innermost(objective), "temperature", None)
    if not isinstance(temperature, Real) or not 0.0 < float(temperature) < math.inf:
        raise ValueError(
            f"objective {objective!r} reads tempered_logsumexp and its temperature is {temperature!r}; expected an "
            "attribute temperature, a positive, finite number."
        )
    return float(temperature)


def with_innermost(objective: Objective, inner: Objective) -> Objective:
    """The wrappers of `objective` around another one."""
    if not isinstance(objective, LabelSmoothing | ZLoss):
        return inner
    return replace(objective, objective=with_innermost(objective.objective, inner))


def share_of_innermost(objective: Objective) -> float:
    """The factor that label smoothing leaves to the value of the innermost objective."""
    share = 1.0
    while isinstance(objective, LabelSmoothing | ZLoss):
        share *= 1.0 - objective.epsilon if isinstance(objective, LabelSmoothing) else 1.0
        objective = objective.objective
    return share


def value_of(objective: Objective, statistics: Statistics) -> Tensor:
    """The objective's value per token; raises ValueError if it is not one number per token."""
    nll = statistics.nll
    value = _called(objective, statistics)
    if not isinstance(value, Tensor) or value.shape != nll.shape:
        got = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
        raise ValueError(f"objective {objective!r} returned {got}, expected a value per token, {tuple(nll.shape)}.")
    return value


def _called(objective: Objective, statistics: Statistics) -> Tensor:
    read, by_name = _signature(objective)
    arguments = {name: getattr(statistics, name) for name in read}
    missing = [name for name, vector in arguments.items() if vector is None and name != "cost"]  # it says so itself
    if missing:
        raise ValueError(f"objective {objective!r} reads {missing}, which this path does not compute; use token_loss.")
    return objective(**arguments) if by_name else objective(*arguments.values())


def value_and_gradients(objective: Objective, statistics: Statistics) -> tuple[Tensor, Statistics]:
    """The objective's value per token, and its derivatives in the statistics (None where a statistic is not used).

    All are `(N,)`; the derivative in nll is 0 where nll is not used. The value is NaN where a derivative is not finite,
    which would otherwise show in the gradient only. Raises ValueError if the value has another shape than nll, or
    depends on no statistic.
    """
    with torch.enable_grad():
        leaves = statistics.map(lambda vector: vector.detach().requires_grad_())
        value = value_of(objective, leaves)
        if not value.requires_grad:
            names = " nor ".join(statistics_read(objective))
            raise ValueError(f"objective {objective!r} returned a value that depends on neither {names}.")
        present = [vector for vector in leaves if vector is not None]
        made = iter(torch.autograd.grad(value.sum(), present, allow_unused=True))
    of_leaves = {name: next(made) for name, vector in leaves._asdict().items() if vector is not None}
    if of_leaves["nll"] is None:
        of_leaves["nll"] = torch.zeros_like(statistics.nll)
    gradients = Statistics(**of_leaves)
    finite = torch.isfinite(torch.stack([gradient for gradient in gradients if gradient is not None])).all(0)
    return value.detach().masked_fill(~finite, math.nan), gradients


def check_tokenwise(objective: Objective, statistics: Statistics, value: Tensor) -> None:
    """Raise ValueError unless `objective` gives every second token the same value without the other tokens.

    It catches statistics over the batch (`nll.mean()`), tensors of one entry per token that an objective closes over,
    and parameters of its own, whose gradient the kernels would lose.
    """
    with torch.enable_grad():
        part = _called(objective, statistics.map(lambda vector: vector[::2].detach()))
    if part.requires_grad:
        raise ValueError(
            f"objective {objective!r} holds parameters that require grad, which this kernel does not differentiate; "
            'use impl="reference", or detach them.'
        )
    value = value[::2]
    same = part.shape == value.shape
    if same:
        expected = torch.where(value.isnan(), part, value)  # NaN marks a gradient, see value_and_gradients
        same = torch.allclose(part, expected, rtol=1e-3, atol=1e-6, equal_nan=True)
    if not same:
        raise ValueError(
            f"objective {objective!r} gives a token another value beside other tokens; entry t of the value may depend "
            "on entry t of its arguments only. Compute statistics over the batch beforehand and pass them as numbers."
        )


_NAMES = (
    "mle, tailr, mixce, emo, number_token, emo+number, dft, power, eaft, gem, expected_value, or with a parameter: "
    "tailr:GAMMA, mixce:GAMMA, emo:transport, emo:WEIGHT, emo:clip=NUMBER, emo:clip=none, number_token:WEIGHT, "
    "power:K, gem:BETA, expected_value:WEIGHT; and behind any of them +smoothing:EPSILON, +z_loss:WEIGHT"
)
_WITHOUT_NUMBER: dict[str, Objective] = {"mle": MLE(), "dft": MixCE(0.0), "eaft": EAFT()}
# What makes the objective, and the default of its number.
_WITH_NUMBER: dict[str, tuple[Callable[[float], Objective], float]] = {
    "tailr": (TaiLr, 1e-3),  # a larger gamma collapses on text that the model finds improbable
    "mixce": (MixCE, 0.8),  # within the sweep of the EMO paper
    "number_token": (NumberToken, 0.3), "power": (Power, 1.0), "gem": (GEM, 0.7),
    "expected_value": (ExpectedValue, 1.0),
}  # fmt: skip
_TERMS: dict[str, Callable[[Objective, float], Objective]] = {"smoothing": LabelSmoothing, "z_loss": ZLoss}


def _terms(text: str) -> tuple[str, list[tuple[str, str]]]:
    """The name of an objective, and the terms that are added to it, with their numbers."""
    name, *terms = re.split(rf"\+(?={'|'.join(_TERMS)})", text.strip().lower())
    return name, [(term, number) for term, _, number in (text.partition(":") for text in terms)]


def _parts(text: str) -> tuple[str, str]:
    """The name of an objective and its parameter; `emo:clip=3+number` is `emo+number:clip=3`."""
    name, _, parameter = _terms(text)[0].partition(":")
    if name == "emo" and parameter.endswith("+number"):
        return "emo+number", parameter.removesuffix("+number")
    return name, parameter


def parse_objective(text: str) -> Objective:
    """An objective from its name: `mle`, `tailr:0.001`, `mixce:0.8`, `emo`, `emo:transport`, `emo:0.5`, `emo:clip=3`,
    `emo:clip=none`, `number_token`, `number_token:0.3`, `emo+number`, `dft`, `power:2`, `eaft`,
    `gem:0.7`, `expected_value:1`; and with label smoothing or a z-loss, `gem+smoothing:0.1+z_loss:0.0001`.

    What follows the colon is gamma for TaiLr and MixCE (defaults 0.001 and 0.8), for EMO the weighting or the clip
    (default 3; none is EMO as published), for the number token loss its weight (default 0.3), for `power` the exponent
    (default 1), for `gem` beta (default 0.7), for `expected_value` its weight (default 1). `emo+number` is EMO, and
    only its name asks for the cost with numbers (`cost_kind`): hand the trainer the name, or the objective and
    `cost="mixed"`.

    Raises:
        ValueError: unknown name or parameter.

    Example:
        >>> parse_objective("mixce:0.7")
        MixCE(gamma=0.7)
    """
    try:
        objective = _named(*_parts(text))
        if objective is not None:
            for term, number in _terms(text)[1]:
                objective = _TERMS[term](objective, _number(f"+{term}:", number))
            return objective
    except ValueError as error:
        raise ValueError(f"objective is {text!r}: {error}") from None
    raise ValueError(f"objective is {text!r}, expected one of {_NAMES}.")


def _named(name: str, parameter: str) -> Objective | None:
    """The objective of this name; None if there is none."""
    if name in _WITHOUT_NUMBER and not parameter:
        return _WITHOUT_NUMBER[name]
    if name in _WITH_NUMBER:
        make, default = _WITH_NUMBER[name]
        return make(_number(f"{name}:", parameter) if parameter else default)
    if name not in ("emo", "emo+number"):
        return None
    if parameter.startswith("clip="):
        clip = parameter.removeprefix("clip=")
        return EMO(ratio_clip=None if clip == "none" else _number("clip=", clip))
    return EMO(parameter or "ratio") if parameter in ("", "ratio", "transport") else EMO(_number(f"{name}:", parameter))


def _number(before: str, text: str) -> float:
    """The number that follows `before` in the name of an objective."""
    try:
        return float(text)
    except ValueError:
        raise ValueError(f"{text!r} is not a number, expected one behind {before!r}, as in {before}0.5.") from None


def has_default_clip(text: str) -> bool:
    """Whether the name of an objective leaves the clip of EMO's ratio to the library."""
    name, parameter = _parts(text)
    return name in ("emo", "emo+number") and parameter in ("", "ratio") and not _terms(text)[1]


def cost_kind(objective: Objective | str) -> str:
    """The cost an objective is meant for: "number", "mixed" (numbers and embedding), "rating" or "embedding".

    Example:
        >>> cost_kind("emo+number:0.5"), cost_kind(NumberToken()), cost_kind("mle")
        ('mixed', 'number', 'embedding')
    """
    if isinstance(objective, str):
        if _parts(objective)[0] == "emo+number":
            return "mixed"
        objective = parse_objective(objective)
    return {NumberToken: "number", ExpectedValue: "rating"}.get(type(innermost(objective)), "embedding")
