"""Compute the loss inside a causal LM's own forward pass, so that its logits are never formed.

For one forward pass the head's `forward` is replaced by one that computes the loss from its input and returns
placeholder logits of three positions, and a hook on the root module returns the loss instead of the logits. No model's
forward is copied, and everything runs inside the wrapped root, as hooks of DDP, FSDP and ZeRO expect: the head's
parameters are gathered while the head runs, and the loss is part of the root's output.

The scale and soft cap of a model's logits must be known when its hidden states are scored. `measure_transform` finds
them in one pass beforehand: placeholders pass through the model's own code, and scale and cap are solved for from the
result (`otloss_llm.models.logit_transform`). Each later pass checks that the placeholders are transformed in the same
way; otherwise the model is not supported, for example because a column is masked or dropped.

A head that torch's `ColwiseParallel` has sharded over processes is scored in shards, as are its placeholders.

A head that FSDP2 shards apart from the root and reshards after its forward is not available in the backward pass: there
the gradients have to be made in the forward pass, as the "chunked" kernel does for sums and means (else torch raises).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from otloss_llm.losses.token_loss import TokenLoss
from otloss_llm.models.heads import LanguageModelHead, base_model, evaluation_mode, find_head
from otloss_llm.models.logit_transform import LogitTransform, deviation, fitted_transform, placeholders
from otloss_llm.models.sharded_heads import is_row_shard, replicated_like


class ScoredHead(NamedTuple):
    """The arguments of `linear_token_loss` that describe a head."""

    weight: Tensor
    bias: Tensor | None
    logit_scale: float
    logit_softcap: float | None


def unwrap(model: nn.Module) -> nn.Module:
    """The root module under DDP, `torch.compile` and the like (PEFT models are roots of their own)."""
    while True:
        inner = getattr(model, "_orig_mod", None)
        if inner is None and hasattr(model, "module") and isinstance(model.module, nn.Module):
            inner = model.module
        if inner is None:
            return model
        model = inner


def restore_forward(model: nn.Module) -> None:
    """Undo TRL's `add_fused_lm_head`, which replaces a model's `forward` by one that these trainers do not call.

    It calls the model's own, also from within copies of the model, which would then compute with its weights.
    """
    root = base_model(unwrap(model))
    function: Any = getattr(vars(root).get("forward"), "__func__", None)
    if getattr(getattr(function, "__code__", None), "co_name", None) != "_fused_forward":
        return
    own = inspect.getclosurevars(function).nonlocals.get("original_forward")
    if own is None:
        return
    del root.forward
    if own != root.forward:  # it was an attribute before, as with accelerate's hooks
        root.forward = own


@contextmanager
def fused_loss(
    model: nn.Module,
    transform: LogitTransform,
    score: Callable[[Tensor, ScoredHead], TokenLoss],
    *,
    keep_output: bool = False,
) -> Iterator[None]:
    """Within this context a call of `model` returns `{"loss", "nll", "cost", ..., "aux_loss"}`.

    The loss and the statistics of tokens are made by `score(hidden, head)`; "aux_loss" is the loss that the model
    returns to balance its experts, not weighted and not part of "loss". Entries that would be None are left out.

    Args:
        model: a causal LM of transformers, possibly wrapped (DDP, FSDP2, PEFT).
        transform: of the logits, as `measure_transform` returned it.
        score: called once with the head's input `(batch, length, d)` and the head.
        keep_output: whether "output" is what the model returns beside its logits, such as hidden states.

    Raises:
        TypeError: the head is not supported.
        ValueError: the model transforms its logits in another way, or does not call its head exactly once.
    """
    head = find_head(root := unwrap(model))
    results: list[TokenLoss] = []

    def scored(hidden: Tensor) -> Tensor:
        hidden, weight, bias = head.matching(hidden)
        results.append(score(hidden, ScoredHead(weight, bias, *transform)))
        return weight

    def root_output(probe: Probe, output: Any) -> dict[str, Any]:
        probe.check(transform)
        (result,) = results
        returned = {"loss": result.loss, **result.statistics()._asdict(), "aux_loss": auxiliary_loss(output)}
        if keep_output and isinstance(output, dict):
            returned["output"] = type(output)(**{k: v for k, v in output.items() if k not in ("loss", "logits")})
        return {name: tensor for name, tensor in returned.items() if tensor is not None}

    with _probed(root, head, scored, root_output):
        yield


class Transforms(WeakKeyDictionary[nn.Module, LogitTransform]):
    """The transforms of models, as long as these live; in another process they are measured again."""

    def __reduce__(self) -> Any:
        return Transforms, ()


def measure_transform(model: nn.Module, inputs: dict[str, Any]) -> LogitTransform:
    """The transform of a model's logits, measured in one pass over `inputs` in eval mode without gradients.

    Raises:
        TypeError: the head is not supported, or is not `hidden @ weight.T + bias`.
        ValueError: the transform is not a scale and a soft cap; the message shows an example.
    """
    model = getattr(model, "_orig_mod", model)  # torch.compile would make a graph for this one pass
    root = unwrap(model)
    head = find_head(root)
    own_forward, transforms = head.own_forward(), []

    def checked(hidden: Tensor) -> Tensor:
        head.check_linear(hidden, own_forward)
        return head.weight

    def keep(probe: Probe, output: Any) -> Any:
        transforms.append(probe.fit())
        return {}  # no logits: a wrapper may process every tensor

    with evaluation_mode(model), _probed(root, head, checked, keep):
        model(**inputs)
    return transforms[0]


class Probe(NamedTuple):
    """Placeholder logits sent through a model, and their values in its output; both `(..., 3, vocabulary)`."""

    model_name: str
    sent: Tensor
    observed: Tensor
    tolerance: float

    def fit(self) -> LogitTransform:
        """The transform that the model applies; raises ValueError if it has another form."""
        transform = LogitTransform()
        if self.observed.shape == self.sent.shape:
            sent, observed = (tensor.detach().reshape(3, -1).float() for tensor in (self.sent, self.observed))
            transform = fitted_transform(sent, observed, self.tolerance)
        self.check(transform)
        return transform

    def check(self, transform: LogitTransform) -> None:
        """Raise ValueError unless `transform` is what the model applies."""
        if self.observed.shape != self.sent.shape:
            self._raise("their shape is {1} where it was {0}", tuple(self.sent.shape), tuple(self.observed.shape))
        if self.observed.requires_grad:
            self._raise("they depend on parameters beside the head, whose gradient would be lost")
        error = deviation(transform, self.sent, self.observed)
        if error > self.tolerance:
            expected = transform(self.sent)
            unit = expected.abs().clamp(min=1e-3)
            worst = int(((self.observed.float() - expected).abs() / unit).nan_to_num(nan=torch.inf).argmax())
            self._raise(
                "the nearest found, {0}, is off by {1:.2g} at worst: a logit {2:.6g} becomes {3:.6g}, not {4:.6g}",
                transform, error, *(float(tensor.flatten()[worst]) for tensor in (self.sent, self.observed, expected)),
            )  # fmt: skip

    def _raise(self, what: str, *values: Any) -> None:
        raise ValueError(
            f"{self.model_name} changes its logits after the head by more than a scale and a soft cap: "
            f"{what.format(*values)}. Its loss cannot be fused; use token_loss on the model's own logits instead."
        )


@contextmanager
def _probed(
    root: nn.Module,
    head: LanguageModelHead,
    at_head: Callable[[Tensor], Tensor],
    at_root: Callable[[Probe, Any], Any],
) -> Iterator[None]:
    """Within this context `at_head(hidden)` replaces the head, and `at_root` makes the root's output.

    `at_head` returns the head's weight; the rest of the model receives placeholders.
    """
    name = type(root).__name__
    captured: dict[str, Any] = {}

    @torch.compiler.disable  # a compiled graph would keep the labels of the call that compiled it
    def head_forward(hidden: Tensor) -> Tensor:
        if captured:
            raise ValueError(f"{name} calls its head more than once in a forward pass; it cannot be fused.")
        weight = at_head(hidden)
        probe = placeholders(weight.shape[0], hidden.device)
        captured["sent"] = probe.reshape([1] * (hidden.ndim - 2) + list(probe.shape))
        captured["weight"], captured["tolerance"] = weight, _tolerance(hidden)
        whole = head.has_tp_plan or not is_row_shard(weight)
        return captured["sent"].clone() if whole else _sharded_like(weight, captured["sent"])

    @torch.compiler.disable
    def root_output(module: nn.Module, args: Any, output: Any) -> Any:
        if not captured:
            raise ValueError(f"{name} did not call its head {type(head.module).__name__} in its forward pass.")
        logits = output["logits"] if isinstance(output, dict) else output[0]
        observed = _whole(logits, captured["sent"], captured["weight"])
        return at_root(Probe(name, captured["sent"], observed, captured["tolerance"]), output)

    with ExitStack() as undo:
        undo.enter_context(head.replaced(head_forward))
        undo.callback(root.register_forward_hook(root_output, prepend=True).remove)
        yield


def _tolerance(hidden: Tensor) -> float:
    """Relative rounding error of placeholders; models transform logits in different dtypes."""
    device = hidden.device.type
    coarse = torch.finfo(hidden.dtype).bits < 32 or torch.is_autocast_enabled(device)
    return 2.0**-6 if coarse else 1e-5


def _whole(observed: Any, sent: Tensor, weight: Any) -> Tensor:
    """The transformed placeholders on the device of the original ones, with the columns of all processes."""
    if is_row_shard(weight) and not hasattr(observed, "placements") and observed.shape[-1] != sent.shape[-1]:
        from torch.distributed.tensor import DTensor, Shard

        if observed.shape == _sharded_like(weight, sent).to_local().shape:
            placements = [Shard(sent.ndim - 1)]
            observed = DTensor.from_local(
                observed, weight.device_mesh, placements, run_check=False, shape=sent.shape, stride=sent.stride()
            )
    whole: Tensor = observed.full_tensor() if hasattr(observed, "placements") else observed
    return whole.to(sent.device)


def _sharded_like(weight: Any, probe: Tensor) -> Any:
    """The placeholders sharded like the logits of a head sharded by rows: each process has its own columns."""
    from torch.distributed.tensor import Shard

    return replicated_like(weight, probe).redistribute(placements=[Shard(probe.ndim - 1)])


def auxiliary_loss(output: Any) -> Tensor | None:
    """The unweighted loss that a mixture of experts returns to balance its experts; None for other models."""
    loss = output.get("aux_loss") if isinstance(output, dict) else None
    return loss if isinstance(loss, Tensor) else None
