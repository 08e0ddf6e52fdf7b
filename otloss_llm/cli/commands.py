"""What each command does with its options: `arguments -> (what goes to stdout, exit code)`.

The libraries are imported when a command runs: `--help` and a misspelt command answer at once.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from typing import Any


def train(model_args: Any, lora_args: Any, text_args: Any, objective_args: Any, args: Any) -> tuple[str, int]:
    from otloss_llm.costs.choice import NumberSettings, check_settings, number_tokens
    from otloss_llm.models.adapters import add_adapter
    from otloss_llm.objectives import cost_kind, parse_objective
    from otloss_llm.training.loading import load_cost, load_model_and_tokenizer, say_of_numbers
    from otloss_llm.training.runs import train_run
    from otloss_llm.training.token_store import TokenStore
    from otloss_llm.training.training_data import load_rows, read_sources

    _refuse_arm(objective_args.objective)
    objective, kind = parse_objective(objective_args.objective), cost_kind(objective_args.objective)
    numbers = NumberSettings(objective_args.number_scaling)
    check_settings(kind, numbers)
    source = objective_args.cost_embedding
    if kind == "number" and source != "model":
        raise ValueError(
            f"{objective_args.objective} reads no embedding, got --cost_embedding {source}; leave it out, or take "
            "emo+number."
        )
    lora = _lora(lora_args)
    documents = read_sources(text_args)
    model, tokenizer = load_model_and_tokenizer(
        model_args.model_name_or_path, model_args.tokenizer_name, dtype=model_args.dtype or "float32"
    )
    cost: Any = load_cost(source, model, seed=args.seed, kind=kind, tokenizer=tokenizer, numbers=numbers)
    store = TokenStore(Path(args.output_dir), tokenizer, text_args.block_size)
    parts: Any = load_rows(tokenizer, text_args, documents, store)
    rows, validation, _ = parts
    if kind != "embedding":
        first = args.process_index == 0
        if first:
            getattr(cost, "numbers", cost).coverage(file=sys.stderr)
        said = say_of_numbers(rows, number_tokens(tokenizer, cost.shape[0]).values, objective_args.objective)
        if first:
            print(said, file=sys.stderr)
    settings = {
        "model": model_args.model_name_or_path,
        "objective": repr(objective),
        "cost_embedding": source,
        "train_blocks": rows.fingerprint,
        "validation_blocks": None if validation is None else validation.fingerprint,
    } | _identity(model, cost, source, kind)
    if lora is not None:
        settings["lora"] = dataclasses.asdict(lora)
        model = add_adapter(model, lora, base=model_args.model_name_or_path, seed=args.seed)
    results = train_run(
        model, tokenizer, rows, args=args, objective=objective, cost=cost, validation=validation, settings=settings,
        impl=objective_args.impl, chunk_size=objective_args.chunk_size, store=store,
    )  # fmt: skip
    if args.process_index != 0:
        return "", 0
    print(f"{'model' if lora is None else 'adapter'}, tokenizer and results are in {args.output_dir}", file=sys.stderr)
    return json.dumps(results, indent=2, sort_keys=True), 0


def _refuse_arm(objective: str) -> None:
    """Raise ValueError that names the options of train where an arm of compare is given as the objective."""
    from otloss_llm.experiments.arms import parse_arm

    if "/" not in objective:
        return
    arm = parse_arm(objective)
    given = {"objective": arm.objective, "cost_embedding": arm.embedding,
             "number_scaling": arm.numbers.scaling}  # fmt: skip
    plain = dataclasses.asdict(parse_arm(arm.objective).numbers)
    defaults = {"cost_embedding": "model"} | {f"number_{name}": value for name, value in plain.items()}
    options = " ".join(f"--{name} {value}" for name, value in given.items() if value != defaults.get(name))
    sampling = "" if arm.temperature == 1.0 else f" (and generate with --temperature {arm.temperature:g})"
    raise ValueError(f"objective {objective!r} is an arm of compare; to train it here, give {options}{sampling}.")


def _lora(asked: Any) -> Any:
    """The settings of an adapter, or None where the whole model is trained."""
    from otloss_llm.models.adapters import Lora

    rank, *others = (getattr(asked, f"lora_{name}") for name in ("r", "alpha", "dropout", "target_modules"))
    alpha, dropout, targets = others
    if rank is None:
        if any(other is not None for other in others):
            raise ValueError("lora_alpha, lora_dropout and lora_target_modules need --lora_r, the rank; give it too.")
        return None
    return Lora(rank, 2.0 * rank if alpha is None else alpha, dropout or 0.0, tuple(targets or ("all-linear",)))


def _identity(model: Any, cost: Any, source: str, kind: str) -> dict[str, Any]:
    """What a run with another start or another cost differs in."""
    from otloss_llm.costs.choice import settings_of_near_duplicates
    from otloss_llm.training.loading import COST_SOURCES, fingerprint

    known = kind == "number" or source in COST_SOURCES
    return {
        "model_fingerprint": fingerprint(model.named_parameters()),
        "cost_fingerprint": None if known else fingerprint([("unit", getattr(cost, "other", cost).unit)]),
        **settings_of_near_duplicates(cost),
    } | ({} if kind == "embedding" else {"numbers": repr(getattr(cost, "numbers", cost))})


def generate(model_args: Any, args: Any) -> tuple[str, int]:
    from otloss_llm.data.blocks import read_texts
    from otloss_llm.evaluation import sample_texts
    from otloss_llm.training.folders import write_text
    from otloss_llm.training.loading import load_model_and_tokenizer

    prompts = list(args.prompt)
    if args.prompts_file:
        texts = read_texts(args.prompts_file)
        whole = args.prompts_file.endswith(".jsonl")  # one prompt per record; of other files, one per line
        prompts += texts if whole else [line for text in texts for line in text.splitlines() if line.strip()]
    _check_output_file(args.output_file)
    model, tokenizer = load_model_and_tokenizer(
        model_args.model_name_or_path, model_args.tokenizer_name, dtype=model_args.dtype or "auto"
    )
    samples = sample_texts(
        _on_best_device(model), tokenizer, prompts=prompts or None, num_samples=args.num_samples,
        max_new_tokens=args.max_new_tokens, temperature=args.temperature, top_p=args.top_p, top_k=args.top_k,
        batch_size=args.batch_size, seed=args.seed,
    )  # fmt: skip
    if args.output_file:
        lines = [json.dumps(dataclasses.asdict(sample), ensure_ascii=False) + "\n" for sample in samples]
        write_text(Path(args.output_file), "".join(lines))
        return "", 0
    return "\n".join(f"--- {number}\n{sample.text}" for number, sample in enumerate(samples, 1)), 0


def evaluate(model_args: Any, args: Any) -> tuple[str, int]:
    from otloss_llm.data.blocks import PackedBlocks, read_texts
    from otloss_llm.training.folders import write_text
    from otloss_llm.training.loading import load_model_and_tokenizer

    if not (args.text or args.questions):
        raise ValueError("there is nothing to evaluate on; give --text, --questions, or both.")
    _check_output_file(args.output_file)
    _check_output_file(args.predictions_file)
    if args.output_file is not None and args.output_file == args.predictions_file:
        raise ValueError(f"{args.output_file} is both the output_file and the predictions_file; name two files.")
    args = _settled(args)
    questions, style = _questions(args)
    texts = read_texts(args.text, split=args.split, text_column=args.text_column) if args.text else []
    model, tokenizer = load_model_and_tokenizer(
        model_args.model_name_or_path, model_args.tokenizer_name, dtype=model_args.dtype or "auto"
    )
    results: dict[str, Any] = {"model": model_args.model_name_or_path}
    if args.text:
        blocks = PackedBlocks.from_texts(texts, tokenizer, args.block_size)
        model = _on_best_device(model)
        results |= _score_text(model, tokenizer, blocks, args)
    if questions:
        results |= _score_questions(_on_best_device(model), tokenizer, questions, style, args)
    text = json.dumps(results, indent=2)
    if args.output_file:
        write_text(Path(args.output_file), text + "\n")
    return text, 0


def _settled(args: Any) -> Any:
    """The arguments of evaluate with their defaults, none given that would not be read."""
    from otloss_llm.cli.arguments import EVALUATE_QUESTIONS, EVALUATE_TEXT

    for source, defaults in (("text", EVALUATE_TEXT), ("questions", EVALUATE_QUESTIONS)):
        given = [name for name in defaults if getattr(args, name) is not None]
        if given and not getattr(args, source):
            needs = "needs" if len(given) == 1 else "need"
            raise ValueError(
                f"{', '.join(f'--{name}' for name in given)} {needs} --{source}; name one, or leave this out."
            )
        args = dataclasses.replace(args, **{name: defaults[name] for name in defaults if name not in given})
    return args


def _score_text(model: Any, tokenizer: Any, blocks: Any, args: Any) -> dict[str, Any]:
    from otloss_llm.evaluation import perplexity, score_number_labels
    from otloss_llm.training.loading import load_cost

    cost = load_cost(args.cost_embedding, model).to(model.device)
    scores = perplexity(model, blocks, batch_size=args.batch_size, cost=cost)
    settings = {"text": args.text, "blocks": blocks.fingerprint, "cost_embedding": args.cost_embedding}
    results = settings | dataclasses.asdict(scores) | {"perplexity": scores.perplexity}
    numbers = score_number_labels(model, tokenizer, blocks, batch_size=args.batch_size)
    return results if numbers is None else results | {"number_tokens": dataclasses.asdict(numbers)}


def _questions(args: Any) -> tuple[list[Any], str]:
    """Those to answer, and the style of their answers, wrong settings refused before a model is loaded."""
    from otloss_llm.data.questions import read_questions, spread
    from otloss_llm.evaluation import style_of
    from otloss_llm.evaluation.numbers import check_expected

    if not args.questions:
        return [], ""
    questions = read_questions(args.questions)
    answers = [question.answer for question in questions]
    style = style_of(answers) if args.answer_style is None else args.answer_style
    check_expected(answers, style)
    return questions if args.num_questions is None else spread(questions, args.num_questions), style


def _score_questions(model: Any, tokenizer: Any, questions: list[Any], style: str, args: Any) -> dict[str, Any]:
    from otloss_llm.data.questions import token_counts
    from otloss_llm.evaluation import answer_questions, same_answer, score_answers
    from otloss_llm.training.folders import write_text

    lengths = token_counts(questions, tokenizer)
    cut_short = sum(answer > args.max_new_tokens for _, answer in lengths)
    if cut_short:
        print(
            f"note: {cut_short} of {len(questions)} right answers are longer than max_new_tokens={args.max_new_tokens} "
            f"(the longest has {max(answer for _, answer in lengths)}), and cannot be given; raise --max_new_tokens",
            file=sys.stderr,
        )
    # Before anything is answered: what cannot be scored takes no answers with it.
    numbers = _score_answer_tokens(model, tokenizer, questions, lengths, args.batch_size)
    predicted = answer_questions(
        model, tokenizer, questions, max_new_tokens=args.max_new_tokens, batch_size=args.batch_size
    )
    expected = [question.answer for question in questions]
    if args.predictions_file:
        lines = [
            {"question": question.question, "expected": right, "predicted": ours,
             "correct": same_answer(ours, right, style)}
            for question, right, ours in zip(questions, expected, predicted, strict=True)
        ]  # fmt: skip
        write_text(Path(args.predictions_file), "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines))
    scores = score_answers(predicted, expected, style=style, kinds=[question.kind for question in questions])
    settings = {"questions": args.questions, "answer_style": style, "max_new_tokens": args.max_new_tokens}
    return settings | {"cut_short": cut_short, "answers": dataclasses.asdict(scores)} | numbers


def _score_answer_tokens(
    model: Any, tokenizer: Any, questions: list[Any], lengths: list[tuple[int, int]], batch_size: int
) -> dict[str, Any]:
    """Scores of the number tokens of right answers, given what is right before them; {} where there are none."""
    from otloss_llm.data.questions import AnsweredQuestions
    from otloss_llm.evaluation import score_number_labels
    from otloss_llm.evaluation.perplexity import context_length

    context = sys.maxsize if tokenizer.eos_token_id is not None else 0  # without EOS an answer has no end, and no row
    context = min(context, context_length(model) or sys.maxsize)
    rows = [question for question, length in zip(questions, lengths, strict=True) if sum(length) < context]
    if len(rows) < len(questions):
        reason = "exceed the model's context with their answers" if context else "have answers that no EOS can end"
        said = f"note: {len(questions) - len(rows)} of {len(questions)} questions {reason}"
        print(f"{said}, and are left out of answer_number_tokens", file=sys.stderr)
    if not rows:
        return {}
    data = AnsweredQuestions.from_questions(rows, tokenizer, max_length=context)
    scores = score_number_labels(model, tokenizer, data, batch_size=batch_size)
    return {} if scores is None else {"answer_number_tokens": {"questions": len(rows)} | dataclasses.asdict(scores)}


def compare(model_args: Any, text_args: Any, compare_args: Any, args: Any) -> tuple[str, int]:
    from otloss_llm.experiments.compare import Comparison, Data, QuestionData, parse_arm, run_comparison
    from otloss_llm.experiments.report import write_report
    from otloss_llm.training.loading import load_tokenizer
    from otloss_llm.training.token_store import TokenStore
    from otloss_llm.training.training_data import load_rows, read_sources

    if args.world_size > 1:
        raise ValueError(f"compare runs in one process, not {args.world_size}; start it without torchrun.")
    comparison = Comparison(
        start=model_args.model_name_or_path,
        dtype=model_args.dtype or "float32",
        arms=[parse_arm(text) for text in compare_args.objectives],
        seeds=compare_args.seeds,
        judge=compare_args.judge,
        num_prompts=compare_args.num_prompts,
        prompt_tokens=compare_args.prompt_tokens,
        samples_per_prompt=compare_args.samples_per_prompt,
        max_new_tokens=compare_args.max_new_tokens,
        batch_size=compare_args.sample_batch_size,
        answer_style=compare_args.answer_style,
        num_questions=compare_args.num_questions,
    )
    documents = read_sources(text_args)
    tokenizer = load_tokenizer(model_args.tokenizer_name or model_args.model_name_or_path)
    store = TokenStore(Path(args.output_dir), tokenizer, text_args.block_size)
    rows: Any = load_rows(tokenizer, text_args, documents, store)
    train, validation, test = rows
    if not test:
        missing, kind = ("are no", "questions") if text_args.train_questions else ("is no", "text")
        raise ValueError(f"there {missing} test {kind}; give --test_{kind} or a --test_fraction above 0.")
    data = (QuestionData if text_args.train_questions else Data)(train, test, validation)
    results = run_comparison(comparison, data, tokenizer, args, store=store)
    table = write_report(results, Path(args.output_dir))
    print(f"the report is {Path(args.output_dir) / 'report.md'}", file=sys.stderr)
    return table, 1 if results["failures"] else 0


def _check_output_file(path: str | None) -> None:
    """Before the work, so that it is not done in vain."""
    if path is None:
        return
    if Path(path).exists():
        raise ValueError(f"{path} exists already; name another output file, or delete that one.")
    if not Path(path).parent.is_dir():
        raise ValueError(f"there is no folder {str(Path(path).parent)!r} to write {path} in; make it first.")


def _on_best_device(model: Any) -> Any:
    import torch

    return model.to("cuda") if torch.cuda.is_available() else model
