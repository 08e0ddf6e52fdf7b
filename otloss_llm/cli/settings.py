"""The options of the command line: the ones of `trl sft`, with our defaults, and the objective with its cost."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from datetime import date
from difflib import get_close_matches
from itertools import pairwise
from json import JSONDecodeError
from typing import Any, NamedTuple, NoReturn, get_type_hints

import torch
from trl import DatasetMixtureConfig, ModelConfig, ScriptArguments, SFTConfig, TrlParser
from yaml import YAMLError  # type: ignore[import-untyped]

from otloss.losses.number_line import SCALINGS
from otloss_llm.costs.choice import NumberSettings
from otloss_llm.costs.named import COST_SOURCES
from otloss_llm.losses.positions import IMPLEMENTATIONS
from otloss_llm.objectives import Sum, parse_objective
from otloss_llm.objectives.names import EXPECTED

# Options that a resumed run may change: paths, logs, checkpoints, evaluation, devices and memory. One that a later
# version of TRL adds is compared. The model and the rows are compared by their content.
MAY_DIFFER = (
    "output_dir", "bf16_full_eval", "fp16_full_eval", "activation_checkpointing", "activation_checkpointing_kwargs",
    "gradient_checkpointing", "gradient_checkpointing_kwargs", "torch_compile", "torch_compile_backend",
    "torch_compile_mode", "use_cache", "torch_empty_cache_steps", "logging_strategy", "logging_steps",
    "logging_first_step", "log_on_each_node", "logging_nan_inf_filter", "include_num_input_tokens_seen",
    "log_level", "log_level_replica", "disable_tqdm", "report_to", "run_name", "project", "trackio_space_id",
    "trackio_bucket_id", "trackio_static_space_id", "eval_strategy", "eval_steps", "eval_delay",
    "per_device_eval_batch_size", "prediction_loss_only", "eval_on_start", "eval_do_concat_batches",
    "eval_use_gather_object", "eval_accumulation_steps", "include_for_metrics", "batch_eval_metrics",
    "save_only_model", "save_strategy", "save_steps", "save_on_each_node", "save_total_limit",
    "enable_jit_checkpoint", "push_to_hub", "hub_token", "hub_private_repo", "hub_model_id", "hub_strategy",
    "hub_always_push", "hub_revision", "load_best_model_at_end", "metric_for_best_model", "greater_is_better",
    "use_cpu", "parallelism_config", "dataloader_num_workers", "dataloader_pin_memory",
    "dataloader_persistent_workers", "dataloader_prefetch_factor", "dataloader_multiprocessing_context",
    "ddp_find_unused_parameters", "ddp_bucket_cap_mb", "ddp_broadcast_buffers", "ddp_static_graph", "ddp_backend",
    "ddp_timeout", "fsdp", "fsdp_config", "deepspeed", "debug", "skip_memory_metrics", "do_train", "do_eval",
    "do_predict", "resume_from_checkpoint", "local_rank", "trust_remote_code", "dataset_num_proc", "eval_packing",
    "activation_offloading", "model_name_or_path", "model_revision", "attn_implementation", "impl", "chunk_size",
)  # fmt: skip

REPLACED = {
    "--train_text": "--dataset_name F --packing true --packing_strategy wrapped",
    "--train_questions": "--dataset_name F with the columns prompt and completion",
    "--train_chat": "--dataset_name F with the column messages",
    "--block_size": "--max_length",
    "--validation_fraction": "--eval_strategy epoch --test_split_size S",
    **dict.fromkeys(("--model", "--model_name", "--model_path"), "--model_name_or_path"),
    **dict.fromkeys(("--data", "--dataset", "--train_file"), "--dataset_name"),
    **dict.fromkeys(("--lr", "--learningrate"), "--learning_rate"),
    **dict.fromkeys(("--epochs", "--num_epochs"), "--num_train_epochs"),
    **dict.fromkeys(("--batch_size", "--train_batch_size"), "--per_device_train_batch_size"),
    "--eval_batch_size": "--per_device_eval_batch_size",
    "--loss": "--objective",
    "--torch_dtype": "--dtype",
    "--device": "--use_cpu for the CPU; a GPU is taken where there is one",
}


# The smallest and largest values of options, which TRL's parser takes as they are; other floats have to be finite.
COUNTS = (
    "max_length", "chunk_size", "per_device_train_batch_size", "per_device_eval_batch_size",
    "gradient_accumulation_steps", "eval_accumulation_steps", "pad_to_multiple_of", "dataset_num_proc",
    "dataloader_prefetch_factor", "lora_r", "lora_alpha", "mauve_rows",
)  # fmt: skip
NOT_NEGATIVE = (
    "num_train_epochs", "learning_rate", "weight_decay", "max_grad_norm", "adam_epsilon", "warmup_steps",
    "logging_steps", "eval_steps", "save_steps", "eval_delay", "dataloader_num_workers", "neftune_noise_alpha",
)  # fmt: skip
SHARES = ("lora_dropout", "label_smoothing_factor", "adam_beta1", "adam_beta2")
RANGES: dict[str, tuple[float, float]] = {
    **dict.fromkeys(COUNTS, (1, math.inf)), **dict.fromkeys(NOT_NEGATIVE, (0, math.inf)),
    **dict.fromkeys(SHARES, (0, 1)), **dict.fromkeys(("seed", "data_seed"), (0, 2**32 - 1)),
    "max_steps": (-1, math.inf),
}  # fmt: skip


@dataclass
class RunConfig(SFTConfig):
    """TRL's `SFTConfig` with other defaults: float32 on a CPU, no checkpointing of gradients, two checkpoints kept."""

    bf16: bool | None = field(
        default=None, metadata={"help": "Compute in bfloat16. Default: true on a GPU, unless fp16 is."}
    )
    gradient_checkpointing: bool | None = field(
        default=None, metadata={"help": "Recompute activations in the backward pass: less memory, more time."}
    )
    save_total_limit: int | None = field(default=2, metadata={"help": "Checkpoints kept in the output folder."})
    assistant_only_loss: bool | None = field(
        default=None,
        metadata={"help": "Train on the answers of conversations alone. Default: true where the column is messages."},
    )

    def __post_init__(self) -> None:
        if self.use_cpu or not torch.accelerator.is_available():
            self.bf16 = bool(self.bf16)
            if self.activation_offloading:
                raise ValueError(
                    "--activation_offloading keeps the activations of an accelerator in the memory of the CPU, and "
                    "this run is on a CPU; leave it out."
                )
        super().__post_init__()


@dataclass
class ModelArguments(ModelConfig):
    """TRL's `ModelConfig`; adapters (`--use_peft`) are on all linear layers but the head, without dropout."""

    lora_target_modules: list[str] | None = field(
        default_factory=lambda: ["all-linear"],
        metadata={"help": "Names of layers with an adapter. Default: all linear ones but the head."},
    )
    lora_dropout: float = field(default=0.0, metadata={"help": "Dropout before the adapter."})

    def __post_init__(self) -> None:
        super().__post_init__()
        only: Any = self.lora_target_modules  # TRL takes a list of one name for a pattern of whole paths
        if isinstance(only, str) and only != "all-linear" and re.fullmatch(r"[\w.]+", only):
            self.lora_target_modules = [only]
        if self.model_name_or_path is None:
            raise ValueError("--model_name_or_path is missing; give the folder or the hub name of a model.")


@dataclass
class ObjectiveArguments:
    """What is minimised."""

    objective: str = field(
        default="emo",
        metadata={
            "help": f"{EXPECTED}. The ratio of emo is clipped at 3 (emo:clip=none: as published); terms are added as "
            "in gem:0.7+z_loss:1e-4."
        },
    )
    cost_embedding: str | None = field(
        default=None,
        metadata={
            "help": f"Embedding of the cost: {', '.join(COST_SOURCES)}, a .npy file, or a model whose head is taken. "
            "all-but-the-top, the default, is the model's own head without its leading directions, raw is all of it."
        },
    )
    number_scaling: str = field(
        default="symlog",
        metadata={"help": "Distance of numbers: symlog is logarithmic beyond the digits.", "choices": list(SCALINGS)},
    )
    impl: str = field(default="auto", metadata={"help": "Kernel of the loss.", "choices": list(IMPLEMENTATIONS)})
    chunk_size: int | None = field(default=None, metadata={"help": "Tokens in a chunk of the kernel."})

    def __post_init__(self) -> None:
        self.parsed = parse_objective(self.objective)
        if self.cost_embedding is not None and self.cost_kind not in ("embedding", "mixed"):
            raise ValueError(
                f"{self.objective} reads no embedding, got --cost_embedding {self.cost_embedding}; leave it out, or "
                "take emo+number."
            )

    @property
    def cost_kind(self) -> str:
        """The cost that the objective is meant for, as in `otloss_llm.costs.choice`."""
        return Sum.of(self.parsed).cost_kind

    @property
    def numbers(self) -> NumberSettings | None:
        return None if self.number_scaling == "symlog" else NumberSettings(scaling=self.number_scaling)


class RunParser(TrlParser):
    """TRL's parser, which reads the values of a YAML file by the types of options, as it reads the command line."""

    def __init__(self, kinds: Sequence[type], **settings: Any) -> None:
        super().__init__(kinds, **settings)
        self._hints = {name: str(hint) for kind in kinds for name, hint in get_type_hints(kind).items()}

    def set_defaults_with_config(self, **values: Any) -> list[str]:
        read = {name: _read_value(name, value, self._hints.get(name, "")) for name, value in values.items()}
        unread: list[str] = super().set_defaults_with_config(**read)
        return unread


def _read_value(name: str, value: Any, hint: str) -> Any:
    """Return a value of a YAML file as a word or words of the command line; raise ValueError for another structure."""
    if name == "datasets":
        if not (isinstance(value, list) and all(isinstance(item, dict) and "path" in item for item in value)):
            raise ValueError(f"datasets of --config is {value!r}, expected a list of mappings with the key path.")
        return value
    if isinstance(value, dict | list) and type(value).__name__ not in hint:
        raise ValueError(f"{name} of --config is {value!r}, expected one value.")
    if value is not None and "dict" in hint and not isinstance(value, dict | str):
        raise ValueError(f"{name} of --config is {value!r}, expected a mapping.")
    if value is None and hint.startswith("<class"):
        raise ValueError(f"{name} of --config is null, expected a value; leave it out for the default.")
    is_optional = "None" in hint and not any(kind in hint for kind in ("bool", "int", "float", "list"))
    if value is False and is_optional:  # resume_from_checkpoint: false
        return False if "Literal[False]" in hint else None
    if isinstance(value, dict):
        return _with_powers(value)
    words = [_word(item, hint) for item in (value if isinstance(value, list) else [value])]
    return words if isinstance(value, list) or (hint.startswith("list[str]") and value is not None) else words[0]


def _word(value: Any, hint: str) -> Any:
    """Return a value as it is typed: YAML reads the word no as false, and 2026-11-30 as a date."""
    if value is False and "str" in hint and "bool" not in hint:
        return "no"
    return str(value) if isinstance(value, int | float | date) else value


def _with_powers(value: Any) -> Any:
    """Return a structure in which 1e-6 is a number, as in JSON: YAML's numbers have a point, so that it is text."""
    if isinstance(value, dict):
        return {key: _with_powers(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_with_powers(item) for item in value]
    return float(value) if isinstance(value, str) and re.fullmatch(r"[-+]?\d+[eE][-+]?\d+", value) else value


class Request(NamedTuple):
    """What a command was asked for."""

    script: ScriptArguments
    args: RunConfig
    model: ModelArguments
    mixture: DatasetMixtureConfig
    objective: ObjectiveArguments
    own: tuple[Any, ...]  # dataclasses of this command alone

    def settings(self) -> dict[str, Any]:
        """Return what a run keeps to: all options but `MAY_DIFFER`."""
        tokens = {name: getattr(self.args, name) for name in ("eos_token", "pad_token")}  # which `to_dict` masks
        streamed = {"dataset_streaming": self.script.dataset_streaming}
        options = self.args.to_dict() | tokens | asdict(self.model) | asdict(self.objective) | streamed
        return {name: value for name, value in options.items() if name not in MAY_DIFFER}


def _split_config(argument: str) -> list[str]:
    """`--config=F` as two words, which TRL reads."""
    return argument.split("=", 1) if argument.startswith("--config=") else [argument]


def _check_range(name: str, value: Any) -> None:
    """Raise ValueError for a number that the option does not take, before a model or rows are loaded."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return
    smallest, largest = RANGES.get(name, (-math.inf, math.inf))
    if not (math.isfinite(value) and smallest <= value <= largest):
        between = f"{smallest:g} to {largest:.12g}" if largest < math.inf else f"at least {smallest:g}"
        expected = "a finite number" if smallest == -math.inf else f"a finite number, {between}"
        raise ValueError(f"--{name} is {value}, expected {expected}.")
    if name == "test_split_size" and not 0 < value < 1:  # TRL reads a float, which datasets takes for a share
        raise ValueError(f"--{name} is {value}, expected a share of the training split, above 0 and below 1.")


@contextmanager
def _naming_options(arguments: Sequence[str]) -> Iterator[None]:
    """Raise ValueError that names the option, or its file, for errors of TRL's parser and its dataclasses."""
    try:
        yield
    except YAMLError as error:
        raise ValueError(f"the file of --config is not YAML: {error}") from error
    except OverflowError as error:  # of TRL, for which the number of steps is a whole one
        raise ValueError(f"a number of the options is infinite: {error}; give a finite one.") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"the file of --config is not UTF-8: {error}; save it as UTF-8.") from error
    except JSONDecodeError as error:  # of options that are dictionaries
        raise ValueError(f"the value {error.doc!r} of an option is not JSON: {error}.") from error
    except OSError as error:
        pairs = pairwise(arguments)
        option = next((name for name, value in pairs if value == str(error.filename)), "--config")
        raise ValueError(f"the file of {option} cannot be read: {error}; check the path.") from error
    except TypeError as error:
        raise ValueError(f"an option has the wrong form: {error}") from error


def _check_names(command: str, words: Sequence[str], fail: Callable[[str], NoReturn]) -> None:
    """Fail for an option of other programs that has another name here."""
    for word in words:
        name = "--" + word.partition("=")[0].removeprefix("--").replace("-", "_")
        if word.startswith("--") and name in REPLACED:
            option = REPLACED[name]
            if command.endswith("evaluate"):
                option = option.replace("_train_batch_size", "_eval_batch_size")
            fail(f"{command} has no option {word.partition('=')[0]!r}; use {option}")


def parse(command: str, arguments: Sequence[str], *kinds: type) -> Request:
    """Parse the options of a command line and of a YAML file (`--config`) by TRL's parser.

    Args:
        kinds: dataclasses of this command alone.

    Raises:
        ValueError: an option is unknown or has an invalid value.
    """
    shared = (ScriptArguments, RunConfig, ModelArguments, DatasetMixtureConfig, ObjectiveArguments)
    parser = RunParser((*shared, *kinds), prog=f"python -m otloss_llm {command}")

    def fail(message: str) -> NoReturn:
        raise ValueError(f"{message} (see {command} --help).")

    parser.error = fail  # argparse's own prints the names of all options
    arguments = [part for argument in arguments for part in _split_config(argument)]
    if arguments[-1:] == ["--config"]:
        fail("--config has no value, expected a YAML file")
    _check_names(command, arguments, fail)  # before argparse, for which --lr could be --lr_scheduler_type
    with _naming_options(arguments):
        *parsed, unknown = parser.parse_args_and_config(arguments, return_remaining_strings=True)
    _check_names(command, unknown, fail)
    if unknown:
        near = get_close_matches(unknown[0], parser._option_string_actions, n=1)
        fail(f"{command} has no option {unknown[0]!r}{f', did you mean {near[0]}?' if near else ''}")
    for name, value in (option for part in parsed for option in vars(part).items()):
        _check_range(name, value)
    script, args, model, mixture, objective, *own = parsed
    return Request(script, args, model, mixture, objective, tuple(own))
