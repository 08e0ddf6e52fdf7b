"""Streamed soft minima, sums with plans and gradients against float64, with the errors of the dense computation.

On a CPU the kernels run in Triton's interpreter, which checks values but no races, no rounding of TF32 products and no
registers. The last are bounded where kernels are compiled for GPUs that need not exist. With `-m gpu` the same tests
run on a GPU, and others at real sizes.
"""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import otloss
from otloss.costs import Cost, DenseCost, PointCost
from otloss.costs import streams_triton as streams
from otloss.costs.cost import plan_rows, softmin_in_torch
from tests.samples import sampled

triton = pytest.importorskip("triton")
EPS = torch.finfo(torch.float32).eps
METRICS = ("sqeuclidean", "euclidean", "l1", "cosine")


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "cpu":
        monkeypatch.setenv("TRITON_INTERPRET", "1")
    elif not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    return request.param


def clouds(metric: str, d: int, n: int = 21, m: int = 34, offset: float = 0.0) -> PointCost:
    """Two clouds a problem, with one pair of equal points; x has a problem less, which both share."""
    random = torch.Generator().manual_seed(d)
    x, y = torch.randn(n, d, generator=random) + offset, torch.randn(2, m, d, generator=random) + 0.3 + offset
    y[:, 0] = x[1]
    return PointCost(x, y, metric=metric)


def matrices(form: str) -> DenseCost:
    matrix = torch.rand(2, 21, 34, generator=torch.Generator().manual_seed(0))
    return DenseCost({"rows": matrix, "columns": matrix.mT.contiguous().mT, "shared": matrix[0]}[form])


def costs_of(name: str) -> Cost:
    """ "far" are clouds at a distance from the origin that is a thousand times as large as they are."""
    if name in ("rows", "columns", "shared"):
        return matrices(name)
    metric, axes, *where = name.split()
    return clouds(metric, int(axes), offset=1000.0 if where == ["far"] else 0.0)


def is_by_dots(name: str) -> bool:
    metric, _, axes = name.partition(" ")
    return metric in ("sqeuclidean", "cosine") and int(axes.split()[0]) > streams.MAX_AXES


def unit_of(cost: Cost) -> float:
    """Return what epsilon is a multiple of, so that plans of many axes have more than one entry a row."""
    return max(1.0, float(cost.dense().mean()) / 4)


# Each metric with one axis or few, which stay in registers, and with many, where a loop and a block of axes end early.
NAMES = [
    "sqeuclidean 1", "sqeuclidean 3", "sqeuclidean 17", "sqeuclidean 64", "sqeuclidean 300",
    "euclidean 1", "euclidean 2", "euclidean 20", "l1 1", "l1 3", "l1 17",
    "cosine 2", "cosine 3", "cosine 17", "cosine 300",
    "sqeuclidean 3 far", "sqeuclidean 17 far", "euclidean 2 far", "l1 17 far",
    "rows", "columns", "shared",
]  # fmt: skip
MINIMA_ONLY = ["cosine 1"]  # unit vectors of one axis have no gradient


def assert_near(got: Tensor, exact: Tensor, dense: Tensor, size: float | Tensor) -> None:
    """Assert an error of at most 1.5 times the error of dense float32 sums, plus 4 roundings of this size."""
    got, dense = got.double().cpu(), dense.double().cpu()
    assert torch.equal(got.isinf(), exact.isinf())
    error, allowed = (torch.where(exact.isinf(), 0.0, t - exact).abs() for t in (got, dense))
    assert bool((error <= 1.5 * allowed.amax() + 4 * EPS * size).all()), (error.amax(), allowed.amax(), size)


# ---- soft minima -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES + MINIMA_ONLY)
def test_soft_minima_against_float64(name: str, device: str) -> None:
    """With an epsilon a problem, bins without mass, a padded one, and a row's best cost at zero; also transposed."""
    for is_transposed in (False, True):
        cost = costs_of(name).T if is_transposed else costs_of(name)
        h = torch.randn(2, cost.shape[1], generator=torch.Generator().manual_seed(1))
        h[0, 3:5], h[1, 18:] = -torch.inf, -torch.inf
        epsilon = torch.tensor([0.05, 1.0]) * unit_of(cost)
        matrix = cost.dense()
        exact = softmin_in_torch(cost.to(torch.float64).dense(), h.double(), epsilon.double())
        dense = softmin_in_torch(matrix, h, epsilon)
        streamed = cost.to(device).streamed()
        assert streamed is not None
        size = float(matrix.amax()) * (
            4 if " " in name and is_by_dots(name) else 1
        )  # the squared lengths, not distances
        # Each dtype and each of the two calls meets each orientation once.
        for potential, shift, at_once in ((h, 0.0, is_transposed), (h.double() + 1e3, 1e3, not is_transposed)):
            given, at = potential.to(device), epsilon.to(device)
            value = streamed.softmin(given, at) if at_once else streamed.softmin_at(at)(given)
            assert value.dtype == potential.dtype
            assert_near(value + shift, exact, dense, size)


def test_no_bin_takes_part_and_nan(device: str) -> None:
    h = torch.full((2, 34), -torch.inf, device=device)
    h[1, 0] = torch.nan
    for name in ("sqeuclidean 2", "sqeuclidean 9", "rows", "columns"):
        streamed = costs_of(name).to(device).streamed()
        assert streamed is not None
        value = streamed.softmin_at(torch.tensor(0.1, device=device))(h)
        assert bool((value[0] == torch.inf).all())
        assert bool(value[1].isnan().all())


@pytest.mark.parametrize("epsilon", [0.0, 1e-38, 1e-4, 1e4, 1e30])
def test_any_epsilon(epsilon: float, device: str) -> None:
    cost = clouds("sqeuclidean", 3, offset=100.0)  # which differences do not care about
    h = torch.zeros(34)
    streamed = cost.to(device).streamed()
    assert streamed is not None
    exact = softmin_in_torch(cost.to(torch.float64).dense(), h.double(), epsilon)
    dense = softmin_in_torch(cost.dense(), h, epsilon)
    assert_near(streamed.softmin(h.to(device), epsilon), exact, dense, float(exact.abs().amax()) + epsilon)


def test_parts_of_columns_and_real_tiles(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The columns are split among programs, whose parts are joined, and the maximum changes every two tiles."""
    tiles = streams.TILES._replace(interpreted=streams.Tile(16, 16, 2, 1), min_programs=8)
    monkeypatch.setattr(streams, "TILES", tiles)
    for name in ("l1 2", "columns"):
        cost = costs_of(name) if name == "columns" else clouds("l1", 2, n=5, m=100)
        cost = cost.T if name == "columns" else cost
        h = torch.randn(2, cost.shape[1], generator=torch.Generator().manual_seed(1))
        streamed = cost.to(device).streamed()
        assert streamed is not None
        exact = softmin_in_torch(cost.to(torch.float64).dense(), h.double(), 0.1)
        dense = softmin_in_torch(cost.dense(), h, 0.1)
        assert_near(streamed.softmin(h.to(device), 0.1), exact, dense, float(cost.dense().amax()))
        a = exact - 0.1 * torch.rand(exact.shape, generator=torch.Generator().manual_seed(2)).double()
        check_sums(cost, a.float(), h, torch.tensor(0.1), device)


# ---- sums with plans -------------------------------------------------------------------------------------------------


def check_sums(cost: Cost, a: Tensor, h: Tensor, epsilon: Tensor, device: str) -> None:
    """Products with 3 and 11 columns, costs, and the sums of the rows."""
    streamed = cost.to(device).streamed()
    assert streamed is not None
    form, prepared = streamed._stream(), streams.Epsilon.build(epsilon, torch.device(device))
    assert form is not None
    none = (torch.zeros_like(a), torch.zeros_like(h))
    wide = tuple(t.double() for t in none)
    exact = plan_rows(cost.to(torch.float64).dense(), a.double(), h.double(), wide, epsilon.double())  # type: ignore[arg-type]
    dense = plan_rows(cost.dense(), a, h, none, epsilon)
    # An exponent has the rounding of the cost, of its potentials and, of dot products, of the squared lengths.
    finite = a[a.isfinite()].abs().amax() + h[h.isfinite()].abs().amax()
    share = (float(cost.dense().amax()) * 4 + float(finite)) / float(epsilon.amin()) + 8
    v = torch.randn(2, cost.shape[1], 11, generator=torch.Generator().manual_seed(3))
    for values in (v, v[0, :, :3]):
        sums = streams.plan_sums(form, "product", a.to(device), h.to(device), prepared, values.to(device))
        size = share * (exact @ values.double().abs())
        assert_near(sums.values, exact @ values.double(), dense @ values, size)
        assert_near(sums.of_rows, exact.sum(-1), dense.sum(-1), share * exact.sum(-1))
    sums = streams.plan_sums(form, "cost", a.to(device), h.to(device), prepared)
    matrix = cost.to(torch.float64).dense()
    total = (exact * matrix).sum(-1)
    assert_near(sums.values[..., 0], total, (dense * cost.dense()).sum(-1), share * (total + exact.sum(-1)))


@pytest.mark.parametrize("name", NAMES)
def test_products_with_plans_against_float64(name: str, device: str) -> None:
    cost = costs_of(name)
    epsilon = torch.tensor([0.3, 1.0]) * unit_of(cost)
    h = torch.randn(2, cost.shape[1], generator=torch.Generator().manual_seed(1))
    h[0, 3:5], h[1, 30:] = -torch.inf, -torch.inf
    a = softmin_in_torch(cost.dense(), h, epsilon) - 1.0
    a[1, 0], a[0, 18:] = -torch.inf, -torch.inf
    check_sums(cost, a, h, epsilon, device)


# Each cost between two clouds or within one, and (slow) the other way.
ONE_OR_TWO_CLOUDS = [(name, k % 2 == 1) for k, name in enumerate(name for name in NAMES if " " in name)]


@pytest.mark.parametrize(
    ("name", "one_cloud"),
    sampled(len(ONE_OR_TWO_CLOUDS), ONE_OR_TWO_CLOUDS + [(name, not one) for name, one in ONE_OR_TWO_CLOUDS]),
)
def test_gradients_in_points_against_float64(name: str, one_cloud: bool, device: str) -> None:
    """With a factor a problem, a cloud that the problems share, equal points and one at the origin."""
    points = costs_of(name)
    assert isinstance(points, PointCost)
    x, y = points.x.clone(), (points.x if one_cloud else points.y).clone()
    if "far" not in name:
        x[0] = 0.0
    n, m = len(x), y.shape[-2]
    random = torch.Generator().manual_seed(0)
    f, g = torch.randn(2, n, generator=random) / 8, torch.randn(2, m, generator=random) / 8
    log_p, log_q = (torch.rand(2, size, generator=random).log() - 4 for size in (n, m))
    log_q[0, 3] = -torch.inf
    epsilon, upstream = torch.tensor([0.7, 1.5]) * unit_of(points), torch.tensor([2.0, -0.5])

    def gradients(dtype: torch.dtype, where: str, *, stream: bool) -> list[Tensor]:
        leaf = x.to(where, dtype).requires_grad_()
        other = leaf if one_cloud else y.to(where, dtype).requires_grad_()
        cost = PointCost(torch.ones(1, x.shape[-1])).to(where, dtype).between(leaf, other, points.metric)
        chosen = cost.streamed() if stream else cost
        assert chosen is not None
        numbers = (t.to(where, dtype) for t in (f, g, log_p, log_q))
        return list(
            chosen.plan_gradients(*numbers, epsilon=epsilon.to(where, dtype), upstream=upstream.to(where, dtype))
        )

    exact, dense = gradients(torch.float64, "cpu", stream=False), gradients(torch.float32, "cpu", stream=False)
    # Products of matrices have roundings of sum_j P_ij x_i, whose terms cancel for near points; differences have not.
    rounding = 0.0
    if is_by_dots(name):
        matrix = PointCost(x.double(), y.double(), metric=points.metric).dense()
        plan = plan_rows(matrix, f.double(), g.double(), (log_p.double(), log_q.double()), epsilon.double())
        if one_cloud:
            plan.diagonal(0, -2, -1).fill_(0.0)
        centre = y.mean(-2, keepdim=True) if points.metric == "sqeuclidean" else 0.0
        rounding = float((plan.sum((-2, -1)).amax() * (x - centre).abs().amax()).detach())
    for leaf, *results in zip((x, y), gradients(torch.float32, device, stream=True), exact, dense, strict=False):
        assert all(result.shape == leaf.shape for result in results)
        if points.metric == "cosine":
            # The part along a unit vector does not reach the points. It has no derivative where x_i = y_j, at C_ij = 0.
            results = [t - (t * leaf.to(t)).sum(-1, keepdim=True) * leaf.to(t) for t in results]
        got, want, plain = (t.detach() for t in results)
        assert float(want.abs().amax()) > 0
        assert_near(got, want, plain, 16 * float(want.abs().amax()) + rounding)


# ---- searches and solutions ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["euclidean 2", "columns"])
def test_a_search_and_its_linear_cost(name: str, device: str) -> None:
    cost = costs_of(name).to(device)
    p, q = (torch.rand(2, size, generator=torch.Generator().manual_seed(size)) for size in cost.shape)
    p[:, 0], q[:, 2] = 0.0, 0.0
    p, q = (p / p.sum(-1, keepdim=True)).to(device), (q / q.sum(-1, keepdim=True)).to(device)
    streamed = cost.streamed()
    assert streamed is not None
    plain, got = (otloss.solve(p, q, c, epsilon=2.0, impl="torch", tolerance=1e-4) for c in (cost, streamed))
    assert bool(got.converged.all())
    assert torch.allclose(got.value, plain.value, rtol=1e-3)
    assert torch.allclose(got.linear_cost, plain.linear_cost, rtol=1e-3)


def test_which_costs_have_kernels() -> None:
    class Own(PointCost):
        def rows(self, index: Tensor) -> Tensor:
            return super().rows(index) + 1

    class OwnSoftmin(DenseCost):
        def softmin(self, potential: Tensor, epsilon: float | Tensor) -> Tensor:
            return super().softmin(potential, epsilon)

    x = torch.ones(3, 2)
    assert Own(x).streamed() is None
    assert OwnSoftmin(torch.ones(2, 2)).streamed() is None
    assert PointCost(x, metric=lambda a, b: torch.cdist(a, b)).streamed() is None
    streamed = PointCost(x).streamed()
    assert streamed is not None
    assert streamed.T._stream() is not None
    assert streamed.to(torch.float64)._stream() is None  # computed as before


# ---- compiled for GPUs -----------------------------------------------------------------------------------------------


def compile_for(kernel: str, arch: int, warps: int, stages: int = 3, **constants: object) -> Any:
    """Return the kernel that Triton compiles, for a device that need not exist."""
    function = getattr(streams._kernels(False), kernel)
    names = function.arg_names
    pointers = {"x", "y", "h", "a", "v", "scale", "width", "out", "sums", "x_squares", "y_squares", "costs"}
    signature = {n: "constexpr" if n in constants else "*fp32" if n in pointers else "i32" for n in names}
    whole = [(names.index(n),) for n in names if n in pointers]
    source = triton.compiler.ASTSource(
        function, signature, {(names.index(n),): c for n, c in constants.items()},
        {place: [["tt.divisibility", 16]] for place in whole},
    )  # fmt: skip
    target = triton.backends.compiler.GPUTarget("cuda", arch, 32)
    options = {"num_warps": warps, "num_stages": stages, "enable_fp_fusion": True}
    return triton.compile(source, target=target, options=options)


def registers(compiled: Any) -> tuple[int, int, int]:
    """Return the registers a thread, the bytes of its stack (spilled registers) and of shared memory."""
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    path = Path(os.environ["TRITON_CACHE_DIR"]) / "kernel.cubin"
    path.write_bytes(compiled.asm["cubin"])
    usage = subprocess.run([tool, "-res-usage", path], capture_output=True, text=True, check=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", usage)
    assert found is not None
    return int(found[1]), int(found[2]), compiled.metadata.shared


@pytest.fixture
def no_device(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    if not hasattr(triton, "knobs"):
        pytest.skip("Triton before 3.4 compiles for the device at hand")
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))


POINTS = {"METRIC": "sqeuclidean", "ONE_CLOUD": False, "ROWS": 16, "COLUMNS": 32, "y_axis": 1}
DOTS = {"METRIC": "sqeuclidean", "ONE_CLOUD": False, "ROWS": 64, "UNROLL": 1, "BLOCK": 32, "KEPT": 64,
        "PRECISION": streams.PRECISION}  # fmt: skip
COMPILED = [
    ("points", 90, 1, 176, POINTS | {"JOB": "softmin", "AXES": 3, "UNROLL": 4, "KEPT": 1}),
    ("matrix", 90, 1, 192, {"JOB": "softmin", "AXIS": 0, "ROWS": 16, "COLUMNS": 32, "UNROLL": 4, "KEPT": 1,
                            "cost_row": 1}),
    ("dots", 90, 8, 255, DOTS | {"JOB": "gradient", "COLUMNS": 64}),
    ("points", 80, 1, 176, POINTS | {"JOB": "gradient", "AXES": 3, "UNROLL": 1, "KEPT": 3, "METRIC": "euclidean"}),
    ("dots", 80, 8, 255, DOTS | {"JOB": "softmin", "COLUMNS": 32}),
]  # fmt: skip


@pytest.mark.parametrize(("kernel", "arch", "warps", "most", "constants"), sampled(3, COMPILED))
def test_compiled_kernels_spill_nothing(
    kernel: str, arch: int, warps: int, most: int, constants: dict[str, object], no_device: None
) -> None:
    stages = streams.TILES.dots[-1] if kernel == "dots" else 3
    used, stack, shared = registers(compile_for(kernel, arch, warps, stages, **constants))
    assert used <= most
    assert stack == 0
    assert shared <= 64 * 1024


def test_products_of_many_axes_are_no_single_tf32_products(no_device: None) -> None:
    """Which the interpreter cannot show: it computes every product in full precision."""

    def tf32_products(precision: str) -> int:
        constants = DOTS | {"JOB": "softmin", "COLUMNS": 32, "PRECISION": precision}
        ptx = compile_for("dots", 90, 8, streams.TILES.dots[-1], **constants).asm["ptx"]
        return len(re.findall(r"mma(?:_async)?\.sync\S*\.tf32", ptx))

    assert tf32_products("ieee") == 0
    if streams.PRECISION != "ieee":
        assert streams.PRECISION == "tf32x3"
        assert tf32_products(streams.PRECISION) >= 3 * tf32_products("tf32") > 0


# ---- on a device -----------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("metric", "d", "n"), [("sqeuclidean", 3, 20_000), ("sqeuclidean", 64, 5_000), ("l1", 20, 900)]
)
def test_real_sizes_on_two_streams_a_thousand_times(metric: str, d: int, n: int) -> None:
    cost = clouds(metric, d, n, n + 77).to("cuda").streamed()
    assert cost is not None
    h = torch.randn(2, n + 77, device="cuda")
    first = cost.softmin(h, 0.1)
    exact = softmin_in_torch(cost.to(torch.float64).row_block(0, 50), h.double(), 0.1)
    assert torch.allclose(first[:, :50].double(), exact, atol=1e-4 * d, rtol=1e-5)
    torch.cuda.synchronize()
    sides = [torch.cuda.Stream(), torch.cuda.Stream()]
    different = [torch.zeros((), dtype=torch.int64, device="cuda") for _ in sides]
    for _ in range(500):
        for side, count in zip(sides, different, strict=True):
            with torch.cuda.stream(side):
                count += (cost.softmin(h, 0.1) != first).sum()
    torch.cuda.synchronize()
    assert sum(int(count) for count in different) == 0
