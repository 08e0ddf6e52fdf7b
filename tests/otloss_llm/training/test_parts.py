"""The parts of the trainer, without one: labels of a batch, means over tokens, settings of the loss, the cost."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from otloss_llm import EMO, MLE, EmbeddingCost, NumberCost, RatingCost, token_loss
from otloss_llm.costs.choice import NumberSettings
from otloss_llm.objectives import Sum, parse_objective
from otloss_llm.training.batches import Targets, columns_of, pad_rows, targets_of
from otloss_llm.training.token_means import ScoredBatch, example_sums, token_means, tokens_in
from otloss_llm.training.trainer_cost import cost_for
from otloss_llm.training.trainer_settings import auxiliary_weight, check_loss_settings, set_best_metric, with_terms
from tests.errors import raising

ROW = {"input_ids": [5, 6, 7], "labels": [-100, 6, 7], "token_weight": [9.0, 0.5, 2.0]}


def test_labels_and_weights_are_taken_out_of_a_batch_and_aligned() -> None:
    batch: dict[str, Any] = pad_rows([ROW, {key: column[:2] for key, column in ROW.items()}])
    assert columns_of([ROW]) == ("input_ids", "labels", "token_weight")
    whole = targets_of(dict(batch), shift=False)
    assert (whole.labels.tolist(), whole.valid.sum()) == ([[-100, 6, 7], [-100, 6, -100]], 3)
    shifted = targets_of(batch, shift=True)
    assert sorted(batch) == ["attention_mask", "input_ids"]
    assert shifted.labels.tolist() == [[6, 7, -100], [6, -100, -100]]
    assert shifted.token_weight is not None
    assert shifted.token_weight.tolist() == [[0.5, 2.0, 0.0], [0.5, 0.0, 0.0]]
    assert shifted.counts(shifted.labels == 7).tolist() == [3.0, 2.0]
    assert shifted._replace(token_weight=None).counts(shifted.labels == 7).tolist() == [3, 1]
    assert targets_of({"labels": whole.labels, "shift_labels": shifted.labels}, shift=True).labels is shifted.labels


@pytest.mark.parametrize("weights", [None, torch.tensor([[2.0, 0.5, 9.0], [0.0, 1.0, 1.0]])])
def test_means_are_over_tokens(weights: torch.Tensor | None) -> None:
    """Of the loss over the weights; of D over number positions."""
    z, values = torch.randn(2, 3, 5), torch.tensor([torch.nan, 1.0, 2.0, torch.nan, 5.0])
    targets, cost = Targets(torch.tensor([[1, 3, -100], [2, 4, 0]]), weights), NumberCost(values)
    objective, valid, numbers = (
        Sum.of(EMO(0.5)),
        targets.labels != -100,
        torch.isin(targets.labels, torch.tensor([1, 2, 4])),
    )
    result = token_loss(z, targets.labels, objective=objective, cost=cost, reduction="none")
    sums = example_sums(ScoredBatch(result, targets, objective, cost, torch.tensor(0.25)))
    assert (sums.shape[0], tokens_in(sums.sum(0))) == (2, 5)
    share = torch.ones(2, 3) if weights is None else weights
    expected = {
        "loss": (share * result.loss)[valid].sum() / share[valid].sum(), "nll": result.nll[valid].mean(),
        "transport_cost": result.transport_cost[numbers].mean(), "aux_loss": torch.tensor(0.25),
        "weighted_cost": (share * result.transport_cost)[numbers].sum() / share[numbers].sum(),
    }  # fmt: skip
    assert token_means(sums.sum(0)) == pytest.approx({name: float(mean) for name, mean in expected.items()})
    nothing = token_loss(z, torch.full((2, 3), -100), objective=MLE(), reduction="none")
    empty = ScoredBatch(nothing, Targets(torch.full((2, 3), -100)), Sum.of(MLE()), None, None)
    assert token_means(example_sums(empty).sum(0)) == {"loss": 0.0, "nll": 0.0}


def arguments(**settings: Any) -> Any:
    base = {"n_gpu": 1, "label_smoothing_factor": 0.0, "metric_for_best_model": None, "greater_is_better": None}
    return SimpleNamespace(**base | settings)


def test_settings_of_the_loss_are_followed() -> None:
    assert with_terms(MLE(), arguments(), 0.0).reads == ("nll", "cost")
    smoothed = with_terms(MLE(), arguments(label_smoothing_factor=0.2), 0.1)
    assert [term.weight for term in smoothed.terms] == pytest.approx([0.8, 0.2, 0.1])
    for name in ("nll", "eval_transport_cost"):
        args = arguments(metric_for_best_model=name)
        set_best_metric(args, NumberCost(torch.arange(3.0)))
        assert args.greater_is_better is False
    config = SimpleNamespace(aux_loss_coef=0.1)
    model = SimpleNamespace(config=SimpleNamespace(get_text_config=lambda: config))
    assert auxiliary_weight(SimpleNamespace(args=None), model) == 0.1  # type: ignore[arg-type]
    trainer = SimpleNamespace(args=None, router_aux_loss_coef=0.3)
    assert auxiliary_weight(trainer, model) == 0.3  # type: ignore[arg-type]


HEAD = torch.randn(7, 3)


def chosen(objective: str, cost: Any, numbers: Any = None) -> Any:
    return cost_for(
        parse_objective(objective), cost, rows=lambda: HEAD, vocab_size=7, tokenizer=None, numbers=numbers, seed=0
    )


test_what_excludes_an_objective = raising(
    (lambda: check_loss_settings(arguments(n_gpu=2), None, MLE()), ValueError, r"2 GPUs under nn\.DataParallel"),
    (lambda: with_terms(parse_objective("mle+smoothing:0.1"), arguments(label_smoothing_factor=0.2), 0.0), ValueError,
     r"label_smoothing_factor is 0\.2, and .*smooths labels itself"),
    (lambda: chosen("emo", EmbeddingCost(torch.eye(9))), ValueError, "a vocabulary of 9 tokens, the logits have 7"),
    (lambda: chosen("emo", None), ValueError, "needs cost="),
    (lambda: chosen("number_token", EmbeddingCost(HEAD)), ValueError, "needs distances between numbers"),
    (lambda: chosen("mle", NumberCost(torch.arange(7.0)), NumberSettings("log")), ValueError, "set it in that cost"),
    (lambda: chosen("emo+number", "auto"), ValueError, "processing_class=tokenizer"),
    (lambda: set_best_metric(arguments(metric_for_best_model="transport_cost"), RatingCost(torch.arange(7.0))),
     ValueError, "RatingCost has a signed cost, of which less is not better"),
    (lambda: targets_of({"input_ids": HEAD}, shift=True), ValueError, r"has \['input_ids'\] but no labels"),
)  # fmt: skip
