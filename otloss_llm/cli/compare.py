"""`compare`: several objectives and seeds from one start, on text, on questions, or from a known source."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

from otloss_llm.cli.arguments import (
    CompareArguments,
    CompareModelArguments,
    CompareTextArguments,
    ObjectiveTrainingArguments,
    OracleArguments,
)
from otloss_llm.experiments.arms import parse_arm
from otloss_llm.experiments.compare import Comparison, run_comparison
from otloss_llm.experiments.frontier_report import write_frontiers
from otloss_llm.experiments.measuring import Data, QuestionData
from otloss_llm.experiments.oracle import Oracle, run_oracle
from otloss_llm.experiments.report import write_report
from otloss_llm.experiments.scaling import run_scaling, write_scaling
from otloss_llm.models.loading import load_tokenizer, names_encoder_decoder
from otloss_llm.training.folders import check_ours
from otloss_llm.training.loading import load_rows, read_sources


def run(
    model_args: CompareModelArguments,
    text_args: CompareTextArguments,
    compare_args: CompareArguments,
    oracle_args: OracleArguments,
    args: ObjectiveTrainingArguments,
) -> tuple[str, int]:
    """Returns what goes to stdout, and the exit code."""
    if args.world_size > 1:
        raise ValueError(f"compare runs in one process, got {args.world_size}; start it without torchrun.")
    if oracle_args.source is not None:
        return _compare_with_source(model_args, text_args, compare_args, oracle_args, args), 0
    changed = _changed(oracle_args)
    if changed:
        raise ValueError(f"{', '.join(changed)} can be used with --source only; leave it out.")
    if model_args.model_name_or_path is None:
        raise ValueError("there is no model; give --model_name_or_path MODEL, or --source MODEL.")
    comparison = Comparison(
        start=model_args.model_name_or_path,
        dtype=model_args.dtype or "float32",
        arms=[parse_arm(text) for text in compare_args.objectives],
        seeds=compare_args.seeds,
        judge=compare_args.judge,
        num_prompts=compare_args.num_prompts,
        prompt_tokens=compare_args.prompt_tokens,
        samples_per_prompt=compare_args.samples_per_prompt,
        max_new_tokens=compare_args.max_new_tokens,
        batch_size=compare_args.sample_batch_size,
        answer_style=compare_args.answer_style,
        num_questions=compare_args.num_questions,
        metrics=tuple(compare_args.metrics),
    )
    sources = read_sources(text_args)
    if not (compare_args.model_sizes or compare_args.data_fractions):  # those have a folder for each of them
        check_ours(Path(args.output_dir))
    tokenizer = load_tokenizer(model_args.tokenizer_name or model_args.model_name_or_path)
    start = model_args.model_name_or_path
    train, validation, test = load_rows(tokenizer, text_args, sources, encoder_decoder=names_encoder_decoder(start))
    if not test:
        own = "a dataset with a test split" if text_args.dataset_name else f"--test_{sources.kind}"
        raise ValueError(f"there is no test data; give {own} or a --test_fraction above 0.")
    kind_of_data: Any = QuestionData if sources.kind == "questions" else Data
    data: Data | QuestionData = kind_of_data(train, test, validation)
    if compare_args.model_sizes or compare_args.data_fractions:
        return _over_sizes(comparison, data, tokenizer, compare_args, args)
    results = run_comparison(comparison, data, tokenizer, args)
    table = write_report(results, Path(args.output_dir))
    print(f"the report is {Path(args.output_dir) / 'report.md'}", file=sys.stderr)
    return table, 1 if results["failures"] else 0


# The training arguments that decide on the result, which an experiment with a known source has of its own.
_OWN = (
    "max_steps", "num_train_epochs", "per_device_train_batch_size", "gradient_accumulation_steps", "learning_rate",
    "lr_scheduler_type", "warmup_steps", "weight_decay", "max_grad_norm", "seed",
)  # fmt: skip


def _compare_with_source(
    model_args: CompareModelArguments, text_args: CompareTextArguments, compare_args: CompareArguments,
    oracle_args: OracleArguments, args: ObjectiveTrainingArguments,
) -> str:  # fmt: skip
    changed = [
        *_changed(model_args),
        *_changed(text_args),
        *_changed(compare_args, keep=("objectives", "seeds")),
        *(name for name in _changed(args) if name.removeprefix("--") in _OWN),
    ]
    if changed:
        raise ValueError(
            f"{', '.join(changed)} cannot be combined with --source; leave it out. The students' training has options "
            "of its own: --student_steps, --student_batch_size, --student_learning_rate."
        )
    defaults = compare_args.objectives == CompareArguments().objectives
    oracle = Oracle(
        source=str(oracle_args.source),
        arms=Oracle.arms if defaults else tuple(compare_args.objectives),
        seeds=tuple(compare_args.seeds),
        temperatures=tuple(oracle_args.temperatures),
        length=oracle_args.text_length,
        student_layers=oracle_args.student_layers,
        start_steps=oracle_args.start_steps,
        start_batch=oracle_args.start_batch_size,
        start_learning_rate=oracle_args.start_learning_rate,
        steps=oracle_args.student_steps,
        batch=oracle_args.student_batch_size,
        learning_rate=oracle_args.student_learning_rate,
        texts=oracle_args.num_texts,
        start=oracle_args.start,
        train_texts=oracle_args.student_texts,
        lora_rank=oracle_args.student_lora_rank,
    )
    folder = Path(args.output_dir)
    results = run_oracle(oracle, folder, args)
    table = write_frontiers(results, folder)
    print(f"the report is {folder / 'report.md'}", file=sys.stderr)
    return table


def _changed(settings: Any, *, keep: Sequence[str] = ()) -> list[str]:
    """Return the options that differ from their defaults."""
    changed = []
    for one in fields(settings):
        default = one.default_factory() if one.default_factory is not MISSING else one.default
        if one.init and one.name not in keep and getattr(settings, one.name) != default:
            changed.append(f"--{one.name}")
    return changed


def _over_sizes(
    comparison: Comparison, data: Data | QuestionData, tokenizer: Any, compare_args: CompareArguments,
    args: ObjectiveTrainingArguments,
) -> tuple[str, int]:  # fmt: skip
    if isinstance(data, QuestionData):
        raise ValueError("--model_sizes and --data_fractions are for text; leave them out for questions.")
    results = run_scaling(
        comparison, compare_args.model_sizes or [comparison.start], compare_args.data_fractions or [1.0], data,
        tokenizer, args, say=lambda line: print(line, file=sys.stderr, flush=True),
    )  # fmt: skip
    table = write_scaling(results, Path(args.output_dir))
    print(f"the report is {Path(args.output_dir) / 'scaling.md'}", file=sys.stderr)
    return table, 1 if any(one["failures"] for one in results) else 0
