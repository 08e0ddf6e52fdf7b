"""What kernels that run on several threads call: the next task, and whether to leave a long one."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import types
from numba.extending import intrinsic

from otloss._numba.compile import bits_of_float64, inner
from otloss._numba.threads import COUNTER


@intrinsic
def next_task(typing_context: Any, counter: Any) -> Any:
    """Return the first number in `counter` (an int64 array) and raise it by one, atomically."""

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        array = context.make_array(signature.args[0])(context, builder, arguments[0])
        return builder.atomic_rmw("add", array.data, context.get_constant(types.int64, 1), "monotonic")

    return types.int64(counter), codegen


@intrinsic
def _read_next(typing_context: Any, counter: Any) -> Any:
    """Return the first number in `counter`, read anew each time."""

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        array = context.make_array(signature.args[0])(context, builder, arguments[0])
        return builder.load_atomic(array.data, "monotonic", 8)

    return types.int64(counter), codegen


@inner()
def is_stopped(counter: Any, error: float, share: float) -> bool:
    """Write how far a long task is, with NaN for what is not known. Return whether to leave it at once.

    The result of a task that is left is not used.
    """
    counter[COUNTER.error], counter[COUNTER.share] = (
        bits_of_float64(np.float64(error)),
        bits_of_float64(np.float64(share)),
    )
    return _read_next(counter) >= COUNTER.stopped
