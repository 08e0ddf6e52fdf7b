"""Token losses under autograd: second order, retained graphs, no_grad, checkpointing, memory, autocast, other costs."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from otloss.costs import DenseCost
from otloss_llm import EMO, MLE, EmbeddingCost, emo_loss, token_loss
from tests.otloss_llm.oracles import OBJECTIVES, Problem, problem
from tests.otloss_llm.scoring import IMPLEMENTATIONS, Observed, assert_all_close, fused, gradients


@pytest.mark.parametrize(("impl", "reduction"), [("reference", "mean"), ("chunked", "mean"), ("chunked", "none")])
def test_gradcheck(reduction: str, impl: str) -> None:
    # Objectives without stop-gradient: their value is a function whose finite differences are its gradient.
    for objective in (MLE(), EMO(0.7), OBJECTIVES["user"][0]):
        given = problem(11, batch=(5,), vocab=6, width=3)
        given.softcap = 4.0

        def loss(*leaves: Tensor, given: Problem = given, objective: Any = objective) -> Tensor:
            return fused(list(leaves), given, objective=objective, reduction=reduction, impl=impl, chunk_size=2).loss

        assert torch.autograd.gradcheck(loss, given.leaves())
        if impl == "reference":
            assert torch.autograd.gradgradcheck(loss, given.leaves())


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_a_second_derivative_through_the_chunked_kernel_raises(reduction: str) -> None:
    given = problem(12)
    leaves = given.leaves()
    loss = fused(leaves, given, objective=EMO(), reduction=reduction).loss.sum()
    with pytest.raises(RuntimeError, match=r'no second derivative.*impl="reference"'):
        torch.autograd.grad(loss, leaves, create_graph=True)


def test_backward_again_over_a_retained_graph() -> None:
    """The first backward pass multiplies the saved gradients of a mean in place; later ones compute them again."""
    given = problem(13)
    for reduction in ("mean", "none"):
        want = gradients(fused(plain := given.leaves(), given, objective=EMO(), reduction=reduction).loss.sum(), plain)
        leaves = given.leaves()
        loss = fused(leaves, given, objective=EMO(), reduction=reduction).loss.sum()
        for upstream in (3.0, 1.0, -0.5):
            got = torch.autograd.grad(loss, leaves, torch.tensor(upstream, dtype=loss.dtype), retain_graph=True)
            assert_all_close(list(got), [upstream * g for g in want], 1e-14)
        apart = [torch.autograd.grad(loss, leaf, retain_graph=True)[0] for leaf in leaves]
        assert_all_close(apart, want, 1e-14)
        loss.backward(retain_graph=True)
        loss.backward()
        assert_all_close([leaf.grad for leaf in leaves if leaf.grad is not None], [2 * g for g in want], 1e-14)


def products(call: Callable[[], Any]) -> int:
    """How many operations the matrix products of a call have."""
    with FlopCounterMode(display=False) as counter:
        call()
    return counter.get_total_flops()


def test_without_grad_no_gradient_is_made() -> None:
    given = problem(14)
    cost = EmbeddingCost(given.embedding)
    frozen = [leaf.detach() for leaf in given.leaves()]
    for reduction in ("mean", "none"):

        def call(leaves: list[Any], reduction: str = reduction) -> Tensor:
            return fused(leaves, given, objective=EMO(), cost=cost, reduction=reduction).loss

        least = products(lambda call=call: call(frozen))
        for off in (torch.no_grad, torch.inference_mode):
            with off():
                assert products(lambda call=call: call(given.leaves())) == least
                assert not call(given.leaves()).requires_grad
        assert not call(frozen).requires_grad
        # With gradients there are those of hidden states and of the head beside the logits.
        assert products(lambda call=call: call(given.leaves()).sum().backward()) > 2 * least


@pytest.mark.parametrize(("reentrant", "reduction"), [(False, "mean"), (True, "none")])
def test_activation_checkpointing_makes_gradients_once(reduction: str, reentrant: bool) -> None:
    from torch.utils.checkpoint import checkpoint

    given = problem(21)
    cost = EmbeddingCost(given.embedding)

    def loss(*leaves: Tensor) -> Tensor:
        return fused([torch.tanh(leaves[0]), *leaves[1:]], given, objective=EMO(), cost=cost, reduction=reduction).loss

    plain, leaves = given.leaves(), given.leaves()
    made: list[Tensor] = []
    expected = loss(*plain).sum()
    want = gradients(expected, plain)
    step = products(lambda: loss(*given.leaves()).sum().backward())
    forward = products(lambda: made.append(checkpoint(loss, *leaves, use_reentrant=reentrant).sum()))
    got = made[0]
    # Old versions of torch cannot be asked for hooks; the forward pass then computes gradients that are made again.
    is_seen = reentrant or hasattr(torch._C._autograd, "_top_saved_tensors_default_hooks")
    with torch.no_grad():
        least = products(lambda: loss(*leaves))
    assert forward == least or not is_seen
    torch.testing.assert_close(got, expected)
    backward = products(got.backward)
    assert_all_close([leaf.grad for leaf in leaves if leaf.grad is not None], want, 1e-14)
    assert backward <= least + step or not is_seen, "the logits again, and one set of gradients"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_full_logits_never_exist(dtype: torch.dtype) -> None:
    """No tensor of the chunked forward and backward pass is as large as N x V."""
    given = problem(15, batch=(256,), vocab=64, width=4, ignored=0.0, dtype=dtype)
    for reduction in ("mean", "none"):
        with Observed() as seen:
            leaves = given.leaves()
            fused(leaves, given, objective=EMO(), reduction=reduction, chunk_size=16).loss.sum().backward()
        assert seen.largest <= 16 * 64


def test_a_cost_of_another_dtype_than_the_logits() -> None:
    given = problem(22)
    narrow = EmbeddingCost(given.embedding.float())
    for impl in IMPLEMENTATIONS:
        leaves, again = given.leaves(), given.leaves()
        got = fused(leaves, given, objective=EMO(), cost=narrow, impl=impl).loss
        want = fused(again, given, objective=EMO(), impl=impl).loss
        torch.testing.assert_close(got, want, rtol=1e-6, atol=0)
        assert_all_close(gradients(got, leaves), gradients(want, again), 1e-6)


def test_cost_rows_are_made_once_for_each_label() -> None:
    class Counting(DenseCost):
        asked: list[int]

        def rows(self, index: Tensor) -> Tensor:
            self.asked += index.tolist()
            return super().rows(index)

    given = problem(16, batch=(200,))
    cost = Counting(torch.rand(41, 41, dtype=torch.float64))
    cost.asked = []
    fused(given.leaves(), given, objective=EMO(), cost=cost, chunk_size=200)
    assert sorted(cost.asked) == given.labels[given.labels >= 0].unique().tolist()


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
def test_autocast_equals_casting_by_hand(impl: str) -> None:
    given = problem(17, dtype=torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        leaves = given.leaves()
        loss = fused(leaves, given, objective=EMO(), impl=impl).loss
    assert loss.dtype == torch.float32
    by_hand = given.leaves()
    expected = fused([leaf.bfloat16() for leaf in by_hand], given, objective=EMO(), impl=impl).loss
    assert torch.equal(loss, expected)
    assert_all_close(gradients(loss, leaves), gradients(expected, by_hand), 0.0)
    full = fused(given.leaves(), given, objective=EMO(), impl=impl).loss
    assert not torch.equal(loss, full)  # autocast did something


def test_a_learned_cost_needs_the_reference() -> None:
    matrix = torch.rand(41, 41, dtype=torch.float64, requires_grad=True)
    given = problem(19)
    loss = fused(given.leaves(), given, objective=EMO(), cost=DenseCost(matrix), impl="reference").loss
    assert gradients(loss, [matrix])[0].any()
    with pytest.raises(ValueError, match=r'cost requires grad.*impl="reference"'):
        fused(given.leaves(), given, objective=EMO(), cost=DenseCost(matrix))
    with torch.no_grad():
        fused(given.leaves(), given, objective=EMO(), cost=DenseCost(matrix))


def test_the_drop_in() -> None:
    given = problem(20, batch=(3, 7))
    logits = torch.nn.functional.linear(*given.leaves()).detach().requires_grad_()
    live = given.embedding.clone().requires_grad_()
    for options in ({}, {"weighting": "transport"}, {"ratio_clip": None}, {"weighting": 0.3}):
        objective = EMO(**options)
        for directions in (None, 0, 3):
            cost = EmbeddingCost(given.embedding, directions=directions)
            expected = token_loss(logits, given.labels, objective=objective, cost=cost).loss
            assert torch.equal(emo_loss(logits, given.labels, live, directions=directions, **options), expected)
            assert torch.equal(emo_loss(logits, given.labels, cost, **options), expected)
    assert torch.equal(emo_loss(logits, given.labels, live), emo_loss(logits, given.labels, live, directions=None))
    emo_loss(logits, given.labels, live).backward()
    assert live.grad is None
    assert logits.grad is not None
    none = emo_loss(logits, given.labels.where(given.labels >= 0, 5), live, reduction="none", ignore_index=5)
    assert none.shape == (3, 7)
