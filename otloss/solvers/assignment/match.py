"""Linear assignment in batches: which row goes with which column, each at most once, at the smallest total cost."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch._utils import _flatten_dense_tensors

from otloss._autograd import check_no_transform
from otloss._checks import check_floating, check_integers, code_for_tensor
from otloss._numba.threads import Work, run_on_threads
from otloss._public import public

_ENTRIES = 2**14  # For fewer costs a second thread takes longer to start than it saves.
_LARGEST_RATIO = 1e13  # of costs that are paid; beyond, prices leave the others too few of sixteen digits


@public
def match(
    cost: Float[Tensor, "*batch n m"] | Sequence[Float[Tensor, "_ _"]],
    *,
    sizes: Int[Tensor, "*batch 2"] | None = None,
) -> tuple[Int[Tensor, "*batch k"], Int[Tensor, "*batch k"]] | list[tuple[Int[Tensor, " k"], Int[Tensor, " k"]]]:
    """Return the pairs (rows, columns) of the cheapest matching of each problem, min(n, m) of them.

    Args:
        cost: (..., n, m), or a list of matrices of any shapes. Any sign; +inf forbids a pair. Not differentiated: index
            the costs with the pairs for a loss.
        sizes: (..., 2) rows and columns of each problem that count, for a padded batch; what is beyond is not read.

    Returns:
        (rows, columns), (..., k) each in int64, rows in rising order as of `scipy.optimize.linear_sum_assignment`; -1
        in the places beyond a problem's own pairs. For a list a list of pairs. On the device of the costs.

    Raises:
        TypeError: a cost is not a floating tensor, or sizes are not integers.
        ValueError: NaN or -inf among the costs, a problem without a complete matching because of +inf, or sizes that do
            not fit or are given for a list.

    Source:
        D. F. Crouse, On implementing 2D rectangular assignment algorithms, IEEE TAES 52, 2016.

    Example:
        >>> match(torch.tensor([[4.0, 1.0, 9.0], [2.0, 0.0, 5.0]]))
        (tensor([0, 1]), tensor([1, 0]))
    """
    if isinstance(cost, list | tuple):
        if sizes is not None:
            raise ValueError("sizes are given for a list of costs, which needs none; leave them out.")
        return _match_list(cost)
    if not isinstance(cost, Tensor):
        raise TypeError(
            f"cost is a {type(cost).__name__}, expected a torch.Tensor (..., n, m) or a list of matrices; convert it "
            f"with {code_for_tensor('cost', cost)}."
        )
    check_floating("cost", cost)
    if cost.dim() < 2:
        raise ValueError(f"cost has shape {tuple(cost.shape)}, expected (..., n, m): rows are matched with columns.")
    batch, (n, m) = cost.shape[:-2], cost.shape[-2:]
    problems, k = batch.numel(), min(n, m)
    places = np.array([[0, m, n, m, 0]])
    if problems != 1 or sizes is not None:
        places = places.repeat(problems, 0)
        if sizes is not None:
            places[:, 2:4] = shapes = checked_sizes(sizes, batch, n, m)
            k = int(shapes.min(1).max(initial=0))
        order = np.arange(problems)
        places[:, 0], places[:, 4] = order * (n * m), order * k
    rows, columns = _assignments(cost.detach().reshape(-1), places, problems * k, batch)
    return (rows.view(*batch, k), columns.view(*batch, k)) if batch else (rows, columns)


def _match_list(costs: Sequence[Tensor]) -> list[tuple[Tensor, Tensor]]:
    if costs and isinstance(costs[0], list | tuple):
        raise TypeError("cost is a list of lists, expected tensors; convert it with torch.tensor(cost).")
    places, counts, begin, at = [], [], 0, 0
    for k, cost in enumerate(costs):
        shape = check_floating(f"cost[{k}]", cost).shape
        if len(shape) != 2:
            raise ValueError(f"cost[{k}] has shape {tuple(shape)}, expected a matrix.")
        n, m = shape
        places.append((begin, m, n, m, at))
        counts.append(n if n < m else m)
        begin, at = begin + n * m, at + counts[-1]
    if not places:
        return []
    # One call instead of a `reshape(-1)` for each of many small tensors.
    flat = _flatten_dense_tensors(costs).detach()
    both = _assignments(flat, np.array(places), at, (len(counts),))
    return list(zip(*(t.unsafe_split_with_sizes(counts) for t in both), strict=True))


def _assignments(
    costs: Tensor, places: np.ndarray, pairs: int, batch: tuple[int, ...]
) -> tuple[Int[Tensor, " pairs"], Int[Tensor, " pairs"]]:
    """Rows and columns of all problems, -1 in the gaps, on the device of the costs; arguments as for the kernel."""
    check_no_transform()
    run_on_threads, Work, match_problems, allocate_results = _kernel()
    rows, columns = allocate_results(pairs)
    if pairs:
        flat = costs.to("cpu", costs.dtype if costs.dtype == torch.float64 else torch.float32).numpy()
        failed = max(
            run_on_threads(
                match_problems, len(places), (flat, places, _LARGEST_RATIO, rows, columns),
                one_thread=flat.size < _ENTRIES, work=Work("shortest paths of an assignment", flat.size),
            )
        )  # fmt: skip
        if failed >= 0:
            _match_without_prices(flat, places, rows, columns, batch)
    pair = torch.from_numpy(rows), torch.from_numpy(columns)
    return pair if costs.device.type == "cpu" else (pair[0].to(costs.device), pair[1].to(costs.device))


@functools.cache
def _kernel() -> Any:
    """What `_assignments` calls; an import takes as long as a small problem, each time."""
    from otloss.solvers.assignment.match_numba import allocate_results, match_problems

    return run_on_threads, Work, match_problems, allocate_results


def _match_without_prices(
    flat: np.ndarray, places: np.ndarray, rows: np.ndarray, columns: np.ndarray, batch: tuple[int, ...]
) -> None:
    """Match the problems that the kernel left because of their prices; raise ValueError of one without a matching."""
    from otloss.solvers.assignment.match_numba import PRICED

    run_on_threads, Work, match_problems, _ = _kernel()
    nonempty = np.flatnonzero(places[:, 2:4].all(1))
    unsolved = nonempty[rows[places[nonempty, 4]] < -1]
    for k in unsolved:
        if rows[places[k, 4]] != PRICED:
            _raise_of_problem(np.unravel_index(k, batch), rows[places[k, 4]])
    costs = [
        without_gaps(flat[begin + stride * np.arange(n)[:, None] + np.arange(m)]).reshape(-1)
        for begin, stride, n, m, _ in places[unsolved]
    ]
    sizes = np.array([one.size for one in costs])
    ends = sizes.cumsum()
    own = np.column_stack([ends - sizes, places[unsolved, 3], places[unsolved, 2:]])
    run_on_threads(
        match_problems, len(unsolved), (np.concatenate(costs), own, np.inf, rows, columns),
        one_thread=ends[-1] < _ENTRIES, work=Work("shortest paths of an assignment", int(ends[-1])),
    )  # fmt: skip


def without_gaps(costs: Float[np.ndarray, "n m"]) -> Float[np.ndarray, "n m"]:
    """Return costs in float64 with the same cheapest matchings, without the gaps that prices leave between costs.

    The total cost is a sum over gaps, each times the number of pairs above it. If a gap is more than what all smaller
    ones can add up to, the cheapest matchings have as few pairs above it as possible, and any smaller gap of which
    this holds serves as well. A gap that a larger one does not exceed that far stays.
    """
    is_finite = np.isfinite(costs)
    values, places = np.unique(costs[is_finite].astype(np.float64) / 4, return_inverse=True)  # no difference overflows
    gaps, factor = np.diff(values), 2 * (min(costs.shape) + 1)
    order = np.argsort(gaps, kind="stable")
    below = np.cumsum(np.append(0.0, gaps[order]))  # what the smaller ones add up to
    is_large = gaps[order] / factor > below[:-1]
    total, done = 0.0, 0  # of the smaller gaps as they are now
    for k in np.flatnonzero(is_large & np.append(is_large[1:], True)).tolist():
        total += below[k] - below[done]
        if total > 0:
            gaps[order[k]] = factor * total
        total, done = total + gaps[order[k]], k + 1
    moved = values - values[0]
    begins = np.flatnonzero(gaps < np.diff(values)) + 1
    for begin, end in zip(begins, np.append(begins, len(values))[1:], strict=True):
        moved[begin:end] = moved[begin - 1] + gaps[begin - 1] + (values[begin:end] - values[begin])
    result = np.full(costs.shape, np.inf)
    result[is_finite] = moved[places]
    return result


def _raise_of_problem(place: Any, code: int) -> None:
    from otloss.solvers.assignment.match_numba import INVALID

    at = tuple(int(i) for i in place)
    name = f"problem {at[0] if len(at) == 1 else at}" if at else "the problem"
    if code == INVALID:
        raise ValueError(f"the costs of {name} hold NaN or -inf, expected numbers, or +inf to forbid a pair.")
    raise ValueError(
        f"{name} has no complete matching: +inf forbids too many pairs. Give large finite costs instead, and leave out "
        "the pairs that have one."
    )


def checked_sizes(sizes: Any, batch: torch.Size, n: int, m: int) -> np.ndarray:
    """Return (problems, 2) sizes of the problems of a padded batch, or raise."""
    check_no_transform()
    counts = torch.as_tensor(sizes, device="cpu") if isinstance(sizes, list | tuple | np.ndarray) else sizes
    shapes: np.ndarray = check_integers("sizes", counts).cpu().numpy()
    if shapes.shape != (*batch, 2):
        raise ValueError(f"sizes has shape {shapes.shape}, expected {(*batch, 2)}, rows and columns of each problem.")
    if (shapes < 0).any() or (shapes > (n, m)).any():
        raise ValueError(f"sizes go from {shapes.min()} to {shapes.max()}, expected rows up to {n} and columns to {m}.")
    return shapes.reshape(-1, 2)
