"""Fused losses inside models of transformers: the loss and every gradient equal the ones by the model's own logits."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

from otloss_llm import EMO, MLE, EmbeddingCost, token_loss
from otloss_llm.models.heads import find_head
from otloss_llm.models.logit_transform import LogitTransform
from otloss_llm.training.fused import fused_loss, measure_transform
from tests.otloss_llm.tiny_models import ONE_OF_EACH_KIND, TINY, VOCAB, aligned, lora, scorer, tiny_batch, tiny_model


def fused(model: nn.Module, batch: dict[str, Tensor], **settings: Any) -> dict[str, Tensor]:
    inputs = {key: value for key, value in batch.items() if key != "labels"}
    transform = measure_transform(model, inputs)
    with fused_loss(model, transform, scorer(aligned(batch["labels"]), **settings)):
        out: dict[str, Tensor] = model(**inputs)
    return out


def gradients(model: nn.Module, loss: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def assert_same_training(
    model: nn.Module, batch: dict[str, Tensor], *, own_loss: bool = True, tolerance: float = 2e-5
) -> None:
    """EMO fused = token_loss on the model's own logits, and MLE fused = the model's own loss; all gradients too."""
    model.eval()  # no dropout
    cost, labels = EmbeddingCost.from_model(model), aligned(batch["labels"])
    for objective in (EMO(), MLE()) if own_loss else (EMO(),):
        own = model(**batch if own_loss else {key: value for key, value in batch.items() if key != "labels"})
        dense = token_loss(own.logits.float(), labels, objective=objective, cost=cost)
        expected = own.loss if objective == MLE() else dense.loss
        out = fused(model, batch, objective=objective, cost=cost, chunk_size=5)
        torch.testing.assert_close(out["loss"], expected, rtol=tolerance / 4, atol=0)
        torch.testing.assert_close(out["nll"], dense.nll, rtol=1e-4, atol=1e-6)
        torch.testing.assert_close(out["cost"], dense.cost, rtol=1e-4, atol=1e-6)
        made, wanted = gradients(model, out["loss"]), gradients(model, expected)
        assert made.keys() == wanted.keys() != set()
        largest = max(float(gradient.norm()) for gradient in wanted.values())
        for name, gradient in made.items():
            # The second term: some gradients are 0 but for rounding (the bias of a key).
            bound = tolerance * float(wanted[name].norm()) + 1e-6 * largest
            assert float((gradient - wanted[name]).norm()) < bound, (objective, name)
    assert "logits" in model(**batch)  # the model is as it was


@pytest.mark.parametrize("name", ONE_OF_EACH_KIND)
def test_every_kind_of_head_trains_as_by_its_own_loss(name: str) -> None:
    assert_same_training(tiny_model(name), tiny_batch())


def test_the_transform_of_the_logits_is_measured() -> None:
    models = {name: tiny_model(name) for name in ONE_OF_EACH_KIND}
    actual = {
        name: measure_transform(model, {"input_ids": tiny_batch()["input_ids"]}) for name, model in models.items()
    }
    assert actual.pop("cohere") == LogitTransform(0.25)
    assert actual.pop("gemma2") == LogitTransform(1.0, 3.0)
    assert set(actual.values()) == {LogitTransform()}
    assert {name for name, model in models.items() if find_head(model).bias is not None} == {"phi"}
    assert find_head(models["opt-projected"]).weight.shape == (VOCAB, 8)


@pytest.mark.parametrize(("name", "dtype"), [("gemma2", torch.bfloat16), ("cohere", torch.float16)])
def test_models_in_16_bits(name: str, dtype: torch.dtype) -> None:
    model, batch = tiny_model(name).to(dtype).eval(), tiny_batch()
    expected = model(**batch).loss
    out = fused(model, batch | {"return_dict": False}, objective=MLE())
    assert out["loss"].dtype == torch.float32
    torch.testing.assert_close(out["loss"], expected.float(), rtol=8 * torch.finfo(dtype).eps, atol=0)


@pytest.mark.slow
def test_compiled_models_are_scored_again_at_every_call() -> None:
    """The hook and the head are swapped for each call: a compiled graph must not keep the ones of an earlier call."""
    model = tiny_model("llama").eval()
    compiled = torch.compile(model, backend="aot_eager")
    for seed in range(3):
        batch = tiny_batch(seed)
        own = (compiled if seed in (0, 2) else model)(**batch).loss
        expected = gradients(model, own)
        out = fused(compiled, batch, objective=MLE())
        torch.testing.assert_close(out["loss"], own, rtol=1e-5, atol=0)
        torch.testing.assert_close(gradients(model, out["loss"]), expected, rtol=1e-3, atol=1e-6)


# ---- PEFT -----------------------------------------------------------------------------------------------------------


def test_lora_that_trains_the_head() -> None:
    model = lora(tiny_model("llama"), task_type="CAUSAL_LM", target_modules=["q_proj"], modules_to_save=["lm_head"])
    batch = tiny_batch()
    assert_same_training(model, batch)
    assert find_head(model).weight.requires_grad
    model.eval()
    with model.disable_adapter():
        assert not find_head(model).weight.requires_grad
        expected = model(**batch).loss
        torch.testing.assert_close(fused(model, batch, objective=MLE())["loss"], expected)
    assert find_head(model).weight.requires_grad


@pytest.mark.parametrize("trained", [{"modules_to_save": ["lm_head"]}, {"trainable_token_indices": {"lm_head": [3]}}])
def test_of_several_adapters_the_active_one_makes_the_logits(trained: dict[str, Any]) -> None:
    options = {"task_type": "CAUSAL_LM", "target_modules": ["q_proj"]}
    model, batch = lora(tiny_model("llama"), **options, **trained).eval(), tiny_batch()
    model.add_adapter("other", pytest.importorskip("peft").LoraConfig(**options))
    for adapter in ("default", "other", "default"):
        model.set_adapter(adapter)
        torch.testing.assert_close(fused(model, batch, objective=MLE())["loss"], model(**batch).loss)
    model.set_adapter("other")
    model.delete_adapter("default")
    torch.testing.assert_close(fused(model, batch, objective=MLE())["loss"], model(**batch).loss)


def test_lora_on_the_head_raises() -> None:
    model = lora(tiny_model("llama"), task_type="CAUSAL_LM", target_modules=["lm_head"])
    with pytest.raises(
        TypeError, match=r"head of PeftModelForCausalLM is wrapped in peft.tuners.lora.layer.Linear.*target_modules"
    ):
        find_head(model)


# ---- transforms of the logits ---------------------------------------------------------------------------------------


class Altered(transformers.LlamaForCausalLM):
    """A model that changes its logits in a way that no field of its config describes."""

    alter: Callable[[Tensor], Tensor]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        out = super().forward(*args, **kwargs)
        out.logits = type(self).alter(out.logits)
        return out


def altered(alter: Callable[[Tensor], Tensor]) -> Any:
    kind = type("AlteredLlama", (Altered,), {"alter": staticmethod(alter)})
    torch.manual_seed(0)
    model = kind(transformers.LlamaConfig(**TINY["llama"][1], logit_scale=0.5)).eval()  # the config is wrong
    with torch.no_grad():
        model.lm_head.weight.mul_(100)  # logits that a cap changes
    return model


@pytest.mark.parametrize("alter", [lambda z: -z / 13, lambda z: 2.5 * torch.tanh(0.7 * z / 2.5)])
def test_unknown_models_train_as_by_their_own_logits(alter: Callable[[Tensor], Tensor]) -> None:
    assert_same_training(altered(alter), tiny_batch(), own_loss=False)


@pytest.mark.parametrize(
    ("alter", "message"),
    [
        (lambda z: z + 1, r"off by .* at worst: a logit .* becomes"),
        (lambda z: z.clamp(max=10), "scale 1 and no soft cap, is off by 0.99 at worst: a logit 1024 becomes 10, "),
        (lambda z: z[..., :-2], r"shape is \(1, 3, 29\) where it was \(1, 3, 31\)"),
        (lambda z: z * torch.linspace(1, 1.001, z.shape[-1]), "is off by 0.0005"),
        (lambda z: z * nn.Parameter(torch.ones(())), "depend on parameters beside the head"),
    ],
    ids=["shift", "clamp", "drop", "columns", "parameter"],
)
def test_another_transform_of_the_logits_raises(alter: Callable[[Tensor], Tensor], message: str) -> None:
    model = altered(alter)
    with pytest.raises(ValueError, match=f"AlteredLlama changes its logits after the head .*{message}"):
        fused(model, tiny_batch(), objective=MLE())
    assert "forward" not in vars(model.lm_head)  # undone after the error, too
    assert not model._forward_hooks


def test_a_model_that_changes_its_transform_raises() -> None:
    """Each pass checks the transform that was measured at the start."""
    model = tiny_model("gemma2")
    inputs = {"input_ids": tiny_batch()["input_ids"]}
    transform = measure_transform(model, inputs)
    model.config.final_logit_softcapping = 3.1
    score = scorer(aligned(tiny_batch()["labels"]), objective=MLE())
    with (
        pytest.raises(ValueError, match=r"scale 1 and soft cap 3, is off by 0\.033"),
        fused_loss(model, transform, score),
    ):
        model(**inputs)


# ---- heads in other forms -------------------------------------------------------------------------------------------


def test_a_head_that_accelerate_has_offloaded() -> None:
    """`device_map` replaces the head's forward, and keeps offloaded weights on the meta device between calls."""
    hooks = pytest.importorskip("accelerate.hooks")
    model, batch = tiny_model("phi").eval(), tiny_batch()
    model.lm_head.requires_grad_(False)
    plain = copy.deepcopy(model)
    stored = {name: tensor.clone() for name, tensor in model.lm_head.state_dict().items()}
    hooks.add_hook_to_module(model.lm_head, hooks.AlignDevicesHook("cpu", offload=True, weights_map=stored))
    assert torch.equal(find_head(model).weight, plain.lm_head.weight)
    assert_same_training(model, batch)
    assert model.lm_head.weight.is_meta
    model.lm_head.requires_grad_(True)
    with pytest.raises(TypeError, match=r"is offloaded .* gradient, which would be lost"):
        fused(model, batch, objective=MLE())


# ---- models that cannot be fused ------------------------------------------------------------------------------------


def test_heads_that_are_not_one_linear_map_raise() -> None:
    class Scaled(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            return 2 * super().forward(input)

    class Adapted(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            return super().forward(input * (1 + self.more))

    model = tiny_model("llama")
    model.lm_head = Adapted(16, VOCAB)
    model.lm_head.more = nn.Parameter(torch.zeros(16))  # does nothing yet
    with pytest.raises(TypeError, match=r"head of LlamaForCausalLM is a .*Adapted with parameters \['more'\]"):
        find_head(model)
    model.lm_head = Scaled(16, VOCAB)
    with pytest.raises(TypeError, match=r"Scaled whose logits are not .*differ by 1 of"):
        fused(model, tiny_batch(), objective=MLE())
    with pytest.raises(TypeError, match="GPT2ForSequenceClassification does not generate"):
        find_head(transformers.GPT2ForSequenceClassification(tiny_model("gpt2").config))


def test_a_head_that_is_not_called_once_raises() -> None:
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
