"""Classification by a causal language model that is shown examples: demonstrations, retrieved for each text.

A prompt is made of demonstrations, most similar last, and the text with one of the labels. Labels are compared by

    prompt        the mean nll of the whole prompt, demonstrations included (the EMO paper's protocol)
    label         the mean nll of the label's own tokens, given all before them
    calibrated    the same, minus that after a text without content ("N/A"), with the same demonstrations
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks.paper.data.blocks import opening_ids
from benchmarks.paper.data.labelled import LabelledText
from benchmarks.paper.data.questions import spread
from benchmarks.paper.evaluation.likelihood import sequence_nll
from otloss_llm.evaluation.perplexity import context_length

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

SCORINGS, RETRIEVERS = ("prompt", "label", "calibrated"), ("tfidf", "bm25", "none")
TEMPLATE = "Text: {text}\nLabel: {label}"
WITHOUT_CONTENT = "N/A"
K1, B = 1.5, 0.75  # of BM25


@dataclass(frozen=True)
class InContextScores:
    """Accuracy, and what to compare it with, of the texts that fit the context.

    Attributes:
        accuracy, standard_error: share of right labels, and the error of that share.
        majority: accuracy of always saying the most frequent label of the test texts.
        chance: 1 / number of labels.
        predictions: the label given to each text; None for those that are left out.
        removed: demonstrations that another one replaced because they are the test text itself.
        shortened: texts for which demonstrations were dropped to fit the context, the least similar first.
        left_out: texts that exceed the context without any demonstration.
    """

    accuracy: float
    standard_error: float
    majority: float
    chance: float
    predictions: tuple[str | None, ...]
    removed: int
    shortened: int
    left_out: int


def classify_in_context(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    test: Sequence[LabelledText],
    train: Sequence[LabelledText],
    *,
    labels: Sequence[str] | None = None,
    demonstrations: int = 8,
    retriever: str = "tfidf",
    scoring: str = "prompt",
    template: str = TEMPLATE,
    batch_size: int = 8,
    progress: bool = True,
) -> InContextScores:
    """Return the accuracy of a model that reads the nearest training texts before each test text.

    Args:
        test, train: texts with labels; the demonstrations come from `train`.
        labels: the candidates; by default all labels of `train`, in alphabetical order.
        demonstrations: texts shown before each test text; 0 shows none.
        retriever: how they are found: "tfidf" (cosine), "bm25", or "none" (the same ones for each text, evenly spaced).
        scoring: how candidates are compared; see the module.
        template: with {text} and {label}, the label last.

    Raises:
        ValueError: a setting or template that is not valid, a label that is not a candidate, no text, or no
            text that fits the context without any demonstration.
    """
    candidates = sorted({item.label for item in train}) if labels is None else list(labels)
    _check(test, train, candidates, demonstrations, retriever, scoring, template)
    nearest, removed = retrieve([item.text for item in test], train, demonstrations, retriever)
    limit = context_length(model) or 10**9
    sequences: list[list[int]] = []
    prefixes: list[int] = []
    shortened, fitting = 0, []
    for item, shown in zip(test, nearest, strict=True):
        rows, dropped = _prompts(tokenizer, item.text, [train[i] for i in shown], candidates, scoring, template, limit)
        shortened += dropped
        fitting.append(bool(rows))
        sequences += [ids for ids, _ in rows]
        prefixes += [prefix for _, prefix in rows]
    if not sequences:
        raise ValueError(
            f"each of the {len(test)} texts has more tokens with its label than the context of {limit}; shorten them."
        )
    scores = sequence_nll(model, sequences, prefix_lengths=prefixes, batch_size=batch_size, progress=progress)
    mean = (scores.nll / scores.tokens).numpy().reshape(sum(fitting), -1)
    count = len(candidates)
    if scoring == "calibrated":
        mean = mean[:, :count] - mean[:, count:]
    best = iter(mean.argmin(1))
    predictions = tuple(candidates[next(best)] if fits else None for fits in fitting)
    expected = [item.label for item, fits in zip(test, fitting, strict=True) if fits]
    right = np.mean(
        [prediction == item.label for prediction, item in zip(predictions, test, strict=True) if prediction is not None]
    )
    most = Counter(expected).most_common(1)[0][1]
    error = math.sqrt(right * (1 - right) / len(expected))
    return InContextScores(
        float(right), error, most / len(expected), 1 / count, predictions, removed, shortened, fitting.count(False)
    )


def _prompts(
    tokenizer: Any, text: str, shown: list[LabelledText], candidates: list[str], scoring: str, template: str, limit: int
) -> tuple[list[tuple[list[int], int]], bool]:
    """Token ids and prefix lengths for each candidate, with as many demonstrations as fit; whether any was dropped.

    No ids if the text does not fit alone.
    """
    before, after = template.split("{label}")
    for kept in range(len(shown), -1, -1):
        demonstrations_text = "".join(
            before.replace("{text}", item.text) + item.label + after + "\n\n" for item in shown[len(shown) - kept :]
        )
        texts = [text, WITHOUT_CONTENT] if scoring == "calibrated" else [text]
        rows = []
        for one in texts:
            prompt = demonstrations_text + before.replace("{text}", one)
            opening = opening_ids(tokenizer)
            start = opening + _ids(tokenizer, prompt.rstrip())
            for candidate in candidates:
                ids = opening + _ids(tokenizer, prompt + candidate + after.rstrip())
                shared = next((i for i, (a, b) in enumerate(zip(start, ids, strict=False)) if a != b), len(start))
                rows.append((ids, 1 if scoring == "prompt" else max(1, min(shared, len(ids) - 1))))
        if max(len(ids) for ids, _ in rows) <= limit:
            return rows, kept < len(shown)
    return [], False


def _ids(tokenizer: Any, text: str) -> list[int]:
    ids: list[int] = tokenizer(text, add_special_tokens=False, truncation=False, verbose=False)["input_ids"]
    return ids


def retrieve(
    queries: Sequence[str], train: Sequence[LabelledText], count: int, retriever: str
) -> tuple[list[list[int]], int]:
    """Positions of the nearest training texts for each query, the nearest last; and how many were left out as equal."""
    if count == 0:
        return [[] for _ in queries], 0
    positions: dict[str, set[int]] = {}
    for i, item in enumerate(train):
        positions.setdefault(_plain(item.text), set()).add(i)
    if retriever == "none":
        every = range(len(train))  # and more between them, in place of the text itself
        orders = [list(dict.fromkeys([*spread(every, count), *spread(every, 2 * count)]))] * len(queries)
    else:
        scores = similarities(queries, [item.text for item in train], retriever)
        orders = np.argsort(-scores, axis=1, kind="stable").tolist()
    retrieved, removed = [], 0
    for query, order in zip(queries, orders, strict=True):
        equal = positions.get(_plain(query), set())
        removed += sum(int(i) in equal for i in order[:count])
        retrieved.append([int(i) for i in order[: count + len(equal)] if int(i) not in equal][:count][::-1])
    return retrieved, removed


def _plain(text: str) -> str:
    return " ".join(text.lower().split())


def similarities(queries: Sequence[str], texts: Sequence[str], retriever: str) -> np.ndarray:
    from sklearn.feature_extraction.text import CountVectorizer, TfidfVectorizer

    if retriever == "tfidf":
        vectorizer = TfidfVectorizer(sublinear_tf=True)
        of_texts = vectorizer.fit_transform(texts)
        return np.asarray((vectorizer.transform(queries) @ of_texts.T).todense())
    counter = CountVectorizer()
    counts = counter.fit_transform(texts).tocsc().astype(np.float64)
    lengths = np.asarray(counts.sum(1)).ravel()
    words = np.diff(counts.indptr)
    inverse = np.log1p((len(texts) - words + 0.5) / (words + 0.5))
    # tf (k1 + 1) / (tf + k1 (1 - b + b length / mean length)), entry by entry
    rows = counts.indices
    counts.data = counts.data * (K1 + 1) / (counts.data + K1 * (1 - B + B * lengths[rows] / lengths.mean()))
    weighted = counts.multiply(inverse).tocsr()
    return np.asarray((counter.transform(queries).astype(bool).astype(np.float64) @ weighted.T).todense())


def _check(
    test: Sequence[LabelledText], train: Sequence[LabelledText], candidates: list[str], demonstrations: int,
    retriever: str, scoring: str, template: str,
) -> None:  # fmt: skip
    if not test or (not train and demonstrations):
        raise ValueError(f"there are {len(test)} test and {len(train)} training texts, expected at least one of each.")
    if len(set(candidates)) < 2:
        raise ValueError(f"the labels are {candidates}, expected at least two different ones.")
    unknown = sorted({item.label for item in (*test, *train)} - set(candidates))
    if unknown:
        raise ValueError(f"the labels {unknown[:5]} are not among the candidates {candidates}; add them to labels=.")
    if demonstrations < 0:
        raise ValueError(f"demonstrations is {demonstrations}, expected 0 or more.")
    if retriever not in RETRIEVERS or scoring not in SCORINGS:
        raise ValueError(
            f"retriever is {retriever!r} and scoring {scoring!r}, expected one of {RETRIEVERS} and one of {SCORINGS}."
        )
    if template.count("{text}") != 1 or template.count("{label}") != 1 or "{text}" in template.split("{label}")[1]:
        raise ValueError(f"template is {template!r}, expected {{text}} and then {{label}}, each once.")
