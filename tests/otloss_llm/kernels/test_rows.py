"""The numba sweeps over rows of float32 logits against the formulas in float64."""

import math
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from numba import njit
from torch import Tensor

from otloss.costs import LineCost
from otloss_llm import MLE
from otloss_llm.kernels.rows_numba import _exp
from tests.otloss_llm.oracles import curved
from tests.otloss_llm.scoring import from_logits

EPS = torch.finfo(torch.float32).eps


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
    beyond = np.array([-87.1, -1e4, -np.inf, np.nan], dtype=np.float32)
    each(beyond, out[:4])
    assert (out[:3] == 0).all()
    assert np.isnan(out[3])


def rows_and_positions(vocab: int, spread: float) -> tuple[Tensor, Tensor, Tensor]:
    """Logits of 7 tokens, labels, and the tokens' positions on a line: the cost is their distance."""
    generator = torch.Generator().manual_seed(vocab)
    z = torch.randn(7, vocab, generator=generator) * spread
    return z, torch.randint(vocab, (7,), generator=generator), torch.rand(vocab, generator=generator)


def in_float64(z: Tensor, label: Tensor, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """nll, D and the gradient of `sum_t upstream_t curved(nll_t, D_t)` in the logits, keeping small probabilities."""
    z, rows = z.double().requires_grad_(), (x.double() - x.double()[label][:, None]).abs()
    others = z.scatter(-1, label[:, None], -math.inf)
    nll = (others.logsumexp(-1) - z.gather(-1, label[:, None])[:, 0]).exp().log1p()
    transport = (torch.softmax(z, -1) * rows).sum(-1)
    value = curved(nll, transport) * torch.linspace(-2, 3, len(z))
    return nll.detach(), transport.detach(), torch.autograd.grad(value.sum(), z)[0]


def assert_as_in_float64(
    vocab: int, spread: float, impl: str, dtype: torch.dtype = torch.float32, device: str = "cpu"
) -> None:
    z, label, x = rows_and_positions(vocab, spread)
    z = z.to(dtype)
    nll, transport, gradient = in_float64(z, label, x)
    # exp on a GPU is 2^x of a rounded product: off by |x| eps, for logits within 80 of the largest.
    unit = EPS if device == "cpu" else 16 * EPS
    leaf, cost = z.to(device).requires_grad_(), LineCost(x.to(device))
    out = from_logits(leaf, label.to(device), impl, objective=curved, cost=cost, reduction="none")
    (made,) = torch.autograd.grad((out.loss * torch.linspace(-2, 3, 7, device=device)).sum(), leaf)
    assert out.cost is not None
    for got, want in ((out.nll, nll), (out.cost, transport)):
        torch.testing.assert_close(got.cpu().double(), want, rtol=32 * unit, atol=1e-30)
    error = (made.cpu().double() - gradient).abs() / gradient.abs().amax(-1, keepdim=True).clamp(min=1e-30)
    # Triton's interpreter truncates the digits that bfloat16 cannot hold, where a GPU rounds to the nearest.
    rounding = 0.0 if dtype == torch.float32 else 2 * torch.finfo(dtype).eps
    assert float(error.max()) < 64 * unit + rounding
    alone = from_logits(z.to(device), label.to(device), impl, objective=MLE(), reduction="none")
    assert torch.equal(alone.nll, out.nll)


@pytest.mark.parametrize(
    ("vocab", "spread"), [(1, 0.1), (2, 30.0), (15, 3.0), (16, 30.0), (17, 0.1), (1000, 3.0), (1000, 30.0)]
)
def test_values_and_gradients_against_float64(vocab: int, spread: float) -> None:
    assert_as_in_float64(vocab, spread, "chunked")


@pytest.mark.parametrize("at_label", [True, False])
def test_infinite_logits_raise(at_label: bool) -> None:
    """Finite inputs whose product overflows float32."""
    z = torch.randn(2, 40)
    z[1, 3 if at_label else 20] = 3e38
    with pytest.raises(ValueError, match="-log q is nan for label 3"):
        from_logits(z, torch.tensor([3, 3]), "chunked", objective=MLE(), logit_scale=10.0)


CODE = """
import os, torch
from threading import Thread
from otloss_llm import EMO, EmbeddingCost, linear_token_loss
def loss():
    h, w = torch.randn(40, 8, requires_grad=True), torch.randn(50, 8)
    linear_token_loss(h, w, torch.arange(40), objective=EMO(), cost=EmbeddingCost(w)).loss.backward()
loss()
assert torch.get_num_threads() == 1, torch.get_num_threads()  # numba sets their number when the first sweep runs
child = os.fork()
if not child:
    loss()
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
threads = [Thread(target=lambda: [loss() for _ in range(20)]) for _ in range(2)]
[t.start() for t in threads], [t.join() for t in threads]
"""


def test_threads_and_forks() -> None:
    """In a new process: torch keeps its number of threads, a fork has the kernels, two threads do not mix."""
    environment = {"OMP_NUM_THREADS": "1", "NUMBA_THREADING_LAYER": "workqueue", "PYTHONWARNINGS": "ignore"}
    done = subprocess.run(
        [sys.executable, "-c", CODE], capture_output=True, text=True, cwd=Path(__file__).parents[3], check=False,
        env=os.environ | environment, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
