"""Which objective helps where: ten of them on four experiments with a known source, each at its own learning rate.

    python -m benchmarks objectives      # about 3 hours of one core; it resumes, and two processes share the work

Text is sampled from a source model, so that divergences from it are known (`benchmarks.paper.oracle`). Trainings
are kept in runs/objectives, and their measures in benchmarks/objectives.csv, a row for each experiment, objective,
learning rate and seed. The most useful runs come first, so that an interrupted benchmark has a balanced table:

1. every objective at a learning rate of 1e-3, seed by seed, at all temperatures;
2. at 0.3 and 3 times that rate, one seed at temperature 1;
3. where the best of these for likelihood or EMO is the least or the largest, a rate beyond it, in the same way;
4. where another rate has a lower KL(source || student) on validation text, that rate with all seeds and temperatures,
   and other regularisers: weight decay, dropout and fewer steps;
5. likelihood and EMO on more texts, and with a source that was trained for longer, in the same way;
6. the other seeds at the other rates, at temperature 1;
7. two variants of EMO (`objective_tries`), in the same way.
"""

from __future__ import annotations

import csv
import math
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from filelock import FileLock, Timeout
from transformers import LlamaConfig, LlamaForCausalLM, SchedulerType
from transformers.trainer_utils import SaveStrategy
from transformers.utils import logging

from benchmarks.measure import FOLDER, Settings, hardware, say
from benchmarks.objective_tries import TRIES, add_tries
from benchmarks.paper.arguments import RunArguments
from benchmarks.paper.data.blocks import PackedBlocks
from benchmarks.paper.data.text import read_records, read_texts
from benchmarks.paper.evaluation.divergences import token_divergence
from benchmarks.paper.folders import read_json, replaced, write_json
from benchmarks.paper.measuring import once
from benchmarks.paper.models import load_model, load_tokenizer
from benchmarks.paper.oracle import Oracle, run_oracle
from benchmarks.paper.runs import DivergenceError, train_run
from otloss_llm import MLE

sys.path.append(str(FOLDER.parent / "examples"))
from docstring_corpus import docstring_corpus  # type: ignore[import-not-found,unused-ignore]

NAME, START = "objectives", "models/stories260K"
ARMS = (
    "mle", "emo", "emo/random", "gem:0.7", "gem:0.9", "eaft", "dft", "power:0.5", "mle+smoothing:0.1", "mixce:0.5",
)  # fmt: skip
SEEDS, TEMPERATURES = (0, 1, 2), (1.2, 1.0, 0.9, 0.8, 0.65)
# Flat and sharp objectives reach the recall of likelihood at other temperatures.
MORE_TEMPERATURES = {"gem:0.7": (0.5,), "mle+smoothing:0.1": (0.5,), "power:0.5": (1.5,), "dft": (2.0, 1.5)}
LEARNING_RATE, RATES = 1e-3, (1.0, 0.3, 3.0)
BEYOND, BEYOND_ARMS = {0.3: 0.1, 3.0: 10.0}, ("mle", "emo", "emo/random")  # the rate after the best of RATES
TEXTS = 128  # from the source, for the recall and for validation, and from each student at each temperature
SECONDS = {"whole": 20, "short": 15, "source step": 0.12}  # one core takes them, on the machine of the CSV
FIELDS = (
    "experiment", "arm", "rate", "seed", "validation",
    *(f"{side} T={temperature:g}" for temperature in (2.0, 1.5, *TEMPERATURES, 0.5) for side in ("forward", "reverse")),
    "hardware", "torch",
)  # fmt: skip
FINE_TUNING: dict[str, Any] = {"length": 64, "steps": 200, "batch": 16}
FROM_SCRATCH: dict[str, Any] = {"length": 64, "steps": 200, "batch": 16, "start_steps": 400, "start_batch": 16}


@dataclass(frozen=True)
class Experiment:
    """A source, and students of it.

    Attributes:
        text: what the source is trained on, see `Bench.documents`.
        steps, batch: of that training.
        pretrained: source and students start from stories260K, and the cost of EMO has its rows. Otherwise the source
            is a Llama of 4 layers and width 128, a student one of 2 layers, and the cost has the source's rows.
        students: settings of `Oracle`.
        dropout: of the attention's weights, in the training of pretrained students.
    """

    name: str
    text: str
    steps: int
    batch: int
    pretrained: bool
    students: dict[str, Any]
    dropout: float = 0.0

    @property
    def source(self) -> str:
        return f"source-{self.text}-{self.steps}-{'pretrained' if self.pretrained else 'scratch'}"

    @property
    def without_dropout(self) -> Experiment:
        return replace(self, name=self.name.partition(", dropout")[0], dropout=0.0)


EXPERIMENTS = (
    Experiment("few texts", "docstrings", 600, 16, True, FINE_TUNING | {"train_texts": 256}),
    Experiment("larger model", "warandpeace", 2000, 8, False, FROM_SCRATCH),
    Experiment("LoRA", "docstrings", 600, 16, True, FINE_TUNING | {"lora_rank": 4}),
    Experiment("enough text", "docstrings", 600, 16, True, FINE_TUNING),
)
# More texts and a source that was trained for longer, and their objectives.
MORE = (
    Experiment("few texts, WikiText-2", "wikitext2-valid", 600, 16, True, FINE_TUNING | {"train_texts": 256}),
    Experiment("few texts, GSM8K", "gsm8k-train", 600, 16, True, FINE_TUNING | {"train_texts": 256}),
    Experiment("enough text, WikiText-2", "wikitext2-valid", 600, 16, True, FINE_TUNING),
    Experiment("enough text, GSM8K", "gsm8k-train", 600, 16, True, FINE_TUNING),
    Experiment("larger model, 5,000 steps", "warandpeace", 5000, 8, False, FROM_SCRATCH),
)
# Other regularisers in the experiments where EMO gains, and the objectives that are trained with them.
CONTROLS = tuple(
    (Experiment(f"{name}, {label}", "docstrings", 600, 16, True, FINE_TUNING | students | control), arms)
    for name, students in (("few texts", {"train_texts": 256}), ("LoRA", {"lora_rank": 4}))
    for label, control, arms in (
        ("weight decay 1", {"weight_decay": 1.0}, ("mle",)),
        ("weight decay 3", {"weight_decay": 3.0}, ("mle", "emo")),
        ("50 steps", {"steps": 50}, ("mle", "emo")),
        ("100 steps", {"steps": 100}, ("mle", "emo")),
    )
    if name == "few texts" or "steps" not in control
) + tuple(
    (Experiment(f"few texts, dropout {p:g}", "docstrings", 600, 16, True, EXPERIMENTS[0].students, p), ("mle", "emo"))
    for p in (0.1, 0.3, 0.5)
)


@dataclass(frozen=True)
class Job:
    """A training of one student, measured at all temperatures or, if short, at 1 alone."""

    experiment: Experiment
    arm: str
    rate: float
    seed: int
    short: bool = False

    @property
    def temperatures(self) -> tuple[float, ...]:
        return (1.0,) if self.short else (*TEMPERATURES, *MORE_TEMPERATURES.get(self.arm, ()))

    @property
    def oracle_arm(self) -> str:
        takes_rows = self.arm in ("emo", *TRIES) and not self.experiment.pretrained
        return f"{self.arm}/all-but-the-top" if takes_rows else self.arm


class Bench:
    """The folder of all runs; `small` has sizes that only check that everything runs."""

    name, fields, rates = NAME, FIELDS, (*RATES, *BEYOND.values())

    def __init__(self, folder: Path, data: Path, *, small: bool = False) -> None:
        self.folder, self.start, self.small = folder, str(data / START), small
        self.data, self.row_length, self.texts = data, 128, 20 if small else TEXTS
        self.arms = ARMS[:2] if small else ARMS
        self.seeds = SEEDS[:1] if small else SEEDS
        self.experiments = EXPERIMENTS[:2] if small else EXPERIMENTS
        self.controls = CONTROLS[::10] if small else CONTROLS
        self.more = MORE[:2] if small else MORE
        self.tries = TRIES[:1] if small else TRIES
        add_tries(self.steps(FINE_TUNING["steps"]))

    def steps(self, count: int) -> int:
        return 2 if self.small else count

    def home(self, experiment: Experiment, rate: float) -> Path:
        return self.folder / f"{experiment.name.replace(' ', '-')}-rate{rate:g}"

    def student(self, job: Job) -> Path:
        """The folder that `run_oracle` gives this student."""
        arm = job.oracle_arm.replace("/", "-").replace(":", "-")
        return self.home(job.experiment, job.rate) / f"{arm}-seed{job.seed}"

    def arguments(self, folder: Path) -> RunArguments:
        return RunArguments(
            output_dir=str(folder), use_cpu=True, disable_tqdm=True, save_strategy="no", report_to=[], seed=0
        )

    # ---- sources -----------------------------------------------------------------------------------------------------

    def train_source(self, experiment: Experiment) -> None:
        folder = self.folder / experiment.source
        if (folder / "results.json").is_file():
            return
        say(f"the source {experiment.source}")
        tokenizer = load_tokenizer(self.start)
        model = load_model(self.start) if experiment.pretrained else small_llama(tokenizer)
        self.train_by_likelihood(
            folder, model, tokenizer, self.documents(experiment.text), steps=experiment.steps, batch=experiment.batch,
            rate=1e-3 if experiment.pretrained else 3e-3,
        )  # fmt: skip

    def train_by_likelihood(
        self, folder: Path, model: Any, tokenizer: Any, documents: list[str], *, steps: int, batch: int, rate: float
    ) -> None:
        rows = PackedBlocks.from_texts(documents, tokenizer, self.row_length, progress=False)
        args = self.arguments(folder)
        args.save_strategy, args.save_steps, args.save_total_limit = SaveStrategy.STEPS, 200, 1  # it can be resumed
        args.max_steps, args.per_device_train_batch_size = self.steps(steps), batch
        args.lr_scheduler_type, args.warmup_steps = SchedulerType.COSINE, max(1, args.max_steps // 20)
        args.learning_rate, args.weight_decay, args.adam_beta2 = rate, 0.1, 0.98
        settings = {"blocks": rows.fingerprint}
        train_run(model, tokenizer, rows, args=args, objective=MLE(), cost=None, settings=settings, bar=folder.name)

    def documents(self, text: str) -> list[str]:
        if text == "docstrings":
            return docstring_corpus("scipy.stats" if self.small else "scipy")
        if text == "gsm8k-train":
            records = [record for _, record in read_records(self.data / f"math/{text}.jsonl")]
            return [f"{record['question']}\n{record['answer']}" for record in records]
        return read_texts(self.data / f"text/{text}.txt")

    def start_with_dropout(self, start: str, folder: Path, share: float) -> str:
        """The folder of the start whose attention has dropout."""
        if not (folder / "config.json").is_file():
            model = load_model(start)
            model.config.attention_dropout = share
            with replaced(folder) as partial:
                model.save_pretrained(partial)
                load_tokenizer(start).save_pretrained(partial)
        return str(folder)

    # ---- students ----------------------------------------------------------------------------------------------------

    def oracle(self, job: Job) -> Oracle:
        experiment, students = job.experiment, dict(job.experiment.students)
        students["start"] = self.start_of(experiment, job.rate)
        for name in ("steps", "start_steps"):
            if name in students:
                students[name] = self.steps(students[name])
        return Oracle(
            source=str(self.folder / experiment.source), arms=(job.oracle_arm,), seeds=(job.seed,),
            temperatures=job.temperatures, learning_rate=LEARNING_RATE * job.rate,
            texts=self.texts, text_scores="MAUVE" in self.fields, **students,
        )  # fmt: skip

    def start_of(self, experiment: Experiment, rate: float) -> str | None:
        """The model that students start from; None for one that is trained with the first of them."""
        if experiment.pretrained:
            start, folder = self.start, self.folder / f"start-dropout{experiment.dropout:g}"
        elif rate == RATES[0] and not experiment.dropout:
            return None
        else:
            start = str(self.home(experiment.without_dropout, RATES[0]) / "start-model")
            folder = self.folder / f"{experiment.name.replace(' ', '-')}-start"
        return self.start_with_dropout(start, folder, experiment.dropout) if experiment.dropout else start

    def run(self, job: Job) -> None:
        """Train and measure a student. A training that diverges is kept as failed."""
        home = self.home(job.experiment, job.rate)
        try:
            run_oracle(self.oracle(job), home, self.arguments(home), say=lambda line: None)
        except DivergenceError as error:
            write_json(self.student(job) / "failed.json", {"error": str(error)})
            return
        once(self.student(job) / "validation.json", lambda: self.validation(job))

    def validation(self, job: Job) -> dict[str, float]:
        """KL(source || student) on text of the source that is not the test text, the least over temperatures."""
        texts = np.load(self.home(job.experiment, job.rate) / "texts-ceiling.npy").tolist()
        folders, device = (self.folder / job.experiment.source, self.student(job)), self.arguments(self.folder).device
        source, student = (load_model(str(folder)).to(device) for folder in folders)
        divergences = token_divergence(source, student, texts, q_temperatures=TEMPERATURES)
        return {"forward": min(one.kl for one in divergences)}

    def measures(self, job: Job) -> dict[str, float]:
        """The measures that are kept: "validation" (infinite if the training failed), "forward T=1", ..."""
        home = self.student(job)
        if (home / "failed.json").is_file():
            return {"validation": math.inf}
        if not (home / "validation.json").is_file():
            return {}
        values = {"validation": read_json(home / "validation.json")["forward"]}
        for temperature in (*TEMPERATURES, *MORE_TEMPERATURES.get(job.arm, ())):
            path = home / f"divergence-T{temperature:g}.json"
            if path.is_file():
                point = read_json(path)
                values |= {f"{side} T={temperature:g}": point[side] for side in ("forward", "reverse")}
        if (home / "mauve.json").is_file():
            values["MAUVE"] = read_json(home / "mauve.json")["mauve"]
        return values

    def lacks(self, job: Job) -> bool:
        values = self.measures(job)
        return values.get("validation") != math.inf and not all(
            f"forward T={temperature:g}" in values for temperature in job.temperatures
        )

    # ---- the order of the runs ---------------------------------------------------------------------------------------

    def jobs(self) -> Iterator[Job]:
        """All jobs in their order; jobs of a best rate only once that is known."""
        yield from self.compared(self.experiments, self.arms)
        for seed in self.seeds:
            for experiment, arms in self.controls:
                yield from (Job(experiment, arm, RATES[0], seed) for arm in arms)
        yield from self.compared(self.more, [arm for arm in self.arms if arm in BEYOND_ARMS])
        for seed in self.seeds[1:]:
            for rate in RATES[1:]:
                yield from (Job(e, arm, rate, seed, short=True) for arm in self.arms for e in self.experiments)
        yield from self.compared(self.experiments, self.tries)

    def compared(self, experiments: Sequence[Experiment], arms: Sequence[str]) -> Iterator[Job]:
        """Every objective at every rate with one seed, and at 1e-3 and its best rate with all."""
        cells = [(experiment, arm) for arm in arms for experiment in experiments]
        first, *others = RATES
        for seed in self.seeds:
            yield from (Job(*cell, first, seed) for cell in cells)
        for rate in others:
            yield from (Job(*cell, rate, 0, short=True) for cell in cells)
        for experiment, arm in cells:
            best = self.best_rate(experiment, arm)
            if arm in BEYOND_ARMS and best in BEYOND:
                yield Job(experiment, arm, BEYOND[best], 0, short=True)
        for seed in self.seeds:
            for cell in cells:
                for rates in ((*RATES, *BEYOND.values()), RATES):
                    if (best := self.best_rate(*cell, rates)) not in (None, first):
                        yield Job(*cell, best, seed)

    def best_rate(
        self, experiment: Experiment, arm: str, rates: Sequence[float] = (*RATES, *BEYOND.values())
    ) -> float | None:
        """The rate of the least divergence on validation text with the first seed; None until `RATES` are measured."""
        values = {rate: self.measures(Job(experiment, arm, rate, 0)).get("validation") for rate in rates}
        known = {rate: value for rate, value in values.items() if value is not None}
        return min(known, key=lambda rate: known[rate]) if set(RATES) <= set(known) else None

    def work(self, output: Path | None) -> None:
        """Run what is missing. A process leaves out an experiment that another one is at, and comes back to it."""
        missing = True
        while missing:
            missing = worked = False
            for job in self.jobs():
                if self.lacks(job):
                    missing, worked = True, self.turn(job, output) or worked
            if missing and not worked:
                time.sleep(5)
        self.write(output)

    def turn(self, job: Job, output: Path | None) -> bool:
        """Run a job, unless another process is at its experiment."""
        started = time.perf_counter()
        try:
            with FileLock(self.folder / f"{job.experiment.name}.lock", timeout=0):
                with FileLock(self.folder / f"{job.experiment.source}.lock"):
                    self.train_source(job.experiment)
                self.run(job)
        except Timeout:
            return False
        self.write(output)
        seconds = time.perf_counter() - started
        say(f"{job.experiment.name}, {job.arm}, rate {job.rate:g}, seed {job.seed}: {seconds:.0f} s")
        return True

    def write(self, output: Path | None) -> None:
        """Write objectives.csv: a row for each student that was measured."""
        if output is None:
            return
        rows = []
        for experiment in (*self.experiments, *(experiment for experiment, _ in self.controls), *self.more):
            for arm in (*self.arms, *self.tries):
                for rate in self.rates:
                    for seed in self.seeds:
                        if values := self.measures(Job(experiment, arm, rate, seed)):
                            row = {name: f"{value:.5f}" for name, value in values.items()}
                            rows.append({"experiment": experiment.name, "arm": arm, "rate": rate, "seed": seed} | row)
        machine = {"hardware": hardware(), "torch": torch.__version__}
        with (
            replaced(output / f"{self.name}.csv") as partial,
            partial.open("w", newline="", encoding="utf-8") as stream,
        ):
            writer = csv.DictWriter(stream, self.fields, restval="", lineterminator="\n")
            writer.writeheader()
            writer.writerows(row | machine for row in rows)


def small_llama(tokenizer: Any) -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=128, intermediate_size=344, num_hidden_layers=4, num_attention_heads=4,
        max_position_embeddings=256, tie_word_embeddings=True, bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    ))  # fmt: skip


def main(settings: Settings) -> None:
    if settings.data is None:
        return
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    if settings.small:
        with tempfile.TemporaryDirectory() as folder:
            Bench(Path(folder), settings.data, small=True).work(settings.output)
        return
    bench = Bench(FOLDER.parent / "runs" / NAME, settings.data)
    bench.folder.mkdir(parents=True, exist_ok=True)
    missing = [job for job in bench.jobs() if bench.lacks(job)]
    sources = {job.experiment.source: job.experiment.steps for job in missing}
    steps = sum(count for name, count in sources.items() if not (bench.folder / name / "results.json").is_file())
    whole = sum(not job.short for job in missing)
    seconds = (
        (whole + 0.3 * whole) * SECONDS["whole"]
        + (len(missing) - whole) * SECONDS["short"]
        + steps * SECONDS["source step"]
    )
    say(f"{len(missing)} students are missing, also of other rates: about {seconds / 60:.0f} minutes of one core")
    bench.work(settings.output)
