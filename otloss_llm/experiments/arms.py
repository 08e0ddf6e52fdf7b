"""What a comparison compares.

An *arm* is what is compared: an objective, what its cost is made of, and the temperature at which the trained model is
measured and sampled. `parse_arm` reads it from `objective[/modifier ...]`:

    mle    tailr:0.001    mixce:0.8    emo    emo/as-is    emo/random    emo/shuffled    mle/T=0.8
    number_token    number_token/log    emo+number/random/log
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from otloss.extending import SCALINGS
from otloss_llm.costs.choice import NumberSettings
from otloss_llm.objectives import cost_kind, needs_cost, parse_objective
from otloss_llm.training.loading import COST_SOURCES

_DEFAULTS = NumberSettings()
_MODIFIERS = f"objective[/as-is | /random | /shuffled][/{' | /'.join(SCALINGS)}][/T=temperature]"


@dataclass(frozen=True)
class Arm:
    """One thing to compare: objective, source of the cost embedding, temperature, distance of numbers."""

    objective: str
    embedding: str = "model"
    temperature: float = 1.0
    numbers: NumberSettings = _DEFAULTS

    @property
    def training(self) -> str:
        """Name of what is trained; arms with the same one share it."""
        parts = [self.objective, "" if self.embedding == "model" else self.embedding, str(self.numbers)]
        return "/".join(part for part in parts if part)

    @property
    def name(self) -> str:
        return self.training + ("" if self.temperature == 1.0 else f"/T={self.temperature:g}")

    def cost_settings(self) -> dict[str, Any]:
        """What identifies the cost beside its embedding, as far as it is another than EMO's."""
        kind = cost_kind(self.objective)
        return {} if kind == "embedding" else {"cost": kind, "numbers": asdict(self.numbers)}


def parse_arm(text: str) -> Arm:
    """Read an arm from its name.

    Raises:
        ValueError: unknown objective or modifier, one that says nothing for this objective, or two of one sort.

    Example:
        >>> parse_arm("emo/T=0.8/random").name, parse_arm("number_token/log").numbers.scaling
        ('emo/random/T=0.8', 'log')
    """
    objective, *modifiers = text.strip().split("/")
    kind, reads_cost = cost_kind(objective), needs_cost(parse_objective(objective))
    given: dict[str, Any] = {}
    for modifier in modifiers:
        sort, value = _modifier(modifier)
        if sort == "":
            reason = f"{modifier!r} is not understood"
        elif sort in given:
            reason = f"{modifier!r} is a second {sort}"
        elif sort == "embedding" and (not reads_cost or kind == "number"):
            reason = f"{modifier!r} is an embedding, and it reads {'none' if reads_cost else 'no cost'}"
        elif sort == "scaling" and kind == "embedding":
            reason = f"{modifier!r} is a distance of numbers, which number_token and emo+number read"
        else:
            given[sort] = value
            continue
        raise ValueError(f"arm {text!r}: {reason}; expected {_MODIFIERS}.")
    own = {sort: given.pop(sort) for sort in ("embedding", "temperature") if sort in given}
    try:
        return Arm(objective.lower(), **own, numbers=NumberSettings(**given))
    except ValueError as error:
        raise ValueError(f"arm {text!r}: {error}") from None


def _modifier(text: str) -> tuple[str, str | float]:
    """What a modifier sets, and to what; "" where it is none."""
    for sort, choices in (("embedding", COST_SOURCES), ("scaling", SCALINGS)):
        if text in choices:
            return sort, text
    try:
        temperature = float(text.removeprefix("T=")) if text.startswith("T=") else 0.0
    except ValueError:
        temperature = 0.0
    return ("temperature", temperature) if 0.0 < temperature < float("inf") else ("", text)
