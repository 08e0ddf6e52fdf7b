"""How varied a set of texts is, by its n-grams.

    distinct_n = distinct n-grams of the corpus / n-grams of the corpus
    repetition = 1 - sum over texts of distinct n-grams / sum over texts of n-grams

distinct_n (Li et al. 2016, arXiv 1510.03055) falls as a corpus grows: compare corpora of about one size.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence

Tokenize = Callable[[str], Sequence[Hashable]]


def distinct_n(texts: Iterable[str], n: int, *, tokenize: Tokenize = str.split) -> float:
    """The share of distinct n-grams among all n-grams of the texts, in (0, 1]; n-grams do not cross texts.

    Raises ValueError if no text has `n` tokens.

    >>> distinct_n(["a b a b", "a b"], 2)
    0.5
    """
    grams = _ngrams(texts, n, tokenize)
    return len(set().union(*grams)) / sum(map(len, grams))


def repetition(texts: Iterable[str], n: int, *, tokenize: Tokenize = str.split) -> float:
    """The share of n-grams that occurred before in the same text, in [0, 1), over all n-grams of the texts.

    Raises ValueError if no text has `n` tokens.

    >>> repetition(["a b a b", "a b"], 2)
    0.25
    """
    grams = _ngrams(texts, n, tokenize)
    return 1 - sum(len(set(text)) for text in grams) / sum(map(len, grams))


def _ngrams(texts: Iterable[str], n: int, tokenize: Tokenize) -> list[list[tuple[Hashable, ...]]]:
    """The n-grams of each text."""
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
