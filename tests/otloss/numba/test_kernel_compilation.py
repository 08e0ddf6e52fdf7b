"""How kernels are announced, compiled and kept on disk, in files that may be damaged or outdated."""

import ast
import errno
import importlib
import inspect
import os
import re
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numba
import numpy as np
import pytest
import torch
from filelock import FileLock
from numba.core.event import trigger_event
from numba.core.runtime import _nrt_python, rtsys

import otloss
from otloss._numba import cache as _cache
from otloss._numba.compile import address_of, call_at, compiled, result_at
from otloss._numba.notices import compile_together
from tests.otloss.numba.test_kernel_threads import lines_at

DTYPES = (np.float32, np.float64)


def doubled(x: np.ndarray) -> float:
    return x.itemsize * 2 * x[0]


def tripled(x: np.ndarray) -> float:
    return x.itemsize * 3 * x[0]


def is_right(kernel: Any, dtypes: Any = DTYPES) -> bool:
    return all(kernel(np.full(3, 1.5, dtype)) == 3 * np.dtype(dtype).itemsize for dtype in dtypes)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path))
    return tmp_path


@pytest.fixture
def compilations(folder: Path) -> Callable[[], int]:
    """Call the kernel as a new process does, for two dtypes; return how often it was compiled."""

    def count() -> int:
        kernel = compiled()(doubled)
        assert is_right(kernel)
        return sum(kernel.stats.cache_misses.values())

    return count


def test_damaged_files_are_compiled_again(folder: Path, compilations: Any) -> None:
    assert [compilations(), compilations()] == [2, 0]
    damages: list[Callable[[bytes], bytes]] = [lambda b: b[: len(b) // 2], lambda b: b"", lambda b: b[:-1] + b"?"]
    for damage in damages:
        for path in folder.rglob("*.nb?"):
            path.write_bytes(damage(path.read_bytes()))
        assert [compilations(), compilations()] == [2, 0]


PACKAGE = "otloss_sources_of_a_test"
SOURCES = {
    "inner_numba": "from otloss._numba.compile import inner\n@inner()\ndef scaled(x):\n    return {inner} * x\n",
    "outer_numba": "from otloss._numba.compile import compiled\n"
    f"from {PACKAGE}.inner_numba import scaled\n@compiled()\ndef kernel(x):\n    return {{outer}} * scaled(x)\n",
}


@pytest.fixture
def kernel_from_files(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Return a function that writes a kernel and a function that it imports, and reads them as a new process does."""
    (folder / PACKAGE).mkdir()
    monkeypatch.syspath_prepend(folder)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)

    def kernel(**numbers: int) -> Any:
        for name, source in SOURCES.items():
            (folder / PACKAGE / f"{name}.py").write_text(source.format(**numbers))
            monkeypatch.delitem(sys.modules, f"{PACKAGE}.{name}", raising=False)
        _cache._digest_of_sources.cache_clear()
        return importlib.import_module(f"{PACKAGE}.outer_numba").kernel

    return kernel


def test_a_kernel_is_compiled_again_where_a_file_that_it_imports_has_changed(kernel_from_files: Any) -> None:
    """Also where the time and the size of that file stay the same, as in a copy."""
    for numbers, misses in (((2, 3), 1), ((2, 3), 0), ((2, 5), 1), ((7, 5), 1)):
        kernel = kernel_from_files(outer=numbers[0], inner=numbers[1])
        assert kernel(1.0) == numbers[0] * numbers[1]
        assert sum(kernel.stats.cache_misses.values()) == misses


class Killed(BaseException):
    """The end of a process."""


@pytest.mark.parametrize("writes", [0, 1])
def test_a_process_that_is_killed_while_it_writes_leaves_no_outdated_kernel(
    kernel_from_files: Any, monkeypatch: pytest.MonkeyPatch, writes: int
) -> None:
    """After so many finished files."""
    assert kernel_from_files(outer=2, inner=3)(1.0) == 6
    replace, left = os.replace, [writes]

    def killed(*paths: str) -> None:
        if not left[0]:
            raise Killed
        left[0] -= 1
        replace(*paths)

    monkeypatch.setattr(os, "replace", killed)
    with suppress(Killed):
        kernel_from_files(outer=7, inner=3)(1.0)
    monkeypatch.setattr(os, "replace", replace)
    assert kernel_from_files(outer=7, inner=3)(1.0) == 21


def test_a_full_disk_stops_no_call(folder: Path, compilations: Any, caplog: Any, monkeypatch: Any) -> None:
    def fails(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(_cache.KernelCache, "_reported", False)
    monkeypatch.setattr(os, "replace", fails)
    assert [compilations(), compilations()] == [2, 2]
    assert sum("cannot be written to" in line for line in caplog.messages) == 1
    assert not any(path.is_file() for path in folder.rglob("*"))


PROCESSES = """
import multiprocessing, sys, numba
from otloss._numba.compile import compiled
from otloss._numba.notices import compile_together
from tests.otloss.numba.test_kernel_compilation import DTYPES, doubled, is_right
numba.config.CACHE_DIR, context = sys.argv[1], multiprocessing.get_context("fork")
start, misses = context.Barrier(4), context.Value("i", 0)
def compile(k):
    kernel = compiled()(doubled)
    start.wait()
    assert is_right(kernel, DTYPES[:: 1 if k % 2 else -1])
    with misses.get_lock():
        misses.value += sum(kernel.stats.cache_misses.values())
processes = [context.Process(target=compile, args=(k,)) for k in range(4)]
[process.start() for process in processes]
[process.join() for process in processes]
assert not any(process.exitcode for process in processes)
print(misses.value)
"""


def test_of_processes_that_need_a_kernel_one_compiles_it(folder: Path, compilations: Callable[[], int]) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", PROCESSES, str(folder)]
    done = subprocess.run(command, env=environment, check=True, timeout=300, capture_output=True, text=True)
    assert int(done.stdout) == len(DTYPES)
    assert compilations() == 0
    assert not any(folder.rglob("*.lock"))


def test_a_kernel_is_compiled_where_another_process_has_hung(
    folder: Path, compilations: Callable[[], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert compilations() == 2
    (first, *_) = folder.rglob("*.nbc")
    first.unlink()
    monkeypatch.setattr(_cache, "LONGEST", 0.1)
    with FileLock(first.with_suffix(".lock")):
        assert compilations() == 1


def test_kernels_that_another_process_compiles_come_last(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    numbers, order = np.ones(3, np.float32), list[Any]()
    kernels = [compiled()(function) for function in (doubled, tripled)]
    for kernel in kernels:
        compile_together((kernel, (numbers,)))
    (path,) = (path for path in folder.rglob("*.nbc") if "doubled" in path.name)
    for kernel in (other := [compiled()(function) for function in (doubled, tripled)]):
        monkeypatch.setattr(kernel, "compile", lambda signature, kernel=kernel: order.append(kernel))
    with FileLock(path.with_suffix(".lock")):
        compile_together(*((kernel, (numbers,)) for kernel in other))
    assert order == other[::-1]


def test_a_copy_of_the_sources_reads_what_is_kept(folder: Path, compilations: Callable[[], int]) -> None:
    """Whose files have other times, as after another installation of the same version."""
    assert compilations() == 2
    source = Path(__file__)
    times = source.stat()
    try:
        os.utime(source, (times.st_atime, times.st_mtime + 10))
        assert compilations() == 0
    finally:
        os.utime(source, (times.st_atime, times.st_mtime))


def test_time_of_compilation_is_not_time_of_the_call(caplog: Any, monkeypatch: Any, folder: Path) -> None:
    """A call takes 26 s, 15 of them for a kernel, which another thread compiles while the main thread looks at it."""
    compilation = trigger_event("numba:compile", data={"dispatcher": compiled()(doubled), "args": ()})
    begin, end = compilation.__enter__, lambda: compilation.__exit__(None, None, None)
    monkeypatch.setattr(doubled, "__module__", "otloss.tests")
    seconds = [0.0, 1.0, 16.0, 20.0, 26.0]
    announced, told = lines_at(caplog, monkeypatch, seconds, begin, 1.0, end, 1.0, 0.1)
    assert re.search(r"takes about \d+ s of the processor, once; kept in", announced)
    assert told.startswith("solves_slowly runs for 11 s: iterations, error 0.1")


def test_a_line_names_no_kernels_that_only_kernels_call(caplog: Any, monkeypatch: Any, folder: Path) -> None:
    for function in (doubled, tripled):
        monkeypatch.setattr(function, "__module__", "otloss.tests")
    numbers = np.full(3, 1.5, np.float32)
    compile_together((compiled(by_address=True)(tripled), (numbers,)), (compiled()(doubled), (numbers,)))
    (line,) = caplog.messages
    assert line.startswith("compiling the CPU kernel otloss.tests.doubled for float32 (in 2 parts), which takes")


def test_kernels_that_are_compiled_together_have_one_line(caplog: Any, monkeypatch: Any, folder: Path) -> None:
    for function in (doubled, tripled):
        monkeypatch.setattr(function, "__module__", "otloss.tests")
    numbers = np.full(3, 1.5, np.float32)
    for has_file in (False, True):
        kernels = compiled()(doubled), compiled()(tripled)
        for _ in range(2):
            compile_together(*((kernel, (numbers,)) for kernel in kernels))
        assert [kernel(numbers) for kernel in kernels] == [12.0, 18.0]
        assert [sum(kernel.stats.cache_misses.values()) for kernel in kernels] == [1 - has_file] * 2
    (line,) = caplog.messages
    assert line.startswith(
        "compiling the CPU kernels otloss.tests.doubled for float32 and otloss.tests.tripled for float32"
    )
    assert re.search(r"takes about \d+ s of the processor, once; kept in", line)


@pytest.fixture
def new_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """The modules of exact kernels are imported again, as in a new process; afterwards the old ones are back."""
    otloss.emd(None, None, torch.rand(40, 40))
    for name in [name for name in sys.modules if re.fullmatch(r"otloss\.solvers\.exact\.\w+_numba", name)]:
        monkeypatch.delitem(sys.modules, name)


def test_the_first_assignment_compiles_what_later_ones_may_need(new_kernels: None) -> None:
    """The simplex takes over where paths grow long: in a loop over problems of one shape that may be any step."""
    for dtype in (torch.float32, torch.float64):
        otloss.emd(None, None, 1 - torch.eye(5, dtype=dtype))
    assert len(sys.modules["otloss.solvers.exact.simplex_numba"].solve_problems.overloads) == 2


def test_without_the_compiler_an_error_says_so(new_kernels: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(numba.config, "DISABLE_JIT", 1)
    with pytest.raises(RuntimeError, match="NUMBA_DISABLE_JIT is set"):
        otloss.emd(None, None, torch.rand(40, 40))


ROOT = Path(__file__).resolve().parents[3]
KERNELS = [
    ".".join(path.relative_to(ROOT).with_suffix("").parts)
    for package in ("otloss", "otloss_llm")
    for path in sorted((ROOT / package).rglob("*_numba.py"))
]
WITHOUT_ARRAYS = {"None", "int", "float", "bool", "np.int64", "np.float32", "SinkhornLimits"}


@pytest.mark.parametrize("module", KERNELS)
def test_functions_that_count_references_take_arrays_only_from_those_that_count_too(module: str) -> None:
    """Else the caller would release an array that it was lent."""
    functions = [
        f for f in vars(importlib.import_module(module)).values() if isinstance(f, numba.core.dispatcher.Dispatcher)
    ]
    for caller in (f for f in functions if f.targetoptions.get("_nrt", True)):
        for called in inspect.getclosurevars(caller.py_func).globals.values():
            if isinstance(called, numba.core.dispatcher.Dispatcher) and not called.targetoptions.get("_nrt", True):
                returned = called.py_func.__annotations__["return"]
                kinds = returned.removeprefix("tuple[").removesuffix("]").split(", ")
                assert set(kinds) <= WITHOUT_ARRAYS, (caller.py_func.__name__, called.py_func.__name__, returned)


# The time of a compilation grows with the lines that numba sees.
LARGEST_KERNEL = 300


def functions_in(kernel: Any) -> set[Any]:
    """Return the functions that are compiled with the kernel."""
    functions, new = set[Any](), {kernel.py_func}
    while new:
        functions |= new
        variables = [inspect.getclosurevars(function) for function in new]
        called = [one for each in variables for one in (*each.globals.values(), *each.nonlocals.values())]
        new = {one.py_func for one in called if isinstance(one, numba.core.dispatcher.Dispatcher)} - functions
    return functions


def count_lines(function: Any) -> int:
    """Return the number of lines of the body, without its docstring, comments and blank lines."""
    source = textwrap.dedent(inspect.getsource(function))
    definition = ast.parse(source).body[0]
    assert isinstance(definition, ast.FunctionDef)
    body = definition.body[ast.get_docstring(definition) is not None :]
    lines = source.splitlines()[body[0].lineno - 1 : body[-1].end_lineno] if body else []
    return sum(bool(line.strip()) and not line.strip().startswith("#") for line in lines)


@pytest.mark.parametrize("module", KERNELS)
def test_no_kernel_is_large(module: str) -> None:
    for name, kernel in vars(importlib.import_module(module)).items():
        if isinstance(kernel, numba.core.dispatcher.Dispatcher) and isinstance(kernel._cache, _cache.KernelCache):
            lines = sum(map(count_lines, functions_in(kernel)))
            assert lines <= LARGEST_KERNEL, (name, lines)


def test_a_call_by_address_with_arguments_of_other_types_raises(folder: Path) -> None:
    @compiled()
    def write(x: np.ndarray, value: float) -> None:
        x[0] = value

    @compiled()
    def call(address: tuple[int, int], x: np.ndarray, value: float) -> None:
        call_at(address, (x, value))

    numbers = np.zeros(1)
    call(address_of(write, numbers, 1.0), numbers, 2.0)
    assert numbers[0] == 2.0
    with pytest.raises(TypeError, match="with arguments of the types"):
        call(address_of(write, numbers, 1), numbers, 3.0)
    assert numbers[0] == 2.0


@contextmanager
def counting_allocations() -> Iterator[Callable[[], Any]]:
    """Give a function that returns the numbers of arrays that kernels have allocated and freed."""
    was_on = _nrt_python.memsys_stats_enabled()
    _nrt_python.memsys_enable_stats()
    try:
        yield rtsys.get_allocation_stats
    finally:
        if not was_on:
            _nrt_python.memsys_disable_stats()


def test_a_result_of_a_call_by_address_is_freed_once(folder: Path) -> None:
    @compiled(allocates=True, by_address=True)
    def first_numbers(count: int) -> np.ndarray:
        out = np.empty(count)
        for k in range(count):
            out[k] = k
        return out

    @compiled(allocates=True)
    def add_results(address: tuple[int, int], example: np.ndarray) -> float:
        total, numbers = 0.0, example
        for count in range(1, 100):
            numbers = result_at(address, (count,), numbers)
            total += numbers.sum()
        return total

    address = address_of(first_numbers, 1)
    with counting_allocations() as count:
        before = count()
        for _ in range(3):
            assert add_results(address, np.ones(1)) == sum(k * (99 - k) for k in range(99))
        after = count()
    assert after.alloc - before.alloc == after.free - before.free > 0
    with pytest.raises(TypeError, match="with arguments of the types"):
        add_results(address, np.ones(1, np.float32))
