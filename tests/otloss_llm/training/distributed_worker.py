"""What test_distributed.py runs in each process: `torchrun distributed_worker.py CHECK FOLDER`."""

import contextlib
import os
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[3]))

import torch
import torch.distributed as dist
import transformers
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from otloss_llm import EMO, EmbeddingCost, NumberCost, NumberToken, ObjectiveTrainer
from otloss_llm.training.fused import fused_loss, measure_transform
from tests.otloss_llm.tiny_models import VOCAB, aligned, scorer, step, tiny_batch, tiny_model
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
    made.train()
    assert made.accelerator.is_fsdp2 == fsdp == hasattr(made.model.lm_head.weight, "placements")
    whole = {key: p.full_tensor() if fsdp else p for key, p in made.model.named_parameters()}  # type: ignore[operator]
    metrics = made.evaluate()
    logs = [entry for entry in made.state.log_history if "nll" in entry]
    wanted = ("loss", "nll", "transport_cost")
    return {
        "weights": {key: p.detach() for key, p in whole.items()},
        "logs": [[entry[key] for key in wanted] for entry in logs],
        "metrics": {key: metrics[f"eval_{key}"] for key in (*wanted, "perplexity")},
    }


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


def with_tp_plan(folder: Path, *, parallel: bool) -> dict[str, Any]:
    """A short run of a model that transformers has sharded by its own plan; or of the same model whole."""
    import accelerate

    sizes = {"num_attention_heads": 6, "num_key_value_heads": 6, "hidden_size": 24}
    model: Any = tiny_model("llama", **sizes)
    if parallel:
        accelerate.ParallelismConfig._validate_accelerator = lambda *_: None  # it wants GPUs
        model.save_pretrained(folder / f"model-{os.environ['RANK']}")
        dist.init_process_group("gloo")
        model = transformers.AutoModelForCausalLM.from_pretrained(
            folder / f"model-{os.environ['RANK']}", tp_plan="auto", dtype=torch.float32
        )
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


def own_half(batch: dict[str, Tensor], rank: int, size: int) -> dict[str, Tensor]:
    return {key: value.chunk(size)[rank] for key, value in batch.items()}


def model_named(name: str) -> nn.Module:
    """A model of tiny_models; "lora" and "lora-head" adapt "llama", the latter with a trained copy of the head."""
    if not name.startswith("lora"):
        return tiny_model(name)
    from peft import LoraConfig, get_peft_model

    saved = ["lm_head"] if name == "lora-head" else None
    model = get_peft_model(
        tiny_model("llama"), LoraConfig(r=2, target_modules=["q_proj", "up_proj"], modules_to_save=saved)
    )
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.2 * torch.randn_like(parameter))  # LoRA starts with a factor of 0
    return model


def expected_step(name: str, batch: dict[str, Tensor], num_items: int) -> tuple[Tensor, dict[str, Tensor]]:
    model = model_named(name)
    loss = step(model, batch, cost=EmbeddingCost.from_model(model), num_items=num_items)
    return loss.detach(), {key: p.grad for key, p in model.named_parameters() if p.grad is not None}


def compare(
    model: nn.Module, loss: Tensor, expected: tuple[Tensor, dict[str, Tensor]], size: int, group: Any = None
) -> float:
    """Largest relative error of the summed loss and the averaged gradients (times the number of processes)."""
    dist.all_reduce(loss, group=group)
    errors = [float((loss - expected[0]).abs() / expected[0])]
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        gradient: Any = parameter.grad
        assert gradient is not None, name
        full = gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient
        want = expected[1][name.removeprefix("module.")]
        errors.append(float((full * size - want).norm() / (want.norm() + 1e-4)))
    return max(errors)


def sharded(name: str, rank: int, size: int, *, head_apart: bool, reshard: bool) -> float:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (size,))
    batch = tiny_batch(rows=4)
    num_items = int((aligned(batch["labels"]) != -100).sum())
    expected = expected_step(name, batch, num_items)
    model: Any = model_named(name)
    cost = EmbeddingCost.from_model(model)
    llama = model.get_base_model() if name.startswith("lora") else model
    for layer in llama.model.layers:
        fully_shard(layer, mesh=mesh, reshard_after_forward=reshard)
    if head_apart:
        fully_shard(model.lm_head, mesh=mesh, reshard_after_forward=reshard)
    fully_shard(model, mesh=mesh, reshard_after_forward=reshard)
    loss = step(model, own_half(batch, rank, size), cost=cost, num_items=num_items)
    error = compare(model, loss.detach().clone(), expected, size)
    assert torch.equal(EmbeddingCost.from_model(model).dense(), cost.dense())  # gathers the shards of the head
    return error


def flattened(name: str, rank: int, size: int) -> float:
    """FSDP1, whose parameters are views of flat ones: after a step of SGD every weight is that of one process."""
    from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    batch = tiny_batch(rows=4)
    num_items = int((aligned(batch["labels"]) != -100).sum())
    one: Any = tiny_model(name)
    cost = EmbeddingCost.from_model(one)
    loss = step(one, batch, cost=cost, num_items=num_items)
    torch.optim.SGD(one.parameters(), lr=1.0).step()
    model = FullyShardedDataParallel(
        tiny_model(name), sharding_strategy=ShardingStrategy.FULL_SHARD, use_orig_params=True,
        device_id=torch.device("cpu"), auto_wrap_policy=ModuleWrapPolicy({type(one.model.layers[0])}),
    )  # fmt: skip
    own = step(model, own_half(batch, rank, size), cost=cost, num_items=num_items).detach().clone()
    torch.optim.SGD(model.parameters(), lr=float(size)).step()  # FSDP averages over processes
    dist.all_reduce(own)
    errors = [float((own - loss).abs() / loss)]
    with FullyShardedDataParallel.summon_full_params(model):
        for (_, got), want in zip(model.module.named_parameters(), one.parameters(), strict=True):
            errors.append(float((got - want).norm() / want.norm()))
    return max(errors)


def on_a_grid() -> float:
    """FSDP2 along one axis of a 2 x 2 mesh, a head in shards along the other."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    batch = tiny_batch(rows=4)
    num_items = int((aligned(batch["labels"]) != -100).sum())
    expected = expected_step("llama", batch, num_items)
    model: Any = tiny_model("llama")
    cost = EmbeddingCost.from_model(model)
    parallelize_module(model, mesh["tensor"], {"lm_head": ColwiseParallel(output_layouts=Replicate())})
    for part in (*model.model.layers, model):
        fully_shard(part, mesh=mesh["data"])
    loss = (
        step(model, own_half(batch, mesh["data"].get_local_rank(), 2), cost=cost, num_items=num_items).detach().clone()
    )
    return compare(model, loss, expected, 2, mesh["data"].get_group())


def partitioned(name: str, rank: int, size: int) -> float:
    """ZeRO stage 3 of DeepSpeed: the weights after two steps of SGD are those of one process."""
    os.environ["DS_ACCELERATOR"] = "cpu"
    import deepspeed

    from otloss_llm.models.heads import find_head

    batches = [tiny_batch(seed, rows=4) for seed in range(2)]
    items = [int((aligned(batch["labels"]) != -100).sum()) for batch in batches]
    one: Any = tiny_model(name)
    cost = EmbeddingCost.from_model(one)
    plain = torch.optim.SGD(one.parameters(), lr=1.0)
    for batch, count in zip(batches, items, strict=True):
        plain.zero_grad()
        step(one, batch, cost=cost, num_items=count)
        plain.step()
    model = tiny_model(name)
    zero = {"stage": 3, "stage3_param_persistence_threshold": 0}
    config = {"train_batch_size": 2 * size, "zero_optimization": zero, "zero_allow_untested_optimizer": True}
    optimizer = torch.optim.SGD(model.parameters(), lr=float(size))  # gradients are averaged over processes
    engine = deepspeed.initialize(model=model, optimizer=optimizer, config=config, dist_init_required=False)[0]
    assert torch.equal(EmbeddingCost.from_model(model).unit, cost.unit)  # gathers
    for batch, count in zip(batches, items, strict=True):
        half = own_half(batch, rank, size)
        inputs = {key: value for key, value in half.items() if key != "labels"}
        score = scorer(aligned(half["labels"]), objective=EMO(), cost=cost, num_items=count, chunk_size=5)
        with fused_loss(engine, measure_transform(engine, inputs), score):
            loss = engine(**inputs)["loss"]
        engine.backward(loss)
        engine.step()
    assert not model.get_parameter("model.embed_tokens.weight").numel()  # partitioned again
    assert find_head(model).weight.shape == one.lm_head.weight.shape
    errors = []
    for got, want in zip(model.parameters(), one.parameters(), strict=True):
        with deepspeed.zero.GatheredParameters(got):
            errors.append(float((got - want).norm() / want.norm()))
    return max(errors)


def replicated(name: str, rank: int, size: int, *, idle: bool) -> float:
    """Plain DDP; `idle`: the second rank has nothing but ignored labels, and still takes part."""
    batch = tiny_batch(rows=4)
    if idle:
        batch["labels"][2:] = -100
    num_items = int((aligned(batch["labels"]) != -100).sum())
    expected = expected_step(name, batch, num_items)
    model = DistributedDataParallel(tiny_model(name))
    cost = EmbeddingCost.from_model(model.module)
    loss = step(model, own_half(batch, rank, size), cost=cost, num_items=num_items)
    return compare(model, loss.detach().clone(), expected, size)


def main() -> None:
    check, folder = sys.argv[1], Path(sys.argv[2])
    if check.startswith(("ddp", "fsdp")):
        fsdp = check.startswith("fsdp")
        made = {kind: run(folder / kind, check, BATCH, fsdp, given) for kind, given in objectives(fsdp).items()}
        if not fsdp:
            made["split"] = {objective: split(folder / "split" / objective, objective) for objective in ("mle", "emo")}
        if int(os.environ["RANK"]) == 0:
            torch.save(made, folder / f"{check}.pt")
    elif check == "tensor":
        made = with_tp_plan(folder, parallel=True)
        if dist.get_rank() == 0:
            torch.save(made, folder / "tensor.pt")
    elif check == "grid":
        dist.init_process_group("gloo")
        errors = {"model": on_a_grid()}
        if dist.get_rank() == 0:
            torch.save(errors, folder / "errors.pt")
    elif check == "zero":
        dist.init_process_group("gloo")
        errors = {name: partitioned(name, dist.get_rank(), dist.get_world_size()) for name in ("llama", "llama-tied")}
        if dist.get_rank() == 0:
            torch.save(errors, folder / "errors.pt")
    else:
        dist.init_process_group("gloo")
        rank, size = dist.get_rank(), dist.get_world_size()
        errors = {
            "ddp": replicated("llama", rank, size, idle=False),
            "ddp-tied": replicated("llama-tied", rank, size, idle=False),
            "ddp-idle": replicated("llama", rank, size, idle=True),
            "fsdp": sharded("llama", rank, size, head_apart=False, reshard=True),
            "fsdp-tied": sharded("llama-tied", rank, size, head_apart=False, reshard=True),
            "fsdp-head-apart": sharded("llama", rank, size, head_apart=True, reshard=True),
            "fsdp-kept": sharded("llama", rank, size, head_apart=True, reshard=False),
            "fsdp-lora": sharded("lora", rank, size, head_apart=False, reshard=True),
            "fsdp-lora-head": sharded("lora-head", rank, size, head_apart=False, reshard=True),
            "fsdp1": flattened("llama", rank, size),
            "fsdp1-tied": flattened("llama-tied", rank, size),
        }
        if rank == 0:
            torch.save(errors, folder / "errors.pt")
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()
    # About one time in ten torch's threads abort the interpreter at its exit after FSDP2 over gloo.
    sys.stdout.flush(), sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
