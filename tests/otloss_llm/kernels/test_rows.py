"""The compiled sweeps against their slow twin in float64."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from numba import njit
from torch import Tensor

from otloss_llm.kernels import rows, rows_numba
from otloss_llm.kernels.chunked import Tokens
from otloss_llm.kernels.rows import CostRows
from otloss_llm.kernels.rows_numba import _exp

EPS = torch.finfo(torch.float32).eps


class Sweeps:
    """Both sweeps of one implementation over the same logits, in its own dtype and layout."""

    def __init__(self, kernel: ModuleType, z: Tensor, label: Tensor, cost: CostRows | None) -> None:
        dtype = torch.float64 if kernel is rows else torch.float32
        self.kernel, self.label, self.dtype = kernel, label, dtype
        self.cost = None if cost is None else CostRows(cost.rows.to(dtype), cost.which)
        self.z = (
            z.to(dtype).T.clone(memory_format=torch.contiguous_format).T
            if kernel is rows_numba
            else z.to(dtype).clone()
        )
        self.tokens = Tokens.of(kernel.softmax_rows(self.z, label, self.cost))

    def gradient(self, alpha: Tensor, beta: Tensor | None, factor: Tensor) -> Tensor:
        wide = [None if v is None else v.to(self.dtype) for v in (alpha, beta, factor)]
        slopes = self.tokens.slopes(*wide)
        self.kernel.gradient_rows(self.z, self.tokens.sums.top, self.label, self.cost, slopes)
        return self.z


def both(z: Tensor, label: Tensor, cost: CostRows | None) -> tuple[Sweeps, Sweeps]:
    """The same float32 numbers through the compiled sweeps and, in float64, through torch."""
    return Sweeps(rows_numba, z, label, cost), Sweeps(rows, z, label, cost)


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
    beyond = np.array([-87.1, -1e4, -np.inf, np.nan], dtype=np.float32)
    each(beyond, out[:4])
    assert (out[:3] == 0).all()
    assert np.isnan(out[3])


@pytest.mark.parametrize("vocab", [1, 2, 15, 16, 17, 1000])
@pytest.mark.parametrize("spread", [0.1, 3.0, 30.0])
@pytest.mark.parametrize("use", ["no cost", "reported cost", "cost"])
def test_twins_agree(vocab: int, spread: float, use: str) -> None:
    generator = torch.Generator().manual_seed(vocab)
    tokens = 7
    z = torch.randn(tokens, vocab, generator=generator) * spread
    label = torch.randint(vocab, (tokens,), generator=generator)
    cost = None
    if use != "no cost":
        matrix, which = torch.rand(tokens, vocab, generator=generator), torch.arange(tokens).flip(0)
        if spread > 10:
            # Near certainty c_y - D is lost in float32 unless c_y is 0, which it is for a cost of a vocabulary.
            matrix[which, label] = 0.0
        cost = CostRows(matrix, which)
    fast, slow = both(z, label, cost)
    assert relative(fast.tokens.nll, slow.tokens.nll) < 16 * EPS
    if slow.tokens.transport is not None and fast.tokens.transport is not None:
        assert relative(fast.tokens.transport, slow.tokens.transport) < 16 * EPS
    alpha, factor = torch.rand(tokens, generator=generator), torch.randn(tokens, generator=generator)
    beta = 3 * torch.randn(tokens, generator=generator) if use == "cost" else None
    got, want = fast.gradient(alpha, beta, factor), slow.gradient(alpha, beta, factor)
    scale = want.abs().amax(-1, keepdim=True)
    assert float(((got - want).abs() / scale.clamp(min=1e-30)).max()) < 32 * EPS


@pytest.mark.parametrize("kernel", [rows, rows_numba])
def test_columns_of_a_vocabulary_in_two_parts(kernel: ModuleType) -> None:
    """A row whose label lies in the other part has label -1 and contributes its sums only."""
    generator = torch.Generator().manual_seed(0)
    z, matrix = torch.randn(5, 30, generator=generator), torch.rand(5, 30, generator=generator)
    label, which = torch.tensor([0, 9, 10, 29, 17]), torch.arange(5)
    z[1, 10:] = -math.inf  # nothing but masked columns in the second part
    whole = Sweeps(rows, z, label, CostRows(matrix, which)).tokens.sums
    parts = []
    for columns, first in ((slice(0, 10), 0), (slice(10, 30), 10)):
        local = torch.where((label >= first) & (label < columns.stop), label - first, -1)
        parts.append(Sweeps(kernel, z[:, columns], local, CostRows(matrix[:, columns], which)).tokens.sums)
    top = torch.maximum(parts[0].top, parts[1].top)
    for name in ("others", "others_cost"):
        total = sum(getattr(part, name) * (part.top - top).exp() for part in parts)
        torch.testing.assert_close(total.double(), getattr(whole, name), rtol=1e-6, atol=1e-12)
    assert torch.equal(torch.maximum(parts[0].z_y, parts[1].z_y).double(), whole.z_y)
    torch.testing.assert_close((parts[0].c_y + parts[1].c_y).double(), whole.c_y)


def test_a_factor_for_all_tokens() -> None:
    z, label = torch.randn(5, 9), torch.tensor([0, 1, 2, 3, 4])
    ones, half = torch.ones(5), torch.tensor(0.5)
    one = Sweeps(rows_numba, z, label, None).gradient(ones, None, ones)
    scaled = Sweeps(rows_numba, z, label, None).gradient(ones, None, half)
    torch.testing.assert_close(scaled, 0.5 * one)


def test_near_certainty_and_masked_entries() -> None:
    z = torch.tensor([[40.0, 0.0, -math.inf, 1.0], [0.0, 30.0, -math.inf, -math.inf], [5.0, 5.0, 5.0, 5.0]])
    fast, slow = (
        sweeps.tokens for sweeps in both(z, torch.tensor([0, 1, 3]), CostRows(torch.rand(3, 4), torch.arange(3)))
    )
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
    nll = Sweeps(rows_numba, z, torch.tensor([3, 3]), None).tokens.nll
    assert math.isfinite(float(nll[0]))
    assert not math.isfinite(float(nll[1]))


def test_a_masked_label_is_infinitely_unlikely() -> None:
    z = torch.randn(1, 8)
    z[0, 2] = -math.inf
    assert float(Sweeps(rows_numba, z, torch.tensor([2]), None).tokens.nll) == math.inf


def test_threads_are_left_as_they_were() -> None:
    """In a fresh process: numba starts its threads, and sets their number, when the first sweep runs."""
    code = (
        "import torch\n"
        "from otloss_llm import EMO, EmbeddingCost, linear_token_loss\n"
        "h, w = torch.randn(40, 8, requires_grad=True), torch.randn(50, 8)\n"
        "loss = linear_token_loss(h, w, torch.arange(40), objective=EMO(), cost=EmbeddingCost(w)).loss\n"
        "assert torch.get_num_threads() == 1, torch.get_num_threads()\n"
        "loss.backward()\n"
        "assert torch.get_num_threads() == 1, torch.get_num_threads()"
    )
    done = in_a_fresh_process(code, OMP_NUM_THREADS="1")
    assert done.returncode == 0, done.stderr


def in_a_fresh_process(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=Path(__file__).parents[3], check=False,
        env=os.environ | environment, timeout=120,
    )  # fmt: skip


LOSS = (
    "import torch\n"
    "from otloss_llm import EMO, EmbeddingCost, linear_token_loss\n"
    "def loss():\n"
    "    h, w = torch.randn(40, 8, requires_grad=True), torch.randn(50, 8)\n"
    "    linear_token_loss(h, w, torch.arange(40), objective=EMO(), cost=EmbeddingCost(w)).loss.backward()\n"
)


def test_without_a_place_for_compiled_code() -> None:
    """A read-only installation and no home: compiled at every start, but compiled."""
    code = "from numba.core.caching import CacheImpl\nCacheImpl._locator_classes = []\n" + LOSS + "loss()"
    done = in_a_fresh_process(code)
    assert done.returncode == 0, done.stderr


def test_a_forked_process_has_the_kernels() -> None:
    """On one thread, as torch's loader sets its forked workers: GNU's OpenMP waits for threads left in the parent."""
    code = LOSS + "import os\nloss()\nchild = os.fork()\nif not child: torch.set_num_threads(1); loss(); os._exit(0)\n"
    done = in_a_fresh_process(code + "assert os.waitpid(child, 0)[1] == 0", PYTHONWARNINGS="ignore")
    assert done.returncode == 0, done.stderr


def test_two_threads_at_once() -> None:
    code = LOSS + (
        "from threading import Thread\n"
        "threads = [Thread(target=lambda: [loss() for _ in range(20)]) for _ in range(2)]\n"
        "[t.start() for t in threads], [t.join() for t in threads]"
    )
    done = in_a_fresh_process(code, NUMBA_THREADING_LAYER="workqueue")
    assert done.returncode == 0, done.stderr
