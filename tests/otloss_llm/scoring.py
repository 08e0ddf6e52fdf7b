"""Short calls for the tests of token losses."""

from typing import Any

import torch
from torch import Tensor

from otloss_llm import EmbeddingCost, TokenLoss, linear_token_loss, token_loss
from tests.otloss_llm.oracles import Problem

IMPLEMENTATIONS = ["logits", "reference", "chunked"]


def fused(leaves: list[Tensor], given: Problem, **settings: Any) -> TokenLoss:
    """The token loss of a head; with impl="logits" the loss of its logits, by `token_loss`."""
    hidden, weight, bias = (*leaves, None)[:3]
    settings = {"chunk_size": 7} | settings
    if "cost" not in settings:
        settings["cost"] = EmbeddingCost(given.embedding)
    if settings.get("impl") == "logits":
        z = torch.nn.functional.linear(hidden, weight, bias) * given.scale
        z = z if given.softcap is None else given.softcap * torch.tanh(z / given.softcap)
        settings = {key: value for key, value in settings.items() if key not in ("impl", "chunk_size")}
        return token_loss(z, given.labels, **settings)
    transform = {"logit_scale": given.scale, "logit_softcap": given.softcap}
    return linear_token_loss(hidden, weight, given.labels, bias=bias, **transform, **settings)


def gradients(loss: Tensor, leaves: list[Tensor]) -> list[Tensor]:
    return list(torch.autograd.grad(loss, leaves))


def assert_all_close(got: list[Tensor], expected: list[Tensor], tolerance: float = 1e-12) -> None:
    torch.testing.assert_close(got, expected, rtol=tolerance, atol=tolerance)


def from_logits(logits: Tensor, labels: Tensor, impl: str, **settings: Any) -> TokenLoss:
    """The token loss of exactly these logits: by `token_loss` for "logits", else from hidden states = one-hot rows."""
    if impl == "logits":
        return token_loss(logits, labels, **settings)
    rows = torch.eye(len(logits), dtype=logits.dtype, device=logits.device)
    return linear_token_loss(rows, logits.T.contiguous(), labels, impl=impl, **settings)
