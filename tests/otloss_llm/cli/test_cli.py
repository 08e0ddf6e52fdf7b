"""The command line: rows as TRL makes them, runs that resume, what is measured, and one line for wrong input."""

import io
import json
import os
import re
import shutil
import signal
from collections.abc import Iterator
from contextlib import chdir, contextmanager, redirect_stderr
from importlib.util import find_spec
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
import transformers
from tokenizers.processors import TemplateProcessing
from torch.optim.optimizer import register_optimizer_step_pre_hook
from transformers import trainer_jit_checkpoint

import otloss_llm
from otloss_llm import MLE, EmbeddingCost, token_loss
from otloss_llm.cli import main
from otloss_llm.cli.guard import only_run_in, writing_to
from otloss_llm.costs.tokenizer_numbers import NumberTokens
from tests.otloss_llm.conftest import CONTEXT, Cli, Tiny, launch, options, read, save

trl = pytest.importorskip("trl")
datasets = pytest.importorskip("datasets")

pytestmark = pytest.mark.filterwarnings("ignore")  # the libraries warn of each other

SUMS = [{"prompt": f"{a} + {b} =", "completion": f" {a + b}"} for a in range(8) for b in range(5)]
TEMPLATE = (
    "{% if tools %}T:{{ tools | tojson }}{% endif %}"
    "{% for m in messages %}{% if m.role == 'assistant' %}A:{% generation %}"
    "{% if m.tool_calls %}{{ m.tool_calls | tojson }}{% else %}{{ m.content }}{% endif %}{{ eos_token }}"
    "{% endgeneration %}{% else %}{{ m.role }}:{{ m.content }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}A:{% endif %}"
)


def chats() -> list[dict[str, Any]]:
    """Conversations in which the model calls a tool."""
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": 2}}}
    tool = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
    return [
        {
            "messages": [
                {"role": "user", "content": f"{n}?"},
                {"role": "assistant", "tool_calls": [call]},
                {"role": "tool", "name": "add", "content": str(n)},
                {"role": "assistant", "content": f"it is {n}"},
            ],
            "tools": [tool],
        }
        for n in range(12)
    ]


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def model(tiny: Tiny, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the tiny GPT-2, without dropout, and a chat template."""
    folder = Path(shutil.copytree(tiny.gpt2, tmp_path_factory.mktemp("cli") / "model"))
    config = read(folder / "config.json") | {f"{part}_pdrop": 0.0 for part in ("resid", "embd", "attn")}
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def sums(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("data") / "sums.jsonl", SUMS)


def asked(command: str, model: Path, data: Path, **changes: object) -> list[str]:
    """Options of a run of 6 steps with a checkpoint every 2, or of an evaluation."""
    base: dict[str, object] = {
        "model_name_or_path": model, "dataset_name": data, "use_cpu": True, "disable_tqdm": True,
    }  # fmt: skip
    if command == "train":
        base |= {"max_steps": 6, "save_steps": 2, "logging_steps": 1, "per_device_train_batch_size": 4,
                 "learning_rate": 3e-3}  # fmt: skip
    return [command, *options(**base | changes)]


def weights_of(folder: Path) -> bytes:
    return (folder / "model.safetensors").read_bytes()


# ---- a command ------------------------------------------------------------------------------------------------------


def test_a_template_that_brings_tokens(cli: Cli, tiny: Tiny, tmp_path: Path) -> None:
    """TRL then adds rows to the model, which the cost of an embedding has too."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(tiny.llama)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|turn|>"]})
    tokenizer.chat_template = TEMPLATE.replace("A:", "<|turn|>")
    tokenizer.save_pretrained(tmp_path / "chat")
    messages = [{"role": "user", "content": "1?"}, {"role": "assistant", "content": "2"}]
    rows, out = write(tmp_path / "chat.jsonl", 8 * [{"messages": messages}]), tmp_path / "out"
    changes = {"chat_template_path": tmp_path / "chat", "cost_embedding": "raw", "max_steps": 1}
    ended = cli(*asked("train", tiny.llama, rows, output_dir=out, **changes))
    assert ended.code == 0, ended.err
    assert "<|turn|>" in transformers.AutoTokenizer.from_pretrained(out).get_vocab()


def test_help_version_and_missing_options(cli: Cli, model: Path) -> None:
    for command in ("train", "evaluate"):
        ended = cli(command, "--help")
        assert (ended.code, "--objective" in ended.out, "--use_peft" in ended.out) == (0, True, True)
    assert cli("--version").out == f"otloss-llm {otloss_llm.__version__}\n"
    nothing = cli()
    assert (nothing.code, nothing.out, nothing.err[:6]) == (2, "", "usage:")
    assert "nonsense" in cli("nonsense").error
    assert "compare_objectives" in cli("compare").error
    assert "--config has no value" in cli("train", "--config").error
    assert "none.yaml" in cli("train", "--config=none.yaml").error
    assert "--model_name_or_path is missing" in cli("train").error
    assert "--dataset_name is missing" in cli("train", *options(model_name_or_path=model)).error


def test_train_lowers_nll_and_leaves_a_model_that_loads(cli: Cli, model: Path, sums: Path, tmp_path: Path) -> None:
    """Options of a file, and of the command line, which come first."""
    (tmp_path / "run.yaml").write_text("objective: gem:0.7+smoothing:0.05\nlogging_steps: 7\n", encoding="utf-8")
    ended = cli(
        *asked("train", model, sums, output_dir=tmp_path / "run", config=tmp_path / "run.yaml", max_steps=20),
        *options(eval_strategy="steps", eval_steps=10, test_split_size=0.1),
    )
    assert ended.code == 0, ended.err
    log = read(tmp_path / "run/trainer_state.json")["log_history"]
    assert ended.json["steps"] == 20
    assert ended.json["nll"] == [entry["nll"] for entry in log if "nll" in entry][-1]
    assert ended.json["eval_nll"] < log[0]["nll"] - 0.5
    assert read(tmp_path / "run/run.json")["objective"] == "gem:0.7+smoothing:0.05"
    assert "'nll'" in ended.err, "the trainer's log goes to stderr"
    trained = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "run")
    assert len(transformers.AutoTokenizer.from_pretrained(tmp_path / "run")) <= trained.config.vocab_size


# ---- rows -----------------------------------------------------------------------------------------------------------


ROWS: dict[str, dict[str, Any]] = {
    "completions": {}, "text": {"packing": True, "packing_strategy": "wrapped", "max_length": 16},
    "fitted": {"packing": True, "max_length": 32}, "tools": {"assistant_only_loss": True, "max_length": 512},
    "stream": {},
}  # fmt: skip


@pytest.mark.parametrize("kind", ROWS)
def test_rows_are_those_of_trl(kind: str, model: Path, sums: Path, tmp_path: Path) -> None:
    """Token by token, with the labels; answers alone in conversations, where tool calls are answers."""
    from datasets import load_dataset

    from otloss_llm.cli.rows import checked_split, load_splits
    from otloss_llm.cli.settings import parse
    from otloss_llm.cli.trainer import build_trainer

    data = {
        "tools": lambda: write(tmp_path / "chat.jsonl", chats()),
        "text": lambda: write(tmp_path / "text.jsonl", [{"text": f"{row['prompt']} and so on"} for row in SUMS]),
    }.get(kind, lambda: sums)()
    settings = ROWS[kind] | {"output_dir": str(tmp_path / "run"), "use_cpu": True, "max_steps": 1}
    given = asked("train", model, data, **settings, dataset_streaming=kind == "stream")[1:]
    wanted = parse("train", given)
    tokenizer = transformers.AutoTokenizer.from_pretrained(model)
    start = transformers.AutoModelForCausalLM.from_pretrained(model)
    start.config.max_position_embeddings = 512  # nothing is run
    rows = checked_split(
        load_splits(wanted.script, wanted.mixture, seed=0, text_field="text"), "train", "", text_field="text"
    )
    ours = build_trainer(wanted, start, tokenizer, rows, None)
    theirs = trl.SFTTrainer(
        transformers.AutoModelForCausalLM.from_pretrained(model),
        trl.SFTConfig(**settings, bf16=False, gradient_checkpointing=False), processing_class=tokenizer,
        train_dataset=load_dataset("json", data_files=str(data), split="train"),
    )  # fmt: skip
    keys = ("input_ids", "labels")
    mine, expected = ([[row[key] for key in keys] for row in made.train_dataset] for made in (ours, theirs))
    assert mine == expected
    text = tokenizer.decode([token for token in mine[0][1] if token >= 0])
    if kind == "tools":
        assert text == tokenizer.decode(tokenizer(json.dumps(chats()[0]["messages"][1]["tool_calls"]))["input_ids"]) + (
            f"{tokenizer.eos_token}it is 0{tokenizer.eos_token}"
        )
    elif kind in ("completions", "stream"):
        assert text == f" 0{tokenizer.eos_token}"


@pytest.mark.parametrize("streaming", [False, True])
def test_columns_beside_the_ones_that_are_trained_on(model: Path, tmp_path: Path, streaming: bool) -> None:
    """TRL puts the token that ends a row into text beside a completion, and wants a completion beside each prompt."""
    from otloss_llm.cli.rows import checked_split, load_splits

    folder = tmp_path / "data"
    folder.mkdir()
    (folder / "LICENSE.txt").write_text("of the data", encoding="utf-8")
    pair = ("prompt", "completion")
    for unread, names in (("text", pair), ("prompt", ("text",)), ("messages", pair)):
        write(folder / "train.jsonl", [dict.fromkeys((*names, unread), f"{n} and") for n in range(4)])
        script = trl.ScriptArguments(dataset_name=str(folder), dataset_streaming=streaming)
        splits = load_splits(script, trl.DatasetMixtureConfig(), seed=0, text_field="text")
        rows = [*checked_split(splits, "train", "", text_field="text")]
        assert rows == [dict.fromkeys(names, f"{n} and") for n in range(4)]


def test_conversations_are_trained_on_by_their_answers(cli: Cli, model: Path, tmp_path: Path) -> None:
    said = [{"messages": [{"role": "user", "content": f"{n} " * 3}, {"role": "assistant", "content": f"{n}"}]}
            for n in range(9)]  # fmt: skip
    turns = [{"conversations": [{"from": "user", "value": f"{n} " * 3}, {"from": "assistant", "value": f"{n}"}]}
             for n in range(9)]  # fmt: skip
    roles = {"user": "human", "assistant": "gpt"}
    shared = [
        {"conversations": [turn | {"from": roles[turn["from"]]} for turn in row["conversations"]]} for row in turns
    ]
    named = [{"messages": [turn | {"role": roles[turn["role"]]} for turn in row["messages"]]} for row in said]
    beside = [{"prompt": f"{n}", **row} for n, row in enumerate(said)]  # as UltraChat has it
    first = {}
    kinds = (
        ("answers", said, {}), ("turns", turns, {}), ("shared", shared, {}), ("named", named, {}),
        ("beside", beside, {}), ("all", said, {"assistant_only_loss": False}),
    )  # fmt: skip
    for name, rows, changes in kinds:
        data = write(tmp_path / f"{name}.jsonl", rows)
        cli(*asked("train", model, data, output_dir=tmp_path / name, max_steps=1, objective="mle", **changes))
        first[name] = read(tmp_path / name / "trainer_state.json")["log_history"][0]["loss"]
    assert first["turns"] == first["shared"] == first["named"] == first["beside"] == first["answers"]
    assert abs(first["all"] - first["answers"]) > 1e-3


def test_rows_that_are_too_long_are_dropped_with_a_count(
    cli: Cli, model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    data = write(tmp_path / "long.jsonl", [*SUMS, {"prompt": "x " * CONTEXT, "completion": " y"}])
    ended = cli(*asked("train", model, data, output_dir=tmp_path / "run", max_steps=1))
    assert ended.code == 0, ended.err
    assert f"1 of {len(SUMS) + 1} rows are longer than --max_length {CONTEXT}" in caplog.text
    text = tmp_path / "text.txt"
    text.write_text("one two three four " * 50, encoding="utf-8")
    given = asked("train", model, text, output_dir=tmp_path / "text", max_steps=1)
    assert "1 of 1 rows are longer" in cli(*given).error
    assert "all rows of the stream are longer than" in cli(*given, "--dataset_streaming", "true").error
    assert cli(*given, *options(packing=True, packing_strategy="wrapped", max_length=16)).code == 0


def test_the_share_that_is_cut_off_is_the_same_each_time(sums: Path) -> None:
    """A file or a mixture is cut by TRL with a global generator: processes and resumed runs have one share."""
    from otloss_llm.cli.rows import load_splits

    mixture = trl.DatasetMixtureConfig([{"path": "json", "data_files": str(sums)}], test_split_size=0.2)
    for named in ({"dataset_name": str(sums)}, {}):
        given = trl.DatasetMixtureConfig(test_split_size=0.2) if named else mixture
        first, second = (
            load_splits(trl.ScriptArguments(**named), given, seed=3, text_field="text")["test"]["prompt"]
            for _ in range(2)
        )
        assert list(first) == list(second)
        assert len(first) == len(SUMS) // 5


# ---- runs -----------------------------------------------------------------------------------------------------------


@contextmanager
def interrupted_at(step: int, number: int = signal.SIGINT) -> Iterator[None]:
    """Ctrl-C, or another signal, in the middle of an optimizer's step, the first of which is 1."""
    steps = count(1)

    def stop(*_: Any) -> None:
        if next(steps) == step:
            signal.raise_signal(number)

    hook = register_optimizer_step_pre_hook(stop)
    try:
        yield
    finally:
        hook.remove()


@pytest.fixture(scope="module")
def runs(tiny: Tiny, sums: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A run, and the same one that was interrupted; with dropout."""
    folder = tmp_path_factory.mktemp("runs")
    assert main(asked("train", tiny.llama, sums, output_dir=folder / "uninterrupted")) == 0
    with interrupted_at(5), redirect_stderr(io.StringIO()) as said:
        assert main(asked("train", tiny.llama, sums, output_dir=folder / "broken")) == 130
    assert "interrupted" in said.getvalue()
    return folder / "uninterrupted", folder / "broken"


TORN = {"": 0, "trainer_state.json": 0, "model.safetensors": 100, "optimizer.pt": 100}


@pytest.mark.parametrize("torn", TORN)
def test_an_interrupted_run_ends_like_an_uninterrupted_one(
    cli: Cli, tiny: Tiny, sums: Path, runs: tuple[Path, Path], tmp_path: Path, torn: str
) -> None:
    """With EMO, whose cost belongs to the start model though the weights are a checkpoint's."""
    uninterrupted, broken = runs[0], Path(shutil.copytree(runs[1], tmp_path / "broken"))
    if torn:  # killed while it was written: cut off
        os.truncate(broken / "checkpoint-4" / torn, TORN[torn])
    assert cli(*asked("train", tiny.llama, sums, output_dir=broken)).code == 0
    assert weights_of(uninterrupted) == weights_of(broken)
    first, second = (read(run / "trainer_state.json")["log_history"][:6] for run in (uninterrupted, broken))
    assert first == second


def test_a_run_that_saves_itself_on_sigterm_is_not_finished(
    cli: Cli, tiny: Tiny, sums: Path, runs: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The trainer returns as at the end of a run, of which the caller would take the model for the last one."""
    manager = trainer_jit_checkpoint.CheckpointManager
    monkeypatch.setattr(manager, "_sigterm_handler", lambda self, *_: self._enable_checkpoint())  # does not wait
    given = asked("train", tiny.llama, sums, output_dir=tmp_path / "run")
    with interrupted_at(3, signal.SIGTERM):
        stopped = cli(*given, "--enable_jit_checkpoint", "true")
    assert stopped.code == 130
    assert "interrupted" in stopped.err
    assert not (tmp_path / "run/model.safetensors").exists()
    assert (tmp_path / "run/checkpoint-3").is_dir()
    assert cli(*given).code == 0
    assert weights_of(tmp_path / "run") == weights_of(runs[0])


def test_a_stream_that_is_passed_twice(cli: Cli, model: Path, tmp_path: Path) -> None:
    """The trainer keeps gradients of batches that do not fill a step, and skips those of one pass at most."""
    rows = write(tmp_path / "rows.jsonl", SUMS[:12])  # three batches
    settings = {"dataset_streaming": True, "gradient_accumulation_steps": 2, "objective": "mle", "save_steps": 1}
    runs = tmp_path / "uninterrupted", tmp_path / "broken"
    assert cli(*asked("train", model, rows, output_dir=runs[0], **settings)).code == 0
    for entry in read(runs[0] / "trainer_state.json")["log_history"][:6]:
        assert entry["loss"] == pytest.approx(entry["nll"], rel=1e-5)
    given = asked("train", model, rows, output_dir=runs[1], **settings)
    with interrupted_at(5):
        assert cli(*given).code == 130
    assert cli(*given).code == 0
    assert weights_of(runs[0]) == weights_of(runs[1])


def test_a_finished_run_takes_no_step(cli: Cli, model: Path, sums: Path, tmp_path: Path) -> None:
    given = asked("train", model, sums, output_dir=tmp_path / "run", lr_scheduler_type="constant")
    first = cli(*given)
    before = weights_of(tmp_path / "run")
    (tmp_path / "run/model.safetensors").unlink()
    assert cli(*given).json == first.json
    assert weights_of(tmp_path / "run") == before


def test_a_run_without_a_step_is_an_error(cli: Cli, model: Path, sums: Path, tmp_path: Path) -> None:
    given = asked("train", model, sums, output_dir=tmp_path / "run", per_device_train_batch_size=len(SUMS) + 1)
    for length in ([], ["--max_steps", "-1"]):
        assert "do not fill one batch" in cli(*given, "--dataloader_drop_last", "true", *length).error
    assert not (tmp_path / "run/model.safetensors").exists()


def test_two_runs_do_not_share_a_folder(cli: Cli, model: Path, sums: Path, tmp_path: Path) -> None:
    """Both begin where there is no checkpoint yet, whose run could be compared."""
    pytest.importorskip("fcntl")
    given = asked("train", model, sums, output_dir=tmp_path / "run", max_steps=1)
    with only_run_in(tmp_path / "run"):
        assert "another process trains in" in cli(*given).error
    assert not list((tmp_path / "run").glob("*"))
    assert cli(*given).code == 0


@pytest.mark.parametrize(("text", "message"), [
    ("seed: 4.5", "argument --seed: invalid int value: '4.5'"),
    ("seed: true", "argument --seed: invalid int value: 'True'"),
    ("seed: null", "seed of --config is null, expected a value"),
    ("packing: 3", "argument --packing"),
    ("gradient_accumulation_steps: 1.5", "argument --gradient_accumulation_steps"),
    ("learning_rate: [1]", r"learning_rate of --config is \[1\], expected one value"),
    ("objective: 5", "objective is '5', expected one of mle"),
    ("gradient_checkpointing_kwargs: 5", "gradient_checkpointing_kwargs of --config is 5, expected a mapping"),
    ("datasets: [a]", r"datasets of --config is \['a'\], expected a list of mappings"),
])  # fmt: skip
def test_values_of_a_yaml_file_are_read_by_the_types_of_options(text: str, message: str, tmp_path: Path) -> None:
    from otloss_llm.cli.settings import parse

    (tmp_path / "run.yaml").write_text(text, encoding="utf-8")
    with pytest.raises(ValueError, match=message):
        parse("train", ["--model_name_or_path", "model", "--config", str(tmp_path / "run.yaml")])


def test_yaml_files_and_the_command_line_agree(tmp_path: Path) -> None:
    from otloss_llm.cli.settings import parse

    text = (
        "max_length: null\nweight_decay: 1\nlearning_rate: 1e-3\nuse_cpu: true\nlogging_nan_inf_filter: false\n"
        "lora_target_modules: q_proj\nlora_modules_to_save: [lm_head]\nlr_scheduler_kwargs: {a: 1, b: [1e-6]}\n"
        "save_strategy: no\nreport_to: [no]\nrun_name: 2026-11-30\nresume_from_checkpoint: false\n"
    )
    (tmp_path / "run.yaml").write_text(text, encoding="utf-8")
    words = ["max_length", "None", "weight_decay", "1", "learning_rate", "1e-3", "use_cpu", "true",
             "logging_nan_inf_filter", "false", "lora_target_modules", "q_proj", "lora_modules_to_save", "lm_head",
             "lr_scheduler_kwargs", '{"a": 1, "b": [1e-6]}', "save_strategy", "no", "report_to", "no",
             "run_name", "2026-11-30"]  # fmt: skip
    given = [f"--{word}" if i % 2 == 0 else word for i, word in enumerate(words)]
    base = ["--model_name_or_path", "model", "--output_dir", str(tmp_path)]
    from_words = parse("train", base + given)
    from_file = parse("train", [*base, "--config", str(tmp_path / "run.yaml")])
    assert from_file.settings() == from_words.settings()
    assert from_file.args.resume_from_checkpoint is None
    assert from_file.args.save_strategy == from_words.args.save_strategy
    assert (from_file.args.report_to, from_file.args.run_name) == (from_words.args.report_to, from_words.args.run_name)
    assert from_file.model.lora_target_modules == ["q_proj"]  # and no pattern of whole paths


@pytest.mark.parametrize(("row", "message"), [
    ({"input_ids": [1, 99999]}, "input_ids of row 1500 has 99999, expected whole numbers from 0 to"),
    ({"input_ids": [1, -1]}, "input_ids of row 1500 has -1"),
    ({"input_ids": [1, None]}, "input_ids of row 1500 has nan"),
    ({"input_ids": None}, "row 1500 has columns of lengths {'input_ids': None}"),
    ({"input_ids": [1, 2], "labels": [1, 99999]}, "labels of row 1500 has 99999"),
    ({"input_ids": [1, 2], "labels": [1]}, r"row 1500 has columns of lengths {'input_ids': 2, 'labels': 1}"),
    ({"input_ids": [1, 2.5]}, "input_ids of row 0 is '.1.0, 2.0.'"),
])  # fmt: skip
def test_tokens_that_no_model_has_are_named(row: dict[str, Any], message: str) -> None:
    from otloss_llm.cli.rows import check_tokens

    usual = {"input_ids": [1, 2]} | ({"labels": [-100, 2]} if "labels" in row else {})
    rows = datasets.Dataset.from_list([usual] * 1500 + [row])
    with pytest.raises(ValueError, match=message):
        check_tokens(rows, 290)


def test_text_that_begins_with_the_start_of_the_tokenizer_is_told(
    cli: Cli, model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = Path(shutil.copytree(model, tmp_path / "starting"))
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    start = tokenizer.bos_token
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single=f"{start} $A", special_tokens=[(start, tokenizer.bos_token_id)]
    )
    tokenizer.save_pretrained(folder)
    for before, count_of_warnings in (("", 0), (start, 1)):
        rows = [row | {"prompt": before + row["prompt"]} for row in SUMS]
        caplog.clear()
        cli(*asked("evaluate", folder, write(tmp_path / f"rows{count_of_warnings}.jsonl", rows)))
        assert caplog.text.count("prompt begins with") == count_of_warnings


@pytest.mark.parametrize("is_stream", [False, True])
def test_csv_files_are_text_whatever_they_look_like(is_stream: bool, tmp_path: Path) -> None:
    """datasets chose types for each file and each 10,000 rows: 3.80 and 091 became 3.8 and 91."""
    from trl import DatasetMixtureConfig, ScriptArguments

    from otloss_llm.cli.rows import load_splits

    answers = [" 3.80", "091", "True", "NA", "2024-01-26", "unknown"]
    folder = tmp_path / "rows"
    folder.mkdir()
    for name, part in (("a", answers[::-1]), ("b", answers[:3]), ("c", answers[:1] * 2)):
        rows = "".join(f"what is {i},{answer}\n" for i, answer in enumerate(part))
        (folder / f"{name}.csv").write_text(f"prompt,completion\n{rows}", encoding="utf-8")
    for source, expected in (
        (folder, [*answers[::-1], *answers[:3], *answers[:1] * 2]),
        (folder / "b.csv", answers[:3]),
    ):
        script = ScriptArguments(dataset_name=str(source), dataset_streaming=is_stream)
        rows = load_splits(script, DatasetMixtureConfig(), seed=0, text_field="text")["train"]
        assert [row["completion"] for row in rows] == expected
    late = "prompt,completion,note\n" + "what,1.0,\n" * 10_000 + "what,2.50,seen\n"
    (tmp_path / "late.csv").write_text(late, encoding="utf-8")
    script = ScriptArguments(dataset_name=str(tmp_path / "late.csv"), dataset_streaming=is_stream)
    *_, last = load_splits(script, DatasetMixtureConfig(), seed=0, text_field="text")["train"]
    assert last == {"prompt": "what", "completion": "2.50", "note": "seen"}


def test_empty_cells_of_the_text_are_missing_and_declared_types_are_kept(tmp_path: Path) -> None:
    from trl import DatasetMixtureConfig, ScriptArguments

    from otloss_llm.cli.rows import load_splits

    (tmp_path / "a.csv").write_text("content,score\nseen,1.50\n,2\nlast,\n", encoding="utf-8")
    script = ScriptArguments(dataset_name=str(tmp_path / "a.csv"))
    rows = load_splits(script, DatasetMixtureConfig(), seed=0, text_field="content")["train"]
    assert rows.to_dict() == {"content": ["seen", None, "last"], "score": ["1.50", "2", ""]}
    declared = [{"name": "content", "dtype": "string"}, {"name": "score", "dtype": "float64"}]
    configs = [{"config_name": "default", "data_files": "a.csv"}]
    head = json.dumps({"configs": configs, "dataset_info": {"features": declared}})  # YAML too
    (tmp_path / "README.md").write_text(f"---\n{head}\n---\n", encoding="utf-8")
    script = ScriptArguments(dataset_name=str(tmp_path))
    rows = load_splits(script, DatasetMixtureConfig(), seed=0, text_field="content")["train"]
    assert rows["score"][:] == [1.5, 2.0, None]
    (tmp_path / "a.csv").write_text("content,score\n3.80,1.50\nNA,2\n007,NULL\n", encoding="utf-8")
    rows = load_splits(script, DatasetMixtureConfig(), seed=0, text_field="content")["train"]
    assert rows.to_dict() == {"content": ["3.80", "NA", "007"], "score": [1.5, 2.0, None]}


def test_padding_that_would_be_read_is_named() -> None:
    from otloss_llm.cli.rows import check_tokens

    whole, right = {"attention_mask": [1, 1, 1]}, {"attention_mask": [1, 1, 0]}
    fine = [[whole], [right | {"labels": [-100, 2, -100]}], [right | {"completion_mask": [0, 1, 0]}]]
    read = {"attention_mask": [0, 1, 1], "labels": [-100, -100, 2]}
    packed = datasets.Dataset.from_list([{"input_ids": [1, 2, 3]} | row for row in [fine[1][0], fine[1][0]]])
    with pytest.raises(ValueError, match="attention_mask of row 0 has zeros"):
        check_tokens(packed, 290, packing=True)
    trained_on = right | {"labels": [1, 2, 3], "completion_mask": [0, 1, 0]}
    for rows in (*fine, [whole, right], [trained_on], [read]):
        dataset = datasets.Dataset.from_list([{"input_ids": [1, 2, 3]} | row for row in rows])
        if rows in fine:
            check_tokens(dataset, 290)
            continue
        with pytest.raises(ValueError, match=rf"attention_mask of row {len(rows) - 1} has zeros.* without padding"):
            check_tokens(dataset, 290)


@pytest.mark.parametrize("save_file", [
    lambda path: path.write_bytes(b"0" * 2**16),
    lambda path: torch.save(torch.zeros(2**14), path),
    lambda path: safetensors.torch.save_file({"w": torch.zeros(2**14)}, path),
])  # fmt: skip
def test_a_full_disk_says_what_to_do(save_file: Any, tmp_path: Path) -> None:
    resource = pytest.importorskip("resource")  # not on Windows
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**12, limits[1]))
    try:
        for folder in (tmp_path, tmp_path / "not" / "made"):  # the rows are prepared before the folder is made
            with pytest.raises(OSError, match=r"cannot be written .* Free space and repeat"), writing_to(folder):
                save_file(tmp_path / "file")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_an_output_folder_that_cannot_be_made_is_named(cli: Cli, model: Path, sums: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for name in ("file", "file/run"):
        error = cli(*asked("train", model, sums, output_dir=tmp_path / name)).error
        assert re.search("--output_dir is .* choose another", error)


def test_token_ids_are_checked_by_both_commands(cli: Cli, model: Path, tmp_path: Path) -> None:
    path = write(tmp_path / "ids.jsonl", [{"input_ids": [1, 2, 3]}, {"input_ids": [1, 9999]}])
    for command, changes in (("train", {"output_dir": tmp_path / "run"}), ("evaluate", {})):
        assert "input_ids of row 1 has 9999" in cli(*asked(command, model, path, **changes)).error


@pytest.mark.parametrize("labels", [None, 1, "positive", [[1], [2]]])
def test_labels_are_lists_of_numbers(labels: Any) -> None:
    from otloss_llm.cli.rows import check_tokens

    with pytest.raises(ValueError, match=r"labels of row 0 is .*expected a list of a number for each token"):
        check_tokens(datasets.Dataset.from_list([{"input_ids": [1, 2], "labels": labels}] * 3), 290)


def test_the_only_split_is_evaluated_unless_another_is_named(cli: Cli, model: Path, sums: Path) -> None:
    assert "splits ['train'] and no 'other'" in cli(*asked("evaluate", model, sums, dataset_test_split="other")).error
    assert cli(*asked("evaluate", model, sums)).json["rows"] == len(SUMS)


@pytest.mark.parametrize(("option", "names", "message"), [
    ("lora_target_modules", "c_attn c_projj", "'c_projj', which no path .*did you mean 'c_proj'"),
    ("lora_modules_to_save", "lm_haed", "'lm_haed', which no path .*did you mean 'lm_head'"),
    ("lora_target_parameters", "nothing", "'nothing', which no path"),
])  # fmt: skip
def test_names_of_layers_are_checked(
    option: str, names: str, message: str, cli: Cli, model: Path, sums: Path, tmp_path: Path
) -> None:
    given = asked("train", model, sums, use_peft=True, output_dir=tmp_path)
    assert re.search(f"--{option} has {message}", cli(*given, f"--{option}", *names.split()).error)


def test_settings_of_an_adapter_need_one(cli: Cli, model: Path, sums: Path, tmp_path: Path) -> None:
    """All weights would be trained, without a word."""
    given = asked("train", model, sums, output_dir=tmp_path, lora_r=8, use_dora=True)
    assert "--lora_r, --use_dora given without --use_peft" in cli(*given).error


def test_a_streamed_mixture_cannot_be_cut(cli: Cli, model: Path, sums: Path, tmp_path: Path) -> None:
    mixture = {"datasets": [{"path": "json", "data_files": str(sums)}], "streaming": True, "test_split_size": 0.2}
    (tmp_path / "mixture.yaml").write_text(json.dumps(mixture), encoding="utf-8")
    given = options(model_name_or_path=model, config=tmp_path / "mixture.yaml", output_dir=tmp_path, use_cpu=True)
    assert "--test_split_size cannot cut a stream" in cli("train", *given).error


def test_a_folder_keeps_to_one_run(cli: Cli, model: Path, sums: Path, tmp_path: Path) -> None:
    start = Path(shutil.copytree(model, tmp_path / "start"))
    folder = tmp_path / "run"
    assert "mlee" in cli(*asked("train", start, sums, output_dir=folder, objective="mlee")).error
    cli(*asked("train", start, sums, output_dir=folder, max_steps=2))
    rows = write(tmp_path / "rows.jsonl", [*SUMS[:-2], SUMS[0], SUMS[1]])
    others: dict[str, object] = {"dataset_name": rows, "impl": "reference", "save_steps": 5, "logging_steps": 3}
    changes = {"objective": "mle", "learning_rate": 1e-3, "weight_decay": 0.3, "optim": "sgd", "data_seed": 3,
               "per_device_train_batch_size": 2}  # fmt: skip
    error = cli(*asked("train", start, sums, output_dir=folder, max_steps=2, **changes | others)).error
    assert "objective: 'emo' there, 'mle' asked for" in error
    named = re.findall(r"(\w+): \S+ there", error)
    assert named == sorted([*changes, "rows"]), "what changes only the kernel, the logs or the checkpoints may differ"
    assert "cost_embedding: None there, 'raw'" in cli(
        *asked("train", start, sums, output_dir=folder, max_steps=2, cost_embedding="raw")
    ).error  # fmt: skip
    resumed = {"max_steps": 2, "resume_from_checkpoint": folder / "checkpoint-2"}
    error = cli(*asked("train", start, sums, output_dir=tmp_path / "new", objective="mle", **resumed)).error
    assert "objective: 'emo' there, 'mle' asked for); resume with its settings" in error
    given = asked("train", start, sums, output_dir=tmp_path / "new", resume_from_checkpoint=folder, max_steps=9)
    assert "the folder of a run; give one of its checkpoints" in cli(*given).error
    assert not list((tmp_path / "new").glob("*"))
    content = read(start / "tokenizer.json")
    ids = content["model"]["vocab"]
    ids["1"], ids["2"] = ids["2"], ids["1"]
    texts = {"tokenizer.json": json.dumps(content), "chat_template.jinja": TEMPLATE.replace("A:", "B:")}
    for file, text in texts.items():
        previous = (start / file).read_text(encoding="utf-8")
        (start / file).write_text(text, encoding="utf-8")
        error = cli(*asked("train", start, sums, output_dir=folder, max_steps=2)).error
        assert re.findall(r"(\w+): \S+ there", error) == ["tokenizer"]
        (start / file).write_text(previous, encoding="utf-8")
    assert cli(*asked("train", start, sums, output_dir=folder, max_steps=2)).code == 0
    changed = transformers.AutoModelForCausalLM.from_pretrained(start)
    with torch.no_grad():
        changed.get_output_embeddings().weight[5] += 1e-3
    changed.save_pretrained(start)
    assert "model: " in cli(*asked("train", start, sums, output_dir=folder, max_steps=2)).error
    os.truncate(folder / "run.json", 0)
    assert "run.json cannot be read" in cli(*asked("train", model, sums, output_dir=folder, max_steps=2)).error
    (folder / "run.json").unlink()
    assert "run.json is missing" in cli(*asked("train", model, sums, output_dir=folder, max_steps=2)).error


def test_divergence_ends_a_run_and_leaves_no_diverged_checkpoint(
    cli: Cli, model: Path, sums: Path, tmp_path: Path
) -> None:
    """The loss of the next step shows it, or the weights before they are saved, as a checkpoint or at the end."""
    given = asked(
        "train", model, sums, output_dir=tmp_path / "end", learning_rate=1e38, max_steps=1, save_strategy="no"
    )
    assert re.search("diverged by step 1: weights are NaN or infinite", cli(*given).error)
    assert not (tmp_path / "end/model.safetensors").exists()
    given = asked("train", model, sums, output_dir=tmp_path / "run", learning_rate=1e30, max_grad_norm=0, save_steps=6)
    assert re.search("diverged by step 1: .*NaN.*learning rate", cli(*given).error)
    given = asked("train", model, sums, output_dir=tmp_path / "run", save_steps=1)

    def spoil(optimizer: Any, *_: Any) -> None:
        optimizer.param_groups[0]["params"][0].data.fill_(torch.inf)

    hook = register_optimizer_step_pre_hook(spoil)
    try:
        assert re.search("diverged by step 1: weights are NaN or infinite", cli(*given).error)
    finally:
        hook.remove()
    assert not list((tmp_path / "run").glob("checkpoint-*"))


def test_all_parts_of_an_adapter_are_loaded(cli: Cli, tiny: Tiny, sums: Path, tmp_path: Path) -> None:
    """transformers' own loading makes new magnitudes of DoRA."""
    from otloss_llm.cli.settings import parse
    from otloss_llm.cli.trainer import load_model

    peft = pytest.importorskip("peft")
    given = {"use_peft": True, "use_dora": True, "learning_rate": 0.03, "lora_modules_to_save": "norm"}
    assert cli(*asked("train", tiny.llama, sums, output_dir=tmp_path, **given)).code == 0
    loaded, _ = load_model(parse("evaluate", asked("evaluate", tmp_path, sums)[1:]))
    expected = peft.AutoPeftModelForCausalLM.from_pretrained(tmp_path).state_dict()
    assert any("magnitude" in name for name in expected)
    assert loaded.state_dict().keys() == expected.keys()
    assert all(torch.equal(weight, expected[name]) for name, weight in loaded.state_dict().items())


def test_an_adapter_is_loaded_on_the_class_that_it_was_trained_on(
    model: Path, sums: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PEFT's automatic class takes none for Llava, and for Qwen3.5 another one, of other names of layers."""
    from otloss_llm.cli import trainer
    from otloss_llm.cli.settings import parse

    peft = pytest.importorskip("peft")
    monkeypatch.setattr(trainer, "AutoProcessor", transformers.AutoTokenizer)  # Llava's own needs packages for images
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    text = {"model_type": "llama", "vocab_size": 300, **sizes}
    vision = {"model_type": "clip_vision_model", "image_size": 28, "patch_size": 14, **sizes}
    config = transformers.LlavaConfig(text_config=text, vision_config=vision, image_token_index=299)
    base, run = tmp_path / "base", tmp_path / "run"
    transformers.LlavaForConditionalGeneration(config).save_pretrained(base)
    settings = peft.LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False, task_type="CAUSAL_LM")
    loaded_base = transformers.LlavaForConditionalGeneration.from_pretrained(base)
    expected = peft.get_peft_model(loaded_base, settings)
    expected.save_pretrained(run)
    transformers.AutoTokenizer.from_pretrained(model).save_pretrained(run)
    request = parse("evaluate", asked("evaluate", run, sums)[1:])
    loaded, _ = trainer.load_model(request)
    torch.testing.assert_close(loaded.state_dict(), expected.state_dict(), rtol=0, atol=0)
    weights = safetensors.torch.load_file(run / "adapter_model.safetensors")
    renamed = {name.replace("language_model", "text"): weight for name, weight in weights.items()}
    safetensors.torch.save_file(renamed, run / "adapter_model.safetensors")
    with pytest.raises(ValueError, match=r"cannot be loaded: the adapter does not fit Llava.*missing adapter keys"):
        trainer.load_model(request)
    for name, value, message in (
        ("base_model_name_or_path", "/nowhere/base", "its base model '/nowhere/base' is not there"),
        ("peft_type", "NEWER", "PEFT knows no adapter of the type 'NEWER'"),
    ):
        config_file = run / "adapter_config.json"
        config_file.write_text(json.dumps(read(config_file) | {name: value}), encoding="utf-8")
        with pytest.raises(ValueError, match=f"cannot be loaded: {message}"):
            trainer.load_model(request)


def test_an_adapter_is_on_all_linear_layers_and_is_loaded_with_its_model(
    cli: Cli, tiny: Tiny, sums: Path, tmp_path: Path
) -> None:
    pytest.importorskip("peft")
    run = tmp_path / "run"
    assert cli(*asked("train", tiny.llama, sums, output_dir=run, use_peft=True, lora_r=2, max_steps=20)).code == 0
    config = read(run / "adapter_config.json")
    layers = {name.rpartition(".")[2] for name in config["target_modules"]}
    assert layers == {*(f"{x}_proj" for x in ("q", "k", "v", "o", "gate", "up", "down"))}
    assert config["lora_dropout"] == 0
    kinds = ((tiny.llama, False), (run, False), (run, True))
    before, after, same = (cli(*asked("evaluate", path, sums, use_peft=peft)).json["nll"] for path, peft in kinds)
    assert after < before - 1e-3
    assert same == after, "the options of the training evaluate its adapter, not a new one"
    assert not (run / "model.safetensors").exists()
    for peft in (False, True):
        given = asked("train", run, sums, output_dir=tmp_path / "again", use_peft=peft)
        assert "merge_and_unload" in cli(*given).error


@pytest.mark.slow
@pytest.mark.distributed
def test_two_processes_are_one_with_twice_the_batch(model: Path, sums: Path, tmp_path: Path) -> None:
    torchrun = ["-m", "torch.distributed.run", "--standalone"]
    for processes, batch in ((1, 8), (2, 4)):
        changes = {"per_device_train_batch_size": batch, "optim": "sgd", "learning_rate": 0.1}
        given = asked("train", model, sums, output_dir=tmp_path / str(processes), **changes)
        launch(*torchrun, f"--nproc-per-node={processes}", "-m", "otloss_llm", *given)
    one, two = (transformers.AutoModelForCausalLM.from_pretrained(tmp_path / name) for name in ("1", "2"))
    torch.testing.assert_close(dict(two.named_parameters()), dict(one.named_parameters()), rtol=1e-5, atol=1e-6)


def test_train_on_numbers_says_what_is_a_number(cli: Cli, model: Path, sums: Path, tmp_path: Path) -> None:
    given = asked("train", model, sums, output_dir=tmp_path / "run", objective="number_token", number_scaling="log")
    ended = cli(*given)
    assert ended.code == 0, ended.err
    assert ended.json["transport_cost"] > 0
    tokenizer = transformers.AutoTokenizer.from_pretrained(model)
    assert str(NumberTokens.of(tokenizer, vocab_size=len(tokenizer)).coverage()) in ended.err
    ids = [tokenizer(row["completion"])["input_ids"] for row in SUMS]
    numbers = sum(tokenizer.decode([token]).strip().isdigit() for row in ids for token in row)
    labels = sum(len(row) + 1 for row in ids)
    assert f"{numbers} of the {labels} tokens that are trained on are numbers" in ended.err
    given = asked("train", model, sums, output_dir=tmp_path / "ratings", objective="expected_value")
    single = sum(tokenizer.decode([token]).strip() in set("0123456789") for row in ids for token in row)
    assert f"{single} of the {labels} tokens that are trained on are ratings" in cli(*given).err
    words = write(tmp_path / "words.jsonl", [{"prompt": "1 + 1", "completion": " two"}] * 3)
    given = asked("train", model, words, output_dir=tmp_path / "words", objective="emo+number", cost_embedding="random")
    assert re.search("none of the .* is a number, so emo.number would equal emo", cli(*given).error)


def test_an_invalid_row_of_a_stream_is_named(cli: Cli, model: Path, tmp_path: Path) -> None:
    """The trainer prepares it in the training, or in the evaluation."""
    turns = {"messages": [{"role": "user", "content": "1"}, {"role": "assistant", "content": "2"}]}
    rows = write(tmp_path / "rows.jsonl", [turns] * 7 + [{"messages": None}] + [turns] * 9)
    given = asked("train", model, rows, output_dir=tmp_path / "run", dataset_streaming=True)
    assert "messages of row 7 is None, expected a list of messages" in cli(*given).error
    assert "messages of row 7 is" in cli(*asked("evaluate", model, rows, dataset_streaming=True)).error


def test_an_encoder_decoder_is_named(cli: Cli, model: Path, sums: Path, tmp_path: Path) -> None:
    sizes = {"vocab_size": 300, "d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 1, "num_heads": 2}
    t5 = transformers.T5ForConditionalGeneration(transformers.T5Config(**sizes, decoder_start_token_id=0))
    save(t5, transformers.AutoTokenizer.from_pretrained(model), tmp_path / "t5")
    assert "Seq2SeqTrainer" in cli(*asked("train", tmp_path / "t5", sums, output_dir=tmp_path / "run")).error


# ---- evaluate -------------------------------------------------------------------------------------------------------


def test_evaluate_prints_what_the_logits_say(cli: Cli, model: Path, sums: Path, tmp_path: Path) -> None:
    """Against each row by itself, in float64."""
    ended = cli(*asked("evaluate", model, sums, per_device_eval_batch_size=7))
    loaded = transformers.AutoModelForCausalLM.from_pretrained(model)
    tokenizer = transformers.AutoTokenizer.from_pretrained(model)
    cost = EmbeddingCost.from_model(loaded, directions=None)
    nll, transport, confidence, correct = [], [], [], []
    for row in SUMS:
        start = len(tokenizer(row["prompt"])["input_ids"])
        ids = torch.tensor([tokenizer(row["prompt"] + row["completion"])["input_ids"] + [tokenizer.eos_token_id]])
        with torch.no_grad():
            logits = loaded(ids).logits[0, start - 1 : -1].double()
        out = token_loss(logits, ids[0, start:], objective=MLE(), cost=cost, reduction="none")
        nll += out.nll.tolist()
        transport += out.cost.tolist()
        top = logits.softmax(-1).max(-1)
        confidence += top.values.tolist()
        correct += (top.indices == ids[0, start:]).tolist()
    bins = np.minimum((np.array(confidence) * 15).astype(int), 14)
    gaps = [abs(np.sum((np.array(correct) - np.array(confidence))[bins == b])) for b in range(15)]
    expected = {
        "nll": np.mean(nll), "transport_cost": np.mean(transport), "perplexity": np.exp(np.mean(nll)),
        "rows": len(SUMS), "tokens": len(nll), "accuracy": np.mean(correct), "calibration_error": sum(gaps) / len(nll),
    }  # fmt: skip
    streamed = cli(*asked("evaluate", model, sums, dataset_streaming=True))
    for measures in (ended.json, streamed.json):
        assert {key: measures[key] for key in expected} == pytest.approx(expected, rel=1e-5)
    assert not (tmp_path / "trainer_output").exists()


def test_evaluate_names_its_own_size_of_batches() -> None:
    from otloss_llm.cli.settings import parse

    with pytest.raises(ValueError, match=r"^evaluate has no option '--batch_size'; use --per_device_eval_batch_size"):
        parse("evaluate", ["--batch_size", "3"])


def test_options_of_metrics_of_batches_change_no_measure(cli: Cli, model: Path, sums: Path) -> None:
    given = asked("evaluate", model, sums)
    assert cli(*given, *options(eval_do_concat_batches=False, batch_eval_metrics=True)).json == cli(*given).json


@pytest.mark.parametrize("packed", [{"packing": True, "max_length": 32}, {"padding_free": True, "max_length": "null"}])
def test_rows_are_not_counted_where_batches_have_others(
    cli: Cli, model: Path, sums: Path, packed: dict[str, object]
) -> None:
    measures = cli(*asked("evaluate", model, sums, **packed)).json
    assert "rows" not in measures
    assert measures["tokens"] == cli(*asked("evaluate", model, sums)).json["tokens"]


def test_masks_of_tokenised_completions_are_obeyed_and_weights_of_tokens_refused(
    cli: Cli, model: Path, tmp_path: Path
) -> None:
    row = {"input_ids": [5, 6, 7, 8], "completion_mask": [0, 0, 1, 1]}
    masked = write(tmp_path / "masked.jsonl", [row] * 3)
    assert cli(*asked("evaluate", model, masked)).json["tokens"] == 6
    assert cli(*asked("evaluate", model, masked, completion_only_loss=False)).json["tokens"] == 9
    weighted = write(tmp_path / "weighted.jsonl", [row | {"token_weight": [1.0, 1.0, 0.5, 0.5]}] * 3)
    assert "column token_weight, which TRL's collator drops" in cli(*asked("evaluate", model, weighted)).error


def test_mauve_of_continuations(cli: Cli, model: Path, sums: Path, tmp_path: Path) -> None:
    if find_spec("mauve") is None:
        assert "pip install mauve-text" in cli(*asked("evaluate", model, sums, mauve_model="gpt2")).error
        return
    judge = shutil.copytree(model, tmp_path / "gpt2")
    assert 0 < cli(*asked("evaluate", model, sums, mauve_model=judge)).json["mauve"] <= 1


@pytest.mark.parametrize(
    ("labels", "expected"),
    [
        ([-100, -100, 3, 2, -100, 5, 2], ([8, 7], [3, 2])),  # two turns, or two rows of a block
        ([-100, -100, 3, 2, 6, 5, 2], ([8, 7], [3, 2])),  # the end of a turn, and a line break behind it
        ([-100, -100, 3, 4, 6, 5, 1], ([8, 7], [3, 4, 6, 5, 1])),
        ([8, 7, 3, 4, 6, 5, 1], ([8, 7, 3], [4, 6, 5, 1])),  # text
        ([-100] * 7, ([8, 7, 3, 2, 6, 5, 2], [])),
    ],
)
def test_a_reference_ends_where_the_answer_does(labels: list[int], expected: tuple[list[int], list[int]]) -> None:
    from otloss_llm.cli.evaluate import _prompt_and_ending

    tokens = [token if label < 0 else label for token, label in zip([8, 7, 3, 2, 6, 5, 2], labels, strict=True)]
    assert _prompt_and_ending({"input_ids": tokens, "labels": labels}, {2}) == expected


def test_the_ends_of_a_text_are_special_tokens(tiny: Tiny) -> None:
    """2, the end by the defaults of many a config, is a letter here."""
    from otloss_llm.cli.evaluate import _end_ids

    tokenizer = transformers.AutoTokenizer.from_pretrained(tiny.gpt2)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|turn|>"]})
    turn = tokenizer.convert_tokens_to_ids("<|turn|>")
    for ends in ([2, turn], turn, [turn, tokenizer.eos_token_id]):
        model = SimpleNamespace(generation_config=SimpleNamespace(eos_token_id=ends))
        assert _end_ids(model, tokenizer) == {turn, tokenizer.eos_token_id}
    model = SimpleNamespace(generation_config=SimpleNamespace(eos_token_id=2))
    assert _end_ids(model, tokenizer) == {tokenizer.eos_token_id}


def test_continuations_are_of_the_model_and_within_its_context(tiny: Tiny) -> None:
    """Positions that the model has not raise; what the folder sets for generation changes no sample."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(tiny.gpt2)
    base = transformers.GPT2Config.from_pretrained(tiny.gpt2).to_dict()
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**base | {"n_positions": 12})).eval()
    ids = tokenizer("one two three four five six seven eight")["input_ids"][:10]
    rows = [{"input_ids": ids, "labels": [-100] * k + ids[k:]} for k in (9, 1, 1, 9, 9)]
    rows.insert(1, {"input_ids": ids[:1], "labels": ids[:1]})  # an empty text, which has nothing to go on with
    trainer = SimpleNamespace(
        model=model, processing_class=tokenizer, train_dataset=datasets.Dataset.from_list(rows),
        args=SimpleNamespace(seed=0, per_device_eval_batch_size=2),
    )  # fmt: skip
    from otloss_llm.cli.evaluate import continuations  # which needs TRL

    texts, references = continuations(trainer, 6)
    assert [len(tokenizer(text)["input_ids"]) > 2 for text in references] == [False, True, True, False, False]
    model.generation_config = transformers.GenerationConfig(
        repetition_penalty=3.0, no_repeat_ngram_size=1, min_p=0.9, eos_token_id=model.generation_config.eos_token_id
    )
    assert continuations(trainer, 6) == (texts, references)


# ---- wrong input: (options that change a good training, what the message has to say) --------------------------------

BAD: list[tuple[dict[str, object], str]] = [
    ({"max_step_s": 3}, "--max_step_s.*--max_steps"),
    ({"max_steps": "x"}, "--max_steps.*invalid int value: 'x'"),
    ({"objective": "mlee"}, "mlee.*mixce"),
    ({"objective": "number_token", "cost_embedding": "raw"}, "number_token reads no embedding"),
    ({"cost_embedding": "none.npy"}, "none.npy"),
    ({"loss_type": "dft"}, "loss_type"),
    ({"dataset_name": "none.jsonl"}, "no file or folder 'none.jsonl'"),
    ({"dataset_name": "notes.md"}, "'.md', expected one of .jsonl"),
    ({"config": "broken.yaml"}, "--config is not YAML"),
    ({"train_text": "x"}, "no option '--train_text'; use --dataset_name"),
    ({"lr": "1e-3"}, "no option '--lr'; use --learning_rate"),
    ({"batch-size=4": ""}, "no option '--batch-size'; use --per_device_train_batch_size"),
    ({"config": "lr.yaml"}, "no option '--lr'; use --learning_rate"),
    ({"resume_from_checkpoint": "true"}, "resume_from_checkpoint is 'true', which is no folder.* leave it out"),
    ({"dataset_name": "empty.jsonl"}, "empty.jsonl.*no rows"),
    ({"dataset_name": "blank.jsonl"}, "text is empty in every row of the split 'train'"),
    ({"dataset_name": "blank.txt"}, "text is empty in every row"),
    ({"chat_template_path": "./no/template.jinja"}, "--chat_template_path is './no/template.jinja', of which there"),
    ({"chat_template_path": "no/template.jinja"}, "--chat_template_path is 'no/template.jinja', of which there"),
    ({"dataset_name": "silence.jsonl"}, "messages of row 1 is None, expected a list of messages"),
    ({"dataset_name": "said.jsonl"}, "messages of row 0 is 'hello', expected a list of messages"),
    ({"dataset_name": "counted.jsonl"}, "messages of row 0 is 5, expected a list of messages"),
    ({"dataset_name": "unsaid.jsonl"}, "completion is empty in every row"),
    ({"dataset_name": "latin.jsonl"}, "row 1 is not UTF-8 .*; save the file as UTF-8"),
    ({"dataset_name": "latin.txt"}, "latin.txt' cannot be read: 'utf-8' .*; save the file as UTF-8"),
    ({"dataset_name": "latin.jsonl", "dataset_streaming": True}, "row 1 is not UTF-8"),
    ({"dataset_name": "empty.parquet"}, "empty.parquet' cannot be read"),
    ({"dataset_name": "script"}, "'script' cannot be read: Dataset scripts are no longer supported"),
    ({"dataset_name": "asked.jsonl", "test_split_size": 0.5}, "asked.jsonl' cannot be read: .*n_samples=1"),
    ({"dataset_name": "null.jsonl"}, "completion of row 1 is None, expected text .*if meant as text, need a .jsonl"),
    ({"dataset_name": "dates.jsonl"}, r"completion of row 0 is datetime.datetime\(2024, .* to a .csv or .parquet file"),
    ({"dataset_name": "number.jsonl"}, "text of row 0 is 5, expected text .* in quotes, in a .jsonl file"),
    ({"dataset_name": "roles.jsonl"}, "messages of row 0 .* expected a list of messages with role"),
    ({"dataset_name": "chat.jsonl", "model_name_or_path": "silent"}, "no chat template"),
    ({"dataset_name": "chat.jsonl", "chat_template_path": "strict.jinja"}, "roles must alternate"),
    ({"model_name_or_path": "bert"}, "BertForMaskedLM is not a causal"),
    ({"model_name_or_path": "few"}, "token ids run from 0 to .* vocabulary of 200"),
    ({"config": "mixture.yaml"}, "both given"),
    ({"dataset_name": "torn.jsonl"}, "torn.jsonl"),
    ({"dataset_name": "asked.jsonl"}, r"columns \['answer', 'question'\].*rename"),
    ({"dataset_train_split": "other", "dataset_name": "folder"}, "splits .*'train'.* and no 'other'"),
    ({"eval_strategy": "steps"}, "no 'test'; name one with --dataset_test_split, or cut one off"),
    ({"model_name_or_path": "./no/such/model"}, "no model folder './no/such/model'"),
    ({"model_name_or_path": "folder"}, "'folder' cannot be loaded"),
    ({"config": "none.yaml"}, "file of --config cannot be read: .*none.yaml.*check the path"),
    ({"dataset_name": "no_messages.jsonl"}, r"messages of row 2 is \[\], expected a list of messages"),
    ({"dataset_name": "unanswered.jsonl"}, "messages of row 1 have no answer, .*--assistant_only_loss false"),
    ({"dataset_name": "prompts.jsonl"}, "prompt of row 10 is None, expected text"),
    ({"metric_for_best_model": "accurate"}, "is 'accurate', which no evaluation has; take loss, or nll"),
    ({"metric_for_best_model": "eval_perplexit"}, "is 'eval_perplexit', which no evaluation has; take perplexity"),
    ({"activation_offloading": True}, "this run is on a CPU; leave it out"),
    ({"config": "keys.yaml"}, "no option '--objectiv', did you mean --objective"),
    ({"dataset_name": "chat.jsonl", "chat_template_path": "plain.jinja"}, "template"),
    ({"model_name_or_path": "cut"}, "the model 'cut' cannot be loaded: .*header"),
    ({"cost_embedding": "cut"}, "cost_embedding is 'cut', expected .*header"),
    ({"accelerator_config": "none.json"}, "file of --accelerator_config cannot be read: .*none.json"),
    ({"lr_scheduler_kwargs": "{bad"}, "the value '{bad' of an option is not JSON"),
    ({"neftune_noise_alpha": -3}, "neftune_noise_alpha is -3.0, expected a finite number, at least 0"),
    ({"config": "latin.yaml"}, "file of --config is not UTF-8"),
    ({"config": "datasets.yaml"}, "datasets of --config is .x., expected a list"),
]


def save_others(model: Path, folder: Path) -> None:
    """Models that cannot be trained on: without a template, masked, and with fewer tokens than the tokenizer."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(model)
    tokenizer.chat_template = None
    gpt2 = transformers.AutoModelForCausalLM.from_pretrained(model)
    save(gpt2, tokenizer, folder / "silent")
    gpt2.resize_token_embeddings(200)
    save(gpt2, tokenizer, folder / "few")
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1, "intermediate_size": 8}
    save(transformers.BertForMaskedLM(transformers.BertConfig(vocab_size=300, **sizes)), tokenizer, folder / "bert")


@pytest.mark.parametrize(("changes", "said"), BAD, ids=[said for _, said in BAD])
def test_invalid_options_print_one_line_before_training(
    cli: Cli, model: Path, sums: Path, tmp_path: Path, changes: dict[str, object], said: str
) -> None:
    write(tmp_path / "asked.jsonl", [{"question": "1 + 1", "answer": "2"}])
    write(tmp_path / "chat.jsonl", chats())
    write(tmp_path / "dates.jsonl", [{"prompt": "the day", "completion": f"2024-01-0{day}"} for day in range(1, 9)])
    write(tmp_path / "null.jsonl", [SUMS[0], {"prompt": "1", "completion": None}])
    write(tmp_path / "number.jsonl", [{"text": 5}])
    write(tmp_path / "blank.jsonl", [{"text": ""}])
    write(tmp_path / "unsaid.jsonl", [{"prompt": "1 + 1", "completion": ""}])
    write(tmp_path / "said.jsonl", [{"conversations": "hello"}])
    write(tmp_path / "counted.jsonl", [{"text": "hello", "messages": 5}])
    turns = [{"from": "human", "value": "1 + 1"}, {"from": "gpt", "value": "2"}]
    write(tmp_path / "silence.jsonl", [{"conversations": turns}, {"conversations": None}])
    for name, content in {"blank.txt": " \n", "empty.parquet": "", "script/script.py": ""}.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(content, encoding="utf-8")
    for name, content in {
        "latin.jsonl": '{"text": "tea"}\n{"text": "caf\xe9"}\n',
        "latin.txt": "caf\xe9",
        "latin.yaml": "caf\xe9",
    }.items():
        (tmp_path / name).write_text(content, encoding="latin1")
    write(tmp_path / "no_messages.jsonl", [*chats()[:2], {"messages": [], "tools": []}])
    write(tmp_path / "unanswered.jsonl", [chats()[0], {"messages": [{"role": "user", "content": "a"}], "tools": []}])
    write(tmp_path / "prompts.jsonl", [*SUMS[:10], {"prompt": None, "completion": " 4"}])
    write(tmp_path / "roles.jsonl", [{"messages": [{"content": "a"}]}])
    shutil.copytree(model, tmp_path / "cut")
    os.truncate(tmp_path / "cut/model.safetensors", 100)
    if changes.get("model_name_or_path") in ("silent", "bert", "few"):
        save_others(model, tmp_path)
    (tmp_path / "folder").mkdir()
    write(tmp_path / "folder/train.jsonl", SUMS)
    files = {"datasets.yaml": "datasets: x\n", "notes.md": "x",
             "empty.jsonl": "", "torn.jsonl": '{"prompt": "a', "keys.yaml": "objectiv: mle\n",
             "lr.yaml": "lr: 1e-3\n",
             "broken.yaml": "a: [1,\n b", "mixture.yaml": "datasets:\n  - path: json\n    data_files: asked.jsonl\n",
             "strict.jinja": "{{ raise_exception('roles must alternate') }}{% generation %}{% endgeneration %}",
             "plain.jinja": "{% for m in messages %}{{ m.content }}{% endfor %}"}  # fmt: skip
    for name, text in files.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    with chdir(tmp_path):
        assert re.search(said, cli(*asked("train", model, sums, output_dir=tmp_path / "run", **changes)).error)
    assert not list(tmp_path.glob("run/*"))


def test_numbers_out_of_range_are_named_before_anything_is_loaded(cli: Cli) -> None:
    """The model and the rows of these calls do not exist."""
    from otloss_llm.cli.settings import COUNTS, NOT_NEGATIVE, SHARES  # which needs TRL

    common = {"model_name_or_path": "none", "dataset_name": "none.jsonl", "output_dir": "none", "report_to": "none"}
    bad: dict[str, tuple[object, ...]] = dict.fromkeys(COUNTS, (-1, 0)) | dict.fromkeys(NOT_NEGATIVE, (-1,))
    bad |= dict.fromkeys(SHARES, (-1, 1.5, "nan")) | {
        "seed": (-1, 2**32),
        "max_steps": (-2,),
        "learning_rate": ("inf",),
        "test_split_size": (0, 1, -0.5, 20, "nan"),
    }
    bad |= {"save_steps": ("inf",), "logging_steps": ("nan",)}
    for command in ("train", "evaluate"):
        for name, values in bad.items():
            if name == "mauve_rows" and command == "train":
                continue
            needed = {
                "dataloader_prefetch_factor": {"dataloader_num_workers": 1},
                "mauve_rows": {"mauve_model": "none"},
            }
            more = needed.get(name, {})
            for value in values:
                message = cli(command, *options(**common, **more, **{name: value})).error
                assert re.search(f"{name}.* expected|infinite|Expected value", message, re.IGNORECASE), (name, value)
                assert "loaded" not in message
