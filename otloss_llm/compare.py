"""Compare objectives fairly: each trained from the same start on the same batches, each judged in the same way.

An *arm* is what is compared: an objective, the embedding its cost is made of, and the temperature it is sampled at.
`parse_arm` reads it from `objective[/random | /shuffled][/T=temperature]`:

    mle    tailr:0.001    mixce:0.8    emo    emo/random    emo/shuffled    mle/T=0.8

Arms that differ only in temperature share one training. Every arm and seed has a folder with its results; a killed
comparison, started again, trains and samples only what is missing, and so does one with more arms or seeds. A run that
fails (diverges, say) is reported as such and takes no other with it.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import TrainingArguments

from otloss.costs import Cost
from otloss_llm.data import PackedBlocks
from otloss_llm.evaluation import distinct_n, perplexity, sample_texts, score_texts
from otloss_llm.folders import open_run, read_json, write_json
from otloss_llm.loading import COST_SOURCES, fingerprint, load_cost, load_model, load_tokenizer
from otloss_llm.objectives import needs_cost, parse_objective
from otloss_llm.runs import check_fit, decisive_settings, environment, train_run

HUMAN, START = "text itself", "start model"


@dataclass(frozen=True)
class Arm:
    """One thing to compare: objective, source of the cost embedding, sampling temperature."""

    objective: str
    embedding: str = "model"
    temperature: float = 1.0

    @property
    def training(self) -> str:
        """Name of what is trained; arms with the same one share it."""
        return self.objective + ("" if self.embedding == "model" else f"/{self.embedding}")

    @property
    def name(self) -> str:
        return self.training + ("" if self.temperature == 1.0 else f"/T={self.temperature:g}")


def parse_arm(text: str) -> Arm:
    """Read an arm from its name.

    Raises:
        ValueError: unknown objective, embedding or temperature.

    Example:
        >>> parse_arm("emo/random/T=0.8")
        Arm(objective='emo', embedding='random', temperature=0.8)
    """
    objective, *modifiers = text.strip().split("/")
    embedding, temperature = "model", 1.0
    reads_cost = needs_cost(parse_objective(objective))
    for modifier in modifiers:
        if modifier in COST_SOURCES and reads_cost:
            embedding = modifier
        elif modifier.startswith("T=") and _positive(modifier[2:]):
            temperature = float(modifier[2:])
        else:
            reason = "it reads no cost" if modifier in COST_SOURCES else f"{modifier!r} is not understood"
            raise ValueError(f"arm {text!r}: {reason}; expected objective[/random | /shuffled][/T=temperature].")
    return Arm(objective.lower(), embedding, temperature)


def _positive(text: str) -> bool:
    try:
        return 0.0 < float(text) < float("inf")
    except ValueError:
        return False


@dataclass(frozen=True)
class Comparison:
    """What a comparison is made of.

    Attributes:
        start: model folder (or hub name) that every arm starts from.
        arms, seeds: what is trained; a seed sets the order of batches and the dropout of every arm alike.
        judge: folder of an independent model that scores the samples; None leaves those columns out.
        num_prompts: test blocks whose first `prompt_tokens` tokens are continued.
        samples_per_prompt, max_new_tokens: how much is sampled.
        batch_size: of evaluation and sampling.
        dtype: of the weights in training.
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

    def settings(self) -> dict[str, Any]:
        """What identifies the comparison, without arms and seeds: those may be added later."""
        values = asdict(self)
        return {key: value for key, value in values.items() if key not in ("arms", "seeds")}


@dataclass(frozen=True)
class Data:
    """Packed blocks of the three parts; the prompts come from `test`."""

    train: PackedBlocks
    test: PackedBlocks
    validation: PackedBlocks | None = None

    def fingerprints(self) -> dict[str, str | None]:
        parts = {"train": self.train, "validation": self.validation, "test": self.test}
        return {f"{name}_blocks": None if part is None else part.fingerprint for name, part in parts.items()}


def run_comparison(
    comparison: Comparison,
    data: Data,
    tokenizer: Any,
    args: TrainingArguments,
    *,
    say: Callable[[str], None] = lambda line: print(line, file=sys.stderr, flush=True),
) -> dict[str, Any]:
    """Train, evaluate and sample every arm and seed in folders below `args.output_dir`; return all results.

    The start model and the test text itself are measured first, by the same steps as the arms: what cannot be
    sampled or judged fails before anything is trained.

    Args:
        args: training arguments of each arm; `output_dir` and `seed` are set per run.
        say: receives a line per run.

    Returns:
        `{"settings": ..., "environment": ..., "prompts": ..., "reference": ..., "start": ..., "runs": [...],
        "failures": [...]}`: one entry per arm and seed in runs or in failures.

    Raises:
        ValueError: no arm, the same arm twice, prompts longer than a block, or a folder that holds something else.
        Exception: the first failure, where every run failed.
    """
    _check(comparison, data)
    folder = Path(args.output_dir)
    start = load_model(comparison.start, dtype=comparison.dtype)
    check_fit(start, data.train)
    settings = comparison.settings() | data.fingerprints()
    settings["start_fingerprint"] = fingerprint(start.named_parameters())
    judge = None
    if comparison.judge is not None:
        judge = (load_model(comparison.judge), load_tokenizer(comparison.judge))
        settings["judge_fingerprint"] = fingerprint(judge[0].named_parameters())
        if settings["judge_fingerprint"] == settings["start_fingerprint"]:
            say("note: the judge is the start model itself, no independent one")
    training = {key: value for key, value in decisive_settings(args).items() if key != "seed"}
    open_run(folder, settings | training)
    bench = _Bench(comparison, data, tokenizer, load_cost("model", start), judge, args.device)
    if len(bench.prompts) < comparison.num_prompts:
        say(f"note: the test text has {len(bench.prompts)} blocks, so {len(bench.prompts)} prompts")
    reference = _once(folder / "reference.json", lambda: bench.judge(bench.references))
    before = bench.measure(folder / "start", start, temperature=1.0, seed=0)
    del start
    runs, failures = _run_all(bench, args, settings, say)
    _note_what_is_left_out(folder, comparison, say)
    return {
        "settings": settings | {"training": args.to_dict()},
        "environment": environment(args.device),
        "prompts": bench.prompts,
        "reference": reference | {"samples": bench.references},
        "start": before,
        "runs": runs,
        "failures": failures,
    }


def _check(comparison: Comparison, data: Data) -> None:
    names = [arm.name for arm in comparison.arms]
    if not names or not comparison.seeds:
        raise ValueError(f"there are {len(names)} arms and {len(comparison.seeds)} seeds; give at least one of each.")
    same = [(parse_objective(arm.objective), arm.embedding, arm.temperature) for arm in comparison.arms]
    if any(same.count(one) > 1 for one in same):
        raise ValueError(f"the arms are {names}, expected each once (an objective has one arm under all its names).")
    if len(set(comparison.seeds)) < len(comparison.seeds):
        raise ValueError(f"the seeds are {list(comparison.seeds)}, expected each once.")
    for name in ("num_prompts", "prompt_tokens", "samples_per_prompt", "max_new_tokens", "batch_size"):
        if getattr(comparison, name) < 1:
            raise ValueError(f"{name} is {getattr(comparison, name)}, expected 1 or more.")
    whole = comparison.prompt_tokens + comparison.max_new_tokens
    if whole > data.test.block_size:
        raise ValueError(
            f"prompt_tokens and max_new_tokens make {whole}, expected at most the block_size, {data.test.block_size}, "
            "since prompts are the beginnings of test blocks and samples are compared with how the blocks go on."
        )


def _run_all(
    bench: _Bench, args: TrainingArguments, settings: dict[str, Any], say: Callable[[str], None]
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Every arm with every seed; a training that failed is not tried again for its other temperatures."""
    comparison = bench.comparison
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
            home, timing = _train(bench, args, settings, arm, seed)
            runs.append(job | timing | bench.measure(home, None, temperature=arm.temperature, seed=seed))
        except (ValueError, ArithmeticError, RuntimeError) as error:
            failed[key] = error.with_traceback(None)  # whose frames would keep the model in memory
            failures.append(job | {"error": f"{type(error).__name__}: {' '.join(str(error).split())}"})
            say(f"[{number}/{len(jobs)}] failed: {failures[-1]['error']}")
    if not runs:
        raise next(iter(failed.values()))
    return runs, failures


def _train(
    bench: _Bench, args: TrainingArguments, settings: dict[str, Any], arm: Arm, seed: int
) -> tuple[Path, dict[str, Any]]:
    """Train an arm in a folder of its own; returns it, and how many steps it took of how many seconds."""
    own = copy.copy(args)
    home = Path(args.output_dir) / f"{arm.training.replace('/', '-').replace(':', '-')}-seed{seed}"
    own.output_dir, own.seed = str(home), seed
    model = load_model(bench.comparison.start, dtype=bench.comparison.dtype)
    objective = parse_objective(arm.objective)
    results = train_run(
        model, bench.tokenizer, bench.data.train, args=own, objective=objective,
        cost=load_cost(arm.embedding, model, seed=seed), validation=bench.data.validation,
        settings={
            "start_fingerprint": settings["start_fingerprint"], "objective": repr(objective),
            "embedding": arm.embedding, **bench.data.fingerprints(),
        },
        bar=f"{arm.training} seed {seed}",
    )  # fmt: skip
    return home, {key: results[key] for key in ("steps", "seconds_per_step")}


class _Bench:
    """Measures any model in the same way: on the test text, by its samples, and by what the judge makes of them."""

    def __init__(
        self,
        comparison: Comparison,
        data: Data,
        tokenizer: Any,
        cost: Cost,
        judge: tuple[Any, Any] | None,
        device: torch.device,
    ) -> None:
        self.comparison, self.data, self.tokenizer, self.device = comparison, data, tokenizer, device
        self.cost = cost.to(device)
        self._judge = None if judge is None else (judge[0].to(device), judge[1])  # model and its tokenizer
        self.prompts, self.references = self._cut_prompts()

    def _cut_prompts(self) -> tuple[list[str], list[str]]:
        """Beginnings of test blocks spread over the test text, and how the text itself goes on."""
        comparison, test = self.comparison, self.data.test
        chosen = torch.linspace(0, len(test) - 1, min(comparison.num_prompts, len(test))).round().long()
        begin, stop = comparison.prompt_tokens, comparison.prompt_tokens + comparison.max_new_tokens
        rows = test.ids[chosen].tolist()
        decode = functools.partial(self.tokenizer.decode, skip_special_tokens=True)
        return [decode(ids[:begin]) for ids in rows], [decode(ids[begin:stop]) for ids in rows]

    def measure(self, home: Path, model: Any, *, temperature: float, seed: int) -> dict[str, Any]:
        """Scores of `model` (None: the one in `home`) on the test text, its samples, and what the judge makes of
        them; each made once and kept in `home`."""
        load = functools.cache(lambda: (load_model(str(home)) if model is None else model).to(self.device))
        at = f"T{temperature:g}"
        scores = _once(home / "test.json", lambda: self.test(load()))
        samples = _once(home / f"samples-{at}.json", lambda: self.sample(load(), temperature, seed))
        judged = _once(home / f"judged-{at}.json", lambda: self.judge(samples))
        return scores | judged | {"samples": samples}

    def test(self, model: Any) -> dict[str, Any]:
        scores = perplexity(
            model, self.data.test, batch_size=self.comparison.batch_size, cost=self.cost, progress=False
        )
        return {"test_nll": scores.nll, "test_perplexity": scores.perplexity, "transport_cost": scores.transport_cost}

    def sample(self, model: Any, temperature: float, seed: int) -> list[str]:
        comparison = self.comparison
        samples = sample_texts(
            model, self.tokenizer, prompts=self.prompts, num_samples=comparison.samples_per_prompt,
            max_new_tokens=comparison.max_new_tokens, temperature=temperature, batch_size=comparison.batch_size,
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
        size = self.comparison.batch_size
        judged = score_texts(model, tokenizer, texts, prompts=told, batch_size=size, progress=False)
        return scores | {"judge_perplexity": judged.perplexity, "judge_bits_per_byte": judged.bits_per_byte}


def _note_what_is_left_out(folder: Path, comparison: Comparison, say: Callable[[str], None]) -> None:
    """The report covers the arms asked for; arms compared in this folder before are kept, but not in it."""
    path = folder / "arms.json"
    asked = [arm.name for arm in comparison.arms]
    before = read_json(path) if path.is_file() else []
    left_out = [name for name in before if name not in asked]
    if left_out:
        say(f"note: compared here before and left out of the new report: {' '.join(left_out)}; ask for them as well")
    write_json(path, before + [name for name in asked if name not in before])


def _once(path: Path, make: Callable[[], Any]) -> Any:
    """The content of `path`, made and written if it is not there yet."""
    if not path.is_file():
        write_json(path, make())
    return read_json(path)
