"""Statistics of tokens in every path, and `token_statistics`, against float64 autograd."""

import inspect
import math
import pickle
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from otloss.costs import LineCost
from otloss_llm import GEM, NumberCost, linear_token_loss, token_loss, token_statistics
from tests.otloss.oracles import cosine_matrix
from tests.otloss_llm.oracles import Problem, dense_statistics, everything, problem, relative_error
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


def assert_statistics(
    z: Tensor, label: Tensor, rows: Tensor, cost: Any, impl: str, tolerance: float, device: str = "cpu"
) -> None:
    expected, value, gradient = truth(z, label, rows)
    leaf, label, cost = z.to(device).clone().requires_grad_(), label.to(device), cost.to(device)
    out = from_logits(leaf, label, impl, objective=everything, cost=cost, reduction="none")
    made = [out.loss, out.nll, out.cost, out.entropy, out.logsumexp, out.tempered_logsumexp]
    for got, want in zip(made, [value, *list(expected.values())[:5]], strict=True):
        assert got is not None
        torch.testing.assert_close(got.cpu().double(), want, rtol=tolerance, atol=tolerance)
    (got,) = torch.autograd.grad((out.loss * UPSTREAM.to(device)).sum(), leaf)
    assert relative_error(got.cpu(), gradient) < tolerance
    whole = from_logits(leaf, label, impl, objective=everything, cost=cost, reduction="mean")
    (got,) = torch.autograd.grad(whole.loss, leaf)
    wide = z.double().requires_grad_()
    (want,) = torch.autograd.grad(everything(**dense_statistics(wide, label.cpu(), rows)).mean(), wide)
    assert relative_error(got.cpu(), want) < tolerance


@pytest.mark.parametrize(
    ("impl", "dtype", "tolerance"),
    [("logits", torch.float64, 1e-12), ("reference", torch.float32, 4e-6), ("chunked", torch.float64, 1e-12),
     ("chunked", torch.float32, 4e-6)],
)  # fmt: skip
def test_values_and_gradients_against_float64(impl: str, dtype: torch.dtype, tolerance: float) -> None:
    """With rows of costs, and with costs in a few columns; the second half of the tokens are numbers there."""
    for vocab, spread in ((2, 3.0), (15, 3.0), (16, 10.0), (17, 1.0), (1000, 3.0)):
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


def through_a_head(leaves: list[Tensor], given: Problem) -> Tensor:
    """The transformed logits of the labelled positions."""
    kept = given.labels != -100
    z = torch.nn.functional.linear(leaves[0][kept], leaves[1], leaves[2]) * given.scale
    return z if given.softcap is None else given.softcap * torch.tanh(z / given.softcap)


def weighted_by_entropy(nll: Tensor, entropy: Tensor) -> Tensor:
    """The kernels need no derivative of a statistic that is detached."""
    return entropy.detach() * nll


@pytest.mark.parametrize("softcap", [None, 4.0])
@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
def test_through_a_head(impl: str, softcap: float | None) -> None:
    """Gradients of hidden states, weight and bias, with a scale and a soft cap, over several chunks."""
    given = replace(problem(3), scale=0.7, softcap=softcap)
    label = given.labels[given.labels != -100]
    for objective in (everything, weighted_by_entropy, lambda entropy: entropy):
        leaves, plain = given.leaves(), given.leaves()
        statistics = dense_statistics(through_a_head(plain, given), label, cosine_matrix(given.embedding)[label])
        value = objective(**{name: statistics[name] for name in inspect.signature(objective).parameters}).mean()
        out = fused(leaves, given, objective=objective, impl=impl)
        torch.testing.assert_close(out.loss, value)
        torch.testing.assert_close(gradients(out.loss, leaves), gradients(value, plain), rtol=1e-10, atol=1e-12)


def test_a_token_loss_unpacks_into_three_and_has_what_was_asked_for() -> None:
    z, label, _ = logits(17, 1.0, torch.float64)
    label[2] = -100
    out = token_loss(z, label, objective=lambda nll, entropy: nll * entropy)
    loss, nll, cost = out
    assert loss is out.loss
    assert nll is out.nll
    assert cost is out.cost is out.transport_cost is out.logsumexp is None
    assert out.entropy is not None
    assert not out.entropy.requires_grad
    assert out.entropy[2] == 0
    assert torch.equal(pickle.loads(pickle.dumps(out)).entropy, out.entropy)
    with pytest.raises(ValueError, match=r"needs cost=, for example EmbeddingCost"):
        token_loss(z, label, objective=lambda cost, entropy: cost + entropy)


@pytest.mark.parametrize("impl", ["reference", "chunked"])
@pytest.mark.parametrize(("temperature", "softcap"), [(1.0, None), (1.7, 4.0)])
def test_log_probabilities_and_entropies(impl: str, temperature: float, softcap: float | None) -> None:
    """The temperature acts after scale and soft cap; each output alone and both together have their gradient."""
    given = replace(problem(3, batch=(4, 9)), scale=0.7, softcap=softcap)
    kept = given.labels != -100
    upstream = torch.rand(2, *given.labels.shape, dtype=torch.float64)
    for terms in (
        upstream * torch.tensor([1, 0])[:, None, None],
        upstream * torch.tensor([0, 1])[:, None, None],
        upstream,
    ):
        leaves, plain = given.leaves(), given.leaves()
        made = token_statistics(
            *leaves[:2], given.labels, bias=leaves[2], temperature=temperature, logit_scale=0.7, logit_softcap=softcap,
            impl=impl, chunk_size=7,
        )  # fmt: skip
        z = through_a_head(plain, given) / temperature
        true = dense_statistics(z, given.labels[kept], torch.zeros_like(z))
        torch.testing.assert_close((made.log_prob[kept], made.entropy[kept]), (-true["nll"], true["entropy"]))
        assert not made.log_prob[~kept].any()
        assert not made.entropy[~kept].any()
        got = (terms * torch.stack([made.log_prob, made.entropy])).sum()
        want = (terms[:, kept] * torch.stack([-true["nll"], true["entropy"]])).sum()
        torch.testing.assert_close(gradients(got, leaves), gradients(want, plain), rtol=1e-9, atol=1e-12)


def test_log_probabilities_in_half_precision_and_errors() -> None:
    hidden, weight = torch.randn(20, 8).half().requires_grad_(), torch.randn(50, 8).half()
    labels = torch.arange(20)
    made = token_statistics(hidden, weight, labels)
    assert made.log_prob.dtype == torch.float32
    wide = hidden.detach().double().requires_grad_()
    true = dense_statistics(wide @ weight.double().T, labels, torch.zeros(20, 50))
    (got,) = gradients((made.log_prob + made.entropy).sum(), [hidden])
    torch.testing.assert_close(
        got.double(), *gradients((true["entropy"] - true["nll"]).sum(), [wide]), rtol=5e-3, atol=5e-3
    )
    with pytest.raises(ValueError, match="temperature is 0, expected a finite number above 0"):
        token_statistics(hidden, weight, labels, temperature=0)
    with pytest.raises(TypeError, match="temperature is a Tensor"):  # it would get no gradient
        token_statistics(hidden, weight, labels, temperature=torch.tensor(1.0, requires_grad=True))  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match="no second derivative"):
        torch.autograd.grad(token_statistics(hidden, weight, labels).entropy.sum(), hidden, create_graph=True)
