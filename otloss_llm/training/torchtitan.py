"""An objective in the place of torchtitan's `ChunkedLossWrapper`.

torchtitan's trainer calls the model without its head, and the loss with hidden states (batch, length, width), labels
that are shifted already, and the number of labels in the batches of all processes. The loss has been given the head
before, with `set_lm_head`. This is the interface of torchtitan 0.3, which is no dependency.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from otloss_llm.costs.vocabulary import TokenCost
from otloss_llm.losses.positions import IGNORE_INDEX
from otloss_llm.losses.token_loss import TokenLoss, linear_token_loss
from otloss_llm.models.heads import LanguageModelHead
from otloss_llm.models.sharded_heads import is_row_shard, replicated_like
from otloss_llm.objectives import Objective

__all__ = ["ObjectiveLoss"]

try:  # its trainer gives the head to instances of this class
    from torchtitan.components.loss import ChunkedLossWrapper
except ImportError:  # a loop of your own
    ChunkedLossWrapper = object


class ObjectiveLoss(ChunkedLossWrapper):
    """What torchtitan calls to turn hidden states into a loss, `(loss, metrics)`: `Trainer.Config(loss=...)`.

    Args:
        objective, cost: as in `linear_token_loss`.
        settings: others of `linear_token_loss`, such as `logit_softcap` or `check`.

    The head may be sharded by FSDP2 and by rows for tensor parallelism, whose processes have the same hidden states.
    """

    def __init__(self, objective: Objective, cost: TokenCost | None = None, **settings: Any) -> None:
        self.objective, self.cost, self.settings = objective, cost, settings
        self.lm_head: nn.Module | None = None

    def build(self, **settings: Any) -> ObjectiveLoss:
        """Itself: the trainer builds its loss of a configuration, and this one is its own."""
        return self

    def set_lm_head(self, lm_head: nn.Module) -> None:
        """Set the head; must be called before the first loss."""
        self.lm_head = lm_head

    def __call__(
        self,
        pred: Tensor,
        labels: Tensor,
        global_valid_tokens: Tensor | None = None,
        *,
        token_weight: Tensor | None = None,
        **loss_inputs: Any,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """The sum over labelled tokens, divided by `global_valid_tokens` if given, and means of nll and transport cost.

        Other `loss_inputs` are left out, as torchtitan's cross-entropy does. Raises ValueError for several predictions
        (multi-token prediction), and without a head.
        """
        if self.lm_head is None or not isinstance(pred, Tensor):
            got = "no head" if self.lm_head is None else f"a {type(pred).__name__} of predictions"
            raise ValueError(
                f"ObjectiveLoss has {got}; call set_lm_head(head) first, and pass one tensor of hidden states."
            )
        count = (
            None
            if global_valid_tokens is None
            else torch.as_tensor(global_valid_tokens, device=pred.device).clamp(min=1)
        )
        results: list[TokenLoss] = []
        head = LanguageModelHead(self.lm_head, "the torchtitan model")

        def scored(hidden: Tensor) -> Tensor:
            hidden, weight, bias = head.matching(hidden)
            if is_row_shard(weight) and not hasattr(hidden, "placements"):
                hidden = replicated_like(weight, hidden)
            results.append(
                linear_token_loss(
                    hidden, weight, labels, bias=bias, objective=self.objective, cost=self.cost, num_items=count,
                    reduction="sum" if count is None else "mean", token_weight=token_weight, **self.settings,
                )
            )  # fmt: skip
            return results[0].loss

        loss = self._through_hooks(head, scored, pred) if _is_fsdp(self.lm_head) else scored(pred)
        ignored = self.settings.get("ignore_index", IGNORE_INDEX)
        divisor = (labels != ignored).sum().clamp(min=1) if count is None else count
        means = {"nll/mean": results[0].nll, "transport_cost/mean": results[0].cost}
        return loss, {name: vector.sum() / divisor for name, vector in means.items() if vector is not None}

    @staticmethod
    def _through_hooks(head: LanguageModelHead, scored: Callable[[Tensor], Tensor], pred: Tensor) -> Tensor:
        """The loss, made while the head runs: FSDP2 gathers its weight before, and reduces the gradient after."""
        losses: list[Tensor] = []

        def forward(hidden: Tensor) -> Tensor:
            losses.append(scored(hidden))
            weight = head.module.weight
            # The hooks of tensor parallelism expect logits.
            return losses[0] if not is_row_shard(weight) else weight[:, :1].T.detach()  # type: ignore[index]

        with head.replaced(forward):
            head.module(pred)
        return losses[0]


def _is_fsdp(module: nn.Module) -> bool:
    return hasattr(module, "set_requires_gradient_sync")
