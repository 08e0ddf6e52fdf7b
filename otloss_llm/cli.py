"""The command line: `python -m otloss_llm train | generate | evaluate | compare` (also installed as `otloss-llm`).

Options are those of the dataclasses in `otloss_llm.arguments` and, for train and compare, of the Hugging Face
`TrainingArguments` (fsdp, deepspeed, bf16, report_to, ...). The same command goes on with the folder of a killed run.
What the user can mend ends with a one-line message and exit code 2.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

USAGE = """\
usage: python -m otloss_llm COMMAND [options]     (COMMAND --help lists the options)

  train      train a causal language model on text with an objective: MLE, TaiLr, MixCE, EMO
  generate   sample text from a model
  evaluate   perplexity and mean transport cost of a model on text
  compare    several objectives and seeds from one start: a table, a figure, samples
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if not arguments or arguments[0] in ("-h", "--help"):
        print(USAGE, file=sys.stdout if arguments else sys.stderr)
        return 0 if arguments else 2
    command = _COMMANDS.get(arguments[0])
    if command is None:
        print(f"otloss-llm: error: no command {arguments[0]!r}\n\n{USAGE}", file=sys.stderr)
        return 2
    try:
        command(arguments[1:])
    except ImportError as error:
        missing = getattr(error, "name", None)
        hint = ' (pip install "otloss[llm]")' if missing in ("transformers", "accelerate", "tqdm", "tokenizers") else ""
        print(f"otloss-llm: error: {error}{hint}", file=sys.stderr)
        return 2
    except (ValueError, TypeError, OSError) as error:
        if "--traceback" in arguments:
            raise
        print(f"otloss-llm: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("otloss-llm: interrupted; the same command goes on from the last checkpoint", file=sys.stderr)
        return 130
    return 0


def _parse(command: str, kinds: Sequence[type], arguments: Sequence[str]) -> tuple[Any, ...]:
    from transformers import HfArgumentParser
    from transformers.utils import logging

    logging.set_verbosity_warning()
    parser = HfArgumentParser(kinds, prog=f"python -m otloss_llm {command}")
    given = [argument for argument in arguments if argument != "--traceback"]
    return parser.parse_args_into_dataclasses(args=given)


def _train(arguments: Sequence[str]) -> None:
    from otloss_llm.arguments import ModelArguments, ObjectiveArguments, ObjectiveTrainingArguments, TextArguments
    from otloss_llm.loading import load_blocks, load_cost, load_model_and_tokenizer
    from otloss_llm.objectives import needs_cost, parse_objective
    from otloss_llm.runs import train_run

    kinds = (ModelArguments, TextArguments, ObjectiveArguments, ObjectiveTrainingArguments)
    model_args, text_args, objective_args, args = _parse("train", kinds, arguments)
    objective = parse_objective(objective_args.objective)
    model, tokenizer = load_model_and_tokenizer(model_args.model_name_or_path, model_args.tokenizer_name)
    blocks, validation, _ = load_blocks(
        tokenizer, train=text_args.train_text, validation=text_args.validation_text, test=None,
        block_size=text_args.block_size, validation_fraction=text_args.validation_fraction, test_fraction=0.0,
        text_column=text_args.text_column,
    )  # fmt: skip
    cost = load_cost(objective_args.cost_embedding, model, seed=args.seed)
    settings = {
        "model": model_args.model_name_or_path,
        "objective": repr(objective),
        "cost_embedding": objective_args.cost_embedding if needs_cost(objective) else None,
        "train_blocks": blocks.fingerprint,
        "validation_blocks": None if validation is None else validation.fingerprint,
    }
    results = train_run(
        model, tokenizer, blocks, args=args, objective=objective, cost=cost, validation=validation, settings=settings,
        impl=objective_args.impl, chunk_size=objective_args.chunk_size,
    )  # fmt: skip
    if args.process_index == 0:
        print(json.dumps(results, indent=2, sort_keys=True))
        print(f"model, tokenizer and results are in {args.output_dir}", file=sys.stderr)


def _generate(arguments: Sequence[str]) -> None:
    from otloss_llm.arguments import GenerateArguments, ModelArguments
    from otloss_llm.data import read_texts
    from otloss_llm.evaluation import sample_texts
    from otloss_llm.loading import load_model_and_tokenizer

    model_args, args = _parse("generate", (ModelArguments, GenerateArguments), arguments)
    prompts = list(args.prompt)
    if args.prompts_file:
        texts = read_texts(args.prompts_file)
        whole = args.prompts_file.endswith(".jsonl")  # one prompt per record; of other files, one per line
        prompts += texts if whole else [line for text in texts for line in text.splitlines() if line.strip()]
    _refuse_existing(args.output_file)
    model, tokenizer = load_model_and_tokenizer(model_args.model_name_or_path, model_args.tokenizer_name)
    samples = sample_texts(
        _on_best_device(model), tokenizer, prompts=prompts or None, num_samples=args.num_samples,
        max_new_tokens=args.max_new_tokens, temperature=args.temperature, top_p=args.top_p, top_k=args.top_k,
        batch_size=args.batch_size, seed=args.seed,
    )  # fmt: skip
    if args.output_file:
        lines = [json.dumps(dataclasses.asdict(sample), ensure_ascii=False) for sample in samples]
        Path(args.output_file).write_text("\n".join(lines) + "\n", encoding="utf-8")
        return
    for number, sample in enumerate(samples, 1):
        print(f"--- {number}\n{sample.text}")


def _evaluate(arguments: Sequence[str]) -> None:
    from otloss_llm.arguments import EvaluateArguments, ModelArguments
    from otloss_llm.data import PackedBlocks, read_texts
    from otloss_llm.evaluation import perplexity
    from otloss_llm.loading import load_cost, load_model_and_tokenizer
    from otloss_llm.runs import write_json

    model_args, args = _parse("evaluate", (ModelArguments, EvaluateArguments), arguments)
    _refuse_existing(args.output_file)
    model, tokenizer = load_model_and_tokenizer(model_args.model_name_or_path, model_args.tokenizer_name)
    texts = read_texts(args.text, split=args.split, text_column=args.text_column)
    blocks = PackedBlocks.from_texts(texts, tokenizer, args.block_size)
    model = _on_best_device(model)
    cost = load_cost(args.cost_embedding, model).to(model.device)
    scores = perplexity(model, blocks, batch_size=args.batch_size, cost=cost)
    results = {
        "model": model_args.model_name_or_path,
        "text": args.text,
        "blocks": blocks.fingerprint,
        "cost_embedding": args.cost_embedding,
        "tokens": scores.tokens,
        "nll": scores.nll,
        "perplexity": scores.perplexity,
        "transport_cost": scores.transport_cost,
    }
    print(json.dumps(results, indent=2))
    if args.output_file:
        write_json(Path(args.output_file), results)


def _compare(arguments: Sequence[str]) -> None:
    from otloss_llm.arguments import CompareArguments, ModelArguments, ObjectiveTrainingArguments, TextArguments
    from otloss_llm.compare import Comparison, Data, parse_arm, run_comparison
    from otloss_llm.loading import load_blocks, load_model_and_tokenizer
    from otloss_llm.report import write_report

    kinds = (ModelArguments, TextArguments, CompareArguments, ObjectiveTrainingArguments)
    model_args, text_args, compare_args, args = _parse("compare", kinds, arguments)
    if args.world_size > 1:
        raise ValueError(f"compare runs in one process, not {args.world_size}; start it without torchrun.")
    comparison = Comparison(
        start=model_args.model_name_or_path,
        arms=[parse_arm(text) for text in compare_args.objectives],
        seeds=compare_args.seeds,
        judge=compare_args.judge,
        num_prompts=compare_args.num_prompts,
        prompt_tokens=compare_args.prompt_tokens,
        samples_per_prompt=compare_args.samples_per_prompt,
        max_new_tokens=compare_args.max_new_tokens,
        batch_size=compare_args.sample_batch_size,
    )
    _, tokenizer = load_model_and_tokenizer(model_args.model_name_or_path, model_args.tokenizer_name)
    train, validation, test = load_blocks(
        tokenizer, train=text_args.train_text, validation=text_args.validation_text, test=text_args.test_text,
        block_size=text_args.block_size, validation_fraction=text_args.validation_fraction,
        test_fraction=text_args.test_fraction, text_column=text_args.text_column,
    )  # fmt: skip
    if test is None:
        raise ValueError("there is no test text; give --test_text or a --test_fraction above 0.")
    results = run_comparison(comparison, Data(train, test, validation), tokenizer, args)
    print(write_report(results, Path(args.output_dir)))
    print(f"report, figure and samples are in {args.output_dir}", file=sys.stderr)


def _refuse_existing(path: str | None) -> None:
    if path is not None and Path(path).exists():
        raise ValueError(f"{path} exists already; name another output file, or delete that one.")


def _on_best_device(model: Any) -> Any:
    import torch

    return model.to("cuda") if torch.cuda.is_available() else model


_COMMANDS: dict[str, Callable[[Sequence[str]], None]] = {
    "train": _train,
    "generate": _generate,
    "evaluate": _evaluate,
    "compare": _compare,
}
