"""Measure models on text (perplexity, samples, a judge) or on questions (likelihood and greedy answers).

Each result is kept in the model's folder and read from there the next time:

    text        test.json (perplexity, transport cost, number tokens), samples-T1.json, judged-T1.json, mauve-T1.json,
                rouge-T1.json; at another temperature test-T*.json, samples-T*.json, ...
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

from benchmarks.paper.data.blocks import PackedBlocks
from benchmarks.paper.data.questions import AnsweredQuestions, Question, spread
from benchmarks.paper.evaluation.answer_scores import score_answers
from benchmarks.paper.evaluation.answering import answer_nll, answer_questions, score_number_labels
from benchmarks.paper.evaluation.likelihood import score_texts
from benchmarks.paper.evaluation.mauve import mauve, text_features
from benchmarks.paper.evaluation.overlap import distinct_n, rouge
from benchmarks.paper.evaluation.sampling import sample_texts
from benchmarks.paper.folders import read_json, write_json
from benchmarks.paper.models import load_model
from otloss_llm.costs.vocabulary import TokenCost
from otloss_llm.evaluation.perplexity import context_length, perplexity

METRICS = ("mauve", "rouge")


@dataclass(frozen=True)
class Data:
    """Packed blocks of the three parts; the prompts come from `test`."""

    train: PackedBlocks
    test: PackedBlocks
    validation: PackedBlocks | None = None

    def fingerprints(self) -> dict[str, str | None]:
        """Return the fingerprint of each part, for the settings of a run folder."""
        parts = {"train": self.train, "validation": self.validation, "test": self.test}
        return {f"{name}_blocks": None if part is None else part.fingerprint for name, part in parts.items()}


@dataclass(frozen=True)
class QuestionData:
    """Rows of questions with answers to train and validate on, and the test questions."""

    train: AnsweredQuestions
    test: Sequence[Question]
    validation: AnsweredQuestions | None = None

    def fingerprints(self) -> dict[str, str | None]:
        """Return the fingerprint of each part, for the settings of a run folder."""
        asked = json.dumps([asdict(question) for question in self.test])
        return {
            "train_questions": self.train.fingerprint,
            "validation_questions": None if self.validation is None else self.validation.fingerprint,
            "test_questions": hashlib.sha256(asked.encode()).hexdigest()[:16],
        }


@dataclass(frozen=True)
class TextBench:
    """Measures a model on the test text, by its samples, and by a judge's likelihood of them.

    Attributes:
        judge: model and tokenizer, or None.
        metrics: of METRICS, beside the others; "mauve" reads features of the judge.
        num_prompts, prompt_tokens: test blocks, evenly spaced, whose beginnings are continued.
    """

    data: Data
    tokenizer: Any
    cost: TokenCost
    judge: tuple[Any, Any] | None
    device: torch.device
    num_prompts: int
    prompt_tokens: int
    samples_per_prompt: int
    max_new_tokens: int
    batch_size: int
    metrics: tuple[str, ...] = ()

    @functools.cached_property
    def texts(self) -> tuple[list[str], list[str]]:
        """The prompts, and their continuations in the test text."""
        blocks, end = self.data.test, self.prompt_tokens + self.max_new_tokens
        rows = _evenly_spaced(blocks, self.num_prompts)
        decode = functools.partial(self.tokenizer.decode, skip_special_tokens=True)
        return [decode(ids[: self.prompt_tokens]) for ids in rows], [
            decode(ids[self.prompt_tokens : end]) for ids in rows
        ]

    def about(self) -> dict[str, Any]:
        """Return the data's entries of a report."""
        return {"prompts": self.texts[0]}

    def reference(self, folder: Path) -> dict[str, Any]:
        """Return scores of the text itself, kept in `folder`."""
        continuations = self.texts[1]
        scores = once(folder / "reference.json", lambda: self._judge(continuations))
        if "mauve" in self.metrics:
            scores |= once(folder / "reference-mauve.json", self._ceiling)
        return scores | {"samples": continuations}

    def _ceiling(self) -> dict[str, Any]:
        """Return MAUVE of two sets of real text: the same places of as many blocks of the training text."""
        rows = _evenly_spaced(self.data.train, len(self.texts[1]))
        end = self.prompt_tokens + self.max_new_tokens
        return self._mauve([self.tokenizer.decode(row[self.prompt_tokens : end], skip_special_tokens=True)
                            for row in rows])  # fmt: skip

    def measure(self, home: Path, model: Any, *, temperature: float, seed: int) -> dict[str, Any]:
        """Return scores of `model` (None: the one in `home`) at a temperature, kept in `home`."""
        load = _loader(home, model, self.device)
        at = f"T{temperature:g}"
        test = "test.json" if temperature == 1.0 else f"test-{at}.json"
        scores = once(home / test, lambda: self._test(load(), temperature))
        samples = once(home / f"samples-{at}.json", lambda: self._sample(load(), temperature, seed))
        judge_scores = once(home / f"judged-{at}.json", lambda: self._judge(samples))
        more: dict[str, Callable[[list[str]], dict[str, Any]]] = {"mauve": self._mauve, "rouge": self._rouge}
        for name in self.metrics:
            judge_scores |= once(home / f"{name}-{at}.json", functools.partial(more[name], samples))
        return scores | judge_scores | {"samples": samples}

    def _mauve(self, texts: list[str]) -> dict[str, Any]:
        score = mauve(self._reference_features, self._features(texts))
        return {"mauve": score.mean, "mauve_std": score.std, "mauve_clusters": score.clusters}

    @functools.cached_property
    def _reference_features(self) -> Any:
        return self._features(self.texts[1])

    def _features(self, texts: list[str]) -> Any:
        assert self.judge is not None
        model, tokenizer = self.judge
        some = [text or "\n" for text in texts]  # A sample may be empty.
        return text_features(model.to(self.device), tokenizer, some, batch_size=self.batch_size)

    def _rouge(self, texts: list[str]) -> dict[str, Any]:
        references = [text for text in self.texts[1] for _ in range(self.samples_per_prompt)]
        return dict(zip(("rouge_1", "rouge_l"), rouge(texts, references), strict=True))

    def _test(self, model: Any, temperature: float) -> dict[str, Any]:
        settings: dict[str, Any] = {"batch_size": self.batch_size, "temperature": temperature, "progress": False}
        cost = self.cost.to(self.device)
        scores = perplexity(model, self.data.test.ids, cost=cost, batch_size=self.batch_size, temperature=temperature)
        return {
            "test_nll": scores.nll,
            "test_perplexity": scores.perplexity,
            "transport_cost": scores.transport_cost,
            **_number_scores(model, self.tokenizer, self.data.test, **settings),
        }

    def _sample(self, model: Any, temperature: float, seed: int) -> list[str]:
        samples = sample_texts(
            model, self.tokenizer, prompts=self.texts[0], num_samples=self.samples_per_prompt,
            max_new_tokens=self.max_new_tokens, temperature=temperature, batch_size=self.batch_size,
            seed=seed, progress=False,
        )  # fmt: skip
        return [sample.continuation for sample in samples]

    def _judge(self, texts: list[str]) -> dict[str, Any]:
        """Variety of the texts, and their likelihood under the judge; what short texts do not have is left out."""
        scores: dict[str, Any] = {}
        for n in (1, 2, 3):
            with contextlib.suppress(ValueError):  # No text has n tokens.
                scores[f"distinct_{n}"] = distinct_n(texts, n)
        if self.judge is None or not any(texts):
            return scores
        model, tokenizer = self.judge
        prompts = [prompt for prompt in self.texts[0] for _ in range(len(texts) // len(self.texts[0]))]
        judge_scores = score_texts(
            model.to(self.device), tokenizer, texts, prompts=prompts, batch_size=self.batch_size, progress=False
        )
        return scores | {"judge_perplexity": judge_scores.perplexity, "judge_bits_per_byte": judge_scores.bits_per_byte}


def _evenly_spaced(blocks: PackedBlocks, count: int) -> list[list[int]]:
    """Return ids of at most so many blocks."""
    chosen = torch.linspace(0, len(blocks) - 1, min(count, len(blocks))).round().long()
    rows: list[list[int]] = blocks.ids[chosen].tolist()
    return rows


class QuestionBench:
    """Measures a model by its greedy answers, and by its likelihood of the right ones.

    Args:
        start: any of the models, for the length of its context.
        style: of `score_answers`.
        num_prompts: questions, evenly spaced, that the report shows with their answers.

    Attributes:
        cut_short: number of right answers longer than `max_new_tokens` tokens, which no model can give.
        seen: number of test questions that are also training questions.

    Raises:
        ValueError: a question with `max_new_tokens` exceeds the model's context.
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
        self.data, self.tokenizer, self.style, self.device = data, tokenizer, style, device
        self.max_new_tokens, self.batch_size = max_new_tokens, batch_size
        self.expected = [question.answer for question in data.test]
        make = functools.partial(
            AnsweredQuestions.from_questions, data.test, tokenizer, encoder_decoder=data.train.encoder_decoder
        )
        rows = make(max_length=sys.maxsize)
        context = context_length(start) or sys.maxsize
        if not rows.encoder_decoder:  # which has a context for each of the two
            _check_lengths(rows.prompt_lengths, context, max_new_tokens)
        self.cut_short = sum(length - 1 > max_new_tokens for length in rows.answer_lengths)  # without EOS
        trained = set(_prompts(data.train))
        self.overlap = sum(prompt in trained for prompt in _prompts(rows))
        self.rows = rows
        if rows.longest > context:
            self.rows = make(max_length=context)
        self._shown = spread(range(len(data.test)), num_prompts)

    def about(self) -> dict[str, Any]:
        """Return the data's entries of a report."""
        kinds = dict(sorted(Counter(question.kind for question in self.data.test if question.kind is not None).items()))
        about = {"count": len(self.data.test), "style": self.style, "kinds": kinds}
        prompts = [self.data.test[i].question for i in self._shown]
        return {"prompts": prompts, "questions": about | {"cut_short": self.cut_short, "seen": self.overlap}}

    def reference(self, folder: Path) -> dict[str, Any]:
        """Return the right answers of the questions that are shown."""
        return {"samples": [self.expected[i] for i in self._shown]}

    def measure(self, home: Path, model: Any, *, temperature: float, seed: int) -> dict[str, Any]:
        """Return scores of `model` (None: the one in `home`), kept in `home`; the temperature and seed are not used."""
        load = _loader(home, model, self.device)
        likelihood = once(home / "test.json", lambda: self._test(load()))
        answers: list[str] = once(home / "answers.json", lambda: self._answer(load()))
        kinds = [question.kind for question in self.data.test]
        scores = asdict(score_answers(answers, self.expected, style=self.style, kinds=kinds))
        return likelihood | scores | {"samples": [answers[i] for i in self._shown]}

    def _test(self, model: Any) -> dict[str, Any]:
        settings: dict[str, Any] = {"batch_size": self.batch_size, "progress": False}
        nll, labels = answer_nll(model, self.rows, **settings)
        scores = {"answer_nll": nll, "answer_tokens": labels}
        return scores | _number_scores(model, self.tokenizer, self.rows, **settings)

    def _answer(self, model: Any) -> list[str]:
        return answer_questions(
            model, self.tokenizer, self.data.test, max_new_tokens=self.max_new_tokens, batch_size=self.batch_size,
            progress=False,
        )  # fmt: skip


def _check_lengths(prompts: Sequence[int], context: int, max_new_tokens: int) -> None:
    """Raise ValueError if prompts of so many tokens and an answer exceed the context."""
    wide = sum(length + max_new_tokens > context for length in prompts)
    if wide:
        limit = context - max(prompts)
        advice = f"give at most --max_new_tokens {limit}, or leave" if limit > 0 else "leave"
        raise ValueError(
            f"{wide} of {len(prompts)} test questions and an answer of --max_new_tokens {max_new_tokens} exceed the "
            f"model's context of {context} tokens, the longest question has {max(prompts)}; {advice} the long ones out."
        )


def _prompts(rows: AnsweredQuestions) -> list[tuple[int, ...]]:
    """Return the ids of each question: equal for equal texts."""
    return [tuple(rows[i]["input_ids"][:length].tolist()) for i, length in enumerate(rows.prompt_lengths)]


def _number_scores(
    model: Any, tokenizer: Any, rows: PackedBlocks | AnsweredQuestions, **settings: Any
) -> dict[str, Any]:
    """Return scores of the number tokens in the true text; {} if there are none."""
    numbers = score_number_labels(model, tokenizer, rows, **settings)
    if numbers is None:
        return {}
    return {
        "number_tokens": numbers.tokens,
        "number_token_accuracy": numbers.accuracy,
        "number_token_absolute_error": numbers.expected_absolute_error,
        "number_token_log_error": numbers.expected_log_error,
        "number_token_mass": numbers.number_mass,
    }


def _loader(home: Path, model: Any, device: torch.device) -> Callable[[], Any]:
    """Return a function that returns `model`, or loads the one in `home` on its first call."""
    return functools.cache(lambda: (load_model(str(home)) if model is None else model).to(device))


def once(path: Path, make: Callable[[], Any]) -> Any:
    """Return the content of `path`, made and written if it does not exist."""
    if not path.is_file():
        write_json(path, make())
    return read_json(path)
