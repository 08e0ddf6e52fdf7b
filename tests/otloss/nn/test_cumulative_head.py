"""The cumulative-link head: exact log-probabilities, their gradients, the model of the estimator, decisions, state."""

from __future__ import annotations

import copy
import itertools
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.linear_model import LogisticRegression
from torch import Tensor

from otloss import nn, ordinal_loss
from otloss.estimators import OrdinalClassifier
from otloss.estimators.decode import decode
from otloss.losses import cumulative_log_probabilities, decode_classes

mpmath = pytest.importorskip("mpmath")

SCORES = [-100.0, -9.0, -0.3, 0.0, 1.7, 30.0, 100.0]
GAPS = [-90.0, -12.0, -7.1, -6.9, 0.0, 2.0, 4.5, 100.0]  # logarithms


def exactly(score: float, log_gaps: Tensor, link: str) -> list[float]:
    """log P in 120 digits."""
    with mpmath.workdps(120):
        thresholds = [mpmath.mpf(0)]
        for gap in log_gaps.tolist():
            thresholds.append(thresholds[-1] + mpmath.exp(gap))
        upper = [t - mpmath.mpf(score) for t in thresholds]
        cdf: Callable[[Any], Any] = {"logit": lambda a: 1 / (1 + mpmath.exp(-a)), "probit": mpmath.ncdf}[link]
        below = [mpmath.mpf(0), *map(cdf, upper), mpmath.mpf(1)]
        above = [mpmath.mpf(1), *(cdf(-a) for a in upper), mpmath.mpf(0)]
        pairs = zip(itertools.pairwise(below), itertools.pairwise(above), strict=True)
        return [float(mpmath.log(max(hi - lo, over - under))) for (lo, hi), (over, under) in pairs]


@pytest.mark.parametrize("link", ["logit", "probit"])
def test_log_probabilities_keep_their_digits_in_both_tails(link: str) -> None:
    for gaps in (torch.tensor(GAPS[:-1]), torch.tensor([0.5]), torch.zeros(0)):
        score = torch.tensor(SCORES, requires_grad=True)
        leaf = gaps.clone().requires_grad_()
        found = cumulative_log_probabilities(score, leaf, link=link)
        expected = torch.tensor([exactly(s, gaps, link) for s in SCORES], dtype=torch.float64)
        assert found.dtype == torch.float32
        torch.testing.assert_close(found.double(), expected, rtol=3e-6, atol=3e-6)
        torch.testing.assert_close(found.exp().sum(-1), torch.ones(len(SCORES)))
        slopes = torch.autograd.grad(found.sum(), (score, leaf))
        assert all(torch.isfinite(slope).all() for slope in slopes)
    gaps = torch.tensor(GAPS, requires_grad=True)  # the last one ends beyond all scores
    found = cumulative_log_probabilities(torch.tensor(SCORES), gaps, link=link)
    assert torch.isfinite(found).all()
    assert torch.isfinite(torch.autograd.grad(found.sum(), gaps)[0]).all()


@pytest.mark.parametrize("link", ["logit", "probit"])
def test_gradients_are_finite_differences(link: str) -> None:
    score = torch.tensor([[-3.0, 0.2], [1.0, 8.0]], dtype=torch.float64, requires_grad=True)
    gaps = torch.tensor([-8.0, 0.3, -1.0], dtype=torch.float64, requires_grad=True)

    def loss(score: Tensor, gaps: Tensor) -> Tensor:
        y = torch.tensor([[1, 0], [3, 4]])
        return ordinal_loss(cumulative_log_probabilities(score, gaps, link=link), y, cross_entropy=0.5)

    assert torch.autograd.gradcheck(loss, (score, gaps), rtol=1e-6, atol=1e-9)
    assert torch.autograd.gradgradcheck(loss, (score, gaps), rtol=1e-4, atol=1e-8)


def test_it_is_the_cumulative_model_of_the_estimator() -> None:
    rng = np.random.default_rng(0)
    X = rng.normal(size=(200, 3))
    y = np.digitize(X @ [1.0, -2.0, 0.5] + rng.logistic(size=200), [-2.0, -0.5, 1.0, 2.0])
    model = OrdinalClassifier(model="cumulative", standardize=False).fit(X, y)
    head = nn.CumulativeLinkHead(3, 5, dtype=torch.float64)
    with torch.no_grad():
        head.score.weight.copy_(torch.from_numpy(model.coef_))
        head.score.bias.fill_(model.intercept_[0])
        head.log_gaps.copy_(torch.from_numpy(np.log(np.diff(model.thresholds_))))
    found = head(torch.from_numpy(X)).exp()
    torch.testing.assert_close(found, torch.from_numpy(model.predict_proba(X)), rtol=1e-10, atol=1e-14)
    # Two classes are logistic regression.
    binary = LogisticRegression(C=np.inf, tol=1e-10).fit(X, y > 2)
    two = nn.CumulativeLinkHead(3, 2, dtype=torch.float64)
    with torch.no_grad():
        two.score.weight.copy_(torch.from_numpy(binary.coef_))
        two.score.bias.copy_(torch.from_numpy(binary.intercept_))
    torch.testing.assert_close(two(torch.from_numpy(X)).detach().exp().numpy(), binary.predict_proba(X))


def test_it_learns_behind_a_backbone_and_its_thresholds_stay_ordered() -> None:
    generator = torch.Generator().manual_seed(0)
    X = torch.randn(400, 2, generator=generator)
    y = torch.bucketize(X.square().sum(-1), torch.tensor([0.5, 1.5, 3.0]))
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(2, 32), torch.nn.ReLU(), nn.CumulativeLinkHead(32, 4))
    start = ordinal_loss(model(X), y).item()
    optimiser = torch.optim.Adam(model.parameters(), lr=0.02)
    for _ in range(150):
        optimiser.zero_grad()
        ordinal_loss(model(X), y, cross_entropy=0.2).backward()
        optimiser.step()
    assert ordinal_loss(model(X), y).item() < start / 4
    assert (model[2].predict(model[:2](X)) == y).float().mean() > 0.85  # type: ignore[operator]
    assert (model[2].thresholds.diff() > 0).all()  # type: ignore[union-attr]


@pytest.mark.parametrize("rule", ["argmax", "median", "mean"])
def test_decisions_are_those_of_the_estimator(rule: str) -> None:
    P = np.random.default_rng(1).dirichlet(np.full(5, 0.6), (30, 2))
    P[0, 0], P[1, 1] = [0.1, 0.4, 0.5, 0, 0], [0.25, 0.25, 0.0, 0.5, 0.0]  # ties go to the lower class
    values = np.array([0.0, 1.0, 2.0, 4.0, 8.0])
    expected = decode(P.reshape(60, 5), rule, values=values).reshape(30, 2)
    x = torch.from_numpy(values) if rule == "mean" else None
    for dtype in (torch.float32, torch.float64):
        found = decode_classes(torch.from_numpy(P).log().to(dtype), rule, x=None if x is None else x.to(dtype))
        np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("link", ["logit", "probit"])
def test_state(link: str) -> None:
    head = nn.CumulativeLinkHead(3, 5, link=link)
    features = torch.randn(2, 4, 3, generator=torch.Generator().manual_seed(0))
    found = head(features)
    assert found.shape == (2, 4, 5)
    torch.testing.assert_close(head(torch.zeros(3)).exp(), torch.full((5,), 0.2))
    assert repr(head).startswith(f"CumulativeLinkHead(\n  in_features=3, num_classes=5, link='{link}'\n")
    assert list(head.state_dict()) == ["log_gaps", "score.weight", "score.bias"]
    other = nn.CumulativeLinkHead(3, 5, link=link)
    other.load_state_dict(head.state_dict())
    for twin in (copy.deepcopy(head), pickle.loads(pickle.dumps(head)), other):
        assert torch.equal(twin(features), found)
    torch.testing.assert_close(copy.deepcopy(head).double()(features.double()).float(), found)
    half = copy.deepcopy(head).bfloat16()
    assert half(features.bfloat16()).dtype == half.thresholds.dtype == torch.float32
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert head(features).dtype == torch.float32
    empty = nn.CumulativeLinkHead(3, 5, link=link, device="meta").to_empty(device="cpu")
    empty.load_state_dict(head.state_dict())
    assert torch.equal(empty(features), found)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: nn.CumulativeLinkHead(3, 1), ValueError, "num_classes is 1, expected at least 2"),
        (lambda: nn.CumulativeLinkHead(3.0, 4), TypeError, "in_features is 3.0"),  # type: ignore[arg-type]
        (lambda: nn.CumulativeLinkHead(3, 4, link="cauchit"), ValueError, r"link is 'cauchit', expected one of \("),
        (lambda: nn.CumulativeLinkHead(3, 4)(torch.zeros(2, 4)), ValueError, r"features has shape \(2, 4\)"),
        (lambda: nn.CumulativeLinkHead(3, 4)(torch.zeros(2, 3).long()), TypeError, "features has dtype torch.int64"),
        (lambda: cumulative_log_probabilities(torch.zeros(2), torch.zeros(2, 3)), ValueError, "log_gaps has shape"),
        (lambda: decode_classes(torch.zeros(2, 3), "mode"), ValueError, "rule is 'mode'"),
        (lambda: decode_classes(torch.zeros(2, 3), x=torch.arange(3)), ValueError, "x is given with rule='median'"),
        (lambda: decode_classes(torch.tensor([[0.0, torch.nan]])), ValueError, "logits holds 1 NaN"),
    ],
)
def test_bad_input(call: Callable[[], Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call()
