"""Run folders: what lies in them, who may enter, and writing that a kill cannot tear.

run.json        the settings, written first; a run with other settings does not enter a folder that holds work
checkpoint-N/   of the Hugging Face Trainer; complete once its trainer_state.json is there, which is written last
log.json        what was logged, written when the run has finished
results.json    likewise, and last
tokens-*.npz    the tokenised text (`otloss_llm.training.token_store`), which may be deleted
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

SETTINGS_FILE, RESULTS_FILE, LOG_FILE = "run.json", "results.json", "log.json"
STATE_FILE = "trainer_state.json"
TOKENS_PREFIX = "tokens-"


def write_json(path: Path, content: Any) -> None:
    """Write JSON so that a reader sees the old file or the whole new one, whenever the writer is killed."""
    write_text(path, json.dumps(content, indent=2, sort_keys=True, default=str) + "\n")


def write_text(path: Path, text: str) -> None:
    """Write a UTF-8 file in one step, as `write_json` does."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}.partial-{os.getpid()}")
    partial.write_text(text, encoding="utf-8")
    partial.replace(path)


def read_json(path: Path) -> Any:
    """What `write_json` wrote; raises ValueError naming the file where it is damaged."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is damaged ({error}); delete it, or choose another output folder.") from error


def open_run(folder: Path, settings: dict[str, Any]) -> dict[str, Any] | None:
    """Enter a run folder: new, or left by the same run. Returns the results if that run has finished, else None.

    A folder in which a run was begun, but nothing kept yet, counts as new.

    Raises:
        ValueError: the folder holds a run with other settings, or files that are no run.
        OSError: it cannot be written.
    """
    settings = json.loads(json.dumps(settings, default=str))
    path, results = folder / SETTINGS_FILE, folder / RESULTS_FILE
    make_folder(folder)
    work = _work_in(folder)
    if work and not path.is_file():
        raise ValueError(
            f"{folder} exists and holds no run of ours (there is {work[0]!r}, but no {SETTINGS_FILE}); "
            "choose a new or empty output folder."
        )
    if work:
        _refuse_other_settings(folder, read_json(path), settings)
    else:
        write_json(path, settings)
    return read_json(results) if results.is_file() else None


def make_folder(folder: Path) -> None:
    """Make the output folder, if it is not there; raises OSError where it cannot be made or written."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        reason = None if os.access(folder, os.W_OK) else "no permission"
    except OSError as error:
        reason = error.strerror
    if reason is not None:
        raise OSError(f"cannot write in the output folder {folder} ({reason}); choose one that can be written.")


def _work_in(folder: Path) -> list[str]:
    """Names of what would be lost with the folder: all but the settings and what was being written at a kill."""
    names = sorted(file.name for file in folder.iterdir())
    torn = {checkpoint.name for checkpoint in torn_checkpoints(folder)}
    needless = {SETTINGS_FILE} | torn
    return [
        name for name in names
        if name not in needless and ".partial-" not in name and not name.startswith(TOKENS_PREFIX)
    ]  # fmt: skip


def _refuse_other_settings(folder: Path, before: dict[str, Any], now: dict[str, Any]) -> None:
    keys = sorted(key for key in before.keys() | now.keys() if before.get(key) != now.get(key))
    if keys:
        changes = "; ".join(f"{key}: {before.get(key)!r} there, {now.get(key)!r} asked for" for key in keys[:5])
        raise ValueError(
            f"{folder} holds another run ({changes}{'; ...' if len(keys) > 5 else ''}). "
            "Choose another output folder, or delete that one."
        )


def last_complete_checkpoint(folder: Path) -> str | None:
    """The newest checkpoint that was written to its end, or None."""
    complete = [checkpoint for checkpoint in _checkpoints(folder) if _is_complete(checkpoint)]
    return str(complete[-1]) if complete else None


def torn_checkpoints(folder: Path) -> list[Path]:
    """The checkpoints that were not written to their end."""
    return [checkpoint for checkpoint in _checkpoints(folder) if not _is_complete(checkpoint)]


def _checkpoints(folder: Path) -> list[Path]:
    """By step."""
    numbered = ((path.name.rpartition("-")[2], path) for path in folder.glob("checkpoint-*") if path.is_dir())
    return [path for _, path in sorted((int(step), path) for step, path in numbered if step.isdigit())]


def _is_complete(checkpoint: Path) -> bool:
    try:
        json.loads((checkpoint / STATE_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False  # killed while writing it: an older one is whole
    return True
