"""`train`: one model with one objective, in a run folder that resumes."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

from otloss_llm.cli.arguments import (
    LoraArguments,
    ModelArguments,
    ObjectiveArguments,
    ObjectiveTrainingArguments,
    TextArguments,
)
from otloss_llm.costs.choice import NumberSettings, check_settings, number_tokens, settings_of_near_duplicates
from otloss_llm.models.adapters import Lora, add_adapter
from otloss_llm.models.heads import check_decoder_only, is_encoder_decoder
from otloss_llm.models.loading import fingerprint, load_model_and_tokenizer
from otloss_llm.objectives import Sum, parse_objective
from otloss_llm.training.folders import check_ours
from otloss_llm.training.loading import (
    COST_SOURCES,
    load_cost,
    load_rows,
    named_source,
    number_share,
    read_sources,
)
from otloss_llm.training.runs import train_run

NO_EMBEDDING = ("number", "rating")  # kinds of cost that read none


def run(
    model_args: ModelArguments,
    lora_args: LoraArguments,
    text_args: TextArguments,
    objective_args: ObjectiveArguments,
    args: ObjectiveTrainingArguments,
) -> tuple[str, int]:
    """Returns what goes to stdout, and the exit code."""
    objective, source = parse_objective(objective_args.objective), named_source(objective_args.cost_embedding)
    kind, numbers = Sum.of(objective).cost_kind, NumberSettings(scaling=objective_args.number_scaling)
    check_settings(kind, numbers)
    if kind in NO_EMBEDDING and objective_args.cost_embedding is not None:
        raise ValueError(
            f"{objective_args.objective} reads no embedding, got --cost_embedding {objective_args.cost_embedding}; "
            "leave it out, or take emo+number."
        )
    lora = _lora(lora_args)
    sources = read_sources(text_args)
    check_ours(Path(args.output_dir))
    path = model_args.model_name_or_path
    model, tokenizer = load_model_and_tokenizer(path, model_args.tokenizer_name, dtype=model_args.dtype or "float32")
    cost: Any = load_cost(source, model, seed=args.seed, kind=kind, tokenizer=tokenizer, numbers=numbers)
    rows, validation, _ = load_rows(tokenizer, text_args, sources, encoder_decoder=is_encoder_decoder(model))
    settings: dict[str, Any] = {
        "model": path,
        "objective": repr(objective),
        "train_blocks": rows.fingerprint,
        "validation_blocks": None if validation is None else validation.fingerprint,
        "model_fingerprint": fingerprint(model.named_parameters()),
        **_cost_settings(cost, kind, source),
    }
    first = args.process_index == 0
    if kind != "embedding":
        share = number_share(rows, number_tokens(tokenizer, cost.shape[0]).values, objective_args.objective)
        if first:
            _report_numbers(cost, kind, share)
    if lora is not None:
        check_decoder_only(model, "adapters (--lora_r)")
        settings["lora"] = dataclasses.asdict(lora)
        model = add_adapter(model, lora, base=path, seed=args.seed)
    results = train_run(
        model, tokenizer, rows, args=args, objective=objective, cost=cost, validation=validation, settings=settings,
        impl=objective_args.impl, chunk_size=objective_args.chunk_size,
    )  # fmt: skip
    if not first:
        return "", 0
    print(f"{'model' if lora is None else 'adapter'}, tokenizer and results are in {args.output_dir}", file=sys.stderr)
    return json.dumps(results, indent=2, sort_keys=True), 0


def _cost_settings(cost: Any, kind: str, source: str) -> dict[str, Any]:
    """Return what the run folder records about the cost."""
    is_read = kind not in NO_EMBEDDING and source not in COST_SOURCES  # from a file, or another model
    settings = {
        "cost_embedding": source,
        "cost_fingerprint": fingerprint([("unit", getattr(cost, "other", cost).unit)]) if is_read else None,
        **settings_of_near_duplicates(cost),
    }
    return settings if kind == "embedding" else settings | {"numbers": repr(getattr(cost, "numbers", cost))}


def _report_numbers(cost: Any, kind: str, share: str) -> None:
    """Print which tokens the cost takes for numbers, and their share of the rows, to stderr."""
    if kind == "rating":
        print(repr(cost), file=sys.stderr)
    else:
        getattr(cost, "numbers", cost).coverage(file=sys.stderr)
    print(share, file=sys.stderr)


def _lora(asked: LoraArguments) -> Lora | None:
    """Return the settings of an adapter; None to train the whole model."""
    if asked.lora_r is None:
        if any(value is not None for value in (asked.lora_alpha, asked.lora_dropout, asked.lora_target_modules)):
            raise ValueError("lora_alpha, lora_dropout and lora_target_modules need --lora_r, the rank; give it too.")
        return None
    alpha = 2.0 * asked.lora_r if asked.lora_alpha is None else asked.lora_alpha
    return Lora(asked.lora_r, alpha, asked.lora_dropout or 0.0, tuple(asked.lora_target_modules or ("all-linear",)))
