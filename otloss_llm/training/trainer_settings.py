"""Settings of the trainers of transformers and TRL that act on the loss: followed or excluded."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

from torch import nn
from transformers.trainer_utils import default_compute_objective

from otloss._checks import check_not_negative
from otloss_llm.costs.vocabulary import TokenCost, VocabularyCost
from otloss_llm.models.heads import base_model, text_config
from otloss_llm.objectives import LabelSmoothing, Objective, Sum, ZLoss
from otloss_llm.objectives.formulas import uniform_cross_entropy
from otloss_llm.training.fused import unwrap
from otloss_llm.training.token_means import EVALUATED

SFT_MODULES = ("trl", "unsloth", "unsloth_compiled_cache", "UnslothSFTTrainer")  # they define an SFTTrainer
LESS_IS_BETTER = ("nll", "perplexity", "transport_cost")


def check_loss_settings(args: Any, compute_loss_func: Any, objective: Objective) -> None:
    """Raise ValueError for settings of the trainer's own loss, which would have no effect on an objective."""
    if args.n_gpu > 1:
        raise ValueError(f"{args.n_gpu} GPUs under nn.DataParallel are not supported; start with torchrun.")
    # The default of TRL's configs is one of these two ways to compute the same loss. With others TRL sets a
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


def foreign_argument(names: Iterable[str]) -> str:
    """Return what to do about an argument that trainers had in older releases, or do not have."""
    if "tokenizer" in names:
        return "the tokenizer is processing_class=."
    return "settings of a run are fields of its arguments: args=SFTConfig(...) or TrainingArguments(...)."


def check_sequence_parallelism(size: int) -> None:
    """Raise ValueError under sequence parallelism: the trainer sums the loss over ranks in a way of its own."""
    if size > 1:
        raise ValueError(
            f"parallelism_config has sp_size={size}, and an objective does not work with sequence parallelism "
            "(DeepSpeed's Ulysses); split sequences with context parallelism (cp_size) instead."
        )


def with_terms(objective: Objective, args: Any, z_loss: float) -> Sum:
    """Return the objective with label smoothing and z-loss where they were asked for, as a sum."""
    if args.label_smoothing_factor:
        if any(term.function is uniform_cross_entropy for term in Sum.of(objective).terms):
            raise ValueError(
                f"label_smoothing_factor is {args.label_smoothing_factor}, and {objective!r} smooths labels itself; "
                "leave one of them out."
            )
        objective = LabelSmoothing(objective, args.label_smoothing_factor)
    check_not_negative("z_loss", z_loss)
    return Sum.of(ZLoss(objective, z_loss) if z_loss else objective)


def own_name(metric: str, rows: Any) -> str:
    """Return the name of a metric without the prefixes of evaluations and of named data sets."""
    name = metric.removeprefix("eval_")
    prefixes = [f"{part}_" for part in (rows if isinstance(rows, dict) else ()) if name.startswith(f"{part}_")]
    return name.removeprefix(max(prefixes, key=len, default=""))  # of "math" and "math_hard" the longer one


def best_metric(args: Any, rows: Any) -> str:
    """Return the metric that chooses the best model, without prefixes."""
    return own_name(args.metric_for_best_model or "", rows)


def search_objective(metrics: dict[str, float], *, rows: Any) -> float:
    """Return what a hyperparameter search minimises: what transformers takes by default, without our metrics."""
    ours = set(EVALUATED) - {"loss"}
    return default_compute_objective({key: value for key, value in metrics.items() if own_name(key, rows) not in ours})


def check_best_cost(args: Any, best: str | None, cost: TokenCost | None) -> None:
    """Raise ValueError if the best model is chosen by a transport cost of which less is not better."""
    if best == "transport_cost" and isinstance(cost, VocabularyCost) and cost.signed:
        raise ValueError(
            f"metric_for_best_model is {args.metric_for_best_model!r}, and {type(cost).__name__} has a signed "
            'cost, of which less is not better; take "loss" or "nll".'
        )


def measured_best_metric(args: Any, prefix: str) -> str | None:
    """Return which of our metrics chooses the best model, if an evaluation with this prefix has it, without prefix."""
    best = args.metric_for_best_model
    return next((name for name in EVALUATED if f"{prefix}_{name}" in (best, f"eval_{best}")), None)


def set_best_metric(args: Any, best: str | None, cost: TokenCost | None) -> None:
    """Set that less is better of one of our metrics; the trainer guesses it from the name, for "loss" only."""
    check_best_cost(args, best, cost)
    if best in LESS_IS_BETTER:
        args.greater_is_better = False


def check_best_metric(args: Any, best: str | None, names: Collection[str]) -> None:
    """Raise ValueError if the best model is chosen by a metric of ours that an evaluation does not have."""
    if best in EVALUATED and best not in names:
        raise ValueError(
            f"metric_for_best_model is {args.metric_for_best_model!r}, which an evaluation of this model with this "
            f"objective does not have; take one of {', '.join(name for name in EVALUATED if name in names)}."
        )


def auxiliary_weight(trainer: Any, model: nn.Module) -> float:
    """Return the weight of the loss that balances experts: TRL's setting, else the one that the model itself uses.

    Args:
        trainer: None for the model's own.
    """
    root = base_model(unwrap(model))
    for owner in (trainer, root, text_config(root.config)):
        for name in ("router_aux_loss_coef", "aux_loss_coef"):
            weight = getattr(owner, name, None)
            if weight is not None:
                return float(weight)
    raise ValueError(
        f"{type(root).__name__} returns an auxiliary loss (mixture of experts) and no router_aux_loss_coef to "
        "weight it with; set it in the model's config, or output_router_logits=False to train without that loss."
    )


def check_loss_is_replaceable(cls: type, mixin: type, trainer: type) -> None:
    """Raise TypeError if a class beside the mixin has a loss of its own, which the mixin would replace."""
    order = cls.__mro__
    if trainer not in order or mixin not in order:
        return
    if order.index(trainer) < order.index(mixin):
        raise TypeError(
            f"{cls.__name__} has {mixin.__name__} behind its trainer, where it has no effect; put it first: "
            f"class {cls.__name__}({mixin.__name__}, {cls.__mro__[1].__name__})."
        )
    for base in order[order.index(mixin) + 1 : order.index(trainer)]:
        own = vars(base).keys() & {"compute_loss", "_compute_loss"}
        own |= {"training_step"} & vars(base).keys() if base.__module__.startswith("trl.") else set()
        # Its loss is the cross-entropy, in the version of Unsloth too, whose modules are written when it is imported.
        library = base.__module__.partition(".")[0]
        if own and not (library in SFT_MODULES and base.__name__.endswith("SFTTrainer")):
            raise TypeError(
                f"{base.__name__} has a loss of its own ({', '.join(sorted(own))}), which an objective would replace; "
                f"{mixin.__name__} goes with Trainer, Seq2SeqTrainer and SFTTrainer, which take the model's loss. "
                f"A compute_loss of yours belongs into {cls.__name__} itself, where it can call super()."
            )
