"""Tokenised text kept in a run folder, so that a resumed run does not tokenise the same text again."""

from __future__ import annotations

import hashlib
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from otloss_llm.data.blocks import PackedBlocks
from otloss_llm.training.folders import TOKENS_PREFIX, replaced

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class TokenStore:
    """Packs documents into blocks, or reads the blocks that `write` kept in `folder` for equal documents.

    A file belongs to one text, tokenizer, block size and versions of the tokenising libraries; with any other of them
    the text is tokenised again. Nothing is written before `write`, because the folder may turn out to belong to another
    run. Slow tokenizers, which do not tell their full state, are not stored.
    """

    def __init__(self, folder: Path, tokenizer: PreTrainedTokenizerBase, block_size: int) -> None:
        self.folder, self.tokenizer, self.block_size = folder, tokenizer, block_size
        self._packed: dict[Path, PackedBlocks | None] = {}  # None: in the folder already

    def pack(self, documents: Sequence[str]) -> PackedBlocks:
        """`PackedBlocks.from_texts` of the documents."""
        state = _tokenizer_state(self.tokenizer)
        if state is None:
            return PackedBlocks.from_texts(documents, self.tokenizer, self.block_size)
        digest = hashlib.sha256(f"{self.block_size} {state}".encode())
        for document in documents:
            text = document.encode("utf-8", "surrogatepass")
            digest.update(len(text).to_bytes(8, "little") + text)
        path = self.folder / f"{TOKENS_PREFIX}{digest.hexdigest()[:16]}.npz"
        kept = _read(path)
        blocks = kept or PackedBlocks.from_texts(documents, self.tokenizer, self.block_size)
        self._packed[path] = None if kept else blocks
        return blocks

    def write(self) -> None:
        """Keep the packed blocks, and delete those of other texts."""
        for path in self.folder.glob(f"{TOKENS_PREFIX}*"):
            if path not in self._packed:
                path.unlink(missing_ok=True)
        for path, blocks in self._packed.items():
            if blocks is None:
                continue
            with replaced(path) as partial, partial.open("wb") as file:
                np.savez(file, ids=blocks.ids.numpy(), dropped=blocks.dropped_tokens)


def _tokenizer_state(tokenizer: Any) -> str | None:
    import tokenizers
    import transformers

    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return None
    special = (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer("")["input_ids"])
    versions = (transformers.__version__, tokenizers.__version__)
    return f"{special} {versions}\0{type(tokenizer).__name__}\0{backend.to_str()}\0"


def _read(path: Path) -> PackedBlocks | None:
    """The kept blocks; None if there are none or the file is damaged."""
    try:
        with np.load(path, allow_pickle=False) as kept:
            return PackedBlocks(torch.from_numpy(kept["ids"]), dropped_tokens=int(kept["dropped"]))
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile):
        return None
