"""Runs of several arms and seeds as rows of a CSV, each kept when it ends, and their means with 95 % intervals."""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence

import torch

from benchmarks.measure import Settings, hardware, say, table
from benchmarks.paper.tables import Mean, half_interval

KEYS, MACHINE = ("case", "arm", "seed"), ("hardware", "torch")


class Runs:
    """The runs of a benchmark, a row for each case, arm and seed.

    Args:
        name: of the file in the folder of results; --resume continues with its rows, otherwise it begins anew.
        measures: the columns, each a number of every run.
    """

    def __init__(self, name: str, measures: tuple[str, ...], settings: Settings) -> None:
        self.path = None if settings.output is None else settings.output / f"{name}.csv"
        self.name, self.measures, self.rows = name, measures, list[dict[str, str]]()
        if settings.resume and self.path is not None and self.path.exists():
            with self.path.open(newline="", encoding="utf-8") as stream:
                self.rows = list(csv.DictReader(stream))

    def lacks(self, case: str, arm: str, seed: int) -> bool:
        return not any(tuple(row[key] for key in KEYS) == (case, arm, str(seed)) for row in self.rows)

    def add(self, case: str, arm: str, seed: int, measured: Mapping[str, float]) -> None:
        """Keep a run, in the file too, so that an interrupted benchmark loses only the run it was in."""
        values = {name: f"{measured[name]:.5g}" for name in self.measures}
        machine = {"hardware": hardware(), "torch": torch.__version__}
        self.rows.append({"case": case, "arm": arm, "seed": str(seed)} | values | machine)
        if self.path is not None:
            with self.path.open("w", newline="", encoding="utf-8") as stream:
                writer = csv.DictWriter(stream, (*KEYS, *self.measures, *MACHINE), lineterminator="\n")
                writer.writeheader()
                writer.writerows(self.rows)

    def of(self, case: str, arm: str, measure: str) -> dict[str, float]:
        """The values of a measure, by seed."""
        return {row["seed"]: float(row[measure]) for row in self.rows if (row["case"], row["arm"]) == (case, arm)}

    def change(self, case: str, arm: str, measure: str, *, over: Sequence[str]) -> Mean:
        """How far a measure lies above the measure of another run, (arm, measure), of the same seed."""
        base, own = self.of(case, *over), self.of(case, arm, measure)
        return half_interval([value - base[seed] for seed, value in own.items()])

    def report(self, case: str, arms: tuple[str, ...], changes: Sequence[tuple[str, str, str]]) -> None:
        """Print the measures and changes (measure, arm, measure of that arm), each ± half of its 95 % interval."""
        say(f"\n{self.name}: {case}; mean ± half of the 95 % interval over the seeds")
        of = {name: [half_interval(list(self.of(case, arm, name).values())) for arm in arms] for name in self.measures}
        table([["", *of], *([arm, *map(_shown, row)] for arm, *row in zip(arms, *of.values(), strict=True))])
        say("\nchanges, paired within a seed")
        titles = ["", *(f"{measure} - {' '.join(base)}" for measure, *base in changes)]
        rows = [[arm, *(_shown(self.change(case, arm, one, over=base)) for one, *base in changes)] for arm in arms]
        table([titles, *rows])


def _shown(value: Mean) -> str:
    return value.shown("{:.3g}", "{:.2g}")
