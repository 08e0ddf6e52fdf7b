"""Labelled texts: every format that is read, and the place of what is wrong."""

import json
import zipfile
from pathlib import Path

import pytest

from benchmarks.paper.data.labelled import LabelledText, read_labelled_texts

CHOICES = LabelledText("1+1?\nA. 1\nB. 2", "B")


def test_every_format_is_read(tmp_path: Path) -> None:
    def write(name: str, content: str, encoding: str = "utf-8") -> Path:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(content.encode(encoding))
        return tmp_path / name

    fine, bad = LabelledText("a café", "1"), LabelledText("so so", "0")
    question = {"question": "1+1?", "choices": ["1", "2"], "answer": 1}
    lines = "\n\n".join(map(json.dumps, ({"text": "a café", "label": 1}, question)))
    assert read_labelled_texts(write("task.jsonl", lines)) == [fine, CHOICES]
    assert read_labelled_texts(write("trec.txt", "1 a café\r\n0 so so\n", "latin-1")) == [fine, bad]
    write("val_labels.txt", "1\n0\n"), write("mapping.txt", "0\tanger\n1\tjoy")
    pair = read_labelled_texts(write("val_text.txt", "a café\nso so \n"))
    assert pair == [LabelledText("a café", "joy"), LabelledText("so so", "anger")]
    write("mmlu/a_dev.csv", "question,choice0,choice1,answer\n1+1?,1,2,1\n"), write("mmlu/b.csv", '"1+1?",1,2,B\n')
    assert read_labelled_texts(tmp_path / "mmlu") == [CHOICES, CHOICES]
    with zipfile.ZipFile(tmp_path / "mr.zip", "w") as archive:
        archive.writestr("mr/README.txt", "about\n")
        archive.writestr("mr/rt.tok.neg", "so so \n".encode("latin-1")), archive.writestr("mr/rt.tok.pos", "fine\n\nok")
    assert [(item.text, item.label) for item in read_labelled_texts(tmp_path / "mr.zip")] == [
        ("so so", "neg"), ("fine", "pos"), ("ok", "pos")
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", '{"text": "a", "label": 0}\n\n{"text": "a"}', r"line 3 has \['text'\], expected text and label"),
        ("a.jsonl", '{"question": "?", "choices": ["x", "y"], "answer": 2}', r"line 1.*answer 2, .*\(0 to 1"),
        ("a.txt", "0 fine\n5 odd\n", r"line 2: the label '5' is not among the candidates \['0', '1'\]; add"),
        ("a.txt", "0 fine\nword\n", "line 2 is 'word', expected a label, a space and a text"),
        ("a_text.txt", "one\ntwo\n", "3 lines and a_labels.txt 2, expected one label"),
        ("a.csv", "1+1?,1,2,E\n", "record 1.*answer 'E'"),
    ],
)
def test_what_is_wrong_has_a_place(tmp_path: Path, name: str, content: str, message: str) -> None:
    (tmp_path / name).write_text(content, encoding="utf-8")
    (tmp_path / "a_labels.txt").write_text("0\n", encoding="utf-8")
    with pytest.raises(ValueError, match=message):
        read_labelled_texts(tmp_path / name, labels={"0": "0", "1": "1"})
