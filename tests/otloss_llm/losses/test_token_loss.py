"""Token losses against float64 autograd of the formulas, under autograd, at numerical edges; invalid arguments."""

import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from otloss.costs import DenseCost
from otloss_llm import EMO, MLE, EmbeddingCost, emo_loss, linear_token_loss, token_loss, token_statistics
from tests.errors import raising
from tests.otloss.operations import Operations
from tests.otloss.oracles import cosine_matrix
from tests.otloss_llm.oracles import OBJECTIVES, Problem, dense_values, problem, relative_error, truth
from tests.otloss_llm.scoring import IMPLEMENTATIONS, assert_all_close, from_logits, fused, gradients

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


# ---- shapes, reductions, arguments -----------------------------------------------------------------------------------


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
@pytest.mark.parametrize("weighted", [False, True])
def test_reductions_and_weights_with_an_upstream_gradient(weighted: bool, impl: str) -> None:
    """A mean divides by the sum of the weights or by `num_items`; nll and D are not weighted."""
    given = problem(1, batch=(4, 9))
    kept = given.labels != -100
    share, settings = torch.ones(int(kept.sum()), dtype=torch.float64), {}
    if weighted:
        share = torch.linspace(0, 2, len(share), dtype=torch.float64)
        whole = torch.full(kept.shape, torch.nan, dtype=torch.float64).masked_scatter(kept, share)
        settings = {"token_weight": whole.requires_grad_()}
    cases: list[tuple[dict[str, Any], Any]] = [
        ({"reduction": "mean"}, 1 / share.sum()), ({"reduction": "sum"}, 1.0), ({"reduction": "none"}, 1.0),
        ({"num_items": torch.tensor([50])}, 1 / 50), ({"num_items": np.array(50)}, 1 / 50),
    ]  # fmt: skip
    for name, (reduction, factor) in itertools.product(("mle", "emo", "user"), cases):
        objective, formula = OBJECTIVES[name]
        of_each = torch.linspace(-2, 3, len(share), dtype=torch.float64)
        upstream = of_each if reduction == {"reduction": "none"} else torch.full_like(of_each, -2.5)
        value, expected = truth(given, formula, upstream * share * factor)
        _, nll, transport = dense_values(given.leaves(), given, formula)
        leaves = given.leaves()
        out = fused(leaves, given, objective=objective, impl=impl, **settings, **reduction)
        for got, want in ((out.nll, nll), (out.cost, transport)):
            assert got is not None
            assert not got.requires_grad
            torch.testing.assert_close(got, torch.zeros_like(got).masked_scatter(kept, want.detach()))
        everywhere = torch.full(kept.shape, torch.e, dtype=torch.float64).masked_scatter(kept, upstream)
        total = (out.loss * (everywhere if out.loss.dim() else upstream[0])).sum()
        torch.testing.assert_close(total, (value * upstream * share * factor).sum(), rtol=1e-12, atol=1e-14)
        assert_all_close(gradients(total, leaves), expected)


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
def test_layouts_and_leading_axes(impl: str) -> None:
    """Non-contiguous and expanded inputs, int32 labels, any number of leading axes: the flat answer."""
    objective, formula = OBJECTIVES["emo"]
    flat = problem(7, batch=(24,))
    value, expected = truth(flat, formula)
    hidden, weight, bias = flat.leaves()
    strided = hidden.reshape(2, 3, 4, 16).permute(3, 0, 1, 2).contiguous().permute(1, 2, 3, 0)
    given = replace(flat, labels=flat.labels.int().reshape(2, 3, 4))
    settings: dict[str, Any] = {"objective": objective, "impl": impl}
    out = fused([strided, torch.stack([weight, weight], -1)[..., 0], bias], given, reduction="sum", **settings)
    assert out.nll.shape == (2, 3, 4)
    assert_all_close([out.loss, *gradients(out.loss, [hidden, weight, bias])], [value.sum(), *expected])
    one = fused([hidden[0], weight, bias], replace(flat, labels=torch.tensor(3)), reduction="none", **settings)
    assert one.loss.shape == one.nll.shape == ()


@given(st.data())
def test_all_implementations_agree_on_anything(data: st.DataObject) -> None:
    """Nothing at ignored positions is read; where all are ignored, loss and gradients are 0."""
    name = data.draw(st.sampled_from(list(OBJECTIVES)))
    given_ = problem(
        data.draw(st.integers(0, 10**6)),
        batch=tuple(data.draw(st.lists(st.integers(0, 4), min_size=1, max_size=3))),
        vocab=data.draw(st.integers(2, 9)),
        width=data.draw(st.integers(2, 5)),
        sharpness=data.draw(st.sampled_from([0.0, 0.1, 1.0, 10.0])),
        bias=data.draw(st.booleans()),
        ignored=data.draw(st.sampled_from([0.0, 0.5, 1.0])),
    )
    transforms = [(1.0, None), (0.25, None), (-3.0, None), (1.0, 2.0), (1.7, 5.0)]
    given_.scale, given_.softcap = data.draw(st.sampled_from(transforms))
    objective, formula = OBJECTIVES[name]
    ignored = data.draw(st.sampled_from([-100, -1, 1]))
    nothing = (given_.labels == ignored) | (given_.labels == -100)
    given_.labels = given_.labels.masked_fill(nothing, -100)
    value, expected = truth(given_, formula)
    hidden = given_.hidden.masked_fill(nothing[..., None], torch.nan)
    for impl in IMPLEMENTATIONS:
        asked = replace(given_, hidden=hidden, labels=given_.labels.masked_fill(nothing, ignored))
        if impl == "logits":
            asked.hidden = given_.hidden  # NaN times 0 would be in the gradient of the head, outside the loss
        leaves = asked.leaves()
        trained = [data.draw(st.booleans()) for _ in leaves]
        for leaf, is_trained in zip(leaves, trained, strict=True):
            leaf.requires_grad_(is_trained)
        reduction = data.draw(st.sampled_from(["sum", "none", "mean"]))
        factor = 1 / max(len(value), 1) if reduction == "mean" else 1.0
        out = fused(
            leaves, asked, objective=objective, reduction=reduction, impl=impl, ignore_index=ignored,
            chunk_size=data.draw(st.none() | st.integers(1, 5)),
        )  # fmt: skip
        torch.testing.assert_close(out.loss.sum(), value.sum() * factor, rtol=1e-10, atol=1e-12)
        assert out.loss.requires_grad == any(trained)
        if any(trained):
            out.loss.sum().backward()
        for leaf, want, is_trained in zip(leaves, expected, trained, strict=True):
            torch.testing.assert_close(leaf.grad, want * factor if is_trained else None, rtol=1e-8, atol=1e-8)


def test_second_derivatives_are_those_of_the_reference_alone() -> None:
    given = problem(11, batch=(5,), vocab=6, width=3)
    given.softcap = 4.0

    def loss(*leaves: Tensor) -> Tensor:
        return fused(list(leaves), given, objective=OBJECTIVES["user"][0], impl="reference").loss

    assert torch.autograd.gradgradcheck(loss, given.leaves())
    for reduction in ("mean", "none"):
        leaves = given.leaves()
        chunked = fused(leaves, given, objective=EMO(), reduction=reduction).loss.sum()
        with pytest.raises(RuntimeError, match=r'no second derivative.*impl="reference"'):
            torch.autograd.grad(chunked, leaves, create_graph=True)


def test_transforms_of_torch_func_are_those_of_the_reference_alone() -> None:
    given = problem(12, batch=(5,), vocab=6, width=3)
    leaves = [leaf.detach() for leaf in given.leaves()]

    def loss(hidden: Tensor, impl: str) -> Tensor:
        return fused([hidden, *leaves[1:]], given, objective=EMO(), impl=impl).loss

    def log_prob(hidden: Tensor, impl: str) -> Tensor:
        return token_statistics(hidden, leaves[1], given.labels, impl=impl).log_prob.sum()

    for function in (loss, log_prob):
        assert torch.func.grad(function)(leaves[0], "reference").isfinite().all()
        with pytest.raises(NotImplementedError, match=r'transforms of torch.func.*impl="reference"'):
            torch.func.grad(function)(leaves[0], "chunked")


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


@pytest.mark.parametrize(("reentrant", "reduction"), [(False, "mean"), (True, "none")])
def test_gradients_are_made_once_under_checkpointing(reduction: str, reentrant: bool) -> None:
    """Counted in operations of matrix products: the forward pass costs what it costs without gradients."""
    given = problem(21)
    cost, (plain, leaves) = EmbeddingCost(given.embedding), (given.leaves(), given.leaves())

    def loss(*leaves: Tensor) -> Tensor:
        return fused([torch.tanh(leaves[0]), *leaves[1:]], given, objective=EMO(), cost=cost, reduction=reduction).loss

    with FlopCounterMode(display=False) as least, torch.no_grad():
        loss(*leaves)
    want = gradients(loss(*plain).sum(), plain)
    with FlopCounterMode(display=False) as forward:
        made = checkpoint(loss, *leaves, use_reentrant=reentrant).sum()
    made.backward()
    assert_all_close([leaf.grad for leaf in leaves if leaf.grad is not None], want, 1e-14)
    # Old versions of torch cannot be asked for hooks; the forward pass then computes gradients that are made again.
    if reentrant or hasattr(torch._C._autograd, "_top_saved_tensors_default_hooks"):
        assert forward.get_total_flops() == least.get_total_flops()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_full_logits_never_exist(dtype: torch.dtype) -> None:
    """No tensor of the chunked forward and backward pass is as large as N x V."""
    given = problem(15, batch=(256,), vocab=64, width=4, ignored=0.0, dtype=dtype)
    for reduction in ("mean", "none"):
        with Operations() as ran:
            leaves = given.leaves()
            fused(leaves, given, objective=EMO(), reduction=reduction, chunk_size=16).loss.sum().backward()
        assert ran.largest <= 16 * 64


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


def test_costs_of_another_dtype_and_learned_ones() -> None:
    given = problem(22)
    for impl in IMPLEMENTATIONS:
        leaves, again = given.leaves(), given.leaves()
        got = fused(leaves, given, objective=EMO(), cost=EmbeddingCost(given.embedding.float()), impl=impl).loss
        want = fused(again, given, objective=EMO(), impl=impl).loss
        assert_all_close([got, *gradients(got, leaves)], [want, *gradients(want, again)], 1e-6)
    learned = torch.rand(41, 41, dtype=torch.float64, requires_grad=True)
    loss = fused(given.leaves(), given, objective=EMO(), cost=DenseCost(learned), impl="reference").loss
    assert gradients(loss, [learned])[0].any()
    with pytest.raises(ValueError, match=r'cost requires grad.*impl="reference"'):
        fused(given.leaves(), given, objective=EMO(), cost=DenseCost(learned))


def test_the_drop_in() -> None:
    given = problem(20, batch=(3, 7))
    logits = torch.nn.functional.linear(*given.leaves()).detach().requires_grad_()
    live = given.embedding.clone().requires_grad_()
    cases: list[dict[str, Any]] = [{"weighting": "transport"}, {"ratio_clip": None}, {"directions": 0}, {}]
    for options in cases:
        objective = EMO(**{key: value for key, value in options.items() if key != "directions"})
        cost = EmbeddingCost(given.embedding, directions=options.get("directions"))
        expected = token_loss(logits, given.labels, objective=objective, cost=cost).loss
        assert torch.equal(emo_loss(logits, given.labels, live, **options), expected)
    assert torch.equal(emo_loss(logits, given.labels, cost), expected)
    emo_loss(logits, given.labels, live).backward()
    assert live.grad is None
    none = emo_loss(logits, given.labels.where(given.labels >= 0, 5), live, reduction="none", ignore_index=5)
    assert none.shape == (3, 7)


INF = float("inf")


@pytest.mark.parametrize(
    ("impl", "dtype"),
    [
        ("chunked", torch.float32), ("chunked", torch.bfloat16), ("chunked", torch.float16),
        ("reference", torch.float32), ("logits", torch.bfloat16),
    ],
)  # fmt: skip
def test_certain_predictions_keep_their_digits(dtype: torch.dtype, impl: str) -> None:
    """q_y = 1 - 1e-2 ... 1 - 1e-35: nll, D and nll / D to 64 float32 roundings, though 1 - q_y is 0 in float32.

    64: the differences of logits of size 80 are rounded before they are exponentiated.
    """
    generator = torch.Generator().manual_seed(0)
    lead = torch.tensor([5.0, 10.0, 20.0, 40.0, 60.0, 80.0])
    logits = torch.randn(len(lead), 30, generator=generator)
    labels = torch.arange(len(lead)) * 4
    logits[torch.arange(len(lead)), labels] = lead
    logits, embedding = logits.to(dtype), torch.randn(30, 8, generator=generator).to(dtype)
    z = logits.double()
    others = z.scatter(-1, labels[:, None], -INF).logsumexp(-1) - z.gather(-1, labels[:, None])[:, 0]
    nll = others.exp().log1p()
    transport = (torch.softmax(z, -1) * cosine_matrix(embedding)[labels]).sum(-1)
    given = logits.clone().requires_grad_()
    objective, cost = EMO(ratio_clip=None), EmbeddingCost(embedding)
    out = from_logits(given, labels, impl, objective=objective, cost=cost, reduction="none")
    tolerance = 64 * torch.finfo(torch.float32).eps
    torch.testing.assert_close(out.nll.double(), nll, rtol=tolerance, atol=0)
    torch.testing.assert_close(out.cost.double(), transport, rtol=tolerance, atol=0)
    torch.testing.assert_close((out.nll / out.cost).double(), nll / transport, rtol=2 * tolerance, atol=0)
    # The gradient, alpha = 1/2 and beta = nll / 2 D, row by row: small rows count as much as large ones.
    out.loss.sum().backward()
    q, rows = torch.softmax(z, -1), cosine_matrix(embedding)[labels]
    dz = q * (0.5 + 0.5 * (nll / transport)[:, None] * (rows - transport[:, None]))
    off = torch.ones_like(dz, dtype=torch.bool).scatter(-1, labels[:, None], False)
    dz[~off] = -(dz * off).sum(-1)
    assert given.grad is not None
    representable = 2 if dtype == torch.float16 else len(dz)  # beyond, the gradient underflows float16
    for mine, true in zip(given.grad[:representable], dz[:representable], strict=True):
        assert relative_error(mine, true) < max(2 * tolerance, torch.finfo(dtype).eps)


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
def test_a_prediction_certain_to_the_last_bit(impl: str) -> None:
    """q_y = 1 exactly: D = 0, ratio 0, loss 0, gradient 0 (both EMO weightings), never NaN."""
    logits = torch.tensor([[0.0, -2e4, -2e4], [3e4, -3e4, 0.0]]).requires_grad_()
    for weighting in ("ratio", "transport", 1.0):
        out = from_logits(
            logits, torch.tensor([0, 0]), impl, objective=EMO(weighting), cost=EmbeddingCost(torch.eye(3))
        )
        assert out.loss == 0
        assert not out.cost.any()
        (gradient,) = torch.autograd.grad(out.loss, logits)
        assert not gradient.any()


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
@pytest.mark.parametrize("seed", range(2))
def test_duplicate_tokens_cost_nothing_exactly(seed: int, impl: str) -> None:
    """Mass split between a label and its duplicates: D = 0 and ratio 0, not a ratio of rounding errors (about 1e7)."""
    generator = torch.Generator().manual_seed(seed)
    embedding = torch.randn(12, 50, generator=generator)
    embedding[4], embedding[7] = embedding[1], 3 * embedding[1]
    cost = EmbeddingCost(embedding, near_duplicates="keep")
    assert not cost.rows(torch.tensor([1, 4, 7]))[:, [1, 4, 7]].any()
    logits = torch.full((1, 12), -INF)
    logits[0, [1, 4, 7]] = torch.tensor([0.1, 0.5, -0.3])
    bias = logits[0].clone().requires_grad_()
    given = Problem(torch.zeros(1, 2), torch.zeros(12, 2), bias, torch.tensor([1]), torch.eye(12))
    out = fused([given.hidden, given.weight, bias], given, objective=EMO(), cost=cost, impl=impl)
    assert out.cost == 0
    torch.testing.assert_close(out.loss, 0.5 * out.nll[0])  # Eq. 19 with ratio 0
    (gradient,) = torch.autograd.grad(out.loss, bias)
    expected = 0.5 * (torch.softmax(logits[0], -1) - torch.eye(12)[1])
    torch.testing.assert_close(gradient, expected)


@pytest.mark.parametrize(
    ("dtype", "size", "impl"),
    [(torch.float16, 6e4, "chunked"), (torch.float32, 1e4, "chunked"), (torch.bfloat16, 1e4, "reference"),
     (torch.float16, 6e4, "logits")],
)  # fmt: skip
def test_enormous_logits(dtype: torch.dtype, size: float, impl: str) -> None:
    generator = torch.Generator().manual_seed(0)
    logits = ((torch.rand(6, 20, generator=generator) * 2 - 1) * size).to(dtype)
    logits[0], logits[1] = size, -size  # flat rows at both ends
    labels = torch.tensor([3, 4, int(logits[2].argmax()), int(logits[3].argmin()), 0, 19])
    nll = -torch.log_softmax(logits.double(), -1).gather(-1, labels[:, None])[:, 0]
    cost = EmbeddingCost(torch.randn(20, 8, generator=generator))
    for clip in (None, 3.0):
        leaf = logits.clone().requires_grad_()
        out = from_logits(leaf, labels, impl, objective=EMO(ratio_clip=clip), cost=cost, reduction="none")
        torch.testing.assert_close(out.nll.double(), nll, rtol=1e-6, atol=1e-9)
        assert (out.loss.double() <= nll * (1 + 1e-6) + 1e-9).all()
        assert torch.isfinite(torch.autograd.grad(out.loss.sum(), leaf)[0]).all()


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_loss_scaling_saves_float16_gradients(reduction: str) -> None:
    """Gradients of 1e-9 underflow float16; a loss scaler's factor must reach them before they are rounded."""
    objective, formula = OBJECTIVES["emo"]
    given = problem(4, dtype=torch.float16)
    factor, scale = 2.0**-24, 2.0**24
    _, expected = truth(given, formula)
    leaves = given.leaves()
    settings: dict[str, Any] = {"num_items": 1 / factor} if reduction == "mean" else {"reduction": reduction}
    out = linear_token_loss(leaves[0], leaves[1], given.labels, bias=leaves[2], objective=objective,
                            cost=EmbeddingCost(given.embedding), **settings)  # fmt: skip
    loss = out.loss if reduction == "mean" else (out.loss * factor).sum()
    for gradient, true in zip(torch.autograd.grad(loss * scale, leaves), expected, strict=True):
        assert relative_error(gradient, true) < 4 * torch.finfo(torch.float16).eps


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_an_objective_with_an_infinite_gradient_is_an_error(reduction: str) -> None:
    """sqrt(D) at D = 0: the value is finite, the gradient is not."""
    logits = torch.tensor([[0.0, -200.0, -200.0]], requires_grad=True)
    settings: dict[str, Any] = {"objective": lambda nll, d: nll + d.sqrt(), "reduction": reduction}
    with pytest.raises(ValueError, match="not finite"):
        from_logits(logits, torch.tensor([0]), "chunked", cost=EmbeddingCost(torch.eye(3)), **settings).loss.backward()


# ---- invalid arguments ----------------------------------------------------------------------------------------------


def call(**changes: Any) -> Any:
    arguments: dict[str, Any] = {
        "hidden": torch.ones(2, 3, 4), "weight": torch.ones(7, 4), "labels": torch.ones(2, 3, dtype=torch.long),
        "objective": EMO(), "cost": EmbeddingCost(torch.eye(7)),
    } | changes  # fmt: skip
    return linear_token_loss(arguments.pop("hidden"), arguments.pop("weight"), arguments.pop("labels"), **arguments)


MASKED = torch.zeros(7).index_fill(0, torch.tensor([1]), -INF)
test_invalid_arguments_raise = raising(
        ({"labels": torch.zeros(3, dtype=torch.long)}, ValueError, r"labels have shape \(3,\), expected \(2, 3\)"),
        ({"labels": torch.zeros(2, 3)}, TypeError, "labels have dtype torch.float32"),
        ({"labels": torch.full((2, 3), 7)}, ValueError, r"6 ids outside the vocabulary, the first at \(0, 0\): 7"),
        ({"labels": torch.full((2, 3), -1)}, ValueError, "ignore_index=-100"),
        ({"cost": None}, ValueError, r"EMO\(.*needs cost="),
        ({"cost": EmbeddingCost(torch.eye(8))}, ValueError, "a vocabulary of 8 tokens, the logits have 7"),
        ({"reduction": "avg"}, ValueError, "reduction is 'avg'"),
        ({"num_items": 3, "reduction": "sum"}, ValueError, 'num_items=3 needs reduction="mean"'),
        ({"num_items": torch.tensor([1, 2])}, ValueError, "expected one positive count"),
        ({"token_weight": torch.ones(3)}, ValueError, r"token_weight has shape \(3,\), expected the shape of labels"),
        ({"token_weight": torch.full((2, 3), -2.0)}, ValueError, "token_weight holds -2.0 at a labelled position"),
        ({"logit_softcap": INF}, ValueError, "logit_softcap is inf"),
        ({"logit_scale": float("nan")}, ValueError, "logit_scale is nan"),
        ({"logit_scale": torch.ones((), requires_grad=True)}, ValueError, r"requires grad.* hidden \* scale"),
        ({"impl": "cuda"}, ValueError, "impl is 'cuda'"),
        ({"chunk_size": 0}, ValueError, "chunk_size is 0"),
        ({"bias": MASKED}, ValueError, "-log q is inf for label 1: its logit is -inf"),
        ({"bias": MASKED, "impl": "reference"}, ValueError, "-log q is inf for label 1: its logit is -inf"),
        ({"bias": -MASKED}, ValueError, r"bias holds 1 NaN or infinite values, the first at index \(1"),
        ({"hidden": torch.full((2, 3, 4), torch.nan)}, ValueError, "hidden holds 24 NaN or infinite values"),
        ({"weight": torch.full((7, 4), INF), "impl": "reference"}, ValueError, "weight holds 28 NaN or infinite"),
    call=lambda changes: call(**changes),
)  # fmt: skip
test_invalid_logits_raise = raising(
    (torch.ones(1, 3, dtype=torch.long), TypeError, r"logits has dtype torch\.int64"),
    (torch.tensor([[0.0, -INF, 1.0]]), "-log q is inf for label 1: its logit is -inf"),
    (torch.tensor([[0.0, 1.0, torch.nan]]), "logits holds 1 NaN or infinite values"),
    call=lambda logits: token_loss(logits, torch.tensor([1]), objective=MLE()),
)
