"""The experiments by name: the paper's tables, each with its models and texts, and the reports'.

    python -m benchmarks paper --list              # what there is, and how long it takes
    python -m benchmarks paper corpora             # results in runs/corpora; a killed one is resumed

Models and texts are as in docs/reports/paper_tables.md: 260K is stories260K, the judge a GPT-NeoX of 4 layers and
width 128 that was trained on War and Peace. Reports are written beside the runs, and nothing to benchmarks/*.csv.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import data
import torch

import benchmarks.inputs  # noqa: F401, finds the examples
from benchmarks.paper.arguments import RunArguments
from benchmarks.paper.command import main as compare
from benchmarks.paper.data.blocks import PackedBlocks
from benchmarks.paper.data.text import read_records, read_texts
from benchmarks.paper.models import load_tokenizer
from benchmarks.paper.runs import train_run
from otloss_llm import MLE
from otloss_llm.data import train_bpe_tokenizer

STORIES, NOVEL = "models/stories260K", "text/warandpeace.txt"
CORPORA = {"Tiny Shakespeare": "text/tinyshakespeare.txt", "WikiText-2": "text/wikitext2-valid.txt",
           "GSM8K": "math/gsm8k-train.jsonl", "docstrings": None}  # fmt: skip
TREC = ("description", "entity", "abbreviation", "person", "place", "number")
# Labelled texts: metadata of the task in_context, with files in the folder of the data.
TASKS: dict[str, dict[str, Any]] = {
    "TREC": {"texts": "nlu/trec-train.txt", "labels": {str(i): name for i, name in enumerate(TREC)}},
    "SST-2": {"texts": "nlu/sst2-dev.txt", "train": "nlu/sst2-train.txt", "labels": {"0": "negative", "1": "positive"}},
    "Subj": {"texts": "nlu/subjectivity.zip"},
    "MR": {"texts": "nlu/sentence_polarity.zip"},
    "tweet emotion": {"texts": "nlu/tweet-emotion/val_text.txt", "train": "nlu/tweet-emotion/train_text.txt"},
    "MMLU, development questions": {"texts": "nlu/mmlu-dev"},
}


class Place(NamedTuple):
    """Where an experiment finds its data and leaves its results; `small` only checks that it runs."""

    data: Path | None
    output: Path
    small: bool

    def file(self, name: str) -> str:
        assert self.data is not None
        return str(self.data / name)

    def steps(self, count: int) -> int:
        return 2 if self.small else count


def judge(place: Place) -> str:
    """The folder of the judge: another architecture, another tokenizer, another text."""
    from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

    folder = place.output.parent / f"judge{'-small' * place.small}"
    if not (folder / "results.json").is_file():
        texts = read_texts(place.file(NOVEL))
        tokenizer = train_bpe_tokenizer(texts, 1024)
        torch.manual_seed(0)
        model = GPTNeoXForCausalLM(GPTNeoXConfig(
            vocab_size=len(tokenizer), hidden_size=128, num_hidden_layers=4, num_attention_heads=4,
            intermediate_size=512, max_position_embeddings=512, bos_token_id=0, eos_token_id=0,
        ))  # fmt: skip
        _by_likelihood(model, tokenizer, texts, folder, steps=place.steps(300), batch=8, rate=2e-3)
    return str(folder)


def small_model(place: Place, width: int) -> str:
    """The folder of a Llama of 2 layers with the tokenizer of 260K, trained for 100 steps."""
    from transformers import LlamaConfig, LlamaForCausalLM

    folder = place.output / f"width{width}"
    if not (folder / "results.json").is_file():
        tokenizer = load_tokenizer(place.file(STORIES))
        torch.manual_seed(0)
        model = LlamaForCausalLM(LlamaConfig(
            vocab_size=len(tokenizer), hidden_size=width, intermediate_size=3 * width, num_hidden_layers=2,
            num_attention_heads=4, max_position_embeddings=256, tie_word_embeddings=True,
            bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id,
        ))  # fmt: skip
        texts = read_texts(place.file(NOVEL))
        _by_likelihood(model, tokenizer, texts, folder, steps=place.steps(100), batch=16, rate=3e-3)
    return str(folder)


def _by_likelihood(
    model: Any, tokenizer: Any, texts: list[str], folder: Path, *, steps: int, batch: int, rate: float
) -> None:
    rows = PackedBlocks.from_texts(texts, tokenizer, 128, progress=False)
    args = RunArguments(
        output_dir=str(folder), max_steps=steps, per_device_train_batch_size=batch, learning_rate=rate, use_cpu=True,
        save_strategy="no", seed=0,
    )  # fmt: skip
    train_run(model, tokenizer, rows, args=args, objective=MLE(), cost=None, settings={}, bar=folder.name)


def text_file(place: Place, corpus: str) -> str:
    """The file of a corpus; questions with their answers, and docstrings, are written to one."""
    name = CORPORA[corpus]
    if name is not None and name.endswith(".txt"):
        return place.file(name)
    if name is None:
        from docstring_corpus import docstring_corpus  # type: ignore[import-not-found,unused-ignore]

        texts = [text for package in ("sklearn", "scipy") for text in docstring_corpus(package)]
    else:
        records = (record for _, record in read_records(Path(place.file(name))))
        texts = [f"{record['question']}\n{record['answer']}" for record in records]
    path = place.output / f"{corpus}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")
    return str(path)


def _run(place: Place, name: str, **options: Any) -> None:
    """Compare, with the options that all comparisons share; raises SystemExit if it fails."""
    given = {"output_dir": place.output / name, "seeds": (0, 1), "use_cpu": True} | options
    arguments = [
        part
        for key, value in given.items()
        for part in (f"--{key}", *map(str, value if isinstance(value, list | tuple) else [value]))
    ]
    if code := compare(arguments):
        raise SystemExit(code)


def _trained(place: Place, *, steps: int, prompts: int) -> dict[str, Any]:
    return {
        "max_steps": place.steps(steps), "learning_rate": 1e-3, "per_device_train_batch_size": 16, "block_size": 128,
        "num_prompts": 12 if place.small else prompts, "max_new_tokens": 100, "judge": judge(place),
    }  # fmt: skip


def corpora(place: Place) -> None:
    for corpus in list(CORPORA)[: 1 if place.small else None]:
        _run(
            place, corpus.replace(" ", "-"), model_name_or_path=place.file(STORIES), metrics=("mauve", "rouge"),
            train_text=text_file(place, corpus), objectives=("mle", "tailr:0.001", "mixce:0.8", "emo:clip=none/raw"),
            **_trained(place, steps=150, prompts=200),
        )  # fmt: skip


def known_source(place: Place) -> None:
    arms = ("mle", "mixce:0.8", "tailr:0.001", *(f"emo:clip=none/{rows}" for rows in ("raw", "source", "random")))
    small: dict[str, Any] = {"start_steps": 2, "student_steps": 2, "num_texts": 20, "text_length": 16, "seeds": 0}
    options = small if place.small else {"seeds": (0, 1, 2)}
    _run(place, "oracle", source=place.file(STORIES), objectives=arms, **options)


def sizes(place: Place) -> None:
    models = [small_model(place, width) for width in (32, 64)]
    _run(
        place, "scaling", model_name_or_path=models[0], model_sizes=models, data_fractions=(0.1, 1), metrics="mauve",
        train_text=text_file(place, "Tiny Shakespeare"), objectives=("mle", "emo:clip=none/raw"),
        **_trained(place, steps=60, prompts=100),
    )  # fmt: skip


def in_context(place: Place) -> None:
    """Print the accuracies by lm-evaluation-harness, in %, which needs the package lm_eval."""
    import lm_eval
    from lm_eval.tasks import TaskManager

    model = {"pretrained": place.file(STORIES), "dtype": "float32"}
    for name, files in list(TASKS.items())[: 1 if place.small else None]:
        metadata = {key: place.file(value) if isinstance(value, str) else value for key, value in files.items()}
        metadata |= {"num_texts": 8 if place.small else 200, "demonstrations": 4}
        tasks = TaskManager(include_path=str(Path(__file__).parent / "tasks"), include_defaults=False,
                            metadata=model | metadata)  # fmt: skip
        results = lm_eval.simple_evaluate(
            "hf", model_args=model, tasks=["in_context"], task_manager=tasks, device="cpu", batch_size=8
        )["results"]["in_context"]
        columns = ("prompt", "label", "calibrated", "majority", "chance")
        print(f"{name:28}" + "".join(f"{column:>11} {100 * results[f'{column},none']:5.1f}" for column in columns))


def win_rates(place: Place) -> None:
    from win_rate import main  # type: ignore[import-not-found,unused-ignore]

    main(["--data", str(place.data), *(["--quick"] if place.small else [])])


def demo(place: Place) -> None:
    from emo_demo import main  # type: ignore[import-not-found,unused-ignore]

    main(["--output", str(place.output), *(["--scale", "0.01", "--seeds", "1"] if place.small else [])])


def _benchmark(name: str) -> Callable[[Place], None]:
    """An experiment that is a benchmark of its own, whose rows are in a tracked CSV file."""

    def run(place: Place) -> None:
        from benchmarks.__main__ import main

        place.output.mkdir(parents=True, exist_ok=True)
        chosen = [] if place.data is None else ["--data", str(place.data)]
        main([name, *chosen, "--output", str(place.output), *(["--small"] if place.small else [])])

    return run


class Experiment(NamedTuple):
    """What an experiment makes, its time on one core, the files that it reads, and the function that runs it."""

    what: str
    time: str
    files: tuple[str, ...]
    run: Callable[[Place], None]


EXPERIMENTS = {
    "corpora": Experiment("Table 1: fine-tuning on four corpora", "20 min", (STORIES, NOVEL, "text", "math"), corpora),
    "known_source": Experiment("Table 2, Figure 2: students of a known source", "30 min", (STORIES,), known_source),
    "sizes": Experiment("Figure 1: sizes of the model and of the text", "5 min", (STORIES, NOVEL, "text"), sizes),
    "in_context": Experiment("Table 3: classification in context, by lm_eval", "3 min", (STORIES, "nlu"), in_context),
    "win_rates": Experiment("Appendix C: answers in pairs, judged by a model", "1 min", (STORIES,), win_rates),
    "demo": Experiment("make demo: EMO and likelihood, a known source", "5 min", (), demo),
    "objectives": Experiment("evidence.md: ten objectives, each at its own rate", "3 h", (), _benchmark("objectives")),
    **{
        name: Experiment(f"number_experiments.md: {what}", time, (), _benchmark(name))
        for name, what, time in (
            ("number_regression", "a number of one token", "10 min"), ("ratings", "ratings", "10 min"),
            ("place_values", "three digits", "10 min"), ("mathematics", "exact answers", "1 h"),
        )
    },
}  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns its exit code."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    if given[:1] == ["compare"]:
        return compare(given[1:])
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks paper", description=(__doc__ or "").partition("\n")[0],
        epilog="compare --help has the options of a comparison of your own: from a model on a text, or of a source.",
    )  # fmt: skip
    parser.add_argument("name", nargs="?", choices=[*EXPERIMENTS, "compare"])
    parser.add_argument("--list", action="store_true", help="print the experiments, each with its time on one core")
    parser.add_argument("--data", type=Path, help="folder of the data (docs/reports/data.md)")
    parser.add_argument("--output", type=Path, default=Path("runs"), help="folder of the results (%(default)s)")
    parser.add_argument("--small", action="store_true", help="tiny sizes, to check that it runs")
    options = parser.parse_args(given)
    if options.list or options.name is None:
        print("\n".join(_lines()))
        return 0
    experiment = EXPERIMENTS[options.name]
    try:
        folder = data.folder(*experiment.files, chosen=options.data) if experiment.files else options.data
    except data.MissingError as missing:
        raise SystemExit(f"{options.name}: {missing}") from missing
    experiment.run(Place(folder, options.output / options.name, options.small))
    return 0


def _lines() -> Iterator[str]:
    for name, experiment in EXPERIMENTS.items():
        yield f"{name:18} {experiment.time:>7}  {experiment.what}"
