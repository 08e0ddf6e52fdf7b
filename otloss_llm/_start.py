"""Start-up of the command line, imported first, without torch: `--version` and errors that can be found without it do
not wait for it, which takes seconds, and Ctrl-C during its import prints one line.
"""

from __future__ import annotations

import sys
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import TracebackType

from otloss_llm._precheck import first_error

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
    if sys.argv[1:] == ["--version"]:
        with suppress(PackageNotFoundError):  # else the command prints it
            print(f"otloss-llm {version('otloss')}")
            sys.exit(0)
    if (error := first_error(sys.argv[1:])) is not None:
        print(f"otloss-llm: error: {error}", file=sys.stderr)
        sys.exit(2)
    sys.excepthook = _hook
