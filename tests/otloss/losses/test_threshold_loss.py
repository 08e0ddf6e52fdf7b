"""Threshold losses: coral-pytorch's numbers, the binary terms themselves, gradients, the errors."""

import pytest
import torch
from torch import Tensor

from otloss.losses import cumulative_log_probabilities, threshold_loss

SCORES = torch.tensor([0.5, -1.0, 3.0, 0.2], dtype=torch.float64)
BIASES = torch.tensor([1.0, 0.2, -0.7, -2.0], dtype=torch.float64)
GRADES = torch.tensor([2, 0, 4, 3])


def of_coral(scores: Tensor) -> Tensor:
    """The log-probabilities of CORAL's logits, P(y > k) = sigmoid(score + bias_k)."""
    return cumulative_log_probabilities(scores + BIASES[0], (-BIASES).diff().log())


def test_all_thresholds_are_coral() -> None:
    """The numbers are those of coral_loss in coral-pytorch 1.4.0."""
    expected = torch.tensor([1.4041514742325547, 1.2806212274677309, 0.4669104131964259, 1.9033523144441646]).double()
    torch.testing.assert_close(threshold_loss(of_coral(SCORES), GRADES, reduction="none"), expected)
    torch.testing.assert_close(threshold_loss(of_coral(SCORES).float(), GRADES), expected.mean().float())


@pytest.mark.parametrize("kind", ["all", "immediate"])
def test_terms_of_any_distribution(kind: str) -> None:
    logits = torch.randn(6, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0), requires_grad=True)
    y = torch.tensor([0, 1, 2, 3, 4, 2])
    F = logits.softmax(-1).cumsum(-1)
    expected = []
    for row, label in enumerate(y.tolist()):
        thresholds = range(4) if kind == "all" else [k for k in (label - 1, label) if 0 <= k < 4]
        expected.append(-sum((F[row, k] if k >= label else 1 - F[row, k]).log() for k in thresholds))
    actual = threshold_loss(logits, y, kind=kind, reduction="none")
    torch.testing.assert_close(actual, torch.stack(expected))  # type: ignore[arg-type]
    soft = torch.nn.functional.one_hot(y, 5).double() * 0.7 + 0.06
    by_label = torch.stack([threshold_loss(logits, torch.full((6,), k), kind=kind, reduction="none") for k in range(5)])
    torch.testing.assert_close(threshold_loss(logits, soft, kind=kind, reduction="none"), (soft * by_label.T).sum(-1))
    assert torch.autograd.gradcheck(lambda z: threshold_loss(z, y, kind=kind), (logits,))
    assert torch.autograd.gradgradcheck(lambda z: threshold_loss(z, y, kind=kind), (logits,))


def test_all_thresholds_are_a_proper_score_with_accurate_tails() -> None:
    P = torch.tensor([0.1, 0.2, 0.4, 0.3], dtype=torch.float64)
    logits = P.log().requires_grad_()
    gradient = torch.autograd.grad(threshold_loss(logits, P), logits)[0]
    torch.testing.assert_close(gradient, torch.zeros(4).double())
    sure = torch.tensor([0.0, -40.0, -60.0])
    torch.testing.assert_close(threshold_loss(sure, torch.tensor(0)), torch.tensor(-40.0).exp() * 1)


def test_excluded_classes_and_errors() -> None:
    z = torch.tensor([[-torch.inf, 0.3, -torch.inf, 0.1]], requires_grad=True)
    threshold_loss(z, torch.tensor([2])).backward()
    assert torch.isfinite(z.grad).all()
    for y, options, message in (
        (0, {}, r"the loss of row 0 .* is infinite"), (1, {"kind": "some"}, "kind is 'some'"), (4, {}, "out of range"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=message):
            threshold_loss(z, torch.tensor([y]), **options)
