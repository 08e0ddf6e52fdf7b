"""What packages that build on otloss share with it: argument checks, numba kernels, the line of number tokens.

`otloss_llm` imports these names and the public ones of `otloss`, nothing else. They are not for users of the losses,
and may change from one minor version to the next.

    checks          check_finite, check_floating, check_index, check_number, check_positive, check_reduction,
                    check_tensor
    numbers         SCALINGS, TEXT_OVER_WORST, NumberLine, checked_values, number_line, signed_log
    masses          MASS_TOLERANCE: by how much sums of weights may differ, for each dtype
    extras          missing_package: which package of an extra is not installed; install_hint: the command that installs
                    the extra; DISTRIBUTION: the name of the package that has it
    torch.compile   eager: decorates a function that runs outside of compiled graphs
    kernels         may_run_on; and what imports numba, at first use: compiled, exp32, next_task, run_on_threads,
                    spliced
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from otloss._autograd import eager as eager
from otloss._checks import check_finite as check_finite
from otloss._checks import check_floating as check_floating
from otloss._checks import check_index as check_index
from otloss._checks import check_number as check_number
from otloss._checks import check_positive as check_positive
from otloss._checks import check_reduction as check_reduction
from otloss._checks import check_tensor as check_tensor
from otloss._checks import missing_package as missing_package
from otloss._distribution import DISTRIBUTION as DISTRIBUTION
from otloss._distribution import install_hint as install_hint
from otloss._kernels import may_run_on as may_run_on
from otloss.losses.number_line import SCALINGS as SCALINGS
from otloss.losses.number_line import TEXT_OVER_WORST as TEXT_OVER_WORST
from otloss.losses.number_line import NumberLine as NumberLine
from otloss.losses.number_line import checked_values as checked_values
from otloss.losses.number_line import number_line as number_line
from otloss.losses.number_line import signed_log as signed_log
from otloss.solvers.histograms import MASS_TOLERANCE as MASS_TOLERANCE

if TYPE_CHECKING:
    from otloss._kernels._compile import compiled as compiled
    from otloss._kernels._compile import exp32 as exp32
    from otloss._kernels._compile import spliced as spliced
    from otloss._kernels._threads import next_task as next_task
    from otloss._kernels._threads import run_on_threads as run_on_threads

_WITH_NUMBA = {
    "compiled": "_compile",
    "exp32": "_compile",
    "next_task": "_threads",
    "run_on_threads": "_threads",
    "spliced": "_compile",
}

__all__ = [
    "DISTRIBUTION",
    "MASS_TOLERANCE",
    "SCALINGS",
    "TEXT_OVER_WORST",
    "NumberLine",
    "check_finite",
    "check_floating",
    "check_index",
    "check_number",
    "check_positive",
    "check_reduction",
    "check_tensor",
    "checked_values",
    "compiled",
    "eager",
    "exp32",
    "install_hint",
    "may_run_on",
    "missing_package",
    "next_task",
    "number_line",
    "run_on_threads",
    "signed_log",
    "spliced",
]


def __getattr__(name: str) -> Any:
    """Load what needs numba at first use: its import takes half a second."""
    if name not in _WITH_NUMBA:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"otloss._kernels.{_WITH_NUMBA[name]}"), name)
