"""A model's answers to questions, and its distribution over the right ones, at numbers above all.

At a position whose label is a number token of value y, with q the model's distribution over the vocabulary, v the
values of the number tokens, m = sum_j q_j their mass and p_j = q_j / m:

    right: v at the largest q is y        error = sum_j p_j |v_j - y|        log error = sum_j p_j |s(v_j) - s(y)|

with s(v) = sign(v) log(1 + |v|), in which one token of a huge value does not dominate.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from benchmarks.paper.data.blocks import PackedBlocks
from benchmarks.paper.data.questions import (
    SEPARATOR,
    AnsweredQuestions,
    Question,
    count_labels,
    pad_questions,
    prompt_text,
)
from benchmarks.paper.evaluation.likelihood import tempered
from benchmarks.paper.evaluation.sampling import sample_texts
from otloss._checks import check_count
from otloss.losses.number_line import checked_values, signed_log
from otloss_llm.costs.choice import number_values
from otloss_llm.evaluation.perplexity import check_fit, check_temperature
from otloss_llm.losses.positions import IGNORE_INDEX
from otloss_llm.losses.token_loss import token_loss
from otloss_llm.models.decoder_inputs import with_decoder_inputs
from otloss_llm.models.heads import evaluation_mode, find_head, is_encoder_decoder
from otloss_llm.objectives import MLE

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

ROWS = 512  # scored at a time, in float64 over the whole vocabulary


def answer_questions(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    questions: Sequence[Question],
    *,
    max_new_tokens: int,
    batch_size: int = 32,
    separator: str = SEPARATOR,
    progress: bool = True,
) -> list[str]:
    """Return the model's answers, decoded greedily, in the order of the questions; without special tokens.

    The prompts are the beginnings of `AnsweredQuestions` rows with the same separator; an encoder-decoder reads the
    question alone. The model runs in eval mode, and
    its mode is restored.

    Raises ValueError if there is no question, a setting is below 1, or a question and `max_new_tokens` exceed the
    model's context.
    """
    if not questions:
        raise ValueError("questions is an empty list; give at least one question.")
    both = is_encoder_decoder(model)
    prompts = [question.question if both else prompt_text(question, separator) for question in questions]
    # Sorted by length: less padding, and short questions mostly have short answers.
    order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
    samples = sample_texts(
        model, tokenizer, prompts=[prompts[i] for i in order], max_new_tokens=max_new_tokens, temperature=0.0,
        batch_size=batch_size, progress=progress,
    )  # fmt: skip
    answers = [""] * len(prompts)
    for i, sample in zip(order, samples, strict=True):
        answers[i] = sample.continuation
    return answers


def answer_nll(
    model: PreTrainedModel, data: AnsweredQuestions, *, batch_size: int = 8, progress: bool = True
) -> tuple[float, int]:
    """Return nats per label of the right answers, under teacher forcing, and the number of these labels."""
    check_count("batch_size", batch_size)
    nll, count = 0.0, 0
    with evaluation_mode(model):
        for batch in _batches(model, data, batch_size, progress):
            labels, logits = _label_logits(model, batch)
            scores = token_loss(logits, labels.to(logits.device), objective=MLE(), ignore_index=IGNORE_INDEX)
            nll += float(scores.nll.sum(dtype=torch.float64))
            count += int((labels != IGNORE_INDEX).sum())
    return nll / count, count


@dataclass(frozen=True)
class NumberTokenScores:
    """Means over the labels that are numbers, under teacher forcing; `tokens` is their number.

    `accuracy` counts a most probable token of equal value as right. `expected_absolute_error` and `expected_log_error`
    are under the model's distribution among number tokens, `number_mass` is its probability of number tokens.
    """

    tokens: int
    accuracy: float
    expected_absolute_error: float
    expected_log_error: float
    number_mass: float


def number_token_scores(
    model: PreTrainedModel,
    data: AnsweredQuestions | PackedBlocks,
    values: Float[Tensor, " vocab"],
    *,
    batch_size: int = 8,
    temperature: float = 1.0,
    progress: bool = True,
) -> NumberTokenScores:
    """Return scores of a model's distribution at every label that is a number token, given the true tokens before it.

    `values` holds the value of each token of the model's vocabulary, NaN for tokens that are no numbers. Ignored labels
    and the first token of a row are left out. `temperature` belongs to the scored distribution. The model runs in eval
    mode, and its mode is restored.

    Raises ValueError if the temperature is not positive, the values do not fit the model's head, hold no number or an
    infinite one, no label is a number, a row exceeds the model's context, or an id lies outside its vocabulary.
    """
    check_count("batch_size", batch_size)
    check_temperature(temperature)
    vocabulary = find_head(model).weight.shape[0]
    if len(checked_values(values)) != vocabulary:
        raise ValueError(
            f"values are {len(values)}, the model's head has {vocabulary} rows; give one value per row, NaN for rows "
            "that are padding."
        )
    values = values.detach().double().to(model.device)
    sums = torch.zeros(4, dtype=torch.float64)
    tokens = 0
    with evaluation_mode(model):
        for batch in _batches(model, data, batch_size, progress):
            labels, logits = _label_logits(model, batch)
            due = (labels != IGNORE_INDEX) & ~values[labels.clamp(min=0)].isnan()
            if due.any():
                logits = tempered(logits[due.to(logits.device)], temperature)
                rows, targets = logits.split(ROWS), values[labels[due]].split(ROWS)
                sums += sum(_score(*pair, values=values).cpu() for pair in zip(rows, targets, strict=True))
                tokens += int(due.sum())
    if tokens == 0:
        raise ValueError(
            f"none of the labels of the {len(data)} rows is a number; check the values against the tokens."
        )
    return NumberTokenScores(tokens, *(sums / tokens).tolist())


def score_number_labels(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    data: AnsweredQuestions | PackedBlocks,
    *,
    batch_size: int = 8,
    temperature: float = 1.0,
    progress: bool = True,
) -> NumberTokenScores | None:
    """`number_token_scores` with the values of the decoded tokens; None if no label is a number.

    Tokens beyond the model's head and rows of the head beyond the tokenizer are no numbers. Raises ValueError as
    `number_token_scores` does otherwise.
    """
    values = number_values(tokenizer, find_head(model).weight.shape[0])
    if values is None or count_labels(data, ~values.isnan())[0] == 0:
        return None
    return number_token_scores(model, data, values, batch_size=batch_size, temperature=temperature, progress=progress)


def _score(
    logits: Float[Tensor, "tokens vocab"], target: Float[Tensor, " tokens"], *, values: Float[Tensor, " vocab"]
) -> Float[Tensor, "4"]:
    """Return sums over tokens of the fields of `NumberTokenScores`."""
    logits = logits.to(values.device).float()
    columns = (~values.isnan()).nonzero().squeeze(-1)
    among = logits[:, columns].double()  # (tokens, numbers)
    share = among.softmax(dim=-1)
    mass = (among.logsumexp(dim=-1) - logits.double().logsumexp(dim=-1)).exp()
    y, v = target.unsqueeze(-1), values[columns]
    error = (share * (v - y).abs()).sum(dim=-1)
    log_error = (share * (signed_log(v) - signed_log(y)).abs()).sum(dim=-1)
    right = (values[logits.argmax(dim=-1)] == target).double()
    return torch.stack([right, error, log_error, mass]).sum(dim=-1)


def _batches(
    model: Any, data: AnsweredQuestions | PackedBlocks, batch_size: int, progress: bool
) -> Iterator[dict[str, Int[Tensor, "batch longest"]]]:
    """Return padded batches on the model's device, rows of like length together."""
    from tqdm import tqdm

    if not len(data):
        raise ValueError("there are no rows to score; give at least one.")
    check_fit(model, data.longest, *data.id_range)
    items = sorted((data[i] for i in range(len(data))), key=lambda item: len(item["input_ids"]))
    for start in tqdm(range(0, len(items), batch_size), desc="numbers", disable=not progress, delay=2.0, leave=False):
        rows = [
            item | {"attention_mask": torch.ones_like(item["input_ids"])} for item in items[start : start + batch_size]
        ]
        yield {key: tensor.to(model.device) for key, tensor in pad_questions(rows).items()}


def _label_logits(model: Any, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Return the labels of a batch of rows with answers, and the logits of the positions that predict them."""
    inputs, labels = {key: batch[key] for key in ("input_ids", "attention_mask")}, batch["labels"]
    logits = model(**with_decoder_inputs(model, inputs, labels), use_cache=False).logits
    return (labels, logits) if is_encoder_decoder(model) else (labels[:, 1:], logits[:, :-1])
