"""The implicit function theorem between the cells of large grids: products along the axes, and conjugate gradients.

With G = exp((f + g - C) / epsilon) / M, M the mass, R = G diag(q), S = G^T diag(p), whose rows sum to one at the
solution, changes of the weights change the potentials by epsilon a and epsilon b,

    (I - S R) b = S G dq - G^T dp,    a = -R b - G dq,    <q, b> = 0

S R is self-adjoint in the inner product weighted by q and has the constants as its fixed points; conjugate gradients
take as many products as the plan's slowest mode needs. C is a sum over the axes, so G is a product of one small matrix
for each axis, taken as conditional means: every number stays near those that are averaged.

Whether there is a solution depends on the smallest eigenvalue of I - S R on vectors without a constant, a share of the
mass that parts of the plan exchange. Conjugate gradients with a random right-hand side c estimate it: the quotient
<b, c> / <b, b> of each iterate b is at least that eigenvalue, and tends to it where it is far below the others.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from otloss._autograd import once_only
from otloss._checks import has_tangent
from otloss.costs import GridCost
from otloss.costs.grid import SHIFT, SMALLEST_EXPONENT
from otloss.solvers.condition import check_condition, corrected, singular_equations_error
from otloss.solvers.entropic.arithmetic import potential_of_plan
from otloss.solvers.entropic.equations.conjugate_gradients import Equations, conjugate_gradients
from otloss.solvers.entropic.equations.looks import Looks
from otloss.solvers.problem import Problem

MIN_CELLS = 512  # fewer are solved as dense systems, with third derivatives
RESIDUAL, MAX_PRODUCTS = 1e-11, 3000  # where conjugate gradients end
RESIDUAL_OF_ESTIMATE = 1e-6  # a random right-hand side has every mode with a weight of about 1 / sqrt(cells)
_THIRD = "third derivatives between the cells of a grid are given up to 512 cells; drop create_graph=True."


def suits_axes(problem: Problem) -> bool:
    """Whether products along the axes give the implicit derivatives of this problem."""
    cost, epsilon = problem.cost.as_grid(), problem.epsilon
    if cost is None or problem.marginal_penalty is not None or cost.shape[0] < MIN_CELLS:
        return False
    if epsilon.requires_grad or has_tangent(problem.p, problem.q) or cost.device.type == "mps" or not epsilon.numel():
        return False
    return float(epsilon.detach().amin()) >= cost.smallest_epsilon_for_products


class _Product:
    """v to G v, for potentials of the rows and of the columns in float64; v is 0 at columns without mass.

    Between a row and a column without mass G may overflow; `over_all` computes products with other v.
    """

    def __init__(
        self, cost: GridCost, rows: Tensor, columns: Tensor, epsilon: Tensor, has_mass: Bool[Tensor, "*batch m"]
    ) -> None:
        self.cells, self.steps = cost.cells, []
        self.cost, self.rows, self.columns, self.epsilon, self.has_mass = cost, rows, columns, epsilon, has_mass
        width, h = epsilon[..., None, None], columns.masked_fill(~has_mass, -torch.inf).unflatten(-1, self.cells)
        for axis in range(-len(self.cells), 0):
            kernel = (cost.axis_costs(axis).double() / -width + SHIFT).exp()
            lines = _lines(h, axis, epsilon.dim())
            top = lines.amax(-1, keepdim=True)
            terms = (lines - top.masked_fill(top == -torch.inf, 0.0)) / width + SHIFT
            terms = terms.clamp(min=SMALLEST_EXPONENT).exp()
            total = terms @ kernel
            self.steps.append((axis, kernel, terms, total))
            h = _image(top + width * (total.log() - 2 * SHIFT), axis, h)
        self.scale = ((rows + h.flatten(-len(self.cells))) / epsilon.unsqueeze(-1)).clamp(max=-SMALLEST_EXPONENT).exp()

    def __call__(self, v: Tensor) -> Tensor:
        size = v.abs().amax(-1, keepdim=True)  # numbers above one could overflow
        image = (v / size.masked_fill(size == 0, 1.0)).unflatten(-1, self.cells)
        for axis, kernel, terms, total in self.steps:
            means = (terms * _lines(image, axis, total.dim() - 2)) @ kernel / total
            image = _image(means, axis, image)
        return image.flatten(-len(self.cells)) * (self.scale * size)

    def over_all(self, v: Tensor) -> Tensor:
        """Return G v for a v that need not be 0 at columns without mass."""
        others = v.masked_fill(self.has_mass, 0.0)
        product = self(v.masked_fill(~self.has_mass, 0.0))
        if not others.any():
            return product
        every = torch.ones_like(self.has_mass)
        return product + _Product(self.cost, self.rows, self.columns, self.epsilon, every)(others)

    def scaled_to_one(self, weights: Tensor) -> Tensor:
        """Return the product with the weights, after which it is one."""
        product = self(weights)
        self.scale, self.rows = self.scale / product, self.rows - self.epsilon.unsqueeze(-1) * product.log()
        return product


def _lines(image: Tensor, axis: int, batch: int) -> Float[Tensor, "*batch lines size"]:
    """All lines along an axis; `batch` is the number of leading axes."""
    return image.movedim(axis, -1).flatten(batch, -2) if image.dim() > batch + 1 else image.unsqueeze(-2)


def _image(lines: Tensor, axis: int, like: Tensor) -> Tensor:
    return lines.reshape(like.movedim(axis, -1).shape).movedim(-1, axis)


@dataclass(frozen=True)
class _Equations:
    """R = G diag(q) and S = G^T diag(p) at a solution, their rows scaled to sum to one; in float64, without a graph.

    Potentials that have converged to a tolerance give other sums, and these would stand for mass that parts exchange.
    """

    times: _Product  # v to G v
    transposed: _Product
    p: Float[Tensor, "*batch n"]
    q: Float[Tensor, "*batch n"]
    received: Float[Tensor, "*batch n"]  # G^T p for the scaled R: 1 at the solution
    f: Float[Tensor, "*batch n"]  # belongs to the scaled R

    @staticmethod
    def at(problem: Problem, f: Tensor, g: Tensor) -> _Equations:
        cost, epsilon = problem.cost.as_grid(), problem.epsilon.detach().double()
        assert cost is not None
        p, q = (w.detach().double() for w in (problem.p, problem.q))
        times = _Product(cost, f, g, epsilon, q > 0)
        f = f - epsilon.unsqueeze(-1) * times.scaled_to_one(q).log()
        transposed = _Product(cost, g, f, epsilon, p > 0)
        return _Equations(times, transposed, p, q, transposed.scaled_to_one(p), f)

    def check_condition(self) -> None:
        """Raise RuntimeError where parts of the plan exchange so little mass that rounding decides the solution."""
        random = torch.Generator("cpu").manual_seed(0)
        noise = torch.randn(self.q.shape, generator=random, device="cpu", dtype=torch.float64).to(self.q)
        self._conjugate_gradients(torch.where(self.q > 0, noise * self.q.rsqrt(), 0.0), RESIDUAL_OF_ESTIMATE)

    def solve(self, right: Tensor) -> Tensor:
        """Return the b with (I - S R) b = right, less a constant, and <q, b> = 0."""
        b = self._conjugate_gradients(right, RESIDUAL)
        # What bins without mass lack, which the inner product does not see.
        return self._centred(right + self.transposed(self.p * self.times(self.q * b)))

    def _conjugate_gradients(self, right: Tensor, precision: float) -> Tensor:
        start = self._centred(right)

        def check(b: Tensor) -> None:
            tiny = torch.finfo(b.dtype).tiny
            check_condition(self._inner(b, b) / self._inner(b, start).clamp(min=tiny))

        equations = Equations(
            lambda v: self._centred(v - self.transposed(self.p * self.times(self.q * v))), self._inner
        )
        looks = Looks(is_queued=right.device.type != "cpu")
        result = conjugate_gradients(equations, start, precision, max_products=MAX_PRODUCTS, looks=looks, check=check)
        if not bool(result.is_solved.all()):
            raise singular_equations_error()
        return result.solution

    def _centred(self, b: Tensor) -> Tensor:
        return b - self._inner(torch.ones_like(b), b)

    def _inner(self, a: Tensor, b: Tensor) -> Tensor:
        """S R is self-adjoint in this inner product, in which the constant 1 has the norm one."""
        share = self.q * self.received
        return (share / share.sum(-1, keepdim=True) * a * b).sum(-1, keepdim=True)


def corrected_potentials(problem: Problem, f: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
    """Return the potentials after Newton's method; raises RuntimeError as `condition.corrected`."""
    epsilon = problem.epsilon.detach().double().unsqueeze(-1)

    def step_from(b: Tensor) -> Tensor:
        equations = _Equations.at(problem, f, g + epsilon * b)
        return equations.solve(-equations.received.log())

    g = g + epsilon * corrected(step_from, torch.zeros_like(g))
    equations = _Equations.at(problem, f, g)
    equations.check_condition()
    return equations.f - potential_of_plan(problem, torch.zeros_like(f)), g


class WithGraph(NamedTuple):
    """The value and the potentials of a search, with a graph for first and second derivatives."""

    value: Float[Tensor, "*batch"]
    f: Float[Tensor, "*batch n"]
    g: Float[Tensor, "*batch m"]


def with_graph_by_axes(problem: Problem, f: Tensor, g: Tensor) -> WithGraph:
    """Return the value, with second derivatives in the weights alone, and the potentials with first ones."""
    with torch.no_grad():
        f, g = corrected_potentials(problem, f.double(), g.double())
    p, q = problem.p.double(), problem.q.double()
    f, g = _Potentials.apply(p, q, f, g, problem)
    value: Tensor = _Value.apply((p * f).sum(-1).detach() + (q * g).sum(-1).detach(), p, q, f, g)
    return WithGraph(value, f, g)


class _Potentials(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, p: Tensor, q: Tensor, f: Tensor, g: Tensor, problem: Problem) -> tuple[Tensor, Tensor]:
        ctx.problem = problem
        ctx.set_materialize_grads(False)  # the value has none in the potentials
        ctx.save_for_backward(p, q, f, g)
        return f.clone(), g.clone()

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor | None) -> tuple[Tensor | None, ...]:
        p, q, f, g = ctx.saved_tensors
        if all(t is None for t in upstream):
            return (None,) * 5
        by_f, by_g = (torch.zeros_like(f) if t is None else t for t in upstream)
        with torch.no_grad():
            by_weights = _weight_gradients(_Equations.at(ctx.problem, f, g), ctx.problem.epsilon, by_f, by_g)
        return *(once_only(t, _THIRD, by_f, by_g, p, q) for t in by_weights), None, None, None


def _weight_gradients(equations: _Equations, epsilon: Tensor, by_f: Tensor, by_g: Tensor) -> tuple[Tensor, Tensor]:
    """The derivatives in p and q of what has these derivatives in f and g: the transpose of the equations above."""
    p, q, width = equations.p, equations.q, epsilon.detach().double().unsqueeze(-1)
    x, y = width * by_f, width * by_g
    share = q / q.sum(-1, keepdim=True)
    y = y - share * (y - x).sum(-1, keepdim=True)  # a constant may go from g to f
    m = equations.solve(equations.transposed.over_all(p * equations.times.over_all(y) - x))
    by_right = y - share * y.sum(-1, keepdim=True) + q * m
    by_p = -equations.times.over_all(by_right)
    return by_p, equations.transposed.over_all(-p * by_p - x)


class _Value(torch.autograd.Function):
    """The value, whose derivatives in the weights are the potentials."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, p: Tensor, q: Tensor, f: Tensor, g: Tensor) -> Tensor:
        ctx.save_for_backward(f, g)
        return value.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (f, g), upstream = ctx.saved_tensors, gradients[0].unsqueeze(-1)
        return None, upstream * f, upstream * g, None, None
