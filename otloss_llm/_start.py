"""Start-up of the command line: Ctrl-C while torch is imported ends in one line. Imported first, it needs no torch."""

from __future__ import annotations

import sys
from pathlib import Path
from types import TracebackType

INTERRUPTED = "interrupted; train and compare go on from the last checkpoint with the same command."


def _is_command_line() -> bool:
    """Whether this process is `python -m otloss_llm` or the installed script, not a program that imports otloss_llm."""
    if sys.argv[:1] == ["-m"]:  # while `python -m` still looks for the module
        return "otloss_llm" in sys.orig_argv
    return bool(sys.argv) and Path(sys.argv[0]).stem == "otloss-llm"


def _hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    if not issubclass(kind, KeyboardInterrupt):
        sys.__excepthook__(kind, error, trace)
        return
    print(f"otloss-llm: error: {INTERRUPTED}", file=sys.stderr)
    sys.exit(130)


if _is_command_line():
    sys.excepthook = _hook
