"""Causal language models of every shape of head, two layers deep, built from configs alone."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

from otloss_llm import EMO, TokenLoss, linear_token_loss
from otloss_llm.models.logit_transform import LogitTransform
from otloss_llm.training.fused import ScoredHead, fused_loss, measure_transform

VOCAB = 31
_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2,
    "max_position_embeddings": 32, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
_LLAMA = _COMMON | {"intermediate_size": 24, "num_key_value_heads": 1}

# name -> (class prefix, config fields)
# The first six have each kind of head and of transform: tied, untied, projected, capped, scaled, with a bias.
TINY: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("GPT2", {"vocab_size": VOCAB, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 32,
                      "bos_token_id": 1, "eos_token_id": 2}),
    "llama": ("Llama", _LLAMA),
    "opt-projected": ("OPT", _COMMON | {"ffn_dim": 24, "word_embed_proj_dim": 8}),
    "gemma2": ("Gemma2", _LLAMA | {"head_dim": 8, "final_logit_softcapping": 3.0}),
    "cohere": ("Cohere", _LLAMA | {"logit_scale": 0.25}),
    "phi": ("Phi", _LLAMA),  # its head has a bias
    "llama-tied": ("Llama", _LLAMA | {"tie_word_embeddings": True}),
}  # fmt: skip
ONE_OF_EACH_KIND = list(TINY)[:6]


def build(kind: str, fields: dict[str, Any], task: str = "ForCausalLM", *, seed: int = 0, noise: float = 0.2) -> Any:
    """A model of transformers with random weights larger than at initialisation, so that errors show."""
    config = getattr(transformers, f"{kind}Config")(**fields)
    torch.manual_seed(seed)
    model = getattr(transformers, kind + task)(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(noise * torch.randn_like(parameter))
    return model


def tiny_model(name: str, seed: int = 0, **changes: Any) -> nn.Module:
    """The model `name` of TINY."""
    kind, fields = TINY[name]
    made: nn.Module = build(kind, fields | changes, "LMHeadModel" if kind == "GPT2" else "ForCausalLM", seed=seed)
    return made


def lora(model: nn.Module, **settings: Any) -> Any:
    """The model with adapters that change it: at first one of their factors is 0."""
    peft = pytest.importorskip("peft")
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=2, **settings))
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in adapted.parameters():
            if parameter.requires_grad:
                parameter.add_(0.2 * torch.randn_like(parameter))
    return adapted


def tiny_batch(seed: int = 0, rows: int = 3, length: int = 8) -> dict[str, Tensor]:
    """Token ids with labels; some ignored, another number in each row."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, VOCAB, (rows, length), generator=generator)
    labels = ids.clone()
    for row in range(rows):
        labels[row, : row + 1] = -100
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels}


def aligned(labels: Tensor) -> Tensor:
    return nn.functional.pad(labels[..., 1:], (0, 1), value=-100)


def scorer(labels: Tensor, **settings: Any) -> Callable[[Tensor, ScoredHead], TokenLoss]:
    def score(hidden: Tensor, head: ScoredHead) -> TokenLoss:
        return linear_token_loss(hidden, labels=labels, **head._asdict(), **settings)

    return score


def step(model: nn.Module, batch: dict[str, Tensor], transform: LogitTransform | None = None, **settings: Any) -> Any:
    """The loss of EMO inside the model, and its backward pass."""
    inputs = {key: value for key, value in batch.items() if key != "labels"}
    score = scorer(aligned(batch["labels"]), objective=EMO(), chunk_size=5, **settings)
    with fused_loss(model, transform or measure_transform(model, inputs), score):
        loss: Tensor = model(**inputs)["loss"]
    loss.backward()
    return loss
