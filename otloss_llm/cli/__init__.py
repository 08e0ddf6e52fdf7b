"""The command line: `python -m otloss_llm train | evaluate` (also installed as `otloss-llm`).

It has the options of `trl sft` with our defaults, and the objective with its cost (`otloss_llm.cli.settings`). The same
command resumes an interrupted run. The result goes to stdout, everything else to stderr. An error that the user can fix
prints one line and exits with 2.

The module of a command is imported when it runs, so that `--help` and `--version` need no transformers.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import redirect_stdout
from importlib import import_module

from otloss._checks import install_hint
from otloss_llm import __version__

COMMANDS = ("train", "evaluate")
USAGE = """\
usage: python -m otloss_llm COMMAND [options]     (COMMAND --help lists the options)

  train      fine-tune a causal language model with MLE, TaiLr, MixCE, EMO, number_token and others, as `trl sft`
  evaluate   perplexity, transport cost and calibration of a model on rows; MAUVE of what it writes

--version prints the version. With --traceback an error prints its traceback.
"""
REPLACED = {
    "generate": "transformers.pipeline('text-generation', FOLDER)",
    "compare": "examples/compare_objectives.py of a clone",
}
_OF_THE_EXTRA = ("transformers", "trl", "datasets", "accelerate", "tokenizers", "safetensors")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code: 0, 2 after an error the user can fix, 130 after Ctrl-C."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    traceback = "--traceback" in arguments
    arguments = [argument for argument in arguments if argument != "--traceback"]
    if not arguments or arguments[0] in ("-h", "--help"):
        print(USAGE, file=sys.stdout if arguments else sys.stderr, end="")
        return 0 if arguments else 2
    if arguments[0] == "--version":
        print(f"otloss-llm {__version__}")
        return 0
    if arguments[0] in REPLACED:
        return _fail(f"there is no command {arguments[0]!r} any more; use {REPLACED[arguments[0]]}.")
    if arguments[0] not in COMMANDS:
        return _fail(f"there is no command {arguments[0]!r}; expected {' | '.join(COMMANDS)} (see --help).")
    try:
        command = import_module(f"otloss_llm.cli.{arguments[0]}")
        request = command.parse_request(arguments[1:])
        with redirect_stdout(sys.stderr):  # to which the trainer and others print
            text = command.run(request)
        if text:
            print(text, flush=True)
    except SystemExit as stop:  # --help ends so
        return int(stop.code or 0)
    except KeyboardInterrupt:
        return _fail("interrupted; the same command resumes from the last checkpoint.", code=130)
    except (ValueError, TypeError, OSError, ImportError) as error:
        if traceback:
            raise
        return _fail(_message(error))
    return 0


def _message(error: Exception) -> str:
    package = (getattr(error, "name", None) or "").partition(".")[0]
    if isinstance(error, ImportError) and package in _OF_THE_EXTRA:
        return f"the command needs {package}: {install_hint('llm')}"
    return " ".join(str(error).split())


def _fail(message: str, *, code: int = 2) -> int:
    print(f"otloss-llm: error: {message}", file=sys.stderr)
    return code
