"""Error of gradients in float32: relative Frobenius error of dh and dW against autograd in float64.

The float64 gradient is by the plain formulas below, without our kernels; EMOLoss is compared with itself in
float64. Half of the labels are the most probable tokens: D is small there and nll / D loses digits first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812 - the usual name

from benchmarks.contestants import (
    DENSE,
    EMO_DENSE,
    EMO_OURS,
    HAS_TORCH,
    MLE_OURS,
    PUBLISHED,
    TORCH_AUTO,
    Problem,
    loss_named,
    torch_name,
    with_published,
)
from benchmarks.measure import matmul_precision


@dataclass(frozen=True)
class GradientError:
    """Relative Frobenius errors of dh and dW."""

    hidden: float
    weight: float

    def over(self, other: GradientError) -> float:
        """The larger of the two ratios."""
        return max(self.hidden / other.hidden, self.weight / other.weight)


def _gradients(loss: Callable[[Problem], Tensor], problem: Problem) -> tuple[Tensor, Tensor]:
    hidden, weight = torch.autograd.grad(loss(problem), (problem.hidden, problem.weight))
    return hidden.double(), weight.double()


def _exact_emo(problem: Problem) -> Tensor:
    """Mean of `0.5 (nll + stop(min(nll / D, 3)) D)` with `D = sum over i != y of q_i (1 - cos(e_i, e_y))`."""
    log_q = F.log_softmax(problem.hidden @ problem.weight.T, -1)
    nll = F.nll_loss(log_q, problem.labels, reduction="none")
    unit = F.normalize(problem.weight.detach(), dim=1)
    cost = (1 - unit[problem.labels] @ unit.T).scatter(1, problem.labels[:, None], 0.0)
    transport = (log_q.exp() * cost).sum(1)
    return (0.5 * (nll + (nll / transport).detach().clamp(max=3) * transport)).mean()


def _exact(name: str) -> Callable[[Problem], Tensor]:
    if name in (EMO_OURS, EMO_DENSE):
        return _exact_emo
    return loss_named(PUBLISHED if name == PUBLISHED else DENSE)


def make_problem(vocab: int, width: int, labels: Tensor, *, sharpness: float) -> Problem:
    """Every other label becomes the model's most probable token."""
    problem = Problem.random(vocab, width, labels, sharpness=sharpness)
    with torch.no_grad():
        best = (problem.hidden @ problem.weight.T).argmax(1)
    return replace(problem, labels=torch.where(torch.arange(len(labels)) % 2 == 0, best, labels))


def gradient_errors(problem: Problem, names: Sequence[str], *, precision: str = "highest") -> dict[str, GradientError]:
    """Return the errors of each contestant in float32, with matrix products of the given precision."""
    hidden, weight = (tensor.detach().double().requires_grad_() for tensor in (problem.hidden, problem.weight))
    in_double = Problem(hidden, weight, problem.labels)
    exact_gradients: dict[Callable[[Problem], Tensor], tuple[Tensor, Tensor]] = {}
    errors = {}
    for name in names:
        exact = _exact(name)
        if exact not in exact_gradients:
            exact_gradients[exact] = _gradients(exact, in_double)
        with matmul_precision(precision):
            gradients = _gradients(loss_named(name), problem)
        errors[name] = GradientError(
            *(float((a - b).norm() / b.norm()) for a, b in zip(gradients, exact_gradients[exact], strict=True))
        )
    return errors


def contestants() -> list[str]:
    """All that have a gradient of their own."""
    return with_published([DENSE, *([torch_name(512), TORCH_AUTO] if HAS_TORCH else []), MLE_OURS, EMO_OURS, EMO_DENSE])
