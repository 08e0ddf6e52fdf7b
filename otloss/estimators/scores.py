"""Scores of ordered classes from features: a linear map or a multi-layer perceptron, as pure functions of one vector.

    softmax:      z = h W + b                            one score per position
    cumulative:   P(y <= k) = sigmoid(theta_k - f),      f = h w + b,  theta_0 = 0,  theta_k = theta_{k-1} + exp(gap_k)

with h the standardised features, or the last hidden layer of rectified units. The cumulative model (proportional odds;
McCullagh 1980) shares its weights between all classes: far fewer parameters, and ordered by construction. Its
log-probabilities serve as logits, for log-softmax leaves them as they are; `otloss.losses.cumulative_log_probabilities`
computes them, and `otloss.nn.CumulativeLinkHead` has the same model for backbones in PyTorch.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from otloss.losses import cumulative_log_probabilities

MODELS = ("softmax", "cumulative")


@dataclass(frozen=True)
class ScoreFunction:
    """Sizes of the layers, positions counted, and the model at the end; parameters come with each call.

    Attributes:
        inputs: number of features.
        hidden: widths of the hidden layers; empty for a linear model.
        positions: number m of classes, at least 2.
        model: one of `MODELS`.
    """

    inputs: int
    hidden: tuple[int, ...]
    positions: int
    model: str

    @property
    def widths(self) -> tuple[int, ...]:
        """Widths of all layers, features first."""
        return (self.inputs, *self.hidden, 1 if self.model == "cumulative" else self.positions)

    @property
    def shapes(self) -> list[tuple[int, ...]]:
        """Shapes of all parameters: weights and bias of each layer in turn, then the log-gaps of the thresholds."""
        layers: list[tuple[int, ...]] = [
            shape for pair in zip(self.widths, self.widths[1:], strict=False) for shape in (pair, pair[1:])
        ]
        return [*layers, (self.positions - 2,)] if self.model == "cumulative" else layers

    def unpack(self, parameters: Float[Tensor, " parameters"]) -> list[Tensor]:
        """The parameters as tensors of `shapes`."""
        sizes = [int(np.prod(shape)) for shape in self.shapes]
        return [part.view(shape) for part, shape in zip(parameters.split(sizes), self.shapes, strict=True)]

    def __call__(
        self, parameters: Float[Tensor, " parameters"], features: Float[Tensor, "rows inputs"]
    ) -> Float[Tensor, "rows positions"]:
        """Logits whose softmax is the distribution over positions."""
        tensors = self.unpack(parameters)
        layers = 2 * (len(self.widths) - 1)
        hidden = features
        for index in range(0, layers, 2):
            hidden = torch.addmm(tensors[index + 1], hidden, tensors[index])
            if index < layers - 2:
                hidden = hidden.relu()
        return cumulative_log_probabilities(hidden.squeeze(1), tensors[-1]) if self.model == "cumulative" else hidden

    def penalised(self) -> np.ndarray:
        """1 for each weight of a layer, 0 for biases and gaps; as long as the parameters."""
        return np.concatenate([np.full(int(np.prod(shape)), float(len(shape) == 2)) for shape in self.shapes])

    def start(self, prior: np.ndarray, random: np.random.RandomState) -> np.ndarray:
        """Parameters whose distribution is `prior` (m,) all over (linear) or near to it (hidden layers).

        Weights of a linear model are zero; those of hidden layers are Glorot's uniform ones.
        """
        parts = []
        for shape in self.shapes:
            bound = np.sqrt(6.0 / sum(shape)) if self.hidden and len(shape) == 2 else 0.0
            parts.append(random.uniform(-bound, bound, shape) if len(shape) == 2 else np.zeros(shape))
        if self.model == "cumulative":
            below = prior.cumsum()[:-1]
            logit = np.log(below) - np.log1p(-below)
            parts[-2][:] = -logit[0]
            parts[-1][:] = np.log(np.diff(logit))
        else:
            parts[-1][:] = np.log(prior)
        return np.concatenate([part.ravel() for part in parts])

    def restandardised(self, parameters: np.ndarray, *, shift: np.ndarray, stretch: np.ndarray) -> np.ndarray:
        """Parameters with the same scores once features h are replaced by (h - shift) / stretch."""
        parameters = parameters.copy()
        weights, bias = (part.numpy() for part in self.unpack(torch.from_numpy(parameters))[:2])
        bias += shift @ weights
        weights *= stretch[:, None]
        return parameters
