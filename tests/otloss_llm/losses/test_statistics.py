"""Objectives of entropy, logsumexp (at two temperatures), mean logit: every path against float64 autograd."""

import math
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor

from otloss.costs import LineCost
from otloss_llm import (
    EMO,
    GEM,
    MLE,
    EmbeddingCost,
    NumberCost,
    TokenLoss,
    dense_token_loss,
    linear_token_loss,
    token_loss,
)
from otloss_llm.objectives import Statistics, Sum
from tests.otloss_llm.oracles import cosine_matrix, dense_statistics, everything, problem, relative_error
from tests.otloss_llm.scoring import from_logits, fused, gradients

UPSTREAM = torch.linspace(-2, 3, 7, dtype=torch.float64)


def logits(vocab: int, spread: float, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Logits of 7 tokens, labels, and the values of the tokens on a line, half of them numbers."""
    generator = torch.Generator().manual_seed(vocab)
    z = (torch.randn(7, vocab, generator=generator, dtype=torch.float64) * spread).to(dtype)
    label = torch.randint(vocab, (7,), generator=generator)
    label[0] = z[0].argmax()
    return z, label, torch.rand(vocab, generator=generator, dtype=torch.float64)


def truth(z: Tensor, label: Tensor, rows: Tensor) -> tuple[dict[str, Tensor], Tensor, Tensor]:
    z = z.double().requires_grad_()
    statistics = dense_statistics(z, label, rows)
    value = everything(**statistics)
    (gradient,) = torch.autograd.grad((value * UPSTREAM).sum(), z)
    return {name: vector.detach() for name, vector in statistics.items()}, value.detach(), gradient


def assert_statistics(z: Tensor, label: Tensor, rows: Tensor, cost: Any, impl: str, tolerance: float) -> None:
    expected, value, gradient = truth(z, label, rows)
    leaf = z.clone().requires_grad_()
    out = from_logits(leaf, label, impl, objective=everything, cost=cost, reduction="none")
    made = [out.loss, out.nll, out.cost, out.entropy, out.logsumexp, out.tempered_logsumexp]
    for got, want in zip(made, [value, *list(expected.values())[:5]], strict=True):
        assert got is not None
        torch.testing.assert_close(got.double(), want, rtol=tolerance, atol=tolerance)
    (got,) = torch.autograd.grad((out.loss * UPSTREAM).sum(), leaf)
    assert relative_error(got, gradient) < tolerance
    whole = from_logits(leaf, label, impl, objective=everything, cost=cost, reduction="mean")
    (got,) = torch.autograd.grad(whole.loss, leaf)
    wide = z.double().requires_grad_()
    (want,) = torch.autograd.grad(everything(**dense_statistics(wide, label, rows)).mean(), wide)
    assert relative_error(got, want) < tolerance


@pytest.mark.parametrize(
    ("impl", "dtype", "tolerance"),
    [("logits", torch.float64, 1e-12), ("reference", torch.float32, 4e-6), ("chunked", torch.float64, 1e-12),
     ("chunked", torch.float32, 4e-6)],
)  # fmt: skip
def test_values_and_gradients_against_float64(impl: str, dtype: torch.dtype, tolerance: float) -> None:
    """With rows of costs, and with costs in a few columns; the second half of the tokens are numbers there."""
    for vocab, spread in ((2, 3.0), (17, 1.0), (1000, 3.0)):
        z, label, x = logits(vocab, spread, dtype)
        assert_statistics(z, label, (x - x[label][:, None]).abs(), LineCost(x.to(dtype)), impl, tolerance)
        x[: vocab // 2] = math.nan
        numbers = NumberCost(x.to(dtype))
        assert_statistics(z, label, numbers.rows(label).double(), numbers, impl, tolerance)


@pytest.mark.parametrize("impl", ["reference", "chunked"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_masked_and_certain_tokens(impl: str, dtype: torch.dtype) -> None:
    """A logit of -inf has no part in the entropy, and an entropy near 0 keeps its digits where the label is certain."""
    z = torch.tensor([[40.0, 0.0, -math.inf, 1.0], [0.0, -math.inf, -math.inf, -math.inf], [3.0, 1e4, 2.0, 1.0]])
    entropies = (41 * math.exp(-40) + 40 * math.exp(-39), 0.0, 0.0)
    settings: dict[str, Any] = {"impl": impl, "reduction": "sum"}
    one, zeros = torch.ones(1, 1, dtype=dtype), torch.zeros(4, 1, dtype=dtype)
    for row, label, want in zip(z.to(dtype), (0, 0, 1), entropies, strict=True):
        bias, y = row.clone().requires_grad_(), torch.tensor([label])
        out = linear_token_loss(one, zeros, y, bias=bias, objective=lambda nll, entropy: nll + entropy, **settings)
        assert out.entropy is not None
        assert float(out.entropy) == pytest.approx(want, rel=1e-5, abs=0 if impl == "chunked" else 1e-6)
        (gradient,) = torch.autograd.grad(out.loss, bias)
        assert torch.isfinite(gradient).all()
        tempered = linear_token_loss(one, zeros, y, bias=bias, objective=GEM(0.7), **settings).loss
        want = 0.7 * torch.nn.functional.cross_entropy(bias[None] / 0.7, y)
        torch.testing.assert_close(tempered, want)
        torch.testing.assert_close(torch.autograd.grad(tempered, bias), torch.autograd.grad(want, bias))
    y = torch.tensor([0])
    with pytest.raises(ValueError, match=r"is not finite, first at nll=.*mean_logit=-inf"):
        linear_token_loss(one, zeros, y, bias=z[1].to(dtype), objective=lambda nll, mean_logit: nll + mean_logit)


@pytest.mark.parametrize("softcap", [None, 4.0])
@pytest.mark.parametrize("impl", ["reference", "chunked"])
def test_through_a_head(impl: str, softcap: float | None) -> None:
    """Gradients of hidden states, weight and bias, with a scale and a soft cap, over several chunks."""
    given = problem(3)
    given.scale, given.softcap = 0.7, softcap
    kept = given.labels != -100
    leaves, plain = given.leaves(), given.leaves()
    z = torch.nn.functional.linear(plain[0][kept], plain[1], plain[2]) * 0.7
    z = z if softcap is None else softcap * torch.tanh(z / softcap)
    label = given.labels[kept]
    value = everything(**dense_statistics(z, label, cosine_matrix(given.embedding)[label])).mean()
    out = fused(leaves, given, objective=everything, impl=impl)
    torch.testing.assert_close(out.loss, value)
    for got, want in zip(gradients(out.loss, leaves), gradients(value, plain), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-12)


def test_gradcheck_of_the_entropy_alone() -> None:
    given = problem(11, batch=(5,), vocab=6, width=3)

    def loss(*leaves: Tensor) -> Tensor:
        return fused(list(leaves), given, objective=lambda entropy: entropy, cost=None, chunk_size=2).loss

    assert torch.autograd.gradcheck(loss, given.leaves())


def test_a_token_loss_unpacks_into_three_and_has_what_was_asked_for() -> None:
    z, label, _ = logits(17, 1.0, torch.float64)
    out = token_loss(z, label, objective=lambda nll, entropy: nll * entropy)
    loss, nll, cost = out
    assert loss is out.loss
    assert nll is out.nll
    assert cost is out.cost is out.transport_cost is out.logsumexp is None
    assert out.entropy is not None
    assert not out.entropy.requires_grad
    assert token_loss(z, label, objective=lambda logsumexp: logsumexp).entropy is None
    assert token_loss(z, label, objective=MLE()).logsumexp is None
    again = pickle.loads(pickle.dumps(out))
    assert isinstance(again, TokenLoss)
    assert torch.equal(again.entropy, out.entropy)  # type: ignore[arg-type]
    ignored = label.clone()
    ignored[2] = -100
    assert token_loss(z, ignored, objective=lambda nll, entropy: nll).entropy[2] == 0  # type: ignore[index]
    with pytest.raises(ValueError, match=r"needs cost=, for example EmbeddingCost"):
        token_loss(z, label, objective=lambda cost, entropy: cost + entropy)


def test_a_statistic_whose_derivative_is_not_used_needs_no_gradient() -> None:
    """The entropy as a weight: eta is None, and the gradient is that of the weighted nll."""
    objective = lambda nll, entropy: entropy.detach() * nll  # noqa: E731
    assert Sum.of(objective).value_and_gradients(Statistics(torch.ones(2), None, torch.ones(2)))[1].entropy is None
    given = problem(5)
    leaves, plain = given.leaves(), given.leaves()
    out = fused(leaves, given, objective=objective, cost=None)
    want = fused(plain, given, objective=objective, cost=None, impl="reference")
    for got, other in zip(gradients(out.loss, leaves), gradients(want.loss, plain), strict=True):
        torch.testing.assert_close(got, other, rtol=1e-10, atol=1e-12)


def test_soft_targets_give_the_same_statistics() -> None:
    given = problem(7, vocab=9)
    z, label = torch.randn(7, 9, dtype=torch.float64), torch.randint(9, (7,))
    cost, target = EmbeddingCost(given.embedding), torch.eye(9, dtype=torch.float64)[label]
    soft = dense_token_loss(z, target, objective=everything, cost=cost)
    hard = token_loss(z, label, objective=everything, cost=cost)
    torch.testing.assert_close(soft.loss, hard.loss, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(soft.entropy, hard.entropy, rtol=1e-9, atol=1e-12)


def test_what_an_objective_reads() -> None:
    assert Sum.of(EMO()).reads == ("nll", "cost")
