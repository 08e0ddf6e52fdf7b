"""The vocabulary cost that an objective is meant for, made for one model and tokenizer.

"embedding"    cosine distance between the rows of the model's head: EMO
"number"       distance between number tokens, or between the values of whole numbers: `NumberToken`
"mixed"        the former between number tokens, the embedding's everywhere else: EMO with numbers
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from otloss.costs import Cost
from otloss.losses._number_line import FORMS, SCALINGS
from otloss_llm.number_costs import AUTO, MixedCost, NumberCost
from otloss_llm.number_spans import SCALES, NumberSpanCost

KINDS = ("embedding", "number", "mixed")


@dataclass(frozen=True)
class NumberSettings:
    """How far apart numbers are.

    Attributes:
        form: of `NumberCost`: "wasserstein", "mse", "mae" or "huber".
        scaling: of `NumberCost`: "auto" (absolute for single digits, log for longer numbers), or one by name.
        span: "log" or "relative" judges tokens by the value of the whole number they are in (`NumberSpanCost`), which
            has a scale of its own; None by the values of the tokens.
    """

    form: str = "wasserstein"
    scaling: str = AUTO
    span: str | None = None

    def __post_init__(self) -> None:
        for name, choices in (("form", FORMS), ("scaling", (AUTO, *SCALINGS)), ("span", (None, *SCALES))):
            if getattr(self, name) not in choices:
                raise ValueError(f"{name} of numbers is {getattr(self, name)!r}, expected one of {choices}.")
        if self.span is not None and (self.form, self.scaling) != ("wasserstein", AUTO):
            raise ValueError(
                f"span={self.span!r} judges whole numbers, and goes with neither form={self.form!r} nor "
                f"scaling={self.scaling!r}; leave them out."
            )

    def __str__(self) -> str:
        """What differs from the defaults, as an arm of a comparison names it: "mse", "log", "span-log"."""
        given = [value for name, value in asdict(self).items() if name != "span" and value not in ("wasserstein", AUTO)]
        return "/".join([*given, *([] if self.span is None else [f"span-{self.span}"])])


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
        return NumberSpanCost.from_tokenizer(tokenizer, vocab_size=vocab_size, scale=numbers.span)
    return NumberCost.from_tokenizer(tokenizer, vocab_size=vocab_size, form=numbers.form, scaling=numbers.scaling)


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
    numbers = NumberSettings() if numbers is None else numbers
    if not isinstance(numbers, NumberSettings):
        raise TypeError(f"numbers is {numbers!r}, expected NumberSettings(form=..., scaling=..., span=...), or None.")
    if kind not in KINDS:
        raise ValueError(f'cost is {kind!r}, expected "auto", one of {KINDS}, a vocabulary cost, or None.')
    if kind == "embedding":
        if numbers != NumberSettings():
            raise ValueError(
                f'{numbers!r} goes with the cost "number" or "mixed", the cost "embedding" reads no numbers.'
            )
        return embedding()
    if kind == "number":
        return number_cost(tokenizer, vocab_size, numbers)
    if numbers.span is not None:
        raise ValueError(f'span={numbers.span!r} goes with the cost "number", a mixture needs the values of tokens.')
    made = number_cost(tokenizer, vocab_size, numbers)
    assert isinstance(made, NumberCost)
    return MixedCost(made, embedding())
