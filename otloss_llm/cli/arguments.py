"""Command-line arguments, read by `transformers.HfArgumentParser` beside `TrainingArguments`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import MISSING, dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import TrainingArguments

from otloss.losses.number_line import SCALINGS
from otloss_llm.evaluation.answer_scores import STYLES
from otloss_llm.evaluation.in_context import RETRIEVERS, SCORINGS, TEMPLATE
from otloss_llm.losses.positions import IMPLEMENTATIONS
from otloss_llm.objectives.names import EXPECTED


def _option(help_text: str, default: Any = MISSING, *, choices: Sequence[str] | None = None) -> Any:
    """Return a field with a help; without a default the option is required."""
    metadata = {"help": help_text} | ({} if choices is None else {"choices": choices})
    return field(metadata=metadata) if default is MISSING else field(default=default, metadata=metadata)


_MODEL = "Folder (or hub name) of the model to start from: a causal one, or (for questions) an encoder-decoder."


@dataclass
class ModelArguments:
    """Which model."""

    _argument_group_name = "model"
    model_name_or_path: str = _option(_MODEL)
    tokenizer_name: str | None = _option("Tokenizer, if it is not the model's own.", None)
    dtype: str | None = _option(
        "Type of the weights: float32, bfloat16, float16, or auto (as stored). Default: float32 in training, where "
        "small updates would be lost to rounding (--bf16 still computes in bfloat16), else auto.",
        None,
        choices=["auto", "float32", "bfloat16", "float16"],
    )


@dataclass
class UsedModelArguments(ModelArguments):
    """Which model, and where it runs."""

    use_cpu: bool = _option("Run on the CPU, though there is a GPU; as for train.", False)

    @property
    def device(self) -> str:
        return "cuda" if torch.cuda.is_available() and not self.use_cpu else "cpu"


@dataclass
class LoraArguments:
    """An adapter instead of the whole model."""

    _argument_group_name = "adapter"
    lora_r: int | None = _option(
        "Train a LoRA adapter of this rank (by PEFT) and freeze the model. The run folder then holds the adapter, "
        "which generate and evaluate load together with the model it belongs to.",
        None,
    )
    lora_alpha: float | None = _option("The update is scaled by lora_alpha / lora_r. Default: 2 lora_r.", None)
    lora_dropout: float | None = _option("Dropout before the adapter. Default: 0.", None)
    lora_target_modules: list[str] | None = field(
        default=None, metadata={"help": "Layers with an adapter, as q_proj v_proj. Default: all linear but the head."}
    )


@dataclass
class TextArguments:
    """Which text, or which questions, and how they are cut."""

    _argument_group_name = "data"
    train_text: str | None = _option("A .txt, .md or .jsonl file, or a folder of them.", None)
    dataset_name: str | None = _option(
        "Instead of text, a dataset for the library datasets: a name of the hub, a folder (save_to_disk, or files), or "
        "a file (.json, .jsonl, .csv, .parquet). Columns: text, prompt and completion, question and answer, or "
        "messages. Its splits validation and test are used if it has them.",
        None,
    )
    dataset_config_name: str | None = _option("Configuration of that dataset.", None)
    train_questions: str | None = _option("Instead of text, a .jsonl file with the columns question and answer.", None)
    validation_questions: str | None = _option(
        "Likewise; default: taken from the training questions, evenly spaced.", None
    )
    train_on_question: bool = _option("Train on the tokens of the questions too, not on those of answers alone.", False)
    validation_text: str | None = _option("Likewise; default: cut off the end of the training text.", None)
    text_column: str = _option("Column of .jsonl files, and of --dataset_name.", "text")
    block_size: int = _option("Tokens in a training example; longer questions are left out, with a warning.", 256)
    validation_fraction: float = _option("Share cut off for validation; 0 for none.", 0.05)


@dataclass
class ObjectiveArguments:
    """What is minimised."""

    _argument_group_name = "objective and cost"
    objective: str = _option(
        f"{EXPECTED}. The ratio of emo is clipped at 3 (emo:clip=none: as published); expected_value is of the digits "
        "0 to 9; terms are added as in gem:0.7+z_loss:1e-4.",
        "emo",
    )
    number_scaling: str = _option(
        "Distance of numbers: symlog (that of digits, logarithmic beyond), absolute, log or squash.",
        "symlog",
        choices=SCALINGS,
    )
    cost_embedding: str | None = _option(
        "Embedding of the cost: all-but-the-top (the own head without its leading directions), raw (all of it), "
        "as-is (the same, near-duplicate rows kept), random, shuffled, a .npy file, or a model. Default: "
        "all-but-the-top.",
        None,
    )
    impl: str = _option("Kernel of the loss.", "auto", choices=IMPLEMENTATIONS)
    chunk_size: int | None = _option("Tokens per chunk of the kernel.", None)


_POSITIVE = (
    "per_device_train_batch_size", "per_device_eval_batch_size", "gradient_accumulation_steps", "save_steps",
    "logging_steps",
)  # fmt: skip


@dataclass
class ObjectiveTrainingArguments(TrainingArguments):
    """The Hugging Face training arguments, with an output folder that must be named and progress bars."""

    _argument_group_name = "training"
    disable_tqdm: bool | None = _option("Leave out the progress bars.", False)
    dataloader_pin_memory: bool = field(
        default_factory=torch.cuda.is_available, metadata={"help": "Pin host memory; default: if there is a GPU."}
    )
    logging_steps: float = _option("Log every so many steps.", 50)
    save_total_limit: int | None = _option("Checkpoints kept in a run folder.", 2)

    def __post_init__(self) -> None:
        if not self.output_dir:
            raise ValueError("output_dir is missing; name the folder of this run with --output_dir.")
        if self.resume_from_checkpoint:
            raise ValueError(
                f"resume_from_checkpoint is {self.resume_from_checkpoint!r}, but runs resume automatically: give the "
                "same command and --output_dir again. To start from other weights, name them as the model."
            )
        if self.max_steps == 0 or self.max_steps < -1 or (self.max_steps < 0 and self.num_train_epochs <= 0):
            raise ValueError(
                f"max_steps is {self.max_steps} and num_train_epochs {self.num_train_epochs}, so nothing would be "
                "trained; give a positive number of steps, or leave max_steps out and give epochs above 0."
            )
        for name in _POSITIVE:
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} is {getattr(self, name)}, expected a number above 0.")
        super().__post_init__()


@dataclass
class GenerateArguments:
    """How text is sampled."""

    _argument_group_name = "sampling"
    prompt: list[str] = field(
        default_factory=list, metadata={"help": "Prompts; without any, texts start from their beginning."}
    )
    prompts_file: str | None = _option("A UTF-8 file with one prompt per line (.jsonl: per record).", None)
    num_samples: int = _option("Continuations of each prompt.", 1)
    max_new_tokens: int = _option("Longest continuation, in tokens.", 100)
    temperature: float = _option("1 samples the model's distribution; 0 is greedy.", 1.0)
    top_p: float = _option("Nucleus; 1 leaves the distribution whole.", 1.0)
    top_k: int = _option("0 leaves the distribution whole.", 0)
    batch_size: int = _option("Continuations made at a time.", 16)
    seed: int = _option("One seed and batch size give one result.", 0)
    output_file: str | None = _option("Write JSON lines here instead of text to stdout.", None)

    def __post_init__(self) -> None:
        _check_new_files(self.output_file)


@dataclass
class EvaluateArguments:
    """What is scored: text, answers to questions, labels of texts, or several of them."""

    _argument_group_name = "evaluation"
    text: str | None = _option("A .txt, .md or .jsonl file, or a folder of them.", None)
    text_column: str = _option("Column of .jsonl files.", "text")
    block_size: int = _option("Tokens in a block of text; its first has no context.", 256)
    batch_size: int = _option("Blocks scored, or questions answered, at a time.", 8)
    cost_embedding: str | None = _option("As for train, default all-but-the-top; compare models under one cost.", None)
    questions: str | None = _option(
        "A .jsonl file of questions to answer, greedily: columns question and answer.", None
    )
    answer_style: str | None = _option(
        "gsm8k, mathematics or last (number). Default: gsm8k if all answers have ####, mathematics if none has.",
        None,
        choices=STYLES,
    )
    decode: str = _option(
        "greedy, or the mean, the median or a quantile (0.9) of the distribution over numbers that begin the answer.",
        "greedy",
    )
    max_new_tokens: int = _option("Longest answer, in tokens.", 100)
    num_questions: int | None = _option("Answer, or label, at most so many, evenly spaced; default: all.", None)
    in_context: str | None = _option(
        "Labelled texts to classify: .jsonl with text and label (or question, choices, answer), .txt with a label and "
        "a text on each line, *_text.txt beside *_labels.txt, .zip with a file for each label, .csv or a folder of "
        "them (MMLU).",
        None,
    )
    in_context_train: str | None = _option(
        "Texts that demonstrations are taken from. Default: those of --in_context that --num_questions leaves.",
        None,
    )
    demonstrations: int = _option("Labelled texts shown before each text, the most similar last.", 8)
    retriever: str = _option(
        "How they are found; none shows the same ones before each text.", "tfidf", choices=RETRIEVERS
    )
    scoring: str = _option(
        "A label is given the mean nll of the whole prompt, that of its own tokens, or the latter minus that after a "
        "text without content.",
        "prompt",
        choices=SCORINGS,
    )
    labels: list[str] = field(
        default_factory=list,
        metadata={"help": "The candidates, as they are in the file, or with names: 0=negative 1=positive. Default: "
                  "the labels of the demonstrations' file."},
    )  # fmt: skip
    template: str = _option("Of text and label in a prompt; \\n is a line end.", TEMPLATE.replace("\n", "\\n"))
    predictions_file: str | None = _option("Write the answers, or labels, here, as JSON lines.", None)
    output_file: str | None = _option("Write the JSON here too.", None)

    def __post_init__(self) -> None:
        if not (self.text or self.questions or self.in_context):
            raise ValueError("there is nothing to evaluate on; give --text, --questions or --in_context.")
        if self.questions and self.in_context:
            raise ValueError("--questions and --in_context were both given; evaluate them one after the other.")
        _check_new_files(self.output_file, self.predictions_file)


def _check_new_files(*paths: str | None) -> None:
    """Raise ValueError unless the files can be written without losing anything; checked before the work."""
    files = [path for path in paths if path is not None]
    for path in files:
        if Path(path).exists():
            raise ValueError(f"{path} exists already; name another output file, or delete that one.")
        if not Path(path).parent.is_dir():
            raise ValueError(f"there is no folder {str(Path(path).parent)!r} to write {path} in; make it first.")
    if len(set(files)) < len(files):
        raise ValueError(f"{files[0]} is named for two outputs; name two files.")
