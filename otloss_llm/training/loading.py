"""What a command line names: the cost of an objective, and rows to train, validate and test on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from otloss_llm.costs.choice import NumberSettings, choose_cost
from otloss_llm.costs.embedding import EmbeddingCost
from otloss_llm.costs.vocabulary import TokenCost
from otloss_llm.data.blocks import PackedBlocks, check_fraction, read_texts, split_blocks
from otloss_llm.data.chats import Chat, ChatRows
from otloss_llm.data.hugging_face import PARTS, load_splits, read_examples
from otloss_llm.data.questions import SEPARATOR, AnsweredQuestions, Question, count_labels, read_questions, spread
from otloss_llm.models.heads import find_head
from otloss_llm.models.loading import load_model, load_tokenizer
from otloss_llm.objectives import Sum, parse_objective

COST_SOURCES = ("all-but-the-top", "raw", "as-is", "random", "shuffled")


@dataclass(frozen=True)
class Sources:
    """Examples of one kind ("text", "questions" or "chat"); None for a part without a source of its own."""

    kind: str
    train: list[Any]
    validation: list[Any] | None = None
    test: list[Any] | None = None
    separator: str = SEPARATOR  # between a question and its answer


# Options with their defaults: one that equals its default counts as not given.
_TEXT_ONLY = {"validation_text": None, "test_text": None, "text_column": "text"}
_QUESTIONS_ONLY = {"validation_questions": None, "test_questions": None, "train_on_question": False}
_DATASETS_ONLY = {"dataset_config_name": None}
_NOT_WITH: dict[str, dict[str, Any]] = {
    "text": _QUESTIONS_ONLY | _DATASETS_ONLY,
    "questions": _TEXT_ONLY | _DATASETS_ONLY,
    "dataset": {"validation_text": None, "test_text": None, "validation_questions": None, "test_questions": None},
}


def named_source(source: str | None) -> str:
    """The source of the embedding cost by name, as in `load_cost`: None is the first of `COST_SOURCES`."""
    return COST_SOURCES[0] if source is None else source


def load_cost(
    source: str | None,
    model: Any,
    *,
    seed: int = 0,
    kind: str = "embedding",
    tokenizer: Any = None,
    numbers: NumberSettings | None = None,
) -> TokenCost:
    """A vocabulary cost for `model`.

    Args:
        source: of the embedding: "all-but-the-top" or None (the model's own head as it is now, without its leading
            directions), "raw" (all of it, the cost of the paper), "as-is" (the same, with near-duplicate rows kept),
            "random" or "shuffled" (controls, drawn with `seed`), a `.npy` file of shape (V, d), which is taken as it
            is, or a model (folder or name) whose head is taken without its leading directions.
        model: the model that will be trained; the cost is over its vocabulary.
        seed: of the random and shuffled controls, of embeddings and of values.
        kind, tokenizer, numbers: as in `otloss_llm.costs.choice.choose_cost`; the kind "number" reads no embedding. The
            tokenizer is compared with that of a model whose head is taken.

    Raises:
        ValueError: the embedding has another vocabulary (or other tokens) or is not a (V, d) array of finite numbers,
            or the tokenizer has no number tokens.
        FileNotFoundError: there is no such file or model.
    """
    return choose_cost(
        kind, embedding=lambda: _load_embedding(source, model, seed, tokenizer), tokenizer=tokenizer,
        vocab_size=find_head(model).weight.shape[0], numbers=numbers, seed=seed,
    )  # fmt: skip


def _load_embedding(source: str | None, model: Any, seed: int, tokenizer: Any) -> EmbeddingCost:
    generator = torch.Generator().manual_seed(seed)
    source = named_source(source)
    if source in ("as-is", "random"):
        own = EmbeddingCost.from_model(model, near_duplicates="keep")
        return own if source == "as-is" else own.random_like(generator)
    if source in COST_SOURCES:
        own = EmbeddingCost.from_model(model, directions=None if source == "all-but-the-top" else 0)
        return own.shuffled(generator) if source == "shuffled" else own
    from_file = source.endswith(".npy")
    cost = (
        EmbeddingCost(_read_array(source))
        if from_file
        else EmbeddingCost.from_model(load_model(source), directions=None)
    )
    vocab = find_head(model).weight.shape[0]
    if cost.shape[0] != vocab:
        raise ValueError(
            f"the cost embedding {source!r} is over a vocabulary of {cost.shape[0]} tokens, the model has {vocab}; "
            "take it from a model with the same tokenizer."
        )
    if not from_file and tokenizer is not None:
        _check_same_tokens(source, tokenizer)
    return cost


def _check_same_tokens(source: str, tokenizer: Any) -> None:
    try:
        other = load_tokenizer(source)
    except (ValueError, OSError):
        return  # a model that was saved without its tokenizer
    if other.get_vocab() != tokenizer.get_vocab():
        raise ValueError(
            f"the cost embedding {source!r} is of a model with another tokenizer of the same size: its rows are those "
            "of other tokens; take it from a model with the same tokenizer."
        )


def _read_array(source: str) -> Tensor:
    path = Path(source).expanduser()
    if not path.is_file():
        raise FileNotFoundError(f"no embedding file {source!r}; expected a .npy array of shape (vocabulary, width).")
    try:
        array = np.load(path, allow_pickle=False)
    except (ValueError, EOFError) as error:
        raise ValueError(f"{source!r} is no .npy array ({error}); write it with numpy.save.") from error
    if array.ndim != 2 or not np.isrealobj(array) or not np.issubdtype(array.dtype, np.number) or 0 in array.shape:
        raise ValueError(
            f"{source!r} has shape {array.shape} and dtype {array.dtype}, expected real numbers (vocabulary, width)."
        )
    wrong = np.flatnonzero(~np.isfinite(array).all(axis=1))
    if len(wrong):
        raise ValueError(
            f"{source!r} has NaN or infinity in {len(wrong)} of {len(array)} rows, the first is row {wrong[0]}; "
            "expected finite numbers (a row of zeros stands for a token without a meaning)."
        )
    return torch.as_tensor(array if array.dtype in (np.float32, np.float64) else array.astype(np.float32))


def read_sources(asked: Any) -> Sources:
    """The examples that the command line names.

    Called before a model is loaded, so that a wrong path is found at once.

    Args:
        asked: `TextArguments` or `CompareTextArguments`; the former have no test part.

    Raises:
        ValueError: not one of text, questions and a dataset, options that do not apply, or an invalid
            file.
        FileNotFoundError: a file does not exist.
    """
    options = {"text": "train_text", "questions": "train_questions", "dataset": "dataset_name"}
    kinds = [kind for kind, option in options.items() if getattr(asked, option, None)]
    if len(kinds) != 1:
        which = {0: "neither", 2: "both"}.get(len(kinds), "all")
        names = [f"--{options[kind]}" for kind in kinds] or ["--train_text", "--train_questions"]
        raise ValueError(
            f"got {which} of {' and '.join(names)}{'' if kinds else ' nor --dataset_name'}; give one of them, to name "
            "the training data."
        )
    (kind,) = kinds
    wrong = [f"--{name}" for name, default in _NOT_WITH[kind].items() if getattr(asked, name, default) != default]
    if wrong:
        raise ValueError(f"{', '.join(wrong)} cannot be combined with --{options[kind]}; leave it out.")
    if kind == "dataset":
        return _read_dataset(asked)
    read: dict[str, Callable[[str], list[Any]]] = {
        "text": lambda source: read_texts(source, text_column=asked.text_column),
        "questions": read_questions,
    }
    named = (getattr(asked, f"{part}_{kind}", None) for part in ("train", "validation", "test"))
    train, validation, test = (None if source is None else read[kind](source) for source in named)
    assert train is not None
    return Sources(kind, train, validation, test)


def _read_dataset(asked: Any) -> Sources:
    """The examples of --dataset_name, of one kind in all splits."""
    name, compares = asked.dataset_name, hasattr(asked, "test_fraction")
    parts = {
        part: read_examples(split, f"{name}, {part}", text_column=asked.text_column)
        for part, split in load_splits(name, asked.dataset_config_name).items()
        if part != "test" or compares
    }
    kinds = {(part.kind, part.separator) for part in parts.values()}
    if len(kinds) > 1:
        raise ValueError(f"the splits of the dataset {name!r} have different columns; give them the same.")
    ((kind, separator),) = kinds
    if compares and (kind == "chat" or separator != SEPARATOR):
        raise ValueError(
            f"compare takes a dataset of text, or of question and answer; {name!r} has "
            f"{'messages' if kind == 'chat' else 'prompt and completion'}: rename its columns, or use train."
        )
    if kind != "questions" and asked.train_on_question:
        raise ValueError(f"--train_on_question is for questions and prompts; the dataset {name!r} has none.")
    train, validation, test = (parts[part].rows if part in parts else None for part in PARTS)
    assert train is not None
    return Sources(kind, train, validation, test, separator)


def load_rows(
    tokenizer: Any, asked: Any, sources: Sources, *, encoder_decoder: bool = False
) -> (
    tuple[PackedBlocks, PackedBlocks | None, PackedBlocks | None]
    | tuple[AnsweredQuestions, AnsweredQuestions | None, list[Question]]
):
    """Rows to train and validate on, and the test: blocks or None for text, a list (perhaps empty) for questions.

    A part without a source of its own is a share of the training data: blocks from its end, or evenly spaced questions.

    Args:
        asked: as in `read_sources`.
        sources: what `read_sources` returned.
        encoder_decoder: whether the rows are for one; it takes questions alone.

    Raises:
        ValueError: nothing is left to train on, or text or chats for an encoder-decoder.
    """
    if encoder_decoder and sources.kind != "questions":
        raise ValueError(
            f"the model is an encoder-decoder, which reads questions and writes their answers, got {sources.kind}; "
            "give --train_questions, or a causal language model."
        )
    shares = {"validation": asked.validation_fraction, "test": getattr(asked, "test_fraction", 0.0)}
    if sources.kind == "chat":
        return *_chat_rows(tokenizer, asked, sources), []
    if sources.kind == "questions":
        train, validation, test = split_questions(sources, shares)
        rows = [
            AnsweredQuestions.from_questions(
                part,
                tokenizer,
                max_length=asked.block_size,
                train_on_question=asked.train_on_question,
                separator=sources.separator,
                encoder_decoder=encoder_decoder,
            )
            for part in (train, validation)
            if part
        ]
        return rows[0], rows[1] if validation else None, test
    own = {part: texts for part in shares if (texts := getattr(sources, part)) is not None}
    first, *cut = split_blocks(
        PackedBlocks.from_texts(sources.train, tokenizer, asked.block_size),
        **{f"{part}_fraction": 0.0 if part in own else share for part, share in shares.items()},
    )
    parts = {part: blocks if len(blocks) else None for part, blocks in zip(shares, cut, strict=True)}
    parts |= {part: PackedBlocks.from_texts(texts, tokenizer, asked.block_size) for part, texts in own.items()}
    return first, parts["validation"], parts["test"]


def _chat_rows(tokenizer: Any, asked: Any, sources: Sources) -> tuple[ChatRows, ChatRows | None]:
    """Conversations to train and to validate on; without a source of their own the latter are evenly spaced."""
    chats = sources.train
    check_fraction("--validation_fraction", asked.validation_fraction)
    cut = asked.validation_fraction if sources.validation is None else 0
    taken = set(spread(range(len(chats)), max(1, round(cut * len(chats))))) if cut else set()
    parts: list[list[Chat]] = [[chat for i, chat in enumerate(chats) if (i in taken) == held] for held in (False, True)]
    if sources.validation is not None:
        parts[1] = sources.validation
    if not parts[0]:
        raise ValueError(
            f"the {len(chats)} conversations leave none to train on; give more of them, or --validation_fraction 0."
        )
    train, validation = (
        ChatRows.from_chats(part, tokenizer, max_length=asked.block_size) if part else None for part in parts
    )
    assert train is not None
    return train, validation


def split_questions(
    sources: Sources, shares: dict[str, float]
) -> tuple[list[Question], list[Question], list[Question]]:
    """Training, validation and test questions; a part that `sources` does not have is taken from the training part.

    Such a part is a share of all its questions, evenly spaced because files are often sorted by kind. Questions
    of equal text stay together: no part has a question of another.
    """
    rest = sources.train
    left = texts = list(dict.fromkeys(question.question for question in rest))
    parts = []
    for part, share in shares.items():
        check_fraction(f"--{part}_fraction", share)
        if (questions := getattr(sources, part)) is not None:
            parts.append(questions)
            continue
        taken = set(spread(left, max(1, round(share * len(texts))))) if share and left else set()
        parts.append([question for question in rest if question.question in taken])
        rest = [question for question in rest if question.question not in taken]
        left = [text for text in left if text not in taken]
    if not rest:
        there = "1 different question" if len(texts) == 1 else f"{len(texts)} different questions"
        fractions = " and ".join(f"--{part}_fraction {share}" for part, share in shares.items())
        raise ValueError(f"the {there} leave none to train on, with {fractions}; give more questions, or a share of 0.")
    return rest, parts[0], parts[1]


def number_share(rows: PackedBlocks | AnsweredQuestions, values: Float[Tensor, " vocab"], objective: str) -> str:
    """One line that says how many of the trained tokens are numbers (tokens whose value is not NaN).

    Raises ValueError if none is: the objective would be another one.
    """
    numbers, labels = count_labels(rows, ~values.isnan())
    if numbers == 0:
        advice = (
            "name other questions, or add --train_on_question if the numbers are in the questions"
            if isinstance(rows, AnsweredQuestions) and not rows.train_on_question
            else "use training data with numbers"
        )
        same = "emo" if Sum.of(parse_objective(objective)).cost_kind == "mixed" else "mle"
        raise ValueError(
            f"none of the {labels} tokens that are trained on is a number, so {objective} would equal {same}; "
            f"{advice}, or take {same}."
        )
    return f"{numbers} of the {labels} tokens that are trained on are numbers ({numbers / labels:.1%})"
