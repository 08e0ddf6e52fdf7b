"""The distribution of a model over the numbers that may answer a question; its mean, median or quantile as the answer.

The most probable text is the best answer if only the exact one counts. If an answer costs its distance to the right
one, the median of the distribution is better, and its mean if it costs the square; both need no other training.

The answer begins with a number, of which the text behind it is no part: 42 in "42%" and "42, 43", 1250 in "1,250.",
with thousands commas. P("42") = P(4) P(2 | 4) (1 - P(more of a number | 42)), and a token "2%" is a 2 that ends it. A
beam over its tokens keeps the most probable beginnings; with `longest=1` all numbers of one token are found where
`beam` is at least their count. With F the distribution function of the result and y the right
number:

    CRPS = sum_i p_i |v_i - y| - 1/2 sum_ij p_i p_j |v_i - v_j|      the error, if the distribution is one number
    PIT  = uniform between F(y-) and F(y)                            uniform over [0, 1] if the model is calibrated
"""

from __future__ import annotations

import functools
import itertools
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from otloss._checks import are_rounded_to_float32, bits_of_dtype, check_count
from otloss.losses import crps
from otloss_llm.costs.choice import number_tokens
from otloss_llm.costs.tokenizer_numbers import check_tokenizer, read_number
from otloss_llm.evaluation.perplexity import check_fit
from otloss_llm.models.decoder_inputs import decoder_inputs
from otloss_llm.models.heads import evaluation_mode, find_head, is_encoder_decoder

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

_SIGN = "+\N{MINUS SIGN}-"  # in a regular expression "-" stands at the end of the set
# 1,250 is one number; 0,5 and 1,25 end at the comma, as 3, 4 does.
_WHOLE = r"[1-9][0-9]{0,2}(?:,[0-9]{3})+(?![0-9])|[0-9]+"
_NUMBER = re.compile(rf"[{_SIGN}]?(?:(?:{_WHOLE})(?:\.[0-9]+)?|\.[0-9]+)")
_BEGINNING = re.compile(
    rf"[{_SIGN}]?(?:[1-9][0-9]{{0,2}}(?:,[0-9]{{3}})*,[0-9]{{0,2}}(?![0-9])|(?:{_WHOLE}|)(?:\.[0-9]*)?)"
)
_DIGITS = re.compile(r"[0-9]+")
_FIRST = f"0123456789.,{_SIGN}"
_NEGLIGIBLE = math.log(1e-4)  # beginnings that are this much less probable than the best are dropped
_PIT_BINS = 10
_ROUNDING = 1e-12  # relative; of arithmetic in float64


@dataclass(frozen=True, eq=False)
class NumberDistribution:
    """A distribution over numbers.

    Attributes:
        values: the numbers, ascending.
        probabilities: of each, with the sum 1.
        mass: the probability, before that, that the answer is one of these numbers; the rest is text, or was dropped.

    Example:
        >>> half = NumberDistribution(torch.tensor([1.0, 4.0]).double(), torch.tensor([0.75, 0.25]).double(), mass=0.9)
        >>> half.decode("mean"), half.decode("median"), half.decode(0.9)
        (1.75, 1.0, 4.0)
    """

    values: Float[Tensor, " numbers"]
    probabilities: Float[Tensor, " numbers"]
    mass: float

    def decode(self, by: str | float) -> float:
        """Return the number for a decision.

        Args:
            by: "mean", "median" (the smallest value with at least half of the mass up to it), or the level of a
                quantile between 0 and 1.

        Raises:
            ValueError: none of these.
        """
        level = check_decision(by)
        if level is None:
            return float(self.values @ self.probabilities)
        below = self.probabilities.cumsum(0)
        return float(self.values[min(int((below < level - 1e-12).sum()), len(self.values) - 1)])

    def crps(self, value: float) -> float:
        """Return the continuous ranked probability score of the right number, in its unit; the lower, the better."""
        return float(
            crps(
                self.values, torch.tensor(value, dtype=self.values.dtype, device=self.values.device), self.probabilities
            )
        )

    def pit(self, value: float) -> tuple[float, float]:
        """Return F(y-) and F(y), between which the probability integral transform of the right number is uniform."""
        equal = (self.values - value).abs() <= _ROUNDING * abs(value)
        sides = ((self.values < value) & ~equal, (self.values < value) | equal)
        low, high = (float(self.probabilities[side].sum()) for side in sides)
        return min(low, 1.0), min(high, 1.0)


@dataclass(frozen=True)
class DistributionScores:
    """Means over questions whose right answer is a number.

    Attributes:
        questions: their number.
        mean_absolute_error: of the decoded numbers.
        crps: of the distributions, in the unit of the numbers.
        pit: shares of the PIT in ten equal parts of [0, 1]; 0.1 each if the model is calibrated, more at both ends if
            it is too sure.
        within_90: how often the PIT is between 0.05 and 0.95.
        number_mass: the mean probability of the numbers found.
    """

    questions: int
    mean_absolute_error: float
    crps: float
    pit: tuple[float, ...]
    within_90: float
    number_mass: float


def check_decision(by: str | float) -> float | None:
    """Return the level of a quantile, None for the mean; raises ValueError for what is neither."""
    if by == "mean":
        return None
    try:
        level = 0.5 if by == "median" else float(by)
    except (TypeError, ValueError):
        level = math.nan
    if not 0.0 < level < 1.0:
        raise ValueError(f'a decision by {by!r}, expected "mean", "median", or the level of a quantile, as 0.9.')
    return level


def decode_numbers(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[str | Sequence[Mapping[str, str]]],
    *,
    by: str | float = "median",
    longest: int = 8,
    beam: int = 128,
    batch_size: int = 32,
) -> list[float]:
    """Return the mean, the median or a quantile of the model's distribution over numbers, for each prompt.

    Args:
        by: "mean", "median" or the level of a quantile.
        prompts, longest, beam, batch_size: as in `number_distributions`, which keeps the distributions.

    Raises:
        ValueError: as `number_distributions`, or for another decision.
    """
    check_decision(by)
    results = number_distributions(model, tokenizer, prompts, longest=longest, beam=beam, batch_size=batch_size)
    return [distribution.decode(by) for distribution in results]


def number_distributions(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[str | Sequence[Mapping[str, str]]],
    *,
    longest: int = 8,
    beam: int = 128,
    batch_size: int = 32,
) -> list[NumberDistribution]:
    """Return the model's distribution over numbers right after each prompt, in the order of the prompts.

    Answers that begin with other text, as solutions do, have little mass. The model runs in eval mode, and its mode is
    restored.

    Args:
        prompts: texts as the model was trained on them, with a line break at their end where there was one. A blank in
            front of an answer is mostly part of the answer's first token: leave it out. The tokenizer puts in front of
            prompts what it puts in front of texts, as BOS. For a model that was trained on messages each is a list of
            messages, {"role", "content"}, up to the answer, which the chat template renders as in training: many
            templates begin without BOS, and put more in front of an answer than `add_generation_prompt` does. The
            encoder of an encoder-decoder reads them.
        longest: tokens of a number at most. With 1 a number is one token, whatever follows: one pass of the model.
        beam: beginnings of numbers that are kept for each prompt after each token, the most probable ones. Where
            another token follows, beginnings below 1e-4 of the best one are dropped too.
        batch_size: sequences that the model is given at a time.

    Raises:
        ValueError: no prompt, a setting below 1, a tokenizer without number tokens, a prompt that with `longest`
            tokens exceeds the context, or no number among the beginnings that were kept.

    Example:
        >>> from transformers import GPT2Config, GPT2LMHeadModel
        >>> from otloss_llm.data import train_bpe_tokenizer
        >>> tokenizer = train_bpe_tokenizer(["one two three"], 257)
        >>> _ = torch.manual_seed(0)
        >>> model = GPT2LMHeadModel(GPT2Config(vocab_size=257, n_positions=16, n_embd=4, n_layer=1, n_head=1))
        >>> answer = number_distributions(model, tokenizer, ["1 + 1 = "], longest=1)[0]
        >>> answer.values.tolist(), 4 < answer.decode("mean") < 5
        ([0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 9.0], True)
    """
    for name, setting in (("longest", longest), ("beam", beam), ("batch_size", batch_size)):
        check_count(name, setting)
    asked = [] if isinstance(prompts, str | bytes | Mapping) else list(prompts)
    if not asked or not all(prompt and (isinstance(prompt, str) or _are_messages(prompt)) for prompt in asked):
        raise ValueError(
            f"prompts is {prompts!r}, expected a list of texts, or of lists of messages up to the answer; give at "
            "least one, and none that is empty."
        )
    check_tokenizer(tokenizer)
    rows = find_head(model).weight.shape[0]
    tokens = 1 + max(tokenizer.get_vocab().values(), default=-1)
    parts = _Parts([text or "" for text in number_tokens(tokenizer, max(tokens, rows)).texts[:rows]])
    has_encoder = is_encoder_decoder(model)
    around = _around(tokenizer, "text_target" if has_encoder else "text")
    if has_encoder and not around[1]:
        _check_start(model)
    results = []
    with evaluation_mode(model):
        for prompt in asked:
            ids = _prompt_ids(tokenizer, prompt, None if has_encoder else around[0])
            read = max(len(ids), len(around[0]) + longest) if has_encoder else len(ids) + longest - 1
            check_fit(model, read, min(ids), max(ids))
            next_logits = functools.partial(_next_logits, model, ids, around=around)
            ended = _numbers_after(next_logits, parts, longest=longest, beam=beam, batch_size=batch_size)
            results.append(_distribution(ended, prompt, longest))
    return results


def _as_written(expected: Sequence[Any]) -> list[float]:
    """Return the decimal numbers that those of float32 or float16 stand for: 0.3, not 0.30000001192092896.

    Python's floats are of float32 if all fit into it and one has its digits. Those of bfloat16 stay: they have too few
    bits to tell what was written.
    """
    dtype_of_all = getattr(expected, "dtype", None)  # pandas hands out Python's floats
    bits = [bits_of_dtype(getattr(number, "dtype", dtype_of_all)) for number in expected]
    values = [float(number) for number in expected]
    are_narrow = bool(are_rounded_to_float32(np.array(values)).any())
    written = []
    for value, of_value in zip(values, bits, strict=True):
        if value.is_integer() or not math.isfinite(value) or of_value == 8:
            written.append(value)
        elif of_value == 11:
            written.append(float(str(np.float16(value))))
        else:
            written.append(float(str(np.float32(value))) if are_narrow or of_value == 24 else value)
    return written


def score_number_distributions(
    distributions: Sequence[NumberDistribution], expected: Sequence[float], *, by: str | float = "median"
) -> DistributionScores:
    """Return the error of the decision `by`, and how well the distributions are calibrated.

    Raises:
        TypeError: a right number is none.
        ValueError: not as many right numbers as distributions, none, one that is not finite, or an unknown decision.

    Example:
        >>> sure = NumberDistribution(torch.tensor([4.0]).double(), torch.ones(1).double(), mass=0.9)
        >>> scores = score_number_distributions([sure, sure], [4.0, 7.0])
        >>> scores.mean_absolute_error, scores.crps, [round(share, 2) for share in scores.pit[-2:]]
        (1.5, 1.5, [0.05, 0.55])
    """
    try:
        expected = _as_written(expected)
    except (TypeError, ValueError) as error:
        raise TypeError(f"a right number cannot be read: {error}; leave out questions without one.") from error
    if len(distributions) != len(expected) or not expected or not all(map(math.isfinite, expected)):
        raise ValueError(
            f"there are {len(distributions)} distributions and {len(expected)} right numbers, expected as many of "
            "each, at least one, and finite numbers."
        )
    pairs = list(zip(distributions, expected, strict=True))
    intervals = [distribution.pit(y) for distribution, y in pairs]
    low, high = torch.tensor(intervals, dtype=torch.float64, device="cpu").unsqueeze(-1).unbind(1)
    edges = torch.linspace(0.0, 1.0, _PIT_BINS + 1, dtype=torch.float64, device="cpu")

    def below(u: Tensor) -> Tensor:
        """The mean share of the PIT up to u; a right number outside of all values has a PIT of one point."""
        inside = (u - low) / (high - low).where(high > low, 1.0)
        share = torch.where(high > low, inside.clamp(0.0, 1.0), (u >= low.clamp(min=1e-12)).double())
        return share.mean(dim=0)

    inner = below(torch.tensor([0.05, 0.95], dtype=torch.float64, device="cpu"))
    return DistributionScores(
        questions=len(expected),
        mean_absolute_error=sum(abs(distribution.decode(by) - y) for distribution, y in pairs) / len(pairs),
        crps=sum(distribution.crps(y) for distribution, y in pairs) / len(pairs),
        pit=tuple(below(edges).diff().tolist()),
        within_90=float(inner[1] - inner[0]),
        number_mass=sum(distribution.mass for distribution in distributions) / len(pairs),
    )


class _Parts:
    """The tokens of a vocabulary that begin a number or continue one: `after` a beginning."""

    def __init__(self, texts: list[str]) -> None:
        self._texts = [(i, text) for i, text in enumerate(texts) if text and text.lstrip()[:1] in _FIRST]
        self._after: dict[str, _Continuations] = {}

    def after(self, text: str) -> _Continuations:
        """The tokens that may follow a beginning."""
        stand_in = _stand_in(text)
        if stand_in not in self._after:
            self._after[stand_in] = self._follow(stand_in)
        return self._after[stand_in]

    def _follow(self, beginning: str) -> _Continuations:
        parts = {i: _part(beginning, text if beginning else text.lstrip()) for i, text in self._texts}
        added = {i: part for i, part in parts.items() if part is not None}
        has_digit = [_DIGITS.search(part) is not None for part in added.values()]
        ids = torch.tensor(list(added), dtype=torch.long, device="cpu")
        return _Continuations(ids, torch.tensor(has_digit, dtype=torch.bool, device="cpu"), list(added.values()))


class _Continuations(NamedTuple):
    """Tokens that may follow the beginning of a number, and what they add to it; a blank where they end it."""

    ids: Int[Tensor, " tokens"]
    has_digit: Bool[Tensor, " tokens"]
    parts: list[str]


def _stand_in(text: str) -> str:
    """Return a beginning that all tokens may follow that may follow this one, of few for all numbers.

    Example:
        >>> [_stand_in(text) for text in ("", "-", "52", "-1970", "3.14", "12,5", "1,234,5")]
        ['', '-', '11', '0', '0.', '1,1', '1,1']
    """
    if "." in text:
        return "0."
    first, *groups = text.lstrip(_SIGN).split(",")
    if groups:
        return "1," + "1" * min(len(groups[-1]), 4)
    if not first:
        return text
    return "0" if first[0] == "0" or len(first) > 3 else "1" * len(first)


def _part(beginning: str, text: str) -> str | None:
    """Return what a token adds to the beginning of a number, with a blank if it ends it; None if it adds nothing.

    Example:
        >>> [_part("4", text) for text in ("2", "2%", "%", ".5", ",500", ". ")], _part("4.", "2.1"), _part("", "-")
        (['2', '2 ', None, '.5', ',500', None], '2 ', '-')
    """
    whole = beginning + text
    match = _BEGINNING.match(whole)
    end = match.end() if match else 0
    digits = _DIGITS.match(text)
    if digits and beginning[-1:].isdigit():  # also the ones behind 1,250, which is 1 then
        end = max(end, len(beginning) + digits.end())
    part = whole[len(beginning) : end]
    if end >= len(whole):
        return part
    return part + " " if _DIGITS.search(part) else None


class _Unfinished(NamedTuple):
    """The beginning of a number: its tokens, its text without blanks in front, and its log probability."""

    ids: tuple[int, ...]
    text: str
    log_p: float

    @property
    def value(self) -> float | None:
        """The number, if it may end here: "5." is 5, for its point ends a sentence, and "5," too."""
        match = _NUMBER.match(self.text)
        return read_number(match.group().replace(",", "")) if match else None


def _are_messages(prompt: Any) -> bool:
    """Return whether this is a conversation up to an answer."""
    is_list = isinstance(prompt, Sequence) and all(isinstance(message, Mapping) for message in prompt)
    return is_list and prompt[-1].get("role") != "assistant"


def _prompt_ids(tokenizer: Any, prompt: Any, prefix: list[int] | None) -> list[int]:
    """Return the ids that a model reads before it answers: with the prefix of its texts, as BOS, and without EOS.

    Messages have what the chat template writes in front of an answer. A text that it has written may begin with the
    prefix already. Without a prefix they are an encoder's.
    """
    settings = {"truncation": False, "padding": False}
    if not isinstance(prompt, str):
        write = functools.partial(tokenizer.apply_chat_template, return_dict=False, **settings)
        if prefix is None:
            return list(write(list(prompt), add_generation_prompt=True))
        # As the answer is rendered in training: some templates end a prompt otherwise, to begin with a thought.
        in_parts = not isinstance(prompt[-1].get("content"), str)
        # A blank in front may be a token of its own with a digit, and a part of the answer's first one with a sign.
        answers = [[{"type": "text", "text": text}] if in_parts else text for text in ("7", "42", "-7", ".5")]
        rows = [write([*prompt, {"role": "assistant", "content": answer}]) for answer in answers]
        shared = itertools.takewhile(lambda tokens: len(set(tokens)) == 1, zip(*rows, strict=False))
        return [tokens[0] for tokens in shared]
    ids = tokenizer(prompt, add_special_tokens=prefix is None, verbose=False, **settings)["input_ids"]
    return list(ids) if prefix is None or ids[: len(prefix)] == prefix else [*prefix, *ids]


def _around(tokenizer: Any, argument: str) -> tuple[list[int], list[int]]:
    """Return the ids that the tokenizer puts before and behind each text, or each text to write ("text_target")."""
    whole, text = (tokenizer(**{argument: "7"}, add_special_tokens=special)["input_ids"] for special in (True, False))
    starts = [start for start in range(len(whole)) if whole[start : start + len(text)] == text]
    return (whole[: starts[-1]], whole[starts[-1] + len(text) :]) if starts else ([], [])


def _check_start(model: Any) -> None:
    """Raise ValueError for a decoder that starts with the last label, as mBART's: none stands behind a number."""
    starts = decoder_inputs(model, torch.tensor([[0, 2], [0, 3]], device=model.device))["decoder_input_ids"][:, 0]
    if starts[0] != starts[1]:
        raise ValueError(
            f"{type(model).__name__} starts a text with its last label, and the tokenizer puts no token behind a text; "
            "expected one, such as its end or a language (tokenizer.tgt_lang)."
        )


def _numbers_after(
    next_logits: Callable[[list[tuple[int, ...]]], Tensor], parts: _Parts, *, longest: int, beam: int, batch_size: int
) -> dict[float, float]:
    """Return the log probability of each number in the beam."""
    ended: dict[float, float] = {}
    unfinished = [_Unfinished((), "", 0.0)]
    for step in range(longest):
        children: list[_Unfinished] = []
        for first in range(0, len(unfinished), batch_size):
            chunk = unfinished[first : first + batch_size]
            logits = next_logits([number.ids for number in chunk])
            for number, log_q in zip(chunk, logits.double().log_softmax(dim=-1).cpu(), strict=True):
                allowed, has_digit, added = parts.after(number.text)
                log_next = log_q[allowed]
                if number.value is not None:
                    _add(ended, number.value, number.log_p + math.log1p(-min(float(log_next.exp().sum()), 1.0 - 1e-15)))
                elif step == longest - 1:  # blanks and signs become no number any more
                    log_next = log_next.where(has_digit, -math.inf)
                top = log_next.topk(min(beam, len(allowed)))
                for log_p, place in zip(top.values.tolist(), top.indices.tolist(), strict=True):
                    child = _Unfinished(
                        (*number.ids, int(allowed[place])), number.text + added[place], number.log_p + log_p
                    )
                    if not child.text[-1:].isspace():
                        children.append(child)
                    elif child.value is not None:  # beyond the largest float
                        _add(ended, child.value, child.log_p)
        children.sort(key=lambda child: -child.log_p)
        if step == longest - 1:  # no further pass is saved by dropping numbers
            unfinished = [child for child in children if child.value is not None][:beam]
            break
        unfinished = [child for child in children[:beam] if child.log_p > children[0].log_p + _NEGLIGIBLE]
        if not unfinished or (ended and unfinished[0].log_p < max(ended.values()) + _NEGLIGIBLE):
            return ended
    for number in unfinished:  # the longest numbers, whatever would follow them
        if number.value is not None:
            _add(ended, number.value, number.log_p)
    return ended


def _next_logits(
    model: Any, prompt: list[int], beginnings: list[tuple[int, ...]], *, around: tuple[list[int], list[int]]
) -> Float[Tensor, "answers vocab"]:
    """Return the logits of the token after each beginning of an answer; the beginnings are of one length.

    A decoder is given what it is given in training: the start and the labels, with what stands around each text.
    """
    if not is_encoder_decoder(model):
        rows = torch.tensor([[*prompt, *ids] for ids in beginnings], device=model.device)
        return model(input_ids=rows, use_cache=False).logits[:, -1]
    before, behind = around
    last = behind or [0]  # the shift drops the last label, whatever it is
    labels = torch.tensor([[*before, *ids, *last] for ids in beginnings], device=model.device)
    read = 1 + len(before) + len(beginnings[0])
    encoder_ids = torch.tensor([prompt], device=model.device).expand(len(beginnings), -1)
    given = {name: tensor[:, :read] for name, tensor in decoder_inputs(model, labels).items()}
    return model(input_ids=encoder_ids, use_cache=False, **given).logits[:, -1]


def _add(ended: dict[float, float], value: float, log_p: float) -> None:
    """Texts of one value, as "7" and " 7", are one number."""
    terms = torch.tensor([ended.get(value, -math.inf), log_p], dtype=torch.float64, device="cpu")
    ended[value] = float(terms.logsumexp(0))


def _distribution(ended: dict[float, float], prompt: Any, longest: int) -> NumberDistribution:
    if not ended:
        raise ValueError(
            f"no number of at most {longest} tokens is among the likely answers to {prompt!r}; expected "
            "answers that begin with one: raise longest or beam, or decode this model greedily."
        )
    values = torch.tensor(sorted(ended), dtype=torch.float64, device="cpu")
    log_p = torch.tensor([ended[value] for value in values.tolist()], dtype=torch.float64, device="cpu")
    return NumberDistribution(values, log_p.softmax(dim=0), min(float(log_p.logsumexp(0).exp()), 1.0))
