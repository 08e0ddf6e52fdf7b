"""Training with numbers: the trainer against losses written out by hand."""

import copy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

from otloss_llm import NumberToken, all_but_the_top
from otloss_llm.evaluation import perplexity
from tests.otloss.oracles import cosine_matrix
from tests.otloss_llm.tiny_models import VOCAB, tiny_model
from tests.otloss_llm.training import trainer_cases
from tests.otloss_llm.training.trainer_cases import Row, logs, one_step, weights

CHARACTERS = "0123456789-.+= ab?"
SUMS = ("12+7=19", "a=-0.5", "90-8=82 b", "ab?", "3.25+1=4.25", "7 7", "-12+2=-10", "b 2")
FIRST = 3  # id of "0"


def of_characters(characters: str = CHARACTERS) -> Any:
    """Every character a token, behind three special ones; the models have more rows."""
    tokenizers = pytest.importorskip("tokenizers")
    special = {"<pad>": 0, "<s>": 1, "</s>": 2}
    vocabulary = special | {character: FIRST + i for i, character in enumerate(characters)}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="<pad>"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Split(tokenizers.Regex("."), "isolated")
    made.decoder = tokenizers.decoders.Fuse()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="<pad>", bos_token="<s>", eos_token="</s>", unk_token="<pad>"
    )


def sums(texts: tuple[str, ...] = SUMS) -> list[Row]:
    """Rows whose first labels are ignored, another number in each."""
    tokenizer = of_characters()
    ids = [[1, *tokenizer(text)["input_ids"], 2] for text in texts]
    return [{"input_ids": row, "labels": [-100] * (i % 3) + row[i % 3 :]} for i, row in enumerate(ids)]


def trainer(path: Path, model: nn.Module, **settings: Any) -> Any:
    return trainer_cases.trainer(path, model, **{"train_dataset": sums(), "per_device_train_batch_size": 8} | settings)


# ---- by hand ---------------------------------------------------------------------------------------------------------

# name -> (settings, the published weight of the mean over numbers; None: EMO)
ARMS: dict[str, tuple[dict[str, Any], float | None]] = {
    "number_token": ({"objective": "number_token"}, 0.3),
    "weight": ({"objective": NumberToken(0.5), "cost": "number"}, 0.5),
    "emo+number": ({"objective": "emo+number"}, None),
}


def by_hand(model: nn.Module, data: list[Row], cost: Any, weight: float | None) -> dict[str, Tensor]:
    """Loss, nll and D, row by row without padding, in float64; the cost of numbers is about numbers alone."""
    costs, nll, transport = cost.rows(torch.arange(VOCAB)).double(), [], []
    for row in data:
        labels = torch.tensor(row["labels"][1:])
        q = model(input_ids=torch.tensor([row["input_ids"]])).logits[0, :-1][labels != -100].double().softmax(-1)
        y = labels[labels != -100]
        nll.append(-q.gather(1, y[:, None]).squeeze(1).log())
        transport.append((q * costs[y]).sum(-1)[cost.is_number[y] if weight else ...])
    n, d = torch.cat(nll), torch.cat(transport)
    loss = n.mean() + weight * d.mean() if weight else (0.5 * (n + (n / d).detach().clamp(max=3) * d)).mean()
    return {"loss": loss, "nll": n.mean(), "transport_cost": d.mean()}


@pytest.mark.parametrize(("arm", "accumulation"), [("number_token", 4), ("weight", 1), ("emo+number", 4)])
def test_a_step_is_the_gradient_of_the_loss_by_hand(tmp_path: Path, arm: str, accumulation: int) -> None:
    settings, weight = ARMS[arm]
    model = tiny_model("llama").double()
    run = trainer(
        tmp_path, copy.deepcopy(model), processing_class=of_characters(), per_device_train_batch_size=8 // accumulation,
        gradient_accumulation_steps=accumulation, max_steps=1, optim="sgd", learning_rate=1.0, **settings,
    )  # fmt: skip
    if arm == "emo+number":
        expected = cosine_matrix(all_but_the_top(model.lm_head.weight))[0].float()  # type: ignore[arg-type, union-attr]
        torch.testing.assert_close(run.transport_cost.rows(torch.tensor([0]))[0].float(), expected)
    run.train()
    after, logged = weights(run.model), by_hand(model, sums(), run.transport_cost, weight)
    logged["loss"].backward()
    for key, value in logged.items():
        assert logs(run, key)[0] == pytest.approx(float(value.detach()), rel=1e-4), key
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        error = float((parameter.detach() - after[name] - parameter.grad).norm() / (parameter.grad.norm() + 1e-9))
        assert error < 1e-5, name  # the cost is in float32


@pytest.mark.parametrize("arm", ["number_token", "emo+number"])
def test_evaluation_reports_the_transport_cost(tmp_path: Path, arm: str) -> None:
    """From hidden states, and from logits if they are wanted; in batches of 3. And with the perplexity."""
    settings, weight = ARMS[arm]
    model = tiny_model("llama").eval()
    given = {"eval_dataset": sums(), "processing_class": of_characters(), **settings}
    plain = trainer(tmp_path, model, **given)
    with torch.no_grad():
        expected = by_hand(model, sums(), plain.transport_cost, weight)
    with_logits = trainer(tmp_path, model, compute_metrics=lambda predicted: {}, **given)
    for metrics in (plain.evaluate(), with_logits.evaluate()):
        for key, value in expected.items():
            assert metrics[f"eval_{key}"] == pytest.approx(float(value), rel=1e-4), key
    ids = [[1, *of_characters()(text)["input_ids"]] for text in ("12+7=19", "a=b ab?", "90-8=82")]
    with torch.no_grad():
        expected = by_hand(model, [{"input_ids": row, "labels": row} for row in ids], plain.transport_cost, weight)
    scores = perplexity(model, torch.tensor(ids), batch_size=2, cost=plain.transport_cost)
    assert (scores.nll, scores.transport_cost) == pytest.approx(
        (float(expected["nll"]), float(expected["transport_cost"])), rel=1e-5
    )


def test_only_the_ratios_of_weights_count(tmp_path: Path) -> None:
    """Also where the weights of all numbers together are below 1, as with 1 / length."""
    model = tiny_model("llama").double()
    settings = {"objective": "number_token", "processing_class": of_characters(), "gradient_accumulation_steps": 2,
                "per_device_train_batch_size": 4}  # fmt: skip
    steps = []
    for scale in (1.0, 1e-3):
        data = [row | {"token_weight": [scale / len(row["labels"])] * len(row["labels"])} for row in sums()]
        steps.append(one_step(tmp_path, copy.deepcopy(model), train_dataset=data, **settings))
    torch.testing.assert_close(*steps, rtol=1e-4, atol=1e-6)


def test_the_tokenizer_of_a_processor_names_the_numbers(tmp_path: Path) -> None:
    """As that of a model of images."""
    processor = SimpleNamespace(tokenizer=of_characters())
    costs = [
        trainer(tmp_path, tiny_model("llama"), objective="number_token", processing_class=given).transport_cost
        for given in (processor, processor.tokenizer)
    ]
    torch.testing.assert_close(costs[0].values, costs[1].values, equal_nan=True)


def test_the_loss_of_a_batch_is_the_same_in_an_evaluation(tmp_path: Path) -> None:
    """Nll plus the distance per number, not per token; and what a subclass makes of it."""

    class Doubled(trainer_cases.ObjectiveTrainer):
        def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
            loss = super().compute_loss(*args, **kwargs)
            return (2 * loss[0], *loss[1:]) if isinstance(loss, tuple) else 2 * loss

    data, found = sums(), []
    for kind in (trainer_cases.ObjectiveTrainer, Doubled):
        run = trainer_cases.trainer(
            tmp_path, tiny_model("llama"), kind, objective="number_token", processing_class=of_characters(),
            train_dataset=data, per_device_train_batch_size=len(data), per_device_eval_batch_size=len(data),
            max_steps=1, learning_rate=0.0,
        )  # fmt: skip
        run.train()
        batch = run.data_collator(data)
        with torch.no_grad():
            found.append(
                [logs(run, "loss")[0], run.evaluate(data)["eval_loss"], float(run.compute_loss(run.model, batch))]
            )
    assert found[0] == pytest.approx([found[0][0]] * 3, rel=1e-5)
    assert found[1] == pytest.approx([2 * found[0][0]] * 3, rel=1e-5)


def test_a_batch_without_a_number(tmp_path: Path) -> None:
    """The likelihood alone, and logs without a transport cost: 0 would read as perfect numbers."""
    data = sums(("ab?", "b a", "a=b"))
    model = tiny_model("llama")
    plain = one_step(tmp_path, copy.deepcopy(model), objective="mle", train_dataset=data)
    run = trainer(
        tmp_path, copy.deepcopy(model), objective="number_token", processing_class=of_characters(), train_dataset=data,
        max_steps=1, optim="sgd", learning_rate=1.0,
    )  # fmt: skip
    run.train()
    after = weights(run.model)
    change = {name: before - after[name] for name, before in weights(model).items()}
    torch.testing.assert_close(change, plain, rtol=1e-4, atol=1e-6)
    run.evaluate(data)
    assert logs(run, "nll")
    assert not logs(run, "transport_cost")
    assert not logs(run, "eval_transport_cost")
    assert logs(run, "eval_loss") == pytest.approx(logs(run, "eval_nll"), rel=1e-6)
    blocks = torch.tensor([[1, *run.processing_class("ab?")["input_ids"]]])
    assert perplexity(run.model, blocks, cost=run.transport_cost).transport_cost is None
