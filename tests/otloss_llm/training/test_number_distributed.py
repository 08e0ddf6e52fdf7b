"""Numbers over 2 processes (gloo) against one: a head spread over them, and ObjectiveTrainer under torchrun.

Started by torchrun, this file is what each process runs: `test_number_distributed.py FOLDER`.
"""

from __future__ import annotations

import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

pytest.importorskip("transformers")
pytest.importorskip("accelerate")

pytestmark = [
    pytest.mark.distributed,
    pytest.mark.skipif(not dist.is_available() or not dist.is_gloo_available(), reason="needs torch.distributed, gloo"),
]

VALUES = [math.nan, 0.0, 7.0, 3.5, math.nan, -2.0, 7.0]


ARMS_OF_RUNS = ("number_token", "span", "emo+number")


@pytest.fixture(scope="module")
def two_processes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that this file leaves under torchrun, each process on one thread."""
    folder = tmp_path_factory.mktemp("two")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = subprocess.run(
        [*command, __file__, str(folder)],
        env=os.environ | {"OMP_NUM_THREADS": "1", "NUMBA_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-1000:] + done.stderr[-6000:]
    return folder


def test_a_head_in_parts_is_the_whole_one(two_processes: Path) -> None:
    """The checks are in `check_head`; a failure there fails the fixture."""
    assert (two_processes / "head").read_text() == "done"


@pytest.mark.filterwarnings("ignore:.*pin_memory.*")
@pytest.mark.parametrize("arm", ARMS_OF_RUNS)
def test_the_trainer_gives_the_weights_of_one_process(arm: str, two_processes: Path, tmp_path: Path) -> None:
    """Two steps of 4 rows on each of 2 processes = two of 8 on one."""
    one, two = trained(tmp_path, arm, processes=1), torch.load(two_processes / f"{arm}.pt")
    for name, weight in one["weights"].items():
        torch.testing.assert_close(two["weights"][name], weight, rtol=1e-5, atol=1e-6)
    assert two["transport_cost"] == pytest.approx(one["transport_cost"], rel=1e-5)
    assert len(one["transport_cost"]) == 2


def check_head(folder: Path) -> None:
    """NumberCost and MixedCost give the rows of the labels; what has no rows is refused in every process."""
    from otloss_llm.costs.number_spans import NumberSpanCost

    from otloss_llm import EmbeddingCost, MixedCost, NumberCost, NumberToken
    from otloss_llm.costs.number_tokens import NumberTokens
    from tests.otloss_llm.kernels.vocab_parallel_worker import (
        VOCAB,
        assert_as_in_one_process,
        blocks,
        leaves_of,
        raises_everywhere,
        shared,
    )  # fmt: skip
    from tests.otloss_llm.oracles import problem
    from tests.otloss_llm.training.test_number_training import of_characters

    for dtype in (torch.float64, torch.float32):
        given = problem(dtype=dtype)
        values = torch.tensor((VALUES * VOCAB)[:VOCAB], dtype=dtype)
        numbers = NumberCost(values)
        for sizes in blocks():
            for scaling in ("absolute", "log"):
                for reduction in ("mean", "none"):
                    assert_as_in_one_process(
                        given, sizes, cost=NumberCost(values, scaling=scaling), objective=NumberToken(0.4),
                        reduction=reduction,
                    )  # fmt: skip
            assert_as_in_one_process(given, sizes, cost=MixedCost(numbers, EmbeddingCost(given.embedding)))
    settings = {"objective": NumberToken(), "chunk_size": 7}
    for form in ("mse", "mae", "huber"):
        with raises_everywhere(ValueError, f'form="{form}" charges the mean number', same=True):
            shared(leaves_of(given, sizes), given, cost=NumberCost(values, form=form), **settings)
    spans = NumberSpanCost(NumberTokens.of(of_characters(), vocab_size=VOCAB))
    with raises_everywhere(ValueError, "no row for a label alone", same=True):
        shared(leaves_of(given, sizes), given, cost=spans, **settings)
    assert_as_in_one_process(given, sizes, cost=numbers, objective=NumberToken())  # still in step
    if dist.get_rank() == 0:
        (folder / "head").write_text("done")


def trained(folder: Path, arm: str, *, processes: int) -> dict[str, Any]:
    from tests.otloss_llm.tiny_models import tiny_model
    from tests.otloss_llm.training.test_number_training import ARMS, a_trainer, of_characters, sums
    from tests.otloss_llm.training.trainer_cases import logs, weights

    model = tiny_model("llama", seed=int(os.environ.get("RANK", 0)))  # DDP begins with that of the first
    run = a_trainer(
        folder / "run", model, tokenizer=of_characters(), train_dataset=sums() * 2, max_steps=2, optim="sgd",
        per_device_train_batch_size=8 // processes, ddp_find_unused_parameters=False, **ARMS[arm][0],
    )  # fmt: skip
    run.train()
    return {"weights": weights(model), "transport_cost": logs(run, "transport_cost")}


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[3]))
    for name in ARMS_OF_RUNS:
        result = trained(Path(sys.argv[1]), name, processes=2)
        if dist.get_rank() == 0:
            torch.save(result, Path(sys.argv[1]) / f"{name}.pt")
    check_head(Path(sys.argv[1]))
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)
