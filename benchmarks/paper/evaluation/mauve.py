"""How near two sets of texts are to each other, from clusters of their features: MAUVE and divergences.

Features of both sets are scaled to length 1, reduced to the principal components that explain 0.9 of their variance,
and clustered together by k-means; p and q are the shares of each set in the clusters. With the mixtures
`r = w p + (1 - w) q` for w in (0, 1), the divergence curve has the points

    (exp(-c KL(q || r)), exp(-c KL(p || r))),     c = 5

and MAUVE is the area under it, 1 for equal shares and near 0 for disjoint ones. It is biased upwards for small sets and
depends on the clustering: compare with the score of two sets from one source, and average over seeds of k-means.

`cluster_divergence` compares the same p and q by KL(p || q), KL(q || p) and the Jensen-Shannon divergence, which say
how far apart they are in nats.

Sources: K. Pillutla et al., MAUVE: Measuring the Gap Between Neural Text and Human Text, NeurIPS 2021; T. Pimentel et
al., On the Usefulness of Embeddings, Clusters and Strings for Text Generator Evaluation, ICLR 2023.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from jaxtyping import Float

from benchmarks.paper.evaluation.likelihood import padded
from otloss_llm.evaluation.perplexity import context_length
from otloss_llm.models.heads import evaluation_mode

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

SCALE, MIXTURES, EXPLAINED = 5.0, 25, 0.9
RESTARTS, ITERATIONS = 5, 500


@dataclass(frozen=True)
class Mauve:
    """MAUVE over several clusterings.

    Attributes:
        mean, std: over the seeds of k-means.
        scores: one for each seed.
        clusters: k.
    """

    mean: float
    std: float
    scores: tuple[float, ...]
    clusters: int


def mauve(
    p_features: Float[np.ndarray, "n width"],
    q_features: Float[np.ndarray, "m width"],
    *,
    clusters: int | None = None,
    seeds: Sequence[int] = (0, 1, 2, 3, 4),
) -> Mauve:
    """Return MAUVE of two sets of features, its mean over several seeds of k-means.

    Args:
        p_features, q_features: a row for each text, from a frozen model that is not one of those that are compared.
        clusters: k; by default a tenth of the smaller set, at least 2.
        seeds: of k-means; each runs from 5 starts.

    Raises:
        ValueError: sets of another width, too few texts for the clusters, or features that are not finite.
    """
    counts = cluster_counts(p_features, q_features, clusters, seeds)
    scores = [area_of_shares(p / p.sum(), q / q.sum()) for p, q in counts]
    return Mauve(float(np.mean(scores)), float(np.std(scores)), tuple(scores), len(counts[0][0]))


@dataclass(frozen=True)
class ClusterDivergence:
    """Divergences between the shares p and q of two sets of texts in common clusters, in nats.

    Attributes:
        js: the Jensen-Shannon divergence, 0 for equal shares and log 2 for disjoint ones; the mean over seeds.
        js_std: its standard deviation over the seeds of k-means.
        forward, reverse: KL(p || q) and KL(q || p), each count raised by 1 (Laplace), means over seeds.
        clusters: k.
    """

    js: float
    js_std: float
    forward: float
    reverse: float
    clusters: int


def cluster_divergence(
    p_features: Float[np.ndarray, "n width"],
    q_features: Float[np.ndarray, "m width"],
    *,
    clusters: int | None = None,
    seeds: Sequence[int] = (0, 1, 2, 3, 4),
) -> ClusterDivergence:
    """Return divergences of two sets of features in the clusters of MAUVE, means over several seeds of k-means.

    They are biased upwards for small sets: compare with scores of two sets from one source. A cluster without texts of
    one set would make a KL infinite, so each count is raised by 1 for these two.

    Args:
        p_features, q_features, clusters, seeds: as in `mauve`.

    Raises:
        ValueError: as `mauve`.
    """
    counts = cluster_counts(p_features, q_features, clusters, seeds)
    js = []
    for p, q in counts:
        p, q = p / p.sum(), q / q.sum()
        js.append(float(_kl(p, (p + q) / 2) + _kl(q, (p + q) / 2)) / 2)
    smooth = [((p + 1) / (p + 1).sum(), (q + 1) / (q + 1).sum()) for p, q in counts]
    forward, reverse = (float(np.mean([_kl(*pair[::way]) for pair in smooth])) for way in (1, -1))
    return ClusterDivergence(float(np.mean(js)), float(np.std(js)), forward, reverse, len(counts[0][0]))


def cluster_counts(
    p_features: Float[np.ndarray, "n width"],
    q_features: Float[np.ndarray, "m width"],
    clusters: int | None,
    seeds: Sequence[int],
) -> list[tuple[np.ndarray, np.ndarray]]:
    """Return how many texts of each set lie in each cluster, for each seed; arguments and errors as in `mauve`."""
    from sklearn.cluster import KMeans

    p_points, q_points = principal_components(p_features, q_features)
    smaller = min(len(p_points), len(q_points))
    k = max(2, smaller // 10) if clusters is None else clusters
    if not 2 <= k <= smaller:
        raise ValueError(
            f"{k} clusters for {len(p_points)} and {len(q_points)} texts; expected 2 to the smaller number."
        )
    points = np.concatenate([p_points, q_points])
    counts = []
    for seed in seeds:
        labels = KMeans(k, n_init=RESTARTS, max_iter=ITERATIONS, random_state=seed).fit_predict(points)
        p, q = (np.bincount(part, minlength=k) for part in np.split(labels, [len(p_points)]))
        counts.append((p, q))
    return counts


def principal_components(
    p_features: Float[np.ndarray, "n width"], q_features: Float[np.ndarray, "m width"]
) -> tuple[Float[np.ndarray, "n kept"], Float[np.ndarray, "m kept"]]:
    """Return both sets scaled to length 1 and reduced to the components that explain 0.9 of their variance.

    Raises:
        ValueError: sets of another width, or features that are not finite.
    """
    from sklearn.decomposition import PCA
    from sklearn.preprocessing import normalize

    p_features, q_features = (np.asarray(features, dtype=np.float64) for features in (p_features, q_features))
    if p_features.ndim != 2 or q_features.ndim != 2 or p_features.shape[1] != q_features.shape[1]:
        raise ValueError(
            f"features have shapes {p_features.shape} and {q_features.shape}, expected (n, width), (m, width)."
        )
    both = np.concatenate([p_features, q_features])
    if not np.isfinite(both).all():
        raise ValueError("features hold NaN or infinite values; find the texts that they come from.")
    both = normalize(both)
    reduced = PCA().set_output(transform="default").fit(both)
    count = int(np.searchsorted(np.cumsum(reduced.explained_variance_ratio_), EXPLAINED)) + 1
    p_points, q_points = np.split(reduced.transform(both)[:, :count], [len(p_features)])
    return p_points, q_points


def area_of_shares(p: np.ndarray, q: np.ndarray) -> float:
    """Return the area under the divergence curve of two discrete distributions."""
    w = np.linspace(1e-6, 1 - 1e-6, MIXTURES)[:, None]
    r = w * p + (1 - w) * q
    x, y = (np.exp(-SCALE * _kl(share, r)) for share in (q, p))
    x, y = np.concatenate([[1.0], x, [0.0]]), np.concatenate([[0.0], y, [1.0]])
    # Ordered by w, x falls and y rises; the area belongs to the polygon with the axes.
    return float(-np.trapezoid(y, x))


def _kl(p: np.ndarray, r: np.ndarray) -> np.ndarray:
    """Return KL(p || r), for each row of r; r is positive where p is."""
    present = p > 0
    return np.sum(p[present] * np.log(p[present] / r[..., present]), axis=-1)


def text_features(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    texts: Sequence[str],
    *,
    max_length: int | None = None,
    batch_size: int = 32,
) -> Float[np.ndarray, "texts width"]:
    """Return the model's last hidden state at the last token of each text.

    Args:
        model: a frozen causal language model, other than those that wrote the texts.
        max_length: tokens of a text that are read; by default as many as the model has positions for, at most 512.

    Raises:
        ValueError: no text, or one without a token.
    """
    limit = min(context_length(model) or 512, 512) if max_length is None else max_length
    ids = [tokenizer(text, truncation=True, max_length=limit)["input_ids"] for text in texts]
    empty = [i for i, row in enumerate(ids) if not row]
    if not ids or empty:
        raise ValueError(f"{len(empty)} of {len(ids)} texts have no token (the first is {empty[:1]}); leave them out.")
    return last_hidden_states(model, ids, batch_size=batch_size)


def last_hidden_states(
    model: PreTrainedModel, ids: Sequence[Sequence[int]], *, batch_size: int = 32
) -> Float[np.ndarray, "texts width"]:
    """Return the model's last hidden state at the last of the token ids of each text."""
    device: Any = next(model.parameters()).device
    out = np.empty((len(ids), 0))
    order = sorted(range(len(ids)), key=lambda i: len(ids[i]))
    with evaluation_mode(model):
        for start in range(0, len(order), batch_size):
            rows = order[start : start + batch_size]
            batch, mask = padded([ids[i] for i in rows])
            outputs = model(input_ids=batch.to(device), attention_mask=mask.to(device), output_hidden_states=True)
            last = outputs.hidden_states[-1][torch.arange(len(rows)), mask.sum(1) - 1].float().cpu().numpy()
            out = np.empty((len(ids), last.shape[1])) if out.shape[1] == 0 else out
            out[rows] = last
    return out
