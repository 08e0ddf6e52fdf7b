"""Encoder-decoder models: their decoder's hidden states are scored, and labels are not shifted."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from otloss_llm import EMO, EmbeddingCost, NumberCost, NumberToken, ObjectiveMixin, token_loss
from otloss_llm.training.batches import pad_rows
from tests.otloss_llm.tiny_models import VOCAB, build
from tests.otloss_llm.training.trainer_cases import Row, arguments, logs, rows, weights

TINY: dict[str, dict[str, Any]] = {
    "T5": {"num_layers": 1, "num_heads": 2, "d_model": 16, "d_ff": 24, "d_kv": 8, "decoder_start_token_id": 0,
           "dropout_rate": 0.0},
    "Bart": {"d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2, "dropout": 0.0,
             "decoder_attention_heads": 2, "encoder_ffn_dim": 24, "decoder_ffn_dim": 24, "max_position_embeddings": 32},
}  # fmt: skip


class Both(ObjectiveMixin, transformers.Seq2SeqTrainer):
    pass


def trainer(path: Path, model: Any, data: list[Row], **settings: Any) -> Both:
    passed = {key: settings.pop(key) for key in ("objective", "cost") if key in settings}
    own = {"optim": "sgd", "learning_rate": 1.0, "max_steps": 1} | settings
    args = arguments(path, transformers.Seq2SeqTrainingArguments, **own)
    return Both(model=model, args=args, train_dataset=data, eval_dataset=data, data_collator=pad_rows, **passed)


@pytest.mark.parametrize("name", TINY)
@pytest.mark.parametrize("numbers", [False, True])
def test_loss_and_gradients_are_those_of_the_decoders_logits(tmp_path: Path, name: str, numbers: bool) -> None:
    model = build(name, {"vocab_size": VOCAB} | TINY[name], "ForConditionalGeneration", noise=0.1)
    data = rows(8)
    cost: Any = NumberCost(torch.arange(float(VOCAB))) if numbers else EmbeddingCost.from_model(model)
    batch = pad_rows(data)
    logits = model(**batch).logits
    objective: Any = NumberToken(0.3) if numbers else EMO()
    expected = token_loss(logits, batch["labels"], objective=objective, cost=cost)
    expected.loss.backward()
    made, before = copy.deepcopy(model), weights(model)
    run = trainer(
        tmp_path, made, data, objective=objective, cost=cost, per_device_train_batch_size=4,
        gradient_accumulation_steps=2, predict_with_generate=True, generation_max_length=4,
    )  # fmt: skip
    scores = run.evaluate()
    run.train()
    valid = batch["labels"] != -100
    for key, values in (("nll", expected.nll), ("transport_cost", expected.cost)):
        assert scores[f"eval_{key}"] == pytest.approx(float(values[valid].mean()), rel=1e-4)
        assert logs(run, key)[0] == pytest.approx(float(values[valid].mean()), rel=1e-4)
    assert scores["eval_loss"] == pytest.approx(float(expected.loss.detach()), rel=1e-4)
    for key, parameter in model.named_parameters():
        change = before[key] - dict(made.named_parameters())[key]
        gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        torch.testing.assert_close(change, gradient, rtol=1e-3, atol=1e-4 * float(gradient.abs().max()) + 1e-6)
