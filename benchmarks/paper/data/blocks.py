"""Text for language models: packed blocks of token ids.

Packing writes all documents (strings, read by `data.text`) one after another, each as `[BOS] ids EOS`, into one stream
and cuts the stream into rows of `block_size` ids; the incomplete last row is dropped. BOS is written only if
the tokenizer itself begins a text with it. A document is tokenised whole and without truncation, so its ids are the
tokenizer's own; special tokens spelt out in it are read as the tokenizer reads them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor
from torch.utils.data import Dataset

from benchmarks.paper.data.text import as_documents

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

DOCUMENTS_PER_CALL = 256  # documents handed to the tokenizer at a time


class PackedBlocks(Dataset[dict[str, Tensor]]):
    """Token ids in rows of one length, as a dataset for training and scoring causal language models.

    An item is `{"input_ids": (block_size,), "labels": (block_size,)}`, both int64 and equal: labels are not shifted,
    as Hugging Face models expect. `ids` is the whole as int32, (blocks, block_size); `fingerprint` is a short hash
    of it, equal for equal data.
    """

    def __init__(self, ids: Int[Tensor, "blocks block_size"], *, dropped_tokens: int = 0) -> None:
        if ids.ndim != 2 or ids.is_floating_point() or ids.shape[1] < 2:
            raise ValueError(
                f"ids has shape {tuple(ids.shape)} and dtype {ids.dtype}, expected integers (blocks, block_size) "
                f"with a block_size of 2 or more; reshape them, or use PackedBlocks.from_texts."
            )
        self.ids = ids.to("cpu", torch.int32).contiguous()
        self.dropped_tokens = dropped_tokens

    @classmethod
    def from_texts(
        cls, texts: Iterable[str], tokenizer: PreTrainedTokenizerBase, block_size: int, *, progress: bool = True
    ) -> PackedBlocks:
        """Tokenise documents, join them as `[BOS] ids EOS`, and cut the stream into rows of `block_size` ids.

        BOS is written only if the tokenizer begins texts with it. The incomplete last row is dropped; `dropped_tokens`
        says how many ids that were. Raises ValueError if the whole stream is shorter than one row.
        """
        if block_size < 2:
            raise ValueError(f"block_size is {block_size}, expected 2 or more: a block of one token predicts nothing.")
        pieces = list(_token_stream(list(as_documents(texts)), tokenizer, progress=progress))
        stream = np.concatenate(pieces) if pieces else np.empty(0, dtype=np.int32)
        blocks, dropped = divmod(len(stream), block_size)
        if blocks == 0:
            raise ValueError(
                f"the text is {len(stream)} tokens long (end-of-text included), less than one block of {block_size}; "
                f"give more text or smaller blocks."
            )
        ids = torch.from_numpy(stream[: blocks * block_size].reshape(blocks, block_size))
        return cls(ids, dropped_tokens=dropped)

    @property
    def block_size(self) -> int:
        """Number of ids in a block."""
        return self.ids.shape[1]

    @property
    def longest(self) -> int:
        """Tokens of the longest row: the block size."""
        return self.block_size

    @property
    def id_range(self) -> tuple[int, int]:
        """The lowest and the highest id."""
        return int(self.ids.min()), int(self.ids.max())

    @property
    def fingerprint(self) -> str:
        """The first 16 hexadecimal digits of the SHA-256 of the block size and the ids."""
        digest = hashlib.sha256(f"{self.block_size}\0".encode())
        digest.update(self.ids.numpy().astype("<i4").tobytes())
        return digest.hexdigest()[:16]

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        ids = self.ids[index].long()
        return {"input_ids": ids, "labels": ids.clone()}

    def __repr__(self) -> str:
        dropped = f"{self.dropped_tokens} token{'' if self.dropped_tokens == 1 else 's'} dropped"
        size = f"{len(self)} blocks of {self.block_size} tokens"
        return f"{type(self).__name__}({size}, {dropped}, fingerprint={self.fingerprint})"


def split_blocks(
    blocks: PackedBlocks, *, validation_fraction: float = 0.05, test_fraction: float = 0.0
) -> tuple[PackedBlocks, PackedBlocks, PackedBlocks]:
    """Cut blocks into contiguous training, validation and test parts, in this order and without shuffling.

    A fraction of 0 gives an empty part, a positive one at least one block. Raises ValueError if the fractions are
    outside [0, 1) or leave no block to train on.
    """
    fractions = {"validation_fraction": validation_fraction, "test_fraction": test_fraction}
    for name, fraction in fractions.items():
        check_fraction(name, fraction)
    held_out = [max(1, round(fraction * len(blocks))) if fraction else 0 for fraction in fractions.values()]
    train = len(blocks) - sum(held_out)
    if train < 1:
        shares = ", ".join(f"{name}={fraction}" for name, fraction in fractions.items())
        raise ValueError(f"{len(blocks)} blocks leave none to train on with {shares}; give more text or less share.")
    first, second, third = blocks.ids.split([train, *held_out])
    return PackedBlocks(first), PackedBlocks(second), PackedBlocks(third)


def check_fraction(name: str, fraction: float) -> None:
    """Raise ValueError unless the fraction is in [0, 1)."""
    if not 0 <= fraction < 1:
        raise ValueError(f"{name} is {fraction}, expected a share in [0, 1).")


def opening_ids(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Return the ids that the tokenizer puts before a text by itself: `[BOS]` or nothing."""
    return [tokenizer.bos_token_id] if tokenizer.bos_token_id in tokenizer("")["input_ids"] else []


def _token_stream(documents: Sequence[str], tokenizer: Any, *, progress: bool) -> Iterator[np.ndarray]:
    """Yield the packed ids of a few documents at a time."""
    from tqdm import tqdm

    if tokenizer.eos_token_id is None:
        raise ValueError("the tokenizer has no EOS token to keep documents apart; set tokenizer.eos_token first.")
    opening, end = opening_ids(tokenizer), tokenizer.eos_token_id
    with tqdm(total=len(documents), desc="tokenising", unit="doc", disable=not progress, delay=2.0) as bar:
        for start in range(0, len(documents), DOCUMENTS_PER_CALL):
            batch = documents[start : start + DOCUMENTS_PER_CALL]
            # verbose=False: no warning about texts longer than the model's context, which packing cuts anyway.
            rows = tokenizer(batch, add_special_tokens=False, truncation=False, padding=False, verbose=False)
            stream = [token for ids in rows["input_ids"] for token in (*opening, *ids, end)]
            yield np.array(stream, dtype=np.int32)
            bar.update(len(batch))
