"""torchtitan's own Trainer in two processes (gloo, CPU) with our loss in the place of its chunked cross-entropy.

It runs where torchtitan 0.3 is installed: it is no dependency, not even of the tests.
"""

import os
import sys
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

if __name__ != "__main__":
    pytest.importorskip("torchtitan")
    pytestmark = [pytest.mark.distributed, pytest.mark.slow]
VOCABULARY = 2048  # the size in torchtitan's debugging model


@pytest.mark.parametrize("way", ["fsdp", "tensor"])
def test_the_trainer_of_torchtitan(way: str, tmp_path: Path) -> None:
    """MLE makes its loss, norm of gradients and weights after two steps; EMO as published its loss, other weights."""
    from tests.otloss_llm.conftest import launch  # which is not found where this file runs as a script

    launch("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", __file__, way, tmp_path)
    theirs, mle, emo = torch.load(tmp_path / "runs.pt")
    assert mle["logged"] == pytest.approx(theirs["logged"], rel=1e-5)  # mean and largest loss, norm of gradients
    assert emo["logged"][:2] == pytest.approx(theirs["logged"][:2], rel=1e-5)
    assert emo["logged"][2] < 0.9 * theirs["logged"][2]
    torch.testing.assert_close(mle["weights"], theirs["weights"], rtol=1e-4, atol=1e-6)


def worker(way: str, folder: str) -> None:
    """Save what their loss, MLE and EMO make of one model and the same batches."""
    torch._utils._get_available_device_type = lambda: "cpu"  # type: ignore[assignment]  # asked for at the import
    from torchtitan.components import metrics
    from torchtitan.components.loss import ChunkedLossWrapper, CrossEntropyLoss

    from otloss_llm import EMO, MLE, EmbeddingCost
    from otloss_llm.training.torchtitan import ObjectiveLoss

    nothing = SimpleNamespace(max_reserved_gib=0.0, max_reserved_pct=0.0)
    monitor = SimpleNamespace(device_name="cpu", get_peak_stats=lambda: nothing, reset_peak_stats=lambda: None)
    metrics.build_device_memory_monitor = lambda: monitor
    rows = torch.randn(VOCABULARY, 16, generator=torch.Generator().manual_seed(0))
    inner = CrossEntropyLoss.Config(global_vocab_size=VOCABULARY)
    losses = (
        ChunkedLossWrapper.Config(num_chunks=4, loss_fn=inner),
        ObjectiveLoss(MLE(), chunk_size=7),
        ObjectiveLoss(EMO(ratio_clip=None), EmbeddingCost(rows)),  # its value is nll
    )
    runs = [run(loss, way, folder) for loss in losses]
    if os.environ["RANK"] == "0":
        torch.save(runs, Path(folder) / "runs.pt")


def run(loss: Any, way: str, folder: str) -> dict[str, Any]:
    """Two steps of two accumulated batches."""
    from torchtitan.components.checkpoint import CheckpointManager
    from torchtitan.components.dataloader import BaseDataLoader
    from torchtitan.components.optimizer import default_adamw
    from torchtitan.components.tokenizer import BaseTokenizer
    from torchtitan.config import ParallelismConfig, TrainingConfig
    from torchtitan.models.common.attention import ScaledDotProductAttention
    from torchtitan.models.llama3 import model_registry
    from torchtitan.trainer import Trainer

    class Rows(BaseDataLoader):
        @dataclass(kw_only=True, slots=True)
        class Config(BaseDataLoader.Config):
            pass

        def __init__(self, config: Any, *, dp_rank: int, local_batch_size: int, seq_len: int, **others: Any) -> None:
            self.generator, self.rank = torch.Generator().manual_seed(dp_rank), dp_rank
            self.shape = (local_batch_size, seq_len + 1)

        def __iter__(self) -> Any:
            for _ in range(4):
                ids = torch.randint(VOCABULARY, self.shape, generator=self.generator)
                labels = ids[:, 1:].clone()
                labels[0, : 3 + 3 * self.rank] = -100  # another number in each process
                positions = torch.arange(labels.shape[1]).expand_as(labels).contiguous()
                yield {"input": ids[:, :-1].contiguous(), "positions": positions}, labels

        def state_dict(self) -> dict[str, Any]:
            return {}

        def load_state_dict(self, state: Any) -> None: ...

    class NoTokenizer(BaseTokenizer):
        @dataclass(kw_only=True, slots=True)
        class Config(BaseTokenizer.Config):
            pass

        def __init__(self, config: Any, **others: Any) -> None: ...

        encode = decode = get_vocab_size = lambda self, *args, **others: None

    tensor = way == "tensor"
    spec = model_registry("debugmodel", attn_backend="flex")
    spec.model.layers = spec.model.layers[:2]
    for layer in spec.model.layers:
        layer.attention.inner_attention = ScaledDotProductAttention.Config()  # flex has no gradients on a CPU
    config = Trainer.Config(
        loss=loss, model_spec=spec, tokenizer=NoTokenizer.Config(), dataloader=Rows.Config(), dump_folder=folder,
        optimizer=default_adamw(lr=1e-2, eps=1.0, implementation="for-loop"),
        training=TrainingConfig(
            local_batch_size=2, global_batch_size=4 if tensor else 8, seq_len=16, steps=2, dtype="float32",
            mixed_precision_param="float32", disable_cuda_graphs=True,
        ),
        parallelism=ParallelismConfig(tensor_parallel_degree=2 if tensor else 1, spmd_backend="partial_dtensor"),
        checkpoint=CheckpointManager.Config(enable=False), activation_checkpoint=None,
    )  # fmt: skip
    config.debug.seed = 0
    made = Trainer(config)
    for module in made.model_parts[0].modules():
        if hasattr(module, "set_force_sum_reduction_for_comms"):
            module.set_force_sum_reduction_for_comms(True)  # gloo cannot multiply while it sums
    logged: list[float] = []
    made.metrics_processor.log = lambda step, *values, **others: logged.extend(values)
    batches = made.batch_generator(made.dataloader)
    for step in (1, 2):
        made.step = step
        made.train_step(batches)
    whole = {name: getattr(p, "full_tensor", lambda p=p: p)() for name, p in made.model_parts[0].named_parameters()}
    return {"logged": logged, "weights": {name: weight.detach().clone() for name, weight in whole.items()}}


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[3]))
    worker(*sys.argv[1:])
