"""The public face of otloss_llm: every name resolves, and the losses need nothing but torch."""

import subprocess
import sys

import pytest

import otloss_llm
from otloss._checks import missing_package


def run(code: str) -> list[str]:
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_without_transformers() -> None:
    """The losses work, and everything else names the extra."""
    lines = run(
        """
import sys
for name in ("transformers", "accelerate", "tokenizers", "datasets", "peft"):
    sys.modules[name] = None  # an import of it fails
from contextlib import redirect_stderr
import torch, otloss_llm
weight = torch.randn(7, 3)
out = otloss_llm.linear_token_loss(torch.randn(2, 3), weight, torch.tensor([1, 2]), objective=otloss_llm.EMO(),
                                   cost=otloss_llm.EmbeddingCost(weight))
print(torch.isfinite(out.loss).item())
def attempt(code):
    try:
        exec(code)
    except ImportError as error:
        print(error)
attempt("from otloss_llm import ObjectiveTrainer")
from otloss_llm.data import train_bpe_tokenizer
attempt("train_bpe_tokenizer(['text'], 300)")
from otloss_llm.cli import main
with redirect_stderr(sys.stdout):
    print(main(["train"]))
    main(["train", "--objective", "emmo"])  # found before transformers is looked for
print(main(["--help"]), main(["--version"]))
"""
    )
    assert lines[:5] == [
        "True",
        'ObjectiveTrainer needs transformers: pip install "torch-otloss[llm]"',
        'train_bpe_tokenizer needs tokenizers: pip install "torch-otloss[llm]"',
        'otloss-llm: error: the command needs datasets: pip install "torch-otloss[llm]"',
        "2",
    ]
    assert lines[-1] == "0 0"


def test_another_package_of_the_name_is_found_at_import() -> None:
    code = """
import sys, types
sys.modules["otloss"] = types.ModuleType("otloss")
sys.modules["otloss"].__file__ = "elsewhere/otloss/__init__.py"
try:
    import otloss_llm
except ImportError as error:
    print(error)
"""
    assert run(code)[0].startswith("import otloss finds another project at elsewhere/otloss/__init__.py: pip uninstall")


def test_an_import_error_of_another_cause_is_not_a_missing_extra() -> None:
    """Two installed packages may not fit each other; every extra goes through the same function."""
    with pytest.raises(ImportError, match=r"^no module b$"):
        missing_package(ImportError("no module b", name="b"), "a")
    assert missing_package(ImportError("no module a.b", name="a.b"), "a") == "a"


def test_the_names_are_those_of_the_interface() -> None:
    assert dir(otloss_llm) == sorted(otloss_llm.__all__)
