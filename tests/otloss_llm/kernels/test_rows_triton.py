"""The Triton sweeps against their slow twin in float64, and the token loss through them.

On a CPU they run in Triton's interpreter, which checks values but no races; with `-m gpu` the same tests run compiled.
"""

from __future__ import annotations

import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from otloss_llm import EMO, MLE, EmbeddingCost, linear_token_loss
from otloss_llm.kernels import gradients as gradients_module
from otloss_llm.kernels import logits, rows, rows_triton
from otloss_llm.kernels.chunked import Tokens
from otloss_llm.kernels.gradients import Gradients
from otloss_llm.kernels.logits import Head, sweeps_for
from otloss_llm.kernels.rows import CostRows, RowSums
from otloss_llm.kernels.rows_triton import BLOCK
from tests.otloss_llm.oracles import OBJECTIVES, Problem, dense_values, problem, relative_error, truth
from tests.otloss_llm.scoring import fused, gradients

pytest.importorskip("triton")

EPS = torch.finfo(torch.float32).eps
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "cpu":
        monkeypatch.setenv("TRITON_INTERPRET", "1")  # read at each call, whenever Triton was imported
    elif not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    return request.param


def allowance(device: str) -> float:
    """exp of a GPU is that of 2^x after a rounded product: off by |x| eps, for logits within 80 of the largest."""
    return EPS if device == "cpu" else 16 * EPS


class Twins:
    """Both sweeps over the same numbers: Triton in the dtype of `z`, plain torch in float64."""

    def __init__(self, z: Tensor, label: Tensor, cost: CostRows | None, device: str) -> None:
        self.label, self.device = label, device
        self.given, self.cost = z.to(device), self._cost(cost, device)
        self.z = self.given.clone()
        self.sums = rows_triton.softmax_rows(self.z, label.to(device), self.cost)
        assert torch.equal(self.z.nan_to_num(), self.given.nan_to_num())  # the first sweep only reads
        self.slow_z, self.slow_cost = z.double(), self._cost(cost, torch.float64)
        self.slow_sums = rows.softmax_rows(self.slow_z, label, self.slow_cost)

    @staticmethod
    def _cost(cost: CostRows | None, to: Any) -> CostRows | None:
        return None if cost is None else CostRows(cost.rows.to(to), cost.which.to(to if isinstance(to, str) else None))

    @property
    def pairs(self) -> list[tuple[Tensor, Tensor]]:
        """(fast, slow) for each of the sums there are."""
        both = zip(self.sums, self.slow_sums, strict=True)
        return [(fast.cpu().double(), slow) for fast, slow in both if fast is not None and slow is not None]

    def gradient_error(self, generator: torch.Generator, with_beta: bool) -> tuple[Tensor, Tensor]:
        """Error of each entry of the gradient, and the size of the true one."""
        n = len(self.label)
        alpha, factor = torch.rand(n, generator=generator), torch.randn(n, generator=generator)
        beta = 3 * torch.randn(n, generator=generator) if with_beta else None
        for kernel, z, sums, cost, to in (
            (rows_triton, self.z, self.sums, self.cost, (self.device, torch.float32)),
            (rows, self.slow_z, self.slow_sums, self.slow_cost, ("cpu", torch.float64)),
        ):
            moved = [None if v is None else v.to(*to) for v in (alpha, beta, factor)]
            slopes = Tokens.of(sums).slopes(moved[0], moved[1], moved[2])  # type: ignore[arg-type]
            kernel.gradient_rows(z, sums.top, self.label.to(to[0]), cost, slopes)
        return (self.z.cpu().double() - self.slow_z).abs(), self.slow_z.abs()


def some(vocab: int, dtype: torch.dtype, *, spread: float = 3.0, tokens: int = 6) -> tuple[Tensor, Tensor, CostRows]:
    """Logits, labels (the third elsewhere), and four cost rows, one of them unused and one used twice or more."""
    generator = torch.Generator().manual_seed(vocab)
    z = (torch.randn(tokens, vocab, generator=generator) * spread).to(dtype)
    label = torch.randint(vocab, (tokens,), generator=generator)
    label[2] = -1
    matrix, which = torch.rand(4, vocab, generator=generator), torch.randint(3, (tokens,), generator=generator)
    if spread > 10 or vocab <= 2:  # near certainty c_y - D is lost in float32 unless c_y is 0
        matrix[which.repeat_interleave(tokens), label.clamp(min=0).repeat(tokens)] = 0.0
    return z, label, CostRows(matrix, which)


# ---- the sweeps ------------------------------------------------------------------------------------------------------


def assert_twins_agree(twins: Twins, *, with_beta: bool = True) -> None:
    unit = allowance(twins.device)
    for fast, slow in twins.pairs:
        torch.testing.assert_close(fast, slow, rtol=32 * unit, atol=1e-30)
    here = twins.label >= 0
    whole, slow_whole = (
        Tokens.of(RowSums(*(None if part is None else part.cpu()[here] for part in sums)))
        for sums in (twins.sums, twins.slow_sums)
    )
    torch.testing.assert_close(whole.nll.double(), slow_whole.nll, rtol=32 * unit, atol=1e-30)
    error, size = twins.gradient_error(torch.Generator().manual_seed(0), with_beta)
    rounding = torch.finfo(twins.z.dtype)
    scale = torch.where(here, size.amax(-1), torch.inf)[:, None]  # a label elsewhere: its row is no whole gradient
    # The interpreter cuts off the digits that bfloat16 has no room for, where a GPU rounds to the nearest.
    bound = (
        rounding.eps * (1 if twins.device == "cpu" else 0.5) * size + 64 * unit * scale + rounding.tiny * rounding.eps
    )
    assert (error <= bound).all(), (error - bound).max()


@pytest.mark.parametrize("vocab", [1, 2, 15, 17, 1000, BLOCK - 1, BLOCK, BLOCK + 1])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("use", ["no cost", "reported cost", "cost", "strided cost"])
def test_twins_agree(vocab: int, dtype: torch.dtype, use: str, device: str) -> None:
    z, label, cost = some(vocab, dtype)
    if use == "strided cost":
        cost = CostRows(torch.empty(vocab, 4).T.copy_(cost.rows), cost.which)
    twins = Twins(z, label, None if use == "no cost" else cost, device)
    assert_twins_agree(twins, with_beta="cost" in use.split()[-1] and use not in ("no cost", "reported cost"))


@pytest.mark.parametrize("spread", [0.0, 0.1, 30.0])
def test_flat_and_sharp_rows(spread: float, device: str) -> None:
    assert_twins_agree(Twins(*some(2 * BLOCK + 3, torch.float32, spread=spread), device))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_cost_rows_of_16_bits(dtype: torch.dtype, device: str) -> None:
    z, label, cost = some(100, torch.bfloat16)
    assert_twins_agree(Twins(z, label, CostRows(cost.rows.to(dtype), cost.which), device))


def test_near_certainty_and_masked_entries(device: str) -> None:
    z = torch.tensor([[40.0, 0.0, -math.inf, 1.0], [0.0, 30.0, -math.inf, -math.inf], [5.0, 5.0, 5.0, 5.0]])
    label = torch.tensor([0, 1, 3])
    matrix = torch.rand(3, 4).scatter_(1, label[:, None], 0.0)
    twins = Twins(z, label, CostRows(matrix, torch.arange(3)), device)
    assert_twins_agree(twins)
    nll = Tokens.of(twins.sums).nll
    assert float(nll[1]) == pytest.approx(math.exp(-30), rel=64 * allowance(device))  # log_softmax would say 0


def test_rows_with_nothing_but_masked_columns(device: str) -> None:
    z = torch.full((2, BLOCK + 5), -math.inf)
    z[1, BLOCK + 2] = 0.5
    twins = Twins(z, torch.tensor([-1, BLOCK + 2]), CostRows(torch.rand(1, BLOCK + 5), torch.zeros(2).long()), device)
    for fast, slow in twins.pairs:
        assert torch.equal(fast, slow)
    assert twins.sums.top.tolist() == [-math.inf, 0.5]
    assert twins.sums.others.tolist() == [0.0, 0.0]
    flat = torch.ones(2, device=device)
    rows_triton.gradient_rows(twins.z, twins.sums.top, torch.tensor([-1, BLOCK + 2], device=device), None,
                              rows.GradientCoefficients(flat, None, None, 7 * flat))  # fmt: skip
    assert twins.z.sum().item() == 7.0  # e is 0 in all of the first row, g at the label of the second


@pytest.mark.filterwarnings("ignore:invalid value encountered")  # numpy, in the interpreter
@pytest.mark.parametrize("broken", [math.nan, math.inf])
@pytest.mark.parametrize("where", [3, 20, BLOCK + 1])
def test_broken_logits_show(broken: float, where: int, device: str) -> None:
    z = torch.randn(2, BLOCK + 2)
    z[1, where] = broken
    twins = Twins(z, torch.tensor([3, 3]), CostRows(torch.rand(1, BLOCK + 2), torch.zeros(2).long()), device)
    assert torch.equal(twins.sums.top.isnan().cpu(), torch.tensor([False, True]))
    tokens = Tokens.of(twins.sums)
    assert tokens.nll[0].isfinite()
    assert not tokens.nll[1].isfinite()
    slopes = tokens.slopes(torch.ones(2, device=device), None, torch.ones(2, device=device))
    rows_triton.gradient_rows(twins.z, twins.sums.top, twins.label.to(device), None, slopes)
    assert twins.z[0].isfinite().all()


def test_columns_of_a_vocabulary_in_two_parts(device: str) -> None:
    """A row whose label lies in the other part has label -1 and contributes its sums only."""
    z, label, cost = some(30, torch.float32)
    label[2] = 10
    z[1, 10:] = -math.inf
    whole = rows.softmax_rows(z.double(), label, CostRows(cost.rows.double(), cost.which))
    parts = []
    for columns in (slice(0, 10), slice(10, 30)):
        local = torch.where((label >= columns.start) & (label < columns.stop), label - columns.start, -1)
        twins = Twins(z[:, columns].contiguous(), local, CostRows(cost.rows[:, columns], cost.which), device)
        parts.append(RowSums(*(part.cpu() for part in twins.sums if part is not None)))
    top = torch.maximum(parts[0].top, parts[1].top)
    for name in ("others", "others_cost"):
        total = sum(getattr(part, name) * (part.top - top).exp() for part in parts)
        torch.testing.assert_close(total.double(), getattr(whole, name), rtol=1e-6, atol=1e-12)
    assert torch.equal(torch.maximum(parts[0].z_y, parts[1].z_y).double(), whole.z_y)


def test_no_rows(device: str) -> None:
    none = torch.empty(0, 5, device=device)
    sums = rows_triton.softmax_rows(none, torch.empty(0, dtype=torch.long, device=device), None)
    assert sums.top.shape == (0,)


def test_rows_beyond_2_to_the_31(device: str) -> None:
    """Rows 2^30 entries apart, the third 2^31 from the first, of logits and of costs: an offset in int32 would wrap.

    8 GiB of address space, of which three rows each are touched.
    """
    try:
        apart = [torch.empty(2**31 + 8, dtype=torch.bfloat16, device=device).as_strided((3, 8), (2**30, 1))
                 for _ in range(2)]  # fmt: skip
    except RuntimeError:
        pytest.skip("no address space to spare")
    z, label, cost = some(8, torch.bfloat16, tokens=3)
    matrix, which = cost.rows[:3].bfloat16(), torch.tensor([2, 1, 2])
    apart[0].copy_(z)
    apart[1].copy_(matrix)
    label[2] = 5
    sums = rows_triton.softmax_rows(apart[0], label.to(device), CostRows(apart[1], which.to(device)))
    twins = Twins(z, label, CostRows(matrix, which), device)
    for far, near in zip(sums, twins.sums, strict=True):
        assert far is not None
        assert near is not None
        assert torch.equal(far, near)
    ones = torch.ones(3, device=device)
    for logits_, costs in ((apart[0], apart[1]), (twins.z, matrix.to(device))):
        slopes = Tokens.of(sums).slopes(ones, ones, ones)
        rows_triton.gradient_rows(logits_, sums.top, label.to(device), CostRows(costs, which.to(device)), slopes)
    assert torch.equal(apart[0].cpu(), twins.z.cpu())


COMPILE = """
import warnings; warnings.simplefilter("ignore")
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile
from otloss_llm.kernels import rows_triton
integers = {"z_stride", "cost_stride", "columns", "rows"}
for kernel in rows_triton._kernels(False):
    names = kernel.arg_names
    fixed = {"cost_step": 1, "WITH_COST": True, "BLOCK": rows_triton.BLOCK}
    types = {"z": "*bf16", "costs": "*bf16", "label": "*i64", "which": "*i64"} | dict.fromkeys(integers, "i32")
    signature = {name: "constexpr" if name in fixed else types.get(name, "*fp32") for name in names}
    even = {(i,): [["tt.divisibility", 16]] for i, name in enumerate(names) if name not in fixed and name != "rows"}
    options = {"num_warps": rows_triton.WARPS, "enable_fp_fusion": True}
    made = compile(ASTSource(kernel, signature, fixed, even), target=GPUTarget("cuda", 90, 32), options=options)
    print(kernel.__name__, made.asm["ptx"].count("ld.global.v4"), made.asm["ptx"].count("ld.local"))
"""


def test_they_compile_for_a_gpu_that_is_not_here() -> None:
    """For Hopper, with 16-byte loads of logits and costs (two each for 16 columns a thread) and nothing spilled."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-c", COMPILE], capture_output=True, text=True, env=environment,
                          cwd=Path(__file__).parents[3], timeout=120)  # fmt: skip
    if "ImportError" in done.stderr:
        pytest.skip(f"this Triton compiles otherwise: {done.stderr.splitlines()[-1]}")
    assert done.stdout.splitlines() == ["_softmax 4 0", "_gradient 4 0"], done.stderr


# ---- the token loss --------------------------------------------------------------------------------------------------


def moved(given: Problem, device: str) -> Problem:
    bias = None if given.bias is None else given.bias.to(device)
    tensors = (given.hidden.to(device), given.weight.to(device), bias, given.labels.to(device))
    return Problem(*tensors, given.embedding.to(device), given.scale, given.softcap)


SETTINGS = {
    "bias": {},
    "no bias": {"bias": False},
    "soft cap": {"softcap": 5.0},
    "scale": {"scale": -1.7},
    "both": {"scale": 0.3, "softcap": 2.0},
}


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", OBJECTIVES)
def test_errors_are_those_of_the_naive_computation(name: str, dtype: torch.dtype, setting: str, device: str) -> None:
    """Of loss, hidden, weight and bias: at most twice the error of the naive computation + 4 eps (1 of 16 bits)."""
    if setting not in ("bias", "soft cap") and name not in ("emo", "user"):
        return
    changes = dict(SETTINGS[setting])
    given = problem(5, batch=(16,), bias=changes.pop("bias", True), dtype=dtype)
    for key, value in changes.items():
        setattr(given, key, value)
    objective, formula = OBJECTIVES[name]
    value, expected = truth(given, formula, -2.5)
    leaves = given.leaves()
    naive_loss = dense_values(leaves, given, formula)[0].sum()
    naive = [naive_loss, *gradients(naive_loss * -2.5, leaves)]
    there = moved(given, device)
    leaves = there.leaves()
    loss = fused(leaves, there, objective=objective, reduction="sum", impl="triton", chunk_size=5).loss
    made = [loss, *gradients(loss * -2.5, leaves)]
    eps = torch.finfo(dtype).eps * (4 if dtype == torch.float32 else 1)
    for got, other, true in zip(made, naive, [value.sum(), *expected], strict=True):
        assert relative_error(got.cpu(), true) <= 2 * relative_error(other, true) + eps


@pytest.mark.parametrize("reduction", ["mean", "sum", "none", "num_items"])
@pytest.mark.parametrize("name", ["mle", "emo", "user"])
def test_reductions_against_the_reference(name: str, reduction: str, device: str) -> None:
    given = moved(problem(1, batch=(4, 5), dtype=torch.float32), device)
    settings: dict[str, Any] = {"num_items": 50} if reduction == "num_items" else {"reduction": reduction}
    upstream = torch.randn(4, 5, device=device) if reduction == "none" else torch.tensor(-2.5, device=device)
    results = []
    for impl, each in (("triton", given), ("reference", given.to(torch.float64))):
        leaves = each.leaves()
        out = fused(leaves, each, objective=OBJECTIVES[name][0], impl=impl, **settings)
        assert out.cost is not None
        results.append([out.loss.detach(), out.nll, out.cost, *gradients((out.loss * upstream).sum(), leaves)])
    for got, want in zip(*results, strict=True):
        assert got.shape == want.shape
        assert relative_error(got, want) < 1e-5


@pytest.mark.parametrize("labels", ["one", "all", "none"])
@pytest.mark.parametrize("chunk_size", [5, None])  # 11 tokens: the last chunk has one
def test_label_patterns(labels: str, chunk_size: int | None, device: str) -> None:
    given = problem(4, batch=(11,), dtype=torch.float32)
    given.labels = {"one": torch.full((11,), 5), "all": torch.randperm(41)[:11], "none": torch.full((11,), -100)}[
        labels
    ]
    given = moved(given, device)
    for reduction in ("mean", "none"):
        results = []
        for impl, each in (("triton", given), ("reference", given.to(torch.float64))):
            leaves = each.leaves()
            loss = fused(leaves, each, objective=EMO(), impl=impl, chunk_size=chunk_size, reduction=reduction).loss
            results.append([loss.detach(), *gradients(loss.sum(), leaves)])
        for got, want in zip(*results, strict=True):
            assert relative_error(got, want) < 1e-5
            assert labels != "none" or not got.any()


def test_bfloat16_logits_are_never_widened(device: str) -> None:
    from torch.utils._python_dispatch import TorchDispatchMode

    class Widest(TorchDispatchMode):
        seen = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = func(*args, **(kwargs or {}))
            for tensor in out if isinstance(out, (tuple, list)) else [out]:
                if isinstance(tensor, Tensor) and tensor.dtype == torch.float32:
                    self.seen = max(self.seen, tensor.numel())
            return out

    given = moved(problem(15, batch=(32,), vocab=64, width=4, ignored=0.0, dtype=torch.bfloat16), device)
    for cap, expected in ((None, 64 * 4), (3.0, 16 * 64)):  # the gradient of the head; logits where a cap is
        given.softcap = cap
        with Widest() as widest:
            fused(given.leaves(), given, objective=MLE(), cost=None, chunk_size=16, impl="triton").loss.backward()
        assert widest.seen == expected


def test_cost_rows_made_in_16_bits(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU: the gradient moves by no more than roundings do, and duplicates stay free."""
    given = problem(21, batch=(16,), vocab=300, width=64, dtype=torch.bfloat16)
    given.embedding[7] = 2 * given.embedding[3]
    given.embedding[20] = 0.0
    given = moved(given, device)
    cost = EmbeddingCost(given.embedding, near_duplicates="keep")
    results = []
    for dtype in (torch.float32, torch.bfloat16):
        monkeypatch.setattr(Head, "cost_dtype", lambda self, weight, dtype=dtype: dtype)
        leaves = given.leaves()
        out = fused(leaves, given, objective=EMO(), cost=cost, impl="triton")
        results.append([out.loss.detach(), *gradients(out.loss, leaves)])
    assert not torch.equal(results[0][1], results[1][1])
    for got, want in zip(results[1], results[0], strict=True):
        assert relative_error(got, want) < 2 * torch.finfo(torch.bfloat16).eps
    index = torch.tensor([3, 20], device=device)
    narrow = cost.rows(index, out=torch.empty(600, dtype=torch.bfloat16, device=device))
    assert narrow.dtype == torch.bfloat16
    torch.testing.assert_close(narrow.float(), cost.rows(index), rtol=1e-2, atol=1e-2)
    assert narrow[0, [3, 7]].tolist() == [0.0, 0.0]
    assert narrow[1, 19:22].tolist() == [1.0, 0.0, 1.0]


# ---- choice of the kernel, and what goes with it ---------------------------------------------------------------------


def call(impl: str, dtype: torch.dtype = torch.float32) -> Any:
    hidden, weight = torch.randn(3, 4, dtype=dtype), torch.randn(7, 4, dtype=dtype)
    return linear_token_loss(hidden, weight, torch.tensor([1, 2, 3]), objective=MLE(), impl=impl)


def test_refusals(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(ValueError, match=r'got device cpu, expected a CUDA tensor.*TRITON_INTERPRET=1.*impl="chunked"'):
        call("triton")
    with pytest.raises(ValueError, match=r"got torch\.float64, expected float32"):
        call("triton", torch.float64)
    monkeypatch.setattr(rows_triton, "triton", None)
    with pytest.raises(ImportError, match=r'needs Triton.*builds of torch for CUDA.*impl="chunked"'):
        call("triton")


@pytest.mark.parametrize("impl", ["auto", "chunked"])
def test_a_cpu_has_its_own_sweeps(impl: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    for dtype in (torch.float32, torch.float64):
        assert sweeps_for(torch.empty(1, 1, dtype=dtype), impl) is not rows_triton


@pytest.mark.gpu
def test_auto_on_a_gpu() -> None:
    z = torch.empty(1, 1, device="cuda")
    assert sweeps_for(z, "auto") is rows_triton
    assert sweeps_for(z, "chunked") is sweeps_for(z.double(), "auto") is rows


def test_auto_without_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    on_gpu: Any = type("OnGpu", (), {"device": torch.device("cuda"), "dtype": torch.bfloat16})()
    assert logits.runs_on_triton(on_gpu, "auto")
    assert not logits.runs_on_triton(on_gpu, "chunked")
    monkeypatch.setattr(logits, "_triton_is_installed", lambda: False)
    assert not logits.runs_on_triton(on_gpu, "auto")


def test_chunks_on_a_gpu_are_large() -> None:
    head = Head(MLE())
    assert head.rows_per_chunk(128256, "cuda") == 2048
    assert head.rows_per_chunk(50257, "cpu") == 656
    assert head.rows_per_chunk(500, "cpu") == 1024
    assert Head(MLE(), chunk_size=7).rows_per_chunk(128256, "cuda") == 7


@pytest.mark.parametrize("in_place", [True, False])
def test_weight_gradients_of_16_bits_add_up_in_float32(
    in_place: bool, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if in_place and not gradients_module._has_float32_products(torch.device(device), torch.bfloat16):
        pytest.skip("no such products here")
    monkeypatch.setattr(gradients_module, "_has_float32_products", lambda *_: in_place)
    monkeypatch.setattr(gradients_module, "SLAB_ROWS", 8)
    dz, hidden = (torch.randn(2, 5, n, dtype=torch.bfloat16, device=device) for n in (21, 6))
    total = torch.full((21, 6), torch.nan, device=device)
    for chunk in range(2):
        gradients_module._add_in_float32(total, dz[chunk].T, hidden[chunk], fresh=chunk == 0)
    true = (dz.double().mT @ hidden.double()).sum(0)
    assert relative_error(total, true) < (1e-6 if in_place else 4e-3)


@pytest.mark.gpu
def test_gradients_of_a_gpu_need_no_second_head() -> None:
    """One chunk more takes no memory of the size of the head beyond the float32 sum."""
    hidden, weight = (torch.randn(n, 64, dtype=torch.bfloat16, device="cuda") for n in (32, 2**17))
    total = Gradients.like(hidden, weight, None, (False, True, False))
    for _ in range(2):
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        total.add(torch.arange(32, device="cuda"), torch.randn(32, 2**17, device="cuda").bfloat16(), hidden, weight)
    assert torch.cuda.max_memory_allocated() - before < 32 * 2**17 * 8 + 2**23
