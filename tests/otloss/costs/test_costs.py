"""Costs against loops in float64: rows, products, soft minima, degenerate rows, dtypes; shortest paths."""

import copy
import math

import networkx
import numpy as np
import pytest
import scipy.sparse
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import otloss
from otloss import emd, lower_bound
from otloss.costs import CosineCost, Cost, DenseCost, GridCost, LineCost, PointCost, as_cost, graph_cost
from otloss.costs.cost import FROM_ROWS
from otloss.costs.dense import SignedCost
from tests.errors import raising
from tests.otloss.draws import normal
from tests.otloss.oracles import as_double, check_questions, cosine_matrix
from tests.otloss.strategies import square_problems


def embedding(dtype: torch.dtype = torch.float64) -> Tensor:
    rows = torch.randn(40, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    rows[3] = 0
    rows[7] = rows[8] * 3
    rows[9] = -rows[8]
    return rows.to(dtype)


def costs() -> list[Cost]:
    matrix = torch.rand(5, 7, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    x = torch.tensor([2.0, -1.0, 2.0, 5.0], dtype=torch.float64)
    return [DenseCost(matrix), CosineCost(embedding()), LineCost(x), LineCost(x, power=2), LineCost(x, power=0.5)]


@pytest.mark.parametrize("cost", costs(), ids=repr)
def test_every_question_agrees_with_the_matrix(cost: Cost) -> None:
    check_questions(cost, cost.dense())
    assert cost.dense().min() >= 0
    assert cost.shape[0] != cost.shape[1] or cost.diagonal().abs().max() == 0


class Half(PointCost):
    """Costs that differ from the costs of the metric."""

    def rows(self, index: Tensor) -> Tensor:
        return super().rows(index) / 2


def test_what_solvers_ask() -> None:
    matrix = torch.rand(4, 4, dtype=torch.float64).fill_diagonal_(0.0)
    x = torch.rand(4, 2, dtype=torch.float64)
    points, line, grid = PointCost(x, 2 * x), LineCost(x[:, 0]), GridCost((2, 2)).to(torch.float64)
    # Each structure belongs to one class, whose methods know it, and not to its subclasses.
    for cost in (points, line, grid, DenseCost(matrix), CosineCost(x), PointCost(x, metric=torch.cdist), Half(x)):
        assert [known is cost for known in (cost.as_points(), cost.as_line(), cost.as_grid())] == [
            cost is other for other in (points, line, grid)
        ]
        stored, symmetric = cost.stored_matrix(), cost.dense()
        assert stored is None or (isinstance(cost, DenseCost) and stored is cost.matrix)
        assert cost.has_plain_entries
        assert cost.is_symmetric() == torch.allclose(symmetric, symmetric.mT)
        assert cost.costs_within() is not None or not cost.is_symmetric()
        assert torch.equal(cost.T.contiguous().dense(), cost.dense().mT)
    assert LineCost(x[:, 0], power=0.5).as_line() is None
    assert DenseCost(matrix).T.contiguous().dense().is_contiguous()
    assert not SignedCost(matrix - 1).has_plain_entries
    image = GridCost((32, 24), spacing=2.0)
    assert image.softmin_work() < math.prod(image.shape) == PointCost(torch.rand(768, 2)).softmin_work()
    blocks = image.coarser(5)
    assert (blocks.cells, blocks.spacing, blocks.power) == ((7, 5), (10.0, 10.0), 2.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_symmetry_is_judged_beside_ordinary_costs(dtype: torch.dtype) -> None:
    """Neither a price for pairs that must not be nor another problem of the batch makes a difference a rounding."""
    directed = torch.rand(4, 4, dtype=dtype, generator=torch.Generator().manual_seed(0)).fill_diagonal_(0.0)
    both_ways, size = directed + directed.mT, 1e9 if dtype == torch.float32 else 1e15

    def beside_price(matrix: Tensor) -> DenseCost:
        padded = torch.nn.functional.pad(matrix, (0, 1, 0, 1), value=size)
        padded[-1, -1] = 0.0
        return DenseCost(padded)

    for cost in (
        DenseCost(both_ways + torch.finfo(dtype).eps * directed), beside_price(both_ways),
        DenseCost(torch.stack([size * both_ways, both_ways])), DenseCost(torch.zeros(2, 2, dtype=dtype)),
    ):  # fmt: skip
        assert cost.is_symmetric()
        assert cost.costs_within() is not None
    for cost in (beside_price(directed), DenseCost(torch.stack([size * both_ways, directed]))):
        assert not cost.is_symmetric()
        assert cost.costs_within() is None
    ones = torch.ones(4, 4, dtype=dtype)
    for cost in (beside_price(ones), DenseCost(torch.stack([size * both_ways, ones]))):
        assert cost.costs_within() is None


@pytest.mark.parametrize("cost", [*costs(), PointCost(embedding()), GridCost((3, 4)).to(torch.float64)], ids=repr)
def test_a_subclass_that_overrides_rows_answers_by_them(cost: Cost) -> None:
    class Other(type(cost)):  # type: ignore[misc]
        def rows(self, index: Tensor) -> Tensor:
            rows: Tensor = super().rows(index)
            return 0.3 * rows

    other = copy.copy(cost)
    other.__class__ = Other
    check_questions(other, 0.3 * cost.dense())
    assert other.stored_matrix() is other.centroid_bound(*torch.rand(3, 1)) is None


def test_a_subclass_with_other_costs_is_not_solved_with_its_metric() -> None:
    x, y = embedding()[:5, :2], embedding()[10:17, :2] + 1
    p, q = torch.full((5,), 1 / 5, dtype=torch.float64), torch.full((7,), 1 / 7, dtype=torch.float64)
    points = x.clone().requires_grad_()
    value, expected = emd(p, q, Half(points, y)), emd(p, q, PointCost(points, y)) / 2
    torch.testing.assert_close(value, expected)
    torch.testing.assert_close(*(torch.autograd.grad(v, points)[0] for v in (value, expected)))
    assert lower_bound(p, q, Half(x, y)) <= value


def test_each_method_of_a_cost_follows_from_the_rows_or_belongs_to_the_class() -> None:
    """A new method has to be marked, or else a subclass with rows of its own would inherit another formula."""
    of_the_class = {
        "shape", "rows", "T", "batch_shape", "dtype", "device", "tensors", "parameters", "to", "with_tensors",
        "row_blocks", "streamed", "costs_within", "as_points", "as_grid", "as_line",
    }  # fmt: skip
    assert {name for name in vars(Cost) if not name.startswith("_")} == of_the_class | FROM_ROWS
    assert not of_the_class & FROM_ROWS


class Softer(GridCost):
    def softmin(self, potential: Tensor, epsilon: float | Tensor) -> Tensor:
        return 1 + super().softmin(potential, epsilon)


def test_soft_minima_at_one_epsilon() -> None:
    epsilon, potentials = torch.tensor([0.1, 2.0]), torch.randn(2, 12, generator=torch.Generator().manual_seed(0))
    for cost in (GridCost((3, 4)), GridCost((3, 4), spacing=9.0), Softer((3, 4)), PointCost(torch.rand(12, 2))):
        softmin = cost.softmin_at(epsilon)
        torch.testing.assert_close(softmin(potentials), cost.softmin(potentials, epsilon))
        torch.testing.assert_close(softmin(potentials[:1]), cost.softmin(potentials[:1], epsilon))


@given(square_problems())
def test_cosine_rows_are_the_definition(problem: tuple[np.ndarray, np.ndarray, np.ndarray]) -> None:
    points = as_double(problem[2])
    cost = CosineCost(points)
    dense = cost.dense()
    usable = (points.abs().amax(-1) > 1e-100) | cost.zero_rows  # the oracle's own squares vanish below
    torch.testing.assert_close(dense[usable][:, usable], cosine_matrix(points)[usable][:, usable], atol=1e-12, rtol=0)
    assert cost.zero_rows.tolist() == [not row.any() for row in problem[2]]
    assert dense.diagonal().abs().max() == 0
    assert dense.min() >= 0
    assert dense.max() <= 2


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_zero_rows_duplicates_and_precision(dtype: torch.dtype) -> None:
    rows, v = embedding(dtype), torch.rand(40)
    cost, exact = CosineCost(rows), cosine_matrix(rows)
    dense = cost.dense()
    assert dense[3].tolist() == dense[:, 3].tolist() == [1.0] * 3 + [0.0] + [1.0] * 36
    assert dense.diagonal().abs().max() == 0 == cost.unit[3].abs().sum()
    assert 0 <= dense[8, 7] < 10 * torch.finfo(dtype).eps
    assert cost.dtype == cost.rows(torch.tensor([1])).dtype == dense.dtype == torch.promote_types(dtype, torch.float32)
    assert (dense - exact).abs().max() < 1e-6
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert (cost.dense() - exact).abs().max() < 1e-6
        assert (cost.apply(v) - exact @ v.double()).abs().max() < 1e-6 * v.sum()
    assert cost.apply(v.to(dtype)).dtype == cost.dtype
    assert DenseCost(torch.ones(2, 2, dtype=dtype)).dtype == LineCost(torch.ones(2, dtype=dtype)).dtype == cost.dtype


def test_gradients_at_kinks_are_finite() -> None:
    rows = embedding()[:9].clone().requires_grad_()  # with a row of zeros and duplicates
    (by_rows,) = torch.autograd.grad(CosineCost(rows).dense().square().sum(), rows)
    assert torch.isfinite(by_rows).all()
    assert by_rows[3].abs().sum() == 0
    for power in (0.5, 1, 1.5, 2):
        x = torch.tensor([0.0, 1.0, 3.5], dtype=torch.float64, requires_grad=True)
        upper = torch.ones(3, 3).triu(1).bool()
        assert torch.autograd.gradcheck(lambda x, p=power, u=upper: LineCost(x, power=p).dense()[u], x)
        (by_x,) = torch.autograd.grad(LineCost(x, power=power).dense().sum(), x)
        assert torch.isfinite(by_x).all()


three = LineCost(torch.arange(3.0))
test_bad_input = raising(
    (lambda: DenseCost(torch.tensor([[0.0, -0.25]])), r"holds -0.25 at index \(0, 1\).*clamp rounding"),
    (lambda: CosineCost(torch.tensor([[1.0], [torch.inf], [torch.nan]])), "embedding row 1 holds"),
    (lambda: three.rows(torch.tensor([-100])), r"index\[0\] is -100.*drop ignored labels"),
    (lambda: as_cost(np.eye(2)), TypeError, r"cost is a ndarray, .*torch.as_tensor\(cost\)"),  # type: ignore[arg-type]
    (lambda: three.softmin(torch.ones(3), torch.tensor([0.0, torch.nan])), "epsilon holds 1 NaN"),
)


def floyd_warshall(lengths: np.ndarray) -> np.ndarray:
    n = len(lengths)
    best = np.where((lengths == 0) | np.isinf(lengths), math.inf, lengths)
    np.fill_diagonal(best, 0.0)
    for k in range(n):
        for i in range(n):
            for j in range(n):
                best[i, j] = min(best[i, j], best[i, k] + best[k, j])
    return best


def random_graph(n: int, seed: int, *, directed: bool) -> np.ndarray:
    """A ring, which connects it, and some chords."""
    rng = np.random.default_rng(seed)
    lengths = rng.uniform(0.5, 2.0, (n, n)) * (rng.random((n, n)) < 0.3)
    lengths[np.arange(n), (np.arange(n) + 1) % n] = rng.uniform(0.5, 2.0, n)
    return lengths if directed else np.maximum(lengths, lengths.T)


@given(st.integers(2, 9), st.integers(0, 1000), st.booleans())
def test_lengths_are_those_of_the_shortest_paths(n: int, seed: int, directed: bool) -> None:
    lengths = random_graph(n, seed, directed=directed)
    expected = torch.from_numpy(floyd_warshall(lengths))
    torch.testing.assert_close(graph_cost(torch.from_numpy(lengths)).dense(), expected)
    torch.testing.assert_close(graph_cost(scipy.sparse.csr_array(lengths)).dense(), expected)
    infinite = torch.from_numpy(np.where(lengths == 0, np.inf, lengths))
    torch.testing.assert_close(graph_cost(infinite).dense(), expected)
    assert graph_cost(torch.from_numpy(lengths).float()).dtype == torch.float32
    assert graph_cost(torch.from_numpy(lengths).bfloat16()).dtype == torch.float32


def test_a_long_path_and_edges_that_rounding_swallows() -> None:
    lengths = torch.ones(299, dtype=torch.float64).index_fill(0, torch.tensor(3), 1e-30).diag(1)
    leaf = (lengths + lengths.T).requires_grad_()
    length = graph_cost(leaf).dense()[0, -1]
    assert length == 298
    assert torch.equal(torch.autograd.grad(length, leaf)[0], torch.ones(299).double().diag(1))


def test_stored_zeros_of_a_sparse_matrix_are_edges() -> None:
    edges = scipy.sparse.csr_array((np.array([0.0, 2.0, 0.0, 2.0]), ([0, 1, 1, 2], [1, 2, 0, 1])), shape=(3, 3))
    assert graph_cost(edges).dense().tolist() == [[0, 0, 2], [0, 0, 2], [2, 2, 0]]
    assert graph_cost(edges.astype(np.float32)).dtype == torch.float32
    parallel = scipy.sparse.coo_array(([3.0, 1.0, 1.0], ([0, 0, 1], [1, 1, 0])), shape=(2, 2))
    assert graph_cost(parallel).dense().tolist() == [[0, 1], [1, 0]]
    assert graph_cost(torch.zeros(1, 1)).dense().tolist() == [[0.0]]


test_bad_graphs = raising(
    (lambda: graph_cost(np.ones((2, 2))), TypeError, "adjacency is a ndarray"),
    (lambda: graph_cost(networkx.path_graph(3)), TypeError, r"is a Graph, .* pass networkx.to_scipy_sparse_array\("),
    (lambda: graph_cost(networkx.MultiGraph([(0, 1)])), TypeError, r"to_numpy_array\(adjacency, multigraph_weight=min"),
    (lambda: graph_cost(torch.tensor([[0.0, -1.0], [1.0, 0.0]])), r"holds -1.0 at \(0, 1\)"),
    (lambda: graph_cost(torch.tensor([[0.0, 1.0], [torch.nan, 0.0]])), r"holds nan at \(1, 0\)"),
    (lambda: graph_cost(torch.tensor([[0.0, 1.0], [0.0, 0.0]])), "no path leads from node 1 to node 0"),
)


def uphill(x: Tensor, y: Tensor) -> Tensor:
    """Costs of a way up are twice those of the way down."""
    change = x.unsqueeze(-2) - y.unsqueeze(-3)
    return (2 * change.clamp(min=0) + (-change).clamp(min=0)).sum(-1)


def test_a_directed_function_of_two_clouds() -> None:
    x, p = normal(6, 2).double(), torch.full((6,), 1 / 6, dtype=torch.float64)
    cost = PointCost(x, metric=uphill)
    assert not cost.is_symmetric()
    actual, expected = (otloss.solve(p, p, c, epsilon=0.3) for c in (cost, uphill(x, x)))
    torch.testing.assert_close(actual.plan(), expected.plan(), rtol=1e-6, atol=1e-8)
    for call in (
        lambda: otloss.sinkhorn_divergence(p, p, cost, epsilon=0.3),
        lambda: otloss.cloud_loss(x, x + 1, metric=uphill, epsilon=0.3),
    ):
        with pytest.raises(ValueError, match="the metric gives other costs of x to y than of y to x"):
            call()
    with pytest.raises(ValueError, match="differ"):
        otloss.barycenter(p.expand(2, 6), cost, epsilon=0.3, debiased=True)
    kinds = torch.arange(512).double().unsqueeze(-1) % 2  # the direction follows the order of the rows
    assert not PointCost(kinds, metric=uphill).is_symmetric()
    with pytest.raises(ValueError, match="the metric gave costs from nan to nan, expected finite"):
        otloss.cloud_loss(x, x + 1, metric=lambda x, y: uphill(x, y) / uphill(x, y), epsilon=0.3)


def test_rounding_of_a_function_is_no_direction() -> None:
    x = (100 + normal(40, 2)).float()

    def by_products(x: Tensor, y: Tensor) -> Tensor:
        lengths = x.square().sum(-1, keepdim=True) + y.square().sum(-1).unsqueeze(-2)
        return (lengths - 2 * x @ y.mT).clamp(min=0)

    assert PointCost(x, metric=by_products).is_symmetric()
    rounding = torch.finfo(x.dtype).eps * float(x.square().sum(-1).max())  # of a cost
    assert otloss.cloud_loss(x, x + 1, metric=by_products, epsilon=0.3) == pytest.approx(2.0, abs=10 * rounding)
