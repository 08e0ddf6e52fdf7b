"""The score of ensembles against the double sum, an integral by quadrature, cdf_distance and finite differences."""

from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import otloss
from otloss.losses import crps
from tests.errors import raising
from tests.otloss.oracles import as_double
from tests.otloss.strategies import positions, weights


def double_sum(x: np.ndarray, y: float, w: np.ndarray, fair: bool = False) -> float:
    spread = sum(a * b * abs(s - t) for a, s in zip(w, x, strict=True) for b, t in zip(w, x, strict=True)) / 2
    return float(w @ abs(x - y) - spread / (1 - w @ w if fair else 1))


@given(st.data(), st.integers(1, 7))
def test_against_the_double_sum(data: st.DataObject, members: int) -> None:
    x, w = data.draw(positions(members)), data.draw(weights(members))
    y = data.draw(st.sampled_from([float(x[0]), -9.0, 0.3, 9.0]))
    actual = crps(as_double(x), as_double(np.array(y)), as_double(3 * w))
    assert actual.item() == pytest.approx(double_sum(x, y, w), abs=1e-12)
    assert actual >= 0
    if w.max() < 1:
        fair = crps(as_double(x), as_double(np.array(y)), as_double(w), fair=True)
        assert fair.item() == pytest.approx(double_sum(x, y, w, fair=True), abs=1e-12)


def test_batches_offsets_and_narrow_numbers() -> None:
    draw = torch.Generator().manual_seed(0)
    x, y = torch.randn(3, 1, 6, generator=draw), torch.randn(4, generator=draw)
    w = torch.rand(3, 4, 6, generator=draw)
    actual = crps(x, y, w)
    both = torch.cat([x.expand(3, 4, 6), y.expand(3, 4).unsqueeze(-1)], -1)
    p = torch.cat([w / w.sum(-1, keepdim=True), torch.zeros(3, 4, 1)], -1)
    torch.testing.assert_close(actual, otloss.cdf_distance(p, torch.eye(7)[-1], both))
    torch.testing.assert_close(crps(x + 4096, y + 4096, w), actual, atol=1e-3, rtol=0)  # no cancellation
    order = torch.randperm(6, generator=draw)
    torch.testing.assert_close(crps(x[..., order], y, w[..., order]), actual)
    assert crps(x.bfloat16(), y.bfloat16()).dtype == torch.bfloat16
    assert crps(torch.zeros(0, 3), torch.zeros(0)).shape == (0,)


X, Y = torch.ones(2, 3), torch.ones(2)
test_bad_input = raising(
    (lambda: crps(X, Y[:, None]), r"observation has shape \(2, 1\).*squeeze"),
    (lambda: crps(Y, X), r"ensemble has shape \(2,\) and observation \(2, 3\), expected the ensembles first"),
    (lambda: crps(X, Y, -X), "least entry -1.0"),
    (lambda: crps(X, Y, 0 * X), "least sum 0.0"),
    (lambda: crps(X[:, :1], Y, fair=True), "single member"),
)


@pytest.mark.parametrize("size", [1e-44, 1e38, 3e38])
def test_only_the_ratios_of_weights_count_whatever_their_sum(size: float) -> None:
    x, y = torch.arange(5.0), torch.tensor(1.5)
    torch.testing.assert_close(crps(x, y, torch.full((5,), size)), crps(x, y))


@pytest.mark.parametrize("rest", [1e-3, 1e-7, 3e-8, 1e-9])
def test_fair_scores_of_an_ensemble_of_which_one_member_has_nearly_all_weight(rest: float) -> None:
    """As importance weights have it; 1 - sum w^2 of float32 is rounding there."""
    x, weights, y = (0.0, 10.0, 3.0), (1.0, rest, rest / 2), 0.0
    share = [Fraction(w) / sum(map(Fraction, weights)) for w in weights]
    near = sum(w * abs(Fraction(v) - Fraction(y)) for v, w in zip(x, share, strict=True))
    pairs = [(i, j) for i in range(3) for j in range(3)]
    spread = sum(share[i] * share[j] * abs(Fraction(x[i]) - Fraction(x[j])) for i, j in pairs) / 2
    expected = float(near - spread / (1 - sum(w * w for w in share)))
    assert float(crps(torch.tensor(x), torch.tensor(y), torch.tensor(weights), fair=True)) == pytest.approx(expected)
