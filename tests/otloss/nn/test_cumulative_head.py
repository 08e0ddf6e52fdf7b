"""The heads of ordered classes: exact log-probabilities, their gradients, decisions, state."""

import copy
import itertools
import pickle

import numpy as np
import pytest
import torch
from torch import Tensor

from otloss import nn
from otloss.losses import cumulative_log_probabilities, decode_classes
from tests.errors import raising

mpmath = pytest.importorskip("mpmath")

SCORES = [-100.0, -9.0, -0.3, 0.0, 1.7, 30.0, 100.0]
GAPS = [-90.0, -12.0, -7.1, -6.9, 0.0, 2.0, 4.5, 100.0]  # logarithms


def exactly(score: float, log_gaps: Tensor, link: str) -> list[float]:
    """log P in 150 digits; where it has too many, the log of the smallest probability of so many digits."""
    with mpmath.workdps(150):
        distribution = {
            "logit": lambda a: (1 / (1 + mpmath.exp(-a)), 1 / (1 + mpmath.exp(a))),
            "probit": lambda a: (mpmath.ncdf(a), mpmath.ncdf(-a)),
            "cloglog": lambda a: (-mpmath.expm1(-mpmath.exp(a)), mpmath.exp(-mpmath.exp(a))),
        }[link]
        thresholds = [mpmath.mpf(0)]
        for gap in log_gaps.tolist():
            thresholds.append(thresholds[-1] + mpmath.exp(gap))
        both = [distribution(t - mpmath.mpf(score)) for t in thresholds]
        below = [mpmath.mpf(0), *(b for b, _ in both), mpmath.mpf(1)]
        above = [mpmath.mpf(1), *(a for _, a in both), mpmath.mpf(0)]
        pairs = zip(itertools.pairwise(below), itertools.pairwise(above), strict=True)
        return [float(mpmath.log(max(hi - lo, over - under))) for (lo, hi), (over, under) in pairs]


@pytest.mark.parametrize("link", ["logit", "probit", "cloglog"])
def test_log_probabilities_keep_their_digits_in_both_tails(link: str) -> None:
    for gaps in (torch.tensor(GAPS[:-1]), torch.tensor([0.5]), torch.zeros(0)):
        score = torch.tensor(SCORES, requires_grad=True)
        leaf = gaps.clone().requires_grad_()
        actual = cumulative_log_probabilities(score, leaf, link)
        expected = torch.tensor([exactly(s, gaps, link) for s in SCORES], dtype=torch.float64)
        assert actual.dtype == torch.float32
        shown = expected > -1e20  # Hazards of exp(100) end at -1e26.
        tolerance = 1e-5 if link == "probit" else 3e-6
        torch.testing.assert_close(actual.double()[shown], expected[shown], rtol=tolerance, atol=tolerance)
        assert (actual[~shown] < -1e20).all()
        torch.testing.assert_close(actual.exp().sum(-1), torch.ones(len(SCORES)))
        gradients = torch.autograd.grad(actual.clamp(min=-1e9).sum(), (score, leaf))
        assert all(torch.isfinite(gradient).all() for gradient in gradients)
    gaps = torch.tensor(GAPS, requires_grad=True)  # the last one ends beyond all scores
    actual = cumulative_log_probabilities(torch.tensor(SCORES), gaps, link)
    assert torch.isfinite(actual).all()
    assert torch.isfinite(torch.autograd.grad(actual.sum(), gaps)[0]).all()


def test_corn_head_has_the_loss_of_coral_pytorch() -> None:
    """0.680427193185849 is corn_loss of coral-pytorch 1.4.0, a mean over the 13 binary tasks of four rows."""
    z = [[2.1, 1.8, -2.1, -1.8], [1.9, 0.4, -1.5, -1.3], [1.9, 1.8, 1.7, -1.6], [-0.5, -0.2, 0.3, 0.8]]
    features = torch.tensor(z, dtype=torch.float64)
    y = torch.tensor([2, 0, 4, 3])
    head = nn.CornHead(4, 5, dtype=torch.float64)
    with torch.no_grad():
        head.scores.weight.copy_(torch.eye(4))
        head.scores.bias.zero_()
    actual = head(features).detach()
    tasks = (y + 1).clamp(max=4).sum()
    loss = torch.nn.functional.nll_loss(actual, y, reduction="sum") / tasks
    torch.testing.assert_close(float(loss), 0.680427193185849)
    torch.testing.assert_close(actual.exp().sum(-1), torch.ones(4).double())
    above = 1 - actual.exp().cumsum(-1)[:, :-1]
    torch.testing.assert_close(above, features.sigmoid().cumprod(-1))
    assert torch.equal(head.predict(features), (above > 0.5).sum(-1))  # as corn_label_from_logits


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
    assert (head.thresholds.diff() > 0).all()
    assert torch.equal(head.predict(features), decode_classes(actual))
    for link in ("logit", "probit", "cloglog"):
        start = nn.CumulativeLinkHead(3, 5, link=link)
        torch.testing.assert_close(start(torch.zeros(3)).exp(), torch.full((5,), 0.2))
    assert list(head.state_dict()) == ["log_gaps", "score.weight", "score.bias"]
    empty = nn.CumulativeLinkHead(3, 5, device="meta").to_empty(device="cpu")
    empty.load_state_dict(head.state_dict())
    for again in (copy.deepcopy(head), pickle.loads(pickle.dumps(head)), empty):
        assert torch.equal(again(features), actual)
    torch.testing.assert_close(copy.deepcopy(head).double()(features.double()).float(), actual)
    half = copy.deepcopy(head).bfloat16()
    assert half(features.bfloat16()).dtype == half.thresholds.dtype == torch.float32
    for autocast in (head, nn.CornHead(3, 5)):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert autocast(features).dtype == torch.float32


test_bad_input = raising(
    (lambda: nn.CumulativeLinkHead(3, 4)(torch.zeros(2, 4)), r"features has shape \(2, 4\)"),
    (lambda: decode_classes(torch.zeros(2, 3), x=torch.arange(3)), "x is given with rule='median'"),
)
