"""`generate`: sampled continuations of prompts."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

from otloss_llm.cli.arguments import GenerateArguments, UsedModelArguments
from otloss_llm.data.text import read_texts
from otloss_llm.evaluation import sampling
from otloss_llm.models.loading import load_model_and_tokenizer
from otloss_llm.training.folders import write_text


def run(model_args: UsedModelArguments, args: GenerateArguments) -> tuple[str, int]:
    """Returns what goes to stdout, and the exit code."""
    prompts = list(args.prompt)
    if args.prompts_file:
        texts = read_texts(args.prompts_file)
        per_record = args.prompts_file.endswith(".jsonl")  # of other files, one prompt per line
        prompts += texts if per_record else [line for text in texts for line in text.splitlines() if line.strip()]
    model, tokenizer = load_model_and_tokenizer(
        model_args.model_name_or_path, model_args.tokenizer_name, dtype=model_args.dtype or "auto"
    )
    samples = sampling.sample_texts(
        model.to(model_args.device), tokenizer, prompts=prompts or None,
        num_samples=args.num_samples, max_new_tokens=args.max_new_tokens, temperature=args.temperature,
        top_p=args.top_p, top_k=args.top_k, batch_size=args.batch_size, seed=args.seed,
    )  # fmt: skip
    if args.output_file:
        lines = [json.dumps(dataclasses.asdict(sample), ensure_ascii=False) + "\n" for sample in samples]
        write_text(Path(args.output_file), "".join(lines))
        return "", 0
    return "\n".join(f"--- {number}\n{sample.text}" for number, sample in enumerate(samples, 1)), 0
