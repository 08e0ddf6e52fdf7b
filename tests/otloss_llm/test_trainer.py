"""ObjectiveTrainer: the loss of an accumulated batch, reports, evaluation, PEFT, resuming, refusals."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")
pytest.importorskip("accelerate")

import torch
import transformers
from torch import Tensor, nn

from otloss_llm import EMO, MLE, EmbeddingCost, MixCE, ObjectiveMixin, ObjectiveTrainer, TaiLr, token_loss
from tests.otloss_llm.tiny_models import VOCAB, tiny_model

pytestmark = [
    # PEFT asks transformers for a name that transformers has deprecated.
    pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.*is deprecated:FutureWarning"),
    # accelerate's loader pins memory and warns on machines without an accelerator.
    pytest.mark.filterwarnings("ignore:.*pin_memory.*"),
]

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


def padded(batch: list[Row]) -> dict[str, Tensor]:
    """A collator that pads on the right; padding is ignored."""
    width = max(len(row["input_ids"]) for row in batch)

    def pad(key: str, fill: int) -> Tensor:
        return torch.tensor([row[key] + [fill] * (width - len(row[key])) for row in batch])

    ids, labels = pad("input_ids", 0), pad("labels", -100)
    mask = torch.tensor([[i < len(row["input_ids"]) for i in range(width)] for row in batch]).long()
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def arguments(path: Path, **settings: Any) -> transformers.TrainingArguments:
    base: dict[str, Any] = {
        "output_dir": str(path), "report_to": [], "use_cpu": True, "disable_tqdm": True, "logging_steps": 1,
        "save_strategy": "no", "per_device_train_batch_size": 4, "per_device_eval_batch_size": 3, "max_steps": 3,
        "learning_rate": 1e-2, "lr_scheduler_type": "constant", "max_grad_norm": 0.0, "seed": 0, "weight_decay": 0.0,
        "dataloader_pin_memory": False,
    }  # fmt: skip
    return transformers.TrainingArguments(**base | settings)


def trainer(path: Path, model: nn.Module, kind: type = ObjectiveTrainer, **settings: Any) -> Any:
    own = ("objective", "cost", "chunk_size", "impl", "compute_metrics", "callbacks", "train_dataset", "eval_dataset")
    passed = {key: settings.pop(key) for key in own if key in settings}
    data = {"train_dataset": rows(24), "eval_dataset": rows(11, seed=1)} | passed
    return kind(model=model, args=arguments(path, **settings), data_collator=padded, **data)


def weights(model: nn.Module) -> dict[str, Tensor]:
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def assert_same_weights(a: nn.Module, b: nn.Module, tolerance: float = 0.0) -> None:
    for (name, p), q in zip(a.named_parameters(), b.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=tolerance, atol=tolerance, msg=lambda text, name=name: f"{name}: {text}")


def logs(made: Any, key: str) -> list[float]:
    return [entry[key] for entry in made.state.log_history if key in entry]


# ---- training -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["llama", "gpt2"])
@pytest.mark.parametrize("accumulation", [1, 3])
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


def one_step(path: Path, model: nn.Module, objective: Any, **settings: Any) -> dict[str, Tensor]:
    """The change that one step of plain gradient descent makes: -gradient."""
    before = weights(model)
    made = trainer(path, model, objective=objective, max_steps=1, optim="sgd", learning_rate=1.0, **settings)
    made.train()
    return {name: before[name] - parameter for name, parameter in weights(model).items()}


@pytest.mark.parametrize("objective", ["mle", "emo", "emo:transport", "tailr:0.8", "mixce:0.5", "emo:0.5"])
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_accumulation_equals_one_large_batch(tmp_path: Path, name: str, objective: str) -> None:
    """4 x 2 rows with unequal numbers of labels = 1 x 8, and both = the mean over predicted tokens by hand."""
    model = tiny_model(name).eval()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    data = rows(8)
    large = one_step(tmp_path, copy.deepcopy(model), objective, per_device_train_batch_size=8, train_dataset=data)
    small = one_step(
        tmp_path, copy.deepcopy(model), objective,
        per_device_train_batch_size=2, gradient_accumulation_steps=4, train_dataset=data,
    )  # fmt: skip
    batch = padded(data)
    logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits[:, :-1]
    parsed = trainer(tmp_path, copy.deepcopy(model), objective=objective).objective
    loss = token_loss(logits, batch["labels"][:, 1:], objective=parsed, cost=EmbeddingCost.from_model(model)).loss
    loss.backward()
    for key, parameter in model.named_parameters():
        assert parameter.grad is not None
        largest = float(parameter.grad.abs().max())
        for made in (large, small):
            torch.testing.assert_close(made[key], parameter.grad, rtol=1e-3, atol=1e-4 * largest + 1e-6)


def test_a_batch_of_ignored_labels_changes_nothing(tmp_path: Path) -> None:
    data = [{"input_ids": [3, 4, 5, 6], "labels": [-100] * 4}] * 4
    assert not any(
        change.any() for change in one_step(tmp_path, tiny_model("llama"), "emo", train_dataset=data).values()
    )
    # Beside others in the accumulated batch it adds nothing.
    model = tiny_model("llama")
    alone = one_step(tmp_path, copy.deepcopy(model), "emo", train_dataset=rows(4))
    both = one_step(tmp_path, copy.deepcopy(model), "emo", train_dataset=rows(4) + data, per_device_train_batch_size=8)
    for name, change in alone.items():
        torch.testing.assert_close(both[name], change, rtol=1e-4, atol=1e-6)


def test_objectives_train_differently_and_emo_lowers_the_transport_cost(tmp_path: Path) -> None:
    made = {}
    for objective in ("mle", "emo"):
        run = trainer(tmp_path, tiny_model("llama"), objective=objective, max_steps=12, eval_dataset=rows(24))
        before = run.evaluate()
        run.train()
        made[objective] = (before, run.evaluate(), run)
    for before, after, _ in made.values():
        assert after["eval_nll"] < before["eval_nll"]
        assert after["eval_transport_cost"] < before["eval_transport_cost"]
    emo, mle = made["emo"][2], made["mle"][2]
    assert logs(emo, "loss") == pytest.approx(logs(emo, "nll"), rel=1e-5)  # the value of EMO is nll
    assert len(logs(emo, "transport_cost")) == 12
    assert not logs(mle, "transport_cost")  # computed only where the objective reads it
    assert made["emo"][1]["eval_transport_cost"] < made["mle"][1]["eval_transport_cost"]


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


def test_bf16_on_the_cpu(tmp_path: Path) -> None:
    model = tiny_model("llama")
    full = one_step(tmp_path, copy.deepcopy(model), "emo")
    mixed = one_step(tmp_path, copy.deepcopy(model), "emo", bf16=True)
    head = "lm_head.weight"
    assert mixed[head].dtype == torch.float32
    difference = float((mixed[head] - full[head]).norm() / full[head].norm())
    assert 1e-5 < difference < 0.05  # autocast did something, and little


def test_gradient_checkpointing(tmp_path: Path) -> None:
    model = tiny_model("llama")
    ordinary = one_step(tmp_path, copy.deepcopy(model), "emo")
    checkpointed = one_step(tmp_path, copy.deepcopy(model), "emo", gradient_checkpointing=True)
    for name, change in ordinary.items():
        torch.testing.assert_close(checkpointed[name], change, rtol=1e-4, atol=1e-6)


def test_resuming_equals_an_unbroken_run_bit_for_bit(tmp_path: Path) -> None:
    """With dropout, momentum and a schedule; the cost is that of the start, not of the checkpoint."""
    start = tiny_model("gpt2")
    settings: dict[str, Any] = {
        "objective": "emo", "max_steps": 6, "save_strategy": "steps", "save_steps": 3, "lr_scheduler_type": "linear",
        "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2,
    }  # fmt: skip
    unbroken = trainer(tmp_path / "a", copy.deepcopy(start), **settings)
    unbroken.train()
    resumed = trainer(tmp_path / "b", copy.deepcopy(start), **settings)
    resumed.train(resume_from_checkpoint=str(tmp_path / "a" / "checkpoint-3"))
    assert_same_weights(unbroken.model, resumed.model)
    assert logs(unbroken, "nll")[-3:] == logs(resumed, "nll")[-3:]
    assert not torch.equal(resumed.model.lm_head.weight, start.lm_head.weight)
    files = {path.name for path in (tmp_path / "a" / "checkpoint-3").iterdir()}
    saved = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "a" / "checkpoint-3")
    assert set(saved.state_dict()) == set(start.state_dict()), files  # the cost is in no checkpoint


def test_lora(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    base = tiny_model("llama")
    config = peft.LoraConfig(task_type="CAUSAL_LM", r=2, target_modules=["q_proj", "v_proj"], lora_dropout=0.0)
    model = peft.get_peft_model(copy.deepcopy(base), config)
    run = trainer(tmp_path, model, objective="emo", max_steps=8, eval_dataset=rows(24))
    before = run.evaluate()
    run.train()
    assert run.evaluate()["eval_nll"] < before["eval_nll"]
    head = model.get_output_embeddings().weight
    assert torch.equal(head, base.lm_head.weight)
    run.save_model(str(tmp_path / "adapter"))
    assert (tmp_path / "adapter" / "adapter_model.safetensors").exists()
    loaded = peft.PeftModel.from_pretrained(copy.deepcopy(base), tmp_path / "adapter").eval()
    ids = torch.tensor([[3, 4, 5, 6]])
    torch.testing.assert_close(loaded(input_ids=ids).logits, model.eval()(input_ids=ids).logits)


def test_the_mixin_on_a_subclass(tmp_path: Path) -> None:
    class Counting(transformers.Trainer):
        steps = 0

        def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
            self.steps += 1
            return super().training_step(*args, **kwargs)

    class Both(ObjectiveMixin, Counting):
        pass

    first = tiny_model("llama")
    second = copy.deepcopy(first)
    run = trainer(tmp_path, first, kind=Both, objective=MixCE(0.5))
    run.train()
    assert run.steps == 3
    trainer(tmp_path, second, objective="mixce:0.5").train()
    assert_same_weights(first, second)


def test_the_cost_stays_that_of_the_start(tmp_path: Path) -> None:
    model = tiny_model("llama")
    run = trainer(tmp_path, model, objective="emo")
    before = run.transport_cost.dense()
    assert torch.equal(before, EmbeddingCost.from_model(model).dense())
    run.train()
    assert torch.equal(run.transport_cost.dense(), before)
    assert not torch.allclose(EmbeddingCost.from_model(model).dense(), before)


# ---- evaluation -----------------------------------------------------------------------------------------------------


def by_hand(model: nn.Module, data: list[Row], objective: Any, cost: EmbeddingCost) -> dict[str, float]:
    """Row by row, without padding, from the model's own logits, in float64."""
    sums = torch.zeros(4, dtype=torch.float64)
    training = model.training
    model.eval()
    for row in data:
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([row["input_ids"]])).logits[0, :-1].double()
        labels = torch.tensor(row["labels"][1:])
        out = token_loss(logits, labels, objective=objective, cost=cost, reduction="none")
        assert out.cost is not None
        columns = (out.loss, out.nll, out.cost, labels != -100)
        sums += torch.stack([column.double().sum() for column in columns])
    model.train(training)
    loss, nll, transport = (sums[:3] / sums[3]).tolist()
    return {"loss": loss, "nll": nll, "transport_cost": transport, "perplexity": float(torch.tensor(nll).exp())}


@pytest.mark.parametrize("objective", [MLE(), EMO(), EMO(0.5), TaiLr(0.5), MixCE(0.5)], ids=repr)
@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma2"])
def test_evaluation_is_weighted_by_tokens(tmp_path: Path, name: str, objective: Any) -> None:
    """11 rows in batches of 3, 3, 3 and 2, padded, with unequal numbers of labels."""
    model = tiny_model(name)
    run = trainer(tmp_path, model, objective=objective)
    expected = by_hand(model, rows(11, seed=1), objective, run.transport_cost)
    for metrics in (run.evaluate(), run.evaluate(metric_key_prefix="valid"), run.evaluate()):
        prefix = "valid" if "valid_nll" in metrics else "eval"
        for key, value in expected.items():
            assert metrics[f"{prefix}_{key}"] == pytest.approx(value, rel=1e-4), key
    assert run.evaluate(rows(2))["eval_nll"] == pytest.approx(
        by_hand(model, rows(2), objective, run.transport_cost)["nll"], rel=1e-4
    )


def test_predict_and_metrics_get_real_logits(tmp_path: Path) -> None:
    seen: list[Any] = []

    def metrics(prediction: Any) -> dict[str, float]:
        seen.append(prediction)
        return {"rows": float(len(prediction.predictions))}

    model = tiny_model("gemma2")
    data = rows(11, seed=1)
    run = trainer(tmp_path, model, objective="emo", compute_metrics=metrics)
    expected = by_hand(model, data, EMO(), run.transport_cost)
    out = run.evaluate()
    assert out["eval_rows"] == 11
    for key, value in expected.items():
        assert out[f"eval_{key}"] == pytest.approx(value, rel=1e-4), key
    predicted = run.predict(data)
    batch = padded(data)
    with torch.no_grad():
        logits = model.eval()(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
    for predictions in (seen[0].predictions, predicted.predictions):
        assert predictions.shape == logits.shape
        mask = batch["attention_mask"].bool()
        torch.testing.assert_close(torch.tensor(predictions)[mask], logits[mask], rtol=1e-4, atol=1e-4)
    assert (predicted.label_ids == batch["labels"].numpy()).all()
    assert predicted.metrics["test_nll"] == pytest.approx(expected["nll"], rel=1e-4)
    assert predicted.metrics["test_transport_cost"] == pytest.approx(expected["transport_cost"], rel=1e-4)


@pytest.mark.parametrize("keep_labels", [False, True])
def test_shifted_labels_in_the_batch(tmp_path: Path, keep_labels: bool) -> None:
    """`shift_labels` are aligned already; they win over labels, in training and evaluation."""

    def collate(batch: list[Row]) -> dict[str, Tensor]:
        made = padded(batch)
        labels = made["labels"] if keep_labels else made.pop("labels")
        return made | {"shift_labels": nn.functional.pad(labels[:, 1:], (0, 1), value=-100)}

    first = tiny_model("llama")
    second = copy.deepcopy(first)
    run = trainer(tmp_path, first, objective="emo", remove_unused_columns=False)
    run.data_collator = collate
    ordinary = trainer(tmp_path, second, objective="emo")
    for key, value in ordinary.evaluate().items():
        if key.startswith(("eval_loss", "eval_nll", "eval_transport", "eval_perplexity")):
            assert run.evaluate()[key] == pytest.approx(value, rel=1e-6)
    run.train(), ordinary.train()
    assert_same_weights(first, second)
    assert run.predict(rows(3)).predictions.shape[0] == 3


def test_the_best_model_by_nll_is_loaded_at_the_end(tmp_path: Path) -> None:
    run = trainer(
        tmp_path, tiny_model("llama"), objective="emo", max_steps=6, learning_rate=0.3, load_best_model_at_end=True,
        metric_for_best_model="nll", eval_strategy="steps", eval_steps=1, save_strategy="steps", save_steps=1,
    )  # fmt: skip
    run.train()
    measured = logs(run, "eval_nll")
    assert run.state.best_metric == min(measured)
    assert run.evaluate()["eval_nll"] == pytest.approx(min(measured), rel=1e-6)


def test_evaluation_without_a_cost(tmp_path: Path) -> None:
    run = trainer(tmp_path, tiny_model("llama"), objective="mle", cost=None)
    metrics = run.evaluate()
    assert "eval_transport_cost" not in metrics
    assert metrics["eval_loss"] == pytest.approx(metrics["eval_nll"])
    run.train()


def test_another_cost_and_kernel(tmp_path: Path) -> None:
    model = tiny_model("llama")
    control = EmbeddingCost.from_model(model).random_like(torch.Generator().manual_seed(0))
    default = one_step(tmp_path, copy.deepcopy(model), "emo")
    other = one_step(tmp_path, copy.deepcopy(model), "emo", cost=control)
    assert not torch.allclose(other["lm_head.weight"], default["lm_head.weight"], rtol=0.1)
    for settings in ({"impl": "reference"}, {"chunk_size": 1}):
        same = one_step(tmp_path, copy.deepcopy(model), "emo", **settings)
        torch.testing.assert_close(same["lm_head.weight"], default["lm_head.weight"], rtol=1e-3, atol=1e-5)


# ---- refusals -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"objective": "wasserstein"}, "'wasserstein', expected one of mle, tailr, mixce, emo"),
        ({"cost": EmbeddingCost(torch.eye(7))}, "a vocabulary of 7 tokens, the logits have 31"),
        ({"cost": "head"}, "cost is 'head'"),
        ({"cost": None}, "needs cost="),
        ({"label_smoothing_factor": 0.1}, "label_smoothing_factor=0.1.*dense_token_loss"),
        ({"impl": "fast"}, "impl is 'fast'"),
        ({"chunk_size": 0}, "chunk_size is 0"),
    ],
)
def test_settings_that_are_refused(tmp_path: Path, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        trainer(tmp_path, tiny_model("llama"), **settings)


def test_more_that_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def loss(outputs: Any, labels: Any, num_items_in_batch: Any = None) -> Tensor:
        return outputs.logits.sum()

    common = {"args": arguments(tmp_path), "train_dataset": rows(4), "data_collator": padded}
    with pytest.raises(ValueError, match="compute_loss_func and an objective"):
        ObjectiveTrainer(model=tiny_model("llama"), compute_loss_func=loss, **common)
    t5 = transformers.T5Config(vocab_size=VOCAB, num_layers=1, num_heads=2, d_model=16, d_ff=24, d_kv=8)
    with pytest.raises(TypeError, match="encoder-decoder"):
        ObjectiveTrainer(model=transformers.T5ForConditionalGeneration(t5), **common)
    with pytest.raises(TypeError, match="GPT2Model does not generate"):
        ObjectiveTrainer(model=transformers.GPT2Model(tiny_model("gpt2").config), **common)
    with pytest.raises(TypeError, match="objective is 3"):
        ObjectiveTrainer(model=tiny_model("llama"), objective=3, **common)
    monkeypatch.setattr(transformers.TrainingArguments, "n_gpu", property(lambda self: 2))
    with pytest.raises(ValueError, match=r"2 GPUs under nn\.DataParallel"):
        ObjectiveTrainer(model=tiny_model("llama"), **common)


def test_batches_without_labels_are_refused(tmp_path: Path) -> None:
    run = trainer(tmp_path, tiny_model("llama"))
    run.data_collator = lambda batch: {"input_ids": padded(batch)["input_ids"]}
    with pytest.raises(ValueError, match=r"the batch has \['input_ids'\] but no labels"):
        run.train()


def test_a_label_outside_the_vocabulary_is_named(tmp_path: Path) -> None:
    data = [{"input_ids": [3, 4, 5], "labels": [3, 4, VOCAB]}] * 4
    with pytest.raises(ValueError, match=r"outside the vocabulary.*tokenizer"):
        trainer(tmp_path, tiny_model("llama"), train_dataset=data).train()
