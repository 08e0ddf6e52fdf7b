"""Answers that are numbers: extracted from texts, compared, and scored by their error.

For a question with the right value y and the predicted value p, s(v) = sign(v) log(1 + |v|):

    absolute error  |p - y|        relative error  |p - y| / max(|y|, 1)        log error  |s(p) - s(y)|
    right order of magnitude:  p = y, or p and y have the same sign and |log10(p / y)| < 1/2

An answer is taken from a text in one of three styles:

    gsm8k        the number after the first `####` that is followed by a number, else the line after the first `####`;
                 commas of thousands, currencies and marks of emphasis before it are ignored, as is the text after it
                 ('72.', '72 clips', '72 (see 1)'), unless it continues with a digit ('1 000', '10:30')
    mathematics  the whole text without blanks around it; compared character by character (for DeepMind's mathematics
                 dataset, where 1/2, 5, 6 or 2*sqrt(3) are answers too)
    last         the last number in the text, or a quotient written 'a/b' without blanks; compared by value

Numbers are decimal, in ASCII digits, with a sign ('-', '+', U+2212), commas of thousands and a decimal point; 72, 72.0
and $72 are equal. 'a/b' is a quotient, and has no value if b is 0. '1e-5' and '0x1F' are no numbers, nor are digits
after a letter ('x2') or texts of more than 300 characters.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from statistics import fmean, median

STYLES = ("gsm8k", "mathematics", "last")
MARK = "####"
LONGEST = 300  # characters; shorter numbers fit a float

_DIGITS = r"(?>[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?>\.[0-9]+)?|(?<![.0-9])\.[0-9]+"
_QUOTIENT = rf"(?>{_DIGITS})/(?>{_DIGITS})"
# No number begins in a word, after a decimal point or as an exponent; a sign after a word, a number or a bracket is a
# minus operator. Numbers joined by several slashes (1/2/2020) are no quotient.
_NUMBER = re.compile(
    r"(?P<sign>(?<![\w)\]}])[-+][$€£]?)?(?<!\w)(?<![0-9]\.)(?<![0-9.][eE][-+])"
    rf"(?P<size>(?<!\w/){_QUOTIENT}(?!/[0-9.])|(?>{_DIGITS}))(?![eE][-+]?[0-9])(?!(?<=(?<!\w)0)[xX][0-9A-Fa-f])"
)
_WHOLE = re.compile(rf"(?P<sign>[-+])?(?P<above>(?>{_DIGITS}))(?:/(?P<below>(?>{_DIGITS})))?")
# Before the number, marks of emphasis and currencies; after it, nothing that makes it part of another number.
_MARKED = re.compile(
    rf"[\s*_`(\\$€£]*+(?P<sign>[-+])?[\\$€£]*+(?P<size>{_QUOTIENT}|(?>{_DIGITS}))"
    r"(?!\s*[/:]?\s*[0-9]|[.,]+[0-9]|[eE][-+]?[0-9])"
)


def final_number(text: str) -> float | None:
    """Return the value of the last number in a text; None if there is no number."""
    answer = extract_answer(text, "last")
    value = None if answer is None else _value(answer)
    return None if value is None else float(value)


def extract_answer(text: str, style: str) -> str | None:
    """Return the answer in a text, in the style's plain form; None if it has no answer of this style.

    Raises ValueError for an unknown style.
    """
    if style == "mathematics":
        return text.strip() or None
    if style == "gsm8k":
        marked = [_marked(rest.partition("\n")[0]) for rest in text.split(MARK)[1:]]
        return next((line for line in marked if _value(line) is not None), marked[0] if marked else "") or None
    if style == "last":
        numbers = list(_NUMBER.finditer(_one_minus(text)))
        return _plain((numbers[-1]["sign"] or "") + numbers[-1]["size"]) if numbers else None
    raise ValueError(f"the answer style is {style!r}, expected one of {', '.join(STYLES)}.")


def style_of(answers: Sequence[str]) -> str:
    """Return the style of right answers: 'gsm8k' if all have text after a `####`, 'mathematics' if none has.

    Raises ValueError if only some have.
    """
    without = [number for number, answer in enumerate(answers) if extract_answer(answer, "gsm8k") is None]
    if without and len(without) < len(answers):
        raise ValueError(
            f"expected answer {without[0]} ({answers[without[0]][-40:]!r}) has nothing after a {MARK}, while "
            f"{len(answers) - len(without)} of {len(answers)} have; fix it, or choose the style (--answer_style) of "
            f"{', '.join(STYLES)}."
        )
    return "mathematics" if without else "gsm8k"


def answer_style(answers: Sequence[str], style: str | None = None) -> str:
    """`style`, or the style of the right answers; raises ValueError unless each has an answer of that style."""
    style = style_of(answers) if style is None else style
    for number, text in enumerate(answers):
        if extract_answer(text, style) is None:
            raise ValueError(
                f"expected answer {number} ({text[-40:]!r}) has no answer of the style {style!r}; choose another of "
                f"{', '.join(STYLES)}."
            )
    return style


def same_answer(predicted: str, expected: str, style: str) -> bool:
    """Return whether two texts give the same answer; False if one of them has no answer."""
    ours, right = extract_answer(predicted, style), extract_answer(expected, style)
    if ours is None or right is None:
        return False
    if style != "mathematics":
        values = _value(ours), _value(right)
        if None not in values:
            return values[0] == values[1]  # exact, as fractions
    return ours == right


@dataclass(frozen=True)
class NumberScores:
    """Scores of answers; shares in [0, 1], errors as in the module's formulas, None if they cover no question.

    Attributes:
        questions: their number.
        exact_match: share with the right answer (`same_answer`).
        numeric: share whose right answer is a number; the fields below cover only these.
        answered: share for which a number was predicted.
        number_accuracy: share with the right value; unanswered ones are wrong.
        order_of_magnitude_accuracy: share of the right order of magnitude.
        capped_relative_error: mean of min(relative error, 1), 1 if no number was predicted: bounded for extreme
            answers, and not improved by leaving answers out.
        mean_absolute_error, median_absolute_error, mean_relative_error, mean_log_error: over the answered questions
            only, so read them beside `answered`; one extreme answer can dominate the first and the third.
        by_kind: exact match of each kind of question.
    """

    questions: int
    exact_match: float
    numeric: float
    answered: float | None
    number_accuracy: float | None
    order_of_magnitude_accuracy: float | None
    capped_relative_error: float | None
    mean_absolute_error: float | None
    median_absolute_error: float | None
    mean_relative_error: float | None
    mean_log_error: float | None
    by_kind: dict[str, float]


def score_answers(
    predicted: Sequence[str], expected: Sequence[str], *, style: str, kinds: Sequence[str | None] | None = None
) -> NumberScores:
    """Return scores of predicted answers (whole texts) against right ones, in one style.

    Raises ValueError if their numbers differ or are 0, or a right answer has no answer of this style.
    """
    kinds = [None] * len(expected) if kinds is None else kinds
    if isinstance(predicted, str) or isinstance(expected, str):
        raise TypeError("predicted and expected are lists of texts, got one string; pass [text].")
    if not len(predicted) == len(expected) == len(kinds) or not len(expected):
        raise ValueError(
            f"there are {len(predicted)} predicted and {len(expected)} expected answers and {len(kinds)} kinds; "
            "give as many of each, at least one."
        )
    answer_style(expected, style)
    pairs = list(zip(predicted, expected, strict=True))
    right = [same_answer(ours, theirs, style) for ours, theirs in pairs]
    of_kind: dict[str, list[bool]] = {}
    for kind, correct in zip(kinds, right, strict=True):
        if kind is not None:
            of_kind.setdefault(kind, []).append(correct)
    values = [(_value_of(ours, style), _value_of(theirs, style)) for ours, theirs in pairs]
    numeric = [(ours, theirs) for ours, theirs in values if theirs is not None]
    answered = [(float(ours), float(theirs)) for ours, theirs in numeric if ours is not None]
    absolute = [abs(ours - theirs) for ours, theirs in answered]
    relative = [error / max(abs(theirs), 1.0) for error, (_, theirs) in zip(absolute, answered, strict=True)]
    capped = [min(error, 1.0) for error in relative] + [1.0] * (len(numeric) - len(answered))
    return NumberScores(
        questions=len(expected),
        exact_match=fmean(right),
        numeric=len(numeric) / len(expected),
        answered=len(answered) / len(numeric) if numeric else None,
        number_accuracy=fmean(ours == theirs for ours, theirs in numeric) if numeric else None,
        order_of_magnitude_accuracy=(sum(_same_order(*pair) for pair in answered) / len(numeric) if numeric else None),
        capped_relative_error=fmean(capped) if capped else None,
        mean_absolute_error=fmean(absolute) if absolute else None,
        median_absolute_error=median(absolute) if absolute else None,
        mean_relative_error=fmean(relative) if relative else None,
        mean_log_error=fmean(abs(_log(ours) - _log(theirs)) for ours, theirs in answered) if answered else None,
        by_kind={kind: fmean(of_kind[kind]) for kind in sorted(of_kind)},
    )


def _value_of(text: str, style: str) -> Fraction | None:
    answer = extract_answer(text, style)
    return None if answer is None else _value(answer)


def _value(answer: str) -> Fraction | None:
    """Return the value of a text that is a number, or a quotient of two."""
    match = _WHOLE.fullmatch(_one_minus(answer)) if len(answer) <= LONGEST else None
    if match is None:
        return None
    above, below = Fraction(_plain(match["above"])), Fraction(_plain(match["below"] or "1"))
    if below == 0:
        return None
    return -above / below if match["sign"] == "-" else above / below


def _marked(text: str) -> str:
    match = _MARKED.match(_one_minus(text))
    if match:
        return _plain((match["sign"] or "") + match["size"])
    return re.sub(r"[$%€£]", "", _one_minus(text)).strip()


def _one_minus(text: str) -> str:
    return text.replace("\N{MINUS SIGN}", "-")


def _plain(number: str) -> str:
    return re.sub(r"[,$€£]", "", number).removeprefix("+")


def _same_order(ours: float, theirs: float) -> bool:
    if ours == 0 or theirs == 0:
        return ours == theirs
    return (ours > 0) == (theirs > 0) and abs(math.log10(abs(ours)) - math.log10(abs(theirs))) < 0.5


def _log(value: float) -> float:
    return math.copysign(math.log1p(abs(value)), value)
