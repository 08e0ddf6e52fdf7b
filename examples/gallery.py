"""All examples, one on each core, and one page with their figures and tables.

    python examples/gallery.py                     # what `make gallery` runs: docs/gallery.md and docs/gallery/*.png
    python examples/gallery.py documents graphs    # these alone; the page holds what earlier runs left too

An example is a script here that takes `--output FOLDER` and `--quick` and leaves one figure, FOLDER/NAME.png. The first
line of its docstring is the title, the paragraph of "Result:" goes to the table. What a run printed and drew is kept in
`gallery-output/NAME`; it runs again when the script has changed. An example that fails does not stop the others.
"""

from __future__ import annotations

import argparse
import ast
import os
import re
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from PIL import Image

HERE = Path(__file__).parent
OPTIONS = ('"--output"', '"--quick"')  # of examples, in their source
# What each example was to reach, on the same work as its peer, and the peer.
GOALS = {
    "adaptation": ("accuracy of at least 0.68 by the joint-distribution loss; maps beside no map", "no map"),
    "attention": ("more slots right than by softmax attention, over seeds", "softmax attention"),
    "boosting": ("`xgb.cv` and LightGBM's `cv` with our metric, on real data", "cross-entropy"),
    "cost_sensitive": ("mean cost of three losses and two decisions", "cross-entropy"),
    "documents": ("25 times gensim a pair; search 4 times all pairs, same answer", "gensim, POT, tf-idf"),
    "ensembles": ("at most 2 times the time of `scoringrules`; CRPS lower after recalibration", "scoringrules"),
    "flow_matching": ("W2 after 1 to 8 steps, with pairing and without", "independent pairs"),
    "generators": ("without a critic: at most the penalty's W1 in half its time", "three critics"),
    "graphs": ("8 times a POT loop for node distances; error beside pooled features", "POT, pooled features"),
    "histogram_regression": ("MAE at most that of HL-Gauss", "HL-Gauss"),
    "masks": ("64 x 64 step at most 60 ms; Dice and Hausdorff beside both peers", "cross-entropy, soft Dice"),
    "number_tokens": ("more right answers than by likelihood alone, same steps", "likelihood alone"),
    "ranking": ("Spearman and recall at k beside MSE and cross-entropy", "MSE, cross-entropy"),
    "recalibrate_forecast": ("lower RPS than as it is, in every split", "temperature"),
    "registration": ("3 degrees in 3 s; from 90 degrees by restarts; 4 times GeomLoss", "ICP, balanced, GeomLoss"),
    "sequences": ("at most 50 µs a pair; Spearman with corruption 0.9", "no peer"),
    "set_prediction": ("detection F1 and time beside a scipy loop", "scipy"),
    "wine_quality": ("RPS and error in grades beside the usual model", "logistic regression"),
}


@dataclass(frozen=True)
class Run:
    """An example, and the folder of what it left; without its data it leaves no figure."""

    name: str
    script: Path
    folder: Path

    @property
    def figure(self) -> Path:
        return self.folder / f"{self.name}.png"

    @property
    def done(self) -> bool:
        return (kept := self.folder / "seconds.txt").exists() and kept.stat().st_mtime > self.script.stat().st_mtime

    @property
    def paragraphs(self) -> list[str]:
        """Of the docstring, without its commands; a formula in lines of its own becomes a block."""
        text = ast.get_docstring(ast.parse(self.script.read_text(encoding="utf-8"))) or self.name
        parts = [part for part in text.split("\n\n") if not part.startswith(("    python", "    pip"))]
        return [f"```text\n{part}\n```" if part.startswith(" ") else " ".join(part.split()) for part in parts]

    @property
    def result(self) -> str:
        found = re.search(r"Results?\b[^:]*: (.*)", "\n".join(self.paragraphs))
        return found[1].replace("|", "\\|") if found else ""

    def read(self, name: str) -> str:
        return (self.folder / name).read_text(encoding="utf-8")

    def start(self, quick: bool) -> bool:
        """Run the script; return whether it succeeded."""
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir(parents=True)
        command = [sys.executable, str(self.script), "--output", str(self.folder), *["--quick"] * quick]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "MPLBACKEND": "agg", "PYTHONIOENCODING": "utf-8"}
        with (self.folder / "printed.txt").open("w") as out, (self.folder / "errors.txt").open("w") as errors:
            child = subprocess.Popen(command, stdout=out, stderr=errors, env=environment)
            _, status, used = os.wait4(child.pid, 0)
        child.returncode, seconds = os.waitstatus_to_exitcode(status), used.ru_utime + used.ru_stime
        if child.returncode == 0:
            (self.folder / "seconds.txt").write_text(f"{seconds:.0f}", encoding="utf-8")
        failure = f"   FAILED\n{self.read('errors.txt')[-2000:]}" if child.returncode else ""
        print(f"{self.name:24}{seconds:6.0f} s{failure}", flush=True)
        return child.returncode == 0


def section(run: Run, figures: Path) -> str:
    """The section of an example, with its figure copied to the page's folder."""
    title, *text = run.paragraphs
    anchor = f'<a id="{run.name}"></a>'
    lines = [f"{anchor}\n## {title.rstrip('.')}", f"[examples/{run.script.name}](../examples/{run.script.name})", *text]
    if run.figure.exists():
        figures.mkdir(parents=True, exist_ok=True)
        with Image.open(run.figure) as image:  # a palette takes a third of the space
            image.convert("RGB").quantize(256, dither=Image.Dither.NONE).save(figures / run.figure.name, optimize=True)
        lines.insert(2, f"![{run.name}]({figures.name}/{run.figure.name})")
    printed = run.read("printed.txt").rstrip()
    return "\n\n".join([*lines, *[f"```text\n{printed}\n```"] * bool(printed)])


def page(runs: list[Run], figures: Path) -> str:
    rows = ["| example | to reach | result | peer | processor seconds |", "|---|---|---|---|---|"]
    for run in runs:
        goal, peer = GOALS.get(run.name, ("", ""))
        rows.append(f"| [{run.name}](#{run.name}) | {goal} | {run.result} | {peer} | {run.read('seconds.txt')} |")
    top = (
        "# Gallery\n\nEach example is one script on real data, beside what one would use otherwise. `make gallery` "
        f"runs all and writes this page; {sum(int(run.read('seconds.txt')) for run in runs) / 60:.0f} minutes of one "
        "core. The demo of language models is `make demo`, see the [README](../README.md)."
    )
    return "\n\n".join([top, "\n".join(rows), *(section(run, figures) for run in runs)]) + "\n"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("names", nargs="*", help="of examples to run (all)")
    parser.add_argument("--output", type=Path, default=HERE.parent / "gallery-output", help="folder of the runs")
    parser.add_argument("--again", action="store_true", help="run also what is done")
    parser.add_argument("--quick", action="store_true", help="tiny runs; their page goes to OUTPUT/quick, not to docs")
    options = parser.parse_args(arguments)
    texts = {path: path.read_text(encoding="utf-8") for path in sorted(HERE.glob("*.py")) if path.stem != "gallery"}
    scripts = {path.stem: path for path, text in texts.items() if all(option in text for option in OPTIONS)}
    if unknown := sorted(set(options.names) - set(scripts)):
        parser.error(f"there are no examples {unknown}, expected some of {sorted(scripts)}")
    output = options.output / "quick" if options.quick else options.output
    runs = [Run(name, path, output / name) for name, path in scripts.items()]
    chosen = [run for run in runs if run.name in (options.names or scripts) and (options.again or not run.done)]
    with ThreadPoolExecutor(os.cpu_count()) as pool:  # an example has one thread
        succeeded = pool.map(lambda run: run.start(options.quick), chosen)
    failed = [run.name for run, good in zip(chosen, succeeded, strict=True) if not good]
    folder = output if options.quick else HERE.parent / "docs"
    (folder / "gallery.md").write_text(page([run for run in runs if run.done], folder / "gallery"), encoding="utf-8")
    print(f"{folder / 'gallery.md'}" + (f"; failed: {', '.join(failed)}" if failed else ""))
    return len(failed) > 0


if __name__ == "__main__":
    sys.exit(main())
