"""Run folders, and that an interrupted run resumes to the result of an uninterrupted one."""

import itertools
from pathlib import Path
from typing import Any

import pytest
from torch.optim.optimizer import register_optimizer_step_pre_hook

from benchmarks.paper.arguments import RunArguments
from benchmarks.paper.data.blocks import PackedBlocks
from benchmarks.paper.data.text import read_texts
from benchmarks.paper.folders import last_complete_checkpoint, locked, open_run, write_json
from benchmarks.paper.models import load_model, load_tokenizer
from benchmarks.paper.runs import DivergenceError, train_run
from otloss_llm import EMO
from otloss_llm.costs.named import load_cost
from tests.otloss_llm.conftest import BLOCK, Tiny, read, without_wall_times


def train(tiny: Tiny, folder: Path, **changes: Any) -> dict[str, Any]:
    """Six steps with dropout, a checkpoint after each two, and EMO, whose cost is of the start."""
    settings: dict[str, Any] = {
        "max_steps": 6, "save_steps": 2, "logging_steps": 3, "learning_rate": 3e-3, "per_device_train_batch_size": 4,
        "use_cpu": True, "disable_tqdm": True,
    }  # fmt: skip
    model, tokenizer = load_model(str(tiny.llama)), load_tokenizer(str(tiny.llama))
    rows = PackedBlocks.from_texts(read_texts(tiny.text), tokenizer, BLOCK, progress=False)
    args = RunArguments(output_dir=str(folder), **settings | changes)
    return train_run(
        model,
        tokenizer,
        rows,
        args=args,
        objective=EMO(),
        cost=load_cost("all-but-the-top", model),
        settings={},
        bar="run",
    )


@pytest.mark.slow
def test_an_interrupted_run_ends_like_an_uninterrupted_one(tiny: Tiny, tmp_path: Path) -> None:
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    train(tiny, whole)
    steps = itertools.count(1)

    def stop(*_: Any) -> None:  # in the middle of step 5
        if next(steps) == 5:
            raise KeyboardInterrupt

    hook = register_optimizer_step_pre_hook(stop)
    with pytest.raises(KeyboardInterrupt):
        train(tiny, broken)
    hook.remove()
    assert last_complete_checkpoint(broken) == str(broken / "checkpoint-4")
    for missing in ((), ("results.json", "log.json", "model.safetensors")):  # then: only the last checkpoint is there
        for name in missing:
            (broken / name).unlink()
        train(tiny, broken)
        assert (whole / "model.safetensors").read_bytes() == (broken / "model.safetensors").read_bytes()
        for name in ("log.json", "results.json"):
            assert without_wall_times(read(whole / name)) == without_wall_times(read(broken / name)), name
    with pytest.raises(ValueError, match=r"holds another run \(learning_rate: 0.003 there, 0.1 asked for\)"):
        train(tiny, whole, learning_rate=0.1)


def test_divergence_is_named(tiny: Tiny, tmp_path: Path) -> None:
    with pytest.raises(DivergenceError, match=r"diverged .* lower the learning rate"):
        train(tiny, tmp_path, learning_rate=1e30, max_grad_norm=0)
    assert not (tmp_path / "results.json").exists()


def test_a_folder_without_results_counts_as_new(tmp_path: Path) -> None:
    open_run(tmp_path, {"a": 1})
    (tmp_path / "results.json.partial-123").write_text("{", encoding="utf-8")  # killed while writing
    (tmp_path / "checkpoint-5").mkdir()  # killed after its first checkpoint
    assert open_run(tmp_path, {"a": 2}) is None
    assert read(tmp_path / "run.json") == {"a": 2}
    write_json(tmp_path / "results.json", {"steps": 7})
    assert open_run(tmp_path, {"a": 2}) == {"steps": 7}
    (tmp_path / "run.json").write_text("{", encoding="utf-8")
    with pytest.raises(ValueError, match=r"run\.json is damaged"):
        open_run(tmp_path, {"a": 2})


def test_one_run_at_a_time_works_in_a_folder(tiny: Tiny, tmp_path: Path) -> None:
    """Locks of one process keep each other out as those of two processes do."""
    with locked(tmp_path), pytest.raises(ValueError, match="another process is working in"):
        train(tiny, tmp_path)
