"""The vocabulary cost that an objective is meant for, made for one model and tokenizer.

"embedding"    cosine distance between the rows of the model's head: EMO
"number"       distance between number tokens, or between the values of whole numbers: `NumberToken`
"mixed"        the former between number tokens, the embedding's everywhere else: EMO with numbers

The number tokens of a tokenizer, and their costs, are made once: decoding a vocabulary of 50,000 takes seconds.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import asdict, dataclass, fields
from typing import Any
from weakref import WeakKeyDictionary

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from otloss.costs import Cost
from otloss.losses.number_line import FORMS, SCALINGS
from otloss_llm.costs.embedding import EmbeddingCost
from otloss_llm.costs.number_spans import SCALES, NumberSpanCost, writes_decimals
from otloss_llm.costs.number_tokens import NumberTokens
from otloss_llm.costs.numbers import MixedCost, NumberCost

KINDS = ("embedding", "number", "mixed")


@dataclass(frozen=True)
class NumberSettings:
    """How far apart numbers are.

    Attributes:
        form: of `NumberCost`: "wasserstein", "mse", "mae" or "huber".
        scaling: of `NumberCost`: "symlog" (one weight means the same with every tokenizer), or another.
        span: "log" or "relative" judges tokens by the value of the whole number they are in (`NumberSpanCost`), which
            has a scale of its own; None by the values of the tokens.
    """

    form: str = "wasserstein"
    scaling: str = "symlog"
    span: str | None = None

    def __post_init__(self) -> None:
        for name, choices in (("form", FORMS), ("scaling", SCALINGS), ("span", (None, *SCALES))):
            value = getattr(self, name)
            if value not in choices:
                mend = "; leave it out for the values of single tokens" if value in ("none", "None") else ""
                raise ValueError(f"{name} of numbers is {value!r}, expected one of {choices}{mend}.")
        beside = self._given("form", "scaling")
        if self.span is not None and beside:
            raise ValueError(
                f"span={self.span!r} judges whole numbers by a scale of its own, and goes without {beside}; leave one "
                "of them out."
            )

    def _given(self, *names: str) -> str:
        """Those that differ from the defaults: "form='mse'"."""
        given = {field.name: field.default for field in fields(self) if field.name in names}
        return " and ".join(
            f"{name}={getattr(self, name)!r}" for name, default in given.items() if getattr(self, name) != default
        )

    def __str__(self) -> str:
        """What differs from the defaults, as an arm of a comparison names it: "mse", "log", "span-log"."""
        given = [
            value for name, value in asdict(self).items() if name != "span" and value not in ("wasserstein", "symlog")
        ]
        return "/".join([*given, *([] if self.span is None else [f"span-{self.span}"])])


_MADE: WeakKeyDictionary[Any, dict[Hashable, tuple[Hashable, Any]]] = WeakKeyDictionary()


def _once(tokenizer: Any, key: Hashable, make: Callable[[], Any]) -> Any:
    """What was made of this tokenizer as it is now; a tokenizer that cannot be remembered is read anew."""
    try:
        kept = _MADE.setdefault(tokenizer, {})
    except TypeError:  # not hashable, or without weak references
        return make()
    if key not in kept or kept[key][0] != _as_it_is(tokenizer):
        made = make()
        kept[key] = (_as_it_is(tokenizer), made)
    return kept[key][1]


def _as_it_is(tokenizer: Any) -> Hashable:
    """Tokens may be added to a tokenizer, or become special."""
    return len(tokenizer.get_vocab()), tuple(tokenizer.all_special_ids)


def number_tokens(tokenizer: Any, vocab_size: int) -> NumberTokens:
    """`NumberTokens.of(tokenizer, vocab_size=vocab_size)`, read once; with its errors."""
    tokens: NumberTokens = _once(tokenizer, vocab_size, lambda: NumberTokens.of(tokenizer, vocab_size=vocab_size))
    return tokens


def number_values(tokenizer: Any, vocab_size: int) -> Float[Tensor, " vocab"] | None:
    """Values of the number tokens, NaN elsewhere; None for a tokenizer without any.

    Tokens beyond the head, which a model cannot give, are left out.
    """
    known = 1 + max(tokenizer.get_vocab().values(), default=-1)
    try:
        values = number_tokens(tokenizer, max(vocab_size, known)).values[:vocab_size]
    except ValueError:  # no token is a number
        return None
    return None if values.isnan().all() else values


def number_cost(tokenizer: Any, vocab_size: int, numbers: NumberSettings) -> NumberCost | NumberSpanCost:
    """The cost of numbers over a head of `vocab_size` rows.

    Raises:
        TypeError, ValueError: no tokenizer, or one without a number token.
    """
    if tokenizer is None:
        raise ValueError(
            "the values of number tokens are read off a tokenizer, and there is none; give the trainer "
            "processing_class=tokenizer, or cost=NumberCost(values)."
        )
    if numbers.span is not None:
        tokens = number_tokens(tokenizer, vocab_size)
        return NumberSpanCost(tokens, scale=numbers.span, decimals=writes_decimals(tokenizer, tokens))

    def made() -> NumberCost:
        return NumberCost.from_tokenizer(tokenizer, vocab_size=vocab_size, form=numbers.form, scaling=numbers.scaling)

    cost: NumberCost = _once(tokenizer, (vocab_size, numbers, torch.get_default_dtype()), made)
    if cost.tokens is not None:
        _once(tokenizer, vocab_size, lambda: cost.tokens)
    return cost


def check_settings(kind: str, numbers: NumberSettings | None) -> NumberSettings:
    """The settings, or the default ones, if a cost of this kind reads them.

    Raises:
        TypeError, ValueError: no settings, an unknown kind, or settings that it does not read.
    """
    numbers = NumberSettings() if numbers is None else numbers
    if not isinstance(numbers, NumberSettings):
        raise TypeError(f"numbers is {numbers!r}, expected NumberSettings(form=..., scaling=..., span=...), or None.")
    if kind not in KINDS:
        raise ValueError(f'cost is {kind!r}, expected "auto", one of {KINDS}, a vocabulary cost, or None.')
    unread = numbers._given("form", "scaling", "span") if kind == "embedding" else ""
    if unread:
        takers = "number_token" if numbers._given("form", "span") else "number_token or emo+number"
        raise ValueError(
            f"{unread} of numbers goes with {takers}, and the embedding cost of other objectives reads no numbers; "
            "leave it out (--number_form, --number_scaling, --number_span)."
        )
    wrong = numbers._given("form", "span") if kind == "mixed" else ""
    if wrong:
        raise ValueError(
            f'{wrong} of numbers goes with number_token (the cost "number"), emo+number mixes the distances of single '
            "tokens; leave it out (--number_form, --number_span)."
        )
    return numbers


def near_duplicates_in(cost: Cost | None) -> Bool[Tensor, " vocab"] | None:
    """Which rows of the cost's embedding were set to zero as near-duplicates; None where there are none."""
    if isinstance(cost, MixedCost):
        cost = cost.other
    found = cost.near_duplicates if isinstance(cost, EmbeddingCost) else None
    return found if found is not None and found.any() else None


def settings_of_near_duplicates(cost: Cost | None) -> dict[str, int]:
    """How many such rows a run's cost has, if any: without them, or left as they are, it would be another run."""
    found = near_duplicates_in(cost)
    return {} if found is None else {"near_duplicates": int(found.sum())}


def choose_cost(
    kind: str,
    *,
    embedding: Callable[[], Cost],
    tokenizer: Any,
    vocab_size: int,
    numbers: NumberSettings | None = None,
) -> Cost:
    """The cost of a kind.

    Args:
        kind: "embedding", "number" or "mixed"; see `otloss_llm.objectives.cost_kind`.
        embedding: makes the embedding cost, where it is asked for.
        tokenizer, vocab_size, numbers: of the cost of numbers.

    Raises:
        TypeError, ValueError: an unknown kind, settings that the kind does not read, or whatever keeps the cost from
            being made.
    """
    numbers = check_settings(kind, numbers)
    if kind == "embedding":
        return embedding()
    made = number_cost(tokenizer, vocab_size, numbers)
    return MixedCost(made, embedding()) if kind == "mixed" and isinstance(made, NumberCost) else made
