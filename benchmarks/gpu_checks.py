"""Right before fast: the Triton sweeps against float64, and loss and gradients against dense float32, where they run.

Tests do the same through Triton's interpreter on a CPU; a race or a wrong offset would show in compiled kernels only.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from benchmarks.measure import say
from otloss_llm import EMO, MLE, EmbeddingCost, linear_token_loss
from otloss_llm.kernels import rows, rows_triton
from otloss_llm.kernels.chunked import Tokens
from otloss_llm.objectives import Objective

EPS = torch.finfo(torch.float32).eps
ROWS = 33


def check_sweeps(vocab: int, device: str) -> None:
    """Values and gradient of `ROWS` rows of this vocabulary, in each dtype, as float64 has them."""
    unit = EPS * (16 if device == "cuda" else 1)  # exp of a GPU is that of 2^x after a rounded product
    generator = torch.Generator().manual_seed(1)
    for dtype in rows_triton.DTYPES:
        z = (3 * torch.randn(ROWS, vocab, generator=generator)).to(dtype)
        label, which = (torch.randint(n, (ROWS,), generator=generator) for n in (vocab, 4))
        costs = torch.rand(4, vocab, generator=generator)
        slopes = torch.rand(3, ROWS, generator=generator)
        given = [tensor.to(device) for tensor in (z, label, which, costs, slopes)]
        fast = _swept(given, torch.float32)
        slow = _swept([given[0].double(), *given[1:3], given[3].double(), given[4].double()], torch.float64)
        errors = [relative(a, b) for a, b in zip(fast, slow, strict=True)]
        judge(f"Triton sweeps, {dtype}", errors, [32 * unit, 32 * unit, 64 * unit + torch.finfo(dtype).eps])


def _swept(given: Sequence[Tensor], dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """nll, D and gradient: by torch where the arithmetic is float64, else by Triton."""
    z, label, which, costs, (alpha, beta, factor) = given
    kernel = rows if dtype == torch.float64 else rows_triton
    z, cost = z.clone(), rows.CostRows(costs, which)
    tokens = Tokens.of(kernel.softmax_rows(z, label, cost))
    kernel.gradient_rows(z, tokens.sums.top, label, cost, tokens.slopes(alpha, beta, factor))
    assert tokens.transport is not None
    return tokens.nll, tokens.transport, z


def check_losses(hidden: Tensor, weight: Tensor, labels: Tensor) -> None:
    """Loss and gradients of bfloat16 inputs: at most 1.5 times the error of the dense computation, + eps."""
    for name, objective in (("MLE", MLE()), ("EMO", EMO())):
        true = _scored(hidden.float(), weight.float(), labels, objective, "reference")
        naive = _scored(hidden, weight, labels, objective, "reference")
        fused = _scored(hidden, weight, labels, objective, "triton")
        eps = torch.finfo(hidden.dtype).eps
        limits = [1.5 * relative(a, b) + eps for a, b in zip(naive, true, strict=True)]
        judge(f"{name}: loss, dh, dW", [relative(a, b) for a, b in zip(fused, true, strict=True)], limits)


def _scored(hidden: Tensor, weight: Tensor, labels: Tensor, objective: Objective, impl: str) -> list[Tensor]:
    leaves = [tensor.detach().clone().requires_grad_() for tensor in (hidden, weight)]
    loss = linear_token_loss(
        leaves[0], leaves[1], labels, objective=objective, cost=EmbeddingCost(weight), impl=impl
    ).loss
    return [loss.detach(), *torch.autograd.grad(loss, leaves)]


def relative(got: Tensor, true: Tensor) -> float:
    """Norm of the error over the norm of the truth."""
    return float((got.double() - true.double()).norm() / true.double().norm())


def judge(what: str, errors: Sequence[float], limits: Sequence[float]) -> None:
    """Say the errors; raise ArithmeticError where one is over its limit."""
    pairs = list(zip(errors, limits, strict=True))
    say(f"  {what}: relative errors {', '.join(f'{error:.1e} <= {limit:.1e}' for error, limit in pairs)}")
    if not all(error <= limit for error, limit in pairs):
        raise ArithmeticError(f"{what}: an error is over its limit; times of wrong results would say nothing.")
