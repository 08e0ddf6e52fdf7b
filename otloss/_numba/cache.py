"""Kernels on disk: one file for each kernel and signature, and none that several of them share.

The name of a file follows from the signature and the processor. A file begins with the digest of its content and of the
sources that it was compiled from, and is written under another name first. What is damaged or outdated is compiled
again and replaced; what cannot be written is kept in the process. Of processes that need a kernel at the same time one
compiles it, and the others wait.

numba's own cache keeps an index of the signatures beside their files, and knows the source of the kernel alone. With
it four tests of tests/otloss/numba/test_kernel_compilation.py fail:

- A kernel stays as it was where a file that it imports has changed.
- A process that is killed between the index and the file of a signature leaves the kernel of older sources in use.
- A damaged file raises, and so does a full disk.
"""

from __future__ import annotations

import logging
import pickle
import re
import sys
from contextlib import suppress
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Any

import numba
from filelock import FileLock
from numba.core.caching import FunctionCache, IndexDataCacheFile
from numba.core.runtime import rtsys

_log = logging.getLogger("otloss")
LONGEST = 120.0  # seconds that a process waits for another one before it compiles for itself


class KernelCache(FunctionCache):
    """numba's cache of a function, whose files cannot stop a call."""

    _reported = False

    def __init__(self, function: Any) -> None:
        super().__init__(function)
        stamp = repr((numba.__version__, _digest_of_sources(Path(function.__code__.co_filename))))
        self._cache_file = _Files(self._impl.locator.get_cache_path(), self._impl.filename_base, stamp)
        self._locks: dict[Any, FileLock] = {}

    def is_kept(self, signature: tuple[Any, ...], context: Any) -> bool:
        """Whether there is a file for the signature, of the sources as they are."""
        return self._cache_file.has(self._index_key(signature, context.codegen()))

    def is_locked(self, signature: tuple[Any, ...], context: Any) -> bool:
        """Whether a process compiles the kernel, or was killed while it did."""
        return self._lock_path(signature, context).exists()

    def _lock_path(self, signature: tuple[Any, ...], context: Any) -> Path:
        return self._cache_file.path(self._index_key(signature, context.codegen())).with_suffix(".lock")

    def load_overload(self, signature: Any, context: Any) -> Any:
        """Read a kernel. Where there is none, wait for the process that compiles it, or keep others from doing so."""
        kernel = self._read(signature, context)
        if kernel is not None:
            return kernel
        lock = self._locks.setdefault(signature, FileLock(self._lock_path(signature, context), thread_local=False))
        with suppress(OSError, NotImplementedError):  # a folder or a file system without locks, or the time is over
            lock.acquire(timeout=LONGEST)
        kernel = self._read(signature, context)
        if kernel is not None:
            self._release(signature)
        return kernel

    def _read(self, signature: Any, context: Any) -> Any:
        """Return the kernel or None, without what numba loads before: what compiling needs, in half a second."""
        rtsys.initialize(context)  # what arrays need that a kernel allocates
        return self._load_overload(signature, context)

    def _release(self, signature: Any) -> None:
        lock = self._locks.pop(signature, None)
        if lock is not None and lock.is_locked:
            lock.release(force=True)
            Path(lock.lock_file).unlink(missing_ok=True)

    def save_overload(self, signature: Any, result: Any) -> None:
        try:
            super().save_overload(signature, result)
        except OSError as error:
            if not KernelCache._reported:
                KernelCache._reported = True
                _log.warning(
                    "compiled CPU kernels cannot be written to %s (%s) and are kept in this process only: free space "
                    "there, or set NUMBA_CACHE_DIR to another folder",
                    self.cache_path, error.strerror or error,
                )  # fmt: skip
        finally:
            self._release(signature)


class _Files(IndexDataCacheFile):
    """The files of a kernel: a digest and the pickled result of numba."""

    def has(self, key: Any) -> bool:
        return self._read(key) is not None

    def load(self, key: Any) -> Any:
        data = self._read(key)
        try:
            return None if data is None else pickle.loads(data)
        except (pickle.UnpicklingError, AttributeError, ImportError):
            return None

    def _read(self, key: Any) -> bytes | None:
        try:
            content = self.path(key).read_bytes()
        except OSError:
            return None
        digest, data = content[: sha256().digest_size], content[sha256().digest_size :]
        return data if digest == self._digest(data) else None

    def save(self, key: Any, result: Any) -> None:
        data = self._dump(result)
        with self._open_for_write(str(self.path(key))) as file:
            file.write(self._digest(data) + data)

    def _digest(self, data: bytes) -> bytes:
        return sha256(self._source_stamp.encode() + data).digest()

    def path(self, key: Any) -> Path:
        name = self._index_name.removesuffix("nbi") + sha256(repr(key).encode()).hexdigest()[:16]
        return Path(self._cache_path, f"{name}.nbc")


@cache
def _digest_of_sources(path: Path) -> str:
    """Return the digest of the files that a kernel of this file may depend on.

    A kernel contains the functions and the numbers that its file imports, and what the files of kernels among
    these import in turn; `compile` and `linked` say how it is compiled.
    """
    folder = Path(__file__).parent
    sources, new = {Path(__file__), folder / "compile.py", folder / "linked.py"}, {path}
    while new:
        sources |= new
        kernels = [file for file in new if file.stem.endswith("_numba")]
        new = {file for kernel in kernels for file in _imported_files(kernel)} - sources
    return sha256(b"".join(file.read_bytes() for file in sorted(sources))).hexdigest()


def _imported_files(path: Path) -> set[Path]:
    """The files of this project whose names a file imports at its top."""
    modules = re.findall(r"^from (otloss\S*) import", path.read_text(encoding="utf-8"), re.MULTILINE)
    return {Path(str(sys.modules[name].__file__)) for name in modules}
