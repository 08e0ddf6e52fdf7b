"""The transport distance between the n-grams of two texts, given by the embeddings of their words.

With c(i, j) the cost between word i of x and word j of y, the n-grams that start there cost

    C_ij = 1/n sum_k c(i + k, j + k) + order_weight |s_i - t_j|        k = 0 .. n - 1

which for squared distances is the squared distance between concatenated embeddings over n. s and t are the positions of
the n-grams in their texts, from 0 to 1. The distance is the transport cost (`otloss.emd`) between equal weights on the
n-grams. For n = 1 and without order_weight it is blind to the order of the words.

Sources: L. Chen et al., Improving sequence-to-sequence learning via optimal transport, ICLR 2019 (a loss for n = 1);
W. Zhao et al., MoverScore, arXiv 1909.02622 (n-grams, there of averaged embeddings).
"""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from otloss._checks import check_broadcast, check_cloud, check_count, check_floating, check_not_negative, check_tensor
from otloss._public import public
from otloss.costs import PointCost
from otloss.solvers.closed_forms.line import finite_in
from otloss.solvers.solve import emd


@public
def ngram_distance(
    x: Float[Tensor, "*batch length d"],
    y: Float[Tensor, "*batch other d"],
    *,
    n: int,
    mask_x: Bool[Tensor, "*batch length"] | None = None,
    mask_y: Bool[Tensor, "*batch other"] | None = None,
    order_weight: float = 0.0,
    metric: str = "cosine",
) -> Float[Tensor, "*batch"]:
    """Return the least cost of moving the n-grams of x to the n-grams of y, per pair of texts.

    As a loss of generated text, x holds expected embeddings, `probabilities @ embedding`. Give it an order_weight, or
    add cross-entropy: without one of them a text may come out backwards, for its n-grams fit any order.

    Args:
        x: (..., length, d) embeddings of the words of a text. The leading axes of all tensors broadcast.
        y: (..., other, d) tokens of another one.
        n: words in an n-gram, at least 1. The distance is blind to the order of the words for n = 1.
        mask_x: (..., length), True at words and False at padding, whatever x holds there; all words by default. An
            n-gram takes part if all its words do.
        mask_y: (..., other), the same for y.
        order_weight: what an n-gram costs that moves by the length of the text, at least 0; places are the middles of
            equal parts, so from end to end of l n-grams it is (l - 1) / l of that.
        metric: the cost between words: "cosine", "euclidean", "sqeuclidean" or "l1", as for `otloss.costs.PointCost`.

    Returns:
        (...), in the promoted dtype and the unit of the metric. Differentiable in x and y (a subgradient where several
        plans are optimal).

    Raises:
        TypeError: if x or y is not a floating tensor, a mask not a bool tensor, or n not a whole number.
        ValueError: if shapes do not fit, a number is not finite, a text has fewer than n neighbouring words, or a
            setting is out of range.

    Source:
        L. Chen et al., ICLR 2019; W. Zhao et al., MoverScore, arXiv 1909.02622.

    Example:
        >>> words = torch.eye(4)
        >>> text, shuffled = words[[0, 1, 2, 3]], words[[1, 0, 3, 2]]
        >>> ngram_distance(text, shuffled, n=1), ngram_distance(text, shuffled, n=2)
        (tensor(0.), tensor(0.6667))
    """
    check_count("n", n)
    check_not_negative("order_weight", order_weight)
    x, p = _ngrams("x", x, mask_x, n)
    y, q = _ngrams("y", y, mask_y, n)
    dtype = torch.promote_types(x.dtype, y.dtype)
    check_broadcast(x=x.shape[:-2], y=y.shape[:-2], mask_x=p.shape[:-1], mask_y=q.shape[:-1])
    words = PointCost(x, y, metric=metric).dense()
    words = finite_in(words.dtype, words, 2)
    n_x, n_y = p.shape[-1], q.shape[-1]
    cost = torch.stack([words[..., k : k + n_x, k : k + n_y] for k in range(n)]).mean(0)
    if order_weight:
        cost = cost + order_weight * (_places(p).unsqueeze(-1) - _places(q).unsqueeze(-2)).abs()
    return emd(p, q, cost).to(dtype)


def _ngrams(name: str, x: Any, mask: Any, n: int) -> tuple[Tensor, Tensor]:
    """Return the embeddings with zeros at padding, and the weights (..., n-grams) of the n-grams."""
    if check_floating(name, x).dim() < 2:
        raise ValueError(f"{name} has shape {tuple(x.shape)}, expected (..., length, d): an embedding for each word.")
    if mask is None:
        mask = torch.ones(x.shape[-2], dtype=torch.bool, device=x.device)
    elif check_tensor(f"mask_{name}", mask).dtype != torch.bool:
        raise TypeError(f"mask_{name} has dtype {mask.dtype}, expected torch.bool, True at words.")
    if mask.dim() == 0 or mask.shape[-1] != x.shape[-2]:
        raise ValueError(
            f"mask_{name} has shape {tuple(mask.shape)} and {name} {tuple(x.shape)}, expected (..., {x.shape[-2]})."
        )
    if n > x.shape[-2]:
        raise ValueError(f"{name} has {x.shape[-2]} words, expected at least n = {n}; use a smaller n.")
    check_broadcast(**{name: x.shape[:-2], f"mask_{name}": mask.shape[:-1]})
    whole = mask.unfold(-1, n, 1).all(-1)
    count = whole.sum(-1, keepdim=True)
    if count.numel() and not count.amin() > 0:
        text = tuple(int(i) for i in (count[..., 0] == 0).nonzero()[0])
        raise ValueError(f"text {text} of {name} has no {n} neighbouring words; use a smaller n, or leave it out.")
    x = x.masked_fill(~mask.unsqueeze(-1), 0.0)
    return check_cloud(name, x), whole.to(torch.promote_types(x.dtype, torch.float32)) / count


def _places(weights: Tensor) -> Tensor:
    """Return the middle of each n-gram among the n-grams of its text, from 0 to 1."""
    return weights.cumsum(-1) - weights / 2
