"""Build sdist and wheel in dist/, check their metadata, and try the wheel in an empty environment.

    make release REPOSITORY=https://HOST/OWNER/NAME CONTACT=ADDRESS DATE=2026-12-01

writes the three into the files that need them first, to be committed with the release. Without them it is a rehearsal.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
CONTACT = "CONTACT (set at the first release)"  # the placeholder
EMPTY = ROOT / "build" / "empty"


def version(root: Path) -> str:
    found = re.search(r'^__version__ = "(.+)"$', (root / "otloss/__init__.py").read_text("utf-8"), re.MULTILINE)
    assert found is not None
    return found[1]


def replace(path: Path, pattern: str, text: str) -> None:
    """Replace the one place of a file where the pattern is."""
    changed, count = re.subn(pattern, lambda _: text, path.read_text("utf-8"), count=1, flags=re.MULTILINE)
    if not count:
        raise SystemExit(f"{path.name} has no {pattern!r}: it was set before, or the file was changed.")
    path.write_text(changed, "utf-8")


def write_settings(root: Path, *, repository: str, contact: str, date: str) -> list[str]:
    """Write the settings that are given into the files, and return the names of those that are still unset."""
    if repository:
        if not re.fullmatch(r"https://[^/\s]+/\S+[^/\s]", repository):
            raise SystemExit(f"REPOSITORY is {repository!r}, expected an address such as https://HOST/OWNER/NAME.")
        replace(root / "pyproject.toml", r'^repository = ".*"$', f'repository = "{repository}"')
        citation = root / "CITATION.cff"
        without = re.sub(r"^repository-code: .*\n", "", citation.read_text("utf-8"), flags=re.MULTILINE)
        citation.write_text(without, "utf-8")
        replace(citation, r"^license: Apache-2.0$", f'license: Apache-2.0\nrepository-code: "{repository}"')
    if contact:
        for name in ("SECURITY.md", "CODE_OF_CONDUCT.md"):
            replace(root / name, re.escape(CONTACT), contact)
    if date:
        if not re.fullmatch(r"\d{4}-\d\d-\d\d", date):
            raise SystemExit(f"DATE is {date!r}, expected a day such as 2026-12-01.")
        replace(root / "CHANGELOG.md", rf"^## {re.escape(version(root))} \(.*\)$", f"## {version(root)} ({date})")
        replace(root / "CITATION.cff", r"^version: .*$", f"version: {version(root)}\ndate-released: {date}")
    return unset(root)


def unset(root: Path) -> list[str]:
    entry = re.search(r"^## (.*)$", (root / "CHANGELOG.md").read_text("utf-8"), re.MULTILINE)
    dated = re.compile(rf"{re.escape(version(root))} \(\d{{4}}-\d\d-\d\d\)")
    states = {
        "REPOSITORY": '\nrepository = ""\n' not in (root / "pyproject.toml").read_text("utf-8"),
        "CONTACT": CONTACT not in (root / "SECURITY.md").read_text("utf-8"),
        "DATE": entry is not None and dated.fullmatch(entry[1]) is not None,
    }
    return [name for name, is_set in states.items() if not is_set]


def run(*command: str | Path, folder: Path = ROOT) -> None:
    print("+", *command, flush=True)
    if subprocess.run([str(part) for part in command], cwd=folder, check=False).returncode:
        raise SystemExit(f"failed: {' '.join(map(str, command))}")


def build() -> Path:
    """Return the wheel; it is built from the sdist."""
    shutil.rmtree(ROOT / "dist", ignore_errors=True)
    run(sys.executable, "-m", "build", "--outdir", "dist", ".")
    run(sys.executable, "-m", "twine", "check", "--strict", *sorted((ROOT / "dist").iterdir()))
    return next((ROOT / "dist").glob("*.whl"))


def try_in_an_empty_environment(wheel: Path, torch_index: str) -> None:
    """Install the wheel without an extra, and run the first complete example of the README outside of the sources."""
    shutil.rmtree(EMPTY, ignore_errors=True)
    venv.create(EMPTY, with_pip=True)
    python = EMPTY / ("Scripts" if sys.platform == "win32" else "bin") / "python"
    constraint = ("--constraint", ROOT / "constraints.txt")
    if torch_index:
        run(python, "-m", "pip", "install", "--quiet", *constraint, "--no-deps", "--index-url", torch_index, "torch")
    run(python, "-m", "pip", "install", "--quiet", *constraint, wheel)
    run(python, "-m", "pip", "check")
    examples = (ROOT / "README.md").read_text("utf-8").partition("\n## Examples\n")[2]
    (EMPTY / "example.py").write_text(examples.partition("```python\n")[2].partition("```")[0], "utf-8")
    run(python, "-I", "-W", "error", "example.py", folder=EMPTY)
    run(python, "-I", "-m", "otloss_llm", "--version", folder=EMPTY)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    for name in ("repository", "contact", "date", "torch-index"):
        parser.add_argument(f"--{name}", default="")
    given = parser.parse_args()
    missing = write_settings(ROOT, repository=given.repository.rstrip("/"), contact=given.contact, date=given.date)
    try_in_an_empty_environment(build(), given.torch_index)
    if missing:
        print(f"A rehearsal: {', '.join(missing)} must be set before an upload, see CONTRIBUTING.md.")
    else:
        print(f"dist/ has version {version(ROOT)}. Commit the files, tag v{version(ROOT)}, and upload with twine.")


if __name__ == "__main__":
    main()
