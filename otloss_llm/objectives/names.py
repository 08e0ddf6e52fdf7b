"""Names of objectives, on the command line and in the trainer: a formula, and terms that are added to it.

    gem:0.7+z_loss:0.0001+number:0.3+smoothing:0.1

An entry in `FORMULAS` or `TERMS` is all that a new name needs.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable
from typing import NamedTuple

from otloss_llm.objectives.formulas import (
    EAFT,
    EMO,
    GEM,
    MLE,
    ExpectedValue,
    LabelSmoothing,
    MixCE,
    NumberToken,
    Power,
    TaiLr,
    WithNumbers,
    ZLoss,
)
from otloss_llm.objectives.statistics import Objective


class Entry(NamedTuple):
    """What a name makes, the default of the number behind its colon, and what that is called (None: no number)."""

    make: Callable[..., Objective]
    default: float | None = None
    number: str | None = None


FORMULAS: dict[str, Entry] = {
    "mle": Entry(MLE),
    "tailr": Entry(TaiLr, 1e-3, "GAMMA"),  # a larger gamma collapses on text that the model finds improbable
    "mixce": Entry(MixCE, 0.8, "GAMMA"),  # within the sweep of the EMO paper
    "emo": Entry(EMO, None, "WEIGHT"),  # and more, see _emo
    "number_token": Entry(NumberToken, 0.3, "WEIGHT"),
    "dft": Entry(lambda: MixCE(0.0)),
    "power": Entry(Power, 1.0, "K"),
    "eaft": Entry(EAFT),
    "gem": Entry(GEM, 0.7, "BETA"),
    "expected_value": Entry(ExpectedValue, 1.0, "WEIGHT"),
}
TERMS: dict[str, Entry] = {
    "smoothing": Entry(LabelSmoothing, None, "EPSILON"),
    "z_loss": Entry(ZLoss, None, "WEIGHT"),
    "number": Entry(WithNumbers, 0.3, "WEIGHT"),
}

# Names of these objectives elsewhere, and of terms, without "-" and "_"; and numbers of terms that need one.
_FORMULAS_ELSEWHERE = {
    "ntl": "number_token", "ntloss": "number_token", "number": "number_token", "wasserstein": "number_token",
    "ce": "mle", "crossentropy": "mle", "nll": "mle", "sft": "mle", "emd": "emo", "emoloss": "emo",
}  # fmt: skip
_TERMS_ELSEWHERE = {"ntl": "number", "ntloss": "number", "numbertoken": "number", "labelsmoothing": "smoothing"}
_USUAL = {"smoothing": "0.1", "z_loss": "0.0001"}
EXPECTED = (
    f"{', '.join(FORMULAS)}, emo+number, or with a number: "
    f"{', '.join(f'{name}:{entry.number}' for name, entry in FORMULAS.items() if entry.number)}, emo:transport, "
    "emo:clip=NUMBER, emo:clip=none; and behind any of them "
    f"{', '.join(f'+{name}:{entry.number}' for name, entry in TERMS.items())} (behind emo +number is its cost)"
)


def parse_objective(text: str) -> Objective:
    """An objective from its name: `mle`, `tailr:0.001`, `mixce:0.8`, `emo`, `emo:transport`, `emo:0.5`, `emo:clip=3`,
    `emo:clip=none`, `number_token`, `number_token:0.3`, `emo+number`, `dft`, `power:2`, `eaft`,
    `gem:0.7`, `expected_value:1`; and with more terms, `gem+smoothing:0.1+z_loss:0.0001`, `gem+number:0.3`.

    What follows the colon is gamma for TaiLr and MixCE (defaults 0.001 and 0.8), for EMO the weighting or the clip
    (default 3; none is EMO as published), for the number token loss its weight (default 0.3), for `power` the exponent
    (default 1), for `gem` beta (default 0.7), for `expected_value` its weight (default 1). Terms are added from left to
    right: `+smoothing` acts on all before it. `emo+number` is no sum: it is EMO with a cost between numbers too
    (`cost="mixed"`), and what follows is EMO's (`emo+number:0.5`).

    Raises:
        TypeError: if it is no text.
        ValueError: unknown name or parameter.

    Example:
        >>> parse_objective("mixce:0.7")
        MixCE(gamma=0.7)
    """
    if not isinstance(text, str):
        raise TypeError(f"objective is {text!r}, expected a name, one of {EXPECTED}.")
    lower = text.strip().lower()
    name, *terms = (part.partition(":") for part in re.split(rf"\+(?={'|'.join(TERMS)})", lower))
    near = _nearest(lower)
    meant = f" (did you mean {near!r}?)" if near not in ("", lower) else ""
    if name[0] not in FORMULAS or (name[2] and FORMULAS[name[0]].number is None):
        raise ValueError(f"objective is {text!r}{meant}, expected one of {EXPECTED}.")
    for term, _, _ in terms:
        if term not in TERMS:
            raise ValueError(f"objective is {text!r}{meant}: +{term} is not known, expected one of {EXPECTED}.")
    try:
        if name[0] == "emo":
            numbers = bool(terms) and terms[0][0] == "number" and not (name[2] and terms[0][2])
            weighting = name[2] or (terms[0][2] if numbers else "")
            objective: Objective = _emo(weighting, numbers=numbers)
            terms = terms[numbers:]
        else:
            objective = FORMULAS[name[0]].make(*_number(FORMULAS[name[0]], name[0], name[2]))
        for term, _, number in terms:
            objective = TERMS[term].make(objective, *_number(TERMS[term], f"+{term}", number))
    except ValueError as error:
        raise ValueError(f"objective is {text!r}{meant}: {error}") from None
    return objective


def _nearest(text: str) -> str:
    """The spelling that is meant, with all terms and numbers; "" if a part is like none of the names."""
    first, *terms = re.split(r"\s*\+\s*(?=[a-z])", text)
    formula = _nearest_part(first, FORMULAS, _FORMULAS_ELSEWHERE)
    if not formula:  # a term alone
        formula, terms = "mle", [first, *terms]
    parts = [formula, *(_nearest_part(term, TERMS, _TERMS_ELSEWHERE) for term in terms)]
    # A number behind emo+number is a weighting of transport, and not the weight of a loss.
    is_other = formula.startswith("emo") and any(part.startswith("number:") for part in parts)
    return "+".join(parts) if all(parts) and not is_other else ""


def _nearest_part(part: str, entries: dict[str, Entry], elsewhere: dict[str, str]) -> str:
    word, _, number = part.partition(":")
    plain, own = re.sub(r"[-_\s]", "", word), {name.replace("_", ""): name for name in entries}
    name = (own | elsewhere).get(plain) or next((own[near] for near in difflib.get_close_matches(plain, own, n=1)), "")
    number = number or _USUAL.get(name, "")
    return f"{name}:{number}" if name and number and entries[name].number else name


def _emo(text: str, *, numbers: bool) -> EMO:
    """EMO from what follows its colon: a weighting, or `clip=`."""
    kind = "mixed" if numbers else "embedding"
    if text.startswith("clip="):
        clip = text.removeprefix("clip=")
        return EMO(ratio_clip=None if clip == "none" else _float("clip=", clip), cost_kind=kind)
    words = ("", "ratio", "transport")
    return EMO((text or "ratio") if text in words else _float("emo:", text), cost_kind=kind)


def _number(entry: Entry, name: str, text: str) -> list[float]:
    """The number behind a name, or its default, as the last argument of `entry.make`."""
    if not text and entry.default is not None:
        return [entry.default]
    return [] if entry.number is None else [_float(f"{name}:", text)]


def _float(prefix: str, text: str) -> float:
    """Return the number that follows a prefix in the name of an objective."""
    try:
        return float(text)
    except ValueError:
        raise ValueError(f"{text!r} is not a number, expected one behind {prefix!r}, as in {prefix}0.5.") from None
