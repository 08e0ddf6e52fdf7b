"""Loading what a command line names: errors for models, costs and questions that cannot be used."""

import math
import shutil
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from otloss_llm import EmbeddingCost, all_but_the_top
from otloss_llm.models.loading import fingerprint, load_model, load_model_and_tokenizer, load_tokenizer
from otloss_llm.training.loading import load_cost
from tests.otloss_llm.conftest import Tiny, save
from tests.otloss_llm.tiny_models import TINY, build, tiny_model


@pytest.fixture
def copy(tiny: Tiny, tmp_path: Path) -> Path:
    """A folder with a model and a tokenizer, to be damaged."""
    return Path(shutil.copytree(tiny.gpt2, tmp_path / "copy"))


def test_weights_that_are_not_finite(tiny: Tiny, tmp_path: Path) -> None:
    model = load_model(str(tiny.gpt2))
    with torch.no_grad():
        model.transformer.h[1].mlp.c_fc.weight[0, 3] = math.nan
    model.save_pretrained(tmp_path / "broken")
    with pytest.raises(ValueError, match=r"NaN or infinite weights in transformer\.h\.1\.mlp\.c_fc\.weight"):
        load_model(str(tmp_path / "broken"))


def test_missing_and_misshapen_weights(tiny: Tiny, copy: Path) -> None:
    from safetensors.torch import load_file, save_file

    weights = load_file(copy / "model.safetensors")
    name = "transformer.h.0.ln_1.weight"
    for change in ({name: None}, {name: torch.ones(3)}):
        changed = {key: value for key, value in (weights | change).items() if value is not None}
        save_file(changed, copy / "model.safetensors", {"format": "pt"})
        with pytest.raises(ValueError, match=r"copy"):
            load_model(str(copy))


def test_a_folder_without_a_tokenizer(copy: Path) -> None:
    """transformers makes an empty one for it, with which every text has no tokens."""
    for file in copy.glob("tokenizer*"):
        file.unlink()
    with pytest.raises(ValueError, match=r"no token but .*--tokenizer_name"):
        load_tokenizer(str(copy))


def test_a_tokenizer_larger_than_the_model(tiny: Tiny, tmp_path: Path) -> None:
    save(tiny_model("gpt2", vocab_size=257), load_tokenizer(str(tiny.gpt2)), tmp_path / "small")
    with pytest.raises(ValueError, match=r"has \d+ tokens, the model '.*small' only 257"):
        load_model_and_tokenizer(str(tmp_path / "small"))


def test_models_that_are_not_causal(tmp_path: Path) -> None:
    build("Bert", TINY["llama"][1], "LMHeadModel").save_pretrained(tmp_path / "bert")
    with pytest.raises(ValueError, match=r"BertLMHeadModel.* sees the tokens to its right"):
        load_model(str(tmp_path / "bert"))


def test_decoders_marked_like_encoders_are_loaded(tmp_path: Path) -> None:
    neox = build("GPTNeoX", TINY["llama"][1])
    assert neox.config.is_decoder is False
    neox.save_pretrained(tmp_path / "neox")
    assert not load_model(str(tmp_path / "neox")).training


# ---- costs and text -----------------------------------------------------------------------------------------------


def test_costs_of_a_model(tiny: Tiny) -> None:
    model = load_model(str(tiny.gpt2))
    own, other = load_cost(None, model), load_cost(str(tiny.gpt2), model)
    assert torch.equal(own.unit, other.unit)
    assert torch.equal(load_cost("random", model, seed=3).unit, load_cost("random", model, seed=3).unit)
    assert not torch.equal(load_cost("random", model, seed=3).unit, load_cost("random", model, seed=4).unit)
    expected = EmbeddingCost(all_but_the_top(model.get_output_embeddings().weight)).unit
    assert torch.equal(load_cost("all-but-the-top", model).unit, expected)
    assert torch.equal(own.unit, expected)
    raw = load_cost("raw", model).unit
    assert torch.equal(raw, EmbeddingCost.from_model(model).unit)
    assert not torch.allclose(raw, own.unit, atol=0.01)
    tokenizer = load_tokenizer(str(tiny.gpt2))
    assert torch.equal(load_cost(str(tiny.gpt2), model, tokenizer=tokenizer).unit, own.unit)
    other = SimpleNamespace(get_vocab=lambda: {token: 0 for token in tokenizer.get_vocab()})
    with pytest.raises(ValueError, match="another tokenizer of the same size"):
        load_cost(str(tiny.gpt2), model, tokenizer=other)
    shuffled = load_cost("shuffled", model, seed=3).unit
    assert not torch.equal(shuffled, raw)
    torch.testing.assert_close(shuffled.sort(dim=0).values, raw.sort(dim=0).values)


def test_a_cost_from_a_file(tiny: Tiny, tmp_path: Path) -> None:
    model = load_model(str(tiny.gpt2))
    for dtype in ("float16", "int64"):
        array = (np.random.default_rng(0).normal(size=(model.config.vocab_size, 5)) * 9).astype(dtype)
        np.save(tmp_path / "embedding.npy", array)
        unit = array.astype(float) / np.linalg.norm(array.astype(float), axis=1, keepdims=True)
        made = load_cost(str(tmp_path / "embedding.npy"), model).unit
        np.testing.assert_allclose(made[8:].double().numpy(), unit[8:], atol=1e-6)


def test_files_that_are_not_an_embedding(tiny: Tiny, tmp_path: Path) -> None:
    model = load_model(str(tiny.gpt2))
    good = np.ones((model.config.vocab_size, 4))
    wrong = good.copy()
    wrong[2, 1], wrong[9, 0] = np.nan, np.inf
    for array, message in ((wrong, "2 of .* rows, the first is row 2"), (good[:-1], "over a vocabulary of")):
        np.save(tmp_path / "wrong.npy", array)
        with pytest.raises(ValueError, match=message):
            load_cost(str(tmp_path / "wrong.npy"), model)


def test_fingerprints_tell_models_apart(tiny: Tiny) -> None:
    model, again = load_model(str(tiny.llama)), load_model(str(tiny.llama))
    assert fingerprint(model.named_parameters()) == fingerprint(again.named_parameters())
    with torch.no_grad():
        for weight in again.parameters():
            weight *= 1.0001
    assert fingerprint(model.named_parameters()) != fingerprint(again.named_parameters())
    assert fingerprint([("a", torch.zeros(2, 3))]) != fingerprint([("a", torch.zeros(3, 2))])
