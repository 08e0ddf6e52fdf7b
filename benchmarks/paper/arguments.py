"""The options of `python -m benchmarks paper compare`, read by `transformers.HfArgumentParser`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import MISSING, dataclass, field
from typing import Any

import torch
from transformers import TrainingArguments

from benchmarks.paper.evaluation.answer_scores import STYLES
from benchmarks.paper.oracle import Oracle


def _option(help_text: str, default: Any = MISSING, *, choices: Sequence[str] | None = None) -> Any:
    """Return a field with a help; without a default the option is required."""
    metadata = {"help": help_text} | ({} if choices is None else {"choices": choices})
    return field(metadata=metadata) if default is MISSING else field(default=default, metadata=metadata)


@dataclass
class RunArguments(TrainingArguments):
    """The Hugging Face training arguments, with a log and checkpoints that suit short runs."""

    disable_tqdm: bool | None = _option("Leave out the progress bars.", False)
    dataloader_pin_memory: bool = field(
        default_factory=torch.cuda.is_available, metadata={"help": "Pin host memory; default: if there is a GPU."}
    )
    logging_steps: float = _option("Log every so many steps.", 50)
    save_total_limit: int | None = _option("Checkpoints kept in a run folder.", 2)

    def __post_init__(self) -> None:
        if not self.output_dir:
            raise ValueError("output_dir is missing; name the folder of the results with --output_dir.")
        super().__post_init__()


@dataclass
class CompareArguments:
    """From which model and on which text or questions arms are compared, and how they are sampled."""

    model_name_or_path: str | None = _option("Folder (or hub name) of the model that every arm starts from.", None)
    tokenizer_name: str | None = _option("Tokenizer, if it is not the model's own.", None)
    dtype: str = _option("Type of the weights.", "float32")
    train_text: str | None = _option("A .txt, .md or .jsonl file, or a folder of them.", None)
    validation_text: str | None = _option("A file or folder; default: cut off the end of the training text.", None)
    test_text: str | None = _option("A file or folder; default: cut off the end of the training text.", None)
    text_column: str = _option("Column of .jsonl files.", "text")
    train_questions: str | None = _option("Instead of text, a .jsonl file with the columns question and answer.", None)
    validation_questions: str | None = _option("A .jsonl file; default: taken from the training questions.", None)
    test_questions: str | None = _option("A .jsonl file; default: taken from the training questions.", None)
    train_on_question: bool = _option("Train on the tokens of the questions too, not of answers alone.", False)
    block_size: int = _option("Tokens in a training example; longer questions are left out, with a warning.", 256)
    validation_fraction: float = _option("Share cut off for validation; 0 for none.", 0.05)
    test_fraction: float = _option("Share cut off for the test.", 0.05)
    objectives: list[str] = field(default_factory=lambda: ["mle", "emo"], metadata={"help":
        "Arms: objective[/raw | /as-is | /random | /shuffled][/T=temperature], e.g. mle mixce:0.8 emo emo/random dft "
        "gem:0.7 emo+smoothing:0.1; of numbers also [/absolute | /log | /squash], and the controls "
        "number_token/shuffled number_token/equal emo+number/shuffled-values."
    })  # fmt: skip
    seeds: list[int] = field(default_factory=lambda: [0, 1], metadata={"help": "Every arm is trained once per seed."})
    judge: str | None = _option("An independent model that scores the samples.", None)
    num_prompts: int = _option("Test blocks whose beginnings are continued; questions shown with their answers.", 64)
    prompt_tokens: int = _option("Length of those beginnings.", 20)
    samples_per_prompt: int = _option("Continuations of each prompt.", 1)
    max_new_tokens: int = _option("Longest continuation or answer, in tokens.", 100)
    answer_style: str | None = _option(
        "Of answers to questions. Default: the style of the right ones.", None, choices=STYLES
    )
    num_questions: int | None = _option("Ask at most so many test questions, evenly spaced; default: all.", None)
    metrics: list[str] = field(
        default_factory=list,
        metadata={"help": "More about the samples: mauve (features of the judge), rouge (the real text)."},
    )
    model_sizes: list[str] = field(
        default_factory=list, metadata={"help": "Compare from each of these models of one tokenizer."}
    )
    data_fractions: list[float] = field(
        default_factory=list, metadata={"help": "Compare on each of these shares of the training text."}
    )
    sample_batch_size: int = _option("Continuations made, and blocks scored, at a time.", 32)


@dataclass
class OracleArguments:
    """A known source in place of a text: students of it are compared by curves of recall and precision."""

    source: str | None = _option(
        "A model to sample all text from. Smaller students start from one that was trained by maximum likelihood, and "
        "are compared by their divergences from the source over sampling temperatures. Arms may also name an embedding "
        "of the source: emo/source, /all-but-the-top, /centred, /whitened, /input, /context, ... Of the other options "
        "only objectives, seeds and output_dir, and options of the machine, apply.", None,
    )  # fmt: skip
    start: str | None = _option("A model that the students start from, in place of one from random weights.", None)
    student_texts: int | None = _option("Train on so many texts of the source, in epochs; default: new ones.", None)
    student_lora_rank: int | None = _option("Train an adapter of this rank in place of the whole student.", None)
    temperatures: list[float] = field(
        default_factory=lambda: list(Oracle.temperatures), metadata={"help": "Sampling temperatures."}
    )
    text_length: int = _option("Tokens of a text.", Oracle.length)
    num_texts: int = _option("Texts that each divergence is measured on.", Oracle.texts)
    student_layers: int = _option("Layers of the students; their other sizes are the source's.", Oracle.student_layers)
    start_steps: int = _option("Steps of the start, by maximum likelihood.", Oracle.start_steps)
    start_batch_size: int = _option("Texts in a step of the start.", Oracle.start_batch)
    start_learning_rate: float = _option("Learning rate of the start.", Oracle.start_learning_rate)
    student_steps: int = _option("Steps with each objective.", Oracle.steps)
    student_batch_size: int = _option("Texts in a step with each objective.", Oracle.batch)
    student_learning_rate: float = _option("Learning rate with each objective.", Oracle.learning_rate)
