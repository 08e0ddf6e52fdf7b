"""`python -m benchmarks [token_loss | scaling | numbers | solvers | gradients | boosting | first_calls]`: one, or all.

ordinal and ordinal_loss (with packages of the extra "peers") and mathematics run when they are named: ordinal and
mathematics train for an hour and more.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from benchmarks import boosting, first_calls, gradients, mathematics, numbers, ordinal, scaling, solvers, token_loss
from benchmarks.labels import BESIDE, find_data
from benchmarks.measure import FOLDER, Settings

BENCHMARKS = {"token_loss": token_loss.main, "scaling": scaling.main, "numbers": numbers.main, "solvers": solvers.main,
              "gradients": gradients.main, "boosting": boosting.main, "first_calls": first_calls.main}  # fmt: skip
BY_NAME = {"ordinal": ordinal.main, "ordinal_loss": ordinal.times, "mathematics": mathematics.main}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__, allow_abbrev=False)
    parser.add_argument("name", nargs="?", choices=[*BENCHMARKS, *BY_NAME], help="default: all but the last three")
    parser.add_argument(
        "--rounds", type=int, help=f"interleaved repetitions ({token_loss.ROUNDS}; scaling {scaling.ROUNDS}; solvers "
        f"{solvers.ROUNDS})",
    )  # fmt: skip
    parser.add_argument("--small", action="store_true", help="tiny sizes, to see that it runs; keeps no results")
    parser.add_argument(
        "--data", type=Path, help=f"folder with text/*.txt and tokenizers/gpt2 (default: {'/'.join(BESIDE.parts[-2:])} "
        "beside the repository; labels follow a Zipf law where there is none)",
    )  # fmt: skip
    parser.add_argument("--text", default=Settings.text, help="the text the labels come from (%(default)s)")
    parser.add_argument("--output", type=Path, help="folder for results (default: benchmarks, with --small none)")
    parser.add_argument(
        "--resume", action="store_true", help="scaling, ordinal, mathematics: go on where an interrupted run stopped"
    )
    options = parser.parse_args()
    if options.rounds is not None and options.rounds < 1:
        parser.error(f"--rounds is {options.rounds}, expected 1 or more")
    settings = Settings(
        rounds=options.rounds,
        small=options.small,
        data=find_data(options.data, options.text),
        text=options.text,
        output=options.output or (None if options.small else FOLDER),
        resume=options.resume,
    )
    for name in [options.name] if options.name else BENCHMARKS:
        (BENCHMARKS | BY_NAME)[name](settings)


if __name__ == "__main__":
    main()
