"""Compile the CPU kernels before they are needed."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from otloss._numba.background import compiling_here
from otloss.boosting import lightgbm_objective, xgboost_objective
from otloss.costs import PointCost
from otloss.losses import document_distance, ordinal_loss
from otloss.losses.documents import document_search
from otloss.solvers.assignment.match import match
from otloss.solvers.closed_forms.line import cdf_distance, wasserstein_1d
from otloss.solvers.closed_forms.sliced import sliced_wasserstein
from otloss.solvers.gromov.fused_gromov import fused_gromov
from otloss.solvers.solve import emd, sinkhorn, sinkhorn_divergence, solve

_log = logging.getLogger("otloss")

# Large enough that kernels are used where small problems are left to torch.
_BINS, _ROWS = 300, 5000


def warm_up(*names: str, dtypes: Iterable[torch.dtype] = (torch.float32, torch.float64)) -> None:
    """Compile the kernels of the functions named, values and gradients, or of all functions that have kernels.

    Otherwise a kernel is compiled at its first call for each dtype, which takes some seconds. All of them take 100 to
    170 CPU seconds, by the machine, in as many processes as torch uses threads, at most 8; a bar shows how far they
    are, and what is there already is read. `python -m otloss.warm_up` does it for an image of a container. Those of
    exact transport between large clouds, and of barycenters where iterations are slow, are left to their first call.

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
        RuntimeError: if a process fails; it prints its error.

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
    tasks = [f"{name} {dtype}" for dtype in DTYPES if DTYPES[dtype] in dtypes for name in EXAMPLES
             if name in (names or EXAMPLES)]  # fmt: skip
    processes = min(torch.get_num_threads(), MOST_PROCESSES)
    if processes > 1 and _are_kept():
        missing = [task for task in tasks if not _is_compiled(task)]
        if missing:
            _compile_in_processes(missing, min(processes, len(missing)))
        tasks = missing  # reads what the processes have kept
    for task in tasks:
        _run(task)


def _run(task: str) -> None:
    name, dtype = task.split()
    with compiling_here(), torch.inference_mode(False), torch.enable_grad():
        EXAMPLES[name](DTYPES[dtype])


def _are_kept() -> bool:
    """Whether another process finds what this one compiles."""
    from otloss.solvers.closed_forms.line_numba import cdf_values  # takes a second: it imports numba

    return bool(cdf_values.stats.cache_path)


# ---- one process a core ----------------------------------------------------------------------------------------------
#
# Tasks share kernels, and a kernel is compiled once. The processes share a folder. Who creates the file of a task or of
# a kernel there has it, and deletes that file afterwards. A task that needs a kernel that another process has is left,
# and taken up again when the file is gone.

# A kernel takes up to a fifth of all seconds, so more processes than that would only take memory, 0.4 GiB each.
MOST_PROCESSES = 8
_PROGRAM = "import logging, otloss._warm_up; logging.getLogger('otloss').setLevel('ERROR'); otloss._warm_up.work()"
_LOOK = 0.1  # seconds


class _Elsewhere(BaseException):  # not an error: nobody who catches those is to catch this
    """A kernel is not on disk, and another process compiles it; the argument is the name of its file."""


def _is_compiled(task: str) -> bool:
    """Run a task if all its kernels are on disk."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # kernels are then called, and compiled, on this thread
    try:
        with _asking_for_kernels(lambda _: False):
            _run(task)
    except _Elsewhere:
        return False
    finally:
        torch.set_num_threads(threads)
    return True


@contextlib.contextmanager
def _asking_for_kernels(may_compile: Callable[[str], bool]) -> Iterator[None]:
    """Compile a kernel on this thread only if `may_compile(its name)`; raise _Elsewhere otherwise."""
    from numba.core.caching import FunctionCache

    from otloss._numba.cache import KernelCache

    thread = threading.get_ident()

    def load_overload(cache: KernelCache, signature: Any, context: Any) -> Any:
        kernel = FunctionCache.load_overload(cache, signature, context)
        if kernel is not None or threading.get_ident() != thread:
            return kernel
        name = cache._cache_file._path(cache._index_key(signature, context.codegen())).name
        if not may_compile(name):
            raise _Elsewhere(name)
        return FunctionCache.load_overload(cache, signature, context)  # another process may have kept it meanwhile

    is_kept = KernelCache.is_kept  # what is on disk, or elsewhere, is not announced
    KernelCache.load_overload, KernelCache.is_kept = load_overload, lambda *_: True  # type: ignore[method-assign]
    try:
        yield
    finally:
        del KernelCache.load_overload
        KernelCache.is_kept = is_kept  # type: ignore[method-assign]


def work() -> None:
    """Run the tasks of the command line that no other process of the folder runs, until all of them are done."""
    folder, *left = Path(sys.argv[1]), *sys.argv[2:]
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the first process ends this one
    awaited = dict.fromkeys(left, "")
    while left:
        left = [task for task in left if not (folder / f"{task}.done").exists()]
        for task in left:
            if (folder / awaited[task]).is_file() or not _take(folder / task):
                continue
            try:
                with _taken(folder) as take, _asking_for_kernels(take):
                    _run(task)
                (folder / f"{task}.done").touch()
            except _Elsewhere as kernel:
                awaited[task] = str(kernel)
            finally:
                (folder / task).unlink()
            break
        else:
            time.sleep(_LOOK)


def _take(path: Path) -> bool:
    try:
        path.touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


@contextlib.contextmanager
def _taken(folder: Path) -> Iterator[Callable[[str], bool]]:
    """Take kernels, one after the other: each is given back when the next one is taken, and the last at the end."""
    taken: list[Path] = []

    def take(name: str) -> bool:
        give_back()  # it is compiled and kept
        if _take(folder / name):
            taken.append(folder / name)
        return bool(taken)

    def give_back() -> None:
        while taken:
            taken.pop().unlink()

    try:
        yield take
    finally:
        give_back()


def _compile_in_processes(tasks: list[str], count: int) -> None:
    root = str(Path(__file__).parents[1])
    paths = os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-c", _PROGRAM, folder, *tasks]
        processes = [subprocess.Popen(command, stdin=subprocess.DEVNULL, env=environment) for _ in range(count)]
        try:
            _follow(processes, Path(folder), len(tasks))
        finally:
            for process in processes:
                process.kill()
                process.wait()


def _follow(processes: list[subprocess.Popen[bytes]], folder: Path, tasks: int) -> None:
    """Show what is done until all processes have ended; raise an error once one has failed."""
    _log.warning("compiling CPU kernels in %d processes, once", len(processes))
    begin, shown = time.perf_counter(), -1
    while True:
        running = [process for process in processes if process.poll() is None]
        failed = [process.returncode for process in processes if process.returncode]
        done = len(list(folder.glob("*.done")))
        seconds = time.perf_counter() - begin
        if sys.stderr.isatty():
            bar = ("#" * (30 * done // tasks)).ljust(30)
            print(
                f"\r[{bar}] {done} of {tasks}, {seconds:.0f} s",
                end="" if running else "\n",
                file=sys.stderr,
                flush=True,
            )
        elif done > shown:
            _log.info("%d of %d are compiled after %.0f s", done, tasks, seconds)
        shown = done
        if failed:
            raise RuntimeError(
                f"a process that compiles CPU kernels ended with exit code {failed[0]}, see its error above; "
                "torch.set_num_threads(1) compiles them in this process"
            )
        if not running:
            return
        time.sleep(_LOOK)


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
EXAMPLES: dict[str, Callable[[torch.dtype], None]] = {
    "sinkhorn": _sinkhorn,
    "emd": _emd,
    "newton": _newton,
    "solve": _solve,
    "sinkhorn_divergence": _divergence,
    "wasserstein_1d": _quantiles,
    "cdf_distance": lambda dtype: _line(cdf_distance, dtype),
    "sliced_wasserstein": _sliced,
    "ordinal_loss": _ordinal,
    "boosting": _boosting,
    "documents": _documents,
    "fused_gromov": _fused_gromov,
    "match": _match,
}
