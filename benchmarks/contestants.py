"""Who competes: token losses from hidden states and head, forward and backward, each on the same problem."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812 - the name everybody uses

from otloss_llm import EMO, MLE, EmbeddingCost, MixCE, TaiLr, linear_token_loss
from otloss_llm.objectives import Objective

DENSE, EMO_OURS, MLE_OURS, PUBLISHED = "dense cross-entropy", "otloss EMO", "otloss MLE", "EMOLoss 0.0.3"
EMO_DENSE = "otloss EMO, impl=reference"
TORCH, TORCH_AUTO = "F.linear_cross_entropy", "F.linear_cross_entropy auto"
OTHER_OBJECTIVES: dict[str, Objective] = {"otloss TaiLr": TaiLr(0.5), "otloss MixCE": MixCE(0.5)}
HAS_TORCH = hasattr(F, "linear_cross_entropy") and hasattr(torch.nn, "LinearCrossEntropyOptions")


@dataclass
class Problem:
    """Inputs that all contestants share; `labels` may be exchanged between rounds."""

    hidden: Tensor
    weight: Tensor
    labels: Tensor

    @classmethod
    def random(cls, tokens: int, vocab: int, width: int, labels: Tensor, *, sharpness: float = 1.0) -> Problem:
        """Logits are normal with standard deviation `sharpness`."""
        generator = torch.Generator().manual_seed(0)
        hidden = torch.randn(tokens, width, generator=generator).mul_(sharpness).requires_grad_()
        weight = torch.randn(vocab, width, generator=generator).mul_(width**-0.5).requires_grad_()
        return cls(hidden, weight, labels)

    @cached_property
    def cost(self) -> EmbeddingCost:
        """Made once per frozen head, so it counts for no single step."""
        return EmbeddingCost(self.weight)


Loss = Callable[[Problem], Tensor]


def torch_name(chunk: int) -> str:
    return f"{TORCH} c={chunk}"


def _dense(problem: Problem) -> Tensor:
    return F.cross_entropy(F.linear(problem.hidden, problem.weight), problem.labels)


def _ours(objective: Objective, *, impl: str = "auto") -> Loss:
    def loss(problem: Problem) -> Tensor:
        cost = problem.cost if isinstance(objective, EMO) else None
        return linear_token_loss(
            problem.hidden, problem.weight, problem.labels, objective=objective, cost=cost, impl=impl
        ).loss

    return loss


def _torch(chunk: int | None) -> Loss:
    options = torch.nn.LinearCrossEntropyOptions(batch_chunk_size=chunk)  # None: the automatic choice
    return lambda problem: F.linear_cross_entropy(problem.hidden, problem.weight, problem.labels, options=options)


def _published(problem: Problem) -> Tensor:
    from emo import EMOLoss

    # It shifts labels itself, so one more position stands at the end.
    hidden = torch.cat([problem.hidden, problem.hidden[-1:]])
    shifted = torch.cat([problem.labels[:1], problem.labels])
    return EMOLoss(F.linear(hidden, problem.weight)[None], shifted[None], problem.weight.detach())


def loss_named(name: str) -> Loss:
    """The loss behind a name in a table."""
    losses = {DENSE: _dense, EMO_OURS: _ours(EMO()), MLE_OURS: _ours(MLE()), PUBLISHED: _published,
              EMO_DENSE: _ours(EMO(), impl="reference")}  # fmt: skip
    losses |= {other: _ours(objective) for other, objective in OTHER_OBJECTIVES.items()}
    if name in losses:
        return losses[name]
    if name == TORCH_AUTO:
        return _torch(None)
    chunk = re.fullmatch(re.escape(TORCH) + r" c=(\d+)", name)
    if chunk is None:
        raise ValueError(f"no contestant is called {name!r}")
    return _torch(int(chunk[1]))


def steps(names: Sequence[str], problem: Problem) -> dict[str, Callable[[], None]]:
    """One forward and backward pass each."""

    def step(loss: Loss) -> Callable[[], None]:
        def run() -> None:
            problem.hidden.grad = problem.weight.grad = None
            loss(problem).backward()

        return run

    return {name: step(loss_named(name)) for name in names}


def has_published() -> bool:
    try:
        import emo  # noqa: F401
    except ImportError:
        print('EMOLoss is left out: pip install "otloss[bench]"')
        return False
    return True


class _FirstChunk(Exception):  # noqa: N818 - not an error
    """Leaves the kernel at its first chunk; holds the number of its rows."""


@lru_cache
def our_chunk(tokens: int, vocab: int) -> int:
    """Rows of our default chunk, the only one we compete with: as many as the objective first sees."""

    def stop(nll: Tensor, cost: Tensor | None) -> Tensor:
        raise _FirstChunk(len(nll))

    try:
        linear_token_loss(
            torch.zeros(tokens, 1), torch.zeros(vocab, 1), torch.zeros(tokens, dtype=torch.long), objective=stop
        )
    except _FirstChunk as chunk:
        return int(chunk.args[0])
    raise AssertionError("the kernel never asked for its objective")
