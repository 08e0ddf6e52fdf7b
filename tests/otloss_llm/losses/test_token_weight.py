"""Weights per token in every path, and `token_statistics` against autograd of the formulas."""

from typing import Any

import pytest
import torch
from torch import Tensor

from otloss_llm import EMO, MLE, EmbeddingCost, token_loss, token_statistics
from tests.otloss_llm.oracles import dense_statistics, problem
from tests.otloss_llm.scoring import IMPLEMENTATIONS, from_logits, fused, gradients


@pytest.mark.parametrize("impl", ["logits", *IMPLEMENTATIONS])
def test_weights_multiply_the_value_and_a_mean_divides_by_their_sum(impl: str) -> None:
    given = problem(2)
    valid = given.labels != -100
    weights = torch.rand(given.labels.shape, dtype=torch.float64).requires_grad_()
    with torch.no_grad():
        weights[3] = 0.0
        weights[~valid] = torch.nan  # of positions that are not scored
    leaves = given.leaves()

    def loss(**settings: Any) -> Tensor:
        settings = {"objective": EMO(), "cost": EmbeddingCost(given.embedding)} | settings
        if impl == "logits":
            return token_loss(torch.nn.functional.linear(*leaves), given.labels, **settings).loss
        return fused(leaves, given, impl=impl, **settings).loss

    value = loss(reduction="none")
    each = torch.where(valid, weights.detach() * value, 0.0)
    total = weights.detach()[valid].sum()
    expected = {"none": each, "sum": each.sum(), "mean": each.sum() / total}
    for reduction, want in expected.items():
        got = loss(reduction=reduction, token_weight=weights)
        torch.testing.assert_close(got, want)
        upstream = torch.ones_like(got) if reduction != "none" else torch.rand_like(got)
        made = torch.autograd.grad((got * upstream).sum(), leaves)
        for a, b in zip(made, torch.autograd.grad((want * upstream).sum(), leaves, retain_graph=True), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-13)
    torch.testing.assert_close(loss(token_weight=weights, num_items=50), each.sum() / 50)
    assert loss(token_weight=torch.zeros_like(weights)) == 0
    whole = torch.ones(given.labels.shape, dtype=torch.int64)
    torch.testing.assert_close(loss(token_weight=whole), loss())


def test_weights_that_are_not_valid_raise() -> None:
    z, label = torch.randn(4, 7), torch.tensor([1, 2, -100, 3])
    for weights, message in (
        (torch.ones(3), r"token_weight has shape \(3,\), expected that of labels, \(4,\)"),
        (torch.tensor([1.0, -2.0, 1.0, 1.0]), "token_weight holds -2.0 at a labelled position"),
        (torch.tensor([1.0, torch.inf, 1.0, 1.0]), "token_weight holds inf"),
    ):
        for impl in ("logits", "chunked"):
            with pytest.raises(ValueError, match=message):
                from_logits(z, label, impl, objective=MLE(), token_weight=weights)


@pytest.mark.parametrize("impl", ["reference", "chunked"])
@pytest.mark.parametrize(("temperature", "softcap"), [(1.0, None), (0.6, None), (1.7, 4.0)])
def test_log_probabilities_and_entropies(impl: str, temperature: float, softcap: float | None) -> None:
    """The temperature acts after scale and soft cap; each output alone and both together have their gradient."""
    given = problem(3, batch=(4, 9))
    kept = given.labels != -100
    upstream = torch.rand(2, *given.labels.shape, dtype=torch.float64)
    for terms in ((1, 0), (0, 1), (1, 1)):
        leaves, plain = given.leaves(), given.leaves()
        made = token_statistics(
            *leaves[:2], given.labels, bias=leaves[2], temperature=temperature, logit_scale=0.7, logit_softcap=softcap,
            impl=impl, chunk_size=7,
        )  # fmt: skip
        z = torch.nn.functional.linear(plain[0][kept], plain[1], plain[2]) * 0.7
        z = (z if softcap is None else softcap * torch.tanh(z / softcap)) / temperature
        true = dense_statistics(z, given.labels[kept], torch.zeros_like(z))
        torch.testing.assert_close(made.log_prob[kept], -true["nll"])
        torch.testing.assert_close(made.entropy[kept], true["entropy"])
        assert not made.log_prob[~kept].any()
        assert not made.entropy[~kept].any()
        pairs = ((made.log_prob, -true["nll"]), (made.entropy, true["entropy"]))
        got = sum((u * out).sum() for u, (out, _), use in zip(upstream, pairs, terms, strict=True) if use)
        want = sum((u[kept] * out).sum() for u, (_, out), use in zip(upstream, pairs, terms, strict=True) if use)
        assert isinstance(got, Tensor)
        assert isinstance(want, Tensor)
        for a, b in zip(gradients(got, leaves), gradients(want, plain), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12)


def test_log_probabilities_in_half_precision_and_errors() -> None:
    hidden, weight = torch.randn(20, 8).half().requires_grad_(), torch.randn(50, 8).half()
    labels = torch.arange(20)
    made = token_statistics(hidden, weight, labels)
    assert made.log_prob.dtype == torch.float32
    (made.log_prob + made.entropy).sum().backward()
    wide = hidden.detach().double().requires_grad_()
    true = dense_statistics(wide @ weight.double().T, labels, torch.zeros(20, 50))
    (true["entropy"] - true["nll"]).sum().backward()
    assert hidden.grad is not None
    torch.testing.assert_close(hidden.grad.double(), wide.grad, rtol=5e-3, atol=5e-3)
    with pytest.raises(ValueError, match="temperature is 0, expected a finite number above 0"):
        token_statistics(hidden, weight, labels, temperature=0)
    with pytest.raises(TypeError, match="temperature is a Tensor"):  # it would get no gradient
        token_statistics(hidden, weight, labels, temperature=torch.tensor(1.0, requires_grad=True))  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match="no second derivative"):
        torch.autograd.grad(token_statistics(hidden, weight, labels).entropy.sum(), hidden, create_graph=True)
