"""The script of win rates: verdicts in both orders, ties, and files of `generate`."""

import json
import runpy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("transformers")

import data
import torch

from tests.otloss_llm.conftest import Tiny, tiny  # noqa: F401  # a fixture

SCRIPT = runpy.run_path(str(Path(__file__).parents[2] / "examples/win_rate.py"))


def test_a_win_needs_both_orders(tmp_path: Path) -> None:
    from otloss_llm.data.blocks import train_bpe_tokenizer

    tokenizer = train_bpe_tokenizer(["a"], 257)
    calls = []

    def judge_rows(judge: Any, rows: Any, *, prefix_lengths: Any, **settings: Any) -> Any:
        """Prefers "good", and otherwise position A."""
        nll = []
        for row, prefix in zip(rows, prefix_lengths, strict=True):
            text = tokenizer.decode(row)
            calls.append(tokenizer.decode(row[prefix:]))
            a, b = ("good" in part for part in text.split("A: ")[1].split("B: "))
            nll.append(float(text.endswith("B") != (b and not a)))
        return SimpleNamespace(nll=torch.tensor(nll))

    SCRIPT["judge_pairs"].__globals__["sequence_nll"] = judge_rows
    judge = SimpleNamespace(config=SimpleNamespace(max_position_embeddings=200))
    pairs = [("good", "bad"), ("bad", "good"), ("bad", "worse"), ("good", "bad"), ("x" * 200, "y")]
    first, second = zip(*pairs, strict=True)
    found = SCRIPT["judge_pairs"](judge, tokenizer, ["?"] * 5, first, second, 4)
    assert (found.wins, found.ties, found.losses, found.left_out) == (2, 1, 1, 1)
    assert set(calls) == {"A", "B"}
    assert found.rate == pytest.approx(2.5 / 4)
    assert found.standard_error == pytest.approx(torch.tensor([1, 0, 0.5, 1]).std().item() / 2)
    assert found.for_a == pytest.approx(5 / 8)


def test_files_of_generate_and_a_missing_model(
    tiny: Tiny, tmp_path: Path, capsys: pytest.CaptureFixture[str], no_data: Path  # noqa: F811
) -> None:  # fmt: skip
    main = runpy.run_path(str(Path(__file__).parents[2] / "examples/win_rate.py"))["main"]
    with pytest.raises(SystemExit, match="lacks models/stories260K"):
        main(["--data", str(tmp_path)])
    main(["--quick"])
    printed = capsys.readouterr().out.splitlines()
    assert printed[0].startswith(f"{data.OTHER}a small Llama, trained on docstrings")
    assert len(printed) == 5
    lines = [json.dumps({"prompt": "a", "continuation": text}) for text in ("b", "c")]
    for name in ("one", "two"):
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines), encoding="utf-8")
    given = ["--judge", str(tiny.llama), "--first", str(tmp_path / "one.jsonl"), "--second"]
    with pytest.raises(ValueError, match="all 2 pairs are longer than the judge's context of 64"):
        main([*given, str(tmp_path / "two.jsonl")])
    (tmp_path / "two.jsonl").write_text(lines[0], encoding="utf-8")
    with pytest.raises(SystemExit):
        main([*given, str(tmp_path / "two.jsonl")])
    assert "have other prompts" in capsys.readouterr().err
