"""The README and docs/solvers.md: Python blocks run as printed, and links point to files that exist."""

from __future__ import annotations

import re
import sys
import tomllib
import types
import warnings
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
LINKS = re.findall(r"\]\(([^)\s]+)\)", README)


def names_for_trainers(folder: Path) -> dict[str, Any]:
    """Names that the block about trainers uses without defining them."""
    from transformers import LlamaConfig, LlamaForCausalLM, TrainingArguments

    from otloss_llm.data.blocks import PackedBlocks, read_texts, train_bpe_tokenizer

    texts = read_texts("README.md")
    tokenizer = train_bpe_tokenizer(texts, 300)
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
        bos_token_id=0, eos_token_id=0, pad_token_id=0,
    )  # fmt: skip
    args = TrainingArguments(str(folder / "run"), max_steps=2, use_cpu=True, report_to=[], save_strategy="no")
    blocks = PackedBlocks.from_texts(texts, tokenizer, block_size=64)
    return {
        "model": LlamaForCausalLM(config), "tokenizer": tokenizer, "args": args, "sft_args": args,
        "blocks": blocks, "dataset": blocks,
    }  # fmt: skip


@pytest.mark.parametrize("number", range(1, len(BLOCKS) + 1))
def test_a_block_runs(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    block = BLOCKS[number - 1]
    namespace: dict[str, Any] = {}
    (tmp_path / "README.md").write_text(README, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    if "otloss_llm" in block:
        transformers = pytest.importorskip("transformers")
        pytest.importorskip("accelerate")
    if "SFTTrainer" in block:
        namespace = names_for_trainers(tmp_path)
        # With these small blocks; training/test_trl.py has TRL itself, which wants a dataset of its own kind.
        trl = types.ModuleType("trl")
        trl.SFTTrainer = transformers.Trainer  # type: ignore[attr-defined]
        trl.SFTConfig = transformers.TrainingArguments  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "trl", trl)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the libraries
        exec(compile(block, f"README.md, block {number}", "exec"), namespace)
    printed = capsys.readouterr().out
    assert "nan" not in printed
    assert printed or "print(" not in block


def test_links_point_to_files() -> None:
    """Relative ones; hatch_build.py turns these into addresses for a package index."""
    missing = [link for link in LINKS if not (link.startswith("https://") or (ROOT / link).is_file())]
    assert missing == []


@pytest.fixture
def build_hook(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    """hatch_build.py, without hatchling, which only builds need."""
    for name in ("hatchling", "hatchling.metadata", "hatchling.metadata.plugin", "hatchling.metadata.plugin.interface"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    sys.modules["hatchling.metadata.plugin.interface"].MetadataHookInterface = object  # type: ignore[attr-defined]
    spec = spec_from_file_location("hatch_build", ROOT / "hatch_build.py")
    assert spec is not None
    assert spec.loader is not None
    hook = module_from_spec(spec)
    spec.loader.exec_module(hook)
    return hook


def test_a_package_index_gets_absolute_links(build_hook: types.ModuleType) -> None:
    home = "https://example.org/owner/name"
    text = build_hook.with_addresses(README, home)
    links = re.findall(r"\]\(([^)\s]+)\)", text)
    assert len(links) == len(LINKS)
    assert [link for link in links if not link.startswith("https://")] == []
    assert f"]({home}/raw/main/docs/demo.png)" in text
    assert f"({home}/blob/main/docs/solvers.md)" in text
    assert all(address.startswith(home) for address in build_hook.project_urls(home).values())


def test_there_is_no_address_before_a_release_sets_it(build_hook: types.ModuleType) -> None:
    """One setting of pyproject.toml has it; an address that does not exist is worse than none."""
    assert build_hook.with_addresses(README, "") == README
    assert build_hook.project_urls("") == {}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    repository = project["tool"]["hatch"]["metadata"]["hooks"]["custom"]["repository"]
    for name in ("pyproject.toml", "CITATION.cff", "README.md"):
        text = (ROOT / name).read_text(encoding="utf-8")
        assert set(re.findall(r"https://[^\s\"')]*/(?:torch-)?otloss", text)) <= {repository}, name


def test_the_page_on_solvers_runs() -> None:
    page = ROOT / "docs" / "solvers.md"
    blocks = re.findall(r"^```python\n(.*?)^```", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    assert len(blocks) >= 6
    names: dict[str, object] = {}
    for block in blocks:
        exec(compile(block, str(page), "exec"), names)
