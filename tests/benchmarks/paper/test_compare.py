"""Comparisons: the same start and batches for every arm, results kept and read again, failures of single runs."""

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.paper.compare import Arm, parse_arm
from benchmarks.paper.data.blocks import PackedBlocks, split_blocks
from benchmarks.paper.evaluation.mauve import mauve, text_features
from benchmarks.paper.evaluation.overlap import rouge
from benchmarks.paper.models import load_model, load_tokenizer
from tests.benchmarks.paper.conftest import compare_options
from tests.errors import raising
from tests.otloss_llm.conftest import BLOCK, Cli, Tiny, read


@pytest.mark.parametrize(
    ("text", "arm", "name"),
    [
        (" EMO ", Arm("emo"), "emo"),
        ("gem:0.7+smoothing:0.1/T=0.8", Arm("gem:0.7+smoothing:0.1", temperature=0.8), "gem:0.7+smoothing:0.1/T=0.8"),
        ("mixce:0.8/T=0.70", Arm("mixce:0.8", temperature=0.7), "mixce:0.8/T=0.7"),
        ("emo/T=1.5/random", Arm("emo", "random", 1.5), "emo/random/T=1.5"),
        ("Number_Token:0.5/symlog", Arm("number_token:0.5"), "number_token:0.5"),
        ("emo+number/log/random", Arm("emo+number", "random", scaling="log"), "emo+number/random/log"),
        ("number_token/shuffled", Arm("number_token", control="shuffled"), "number_token/shuffled"),
        ("number_token/shuffled-values", Arm("number_token", control="shuffled"), "number_token/shuffled"),
        ("number_token/log/equal", Arm("number_token", scaling="log", control="equal"), "number_token/equal/log"),
        ("emo+number/shuffled-values", Arm("emo+number", control="shuffled"), "emo+number/shuffled-values"),
    ],
)
def test_arms_are_read_from_their_names(text: str, arm: Arm, name: str) -> None:
    assert parse_arm(text) == arm
    assert arm.name == name
    assert parse_arm(name) == arm


test_invalid_arms_raise = raising(
    ("tailr:7", "objective|gamma"),
    ("emo/T=-1", "'T=-1' is unknown; expected objective"),
    ("mle/random", "'random' is an embedding, and mle uses no cost"),
    ("emo/log", "'log' is a distance of numbers, which only number_token"),
    ("emo/equal", "'equal' is a control of numbers, which only number_token"),
    ("expected_value/shuffled-values", "'shuffled-values' is a control of numbers"),
    ("number_token/random", "'random' is an embedding, and number_token uses no embedding"),
    call=parse_arm,
)


def runs_of(folder: Path, arm: str) -> list[dict[str, Any]]:
    """The runs of an arm in the report, without its name."""
    actual = [run for run in read(folder / "report.json")["runs"] if run["arm"] == arm]
    drop = ("arm", "training", "objective", "seconds_per_step")
    return [{key: value for key, value in run.items() if key not in drop} for run in actual]


@pytest.fixture(scope="module")
def compared(tiny: Tiny, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A comparison of everything, made once."""
    from benchmarks.paper.command import main

    folder = tmp_path_factory.mktemp("compared")
    arms = ["mle", "mixce:1.0", "emo", "emo/random", "emo/shuffled", "mle/T=0.5"]
    given = {"max_steps": 3, "samples_per_prompt": 2, "metrics": ["mauve", "rouge"]}
    assert main(compare_options(tiny, folder, objectives=arms, **given)) == 0
    return folder


def test_arms_of_one_seed_see_the_same_batches_and_dropout(compared: Path) -> None:
    assert runs_of(compared, "mle") == runs_of(compared, "mixce:1.0")  # which is MLE by another way
    weights = [(compared / f"{name}-seed1/model.safetensors").read_bytes() for name in ("mle", "mixce-1.0", "emo")]
    assert weights[0] == weights[1] != weights[2]
    assert len({run["test_nll"] for run in runs_of(compared, "mle")}) == 2  # one for each seed
    costs = {name: runs_of(compared, name)[0]["transport_cost"] for name in ("emo", "emo/random", "emo/shuffled")}
    assert len(set(costs.values())) == 3
    assert not list(compared.glob("*T=*"))  # temperatures share a training


def test_every_figure_of_an_arm_is_at_its_own_temperature(compared: Path, tiny: Tiny) -> None:
    blocks = PackedBlocks.from_texts([tiny.text.read_text(encoding="utf-8")], load_tokenizer(str(tiny.llama)), BLOCK)
    test = split_blocks(blocks, validation_fraction=0.05, test_fraction=0.05)[2]
    ids, model = test.ids.long(), load_model(str(compared / "mle-seed0")).double()
    with torch.no_grad():
        logits = model(input_ids=ids[:, :-1]).logits
    for arm, temperature in (("mle", 1.0), ("mle/T=0.5", 0.5)):
        log_q = torch.log_softmax(logits / temperature, dim=-1)
        expected = -log_q.gather(2, ids[:, 1:, None]).mean()
        assert runs_of(compared, arm)[0]["test_nll"] == pytest.approx(float(expected), rel=1e-5)
    mle, cooler = runs_of(compared, "mle")[0], runs_of(compared, "mle/T=0.5")[0]
    of_the_distribution = ("transport_cost", "number_token_log_error", "number_token_mass", "judge_perplexity")
    assert all(mle[key] != cooler[key] for key in of_the_distribution)
    # The likeliest token does not depend on the temperature.
    assert mle["number_token_accuracy"] == cooler["number_token_accuracy"]


def test_mauve_and_rouge_are_those_of_the_samples(compared: Path, tiny: Tiny) -> None:
    report = read(compared / "report.json")
    real, run = report["reference"]["samples"], next(run for run in report["runs"] if run["arm"] == "mle/T=0.5")
    assert (run["rouge_1"], run["rouge_l"]) == pytest.approx(rouge(run["samples"], np.repeat(real, 2).tolist()))
    judge, tokenizer = load_model(str(tiny.gpt2)), load_tokenizer(str(tiny.gpt2))
    expected = mauve(*(text_features(judge, tokenizer, texts) for texts in (real, run["samples"])))
    assert (run["mauve"], run["mauve_std"]) == pytest.approx((expected.mean, expected.std), rel=1e-6)


@pytest.mark.slow
def test_arms_and_seeds_can_be_added(cli: Cli, tiny: Tiny, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    assert cli(*compare_options(tiny, folder, objectives=["mle"], seeds=[0])).code == 0
    first = runs_of(folder, "mle")
    kept = {path: path.stat().st_mtime_ns for path in folder.glob("mle-seed0/**/*") if path.is_file()}
    more = cli(*compare_options(tiny, folder, objectives=["mle", "gem+z_loss:0.01", "mle/T=2"], seeds=[0, 5]))
    assert more.code == 0
    assert runs_of(folder, "mle")[0] == first[0]
    assert [run["seed"] for run in runs_of(folder, "gem+z_loss:0.01")] == [0, 5]
    assert all(path.stat().st_mtime_ns == written for path, written in kept.items())
    assert "| gem+z_loss:0.01 |" in more.out
    error = cli(*compare_options(tiny, folder, learning_rate=1e-4, objectives=["tailr:0.5", "mle"])).error
    assert "learning_rate: 0.003 there, 0.0001 asked for" in error
    assert not list(folder.glob("tailr*"))


@pytest.mark.slow
def test_a_failed_arm_is_reported_and_the_others_continue(cli: Cli, tiny: Tiny, tmp_path: Path) -> None:
    """One folder of a run holds another one's files."""
    arms, notes = ["emo", "emo/T=0.5", "mle"], tmp_path / "run/emo-seed1/notes.md"
    assert cli(*compare_options(tiny, tmp_path / "run", objectives=["mle"], seeds=[0])).code == 0
    notes.parent.mkdir()
    notes.touch()
    ended = cli(*compare_options(tiny, tmp_path / "run", objectives=arms))
    assert ended.code == 1
    assert "- failed: emo, seed 1: ValueError: " in ended.out
    report = read(tmp_path / "run/report.json")
    assert [(run["arm"], run["seed"]) for run in report["failures"]] == [("emo", 1), ("emo/T=0.5", 1)]
    assert len(report["runs"]) == 4
    notes.unlink()
    again = cli(*compare_options(tiny, tmp_path / "run", objectives=arms))
    assert again.code == 0
    assert "failed" not in again.out


@pytest.mark.slow
def test_another_judge_under_the_same_path_raises(cli: Cli, tiny: Tiny, tmp_path: Path) -> None:
    judge = shutil.copytree(tiny.gpt2, tmp_path / "judge")
    asked = compare_options(tiny, tmp_path / "run", judge=judge, objectives=["mle"], seeds=[0])
    assert cli(*asked).code == 0
    other = load_model(str(judge))
    with torch.no_grad():
        next(other.parameters()).mul_(2.0)
    other.save_pretrained(judge)
    assert "judge_fingerprint" in cli(*asked).error
