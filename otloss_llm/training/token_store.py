"""Tokenised text kept in a run folder: a resumed run does not tokenise the same text again."""

from __future__ import annotations

import hashlib
import os
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from otloss_llm.data.blocks import PackedBlocks
from otloss_llm.training.folders import TOKENS_PREFIX

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class TokenStore:
    """Packs documents into blocks, or reads the blocks that `write` left in `folder` for equal documents.

    A file belongs to the text, the tokenizer, the block size, and the versions of the libraries that tokenise: where
    one of them is another, the text is tokenised again. Nothing is written before `write`, for until a run has been
    opened its folder may belong to something else. Tokenizers without a fast backend are not stored.
    """

    def __init__(self, folder: Path, tokenizer: PreTrainedTokenizerBase, block_size: int) -> None:
        self.folder, self.tokenizer, self.block_size = folder, tokenizer, block_size
        self._identity = _identity(tokenizer, block_size)
        self._known: set[Path] = set()
        self._new: dict[Path, PackedBlocks] = {}

    def pack(self, documents: Sequence[str]) -> PackedBlocks:
        """`PackedBlocks.from_texts` of the documents."""
        if self._identity is None:
            return PackedBlocks.from_texts(documents, self.tokenizer, self.block_size)
        digest = hashlib.sha256(self._identity)
        for document in documents:
            text = document.encode("utf-8", "surrogatepass")
            digest.update(len(text).to_bytes(8, "little") + text)
        path = self.folder / f"{TOKENS_PREFIX}{digest.hexdigest()[:16]}.npz"
        blocks = _read(path, self.block_size)
        if blocks is None:
            blocks = PackedBlocks.from_texts(documents, self.tokenizer, self.block_size)
            self._new[path] = blocks
        self._known.add(path)
        return blocks

    def write(self) -> None:
        """Keep what was packed, and delete what was kept of other texts."""
        for path in self.folder.glob(f"{TOKENS_PREFIX}*"):
            if path not in self._known:
                path.unlink(missing_ok=True)
        for path, blocks in self._new.items():
            partial = path.with_name(f"{path.name}.partial-{os.getpid()}")
            with partial.open("wb") as file:
                np.savez(file, ids=blocks.ids.numpy(), dropped=blocks.dropped_tokens)
            partial.replace(path)


def _identity(tokenizer: PreTrainedTokenizerBase, block_size: int) -> bytes | None:
    """All but the text that the ids depend on, or None where it cannot be told."""
    import tokenizers
    import transformers

    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return None
    special = (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer("")["input_ids"])
    versions = (transformers.__version__, tokenizers.__version__)
    return f"{block_size} {special} {versions}\0{type(tokenizer).__name__}\0{backend.to_str()}\0".encode()


def _read(path: Path, block_size: int) -> PackedBlocks | None:
    """What was kept, or None where nothing was or the file is damaged."""
    try:
        with np.load(path, allow_pickle=False) as kept:
            ids, dropped = torch.from_numpy(kept["ids"]), int(kept["dropped"])
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile):
        return None
    return PackedBlocks(ids, dropped_tokens=dropped) if ids.ndim == 2 and ids.shape[1] == block_size else None
