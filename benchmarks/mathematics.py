"""Number losses in a small T5 on arithmetic: weights, forms and controls, with digits and with multi-digit tokens.

Questions of DeepMind mathematics (docs/data.md), of some kinds, that are short and whose answer is a whole number; the
test has others of the same kinds. A T5 with two layers in each half is trained from scratch by maximum likelihood, a
start for each seed and tokenizer; each arm continues it with its objective through `ObjectiveMixin` and
`Seq2SeqTrainer`, with the steps and batches of the others:

    mle
    number_token:W                   plus W sum_i q_i |x_i - x_y|, NTL-WAS, over the number positions
    number_token:W/shuffled, /equal  its controls: permuted values; all numbers alike, the same price of text
    NTL-MSE                          plus 0.3 (sum_i q_i x_i - x_y)^2: `expected_value` over all number tokens
    emo+number                       EMO, whose cost is numeric between numbers; its ratio is at most 3
    emo+number/shuffled-values, /equal

Each run is a row of mathematics.csv; --resume continues with those that are there.
"""

from __future__ import annotations

import copy
import logging
from dataclasses import dataclass
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence

from benchmarks.measure import Settings
from benchmarks.runs import Runs
from otloss_llm import NumberCost, RatingCost
from otloss_llm.data.blocks import train_bpe_tokenizer
from otloss_llm.data.questions import Question, read_questions, spread
from otloss_llm.evaluation import score_answers
from otloss_llm.experiments.arms import parse_arm

NAME = "mathematics"
ARMS = ("mle", "number_token:0.3", "number_token:0.3/shuffled", "number_token:0.3/equal", "number_token:1",
        "number_token:3", "NTL-MSE", "emo+number", "emo+number/shuffled-values", "emo+number/equal")  # fmt: skip
SMALL_ARMS = ("mle", "number_token:1/equal", "NTL-MSE", "emo+number")
# A T5 of this size learns nothing of the others in so few steps.
KINDS = {"arithmetic__add_sub_multiple", "arithmetic__nearest_integer_root", "comparison__closest", "comparison__pair",
         "numbers__gcd", "numbers__place_value"}  # fmt: skip
LONGEST = 64  # characters of a question
MEASURES = ("exact_match", "order_of_magnitude_accuracy", "mean_log_error", "median_absolute_error",
            "capped_relative_error", "too_long", "nll")  # fmt: skip
BATCH, MSE_WEIGHT, LONGEST_ANSWER = 32, 0.3, 16


@dataclass(frozen=True)
class Task:
    """A tokenizer and the questions to train on and to test on."""

    tokenizer: Any
    train: list[Question]
    test: list[Question]

    def row(self, question: Question) -> dict[str, list[int]]:
        ids = [self.tokenizer(text)["input_ids"] for text in (question.question, question.answer)]
        return {"input_ids": ids[0], "labels": [*ids[1], self.tokenizer.eos_token_id]}


def short(path: Any) -> list[Question]:
    """The questions of these kinds that are short, with a whole number for an answer."""
    return [
        question for question in read_questions(path)
        if question.kind in KINDS and len(question.question) <= LONGEST and question.answer.lstrip("-").isdigit()
        and len(question.answer) <= LONGEST_ANSWER
    ]  # fmt: skip


def padded(rows: list[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
    ids, labels = ([torch.tensor(row[name]) for row in rows] for name in ("input_ids", "labels"))
    mask = pad_sequence([torch.ones_like(row) for row in ids], batch_first=True)
    return {
        "input_ids": pad_sequence(ids, batch_first=True), "attention_mask": mask,
        "labels": pad_sequence(labels, batch_first=True, padding_value=-100),
    }  # fmt: skip


def small_t5(vocabulary: int, seed: int) -> Any:
    from transformers import T5Config, T5ForConditionalGeneration

    torch.manual_seed(seed)
    return T5ForConditionalGeneration(T5Config(
        vocab_size=vocabulary, d_model=96, d_kv=24, d_ff=256, num_layers=2, num_decoder_layers=2, num_heads=4,
        dropout_rate=0.0, feed_forward_proj="gated-gelu", tie_word_embeddings=False, decoder_start_token_id=0,
        pad_token_id=0, eos_token_id=0, bos_token_id=0,
    ))  # fmt: skip


def loss_of(arm: str, tokenizer: Any) -> dict[str, Any]:
    """The arguments of the mixin for an arm."""
    if arm == "NTL-MSE":
        line = NumberCost.from_tokenizer(tokenizer).line
        values = torch.full((len(tokenizer),), torch.nan).index_copy(0, line.columns, line.x.float())
        return {"objective": f"expected_value:{MSE_WEIGHT}", "cost": RatingCost(values)}
    read = parse_arm(arm)
    return {"objective": read.objective, "numbers": None if read.objective == "mle" else read.numbers}


def trained(model: Any, task: Task, arm: str, *, steps: int, rate: float, seed: int) -> float:
    """Train the model in place; returns nll over the tokens of the test answers."""
    from transformers import PrinterCallback, Seq2SeqTrainer, Seq2SeqTrainingArguments

    from otloss_llm import ObjectiveMixin

    class Trainer(ObjectiveMixin, Seq2SeqTrainer):
        pass

    with TemporaryDirectory() as scratch:
        arguments = Seq2SeqTrainingArguments(
            output_dir=scratch, max_steps=steps, learning_rate=rate, lr_scheduler_type="cosine", seed=seed,
            warmup_steps=max(1, steps // 10), per_device_train_batch_size=BATCH, per_device_eval_batch_size=100,
            weight_decay=0.01, adam_beta2=0.98, save_strategy="no", logging_strategy="no", report_to="none",
            disable_tqdm=True, remove_unused_columns=False, use_cpu=True,
        )  # fmt: skip
        rows = [[task.row(question) for question in questions] for questions in (task.train, task.test)]
        trainer = Trainer(
            model=model, args=arguments, train_dataset=rows[0], eval_dataset=rows[1], data_collator=padded,
            processing_class=task.tokenizer, **loss_of(arm, task.tokenizer),
        )  # fmt: skip
        trainer.remove_callback(PrinterCallback)
        trainer.train()
        return float(trainer.evaluate()["eval_nll"])


@torch.no_grad()
def answers(model: Any, task: Task) -> list[str]:
    """Greedy answers to the questions of the test."""
    model.eval()
    written = []
    for start in range(0, len(task.test), 250):
        batch = padded([task.row(question) for question in task.test[start : start + 250]])
        ids = model.generate(batch["input_ids"], attention_mask=batch["attention_mask"], do_sample=False, num_beams=1,
                             max_new_tokens=LONGEST_ANSWER + 2)  # fmt: skip
        written += task.tokenizer.batch_decode(ids, skip_special_tokens=True)
    return written


def main(settings: Settings) -> None:
    if settings.data is None:
        return
    # The logs of a cost's near-duplicate rows, for each run.
    logging.getLogger("otloss_llm").setLevel(logging.ERROR)
    small, folder = settings.small, settings.data / "math"
    arms, seeds, steps = (SMALL_ARMS, 2, (3, 2)) if small else (ARMS, 3, (1500, 200))
    train = short(folder / "mathematics-train.jsonl")
    test = spread(short(folder / "mathematics-interpolate.jsonl"), 20 if small else 500)
    texts = [f"{question.question}\n{question.answer}" for question in train]
    runs = Runs(NAME, MEASURES, settings)
    for case, vocabulary, split in (("digits", 512, True), ("multi-digit tokens", 1024, False)):
        task = Task(train_bpe_tokenizer(texts, vocabulary, split_digits=split), train, test)
        for seed in range(seeds):
            wanted = [arm for arm in ("start", *arms) if runs.lacks(case, arm, seed)]
            if wanted:
                run_seed(runs, case, task, wanted, steps=steps, seed=seed)
        runs.report(case, ("start", *arms), [(name, "mle", name) for name in MEASURES])


def run_seed(runs: Runs, case: str, task: Task, wanted: list[str], *, steps: tuple[int, int], seed: int) -> None:
    """The start of a seed, and the arms that continue it."""
    start = small_t5(len(task.tokenizer), seed)
    nll = trained(start, task, "mle", steps=steps[0], rate=2e-3, seed=seed)
    for arm in wanted:
        model = copy.deepcopy(start)
        if arm != "start":
            nll = trained(model, task, arm, steps=steps[1], rate=1e-3, seed=seed + 1000)
        written, right = answers(model, task), [question.answer for question in task.test]
        scores = score_answers(written, right, style="mathematics")
        longer = sum(len(ours) > len(theirs) for ours, theirs in zip(written, right, strict=True)) / len(right)
        missing = dict.fromkeys(MEASURES, float("nan"))
        values = {name: value for name, value in vars(scores).items() if value is not None}
        runs.add(case, arm, seed, missing | values | {"nll": nll, "too_long": longer})
