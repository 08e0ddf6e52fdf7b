"""Datasets of the library datasets: splits, columns, rows; on the command line and in the trainer."""

from pathlib import Path
from typing import Any

import pytest
import transformers

from otloss_llm import MLE, ObjectiveTrainer
from otloss_llm.data.hugging_face import load_splits, read_examples, tokenised
from otloss_llm.data.questions import AnsweredQuestions, Question
from tests.otloss_llm.conftest import Tiny, tiny_text
from tests.otloss_llm.training.trainer_cases import arguments, by_hand

datasets = pytest.importorskip("datasets")
TEXTS = tiny_text(60).split("\n")
TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
USER, ANSWER = {"role": "user", "content": "2 + 3?"}, {"role": "assistant", "content": "5"}


@pytest.fixture(autouse=True)
def no_bars() -> None:
    datasets.disable_progress_bars()


def saved(folder: Path, **splits: list[dict[str, Any]]) -> Path:
    """A folder of `save_to_disk`."""
    made = {name: datasets.Dataset.from_list(rows) for name, rows in splits.items()}
    datasets.DatasetDict(made).save_to_disk(str(folder))
    return folder


def test_splits_of_saved_datasets_of_files_and_of_folders(tmp_path: Path) -> None:
    rows = [{"text": text} for text in TEXTS[:6]]
    whole = saved(tmp_path / "whole", train=rows[:3], validation=rows[3:5], test=rows[5:], other=rows)
    assert {part: len(split) for part, split in load_splits(str(whole)).items()} == {
        "train": 3, "validation": 2, "test": 1,
    }  # fmt: skip
    datasets.Dataset.from_list(rows).save_to_disk(str(tmp_path / "one"))
    (tmp_path / "files").mkdir()
    datasets.Dataset.from_list(rows).to_parquet(str(tmp_path / "files" / "train.parquet"))
    datasets.Dataset.from_list(rows).to_csv(str(tmp_path / "rows.csv"))
    only = saved(tmp_path / "only", anything=rows)
    for source in (tmp_path / "one", tmp_path / "files", tmp_path / "rows.csv", only):
        (split,) = load_splits(str(source)).values()
        assert read_examples(split, "name").rows == TEXTS[:6]


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [("text.txt", "text", r"ends in '.txt', expected .json.*--train_text"),
     ("broken.jsonl", "{{", r"the dataset .* cannot be loaded: .*JSON parse error"),
     ("empty.jsonl", "", "cannot be loaded: it has no rows")],
)  # fmt: skip
def test_sources_that_cannot_be_loaded(tmp_path: Path, name: str, content: str, said: str) -> None:
    (tmp_path / name).write_text(content, encoding="utf-8")
    with pytest.raises(ValueError, match=said):
        load_splits(str(tmp_path / name))


def test_columns_decide_what_an_example_is() -> None:
    def read(*rows: dict[str, Any], **settings: Any) -> Any:
        return read_examples(datasets.Dataset.from_list(list(rows)), "name", **settings)

    assert read({"text": "a"}, {"text": " "}).rows == ["a"]
    assert read({"text": "a", "body": "b"}, text_column="body").rows == ["b"]
    asked = read({"question": "2 + 3?", "answer": "5"})
    assert (asked.kind, asked.rows, asked.separator) == ("questions", [Question("2 + 3?", "5")], "\n")
    completed = read({"prompt": "2 + 3 = ", "completion": "5"})
    assert (completed.kind, completed.rows, completed.separator) == ("questions", [Question("2 + 3 = ", "5")], "")
    for row in ({"messages": [USER, ANSWER]}, {"prompt": [USER], "completion": [ANSWER]}):
        chat = read(row)
        assert (chat.kind, chat.rows) == ("chat", [[USER, ANSWER]])

    for row, said in (
        ({"body": "a"}, r"'name' has the columns \['body'\], expected text, prompt"),
        ({"text": " "}, "has no example that is not blank"),
        ({"question": "", "answer": "5"}, "question or answer is blank"),
        ({"messages": [USER]}, "no message of the role assistant"),
        ({"prompt": [USER, ANSWER, USER], "completion": [ANSWER]}, "has an answer in its prompt"),
    ):
        with pytest.raises(ValueError, match=said):
            read(row)


# ---- the trainer -----------------------------------------------------------------------------------------------------


def test_rows_have_labels_on_what_is_trained(tiny: Tiny) -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(tiny.llama)
    tokenizer.chat_template = TEMPLATE

    def labels(row: dict[str, Any], **settings: Any) -> list[list[int]]:
        rows = tokenised(datasets.Dataset.from_list([row]), tokenizer, **{"max_length": 64} | settings)
        assert isinstance(rows, AnsweredQuestions)
        item = rows[0]
        return [item[key].tolist() for key in ("input_ids", "labels")]

    def ids(text: str) -> list[int]:
        return tokenizer(text, add_special_tokens=False)["input_ids"]

    end = tokenizer.eos_token_id
    text = ids("The fox")
    assert labels({"text": "The fox"}) == [[*text, end]] * 2
    assert labels({"text": "The fox"}, max_length=2) == [text[:2]] * 2
    prompt, answer = ids("2 + 3 = "), [*ids("5"), end]
    assert labels({"prompt": "2 + 3 = ", "completion": "5"}) == [prompt + answer, [-100] * len(prompt) + answer]
    prompt, answer = ids("<user>2 + 3?<assistant>"), ids("5")
    for row in ({"messages": [USER, ANSWER]}, {"prompt": [USER], "completion": [ANSWER]}):
        assert labels(row) == [prompt + answer, [-100] * len(prompt) + answer]


def test_the_trainer_takes_datasets_as_they_are(tiny: Tiny, tmp_path: Path) -> None:
    """The loss is that of the same rows tokenised by hand; a dataset by name among several to evaluate on too."""
    model = transformers.AutoModelForCausalLM.from_pretrained(tiny.llama)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tiny.llama)
    data = datasets.Dataset.from_list([{"text": text} for text in TEXTS[:4]])
    args = arguments(tmp_path, per_device_eval_batch_size=4, max_steps=1)
    trainer = ObjectiveTrainer(
        model, args, objective="mle", train_dataset=data, eval_dataset={"own": data}, processing_class=tokenizer
    )
    end, made = tokenizer.eos_token_id, [tokenizer(text, add_special_tokens=False)["input_ids"] for text in TEXTS[:4]]
    rows = [{"input_ids": [*ids, end][:64], "labels": [*ids, end][:64]} for ids in made]
    expected = by_hand(model, rows, MLE(), None)["nll"]
    assert trainer.evaluate()["eval_own_nll"] == pytest.approx(expected, rel=1e-5)
    trainer.train()
    with pytest.raises(ValueError, match="the dataset is text, and there is no tokenizer"):
        ObjectiveTrainer(model, args, objective="mle", train_dataset=data)
    weighted = data.add_column("token_weight", [[1.0]] * len(data))
    with pytest.raises(ValueError, match="the dataset is text and has a column token_weight"):
        ObjectiveTrainer(model, args, objective="mle", train_dataset=weighted, processing_class=tokenizer)
