"""Every architecture trains as by its own loss, or raises an error that says why not: one table of tiny models."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch import Tensor

from otloss_llm import NumberCost, NumberToken, ObjectiveMixin, ObjectiveTrainer, token_loss
from otloss_llm.training.batches import pad_rows
from tests.otloss_llm.tiny_models import TINY, VOCAB, build
from tests.otloss_llm.training.trainer_cases import arguments, assert_same_weights, logs, rows, weights

Batch = dict[str, Any]

# ---- configs ---------------------------------------------------------------------------------------------------------

_BASE: dict[str, Any] = {"pad_token_id": 0} | TINY["llama"][1]
_HEADS = _BASE | {"head_dim": 8}
_GPT = TINY["gpt2"][1] | {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
_NO_DROPOUT = {"dropout": 0.0, "attention_dropout": 0.0, "activation_dropout": 0.0}
_NO_BERT_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
_EXPERTS = _BASE | {"num_experts_per_tok": 1, "output_router_logits": True, "router_aux_loss_coef": 0.3}
_LOCAL, _NAMED = {"num_local_experts": 3}, {"num_experts": 3}
_MAMBA = {"vocab_size": VOCAB, "hidden_size": 16, "state_size": 4, "num_hidden_layers": 2}
_STATES = {"mamba_n_heads": 4, "mamba_d_head": 8, "mamba_n_groups": 1, "mamba_d_state": 4, "mamba_chunk_size": 8}
_BART = _NO_DROPOUT | {
    "vocab_size": VOCAB, "d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2,
    "decoder_attention_heads": 2, "encoder_ffn_dim": 24, "decoder_ffn_dim": 24, "max_position_embeddings": 32,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 2,
}  # fmt: skip
_NLLB = _BART | {
    "num_experts": 3, "encoder_sparse_step": 1, "decoder_sparse_step": 1, "expert_capacity": 64,
    "moe_token_dropout": 0.0, "router_jitter_noise": 0.0, "encoder_layerdrop": 0.0, "decoder_layerdrop": 0.0,
}  # fmt: skip
_T5 = {
    "vocab_size": VOCAB, "num_layers": 1, "num_heads": 2, "d_model": 16, "d_ff": 24, "d_kv": 8, "dropout_rate": 0.0,
    "decoder_start_token_id": 0,
}  # fmt: skip
_SWITCH = _T5 | {
    "num_layers": 2, "num_decoder_layers": 2, "num_sparse_encoder_layers": 1, "num_sparse_decoder_layers": 1,
    "num_experts": 3, "expert_capacity": 64, "router_jitter_noise": 0.0,
}  # fmt: skip

# name of the config's class -> fields; a name ends in what the class of the model has behind it
CAUSAL: dict[str, dict[str, Any]] = {
    "Llama": _BASE, "GPT2LMHeadModel": _GPT, "OPT": _BASE | {"ffn_dim": 24, "word_embed_proj_dim": 8, "dropout": 0.0},
    "Gemma2": _HEADS | {"final_logit_softcapping": 3.0}, "Olmo2": _BASE, "Cohere": _BASE | {"logit_scale": 0.25},
    "Phi": _BASE, "Qwen3": _HEADS, "Granite": _BASE | {"logits_scaling": 4.0}, 
    # Its config has a scale that is applied before the head.
    "MiniCPM3": _BASE | {
        "q_lora_rank": 8, "kv_lora_rank": 8, "qk_nope_head_dim": 4, "qk_rope_head_dim": 4, "v_head_dim": 4,
        "dim_model_base": 4, "num_key_value_heads": 2,
    },
    "GPTNeoX": _BASE, "Bloom": {"vocab_size": VOCAB, "hidden_size": 16, "n_layer": 2, "n_head": 2},
    "Mistral": _BASE, "Falcon": _BASE, "BertLMHeadModel": _BASE | _NO_BERT_DROPOUT | {"is_decoder": True},
    "Mamba": _MAMBA, "Rwkv": _MAMBA | {"attention_hidden_size": 16, "context_length": 32},
    "Bamba": _BASE | _STATES | {"attn_layer_indices": [1], "z_loss_coefficient": 0.0},
    "DeepseekV3": _BASE | {
        "moe_intermediate_size": 8, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1,
        "q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 4,
        "first_k_dense_replace": 1, "n_shared_experts": 1, "num_key_value_heads": 2,
    },
    # These have experts that are balanced.
    "Mixtral": _EXPERTS | _LOCAL, "GptOss": _EXPERTS | _LOCAL | {"head_dim": 8},
    "Qwen3Moe": _EXPERTS | _NAMED | {"moe_intermediate_size": 8, "head_dim": 8},
    "JetMoe": _EXPERTS | _LOCAL | {"kv_channels": 8, "aux_loss_coef": 0.1},
}  # fmt: skip
MORE_CAUSAL: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("Qwen2", "Cohere2", "Phi3", "Olmo", "Olmo3", "Starcoder2", "StableLm"), _BASE),
    **dict.fromkeys(("Nemotron", "Persimmon", "SmolLM3", "Apertus"), _BASE),
    **dict.fromkeys(("Gemma", "Glm", "Glm4", "Ernie4_5", "Exaone4", "HunYuanDenseV1", "Helium"), _HEADS),
    "SeedOss": _HEADS | {"residual_dropout": 0.0, "attention_dropout": 0.0},
    "Mpt": {"vocab_size": VOCAB, "d_model": 16, "n_layers": 2, "n_heads": 2, "max_seq_len": 32},
    "GPTNeo": {"vocab_size": VOCAB, "hidden_size": 16, "num_layers": 2, "num_heads": 2, "max_position_embeddings": 32,
               "attention_types": [[["global", "local"], 1]], "bos_token_id": 1, "eos_token_id": 2},
    "GPTJ": _GPT | {"rotary_dim": 4}, "CodeGen": _GPT | {"rotary_dim": 4, "n_head": 4, "n_embd": 32},
    "GPTBigCode": _GPT, "OpenAIGPTLMHeadModel": _GPT, "CTRLLMHeadModel": _GPT | {"dff": 24},
    "XGLM": _NO_DROPOUT | {"vocab_size": VOCAB, "d_model": 16, "num_layers": 2, "attention_heads": 2, "ffn_dim": 24,
                           "max_position_embeddings": 32},
    "BioGpt": _BASE | _NO_BERT_DROPOUT | {"activation_dropout": 0.0},
    "Roberta": _BASE | _NO_BERT_DROPOUT | {"is_decoder": True},
    "Mamba2": _MAMBA | {"num_heads": 4, "head_dim": 8, "n_groups": 1, "chunk_size": 8}, "FalconMamba": _MAMBA,
    "RecurrentGemma": _HEADS | {"lru_width": 16, "num_hidden_layers": 3},
    "FalconH1": _HEADS | _STATES | {"mamba_d_ssm": 32},
    "Lfm2": _BASE | {"layer_types": ["conv", "full_attention"], "block_ff_dim": 24},
    "Zamba2": _BASE | {
        "num_attention_heads": 4, "num_key_value_heads": 4, "mamba_d_state": 4, "n_mamba_heads": 4, "mamba_headdim": 8,
        "mamba_ngroups": 1, "chunk_size": 8, "layers_block_type": ["mamba", "hybrid"], "num_mem_blocks": 1,
        "use_mamba_kernels": False, "adapter_rank": 4,
    },
    "Qwen2Moe": _EXPERTS | _NAMED | {"moe_intermediate_size": 8, "shared_expert_intermediate_size": 8},
    "Olmoe": _EXPERTS | _NAMED, "FlexOlmo": _EXPERTS | _NAMED, "GraniteMoe": _EXPERTS | _LOCAL,
    "Phimoe": _EXPERTS | _LOCAL | {"num_experts_per_tok": 2, "router_jitter_noise": 0.0, "input_jitter_noise": 0.0},
    "GraniteMoeShared": _EXPERTS | _LOCAL | {"shared_intermediate_size": 8},
    "Ernie4_5_Moe": _EXPERTS | {"moe_num_experts": 3, "moe_k": 2, "moe_intermediate_size": 8, "head_dim": 8,
                                "moe_layer_start_index": 0},
    "MiniMax": _EXPERTS | _LOCAL | {"head_dim": 8}, "Doge": _BASE,
    "Jamba": _EXPERTS | _NAMED | {
        "mamba_d_state": 4, "mamba_dt_rank": 4, "attn_layer_period": 2, "attn_layer_offset": 1,
        "expert_layer_period": 2, "expert_layer_offset": 1, "use_mamba_kernels": False,
    },
    "GraniteMoeHybrid": _EXPERTS | _LOCAL | {
        "shared_intermediate_size": 8, "layer_types": ["attention", "attention"], "mamba_n_heads": 4, "mamba_d_head": 8,
    },
    "Qwen3Next": _EXPERTS | _NAMED | {
        "moe_intermediate_size": 8, "shared_expert_intermediate_size": 8, "head_dim": 8, "linear_num_value_heads": 2,
        "linear_num_key_heads": 1, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
        "layer_types": ["linear_attention", "full_attention"],
    },
}  # fmt: skip
SEQUENCES: dict[str, dict[str, Any]] = {
    "T5": _T5, "Bart": _BART, "MarianMTModel": _BART | {"decoder_vocab_size": VOCAB}, "SwitchTransformers": _SWITCH,
    # These shift labels themselves, without a method for it.
    "M2M100": _BART | {"encoder_layerdrop": 0.0, "decoder_layerdrop": 0.0}, "NllbMoe": _NLLB, "Blenderbot": _BART,
}  # fmt: skip
MORE_SEQUENCES: dict[str, dict[str, Any]] = {
    "MT5": _T5 | {"tie_word_embeddings": False}, "UMT5": _T5, "LongT5": _T5,
    **dict.fromkeys(("MBart", "Pegasus", "PegasusX", "PLBart", "BlenderbotSmall"), _BART),
    "BigBirdPegasus": _BART | {"attention_type": "original_full"},
    "LED": _BART | {
        "attention_window": 8, "max_encoder_position_embeddings": 32, "max_decoder_position_embeddings": 32,
    },
}  # fmt: skip

# ---- images and sound ------------------------------------------------------------------------------------------------

_EYE: dict[str, Any] = {
    "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 8,
    "patch_size": 4,
}  # fmt: skip
IMAGE = VOCAB - 1  # the token that stands for a part of an image


def words() -> Batch:
    """Rows of text, one of them padded, with labels of another number in each row."""
    batch = pad_rows(rows(3, seed=5))
    return {key: value.clamp(max=IMAGE - 3) for key, value in batch.items()}


def said() -> Tensor:
    """Labels of a decoder whose encoder reads an image or a sound."""
    return torch.cat([words()["input_ids"][:, :6], torch.full((3, 1), -100)], 1)


def seen(before: int = 0, **types: bool) -> Batch:
    """Text with an image of four parts behind the first tokens; `types` names a column that tells them apart."""
    text, part = torch.randint(3, IMAGE - 3, (3, 9)), torch.full((3, 4), IMAGE)
    ids = torch.cat([text[:, :before], part, text[:, before:]], 1)
    labels = ids.masked_fill(ids == IMAGE, -100)
    kinds = {name: (ids == IMAGE).long() for name in types}
    pixels = torch.randn(3, 3, 8, 8)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "pixel_values": pixels, "labels": labels} | kinds


def llava() -> tuple[Any, Batch]:
    eye = transformers.CLIPVisionConfig(**_EYE, projection_dim=16)
    config = transformers.LlavaConfig(
        vision_config=eye, text_config=transformers.LlamaConfig(**_BASE), image_token_index=IMAGE,
        vision_feature_layer=-1,
    )  # fmt: skip
    return transformers.LlavaForConditionalGeneration(config), seen(2)


def paligemma() -> tuple[Any, Batch]:
    """A prefix, in which all tokens see all others, and an answer."""
    config = transformers.PaliGemmaConfig(
        vision_config=transformers.SiglipVisionConfig(**_EYE), text_config=transformers.GemmaConfig(**_HEADS),
        image_token_index=IMAGE, projection_dim=16,
    )  # fmt: skip
    batch = seen()
    answer = (torch.arange(batch["labels"].shape[1]) > 7).expand_as(batch["labels"])
    batch |= {"token_type_ids": answer.long(), "labels": batch["labels"].masked_fill(~answer, -100)}
    return transformers.PaliGemmaForConditionalGeneration(config), batch


def paligemma_without_types() -> tuple[Any, Batch]:
    model, batch = paligemma()
    return model, {key: value for key, value in batch.items() if key != "token_type_ids"}


def gemma3() -> tuple[Any, Batch]:
    config = transformers.Gemma3Config(
        vision_config=transformers.SiglipVisionConfig(**_EYE), text_config=transformers.Gemma3TextConfig(**_HEADS),
        image_token_index=IMAGE, mm_tokens_per_image=4, boi_token_index=IMAGE - 2, eoi_token_index=IMAGE - 1,
    )  # fmt: skip
    return transformers.Gemma3ForConditionalGeneration(config), seen(2, token_type_ids=True)


def qwen2_vl() -> tuple[Any, Batch]:
    """All images of a batch in one tensor, which has no rows."""
    turns = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}
    config = transformers.Qwen2VLConfig(
        text_config=_BASE | {"rope_parameters": turns}, image_token_id=IMAGE, vision_start_token_id=IMAGE - 2,
        vision_end_token_id=IMAGE - 1, video_token_id=IMAGE - 3, vision_config={
            "depth": 1, "embed_dim": 16, "hidden_size": 16, "num_heads": 2, "mlp_ratio": 2, "patch_size": 4,
            "spatial_merge_size": 2, "temporal_patch_size": 2, "in_channels": 3,
        },
    )  # fmt: skip
    batch = seen(3, mm_token_type_ids=True) | {"image_grid_thw": torch.tensor([[1, 4, 4]] * 3)}
    return transformers.Qwen2VLForConditionalGeneration(config), batch | {"pixel_values": torch.randn(48, 96)}


def whisper() -> tuple[Any, Batch]:
    config = transformers.WhisperConfig(
        **{key: value for key, value in _BART.items() if key != "max_position_embeddings"}, num_mel_bins=4,
        max_source_positions=20, max_target_positions=32, begin_suppress_tokens=None,
    )  # fmt: skip
    return transformers.WhisperForConditionalGeneration(config), {
        "input_features": torch.randn(3, 4, 40), "labels": said(),
    }  # fmt: skip


def trocr() -> tuple[Any, Batch]:
    eye = transformers.ViTConfig(**_EYE, **_NO_BERT_DROPOUT)
    decoder = transformers.TrOCRConfig(
        **_BART, is_decoder=True, add_cross_attention=True, cross_attention_hidden_size=16
    )
    config = transformers.VisionEncoderDecoderConfig.from_encoder_decoder_configs(eye, decoder)
    config.decoder_start_token_id, config.pad_token_id = 2, 0
    return transformers.VisionEncoderDecoderModel(config), {"pixel_values": torch.randn(3, 3, 8, 8), "labels": said()}


def moonshine() -> tuple[Any, Batch]:
    config = transformers.MoonshineConfig(
        vocab_size=VOCAB, hidden_size=16, intermediate_size=24, encoder_num_hidden_layers=1,
        decoder_num_hidden_layers=1, encoder_num_attention_heads=2, decoder_num_attention_heads=2,
        decoder_start_token_id=1, pad_token_id=0,
    )  # fmt: skip
    return transformers.MoonshineForConditionalGeneration(config), {
        "input_values": torch.randn(3, 4000), "labels": said(),
    }  # fmt: skip


def pix2struct() -> tuple[Any, Batch]:
    text = {"vocab_size": VOCAB, "hidden_size": 16, "d_kv": 8, "d_ff": 24, "num_layers": 1, "num_heads": 2,
            "dropout_rate": 0.0, "decoder_start_token_id": 0, "pad_token_id": 0}  # fmt: skip
    eye = {"hidden_size": 16, "patch_embed_hidden_size": 12, "d_ff": 24, "d_kv": 8, "num_hidden_layers": 1,
           "num_attention_heads": 2, "seq_len": 8, "dropout_rate": 0.0}  # fmt: skip
    model = transformers.Pix2StructForConditionalGeneration(
        transformers.Pix2StructConfig(text_config=text, vision_config=eye)
    )
    places = torch.arange(1.0, 7).view(1, 6, 1).expand(3, 6, 1)
    patches = torch.cat([places, torch.ones(3, 6, 1), torch.randn(3, 6, 12)], -1)
    return model, {"flattened_patches": patches, "labels": said()}


OTHERS: dict[str, Callable[[], tuple[Any, Batch]]] = {
    "PaliGemma": paligemma, "Whisper": whisper, "TrOCR": trocr, "Llava": llava, "Qwen2VL": qwen2_vl
}  # fmt: skip
MORE_OTHERS = {"Gemma3": gemma3, "Moonshine": moonshine, "Pix2Struct": pix2struct}


# ---- the table -------------------------------------------------------------------------------------------------------


def made(name: str, fields: dict[str, Any], task: str = "ForCausalLM") -> Any:
    """The model of transformers with this name, of a config with these fields."""
    for end in ("LMHeadModel", "MTModel"):
        if name.endswith(end):
            name, task = name.removesuffix(end), end
    return build(name, fields, task, noise=0.1)


def case(name: str) -> tuple[Any, Batch]:
    """A model and a batch for it."""
    torch.manual_seed(0)
    if name in OTHERS | MORE_OTHERS:
        model, batch = (OTHERS | MORE_OTHERS)[name]()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.1 * torch.randn_like(parameter))
        return model, batch
    causal, sequences = CAUSAL | MORE_CAUSAL, SEQUENCES | MORE_SEQUENCES
    if name in causal:
        return made(name, causal[name]), words()
    return made(name, sequences[name], "ForConditionalGeneration"), words()


def objective_trainer(path: Path, model: Any, objective: str = "mle", **settings: Any) -> ObjectiveTrainer:
    return ObjectiveTrainer(model, arguments(path), pad_rows, rows(4), objective=objective, **settings)


def compare_with_own_loss(path: Path, model: Any, batch: Batch) -> None:
    """Loss and all gradients in training mode equal the ones of the model's own loss."""
    run = objective_trainer(path, model, cost=None)
    model.train()
    found: list[tuple[float, dict[str, Tensor]]] = []
    for loss in (lambda: model(**batch)["loss"], lambda: run.compute_loss(model, dict(batch))):
        model.zero_grad()
        value = loss()
        value.backward()
        gradients = {key: p.grad.clone() for key, p in model.named_parameters() if p.grad is not None}
        found.append((float(value.detach()), gradients))
    (expected, own), (actual, ours) = found
    assert actual == pytest.approx(expected, rel=1e-5)
    assert ours.keys() == own.keys()
    largest = max(float(gradient.norm()) for gradient in own.values())
    for key, gradient in own.items():
        assert float((ours[key] - gradient).norm()) <= 1e-4 * float(gradient.norm()) + 1e-6 * largest, key


MORE = [*MORE_CAUSAL, *MORE_SEQUENCES, *MORE_OTHERS]


@pytest.mark.parametrize(
    "name", [*CAUSAL, *SEQUENCES, *OTHERS, *(pytest.param(name, marks=pytest.mark.slow) for name in MORE)]
)
def test_an_architecture_trains_as_by_its_own_loss(tmp_path: Path, name: str) -> None:
    compare_with_own_loss(tmp_path, *case(name))


class OfImages(transformers.LlamaForCausalLM):
    """Takes a list of images, of several sizes, one for each row."""

    def forward(self, input_ids: Any, attention_mask: Any = None, images: Any = (), **others: Any) -> Any:
        embeds = self.get_input_embeddings()(input_ids) + torch.stack([image.mean() for image in images])[:, None, None]
        return super().forward(None, attention_mask, inputs_embeds=embeds, **others)


def test_a_batch_with_lists_is_not_cut(tmp_path: Path) -> None:
    """Outputs of an encoder in a tuple, and a list of images."""
    model, batch = case("T5")
    encoded = model.get_encoder()(batch.pop("input_ids"), batch["attention_mask"]).last_hidden_state.detach()
    compare_with_own_loss(tmp_path, model, batch | {"encoder_outputs": (encoded,)})
    images = [torch.randn(size) for size in (2, 5, 3)]
    compare_with_own_loss(tmp_path, OfImages(transformers.LlamaConfig(**_BASE)), words() | {"images": images})


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_padding_of_a_mask_of_pairs_may_see_all(tmp_path: Path, attention: str) -> None:
    """A causal mask to add, whose rows of padding are all the least number; a mask that is not causal still raises."""
    (model, batch), least = case("Llama"), torch.finfo(torch.float32).min
    model.set_attn_implementation(attention)
    token = batch["attention_mask"].bool()
    pairs = token[:, None] & token[:, :, None]
    causal = torch.where(pairs.tril(), 0.0, least)[:, None]
    compare_with_own_loss(tmp_path, model, batch | {"attention_mask": causal})
    both = batch | {"attention_mask": torch.where(pairs, 0.0, least)[:, None]}
    with pytest.raises(ValueError, match="sees the tokens to its right"):
        objective_trainer(tmp_path, model).compute_loss(model, both)


@pytest.mark.parametrize("kind", ["IA3Config", "PrefixTuningConfig"])
def test_adapters_train_as_by_the_own_loss(tmp_path: Path, kind: str) -> None:
    peft = pytest.importorskip("peft")
    more = {"num_virtual_tokens": 3} if kind == "PrefixTuningConfig" else {}
    model, batch = case("Llama")
    compare_with_own_loss(
        tmp_path, peft.get_peft_model(model, getattr(peft, kind)(task_type="CAUSAL_LM", **more)), batch
    )


def embedded(model: Any) -> tuple[Any, Batch]:
    """A batch of embeddings instead of tokens."""
    batch = words()
    return model, batch | {"inputs_embeds": model.get_input_embeddings()(batch.pop("input_ids")).detach()}


def after_one_token(model: Any) -> tuple[Any, Batch]:
    """A batch whose first row has a single token."""
    batch = words()
    batch["attention_mask"][0, 1:], batch["labels"][0, 1:] = 0, -100
    return model, batch


def paligemma_of_prefixes() -> tuple[Any, Batch]:
    """All rows but the first are prefix, and labelled."""
    model, batch = paligemma()
    batch["token_type_ids"][1:] = 0
    batch["labels"][1:] = batch["input_ids"][1:].masked_fill(batch["input_ids"][1:] == IMAGE, -100)
    return model, batch


def with_loss(change: Callable[[Any, Any], Any], name: str = "Llama", *, keywords: bool = False) -> tuple[Any, Batch]:
    """A model whose loss is changed by `change(model, output)`."""
    parent: Any = getattr(transformers, f"{name}ForCausalLM")

    class Changed(parent):
        def forward(self, input_ids: Any = None, attention_mask: Any = None, labels: Any = None, **others: Any) -> Any:
            output = super().forward(input_ids, attention_mask, labels=labels, **others)
            if labels is not None:
                output["loss"] = change(self, output)
            return output

    class Forwards(Changed):
        def forward(self, *args: Any, **others: Any) -> Any:
            return super().forward(*args, **others)

    config = getattr(transformers, f"{name}Config")(**CAUSAL[name])
    return (Forwards if keywords else Changed)(config), words()


class SeesLabels(transformers.LlamaForCausalLM):
    def forward(self, input_ids: Any, attention_mask: Any = None, labels: Any = None, **others: Any) -> Any:
        ids = input_ids if labels is None else input_ids.flip(0)
        return super().forward(ids, attention_mask, labels=labels, **others)


class SeesLabelsInTraining(transformers.LlamaForCausalLM):
    def forward(self, input_ids: Any, attention_mask: Any = None, labels: Any = None, **others: Any) -> Any:
        if labels is not None and self.training:
            others["position_ids"] = torch.arange(input_ids.shape[1]).flip(0).expand_as(input_ids)
        return super().forward(input_ids, attention_mask, labels=labels, **others)


# name -> (model and batch, message)
REFUSED: dict[str, tuple[Callable[[], tuple[Any, Batch]], str]] = {
    "encoder": (lambda: (made("BertLMHeadModel", _BASE), words()), r"BertLMHeadModel\) sees the tokens to its right"),
    "permutations": (lambda: (made("XLNetLMHeadModel", {
        "vocab_size": VOCAB, "d_model": 16, "n_layer": 2, "n_head": 2, "d_inner": 24, "dropout": 0.0,
    }), words()), r"XLNetLMHeadModel\) sees the tokens to its right"),
    "prefix": (paligemma_without_types, r"PaliGemmaForConditionalGeneration\) sees the tokens to its right"),
    "unshifted": (lambda: (made("TrOCR", _BART), words()),
                  r"TrOCRForCausalLM scores label t at position t.*shift_labels"),
    "z-loss": (lambda: (made("Bamba", CAUSAL["Bamba"] | {"z_loss_coefficient": 0.01}), words()),
               r"loss of BambaForCausalLM is .* has a term .* model.z_loss_coefficient = 0 and .* z_loss="),
    "NLLB-MoE": (lambda: (made("NllbMoe", _NLLB | {"output_router_logits": True}, "ForConditionalGeneration"), words()),
                 r"\(encoder_aux_loss, decoder_aux_loss\) set model.config.output_router_logits = False"),
    "Switch": (lambda: (case("SwitchTransformers")[0], words() | {"output_router_logits": True}),
               "encoder_z_loss, decoder_z_loss, encoder_aux_loss, decoder_aux_loss"),
    "smoothing": (lambda: (made("ProphetNet", _NO_DROPOUT | {
        "vocab_size": VOCAB, "hidden_size": 16, "encoder_ffn_dim": 24, "num_encoder_layers": 1, "pad_token_id": 0,
        "num_encoder_attention_heads": 2, "decoder_ffn_dim": 24, "num_decoder_layers": 1, "decoder_start_token_id": 0,
        "num_decoder_attention_heads": 2, "max_position_embeddings": 32,
    }, "ForConditionalGeneration"), words()), "loss of ProphetNetForConditionalGeneration is .* switch it off"),
    "z-loss of embeddings": (lambda: embedded(made("Bamba", CAUSAL["Bamba"] | {"z_loss_coefficient": 0.01})),
                             "loss of BambaForCausalLM is .* has a term"),
    "encoder of embeddings": (lambda: embedded(made("BertLMHeadModel", _BASE)), "sees the tokens to its right"),
    "unshifted embeddings": (lambda: embedded(made("TrOCR", _BART)), "scores label t at position t"),
    "encoder after one token": (lambda: after_one_token(made("BertLMHeadModel", _BASE)), "sees the tokens to its"),
    # The scores of its experts are reshaped so that they belong to other tokens, later ones too.
    "experts of later tokens": (lambda: (made("Doge", _EXPERTS | {"num_experts": 4, "is_moe": True}), words()),
                                r"DogeForCausalLM\) sees the tokens to its right"),
    "rows of a prefix": (paligemma_of_prefixes, "sees the tokens to its right"),
    "keywords": (lambda: with_loss(lambda model, output: 3 * output["loss"], keywords=True), "loss of Forwards is"),
    "in training": (lambda: with_loss(lambda model, output: output["loss"] + 0.1 * model.training),
                    "loss of Changed is .* switch it off"),
    "experts and a term": (lambda: with_loss(lambda model, output: output["loss"] + 0.1, "Mixtral"), "switch it off"),
    "experts weighed twice": (lambda: with_loss(lambda model, output: output["loss"] + 0.3 * output["aux_loss"],
                                                "Mixtral"), "has a term that an objective would leave out"),
    "labels as inputs": (lambda: (SeesLabels(transformers.LlamaConfig(**_BASE)), words()),
                         "logits of SeesLabels are others when it gets labels"),
    "labels as inputs in training": (lambda: (SeesLabelsInTraining(transformers.LlamaConfig(**_BASE)), words()),
                                     "logits of SeesLabelsInTraining are others when it gets labels"),
    "experts weighed a bit more": (lambda: with_loss(lambda model, output: output["loss"] + 0.001 * output["aux_loss"],
                                                     "Mixtral"), "has a term that an objective would leave out"),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:.*is_decoder")
@pytest.mark.parametrize("name", REFUSED)
def test_a_model_with_another_loss_raises_on_its_first_batch(tmp_path: Path, name: str) -> None:
    (make, message), model = REFUSED[name], None
    model, batch = make()
    run = objective_trainer(tmp_path, model, cost=None)
    before = weights(model)
    for mode in (True, False):
        with pytest.raises(ValueError, match=message):
            run.compute_loss(model.train(mode), dict(batch))
    assert all(torch.equal(before[key], weight) for key, weight in weights(model).items())


def test_a_batch_that_shows_nothing_leaves_the_examination_to_the_next(tmp_path: Path) -> None:
    """Rows of one token, in which nothing is predicted; random numbers of the run are not used up."""
    model, batch = REFUSED["z-loss"][0]()
    single = {"input_ids": torch.tensor([[5], [6]]), "labels": torch.tensor([[5], [6]])}
    run = objective_trainer(tmp_path, model, cost=None)
    state = torch.get_rng_state()
    assert run.compute_loss(model, single) == 0
    assert torch.equal(torch.get_rng_state(), state)
    with pytest.raises(ValueError, match="loss of BambaForCausalLM is"):
        run.compute_loss(model, dict(batch))
    with pytest.raises(ValueError, match=r"neither input_ids nor inputs_embeds.*put one of them into the batch"):
        run.compute_loss(model, {"labels": batch["labels"]})


def test_a_label_of_the_last_position_alone_is_enough(tmp_path: Path) -> None:
    """It predicts a token that is not in the row, which only labels of the user's own alignment can."""
    for name in ("encoder", "permutations", "z-loss"):
        model, batch = REFUSED[name][0]()
        labels = torch.full_like(batch.pop("labels"), -100)
        labels[:, -1] = 5
        run = objective_trainer(tmp_path, model, cost=None)
        for mode in (True, False):
            with pytest.raises(ValueError, match=REFUSED[name][1]):
                run.compute_loss(model.train(mode), batch | {"shift_labels": labels})


class Normalised(transformers.LlamaForCausalLM):
    """A model with the state that others have: statistics of batches, a counter, masks drawn by numpy."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.statistics = torch.nn.BatchNorm1d(config.hidden_size)
        self.register_buffer("load", torch.zeros(3, dtype=torch.int64))

    def forward(self, input_ids: Any, attention_mask: Any = None, labels: Any = None, **others: Any) -> Any:
        embeds = self.statistics(self.get_input_embeddings()(input_ids).transpose(1, 2)).transpose(1, 2)
        if self.training:
            self.load = self.load + 1
            embeds = embeds * (1 + 0.1 * np.random.rand())
        return super().forward(None, attention_mask, inputs_embeds=embeds, labels=labels, **others)


def test_the_first_batch_leaves_no_trace(tmp_path: Path) -> None:
    """An evaluation changes no buffer, and a training has the statistics, draws and losses of transformers' trainer."""
    model = Normalised(transformers.LlamaConfig(**_BASE))
    other, before = copy.deepcopy(model), copy.deepcopy(model.state_dict())
    data = [{"input_ids": row["input_ids"][:6], "labels": [-100, *row["input_ids"][1:6]]} for row in rows(12)]
    args = arguments(tmp_path, optim="sgd")
    ours = ObjectiveTrainer(model, args, pad_rows, data, data, objective="mle", cost=None)
    plain = transformers.Trainer(other, args, pad_rows, data, data)
    assert ours.evaluate()["eval_loss"] == pytest.approx(plain.evaluate()["eval_loss"], rel=1e-5)
    torch.testing.assert_close(model.state_dict(), before, rtol=0.0, atol=0.0)
    ours._is_examined = False  # as in a training that begins without an evaluation
    for run in (ours, plain):
        run.train()
    assert logs(ours, "loss") == pytest.approx(logs(plain, "loss"), rel=1e-5)
    torch.testing.assert_close(model.state_dict(), other.state_dict(), rtol=1e-5, atol=1e-6)


def test_equally_many_images_as_rows_need_not_be_one_for_each_row(tmp_path: Path) -> None:
    model, text = case("Llava")[0], torch.randint(3, IMAGE - 3, (4, 13))
    text[2:, 1:9] = IMAGE  # two images
    batch = {
        "input_ids": text,
        "labels": text.masked_fill(text == IMAGE, -100),
        "pixel_values": torch.randn(4, 3, 8, 8),
    }
    compare_with_own_loss(tmp_path, model, batch)


def test_a_model_that_cannot_be_fused_raises_at_once(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    languages = {"langs": ["en", "de"], "src_vocab_size": VOCAB, "tgt_vocab_size": VOCAB}
    fsmt = made("FSMT", _BART | languages, "ForConditionalGeneration")
    with pytest.raises(TypeError, match=r"FSMTForConditionalGeneration names an embedding as its output layer"):
        objective_trainer(tmp_path, fsmt)
    for kind in ("PromptTuning", "PromptEncoder"):
        settings = getattr(peft, f"{kind}Config")(num_virtual_tokens=3, task_type="CAUSAL_LM")
        with pytest.raises(ValueError, match=f"PEFT's {kind}, which puts virtual tokens before the text.*Use LoRA"):
            objective_trainer(tmp_path, peft.get_peft_model(case("Llama")[0], settings))


def test_sequences_that_are_packed_do_not_see_each_other_in_a_text_model_of_another(tmp_path: Path) -> None:
    """Its config asks for a cache, beside which transformers does not look for sequences."""
    model, texts = case("Llava")[0], [torch.randint(3, IMAGE - 3, (length,)).tolist() for length in (6, 9)]
    alone = [{"input_ids": ids, "labels": [-100, *ids[1:]]} for ids in texts]
    packed = {name: alone[0][name] + alone[1][name] for name in alone[0]} | {"position_ids": [*range(6), *range(9)]}
    found = [objective_trainer(tmp_path, model).evaluate(data)["eval_nll"] for data in (alone, [packed])]
    assert found[1] == pytest.approx(found[0], rel=1e-5)


@pytest.mark.filterwarnings("ignore:Version v4.12.0")  # EncoderDecoderModel warns whenever it makes a loss
@pytest.mark.parametrize("start", [2, 0])
def test_a_decoder_does_not_see_padding_and_ignored_labels_where_the_model_masks_them(
    tmp_path: Path, start: int
) -> None:
    """EncoderDecoderModel does, also a start that is the padding token, as usual for GPT-2."""
    bert = transformers.BertConfig(**_BASE | _NO_BERT_DROPOUT)
    both = transformers.BertConfig(**_BASE | _NO_BERT_DROPOUT, is_decoder=True, add_cross_attention=True)
    config = transformers.EncoderDecoderConfig.from_encoder_decoder_configs(bert, both)
    config.decoder_start_token_id, config.pad_token_id = start, 0
    model, batch = transformers.EncoderDecoderModel(config), words() | {"labels": said()}
    compare_with_own_loss(tmp_path, model, batch)
    batch["labels"][1:, :2] = -100
    compare_with_own_loss(tmp_path, model, batch)
    mask = (batch["labels"] != -100).long()
    mask[:, 1] = 0
    compare_with_own_loss(tmp_path, model, batch | {"decoder_attention_mask": mask})


# ---- whole trainings -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["Whisper", "TrOCR"])
def test_rows_of_images_and_sound_need_no_collator(tmp_path: Path, name: str) -> None:
    """Rows that are equally long are stacked, as by transformers' trainer, whose training is the same."""
    model, batch = case(name)
    other, data = copy.deepcopy(model), [{key: value[i] for key, value in batch.items()} for i in range(3)]
    args = arguments(tmp_path, optim="sgd", max_steps=2)
    ours = ObjectiveTrainer(model, args, None, data, data, objective="mle")
    plain = transformers.Trainer(other, args, None, data, data)
    ours.train(), plain.train()
    assert logs(ours, "loss") == pytest.approx(logs(plain, "loss"), rel=1e-5)
    assert_same_weights(model, other, 1e-5)
    assert ours.evaluate()["eval_transport_cost"] > 0


class Both(ObjectiveMixin, transformers.Seq2SeqTrainer):
    pass


@pytest.mark.parametrize("name", ["T5", "Blenderbot"])
def test_accumulated_batches_of_a_decoder_are_those_of_its_logits(tmp_path: Path, name: str) -> None:
    """With a cost of numbers, a mean of its own; and `predict_with_generate`."""
    model, data = case(name)[0], rows(8)
    cost, objective, batch = NumberCost(torch.arange(float(VOCAB))), NumberToken(0.3), pad_rows(data)
    expected = token_loss(model(**batch).logits, batch["labels"], objective=objective, cost=cost)
    expected.loss.backward()
    trained, before = copy.deepcopy(model), weights(model)
    args = arguments(
        tmp_path, transformers.Seq2SeqTrainingArguments, optim="sgd", learning_rate=1.0, max_steps=1,
        per_device_train_batch_size=4, gradient_accumulation_steps=2, predict_with_generate=True,
        generation_max_length=4,
    )  # fmt: skip
    run = Both(trained, args, pad_rows, data, data, objective=objective, cost=cost)
    scores = run.evaluate()
    assert run.predict([{"input_ids": row["input_ids"]} for row in data]).predictions.shape[0] == len(data)
    assert run.prediction_step(run.model, pad_rows(data), False, num_beams=2)[0] is not None
    run.train()
    valid = batch["labels"] != -100
    for key, values in (("nll", expected.nll), ("transport_cost", expected.cost)):
        assert values is not None
        assert scores[f"eval_{key}"] == pytest.approx(float(values[valid].mean()), rel=1e-4)
        assert logs(run, key)[0] == pytest.approx(float(values[valid].mean()), rel=1e-4)
    assert scores["eval_loss"] == pytest.approx(float(expected.loss.detach()), rel=1e-4)
    after = weights(trained)
    for key, parameter in model.named_parameters():
        gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        bound = 1e-4 * float(gradient.abs().max()) + 1e-6
        torch.testing.assert_close(before[key] - after[key], gradient, rtol=1e-3, atol=bound)
