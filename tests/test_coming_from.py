"""The pairs of docs/guide/coming_from.md: both calls give the same number."""

from pathlib import Path

import numpy as np
import ot
import pytest
import torch
from torch import Tensor

import otloss
from otloss.costs import PointCost
from otloss.estimators import TransportAdapter

GENERATOR = torch.Generator().manual_seed(0)
X, Y = (torch.rand(n, 2, generator=GENERATOR, dtype=torch.float64) for n in (6, 8))
P, Q = (torch.rand(n, generator=GENERATOR, dtype=torch.float64) + 0.1 for n in (6, 8))
P, Q = P / P.sum(), Q / Q.sum()
MORE = 1.5 * Q
C = torch.cdist(X, Y) ** 2
LINE_X, LINE_Y = X[:, 0], Y[:, 0]
DIRECTIONS = torch.nn.functional.normalize(torch.randn(2, 20, generator=GENERATOR, dtype=torch.float64), dim=0)
TIGHT = {"tolerance": 1e-11}
WITHIN = (torch.cdist(X, X), torch.cdist(Y, Y))
COLUMNS = torch.rand(9, 3, generator=GENERATOR, dtype=torch.float64)
COLUMNS = COLUMNS / COLUMNS.sum(0)
SHARES = torch.tensor([0.2, 0.3, 0.5], dtype=torch.float64)
PLACES = torch.linspace(0, 1, 9, dtype=torch.float64)
SQUARES = (PLACES[:, None] - PLACES) ** 2
IMAGES = (COLUMNS.numpy(), SQUARES.numpy())
BLUR = 0.3
PAIRS = {
    "ot.emd2(p, q, C)": (lambda: ot.emd2(P, Q, C), lambda: otloss.emd(P, Q, C)),
    "ot.emd(p, q, C)": (lambda: ot.emd(P, Q, C), lambda: otloss.solve(P, Q, C).plan()),
    "ot.sinkhorn(p, q, C, reg)": (
        lambda: ot.sinkhorn(P, Q, C, 0.1, stopThr=1e-12),
        lambda: otloss.solve(P, Q, C, epsilon=0.1, **TIGHT).plan(),
    ),
    "ot.sinkhorn2(p, q, C, reg)": (
        lambda: ot.sinkhorn2(P, Q, C, 0.1, stopThr=1e-12),
        lambda: otloss.solve(P, Q, C, epsilon=0.1, **TIGHT).linear_cost,
    ),
    "ot.solve(C, p, q, reg=reg).value": (
        lambda: ot.solve(C, P, Q, reg=0.1, tol=1e-12, max_iter=10**5).value,
        lambda: otloss.sinkhorn(P, Q, C, epsilon=0.1, **TIGHT),
    ),
    "ot.unbalanced.sinkhorn_unbalanced(p, q, C, reg, reg_m)": (
        lambda: ot.unbalanced.sinkhorn_unbalanced(P, MORE, C, 0.1, 0.5, stopThr=1e-13, numItermax=10**5),
        lambda: otloss.solve(P, MORE, C, epsilon=0.1, marginal_penalty=0.5, **TIGHT).plan(),
    ),
    "ot.partial.partial_wasserstein2(p, q, C, m)": (
        lambda: ot.partial.partial_wasserstein2(P, Q, C, 0.6),
        lambda: otloss.emd(P, Q, C, mass=0.6),
    ),
    "ot.wasserstein_1d(x, y, p, q, p=order)": (
        lambda: ot.wasserstein_1d(*(t.numpy() for t in (LINE_X, LINE_Y, P, Q)), p=2),
        lambda: otloss.wasserstein_1d(P, Q, LINE_X, LINE_Y, order=2),
    ),
    "ot.emd2_1d(x, y, p, q)": (
        lambda: ot.emd2_1d(*(t.numpy() for t in (LINE_X, LINE_Y, P, Q))),
        lambda: otloss.wasserstein_1d(P, Q, LINE_X, LINE_Y, order=2),
    ),
    "ot.wasserstein_circle(x, y, p, q)": (
        lambda: ot.wasserstein_circle(LINE_X, LINE_X, P, Q[:6] / Q[:6].sum()),
        lambda: otloss.wasserstein_circular(P, Q[:6] / Q[:6].sum(), LINE_X, period=1),
    ),
    "ot.sliced_wasserstein_distance(x, y, projections=D)": (
        lambda: ot.sliced_wasserstein_distance(X, Y, projections=DIRECTIONS),
        lambda: otloss.sliced_wasserstein(X, Y, projections=DIRECTIONS.T).sqrt(),
    ),
    "ot.dist(x, y)": (lambda: ot.dist(X, Y), lambda: PointCost(X, Y).dense()),
    "ot.da.LinearTransport().fit(Xs=x, Xt=y)": (
        lambda: ot.da.LinearTransport().fit(Xs=X.numpy(), Xt=Y.numpy()).transform(Xs=X.numpy()),
        lambda: TransportAdapter().fit(X, target=Y).transform(X),
    ),
    "ot.da.EMDTransport().fit(Xs=x, Xt=y)": (
        lambda: ot.da.EMDTransport().fit(Xs=X.numpy(), Xt=Y.numpy()).transform(Xs=X.numpy()),
        lambda: TransportAdapter("barycentric").fit(X, target=Y).transform(X),
    ),
    "ot.da.SinkhornTransport(reg_e=e).fit(Xs=x, Xt=y)": (
        lambda: (
            ot.da.SinkhornTransport(reg_e=0.1, tol=1e-12, max_iter=10**5)
            .fit(Xs=X.numpy(), Xt=Y.numpy())
            .transform(Xs=X.numpy())
        ),
        lambda: TransportAdapter("barycentric", epsilon=0.1).fit(X, target=Y).transform(X),
    ),
    "ot.gromov.gromov_wasserstein2(C1, C2, p, q)": (
        lambda: ot.gromov.gromov_wasserstein2(*WITHIN, P, Q),
        lambda: otloss.fused_gromov(*WITHIN, p=P, q=Q).value,
    ),
    "ot.gromov.fused_gromov_wasserstein2(M, C1, C2, p, q, alpha=t)": (
        lambda: ot.gromov.fused_gromov_wasserstein2(C, *WITHIN, P, Q, alpha=0.3),
        lambda: otloss.fused_gromov(*WITHIN, C, P, Q, alpha=0.3).value,
    ),
    'ot.bregman.barycenter(A, C, reg, weights, method="sinkhorn_log")': (
        lambda: ot.bregman.barycenter(*IMAGES, 0.05, weights=SHARES.numpy(), method="sinkhorn_log", stopThr=1e-13),
        lambda: otloss.barycenter(COLUMNS.T, SQUARES, SHARES, epsilon=0.05, **TIGHT),
    ),
    "ot.bregman.barycenter_debiased(A, C, reg, weights)": (
        lambda: ot.bregman.barycenter_debiased(*IMAGES, 0.05, weights=SHARES.numpy(), stopThr=1e-12, numItermax=10**5),
        lambda: otloss.barycenter(COLUMNS.T, SQUARES, SHARES, epsilon=0.05, debiased=True),
    ),
}


def geomloss(loss: str = "sinkhorn", **options: object) -> Tensor:
    samples = pytest.importorskip("geomloss").SamplesLoss(loss, scaling=0.99, **options)
    value: Tensor = samples(X, Y)
    return value


def kernel(u: Tensor, v: Tensor) -> Tensor:
    return (-(torch.cdist(u, v) ** 2) / (2 * BLUR**2)).exp().mean()


GEOMLOSS = {
    'SamplesLoss("sinkhorn", p=2, blur=b)(x, y)': (
        lambda: geomloss(p=2, blur=0.3),
        lambda: otloss.cloud_loss(X, Y, blur=0.3),
    ),
    'SamplesLoss("sinkhorn", p=2, blur=b, debias=False)(x, y)': (
        lambda: geomloss(p=2, blur=0.3, debias=False),
        lambda: otloss.sinkhorn(None, None, PointCost(X, Y), epsilon=2 * 0.3**2) / 2,
    ),
    'SamplesLoss("sinkhorn", p=1, blur=b)(x, y)': (
        lambda: geomloss(p=1, blur=0.3),
        lambda: otloss.cloud_loss(X, Y, metric="euclidean", blur=0.3),
    ),
    'SamplesLoss("energy")(x, y)': (
        lambda: geomloss("energy"),
        lambda: otloss.cloud_loss(X, Y, metric="euclidean", epsilon=1e4),
    ),
    'SamplesLoss("gaussian", blur=b)(x, y)': (
        lambda: geomloss("gaussian", blur=BLUR),
        lambda: (kernel(X, X) + kernel(Y, Y)) / 2 - kernel(X, Y),
    ),
    "SamplesLoss(..., reach=r)": (
        lambda: geomloss(p=2, blur=0.3, reach=0.7),
        lambda: otloss.sinkhorn_divergence(
            None, None, PointCost(X, Y), epsilon=2 * 0.3**2, marginal_penalty=2 * 0.7**2
        ) / 2,
    ),
}  # fmt: skip


@pytest.mark.parametrize("call", [*PAIRS, *GEOMLOSS])
def test_both_calls_give_the_same(call: str) -> None:
    page = (Path(__file__).parents[1] / "docs/guide/coming_from.md").read_text(encoding="utf-8")
    assert f"| `{call}`" in page
    there, here = {**PAIRS, **GEOMLOSS}[call]
    np.testing.assert_allclose(
        np.asarray(here()), np.asarray(there()), rtol=1e-3 if call in GEOMLOSS else 1e-6, atol=1e-7
    )


def test_every_row_of_the_page_is_run() -> None:
    page = (Path(__file__).parents[1] / "docs/guide/coming_from.md").read_text(encoding="utf-8").partition("## OTT")[0]
    rows = [line.split("` ")[0].removeprefix("| `") for line in page.splitlines() if line.startswith("| `")]
    assert rows == [*PAIRS, *GEOMLOSS]
