"""The command line: `python -m otloss_llm train | generate | evaluate` (also installed as `otloss-llm`).

Options are those of the dataclasses in `otloss_llm.cli.arguments` and, for train, of the Hugging Face
`TrainingArguments` (fsdp, deepspeed, bf16, report_to, ...). The same command resumes an interrupted run. The result
goes to stdout, progress and logs to stderr. An error that the user can fix prints one line and exits with 2.

The module of a command is imported when it runs, so that `--help` and `--version` need no transformers.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from importlib import import_module
from typing import Any

import otloss
import otloss_llm
from otloss._distribution import install_hint
from otloss_llm import __version__, parse_objective
from otloss_llm._precheck import COMMANDS, unknown_option, values_of
from otloss_llm._start import INTERRUPTED

USAGE = """\
usage: python -m otloss_llm COMMAND [options]     (COMMAND --help lists the options)

  train      train a causal language model on text, questions or chats with MLE, TaiLr, MixCE, EMO, number_token;
             or an encoder-decoder (T5, BART) on questions
  generate   sample text from a model
  evaluate   perplexity and mean transport cost of a model on text; its answers to questions; its labels of texts

--version prints the version. With --traceback an error prints its traceback.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code: 0, or 2 after an error the user can fix."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    traceback = "--traceback" in arguments
    arguments = [argument for argument in arguments if argument != "--traceback"]
    if not arguments or arguments[0] in ("-h", "--help"):
        print(USAGE, file=sys.stdout if arguments else sys.stderr, end="")
        return 0 if arguments else 2
    if arguments[0] == "--version":
        print(f"otloss-llm {__version__}")
        return 0
    if arguments[0] not in COMMANDS:
        return _fail(f"there is no command {arguments[0]!r}; expected {' | '.join(COMMANDS)} (see --help).")
    try:
        _check_objectives(arguments[1:])
        with _transformers_messages(), plain_warnings():
            parsed = _parse(arguments[0], arguments[1:])
            # Trainer, tqdm and other libraries print to stdout while the command works.
            with redirect_stdout(sys.stderr):
                text, code = import_module(f"otloss_llm.cli.{arguments[0]}").run(*parsed)
            if text:
                print(text, flush=True)  # flushed here, where a full disk is reported
    except SystemExit as stop:  # of --help
        return int(stop.code or 0)
    except KeyboardInterrupt:
        return _fail(INTERRUPTED, code=130)
    except Exception as error:
        message = _message(error)
        if traceback or message is None:
            raise
        return _fail(message)
    return int(code)


def _check_objectives(arguments: list[str]) -> None:
    """Raise ValueError for a misspelt objective before transformers is imported, which takes seconds."""
    given = values_of(arguments)
    for text in (*given.get("objective", ()), *given.get("objectives", ())):
        parse_objective(text.partition("/")[0])


def _message(error: Exception) -> str | None:
    """Return a one-line message for the user; None for an error that the user cannot fix."""
    import torch

    text = " ".join(str(error).split())
    if isinstance(error, torch.OutOfMemoryError):
        return f"out of memory: {text} Use smaller batches (with --gradient_accumulation_steps) or blocks."
    if isinstance(error, ImportError):
        package = (error.name or "").partition(".")[0]
        if package in ("transformers", "accelerate", "tqdm", "tokenizers", "safetensors", "filelock"):
            return f"the command needs {package}: {install_hint('llm')}"
        return text
    if type(error).__module__.partition(".")[0] in ("httpx", "httpcore", "huggingface_hub", "requests"):
        return f"the Hugging Face hub cannot be used: {type(error).__name__}: {text}"
    return text if isinstance(error, ValueError | TypeError | OSError) else None


def _fail(message: str, *, code: int = 2) -> int:
    print(f"otloss-llm: error: {message}", file=sys.stderr)
    return code


@contextmanager
def _transformers_messages() -> Iterator[None]:
    """Warnings only, and no bars for loading and writing weights; restored afterwards."""
    from transformers.utils import logging

    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_warning()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()


@contextmanager
def plain_warnings() -> Iterator[None]:
    """Warnings of ours are one line, without the file and the line of source that they came from."""
    before = warnings.formatwarning
    ours = [folder for package in (otloss, otloss_llm) for folder in package.__path__]

    def formatted(message: Any, category: Any, filename: str, lineno: int, line: str | None = None) -> str:
        if any(filename.startswith(folder) for folder in ours):
            return f"otloss-llm: warning: {message}\n"
        return before(message, category, filename, lineno, line)

    warnings.formatwarning = formatted
    try:
        yield
    finally:
        warnings.formatwarning = before


def _parse(command: str, argv: Sequence[str]) -> tuple[Any, ...]:
    from otloss_llm.cli import arguments
    from otloss_llm.cli.options import OptionParser

    kinds = [getattr(arguments, kind) for kind in COMMANDS[command]]
    parser = OptionParser(kinds, prog=f"python -m otloss_llm {command}")
    *parsed, unknown = parser.parse_args_into_dataclasses(
        args=list(argv), return_remaining_strings=True, look_for_args_file=False
    )
    if unknown:
        option_names = [option for action in parser._actions for option in action.option_strings]
        raise ValueError(unknown_option(command, unknown[0], option_names))
    return tuple(parsed)
