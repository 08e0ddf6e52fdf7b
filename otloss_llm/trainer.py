"""Training with any objective on top of the Hugging Face `Trainer`: `ObjectiveMixin`, `ObjectiveTrainer`."""

from __future__ import annotations

import functools
import logging
import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Subset
from transformers import Trainer, default_data_collator

from otloss.costs import CosineCost, Cost
from otloss_llm._positions import IGNORE_INDEX, check_kernel, check_objective
from otloss_llm.cost_choice import NumberSettings, choose_cost, near_duplicates_in
from otloss_llm.costs import EmbeddingCost
from otloss_llm.data import PackedBlocks
from otloss_llm.fused import fused_loss, unwrap
from otloss_llm.heads import LanguageModelHead, check_causal, find_head
from otloss_llm.objectives import NumberToken, Objective, cost_kind, needs_cost, parse_objective
from otloss_llm.questions import AnsweredQuestions, count_labels, pad_questions
from otloss_llm.token_loss import TokenLoss, linear_token_loss, token_loss

logger = logging.getLogger(__name__)

LESS_IS_BETTER = ("nll", "perplexity", "transport_cost")


class ObjectiveMixin:
    """Give a `transformers.Trainer` (or a subclass of it) an objective of `(nll, transport cost)`.

    Mix it in before the trainer: `class MyTrainer(ObjectiveMixin, SFTTrainer): ...`. The loss is computed from hidden
    states inside the model's own forward pass, so the logits are never formed; labels are shifted here, once.

    Args:
        objective: an objective, or its name: "mle", "emo", "tailr:0.001", "mixce:0.8", "number_token", "emo+number"
            (see `parse_objective`).
        cost: "embedding" copies and freezes the head of `model` as it is now (the start of training); "number" reads
            the values of number tokens off the trainer's `processing_class`; "mixed" is both (`MixedCost`); "auto" the
            one of them that the objective is meant for; or any vocabulary cost; or None. It is used by objectives that
            need it, and reported by `evaluate()`.
            It is in no checkpoint: to resume a run, give the trainer the model that the run started from.
        numbers: form, scaling and span of the costs "number" and "mixed".
        impl, chunk_size: as in `linear_token_loss`.
        *args, **kwargs: of the trainer.

    Training logs carry `nll` and (for objectives that use it) `transport_cost` beside `loss`, token-weighted means
    since the last log. Where the cost has near-duplicate rows (see `EmbeddingCost`), one log line says how many labels
    are such tokens: of the whole training set if it is ours, else up to the first log. `evaluate()` returns
    token-weighted `eval_loss`, `eval_nll`, `eval_perplexity` and `eval_transport_cost`; less is better for each of them
    as `metric_for_best_model`.

    Raises:
        TypeError, ValueError: a model whose head cannot be handled, a cost of another vocabulary, an unknown objective.
    """

    # Of the trainer beside it in the class.
    model: Any
    args: Any
    accelerator: Any
    compute_loss_func: Any
    processing_class: Any
    is_deepspeed_enabled: bool
    is_fsdp_enabled: bool
    is_world_process_zero: Any

    def __init__(
        self,
        *args: Any,
        objective: Objective | str = "emo",
        cost: Cost | str | None = "auto",
        numbers: NumberSettings | None = None,
        impl: str = "auto",
        chunk_size: int | None = None,
        **kwargs: Any,
    ) -> None:
        collator = _collator_for(kwargs.get("train_dataset"), kwargs.get("eval_dataset"))
        if collator is not None and kwargs.get("data_collator") is None:
            kwargs["data_collator"] = collator
        super().__init__(*args, **kwargs)
        self.objective = parse_objective(objective) if isinstance(objective, str) else objective
        self.impl, self.chunk_size = impl, chunk_size
        self._refuse_unsupported()
        head = find_head(unwrap(self.model))
        sharded = self.is_deepspeed_enabled or self.is_fsdp_enabled  # no single process can run such a model here
        if not sharded and not any(parameter.is_meta for parameter in self.model.parameters()):
            check_causal(self.model)
        if isinstance(cost, str):
            cost = choose_cost(
                cost_kind(objective) if cost == "auto" else cost,
                embedding=lambda: EmbeddingCost(self._as_on_first_process(head.weight)),
                tokenizer=self.processing_class, vocab_size=head.weight.shape[0], numbers=numbers,
            )  # fmt: skip
        elif numbers is not None:
            raise ValueError(
                f'{numbers!r} goes with the cost "auto", "number" or "mixed", got a cost made already: {cost}.'
            )
        check_objective(self.objective, cost, head.weight.shape[0])
        _check_numbers(self.objective, cost)
        check_kernel(impl, chunk_size)
        self.transport_cost = cost
        if (self.args.metric_for_best_model or "").removeprefix("eval_") in LESS_IS_BETTER:
            self.args.greater_is_better = False  # the trainer guesses it from the name, for "loss" only
        self._logits_wanted = False
        self._near_duplicates: Tensor | None = None  # rows whose labels are still to be counted
        self._labels_of_them = torch.zeros(2, dtype=torch.long)  # and all labels
        if needs_cost(self.objective):
            self._count_near_duplicates(getattr(self, "train_dataset", None))
        self._train_sums: Tensor | None = None
        self._eval_sums: Tensor | None = None

    def _count_near_duplicates(self, rows: Any) -> None:
        """Say how many labels of our own rows are near-duplicates, or have those of the first batches counted."""
        self._near_duplicates = near_duplicates_in(self.transport_cost)
        if self._near_duplicates is not None and isinstance(rows, PackedBlocks | AnsweredQuestions):
            found, labels = count_labels(rows, self._near_duplicates.cpu())
            self._near_duplicates = None
            if self.is_world_process_zero():
                _say_of_near_duplicates(found, labels, "of the training set")

    def _as_on_first_process(self, weight: Tensor) -> Tensor:
        """DDP starts from the first process's weights; with FSDP's cpu_ram_efficient_loading no other has any."""
        weight = weight.detach()
        if self.args.world_size == 1 or not torch.distributed.is_initialized() or hasattr(weight, "placements"):
            return weight
        device = self.accelerator.device
        weight = torch.empty_like(weight, device=device) if weight.is_meta else weight.to(device, copy=True)
        torch.distributed.broadcast(weight, src=0)
        return weight

    def _refuse_unsupported(self) -> None:
        if self.args.n_gpu > 1:
            raise ValueError(f"{self.args.n_gpu} GPUs under nn.DataParallel are not supported; start with torchrun.")
        if self.args.label_smoothing_factor:
            raise ValueError(
                f"label_smoothing_factor={self.args.label_smoothing_factor} is not supported with an objective; "
                "use dense_token_loss with a smoothed target."
            )
        if self.compute_loss_func is not None:
            raise ValueError("compute_loss_func and an objective were both given; leave compute_loss_func out.")

    # ---- the loss -------------------------------------------------------------------------------------------------

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Any:
        """The objective over one batch; in training a sum over tokens / tokens of the whole accumulated batch."""
        inputs = dict(inputs)
        labels = _aligned_labels(inputs)
        training = model.training
        _check_numbers(self.objective, self.transport_cost)  # the objective may have been changed since
        cost = self._cost_on(labels.device) if needs_cost(self.objective) or not training else None
        num_items = num_items_in_batch if training else None
        if num_items is not None and not bool(torch.as_tensor(num_items) > 0):
            num_items = 1  # nothing but ignored labels: the sum is 0 whatever it is divided by
        result, outputs = self._score(model, inputs, labels, cost, num_items)
        self._remember(result, labels, training)
        loss = result.loss
        if num_items is not None and self.args.average_tokens_across_devices:
            loss = loss * self.accelerator.num_processes  # gradients are averaged over processes, tokens were summed
        return (loss, outputs) if return_outputs else loss

    def _score(
        self, model: nn.Module, inputs: dict[str, Any], labels: Tensor, cost: Cost | None, num_items: Any
    ) -> tuple[TokenLoss, dict[str, Tensor]]:
        settings: dict[str, Any] = {
            "objective": self.objective, "cost": cost, "ignore_index": IGNORE_INDEX, "num_items": num_items,
        }  # fmt: skip
        if self._logits_wanted:
            outputs = model(**inputs)
            result = token_loss(outputs["logits"], labels, **settings)
            return result, {"loss": result.loss, "logits": outputs["logits"]}

        def score(hidden: Tensor, head: LanguageModelHead) -> TokenLoss:
            if hidden.shape[:-1] != labels.shape:
                raise ValueError(
                    f"the head sees hidden states of shape {tuple(hidden.shape)}, labels have {tuple(labels.shape)}; "
                    "models that add or drop positions (prompt tuning) are not supported."
                )
            return linear_token_loss(
                hidden, head.weight, labels, bias=head.bias, logit_scale=head.scale, logit_softcap=head.softcap,
                impl=self.impl, chunk_size=self.chunk_size, **settings,
            )  # fmt: skip

        with fused_loss(model, score):
            outputs = model(**inputs)
        return TokenLoss(outputs["loss"], outputs["nll"], outputs.get("cost")), {"loss": outputs["loss"]}

    def _cost_on(self, device: torch.device) -> Cost | None:
        if self.transport_cost is not None and self.transport_cost.device != device:
            self.transport_cost = self.transport_cost.to(device)
        return self.transport_cost

    def get_batch_samples(self, epoch_iterator: Any, num_batches: int, device: torch.device) -> tuple[list, Any]:
        """The batches of one optimizer step, and the number of *predicted* tokens in them over all processes."""
        batches, _ = super().get_batch_samples(epoch_iterator, num_batches, device)  # type: ignore[misc]  # of the Trainer
        if not batches or any("labels" not in batch and "shift_labels" not in batch for batch in batches):
            return batches, None
        predicted = [(_aligned_labels(dict(batch)) != IGNORE_INDEX).sum() for batch in batches]
        count = torch.stack(predicted).sum().to(device)
        if self.args.average_tokens_across_devices and self.args.world_size > 1:
            count = self.accelerator.gather(count).sum()
        return batches, count

    def prediction_step(
        self, model: nn.Module, inputs: dict[str, Any], prediction_loss_only: bool, ignore_keys: Any = None
    ) -> Any:
        """As the trainer's; the logits are formed only where somebody asks for them (`compute_metrics`, `predict`)."""
        self._logits_wanted = not prediction_loss_only
        if "shift_labels" in inputs:
            inputs = inputs | {"labels": inputs["shift_labels"]}  # the trainer evaluates batches with labels only
        try:
            return super().prediction_step(model, inputs, prediction_loss_only, ignore_keys)  # type: ignore[misc]  # of the Trainer
        finally:
            self._logits_wanted = False

    # ---- reports --------------------------------------------------------------------------------------------------

    def _remember(self, result: TokenLoss, labels: Tensor, training: bool) -> None:
        """Add this batch's sums of (nll, transport cost, value, tokens)."""
        valid = labels != IGNORE_INDEX
        cost = torch.full_like(result.nll, math.nan) if result.cost is None else result.cost
        value = self.objective(result.nll[valid], None if result.cost is None else result.cost[valid])
        columns = [result.nll, cost, torch.zeros_like(result.nll).masked_scatter(valid, value), valid]
        sums = torch.stack([column.double().sum(-1) for column in columns], dim=-1)  # (batch, 4)
        if training and self._near_duplicates is not None:
            self._near_duplicates = self._near_duplicates.to(labels.device)
            found = torch.stack([self._near_duplicates[labels[valid]].sum(), valid.sum()])
            self._labels_of_them = self._labels_of_them.to(labels.device) + found
        if training:
            total = sums.sum(0)
            self._train_sums = total if self._train_sums is None else self._train_sums + total
        else:
            # Per example, so that examples repeated to fill the last distributed batch are dropped.
            total = self.accelerator.gather_for_metrics(sums).sum(0)
            self._eval_sums = total if self._eval_sums is None else self._eval_sums + total

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """As the trainer's, with token-weighted `nll` and `transport_cost` beside `loss`."""
        if "loss" in logs and self._train_sums is not None:
            sums = self.accelerator.reduce(self._train_sums, reduction="sum")
            self._train_sums = None
            logs |= {key: value for key, value in _means(sums).items() if key in ("nll", "transport_cost")}
            if self._near_duplicates is not None:
                self._near_duplicates = None
                found, labels = self.accelerator.reduce(self._labels_of_them, reduction="sum").tolist()
                if self.is_world_process_zero():
                    _say_of_near_duplicates(found, labels, "so far")
        super().log(logs, *args, **kwargs)  # type: ignore[misc]  # of the Trainer

    def evaluation_loop(self, *args: Any, metric_key_prefix: str = "eval", **kwargs: Any) -> Any:
        """As the trainer's, with token-weighted loss, nll, perplexity and transport cost."""
        self._eval_sums = None
        output = super().evaluation_loop(*args, metric_key_prefix=metric_key_prefix, **kwargs)  # type: ignore[misc]  # of the Trainer
        if self._eval_sums is not None:
            if not self._eval_sums[-1] > 0:
                raise ValueError("the evaluation set has no labelled token to score; every label is ignored.")
            means = _means(self._eval_sums)
            means["perplexity"] = math.exp(min(means["nll"], 700.0))
            output.metrics.update({f"{metric_key_prefix}_{key}": value for key, value in means.items()})
        return output


class ObjectiveTrainer(ObjectiveMixin, Trainer):
    """`transformers.Trainer` with an objective: `ObjectiveTrainer(model, args, objective="emo", train_dataset=...)`.

    See `ObjectiveMixin` for the arguments it adds, and the Hugging Face documentation for the rest.
    """


@functools.cache  # once for all the arms and seeds of a comparison
def _say_of_near_duplicates(found: int, labels: int, where: str) -> None:
    logger.warning(
        "%d of the %d labels %s (%.2f %%) are tokens of near-duplicate rows of the embedding, which cost 1 to every "
        "other token", found, labels, where, 100 * found / max(labels, 1),
    )  # fmt: skip


def _check_numbers(objective: Objective, cost: Cost | None) -> None:
    """Raise ValueError where the values of numbers are wanted, and the cost was made of an embedding."""
    if isinstance(objective, NumberToken) and isinstance(cost, CosineCost):
        raise ValueError(
            f"{objective!r} reads how far apart numbers are, and {type(cost).__name__} knows of none; give the trainer "
            f'cost="number" or NumberCost.from_tokenizer(tokenizer), or take EMO({objective.weight}) with this cost.'
        )


def _collator_for(train: Any, evaluation: Any) -> Any:
    """What makes batches of our own rows, whole or a `Subset` of them; None, the trainer's own, for any others."""
    rows = train if train is not None else evaluation
    if isinstance(rows, dict):  # several to evaluate on, by name
        rows = next(iter(rows.values()), None)
    while isinstance(rows, Subset):
        rows = rows.dataset
    if isinstance(rows, PackedBlocks):
        return default_data_collator  # blocks are of one length: nothing to pad
    return pad_questions if isinstance(rows, AnsweredQuestions) else None


def _aligned_labels(inputs: dict[str, Any]) -> Tensor:
    """Take the labels out of a batch, aligned with positions: entry `t` is the token that position `t` predicts."""
    labels, shifted = inputs.pop("labels", None), inputs.pop("shift_labels", None)
    if shifted is not None:
        return shifted
    if labels is None:
        raise ValueError(f"the batch has {sorted(inputs)} but no labels; use a collator that makes them "
                         "(DataCollatorForLanguageModeling(tokenizer, mlm=False)).")  # fmt: skip
    return nn.functional.pad(labels[..., 1:], (0, 1), value=IGNORE_INDEX)


def _means(sums: Tensor) -> dict[str, float]:
    nll, cost, value, tokens = sums.tolist()
    tokens = max(tokens, 1.0)
    means = {"loss": value / tokens, "nll": nll / tokens, "transport_cost": cost / tokens}
    return {key: mean for key, mean in means.items() if not math.isnan(mean)}
