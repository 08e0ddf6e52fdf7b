"""`python -m benchmarks [token_loss]`: run one benchmark, or all of them."""

from __future__ import annotations

import argparse

from benchmarks import token_loss

BENCHMARKS = {"token_loss": token_loss.main}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("name", nargs="?", choices=sorted(BENCHMARKS), help="default: all")
    parser.add_argument("--rounds", type=int, default=7, help="interleaved repetitions; medians are reported")
    parser.add_argument("--small", action="store_true", help="tiny sizes, to see that it runs")
    options = parser.parse_args()
    for name in [options.name] if options.name else BENCHMARKS:
        BENCHMARKS[name](rounds=options.rounds, small=options.small)


if __name__ == "__main__":
    main()
