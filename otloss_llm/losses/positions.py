"""What the token losses share around their kernels: validation of arguments, choice of positions, reduction."""

from __future__ import annotations

import math
from typing import NoReturn

import torch
from torch import Tensor

from otloss._checks import (
    NotFiniteError,
    check_count,
    check_finite,
    check_floating,
    check_number,
    check_positive,
    check_reduction,
    check_tensor,
    check_whole,
)
from otloss_llm.costs.vocabulary import TokenCost, VocabularyCost, as_vocabulary_cost
from otloss_llm.objectives import EMO, Objective, Statistics, Sum

IGNORE_INDEX = -100  # a label that is left out, as in torch and transformers
IMPLEMENTATIONS = ("auto", "reference", "chunked", "triton")


def check_head(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor
) -> tuple[Tensor, Tensor, Tensor | None]:
    check_floating("hidden", hidden)
    check_floating("weight", weight)
    check_tensor("labels", labels)
    if weight.ndim != 2 or hidden.ndim < 1 or hidden.shape[-1] != weight.shape[-1]:
        raise ValueError(
            f"hidden has shape {tuple(hidden.shape)} and weight {tuple(weight.shape)}, expected (..., d) and (V, d)."
        )
    if bias is not None and check_floating("bias", bias).shape != weight.shape[:1]:
        raise ValueError(f"bias has shape {tuple(bias.shape)}, expected ({weight.shape[0]},), one per row of weight.")
    device = hidden.device.type
    if torch.is_autocast_enabled(device) and hidden.dtype != torch.float64:
        dtype = torch.get_autocast_dtype(device)
        return hidden.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)
    if hidden.dtype != weight.dtype or (bias is not None and bias.dtype != weight.dtype):
        raise TypeError(
            f"hidden is {hidden.dtype}, weight {weight.dtype}{'' if bias is None else f', bias {bias.dtype}'}; "
            "expected one dtype. Cast one, or run under torch.autocast."
        )
    return hidden, weight, bias


# The cost that objectives of a kind are meant for.
_EXAMPLES = {"number": "NumberCost.from_tokenizer(tokenizer)", "rating": "RatingCost(values)"}


def check_objective(
    objective: Objective,
    cost: TokenCost | None,
    vocab: int | None = None,
    device: torch.device | None = None,
) -> tuple[Sum, VocabularyCost | None]:
    """Return the objective as a sum of terms, and the cost as a vocabulary cost.

    Raises if the objective cannot be called, or does not have the cost that it needs.

    Args:
        vocab, device: of the logits, which the cost must have too; None: not known yet.
    """
    total = Sum.of(objective)
    _ = total.reads, total.temperature  # raise where they are not valid
    if cost is None:
        if any(term.fails_without_cost for term in total.terms):
            example = _EXAMPLES.get(total.cost_kind, "EmbeddingCost.from_model(model)")
            raise ValueError(f"{objective!r} needs cost=, for example {example}.")
        return total, None
    token_cost = as_vocabulary_cost(cost)
    _check_kind(total, token_cost)
    if vocab is not None:
        check_vocabulary(token_cost, vocab)
    if device is not None and token_cost.device != device:
        raise ValueError(
            f'the cost is on {token_cost.device}, the logits on {device}, expected one device: cost.to("{device}").'
        )
    return total, token_cost


def _check_kind(objective: Sum, cost: VocabularyCost) -> None:
    """Raise ValueError if the cost is of a kind that the objective is not meant for."""
    name = type(cost).__name__
    if cost.signed and not any(term.stated("signed_cost", False) for term in objective.terms):
        raise ValueError(
            f"{objective!r} got {name}, whose costs are negative too, expected a cost >= 0; take ExpectedValue(), or "
            "set signed_cost = True on an objective that is meant for them."
        )
    if objective.cost_kind == "rating" and not cost.signed:
        raise ValueError(f"{objective!r} got {name}, expected RatingCost(values): signed differences.")
    if not cost.covers_text and any(
        isinstance(term.stated("weighting", None), str) for term in objective.terms_of(EMO)
    ):
        raise ValueError(
            f"{objective!r} weighs nll by a cost that {name} has at numbers only, and would hardly train text; use "
            "MixedCost(numbers, EmbeddingCost.from_model(model)), NumberToken(), or EMO with a number for its "
            "weighting."
        )


def check_vocabulary(cost: VocabularyCost, vocab: int) -> None:
    """Raise ValueError unless the cost is over as many tokens as the logits."""
    if tuple(cost.shape) != (vocab, vocab):
        raise ValueError(
            f"cost is over a vocabulary of {cost.shape[-1]} tokens, the logits have {vocab}; "
            "build the cost from the embedding of this model (EmbeddingCost.from_model(model)), or with vocab_size=."
        )


def check_kernel(impl: str, chunk_size: int | None) -> None:
    """Raise ValueError unless the kernel exists and the chunk size is a positive whole number."""
    if impl not in IMPLEMENTATIONS:
        raise ValueError(f"impl is {impl!r}, expected one of {IMPLEMENTATIONS}.")
    if chunk_size is not None:
        check_count("chunk_size", chunk_size)


def check_transform(logit_scale: float, logit_softcap: float | None) -> tuple[float, float | None]:
    """Return the scale and soft cap as numbers, under which logits stay finite.

    Raises:
        ValueError: the scale is not finite, the cap not positive, or one of them requires grad, which it would not get.
    """
    for name, value in (("logit_scale", logit_scale), ("logit_softcap", logit_softcap)):
        if isinstance(value, Tensor) and value.requires_grad:
            raise ValueError(
                f"{name} is a tensor that requires grad, expected a number; make a learned scale part of the graph by "
                "passing hidden * scale."
            )
        if not (isinstance(value, Tensor) or (value is None and name == "logit_softcap")):
            check_number(name, value)
    scale, softcap = float(logit_scale), None if logit_softcap is None else float(logit_softcap)
    if not math.isfinite(scale):
        raise ValueError(f"logit_scale is {scale}, expected a finite number.")
    if softcap is not None and not 0 < softcap < math.inf:
        raise ValueError(f"logit_softcap is {softcap}, expected a positive, finite number, or None for no cap.")
    return scale, softcap


def check_fixed(cost: VocabularyCost | None) -> None:
    """Raise ValueError if the cost requires a gradient, which the fused kernels do not give."""
    if cost is not None and torch.is_grad_enabled() and cost.requires_grad:
        raise ValueError(
            "the cost requires grad, which this kernel does not give it; build it from a detached tensor "
            '(EmbeddingCost does), or use impl="reference".'
        )


def check_token_reduction(reduction: str, num_items: int | Tensor | None) -> None:
    """Raise ValueError unless reduction and count fit each other."""
    check_reduction(reduction)
    if num_items is None:
        return
    if reduction != "mean":
        raise ValueError(f'num_items={num_items} needs reduction="mean", got {reduction!r}.')
    if not isinstance(num_items, Tensor):
        check_positive("num_items", num_items)
    elif num_items.numel() != 1 or not 0 < float(num_items) < math.inf:
        raise ValueError(f"num_items is {num_items}, expected one positive count.")


def valid_positions(labels: Tensor, batch: torch.Size, vocab: int, ignore_index: int, beside: str) -> Tensor:
    """Mask of labelled positions; raises on labels of another shape, dtype or range."""
    check_tensor("labels", labels)
    check_whole("ignore_index", ignore_index, "a whole number that is no label, such as -100")
    if labels.dtype not in (torch.int64, torch.int32):
        raise TypeError(f"labels have dtype {labels.dtype}, expected int64 (or int32) token ids.")
    if labels.shape != batch:
        raise ValueError(
            f"labels have shape {tuple(labels.shape)}, expected {tuple(batch)}, the leading axes of {beside}."
        )
    valid = labels != ignore_index
    outside = valid & ((labels < 0) | (labels >= vocab))
    if outside.any():
        first = tuple(int(i) for i in outside.nonzero()[0])
        raise ValueError(
            f"labels hold {int(outside.sum())} ids outside the vocabulary, the first at {first}: {int(labels[first])}; "
            f"expected 0..{vocab - 1} or ignore_index={ignore_index}. Is the tokenizer the model's own?"
        )
    return valid


def cost_positions(cost: TokenCost | None, labels: Tensor, valid: Tensor) -> Tensor:
    """The valid positions that have costs: of a cost of numbers the number positions, of any other all."""
    return valid if cost is None else as_vocabulary_cost(cost).positions(labels, valid)


def valid_weights(token_weight: Tensor | None, labels: Tensor, valid: Tensor) -> Tensor | None:
    """Return the detached weights of the valid tokens; raise unless there is a number >= 0 for each of them."""
    if token_weight is None:
        return None
    check_tensor("token_weight", token_weight)
    if token_weight.shape != labels.shape:
        raise ValueError(
            f"token_weight has shape {tuple(token_weight.shape)}, expected the shape of labels, {tuple(labels.shape)}."
        )
    if token_weight.is_complex():
        raise TypeError(f"token_weight has dtype {token_weight.dtype}, expected real numbers.")
    weights = token_weight.detach().to(valid.device)[valid]
    wrong = ~((weights >= 0) & torch.isfinite(weights))
    if wrong.any():
        raise ValueError(
            f"token_weight holds {float(weights[wrong][0])} at a labelled position, expected finite numbers >= 0."
        )
    return weights


def reduction_factor(
    reduction: str, num_items: int | Tensor | None, like: Tensor, weights: Tensor | None = None
) -> Tensor:
    """What the sum over valid tokens (the rows of `like`) is multiplied by, in float32 or wider.

    With weights one factor for each token, of which "mean" divides by the sum of the weights; 0 where that is 0.
    """
    dtype = torch.promote_types(like.dtype, torch.float32)
    if weights is not None:
        weights = weights.to(device=like.device, dtype=dtype)
        total = weights.sum() if num_items is None else torch.as_tensor(num_items, device=like.device)
        total = total.to(dtype).reshape(())
        return weights if reduction != "mean" else weights / torch.where(total > 0, total, 1.0)
    if reduction != "mean":
        return torch.ones((), dtype=dtype, device=like.device)
    if isinstance(num_items, Tensor):
        return 1.0 / num_items.to(device=like.device, dtype=dtype).reshape(())
    count = max(1, len(like)) if num_items is None else num_items
    return 1.0 / torch.full((), count, dtype=dtype, device=like.device)


def scatter(values: Tensor, valid: Tensor) -> Tensor:
    """Per-token values back at their positions, 0 elsewhere."""
    return values.new_zeros(valid.shape).masked_scatter(valid, values)


def raise_not_finite(statistics: Statistics, labels: Tensor, objective: Sum, **inputs: Tensor | None) -> NoReturn:
    """Raise a ValueError that names why the loss over these valid tokens is not finite.

    Args:
        inputs: what the loss was made of. Their NaN and +inf are at fault first; -inf masks a token out of the
            vocabulary, at fault only where that token is a label.
    """
    for name, tensor in inputs.items():
        if tensor is not None:
            check_finite(name, tensor.detach().masked_fill(tensor == -torch.inf, 0.0))
    statistics = statistics.map(torch.Tensor.detach)
    nll = statistics.nll
    bad = ~torch.isfinite(nll)
    if bad.any():
        first = int(bad.nonzero()[0])
        raise NotFiniteError(
            f"-log q is {float(nll[first])} for label {int(labels[first])}: its logit is -inf or overflowed; "
            "expected finite logits at every label. Unmask that token, or set its label to ignore_index."
        )
    value, _ = objective.value_and_gradients(statistics)
    first = int((~torch.isfinite(value)).nonzero()[0]) if not torch.isfinite(value).all() else 0
    names = ("nll", "D", *Statistics._fields[2:])
    token = ", ".join(
        f"{name}={float(vector[first]):.6g}"
        for name, vector in zip(names, statistics, strict=True)
        if vector is not None
    )
    raise ValueError(
        f"objective {objective!r} has a value or derivative that is not finite, first at {token}; guard it there."
    )
