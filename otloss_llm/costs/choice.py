"""The vocabulary cost that an objective is meant for, made for one model and tokenizer.

"embedding"    cosine distance between the rows of the model's head: EMO
"number"       distance between number tokens: `NumberToken`
"mixed"        the former between number tokens, the embedding's everywhere else: EMO with numbers
"rating"       signed difference between the expected rating and the label, of the digits 0 to 9: `ExpectedValue`

The number tokens of a tokenizer, and their costs, are made once: decoding a vocabulary of 50,000 takes seconds.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from otloss.losses.number_line import SCALINGS
from otloss_llm.costs.embedding import EmbeddingCost
from otloss_llm.costs.number_cost import MixedCost, NumberCost
from otloss_llm.costs.ratings import RatingCost
from otloss_llm.costs.tokenizer_numbers import NumberTokens, check_tokenizer
from otloss_llm.costs.vocabulary import TokenCost

CONTROLS = ("shuffled", "equal")  # the methods of `NumberCost`
KINDS = ("embedding", "number", "mixed", "rating")


@dataclass(frozen=True)
class NumberSettings:
    """How far apart numbers are.

    Attributes:
        scaling: of `NumberCost`: "symlog" (one weight means the same with every tokenizer), or another.
        control: "shuffled" (values given to the numbers at random, drawn with the seed) or "equal" (all numbers alike,
            the same price of text) for a control of an experiment; None for the values themselves.
    """

    scaling: str = "symlog"
    control: str | None = None

    def __post_init__(self) -> None:
        if self.scaling not in SCALINGS:
            raise ValueError(f"scaling of numbers is {self.scaling!r}, expected one of {SCALINGS}.")
        if self.control not in (None, *CONTROLS):
            raise ValueError(f"control of numbers is {self.control!r}, expected None or one of {CONTROLS}.")

    def __str__(self) -> str:
        """What differs from the default, as an arm of a comparison names it: "log"."""
        parts = (self.control or "", "" if self.scaling == "symlog" else self.scaling)
        return "/".join(filter(None, parts))


_MADE: WeakKeyDictionary[Any, dict[Hashable, tuple[Hashable, Any]]] = WeakKeyDictionary()


def _kept_for(tokenizer: Any, key: Hashable, make: Callable[[], Any]) -> Any:
    """What `make` returned for this tokenizer in its present state; not kept where weak references are impossible."""
    try:
        kept = _MADE.setdefault(tokenizer, {})
    except TypeError:  # It is not hashable, or has no weak references.
        return make()
    # Tokens may be added to a tokenizer, or become special.
    state = len(tokenizer.get_vocab()), tuple(tokenizer.all_special_ids)
    if key not in kept or kept[key][0] != state:
        kept[key] = (state, make())
    return kept[key][1]


def number_tokens(tokenizer: Any, vocab_size: int) -> NumberTokens:
    """`NumberTokens.of(tokenizer, vocab_size=vocab_size)`, read once; with its errors."""
    check_tokenizer(tokenizer)
    tokens: NumberTokens = _kept_for(tokenizer, vocab_size, lambda: NumberTokens.of(tokenizer, vocab_size=vocab_size))
    return tokens


def number_values(tokenizer: Any, vocab_size: int) -> Float[Tensor, " vocab"] | None:
    """Return values of the number tokens, NaN elsewhere; None for a tokenizer without any.

    Tokens beyond the head, which a model cannot give, are left out.
    """
    tokens = 1 + max(tokenizer.get_vocab().values(), default=-1)
    try:
        values = number_tokens(tokenizer, max(tokens, vocab_size)).values[:vocab_size]
    except ValueError:  # no token is a number
        return None
    return None if values.isnan().all() else values


def number_cost(tokenizer: Any, vocab_size: int, numbers: NumberSettings, *, seed: int = 0) -> NumberCost:
    """Return the cost of numbers over a head of `vocab_size` rows; `seed` is for shuffled values.

    Raises:
        TypeError, ValueError: no tokenizer, or one without a number token.
    """
    _require_tokenizer(tokenizer, "NumberCost(values)")
    tokens = number_tokens(tokenizer, vocab_size)
    key = (vocab_size, numbers.scaling, torch.get_default_dtype())
    cost: NumberCost = _kept_for(tokenizer, key, lambda: NumberCost.from_tokens(tokens, scaling=numbers.scaling))
    if numbers.control == "shuffled":
        return cost.shuffled(torch.Generator("cpu").manual_seed(seed))
    return cost.equal() if numbers.control == "equal" else cost


def rating_cost(tokenizer: Any, vocab_size: int) -> RatingCost:
    """The cost of the ratings 0 to 9 over a head of `vocab_size` rows: larger numbers of a vocabulary are no ratings.

    Raises:
        TypeError, ValueError: no tokenizer, or one without a digit.
    """
    _require_tokenizer(tokenizer, "RatingCost(values)")
    values = number_tokens(tokenizer, vocab_size).values
    is_digit = (values >= 0) & (values <= 9) & (values == values.round())
    values = torch.where(is_digit, values, torch.nan)
    return RatingCost(values.to(torch.promote_types(torch.get_default_dtype(), torch.float32)))


def _require_tokenizer(tokenizer: Any, instead: str) -> None:
    if tokenizer is None:
        raise ValueError(
            "the values of number tokens are read from a tokenizer, and none was given; give the trainer "
            f"processing_class=tokenizer, or cost={instead}."
        )


def check_settings(kind: str, numbers: NumberSettings | None) -> NumberSettings:
    """Return the settings, or the default ones, if a cost of this kind reads them.

    Raises:
        TypeError, ValueError: no settings, an unknown kind, or settings that it does not read.
    """
    numbers = NumberSettings() if numbers is None else numbers
    if not isinstance(numbers, NumberSettings):
        raise TypeError(f"numbers is {numbers!r}, expected NumberSettings(scaling=..., control=...), or None.")
    if kind not in KINDS:
        raise ValueError(f'cost is {kind!r}, expected "auto", one of {KINDS}, a vocabulary cost, or None.')
    if kind in ("embedding", "rating") and numbers != NumberSettings():
        raise ValueError(
            f"scaling={numbers.scaling!r}, control={numbers.control!r} of numbers go with number_token or emo+number; "
            "the embedding cost of other objectives reads no numbers. Leave them out (--number_scaling)."
        )
    return numbers


def near_duplicates_in(cost: TokenCost | None) -> Bool[Tensor, " vocab"] | None:
    """Which rows of the cost's embedding were set to zero as near-duplicates; None where there are none."""
    if isinstance(cost, MixedCost):
        cost = cost.other
    duplicates = cost.near_duplicates if isinstance(cost, EmbeddingCost) else None
    return duplicates if duplicates is not None and duplicates.any() else None


def settings_of_near_duplicates(cost: TokenCost | None) -> dict[str, int]:
    """How many such rows a run's cost has, if any: without them, or left as they are, it would be another run."""
    duplicates = near_duplicates_in(cost)
    return {} if duplicates is None else {"near_duplicates": int(duplicates.sum())}


def choose_cost(
    kind: str,
    *,
    embedding: Callable[[], EmbeddingCost],
    tokenizer: Any,
    vocab_size: int,
    numbers: NumberSettings | None = None,
    seed: int = 0,
) -> EmbeddingCost | NumberCost | MixedCost | RatingCost:
    """Return the cost of a kind.

    Args:
        kind: "embedding", "number", "mixed" or "rating"; see `otloss_llm.objectives.Sum.cost_kind`.
        embedding: makes the embedding cost, where it is asked for.
        tokenizer, vocab_size, numbers, seed: of the cost of numbers.

    Raises:
        TypeError, ValueError: an unknown kind, settings that the kind does not read, or whatever keeps the cost from
            being made.
    """
    numbers = check_settings(kind, numbers)
    if kind == "embedding":
        return embedding()
    if kind == "rating":
        return rating_cost(tokenizer, vocab_size)
    cost = number_cost(tokenizer, vocab_size, numbers, seed=seed)
    return MixedCost(cost, embedding()) if kind == "mixed" else cost
