"""Two processes (gloo, CPU) against one: ObjectiveTrainer (DDP, FSDP2), fused loss."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.otloss_llm.conftest import launch
from tests.otloss_llm.training.distributed_worker import BATCH, objectives, run, split, with_tp_plan

pytestmark = [
    pytest.mark.distributed,
    pytest.mark.skipif(not hasattr(os, "fork"), reason="forks"),
    pytest.mark.skipif(not dist.is_available() or not dist.is_gloo_available(), reason="needs torch.distributed, gloo"),
]
WORKER = Path(__file__).with_name("distributed_worker.py")
TORCHRUN = ["-m", "torch.distributed.run", "--standalone"]
ACCELERATE = [
    "-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes=2", "--num_machines=1", "--mixed_precision=no",
    "--dynamo_backend=no", "--main_process_port=0",
]  # fmt: skip


def made_by(launcher: list[str], folder: Path, *checks: str) -> Any:
    """What the worker makes in its processes, by check."""
    launch(*launcher, WORKER, *checks, folder)
    return torch.load(folder / "made.pt")


def test_the_trainer_gives_the_weights_of_one_process(tmp_path: Path) -> None:
    """4 steps of 2 x 2 rows on each of 2 processes = 4 steps of 2 x 4 rows on one, logs and evaluation included."""
    made = made_by([], tmp_path, "ddp-tied", "fsdp-untied")
    for kind, of_two in made.items():
        for objective, given in objectives(kind.startswith("fsdp")).items():
            folder = tmp_path / "one" / kind / objective
            one = run(folder, "one-" + kind.partition("-")[2], 2 * BATCH, False, given)
            two = of_two[objective]
            torch.testing.assert_close(two["weights"], one["weights"], rtol=1e-5, atol=1e-6)
            assert len(one["logs"]) == 4
            for mine, expected in zip(two["logs"], one["logs"], strict=True):
                assert mine == pytest.approx(expected, rel=1e-5)
            assert two["metrics"] == pytest.approx(one["metrics"], rel=1e-5)  # 11 rows do not divide by 2 x 3
            for nll in (*two["flattened"], *one["flattened"]):
                assert nll == pytest.approx(one["metrics"]["nll"], rel=1e-5)
    for objective, two in made["ddp-tied"]["split"].items():
        assert_same_as_one_process(two, tmp_path, objective)


def assert_same_as_one_process(two: dict[str, Any], folder: Path, objective: str) -> None:
    """Sequences split over two processes give what whole ones give, and with MLE what transformers' trainer gives."""
    one = split(folder / "whole", objective)
    keys = ("eval_loss", "eval_nll", "eval_transport_cost")
    assert [two["metrics"][key] for key in keys] == pytest.approx([one["metrics"][key] for key in keys], rel=1e-5)
    for expected in [one] if objective == "emo" else [one, split(folder / "theirs", None)]:
        assert two["loss"] == pytest.approx(expected["loss"], rel=1e-5)
        assert two["norm"] == pytest.approx(expected["norm"], rel=1e-4)
        torch.testing.assert_close(two["weights"], expected["weights"], rtol=1e-5, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize(("check", "processes", "models"), [("steps", 2, 11), ("grid", 4, 1)])
def test_a_step_is_that_of_one_process(check: str, processes: int, models: int, tmp_path: Path) -> None:
    """DDP, FSDP, FSDP2 beside tensor parallelism."""
    errors = made_by([*TORCHRUN, f"--nproc-per-node={processes}"], tmp_path, check)[check]
    assert len(errors) == models
    assert all(error < 1e-5 for error in errors.values()), errors


@pytest.mark.slow
def test_the_trainer_with_the_tp_plan_of_a_model(tmp_path: Path) -> None:
    """Accumulated batches of uneven lengths; all processes have the same ones."""
    two = made_by(ACCELERATE, tmp_path, "tensor")["tensor"]
    one = with_tp_plan(tmp_path / "one", parallel=False)
    assert two["loss"] == pytest.approx(one["loss"], rel=1e-5)
    assert two["eval_loss"] == pytest.approx(one["eval_loss"], rel=1e-5)
    torch.testing.assert_close(two["weights"], one["weights"], rtol=1e-5, atol=1e-6)
