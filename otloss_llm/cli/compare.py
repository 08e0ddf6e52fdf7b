"""`compare`: several objectives and seeds from one start."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from otloss_llm.cli.arguments import CompareArguments, CompareTextArguments, ModelArguments, ObjectiveTrainingArguments
from otloss_llm.experiments.arms import parse_arm
from otloss_llm.experiments.compare import Comparison, run_comparison
from otloss_llm.experiments.measuring import Data, QuestionData
from otloss_llm.experiments.report import write_report
from otloss_llm.models.loading import load_tokenizer
from otloss_llm.training.loading import load_rows, read_sources


def run(
    model_args: ModelArguments,
    text_args: CompareTextArguments,
    compare_args: CompareArguments,
    args: ObjectiveTrainingArguments,
) -> tuple[str, int]:
    """Returns what goes to stdout, and the exit code."""
    if args.world_size > 1:
        raise ValueError(f"compare runs in one process, got {args.world_size}; start it without torchrun.")
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
    documents = read_sources(text_args)
    tokenizer = load_tokenizer(model_args.tokenizer_name or model_args.model_name_or_path)
    train, validation, test = load_rows(tokenizer, text_args, documents)
    if not test:
        kind = "text" if documents is not None else "questions"
        raise ValueError(f"there is no test data; give --test_{kind} or a --test_fraction above 0.")
    kind_of_data: Any = QuestionData if documents is None else Data
    data: Data | QuestionData = kind_of_data(train, test, validation)
    results = run_comparison(comparison, data, tokenizer, args)
    table = write_report(results, Path(args.output_dir))
    print(f"the report is {Path(args.output_dir) / 'report.md'}", file=sys.stderr)
    return table, 1 if results["failures"] else 0
