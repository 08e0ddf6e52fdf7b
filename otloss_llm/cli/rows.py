"""The data that a command line names, by the library datasets, as TRL's `SFTTrainer` reads it."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import date
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.compute as pc  # type: ignore[import-untyped]
from jinja2 import TemplateError
from trl import DatasetMixtureConfig, ScriptArguments, get_dataset

from otloss_llm.losses.positions import IGNORE_INDEX

FORMATS = {".jsonl": "json", ".json": "json", ".csv": "csv", ".parquet": "parquet", ".txt": "text"}
HUB_NAME = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?", re.ASCII)
SAMPLED = 64  # rows that identify a stream
CHECKED = 100_000  # rows among which an invalid one is looked for
BESIDE_TOKENS = ("labels", "attention_mask", "completion_mask", "assistant_masks")
_ROLES = {"human": "user", "gpt": "assistant"}  # ShareGPT's, and those of chat templates
AS_UTF8 = "save the file as UTF-8, for example with: iconv -f latin1 -t utf-8"


def load_splits(
    script: ScriptArguments, mixture: DatasetMixtureConfig, *, seed: int, text_field: str
) -> dict[str, Any]:
    """Return the splits of a data set: of a file, a folder, a name of the hub, or a mixture of them in a YAML file.

    A .txt file is one document, and the columns of a .csv file are text, unless they are of a mixture or the hub, which
    datasets reads in its own way, or the folder declares their types. `test_split_size` cuts a share off the training
    split.

    Raises:
        ValueError: no data set was named, or it cannot be read.
        FileNotFoundError: there is no such file.
    """
    from datasets import DatasetDict
    from transformers import set_seed

    set_seed(seed)  # TRL draws the share of a mixture with numpy's global generator
    share, train = mixture.test_split_size, script.dataset_train_split
    if mixture.datasets and script.dataset_name is not None:
        raise ValueError("datasets of --config and --dataset_name are both given; leave one out.")
    if share is not None and (mixture.streaming if mixture.datasets else script.dataset_streaming):
        raise ValueError("--test_split_size cannot cut a stream; name a split with --dataset_test_split.")
    if mixture.datasets:
        with naming_data("of datasets in --config"):
            return dict(get_dataset(mixture))
    splits = dict(_load(script, text_field))
    if share is not None and train in splits:
        with naming_data(repr(script.dataset_name)):  # of too few rows
            cut = splits[train].train_test_split(test_size=share, seed=seed)
        splits |= DatasetDict({train: cut["train"], script.dataset_test_split: cut["test"]})
    return splits


@contextmanager
def naming_data(name: str) -> Iterator[None]:
    """Raise ValueError that names the data set where the library datasets cannot read it."""
    from datasets.exceptions import DatasetsError

    try:
        yield
    except (DatasetsError, StopIteration, ValueError, RuntimeError) as error:  # StopIteration for an empty file
        cause = error.__cause__ or error
        reason = str(cause) or "no rows"
        if isinstance(cause, UnicodeDecodeError):
            reason += f"; {AS_UTF8}"
        raise ValueError(f"the data set {name} cannot be read: {reason}") from error


def _load(script: ScriptArguments, text_field: str) -> Any:
    from datasets import load_dataset, load_dataset_builder

    name = script.dataset_name
    if name is None:
        raise ValueError("--dataset_name is missing; give a file, a folder, or the name of a data set on the hub.")
    path = Path(name).expanduser()
    if not path.exists() and (path.suffix in FORMATS or not HUB_NAME.fullmatch(name)):
        raise FileNotFoundError(f"there is no file or folder {name!r} in {Path.cwd()}; check the path.")
    if not path.exists():
        with naming_data(repr(name)):
            return load_dataset(name, script.dataset_config, streaming=script.dataset_streaming)
    source: tuple[Any, ...] = (str(path), script.dataset_config)
    files: dict[str, Any] = {}
    if path.is_file():
        if path.suffix not in FORMATS:
            raise ValueError(f"{name!r} ends in {path.suffix!r}, expected one of {', '.join(FORMATS)}.")
        source, files = (FORMATS[path.suffix],), {"data_files": {script.dataset_train_split: str(path)}}
    with naming_data(repr(name)):
        options = files | _reading_options(load_dataset_builder(*source, **files), text_field, *source, **files)
        cache = Path(load_dataset_builder(*source, **options).cache_dir)
        if cache.exists() and _last_change(path) > cache.stat().st_mtime:  # whose count of rows may have changed
            options |= {"download_mode": "force_redownload", "verification_mode": "no_checks"}
        return load_dataset(*source, **options, streaming=script.dataset_streaming)


def _last_change(path: Path) -> float:
    """Return when a file was written or moved here; of a folder the latest time, also of a change of its list of files.

    datasets tells files by names and times of writing, and for a folder whose README.md lists them by names alone.
    """
    stats = [each.stat() for each in (path, *path.rglob("*")) if each.exists()]  # a link may be broken
    return max(max(stat.st_mtime, stat.st_ctime) for stat in stats)


# In columns of numbers, as pandas has it by itself.
_MISSING = [
    "", "#N/A", "#N/A N/A", "#NA", "-1.#IND", "-1.#QNAN", "-NaN", "-nan", "1.#IND", "1.#QNAN", "<NA>", "N/A", "NA",
    "NULL", "NaN", "None", "n/a", "nan", "null",
]  # fmt: skip


def _reading_options(builder: Any, text_field: str, *source: Any, **files: Any) -> dict[str, Any]:
    """Return options of datasets: .txt files by document, and the columns of .csv files as text.

    Those are the columns of the first file of each split, or the ones that README.md declares as text.

    datasets chooses types for each 10,000 rows and each file, so 3.80 among numbers would become 3.8.
    """
    from datasets import load_dataset
    from datasets.packaged_modules.csv.csv import CsvConfig
    from datasets.packaged_modules.text.text import TextConfig

    config = getattr(builder, "config", None)
    if isinstance(config, TextConfig):
        return {"sample_by": "document"}
    if not isinstance(config, CsvConfig):
        return {}
    declared = builder.info.features
    if declared is None:
        splits = load_dataset(*source, **files, streaming=True).values()
        names = {name for rows in splits for row in rows.take(1) for name in row}
    else:
        names = {name for name, kind in declared.items() if "string" in str(getattr(kind, "dtype", ""))}
    # A column that is empty in 10,000 rows must be text too, but what is trained on is missing where it is empty.
    converters = {name: _text_or_none if name in ("prompt", "completion", text_field) else str for name in names}
    others = [] if declared is None else [name for name in declared if name not in names]
    na_values = {name: _MISSING for name in others}
    return {"converters": converters, "keep_default_na": False} | ({"na_values": na_values} if others else {})


def _text_or_none(text: str) -> str | None:
    return text or None


def checked_split(splits: dict[str, Any], name: str, fix: str, *, text_field: str) -> Any:
    """Return a split with the columns that TRL trains on; conversations as role and content.

    Raises ValueError if there is no such split, no row, or no such columns, or if all that is trained on is empty.
    """
    from trl import maybe_convert_to_chatml

    if name not in splits:
        raise ValueError(f"the data set has the splits {sorted(splits)} and no {name!r}; {fix}.")
    rows = splits[name]
    with naming_data(f"with the split {name!r}"):  # where a stream is read
        first = next(decoded(rows), None)
    if first is None:
        raise ValueError(f"the split {name!r} of the data set has no rows; give at least one.")
    expected = ({"input_ids"}, {"messages"}, {"prompt", "completion"}, {text_field}, {"conversations"})
    if not any(columns <= first.keys() for columns in expected):
        raise ValueError(
            f"the data set has the columns {sorted(first)}, expected {text_field}, prompt and completion, or messages; "
            "rename them (dataset.rename_column), for example question to prompt and answer to completion."
        )
    if "conversations" in first:
        rows = rows.map(maybe_convert_to_chatml, remove_columns="conversations")
        first = next(iter(rows))
    if _is_messages(first.get("messages")) and any(turn["role"] in _ROLES for turn in first["messages"]):
        rows = rows.map(_with_roles_of_templates)
        first = next(iter(rows))
    check_rows(rows.take(1), text_field=text_field)
    names = _columns(first, text_field)
    # TRL would read these too, and take the prompt of text for one with a completion, or put no token at its end.
    unread = [name for name in ("prompt", "completion", "messages", text_field) if name in first and name not in names]
    if unread:
        rows = rows.remove_columns(unread)
    column = names[-1]
    if not any(map(_has_content, (row[column] for row in decoded(rows.take(CHECKED))))):
        raise ValueError(
            f"{column} is empty in every row of the split {name!r}, so only the token that ends a row would be "
            "trained on; look at the file."
        )
    return rows


def check_tokens(rows: Any, vocabulary: int, *, packing: bool = False, completion_only: bool | None = None) -> None:
    """Raise ValueError unless all rows have token ids of the vocabulary, and lists beside them that are as long.

    Padding that would be read or trained on raises too. Of a stream the first rows are checked.

    Args:
        packing: whether rows are joined, padding and all.
        completion_only: False if completion masks are not used.
    """
    masks = [name for name in BESIDE_TOKENS if name != "completion_mask" or completion_only is not False]
    first = 0
    for table in (rows if hasattr(rows, "__len__") else rows.take(SAMPLED)).with_format("arrow").iter(1000):
        lengths = _check_lengths(table, first)
        row = first + np.repeat(np.arange(len(lengths)), lengths)
        for name in ("input_ids", "labels"):
            if name in table.column_names:
                _check_ids(name, _flat(table[name]), vocabulary, row)
        if "attention_mask" in table.column_names:
            beside = {name: _flat(table[name]) for name in masks if name in table.column_names}
            _check_padding(beside, row, packing=packing)
        first += len(table)


def _check_lengths(table: Any, first: int) -> np.ndarray:
    """Return how many token ids each row of a table has; raises ValueError where another column has others."""
    names = [name for name in ("input_ids", *BESIDE_TOKENS) if name in table.column_names]
    for name in names:
        number = getattr(table[name].type, "value_type", pa.null())  # of lists
        if name == "input_ids":
            is_right, what = pa.types.is_integer(number), "token ids, which are whole numbers."
        else:
            is_right = pa.types.is_floating(number) or pa.types.is_boolean(number) or pa.types.is_integer(number)
            what = "a number for each token; drop the column if it is something else (dataset.remove_columns)."
        if not is_right:
            entry = str(table[name][0].as_py())[:60]
            raise ValueError(f"{name} of row {first} is {entry!r}, expected a list of {what}")
    lengths = np.array([pc.list_value_length(table[name]).fill_null(-1).to_numpy() for name in names])
    wrong = (lengths != lengths[0]).any(0) | (lengths[0] < 0)
    if wrong.any():
        i = int(wrong.argmax())
        of_row = {
            name: length if length >= 0 else None for name, length in zip(names, lengths[:, i].tolist(), strict=True)
        }
        raise ValueError(
            f"row {first + i} has columns of lengths {of_row}, expected lists, all as long as input_ids: labels are "
            "-100 where nothing is predicted."
        )
    return lengths[0]


def _check_ids(name: str, ids: np.ndarray, vocabulary: int, row: np.ndarray) -> None:
    wrong = ~((ids >= 0) & (ids < vocabulary))  # NaN for a null
    if name == "labels":
        wrong &= ids != IGNORE_INDEX
    if wrong.any():
        i = int(wrong.argmax())
        raise ValueError(
            f"{name} of row {row[i]} has {ids[i]}, expected whole numbers from 0 to {vocabulary - 1}, the model's "
            "vocabulary; was the text tokenised by another model's tokenizer?"
        )


def _check_padding(beside: dict[str, np.ndarray], row: np.ndarray, *, packing: bool) -> None:
    """Raise ValueError for padding that would be read or trained on: TRL pads rows itself, and drops attention_mask."""
    is_padding = beside.pop("attention_mask") == 0
    is_read = is_padding[:-1] & ~is_padding[1:] & (packing | (row[:-1] == row[1:]))
    if "labels" in beside:  # which TRL takes as they are
        is_ignored = beside["labels"] == IGNORE_INDEX
    else:
        is_ignored = np.any([mask == 0 for mask in beside.values()] or [np.zeros_like(is_padding)], axis=0)
    wrong = np.append(is_read, False) | (is_padding & ~is_ignored)
    if wrong.any():
        raise ValueError(
            f"attention_mask of row {row[wrong.argmax()]} has zeros, and TRL reads such tokens as any others; tokenise "
            "without padding, or leave out the tokens whose mask is 0, from all columns."
        )


def _flat(lists: Any) -> np.ndarray:
    """Return all numbers of a column of lists."""
    flat: np.ndarray = pc.list_flatten(lists).to_numpy()
    return flat


def decoded(rows: Any) -> Iterator[dict[str, Any]]:
    """Yield the rows; raises ValueError with the number of a row that is not UTF-8, which datasets finds only here."""
    each = iter(rows)
    for i in count():
        try:
            row = next(each, None)
        except UnicodeDecodeError as error:
            raise ValueError(f"row {i} is not UTF-8 ({error}); {AS_UTF8}.") from error
        if row is None:
            return
        yield row


def _with_roles_of_templates(row: dict[str, Any]) -> dict[str, Any]:
    """Return a conversation in ShareGPT's form with the roles that chat templates know; what is none as it is."""
    if not _is_messages(row["messages"]):
        return row
    return row | {"messages": [turn | {"role": _ROLES.get(turn["role"], turn["role"])} for turn in row["messages"]]}


def _columns(row: dict[str, Any], text_field: str) -> tuple[str, ...]:
    """Return the columns of a row that make its tokens; the last one is trained on."""
    kinds = (("input_ids",), ("prompt", "completion"), ("messages",), (text_field,))  # in the order of TRL
    return next((names for names in kinds if row.keys() >= set(names)), ())


def _has_content(value: Any) -> bool:
    """Whether text, tokens or messages are not empty; other values raise where the row is read."""
    if isinstance(value, str):
        return bool(value.strip())
    if _is_messages(value):
        return any(part.get("content") or part.get("tool_calls") for part in value)
    return bool(value != [])


@contextmanager
def naming_rows(*splits: Any, args: Any) -> Iterator[None]:
    """Raise ValueError that names the row where an error comes from an invalid row.

    A null, a template that raises, and an empty list of messages make errors of many kinds in TRL and datasets.
    """
    try:
        yield
    except (RuntimeError, AttributeError, LookupError, TypeError, ValueError, TemplateError):
        for rows in splits:
            if rows is not None:
                check_rows(rows.take(CHECKED), text_field=args.dataset_text_field, answers=args.assistant_only_loss)
        raise


def check_rows(rows: Any, *, text_field: str, answers: bool = False) -> None:
    """Raise ValueError where a row to train on is neither text nor messages, as a null or a number.

    Args:
        answers: whether only answers are trained on, so that a conversation needs one.
    """
    for i, row in enumerate(decoded(rows)):
        for name in _columns(row, text_field):
            if not (name == "input_ids" or _is_text(row[name], name) or _is_messages(row[name])):
                text = "" if name == "messages" else "text or "
                fix = "drop or correct such rows (dataset.filter)"
                # What datasets makes of columns of files.
                if isinstance(row[name], int | float):
                    fix = "write such values in quotes, in a .jsonl file"
                elif isinstance(row[name], date):
                    fix = "write dates to a .csv or .parquet file, for a .jsonl file of dates is read as times"
                elif row[name] is None:
                    fix = (
                        "drop such rows (dataset.filter); NA, None, null or nan in a mixture or a data set of the hub, "
                        "if meant as text, need a .jsonl file"
                    )
                raise ValueError(
                    f"{name} of row {i} is {repr(row[name])[:60]}, expected {text}a list of messages with role and "
                    f"content; {fix}."
                )
            if answers and name == "messages" and all(part["role"] != "assistant" for part in row[name]):
                raise ValueError(
                    f"messages of row {i} have no answer, expected a message with the role assistant; drop such rows "
                    "(dataset.filter), or train on all messages with --assistant_only_loss false."
                )


def _is_text(value: Any, name: str) -> bool:
    return isinstance(value, str) and name != "messages"


def _is_messages(value: Any) -> bool:
    parts = value if isinstance(value, list) else []
    return bool(parts) and all(isinstance(part, dict) and isinstance(part.get("role"), str) for part in parts)


def digest(rows: Any) -> str:
    """Return a short hash of all rows, or of the first ones of a stream; it is the same in another process."""
    hashed = hashlib.sha256(str(rows.features).encode())
    if hasattr(rows, "__len__"):
        for table in rows.with_format("arrow").iter(1000):
            for batch in table.combine_chunks().to_batches():
                hashed.update(batch.serialize())
    else:
        hashed.update(
            json.dumps(list(decoded(rows.take(SAMPLED))), default=lambda value: type(value).__name__).encode()
        )
    return hashed.hexdigest()[:16]
