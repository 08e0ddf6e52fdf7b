"""Which cost an objective is given, and what keeps one from being made."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("transformers")

import torch

from otloss_llm import EMO, EmbeddingCost, MixedCost, NumberCost, NumberToken
from otloss_llm.cost_choice import NumberSettings, choose_cost, number_cost
from otloss_llm.data import train_bpe_tokenizer
from otloss_llm.number_spans import NumberSpanCost
from otloss_llm.objectives import cost_kind


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    """Byte-level: 10 digits, and no number of several."""
    return train_bpe_tokenizer(["a b 1 2 1 2"], 260, split_digits=True)


@pytest.fixture(scope="module")
def wordy() -> Any:
    """No token with a digit."""
    tokenizers, transformers = pytest.importorskip("tokenizers"), pytest.importorskip("transformers")
    words = tokenizers.models.WordLevel({"<unk>": 0, "one": 1, "two": 2, "three": 3}, unk_token="<unk>")
    return transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizers.Tokenizer(words), unk_token="<unk>")


def made(tokenizer: Any, kind: str, **settings: Any) -> Any:
    size = len(tokenizer) + 3  # a head padded beyond the tokenizer
    embedding = torch.randn(size, 4, generator=torch.Generator().manual_seed(0))
    numbers = NumberSettings(**settings) if settings else None
    return choose_cost(
        kind, embedding=lambda: EmbeddingCost(embedding), tokenizer=tokenizer, vocab_size=size, numbers=numbers
    )


@pytest.mark.parametrize(
    ("objective", "kind"),
    [
        ("mle", "embedding"), ("emo:transport", "embedding"), (EMO(), "embedding"),
        (lambda nll, cost: nll, "embedding"),
        ("number_token", "number"), (" Number_Token:0.5", "number"), (NumberToken(2.0), "number"),
        ("emo+number", "mixed"), ("emo+number:clip=3", "mixed"),
    ],
)  # fmt: skip
def test_the_kind_of_an_objective(objective: Any, kind: str) -> None:
    assert cost_kind(objective) == kind


def test_each_kind_over_a_padded_head(tokenizer: Any) -> None:
    size = len(tokenizer) + 3
    for kind, expected in (("embedding", EmbeddingCost), ("number", NumberCost), ("mixed", MixedCost)):
        cost = made(tokenizer, kind)
        assert type(cost) is expected
        assert cost.shape == (size, size)
    cost = made(tokenizer, "number")
    assert cost.settings == {"form": "wasserstein", "scaling": "absolute", "squash": None}
    assert set(cost.values[cost.is_number].tolist()) == set(range(10))
    assert not cost.is_number[-3:].any()


def test_settings_reach_the_cost(tokenizer: Any) -> None:
    assert made(tokenizer, "number", form="huber", scaling="rank").settings["form"] == "huber"
    assert made(tokenizer, "mixed", scaling="log").numbers.settings["scaling"] == "log"
    for scale in ("log", "relative"):
        span = made(tokenizer, "number", span=scale)
        assert type(span) is NumberSpanCost
        assert (span.scale, span.shape[0]) == (scale, len(tokenizer) + 3)


def test_numbers_of_several_digits_get_a_bounded_scale() -> None:
    several = train_bpe_tokenizer(["2024 365 1999 " * 20], 280)
    cost = number_cost(several, len(several), NumberSettings())
    assert isinstance(cost, NumberCost)
    assert float(cost.values[cost.is_number].amax()) > 100
    assert cost.settings["scaling"] == "log"
    assert cost.text < 20


def test_names_of_settings() -> None:
    assert str(NumberSettings()) == ""
    assert str(NumberSettings("mse", "log")) == "mse/log"
    assert str(NumberSettings(span="relative")) == "span-relative"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"form": "l1"}, r"form of numbers is 'l1', expected one of .*wasserstein"),
        ({"scaling": "linear"}, r"scaling of numbers is 'linear', expected one of \('auto', 'absolute'"),
        ({"span": "absolute"}, r"span of numbers is 'absolute', expected one of \(None, 'log', 'relative'\)"),
        ({"span": "log", "form": "mse"}, "span='log' judges whole numbers, and goes with neither form='mse'"),
        ({"span": "log", "scaling": "rank"}, "scaling='rank'; leave them out"),
    ],
)
def test_settings_that_cannot_be(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        NumberSettings(**settings)


def test_costs_that_cannot_be(tokenizer: Any, wordy: Any) -> None:
    with pytest.raises(ValueError, match=r'cost is \'numbers\', expected "auto", one of .*"?number'):
        made(tokenizer, "numbers")
    with pytest.raises(ValueError, match=r"form='mse'.* reads no numbers"):
        made(tokenizer, "embedding", form="mse")
    with pytest.raises(ValueError, match="span='log' goes with the cost \"number\", a mixture needs the values"):
        made(tokenizer, "mixed", span="log")
    with pytest.raises(ValueError, match='form="mse" charges the mean number and has no cost of single tokens'):
        made(tokenizer, "mixed", form="mse")
    with pytest.raises(TypeError, match=r"numbers is \{'form': 'mse'\}, expected NumberSettings\(form"):
        choose_cost(
            "number", embedding=lambda: EmbeddingCost(torch.eye(3)), tokenizer=tokenizer, vocab_size=400,
            numbers={"form": "mse"},  # type: ignore[arg-type]
        )  # fmt: skip
    for settings in ({}, {"span": "log"}):
        with pytest.raises(ValueError, match="has no token that is a number; it has ' one'"):
            number_cost(wordy, len(wordy), NumberSettings(**settings))
        with pytest.raises(ValueError, match=r"there is none; give the trainer processing_class=tokenizer"):
            number_cost(None, 300, NumberSettings(**settings))
        with pytest.raises(ValueError, match=rf"100.*{len(tokenizer)}|{len(tokenizer)}.*100"):
            number_cost(tokenizer, 100, NumberSettings(**settings))
        with pytest.raises(TypeError, match="tokenizer"):
            number_cost(3, 300, NumberSettings(**settings))
