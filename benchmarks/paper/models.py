"""Models and tokenizers of the experiments: from a folder or the hub, checked; and LoRA."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from otloss_llm.models.heads import find_head


def load_model(path: str, **kwargs: Any) -> Any:
    """Return a causal language model or an encoder-decoder (T5, BART); the folder of an adapter with its base model.

    Raises OSError if there is none, and ValueError if weights are missing, NaN or infinite.
    """
    from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM

    kind = AutoModelForSeq2SeqLM if names_encoder_decoder(path) else AutoModelForCausalLM
    model, info = kind.from_pretrained(path, output_loading_info=True, **kwargs)
    random = [*info["missing_keys"], *(key for key, *_ in info["mismatched_keys"])]
    if random:
        raise ValueError(f"the model {path!r} lacks {len(random)} weights, which would be random, as {random[0]}.")
    if not all(weight.isfinite().all() for weight in model.parameters()):
        raise ValueError(f"the model {path!r} has NaN or infinite weights; use an earlier checkpoint.")
    return model


def names_encoder_decoder(path: str) -> bool:
    """Whether the configuration in a folder or on the hub is for an encoder-decoder."""
    from transformers import AutoConfig

    if (Path(path) / "adapter_config.json").is_file():  # which has no configuration of a model
        return False
    return bool(getattr(AutoConfig.from_pretrained(path), "is_encoder_decoder", False))


def load_tokenizer(path: str) -> Any:
    """Return the tokenizer in a folder or on the hub."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(path)


def load_model_and_tokenizer(path: str) -> tuple[Any, Any]:
    """Return a model with its tokenizer; raises ValueError if the tokenizer has more tokens than the model."""
    model, tokenizer = load_model(path), load_tokenizer(path)
    vocab = find_head(model).weight.shape[0]
    if len(tokenizer) > vocab:
        raise ValueError(f"the tokenizer of {path!r} has {len(tokenizer)} tokens, the model only {vocab}.")
    return model, tokenizer


@dataclass(frozen=True)
class Lora:
    """Rank and scale (`alpha / rank`) of an adapter on all linear layers but the head."""

    rank: int
    alpha: float
    dropout: float = 0.0
    target_modules: tuple[str, ...] = ("all-linear",)


def add_adapter(model: Any, lora: Lora, *, base: str, seed: int) -> Any:
    """Return `model` with a new trainable adapter, initialised from `seed`; its own weights are frozen.

    The adapter keeps `base`, the folder or hub name of the model, so that it loads again from any working folder.
    """
    import peft
    from transformers import set_seed

    config = peft.LoraConfig(
        task_type="CAUSAL_LM", r=lora.rank, lora_alpha=lora.alpha, lora_dropout=lora.dropout,
        target_modules="all-linear",
    )  # fmt: skip
    set_seed(seed)
    adapted = peft.get_peft_model(model, config)
    folder = Path(base).expanduser()
    adapted.active_peft_config.base_model_name_or_path = str(folder.resolve()) if folder.is_dir() else base
    return adapted
