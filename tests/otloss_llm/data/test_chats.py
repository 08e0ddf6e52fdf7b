"""Conversations: what is read, what is trained on, and the command line."""

from typing import Any

import pytest

from otloss_llm.data.blocks import train_bpe_tokenizer
from otloss_llm.data.chats import ChatRows, checked_chat

TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
CHAT = [
    {"role": "system", "content": "be short"}, {"role": "user", "content": "hello"},
    {"role": "assistant", "content": "hi"}, {"role": "user", "content": "bye"},
    {"role": "assistant", "content": "see you"}, {"role": "user", "content": "gone"},
]  # fmt: skip


def templated(template: str | None = TEMPLATE) -> Any:
    tokenizer = train_bpe_tokenizer(["one"], 257)
    tokenizer.chat_template = template
    return tokenizer


def test_labels_are_those_of_the_answers() -> None:
    tokenizer = templated()
    rows = ChatRows.from_chats([CHAT, CHAT[:3]], tokenizer, max_length=200)
    end = tokenizer.eos_token
    whole = f"<system>be short{end}<user>hello{end}<assistant>hi{end}<user>bye{end}<assistant>see you{end}"
    assert tokenizer.decode(rows[0]["input_ids"]) == whole  # what follows the last answer trains nothing
    labels = rows[0]["labels"]
    assert tokenizer.decode(labels[labels != -100]) == f"hi{end}see you{end}"
    assert (labels[labels != -100] == rows[0]["input_ids"][labels != -100]).all()
    assert len(rows) == 2
    assert rows.fingerprint == ChatRows.from_chats([CHAT[:5], CHAT[:3]], tokenizer, max_length=200).fingerprint
    silent = [message | {"role": message["role"].replace("user", "assistant")} for message in CHAT[:5]]
    assert rows.fingerprint != ChatRows.from_chats([silent, CHAT[:3]], tokenizer, max_length=200).fingerprint
    with pytest.warns(UserWarning, match="1 of 2 conversations are longer than max_length=60"):
        assert len(ChatRows.from_chats([CHAT, CHAT[:3]], tokenizer, max_length=60)) == 1


def test_bad_input() -> None:
    with pytest.raises(ValueError, match="no chat template; set"):
        ChatRows.from_chats([CHAT], templated(None), max_length=99)
    with pytest.raises(ValueError, match=r"changes what comes before message 3 \('hi'\)"):
        ChatRows.from_chats([CHAT], templated("{{ messages | length }}" + TEMPLATE), max_length=99)
    with pytest.raises(ValueError, match="1 of 1 conversations are longer than max_length=9 tokens"):
        ChatRows.from_chats([CHAT], templated(), max_length=9)
    with pytest.raises(ValueError, match="row 1 has no message of the role assistant"):
        checked_chat([], "row 1")
