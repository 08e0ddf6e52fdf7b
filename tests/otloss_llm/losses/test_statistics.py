"""Statistics of tokens in every path, weights of tokens, and `token_statistics`, against float64 autograd."""

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
    token_statistics,
)
from otloss_llm.objectives import Statistics, Sum
from tests.otloss_llm.oracles import cosine_matrix, dense_statistics, everything, problem, relative_error
from tests.otloss_llm.scoring import IMPLEMENTATIONS, from_logits, fused, gradients

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
