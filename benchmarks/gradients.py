"""Gradients of otloss, POT and GeomLoss, each compared with finite differences of the same library's own value.

For each argument: the largest error of an entry relative to the largest derivative. Weight gradients are compared along
e_i - e_k, k the heaviest bin, if masses are fixed (a constant has no meaning there), and one-sided at empty bins.
Finite differences are taken in float64, gradients in float64 and float32.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import io
import warnings
from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from benchmarks.gradient_peers import FAMILIES, Contestant, Family, Inputs, Value
from benchmarks.measure import Settings, say

STEP = 1e-5
RIGHT = 1e-3
FLAT = 1e-7  # costs are about 1
DTYPES = (torch.float64, torch.float32)
WEIGHTS = ("p", "q")


def finite_differences(value: Value, inputs: Inputs, name: str, *, fixed: bool) -> Tensor:
    """Entry by entry: central differences, at empty bins one-sided of second order."""
    point = inputs[name]
    derivatives = torch.zeros_like(point)
    for index in np.ndindex(*point.shape):
        along = torch.zeros_like(point)
        along[index] = 1
        if name in WEIGHTS and fixed:
            along[int(point.argmax())] -= 1

        def at(step: float, along: Tensor = along) -> float:
            return float(value({**inputs, name: point + step * along}))

        if not along.any():
            continue
        if name in WEIGHTS and point[index] == 0:
            derivatives[index] = (4 * at(STEP) - at(2 * STEP) - 3 * at(0)) / (2 * STEP)
        else:
            derivatives[index] = (at(STEP) - at(-STEP)) / (2 * STEP)
    return derivatives


def verdict(gradient: Tensor | None, derivatives: Tensor, *, relative_to: int | None) -> str:
    """The relative error, or a word for what is wrong."""
    if not torch.isfinite(derivatives).all():
        return "value NaN"
    if gradient is None:
        return "None"
    if not torch.isfinite(gradient).all():
        return "NaN"
    gradient = gradient.double()
    if relative_to is not None:
        gradient = gradient - gradient[relative_to]
    largest = float(derivatives.abs().max())
    if largest < FLAT:
        return "value constant"
    error = float((gradient - derivatives).abs().max()) / largest
    if error <= RIGHT:
        return f"{error:.0e}"
    if float(gradient.abs().max()) < 1e-6 * largest:
        return "constant"
    large = derivatives.abs() > 0.1 * largest
    if bool((gradient * derivatives < 0)[large].any()) and error > 0.5:
        return f"wrong sign ({error:.2g})"
    return f"{error:.2g}"


def judge(contestant: Contestant, inputs: Inputs, truth: Inputs | str, dtype: torch.dtype, *, fixed: bool) -> str:
    """One cell: the largest error if all are right, else each wrong argument with its error."""
    if isinstance(truth, str):
        return truth
    leaves = {name: t.to(dtype, copy=True).requires_grad_() for name, t in inputs.items()}
    try:
        value = contestant.value(leaves)
        results = torch.autograd.grad(value, list(leaves.values()), allow_unused=True)
    except Exception as error:
        return f"raises {type(error).__name__}"
    verdicts = {}
    for (name, point), gradient in zip(inputs.items(), results, strict=True):
        heaviest = int(point.argmax()) if name in WEIGHTS and fixed else None
        verdicts[name] = verdict(gradient, truth[name], relative_to=heaviest)
    wrong = {name: text for name, text in verdicts.items() if not _is_right(text)}
    if not wrong:
        return max(verdicts.values(), key=float)
    if len(set(wrong.values())) == 1 and len(wrong) == len(verdicts):
        return f"**{next(iter(wrong.values()))}**"
    return ", ".join(f"{name} **{text}**" for name, text in wrong.items())


def _is_right(text: str) -> bool:
    try:
        return float(text) <= RIGHT
    except ValueError:
        return False


def rows(family: Family) -> Iterator[list[str]]:
    """One row per contestant: its name, and float64 and float32 for each problem."""
    cells: dict[str, list[str]] = {}
    for make, number in family.problems.values():
        inputs = make()
        try:
            contestants = family.contestants(number)
        except ImportError as error:
            raise SystemExit(f"this benchmark needs POT and GeomLoss: {error}") from error
        for contestant in contestants:
            truth: Inputs | str
            try:
                with torch.no_grad():
                    truth = {
                        name: finite_differences(contestant.exact, inputs, name, fixed=family.fixed) for name in inputs
                    }
            except Exception as error:
                truth = f"value raises {type(error).__name__}"
            results = [judge(contestant, inputs, truth, dtype, fixed=family.fixed) for dtype in DTYPES]
            cells.setdefault(contestant.name, []).extend(results)
    for name, line in cells.items():
        yield [f"`{name}`", *line]


def table(family: Family) -> str:
    head = ["", *(", ".join(filter(None, (case, str(dtype)[6:]))) for case in family.problems for dtype in DTYPES)]
    lines = [head, ["---"] * len(head), *rows(family)]
    return f"**{family.title}**\n\n" + "\n".join(f"| {' | '.join(line)} |" for line in lines)


def main(settings: Settings) -> None:
    """Print the tables, and write them to gradients.md in this folder or in another output folder."""
    names = ("torch-otloss", "POT", "geomloss", "torch")
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in names)
    parts = [f"Made by `python -m benchmarks gradients` with {versions}.\n"]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # some peers do not converge; their gradients show it
        for family in FAMILIES[:1] if settings.small else FAMILIES:
            with contextlib.redirect_stdout(io.StringIO()):  # POT prints some of its warnings
                results = table(family)
            parts.append(results + "\n")
            say(parts[-1])
    if settings.output is not None:
        head = "# Errors of gradients\n\ndocs/reports/gradients.md says what they mean.\n\n<!-- tables -->\n"
        (settings.output / "gradients.md").write_text("\n".join([head, *parts]), encoding="utf-8")
