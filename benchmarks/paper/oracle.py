"""Students of a source that is known exactly, and the frontier of recall and precision that each objective reaches.

Text is sampled from a source model, so that its true distribution is known. The start is a smaller student that has
learnt it by maximum likelihood, or a given model that is to be fine-tuned. Each arm trains that start with its own
objective, on the same rows in the same order for all arms of a seed. Each trained student is then measured at several
sampling temperatures (`benchmarks.paper.evaluation.divergences`, `benchmarks.paper.frontier`).

Texts are rows of one length: the source's beginning of text and what it samples after it, an end of text being a token
like any other. So a source needs no end of text, and divergences are between the distributions over such rows.
"""

from __future__ import annotations

import copy
import functools
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor
from transformers import SchedulerType, TrainingArguments

from benchmarks.paper.arms import named_source, parse_arm
from benchmarks.paper.data.blocks import PackedBlocks
from benchmarks.paper.evaluation.divergences import TokenDivergence, token_divergence
from benchmarks.paper.evaluation.mauve import cluster_divergence, last_hidden_states, mauve
from benchmarks.paper.evaluation.neighbours import neighbour_overlap
from benchmarks.paper.evaluation.overlap import rouge
from benchmarks.paper.folders import full_disk_reported, locked, open_run, replaced
from benchmarks.paper.measuring import once
from benchmarks.paper.models import Lora, add_adapter, load_model, load_tokenizer
from benchmarks.paper.runs import train_run
from otloss_llm.cli.guard import fingerprint
from otloss_llm.costs.embedding import all_but_the_top
from otloss_llm.costs.named import load_cost
from otloss_llm.costs.vocabulary import TokenCost
from otloss_llm.evaluation.perplexity import check_temperature, context_length
from otloss_llm.models.heads import evaluation_mode, find_head
from otloss_llm.objectives import MLE, Objective, Sum, parse_objective

# Embeddings of the source, by the name of the arm that has them: rows from (the source's head, the source, its texts).
Embeddings = Mapping[str, Callable[[Tensor, Any, Tensor], Tensor]]
EMBEDDINGS: Embeddings = {
    "source": lambda head, source, texts: head,
    "all-but-the-top": lambda head, source, texts: all_but_the_top(head),
}


@dataclass(frozen=True)
class OracleArm:
    """An objective and the embedding of its cost: one of the source's, or one by `parse_arm`.

    Attributes:
        name: such as "emo/source".
        objective: "emo", as a function.
        embedding: None for the library's choice, the start's own rows without their leading directions.
    """

    name: str
    objective: Objective
    embedding: str | None

    @property
    def objective_name(self) -> str:
        return self.name.partition("/")[0]

    @classmethod
    def parse(cls, text: str, embeddings: Embeddings = EMBEDDINGS) -> OracleArm:
        """Read `objective[/embedding]`.

        Raises:
            ValueError: an unknown objective or embedding, an embedding for an objective without a cost, a temperature.
        """
        first, *variants = text.split("/")
        names = [part for part in variants if part in embeddings]
        arm = parse_arm("/".join([first, *(part for part in variants if part not in names)]))
        objective = parse_objective(arm.objective)
        if arm.temperature != 1.0:
            raise ValueError(f"arm {text!r} has a temperature; arms are measured at all temperatures, leave it out.")
        if arm.cost_kind != "embedding":
            raise ValueError(f"arm {text!r} has a cost of numbers, expected one of an embedding.")
        if names and (len(variants) > 1 or not Sum.of(objective).needs_cost):
            raise ValueError(f"arm {text!r} has two embeddings, or an embedding without a cost.")
        return cls(text, objective, names[0] if names else arm.embedding)


@dataclass(frozen=True)
class Oracle:
    """What an experiment with a known source is made of.

    Attributes:
        source: folder or name of the model that the text is sampled from.
        start: a model that the students start from, with the source's tokenizer; None makes one from random weights.
        train_texts: different texts of the source that students are trained on, in epochs; None for new ones in
            each step.
        lora_rank: trains an adapter of this rank in place of the whole student; None for the latter.
        arms: objective, perhaps with a cost: "mle", "emo" (the start's own rows without their leading directions),
            "emo/raw" (all of them), "emo/random"; of the source's rows "emo/all-but-the-top" (without their leading
            directions) and "emo/source" (all of them).
        seeds: of the order of rows; every arm has each of them.
        temperatures: of sampling from the students.
        length: tokens of a text, its beginning included.
        student_layers: layers of the student, whose other sizes are the source's.
        start_steps, start_batch, start_learning_rate: of the start, by maximum likelihood from random weights.
        steps, batch, learning_rate: of the training with the objective.
        texts: of the source for the recall, and of each student at each temperature for the precision.
        text_scores: MAUVE, overlap and ROUGE at temperature 1, beside the divergences.
        weight_decay: of the training with the objective.
    """

    source: str
    arms: tuple[str, ...] = ("mle", "mixce:0.8", "emo", "emo/raw", "emo/random")
    seeds: tuple[int, ...] = (0, 1, 2)
    temperatures: tuple[float, ...] = (1.2, 1.1, 1.0, 0.9, 0.8, 0.7, 0.6)
    length: int = 128
    student_layers: int = 2
    start_steps: int = 400
    start_batch: int = 32
    start_learning_rate: float = 5e-3
    steps: int = 250
    batch: int = 32
    learning_rate: float = 1e-3
    texts: int = 640
    start: str | None = None
    train_texts: int | None = None
    lora_rank: int | None = None
    text_scores: bool = True
    weight_decay: float = 0.1

    def __post_init__(self) -> None:
        smallest = dict.fromkeys(("student_layers", "start_steps", "start_batch", "steps", "batch"), 1)
        for name, limit in (smallest | {"length": 2, "texts": 20, "train_texts": 1, "lora_rank": 1}).items():
            if getattr(self, name) is not None and getattr(self, name) < limit:
                raise ValueError(f"{name} is {getattr(self, name)}, expected {limit} or more.")
        if not (self.arms and self.seeds and self.temperatures):
            raise ValueError("arms, seeds or temperatures is empty, expected at least one of each.")
        for name, values in (("arms", self.arms), ("seeds", self.seeds), ("temperatures", self.temperatures)):
            if len(set(values)) < len(values):
                raise ValueError(f"{name} are {list(values)}, expected each once.")
        for temperature in self.temperatures:
            check_temperature(temperature)


def sample_rows(
    model: Any,
    prompts: Int[Tensor, "count start"],
    length: int,
    *,
    temperature: float = 1.0,
    seed: int = 0,
    batch_size: int = 1024,
) -> Int[Tensor, "count length"]:
    """Return the prompts, each followed by tokens that are sampled from the model's whole distribution."""
    device = next(model.parameters()).device
    generator = torch.Generator(device).manual_seed(seed)
    rows = []
    with evaluation_mode(model):
        for part in prompts.split(batch_size):
            ids, past = part.to(device), None
            for _ in range(length - prompts.shape[1]):
                out = model(input_ids=ids if past is None else ids[:, -1:], past_key_values=past, use_cache=True)
                past = getattr(out, "past_key_values", None)
                shares = torch.softmax(out.logits[:, -1].float() / temperature, -1)
                ids = torch.cat([ids, torch.multinomial(shares, 1, generator=generator)], 1)
            rows.append(ids.cpu())
    return torch.cat(rows)


def run_oracle(
    oracle: Oracle,
    folder: Path,
    args: TrainingArguments,
    *,
    embeddings: Embeddings = EMBEDDINGS,
    say: Callable[[str], None] = lambda line: print(line, file=sys.stderr, flush=True),
) -> dict[str, Any]:
    """Train and measure every arm and seed in folders below `folder`; what is there already is not made again.

    Args:
        args: of all trainings but for their folder, steps, batch, learning rate and seed, which are the oracle's, and
            the schedule: cosine after a twentieth of warm-up, beta2 0.98.
        embeddings: those that arms may name beside the start's own.
        say: receives a line per student.

    Returns:
        `{"settings": ..., "mauve_ceiling": MAUVE of two samples of the source, "runs": [...]}`; a run has the arm, the
        seed, the fields of `Frontier`, "entropy", "cross_entropy" and "reverse_cross_entropy" at each temperature. At
        temperature 1 (if measured there) it has, with features of the source, "mauve", "neighbour_precision",
        "neighbour_recall" and "cluster_js", whose values for two samples of the source are "overlap_ceiling", and
        "rouge_1" and "rouge_l" of its continuations of the source's texts, whose own are "rouge_ceiling". Without
        `oracle.text_scores` none of these is there.

    Raises:
        ValueError: an unknown arm, texts longer than the source's context, a source without a beginning of text, a
            start with another tokenizer, or a folder that holds another experiment.
    """
    source, tokenizer = load_model(oracle.source).to(args.device), load_tokenizer(oracle.source)
    if oracle.start is not None:
        _check_start(oracle.start, source, tokenizer)
    start_id = tokenizer.bos_token_id if tokenizer.bos_token_id is not None else tokenizer.eos_token_id
    context = context_length(source)
    if start_id is None:
        raise ValueError(
            f"the tokenizer of {oracle.source} has neither BOS nor EOS to begin a text with; set one first."
        )
    if context is not None and oracle.length > context:
        raise ValueError(f"length is {oracle.length}, more than the source's context of {context} tokens; lower it.")
    arms = [OracleArm.parse(text, embeddings) for text in oracle.arms]
    later_added = ("arms", "seeds", "temperatures", "text_scores")
    kept = {key: value for key, value in asdict(oracle).items() if key not in later_added}
    with locked(folder), full_disk_reported(folder):
        open_run(folder, kept | {"source_fingerprint": fingerprint(source.named_parameters())})
        return _run(oracle, folder, args, arms, embeddings, source, tokenizer, start_id, say)


def _run(
    oracle: Oracle, folder: Path, args: TrainingArguments, arms: Sequence[OracleArm], embeddings: Embeddings,
    source: Any, tokenizer: Any, start_id: int, say: Callable[[str], None],
) -> dict[str, Any]:  # fmt: skip
    """Return the texts of the source, the start, the students and their measurements."""
    counts = {
        "start": oracle.start_steps * oracle.start_batch if oracle.start is None else 0,
        "train": oracle.steps * oracle.batch if oracle.train_texts is None else oracle.train_texts,
        "test": oracle.texts,
        "ceiling": oracle.texts,  # a second sample of the source: the best MAUVE that a model can have
    }
    texts: dict[str, Tensor] = {}
    for seed, (part, count) in enumerate(counts.items()):
        if count:
            say(f"texts of the source: {count} for {part}")
            texts[part] = _texts(folder, part, source, count, oracle.length, start_id, seed=seed)
    if oracle.start is None:
        say("start: a student by maximum likelihood")
        own = _arguments(
            args, folder / "start-model", oracle.start_steps, oracle.start_batch, oracle.start_learning_rate, 0
        )
        train_run(
            _student(source, oracle.student_layers), tokenizer, PackedBlocks(texts["start"]), args=own,
            objective=MLE(), cost=None, settings={"rows": "start"}, bar="start",
        )  # fmt: skip
    runs = []
    jobs = [(seed, arm) for seed in oracle.seeds for arm in arms]
    for number, (seed, arm) in enumerate(jobs, 1):
        say(f"[{number}/{len(jobs)}] {arm.name}, seed {seed}")
        home = folder / f"{arm.name.replace('/', '-').replace(':', '-')}-seed{seed}"
        own = _arguments(args, home, oracle.steps, oracle.batch, oracle.learning_rate, seed)
        own.weight_decay = oracle.weight_decay
        _train(oracle, folder, own, arm, embeddings, texts["train"], source, tokenizer)
        runs.append({"arm": arm.name, "seed": seed} | _measure(oracle, home, source, tokenizer, texts["test"], seed))

    @functools.cache
    def features() -> tuple[np.ndarray, np.ndarray]:
        return _features(source, texts["test"]), _features(source, texts["ceiling"])

    if not oracle.text_scores:
        return {"settings": asdict(oracle), "runs": runs}
    ceiling = once(folder / "mauve-ceiling.json", lambda: _mauve(*features()))
    overlap = once(folder / "overlap-ceiling.json", lambda: _overlap(*features()))
    rouge_ceiling = once(folder / "rouge-ceiling.json", lambda: _rouge(source, tokenizer, texts["test"], seed=0))
    return {
        "settings": asdict(oracle), "mauve_ceiling": ceiling["mauve"], "overlap_ceiling": overlap,
        "rouge_ceiling": rouge_ceiling, "runs": runs,
    }  # fmt: skip


def _arguments(
    args: TrainingArguments, folder: Path, steps: int, batch: int, learning_rate: float, seed: int
) -> TrainingArguments:
    own = copy.copy(args)
    own.output_dir, own.max_steps, own.seed = str(folder), steps, seed
    own.per_device_train_batch_size, own.learning_rate = batch, learning_rate
    own.lr_scheduler_type, own.warmup_steps = SchedulerType.COSINE, max(1, steps // 20)
    own.weight_decay, own.adam_beta2 = 0.1, 0.98
    return own


def _texts(folder: Path, part: str, source: Any, count: int, length: int, start_id: int, *, seed: int) -> Tensor:
    """Return rows sampled from the source, kept in the folder."""
    path = folder / f"texts-{part}.npy"
    if not path.is_file():
        rows = sample_rows(source, torch.full((count, 1), start_id), length, seed=seed)
        with replaced(path) as partial, partial.open("wb") as stream:
            np.save(stream, rows.to(torch.int32).numpy())
    return torch.from_numpy(np.load(path)).long()


def _student(source: Any, layers: int) -> Any:
    """Return a model like the source, of fewer layers, with weights drawn anew."""
    from transformers import AutoModelForCausalLM

    config = copy.deepcopy(source.config)
    config.num_hidden_layers = layers
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config).float()


def _check_start(start: str, source: Any, tokenizer: Any) -> None:
    model = load_model(start)
    here, there = (find_head(one).weight.shape[0] for one in (model, source))
    if here != there:
        raise ValueError(
            f"the start {start} has a vocabulary of {here} tokens, the source one of {there}; expected one with the "
            "source's tokenizer."
        )
    if load_tokenizer(start).get_vocab() != tokenizer.get_vocab():
        raise ValueError(f"the start {start} has another tokenizer than the source; expected the same one.")


def _train(
    oracle: Oracle, folder: Path, args: TrainingArguments, arm: OracleArm, embeddings: Embeddings, rows: Tensor,
    source: Any, tokenizer: Any,
) -> None:  # fmt: skip
    start = oracle.start or str(folder / "start-model")
    model = load_model(start)
    objective, embedding = parse_objective(arm.objective_name), named_source(arm.embedding)
    cost: TokenCost | None = None
    needs_cost = Sum.of(objective).needs_cost
    if needs_cost and arm.embedding is not None and arm.embedding in embeddings:
        path = folder / f"embedding-{arm.embedding}.npy"
        if not path.is_file():
            head = find_head(source).weight.detach().float()
            np.save(path, embeddings[arm.embedding](head, source, rows).cpu().numpy())
        cost = load_cost(str(path), model, seed=args.seed)
    elif needs_cost:
        cost = load_cost(embedding, model, seed=args.seed)
    settings: dict[str, Any] = {"objective": repr(objective), "embedding": embedding}
    if oracle.lora_rank is not None:
        lora = Lora(oracle.lora_rank, 2.0 * oracle.lora_rank)
        settings["lora"] = asdict(lora)
        model = add_adapter(model, lora, base=start, seed=args.seed)
    train_run(
        model, tokenizer, PackedBlocks(rows), args=args, objective=objective, cost=cost, settings=settings,
        bar=Path(str(args.output_dir)).name,
    )  # fmt: skip


def _measure(oracle: Oracle, own: Path, source: Any, tokenizer: Any, test: Tensor, seed: int) -> dict[str, Any]:
    """Return the frontier, MAUVE, overlap and ROUGE of the student in `own`; each is measured once and kept there."""

    @functools.cache
    def student() -> Any:
        return load_model(str(own)).to(source.device)

    @functools.cache
    def draw(temperature: float) -> Tensor:
        return sample_rows(student(), test[:, :1], oracle.length, temperature=temperature, seed=1000 + seed)

    @functools.cache
    def features() -> tuple[np.ndarray, np.ndarray]:
        return _features(source, test), _features(source, draw(1.0))

    missing = [t for t in oracle.temperatures if not _divergence_file(own, t).is_file()]

    @functools.cache
    def recalls() -> dict[float, TokenDivergence]:  # one pass over the texts for all temperatures
        divergences = token_divergence(source, student(), test.tolist(), q_temperatures=missing)
        return dict(zip(missing, divergences, strict=True))

    def at(temperature: float) -> dict[str, float]:
        recall = recalls()[temperature]
        (precision,) = token_divergence(student(), source, draw(temperature).tolist(), p_temperature=temperature)
        return {
            "forward": recall.kl, "forward_error": recall.standard_error, "reverse": precision.kl,
            "reverse_error": precision.standard_error, "cross_entropy": recall.cross_entropy,
            "reverse_cross_entropy": precision.cross_entropy, "entropy": precision.entropy,
        }  # fmt: skip

    points = [once(_divergence_file(own, t), functools.partial(at, t)) for t in oracle.temperatures]
    measured: dict[str, Any] = {name: [point[name] for point in points] for name in points[0]}
    measured["temperatures"] = list(oracle.temperatures)
    if oracle.text_scores and 1.0 in oracle.temperatures:
        measured |= once(own / "mauve.json", lambda: _mauve(*features()))
        measured |= once(own / "overlap.json", lambda: _overlap(*features()))
        measured |= once(own / "rouge.json", lambda: _rouge(student(), tokenizer, test, seed=1000 + seed))
    return measured


def _divergence_file(own: Path, temperature: float) -> Path:
    return own / f"divergence-T{temperature:g}.json"


def _features(source: Any, texts: Tensor) -> np.ndarray:
    """Return the source's last hidden state of each row."""
    return last_hidden_states(source, texts.tolist())


def _mauve(features: np.ndarray, others: np.ndarray) -> dict[str, float]:
    """Return MAUVE, and its spread over k-means seeds."""
    score = mauve(features, others)
    return {"mauve": score.mean, "mauve_spread": score.std}


def _overlap(features: np.ndarray, others: np.ndarray) -> dict[str, float]:
    """Return precision and recall of the others from nearest neighbours, and the divergence between clusters."""
    near, clusters = neighbour_overlap(features, others), cluster_divergence(features, others)
    return {
        "neighbour_precision": near.precision, "neighbour_recall": near.recall, "cluster_js": clusters.js,
        "cluster_forward": clusters.forward, "cluster_reverse": clusters.reverse,
    }  # fmt: skip


def _rouge(model: Any, tokenizer: Any, texts: Tensor, *, seed: int) -> dict[str, float]:
    """Return ROUGE of the continuations of the texts' beginnings, a sixth of each, against what follows there."""
    prefix = max(1, texts.shape[1] // 6)
    continued = sample_rows(model, texts[:, :prefix], texts.shape[1], seed=seed)
    written, expected = (
        tokenizer.batch_decode(rows[:, prefix:], skip_special_tokens=True) for rows in (continued, texts)
    )
    return dict(zip(("rouge_1", "rouge_l"), rouge(written, expected), strict=True))
