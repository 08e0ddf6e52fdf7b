"""Batches as the trainers of transformers make and hand them over: labels and their weights, padding, counts."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import reduce
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
import torch
from accelerate.data_loader import IterableDatasetShard
from jaxtyping import Bool, Int
from torch import Tensor, nn
from torch.utils.data import IterableDataset
from transformers import default_data_collator

from otloss_llm.losses.positions import IGNORE_INDEX

TOKEN_WEIGHT = "token_weight"  # a column of the data set


class Targets(NamedTuple):
    """Labels of a batch: entry t is the token that position t predicts, with its weight (None: all weigh the same)."""

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


def pop_targets(inputs: dict[str, Any], *, shift: bool) -> Targets:
    """Take labels and weights out of a batch and align them.

    Labels of an encoder-decoder need no `shift`; weights beside `shift_labels` are aligned as these are. The first
    token of a row is never predicted, also where padding is on its left.
    """
    labels, shifted = (_as_int64(inputs.pop(name, None)) for name in ("labels", "shift_labels"))
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
    mask = inputs.get("attention_mask")
    if isinstance(mask, Tensor) and mask.shape == labels.shape:
        is_before_first = (mask != 0).cumsum(-1) == 0  # its output depends on no token
        aligned = aligned.masked_fill(is_before_first.to(aligned.device), IGNORE_INDEX)
    return Targets(aligned, None if weights is None else nn.functional.pad(weights[..., 1:], (0, 1), value=0))


def _as_int64(numbers: Any) -> Any:
    """Return whole numbers of any dtype, such as numpy's uint16 for tokens, in the one that models and losses take."""
    is_integer = isinstance(numbers, Tensor) and not (numbers.is_floating_point() or numbers.dtype == torch.bool)
    return numbers.long() if is_integer else numbers


def is_flattened(labels: Tensor, position_ids: Any) -> bool:
    """Whether a batch is one row of several sequences: whether positions begin again."""
    restarts = isinstance(position_ids, Tensor) and position_ids.shape == labels.shape and len(labels) == 1
    return restarts and int((position_ids == position_ids.min()).sum()) > 1


def repeated_positions(
    labels: Int[Tensor, "1 length"], position_ids: Tensor, rows: Any, count: int
) -> Bool[Tensor, " length"]:
    """Return which positions follow the first `count` examples of a flattened batch, the last of the data set `rows`.

    An example has the sequences of its column seq_lengths, which packing writes, or is one sequence. Raises ValueError
    if the batch begins with others.
    """
    starts = [0]
    for i in range(len(rows) - count, len(rows)):
        lengths = rows[i].get("seq_lengths")
        lengths = [len(rows[i]["input_ids"])] if lengths is None else map(int, lengths)
        starts += [starts[-1] + end for end in accumulate(lengths)]
    observed = (position_ids[0] == position_ids.min()).nonzero()[: len(starts), 0].tolist()
    if observed != starts:
        raise ValueError(
            f"the last evaluation batch has sequences that begin at {observed[:8]}, and the last {count} rows of the "
            f"data set at {starts[:8]}, so it is unclear which are repeated to fill it; evaluate in one process, or "
            "without padding_free."
        )
    return torch.arange(labels.shape[1], device=labels.device) >= starts[-1]


def collate_weights(collator: Callable[[Any], Any], items: Sequence[Any]) -> Any:
    """Return the collator's batch of these rows; raises ValueError if they have weights and the batch has not."""
    weighted = any(isinstance(item, Mapping) and TOKEN_WEIGHT in item for item in items)
    batch = collator(items)
    if weighted:
        check_weights_kept(batch)
    return batch


def check_weights_kept(batch: Any) -> None:
    """Raise ValueError if a batch of weighted rows has lost its weights."""
    if TOKEN_WEIGHT not in batch:
        raise ValueError(
            f"the rows have a column {TOKEN_WEIGHT}, and the batch only {sorted(batch)}; use a collator "
            "that keeps and pads it, or remove the column."
        )


class CountedRows(IterableDataset[Any]):
    """The rows of a stream, how many were read in the last pass, and the last of them.

    Several processes share its rows. Of a stream of several files each process would read some, and have other numbers
    of batches than the others.
    """

    def __init__(self, rows: Iterable[Any], kept: int) -> None:
        self.rows, self.count, self.last = rows, 0, deque[Any](maxlen=kept)

    def __getattr__(self, name: str) -> Any:
        """What accelerate asks of a stream, as `set_epoch` and `generator`."""
        if name == "rows":  # before it is set, as by copies
            raise AttributeError(name)
        return getattr(self.rows, name)

    def __iter__(self) -> Iterator[Any]:
        self.count = 0
        for row in self.rows:
            self.count += 1
            self.last.append(row)
            yield row


def counting_rows(batches: Any) -> IterableDatasetShard | None:
    """Return what shares a stream between processes, and repeats rows to fill the last batch; its rows are now counted.

    Raises ValueError where the rows are read in other processes.
    """
    stream = getattr(batches, "dataset", None)
    if not isinstance(stream, IterableDatasetShard) or stream.drop_last or stream.num_processes == 1:
        return None
    if batches.num_workers:
        raise hidden_rows_error(stream.num_processes, batches.num_workers)
    if not isinstance(stream.dataset, CountedRows):
        stream.dataset = CountedRows(stream.dataset, _rows_of_all(stream))
    return stream


def hidden_rows_error(processes: int, workers: int) -> ValueError:
    """Return what is raised where workers read a stream that several processes share."""
    return ValueError(
        f"a stream is evaluated in {processes} processes with dataloader_num_workers={workers}, which hides the rows "
        "that are repeated to fill the last batch; evaluate without workers, or a data set with a length."
    )


def unrepeated_rows(stream: IterableDatasetShard) -> int:
    """Return how many rows of the last batch of all processes are not repeated; 0 if the batch is full."""
    return int(stream.dataset.count % _rows_of_all(stream))


def _rows_of_all(stream: IterableDatasetShard) -> int:
    """Return how many rows the batches of all processes have together."""
    return int(stream.batch_size * (1 if stream.split_batches else stream.num_processes))


def check_labelled(labels: float, what: str) -> None:
    """Raise ValueError unless there are labels; `what` is for the message."""
    if not labels > 0:
        raise ValueError(
            f"no token of the {what} is labelled: got only labels of -100, of weight 0, or of a row's first token; "
            "expected at least one other. Look for rows of empty text, or a template or collator that masks labels."
        )


def column_names(rows: Any) -> tuple[str, ...]:
    """The columns of a data set, as far as it can tell without reading it all; none where a transform makes the rows.

    A transform may draw at random, so that a row is not to be read in advance.
    """
    form = getattr(rows, "format", None)
    if isinstance(form, dict) and form.get("type") == "custom":
        return ()
    names = getattr(rows, "column_names", None)
    if names is None and isinstance(rows, list) and rows and isinstance(rows[0], Mapping):
        names = rows[0]
    return tuple(names or ())


def has_weights(rows: Any) -> bool:
    """Whether a data set has the column of weights; a stream that names no columns is asked for its first row."""
    if getattr(rows, "column_names", ()) is None:
        return TOKEN_WEIGHT in next(iter(rows), ())
    return TOKEN_WEIGHT in column_names(rows)


def pad_rows(items: Sequence[dict[str, Any]], *, aligned: bool = False) -> dict[str, Tensor]:
    """Join rows of token ids into a batch, padded on the right; padding has labels -100, mask 0 and weight 0.

    Rows whose positions begin again hold several sequences, and get no mask: models look for them only without one. Nor
    do rows with positions that are equally long, so that batches of rows of one length have the same columns, as a
    stream needs that one process reads for several.

    Raises ValueError where rows have other columns than the first, or a mask beside packed sequences, or, if `aligned`,
    columns of several lengths.

    >>> pad_rows([{"input_ids": [5], "labels": [5]}, {"input_ids": [6, 7], "labels": [-100, 7]}])["labels"]
    tensor([[   5, -100],
            [-100,    7]])
    """
    is_packed = [_has_sequences(item) for item in items]
    needs_mask = not any(is_packed)
    if np.ndim(items[0].get("position_ids", 0)) == 1:  # those of images have three rows
        needs_mask = needs_mask and len({len(item["input_ids"]) for item in items}) > 1
    masked = [({"attention_mask": [1] * len(item["input_ids"])} if needs_mask else {}) | item for item in items]
    for item in masked:
        for name, values in item.items():
            if not hasattr(values, "__len__"):
                raise ValueError(
                    f"a row has {name} = {values!r}, expected a list with an entry for each token; remove the column "
                    "(dataset.remove_columns)."
                )
        lengths = {name: len(values) for name, values in item.items()}
        if lengths.keys() != masked[0].keys() or (aligned and len(set(lengths.values())) > 1):
            raise ValueError(
                f"a row has columns of lengths {lengths}, expected {sorted(masked[0])} as in the first row of the "
                f"batch{', all of the length of input_ids: labels are -100 where nothing is predicted' * aligned}."
            )

    def padded(key: str) -> Tensor:
        fill = IGNORE_INDEX if key in ("labels", "shift_labels") else 0
        values = [item[key] for item in masked]
        columns = [_as_int64(one if isinstance(one, Tensor) else torch.as_tensor(one, device="cpu")) for one in values]
        if key in ("input_ids", "labels") and any(column.dim() > 1 for column in columns):
            raise ValueError(
                f"a row has {key} of shape {tuple(columns[0].shape)}, expected (length,), as of one text; "
                f"{key}.squeeze(0) drops the axis that a tokenizer adds with return_tensors."
            )
        # The dtype of all rows: one may have weights 1 and 2, and another 0.5. A row without tokens has none.
        dtypes = [column.dtype for column in columns if column.numel()] or [torch.int64]
        dtype = reduce(torch.promote_types, dtypes)
        return nn.utils.rnn.pad_sequence([column.to(dtype) for column in columns], batch_first=True, padding_value=fill)

    return {key: padded(key) for key in masked[0]}


def _has_sequences(item: dict[str, Any]) -> bool:
    """Whether positions begin again in a row; raises ValueError if it has a mask beside them."""
    positions, mask = (np.asarray(item.get(name, 0)) for name in ("position_ids", "attention_mask"))
    if positions.ndim != 1:
        return False
    read = positions[mask != 0] if mask.shape == positions.shape else positions
    begins_again = bool((read[1:] <= read[:-1]).any())
    if begins_again and mask.ndim == 1:
        raise ValueError(
            "a row has several sequences, since its position_ids begin again, and an attention_mask, beside which "
            "models let them see each other; remove that column (dataset.remove_columns)."
        )
    return begins_again


def collate_tokens(items: Sequence[dict[str, Any]], *, aligned: bool = False) -> dict[str, Any]:
    """`pad_rows` for rows of token ids, transformers' default for others with labels (of images or sound).

    Raises ValueError for rows that are not tokenised.
    """
    columns = items[0] if isinstance(items[0], Mapping) else ()
    check_tokenised(columns, items[0])
    batch: dict[str, Any] = pad_rows(items, aligned=aligned) if "input_ids" in columns else default_data_collator(items)
    return batch


def check_rows_tokenised(rows: Any) -> None:
    """Raise ValueError for a data set, or one among several by name, whose columns are known and not tokenised."""
    for part in rows.values() if isinstance(rows, dict) else [rows]:
        columns = column_names(part)
        text = isinstance(part, list) and bool(part) and isinstance(part[0], str)
        if columns or text:
            check_tokenised(columns, part[0] if text else columns)


def check_tokenised(columns: Iterable[str], example: Any) -> None:
    """Raise ValueError unless there are token ids or labels among the columns; `example` is for the message."""
    if not {"input_ids", "labels"} & set(columns):
        what = f"columns {sorted(columns)}" if columns else f"no columns, but are {str(example)[:40]!r}"
        raise ValueError(
            f"the rows have {what}, and this trainer takes tokenised ones (input_ids and labels), as transformers' "
            "Trainer does. Text, prompts with completions and conversations are prepared by TRL's trainer: class "
            "EMOTrainer(ObjectiveMixin, SFTTrainer). Rows of another kind need a data_collator."
        )


# ---- counts of labels -----------------------------------------------------------------------------------------------

COUNTED_LABELS = 2**24  # more are not read: they are counted for a line in the log


def label_counts(rows: Any, vocab: int, *, shifted: bool) -> Int[Tensor, " vocab"] | None:
    """How often each token is a predicted label among the first 2^24; None without a column of labels of tokens.

    Args:
        rows: a `datasets.Dataset` or a list of rows.
        shifted: whether the first label of each row, and of each sequence that is packed in it, is not predicted.
    """
    names = column_names(rows)
    if "labels" not in names or not hasattr(rows, "__len__"):
        return None
    columns = [name for name in ("labels", "seq_lengths") if name in names]
    if hasattr(rows, "with_format"):
        rows = rows.with_format("numpy", columns=columns)  # no lists of Python's numbers
    counts, read = torch.zeros(vocab, dtype=torch.int64, device="cpu"), 0
    for start in range(0, len(rows), 1000):
        chunk = rows[start : start + 1000]
        is_table = isinstance(chunk, Mapping)
        try:
            each = zip(*(chunk[name] if is_table else [row[name] for row in chunk] for name in columns), strict=True)
            arrays = [_predicted(*row) if shifted else np.ravel(row[0]) for row in each]
            labels = torch.from_numpy(np.concatenate(arrays)).long()
        except (KeyError, TypeError, ValueError):  # of rows: a collator makes labels of tokens
            return None
        counts += torch.bincount(labels[(labels >= 0) & (labels < vocab)], minlength=vocab)
        read += len(labels)
        if read >= COUNTED_LABELS:
            break
    return counts


def _predicted(labels: Any, lengths: Any = ()) -> np.ndarray:
    """Return the labels without the first one of each sequence, of these lengths."""
    starts = np.cumsum([0, *lengths[:-1]])
    return np.delete(np.asarray(labels), starts[starts < len(labels)], axis=0).ravel()
