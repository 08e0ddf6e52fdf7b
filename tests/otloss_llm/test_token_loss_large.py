"""More logits than a 32-bit offset counts: N V > 2^31, as a long batch with a large vocabulary has."""

from __future__ import annotations

import torch

from otloss_llm import EMO, EmbeddingCost, linear_token_loss


def test_more_than_two_to_the_31_logits() -> None:
    tokens, vocab, width = 70_000, 31_000, 2
    assert tokens * vocab > 2**31
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(tokens, width, generator=generator)
    weight = torch.randn(vocab, width, generator=generator)
    labels = torch.randint(20, (tokens,), generator=generator)
    labels[-5:] = torch.arange(vocab - 5, vocab)  # the far corner
    cost = EmbeddingCost(weight)
    leaves = [hidden.clone().requires_grad_(), weight.clone().requires_grad_()]
    out = linear_token_loss(*leaves, labels, objective=EMO(), cost=cost, reduction="sum")
    out.loss.backward()

    some = torch.cat([torch.arange(5), torch.arange(tokens - 5, tokens)])
    again = hidden[some].double().requires_grad_()
    want = linear_token_loss(
        again, weight.double(), labels[some], objective=EMO(), cost=cost.to(torch.float64), reduction="sum",
        impl="reference",
    )  # fmt: skip
    want.loss.backward()
    torch.testing.assert_close(out.nll[some].double(), want.nll, rtol=1e-5, atol=1e-6)
    assert out.cost is not None
    torch.testing.assert_close(out.cost[some].double(), want.cost, rtol=1e-5, atol=1e-5)
    assert leaves[0].grad is not None
    torch.testing.assert_close(leaves[0].grad[some].double(), again.grad, rtol=1e-4, atol=1e-5)
    assert torch.isfinite(leaves[1].grad).all()
