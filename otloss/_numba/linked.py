"""Compilers that do less than numba's: what a kernel contains is neither copied nor typed twice, nor code of its own.

numba puts the body of a function with inline="always" into its caller. It copies the blocks of the body for that, and
with each block all variables of the function, which takes up to 0.4 of the time of a kernel. Variables are renamed
afterwards anyway, so `KernelCompiler` lets the copies share them.

For each operation, each time that it looks at it, numba tries all functions that could be meant, such as 40 for `+`:
a quarter of the time of a kernel. `KernelCompiler` keeps what was found for the same arguments.

numba turns each other function into machine code, also one that only kernels call. A kernel has the code of such a
function in its own, and nobody calls the rest, so `LinkedCompiler` leaves it out. The function has no environment then,
and may raise no error whose text is made at run time.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from numba.core import ir
from numba.core.codegen import JITCodeLibrary
from numba.core.compiler import Compiler, DefaultPassBuilder
from numba.core.compiler_machinery import PassManager
from numba.core.targetconfig import ConfigStack
from numba.core.typed_passes import NopythonRewrites
from numba.core.types.functions import BaseFunction
from numba.core.untyped_passes import InlineClosureLikes

# Functions within functions, and expressions of whole arrays.
UNUSED = InlineClosureLikes, NopythonRewrites


@contextmanager
def _shared_variables() -> Iterator[None]:
    """Within this context, which numba's lock lets one thread enter, deep copies of code share its variables."""
    changed = [each for each in (ir.Scope, ir.Loc) if not hasattr(each, "__deepcopy__")]  # none within another kernel
    for each in changed:
        each.__deepcopy__ = lambda self, _: self
    try:
        yield
    finally:
        for each in changed:
            del each.__deepcopy__


@contextmanager
def _kept_signatures() -> Iterator[None]:
    """Within this context, which numba's lock lets one thread enter, each operation is looked up once per function."""
    look_up, signatures = BaseFunction.get_call_type, dict[Any, Any]()

    def get_call_type(self: Any, context: Any, args: Any, kws: Any) -> Any:
        # An operation may be a function, compiled with the flags of its caller; these are an object for each caller.
        key = ConfigStack.top_or_none(), self, tuple(args), tuple(kws.items())
        place = id(key[0]), *key[1:]
        if place not in signatures:
            signatures[place] = key, look_up(self, context, args, kws)
        return signatures[place][1]

    BaseFunction.get_call_type = get_call_type  # type: ignore[method-assign]
    try:
        yield
    finally:
        BaseFunction.get_call_type = look_up  # type: ignore[method-assign]


class _ShorterCompiler(Compiler):
    """The compiler of numba, without the passes for what kernels do not contain."""

    def define_pipelines(self) -> Any:
        passes = [one for one in DefaultPassBuilder.define_nopython_pipeline(self.state).passes if one[0] not in UNUSED]
        manager = PassManager("kernel")
        manager.passes.extend(passes)
        manager.finalize()
        return [manager]


class KernelCompiler(_ShorterCompiler):
    """The parent class, with copies of code that share variables, and signatures that are looked up once."""

    def compile_extra(self, function: Any) -> Any:
        with _shared_variables(), _kept_signatures():
            return super().compile_extra(function)


class _NoEnvironments:
    """Replaces the object that writes environments into machine code."""

    def set_env(self, name: str, environment: Any) -> None:
        """Do nothing."""


class _LinkedCode(JITCodeLibrary):
    """Code that is optimised, so that loops are vectorised, and that callers link into theirs."""

    codegen = _NoEnvironments()

    def _finalize_final_module(self) -> None:
        self._finalize_dynamic_globals()
        self._finalized = True

    def get_pointer_to_function(self, name: str) -> int:
        """Return the null pointer."""
        return 0


class LinkedCompiler(_ShorterCompiler):
    """The parent class, but it makes `_LinkedCode`. Kernels call it while they are compiled."""

    def define_pipelines(self) -> Any:
        self.state.library = _LinkedCode(self.state.targetctx.codegen(), self.state.func_id.func_qualname)
        return super().define_pipelines()
