"""Optima of batches of exact problems, from arrays of weights and costs."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from otloss._autograd import check_no_transform
from otloss._checks import broadcast_shape, check_potentials
from otloss.solvers.exact.batch import solve_batch
from otloss.solvers.exact.priced_matrices import settle_prices
from otloss.solvers.exact.results import MAX_PIVOTS, OUTCOME, check_outcome


@dataclass(frozen=True)
class Optimum:
    """Optima of a batch of problems, on the CPU and without a graph.

    Attributes:
        value: the smallest costs.
        gap: the duality gap, 0 up to rounding.
        payment: what the rounding of the weights may pay at prices between blocks of bins, which the value leaves out.
        iterations: pivots of the simplex; for an assignment, the columns that were visited beyond one for each row.
        f, g: potentials, the derivatives of the value in p and q, one-sided at bins without mass. f_i + g_j <= C_ij
            wherever bin i or bin j holds mass.
        rows, columns, flows: the n + m - 1 cells of the plan that may hold mass, and the mass there.
        largest_potential: the largest number that the potentials were computed with.
    """

    value: Float[Tensor, "*batch"]
    gap: Float[Tensor, "*batch"]
    payment: Float[Tensor, "*batch"]
    iterations: Int[Tensor, "*batch"]
    f: Float[Tensor, "*batch n"]
    g: Float[Tensor, "*batch m"]
    rows: Int[Tensor, "*batch cells"]
    columns: Int[Tensor, "*batch cells"]
    flows: Float[Tensor, "*batch cells"]
    largest_potential: Float[Tensor, "*batch"]

    def plan(self) -> Float[Tensor, "*batch n m"]:
        """Return the optimal plan as a dense tensor."""
        n, m = self.f.shape[-1], self.g.shape[-1]
        flat = self.flows.new_zeros(*self.value.shape, n * m)
        return flat.scatter_add_(-1, self.rows * m + self.columns, self.flows).unflatten(-1, (n, m))


def solve_arrays(
    p: Float[Tensor, "*batch n"],
    q: Float[Tensor, "*batch m"],
    matrix: Float[Tensor, "*batch n m"],
    *,
    start: tuple[Float[Tensor, "*batch n"], Float[Tensor, "*batch m"]] | None = None,
    rounding: float | None = None,
    warns: bool = False,
) -> Optimum:
    """Solve checked problems (weights as `histogram_pair` returns them, finite costs), without a graph.

    Args:
        p, q, matrix: as for `emd`; their leading axes broadcast.
        start: potentials (f, g) of similar problems, with axes that broadcast too. They save pivots and change no
            value.
        rounding: the rounding unit of the weights as they were given, which may leave mass over in a block; by default
            the one of the dtype of p.
        warns: whether mass that may be rounding and pays a price is named.

    Raises:
        ValueError: if `start` holds a NaN or an infinity.
        RuntimeError: if the optimum of a problem is not found; the message names the problem.
    """
    check_no_transform()
    n, m = matrix.shape[-2:]
    batch = broadcast_shape(p.shape[:-1], q.shape[:-1], matrix.shape[:-2])
    if start is not None:
        check_potentials(start, (n, m), batch)
    weights = [_flat(w, batch) for w in (p, q)]
    matrices = matrix.detach().cpu().contiguous().view(matrix.shape[:-2].numel(), n, m).numpy()
    owners = owners_of(matrix.shape[:-2], batch).reshape(-1)
    prices = None if start is None else _flat(start[1], batch)
    results = solve_batch(weights[0], weights[1], matrices, owners, start=prices, max_pivots=MAX_PIVOTS)
    check_outcome(results.outcome, weights, batch)
    unit = torch.finfo(p.dtype).eps if rounding is None else rounding
    largest, payments = settle_prices(weights, matrices, owners, results, unit, warns=warns)

    def to_tensor(array: np.ndarray) -> Tensor:
        return torch.from_numpy(array.reshape((*batch, *array.shape[1:])))

    return Optimum(
        value=to_tensor(results.outcome[:, OUTCOME.value]),
        gap=to_tensor(results.outcome[:, OUTCOME.gap]),
        payment=to_tensor(payments),
        iterations=to_tensor(results.outcome[:, OUTCOME.pivots].astype(np.int64)),
        f=to_tensor(results.f),
        g=to_tensor(results.g),
        rows=to_tensor(results.cells[:, 0]),
        columns=to_tensor(results.cells[:, 1]),
        flows=to_tensor(results.flows),
        largest_potential=to_tensor(largest),
    )


def _flat(weights: Tensor, batch: torch.Size) -> np.ndarray:
    bins = weights.shape[-1]
    array: np.ndarray = (
        weights.detach().to("cpu", torch.float64).expand(*batch, bins).reshape(-1, bins).contiguous().numpy()
    )
    return array


def owners_of(own: torch.Size, batch: torch.Size) -> np.ndarray:
    """Which matrix each problem (*batch) uses, an index into the flattened axes `own`; a shared one is not copied."""
    owners = np.arange(own.numel()).reshape(own)
    return owners if own == batch else np.array(np.broadcast_to(owners, batch))
