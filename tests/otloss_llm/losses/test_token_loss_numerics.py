"""Numerical edges of token losses: certain predictions, duplicates, zero rows, 16 bits, masks; invalid arguments."""

from functools import partial
from typing import Any

import pytest
import torch

from otloss.costs import CosineCost, DenseCost
from otloss_llm import EMO, MLE, EmbeddingCost, emo_loss, linear_token_loss, token_loss
from tests.errors import raising
from tests.otloss_llm.oracles import OBJECTIVES, cosine_matrix, problem, relative_error, truth
from tests.otloss_llm.scoring import IMPLEMENTATIONS, from_logits

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
    settings: dict[str, Any] = {
        "objective": EMO(ratio_clip=None), "cost": EmbeddingCost(embedding), "reduction": "none",
    }  # fmt: skip
    given = logits.clone().requires_grad_()
    out = from_logits(given, labels, impl, **settings)
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
    hidden, weight = torch.zeros(1, 2), torch.zeros(12, 2)
    out = linear_token_loss(hidden, weight, torch.tensor([1]), bias=bias, objective=EMO(), cost=cost, impl=impl)
    assert out.cost == 0
    torch.testing.assert_close(out.loss, 0.5 * out.nll[0])  # Eq. 19 with ratio 0
    (gradient,) = torch.autograd.grad(out.loss, bias)
    expected = 0.5 * (torch.softmax(logits[0], -1) - torch.eye(12)[1])
    torch.testing.assert_close(gradient, expected)


def test_near_duplicates_keep_their_cost() -> None:
    """Snapping rounding errors to 0 leaves angles of 1 / 200 radian alone."""
    embedding = torch.tensor([[1.0, 0.0], [1.0, 0.005]])
    got = EmbeddingCost(embedding).rows(torch.tensor([0]))[0, 1].double()
    torch.testing.assert_close(got, cosine_matrix(embedding)[0, 1], rtol=0.01, atol=0)


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
    z = logits.double()
    nll = -torch.log_softmax(z, -1).gather(-1, labels[:, None])[:, 0]
    embedding = torch.randn(20, 8, generator=generator)
    for clip in (None, 3.0):
        objective = EMO(ratio_clip=clip)
        settings: dict[str, Any] = {"objective": objective, "cost": EmbeddingCost(embedding), "reduction": "none"}
        given = logits.clone().requires_grad_()
        out = from_logits(given, labels, impl, **settings)
        torch.testing.assert_close(out.nll.double(), nll, rtol=1e-6, atol=1e-9)
        if clip is None:
            torch.testing.assert_close(out.loss.double(), nll, rtol=1e-6, atol=1e-9)
        else:
            assert (out.loss.double() <= nll * (1 + 1e-6)).all()
        out.loss.sum().backward()
        assert given.grad is not None
        assert torch.isfinite(given.grad).all()


@pytest.mark.parametrize("deviation", [10.0, 100.0, 1000.0])
def test_the_default_has_bounded_gradients(deviation: float) -> None:
    """The largest gradient in the logits grows with the ratio nll / D; the default clips it at 3."""
    generator = torch.Generator().manual_seed(0)
    logits = deviation * torch.randn(200, 50, generator=generator, dtype=torch.float64)
    labels, cost = torch.arange(200) % 50, EmbeddingCost(torch.randn(50, 8, generator=generator, dtype=torch.float64))
    largest = {}
    for name, objective in {"mle": MLE(), "emo": EMO(), "published": EMO(ratio_clip=None)}.items():
        leaf = logits.clone().requires_grad_()
        token_loss(leaf, labels, objective=objective, cost=cost, reduction="sum").loss.backward()
        assert leaf.grad is not None
        largest[name] = float(leaf.grad.abs().max())
    assert largest["emo"] <= 1.5 * largest["mle"]
    if deviation > 10:
        assert largest["published"] > 5 * largest["mle"]


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


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
def test_everything_masked_but_the_label(impl: str) -> None:
    hidden, weight = torch.randn(2, 3).requires_grad_(), torch.randn(5, 3).requires_grad_()
    bias = torch.tensor([-INF, -INF, 0.0, -INF, -INF])
    out = linear_token_loss(hidden, weight, torch.tensor([2, 2]), bias=bias, objective=EMO(),
                            cost=EmbeddingCost(torch.randn(5, 4)), impl=impl)  # fmt: skip
    assert out.loss == 0
    assert not any(grad.any() for grad in torch.autograd.grad(out.loss, [hidden, weight]))


@pytest.mark.parametrize("impl", [*IMPLEMENTATIONS, "logits"])
def test_a_masked_label_is_an_error_that_names_it(impl: str) -> None:
    labels = torch.tensor([2, 1])
    settings: dict[str, Any] = {"objective": EMO(), "cost": EmbeddingCost(torch.eye(3))}
    bias = torch.tensor([0.0, -INF, 1.0])
    call = partial(linear_token_loss, torch.ones(2, 2), torch.zeros(3, 2), bias=bias, impl=impl)
    if impl == "logits":
        call = partial(token_loss, bias.expand(2, 3))
    with pytest.raises(ValueError, match="-log q is inf for label 1: its logit is -inf"):
        call(labels=labels, **settings)


@pytest.mark.parametrize(("impl", "bad"), [("reference", INF), ("chunked", float("nan")), ("logits", INF)])
def test_inputs_that_are_not_finite_are_named(bad: float, impl: str) -> None:
    labels = torch.tensor([1, 0, -100])
    for name in ("logits",) if impl == "logits" else ("hidden", "weight", "bias"):
        tensors = {"logits": torch.ones(3, 4)} if impl == "logits" else {
            "hidden": torch.ones(3, 2), "weight": torch.ones(4, 2), "bias": torch.ones(4)
        }  # fmt: skip
        tensors[name].view(-1)[1 if name == "bias" else tensors[name].shape[1]] = bad
        settings: dict[str, Any] = tensors | ({} if impl == "logits" else {"impl": impl})
        with pytest.raises(ValueError, match=rf"{name} holds 1 NaN or infinite values, the first at index \(1"):
            (token_loss if impl == "logits" else linear_token_loss)(labels=labels, objective=MLE(), **settings)


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_an_objective_with_an_infinite_gradient_is_an_error(reduction: str) -> None:
    """sqrt(D) at D = 0: the value is finite, the gradient is not."""
    logits = torch.tensor([[0.0, -200.0, -200.0]], requires_grad=True)
    settings: dict[str, Any] = {"objective": lambda nll, d: nll + d.sqrt(), "reduction": reduction}
    with pytest.raises(ValueError, match="not finite"):
        from_logits(logits, torch.tensor([0]), "chunked", cost=EmbeddingCost(torch.eye(3)), **settings).loss.backward()


# ---- the cost stays fixed --------------------------------------------------------------------------------------------


def test_a_cosine_cost_of_a_live_head_is_not_silently_trained() -> None:
    weight = torch.randn(11, 6, requires_grad=True)
    with pytest.raises(ValueError, match=r"cost requires grad.*EmbeddingCost does"):
        linear_token_loss(torch.randn(2, 6), weight, torch.tensor([1, 2]), objective=EMO(), cost=CosineCost(weight))


# ---- invalid arguments ----------------------------------------------------------------------------------------------


def call(**changes: Any) -> Any:
    generator = torch.Generator().manual_seed(0)  # chance makes the mean of a part that of the whole
    hidden, weight = (torch.randn(shape, generator=generator) for shape in ((2, 3, 4), (7, 4)))
    arguments: dict[str, Any] = {
        "hidden": hidden, "weight": weight, "labels": torch.zeros(2, 3, dtype=torch.long),
        "objective": EMO(), "cost": EmbeddingCost(torch.eye(7)),
    } | changes  # fmt: skip
    return linear_token_loss(arguments.pop("hidden"), arguments.pop("weight"), arguments.pop("labels"), **arguments)


test_invalid_arguments_raise = raising(
        ({"labels": torch.zeros(3, dtype=torch.long)}, ValueError, r"labels have shape \(3,\), expected \(2, 3\)"),
        ({"labels": torch.zeros(2, 3)}, TypeError, "labels have dtype torch.float32"),
        ({"labels": torch.full((2, 3), 7)}, ValueError, r"6 ids outside the vocabulary, the first at \(0, 0\): 7"),
        ({"labels": torch.full((2, 3), -1)}, ValueError, "ignore_index=-100"),
        ({"weight": torch.randn(7, 5)}, ValueError, r"expected \(..., d\) and \(V, d\)"),
        ({"weight": torch.randn(7, 4).double()}, TypeError, "hidden is torch.float32, weight torch.float64"),
        ({"bias": torch.randn(4)}, ValueError, r"bias has shape \(4,\), expected \(7,\)"),
        ({"cost": None}, ValueError, r"EMO\(.*needs cost="),
        ({"cost": EmbeddingCost(torch.eye(8))}, ValueError, "a vocabulary of 8 tokens, the logits have 7"),
        ({"cost": torch.eye(7)}, TypeError, "cost is a Tensor"),
        ({"objective": "emo"}, TypeError, "objective is 'emo'"),
        ({"objective": EMO}, TypeError, r"the class EMO, expected an instance; write EMO\(\)"),
        ({"reduction": "avg"}, ValueError, "reduction is 'avg'"),
        ({"num_items": 3, "reduction": "sum"}, ValueError, 'num_items=3 needs reduction="mean"'),
        ({"num_items": torch.tensor([1, 2])}, ValueError, "expected one positive count"),
        ({"logit_softcap": float("inf")}, ValueError, "logit_softcap is inf"),
        ({"impl": "cuda"}, ValueError, "impl is 'cuda'"),
        ({"chunk_size": 0}, ValueError, "chunk_size is 0"),
        ({"logit_scale": torch.ones((), requires_grad=True)}, ValueError, r"requires grad.* hidden \* scale"),
        ({"cost": DenseCost(torch.eye(7)).to("meta")}, ValueError, "the cost is on meta, the logits on cpu"),
        ({"logit_scale": float("nan")}, ValueError, "logit_scale is nan"),
        ({"objective": lambda n, d: n * n.mean()}, ValueError, "another value beside other tokens"),
        ({"weight": torch.empty(7, 4, device="meta")}, ValueError, "weight is on the meta device"),
    call=lambda changes: call(**changes),
)  # fmt: skip


def test_invalid_arguments_from_logits_raise() -> None:
    labels = torch.tensor([0])
    with pytest.raises(TypeError, match=r"logits has dtype torch\.int64"):
        token_loss(torch.ones(1, 3, dtype=torch.long), labels, objective=MLE())
    with pytest.raises(ValueError, match=r"needs cost="):
        token_loss(torch.ones(1, 3), labels, objective=EMO())
    with pytest.raises(ValueError, match="vocabulary of 4"):
        emo_loss(torch.ones(1, 3), labels, torch.eye(4))
