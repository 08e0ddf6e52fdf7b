"""The table of a comparison: means over seeds, and paired differences with their interval."""

import runpy
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

pytest.importorskip("matplotlib")

SCRIPT = runpy.run_path(str(Path(__file__).parents[2] / "examples/compare_objectives.py"))
MAIN = SCRIPT["main"]


def test_differences_are_paired_by_seed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    nll = {("mle", 0): 2.0, ("mle", 1): 3.0, ("emo --learning_rate 1e-4", 0): 2.1, ("emo --learning_rate 1e-4", 1): 2.9}
    asked = []

    def train(arm: str, seed: int, output: Path, shared: list[str]) -> dict[str, float]:
        asked.append(shared)
        # The cost is another one in each arm.
        return {"eval_nll": nll[arm, seed], "eval_mean_token_accuracy": 0.5, "eval_transport_cost": 0.1 * len(arm)}

    monkeypatch.setitem(MAIN.__globals__, "train", train)
    arms = ["mle", "emo --learning_rate 1e-4"]
    MAIN(["--arms", *arms, "--seeds", "0", "1", "--output", str(tmp_path / "out"), "--max_steps", "3"])
    assert asked == 4 * [["--max_steps", "3"]]
    lines = capsys.readouterr().out.splitlines()
    half = stats.t.interval(0.95, 1, scale=stats.sem([0.1, -0.1]))[1]
    assert lines[0] == "| arm | nll, nats per token | right tokens | nll minus the first arm's |"
    assert lines[2] == "| mle | 2.5000 | 0.5000 |  |"
    assert lines[3] == f"| emo --learning_rate 1e-4 | 2.5000 | 0.5000 | {np.mean([0.1, -0.1]):+.4f} ± {half:.4f} |"
    assert (tmp_path / "out/compare.png").stat().st_size > 5_000
    assert "compare.png" in (tmp_path / "out/report.md").read_text(encoding="utf-8")


@pytest.mark.slow
def test_a_run_that_fails_ends_the_comparison(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        MAIN(["--arms", "emmo", "--seeds", "0", "--output", str(tmp_path)])
    assert "error: " in capfd.readouterr().err
