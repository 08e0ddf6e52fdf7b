"""The compiled sweeps against their slow twin in float64."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from numba import njit
from torch import Tensor

from otloss_llm.kernels.chunked import Chunk
from otloss_llm.kernels.row_pass import CompiledChunk, _exp

EPS = torch.finfo(torch.float32).eps


def chunks(z: Tensor, label: Tensor, costs: Tensor | None, which: Tensor | None) -> tuple[CompiledChunk, Chunk]:
    """The same float32 numbers through the compiled sweeps and, in float64, through torch."""
    wide = None if costs is None else costs.double()
    return CompiledChunk.of(z.clone(), label, costs, which), Chunk.of(z.double(), label, wide, which)


def relative(got: Tensor, want: Tensor) -> float:
    return float(((got.double() - want).abs() / want.abs().clamp(min=1e-30)).max())


def test_exp_to_rounding() -> None:
    @njit
    def each(x: np.ndarray, out: np.ndarray) -> None:
        for i in range(len(x)):
            out[i] = _exp(x[i])

    x = np.concatenate([np.linspace(-87, 0, 400_001), -np.logspace(-30, 0, 1001), [0.0]]).astype(np.float32)
    x = x[x > -87]
    out = np.empty_like(x)
    each(x, out)
    assert np.abs(out / np.exp(x.astype(np.float64)) - 1).max() < 1.5 * EPS
    beyond = np.array([-87.1, -1e4, -np.inf], dtype=np.float32)
    each(beyond, out[:3])
    assert (out[:3] == 0).all()


@pytest.mark.parametrize("vocab", [1, 2, 15, 16, 17, 1000])
@pytest.mark.parametrize("spread", [0.1, 3.0, 30.0])
@pytest.mark.parametrize("use", ["no cost", "reported cost", "cost"])
def test_twins_agree(vocab: int, spread: float, use: str) -> None:
    generator = torch.Generator().manual_seed(vocab)
    tokens = 7
    z = torch.randn(tokens, vocab, generator=generator) * spread
    label = torch.randint(vocab, (tokens,), generator=generator)
    costs = None if use == "no cost" else torch.rand(tokens, vocab, generator=generator)
    which = None if use == "no cost" else torch.arange(tokens).flip(0)
    if costs is not None and spread > 10:
        # Near certainty c_y - D is lost in float32 unless c_y is 0, which it is for a cost of a vocabulary.
        costs[which, label] = 0.0
    fast, slow = chunks(z, label, costs, which)
    assert relative(fast.nll, slow.nll) < 16 * EPS
    if slow.transport is not None and fast.transport is not None:
        assert relative(fast.transport, slow.transport) < 16 * EPS
    alpha, factor = torch.rand(tokens, generator=generator), torch.randn(tokens, generator=generator)
    beta = 3 * torch.randn(tokens, generator=generator) if use == "cost" else None
    got = fast.logit_gradient(alpha, beta, factor)
    want = slow.logit_gradient(alpha.double(), None if beta is None else beta.double(), factor.double())
    scale = want.abs().amax(-1, keepdim=True)
    assert float(((got - want).abs() / scale.clamp(min=1e-30)).max()) < 32 * EPS


def test_a_factor_for_all_tokens() -> None:
    z, label = torch.randn(5, 9), torch.tensor([0, 1, 2, 3, 4])
    ones, half = torch.ones(5), torch.tensor(0.5)
    one = CompiledChunk.of(z.clone(), label, None, None).logit_gradient(ones, None, ones)
    scaled = CompiledChunk.of(z.clone(), label, None, None).logit_gradient(ones, None, half)
    torch.testing.assert_close(scaled, 0.5 * one)


def test_near_certainty_and_masked_entries() -> None:
    z = torch.tensor([[40.0, 0.0, -math.inf, 1.0], [0.0, 30.0, -math.inf, -math.inf], [5.0, 5.0, 5.0, 5.0]])
    fast, slow = chunks(z, torch.tensor([0, 1, 3]), torch.rand(3, 4), torch.arange(3))
    assert relative(fast.nll, slow.nll) < 4 * EPS
    assert slow.transport is not None
    assert fast.transport is not None
    assert relative(fast.transport, slow.transport) < 8 * EPS
    assert float(fast.nll[1]) == pytest.approx(math.exp(-30), rel=1e-6)  # log_softmax would say 0


@pytest.mark.parametrize("broken", [math.nan, math.inf])
@pytest.mark.parametrize("at_label", [True, False])
def test_broken_logits_show(broken: float, at_label: bool) -> None:
    z = torch.randn(2, 40)
    z[1, 3 if at_label else 20] = broken
    nll = CompiledChunk.of(z, torch.tensor([3, 3]), None, None).nll
    assert math.isfinite(float(nll[0]))
    assert not math.isfinite(float(nll[1]))


def test_a_masked_label_is_infinitely_unlikely() -> None:
    z = torch.randn(1, 8)
    z[0, 2] = -math.inf
    assert float(CompiledChunk.of(z, torch.tensor([2]), None, None).nll) == math.inf


def test_threads_are_left_as_they_were() -> None:
    import numba

    before, torch_before = numba.get_num_threads(), torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        CompiledChunk.of(torch.randn(4, 8), torch.zeros(4, dtype=torch.long), None, None)
        assert numba.get_num_threads() == before
    finally:
        torch.set_num_threads(torch_before)
