"""Comparisons on questions with answers: arms of numbers, what is measured, results kept and read again, errors."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.paper.compare import HUMAN, RIGHT, START
from benchmarks.paper.models import load_model, load_tokenizer
from tests.otloss_llm.conftest import Cli, Tiny, options, read, save
from tests.otloss_llm.tiny_models import build

SUMS = [(3, 4), (12, 30), (5, 5), (9, 8), (20, 1), (7, 70), (2, 2), (41, 3), (6, 6), (10, 15), (8, 0), (33, 33)]


def write_questions(path: Path, sums: list[tuple[int, int]]) -> Path:
    lines = [
        {"question": f"{a} + {b}?", "answer": str(a + b), "module": "tiny" if a + b < 20 else "big"} for a, b in sums
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Eight questions to train on, four to ask."""
    folder = tmp_path_factory.mktemp("questions")
    return write_questions(folder / "train.jsonl", SUMS[:8]), write_questions(folder / "test.jsonl", SUMS[8:])


def asked(tiny: Tiny, files: tuple[Path, Path], folder: Path, **changes: object) -> list[str]:
    """Two objectives, two seeds, 3 steps; what is None is left out."""
    base: dict[str, object] = {
        "model_name_or_path": tiny.llama, "train_questions": files[0], "test_questions": files[1], "output_dir": folder,
        "max_steps": 3, "save_steps": 2, "logging_steps": 3, "learning_rate": 3e-3, "use_cpu": True,
        "per_device_train_batch_size": 4, "disable_tqdm": True, "max_new_tokens": 5, "block_size": 32,
        "objectives": ["mle", "number_token/log"], "seeds": [0, 1],
    }  # fmt: skip
    return options(**{key: value for key, value in (base | changes).items() if value is not None})


def written(folder: Path) -> dict[str, int]:
    """When each model, test and answer was written."""
    kept = [*folder.glob("*/model.safetensors"), *folder.glob("*/test.json"), *folder.glob("*/answers.json")]
    return {str(path.relative_to(folder)): path.stat().st_mtime_ns for path in kept}


def rows_of(table: str) -> dict[str, dict[str, str]]:
    """`{arm: {heading: cell}}` of a report's first table."""
    lines = [line for line in table.split("\n\n")[0].splitlines() if line.startswith("| ")]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return {row[0]: dict(zip(cells[0][1:], row[1:], strict=True)) for row in cells[1:]}


# ---- results -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def compared(tiny: Tiny, files: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    from benchmarks.paper.command import main

    folder = tmp_path_factory.mktemp("compared")
    assert main(asked(tiny, files, folder)) == 0
    return folder


def test_every_run_is_in_the_table_and_the_text_itself_is_not(compared: Path) -> None:
    report = read(compared / "report.json")
    assert [(run["arm"], run["seed"]) for run in report["runs"]] == [
        (arm, seed) for seed in (0, 1) for arm in ("mle", "number_token/log")
    ]
    text = (compared / "report.md").read_text(encoding="utf-8")
    rows = rows_of(text.split("\n\n", 1)[1])
    assert list(rows) == [START, "mle", "number_token/log"]
    assert HUMAN not in text
    nll = [run["answer_nll"] for run in report["runs"] if run["arm"] == "mle"]
    assert rows["mle"]["nll of answers ↓"] == f"{np.mean(nll):.3f} ± {np.std(nll, ddof=1):.3f}"
    assert rows[START]["nll of answers ↓"] == f"{report['start']['answer_nll']:.3f}"
    more = [run["answer_nll"] for run in report["runs"] if run["arm"] == "number_token/log"]
    change = np.subtract(more, nll)
    half = 12.706 * np.std(change, ddof=1) / math.sqrt(2)  # Student's t with one degree of freedom
    changes = rows_of(text.split("Student's t):\n\n")[1])
    assert changes["number_token/log"]["nll of answers ↓"] == f"{np.mean(change):.3f} ± {half:.3f}"
    samples = (compared / "samples.md").read_text(encoding="utf-8")
    right = [line for line in samples.splitlines() if RIGHT in line]
    assert right == [f"| {RIGHT} | {a + b} |" for a, b in SUMS[8:]]


def test_the_numbers_are_those_of_the_model(compared: Path, files: tuple[Path, Path]) -> None:
    """Likelihood, number tokens and greedy answers of one run, each question by itself, by other means."""
    folder = compared / "number_token-log-seed1"
    model, tokenizer = load_model(str(folder)).eval(), load_tokenizer(str(folder))
    texts = {i: tokenizer.decode([i]).strip() for i in range(len(tokenizer))}
    numbers = {i: int(text) for i, text in texts.items() if text.isdecimal()}
    nll, errors, answers = [], [], []
    for a, b in SUMS[8:]:
        prompt, answer = tokenizer(f"{a} + {b}?\n")["input_ids"], tokenizer(str(a + b))["input_ids"]
        assert set(answer) <= numbers.keys()
        ids = torch.tensor([prompt + answer + [tokenizer.eos_token_id]])
        with torch.no_grad():
            logs = model(input_ids=ids).logits[0].double().log_softmax(-1)
            shown = model.generate(
                torch.tensor([prompt]), max_new_tokens=5, do_sample=False, pad_token_id=tokenizer.eos_token_id
            )
        nll += [-float(logs[t - 1, ids[0, t]]) for t in range(len(prompt), ids.shape[1])]
        for t, token in enumerate(answer, len(prompt)):
            share = torch.stack([logs[t - 1, i] for i in numbers]).softmax(0)
            far = [abs(math.log1p(value) - math.log1p(numbers[token])) for value in numbers.values()]
            errors.append(sum(p * d for p, d in zip(share.tolist(), far, strict=True)))
        answers.append(tokenizer.decode(shown[0, len(prompt) :], skip_special_tokens=True))
    tested = read(folder / "test.json")
    assert tested["answer_nll"] == pytest.approx(np.mean(nll), rel=1e-5)
    assert tested["answer_tokens"] == len(nll)
    assert tested["number_token_log_error"] == pytest.approx(np.mean(errors), rel=1e-5)
    assert read(folder / "answers.json") == answers


@pytest.mark.slow
def test_what_is_there_is_neither_trained_nor_asked_again(
    cli: Cli, tiny: Tiny, files: tuple[Path, Path], tmp_path: Path
) -> None:
    """And the scores are of the answers that are kept: three known ones and one without a number."""
    folder = tmp_path / "run"
    given = asked(tiny, files, folder, objectives=["mle"], num_prompts=2)
    assert cli(*given).code == 0
    for seed, answers in ((0, ["12", "24", "-8", "x"]), (1, ["12", "25", "8", "66"])):
        (folder / f"mle-seed{seed}/answers.json").write_text(json.dumps(answers), encoding="utf-8")
    before = written(folder)
    again = cli(*given)
    assert again.code == 0
    row = rows_of(again.out)["mle"]
    assert row["exact match, % ↑"] == "62.5 ± 53.0"  # 1 of 4, and 4 of 4
    assert row["answered, %"] == "87.5 ± 17.7"
    assert row["median absolute error ↓"] == "0.5 ± 0.707"  # 1 of 0, 1, 16
    log_error = (math.log(26 / 25) + 2 * math.log(9)) / 3
    assert row["log error ↓"] == f"{log_error / 2:.3f} ± {log_error / math.sqrt(2):.3f}"
    assert "| big | 2 | 50.0 |" in (folder / "report.md").read_text(encoding="utf-8")
    more = cli(*asked(tiny, files, folder, objectives=["mle", "emo+number"], seeds=[0, 1, 2], num_prompts=4))
    assert more.code == 0
    assert {path: at for path, at in written(folder).items() if path in before} == before
    assert len(read(folder / "report.json")["runs"]) == 6


@pytest.mark.slow
def test_questions_may_come_from_the_training_file(cli: Cli, tiny: Tiny, tmp_path: Path) -> None:
    """A share of it, thinned to a number; right answers that are too long are counted."""
    train = write_questions(tmp_path / "all.jsonl", SUMS)
    given = asked(
        tiny, (train, train), tmp_path / "run", test_questions=None, test_fraction=0.5, validation_fraction=0.0,
        num_questions=3, objectives=["emo"], seeds=[0], max_new_tokens=1,
    )  # fmt: skip
    ended = cli(*given)
    assert ended.code == 0
    report = read(tmp_path / "run/report.json")
    assert report["prompts"] == [f"{a} + {b}?" for a, b in (SUMS[0], SUMS[4], SUMS[8])]  # 0, 2, ... 10 thinned
    assert "note: 2 right answers are longer than max_new_tokens=1" in ended.err  # 21 and 12, not 7
    seen = write_questions(tmp_path / "seen.jsonl", [*SUMS[6:8], SUMS[6], (1, 90)])
    ended = cli(*asked(tiny, (train, seen), tmp_path / "seen", objectives=["mle"], seeds=[0], validation_fraction=0))
    assert "note: 3 of 4 test questions are also training questions" in ended.err


# ---- encoder-decoders --------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_t5_is_compared_by_its_decoder(cli: Cli, tiny: Tiny, files: tuple[Path, Path], tmp_path: Path) -> None:
    """The encoder reads the question and the labels are the answer: likelihood and greedy answers by other means."""
    tokenizer, task = load_tokenizer(str(tiny.llama)), "ForConditionalGeneration"
    ends = {"decoder_start_token_id": 0, "pad_token_id": 0, "eos_token_id": 0, "bos_token_id": 0}
    sizes = {"d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 1, "num_heads": 2, "tie_word_embeddings": False}
    t5 = save(build("T5", {"vocab_size": len(tokenizer)} | sizes | ends, task, noise=0.0), tokenizer, tmp_path / "t5")
    arms = ["mle", "number_token:1", "number_token:1/shuffled", "number_token:1/equal", "emo+number"]
    ended = cli(*asked(tiny, files, tmp_path / "run", model_name_or_path=t5, objectives=arms, seeds=[0]))
    assert ended.code == 0
    assert list(rows_of(ended.out)) == [START, *arms]
    folder = tmp_path / "run/number_token-1-seed0"
    model, tokenizer = load_model(str(folder)).eval(), load_tokenizer(str(folder))
    assert type(model).__name__ == "T5ForConditionalGeneration"
    nll, answers = [], []
    for a, b in SUMS[8:]:
        question = tokenizer(f"{a} + {b}?", return_tensors="pt")["input_ids"]
        labels = torch.tensor([[*tokenizer(str(a + b))["input_ids"], tokenizer.eos_token_id]])
        with torch.no_grad():
            logs = model(input_ids=question, labels=labels).logits[0].double().log_softmax(-1)
            ids = model.generate(question, max_new_tokens=5, do_sample=False)[0]
        nll += (-logs.gather(1, labels[0].unsqueeze(1))).flatten().tolist()
        answers.append(tokenizer.decode(ids, skip_special_tokens=True))
    tested = read(folder / "test.json")
    assert (tested["answer_nll"], tested["answer_tokens"]) == (pytest.approx(np.mean(nll), rel=1e-5), len(nll))
    assert 0 <= tested["number_token_accuracy"] <= 1
    assert read(folder / "answers.json") == answers


# ---- errors ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"test_questions": None, "test_fraction": 0}, "there is no test data; give --test_questions"),
        ({"objectives": ["mle", "mle/T=0.5"]}, "['mle/T=0.5'] have a temperature"),
        ({"answer_style": "gsm8k"}, "expected answer 0 ('12') has no answer of the style 'gsm8k'"),
        ({"max_new_tokens": 60}, "--max_new_tokens 60 exceed the model's context of 64 tokens"),
    ],
)
def test_invalid_comparisons_print_one_line(
    cli: Cli, tiny: Tiny, files: tuple[Path, Path], tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    assert message in cli(*asked(tiny, files, tmp_path / "run", **changes)).error
    assert not (tmp_path / "run").exists()
