"""The keywords of GeomLoss and POT that are tried here, and ours in their place.

Signatures stay as they are: a decorator reads the keywords of a call before Python does.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Container, Iterable
from typing import NamedTuple, ParamSpec, TypeVar

_P = ParamSpec("_P")
_R = TypeVar("_R")


class _Keyword(NamedTuple):
    """Whose keyword it is, the option here that has its place (None: there is none), and what to do then."""

    library: str
    ours: str | None
    advice: str


_LEAVE_OUT = "leave it out"
_KEYWORDS = {
    "loss": _Keyword("GeomLoss", "kind", 'kind="divergence" is its "sinkhorn"'),
    "p": _Keyword("GeomLoss", "metric", 'give metric="sqeuclidean" for p=2, metric="euclidean" for p=1'),
    "cost": _Keyword("GeomLoss", "metric", 'give metric="sqeuclidean" or "euclidean", or a function of two clouds'),
    "blur": _Keyword(
        "GeomLoss", "epsilon", "give epsilon=2 * blur**2 for squared distances (with half of the value), "
        "epsilon=blur for distances, or call cloud_loss(x, y, blur=...)",
    ),
    "reach": _Keyword(
        "GeomLoss", "marginal_penalty", "give marginal_penalty=2 * reach**2 for squared distances, "
        "marginal_penalty=reach for distances",
    ),
    "debias": _Keyword(
        "GeomLoss", None, 'leave it out: cloud_loss(kind="divergence") and sinkhorn_divergence are debiased, and '
        "sinkhorn(a, b, PointCost(x, y), epsilon=...) is not",
    ),
    "scaling": _Keyword("GeomLoss", "tolerance", "leave it out: iterations end at tolerance=..., the marginal error"),
    "diameter": _Keyword("GeomLoss", None, "leave it out: steps of epsilon follow the largest cost"),
    "truncate": _Keyword("GeomLoss", None, _LEAVE_OUT),
    "cluster_scale": _Keyword("GeomLoss", None, _LEAVE_OUT),
    "backend": _Keyword("GeomLoss", "impl", 'leave it out: impl="auto" takes the fastest'),
    "potentials": _Keyword("GeomLoss", None, "use solve(...).potentials"),
    "a": _Keyword("POT", "p", "the order is (p, q, cost): give p=a"),
    "b": _Keyword("POT", "q", "the order is (p, q, cost): give q=b"),
    "M": _Keyword("POT", "cost", "the order is (p, q, cost): give cost=M"),
    "reg": _Keyword("POT", "epsilon", "give epsilon=reg"),
    "reg_m": _Keyword("POT", "marginal_penalty", "give marginal_penalty=reg_m"),
    "unbalanced": _Keyword("POT", "marginal_penalty", "give marginal_penalty=..."),
    "m": _Keyword("POT", "mass", "give mass=m"),
    "numItermax": _Keyword("POT", "max_iterations", "give max_iterations=..."),
    "max_iter": _Keyword("POT", "max_iterations", "give max_iterations=..."),
    "stopThr": _Keyword("POT", "tolerance", "give tolerance=..., which is relative to the mass"),
    "tol": _Keyword("POT", "tolerance", "give tolerance=..., which is relative to the mass"),
    "method": _Keyword("POT", "impl", 'leave it out: impl="auto" takes the fastest'),
    "warmstart": _Keyword("POT", "start", "give start=(f, g), potentials in the unit of the cost"),
    "log": _Keyword("POT", None, "use solve(...), which has the plan, the potentials and the errors"),
    "numThreads": _Keyword("POT", None, "leave it out: torch.set_num_threads holds here too"),
    "verbose": _Keyword("POT and GeomLoss", None, _LEAVE_OUT),
}  # fmt: skip


def explains_foreign_keywords(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Decorate a function: a keyword of GeomLoss or POT raises a TypeError that names ours."""
    own = inspect.signature(function).parameters

    @functools.wraps(function)
    def call(*args: _P.args, **settings: _P.kwargs) -> _R:
        check_keywords(function.__qualname__, settings, own)
        return function(*args, **settings)

    return call


def check_keywords(function: str, keywords: Iterable[str], own: Container[str]) -> None:
    """Raise TypeError for a keyword of GeomLoss or POT that is not among the function's own."""
    for name in keywords:
        if name in _KEYWORDS and name not in own:
            raise TypeError(_message(function, name, _KEYWORDS[name], own))


def _message(function: str, name: str, keyword: _Keyword, own: Container[str]) -> str:
    advice = keyword.advice
    if keyword.ours is not None and keyword.ours not in own:
        advice = f"leave it out, or use a function that has {keyword.ours}= (docs/guide/coming_from.md has a table)"
    return f"{function} has no option {name!r}, which is {keyword.library}'s; {advice}."
