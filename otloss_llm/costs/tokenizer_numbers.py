"""Which tokens of a vocabulary are numbers, and their values, read by decoding each token.

The text of token i is what it adds after a letter a, `decode([a, i])` less `decode([a])`, so that a blank in front of
it survives: 'Ġ7' of a byte-level BPE and '▁7' of SentencePiece are both ' 7'. Its value is the value of the text with
blanks stripped; '7' and ' 7' are two tokens of one value. Digits are the ten of ASCII: full-width and other digits are
text.
"""

from __future__ import annotations

import math
import re
import string
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

import torch
from jaxtyping import Float
from torch import Tensor

from otloss._checks import check_floating

_NUMBER = re.compile(r"[+\-\u2212]?(?:[0-9]+(?:\.[0-9]+)?|\.[0-9]+)")
# A number beside punctuation: '=2', '$5', '(-3', '5.', '1,000', '1e5', 'boxed{7}'. Not ',000', a part of one.
_BESIDE = re.compile(
    r"(?:[^\w+\-\u2212]*[^\w+\-\u2212,.])?(?:\\?boxed\{)?"
    r"(?P<number>[+\-\u2212]?(?:[0-9]{1,3}(?P<comma>(?:,[0-9]{3})+)(?:\.[0-9]+)?|[0-9]+(?:\.[0-9]+)?|\.[0-9]+)"
    r"(?P<exponent>[eE][+\-]?[0-9]{1,2})?)[^\w]*"
)
_COMMA, _EXPONENT, _PUNCTUATION, _OTHER = "thousands comma", "exponent", "punctuation beside a number", "other"
_UNREADABLE = "\ufffd"  # stands for bytes that are not a whole character
_ASKED = ("get_vocab", "decode", "batch_decode")  # methods of a tokenizer, beside `all_special_ids`


def read_number(text: str) -> float | None:
    """Return the value of a text that is one number and nothing else, else None.

    Blanks around it do not count. A number is an optional sign (+, - or U+2212), ASCII digits, and digits after a point
    if there is one. '.5' is a number; '5.' is not, for the point mostly ends a sentence; nor are '1e5', '1,000', '²',
    '½', 'inf', digits of other scripts ('٣', full-width ones), or numbers beyond the largest float.

    Raises:
        TypeError: `text` is not a string.

    Example:
        >>> [read_number(text) for text in (" 7", "-0.5", "٣", "5.", "1e5")]
        [7.0, -0.5, None, None, None]
    """
    if not isinstance(text, str):
        raise TypeError(f"text is {text!r}, a {type(text).__name__}, expected a string.")
    text = text.strip()
    if not _NUMBER.fullmatch(text):
        return None
    value = float(text.replace("\u2212", "-")) + 0.0  # no -0
    return value if math.isfinite(value) else None


def _read_beside(text: str) -> tuple[str, float] | None:
    """Why a text with one number in it is not that number, and its value; None for other texts.

    Example:
        >>> [_read_beside(text) for text in (" 1,000", "=-2", "$1e5", "5.", "x7", ",000")]
        [('thousands comma', 1000.0), ('punctuation beside a number', -2.0), ('exponent', 100000.0), \
('punctuation beside a number', 5.0), None, None]
    """
    match = _BESIDE.fullmatch(text.strip())
    if match is None:
        return None
    value = float(match["number"].replace(",", "").replace("\u2212", "-"))
    if not math.isfinite(value):
        return None
    return _COMMA if match["comma"] else _EXPONENT if match["exponent"] else _PUNCTUATION, value


def token_texts(tokenizer: Any) -> list[str | None]:
    """Return what each token adds to a text, by id up to the largest; None for special tokens and ids without one.

    Bytes that are not a whole character give U+FFFD. The tokenizer is only asked to decode.

    Args:
        tokenizer: a `PreTrainedTokenizerBase` of transformers, or an object with its `get_vocab`, `decode`,
            `batch_decode` and `all_special_ids`.

    Raises:
        TypeError: not a tokenizer.

    Example:
        >>> from otloss_llm.data import train_bpe_tokenizer
        >>> tokenizer = train_bpe_tokenizer(["7 7 7 7"], 258)
        >>> tokenizer.convert_ids_to_tokens([0, 23, 257]), [token_texts(tokenizer)[i] for i in (0, 23, 257)]
        (['<|endoftext|>', '7', 'Ġ7'], [None, '7', ' 7'])
    """
    check_tokenizer(tokenizer)
    vocabulary = tokenizer.get_vocab()
    texts: list[str | None] = [None] * (max(vocabulary.values(), default=-1) + 1)
    ids = sorted(set(vocabulary.values()) - set(_special_ids(tokenizer)))
    if not ids:
        return texts
    anchor = _anchor(tokenizer, vocabulary, ids)
    anchor_text, *decoded = _decode(tokenizer, [[anchor], *([anchor, token] for token in ids)])
    for token, text in zip(ids, decoded, strict=True):
        whole = text.startswith(anchor_text)
        texts[token] = text[len(anchor_text) :] if whole else _decode(tokenizer, [[token]])[0]
    return texts


@dataclass(frozen=True, eq=False, repr=False)
class NumberTokens:
    """The number tokens of a vocabulary, by id.

    Attributes:
        values: `(V,)` float64, NaN where a token is not a number.
        texts: `(V,)` what each token adds to a text; None for special, missing and padded ids.
        name: of the tokenizer, for messages.

    Raises:
        TypeError: `values` is not a floating tensor.
        ValueError: `values` are not one for each text.
    """

    values: Float[Tensor, " vocab"]
    texts: tuple[str | None, ...]
    name: str

    def __post_init__(self) -> None:
        check_floating("values", self.values)
        if self.values.shape != (len(self.texts),):
            raise ValueError(
                f"values have shape {tuple(self.values.shape)}, expected one for each text: ({len(self.texts)},)."
            )

    @classmethod
    def of(
        cls, tokenizer: Any, *, vocab_size: int | None = None, values: Mapping[int, float | None] | None = None
    ) -> Self:
        """Find the number tokens of a tokenizer; special tokens count only if `values` names them.

        Args:
            tokenizer: as in `token_texts`.
            vocab_size: rows of the model's head, where it is padded beyond the tokenizer; None for the tokenizer's own.
            values: `{id: value}` in place of what decoding finds; None or NaN for a token that is not to be a number.

        Raises:
            TypeError: not a tokenizer.
            ValueError: a `vocab_size` below the largest id, ids that the tokenizer does not have, infinite values, a
                tokenizer without number tokens.

        Example:
            >>> from otloss_llm.data import train_bpe_tokenizer
            >>> print(NumberTokens.of(train_bpe_tokenizer(["7 7 7 7"], 258), vocab_size=264).coverage())
            11 of 264 tokens are numbers: 10 values from 0 to 9
            by count of digits: 1: 11
            values of several tokens: 1, such as 7 by '7', ' 7'
        """
        texts = token_texts(tokenizer)
        name = str(getattr(tokenizer, "name_or_path", "") or type(tokenizer).__name__)
        size = _checked_size(vocab_size, len(texts), name)
        texts += [None] * (size - len(texts))
        numbers = {
            token: value for token, text in enumerate(texts) if text and (value := read_number(text)) is not None
        }
        numbers |= _checked_overrides({} if values is None else values, set(tokenizer.get_vocab().values()), name)
        token_values = torch.full((size,), math.nan, dtype=torch.float64, device="cpu")
        token_values[list(numbers)] = torch.tensor(list(numbers.values()), dtype=torch.float64, device="cpu")
        if token_values.isnan().all():
            shown = [text for text in texts if text and text.strip() and _UNREADABLE not in text]
            raise ValueError(
                f"the tokenizer {name} has no token that is a number; it has {_brief(shown, 8)}. Name "
                "the numbers with values={id: value}, or take a tokenizer with digits among its tokens."
            )
        return cls(token_values, tuple(texts), name)

    def coverage(self) -> Coverage:
        """Return which tokens were taken for numbers and which not, as a report to print."""
        ids = (~self.values.isnan()).nonzero().squeeze(-1).tolist()
        values: list[float] = self.values.tolist()
        digits = {i: sum(character.isdecimal() for character in self.texts[i] or "") for i in ids}
        sharing: dict[float, list[str]] = defaultdict(list)
        for i in ids:
            text = self.texts[i]
            sharing[values[i]].append(f"token {i}" if text is None else text)
        single = {values[i] for i in ids if digits[i] <= 1}
        return Coverage(
            vocabulary=len(values),
            numbers=len(ids),
            distinct=len(sharing),
            lowest=min(sharing, default=math.nan),
            highest=max(sharing, default=math.nan),
            by_length=dict(sorted(Counter(digits.values()).items())),
            shared={value: tuple(texts) for value, texts in sorted(sharing.items()) if len(texts) > 1},
            left_out=tuple(
                (i, text)
                for i, text in enumerate(self.texts)
                if text and math.isnan(values[i]) and any(character.isnumeric() for character in text)
            ),
            digits_missing=tuple(digit for digit in range(10) if digit not in single),
        )

    def __repr__(self) -> str:
        return f"NumberTokens({self.name}, {int((~self.values.isnan()).sum())} numbers among {len(self.texts)} tokens)"


@dataclass(frozen=True)
class Coverage:
    """Which tokens of a vocabulary were taken for numbers; `print` shows it.

    Tokens with digits that are not numbers are text to the loss. `suggested` has values for those that are one number
    beside punctuation ('=2', '$5', '5.', '1,000', '1e5', 'boxed{7}'); `NumberCost.from_tokenizer(tokenizer,
    values=coverage.suggested)` makes them numbers.

    Attributes:
        vocabulary: tokens, padded ids included.
        numbers: those that are numbers.
        distinct: how many values they have.
        lowest: the smallest value, NaN without numbers.
        highest: the largest value, NaN without numbers.
        by_length: how many number tokens there are, by count of digits; 0 for a word that an override made a number.
        shared: values that several tokens have, with the texts of these.
        left_out: ids and texts of tokens that hold a digit or another numeric character and are not numbers.
        digits_missing: digits of 0 to 9 without a token of their own.
        missed: the ids in `left_out`, by what keeps each from being a number.
        suggested: values for tokens among them that have one number beside punctuation, by id.
    """

    vocabulary: int
    numbers: int
    distinct: int
    lowest: float
    highest: float
    by_length: dict[int, int]
    shared: dict[float, tuple[str, ...]]
    left_out: tuple[tuple[int, str], ...]
    digits_missing: tuple[int, ...]

    @property
    def missed(self) -> dict[str, tuple[int, ...]]:
        groups: dict[str, list[int]] = {reason: [] for reason in (_COMMA, _EXPONENT, _PUNCTUATION, _OTHER)}
        for token, text in self.left_out:
            read = _read_beside(text)
            groups[_OTHER if read is None else read[0]].append(token)
        return {reason: tuple(ids) for reason, ids in groups.items() if ids}

    @property
    def suggested(self) -> dict[int, float]:
        return {token: read[1] for token, text in self.left_out if (read := _read_beside(text)) is not None}

    def __str__(self) -> str:
        lines = [
            f"{self.numbers} of {self.vocabulary} tokens are numbers: "
            f"{self.distinct} values from {_plain(self.lowest)} to {_plain(self.highest)}",
            "by count of digits: " + ", ".join(f"{length}: {count}" for length, count in self.by_length.items()),
        ]
        if self.shared:
            nearest = sorted(self.shared, key=abs)[:3]
            examples = "; ".join(f"{_plain(value)} by {_brief(self.shared[value], 4)}" for value in nearest)
            lines.append(f"values of several tokens: {len(self.shared)}, such as {examples}")
        if self.left_out:
            share = len(self.left_out) / (len(self.left_out) + self.numbers)
            lines.append(f"tokens with digits that are not numbers: {len(self.left_out)} ({share:.0%} of both)")
            texts = dict(self.left_out)
            for reason, ids in self.missed.items():
                lines.append(f"  {reason}: {len(ids)}, such as {_brief([texts[i] for i in ids], 6)}")
        if self.suggested:
            lines.append(
                f"make {len(self.suggested)} of them numbers: "
                "NumberCost.from_tokenizer(tokenizer, values=coverage.suggested)"
            )
        if self.digits_missing:
            lines.append(f"digits without a token of their own: {', '.join(map(str, self.digits_missing))}")
        return "\n".join(lines)


def tokenizer_of(processor: Any) -> Any:
    """Return the tokenizer of a processor, as of text and images; a tokenizer as it is, which may have an engine."""
    return processor if hasattr(processor, "get_vocab") else getattr(processor, "tokenizer", processor)


def check_tokenizer(tokenizer: Any) -> None:
    """Raise TypeError if this is no tokenizer, as the processor of a model of images or speech, which has one."""
    missing = [name for name in (*_ASKED, "all_special_ids") if not hasattr(tokenizer, name)]
    if missing or isinstance(tokenizer, type):
        kind, instead = type(tokenizer).__name__, "AutoTokenizer.from_pretrained(name)"
        if hasattr(tokenizer, "tokenizer"):
            description, instead = f"a {kind}", "its attribute `tokenizer`"
        else:
            description = f"{_brief([tokenizer], 1)} of {kind}"
        raise TypeError(f"tokenizer is {description}, expected an instance of a tokenizer of transformers: {instead}.")


def _special_ids(tokenizer: Any) -> list[int]:
    """Return those with a role (end, padding ...), and those added as special without one."""
    added: Mapping[int, Any] = getattr(tokenizer, "added_tokens_decoder", {})
    return [*tokenizer.all_special_ids, *(token for token, kind in added.items() if kind.special)]


def _decode(tokenizer: Any, rows: list[list[int]]) -> list[str]:
    decoded: list[str] = tokenizer.batch_decode(rows, skip_special_tokens=False, clean_up_tokenization_spaces=False)
    return decoded


def _anchor(tokenizer: Any, vocabulary: Mapping[str, int], ids: list[int]) -> int:
    """A token to decode after: decoders drop the blank in front of a text, and join pieces of a word to what is there.

    A letter by choice, for nothing is joined to punctuation or to part of a character as it is to a word.
    """
    allowed = set(ids)
    for letter in string.ascii_lowercase:
        if vocabulary.get(letter) in allowed:
            return vocabulary[letter]
    alone = dict(zip(ids, _decode(tokenizer, [[token] for token in ids]), strict=True))
    words = [token for token, text in alone.items() if text.strip().isalpha()]
    visible = [token for token, text in alone.items() if text.strip() and _UNREADABLE not in text]
    return (words or visible or ids)[0]


def _checked_size(vocab_size: int | None, minimum: int, name: str) -> int:
    if vocab_size is not None and vocab_size < minimum:
        raise ValueError(
            f"vocab_size is {vocab_size}, but the tokenizer {name} has ids up to {minimum - 1}: expected at least "
            f"{minimum}. Take the model's own tokenizer, or model.resize_token_embeddings(len(tokenizer))."
        )
    return minimum if vocab_size is None else vocab_size


def _checked_overrides(values: Mapping[int, float | None], ids: set[int], name: str) -> dict[int, float]:
    checked = {token: math.nan if value is None else float(value) for token, value in values.items()}
    for token, value in checked.items():
        if token not in ids:
            raise ValueError(
                f"values names token {token!r}, expected one of the {len(ids)} ids of the tokenizer {name}; "
                "tokenizer.convert_tokens_to_ids(token) gives the id of a token."
            )
        if math.isinf(value):
            raise ValueError(f"values[{token}] is infinite, expected a finite number, or None for a token without one.")
    return checked


def _plain(value: float) -> str:
    return f"{value:.12g}"


def _brief(items: Any, limit: int) -> str:
    """Return the first few, each cut short, on one line; how often, where several are equal."""
    times = Counter(map(repr, items))
    texts = [
        (text if len(text) <= 40 else text[:37] + "...") + (f" x{n}" if n > 1 else "") for text, n in times.items()
    ]
    return ", ".join([*texts[:limit], *(["..."] if len(texts) > limit else [])]) or "none"
