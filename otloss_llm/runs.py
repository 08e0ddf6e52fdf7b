"""Run folders: one training run a folder, which can be killed at any moment and gone on with by the same command.

run.json        the settings, written first; a run with other settings does not enter the folder
checkpoint-N/   of the Hugging Face Trainer; complete once its trainer_state.json is there, which is written last
results.json    written when the run has finished
"""

from __future__ import annotations

import json
import logging
import os
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from transformers import PrinterCallback, ProgressCallback, TrainerCallback, TrainingArguments, default_data_collator
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from otloss.costs import Cost
from otloss_llm.data import PackedBlocks
from otloss_llm.objectives import Objective
from otloss_llm.trainer import ObjectiveTrainer

logger = logging.getLogger(__name__)

SETTINGS_FILE, RESULTS_FILE = "run.json", "results.json"

# Training arguments that change the trained weights; the others (logging, saving, reporting) may change on resume.
_DECISIVE_ARGUMENTS = (
    "num_train_epochs", "max_steps", "per_device_train_batch_size", "gradient_accumulation_steps", "learning_rate",
    "lr_scheduler_type", "warmup_steps", "weight_decay", "adam_beta1", "adam_beta2", "adam_epsilon", "max_grad_norm",
    "optim", "seed", "data_seed", "bf16", "fp16", "neftune_noise_alpha", "world_size", "load_best_model_at_end",
)  # fmt: skip


def write_json(path: Path, content: Any) -> None:
    """Write JSON so that a reader sees the old file or the whole new one, whenever the writer is killed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(f".partial-{os.getpid()}")
    partial.write_text(json.dumps(content, indent=2, sort_keys=True, default=str) + "\n", encoding="utf-8")
    partial.replace(path)


def decisive_settings(args: TrainingArguments) -> dict[str, Any]:
    """The training arguments on which the trained weights depend."""
    values = {name: getattr(args, name, None) for name in _DECISIVE_ARGUMENTS}
    return {
        name: value if isinstance(value, (int, float, type(None))) else str(value) for name, value in values.items()
    }


def open_run(folder: Path, settings: dict[str, Any]) -> dict[str, Any] | None:
    """Enter a run folder: new, or left by the same run. Returns the results if that run has finished, else None.

    Raises:
        ValueError: the folder holds a run with other settings, or files that are no run.
    """
    settings = json.loads(json.dumps(settings, default=str))
    path = folder / SETTINGS_FILE
    if path.is_file():
        before = json.loads(path.read_text(encoding="utf-8"))
        keys = sorted(key for key in before.keys() | settings.keys() if before.get(key) != settings.get(key))
        if keys:
            changes = "; ".join(
                f"{key}: {before.get(key)!r} there, {settings.get(key)!r} asked for" for key in keys[:5]
            )
            raise ValueError(
                f"{folder} holds another run ({changes}{'; ...' if len(keys) > 5 else ''}). "
                "Choose another output folder, or delete that one."
            )
    elif folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(
            f"{folder} exists and holds no run of ours (no {SETTINGS_FILE}); choose a new or empty output folder."
        )
    else:
        write_json(path, settings)
    results = folder / RESULTS_FILE
    return json.loads(results.read_text(encoding="utf-8")) if results.is_file() else None


def last_complete_checkpoint(folder: Path) -> str | None:
    """The newest checkpoint that was written to its end, or None."""
    complete: dict[int, Path] = {}
    for checkpoint in folder.glob(f"{PREFIX_CHECKPOINT_DIR}-*"):
        number = checkpoint.name.rpartition("-")[2]
        try:
            json.loads((checkpoint / "trainer_state.json").read_text(encoding="utf-8"))
        except (OSError, ValueError):
            continue  # killed while writing it: an older one is whole
        if number.isdigit():
            complete[int(number)] = checkpoint
    return str(complete[max(complete)]) if complete else None


def train_run(
    model: Any,
    tokenizer: Any,
    blocks: PackedBlocks,
    *,
    args: TrainingArguments,
    objective: Objective,
    cost: Cost | None,
    validation: PackedBlocks | None = None,
    settings: dict[str, Any],
    impl: str = "auto",
    chunk_size: int | None = None,
    bar: str | None = None,
) -> dict[str, Any]:
    """Train `model` in `args.output_dir`, going on from the last whole checkpoint of a killed run with these settings.

    The model has to be the start of training, also when resuming: an embedding cost is taken from it by the caller.

    Args:
        settings: what identifies the run beside the training arguments (model, text fingerprint, objective).
        bar: label of one quiet progress bar in the place of the trainer's own output.

    Returns:
        The results, also found in `results.json`: metrics, steps, and `seconds_per_step` (median of this process).

    Raises:
        ValueError: the folder holds another run.
    """
    folder = Path(args.output_dir)
    with args.main_process_first(desc="open the run folder"):
        finished = open_run(folder, settings | decisive_settings(args))
    if finished is not None:
        logger.warning("%s holds this very run, finished: nothing is trained again", folder)
        return finished
    timer = _StepTimer()
    trainer = ObjectiveTrainer(
        model, args, objective=objective, cost=cost, impl=impl, chunk_size=chunk_size,
        train_dataset=blocks, eval_dataset=validation, processing_class=tokenizer, callbacks=[timer],
        data_collator=default_data_collator,  # blocks are of one length: nothing to pad
    )  # fmt: skip
    if bar is not None:
        for callback in (ProgressCallback, PrinterCallback):
            trainer.remove_callback(callback)
        trainer.add_callback(_QuietBar(bar))
    output = trainer.train(resume_from_checkpoint=last_complete_checkpoint(folder))
    results: dict[str, Any] = dict(output.metrics) | {"steps": output.global_step}
    results["seconds_per_step"] = statistics.median(timer.seconds) if timer.seconds else None
    if validation is not None:
        results |= trainer.evaluate()
    trainer.save_model(str(folder))
    if trainer.is_world_process_zero():
        write_json(folder / "log.json", trainer.state.log_history)
        write_json(folder / RESULTS_FILE, results)
    return results


class _StepTimer(TrainerCallback):
    """Wall time of each optimizer step; saving and evaluating lie between steps and are not counted."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self._started = 0.0

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._started = time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.seconds.append(time.perf_counter() - self._started)


class _QuietBar(TrainerCallback):
    """One tqdm bar a run, with the last logged nll and transport cost behind it."""

    def __init__(self, label: str) -> None:
        self.label = label
        self._bar: Any = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        from tqdm import tqdm

        self._bar = tqdm(total=state.max_steps, initial=state.global_step, desc=self.label, unit="step",
                         disable=not state.is_world_process_zero, mininterval=0.5)  # fmt: skip

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._bar.update(1)

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float] | None = None, **kwargs: Any) -> None:
        shown: Sequence[str] = ("nll", "transport_cost")
        self._bar.set_postfix({key: f"{logs[key]:.3f}" for key in shown if logs and key in logs}, refresh=False)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._bar.close()
