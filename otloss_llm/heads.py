"""The output head of a causal language model: where it is, and what the model does to its logits afterwards."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

# Configuration field -> how the model treats its logits. Whoever uses these checks them against the model's forward.
_SCALES = {"logit_scale": 1.0, "logits_scaling": -1.0, "lm_head_multiplier": 1.0}  # power the field enters with
_SOFTCAPS = ("final_logit_softcapping",)


@dataclass(frozen=True)
class LanguageModelHead:
    """A linear head and the transform of its logits, `softcap * tanh(scale * (h W^T + b) / softcap)`."""

    module: nn.Linear
    scale: float = 1.0
    softcap: float | None = None

    @property
    def weight(self) -> Tensor:
        return self.module.weight

    @property
    def bias(self) -> Tensor | None:
        return self.module.bias


def find_head(model: nn.Module) -> LanguageModelHead:
    """The linear head of a causal LM of transformers: tied, resized or wrapped by PEFT.

    Args:
        model: has `get_output_embeddings()`; its `config` tells scale and soft cap of the logits.

    Raises:
        TypeError: no causal LM, no head, or a head that is not one linear map; the message names it.

    Example:
        >>> from transformers import GPT2Config, GPT2LMHeadModel
        >>> model = GPT2LMHeadModel(GPT2Config(vocab_size=11, n_embd=8, n_layer=1, n_head=2))
        >>> find_head(model).weight.shape
        torch.Size([11, 8])
    """
    name = type(model).__name__
    _refuse_other_tasks(model, name)
    getter = getattr(model, "get_output_embeddings", None)
    module = getter() if callable(getter) else None
    if module is None:
        raise TypeError(
            f"{name} has no output embedding (get_output_embeddings() gives none), expected a causal language model; "
            "load it with AutoModelForCausalLM."
        )
    scale, softcap = _logit_transform(getattr(model, "config", None))
    return LanguageModelHead(_linear(module, name), scale, softcap)


def _refuse_other_tasks(model: nn.Module, name: str) -> None:
    """Only causal models predict token t + 1 at position t, which is how labels are shifted."""
    can_generate = getattr(model, "can_generate", None)
    if getattr(getattr(model, "config", None), "is_encoder_decoder", False):
        raise TypeError(f"{name} is an encoder-decoder, expected a causal language model (its labels are not shifted).")
    if callable(can_generate) and not can_generate():
        raise TypeError(
            f"{name} does not generate text, expected a causal language model; load it with AutoModelForCausalLM."
        )


def _linear(module: Any, model_name: str) -> nn.Linear:
    """Look through PEFT's wrappers to the linear map that makes the logits."""
    kind = type(module).__name__
    copies: Any = getattr(module, "modules_to_save", None)
    if copies is not None:  # PEFT trains a full copy of the head; the active copy makes the logits
        active = module.active_adapter if not isinstance(module.active_adapter, list) else module.active_adapter[0]
        disabled = getattr(module, "disable_adapters", False)
        return _linear(module.original_module if disabled else copies[active], model_name)
    if hasattr(module, "lora_A") or hasattr(module, "base_layer"):
        raise TypeError(
            f"the head of {model_name} is wrapped in {kind}, whose logits are more than one linear map; "
            "leave the head out of target_modules (or name it in modules_to_save instead)."
        )
    if not isinstance(module, nn.Linear) or type(module).forward is not nn.Linear.forward:
        raise TypeError(f"the head of {model_name} is a {kind}, expected torch.nn.Linear; its logits cannot be fused.")
    return module


def _logit_transform(config: Any) -> tuple[float, float | None]:
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    scale = 1.0
    for field, power in _SCALES.items():
        value = getattr(text, field, None)
        if value is not None:
            scale *= float(value) ** power
    caps = [getattr(text, field) for field in _SOFTCAPS if getattr(text, field, None) is not None]
    return scale, float(caps[0]) if caps else None


def check_causal(model: nn.Module) -> None:
    """Raise ValueError for a model that sees tokens to the right of the position that predicts them.

    An encoder such as BERT or a permutation model such as XLNet passes for a causal LM, reads the tokens it is to
    predict, and reaches perplexity 1. No field of a config tells them apart; only the model's own answer is sure.
    """
    ids = torch.tensor([[1, 2, 3, 4], [1, 2, 3, 5]], device=next(model.parameters()).device)
    modes = [(module, module.training) for module in model.modules()]
    with torch.no_grad():
        outputs = model.eval()(input_ids=ids)
    for module, training in modes:
        module.training = training
    first, second = outputs["logits"][:, :3].float()
    if (first - second).abs().max() > 1e-5 * first.abs().max():
        raise ValueError(
            f"the model ({type(model).__name__}) sees the tokens to its right, so it is no causal language model; "
            "take a decoder, or one trained with is_decoder=true."
        )
