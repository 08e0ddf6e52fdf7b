"""Number losses in the training of a small model on mathematics, from scratch, tested on other questions.

Questions of DeepMind mathematics (25 kinds of arithmetic, comparison, numbers, measurement), tested on questions of the
same kinds that are not in the training set ("interpolate"), with one token per digit and with a multi-digit BPE; and
GSM8K word problems with their solutions. Such a small model answers none of the latter correctly; there only the error
of the numbers under teacher forcing is of interest.

A small model trained from scratch on the answers only, for some minutes, learns little more than True and False. So all
arms of a tokenizer start from one model, trained by maximum likelihood on questions and answers, and each continues
with its own objective on the answers.

Everything runs through `python -m otloss_llm train` and `compare`, with the same number of steps, the same start and
the same batches for all arms of a seed. Its folders stay in mathematics_runs/ (`--resume` continues with them); means
and deviations over the seeds go to mathematics.csv.
"""

from __future__ import annotations

import csv
import json
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from benchmarks.measure import Settings, hardware, say
from otloss_llm.cli import main as command_line
from otloss_llm.data.blocks import train_bpe_tokenizer
from otloss_llm.data.questions import read_questions
from otloss_llm.experiments.compare import START
from otloss_llm.experiments.report import results_table, summarise

NAME = "mathematics"
ARMS = ("mle", "number_token", "emo+number")
SEEDS, SMALL_SEEDS = (0, 1, 2), (0,)
RUNS, MEANS = "mathematics_runs", "mathematics.csv"
FIELDS = ("case", "arm", "measure", "mean", "std", "seeds", "hardware", "torch")


@dataclass(frozen=True)
class Case:
    """One tokenizer on one set of questions.

    Attributes:
        train, test: files of questions; test None: every tenth question of train.
        vocab_size, split_digits: of the tokenizer.
        arms, seeds, steps, batch: what is compared, and the training of each.
        warm_up: steps by maximum likelihood before all arms.
    """

    name: str
    train: str
    test: str | None
    vocab_size: int
    split_digits: bool
    arms: tuple[str, ...]
    seeds: tuple[int, ...]
    warm_up: int
    steps: int
    batch: int
    questions: int
    longest: int
    answer: int = 24  # tokens of an answer at most


def cases(small: bool) -> list[Case]:
    warm_up, steps, seeds, questions = (3, 4, SMALL_SEEDS, 20) if small else (3000, 500, SEEDS, 750)
    files = ("mathematics-train.jsonl", "mathematics-interpolate.jsonl")
    arms = ARMS[:2] if small else ARMS
    made = [
        Case("digits", *files, 512, True, arms, seeds, warm_up, steps, 32, questions, 160),
        Case("multi-digit BPE", *files, 1024, False, arms, seeds, warm_up, steps, 32, questions, 160),
    ]
    if not small:
        made.append(
            Case("GSM8K", "gsm8k-train.jsonl", None, 2048, False, ARMS[:2], (0,), 600, 200, 16, 100, 384, answer=8)
        )
    return made


def main(settings: Settings) -> None:
    if settings.data is None:
        return
    folder = settings.data / "math"
    for case in cases(settings.small):
        if settings.output is None:
            with TemporaryDirectory() as scratch:
                run_case(case, folder, Path(scratch), settings)
        else:
            run_case(case, folder, settings.output, settings)


def run_case(case: Case, folder: Path, output: Path, settings: Settings) -> None:
    """Train and measure every arm and seed of a case, and keep the means."""
    home = output / RUNS / case.name.replace(" ", "-")
    if home.exists() and not settings.resume:
        raise FileExistsError(f"{home} holds an earlier run; resume it with --resume, or move the folder.")
    say(f"\n{NAME}: {case.name}\n  {hardware()}, torch {torch.__version__}")
    if case.test is None:
        case, folder = hold_out(case, folder, home), home
    if not (home / "random" / "tokenizer.json").exists():  # written last
        make_model(case, folder / case.train, home / "random")
    for command in (warm_up(case, folder, home), comparison(case, folder, home)):
        code = command_line(command)
        if code:
            sys.exit(code)
    results = json.loads((home / "compare" / "report.json").read_text(encoding="utf-8"))
    say(results_table(results))
    if settings.output is not None:
        keep_means(case, results, output / MEANS)


def hold_out(case: Case, folder: Path, home: Path) -> Case:
    """The case with every tenth question moved to a test file, which neither the arms nor the warm-up see."""
    lines = (folder / case.train).read_text(encoding="utf-8").splitlines(keepends=True)
    home.mkdir(parents=True, exist_ok=True)
    (home / "test.jsonl").write_text("".join(lines[::10]), encoding="utf-8")
    kept = [line for number, line in enumerate(lines) if number % 10]
    (home / "train.jsonl").write_text("".join(kept), encoding="utf-8")
    return replace(case, train="train.jsonl", test="test.jsonl")


def make_model(case: Case, train: Path, made: Path) -> None:
    """A tokenizer trained on the questions, and a small Llama with random weights."""
    from transformers import LlamaConfig, LlamaForCausalLM

    texts = [f"{question.question}\n{question.answer}" for question in read_questions(train)]
    tokenizer = train_bpe_tokenizer(texts, case.vocab_size, split_digits=case.split_digits)
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tokenizer), hidden_size=128, intermediate_size=344, num_hidden_layers=4,
            num_attention_heads=4, max_position_embeddings=case.longest + 32, tie_word_embeddings=True,
            bos_token_id=0, eos_token_id=0, pad_token_id=0,
        )
    )  # fmt: skip
    model.save_pretrained(made)
    tokenizer.save_pretrained(made)


def _options(case: Case, folder: Path, **more: Any) -> list[str]:
    defaults: dict[str, Any] = {
        "train_questions": folder / case.train, "validation_fraction": 0, "block_size": case.longest,
        "per_device_train_batch_size": case.batch, "lr_scheduler_type": "cosine", "adam_beta2": 0.98,
        "weight_decay": 0.01, "train_sampling_strategy": "group_by_length", "save_strategy": "no", "disable_tqdm": True,
    }  # fmt: skip
    return [text for name, value in (defaults | more).items() for text in (f"--{name}", str(value))]


def warm_up(case: Case, folder: Path, home: Path) -> list[str]:
    """The command line that trains the start of all arms."""
    return ["train", *_options(
        case, folder, model_name_or_path=home / "random", output_dir=home / "start", objective="mle",
        train_on_question=True, save_strategy="steps", save_steps=500, max_steps=case.warm_up,
        warmup_steps=max(1, case.warm_up // 10), learning_rate=1.5e-3,
    )]  # fmt: skip


def comparison(case: Case, folder: Path, home: Path) -> list[str]:
    """The command line of the comparison."""
    assert case.test is not None
    plain = _options(
        case, folder, model_name_or_path=home / "start", output_dir=home / "compare",
        test_questions=folder / case.test, num_questions=case.questions, max_steps=case.steps,
        warmup_steps=max(1, case.steps // 10), learning_rate=5e-4, max_new_tokens=case.answer, sample_batch_size=250,
    )  # fmt: skip
    return ["compare", *plain, "--objectives", *case.arms, "--seeds", *map(str, case.seeds)]


def keep_means(case: Case, results: dict[str, Any], path: Path) -> None:
    """Write the rows of this case to the file; earlier rows of the case are replaced."""
    rows: list[dict[str, Any]] = []
    if path.exists():
        with path.open(newline="", encoding="utf-8") as stream:
            rows = [row for row in csv.DictReader(stream) if row["case"] != case.name]
    start = summarise({"runs": [results["start"] | {"arm": START}]})
    for arm, measures in (start | summarise(results)).items():
        for measure, (mean, std) in measures.items():
            rows.append({"case": case.name, "arm": arm, "measure": measure, "mean": f"{mean:.6g}", "std": f"{std:.3g}",
                         "seeds": len(case.seeds), "hardware": hardware(), "torch": torch.__version__})  # fmt: skip
    with path.open("w", newline="", encoding="utf-8") as stream:
        writer = csv.DictWriter(stream, FIELDS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
