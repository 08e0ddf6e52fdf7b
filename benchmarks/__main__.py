"""`python -m benchmarks [NAME]`: one of token_loss, scaling, numbers, solvers, barycenters,
single_problems, gradients, boosting, first_calls, or all.

hard_clouds (with options of its own), many_problems (with the extra "dask"), ordinal and ordinal_loss (with packages of
the extra "peers"), mathematics, number_regression, objectives, place_values, ratings and scaling_clouds run only by
name: objectives, ordinal and mathematics train for an hour and more, and `objectives --scale large` trains models of 10
and 30 million parameters, for half an hour of an H100. `python -m benchmarks paper --list` names the experiments, each
with its time.
"""

from __future__ import annotations

import argparse
import sys
from importlib import import_module
from pathlib import Path

from benchmarks.inputs import with_inputs
from benchmarks.measure import FOLDER, Settings

BENCHMARKS = (
    "token_loss", "scaling", "numbers", "solvers", "barycenters", "single_problems", "gradients",
    "boosting", "first_calls",
)  # fmt: skip
BY_NAME = (
    "hard_clouds", "many_problems", "ordinal", "ordinal_loss", "mathematics", "number_regression", "objectives",
    "place_values", "ratings", "scaling_clouds",
)  # fmt: skip


def main(arguments: list[str] | None = None) -> None:
    arguments = sys.argv[1:] if arguments is None else arguments
    if arguments[:1] == ["paper"]:
        sys.exit(import_module("benchmarks.paper.experiments").main(arguments[1:]))
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__, allow_abbrev=False)
    parser.add_argument("name", nargs="?", choices=[*BENCHMARKS, *BY_NAME], help="default: all of the first line")
    parser.add_argument("--rounds", type=int, help="interleaved repetitions (default: see ROUNDS of each benchmark)")
    parser.add_argument("--small", action="store_true", help="tiny sizes, to check that it runs; keeps no results")
    parser.add_argument(
        "--data", type=Path, help="folder of the data (default: $OTLOSS_DATA, else shared/data beside the repository, "
        "else a download); without it labels follow a Zipf law, and tracked results do not change",
    )  # fmt: skip
    parser.add_argument("--text", default=Settings.text, help="the text that labels come from (%(default)s)")
    parser.add_argument("--output", type=Path, help="folder for results (default: benchmarks, with --small none)")
    parser.add_argument(
        "--resume",
        action="store_true",
        help="scaling, ordinal, and the ones of numbers and mathematics: resume an interrupted run",
    )
    parser.add_argument("--scale", choices=["large"], help="of objectives: models of 10 and 30 million parameters")
    options, more = parser.parse_known_args(arguments)
    if more and options.name != "hard_clouds":
        parser.error(f"unrecognized arguments: {' '.join(more)}")
    if options.rounds is not None and options.rounds < 1:
        parser.error(f"--rounds is {options.rounds}, expected 1 or more")
    if options.scale and options.name != "objectives":
        parser.error(f"--scale is an option of objectives, and got {options.name or 'no name'}")
    settings = Settings(
        rounds=options.rounds,
        small=options.small,
        data=options.data,
        text=options.text,
        output=options.output or (None if options.small else FOLDER),
        resume=options.resume,
    )
    for name in [options.name] if options.name else BENCHMARKS:
        name = f"{name}_{options.scale}" if options.scale else name
        if name == "ordinal_loss":
            import_module("benchmarks.ordinal").times(settings)
        elif name == "hard_clouds":
            import_module("benchmarks.hard_clouds").main(settings, more)
        else:
            import_module(f"benchmarks.{name}").main(with_inputs(settings, name))


if __name__ == "__main__":
    main()
