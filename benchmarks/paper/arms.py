"""The arms of a comparison.

An *arm* is an objective, the embedding of its cost, the scaling and the control of numbers in its cost, and the
temperature at which the trained model is measured and sampled. `parse_arm` reads it from `objective[/modifier ...]`:

    mle    tailr:0.001    mixce:0.8    emo    emo:clip=none/raw    emo/random    emo/shuffled    mle/T=0.8
    number_token    number_token/log    emo+number/random/log    dft    eaft    gem:0.7+z_loss:1e-4/T=0.8
    number_token/shuffled    number_token/equal    emo+number/shuffled-values    emo+number/equal

"shuffled" shuffles what the objective is about: the values of number_token, the embedding of the others. The controls
of numbers are as in `otloss_llm.NumberSettings`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from otloss.losses.number_line import SCALINGS
from otloss_llm.costs.choice import NumberSettings
from otloss_llm.costs.named import COST_SOURCES
from otloss_llm.objectives import Sum, parse_objective

_DEFAULT_SCALING = NumberSettings().scaling
_VALUES = {"shuffled-values": "shuffled", "equal": "equal"}  # the names of controls of numbers, and the controls
_EXPECTED = (
    "objective[/raw | /as-is | /random | /shuffled][/shuffled-values | /equal]"
    f"[/{' | /'.join(SCALINGS)}][/T=temperature]"
)


def named_source(source: str | None) -> str:
    """The source of the embedding cost by name, as in `load_cost`: None is the first of `COST_SOURCES`."""
    return COST_SOURCES[0] if source is None else source


@dataclass(frozen=True)
class Arm:
    """One arm: objective, source of the cost embedding, temperature, scaling and control of numbers."""

    objective: str
    embedding: str | None = None  # the library's choice, see `load_cost`
    temperature: float = 1.0
    scaling: str = _DEFAULT_SCALING
    control: str | None = None

    @property
    def cost_kind(self) -> str:
        """The cost that the objective is meant for."""
        return Sum.of(parse_objective(self.objective)).cost_kind

    @property
    def training(self) -> str:
        """Name of the training; arms that differ in temperature alone share it."""
        scaling = self.scaling if self.scaling != _DEFAULT_SCALING else None
        control = self.control
        if control == "shuffled" and self.cost_kind == "mixed":  # where "shuffled" is the embedding
            control = "shuffled-values"
        return "/".join([self.objective, *filter(None, (self.embedding, control, scaling))])

    @property
    def name(self) -> str:
        """The shortest text that `parse_arm` reads as this arm."""
        return self.training + ("" if self.temperature == 1.0 else f"/T={self.temperature:g}")

    @property
    def numbers(self) -> NumberSettings:
        """Settings of the cost of numbers."""
        return NumberSettings(scaling=self.scaling, control=self.control)

    def cost_settings(self) -> dict[str, Any]:
        """What a run folder records about the cost beside its embedding; empty for embedding costs."""
        kind = self.cost_kind
        numbers = {"scaling": self.scaling}
        if self.control is not None:
            numbers["control"] = self.control
        return {} if kind == "embedding" else {"cost": kind, "numbers": numbers}


def parse_arm(text: str) -> Arm:
    """Read an arm from its name.

    Raises ValueError for an unknown objective or modifier, a modifier that does not apply to the objective, or two of
    one sort.
    """
    objective, *modifiers = text.strip().split("/")
    total = Sum.of(parse_objective(objective))
    kind, reads_cost = total.cost_kind, total.needs_cost
    fields: dict[str, Any] = {}
    for modifier in modifiers:
        sort, value = _modifier("shuffled-values" if modifier == "shuffled" and kind == "number" else modifier)
        if sort == "":
            reason = f"{modifier!r} is unknown"
        elif sort in fields:
            reason = f"{modifier!r} is a second {sort}"
        elif sort == "embedding" and (not reads_cost or kind in ("number", "rating")):
            reason = f"{modifier!r} is an embedding, and {objective} uses no {'embedding' if reads_cost else 'cost'}"
        elif sort in ("scaling", "control") and kind in ("embedding", "rating"):
            what = "distance" if sort == "scaling" else "control"
            reason = f"{modifier!r} is a {what} of numbers, which only number_token and emo+number use"
        else:
            fields[sort] = value
            continue
        raise ValueError(f"arm {text!r}: {reason}; expected {_EXPECTED}.")
    return Arm(objective.lower(), **fields)


def _modifier(text: str) -> tuple[str, str | float]:
    """Return the field of `Arm` that a modifier sets, and its value; "" for an unknown modifier."""
    for sort, choices in (("embedding", COST_SOURCES), ("scaling", SCALINGS)):
        if text in choices:
            return sort, text
    if text in _VALUES:
        return "control", _VALUES[text]
    try:
        temperature = float(text.removeprefix("T=")) if text.startswith("T=") else 0.0
    except ValueError:
        temperature = 0.0
    return ("temperature", temperature) if 0.0 < temperature < float("inf") else ("", text)
