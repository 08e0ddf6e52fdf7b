"""Whether the rows of an embedding have hubs: tokens that are nearer to the labels than these are to each other.

Where a prediction wavers between labels y_1 .. y_n, EMO moves mass to the token j with the least mean cost to them,

    m_j = 1/n sum_i c(y_i, j)

That should be one of the labels. Rows of tokens that were seldom trained can share a direction with most others; then
it is such a token, which none of the labels is, and text is written that nobody would write. `hub_share` is how often
this happens to labels that are drawn by their counts, from the rows and the counts alone, before any training.
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from otloss.costs.products import product

LABELS, DRAWS, MIN_DRAWS = 4, 512, 64
RARE = 0.1  # relative to the mean count: a token that occurs less often is seldom trained
WORK = 2**33  # multiplications, a third of a second on one core of a CPU


def hub_share(unit: Float[Tensor, "V d"], counts: Float[Tensor, " V"]) -> float | None:
    """Return the share of draws of four labels for which a rare token has a lower mean cost than each of them.

    A token is rare if it occurs less than a tenth as often as the mean of all. 512 draws are made, the same ones in
    every call; the standard error is at most 0.02. With so many rows that even 64 draws are more than 2^33
    multiplications, and without labels, the result is None.

    Args:
        unit: rows of length one, or zero, as `EmbeddingCost` has them.
        counts: how often each token is a label.

    Example:
        >>> shared = torch.nn.functional.normalize(torch.cat([torch.eye(200) + 0.05, torch.ones(1, 200)]), dim=1)
        >>> counts = torch.tensor([9.0] * 200 + [0.0])
        >>> hub_share(shared, counts) > 0.9, hub_share(torch.eye(201), counts)
        (True, 0.0)
    """
    draws = min(DRAWS, WORK // max(1, unit.numel()))
    counts = counts.double() * (unit != 0).any(1).to(counts.device)  # a row of zeros is as far from all tokens
    if draws < MIN_DRAWS or not counts.any():
        return None
    rare = (counts < RARE * counts.mean()).to(unit.device)
    # Draws by the inverse of the cumulative shares: torch.multinomial takes 2^24 tokens at most.
    points = torch.rand(
        draws * LABELS, generator=torch.Generator("cpu").manual_seed(0), dtype=torch.float64, device="cpu"
    )
    shares = counts.cpu().cumsum(0) / counts.sum().cpu()
    labels = torch.searchsorted(shares, points, right=True).clamp(max=len(unit) - 1).view(draws, LABELS).to(unit.device)
    hubs = 0
    for some in labels.split(MIN_DRAWS):
        nearness = product(unit[some].mean(1), unit.T)  # 1 - m_j
        own = nearness.gather(1, some).amax(1)
        hubs += int((nearness.masked_fill(~rare, -2.0).amax(1) > own).sum())
    return hubs / draws
