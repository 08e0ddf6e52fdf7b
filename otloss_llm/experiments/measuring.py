"""Measure any model in the same way, each thing once: on text, by its samples and a judge; or by its answers.

Everything made is kept in the model's folder and read from there the next time:

    text        test.json (perplexity, transport cost, number tokens), samples-T1.json, judged-T1.json; the same at
                another temperature in test-T*.json, samples-T*.json, judged-T*.json
    questions   test.json (right answers under teacher forcing), answers.json (greedy)
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from otloss_llm.costs.choice import number_values
from otloss_llm.costs.vocabulary import TokenCost
from otloss_llm.data.blocks import PackedBlocks
from otloss_llm.data.questions import AnsweredQuestions, Question
from otloss_llm.evaluation import (
    answer_questions,
    distinct_n,
    number_token_scores,
    perplexity,
    sample_texts,
    score_answers,
    score_texts,
    sequence_nll,
)
from otloss_llm.evaluation.perplexity import context_length
from otloss_llm.models.heads import find_head
from otloss_llm.training.folders import read_json, write_json
from otloss_llm.training.loading import count_number_labels, load_model


@dataclass(frozen=True)
class Data:
    """Packed blocks of the three parts; the prompts come from `test`."""

    train: PackedBlocks
    test: PackedBlocks
    validation: PackedBlocks | None = None

    def fingerprints(self) -> dict[str, str | None]:
        parts = {"train": self.train, "validation": self.validation, "test": self.test}
        return {f"{name}_blocks": None if part is None else part.fingerprint for name, part in parts.items()}


@dataclass(frozen=True)
class QuestionData:
    """Rows of question and answer to train and validate on, and the questions that are asked in the end."""

    train: AnsweredQuestions
    test: Sequence[Question]
    validation: AnsweredQuestions | None = None

    def fingerprints(self) -> dict[str, str | None]:
        asked = json.dumps([asdict(question) for question in self.test])
        return {
            "train_questions": self.train.fingerprint,
            "validation_questions": None if self.validation is None else self.validation.fingerprint,
            "test_questions": hashlib.sha256(asked.encode()).hexdigest()[:16],
        }


def _values(tokenizer: Any, vocab_size: int, rows: PackedBlocks | AnsweredQuestions) -> Float[Tensor, " vocab"] | None:
    """Values of the number tokens; None where there is none among the labels of the test, nothing to score."""
    values = number_values(tokenizer, vocab_size)
    return None if values is None or count_number_labels(rows, values)[0] == 0 else values


class TextBench:
    """Measures a model on the test text, by its samples, and by what the judge makes of them.

    Attributes:
        prompts, references: beginnings of test blocks spread over the test text, and how the text itself goes on.
    """

    def __init__(
        self,
        data: Data,
        tokenizer: Any,
        *,
        cost: TokenCost,
        judge: tuple[Any, Any] | None,
        device: torch.device,
        num_prompts: int,
        prompt_tokens: int,
        samples_per_prompt: int,
        max_new_tokens: int,
        batch_size: int,
    ) -> None:
        self.data, self.tokenizer, self.device, self.cost = data, tokenizer, device, cost.to(device)
        self._judge = None if judge is None else (judge[0].to(device), judge[1])  # model and its tokenizer
        self.samples_per_prompt, self.max_new_tokens, self.batch_size = samples_per_prompt, max_new_tokens, batch_size
        self.values = _values(tokenizer, cost.shape[0], data.test)
        chosen = torch.linspace(0, len(data.test) - 1, min(num_prompts, len(data.test))).round().long()
        rows = data.test.ids[chosen].tolist()
        decode = functools.partial(tokenizer.decode, skip_special_tokens=True)
        self.prompts: list[str] = [decode(ids[:prompt_tokens]) for ids in rows]
        self.references: list[str] = [decode(ids[prompt_tokens : prompt_tokens + max_new_tokens]) for ids in rows]

    def about(self) -> dict[str, Any]:
        """What a report has to know of the data."""
        return {"prompts": self.prompts}

    def reference(self, folder: Path) -> dict[str, Any]:
        """What the judge makes of the text itself; kept in `folder`."""
        return once(folder / "reference.json", lambda: self.judge(self.references)) | {"samples": self.references}

    def measure(self, home: Path, model: Any, *, temperature: float, seed: int) -> dict[str, Any]:
        """Scores of `model` (None: the one in `home`) at a temperature, each made once and kept in `home`."""
        load = _loader(home, model, self.device)
        at = f"T{temperature:g}"
        test = "test.json" if temperature == 1.0 else f"test-{at}.json"
        scores = once(home / test, lambda: self.test(load(), temperature))
        samples = once(home / f"samples-{at}.json", lambda: self.sample(load(), temperature, seed))
        judged = once(home / f"judged-{at}.json", lambda: self.judge(samples))
        return scores | judged | {"samples": samples}

    def test(self, model: Any, temperature: float) -> dict[str, Any]:
        scores = perplexity(
            model, self.data.test, batch_size=self.batch_size, cost=self.cost, temperature=temperature, progress=False
        )
        found = {"test_nll": scores.nll, "test_perplexity": scores.perplexity, "transport_cost": scores.transport_cost}
        return found | _score_numbers(model, self.data.test, self.values, self.batch_size, temperature)

    def sample(self, model: Any, temperature: float, seed: int) -> list[str]:
        samples = sample_texts(
            model, self.tokenizer, prompts=self.prompts, num_samples=self.samples_per_prompt,
            max_new_tokens=self.max_new_tokens, temperature=temperature, batch_size=self.batch_size,
            seed=seed, progress=False,
        )  # fmt: skip
        return [sample.continuation for sample in samples]

    def judge(self, texts: list[str]) -> dict[str, Any]:
        """How varied the texts are, and how well the judge predicts them; what is too short for either is left out."""
        scores: dict[str, Any] = {}
        for n in (1, 2, 3):
            with contextlib.suppress(ValueError):  # no text of n tokens
                scores[f"distinct_{n}"] = distinct_n(texts, n)
        if self._judge is None or not any(texts):
            return scores
        model, tokenizer = self._judge
        repeats = len(texts) // len(self.prompts)
        told = [prompt for prompt in self.prompts for _ in range(repeats)]
        judged = score_texts(model, tokenizer, texts, prompts=told, batch_size=self.batch_size, progress=False)
        return scores | {"judge_perplexity": judged.perplexity, "judge_bits_per_byte": judged.bits_per_byte}


class QuestionBench:
    """Measures a model by its greedy answers, and by its distribution over the tokens of the right ones.

    Args:
        start: any model that is measured, for the size of its head and the length of its context.
        style: of `score_answers`.
        num_prompts: questions, spread over the test, that the report shows with their answers.

    Attributes:
        cut_short: right answers of more than `max_new_tokens` tokens, which no model can give.
        seen: questions that are among the training ones too.

    Raises:
        ValueError: a question that the model has no room to answer.
    """

    def __init__(
        self,
        data: QuestionData,
        tokenizer: Any,
        *,
        start: Any,
        style: str,
        device: torch.device,
        num_prompts: int,
        max_new_tokens: int,
        batch_size: int,
    ) -> None:
        self.data, self.tokenizer, self.device = data, tokenizer, device
        self.max_new_tokens, self.batch_size = max_new_tokens, batch_size
        self.expected = [question.answer for question in data.test]
        self.style = style
        whole = AnsweredQuestions.from_questions(data.test, tokenizer, max_length=sys.maxsize)
        context = context_length(start) or sys.maxsize
        _check_room(whole.prompt_lengths, context, max_new_tokens)
        self.rows = (
            whole
            if whole.longest <= context
            else AnsweredQuestions.from_questions(data.test, tokenizer, max_length=context)
        )
        self.values = _values(tokenizer, find_head(start).weight.shape[0], self.rows)
        lengths = zip(whole.lengths, whole.prompt_lengths, strict=True)
        self.cut_short = sum(length - prompt - 1 > max_new_tokens for length, prompt in lengths)  # without EOS
        trained = set(_prompts(data.train))
        self.seen = sum(prompt in trained for prompt in _prompts(whole))
        count = min(num_prompts, len(data.test))
        self._shown = [i * len(data.test) // count for i in range(count)]
        self.prompts = [data.test[i].question for i in self._shown]

    def about(self) -> dict[str, Any]:
        """What a report has to know of the data."""
        kinds = dict(sorted(Counter(question.kind for question in self.data.test if question.kind is not None).items()))
        told = {"count": len(self.data.test), "style": self.style, "kinds": kinds}
        return {"prompts": self.prompts, "questions": told | {"cut_short": self.cut_short, "seen": self.seen}}

    def reference(self, folder: Path) -> dict[str, Any]:
        """The right answers of the questions that are shown."""
        return {"samples": [self.expected[i] for i in self._shown]}

    def measure(self, home: Path, model: Any, *, temperature: float, seed: int) -> dict[str, Any]:
        """Scores of `model` (None: the one in `home`), kept in `home`; greedy, whatever the temperature and seed."""
        load = _loader(home, model, self.device)
        scores = once(home / "test.json", lambda: self.test(load()))
        answers: list[str] = once(home / "answers.json", lambda: self.answer(load()))
        kinds = [question.kind for question in self.data.test]
        given = asdict(score_answers(answers, self.expected, style=self.style, kinds=kinds))
        return scores | given | {"samples": [answers[i] for i in self._shown]}

    def test(self, model: Any) -> dict[str, Any]:
        """How likely the right answers are, and how far off the number tokens that are expected in them."""
        rows = [item["input_ids"].tolist() for item in (self.rows[i] for i in range(len(self.rows)))]
        likely = sequence_nll(
            model, rows, prefix_lengths=self.rows.prompt_lengths, batch_size=self.batch_size, progress=False
        )
        scores: dict[str, Any] = {"answer_nll": likely.mean_nll, "answer_tokens": int(likely.tokens.sum())}
        return scores | _score_numbers(model, self.rows, self.values, self.batch_size)

    def answer(self, model: Any) -> list[str]:
        return answer_questions(
            model, self.tokenizer, self.data.test, max_new_tokens=self.max_new_tokens, batch_size=self.batch_size,
            progress=False,
        )  # fmt: skip


def _check_room(prompts: Sequence[int], context: int, max_new_tokens: int) -> None:
    """Raise ValueError where prompts of so many tokens leave the model no room to answer."""
    wide = sum(length + max_new_tokens > context for length in prompts)
    if wide:
        room = context - max(prompts)
        mend = f"give at most --max_new_tokens {room}, or leave" if room > 0 else "leave"
        raise ValueError(
            f"{wide} of {len(prompts)} test questions and an answer of --max_new_tokens {max_new_tokens} exceed the "
            f"model's context of {context} tokens, the longest question has {max(prompts)}; {mend} the long ones out."
        )


def _prompts(rows: AnsweredQuestions) -> list[tuple[int, ...]]:
    """The ids of each question: equal for equal texts."""
    return [tuple(rows[i]["input_ids"][:length].tolist()) for i, length in enumerate(rows.prompt_lengths)]


def _score_numbers(
    model: Any,
    rows: PackedBlocks | AnsweredQuestions,
    values: Float[Tensor, " vocab"] | None,
    batch_size: int,
    temperature: float = 1.0,
) -> dict[str, Any]:
    """How far off the number tokens are that are expected in the true text; nothing without values."""
    if values is None:
        return {}
    numbers = number_token_scores(model, rows, values, batch_size=batch_size, temperature=temperature, progress=False)
    return {
        "number_tokens": numbers.tokens,
        "number_token_accuracy": numbers.accuracy,
        "number_token_absolute_error": numbers.expected_absolute_error,
        "number_token_log_error": numbers.expected_log_error,
        "number_token_mass": numbers.number_mass,
    }


def _loader(home: Path, model: Any, device: torch.device) -> Callable[[], Any]:
    """Gives `model`, or the one in `home`, loaded when it is first asked for."""
    return functools.cache(lambda: (load_model(str(home)) if model is None else model).to(device))


def once(path: Path, make: Callable[[], Any]) -> Any:
    """The content of `path`, made and written if it is not there yet."""
    if not path.is_file():
        write_json(path, make())
    return read_json(path)
