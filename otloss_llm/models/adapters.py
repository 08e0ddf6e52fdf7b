"""LoRA by PEFT for the command line: a small adapter is trained and saved in place of the whole model."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Lora:
    """Settings of `peft.LoraConfig`, checked.

    Args:
        rank: of the update of each weight.
        alpha: the update is scaled by `alpha / rank`.
        dropout: before the update, in [0, 1).
        target_modules: names (or ends of names) of layers; ("all-linear",) takes all but the head.

    Raises:
        ValueError: a number out of range.
        ImportError: PEFT is not installed.

    Example:
        >>> Lora(0, 16.0, 0.0)
        Traceback (most recent call last):
            ...
        ValueError: lora_r is 0, expected 1 or more.
    """

    rank: int
    alpha: float
    dropout: float = 0.0
    target_modules: tuple[str, ...] = ("all-linear",)

    def __post_init__(self) -> None:
        if self.rank < 1:
            raise ValueError(f"lora_r is {self.rank}, expected 1 or more.")
        if not 0.0 < self.alpha < float("inf"):
            raise ValueError(f"lora_alpha is {self.alpha}, expected a number above 0.")
        if not 0.0 <= self.dropout < 1.0:
            raise ValueError(f"lora_dropout is {self.dropout}, expected a share in [0, 1).")
        check_peft("--lora_r")


def check_peft(what: str) -> None:
    """Raise ImportError where PEFT is not installed."""
    if importlib.util.find_spec("peft") is None:
        raise ImportError(f"{what} needs PEFT, which is not installed: pip install peft")


def add_adapter(model: Any, lora: Lora, *, base: str, seed: int) -> Any:
    """`model` with a new trainable adapter; its own weights are frozen.

    Args:
        base: folder or hub name of the model, kept in the adapter so that it loads again from any working folder.
        seed: of the adapter's initial weights.

    Raises:
        ValueError: the model has none of the target modules.
    """
    import peft
    from transformers import set_seed

    everything = lora.target_modules == ("all-linear",)
    config = peft.LoraConfig(
        task_type="CAUSAL_LM", r=lora.rank, lora_alpha=lora.alpha, lora_dropout=lora.dropout,
        target_modules="all-linear" if everything else list(lora.target_modules),
    )  # fmt: skip
    set_seed(seed)
    adapted = peft.get_peft_model(model, config)
    folder = Path(base).expanduser()
    adapted.active_peft_config.base_model_name_or_path = str(folder.resolve()) if folder.is_dir() else base
    return adapted
