"""ObjectiveTrainer: evaluation, prediction, choice of the best model, and errors."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

from otloss_llm import EMO, MLE, EmbeddingCost, ObjectiveTrainer, RatingCost, TaiLr
from otloss_llm.training.batches import pad_rows
from tests.otloss_llm.tiny_models import VOCAB, tiny_model
from tests.otloss_llm.training.trainer_cases import (
    WARNINGS,
    Row,
    arguments,
    assert_same_weights,
    by_hand,
    logs,
    one_step,
    rows,
    trainer,
)

pytestmark = WARNINGS


@pytest.mark.parametrize(
    ("name", "objective"), [("llama", MLE()), ("gpt2", EMO()), ("gemma2", EMO(0.5)), ("llama", TaiLr(0.5))], ids=str
)
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
    batch = pad_rows(data)
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
        made = pad_rows(batch)
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


def test_another_cost_and_kernel(tmp_path: Path) -> None:
    model = tiny_model("llama")
    control = EmbeddingCost.from_model(model).random_like(torch.Generator().manual_seed(0))
    default = one_step(tmp_path, copy.deepcopy(model), "emo")
    other = one_step(tmp_path, copy.deepcopy(model), "emo", cost=control)
    assert not torch.allclose(other["lm_head.weight"], default["lm_head.weight"], rtol=0.1)
    for settings in ({"impl": "reference"}, {"chunk_size": 1}):
        same = one_step(tmp_path, copy.deepcopy(model), "emo", **settings)
        torch.testing.assert_close(same["lm_head.weight"], default["lm_head.weight"], rtol=1e-3, atol=1e-5)


# ---- errors -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"objective": "wasserstein"}, "'wasserstein', expected one of mle, tailr, mixce, emo"),
        ({"cost": EmbeddingCost(torch.eye(7))}, "a vocabulary of 7 tokens, the logits have 31"),
        ({"cost": None}, "needs cost="),
        ({"label_smoothing_factor": 1.1}, "epsilon is 1.1, expected a number in"),
        ({"impl": "fast"}, "impl is 'fast'"),
        (
            {
                "objective": "expected_value",
                "cost": RatingCost(torch.arange(31.0)),
                "metric_for_best_model": "eval_transport_cost",
            },
            "RatingCost has a signed cost, of which less is not better",
        ),
    ],
)
def test_invalid_settings_raise(tmp_path: Path, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        trainer(tmp_path, tiny_model("llama"), **settings)


def test_unsupported_trainers_and_models_raise(tmp_path: Path) -> None:
    def loss(outputs: Any, labels: Any, num_items_in_batch: Any = None) -> Tensor:
        return outputs.logits.sum()

    common = {"args": arguments(tmp_path), "train_dataset": rows(4), "data_collator": pad_rows}
    with pytest.raises(ValueError, match="compute_loss_func and an objective"):
        ObjectiveTrainer(model=tiny_model("llama"), compute_loss_func=loss, **common)
    bert = transformers.BertConfig(
        vocab_size=VOCAB, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16
    )
    with pytest.raises(ValueError, match="BertLMHeadModel"):
        ObjectiveTrainer(model=transformers.BertLMHeadModel(bert), **common)

    class Ulysses(ObjectiveTrainer):
        def get_sp_size(self) -> int:
            return 2

    with pytest.raises(ValueError, match=r"sp_size=2, and an objective does not work with sequence parallelism"):
        Ulysses(model=tiny_model("llama"), **common)
    common["args"]._n_gpu = 2
    with pytest.raises(ValueError, match=r"2 GPUs under nn\.DataParallel"):
        ObjectiveTrainer(model=tiny_model("llama"), **common)


def test_rows_without_labels_raise(tmp_path: Path) -> None:
    ignored = [{"input_ids": [3, 4, 5], "labels": [-100, -100, -100]}] * 3
    run = trainer(tmp_path, tiny_model("llama"), eval_dataset=ignored)
    with pytest.raises(ValueError, match="no labelled token"):
        run.evaluate()
    run.data_collator = lambda batch: {"input_ids": pad_rows(batch)["input_ids"]}
    with pytest.raises(ValueError, match=r"the batch has \['input_ids'\] but no labels"):
        run.train()
