"""The token losses that are compared: forward and backward pass from hidden states and head, all on one problem."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812 - the usual name

from otloss._checks import install_hint
from otloss_llm import EAFT, EMO, GEM, MLE, EmbeddingCost, MixCE, TaiLr, linear_token_loss
from otloss_llm.objectives import Objective, Sum

DENSE, EMO_OURS, MLE_OURS, PUBLISHED = "dense cross-entropy", "otloss EMO", "otloss MLE", "EMOLoss 0.0.3"
EMO_DENSE = "otloss EMO, impl=reference"
TORCH, TORCH_AUTO = "F.linear_cross_entropy", "F.linear_cross_entropy auto"
EMO_ENTROPY = "otloss EMO with entropy"


def _emo_with_entropy(nll: Tensor, cost: Tensor, entropy: Tensor) -> Tensor:
    return EMO()(nll, cost) - 0.01 * entropy


OTHER_OBJECTIVES: dict[str, Objective] = {
    EMO_ENTROPY: _emo_with_entropy, "otloss TaiLr": TaiLr(0.5), "otloss DFT": MixCE(0.0), "otloss EAFT": EAFT(),
    "otloss GEM": GEM(0.7),
}  # fmt: skip
HAS_TORCH = hasattr(F, "linear_cross_entropy") and hasattr(torch.nn, "LinearCrossEntropyOptions")


@dataclass
class Problem:
    """Inputs that all contestants share; `labels` may change between rounds."""

    hidden: Tensor
    weight: Tensor
    labels: Tensor

    @classmethod
    def random(
        cls, vocab: int, width: int, labels: Tensor, *, sharpness: float = 1.0, dtype: torch.dtype = torch.float32,
        device: str = "cpu",
    ) -> Problem:  # fmt: skip
        """One hidden state per label; logits are normal with standard deviation `sharpness`."""
        generator = torch.Generator(device).manual_seed(0)

        def normal(rows: int, scale: float) -> Tensor:
            made = torch.randn(rows, width, generator=generator, device=device).mul_(scale)
            return made.to(dtype).requires_grad_()

        return cls(normal(len(labels), sharpness), normal(vocab, width**-0.5), labels.to(device))

    @cached_property
    def cost(self) -> EmbeddingCost:
        """Made once per frozen head, as in training, so no step includes it."""
        return EmbeddingCost(self.weight)


Loss = Callable[[Problem], Tensor]


def dense(problem: Problem) -> Tensor:
    return F.cross_entropy(F.linear(problem.hidden, problem.weight), problem.labels)


def ours(objective: Objective, *, impl: str = "auto", chunk: int | None = None) -> Loss:
    def loss(problem: Problem) -> Tensor:
        cost = problem.cost if Sum.of(objective).needs_cost else None
        return linear_token_loss(
            problem.hidden, problem.weight, problem.labels, objective=objective, cost=cost, impl=impl, chunk_size=chunk
        ).loss

    return loss


def torch_fused(chunk: int | None) -> Loss:
    """`F.linear_cross_entropy` in chunks of that many tokens; None: its automatic choice. Without options it is dense.

    Raises:
        ImportError: this version of torch has no chunked `linear_cross_entropy`.
    """
    if not HAS_TORCH:
        raise ImportError(f"torch {torch.__version__} has no chunked linear_cross_entropy")
    options = torch.nn.LinearCrossEntropyOptions(**({} if chunk is None else {"batch_chunk_size": chunk}))
    return lambda problem: F.linear_cross_entropy(problem.hidden, problem.weight, problem.labels, options=options)


def published() -> Loss:
    from emo import EMOLoss

    def loss(problem: Problem) -> Tensor:  # it shifts labels itself, so one position is appended
        hidden = torch.cat([problem.hidden, problem.hidden[-1:]])
        shifted = torch.cat([problem.labels[:1], problem.labels])
        return EMOLoss(F.linear(hidden, problem.weight)[None], shifted[None], problem.weight.detach())

    return loss


def liger(sums: torch.dtype | None = None) -> Loss:
    """Liger's fused cross-entropy; it sums the gradient of the head in `sums`, by default the dtype of the head."""
    from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

    fused = LigerFusedLinearCrossEntropyLoss(accum_dtype=sums)
    return lambda problem: fused(problem.weight, problem.hidden, problem.labels)


def torch_name(chunk: int) -> str:
    return f"{TORCH} c={chunk}"


def loss_named(name: str) -> Loss:
    """The loss that a table shows under this name."""
    objectives: dict[str, Objective] = {MLE_OURS: MLE(), EMO_OURS: EMO(), **OTHER_OBJECTIVES}
    if name in objectives:
        return ours(objectives[name])
    if name in (DENSE, PUBLISHED, EMO_DENSE):
        return {DENSE: lambda: dense, PUBLISHED: published, EMO_DENSE: lambda: ours(EMO(), impl="reference")}[name]()
    chunk = re.fullmatch(re.escape(TORCH) + r" c=(\d+)", name)
    if chunk is None and name != TORCH_AUTO:
        raise ValueError(f"no contestant is called {name!r}")
    return torch_fused(None if chunk is None else int(chunk[1]))


def step(loss: Loss, problem: Problem) -> Callable[[], None]:
    """One forward and backward pass."""

    def run() -> None:
        problem.hidden.grad = problem.weight.grad = None
        loss(problem).backward()

    return run


def steps(names: Sequence[str], problem: Problem) -> dict[str, Callable[[], None]]:
    return {name: step(loss_named(name), problem) for name in names}


def with_published(names: Sequence[str]) -> list[str]:
    """The names, and EMOLoss if it is installed."""
    try:
        import emo  # noqa: F401
    except ImportError:
        print(f"EMOLoss is not measured: {install_hint('bench')}")
        return list(names)
    return [*names, PUBLISHED]


@lru_cache
def our_chunk(tokens: int, vocab: int) -> int:
    """Rows of our default chunk: the number of tokens that the objective is first called with."""
    lengths: list[int] = []

    def record(nll: Tensor, cost: Tensor | None) -> Tensor:
        lengths.append(len(nll))
        return nll

    labels = torch.zeros(tokens, dtype=torch.long)
    linear_token_loss(torch.zeros(tokens, 1), torch.zeros(vocab, 1), labels, objective=record)
    return lengths[0]
