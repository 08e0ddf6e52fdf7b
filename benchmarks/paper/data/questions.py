"""Questions with answers: read from JSON lines, and tokenised into rows for training.

    row = [BOS] ids(question + separator) ids(answer) EOS

Prompt and answer are tokenised separately, so the prompt of generation is exactly the beginning of the training row,
even if the tokenizer would merge characters across the border. BOS is written only if the tokenizer itself begins a
text with it. The encoder of an encoder-decoder reads the question alone, as the tokenizer writes a text (T5's with EOS
at its end), and the labels are ids(answer) EOS.
"""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from jaxtyping import Bool, Int
from torch import Tensor
from torch.utils.data import Dataset

from benchmarks.paper.data.blocks import PackedBlocks, opening_ids
from benchmarks.paper.data.text import column_text, read_records
from otloss_llm.losses.positions import IGNORE_INDEX

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

T = TypeVar("T")
SEPARATOR = "\n"  # between a question and its answer


@dataclass(frozen=True)
class Question:
    """A question, its right answer as it is to be written, and the kind of question if known."""

    question: str
    answer: str
    kind: str | None = None


def read_questions(
    path: str | Path,
    *,
    question_column: str = "question",
    answer_column: str = "answer",
    kind_column: str = "module",
) -> list[Question]:
    """Read questions from a `.jsonl` file with one object per line, as GSM8K and DeepMind mathematics come.

    The texts stay as they are. `kind_column` may be missing; the other two may not. Blank lines are left out.

    Raises FileNotFoundError if there is no such file, and ValueError if the file is not UTF-8, holds no question, or a
    line is not a JSON object with non-blank text in the columns.
    """
    file = Path(path).expanduser()
    if file.suffix != ".jsonl":
        raise ValueError(f"{str(path)!r} is no .jsonl file; write one JSON object per line, with question and answer.")
    if not file.is_file():
        raise FileNotFoundError(f"there is no file {str(path)!r} with questions in {Path.cwd()}; check the path.")
    questions = []
    for place, record in read_records(file):
        asked, answer = (column_text(record, column, place) for column in (question_column, answer_column))
        for column, text in ((question_column, asked), (answer_column, answer)):
            if not text.strip():
                raise ValueError(f"{place}: column {column!r} is {text!r}, expected a string that is not blank.")
        kind = column_text(record, kind_column, place) if record.get(kind_column) is not None else None
        questions.append(Question(asked, answer, kind))
    if not questions:
        raise ValueError(f"{str(path)!r} holds no question; write one JSON object per line, with question and answer.")
    return questions


def spread(questions: Sequence[T], count: int) -> list[T]:
    """Return at most `count` questions, evenly spaced, because files are often sorted by the kind of question."""
    if count < 1:
        raise ValueError(f"num_questions is {count}, expected 1 or more.")
    count = min(count, len(questions))
    return [questions[i * len(questions) // count] for i in range(count)]


def prompt_text(question: Question, separator: str = SEPARATOR) -> str:
    """Return the prompt for a question: the question and the separator."""
    return question.question + separator


class AnsweredQuestions(Dataset[dict[str, Tensor]]):
    """Rows of prompt and answer, as a dataset for training and scoring causal language models and encoder-decoders.

    An item is `{"input_ids", "labels", "attention_mask"}`, each (length,) int64; labels are not shifted, as Hugging
    Face models expect, and -100 on the prompt unless `train_on_question`. With `encoder_decoder` the inputs are the
    prompt and the labels the answer, each of its own length. `pad_questions` makes batches of items.
    `dropped` is the number of questions left out for their length; `fingerprint` is a short hash, equal for equal data.
    """

    def __init__(
        self,
        prompts: Sequence[Sequence[int]],
        answers: Sequence[Sequence[int]],
        *,
        train_on_question: bool = False,
        encoder_decoder: bool = False,
        dropped: int = 0,
    ) -> None:
        if len(prompts) != len(answers) or not len(prompts):
            raise ValueError(
                f"there are {len(prompts)} prompts and {len(answers)} answers, expected one each, or more."
            )
        empty = next((i for i, ids in enumerate(zip(prompts, answers, strict=True)) if not all(map(len, ids))), None)
        if empty is not None:
            raise ValueError(f"row {empty} has an empty prompt or answer, expected ids of at least one token each.")
        if train_on_question and encoder_decoder:
            raise ValueError(
                "train_on_question is for causal language models: the encoder of an encoder-decoder reads the "
                "question, and predicts none of its tokens; leave it out."
            )
        self._rows = [torch.tensor([*p, *a], dtype=torch.int32) for p, a in zip(prompts, answers, strict=True)]
        self.prompt_lengths = [len(prompt) for prompt in prompts]
        self.answer_lengths = [len(answer) for answer in answers]
        self.train_on_question = train_on_question
        self.encoder_decoder = encoder_decoder
        self.dropped = dropped

    @classmethod
    def from_questions(
        cls,
        questions: Sequence[Question],
        tokenizer: PreTrainedTokenizerBase,
        *,
        max_length: int,
        separator: str = SEPARATOR,
        train_on_question: bool = False,
        encoder_decoder: bool = False,
    ) -> AnsweredQuestions:
        """Tokenise questions and answers as `[BOS] question + separator, answer EOS`.

        For an encoder-decoder the question is a text of its own, without the separator, and `max_length` is the length
        of questions and of answers. Nothing is truncated: rows longer than `max_length` tokens are dropped, counted in
        `dropped`, and reported in a UserWarning. Raises ValueError if no row is left or the tokenizer has no EOS to end
        an answer with.
        """
        if not questions:
            raise ValueError("questions is an empty list; give at least one question with its answer.")
        if max_length < 2:
            raise ValueError(f"max_length is {max_length}, expected 2 or more tokens: a prompt and an answer.")
        end = tokenizer.eos_token_id
        if end is None:
            raise ValueError("the tokenizer has no EOS token to end an answer with; set tokenizer.eos_token first.")
        prompts = prompt_ids(questions, tokenizer, separator=separator, encoder_decoder=encoder_decoder)
        answers = [[*ids, end] for ids in _ids(tokenizer, [question.answer for question in questions])]
        together = max if encoder_decoder else sum
        lengths = [together((len(prompt), len(answer))) for prompt, answer in zip(prompts, answers, strict=True)]
        kept = [i for i, length in enumerate(lengths) if length <= max_length]
        dropped = len(questions) - len(kept)
        text = (
            f"{dropped} of {len(questions)} questions are longer than max_length={max_length} tokens with their answers"
        )
        if not kept:
            raise ValueError(f"{text}, the shortest has {min(lengths)}; raise max_length (--block_size).")
        if dropped:
            warnings.warn(f"{text} (the longest has {max(lengths)}) and were dropped.", UserWarning, stacklevel=2)
        return cls(
            [prompts[i] for i in kept], [answers[i] for i in kept], train_on_question=train_on_question,
            encoder_decoder=encoder_decoder, dropped=dropped,
        )  # fmt: skip

    @property
    def lengths(self) -> list[int]:
        """Tokens of each row; of its question or its answer, the longer one, for an encoder-decoder."""
        if self.encoder_decoder:
            return [max(both) for both in zip(self.prompt_lengths, self.answer_lengths, strict=True)]
        return [len(row) for row in self._rows]

    @property
    def longest(self) -> int:
        """Tokens of the longest row."""
        return max(self.lengths)

    @property
    def id_range(self) -> tuple[int, int]:
        """The lowest and the highest id."""
        return min(int(row.min()) for row in self._rows), max(int(row.max()) for row in self._rows)

    @property
    def fingerprint(self) -> str:
        """The first 16 hexadecimal digits of the SHA-256 of the lengths, the ids, and what is trained on."""
        kind = "encoder-decoder" if self.encoder_decoder else self.train_on_question
        digest = hashlib.sha256(f"{self.lengths}{self.prompt_lengths}{kind}\0".encode())
        digest.update(torch.cat(self._rows).numpy().astype("<i4").tobytes())
        return digest.hexdigest()[:16]

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        ids, prompt = self._rows[index].long(), self.prompt_lengths[index]
        if self.encoder_decoder:
            ids, labels = ids[:prompt], ids[prompt:]
        else:
            labels = ids.clone()
            if not self.train_on_question:
                labels[:prompt] = IGNORE_INDEX
        return {"input_ids": ids, "labels": labels, "attention_mask": torch.ones_like(ids)}

    def __repr__(self) -> str:
        size = f"{len(self)} row{'' if len(self) == 1 else 's'} of at most {self.longest} tokens"
        return f"{type(self).__name__}({size}, {self.dropped} dropped, fingerprint={self.fingerprint})"


def pad_questions(items: Sequence[dict[str, Tensor]]) -> dict[str, Int[Tensor, "batch longest"]]:
    """Join items of `AnsweredQuestions` into a batch, padded on the right to its longest row.

    Padding has id 0, attention mask 0 and label -100.
    """
    fills = {"input_ids": 0, "labels": IGNORE_INDEX, "attention_mask": 0}
    pad = torch.nn.utils.rnn.pad_sequence
    return {
        key: pad([item[key] for item in items], batch_first=True, padding_value=fill) for key, fill in fills.items()
    }


def prompt_ids(
    questions: Sequence[Question], tokenizer: Any, *, separator: str = SEPARATOR, encoder_decoder: bool = False
) -> list[list[int]]:
    """Return the ids that a model reads before it answers."""
    if encoder_decoder:
        return _ids(tokenizer, [question.question for question in questions], special=True)
    opening = opening_ids(tokenizer)
    return [[*opening, *ids] for ids in _ids(tokenizer, [prompt_text(question, separator) for question in questions])]


def _ids(tokenizer: Any, texts: list[str], *, special: bool = False) -> list[list[int]]:
    # verbose=False: no warning about texts longer than the model's context; rows that are too long are dropped here.
    return tokenizer(texts, add_special_tokens=special, truncation=False, padding=False, verbose=False)["input_ids"]


def count_labels(rows: PackedBlocks | AnsweredQuestions, chosen: Bool[Tensor, " vocab"]) -> tuple[int, int]:
    """The number of predicted labels that are `chosen` tokens, and the number of predicted labels."""
    counts = label_counts(rows, len(chosen))
    return int(counts[chosen].sum()), int(counts.sum())


def label_counts(rows: PackedBlocks | AnsweredQuestions, vocab: int) -> Int[Tensor, " vocab"]:
    """How often each token of the vocabulary is a predicted label."""
    if isinstance(rows, PackedBlocks):
        batches: Iterable[Tensor] = rows.ids[:, 1:].split(4096)  # the first token of a block is context
    else:
        first = 0 if rows.encoder_decoder else 1
        batches = (rows[i]["labels"][first:] for i in range(len(rows)))
    counts = torch.zeros(vocab, dtype=torch.int64)
    for batch in batches:
        counts += torch.bincount(batch[(batch >= 0) & (batch < vocab)].long(), minlength=vocab)
    return counts
