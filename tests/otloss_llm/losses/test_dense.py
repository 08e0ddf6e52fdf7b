"""Losses against a full target distribution: bounds against exact transport, gradients against finite differences."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from otloss import emd
from otloss.costs import DenseCost
from otloss_llm import EMO, EmbeddingCost, dense_token_loss, token_loss
from tests.errors import raising
from tests.otloss.oracles import cosine_matrix
from tests.otloss_llm.oracles import OBJECTIVES, everything, relative_error

BOUNDS = ["residual", "difference"]


def make(seed: int, batch: tuple[int, ...] = (6,), vocab: int = 7) -> tuple[Tensor, Tensor, EmbeddingCost]:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(*batch, vocab, generator=generator, dtype=torch.float64) * 2
    target = torch.softmax(torch.randn(*batch, vocab, generator=generator, dtype=torch.float64) * 2, -1)
    return logits, target, EmbeddingCost(torch.randn(vocab, 3, generator=generator, dtype=torch.float64))


@pytest.mark.parametrize("bound", BOUNDS)
def test_a_one_hot_target_gives_the_token_loss(bound: str) -> None:
    """With an asymmetric cost, too: the label chooses the rows, and D is the exact transport cost."""
    labels = torch.tensor([0, 1, 6, 3, 3, 2])
    target = torch.nn.functional.one_hot(labels, 7).double()
    logits, _, embedding_cost = make(0)
    matrix = torch.rand(7, 7, dtype=torch.float64).fill_diagonal_(0.0)
    for objective in (*(objective for objective, _ in OBJECTIVES.values()), everything):
        for cost in (embedding_cost, DenseCost(matrix)):
            results = []
            for call in (token_loss, dense_token_loss):
                leaf = logits.clone().requires_grad_()
                settings: dict[str, Any] = {"bound": bound} if call is dense_token_loss else {}
                out = call(leaf, labels if call is token_loss else target, objective=objective, cost=cost, **settings)
                assert out.cost is not None
                results.append([out.loss.detach(), out.nll, out.cost, torch.autograd.grad(out.loss, leaf)[0]])
            torch.testing.assert_close(*results, rtol=1e-10, atol=1e-13)
    torch.testing.assert_close(results[0][2], emd(target, logits.softmax(-1), matrix))


@given(seed=st.integers(0, 10**6))
@settings(max_examples=15, deadline=None)
def test_the_bounds_are_their_formulas_and_at_least_the_exact_cost(seed: int) -> None:
    logits, p, cost = make(seed)
    q, matrix = torch.softmax(logits, -1), cosine_matrix(cost.unit)
    a, b = (p - q).relu(), (q - p).relu()
    formulas = {
        "difference": torch.einsum("ti,ij,tj->t", (q - p).abs(), matrix, p),
        "residual": torch.einsum("ti,ij,tj->t", a, matrix, b) / a.sum(-1),
    }
    exact = emd(p, q, matrix)
    for bound, want in formulas.items():
        loss, nll, got = dense_token_loss(logits, p, objective=EMO(ratio_clip=None), cost=cost, bound=bound)
        torch.testing.assert_close(nll, torch.nn.functional.cross_entropy(logits, p, reduction="none"))
        torch.testing.assert_close(loss, nll.mean())  # the value of EMO without a clip, for a full target too
        torch.testing.assert_close(got, want, rtol=1e-8, atol=1e-12)
        assert (got >= exact - 1e-9).all(), bound


@pytest.mark.parametrize("bound", BOUNDS)
def test_gradients_against_finite_differences(bound: str) -> None:
    logits, target, cost = make(1, batch=(3,), vocab=5)
    matrix = DenseCost(torch.rand(5, 5, dtype=torch.float64))
    for name, cost_ in (("mle", cost), ("emo-fixed", matrix), ("user", cost)):  # without stop-gradient

        def loss(z: Tensor, objective: Any = OBJECTIVES[name][0], cost_: Any = cost_) -> Tensor:
            return dense_token_loss(z, target, objective=objective, cost=cost_, bound=bound, reduction="sum").loss

        assert torch.autograd.gradcheck(loss, [logits.clone().requires_grad_()])


def test_mask_and_reductions() -> None:
    logits, target, cost = make(3, batch=(2, 4))
    mask = torch.tensor([[True, False, True, True], [False, False, True, True]])
    logits[~mask], target[~mask] = torch.nan, torch.nan  # masked positions are not read
    settings: dict[str, Any] = {"objective": EMO(), "cost": cost}
    leaf = logits.clone().requires_grad_()
    teacher = target.clone().requires_grad_()  # gets no gradient
    none, total, mean = (
        dense_token_loss(leaf, teacher, reduction=reduction, mask=mask, **settings).loss
        for reduction in ("none", "sum", "mean")
    )
    single = torch.stack([dense_token_loss(z, p, **settings).loss
                          for z, p in zip(logits[mask], target[mask], strict=True)])  # fmt: skip
    torch.testing.assert_close(none.detach(), torch.zeros(2, 4, dtype=torch.float64).masked_scatter(mask, single))
    torch.testing.assert_close((total.detach(), mean.detach()), (single.sum(), single.mean()))
    gradient, of_teacher = torch.autograd.grad(mean, (leaf, teacher), allow_unused=True)
    assert not gradient[~mask].any()
    assert of_teacher is None
    nothing = dense_token_loss(leaf, target, mask=torch.zeros_like(mask), **settings).loss
    assert nothing == 0
    assert not torch.autograd.grad(nothing, leaf)[0].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_a_real_vocabulary_in_low_precision(dtype: torch.dtype) -> None:
    """50k tokens: targets normalised in their own dtype are valid, and D is within rounding of float64."""
    generator = torch.Generator().manual_seed(0)
    sharpness = 9 if dtype == torch.float16 else 3  # flat targets underflow
    logits = (torch.randn(2, 50_000, generator=generator) * 3).to(dtype)
    target = torch.softmax(torch.randn(2, 50_000, generator=generator) * sharpness, -1).to(dtype)
    cost = EmbeddingCost(torch.randn(50_000, 8, generator=generator).to(dtype))
    for bound in BOUNDS:
        out = dense_token_loss(logits, target, objective=EMO(), cost=cost, bound=bound)
        p = target.double() / target.double().sum(-1, keepdim=True)
        true = dense_token_loss(logits.double(), p, objective=EMO(), cost=cost.to(torch.float64), bound=bound)
        assert out.loss.dtype == torch.float32
        assert out.cost is not None
        torch.testing.assert_close(out.cost.double(), true.cost, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(out.nll.double(), true.nll, rtol=1e-5, atol=0)


LOGITS, TARGET, COST = make(5)
GOOD: dict[str, Any] = {"logits": LOGITS, "target": TARGET, "objective": EMO(), "cost": COST}
test_invalid_arguments_raise = raising(
    ({"target": TARGET * 1.01}, r"target row 0 .* sums to 1.01"),
    ({"target": TARGET - 0.3}, "expected probabilities >= 0"),
    ({"target": TARGET * torch.nan}, "target holds .* NaN"),
    ({"target": TARGET.argmax(-1)}, TypeError, "target has dtype torch.int64"),
    ({"bound": "independent"}, "bound is 'independent'"),
    ({"cost": EmbeddingCost(torch.eye(8))}, "vocabulary of 8"),
    ({"mask": torch.ones(6)}, "expected bool"),
    call=lambda changes: dense_token_loss(**GOOD | changes),
)


@pytest.mark.parametrize("bound", BOUNDS)
def test_confident_one_hot_targets_keep_float32_accuracy(bound: str) -> None:
    """Against `token_loss` in float64: 1 - q_y may not be a difference in float32."""
    generator = torch.Generator().manual_seed(7)
    embedding = torch.randn(30, 8, generator=generator)
    z = torch.randn(1, 30, generator=generator)
    target, label = torch.eye(30)[3:4], torch.tensor([3])
    for lead in (2.0, 18.0, 30.0):
        z[0, 3] = lead
        dense, exact = z.clone().requires_grad_(), z.double().requires_grad_()
        out = dense_token_loss(dense, target, objective=EMO(), cost=EmbeddingCost(embedding), bound=bound)
        want = token_loss(exact, label, objective=EMO(), cost=EmbeddingCost(embedding.double()))
        # The bound's vectors are float64: 1 - q_y, here about nll, is good to their eps.
        tolerance = 16 * torch.finfo(torch.float32).eps + torch.finfo(torch.float64).eps / float(want.nll)
        gradients = [torch.autograd.grad(result.loss, leaf)[0] for result, leaf in ((out, dense), (want, exact))]
        for got, true in ((out.cost, want.cost), (out.nll, want.nll), gradients):
            assert got is not None
            assert true is not None
            assert relative_error(got, true) < tolerance


@pytest.mark.parametrize("bound", BOUNDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_at_the_target_there_is_no_noise_for_the_ratio(bound: str, dtype: torch.dtype) -> None:
    """A student that equals its teacher up to rounding: D is 0, its ratio 0, and nll alone has a gradient."""
    z = torch.randn(4, 200, generator=torch.Generator().manual_seed(1)).requires_grad_()
    target = z.detach().softmax(-1).to(dtype)
    out = dense_token_loss(
        z, target, objective=EMO(), cost=EmbeddingCost(torch.randn(200, 8)), bound=bound, reduction="sum"
    )
    out.loss.backward()
    assert out.cost is not None
    assert (out.cost == 0).all()
    assert z.grad is not None
    assert float(z.grad.abs().max()) < 8 * torch.finfo(dtype).eps
