"""How the solution of a reduced problem becomes a solution of the problem before the reduction."""

from __future__ import annotations

from collections.abc import Callable

from jaxtyping import Float
from torch import Tensor


class WayBack:
    """The way back that changes nothing; reductions replace the parts that they change."""

    @property
    def keeps_plan(self) -> bool:
        """Whether the plan of the problem before the reduction is the plan of the reduced one."""
        return type(self).plan is WayBack.plan

    def after(self, plan: Callable[[], Float[Tensor, "*batch n m"]]) -> WayBack:
        """Return the way back for the solution with this plan; ValueError if the problem before does not allow it."""
        return self

    def value(self, value: Float[Tensor, "*batch"]) -> Float[Tensor, "*batch"]:
        """The optimum, with its graph."""
        return value

    def dual_value(self, value: Float[Tensor, "*batch"]) -> Float[Tensor, "*batch"]:
        """The dual value, not above the optimum."""
        return self.value(value)

    def bound(
        self, bound: Float[Tensor, "*batch"], plan: Callable[[], Float[Tensor, "*batch n m"]]
    ) -> Float[Tensor, "*batch"]:
        """The linear cost, or a bound of the exact transport cost, where `plan` is what is moved."""
        return bound

    def gap(self, gap: Float[Tensor, "*batch"]) -> Float[Tensor, "*batch"]:
        """The difference of two bounds."""
        return gap

    def marginal_error(self, error: Float[Tensor, "*batch"]) -> Float[Tensor, "*batch"]:
        """The errors of the marginals relative to the mass."""
        return error

    def potentials(
        self, f: Float[Tensor, "*batch n"], g: Float[Tensor, "*batch m"]
    ) -> tuple[Float[Tensor, "*batch n"], Float[Tensor, "*batch m"]]:
        """The derivatives of the value in p and q."""
        return f, g

    def plan(self, plan: Float[Tensor, "*batch n m"]) -> Float[Tensor, "*batch n m"]:
        """The plan."""
        return plan
