"""Fused Gromov-Wasserstein against POT, brute force over permutations, and finite differences."""

import ot
import pytest
import torch
from torch import Tensor

from otloss import ConvergenceWarning, emd, fused_gromov, sinkhorn, solve
from tests.errors import raising


def _pair(seed: int, n: int = 5, m: int = 6) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x, y = (torch.randn(k, 3, dtype=torch.float64, generator=generator) for k in (n, m))
    p, q = (torch.rand(k, dtype=torch.float64, generator=generator) + 0.2 for k in (n, m))
    return torch.cdist(x, x), torch.cdist(y, y), torch.cdist(x, y), p / p.sum(), q / q.sum()


def _energy(C: Tensor, D: Tensor, M: Tensor, plan: Tensor, alpha: float) -> Tensor:
    squares = (C[:, None, :, None] - D[None, :, None, :]) ** 2
    return (1 - alpha) * (M * plan).sum() + alpha * torch.einsum("ijkl,ij,kl->", squares, plan, plan)


@pytest.mark.parametrize("alpha", [0.1, 0.3, 1.0])
def test_never_worse_than_pot_and_its_value_is_the_formula(alpha: float) -> None:
    for seed in range(4):
        C, D, M, p, q = _pair(seed)
        p[seed], q[0], q[2 * seed - 1] = 0.0, 0.0, 0.0
        p, q = p / p.sum(), q / q.sum()
        actual = fused_gromov(C, D, M, p, q, alpha=alpha, starts=6, generator=torch.Generator().manual_seed(0))
        torch.testing.assert_close(actual.value, _energy(C, D, M, actual.plan, alpha))
        torch.testing.assert_close(actual.plan.sum(-1), p)
        torch.testing.assert_close(actual.plan.sum(-2), q)
        theirs = ot.gromov.fused_gromov_wasserstein2(*(t.numpy() for t in (M, C, D, p, q)), alpha=alpha)
        assert float(actual.value) <= float(theirs) + 1e-9


@pytest.mark.parametrize("epsilon", [None, 0.1])
def test_a_number_common_to_both_spaces_changes_nothing(epsilon: float | None) -> None:
    pairs = [_pair(seed, 5, 5) for seed in range(3)]
    C, D, M, p, q = (torch.stack(each) for each in zip(*pairs, strict=True))
    offset = torch.tensor([1e8, 0.0, 1e4], dtype=torch.float64)[:, None, None]
    padded = [torch.nn.functional.pad(C + offset, (0, 1, 0, 1)), D + offset, torch.nn.functional.pad(M, (0, 0, 0, 1))]
    for actual, expected in (
        (
            fused_gromov(*padded, torch.nn.functional.pad(p, (0, 1)), q, epsilon=epsilon),
            fused_gromov(C, D, M, p, q, epsilon=epsilon),
        ),
        (
            fused_gromov(C[0] + 1e8, D + 1e8, M, p, q, epsilon=epsilon),
            fused_gromov(C[0], D, M, p, q, epsilon=epsilon),
        ),
    ):
        torch.testing.assert_close(actual.value, expected.value, rtol=1e-6, atol=0)


def _graph(n: int, generator: torch.Generator) -> Tensor:
    edges = torch.rand(n, n, dtype=torch.float64, generator=generator) < 0.4
    return (edges.triu(1) | edges.triu(1).T).double()


def _gradient(C: Tensor, D: Tensor, plan: Tensor) -> Tensor:
    plan = plan.clone().requires_grad_()
    return torch.autograd.grad(_energy(C, D, torch.zeros_like(plan), plan, 1.0), plan)[0]


def _line(n: int) -> Tensor:
    return torch.diag(torch.ones(n - 1), 1).double() + torch.diag(torch.ones(n - 1), -1)


@pytest.mark.filterwarnings("ignore::otloss.ConvergenceWarning")
@pytest.mark.parametrize("impl", ["numba", "torch"])
def test_minima_of_unweighted_graphs_are_optimal_at_their_own_gradient(
    impl: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Equal values of several plans, which the search stepped between, and called the last one a minimum."""
    if impl == "torch":
        monkeypatch.setattr("otloss.solvers.gromov.fused_gromov.may_run_on", lambda *_: False)
    generator, converged = torch.Generator().manual_seed(0), 0
    count = 60 if impl == "numba" else 20
    for _ in range(count):
        C, D = (_graph(int(n), generator) for n in torch.randint(3, 8, (2,), generator=generator))
        p, q = (torch.full((len(each),), 1 / len(each), dtype=torch.float64) for each in (C, D))
        found = fused_gromov(C, D)
        gradient = _gradient(C, D, found.plan)
        gradient -= gradient.min()
        fall = float((gradient * found.plan).sum() - emd(p, q, gradient))
        assert not found.converged or fall < 1e-7
        converged += int(found.converged)
    assert converged >= 0.8 * count  # conditional gradients are slow where a minimum is no corner


@pytest.mark.filterwarnings("ignore::otloss.ConvergenceWarning")
@pytest.mark.parametrize("impl", ["numba", "torch"])
def test_a_minimum_is_looked_for_among_all_plans_that_tie(impl: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another corner than the one that the simplex returns may be lower, as where graphs are equal."""
    if impl == "torch":
        monkeypatch.setattr("otloss.solvers.gromov.fused_gromov.may_run_on", lambda *_: False)
    graph = torch.zeros(5, 5, dtype=torch.float64)
    graph[1, 2] = graph[1, 4] = graph[3, 4] = 1  # a path of four nodes, and one alone
    order = torch.tensor([2, 1, 3, 0, 4])
    graph = graph + graph.T
    assert float(fused_gromov(graph, graph[order][:, order]).value) < 1e-9
    padded, p = torch.nn.functional.pad(graph, (0, 1, 0, 1), value=1e5), torch.tensor([0.2] * 5 + [0]).double()
    assert float(fused_gromov(padded, graph[order][:, order], p=p).value) < 1e-9
    generator, found = torch.Generator().manual_seed(0), 0
    for _ in range(count := 60 if impl == "numba" else 12):
        graph, order = _graph(6, generator), torch.randperm(6, generator=generator)
        found += float(fused_gromov(graph, graph[order][:, order]).value) < 1e-9
    assert found > 0.7 * count


def test_the_search_leaves_saddle_points() -> None:
    """At the product plan of cubes every plan is optimal at the gradient, and most are lower."""
    corners = torch.cartesian_prod(*[torch.arange(2.0).double()] * 3)
    cube = torch.cdist(corners, corners, p=1)
    assert float(fused_gromov(cube[:6, :6], cube).value) < 0.8  # 1.56 at the product plan, .5 to .71 at local minima
    cycle = torch.arange(6.0).double()[:, None] - torch.arange(6.0).double()
    cycle = torch.minimum(cycle.abs(), 6 - cycle.abs())
    with pytest.warns(ConvergenceWarning):
        assert float(fused_gromov(cycle, cycle, max_iterations=1).value) < 1e-9


def test_entropic_plans_of_unweighted_graphs_are_those_at_their_own_gradient() -> None:
    """Two plans that mirror each other, of one value, had each other as their target."""
    star = torch.zeros(5, 5, dtype=torch.float64)
    star[0, 1:] = star[1:, 0] = 1
    tree = torch.zeros(15, 15, dtype=torch.float64)
    for child in range(1, 15):
        tree[child, (child - 1) // 2] = tree[(child - 1) // 2, child] = 1
    generator = torch.Generator().manual_seed(1)
    pairs = [(_line(10), tree), (_line(4), star), *((_graph(6, generator), _graph(7, generator)) for _ in range(6))]
    for C, D in pairs:
        found = fused_gromov(C, D, epsilon=0.03)
        assert bool(found.converged)
        gradient = _gradient(C, D, found.plan)
        p, q = (torch.full((len(each),), 1 / len(each), dtype=torch.float64) for each in (C, D))
        expected = solve(p, q, gradient - gradient.min(), epsilon=0.03).plan()
        torch.testing.assert_close(found.plan, expected, atol=1e-4, rtol=0)


def test_entropic_plans_of_symmetric_spaces_are_no_saddles() -> None:
    """The product plan of points at even distances, and what is as symmetric as it, have targets of their symmetry."""
    line, angles = torch.arange(10.0).double().unsqueeze(1), torch.arange(24).double() * torch.pi / 12
    ellipse = torch.stack([2 * angles.cos(), angles.sin()], 1)
    for points, epsilon, value in ((line, 0.81, 1.74631), (ellipse, 0.16, 0.41170)):  # by POT from random starts
        distances = torch.cdist(points, points)
        assert float(fused_gromov(distances, distances, epsilon=epsilon).value) == pytest.approx(value, abs=2e-5)


def test_padding_and_batches_change_nothing() -> None:
    pairs = [_pair(seed, 4 + seed, 5) for seed in range(3)]
    C, M, p = torch.zeros(3, 6, 6).double(), torch.zeros(3, 6, 5).double(), torch.zeros(3, 6).double()
    for k, (c, _, cost, w, _) in enumerate(pairs):
        C[k, : len(c), : len(c)], M[k, : len(c)], p[k, : len(c)] = c, cost, w
    D, q = torch.stack([pair[1] for pair in pairs]), torch.stack([pair[4] for pair in pairs])
    actual = fused_gromov(C, D, M, p, q, alpha=0.5, starts=2)
    for k, (c, d, cost, w, v) in enumerate(pairs):
        alone = fused_gromov(c, d, cost, w, v, alpha=0.5, starts=2)
        assert float(actual.value[k]) == pytest.approx(float(alone.value), rel=1e-9)


def test_the_dtype_is_the_promoted_one_and_the_default_weights_are_uniform() -> None:
    C, D, M, _, q = _pair(0)
    given = C.bfloat16(), D.float(), M.bfloat16()
    actual, wide = (fused_gromov(*given, p, q.float()) for p in (None, torch.full((5,), 0.2, dtype=torch.float64)))
    assert (actual.value.dtype, actual.plan.dtype, wide.value.dtype) == (torch.float32, torch.float32, torch.float64)
    torch.testing.assert_close(actual.value, wide.value.float())


@pytest.mark.parametrize("epsilon", [None, 0.2])
def test_units_change_no_plan(epsilon: float | None) -> None:
    C, D, M, p, q = _pair(2)
    expected = fused_gromov(C, D, M, p, q, epsilon=epsilon)
    for unit in (1e-10, 1e140):
        scaled = (unit * C, unit * D, unit**2 * M)
        actual = fused_gromov(*scaled, p, q, epsilon=epsilon and epsilon * unit**2)
        torch.testing.assert_close(actual.plan, expected.plan, rtol=1e-6, atol=1e-9)
        assert float(actual.value) == pytest.approx(float(expected.value) * unit**2, rel=1e-9)


@pytest.mark.parametrize("epsilon", [None, 0.2])
def test_a_second_derivative_and_what_has_not_converged_are_told(epsilon: float | None) -> None:
    C, D, M, p, q = (t.requires_grad_() for t in _pair(0))
    value = fused_gromov(C, D, M, p, q, epsilon=epsilon).value
    gradients = torch.autograd.grad(value, (C, D, M, p, q), create_graph=True)
    for gradient, given in zip(gradients, (C, D, M, p, q), strict=True):
        with pytest.raises(RuntimeError, match="differentiable once"):
            torch.autograd.grad(gradient.square().sum(), given, retain_graph=True)
    with pytest.warns(ConvergenceWarning, match="1 of 1 fused Gromov problems did not converge"):
        assert not fused_gromov(C, D, M, p, q, epsilon=epsilon, max_iterations=1).converged


NAMES = ("C_x", "C_y", "feature_cost", "p", "q")
test_bad_input = raising(
    ({"feature_cost": None, "alpha": 0.5}, "without a feature_cost"),
    ({"C_x": torch.ones(5, 6)}, "distances within a space"),
    ({"C_x": 1e200 * torch.ones(5, 5).double()}, "overflow float64. Rescale"),
    ({"C_y": torch.ones(6, 6) * torch.inf, "alpha": 0.0}, "C_y holds 36 NaN"),
    call=lambda changed: fused_gromov(**(dict(zip(NAMES, _pair(0), strict=True)) | changed)),
)


def test_the_value_between_equal_spaces_is_not_below_zero() -> None:
    for seed in range(20):
        generator = torch.Generator().manual_seed(seed)
        points, weights = (torch.rand(*size, generator=generator, dtype=torch.float64) for size in ((5, 2), (5,)))
        distances, weights = torch.cdist(points, points), weights / weights.sum()
        assert float(fused_gromov(distances, distances, distances, weights, weights).value) >= 0


def test_features_alone_are_entropic_transport_at_any_mass() -> None:
    p, q = torch.tensor([0.5, 1.5, 1.0]).double(), torch.tensor([2.0, 1.0]).double()
    features, distances = torch.arange(6.0).reshape(3, 2).double(), torch.zeros(3, 3).double()
    value = fused_gromov(distances, distances[:2, :2], features, p, q, alpha=0.0, epsilon=0.7).value
    torch.testing.assert_close(value, sinkhorn(p, q, features, epsilon=0.7))
