"""Objectives as functions of (nll, D): values, gradients, names, edges, and the check that tokens are independent."""

import functools
import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from otloss_llm import (
    EAFT,
    EMO,
    GEM,
    MLE,
    EmbeddingCost,
    ExpectedValue,
    LabelSmoothing,
    MixCE,
    NumberToken,
    Power,
    TaiLr,
    ZLoss,
    parse_objective,
    token_loss,
)
from otloss_llm.objectives import NumberDistance, Objective, Statistics, Sum, Term
from tests.errors import raising
from tests.otloss_llm.oracles import OBJECTIVES, problem
from tests.otloss_llm.scoring import IMPLEMENTATIONS, from_logits, fused

ALL = [MLE(), TaiLr(0.9), TaiLr(1.0, min_weight=0.1), MixCE(0.8), EMO(), EMO("transport", ratio_clip=2.0), EMO(0.5)]
PAIRS = st.lists(st.tuples(st.floats(1e-6, 50.0), st.floats(1e-6, 2.0)), min_size=1, max_size=8)


@given(name=st.sampled_from(list(OBJECTIVES)), pairs=PAIRS)
def test_values_and_gradients_are_those_of_the_formula(name: str, pairs: list[tuple[float, float]]) -> None:
    objective, formula = OBJECTIVES[name]
    nll, cost = torch.tensor(pairs, dtype=torch.float64).T.clone()
    value, (alpha, beta, *_) = Sum.of(objective).value_and_gradients(Statistics(nll, cost))
    nll.requires_grad_(), cost.requires_grad_()
    expected = formula((-nll).exp(), nll, cost)
    gradients = torch.autograd.grad(expected.sum(), [nll, cost], allow_unused=True)
    for got, want in ((value, expected.detach()), (alpha, gradients[0]), (beta, gradients[1])):
        want = torch.zeros_like(nll) if want is None else want
        torch.testing.assert_close(torch.zeros_like(nll) if got is None else got, want, rtol=1e-12, atol=1e-300)
    if name == "emo":
        torch.testing.assert_close(value, nll.detach(), rtol=1e-15, atol=0.0)


@pytest.mark.parametrize("weighting", ["ratio", "transport"])
def test_the_ratio_is_0_where_its_denominator_is_0(weighting: str) -> None:
    nll, cost = torch.tensor([0.0, 0.7, 0.0]), torch.tensor([0.0, 0.0, 0.3])
    value, (alpha, beta, *_) = Sum.of(EMO(weighting)).value_and_gradients(Statistics(nll, cost))
    assert beta is not None
    assert torch.isfinite(torch.stack([value, alpha, beta])).all()
    expected = [0.0, 0.35, 0.0] if weighting == "ratio" else [0.0, 0.0, 0.3]
    torch.testing.assert_close(value, torch.tensor(expected))


def test_weights_stay_finite_where_the_probability_underflows() -> None:
    nll = torch.tensor([1e-45, 200.0, 3e4])  # exp(-200) underflows, exp(200) overflows float32
    for objective in ALL:
        value, gradients = Sum.of(objective).value_and_gradients(Statistics(nll, torch.full((3,), 0.5)))
        for made in (value, *gradients):
            assert made is None or torch.isfinite(made).all(), objective


def test_names_of_objectives() -> None:
    names = {
        "dft": MixCE(0.0), "power": Power(1.0), "power:2.5": Power(2.5), "EAFT": EAFT(),
        "gem+smoothing:0.1+z_loss:1e-4": ZLoss(LabelSmoothing(GEM(), 0.1), 1e-4), "EMO+Z_Loss:2": ZLoss(EMO(), 2.0),
        "emo+number:0.5+smoothing:0.1": LabelSmoothing(EMO(0.5), 0.1), "gem": GEM(0.7), "gem:0.5": GEM(0.5),
        "expected_value:2": ExpectedValue(2.0), "expected_value": ExpectedValue(1.0),
        "mle": MLE(), " MLE ": MLE(), "tailr": TaiLr(1e-3), "tailr:0.7": TaiLr(0.7), "mixce": MixCE(0.8),
        "mixce:0": MixCE(0.0), "emo": EMO(ratio_clip=3.0), "emo:ratio": EMO(), "EMO:transport": EMO("transport"),
        "emo:0.5": EMO(0.5), "emo:clip=3": EMO(), "emo:clip=none": EMO(ratio_clip=None),
        "emo:clip=0.5": EMO(ratio_clip=0.5),
        "emo:clip=3+number": EMO(), "emo+number:clip=none": EMO(ratio_clip=None), "number_token": NumberToken(0.3),
        "number_token:2": NumberToken(2.0), "emo+number": EMO(), "emo+number:0.5": EMO(0.5),
    }  # fmt: skip
    assert {text: parse_objective(text) for text in names} == names


class Both(Sum):
    """Terms of two objectives, as a user may write them."""

    def __init__(self, kept: tuple[Term, ...]) -> None:
        self.kept = kept

    @property
    def terms(self) -> tuple[Term, ...]:
        return self.kept


def test_an_objective_is_a_sum_of_terms() -> None:
    """Its weights, statistics and cost follow from the name; the trainer asks for its term of numbers."""
    total = Sum.of(parse_objective("gem:0.7+z_loss:0.01+number:0.3+smoothing:0.1"))
    reads = ("nll", "cost", "logsumexp", "mean_logit", "tempered_logsumexp")
    assert (total.reads, total.cost_kind, total.temperature) == (reads, "number", 0.7)
    assert [term.weight for term in total.terms] == pytest.approx([0.9, 0.009, 0.27, 0.1])
    assert total.weight_of(NumberDistance) == pytest.approx(0.27)
    assert total.scaled(2.0, NumberDistance).weight_of(NumberDistance) == pytest.approx(0.54)
    nll, cost, z, m, tempered = torch.rand(5, 4, dtype=torch.float64)
    statistics = Statistics(nll, cost, None, z, m, tempered)
    rest = 0.9 * (nll + tempered - z + 0.01 * z.square()) + 0.1 * (z - m)
    torch.testing.assert_close(total.value(statistics), rest + 0.27 * cost)
    torch.testing.assert_close(total.without(NumberDistance).value(statistics), rest)
    kinds = {"emo:clip=3+number": "mixed", "emo+number+z_loss:1": "mixed", "mle": "embedding", "emo": "embedding",
             "number_token+smoothing:0.1": "number", "expected_value": "rating", "mle+number": "number"}  # fmt: skip
    assert {name: Sum.of(parse_objective(name)).cost_kind for name in kinds} == kinds


test_invalid_names_raise = raising(
    ("kl", "'kl'.*mle, tailr, mixce, emo"), ("mle:1", "expected one of"), ("emo:often", "'emo:often'.*'often'"),
    ("tailr:2", r"'tailr:2': gamma is 2.0"), ("emo:nan", "weighting is nan"), ("emo:clip=0", "ratio_clip is 0.0"),
    ("number_token:inf", "weight is inf"), ("power:0", "k is 0.0"), ("eaft:1", "expected one of"),
    ("gem:0", "beta is 0.0"), ("mle+smoothing", "'' is not a number, expected one behind '[+]smoothing:'"),
    ("gem:x", "as in gem:0.5"), ("emo:0.5+number:0.3", "reads a transport cost already"),
    (None, TypeError, "objective is None, expected a name, one of mle"),
    call=parse_objective,
)  # fmt: skip
Z, LABEL = torch.zeros(1, 3), torch.tensor([1])
test_invalid_settings_raise = raising(
    (lambda: TaiLr(float("nan")), "gamma is nan"),
    (lambda: TaiLr(0.5, min_weight=-1), "min_weight is -1"),
    (lambda: EMO("both"), "weighting is 'both'"),
    (lambda: EMO(1.0, ratio_clip=3.0), r"ratio_clip is 3.0 with weighting=1.0"),
    (lambda: EMO(ratio_clip="often"), "ratio_clip is often"),
    (lambda: EMO(None), "weighting is None, expected"),  # type: ignore[arg-type]
    (lambda: NumberToken(-1.0), "weight is -1.0"),
    (lambda: LabelSmoothing(MLE(), 1.5), "epsilon is 1.5"),
    (lambda: ZLoss(MLE(), -1), "weight is -1"),
    (lambda: EMO()(torch.ones(1), None), "pass cost="),
    (lambda: token_loss(Z, LABEL, objective=ZLoss(EMO())), "needs cost="),
    (lambda: token_loss(Z, LABEL, objective=lambda tempered_logsumexp: tempered_logsumexp),
     "its temperature is None; expected an attribute temperature"),
    (lambda: token_loss(Z, LABEL, objective="gem:0.7"), TypeError, r"expected .*parse_objective\('gem:0.7'\)"),
    (lambda: token_loss(Z, LABEL, objective=ZLoss(GEM)), TypeError, "is the class GEM, expected an instance"),
    (lambda: Both((*ExpectedValue().terms, *NumberToken().terms)).cost_kind, r"costs, \['number', 'rating'\]"),
    (lambda: Both((*Sum.of(GEM(0.5)).terms, *Sum.of(GEM(0.7)).terms)).temperature,
     "its temperature is 0.5; expected .* the same in all terms"),
    (lambda: Sum.of(lambda n, d: n.sum()).value_and_gradients(Statistics(*torch.ones(2, 3))),
     r"returned \(\), expected a value per token, \(3,\)"),
    (lambda: Sum.of(lambda n, d: 1.0).value_and_gradients(Statistics(*torch.ones(2, 3))), "returned float"),
    (lambda: Sum.of(lambda n, d: n.detach()).value_and_gradients(Statistics(*torch.ones(2, 3))), "neither nll nor"),
)  # fmt: skip


@pytest.mark.parametrize("made", [GEM, Power, NumberToken, ExpectedValue, TaiLr, MixCE, lambda w: ZLoss(MLE(), w)])
def test_numbers_of_another_type_raise(made: Any) -> None:
    """A tensor with a graph would lose its gradient."""
    for value, kind in (("0.7", "str"), (None, "NoneType"), (torch.tensor(0.7, requires_grad=True), "Tensor")):
        with pytest.raises(TypeError, match=rf"is a {kind} \(.*expected a number"):
            made(value)


def test_almost_the_name_of_a_statistic_raises() -> None:
    """It would get the transport cost, or nothing; and nll and cost the wrong way around."""
    for objective, meant in (
        (lambda nll, entrpy: nll * entrpy, "entropy"),
        (lambda nll, log_sum_exp: nll, "logsumexp"),
        (lambda costs, nlls: nlls, "cost"),
    ):
        with pytest.raises(ValueError, match=f"did you mean {meant}"):
            _ = Sum.of(objective).reads
    for objective in (
        lambda nlls, costs: nlls,
        lambda n, D: n,
        lambda nll, transport: nll,
        lambda loss, distance: loss,
    ):
        assert Sum.of(objective).reads == ("nll", "cost")


def entropy_and_nll(entropy: Tensor, nll: Tensor) -> Tensor:
    return entropy + nll


@pytest.mark.filterwarnings("ignore:.*torch.jit.script. is deprecated:DeprecationWarning")
def test_an_objective_names_what_it_reads_by_its_parameters() -> None:
    vectors = Statistics(*torch.rand(5, 3))
    kept: list[Tensor] = []

    def keep(*given: Tensor | None) -> Tensor:
        kept[:] = [vector for vector in given if vector is not None]
        return kept[0]

    class Module(nn.Module):
        def forward(self, nll: Tensor, entropy: Tensor) -> Tensor:
            return keep(nll, entropy)

    class Callable(nn.Module):
        def __call__(self, nll: Tensor, entropy: Tensor) -> Tensor:
            return keep(nll, entropy)

    class Passing(Module):
        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            return super().__call__(*args, **kwargs)

    for hidden in (torch.jit.script(entropy_and_nll), functools.partial(torch.jit.script(entropy_and_nll))):
        with pytest.raises(ValueError, match=r"has no signature, expected parameters with names of .*wrap it"):
            _ = Term(hidden).reads
    cases: list[tuple[Objective, tuple[str, ...]]] = [
        (Module(), ("nll", "entropy")), (Callable(), ("nll", "entropy")),
        (Passing(), ("nll", "entropy")),
        (torch.compile(Module(), backend="eager"), ("nll", "entropy")),
        (lambda n, d: keep(n, d), ("nll", "cost")), (lambda nll, d: keep(nll, d), ("nll", "cost")),
        (keep, ("nll", "cost")), (lambda nll: keep(nll), ("nll",)),
        (lambda cost, nll: keep(cost, nll), ("cost", "nll")),
        (lambda entropy, *, mean_logit, w=2.0: keep(entropy, mean_logit), ("entropy", "mean_logit")),
        (functools.partial(lambda w, nll, logsumexp: keep(nll, logsumexp), 1.0), ("nll", "logsumexp")),
        (torch.maximum, ("nll", "cost")), (functools.partial(torch.add, alpha=0.5), ("nll", "cost")),
    ]  # fmt: skip
    for objective, names in cases:
        assert Term(objective).reads == names
        kept.clear()
        Sum.of(objective).value(vectors)
        if kept:
            assert all(a is getattr(vectors, name) for a, name in zip(kept, names, strict=True))
    assert not Sum.of(lambda nll, entropy: nll).needs_cost
    for wrong in (
        lambda nll, cost, temperature: nll, lambda n: n, lambda d, nll: d, lambda: 0, lambda n, entropy: n,
        lambda *args, **kwargs: keep(*args, **kwargs),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=r"has parameters \[.*expected some of \['nll', 'cost', 'entropy'"):
            _ = Sum.of(wrong).reads
    with pytest.raises(ValueError, match=r"reads \['entropy'\], which this path does not compute"):
        Sum.of(lambda nll, entropy: nll).value(Statistics(torch.ones(3)))


def of_top_20(z: Tensor) -> Tensor:
    top = z.detach().topk(min(20, z.shape[-1]), dim=-1).values.softmax(-1)
    return -(top * top.log()).sum(-1) / math.log(20)


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
def test_objectives_of_fine_tuning_are_their_published_formulas(impl: str) -> None:
    """From full logits in float64: DFT (2508.05629), powers (2510.00526), EAFT (2601.02151, of 20 tokens), GEM.

    GEM has the gradient of `-sum_i sg(softmax(z / beta))_i (log q_y - log q_i)`.
    """
    for name, vocab, formula in (
        ("dft", 50, lambda z, y, nll: (-nll).exp().detach() * nll),
        ("power:2", 50, lambda z, y, nll: -(-2 * nll).exp()),
        ("eaft", 20, lambda z, y, nll: of_top_20(z) * nll),
        ("gem:0.6", 50, lambda z, y, nll: 0.6 * cross_entropy(z / 0.6, y)),
        ("mle+smoothing:0.1", 50, lambda z, y, nll: cross_entropy(z, y, label_smoothing=0.1)),
    ):
        z, label = 2 * torch.randn(7, vocab, dtype=torch.float64), torch.randint(vocab, (7,))
        leaf, again = z.clone().requires_grad_(), z.clone().requires_grad_()
        want = formula(again, label, cross_entropy(again, label, reduction="none")).mean()
        made = from_logits(leaf, label, impl, objective=parse_objective(name)).loss
        torch.testing.assert_close(made, want)
        torch.testing.assert_close(torch.autograd.grad(made, leaf), torch.autograd.grad(want, again))
    peaked = torch.randn(5, 1000, dtype=torch.float64)
    peaked[:, :10] += 12.0  # the 20 largest hold nearly all: the entropy of all tokens is close to theirs
    entropy = token_loss(peaked, torch.zeros(5).long(), objective=EAFT()).entropy
    assert entropy is not None
    torch.testing.assert_close(entropy / math.log(20), of_top_20(peaked), rtol=0.05, atol=0.0)
    assert EAFT()(torch.ones(1), torch.full((1,), 9.0)) == 1


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
def test_label_smoothing_and_z_loss_around_any_objective(impl: str) -> None:
    z, label = torch.randn(6, 9, dtype=torch.float64), torch.tensor([0, 3, 8, -100, 2, 2])
    leaf, again = z.clone().requires_grad_(), z.clone().requires_grad_()
    cost = EmbeddingCost(torch.randn(9, 4, dtype=torch.float64))
    valid = label != -100
    for objective in (EMO(), NumberToken(0.4), lambda n, d: n * d, ZLoss(MLE(), 0.2)):
        plain = from_logits(again, label, impl, objective=objective, cost=cost, reduction="none").loss[valid]
        wrapped = ZLoss(LabelSmoothing(objective, 0.3), 0.05)
        out = from_logits(leaf, label, impl, objective=wrapped, cost=cost, reduction="none")
        total = again.logsumexp(-1)[valid]
        expected = 0.7 * plain + 0.3 * (total - again.mean(-1)[valid]) + 0.05 * total.square()
        torch.testing.assert_close(out.loss[valid], expected)
        gradients = (torch.autograd.grad(loss.sum(), at) for loss, at in ((out.loss, leaf), (expected, again)))
        torch.testing.assert_close(*gradients)
    assert Sum.of(ZLoss(MLE())).reads == ("nll", "cost", "logsumexp")
    assert LabelSmoothing(NumberToken(), 0.1).cost_kind == "number"


def test_objectives_that_mix_tokens_raise() -> None:
    generator = torch.Generator().manual_seed(0)
    nll, weights, cost = torch.rand(3, 6, generator=generator)
    statistics = Statistics(nll, cost)
    learned = torch.nn.Parameter(torch.tensor(0.5))
    mixing: list[tuple[Objective, str]] = [
        (lambda n, d: n * n.mean(), "another value beside other tokens"),
        (lambda n, d: n * torch.arange(len(n), 0, -1), "another value beside other tokens"),
        # A weight per token is in the order of the batch, and the kernels pass tokens in another.
        (lambda n, d: n * weights, r"another value|must match the size"),
        (lambda n, d: n * learned, "parameters that require grad"),
    ]
    for objective, message in mixing:
        value, _ = Sum.of(objective).value_and_gradients(statistics)
        with pytest.raises((ValueError, RuntimeError), match=message):
            Sum.of(objective).check_tokenwise(statistics, value)
    for objective in ALL:
        Sum.of(objective).check_tokenwise(statistics, Sum.of(objective).value_and_gradients(statistics)[0])


@pytest.mark.parametrize("chunk_size", [1, 64])
def test_batch_statistics_raise_whatever_the_chunks(chunk_size: int) -> None:
    """Chunks of one token, or of equal tokens, agree with themselves; the whole batch does not."""
    given = problem(0, batch=(12,), ignored=0.0)
    given.hidden[:6], given.labels[:6] = given.hidden[0], 1
    with pytest.raises(ValueError, match="another value beside other tokens"):
        fused(given.leaves(), given, objective=lambda nll, cost: nll * nll.detach().mean(), chunk_size=chunk_size)
