"""`python -m benchmarks paper compare`: arms and seeds from one start, on text or questions, or from a known source."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import redirect_stdout
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

from transformers import HfArgumentParser

from benchmarks.paper.arguments import CompareArguments, OracleArguments, RunArguments
from benchmarks.paper.arms import parse_arm
from benchmarks.paper.compare import Comparison, run_comparison
from benchmarks.paper.data.sources import load_rows, read_sources
from benchmarks.paper.folders import check_ours
from benchmarks.paper.frontier_report import write_frontiers
from benchmarks.paper.measuring import Data, QuestionData
from benchmarks.paper.models import load_tokenizer, names_encoder_decoder
from benchmarks.paper.oracle import Oracle, run_oracle
from benchmarks.paper.report import write_report
from benchmarks.paper.scaling import run_scaling, write_scaling


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit code: 0, 2 after an error the user can fix, 1 after a failed comparison."""
    parser = HfArgumentParser(
        [CompareArguments, OracleArguments, RunArguments], prog="python -m benchmarks paper compare",
        description=__doc__,
        usage="%(prog)s (--model_name_or_path MODEL | --source MODEL) --output_dir FOLDER [options]",
        allow_abbrev=False,
    )  # fmt: skip
    try:
        parsed = parser.parse_args_into_dataclasses(args=argv, look_for_args_file=False)
        with redirect_stdout(sys.stderr):  # Trainer, tqdm and other libraries print while the command works
            text, code = run(*parsed)
    except (ValueError, OSError) as error:
        print(f"{parser.prog}: error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    print(text, flush=True)
    return code


def run(compare: CompareArguments, oracle: OracleArguments, args: RunArguments) -> tuple[str, int]:
    """Returns what goes to stdout, and the exit code."""
    if args.world_size > 1:
        raise ValueError(f"comparisons run in one process, got {args.world_size}; start them without torchrun.")
    if oracle.source is not None:
        return _compare_with_source(compare, oracle, args), 0
    changed = _changed(oracle)
    if changed:
        raise ValueError(f"{', '.join(changed)} can be used with --source only; leave it out.")
    if compare.model_name_or_path is None:
        raise ValueError("there is no model; give --model_name_or_path MODEL, or --source MODEL.")
    comparison = Comparison(
        start=compare.model_name_or_path,
        dtype=compare.dtype,
        arms=[parse_arm(text) for text in compare.objectives],
        seeds=compare.seeds,
        judge=compare.judge,
        num_prompts=compare.num_prompts,
        prompt_tokens=compare.prompt_tokens,
        samples_per_prompt=compare.samples_per_prompt,
        max_new_tokens=compare.max_new_tokens,
        batch_size=compare.sample_batch_size,
        answer_style=compare.answer_style,
        num_questions=compare.num_questions,
        metrics=tuple(compare.metrics),
    )
    several = bool(compare.model_sizes or compare.data_fractions)  # those have a folder for each of them
    if not several:
        check_ours(Path(args.output_dir))
    tokenizer = load_tokenizer(compare.tokenizer_name or comparison.start)
    data = _data(tokenizer, compare, comparison.start)
    if several:
        return _over_sizes(comparison, data, tokenizer, compare, args)
    results = run_comparison(comparison, data, tokenizer, args)
    table = write_report(results, Path(args.output_dir))
    print(f"the report is {Path(args.output_dir) / 'report.md'}", file=sys.stderr)
    return table, 1 if results["failures"] else 0


def _data(tokenizer: Any, compare: CompareArguments, start: str) -> Data | QuestionData:
    sources = read_sources(compare)
    train, validation, test = load_rows(tokenizer, compare, sources, encoder_decoder=names_encoder_decoder(start))
    if not test:
        raise ValueError(f"there is no test data; give --test_{sources.kind} or a --test_fraction above 0.")
    kind: Any = QuestionData if sources.kind == "questions" else Data
    return kind(train, test, validation)


# The training arguments that decide on the result, which an experiment with a known source has of its own.
_OWN = (
    "max_steps", "num_train_epochs", "per_device_train_batch_size", "gradient_accumulation_steps", "learning_rate",
    "lr_scheduler_type", "warmup_steps", "weight_decay", "max_grad_norm", "seed",
)  # fmt: skip


def _compare_with_source(compare: CompareArguments, asked: OracleArguments, args: RunArguments) -> str:
    changed = [
        *_changed(compare, keep=("objectives", "seeds")),
        *(name for name in _changed(args) if name.removeprefix("--") in _OWN),
    ]
    if changed:
        raise ValueError(
            f"{', '.join(changed)} cannot be combined with --source; leave it out. The students' training has options "
            "of its own: --student_steps, --student_batch_size, --student_learning_rate."
        )
    defaults = compare.objectives == CompareArguments().objectives
    oracle = Oracle(
        source=str(asked.source),
        arms=Oracle.arms if defaults else tuple(compare.objectives),
        seeds=tuple(compare.seeds),
        temperatures=tuple(asked.temperatures),
        length=asked.text_length,
        student_layers=asked.student_layers,
        start_steps=asked.start_steps,
        start_batch=asked.start_batch_size,
        start_learning_rate=asked.start_learning_rate,
        steps=asked.student_steps,
        batch=asked.student_batch_size,
        learning_rate=asked.student_learning_rate,
        texts=asked.num_texts,
        start=asked.start,
        train_texts=asked.student_texts,
        lora_rank=asked.student_lora_rank,
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
    comparison: Comparison, data: Data | QuestionData, tokenizer: Any, compare: CompareArguments, args: RunArguments
) -> tuple[str, int]:
    if isinstance(data, QuestionData):
        raise ValueError("--model_sizes and --data_fractions are for text; leave them out for questions.")
    results = run_scaling(
        comparison, compare.model_sizes or [comparison.start], compare.data_fractions or [1.0], data, tokenizer, args,
        say=lambda line: print(line, file=sys.stderr, flush=True),
    )  # fmt: skip
    table = write_scaling(results, Path(args.output_dir))
    print(f"the report is {Path(args.output_dir) / 'scaling.md'}", file=sys.stderr)
    return table, 1 if any(one["failures"] for one in results) else 0
