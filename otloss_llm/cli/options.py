"""The parser of a command's options: `transformers.HfArgumentParser`, with a help that is short and in groups."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterator
from dataclasses import fields
from typing import Any, NoReturn

from transformers import HfArgumentParser, TrainingArguments

# Title -> options in their order. A command shows those that it has; of TrainingArguments' options only these are
# shown by --help, the others by --help_all.
GROUPS = {
    "model": "model_name_or_path tokenizer_name dtype lora_r lora_alpha lora_dropout lora_target_modules",
    "data": "train_text validation_text test_text text text_column split train_questions validation_questions "
    "test_questions questions train_on_question block_size validation_fraction test_fraction",
    "objective and cost": "objective objectives seeds cost_embedding number_scaling impl chunk_size",
    "training": "max_steps num_train_epochs per_device_train_batch_size gradient_accumulation_steps learning_rate "
    "lr_scheduler_type warmup_steps weight_decay max_grad_norm optim bf16 fp16 activation_checkpointing use_cpu",
    "samples and answers": "prompt prompts_file num_prompts prompt_tokens num_samples samples_per_prompt "
    "max_new_tokens temperature top_p top_k judge answer_style num_questions batch_size sample_batch_size",
    "evaluation and checkpoints": "eval_strategy eval_steps per_device_eval_batch_size save_strategy save_steps "
    "save_total_limit load_best_model_at_end metric_for_best_model logging_steps report_to",
    "output and seed": "output_dir output_file predictions_file seed disable_tqdm",
}
LONGEST_CHOICES = 60  # characters of choices shown beside an option's name by --help


class OptionParser(HfArgumentParser):
    """`HfArgumentParser` for dataclasses, whose `--help` shows common options and `--help_all` the others too."""

    def __init__(self, kinds: list[Any], *, prog: str) -> None:
        # No abbreviations: a misspelt option could silently match another.
        super().__init__(kinds, prog=prog, allow_abbrev=False, formatter_class=argparse.HelpFormatter)
        self.add_argument(
            "--help_all", "--help-all", action=_HelpAll, nargs=0, dest=argparse.SUPPRESS, default=argparse.SUPPRESS,
            help="Show every option.",
        )  # fmt: skip

    def error(self, message: str) -> NoReturn:  # instead of the usage of all options
        raise ValueError(f"{message} (see {self.prog.rpartition(' ')[2]} --help).")

    def format_help(self, *, whole: bool = False) -> str:
        formatter = _Formatter(self.prog, whole=whole)
        formatter.add_usage("%(prog)s --model_name_or_path MODEL [options]", [], [])
        shown = 0
        for title, actions in self._groups(whole):
            formatter.start_section(title)
            formatter.add_arguments(actions)
            formatter.end_section()
            shown += len(actions)
        if left := sum(_is_listed(action) for action in self._actions) - shown:
            formatter.add_text(f"--help_all shows {left} more options of transformers.TrainingArguments.")
        return formatter.format_help()

    def _groups(self, whole: bool) -> Iterator[tuple[str, list[argparse.Action]]]:
        left = {action.dest: action for action in self._actions if _is_listed(action)}
        for title, names in GROUPS.items():
            if actions := [left.pop(name) for name in names.split() if name in left]:
                yield title, actions
        of_trainer = {field.name for field in fields(TrainingArguments)}
        if further := [action for name, action in left.items() if whole or name not in of_trainer]:
            yield "further options", further


def _is_listed(action: argparse.Action) -> bool:
    return action.dest not in ("help", argparse.SUPPRESS) and not action.option_strings[0].startswith("--no_")


class _HelpAll(argparse.Action):
    def __call__(self, parser: Any, *_: Any) -> None:
        parser._print_message(parser.format_help(whole=True), sys.stdout)
        parser.exit()


class _Formatter(argparse.HelpFormatter):
    """One spelling per option, and no empty defaults; unless `whole`, only the first sentence of long texts."""

    def __init__(self, prog: str, *, whole: bool) -> None:
        super().__init__(prog, max_help_position=30)
        self.whole = whole

    def _format_action_invocation(self, action: argparse.Action) -> str:
        name = action.option_strings[0]
        if action.nargs == "?":  # a flag
            return name if action.default is not True else f"--no_{name.removeprefix('--')}"
        values = ",".join(map(str, action.choices or ()))
        if values and (self.whole or len(values) <= LONGEST_CHOICES):
            return f"{name} {{{values}}}"
        return f"{name} {_metavar(action)}" + (" ..." if action.nargs == "+" else "")

    def _get_help_string(self, action: argparse.Action) -> str:
        text = " ".join((action.help or "").split())
        if not self.whole and len(text) > 160:
            text = re.split(r"(?<=[.!?])\s", text, maxsplit=1)[0]
        default = getattr(action.default, "value", action.default)
        if default is None or isinstance(default, bool) or default in ([], "") or "default" in text.lower():
            return text
        return f"{text} Default: {' '.join(map(str, default)) if isinstance(default, list) else default}."


def _metavar(action: argparse.Action) -> str:
    if action.type in (int, float):
        return "N" if action.type is int else "X"
    return action.dest.rpartition("_")[2].upper()
