"""A head for ordered classes: one score and ordered thresholds."""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from otloss._checks import check_floating, check_last_axis
from otloss.losses import cumulative_log_probabilities, decode_classes


class CumulativeLinkHead(nn.Module):
    """Log-probabilities of ordered classes from features: a linear score and ordered thresholds.

    P(y <= k) = sigmoid(theta_k - w.h - b) with theta_0 = 0 and gaps exp(log_gaps), the model of proportional odds. It
    is `OrdinalClassifier(model="cumulative")` behind any backbone: in_features + K - 1 parameters.
    Its log-probabilities are valid logits for `otloss.ordinal_loss`, and are at least in float32.

    Args:
        in_features: size of the last axis of the features.
        num_classes: K, at least 2.
        device, dtype: of the parameters, as for `torch.nn.Linear`.

    Attributes:
        score: the linear map from features to the score.
        log_gaps: (K - 2,) logarithms of the gaps between neighbouring thresholds. They start where a score of w.h = 0
            gives every class the same probability.

    Raises:
        ValueError: if num_classes is less than 2, or features do not have in_features entries.

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
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if num_classes < 2:
            raise ValueError(f"num_classes is {num_classes}, expected at least 2.")
        self.in_features, self.num_classes = in_features, num_classes
        self.score = nn.Linear(in_features, 1, device=device, dtype=dtype)
        self.log_gaps = nn.Parameter(torch.empty(num_classes - 2, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialise weights as `torch.nn.Linear` does, and thresholds for equal probabilities."""
        self.score.reset_parameters()
        below = torch.arange(1, self.num_classes, dtype=torch.float64, device="cpu") / self.num_classes
        thresholds = torch.logit(below)
        with torch.no_grad():
            self.score.bias.fill_(-float(thresholds[0]))
            self.log_gaps.copy_(thresholds.diff().log())

    @property
    def thresholds(self) -> Float[Tensor, " thresholds"]:
        """(K - 1,) increasing values t with P(y <= k) = sigmoid(t_k - w.h), at least in float32."""
        dtype = torch.promote_types(self.log_gaps.dtype, torch.float32)
        gaps, bias = self.log_gaps.to(dtype).exp(), self.score.bias.to(dtype)
        return torch.cat([gaps.new_zeros(1), gaps.cumsum(0)]) - bias

    def forward(self, features: Float[Tensor, "*batch features"]) -> Float[Tensor, "*batch classes"]:
        check_last_axis("features", check_floating("features", features), self.in_features)
        return cumulative_log_probabilities(self.score(features).squeeze(-1), self.log_gaps)

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

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, num_classes={self.num_classes}"
