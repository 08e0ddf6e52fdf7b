"""Continuations sampled from a language model, by default ancestrally: from the distribution itself.

Ancestral sampling (temperature 1, no top-k, no nucleus) is the protocol of the EMO paper: it shows the learnt
distribution, which truncated decoding hides. Of a model's `generation_config` only the ids that end a text are used.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from benchmarks.paper.data.blocks import opening_ids
from otloss_llm.evaluation.perplexity import check_vocabulary, context_length
from otloss_llm.models.heads import evaluation_mode, is_encoder_decoder

if TYPE_CHECKING:
    from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase


@dataclass(frozen=True)
class Sample:
    """One sampled continuation.

    `prompt_ids` are the ids the model was given (BOS or EOS alone without a prompt), `token_ids` those it gave,
    with the end-of-text id last if there was one (`finished`). `continuation` is their text without special tokens.
    """

    prompt: str
    continuation: str
    prompt_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    finished: bool

    @property
    def text(self) -> str:
        """Prompt and continuation."""
        return self.prompt + self.continuation


def sample_texts(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    *,
    max_new_tokens: int,
    prompts: Sequence[str] | None = None,
    num_samples: int = 1,
    temperature: float = 1.0,
    top_p: float = 1.0,
    top_k: int = 0,
    batch_size: int = 16,
    seed: int = 0,
    progress: bool = True,
) -> list[Sample]:
    """`num_samples` sampled continuations of every prompt, in the order of the prompts.

    Without prompts, or for an empty one, texts start from BOS (else EOS). `temperature` 0 decodes greedily; `top_k` 0
    and `top_p` 1 leave the distribution whole. One `seed` and `batch_size` give one result; the global random state
    is left as it was. The model samples in eval mode and is left as it was.

    The encoder of an encoder-decoder reads the prompts, of which none may be empty, and the continuation is what its
    decoder writes.

    Raises ValueError if a setting is out of range, or a prompt and `max_new_tokens` exceed the model's context.
    """
    from tqdm import tqdm

    _check_settings(max_new_tokens, num_samples, temperature, top_p, top_k, batch_size)
    if isinstance(prompts, str):
        raise TypeError("prompts is one string, expected a list of them; pass [prompt].")
    prompts = [""] if prompts is None else list(prompts)
    both = is_encoder_decoder(model)
    inputs = [_prompt_ids(tokenizer, prompt, both) for prompt in prompts]
    _check_inputs(model, prompts, inputs, max_new_tokens)
    settings = _generation_config(
        model, tokenizer, max_new_tokens=max_new_tokens, temperature=temperature, top_p=top_p, top_k=top_k
    )
    jobs = [i for i in range(len(prompts)) for _ in range(num_samples)]
    samples: list[Sample] = []
    bar = tqdm(total=len(jobs), desc="sampling", unit="text", disable=not progress, delay=2.0, leave=False)
    with evaluation_mode(model), _own_defaults(model), _seeded(model.device, seed), bar:
        for start in range(0, len(jobs), batch_size):
            batch = jobs[start : start + batch_size]
            rows = _generate(model, [inputs[i] for i in batch], settings)
            samples += [
                _sample(tokenizer, prompts[i], inputs[i], row, joined=not both)
                for i, row in zip(batch, rows, strict=True)
            ]
            bar.update(len(batch))
    return samples


def _prompt_ids(tokenizer: Any, prompt: str, encoder_decoder: bool) -> list[int]:
    start = tokenizer.eos_token_id if tokenizer.bos_token_id is None else tokenizer.bos_token_id
    settings = {"truncation": False, "padding": False, "verbose": False}
    ids: list[int] = tokenizer(prompt, add_special_tokens=encoder_decoder, **settings)["input_ids"]
    if encoder_decoder:
        if not prompt or not ids:
            raise ValueError("an encoder-decoder has no text without a prompt; give prompts that are not empty.")
        return ids
    if ids:
        return [*opening_ids(tokenizer), *ids]
    if start is None:
        raise ValueError("the tokenizer has neither BOS nor EOS to start a text from; give prompts, or set one first.")
    return [start]


def _generation_config(model: Any, tokenizer: Any, *, temperature: float, **settings: Any) -> GenerationConfig:
    from transformers import GenerationConfig

    end_ids = _end_ids(model, tokenizer)
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else (end_ids or [0])[0]
    special = {"pad_token_id": pad, "eos_token_id": end_ids or None, "bos_token_id": tokenizer.bos_token_id}
    if is_encoder_decoder(model):
        special["decoder_start_token_id"] = model.config.decoder_start_token_id
    if temperature == 0:
        return GenerationConfig(do_sample=False, max_new_tokens=settings["max_new_tokens"], **special)
    return GenerationConfig(do_sample=True, temperature=temperature, **settings, **special)


def _end_ids(model: Any, tokenizer: Any) -> list[int]:
    """Return ids that end a text: the tokenizer's EOS, and those that chat models add."""
    own = model.generation_config.eos_token_id
    ids = set(own) if isinstance(own, (list, tuple)) else {own}
    # A configuration's default EOS (2 for Llama) may be an ordinary word of another tokenizer.
    end_ids = {
        id_ for id_ in ids if id_ in tokenizer.added_tokens_decoder and tokenizer.added_tokens_decoder[id_].special
    }
    return sorted(end_ids | ({tokenizer.eos_token_id} - {None}))


def _generate(model: Any, rows: list[list[int]], settings: GenerationConfig) -> list[tuple[list[int], bool]]:
    """Return new ids per row, cut after the first end id, and whether there was one."""
    width = max(map(len, rows))
    ids = torch.full((len(rows), width), settings.pad_token_id, dtype=torch.long)
    mask = torch.zeros_like(ids)
    both = is_encoder_decoder(model)
    for i, row in enumerate(rows):
        # Padded on the left, so that every row continues from its last column; an encoder's positions begin at 0.
        place = slice(0, len(row)) if both else slice(width - len(row), width)
        ids[i, place] = torch.tensor(row)
        mask[i, place] = 1
    out: Tensor = model.generate(
        input_ids=ids.to(model.device), attention_mask=mask.to(model.device), generation_config=settings
    )
    end_ids = set(settings.eos_token_id or [])
    results = []
    for new in out[:, 1 if both else width :].tolist():  # a decoder begins with a token of its own
        length = next((i + 1 for i, id_ in enumerate(new) if id_ in end_ids), None)
        results.append((new[:length], length is not None))
    return results


def _sample(
    tokenizer: Any, prompt: str, prompt_ids: list[int], result: tuple[list[int], bool], *, joined: bool
) -> Sample:
    new, finished = result
    # Decoded together with the prompt that it continues: alone, some tokenizers drop the blank of the first word.
    ids = prompt_ids if joined else []
    before = tokenizer.decode(ids, skip_special_tokens=True)
    whole = tokenizer.decode([*ids, *new], skip_special_tokens=True)
    text = whole[len(before) :] if whole.startswith(before) else tokenizer.decode(new, skip_special_tokens=True)
    return Sample(prompt, text, tuple(prompt_ids), tuple(new), finished)


@contextmanager
def _own_defaults(model: Any) -> Iterator[None]:
    """Hide the model's generation defaults, from which `generate` takes settings that its argument leaves unset."""
    from transformers import GenerationConfig

    owners = [model] + ([model.get_base_model()] if hasattr(model, "get_base_model") else [])
    saved = [owner.generation_config for owner in owners]
    for owner in owners:
        owner.generation_config = GenerationConfig()
    try:
        yield
    finally:
        for owner, defaults in zip(owners, saved, strict=True):
            owner.generation_config = defaults


@contextmanager
def _seeded(device: torch.device, seed: int) -> Iterator[None]:
    """Seed the generators that `generate` draws from, and restore their state afterwards."""
    on_cpu = device.type == "cpu"
    devices = [] if on_cpu else list(range(torch.get_device_module(device).device_count()))
    with torch.random.fork_rng(devices=devices, device_type="cuda" if on_cpu else device.type):
        torch.manual_seed(seed)
        yield


def _check_settings(
    max_new_tokens: int, num_samples: int, temperature: float, top_p: float, top_k: int, batch_size: int
) -> None:
    counts = {"max_new_tokens": max_new_tokens, "num_samples": num_samples, "batch_size": batch_size}
    for name, value in counts.items():
        if value < 1:
            raise ValueError(f"{name} is {value}, expected 1 or more.")
    if not 0 <= temperature < float("inf"):
        raise ValueError(f"temperature is {temperature}, expected 0 (greedy) or a positive number.")
    if not 0 < top_p <= 1:
        raise ValueError(f"top_p is {top_p}, expected a share in (0, 1]; 1 leaves the distribution whole.")
    if top_k < 0:
        raise ValueError(f"top_k is {top_k}, expected 0 (off) or the number of tokens to keep.")


def _check_inputs(model: Any, prompts: list[str], inputs: list[list[int]], max_new_tokens: int) -> None:
    if not prompts:
        raise ValueError("prompts is an empty list; give at least one, or None to start from the beginning of a text.")
    check_vocabulary(model, min(map(min, inputs)), max(map(max, inputs)))
    context = context_length(model)
    longest = max(range(len(inputs)), key=lambda i: len(inputs[i]))
    if context is not None and len(inputs[longest]) + max_new_tokens > context:
        raise ValueError(
            f"prompt {longest} ({prompts[longest][:40]!r}...) has {len(inputs[longest])} tokens, and with "
            f"max_new_tokens={max_new_tokens} exceeds the model's context of {context}; shorten one of them."
        )
