"""The cumulative-link head: exact log-probabilities, their gradients, decisions, state."""

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
from otloss.losses import cumulative_log_probabilities, decode_classes

mpmath = pytest.importorskip("mpmath")

SCORES = [-100.0, -9.0, -0.3, 0.0, 1.7, 30.0, 100.0]
GAPS = [-90.0, -12.0, -7.1, -6.9, 0.0, 2.0, 4.5, 100.0]  # logarithms


def exactly(score: float, log_gaps: Tensor) -> list[float]:
    """log P in 120 digits."""
    with mpmath.workdps(120):
        thresholds = [mpmath.mpf(0)]
        for gap in log_gaps.tolist():
            thresholds.append(thresholds[-1] + mpmath.exp(gap))
        upper = [t - mpmath.mpf(score) for t in thresholds]
        below = [mpmath.mpf(0), *(1 / (1 + mpmath.exp(-a)) for a in upper), mpmath.mpf(1)]
        above = [mpmath.mpf(1), *(1 / (1 + mpmath.exp(a)) for a in upper), mpmath.mpf(0)]
        pairs = zip(itertools.pairwise(below), itertools.pairwise(above), strict=True)
        return [float(mpmath.log(max(hi - lo, over - under))) for (lo, hi), (over, under) in pairs]


def test_log_probabilities_keep_their_digits_in_both_tails() -> None:
    for gaps in (torch.tensor(GAPS[:-1]), torch.tensor([0.5]), torch.zeros(0)):
        score = torch.tensor(SCORES, requires_grad=True)
        leaf = gaps.clone().requires_grad_()
        actual = cumulative_log_probabilities(score, leaf)
        expected = torch.tensor([exactly(s, gaps) for s in SCORES], dtype=torch.float64)
        assert actual.dtype == torch.float32
        torch.testing.assert_close(actual.double(), expected, rtol=3e-6, atol=3e-6)
        torch.testing.assert_close(actual.exp().sum(-1), torch.ones(len(SCORES)))
        gradients = torch.autograd.grad(actual.sum(), (score, leaf))
        assert all(torch.isfinite(gradient).all() for gradient in gradients)
    gaps = torch.tensor(GAPS, requires_grad=True)  # the last one ends beyond all scores
    actual = cumulative_log_probabilities(torch.tensor(SCORES), gaps)
    assert torch.isfinite(actual).all()
    assert torch.isfinite(torch.autograd.grad(actual.sum(), gaps)[0]).all()


def test_gradients_are_finite_differences() -> None:
    score = torch.tensor([[-3.0, 0.2], [1.0, 8.0]], dtype=torch.float64, requires_grad=True)
    gaps = torch.tensor([-8.0, 0.3, -1.0], dtype=torch.float64, requires_grad=True)

    def loss(score: Tensor, gaps: Tensor) -> Tensor:
        y = torch.tensor([[1, 0], [3, 4]])
        return ordinal_loss(cumulative_log_probabilities(score, gaps), y, cross_entropy=0.5)

    assert torch.autograd.gradcheck(loss, (score, gaps), rtol=1e-6, atol=1e-9)
    assert torch.autograd.gradgradcheck(loss, (score, gaps), rtol=1e-4, atol=1e-8)


def test_two_classes_are_logistic_regression() -> None:
    rng = np.random.default_rng(0)
    X = rng.normal(size=(200, 3))
    binary = LogisticRegression(C=np.inf, tol=1e-10).fit(X, X @ [1.0, -2.0, 0.5] + rng.logistic(size=200) > 0)
    head = nn.CumulativeLinkHead(3, 2, dtype=torch.float64)
    with torch.no_grad():
        head.score.weight.copy_(torch.from_numpy(binary.coef_))
        head.score.bias.copy_(torch.from_numpy(binary.intercept_))
    torch.testing.assert_close(head(torch.from_numpy(X)).detach().exp().numpy(), binary.predict_proba(X))


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


def test_decisions() -> None:
    P = np.random.default_rng(1).dirichlet(np.full(5, 0.6), 60)
    P[0], P[1] = [0.1, 0.4, 0.5, 0, 0], [0.25, 0.25, 0.0, 0.5, 0.0]  # ties go to the lower class
    x = np.array([0.0, 1.0, 2.0, 4.0, 8.0])
    expected = {
        "argmax": P.argmax(1),
        "median": (P.cumsum(1) < 0.5 - 1e-12).sum(1),
        "mean": np.abs(x - (P @ x)[:, None]).argmin(1),
    }
    assert (expected["median"][:2] == 1).all()
    for rule, classes in expected.items():
        for dtype in (torch.float32, torch.float64):
            given = torch.tensor(x, dtype=dtype) if rule == "mean" else None
            logits = torch.from_numpy(P).log().to(dtype).reshape(30, 2, 5)
            np.testing.assert_array_equal(decode_classes(logits, rule, x=given).reshape(60), classes)


def test_state() -> None:
    head = nn.CumulativeLinkHead(3, 5)
    features = torch.randn(2, 4, 3, generator=torch.Generator().manual_seed(0))
    actual = head(features)
    assert actual.shape == (2, 4, 5)
    torch.testing.assert_close(head(torch.zeros(3)).exp(), torch.full((5,), 0.2))
    assert list(head.state_dict()) == ["log_gaps", "score.weight", "score.bias"]
    other = nn.CumulativeLinkHead(3, 5)
    other.load_state_dict(head.state_dict())
    for again in (copy.deepcopy(head), pickle.loads(pickle.dumps(head)), other):
        assert torch.equal(again(features), actual)
    torch.testing.assert_close(copy.deepcopy(head).double()(features.double()).float(), actual)
    half = copy.deepcopy(head).bfloat16()
    assert half(features.bfloat16()).dtype == half.thresholds.dtype == torch.float32
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert head(features).dtype == torch.float32
    empty = nn.CumulativeLinkHead(3, 5, device="meta").to_empty(device="cpu")
    empty.load_state_dict(head.state_dict())
    assert torch.equal(empty(features), actual)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: nn.CumulativeLinkHead(3, 1), ValueError, "num_classes is 1, expected at least 2"),
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
