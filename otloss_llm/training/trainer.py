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
from otloss_llm.costs.hubs import hub_share
from otloss_llm.costs.number_cost import MixedCost
from otloss_llm.costs.vocabulary import TokenCost, VocabularyCost
from otloss_llm.data.blocks import PackedBlocks
from otloss_llm.data.hugging_face import is_untokenised, tokenised
from otloss_llm.data.questions import AnsweredQuestions, label_counts, pad_questions
from otloss_llm.evaluation.perplexity import context_length
from otloss_llm.losses.positions import IGNORE_INDEX, check_kernel, check_objective, cost_positions
from otloss_llm.losses.token_loss import TokenLoss, linear_token_loss, token_loss
from otloss_llm.models.heads import (
    check_causal,
    few_inputs,
    find_head,
    is_encoder_decoder,
    shifts_labels,
    weights_kept,
)
from otloss_llm.models.logit_transform import LogitTransform
from otloss_llm.objectives import (
    MLE,
    LabelSmoothing,
    NumberToken,
    Objective,
    Statistics,
    ZLoss,
    cost_kind,
    innermost,
    needs_cost,
    parse_objective,
    share_of_innermost,
    with_innermost,
)
from otloss_llm.training.fused import ScoredHead, auxiliary_loss, fused_loss, measure_transform, unwrap
from otloss_llm.training.predictions import TRAINING_TOKENS, logit_sums, prediction_sums
from otloss_llm.training.token_means import TOKENS, example_sums, token_means

logger = logging.getLogger(__name__)

TOKEN_WEIGHT = "token_weight"  # a column of the data set
LESS_IS_BETTER = ("nll", "perplexity", "transport_cost")


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
        collator = _collator_for(kwargs.get("train_dataset"), kwargs.get("eval_dataset"))
        if collator is not None and kwargs.get("data_collator") is None:
            kwargs["data_collator"] = collator
        weighted = _has_weights(kwargs.get("train_dataset"))  # TRL may drop the column
        super().__init__(*args, **kwargs)
        self._weighted = weighted or _has_weights(self.train_dataset)
        self.objective = parse_objective(objective) if isinstance(objective, str) else objective
        self.impl, self.chunk_size, self.z_loss = impl, chunk_size, z_loss
        _check_settings(self.args, self.compute_loss_func, self.objective)
        self._with_terms(self.objective)  # raises for settings that are not valid
        _check_sequence_parallelism(self.get_sp_size())
        head = find_head(unwrap(self.model))
        self._encoder_decoder = is_encoder_decoder(unwrap(self.model))
        self._transform: LogitTransform | None = None
        self._labels_unclear = False
        sharded = self.is_deepspeed_enabled or self.is_fsdp_enabled  # no single process can run such a model here
        if not sharded and not any(parameter.is_meta for parameter in self.model.parameters()):
            check_causal(self.model)
            # Rows of ours are not shifted, whatever the model expects.
            self._labels_unclear = collator is None and not self._encoder_decoder and not shifts_labels(self.model)
            self._transform = measure_transform(self.model, few_inputs(self.model))
        if isinstance(cost, str):
            cost = choose_cost(
                cost_kind(objective) if cost == "auto" else cost,
                embedding=lambda: EmbeddingCost(self._broadcast(head.weight), directions=None),
                tokenizer=self.processing_class, vocab_size=head.weight.shape[0], numbers=numbers,
                seed=self.args.seed,
            )  # fmt: skip
        elif numbers is not None:
            raise ValueError(
                f'numbers={numbers!r} is for the costs "auto", "number" or "mixed", got {cost}; set it in that cost.'
            )
        check_objective(self.objective, cost, head.weight.shape[0])
        _check_numbers(self.objective, cost)
        check_kernel(impl, chunk_size)
        self.transport_cost = cost
        best = (self.args.metric_for_best_model or "").removeprefix("eval_")
        if best == "transport_cost" and isinstance(cost, VocabularyCost) and cost.signed:
            raise ValueError(
                f"metric_for_best_model is {self.args.metric_for_best_model!r}, and {type(cost).__name__} has a signed "
                'cost, of which less is not better; take "loss" or "nll".'
            )
        if best in LESS_IS_BETTER:
            self.args.greater_is_better = False  # the trainer guesses it from the name, for "loss" only
        self._logits_wanted = False
        self._numbers_in_step: Tensor | None = None
        self._train_sums: Tensor | None = None
        self._eval_sums: Tensor | None = None
        if needs_cost(self.objective) and self.is_world_process_zero():
            _log_labels(cost, getattr(self, "train_dataset", None))

    def _broadcast(self, weight: Tensor) -> Tensor:
        """The first process's weight: DDP starts from it; with FSDP's cpu_ram_efficient_loading only it has one."""
        weight = weight.detach()
        if self.args.world_size == 1 or not torch.distributed.is_initialized() or hasattr(weight, "placements"):
            return weight
        device = self.accelerator.device
        weight = torch.empty_like(weight, device=device) if weight.is_meta else weight.to(device, copy=True)
        torch.distributed.broadcast(weight, src=0)
        return weight

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
        if model.training and self._weighted and TOKEN_WEIGHT not in inputs:
            raise ValueError(
                f"the training set has a column {TOKEN_WEIGHT}, and the batch only {sorted(inputs)}; use a collator "
                "that keeps and pads it, or remove the column."
            )
        labels, token_weight = self._aligned_labels(inputs)
        if self._encoder_decoder and "decoder_input_ids" not in inputs:  # as the model makes them from labels
            root: Any = unwrap(self.model)
            inputs["decoder_input_ids"] = root.prepare_decoder_input_ids_from_labels(labels)
        inputs.pop("skip_logits", None)  # set by the trainer for Liger's cross-entropy
        if getattr(self, "aux_loss_enabled", False):  # set by TRL to balance experts
            inputs["output_router_logits"] = True
        training = model.training
        _check_numbers(self.objective, self.transport_cost)  # the attribute may have been changed
        num_items = num_items_in_batch if training else None
        if num_items is not None and not bool(torch.as_tensor(num_items) > 0):
            num_items = 1  # only ignored labels: the sum is 0
        # The trainer divides by the number of accumulated batches if this is false.
        self.loss_is_scaled_for_ga = num_items is not None
        objective = self._with_terms(
            self._objective_of(labels, token_weight, num_items) if training else self.objective
        )
        result, auxiliary, logits = self._score(model, inputs, labels, token_weight, num_items, objective)
        self._add_sums(result, auxiliary, labels, token_weight, training)
        loss = result.loss
        if num_items is not None and self.args.average_tokens_across_devices:
            # Gradients are averaged over processes, tokens were summed; ranks of tensor parallelism have the same loss.
            loss = loss * (self.accelerator.num_processes // self.get_tp_size())
        if auxiliary is not None:  # a mean over tokens in each batch: its mean over batches and processes
            batches = self.current_gradient_accumulation_steps if num_items is not None else 1
            loss = loss + self._auxiliary_weight() * auxiliary / batches
        return (loss, CausalLMOutput(loss=loss, logits=logits)) if return_outputs else loss

    def _score(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        labels: Tensor,
        token_weight: Tensor | None,
        num_items: Any,
        objective: Objective,
    ) -> tuple[TokenLoss, Tensor | None, Tensor | None]:
        """The objective, the loss that balances experts if the model returns one, and logits if they are wanted."""
        wanted = needs_cost(objective) or not model.training

        def settings(device: torch.device) -> dict[str, Any]:
            items = num_items.to(device) if isinstance(num_items, Tensor) else num_items
            cost = self._cost_on(device) if wanted else None
            weights = None if token_weight is None else token_weight.to(device)
            return {"objective": objective, "cost": cost, "ignore_index": IGNORE_INDEX, "num_items": items,
                    "token_weight": weights}  # fmt: skip

        def score(hidden: Tensor, head: ScoredHead) -> TokenLoss:
            if hidden.shape[:-1] != labels.shape:
                raise ValueError(
                    f"the head sees hidden states of shape {tuple(hidden.shape)}, labels have {tuple(labels.shape)}; "
                    "models that add or drop positions (prompt tuning) are not supported."
                )
            here = labels.to(hidden.device)
            if self._logs_predictions() and not hasattr(head.weight, "placements"):
                most = TRAINING_TOKENS if model.training else None
                self._log_predictions(prediction_sums(hidden, here, head, most), model.training)
            return linear_token_loss(
                hidden, labels=here, impl=self.impl, chunk_size=self.chunk_size,
                **head._asdict(), **settings(hidden.device),
            )  # fmt: skip

        logits = None
        if self._logits_wanted:
            outputs = model(**inputs)
            logits = outputs["logits"]
            here = labels.to(logits.device)
            if self._logs_predictions():
                self._log_predictions(logit_sums(logits, here), model.training)
            result = token_loss(logits, here, **settings(logits.device))
        else:
            if self._transform is None:
                self._transform = measure_transform(model, inputs)
            with fused_loss(model, self._transform, score):
                outputs = model(**inputs)
            result = TokenLoss(outputs["loss"], **{name: outputs.get(name) for name in Statistics._fields})
        # The head may be on another device than the batch (device_map).
        statistics = result.statistics().map(lambda vector: vector.to(labels.device))
        auxiliary = auxiliary_loss(outputs)
        auxiliary = None if auxiliary is None else auxiliary.to(labels.device)
        return TokenLoss(result.loss.to(labels.device), **statistics._asdict()), auxiliary, logits

    def _auxiliary_weight(self) -> float:
        """The weight of the loss that balances experts: TRL's setting, else the one that the model itself uses."""
        model: Any = unwrap(self.model)
        model = model.get_base_model() if hasattr(model, "get_base_model") else model
        config = model.config.get_text_config()
        for owner in (self, self.args, model, config):  # up to TRL 1.10 the setting is in the arguments only
            for name in ("router_aux_loss_coef", "aux_loss_coef"):
                weight = getattr(owner, name, None)
                if weight is not None:
                    return float(weight)
        raise ValueError(
            f"{type(model).__name__} returns an auxiliary loss (mixture of experts) and no router_aux_loss_coef to "
            "weight it with; set it in the model's config, or output_router_logits=False to train without that loss."
        )

    def _with_terms(self, objective: Objective) -> Objective:
        """The objective with label smoothing and z-loss where they were asked for."""
        if self.args.label_smoothing_factor:
            objective = LabelSmoothing(objective, self.args.label_smoothing_factor)
        return ZLoss(objective, self.z_loss) if self.z_loss else objective

    def _objective_of(self, labels: Tensor, token_weight: Tensor | None, num_items: Any) -> Objective:
        """The objective of this step; `NumberToken` with the weight that makes a mean over numbers."""
        inner = innermost(self.objective)
        if not isinstance(inner, NumberToken):
            return self.objective
        tokens, numbers = num_items, self._numbers_in_step
        if tokens is None or numbers is None:
            tokens, numbers = self._counts(labels, token_weight)
        return with_innermost(self.objective, inner.per_number(float(tokens), float(numbers)))

    def _aligned_labels(self, inputs: dict[str, Any]) -> tuple[Tensor, Tensor | None]:
        """Take labels and weights out of a batch; entry t is the token that position t predicts, and its weight."""
        if self._labels_unclear and "shift_labels" not in inputs:
            raise ValueError(
                f"the loss of {type(unwrap(self.model)).__name__} scores label t at position t, those of other causal "
                "language models at t - 1, so it is unclear what the labels are. Name them shift_labels, with the "
                "token that position t predicts at t (and set remove_unused_columns=False)."
            )
        return _aligned_labels(inputs, shift=not self._encoder_decoder)

    def _counts(self, labels: Tensor, token_weight: Tensor | None) -> Tensor:
        """The number of predicted tokens, and of number positions (of all positions without `NumberToken`), or the sums
        of their weights."""
        positions = valid = labels != IGNORE_INDEX
        if isinstance(innermost(self.objective), NumberToken):
            positions = cost_positions(self._cost_on(labels.device), labels, valid)
        if token_weight is None:
            return torch.stack([valid.sum(), positions.sum()])
        weights = token_weight.double()
        return torch.stack([weights[mask].sum() for mask in (valid, positions)]).float()

    def _set_signature_columns_if_needed(self) -> None:
        """As the trainer's, which drops all other columns, and the weights of tokens."""
        super()._set_signature_columns_if_needed()  # type: ignore[misc]  # of the Trainer
        if TOKEN_WEIGHT not in self._signature_columns:
            self._signature_columns = [*self._signature_columns, TOKEN_WEIGHT]

    def _cost_on(self, device: torch.device) -> TokenCost | None:
        if self.transport_cost is not None and self.transport_cost.device != device:
            self.transport_cost = self.transport_cost.to(device)
        return self.transport_cost

    def get_batch_samples(self, epoch_iterator: Any, num_batches: int, device: torch.device) -> tuple[list, Any]:
        """The batches of one optimizer step, and the number of *predicted* tokens in them over all processes."""
        batches, _ = super().get_batch_samples(epoch_iterator, num_batches, device)  # type: ignore[misc]  # of the Trainer
        if not batches or any("labels" not in batch and "shift_labels" not in batch for batch in batches):
            return batches, None
        labels = (self._aligned_labels(dict(batch)) for batch in batches)
        counts = torch.stack([self._counts(*one) for one in labels]).sum(0).to(device)
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

    # ---- metrics --------------------------------------------------------------------------------------------------

    def _add_sums(
        self,
        result: TokenLoss,
        auxiliary: Tensor | None,
        labels: Tensor,
        token_weight: Tensor | None,
        training: bool,
    ) -> None:
        # The cost in `NumberToken` is a mean over other positions, which is added to that of the rest.
        numbers = isinstance(innermost(self.objective), NumberToken)
        objective = self._with_terms(with_innermost(self.objective, MLE()) if numbers else self.objective)
        sums = example_sums(
            result,
            labels,
            objective=objective,
            cost=self.transport_cost,
            auxiliary=auxiliary,
            token_weight=token_weight,
        )
        if training:
            total = sums.sum(0)
            self._train_sums = total if self._train_sums is None else self._train_sums + total
        else:
            total = self._gathered(sums).sum(0)
            self._eval_sums = total if self._eval_sums is None else self._eval_sums + total

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
        """As the trainer's, with token-weighted `nll` and `transport_cost` (and `aux_loss`) beside `loss`."""
        if "loss" in logs and self._train_sums is not None:
            sums = self.accelerator.reduce(self._train_sums, reduction="sum")
            self._train_sums = None
            logs |= {key: value for key, value in token_means(sums).items() if key not in ("loss", "weighted_cost")}
        super().log(logs, *args, **kwargs)  # type: ignore[misc]  # of the Trainer

    def evaluation_loop(self, *args: Any, metric_key_prefix: str = "eval", **kwargs: Any) -> Any:
        """As the trainer's, with token-weighted loss, nll, perplexity and transport cost."""
        self._eval_sums = None
        with weights_kept(unwrap(self.model)):  # before a checkpoint is written
            output = super().evaluation_loop(*args, metric_key_prefix=metric_key_prefix, **kwargs)  # type: ignore[misc]  # of the Trainer
        if self._eval_sums is not None:
            if not self._eval_sums[TOKENS] > 0:
                raise ValueError("the evaluation set has no labelled token to score; every label is ignored.")
            means = token_means(self._eval_sums)
            inner = innermost(self.objective)
            if isinstance(inner, NumberToken):
                share = share_of_innermost(self._with_terms(self.objective))
                means["loss"] += share * inner.weight * means.get("weighted_cost", 0.0)
            means.pop("weighted_cost", None)
            if "aux_loss" in means:
                means["loss"] += self._auxiliary_weight() * means["aux_loss"]
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
    conversations, which is TRL's `assistant_only_loss=True`). For packed text give `PackedBlocks`.
    """

    def __init__(self, *args: Any, max_length: int = 1024, **kwargs: Any) -> None:
        if kwargs.get("data_collator") is None:
            model = args[0] if args else kwargs.get("model")
            context = None if model is None else context_length(model)
            longest = max_length if context is None else min(max_length, context)
            for name in ("train_dataset", "eval_dataset"):
                kwargs[name] = _tokenised(kwargs.get(name), kwargs.get("processing_class"), longest)
        super().__init__(*args, **kwargs)


def _tokenised(rows: Any, tokenizer: Any, max_length: int) -> Any:
    """The rows; a `datasets.Dataset` of text is tokenised, also among several by name."""
    if isinstance(rows, dict):
        return {name: _tokenised(part, tokenizer, max_length) for name, part in rows.items()}
    if not is_untokenised(rows):
        return rows
    if _has_weights(rows):
        raise ValueError(
            f"the dataset is text and has a column {TOKEN_WEIGHT}, whose tokens are not known; tokenise it "
            "(input_ids, labels) with a weight for each token, and give a data_collator that pads all three."
        )
    if tokenizer is None:
        raise ValueError("the dataset is text, and there is no tokenizer; give processing_class=tokenizer.")
    return tokenised(rows, tokenizer, max_length=max_length)


def _log_labels(cost: TokenCost | None, rows: Any) -> None:
    """Log what the cost says of the labels of rows of ours: near-duplicates among them, and hubs beside them."""
    embedding = cost.other if isinstance(cost, MixedCost) else cost
    if not isinstance(embedding, EmbeddingCost) or not isinstance(rows, PackedBlocks | AnsweredQuestions):
        return
    counts, duplicates = label_counts(rows, len(embedding.unit)), near_duplicates_in(embedding)
    if duplicates is not None:
        _log_once(int(counts[duplicates.cpu()].sum()), int(counts.sum()))
    share = hub_share(embedding.unit, counts)
    if share is not None:
        _log_hubs_once(share, embedding.has_all_directions)


@functools.cache  # once for all arms and seeds of a comparison
def _log_once(duplicates: int, labels: int) -> None:
    logger.warning(
        "%d of the %d labels of the training set (%.2f %%) are tokens of near-duplicate rows of the embedding, which "
        "cost 1 to every other token", duplicates, labels, 100 * duplicates / max(labels, 1),
    )  # fmt: skip


# Of all rows: 0.02 to 0.04 where EMO moved mass to rare tokens, at most 0.002 elsewhere (docs/reports/evidence.md).
HUB_SHARE = 0.01


@functools.cache
def _log_hubs_once(share: float, has_all_directions: bool) -> None:
    text = "by the cost a rare token is nearer to %.1f %% of draws of four labels than these are to each other"
    if share < HUB_SHARE or not has_all_directions:
        logger.info(text, 100 * share)
        return
    logger.warning(
        f"{text}; EMO moves mass to such tokens. Remove what rows share with EmbeddingCost(rows, directions=None) "
        "(--cost_embedding all-but-the-top), the default, and compare with MLE", 100 * share,
    )  # fmt: skip


def _check_settings(args: Any, compute_loss_func: Any, objective: Objective) -> None:
    """Raise ValueError for settings of the trainer's own loss, which would have no effect on an objective."""
    if args.n_gpu > 1:
        raise ValueError(f"{args.n_gpu} GPUs under nn.DataParallel are not supported; start with torchrun.")
    # Of TRL's configs, whose default is one of these two ways to compute the same loss. Others of TRL set a
    # compute_loss_func, which nobody gave.
    loss_type = getattr(args, "loss_type", None)
    if loss_type not in (None, "nll", "chunked_nll"):
        raise ValueError(
            f"loss_type={loss_type!r} and an objective were both given; leave loss_type out, the objective is "
            f"{objective!r}."
        )
    if compute_loss_func is not None:
        raise ValueError("compute_loss_func and an objective were both given; leave compute_loss_func out.")
    kernels = getattr(args, "liger_kernel_config", None) or {}
    if getattr(args, "use_liger_kernel", False) and kernels.get("fused_linear_cross_entropy", True):
        raise ValueError(
            "use_liger_kernel=True puts a cross-entropy of its own into the model, which no objective uses; "
            'add liger_kernel_config={"fused_linear_cross_entropy": False} to keep its other kernels.'
        )


def _has_weights(rows: Any) -> bool:
    """Whether a data set has the column of weights, as far as it can tell without reading it all."""
    names = getattr(rows, "column_names", None)
    if names is None and isinstance(rows, list) and rows and isinstance(rows[0], dict):
        names = rows[0]
    return TOKEN_WEIGHT in (names or ())


def _check_sequence_parallelism(size: int) -> None:
    """Raise ValueError under sequence parallelism: the trainer sums the loss over ranks in a way of its own."""
    if size > 1:
        raise ValueError(
            f"parallelism_config has sp_size={size}, and an objective does not work with sequence parallelism "
            "(DeepSpeed's Ulysses); split sequences with context parallelism (cp_size) instead."
        )


def _check_numbers(objective: Objective, cost: TokenCost | None) -> None:
    """Raise ValueError if the objective needs the values of numbers, and the cost is one of an embedding."""
    objective = innermost(objective)
    if isinstance(objective, NumberToken) and isinstance(cost, CosineCost):
        raise ValueError(
            f"{objective!r} needs distances between numbers, which {type(cost).__name__} has not; give the trainer "
            f'cost="number" or NumberCost.from_tokenizer(tokenizer), or take EMO({objective.weight}) with this cost.'
        )


def _collator_for(train: Any, evaluation: Any) -> Any:
    """The collator of `PackedBlocks`, `AnsweredQuestions` or a `Subset` of them; None for other datasets."""
    rows = train if train is not None else evaluation
    if isinstance(rows, dict):  # several to evaluate on, by name
        rows = next(iter(rows.values()), None)
    while isinstance(rows, Subset):
        rows = rows.dataset
    if isinstance(rows, PackedBlocks):
        return default_data_collator  # blocks are of one length: nothing to pad
    return pad_questions if isinstance(rows, AnsweredQuestions) else None


def _aligned_labels(inputs: dict[str, Any], *, shift: bool) -> tuple[Tensor, Tensor | None]:
    """Take labels and weights out of a batch and align them: entry `t` is the token that position `t` predicts.

    Those of an encoder-decoder need no `shift`; weights beside `shift_labels` are aligned as these are.
    """
    labels, shifted = inputs.pop("labels", None), inputs.pop("shift_labels", None)
    weights = inputs.pop(TOKEN_WEIGHT, None)
    either = labels if shifted is None else shifted
    if either is not None and weights is not None and weights.shape != either.shape:
        raise ValueError(
            f"{TOKEN_WEIGHT} of the batch has shape {tuple(weights.shape)}, the labels {tuple(either.shape)}; expected "
            "a weight for each token, padded like the labels."
        )
    if shifted is not None:
        return shifted, weights
    if labels is None:
        raise ValueError(f"the batch has {sorted(inputs)} but no labels; use a collator that makes them "
                         "(DataCollatorForLanguageModeling(tokenizer, mlm=False)).")  # fmt: skip
    if not shift:
        return labels, weights
    aligned = nn.functional.pad(labels[..., 1:], (0, 1), value=IGNORE_INDEX)
    return aligned, None if weights is None else nn.functional.pad(weights[..., 1:], (0, 1), value=0)
