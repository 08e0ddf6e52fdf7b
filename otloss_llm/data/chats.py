"""Conversations, written by a chat template into rows with labels on the answers alone.

    {"messages": [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}, ...]}

An answer is what the template adds to the messages before it and the prompt for an answer, with the end of the turn. It
is tokenised apart from what comes before, so that the prompt of generation is the beginning of the training row.
"""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from otloss_llm.data.blocks import opening_ids
from otloss_llm.data.questions import AnsweredQuestions
from otloss_llm.data.text import column_text
from otloss_llm.losses.positions import IGNORE_INDEX

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Chat = list[dict[str, str]]  # messages, each with its role and content


def checked_chat(messages: Any, place: str) -> Chat:
    """Return role and content of messages; raises ValueError if they are no conversation with an answer."""
    if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
        raise ValueError(f"{place} has no list of messages; expected messages, each with role and content.")
    chat = [{key: column_text(message, key, place) for key in ("role", "content")} for message in messages]
    if not any(message["role"] == "assistant" for message in chat):
        raise ValueError(f"{place} has no message of the role assistant, so nothing to learn; leave it out.")
    return chat


class ChatRows(AnsweredQuestions):
    """Rows of conversations, with labels on the answers: a dataset like `AnsweredQuestions`, of several turns."""

    def __init__(self, rows: Sequence[Sequence[int]], trained: Sequence[Sequence[bool]], *, dropped: int = 0) -> None:
        self._rows = [torch.tensor(row, dtype=torch.int32) for row in rows]
        self._trained = [torch.tensor(row) for row in trained]
        self.train_on_question, self.encoder_decoder, self.dropped = False, False, dropped

    @classmethod
    def from_chats(
        cls, chats: Sequence[Chat], tokenizer: PreTrainedTokenizerBase, *, max_length: int
    ) -> ChatRows:  # fmt: skip
        """Tokenise conversations by the tokenizer's chat template.

        Rows longer than `max_length` tokens are dropped, counted, and reported in a UserWarning. Raises ValueError if
        there is no template, the template changes earlier messages when one is added, or no row is left.
        """
        if not getattr(tokenizer, "chat_template", None):
            raise ValueError(
                "the tokenizer has no chat template; set tokenizer.chat_template and save it, or use the tokenizer of "
                "a chat model (--tokenizer_name)."
            )
        made = [_row(chat, tokenizer) for chat in chats]
        kept = [row for row in made if len(row[0]) <= max_length]
        dropped = len(made) - len(kept)
        text = f"{dropped} of {len(made)} conversations are longer than max_length={max_length} tokens"
        if not kept:
            raise ValueError(f"{text}; give some, or raise max_length (--block_size).")
        if dropped:
            warnings.warn(f"{text} (the longest has {max(len(ids) for ids, _ in made)}) and were dropped.", UserWarning,
                          stacklevel=2)  # fmt: skip
        return cls([ids for ids, _ in kept], [trained for _, trained in kept], dropped=dropped)

    @classmethod
    def from_texts(cls, texts: Sequence[str], tokenizer: PreTrainedTokenizerBase, *, max_length: int) -> ChatRows:
        """Tokenise texts as `[BOS] text EOS`, one row each, cut at `max_length` tokens; labels are on all tokens.

        Raises ValueError if the tokenizer has no EOS.
        """
        end = tokenizer.eos_token_id
        if end is None:
            raise ValueError("the tokenizer has no EOS token to end a text with; set tokenizer.eos_token first.")
        opening = opening_ids(tokenizer)
        ids = tokenizer(list(texts), add_special_tokens=False, truncation=False, padding=False, verbose=False)
        rows = [[*opening, *row, end][:max_length] for row in ids["input_ids"]]
        return cls(rows, [[True] * len(row) for row in rows])

    @property
    def fingerprint(self) -> str:
        """The first 16 hexadecimal digits of the SHA-256 of the lengths, the ids, and what is trained on."""
        digest = hashlib.sha256(f"{self.lengths}\0".encode())
        digest.update(
            torch.cat(self._rows).numpy().astype("<i4").tobytes() + torch.cat(self._trained).numpy().tobytes()
        )
        return digest.hexdigest()[:16]

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        ids = self._rows[index].long()
        labels = ids.masked_fill(~self._trained[index], IGNORE_INDEX)
        return {"input_ids": ids, "labels": labels, "attention_mask": torch.ones_like(ids)}


def _row(chat: Chat, tokenizer: Any) -> tuple[list[int], list[bool]]:
    """Return ids of a conversation up to its last answer, and whether each is a token of an answer."""
    ids: list[int] = []
    trained: list[bool] = []
    done = ""
    for end, message in enumerate(chat):
        if message["role"] != "assistant":
            continue
        prompt = tokenizer.apply_chat_template(chat[:end], tokenize=False, add_generation_prompt=True)
        whole = tokenizer.apply_chat_template(chat[: end + 1], tokenize=False)
        if not prompt.startswith(done) or not whole.startswith(prompt):
            raise ValueError(
                f"the chat template changes what comes before message {end + 1} ({message['content'][:40]!r}) when it "
                "is added, so its answer cannot be told apart; take a template that only appends."
            )
        for text, answer in ((prompt[len(done) :], False), (whole[len(prompt) :], True)):
            new = (
                tokenizer(text, add_special_tokens=False, truncation=False, verbose=False)["input_ids"] if text else []
            )
            ids += new
            trained += [answer] * len(new)
        done = whole
    return ids, trained
