"""Which rows of an embedding are near-duplicates: tokens that were never trained, or that were made alike.

With c(i, j) = 1 - cos(e_i, e_j), a row is a near-duplicate if another row lies within c = 0.001 of it, or three others
within 0.01. This holds for untrained tokens and for the new tokens of transformers' `resize_token_embeddings`, which
all get the mean of the other rows; it does not hold for trained words. Nothing is flagged in an embedding so
narrow that random directions are that near to each other.

The search compares few of the V^2 pairs. Every row gets a sketch, its products with 32 random directions, from which
distances follow with an error of about a fifth. The signs of a sketch are a key; near rows have keys that begin with
the same signs, so sorting brings them together. Each row is compared, by its sketch, with the rows around it in that
order; eight orders of the signs find nearly all neighbours. The costs of these pairs are then computed exactly, so
every flagged row meets a criterion; a missed row is improbable.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from otloss.costs.products import product

CRITERIA = ((1e-3, 1), (1e-2, 3))  # cost, and how many other rows lie within it
_SKETCH, _ORDERS, _WIDTH = 32, 8, 64
_WHOLE = 1024  # so many rows are compared with each other at once
_KEPT = 6  # likely neighbours of a row from each order: twice as many as a criterion asks for
_AT_ONCE = 2**20  # numbers in a temporary: 4 MiB


def find_near_duplicates(unit: Float[Tensor, "V d"]) -> Bool[Tensor, " V"]:
    """Return which rows, of length one (or zero), are near-duplicates; zero rows never are.

    Example:
        >>> unit = torch.nn.functional.normalize(torch.randn(50, 16, generator=torch.Generator().manual_seed(0)), dim=1)
        >>> unit[7] = unit[3]
        >>> find_near_duplicates(unit).nonzero().squeeze(1)
        tensor([3, 7])
    """
    return search(sketch(unit), lambda index: unit[index], width=unit.shape[1])


def search(
    z: Float[Tensor, "V s"],
    rows: Callable[[Int[Tensor, " picked"]], Float[Tensor, "picked d"]],
    *,
    width: int,
    agree: Callable[[Tensor], Tensor] = lambda pairs: pairs,
) -> Bool[Tensor, " V"]:
    """Return which rows are near-duplicates, from the sketches of all of them.

    Args:
        rows: gives the unit rows of these indices.
        width: of the rows.
        agree: makes the likely neighbours the ones of one process, where several search together.
    """
    criteria = criteria_for(len(z), width)
    if not criteria:
        return torch.zeros(len(z), dtype=torch.bool, device=z.device)
    return confirmed(agree(likely_neighbours(z, criteria)), rows, criteria, width=width)


def describe_criteria() -> str:
    """Return the criteria in words: "within cost 0.001 of 1 other or 0.01 of 3 others"."""
    return "within cost " + " or ".join(f"{cost:g} of {n} other{'s' * (n > 1)}" for cost, n in CRITERIA)


def criteria_for(vocab: int, width: int) -> list[tuple[float, int]]:
    """Return those criteria that rows of random directions would meet with a probability below 0.001.

    A row has at most V / 2 (2 c)^((d - 1) / 2) of them within a cost c in the mean: the share of a cap of the sphere.
    """
    applicable = []
    for cost, others in CRITERIA:
        mean = vocab / 2 * (2 * cost) ** ((width - 1) / 2)
        if vocab * mean**others / math.factorial(others) < 1e-3:
            applicable.append((cost, others))
    return applicable


def sketch(unit: Float[Tensor, "V d"]) -> Float[Tensor, "V s"]:
    """Return coordinates with about the distances of the rows; the same directions in every process."""
    width = unit.shape[1]
    if width <= _SKETCH:
        return unit
    generator = torch.Generator("cpu").manual_seed(0)
    directions = torch.randn(width, _SKETCH, generator=generator, dtype=torch.float32, device="cpu") / _SKETCH**0.5
    return product(unit, directions.to(unit))


def likely_neighbours(z: Float[Tensor, "V s"], criteria: list[tuple[float, int]]) -> Int[Tensor, "V kept"]:
    """Rows that may lie within the costs of the criteria, -1 for none: at most `_KEPT` from each of several orders."""
    count, width = z.shape
    # Signs are taken after subtracting the mean: rows that share a direction would otherwise have nearly equal signs.
    signs = (z > z.mean(0)).double()
    # Half the squared distance is the cost; sketches are approximate.
    half_square = 3 * max(cost for cost, _ in criteria)
    generator = torch.Generator("cpu").manual_seed(1)
    pairs = []
    for _ in range(1 if count <= _WHOLE else _ORDERS):
        digits = 2.0 ** torch.randperm(width, generator=generator, device="cpu").double()
        pairs.append(_neighbours_in((signs @ digits.to(signs)).argsort(), z, half_square))
    return torch.cat(pairs, dim=1)


def _neighbours_in(order: Int[Tensor, " V"], z: Float[Tensor, "V s"], half_square: float) -> Int[Tensor, "V kept"]:
    """Return for each row the nearest rows in its stretch of the order and in the two stretches beside it."""
    count = len(order)
    width, margin = (count, 0) if count <= _WHOLE else (_WIDTH, _WIDTH)
    around = torch.cat([order[count - margin :], order, order[: margin + -count % width]])
    # One product makes minus half the squared distances: rows of a stretch, (.., width), to rows of its window.
    y = z[around]
    half, ones = y.square().sum(1, keepdim=True) / 2, y.new_ones(len(y), 1)
    stretches = torch.cat([y, -half, ones], 1)[margin : len(y) - margin].unflatten(0, (-1, width))
    windows = torch.cat([y, ones, -half], 1).unfold(0, width + 2 * margin, width)  # (stretches, s + 2, window)
    names = around.unfold(0, width + 2 * margin, width)
    nearest = torch.full((len(names) * width, _KEPT), -1, device=z.device)
    step = max(1, _AT_ONCE // (width * names.shape[1]))
    for first in range(0, len(names), step):
        score = product(stretches[first : first + step], windows[first : first + step])
        score.diagonal(margin, 1, 2).fill_(-math.inf)  # A row is its own nearest neighbour.
        some = (score.amax(2) > -half_square).flatten().nonzero().squeeze(1)
        best = score.flatten(0, 1)[some].topk(min(_KEPT, width), dim=1)
        near = names[first + some // width].gather(1, best.indices).masked_fill(best.values <= -half_square, -1)
        nearest[first * width + some, : near.shape[1]] = near
    return torch.empty_like(nearest[:count]).index_copy(0, order, nearest[:count])


def confirmed(
    neighbours: Int[Tensor, "V kept"],
    rows: Callable[[Int[Tensor, " picked"]], Float[Tensor, "picked d"]],
    criteria: list[tuple[float, int]],
    *,
    width: int,
) -> Bool[Tensor, " V"]:
    """Which rows have as many of these neighbours within the costs as a criterion asks for."""
    flagged = torch.zeros(len(neighbours), dtype=torch.bool, device=neighbours.device)
    candidates = (neighbours >= 0).any(1).nonzero().squeeze(1)
    for some in candidates.split(max(1, _AT_ONCE // (neighbours.shape[1] * width))):
        near = neighbours[some].sort(1).values
        absent = near < 0
        absent[:, 1:] |= near[:, 1:] == near[:, :-1]  # found in two orders
        mine, others = rows(some), rows(near.clamp(min=0).flatten()).view(*near.shape, width)
        cost = 1 - (others * mine.unsqueeze(1)).sum(2)  # no matrix product, which may be of TF32 or bfloat16
        cost.masked_fill_(absent, math.inf)
        met = [(cost <= limit).sum(1) >= others_needed for limit, others_needed in criteria]
        flagged[some] = torch.stack(met).any(0)
    return flagged
