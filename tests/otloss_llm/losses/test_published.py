"""Against the published package EMOLoss 0.0.3: equal where it is right."""

from typing import Any

import pytest
import torch
from torch import Tensor

from otloss_llm import emo_loss
from tests.otloss_llm.oracles import relative_error

emo = pytest.importorskip("emo", reason="needs the published package: pip install EMOLoss==0.0.3")
MODES: dict[int, dict[str, Any]] = {1: {"directions": 0}, 2: {"weighting": "transport", "directions": 0}}


def case(seed: int, sharpness: float = 2.0, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(3, 10, 29, generator=generator) * sharpness
    embedding = torch.randn(29, 16, generator=generator)
    labels = torch.randint(29, (3, 10), generator=generator)
    return logits.to(dtype), labels, embedding.to(dtype)


def published(logits: Tensor, labels: Tensor, embedding: Tensor, mode: int) -> tuple[Tensor, Tensor]:
    leaf = logits.clone().requires_grad_()
    loss = emo.EMOLoss(leaf, labels, embedding, mode=mode)
    return loss, torch.autograd.grad(loss, leaf)[0]


def ours(logits: Tensor, labels: Tensor, embedding: Tensor, mode: int) -> tuple[Tensor, Tensor]:
    """With the shift of labels that the published function makes itself."""
    leaf = logits.clone().requires_grad_()
    loss = emo_loss(leaf[:, :-1], labels[:, 1:], embedding, **MODES[mode])
    return loss, torch.autograd.grad(loss, leaf)[0]


@pytest.mark.parametrize("mode", [1, 2])
def test_equal_in_float32_and_float64(mode: int) -> None:
    """Also with ignored labels; the peer adds 1e-10 to denominators."""
    for seed, sharpness in enumerate((0.3, 2.0, 2.0)):
        for dtype, tolerance in ((torch.float32, 1e-5), (torch.float64, 1e-7)):
            logits, labels, embedding = case(seed, sharpness, dtype)
            if seed == 2:
                labels[:, 3:7] = -100
            (loss, gradient), (theirs, their_gradient) = (f(logits, labels, embedding, mode) for f in (ours, published))
            torch.testing.assert_close(loss, theirs, rtol=tolerance, atol=0)
            assert relative_error(gradient, their_gradient) < tolerance
