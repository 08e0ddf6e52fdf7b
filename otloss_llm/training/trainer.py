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
from transformers.modeling_outputs import CausalLMOutput

from otloss.costs import CosineCost
from otloss_llm.costs.choice import NumberSettings, choose_cost, near_duplicates_in
from otloss_llm.costs.embedding import EmbeddingCost
from otloss_llm.costs.vocabulary import TokenCost
from otloss_llm.data.blocks import PackedBlocks
from otloss_llm.data.questions import AnsweredQuestions, count_labels, pad_questions
from otloss_llm.losses.positions import IGNORE_INDEX, check_kernel, check_objective, cost_positions
from otloss_llm.losses.token_loss import TokenLoss, linear_token_loss, token_loss
from otloss_llm.models.heads import check_causal, few_tokens, find_head
from otloss_llm.models.logit_transform import LogitTransform
from otloss_llm.objectives import NumberToken, Objective, cost_kind, needs_cost, parse_objective
from otloss_llm.training.fused import ScoredHead, auxiliary_loss, fused_loss, measure_transform, unwrap

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

    A mixture of experts that returns a loss to balance its experts (`output_router_logits`, which TRL sets) is trained
    with it: `loss` is the objective plus that loss times the model's `router_aux_loss_coef`, averaged over the batches
    of an accumulated step and over processes.

    Training logs carry `nll` and (for objectives that use it) `transport_cost` beside `loss`, token-weighted means
    since the last log, and `aux_loss`, that of the experts without its weight. Where the cost has near-duplicate rows
    (see `EmbeddingCost`), one log line says how many labels are such tokens: of the whole training set if it is ours,
    else up to the first log. `evaluate()` returns token-weighted `eval_loss`, `eval_nll`, `eval_perplexity` and
    `eval_transport_cost` (less is better for each of them as `metric_for_best_model`), and `eval_aux_loss`. The
    transport cost of a cost of numbers is the mean over number positions; `NumberToken(weight)` adds `weight` times
    this mean to that of nll, in training over the tokens of one optimizer step.

    Raises:
        TypeError, ValueError: a model whose head cannot be handled, a cost of another vocabulary, an unknown objective,
            settings that would change the trainer's own loss (`loss_type`, `label_smoothing_factor`,
            `compute_loss_func`, `use_liger_kernel`).
    """

    # Of the trainer beside it in the class.
    model: Any
    args: Any
    accelerator: Any
    compute_loss_func: Any
    processing_class: Any
    current_gradient_accumulation_steps: int
    loss_is_scaled_for_ga: bool | None
    is_deepspeed_enabled: bool
    is_fsdp_enabled: bool
    is_world_process_zero: Any

    def __init__(
        self,
        *args: Any,
        objective: Objective | str = "emo",
        cost: TokenCost | str | None = "auto",
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
        self._transform: LogitTransform | None = None
        sharded = self.is_deepspeed_enabled or self.is_fsdp_enabled  # no single process can run such a model here
        if not sharded and not any(parameter.is_meta for parameter in self.model.parameters()):
            check_causal(self.model)
            self._transform = measure_transform(self.model, {"input_ids": few_tokens(self.model)})
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
        self._numbers_in_step: Tensor | None = None
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
        """Raise ValueError for settings that would change the trainer's own loss, and do nothing to an objective."""
        if self.args.n_gpu > 1:
            raise ValueError(f"{self.args.n_gpu} GPUs under nn.DataParallel are not supported; start with torchrun.")
        if self.args.label_smoothing_factor:
            raise ValueError(
                f"label_smoothing_factor={self.args.label_smoothing_factor} is not supported with an objective; "
                "use dense_token_loss with a smoothed target."
            )
        if self.compute_loss_func is not None:
            raise ValueError("compute_loss_func and an objective were both given; leave compute_loss_func out.")
        loss_type = getattr(self.args, "loss_type", "nll")  # of TRL's configs
        if loss_type != "nll":
            raise ValueError(
                f"loss_type={loss_type!r} and an objective were both given; leave loss_type out, the objective is "
                f"{self.objective!r}."
            )
        kernels = getattr(self.args, "liger_kernel_config", None) or {}
        if getattr(self.args, "use_liger_kernel", False) and kernels.get("fused_linear_cross_entropy", True):
            raise ValueError(
                "use_liger_kernel=True puts a cross-entropy of its own into the model, where it would do nothing; "
                'add liger_kernel_config={"fused_linear_cross_entropy": False} to keep its other kernels.'
            )

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
        inputs.pop("skip_logits", None)  # the trainer's word to Liger's cross-entropy
        if getattr(self, "aux_loss_enabled", False):  # TRL's word that experts are to be balanced
            inputs["output_router_logits"] = True
        training = model.training
        _check_numbers(self.objective, self.transport_cost)  # the objective may have been changed since
        num_items = num_items_in_batch if training else None
        if num_items is not None and not bool(torch.as_tensor(num_items) > 0):
            num_items = 1  # nothing but ignored labels: the sum is 0 whatever it is divided by
        # Of the trainer: whether to divide by the number of accumulated batches. It would look at the model to decide.
        self.loss_is_scaled_for_ga = num_items is not None
        objective = self._objective_of(labels, num_items) if training else self.objective
        result, auxiliary, logits = self._score(model, inputs, labels, num_items, objective)
        self._remember(result, auxiliary, labels, training)
        loss = result.loss
        if num_items is not None and self.args.average_tokens_across_devices:
            loss = loss * self.accelerator.num_processes  # gradients are averaged over processes, tokens were summed
        if auxiliary is not None:  # a mean over tokens in each batch: its mean over batches and processes
            batches = self.current_gradient_accumulation_steps if num_items is not None else 1
            loss = loss + self._auxiliary_weight() * auxiliary / batches
        return (loss, CausalLMOutput(loss=loss, logits=logits)) if return_outputs else loss

    def _score(
        self, model: nn.Module, inputs: dict[str, Any], labels: Tensor, num_items: Any, objective: Objective
    ) -> tuple[TokenLoss, Tensor | None, Tensor | None]:
        """The objective, the loss that balances experts where the model returns one, and logits if they are wanted."""
        wanted = needs_cost(objective) or not model.training

        def settings(device: torch.device) -> dict[str, Any]:
            items = num_items.to(device) if isinstance(num_items, Tensor) else num_items
            cost = self._cost_on(device) if wanted else None
            return {"objective": objective, "cost": cost, "ignore_index": IGNORE_INDEX, "num_items": items}

        def score(hidden: Tensor, head: ScoredHead) -> TokenLoss:
            if hidden.shape[:-1] != labels.shape:
                raise ValueError(
                    f"the head sees hidden states of shape {tuple(hidden.shape)}, labels have {tuple(labels.shape)}; "
                    "models that add or drop positions (prompt tuning) are not supported."
                )
            return linear_token_loss(
                hidden, labels=labels.to(hidden.device), impl=self.impl, chunk_size=self.chunk_size,
                **head._asdict(), **settings(hidden.device),
            )  # fmt: skip

        logits = None
        if self._logits_wanted:
            outputs = model(**inputs)
            logits = outputs["logits"]
            result = token_loss(logits, labels.to(logits.device), **settings(logits.device))
        else:
            if self._transform is None:
                self._transform = measure_transform(model, inputs)
            with fused_loss(model, self._transform, score):
                outputs = model(**inputs)
            result = TokenLoss(outputs["loss"], outputs["nll"], outputs.get("cost"))
        # The head may be on another device than the batch (device_map).
        here = [tensor if tensor is None else tensor.to(labels.device) for tensor in (*result, auxiliary_loss(outputs))]
        loss, nll, cost, auxiliary = here
        assert loss is not None
        assert nll is not None
        return TokenLoss(loss, nll, cost), auxiliary, logits

    def _auxiliary_weight(self) -> float:
        """The weight of the loss that balances experts: TRL's setting, else the one that the model itself uses."""
        model: Any = unwrap(self.model)
        model = model.get_base_model() if hasattr(model, "get_base_model") else model
        config = model.config.get_text_config()
        for owner in (self, model, config):
            for name in ("router_aux_loss_coef", "aux_loss_coef"):
                weight = getattr(owner, name, None)
                if weight is not None:
                    return float(weight)
        raise ValueError(
            f"{type(model).__name__} returns an auxiliary loss (mixture of experts) and no router_aux_loss_coef to "
            "weight it with; set it in the model's config, or output_router_logits=False to train without that loss."
        )

    def _objective_of(self, labels: Tensor, num_items: Any) -> Objective:
        """Where it is a mean over numbers, with the weight that gives it as a mean over the tokens of this step."""
        if not isinstance(self.objective, NumberToken):
            return self.objective
        tokens, numbers = num_items, self._numbers_in_step
        if tokens is None or numbers is None:
            tokens, numbers = self._counts(labels)
        return self.objective.per_number(float(tokens), float(numbers))

    def _counts(self, labels: Tensor) -> Tensor:
        """How many predicted tokens there are, and how many of them a mean over numbers is about."""
        about = valid = labels != IGNORE_INDEX
        if isinstance(self.objective, NumberToken):
            about = cost_positions(self._cost_on(labels.device), labels, valid)
        return torch.stack([valid.sum(), about.sum()])

    def _cost_on(self, device: torch.device) -> TokenCost | None:
        if self.transport_cost is not None and self.transport_cost.device != device:
            self.transport_cost = self.transport_cost.to(device)
        return self.transport_cost

    def get_batch_samples(self, epoch_iterator: Any, num_batches: int, device: torch.device) -> tuple[list, Any]:
        """The batches of one optimizer step, and the number of *predicted* tokens in them over all processes."""
        batches, _ = super().get_batch_samples(epoch_iterator, num_batches, device)  # type: ignore[misc]  # of the Trainer
        if not batches or any("labels" not in batch and "shift_labels" not in batch for batch in batches):
            return batches, None
        counts = torch.stack([self._counts(_aligned_labels(dict(batch))) for batch in batches]).sum(0).to(device)
        if self.args.average_tokens_across_devices and self.args.world_size > 1:
            counts = self.accelerator.gather(counts.unsqueeze(0)).sum(0)
        count, self._numbers_in_step = counts
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

    def _remember(self, result: TokenLoss, auxiliary: Tensor | None, labels: Tensor, training: bool) -> None:
        """Add this batch's sums of (nll, cost, value, what the cost is about, tokens, auxiliary loss, rows)."""
        valid = labels != IGNORE_INDEX
        cost = torch.full_like(result.nll, math.nan) if result.cost is None else result.cost
        value = self.objective(result.nll[valid], None if result.cost is None else result.cost[valid])
        about = cost_positions(None if result.cost is None else self.transport_cost, labels, valid)
        columns = [result.nll, cost, torch.zeros_like(result.nll).masked_scatter(valid, value), about, valid]
        per_row = [column.double().sum(-1) for column in columns]
        ones = torch.ones_like(per_row[0])
        per_row += [ones * (math.nan if auxiliary is None else auxiliary.detach().double()), ones]
        sums = torch.stack(per_row, dim=-1)  # (batch, 7)
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
        """As the trainer's, with token-weighted `nll` and `transport_cost` (and `aux_loss`) beside `loss`."""
        if "loss" in logs and self._train_sums is not None:
            sums = self.accelerator.reduce(self._train_sums, reduction="sum")
            self._train_sums = None
            logs |= {key: value for key, value in _means(sums).items() if key != "loss"}
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
            if not self._eval_sums[4] > 0:
                raise ValueError("the evaluation set has no labelled token to score; every label is ignored.")
            means = _means(self._eval_sums)
            if isinstance(self.objective, NumberToken):
                means["loss"] = means["nll"] + self.objective.weight * means["transport_cost"]
            if "aux_loss" in means:
                means["loss"] += self._auxiliary_weight() * means["aux_loss"]
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


def _check_numbers(objective: Objective, cost: TokenCost | None) -> None:
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
    """Means over tokens, over positions that the cost is about, and over rows for the loss that balances experts."""
    nll, cost, value, about, tokens, auxiliary, rows = sums.tolist()
    tokens = max(tokens, 1.0)
    means = {
        "loss": value / tokens, "nll": nll / tokens, "transport_cost": cost / max(about, 1.0),
        "aux_loss": auxiliary / rows,
    }  # fmt: skip
    return {key: mean for key, mean in means.items() if not math.isnan(mean)}
