"""Command-line arguments, read by `transformers.HfArgumentParser` beside `TrainingArguments`."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from transformers import TrainingArguments

from otloss.extending import SCALINGS
from otloss_llm.evaluation.numbers import STYLES
from otloss_llm.losses.positions import IMPLEMENTATIONS

_POSITIVE = (
    "per_device_train_batch_size", "per_device_eval_batch_size", "gradient_accumulation_steps", "save_steps",
    "logging_steps",
)  # fmt: skip


@dataclass
class ModelArguments:
    """Which model."""

    model_name_or_path: str = field(metadata={"help": "Folder (or hub name) of a causal language model to start from."})
    tokenizer_name: str | None = field(default=None, metadata={"help": "Tokenizer, if it is not the model's own."})
    dtype: str | None = field(
        default=None,
        metadata={
            "help": "Type of the weights: float32, bfloat16, float16, or auto (as stored). Default: float32 in "
            "training, where small steps are lost in less (--bf16 computes in it all the same), else auto.",
            "choices": ["auto", "float32", "bfloat16", "float16"],
        },
    )


@dataclass
class LoraArguments:
    """An adapter in place of the whole model."""

    lora_r: int | None = field(
        default=None,
        metadata={
            "help": "Train a LoRA adapter of this rank (by PEFT) and freeze the model. The run folder then holds the "
            "adapter, which generate and evaluate load together with the model it belongs to."
        },
    )
    lora_alpha: float | None = field(
        default=None, metadata={"help": "The update is scaled by lora_alpha / lora_r. Default: 2 lora_r."}
    )
    lora_dropout: float | None = field(default=None, metadata={"help": "Dropout before the adapter. Default: 0."})
    lora_target_modules: list[str] | None = field(
        default=None, metadata={"help": "Layers with an adapter, as q_proj v_proj. Default: all linear but the head."}
    )


@dataclass
class TextArguments:
    """Which text, or which questions, and how they are cut."""

    train_text: str | None = field(
        default=None, metadata={"help": "A .txt, .md or .jsonl file, a folder of them, or a datasets name."}
    )
    train_questions: str | None = field(
        default=None, metadata={"help": "In place of text, a .jsonl file with the columns question and answer."}
    )
    validation_questions: str | None = field(
        default=None, metadata={"help": "Likewise; default: taken from the training questions, evenly spaced."}
    )
    train_on_question: bool = field(
        default=False, metadata={"help": "Train on the tokens of the questions too, not on those of answers alone."}
    )
    validation_text: str | None = field(
        default=None, metadata={"help": "Likewise; default: cut off the end of the training text."}
    )
    text_column: str = field(default="text", metadata={"help": "Column of .jsonl files and datasets."})
    block_size: int = field(
        default=256, metadata={"help": "Tokens in a training example; longer questions are left out, with a warning."}
    )
    validation_fraction: float = field(default=0.05, metadata={"help": "Share cut off for validation; 0 for none."})


@dataclass
class CompareTextArguments(TextArguments):
    """The same, with a test."""

    test_text: str | None = field(
        default=None, metadata={"help": "Likewise; default: cut off the end of the training text."}
    )
    test_questions: str | None = field(
        default=None, metadata={"help": "Likewise; default: taken from the training questions, evenly spaced."}
    )
    test_fraction: float = field(default=0.05, metadata={"help": "Share cut off for the test."})


@dataclass
class ObjectiveArguments:
    """What is minimised."""

    objective: str = field(
        default="emo",
        metadata={
            "help": "mle, tailr:GAMMA, mixce:GAMMA, emo, emo:clip=3, emo:transport, emo:WEIGHT, number_token:WEIGHT, "
            "or emo+number (and emo+number:...)."
        },
    )
    number_scaling: str = field(
        default="symlog",
        metadata={
            "help": "Distance of numbers: symlog (that of digits, logarithmic beyond), absolute, log, rank or squash.",
            "choices": SCALINGS,
        },
    )
    cost_embedding: str = field(
        default="model",
        metadata={
            "help": "Embedding of the cost: model (its own head), as-is (the same, near-duplicate rows left as they "
            "are), random, shuffled, a .npy file, or a model."
        },
    )
    impl: str = field(default="auto", metadata={"help": "Kernel of the loss.", "choices": IMPLEMENTATIONS})
    chunk_size: int | None = field(default=None, metadata={"help": "Tokens per chunk of the kernel."})


@dataclass
class ObjectiveTrainingArguments(TrainingArguments):
    """The Hugging Face training arguments, with an output folder that must be named and progress bars."""

    disable_tqdm: bool | None = field(default=False, metadata={"help": "Leave out the progress bars."})
    dataloader_pin_memory: bool = field(
        default_factory=torch.cuda.is_available, metadata={"help": "Pin host memory; default: where there is a GPU."}
    )
    logging_steps: float = field(default=50, metadata={"help": "Log every so many steps."})
    save_total_limit: int | None = field(default=2, metadata={"help": "Checkpoints kept in a run folder."})

    def __post_init__(self) -> None:
        if not self.output_dir:
            raise ValueError("output_dir is missing; name the folder of this run with --output_dir.")
        if self.resume_from_checkpoint:
            raise ValueError(
                f"resume_from_checkpoint is {self.resume_from_checkpoint!r}, but a run goes on by itself: give the "
                "same command and --output_dir again. To start from other weights, name them as the model."
            )
        if self.max_steps == 0 or self.max_steps < -1 or (self.max_steps < 0 and self.num_train_epochs <= 0):
            raise ValueError(
                f"max_steps is {self.max_steps} and num_train_epochs {self.num_train_epochs}: nothing would be "
                "trained; give a positive number of steps, or leave max_steps out and give epochs above 0."
            )
        for name in _POSITIVE:
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} is {getattr(self, name)}, expected a number above 0.")
        super().__post_init__()


@dataclass
class GenerateArguments:
    """How text is sampled."""

    prompt: list[str] = field(default_factory=list, metadata={"help": "Prompts; none: start from nothing."})
    prompts_file: str | None = field(
        default=None, metadata={"help": "A UTF-8 file with one prompt per line (.jsonl: per record)."}
    )
    num_samples: int = field(default=1, metadata={"help": "Continuations of each prompt."})
    max_new_tokens: int = field(default=100, metadata={"help": "Longest continuation, in tokens."})
    temperature: float = field(default=1.0, metadata={"help": "1 samples the model's distribution; 0 is greedy."})
    top_p: float = field(default=1.0, metadata={"help": "Nucleus; 1 leaves the distribution whole."})
    top_k: int = field(default=0, metadata={"help": "0 leaves the distribution whole."})
    batch_size: int = field(default=16, metadata={"help": "Continuations made at a time."})
    seed: int = field(default=0, metadata={"help": "One seed and batch size give one result."})
    output_file: str | None = field(default=None, metadata={"help": "Write JSON lines here instead of text to stdout."})


# Read where there is a text, or where there are questions, alone. As defaults of the fields they would hide what was
# given in vain.
EVALUATE_TEXT = {"text_column": "text", "split": "test", "block_size": 256, "cost_embedding": "model"}
EVALUATE_QUESTIONS = {"max_new_tokens": 100, "answer_style": None, "num_questions": None, "predictions_file": None}


@dataclass
class EvaluateArguments:
    """What is scored: text, answers to questions, or both; None stands for a default until both are known."""

    text: str | None = field(
        default=None, metadata={"help": "A .txt, .md or .jsonl file, a folder of them, or a datasets name."}
    )
    text_column: str | None = field(
        default=None,
        metadata={"help": f"Column of .jsonl files and datasets. None: {EVALUATE_TEXT['text_column']}."},
    )
    split: str | None = field(
        default=None,
        metadata={"help": f"Split, where the text is a datasets name. None: {EVALUATE_TEXT['split']}."},
    )
    block_size: int | None = field(
        default=None,
        metadata={"help": f"Tokens in a block; its first has no context. None: {EVALUATE_TEXT['block_size']}."},
    )
    batch_size: int = field(default=8, metadata={"help": "Blocks scored, or questions answered, at a time."})
    cost_embedding: str | None = field(
        default=None,
        metadata={"help": f"As for train; compare models under one cost. None: {EVALUATE_TEXT['cost_embedding']}."},
    )
    questions: str | None = field(
        default=None, metadata={"help": "A .jsonl file of questions to answer, greedily: columns question and answer."}
    )
    answer_style: str | None = field(
        default=None,
        metadata={
            "help": "gsm8k, mathematics or last (number). None: gsm8k where all answers have ####, mathematics where "
            "none has.",
            "choices": STYLES,
        },
    )
    max_new_tokens: int | None = field(
        default=None,
        metadata={"help": f"Longest answer, in tokens. None: {EVALUATE_QUESTIONS['max_new_tokens']}."},
    )
    num_questions: int | None = field(
        default=None, metadata={"help": "Answer at most so many, evenly spaced; None: all."}
    )
    predictions_file: str | None = field(default=None, metadata={"help": "Write the answers here, as JSON lines."})
    output_file: str | None = field(default=None, metadata={"help": "Write the JSON here too."})


@dataclass
class CompareArguments:
    """What is compared, and how it is sampled."""

    objectives: list[str] = field(
        default_factory=lambda: ["mle", "emo"],
        metadata={
            "help": "Arms: objective[/as-is | /random | /shuffled][/T=temperature], e.g. mle mixce:0.8 emo emo/random; "
            "of numbers also [/absolute | /log | /squash], e.g. number_token/log emo+number."
        },
    )
    seeds: list[int] = field(default_factory=lambda: [0, 1], metadata={"help": "Every arm is trained once per seed."})
    judge: str | None = field(default=None, metadata={"help": "An independent model that scores the samples."})
    num_prompts: int = field(
        default=64, metadata={"help": "Test blocks whose beginnings are continued; questions shown with their answers."}
    )
    prompt_tokens: int = field(default=20, metadata={"help": "Length of those beginnings."})
    samples_per_prompt: int = field(default=1, metadata={"help": "Continuations of each prompt."})
    max_new_tokens: int = field(default=100, metadata={"help": "Longest continuation or answer, in tokens."})
    answer_style: str | None = field(
        default=None,
        metadata={"help": "Of answers to questions. Default: as evaluate chooses it.", "choices": STYLES},
    )
    num_questions: int | None = field(
        default=None, metadata={"help": "Ask at most so many test questions, evenly spaced; None: all."}
    )
    sample_batch_size: int = field(default=32, metadata={"help": "Continuations made, and blocks scored, at a time."})
