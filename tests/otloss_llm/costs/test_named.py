"""Costs by name, and embeddings that cannot be used."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from otloss_llm import EmbeddingCost, all_but_the_top
from otloss_llm.costs.named import load_cost
from tests.otloss_llm.conftest import Tiny

transformers = pytest.importorskip("transformers")


@pytest.fixture
def model(tiny: Tiny) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(tiny.gpt2)


def test_costs_of_a_model(tiny: Tiny, model: Any) -> None:
    own, other = load_cost("all-but-the-top", model), load_cost(str(tiny.gpt2), model)
    assert torch.equal(own.unit, other.unit)
    assert torch.equal(load_cost("random", model, seed=3).unit, load_cost("random", model, seed=3).unit)
    assert not torch.equal(load_cost("random", model, seed=3).unit, load_cost("random", model, seed=4).unit)
    assert torch.equal(own.unit, EmbeddingCost(all_but_the_top(model.get_output_embeddings().weight)).unit)
    raw = load_cost("raw", model).unit
    assert torch.equal(raw, EmbeddingCost.from_model(model).unit)
    assert not torch.allclose(raw, own.unit, atol=0.01)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tiny.gpt2)
    assert torch.equal(load_cost(str(tiny.gpt2), model, tokenizer=tokenizer).unit, own.unit)
    changed = SimpleNamespace(get_vocab=lambda: {token: 0 for token in tokenizer.get_vocab()})
    with pytest.raises(ValueError, match="another tokenizer"):
        load_cost(str(tiny.gpt2), model, tokenizer=changed)
    shuffled = load_cost("shuffled", model, seed=3).unit
    assert not torch.equal(shuffled, raw)
    torch.testing.assert_close(shuffled.sort(dim=0).values, raw.sort(dim=0).values)
    with pytest.raises(ValueError, match="'no/such', expected all-but-the-top"):
        load_cost("no/such", model)


@pytest.mark.parametrize("dtype", ["float16", "int64"])
def test_a_cost_from_a_file(model: Any, tmp_path: Path, dtype: str) -> None:
    array = (np.random.default_rng(0).normal(size=(model.config.vocab_size, 5)) * 9).astype(dtype)
    np.save(tmp_path / "embedding.npy", array)
    unit = array.astype(float) / np.linalg.norm(array.astype(float), axis=1, keepdims=True)
    made = load_cost(str(tmp_path / "embedding.npy"), model).unit
    np.testing.assert_allclose(made[8:].double().numpy(), unit[8:], atol=1e-6)


def test_files_that_are_not_an_embedding(model: Any, tmp_path: Path) -> None:
    good = np.ones((model.config.vocab_size, 4))
    wrong = good.copy()
    wrong[2, 1], wrong[9, 0] = np.nan, np.inf
    for array, message in ((wrong, "2 of .* rows, the first is row 2"), (good[:-1], "over a vocabulary of")):
        np.save(tmp_path / "wrong.npy", array)
        with pytest.raises(ValueError, match=message):
            load_cost(str(tmp_path / "wrong.npy"), model)
