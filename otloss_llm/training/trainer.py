"""Training with any objective on top of the Hugging Face `Trainer`: `ObjectiveMixin`, `ObjectiveTrainer`."""

from __future__ import annotations

import contextlib
import functools
import inspect
import logging
import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import IterableDataset
from transformers import Trainer
from transformers.modeling_outputs import CausalLMOutput

from otloss_llm.costs.choice import NumberSettings
from otloss_llm.costs.tokenizer_numbers import tokenizer_of
from otloss_llm.costs.vocabulary import TokenCost
from otloss_llm.losses.positions import IGNORE_INDEX, check_kernel, cost_positions
from otloss_llm.models.decoder_inputs import with_decoder_inputs
from otloss_llm.models.heads import (
    adapters_are_disabled,
    base_model,
    check_no_virtual_tokens,
    count_embeddings,
    find_head,
    is_encoder_decoder,
    takes_use_cache,
    weights_kept,
)
from otloss_llm.objectives import NumberDistance, Objective, Sum, parse_objective
from otloss_llm.training.batches import (
    TOKEN_WEIGHT,
    CountedRows,
    Targets,
    check_labelled,
    check_rows_tokenised,
    check_weights_kept,
    collate_tokens,
    collate_weights,
    column_names,
    counting_rows,
    has_weights,
    hidden_rows_error,
    is_flattened,
    pop_targets,
    repeated_positions,
    unrepeated_rows,
)
from otloss_llm.training.first_batch import check_packing, examine, predicts_tokens
from otloss_llm.training.fused import Transforms, measure_transform, restore_forward, unwrap
from otloss_llm.training.packing import is_packed
from otloss_llm.training.scoring import Scored, Scoring
from otloss_llm.training.token_means import (
    LOGGED,
    Evaluation,
    Pass,
    Rows,
    ScoredBatch,
    batch_sums,
    measured,
    passes_of_batch,
    token_count,
    token_means,
)
from otloss_llm.training.trainer_cost import check_numbers, check_sample, cost_for, log_labels, save_sample
from otloss_llm.training.trainer_settings import (
    auxiliary_weight,
    best_metric,
    check_best_cost,
    check_best_metric,
    check_loss_is_replaceable,
    check_loss_settings,
    check_sequence_parallelism,
    foreign_argument,
    measured_best_metric,
    search_objective,
    set_best_metric,
    with_terms,
)

logger = logging.getLogger(__name__)


class ObjectiveMixin:
    """Give a `transformers.Trainer` (or a subclass of it) an objective of `(nll, transport cost)`.

    Mix it in before the trainer: `class MyTrainer(ObjectiveMixin, SFTTrainer): ...`, and call it as that trainer. The
    loss is computed from hidden states inside the model's own forward pass, so the logits are never formed; labels are
    shifted here, once. An encoder-decoder (T5, BART, Whisper) has labels of its decoder, which are not shifted. A
    decoder whose own loss does not shift (`TrOCRForCausalLM`, `BartForCausalLM`) needs batches with `shift_labels`.

    The model is examined on its first batch: it must not see the tokens that it has to predict, nor another sequence
    that is packed in the same row, and its own loss must be the cross-entropy and, in a mixture of experts, the loss
    that balances them. This forms logits of two rows and 32 tokens; of the whole batch where that cannot be cut, as one
    whose images are all in one tensor (Qwen2-VL).

    Args:
        objective: an objective, or its name: "mle", "emo", "tailr:0.001", "mixce:0.8", "number_token", "emo+number",
            "dft", "power:2", "eaft", "gem:0.7", "expected_value", "gem+z_loss:0.0001" (see `parse_objective`).
        cost: "embedding" copies and freezes the head of `model` as it is now (the start of training), without its
            leading directions (`EmbeddingCost(..., directions=None)`); "number" reads
            the values of number tokens from the trainer's `processing_class`; "mixed" is both (`MixedCost`); "rating"
            takes the digits of that tokenizer for ratings (`RatingCost`); "auto" the one of them that the objective is
            meant for; or any vocabulary cost; or None. It is used by objectives that need it, and reported by
            `evaluate()`. With `model_init` a named cost is made again for each model. A checkpoint holds a few of the
            costs: a run that resumes with others than it began with (of another model too) raises ValueError. It does
            not hold the objective, which may change.
        numbers: settings of the costs "number" and "mixed".
        z_loss: weight of Z^2 in the loss, Z the logsumexp of a token's logits (`ZLoss`); 0 for none.
        impl, chunk_size: as in `linear_token_loss`.
        *args, **kwargs: of the trainer.

    A subclass may override `compute_loss` and call `super().compute_loss(..., return_outputs=True)`: the outputs are
    the model's own, with logits, and with hidden states if the model was asked for them (`output_hidden_states=True`
    in the inputs). With `skip_logits=True` in the inputs they have no logits, which are then not formed. What it adds
    to the loss of a batch is in `eval_loss`, as a mean over batches, weighted by their tokens.

    `label_smoothing_factor` of the arguments acts on any objective (`LabelSmoothing`). A column `token_weight` of the
    data set, shaped like the labels and shifted with them, weighs the tokens (`token_weight` of `linear_token_loss`): a
    step and `eval_loss` divide by the sum of the weights, `nll` in logs is not weighted. The rows have to be token ids,
    and the collator has to pad the column, which the collators of transformers and TRL do not.

    A mixture of experts that returns a loss to balance its experts (`output_router_logits`, which TRL sets) is trained
    with it: `loss` is the objective plus that loss times the model's `router_aux_loss_coef`, averaged over the batches
    of an accumulated step and over processes.

    Training logs carry `nll` and (for objectives that use it) `transport_cost` beside `loss`, token-weighted means
    since the last log, and `aux_loss`, the experts' loss without its weight. If the cost has near-duplicate rows
    (see `EmbeddingCost`) and the training set has a column `labels`, a log line says how many labels are such tokens.
    `evaluate()` returns token-weighted `eval_loss`, `eval_nll`, `eval_perplexity` and `eval_transport_cost` (less is
    better for each of them as `metric_for_best_model`), and `eval_aux_loss`. The transport cost of a cost of numbers is
    the mean over number positions, and is left out where there are none; a `RatingCost` is signed, how much too
    high the expected rating is;
    `NumberToken(weight)` adds `weight` times this mean to the mean of nll, in training over the tokens of one optimizer
    step. Beside TRL's `SFTTrainer` logs and `evaluate()` have its `entropy` and `mean_token_accuracy` (not
    `num_tokens`), token-weighted as well, in training from at most 512 tokens of each batch, unless torch has sharded
    the rows of the head over processes.

    Raises:
        TypeError, ValueError: the trainer has a loss of its own (DPO, KTO, GRPO, GKD, rewards), the head of the model
            is not supported, the cost has another vocabulary, the objective is unknown, or a setting would change the
            trainer's own loss (`loss_type`, `compute_loss_func`, `use_liger_kernel`, sequence parallelism). On the
            first batch: the model sees later tokens, its loss has a term that an objective would leave out, or
            `metric_for_best_model` is not measured. At the end of a training or an evaluation: no token of it was
            labelled.
    """

    # These are the trainer's beside it in the class.
    model: Any
    args: Any
    control: Any
    accelerator: Any
    compute_loss_func: Any
    compute_metrics: Any
    data_collator: Any
    processing_class: Any
    train_dataset: Any
    eval_dataset: Any
    _signature_columns: Any
    current_gradient_accumulation_steps: int
    loss_is_scaled_for_ga: bool | None
    is_in_train: bool
    is_world_process_zero: Any
    get_cp_size: Any
    get_sp_size: Any
    get_tp_size: Any
    _prepare_inputs: Any
    _metrics: Any  # TRL's trainers have it

    def __init_subclass__(cls, **settings: Any) -> None:
        super().__init_subclass__(**settings)
        check_loss_is_replaceable(cls, ObjectiveMixin, Trainer)

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
        try:
            inspect.signature(super().__init__).bind_partial(*args, **kwargs)
        except TypeError as error:  # which names no function
            raise TypeError(f"{type(self).__name__} {error}; {foreign_argument(kwargs)}") from error
        super().__init__(*args, **kwargs)
        restore_forward(self.model)
        if self.args.label_names is None:
            self.label_names = ["labels"]  # by its arguments a model may have others, that are not needed
        # Not `objective`, where a hyperparameter search of the trainer writes what it minimises.
        self.training_objective = parse_objective(objective) if isinstance(objective, str) else objective
        self.impl, self.chunk_size, self.z_loss = impl, chunk_size, z_loss
        check_loss_settings(self.args, self.compute_loss_func, self.training_objective)
        check_sequence_parallelism(self.get_sp_size())
        check_kernel(impl, chunk_size)
        _ = self._total  # raises for settings that are not valid
        self._cost, self._make_cost = cost, functools.partial(cost_for, numbers=numbers, seed=self.args.seed)
        self._begin(self.model)
        self._outputs_unused = self._warned_unlabelled = self._warned_unfilled = False
        self._labelled: bool | None = None  # whether a step of the training had a label; None before the first
        # Whether rows name weights, that a loader of the user's own may lose; see also `_get_dataloader`.
        self._trains_weighted = False
        self._numbers_in_step: Tensor | None = None
        self._train_sums: Tensor | None = None
        self._passes: list[Pass] | None = None  # None outside of `training_step`
        self._evaluation: Evaluation | None = None  # that is going on; another one may begin within it
        if self._total.needs_cost and self.is_world_process_zero():
            log_labels(self.transport_cost, self.train_dataset, shifted=not self._encoder_decoder)

    def _begin(self, model: nn.Module) -> None:
        """Check a model, and make the cost of a training that starts from it."""
        check_no_virtual_tokens(model)
        root = unwrap(model)
        head = find_head(root)
        self._encoder_decoder = is_encoder_decoder(root)
        # A `compute_loss` of the user's may score other models, such as a teacher.
        self._transforms = Transforms()
        self._is_examined = self._packing_is_checked = False
        self.transport_cost = self._make_cost(
            self.training_objective, self._choose_cost(root), rows=lambda: self._broadcast(head.weight),
            vocab_size=head.weight.shape[0],
            tokenizer=tokenizer_of(self.processing_class),
        )  # fmt: skip
        check_best_cost(self.args, best_metric(self.args, self.eval_dataset), self.transport_cost)

    def _choose_cost(self, model: nn.Module) -> TokenCost | str | None:
        """Return the cost of the constructor; subclasses may make one of the model, which has its final vocabulary."""
        return self._cost

    _searched: Any = None  # by a hyperparameter search

    @property
    def objective(self) -> Any:
        """What a hyperparameter search of the trainer has measured; not the objective."""
        if self._searched is None:
            raise AttributeError(f"{type(self).__name__} has no attribute 'objective'; it is training_objective.")
        return self._searched

    @objective.setter
    def objective(self, measured: Any) -> None:
        if callable(measured) or isinstance(measured, str):
            raise ValueError(f"trainer.objective was set to {measured!r}; the attribute is trainer.training_objective.")
        self._searched = measured

    def call_model_init(self, trial: Any = None) -> nn.Module:
        """Return the trainer's new model, and set a cost for it."""
        model: nn.Module = super().call_model_init(trial)  # type: ignore[misc]  # the trainer's
        if hasattr(self, "_make_cost"):  # else it is the first one, in the trainer's constructor
            self._begin(model)
        return model

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
        return with_terms(self.training_objective, self.args, self.z_loss)

    # ---- the loss -------------------------------------------------------------------------------------------------

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Any:
        """The objective over one batch; in training a sum over tokens / tokens of the whole accumulated batch."""
        # A training may keep the model in eval mode, without dropout.
        inputs, training = dict(inputs), torch.is_grad_enabled() and self._evaluation is None
        # "skip_logits" is set by the trainer for Liger's cross-entropy
        keep_output = return_outputs and not self._outputs_unused
        form_logits = not inputs.pop("skip_logits", False) and keep_output
        inputs, targets = self._inputs_and_targets(model, inputs, training)
        check_numbers(self.training_objective, self.transport_cost)
        num_items = self._positive(num_items_in_batch) if training else None
        # The trainer divides by the number of accumulated batches if this is false; one pass of a step has the count.
        if training and (num_items is not None or not self._passes):
            self.loss_is_scaled_for_ga = num_items is not None
        needs_cost = not training and self._has_vocabulary(model)
        scoring = self._scoring(targets, num_items, needs_cost=needs_cost)
        if form_logits:
            scored = scoring.from_logits(model, inputs, targets)
        else:
            transform = self._transforms[unwrap(model)]
            scored = scoring.from_hidden(model, inputs, targets, transform, keep_output=keep_output)
        sums, loss = self._sums(scored, targets), self._scaled(model, scored, num_items)
        passes = self._passes
        if not training:
            passes = None if self._evaluation is None else self._evaluation.passes
        if passes is not None:
            rows, is_of_model = Rows.read(inputs, targets), self._is_of_model(model)
            passes.append(Pass(sums, loss.detach().double(), rows, is_of_model))
        elif training:  # in a `training_step` of the user's own
            self._add_to_logs(sums)
        if self._evaluation is not None and num_items_in_batch is not None and self.get_cp_size() == 1:
            loss = loss * self._evaluation.share_of(targets, num_items_in_batch).to(loss)
        if not return_outputs:
            return loss
        outputs = CausalLMOutput() if scored.output is None else scored.output
        outputs["loss"] = loss
        return loss, outputs

    def training_step(self, model: nn.Module, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        """Make the trainer's step, and log what the batch makes of what `compute_loss` scores."""
        self._passes = []
        try:
            loss = super().training_step(model, inputs, *args, **kwargs)  # type: ignore[misc]  # the trainer's
            for one in passes_of_batch(self._passes, functools.partial(self._rows_in, inputs)):
                self._add_to_logs(one.sums)
        finally:
            self._passes = None
        return loss

    def _rows_in(self, batch: dict[str, Any]) -> Rows | None:
        """Return the rows of a batch; None without labels."""
        if not {"labels", "shift_labels"} & batch.keys():
            return None
        return Rows.read(batch, pop_targets(dict(batch), shift=not self._encoder_decoder))

    def _is_of_model(self, model: nn.Module) -> bool:
        """Whether a model is the trainer's, with its adapters of PEFT."""
        root = unwrap(model)
        return root is unwrap(self.model) and not adapters_are_disabled(root)

    def _has_vocabulary(self, model: nn.Module) -> bool:
        """Whether a model has as many tokens as the trainer's, over which the cost is."""
        root, own = unwrap(model), unwrap(self.model)
        return root is own or count_embeddings(root) == count_embeddings(own)

    def _inputs_and_targets(
        self, model: nn.Module, batch: dict[str, Any], training: bool
    ) -> tuple[dict[str, Any], Targets]:
        """Return what the model gets of a batch, and what is scored.

        Checks the trainer's model with its first batch; measures the transform of another one with its own first batch.
        """
        if self._trains_weighted if training else self._evaluation is not None and self._evaluation.is_weighted:
            check_weights_kept(batch)
        shifted_by_user = "shift_labels" in batch
        targets = pop_targets(batch, shift=not self._encoder_decoder)
        if getattr(self, "aux_loss_enabled", False):  # set by TRL to balance experts
            batch["output_router_logits"] = True
        root = unwrap(model)
        if takes_use_cache(root):  # beside a cache, models do not look for sequences that are packed in a row
            batch.setdefault("use_cache", False)
        inputs = with_decoder_inputs(root, batch, targets.labels)
        if not self._is_examined and root is unwrap(self.model):
            self._examine(model, batch, targets, shifted_by_user)
        elif root not in self._transforms:
            self._transforms[root] = measure_transform(model, inputs)
        if not self._packing_is_checked and root is unwrap(self.model) and "position_ids" in batch:
            self._check_packing(model, batch, targets)
        return inputs, targets

    def _examine(self, model: nn.Module, inputs: dict[str, Any], targets: Targets, shifted_by_user: bool) -> None:
        """Measure the transform of the logits; check the model with the first batch that predicts tokens."""
        predicts = torch.tensor([predicts_tokens(model, inputs, targets.labels)], device=self.accelerator.device)
        # Context parallelism leaves a process a part of each sequence, in its own order.
        if self.get_cp_size() == 1 and bool(self.accelerator.gather(predicts).any()):
            transform = examine(model, inputs, targets.labels, shifted_by_user=shifted_by_user)
            self._is_examined = True
        else:
            transform = measure_transform(model, with_decoder_inputs(unwrap(model), inputs, targets.labels))
            self._is_examined = self.get_cp_size() > 1
        self._transforms[unwrap(model)] = transform

    def _check_packing(self, model: nn.Module, inputs: dict[str, Any], targets: Targets) -> None:
        """Check the model with the first batch of which a process has packed sequences."""
        packed = torch.tensor([is_packed(inputs, targets.labels)], device=self.accelerator.device)
        if self.get_cp_size() == 1 and bool(self.accelerator.gather(packed).any()):
            check_packing(model, inputs, targets.labels)
            self._packing_is_checked = True

    def _positive(self, num_items: Tensor | int | None) -> Tensor | int | None:
        """The count to divide by; 1 where there are only ignored labels, whose sum is 0."""
        labelled = num_items is None or bool(num_items > 0)
        if not labelled and not self._warned_unlabelled:
            self._warned_unlabelled = True
            logger.warning("no token of this step is labelled (all labels are -100, or weigh 0): its loss is 0")
        self._labelled = bool(self._labelled) or labelled
        return num_items if labelled else 1

    def _scoring(self, targets: Targets, num_items: Any, *, needs_cost: bool) -> Scoring:
        objective = self._objective_of_step(targets, num_items)
        cost_on = self._cost_on if objective.needs_cost or needs_cost else lambda device: None
        # TRL's trainers, which have these metrics, log entropy and accuracy.
        predictions = isinstance(getattr(self, "_metrics", None), dict)
        return Scoring(objective, num_items, cost_on, self.impl, self.chunk_size, predictions)

    def _objective_of_step(self, targets: Targets, num_items: Any) -> Sum:
        """The objective of this step; with numbers the weight that makes of their share of all tokens a mean."""
        total = self._total
        if not total.terms_of(NumberDistance):
            return total
        tokens, numbers = num_items, self._numbers_in_step
        if tokens is None or numbers is None:
            tokens, numbers = self._counts(targets)
        return total.scaled(float(tokens) / (float(numbers) or 1.0), NumberDistance)  # sums of weights may be below 1

    def _counts(self, targets: Targets) -> Tensor:
        """Return the counts of predicted tokens and of number positions (of all positions where no term needs them)."""
        numbers = targets.valid
        if self._total.terms_of(NumberDistance):
            numbers = cost_positions(self._cost_on(targets.labels.device), targets.labels, numbers)
        return targets.counts(numbers)

    def _scaled(self, model: nn.Module, scored: Scored, num_items: Any) -> Tensor:
        """Return the loss as the trainer expects it, with the loss of the experts."""
        loss = scored.result.loss
        if num_items is not None and self.args.average_tokens_across_devices:
            # Gradients are averaged over processes, tokens were summed; ranks of tensor parallelism have the same loss.
            loss = loss * (self.accelerator.num_processes // self.get_tp_size())
        if scored.auxiliary is not None:  # a mean over tokens in each batch: its mean over batches and processes
            batches = self.current_gradient_accumulation_steps if num_items is not None else 1
            loss = loss + auxiliary_weight(self, model) * scored.auxiliary / batches
        return loss

    def _cost_on(self, device: torch.device) -> TokenCost | None:
        if self.transport_cost is not None and self.transport_cost.device != device:
            self.transport_cost = self.transport_cost.to(device)
        return self.transport_cost

    # ---- batches ----------------------------------------------------------------------------------------------------

    def _set_signature_columns_if_needed(self) -> None:
        """Name the columns that the trainer keeps, with the weights of tokens; it drops all others.

        It keeps position_ids, which tell of packed sequences, also for a model that takes them in its **kwargs alone.
        """
        super()._set_signature_columns_if_needed()  # type: ignore[misc]  # the trainer's
        if TOKEN_WEIGHT not in self._signature_columns:
            compiled = getattr(self.model, "_orig_mod", None)  # the forward of `torch.compile(model)` names no argument
            parameters = inspect.signature(base_model(self.model if compiled is None else compiled).forward).parameters
            own = [] if compiled is None else list(parameters)
            if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
                own.append("position_ids")
            self._signature_columns = [*self._signature_columns, *own, TOKEN_WEIGHT]

    def _prepare_dataset(self, dataset: Any, *args: Any, **kwargs: Any) -> Any:
        """The rows as TRL's trainer prepares them; raises ValueError if they lose their weights."""
        prepared = super()._prepare_dataset(dataset, *args, **kwargs)  # type: ignore[misc]  # the trainer's
        if has_weights(dataset) and not has_weights(prepared):
            raise ValueError(
                f"the rows have a column {TOKEN_WEIGHT}, which {type(self).__name__} drops as it prepares them, as by "
                "packing; leave packing out, or remove the column."
            )
        return prepared

    def _get_dataloader(
        self, dataset: Any, description: str, batch_size: int, sampler_fn: Any = None, is_training: bool = False,
        dataloader_key: str | None = None,
    ) -> Any:  # fmt: skip
        """The trainer's batches, whose collator has to keep weights of tokens, also of rows that name no columns."""
        if not is_training and self.args.world_size > 1 and isinstance(dataset, IterableDataset):
            dataset = CountedRows(dataset, self.args.eval_batch_size * self.args.world_size)
        collator = self.data_collator
        self.data_collator = functools.partial(collate_weights, collator)
        try:
            return super()._get_dataloader(  # type: ignore[misc]  # the trainer's
                dataset, description, batch_size, sampler_fn, is_training, dataloader_key
            )
        finally:
            self.data_collator = collator

    def get_batch_samples(self, epoch_iterator: Any, num_batches: int, device: torch.device) -> tuple[list, Any]:
        """The batches of one optimizer step, and the number of *predicted* tokens in them over all processes."""
        self._numbers_in_step = None
        batches, count = super().get_batch_samples(epoch_iterator, num_batches, device)  # type: ignore[misc]  # the trainer's
        if 0 < len(batches) < num_batches and not self._warned_unfilled:  # at the end of a stream
            self._warned_unfilled = True
            logger.warning(
                "the rows ended after %d of the %d batches of a step: the trainer adds their gradients to "
                "the next step, which becomes too large, as does its loss; let the stream repeat its rows without end "
                "(train_dataset.repeat(None) of the library datasets)", len(batches), num_batches,
            )  # fmt: skip
        if self._numbers_in_step is None:  # in Unsloth's version of the trainer
            count = self._get_num_items_in_batch(batches, device)
        return batches, count

    def _get_num_items_in_batch(self, batch_samples: list, device: torch.device) -> Any:
        """The number of predicted tokens in these batches over all processes, or the sum of their weights."""
        if not batch_samples or any("labels" not in batch and "shift_labels" not in batch for batch in batch_samples):
            return None
        targets = (pop_targets(dict(batch), shift=not self._encoder_decoder) for batch in batch_samples)
        counts = torch.stack([self._counts(batch) for batch in targets]).sum(0).to(device)
        if self.args.average_tokens_across_devices and self.args.world_size > 1:
            counts = self.accelerator.gather(counts.unsqueeze(0)).sum(0)
        if self._ranks_per_batch() > 1:
            counts = counts / self._ranks_per_batch()  # each of them has counted the whole batch
        count, numbers = counts
        if self._evaluation is None:  # which a callback may begin within a step
            self._numbers_in_step = numbers
        else:
            self._evaluation.count = count
        return count

    def _ranks_per_batch(self) -> int:
        """Return the number of consecutive processes that share a batch by tensor or context parallelism."""
        return int(self.get_tp_size() * self.get_cp_size())

    def prediction_step(
        self, model: nn.Module, inputs: dict[str, Any], prediction_loss_only: bool, ignore_keys: Any = None,
        **generation: Any,
    ) -> Any:  # fmt: skip
        """Make the trainer's step; logits are formed only if they are used (`compute_metrics`, `predict`).

        `generation` are the settings that a `Seq2SeqTrainer` takes.
        """
        if "shift_labels" in inputs:
            inputs = inputs | {"labels": inputs["shift_labels"]}  # the trainer evaluates batches with labels only
        loss = None
        generates = getattr(self.args, "predict_with_generate", False) and not prediction_loss_only
        if generates and "labels" in inputs:
            with torch.no_grad():  # a Seq2SeqTrainer then takes the model's own loss
                loss = self.compute_loss(model, self._prepare_inputs(inputs))
            inputs = {name: value for name, value in inputs.items() if name not in (TOKEN_WEIGHT, "shift_labels")}
        # A compute_loss of a subclass may use what the trainer does not.
        has_own_loss = getattr(self.compute_loss, "__func__", None) is not ObjectiveMixin.compute_loss
        self._outputs_unused = prediction_loss_only and not has_own_loss
        try:
            result = super().prediction_step(model, inputs, prediction_loss_only, ignore_keys, **generation)  # type: ignore[misc]  # the trainer's
        finally:
            self._outputs_unused = False
        return result if loss is None else (loss.detach().mean(), *result[1:])

    # ---- checkpoints ------------------------------------------------------------------------------------------------

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        super()._save_optimizer_and_scheduler(output_dir)  # type: ignore[misc]  # the trainer's
        if self.args.should_save:
            save_sample(self.transport_cost, output_dir)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is not None:
            check_sample(self.transport_cost, checkpoint)
        super()._load_optimizer_and_scheduler(checkpoint)  # type: ignore[misc]  # the trainer's

    def _maybe_log_save_evaluate(self, *args: Any, **kwargs: Any) -> None:
        """Log, save and evaluate as the trainer does; what a training without a label ends with is not saved."""
        if self.control.should_training_stop and self._labelled is not None:
            steps = torch.tensor(float(self._labelled), device=self.args.device)
            check_labelled(float(self.accelerator.reduce(steps, reduction="sum")), "training")
        super()._maybe_log_save_evaluate(*args, **kwargs)  # type: ignore[misc]  # the trainer's

    # ---- logs and metrics -------------------------------------------------------------------------------------------

    def _inner_training_loop(self, *args: Any, **kwargs: Any) -> Any:
        """Train as the trainer does, without what an earlier training has left to log."""
        self._train_sums = self._labelled = None
        self._trains_weighted = TOKEN_WEIGHT in column_names(self.train_dataset)
        processes, workers = self.args.world_size, self.args.dataloader_num_workers
        sets = self.eval_dataset.values() if isinstance(self.eval_dataset, dict) else [self.eval_dataset]
        is_shared = processes > 1 and workers and self.accelerator.dispatch_batches is False
        if is_shared and self.args.eval_strategy != "no" and any(isinstance(rows, IterableDataset) for rows in sets):
            raise hidden_rows_error(processes, workers)  # rather now than at the first evaluation
        return super()._inner_training_loop(*args, **kwargs)  # type: ignore[misc]  # the trainer's

    def _sums(self, scored: Scored, targets: Targets) -> Tensor:
        """Return the sums over a batch of which logs and metrics are made."""
        # The distance of numbers is a mean over other positions, which is added to the mean of the other terms.
        others = self._total.without(NumberDistance)
        return batch_sums(
            ScoredBatch(scored.result, targets, others, self.transport_cost, scored.auxiliary, scored.predictions)
        )

    def _add_to_logs(self, sums: Tensor) -> None:
        if self._train_sums is None:
            self._check_best_metric(measured(sums))
            self._train_sums = torch.zeros_like(sums)
        self._train_sums = self._train_sums + sums

    def _check_best_metric(self, names: set[str]) -> None:
        """Raise ValueError before the first step, which the trainer would do after its first evaluation."""
        if self.args.eval_strategy != "no" and self.compute_metrics is None:
            names |= set() if self.transport_cost is None else {"transport_cost"}  # which an evaluation always scores
            check_best_metric(self.args, best_metric(self.args, self.eval_dataset), names)

    def _without_repeated(self, batch: Any) -> Any:
        """Ignore the labels of examples that are repeated to fill the last batch of several processes."""
        ranks, processes = self._ranks_per_batch(), self.accelerator.num_processes
        state = self.accelerator.gradient_state
        stream = None if self._evaluation is None else self._evaluation.stream
        if stream is not None and state.end_of_dataloader:  # where accelerate looks too, for `compute_metrics`
            state.active_dataloader.remainder = unrepeated_rows(stream)
        names = [name for name in ("labels", "shift_labels") if name in batch]
        if processes == ranks or not state.end_of_dataloader or state.remainder <= 0 or not names:
            return batch
        labels, position_ids = batch[names[0]], batch.get("position_ids")
        flat = is_flattened(labels, position_ids)
        shares = processes if self.accelerator.split_batches else 1
        size = self.args.eval_batch_size // shares if flat else len(labels)
        kept = max(0, state.remainder - size * (self.accelerator.process_index // ranks))
        if kept >= size:
            return batch
        if flat:
            rows = state.active_dataloader.dataset if stream is None else stream.dataset.last
            repeated = repeated_positions(labels, position_ids, rows, kept)
        else:
            repeated = (torch.arange(size, device=labels.device) >= kept).unsqueeze(-1)
        return batch | {name: batch[name].masked_fill(repeated, IGNORE_INDEX) for name in names}

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Log what the trainer logs, with the token-weighted means of `token_means` beside `loss`."""
        if "loss" in logs and self._train_sums is not None:
            means = token_means(self.accelerator.reduce(self._train_sums, reduction="sum"))
            self._train_sums = None
            logs |= {name: means[name] for name in LOGGED if name in means}
        super().log(logs, *args, **kwargs)  # type: ignore[misc]  # the trainer's

    @contextlib.contextmanager
    def _evaluating(self, dataloader: Any) -> Iterator[Evaluation]:
        outer, own = self._evaluation, vars(self).get("prediction_step")
        is_weighted = TOKEN_WEIGHT in column_names(getattr(dataloader, "dataset", None))
        self._evaluation = Evaluation(counting_rows(dataloader), is_weighted)
        if outer is None:  # in place of a `prediction_step` of the user's too, which may change the loss
            self.prediction_step = functools.partial(self._measured_step, self.prediction_step)  # type: ignore[method-assign]
        try:
            yield self._evaluation
        finally:
            self._evaluation = outer
            if outer is None:
                del self.prediction_step
                if own is not None:
                    self.prediction_step = own  # type: ignore[method-assign]

    def _measured_step(self, step: Any, model: nn.Module, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        """Make a step with a batch without the labels of repeated examples, and note its loss."""
        assert self._evaluation is not None
        batch = self._without_repeated(inputs)
        self._evaluation.begin_batch(functools.partial(self._rows_in, batch))
        result = step(model, batch, *args, **kwargs)
        self._evaluation.end_batch(result[0])
        return result

    def evaluation_loop(
        self, dataloader: Any, description: str, prediction_loss_only: bool | None = None, ignore_keys: Any = None,
        metric_key_prefix: str = "eval",
    ) -> Any:  # fmt: skip
        """Evaluate as the trainer does, with token-weighted loss, nll, perplexity and transport cost."""
        with weights_kept(unwrap(self.model)), self._evaluating(dataloader) as evaluation:  # before a checkpoint
            output = super().evaluation_loop(  # type: ignore[misc]  # the trainer's
                dataloader, description, prediction_loss_only, ignore_keys, metric_key_prefix
            )
        if evaluation.sums is None:
            if evaluation.batches == 0 and description != "Prediction":
                message = (
                    "the evaluation has no batch, expected at least one in each process; pass more rows, a smaller "
                    "per_device_eval_batch_size, or dataloader_drop_last=False."
                )
                if not self.is_in_train:  # a training that has run for hours does not end for its evaluation
                    raise ValueError(message)
                logger.warning(message)
            return output
        sums = self.accelerator.reduce(evaluation.sums, reduction="sum")
        if description == "Prediction" and not token_count(sums):
            output.metrics.pop(f"{metric_key_prefix}_loss", None)  # 0, as no row has a label
            return output
        check_labelled(float(token_count(sums)), "evaluation")
        own = self.accelerator.reduce(sums.new_zeros(()) + evaluation.added, reduction="sum")
        means = self._evaluated(token_means(sums))
        means["loss"] += float(own) / float(token_count(sums))
        means = {f"{metric_key_prefix}_{key}": value for key, value in means.items()}
        output.metrics.pop(f"{metric_key_prefix}_loss", None)  # the trainer's mean over batches
        output.metrics.update(means | output.metrics)  # what compute_metrics of the user measures stays
        best = measured_best_metric(self.args, metric_key_prefix)
        set_best_metric(self.args, best, self.transport_cost)
        if self.is_in_train and best is not None:
            keys = {key.removeprefix(f"{metric_key_prefix}_") for key in output.metrics}
            check_best_metric(self.args, best, keys)
        return output

    def hyperparameter_search(
        self, hp_space: Any = None, compute_objective: Any = None, *args: Any, **kwargs: Any
    ) -> Any:
        """Search as the trainer does; by default for the least `eval_loss`, or the sum of metrics with other names."""
        by_default = functools.partial(search_objective, rows=self.eval_dataset)
        return super().hyperparameter_search(hp_space, compute_objective or by_default, *args, **kwargs)  # type: ignore[misc]

    def _evaluated(self, means: dict[str, float]) -> dict[str, float]:
        """Return the means with all terms of the loss, and perplexity."""
        loss = means["loss"] + self._total.weight_of(NumberDistance) * means.pop("weighted_cost", 0.0)
        if "aux_loss" in means:
            loss += auxiliary_weight(self, self.model) * means["aux_loss"]
        return means | {"loss": loss, "perplexity": math.exp(min(means["nll"], 700.0))}


class ObjectiveTrainer(ObjectiveMixin, Trainer):
    """`transformers.Trainer` with an objective: `ObjectiveTrainer(model, args, objective="emo", train_dataset=...)`.

    See `ObjectiveMixin` for the arguments it adds, and the Hugging Face documentation for the rest.

    Rows are tokenised: `input_ids` and `labels`, which are padded, `token_weight` beside them too; or a `data_collator`
    makes batches of them. Text, prompts with completions and conversations are for TRL's `SFTTrainer`:
    `class EMOTrainer(ObjectiveMixin, SFTTrainer): ...`.
    """

    def __init__(
        self,
        model: Any = None,
        args: Any = None,
        data_collator: Any = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        *others: Any,
        **settings: Any,
    ) -> None:
        self._takes_tokens = data_collator is None
        if self._takes_tokens:
            for rows in (train_dataset, eval_dataset):
                check_rows_tokenised(rows)
            aligned = isinstance(model, nn.Module) and not is_encoder_decoder(model)
            data_collator = functools.partial(collate_tokens, aligned=aligned)
        super().__init__(model, args, data_collator, train_dataset, eval_dataset, *others, **settings)

    def _remove_unused_columns(self, dataset: Any, description: str | None = None) -> Any:
        """Check that rows are tokenised first: the trainer would only say that no column is one of the model's."""
        if self._takes_tokens:
            check_rows_tokenised(dataset)
        return super()._remove_unused_columns(dataset, description)
