"""Fixtures of the command-line tests: tiny models saved beside a tokenizer, a text, and the command line in-process."""

import gc
import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

if any(find_spec(name) is None for name in ("transformers", "accelerate")):  # the extra "llm" installs them
    collect_ignore = ["cli", "evaluation", "models", "training", "test_tokenizer.py"]
BLOCK, CONTEXT, VOCABULARY = 24, 64, 290
# Sizes at which work is split, so small that the problems of tests are split.
SMALL_BLOCKS = {
    "otloss_llm.kernels.weight_gradients.SLAB_ROWS": 8,
}
SENTENCES = ("The fox | jumps.", "A `dog` sleeps;\n it *snores*.", "12 + 7 = 19 \\ naïve café", "Was it <here>?")


def tiny_text(documents: int = 150) -> str:
    """Text that differs from line to line, with what Markdown, HTML and tables trip over."""
    return "\n".join(f"{SENTENCES[i % 4]} {i * i % 97} and {SENTENCES[(i * 7) % 3]}" for i in range(documents))


@dataclass(frozen=True)
class Tiny:
    """Folders of tiny models with one tokenizer, and a text file."""

    root: Path
    text: Path
    llama: Path  # with dropout, tied
    gpt2: Path  # with absolute positions


@pytest.fixture(autouse=True, scope="module")
def nothing_old_is_searched_for_garbage() -> None:
    """Trainers search at each end of a run, which would take half of their time among what earlier tests have left."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Split small problems as large ones are."""
    for name, size in SMALL_BLOCKS.items():
        monkeypatch.setattr(name, size)


@pytest.fixture
def interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton's, for tensors on the CPU; it is read at each call."""
    pytest.importorskip("triton")
    monkeypatch.setenv("TRITON_INTERPRET", "1")


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    transformers = pytest.importorskip("transformers")
    import torch

    from otloss_llm.data import train_bpe_tokenizer

    root = tmp_path_factory.mktemp("tiny")
    text = tiny_text()
    (root / "text.txt").write_text(text, encoding="utf-8")
    tokenizer = train_bpe_tokenizer([text], VOCABULARY)
    shared = {"vocab_size": len(tokenizer), "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
    torch.manual_seed(0)
    llama = transformers.LlamaForCausalLM(transformers.LlamaConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        max_position_embeddings=CONTEXT, attention_dropout=0.1, tie_word_embeddings=True, **shared,
    ))  # fmt: skip
    gpt2 = transformers.GPT2LMHeadModel(transformers.GPT2Config(
        n_embd=32, n_layer=2, n_head=4, n_positions=CONTEXT, **shared,
    ))  # fmt: skip
    for name, model in (("llama", llama), ("gpt2", gpt2)):
        save(model, tokenizer, root / name)
    return Tiny(root, root / "text.txt", root / "llama", root / "gpt2")


def save(model: Any, tokenizer: Any, folder: Path) -> Path:
    """Model and tokenizer in one folder."""
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@dataclass(frozen=True)
class Ended:
    """How a command ended."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)

    @property
    def error(self) -> str:
        """The one line that says what is wrong."""
        assert self.code == 2, self.err
        assert self.out == ""
        lines = [line for line in self.err.splitlines() if ": error: " in line]
        assert len(lines) == 1, self.err
        assert self.err.endswith(lines[0] + "\n"), self.err
        return lines[0].partition(": error: ")[2]


Cli = Callable[..., Ended]


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str]) -> Cli:
    """Run the command line in this process: `cli("train", *options)`."""
    pytest.importorskip("accelerate")
    from otloss_llm.cli import main

    def run(*arguments: object) -> Ended:
        capsys.readouterr()
        code = main([str(argument) for argument in arguments])
        captured = capsys.readouterr()
        return Ended(code, captured.out, captured.err)

    return run


def launch(*arguments: object) -> str:
    """What a script prints that starts processes, each on one thread of the CPU; the end of it is in the failure."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "NUMBA_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    given: Any = {"env": environment, "capture_output": True, "text": True, "timeout": 240, "check": False}
    done = subprocess.run([sys.executable, *map(str, arguments)], **given)
    assert done.returncode == 0, done.stdout[-1000:] + done.stderr[-6000:]
    return done.stdout


def options(**values: object) -> list[str]:
    """`options(max_steps=3)` is `["--max_steps", "3"]`; lists become several values."""
    given: list[str] = []
    for name, value in values.items():
        given += [f"--{name}", *map(str, value if isinstance(value, (list, tuple)) else [value])]
    return given


WALL_TIMES = ("seconds_per_step", "eval_runtime", "eval_samples_per_second", "eval_steps_per_second")


def without_wall_times(content: Any) -> Any:
    """The same JSON with what differs from run to run left out."""
    if isinstance(content, dict):
        return {key: without_wall_times(value) for key, value in content.items() if key not in WALL_TIMES}
    return [without_wall_times(value) for value in content] if isinstance(content, list) else content


def read(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))
