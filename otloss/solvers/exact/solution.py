"""Exact transport between histograms.

    emd(p, q, C) = min <C, P>  over  P >= 0,  P 1 = p,  P^T 1 = q
                 = max f.p + g.q  over  f_i + g_j <= C_ij

Gradients by duality: f for p, g for q, the plan P for C. The solver sees only the bins that hold mass, in float64, with
costs and masses scaled to one. Its potentials are then extended to every bin by the c-transform

    f_i = min over j with q_j > 0 of C_ij - g_j        g_j = min over i with p_i > 0 of C_ij - f_i

which at a bin without mass is the one-sided derivative of the value (the price of an infinitesimal mass there), and
which is feasible whatever the solver returned. So `<C, P> - (f.p + g.q)` certifies each answer, and is checked.

Where the optimum is degenerate (a proper part of p's mass equals a part of q's, as in assignment problems), potentials
are not unique and the value has a kink in the weights: the gradient is one of its subgradients.

Uniform weights on equally many bins are assigned along shortest paths (`assignment_numba`), and all other problems
are solved by the network simplex (`simplex_numba`), one problem per thread. Assignments between large clouds that
differ in their means and spread start from the potentials of a few Sinkhorn iterations, on costs less the means of
their rows and columns: that changes no plan, and what is left is small also for clouds that lie apart (for squared
distances it is -2 (x_i - mean x).(y_j - mean y)). They change no value, and shorten the search (docs/guide/clouds.md).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import ClassVar

import torch
from jaxtyping import Float, Int
from torch import Tensor

from otloss._autograd import Unchanged
from otloss._checks import check_finite
from otloss.costs import DenseCost
from otloss.costs.cost import makes_graph
from otloss.solvers.exact.optimum import Optimum, owners_of, solve_arrays
from otloss.solvers.histograms import centre_of
from otloss.solvers.problem import Problem

FindStart = Callable[[Problem, Tensor], tuple[Tensor, Tensor] | None]  # from the problem and its matrix


@dataclass(frozen=True)
class ExactSolution:
    """The solution of an exact problem, as `otloss.solvers.transport.Solution` describes it.

    Attributes:
        problem: its cost is a matrix. With `cell_costs` the matrix has no graph.
        cell_costs: (..., cells), the costs of the cells of the plan, with the graph of the points: the value depends on
            no other costs.
    """

    problem: Problem
    optimum: Optimum
    value: Float[Tensor, "*batch"]
    cell_costs: Float[Tensor, "*batch cells"] | None = None
    _unchanged: Unchanged = field(init=False, repr=False)

    only_value_has_gradients: ClassVar[str | None] = (
        "an exact plan and its potentials jump where they change at all, so they have no derivative; use `value`, "
        'or an epsilon with grad="implicit".'
    )

    def __post_init__(self) -> None:
        object.__setattr__(self, "_unchanged", Unchanged(*self.problem.cost.tensors()))

    @property
    def inputs(self) -> tuple[Tensor, ...]:
        """The tensors that the value depends on, and epsilon."""
        costs = self.problem.cost.dense() if self.cell_costs is None else self.cell_costs
        return (self.problem.p, self.problem.q, self.problem.epsilon, costs)

    @property
    def iterations(self) -> Tensor:
        return self.optimum.iterations.to(self.problem.p.device)

    @property
    def converged(self) -> Tensor:
        return torch.ones(self.problem.batch, dtype=torch.bool, device=self.problem.p.device)

    @property
    def potential_error(self) -> Tensor:
        """The rounding of the potentials: while they are computed, and in the dtype of the answer.

        The latter is without the constant that may be moved.
        """
        sizes = []
        for potential, weights in ((self.optimum.f, self.problem.p), (self.optimum.g, self.problem.q)):
            has_mass = (weights.detach() > 0).to(potential.device)
            deviation = potential - centre_of(potential.to(self.problem.dtype), has_mass).to(potential)
            sizes.append(deviation.abs().masked_fill(~has_mass, 0.0).amax(-1))
        rounding = torch.finfo(self.problem.dtype).eps * torch.maximum(*sizes)
        rounding = rounding + torch.finfo(torch.float64).eps * self.optimum.largest_potential
        return rounding.to(self.problem.p.device)

    @cached_property
    def marginal_error(self) -> Tensor:
        optimum = self.optimum
        p, q = (w.detach().to(optimum.flows) for w in (self.problem.p, self.problem.q))
        sums = (
            torch.zeros_like(w).scatter_add_(-1, ends, optimum.flows)
            for w, ends in ((p, optimum.rows), (q, optimum.columns))
        )
        difference = sum((total - w).abs().sum(-1) for total, w in zip(sums, (p, q), strict=True))
        return difference / p.sum(-1).clamp(min=torch.finfo(p.dtype).tiny)

    @cached_property
    def potentials(self) -> tuple[Tensor, Tensor]:
        """f and g, lowered at bins without mass so that f + g <= C holds too where both bins have none."""
        f, g = self.optimum.f, self.optimum.g
        p, q = (w.detach().to("cpu") for w in (self.problem.p, self.problem.q))
        if not bool((p == 0).any() and (q == 0).any()):
            return f, g
        self._unchanged.check("potentials of bins without mass")
        slack = self.problem.cost.dense().detach().to("cpu", torch.float64) - f.unsqueeze(-1)
        smallest = slack.masked_fill((p > 0).unsqueeze(-1), torch.inf).amin(-2)
        return f, torch.where(q == 0, torch.minimum(g, smallest), g)

    @property
    def linear_cost(self) -> Tensor:
        return self.value

    @cached_property
    def dual_value(self) -> Tensor:
        return (self.optimum.value - self.optimum.gap).to(self.problem.p.device)

    @cached_property
    def gap(self) -> Tensor:
        return (self.optimum.gap.clamp(min=0) + self.optimum.payment).to(self.problem.p.device)

    @property
    def bounds(self) -> tuple[Tensor, Tensor]:
        return self.dual_value, self.dual_value + self.gap

    def plan_blocks(self) -> Iterator[tuple[slice, Tensor]]:
        yield slice(None), self.optimum.plan().to(self.problem.p.device)

    def streamed_product(self, v: Tensor, *, is_transposed: bool, per_mass: bool = False) -> Tensor | None:
        return None  # its plans have few entries

    # ---- derivatives of the value ----

    @property
    def weight_gradients(self) -> tuple[Tensor, Tensor]:
        return self.optimum.f, self.optimum.g

    def cost_gradients(self, upstream: Float[Tensor, "*batch"]) -> tuple[Tensor, ...]:
        """The plan: in the shape of the matrix, or the mass of its cells."""
        flows = self.optimum.flows
        amounts = upstream.to(flows).unsqueeze(-1) * flows
        if self.cell_costs is not None:
            return (amounts.to(self.cell_costs.device),)
        matrix = self.problem.cost.dense()
        # A matrix of its own per problem gets one flow per cell; where problems share one, flows add up in float64.
        alone = matrix.shape[:-2].numel() == upstream.numel()
        flat = torch.zeros(matrix.numel(), dtype=matrix.dtype if alone else torch.float64, device="cpu")
        flat.index_add_(0, self._cells.flatten(), amounts.flatten().to(flat.dtype))
        return (flat.reshape(matrix.shape).to(matrix),)

    def cost_tangent(self, *tangents: Tensor) -> Float[Tensor, "*batch"]:
        """The change of the value along a change of the matrix, or of the costs of the cells."""
        flows = self.optimum.flows
        if self.cell_costs is not None:
            return (tangents[0].to(flows) * flows).sum(-1)
        return (tangents[0].to(flows).reshape(-1)[self._cells] * flows).sum(-1)

    @property
    def _cells(self) -> Int[Tensor, "*batch cells"]:
        """Return where the cells of the plan are in the flattened matrices, one of each problem or shared."""
        (n, m), own = self.problem.cost.shape, self.problem.cost.batch_shape
        owners = torch.from_numpy(owners_of(own, self.problem.batch))
        return owners.unsqueeze(-1) * (n * m) + self.optimum.rows * m + self.optimum.columns


def solve_exactly(problem: Problem, *, find_start: FindStart | None = None, warns: bool = True) -> ExactSolution:
    """Solve a reduced problem; its cost becomes a matrix.

    The value between points is differentiated through the costs of the pairs that exchange mass alone. `find_start`
    looks for potentials to start from where the problem has none. With `warns`, mass that may be rounding and pays a
    price is named.
    """
    cost, start = problem.cost, problem.start
    points = cost.as_points()
    moving = points if points is not None and makes_graph(points.x, points.y) else None
    matrix = cost.dense() if moving is None else moving.without_graph().dense()
    is_stored = cost.stored_matrix() is not None
    if not is_stored:
        check_finite("cost", matrix)
    if start is None and find_start is not None:
        start = find_start(problem, matrix.detach())
    problem = problem if is_stored else replace(problem, cost=DenseCost.unchecked(matrix))
    optimum = solve_arrays(problem.p, problem.q, matrix, start=start, rounding=problem.weight_rounding, warns=warns)
    cell_costs = None if moving is None else moving.pairs(optimum.rows, optimum.columns)
    return ExactSolution(problem, optimum, optimum.value.to(problem.p), cell_costs)
