"""Statistics of tokens, and objectives as sums of weighted terms, each a function of the statistics that it names.

Notation: `z` are the logits of a token over a vocabulary of V tokens, `q = softmax(z)`, `y` the label. The statistics
are vectors with one entry per token.

    nll           -log q_y, in nats
    cost          D = sum_i q_i c(i, y), the transport cost to the one-hot target (EMO's Eq. 14, `kernels/reference.py`)
    entropy       H = -sum_i q_i log q_i, in nats
    logsumexp     Z = log sum_i exp(z_i)
    mean_logit    M = sum_i z_i / V
    tempered_logsumexp    Z_T = T log sum_i exp(z_i / T), at the `temperature` of the term that reads it

    value = sum_k weight_k term_k(nll, cost, ...)

Any callable of statistics is an objective, a sum of one term, and the names of its parameters say what it reads:
`lambda nll, entropy: ...` gets these two. Two positional parameters of other names are `(nll, cost)`. What reads
`tempered_logsumexp` has an attribute `temperature`. The kernels compute what is named only, and obtain the derivatives
of the value by autograd on the vectors, so a new objective needs nothing else. It must treat tokens independently:
entry `t` of the value may depend on entry `t` of its arguments only, because the kernels pass the tokens in chunks, in
any order. `Sum.check_tokenwise` raises an error for an objective that does not.
"""

from __future__ import annotations

import functools
import inspect
import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from difflib import get_close_matches
from numbers import Real
from types import BuiltinFunctionType, MethodDescriptorType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

Objective = Callable[..., Tensor]


class Statistics(NamedTuple):
    """The statistics of some tokens, one vector each, or the derivatives in them; None where it is not computed."""

    nll: Tensor
    cost: Tensor | None = None
    entropy: Tensor | None = None
    logsumexp: Tensor | None = None
    mean_logit: Tensor | None = None
    tempered_logsumexp: Tensor | None = None

    def map(self, function: Callable[[Tensor], Tensor]) -> Statistics:
        """The function of each vector."""
        return Statistics(**{name: function(vector) for name, vector in self._asdict().items() if vector is not None})


@dataclass(frozen=True)
class Term:
    """`weight` times a function of the statistics that its parameters name.

    Attributes of the function may say more, as attributes of a class or of an instance may:

        needs_cost     False for one that names the cost and does not use it; what names it needs it
        cost_kind      the cost that it is meant for: "embedding" (the default), "number", "mixed" or "rating"
        signed_cost    True for one that is meant for costs that may be negative
        temperature    of `tempered_logsumexp`
    """

    function: Objective
    weight: float = 1.0

    @property
    def reads(self) -> tuple[str, ...]:
        """The names of the statistics."""
        return _signature(self.function)[0]

    @property
    def needs_cost(self) -> bool:
        return bool(self.stated("needs_cost", "cost" in self.reads))

    @property
    def fails_without_cost(self) -> bool:
        """A function of (nll, cost) may do without the second, unless it says what it needs."""
        return self.needs_cost and (self.reads != Statistics._fields[:2] or hasattr(self.function, "needs_cost"))

    def stated(self, name: str, default: Any) -> Any:
        """The attribute of the function, or the default."""
        return getattr(self.function, name, default)

    def value(self, statistics: Statistics) -> Tensor:
        """One number per token; raises ValueError if it is not."""
        value = self.of(statistics)
        if not isinstance(value, Tensor) or value.shape != statistics.nll.shape:
            got = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
            raise ValueError(
                f"objective {self.function!r} returned {got}, expected a value per token, "
                f"{tuple(statistics.nll.shape)}."
            )
        return value if self.weight == 1.0 else self.weight * value

    def of(self, statistics: Statistics) -> Tensor:
        """What the function returns for these statistics, whatever it is."""
        read, by_name = _signature(self.function)
        arguments = {name: getattr(statistics, name) for name in read}
        missing = [name for name, vector in arguments.items() if vector is None and name != "cost"]
        if missing:  # a function that needs the cost says so itself
            raise ValueError(
                f"objective {self.function!r} reads {missing}, which this path does not compute; use token_loss."
            )
        return self.function(**arguments) if by_name else self.function(*arguments.values())


class Sum(ABC):
    """An objective as a sum of weighted terms."""

    @property
    @abstractmethod
    def terms(self) -> tuple[Term, ...]:
        """The terms, at least one."""

    @staticmethod
    def of(objective: Objective) -> Sum:
        """The objective as a sum; any callable that is not one is a sum of one term.

        Raises:
            TypeError: the objective cannot be called.
        """
        if isinstance(objective, Sum):
            return objective
        if isinstance(objective, type):
            raise TypeError(
                f"objective is the class {objective.__name__}, expected an instance; write {objective.__name__}()."
            )
        if not callable(objective):
            hint = f"; parse_objective({objective!r}) makes one from a name" if isinstance(objective, str) else ""
            raise TypeError(
                f"objective is {objective!r}, expected a callable (nll, cost) -> value such as EMO(){hint}."
            )
        return _Terms((Term(objective),), objective)

    def __call__(self, *vectors: Tensor | None, **by_name: Tensor | None) -> Tensor:
        """The value, from what it reads: by place, in the order of `reads`, or by name."""
        return self.value(Statistics(**dict(zip(self.reads, vectors, strict=False)), **by_name))  # type: ignore[arg-type]

    @property
    def reads(self) -> tuple[str, ...]:
        """The statistics that the terms name by their parameters, in the order of `Statistics`.

        Parameters with a default and another name keep their default.

        Raises:
            ValueError: another parameter has no default, and the term is not one of `(nll, cost)`.

        Example:
            >>> Sum.of(lambda nll, entropy: nll).reads, Sum.of(lambda n, d: n).reads
            (('nll', 'entropy'), ('nll', 'cost'))
        """
        read = {name for term in self.terms for name in term.reads}
        return tuple(name for name in Statistics._fields if name in read)

    @property
    def needs_cost(self) -> bool:
        """Whether a term needs the transport cost."""
        return any(term.needs_cost for term in self.terms)

    @property
    def cost_kind(self) -> str:
        """The cost that the terms are meant for: "number", "mixed" (numbers and embedding), "rating" or "embedding"."""
        kinds = {term.stated("cost_kind", "embedding") for term in self.terms if term.needs_cost} or {"embedding"}
        if len(kinds) == 1:
            return str(kinds.pop())
        if "rating" in kinds:
            raise ValueError(f"the terms of {self!r} are meant for different costs, {sorted(kinds)}; leave one out.")
        return "mixed"

    @property
    def temperature(self) -> float | None:
        """The temperature of `tempered_logsumexp` where it is read; None where it is not.

        Raises:
            ValueError: it is read, and the attribute `temperature` is no positive, finite number, or terms differ.
        """
        read = {term.stated("temperature", None) for term in self.terms if "tempered_logsumexp" in term.reads}
        wrong = [value for value in read if not isinstance(value, Real) or not 0.0 < float(value) < math.inf]
        if wrong or len(read) > 1:
            raise ValueError(
                f"objective {self!r} reads tempered_logsumexp and its temperature is {(wrong or sorted(read))[0]!r}; "
                "expected an attribute temperature, a positive, finite number, the same in all terms."
            )
        return float(read.pop()) if read else None

    def terms_of(self, kind: type) -> list[Term]:
        """The terms that are of this class."""
        return [term for term in self.terms if isinstance(term.function, kind)]

    def weight_of(self, kind: type) -> float:
        """The weight of the terms of this class."""
        return sum(term.weight for term in self.terms_of(kind))

    def scaled(self, factor: float, kind: type = object) -> Sum:
        """Return the sum with the terms of this class, or all of them, multiplied by a factor."""
        terms = (
            replace(term, weight=term.weight * factor) if isinstance(term.function, kind) else term
            for term in self.terms
        )
        return _Terms(tuple(terms), self)

    def without(self, kind: type) -> Sum:
        """Return the sum without the terms of this class."""
        return _Terms(tuple(term for term in self.terms if not isinstance(term.function, kind)), self)

    def value(self, statistics: Statistics) -> Tensor:
        """One number per token; raises ValueError if a term gives another shape."""
        return functools.reduce(torch.add, (term.value(statistics) for term in self.terms))

    def value_and_gradients(self, statistics: Statistics) -> tuple[Tensor, Statistics]:
        """The value per token, and its derivatives in the statistics (None where a statistic is not used).

        All are `(N,)`; the derivative in nll is 0 where nll is not used. The value is NaN where a derivative is not
        finite, which would otherwise show in the gradient only. Raises ValueError if the value has another shape than
        nll, or depends on no statistic.
        """
        with torch.enable_grad():
            leaves = statistics.map(lambda vector: vector.detach().requires_grad_())
            value = self.value(leaves)
            if not value.requires_grad:
                names = " nor ".join(self.reads)
                raise ValueError(f"objective {self!r} returned a value that depends on neither {names}.")
            present = [vector for vector in leaves if vector is not None]
            derivatives = iter(torch.autograd.grad(value.sum(), present, allow_unused=True))
        of_leaves = {name: next(derivatives) for name, vector in leaves._asdict().items() if vector is not None}
        if of_leaves["nll"] is None:
            of_leaves["nll"] = torch.zeros_like(statistics.nll)
        gradients = Statistics(**of_leaves)
        finite = torch.isfinite(torch.stack([gradient for gradient in gradients if gradient is not None])).all(0)
        return value.detach().masked_fill(~finite, math.nan), gradients

    def check_tokenwise(self, statistics: Statistics, value: Tensor) -> None:
        """Raise ValueError unless every second token has the same value without the other tokens.

        It catches statistics over the batch (`nll.mean()`), tensors of one entry per token that an objective closes
        over, and parameters of its own, whose gradient the kernels would lose.
        """
        alternate = statistics.map(lambda vector: vector[::2].detach())
        with torch.enable_grad():
            part = functools.reduce(torch.add, (term.weight * term.of(alternate) for term in self.terms))
        if part.requires_grad:
            raise ValueError(
                f"objective {self!r} holds parameters that require grad, which this kernel does not differentiate; "
                'use impl="reference", or detach them.'
            )
        value = value[::2]
        same = part.shape == value.shape
        if same:
            expected = torch.where(value.isnan(), part, value)  # NaN marks a gradient, see value_and_gradients
            same = torch.allclose(part, expected, rtol=1e-3, atol=1e-6, equal_nan=True)
        if not same:
            raise ValueError(
                f"objective {self!r} gives a token another value beside other tokens; entry t of the value may "
                "depend on entry t of its arguments only. Compute statistics over the batch beforehand and pass them "
                "as numbers."
            )


@dataclass(frozen=True, repr=False)
class _Terms(Sum):
    """Terms, and the objective that they are from, which error messages name."""

    kept: tuple[Term, ...]
    objective: Objective

    @property
    def terms(self) -> tuple[Term, ...]:
        return self.kept

    def __repr__(self) -> str:
        return repr(self.objective)


def _signature(function: Objective) -> tuple[tuple[str, ...], bool]:
    """The statistics that a function reads, and whether they are passed by name."""
    module: Any = getattr(function, "_orig_mod", function)  # that torch.compile has wrapped
    named = module
    if isinstance(module, nn.Module):
        _, *own = inspect.signature(type(module).__call__).parameters.values()
        named = module if any(p.kind in _MUST for p in own) else module.forward  # else it passes on what it is given
    try:
        parameters = list(inspect.signature(named).parameters.values())
    except (TypeError, ValueError) as error:
        inner = named.func if isinstance(named, functools.partial) else named
        if isinstance(inner, BuiltinFunctionType | MethodDescriptorType):  # of torch
            return Statistics._fields[:2], False
        raise ValueError(  # such as TorchScript
            f"objective {function!r} has no signature, expected parameters with names of {list(Statistics._fields)}; "
            "wrap it: lambda nll, entropy: f(nll, entropy)."
        ) from error
    by_name = tuple(p.name for p in parameters if p.name in Statistics._fields and p.kind in _BY_NAME)
    places = [p.name for p in parameters if p.kind in _BY_PLACE and (p.default is p.empty or p.name in by_name)]
    others = [p.name for p in parameters if p.name not in by_name and p.kind in _MUST if p.default is p.empty]
    if by_name and not others:
        return by_name, True
    pair = len(places) == 2 and set(others) <= set(places)
    pair = pair and all(place in (*others, own) for place, own in zip(places, Statistics._fields, strict=False))
    if pair:
        _check_names(function, places)
    kinds = [p.kind for p in parameters]
    # (*args, **kwargs) may be a decorator without functools.wraps around any parameters.
    takes_any = inspect.Parameter.VAR_POSITIONAL in kinds and inspect.Parameter.VAR_KEYWORD not in kinds
    if pair or (takes_any and not places):
        return Statistics._fields[:2], False
    raise ValueError(
        f"objective {function!r} has parameters {[p.name for p in parameters]}, expected some of "
        f"{list(Statistics._fields)}, or two positional parameters, which get nll and cost; give others a default."
    )


def _check_names(function: Objective, pair: list[str]) -> None:
    """Raise ValueError if one of the names of nll and cost is almost the name of another statistic, which was meant."""
    for name, own in zip(pair, Statistics._fields, strict=False):
        near = get_close_matches(name, Statistics._fields, n=1, cutoff=0.75)
        if near and near[0] != own:
            raise ValueError(
                f"objective {function!r} has a parameter {name!r} in the place of {own}, did you mean {near[0]}? Two "
                "positional parameters of other names get nll and cost."
            )


_BY_PLACE = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
_BY_NAME = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
_MUST = (*_BY_PLACE, inspect.Parameter.KEYWORD_ONLY)  # be given, if there is no default
