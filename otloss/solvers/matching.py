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


def _solved(costs: Tensor, shapes: Tensor) -> tuple[Tensor, Tensor]:
    """Rows and columns (problems, min(n, m)), -1 beyond the pairs of a problem; on the CPU."""
    from otloss._kernels._threads import run_on_threads
    from otloss._kernels.matching import match_problems, scratch

    n, m = costs.shape[-2:]
    costs = costs.to("cpu", torch.promote_types(costs.dtype, torch.float32))
    # The kernel gives each row a column: a problem of more rows than columns is turned, and a batch with both padded.
    turned = shapes[:, 0] > shapes[:, 1]
    if bool(turned.all()):
        given, sizes = costs.mT.contiguous(), shapes.flip(1)
    elif not bool(turned.any()):
        given, sizes = costs.contiguous(), shapes
    else:
        side = max(n, m)
        given = costs.new_zeros(len(costs), side, side)
        given[~turned, :n, :m] = costs[~turned]
        given[turned, :m, :n] = costs[turned].mT
        sizes = torch.where(turned.unsqueeze(1), shapes.flip(1), shapes)
    matched = torch.full((len(given), max(1, given.shape[1])), NONE, dtype=torch.int64)
    arrays = given.numpy(), sizes.contiguous().numpy(), matched.numpy()
    run_on_threads(
        match_problems, len(given), arrays, lambda: scratch(*given.shape[1:]), one_thread=given.numel() < _ENTRIES
    )
    _check_matched(matched)
    small = matched[:, : min(n, m)]
    places = torch.arange(small.shape[1]).expand(small.shape)
    places = places.masked_fill(small < 0, NONE)
    if not bool(turned.any()):
        return places, small
    # Sorted by the rows of the problem as it was given, empty places last.
    order = torch.where(small < 0, 2**62, small).argsort(1)
    rows = torch.where(turned.unsqueeze(1), small.gather(1, order), places)
    return rows, torch.where(turned.unsqueeze(1), places.gather(1, order), small)


def _check_matched(matched: Tensor) -> None:
    from otloss._kernels.matching import INFEASIBLE, INVALID

    wrong = (matched[:, 0] < NONE).nonzero().flatten().tolist()
    if wrong:
        invalid = [k for k in wrong if int(matched[k, 0]) == INVALID]
        if invalid:
            raise ValueError(
                f"the costs of problem {invalid[0]} hold NaN or -inf, expected numbers, or +inf to forbid a pair."
            )
        assert int(matched[wrong[0], 0]) == INFEASIBLE
        raise ValueError(
            f"problem {wrong[0]} has no complete matching: +inf forbids too many pairs. Give large finite costs "
            "instead, and leave out the pairs that have one."
        )


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
