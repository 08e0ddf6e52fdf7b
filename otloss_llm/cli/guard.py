"""What TRL's runs lack: a folder keeps to one run, a finished run takes no step, and a diverged one ends."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from zipfile import is_zipfile

import datasets
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers import TrainerCallback

from otloss_llm.costs.tokenizer_numbers import tokenizer_of

SETTINGS_FILE = "run.json"
_NOT_WRITTEN = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS)


class DivergenceError(ValueError):
    """The loss or the weights became NaN or infinite."""


class FinishedError(Exception):
    """The checkpoint to resume from was written at the last step."""


@contextmanager
def writing_to(folder: Path) -> Iterator[None]:
    """Raise OSError with what to do where a folder cannot be made, or its file system is full or read-only.

    safetensors and torch have errors of their own for a file that cannot be written.
    """
    try:
        yield
    except OSError as error:
        if error.filename is not None and Path(error.filename) in (folder, *folder.parents):
            raise OSError(
                f"--output_dir is {str(folder)!r}, and the folder cannot be made or written to ({error.strerror}); "
                "choose another one."
            ) from error
        if error.errno in _NOT_WRITTEN:
            raise _unwritten(folder, error) from error
        raise
    except (SafetensorError, RuntimeError) as error:
        if "Error while serializing: I/O error" in str(error) or _is_of_torch_writer(error):
            raise _unwritten(folder, error) from error
        raise


def _is_of_torch_writer(error: Exception) -> bool:
    return "inline_container.cc" in str(error) and "Reader" not in str(error)


def _unwritten(folder: Path, error: Exception) -> OSError:
    """Return the error for a file of the run, or of the rows that datasets prepares for it: errors seldom say which."""
    places = [folder, Path(datasets.config.HF_DATASETS_CACHE)]
    there = [next(place for place in (path, *path.absolute().parents) if place.exists()) for path in places]
    free = [f"{shutil.disk_usage(place).free / 1e6:.0f}" for place in there]
    return OSError(
        f"a file in {folder}, or in the cache of datasets ({places[1]}), cannot be written ({error}); {free[0]} and "
        f"{free[1]} MB are free there. Free space and repeat the command, which resumes from the last whole "
        "checkpoint, or choose another --output_dir or HF_DATASETS_CACHE."
    )


@contextmanager
def only_run_in(folder: Path) -> Iterator[None]:
    """Create a folder and hold it for this process; raise ValueError if a run of another one is in it.

    Two runs that begin in one empty folder would mix their checkpoints. Where a system or its file system has no locks
    nothing is held.
    """
    folder.mkdir(parents=True, exist_ok=True)
    try:
        import fcntl
    except ImportError:  # Windows
        yield
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ValueError(
                f"another process trains in {folder}; choose another --output_dir, or wait until it has ended."
            ) from error
        except OSError:
            pass
        yield
    finally:
        os.close(descriptor)


def open_folder(folder: Path, settings: dict[str, Any]) -> None:
    """Write the settings of a run into a folder that exists; raises ValueError if it holds another run."""
    path = folder / SETTINGS_FILE
    if any([*folder.glob("checkpoint-*"), *folder.glob("*.safetensors")]):
        fix = "choose another --output_dir, or delete that one"
        if not path.is_file():
            raise ValueError(f"{folder} holds a model that this command did not write ({path.name} is missing); {fix}.")
        check_same_run(folder, settings, fix)
    unfinished = path.with_suffix(".tmp")
    unfinished.write_text(_as_json(settings) + "\n", encoding="utf-8")
    unfinished.replace(path)  # at once: a run that is killed here leaves a whole file


def check_same_run(folder: Path, settings: dict[str, Any], fix: str) -> None:
    """Raise ValueError if a folder holds a run with other settings; a folder of another program has none."""
    path = folder / SETTINGS_FILE
    if not path.is_file():
        return
    try:
        recorded = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} cannot be read ({error}), so its run cannot be compared; {fix}.") from error
    requested = json.loads(_as_json(settings))
    keys = sorted(key for key in recorded.keys() | requested.keys() if recorded.get(key) != requested.get(key))
    if keys:
        pairs = [f"{key}: {recorded.get(key)!r} there, {requested.get(key)!r} asked for" for key in keys[:8]]
        raise ValueError(f"{folder} holds another run ({'; '.join(pairs)}); {fix}.")


def _as_json(settings: dict[str, Any]) -> str:
    return json.dumps(settings, indent=2, sort_keys=True, default=str)


def tokenizer_fingerprint(processor: Any) -> str:
    """Return a short hash of what makes tokens of rows: the tokenizer, its special tokens and the chat template."""
    tokenizer = tokenizer_of(processor)
    backend = getattr(tokenizer, "backend_tokenizer", None)
    content = tokenizer.get_vocab() if backend is None else json.loads(backend.to_str())
    content |= {"padding": None, "truncation": None}  # the last call set them
    parts = [content, tokenizer.special_tokens_map, getattr(processor, "chat_template", None)]
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()[:16]


def fingerprint(tensors: Iterable[tuple[str, Tensor]]) -> str:
    """Return a short hash of names, shapes and up to 2,000 entries of each tensor; it changes with any training.

    >>> import torch
    >>> fingerprint([("w", torch.zeros(3))]) == fingerprint([("w", torch.ones(3))])
    False
    """
    digest = hashlib.sha256()
    for name, tensor in tensors:
        flat = tensor.detach().flatten()
        picked = flat[:: max(1, flat.numel() // 1024)].float().cpu()
        digest.update(f"{name} {tuple(tensor.shape)}\0".encode() + picked.numpy().tobytes())
    return digest.hexdigest()[:16]


def last_checkpoint(folder: Path) -> str | None:
    """Return the newest complete checkpoint."""
    complete = [path for path in folder.glob("checkpoint-*") if is_complete(path)]
    return str(max(complete, key=lambda path: int(path.name.rpartition("-")[2]))) if complete else None


def is_complete(checkpoint: Path) -> bool:
    """Whether the state, which is written last, can be read, and no other file is cut off."""
    try:
        json.loads((checkpoint / "trainer_state.json").read_text(encoding="utf-8"))
        for path in checkpoint.glob("*.safetensors"):
            with safe_open(path, "pt"):  # reads the header, and compares the size
                pass
    except (OSError, ValueError, SafetensorError):
        return False
    return all(is_zipfile(path) for path in checkpoint.glob("*.pt*"))  # torch.save writes a zip: its end is its index


class RunGuard(TrainerCallback):
    """Stops a run that has no step left, and one that has diverged, before a checkpoint of it is kept."""

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step >= state.max_steps:  # the trainer would take one step more
            raise FinishedError

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        if control.should_save:
            control.should_log = True
            self.on_train_end(args, state, control, model)

    on_epoch_end = on_step_end

    def on_train_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        if not all(weight.isfinite().all() for weight in model.parameters() if weight.requires_grad):
            raise diverged(state.global_step, "weights are NaN or infinite")

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float] | None = None, **kwargs: Any) -> None:
        for key in ("nll", "transport_cost", "eval_nll"):
            if not abs((logs or {}).get(key, 0.0)) < float("inf"):
                raise diverged(state.global_step, f"{key} is {(logs or {})[key]}")


def diverged(step: int, what: str) -> DivergenceError:
    return DivergenceError(
        f"training diverged by step {step}: {what}; lower the learning rate, warm up longer, or clip gradients harder."
    )
