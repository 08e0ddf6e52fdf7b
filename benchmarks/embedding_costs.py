"""Costs between tokens that docs/reports/evidence.md compares, and that no option of the package names.

Embeddings take and return rows (V, d); `EmbeddingCost` then compares them by their cosine. `EMBEDDINGS` names them for
`otloss_llm.experiments.oracle.run_oracle(oracle, folder, args, embeddings=EMBEDDINGS)`, whose arms are then
"emo/whitened", "emo/context" and so on. `nearest_only` changes a cost, `published_ratio` is an objective; a loop of
one's own trains them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from jaxtyping import Float, Int
from torch import Tensor

from otloss.costs import DenseCost
from otloss_llm.costs.vocabulary import LabelRows, TokenCost, as_vocabulary_cost
from otloss_llm.experiments import oracle
from otloss_llm.models.heads import evaluation_mode

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def centred(rows: Float[Tensor, "vocab width"]) -> Float[Tensor, "vocab width"]:
    """Return the rows without their mean, which all tokens share and which makes all cosines large."""
    return rows - rows.mean(0)


def whitened(rows: Float[Tensor, "vocab width"]) -> Float[Tensor, "vocab width"]:
    """Return the centred rows with equal variance in all directions that they span."""
    rows = centred(rows)
    u, s, _ = torch.linalg.svd(rows, full_matrices=False)
    return u[:, s > s[0] * 1e-6] * len(rows) ** 0.5


def without_frequency(
    rows: Float[Tensor, "vocab width"], counts: Int[Tensor, " vocab"]
) -> Float[Tensor, "vocab width"]:
    """Return the centred rows without the direction that predicts the logarithm of the tokens' counts best."""
    rows, target = centred(rows), (counts + 1).to(rows.dtype).log()
    target = (target - target.mean()).unsqueeze(1)
    direction = torch.linalg.lstsq(rows, target).solution
    direction = direction / torch.linalg.vector_norm(direction).clamp(min=torch.finfo(rows.dtype).tiny)
    return rows - rows @ direction @ direction.T


def context_averages(
    model: PreTrainedModel, sequences: Int[Tensor, "texts length"], *, batch_size: int = 32
) -> Float[Tensor, "vocab width"]:
    """Return for each token the mean of the last hidden states before it, over these texts; zeros where it is absent.

    Tokens that follow alike contexts are near to each other.
    """
    vocab = model.get_output_embeddings().weight.shape[0]
    total: Tensor | None = None
    counts = torch.zeros(vocab)
    with evaluation_mode(model):
        for ids in sequences.split(batch_size):
            ids = ids.long()
            hidden = model(input_ids=ids, output_hidden_states=True).hidden_states[-1][:, :-1].float()
            total = torch.zeros(vocab, hidden.shape[-1]) if total is None else total
            total.index_add_(0, ids[:, 1:].flatten(), hidden.flatten(0, 1))
            counts += torch.bincount(ids[:, 1:].flatten(), minlength=vocab)
    assert total is not None
    return centred_where_present(total / counts.clamp(min=1).unsqueeze(1), counts > 0)


def centred_where_present(rows: Tensor, present: Tensor) -> Tensor:
    """Return the rows without the mean of those that are present; zeros elsewhere."""
    return (rows - rows[present].mean(0)) * present.unsqueeze(1)


def token_counts(ids: Int[Tensor, "texts length"], vocab: int) -> Int[Tensor, " vocab"]:
    """Return how often each token occurs."""
    return torch.bincount(ids.flatten().long(), minlength=vocab)


def nearest_only(cost: TokenCost, count: int = 10) -> DenseCost:
    """Return the cost with the `count` nearest tokens of each as they are, and the largest cost to all others."""
    rows = as_vocabulary_cost(cost).for_labels(torch.arange(cost.shape[0]))
    assert isinstance(rows, LabelRows)
    matrix = rows.rows(torch.arange(cost.shape[0]), None).clone()
    nearest = matrix.topk(count + 1, largest=False).indices
    return DenseCost(torch.full_like(matrix, float(matrix.max())).scatter(1, nearest, matrix.gather(1, nearest)))


def published_ratio(nll: Tensor, cost: Tensor) -> Tensor:
    """EMO as the published code for LLaMA computes it: the ratio is nll / (D + q_y) in place of nll / D."""
    return 0.5 * (nll + (nll / (cost + (-nll).exp())).detach() * cost)


EMBEDDINGS: oracle.Embeddings = {
    **oracle.EMBEDDINGS,
    "centred": lambda head, source, texts: centred(head),
    "whitened": lambda head, source, texts: whitened(head),
    "input": lambda head, source, texts: source.get_input_embeddings().weight.detach().float(),
    "context": lambda head, source, texts: context_averages(source, texts),
    "frequency-corrected": lambda head, source, texts: without_frequency(head, token_counts(texts, len(head))),
}
