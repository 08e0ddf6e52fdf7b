"""What packages and applications that build on otloss share with it.

`otloss.applications` and `otloss_llm` import these names and public ones of `otloss`, nothing else: they are examples
of how to build your own. The names may change from one minor version to the next.

    checks          check_*: arguments; MASS_TOLERANCE: by how much sums of weights may differ, for each dtype
    transport       emd, sinkhorn, solve and their like; pose, answer, Settings: one problem with its options;
                    solve_exact: exact transport without a graph
    histograms      check_masses, histogram_pair, weights_or_uniform
    autograd        once_only, check_no_tangent, check_no_transform: errors in place of derivatives that are not given;
                    makes_graph; eager: decorates a function that runs outside of graphs of torch.compile
    errors          ConvergenceWarning, level_of_the_caller, SmallEpsilonError;
                    explains_calls, takes_arrays: decorators for calls as other packages take them; missing_name: the
                    error of a module for their names;
                    missing_package, install_hint, DISTRIBUTION: packages of an extra
    losses          reduced; SCALINGS, TEXT_OVER_WORST, checked_values, number_line,
                    signed_log: the line of number tokens
    kernels         may_run_on; and what imports numba, at first use: compiled, exp32, next_task, run_on_threads,
                    spliced, ENTRIES, Work
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from otloss._autograd import check_no_tangent as check_no_tangent
from otloss._autograd import check_no_transform as check_no_transform
from otloss._autograd import eager as eager
from otloss._autograd import once_only as once_only
from otloss._checks import check_broadcast as check_broadcast
from otloss._checks import check_cloud as check_cloud
from otloss._checks import check_count as check_count
from otloss._checks import check_finite as check_finite
from otloss._checks import check_floating as check_floating
from otloss._checks import check_index as check_index
from otloss._checks import check_integers as check_integers
from otloss._checks import check_last_axis as check_last_axis
from otloss._checks import check_not_negative as check_not_negative
from otloss._checks import check_number as check_number
from otloss._checks import check_positive as check_positive
from otloss._checks import check_reduction as check_reduction
from otloss._checks import check_tensor as check_tensor
from otloss._checks import missing_package as missing_package
from otloss._distribution import DISTRIBUTION as DISTRIBUTION
from otloss._distribution import install_hint as install_hint
from otloss._foreign import explains_calls as explains_calls
from otloss._foreign import missing_name as missing_name
from otloss._foreign import takes_arrays as takes_arrays
from otloss._kernels import may_run_on as may_run_on
from otloss.costs.cost import arithmetic_dtype as arithmetic_dtype
from otloss.costs.cost import makes_graph as makes_graph
from otloss.costs.points import Metric as Metric
from otloss.solvers.convergence import ConvergenceWarning as ConvergenceWarning
from otloss.solvers.convergence import level_of_the_caller as level_of_the_caller
from otloss.solvers.exact import solve_exact as solve_exact
from otloss.solvers.problem import MASS_TOLERANCE as MASS_TOLERANCE
from otloss.solvers.problem import Settings as Settings
from otloss.solvers.problem import SmallEpsilonError as SmallEpsilonError
from otloss.solvers.problem import check_masses as check_masses
from otloss.solvers.problem import has_float64 as has_float64
from otloss.solvers.problem import histogram_pair as histogram_pair
from otloss.solvers.problem import pose as pose
from otloss.solvers.problem import weights_or_uniform as weights_or_uniform
from otloss.solvers.sliced import sliced_wasserstein as sliced_wasserstein
from otloss.solvers.solve import answer as answer
from otloss.solvers.solve import emd as emd
from otloss.solvers.solve import sinkhorn as sinkhorn
from otloss.solvers.solve import sinkhorn_divergence as sinkhorn_divergence
from otloss.solvers.solve import solve as solve
from otloss.solvers.transport import Transport as Transport

if TYPE_CHECKING:
    from otloss._kernels._compile import compiled as compiled
    from otloss._kernels._compile import exp32 as exp32
    from otloss._kernels._compile import spliced as spliced
    from otloss._kernels._threads import ENTRIES as ENTRIES
    from otloss._kernels._threads import Work as Work
    from otloss._kernels._threads import next_task as next_task
    from otloss._kernels._threads import run_on_threads as run_on_threads
    from otloss.losses.number_line import SCALINGS as SCALINGS
    from otloss.losses.number_line import TEXT_OVER_WORST as TEXT_OVER_WORST
    from otloss.losses.number_line import checked_values as checked_values
    from otloss.losses.number_line import number_line as number_line
    from otloss.losses.number_line import signed_log as signed_log
    from otloss.losses.rows import Positions as Positions

# At first use: numba takes half a second to import, and `otloss.losses` imports applications, which import this file.
_AT_FIRST_USE = {
    "compiled": "otloss._kernels._compile",
    "exp32": "otloss._kernels._compile",
    "spliced": "otloss._kernels._compile",
    "ENTRIES": "otloss._kernels._threads",
    "Work": "otloss._kernels._threads",
    "next_task": "otloss._kernels._threads",
    "run_on_threads": "otloss._kernels._threads",
    "SCALINGS": "otloss.losses.number_line",
    "TEXT_OVER_WORST": "otloss.losses.number_line",
    "checked_values": "otloss.losses.number_line",
    "number_line": "otloss.losses.number_line",
    "signed_log": "otloss.losses.number_line",
    "Positions": "otloss.losses.rows",
}

__all__ = [
    "DISTRIBUTION",
    "ENTRIES",
    "MASS_TOLERANCE",
    "SCALINGS",
    "TEXT_OVER_WORST",
    "ConvergenceWarning",
    "Metric",
    "Positions",
    "Settings",
    "SmallEpsilonError",
    "Transport",
    "Work",
    "answer",
    "arithmetic_dtype",
    "check_broadcast",
    "check_cloud",
    "check_count",
    "check_finite",
    "check_floating",
    "check_index",
    "check_integers",
    "check_last_axis",
    "check_masses",
    "check_no_tangent",
    "check_no_transform",
    "check_not_negative",
    "check_number",
    "check_positive",
    "check_reduction",
    "check_tensor",
    "checked_values",
    "compiled",
    "eager",
    "emd",
    "exp32",
    "explains_calls",
    "has_float64",
    "histogram_pair",
    "install_hint",
    "level_of_the_caller",
    "makes_graph",
    "may_run_on",
    "missing_package",
    "next_task",
    "number_line",
    "once_only",
    "pose",
    "run_on_threads",
    "signed_log",
    "sinkhorn",
    "sinkhorn_divergence",
    "sliced_wasserstein",
    "solve",
    "solve_exact",
    "spliced",
    "takes_arrays",
    "weights_or_uniform",
]


def __getattr__(name: str) -> Any:
    if name not in _AT_FIRST_USE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_AT_FIRST_USE[name]), name)
