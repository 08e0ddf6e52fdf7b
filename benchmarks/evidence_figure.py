"""The figure of docs/reports/evidence.md: what each cost gains over MLE, by experiment.

    python -m benchmarks.evidence_figure docs/reports/evidence_gain.png "few texts=runs/few" "new texts=runs/new" ...

Each folder is one of `compare --source`. Shown is the reverse KL minus that of MLE at its recall at T = 0.8, with
95 % intervals over seeds, for the default cost (of the source's rows, or the start's where that is a given model), the
same with the leading directions, and random rows.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from otloss_llm.experiments.frontier import at_equal_recall
from otloss_llm.experiments.frontier_report import frontiers_of, levels_of

TEMPERATURE = 0.8
ARMS = {
    "without leading directions (default)": ("emo/all-but-the-top", "emo"),
    "all rows": ("emo/source", "emo/raw"),
    "random rows": ("emo/random", "emo/random"),
}


def main(target: str, *named: str) -> None:
    """Draw the figure to `target`."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 0.7 * len(named) + 1.4), layout="constrained")
    axes = figure.subplots()
    for place, text in enumerate(named):
        folder = text.partition("=")[2]
        results = json.loads((Path(folder) / "report.json").read_text(encoding="utf-8"))
        frontiers = frontiers_of(results)
        level = levels_of(frontiers["mle"])[TEMPERATURE]
        started = results["settings"].get("start") is not None
        for number, (label, arms) in enumerate(ARMS.items()):
            curves = frontiers.get(arms[started])
            gain = None if curves is None else at_equal_recall(curves, frontiers["mle"], level)
            if gain is None or gain.seeds < 2:
                continue
            y = place + 0.22 * (number - 1)
            error = [[gain.mean - gain.low], [gain.high - gain.mean]]
            axes.errorbar(gain.mean, y, xerr=error, fmt="o", color=f"C{number}", capsize=3, ms=5,
                          label=label if place == 0 else None)  # fmt: skip
    axes.axvline(0, color="black", lw=1)
    axes.set_yticks(range(len(named)), [text.partition("=")[0] for text in named])
    axes.invert_yaxis()
    axes.set_xlabel(
        f"reverse KL minus that of MLE at its recall at T = {TEMPERATURE:g}, nats per token\n← better than MLE"
    )
    axes.legend(frameon=False, fontsize=8)
    figure.savefig(target, dpi=130)


if __name__ == "__main__":
    main(*sys.argv[1:])
