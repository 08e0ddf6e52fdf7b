"""What test_distributed.py runs in each process: `torchrun distributed_worker.py CHECK ... FOLDER`.

Without a launcher it starts two processes itself.
"""

import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[3]))

import torch
import torch.distributed as dist
import transformers
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, IterableDataset

from otloss_llm import EmbeddingCost, NumberCost, NumberToken, ObjectiveTrainer
from tests.otloss_llm.forked import fork_ranks
from tests.otloss_llm.tiny_models import VOCAB, aligned, lora, step, tiny_batch, tiny_model
from tests.otloss_llm.training.trainer_cases import logs, rows, trainer

BATCH, ROWS = 2, 24
FSDP = {"fsdp": True, "fsdp_config": {
    "version": 2, "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"], "cpu_ram_efficient_loading": True,
}}  # fmt: skip


def objectives(fsdp: bool) -> dict[str, dict[str, Any]]:
    """What is trained: EMO, and under DDP a mean over numbers, of which one rank has many more than the other."""
    values = torch.where(torch.arange(VOCAB) % 3 == 0, torch.arange(VOCAB) % 10, torch.nan)
    weighted = [row | {"token_weight": [i % 3 / 2 for i in range(len(row["labels"]))]} for row in rows(ROWS)]
    others = {
        "numbers": {"objective": NumberToken(), "cost": NumberCost(values)},
        "weighted": {"objective": "emo", "train_dataset": weighted},
    }
    return {"emo": {"objective": "emo"}} | ({} if fsdp else others)


def run(folder: Path, name: str, per_device: int, fsdp: bool, given: dict[str, Any]) -> dict[str, Any]:
    """A short run of ObjectiveTrainer; one rank's rows hold many more labels than the other's.

    The model of the second rank is another one: DDP and FSDP (cpu_ram_efficient_loading) start from the first rank's.
    """
    model = tiny_model("llama" if name.endswith("untied") else "llama-tied", seed=int(os.environ.get("RANK", 0)))
    if fsdp:
        let_accelerate_shard_on_a_cpu()
    data = rows(ROWS)
    for index in range(0, ROWS, 6):
        data[index]["labels"] = [-100] * len(data[index]["labels"])
    made = trainer(
        folder, model, optim="sgd", max_steps=4, gradient_accumulation_steps=2,
        per_device_train_batch_size=per_device, ddp_find_unused_parameters=False,
        **{"train_dataset": data} | given, **FSDP if fsdp else {},
    )  # fmt: skip
    made._metrics = {}  # a trainer of TRL has them, and logs predictions
    made.train()
    assert made.accelerator.is_fsdp2 == fsdp == hasattr(made.model.lm_head.weight, "placements")
    whole = {key: p.full_tensor() if fsdp else p for key, p in made.model.named_parameters()}  # type: ignore[operator]
    metrics = made.evaluate()
    logs = [entry for entry in made.state.log_history if "nll" in entry]
    keys = ("loss", "nll", "transport_cost", "entropy", "mean_token_accuracy")
    return {
        "weights": {key: p.detach() for key, p in whole.items()},
        "logs": [[entry[key] for key in keys] for entry in logs],
        "metrics": {key: metrics[f"eval_{key}"] for key in (*keys, "perplexity")},
        "flattened": [] if fsdp else flattened_nll(made),
    }


class Stream(IterableDataset):  # type: ignore[type-arg]
    """Rows without a length."""

    def __init__(self, rows: list[Any]) -> None:
        self.rows = rows

    def __iter__(self) -> Iterator[Any]:
        return iter(self.rows)


def flattened_nll(made: Any) -> list[float]:
    """nll of the evaluation set as a stream, and with one sequence for each batch: of rows, and packed as by TRL."""
    from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

    pieces, packed = iter(made.eval_dataset), []
    for count in (3, 1, 4, 2, 1):  # no multiple of 2 processes of 3 or of 1
        part = [next(pieces) for _ in range(count)]
        whole = {key: [token for row in part for token in row[key]] for key in ("input_ids", "labels")}
        packed.append(whole | {"seq_lengths": [len(row["input_ids"]) for row in part]})
    made.accelerator.dataloader_config.dispatch_batches = False  # which joins rows of one length only
    measured = [made.evaluate(Stream(made.eval_dataset))["eval_nll"]]
    made.data_collator = transformers.DataCollatorWithFlattening()
    measured += [made.evaluate(data)["eval_nll"] for data in (made.eval_dataset, Stream(made.eval_dataset))]
    made.data_collator = DataCollatorForLanguageModeling(pad_token_id=0, padding_free=True)
    made._signature_columns = ["input_ids", "labels", "seq_lengths"]  # as SFTTrainer has them
    for size in (made.args.per_device_eval_batch_size, 1):
        made.args.per_device_eval_batch_size = size
        measured.append(made.evaluate(packed)["eval_nll"])
    return measured


class SplitSequences(ObjectiveTrainer):
    """Context parallelism over all processes, simulated: torch's needs GPUs.

    All processes have the same batches, as accelerate's loader gives them. Instead of a part of the sequences each
    keeps the labels of its part of the positions, which makes the same loss and the same gradients.
    """

    def get_cp_size(self) -> int:
        return int(os.environ.get("WORLD_SIZE", 1))

    def get_train_dataloader(self) -> Any:
        return self._loader(self.train_dataset)

    def get_eval_dataloader(self, eval_dataset: Any = None) -> Any:
        return self._loader(self.eval_dataset)

    def _loader(self, data: Any) -> Any:
        from accelerate.data_loader import prepare_data_loader

        loader = DataLoader(data, batch_size=4, collate_fn=self.data_collator)
        return prepare_data_loader(loader, num_processes=1, process_index=0)

    def _prepare_context_parallel_inputs(self, model: Any, inputs: Any) -> Any:
        labels = aligned(inputs["labels"])
        parts = torch.arange(labels.shape[1]) * self.get_cp_size() // labels.shape[1]
        own = labels.masked_fill(parts != int(os.environ.get("RANK", 0)), -100)
        return contextlib.nullcontext, inputs | {"shift_labels": own}


def split(folder: Path, objective: Any) -> dict[str, Any]:
    """A short run with split sequences; None is transformers' own trainer and loss, on whole sequences."""
    model, own = tiny_model("llama"), {} if objective is None else {"objective": objective, "kind": SplitSequences}
    made = trainer(
        folder, model, optim="sgd", max_steps=3, gradient_accumulation_steps=2, ddp_find_unused_parameters=False,
        train_sampling_strategy="sequential", **{"kind": transformers.Trainer} | own,
    )  # fmt: skip
    made.train()
    return {
        "weights": {key: p.detach() for key, p in model.named_parameters()},
        "loss": logs(made, "loss"), "norm": logs(made, "grad_norm"), "metrics": made.evaluate(),
    }  # fmt: skip


def with_tp_plan(folder: Path, *, parallel: bool = True) -> dict[str, Any]:
    """A short run of a model that transformers has sharded by its own plan; or of the same model whole."""
    import accelerate

    sizes = {"num_attention_heads": 6, "num_key_value_heads": 6, "hidden_size": 24}
    model: Any = tiny_model("llama", **sizes)
    if parallel:
        accelerate.ParallelismConfig._validate_accelerator = lambda *_: None  # it wants GPUs
        model.save_pretrained(folder / "model")
        dist.barrier()
        model = transformers.AutoModelForCausalLM.from_pretrained(folder / "model", tp_plan="auto", dtype=torch.float32)
        assert hasattr(model.lm_head.weight, "placements")
    made = trainer(folder / "run", model, objective="emo", optim="sgd", gradient_accumulation_steps=2)
    made.train()
    weights = {key: getattr(p, "full_tensor", p.detach)().detach() for key, p in model.named_parameters()}
    return {"weights": weights, "loss": logs(made, "loss"), "eval_loss": made.evaluate()["eval_loss"]}


def let_accelerate_shard_on_a_cpu() -> None:
    """accelerate silently drops FSDP without a GPU, though it also works on gloo."""
    import accelerate.state as state

    init = state.AcceleratorState.__init__

    def with_fsdp(self: Any, *args: Any, fsdp_plugin: Any = None, **kwargs: Any) -> None:
        init(self, *args, fsdp_plugin=fsdp_plugin, **kwargs)
        if fsdp_plugin is not None:
            self.distributed_type, self.fsdp_plugin = state.DistributedType.FSDP, fsdp_plugin
            state.PartialState._shared_state["distributed_type"] = self.distributed_type

    state.AcceleratorState.__init__ = with_fsdp


# ---- one step of a model, without a trainer --------------------------------------------------------------------------


def model_named(name: str) -> Any:
    """A model of tiny_models; "lora" and "lora-head" adapt "llama", the latter with a trained copy of the head."""
    if not name.startswith("lora"):
        return tiny_model(name)
    saved = ["lm_head"] if name == "lora-head" else None
    return lora(tiny_model("llama"), target_modules=["q_proj", "up_proj"], modules_to_save=saved)


def whole_weights(model: Any) -> list[Tensor]:
    if isinstance(model, FullyShardedDataParallel):
        with FullyShardedDataParallel.summon_full_params(model):
            return [p.detach().clone() for p in model.module.parameters()]
    return [p.full_tensor() if hasattr(p, "full_tensor") else p for p in model.parameters()]


def error_of_a_step(name: str, wrap: Callable[[Any], Any], *, idle: bool = False, mesh: Any = None) -> float:
    """Largest relative error, of the loss and of the weights after a step of SGD, against one process.

    `idle`: the last rank has nothing but ignored labels, and still takes part. Data is split along `mesh`, if given.
    """
    rank, size, group = dist.get_rank(), dist.get_world_size(), None
    if mesh is not None:
        rank, size, group = mesh.get_local_rank(), mesh.size(), mesh.get_group()
    batch = tiny_batch(rows=4)
    if idle:
        batch["labels"][2:] = -100
    num_items = int((aligned(batch["labels"]) != -100).sum())
    one = model_named(name)
    cost = EmbeddingCost.from_model(one)
    want = step(one, batch, cost=cost, num_items=num_items)
    torch.optim.SGD(one.parameters(), lr=1.0).step()
    model = wrap(model_named(name))
    half = {key: value.chunk(size)[rank] for key, value in batch.items()}
    got = step(model, half, cost=cost, num_items=num_items).detach().clone()
    torch.optim.SGD(model.parameters(), lr=float(size)).step()  # gradients are averaged over processes
    dist.all_reduce(got, group=group)
    pairs = [(got, want), *zip(whole_weights(model), one.parameters(), strict=True)]
    return max(float((a - b).norm() / b.norm()) for a, b in pairs)


def fsdp2(mesh: Any, *, head_apart: bool = False, reshard: bool = True) -> Callable[[Any], Any]:
    def wrap(model: Any) -> Any:
        base = model.get_base_model() if hasattr(model, "get_base_model") else model
        before = EmbeddingCost.from_model(model).dense()
        for part in (*base.model.layers, *([base.lm_head] if head_apart else []), model):
            fully_shard(part, mesh=mesh, reshard_after_forward=reshard)
        if mesh.size() == dist.get_world_size():
            assert torch.equal(EmbeddingCost.from_model(model).dense(), before)  # gathers the shards of the head
        return model

    return wrap


def fsdp1(model: Any) -> Any:
    """Whose parameters are views of flat ones."""
    return FullyShardedDataParallel(
        model, sharding_strategy=ShardingStrategy.FULL_SHARD, use_orig_params=True,
        device_id=torch.device("cpu"), auto_wrap_policy=ModuleWrapPolicy({type(model.model.layers[0])}),
    )  # fmt: skip


def steps(folder: Path) -> dict[str, float]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return {
        "ddp": error_of_a_step("llama", DistributedDataParallel),
        "ddp-tied": error_of_a_step("llama-tied", DistributedDataParallel),
        "ddp-idle": error_of_a_step("llama", DistributedDataParallel, idle=True),
        "fsdp": error_of_a_step("llama", fsdp2(mesh)),
        "fsdp-tied": error_of_a_step("llama-tied", fsdp2(mesh)),
        "fsdp-head-apart": error_of_a_step("llama", fsdp2(mesh, head_apart=True)),
        "fsdp-kept": error_of_a_step("llama", fsdp2(mesh, head_apart=True, reshard=False)),
        "fsdp-lora": error_of_a_step("lora", fsdp2(mesh)),
        "fsdp-lora-head": error_of_a_step("lora-head", fsdp2(mesh)),
        "fsdp1": error_of_a_step("llama", fsdp1),
        "fsdp1-tied": error_of_a_step("llama-tied", fsdp1),
    }


def grid(folder: Path) -> dict[str, float]:
    """FSDP2 along one axis of a 2 x 2 mesh, a head in shards along the other."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))

    def wrap(model: Any) -> Any:
        parallelize_module(model, mesh["tensor"], {"lm_head": ColwiseParallel(output_layouts=Replicate())})
        for part in (*model.model.layers, model):
            fully_shard(part, mesh=mesh["data"])
        return model

    return {"grid": error_of_a_step("llama", wrap, mesh=mesh["data"])}


def made_of(check: str, folder: Path) -> Any:
    if not check.startswith(("ddp", "fsdp")):
        return {"steps": steps, "grid": grid, "tensor": with_tp_plan}[check](folder)
    fsdp = check.startswith("fsdp")
    made: Any = {kind: run(folder / kind, check, BATCH, fsdp, given) for kind, given in objectives(fsdp).items()}
    if not fsdp:
        made["split"] = {objective: split(folder / "split" / objective, objective) for objective in ("mle", "emo")}
    return made


def main() -> None:
    checks, folder = sys.argv[1:-1], Path(sys.argv[-1])
    if "RANK" not in os.environ:
        # Before the fork, so that the processes share what these import.
        import accelerate.data_loader  # noqa: F401
        import numba  # noqa: F401
        import transformers.models.llama.modeling_llama  # noqa: F401
        import trl.trainer.sft_trainer  # noqa: F401

        fork_ranks(2)
    if not checks[0].startswith(("ddp", "fsdp")):
        dist.init_process_group("gloo")
    made = {check: made_of(check, folder / check) for check in checks}
    if int(os.environ["RANK"]) == 0:
        torch.save(made, folder / "made.pt")
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()
    # About one time in ten torch's threads abort the interpreter at its exit after FSDP2 over gloo.
    sys.stdout.flush(), sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
