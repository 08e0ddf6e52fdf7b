"""What test_vocab_parallel.py runs in each process: every check, in order, in step.

A head spread over processes against the same head in one, which every process also computes by itself. The checks of
DTensors are in dtensor_checks.py.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[3]))

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from otloss.costs import Cost, DenseCost, LineCost
from otloss_llm import EMO, MLE, EmbeddingCost, ShardedEmbeddingCost, TokenLoss, linear_token_loss, token_loss
from otloss_llm.kernels import logits
from tests.otloss_llm.oracles import OBJECTIVES, Problem, problem

VOCAB = 41
SIZES = {2: [(20, 21), (0, 41)], 3: [(7, 30, 4), (21, 0, 20)]}
TOLERANCE = {torch.float64: 1e-12, torch.float32: 4e-6, torch.bfloat16: 2e-2}
REDUCTIONS: list[dict[str, Any]] = [
    {"reduction": "mean"}, {"reduction": "sum"}, {"reduction": "none"}, {"reduction": "mean", "num_items": 50},
]  # fmt: skip


def blocks() -> list[tuple[int, ...]]:
    return SIZES[dist.get_world_size()]


def own(tensor: Tensor, sizes: tuple[int, ...]) -> Tensor:
    return tensor.split(sizes)[dist.get_rank()]


def leaves_of(given: Problem, sizes: tuple[int, ...]) -> list[Tensor]:
    hidden, *head = given.leaves()
    return [hidden, *(own(tensor.detach(), sizes).clone().requires_grad_() for tensor in head)]


def scored(leaves: list[Tensor], given: Problem, **settings: Any) -> TokenLoss:
    settings = {"objective": EMO(), "cost": EmbeddingCost(given.embedding), "chunk_size": 7} | settings
    return linear_token_loss(
        leaves[0], leaves[1], given.labels, bias=leaves[2] if len(leaves) > 2 else None,
        logit_scale=given.scale, logit_softcap=given.softcap, **settings,
    )  # fmt: skip


def shared(leaves: list[Tensor], given: Problem, **settings: Any) -> TokenLoss:
    return scored(leaves, given, process_group=dist.group.WORLD, **settings)


def backward(loss: Tensor) -> None:
    """With another upstream gradient for each token, or one that is not 1."""
    upstream = torch.linspace(0.5, 2.0, loss.numel(), dtype=loss.dtype).reshape(loss.shape)
    loss.backward(upstream)


def assert_close(got: Tensor | None, want: Tensor | None, tolerance: float) -> None:
    assert got is not None
    assert want is not None
    got, want = got.detach().double(), want.detach().double()
    assert float((got - want).norm()) <= tolerance * float(want.norm()) + 1e-30


def assert_same_everywhere(*tensors: Tensor | None) -> None:
    for tensor in tensors:
        assert tensor is not None
        everywhere = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
        dist.all_gather(everywhere, tensor.detach().contiguous())
        assert all(torch.equal(everywhere[0], other) for other in everywhere)


def assert_as_in_one_process(
    given: Problem, sizes: tuple[int, ...], own_cost: Cost | None = None, **settings: Any
) -> None:
    """Loss, nll, D and gradients; `own_cost` is that of the shared call, if another."""
    whole, parts = given.leaves(), leaves_of(given, sizes)
    one = scored(whole, given, **settings)
    backward(one.loss)
    out = shared(parts, given, **settings | ({} if own_cost is None else {"cost": own_cost}))
    backward(out.loss)
    tolerance = TOLERANCE[given.hidden.dtype]
    assert_close(out.loss, one.loss, tolerance)
    assert_close(out.nll, one.nll, tolerance)
    if one.cost is not None:
        assert_close(out.cost, one.cost, tolerance)
        assert_same_everywhere(out.cost)
    assert_same_everywhere(out.loss, out.nll, parts[0].grad)
    assert_close(parts[0].grad, whole[0].grad, tolerance)
    for part, tensor in zip(parts[1:], whole[1:], strict=True):
        assert tensor.grad is not None
        # Relative to the whole: a block of rare tokens has next to no gradient.
        difference = float((part.grad.double() - own(tensor.grad, sizes).double()).norm())  # type: ignore[union-attr]
        assert difference <= tolerance * float(tensor.grad.double().norm())


@contextmanager
def raises_everywhere(error: type[Exception], match: str, *, same: bool = False) -> Iterator[None]:
    """Every process raises; `match` is found in one of the messages at least, and `same`: all are equal."""
    with pytest.raises(error) as caught:
        yield
    messages: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(messages, str(caught.value))
    assert any(match in message for message in messages), messages
    assert not same or len(set(messages)) == 1, messages


@contextmanager
def counted(**names: tuple[str, ...]) -> Iterator[dict[str, int]]:
    """How often functions of torch.distributed are called, under any of their names."""
    calls = dict.fromkeys(names, 0)
    with pytest.MonkeyPatch.context() as patch:
        for key, candidates in names.items():
            for name in candidates:
                if hasattr(dist, name):  # torch renames some
                    patch.setattr(dist, name, _counting(getattr(dist, name), calls, key))
        yield calls


def _counting(function: Callable[..., Any], calls: dict[str, int], key: str) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        calls[key] += 1
        return function(*args, **kwargs)

    return call


# ---- the checks ---------------------------------------------------------------------------------------------------


def check_every_objective_and_reduction() -> None:
    for dtype in (torch.float64, torch.float32):
        for index, (objective, _) in enumerate(OBJECTIVES.values()):
            for reduction in REDUCTIONS if index % 4 == 0 else REDUCTIONS[index % 4 :][:1]:
                for sizes in blocks():
                    assert_as_in_one_process(problem(dtype=dtype), sizes, objective=objective, **reduction)


def check_forms_of_the_head() -> None:
    capped = problem(1, bias=False, batch=(3, 13))
    capped.scale, capped.softcap = 0.7, 4.0
    for sizes in blocks():
        assert_as_in_one_process(capped, sizes)
        assert_as_in_one_process(problem(2), sizes, objective=MLE(), cost=None)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(logits, "CHUNK_ENTRIES", 16 * VOCAB)  # so that the blocks' sizes would give other chunks each
            assert_as_in_one_process(problem(2), sizes, chunk_size=None)
        assert_as_in_one_process(problem(3, batch=(1,), ignored=0.0), sizes)
        assert_as_in_one_process(problem(4, dtype=torch.bfloat16), sizes)
        assert_as_in_one_process(problem(5, sharpness=20.0, dtype=torch.float32), sizes)  # some logits underflow


def check_costs() -> None:
    for dtype in (torch.float64, torch.float32):
        given = problem(dtype=dtype)
        given.embedding[21:] = given.embedding[:20] * 3  # duplicate tokens of different processes
        given.embedding[12] = 0.0
        matrix = torch.rand(VOCAB, VOCAB, dtype=dtype, generator=torch.Generator().manual_seed(0))
        for sizes in blocks():
            for cost in (DenseCost(matrix), LineCost(torch.arange(VOCAB).to(dtype))):
                assert_as_in_one_process(given, sizes, cost=cost)
            sharded = ShardedEmbeddingCost(own(given.embedding, sizes), dist.group.WORLD)
            assert sharded.shape == (VOCAB, VOCAB)
            assert_as_in_one_process(given, sizes, sharded)
            outs = [  # bit for bit
                shared(leaves_of(given, sizes), given, cost=cost) for cost in (sharded, EmbeddingCost(given.embedding))
            ]
            assert all(torch.equal(a, b) for a, b in zip(*outs, strict=True))  # type: ignore[arg-type]
            assert torch.equal(sharded.near_duplicates, EmbeddingCost(given.embedding).near_duplicates)
            assert sharded.near_duplicates.sum() == 38  # 20 pairs but for the zero row and its partner
            shard, labels = sharded.shard, torch.arange(VOCAB).flip(0)
            kept = EmbeddingCost(given.embedding, near_duplicates="keep")
            whole = kept.rows(labels)[:, shard.start : shard.stop]
            block = own(given.embedding, sizes)
            for cost in (ShardedEmbeddingCost(block, dist.group.WORLD, near_duplicates="keep"), kept):
                columns = cost.for_labels(labels, shard).rows(labels, None)
                assert_close(columns, whole, TOLERANCE[dtype])
                assert torch.equal(columns == 0, whole == 0)  # nothing of rounding between duplicates
    with raises_everywhere(ValueError, "no whole rows", same=True):
        token_loss(torch.zeros(3, VOCAB), torch.tensor([1, 2, 3]), objective=EMO(), cost=sharded)


def check_duplicates_where_bfloat16_is_allowed() -> None:
    embedding = torch.randn(600, 512, generator=torch.Generator().manual_seed(2))
    embedding[300:] = 1.3 * embedding[:300]
    size, labels = dist.get_world_size(), torch.arange(300)
    block = embedding.chunk(size)[dist.get_rank()]
    sharded = ShardedEmbeddingCost(block, dist.group.WORLD, near_duplicates="keep")
    torch.set_float32_matmul_precision("medium")
    try:
        for cost in (sharded, EmbeddingCost(embedding, near_duplicates="keep")):
            columns = cost.for_labels(labels, sharded.shard).rows(labels, None)
            twins = sharded.shard.local(labels + 300)
            assert (columns[twins >= 0, twins[twins >= 0]] == 0).all()
    finally:
        torch.set_float32_matmul_precision("highest")


def check_masked_columns() -> None:
    """A process with nothing but masked columns, for tokens whose labels lie elsewhere; and a row with none left."""
    for dtype in (torch.float64, torch.float32):
        for sizes in blocks():
            given = problem(6, dtype=dtype)
            start, stop = sum(sizes[:-1]), VOCAB
            assert given.bias is not None
            given.bias[start:stop] = -torch.inf
            inside = (given.labels >= start) & (given.labels < stop)
            given.labels[inside] = 0
            assert sizes[0] or start == 0  # an empty first process is the other case
            if start == 0:
                with raises_everywhere(ValueError, "its logit is -inf"):
                    shared(leaves_of(given, sizes), given)
            else:
                assert_as_in_one_process(given, sizes)
                given.labels[5] = stop - 1
                with raises_everywhere(ValueError, "its logit is -inf"):
                    shared(leaves_of(given, sizes), given)


def check_nan_in_one_process() -> None:
    for dtype in (torch.float64, torch.float32):
        for broken in (torch.nan, torch.inf):
            sizes = blocks()[0]
            given = problem(dtype=dtype)
            leaves = leaves_of(given, sizes)
            if dist.get_rank() == 1:
                leaves[1].detach()[3, 2] = broken
            for settings in ({}, {"reduction": "none"}, {"objective": MLE(), "cost": None}):
                with raises_everywhere(ValueError, "weight holds 1 NaN or infinite"):
                    shared(leaves, given, **settings)


def check_refusals() -> None:
    sizes, given, first = blocks()[0], problem(), dist.get_rank() == 0
    leaves = leaves_of(given, sizes)
    with raises_everywhere(ValueError, "process 0 of the group refused"):
        shared([leaves[0], leaves[1][:, 1:] if first else leaves[1], leaves[2]], given)
    with raises_everywhere(TypeError if first else ValueError, "expected one dtype"):
        shared([leaves[0], leaves[1].float() if first else leaves[1], leaves[2]], given)
    with raises_everywhere(ValueError, "refused its arguments"):
        shared(leaves, given, chunk_size=0 if first else 7)
    with raises_everywhere(ValueError, "do not ask for the same"):
        shared(leaves, given, chunk_size=6 if first else 7)
    other = problem()
    other.labels[0] = dist.get_rank()
    with raises_everywhere(ValueError, "in data parallelism, where tokens differ, leave process_group out"):
        shared(leaves, other)
    other.labels[0] = VOCAB
    with raises_everywhere(ValueError, f"{VOCAB}", same=True):
        shared(leaves, other)
    with raises_everywhere(ValueError, 'impl="reference"', same=True):
        shared(leaves, given, impl="reference")
    with raises_everywhere(ValueError, "the logits have 41", same=True):
        shared(leaves, given, cost=EmbeddingCost(torch.eye(sizes[0])))
    with raises_everywhere(TypeError, "expected a cost", same=True):
        shared(leaves, given, cost="embedding")
    with raises_everywhere(ValueError, "expected the same: build the cost from the same blocks", same=True):
        shared(leaves, given, cost=ShardedEmbeddingCost(own(given.embedding, blocks()[1]), dist.group.WORLD))
    broken = own(given.embedding, sizes).clone()
    broken[0] = torch.nan if first else 1.0
    with raises_everywhere(ValueError, "row 0 holds a NaN"):
        ShardedEmbeddingCost(broken, dist.group.WORLD)
    with raises_everywhere(ValueError, "a sharded cost needs", same=True):
        ShardedEmbeddingCost(broken)


def check_nothing_to_score() -> None:
    for sizes in blocks():
        for reduction in REDUCTIONS:
            given = problem(ignored=2.0)
            leaves = leaves_of(given, sizes)
            out = shared(leaves, given, cost=ShardedEmbeddingCost(own(given.embedding, sizes), dist.group.WORLD))
            assert out.loss == 0
            backward(out.loss)
            assert all(leaf.grad is not None and not leaf.grad.any() for leaf in leaves)
            assert_as_in_one_process(problem(), sizes, **reduction)  # still in step


def check_collectives() -> None:
    """One for the arguments, one a chunk, one for the rows of a sharded cost, one for the hidden states' gradient."""
    sizes, given = blocks()[0], problem(ignored=0.0)  # 37 tokens: 6 chunks of 7
    sharded = ShardedEmbeddingCost(own(given.embedding, sizes), dist.group.WORLD)
    names = {"gathers": ("all_gather_into_tensor", "all_gather_single"), "sums": ("all_reduce",)}
    for cost in (EmbeddingCost(given.embedding), sharded, None):
        rows = int(cost is sharded)
        with counted(**names) as calls:
            out = shared(leaves_of(given, sizes), given, cost=cost, objective=EMO() if cost else MLE())
        assert calls == {"gathers": 1 + 6, "sums": 1 + rows}
        with counted(**names) as calls:
            out.loss.backward(retain_graph=True)
        assert calls == {"gathers": 0, "sums": 0}  # made in the forward pass
        with counted(**names) as calls:
            out.loss.backward()
        assert calls == {"gathers": 6, "sums": 1}
        with counted(**names) as calls, torch.no_grad():
            shared(leaves_of(given, sizes), given, cost=cost, objective=EMO() if cost else MLE())
        assert calls == {"gathers": 1 + 6, "sums": rows}
        leaves = leaves_of(given, sizes)
        with counted(**names) as calls:
            shared([leaves[0].detach(), *leaves[1:]], given, cost=cost, objective=EMO() if cost else MLE())
        assert calls == {"gathers": 1 + 6, "sums": rows}


def check_autograd() -> None:
    sizes, given = blocks()[0], problem()
    for settings in REDUCTIONS:
        leaves = leaves_of(given, sizes)
        loss = shared(leaves, given, **settings).loss.sum()
        first = torch.autograd.grad(loss, leaves, retain_graph=True)
        again = torch.autograd.grad(3 * loss, leaves, retain_graph=True)
        for a, b in zip(first, again, strict=True):
            assert_close(b, 3 * a, 1e-12)
        with raises_everywhere(RuntimeError, "no second derivative", same=True):
            torch.autograd.grad(loss, leaves, create_graph=True)
    frozen = leaves_of(given, sizes)
    want = torch.autograd.grad(shared(frozen, given).loss, frozen[:1])[0]
    got = torch.autograd.grad(shared([frozen[0], *(leaf.detach() for leaf in frozen[1:])], given).loss, frozen[:1])[0]
    assert torch.equal(got, want)


def check_under_autocast_and_compiled() -> None:
    sizes, given = blocks()[0], problem(dtype=torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        parts, whole = leaves_of(given, sizes), given.leaves()
        out, one = shared(parts, given), scored(whole, given)
    out.loss.backward()
    one.loss.backward()
    assert_close(out.loss, one.loss, 1e-5)
    assert_close(parts[0].grad, whole[0].grad, 2e-2)
    parts = leaves_of(given, sizes)
    compiled = torch.compile(lambda leaves: shared(leaves, given).loss * 2, backend="eager")(parts)
    assert_close(compiled, 2 * shared(parts, given).loss, 1e-6)


def main() -> None:
    dist.init_process_group("gloo", timeout=timedelta(seconds=40))
    from tests.otloss_llm import dtensor_checks

    for name, check in [*globals().items(), *vars(dtensor_checks).items()]:
        if name.startswith("check_"):
            check()
            if dist.get_rank() == 0:
                print(name, flush=True)
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
