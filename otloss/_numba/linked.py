"""How functions that only kernels call are compiled: without machine code of their own.

numba turns each function into machine code with all optimisations, also one that only kernels call. A kernel has the
code of such a function in its own, where it is optimised again, and nobody calls the rest.

The function has no environment then, so it may raise no error whose text is made at run time.
"""

from __future__ import annotations

from typing import Any

from numba.core.codegen import JITCodeLibrary
from numba.core.compiler import Compiler


class _NoEnvironments:
    """In place of the object that writes environments into machine code."""

    def set_env(self, name: str, environment: Any) -> None:
        """Do nothing."""


class _LinkedCode(JITCodeLibrary):
    """Code that is simplified and left to its callers, which have it optimised with theirs."""

    codegen = _NoEnvironments()

    def _finalize_final_module(self) -> None:
        self._finalize_dynamic_globals()
        self._finalized = True

    def get_pointer_to_function(self, name: str) -> int:
        """Return the null pointer."""
        return 0


class LinkedCompiler(Compiler):
    """The compiler of numba with `_LinkedCode` as what it makes."""

    def define_pipelines(self) -> Any:
        self.state.library = _LinkedCode(self.state.targetctx.codegen(), self.state.func_id.func_qualname)
        return super().define_pipelines()
