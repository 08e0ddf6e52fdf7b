"""The task of in_context.yaml for lm-evaluation-harness: texts are classified by a model that is shown labelled ones.

A prompt is made of demonstrations, the most similar last, and the text with one of the labels. Labels are compared by

    prompt        the mean nll of the whole prompt, demonstrations included (the EMO paper's protocol)
    label         the mean nll of the label's own tokens, given all before them
    calibrated    the same, minus that after a text without content ("N/A"), with the same demonstrations

and the accuracies are beside the ones of the most frequent label (majority) and of a guess (chance). The harness gives
the log-likelihoods of whole strings: the prompts, and the same without a label, whose difference belongs to the label.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from benchmarks.paper.data.labelled import LabelledText, read_labelled_texts
from benchmarks.paper.data.questions import spread

WITHOUT_CONTENT = "N/A"
logger = logging.getLogger(__name__)


def load(
    *,
    pretrained: str,
    texts: str,
    train: str | None = None,
    labels: Mapping[str, str] | None = None,
    num_texts: int | None = None,
    demonstrations: int = 8,
    **_: Any,
) -> dict[str, Any]:
    """Return the split "test", with the strings that are scored and how many tokens they have.

    Args:
        pretrained: the model, whose tokenizer and context the prompts have to fit: demonstrations are left out until
            they do, the least similar first.
        texts: labelled texts, in a format of `read_labelled_texts`.
        train: those that demonstrations are taken from; by default what `num_texts`, evenly spaced, leave.
        labels: the candidates, each with its name in prompts; by default the labels of `train`, as they are.

    Raises:
        ValueError: no text to show, fewer than two labels, or no text that fits the context.
    """
    from datasets import Dataset
    from transformers import AutoConfig, AutoTokenizer

    everything = read_labelled_texts(texts, labels=labels)
    chosen = range(len(everything)) if num_texts is None else spread(range(len(everything)), num_texts)
    test = [everything[i] for i in chosen]
    rest = [item for i, item in enumerate(everything) if i not in set(chosen)]
    shown = rest if train is None else read_labelled_texts(train, labels=labels)
    names = list(labels.values()) if labels is not None else sorted({item.label for item in shown})
    if not shown or len(set(names)) < 2:
        raise ValueError(f"{len(shown)} texts with the labels {names} can be shown; name others, or fewer num_texts.")
    tokenizer = AutoTokenizer.from_pretrained(pretrained)
    limit = getattr(AutoConfig.from_pretrained(pretrained), "max_position_embeddings", None) or 10**9
    docs, cut = [], 0
    for item, near in zip(test, nearest([item.text for item in test], shown, demonstrations), strict=True):
        for first in range(len(near) + 1):
            choices = strings(item.text, [shown[i] for i in near[first:]], names)
            lengths = [len(ids) for ids in tokenizer(choices, add_special_tokens=False)["input_ids"]]
            if max(lengths) < limit:  # a token begins each of them
                cut += first > 0
                docs.append({"label": item.label, "labels": names, "choices": choices, "tokens": lengths})
                break
    if not docs:
        raise ValueError(f"each of the {len(test)} texts has more tokens than the context of {limit}; shorten them.")
    logger.warning(
        "%d of %d texts exceed the context and are left out, %d have fewer demonstrations", len(test) - len(docs),
        len(test), cut,
    )  # fmt: skip
    most = Counter(doc["label"] for doc in docs).most_common(1)[0][0]
    return {"test": Dataset.from_list([doc | {"majority": most} for doc in docs])}


def strings(text: str, shown: Sequence[LabelledText], labels: Sequence[str]) -> list[str]:
    """Return the text with each label after the demonstrations, and with none; and the same without content."""
    before = "".join(f"Text: {item.text}\nLabel: {item.label}\n\n" for item in shown)
    stems = [f"{before}Text: {one}\nLabel:" for one in (text, WITHOUT_CONTENT)]
    return [stem + end for stem in stems for end in (*(f" {label}" for label in labels), "")]


def nearest(queries: Sequence[str], train: Sequence[LabelledText], count: int) -> list[list[int]]:
    """Return the positions of the texts with the most similar words (tf-idf) for each query, the nearest last.

    A text that equals the query, up to case and blanks, is not shown.
    """
    from sklearn.feature_extraction.text import TfidfVectorizer

    vectorizer = TfidfVectorizer(sublinear_tf=True)
    vectors = vectorizer.fit_transform([item.text for item in train])
    similarity = np.asarray((vectorizer.transform(queries) @ vectors.T).todense())
    texts = np.array([_plain(item.text) for item in train])
    orders = np.argsort(-similarity, axis=1, kind="stable")
    return [
        order[texts[order] != _plain(query)][:count][::-1].tolist()
        for query, order in zip(queries, orders, strict=True)
    ]  # fmt: skip


def _plain(text: str) -> str:
    return " ".join(text.lower().split())


def scores(doc: Mapping[str, Any], results: Sequence[tuple[float, bool]]) -> dict[str, float]:
    """Return whether the best label is the right one, by each comparison, for the mean over texts."""
    nll = -np.array([value for value, _ in results]).reshape(2, -1)  # (with the text or without, labels and none)
    tokens = np.array(doc["tokens"]).reshape(2, -1)
    whole = nll[0, :-1] / tokens[0, :-1]
    label, empty = (nll[:, :-1] - nll[:, -1:]) / (tokens[:, :-1] - tokens[:, -1:])
    by = {"prompt": whole, "label": label, "calibrated": label - empty}
    right = {name: float(doc["labels"][int(values.argmin())] == doc["label"]) for name, values in by.items()}
    return right | {"majority": float(doc["label"] == doc["majority"]), "chance": 1 / len(doc["labels"])}
