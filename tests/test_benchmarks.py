"""The benchmarks: all run at tiny sizes and keep their results in the given folder; verdicts and measures are right."""

import csv
import math
import mmap
import os
import re
import shutil
import time
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("emo")
pytest.importorskip("matplotlib")
pytest.importorskip("geomloss")
pytest.importorskip("ot")


from benchmarks import gpu_transport, memory, reports, solver_peers
from benchmarks.__main__ import main
from benchmarks.inputs import BESIDE, INPUTS, with_inputs
from benchmarks.measure import FOLDER, Limit, Settings, Timing, ratios
from benchmarks.solver_cases import Gaps, Problems

ROOT = Path(__file__).parents[1]
HAS_DATA = (BESIDE / "math").is_dir() and (BESIDE / "tokenizers/gpt2").is_dir()
needs_data = pytest.mark.skipif(not HAS_DATA, reason="needs questions and a tokenizer")


def rows(file: Path) -> list[dict[str, str]]:
    with file.open(newline="", encoding="utf-8") as stream:
        return list(csv.DictReader(stream))


# ---- all of them at tiny sizes ---------------------------------------------------------------------------------------


def run(name: str, output: Path, *more: str) -> list[dict[str, str]]:
    """The rows that the command line leaves in results.csv; nothing in the committed folder changes."""
    before = {path: path.read_bytes() for path in (ROOT / "benchmarks").glob("*.csv")}
    main([name, "--small", "--rounds", "1", "--output", str(output), *more])
    assert before == {path: path.read_bytes() for path in (ROOT / "benchmarks").glob("*.csv")}
    kept = rows(output / "results.csv") if (output / "results.csv").exists() else []
    assert all(float(row["seconds"] or 1) > 0 and row["hardware"] for row in kept)
    return kept


@pytest.mark.slow
def test_first_calls_count_the_kernels_that_they_compile(tmp_path: Path) -> None:
    kept = {row["name"].removeprefix("loop, ordinal_loss, "): row for row in run("first_calls", tmp_path)}
    counts = {name: int(row["error"].removesuffix(" kernels compiled")) for name, row in kept.items()}
    assert counts == {"after the first step": 0, "compiling": 1, "compiled before": 0}
    assert float(kept["compiling"]["seconds"]) > float(kept["compiled before"]["seconds"])


@pytest.mark.slow
def test_token_loss_without_its_data(tmp_path: Path, no_data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    kept = run("token_loss", tmp_path)
    said = capsys.readouterr().out
    assert "token_loss without its data: labels follow a Zipf law. text/wikitext2-valid.txt is not here" in said
    assert "| N=" not in said, "tiny sizes get no verdict"
    assert {row["benchmark"] for row in kept} == {"token_loss", "token_loss memory", "token_loss gradient error"}
    errors = [float(row["error"]) for row in kept if row["error"] and "bf16" not in row["case"]]
    assert errors
    assert max(errors) < 1e-5, "every contestant computes what it is compared with"


def test_without_data_the_tracked_results_do_not_change(
    tmp_path: Path, no_data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, (_, otherwise) in INPUTS.items():
        assert with_inputs(Settings(output=FOLDER), name) == Settings(output=None)
        assert f"{name} without its data: {otherwise}, and benchmarks/ keeps nothing" in capsys.readouterr().out
        assert with_inputs(Settings(output=tmp_path), name) == Settings(output=tmp_path)
        assert f"{name} without its data: {otherwise}. " in capsys.readouterr().out
        with pytest.raises(SystemExit, match="--data typo lacks"):
            with_inputs(Settings(data=Path("typo")), name)
    assert with_inputs(Settings(output=FOLDER), "solvers") == Settings(output=FOLDER)
    assert capsys.readouterr().out == ""


@pytest.mark.slow
@pytest.mark.parametrize(("name", "most", "cases"), [
    ("barycenters", 1e-4, ""), ("many_problems", 1e-9, ""), ("scaling_clouds", 1e-9, "exact"),
    ("solvers", 2e-3, ("exact", "entropic", "line")),
])  # fmt: skip
def test_contestants_agree(name: str, most: float, cases: str | tuple[str, ...], tmp_path: Path) -> None:
    kept = [row for row in run(name, tmp_path) if row["case"].startswith(cases)]
    errors = [float(row["error"].split()[0]) for row in kept if row["error"]]
    assert errors
    assert max(errors) < most


def test_single_problems(tmp_path: Path) -> None:
    kept = run("single_problems", tmp_path)
    values = {
        row["case"]: [float(r["error"]) for r in kept if r["case"] == row["case"]] for row in kept if row["error"]
    }
    assert all(other == pytest.approx(ours, rel=1e-6) for ours, other in values.values()), "contestants agree"


@pytest.mark.slow
def test_scaling(tmp_path: Path) -> None:
    run("scaling", tmp_path)
    assert {row["axis"] for row in rows(tmp_path / "scaling.csv")} == {"N", "V", "u"}
    assert (tmp_path / "scaling.png").stat().st_size > 10_000


def test_references_of_hard_clouds_agree_with_ours() -> None:
    from benchmarks import hard_clouds, hard_kinds, hard_references

    for kind, penalty in (("clusters", None), ("weights", 1.0), ("heavy", None)):
        clouds = hard_kinds.Hard.of(kind, "2x24")
        expected = hard_references.reference(clouds, 0.2, penalty)
        assert expected.marginal_error < 1e-9
        values, gradient = hard_clouds._ours(clouds, 0.2, penalty)
        assert expected.value_error(values) < 1e-3, kind
        assert expected.gradient_error(gradient) < 1e-3, kind


@pytest.mark.slow
def test_gradients(tmp_path: Path) -> None:
    run("gradients", tmp_path)
    page = (tmp_path / "gradients.md").read_text(encoding="utf-8")
    assert "`otloss.emd`" in page
    assert "p **0.65**" in page, "POT's gradient at an empty bin is wrong"


@pytest.mark.slow
@needs_data
def test_numbers(tmp_path: Path) -> None:
    pytest.importorskip("ntloss")
    assert {row["benchmark"] for row in run("numbers", tmp_path)} == {"numbers", "numbers narrow", "numbers memory"}


def test_number_regression(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Every arm has a row for each decoding; measures follow from the library's distributions over numbers."""
    from benchmarks import number_regression as regression

    tiny = regression.Case("tiny", regression.synthetic(40), 2, 2)
    regression.run([tiny], Settings(small=True, output=tmp_path))
    assert "| number_token:1/shuffled |" in capsys.readouterr().out
    kept = rows(tmp_path / "number_regression.csv")
    assert {row["arm"] for row in kept} == set(regression.ARMS)
    gains = {row["decoding"]: row["gain"] for row in kept if (row["arm"], row["measure"]) == ("mle", "mae")}
    assert gains["greedy"] == "0"
    assert set(gains) == set(regression.DECODINGS)


@pytest.mark.slow
def test_objectives_of_large_models_run_dry_and_resume(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from benchmarks.objectives_large import LargeBench

    bench = LargeBench(tmp_path / "runs", tmp_path, small=True)
    bench.work(tmp_path)
    kept = rows(tmp_path / "objectives_large.csv")
    arms = {(row["experiment"], row["arm"]) for row in kept}
    assert arms == {
        (f"{name}{end}", arm) for name in ("512 texts", "students")
        for end, arm in (("", "mle"), ("", "emo"), (", dropout 0.1", "mle"))
    }  # fmt: skip
    assert all(float(row[name]) > 0 for row in kept for name in ("validation", "forward T=1", "reverse T=1", "MAUVE"))
    losses = {row["arm"]: row["forward T=1"] for row in kept if row["experiment"] == "students"}
    assert losses["mle"] != losses["emo"]
    assert bench.table().count("of 3 seeds") + bench.table().count("| - ") > 0
    job = next(bench.jobs())
    shutil.rmtree(bench.student(job))
    capsys.readouterr()
    bench.work(tmp_path)
    assert re.fullmatch(rf"{job.experiment.name}, {job.arm}, rate 1, seed 0: \d+ s\n", capsys.readouterr().out)
    assert rows(tmp_path / "objectives_large.csv") == kept, "the student that was lost alone is trained again"


def test_objectives_of_large_models_need_their_text(no_data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["objectives", "--scale", "large"])
    assert "objectives_large without its data: it is skipped" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        main(["numbers", "--scale", "large"])


@pytest.mark.slow
def test_transport_on_a_gpu_resumes_after_the_last_result(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also after a run that was killed within a row: what it has measured stays, the other contestants follow."""
    pytest.importorskip("triton")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setattr(gpu_transport, "DRY", gpu_transport.DRY[:1])
    gpu_transport.run(dry=True, rounds=1, output=tmp_path)
    file = tmp_path / "gpu_transport.csv"
    kept, text = rows(file), file.read_text(encoding="utf-8")
    mine = [gpu_transport.TRITON, gpu_transport.TORCH, gpu_transport.CPU]
    assert [row["name"] for row in kept] == [*mine, gpu_transport.FLASH, gpu_transport.FLASH_FLOAT32]
    assert all(float(row["value_error"]) < 1e-5 for row in kept[:3])
    file.write_text("".join(text.splitlines(keepends=True)[:3]), encoding="utf-8")
    monkeypatch.setattr(gpu_transport, "SECONDS", 0.0)
    gpu_transport.run(dry=True, rounds=1, output=tmp_path)
    assert "out of time" in capsys.readouterr().out
    assert rows(file) == kept[:2]
    monkeypatch.undo()
    monkeypatch.setattr(gpu_transport, "DRY", gpu_transport.DRY[:1])
    monkeypatch.setattr(gpu_transport.Worker, "ask", lambda *_, **__: {"note": "asked"})
    gpu_transport.run(dry=True, rounds=1, output=tmp_path)
    assert rows(file)[:2] == kept[:2]
    assert [(row["name"], row["note"]) for row in rows(file)[2:]] == [(row["name"], "asked") for row in kept[2:]]
    gpu_transport.run(dry=True, rounds=1, output=tmp_path)
    assert "measured before" in capsys.readouterr().out
    assert len(rows(file)) == len(kept)


@pytest.mark.slow
def test_a_contestant_that_hangs_or_dies_costs_its_own_result_only() -> None:
    worker = gpu_transport.Worker()
    try:
        assert worker.ask(math.sqrt, -1.0, limit=60.0)["note"].startswith("ValueError")
        assert worker.ask(time.sleep, 60.0, limit=0.1) == {"note": "ended after 0 s"}
        assert worker.ask(os._exit, 1, limit=60.0) == {"note": "the process died"}
    finally:
        worker.end()


# ---- verdicts and measures -------------------------------------------------------------------------------------------


def test_verdicts_name_the_median_and_its_noise() -> None:
    limit = Limit("time", 1.1)
    assert limit.verdict() == ["time", "<= 1.1", "not measured"]
    assert limit.verdict(1.1)[-1] == "1.100 met"
    assert limit.verdict(1.2, 1.3, 1.4)[-1] == "1.300 missed (1.250 to 1.350)"
    assert limit.verdict(1.0, 1.08, 1.3)[-1] == "1.080 met (1.040 to 1.190, within noise)"
    assert Limit("work", 4.0, at_least=True).verdict(2.0, 3.0, 5.0)[1:] == [">= 4", "3.000 missed (2.500 to 4.000)"]
    slow, fast, mine = Timing((4.0, 8.0)), Timing((2.0, 4.0)), Timing((3.0, 3.0))
    assert ratios(mine, slow, fast) == [1.5, 0.75], "round by round, over the fastest peer"


@pytest.mark.skipif(not memory.CLEAR.exists(), reason="reads /proc")
def test_peak_memory_includes_what_is_freed_again() -> None:
    # Pages of their own: the heap of the process may hold as much free memory from earlier tests.
    grown = memory.peak_growth(lambda: np.ndarray(2**23, buffer=mmap.mmap(-1, 2**26)).fill(1))
    assert 60 <= grown / 2**20 < 72


def test_every_contestant_solves_the_same_problem() -> None:
    """With enough iterations all gaps vanish, and no smaller number of iterations is accurate enough."""
    problems, epsilon, gap = Problems.random(2, 5), 0.1, 1e-5
    gaps = Gaps(problems, epsilon)
    peers = [*solver_peers.pot(problems, epsilon, gaps)[::3], solver_peers.geomloss_batch(problems, epsilon, gaps)]
    for contestant in (solver_peers.ours(problems, epsilon, gaps), *peers):
        result = solver_peers.cheapest(contestant, [gap], max_seconds=60.0)
        assert result.setting is not None, contestant.name
        assert result.errors[0] <= gap
        if contestant.name.startswith("POT"):
            assert contestant.errors(contestant.solve(result.setting - 1))[0] > gap


# ---- reports ---------------------------------------------------------------------------------------------------------


def test_reports_have_the_tables_of_their_csv_files(tmp_path: Path) -> None:
    assert reports.PAGE.read_text(encoding="utf-8") == reports.tables(), "python -m benchmarks.reports writes them"
    texts = [page.read_text(encoding="utf-8") for page in reports.REPORTS.glob("*.md")]
    included = [name for text in texts for name in re.findall(r":start-after: <!-- table (\w+) -->", text)]
    assert sorted(included) == sorted(reports.TABLES)
    reports.draw_gains(tmp_path / "evidence.png")
    reports.draw_demo(tmp_path / "demo_gains.png")
