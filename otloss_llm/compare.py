"""Compare objectives fairly: each trained from the same start on the same batches, each judged in the same way.

An *arm* is what is compared: an objective, the embedding its cost is made of, and the temperature it is sampled at.
`parse_arm` reads it from `objective[/random | /shuffled][/T=temperature]`:

    mle    tailr:0.9    mixce:0.8    emo    emo/random    emo/shuffled    mle/T=0.8

Arms that differ only in temperature share one training. Every arm and seed has a folder with its results; a killed
comparison, started again, trains and samples only what is missing.
"""

from __future__ import annotations

import copy
import functools
import json
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
from otloss_llm.loading import COST_SOURCES, load_cost, load_model, load_tokenizer
from otloss_llm.objectives import needs_cost, parse_objective
from otloss_llm.runs import open_run, train_run, write_json

HUMAN = "text itself"


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

    def settings(self) -> dict[str, Any]:
        """What identifies the comparison, without arms and seeds: those may be added later."""
        values = asdict(self)
        return {key: value for key, value in values.items() if key not in ("arms", "seeds", "batch_size")}


@dataclass(frozen=True)
class Data:
    """Packed blocks of the three parts; the cost and the prompts come from `test`."""

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

    Args:
        args: training arguments of each arm; `output_dir` and `seed` are set per run.
        say: receives a line per run.

    Returns:
        `{"settings": ..., "reference": ..., "runs": [...]}`, one entry in runs per arm and seed.

    Raises:
        ValueError: no arm, the same arm twice, prompts longer than a block, or a folder that holds something else.
    """
    _check(comparison, data)
    folder = Path(args.output_dir)
    settings = comparison.settings() | data.fingerprints()
    open_run(folder, settings)
    prompts, references = _prompts(comparison, data, tokenizer)
    start_cost = load_cost("model", load_model(comparison.start))
    reference = _once(folder / "reference.json", lambda: _judge(comparison, references, prompts))
    jobs = [(seed, arm) for seed in comparison.seeds for arm in comparison.arms]
    runs = []
    for number, (seed, arm) in enumerate(jobs, 1):
        say(f"[{number}/{len(jobs)}] {arm.name}, seed {seed}")
        trained = _train(comparison, data, tokenizer, args, arm, seed)
        measured = _measure(comparison, data, tokenizer, Path(trained["folder"]), arm, seed, start_cost, prompts)
        timing = {key: trained[key] for key in ("steps", "seconds_per_step")}
        runs.append({"arm": arm.name, "training": arm.training, "seed": seed} | asdict(arm) | timing | measured)
    return {
        "settings": settings | {"training": args.to_dict()},
        "prompts": prompts,
        "reference": reference | {"samples": references},
        "runs": runs,
    }


def _measure(
    comparison: Comparison,
    data: Data,
    tokenizer: Any,
    home: Path,
    arm: Arm,
    seed: int,
    cost: Cost,
    prompts: list[str],
) -> dict[str, Any]:
    """Scores on the test text, samples and what the judge makes of them; each made once and kept in `home`."""
    model = functools.cache(lambda: load_model(str(home)))
    scores = _once(home / "test.json", lambda: _test(model(), data.test, comparison, cost))
    temperature = f"T{arm.temperature:g}"
    samples = _once(
        home / f"samples-{temperature}.json", lambda: _sample(model(), tokenizer, prompts, comparison, arm, seed)
    )
    judged = _once(home / f"judged-{temperature}.json", lambda: _judge(comparison, samples, prompts))
    return scores | judged | {"samples": samples}


def _check(comparison: Comparison, data: Data) -> None:
    names = [arm.name for arm in comparison.arms]
    if not names or not comparison.seeds:
        raise ValueError(f"there are {len(names)} arms and {len(comparison.seeds)} seeds; give at least one of each.")
    for kind, values in (("arms", names), ("seeds", list(comparison.seeds))):
        if len(set(values)) < len(values):
            raise ValueError(f"the {kind} are {values}, expected each once.")
    if not 0 < comparison.prompt_tokens < data.test.block_size:
        raise ValueError(
            f"prompt_tokens is {comparison.prompt_tokens}, expected 1 to {data.test.block_size - 1}, "
            "since prompts are the beginnings of test blocks."
        )


def _prompts(comparison: Comparison, data: Data, tokenizer: Any) -> tuple[list[str], list[str]]:
    """Beginnings of test blocks spread over the test text, and how the text itself goes on."""
    count = min(comparison.num_prompts, len(data.test))
    chosen = torch.linspace(0, len(data.test) - 1, count).round().long()
    stop = comparison.prompt_tokens + comparison.max_new_tokens
    prompts, references = [], []
    for ids in data.test.ids[chosen].tolist():
        prompts.append(tokenizer.decode(ids[: comparison.prompt_tokens], skip_special_tokens=True))
        references.append(tokenizer.decode(ids[comparison.prompt_tokens : stop], skip_special_tokens=True))
    return prompts, references


def _train(
    comparison: Comparison, data: Data, tokenizer: Any, args: TrainingArguments, arm: Arm, seed: int
) -> dict[str, Any]:
    own = copy.copy(args)
    own.output_dir = str(Path(args.output_dir) / f"{arm.training.replace('/', '-').replace(':', '-')}-seed{seed}")
    own.seed = seed
    model = load_model(comparison.start)
    objective = parse_objective(arm.objective)
    cost: Cost = load_cost(arm.embedding, model, seed=seed)
    settings = {
        "start": comparison.start,
        "objective": repr(objective),
        "embedding": arm.embedding,
    } | data.fingerprints()
    results = train_run(
        model, tokenizer, data.train, args=own, objective=objective, cost=cost, validation=data.validation,
        settings=settings, bar=f"{arm.training} seed {seed}",
    )  # fmt: skip
    return results | {"folder": own.output_dir}


def _test(model: Any, blocks: PackedBlocks, comparison: Comparison, cost: Cost) -> dict[str, Any]:
    scores = perplexity(model, blocks, batch_size=comparison.batch_size, cost=cost, progress=False)
    return {"test_nll": scores.nll, "test_perplexity": scores.perplexity, "transport_cost": scores.transport_cost}


def _sample(model: Any, tokenizer: Any, prompts: list[str], comparison: Comparison, arm: Arm, seed: int) -> list[str]:
    samples = sample_texts(
        model, tokenizer, prompts=prompts, num_samples=comparison.samples_per_prompt,
        max_new_tokens=comparison.max_new_tokens, temperature=arm.temperature, batch_size=comparison.batch_size,
        seed=seed, progress=False,
    )  # fmt: skip
    return [sample.continuation for sample in samples]


def _judge(comparison: Comparison, texts: list[str], prompts: list[str]) -> dict[str, Any]:
    """How varied the texts are, and how well the judge predicts them."""
    scores: dict[str, Any] = {f"distinct_{n}": distinct_n(texts, n) for n in (1, 2, 3)}
    if comparison.judge is None:
        return scores
    judge = load_model(comparison.judge)
    repeats = len(texts) // len(prompts)
    told = [prompt for prompt in prompts for _ in range(repeats)]
    judged = score_texts(
        judge, load_tokenizer(comparison.judge), texts, prompts=told, batch_size=comparison.batch_size, progress=False
    )
    return scores | {"judge_perplexity": judged.perplexity, "judge_bits_per_byte": judged.bits_per_byte}


def _once(path: Path, make: Callable[[], Any]) -> Any:
    """The content of `path`, made and written if it is not there yet."""
    if not path.is_file():
        write_json(path, make())
    return json.loads(path.read_text(encoding="utf-8"))
