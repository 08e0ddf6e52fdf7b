"""More logits than a 32-bit offset counts: N V > 2^31, as a long batch with a large vocabulary has."""

from __future__ import annotations

import pytest
import torch

from otloss_llm import EMO, EmbeddingCost, linear_token_loss


@pytest.mark.slow
def test_more_than_two_to_the_31_logits() -> None:
    """A batch of 70 tokens a thousand times over: a thousand times its loss and dW, and its dh again and again."""
    tokens, times, vocab, width = 70, 1000, 31_000, 2
    assert tokens * times * vocab > 2**31
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(tokens, width, generator=generator)
    weight = torch.randn(vocab, width, generator=generator)
    labels = torch.randint(20, (tokens,), generator=generator)
    labels[-5:] = torch.arange(vocab - 5, vocab)  # the far corner
    cost = EmbeddingCost(weight)
    leaves = [hidden.repeat(times, 1).requires_grad_(), weight.clone().requires_grad_()]
    out = linear_token_loss(*leaves, labels.repeat(times), objective=EMO(), cost=cost, reduction="sum")
    out.loss.backward()

    once = [hidden.double().requires_grad_(), weight.double().requires_grad_()]
    wide = EmbeddingCost(weight).to(torch.float64)
    want = linear_token_loss(*once, labels, objective=EMO(), cost=wide, reduction="sum", impl="reference")
    want.loss.backward()
    assert out.cost is not None
    assert want.cost is not None
    torch.testing.assert_close(out.loss.double(), times * want.loss, rtol=1e-5, atol=0)
    torch.testing.assert_close(out.nll.double(), want.nll.repeat(times), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(out.cost.double(), want.cost.repeat(times), rtol=1e-5, atol=1e-5)
    # Sums of n equal terms, added one by one, are off by up to n eps / 2, and CPUs differ in how matrix products add.
    # One token in the wrong place would change dh by 1 / 70, one chunk dW by 1 / 70.
    eps = torch.finfo(torch.float32).eps
    bounds = (vocab * eps / 8, tokens * times * eps / 8)  # 5e-4 and 1e-3
    gradients = zip((leaves[0].grad, leaves[1].grad), (once[0].grad, once[1].grad), bounds, strict=True)
    for got, expected, bound in gradients:
        assert got is not None
        assert expected is not None
        expected = expected.repeat(times, 1) if got.shape[0] > vocab else times * expected
        assert float((got - expected).norm() / expected.norm()) < bound
