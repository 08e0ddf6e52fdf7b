"""A tokenizer for text, where none is at hand."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from otloss._checks import install_hint, missing_package

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

__all__ = ["train_bpe_tokenizer"]

END_OF_TEXT = "<|endoftext|>"


def train_bpe_tokenizer(
    texts: Iterable[str],
    vocab_size: int,
    *,
    split_digits: bool = False,
) -> PreTrainedTokenizerFast:
    """Return a byte-level BPE tokenizer, trained on `texts`, whose decoding gives every text back unchanged.

    `<|endoftext|>` has id 0 and serves as end, beginning and padding token; it is never added to a text
    automatically. Training is deterministic. `vocab_size` counts it and the 256 bytes; the vocabulary is smaller if the
    texts have too few pairs that occur twice. With `split_digits` every digit is a token of its own.

    Raises ValueError if `vocab_size` is below 257 or there is no text.

    >>> tokenizer = train_bpe_tokenizer(["low lower lowest"] * 9, 262)
    >>> tokenizer.tokenize("slow"), tokenizer.decode(tokenizer("naïve 6²")["input_ids"])
    (['s', 'low'], 'naïve 6²')
    """
    try:
        from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
        from transformers import PreTrainedTokenizerFast
    except ImportError as error:
        package = missing_package(error, "tokenizers", "transformers")
        raise ImportError(f"train_bpe_tokenizer needs {package}: {install_hint('llm')}") from error

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    if vocab_size < len(alphabet) + 1:
        raise ValueError(f"vocab_size is {vocab_size}, expected at least {len(alphabet) + 1}: the bytes and the end.")
    if isinstance(texts, str):
        raise TypeError("texts is one string, expected a list of documents; pass [text].")
    documents = list(texts)
    if not any(document.strip() for document in documents):
        raise ValueError(f"the {len(documents)} texts hold nothing to train on; give at least one document.")
    backend = Tokenizer(models.BPE())
    split: list[Any] = [pre_tokenizers.Digits(individual_digits=True)] if split_digits else []
    backend.pre_tokenizer = pre_tokenizers.Sequence([*split, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, min_frequency=2, special_tokens=[END_OF_TEXT], initial_alphabet=alphabet,
        show_progress=False,
    )  # fmt: skip
    backend.train_from_iterator(documents, trainer=trainer, length=len(documents))
    special = dict.fromkeys(("bos_token", "eos_token", "pad_token"), END_OF_TEXT)
    return PreTrainedTokenizerFast(tokenizer_object=backend, clean_up_tokenization_spaces=False, **special)
