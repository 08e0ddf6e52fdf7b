"""The costs of tokens that docs/reports/evidence.md compares."""

import pytest

pytest.importorskip("transformers")

import torch

from benchmarks.embedding_costs import EMBEDDINGS, nearest_only, published_ratio
from otloss_llm import EMO, EmbeddingCost
from otloss_llm.experiments.oracle import OracleArm


def test_the_published_ratio_and_nearest_only() -> None:
    nll, cost = torch.tensor([0.7, 2.0], requires_grad=True), torch.tensor([0.3, 0.8], requires_grad=True)
    (beta,) = torch.autograd.grad(published_ratio(nll, cost).sum(), cost)
    torch.testing.assert_close(beta, 0.5 * (nll / (cost + torch.exp(-nll))).detach())
    rows = torch.randn(12, 4, generator=torch.Generator().manual_seed(0))
    whole, kept = EmbeddingCost(rows).dense(), nearest_only(EmbeddingCost(rows), 3).dense()
    is_near = whole <= whole.kthvalue(4, dim=1, keepdim=True).values
    torch.testing.assert_close(kept, torch.where(is_near, whole, whole.max()))


def test_arms_name_the_embeddings() -> None:
    assert OracleArm.parse("emo:clip=3/centred", EMBEDDINGS).objective == EMO(ratio_clip=3.0)
    with pytest.raises(ValueError, match="'centred' is unknown"):
        OracleArm.parse("emo/centred")
    rows, texts = torch.randn(12, 4), torch.randint(12, (3, 5))
    for name in ("centred", "whitened", "frequency-corrected"):
        changed = EMBEDDINGS[name](rows, None, texts)
        torch.testing.assert_close(changed.mean(0), torch.zeros(changed.shape[1]), atol=1e-5, rtol=0)
