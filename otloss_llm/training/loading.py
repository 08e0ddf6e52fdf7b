"""What a command line names: the cost of an objective, and rows to train, validate and test on."""

from __future__ import annotations

import logging
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
from otloss_llm.data.chats import Chat, ChatRows, read_chats
from otloss_llm.data.questions import AnsweredQuestions, Question, count_labels, read_questions, spread
from otloss_llm.models.heads import find_head
from otloss_llm.models.loading import load_model, load_tokenizer
from otloss_llm.objectives import EMO, Objective, cost_kind, has_default_clip, parse_objective

logger = logging.getLogger(__name__)

COST_SOURCES = ("all-but-the-top", "raw", "as-is", "random", "shuffled")

Documents = dict[str, list[str] | None]  # of "train", "validation", "test"; None without a source of its own

# Options with their defaults: one that equals its default counts as not given.
_TEXT_ONLY = {"validation_text": None, "test_text": None, "text_column": "text"}
_QUESTIONS_ONLY = {"validation_questions": None, "test_questions": None, "train_on_question": False}


def chosen_objective(name: str, recorded: dict[str, Any]) -> Objective:
    """The objective of this name; where the name leaves EMO's clip to the library, the clip of the recorded run.

    Args:
        recorded: the settings in the run's folder, empty for a new one. Runs of earlier versions had no clip.
    """
    unclipped = EMO(ratio_clip=None)
    if has_default_clip(name) and recorded.get("objective") == repr(unclipped):
        logger.warning("this run was begun with %r and goes on so; a new folder would clip the ratio at 3", unclipped)
        return unclipped
    return parse_objective(name)


def chosen_embedding(source: str | None, recorded: dict[str, Any], *, key: str = "embedding") -> str:
    """The source of the embedding cost, as in `load_cost`; None is the library's choice, or what the run began with.

    Args:
        recorded: the settings in the run's folder, empty for a new one; `key` names the source there.
    """
    if source is None and recorded.get(key) == "raw":
        logger.warning(
            "this run was begun with the rows of the head as they are and goes on so; a new folder would use them "
            "without their leading directions"
        )
        return "raw"
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
        seed: of the random and shuffled controls.
        kind, tokenizer, numbers: as in `otloss_llm.costs.choice.choose_cost`; the kind "number" reads no embedding. The
            tokenizer is compared with that of a model whose head is taken.

    Raises:
        ValueError: the embedding has another vocabulary (or other tokens) or is not a (V, d) array of finite numbers,
            or the tokenizer has no number tokens.
        FileNotFoundError: there is no such file or model.
    """
    return choose_cost(
        kind, embedding=lambda: _load_embedding(source, model, seed, tokenizer), tokenizer=tokenizer,
        vocab_size=find_head(model).weight.shape[0], numbers=numbers,
    )  # fmt: skip


def _load_embedding(source: str | None, model: Any, seed: int, tokenizer: Any) -> EmbeddingCost:
    generator = torch.Generator().manual_seed(seed)
    source = COST_SOURCES[0] if source is None else source
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


def read_sources(asked: Any) -> Documents | None:
    """The documents of the named text; None for questions and conversations, which are only checked here.

    Called before a model is loaded, so that a wrong path is found at once.

    Args:
        asked: `TextArguments` or `CompareTextArguments`; the former have no test part.

    Raises:
        ValueError: not one of text, questions and conversations, options that do not apply, or an invalid file.
        FileNotFoundError: a file does not exist.
    """
    kinds = [kind for kind in ("text", "questions", "chat") if getattr(asked, f"train_{kind}", None)]
    if len(kinds) != 1:
        given = {0: "neither", 2: "both"}.get(len(kinds), "all")
        raise ValueError(
            f"got {given} of --train_text and --train_questions (or --train_chat); give one of them, to name the "
            "training data."
        )
    (kind,) = kinds
    left_out: dict[str, dict[str, Any]] = {
        "text": _QUESTIONS_ONLY,
        "questions": _TEXT_ONLY,
        "chat": _TEXT_ONLY | _QUESTIONS_ONLY,
    }
    wrong = [f"--{name}" for name, default in left_out[kind].items() if getattr(asked, name, default) != default]
    if wrong:
        raise ValueError(f"{', '.join(wrong)} cannot be combined with --train_{kind}; leave it out.")
    sources = {part: getattr(asked, f"{part}_{kind}", None) for part in ("train", "validation", "test")}
    if kind == "chat":
        read_chats(asked.train_chat)
        return None
    if kind == "questions":
        for source in filter(None, sources.values()):
            read_questions(source)
        return None
    return {
        part: None if source is None else read_texts(source, text_column=asked.text_column)
        for part, source in sources.items()
    }


def load_rows(
    tokenizer: Any, asked: Any, documents: Documents | None
) -> (
    tuple[PackedBlocks, PackedBlocks | None, PackedBlocks | None]
    | tuple[AnsweredQuestions, AnsweredQuestions | None, list[Question]]
):
    """Rows to train and validate on, and the test: blocks or None for text, a list (perhaps empty) for questions.

    A part without a source of its own is a share of the training data: blocks from its end, or evenly spaced questions.

    Args:
        asked: as in `read_sources`.
        documents: what `read_sources` returned.

    Raises:
        ValueError: nothing is left to train on.
    """
    shares = {"validation": asked.validation_fraction, "test": getattr(asked, "test_fraction", 0.0)}
    if getattr(asked, "train_chat", None):
        return *_chat_rows(tokenizer, asked), []
    if documents is None:
        sources = {part: getattr(asked, f"{part}_questions", None) for part in shares}
        train, validation, test = split_questions(asked.train_questions, sources, shares)
        rows = [
            AnsweredQuestions.from_questions(
                part, tokenizer, max_length=asked.block_size, train_on_question=asked.train_on_question
            )
            for part in (train, validation)
            if part
        ]
        return rows[0], rows[1] if validation else None, test
    assert documents["train"] is not None
    given = {part: texts for part, texts in documents.items() if part != "train" and texts is not None}
    first, *cut = split_blocks(
        PackedBlocks.from_texts(documents["train"], tokenizer, asked.block_size),
        **{f"{part}_fraction": 0.0 if part in given else share for part, share in shares.items()},
    )
    parts = {part: blocks if len(blocks) else None for part, blocks in zip(shares, cut, strict=True)}
    parts |= {part: PackedBlocks.from_texts(texts, tokenizer, asked.block_size) for part, texts in given.items()}
    return first, parts["validation"], parts["test"]


def _chat_rows(tokenizer: Any, asked: Any) -> tuple[ChatRows, ChatRows | None]:
    """Conversations to train and, evenly spaced among them, to validate on."""
    chats = read_chats(asked.train_chat)
    check_fraction("--validation_fraction", asked.validation_fraction)
    share = round(asked.validation_fraction * len(chats))
    taken = set(spread(range(len(chats)), max(1, share))) if asked.validation_fraction else set()
    parts: list[list[Chat]] = [[chat for i, chat in enumerate(chats) if (i in taken) == held] for held in (False, True)]
    if not parts[0]:
        raise ValueError(
            f"the {len(chats)} conversations of {asked.train_chat!r} leave none to train on; give more of them, or "
            "--validation_fraction 0."
        )
    train, validation = (
        ChatRows.from_chats(part, tokenizer, max_length=asked.block_size) if part else None for part in parts
    )
    assert train is not None
    return train, validation


def split_questions(
    train: str, sources: dict[str, str | None], shares: dict[str, float]
) -> tuple[list[Question], list[Question], list[Question]]:
    """Training, validation and test questions; a part without a file in `sources` is taken from `train`.

    Such a part is a share of all questions in `train`, evenly spaced because files are often sorted by kind. Questions
    of equal text stay together: no part has a question of another.
    """
    rest = read_questions(train)
    left = texts = list(dict.fromkeys(question.question for question in rest))
    parts = []
    for part, share in shares.items():
        check_fraction(f"--{part}_fraction", share)
        source = sources[part]
        if source is not None:
            parts.append(read_questions(source))
            continue
        taken = set(spread(left, max(1, round(share * len(texts))))) if share and left else set()
        parts.append([question for question in rest if question.question in taken])
        rest = [question for question in rest if question.question not in taken]
        left = [text for text in left if text not in taken]
    if not rest:
        there = "1 different question" if len(texts) == 1 else f"{len(texts)} different questions"
        given = " and ".join(f"--{part}_fraction {share}" for part, share in shares.items())
        raise ValueError(
            f"the {there} of {train!r} leave none to train on, with {given}; give more questions, or a share of 0."
        )
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
        same = "emo" if cost_kind(objective) == "mixed" else "mle"
        raise ValueError(
            f"none of the {labels} tokens that are trained on is a number, so {objective} would equal {same}; "
            f"{advice}, or take {same}."
        )
    return f"{numbers} of the {labels} tokens that are trained on are numbers ({numbers / labels:.1%})"
