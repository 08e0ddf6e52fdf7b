"""How varied a set of texts is, by its n-grams, and how much it shares with references.

    distinct_n = distinct n-grams of the corpus / n-grams of the corpus

    ROUGE-1 = 2 shared words / (words of the text + words of the reference)
    ROUGE-L = the same with the longest common subsequence for the shared words

distinct_n (Li et al. 2016, arXiv 1510.03055) falls as a corpus grows: compare corpora of about one size. ROUGE (Lin
2004) is the F1 of the package rouge-score without stemming: words are runs of a-z and 0-9 in lower case.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Sequence

Tokenize = Callable[[str], Sequence[Hashable]]


def distinct_n(texts: Iterable[str], n: int, *, tokenize: Tokenize = str.split) -> float:
    """Return the share of distinct n-grams among all n-grams of the texts, in (0, 1]; n-grams do not cross texts.

    Raises ValueError if no text has `n` tokens.
    """
    grams = _ngrams(texts, n, tokenize)
    return len(set().union(*grams)) / sum(map(len, grams))


def rouge(texts: Sequence[str], references: Sequence[str]) -> tuple[float, float]:
    """Return ROUGE-1 and ROUGE-L, each the mean F1 over the texts, in [0, 1].

    Raises ValueError if there is not one reference for each text, or no text.
    """
    if not texts or len(texts) != len(references):
        raise ValueError(f"there are {len(texts)} texts and {len(references)} references, expected one each, or more.")
    totals = [0.0, 0.0]
    for text, reference in zip(texts, references, strict=True):
        a, b = (re.findall("[a-z0-9]+", one.lower()) for one in (text, reference))
        shared = sum((Counter(a) & Counter(b)).values()), _common_subsequence(a, b)
        totals = [total + 2 * count / max(1, len(a) + len(b)) for total, count in zip(totals, shared, strict=True)]
    return totals[0] / len(texts), totals[1] / len(texts)


def _common_subsequence(a: Sequence[str], b: Sequence[str]) -> int:
    """Return the length of the longest common subsequence."""
    row = [0] * (len(b) + 1)
    for word in a:
        before = row
        row = [0]
        for j, other in enumerate(b):
            row.append(before[j] + 1 if word == other else max(before[j + 1], row[j]))
    return row[-1]


def _ngrams(texts: Iterable[str], n: int, tokenize: Tokenize) -> list[list[tuple[Hashable, ...]]]:
    """Return the n-grams of each text."""
    if n < 1:
        raise ValueError(f"n is {n}, expected 1 or more.")
    if isinstance(texts, str):
        raise TypeError("texts is one string, expected a list of them; pass [text].")
    tokens = [tokenize(text) for text in texts]
    grams = [[tuple(text[i : i + n]) for i in range(len(text) - n + 1)] for text in tokens]
    if not any(grams):
        longest = max(map(len, tokens), default=0)
        raise ValueError(
            f"none of the {len(tokens)} texts has the {n} tokens of an n-gram, the longest has {longest}; "
            f"give longer texts or a smaller n."
        )
    return grams
