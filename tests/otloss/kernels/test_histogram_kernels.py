"""The check of pairs of histograms in NumPy against the one in torch operations, and the logarithm of kernels."""

import numpy as np
import pytest
import torch
from numba import njit

from otloss._kernels._compile import log64
from otloss.solvers import histograms as _histograms
from otloss.solvers.histograms import histogram_pair


def _in_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_histograms, "may_run_on", lambda *tensors: False)


@pytest.mark.parametrize("batch", [(), (5,), (2, 3), (0,)])
def test_it_gives_what_torch_operations_give(batch: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    dtype = torch.float32
    generator = torch.Generator().manual_seed(0)
    p, q = (torch.rand(*batch, n, generator=generator, dtype=dtype) for n in (70, 33))
    q = q * (p.sum(-1) / q.sum(-1)).unsqueeze(-1) * (1 + 2 * torch.finfo(dtype).eps)
    p, q = p.requires_grad_(), q.requires_grad_()
    fast = histogram_pair(p, q)
    (fast_slope,) = torch.autograd.grad((fast.p * torch.arange(70)).sum(), p)
    _in_torch(monkeypatch)
    slow = histogram_pair(p, q)
    (slow_slope,) = torch.autograd.grad((slow.p * torch.arange(70)).sum(), p)
    assert fast.dtype == slow.dtype == fast.mass.dtype
    for one, other in ((fast.p, slow.p), (fast.q, slow.q), (fast.mass, slow.mass), (fast_slope, slow_slope)):
        assert one.shape == other.shape
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("wrong", ["negative", "nan", "infinite", "heavier", "overflowing"])
def test_messages_are_those_of_torch(wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    p, q = torch.full((3, 4), 0.25), torch.full((3, 4), 0.25)
    if wrong == "heavier":
        q[1] *= 1.001
    elif wrong == "overflowing":
        p, q = p.double().fill_(1e308), q.double().fill_(1e308)
    else:
        q[1, 2] = {"negative": -0.25, "nan": torch.nan, "infinite": torch.inf}[wrong]
    messages = []
    for _ in range(2):
        with pytest.raises(ValueError) as raised:
            histogram_pair(p, q)
        messages.append(str(raised.value))
        _in_torch(monkeypatch)
    assert messages[0] == messages[1]


def test_histograms_without_mass_stay_so() -> None:
    pair = histogram_pair(torch.zeros(2, 3), torch.zeros(2, 4))
    assert not pair.p.any()
    assert not pair.q.any()
    assert not pair.mass.any()


def test_the_logarithm() -> None:
    numbers = np.exp(np.random.default_rng(0).uniform(-700, 700, 20_000))
    numbers = np.concatenate([numbers, [1.0, np.nextafter(1, 2), np.nextafter(1, 0), 2.0, 0.5, np.sqrt(0.5), 2.3e-308]])

    @njit
    def logs(x, out):  # type: ignore[no-untyped-def]
        for k in range(x.shape[0]):
            out[k] = log64(x[k])

    found = np.empty_like(numbers)
    logs(numbers, found)
    expected = np.log(numbers)
    assert (np.abs(found - expected) <= 5e-16 * np.maximum(1, np.abs(expected))).all()
    assert found[-7] == 0.0
