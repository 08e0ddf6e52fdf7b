"""Number losses in a small T5 on arithmetic: weights, forms and controls, with digits and with multi-digit tokens.

Questions of DeepMind mathematics (docs/reports/data.md), of some kinds, that are short and whose answer is a whole
number; the test has others of the same kinds. A T5 with two layers in each half is trained from scratch by maximum
likelihood, a start for each seed and tokenizer. `benchmarks.paper.compare` continues it with each arm, with equal steps
and batches:

    mle
    number_token:W                   plus W sum_i q_i |x_i - x_y|, NTL-WAS, over the number positions
    number_token:W/shuffled, /equal  its controls: permuted values; all numbers alike, the same price of text
    expected_value:W                 plus W (sum_i q_i x_i - x_y)^2, NTL-MSE, over the digits
    emo+number                       EMO, whose cost is numeric between numbers; its ratio is at most 3
    emo+number/shuffled-values, /equal

Each run is a row of mathematics.csv; --resume continues with those that are there. Starts, runs and questions are kept
in build/mathematics, where the command line of docs/reports/number_experiments.md takes them from.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable
from contextlib import nullcontext
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory
from typing import Any

import torch

from benchmarks.measure import FOLDER, Settings
from benchmarks.paper.compare import Comparison, parse_arm, run_comparison
from benchmarks.paper.data.questions import AnsweredQuestions, Question, read_questions, spread
from benchmarks.paper.measuring import QuestionData
from benchmarks.paper.runs import train_run
from benchmarks.runs import Runs
from otloss_llm.data import train_bpe_tokenizer
from otloss_llm.objectives import MLE

NAME = "mathematics"
CONTROLS = ("", "/shuffled", "/equal")
ARMS = ("mle", *(f"number_token:{weight}{control}" for weight in (0.3, 1, 3) for control in CONTROLS),
        "expected_value:0.3", "emo+number", "emo+number/shuffled-values", "emo+number/equal")  # fmt: skip
SMALL_ARMS = ("mle", "number_token:1/equal", "expected_value:0.3", "emo+number")
# A T5 of this size learns nothing of the others in so few steps.
KINDS = {"comparison__closest", "comparison__kth_biggest", "comparison__pair", "numbers__place_value",
         "numbers__round_number"}  # fmt: skip
LONGEST, LONGEST_ANSWER = 64, 16  # characters of a question, and of an answer
MEASURES = {"exact_match": "exact_match", "order_of_magnitude_accuracy": "order_of_magnitude_accuracy",
            "mean_log_error": "mean_log_error", "median_absolute_error": "median_absolute_error",
            "capped_relative_error": "capped_relative_error", "nll": "answer_nll"}  # fmt: skip


def short(path: Path) -> list[Question]:
    """The questions of these kinds that are short, with a whole number for an answer."""
    return [
        question for question in read_questions(path)
        if question.kind in KINDS and len(question.question) <= LONGEST and question.answer.lstrip("-").isdigit()
        and len(question.answer) <= LONGEST_ANSWER
    ]  # fmt: skip


def small_t5(vocabulary: int, seed: int) -> Any:
    from transformers import T5Config, T5ForConditionalGeneration

    torch.manual_seed(seed)
    model = T5ForConditionalGeneration(T5Config(
        vocab_size=vocabulary, d_model=96, d_kv=24, d_ff=256, num_layers=2, num_decoder_layers=2, num_heads=4,
        dropout_rate=0.0, feed_forward_proj="gated-gelu", tie_word_embeddings=False, decoder_start_token_id=0,
        pad_token_id=0, eos_token_id=0, bos_token_id=0,
    ))  # fmt: skip
    with torch.no_grad():  # AdamW takes thousands of steps from weights of deviation 1
        for weight in (model.shared.weight, model.lm_head.weight):
            weight.mul_(0.1)
    return model


def arguments(folder: Path, *, steps: int, rate: float, seed: int) -> Any:
    from transformers import TrainingArguments

    return TrainingArguments(
        output_dir=str(folder), max_steps=steps, learning_rate=rate, lr_scheduler_type="cosine", seed=seed,
        warmup_steps=max(1, steps // 10), per_device_train_batch_size=32, per_device_eval_batch_size=100,
        weight_decay=0.01, adam_beta2=0.98, save_strategy="no", logging_strategy="no", report_to="none",
        disable_tqdm=True, use_cpu=True,
    )  # fmt: skip


def main(settings: Settings) -> None:
    if settings.data is None:
        return
    # The logs of a cost's near-duplicate rows, for each run.
    logging.getLogger("otloss_llm").setLevel(logging.ERROR)
    small, source = settings.small, settings.data / "math"
    arms, seeds, steps = (SMALL_ARMS, 2, (3, 2)) if small else (ARMS, 3, (1500, 150))
    train = short(source / "mathematics-train.jsonl")
    test = spread(short(source / "mathematics-interpolate.jsonl"), 20 if small else 500)
    runs = Runs(NAME, (*MEASURES, "too_long"), settings)
    with TemporaryDirectory() if small else nullcontext(FOLDER.parent / "build" / NAME) as place:
        folder = Path(place)
        write(folder / "train.jsonl", train)
        write(folder / "test.jsonl", test)
        for case, vocabulary, split in (("digits", 512, True), ("multi-digit tokens", 1024, False)):
            texts = [f"{question.question}\n{question.answer}" for question in train]
            tokenizer = train_bpe_tokenizer(texts, vocabulary, split_digits=split)
            rows = AnsweredQuestions.from_questions(train, tokenizer, max_length=LONGEST, encoder_decoder=True)
            for seed in range(seeds):
                if any(runs.lacks(case, arm, seed) for arm in ("start", *arms)):
                    own = folder / f"{case.split()[0]}-seed{seed}"
                    data = QuestionData(rows, test)
                    for arm, scores in compared(own, tokenizer, data, arms, steps=steps, seed=seed):
                        if runs.lacks(case, arm, seed):
                            runs.add(case, arm, seed, scores)
            runs.report(case, ("start", *arms), [(name, "mle", name) for name in runs.measures])


def write(path: Path, questions: list[Question]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [{"question": one.question, "answer": one.answer, "module": one.kind} for one in questions]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")


def compared(
    folder: Path, tokenizer: Any, data: QuestionData, arms: tuple[str, ...], *, steps: tuple[int, int], seed: int
) -> Iterable[tuple[str, dict[str, float]]]:
    """The start of a seed and the arms that continue it, with their measures."""
    start = folder / "start"
    train_run(
        small_t5(len(tokenizer), seed), tokenizer, data.train, objective=MLE(), cost=None, bar="start",
        settings={"kinds": sorted(KINDS)}, args=arguments(start, steps=steps[0], rate=1e-3, seed=seed),
    )  # fmt: skip
    comparison = Comparison(
        start=str(start), arms=[parse_arm(arm) for arm in arms], seeds=[seed],
        num_prompts=len(data.test), max_new_tokens=LONGEST_ANSWER + 2,
    )  # fmt: skip
    results = run_comparison(
        comparison, data, tokenizer, arguments(folder / "arms", steps=steps[1], rate=5e-4, seed=seed)
    )
    right = results["reference"]["samples"]
    for scores in ({"arm": "start"} | results["start"], *results["runs"]):
        values = {name: scores[key] for name, key in MEASURES.items()}
        values["too_long"] = fmean(len(ours) > len(y) for ours, y in zip(scores["samples"], right, strict=True))
        yield scores["arm"], {name: float("nan") if value is None else value for name, value in values.items()}
