"""Fused losses inside models of transformers: the loss and every gradient equal those of the model's own path."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")

import torch
import transformers
from torch import Tensor, nn

from otloss_llm import EMO, MLE, EmbeddingCost, TokenLoss, linear_token_loss, token_loss
from otloss_llm.fused import fused_loss, unwrap
from otloss_llm.heads import LanguageModelHead, find_head
from tests.otloss_llm.tiny_models import TINY, VOCAB, tiny_batch, tiny_model

# PEFT asks transformers for a name that transformers has deprecated.
pytestmark = pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.*is deprecated:FutureWarning")


def aligned(labels: Tensor) -> Tensor:
    return nn.functional.pad(labels[..., 1:], (0, 1), value=-100)


def scorer(labels: Tensor, **settings: Any) -> Callable[[Tensor, LanguageModelHead], TokenLoss]:
    def score(hidden: Tensor, head: LanguageModelHead) -> TokenLoss:
        return linear_token_loss(
            hidden, head.weight, labels, bias=head.bias, logit_scale=head.scale, logit_softcap=head.softcap, **settings
        )

    return score


def fused(model: nn.Module, batch: dict[str, Tensor], **settings: Any) -> dict[str, Tensor]:
    inputs = {key: value for key, value in batch.items() if key != "labels"}
    with fused_loss(model, scorer(aligned(batch["labels"]), **settings)):
        out: dict[str, Tensor] = model(**inputs)
    return out


def gradients(model: nn.Module, loss: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def assert_same_training(model: nn.Module, batch: dict[str, Tensor]) -> None:
    """MLE fused = the model's own loss; EMO fused = token_loss on the model's own logits; all gradients too."""
    model.eval()  # no dropout
    cost = EmbeddingCost.from_model(model)
    labels = aligned(batch["labels"])
    for objective in (MLE(), EMO()):
        own = model(**batch)
        dense = token_loss(own.logits, labels, objective=objective, cost=cost)
        expected = own.loss if objective == MLE() else dense.loss
        out = fused(model, batch, objective=objective, cost=cost, chunk_size=5)
        torch.testing.assert_close(out["loss"], expected, rtol=2e-6, atol=0)
        torch.testing.assert_close(out["nll"], dense.nll, rtol=1e-4, atol=1e-6)
        torch.testing.assert_close(out["cost"], dense.cost, rtol=1e-4, atol=1e-6)
        made, wanted = gradients(model, out["loss"]), gradients(model, expected)
        assert made.keys() == wanted.keys()
        largest = max(float(gradient.norm()) for gradient in wanted.values())
        for name, gradient in made.items():
            # The second term: some gradients are 0 but for rounding (the bias of a key).
            bound = 2e-5 * float(wanted[name].norm()) + 1e-6 * largest
            assert float((gradient - wanted[name]).norm()) < bound, (objective, name)
    assert "logits" in model(**batch)  # the model is as it was


@pytest.mark.parametrize("name", TINY)
def test_every_family_trains_as_by_its_own_loss(name: str) -> None:
    assert_same_training(tiny_model(name), tiny_batch())


@pytest.mark.filterwarnings("ignore:.*near-duplicates:UserWarning")
@pytest.mark.parametrize("name", ["gpt2", "llama", "opt-projected", "phi"])
@pytest.mark.parametrize("size", [VOCAB + 9, VOCAB - 5])
def test_resized_embeddings(name: str, size: int) -> None:
    model = tiny_model(name)
    model.resize_token_embeddings(size)
    batch = tiny_batch()
    batch["input_ids"].clamp_(max=size - 1)
    batch["labels"].clamp_(max=size - 1)
    assert find_head(model).weight.shape[0] == size
    assert_same_training(model, batch)


def test_what_the_config_says_is_read() -> None:
    heads = {name: find_head(tiny_model(name)) for name in TINY}
    assert {name: head.scale for name, head in heads.items() if head.scale != 1} == {"cohere": 0.25, "granite": 0.25}
    assert {name: head.softcap for name, head in heads.items() if head.softcap} == {"gemma2": 3.0}
    assert {name for name, head in heads.items() if head.bias is not None} == {"phi"}
    assert heads["opt-projected"].weight.shape == (VOCAB, 8)


@pytest.mark.filterwarnings("ignore:.*near-duplicates:UserWarning")
def test_a_trained_model() -> None:
    folder = Path(__file__).parents[3] / "shared" / "data" / "models" / "stories260K"
    if not folder.is_dir():
        pytest.skip("needs stories260K in ../shared/data")
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    ids = torch.randint(3, model.config.vocab_size, (2, 20), generator=torch.Generator().manual_seed(0))
    ids[:, 1:] = model.generate(ids[:, :1], max_length=20, min_length=20, do_sample=False)[:, 1:]
    assert_same_training(model, {"input_ids": ids, "labels": ids.clone()})


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", ["gpt2", "gemma2", "cohere", "granite", "phi"])
def test_models_in_16_bits(name: str, dtype: torch.dtype) -> None:
    model, batch = tiny_model(name).to(dtype).eval(), tiny_batch()
    expected = model(**batch).loss
    out = fused(model, batch, objective=MLE())
    assert out["loss"].dtype == torch.float32
    torch.testing.assert_close(out["loss"], expected.float(), rtol=8 * torch.finfo(dtype).eps, atol=0)


def test_autocast_keeps_the_logits_of_the_ordinary_path() -> None:
    model, batch = tiny_model("llama").eval(), tiny_batch()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        expected = model(**batch).loss
        out = fused(model, batch, objective=MLE())
    torch.testing.assert_close(out["loss"], expected, rtol=1e-6, atol=0)


def test_gradient_checkpointing() -> None:
    model, batch = tiny_model("llama").train(), tiny_batch()
    expected = gradients(model, model(**batch).loss)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    made = gradients(model, fused(model, batch, objective=MLE())["loss"])
    for name, gradient in made.items():
        torch.testing.assert_close(gradient, expected[name], rtol=1e-4, atol=1e-6)


def test_outputs_as_tuples() -> None:
    model, batch = tiny_model("gpt2").eval(), tiny_batch()
    expected = model(**batch).loss
    out = fused(model, batch | {"return_dict": False}, objective=MLE())
    torch.testing.assert_close(out["loss"], expected)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_models_are_scored_afresh_at_every_call(backend: str) -> None:
    """The hook and the head are swapped for each call: a compiled graph must not keep those of an earlier one."""
    model = tiny_model("llama").eval()
    compiled = torch.compile(model, backend=backend)
    assert unwrap(compiled) is model
    for seed in range(4):
        batch = tiny_batch(seed)
        own = (compiled if seed in (0, 2) else model)(**batch).loss
        expected = gradients(model, own)
        out = fused(compiled, batch, objective=MLE())
        torch.testing.assert_close(out["loss"], own, rtol=1e-5, atol=0)
        made = gradients(model, out["loss"])
        for name, gradient in made.items():
            torch.testing.assert_close(gradient, expected[name], rtol=1e-3, atol=1e-6)


# ---- PEFT -----------------------------------------------------------------------------------------------------------


def lora(model: nn.Module, **settings: Any) -> Any:
    peft = pytest.importorskip("peft")
    adapted = peft.get_peft_model(model, peft.LoraConfig(task_type="CAUSAL_LM", r=2, **settings))
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:  # zero at first: adapters would do nothing
                parameter.normal_()
    return adapted


@pytest.mark.parametrize("name", ["gpt2", "llama", "phi"])
def test_lora_with_a_frozen_head(name: str) -> None:
    targets = ["c_attn"] if name == "gpt2" else ["q_proj"]
    model = lora(tiny_model(name), target_modules=targets, fan_in_fan_out=name == "gpt2")
    assert_same_training(model, tiny_batch())
    assert not find_head(model).weight.requires_grad


def test_lora_that_trains_the_head() -> None:
    model = lora(tiny_model("llama"), target_modules=["q_proj"], modules_to_save=["lm_head"])
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "modules_to_save" in name:
                parameter.add_(0.1 * torch.randn_like(parameter))
    batch = tiny_batch()
    assert_same_training(model, batch)
    assert find_head(model).weight.requires_grad
    model.eval()
    with model.disable_adapter():
        assert not find_head(model).weight.requires_grad
        expected = model(**batch).loss
        torch.testing.assert_close(fused(model, batch, objective=MLE())["loss"], expected)
    assert find_head(model).weight.requires_grad


def test_disabled_adapters_give_the_loss_of_the_base() -> None:
    base, batch = tiny_model("llama").eval(), tiny_batch()
    expected = base(**batch).loss
    model = lora(base, target_modules=["q_proj"]).eval()
    assert not torch.isclose(fused(model, batch, objective=MLE())["loss"], expected)
    with model.disable_adapter():
        torch.testing.assert_close(fused(model, batch, objective=MLE())["loss"], expected)


def test_lora_on_the_head_is_refused_by_name() -> None:
    model = lora(tiny_model("llama"), target_modules=["lm_head"])
    with pytest.raises(TypeError, match=r"head of PeftModelForCausalLM is wrapped in Linear.*target_modules"):
        find_head(model)


def test_prompt_tuning_is_refused() -> None:
    peft = pytest.importorskip("peft")
    config = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
    model = peft.get_peft_model(tiny_model("llama"), config)
    with pytest.raises(ValueError, match="labels have shape"):
        fused(model, tiny_batch(), objective=MLE())


# ---- refusals -------------------------------------------------------------------------------------------------------


class Altered(transformers.LlamaForCausalLM):
    """A model that does something to its logits which no config tells."""

    alter: Callable[[Tensor], Tensor]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        out = super().forward(*args, **kwargs)
        out.logits = type(self).alter(out.logits)
        return out


@pytest.mark.parametrize(
    "alter",
    [
        lambda z: z * 1.1,
        lambda z: z + 1,
        lambda z: z.clamp(max=10),
        lambda z: 30 * torch.tanh(z / 30),
        lambda z: z[..., :-2],
        lambda z: torch.cat([z[..., :-1], torch.full_like(z[..., :1], -1e4)], -1),
        lambda z: z.flip(-1),
        lambda z: z * torch.linspace(1, 2, z.shape[-1]),
        lambda z: z.log_softmax(-1),
    ],
    ids=["scale", "shift", "clamp", "cap", "drop", "mask", "permute", "columns", "normalise"],
)
def test_a_transform_that_the_config_does_not_tell_is_refused(alter: Callable[[Tensor], Tensor]) -> None:
    kind = type("AlteredLlama", (Altered,), {"alter": staticmethod(alter)})
    model = kind(transformers.LlamaConfig(**TINY["llama"][1]))
    with pytest.raises(ValueError, match="AlteredLlama changes its logits after the head"):
        fused(model, tiny_batch(), objective=MLE())
    assert "forward" not in vars(model.lm_head)  # undone after the error, too
    assert not model._forward_hooks


def test_a_config_that_tells_what_the_model_does_not_do_is_refused() -> None:
    model = tiny_model("llama", logit_scale=0.5)
    with pytest.raises(ValueError, match=r"scale 0\.5.*were read"):
        fused(model, tiny_batch(), objective=MLE())


def test_models_of_other_tasks_are_refused() -> None:
    small = {"num_layers": 1, "num_heads": 2, "d_model": 16, "d_ff": 24, "d_kv": 8}
    t5 = transformers.T5ForConditionalGeneration(transformers.T5Config(vocab_size=VOCAB, **small))
    with pytest.raises(TypeError, match="T5ForConditionalGeneration is an encoder-decoder"):
        find_head(t5)
    small = {"num_hidden_layers": 1, "num_attention_heads": 2, "hidden_size": 16, "intermediate_size": 24}
    bert = transformers.BertForMaskedLM(transformers.BertConfig(vocab_size=VOCAB, **small))
    with pytest.raises(TypeError, match="BertForMaskedLM does not generate"):
        find_head(bert)
    config = tiny_model("gpt2").config
    for kind in (transformers.GPT2Model, transformers.GPT2ForSequenceClassification):
        with pytest.raises(TypeError, match=f"{kind.__name__} does not generate"):
            find_head(kind(config))
    with pytest.raises(TypeError, match="Linear has no output embedding"):
        find_head(nn.Linear(2, 2))


def test_heads_that_are_not_one_linear_map_are_refused() -> None:
    class Scaled(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            return 2 * super().forward(input)

    for head, message in ((Scaled(16, VOCAB), "is a Scaled"), (nn.Sequential(nn.Linear(16, VOCAB)), "is a Sequential")):
        model = tiny_model("llama")
        model.lm_head = head
        with pytest.raises(TypeError, match=f"head of LlamaForCausalLM {message}"):
            find_head(model)
    model = tiny_model("llama")
    model.lm_head.forward = lambda hidden: 2 * nn.functional.linear(hidden, model.lm_head.weight)
    with pytest.raises(TypeError, match="had its forward replaced"):
        fused(model, tiny_batch(), objective=MLE())


def test_a_mixture_of_experts_loss_is_not_dropped_silently() -> None:
    fields = TINY["llama"][1] | {"num_local_experts": 2, "num_experts_per_tok": 1}
    model = transformers.MixtralForCausalLM(transformers.MixtralConfig(**fields, output_router_logits=True))
    with pytest.raises(ValueError, match="adds an auxiliary loss"):
        fused(model, tiny_batch(), objective=MLE())
    assert_same_training(transformers.MixtralForCausalLM(transformers.MixtralConfig(**fields)), tiny_batch())


def test_a_head_that_is_not_called_once_is_refused() -> None:
    class Twice(transformers.LlamaForCausalLM):
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            super().forward(*args, **kwargs)
            return super().forward(*args, **kwargs)

    class Never(transformers.LlamaForCausalLM):
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            return self.model(*args, **kwargs)

    config = transformers.LlamaConfig(**TINY["llama"][1])
    with pytest.raises(ValueError, match="Twice calls its head more than once"):
        fused(Twice(config), tiny_batch(), objective=MLE())
    with pytest.raises(ValueError, match="Never did not call its head"):
        fused(Never(config), tiny_batch(), objective=MLE())


def test_an_error_of_the_score_leaves_the_model_as_it_was() -> None:
    model, batch = tiny_model("gpt2").eval(), tiny_batch()
    before = model(**batch).loss
    batch["labels"][0, 5] = VOCAB
    with pytest.raises(ValueError, match="outside the vocabulary"):
        fused(model, batch, objective=MLE())
    assert torch.equal(model(**tiny_batch()).loss, before)
