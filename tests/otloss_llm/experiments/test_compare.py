"""Comparisons: one start and the same batches for every arm, work done once, and failures that stay alone."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from otloss_llm.experiments import compare, measuring
from otloss_llm.experiments.compare import HUMAN, START, Arm, parse_arm
from otloss_llm.training.loading import load_blocks, load_model, load_tokenizer
from otloss_llm.training.runs import DivergenceError
from tests.otloss_llm.conftest import (
    BLOCK,
    Cli,
    Tiny,
    compare_options,
    module_command,
    read,
    without_wall_times,
)
from tests.otloss_llm.training.test_runs import interrupt_at, wait_for


@pytest.mark.parametrize(
    ("text", "arm", "name"),
    [
        ("mle", Arm("mle"), "mle"),
        (" EMO ", Arm("emo"), "emo"),
        ("emo/model", Arm("emo"), "emo"),
        ("emo:transport/shuffled", Arm("emo:transport", "shuffled"), "emo:transport/shuffled"),
        ("mixce:0.8/T=0.70", Arm("mixce:0.8", temperature=0.7), "mixce:0.8/T=0.7"),
        ("emo/T=1.5/random", Arm("emo", "random", 1.5), "emo/random/T=1.5"),
        ("mle/T=1", Arm("mle"), "mle"),
    ],
)
def test_arms_are_read_from_their_names(text: str, arm: Arm, name: str) -> None:
    assert parse_arm(text) == arm
    assert arm.name == name
    assert parse_arm(name) == arm


@pytest.mark.parametrize("text", ["", "mle/random", "emo/T=", "emo/T=-1", "emo/T=inf", "emo/nan", "emo/", "tailr:7"])
def test_arms_that_are_none(text: str) -> None:
    with pytest.raises(ValueError, match=r"arm|objective"):
        parse_arm(text)


def runs_of(folder: Path, arm: str) -> list[dict[str, Any]]:
    """The runs of an arm in the report, without its name."""
    found = [run for run in read(folder / "report.json")["runs"] if run["arm"] == arm]
    drop = ("arm", "training", "objective", "seconds_per_step")
    return [{key: value for key, value in run.items() if key not in drop} for run in found]


@pytest.fixture(scope="module")
def compared(tiny: Tiny, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A comparison of everything, made once."""
    from otloss_llm.cli import main

    folder = tmp_path_factory.mktemp("compared")
    arms = ["mle", "mixce:1.0", "emo", "emo/random", "emo/shuffled", "mle/T=0.5"]
    assert main(compare_options(tiny, folder, objectives=arms, samples_per_prompt=2)) == 0
    return folder


def test_arms_of_one_seed_see_the_same_batches_and_dropout(compared: Path) -> None:
    assert runs_of(compared, "mle") == runs_of(compared, "mixce:1.0")  # which is MLE by another way
    weights = [(compared / f"{name}-seed1/model.safetensors").read_bytes() for name in ("mle", "mixce-1.0", "emo")]
    assert weights[0] == weights[1] != weights[2]


def test_seeds_embeddings_and_temperatures_make_a_difference(compared: Path) -> None:
    mle, other = runs_of(compared, "mle")
    assert mle["test_nll"] != other["test_nll"]
    costs = {name: runs_of(compared, name)[0]["transport_cost"] for name in ("emo", "emo/random", "emo/shuffled")}
    assert len(set(costs.values())) == 3
    cooler = runs_of(compared, "mle/T=0.5")[0]
    assert cooler["samples"] != mle["samples"]
    assert not list(compared.glob("*T=*"))  # temperatures share a training


def test_every_figure_of_an_arm_is_at_its_own_temperature(compared: Path, tiny: Tiny) -> None:
    _, _, test = load_blocks(
        load_tokenizer(str(tiny.llama)), train=str(tiny.text), validation=None, test=None, block_size=BLOCK,
        validation_fraction=0.05, test_fraction=0.05,
    )  # fmt: skip
    assert test is not None
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
    assert mle["number_token_accuracy"] == cooler["number_token_accuracy"]  # that of the likeliest token


def test_table_holds_means_and_standard_deviations(compared: Path) -> None:
    report = read(compared / "report.json")
    table = (compared / "report.md").read_text(encoding="utf-8")
    rows = {line.split("|")[1].strip(): line.split("|")[2:] for line in table.splitlines() if line.startswith("| ")}
    assert list(rows) == ["arm", START, *dict.fromkeys(run["arm"] for run in report["runs"]), HUMAN]
    for column, key, digits in ((0, "test_perplexity", 2), (1, "judge_perplexity", 2), (2, "transport_cost", 4)):
        values = [run[key] for run in report["runs"] if run["arm"] == "emo"]
        expected = f"{np.mean(values):.{digits}f} ± {np.std(values, ddof=1):.{digits}f}"
        assert rows["emo"][column].strip() == expected
    assert rows[START][0].strip() == f"{report['start']['test_perplexity']:.2f}"
    assert rows[HUMAN][1].strip() == f"{report['reference']['judge_perplexity']:.2f}"


def test_report_says_what_it_was_made_with(compared: Path, tiny: Tiny) -> None:
    report = read(compared / "report.json")
    assert report["environment"].keys() >= {
        "otloss",
        "torch",
        "transformers",
        "python",
        "platform",
        "threads",
        "device",
    }
    assert report["settings"]["training"]["learning_rate"] == 3e-3
    assert report["settings"]["judge"] == str(tiny.gpt2)
    assert report["settings"].keys() >= {"start_fingerprint", "train_blocks", "test_blocks", "max_new_tokens"}
    assert report["failures"] == []
    assert {len(run["samples"]) for run in report["runs"]} == {10}
    assert {name for name in ("report.md", "samples.md") if (compared / name).is_file()} == {"report.md", "samples.md"}


def test_arms_and_seeds_can_be_added(cli: Cli, tiny: Tiny, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    assert cli(*compare_options(tiny, folder, objectives=["mle"], seeds=[0])).code == 0
    first = runs_of(folder, "mle")
    kept = {path: path.stat().st_mtime_ns for path in folder.glob("mle-seed0/**/*") if path.is_file()}
    more = cli(*compare_options(tiny, folder, objectives=["mle", "emo", "mle/T=2"], seeds=[0, 5]))
    assert more.code == 0
    assert runs_of(folder, "mle")[0] == first[0]
    assert [run["seed"] for run in runs_of(folder, "emo")] == [0, 5]
    assert all(path.stat().st_mtime_ns == written for path, written in kept.items())
    assert "| emo |" in more.out
    error = cli(*compare_options(tiny, folder, learning_rate=1e-4, objectives=["tailr:0.5", "mle"])).error
    assert "learning_rate: 0.003 there, 0.0001 asked for" in error
    assert not list(folder.glob("tailr*"))


@pytest.mark.parametrize("moment", ["training", "sampling", "judging"])
def test_an_interrupted_comparison_ends_like_an_unbroken_one(
    cli: Cli, tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    """Stopped in its third training of four, or after that."""
    unbroken, broken = tmp_path / "unbroken", tmp_path / "broken"
    assert cli(*compare_options(tiny, unbroken)).code == 0
    calls = iter(range(100))
    with monkeypatch.context() as patch:
        if moment == "training":
            train = compare.train_run

            def third(*args: Any, **kwargs: Any) -> Any:
                if next(calls) == 2:
                    interrupt_at(4, patch)
                return train(*args, **kwargs)

            patch.setattr(compare, "train_run", third)
        else:
            name, after = {"sampling": ("sample_texts", 3), "judging": ("score_texts", 4)}[moment]
            work = getattr(measuring, name)

            def late(*args: Any, **kwargs: Any) -> Any:
                if next(calls) == after:
                    raise KeyboardInterrupt
                return work(*args, **kwargs)

            patch.setattr(measuring, name, late)
        assert cli(*compare_options(tiny, broken)).code == 130
    assert (broken / "mle-seed0/results.json").exists()
    done = (broken / "mle-seed0/model.safetensors").stat().st_mtime_ns
    assert cli(*compare_options(tiny, broken)).code == 0
    assert (broken / "mle-seed0/model.safetensors").stat().st_mtime_ns == done
    assert comparable(unbroken) == comparable(broken)


def test_killed_between_the_last_step_and_its_results(cli: Cli, compared: Path, tiny: Tiny, tmp_path: Path) -> None:
    """Nothing is left to train then, only to evaluate."""
    folder = shutil.copytree(compared, tmp_path / "copy")
    for name in ("results.json", "log.json", "test.json"):
        (folder / "mle-seed1" / name).unlink()
    assert cli(*compare_options(tiny, folder, objectives=["mle"], samples_per_prompt=2)).code == 0
    assert runs_of(folder, "mle") == runs_of(compared, "mle")


def comparable(folder: Path) -> Any:
    """The report without wall times and without the name of its own folder."""
    report = without_wall_times(read(folder / "report.json"))
    return report | {"settings": {k: v for k, v in report["settings"].items() if k != "training"}}


@pytest.mark.slow
@pytest.mark.parametrize("file", ["emo-seed0/checkpoint-60/trainer_state.json", "mle-seed1/test.json"])
def test_kill_9(tiny: Tiny, tmp_path: Path, file: str) -> None:
    """In the middle of a training, and after results exist."""
    unbroken, broken = tmp_path / "unbroken", tmp_path / "broken"

    def start(folder: Path) -> subprocess.Popen[bytes]:
        command = module_command(*compare_options(tiny, folder, max_steps=90, save_steps=30))
        with (tmp_path / f"{folder.name}.err").open("ab") as log:
            environment = os.environ | {"OMP_NUM_THREADS": "1"}
            return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=log, env=environment)

    victim = start(broken)
    wait_for((broken / file).exists, victim)
    time.sleep(0.03)
    victim.send_signal(signal.SIGKILL)
    assert victim.wait(10) == -signal.SIGKILL
    assert not (broken / "report.json").exists()
    for folder in (broken, unbroken):
        assert start(folder).wait(200) == 0, (tmp_path / f"{folder.name}.err").read_text()
    assert comparable(unbroken) == comparable(broken)


def test_a_failing_arm_takes_no_other_with_it(
    cli: Cli, tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train = compare.train_run
    tried = []

    def fragile(*args: Any, **kwargs: Any) -> Any:
        tried.append(kwargs["bar"])
        if kwargs["bar"] == "emo seed 1":
            raise DivergenceError("training diverged by step 3: nll is nan; lower the learning rate.")
        return train(*args, **kwargs)

    arms = ["emo", "emo/T=0.5", "mle"]
    with monkeypatch.context() as patch:
        patch.setattr(compare, "train_run", fragile)
        ended = cli(*compare_options(tiny, tmp_path / "run", objectives=arms))
    assert ended.code == 1
    assert tried.count("emo seed 1") == 1  # not again for the other temperature
    assert "- failed: emo, seed 1: DivergenceError: training diverged by step 3" in ended.out
    report = read(tmp_path / "run/report.json")
    assert [(run["arm"], run["seed"]) for run in report["failures"]] == [("emo", 1), ("emo/T=0.5", 1)]
    assert len(report["runs"]) == 4
    assert "failed: emo, seed 1" in (tmp_path / "run/report.md").read_text(encoding="utf-8")
    mended = cli(*compare_options(tiny, tmp_path / "run", objectives=arms))
    assert mended.code == 0
    assert "failed" not in mended.out


def test_a_comparison_whose_every_arm_fails_says_why(cli: Cli, tiny: Tiny, tmp_path: Path) -> None:
    wild = {"learning_rate": 1e30, "max_grad_norm": 0, "objectives": ["mle"]}
    assert "diverged" in cli(*compare_options(tiny, tmp_path / "run", **wild)).error


def test_without_judge_and_with_samples_too_short_to_measure(cli: Cli, tiny: Tiny, tmp_path: Path) -> None:
    given = [value for value in compare_options(tiny, tmp_path / "run", max_new_tokens=1, seeds=[0])]
    at = given.index("--judge")
    ended = cli(*given[:at], *given[at + 2 :])
    assert ended.code == 0
    assert "judge" not in ended.out
    assert "distinct" not in ended.out
    assert "±" not in ended.out  # one seed has no spread


def test_best_checkpoint_per_epoch(cli: Cli, tiny: Tiny, tmp_path: Path) -> None:
    every = {"eval_strategy": "epoch", "save_strategy": "epoch", "max_steps": -1, "num_train_epochs": 2}
    options = compare_options(
        tiny, tmp_path / "run", seeds=[0], objectives=["emo"], load_best_model_at_end=True, **every
    )
    assert cli(*options).code == 0
    log = read(tmp_path / "run/emo-seed0/log.json")
    assert len([entry for entry in log if "eval_nll" in entry]) == 3


def test_another_judge_under_the_same_path_is_refused(cli: Cli, tiny: Tiny, tmp_path: Path) -> None:
    judge = tmp_path / "judge"
    shutil.copytree(tiny.gpt2, judge)
    asked = compare_options(tiny, tmp_path / "run", judge=judge, objectives=["mle"], seeds=[0])
    assert cli(*asked).code == 0
    other = load_model(str(judge))
    with torch.no_grad():
        next(other.parameters()).mul_(2.0)
    other.save_pretrained(judge)
    done = cli(*asked)
    assert done.code == 2
    assert "judge_fingerprint" in done.error


def test_arms_that_the_new_report_leaves_out_are_named(cli: Cli, tiny: Tiny, tmp_path: Path) -> None:
    for objectives in (["mle"], ["mixce:1.0"]):
        done = cli(*compare_options(tiny, tmp_path / "run", objectives=objectives, seeds=[0]))
        assert done.code == 0
    assert "left out of the new report: mle" in done.err
