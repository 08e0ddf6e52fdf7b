"""What test_vocab_parallel.py runs: every check, in order, in step, in as many processes as the argument says.

A head spread over processes against the same head in one, which every process also computes by itself. The checks of
DTensors are in dtensor_checks.py.
"""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[3]))

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from otloss.costs import DenseCost, LineCost
from otloss_llm import (
    EMO,
    GEM,
    MLE,
    EmbeddingCost,
    ExpectedValue,
    MixedCost,
    NumberCost,
    NumberToken,
    RatingCost,
    ShardedEmbeddingCost,
    TokenLoss,
    token_loss,
    token_statistics,
)
from otloss_llm.losses.token_loss import _shards
from tests.otloss_llm.forked import fork_ranks
from tests.otloss_llm.oracles import OBJECTIVES, Problem, everything, problem
from tests.otloss_llm.scoring import fused

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
    return fused(leaves, given, **{"objective": EMO()} | settings)


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
    given: Problem, sizes: tuple[int, ...], own_cost: ShardedEmbeddingCost | None = None, **settings: Any
) -> None:
    """Loss, nll, D and gradients; `own_cost` is the cost of the shared call, if another."""
    whole, parts = given.leaves(), leaves_of(given, sizes)
    one = scored(whole, given, **settings)
    backward(one.loss)
    out = shared(parts, given, **settings | ({} if own_cost is None else {"cost": own_cost}))
    backward(out.loss)
    tolerance = TOLERANCE[given.hidden.dtype]
    assert_close(out.loss, one.loss, tolerance)
    assert_close(out.nll, one.nll, tolerance)
    for got, want in ((out.entropy, one.entropy), (out.logsumexp, one.logsumexp)):
        assert (got is None) == (want is None)
        if want is not None:
            assert_close(got, want, tolerance)
            assert_same_everywhere(got)
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


# ---- the checks ---------------------------------------------------------------------------------------------------


def cases() -> Iterator[tuple[Problem, dict[str, Any]]]:
    """Every objective, statistic, reduction, kind of cost and form of a head at least once."""
    matrix = torch.rand(VOCAB, VOCAB, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    values = torch.tensor(([torch.nan, 0.0, 7.0, 3.5, torch.nan, -2.0, 7.0] * VOCAB)[:VOCAB], dtype=torch.float64)
    weights = torch.linspace(0, 2, 37, dtype=torch.float64)
    capped = replace(problem(1, bias=False, batch=(3, 13)), scale=0.7, softcap=4.0)
    sharp = problem(5, sharpness=20.0, dtype=torch.float32)  # some logits underflow
    mixed = MixedCost(NumberCost(values), EmbeddingCost(problem().embedding))
    for index, (objective, _) in enumerate(OBJECTIVES.values()):
        given = problem(dtype=(torch.float64, torch.float32)[index // 2 % 2])
        yield given, {"objective": objective, **REDUCTIONS[index % 4]}
    yield problem(dtype=torch.float32), {"objective": everything}
    yield problem(), {"objective": everything, "cost": NumberCost(values), "reduction": "none"}
    yield from ((problem(8), {"token_weight": weights, **settings}) for settings in REDUCTIONS)
    yield capped, {}
    yield sharp, {}
    yield sharp, {"objective": lambda nll, entropy: nll + entropy}
    yield problem(2), {"objective": MLE(), "cost": None, "chunk_size": None}
    yield problem(3, batch=(1,), ignored=0.0), {}
    yield problem(4, dtype=torch.bfloat16), {}
    yield problem(), {"cost": DenseCost(matrix)}
    yield problem(dtype=torch.float32), {"cost": LineCost(torch.arange(VOCAB).float())}
    yield problem(), {"cost": NumberCost(values, scaling="log"), "objective": NumberToken(0.4)}
    yield problem(), {"cost": mixed, "reduction": "none"}
    yield problem(), {"cost": RatingCost(values), "objective": ExpectedValue(0.4)}


def check_all_cases() -> None:
    """Two processes, which have a test that is not slow, check one pair of blocks in turn."""
    for index, (given, settings) in enumerate(cases()):
        for sizes in blocks()[index % 2 :: 2] if dist.get_world_size() == 2 else blocks():
            assert_as_in_one_process(given, sizes, **settings)


def check_log_probabilities() -> None:
    given, sizes, results = problem(8), blocks()[0], []
    for leaves, group in ((given.leaves(), None), (leaves_of(given, sizes), dist.group.WORLD)):
        made = token_statistics(*leaves[:2], given.labels, bias=leaves[2], process_group=group, temperature=0.7)
        backward(made.log_prob.sum() * 0.3 + made.entropy.square().sum())
        results.append([*made, leaves[0].grad])
    for got, want in zip(*reversed(results), strict=True):
        assert_close(got, want, 1e-12)
        assert_same_everywhere(got)


def check_sharded_costs() -> None:
    """The rows equal the rows of the whole embedding bit for bit."""
    for dtype in (torch.float64, torch.float32):
        given = problem(dtype=dtype)
        given.embedding[21:] = given.embedding[:20] * 3  # duplicate tokens of different processes
        given.embedding[12] = 0.0
        for sizes in blocks():
            sharded = ShardedEmbeddingCost(own(given.embedding, sizes), dist.group.WORLD)
            assert_as_in_one_process(given, sizes, sharded)
            outs = [
                shared(leaves_of(given, sizes), given, cost=cost) for cost in (sharded, EmbeddingCost(given.embedding))
            ]
            assert all(torch.equal(a, b) for a, b in zip(*outs, strict=True))  # type: ignore[arg-type]
            assert torch.equal(sharded.near_duplicates, EmbeddingCost(given.embedding).near_duplicates)
            assert sharded.near_duplicates.sum() == 38  # 20 pairs but for the zero row and its partner
            for directions in (None, 3):
                sharded = ShardedEmbeddingCost(own(given.embedding, sizes), dist.group.WORLD, directions=directions)
                whole = EmbeddingCost(given.embedding, directions=directions)
                # A centred row that is almost zero keeps few digits.
                torch.testing.assert_close(sharded.unit, own(whole.unit, sizes), atol=1e-4, rtol=1e-4)
                assert_same_everywhere(sharded.embedding_of(torch.arange(VOCAB)))
    with raises_everywhere(ValueError, "no whole rows", same=True):
        token_loss(torch.zeros(3, VOCAB), torch.tensor([1, 2, 3]), objective=EMO(), cost=sharded)


def check_masked_columns() -> None:
    """A process with masked columns only, for tokens whose labels are in another; and a row that is masked entirely."""
    for dtype in (torch.float64, torch.float32):
        for sizes in blocks():
            given = problem(6, dtype=dtype)
            start, stop = sum(sizes[:-1]), VOCAB
            assert given.bias is not None
            given.bias[start:stop] = -torch.inf
            inside = (given.labels >= start) & (given.labels < stop)
            given.labels[inside] = 0
            if start:
                for objective in (EMO(), GEM(0.7), lambda nll, entropy: nll + entropy):
                    assert_as_in_one_process(given, sizes, objective=objective)
                given.labels[5] = stop - 1
            with raises_everywhere(ValueError, "its logit is -inf"):
                shared(leaves_of(given, sizes), given)


def check_errors() -> None:
    """Each in every process: one that raised alone would leave the others waiting."""
    sizes, given, first = blocks()[0], problem(), dist.get_rank() == 0
    leaves = leaves_of(given, sizes)
    with raises_everywhere(ValueError, "process 0 of the group got invalid arguments"):
        shared([leaves[0], leaves[1][:, 1:] if first else leaves[1], leaves[2]], given)
    with raises_everywhere(ValueError, "made different calls"):
        shared(leaves, given, chunk_size=6 if first else 7)
    other = problem()
    other.labels[0] = dist.get_rank()
    with raises_everywhere(ValueError, "in data parallelism, where tokens differ, omit process_group"):
        shared(leaves, other)
    with raises_everywhere(ValueError, 'impl="reference"', same=True):
        shared(leaves, given, impl="reference")
    with raises_everywhere(ValueError, "expected the same: build the cost from the same blocks", same=True):
        shared(leaves, given, cost=ShardedEmbeddingCost(own(given.embedding, blocks()[1]), dist.group.WORLD))
    weights = torch.ones(given.labels.shape) + dist.get_rank()
    with raises_everywhere(ValueError, "made different calls"):
        shared(leaves, given, token_weight=weights)


def check_nothing_to_score() -> None:
    sizes, given = blocks()[1], problem(ignored=2.0)
    leaves = leaves_of(given, sizes)
    out = shared(leaves, given, cost=ShardedEmbeddingCost(own(given.embedding, sizes), dist.group.WORLD))
    assert out.loss == 0
    backward(out.loss)
    assert all(leaf.grad is not None and not leaf.grad.any() for leaf in leaves)
    assert_as_in_one_process(problem(), sizes)  # the processes still wait for the same collectives


def check_the_check_of_arguments() -> None:
    """ "first" compares arguments once for each number of rows."""
    sizes, given = blocks()[0], problem(ignored=0.0)
    _shards.clear()
    ShardedEmbeddingCost(own(given.embedding, sizes), dist.group.WORLD)  # compares other arguments
    leaves, want = leaves_of(given, sizes), scored(given.leaves(), given).loss
    for _ in range(2):
        assert_close(shared(leaves, given, check="first").loss, want, 1e-12)
    with raises_everywhere(ValueError, "check is 'never', expected one of", same=True):
        shared(leaves, given, check="never")


def check_autograd() -> None:
    sizes, given = blocks()[0], problem()
    for settings in (REDUCTIONS[0], REDUCTIONS[2]):
        leaves = leaves_of(given, sizes)
        loss = shared(leaves, given, **settings).loss.sum()
        first = torch.autograd.grad(loss, leaves, retain_graph=True)
        with raises_everywhere(RuntimeError, "no second derivative", same=True):
            torch.autograd.grad(loss, leaves, create_graph=True)
        frozen = [leaves[0], *(leaf.detach() for leaf in leaves[1:])]
        got = torch.autograd.grad(shared(frozen, given, **settings).loss.sum(), frozen[:1])[0]
        assert torch.equal(got, first[0])


def main() -> None:
    # Before the fork, so that the processes share what these import.
    import transformers.models.llama.modeling_llama  # noqa: F401

    from tests.otloss_llm import dtensor_checks

    fork_ranks(int(sys.argv[1]))
    dist.init_process_group("gloo", timeout=timedelta(seconds=40))
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
