"""The task for lm-evaluation-harness: demonstrations and strings, and a run of it where lm_eval is installed."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("datasets")

from benchmarks.paper.data.labelled import LabelledText
from benchmarks.paper.models import load_model_and_tokenizer
from benchmarks.paper.tasks import in_context
from tests.otloss_llm.conftest import Tiny

TRAIN = [
    LabelledText("the film was a joy", "good"), LabelledText("a joy to watch this film", "good"),
    LabelledText("the plot was dull and slow", "bad"), LabelledText("slow and dull as rain", "bad"),
]  # fmt: skip
TEST = [LabelledText("what a joy of a film", "good"), LabelledText("dull dull and slow", "bad")]


def write(path: Path, texts: list[LabelledText]) -> str:
    path.write_text("".join(json.dumps(vars(text)) + "\n" for text in texts), encoding="utf-8")
    return str(path)


def test_demonstrations_that_are_the_test_text_are_left_out() -> None:
    first, second = in_context.nearest([TRAIN[0].text.upper(), TEST[1].text], TRAIN, 2)
    assert 0 not in first
    assert len(first) == len(second) == 2
    assert second[-1] in (2, 3)  # the nearest is shown last


def test_long_prompts_lose_demonstrations(tiny: Tiny, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The context has 64 tokens, which are bytes for most of these words."""
    long = LabelledText("dull " * 40, "bad")
    settings = {"pretrained": str(tiny.gpt2), "train": write(tmp_path / "train.jsonl", TRAIN)}
    docs = in_context.load(texts=write(tmp_path / "test.jsonl", [TEST[0], long]), demonstrations=4, **settings)["test"]
    assert len(docs) == 1
    assert "1 of 2 texts exceed the context and are left out, 1 have fewer demonstrations" in caplog.text
    assert max(docs[0]["tokens"]) < 64
    with pytest.raises(ValueError, match="each of the 1 texts has more tokens than the context of 64"):
        in_context.load(texts=write(tmp_path / "long.jsonl", [long]), **settings)
    with pytest.raises(ValueError, match=r"0 texts with the labels \[\] can be shown"):
        in_context.load(pretrained=str(tiny.gpt2), texts=settings["train"], num_texts=4)


def by_hand(model: Any, tokenizer: Any, text: str, stem: str) -> tuple[float, float]:
    """The mean nll of the tokens of a text after the token that begins it, and of those after the stem."""
    ids = [tokenizer.eos_token_id, *tokenizer(text)["input_ids"]]
    with torch.no_grad():
        log_q = model(input_ids=torch.tensor([ids])).logits[0, :-1].double().log_softmax(-1)
    nll = -log_q[range(len(ids) - 1), ids[1:]]
    return float(nll.mean()), float(nll[len(tokenizer(stem)["input_ids"]) :].mean())


def test_the_harness_gives_the_labels_of_each_comparison(tiny: Tiny, tmp_path: Path) -> None:
    lm_eval = pytest.importorskip("lm_eval")
    texts = [
        LabelledText(f"{word} {i}", "ab"[i % 2]) for i, word in enumerate(["fox", "dog", "café", "12", "is", "it"])
    ]
    metadata = {"pretrained": str(tiny.gpt2), "texts": write(tmp_path / "test.jsonl", texts[:4]), "demonstrations": 1,
                "train": write(tmp_path / "train.jsonl", texts[4:])}  # fmt: skip
    tasks = pytest.importorskip("lm_eval.tasks").TaskManager(
        include_path=str(Path(in_context.__file__).parent), include_defaults=False, metadata=metadata
    )
    out = lm_eval.simple_evaluate(
        "hf", model_args={"pretrained": str(tiny.gpt2), "dtype": "float32"}, tasks=["in_context"], task_manager=tasks,
        device="cpu", batch_size=4,
    )  # fmt: skip
    model, tokenizer = load_model_and_tokenizer(str(tiny.gpt2))
    expected: dict[str, list[bool]] = {"prompt": [], "label": [], "calibrated": []}
    for doc in in_context.load(**metadata)["test"]:
        stems = doc["choices"][2], doc["choices"][5]
        scores = np.array([by_hand(model, tokenizer, doc["choices"][i], stems[i // 3]) for i in (0, 1, 3, 4)])
        for name, values in (("prompt", scores[:2, 0]), ("label", scores[:2, 1]),
                             ("calibrated", scores[:2, 1] - scores[2:, 1])):  # fmt: skip
            expected[name].append(doc["labels"][values.argmin()] == doc["label"])
    for name, right in expected.items():
        assert out["results"]["in_context"][f"{name},none"] == np.mean(right)
    assert out["results"]["in_context"]["majority,none"] == out["results"]["in_context"]["chance,none"] == 0.5
