"""`train`: one run in one folder; the same command resumes it."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from otloss._checks import NotFiniteError
from otloss_llm.cli.guard import (
    SETTINGS_FILE,
    FinishedError,
    RunGuard,
    check_same_run,
    diverged,
    fingerprint,
    last_checkpoint,
    only_run_in,
    open_folder,
    tokenizer_fingerprint,
    writing_to,
)
from otloss_llm.cli.numbers import report_numbers
from otloss_llm.cli.rows import checked_split, digest, load_splits, naming_rows
from otloss_llm.cli.settings import ModelArguments, Request, parse
from otloss_llm.cli.trainer import build_trainer, load_model
from otloss_llm.training.token_means import EVALUATED

logger = logging.getLogger(__name__)


def parse_request(arguments: Sequence[str]) -> Request:
    return parse("train", arguments)


def run(request: Request) -> str:
    """Train, save the model, and return the results as JSON."""
    args, script = request.args, request.script
    _check_best_metric(args.metric_for_best_model)
    _check_adapter(request.model)
    columns = {"text_field": args.dataset_text_field}
    splits = load_splits(script, request.mixture, seed=args.seed, **columns)
    rows = checked_split(splits, script.dataset_train_split, "name one with --dataset_train_split", **columns)
    evaluation = None
    if args.eval_strategy != "no":
        fix = "name one with --dataset_test_split, or cut one off with --test_split_size 0.05"
        evaluation = checked_split(splits, script.dataset_test_split, fix, **columns)
    model, tokenizer = load_model(request)
    if hasattr(model, "peft_config"):
        raise ValueError(
            f"{request.model.model_name_or_path!r} is the folder of an adapter, which loads frozen; merge it into its "
            "base model (merge_and_unload) and save that, then train it."
        )
    settings = request.settings() | {"rows": digest(rows), "model": fingerprint(model.named_parameters())}
    with ExitStack() as contexts:
        contexts.enter_context(writing_to(Path(args.output_dir)))
        trainer = build_trainer(request, model, tokenizer, rows, evaluation, callbacks=[RunGuard()])
        settings["tokenizer"] = tokenizer_fingerprint(trainer.processing_class)
        report_numbers(trainer, request.objective.objective)
        if not hasattr(trainer.train_dataset, "__len__"):
            trainer.train_dataset = _endless(trainer.train_dataset, args)
        with args.main_process_first(desc="open the output folder"):
            if args.process_index == 0:
                contexts.enter_context(only_run_in(Path(args.output_dir)))
                _open(Path(args.output_dir), args.resume_from_checkpoint, settings)
        with naming_rows(rows, evaluation, args=trainer.args):  # rows of a stream are prepared in the training
            _train(trainer)
        trainer.save_model(args.output_dir)
        trainer.save_state()
        results = _results(trainer)
        if args.push_to_hub:
            trainer.push_to_hub(dataset_name=script.dataset_name)
        trainer.end()  # trackers, and the group of processes
    print(f"the model is in {args.output_dir}", file=sys.stderr)
    return json.dumps(results, indent=2, sort_keys=True) if trainer.is_world_process_zero() else ""


def _endless(rows: Any, args: Any) -> Any:
    """Return a stream that begins again where it ends, with the rows in the same order.

    At the end of a stream the trainer keeps the gradients of batches that do not fill a step, and adds them to the next
    one; and a resumed run skips as many batches of the first pass as all passes had.
    """
    if "epoch" in (args.logging_strategy, args.eval_strategy, args.save_strategy):
        logger.warning("a stream has one epoch, of --max_steps; log, evaluate and save by steps to do so more often.")
    return rows.repeat(None)


def _open(folder: Path, checkpoint: str | None, settings: dict[str, Any]) -> None:
    if checkpoint:
        advice = "leave it out, and the same command resumes from the newest checkpoint of --output_dir"
        if not Path(checkpoint).is_dir():
            raise ValueError(
                f"--resume_from_checkpoint is {checkpoint!r}, which is no folder; give a checkpoint, or {advice}."
            )
        if (Path(checkpoint) / SETTINGS_FILE).is_file():  # it has weights, and no state of the optimizer
            raise ValueError(
                f"--resume_from_checkpoint is {checkpoint!r}, the folder of a run; give one of its checkpoints, or the "
                "folder as --output_dir alone."
            )
        fix = "resume with its settings, or start from its weights with --model_name_or_path"
        check_same_run(Path(checkpoint).parent, settings, fix)
    open_folder(folder, settings)


def _check_best_metric(metric: str | None) -> None:
    """Raise ValueError for a metric that no evaluation has; whether the model has it, its first batch shows."""
    if metric is not None and metric.removeprefix("eval_") not in EVALUATED:
        near = get_close_matches(metric.removeprefix("eval_"), EVALUATED, n=1) or ["loss"]
        raise ValueError(f"--metric_for_best_model is {metric!r}, which no evaluation has; take {near[0]}, or nll.")


def _check_adapter(model: Any) -> None:
    """Raise ValueError for settings of an adapter without `use_peft`: all weights would be trained."""
    default: Any = ModelArguments(model_name_or_path=model.model_name_or_path)
    names = [name for name in vars(model) if name.startswith("lora_") or name in ("use_rslora", "use_dora")]
    options = [f"--{name}" for name in names if getattr(model, name) != getattr(default, name)]
    if options and not model.use_peft:
        raise ValueError(
            f"{', '.join(options)} given without --use_peft, so that all weights would be trained; add --use_peft, or "
            "leave the settings of an adapter out."
        )


def _train(trainer: Any) -> None:
    args = trainer.args
    is_sized = hasattr(trainer.train_dataset, "__len__")
    batch = args.train_batch_size * (1 if args.accelerator_config.split_batches else args.world_size)
    if args.dataloader_drop_last and is_sized and len(trainer.train_dataset) < batch:
        raise ValueError(
            "no step can be taken: the rows do not fill one batch; lower --per_device_train_batch_size, or leave "
            "--dataloader_drop_last out."
        )
    newest = None if args.save_only_model else last_checkpoint(Path(args.output_dir))
    checkpoint = args.resume_from_checkpoint or newest
    try:
        trainer.train(resume_from_checkpoint=checkpoint)
    except FinishedError:
        trainer.is_in_train = False
        if trainer.args.load_best_model_at_end and trainer.state.best_model_checkpoint is not None:
            trainer._load_best_model()
    except NotFiniteError as error:  # raised by the loss
        if trainer.state.global_step > 0:
            raise diverged(trainer.state.global_step, "the model's output is NaN or infinite") from error
        raise
    if args.enable_jit_checkpoint and trainer.state.global_step < trainer.state.max_steps:
        raise KeyboardInterrupt  # After SIGTERM the trainer saves a checkpoint, and returns as at the end of a run.


def _results(trainer: Any) -> dict[str, Any]:
    """The last log of the training, and the evaluation where there are rows for it."""
    last: dict[str, Any] = next((entry for entry in reversed(trainer.state.log_history) if "nll" in entry), {})
    results = {name: last[name] for name in ("loss", "nll", "transport_cost") if name in last}
    results |= trainer.evaluate() if trainer.eval_dataset is not None else {}
    return {"steps": trainer.state.global_step} | results
