"""Training with numbers: the trainer against losses written out by hand, and the command line."""

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.utils.data import Subset

from otloss_llm import NumberCost, NumberToken, all_but_the_top
from otloss_llm.costs.choice import NumberSettings
from otloss_llm.costs.tokenizer_numbers import NumberTokens
from otloss_llm.data.questions import AnsweredQuestions, Question, pad_questions
from otloss_llm.evaluation import perplexity
from otloss_llm.models.loading import load_model, load_tokenizer
from otloss_llm.training.batches import pad_rows
from tests.otloss_llm.conftest import Cli, Tiny, read, train_options
from tests.otloss_llm.oracles import cosine_matrix
from tests.otloss_llm.tiny_models import VOCAB, tiny_model
from tests.otloss_llm.training import trainer_cases
from tests.otloss_llm.training.trainer_cases import WARNINGS, Row, assert_same_weights, logs, one_step, weights

pytestmark = WARNINGS

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


# ---- by hand: (probabilities at the predicting positions, label of each, head) -> D ---

Transport = Callable[[Tensor, Tensor, Tensor], Tensor]
TEXT = 1.01 * 9


def absolute(q: Tensor, y: Tensor, head: Tensor) -> Tensor:
    number = ((y >= FIRST) & (y < FIRST + 10)).double()
    digits = q[:, FIRST : FIRST + 10]
    distance = (torch.arange(10.0, dtype=torch.float64) - (y[:, None] - FIRST)).abs()
    return number * ((digits * distance).sum(-1) + TEXT * (1 - digits.sum(-1)))


def mixed(q: Tensor, y: Tensor, head: Tensor) -> Tensor:
    matrix = cosine_matrix(all_but_the_top(head))
    digits = torch.arange(10.0, dtype=torch.float64)
    matrix[FIRST : FIRST + 10, FIRST : FIRST + 10] = (digits[:, None] - digits).abs() / 9
    return (q * matrix[y]).sum(-1)


# ---- (nll, D, whether the cost is about the position) -> loss ---

Loss = Callable[[Tensor, Tensor, Tensor], Tensor]


def emo(nll: Tensor, transport: Tensor, about: Tensor) -> Tensor:
    return (0.5 * (nll + (nll / transport).detach().clamp(max=3) * transport)).mean()


def published(weight: float) -> Loss:
    return lambda nll, transport, about: nll.mean() + weight * transport[about].mean()


ARMS: dict[str, tuple[dict[str, Any], Transport, Loss]] = {
    "number_token": ({"objective": "number_token"}, absolute, published(0.3)),
    "weight": ({"objective": NumberToken(0.5), "cost": "number"}, absolute, published(0.5)),
    "emo+number": ({"objective": "emo+number"}, mixed, emo),
}


def terms(model: nn.Module, data: list[Row], transport: Transport) -> tuple[Tensor, Tensor, Tensor]:
    """nll, D and what the latter is about, of every predicted token, row by row without padding, in float64."""
    head = model.lm_head.weight.detach().double()  # type: ignore[union-attr, operator]
    parts = []
    for row in data:
        q = model(input_ids=torch.tensor([row["input_ids"]])).logits[0, :-1].double().softmax(-1)
        labels = row["labels"][1:]
        kept = [label != -100 for label in labels]
        y = torch.tensor(labels)[kept]
        q = q[kept]
        about = (y >= FIRST) & (y < FIRST + 10) | (transport is mixed)
        parts.append((-q[torch.arange(len(y)), y].log(), transport(q, y, head), about))
    nll, distance, about = (torch.cat(part) for part in zip(*parts, strict=True))
    return nll, distance, about


@pytest.mark.parametrize(("arm", "accumulation"), [("number_token", 4), ("weight", 1), ("emo+number", 4)])
def test_a_step_is_the_gradient_of_the_loss_by_hand(tmp_path: Path, arm: str, accumulation: int) -> None:
    settings, transport, formula = ARMS[arm]
    model = tiny_model("llama").double()
    run = trainer(
        tmp_path, copy.deepcopy(model), processing_class=of_characters(), per_device_train_batch_size=8 // accumulation,
        gradient_accumulation_steps=accumulation, max_steps=1, optim="sgd", learning_rate=1.0, **settings,
    )  # fmt: skip
    run.train()
    before, after = weights(model), weights(run.model)
    made = {name: before[name] - after[name] for name in before}
    nll, distance, about = terms(model, sums(), transport)
    loss = formula(nll, distance, about)
    loss.backward()
    logged = {"loss": loss, "nll": nll.mean(), "transport_cost": distance[about].mean()}
    for key, value in logged.items():
        assert logs(run, key)[0] == pytest.approx(float(value.detach()), rel=1e-4), key
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        error = float((made[name] - parameter.grad).norm() / (parameter.grad.norm() + 1e-9))
        assert error < 1e-5, name  # the cost is in float32


def test_terms_in_the_name_are_those_of_the_arguments(tmp_path: Path) -> None:
    """Around the number token loss too, whose cost stays a mean over numbers."""
    model, made = tiny_model("llama"), []
    for name, settings in (
        ("number_token+smoothing:0.2+z_loss:0.1", {}),
        ("number_token", {"label_smoothing_factor": 0.2, "z_loss": 0.1}),
    ):
        run = trainer(
            tmp_path, copy.deepcopy(model), processing_class=of_characters(), max_steps=2, optim="sgd",
            learning_rate=0.1, objective=name, eval_dataset=sums(), **settings,
        )  # fmt: skip
        run.train()
        made.append((run.model, run.evaluate()))
    assert_same_weights(made[0][0], made[1][0], 1e-6)
    assert made[0][1]["eval_loss"] == pytest.approx(made[1][1]["eval_loss"], rel=1e-6)


@pytest.mark.parametrize("arm", ["number_token", "emo+number"])
def test_evaluation_reports_the_transport_cost(tmp_path: Path, arm: str) -> None:
    """From hidden states, and from logits if they are wanted; in batches of 3."""
    settings, transport, formula = ARMS[arm]
    model = tiny_model("llama")
    with torch.no_grad():
        nll, distance, about = terms(model.eval(), sums(), transport)
    expected = {"loss": formula(nll, distance, about), "nll": nll.mean(), "transport_cost": distance[about].mean()}
    given = {"eval_dataset": sums(), "processing_class": of_characters(), **settings}
    plain = trainer(tmp_path, model, **given).evaluate()
    with_logits = trainer(tmp_path, model, compute_metrics=lambda predicted: {}, **given).evaluate()
    for key, values in expected.items():
        for metrics in (plain, with_logits):
            assert metrics[f"eval_{key}"] == pytest.approx(float(values), rel=1e-4), key


def test_perplexity_reports_the_transport_cost_of_numbers() -> None:
    tokenizer, model = of_characters(), tiny_model("llama").eval()
    ids = [[1, *tokenizer(text)["input_ids"]] for text in ("12+7=19", "a=b ab?", "90-8=82")]
    with torch.no_grad():
        nll, distance, about = terms(model, [{"input_ids": row, "labels": row} for row in ids], absolute)
    cost = NumberCost.from_tokenizer(tokenizer, vocab_size=VOCAB)
    scores = perplexity(model, torch.tensor(ids), batch_size=2, cost=cost, progress=False)
    assert 0 < int(about.sum()) < len(about) == scores.tokens
    assert scores.transport_cost == pytest.approx(float(distance[about].mean()), rel=1e-5)
    assert scores.nll == pytest.approx(float(nll.mean()), rel=1e-5)


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
    for (name, before), after in zip(weights(model).items(), weights(run.model).values(), strict=True):
        torch.testing.assert_close(before - after, plain[name], rtol=1e-4, atol=1e-6)
    run.evaluate(data)
    assert logs(run, "nll")
    assert not logs(run, "transport_cost")
    assert not logs(run, "eval_transport_cost")
    assert logs(run, "eval_loss") == pytest.approx(logs(run, "eval_nll"), rel=1e-6)
    blocks = torch.tensor([[1, *run.processing_class("ab?")["input_ids"]]])
    assert perplexity(run.model, blocks, cost=run.transport_cost, progress=False).transport_cost is None


def test_questions_need_no_collator(tmp_path: Path) -> None:
    """Answers alone are scored, and padding is not."""
    tokenizer = of_characters()
    questions = [Question(f"{a}+{b}", str(a + b)) for a in (3, 12) for b in (4, 99)]
    rows = AnsweredQuestions.from_questions(questions, tokenizer, max_length=24)
    model = tiny_model("llama")
    data = [{key: rows[i][key].tolist() for key in ("input_ids", "labels")} for i in range(len(rows))]
    given = {"objective": "number_token", "processing_class": tokenizer, "numbers": NumberSettings(scaling="log")}
    by_hand = one_step(tmp_path, copy.deepcopy(model), train_dataset=data, **given)
    ours = one_step(tmp_path, model, train_dataset=rows, data_collator=None, **given)
    for name, change in by_hand.items():
        torch.testing.assert_close(ours[name], change, rtol=1e-4, atol=1e-7)
    for evaluated in ({"named": rows}, Subset(Subset(rows, [2, 0, 1]), [1, 0])):
        given = {"train_dataset": None, "eval_dataset": evaluated, "data_collator": None, "objective": "mle"}
        assert trainer(tmp_path, model, **given).data_collator is pad_questions
    own = trainer(tmp_path, model, objective="mle", train_dataset=rows)
    assert own.data_collator is pad_rows, "a collator that is given is kept"


# ---- the command line ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def questions(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("questions") / "sums.jsonl"
    lines = [{"question": f"{a} + {b}", "answer": str(a + b)} for a in range(7) for b in (5, 40)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return path


def on_questions(tiny: Tiny, folder: Path, questions: object, **changes: object) -> list[str]:
    """`train_options` on questions: three steps, numbers."""
    options = train_options(
        tiny, folder, **{"max_steps": 3, "train_questions": questions, "objective": "number_token"} | changes
    )
    at = options.index("--train_text")
    return options[:at] + options[at + 2 :]


def test_train_on_numbers(cli: Cli, tiny: Tiny, questions: Path, tmp_path: Path) -> None:
    given = on_questions(tiny, tmp_path / "run", questions, number_scaling="log")
    ended = cli(*given)
    assert ended.code == 0, ended.err
    assert ended.json["train_transport_cost"] > 0
    assert ended.json["eval_transport_cost"] > 0
    values = NumberTokens.of(load_tokenizer(str(tiny.llama)), vocab_size=load_model(str(tiny.llama)).config.vocab_size)
    assert str(values.coverage()) in ended.err
    assert "numbers=12, text=2.32561, scaling='log')" in read(tmp_path / "run/run.json")["numbers"]
    assert cli(*given).json == ended.json, "finished: nothing is trained again"
    other = cli(*on_questions(tiny, tmp_path / "run", questions, number_scaling="squash"))
    assert "holds another run (numbers: " in other.error
    mixed = {"objective": "emo+number", "cost_embedding": "random", "train_on_question": True}
    assert cli(*on_questions(tiny, tmp_path / "mixed", questions, **mixed)).json["eval_transport_cost"] > 0


def test_invalid_trainings_on_numbers_print_one_line(cli: Cli, tiny: Tiny, questions: Path, tmp_path: Path) -> None:
    lines = [json.dumps({"question": question, "answer": "a"}) for question in ("b", "c", "d", "e")]
    (tmp_path / "words.jsonl").write_text("\n".join(lines), encoding="utf-8")
    words: dict[str, object] = {"train_questions": tmp_path / "words.jsonl"}
    for changes, said in (
        ({"validation_text": tiny.text}, "--validation_text cannot be combined with --train_questions"),
        ({"cost_embedding": "random"}, "--cost_embedding random"),
        (words, "none of the 6 tokens"),  # it would equal MLE
        (words | {"train_on_question": True, "objective": "emo+number"}, "none of the 9 tokens"),
    ):
        assert said in cli(*on_questions(tiny, tmp_path / "run", questions, **changes)).error
        assert not (tmp_path / "run").exists() or not list((tmp_path / "run").iterdir())
