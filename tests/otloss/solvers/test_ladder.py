"""The ladder of entropic methods: the search goes on after a method that gives up, wherever it stands."""

import dataclasses
import math
import runpy
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import otloss
from otloss.costs import GridCost
from otloss.solvers.entropic import ladder, newton, newton_batch
from otloss.solvers.entropic.interface import Budget, Method, SearchResult, Start, better
from otloss.solvers.entropic.sinkhorn import Sinkhorn
from otloss.solvers.problem import Problem

RUNGS = len(ladder.LADDER)


class Added(Method):
    """The method for the test: it prints its name, makes two iterations of the reference and gives up."""

    def applies(self, problem: Problem) -> bool:
        return True

    def run(self, problem: Problem, start: Start | None, budget: Budget) -> SearchResult:
        print(type(self).__name__)
        return Sinkhorn().run(problem, start, dataclasses.replace(budget, max_iterations=2))


def matrix(dtype: torch.dtype, **options: Any) -> otloss.Transport:
    generator = torch.Generator().manual_seed(0)
    p, q = (torch.softmax(torch.randn(n, generator=generator, dtype=dtype), -1) for n in (12, 15))
    costs = torch.rand(12, 15, generator=generator, dtype=dtype)
    return otloss.solve(p, q, costs, epsilon=0.02, tolerance=1e-5, **options)


@pytest.fixture(autouse=True)
def _no_newton_between_images(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(newton_batch, "MAX_ENTRIES_OF_IMAGES", 0)


def image(dtype: torch.dtype) -> otloss.Transport:
    """Cells of images that Newton's method does not take: the first method and the last one remain."""
    generator = torch.Generator().manual_seed(0)
    p, q = (torch.softmax(torch.randn(1089, generator=generator, dtype=dtype), -1) for _ in range(2))
    return otloss.solve(p, q, GridCost((33, 33)), epsilon=1.0, tolerance=1e-4)


CASES = {
    "matrix, float32": lambda: matrix(torch.float32), "matrix, float64": lambda: matrix(torch.float64),
    "in torch": lambda: matrix(torch.float64, impl="torch"),
    "unbalanced": lambda: matrix(torch.float64, marginal_penalty=1.0), "image": lambda: image(torch.float64),
}  # fmt: skip


@cache
def solved(case: str) -> Tensor:
    return CASES[case]().value


@pytest.mark.parametrize("place", range(RUNGS))
@pytest.mark.parametrize("case", CASES)
def test_a_new_method_that_gives_up_does_not_end_the_search(
    case: str, place: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    expected = solved(case)
    capsys.readouterr()
    monkeypatch.setattr(ladder, "PATIENCE", 2)
    monkeypatch.setattr(ladder, "LADDER", (*ladder.LADDER[:place], (Added(),), *ladder.LADDER[place:]))
    found = CASES[case]()
    is_reached = place < RUNGS - 1 or case == "image"  # Newton's method, before that place, solves all matrices
    assert capsys.readouterr().out == "Added\n" * is_reached
    assert bool(found.converged)
    torch.testing.assert_close(found.value, expected, rtol=1e-3, atol=0.0)


def test_slow_iterations_between_large_images_end_in_newtons_method(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(0)
    p, q = (torch.softmax(2 * torch.randn(1089, generator=generator, dtype=torch.float64), -1) for _ in range(2))
    images = p, q, GridCost((33, 33))
    slow = otloss.solve(*images, epsilon=1.0, tolerance=1e-6)
    monkeypatch.setattr(newton_batch, "MAX_ENTRIES_OF_IMAGES", 2**24)
    fast = otloss.solve(*images, epsilon=1.0, tolerance=1e-6)
    assert bool(slow.converged)
    assert bool(fast.converged)
    assert 3 * fast.iterations < slow.iterations
    torch.testing.assert_close(fast.value, slow.value, rtol=1e-5, atol=0.0)


def test_the_first_method_may_give_up_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last method follows, although the first rung is in the arithmetic of the last one."""
    monkeypatch.setattr(ladder, "LADDER", ((Added(),), *ladder.LADDER[1:]))
    assert bool(image(torch.float64).converged)


class GivesUp(Added):
    """The method for the test: it gives up before its first iteration."""

    def run(self, problem: Problem, start: Start | None, budget: Budget) -> SearchResult:
        return SearchResult.without_search(problem)


@pytest.mark.parametrize("case", CASES)
def test_a_method_that_gives_up_leaves_the_problem_to_the_next_rung(
    case: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    expected = CASES[case]().value
    capsys.readouterr()
    monkeypatch.setattr(ladder, "LADDER", ((GivesUp(), Added()), *ladder.LADDER[1:]))
    result = CASES[case]()
    assert capsys.readouterr().out == ""
    assert bool(result.converged)
    torch.testing.assert_close(result.value, expected, rtol=1e-3, atol=0.0)


def test_no_method_repeats_the_search_of_an_earlier_one(monkeypatch: pytest.MonkeyPatch) -> None:
    searches = []

    def fail(self: Method, problem: Problem, start: Start | None, budget: Budget) -> SearchResult:
        searches.append(type(self))
        return SearchResult.without_search(problem)

    monkeypatch.setattr(newton.NewtonFirst, "applies", lambda *_: True)
    monkeypatch.setattr(newton.SparseNewton, "run", fail)
    monkeypatch.setattr(ladder, "LADDER", ((newton.NewtonFirst(),), *ladder.LADDER[1:]))
    assert bool(matrix(torch.float64).converged)
    assert searches == [newton.NewtonFirst]


class GivesUpToo(newton.SparseNewton):
    """A kind of another method, which does not do the same."""

    def run(self, problem: Problem, start: Start | None, budget: Budget) -> SearchResult:
        return SearchResult.without_search(problem)


def test_a_kind_of_a_method_leaves_that_method_in_the_search(monkeypatch: pytest.MonkeyPatch) -> None:
    searches, run = [], newton.SparseNewton.run
    monkeypatch.setattr(newton.SparseNewton, "run", lambda *given: searches.append(type(given[0])) or run(*given))
    monkeypatch.setattr(ladder, "LADDER", ((GivesUpToo(),), *ladder.LADDER[1:]))
    assert bool(matrix(torch.float64).converged)
    assert searches == [newton.SparseNewton]


def test_a_method_without_its_two_functions_cannot_be_made() -> None:
    forgetful = type("Forgetful", (Method,), {"applies": lambda *_: True})
    with pytest.raises(TypeError, match="abstract"):
        forgetful()


@pytest.mark.parametrize(("old", "new", "expected"), [
    (1e-3, math.nan, 1e-3), (math.nan, 1e-3, 1e-3), (1e-3, 1e-2, 1e-3), (1e-2, 1e-3, 1e-3), (1e-7, 1e-6, 1e-6),
    (1e-6, 1e-2, 1e-6), (math.inf, 1e-2, 1e-2), (math.inf, math.inf, math.inf),
])  # fmt: skip
def test_the_better_of_two_results(old: float, new: float, expected: float) -> None:
    zeros = torch.zeros(1, 2)
    results = [
        SearchResult.without_estimates(zeros, zeros, torch.tensor([error]), torch.tensor([3])) for error in (old, new)
    ]
    merged = better(*results, tolerance=1e-5)
    assert merged.error.item() == torch.tensor(expected)
    assert merged.iterations.item() == 6


def test_the_chart_has_every_method(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(ladder, "LADDER", (ladder.LADDER[0], (Added(),), *ladder.LADDER[1:]))
    draw = runpy.run_path(str(Path(__file__).parents[3] / "docs" / "draw_pictures.py"))
    draw["ladder"].__globals__["FOLDER"] = tmp_path
    draw["ladder"]()
    figure = draw["plt"].gcf()
    drawn = "\n".join(text.get_text() for text in figure.axes[0].texts)
    draw["plt"].close("all")
    assert (tmp_path / "ladder.png").stat().st_size
    assert all(f"{type(method).__name__}:" in drawn for rung in ladder.LADDER for method in rung)


@pytest.mark.parametrize("penalty", [None, 1.0])
def test_each_problem_of_a_batch_keeps_its_own_result_and_its_estimates(
    penalty: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first problem converges in the first rung, and the others in Newton's method, which gets these alone."""
    masks, select = [], newton.select
    monkeypatch.setattr(newton, "select", lambda problem, mask: masks.append(mask) or select(problem, mask))
    monkeypatch.setattr(ladder, "PATIENCE", 20)
    generator = torch.Generator().manual_seed(0)
    costs = torch.rand(3, 20, 25, generator=generator, dtype=torch.float64)
    costs[1:, :10, 12:] += 1.0
    costs[1:, 10:, :12] += 1.0
    epsilon = torch.tensor([0.3, 0.01, 0.02], dtype=torch.float64)
    together = otloss.solve(None, None, costs, epsilon=epsilon, marginal_penalty=penalty)
    assert masks[0].tolist() == [False, True, True]
    assert bool(together.converged.all())
    assert bool((together.potential_error < 1e-3 * epsilon).all()), together.potential_error
    for k in range(3):
        alone = otloss.solve(None, None, costs[k], epsilon=float(epsilon[k]), marginal_penalty=penalty)
        torch.testing.assert_close(together.value[k], alone.value, rtol=1e-7, atol=0.0)
        for got, want in zip(together.potentials, alone.potentials, strict=True):
            torch.testing.assert_close(got[k], want, rtol=0.0, atol=1e-4)
