"""How many tokens the chunked kernel takes at once, and the memory that it holds at the end of a chunk."""

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor

from otloss.costs import LineCost
from otloss_llm import EMO, GEM, MLE, EmbeddingCost, linear_token_loss
from otloss_llm.kernels import chunked, logits
from otloss_llm.kernels.logits import TokenLossConfig
from otloss_llm.kernels.weight_gradients import Gradients
from otloss_llm.objectives import Sum

VOCAB, WIDTH = 64, 8
ALL_AT_ONCE = 2 * WIDTH
EMBEDDING = torch.randn(VOCAB, 5, generator=torch.Generator().manual_seed(0))


@pytest.fixture
def chunks(monkeypatch: pytest.MonkeyPatch, interpreter: None) -> list[tuple[int, int]]:
    """Tokens of each chunk, and the memories of cost rows that are alive when its gradients are added."""
    seen: list[tuple[int, int]] = []
    memories: list[weakref.ref[Any]] = []

    def watched(make: Any) -> Any:
        def made(*arguments: Any) -> Tensor | None:
            rows: Tensor | None = make(*arguments)
            memories.extend([] if rows is None else [weakref.ref(rows.untyped_storage())])
            return rows

        return made

    def add(self: Gradients, tokens: Tensor, *arguments: Any, **settings: Any) -> None:
        gc.collect()
        seen.append((len(tokens), sum(memory() is not None for memory in memories)))
        return real(self, tokens, *arguments, **settings)

    real = Gradients.add
    monkeypatch.setattr(Gradients, "add", add)
    for name in ("_rows_of", "_buffer_of_rows"):
        monkeypatch.setattr(chunked, name, watched(getattr(chunked, name)))
    monkeypatch.setattr(logits, "CHUNK_ENTRIES", 4 * VOCAB)
    monkeypatch.setattr(logits, "ROW_MULTIPLE", 4)
    return seen


def call(labels: Tensor, dtype: torch.dtype = torch.bfloat16, **settings: Any) -> None:
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(len(labels), WIDTH, generator=generator).to(dtype).requires_grad_()
    weight = torch.randn(VOCAB, WIDTH, generator=generator).to(dtype).requires_grad_()
    settings = {"objective": MLE(), "impl": "triton"} | settings
    linear_token_loss(hidden, weight, labels, **settings).loss.sum().backward()


def test_one_chunk_where_it_takes_no_more_memory(chunks: list[tuple[int, int]]) -> None:
    def rows(labels: Tensor, dtype: torch.dtype = torch.bfloat16, *, trained: bool = True, **settings: Any) -> int:
        hidden = torch.zeros(len(labels), WIDTH, dtype=dtype)
        head = torch.zeros(VOCAB, WIDTH, dtype=dtype, requires_grad=trained)
        settings = {"objective": MLE(), "impl": "triton"} | settings
        settings["objective"] = Sum.of(settings["objective"])
        return TokenLossConfig(**settings).rows_for(hidden, labels, head, VOCAB)

    some = torch.arange(ALL_AT_ONCE)
    assert rows(some) == ALL_AT_ONCE
    assert rows(torch.arange(ALL_AT_ONCE + 1)) == rows(some, trained=False) == rows(some, torch.float16) == 4
    others = ({"softcap": 3.0}, {"scale": 0.5}, {"temperature": 2.0}, {"objective": GEM()}, {"impl": "chunked"},
              {"chunk_size": 4})  # fmt: skip
    assert all(rows(some, **settings) == 4 for settings in others)
    with torch.no_grad():
        assert rows(some) == 4
    # A cost row in float32 takes twice the memory of a row of the head in bfloat16.
    emo = {"objective": EMO(), "cost": EmbeddingCost(EMBEDDING).for_labels(some, None)}
    assert rows(some % (WIDTH // 2), **emo) == ALL_AT_ONCE
    assert rows(some % (WIDTH // 2 + 1), **emo) == 4
    call(some)
    assert [size for size, _ in chunks] == [ALL_AT_ONCE]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_cost_rows_are_freed_before_the_last_products(chunks: list[tuple[int, int]], dtype: torch.dtype) -> None:
    impl = "triton" if dtype != torch.float64 else "chunked"
    for cost in (EmbeddingCost(EMBEDDING), LineCost(torch.arange(float(VOCAB)))):
        for size in (6, ALL_AT_ONCE):
            chunks.clear()
            call(torch.arange(ALL_AT_ONCE), dtype, objective=EMO(), cost=cost, chunk_size=size, impl=impl)
            assert sum(count for count, _ in chunks) == ALL_AT_ONCE
            assert chunks[-1][1] == 0
            assert isinstance(cost, LineCost) or len(chunks) == 1 or chunks[0][1] > 0
