"""Training objectives of language models: small pure functions of per-token statistics, one value per token.

Notation as in `objectives/statistics.py`; `sg` is stop-gradient (`detach`).

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

Terms around any of them: LabelSmoothing, ZLoss, WithNumbers. These, Number and Expected are sums (`Sum.terms`).

Where D > 0 and nothing is clipped the *value* of EMO equals nll; only its gradient differs. Where the ratio is clipped
the value is less than nll. A loss that is equal to nll in the logs thus does not mean that EMO is off; watch
`TokenLoss.cost` to see its effect.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from numbers import Real
from typing import ClassVar

import torch
from torch import Tensor

from otloss._checks import check_not_negative, check_number, check_positive
from otloss_llm.objectives.statistics import Objective, Sum, Term

DEFAULT_CLIP = 3.0  # EMO's ratio nll / D is at most this


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

    Formulas: docs/guide/definitions.md#def-emo

    Args:
        weighting: "ratio" is Eq. 19 of the paper per token, `0.5 (nll + sg(nll / D) D)`; "transport" is the second
            mode of the published code, `sg(D / nll) nll + D`; a float `w` is a fixed weight, `nll + w D`.
        ratio_clip: upper bound of the detached ratio, or None for no bound. "default" is 3 with "ratio", as in the
            published package, and None otherwise. `EMO(ratio_clip=None)` is Eq. 19 as published: training with it can
            collapse onto tokens that lie near to all others (`docs/reports/evidence.md`). Not with a fixed weight.
        cost_kind: the cost that a trainer makes for it, "embedding", or "mixed" with numbers; no part of the formula.

    Where the ratio's denominator is 0 the ratio is 0. Where the ratio is clipped the value is less than nll; elsewhere
    the two are equal, and only the gradients differ.

    Example:
        >>> EMO()(torch.tensor([0.7, 0.7]), torch.tensor([0.5, 0.1]))
        tensor([0.7000, 0.5000])
    """

    weighting: str | float = "ratio"
    ratio_clip: float | str | None = "default"
    cost_kind: str = field(default="embedding", repr=False, compare=False)
    needs_cost: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.ratio_clip == "default":
            object.__setattr__(self, "ratio_clip", DEFAULT_CLIP if self.weighting == "ratio" else None)
        fixed, clip = isinstance(self.weighting, Real), self.ratio_clip
        if fixed:
            check_not_negative("weighting", self.weighting)
        elif self.weighting not in ("ratio", "transport"):
            raise ValueError(
                f'weighting is {self.weighting!r}, expected "ratio", "transport" or a finite, non-negative number.'
            )
        if clip is not None and (fixed or isinstance(clip, str) or not check_number("ratio_clip", clip) > 0):
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
class NumberDistance:
    """D with a `NumberCost`, 0 at labels that are not numbers; trainers take its mean over number positions."""

    cost_kind: ClassVar[str] = "number"

    def __call__(self, cost: Tensor | None) -> Tensor:
        return _required(cost)


@dataclass(frozen=True)
class WithNumbers(Sum):
    """Any objective that reads no cost, plus the distance of the predicted numbers: `value + weight D`.

    As in `NumberToken`, which is this around `MLE()`.

    Example:
        >>> WithNumbers(GEM(1.0), 0.5).reads, WithNumbers(MLE(), 0.5)(torch.tensor([0.7]), torch.tensor([2.0]))
        (('nll', 'cost', 'logsumexp', 'tempered_logsumexp'), tensor([1.7000]))
    """

    objective: Objective
    weight: float = 0.3

    def __post_init__(self) -> None:
        check_not_negative("weight", self.weight)
        if Sum.of(self.objective).needs_cost:
            raise ValueError(
                f"{self.objective!r} reads a transport cost already, to which no distance of numbers can be added; "
                "expected an objective without a cost, or emo+number for EMO with numbers."
            )

    @property
    def terms(self) -> tuple[Term, ...]:
        return (*Sum.of(self.objective).terms, Term(NumberDistance(), self.weight))


@dataclass(frozen=True)
class NumberToken(Sum):
    """Likelihood plus the distance of the predicted numbers: `nll + weight D` with a `NumberCost`.

    D is 0 at labels that are not numbers. The published loss is the mean of nll over all tokens plus `weight` times the
    mean of D over the number positions alone: `ObjectiveTrainer`, `train` and `compare` minimise it, and `per_number`
    has it for a loop of your own.
    The mean of this value over all tokens, as in `token_loss` and `linear_token_loss`, weighs D less, by the share of
    labels that are numbers. The weight is in nats per unit of the cost, and `NumberCost.from_tokenizer` has one unit
    for every tokenizer. With an embedding cost it equals `EMO(weight)`; a trainer raises ValueError for that pair.

    Formulas: docs/guide/definitions.md#def-numbers

    Example:
        >>> NumberToken()(torch.tensor([0.7]), torch.tensor([2.0]))
        tensor([1.3000])
    """

    weight: float = 0.3

    def __post_init__(self) -> None:
        check_not_negative("weight", self.weight)

    @property
    def terms(self) -> tuple[Term, ...]:
        return Term(MLE()), Term(NumberDistance(), self.weight)

    def per_number(self, tokens: float, numbers: float) -> NumberToken:
        """The objective whose mean over `tokens` tokens has `weight` times the mean of D over `numbers` of them."""
        return NumberToken(self.weight * tokens / (numbers or 1))


@dataclass(frozen=True)
class Power:
    """The power of the probability, `-q_y^k`: a larger k trains less on tokens that the model finds improbable.

    Args:
        k: exponent > 0; 1 is the probability itself. As k goes to 0, gradient / k becomes the gradient of nll.

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

    The gradient `softmax(z / beta) - e_y` is exactly the gradient of GEM's linear form, which weighs the log-ratios
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
class SquaredDifference:
    """D^2 with a `RatingCost`, whose D is the signed difference between the expected rating and the label."""

    cost_kind: ClassVar[str] = "rating"
    signed_cost: ClassVar[bool] = True

    def __call__(self, cost: Tensor | None) -> Tensor:
        return _required(cost).square()


@dataclass(frozen=True)
class ExpectedValue(Sum):
    """Likelihood plus the squared error of the expected rating: `nll + weight D^2` with a `RatingCost`.

    D is `sum_i q_i v_i - v_y`, v the values of the rating tokens, and 0 at labels that are no ratings. The weight is in
    nats per squared unit of the ratings; a mean over tokens counts labels of both sorts.

    Formulas: docs/guide/definitions.md#def-numbers

    Example:
        >>> ExpectedValue(0.5)(torch.tensor([0.7]), torch.tensor([-2.0]))
        tensor([2.7000])
    """

    weight: float = 1.0

    def __post_init__(self) -> None:
        check_not_negative("weight", self.weight)

    @property
    def terms(self) -> tuple[Term, ...]:
        return Term(MLE()), Term(SquaredDifference(), self.weight)


@dataclass(frozen=True)
class LabelSmoothing(Sum):
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
    def terms(self) -> tuple[Term, ...]:
        uniform = Term(uniform_cross_entropy, self.epsilon)
        return (*Sum.of(self.objective).scaled(1.0 - self.epsilon).terms, uniform)


def uniform_cross_entropy(logsumexp: Tensor, mean_logit: Tensor) -> Tensor:
    return logsumexp - mean_logit


@dataclass(frozen=True)
class ZLoss(Sum):
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
    def terms(self) -> tuple[Term, ...]:
        return (*Sum.of(self.objective).terms, Term(_squared_logsumexp, self.weight))


def _squared_logsumexp(logsumexp: Tensor) -> Tensor:
    return logsumexp.square()
