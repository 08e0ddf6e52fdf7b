"""EmbeddingCost: values against float64, controls, and that it is a frozen copy that no checkpoint holds."""

import copy
import pickle
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from otloss_llm import EMO, EmbeddingCost, all_but_the_top, dense_token_loss, emo_loss, token_loss
from otloss_llm.costs.embedding import without_tf32
from otloss_llm.costs.vocabulary import LabelRows
from otloss_llm.training.predictions import logit_sums
from tests.errors import raising
from tests.otloss.oracles import cosine_matrix


@given(st.integers(0, 10**6), st.sampled_from([torch.float64, torch.float32, torch.bfloat16, torch.float16]))
@settings(max_examples=25, deadline=None)
def test_rows_are_one_minus_the_cosine(seed: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(seed)
    embedding = (torch.randn(13, 6, generator=generator) * 10 ** float(torch.randn(1, generator=generator))).to(dtype)
    embedding[4], embedding[5], embedding[6] = 0, embedding[2], -embedding[2]
    embedding[7, :2], embedding[8, :2] = 1, torch.tensor([1, 1.01])  # rounding errors alone are snapped to 0
    embedding[7, 2:] = embedding[8, 2:] = 0
    cost = EmbeddingCost(embedding, near_duplicates="keep")
    index = torch.randint(13, (9,), generator=generator)
    rows = cost.rows(index)
    wide = torch.promote_types(dtype, torch.float32)
    assert rows.dtype == wide
    true = cosine_matrix(embedding)
    torch.testing.assert_close(rows.double(), true[index], rtol=0, atol=16 * torch.finfo(wide).eps)
    assert not rows.gather(1, index[:, None]).any()  # exactly 0 to itself
    assert not cost.rows(torch.tensor([2]))[0, 5]  # and to its duplicate
    assert ((rows >= 0) & (rows <= 2 + 4 * torch.finfo(rows.dtype).eps)).all()
    assert (cost.rows(torch.tensor([4]))[0, [i for i in range(13) if i != 4]] == 1).all()
    weights = torch.rand(2, 13, generator=generator).to(wide)
    torch.testing.assert_close(
        cost.apply(weights).double(), weights.double() @ true, rtol=0, atol=64 * torch.finfo(wide).eps
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_in_a_buffer_of_the_caller(dtype: torch.dtype) -> None:
    embedding = torch.randn(40, 8, generator=torch.Generator().manual_seed(0))
    embedding[20:] = 3.0 * embedding[:20]
    cost, index = EmbeddingCost(embedding, near_duplicates="keep"), torch.tensor([3, 30, 0])
    asked = cost.for_labels(index)
    assert isinstance(asked, LabelRows)
    assert dtype in asked.buffer_dtypes
    buffer = torch.full((200,), 7.0, dtype=dtype)
    rows = asked.rows(index, buffer)
    assert rows.data_ptr() == buffer.data_ptr()
    assert (buffer[120:] == 7).all()
    atol = 1e-6 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(rows.double(), cosine_matrix(embedding)[index], rtol=0, atol=atol)
    assert (rows[torch.arange(3), torch.tensor([23, 10, 20])] == 0).all()  # duplicates


def test_it_is_detached_copied_and_no_module() -> None:
    embedding = torch.nn.Parameter(torch.randn(7, 3))
    cost = EmbeddingCost(embedding)
    before = cost.rows(torch.arange(7))
    assert not before.requires_grad
    with torch.no_grad():
        embedding.mul_(torch.randn(7, 3))
    for other in (cost, copy.deepcopy(cost), pickle.loads(pickle.dumps(cost)), cost.to("cpu")):
        assert torch.equal(other.rows(torch.arange(7)), before)
    holder = torch.nn.Linear(3, 7)
    holder.cost = cost
    assert set(holder.state_dict()) == {"weight", "bias"}


def test_controls() -> None:
    """Without a clip EMO's value is nll whatever the embedding: the semantics are in the gradient only."""
    generator = torch.Generator().manual_seed(0)
    embedding = torch.randn(200, 64, generator=generator) + 2  # all of one direction: costs far below 1
    cost = EmbeddingCost(embedding)
    random, again = (cost.random_like(generator=torch.Generator().manual_seed(1)) for _ in range(2))
    assert cost.dense().mean() < 0.5
    assert (random.dense()[~torch.eye(200, dtype=torch.bool)] - 1).abs().mean() < 2 / 64**0.5
    assert torch.equal(random.unit, again.unit)
    shuffled, again = (cost.shuffled(generator=torch.Generator().manual_seed(2)) for _ in range(2))
    assert torch.equal(shuffled.unit, again.unit)
    torch.testing.assert_close(shuffled.dense().flatten().sort().values, cost.dense().flatten().sort().values)
    assert torch.equal(cost.dense(), EmbeddingCost(embedding).dense())  # controls leave the original alone
    assert not torch.allclose(shuffled.dense(), cost.dense(), atol=0.1)


test_invalid_embeddings = raising(
    (torch.ones(3), ValueError, r"embedding has shape \(3,\)"),
    (torch.ones(3, 2, dtype=torch.long), TypeError, "int64"),
    (torch.full((3, 2), torch.nan), ValueError, "row 0"),
    ([[1.0]], TypeError, "list"),
    (torch.ones(3, 2), {"near_duplicates": "drop"}, "near_duplicates is 'drop', expected one of"),
    (torch.full((3, 2), torch.nan), {"directions": 1}, "embedding holds 6 NaN"),
    call=lambda embedding, given=None: EmbeddingCost(embedding, **(given or {})),
)


def test_duplicates_cost_nothing_in_a_narrower_dtype() -> None:
    embedding = torch.randn(200, 48, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    embedding[100:] = 1.7 * embedding[:100]
    dense = EmbeddingCost(embedding, near_duplicates="keep").to(torch.float32).dense()
    assert (dense[torch.arange(100), torch.arange(100, 200)] == 0).all()


def test_tf32_is_off_for_as_long_as_any_thread_needs_it() -> None:
    device, products = torch.device("cuda"), torch.backends.cuda.matmul  # the setting exists without a device
    if not hasattr(products, "fp32_precision"):
        pytest.skip("torch before 2.9")
    before = products.fp32_precision
    products.fp32_precision = "tf32"
    try:
        with without_tf32(device):
            with without_tf32(device):
                assert products.fp32_precision == "ieee"
            assert products.fp32_precision == "ieee"
        assert products.fp32_precision == "tf32"
    finally:
        products.fp32_precision = before


def test_a_cost_without_leading_directions() -> None:
    """Directions are removed before near-duplicates are looked for; a row of which nothing is left becomes zero."""
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(70, 8, generator=generator) * torch.tensor([5.0, 3.0] + [1.0] * 6) + torch.arange(8.0)
    plain = EmbeddingCost(rows, directions=2)
    torch.testing.assert_close(plain.unit, EmbeddingCost(all_but_the_top(rows, 2)).unit)
    assert torch.equal(EmbeddingCost(rows, directions=None).unit, EmbeddingCost(rows, directions=1).unit)
    resized = torch.cat([rows, rows.mean(0) + 1e-5 * torch.randn(5, 8, generator=generator)])
    with pytest.warns(UserWarning, match="5 of the 75 rows"):
        assert EmbeddingCost(resized, directions=2).near_duplicates[70:].all()
    at_mean = all_but_the_top(torch.cat([rows, rows.mean(0, keepdim=True) * (1 + 1e-6)]), 2)
    assert (at_mean[-1] == 0).all()


def test_all_but_the_top_by_singular_vectors() -> None:
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(60, 8, generator=generator) * torch.tensor([5.0, 3.0] + [1.0] * 6) + torch.arange(8.0)
    rows[5] = rows[9] = 0  # padding
    used = [k for k in range(60) if k not in (5, 9)]
    centred = rows[used] - rows[used].mean(0)
    leading = torch.linalg.svd(centred).Vh[:2]
    actual = all_but_the_top(rows.requires_grad_(), 2)
    torch.testing.assert_close(actual[used], centred - centred @ leading.T @ leading, atol=1e-5, rtol=1e-5)
    assert not actual.requires_grad
    assert (actual[[5, 9]] == 0).all()
    assert all_but_the_top(rows.bfloat16()).dtype == torch.float32
    torch.testing.assert_close(all_but_the_top(1e25 * rows.detach(), 2) / 1e25, actual, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(all_but_the_top(rows[:, :2], 0), all_but_the_top(rows[:, :2].double(), 0).float())
    for wrong, directions, message in (
        (rows, 8, "directions is 8, expected 0 to 7"), (rows * torch.nan, None, "NaN"), (rows, 0.5, "a whole number"),
        (rows, True, "directions is True"), (rows[:, :1], 0, r"shape \(60, 1\), expected \(V, d\)"),
    ):  # fmt: skip
        with pytest.raises((TypeError, ValueError), match=message):
            all_but_the_top(wrong, directions)  # type: ignore[arg-type]


def test_autocast_changes_no_digit_of_a_cost_or_of_a_loss_on_logits() -> None:
    """The backward pass is inside of it, too."""
    generator = torch.Generator().manual_seed(0)
    embedding = torch.randn(60, 40, generator=generator) + 0.5
    logits, labels = torch.randn(9, 60, generator=generator), torch.arange(9)

    def results() -> list[torch.Tensor]:
        leaf, cost = logits.clone().requires_grad_(), EmbeddingCost(embedding, directions=2)
        both: dict[str, Any] = {"objective": EMO(), "cost": cost}
        losses = [emo_loss(leaf, labels, embedding), token_loss(leaf, labels, **both).loss]
        losses += [dense_token_loss(leaf, logits.softmax(-1), bound=b, **both).loss for b in ("residual", "difference")]
        gradients = torch.autograd.grad(sum(losses), leaf)
        return [all_but_the_top(embedding, 2), cost.rows(labels), *losses, *gradients, logit_sums(logits, labels)]

    expected = results()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert all(torch.equal(a, e) for a, e in zip(results(), expected, strict=True))
