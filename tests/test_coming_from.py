"""The pairs of docs/guide/coming_from.md: both calls give the same number.

Costs are rectangular or without symmetry, and weights unequal, wherever a row takes them: nothing else tells rows from
columns, or one side from the other.
"""

from pathlib import Path
from typing import Any

import numpy as np
import ot
import pytest
import scipy.optimize
import scipy.stats
import torch
from torch import Tensor

import otloss
import otloss_llm
from otloss.costs import PointCost
from otloss.estimators import TransportAdapter

GENERATOR = torch.Generator().manual_seed(0)
X, Y = (torch.rand(n, 2, generator=GENERATOR, dtype=torch.float64) for n in (6, 8))
P, Q = (torch.rand(n, generator=GENERATOR, dtype=torch.float64) + 0.1 for n in (6, 8))
P, Q = P / P.sum(), Q / Q.sum()
MORE = 1.5 * Q
C = torch.cdist(X, Y) ** 2 + 0.3 * torch.rand(6, 8, generator=GENERATOR, dtype=torch.float64)
LINE_X, LINE_Y = X[:, 0], Y[:, 0]
DIRECTIONS = torch.nn.functional.normalize(torch.randn(2, 20, generator=GENERATOR, dtype=torch.float64), dim=0)
TIGHT = {"tolerance": 1e-11}
WITHIN = tuple(torch.cdist(x, x) + 0.3 * torch.rand(len(x), len(x), generator=GENERATOR).double() for x in (X, Y))
COLUMNS = torch.rand(9, 3, generator=GENERATOR, dtype=torch.float64)
COLUMNS = COLUMNS / COLUMNS.sum(0)
SHARES = torch.tensor([0.2, 0.3, 0.5], dtype=torch.float64)
PLACES = torch.linspace(0, 1, 9, dtype=torch.float64)
SQUARES = (PLACES[:, None] - PLACES) ** 2
IMAGES = (COLUMNS.numpy(), SQUARES.numpy())
SKEW = SQUARES + 0.3 * torch.rand(9, 9, generator=GENERATOR, dtype=torch.float64)
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
        lambda: ot.wasserstein_circle(LINE_X, LINE_Y, P, Q),
        lambda: otloss.wasserstein_circular(P, Q, LINE_X, LINE_Y, period=1),
    ),
    "ot.sliced_wasserstein_distance(x, y, projections=D)": (
        lambda: ot.sliced_wasserstein_distance(X, Y, P, Q, projections=DIRECTIONS),
        lambda: otloss.sliced_wasserstein(X, Y, P, Q, projections=DIRECTIONS.T).sqrt(),
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
        lambda: ot.bregman.barycenter(
            IMAGES[0], SKEW.numpy(), 0.05, weights=SHARES.numpy(), method="sinkhorn_log", stopThr=1e-13
        ),
        lambda: otloss.barycenter(COLUMNS.T, SKEW.T, SHARES, epsilon=0.05, **TIGHT),
    ),
    "ot.bregman.barycenter_debiased(A, C, reg, weights)": (
        lambda: ot.bregman.barycenter_debiased(*IMAGES, 0.05, weights=SHARES.numpy(), stopThr=1e-12, numItermax=10**5),
        lambda: otloss.barycenter(COLUMNS.T, SQUARES, SHARES, epsilon=0.05, debiased=True),
    ),
}


def geomloss(loss: str = "sinkhorn", weights: bool = True, **options: object) -> Tensor:
    samples = pytest.importorskip("geomloss").SamplesLoss(loss, scaling=0.99, **options)
    value: Tensor = samples(P, X, Q, Y) if weights else samples(X, Y)
    return value


def kernel(a: Tensor, u: Tensor, b: Tensor, v: Tensor) -> Tensor:
    return a @ (-(torch.cdist(u, v) ** 2) / (2 * BLUR**2)).exp() @ b


def cloud(**options: Any) -> Tensor:
    return otloss.cloud_loss(X, Y, P, Q, **options)


GEOMLOSS = {
    'SamplesLoss("sinkhorn", p=2, blur=b)(a, x, b, y)': (
        lambda: geomloss(p=2, blur=0.3),
        lambda: cloud(blur=0.3),
    ),
    'SamplesLoss("sinkhorn", p=2, blur=b)(x, y)': (
        lambda: geomloss(p=2, blur=0.3, weights=False),
        lambda: otloss.cloud_loss(X, Y, blur=0.3),
    ),
    'SamplesLoss("sinkhorn", p=2, blur=b, debias=False)(x, y)': (
        lambda: geomloss(p=2, blur=0.3, debias=False),
        lambda: otloss.sinkhorn(P, Q, PointCost(X, Y), epsilon=2 * 0.3**2) / 2,
    ),
    'SamplesLoss("sinkhorn", p=1, blur=b)(x, y)': (
        lambda: geomloss(p=1, blur=0.3),
        lambda: cloud(metric="euclidean", blur=0.3),
    ),
    'SamplesLoss("energy")(x, y)': (
        lambda: geomloss("energy"),
        lambda: cloud(metric="euclidean", epsilon=1e4),
    ),
    'SamplesLoss("gaussian", blur=s)(a, x, b, y)': (
        lambda: geomloss("gaussian", blur=BLUR),
        lambda: (kernel(P, X, P, X) + kernel(Q, Y, Q, Y)) / 2 - kernel(P, X, Q, Y),
    ),
    "SamplesLoss(..., reach=r)": (
        lambda: geomloss(p=2, blur=0.3, reach=0.7),
        lambda: cloud(blur=0.3, marginal_penalty=2 * 0.7**2),
    ),
}  # fmt: skip
NUMPY_LINE = tuple(t.numpy() for t in (LINE_X, LINE_Y, P, Q))
TOTALS = (torch.cat([P, 0 * Q]), torch.cat([0 * P, Q]), torch.cat([LINE_X, LINE_Y]))
SCIPY = {
    "wasserstein_distance(u, v)": (
        lambda: scipy.stats.wasserstein_distance(*NUMPY_LINE[:2]),
        lambda: otloss.wasserstein_1d(None, None, LINE_X, LINE_Y),
    ),
    "wasserstein_distance(u, v, a, b)": (
        lambda: scipy.stats.wasserstein_distance(LINE_X, LINE_Y, P, MORE),
        lambda: otloss.wasserstein_1d(P, MORE / MORE.sum(), LINE_X, LINE_Y),
    ),
    "wasserstein_distance_nd(x, y, a, b)": (
        lambda: scipy.stats.wasserstein_distance_nd(*(t.numpy() for t in (X, Y, P, MORE))),
        lambda: otloss.emd(P, MORE / MORE.sum(), PointCost(X, Y, metric="euclidean")),
    ),
    "energy_distance(u, v, a, b)": (
        lambda: scipy.stats.energy_distance(*NUMPY_LINE),
        lambda: (2 * otloss.cdf_distance(*TOTALS)).sqrt(),
    ),
    "scipy.optimize.linear_sum_assignment(C)": (
        lambda: np.stack(scipy.optimize.linear_sum_assignment(C.T)),
        lambda: torch.stack(otloss.match(C.T)),
    ),
}
V, W, EMBEDDING = 15, 4, torch.rand(15, 4, generator=GENERATOR)
LOGITS, LABELS = torch.randn(3, 7, V, generator=GENERATOR), torch.randint(V, (3, 7), generator=GENERATOR)
SHIFTED = LOGITS[:, :-1], LABELS[:, 1:]


def emo(**options: Any) -> Tensor:
    return pytest.importorskip("emo").EMOLoss(LOGITS, LABELS, EMBEDDING, **options)


def number_loss(name: str, form: str) -> tuple[Any, Any]:
    """The loss of ntloss with a tokenizer whose digits stand out of order, and ours."""

    def tokenizer() -> Any:
        tokenizers, transformers = map(pytest.importorskip, ("tokenizers", "transformers"))
        digits = [str(digit) for digit in range(10)]
        vocab = ["<unk>", "the", *digits[5:], "of", ".", *digits[:5], "sum"]
        words = tokenizers.models.WordLevel({token: i for i, token in enumerate(vocab)}, unk_token="<unk>")
        return transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizers.Tokenizer(words), unk_token="<unk>")

    def there() -> Tensor:
        ntloss = pytest.importorskip("ntloss")
        pytest.importorskip("loguru").logger.disable("ntloss")
        return getattr(ntloss, name)(tokenizer())(LOGITS, LABELS)

    def here() -> Tensor:
        from otloss_llm import NumberCost

        numbers = NumberCost.from_tokenizer(tokenizer())
        return otloss.number_token_loss(LOGITS, LABELS, numbers.values, form=form)

    return there, here


TOKENS = {
    "EMOLoss(logits, labels, W)": (emo, lambda: otloss_llm.emo_loss(*SHIFTED, EMBEDDING, directions=0)),
    "mode=2": (
        lambda: emo(mode=2),
        lambda: otloss_llm.emo_loss(*SHIFTED, EMBEDDING, directions=0, weighting="transport"),
    ),
    "cost_embedding=W": (emo, lambda: otloss_llm.emo_loss(*SHIFTED, embedding=EMBEDDING, directions=0)),
    "NTLoss(tokenizer)(logits, labels)": number_loss("NTLoss", "wasserstein"),
    "NTLossDotProduct(tokenizer)(logits, labels)": number_loss("NTLossDotProduct", "mse"),
}
ALL: dict[str, tuple[Any, Any]] = {**PAIRS, **GEOMLOSS, **SCIPY, **TOKENS}
NOT_RUN = ("OTT (JAX)", "Ordinal classification")


@pytest.mark.parametrize("call", ALL)
def test_both_calls_give_the_same(call: str) -> None:
    there, here = ALL[call]
    loose = 1e-3 if call in GEOMLOSS else 1e-5 if call in TOKENS else 1e-6
    np.testing.assert_allclose(np.asarray(here()), np.asarray(there()), rtol=loose, atol=1e-7)


def test_every_row_of_the_page_is_run() -> None:
    page = (Path(__file__).parents[1] / "docs/guide/coming_from.md").read_text(encoding="utf-8")
    tables = [part for part in page.partition("## Square roots")[0].split("\n## ") if not part.startswith(NOT_RUN)]
    rows = [row.split("` ")[0].removeprefix("| `") for row in "\n".join(tables).splitlines() if row.startswith("| `")]
    assert rows == list(ALL)


def test_the_cost_of_a_barycenter_is_not_symmetric() -> None:
    """Otherwise the row of POT's barycenter would hold for the cost and for its transpose."""
    one, other = (otloss.barycenter(COLUMNS.T, cost, SHARES, epsilon=0.05) for cost in (SKEW, SKEW.T))
    assert (one - other).abs().max() > 0.01
