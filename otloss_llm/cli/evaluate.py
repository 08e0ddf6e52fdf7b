"""`evaluate`: perplexity, transport cost and calibration of a model on rows, and MAUVE of what it writes."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import GenerationConfig
from trl import ScriptArguments

from otloss_llm.cli.rows import checked_split, load_splits, naming_rows
from otloss_llm.cli.settings import Request, parse
from otloss_llm.cli.trainer import build_trainer, load_model
from otloss_llm.costs.tokenizer_numbers import tokenizer_of
from otloss_llm.evaluation.perplexity import context_length
from otloss_llm.losses.positions import IGNORE_INDEX

CONFIDENCE_BINS = 15
MAUVE_ROWS = 1000
MEASURES = ("loss", "nll", "perplexity", "transport_cost", "entropy", "accuracy", "calibration_error", "aux_loss",
            "rows", "tokens")  # fmt: skip


@dataclass
class EvaluateArguments:
    """What is measured beside the loss."""

    mauve_model: str | None = field(
        default=None,
        metadata={"help": "Also print MAUVE of sampled continuations, with features of this GPT-2 or BERT (gpt2-large "
                  "in the literature), by the package mauve-text."},
    )  # fmt: skip
    mauve_rows: int | None = field(
        default=None, metadata={"help": f"Rows that are continued for MAUVE, the first ones. Default: {MAUVE_ROWS}."}
    )

    def __post_init__(self) -> None:
        if self.mauve_rows is not None and self.mauve_model is None:
            raise ValueError("--mauve_rows was given without --mauve_model; leave it out, or name a model.")


def parse_request(arguments: Sequence[str]) -> Request:
    return parse("evaluate", arguments, EvaluateArguments)


def run(request: Request) -> str:
    """Return the measures as JSON: of the test split, or of the only one."""
    script, (extra,) = request.script, request.own
    mauve = None if extra.mauve_model is None else _import_mauve()
    columns = {"text_field": request.args.dataset_text_field}
    splits = load_splits(script, request.mixture, seed=request.args.seed, **columns)
    name = script.dataset_test_split
    if len(splits) == 1 and name == ScriptArguments.dataset_test_split:  # none was named
        name = next(iter(splits))
    rows = checked_split(splits, name, "name one with --dataset_test_split", **columns)
    with TemporaryDirectory() as folder:
        request = without_training(request, folder)
        model, tokenizer = load_model(request)
        trainer = build_trainer(
            request, model, tokenizer, rows, None, compute_metrics=calibration,
            preprocess_logits_for_metrics=confidences,
        )  # fmt: skip
        trainer.eval_dataset = trainer.train_dataset  # tokenised once
        with naming_rows(rows, args=trainer.args):
            evaluated = trainer.evaluate()
    measures = {name: evaluated[f"eval_{name}"] for name in MEASURES if f"eval_{name}" in evaluated}
    if trainer.padding_free or trainer.args.packing:
        del measures["rows"]  # what was counted is batches or blocks
    if mauve is not None:
        texts, references = continuations(trainer, extra.mauve_rows or MAUVE_ROWS)
        device = torch.cuda.current_device() if trainer.args.device.type == "cuda" else -1
        measures["mauve"] = float(mauve.compute_mauve(
            p_text=references, q_text=texts, featurize_model_name=extra.mauve_model, device_id=device
        ).mauve)  # fmt: skip
    return json.dumps(measures, indent=2, sort_keys=True) if trainer.is_world_process_zero() else ""


def without_training(request: Request, folder: str) -> Request:
    """Return the request without options of a training that has the same ones, in a folder of its own."""
    args: Any = request.args  # the fields of TRL's classes have no types
    model: Any = request.model
    args = replace(
        args, output_dir=folder, eval_strategy="no", save_strategy="no", load_best_model_at_end=False,
        lr_scheduler_type="constant", push_to_hub=False, max_steps=1,  # a stream needs a number of steps
        eval_do_concat_batches=True, batch_eval_metrics=False,  # calibration is measured over all tokens
        dataloader_drop_last=False, prediction_loss_only=False,
    )  # fmt: skip
    # The adapter of a folder comes with it; a new one would take its place.
    return request._replace(args=args, model=replace(model, use_peft=False))


def _import_mauve() -> Any:
    try:
        import mauve
    except ImportError as error:
        raise ImportError("--mauve_model needs the package mauve-text: pip install mauve-text") from error
    return mauve


def confidences(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the largest probability at each position and its token: what calibration needs of the logits."""
    return torch.stack(logits.float().softmax(-1).max(-1), dim=-1)


def calibration(evaluated: Any) -> dict[str, float]:
    """Return the accuracy of the most probable tokens, their expected calibration error, and what was measured.

    The error is the mean over tokens of |accuracy - mean confidence| in bins of equal width of the confidence.
    """
    labels = evaluated.label_ids[:, 1:]
    valid = labels != IGNORE_INDEX
    if not valid.any():
        return {}  # the evaluation raises
    confidence, token = np.moveaxis(evaluated.predictions[:, :-1][valid], -1, 0)
    correct = token == labels[valid]
    bins = np.minimum((confidence * CONFIDENCE_BINS).astype(int), CONFIDENCE_BINS - 1)
    errors = np.bincount(bins, weights=correct - confidence.astype(np.float64), minlength=CONFIDENCE_BINS)
    error = float(np.abs(errors).sum() / len(bins))
    counts = {"rows": len(labels), "tokens": len(bins)}
    return {"accuracy": float(correct.mean()), "calibration_error": error} | counts


def continuations(trainer: Any, count: int) -> tuple[list[str], list[str]]:
    """Sample from the model's distribution what follows the prompts of rows, or the first half of text.

    Returns the samples, as long as what follows in the data or shorter, and what follows in the data.
    """
    model, tokenizer, texts, references = trainer.model, tokenizer_of(trainer.processing_class), [], []
    tokenizer.padding_side = "left"
    torch.manual_seed(trainer.args.seed)
    ends = _end_ids(model, tokenizer)
    ids = {"eos_token_id": sorted(ends) or None, "pad_token_id": tokenizer.pad_token_id}
    # The model's own settings may penalise or cut tokens, and `generate` adds them to settings that are passed.
    model.generation_config = GenerationConfig(do_sample=True, temperature=1.0, top_k=0, top_p=1.0, **ids)
    context = context_length(model)
    size = trainer.args.per_device_eval_batch_size
    for prompts, endings in _batches(trainer.train_dataset.take(count), ends, size, context):
        inputs = tokenizer.pad({"input_ids": prompts}, return_tensors="pt").to(model.device)
        out = model.generate(**inputs, max_new_tokens=_longest(endings))[:, inputs["input_ids"].shape[1] :]
        cut = [new[: len(ending)] for new, ending in zip(out.tolist(), endings, strict=True)]
        texts += tokenizer.batch_decode(cut, skip_special_tokens=True)
        references += tokenizer.batch_decode(endings, skip_special_tokens=True)
    return texts, references


def _end_ids(model: Any, tokenizer: Any) -> set[int]:
    """Return the ids that end a text: the tokenizer's end, and special ones of the model.

    The end of a config's defaults (2 for Llama) may be an ordinary token of another tokenizer.
    """
    of_model = model.generation_config.eos_token_id
    special = {token for token, kind in tokenizer.added_tokens_decoder.items() if kind.special}
    own = set(of_model if isinstance(of_model, list) else [of_model]) & special
    return own | ({tokenizer.eos_token_id} - {None})


def _batches(
    rows: Any, ends: set[int], size: int, context: int | None
) -> Iterator[tuple[list[list[int]], list[list[int]]]]:
    """Yield prompts and endings, where the longest ending fits the context behind the longest prompt."""
    prompts: list[list[int]] = []
    endings: list[list[int]] = []
    for row in rows:
        prompt, ending = _prompt_and_ending(row, ends)
        if not ending:  # of an empty text, or without an answer
            continue
        length = _longest([*prompts, prompt]) + _longest([*endings, ending])
        is_too_long = context is not None and length > context
        if prompts and (len(prompts) == size or is_too_long):
            yield prompts, endings
            prompts, endings = [], []
        prompts.append(prompt)
        endings.append(ending)
    if prompts:
        yield prompts, endings


def _longest(rows: list[list[int]]) -> int:
    return max(map(len, rows))


def _prompt_and_ending(row: dict[str, list[int]], ends: set[int]) -> tuple[list[int], list[int]]:
    """Return the tokens in front of the first answer and its own; the halves of a row with labels from its beginning.

    What stands behind the answer's end, as other turns or rows of a block, is not what a model writes before it stops.
    """
    tokens, is_label = row["input_ids"], [label != IGNORE_INDEX for label in row["labels"]]
    if True not in is_label:
        return tokens, []
    first = is_label.index(True)
    stop = next((i for i in range(first, len(tokens)) if not is_label[i]), len(tokens))
    start = first or max(1, stop // 2)
    stop = next((i + 1 for i in range(start, stop) if tokens[i] in ends), stop)
    return tokens[:start], tokens[start:stop]
