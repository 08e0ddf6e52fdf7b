"""`evaluate`: perplexity and transport cost of a model on text, its answers to questions, its labels of texts."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

from otloss_llm.cli.arguments import EvaluateArguments, UsedModelArguments
from otloss_llm.data.blocks import PackedBlocks
from otloss_llm.data.labelled import LabelledText, read_labelled_texts
from otloss_llm.data.questions import AnsweredQuestions, Question, read_questions, spread, token_counts
from otloss_llm.data.text import read_texts
from otloss_llm.evaluation import (
    answer_questions,
    classify_in_context,
    final_number,
    number_distributions,
    perplexity,
    same_answer,
    score_answers,
    score_number_distributions,
    score_number_labels,
)
from otloss_llm.evaluation.answer_scores import answer_style
from otloss_llm.evaluation.number_decoding import check_decision
from otloss_llm.evaluation.perplexity import context_length
from otloss_llm.models.heads import is_encoder_decoder
from otloss_llm.models.loading import load_model_and_tokenizer
from otloss_llm.training.folders import write_text
from otloss_llm.training.loading import load_cost, named_source

LONGEST_NUMBER = 12  # tokens of a number that --decode reads


def run(model_args: UsedModelArguments, args: EvaluateArguments) -> tuple[str, int]:
    """Returns what goes to stdout, and the exit code."""
    # Files are read, and answers checked, before a model is loaded.
    texts = read_texts(args.text, text_column=args.text_column) if args.text else []
    questions = read_questions(args.questions) if args.questions else []
    style = answer_style([question.answer for question in questions], args.answer_style) if questions else ""
    _check_decode(args.decode, style)
    if args.num_questions is not None and questions:
        questions = spread(questions, args.num_questions)
    task = _read_task(args) if args.in_context else None
    model, tokenizer = load_model_and_tokenizer(
        model_args.model_name_or_path, model_args.tokenizer_name, dtype=model_args.dtype or "auto"
    )
    model = model.to(model_args.device)
    results: dict[str, Any] = {"model": model_args.model_name_or_path}
    if texts:
        results |= _score_text(model, tokenizer, PackedBlocks.from_texts(texts, tokenizer, args.block_size), args)
    if questions:
        results |= _score_questions(model, tokenizer, questions, style, args)
    if task is not None:
        results |= _score_task(model, tokenizer, *task, args)
    text = json.dumps(results, indent=2)
    if args.output_file:
        write_text(Path(args.output_file), text + "\n")
    return text, 0


def _check_decode(decode: str, style: str) -> None:
    if decode == "greedy":
        return
    check_decision(decode)
    if style != "mathematics":
        raise ValueError(
            f"--decode {decode} reads numbers that begin an answer, and answers of the style {style or 'none'} "
            "begin with a solution, or there are no --questions; leave it out."
        )


def _read_task(args: EvaluateArguments) -> tuple[list[LabelledText], list[LabelledText], list[str]]:
    """Return texts to classify, texts to show, and candidates."""
    named = {written: name or written for written, _, name in (label.partition("=") for label in args.labels)} or None
    source = args.in_context_train or args.in_context
    assert args.in_context is not None
    assert source is not None
    train = read_labelled_texts(source, labels=named)
    candidates = list(named.values()) if named else sorted({item.label for item in train})
    if args.in_context_train:
        test = read_labelled_texts(args.in_context, labels=named or dict(zip(candidates, candidates, strict=True)))
        return spread(test, args.num_questions or len(test)), train, candidates
    chosen = set(spread(range(len(train)), args.num_questions or len(train)))
    test = [item for i, item in enumerate(train) if i in chosen]
    train = [item for i, item in enumerate(train) if i not in chosen]
    if args.demonstrations and not train:
        raise ValueError(
            f"all {len(test)} texts of {args.in_context!r} are classified, so none is left to show; give "
            "--in_context_train, fewer --num_questions, or --demonstrations 0."
        )
    return test, train, candidates


def _score_task(
    model: Any, tokenizer: Any, test: list[LabelledText], train: list[LabelledText], candidates: list[str],
    args: EvaluateArguments,
) -> dict[str, Any]:  # fmt: skip
    settings: dict[str, Any] = {
        "demonstrations": args.demonstrations,
        "retriever": args.retriever,
        "scoring": args.scoring,
    }
    template = args.template.replace("\\n", "\n")
    scores = dataclasses.asdict(
        classify_in_context(
            model, tokenizer, test, train, labels=candidates, template=template, batch_size=args.batch_size, **settings
        )
    )
    lines = [
        {"text": item.text, "expected": item.label, "predicted": prediction, "correct": prediction == item.label}
        for item, prediction in zip(test, scores.pop("predictions"), strict=True)
    ]
    if args.predictions_file:
        write_text(Path(args.predictions_file), "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines))
    sizes = {"texts": len(test), "shown_from": len(train), "labels": candidates, "template": template}
    return {"in_context": {"task": args.in_context} | settings | sizes | scores}


def _score_text(model: Any, tokenizer: Any, blocks: PackedBlocks, args: EvaluateArguments) -> dict[str, Any]:
    source = named_source(args.cost_embedding)
    cost = load_cost(source, model).to(model.device)
    scores = perplexity(model, blocks, batch_size=args.batch_size, cost=cost)
    settings = {
        "text": args.text,
        "blocks": blocks.fingerprint,
        "cost_embedding": source,
    }
    results = settings | dataclasses.asdict(scores) | {"perplexity": scores.perplexity}
    numbers = score_number_labels(model, tokenizer, blocks, batch_size=args.batch_size)
    return results if numbers is None else results | {"number_tokens": dataclasses.asdict(numbers)}


def _score_questions(
    model: Any, tokenizer: Any, questions: list[Question], style: str, args: EvaluateArguments
) -> dict[str, Any]:
    lengths = token_counts(questions, tokenizer, encoder_decoder=is_encoder_decoder(model))
    longest = max(answer for _, answer in lengths)
    cut_short = sum(answer > args.max_new_tokens for _, answer in lengths)
    if cut_short:
        print(
            f"note: {cut_short} of {len(questions)} right answers are longer than max_new_tokens={args.max_new_tokens} "
            f"(the longest has {longest}), and cannot be given; raise --max_new_tokens",
            file=sys.stderr,
        )
    # Scored before anything is answered, so that an error there loses no answers.
    numbers = _score_answer_tokens(model, tokenizer, questions, lengths, args.batch_size)
    predicted, decoded = _answers(model, tokenizer, questions, args)
    expected = [question.answer for question in questions]
    if args.predictions_file:
        lines = [
            {"question": question.question, "expected": question.answer, "predicted": answer,
             "correct": same_answer(answer, question.answer, style)}
            for question, answer in zip(questions, predicted, strict=True)
        ]  # fmt: skip
        write_text(Path(args.predictions_file), "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines))
    scores = score_answers(predicted, expected, style=style, kinds=[question.kind for question in questions])
    settings = {"questions": args.questions, "answer_style": style, "max_new_tokens": args.max_new_tokens}
    return settings | {"cut_short": cut_short, "answers": dataclasses.asdict(scores)} | numbers | decoded


def _answers(
    model: Any, tokenizer: Any, questions: list[Question], args: EvaluateArguments
) -> tuple[list[str], dict[str, Any]]:
    """Return the answers, and what is to be said of the distributions that they were decoded from."""
    if args.decode == "greedy":
        settings: dict[str, Any] = {"max_new_tokens": args.max_new_tokens, "batch_size": args.batch_size}
        return answer_questions(model, tokenizer, questions, **settings), {}
    distributions = number_distributions(
        model,
        tokenizer,
        [one.question + "\n" * (not is_encoder_decoder(model)) for one in questions],
        longest=min(args.max_new_tokens, LONGEST_NUMBER),
        batch_size=args.batch_size,
    )
    predicted = [np.format_float_positional(one.decode(args.decode), precision=6, trim="-") for one in distributions]
    right = [final_number(question.answer) for question in questions]
    pairs = [(one, y) for one, y in zip(distributions, right, strict=True) if y is not None]
    said: dict[str, Any] = {"decode": args.decode}
    if pairs:
        scores = score_number_distributions(*zip(*pairs, strict=True), by=args.decode)
        said["number_distributions"] = dataclasses.asdict(scores)
    return predicted, said


def _score_answer_tokens(
    model: Any, tokenizer: Any, questions: list[Question], lengths: list[tuple[int, int]], batch_size: int
) -> dict[str, Any]:
    """Return scores of the number tokens in right answers, given the true tokens before them; {} if there are none."""
    if tokenizer.eos_token_id is None:  # rows of answers end with EOS
        print("note: the tokenizer has no EOS, so answer_number_tokens is left out", file=sys.stderr)
        return {}
    context = context_length(model) or sys.maxsize
    both = is_encoder_decoder(model)
    together = max if both else sum
    rows = [question for question, length in zip(questions, lengths, strict=True) if together(length) < context]
    if len(rows) < len(questions):
        print(
            f"note: {len(questions) - len(rows)} of {len(questions)} questions exceed the model's context with their "
            "answers, and are left out of answer_number_tokens",
            file=sys.stderr,
        )
    if not rows:
        return {}
    data = AnsweredQuestions.from_questions(rows, tokenizer, max_length=context, encoder_decoder=both)
    scores = score_number_labels(model, tokenizer, data, batch_size=batch_size)
    return {} if scores is None else {"answer_number_tokens": {"questions": len(rows)} | dataclasses.asdict(scores)}
