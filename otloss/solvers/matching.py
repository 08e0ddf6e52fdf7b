"""Linear assignment in batches: which row goes with which column, each at most once, at the least total cost."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor

from otloss._checks import check_floating

NONE = -1  # in the places of a ragged batch that hold no pair
_ENTRIES = 2**14  # costs of all problems below which waking up a thread takes longer than it saves


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
        TypeError: a cost is not a floating tensor.
        ValueError: NaN or -inf among the costs, a problem without a complete matching because of +inf, or sizes that do
            not fit.

    Source:
        D. F. Crouse, On implementing 2D rectangular assignment algorithms, IEEE TAES 52, 2016.

    Example:
        >>> match(torch.tensor([[4.0, 1.0, 9.0], [2.0, 0.0, 5.0]]))
        (tensor([0, 1]), tensor([1, 0]))
    """
    if not isinstance(cost, Tensor):
        return _match_list(cost)
    check_floating("cost", cost)
    if cost.dim() < 2:
        raise ValueError(f"cost has shape {tuple(cost.shape)}, expected (..., n, m): rows are matched with columns.")
    batch, (n, m) = cost.shape[:-2], cost.shape[-2:]
    flat = cost.detach().reshape(-1, n, m)
    shapes = torch.tensor([n, m]).expand(len(flat), 2) if sizes is None else _checked_sizes(sizes, batch, n, m)
    rows, columns = _solved(flat, shapes)
    k = min(n, m) if sizes is None else int(shapes.amin(1).amax()) if len(flat) else 0
    return tuple(t[:, :k].reshape(*batch, k).to(cost.device) for t in (rows, columns))  # type: ignore[return-value]


def _match_list(costs: Sequence[Tensor]) -> list[tuple[Tensor, Tensor]]:
    for k, cost in enumerate(costs):
        check_floating(f"cost[{k}]", cost)
        if cost.dim() != 2:
            raise ValueError(f"cost[{k}] has shape {tuple(cost.shape)}, expected a matrix.")
    if not len(costs):
        return []
    shapes = torch.tensor([cost.shape for cost in costs])
    n, m = (int(size) for size in shapes.amax(0))
    padded = torch.zeros(len(costs), n, m, dtype=max((c.dtype for c in costs), key=lambda d: d.itemsize))
    for k, cost in enumerate(costs):
        padded[k, : cost.shape[0], : cost.shape[1]] = cost.detach()
    rows, columns = _solved(padded, shapes)
    pairs = shapes.amin(1).tolist()
    return [
        (rows[k, :p].to(c.device), columns[k, :p].to(c.device))
        for k, (p, c) in enumerate(zip(pairs, costs, strict=True))
    ]


def _solved(costs: Tensor, sizes: Tensor) -> tuple[Tensor, Tensor]:
    """Rows and columns (problems, min(n, m)), -1 beyond the pairs of a problem; on the CPU."""
    from otloss._kernels._threads import run_on_threads
    from otloss._kernels.matching import INFEASIBLE, INVALID, match_problems, scratch

    n, m = costs.shape[-2:]
    costs = costs.to("cpu", torch.promote_types(costs.dtype, torch.float32)).contiguous()
    rows, columns = torch.full((2, len(costs), max(1, min(n, m))), NONE)
    arrays = tuple(t.numpy() for t in (costs, sizes.contiguous(), rows, columns))
    run_on_threads(
        match_problems, len(costs), arrays, lambda: scratch(n, m, arrays[0].dtype), one_thread=costs.numel() < _ENTRIES
    )
    if rows.numel() and int(rows.amin()) < NONE:
        problem = int((rows[:, 0] < NONE).nonzero()[0])
        if int(rows[problem, 0]) == INVALID:
            raise ValueError(
                f"the costs of problem {problem} hold NaN or -inf, expected numbers, or +inf to forbid a pair."
            )
        assert int(rows[problem, 0]) == INFEASIBLE
        raise ValueError(
            f"problem {problem} has no complete matching: +inf forbids too many pairs. Give large finite costs "
            "instead, and leave out the pairs that have one."
        )
    return rows[:, : min(n, m)], columns[:, : min(n, m)]


def _checked_sizes(sizes: Tensor, batch: torch.Size, n: int, m: int) -> Tensor:
    sizes = torch.as_tensor(sizes, device="cpu")
    if sizes.is_floating_point() or sizes.shape != (*batch, 2):
        raise ValueError(
            f"sizes has shape {tuple(sizes.shape)} and dtype {sizes.dtype}, expected whole numbers {(*batch, 2)}."
        )
    if bool((sizes < 0).any()) or bool((sizes > torch.tensor([n, m])).any()):
        raise ValueError(
            f"sizes go from {int(sizes.min())} to {int(sizes.max())}, expected rows up to {n} and columns to {m}."
        )
    return sizes.reshape(-1, 2).long()
