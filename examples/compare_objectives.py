"""Does an objective help on your data? Several of them, each with several seeds: one table and one figure.

    python examples/compare_objectives.py --arms mle emo "emo --cost_embedding random" "emo --learning_rate 5e-5" \
        --seeds 0 1 2 --output runs/compare --model_name_or_path MODEL --dataset_name DATA --test_split_size 0.1

An arm is an objective and options of its own; what this script does not know is an option of `python -m otloss_llm
train`, which runs every arm and seed in a folder of its own. A run that was killed is resumed by the same command.

The arms of a seed are measured on the same rows: nats per token (nll), and the share of tokens that are the most
probable ones. The interval is over seeds (95 %, Student's t), of the difference from the first arm. The transport cost
is left out: an arm may have a cost of its own, and values under two costs do not compare.
Give each objective a learning rate of its own before you say that one is better, and keep the control: what random rows
gain as well is not the meaning of the tokens.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, stdev

from matplotlib import pyplot as plt
from scipy.stats import t

Runs = dict[str, list[dict[str, float]]]  # the results of each arm, one for each seed
COLUMNS = {"eval_nll": "nll, nats per token", "eval_mean_token_accuracy": "right tokens"}


def train(arm: str, seed: int, output: Path, shared: Sequence[str]) -> dict[str, float]:
    """Run one training and return its results; raises SystemExit with its code if it fails."""
    objective, *own = arm.split()
    folder = output / f"{arm.replace(' --', '_').replace(' ', '-').replace(':', '-').replace('/', '-')}-seed{seed}"
    options = ["--eval_strategy", "epoch", *shared, "--objective", objective, *own, "--seed", str(seed)]
    print(f"{arm}, seed {seed}: {folder}", file=sys.stderr, flush=True)
    command = [sys.executable, "-m", "otloss_llm", "train", *options, "--output_dir", str(folder)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        raise SystemExit(done.returncode)
    results: dict[str, float] = json.loads(done.stdout)
    if "eval_nll" not in results:
        raise SystemExit("there are no rows to compare on; name a split with --dataset_test_split, or cut one off.")
    return results


def interval(values: Sequence[float]) -> str:
    """Return a mean with half of its interval over seeds."""
    if len(values) < 2:
        return f"{fmean(values):+.4f} (one seed)"
    half = float(t.ppf(0.975, len(values) - 1)) * stdev(values) / math.sqrt(len(values))
    return f"{fmean(values):+.4f} ± {half:.4f}"


def table(runs: Runs) -> str:
    first = next(iter(runs.values()))
    lines = [["arm", *COLUMNS.values(), "nll minus the first arm's"], ["---", *(len(COLUMNS) + 1) * ["---:"]]]
    for arm, each in runs.items():
        cells = [f"{fmean(one[key] for one in each):.4f}" for key in COLUMNS]
        apart = [one["eval_nll"] - other["eval_nll"] for one, other in zip(each, first, strict=True)]
        lines.append([arm, *cells, "" if each is first else interval(apart)])
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


def draw(path: Path, runs: Runs) -> None:
    """Save nll and right tokens of every run; higher and further left is better."""
    figure, ax = plt.subplots(figsize=(6, 4), layout="constrained")
    for arm, each in runs.items():
        ax.plot(*([one[key] for one in each] for key in COLUMNS), "o", label=arm)
    nll, right = COLUMNS.values()
    ax.set(xlabel=nll, ylabel=right, title="On rows that were not trained on")
    ax.legend(frameon=False)
    figure.savefig(path, dpi=120)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").splitlines()[0], allow_abbrev=False,
        epilog="All other options are as in `python -m otloss_llm train`.",
    )  # fmt: skip
    parser.add_argument("--arms", nargs="+", default=["mle", "emo", "emo --cost_embedding random"])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--output", type=Path, required=True, help="folder of the runs, the table and the figure")
    options, shared = parser.parse_known_args(arguments)
    runs: Runs = {
        arm: [train(arm, seed, options.output, shared) for seed in options.seeds] for arm in dict.fromkeys(options.arms)
    }
    text = table(runs)
    options.output.mkdir(parents=True, exist_ok=True)
    (options.output / "report.md").write_text(f"{text}\n![nll and right tokens](compare.png)\n", encoding="utf-8")
    draw(options.output / "compare.png", runs)
    print(text)


if __name__ == "__main__":
    main()
