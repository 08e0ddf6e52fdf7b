"""Kernels with checked indices: the arrays of their callers are as long as kernels read and write.

numba checks indices where NUMBA_BOUNDSCHECK=1 is set before it is imported, and what it compiles then needs a cache of
its own. `make test-bounds` runs this file and the other tests of kernels in such a process, and a slow test starts one
for a part of this file. Newton's functions run as plain Python too, which checks indices: test_newton_kernel.py.
"""

import itertools
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numba
import numpy as np
import pytest
import torch
from numba.extending import overload
from torch import Tensor

import otloss
from otloss import losses
from otloss._numba.compile import compiled, inner, spliced
from otloss._numba.tasks import next_task
from otloss._numba.threads import run_on_threads
from otloss.boosting import lightgbm_objective, xgboost_objective
from otloss.costs import PointCost
from otloss.costs import softmin_numba as softmin
from otloss.costs.gaussian_sums import Summation
from otloss.costs.order import Ordering
from otloss.solvers.entropic.clusters import Clustering
from otloss.solvers.entropic.interface import Budget
from otloss.solvers.entropic.newton import SparseNewton
from otloss.solvers.entropic.sinkhorn_cpu import MatrixLimits
from otloss.solvers.exact import clouds as exact_clouds
from otloss.solvers.options import Settings
from otloss.solvers.problem import pose
from tests.otloss.draws import draw, normal, weights
from tests.otloss.every_function import FUNCTIONS, OF_INDICES

ROOT = Path(__file__).parents[3]
CHECKED = bool(numba.config.BOUNDSCHECK)
checked = pytest.mark.skipif(not CHECKED, reason="make test-bounds checks indices")
pytestmark = pytest.mark.filterwarnings("ignore::otloss.ConvergenceWarning")

DTYPES = (torch.float32, torch.float64)
AXES = (1, 2, 3, 17)
SIZES = ((1, 1), (1, 3), (2, 1), (2, 2), (7, 5), (40, 33))
METRICS = ("sqeuclidean", "euclidean", "l1")
# Sizes at which solvers change the method, so that small problems take the way of large ones.
FROM_CLOUDS: dict[str, Any] = {
    "otloss.costs.order.ORDERING": Ordering(min_pairs=0),
    "otloss.solvers.entropic.sinkhorn_cpu.MATRIX_LIMITS": MatrixLimits(largest_matrix=0),
    "otloss.solvers.exact.clouds.CLOUD_LIMITS": exact_clouds.CloudLimits(
        min_pairs=0, min_pairs_of_others=0, min_points=0, largest_matrix=4
    ),
}
SWITCHES: dict[str, dict[str, Any]] = {
    "as it is": {},
    "Newton's method": {"otloss.solvers.entropic.ladder.PATIENCE": 2},
    "clouds": {**FROM_CLOUDS, "otloss.solvers.entropic.ladder.PATIENCE": 2},
    "clusters": {
        **FROM_CLOUDS,
        "otloss.solvers.entropic.clusters.CLUSTERING": Clustering(smallest=0, counts=(2, 4, 4)),
        "otloss.costs.points.SUMMATION": Summation(min_pairs=0),
    },
}


@pytest.fixture(params=SWITCHES)
def switches(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, size in SWITCHES[request.param].items():
        monkeypatch.setattr(name, size)


@pytest.mark.slow
@pytest.mark.skipif(CHECKED, reason="this is that process")
def test_the_part_of_this_file_that_takes_seconds_holds_with_checked_indices() -> None:
    names = re.search(r"^CHECKED := (.*)$", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    assert names
    settings = dict(setting.split("=") for setting in names[1].replace("$(CURDIR)", str(ROOT)).split())
    pytest_of_part = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", "-k", "part"]
    done = subprocess.run([*pytest_of_part, __file__], capture_output=True, text=True, env=os.environ | settings)
    assert done.returncode == 0, done.stdout


# ---- the part --------------------------------------------------------------------------------------------------------


@inner()
def _read(values: Any, place: int) -> float:
    return values[place]


@spliced
def _read_in_place(values: Any, place: int) -> float:
    return values[place]


def _read_by_type(values: Any, place: int) -> float:
    raise NotImplementedError("compiled code only")


@overload(_read_by_type)
def _read_of_type(values: Any, place: int) -> Any:
    def read(values: Any, place: int) -> Any:
        return values[place]

    return read


@compiled()
def _beyond(counter, values, place, kind):  # type: ignore[no-untyped-def]
    while True:
        task = next_task(counter)
        if task >= 100:
            return
        at = place if task == 99 else 0
        if kind == 0:
            values[at] = 1.0
        elif kind == 1:
            values[1] = _read(values, at)
        elif kind == 2:
            values[1] = _read_in_place(values, at)
        else:
            values[1] = _read_by_type(values, at)


@checked
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("kind", range(4))
def test_part_an_index_beyond_an_array_raises_whatever_thread_and_function_it_is_in(kind: int, threads: int) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        run_on_threads(_beyond, 100, (np.zeros(3), 2, kind))
        with pytest.raises(IndexError):
            run_on_threads(_beyond, 100, (np.zeros(3), 3, kind))
    finally:
        torch.set_num_threads(before)


@checked
@pytest.mark.parametrize(("n", "m"), [*SIZES, (5, 3000)])
@pytest.mark.parametrize("axes", [1, 2, 3])
def test_part_newton_between_points(axes: int, n: int, m: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("otloss.costs.order.ORDERING", Ordering(min_pairs=0))
    for metric in METRICS[:: 1 if axes == 1 else 3]:
        cost = PointCost(draw(n, axes), 0.5 + draw(m, axes, seed=1), metric=metric)
        problem = pose(weights(n), weights(m), cost, epsilon=0.05, settings=Settings())
        result = SparseNewton().run(problem, None, Budget(1e-8, 100))
        assert float(result.error) <= 1e-8


@checked
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("n", "m"), SIZES[3:])
def test_part_light_bins_of_unbalanced_problems(n: int, m: int, dtype: torch.dtype) -> None:
    """Bins with next to no mass are updated after the others, on each side in arrays of the longer side."""
    for count, other in ((n, m), (m, n)):
        p, q = weights(count).to(dtype), weights(other).to(dtype)
        p[0] = q[-1] = 1e-30 if dtype == torch.float32 else 1e-160
        cost = draw(count, other).to(dtype)
        check(otloss.sinkhorn(p, q, cost, epsilon=0.1, marginal_penalty=1.0, impl="compiled"))


# ---- the sweep -------------------------------------------------------------------------------------------------------


def cloud(kind: str, count: int, axes: int, seed: int, dtype: torch.dtype) -> Tensor:
    points = normal(count, axes, seed=seed)
    if kind == "equal points":
        points = points[torch.arange(count) % max(1, count // 3)]
    return (points + 3.0 * (kind == "apart")).to(dtype)


def clouds(axes: int, n: int, m: int, dtype: torch.dtype) -> Iterator[tuple[Tensor, ...]]:
    """Points and weights: points that are equal, clouds that lie apart, weights of 0."""
    for kind in ("equal points", "apart"):
        x, y = cloud("", n, axes, 1, dtype), cloud(kind, m, axes, 2, dtype)
        a, b = weights(n), weights(m)
        if kind == "apart":
            a[1::3], b[1::4] = 0.0, 0.0
        yield x, y, (a / a.sum()).to(dtype), (b / b.sum()).to(dtype)
    if n == m:
        yield x, y, torch.full((n,), 1 / n, dtype=dtype), torch.full((n,), 1 / n, dtype=dtype)


def check(value: Tensor, *leaves: Tensor) -> None:
    assert value.isfinite().all()
    if leaves:
        gradients = torch.autograd.grad(value.sum(), leaves, allow_unused=True)
        assert all(gradient.isfinite().all() for gradient in gradients if gradient is not None)


@checked
@pytest.mark.usefixtures("switches")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("axes", AXES)
def test_clouds(axes: int, dtype: torch.dtype) -> None:
    """Each metric in turn, and with each of them all functions."""
    metrics = itertools.cycle(METRICS)
    for n, m in (*SIZES, (5, 600), (600, 5)):
        for x, y, a, b in clouds(axes, n, m, dtype):
            x, a = x.requires_grad_(), a.requires_grad_()
            cost = PointCost(x, y, metric=next(metrics))
            check(otloss.emd(a, b, cost), x, a)
            check(cost.softmin(torch.zeros(m, dtype=dtype), 0.1))
            check(otloss.sinkhorn(a, b, cost, epsilon=0.02), x, a)
            check(otloss.sinkhorn(a, 2 * b, cost, epsilon=0.1, marginal_penalty=1.0), x, a)
            check(otloss.cloud_loss(x, y, a, b, blur=0.2), x, a)
            check(otloss.cloud_loss(x, y, a, b, kind="sliced", projections=3), x, a)
            solution = otloss.solve(a, b, cost, epsilon=0.1)
            check(solution.plan().detach())
            check(otloss.solve(a, b, cost, epsilon=0.1, start=solution.potentials).value, x, a)


@checked
@pytest.mark.usefixtures("switches")
@pytest.mark.parametrize("axes", AXES)
def test_many_points_beside_few(axes: int) -> None:
    for dtype, (n, m) in itertools.product(DTYPES, ((5, 3000), (3000, 5))):
        x, y = cloud("", n, axes, 1, dtype).requires_grad_(), cloud("apart", m, axes, 2, dtype)
        check(otloss.cloud_loss(x, y, blur=0.5), x)
        check(otloss.cloud_loss(x, y, kind="emd"), x)


@checked
@pytest.mark.parametrize("dtype", DTYPES)
def test_histograms(dtype: torch.dtype) -> None:
    """Batches with a shared cost and with one each, weights of 0, and equal costs."""
    for (n, m), batch, shared in itertools.product((*SIZES, (3, 600), (300, 4)), ((), (3,), (0,)), (False, True)):
        p, q = weights(*batch, n).to(dtype), weights(*batch, m, seed=6).to(dtype)
        if n > 2 < m:
            p[..., 1], q[..., -2] = 0.0, 0.0
            p, q = p / p.sum(-1, keepdim=True), q / q.sum(-1, keepdim=True)
        cost = draw(*(() if shared else batch), n, m).to(dtype).requires_grad_()
        p = p.requires_grad_()
        check(otloss.emd(p, q, cost), p, cost)
        check(otloss.emd(p, q, torch.ones_like(cost)), p)
        check(otloss.emd(p, q, cost, mass=torch.full(batch, 0.5)), p, cost)
        for epsilon, penalty in ((0.1, None), (1e-3, None), (0.1, 1.0), (0.1, (None, 1.0))):
            options: dict[str, Any] = {"epsilon": epsilon, "marginal_penalty": penalty}
            check(otloss.sinkhorn(p, q, cost, **options), p, cost)
            solution = otloss.solve(p, q, cost, **options)
            check(otloss.solve(p, q, cost, **options, start=solution.potentials).value, p)
        exact = otloss.solve(p, q, cost)
        check(otloss.solve(p, q, cost, start=exact.potentials).value, p)
        places = [draw(*batch, size, seed=size).to(dtype).requires_grad_() for size in (n, m)]
        check(otloss.wasserstein_1d(p, q, *places, order=2), p, *places)
        if n == m:
            apart = (places[0].unsqueeze(-1) - places[0].unsqueeze(-2)).square()
            check(otloss.sinkhorn_divergence(p, q, apart, epsilon=0.1), p, places[0])
            check(otloss.cdf_distance(p, q, places[0]), p, places[0])
        otloss.match(cost.detach())


@checked
@pytest.mark.parametrize("dtype", DTYPES)
def test_graphs_barycenters_and_orders(dtype: torch.dtype) -> None:
    for n, m in SIZES:
        C, D, p, q = draw(2, n, n).to(dtype), draw(m, m).to(dtype), weights(2, n).to(dtype), weights(m).to(dtype)
        check(otloss.fused_gromov(C, D, draw(n, m).to(dtype), p, q).value)
        if n > 2:
            p[0, 1] = 0.0
        p = p / p.sum(-1, keepdim=True)
        for epsilon, debiased in itertools.product((0.3, 1e-3), (False, True)):
            square = (draw(n, 1) - draw(n)).square().to(dtype)
            square = square + square.mT
            check(otloss.barycenter(p, square, epsilon=epsilon, debiased=debiased))
        check(otloss.barycenter(p, draw(m, n).to(dtype), epsilon=1e-3))
        scores = normal(3, n, dtype=dtype).requires_grad_()
        for way in ("entropy", "quadratic"):
            check(otloss.soft_sort(scores, regularization=way), scores)
            check(otloss.soft_rank(scores, regularization=way), scores)
            check(otloss.soft_top_k(scores, k=1, regularization=way), scores)
        sizes = torch.tensor([[n, m], [n // 2, m]])
        otloss.match(draw(2, n, m).to(dtype), sizes=sizes)
        otloss.match([draw(n, m).to(dtype), draw(m, 1).to(dtype), draw(3, n).to(dtype)])
        check(losses.set_loss(draw(2, max(n, m), m).to(dtype), torch.zeros(2, max(n, m), dtype=dtype)))


class Labels:
    def __init__(self, labels: np.ndarray) -> None:
        self.labels = labels.astype(np.float32)

    def get_label(self) -> np.ndarray:
        return self.labels

    def get_weight(self) -> None:
        return None


@checked
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("classes", [2, 3, 17])
def test_rows_of_logits(classes: int, dtype: torch.dtype) -> None:
    for rows in (1, 2, 63, 64, 65, 200):
        logits, target = normal(rows, classes, dtype=dtype).requires_grad_(), torch.arange(rows) % classes
        soft = torch.nn.functional.one_hot(target, classes).to(dtype)
        for power, labels in itertools.product((1, 2), (target, soft)):
            check(losses.ordinal_loss(logits, labels, power=power, cross_entropy=0.3), logits)
        labels = Labels(target.numpy())
        for power in (1, 2):
            of_xgboost: Any = xgboost_objective(classes, power=power)
            of_lightgbm: Any = lightgbm_objective(classes, power=power)
            of_xgboost(logits.detach().float().numpy(), labels)
            of_lightgbm(np.asfortranarray(logits.detach().double().numpy()), labels)


@checked
def test_documents() -> None:
    embedding = draw(9, 3)
    for count, k in ((1, 1), (3, 2), (40, 5)):
        corpus = (draw(count, 9) > 0.5).double()
        corpus[:, 0] = 1.0
        otloss.document_search(corpus[: max(1, count // 2)], corpus, embedding, k=k)
    for n, m in SIZES:
        ids = torch.arange(n) % 9, torch.arange(m) % 9
        check(losses.document_distance(None, None, embedding, ids_p=ids[0], ids_q=ids[1]))
        check(losses.document_distance(None, None, embedding, ids_p=ids[0].expand(2, n), ids_q=ids[1]))


@checked
@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("name", FUNCTIONS | OF_INDICES)
def test_every_function(name: str) -> None:
    entry = {**FUNCTIONS, **OF_INDICES}[name]
    for dtype in DTYPES:
        leaves = {given: tensor.to(dtype, copy=True).requires_grad_() for given, tensor in entry.inputs.items()}
        value = entry.value({**leaves, **entry.fixed})
        check(value, *(leaves.values() if value.requires_grad else ()))


@numba.njit
def first_of(value: Any, scores: Any) -> Any:
    return softmin._first_of(value, scores, scores.shape[0])


def test_a_search_among_scores_of_nan_ends() -> None:
    scores = np.array([1.0, np.nan, 3.0, 2.0])
    assert [first_of(value, scores) for value in (1.0, 3.0, 2.0, np.nan)] == [0, 2, 3, 3]
