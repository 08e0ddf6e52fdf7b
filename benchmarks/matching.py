"""Matching, pairing, quadratic ranks and lower bounds, each beside what it replaces; on one thread.

torchsort, if it is installed, is timed with our ranks; otherwise a loop over scipy's isotonic regression.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import numpy as np
import ot
import torch
from scipy.optimize import isotonic_regression, linear_sum_assignment
from torch import Tensor

import otloss
from benchmarks.measure import SMALL_SIZES, Settings, say, table
from benchmarks.solver_peers import OURS
from benchmarks.solvers import Bench, at_least

Steps = dict[str, Callable[[], Any]]


def detection(batch: int, queries: int, most: int) -> Steps:
    """Costs as of a detector: so many queries, 1 to `most` targets a picture."""
    generator = torch.Generator().manual_seed(0)
    cost = torch.randn(batch, queries, most, generator=generator)
    targets = torch.randint(1, most + 1, (batch,), generator=generator)
    sizes = torch.stack([torch.full_like(targets, queries), targets], -1)
    each = [c[:, :m].contiguous() for c, m in zip(cost, targets.tolist(), strict=True)]
    return {
        OURS: lambda: otloss.match(cost, sizes=sizes),
        f"{OURS}, a list": lambda: otloss.match(each),
        "scipy loop": lambda: [linear_sum_assignment(c.numpy()) for c in each],
    }


def pairs(n: int, dim: int) -> Steps:
    """torchcfm's sampler is these three calls: squared distances, POT, draws with replacement."""
    x0, x1 = (torch.randn(n, dim, generator=torch.Generator().manual_seed(seed)) for seed in (0, 1))

    def by_pot() -> np.ndarray:
        weights = np.full(n, 1 / n)
        plan = ot.emd(weights, weights, (torch.cdist(x0, x1) ** 2).numpy()).ravel()
        return np.random.default_rng(0).choice(n * n, p=plan / plan.sum(), size=n)

    return {OURS: lambda: otloss.pair(x0, x1), "POT and draws": by_pot}


def ranks(batch: int, n: int) -> Steps:
    x = torch.randn(batch, n, generator=torch.Generator().manual_seed(0))

    def by_scipy(x: Tensor) -> Tensor:
        falling, order = x.double().sort(descending=True)
        y = falling * 2 - torch.arange(n, 0, -1)
        fit = torch.tensor(np.stack([isotonic_regression(row, increasing=False).x for row in y.detach().numpy()]))
        return (falling * 2 - fit).gather(-1, order.argsort())

    def step(rank: Callable[[Tensor], Tensor]) -> None:
        leaf = x.clone().requires_grad_()
        rank(leaf).square().sum().backward()

    name, peer = "scipy loop, no exact gradient", by_scipy
    if find_spec("torchsort"):
        import torchsort

        name, peer = "torchsort", lambda x: torchsort.soft_rank(x, regularization_strength=0.5)
    return {OURS: lambda: step(lambda x: otloss.soft_rank(x, regularization="quadratic")), name: lambda: step(peer)}


def bounds(batch: int, n: int, *, of_points: bool) -> Steps:
    generator = torch.Generator().manual_seed(0)
    x, y = (torch.randn(batch, n, 25, generator=generator) for _ in range(2))
    p, q = (torch.rand(batch, n, generator=generator).softmax(-1) for _ in range(2))
    matrix = torch.cdist(x, y)

    def cost() -> Any:
        return otloss.costs.PointCost(x, y) if of_points else matrix

    return {OURS: lambda: otloss.lower_bound(p, q, cost()), "emd": lambda: otloss.emd(p, q, cost())}


def main(settings: Settings) -> None:
    bench, small = Bench(settings), settings.small
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    cases: list[tuple[str, float, Steps]] = [
        ("match, 16 x 100 queries, 1 to 30 targets", 1 / 0.7, detection(*((2, 8, 3) if small else (16, 100, 30)))),
        *((f"pair, {n} samples in 784 dimensions", 1 / 0.4, pairs(8 if small else n, 784)) for n in (256, 1024)),
        *((f"soft_rank {b} x {n} with gradients", 1 / 1.5, ranks(b, 8 if small else n))
          for b, n in ((128, 10), (128, 100), (16, 500))),
        *((f"lower_bound, 1000 pairs of 10 {what}, against emd", 3.0, bounds(8 if small else 1000, 10, of_points=own))
          for what, own in (("bins", False), ("points in 25 dimensions", True))),
    ]  # fmt: skip
    for case, limit, steps in cases:
        bench.judge(at_least(case, limit), bench.timed(case, steps, notes=dict.fromkeys(steps, "")))
    torch.set_num_threads(threads)
    if small:
        say(SMALL_SIZES)
        return
    table([["work", "limit", "measured"], *bench.verdicts])
