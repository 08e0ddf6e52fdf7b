"""Documents and packed blocks."""

import json
import pickle

import pytest
import torch

from benchmarks.paper.data.blocks import PackedBlocks, opening_ids, split_blocks
from benchmarks.paper.data.text import read_texts, split_documents
from otloss_llm.data import train_bpe_tokenizer

TEXTS = ["the cat sat on the mat", "the dog sat on the log", "naïve café, 6² = 36; 日本"] * 3


@pytest.fixture(scope="module")
def tokenizer():
    return train_bpe_tokenizer(TEXTS, 300)


def test_text_files_are_documents_read_recursively_in_order(tmp_path):
    (tmp_path / "b").mkdir()
    for name, text in (("c.txt", "3"), ("a.md", "\ufeffone\r\n\r\ntwo\n"), ("b/x.txt", "2"), ("skip.csv", "no")):
        (tmp_path / name).write_bytes(text.encode())
    assert read_texts(str(tmp_path)) == ["one\n\ntwo\n", "2", "3"]


def test_jsonl_lines_are_documents(tmp_path):
    file = tmp_path / "a.jsonl"
    # U+2028 ends a line for str.splitlines, and may stand raw in JSON
    lines = [json.dumps({"body": text}, ensure_ascii=False) for text in ("one", "t\u2028wo", "   ")]
    file.write_text("\n\n".join(lines) + "\n", encoding="utf-8")
    assert read_texts(file, text_column="body") == ["one", "t\u2028wo"]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.txt", b" \n\t ", "no text but whitespace"),
        ("a.csv", b"text", r"ends in '\.csv', expected one of"),
        ("a.jsonl", b'{"text": "x"}\n{"body": "y"}', r"line 2 has no column 'text', found \['body'\]"),
        ("a.jsonl", b'{"text": "x"}\n\n{"text": ', "line 3 is not JSON"),
    ],
)
def test_bad_files_are_named(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=message):
        read_texts(tmp_path / name)


# split_documents


def test_split_keeps_every_document_once_and_together():
    documents = [f"document number {i % 150}" + " " * (i // 150) for i in range(300)]
    parts = split_documents(documents, {"train": 0.6, "judge": 0.3, "test": 0.1})
    flat = [text for part in parts.values() for text in part]
    assert sorted(flat) == sorted(documents[:150])  # those that differ in whitespace count as one, the first stays
    assert [70 < len(parts["train"]) < 110, 25 < len(parts["judge"]) < 65, 3 < len(parts["test"]) < 30] == [True] * 3
    assert parts["train"] == [text for text in documents if text in set(parts["train"])]


def test_split_is_stable_when_the_corpus_grows():
    documents = [f"document {i}" for i in range(200)]
    shares = {"train": 0.5, "test": 0.5}
    small, large = split_documents(documents[:100], shares), split_documents(documents[::-1], shares)
    assert set(small["train"]) <= set(large["train"])
    assert set(small["test"]) <= set(large["test"])
    assert split_documents(documents, shares, seed=1)["train"] != split_documents(documents, shares)["train"]


def test_split_shares_must_sum_to_one():
    tenths = {str(i): 0.1 for i in range(10)}
    assert sum(map(len, split_documents(map(str, range(999)), tenths).values())) == 999
    for shares in ({"train": 0.8, "test": 0.1}, {"train": 1.2, "test": -0.2}):
        with pytest.raises(ValueError, match="expected shares >= 0 that sum to 1"):
            split_documents(["a"], shares)
    with pytest.raises(ValueError, match=r"part '.*' with share .* got none of 1 distinct"):
        split_documents(["a", " a"], {"train": 0.5, "test": 0.5})


# PackedBlocks


def test_blocks_are_the_joined_documents(tokenizer):
    stream = [id_ for text in TEXTS for id_ in [*tokenizer(text)["input_ids"], 0]]
    blocks = PackedBlocks.from_texts(TEXTS, tokenizer, 7)
    assert blocks.ids.dtype == torch.int32
    assert blocks.ids.shape == (len(stream) // 7, 7)
    assert blocks.dropped_tokens == len(stream) % 7
    assert blocks.ids.flatten().tolist() == stream[: len(stream) // 7 * 7]
    item = blocks[2]
    assert {name: value.dtype for name, value in item.items()} == {"input_ids": torch.int64, "labels": torch.int64}
    assert item["input_ids"].tolist() == item["labels"].tolist() == stream[14:21]
    assert len(list(blocks)) == len(blocks)


def test_blocks_ignore_the_tokenizers_own_limits(caplog, capfd, small_blocks):
    short = train_bpe_tokenizer(TEXTS, 300)
    whole = PackedBlocks.from_texts(TEXTS, short, 7)
    short.model_max_length = 4
    short.backend_tokenizer.enable_truncation(max_length=3)
    short.backend_tokenizer.enable_padding(length=50)
    assert torch.equal(PackedBlocks.from_texts(TEXTS, short, 7).ids, whole.ids)
    assert not caplog.records
    assert capfd.readouterr() == ("", "")


def test_blocks_begin_documents_with_bos_if_the_tokenizer_does():
    from tokenizers.processors import TemplateProcessing

    opens = train_bpe_tokenizer(TEXTS, 300)
    opens.add_special_tokens({"bos_token": "<s>"})
    bos = opens.bos_token_id
    opens.backend_tokenizer.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", bos)])
    assert opening_ids(opens) == [bos]
    ids = PackedBlocks.from_texts(["a", "b"], opens, 6).ids.tolist()
    assert ids == [[bos, *opens("a", add_special_tokens=False)["input_ids"], 0, bos, opens("b")["input_ids"][1], 0]]


def test_blocks_bad_input(tokenizer):
    endless = train_bpe_tokenizer(TEXTS, 300)
    endless.eos_token = None
    for call, error, message in (
        (lambda: PackedBlocks.from_texts(["a"], tokenizer, 8), ValueError, r"2 tokens long .* one block of 8"),
        (lambda: PackedBlocks.from_texts("text", tokenizer, 8), TypeError, r"one string, expected a list of documents"),
        (lambda: PackedBlocks(torch.arange(4)), ValueError, r"shape \(4,\) and dtype torch.int64"),
        (lambda: PackedBlocks.from_texts(TEXTS, endless, 8), ValueError, r"no EOS token .* set tokenizer\.eos_token"),
        (lambda: split_blocks(PackedBlocks(torch.ones(30, 2).int()), validation_fraction=0.6, test_fraction=0.4),
         ValueError, "30 blocks leave none to train on"),
    ):  # fmt: skip
        with pytest.raises(error, match=message):
            call()


def test_blocks_pickle_and_fingerprint(tokenizer):
    blocks = PackedBlocks.from_texts(TEXTS, tokenizer, 8)
    copy = pickle.loads(pickle.dumps(blocks))
    assert torch.equal(copy.ids, blocks.ids)
    assert repr(copy) == repr(blocks)
    assert copy.dropped_tokens == blocks.dropped_tokens
    assert len(blocks.fingerprint) == 16
    reshaped = PackedBlocks(blocks.ids[:4].reshape(8, 4))
    assert reshaped.fingerprint != PackedBlocks(blocks.ids[:4]).fingerprint


def test_split_blocks_is_contiguous():
    blocks = PackedBlocks(torch.arange(60).view(30, 2))
    parts = split_blocks(blocks, validation_fraction=0.2, test_fraction=0.1)
    assert [len(part) for part in parts] == [21, 6, 3]
    assert torch.equal(torch.cat([part.ids for part in parts]), blocks.ids)
    assert [len(part) for part in split_blocks(blocks, validation_fraction=1e-9)] == [29, 1, 0]
