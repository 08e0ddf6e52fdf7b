"""The commands on a pretrained model and real text; skipped where they are not available."""

from __future__ import annotations

from pathlib import Path

import pytest

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from tests.otloss_llm.conftest import Cli, options, read  # noqa: E402

DATA = Path(__file__).parents[4] / "shared/data"
STORIES, SHAKESPEARE = DATA / "models/stories260K", DATA / "text/tinyshakespeare.txt"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not (STORIES.is_dir() and SHAKESPEARE.is_file()), reason="no model and text at hand"),
]

TRAINING = options(
    model_name_or_path=STORIES, train_text=SHAKESPEARE, block_size=128, max_steps=40, learning_rate=1e-3,
    per_device_train_batch_size=8, warmup_steps=4, logging_steps=10, save_steps=20, use_cpu=True, disable_tqdm=True,
    validation_fraction=0.01,
)  # fmt: skip


def test_emo_learns_shakespeare(cli: Cli, tmp_path: Path) -> None:
    run = tmp_path / "run"
    assert cli("train", *TRAINING, *options(objective="emo", output_dir=run)).code == 0
    log = [entry["nll"] for entry in read(run / "log.json") if "nll" in entry]
    assert log == sorted(log, reverse=True), "of means over ten steps"
    assert log[-1] < log[0] - 0.5
    assert transformers.AutoModelForCausalLM.from_pretrained(run).config.vocab_size == 512

    written = cli("generate", *options(model_name_or_path=run, prompt=["ROMEO:"], max_new_tokens=60))
    assert written.out.startswith("--- 1\nROMEO:")
    assert len(written.out.split()) > 10
    test = tmp_path / "test.txt"
    test.write_text(SHAKESPEARE.read_text(encoding="utf-8")[-20_000:], encoding="utf-8")
    scores = cli("evaluate", *options(model_name_or_path=run, text=test, block_size=128)).json
    before = cli("evaluate", *options(model_name_or_path=STORIES, text=test, block_size=128)).json
    assert scores["perplexity"] < 0.5 * before["perplexity"]
    assert 0 < scores["transport_cost"] < before["transport_cost"]
