"""The name under which the packages are installed, and a check that no other package has written into their folder.

The name `otloss` of package indexes is another project with the same import name. Whichever of the two was installed
last has written `otloss/__init__.py`. If that is ours, the check warns, because `pip uninstall otloss` removes that
file too. If it is theirs, it imports `otloss.losses`, which is a folder of ours: the check runs there, and raises.
"""

from __future__ import annotations

import os
import warnings
from pathlib import Path

DISTRIBUTION = "torch-otloss"
# Older versions of ours were installed as otloss; their metadata have this line.
_OURS = "Author: The otloss developers"
_FIX = f"pip uninstall otloss, then pip install --force-reinstall --no-deps {DISTRIBUTION}"


def install_hint(extra: str) -> str:
    """Return the command that installs an extra."""
    return f'pip install "{DISTRIBUTION}[{extra}]"'


def _check_folder() -> None:
    """Warn if another package is installed in our folder; raise ImportError if it has replaced `otloss/__init__.py`."""
    package = Path(__file__).parent
    if not _shares_folder(package.parent):
        return
    message = (
        f"another package, whose name is otloss, is installed in the folder of {DISTRIBUTION}, {package}, and files of "
        f"the same name overwrite each other. Run: {_FIX}."
    )
    if "import _distribution" not in (package / "__init__.py").read_text(encoding="utf-8", errors="replace"):
        raise ImportError(message)
    warnings.warn(message, UserWarning, stacklevel=4)  # the line that imports otloss


def _shares_folder(folder: Path) -> bool:
    """Whether the metadata beside our package are those of another project (0.2 ms; importlib.metadata takes 6 ms)."""
    try:
        names = [name for name in os.listdir(folder) if name.startswith("otloss-") and name.endswith(".dist-info")]
        return any(_OURS not in (folder / name / "METADATA").read_text(encoding="utf-8").splitlines() for name in names)
    except OSError:  # in an archive, or half removed
        return False


_check_folder()
