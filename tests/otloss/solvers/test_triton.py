"""Small problems by the Triton kernel against the torch implementation and float64, and how the kernel compiles.

On a CPU it runs in Triton's interpreter, which checks values but no races; with `-m gpu` the same tests run on a GPU.
"""

import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from otloss import cloud_loss, nn, sinkhorn, solve
from otloss.costs import Cost, DenseCost, PointCost
from otloss.solvers.convergence import ConvergenceWarning
from otloss.solvers.entropic import sinkhorn_gpu
from otloss.solvers.entropic.interface import Budget, SearchResult
from otloss.solvers.entropic.sinkhorn import Sinkhorn
from otloss.solvers.entropic.sinkhorn_kernels import small_triton
from otloss.solvers.options import Settings
from otloss.solvers.problem import Problem, pose
from tests.largest_tensor import LargestTensor
from tests.samples import sampled

triton = pytest.importorskip("triton")
N, M = 7, 9
BUDGET = Budget(1e-4, 500, patience=250)


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "cpu":
        monkeypatch.setenv("TRITON_INTERPRET", "1")
        monkeypatch.setattr(small_triton, "TILE", small_triton.Tile(16, 16))  # few tiles: each takes long here
    elif not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    return str(request.param)


def draw(device: str, *, batch: int = 2, axes: int = 2) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return weights, some of them 0, and two clouds of different sizes."""
    generator = torch.Generator().manual_seed(3)
    p, q = (torch.rand(batch, k, generator=generator) + 0.1 for k in (N, M))
    p[0, 3], q[-1, :4] = 0.0, 0.0
    p, q = (weights / weights.sum(-1, keepdim=True) for weights in (p, q))
    x, y = (torch.randn(batch, k, axes, generator=generator) for k in (N, M))
    return p.to(device), q.to(device), x.to(device), (y + 0.3).to(device)


def as_matrix(x: Tensor, y: Tensor) -> Cost:
    return DenseCost(torch.cdist(x[0], y[0]))  # one for all problems


def between(x: Tensor, y: Tensor, kind: str) -> Cost:
    return as_matrix(x, y) if kind == "matrix" else PointCost(x, y, metric=kind)


def problem_of(p: Tensor, q: Tensor, cost: Cost, **options: Any) -> Problem:
    epsilon = options.pop("epsilon", 1.0)
    return pose(p, q, cost, epsilon=epsilon, settings=Settings(**options))


def assert_same(got: SearchResult, want: SearchResult, *, balanced: bool, tolerance: float = 2e-5) -> None:
    """Potentials up to the constant of balanced problems."""
    for ours, theirs in ((got.f, want.f), (got.g, want.g)):
        apart = ours - theirs
        torch.testing.assert_close(
            apart - apart.mean(-1, keepdim=True) * balanced, torch.zeros_like(apart), atol=tolerance, rtol=0
        )


@pytest.mark.parametrize(
    ("kind", "axes", "penalty", "epsilon"),
    [("sqeuclidean", 2, None, 3.0), ("euclidean", 3, 0.5, 0.5), ("l1", 1, (0.3, None), 2.0), ("matrix", 1, None, 0.2),
     ("cosine", 2, (None, 2.0), 1.0)],
)  # fmt: skip
def test_equals_the_reference_implementation(kind: str, axes: int, penalty: Any, epsilon: float, device: str) -> None:
    """Potentials, errors and, up to the checks of torch, iterations; weights of 0, n != m, stages of epsilon."""
    p, q, x, y = draw(device, axes=axes)
    problem = problem_of(p, q, between(x, y, kind), epsilon=epsilon, marginal_penalty=penalty)
    got, want = small_triton.solve_small(problem, None, BUDGET), Sinkhorn().run(problem, None, BUDGET)
    assert got.f.shape == (2, N)
    assert_same(got, want, balanced=penalty is None, tolerance=2e-4)
    assert bool((got.error <= BUDGET.tolerance).all())
    if device == "cpu":
        assert int((got.iterations - want.iterations).abs().max()) <= 2


def test_symmetric_problems_and_a_start(device: str) -> None:
    p, _, x, _ = draw(device)
    problem = problem_of(p[:1], p[:1], PointCost(x[:1]), epsilon=3.0)
    plain = small_triton.solve_small(problem, None, BUDGET)
    symmetric = Problem(**(vars(problem) | {"is_symmetric": True}))
    got = small_triton.solve_small(symmetric, None, BUDGET)
    torch.testing.assert_close(got.f, got.g, atol=2e-4, rtol=0)
    assert_same(got, plain, balanced=True, tolerance=2e-4)
    again = small_triton.solve_small(problem, plain.start, BUDGET)
    assert int(again.iterations.max()) <= 2 < int(plain.iterations.min())


@pytest.mark.parametrize(
    ("largest_side", "metric", "axes", "epsilon", "offset"),
    [(sinkhorn_gpu.LARGEST_SIDE, "sqeuclidean", 2, 3.0, 0.0), (4, "sqeuclidean", 2, 3.0, 0.0),
     (sinkhorn_gpu.LARGEST_SIDE, "euclidean", 3, 2.0, 100.0), (4, "l1", 1, 2.0, 100.0),
     (sinkhorn_gpu.LARGEST_SIDE, "cosine", 64, 1.0, 0.0), (4, "sqeuclidean", 17, 30.0, 100.0)],
)  # fmt: skip
def test_values_and_gradients_against_float64(
    largest_side: int, metric: str, axes: int, epsilon: float, offset: float, device: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """The divergence between clouds, in one launch and by streams, errs by at most 1.5 times torch's error + 5e-5."""
    p, q, x, y = draw(device, batch=1, axes=axes)
    x, y = x + offset, y + offset
    monkeypatch.setattr(sinkhorn_gpu, "LARGEST_SIDE", largest_side)

    def values(impl: str, dtype: torch.dtype) -> list[Tensor]:
        leaves = [t.to(dtype).requires_grad_() for t in (p, q, x, y)]
        value = cloud_loss(
            leaves[2], leaves[3], leaves[0], leaves[1], metric=metric, epsilon=epsilon, tolerance=2e-5, impl=impl
        ).sum()
        return [value.detach(), *torch.autograd.grad(value, leaves)]

    exact = values("torch", torch.float64)
    pairs = zip(values("triton", torch.float32), values("torch", torch.float32), exact, strict=True)
    for ours, naive, true in pairs:
        limit = 1.5 * float((naive - true).abs().max()) + 5e-5
        assert float((ours - true).abs().max()) <= limit


@pytest.mark.parametrize(
    ("form", "largest_side"),
    sampled(
        3,
        [
            ("partial", 4),
            ("forbidden", sinkhorn_gpu.LARGEST_SIDE),
            ("forbidden, unbalanced", 4),
            ("partial", sinkhorn_gpu.LARGEST_SIDE),
            ("forbidden", 4),
            ("forbidden, unbalanced", sinkhorn_gpu.LARGEST_SIDE),
        ],
    ),
)
def test_partial_problems_and_forbidden_pairs_against_float64(
    form: str, largest_side: int, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Values, gradients, plans and their products: at most 1.5 times the error of dense float32, + 1e-5."""
    p, q, x, y = draw(device)
    monkeypatch.setattr(sinkhorn_gpu, "LARGEST_SIDE", largest_side)
    matrix, options = torch.cdist(x, y), {"mass": torch.tensor([0.4, 0.8], device=device)}
    if form != "partial":
        matrix[:, 0, :4], matrix[1, :, 5] = torch.inf, matrix[1, :, 5] - 0.5
        options = {"marginal_penalty": 0.5} if "unbalanced" in form else {}

    def results(impl: str, dtype: torch.dtype) -> list[Tensor]:
        leaves = [t.to(dtype).requires_grad_() for t in (p, q, matrix)]
        given = {name: t.to(dtype) if isinstance(t, Tensor) else t for name, t in options.items()}
        solution = solve(*leaves, epsilon=0.3, tolerance=1e-6, impl=impl, **given)
        assert bool(solution.converged.all())
        moved = (solution.apply(y.to(dtype)), solution.apply_transpose(x.to(dtype)))
        return [t.detach() for t in (solution.value, solution.plan(), *moved)] + list(
            torch.autograd.grad(solution.value.sum(), leaves)
        )

    exact = results("torch", torch.float64)
    pairs = zip(results("triton", torch.float32), results("torch", torch.float32), exact, strict=True)
    for ours, naive, true in pairs:
        assert float((ours - true).abs().max()) <= 1.5 * float((naive - true).abs().max()) + 1e-5


@pytest.mark.parametrize("penalty", [None, 0.5])
def test_products_with_plans_of_points_make_no_matrix(
    penalty: float | None, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sinkhorn_gpu, "LARGEST_SIDE", 64)
    generator = torch.Generator().manual_seed(0)
    x, y = (torch.randn(n, 2, generator=generator).to(device) for n in (80, 90))
    p, q = (torch.rand(n, generator=generator).to(device) + 0.1 for n in (80, 90))
    p[2], q[3] = 0.0, 0.0
    p, q = p / p.sum(), q / q.sum()
    solution = solve(p, q, PointCost(x, y), epsilon=2.0, marginal_penalty=penalty, impl="triton")
    exact = solve(p.double(), q.double(), PointCost(x.double(), y.double()), epsilon=2.0, marginal_penalty=penalty)
    with LargestTensor() as largest:
        products = solution.apply(y), solution.apply_transpose(x), solution.barycentric_map(y)
    assert largest.entries < 80 * 90 / 4
    wanted = exact.apply(y.double()), exact.apply_transpose(x.double()), exact.barycentric_map(y.double())
    assert bool(products[2][2].isnan().all())  # no mass there
    for product, want in zip(products, wanted, strict=True):
        torch.testing.assert_close(product.double(), want, atol=1e-4, rtol=1e-4, equal_nan=True)


@pytest.mark.parametrize("kind", ["sqeuclidean", "matrix"])
def test_barycentric_maps_of_rows_whose_plan_underflows(kind: str, device: str) -> None:
    p, q, x, y = (t[0] for t in draw(device))
    p[1], p[2] = 2e-38, 1e-44  # divided among the columns below what float32 holds
    p = p / p.sum()
    cost = DenseCost(torch.cdist(x, y)) if kind == "matrix" else PointCost(x, y)
    exact = solve(p.double(), q.double(), cost.to(torch.float64), epsilon=2.0, tolerance=1e-10)
    shares = exact.plan() / exact.plan().sum(-1, keepdim=True)
    actual = solve(p, q, cost, epsilon=2.0, impl="triton").barycentric_map(y)
    assert bool(actual[3].isnan().all())  # no mass there
    torch.testing.assert_close(actual.double(), shares @ y.double(), atol=1e-4, rtol=1e-4, equal_nan=True)


def test_what_does_not_converge_or_is_not_a_number_says_so(device: str) -> None:
    p, q, x, y = draw(device)
    problem = problem_of(p, q, PointCost(x, y), epsilon=0.3)
    few = small_triton.solve_small(problem, None, Budget(1e-5, 4))
    assert few.iterations.tolist() == [4, 4]
    assert bool((few.error > 1e-5).all())
    assert bool(few.f.isfinite().all())
    slow = small_triton.solve_small(
        problem_of(p, q, PointCost(x, y), epsilon=0.02), None, Budget(1e-5, 500, patience=2)
    )
    assert int(slow.iterations.max()) <= 24  # the stages, and as many as it has patience for
    matrices = torch.cdist(x, y)
    matrices[1, 2, 3] = torch.nan
    broken = Problem(**(vars(problem) | {"cost": DenseCost.unchecked(matrices)}))
    bad = small_triton.solve_small(broken, None, BUDGET)
    assert bad.error.isfinite().tolist() == [True, False]
    assert bool(bad.f[1].isnan().all())
    assert int(bad.iterations[1]) <= 3
    with pytest.warns(ConvergenceWarning):
        solve(p[:1], q[:1], PointCost(x[:1], y[:1]), epsilon=0.5, max_iterations=2, impl="triton")


def test_empty_batches(device: str) -> None:
    p, q, x, y = (t[:0] for t in draw(device))
    assert sinkhorn(p, q, PointCost(x, y), epsilon=1.0, impl="triton").shape == (0,)


# ---- choice ----------------------------------------------------------------------------------------------------------


def test_where_it_cannot_run_it_raises() -> None:
    p, q, x, y = draw("cpu")
    with pytest.raises(ValueError, match=r'got device cpu, expected CUDA tensors.*TRITON_INTERPRET=1.*impl="torch"'):
        sinkhorn(p, q, PointCost(x, y), epsilon=1.0, impl="triton")
    with pytest.raises(ValueError, match=r"got torch\.float64, expected float32"):
        sinkhorn(p.double(), q.double(), PointCost(x.double(), y.double()), epsilon=1.0, impl="triton")
    with pytest.raises(ValueError, match="got device cpu"):
        nn.CloudLoss(epsilon=1.0, impl="triton")(x, y)
    with pytest.raises(ValueError, match='impl given for kind="emd"'):
        cloud_loss(x, y, kind="emd", impl="triton")


def test_auto_takes_it_only_where_a_table_lists_the_size(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert not sinkhorn_gpu.is_listed("NVIDIA H100", "points", 10_000, 8)  # nothing is measured yet
    table = tmp_path / "sizes.csv"
    table.write_text("device,kind,problems,side\nNVIDIA H100,points,64,256\n")
    monkeypatch.setattr(sinkhorn_gpu, "SIZES", table)
    assert sinkhorn_gpu.is_listed("NVIDIA H100", "points", 64, 256)
    for other in (("NVIDIA A100", "points", 64, 256), ("NVIDIA H100", "matrix", 64, 256),
                  ("NVIDIA H100", "points", 63, 256), ("NVIDIA H100", "points", 64, 257)):  # fmt: skip
        assert not sinkhorn_gpu.is_listed(*other)


# ---- compiling -------------------------------------------------------------------------------------------------------

POINTERS = {"potentials": "*fp32", "weights": "*fp32", "costs": "*fp32", "owner": "*i64", "cost_stride": "i64",
            "numbers": "*fp32", "outcome": "*fp32", "n": "i32", "m": "i32", "tolerance": "fp32",
            "largest_change": "fp32", "patience": "fp32", "max_iterations": "i32"}  # fmt: skip


def compiled(capability: int, metric: int, axes: int, *, symmetric: bool, balanced: bool) -> Any:
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    constants = {
        "METRIC": metric, "DIM": axes, "SYMMETRIC": symmetric, "BALANCED": balanced, "ROWS": 16 if axes <= 4 else 8,
        "COLUMNS": 128, **small_triton._CONSTANTS,
    }  # fmt: skip
    signature = POINTERS | dict.fromkeys(constants, "constexpr")
    source = ASTSource(fn=triton.jit(small_triton._whole), signature=signature, constexprs=constants)
    options = {"num_warps": 4, "enable_fp_fusion": True}
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="kernels are interpreted")
@pytest.mark.parametrize(
    ("capability", "metric", "axes", "symmetric", "balanced"),
    [(90, 1, 3, False, True), (80, 0, 0, False, True)]
    + [pytest.param(capability, *case, marks=pytest.mark.slow) for capability in (80, 90)
       for case in ((2, 8, False, False), (3, 2, True, True), (1, 3, True, False))],
)  # fmt: skip
def test_compiles_without_spills(
    capability: int, metric: int, axes: int, symmetric: bool, balanced: bool, tmp_path: Path
) -> None:
    """At most 24 bytes of registers are spilled, and little shared memory is used; three programs fit a processor."""
    kernel = compiled(capability, metric, axes, symmetric=symmetric, balanced=balanced)
    assert kernel.metadata.shared <= 1024
    assert kernel.asm["ptx"].count("bar.sync") >= 2
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    if not tool.exists():
        pytest.skip("no cuobjdump")
    (tmp_path / "kernel.cubin").write_bytes(kernel.asm["cubin"])
    usage = subprocess.run([tool, "-res-usage", tmp_path / "kernel.cubin"], capture_output=True, text=True, check=True)
    found = re.search(r"REG:(\d+) STACK:(\d+)", usage.stdout)
    assert found is not None
    assert int(found[1]) <= 170
    assert int(found[2]) <= 24


# ---- on a device -----------------------------------------------------------------------------------------------------


@pytest.mark.gpu
def test_a_thousand_repeats_on_two_streams_agree() -> None:
    """A missing barrier would show as potentials that differ."""
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    generator = torch.Generator().manual_seed(0)
    x, y = (torch.randn(64, k, 3, generator=generator).cuda() for k in (256, 250))
    p, q = (torch.full((64, k), 1 / k, device="cuda") for k in (256, 250))
    problem = problem_of(p, q, PointCost(x, y), epsilon=0.3)
    first = small_triton.solve_small(problem, None, BUDGET)
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in range(2)]
    for repeat in range(1000):
        with torch.cuda.stream(streams[repeat % 2]):
            again = small_triton.solve_small(problem, None, BUDGET)
            assert torch.equal(again.g, first.g)
    want = Sinkhorn().run(problem, None, BUDGET)
    assert_same(first, want, balanced=True, tolerance=1e-3)
