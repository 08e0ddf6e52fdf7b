"""The parser of a command's options: `transformers.HfArgumentParser` whose help shows the common training arguments."""

from __future__ import annotations

import argparse
from dataclasses import fields
from typing import Any, NoReturn

from transformers import HfArgumentParser, TrainingArguments

# The fields of TrainingArguments that --help shows; all of them are options.
SHOWN = {
    "output_dir", "max_steps", "num_train_epochs", "per_device_train_batch_size", "gradient_accumulation_steps",
    "learning_rate", "lr_scheduler_type", "warmup_steps", "weight_decay", "max_grad_norm", "bf16", "fp16",
    "gradient_checkpointing", "use_cpu", "eval_strategy", "eval_steps", "per_device_eval_batch_size", "save_strategy",
    "save_steps", "save_total_limit", "load_best_model_at_end", "metric_for_best_model", "logging_steps", "report_to",
    "seed", "disable_tqdm",
}  # fmt: skip


class OptionParser(HfArgumentParser):
    """`HfArgumentParser` for dataclasses; an invalid option raises ValueError."""

    def __init__(self, kinds: list[Any], *, prog: str) -> None:
        super().__init__(
            kinds, prog=prog, usage="%(prog)s --model_name_or_path MODEL [options]", formatter_class=_Formatter,
            allow_abbrev=False,  # a misspelt option could silently match another
        )  # fmt: skip
        hidden = {field.name for field in fields(TrainingArguments)} - SHOWN
        if any(issubclass(kind, TrainingArguments) for kind in kinds):
            self.epilog = "The other fields of transformers.TrainingArguments are options too; see its documentation."
        for action in self._actions:
            if action.dest in hidden or action.option_strings[0].startswith("--no_"):
                action.help = argparse.SUPPRESS

    def error(self, message: str) -> NoReturn:  # instead of the usage of all options
        raise ValueError(f"{message} (see {self.prog.rpartition(' ')[2]} --help).")


class _Formatter(argparse.ArgumentDefaultsHelpFormatter):
    """Without defaults that say nothing."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        return action.help if action.default in (None, False, []) else super()._get_help_string(action)
