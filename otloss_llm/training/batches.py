"""Batches as the trainers of transformers make and hand them over: labels and their weights, collators, text."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.data import Subset
from transformers import default_data_collator

from otloss_llm.data.blocks import PackedBlocks
from otloss_llm.data.hugging_face import is_untokenised, tokenised
from otloss_llm.data.questions import AnsweredQuestions, pad_questions
from otloss_llm.losses.positions import IGNORE_INDEX

TOKEN_WEIGHT = "token_weight"  # a column of the data set


class Targets(NamedTuple):
    """Of a batch: entry t is the token that position t predicts, and its weight (None: all weigh the same)."""

    labels: Tensor
    token_weight: Tensor | None = None

    @property
    def valid(self) -> Tensor:
        """Which positions are labelled."""
        return self.labels != IGNORE_INDEX

    def counts(self, numbers: Tensor) -> Tensor:
        """How many tokens are predicted, and how many of them are `numbers`; or the sums of their weights."""
        if self.token_weight is None:
            return torch.stack([self.valid.sum(), numbers.sum()])
        weights = self.token_weight.double()
        return torch.stack([weights[mask].sum() for mask in (self.valid, numbers)]).float()


def targets_of(inputs: dict[str, Any], *, shift: bool) -> Targets:
    """Take labels and weights out of a batch and align them.

    Those of an encoder-decoder need no `shift`; weights beside `shift_labels` are aligned as these are.
    """
    labels, shifted = inputs.pop("labels", None), inputs.pop("shift_labels", None)
    weights = inputs.pop(TOKEN_WEIGHT, None)
    either = labels if shifted is None else shifted
    if either is not None and weights is not None and weights.shape != either.shape:
        raise ValueError(
            f"{TOKEN_WEIGHT} of the batch has shape {tuple(weights.shape)}, the labels {tuple(either.shape)}; expected "
            "a weight for each token, padded like the labels."
        )
    if shifted is not None:
        return Targets(shifted, weights)
    if labels is None:
        raise ValueError(f"the batch has {sorted(inputs)} but no labels; use a collator that makes them "
                         "(DataCollatorForLanguageModeling(tokenizer, mlm=False)).")  # fmt: skip
    if not shift:
        return Targets(labels, weights)
    aligned = nn.functional.pad(labels[..., 1:], (0, 1), value=IGNORE_INDEX)
    return Targets(aligned, None if weights is None else nn.functional.pad(weights[..., 1:], (0, 1), value=0))


def check_weights_kept(inputs: dict[str, Any]) -> None:
    """Raise ValueError if a batch of weighted rows has lost its weights."""
    if TOKEN_WEIGHT not in inputs:
        raise ValueError(
            f"the training set has a column {TOKEN_WEIGHT}, and the batch only {sorted(inputs)}; use a collator "
            "that keeps and pads it, or remove the column."
        )


def columns_of(rows: Any) -> tuple[str, ...]:
    """The columns of a data set, as far as it can tell without reading it all."""
    names = getattr(rows, "column_names", None)
    if names is None and isinstance(rows, list) and rows and isinstance(rows[0], dict):
        names = rows[0]
    return tuple(names or ())


def has_weights(rows: Any) -> bool:
    """Whether a data set has the column of weights."""
    return TOKEN_WEIGHT in columns_of(rows)


def pad_rows(items: Sequence[dict[str, Any]], *, aligned: bool = False) -> dict[str, Tensor]:
    """Join rows of token ids into a batch, padded on the right; padding has label -100, mask 0 and weight 0.

    Raises ValueError where rows have other columns than the first, or, if `aligned`, columns of several lengths.

    >>> pad_rows([{"input_ids": [5], "labels": [5]}, {"input_ids": [6, 7], "labels": [-100, 7]}])["labels"]
    tensor([[   5, -100],
            [-100,    7]])
    """
    masked = [{"attention_mask": [1] * len(item["input_ids"])} | item for item in items]
    for item in masked:
        lengths = {name: len(values) for name, values in item.items()}
        if lengths.keys() != masked[0].keys() or (aligned and len(set(lengths.values())) > 1):
            raise ValueError(
                f"a row has columns of lengths {lengths}, expected {sorted(masked[0])} as in the first row of the "
                f"batch{', all of the length of input_ids: labels are -100 where nothing is predicted' * aligned}."
            )

    def padded(key: str) -> Tensor:
        fill = IGNORE_INDEX if key == "labels" else 0
        columns = [torch.as_tensor(item[key]) for item in masked]
        return nn.utils.rnn.pad_sequence(columns, batch_first=True, padding_value=fill)

    return {key: padded(key) for key in masked[0]}


def collator_for(train: Any, evaluation: Any) -> Any:
    """The collator of `PackedBlocks`, `AnsweredQuestions` or a `Subset` of them; None for other datasets."""
    rows = train if train is not None else evaluation
    if isinstance(rows, dict):  # several to evaluate on, by name
        rows = next(iter(rows.values()), None)
    while isinstance(rows, Subset):
        rows = rows.dataset
    if isinstance(rows, PackedBlocks):
        return default_data_collator  # blocks are of one length: nothing to pad
    return pad_questions if isinstance(rows, AnsweredQuestions) else None


def collator_of_ids(train: Any, evaluation: Any, *, aligned: bool) -> Any:
    """`pad_rows` for rows of token ids and labels, which the default of transformers cannot pad; None for others."""
    rows = train if train is not None else evaluation
    return partial(pad_rows, aligned=aligned) if {"input_ids", "labels"} <= set(columns_of(rows)) else None


def tokenised_rows(rows: Any, tokenizer: Any, max_length: int) -> Any:
    """The rows; a `datasets.Dataset` of text is tokenised, also among several by name.

    Raises ValueError for a list of strings, which says nothing about where rows end.
    """
    if isinstance(rows, dict):
        return {name: tokenised_rows(part, tokenizer, max_length) for name, part in rows.items()}
    if isinstance(rows, list | tuple) and rows and isinstance(rows[0], str):
        raise ValueError(
            "the rows are strings; give PackedBlocks.from_texts(texts, tokenizer, block_size) for packed text, or "
            'datasets.Dataset.from_dict({"text": texts}) for a row of each.'
        )
    if not is_untokenised(rows):
        return rows
    if has_weights(rows):
        raise ValueError(
            f"the dataset is text and has a column {TOKEN_WEIGHT}, whose tokens are not known; tokenise it "
            "(input_ids, labels) with a weight for each token, and give a data_collator that pads all three."
        )
    if tokenizer is None:
        raise ValueError("the dataset is text, and there is no tokenizer; give processing_class=tokenizer.")
    return tokenised(rows, tokenizer, max_length=max_length)
