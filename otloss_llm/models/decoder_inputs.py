"""The inputs of a decoder, made from its labels as the model makes them."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from otloss_llm.models.heads import is_encoder_decoder, text_config

# Kinds of models that hide padding from their decoders where they make the inputs of these; others do not.
_HIDING_PADDING = ("encoder-decoder", "pix2struct")


def with_decoder_inputs(root: nn.Module, inputs: dict[str, Any], labels: Tensor) -> dict[str, Any]:
    """Return the inputs of a model; an encoder-decoder gets decoder_input_ids, unless the batch has them."""
    if not is_encoder_decoder(root) or {"decoder_input_ids", "decoder_inputs_embeds"} & set(inputs):
        return inputs
    return decoder_inputs(root, labels) | inputs


def decoder_inputs(root: Any, labels: Tensor) -> dict[str, Tensor]:
    """Return decoder_input_ids, and the decoder_attention_mask beside it that some models make.

    Raises ValueError if the model has no method for it and its config does not name the tokens.
    """
    ids = _shifted(root, labels)
    if (kind := getattr(root.config, "model_type", None)) not in _HIDING_PADDING:
        return {"decoder_input_ids": ids}
    mask = (ids != root.config.pad_token_id).to(ids.dtype)
    if kind == "pix2struct":
        mask[:, 0] = 1
    return {"decoder_input_ids": ids, "decoder_attention_mask": mask}


def _shifted(root: Any, labels: Tensor) -> Tensor:
    """Return the labels shifted to the right behind the token that starts a text."""
    if hasattr(root, "prepare_decoder_input_ids_from_labels"):
        ids: Tensor = root.prepare_decoder_input_ids_from_labels(labels.clone())  # FSMT writes into its argument
        return ids
    start, pad = config_value(root, "decoder_start_token_id"), config_value(root, "pad_token_id")
    if start is None or pad is None:
        raise ValueError(
            f"the config of {type(root).__name__} has decoder_start_token_id={start} and pad_token_id={pad}, both of "
            "which are needed to make decoder_input_ids from labels; set them, or put decoder_input_ids into the batch."
        )
    shifted = nn.functional.pad(labels[:, :-1], (1, 0), value=start)
    return shifted.masked_fill(shifted < 0, pad)  # ignored labels


def config_value(root: Any, name: str) -> int | None:
    """Return a value of the model's config, or of its text model's if the former has none; None without one."""
    own: int | None = getattr(root.config, name, None)
    return own if own is not None else getattr(text_config(root.config), name, None)
