"""Training with any objective on top of the Hugging Face `Trainer`: `ObjectiveMixin`, `ObjectiveTrainer`."""

from __future__ import annotations

import logging
import math
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Trainer
from transformers.modeling_outputs import CausalLMOutput

from otloss_llm.costs.choice import NumberSettings
from otloss_llm.costs.vocabulary import TokenCost
from otloss_llm.evaluation.perplexity import context_length
from otloss_llm.losses.positions import check_kernel, cost_positions
from otloss_llm.models.heads import (
    check_causal,
    few_inputs,
    find_head,
    is_encoder_decoder,
    shifts_labels,
    weights_kept,
)
from otloss_llm.models.logit_transform import LogitTransform
from otloss_llm.objectives import NumberDistance, Objective, Sum, parse_objective
from otloss_llm.training.batches import (
    TOKEN_WEIGHT,
    Targets,
    check_weights_kept,
    collator_for,
    collator_of_ids,
    has_weights,
    targets_of,
    tokenised_rows,
)
from otloss_llm.training.fused import measure_transform, unwrap
from otloss_llm.training.scoring import Scored, Scoring
from otloss_llm.training.token_means import LOGGED, ScoredBatch, example_sums, token_means, tokens_in
from otloss_llm.training.trainer_cost import check_numbers, cost_for, log_labels
from otloss_llm.training.trainer_settings import (
    auxiliary_weight,
    check_loss_settings,
    check_sequence_parallelism,
    set_best_metric,
    with_terms,
)

logger = logging.getLogger(__name__)


class ObjectiveMixin:
    """Give a `transformers.Trainer` (or a subclass of it) an objective of `(nll, transport cost)`.

    Mix it in before the trainer: `class MyTrainer(ObjectiveMixin, SFTTrainer): ...`. The loss is computed from hidden
    states inside the model's own forward pass, so the logits are never formed; labels are shifted here, once. Those of
    an encoder-decoder (T5, BART) are its decoder's, and are not shifted. A decoder whose own loss does not shift
    (`TrOCRForCausalLM`, `BartForCausalLM`) needs batches with `shift_labels`, unless the rows are of this package.

    Args:
        objective: an objective, or its name: "mle", "emo", "tailr:0.001", "mixce:0.8", "number_token", "emo+number",
            "dft", "power:2", "eaft", "gem:0.7", "expected_value", "gem+z_loss:0.0001" (see `parse_objective`).
        cost: "embedding" copies and freezes the head of `model` as it is now (the start of training), without its
            leading directions (`EmbeddingCost(..., directions=None)`); "number" reads
            the values of number tokens from the trainer's `processing_class`; "mixed" is both (`MixedCost`); "rating"
            takes the digits of that tokenizer for ratings (`RatingCost`); "auto" the one of them that the objective is
            meant for; or any vocabulary cost; or None. It is used by objectives that need it, and reported by
            `evaluate()`.
            It is in no checkpoint: to resume a run, give the trainer the model that the run started from.
        numbers: settings of the costs "number" and "mixed".
        z_loss: weight of Z^2 in the loss, Z the logsumexp of a token's logits (`ZLoss`); 0 for none.
        impl, chunk_size: as in `linear_token_loss`.
        *args, **kwargs: of the trainer.

    `label_smoothing_factor` of the arguments acts on any objective (`LabelSmoothing`). A column `token_weight` of the
    data set, shaped like the labels and shifted with them, weighs the tokens (`token_weight` of `linear_token_loss`): a
    step and `eval_loss` divide by the sum of the weights, `nll` in logs is not weighted. The rows have to be token ids,
    and the collator has to pad the column: those of transformers and TRL do not.

    A mixture of experts that returns a loss to balance its experts (`output_router_logits`, which TRL sets) is trained
    with it: `loss` is the objective plus that loss times the model's `router_aux_loss_coef`, averaged over the batches
    of an accumulated step and over processes.

    Training logs carry `nll` and (for objectives that use it) `transport_cost` beside `loss`, token-weighted means
    since the last log, and `aux_loss`, that of the experts without its weight. If the cost has near-duplicate rows
    (see `EmbeddingCost`) and the training set is a `PackedBlocks` or `AnsweredQuestions`, a log line says how many
    labels are such tokens. `evaluate()` returns token-weighted `eval_loss`, `eval_nll`, `eval_perplexity` and
    `eval_transport_cost` (less is better for each of them as `metric_for_best_model`), and `eval_aux_loss`. The
    transport cost of a cost of numbers is the mean over number positions, and is left out where there are none; that of
    a `RatingCost` is signed, how much too high the expected rating is;
    `NumberToken(weight)` adds `weight` times this mean to that of nll, in training over the tokens of one optimizer
    step. Logs of TRL's `SFTTrainer` have its `entropy` and `mean_token_accuracy` (not `num_tokens`), in training over
    at most 512 tokens of each batch, unless torch has sharded the rows of the head over processes.

    Raises:
        TypeError, ValueError: the head of the model is not supported, the cost has another vocabulary, the objective is
            unknown, or a setting would change the trainer's own loss (`loss_type`, `compute_loss_func`,
            `use_liger_kernel`, sequence parallelism).
    """

    # Of the trainer beside it in the class.
    model: Any
    args: Any
    accelerator: Any
    compute_loss_func: Any
    processing_class: Any
    train_dataset: Any
    eval_dataset: Any
    _signature_columns: Any
    current_gradient_accumulation_steps: int
    loss_is_scaled_for_ga: bool | None
    is_deepspeed_enabled: bool
    is_fsdp_enabled: bool
    is_world_process_zero: Any
    get_cp_size: Any
    get_sp_size: Any
    get_tp_size: Any
    _prepare_inputs: Any
    _metrics: Any  # of TRL's trainers

    def __init__(
        self,
        *args: Any,
        objective: Objective | str = "emo",
        cost: TokenCost | str | None = "auto",
        numbers: NumberSettings | None = None,
        impl: str = "auto",
        chunk_size: int | None = None,
        z_loss: float = 0.0,
        **kwargs: Any,
    ) -> None:
        collator = collator_for(kwargs.get("train_dataset"), kwargs.get("eval_dataset"))
        if collator is not None and kwargs.get("data_collator") is None:
            kwargs["data_collator"] = collator
        weighted = has_weights(kwargs.get("train_dataset"))  # TRL may drop the column
        super().__init__(*args, **kwargs)
        self._weighted = weighted or has_weights(self.train_dataset)
        self.objective = parse_objective(objective) if isinstance(objective, str) else objective
        self.impl, self.chunk_size, self.z_loss = impl, chunk_size, z_loss
        check_loss_settings(self.args, self.compute_loss_func, self.objective)
        check_sequence_parallelism(self.get_sp_size())
        check_kernel(impl, chunk_size)
        _ = self._total  # raises for settings that are not valid
        self._read_model(rows_of_ours=collator is not None)
        head = find_head(unwrap(self.model))
        self.transport_cost = cost_for(
            self.objective, cost, rows=lambda: self._broadcast(head.weight), vocab_size=head.weight.shape[0],
            tokenizer=self.processing_class, numbers=numbers, seed=self.args.seed,
        )  # fmt: skip
        set_best_metric(self.args, self.transport_cost)
        self._logits_wanted = self._warned_unlabelled = False
        self._numbers_in_step: Tensor | None = None
        self._train_sums: Tensor | None = None
        self._eval_sums: Tensor | None = None
        if self._total.needs_cost and self.is_world_process_zero():
            log_labels(self.transport_cost, getattr(self, "train_dataset", None))

    def _read_model(self, *, rows_of_ours: bool) -> None:
        """What has to be known of the model: whether its labels are shifted, and the transform of its logits."""
        root = unwrap(self.model)
        find_head(root)
        self._encoder_decoder = is_encoder_decoder(root)
        self._transform: LogitTransform | None = None
        self._labels_unclear = False
        sharded = self.is_deepspeed_enabled or self.is_fsdp_enabled  # no single process can run such a model here
        if not sharded and not any(parameter.is_meta for parameter in self.model.parameters()):
            check_causal(self.model)
            # Rows of ours are not shifted, whatever the model expects.
            self._labels_unclear = not rows_of_ours and not self._encoder_decoder and not shifts_labels(self.model)
            self._transform = measure_transform(self.model, few_inputs(self.model))

    def _broadcast(self, weight: Tensor) -> Tensor:
        """The first process's weight: DDP starts from it; with FSDP's cpu_ram_efficient_loading only it has one."""
        weight = weight.detach()
        if self.args.world_size == 1 or not torch.distributed.is_initialized() or hasattr(weight, "placements"):
            return weight
        device = self.accelerator.device
        weight = torch.empty_like(weight, device=device) if weight.is_meta else weight.to(device, copy=True)
        torch.distributed.broadcast(weight, src=0)
        return weight

    @property
    def _total(self) -> Sum:
        """The objective (the attribute may have been changed) with the terms of other settings."""
        return with_terms(self.objective, self.args, self.z_loss)

    # ---- the loss -------------------------------------------------------------------------------------------------

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Any:
        """The objective over one batch; in training a sum over tokens / tokens of the whole accumulated batch."""
        inputs, training = dict(inputs), model.training
        if training and self._weighted:
            check_weights_kept(inputs)
        targets = self._targets(inputs)
        self._complete(inputs, targets)
        check_numbers(self.objective, self.transport_cost)
        num_items = self._positive(num_items_in_batch) if training else None
        # The trainer divides by the number of accumulated batches if this is false.
        self.loss_is_scaled_for_ga = num_items is not None
        scored = self._score(model, inputs, targets, num_items)
        self._add_sums(scored, targets, training)
        loss = self._scaled(scored, num_items)
        return (loss, CausalLMOutput(loss=loss, logits=scored.logits)) if return_outputs else loss

    def _targets(self, inputs: dict[str, Any]) -> Targets:
        """Take labels and weights out of a batch."""
        if self._labels_unclear and "shift_labels" not in inputs:
            raise ValueError(
                f"the loss of {type(unwrap(self.model)).__name__} scores label t at position t, those of other causal "
                "language models at t - 1, so it is unclear what the labels are. Name them shift_labels, with the "
                "token that position t predicts at t (and set remove_unused_columns=False)."
            )
        return targets_of(inputs, shift=not self._encoder_decoder)

    def _complete(self, inputs: dict[str, Any], targets: Targets) -> None:
        """Add to a batch what the model or TRL's trainer would make of its labels and settings."""
        if self._encoder_decoder and "decoder_input_ids" not in inputs:  # as the model makes them from labels
            root: Any = unwrap(self.model)
            inputs["decoder_input_ids"] = root.prepare_decoder_input_ids_from_labels(targets.labels)
        inputs.pop("skip_logits", None)  # set by the trainer for Liger's cross-entropy
        if getattr(self, "aux_loss_enabled", False):  # set by TRL to balance experts
            inputs["output_router_logits"] = True

    def _positive(self, num_items: Tensor | int | None) -> Tensor | int | None:
        """The count to divide by; 1 where there are only ignored labels, whose sum is 0."""
        if num_items is None or bool(torch.as_tensor(num_items) > 0):
            return num_items
        if not self._warned_unlabelled:
            self._warned_unlabelled = True
            logger.warning("no token of this step is labelled (all labels are -100, or weigh 0): its loss is 0")
        return 1

    def _score(self, model: nn.Module, inputs: dict[str, Any], targets: Targets, num_items: Any) -> Scored:
        training = model.training
        objective = self._objective_of_step(targets, num_items) if training else self._total
        wanted = objective.needs_cost or not training
        log = (lambda sums: self._log_predictions(sums, training)) if self._logs_predictions() else None
        scoring = Scoring(
            objective, num_items, self._cost_on if wanted else lambda device: None, self.impl, self.chunk_size, log
        )
        if self._logits_wanted:
            return scoring.from_logits(model, inputs, targets)
        if self._transform is None:
            self._transform = measure_transform(model, inputs)
        return scoring.from_hidden(model, inputs, targets, self._transform)

    def _objective_of_step(self, targets: Targets, num_items: Any) -> Sum:
        """The objective of this step; with numbers the weight that makes of their share of all tokens a mean."""
        total = self._total
        if not total.terms_of(NumberDistance):
            return total
        tokens, numbers = num_items, self._numbers_in_step
        if tokens is None or numbers is None:
            tokens, numbers = self._counts(targets)
        return total.scaled(float(tokens) / max(1.0, float(numbers)), NumberDistance)

    def _counts(self, targets: Targets) -> Tensor:
        """Of predicted tokens, and of number positions (of all positions where no term needs them)."""
        numbers = targets.valid
        if self._total.terms_of(NumberDistance):
            numbers = cost_positions(self._cost_on(targets.labels.device), targets.labels, numbers)
        return targets.counts(numbers)

    def _scaled(self, scored: Scored, num_items: Any) -> Tensor:
        """The loss as the trainer expects it, with that of the experts."""
        loss = scored.result.loss
        if num_items is not None and self.args.average_tokens_across_devices:
            # Gradients are averaged over processes, tokens were summed; ranks of tensor parallelism have the same loss.
            loss = loss * (self.accelerator.num_processes // self.get_tp_size())
        if scored.auxiliary is not None:  # a mean over tokens in each batch: its mean over batches and processes
            batches = self.current_gradient_accumulation_steps if num_items is not None else 1
            loss = loss + auxiliary_weight(self, self.model) * scored.auxiliary / batches
        return loss

    def _cost_on(self, device: torch.device) -> TokenCost | None:
        if self.transport_cost is not None and self.transport_cost.device != device:
            self.transport_cost = self.transport_cost.to(device)
        return self.transport_cost

    # ---- batches ----------------------------------------------------------------------------------------------------

    def _set_signature_columns_if_needed(self) -> None:
        """As the trainer's, which drops all other columns, and the weights of tokens."""
        super()._set_signature_columns_if_needed()  # type: ignore[misc]  # of the Trainer
        if TOKEN_WEIGHT not in self._signature_columns:
            self._signature_columns = [*self._signature_columns, TOKEN_WEIGHT]

    def get_batch_samples(self, epoch_iterator: Any, num_batches: int, device: torch.device) -> tuple[list, Any]:
        """The batches of one optimizer step, and the number of *predicted* tokens in them over all processes."""
        batches, _ = super().get_batch_samples(epoch_iterator, num_batches, device)  # type: ignore[misc]  # of the Trainer
        if not batches or any("labels" not in batch and "shift_labels" not in batch for batch in batches):
            return batches, None
        counts = torch.stack([self._counts(self._targets(dict(batch))) for batch in batches]).sum(0).to(device)
        if self.args.average_tokens_across_devices and self.args.world_size > 1:
            counts = self.accelerator.gather(counts.unsqueeze(0)).sum(0)
        if self._ranks_per_batch() > 1:
            counts = counts / self._ranks_per_batch()  # each of them has counted the whole batch
        count, self._numbers_in_step = counts
        return batches, count

    def _ranks_per_batch(self) -> int:
        """The number of consecutive processes that share a batch: those of tensor and of context parallelism."""
        return int(self.get_tp_size() * self.get_cp_size())

    def prediction_step(
        self, model: nn.Module, inputs: dict[str, Any], prediction_loss_only: bool, ignore_keys: Any = None
    ) -> Any:
        """As the trainer's; logits are formed only if they are used (`compute_metrics`, `predict`)."""
        self._logits_wanted = not prediction_loss_only
        if "shift_labels" in inputs:
            inputs = inputs | {"labels": inputs["shift_labels"]}  # the trainer evaluates batches with labels only
        if getattr(self.args, "predict_with_generate", False) and self._logits_wanted:  # a Seq2SeqTrainer's own loss
            self._logits_wanted = False
            with torch.no_grad():
                self.compute_loss(model, self._prepare_inputs(inputs))
        try:
            return super().prediction_step(model, inputs, prediction_loss_only, ignore_keys)  # type: ignore[misc]  # of the Trainer
        finally:
            self._logits_wanted = False

    # ---- logs and metrics -------------------------------------------------------------------------------------------

    def _add_sums(self, scored: Scored, targets: Targets, training: bool) -> None:
        # The distance of numbers is a mean over other positions, which is added to that of the rest.
        rest = self._total.without(NumberDistance)
        sums = example_sums(ScoredBatch(scored.result, targets, rest, self.transport_cost, scored.auxiliary))
        total = sums.sum(0) if training else self._gathered(sums).sum(0)
        name = "_train_sums" if training else "_eval_sums"
        before = getattr(self, name)
        setattr(self, name, total if before is None else before + total)

    def _gathered(self, sums: Tensor) -> Tensor:
        """The sums of each example of all processes, without examples repeated to fill the last batch."""
        ranks = self._ranks_per_batch()
        if ranks == 1:
            return self.accelerator.gather_for_metrics(sums)
        # Ranks that share a batch have parts of its sequences, or all of them; gather_for_metrics would drop some.
        whole = self.accelerator.gather(sums).unflatten(0, (-1, ranks, len(sums))).sum(1).flatten(0, 1)
        state = self.accelerator.gradient_state
        return whole[: state.remainder] if state.end_of_dataloader and state.remainder > 0 else whole

    def _logs_predictions(self) -> bool:
        """Whether the trainer beside this class is TRL's, whose `log` adds the means of what it finds in `_metrics`."""
        return isinstance(getattr(self, "_metrics", None), dict)

    def _log_predictions(self, sums: Tensor, training: bool) -> None:
        """Give TRL's `log` the means over this batch of all processes, under TRL's names."""
        entropy, hits, tokens = self.accelerator.gather(sums.to(self.accelerator.device).unsqueeze(0)).sum(0).tolist()
        metrics = self._metrics["train" if training else "eval"]
        for name, total in (("entropy", entropy), ("mean_token_accuracy", hits)):
            metrics[name].append(total / max(tokens, 1.0))

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """As the trainer's, with the token-weighted means of `token_means` beside `loss`."""
        if "loss" in logs and self._train_sums is not None:
            means = token_means(self.accelerator.reduce(self._train_sums, reduction="sum"))
            self._train_sums = None
            logs |= {name: means[name] for name in LOGGED if name in means}
        super().log(logs, *args, **kwargs)  # type: ignore[misc]  # of the Trainer

    def evaluation_loop(self, *args: Any, metric_key_prefix: str = "eval", **kwargs: Any) -> Any:
        """As the trainer's, with token-weighted loss, nll, perplexity and transport cost."""
        self._eval_sums = None
        with weights_kept(unwrap(self.model)):  # before a checkpoint is written
            output = super().evaluation_loop(*args, metric_key_prefix=metric_key_prefix, **kwargs)  # type: ignore[misc]  # of the Trainer
        if self._eval_sums is not None:
            if not tokens_in(self._eval_sums) > 0:
                raise ValueError("the evaluation set has no labelled token to score; every label is ignored.")
            means = token_means(self._eval_sums)
            means["loss"] += self._total.weight_of(NumberDistance) * means.pop("weighted_cost", 0.0)
            if "aux_loss" in means:
                means["loss"] += auxiliary_weight(self, self.model) * means["aux_loss"]
            means["perplexity"] = math.exp(min(means["nll"], 700.0))
            output.metrics.update({f"{metric_key_prefix}_{key}": value for key, value in means.items()})
        return output


class ObjectiveTrainer(ObjectiveMixin, Trainer):
    """`transformers.Trainer` with an objective: `ObjectiveTrainer(model, args, objective="emo", train_dataset=...)`.

    See `ObjectiveMixin` for the arguments it adds, and the Hugging Face documentation for the rest.

    `train_dataset` and `eval_dataset` may be a `datasets.Dataset` with the columns text, prompt and completion,
    question and answer, or messages, as for TRL's `SFTTrainer`. It is tokenised with `processing_class` unless a
    `data_collator` is given: texts are cut at `max_length` tokens (and at the model's context), and longer prompts,
    questions and conversations are dropped with a warning. Labels are on completions and answers alone (also in
    conversations, which is TRL's `assistant_only_loss=True`). For packed text give `PackedBlocks`. Rows of `input_ids`
    and `labels` are padded, `token_weight` beside them too.
    """

    def __init__(self, *args: Any, max_length: int = 1024, **kwargs: Any) -> None:
        if kwargs.get("data_collator") is None:
            model = args[0] if args else kwargs.get("model")
            context = None if model is None else context_length(model)
            longest = max_length if context is None else min(max_length, context)
            for name in ("train_dataset", "eval_dataset"):
                kwargs[name] = tokenised_rows(kwargs.get(name), kwargs.get("processing_class"), longest)
            aligned = isinstance(model, nn.Module) and not is_encoder_decoder(model)
            rows = kwargs["train_dataset"], kwargs["eval_dataset"]
            kwargs["data_collator"] = collator_of_ids(*rows, aligned=aligned)
        super().__init__(*args, **kwargs)
