"""Losses of masks against transport of points, soft Dice, plain loops and finite differences."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import otloss
from otloss.losses import mask_loss, wasserstein_dice

GENERATOR = torch.Generator().manual_seed(0)
LOGITS = torch.randn(3, 5, 6, generator=GENERATOR, dtype=torch.float64)
TARGET = (torch.rand(3, 5, 6, generator=GENERATOR) > 0.6).double()


@pytest.mark.parametrize("penalty", [None, 2.0])
def test_mask_loss_is_the_divergence_of_pixels(penalty: float | None) -> None:
    """With spacings that differ, against a point for every pixel; gradients by finite differences."""
    rows, columns = torch.meshgrid(0.5 * torch.arange(5.0), 2.0 * torch.arange(6.0), indexing="ij")
    points = otloss.costs.PointCost(torch.stack([rows, columns], -1).reshape(-1, 2).double())
    p, q = LOGITS.sigmoid().flatten(1), TARGET.flatten(1)
    scales = (p.sum(-1, keepdim=True), q.sum(-1, keepdim=True)) if penalty is None else (q.sum(-1, keepdim=True),) * 2
    options = {"epsilon": 1.5, "marginal_penalty": penalty, "tolerance": 1e-10}
    expected = otloss.sinkhorn_divergence(p / scales[0], q / scales[1], points, **options)
    actual = mask_loss(LOGITS, TARGET, spacing=(0.5, 2.0), reduction="none", **options)
    torch.testing.assert_close(actual, expected, rtol=1e-6, atol=1e-8)
    torch.autograd.gradcheck(
        lambda z: mask_loss(z, TARGET, spacing=(0.5, 2.0), **options), LOGITS.clone().requires_grad_(), rtol=1e-4,
        atol=1e-6,
    )  # fmt: skip


@pytest.mark.parametrize("penalty", [None, 2.0])
def test_empty_targets_count_as_area(penalty: float | None) -> None:
    target, logits = TARGET.clone(), LOGITS.clone().requires_grad_()
    target[1] = 0
    actual = mask_loss(logits, target, epsilon=1.0, spacing=0.5, marginal_penalty=penalty, reduction="none")
    alone = mask_loss(logits[2], target[2], epsilon=1.0, spacing=0.5, marginal_penalty=penalty)
    torch.testing.assert_close(actual[2], alone, rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(actual[1], 0.25 * logits[1].sigmoid().sum())
    actual.sum().backward()
    assert logits.grad is not None
    probability = LOGITS[1].sigmoid()
    torch.testing.assert_close(logits.grad[1], 0.25 * probability * (1 - probability))
    assert mask_loss(LOGITS, 0 * target, epsilon=1.0, empty="zero") == 0
    with pytest.raises(ValueError, match="a target is empty"):
        mask_loss(LOGITS, target, epsilon=1.0, empty="error")
    with pytest.raises(ValueError, match="a channel of one class"):
        mask_loss(LOGITS.unsqueeze(1), target, epsilon=1.0)


def test_wasserstein_dice_is_a_loop_over_images_and_pixels() -> None:
    """Costs that are neither symmetric nor of one scale; the value of a batch is that of its images."""
    logits, target = torch.randn(4, 3, 2, 5, generator=GENERATOR), torch.randint(3, (4, 2, 5), generator=GENERATOR)
    target[3] = 0
    cost = torch.tensor([[0.0, 2.0, 4.0], [3.0, 0.0, 1.0], [4.0, 0.5, 0.0]])
    actual = wasserstein_dice(logits, target, cost, reduction="none")
    m = cost.numpy() / 4
    for k in range(4):
        q, agreed, wrong = torch.softmax(logits[k].double(), 0).numpy(), 0.0, 0.0
        for i, j in np.ndindex(2, 5):
            y = int(target[k, i, j])
            distance = sum(q[c, i, j] * m[y, c] for c in range(3))
            agreed, wrong = agreed + m[y, 0] * (m[y, 0] - distance), wrong + distance
        np.testing.assert_allclose(float(actual[k]), 1 - 2 * agreed / (2 * agreed + wrong), rtol=1e-4)
        torch.testing.assert_close(wasserstein_dice(logits[k : k + 1], target[k : k + 1], cost), actual[k])
    torch.autograd.gradcheck(lambda z: wasserstein_dice(z, target, cost), logits.double().requires_grad_())


def test_wasserstein_dice_of_two_classes_is_soft_dice() -> None:
    logits = torch.stack([torch.zeros_like(LOGITS), LOGITS], 1)
    p, y = LOGITS.sigmoid(), TARGET
    dice = 1 - 2 * (p * y).sum((1, 2)) / (p + y).sum((1, 2))
    actual = wasserstein_dice(logits, y.long(), 1 - torch.eye(2, dtype=torch.float64), reduction="none")
    torch.testing.assert_close(actual, dice, rtol=1e-5, atol=0.0)
    sure = torch.full((1, 2, 4), -30.0)
    sure[:, 0] = 30
    assert float(wasserstein_dice(sure, torch.zeros(1, 4, dtype=torch.long), 1 - torch.eye(2))) < 1e-6
    with pytest.raises(ValueError, match="background"):
        wasserstein_dice(sure, torch.zeros(1, 4, dtype=torch.long), torch.ones(2, 2))


def test_predictions_that_underflow_and_bad_costs() -> None:
    logits = torch.full((1, 12, 12), -110.0, requires_grad=True)
    target = torch.zeros(1, 12, 12)
    target[0, 3:6, 3:6] = 1
    value = mask_loss(logits, target, epsilon=0.5, marginal_penalty=4.0)
    (gradient,) = torch.autograd.grad(value, logits)
    torch.testing.assert_close(value.detach(), mask_loss(logits.detach(), target, epsilon=0.5, marginal_penalty=4.0))
    assert gradient.isfinite().all()
    cost, one = 1 - torch.eye(3), torch.tensor([[0]])
    for call, message in (
        (lambda: wasserstein_dice(torch.zeros(1, 3), torch.tensor([0]), cost), r"expected \(batch, K, ...\)"),
        (lambda: wasserstein_dice(torch.zeros(1, 3, 1), one, cost, background=9), "background is 9"),
        (lambda: wasserstein_dice(torch.zeros(1, 3, 1), one, 0 * cost), "costs above 0 to the background"),
    ):
        with pytest.raises(ValueError, match=message):
            call()
