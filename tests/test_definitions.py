"""The formulas of docs/guide/definitions.md, written down once more in numpy, and the defaults of its table."""

import inspect
import re
from pathlib import Path

import numpy as np
import pytest
import scipy.stats
import torch
from scipy.optimize import linprog

import otloss
from otloss import costs
from otloss_llm import EMO, EmbeddingCost, NumberCost, token_loss

PAGE = (Path(__file__).parents[1] / "docs/guide/definitions.md").read_text(encoding="utf-8")
GENERATOR = torch.Generator().manual_seed(0)
X, Y = (torch.rand(n, 2, generator=GENERATOR, dtype=torch.float64) for n in (4, 5))
P, Q = (torch.rand(n, generator=GENERATOR, dtype=torch.float64) + 0.1 for n in (4, 5))
P, Q = 2 * P / P.sum(), 2 * Q / Q.sum()  # a mass other than 1
C = torch.cdist(X, Y) ** 2
LINE = torch.tensor([0.0, 1.0, 2.5, 4.0, 7.0], dtype=torch.float64)
P_LINE = torch.tensor([0.1, 0.4, 0.3, 0.0, 0.2], dtype=torch.float64)
Q_LINE = torch.tensor([0.2, 0.0, 0.2, 0.5, 0.1], dtype=torch.float64)
GAPS = np.diff(LINE.numpy())


def kl(a: np.ndarray, b: np.ndarray) -> float:
    return float((a * np.log(a / b) - a + b).sum())


def test_transport_is_the_linear_program() -> None:
    rows, columns = np.kron(np.eye(4), np.ones(5)), np.kron(np.ones(4), np.eye(5))
    best = linprog(C.flatten().numpy(), A_eq=np.vstack([rows, columns]), b_eq=np.concatenate([P, Q])).fun
    assert float(otloss.emd(P, Q, C)) == pytest.approx(best, rel=1e-9)
    one_hot = torch.eye(4, dtype=torch.float64)[2] * Q.sum()
    assert float(otloss.emd(one_hot, Q, C)) == pytest.approx(float(Q @ C[2]))


@pytest.mark.parametrize("penalty", [None, (0.4, 0.9)])
def test_the_entropic_value_is_that_of_its_plan_and_no_nearby_plan_is_cheaper(
    penalty: tuple[float, float] | None,
) -> None:
    epsilon, mass = 0.1, float(P.sum()) if penalty is None else 1.0
    answer = otloss.solve(P, Q, C, epsilon=epsilon, marginal_penalty=penalty, tolerance=1e-12)
    product = np.outer(P, Q) / mass

    def value(plan: np.ndarray) -> float:
        total = float((plan * C.numpy()).sum()) + epsilon * kl(plan, product)
        if penalty is not None:
            total += penalty[0] * kl(plan.sum(1), P.numpy()) + penalty[1] * kl(plan.sum(0), Q.numpy())
        return total

    plan = answer.plan().numpy()
    assert float(answer.value) == pytest.approx(value(plan), rel=1e-8)
    around = np.zeros((4, 5))
    around[:2, :2] = 1e-3 * np.array([[1.0, -1.0], [-1.0, 1.0]])  # keeps the sums of rows and columns
    assert value(plan) < min(value(plan + around), value(plan - around))
    if penalty is None:
        f, g = (potential.numpy() for potential in answer.potentials)
        ratio = plan / (np.outer(P, Q) * np.exp((f[:, None] + g - C.numpy()) / epsilon))
        np.testing.assert_allclose(ratio, ratio[0, 0], rtol=1e-6)


@pytest.mark.parametrize("penalty", [None, 0.4])
def test_the_divergence(penalty: float | None) -> None:
    p, q = P, (Q if penalty is None else 1.5 * Q)
    options = {"epsilon": 0.1, "marginal_penalty": penalty, "tolerance": 1e-12}
    pairs = ((p, q, X, Y), (p, p, X, X), (q, q, Y, Y))
    one, with_p, with_q = (otloss.sinkhorn(a, b, costs.PointCost(x, y), **options) for a, b, x, y in pairs)
    expected = one - with_p / 2 - with_q / 2
    if penalty is not None:
        expected = expected + 0.05 * (p.sum() - q.sum()) ** 2
    actual = otloss.sinkhorn_divergence(p, q, costs.PointCost(X, Y), **options)
    assert float(actual) == pytest.approx(float(expected), rel=1e-6)


def test_the_line_has_orders_and_powers() -> None:
    apart = np.abs(P_LINE.numpy().cumsum() - Q_LINE.numpy().cumsum())[:-1]
    for power in (1, 2, 3):
        actual = otloss.cdf_distance(P_LINE, Q_LINE, LINE, power=power)
        assert float(actual) == pytest.approx(float(GAPS @ apart**power))
        actual = otloss.wasserstein_1d(P_LINE, Q_LINE, LINE, order=power)
        assert float(actual) == pytest.approx(float(otloss.emd(P_LINE, Q_LINE, (LINE[:, None] - LINE).abs() ** power)))
    energy = scipy.stats.energy_distance(LINE, LINE, P_LINE, Q_LINE)
    assert float(otloss.cdf_distance(P_LINE, Q_LINE, LINE)) == pytest.approx(energy**2 / 2)


def test_the_circle_takes_the_best_shift() -> None:
    n, period = 6, 5.0
    u, v = (torch.rand(n, generator=GENERATOR, dtype=torch.float64).sort().values * period for _ in range(2))
    around = np.concatenate([v.numpy() + turn * period for turn in range(-2, 3)])  # the quantiles of v on the line
    for order in (1, 2, 3):
        best = min((np.abs(u.numpy() - around[k : k + n]) ** order).mean() for k in range(4 * n + 1))
        actual = otloss.wasserstein_circular(None, None, u, v, order=order, period=period)
        assert float(actual) == pytest.approx(best)


def test_the_ordinal_loss() -> None:
    logits = torch.tensor([0.3, -1.0, 0.5, 2.0, 0.0], dtype=torch.float64)
    forecast, label = logits.softmax(-1).numpy(), 1
    apart = np.abs(forecast.cumsum() - (label <= np.arange(5)))[:-1]
    for power in (1, 2):
        loss = otloss.ordinal_loss(logits, torch.tensor(label), x=LINE, power=power, cross_entropy=0.3)
        assert float(loss) == pytest.approx(float(GAPS @ apart**power) - 0.3 * np.log(forecast[label]))
    expected = float(forecast @ np.abs(LINE.numpy() - LINE[label].item()))
    assert float(otloss.ordinal_loss(logits, torch.tensor(label), x=LINE, power=1)) == pytest.approx(expected)


def test_emo() -> None:
    embedding = torch.randn(7, 3, generator=GENERATOR, dtype=torch.float64)
    logits = torch.randn(1, 7, generator=GENERATOR, dtype=torch.float64).requires_grad_()
    unit = embedding / embedding.norm(dim=-1, keepdim=True)
    q, label = logits.softmax(-1)[0], 4
    distance, nll = q @ (1 - unit @ unit[label]), -q[label].log()
    expected = (nll + (nll / distance).detach().clamp(max=3) * distance) / 2
    cost = EmbeddingCost(embedding, directions=0)
    actual = token_loss(logits, torch.tensor([label]), objective=EMO(), cost=cost).loss
    assert actual.item() == pytest.approx(expected.item(), rel=1e-6)
    gradients = [torch.autograd.grad(value, logits)[0] for value in (actual, expected)]
    torch.testing.assert_close(*gradients, rtol=1e-6, atol=1e-9)


def test_numbers() -> None:
    values = torch.tensor([3.0, 9.0, 90.0, -90.0, 1e6, torch.nan])
    x = np.array([3, 9, 18, -18, 9 * (1 + np.log10(1e6 / 9))])
    distances = np.append(np.minimum(np.abs(x - x[1]), 9), 9.09)
    np.testing.assert_allclose(NumberCost(values).rows(torch.tensor([1]))[0], distances, rtol=1e-6)
    logits = torch.randn(1, 6, generator=GENERATOR)
    actual = otloss.number_token_loss(logits, torch.tensor([1]), values)
    assert float(actual) == pytest.approx(float(logits.softmax(-1)[0].numpy() @ distances), rel=1e-5)


def test_the_table_has_the_defaults_of_the_code() -> None:
    rows = re.findall(r"^\| `(\w+)` \| `(\w+)=([^`]+)` \|", PAGE, re.MULTILINE)
    assert len(rows) >= 9
    for name, option, default in rows:
        function = getattr(otloss, name, None) or getattr(costs, name)
        assert repr(inspect.signature(function).parameters[option].default).strip("'") == default.strip('"'), name


def test_the_formulas_are_valid() -> None:
    tex2mathml = pytest.importorskip("docutils.utils.math.latex2mathml").tex2mathml
    blocks, lines = re.findall(r"\$\$(.*?)\$\$", PAGE, re.DOTALL), re.sub(r"\$\$.*?\$\$", "", PAGE, flags=re.DOTALL)
    for formula in [*blocks, *re.findall(r"\$([^$]+)\$", lines)]:
        assert tex2mathml(formula.strip()).startswith("<math")
