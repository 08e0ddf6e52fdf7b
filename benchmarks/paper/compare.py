"""Compare objectives: every arm is trained from the same start on the same batches, and measured in the same way.

An arm (`benchmarks.paper.arms`) is compared on text (`Data`: perplexity, samples, a judge) or on questions
(`QuestionData`: greedy answers).

Arms that differ only in temperature share one training. Every arm and seed has a folder with its results, so an
interrupted comparison, started again, trains and samples only what is missing, and arms or seeds can be added. A run
that fails (diverges, say) is reported, and the others continue.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from transformers import TrainingArguments

from benchmarks.paper.arms import Arm, named_source
from benchmarks.paper.arms import parse_arm as parse_arm
from benchmarks.paper.data.blocks import PackedBlocks
from benchmarks.paper.data.questions import AnsweredQuestions, spread
from benchmarks.paper.data.sources import number_share
from benchmarks.paper.evaluation.answer_scores import answer_style
from benchmarks.paper.folders import full_disk_reported, locked, open_run
from benchmarks.paper.measuring import METRICS, Data, QuestionBench, QuestionData, TextBench
from benchmarks.paper.models import load_model, load_tokenizer
from benchmarks.paper.runs import check_fit, decisive_settings, environment, train_run
from otloss_llm.cli.guard import fingerprint
from otloss_llm.costs.choice import number_cost, number_tokens, settings_of_near_duplicates
from otloss_llm.costs.named import load_cost
from otloss_llm.models.heads import find_head
from otloss_llm.objectives import parse_objective

HUMAN, START, RIGHT = "text itself", "start model", "right answer"


@dataclass(frozen=True)
class Comparison:
    """The settings of a comparison.

    Attributes:
        start: model folder (or hub name) that every arm starts from.
        arms, seeds: each arm is trained with each seed, which sets the order of batches and the dropout.
        judge: folder of an independent model that scores the samples; None leaves those columns out. Text only.
        num_prompts: test blocks whose first `prompt_tokens` tokens are continued; questions shown with their answers.
        samples_per_prompt, max_new_tokens: number and length of samples; the latter also limits an answer.
        batch_size: of evaluation and sampling.
        dtype: of the weights in training.
        answer_style: of `evaluation.answer_scores`; None takes the style of the right answers. Questions only.
        num_questions: asked at most, spread evenly over the test questions; None asks them all. Questions only.
        metrics: of the samples, beside the others: "mauve" (with features of the judge), "rouge". Text only.
    """

    start: str
    arms: Sequence[Arm]
    seeds: Sequence[int]
    judge: str | None = None
    num_prompts: int = 64
    prompt_tokens: int = 20
    samples_per_prompt: int = 1
    max_new_tokens: int = 100
    batch_size: int = 32
    dtype: str = "float32"
    answer_style: str | None = None
    num_questions: int | None = None
    metrics: tuple[str, ...] = ()

    def settings(self, data: Data | QuestionData) -> dict[str, Any]:
        """What identifies the comparison, without unused settings and what may be added later."""
        text_only, questions_only = (
            ("judge", "prompt_tokens", "samples_per_prompt", "num_prompts"), ("answer_style", "num_questions")
        )  # fmt: skip
        unused = text_only if isinstance(data, QuestionData) else questions_only
        return {key: value for key, value in asdict(self).items() if key not in ("arms", "seeds", "metrics", *unused)}


def run_comparison(
    comparison: Comparison,
    data: Data | QuestionData,
    tokenizer: Any,
    args: TrainingArguments,
    *,
    say: Callable[[str], None] = lambda line: print(line, file=sys.stderr, flush=True),
) -> dict[str, Any]:
    """Train and measure every arm and seed in folders below `args.output_dir`; return all results.

    The start model and the test text itself are measured first, in the same way as the arms: errors in sampling or
    judging are found before anything is trained.

    Args:
        args: training arguments of each arm; `output_dir` and `seed` are set per run.
        say: receives one line per run.

    Returns:
        `{"settings": ..., "environment": ..., "prompts": ..., "reference": ..., "start": ..., "runs": [...],
        "failures": [...]}`, with one entry per arm and seed in runs or in failures; and `"questions"` if there are any.

    Raises:
        ValueError: no arm, the same arm twice, settings that do not go with the data, prompts longer than a block, a
            tokenizer without the numbers that an arm needs, or a folder that holds something else.
        Exception: the first failure, if every run failed.
    """
    _check(comparison, data)
    style = ""
    if isinstance(data, QuestionData):
        # The style follows from the whole file, as in `evaluate`, also if only some of its questions are asked.
        style = answer_style([question.answer for question in data.test], comparison.answer_style)
        if comparison.num_questions is not None:
            data = replace(data, test=spread(data.test, comparison.num_questions))
    folder = Path(args.output_dir)
    start = load_model(comparison.start, dtype=comparison.dtype)
    for part in (data.train, *([] if data.validation is None else [data.validation])):
        check_fit(start, part)
    _check_numbers(comparison.arms, tokenizer, find_head(start).weight.shape[0], rows=data.train, say=say)
    settings = comparison.settings(data) | data.fingerprints()
    settings["start_fingerprint"] = fingerprint(start.named_parameters())
    bench = _bench(
        comparison, data, tokenizer, start=start, style=style, device=args.device, settings=settings, say=say
    )
    training = {key: value for key, value in decisive_settings(args).items() if key != "seed"}
    with locked(folder), full_disk_reported(folder):
        open_run(folder, settings | training)
        reference = bench.reference(folder)
        before = bench.measure(folder / "start", start, temperature=1.0, seed=0)
        del start
        runs, failures = _run_all(comparison, bench, args, settings=settings, say=say)
    return {
        "settings": settings | {"training": args.to_dict()},
        "environment": environment(args.device),
        **bench.about(),
        "reference": reference,
        "start": before,
        "runs": runs,
        "failures": failures,
    }


def _check(comparison: Comparison, data: Data | QuestionData) -> None:
    names = [arm.name for arm in comparison.arms]
    if not names or not comparison.seeds:
        raise ValueError(f"there are {len(names)} arms and {len(comparison.seeds)} seeds; give at least one of each.")
    same = [
        (parse_objective(arm.objective), arm.cost_settings(),
         replace(arm, objective="", embedding=named_source(arm.embedding)))
        for arm in comparison.arms
    ]  # fmt: skip
    if any(same.count(one) > 1 for one in same):
        raise ValueError(f"the arms are {names}, expected each once (two names of one objective are the same arm).")
    if len(set(comparison.seeds)) < len(comparison.seeds):
        raise ValueError(f"the seeds are {list(comparison.seeds)}, expected each once.")
    for name in ("num_prompts", "prompt_tokens", "samples_per_prompt", "max_new_tokens", "batch_size"):
        if getattr(comparison, name) < 1:
            raise ValueError(f"{name} is {getattr(comparison, name)}, expected 1 or more.")
    if unknown := set(comparison.metrics) - set(METRICS):
        raise ValueError(f"metrics has {sorted(unknown)}, expected some of {METRICS}.")
    if "mauve" in comparison.metrics and comparison.judge is None:
        raise ValueError("mauve needs features of an independent model; name it with --judge.")
    if comparison.metrics and isinstance(data, QuestionData):
        raise ValueError(f"metrics are {comparison.metrics}, but answers to questions have their own; leave them out.")
    if isinstance(data, QuestionData):
        sampled = [arm.name for arm in comparison.arms if arm.temperature != 1.0]
        if sampled:
            raise ValueError(
                f"the arms {sampled} have a temperature, but answers are greedy; leave the temperature out."
            )
    elif (whole := comparison.prompt_tokens + comparison.max_new_tokens) > data.test.block_size:
        raise ValueError(
            f"prompt_tokens and max_new_tokens make {whole}, expected at most the block_size, {data.test.block_size}, "
            "because samples are compared with the continuations in the test blocks."
        )


def _check_numbers(
    arms: Sequence[Arm],
    tokenizer: Any,
    vocab_size: int,
    *,
    rows: PackedBlocks | AnsweredQuestions,
    say: Callable[[str], None],
) -> None:
    """Make the costs of numbers once, so that an error in them is found before anything is trained."""
    numeric = [arm for arm in arms if arm.cost_kind != "embedding"]
    for arm in numeric:
        number_cost(tokenizer, vocab_size, arm.numbers)
    if numeric:
        tokens = number_tokens(tokenizer, vocab_size)
        say(str(tokens.coverage()))
        say(number_share(rows, tokens.values, numeric[0].objective))


def _bench(
    comparison: Comparison,
    data: Data | QuestionData,
    tokenizer: Any,
    *,
    start: Any,
    style: str,
    device: Any,
    settings: dict[str, Any],
    say: Callable[[str], None],
) -> TextBench | QuestionBench:
    """The bench that measures the models; adds the judge's fingerprint and the cost's near-duplicates to `settings`."""
    names = ("num_prompts", "max_new_tokens", "batch_size")
    shared: dict[str, Any] = {name: getattr(comparison, name) for name in names} | {"device": device}
    if isinstance(data, QuestionData):
        asked = QuestionBench(data, tokenizer, start=start, style=style, **shared)
        if asked.overlap:
            say(f"note: {asked.overlap} of {len(asked.expected)} test questions are also training questions")
        if asked.cut_short:
            say(
                f"note: {asked.cut_short} right answers are longer than max_new_tokens={comparison.max_new_tokens}, "
                "and cannot be given; raise --max_new_tokens"
            )
        return asked
    judge = None
    if comparison.judge is not None:
        judge = (load_model(comparison.judge), load_tokenizer(comparison.judge))
        settings["judge_fingerprint"] = fingerprint(judge[0].named_parameters())
    bench = TextBench(
        # The reported transport cost is the paper's for every arm.
        data, tokenizer, cost=load_cost("raw", start), judge=judge, prompt_tokens=comparison.prompt_tokens,
        samples_per_prompt=comparison.samples_per_prompt, metrics=comparison.metrics, **shared,
    )  # fmt: skip
    settings |= settings_of_near_duplicates(bench.cost)
    return bench


def _run_all(
    comparison: Comparison,
    bench: TextBench | QuestionBench,
    args: TrainingArguments,
    *,
    settings: dict[str, Any],
    say: Callable[[str], None],
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Every arm with every seed; a failed training is not repeated for its other temperatures."""
    jobs = [(seed, arm) for seed in comparison.seeds for arm in comparison.arms]
    runs: list[dict[str, Any]] = []
    failures: list[dict[str, Any]] = []
    failed: dict[tuple[int, str], Exception] = {}
    for number, (seed, arm) in enumerate(jobs, 1):
        say(f"[{number}/{len(jobs)}] {arm.name}, seed {seed}")
        job = {"arm": arm.name, "training": arm.training, "seed": seed} | asdict(arm)
        key = (seed, arm.training)
        try:
            if key in failed:
                raise failed[key]
            home, timing = _train(comparison, bench, args, settings=settings, arm=arm, seed=seed)
            runs.append(job | timing | bench.measure(home, None, temperature=arm.temperature, seed=seed))
        except (ValueError, ArithmeticError, RuntimeError) as error:
            failed[key] = error.with_traceback(None)  # its frames would keep the model in memory
            failures.append(job | {"error": f"{type(error).__name__}: {' '.join(str(error).split())}"})
            say(f"[{number}/{len(jobs)}] failed: {failures[-1]['error']}")
    if not runs:
        raise next(iter(failed.values()))
    return runs, failures


def _train(
    comparison: Comparison,
    bench: TextBench | QuestionBench,
    args: TrainingArguments,
    *,
    settings: dict[str, Any],
    arm: Arm,
    seed: int,
) -> tuple[Path, dict[str, Any]]:
    """Train an arm in a folder of its own; returns the folder, the number of steps and their wall time."""
    own = copy.copy(args)
    home = Path(args.output_dir) / f"{arm.training.replace('/', '-').replace(':', '-')}-seed{seed}"
    own.output_dir, own.seed = str(home), seed
    model = load_model(comparison.start, dtype=comparison.dtype)
    objective, embedding = parse_objective(arm.objective), named_source(arm.embedding)
    cost = load_cost(embedding, model, seed=seed, kind=arm.cost_kind, tokenizer=bench.tokenizer, numbers=arm.numbers)
    results = train_run(
        model, bench.tokenizer, bench.data.train, args=own, objective=objective, cost=cost,
        validation=bench.data.validation,
        settings={
            "start_fingerprint": settings["start_fingerprint"], "objective": repr(objective),
            "embedding": embedding, **arm.cost_settings(), **settings_of_near_duplicates(cost),
            **bench.data.fingerprints(),
        },
        bar=f"{arm.training} seed {seed}",
    )  # fmt: skip
    return home, {key: results[key] for key in ("steps", "seconds_per_step")}
