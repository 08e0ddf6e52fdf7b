"""The decorator of the public functions: calls are explained, arrays become tensors, torch.compile stays outside.

Signatures stay as they are: the decorator reads the arguments of a call before Python does.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import numpy as np
import torch
from torch import Tensor

from otloss._checks import check_generator, check_layout, check_not_masked
from otloss._foreign import check_call
from otloss._progress import begin, end

_P = ParamSpec("_P")
_R = TypeVar("_R")


def public(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Decorate a public function.

    A call that its signature does not take raises a TypeError that says what to write, as does a `generator` that is
    none, also where nothing is drawn. Arrays of numpy, also in a list, are copied to tensors of the same dtype. Negated
    views of torch are written out: numpy cannot read them. Where a call takes long, the log says so. `torch.compile`
    cannot trace the solvers: a program around the function is split there.
    """
    own = dict(inspect.signature(function).parameters)
    unnamed = sum(parameter.kind is not parameter.KEYWORD_ONLY for parameter in own.values())

    def run(*args: Any, **settings: Any) -> Any:
        if len(args) > unnamed or "p" in settings or not settings.keys() <= own.keys():
            check_call(function.__qualname__, own, args, settings)
        if "generator" in settings:
            check_generator(settings["generator"])
        args = tuple([as_tensor(name, value) for name, value in zip(own, args, strict=False)])
        settings = {name: as_tensor(name, value) for name, value in settings.items()}
        if not begin(function.__name__):  # called by another one
            return function(*args, **settings)
        try:
            return function(*args, **settings)
        finally:
            end()

    @functools.wraps(function)
    def call(*args: _P.args, **settings: _P.kwargs) -> _R:
        if torch.compiler.is_compiling():
            from otloss._uncompiled import uncompiled  # takes a second: it imports the compiler

            result: _R = uncompiled(run, *args, **settings)
            return result
        value: _R = run(*args, **settings)
        return value

    return call


def as_tensor(name: str, value: Any) -> Any:
    """Return a tensor in place of an array of numpy, and in a list of them; other values as they are."""
    if isinstance(value, Tensor):
        check_layout(name, value)
        return value.resolve_neg() if value.is_neg() else value
    if isinstance(value, (list, tuple)) and any(isinstance(one, np.ndarray) for one in value):
        return [as_tensor(f"{name}[{place}]", one) for place, one in enumerate(value)]
    if not isinstance(value, np.ndarray):
        return value
    check_not_masked(value)
    # A copy: arrays do not tell of later changes, as tensors do, and graphs and results read their inputs again.
    native = value.astype(value.dtype.newbyteorder("="), order="C")
    try:
        return torch.from_numpy(native)
    except TypeError:  # no dtype of torch: the checks of the function name it
        return value
