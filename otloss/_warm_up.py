"""Compile the CPU kernels before they are needed."""

from __future__ import annotations

import contextlib
import logging
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from otloss._numba.background import can_start_python, compiling_here, start_python
from otloss.boosting import lightgbm_objective, xgboost_objective
from otloss.costs import PointCost
from otloss.losses import document_distance, ordinal_loss
from otloss.losses.documents import document_search
from otloss.solvers.assignment.match import match
from otloss.solvers.closed_forms.line import cdf_distance, wasserstein_1d
from otloss.solvers.closed_forms.sliced import sliced_wasserstein
from otloss.solvers.divergence import sinkhorn_divergence
from otloss.solvers.gromov.fused_gromov import fused_gromov
from otloss.solvers.solve import emd, sinkhorn, solve

_log = logging.getLogger("otloss")

# Large enough that kernels are used where small problems are left to torch.
_BINS, _ROWS = 300, 5000
# A kernel takes up to a fifth of all seconds, so more processes would only take memory, 0.4 GiB each.
MAX_PROCESSES = 8


def warm_up(*names: str, dtypes: Iterable[torch.dtype] = (torch.float32, torch.float64)) -> None:
    """Compile the kernels of the functions named, values and gradients, or of all functions that have kernels.

    Otherwise a kernel is compiled at its first call for each dtype, which takes some seconds. All of them take 80 to
    140 CPU seconds, by the machine, in as many processes as torch uses threads, at most 8; a bar shows how far they
    are, and what is there already is read. `python -m otloss.warm_up` does it for an image of a container. The
    kernels of exact transport between large clouds and of barycenters with slow iterations wait for their first call.

    What is compiled is kept on disk beside the package, or in the user's cache folder where that cannot be written to.
    The environment variable NUMBA_CACHE_DIR, set before Python starts, chooses another folder. numba reads kernels only
    from a folder that it may write to. Where there is none, each process compiles for itself, and says so in a log
    line. The token losses have `otloss_llm.warm_up`.

    Args:
        names: some of "emd", "sinkhorn", "solve", "sinkhorn_divergence", "newton" (of the entropic ones, where
            iterations are slow), "wasserstein_1d", "cdf_distance", "sliced_wasserstein", "ordinal_loss", "boosting",
            "documents", "fused_gromov" and "match"; none for all.
        dtypes: torch.float32, torch.float64 or both.

    Raises:
        TypeError: if a name is not a string, or dtypes is not a collection of dtypes.
        ValueError: if a name or a dtype is not one of these.

    Example:
        >>> warm_up("cdf_distance", dtypes=[torch.float32])
    """
    if not all(isinstance(name, str) for name in names):
        raise TypeError(f'names are {names}, expected strings one by one, such as warm_up("emd", "solve").')
    unknown = sorted(set(names) - set(EXAMPLES))
    if unknown:
        raise ValueError(f"no kernels are known for {unknown}; expected some of {sorted(EXAMPLES)}.")
    if isinstance(dtypes, (str, torch.dtype)):
        raise TypeError(f"dtypes is {dtypes!r}, expected a list, such as [torch.float32].")
    dtypes = list(dict.fromkeys(dtypes))
    if any(dtype not in DTYPES.values() for dtype in dtypes):
        raise ValueError(f"dtypes are {dtypes}; expected torch.float32, torch.float64 or both.")
    tasks = _tasks([name for name in EXAMPLES if name in (names or EXAMPLES)], dtypes)
    from otloss._numba.notices import silenced  # takes a second: it imports numba

    processes = min(torch.get_num_threads(), MAX_PROCESSES) if _are_kept() and can_start_python() else 1
    begin = time.perf_counter()
    with _other_processes(tasks, processes - 1), silenced():
        _show(0, len(tasks), 0.0)
        for done, task in enumerate(tasks, start=1):
            run_task(task)
            _show(done, len(tasks), time.perf_counter() - begin)


def _tasks(names: list[str], dtypes: list[torch.dtype]) -> list[str]:
    """Return names with dtypes. One process would wait for a kernel of `IN_FLOAT64` that another one compiles."""
    selected = [dtype for dtype in DTYPES if DTYPES[dtype] in dtypes]
    return [
        f"{name} {dtype}" for dtype in selected for name in names if name not in IN_FLOAT64 or dtype == selected[0]
    ]  # fmt: skip


def run_task(task: str) -> None:
    """Compile the kernels of a name and a dtype that are not on disk."""
    name, dtype = task.split()
    with compiling_here(), torch.inference_mode(False), torch.enable_grad():
        EXAMPLES[name](DTYPES[dtype])


def _are_kept() -> bool:
    """Whether another process finds what this one compiles."""
    from otloss.solvers.closed_forms.line_numba import cdf_values

    return bool(cdf_values.stats.cache_path)


@contextlib.contextmanager
def _other_processes(tasks: list[str], count: int) -> Iterator[None]:
    """Within this context other processes run the tasks too: each begins at another one, and ends with the first ones.

    A process waits for a kernel that another one compiles, so none is compiled twice. This process runs all tasks as
    well, so that it has the last word: nothing depends on the others.
    """
    processes = []
    for k in range(count):
        first = (k + 1) * len(tasks) // (count + 1)
        order = [*tasks[first:], *reversed(tasks[:first])]
        code = f"from otloss._warm_up import run_task\nfor task in {order}: run_task(task)"
        processes.append(start_python("-c", code))
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def _has_terminal() -> bool:
    """Return whether stderr is a terminal; a program may have closed it, have none, or a logger in its place."""
    try:
        return sys.stderr.isatty()
    except (AttributeError, ValueError):
        return False


def _show(done: int, count: int, seconds: float) -> None:
    if _has_terminal():
        bar = ("#" * (30 * done // count)).ljust(30)
        print(f"\rCPU kernels [{bar}] {done} of {count}, {seconds:.0f} s", end="" if done < count else "\n",
              file=sys.stderr, flush=True)  # fmt: skip
    else:
        _log.info("the CPU kernels of %d of %d functions and dtypes are there after %.0f s", done, count, seconds)


# ---- what compiles the kernels of each name --------------------------------------------------------------------------


def _weights(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.full(shape, 1 / shape[-1], dtype=dtype, device="cpu", requires_grad=True)


def _points(count: int, dtype: torch.dtype) -> Tensor:
    places = torch.linspace(0, 1, count, dtype=dtype, device="cpu")
    return torch.stack([places, 1 - places.square()], dim=-1).requires_grad_()


def _emd(dtype: torch.dtype) -> None:
    x = _points(8, dtype)
    cost = (x[:, None] - x).square().sum(-1)
    uniform, other = _weights(8, dtype=dtype), torch.arange(8, dtype=dtype, device="cpu") / 28
    emd(uniform, uniform, cost.detach()).backward()
    emd(uniform, other, cost).backward()


def _sinkhorn(dtype: torch.dtype) -> None:
    x = _points(_BINS, dtype)
    p, q = _weights(_BINS, dtype=dtype), _weights(_BINS, dtype=dtype)
    sinkhorn(p, q, PointCost(x, x.detach() + 1), epsilon=1.0).backward()
    matrix = (x[:, None] - x).square().sum(-1) + 1
    sinkhorn(p, q, matrix, epsilon=1.0).backward()
    sinkhorn(p, q, matrix.detach(), epsilon=1.0, marginal_penalty=1.0).backward()


def _solve(dtype: torch.dtype) -> None:
    _emd(dtype)
    _sinkhorn(dtype)
    x = _points(_BINS, dtype)
    p, q = _weights(_BINS, dtype=dtype), _weights(_BINS, dtype=dtype)
    for cost in (PointCost(x, x.detach() + 1), (x[:, None] - x).square().sum(-1).detach()):
        _ = solve(p, q, cost, epsilon=1.0).gap


def _divergence(dtype: torch.dtype) -> None:
    x = _points(_BINS, dtype)
    p, q = _weights(_BINS, dtype=dtype), _weights(_BINS, dtype=dtype)
    sinkhorn_divergence(p, q, PointCost(x, x.detach() + 1), epsilon=1.0).backward()


def _newton(_: torch.dtype) -> None:
    x = _points(50, torch.float64).detach()
    sinkhorn(None, None, PointCost(x, 2 * x.flip(-1)), epsilon=1e-3)


def _line(function: Callable[..., Tensor], dtype: torch.dtype) -> None:
    x = torch.linspace(0, 1, _BINS, dtype=dtype, device="cpu").expand(_ROWS // 50, _BINS).clone().requires_grad_()
    p, q = (_weights(_ROWS // 50, _BINS, dtype=dtype) for _ in range(2))
    function(p, q, x).sum().backward()


def _quantiles(dtype: torch.dtype) -> None:
    _line(lambda p, q, x: wasserstein_1d(p, q, x, x.detach() + 1, order=2), dtype)


def _sliced(dtype: torch.dtype) -> None:
    x = _points(_BINS, dtype)
    sliced_wasserstein(x, x.detach() + 1).backward()


def _ordinal(dtype: torch.dtype) -> None:
    logits = torch.zeros(_ROWS, 4, dtype=dtype, device="cpu", requires_grad=True)
    target = torch.zeros(_ROWS, dtype=torch.long, device="cpu")
    ordinal_loss(logits, target).backward()
    ordinal_loss(logits, torch.nn.functional.one_hot(target, 4).to(dtype)).backward()


def _boosting(dtype: torch.dtype) -> None:
    labels, scores = _Labels(np.arange(64) % 4), np.zeros((64, 4), np.float32)
    # XGBoost works in float32, LightGBM in float64.
    objective: Any = xgboost_objective(4) if dtype == torch.float32 else lightgbm_objective(4)
    objective(scores if dtype == torch.float32 else scores.astype(np.float64, order="F"), labels)


class _Labels:
    """What an objective reads of a data set of XGBoost or LightGBM."""

    def __init__(self, labels: np.ndarray) -> None:
        self._labels = labels.astype(np.float32)

    def get_label(self) -> np.ndarray:
        return self._labels

    def get_weight(self) -> None:
        return None


def _documents(dtype: torch.dtype) -> None:
    vectors, ids = _points(8, dtype).detach(), torch.arange(8, device="cpu")
    document_distance(None, None, vectors, ids_p=ids, ids_q=ids[:5])
    document_search(torch.ones(8, device="cpu"), 1 + torch.eye(8, device="cpu"), vectors, k=1)


def _fused_gromov(dtype: torch.dtype) -> None:
    distances = torch.cdist(_points(8, dtype).detach(), _points(8, dtype).detach())
    fused_gromov(distances, distances, distances)


def _match(dtype: torch.dtype) -> None:
    match(torch.eye(4, dtype=dtype, device="cpu"))


DTYPES = {"float64": torch.float64, "float32": torch.float32}  # Newton's kernels are in float64 and take longest
IN_FLOAT64 = {"newton", "fused_gromov"}  # whose kernels are the same for all dtypes
EXAMPLES: dict[str, Callable[[torch.dtype], None]] = {  # long ones first, so that no process waits long at the end
    "sinkhorn": _sinkhorn,
    "newton": _newton,
    "fused_gromov": _fused_gromov,
    "documents": _documents,
    "emd": _emd,
    "solve": _solve,
    "sinkhorn_divergence": _divergence,
    "wasserstein_1d": _quantiles,
    "cdf_distance": lambda dtype: _line(cdf_distance, dtype),
    "sliced_wasserstein": _sliced,
    "ordinal_loss": _ordinal,
    "boosting": _boosting,
    "match": _match,
}
