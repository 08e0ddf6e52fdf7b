"""Run folders, and that an interrupted run resumes to the result of an uninterrupted one."""

import itertools
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from otloss_llm.models.loading import load_model, load_tokenizer
from otloss_llm.training.folders import last_complete_checkpoint, open_run, write_json
from tests.otloss_llm.conftest import Cli, Tiny, read, train_options, without_wall_times


def assert_same_run(first: Path, second: Path) -> None:
    """Byte-equal weights, and the same log and results but for wall times."""
    assert (first / "model.safetensors").read_bytes() == (second / "model.safetensors").read_bytes()
    for name in ("log.json", "results.json"):
        assert without_wall_times(read(first / name)) == without_wall_times(read(second / name)), name


# ---- folders ----------------------------------------------------------------------------------------------------


def test_only_the_same_settings_open_a_folder(tmp_path: Path) -> None:
    folder = tmp_path / "deep/run"
    assert open_run(folder, {"a": 1, "b": 2}) is None
    write_json(folder / "log.json", [])
    assert open_run(folder, {"b": 2, "a": 1}) is None
    with pytest.raises(ValueError, match=r"holds another run \(b: 2 there, 3 asked for\)"):
        open_run(folder, {"a": 1, "b": 3})
    write_json(folder / "results.json", {"steps": 7})
    assert open_run(folder, {"a": 1, "b": 2}) == {"steps": 7}


def test_a_folder_without_results_counts_as_new(tmp_path: Path) -> None:
    (tmp_path / "run.json.partial-123").write_text("{", encoding="utf-8")  # killed before the settings were written
    open_run(tmp_path, {"a": 1})
    (tmp_path / "results.json.partial-123").write_text("{", encoding="utf-8")  # killed while writing
    (tmp_path / "checkpoint-5").mkdir()  # likewise
    assert open_run(tmp_path, {"a": 2}) is None
    assert read(tmp_path / "run.json") == {"a": 2}
    write_json(tmp_path / "log.json", [])
    (tmp_path / "run.json").write_text("{", encoding="utf-8")
    with pytest.raises(ValueError, match=r"run\.json is damaged"):
        open_run(tmp_path, {"a": 2})


def test_one_process_at_a_time_works_in_a_folder(cli: Cli, tiny: Tiny, tmp_path: Path) -> None:
    """Another process holds the lock, and loses it when it is killed."""
    code = (
        "import sys, time; from pathlib import Path; from otloss_llm.training.folders import locked\n"
        "with locked(Path(sys.argv[1])): print('held', flush=True); time.sleep(600)"
    )
    with subprocess.Popen([sys.executable, "-c", code, str(tmp_path / "run")], stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"held\n"
        said = f"another process is working in {tmp_path / 'run'}; wait until it has ended"
        assert said in cli(*train_options(tiny, tmp_path / "run")).error
        assert [path.name for path in (tmp_path / "run").iterdir()] == [".lock"]
        holder.kill()
    assert cli(*train_options(tiny, tmp_path / "run", max_steps=4)).code == 0


def test_last_complete_checkpoint(tmp_path: Path) -> None:
    assert last_complete_checkpoint(tmp_path) is None
    for step, state in ((9, "{}"), (10, "{}"), (100, '{"torn'), (101, None)):
        (tmp_path / f"checkpoint-{step}").mkdir()
        if state is not None:
            (tmp_path / f"checkpoint-{step}/trainer_state.json").write_text(state, encoding="utf-8")
    assert last_complete_checkpoint(tmp_path) == str(tmp_path / "checkpoint-10")


def test_another_setting_and_another_start_under_the_same_name_are_another_run(
    cli: Cli, tiny: Tiny, tmp_path: Path
) -> None:
    start = shutil.copytree(tiny.llama, tmp_path / "start")
    given: dict[str, Any] = {"model_name_or_path": start, "max_steps": 1}
    cli(*train_options(tiny, tmp_path / "run", **given))
    # The lock's own time changes: older versions of filelock truncate the file.
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("[!.]*") if path.is_file()}
    changes = {"learning_rate": 1e-3, "objective": "mle", "block_size": 20, "cost_embedding": "shuffled"}
    error = cli(*train_options(tiny, tmp_path / "run", **given | changes)).error
    assert all(f"{name}: " in error for name in ("learning_rate", "objective", "train_blocks"))
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("[!.]*") if path.is_file()} == before
    model = load_model(str(start))
    with torch.no_grad():
        model.get_output_embeddings().weight[5] += 1e-3
    model.save_pretrained(start)
    assert "model_fingerprint" in cli(*train_options(tiny, tmp_path / "run", **given)).error


# ---- resuming ----------------------------------------------------------------------------------------------------


@contextmanager
def interrupted_at(step: int) -> Iterator[None]:
    """Ctrl-C in the middle of an optimizer's step, the first of which is 1."""
    steps = itertools.count(1)

    def stop(*_: Any) -> None:
        if next(steps) == step:
            raise KeyboardInterrupt

    hook = register_optimizer_step_pre_hook(stop)
    try:
        yield
    finally:
        hook.remove()


@pytest.mark.parametrize(
    ("changes", "torn", "resumed"),
    [
        ({}, False, "8"),
        ({"gradient_accumulation_steps": 2, "max_steps": -1, "num_train_epochs": 1}, True, "4"),
        ({"save_only_model": True}, False, None),  # a checkpoint without the optimizer's state: starts again
    ],
)
def test_an_interrupted_run_ends_like_an_uninterrupted_one(
    cli: Cli,
    tiny: Tiny,
    tmp_path: Path,
    torn: bool,
    changes: dict[str, Any],
    resumed: str | None,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """With dropout, and EMO, whose cost is that of the start model though the weights are a checkpoint's."""
    uninterrupted, broken = tmp_path / "uninterrupted", tmp_path / "broken"
    assert cli(*train_options(tiny, uninterrupted, **changes)).code == 0
    with interrupted_at(11):
        ended = cli(*train_options(tiny, broken, **changes))
    assert ended.code == 130
    assert "interrupted" in ended.err
    assert not (broken / "results.json").exists()
    assert last_complete_checkpoint(broken) == str(broken / "checkpoint-8")
    if torn:
        (broken / "checkpoint-8/trainer_state.json").unlink()
    assert cli(*train_options(tiny, broken, **changes)).code == 0
    steps = re.findall(r"resumes after step (\d+)", caplog.text)
    assert steps == ([] if resumed is None else [resumed])
    assert_same_run(uninterrupted, broken)


def test_killed_between_the_last_checkpoint_and_the_results(cli: Cli, tiny: Tiny, tmp_path: Path) -> None:
    """What is there then: no results, which are written last. The best checkpoint is chosen again."""
    # A constant learning rate, under which one step too many would show.
    changes: dict[str, Any] = {"lr_scheduler_type": "constant", "eval_strategy": "steps", "eval_steps": 4}
    # What it learns of one text makes the other ever less likely: the last checkpoint is not the best.
    for name, word in (("train_text", "ab "), ("validation_text", "xyz! ")):
        changes[name] = tmp_path / f"{name}.txt"
        changes[name].write_text(word * 1500, encoding="utf-8")
    changes["load_best_model_at_end"] = True
    cli(*train_options(tiny, tmp_path / "uninterrupted", **changes))
    written = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "uninterrupted").iterdir() if path.is_file()}
    assert written.pop("results.json") >= max(time for name, time in written.items() if name[0] != ".")
    *_, last, taken = [e["eval_nll"] for e in read(tmp_path / "uninterrupted/log.json") if "eval_nll" in e]
    assert taken < last
    shutil.copytree(tmp_path / "uninterrupted", tmp_path / "broken")
    for name in ("results.json", "log.json", "model.safetensors"):
        (tmp_path / "broken" / name).unlink()
    assert cli(*train_options(tiny, tmp_path / "broken", **changes)).code == 0
    assert_same_run(tmp_path / "uninterrupted", tmp_path / "broken")


def test_a_frozen_adapter_raises_before_anything_is_written(cli: Cli, tiny: Tiny, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    model = peft.get_peft_model(load_model(str(tiny.llama)), peft.LoraConfig(target_modules=["q_proj"]))
    model.save_pretrained(tmp_path / "adapter")
    load_tokenizer(str(tiny.llama)).save_pretrained(tmp_path / "adapter")
    done = cli(*train_options(tiny, tmp_path / "run", model_name_or_path=tmp_path / "adapter"))
    assert done.code == 2
    assert "merge_and_unload" in done.error
    assert not (tmp_path / "run").exists()
