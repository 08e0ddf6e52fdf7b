"""Fixtures of the paper's experiments: their command line in this process, on tiny models."""

from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.otloss_llm.conftest import BLOCK, Cli, Ended, Tiny, options
from tests.otloss_llm.conftest import nothing_old_is_searched_for_garbage as nothing_old_is_searched_for_garbage
from tests.otloss_llm.conftest import tiny as tiny

if any(find_spec(name) is None for name in ("transformers", "accelerate")):  # the extra "llm" installs them
    collect_ignore_glob = ["test_*.py"]


# Sizes at which work is split, so small that the problems of tests are split.
SMALL_BLOCKS = {
    "data.blocks.DOCUMENTS_PER_CALL": 2,
    "evaluation.answering.ROWS": 7,
    "evaluation.neighbours.AT_ONCE": 100,
}


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Split small problems as large ones are."""
    for name, size in SMALL_BLOCKS.items():
        monkeypatch.setattr(f"benchmarks.paper.{name}", size)


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str]) -> Cli:
    """Run the command line: `cli(*options)`."""
    from benchmarks.paper.command import main

    def run(*arguments: object) -> Ended:
        capsys.readouterr()
        code = main([str(argument) for argument in arguments])
        captured = capsys.readouterr()
        return Ended(code, captured.out, captured.err)

    return run


def compare_options(tiny: Tiny, folder: Path, **changes: object) -> list[str]:
    """Two objectives, two seeds, 6 steps."""
    base: dict[str, object] = {
        "model_name_or_path": tiny.llama, "judge": tiny.gpt2, "train_text": tiny.text, "output_dir": folder,
        "block_size": BLOCK, "max_steps": 6, "save_steps": 2, "logging_steps": 3, "learning_rate": 3e-3,
        "use_cpu": True, "per_device_train_batch_size": 4, "disable_tqdm": True, "prompt_tokens": 8,
        "max_new_tokens": 12, "num_prompts": 5, "objectives": ["mle", "emo"], "seeds": [0, 1],
    }  # fmt: skip
    return options(**base | changes)
