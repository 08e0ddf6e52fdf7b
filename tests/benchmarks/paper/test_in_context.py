"""Classification in context by models whose answers are known."""

import math
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("sklearn")

from benchmarks.paper.data.labelled import LabelledText
from benchmarks.paper.evaluation.in_context import classify_in_context, retrieve, similarities
from otloss_llm.data import train_bpe_tokenizer
from tests.otloss_llm.tiny_models import tiny_model

TRAIN = [
    LabelledText("the film was a joy", "good"), LabelledText("a joy to watch this film", "good"),
    LabelledText("the plot was dull and slow", "bad"), LabelledText("slow and dull as rain", "bad"),
]  # fmt: skip
TEST = [LabelledText("what a joy of a film", "good"), LabelledText("dull dull and slow", "bad")]


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return train_bpe_tokenizer([item.text for item in TRAIN] + ["Text: Label: good bad"] * 9, 300)


def _model(positions: int = 256) -> Any:
    return tiny_model("gpt2", vocab_size=300, n_positions=positions).eval()


def test_scores_are_the_mean_nll_of_each_prompt(tokenizer: Any) -> None:
    model = _model()
    actual = classify_in_context(model, tokenizer, TEST, TRAIN, demonstrations=1, progress=False)

    def nll(text: str) -> float:
        ids = torch.tensor([tokenizer(text)["input_ids"]])
        with torch.no_grad():
            return float(model(input_ids=ids, labels=ids).loss)

    for item, given in zip(TEST, actual.predictions, strict=True):
        before = _shown(item.text)
        scores = {label: nll(f"{before}\n\nText: {item.text}\nLabel: {label}") for label in ("bad", "good")}
        assert given == min(scores, key=scores.__getitem__)
    assert (actual.chance, actual.majority, actual.removed, actual.shortened) == (0.5, 0.5, 0, 0)


def _shown(text: str) -> str:
    ((position,),), _ = retrieve([text], TRAIN, 1, "tfidf")
    return f"Text: {TRAIN[position].text}\nLabel: {TRAIN[position].label}"


def test_demonstrations_that_are_the_test_text_are_left_out(tokenizer: Any) -> None:
    nearest, removed = retrieve([TRAIN[0].text.upper(), TEST[1].text], TRAIN, 2, "tfidf")
    assert removed == 1
    assert all(0 not in row or i == 1 for i, row in enumerate(nearest))
    assert [len(row) for row in nearest] == [2, 2]
    fixed, removed = retrieve([TRAIN[0].text, "x", "y"], TRAIN, 2, "none")
    assert (removed, fixed[1], fixed[1] == fixed[2], 0 in fixed[0], len(fixed[0])) == (1, [2, 0], True, False, 2)


def test_bm25_is_its_formula() -> None:
    texts = ["aa bb bb cc", "bb dd", "cc cc cc dd ee"]
    actual = similarities(["bb cc"], texts, "bm25")[0]
    words = [t.split() for t in texts]
    mean = np.mean([len(w) for w in words])
    for row, document in zip(actual, words, strict=True):
        score = 0.0
        for word in ("bb", "cc"):
            held, tf = sum(word in w for w in words), document.count(word)
            inverse = math.log(1 + (3 - held + 0.5) / (held + 0.5))
            score += inverse * tf * 2.5 / (tf + 1.5 * (0.25 + 0.75 * len(document) / mean))
        assert row == pytest.approx(score)


def test_long_prompts_lose_demonstrations(tokenizer: Any) -> None:
    actual = classify_in_context(_model(32), tokenizer, TEST, TRAIN, demonstrations=4, progress=False)
    assert actual.shortened == 2
    long = LabelledText("dull " * 40, "bad")
    without = classify_in_context(_model(32), tokenizer, [TEST[0], long, TEST[1]], TRAIN, demonstrations=4)
    assert (without.predictions[1], without.left_out, without.shortened) == (None, 1, 2)
    assert (without.accuracy, without.majority) == (actual.accuracy, actual.majority)
    with pytest.raises(ValueError, match=r"each of the 2 texts has more tokens .* context of 8"):
        classify_in_context(_model(8), tokenizer, TEST, TRAIN, demonstrations=4, progress=False)


def test_calibration_takes_out_what_a_label_has_without_the_text(tokenizer: Any) -> None:
    model, settings = _model(), {"demonstrations": 1, "progress": False}
    plain = classify_in_context(model, tokenizer, TEST, TRAIN, scoring="calibrated", **settings)
    good = torch.nn.functional.one_hot(torch.tensor(tokenizer(" good")["input_ids"][0]), 300)
    model.lm_head.register_forward_hook(lambda _, given, logits: logits + 50 * good)
    for scoring, expected in (("label", ("good", "good")), ("calibrated", plain.predictions)):
        actual = classify_in_context(model, tokenizer, TEST, TRAIN, scoring=scoring, **settings)
        assert actual.predictions == expected
