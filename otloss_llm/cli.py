"""The command line: `python -m otloss_llm train | generate | evaluate | compare` (also installed as `otloss-llm`).

Options are those of the dataclasses in `otloss_llm.arguments` and, for train and compare, of the Hugging Face
`TrainingArguments` (fsdp, deepspeed, bf16, report_to, ...). The same command goes on with the folder of a killed run.
The result, and nothing else, goes to stdout; progress and logs go to stderr. What the user can mend ends with a
one-line message and exit code 2.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from difflib import get_close_matches
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

USAGE = """\
usage: python -m otloss_llm COMMAND [options]     (COMMAND --help lists the options)

  train      train a causal language model on text or questions with MLE, TaiLr, MixCE, EMO, number_token
  generate   sample text from a model
  evaluate   perplexity and mean transport cost of a model on text; its answers to questions
  compare    several objectives and seeds from one start: a table, a figure, samples

With --traceback an error shows where it arose.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code: 0; 2 for what the user can mend; 1 where a run of a comparison failed."""
    given = list(sys.argv[1:] if argv is None else argv)
    traceback = "--traceback" in given
    given = [argument for argument in given if argument != "--traceback"]
    if not given or given[0] in ("-h", "--help"):
        print(USAGE, file=sys.stdout if given else sys.stderr, end="")
        return 0 if given else 2
    command = _COMMANDS.get(given[0])
    if command is None:
        return _fail(f"no command {given[0]!r}, expected {' | '.join(_COMMANDS)}; see --help.")
    try:
        with _transformers_messages():
            parsed = _parse(given[0], command.kinds, given[1:])
            # Trainer, tqdm and other libraries print what they please while the command works.
            with redirect_stdout(sys.stderr):
                text, code = command.run(*parsed)
    except SystemExit as stop:  # of --help
        return int(stop.code or 0)
    except KeyboardInterrupt:
        return _fail("interrupted; train and compare go on from the last checkpoint with the same command.", code=130)
    except Exception as error:
        message = _message(error)
        if traceback or message is None:
            raise
        return _fail(message)
    if text:
        print(text)
    return code


def _message(error: Exception) -> str | None:
    """What to tell the user about it in one line; None for what no user can mend."""
    import torch

    text = " ".join(str(error).split())
    if isinstance(error, torch.OutOfMemoryError):
        return f"out of memory: {text} Take smaller batches (with --gradient_accumulation_steps) or blocks."
    if isinstance(error, ImportError):
        from_extra = error.name in ("transformers", "accelerate", "tqdm", "tokenizers", "safetensors")
        return text + (' (pip install "otloss[llm]")' if from_extra else "")
    if type(error).__module__.partition(".")[0] in ("httpx", "httpcore", "huggingface_hub", "requests"):
        return f"the Hugging Face hub could not be used: {type(error).__name__}: {text}"
    return text if isinstance(error, ValueError | TypeError | OSError) else None


def _fail(message: str, *, code: int = 2) -> int:
    print(f"otloss-llm: error: {message}", file=sys.stderr)
    return code


@contextmanager
def _transformers_messages() -> Iterator[None]:
    """Warnings only, and no bars for loading and writing weights; restored afterwards."""
    from transformers.utils import logging

    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_warning()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()


def _parse(command: str, kinds: Sequence[str], given: Sequence[str]) -> tuple[Any, ...]:
    from transformers import HfArgumentParser

    from otloss_llm import arguments

    class Parser(HfArgumentParser):
        def error(self, message: str) -> NoReturn:  # in place of some 600 lines of usage
            raise ValueError(f"{message} (see {command} --help).")

    # No abbreviations: a misspelt option would silently be taken for another.
    parser = Parser(
        [getattr(arguments, kind) for kind in kinds], prog=f"python -m otloss_llm {command}", allow_abbrev=False
    )
    *parsed, unknown = parser.parse_args_into_dataclasses(
        args=list(given), return_remaining_strings=True, look_for_args_file=False
    )
    if unknown:
        known = [option for action in parser._actions for option in action.option_strings]
        near = get_close_matches(unknown[0].partition("=")[0], known, n=1)
        raise ValueError(
            f"{command} has no option {unknown[0]!r}{f', did you mean {near[0]}?' if near else ''} "
            f"(see {command} --help)."
        )
    return tuple(parsed)


def _train(model_args: Any, text_args: Any, objective_args: Any, args: Any) -> tuple[str, int]:
    from otloss_llm.cost_choice import NumberSettings
    from otloss_llm.loading import load_cost, load_model_and_tokenizer
    from otloss_llm.objectives import cost_kind, parse_objective
    from otloss_llm.runs import train_run

    objective, kind = parse_objective(objective_args.objective), cost_kind(objective_args.objective)
    numbers = NumberSettings(objective_args.number_form, objective_args.number_scaling, objective_args.number_span)
    if kind == "embedding" and numbers != NumberSettings():
        raise ValueError(
            f"{objective_args.objective} reads no numbers; --number_... goes with number_token, emo+number."
        )
    model, tokenizer = load_model_and_tokenizer(
        model_args.model_name_or_path, model_args.tokenizer_name, dtype=model_args.dtype or "float32"
    )
    rows, validation = _training_rows(tokenizer, text_args)
    source = objective_args.cost_embedding
    cost: Any = load_cost(source, model, seed=args.seed, kind=kind, tokenizer=tokenizer, numbers=numbers)
    if kind != "embedding":
        getattr(cost, "numbers", cost).coverage(file=sys.stderr)
    settings = {
        "model": model_args.model_name_or_path,
        "objective": repr(objective),
        "cost_embedding": source,
        "train_blocks": rows.fingerprint,
        "validation_blocks": None if validation is None else validation.fingerprint,
    } | _identity(model, cost, source, kind)
    results = train_run(
        model, tokenizer, rows, args=args, objective=objective, cost=cost, validation=validation, settings=settings,
        impl=objective_args.impl, chunk_size=objective_args.chunk_size,
    )  # fmt: skip
    if args.process_index != 0:
        return "", 0
    print(f"model, tokenizer and results are in {args.output_dir}", file=sys.stderr)
    return json.dumps(results, indent=2, sort_keys=True), 0


def _training_rows(tokenizer: Any, text_args: Any) -> tuple[Any, Any]:
    """Training and validation rows, of text or of questions."""
    from otloss_llm.loading import load_blocks, load_questions

    if (text_args.train_text is None) == (text_args.train_questions is None):
        given = "both" if text_args.train_text else "neither"
        raise ValueError(f"got {given} of --train_text and --train_questions, expected one: what to train on.")
    shares = {"validation_fraction": text_args.validation_fraction, "test_fraction": 0.0}
    if text_args.train_questions:
        if text_args.validation_text:
            raise ValueError("--validation_text goes with --train_text; name --validation_questions instead.")
        rows, validation, _ = load_questions(
            tokenizer, train=text_args.train_questions, validation=text_args.validation_questions, test=None,
            max_length=text_args.block_size, train_on_question=text_args.train_on_question, **shares,
        )  # fmt: skip
        return rows, validation
    if text_args.validation_questions or text_args.train_on_question:
        raise ValueError("--validation_questions and --train_on_question go with --train_questions.")
    blocks, held_out, _ = load_blocks(
        tokenizer, train=text_args.train_text, validation=text_args.validation_text, test=None,
        block_size=text_args.block_size, text_column=text_args.text_column, **shares,
    )  # fmt: skip
    return blocks, held_out


def _identity(model: Any, cost: Any, source: str, kind: str) -> dict[str, Any]:
    """What a run with another start or another cost differs in."""
    from otloss_llm.loading import COST_SOURCES, fingerprint

    known = kind == "number" or source in COST_SOURCES
    return {
        "model_fingerprint": fingerprint(model.named_parameters()),
        "cost_fingerprint": None if known else fingerprint([("unit", getattr(cost, "other", cost).unit)]),
    } | ({} if kind == "embedding" else {"numbers": repr(getattr(cost, "numbers", cost))})


def _generate(model_args: Any, args: Any) -> tuple[str, int]:
    from otloss_llm.data import read_texts
    from otloss_llm.evaluation import sample_texts
    from otloss_llm.folders import write_text
    from otloss_llm.loading import load_model_and_tokenizer

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


def _evaluate(model_args: Any, args: Any) -> tuple[str, int]:
    from otloss_llm.data import PackedBlocks, read_texts
    from otloss_llm.folders import write_text
    from otloss_llm.loading import load_model_and_tokenizer

    if not (args.text or args.questions):
        raise ValueError("there is nothing to evaluate on; give --text, --questions, or both.")
    _check_output_file(args.output_file)
    _check_output_file(args.predictions_file)
    if args.output_file is not None and args.output_file == args.predictions_file:
        raise ValueError(f"{args.output_file} is both the output_file and the predictions_file; name two files.")
    questions, style = _questions(args)
    model, tokenizer = load_model_and_tokenizer(
        model_args.model_name_or_path, model_args.tokenizer_name, dtype=model_args.dtype or "auto"
    )
    results: dict[str, Any] = {"model": model_args.model_name_or_path}
    if args.text:
        texts = read_texts(args.text, split=args.split, text_column=args.text_column)
        blocks = PackedBlocks.from_texts(texts, tokenizer, args.block_size)
        model = _on_best_device(model)
        results |= _score_text(model, blocks, args)
    if questions:
        results |= _score_questions(_on_best_device(model), tokenizer, questions, style, args)
    text = json.dumps(results, indent=2)
    if args.output_file:
        write_text(Path(args.output_file), text + "\n")
    return text, 0


def _score_text(model: Any, blocks: Any, args: Any) -> dict[str, Any]:
    from otloss_llm.evaluation import perplexity
    from otloss_llm.loading import load_cost

    cost = load_cost(args.cost_embedding, model).to(model.device)
    scores = perplexity(model, blocks, batch_size=args.batch_size, cost=cost)
    settings = {"text": args.text, "blocks": blocks.fingerprint, "cost_embedding": args.cost_embedding}
    return settings | dataclasses.asdict(scores) | {"perplexity": scores.perplexity}


def _questions(args: Any) -> tuple[list[Any], str]:
    """Those to answer, and the style of their answers, wrong settings refused before a model is loaded."""
    from otloss_llm.evaluation import style_of
    from otloss_llm.evaluation.numbers import check_expected
    from otloss_llm.questions import read_questions, spread

    if not args.questions:
        names = ("answer_style", "num_questions", "predictions_file")
        given = [f"--{name}" for name in names if getattr(args, name) is not None]
        if given:
            raise ValueError(f"{', '.join(given)} need --questions; name the file of them.")
        return [], ""
    questions = read_questions(args.questions)
    answers = [question.answer for question in questions]
    style = style_of(answers) if args.answer_style is None else args.answer_style
    check_expected(answers, style)
    return questions if args.num_questions is None else spread(questions, args.num_questions), style


def _score_questions(model: Any, tokenizer: Any, questions: list[Any], style: str, args: Any) -> dict[str, Any]:
    from otloss_llm.evaluation import answer_questions, same_answer, score_answers
    from otloss_llm.folders import write_text

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
    return settings | {"answers": dataclasses.asdict(scores)}


def _compare(model_args: Any, text_args: Any, compare_args: Any, args: Any) -> tuple[str, int]:
    from otloss_llm.compare import Comparison, Data, QuestionData, parse_arm, run_comparison
    from otloss_llm.loading import load_tokenizer
    from otloss_llm.report import write_report
    from otloss_llm.training_data import load_rows

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
    tokenizer = load_tokenizer(model_args.tokenizer_name or model_args.model_name_or_path)
    rows: Any = load_rows(tokenizer, text_args)
    train, validation, test = rows
    if not test:
        missing, kind = ("are no", "questions") if text_args.train_questions else ("is no", "text")
        raise ValueError(f"there {missing} test {kind}; give --test_{kind} or a --test_fraction above 0.")
    data = (QuestionData if text_args.train_questions else Data)(train, test, validation)
    results = run_comparison(comparison, data, tokenizer, args)
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


class _Command(NamedTuple):
    run: Callable[..., tuple[str, int]]  # the dataclasses -> what goes to stdout, exit code
    kinds: tuple[str, ...]  # dataclasses of otloss_llm.arguments


_COMMANDS = {
    "train": _Command(_train, ("ModelArguments", "TextArguments", "ObjectiveArguments", "ObjectiveTrainingArguments")),
    "generate": _Command(_generate, ("ModelArguments", "GenerateArguments")),
    "evaluate": _Command(_evaluate, ("ModelArguments", "EvaluateArguments")),
    "compare": _Command(
        _compare, ("ModelArguments", "CompareTextArguments", "CompareArguments", "ObjectiveTrainingArguments")
    ),
}
