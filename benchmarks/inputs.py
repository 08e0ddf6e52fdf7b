"""The files of data that benchmarks read: examples/data.py finds them (docs/reports/data.md)."""

from __future__ import annotations

import sys
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

from benchmarks.measure import FOLDER, Settings, say
from otloss._checks import install_hint

sys.path.append(str(Path(__file__).parents[1] / "examples"))
import data

BESIDE, TOKENIZER = data.BESIDE, "tokenizers/gpt2"
# What each benchmark reads, and what it does without that.
INPUTS = {
    "token_loss": (("text/{text}.txt", TOKENIZER), "labels follow a Zipf law"),
    "scaling": (("text/{text}.txt", TOKENIZER), "labels follow a Zipf law"),
    "gpu": (("text/{text}.txt", TOKENIZER), "labels follow a Zipf law"),
    "numbers": (("math/gsm8k-train.jsonl", TOKENIZER), "it is skipped"),
    "mathematics": (("math",), "it is skipped"),
    "objectives": (("models/stories260K", "text/warandpeace.txt"), "it is skipped"),
    "objectives_large": (
        (
            *(f"text/{name}.txt" for name in ("tinyshakespeare", "warandpeace", "wikitext2-valid")),
            "math/gsm8k-train.jsonl",
        ),
        "it is skipped",
    ),
    "ratings": (("models/stories260K",), "it has the models from scratch alone"),
    "ordinal": (("ordinal/ben-david", "ordinal/gagolews"), "it has the sets of scikit-learn and statsmodels alone"),
}


def with_inputs(settings: Settings, name: str) -> Settings:
    """The settings of one benchmark; without its files, which it says, its results are kept out of the tracked ones."""
    if name not in INPUTS:
        return replace(settings, data=None)
    names, otherwise = INPUTS[name]
    try:
        folder = data.folder(*(file.format(text=settings.text) for file in names), chosen=settings.data)
        if TOKENIZER in names and find_spec("tokenizers") is None:
            raise data.MissingError(f"Labels of text need the package tokenizers: {install_hint('llm')}")
    except data.MissingError as missing:
        tracked = settings.output is not None and settings.output.resolve() == FOLDER.resolve()
        kept = f", and {FOLDER.name}/ keeps nothing of it (--output FOLDER does)" if tracked else ""
        say(f"\n{name} without its data: {otherwise}{kept}. {missing}")
        return replace(settings, data=None, output=None if tracked else settings.output)
    return replace(settings, data=folder)
