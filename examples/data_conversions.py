"""Files that are made of downloaded ones, for `data.py`: a Llama of llama2.c, word vectors of R.

A conversion returns the bytes of a file, by its name and the bytes of what it needs. The results are those that the
examples and the pages were made with, byte for byte.
"""

from __future__ import annotations

import io
import json
import lzma
import struct
from collections.abc import Callable
from typing import Any

import numpy as np

UNKNOWN, START, END = "<unk>", "<s>", "</s>"


def llama2c(name: str, model: bytes, tokens: bytes) -> bytes:
    """A file of the folder that AutoModelForCausalLM and AutoTokenizer load.

    `model` has seven numbers, then the weights, per kind and layer; `tokens` has the score, the length and the text of
    each token (github.com/karpathy/llama2.c, export.py and tokenizer.py).
    """
    width, hidden, layers, heads, key_heads, vocabulary, context = struct.unpack_from("<7i", model)
    ends = {"bos_token_id": 1, "eos_token_id": 2}
    made = {"transformers_version": "5.23.0", "use_cache": True}
    if name == "config.json":
        return _json({
            "architectures": ["LlamaForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, **ends,
            "dtype": "float32", "head_dim": width // heads, "hidden_act": "silu", "hidden_size": width,
            "initializer_range": 0.02, "intermediate_size": hidden, "max_position_embeddings": context,
            "mlp_bias": False, "model_type": "llama", "num_attention_heads": heads, "num_hidden_layers": layers,
            "num_key_value_heads": key_heads, "pad_token_id": None, "pretraining_tp": 1, "rms_norm_eps": 1e-5,
            "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"}, "tie_word_embeddings": True,
            "vocab_size": vocabulary, **made,
        }) + b"\n"  # fmt: skip
    if name == "generation_config.json":
        quiet = {"output_attentions": False, "output_hidden_states": False}
        return _json({"_from_model_config": True, **ends, **quiet, **made}) + b"\n"
    if name == "tokenizer_config.json":
        special = {"bos_token": START, "eos_token": END, "unk_token": UNKNOWN}
        return _json({"backend": "tokenizers", "model_max_length": int(1e30), "tokenizer_class": "TokenizersBackend",
                      **special}) + b"\n"  # fmt: skip
    return _tokenizer(tokens) if name == "tokenizer.json" else _weights(model)


def _json(content: dict[str, Any], *, sort: bool = True) -> bytes:
    return json.dumps(content, indent=2, ensure_ascii=False, sort_keys=sort).encode()


def _weights(model: bytes) -> bytes:
    """Return the weights in the safetensors format."""
    from safetensors.numpy import save

    width, hidden, layers, heads, key_heads, vocabulary, _ = struct.unpack_from("<7i", model)
    numbers, keys = np.frombuffer(model, "<f4", offset=28), key_heads * (width // heads)
    made = {"model.embed_tokens.weight": numbers[: vocabulary * width].reshape(vocabulary, width)}
    at = vocabulary * width
    for part, shape in {
        "input_layernorm": (width,), "self_attn.q_proj": (width, width), "self_attn.k_proj": (keys, width),
        "self_attn.v_proj": (keys, width), "self_attn.o_proj": (width, width), "post_attention_layernorm": (width,),
        "mlp.gate_proj": (hidden, width), "mlp.down_proj": (width, hidden), "mlp.up_proj": (hidden, width),
    }.items():  # fmt: skip
        for layer in range(layers):
            weight = numbers[at : at + int(np.prod(shape))].reshape(shape)
            if part in ("self_attn.q_proj", "self_attn.k_proj"):  # positions rotate neighbours there, halves here
                weight = weight.reshape(-1, width // heads // 2, 2, width).transpose(0, 2, 1, 3).reshape(shape)
            made[f"model.layers.{layer}.{part}.weight"] = np.ascontiguousarray(weight)
            at += weight.size
    made["model.norm.weight"] = numbers[at : at + width]
    return save(made, metadata={"format": "pt"})


def _tokenizer(tokens: bytes) -> bytes:
    pieces, at = [], 4
    while at < len(tokens):
        length = struct.unpack_from("<fi", tokens, at)[1]
        pieces.append(tokens[at + 8 : at + 8 + length].decode().replace(" ", "▁"))
        at += 8 + length
    pieces[:3] = UNKNOWN, START, END
    ids = {piece: k for k, piece in enumerate(pieces)}
    splits = [[piece[:k], piece[k:]] for piece in pieces[259:] for k in range(1, len(piece))]  # after all bytes
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    text, pair = ({"Sequence": {"id": which, "type_id": k}} for k, which in enumerate("AB"))
    return _json({
        "version": "1.0", "truncation": None, "padding": None,
        "added_tokens": [{"id": k, "content": piece, **plain} for k, piece in enumerate(pieces[:3])],
        "normalizer": {"type": "Sequence", "normalizers": [
            {"type": "Prepend", "prepend": "▁"}, {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}]},
        "pre_tokenizer": None,
        "post_processor": {
            "type": "TemplateProcessing", "single": [{"SpecialToken": {"id": START, "type_id": 0}}, text],
            "pair": [text, pair], "special_tokens": {START: {"id": START, "ids": [1], "tokens": [START]}}},
        "decoder": {"type": "Sequence", "decoders": [
            {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}, {"type": "ByteFallback"},
            {"type": "Fuse"}, {"type": "Strip", "content": " ", "start": 1, "stop": 0}]},
        "model": {
            "type": "BPE", "dropout": None, "unk_token": UNKNOWN, "continuing_subword_prefix": None,
            "end_of_word_suffix": None, "fuse_unk": True, "byte_fallback": True, "ignore_merges": False,
            "vocab": ids, "merges": [parts for parts in splits if set(parts) <= set(ids)]},
    }, sort=False)  # fmt: skip


def glove(name: str, packed: bytes) -> bytes:
    """Arrays `words` (n,) and `vectors` (n, d), of a matrix of R: its name, numbers by column, `dim` and `dimnames`."""
    raw, title = lzma.decompress(packed), b"glove_twitter_25d"
    at = raw.index(title) + len(title) + 4
    count = int.from_bytes(raw[at : at + 4], "big")
    numbers = np.frombuffer(raw, ">f8", count, at + 4)
    at = raw.index(b"dimnames", at + 4 + 8 * count) + len(b"dimnames") + 12  # the list of both, then the vector's type
    rows = int.from_bytes(raw[at : at + 4], "big")
    words, at = [], at + 4
    for _ in range(rows):
        length = int.from_bytes(raw[at + 4 : at + 8], "big")
        words.append(raw[at + 8 : at + 8 + length].decode())
        at += 8 + length
    made = io.BytesIO()
    np.savez_compressed(made, words=np.array(words), vectors=numbers.reshape(-1, rows).T.astype(np.float32))
    return made.getvalue()


def gpt2(name: str) -> bytes:
    """The settings of the tokenizer of GPT-2."""
    end = dict.fromkeys(("bos_token", "eos_token", "unk_token"), "<|endoftext|>")
    content = {"tokenizer_class": "GPT2Tokenizer", "model_max_length": 1024, **end, "add_prefix_space": False}
    return json.dumps(content, separators=(",", ":")).encode() + b"\n"


# What each needs, and the function.
CONVERSIONS: dict[str, tuple[tuple[str, ...], Callable[..., bytes]]] = {
    "llama2c": (("originals/stories260K.bin", "originals/tok512.bin"), llama2c),
    "glove": (("originals/glove_twitter_25d.rda",), glove),
    "gpt2": ((), gpt2),
}
