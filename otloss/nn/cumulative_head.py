"""Heads for ordered classes: one score and ordered thresholds, or the odds of going on from each class.

As the last layers of models they go through `torch.export`, `torch.onnx.export` with dynamo=True, `torch.jit.trace`,
and `torch.compile` with fullgraph=True; `predict` reads numbers and does not.
"""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn.functional import pad

from otloss._checks import check_count, check_floating, check_last_axis
from otloss._ordered_classes import check_choice
from otloss.losses import cumulative_log_probabilities, decode_classes
from otloss.losses.cumulative import LINKS, log_sigmoid, quantiles


class _Head(nn.Module):
    """What both heads share: sizes, decisions."""

    def __init__(self, in_features: int, num_classes: int) -> None:
        super().__init__()
        check_count("in_features", in_features)
        check_count("num_classes", num_classes, 2)
        self.in_features, self.num_classes = in_features, num_classes

    def predict(
        self,
        features: Float[Tensor, "*batch features"],
        rule: str = "median",
        *,
        x: Float[Tensor, " classes"] | None = None,
    ) -> Int[Tensor, "*batch"]:
        """Return one class position for each row of features, by `otloss.losses.decode_classes`."""
        with torch.no_grad():
            return decode_classes(self(features), rule, x=x)

    def _checked(self, features: Float[Tensor, "*batch features"]) -> Float[Tensor, "*batch features"]:
        check_last_axis("features", check_floating("features", features, is_read=False), self.in_features)
        return features

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, num_classes={self.num_classes}"


class CumulativeLinkHead(_Head):
    """Log-probabilities of ordered classes from features: a linear score and ordered thresholds.

    P(y <= k) = sigmoid(theta_k - w.h - b) with theta_0 = 0 and gaps exp(log_gaps), the model of proportional odds. It
    is `otloss.estimators.CumulativeLinkClassifier` behind any backbone: in_features + K - 1 parameters.
    Its log-probabilities are valid logits for `otloss.ordinal_loss`, and are at least in float32.
    With `otloss.losses.threshold_loss` it is CORAL, whose biases are -thresholds, ordered in every step here.

    Args:
        in_features: size of the last axis of the features.
        num_classes: K, at least 2.
        link: "logit", "probit" or "cloglog" (complementary log-log), in place of the sigmoid.
        device, dtype: of the parameters, as for `torch.nn.Linear`.

    Attributes:
        score: the linear map from features to the score.
        log_gaps: (K - 2,) logarithms of the gaps between neighbouring thresholds. They start where a score of w.h = 0
            gives every class the same probability.

    Raises:
        ValueError: if num_classes is less than 2, the link is unknown, or features do not have in_features entries.

    Source:
        P. McCullagh, Regression models for ordinal data, JRSS B 42 (1980), 109-142.

    Example:
        >>> import torch
        >>> from otloss import ordinal_loss
        >>> head = CumulativeLinkHead(8, 5)
        >>> features, grades = torch.randn(16, 8), torch.randint(5, (16,))
        >>> ordinal_loss(head(features), grades).backward()
        >>> head.predict(features).shape, head.thresholds.shape
        (torch.Size([16]), torch.Size([4]))
    """

    def __init__(
        self,
        in_features: int,
        num_classes: int,
        *,
        link: str = "logit",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(in_features, num_classes)
        check_choice("link", link, LINKS)
        self.link = link
        self.score = nn.Linear(in_features, 1, device=device, dtype=dtype)
        self.log_gaps = nn.Parameter(torch.empty(num_classes - 2, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialise weights as `torch.nn.Linear` does, and thresholds for equal probabilities."""
        self.score.reset_parameters()
        below = torch.arange(1, self.num_classes, dtype=torch.float64, device="cpu") / self.num_classes
        thresholds = quantiles(below, self.link)
        with torch.no_grad():
            self.score.bias.fill_(-float(thresholds[0]))
            self.log_gaps.copy_(thresholds.diff().log())

    @property
    def thresholds(self) -> Float[Tensor, " thresholds"]:
        """(K - 1,) increasing values t with P(y <= k) = H(t_k - w.h) for the link's H, at least in float32."""
        dtype = torch.promote_types(self.log_gaps.dtype, torch.float32)
        gaps, bias = self.log_gaps.to(dtype).exp(), self.score.bias.to(dtype)
        return torch.cat([gaps.new_zeros(1), gaps.cumsum(0)]) - bias

    def forward(self, features: Float[Tensor, "*batch features"]) -> Float[Tensor, "*batch classes"]:
        return cumulative_log_probabilities(self.score(self._checked(features)).squeeze(-1), self.log_gaps, self.link)

    def extra_repr(self) -> str:
        return super().extra_repr() + f", link={self.link!r}"


class CornHead(_Head):
    """Log-probabilities of ordered classes from features: the odds of P(y > k) among y >= k, for each k alone.

    P(y > k | y >= k) = sigmoid(w_k.h + b_k), the model of continuation ratios, so P(y > k) never increases in k:
    (in_features + 1) (K - 1) parameters. Cross-entropy of its log-probabilities is the loss of CORN, which divides the
    sum by the number of binary tasks in place of rows: sum over rows of min(y + 1, K - 1).

    Args:
        in_features: size of the last axis of the features.
        num_classes: K, at least 2.
        device, dtype: of the parameters, as for `torch.nn.Linear`.

    Attributes:
        scores: the linear map from features to the K - 1 conditional log-odds.

    Raises:
        ValueError: if num_classes is less than 2, or features do not have in_features entries.

    Source:
        X. Shi, W. Cao, S. Raschka, Deep neural networks for rank-consistent ordinal regression based on conditional
        probabilities, arXiv 2111.08851.

    Example:
        >>> import torch
        >>> head = CornHead(8, 5)
        >>> features, grades = torch.randn(16, 8), torch.randint(5, (16,))
        >>> torch.nn.functional.nll_loss(head(features), grades).backward()
        >>> head.predict(features).shape
        torch.Size([16])
    """

    def __init__(
        self,
        in_features: int,
        num_classes: int,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(in_features, num_classes)
        self.scores = nn.Linear(in_features, num_classes - 1, device=device, dtype=dtype)

    def forward(self, features: Float[Tensor, "*batch features"]) -> Float[Tensor, "*batch classes"]:
        scores = self.scores(self._checked(features))
        scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
        return pad(log_sigmoid(-scores), (0, 1)) + pad(log_sigmoid(scores).cumsum(-1), (1, 0))
