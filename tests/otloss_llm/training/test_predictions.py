"""Entropy and accuracy of predictions for logs, against torch's own distribution."""

import pytest
import torch

from otloss_llm.training.fused import ScoredHead
from otloss_llm.training.predictions import logit_sums, prediction_sums


@pytest.mark.parametrize(("scale", "softcap"), [(1.0, None), (0.7, 2.0)])
def test_sums_are_those_of_the_models_distribution(scale: float, softcap: float | None) -> None:
    torch.manual_seed(0)
    hidden, weight, bias = torch.randn(3, 7, 5), torch.randn(11, 5, requires_grad=True), torch.randn(11)
    bias[4] = -torch.inf  # a token that the model cannot write
    labels = torch.randint(5, 11, (3, 7))
    labels[0, :4] = -100
    head = ScoredHead(weight, bias, scale, softcap)
    logits = scale * (hidden @ weight.T + bias)
    logits = logits if softcap is None else softcap * torch.tanh(logits / softcap)
    valid = labels != -100
    entropy = torch.distributions.Categorical(logits=logits.clamp(min=-1e30)).entropy()
    of_each = torch.stack([entropy, logits.argmax(-1) == labels, valid], -1).detach()
    expected = (of_each * valid.unsqueeze(-1)).sum((0, 1))
    torch.testing.assert_close(prediction_sums(hidden, labels, head), expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(logit_sums(logits, labels), expected, rtol=1e-5, atol=1e-5)
    # 4 of 17 tokens stand for all of them.
    of_some = of_each[valid][torch.arange(4) * 17 // 4].sum(0) * 17 / 4
    some = prediction_sums(hidden, labels, head, limit=4)
    torch.testing.assert_close(some, of_some, rtol=1e-5, atol=1e-5)
    assert some[2] == 17
    ignored = torch.full_like(labels, -100)
    assert not prediction_sums(hidden, ignored, head).any()
