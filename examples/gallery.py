"""All examples, one on each core.

    python examples/gallery.py                     # what `make gallery` runs
    python examples/gallery.py documents graphs    # these alone
    python examples/gallery.py --docs              # what `make gallery-page` runs: docs/reports/gallery.md too

An example is a script here that takes `--output FOLDER` and `--quick` and leaves one figure, FOLDER/NAME.png. What a
run printed and drew is kept in `gallery-output/NAME`; it runs again when the script has changed, or when it had to run
on other data than in its docstring. Such runs are named at the end, and change no figure in docs. An example that fails
does not stop the others.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from data import OTHER
from gallery_page import keep_figure, pages

HERE = Path(__file__).parent
OPTIONS = ('"--output"', '"--quick"')  # examples have them in their source


@dataclass(frozen=True)
class Ran:
    """An example, and the folder with what its run printed, its time and its figure."""

    script: Path
    folder: Path

    @property
    def name(self) -> str:
        return self.script.stem

    @property
    def on_other_data(self) -> bool:
        return any(line.startswith(OTHER) for line in self.read("printed.txt").splitlines())

    def read(self, name: str) -> str:
        return (self.folder / name).read_text(encoding="utf-8")


def is_done(run: Ran) -> bool:
    kept = run.folder / "seconds.txt"
    return kept.exists() and kept.stat().st_mtime > run.script.stat().st_mtime


def start(run: Ran, quick: bool) -> bool:
    """Run the script; return whether it succeeded."""
    shutil.rmtree(run.folder, ignore_errors=True)
    run.folder.mkdir(parents=True)
    command = [sys.executable, str(run.script), "--output", str(run.folder), *["--quick"] * quick]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MPLBACKEND": "agg", "PYTHONIOENCODING": "utf-8"}
    with (run.folder / "printed.txt").open("w") as out, (run.folder / "errors.txt").open("w") as errors:
        child = subprocess.Popen(command, stdout=out, stderr=errors, env=environment)
        _, status, used = os.wait4(child.pid, 0)
    child.returncode, seconds = os.waitstatus_to_exitcode(status), used.ru_utime + used.ru_stime
    if child.returncode == 0:
        (run.folder / "seconds.txt").write_text(f"{seconds:.0f}", encoding="utf-8")
    said = f"   FAILED\n{run.read('errors.txt')[-2000:]}" if child.returncode else "   other data" * run.on_other_data
    print(f"{run.name:24}{seconds:6.0f} s{said}", flush=True)
    return child.returncode == 0


def scripts_in(folder: Path) -> dict[str, Path]:
    """The examples by name: scripts with the options of examples."""
    texts = {path: path.read_text(encoding="utf-8") for path in sorted(folder.glob("*.py")) if path.stem != "gallery"}
    return {path.stem: path for path, text in texts.items() if all(option in text for option in OPTIONS)}


def update(reports: Path, scripts: dict[str, Path], runs: list[Ran]) -> None:
    """Copy the figures of these runs, and write the pages of all scripts."""
    for run in runs:
        keep_figure(run.folder / f"{run.name}.png", reports)
    for page, text in pages(scripts.values(), reports).items():
        page.write_text(text, encoding="utf-8")


def main(arguments: list[str] | None = None, folder: Path = HERE) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("names", nargs="*", help="of examples to run (all)")
    parser.add_argument("--output", type=Path, default=folder.parent / "gallery-output", help="folder of the runs")
    parser.add_argument("--again", action="store_true", help="run also what is done")
    parser.add_argument(
        "--docs", action="store_true", help="update the pages, and the figures of the runs that had their data"
    )
    parser.add_argument("--quick", action="store_true", help="tiny runs, in OUTPUT/quick")
    options = parser.parse_args(arguments)
    if options.quick and options.docs:
        parser.error("--quick makes no page for docs; leave out one of --quick and --docs")
    scripts = scripts_in(folder)
    if unknown := sorted(set(options.names) - set(scripts)):
        parser.error(f"there are no examples {unknown}, expected some of {sorted(scripts)}")
    output = options.output / "quick" if options.quick else options.output
    runs = [Ran(path, output / name) for name, path in scripts.items()]
    wanted = [run for run in runs if run.name in (options.names or scripts)]
    chosen = [run for run in wanted if options.again or not is_done(run) or run.on_other_data]
    with ThreadPoolExecutor(os.cpu_count()) as pool:  # an example has one thread
        succeeded = pool.map(lambda run: start(run, options.quick), chosen)
    failed = [run.name for run, good in zip(chosen, succeeded, strict=True) if not good]
    done = [run for run in runs if is_done(run)]
    print(f"Figures: {output}/NAME/NAME.png")
    if options.docs:
        update(folder.parent / "docs/reports", scripts, [run for run in done if not run.on_other_data])
    if without := [run.name for run in done if run.on_other_data]:
        kept = "; docs keeps their figures" * options.docs
        print(f"On other data than in their docstrings (docs/reports/data.md has them): {', '.join(without)}{kept}")
    if failed:
        print(f"Failed: {', '.join(failed)}")
    return len(failed) > 0


if __name__ == "__main__":
    sys.exit(main())
