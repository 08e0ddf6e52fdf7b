"""Start-up of the command line: Ctrl-C during the import of torch prints one line. Imported first, without torch."""

from __future__ import annotations

import sys
from pathlib import Path
from types import TracebackType

INTERRUPTED = "interrupted; give the same command again, and train and compare resume from the last checkpoint."


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
