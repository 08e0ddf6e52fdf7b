"""A small language model learns sums, by likelihood alone and with a number loss added.

A small Llama is trained from scratch on the answers of sums such as 17+25=42, with one token per digit (or per number,
`--long_tokens`): on their likelihood (mle), and with the expected distance between number tokens added (number_token).
The start, the batches and the number of steps are the same. It then answers sums that are not in the training set.

    python examples/number_tokens.py                 # about a minute on two CPU cores
    python examples/number_tokens.py --long_tokens   # the same weight where 42 is one token, as in GPT-2
    python examples/number_tokens.py --steps 10      # a quick test of the code
"""

from __future__ import annotations

import argparse
import random
import tempfile
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM, PrinterCallback, TrainingArguments
from transformers.utils import logging

from otloss_llm import NumberCost, ObjectiveTrainer
from otloss_llm.data import train_bpe_tokenizer
from otloss_llm.data.questions import AnsweredQuestions, Question
from otloss_llm.evaluation import answer_questions, score_answers

ARMS: dict[str, dict[str, Any]] = {
    "mle": {"objective": "mle", "cost": None},
    "number_token": {"objective": "number_token"},
}


def sums(count: int, largest: int) -> list[Question]:
    """Distinct sums in random order; the separator of question and answer takes the place of '='."""
    pairs = random.Random(0).sample(range((largest + 1) ** 2), count)
    return [
        Question(f"{pair // (largest + 1)}+{pair % (largest + 1)}", str(sum(divmod(pair, largest + 1))))
        for pair in pairs
    ]


def small_llama(vocab: int) -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(
        vocab_size=vocab, hidden_size=64, intermediate_size=192, num_hidden_layers=2, num_attention_heads=4,
        max_position_embeddings=32, bos_token_id=0, eos_token_id=0, pad_token_id=0,
    ))  # fmt: skip


def trained(rows: AnsweredQuestions, tokenizer: Any, arm: dict[str, Any], steps: int) -> LlamaForCausalLM:
    model = small_llama(len(tokenizer))
    with tempfile.TemporaryDirectory() as folder:
        args = TrainingArguments(
            output_dir=folder, max_steps=steps, per_device_train_batch_size=64, learning_rate=3e-3, warmup_steps=10,
            lr_scheduler_type="cosine", logging_strategy="no", save_strategy="no", report_to=[], disable_tqdm=True,
            use_cpu=True, dataloader_pin_memory=False,
        )  # fmt: skip
        trainer = ObjectiveTrainer(model, args, train_dataset=rows, processing_class=tokenizer, **arm)
        trainer.remove_callback(PrinterCallback)
        trainer.train()
    return model


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", default=500, type=int, help="of each training")
    parser.add_argument("--largest", default=99, type=int, help="largest summand")
    parser.add_argument("--questions", default=6000, type=int, help="sums in all; a tenth of them are the test")
    parser.add_argument("--long_tokens", action="store_true", help="tokens of several digits: most numbers are one")
    options = parser.parse_args()
    logging.set_verbosity_error()

    questions = sums(options.questions, options.largest)
    test, train = questions[: len(questions) // 10], questions[len(questions) // 10 :]
    tokenizer = train_bpe_tokenizer(
        [f"{question.question}\n{question.answer}" for question in train],
        600 if options.long_tokens else 280,
        split_digits=not options.long_tokens,
    )
    rows = AnsweredQuestions.from_questions(train, tokenizer, max_length=32)
    NumberCost.from_tokenizer(tokenizer).coverage()
    print(f"{len(train)} sums to train on, {len(test)} others to answer; e.g. {train[0].question}={train[0].answer}\n")
    print(f"{'':20}{'exact':>7}{'order of magnitude':>20}{'wrong by (median)':>19}{'log error':>11}   of wrong answers")
    for name, arm in ARMS.items():
        answers = answer_questions(
            trained(rows, tokenizer, arm, options.steps), tokenizer, test, max_new_tokens=8, batch_size=128,
            progress=False,
        )  # fmt: skip
        print(line(name, answers, [question.answer for question in test]), flush=True)
    print(f"\nOne seed and {len(test)} sums: differences below about {len(test) ** -0.5:.0%} are noise.")


def line(name: str, answers: list[str], right: list[str]) -> str:
    """The share of right answers, and the errors of the wrong ones."""
    every = score_answers(answers, right, style="mathematics")
    shown = f"{name:20}{every.exact_match:7.1%}{every.order_of_magnitude_accuracy or 0.0:20.1%}"
    wrong = [(answer, truth) for answer, truth in zip(answers, right, strict=True) if answer.strip() != truth]
    if not wrong:
        return shown
    errors = score_answers(*map(list, zip(*wrong, strict=True)), style="mathematics")
    if errors.median_absolute_error is None:
        return f"{shown}   no wrong answer is a number"
    return f"{shown}{errors.median_absolute_error:19.0f}{errors.mean_log_error:11.3f}"


if __name__ == "__main__":
    main()
