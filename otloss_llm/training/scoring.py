"""One forward pass of a model and the objective of its batch: inside the model, without logits, or from its logits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers.modeling_outputs import CausalLMOutput

from otloss_llm.costs.vocabulary import TokenCost
from otloss_llm.losses.positions import IGNORE_INDEX
from otloss_llm.losses.token_loss import TokenLoss, linear_token_loss, token_loss
from otloss_llm.models.logit_transform import LogitTransform
from otloss_llm.objectives import Statistics, Sum
from otloss_llm.training.batches import Targets
from otloss_llm.training.fused import ScoredHead, auxiliary_loss, fused_loss
from otloss_llm.training.predictions import TRAINING_TOKENS, logit_sums, prediction_sums


class Scored(NamedTuple):
    """A scored batch.

    Attributes:
        auxiliary: the loss that balances experts, if the model returns one.
        predictions: the sums of `training.predictions`, if they were asked for.
        output: the model's output, if it was asked for.
    """

    result: TokenLoss
    auxiliary: Tensor | None
    predictions: Tensor | None = None
    output: Any = None


@dataclass(frozen=True)
class Scoring:
    """How a batch is scored.

    Attributes:
        objective, num_items, impl, chunk_size: as in `linear_token_loss`.
        cost_on: returns the cost on a device, or None; the head may be on another device than the batch (device_map).
        predictions: whether to make the sums of `training.predictions`; not where the rows of the head are sharded.
    """

    objective: Sum
    num_items: Tensor | int | None
    cost_on: Callable[[torch.device], TokenCost | None]
    impl: str = "auto"
    chunk_size: int | None = None
    predictions: bool = False

    def from_hidden(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        targets: Targets,
        transform: LogitTransform,
        *,
        keep_output: bool = False,
    ) -> Scored:
        """Inside the forward pass of the model, which forms no logits."""
        predictions: list[Tensor] = []

        def score(hidden: Tensor, head: ScoredHead) -> TokenLoss:
            if hidden.shape[:-1] != targets.labels.shape:
                raise ValueError(
                    f"the head sees hidden states of shape {tuple(hidden.shape)}, labels have "
                    f"{tuple(targets.labels.shape)}; models that add or drop positions are not supported."
                )
            labels = targets.labels.to(hidden.device)
            result = linear_token_loss(
                hidden, labels=labels, impl=self.impl, chunk_size=self.chunk_size,
                **head._asdict(), **self._settings(hidden.device, targets),
            )  # fmt: skip
            if self.predictions and not hasattr(head.weight, "placements"):
                limit = TRAINING_TOKENS if model.training else None
                predictions.append(prediction_sums(hidden, labels, head, limit))
            return result

        with fused_loss(model, transform, score, keep_output=keep_output):
            outputs = model(**inputs)
        result = TokenLoss(outputs["loss"], **{name: outputs.get(name) for name in Statistics._fields})
        sums = predictions[0] if predictions else None
        return _scored(result, outputs, targets, sums)._replace(output=outputs.get("output"))

    def from_logits(self, model: nn.Module, inputs: dict[str, Any], targets: Targets) -> Scored:
        """Compute the loss from the model's own logits, which are part of its output."""
        outputs = model(**inputs)
        if not isinstance(outputs, dict):  # return_dict=False
            outputs = CausalLMOutput(logits=outputs[0])
        logits = outputs["logits"]
        labels = targets.labels.to(logits.device)
        result = token_loss(logits, labels, **self._settings(logits.device, targets))
        predictions = logit_sums(logits, labels) if self.predictions else None
        return _scored(result, outputs, targets, predictions)._replace(output=outputs)

    def _settings(self, device: torch.device, targets: Targets) -> dict[str, Any]:
        items, weight = self.num_items, targets.token_weight
        return {
            "objective": self.objective,
            "cost": self.cost_on(device),
            "ignore_index": IGNORE_INDEX,
            "num_items": items.to(device) if isinstance(items, Tensor) else items,
            "token_weight": None if weight is None else weight.to(device),
        }


def _scored(result: TokenLoss, outputs: Any, targets: Targets, predictions: Tensor | None) -> Scored:
    """Return the scored batch on its own device."""
    device = targets.labels.device
    statistics = result.statistics().map(lambda vector: vector.to(device))
    moved = (None if tensor is None else tensor.to(device) for tensor in (auxiliary_loss(outputs), predictions))
    return Scored(TokenLoss(result.loss.to(device), **statistics._asdict()), *moved)
