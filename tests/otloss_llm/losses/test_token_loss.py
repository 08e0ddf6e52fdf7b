"""Token losses against float64 autograd of the formulas: values and gradients, for every objective, dtype and shape."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from otloss_llm import EmbeddingCost, token_loss
from tests.otloss_llm.oracles import OBJECTIVES, Problem, dense_values, problem, relative_error, truth
from tests.otloss_llm.scoring import IMPLEMENTATIONS, assert_all_close, fused, gradients

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


# ---- rounding --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
def test_errors_are_those_of_the_naive_computation(dtype: torch.dtype, impl: str) -> None:
    """Mean over 3 seeds of the relative errors of loss, hidden, weight and bias: at most 1.5 x naive + eps.

    Naive: logits by one linear map in the same dtype, then float32 autograd of the formula. In float64 it is the
    oracle itself, and the bound is 16 eps.
    """
    eps = torch.finfo(dtype).eps
    for name, (objective, formula) in OBJECTIVES.items():
        ours, naive = [], []
        for seed in range(3):
            given = problem(seed, dtype=dtype)
            value, expected = truth(given, formula)
            mine, theirs = given.leaves(), given.leaves()
            loss = fused(mine, given, objective=objective, reduction="sum", impl=impl).loss
            plain = dense_values(theirs, given, formula)[0].sum()
            for errors, made, leaves in ((ours, loss, mine), (naive, plain, theirs)):
                grads = gradients(made, leaves)
                assert [g.dtype for g in grads] == [dtype] * 3
                pairs = zip([made, *grads], [value.sum(), *expected], strict=True)
                errors.append([relative_error(a, b) for a, b in pairs])
        bound = 1.5 * torch.tensor(naive).mean(0) + (16 if dtype == torch.float64 else 1) * eps
        assert (torch.tensor(ours).mean(0) <= bound).all(), (name, torch.tensor(ours).mean(0) / eps, bound / eps)


@pytest.mark.parametrize(("dtype", "reduction"), [(torch.bfloat16, "sum"), (torch.float16, "none")])
def test_sums_over_many_chunks_are_kept_in_float32(dtype: torch.dtype, reduction: str) -> None:
    """256 chunks: added up in 8 bits, gradients of the head would stop growing."""
    given = problem(0, batch=(1024,), vocab=11, width=8, ignored=0.0, dtype=dtype)
    objective, formula = OBJECTIVES["emo"]
    _, expected = truth(given, formula)
    leaves = given.leaves()
    naive = gradients(dense_values(leaves, given, formula)[0].sum(), leaves)
    loss = fused(leaves, given, objective=objective, reduction=reduction, chunk_size=4).loss.sum()
    for mine, other, true in zip(gradients(loss, leaves), naive, expected, strict=True):
        assert relative_error(mine, true) <= 1.5 * relative_error(other, true) + torch.finfo(dtype).eps


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
@pytest.mark.parametrize(
    ("sharpness", "scale", "softcap", "reduction"),
    [(0.0, 0.25, None, "sum"), (0.1, -3.0, None, "none"), (10.0, 1.0, 2.0, "none"), (1.0, 1.7, 5.0, "sum")],
)
def test_flat_sharp_scaled_and_capped_logits(
    sharpness: float, scale: float, softcap: float | None, reduction: str, impl: str
) -> None:
    given = problem(3, sharpness=sharpness)
    given.scale, given.softcap = scale, softcap
    for objective, formula in OBJECTIVES.values():
        value, expected = truth(given, formula)
        leaves = given.leaves()
        loss = fused(leaves, given, objective=objective, reduction=reduction, impl=impl).loss.sum()
        torch.testing.assert_close(loss, value.sum(), rtol=1e-12, atol=0)
        assert_all_close(gradients(loss, leaves), expected, 1e-10)


# ---- shapes, reductions, arguments -----------------------------------------------------------------------------------


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
@pytest.mark.parametrize("reduction", ["mean", "sum", "none", "num_items"])
def test_reductions_with_an_upstream_gradient(reduction: str, impl: str) -> None:
    given = problem(1, batch=(4, 9))
    kept = given.labels != -100
    count = int(kept.sum())
    upstream = torch.randn(count, dtype=torch.float64) if reduction == "none" else -2.5
    factor = {"mean": 1 / count, "sum": 1.0, "none": 1.0, "num_items": 1 / 50}[reduction]
    settings = {"num_items": torch.tensor([50])} if reduction == "num_items" else {"reduction": reduction}
    for name in ("mle", "emo", "user"):
        objective, formula = OBJECTIVES[name]
        value, expected = truth(given, formula, upstream * factor)
        _, nll, transport = dense_values(given.leaves(), given, formula)
        leaves = given.leaves()
        out = fused(leaves, given, objective=objective, impl=impl, **settings)
        for got, want in ((out.nll, nll), (out.cost, transport)):
            assert got is not None
            assert not got.requires_grad
            torch.testing.assert_close(got, torch.zeros_like(got).masked_scatter(kept, want.detach()))
        loss = out.loss
        if reduction == "none":
            assert loss.shape == given.labels.shape
            assert not loss[~kept].any()
            torch.testing.assert_close(loss[kept], value, rtol=1e-12, atol=1e-14)
            total = (loss * torch.full(kept.shape, torch.e).double().masked_scatter(kept, upstream)).sum()
        else:
            assert loss.shape == ()
            torch.testing.assert_close(loss, value.sum() * factor, rtol=1e-12, atol=1e-14)
            total = loss * upstream
        assert_all_close(gradients(total, leaves), expected)


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
@pytest.mark.parametrize("reduction", ["sum", "none"])
def test_frozen_inputs(reduction: str, impl: str) -> None:
    objective, formula = OBJECTIVES["emo"]
    given = problem(6)
    _, expected = truth(given, formula)
    for frozen in ((0,), (1,), (1, 2), (0, 1)):
        leaves = given.leaves()
        for index in frozen:
            leaves[index].requires_grad_(False)
        fused(leaves, given, objective=objective, reduction=reduction, impl=impl).loss.sum().backward()
        for index, leaf in enumerate(leaves):
            if index in frozen:
                assert leaf.grad is None
            else:
                torch.testing.assert_close(leaf.grad, expected[index], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
def test_layouts_and_leading_axes(impl: str) -> None:
    """Non-contiguous and expanded inputs, int32 labels, any number of leading axes: the flat answer."""
    objective, formula = OBJECTIVES["emo"]
    flat = problem(7, batch=(24,))
    value, expected = truth(flat, formula)
    hidden, weight, bias = flat.leaves()
    strided = hidden.reshape(2, 3, 4, 16).permute(3, 0, 1, 2).contiguous().permute(1, 2, 3, 0)
    assert not strided.is_contiguous()
    wide = torch.stack([weight, weight], -1)[..., 0]
    given = Problem(strided, wide, bias, flat.labels.int().reshape(2, 3, 4), flat.embedding)
    out = fused([strided, wide, bias], given, objective=objective, reduction="sum", impl=impl)
    assert out.nll.shape == (2, 3, 4)
    torch.testing.assert_close(out.loss, value.sum(), rtol=1e-12, atol=0)
    assert_all_close(gradients(out.loss, [hidden, weight, bias]), expected)
    logits = torch.nn.functional.linear(strided, wide, bias)
    same = token_loss(logits, given.labels, objective=objective, cost=EmbeddingCost(flat.embedding), reduction="sum")
    assert_all_close([same.loss, *gradients(same.loss, [hidden, weight, bias])], [value.sum(), *expected])
    one = fused([hidden[0], weight, bias], Problem(hidden, weight, bias, torch.tensor(3), flat.embedding),
                objective=objective, reduction="none", impl=impl)  # fmt: skip
    assert one.loss.shape == one.nll.shape == ()


@pytest.mark.parametrize("ignore_index", [0, 7, -1])
def test_ignore_index(ignore_index: int) -> None:
    objective, formula = OBJECTIVES["emo"]
    given = problem(8, ignored=0.0)
    given.labels[::3] = 7
    kept = given.labels != ignore_index
    marked = Problem(given.hidden, given.weight, given.bias, given.labels.where(kept, -100), given.embedding)
    value, expected = truth(marked, formula)
    leaves = given.leaves()
    out = fused(leaves, given, objective=objective, reduction="sum", ignore_index=ignore_index)
    torch.testing.assert_close(out.loss, value.sum(), rtol=1e-12, atol=0)
    assert_all_close(gradients(out.loss, leaves), expected)


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
@pytest.mark.parametrize(("batch", "reduction"), [((2, 0), "none"), ((4,), "mean")])
def test_nothing_to_predict_gives_zero_with_a_graph(batch: tuple[int, ...], reduction: str, impl: str) -> None:
    given = problem(9, batch=batch, ignored=2.0)
    for objective, _ in OBJECTIVES.values():
        leaves = given.leaves()
        loss = fused(leaves, given, impl=impl, objective=objective, reduction=reduction).loss
        assert loss.requires_grad
        assert not loss.any()
        loss.sum().backward()
        assert all(leaf.grad is not None and not leaf.grad.any() for leaf in leaves)


def test_nan_at_ignored_positions_does_not_spread() -> None:
    objective, _ = OBJECTIVES["emo"]
    given = problem(10)
    clean = fused(given.leaves(), given, objective=objective).loss
    given.hidden[given.labels == -100] = torch.nan
    leaves = given.leaves()
    loss = fused(leaves, given, objective=objective).loss
    assert loss == clean
    assert all(torch.isfinite(grad).all() for grad in gradients(loss, leaves))


@given(st.data())
@settings(max_examples=40, deadline=None)
def test_both_kernels_agree_on_anything(data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(list(OBJECTIVES)))
    given_ = problem(
        data.draw(st.integers(0, 10**6)),
        batch=tuple(data.draw(st.lists(st.integers(0, 4), min_size=1, max_size=3))),
        vocab=data.draw(st.integers(2, 9)),
        width=data.draw(st.integers(2, 5)),
        sharpness=data.draw(st.sampled_from([0.0, 1.0, 5.0])),
        bias=data.draw(st.booleans()),
        ignored=data.draw(st.sampled_from([0.0, 0.5, 1.0])),
    )
    objective, formula = OBJECTIVES[name]
    value, expected = truth(given_, formula)
    for impl in IMPLEMENTATIONS:
        leaves = given_.leaves()
        chunk_size = data.draw(st.none() | st.integers(1, 5))
        reduction = data.draw(st.sampled_from(["sum", "none"]))
        out = fused(leaves, given_, objective=objective, reduction=reduction, impl=impl, chunk_size=chunk_size)
        torch.testing.assert_close(out.loss.sum(), value.sum(), rtol=1e-10, atol=1e-12)
        assert_all_close(gradients(out.loss.sum(), leaves), expected, 1e-8)
