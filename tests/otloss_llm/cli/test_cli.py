"""The four commands: their output on stdout, stderr and in files, and their messages for wrong input."""

import json
import re
import shutil
import subprocess
import sys
from contextlib import chdir
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers

import otloss_llm
from otloss_llm import EmbeddingCost
from otloss_llm._precheck import COMMANDS, fields_of, first_error
from otloss_llm.cli import arguments
from otloss_llm.cli.options import OptionParser
from otloss_llm.data.blocks import PackedBlocks
from otloss_llm.evaluation import perplexity
from otloss_llm.models.loading import load_model, load_tokenizer
from tests.otloss_llm.conftest import BLOCK, CONTEXT, Cli, Tiny, options, read, train_options


def test_help_version_and_missing_options(cli: Cli, tiny: Tiny) -> None:
    for command in COMMANDS:
        ended = cli(command, "--help")
        assert (ended.code, ended.err) == (0, "")
        assert "--model_name_or_path" in ended.out
        assert "--ddp_backend" not in ended.out, "the less common training arguments are hidden"
    ended = cli("--version")
    assert (ended.code, ended.out, ended.err) == (0, f"otloss-llm {otloss_llm.__version__}\n", "")
    nothing = cli()
    assert (nothing.code, nothing.out, nothing.err[:6]) == (2, "", "usage:")
    assert "--model_name_or_path" in cli("train").error
    assert "output_dir" in cli("train", *options(model_name_or_path=tiny.llama, train_text=tiny.text)).error
    assert "nonsense" in cli("nonsense").error


@pytest.mark.parametrize("objective", ["gem:0.7+smoothing:0.05", "emo"])
def test_train_lowers_nll_and_leaves_a_model_that_loads(cli: Cli, tiny: Tiny, tmp_path: Path, objective: str) -> None:
    ended = cli(*train_options(tiny, tmp_path / "run", objective=objective, max_steps=25))
    results = ended.json  # stdout holds nothing else
    log = read(tmp_path / "run/log.json")
    assert ended.code == 0
    assert results == read(tmp_path / "run/results.json")
    assert results["steps"] == 25
    assert results["eval_nll"] < log[0]["nll"] - 0.5
    assert "'nll'" in ended.err, "the trainer's log goes to stderr"
    steps = [entry for entry in log if "loss" in entry]  # one for every 5 steps, and before the last checkpoint
    assert [entry["step"] for entry in steps] == [4, 5, 8, 10, 12, 15, 16, 20, 24, 25]
    for key in ("loss", "nll", "transport_cost"):
        if key in steps[0]:
            expected = np.average([entry[key] for entry in steps], weights=np.diff([0, *(e["step"] for e in steps)]))
            assert results[f"train_{key}"] == pytest.approx(expected, rel=1e-5)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "run")
    assert len(transformers.AutoTokenizer.from_pretrained(tmp_path / "run")) <= model.config.vocab_size


def test_evaluate_prints_what_the_library_computes(
    cli: Cli, tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = tmp_path / "scores.json"
    with monkeypatch.context() as patched:
        patched.setattr(torch.cuda, "is_available", lambda: True)
        scored = options(model_name_or_path=tiny.gpt2, text=tiny.text, block_size=BLOCK, output_file=output)
        ended = cli("evaluate", "--use_cpu", *scored)
    model, tokenizer = load_model(str(tiny.gpt2)), load_tokenizer(str(tiny.gpt2))
    blocks = PackedBlocks.from_texts([tiny.text.read_text(encoding="utf-8")], tokenizer, BLOCK)
    scores = perplexity(model, blocks, cost=EmbeddingCost.from_model(model, directions=None))
    assert ended.json["perplexity"] == pytest.approx(scores.perplexity)
    assert ended.json["transport_cost"] == pytest.approx(scores.transport_cost)
    assert ended.json["tokens"] == len(blocks) * (BLOCK - 1)
    assert read(output) == ended.json


@pytest.mark.parametrize(("written", "meant"), [
    (["--bf16"], "--dtype bfloat16?"), (["--per_device_eval_batch_size", "4"], "--batch_size?"),
    (["--validation_text", "x.txt"], "--text?"), (["--max_tokens", "4"], "--max_new_tokens?"),
])  # fmt: skip
def test_an_option_of_train_names_that_of_evaluate(cli: Cli, tiny: Tiny, written: list[str], meant: str) -> None:
    arguments = ["evaluate", *options(model_name_or_path=tiny.gpt2, text=tiny.text), *written]
    assert f"did you mean {meant}" in str(first_error(arguments))
    assert f"did you mean {meant}" in cli(*arguments).error


@pytest.mark.parametrize(("written", "meant"), [
    ("--objective", None), ("--dataset_name", None), ("--device", "--use_cpu"), ("--outputfile", "--output_file"),
])  # fmt: skip
def test_no_option_of_another_meaning_is_suggested(written: str, meant: str | None) -> None:
    error = str(first_error(["evaluate", written, "x"]))
    assert error.startswith(f"evaluate has no option '{written}'" + (f", did you mean {meant}?" if meant else " (see"))


def test_texts_are_classified_in_context(cli: Cli, tiny: Tiny, tmp_path: Path) -> None:
    (tmp_path / "task.txt").write_text("".join(f"{i % 2} The fox {i}\n" for i in range(9)), encoding="utf-8")
    given = options(model_name_or_path=tiny.llama, in_context=tmp_path / "task.txt", demonstrations=4)
    ended = cli(
        "evaluate", *given,
        *options(num_questions=6, predictions_file=tmp_path / "labels.jsonl", template="{text}\\n{label}"),
        *options(labels=["0=bad", "1=good"], retriever="bm25", scoring="label"),
    )  # fmt: skip
    actual = ended.json["in_context"]
    lines = [json.loads(line) for line in (tmp_path / "labels.jsonl").read_text().splitlines()]
    assert (actual["texts"], actual["shown_from"], actual["labels"]) == (6, 3, ["bad", "good"])
    assert actual["accuracy"] == sum(line["correct"] for line in lines) / 6
    assert actual["template"] == "{text}\n{label}"
    assert "none is left to show" in cli("evaluate", *given).error


def test_generate_writes_the_same_samples_to_stdout_and_file(cli: Cli, tiny: Tiny, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("A dog\n\nThe fox\n", encoding="utf-8")
    given = ["generate", *options(model_name_or_path=tiny.llama, prompts_file=prompts, max_new_tokens=6, num_samples=2)]
    shown = cli(*given)
    output = tmp_path / "samples.jsonl"
    written = cli(*given, *options(output_file=output))
    records = [json.loads(line) for line in output.read_text(encoding="utf-8").split("\n") if line]
    assert written.out == ""
    assert [record["prompt"] for record in records] == ["A dog", "A dog", "The fox", "The fox"]
    expected = "".join(f"--- {n}\n{r['prompt']}{r['continuation']}\n" for n, r in enumerate(records, 1))
    assert shown.out == expected
    assert cli(*given).out == shown.out


# ---- bad input: (options that change a good training, what the message has to say) ---------------

BAD_TRAININGS: list[tuple[dict[str, object], str]] = [
    ({"train_text": ""}, "neither of --train_text and --train_questions"),
    ({"train_text": "short.txt"}, f"block.*{BLOCK}"),
    ({"objective": "mlee"}, "mlee.*mixce"),
    ({"max_step_s": 3}, "--max_step_s.*--max_steps"),
    ({"max_steps": 0}, "max_steps.*0"),
    ({"resume_from_checkpoint": "x"}, "resume_from_checkpoint.*same command"),
    ({"block_size": CONTEXT + 1}, f"block_size.*{CONTEXT + 1}.*{CONTEXT}"),
    ({"cost_embedding": "none.npy"}, "none.npy"),
    ({"output_dir": "other"}, "other.*no run of ours"),
    ({"model_name_or_path": "./no/such/model"}, "./no/such/model"),
    ({"lora_alpha": 8}, "need --lora_r"),
]


@pytest.mark.parametrize(("changes", "said"), BAD_TRAININGS)
def test_invalid_options_print_one_line_before_training(
    cli: Cli, tiny: Tiny, tmp_path: Path, changes: dict[str, object], said: str
) -> None:
    (tmp_path / "short.txt").write_text("too short", encoding="utf-8")
    (tmp_path / "other").mkdir()
    (tmp_path / "other/notes.md").write_text("mine", encoding="utf-8")
    with chdir(tmp_path):
        assert re.search(said, cli(*train_options(tiny, tmp_path / "run", **changes)).error)
    assert not list(tmp_path.glob("run/[!.]*"))


def test_invalid_generations_print_one_line(cli: Cli, tiny: Tiny, tmp_path: Path) -> None:
    given = ["generate", *options(model_name_or_path=tiny.gpt2)]
    assert "context" in cli(*given, *options(max_new_tokens=CONTEXT + 1)).error
    (tmp_path / "there.jsonl").write_text("mine", encoding="utf-8")
    evaluate = ["evaluate", *options(model_name_or_path=tiny.gpt2, text=tiny.text, block_size=BLOCK)]
    for command in (given, evaluate):
        assert "there.jsonl" in cli(*command, *options(output_file=tmp_path / "there.jsonl")).error
    assert (tmp_path / "there.jsonl").read_text(encoding="utf-8") == "mine"
    assert "context" in cli(*evaluate, *options(block_size=CONTEXT + 1)).error


def test_divergence_is_named(cli: Cli, tiny: Tiny, tmp_path: Path) -> None:
    error = cli(*train_options(tiny, tmp_path / "run", learning_rate=1e30, max_grad_norm=0)).error
    assert "diverged" in error
    assert "learning rate" in error
    assert not (tmp_path / "run/results.json").exists()


def test_wrong_options_and_files_are_found_without_torch(tiny: Tiny, tmp_path: Path) -> None:
    for changes, said in (
        ({"max_step_s": 3}, "no option '--max_step_s', did you mean --max_steps?"),
        ({"max_steps": "x"}, "argument --max_steps: invalid int value: 'x'"),
        ({"cost_embedding": "none.npy"}, "no embedding file 'none.npy'"),
    ):
        assert said in str(first_error(train_options(tiny, tmp_path / "run", **changes)))
    assert first_error(train_options(tiny, tmp_path / "run")) is None
    given = train_options(tiny, tmp_path / "run", train_text="none.txt")
    command = [sys.executable, "-X", "importtime", "-m", "otloss_llm", *given]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert "otloss-llm: error: there is no file or folder 'none.txt'" in done.stderr
    assert "torch" not in done.stderr


@pytest.mark.parametrize("command", COMMANDS)
def test_the_options_known_without_torch_are_those_of_the_parser(command: str) -> None:
    parser = OptionParser([getattr(arguments, kind) for kind in COMMANDS[command]], prog=command)
    actions = [action for action in parser._actions if action.dest not in ("help", "")]
    fields = fields_of(command)
    for action in actions:
        for written in action.option_strings:
            name = written.removeprefix("--").replace("-", "_")
            assert {name, name.removeprefix("no_")} & fields.keys(), written
    assert {name for name, field in fields.items() if field.required} == {a.dest for a in actions if a.required}
    for name, field in fields.items():
        if field.annotation.removesuffix(" | None") in ("int", "float"):
            (kind,) = {action.type.__name__ for action in actions if action.dest == name}
            assert kind == field.annotation.removesuffix(" | None"), name


def test_an_adapter_is_trained_resumed_and_loaded_again(cli: Cli, tiny: Tiny, tmp_path: Path) -> None:
    pytest.importorskip("peft")
    given = {"lora_r": 2, "lora_target_modules": ["q_proj", "v_proj"], "objective": "mle"}
    run = tmp_path / "run"
    first = cli(*train_options(tiny, run, max_steps=4, save_steps=2, **given))
    assert first.code == 0, first.err
    for name in ("results.json", "adapter_model.safetensors"):
        (run / name).unlink()
    shutil.rmtree(run / "checkpoint-4")
    resumed = cli(*train_options(tiny, run, max_steps=4, save_steps=2, **given))
    assert resumed.json["eval_nll"] == pytest.approx(first.json["eval_nll"], rel=1e-6)
    assert not (run / "model.safetensors").exists()
    scored = {"text": tiny.text, "block_size": BLOCK}
    before = cli("evaluate", *options(model_name_or_path=tiny.llama, **scored)).json["nll"]
    after = cli("evaluate", *options(model_name_or_path=run, **scored)).json["nll"]
    assert after < before - 1e-3, "the adapter is loaded with its model"
    other = cli(*train_options(tiny, run, max_steps=4, save_steps=2, **given | {"lora_r": 3})).error
    assert "lora" in other
