"""Objectives as functions of (nll, D): values, slopes, names, edges, and the check that tokens are independent."""

from __future__ import annotations

import pickle

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from otloss_llm import EMO, MLE, MixCE, TaiLr, linear_token_loss, parse_objective
from otloss_llm.objectives import check_tokenwise, needs_cost, value_and_slopes
from tests.otloss_llm.oracles import OBJECTIVES

ALL = [MLE(), TaiLr(0.9), TaiLr(1.0, min_weight=0.1), MixCE(0.8), EMO(), EMO("transport", ratio_clip=2.0), EMO(0.5)]
numbers = st.lists(st.tuples(st.floats(1e-6, 50.0), st.floats(1e-6, 2.0)), min_size=1, max_size=8)


@pytest.mark.parametrize("name", OBJECTIVES)
@given(pairs=numbers)
@settings(max_examples=30, deadline=None)
def test_values_and_slopes_are_those_of_the_formula(name: str, pairs: list[tuple[float, float]]) -> None:
    objective, formula = OBJECTIVES[name]
    nll, cost = torch.tensor(pairs, dtype=torch.float64).T.clone()
    value, alpha, beta = value_and_slopes(objective, nll, cost)
    nll.requires_grad_(), cost.requires_grad_()
    expected = formula((-nll).exp(), nll, cost)
    slopes = torch.autograd.grad(expected.sum(), [nll, cost], allow_unused=True)
    torch.testing.assert_close(value, expected.detach(), rtol=1e-12, atol=1e-300)
    torch.testing.assert_close(alpha, slopes[0], rtol=1e-12, atol=1e-300)
    if slopes[1] is None:
        assert beta is None or not beta.any()
    else:
        torch.testing.assert_close(beta, slopes[1], rtol=1e-12, atol=1e-300)


@given(pairs=numbers)
@settings(max_examples=30, deadline=None)
def test_the_value_of_emo_is_nll(pairs: list[tuple[float, float]]) -> None:
    nll, cost = torch.tensor(pairs).T
    torch.testing.assert_close(EMO()(nll, cost), nll, rtol=3e-7, atol=0.0)


@pytest.mark.parametrize("weighting", ["ratio", "transport"])
def test_the_ratio_is_0_where_its_denominator_is_0(weighting: str) -> None:
    nll, cost = torch.tensor([0.0, 0.7, 0.0]), torch.tensor([0.0, 0.0, 0.3])
    value, alpha, beta = value_and_slopes(EMO(weighting), nll, cost)
    assert torch.isfinite(torch.stack([value, alpha, beta])).all()
    expected = [0.0, 0.35, 0.0] if weighting == "ratio" else [0.0, 0.0, 0.3]
    torch.testing.assert_close(value, torch.tensor(expected))


def test_underflow_of_the_probability_keeps_weights_finite() -> None:
    nll = torch.tensor([1e-45, 200.0, 3e4])  # exp(-200) underflows, exp(200) overflows float32
    for objective in ALL:
        value, alpha, beta = value_and_slopes(objective, nll, torch.full((3,), 0.5))
        assert torch.isfinite(value).all(), objective
        assert torch.isfinite(alpha).all(), objective
        assert beta is None or torch.isfinite(beta).all(), objective


def test_limits_of_the_weights() -> None:
    nll = torch.tensor([0.1, 2.0, 9.0])
    for mle_like in (TaiLr(0.0), TaiLr(1.0, min_weight=1.0), MixCE(1.0)):
        torch.testing.assert_close(mle_like(nll, None), nll)
    torch.testing.assert_close(TaiLr(1.0)(nll, None), (-nll).exp() * nll)
    torch.testing.assert_close(MixCE(0.0)(nll, None), (-nll).exp() * nll)


@pytest.mark.parametrize("objective", ALL, ids=repr)
def test_repr_and_pickle_give_the_same_objective(objective: object) -> None:
    assert pickle.loads(pickle.dumps(objective)) == objective
    assert eval(repr(objective)) == objective
    assert hash(objective) == hash(pickle.loads(pickle.dumps(objective)))


@pytest.mark.parametrize(
    ("text", "objective"),
    [
        ("mle", MLE()), (" MLE ", MLE()), ("tailr", TaiLr(1e-3)), ("tailr:0.7", TaiLr(0.7)), ("mixce", MixCE(0.8)),
        ("mixce:0", MixCE(0.0)), ("emo", EMO()), ("emo:ratio", EMO()), ("EMO:transport", EMO("transport")),
        ("emo:0.5", EMO(0.5)), ("emo:clip=3", EMO(ratio_clip=3.0)),
    ],
)  # fmt: skip
def test_names_of_objectives(text: str, objective: object) -> None:
    assert parse_objective(text) == objective


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("kl", "'kl'.*mle, tailr, mixce, emo"), ("", "expected one of"), ("mle:1", "no parameter"),
        ("emo:often", "'emo:often'"), ("tailr:2", r"gamma=2.0"), ("mixce:x", "'mixce:x'"), ("emo:-1", "weighting=-1.0"),
        ("emo:nan", "weighting=nan"), ("emo:inf", "weighting=inf"),
    ],
)  # fmt: skip
def test_bad_names_are_refused(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_objective(text)


def test_bad_settings_are_refused() -> None:
    for make, message in [
        (lambda: TaiLr(1.5), "gamma=1.5"), (lambda: TaiLr(float("nan")), "gamma=nan"),
        (lambda: TaiLr(0.5, min_weight=-1), "min_weight=-1"), (lambda: MixCE(-0.1), "gamma=-0.1"),
        (lambda: EMO("both"), "weighting='both'"), (lambda: EMO(ratio_clip=0.0), "ratio_clip=0.0"),
        (lambda: EMO(1.0, ratio_clip=3.0), "no ratio to clip"),
    ]:  # fmt: skip
        with pytest.raises(ValueError, match=message):
            make()


def test_emo_without_a_cost_is_refused() -> None:
    with pytest.raises(ValueError, match="needs the transport cost"):
        EMO()(torch.ones(1), None)


def test_needs_cost() -> None:
    assert [needs_cost(objective) for objective in ALL] == [False] * 4 + [True] * 3
    assert needs_cost(lambda nll, cost: nll)


def test_objectives_of_another_shape_or_without_a_graph_are_refused() -> None:
    nll, cost = torch.ones(3), torch.ones(3)
    with pytest.raises(ValueError, match=r"returned \(\), expected a value per token, \(3,\)"):
        value_and_slopes(lambda n, d: n.sum(), nll, cost)
    with pytest.raises(ValueError, match="returned float"):
        value_and_slopes(lambda n, d: 1.0, nll, cost)
    with pytest.raises(ValueError, match="neither nll nor cost"):
        value_and_slopes(lambda n, d: n.detach(), nll, cost)


def test_a_slope_that_is_not_finite_shows_in_the_value() -> None:
    value, _, _ = value_and_slopes(lambda n, d: n + d.sqrt(), torch.ones(2), torch.tensor([1.0, 0.0]))
    assert value.isnan().tolist() == [False, True]


def test_objectives_that_mix_tokens_are_caught() -> None:
    nll, cost = torch.rand(6), torch.rand(6)
    weights = torch.rand(6)
    for objective in (lambda n, d: n * n.mean(), lambda n, d: n * torch.arange(len(n), 0, -1)):
        value, _, _ = value_and_slopes(objective, nll, cost)
        with pytest.raises(ValueError, match="another value beside other tokens"):
            check_tokenwise(objective, nll, cost, value)
    # A weight per token is in the order of the batch, and the kernels pass tokens in another.
    value, _, _ = value_and_slopes(lambda n, d: n * weights, nll, cost)
    with pytest.raises((ValueError, RuntimeError), match=r"another value|must match the size"):
        check_tokenwise(lambda n, d: n * weights, nll, cost, value)
    learned = torch.nn.Parameter(torch.tensor(0.5))
    value, _, _ = value_and_slopes(lambda n, d: n + learned * d, nll, cost)
    with pytest.raises(ValueError, match="parameters that require grad"):
        check_tokenwise(lambda n, d: n + learned * d, nll, cost, value)
    for objective in ALL:
        check_tokenwise(objective, nll, cost, value_and_slopes(objective, nll, cost)[0])


@pytest.mark.parametrize("chunk_size", [1, 2, 64])
def test_batch_statistics_are_refused_whatever_the_chunks(chunk_size: int) -> None:
    """Chunks of one token, or of equal tokens, agree with themselves; the whole batch does not."""
    hidden, weight = torch.randn(12, 4), torch.randn(9, 4)
    hidden[:6] = hidden[0]
    labels = torch.tensor([1] * 6 + [2, 3, 4, 5, 6, 7])
    with pytest.raises(ValueError, match="another value beside other tokens"):
        linear_token_loss(
            hidden, weight, labels, objective=lambda nll, cost: nll * nll.detach().mean(), chunk_size=chunk_size
        )
