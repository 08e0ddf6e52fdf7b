"""Run folders: their files, which run may use them, one process at a time, and atomic writes.

run.json        the settings, written first; only a run with the same settings may use a folder with results
checkpoint-N/   of the Hugging Face Trainer; complete once its trainer_state.json exists, which is written last
log.json        the log, written when the run has finished
results.json    the results, written last
.lock           held while a process works in the folder; a killed process holds it no longer
"""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from otloss_llm.cli.guard import is_complete

SETTINGS_FILE, RESULTS_FILE, LOG_FILE, LOCK_FILE = "run.json", "results.json", "log.json", ".lock"

# What torch and safetensors say where the system says ENOSPC or EDQUOT; theirs are no OSErrors.
_FULL = (
    "enforce fail at inline_container", "PytorchStreamWriter failed", "No space left on device", "Disk quota exceeded",
)  # fmt: skip


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Create the folder and keep other processes out of it within this context.

    Raises:
        ValueError: another process works in the folder, or it holds other files.
        OSError: the folder cannot be written.
    """
    make_folder(folder)
    check_ours(folder)  # before a file is made in it
    lock = FileLock(folder / LOCK_FILE, timeout=0)
    try:
        lock.acquire()
    except Timeout:
        raise ValueError(
            f"another process is working in {folder}; wait until it has ended, or choose another output folder."
        ) from None
    try:
        yield
    finally:
        lock.release()


@contextmanager
def full_disk_reported(folder: Path) -> Iterator[None]:
    """Within this context an error of a full disk is an OSError that says so; incomplete checkpoints are removed."""
    try:
        yield
    except Exception as error:
        full = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)
        if not full and not any(text in str(error) for text in _FULL):
            raise
        for checkpoint in incomplete_checkpoints(folder):
            shutil.rmtree(checkpoint, ignore_errors=True)
        kept = last_complete_checkpoint(folder)
        resumes = "starts again" if kept is None else f"resumes from {Path(kept).name}"
        raise OSError(
            f"the disk of {folder} is full, or your quota of it; make space and give the same command again, which "
            f"{resumes}."
        ) from error


@contextmanager
def replaced(path: Path) -> Iterator[Path]:
    """A temporary path to write to; it replaces `path` atomically if the block ends without an error."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}.partial-{os.getpid()}")
    yield partial
    partial.replace(path)


def write_text(path: Path, text: str) -> None:
    """Write a UTF-8 file atomically: a reader sees the old file or the whole new one."""
    with replaced(path) as partial:
        partial.write_text(text, encoding="utf-8")


def write_json(path: Path, content: Any) -> None:
    """Write JSON atomically."""
    write_text(path, json.dumps(content, indent=2, sort_keys=True, default=str) + "\n")


def read_json(path: Path) -> Any:
    """The content of a JSON file; raises ValueError with its name if it is damaged."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is damaged ({error}); delete it, or choose another output folder.") from error


def open_run(folder: Path, settings: dict[str, Any]) -> dict[str, Any] | None:
    """Open a run folder: new, or of a run with the same settings. Returns the results of a finished run, else None.

    A folder of another run that has kept nothing yet counts as new.

    Raises:
        ValueError: the folder holds a run with other settings, or other files.
        OSError: the folder cannot be written.
    """
    settings = json.loads(json.dumps(settings, default=str))
    path, results = folder / SETTINGS_FILE, folder / RESULTS_FILE
    make_folder(folder)
    check_ours(folder)
    if _kept_files(folder):
        _check_same_settings(folder, read_json(path), settings)
    else:
        write_json(path, settings)
    return read_json(results) if results.is_file() else None


def make_folder(folder: Path) -> None:
    """Create the output folder if needed; raises OSError if it cannot be created or written."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        reason = None if os.access(folder, os.W_OK) else "no permission"
    except OSError as error:
        reason = error.strerror
    if reason is not None:
        raise OSError(f"cannot write in the output folder {folder} ({reason}); choose another one.")


def check_ours(folder: Path) -> None:
    """Raise ValueError if the folder holds files, but no run."""
    kept = _kept_files(folder) if folder.is_dir() else []
    if kept and not (folder / SETTINGS_FILE).is_file():
        raise ValueError(
            f"{folder} exists and holds no run of ours (it has {kept[0]!r}, but no {SETTINGS_FILE}); "
            "choose a new or empty output folder."
        )


def _kept_files(folder: Path) -> list[str]:
    """Names of all files except the settings and those that a killed process left incomplete."""
    needless = {SETTINGS_FILE, LOCK_FILE, *(checkpoint.name for checkpoint in incomplete_checkpoints(folder))}
    names = sorted({file.name for file in folder.iterdir()} - needless)
    return [name for name in names if ".partial-" not in name]


def _check_same_settings(folder: Path, before: dict[str, Any], now: dict[str, Any]) -> None:
    keys = sorted(key for key in before.keys() | now.keys() if before.get(key) != now.get(key))
    if keys:
        changes = "; ".join(f"{key}: {before.get(key)!r} there, {now.get(key)!r} asked for" for key in keys[:5])
        raise ValueError(
            f"{folder} holds another run ({changes}{'; ...' if len(keys) > 5 else ''}). "
            "Choose another output folder, or delete that one."
        )


def last_complete_checkpoint(folder: Path) -> str | None:
    """The newest complete checkpoint, or None."""
    complete = [checkpoint for checkpoint in _checkpoints(folder) if is_complete(checkpoint)]
    return str(complete[-1]) if complete else None


def incomplete_checkpoints(folder: Path) -> list[Path]:
    """The checkpoints that a killed process left incomplete."""
    return [checkpoint for checkpoint in _checkpoints(folder) if not is_complete(checkpoint)]


def _checkpoints(folder: Path) -> list[Path]:
    """Return the checkpoints by step."""
    numbered = ((path.name.rpartition("-")[2], path) for path in folder.glob("checkpoint-*") if path.is_dir())
    return [path for _, path in sorted((int(step), path) for step, path in numbered if step.isdigit())]
