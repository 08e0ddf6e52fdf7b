"""Start-up of the command line, imported first, without torch: `--version` and errors that can be found without it do
not wait for it, which takes seconds, and Ctrl-C during its import prints one line.
"""

from __future__ import annotations

import re
import sys
from importlib.util import find_spec
from pathlib import Path
from types import TracebackType

from otloss_llm._precheck import first_error

INTERRUPTED = "interrupted; give the same command again, and train and compare resume from the last checkpoint."


# Both packages are always in one folder.
_OTLOSS = Path(__file__).parents[1] / "otloss" / "__init__.py"


def _check_otloss() -> None:
    """Raise ImportError if `import otloss` finds another package than the one beside this one."""
    spec = find_spec("otloss")
    origin = None if spec is None else spec.origin
    if origin is None or not Path(origin).resolve() == _OTLOSS.resolve():
        raise ImportError(
            f"import otloss finds {origin}, expected {_OTLOSS}. The package of that name belongs to another project, "
            "which has overwritten a part of this one or comes before it: run pip uninstall otloss, then install this "
            "package again with pip install --force-reinstall --no-deps."
        )


def _version() -> str:
    """Return the version as `otloss/__init__.py` has it; metadata of an editable installation can be older."""
    match = re.search(r'^__version__ = "(.+)"$', _OTLOSS.read_text(encoding="utf-8"), re.MULTILINE)
    return match[1] if match else "unknown"


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


_check_otloss()
if _is_command_line():
    if sys.argv[1:] == ["--version"]:
        print(f"otloss-llm {_version()}")
        sys.exit(0)
    if (error := first_error(sys.argv[1:])) is not None:
        print(f"otloss-llm: error: {error}", file=sys.stderr)
        sys.exit(2)
    sys.excepthook = _hook
