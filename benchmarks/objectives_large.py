"""Which objective helps students of ten million parameters: as in `benchmarks.objectives`, forty times as large.

    python -m benchmarks objectives --scale large      # about half an hour of an H100, a day and more of 2 cores

The source is a Llama of 30 million parameters that was trained on the books and articles of shared/data/text and on
docstrings; its students have 10 million and the same width. Those that are fine-tuned start from a model that was
trained on the word problems of GSM8K and other docstrings, so the text of the source is new to them: new texts in each
step, or 512 texts in epochs. The others start from random weights, by likelihood on text of the source. Each objective
has two learning rates and three seeds, and likelihood also dropout. On a GPU models train in bfloat16 by torch.compile.

Runs are kept in runs/objectives_large and resume; several processes share the work. Measures go to
benchmarks/objectives_large.csv, and the last lines compare each objective at its best rate with likelihood.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.utils import logging

from benchmarks.measure import FOLDER, Settings, say
from benchmarks.objectives import FIELDS, SEEDS, Bench, Experiment, Job, docstring_corpus
from benchmarks.paper.arguments import RunArguments
from benchmarks.paper.folders import replaced
from benchmarks.paper.models import load_tokenizer
from benchmarks.reports import cell, difference_of_runs, markdown
from otloss_llm.data import train_bpe_tokenizer

NAME = "objectives_large"
ARMS, RATES, DROPOUT = ("mle", "emo", "emo/random", "mixce:0.5", "gem:0.9"), (1.0, 0.3), 0.1
TEXTS = ("tinyshakespeare", "warandpeace", "wikitext2-valid")
STUDENTS: dict[str, Any] = {"length": 128, "steps": 300, "batch": 32}
FROM_SCRATCH = {"start_steps": 1500, "start_batch": 64, "start_learning_rate": 2e-3}
# Estimates for a source or start, and for a student with its measures, on an H100 and on 2 cores.
MINUTES = {"cuda": (2.0, 0.2), "cpu": (300.0, 9.0)}


@dataclass(frozen=True)
class LargeExperiment(Experiment):
    """An experiment; all of them have one source."""

    @property
    def source(self) -> str:
        return "source"


EXPERIMENTS = (
    LargeExperiment("enough text", "source", 1500, 64, True, STUDENTS),
    LargeExperiment("512 texts", "source", 1500, 64, True, STUDENTS | {"train_texts": 512}),
    LargeExperiment("students", "source", 1500, 64, False, STUDENTS | FROM_SCRATCH),
)


@dataclass(frozen=True)
class Sizes:
    """The sizes of the models: layers of the source and of its students, which share the width."""

    vocabulary: int = 8192
    width: int = 512
    source_layers: int = 8
    student_layers: int = 2


class LargeBench(Bench):
    """The folder of all runs, with one tokenizer, one source and one start for fine-tuning."""

    name, fields, rates = NAME, (*FIELDS[:-2], "MAUVE", *FIELDS[-2:]), RATES

    def __init__(self, folder: Path, data: Path, *, small: bool = False) -> None:
        super().__init__(folder, data, small=small)
        self.start = str(folder / "start")
        self.sizes = Sizes(300, 16, 2, 1) if small else Sizes()
        self.arms, self.seeds = ARMS[:2] if small else ARMS, SEEDS[:1] if small else SEEDS
        self.rates = RATES[:1] if small else RATES
        self.experiments = EXPERIMENTS[1:] if small else EXPERIMENTS
        self.controls = tuple(
            (replace(one, name=f"{one.name}, dropout {DROPOUT:g}", dropout=DROPOUT), ("mle",))
            for one in self.experiments
        )
        self.more, self.tries = (), ()
        self.row_length = 16 if small else 256

    def arguments(self, folder: Path) -> RunArguments:
        if not torch.cuda.is_available():
            return super().arguments(folder)
        return RunArguments(
            output_dir=str(folder), bf16=True, torch_compile=True, disable_tqdm=True, save_strategy="no", report_to=[],
            seed=0,
        )  # fmt: skip

    def documents(self, text: str) -> list[str]:
        """The text of the source or of the start."""
        if self.small:
            return docstring_corpus("scipy.cluster" if text == "source" else "scipy.odr")
        if text == "source":
            return [one for name in TEXTS for one in super().documents(name)] + docstring_corpus("scipy")
        return super().documents("gsm8k-train") + docstring_corpus("sklearn")

    def train_source(self, experiment: Experiment) -> None:
        """Train the tokenizer, the source, and the start of fine-tuning."""
        home = self.folder / "tokenizer"
        if not home.is_dir():
            documents = [one for text in ("source", "start") for one in self.documents(text)]
            with replaced(home) as partial:
                train_bpe_tokenizer(documents, self.sizes.vocabulary).save_pretrained(partial)
        for name, layers in (("source", self.sizes.source_layers), ("start", self.sizes.student_layers)):
            folder = self.folder / name
            if not (folder / "results.json").is_file():
                tokenizer = load_tokenizer(str(home))
                model = self.llama(tokenizer, layers)
                say(f"{name}: {sum(weight.numel() for weight in model.parameters()) / 1e6:.1f} million parameters")
                self.train_by_likelihood(
                    folder, model, tokenizer, self.documents(name), steps=experiment.steps, batch=experiment.batch,
                    rate=2e-3,
                )  # fmt: skip

    def llama(self, tokenizer: Any, layers: int) -> LlamaForCausalLM:
        torch.manual_seed(0)
        width = self.sizes.width
        return LlamaForCausalLM(LlamaConfig(
            vocab_size=len(tokenizer), hidden_size=width, intermediate_size=8 * width // 3, num_hidden_layers=layers,
            num_attention_heads=max(2, width // 64), max_position_embeddings=256, tie_word_embeddings=True,
            bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id,
        ))  # fmt: skip

    def oracle(self, job: Job) -> Any:
        small = {"length": 8, "start_batch": 4, "batch": 4} if self.small else {}
        return replace(super().oracle(job), student_layers=self.sizes.student_layers, **small)

    def jobs(self) -> Iterator[Job]:
        """Rate by rate and seed by seed, so that an interrupted benchmark has a balanced table."""
        plain = [(one, arm) for arm in self.arms for one in self.experiments]
        for rate in self.rates:
            for seed in self.seeds:
                yield from (Job(one, arm, rate, seed) for one, arm in plain)
                for one, arms in self.controls:
                    start = self.home(one.without_dropout, RATES[0]) / "start-model"
                    if one.pretrained or (start / "results.json").is_file():
                        yield from (Job(one, arm, rate, seed) for arm in arms)

    def runs(self, experiment: Experiment, arm: str) -> dict[int, dict[str, float]]:
        """The measures by seed, at the learning rate of the least divergence on validation text with the first one."""
        runs = {
            rate: {seed: self.measures(Job(experiment, arm, rate, seed)) for seed in self.seeds} for rate in self.rates
        }
        best = min(self.rates, key=lambda rate: runs[rate][self.seeds[0]].get("validation", float("inf")))
        return {seed: one for seed, one in runs[best].items() if "forward T=0.8" in one}

    def table(self) -> str:
        """KL(student || source) minus likelihood's at its recall at T = 0.8, each at its best rate."""
        likelihood = [self.runs(one, "mle") for one in self.experiments]
        arms = {arm: [self.runs(one, arm) for one in self.experiments] for arm in self.arms[1:]}
        arms["mle with dropout"] = [self.runs(one, "mle") for one, _ in self.controls]
        rows = [
            [name, *(cell(difference_of_runs(*pair)) for pair in zip(runs, likelihood, strict=True))]
            for name, runs in arms.items()
        ]
        return markdown(["minus likelihood", *(one.name for one in self.experiments)], rows)


def main(settings: Settings) -> None:
    if settings.data is None and not settings.small:
        return
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) if settings.small else FOLDER.parent / "runs" / NAME
        folder.mkdir(parents=True, exist_ok=True)
        bench = LargeBench(folder, settings.data or folder, small=settings.small)
        missing = sum(bench.lacks(job) for job in bench.jobs())
        models = sum(not (folder / name / "results.json").is_file() for name in ("source", "start"))
        device = "cuda" if torch.cuda.is_available() else "cpu"
        of_models, of_student = MINUTES[device]
        minutes = models * of_models + missing * of_student
        say(
            f"{missing} students are missing: about {minutes:.0f} minutes on one H100"
            if device == "cuda"
            else f"{missing} students are missing: about {minutes / 60:.0f} hours of 2 cores; half an hour on an H100"
        )
        bench.work(settings.output)
        say(bench.table())
