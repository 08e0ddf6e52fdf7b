"""ObjectiveMixin with TRL's SFTTrainer, and models of experts."""

import copy
import functools
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn

from otloss_llm import ObjectiveMixin, ObjectiveTrainer
from otloss_llm.training.batches import pad_rows
from otloss_llm.training.fused import restore_forward
from tests.otloss_llm.tiny_models import TINY, build, tiny_batch, tiny_model
from tests.otloss_llm.training.trainer_cases import (
    arguments,
    assert_same_weights,
    by_hand,
    logs,
    one_step,
    rows,
    trainer,
    weights,
)

_MOE = TINY["llama"][1] | {"num_experts_per_tok": 1, "output_router_logits": True}
EXPERTS: dict[str, dict[str, Any]] = {
    "Mixtral": _MOE | {"num_local_experts": 3, "router_aux_loss_coef": 0.3},
    "JetMoe": _MOE | {"num_local_experts": 3, "kv_channels": 8, "aux_loss_coef": 0.1},
}


@pytest.mark.parametrize("name", ["Mixtral", "JetMoe"])
def test_experts_are_balanced_as_by_the_model_itself(tmp_path: Path, name: str) -> None:
    first = build(name, EXPERTS[name])
    second, third = copy.deepcopy(first), copy.deepcopy(first)
    settings: dict[str, Any] = {"max_steps": 3, "optim": "sgd"}
    ours = trainer(tmp_path, first, objective="mle", **settings)
    plain = trainer(tmp_path, second, kind=transformers.Trainer, **settings)
    before = ours.evaluate()
    ours.train(), plain.train()
    assert logs(ours, "loss") == pytest.approx(logs(plain, "loss"), rel=1e-5)
    assert_same_weights(first, second, 1e-5)
    weight = getattr(first, "router_aux_loss_coef", None) or first.aux_loss_coef
    for loss, nll, balance in zip(*(logs(ours, key) for key in ("loss", "nll", "aux_loss")), strict=True):
        assert loss == pytest.approx(nll + weight * balance, rel=1e-5)
    assert before["eval_loss"] == pytest.approx(before["eval_nll"] + weight * before["eval_aux_loss"], rel=1e-6)
    # Without that loss the routers learn something else: the test sees it.
    third.config.output_router_logits = False
    trainer(tmp_path, third, objective="mle", **settings).train()
    routers = [key for key in weights(first) if "gate" in key or "router" in key]
    assert routers
    assert any(not torch.allclose(weights(first)[key], weights(third)[key], atol=1e-4) for key in routers)


def test_accumulation_averages_the_loss_that_balances_experts(tmp_path: Path) -> None:
    """The same batch twice is the same step as once: neither part of the loss counts double."""
    model, same = build("Mixtral", EXPERTS["Mixtral"]), rows(1) * 4
    settings: dict[str, Any] = {"cost": None, "per_device_train_batch_size": 4}
    once = one_step(tmp_path, copy.deepcopy(model), "mle", train_dataset=same, **settings)
    twice = one_step(
        tmp_path, copy.deepcopy(model), "mle", train_dataset=same * 2, gradient_accumulation_steps=2, **settings
    )
    torch.testing.assert_close(twice, once, rtol=1e-4, atol=1e-6)


def test_an_auxiliary_loss_without_a_weight_raises(tmp_path: Path) -> None:
    class Unknown(transformers.LlamaForCausalLM):
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            return transformers.modeling_outputs.ModelOutput(
                logits=super().forward(*args, **kwargs).logits, aux_loss=torch.ones(())
            )

    model = Unknown(tiny_model("llama").config)
    with pytest.raises(ValueError, match=r"Unknown returns an auxiliary loss .* no router_aux_loss_coef"):
        trainer(tmp_path, model, objective="mle", remove_unused_columns=False).train()


def test_settings_of_another_loss_raise(tmp_path: Path) -> None:
    data = {"train_dataset": rows(4), "data_collator": pad_rows, "objective": "mle"}
    own = {"loss_type": "dft"}, {"compute_loss_func": nn.functional.cross_entropy}  # which TRL makes for it
    for settings, given, message in (
        (*own, "loss_type='dft' and an objective were both given; leave loss_type out"),
        ({"use_liger_kernel": True}, {}, "use_liger_kernel=True puts a cross-entropy of its own"),
    ):
        args = arguments(tmp_path)
        vars(args).update(settings)
        with pytest.raises(ValueError, match=message):
            ObjectiveTrainer(model=tiny_model("llama"), args=args, **data, **given)


@pytest.mark.parametrize("name", ["DPO", "KTO", "GRPO", "RLOO", "Reward"])
def test_trainers_with_a_loss_of_their_own_are_named(name: str) -> None:
    trl = pytest.importorskip("trl")
    with pytest.raises(TypeError, match=f"{name}Trainer has a loss of its own .*which an objective would replace"):
        type("Mixed", (ObjectiveMixin, getattr(trl, f"{name}Trainer")), {})


@pytest.mark.filterwarnings("ignore")  # TRL's own, of its experiments
def test_a_subclass_of_sft_with_a_loss_of_its_own_is_named() -> None:
    gkd = pytest.importorskip("trl.experimental.gkd")
    with pytest.raises(TypeError, match="GKDTrainer has a loss of its own"):
        type("Mixed", (ObjectiveMixin, gkd.GKDTrainer), {})


def test_copies_of_a_trained_model_have_weights_of_their_own(tmp_path: Path) -> None:
    """TRL puts a function into the model that calls the original, also from copies: teachers and averages."""
    add_fused_lm_head = pytest.importorskip("trl.trainer.utils").add_fused_lm_head
    model = tiny_model("llama")
    own = model.forward = functools.partial(model.forward)  # as hooks do
    for before in (own, None):
        if before is None:
            del model.forward
        add_fused_lm_head(model)
        restore_forward(model)
        assert vars(model).get("forward") is before
    add_fused_lm_head(model)
    run = trainer(tmp_path, model, objective="mle", max_steps=1)
    kept, batch = copy.deepcopy(run.model).eval(), {name: tiny_batch()[name] for name in ("input_ids", "labels")}
    expected = kept(**batch).loss.item()
    run.train()
    assert kept(**batch).loss.item() == expected != run.model.eval()(**batch).loss.item()


# ---- TRL itself -----------------------------------------------------------------------------------------------------


def sft(path: Path, model: Any, objective: str, data: Any, **settings: Any) -> Any:
    """TRL's trainer of `model` with an objective."""
    trl = pytest.importorskip("trl")
    from datasets import Dataset, IterableDataset

    from otloss_llm.data import train_bpe_tokenizer

    class OwnTrainer(trl.SFTTrainer):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)

    class WithObjective(ObjectiveMixin, OwnTrainer):
        pass

    tokenizer = train_bpe_tokenizer(["one"], 257)  # a token for each byte
    tokenizer.chat_template = TEMPLATE
    made = IterableDataset.from_generator(lambda: iter(data)) if settings.pop("stream", False) else None
    evaluation = settings.pop("evaluation", None)
    own = {"max_steps": 1, "optim": "sgd", "bf16": False, "gradient_checkpointing": False} | settings
    return WithObjective(
        model=model, args=arguments(path, trl.SFTConfig, **own), processing_class=tokenizer,
        train_dataset=Dataset.from_list(data) if made is None else made, objective=objective,
        eval_dataset=None if evaluation is None else Dataset.from_list(evaluation),
    )  # fmt: skip


TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'assistant' %}A:{% generation %}{{ m.content }}{{ eos_token }}"
    "{% endgeneration %}{% else %}Q:{{ m.content }}{% endif %}{% endfor %}"
)
ASKED = [("two and two", "four"), ("a longer question than that", "yes"), ("so", "is this answer"), ("and", "no")]
MODES: dict[str, dict[str, Any]] = {
    "assistant": {"assistant_only_loss": True}, "chat": {}, "completion": {}, "stream": {"stream": True},
    "packing": {"packing": True, "max_length": 48}, "padding-free": {"padding_free": True, "max_length": None},
}  # fmt: skip


def asked_in(mode: str) -> tuple[list[dict[str, Any]], list[tuple[str, str]]]:
    """The data as TRL reads it, and by hand: the text without a loss, and that with one, of each row."""
    if mode == "completion":
        return [{"prompt": q, "completion": a} for q, a in ASKED], list(ASKED)
    if mode not in ("assistant", "chat"):
        return [{"text": q} for q, _ in ASKED], [("", q) for q, _ in ASKED]
    said = [{"messages": [{"role": "user", "content": q}, {"role": "assistant", "content": a}]} for q, a in ASKED]
    return said, [(f"Q:{q}A:", a) if mode == "assistant" else ("", f"Q:{q}A:{a}") for q, a in ASKED]


@pytest.mark.filterwarnings("ignore")  # TRL's own
@pytest.mark.parametrize(("mode", "name"), [*((mode, "emo:0.7") for mode in MODES), ("chat", "eaft")])
def test_sft_has_the_loss_computed_by_hand(tmp_path: Path, mode: str, name: str) -> None:
    """In every mode the first loss is the mean over the labelled tokens of rows scored one by one."""
    model = tiny_model("llama", vocab_size=257, max_position_embeddings=96)
    data, texts = asked_in(mode)
    run = sft(tmp_path, model, name, data, **MODES[mode])
    ids = [(run.processing_class(a)["input_ids"], run.processing_class(b)["input_ids"]) for a, b in texts]
    end = run.processing_class.eos_token_id
    by_row = [{"input_ids": [*a, *b, end], "labels": [-100] * len(a) + [*b, end]} for a, b in ids]
    expected = by_hand(model, by_row, run.training_objective, run.transport_cost)
    run.train()
    for key in ("loss", "nll", "transport_cost") if name.startswith("emo") else ("loss", "nll"):
        assert logs(run, key)[0] == pytest.approx(expected[key], rel=1e-5), key


@pytest.mark.filterwarnings("ignore")  # TRL's own
@pytest.mark.parametrize("size", [1, 3])
def test_entropy_and_accuracy_are_means_over_tokens(tmp_path: Path, size: int) -> None:
    """Answers of 3 to 15 tokens, in batches of 1 and of 3: one log of 4 or 2 steps, an evaluation and a prediction."""
    model = tiny_model("llama", vocab_size=257, max_position_embeddings=96)
    data = asked_in("completion")[0]
    sft(tmp_path, model, "mle", data, learning_rate=1e-2, optim="adamw_torch", max_steps=8).train()  # some are right
    run = sft(
        tmp_path, model, "mle", data, learning_rate=0.0, num_train_epochs=1, max_steps=-1,
        per_device_train_batch_size=size, per_device_eval_batch_size=size, logging_strategy="epoch",
    )  # fmt: skip
    entropy, right = [], []
    for row in run.train_dataset:
        labels = torch.tensor(row["labels"][1:])
        with torch.no_grad():
            logits = model.eval()(input_ids=torch.tensor([row["input_ids"]])).logits[0, :-1][labels != -100].double()
        entropy += torch.distributions.Categorical(logits=logits).entropy().tolist()
        right += (logits.argmax(-1) == labels[labels != -100]).double().tolist()
    expected = {"entropy": sum(entropy) / len(entropy), "mean_token_accuracy": sum(right) / len(right)}
    assert 0 < expected["mean_token_accuracy"] < 1
    run.train()
    evaluated, predicted = run.evaluate(run.train_dataset), run.predict(run.train_dataset).metrics
    for key, value in expected.items():
        found = [*logs(run, key), evaluated[f"eval_{key}"], predicted[f"test_{key}"]]
        assert found == pytest.approx(3 * [value], rel=1e-5), key


@pytest.mark.filterwarnings("ignore")  # TRL's own
@pytest.mark.parametrize("default", [torch.bfloat16, torch.float16])
def test_the_default_dtype_of_torch_is_no_matter(tmp_path: Path, default: torch.dtype) -> None:
    """bfloat16 has no whole numbers from 257 on, such as numbers of columns."""
    data = [{"input_ids": [5, 6, 7, 8], "labels": [5, 6, 7, 8]}] * 4
    found = []
    for dtype in (torch.float32, default):
        model = tiny_model("llama", vocab_size=448, max_position_embeddings=96)
        torch.set_default_dtype(dtype)
        try:
            run = sft(tmp_path, model, "emo", data, save_strategy="steps", save_steps=1)
            run.train()
        finally:
            torch.set_default_dtype(torch.float32)
        found.append([logs(run, key)[0] for key in ("nll", "transport_cost", "entropy", "mean_token_accuracy")])
    assert found[0] == pytest.approx(found[1], rel=1e-5)


@pytest.mark.filterwarnings("ignore")  # TRL's own
def test_weights_that_are_dropped_are_missed(tmp_path: Path) -> None:
    """By packing as the rows are prepared, and by the collator in each batch."""
    model = tiny_model("llama", vocab_size=257, max_position_embeddings=96)
    data = [{"input_ids": [5, 6, 7, 8], "labels": [5, 6, 7, 8]}] * 4
    weighted = [row | {"token_weight": [1.0, 1.0, 0.5, 0.5]} for row in data]
    settings: dict[str, Any] = {"packing": True, "max_length": 8}
    with pytest.raises(ValueError, match="a column token_weight, which WithObjective drops as it prepares"):
        sft(tmp_path, model, "mle", data, evaluation=weighted, **settings)
    with pytest.raises(ValueError, match="a column token_weight, which WithObjective drops as it prepares"):
        sft(tmp_path, model, "mle", weighted, **settings)
    with pytest.raises(ValueError, match="a column token_weight, which WithObjective drops as it prepares"):
        sft(tmp_path, model, "mle", weighted, stream=True, **settings)
    with pytest.raises(ValueError, match="the rows have a column token_weight, and the batch only"):
        sft(tmp_path, model, "mle", data, evaluation=weighted).evaluate()
