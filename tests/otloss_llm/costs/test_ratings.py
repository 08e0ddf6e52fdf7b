"""Expected ratings: the signed cost and its objective against the formula, in every path."""

import math
from pathlib import Path

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


def test_by_name_the_ratings_are_the_digits_of_the_tokenizer(tmp_path: Path) -> None:
    """In the trainer too: the first loss is that of the model's own logits."""
    pytest.importorskip("transformers")
    from otloss_llm import ObjectiveTrainer
    from otloss_llm.costs.choice import choose_cost
    from otloss_llm.data.blocks import PackedBlocks, train_bpe_tokenizer
    from tests.otloss_llm.tiny_models import tiny_model
    from tests.otloss_llm.training.trainer_cases import arguments, by_hand, logs

    tokenizer = train_bpe_tokenizer(["12 12 12"], 259)
    model = tiny_model("llama", vocab_size=len(tokenizer))
    cost = choose_cost("rating", embedding=pytest.fail, tokenizer=tokenizer, vocab_size=len(tokenizer))
    values = {tokenizer.decode([i]): float(cost.values[i]) for i in cost.columns}  # type: ignore[union-attr]
    assert values == {str(i): float(i) for i in range(10)}  # not "12"
    blocks = PackedBlocks.from_texts(["a 7 b 3"], tokenizer, block_size=4)
    args = arguments(tmp_path, max_steps=1, per_device_train_batch_size=len(blocks))
    made = ObjectiveTrainer(
        model, args, objective="expected_value:0.2", train_dataset=blocks, processing_class=tokenizer
    )
    assert isinstance(made.transport_cost, RatingCost)
    data = [{"input_ids": row["input_ids"].tolist(), "labels": row["labels"].tolist()} for row in blocks]
    expected = by_hand(model, data, ExpectedValue(0.2), made.transport_cost)
    made.train()
    assert logs(made, "loss")[0] == pytest.approx(expected["loss"], rel=1e-5)
