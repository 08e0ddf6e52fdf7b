"""ObjectiveTrainer: losses, logs, evaluation, prediction, the best model, what labels are, and errors."""

import copy
import itertools
import math
import pickle
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset
from transformers.trainer_utils import HPSearchBackend

from otloss.costs import DenseCost
from otloss_llm import (
    EMO,
    MLE,
    EmbeddingCost,
    NumberCost,
    ObjectiveMixin,
    ObjectiveTrainer,
    RatingCost,
    TaiLr,
    token_loss,
)
from otloss_llm.objectives import parse_objective
from otloss_llm.training.batches import pad_rows
from otloss_llm.training.trainer_cost import check_sample, save_sample
from otloss_llm.training.trainer_settings import search_objective
from tests.otloss_llm.tiny_models import TINY, VOCAB, build, lora, tiny_batch, tiny_model
from tests.otloss_llm.training.trainer_cases import (
    Row,
    arguments,
    assert_same_weights,
    by_hand,
    logs,
    one_step,
    rows,
    trainer,
    weights,
)


def test_arguments_of_older_trainers_are_named(tmp_path: Path) -> None:
    """The signature that binds them names no function."""
    for name, advice in {"tokenizer": "processing_class=", "packing": "fields of its arguments"}.items():
        with pytest.raises(TypeError, match=f"ObjectiveTrainer got an unexpected .*'{name}'; .*{advice}"):
            ObjectiveTrainer(model=tiny_model("llama"), args=arguments(tmp_path), **{name: None})


@pytest.mark.parametrize(("name", "accumulation"), [("llama", 3), ("gpt2", 1)])
def test_mle_is_the_plain_trainer_step_for_step(tmp_path: Path, name: str, accumulation: int) -> None:
    first = tiny_model(name, **({"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0} if name == "gpt2" else {}))
    second = copy.deepcopy(first)
    data = rows(24)
    if name == "gpt2":  # the plain trainer counts the first label of GPT-2's rows, though nothing predicts it
        data = [row | {"labels": [-100, *row["labels"][1:]]} for row in data]
    settings: dict[str, Any] = {
        "gradient_accumulation_steps": accumulation, "max_steps": 4, "optim": "sgd", "train_dataset": data
    }  # fmt: skip
    ours = trainer(tmp_path, first, objective="mle", **settings)
    plain = trainer(tmp_path, second, kind=transformers.Trainer, **settings)
    ours.train(), plain.train()
    assert logs(ours, "loss") == pytest.approx(logs(plain, "loss"), rel=1e-5)
    assert_same_weights(first, second, 1e-5)
    assert logs(ours, "nll") == pytest.approx(logs(ours, "loss"), rel=1e-5)


@pytest.mark.parametrize("weighted", [False, True])
def test_the_side_of_padding_changes_nothing(tmp_path: Path, weighted: bool) -> None:
    """The first token of a row has no context, on the right of padding either."""
    data: list[dict[str, Any]] = [row | {"labels": row["input_ids"]} for row in rows(9)]
    if weighted:
        data = [row | {"token_weight": [1.0 + i % 2 for i in range(len(row["labels"]))]} for row in data]

    def padded_left(items: list[Any]) -> dict[str, Tensor]:
        turned = pad_rows([{name: values[::-1] for name, values in item.items()} for item in items])
        return {name: columns.flip(-1) for name, columns in turned.items()}

    steps, evaluations = [], []
    for collator in (pad_rows, padded_left):
        settings: dict[str, Any] = {
            "train_dataset": data, "eval_dataset": data, "data_collator": collator, "gradient_accumulation_steps": 2,
            "cost": None,
        }  # fmt: skip
        model = tiny_model("llama")
        evaluations.append(trainer(tmp_path, model, objective="mle", **settings).evaluate()["eval_loss"])
        steps.append(one_step(tmp_path, model, "mle", **settings))
    assert evaluations[0] == pytest.approx(evaluations[1], rel=1e-5)
    torch.testing.assert_close(steps[0], steps[1], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_sequences_that_are_packed_in_a_row_do_not_see_each_other(tmp_path: Path, name: str) -> None:
    """Their positions begin again, which models look at only where a batch has no mask."""
    alone = [row | {"labels": [-100, *row["input_ids"][1:]]} for row in rows(8)]
    packed: list[dict[str, Any]] = []
    for start in range(0, 8, 2):
        pair = alone[start : start + 2]
        row = {key: [token for each in pair for token in each[key]] for key in ("input_ids", "labels")}
        row["position_ids"] = [place for each in pair for place in range(len(each["labels"]))]
        packed.append(row)
    found = []
    for data, size in ((alone, 8), (packed, 4)):
        model = tiny_model(name).eval()
        settings = {"train_dataset": data, "eval_dataset": data, "per_device_train_batch_size": size}
        loss = trainer(tmp_path, model, objective="mle", **settings).evaluate()["eval_loss"]
        found.append((torch.tensor(loss), one_step(tmp_path, model, "mle", **settings)))
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-5)
    with pytest.raises(ValueError, match=r"several sequences.* and an attention_mask, .*remove that column"):
        pad_rows([packed[0] | {"attention_mask": [1] * len(packed[0]["labels"])}])
    unsigned = packed[0] | {"position_ids": np.array(packed[0]["position_ids"], dtype=np.uint16)}
    assert "attention_mask" not in pad_rows([unsigned, alone[0] | {"position_ids": [*range(len(alone[0]["labels"]))]}])
    # Rows of one length have no mask either: batches of several processes need the same columns.
    ordinary = [row | {"position_ids": [*range(len(row["labels"]))]} for row in alone]
    assert "attention_mask" not in pad_rows(ordinary[:1])
    assert "attention_mask" in pad_rows(ordinary)  # models of experts count what is not padding
    padded = alone[0] | {"attention_mask": [0, 0, *[1] * (len(alone[0]["labels"]) - 2)]}
    padded["position_ids"] = [1, 1, *range(len(padded["labels"]) - 2)]  # as transformers has them
    assert pad_rows([padded])["attention_mask"].tolist() == [padded["attention_mask"]]


@pytest.mark.parametrize(
    "name", ["MambaForCausalLM", "BloomForCausalLM", "OPTForCausalLM", "RecurrentGemmaForCausalLM"]
)
def test_models_that_read_packed_sequences_as_one_raise(tmp_path: Path, name: str) -> None:
    """Of these forward passes only OPT's and RecurrentGemma's name position_ids; the others take them and read none."""
    sizes: dict[str, Any] = {
        "vocab_size": VOCAB, "hidden_size": 16, "num_hidden_layers": 3, "num_attention_heads": 2, "ffn_dim": 32,
        "intermediate_size": 32, "word_embed_proj_dim": 16, "max_position_embeddings": 64, "state_size": 4,
        "lru_width": 16,
    }  # fmt: skip
    kind = getattr(transformers, name)
    torch.manual_seed(0)
    model = kind(kind.config_class(**sizes, bos_token_id=0, eos_token_id=0, pad_token_id=0))
    alone = rows(4)
    row = alone[0]["input_ids"] + alone[1]["input_ids"]
    places = [*range(len(alone[0]["input_ids"])), *range(len(alone[1]["input_ids"]))]
    packed = {"input_ids": row, "labels": row, "position_ids": places}
    for data in ([packed], [alone[0] | {"position_ids": [*range(len(alone[0]["input_ids"]))]}, packed]):
        evaluation = trainer(tmp_path, model, objective="mle", eval_dataset=data, per_device_eval_batch_size=1)
        with pytest.raises(ValueError, match=rf"{name} \(model\) reads them as one.*packing_strategy"):
            evaluation.evaluate()
    trainer(tmp_path, model, objective="mle", eval_dataset=alone).evaluate()


@pytest.mark.parametrize("objective", ["mle", "number_token"])
def test_weights_of_tokens(tmp_path: Path, objective: str) -> None:
    """Weights of 0 and 1 are labels that are ignored, over accumulated batches; nll in logs is not weighted."""
    data = rows(8)
    weighted, ignored = [], []
    for row in data:
        weights = [float(i % 3 != 0) for i in range(len(row["labels"]))]
        weighted.append(row | {"token_weight": weights})
        labels = [label if weight else -100 for label, weight in zip(row["labels"], weights, strict=True)]
        ignored.append(row | {"labels": labels})

    models, metrics = [tiny_model("llama")], []
    models.append(copy.deepcopy(models[0]))
    values = torch.full((31,), torch.nan)
    values[3:13] = torch.arange(10.0)
    for model, chosen in zip(models, (weighted, ignored), strict=True):
        made = trainer(
            tmp_path, model, objective=objective, cost=NumberCost(values) if objective == "number_token" else None,
            train_dataset=chosen, eval_dataset=chosen, per_device_train_batch_size=2, gradient_accumulation_steps=2,
            optim="sgd",
        )  # fmt: skip
        made.train()
        metrics.append(made.evaluate())
    assert_same_weights(*models, 1e-5)
    assert metrics[0]["eval_loss"] == pytest.approx(metrics[1]["eval_loss"], rel=1e-5)
    assert metrics[0]["eval_nll"] != pytest.approx(metrics[1]["eval_nll"], rel=1e-5)
    made.data_collator = lambda batch: pad_rows(batch) | {"token_weight": torch.ones(len(batch))}
    with pytest.raises(ValueError, match=r"token_weight of the batch has shape \(2,\), the labels \(2, .*each token"):
        made.train()


class WithOwnLoaders(ObjectiveTrainer):
    def get_train_dataloader(self) -> Any:
        loader = DataLoader(self.train_dataset, batch_size=4, collate_fn=self.data_collator)
        return self.accelerator.prepare(loader)

    def get_eval_dataloader(self, eval_dataset: Any = None) -> Any:
        return self.accelerator.prepare(DataLoader(eval_dataset, batch_size=4, collate_fn=self.data_collator))


@pytest.mark.parametrize("kind", ["list", "Dataset", "Subset", "Stream", "generator", "own loaders"])
def test_weights_that_a_collator_drops_are_missed(tmp_path: Path, kind: str) -> None:
    """Also of rows that name no columns: a part of a data set, streams."""
    datasets = pytest.importorskip("datasets")

    class Stream(torch.utils.data.IterableDataset):
        def __init__(self, data: list[dict[str, Any]]) -> None:
            self.data = data

        def __iter__(self) -> Iterator[dict[str, Any]]:
            return iter(self.data)

    plain = rows(8)
    weighted = [row | {"token_weight": [1.0] * len(row["labels"])} for row in plain]
    make = {
        "list": list, "own loaders": list, "Dataset": datasets.Dataset.from_list, "Stream": Stream,
        "Subset": lambda data: torch.utils.data.Subset(data, range(len(data))),
        "generator": lambda data: datasets.IterableDataset.from_generator(lambda: iter(data)),
    }[kind]  # fmt: skip

    def without_weights(batch: list[dict[str, Any]]) -> dict[str, Tensor]:
        made = [dict(row) for row in batch] if kind == "own loaders" else batch  # rows of the data set itself
        _ = [row.pop("token_weight", None) for row in made]
        return {key: values for key, values in pad_rows(made).items() if key in ("input_ids", "labels")}

    settings: dict[str, Any] = {"cost": None, "data_collator": without_weights}
    model = tiny_model("llama")
    for train in (plain, weighted):
        made = trainer(
            tmp_path, model, WithOwnLoaders if kind == "own loaders" else ObjectiveTrainer, objective="mle",
            train_dataset=make(train), max_steps=1, **settings,
        )  # fmt: skip
        if train is weighted:
            with pytest.raises(ValueError, match="the rows have a column token_weight, and the batch only"):
                made.train()
        else:
            made.train()
        made.evaluate(make(plain))
        with pytest.raises(ValueError, match="the rows have a column token_weight, and the batch only"):
            made.evaluate(make(weighted))


def test_rows_of_unequal_lengths_are_padded(tmp_path: Path) -> None:
    """Without a collator, as a list and as a data set."""
    datasets = pytest.importorskip("datasets")
    data = rows(5)
    for given in (data, datasets.Dataset.from_list(data)):
        made = ObjectiveTrainer(tiny_model("llama"), arguments(tmp_path), objective="mle", eval_dataset=given)
        expected = by_hand(made.model, data, MLE(), EmbeddingCost(torch.eye(VOCAB)))
        assert made.evaluate()["eval_loss"] == pytest.approx(expected["loss"], rel=1e-5)


@pytest.mark.parametrize(
    ("name", "objective", "counts"),
    [("llama", "emo", True), ("gpt2", "emo:transport", False), ("llama", "power:2", False), ("llama", "eaft", True)],
)
def test_accumulation_equals_one_large_batch(tmp_path: Path, name: str, objective: str, counts: bool) -> None:
    """4 x 2 rows with unequal numbers of labels = 1 x 8, and both = the mean over predicted tokens by hand.

    Models that take no count of tokens (Gemma 3, Qwen2-VL) have their loss divided by the number of batches otherwise.
    """
    model = tiny_model(name).eval()
    model.accepts_loss_kwargs = counts  # type: ignore[assignment]
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    data = rows(8)
    large = one_step(tmp_path, copy.deepcopy(model), objective, per_device_train_batch_size=8, train_dataset=data)
    small = one_step(
        tmp_path, copy.deepcopy(model), objective,
        per_device_train_batch_size=2, gradient_accumulation_steps=4, train_dataset=data,
    )  # fmt: skip
    for made in (large, small):
        assert_gradients_by_hand(made, model, data, parse_objective(objective))


def assert_gradients_by_hand(made: dict[str, Tensor], model: Any, data: list[Row], objective: Any) -> None:
    """`made` is the gradient of the loss of the model's own logits, and 0 where nothing is trained."""
    batch, cost = pad_rows(data), EmbeddingCost.from_model(model, directions=None)
    logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits[:, :-1]
    model.zero_grad()
    token_loss(logits, batch["labels"][:, 1:], objective=objective, cost=cost).loss.backward()
    for key, parameter in model.named_parameters():
        expected = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        assert (parameter.grad is not None) == parameter.requires_grad
        tolerance = 1e-4 * float(expected.abs().max()) + 1e-6
        torch.testing.assert_close(made[key], expected, rtol=1e-3, atol=tolerance)


class Stream(IterableDataset):
    def __iter__(self) -> Iterator[Row]:
        return iter(rows(8))


@pytest.mark.parametrize("way", ["frozen head", "checkpointed", "lora", "lora, checkpointed", "streamed"])
def test_ways_to_train_have_the_gradient_of_the_logits(tmp_path: Path, way: str) -> None:
    model: Any = tiny_model("llama")
    if way == "frozen head":
        model.lm_head.weight.requires_grad_(False)
    elif way.startswith("lora"):
        model = lora(model, target_modules=["q_proj", "up_proj"])
    made = one_step(
        tmp_path, copy.deepcopy(model), "emo", train_dataset=Stream() if way == "streamed" else rows(8),
        per_device_train_batch_size=8, gradient_checkpointing="checkpointed" in way,
    )  # fmt: skip
    assert_gradients_by_hand(made, model.eval(), rows(8), EMO())


@pytest.mark.parametrize(("size", "said"), [(4, 0), (2, 1)])
def test_a_stream_that_ends_within_a_step_is_named(
    tmp_path: Path, size: int, said: int, caplog: pytest.LogCaptureFixture
) -> None:
    """The trainer keeps the gradients of its last batches for the next step."""
    made = trainer(
        tmp_path, tiny_model("llama"), objective="mle", train_dataset=Stream(), per_device_train_batch_size=size,
        gradient_accumulation_steps=2 if size == 4 else 3, max_steps=3,
    )  # fmt: skip
    made.train()
    assert caplog.text.count("the rows ended after 1 of the 3 batches of a step") == said
    assert (logs(made, "loss") == pytest.approx(logs(made, "nll"), rel=1e-5)) == (not said)


def test_a_batch_of_ignored_labels_changes_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = tiny_model("llama")
    alone = one_step(tmp_path, copy.deepcopy(model), "emo", train_dataset=rows(4))
    data = [{"input_ids": [3, 4, 5, 6], "labels": [-100] * 4}] * 4
    made = trainer(
        tmp_path, copy.deepcopy(model), objective="emo", train_dataset=data * 2 + rows(4), max_steps=3, optim="sgd",
        learning_rate=1.0, train_sampling_strategy="sequential",
    )  # fmt: skip
    made.train()
    assert caplog.text.count("no token of this step is labelled") == 1
    assert logs(made, "loss")[:2] == [0.0, 0.0]
    changed = {name: weight - weights(made.model)[name] for name, weight in weights(model).items()}
    torch.testing.assert_close(changed, alone, rtol=1e-4, atol=1e-6)
    # Beside others in the accumulated batch it adds nothing.
    both = one_step(tmp_path, copy.deepcopy(model), "emo", train_dataset=rows(4) + data, per_device_train_batch_size=8)
    torch.testing.assert_close(both, alone, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("without", ["labels", "weight"])
def test_a_run_without_a_label_raises(tmp_path: Path, without: str) -> None:
    labels, weight = ([-100] * 4, 1.0) if without == "labels" else ([3, 4, 5, 6], 0.0)
    data = [{"input_ids": [3, 4, 5, 6], "labels": labels, "token_weight": [weight] * 4}] * 4
    made = trainer(
        tmp_path, tiny_model("llama"), objective="emo", train_dataset=data, eval_dataset=data, max_steps=2,
        save_strategy="steps", save_steps=2,
    )  # fmt: skip
    for call, what in ((made.train, "training"), (made.evaluate, "evaluation")):
        with pytest.raises(ValueError, match=f"no token of the {what} is labelled: .*expected at least one"):
            call()
    assert not list(tmp_path.glob("checkpoint-*"))
    predicted = made.predict(data)
    assert predicted.predictions.shape[:2] == (4, 4)
    assert "test_loss" not in predicted.metrics


@pytest.mark.parametrize("steps", [1, 4])
def test_training_logs_are_means_over_tokens(tmp_path: Path, steps: int) -> None:
    """With a learning rate of 0 the logs are statistics of the data."""
    model = tiny_model("llama")
    run = trainer(tmp_path, model, objective="emo", learning_rate=0.0, max_steps=4, logging_steps=steps,
                  per_device_train_batch_size=2, gradient_accumulation_steps=3)  # fmt: skip
    run.train()
    assert len(logs(run, "nll")) == 4 // steps
    if steps == 4:  # all 24 rows once
        expected = by_hand(model, rows(24), EMO(), run.transport_cost)
        assert logs(run, "nll")[0] == pytest.approx(expected["nll"], rel=1e-5)
        assert logs(run, "transport_cost")[0] == pytest.approx(expected["transport_cost"], rel=1e-5)


def test_an_objective_with_values_in_float64(tmp_path: Path) -> None:
    model = tiny_model("llama")
    run = trainer(tmp_path, model, objective=lambda nll: 2 * nll.double(), cost=None)
    plain = trainer(tmp_path, model, objective="mle").evaluate()
    assert run.evaluate()["eval_loss"] == pytest.approx(2 * plain["eval_loss"], rel=1e-6)
    run.train()


def test_evaluations_may_record_gradients_and_an_old_attribute_is_named(tmp_path: Path) -> None:
    class Recording(ObjectiveTrainer):
        def prediction_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            return self.compute_loss(model, self._prepare_inputs(inputs)).detach(), None, None

    model = tiny_model("llama")
    plain, recording = (trainer(tmp_path, model, kind).evaluate() for kind in (ObjectiveTrainer, Recording))
    for key in ("eval_loss", "eval_nll", "eval_transport_cost"):
        assert plain[key] == pytest.approx(recording[key], rel=1e-5)
    run = trainer(tmp_path, model)
    with pytest.raises(ValueError, match=r"trainer.objective was set to MLE\(\); .*training_objective"):
        run.objective = MLE()
    with pytest.raises(AttributeError, match="it is training_objective"):
        _ = run.objective
    run.objective = 0.5  # as a search does
    assert run.objective == 0.5


@pytest.mark.parametrize("objective", ["mle", "emo"])
def test_what_a_compute_loss_adds_is_in_the_loss_of_evaluations(tmp_path: Path, objective: str) -> None:
    class Doubled(ObjectiveTrainer):
        def compute_loss(self, *args: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
            super().compute_loss(*args, **kwargs)  # as another pass over changed inputs
            loss, outputs = super().compute_loss(*args, return_outputs=True, **kwargs)
            return (2 * loss, outputs) if return_outputs else 2 * loss

    model, found = tiny_model("llama"), []
    plain, doubled = (trainer(tmp_path, model, kind, objective=objective) for kind in (ObjectiveTrainer, Doubled))
    for run in (plain, doubled):
        found.append(run.evaluate())
        assert run.predict(rows(5)).metrics["test_loss"] > 0
    assert found[1]["eval_loss"] == pytest.approx(2 * found[0]["eval_loss"], rel=1e-5)
    assert found[1]["eval_nll"] == pytest.approx(found[0]["eval_nll"], rel=1e-5)
    own = plain.compute_loss

    def doubled_later(*args: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
        loss, outputs = own(*args, return_outputs=True, **kwargs)
        return (2 * loss, outputs) if return_outputs else 2 * loss

    plain.compute_loss = doubled_later
    assert plain.evaluate()["eval_loss"] == pytest.approx(found[1]["eval_loss"], rel=1e-5)


def test_an_evaluation_may_begin_within_another(tmp_path: Path) -> None:
    model, other, inner = tiny_model("llama"), rows(8, seed=5), []

    def metrics(_: Any) -> dict[str, float]:
        if not inner:
            inner.append({})  # which ends the recursion
            inner[0] = run.evaluate(other, metric_key_prefix="inner")
        return {}

    run = trainer(tmp_path, model, objective="mle", compute_metrics=metrics)
    outer, alone = run.evaluate(), trainer(tmp_path, model, objective="mle")
    for key in ("loss", "nll"):
        assert outer[f"eval_{key}"] == pytest.approx(alone.evaluate()[f"eval_{key}"], rel=1e-6)
        assert inner[0][f"inner_{key}"] == pytest.approx(alone.evaluate(other)[f"eval_{key}"], rel=1e-6)


def test_a_prediction_step_of_the_user_decides_the_loss_of_evaluations(tmp_path: Path) -> None:
    class Tripled(ObjectiveTrainer):
        def prediction_step(self, *args: Any, **kwargs: Any) -> Any:
            loss, *others = super().prediction_step(*args, **kwargs)
            return 3 * loss, *others

        def evaluation_loop(self, dataloader: Any, description: str, *args: Any, **kwargs: Any) -> Any:
            return super().evaluation_loop(dataloader, description, True, None, kwargs["metric_key_prefix"])

    model = tiny_model("llama")
    plain, tripled = (trainer(tmp_path, model, kind, objective="mle") for kind in (ObjectiveTrainer, Tripled))
    torch.set_default_dtype(torch.bfloat16)
    try:
        found = [run.evaluate() for run in (plain, tripled)]
    finally:
        torch.set_default_dtype(torch.float32)
    assert found[1]["eval_loss"] == pytest.approx(3 * found[0]["eval_loss"], rel=1e-5)
    assert found[1]["eval_nll"] == found[0]["eval_nll"]
    assert "prediction_step" not in vars(tripled)


def test_a_loss_of_parts_of_a_batch_is_the_loss_of_evaluations(tmp_path: Path) -> None:
    class Parts(ObjectiveTrainer):
        def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
            compute_loss, parts = super().compute_loss, (slice(1), slice(1, None))
            self.losses = [compute_loss(model, {name: batch[part] for name, batch in inputs.items()}) for part in parts]
            return (sum(self.losses), {"loss": sum(self.losses)}) if return_outputs else sum(self.losses)

    batch = rows(2)
    batch[0]["labels"] = [-100] * 4 + batch[0]["labels"][4:]
    run = trainer(tmp_path, tiny_model("llama"), Parts, objective="mle")
    assert run.evaluate(batch)["eval_loss"] == pytest.approx(float(sum(run.losses)), rel=1e-5)


class Watching(ObjectiveTrainer):
    """Scores a teacher, other rows and the model without its adapters, before or after the batch."""

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
        loss = super().compute_loss(model, inputs, **kwargs) if self.batch_first else None
        others = inputs | {name: inputs[name].flip(-1) for name in ("input_ids", "labels")}  # of as many tokens
        with torch.no_grad():
            self.of_teacher = super().compute_loss(self.teacher, tiny_batch(3, rows=1))
            watched = [super().compute_loss(self.teacher, inputs), super().compute_loss(model, others)]
            with model.disable_adapter():
                watched.append(super().compute_loss(model, inputs))
        if loss is None:
            loss = super().compute_loss(model, inputs, **kwargs)
        loss = (1 - self.share) * loss + self.share * sum(watched) / 3
        return (loss, {"loss": loss}) if return_outputs else loss


@pytest.mark.parametrize("objective", ["mle", "emo"])
@pytest.mark.parametrize(("batch_first", "accumulated"), [(True, 4), (False, 4), (False, 1)])
def test_a_compute_loss_may_score_other_models_and_rows(
    tmp_path: Path, batch_first: bool, accumulated: int, objective: str
) -> None:
    found = []
    for kind, share in ((ObjectiveTrainer, 0.0), (Watching, 0.0), (Watching, 0.9)):
        run = trainer(
            tmp_path, lora(tiny_model("llama"), target_modules=["q_proj"]), kind, objective=objective, max_steps=1,
            per_device_train_batch_size=2, gradient_accumulation_steps=accumulated, logging_steps=1, learning_rate=0.0,
        )  # fmt: skip
        run.teacher, run.batch_first, run.share = tiny_model("gemma2").eval(), batch_first, share  # with a soft cap
        run.train()
        found.append([logs(run, "nll")[0], run.evaluate()["eval_nll"], logs(run, "loss")[0], logs(run, "grad_norm")[0]])
    assert found[1] == pytest.approx(found[0], rel=1e-5)
    assert found[2][:2] == pytest.approx(found[0][:2], rel=1e-5)
    if objective == "mle":
        with torch.no_grad():
            expected = float(run.teacher(**tiny_batch(3, rows=1)).loss)
        assert float(run.of_teacher) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_of_a_batch_in_parts_and_other_rows_the_parts_are_the_batch(tmp_path: Path, order: tuple[int, ...]) -> None:
    class Parts(ObjectiveTrainer):
        def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
            half = len(inputs["labels"]) // 2
            parts = [{name: t[part] for name, t in inputs.items()} for part in (slice(half), slice(half, None))]
            widths = [int(part["attention_mask"].sum(-1).max()) for part in parts]
            parts = [
                {name: t[:, :width] for name, t in part.items()} for part, width in zip(parts, widths, strict=True)
            ]
            losses = [super(Parts, self).compute_loss(model, [*parts, tiny_batch(5)][i]) for i in order]
            return (sum(losses), {"loss": sum(losses)}) if return_outputs else sum(losses)

    model = tiny_model("llama")
    plain, parts = (trainer(tmp_path, model, kind, objective="mle") for kind in (ObjectiveTrainer, Parts))
    assert parts.evaluate(rows(8))["eval_nll"] == pytest.approx(plain.evaluate(rows(8))["eval_nll"], rel=1e-5)


@pytest.mark.parametrize("objective", ["mle", "emo"])
def test_parts_that_are_divided_by_the_count_of_the_batch_add_up_in_evaluations_too(
    tmp_path: Path, objective: str
) -> None:
    class Parts(ObjectiveTrainer):
        def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
            parts = [{name: t[i : i + 1] for name, t in inputs.items()} for i in range(len(inputs["labels"]))]
            loss = sum(super(Parts, self).compute_loss(model, part, **kwargs) for part in parts)
            return (loss, {"loss": loss}) if return_outputs else loss

    data = rows(8)
    for row in data[::2]:
        row["labels"] = [-100] * 4 + row["labels"][4:]
    model = tiny_model("llama")
    plain, parts = (trainer(tmp_path, model, kind, objective=objective) for kind in (ObjectiveTrainer, Parts))
    expected = {k: v for k, v in plain.evaluate(data).items() if k in ("eval_loss", "eval_nll")}
    assert {k: v for k, v in parts.evaluate(data).items() if k in expected} == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("share", ["own count", "count of others"])
def test_a_count_of_the_users_own_divides_evaluations_as_it_divides_training(tmp_path: Path, share: str) -> None:
    class Rated(ObjectiveTrainer):
        """The mean of the means of rows; or the later half of the labels over all of them."""

        def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
            parts, labels = [inputs], inputs["labels"]
            if share == "own count":
                parts = [{name: t[i : i + 1] for name, t in inputs.items()} for i in range(len(labels))]
                counts = [int((part["labels"][:, 1:] != -100).sum()) * len(parts) for part in parts]
            else:
                counts = [int((labels[:, 1:] != -100).sum())]
                parts = [inputs | {"labels": labels.masked_fill(torch.arange(labels.shape[1]) < 5, -100)}]
            loss = sum(
                super(Rated, self).compute_loss(model, part, num_items_in_batch=torch.tensor(count))
                for part, count in zip(parts, counts, strict=True)
            )
            return (loss, {"loss": loss}) if return_outputs else loss

    settings = {"max_steps": 1, "per_device_train_batch_size": 8, "learning_rate": 0.0}
    run = trainer(tmp_path, tiny_model("llama"), Rated, objective="mle", train_dataset=rows(8), **settings)
    run.train()
    run.args.per_device_eval_batch_size = 8
    assert run.evaluate(rows(8))["eval_loss"] == pytest.approx(logs(run, "loss")[0], rel=1e-5)


@pytest.mark.parametrize("hint_first", [True, False])
def test_of_passes_with_the_same_labels_the_one_that_reads_the_batch_counts(tmp_path: Path, hint_first: bool) -> None:
    """Context distillation: the model reads the rows behind a hint, too."""

    class Distilled(ObjectiveTrainer):
        def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
            fills = {"input_ids": 5, "attention_mask": 1, "labels": -100}
            hinted = {name: nn.functional.pad(inputs[name], (3, 0), value=fill) for name, fill in fills.items()}
            batches = [hinted, inputs] if hint_first else [inputs, hinted]
            loss = sum(super(Distilled, self).compute_loss(model, batch, **kwargs) for batch in batches)
            return (loss, {"loss": loss}) if return_outputs else loss

    found = []
    for kind in (ObjectiveTrainer, Distilled):
        run = trainer(tmp_path, tiny_model("llama"), kind, objective="mle", max_steps=1, learning_rate=0.0)
        run.train()
        found.append([run.evaluate()["eval_nll"], logs(run, "nll")[0]])
    assert found[1] == pytest.approx(found[0], rel=1e-5)


def test_evaluations_of_other_models_measure_the_cost(tmp_path: Path) -> None:
    """The model without its adapters is what others are compared with; averages of weights choose checkpoints."""
    model = lora(tiny_model("llama"), target_modules=["q_proj"])
    run, plain = (trainer(tmp_path, one, objective="mle") for one in (model, tiny_model("llama")))
    expected = plain.evaluate()["eval_transport_cost"]
    with model.disable_adapter():
        assert run.evaluate()["eval_transport_cost"] == pytest.approx(expected, rel=1e-5)
    adapted = run.evaluate()["eval_transport_cost"]
    run.prediction_step = lambda _, *args, **kwargs: ObjectiveTrainer.prediction_step(run, model, *args, **kwargs)
    assert run.evaluate()["eval_transport_cost"] == pytest.approx(adapted) != pytest.approx(expected, rel=1e-5)
    run.prediction_step = lambda _, *args, **kwargs: ObjectiveTrainer.prediction_step(
        run, copy.deepcopy(plain.model), *args, **kwargs
    )
    assert run.evaluate()["eval_transport_cost"] == pytest.approx(expected, rel=1e-5)


def test_transforms_are_pickled_without_their_models(tmp_path: Path) -> None:
    """A search of hyperparameters hands the trainer to its workers."""
    run = trainer(tmp_path, tiny_model("llama"), objective="mle")
    run.evaluate(rows(2))
    assert len(pickle.loads(pickle.dumps(run._transforms))) == 0


def test_a_teacher_may_be_a_mixture_of_experts_over_another_vocabulary(tmp_path: Path) -> None:
    class Distilled(ObjectiveTrainer):
        def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            with torch.no_grad():
                self.of_teacher = float(super().compute_loss(self.teacher, inputs))
            return super().compute_loss(model, inputs, *args, **kwargs)

    run = trainer(tmp_path, tiny_model("llama"), Distilled, objective="mle", max_steps=1)
    experts = {"num_local_experts": 2, "output_router_logits": True, "router_aux_loss_coef": 0.5}
    run.teacher = build("Mixtral", TINY["llama"][1] | {"vocab_size": VOCAB + 5} | experts).eval()
    batch = tiny_batch(1)
    with torch.no_grad():
        run.compute_loss(run.model, dict(batch))
        assert run.of_teacher == pytest.approx(float(run.teacher(**batch).loss), rel=1e-5)
    run.train()


def test_evaluations_count_weights_of_tokens_as_training_does(tmp_path: Path) -> None:
    class Own(ObjectiveTrainer):
        def compute_loss(self, *args: Any, num_items_in_batch: Any = None, **kwargs: Any) -> Any:
            self.counts.append(float(num_items_in_batch))
            return super().compute_loss(*args, num_items_in_batch=num_items_in_batch, **kwargs)

    weighted = [row | {"token_weight": [0.5] * len(row["labels"])} for row in rows(4)]
    run = trainer(tmp_path, tiny_model("llama"), Own, train_dataset=weighted, per_device_eval_batch_size=4)
    run.counts = []
    run.train()
    run.evaluate(weighted)
    assert (
        run.counts[0] == run.counts[-1] == 0.5 * sum(label != -100 for row in weighted for label in row["labels"][1:])
    )


def test_a_model_may_be_trained_in_eval_mode(tmp_path: Path) -> None:
    found = []
    for stays in (False, True):
        model = tiny_model("llama")
        if stays:
            model.eval()
            model.train = lambda mode=True, model=model: model  # type: ignore[method-assign]
        run = trainer(tmp_path, model, objective="emo", per_device_train_batch_size=1, gradient_accumulation_steps=4)
        run.train()
        found.append([logs(run, key) for key in ("loss", "nll", "transport_cost")])
    assert found[0] == found[1]


def test_a_second_training_logs_nothing_of_the_first(tmp_path: Path) -> None:
    run = trainer(tmp_path, tiny_model("llama"), objective="mle", learning_rate=0.0, max_steps=3, logging_steps=2)
    found = []
    for _ in range(2):
        run.train()
        found.append(logs(run, "nll"))
    assert found[0] == found[1]


@pytest.mark.parametrize(
    ("name", "objective"), [("llama", MLE()), ("gpt2", EMO()), ("gemma2", EMO(0.5)), ("llama", TaiLr(0.5))], ids=str
)
def test_evaluation_is_weighted_by_tokens(tmp_path: Path, name: str, objective: Any) -> None:
    """11 rows in batches of 3, 3, 3 and 2, padded, with unequal numbers of labels; predictions are real logits."""
    seen: list[Any] = []

    def metrics(prediction: Any) -> dict[str, float]:
        seen.append(prediction)
        return {"rows": float(len(prediction.predictions))}

    model, data = tiny_model(name), rows(11, seed=1)
    run = trainer(tmp_path, model, objective=objective)
    expected = by_hand(model, data, objective, run.transport_cost)
    with_logits = trainer(tmp_path, model, objective=objective, compute_metrics=metrics)
    predicted = with_logits.predict(data)
    made = {"eval": run.evaluate(), "valid": run.evaluate(metric_key_prefix="valid"), "test": predicted.metrics}
    for prefix, given in made.items():
        for key, value in expected.items():
            assert given[f"{prefix}_{key}"] == pytest.approx(value, rel=1e-4), key
    assert predicted.metrics["test_rows"] == 11
    with_logits.compute_metrics = lambda _: {"perplexity": 123.0, "loss": 8.0}
    measured = with_logits.evaluate()
    assert measured["eval_perplexity"] == 123.0, "of the user's own name"
    assert measured["eval_loss"] == pytest.approx(expected["loss"], rel=1e-4)
    batch = pad_rows(data)
    mask = batch["attention_mask"].bool()
    with torch.no_grad():
        logits = model.eval()(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
    for predictions in (seen[0].predictions, predicted.predictions):
        torch.testing.assert_close(torch.tensor(predictions)[mask], logits[mask], rtol=1e-4, atol=1e-4)
    assert (predicted.label_ids == batch["labels"].numpy()).all()


def shifted(key: str, keep_labels: bool = False) -> Any:
    """A collator whose labels are the tokens that positions predict, under this name."""

    def collate(data: list[Row]) -> dict[str, Tensor]:
        batch = pad_rows(data)
        labels = batch["labels"] if keep_labels else batch.pop("labels")
        return batch | {key: nn.functional.pad(labels[:, 1:], (0, 1), value=-100)}

    return collate


@pytest.mark.parametrize("keep_labels", [False, True])
def test_shifted_labels_in_the_batch(tmp_path: Path, keep_labels: bool) -> None:
    """`shift_labels` are aligned already; they win over labels, in training and evaluation."""
    first = tiny_model("llama")
    second = copy.deepcopy(first)
    collate = shifted("shift_labels", keep_labels)
    run = trainer(tmp_path, first, objective="emo", remove_unused_columns=False, data_collator=collate)
    ordinary = trainer(tmp_path, second, objective="emo")
    metrics = run.evaluate()
    for key, value in ordinary.evaluate().items():
        if key.startswith(("eval_loss", "eval_nll", "eval_transport", "eval_perplexity")):
            assert metrics[key] == pytest.approx(value, rel=1e-6)
    run.train(), ordinary.train()
    assert_same_weights(first, second)


# ---- subclasses, several models, checkpoints ------------------------------------------------------------------------


class WithHiddenStates(ObjectiveMixin, transformers.Trainer):
    """Adds a penalty of the last hidden states, and keeps what it was given."""

    skip_logits = False

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        inputs = inputs | {"output_hidden_states": True, "skip_logits": self.skip_logits}
        loss, self.outputs = super().compute_loss(
            model, inputs, return_outputs=True, num_items_in_batch=num_items_in_batch
        )
        loss = loss + 0.1 * self.outputs.hidden_states[-1].square().mean()
        return (loss, self.outputs) if return_outputs else loss


@pytest.mark.parametrize("skip_logits", [False, True])
def test_a_subclass_gets_the_outputs_that_it_asks_for(tmp_path: Path, skip_logits: bool) -> None:
    """By position, as the trainer beside it: with logits unless they are left out, hidden states with their graph."""
    model, data = tiny_model("llama"), rows(4)
    batch = pad_rows(data)
    run = WithHiddenStates(model, arguments(tmp_path), pad_rows, data, data, objective="emo")
    run.skip_logits = skip_logits
    own = model(batch["input_ids"], attention_mask=batch["attention_mask"], output_hidden_states=True)
    scored = token_loss(own.logits[:, :-1], batch["labels"][:, 1:], objective=EMO(), cost=run.transport_cost)
    expected = scored.loss + 0.1 * own.hidden_states[-1].square().mean()
    expected.backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    loss, outputs = run.compute_loss(model, dict(batch), return_outputs=True)
    loss.backward()
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=0)
    for name, gradient in gradients.items():
        torch.testing.assert_close(model.get_parameter(name).grad, gradient, rtol=1e-3, atol=1e-6)
    assert type(outputs) is type(own)
    torch.testing.assert_close(outputs.hidden_states[-1], own.hidden_states[-1])
    assert (outputs.logits is None) == skip_logits
    run.outputs = None
    run.evaluate()  # where the trainer itself would use the loss alone
    assert (run.outputs.logits is None) == skip_logits
    assert run.outputs.hidden_states is not None


def test_trainers_that_cannot_have_an_objective_raise_where_they_are_written() -> None:
    class Penalised(transformers.Trainer):
        def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
            return super().compute_loss(*args, **kwargs) + 1

    with pytest.raises(TypeError, match=r"Penalised has a loss of its own \(compute_loss\).*belongs into Mixed itself"):
        type("Mixed", (ObjectiveMixin, Penalised), {})
    PenalisedSFTTrainer = type("PenalisedSFTTrainer", (Penalised,), {"compute_loss": Penalised.compute_loss})
    with pytest.raises(TypeError, match=r"PenalisedSFTTrainer has a loss of its own"):
        type("Mixed", (ObjectiveMixin, PenalisedSFTTrainer), {})
    with pytest.raises(TypeError, match=r"put it first: class Mixed\(ObjectiveMixin, Trainer\)"):
        type("Mixed", (transformers.Trainer, ObjectiveMixin), {})


def test_each_model_of_model_init_has_its_own_cost(tmp_path: Path) -> None:
    """The transform of its logits too."""
    caps = iter([3.0, 2.0])
    seeds = iter([1, 2])
    run = ObjectiveTrainer(
        None, arguments(tmp_path), pad_rows, rows(8), rows(4), None,
        lambda: tiny_model("gemma2", seed=next(seeds), final_logit_softcapping=next(caps)), objective="emo",
    )  # fmt: skip
    for seed in (1, 2):
        first = tiny_model("gemma2", seed=seed)
        expected = EmbeddingCost.from_model(first, directions=None).rows(torch.arange(VOCAB))
        assert isinstance(run.transport_cost, EmbeddingCost)
        torch.testing.assert_close(run.transport_cost.rows(torch.arange(VOCAB)), expected)
        assert run.evaluate()["eval_transport_cost"] > 0
        if seed == 1:
            run.train()


def test_a_search_of_hyperparameters_minimises_the_loss(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A backend writes what is minimised into `trainer.objective`."""
    found: list[float] = []

    class Backend:
        default_hp_space = None

        def ensure_available(self) -> None: ...

        def run(self, searched: Any, n_trials: int, direction: str) -> None:
            for rate in (1e-4, 1e-2)[:n_trials]:
                searched.objective, searched.args.learning_rate = None, rate
                searched.train()
                searched.objective = searched.compute_objective(searched.evaluate())
                found.append(searched.objective)

    monkeypatch.setitem(transformers.trainer.ALL_HYPERPARAMETER_SEARCH_BACKENDS, HPSearchBackend.WANDB, Backend)
    losses = []
    for rate in (1e-4, 1e-2):
        run = trainer(tmp_path, tiny_model("llama"), learning_rate=rate)
        run.train()
        losses.append(run.evaluate()["eval_loss"])
    own = {"compute_metrics": lambda _: {"rank": 3.0, "error": 0.5}}
    for settings, expected in (({}, losses), (own, [3.5, 3.5])):
        run = ObjectiveTrainer(
            None, arguments(tmp_path), pad_rows, rows(24), rows(11, seed=1), model_init=lambda: tiny_model("llama"),
            **settings,
        )  # fmt: skip
        found.clear()
        run.hyperparameter_search(n_trials=2, backend="wandb")
        assert found == pytest.approx(expected, rel=1e-5)
    with_names = {"eval_a_loss": 2.0, "eval_a_nll": 9.0, "eval_b_loss": 3.0, "eval_b_perplexity": 9.0, "epoch": 1.0}
    assert search_objective(with_names, rows={"a": [], "b": []}) == 5.0


def test_a_run_resumes_with_the_cost_that_it_began_with(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"objective": "emo", "max_steps": 4, "save_strategy": "steps", "save_steps": 2}
    whole = trainer(tmp_path, tiny_model("llama"), **settings)
    whole.train()
    half = tmp_path / "checkpoint-2"
    from_start = trainer(tmp_path, tiny_model("llama"), **settings)
    from_start.train(resume_from_checkpoint=str(half))
    assert_same_weights(from_start.model, whole.model)
    from_checkpoint = transformers.LlamaForCausalLM.from_pretrained(half)
    resumed = trainer(tmp_path, from_checkpoint, **settings)
    with pytest.raises(
        ValueError, match=r"cost differs by 0\..*checkpoint-2.*Give it the model that the run began with"
    ):
        resumed.train(resume_from_checkpoint=str(half))
    given = trainer(tmp_path, from_checkpoint, cost=whole.transport_cost, **settings)
    given.train(resume_from_checkpoint=str(half))
    assert_same_weights(given.model, whole.model)
    with pytest.raises(ValueError, match=r"cost is None, and the run .*checkpoint-2.*31 of its tokens"):
        trainer(tmp_path, tiny_model("llama"), **settings | {"objective": "mle"}, cost=None).train(
            resume_from_checkpoint=str(half)
        )


def test_a_checkpoint_knows_costs_of_every_kind(tmp_path: Path) -> None:
    torch.manual_seed(0)
    values = torch.arange(float(VOCAB)).masked_fill(torch.arange(VOCAB) % 2 == 0, math.nan)
    costs: list[Any] = [
        None,
        *(DenseCost(torch.rand(VOCAB, VOCAB)) for _ in range(2)),
        EmbeddingCost(torch.rand(VOCAB, 3)),
    ]
    costs += [NumberCost(values), NumberCost(values * 1.1), RatingCost(values)]
    check_sample(costs[1], tmp_path)  # a checkpoint of another trainer holds no sample
    for before in costs:
        save_sample(before, tmp_path)
        for now in costs:
            if now is before:
                check_sample(now, tmp_path)
                continue
            with pytest.raises(ValueError, match=r"the transport cost (differs by|is) .*cost"):
                check_sample(now, tmp_path)


def test_repeated_examples_are_left_out() -> None:
    """Two processes of 2 examples: of 5 the second process has repeated ones in the last batch, the first has one."""

    def labels(process: int, batch: Tensor, places: Any, row: Row, **state: Any) -> list[int]:
        loader = SimpleNamespace(dataset=[row] * 5)
        gradient_state = {"remainder": 1, "end_of_dataloader": True, "active_dataloader": loader} | state
        accelerator = SimpleNamespace(
            num_processes=2,
            process_index=process,
            gradient_state=SimpleNamespace(**gradient_state),
            split_batches=False,
        )
        run = SimpleNamespace(
            accelerator=accelerator, args=SimpleNamespace(eval_batch_size=2), _ranks_per_batch=lambda: 1,
            _evaluation=None,
        )  # fmt: skip
        given = {"labels": batch, "shift_labels": batch.clone()} | ({} if places is None else {"position_ids": places})
        kept = ObjectiveMixin._without_repeated(run, given)  # type: ignore[arg-type]
        assert torch.equal(kept["labels"], kept["shift_labels"])
        return [label for label in kept["labels"].flatten().tolist() if label >= 0]

    flat, places = torch.tensor([[4, 5, -100, 6, -100]]), torch.tensor([[0, 1, 2, 0, 1]])
    packed: Row = {"input_ids": [4, 5], "seq_lengths": [1, 1]}
    kinds: list[tuple[Tensor, Any, Row]] = [
        (flat, places, {"input_ids": [4, 5, 6]}), (flat, places + 2, {"input_ids": [4, 5, 6]}),
        (flat.view(5, 1)[:2], None, {}),
        (flat, torch.tensor([[0, 0, 0, 1, 2]]), packed),
    ]  # fmt: skip
    for (batch, position_ids, row), first in zip(kinds, ([4, 5], [4, 5], [4], [4, 5]), strict=True):
        assert (labels(0, batch, position_ids, row), labels(1, batch, position_ids, row)) == (first, [])
        for state in ({"remainder": 0}, {"end_of_dataloader": False}, {"remainder": 4}):
            assert labels(1, batch, position_ids, row, **state) == batch[batch >= 0].tolist()


def test_a_metric_that_no_evaluation_has_raises_before_the_first_step(tmp_path: Path) -> None:
    """A loss of experts without experts, entropy without TRL's metrics, a cost that does not exist."""
    settings: dict[str, Any] = {"objective": "mle", "eval_strategy": "steps", "eval_steps": 1, "max_steps": 1}
    for name in ("eval_aux_loss", "entropy", "transport_cost"):
        run = trainer(tmp_path, tiny_model("llama"), cost=None, metric_for_best_model=name, **settings)
        before = weights(run.model)
        with pytest.raises(
            ValueError, match=rf"is '{name}', which .* does not have; take one of loss, perplexity, nll\."
        ):
            run.train()
        assert all(torch.equal(before[key], weight) for key, weight in weights(run.model).items())
        given = {"compute_metrics": lambda _: {name.removeprefix("eval_"): 1.0}}  # noqa: B023
        trainer(tmp_path, tiny_model("llama"), cost=None, metric_for_best_model=name, **settings, **given).train()
    run = trainer(tmp_path, tiny_model("llama"), metric_for_best_model="transport_cost", **settings)
    run.train()  # which its objective does not read
    assert run.state.best_metric == min(logs(run, "eval_transport_cost"))
    values = torch.arange(float(VOCAB)).masked_fill(torch.arange(VOCAB) > 9, math.nan)
    words = [{"input_ids": [11, 12, 13], "labels": [11, 12, 13]}]
    run = trainer(
        tmp_path, tiny_model("llama"), metric_for_best_model="transport_cost", cost=NumberCost(values),
        **settings | {"objective": "number_token", "eval_dataset": {"sums": rows(4), "words": words}},
    )  # fmt: skip
    run.args.metric_for_best_model = "eval_sums_transport_cost"
    run.train()
    run.args.metric_for_best_model = "words_transport_cost"
    with pytest.raises(ValueError, match=r"words_transport_cost.*take one of loss, perplexity, nll"):
        run.train()


# ---- rows -----------------------------------------------------------------------------------------------------------


def test_rows_that_are_not_tokenised_raise(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    model, args = tiny_model("llama"), arguments(tmp_path)
    text = datasets.Dataset.from_dict({"text": ["a", "b"]})
    said = datasets.Dataset.from_list([{"messages": [{"role": "user", "content": "a"}]}])
    takes = r"takes tokenised ones .*class EMOTrainer\(ObjectiveMixin, SFTTrainer\)"
    for given in (text, said, ["a", "b"], {"named": said}):
        with pytest.raises(ValueError, match=f"the rows have .*{takes}"):
            ObjectiveTrainer(model, args, None, None, given)
    streamed = datasets.IterableDataset.from_generator(lambda: iter([{"text": "a"}]))
    run = ObjectiveTrainer(model, args, None, streamed)
    for data in (text, streamed, ["a", "b"]):  # known with the first batch alone
        with pytest.raises(ValueError, match=takes):
            run.evaluate(data)
    with pytest.raises(ValueError, match=takes):
        run.train()


def test_an_evaluation_without_a_batch_raises(tmp_path: Path) -> None:
    run = trainer(tmp_path, tiny_model("llama"), objective="mle", dataloader_drop_last=True)
    with pytest.raises(ValueError, match="the evaluation has no batch, expected at least one in each"):
        run.evaluate(rows(2))


def test_the_first_batch_is_examined_without_gradient_checkpointing(tmp_path: Path) -> None:
    """Hooks of PEFT's activated LoRA allow it one pass before a backward pass."""
    model, passes = tiny_model("llama"), []
    run = trainer(tmp_path, model, objective="mle", max_steps=1, gradient_checkpointing=True)
    model.register_forward_pre_hook(lambda *_: passes.append(model.is_gradient_checkpointing))
    run.train()
    assert len(passes) > 2
    assert passes == [False] * (len(passes) - 1) + [True]


def test_a_compiled_model_keeps_its_columns(tmp_path: Path) -> None:
    run = trainer(tmp_path, torch.compile(tiny_model("llama"), backend="eager"), objective="mle")
    batch = next(iter(run.get_train_dataloader()))
    assert {"input_ids", "attention_mask", "labels"} <= set(batch)


def test_a_transform_makes_the_rows_of_a_data_set(tmp_path: Path) -> None:
    """Its columns are others than those that are stored: a text and the class of each row."""
    datasets = pytest.importorskip("datasets")
    made = [row | {"token_weight": [1.0] * len(row["labels"])} for row in rows(8)]

    def tokenised(batch: dict[str, list[Any]]) -> dict[str, list[Any]]:
        return {name: [made[int(text)][name] for text in batch["text"]] for name in made[0]}

    stored = {"text": [str(i) for i in range(8)], "labels": [0, 1] * 4}
    table = datasets.Dataset.from_dict(stored).with_transform(tokenised)
    model, found = tiny_model("llama"), []
    for data in (made, table):
        run = ObjectiveTrainer(
            copy.deepcopy(model),
            arguments(tmp_path, remove_unused_columns=False),
            train_dataset=data,
            eval_dataset=data,
        )
        run.train()
        found.append(run.evaluate()["eval_loss"])
    assert found[0] == found[1]
    # A collator may make the labels of tokens beside a column of classes, or of words.
    own = itertools.cycle([1, ["a", "noun"], [[1, 2], [3]], []])
    run = trainer(
        tmp_path, model, train_dataset=[row | {"labels": next(own)} for row in made],
        data_collator=lambda items: pad_rows([item | {"labels": item["input_ids"]} for item in items]),
    )  # fmt: skip
    run.train()


@pytest.mark.parametrize("kind", ["list", "dataset"])
def test_the_log_counts_labels_that_are_near_duplicates(
    tmp_path: Path, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    model = tiny_model("llama")
    with torch.no_grad():
        model.lm_head.weight[5] = model.lm_head.weight[4]  # type: ignore[index, union-attr, operator]
    count = 2 if kind == "list" else 3  # the same numbers are logged once
    data: Any = [{"input_ids": [5, 4, 6, 7], "labels": [5, 4, -100, 7]}] * count  # nothing predicts the first
    if kind == "dataset":
        data = pytest.importorskip("datasets").Dataset.from_list(data).select([2, 1, 0])
    with pytest.warns(UserWarning, match="near-duplicate"):
        trainer(tmp_path, model, objective="emo", train_dataset=data, cost=EmbeddingCost.from_model(model))
    assert f"{count} of the first {2 * count} labels of the training set (50.00 %)" in caplog.text


# ---- errors -------------------------------------------------------------------------------------------------------


def test_unsupported_trainers_and_models_raise(tmp_path: Path) -> None:
    bert = build("Bert", TINY["llama"][1], "LMHeadModel")

    class Ulysses(ObjectiveTrainer):
        def get_sp_size(self) -> int:
            return 2

    llama = tiny_model("llama")
    for call, message in (
        (lambda: trainer(tmp_path, bert).evaluate(), r"BertLMHeadModel\) sees the tokens to its right"),
        (lambda: trainer(tmp_path, llama, kind=Ulysses), r"sp_size=2, and an objective does not work with"),
        (lambda: trainer(tmp_path, llama, impl="fast"), "impl is 'fast'"),
        (lambda: trainer(tmp_path, llama, label_smoothing_factor=1.1), "epsilon is 1.1, expected a number in"),
    ):
        with pytest.raises(ValueError, match=message):
            call()


@pytest.mark.parametrize("label", [VOCAB, -1])
def test_labels_that_are_no_tokens_are_named(tmp_path: Path, label: int) -> None:
    """By the objective, whatever the examination of the first batch does with them."""
    data = [{"input_ids": [5, 6, 7], "labels": [5, label, 7]}] * 4
    for metrics in ({}, None):
        run = trainer(tmp_path, tiny_model("llama"), train_dataset=data)
        run._metrics = metrics  # a trainer of TRL has a dict
        with pytest.raises(ValueError, match=f"label.*{label}"):
            run.train()


_DECODER: dict[str, Any] = {
    "vocab_size": VOCAB, "d_model": 16, "decoder_layers": 1, "decoder_attention_heads": 2, "decoder_ffn_dim": 24,
    "max_position_embeddings": 32, "dropout": 0.0, "attention_dropout": 0.0, "activation_dropout": 0.0,
}  # fmt: skip


def test_shifted_labels_are_scored_as_by_the_model_itself(tmp_path: Path) -> None:
    model = build("TrOCR", _DECODER, noise=0.1)
    theirs, ours = copy.deepcopy(model), copy.deepcopy(model)
    settings: dict[str, Any] = {"train_dataset": rows(24), "eval_dataset": rows(11, seed=1)}
    args = arguments(tmp_path, optim="sgd")
    plain = transformers.Trainer(theirs, args, data_collator=shifted("labels"), **settings)
    run = ObjectiveTrainer(ours, args, objective="mle", data_collator=shifted("shift_labels"), **settings)
    plain.train(), run.train()
    assert logs(run, "loss") == pytest.approx(logs(plain, "loss"), rel=1e-5)
    assert_same_weights(ours, theirs, 1e-5)
    assert run.evaluate()["eval_nll"] > 0


def test_labels_that_are_unclear_raise(tmp_path: Path) -> None:
    run = trainer(tmp_path, build("TrOCR", _DECODER, noise=0.1), objective="mle")
    for work in (run.train, run.evaluate):
        with pytest.raises(ValueError, match=r"loss of TrOCRForCausalLM scores label t at position t.*shift_labels"):
            work()
