"""The check of pairs of histograms: degenerate masses and messages; and the logarithm of kernels."""

import numpy as np
import pytest
import torch
from numba import njit

from otloss._kernels._compile import log64
from otloss.solvers.problem import histogram_pair


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda q: q[1].mul_(1.001), "different masses of row 1: 1 and 1.001"),
        (lambda q: q[1, 2].fill_(-0.25), r"q holds -0.25 in bin 2 of row 1, expected weights >= 0"),
        (lambda q: q[1, 2].fill_(torch.nan), r"q holds 1 NaN or infinite values, the first at index \(1, 2\)"),
        (lambda q: q[1, 2].fill_(torch.inf), r"q holds 1 NaN or infinite values, the first at index \(1, 2\)"),
        (lambda q: q.fill_(1e308), "q has a mass beyond float64"),
    ],
)
def test_invalid_histograms(change: object, message: str) -> None:
    p, q = torch.full((2, 3, 4), 0.25, dtype=torch.float64)
    change(q)  # type: ignore[operator]
    for dtype in (torch.float64, torch.float32) if q.max() < 1e300 or not q.isfinite().all() else (torch.float64,):
        with pytest.raises(ValueError, match=message):
            histogram_pair(p.to(dtype), q.to(dtype))


def test_histograms_are_balanced_to_their_mean_and_without_mass_stay_so() -> None:
    p, q = torch.rand(2, 5, 70, generator=torch.Generator().manual_seed(0))
    q = q * (p.sum(-1) / q.sum(-1)).unsqueeze(-1) * (1 + 1e-6)
    pair = histogram_pair(p, q.requires_grad_())
    mean = (p.double().sum(-1) + q.double().sum(-1)) / 2
    for actual in (pair.p.double().sum(-1), pair.q.double().sum(-1), pair.mass.double()):
        torch.testing.assert_close(actual, mean, rtol=1e-7, atol=0)
    (gradient,) = torch.autograd.grad((pair.q * torch.arange(70)).sum(), q)
    torch.testing.assert_close(gradient, (torch.arange(70) - 34.5).expand(5, 70), rtol=1e-5, atol=0)
    empty = histogram_pair(torch.zeros(2, 3), torch.zeros(2, 4))
    assert not any(t.any() for t in (empty.p, empty.q, empty.mass))
    assert histogram_pair(torch.zeros(0, 3), torch.zeros(0, 4)).mass.shape == (0,)


def test_the_logarithm() -> None:
    numbers = np.exp(np.random.default_rng(0).uniform(-700, 700, 20_000))
    numbers = np.concatenate([numbers, [1.0, np.nextafter(1, 2), np.nextafter(1, 0), 2.0, 0.5, np.sqrt(0.5), 2.3e-308]])

    @njit
    def logs(x, out):  # type: ignore[no-untyped-def]
        for k in range(x.shape[0]):
            out[k] = log64(x[k])

    actual = np.empty_like(numbers)
    logs(numbers, actual)
    expected = np.log(numbers)
    assert (np.abs(actual - expected) <= 1e-15 * np.maximum(1, np.abs(expected))).all()
    assert actual[-7] == 0.0
