"""Errors of a command line that can be found before torch and transformers are imported, which takes seconds.

The options are read from the sources of the dataclasses that declare them. Whatever is unclear here is left to the
parser and to the commands, which check everything again.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence
from difflib import get_close_matches
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

# Command (a module of otloss_llm.cli) -> dataclasses of `otloss_llm.cli.arguments` that its `run` takes.
COMMANDS = {
    "train": (
        "ModelArguments",
        "LoraArguments",
        "TextArguments",
        "ObjectiveArguments",
        "ObjectiveTrainingArguments",
    ),
    "generate": ("UsedModelArguments", "GenerateArguments"),
    "evaluate": ("UsedModelArguments", "EvaluateArguments"),
}
# Options of train that have another name in generate and evaluate.
_OF_TRAIN = {
    "per_device_eval_batch_size": "--batch_size", "per_device_train_batch_size": "--batch_size",
    "validation_text": "--text", "test_text": "--text", "train_text": "--text",
    "validation_questions": "--questions", "test_questions": "--questions", "train_questions": "--questions",
    "bf16": "--dtype bfloat16", "fp16": "--dtype float16", "no_cuda": "--use_cpu", "output_dir": "--output_file",
    "device": "--use_cpu",
}  # fmt: skip
_MODELS = ("model_name_or_path", "tokenizer_name", "judge", "model_sizes", "source")
_TEXTS = (
    "train_text", "validation_text", "test_text", "train_questions", "validation_questions", "test_questions",
    "text", "questions", "in_context", "in_context_train", "prompts_file",
)  # fmt: skip
HUB_NAME = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?", re.ASCII)


class _Field(NamedTuple):
    """An option: its type as it is written, and whether it has no default."""

    annotation: str
    required: bool


def first_error(arguments: Sequence[str]) -> str | None:
    """What is wrong with the arguments behind `otloss-llm`; None if nothing is, as far as can be told here."""
    if (
        not arguments
        or arguments[0] not in COMMANDS
        or any(one in ("-h", "--help", "--traceback") for one in arguments)
    ):
        return None
    command, fields = arguments[0], fields_of(arguments[0])
    values = values_of(arguments[1:])
    for option in values if fields else ():
        if option not in fields and option.removeprefix("no_") not in fields:
            written = next(one for one in arguments if _name(one.partition("=")[0]) == option)
            return unknown_option(command, written, [f"--{name}" for name in fields])
    for name, field in fields.items():
        if field.required and name not in values:
            dashed = f"/--{name.replace('_', '-')}" if "_" in name else ""
            return f"the following arguments are required: --{name}{dashed} (see {command} --help)."
    for name, texts in values.items():
        for text in filter(None, texts):
            annotation = fields[name].annotation if name in fields else ""
            wrong = _wrong_number(name, annotation, text) or wrong_path(name, text)
            if wrong is not None:
                return wrong
    return None


def unknown_option(command: str, written: str, options: list[str]) -> str:
    """The error of an option that the command does not have."""
    name = _name(written.partition("=")[0])
    near = _OF_TRAIN.get(name, "")
    if near.partition(" ")[0] not in options:
        close = get_close_matches(name, [option.removeprefix("--") for option in options], n=1, cutoff=0.75)
        near = f"--{close[0]}" if close else ""
    return f"{command} has no option {written!r}{f', did you mean {near}?' if near else ''} (see {command} --help)."


def wrong_path(name: str, text: str) -> str | None:
    """What is wrong with the file or folder that is the value of an option."""
    path = Path(text).expanduser()
    may_be_of_the_hub = name == "dataset_name" and HUB_NAME.fullmatch(text) is not None
    if name in (*_TEXTS, "dataset_name") and not (path.exists() or may_be_of_the_hub):
        return f"there is no file or folder {text!r} in {Path.cwd()}; check the path."
    if name == "cost_embedding" and text.endswith(".npy") and not path.is_file():
        return f"no embedding file {text!r}; expected a .npy array of shape (vocabulary, width)."
    if name in _MODELS:
        return wrong_model(text, "tokenizer" if name == "tokenizer_name" else "model")
    return None


def wrong_model(text: str, what: str) -> str | None:
    """What is wrong with the folder of a model or a tokenizer; None for names that the hub may have."""
    path = Path(text).expanduser()
    if path.is_dir():
        if any(path.glob("*.json")):
            return None
        return f"the folder {text!r} has no {what}; expected config.json and the files beside it."
    if HUB_NAME.fullmatch(text):
        return None
    return f"there is no {what} folder {text!r} in {Path.cwd()}; give the folder that save_pretrained wrote."


def _wrong_number(name: str, annotation: str, text: str) -> str | None:
    kind = {"int": int, "float": float}.get(annotation.removesuffix(" | None"))
    try:
        if kind is not None:
            kind(text)
    except ValueError:
        return f"argument --{name}: invalid {annotation.removesuffix(' | None')} value: {text!r}."
    return None


def values_of(arguments: Sequence[str]) -> dict[str, list[str]]:
    """Option -> its values."""
    values: dict[str, list[str]] = {}
    last: list[str] = []
    for one in arguments:
        if one.startswith("--"):
            written, equals, value = one.partition("=")
            last = values.setdefault(_name(written), [])
            last += [value] if equals else []
        else:
            last.append(one)
    return values


def _name(written: str) -> str:
    return written.removeprefix("--").replace("-", "_")


def fields_of(command: str) -> dict[str, _Field]:
    """The options of a command; {} if the sources cannot be read."""
    sources = [Path(__file__).parent / "cli" / "arguments.py"]
    transformers = find_spec("transformers")
    if transformers is not None and transformers.origin is not None:
        sources.append(Path(transformers.origin).parent / "training_args.py")
    classes: dict[str, ast.ClassDef] = {}
    try:
        for path in sources:
            tree = ast.parse(path.read_text(encoding="utf-8"))
            classes |= {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}
        return {name: field for kind in COMMANDS[command] for name, field in _fields(classes[kind], classes)}
    except (OSError, SyntaxError, KeyError):
        return {}


def _fields(node: ast.ClassDef, classes: dict[str, ast.ClassDef]) -> Iterator[tuple[str, _Field]]:
    for base in node.bases:
        yield from _fields(classes[ast.unparse(base)], classes)
    for line in node.body:
        if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name) and line.target.id[0] != "_":
            call = line.value
            required = isinstance(call, ast.Call) and ast.unparse(call.func) == "_option" and len(call.args) == 1
            yield line.target.id, _Field(ast.unparse(line.annotation), required)
