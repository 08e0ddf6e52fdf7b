"""The experiment with a known source, on a tiny one: resumable, with right divergences and clear messages."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks.paper.evaluation.divergences import token_divergence
from benchmarks.paper.evaluation.mauve import cluster_divergence, last_hidden_states
from benchmarks.paper.evaluation.neighbours import neighbour_overlap
from benchmarks.paper.evaluation.overlap import rouge
from benchmarks.paper.models import load_model, load_tokenizer
from benchmarks.paper.oracle import sample_rows
from tests.otloss_llm.conftest import Cli, Tiny, options, read


def oracle_options(tiny: Tiny, folder: Path, **changed: object) -> list[str]:
    given = {"source": tiny.llama, "output_dir": folder, "objectives": ["mle", "emo/source"], "seeds": [0, 1],
             "temperatures": [1.0, 0.8], "text_length": 8, "num_texts": 20, "student_layers": 1, "start_steps": 3,
             "student_steps": 2, "student_batch_size": 4, "use_cpu": True, "disable_tqdm": True}  # fmt: skip
    return options(**(given | changed))


@pytest.mark.slow
def test_the_command_measures_every_arm_once(cli: Cli, tiny: Tiny, tmp_path: Path) -> None:
    ended = cli(*oracle_options(tiny, tmp_path / "out"))
    assert ended.code == 0, ended.err
    assert "| emo/source |" in ended.out
    results = json.loads((tmp_path / "out/report.json").read_text())
    assert [(run["arm"], run["seed"]) for run in results["runs"]] == [
        (arm, seed) for seed in (0, 1) for arm in ("mle", "emo/source")
    ]
    source, student = load_model(str(tiny.llama)), load_model(str(tmp_path / "out/mle-seed1"))
    texts = np.load(tmp_path / "out/texts-test.npy").tolist()
    (recall,) = token_divergence(source, student, texts, q_temperatures=[0.8])
    run = results["runs"][2]
    assert run["forward"][1] == pytest.approx(recall.kl, rel=1e-5)
    assert run["cross_entropy"][1] == pytest.approx(recall.cross_entropy, rel=1e-5)
    report = (tmp_path / "out/report.md").read_text()
    perplexities = [np.exp(run["cross_entropy"][0]) for run in results["runs"] if run["arm"] == "mle"]
    assert f"| mle | {np.mean(perplexities):.2f} ± {np.std(perplexities, ddof=1):.2f} |" in report
    begun = torch.from_numpy(np.load(tmp_path / "out/texts-test.npy")).long()
    drawn = sample_rows(student, begun[:, :1], 8, seed=1001)
    decode = load_tokenizer(str(tiny.llama)).batch_decode
    expected = rouge(*(decode(rows[:, 1:], skip_special_tokens=True) for rows in (drawn, begun)))
    assert (run["rouge_1"], run["rouge_l"]) == pytest.approx(expected)
    features = [last_hidden_states(source, rows.tolist()) for rows in (begun, drawn)]
    overlap = neighbour_overlap(*features)
    expected = (overlap.precision, overlap.recall, cluster_divergence(*features).js)
    columns = ("neighbour_precision", "neighbour_recall", "cluster_js")
    assert tuple(run[name] for name in columns) == pytest.approx(expected, rel=1e-5)
    ceiling = results["overlap_ceiling"]
    before = (tmp_path / "out/mle-seed0/divergence-T1.json").stat().st_mtime_ns
    again = cli(*oracle_options(tiny, tmp_path / "out", temperatures=[1.0, 0.8, 0.6]))
    assert again.code == 0
    assert (tmp_path / "out/mle-seed0/divergence-T1.json").stat().st_mtime_ns == before
    gained = json.loads((tmp_path / "out/report.json").read_text())
    assert gained["overlap_ceiling"] == ceiling
    assert [gained["runs"][2][name] for name in columns] == [run[name] for name in columns]
    assert "length: 8 there, 9 asked for" in cli(*oracle_options(tiny, tmp_path / "out", text_length=9)).error


def test_messages(cli: Cli, tiny: Tiny, tmp_path: Path) -> None:
    for changed, message in (
        ({"train_text": "a.txt"}, "--train_text cannot be combined with --source"),
        ({"objectives": ["mle/T=0.8"]}, "has a temperature"),
        ({"objectives": ["mle/source"]}, "an embedding without a cost"),
        ({"text_length": 10_000}, "more than the source's context"),
        ({"num_texts": 3}, "texts is 3, expected 20 or more"),
    ):
        assert message in cli(*oracle_options(tiny, tmp_path / "out", **changed)).error


def test_rows_are_sampled_at_the_temperature(tiny: Tiny) -> None:
    model = load_model(str(tiny.llama))
    rows = sample_rows(model, torch.full((4000, 1), 1), 2, temperature=0.5)
    with torch.no_grad():
        expected = torch.softmax(model(input_ids=torch.tensor([[1]])).logits[0, -1] / 0.5, -1)
    actual = torch.bincount(rows[:, 1], minlength=len(expected)) / len(rows)
    assert (rows[:, 0] == 1).all()
    assert float((actual - expected).abs().max()) < 4 * (float(expected.max()) / 4000) ** 0.5


@pytest.mark.slow
def test_students_may_start_from_a_given_model(cli: Cli, tiny: Tiny, tmp_path: Path) -> None:
    """Its own rows without their leading directions are the cost; few texts are trained on in epochs."""
    given = {"start": tiny.llama, "student_texts": 6, "objectives": ["mle", "emo", "emo/raw"], "seeds": [0],
             "temperatures": [1.0]}  # fmt: skip
    ended = cli(*oracle_options(tiny, tmp_path / "out", **given))
    assert ended.code == 0, ended.err
    assert not (tmp_path / "out/start-model").exists()
    assert np.load(tmp_path / "out/texts-train.npy").shape == (6, 8)
    recorded = [read(tmp_path / f"out/{arm}-seed0/run.json") for arm in ("emo", "emo-raw")]
    assert [run["embedding"] for run in recorded] == ["all-but-the-top", "raw"]
    weights = [load_model(str(tmp_path / f"out/{arm}-seed0")).lm_head.weight for arm in ("mle", "emo", "emo-raw")]
    assert not torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[1], weights[2])
