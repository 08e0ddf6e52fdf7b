"""The output head of a language model: where it is, and its weight and bias in `hidden @ weight.T + bias`.

A head is a linear layer of torch, or one of these:

- a layer with accelerate's hooks (`device_map`), which replace its `forward`; offloaded weights are on the meta device
- a layer whose weight DeepSpeed's ZeRO stage 3 has partitioned; it is gathered
- PEFT's `modules_to_save` (a trained copy of the head) and `trainable_token_indices` (trained rows of it)
- a layer that transformers' `tp_plan` has sharded by rows, whose forward makes DTensors of plain inputs
- a layer whose weight is stored in 4 or 8 bits and can be dequantised: bitsandbytes in 4 bits, and whatever has
  `dequantize()` (torchao, quanto). Such a head is frozen; it is dequantised for one pass, as in its own `forward`.

`check_linear` runs the layer's own `forward` to verify that it computes the same numbers.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from otloss_llm.models.sharded_heads import is_row_shard, replicated_like

# What costs and kernels compute with; a weight of another dtype is quantised.
_NUMBERS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
_TP_FORWARD = "TensorParallelLayer.install_forward.<locals>.tp_forward"  # transformers replaces it by this.
_WHAT_TO_DO = "keep the head out of quantisation and adapters, or use token_loss on the model's own logits."


@dataclass(frozen=True)
class LanguageModelHead:
    """The module whose `forward` makes the logits, and its weight and bias as they are now."""

    module: nn.Module
    model_name: str
    has_tp_plan: bool = False  # its input is a plain tensor, equal in all processes, and so is its output

    @property
    def weight(self) -> Tensor:
        """(V, d), with a graph where it is trained; a copy if offloaded, partitioned, quantised or partly trained."""
        return self._weight_and_bias()[0]

    @property
    def bias(self) -> Tensor | None:
        """(V,) or None."""
        return self._weight_and_bias()[1]

    def _weight_and_bias(self) -> tuple[Tensor, Tensor | None]:
        layer: Any = self.module
        if not hasattr(layer, "get_merged_weights"):
            return _numbers(layer, self.model_name)
        if layer.disable_adapters or layer.merged or not layer.active_adapters:
            return _numbers(layer.base_layer, self.model_name)
        _numbers(layer.base_layer, self.model_name)  # raises where rows cannot be put into it
        return layer.get_merged_weights(layer.active_adapters), None  # PEFT's own forward leaves out the bias

    def matching(self, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return hidden states, weight and bias in one dtype: a quantised layer computes in a dtype of its own."""
        weight, bias = self._weight_and_bias()
        if self.has_tp_plan and is_row_shard(weight) and not hasattr(hidden, "placements"):
            hidden = replicated_like(weight, hidden)
        if weight.requires_grad and torch.is_grad_enabled() and getattr(self._hook(), "offload", False):
            raise TypeError(
                f"the head of {self.model_name} is offloaded (device_map) and requires a gradient, which would be lost "
                "with the loaded copy; freeze it with requires_grad_(False), or keep it on a device."
            )
        if _is_of_zero(weight) and weight.requires_grad and torch.is_grad_enabled():
            weight = _GatheredInBackward.apply(weight)
        if weight.dtype == hidden.dtype or type(self.module) is nn.Linear:
            return hidden, weight, bias
        return hidden.to(weight.dtype), weight, None if bias is None else bias.to(weight.dtype)

    def _hook(self) -> Any:
        return getattr(self.module, "_hf_hook", None)

    @contextmanager
    def replaced(self, forward: Callable[[Tensor], Tensor]) -> Iterator[None]:
        """Within this context `forward` replaces the module's own, inside accelerate's hooks."""
        attributes = vars(self.module)
        name = "forward" if self._hook() is None else "_old_forward"
        own = attributes.get(name)
        attributes[name] = forward
        try:
            yield
        finally:
            if own is None:
                del attributes[name]
            else:
                attributes[name] = own

    def own_forward(self) -> Callable[[Tensor], Tensor]:
        """Return the module's own `forward`, without accelerate's hooks."""
        own: Callable[[Tensor], Tensor] = getattr(self.module, "_old_forward", self.module.forward)
        return own

    def check_linear(self, hidden: Tensor, forward: Callable[[Tensor], Tensor]) -> None:
        """Raise TypeError unless the module's own `forward` equals `hidden @ weight.T + bias` up to rounding."""
        if self.has_tp_plan and type(self.module).forward is nn.Linear.forward and is_row_shard(self.module.weight):
            return  # transformers adds the layout of input and output alone
        sample = hidden[..., :8, :]
        h, weight, bias = self.matching(sample)
        if getattr(forward, "__func__", None) is nn.Linear.forward and weight is self.module.weight:
            return
        logits, expected = forward(sample), nn.functional.linear(h, weight, bias)
        deviation = f"have shape {tuple(logits.shape)} instead of {tuple(expected.shape)}"
        if logits.shape == expected.shape:
            largest = expected.float().abs().max().clamp(min=1e-30)
            error = float((logits.float() - expected.float()).abs().max() / largest)
            if error <= 8 * max(torch.finfo(dtype).eps for dtype in (logits.dtype, weight.dtype, hidden.dtype)):
                return
            deviation = f"differ by {error:.2g} of the largest"
        if "forward" in vars(self.module) and self._hook() is None:
            advice = (
                "Its forward was replaced, perhaps by a tp_plan of transformers that does not shard the head by rows; "
                "torch's own ColwiseParallel on the head can be fused, and the plan colwise_gather_output."
            )
        else:
            advice = "Use a torch.nn.Linear, or token_loss on the model's own logits."
        raise TypeError(
            f"the head of {self.model_name} is a {type_name(self.module)} whose logits are not hidden @ weight.T + bias"
            f" (they {deviation}), so its loss cannot be fused. {advice}"
        )


def find_head(model: nn.Module) -> LanguageModelHead:
    """The linear head of a causal LM or encoder-decoder of transformers: tied, resized, offloaded, quantised or PEFT's.

    Raises TypeError if the model is not one that generates text, or its head is not one linear map.
    """
    name = type(model).__name__
    can_generate, getter = (getattr(model, method, None) for method in ("can_generate", "get_output_embeddings"))
    if callable(can_generate) and not can_generate():
        raise TypeError(
            f"{name} does not generate text, expected a causal language model; load it with AutoModelForCausalLM."
        )
    module = getter() if callable(getter) else None
    if module is None:
        raise TypeError(
            f"{name} has no output embedding, expected a causal language model; load it with AutoModelForCausalLM."
        )
    layer = _linear(module, name)
    replaced = getattr(vars(layer).get("forward"), "__qualname__", "")
    return LanguageModelHead(layer, name, replaced == _TP_FORWARD)


def _linear(module: Any, model_name: str) -> nn.Module:
    """Return the layer that makes the logits, inside PEFT's wrappers."""
    copies: Any = getattr(module, "modules_to_save", None)
    if copies is not None:  # PEFT trains a full copy of the head; the active adapter's copy, if any, makes the logits
        active = [module.active_adapter] if isinstance(module.active_adapter, str) else module.active_adapter
        is_copied = bool(active) and active[0] in copies and not module.disable_adapters
        return _linear(copies[active[0]] if is_copied else module.original_module, model_name)
    layer: nn.Module = getattr(module, "token_adapter", module)  # PEFT trains some rows of the head
    if hasattr(layer, "get_merged_weights"):
        return layer
    if isinstance(layer, nn.Embedding):  # FSMT names its input's
        raise TypeError(
            f"{model_name} names an embedding as its output layer, not the linear layer that makes its logits, so its "
            "loss cannot be fused; use token_loss on the model's own logits, or another model (Marian)."
        )
    if hasattr(layer, "lora_A") or hasattr(layer, "base_layer"):
        raise TypeError(
            f"the head of {model_name} is wrapped in {type_name(layer)}, whose logits are more than one linear map; "
            "leave the head out of target_modules (or name it in modules_to_save instead)."
        )
    if not isinstance(getattr(layer, "weight", None), Tensor):
        raise TypeError(f"the head of {model_name} is a {type_name(layer)}, expected torch.nn.Linear; {_WHAT_TO_DO}")
    others = {name for name, _ in layer.named_parameters()} - {"weight", "bias"}
    if others and type(layer).forward is not nn.Linear.forward:  # perhaps without effect until they are trained
        raise TypeError(
            f"the head of {model_name} is a {type_name(layer)} with parameters {sorted(others)} beside weight and "
            f"bias, expected one linear map; {_WHAT_TO_DO}"
        )
    return layer


def _numbers(layer: Any, model_name: str) -> tuple[Tensor, Tensor | None]:
    """Return weight and bias of a linear layer, loaded and dequantised."""
    weight, bias = layer.weight, getattr(layer, "bias", None)
    if weight.is_meta and hasattr(layer, "_hf_hook"):
        from accelerate.utils import align_module_device

        with align_module_device(layer):  # This loads offloaded weights.
            if not layer.weight.is_meta:
                return _numbers(layer, model_name)
    if _is_of_zero(weight) and not weight.numel():
        from deepspeed import zero

        with zero.GatheredParameters([p for p in (weight, bias) if p is not None]):
            return weight.detach().clone(), None if bias is None else bias.detach().clone()
    matrix = weight
    if getattr(weight, "quant_state", None) is not None:
        matrix = _bitsandbytes_4_bits(layer, model_name)
    elif type(weight).dequantize is not Tensor.dequantize:
        matrix = weight.dequantize()
    if matrix.dtype not in _NUMBERS or matrix.ndim != 2:
        raise TypeError(
            f"the head of {model_name} is a {type_name(layer)} with a weight of dtype {weight.dtype} and shape "
            f"{tuple(weight.shape)}, which cannot be read as a matrix; {_WHAT_TO_DO} In bitsandbytes that is "
            'llm_int8_skip_modules=["lm_head"], in torchao modules_to_not_convert=["lm_head"].'
        )
    if matrix is not weight and torch.is_grad_enabled() and weight.requires_grad:
        raise TypeError(
            f"the head of {model_name} is a quantised {type_name(layer)} that requires a gradient, which it cannot "
            "hold; freeze it with head.weight.requires_grad_(False), or keep it out of quantisation."
        )
    return matrix, bias


def _is_of_zero(weight: Any) -> bool:
    """Whether DeepSpeed's ZeRO stage 3 holds this parameter, which is empty unless its layer runs."""
    return hasattr(weight, "ds_id") and hasattr(weight, "all_gather")


class _GatheredInBackward(torch.autograd.Function):
    """The weight itself, which is whole again when its gradient arrives.

    ZeRO gathers it before the backward pass of what its layer returns. The loss is not returned by the layer.
    """

    @staticmethod
    def forward(ctx: Any, weight: Tensor) -> Tensor:
        ctx.weight = weight
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        if not ctx.weight.numel():
            ctx.weight.all_gather([ctx.weight])
        return gradient


def _bitsandbytes_4_bits(layer: Any, model_name: str) -> Tensor:
    from bitsandbytes.functional import dequantize_4bit

    state = layer.weight.quant_state
    if getattr(state, "packing_format_for_cpu", False):
        raise TypeError(
            f"the head of {model_name} is a {type_name(layer)} that bitsandbytes has packed for inference on the CPU, "
            "which loses digits; load the model again and train it before any run without gradients."
        )
    return dequantize_4bit(layer.weight.data, state).to(getattr(layer, "compute_dtype", None) or state.dtype)


def type_name(module: Any) -> str:
    """Return the type's name, with its module where that is not torch's: PEFT has a Linear, too."""
    kind = type(module)
    return kind.__name__ if kind.__module__.startswith("torch.nn.") else f"{kind.__module__}.{kind.__qualname__}"


@contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Put the model in eval mode without gradients; afterwards every module has its own mode again.

    4-bit layers of bitsandbytes stay in training mode, which computes the same: on some CPUs one pass in eval mode
    packs their weights for inference permanently, after which they pass on no gradient.
    """
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    for module, _ in modes:
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.training = True
    try:
        with torch.no_grad(), weights_kept(model):
            yield
    finally:
        for module, training in modes:
            module.training = training


@contextmanager
def weights_kept(model: nn.Module) -> Iterator[None]:
    """After this context the weights are as at its beginning, for RWKV too.

    RWKV divides the weights of deep layers by powers of 2 in its first pass in eval mode, and multiplies them in the
    next one in training mode; a model that is saved between the two is another one.
    """
    modules: list[Any] = [module for module in model.modules() if getattr(module, "layers_are_rescaled", None) is False]
    try:
        yield
    finally:
        for module in modules:
            # RWKV divides the scales of quantised weights, and cannot multiply them again.
            if module.layers_are_rescaled and all(weight.is_floating_point() for weight in module.parameters()):
                training, module.training = module.training, True
                module._rescale_layers()
                module.training = training


def count_embeddings(model: Any) -> int:
    """Return the rows of the input embedding; PEFT's layers around one have a weight alone."""
    layer = model.get_input_embeddings()
    rows: int | None = getattr(layer, "num_embeddings", None)  # where ZeRO's stage 3 has emptied the weight too
    return len(layer.weight) if rows is None else rows


def adapters_are_disabled(model: nn.Module) -> bool:
    """Return whether PEFT's adapters of a model are switched off, as within `disable_adapter()`."""
    if not hasattr(model, "peft_config"):
        return False
    # Of the first layer with an adapter, since PEFT switches all alike and each pass asks; models have such a method.
    flags = (getattr(module, "disable_adapters", None) for module in model.modules())
    return next((flag for flag in flags if isinstance(flag, bool)), False)


def is_encoder_decoder(model: nn.Module) -> bool:
    """Return whether the labels of the model are its decoder's, which are not shifted."""
    return bool(getattr(getattr(model, "config", None), "is_encoder_decoder", False))


def text_config(config: Any) -> Any:
    """Return the config of the text model within a model of images or sound; the config itself of others."""
    try:
        return config.get_text_config() if hasattr(config, "get_text_config") else config
    except ValueError:  # has several
        return config


def takes_use_cache(model: Any) -> bool:
    """Return whether the forward pass of a model takes `use_cache`, by name or for the text model within it."""
    own = base_model(model)  # PEFT's takes anything
    parameters = inspect.signature(own.forward).parameters
    if "use_cache" in parameters:
        return True
    config: Any = getattr(own, "config", None)
    has_text_model = text_config(config) is not config
    return has_text_model and any(p.kind is p.VAR_KEYWORD for p in parameters.values())


def base_model(model: Any) -> Any:
    """Return the model inside PEFT's."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def passes_differ(first: Tensor, second: Tensor, *, tolerance: float = 1e-3) -> bool:
    """Return whether the logits of two passes at the same positions differ by more than rounding; there may be none.

    The tolerance is relative to the largest logit, for logits of 32 bits; those of 16 bits have one of their own.
    """
    tolerance = tolerance if torch.finfo(first.dtype).bits >= 32 else 2.0**-6
    return len(first) > 0 and bool((first.float() - second.float()).abs().amax() > tolerance * first.abs().amax())


def check_decoder_only(model: nn.Module, what: str) -> None:
    """Raise ValueError if the model is an encoder-decoder."""
    if is_encoder_decoder(model):
        raise ValueError(
            f"{what} need a causal language model, got the encoder-decoder {type(model).__name__}; it takes questions "
            "with answers."
        )


def check_no_virtual_tokens(model: Any) -> None:
    """Raise ValueError for PEFT's prompt tuning and its relatives; prefix tuning adds no hidden states."""
    config: Any = getattr(model, "active_peft_config", None)
    if getattr(config, "is_prompt_learning", False) and config.peft_type != "PREFIX_TUNING":
        raise ValueError(
            f"the model is adapted by PEFT's {type(config).__name__.removesuffix('Config')}, which puts virtual tokens "
            "before the text, so hidden states and labels differ in length. Use LoRA, or another method that adapts "
            "weights."
        )
