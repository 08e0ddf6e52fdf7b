"""The public face of otloss_llm: every name resolves, and the losses need nothing but torch."""

from __future__ import annotations

import inspect
import subprocess
import sys

import pytest

import otloss_llm

WITHOUT_TRANSFORMERS = """
import sys
for name in ("transformers", "accelerate", "tokenizers", "datasets", "peft"):
    sys.modules[name] = None  # an import of it fails
"""


def run(code: str) -> str:
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_every_public_name_resolves_and_is_documented() -> None:
    pytest.importorskip("transformers")
    assert len(set(otloss_llm.__all__)) == len(otloss_llm.__all__)
    for name in otloss_llm.__all__:
        assert inspect.getdoc(getattr(otloss_llm, name)), name


def test_the_names_that_others_rely_on() -> None:
    relied_on = {
        "EMO", "MLE", "MixCE", "TaiLr", "EmbeddingCost", "ObjectiveMixin", "ObjectiveTrainer", "TokenLoss",
        "dense_token_loss", "emo_loss", "linear_token_loss", "parse_objective", "token_loss",
    }  # fmt: skip
    assert relied_on <= set(otloss_llm.__all__)


def test_unknown_names_are_attribute_errors() -> None:
    with pytest.raises(AttributeError, match="no attribute 'Trainer'"):
        _ = otloss_llm.Trainer
    assert not hasattr(otloss_llm, "wasserstein")


def test_the_import_does_not_load_transformers() -> None:
    out = run("import sys, otloss_llm; print([m for m in sys.modules if m.split('.')[0] in "
              "('transformers', 'accelerate', 'datasets', 'peft')])")  # fmt: skip
    assert out.strip() == "[]"


def test_losses_work_without_transformers() -> None:
    out = run(
        WITHOUT_TRANSFORMERS
        + """
import torch, otloss_llm
weight = torch.randn(7, 3)
out = otloss_llm.linear_token_loss(torch.randn(2, 3), weight, torch.tensor([1, 2]), objective=otloss_llm.EMO(),
                                   cost=otloss_llm.EmbeddingCost(weight))
print(torch.isfinite(out.loss).item())
"""
    )
    assert out.strip() == "True"


def test_the_trainer_without_transformers_names_the_extra() -> None:
    out = run(
        WITHOUT_TRANSFORMERS
        + """
for name in ("ObjectiveTrainer", "ObjectiveMixin"):
    try:
        exec(f"from otloss_llm import {name}")
    except ImportError as error:
        print(error)
"""
    )
    for name, line in zip(("ObjectiveTrainer", "ObjectiveMixin"), out.splitlines(), strict=True):
        assert line == f'{name} needs transformers: pip install "otloss[llm]"'
