"""One training run in one folder (`benchmarks.paper.folders`); the same command resumes it after an interruption.

A resumed run gives the weights, the log and the results (except wall times) of an uninterrupted one.
"""

from __future__ import annotations

import platform
import shutil
import statistics
import time
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import (
    PrinterCallback,
    ProgressCallback,
    TrainerCallback,
    TrainingArguments,
    default_data_collator,
)

import otloss
from benchmarks.paper.data.blocks import PackedBlocks
from benchmarks.paper.data.questions import AnsweredQuestions, pad_questions
from benchmarks.paper.folders import (
    LOG_FILE,
    RESULTS_FILE,
    full_disk_reported,
    incomplete_checkpoints,
    last_complete_checkpoint,
    locked,
    make_folder,
    open_run,
    write_json,
)
from otloss_llm.costs.vocabulary import TokenCost
from otloss_llm.evaluation.perplexity import check_vocabulary, context_length
from otloss_llm.models.heads import is_encoder_decoder
from otloss_llm.objectives import Objective
from otloss_llm.training.trainer import ObjectiveTrainer

Rows = PackedBlocks | AnsweredQuestions  # what can be trained and evaluated on

# Training arguments that change the trained weights; a resumed run may change the others (logging, saving, reporting).
_DECISIVE_ARGUMENTS = (
    "num_train_epochs", "max_steps", "per_device_train_batch_size", "gradient_accumulation_steps", "learning_rate",
    "lr_scheduler_type", "lr_scheduler_kwargs", "warmup_steps", "weight_decay", "adam_beta1", "adam_beta2",
    "adam_epsilon", "max_grad_norm", "optim", "optim_args", "seed", "data_seed", "bf16", "fp16", "neftune_noise_alpha",
    "train_sampling_strategy", "dataloader_drop_last", "world_size", "load_best_model_at_end",
)  # fmt: skip
# Options that also change them if the best checkpoint is loaded at the end.
_CHOICE_OF_CHECKPOINT = (
    "eval_strategy", "eval_steps", "save_strategy", "save_steps", "metric_for_best_model", "greater_is_better",
)  # fmt: skip


class DivergenceError(ValueError):
    """The loss or the weights became NaN or infinite."""


class _NoStepsLeftError(Exception):
    """The checkpoint to resume from is the one of the last step."""


def decisive_settings(args: TrainingArguments) -> dict[str, Any]:
    """The training arguments on which the trained weights depend."""
    names = _DECISIVE_ARGUMENTS + (_CHOICE_OF_CHECKPOINT if args.load_best_model_at_end else ())
    values = {name: getattr(args, name, None) for name in names}
    return {
        name: value if isinstance(value, (int, float, type(None))) else str(value) for name, value in values.items()
    }


def environment(device: Any) -> dict[str, Any]:
    """Versions, machine and threads, on which results depend beside the settings."""
    device = torch.device(device)
    return {
        "otloss": otloss.__version__,
        "torch": str(torch.__version__),
        "transformers": transformers.__version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "threads": torch.get_num_threads(),
    }


def check_fit(model: Any, rows: Rows) -> None:
    """Raise ValueError if rows are longer than the model's context, or of another vocabulary."""
    context = context_length(model)
    if context is not None and rows.longest > context:
        what = "block_size is" if isinstance(rows, PackedBlocks) else "a question with its answer has"
        raise ValueError(
            f"{what} {rows.longest}, more than the model's context of {context} tokens; make block_size smaller."
        )
    check_vocabulary(model, *rows.id_range)


def train_run(
    model: Any,
    tokenizer: Any,
    rows: Rows,
    *,
    args: TrainingArguments,
    objective: Objective,
    cost: TokenCost | None,
    validation: Rows | None = None,
    settings: dict[str, Any],
    bar: str,
) -> dict[str, Any]:
    """Train `model` in `args.output_dir`, resuming from the last complete checkpoint of the same run.

    The model must be the start of training, also when resuming, because the caller takes an embedding cost from it.

    Args:
        settings: what identifies the run beside the training arguments (model, text fingerprint, objective).
        bar: label of the progress bar, which replaces the trainer's own output.

    Returns:
        The results, as in `results.json`: steps, means over the training, the evaluation on `validation`, and
        `seconds_per_step` (median of this process).

    Raises:
        ValueError: the folder holds another run, another process works in it, or rows do not fit the model.
        OSError: the folder cannot be written, or the disk is full; earlier checkpoints stay.
        DivergenceError: the loss or the weights became NaN or infinite; earlier checkpoints stay.
    """
    folder = Path(args.output_dir)
    for part in (rows, *([] if validation is None else [validation])):
        check_fit(model, part)
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ValueError(
            "no parameter of the model requires grad, so nothing can be trained; the folder of a PEFT adapter loads "
            "frozen: merge it into its base model (merge_and_unload) and save that."
        )
    make_folder(folder)
    timer = _StepTimer()
    # Before the run is opened, so that an error of the trainer leaves nothing in the folder.
    try:
        trainer = ObjectiveTrainer(
            model, args, objective=objective, cost=cost, train_dataset=rows, eval_dataset=validation,
            data_collator=default_data_collator if isinstance(rows, PackedBlocks) else pad_questions,
            processing_class=tokenizer, callbacks=[timer, _Monitor()],
        )  # fmt: skip
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:  # a reporting integration that is not installed, for example
        raise ValueError(f"the trainer cannot be set up with these arguments: {error}") from error
    with locked(folder), full_disk_reported(folder):
        return _run(trainer, folder, settings, timer, bar=bar)


def _run(
    trainer: ObjectiveTrainer, folder: Path, settings: dict[str, Any], timer: _StepTimer, *, bar: str
) -> dict[str, Any]:
    args = trainer.args
    finished = open_run(folder, settings | decisive_settings(args))
    for checkpoint in incomplete_checkpoints(folder):
        shutil.rmtree(checkpoint, ignore_errors=True)  # or save_total_limit would count it
    if finished is not None:
        return finished
    for callback in (ProgressCallback, PrinterCallback):
        trainer.remove_callback(callback)
    trainer.add_callback(_ProgressBar(bar))
    # A checkpoint without the optimizer's state cannot be resumed from.
    last = None if args.save_only_model else last_complete_checkpoint(folder)
    _train(trainer, last)
    return _finish(trainer, folder, timer)


def _train(trainer: ObjectiveTrainer, checkpoint: str | None) -> None:
    try:
        trainer.train(resume_from_checkpoint=checkpoint)
    except _NoStepsLeftError:
        trainer.is_in_train = False
        if trainer.args.load_best_model_at_end and trainer.state.best_model_checkpoint is not None:
            trainer._load_best_model()
    except ValueError as error:  # a kernel has found NaN
        _check_finite(trainer, error)
        raise
    _check_finite(trainer)


def _finish(trainer: ObjectiveTrainer, folder: Path, timer: _StepTimer) -> dict[str, Any]:
    """Evaluate and save the model; `results.json` is written last, because it marks the run as finished."""
    # The trainer's final entry covers only the steps of this process.
    history = [entry for entry in trainer.state.log_history if "train_runtime" not in entry]
    steps = trainer.state.global_step
    results: dict[str, Any] = {"steps": steps, "epoch": trainer.state.epoch} | _training_means(history)
    results["seconds_per_step"] = statistics.median(timer.seconds) if timer.seconds else None
    if trainer.eval_dataset is not None:
        metrics = trainer.evaluate()
        results |= metrics
        history.append(metrics | {"step": steps})
    trainer.save_model(str(folder))
    write_json(folder / LOG_FILE, history)
    write_json(folder / RESULTS_FILE, results)
    return results


def _training_means(history: list[dict[str, Any]]) -> dict[str, float]:
    """Means over all steps of what was logged; each entry covers the steps since the one before it."""
    logged = [entry for entry in history if "loss" in entry]
    widths = [entry["step"] - before for entry, before in zip(logged, [0, *(e["step"] for e in logged)], strict=False)]
    means = {}
    for key in ("loss", "nll", "transport_cost"):  # the last only where numbers were, for a cost of numbers
        parts = [(entry[key], width) for entry, width in zip(logged, widths, strict=True) if key in entry]
        if parts:
            means[f"train_{key}"] = sum(value * width for value, width in parts) / sum(width for _, width in parts)
    return means


def _check_finite(trainer: ObjectiveTrainer, cause: Exception | None = None) -> None:
    """Raise DivergenceError unless the model's predictions are finite (finite weights can be too large)."""
    rows: Any = trainer.train_dataset
    inputs = {"input_ids": rows[0]["input_ids"].unsqueeze(0).to(trainer.args.device)}
    if is_encoder_decoder(trainer.model):
        inputs["decoder_input_ids"] = inputs["input_ids"]
    with torch.no_grad():
        logits = trainer.model(**inputs).logits
    if not logits.isfinite().all():
        raise _diverged(trainer.state.global_step, "the predictions are NaN or infinite") from cause


def _diverged(step: int, what: str) -> DivergenceError:
    return DivergenceError(
        f"training diverged by step {step}: {what}; lower the learning rate, warm up longer, or clip gradients harder."
    )


class _Monitor(TrainerCallback):
    """Log before every checkpoint and at the end, and stop a diverged or finished run.

    With a log at each checkpoint a resumed run has the same log entries as an uninterrupted one, and no diverged
    checkpoint is kept, because divergence is detected in the log.
    """

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        # Resumed from the checkpoint of the last step, the Trainer would take one more step.
        if state.global_step >= state.max_steps:
            raise _NoStepsLeftError

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if control.should_save or state.global_step >= state.max_steps:
            control.should_log = True

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if control.should_save:
            control.should_log = True

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float] | None = None, **kwargs: Any) -> None:
        for key in ("nll", "transport_cost", "eval_nll"):
            value = (logs or {}).get(key, 0.0)
            if not abs(value) < float("inf"):
                raise _diverged(state.global_step, f"{key} is {value}")


class _StepTimer(TrainerCallback):
    """Wall time of each optimizer step, without saving and evaluation."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self._started = 0.0

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._started = time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.seconds.append(time.perf_counter() - self._started)


class _ProgressBar(TrainerCallback):
    """One tqdm bar per run, with the last logged nll and transport cost."""

    def __init__(self, label: str) -> None:
        self.label = label
        self._bar: Any = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        from tqdm import tqdm

        hidden = args.disable_tqdm or not state.is_world_process_zero
        self._bar = tqdm(total=state.max_steps, initial=state.global_step, desc=self.label, unit="step",
                         disable=hidden, mininterval=0.5)  # fmt: skip

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._bar.update(1)

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float] | None = None, **kwargs: Any) -> None:
        if self._bar is None or logs is None:  # no steps were left to train
            return
        shown = {key: f"{logs[key]:.3f}" for key in ("nll", "transport_cost") if key in logs}
        self._bar.set_postfix(shown, refresh=False)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._bar.close()
