"""Expected ratings: the signed cost and its objective against the formula, in every path."""

import math

import pytest
import torch

from otloss_llm import EMO, MLE, EmbeddingCost, ExpectedValue, RatingCost, token_loss
from tests.errors import raising
from tests.otloss_llm.scoring import from_logits

VALUES = torch.full((40,), math.nan, dtype=torch.float64)
VALUES[7:12] = torch.arange(1.0, 6.0, dtype=torch.float64)


@pytest.mark.parametrize("impl", ["logits", "reference", "chunked"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_the_squared_error_of_the_expected_rating(impl: str, dtype: torch.dtype) -> None:
    z, label = 2 * torch.randn(6, 40, dtype=dtype), torch.tensor([7, 11, 8, 20, -100, 9])  # 20 is text
    leaf, wide = z.clone().requires_grad_(), z.double().requires_grad_()
    cost = RatingCost(VALUES.to(dtype))
    out = from_logits(leaf, label, impl, objective=ExpectedValue(0.7), cost=cost)
    kept = label != -100
    q = wide.softmax(-1)[kept]
    error = (q * VALUES.nan_to_num(0.0)).sum(-1) - VALUES[label[kept]]
    nll = -q.gather(-1, label[kept][:, None])[:, 0].log()
    want = (nll + 0.7 * error.nan_to_num(0.0).square()).mean()
    tolerance = 1e-12 if dtype == torch.float64 else 1e-5
    torch.testing.assert_close(out.loss.double(), want, rtol=tolerance, atol=0.0)
    got, expected = torch.autograd.grad(out.loss, leaf)[0], torch.autograd.grad(want, wide)[0]
    torch.testing.assert_close(got.double(), expected, rtol=tolerance, atol=tolerance)
    assert out.cost is not None
    torch.testing.assert_close(out.cost[kept].double(), error.nan_to_num(0.0), rtol=tolerance, atol=tolerance)
    assert out.cost[3] == 0


Z, LABEL = torch.randn(2, 40), torch.tensor([7, 20])
RATINGS, OTHER = RatingCost(VALUES.float()), EmbeddingCost(torch.randn(40, 3))
test_signed_costs_go_with_objectives_that_say_so = raising(
    (EMO(), RATINGS, "whose costs are negative too"),
    (MLE(), RATINGS, "whose costs are negative too"),
    (lambda nll, cost: nll + cost, RATINGS, "whose costs are negative too"),
    (ExpectedValue(), OTHER, r"expected RatingCost\(values\)"),
    (ExpectedValue(), None, r"needs cost=, for example RatingCost\(values\)"),
    call=lambda objective, cost: token_loss(Z, LABEL, objective=objective, cost=cost),
)


def test_by_name_the_ratings_are_the_digits_of_the_tokenizer() -> None:
    pytest.importorskip("transformers")
    from otloss_llm.costs.choice import choose_cost
    from otloss_llm.data import train_bpe_tokenizer

    tokenizer = train_bpe_tokenizer(["12 12 12"], 259)
    cost = choose_cost("rating", embedding=pytest.fail, tokenizer=tokenizer, vocab_size=len(tokenizer))
    values = {tokenizer.decode([i]): float(cost.values[i]) for i in cost.columns}  # type: ignore[union-attr]
    assert values == {str(i): float(i) for i in range(10)}  # not "12"
