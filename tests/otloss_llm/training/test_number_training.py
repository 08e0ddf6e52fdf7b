"""Training with numbers: the trainer against losses written out by hand, compiled programs, the command line."""

from __future__ import annotations

import copy
import json
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")

import torch  # noqa: E402
from otloss_llm.costs.number_spans import NumberSpanCost  # noqa: E402
from tests.otloss_llm.costs.test_number_spans import slow_rows  # noqa: E402
from torch import Tensor, nn  # noqa: E402
from torch.utils.data import Subset  # noqa: E402

from otloss_llm import (  # noqa: E402
    EMO,
    EmbeddingCost,
    MixedCost,
    NumberCost,
    NumberToken,
    ObjectiveTrainer,
)
from otloss_llm.costs.choice import NumberSettings  # noqa: E402
from otloss_llm.costs.number_tokens import NumberTokens  # noqa: E402
from otloss_llm.data.blocks import PackedBlocks  # noqa: E402
from otloss_llm.data.questions import AnsweredQuestions, Question, pad_questions, read_questions  # noqa: E402
from otloss_llm.evaluation import number_token_scores, perplexity  # noqa: E402
from otloss_llm.training.loading import load_model, load_tokenizer  # noqa: E402
from tests.otloss_llm.conftest import Cli, Tiny, read, save, train_options  # noqa: E402
from tests.otloss_llm.oracles import cosine_matrix, problem  # noqa: E402
from tests.otloss_llm.scoring import assert_all_close, fused, gradients  # noqa: E402
from tests.otloss_llm.tiny_models import VOCAB, tiny_model  # noqa: E402
from tests.otloss_llm.training.trainer_cases import (  # noqa: E402
    WARNINGS,
    Row,
    arguments,
    assert_same_weights,
    logs,
    padded,
    weights,
)

pytestmark = WARNINGS

DATA = Path(__file__).parents[4] / "shared/data"
STORIES, GSM8K = DATA / "models/stories260K", DATA / "math/gsm8k-train.jsonl"

EXAMPLE = Path(__file__).parents[3] / "examples" / "number_tokens.py"

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


def of_words() -> Any:
    """No token with a digit."""
    tokenizers = pytest.importorskip("tokenizers")
    words = {word: i for i, word in enumerate(["<unk>", "<s>", "</s>", "one", "two", "three"])}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<unk>"))
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=made, unk_token="<unk>", bos_token="<s>", eos_token="</s>"
    )


def sums(texts: tuple[str, ...] = SUMS) -> list[Row]:
    """Rows whose first labels are ignored, another number in each."""
    tokenizer = of_characters()
    ids = [[1, *tokenizer(text)["input_ids"], 2] for text in texts]
    return [{"input_ids": row, "labels": [-100] * (i % 3) + row[i % 3 :]} for i, row in enumerate(ids)]


def a_trainer(path: Path, model: nn.Module, **settings: Any) -> Any:
    own = ("objective", "cost", "numbers", "impl", "compute_metrics", "train_dataset", "eval_dataset", "data_collator")
    passed = {key: settings.pop(key) for key in own if key in settings}
    given = {"train_dataset": sums(), "data_collator": padded, "processing_class": settings.pop("tokenizer", None)}
    settings = {"per_device_train_batch_size": 8} | settings
    return ObjectiveTrainer(model=model, args=arguments(path, **settings), **given | passed)


def a_step(path: Path, model: nn.Module, **settings: Any) -> dict[str, Tensor]:
    """The change that one step of plain gradient descent makes: -gradient."""
    before = weights(model)
    a_trainer(path, model, max_steps=1, optim="sgd", learning_rate=1.0, **settings).train()
    return {name: before[name] - parameter for name, parameter in weights(model).items()}


# ---- by hand: (logits at the predicting positions, label of each, rows of the span costs) -> D ---

Transport = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
TEXT = 1.01 * 9


def among(q: Tensor) -> Tensor:
    """The probabilities of 0 to 9."""
    return q[:, FIRST : FIRST + 10]


def absolute(q: Tensor, y: Tensor, spans: Tensor, head: Tensor) -> Tensor:
    number = ((y >= FIRST) & (y < FIRST + 10)).double()
    distance = (torch.arange(10.0, dtype=torch.float64) - (y[:, None] - FIRST)).abs()
    return number * ((among(q) * distance).sum(-1) + TEXT * (1 - among(q).sum(-1)))


def squared_mean(q: Tensor, y: Tensor, spans: Tensor, head: Tensor) -> Tensor:
    number = ((y >= FIRST) & (y < FIRST + 10)).double()
    mass = among(q).sum(-1)
    mean = (among(q) * torch.arange(10.0, dtype=torch.float64)).sum(-1) / mass
    return number * (mass * (mean - (y - FIRST)) ** 2 + 1.01 * 81 * (1 - mass))


def of_spans(q: Tensor, y: Tensor, spans: Tensor, head: Tensor) -> Tensor:
    return (q * spans).sum(-1)


def mixed(q: Tensor, y: Tensor, spans: Tensor, head: Tensor) -> Tensor:
    matrix = cosine_matrix(head)
    digits = torch.arange(10.0, dtype=torch.float64)
    matrix[FIRST : FIRST + 10, FIRST : FIRST + 10] = (digits[:, None] - digits).abs() / 9
    return (q * matrix[y]).sum(-1)


# ---- (nll, D, whether the cost is about the position) -> loss ---

Loss = Callable[[Tensor, Tensor, Tensor], Tensor]


def emo(nll: Tensor, transport: Tensor, about: Tensor) -> Tensor:
    return (0.5 * (nll + (nll / transport).detach() * transport)).mean()


def published(weight: float) -> Loss:
    return lambda nll, transport, about: nll.mean() + weight * transport[about].mean()


def weighted(weight: float) -> Loss:
    return lambda nll, transport, about: (nll + weight * transport).mean()


SPAN = {"numbers": NumberSettings(span="relative")}
ARMS: dict[str, tuple[dict[str, Any], Transport, Loss]] = {
    "number_token": ({"objective": "number_token"}, absolute, published(0.3)),
    "weight": ({"objective": NumberToken(0.5)}, absolute, published(0.5)),
    "mse": ({"objective": "number_token:2", "numbers": NumberSettings(form="mse")}, squared_mean, published(2.0)),
    "span": ({"objective": "number_token"} | SPAN, of_spans, published(0.3)),
    "emo of spans": ({"objective": EMO(0.4), "cost": "number"} | SPAN, of_spans, weighted(0.4)),
    "emo+number": ({"objective": "emo+number"}, mixed, emo),
    "emo, mixed": ({"objective": EMO(), "cost": "mixed"}, mixed, emo),
}  # fmt: skip


def terms(model: nn.Module, data: list[Row], transport: Transport) -> tuple[Tensor, Tensor, Tensor]:
    """nll, D and what the latter is about, of every predicted token, row by row without padding, in float64."""
    texts = [*NumberTokens.of(of_characters()).texts, *[None] * (VOCAB - FIRST - len(CHARACTERS))]
    head = model.lm_head.weight.detach().double()  # type: ignore[union-attr, operator]
    parts = []
    for row in data:
        q = model(input_ids=torch.tensor([row["input_ids"]])).logits[0, :-1].double().softmax(-1)
        labels = row["labels"][1:]
        kept = [label != -100 for label in labels]
        y = torch.tensor(labels)[kept]
        spans = torch.tensor(slow_rows(labels, kept, texts, scale="relative", unit=1.0), dtype=torch.float64)
        q = q[kept]
        about = spans.any(-1) if transport is of_spans else (y >= FIRST) & (y < FIRST + 10) | (transport is mixed)
        parts.append((-q[torch.arange(len(y)), y].log(), transport(q, y, spans, head), about))
    nll, distance, about = (torch.cat(part) for part in zip(*parts, strict=True))
    return nll, distance, about


@pytest.mark.parametrize("accumulation", [1, 4])
@pytest.mark.parametrize("arm", ARMS)
def test_a_step_is_the_gradient_of_the_loss_by_hand(tmp_path: Path, arm: str, accumulation: int) -> None:
    settings, transport, formula = ARMS[arm]
    model = tiny_model("llama").double()
    run = a_trainer(
        tmp_path, copy.deepcopy(model), tokenizer=of_characters(), per_device_train_batch_size=8 // accumulation,
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


@pytest.mark.parametrize("arm", ARMS)
def test_evaluation_reports_the_transport_cost(tmp_path: Path, arm: str) -> None:
    """From hidden states, and from logits where somebody wants them; in batches of 3."""
    settings, transport, formula = ARMS[arm]
    model = tiny_model("llama")
    with torch.no_grad():
        nll, distance, about = terms(model.eval(), sums(), transport)
    expected = {"loss": formula(nll, distance, about), "nll": nll.mean(), "transport_cost": distance[about].mean()}
    given = {"eval_dataset": sums(), "tokenizer": of_characters(), **settings}
    plain = a_trainer(tmp_path, model, **given).evaluate()
    with_logits = a_trainer(tmp_path, model, compute_metrics=lambda predicted: {}, **given).evaluate()
    for key, values in expected.items():
        for metrics in (plain, with_logits):
            assert metrics[f"eval_{key}"] == pytest.approx(float(values), rel=1e-4), key


def test_a_cost_made_by_hand_is_the_one_read_off_the_tokenizer(tmp_path: Path) -> None:
    tokenizer, size = of_characters(), {"vocab_size": VOCAB}
    pairs: list[tuple[Any, dict[str, Any]]] = [
        (NumberCost.from_tokenizer(tokenizer, **size), {}),
        (NumberCost.from_tokenizer(tokenizer, form="huber", **size), {"numbers": NumberSettings("huber")}),
        (NumberSpanCost.from_tokenizer(tokenizer, **size), {"numbers": NumberSettings(span="log")}),
    ]
    for cost, settings in pairs:
        by_hand = a_step(tmp_path, tiny_model("llama"), objective=NumberToken(0.3), cost=cost)
        ours = a_step(tmp_path, tiny_model("llama"), objective="number_token", tokenizer=tokenizer, **settings)
        assert all(torch.equal(ours[name], change) for name, change in by_hand.items())


def test_what_each_objective_is_given(tmp_path: Path) -> None:
    tokenizer, model = of_characters(), tiny_model("llama")
    number = a_trainer(tmp_path, model, objective="number_token", tokenizer=tokenizer).transport_cost
    assert type(number) is NumberCost
    assert number.coverage(file=None).numbers == 10
    assert number.shape[0] == VOCAB > len(tokenizer)
    assert type(a_trainer(tmp_path, model, objective="emo+number", tokenizer=tokenizer).transport_cost) is MixedCost
    for objective in ("emo", "mle", EMO()):
        assert type(a_trainer(tmp_path, model, objective=objective).transport_cost) is EmbeddingCost
    reported = a_trainer(
        tmp_path, model, objective="mle", cost="number", tokenizer=tokenizer, eval_dataset=sums()
    ).evaluate()
    with torch.no_grad():
        _, distance, about = terms(model.eval(), sums(), absolute)
    assert reported["eval_transport_cost"] == pytest.approx(float(distance[about].mean()), rel=1e-4)


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
    """The likelihood alone, and logs of a cost of 0."""
    data = sums(("ab?", "b a", "a=b"))
    model = tiny_model("llama")
    plain = a_step(tmp_path, copy.deepcopy(model), objective="mle", train_dataset=data)
    for numbers in (None, NumberSettings(form="mse"), NumberSettings(span="log")):
        given = {"objective": "number_token", "numbers": numbers, "tokenizer": of_characters(), "train_dataset": data}
        made = a_step(tmp_path, copy.deepcopy(model), **given)
        for name, change in plain.items():
            torch.testing.assert_close(made[name], change, rtol=1e-4, atol=1e-6)
        run = a_trainer(tmp_path, copy.deepcopy(model), max_steps=1, **given)
        run.train()
        assert logs(run, "transport_cost") == [0.0]


def test_ignored_labels_alone_change_nothing(tmp_path: Path) -> None:
    data = [row | {"labels": [-100] * len(row["labels"])} for row in sums()]
    for numbers in (None, NumberSettings(span="log")):
        made = a_step(
            tmp_path, tiny_model("llama"), objective="number_token", numbers=numbers, tokenizer=of_characters(),
            train_dataset=data,
        )  # fmt: skip
        assert not any(change.any() for change in made.values())


@pytest.mark.parametrize("arm", ["number_token", "mse", "span", "emo+number"])
def test_bf16_on_the_cpu(tmp_path: Path, arm: str) -> None:
    given = ARMS[arm][0] | {"tokenizer": of_characters()}
    full = a_step(tmp_path, tiny_model("llama"), **given)["lm_head.weight"]
    for made in (
        a_step(tmp_path, tiny_model("llama"), bf16=True, **given)["lm_head.weight"],
        a_step(tmp_path, tiny_model("llama").bfloat16(), **given)["lm_head.weight"].float(),
    ):
        assert 1e-5 < float((made - full).norm() / full.norm()) < 0.1


@pytest.mark.parametrize("arm", ["mse", "span", "emo+number"])
def test_resuming_equals_an_unbroken_run_bit_for_bit(tmp_path: Path, arm: str) -> None:
    start = tiny_model("gpt2")  # with dropout
    settings = ARMS[arm][0] | {
        "tokenizer": of_characters(), "max_steps": 4, "save_strategy": "steps", "save_steps": 2,
        "lr_scheduler_type": "linear", "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2,
    }  # fmt: skip
    unbroken = a_trainer(tmp_path / "a", copy.deepcopy(start), **settings)
    unbroken.train()
    resumed = a_trainer(tmp_path / "b", copy.deepcopy(start), **settings)
    resumed.train(resume_from_checkpoint=str(tmp_path / "a" / "checkpoint-2"))
    assert_same_weights(unbroken.model, resumed.model)
    assert logs(unbroken, "transport_cost")[-2:] == logs(resumed, "transport_cost")[-2:]


def test_questions_need_no_collator(tmp_path: Path) -> None:
    """Answers alone are scored, and padding is not."""
    tokenizer = of_characters()
    questions = [Question(f"{a}+{b}", str(a + b)) for a in (3, 12) for b in (4, 99)]
    rows = AnsweredQuestions.from_questions(questions, tokenizer, max_length=24)
    model = tiny_model("llama")
    data = [{key: rows[i][key].tolist() for key in ("input_ids", "labels")} for i in range(len(rows))]
    given = {"objective": "number_token", "tokenizer": tokenizer, "numbers": NumberSettings(span="log")}
    by_hand = a_step(tmp_path, copy.deepcopy(model), train_dataset=data, **given)
    ours = a_step(tmp_path, model, train_dataset=rows, data_collator=None, **given)
    for name, change in by_hand.items():
        torch.testing.assert_close(ours[name], change, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("case", ["evaluated alone", "evaluated by name", "subset", "subset of a subset"])
def test_other_ways_to_give_questions_need_no_collator_either(tmp_path: Path, case: str) -> None:
    """The mean nll of rows of three lengths, each row by itself."""
    tokenizer, model = of_characters(), tiny_model("llama").eval()
    questions = [Question("a", "4"), Question("a+b", "12"), Question("a = b", "-0.5"), Question("b", "99")]
    rows: Any = AnsweredQuestions.from_questions(questions, tokenizer, max_length=24)
    given: dict[str, Any] = {"train_dataset": None, "data_collator": None, "tokenizer": tokenizer, "objective": "mle"}
    if case.startswith("subset"):
        rows = Subset(rows, [2, 0, 1])
        rows = Subset(rows, [1, 0]) if case == "subset of a subset" else rows
        given["train_dataset"] = rows
    evaluated = {"named": rows} if case == "evaluated by name" else rows
    trainer = a_trainer(tmp_path, model, eval_dataset=evaluated, max_steps=1, **given)
    total, tokens = 0.0, 0
    for i in range(len(rows)):
        ids, labels = rows[i]["input_ids"], rows[i]["labels"][1:]
        with torch.no_grad():
            logs = model(input_ids=ids[None]).logits[0, :-1].log_softmax(-1)
        total -= float(logs[labels >= 0, labels[labels >= 0]].sum())
        tokens += int((labels >= 0).sum())
    metrics = trainer.evaluate()
    prefix = "eval_named_" if case == "evaluated by name" else "eval_"
    assert metrics[f"{prefix}nll"] == pytest.approx(total / tokens, rel=1e-5)
    if given["train_dataset"] is not None:
        assert trainer.train().global_step == 1


def test_the_collator_of_other_rows_is_left_to_the_trainer(tmp_path: Path) -> None:
    rows = AnsweredQuestions([[1]], [[5]])
    with pytest.raises(KeyError, match="mine"):
        a_trainer(tmp_path, tiny_model("llama"), objective="mle", train_dataset=rows, max_steps=1,
                  data_collator=lambda items: {}["mine"]).train()  # fmt: skip
    other = a_trainer(tmp_path, tiny_model("llama"), objective="mle", train_dataset=sums()[:1], data_collator=None)
    assert other.data_collator is not pad_questions


def test_training_lowers_the_error_of_numbers(tmp_path: Path) -> None:
    tokenizer, start = of_characters(), tiny_model("llama")
    data = AnsweredQuestions.from_questions([Question("a", "4"), Question("b", "82")], tokenizer, max_length=9)
    values = NumberTokens.of(tokenizer, vocab_size=VOCAB).values
    # A squared error of 81 would swamp the likelihood under a weight made for distances.
    bent = {"objective": NumberToken(0.02), "numbers": NumberSettings("mse")}
    for arm, settings in {
        "mse": bent,
        **{name: ARMS[name][0] for name in ("number_token", "span", "emo+number")},
    }.items():
        run = a_trainer(
            tmp_path, copy.deepcopy(start), tokenizer=tokenizer, train_dataset=data, data_collator=None, max_steps=30,
            **settings,
        )  # fmt: skip
        before = number_token_scores(run.model, data, values, progress=False)
        run.train()
        after = number_token_scores(run.model, data, values, progress=False)
        assert after.expected_absolute_error < 0.3 * before.expected_absolute_error, arm
        assert after.number_mass > before.number_mass
        assert logs(run, "transport_cost")[-1] < 0.3 * logs(run, "transport_cost")[0]


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "no tokenizer": ({"objective": "number_token", "tokenizer": None}, "processing_class=tokenizer"),
    "no tokenizer for a mixture": ({"objective": "emo+number", "tokenizer": None}, "processing_class=tokenizer"),
    "no cost": ({"objective": "number_token", "cost": None}, r"NumberToken\(weight=0.3\) needs cost="),
    "a cost without numbers": (
        {"objective": "number_token:0.5", "cost": "embedding"},
        r"NumberToken\(weight=0.5\) reads how far apart numbers are, and EmbeddingCost knows .* take EMO\(0.5\)",
    ),
    "unknown cost": ({"objective": "number_token", "cost": "numbers"}, r"cost is 'numbers', expected \"auto\", one of"),
    "settings beside mle": ({"objective": "mle", "numbers": NumberSettings("mse")}, "reads no numbers"),
    "settings beside a cost": (
        {"objective": "number_token", "numbers": NumberSettings("mse"), "cost": NumberCost(torch.ones(VOCAB))},
        r"form='mse'.*, got a cost made already: NumberCost",
    ),
    "another vocabulary": (
        {"objective": "number_token", "cost": NumberCost.from_tokenizer(of_characters())},
        f"vocabulary of {FIRST + len(CHARACTERS)} tokens, the logits have {VOCAB}",
    ),
    "spans of a mixture": ({"objective": "emo+number"} | SPAN, "span='relative' of numbers goes with number_token"),
    "no number": ({"objective": "number_token", "tokenizer": of_characters("ab?")}, "no token that is a number"),
    "too many tokens": (
        {"objective": "number_token", "tokenizer": of_characters(CHARACTERS + "cdefghijklmn")}, "31"
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_what_cannot_be_is_refused(tmp_path: Path, case: str) -> None:
    settings, message = BAD[case]
    with pytest.raises(ValueError, match=message):
        a_trainer(tmp_path, tiny_model("llama"), **{"tokenizer": of_characters()} | settings)


def test_an_objective_changed_for_one_that_reads_numbers_is_refused(tmp_path: Path) -> None:
    run = a_trainer(tmp_path, tiny_model("llama"), objective="mle", tokenizer=of_characters())
    run.objective = NumberToken()
    with pytest.raises(ValueError, match=r"give the trainer cost=\"number\" or NumberCost"):
        run.train()


def test_wrong_types_are_refused(tmp_path: Path) -> None:
    for settings in ({"numbers": {"form": "mse"}}, {"tokenizer": 3}):
        with pytest.raises(TypeError, match=r"expected NumberSettings|tokenizer"):
            a_trainer(tmp_path, tiny_model("llama"), objective="number_token",
                      **{"tokenizer": of_characters()} | settings)  # fmt: skip


# ---- compiled programs -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("kind", ["wasserstein", "mse", "mae", "huber", "span"])
def test_a_compiled_program_has_the_numbers_of_eager(kind: str, reduction: str) -> None:
    given = problem(50, batch=(3, 8), vocab=VOCAB)
    given.labels = torch.where(given.labels >= 0, FIRST + given.labels % 12, given.labels)  # digits, '-' and '.'
    tokens = NumberTokens.of(of_characters(), vocab_size=VOCAB)
    cost = NumberSpanCost(tokens, dtype=torch.float64) if kind == "span" else NumberCost(tokens.values, form=kind)

    def score(*leaves: Tensor) -> Any:
        return fused([2.0 * leaves[0], *leaves[1:]], given, objective=NumberToken(), cost=cost, reduction=reduction)

    torch.compiler.reset()
    leaves, again = given.leaves(), given.leaves()
    got, want = torch.compile(score, backend="aot_eager", fullgraph=True)(*leaves), score(*again)
    assert bool((want.cost > 0).any())
    for mine, expected in zip(got, want, strict=True):
        torch.testing.assert_close(mine, expected, rtol=1e-14, atol=0)
    assert_all_close(gradients(got.loss.sum(), leaves), gradients(want.loss.sum(), again), 1e-14)
    torch.compiler.reset()


# ---- the command line ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def questions(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("questions") / "sums.jsonl"
    lines = [{"question": f"{a} + {b}", "answer": str(a + b)} for a in range(7) for b in (5, 40)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return path


def on_questions(tiny: Tiny, folder: Path, questions: object, **changes: object) -> list[str]:
    """`train_options` on questions: three steps, numbers."""
    given = {"max_steps": 3, "train_questions": questions, "objective": "number_token"} | changes
    given = {name: value for name, value in given.items() if value is not None}
    options = train_options(tiny, folder, **given)
    if "train_text" in changes:
        return options
    at = options.index("--train_text")
    return options[:at] + options[at + 2 :]


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"number_scaling": "log"}, "numbers=12, text=2.32561, scaling='log')"),
        ({"number_form": "mse", "number_scaling": "rank"}, "form='mse', scaling='rank'"),
        ({"number_span": "relative"}, "NumberSpanCost("),
        ({"objective": "emo+number"}, "NumberCost("),
        ({"objective": "emo+number", "cost_embedding": "random", "train_on_question": True}, "NumberCost("),
        ({"objective": "number_token:0.1", "train_text": True, "train_questions": None}, "NumberCost("),
    ],
    ids=str,
)
def test_train_on_numbers(
    cli: Cli, tiny: Tiny, questions: Path, tmp_path: Path, settings: dict[str, object], said: str
) -> None:
    settings = settings | ({"train_text": tiny.text} if "train_text" in settings else {})
    given = on_questions(tiny, tmp_path / "run", questions, **settings)
    ended = cli(*given)
    assert ended.code == 0, ended.err
    assert ended.json["train_transport_cost"] > 0
    assert ended.json["eval_transport_cost"] > 0
    values = NumberTokens.of(load_tokenizer(str(tiny.llama)), vocab_size=load_model(str(tiny.llama)).config.vocab_size)
    assert str(values.coverage()) in ended.err
    assert "tokens that are trained on are numbers (" in ended.err
    assert said in read(tmp_path / "run/run.json")["numbers"]
    assert cli(*given).json == ended.json, "finished: nothing is trained again"


def test_other_numbers_are_another_run(cli: Cli, tiny: Tiny, questions: Path, tmp_path: Path) -> None:
    assert cli(*on_questions(tiny, tmp_path / "run", questions, number_scaling="log")).code == 0
    for other in ({"number_scaling": "rank"}, {"number_scaling": "log", "number_form": "mae"}, {"number_span": "log"}):
        error = cli(*on_questions(tiny, tmp_path / "run", questions, **other)).error
        assert "holds another run (numbers: " in error


BAD_COMMANDS: dict[str, tuple[dict[str, object], list[str]]] = {
    "text and questions": ({"train_text": "text.txt"}, ["both", "--train_text", "--train_questions"]),
    "nothing": ({"train_questions": None}, ["neither", "--train_text", "--train_questions"]),
    "validation of text": ({"validation_text": "text.txt"}, ["--validation_text", "--train_questions"]),
    "missing file": ({"train_questions": "none.jsonl"}, ["none.jsonl", "no file"]),
    "missing validation": ({"validation_questions": "none.jsonl"}, ["none.jsonl", "no file"]),
    "too long": ({"block_size": 3}, ["13 of 13", "max_length=3"]),
    "form beside mle": ({"objective": "mle", "number_form": "mse"}, ["form='mse'", "--number_form", "number_token"]),
    "span beside emo": ({"objective": "emo", "number_span": "log"}, ["span='log'", "--number_span"]),
    "embedding beside numbers": ({"cost_embedding": "random"}, ["--cost_embedding random", "emo+number"]),
    "unknown form": ({"number_form": "l1"}, ["'l1'", "huber"]),
    "unknown scaling": ({"number_scaling": "linear"}, ["'linear'", "rank"]),
    "unknown span": ({"number_span": "absolute"}, ["'absolute'", "relative"]),
    "no span": ({"number_span": "none"}, ["'none'", "choose from 'log', 'relative'"]),
    "span and scaling": ({"number_span": "log", "number_scaling": "log"}, ["goes without scaling='log'; leave one"]),
    "span of a mixture": (
        {"objective": "emo+number", "number_span": "log", "model_name_or_path": "nowhere"},
        ["span='log'", "emo+number mixes", "--number_span"],
    ),
    "form of a mixture": (
        {"objective": "emo+number", "number_form": "mse", "model_name_or_path": "nowhere"},
        ["form='mse'", "emo+number mixes", "--number_form"],
    ),
    "empty name": ({"train_questions": ""}, ["neither", "--train_text", "--train_questions"]),
    "column of text": ({"text_column": "story"}, ["--text_column", "--train_questions", "leave it out"]),
    "no share left": (
        {"train_questions": "one.jsonl"}, ["the 1 different question of", "--validation_fraction 0.05", "a share of 0"]
    ),
    "wrong share": ({"validation_fraction": 1}, ["--validation_fraction is 1.0", "[0, 1)"]),
    "no number to answer": (
        {"train_questions": "words.jsonl"}, ["none of the 6 tokens", "would be mle", "--train_on_question"]
    ),
    "no number at all": (
        {"train_questions": "words.jsonl", "train_on_question": True, "objective": "emo+number"},
        ["none of the 9 tokens", "would be emo; train on what has numbers"],
    ),
    "negative weight": ({"objective": "number_token:-1"}, ["number_token:-1", "non-negative"]),
    "no numbers": ({"model_name_or_path": "wordy"}, ["no token that is a number", "' one'"]),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD_COMMANDS)
def test_a_training_on_numbers_that_cannot_be_is_refused(
    cli: Cli, tiny: Tiny, questions: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    monkeypatch.chdir(tmp_path)
    changes, said = BAD_COMMANDS[case]
    (tmp_path / "one.jsonl").write_text('{"question": "1 + 1", "answer": "2"}\n', encoding="utf-8")
    words = [{"question": question, "answer": "a"} for question in ("b", "c", "d", "e")]
    (tmp_path / "words.jsonl").write_text("".join(json.dumps(line) + "\n" for line in words), encoding="utf-8")
    if case == "no numbers":
        save(tiny_model("llama"), of_words(), tmp_path / "wordy")
    error = cli(*on_questions(tiny, tmp_path / "run", questions, **changes)).error
    assert all(word in error for word in said), error
    assert not (tmp_path / "run").exists() or not list((tmp_path / "run").iterdir())


def test_a_broken_line_is_named(cli: Cli, tiny: Tiny, tmp_path: Path) -> None:
    path = tmp_path / "broken.jsonl"
    path.write_text('{"question": "1", "answer": "2"}\n{"question": "3", "reply": "4"}\n', encoding="utf-8")
    error = cli(*on_questions(tiny, tmp_path / "run", path)).error
    assert "line 2 has no column 'answer'" in error


# ---- real data -------------------------------------------------------------------------------------------------------


@pytest.mark.skipif(not (STORIES.is_dir() and GSM8K.is_file()), reason="no model and questions at hand")
@pytest.mark.parametrize("numbers", [None, NumberSettings(span="log")], ids=str)
def test_the_error_of_the_numbers_of_real_text_falls(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], numbers: NumberSettings | None
) -> None:
    model, tokenizer = load_model(str(STORIES)), load_tokenizer(str(STORIES))
    tokens = NumberTokens.of(tokenizer, vocab_size=model.config.vocab_size)
    found = tokens.coverage()
    assert (found.distinct, found.lowest, found.highest, found.digits_missing) == (10, 0, 9, ())
    texts = [f"{question.question}\n{question.answer}" for question in read_questions(GSM8K)[:400]]
    train = PackedBlocks.from_texts(texts[:360], tokenizer, 128, progress=False)
    held_out = PackedBlocks.from_texts(texts[360:], tokenizer, 128, progress=False)
    run = ObjectiveTrainer(
        model, arguments(tmp_path, max_steps=30, per_device_train_batch_size=4, learning_rate=2e-3),
        objective="number_token", numbers=numbers, processing_class=tokenizer, train_dataset=train,
    )  # fmt: skip
    before = number_token_scores(model, held_out, tokens.values, progress=False)
    run.train()
    after = number_token_scores(model, held_out, tokens.values, progress=False)
    assert before.tokens > 1000
    assert after.expected_log_error < 0.95 * before.expected_log_error
    assert after.accuracy > 2 * before.accuracy
    assert after.number_mass > 2 * before.number_mass


# ---- the example -----------------------------------------------------------------------------------------------------


def test_the_example_prints_coverage_and_a_line_for_each_arm(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["number_tokens.py", "--steps", "3", "--questions", "60", "--largest", "9"]
    monkeypatch.setattr(sys, "argv", arguments)
    verbosity, bars = transformers.utils.logging.get_verbosity(), transformers.utils.logging.is_progress_bar_enabled()
    try:
        made = runpy.run_path(str(EXAMPLE), run_name="__main__")
    finally:
        transformers.utils.logging.set_verbosity(verbosity)
        if bars:
            transformers.utils.logging.enable_progress_bar()
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("10 of 257 tokens are numbers: 10 values from 0 to 9")
    assert lines[2].startswith("distances: form wasserstein, scaling symlog; ")
    assert "54 sums to train on, 6 others to answer" in lines[3]
    assert [line[:20].strip() for line in lines[6:9]] == list(made["ARMS"])
    assert "One seed and 6 sums" in lines[-1]
    right, wrong = ["42", "7", "100"], ["42", "8", "none"]
    told = made["line"]("arm", wrong, right)
    assert told.split() == ["arm", "33.3%", "66.7%", "1", "0.118"]  # log(9 / 8), of 8 for 7
    assert made["line"]("arm", right, right).split() == ["arm", "100.0%", "100.0%"]
    assert "no answer that is wrong is a number" in made["line"]("arm", ["x"], ["1"])
