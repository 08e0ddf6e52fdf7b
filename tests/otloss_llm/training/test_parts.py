"""The parts of the trainer, without one: labels of a batch, means over tokens, settings of the loss, the cost."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from accelerate.data_loader import IterableDatasetShard
from torch import nn

from otloss_llm import MLE, EmbeddingCost, NumberCost, RatingCost
from otloss_llm.costs.choice import NumberSettings
from otloss_llm.objectives import parse_objective
from otloss_llm.training.batches import (
    column_names,
    counting_rows,
    has_weights,
    label_counts,
    pad_rows,
    pop_targets,
    repeated_positions,
    unrepeated_rows,
)
from otloss_llm.training.sample import cut_batch
from otloss_llm.training.torchtitan import ObjectiveLoss
from otloss_llm.training.trainer_cost import cost_for
from otloss_llm.training.trainer_settings import (
    auxiliary_weight,
    best_metric,
    check_best_metric,
    check_loss_settings,
    measured_best_metric,
    set_best_metric,
    with_terms,
)
from tests.errors import raising

ROW = {"input_ids": [5, 6, 7], "labels": [-100, 6, 7], "token_weight": [9.0, 0.5, 2.0]}


def test_labels_and_weights_are_taken_out_of_a_batch_and_aligned() -> None:
    batch: dict[str, Any] = pad_rows([ROW, {key: column[:2] for key, column in ROW.items()}])
    assert column_names([ROW]) == ("input_ids", "labels", "token_weight")
    whole = pop_targets(dict(batch), shift=False)
    assert (whole.labels.tolist(), whole.valid.sum()) == ([[-100, 6, 7], [-100, 6, -100]], 3)
    shifted = pop_targets(batch, shift=True)
    assert sorted(batch) == ["attention_mask", "input_ids"]
    assert shifted.labels.tolist() == [[6, 7, -100], [6, -100, -100]]
    assert shifted.token_weight is not None
    assert shifted.token_weight.tolist() == [[0.5, 2.0, 0.0], [0.5, 0.0, 0.0]]
    assert shifted.counts(shifted.labels == 7).tolist() == [3.0, 2.0]
    assert shifted._replace(token_weight=None).counts(shifted.labels == 7).tolist() == [3, 1]
    assert pop_targets({"labels": whole.labels, "shift_labels": shifted.labels}, shift=True).labels is shifted.labels
    with pytest.raises(ValueError, match=r"input_ids of shape \(1, 3\), expected \(length,\).*squeeze\(0\)"):
        pad_rows([{name: torch.tensor([values]) for name, values in ROW.items()}])
    for rows, aligned in (([ROW, {"input_ids": [5], "labels": [5]}], False), ([ROW | {"labels": [6, 7]}], True)):
        with pytest.raises(ValueError, match="a row has columns of lengths"):
            pad_rows(rows, aligned=aligned)


def test_a_small_part_of_a_batch_is_examined() -> None:
    """Where the labels are, and of a packed batch as one sequence; images of all rows in one tensor stay whole."""
    ids = torch.arange(150).view(3, 50)
    mask = (torch.arange(50) >= torch.tensor([[40], [30], [0]])).long()  # padded on the left
    for given in (ids.masked_fill(mask == 0, -100), torch.full_like(ids, -100)):
        part, labels = cut_batch({"input_ids": ids, "attention_mask": mask, "use_cache": False}, given, False)
        assert torch.equal(part["input_ids"], ids[1:, 18:])
        assert (part["attention_mask"].sum().item(), part["use_cache"]) == (52, False)
        assert torch.equal(labels, given[1:, 18:])
    answer = ids.masked_fill(torch.arange(50) < torch.tensor([[50], [45], [50]]), -100)
    part, labels = cut_batch({"inputs_embeds": torch.ones(3, 50, 4)}, answer, False)
    assert (part["inputs_embeds"].shape, labels[labels != -100].tolist()) == ((2, 32, 4), [95, 96, 97, 98, 99])
    # The token that the only label predicts is in the part, too.
    only = torch.where(torch.arange(50) == 40, ids, -100)
    part, labels = cut_batch({"input_ids": ids}, only, False)
    assert labels[0].tolist().index(40) < labels.shape[1] - 1
    part, _ = cut_batch({"input_ids": ids[:1], "cu_seq_lens_q": torch.tensor([0, 9, 50])}, ids[:1], False)
    assert torch.equal(part.pop("input_ids"), ids[:1, :32])
    assert not part
    part, labels = cut_batch({"input_features": torch.ones(3, 4, 70), "decoder_input_ids": ids}, ids, True)
    assert {name: tuple(value.shape) for name, value in part.items()} == {
        "input_features": (2, 4, 70), "decoder_input_ids": (2, 32),
    }  # fmt: skip
    assert labels.shape == (2, 32)
    part, labels = cut_batch({"input_ids": ids, "pixel_values": torch.ones(7, 6)}, ids, False)
    assert (len(part["input_ids"]), len(part["pixel_values"]), len(labels)) == (3, 7, 3)
    for images, kept in (([0, 1, 2], 3), ([1, 1, 1], 2)):  # equally many images as rows are not one for each row
        row = torch.tensor([[7] * count + [1] * (4 - count) for count in images])
        part, _ = cut_batch({"input_ids": row, "pixel_values": torch.ones(3, 6)}, row, False, {7, 8})
        assert len(part["pixel_values"]) == len(part["input_ids"]) == kept


@pytest.mark.parametrize(("rows", "rest"), [(7, 1), (6, 0), (2, 2), (0, 0)])
def test_rows_of_a_stream_that_are_not_repeated(rows: int, rest: int) -> None:
    stream = IterableDatasetShard(range(rows), batch_size=3, num_processes=2, process_index=1)
    batches = SimpleNamespace(dataset=stream, num_workers=0)
    for _ in range(2):
        assert counting_rows(batches) is stream
        list(stream)
        assert unrepeated_rows(stream) == rest
    for alone in (IterableDatasetShard(range(rows)), range(rows)):
        assert counting_rows(SimpleNamespace(dataset=alone, num_workers=0)) is None


def arguments(**settings: Any) -> Any:
    base = {"n_gpu": 1, "label_smoothing_factor": 0.0, "metric_for_best_model": None, "greater_is_better": None}
    return SimpleNamespace(**base | settings)


def test_settings_of_the_loss_are_followed() -> None:
    assert with_terms(MLE(), arguments(), 0.0).reads == ("nll", "cost")
    smoothed = with_terms(MLE(), arguments(label_smoothing_factor=0.2), 0.1)
    assert [term.weight for term in smoothed.terms] == pytest.approx([0.8, 0.2, 0.1])
    for name, prefix, is_less in (
        ("nll", "eval", True),
        ("eval_transport_cost", "eval", True),
        ("eval_later_texts_nll", "eval_later_texts", True),
        ("other_perplexity", "eval_other", True),
        ("other_perplexity", "eval", False),
        ("neg_nll", "eval", False),
        (None, "eval", False),
    ):
        args = arguments(metric_for_best_model=name, greater_is_better=True)
        set_best_metric(args, measured_best_metric(args, prefix), NumberCost(torch.arange(3.0)))
        assert args.greater_is_better is not is_less, (name, prefix)
    args = arguments(metric_for_best_model="eval_later_texts_nll")
    check_best_metric(args, best_metric(args, {"later_texts": []}), {"nll"})
    config = SimpleNamespace(aux_loss_coef=0.1)
    model = SimpleNamespace(config=SimpleNamespace(get_text_config=lambda: config))
    assert auxiliary_weight(SimpleNamespace(args=None), model) == 0.1  # type: ignore[arg-type]
    trainer = SimpleNamespace(args=None, router_aux_loss_coef=0.3)
    assert auxiliary_weight(trainer, model) == 0.3  # type: ignore[arg-type]


HEAD, RATINGS = torch.randn(7, 3), RatingCost(torch.arange(7.0))


def chosen(objective: str, cost: Any, numbers: Any = None) -> Any:
    return cost_for(
        parse_objective(objective), cost, rows=lambda: HEAD, vocab_size=7, tokenizer=None, numbers=numbers, seed=0
    )


test_what_excludes_an_objective = raising(
    (lambda: check_loss_settings(arguments(n_gpu=2), None, MLE()), ValueError, r"2 GPUs under nn\.DataParallel"),
    (lambda: with_terms(parse_objective("mle+smoothing:0.1"), arguments(label_smoothing_factor=0.2), 0.0), ValueError,
     r"label_smoothing_factor is 0\.2, and .*smooths labels itself"),
    (lambda: with_terms(MLE(), arguments(label_smoothing_factor=0.0), -1.0), ValueError, "z_loss is -1"),
    (lambda: chosen("emo", EmbeddingCost(torch.eye(9))), ValueError, "a vocabulary of 9 tokens, the logits have 7"),
    (lambda: chosen("emo", None), ValueError, "needs cost="),
    (lambda: chosen("number_token", EmbeddingCost(HEAD)), ValueError, "needs distances between numbers"),
    (lambda: chosen("mle", NumberCost(torch.arange(7.0)), NumberSettings("log")), ValueError, "set it in that cost"),
    (lambda: chosen("emo+number", "auto"), ValueError, "processing_class=tokenizer"),
    (lambda: set_best_metric(arguments(metric_for_best_model="a_transport_cost"), "transport_cost", RATINGS),
     ValueError, "RatingCost has a signed cost, of which less is not better"),
    (lambda: check_best_metric(arguments(metric_for_best_model="eval_a_entropy"), "entropy", {"nll", "loss"}),
     ValueError, "is 'eval_a_entropy', which an evaluation of this model .* does not have; take one of loss, nll"),
    (lambda: repeated_positions(torch.tensor([[4, 5, 6]]), torch.tensor([[0, 1, 0]]), [{"input_ids": [4, 5, 6]}], 1),
     ValueError, r"sequences that begin at \[0, 2\], and the last 1 rows of the data set at \[0, 3\].*one process"),
    (lambda: counting_rows(SimpleNamespace(dataset=IterableDatasetShard([1], num_processes=2), num_workers=1)),
     ValueError, "a stream is evaluated in 2 processes with dataloader_num_workers=1, which hides the rows"),
    (lambda: pop_targets({"input_ids": HEAD}, shift=True), ValueError, r"has \['input_ids'\] but no labels"),
)  # fmt: skip


def test_columns_of_a_batch_have_the_dtype_of_all_rows_and_padding_no_labels() -> None:
    rows: list[dict[str, Any]] = [
        {"input_ids": [], "shift_labels": [], "token_weight": []},
        {"input_ids": [5, 6], "shift_labels": [6, 7], "token_weight": [1, 2]},
        {"input_ids": [8], "shift_labels": [9], "token_weight": [0.5]},
    ]
    for order in (rows, rows[::-1]):
        batch = pad_rows(order)
        shifted = pop_targets(batch, shift=True)
        assert batch["input_ids"].dtype == shifted.labels.dtype == torch.int64
        assert shifted.labels.sum(1).sort().values.tolist() == [-200, -91, 13]
        assert shifted.token_weight is not None
        assert shifted.token_weight.sum(1).sort().values.tolist() == [0.0, 0.5, 3.0]


@pytest.mark.parametrize("dtype", ["uint8", "uint16", "int32"])
def test_tokens_of_numpy_of_any_dtype(dtype: str) -> None:
    rows = [{name: np.arange(size, dtype=dtype) for name in ("input_ids", "labels")} for size in (2, 3)]
    batch = pad_rows(rows)
    assert batch["input_ids"].dtype == torch.int64
    assert batch["labels"].tolist() == [[0, 1, -100], [0, 1, 2]]
    assert pop_targets({"labels": torch.zeros(1, 2, dtype=torch.int32)}, shift=True).labels.dtype == torch.int64


class Stream(torch.utils.data.IterableDataset[Any]):
    """A stream with a length; it inherits a `__getitem__` that raises."""

    def __len__(self) -> int:
        return 2

    def __iter__(self) -> Iterator[Any]:
        return iter([ROW, ROW])


def test_rows_tell_whether_they_have_weights() -> None:
    datasets = pytest.importorskip("datasets")
    rows = [ROW, ROW]
    stream = datasets.IterableDataset.from_generator(lambda: iter(rows))
    assert stream.column_names is None
    for weighted in (rows, datasets.Dataset.from_list(rows), stream):
        assert has_weights(weighted)
    for plain in ([{"input_ids": [1]}], stream.remove_columns("token_weight"), stream.skip(2), None, iter(rows)):
        assert not has_weights(plain)
    assert not has_weights(Stream())


def test_a_row_of_scalars_is_no_row_of_tokens() -> None:
    with pytest.raises(ValueError, match="a row has id = 3, expected a list with an entry for each token"):
        pad_rows([ROW | {"id": 3}])


def test_labels_that_are_predicted_are_counted() -> None:
    """Not the first one of a row, nor of a sequence that it is packed of."""
    rows = [
        {"labels": [5, 1, 2, -100], "seq_lengths": [4]}, {"labels": [6, 1, 6, 2, 2], "seq_lengths": [2, 3]},
        {"labels": [], "seq_lengths": []},
    ]  # fmt: skip
    table = pytest.importorskip("datasets").Dataset.from_list(rows)
    narrow = [{name: np.array(column, dtype=np.int16) for name, column in row.items()} for row in rows]
    for packed in (rows, table, narrow):
        counts = label_counts(packed, 8, shifted=True)
        assert counts is not None
        assert counts.tolist() == [0, 2, 3, 0, 0, 0, 0, 0]
    counts = label_counts([{"labels": row["labels"]} for row in rows], 8, shifted=True)
    assert counts is not None
    assert counts.tolist() == [0, 2, 3, 0, 0, 0, 1, 0]


def test_means_of_torchtitan_without_a_number_of_tokens() -> None:
    generator = torch.Generator().manual_seed(0)
    head, hidden = nn.Linear(8, 20, bias=False), torch.randn(2, 5, 8, generator=generator)
    labels = torch.randint(20, (2, 5), generator=generator).index_fill(1, torch.tensor([0]), -100)
    loss = ObjectiveLoss(MLE(), EmbeddingCost(head.weight))
    loss.set_lm_head(head)
    (total, metrics), (mean, same) = loss(hidden, labels), loss(hidden, labels, torch.tensor(8))
    torch.testing.assert_close(total, 8 * mean)
    torch.testing.assert_close(metrics, same)
    torch.testing.assert_close(metrics["nll/mean"], mean)
    other = ObjectiveLoss(MLE(), EmbeddingCost(head.weight), ignore_index=-1)
    other.set_lm_head(head)
    torch.testing.assert_close(other(hidden, labels.where(labels >= 0, -1))[1], same)
