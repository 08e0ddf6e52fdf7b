"""Tiny data and settings for the tests of ObjectiveTrainer."""

from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from otloss_llm import EmbeddingCost, ObjectiveTrainer, token_loss
from otloss_llm.training.batches import pad_rows
from tests.otloss_llm.tiny_models import VOCAB

Row = dict[str, list[int]]


def rows(count: int, seed: int = 0) -> list[Row]:
    """Token rows of 6 to 10 tokens; their first labels are ignored, another number in each row."""
    generator = torch.Generator().manual_seed(seed)
    made = []
    for index in range(count):
        ids = torch.randint(3, VOCAB, (6 + index % 5,), generator=generator).tolist()
        ignored = (3 * index) % 5
        made.append({"input_ids": ids, "labels": [-100] * ignored + ids[ignored:]})
    return made


def arguments(path: Path, kind: Any = transformers.TrainingArguments, **settings: Any) -> Any:
    base: dict[str, Any] = {
        "output_dir": str(path), "report_to": [], "use_cpu": True, "disable_tqdm": True, "logging_steps": 1,
        "save_strategy": "no", "per_device_train_batch_size": 4, "per_device_eval_batch_size": 3, "max_steps": 3,
        "learning_rate": 1e-2, "lr_scheduler_type": "constant", "max_grad_norm": 0.0, "seed": 0, "weight_decay": 0.0,
        "dataloader_pin_memory": False,
    }  # fmt: skip
    return kind(**base | settings)


def trainer(path: Path, model: nn.Module, kind: type = ObjectiveTrainer, **settings: Any) -> Any:
    own = ("objective", "cost", "numbers", "z_loss", "chunk_size", "impl", "compute_metrics", "callbacks",
           "train_dataset", "eval_dataset", "data_collator", "processing_class")  # fmt: skip
    given = {"train_dataset": rows(24), "eval_dataset": rows(11, seed=1), "data_collator": pad_rows}
    given |= {key: settings.pop(key) for key in own if key in settings}
    return kind(model=model, args=arguments(path, **settings), **given)


def weights(model: nn.Module) -> dict[str, Tensor]:
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def assert_same_weights(a: nn.Module, b: nn.Module, tolerance: float = 0.0) -> None:
    torch.testing.assert_close(weights(a), weights(b), rtol=tolerance, atol=tolerance)


def logs(made: Any, key: str) -> list[float]:
    return [entry[key] for entry in made.state.log_history if key in entry]


def by_hand(model: nn.Module, data: list[Row], objective: Any, cost: EmbeddingCost | None) -> dict[str, float]:
    """Row by row, without padding, from the model's own logits, in float64."""
    sums = torch.zeros(4, dtype=torch.float64)
    training = model.training
    model.eval()
    for row in data:
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([row["input_ids"]])).logits[0, :-1].double()
        labels = torch.tensor(row["labels"][1:])
        out = token_loss(logits, labels, objective=objective, cost=cost, reduction="none")
        columns = (out.loss, out.nll, torch.zeros(()) if out.cost is None else out.cost, labels != -100)
        sums += torch.stack([column.double().sum() for column in columns])
    model.train(training)
    loss, nll, transport = (sums[:3] / sums[3]).tolist()
    return {"loss": loss, "nll": nll, "transport_cost": transport, "perplexity": float(torch.tensor(nll).exp())}


def one_step(path: Path, model: nn.Module, objective: Any, **settings: Any) -> dict[str, Tensor]:
    """The change that one step of plain gradient descent makes: -gradient."""
    before = weights(model)
    made = trainer(path, model, objective=objective, max_steps=1, optim="sgd", learning_rate=1.0, **settings)
    made.train()
    return {name: before[name] - parameter for name, parameter in weights(model).items()}
