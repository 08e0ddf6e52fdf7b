"""Slow, independent answers for token losses: float64 autograd of the formulas, and small random problems."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from otloss_llm import EMO, MLE, MixCE, NumberToken, TaiLr
from otloss_llm.objectives import Objective
from tests.otloss.oracles import cosine_matrix

Formula = Callable[[Tensor, Tensor, Tensor], Tensor]


def curved(nll: Tensor, cost: Tensor | None) -> Tensor:
    """A user's objective: linear neither in nll nor in the cost, with derivatives that depend on both."""
    assert cost is not None
    return nll.square() * 0.3 + (1 + cost).log() + nll * cost


def ratio(numerator: Tensor, denominator: Tensor) -> Tensor:
    """Detached, and 0 where both round to 0: at certain labels."""
    return torch.where(denominator == 0, 0.0, numerator / denominator).detach()


# name -> (objective, the formula from (q_y, nll, D) written out once more)
OBJECTIVES: dict[str, tuple[Objective, Formula]] = {
    "mle": (MLE(), lambda q, nll, d: nll),
    "tailr": (TaiLr(0.7), lambda q, nll, d: (q / (0.7 + 0.3 * q)).detach() * nll),
    "tailr-clamped": (TaiLr(1.0, min_weight=0.2), lambda q, nll, d: q.detach().clamp(0.2, 1) * nll),
    "mixce": (MixCE(0.3), lambda q, nll, d: (0.3 + 0.7 * q.detach()) * nll),
    "emo": (EMO(ratio_clip=None), lambda q, nll, d: 0.5 * (nll + ratio(nll, d) * d)),
    "emo-clipped": (EMO(), lambda q, nll, d: 0.5 * (nll + ratio(nll, d).clamp(max=3) * d)),
    "emo-transport": (EMO("transport"), lambda q, nll, d: ratio(d, nll) * nll + d),
    "number-token": (NumberToken(0.4), lambda q, nll, d: nll + 0.4 * d),
    "emo-fixed": (EMO(0.7), lambda q, nll, d: nll + 0.7 * d),
    "user": (curved, lambda q, nll, d: 0.3 * nll**2 + torch.log(1 + d) + nll * d),
}


@dataclass
class Problem:
    """A head, hidden states and labels; `labels` may hold ignored positions."""

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None
    labels: Tensor
    embedding: Tensor
    scale: float = 1.0
    softcap: float | None = None

    def leaves(self) -> list[Tensor]:
        """Fresh leaves (hidden, weight, and bias if there is one) that require a gradient."""
        tensors = [self.hidden, self.weight] + ([] if self.bias is None else [self.bias])
        return [tensor.detach().clone().requires_grad_() for tensor in tensors]

    def to(self, where: torch.dtype | str) -> "Problem":
        """On another device, or in another dtype, which labels do not follow."""
        names = ["hidden", "weight", "embedding"] + ([] if self.bias is None else ["bias"])
        names += ["labels"] if isinstance(where, str) else []
        return replace(self, **{name: getattr(self, name).to(where) for name in names})


def problem(
    seed: int = 0,
    *,
    batch: tuple[int, ...] = (37,),
    vocab: int = 41,
    width: int = 16,
    sharpness: float = 1.0,
    bias: bool = True,
    ignored: float = 0.2,
    dtype: torch.dtype = torch.float64,
) -> Problem:
    """A random problem with repeated labels; a share `ignored` of its positions carries -100."""
    generator = torch.Generator().manual_seed(seed)
    labels = (torch.rand(batch, generator=generator).square() * vocab).long()
    labels = labels.masked_fill(torch.rand(batch, generator=generator) < ignored, -100)
    return Problem(
        hidden=torch.randn(*batch, width, generator=generator, dtype=torch.float64) * sharpness,
        weight=torch.randn(vocab, width, generator=generator, dtype=torch.float64),
        bias=torch.randn(vocab, generator=generator, dtype=torch.float64) if bias else None,
        labels=labels,
        embedding=torch.randn(vocab, width, generator=generator, dtype=torch.float64),
    ).to(dtype)


def dense_values(leaves: list[Tensor], given: Problem, formula: Formula) -> tuple[Tensor, Tensor, Tensor]:
    """(value, nll, D) of every labelled position, from full logits, in the dtype of the leaves or float32."""
    hidden, weight, *rest = leaves
    kept = given.labels != -100
    logits = torch.nn.functional.linear(hidden[kept], weight, rest[0] if rest else None)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32)) * given.scale
    if given.softcap is not None:
        logits = given.softcap * torch.tanh(logits / given.softcap)
    log_q = torch.log_softmax(logits, -1)
    nll = -log_q[torch.arange(len(log_q)), given.labels[kept].long()]
    rows = cosine_matrix(given.embedding)[given.labels[kept].long()].to(logits.dtype)
    transport = (log_q.exp() * rows).sum(-1)
    return formula((-nll).exp(), nll, transport), nll, transport


def truth(given: Problem, formula: Formula, upstream: Tensor | float = 1.0) -> tuple[Tensor, list[Tensor]]:
    """Per-token float64 values, and the gradients of `sum_t upstream_t value_t`, on the inputs as they are rounded."""
    leaves = given.to(torch.float64).leaves()
    value, _, _ = dense_values(leaves, given.to(torch.float64), formula)
    return value.detach(), list(torch.autograd.grad((value * upstream).sum(), leaves))


def relative_error(got: Tensor, true: Tensor) -> float:
    """Norm of the error over the norm of the truth."""
    true = true.double()
    return float((got.detach().double() - true).norm() / true.norm().clamp_min(1e-30))


def everything(
    nll: Tensor, cost: Tensor, entropy: Tensor, logsumexp: Tensor, mean_logit: Tensor, tempered_logsumexp: Tensor
) -> Tensor:
    """A user's objective of all statistics, linear in none of them."""
    mixed = nll * entropy + cost * logsumexp + 0.1 * mean_logit * entropy
    mixed = mixed + 0.3 * nll.square() + (1 + cost).log() + 0.2 * entropy.exp() - 0.05 * logsumexp.square()
    return mixed + 0.2 * tempered_logsumexp * nll


everything.temperature = 0.7  # type: ignore[attr-defined]


def dense_statistics(z: Tensor, label: Tensor, rows: Tensor) -> dict[str, Tensor]:
    """All statistics of logits `z` in their dtype, written out once more; `rows` are the costs of the labels."""
    log_q = z - (z - z.amax(-1, keepdim=True)).exp().sum(-1, keepdim=True).log() - z.amax(-1, keepdim=True)
    q = log_q.exp()
    nll = -log_q.gather(-1, label[:, None])[:, 0]
    # 0 log 0 is 0, with a derivative of 0.
    entropy = -(q * torch.where(q > 0, log_q, 0.0)).sum(-1)
    top = z.detach().amax(-1)
    logsumexp = (z - top[:, None]).exp().sum(-1).log() + top
    tempered = 0.7 * ((z - top[:, None]) / 0.7).exp().sum(-1).log() + top
    return {"nll": nll, "cost": (q * rows).sum(-1), "entropy": entropy, "logsumexp": logsumexp,
            "tempered_logsumexp": tempered, "mean_logit": z.sum(-1) / z.shape[-1]}  # fmt: skip


def in_float64(model: Any) -> Any:
    """A copy of the model, for independent sums."""
    copy = type(model)(model.config).double().eval()
    copy.load_state_dict(model.state_dict())
    return copy


def log_probabilities(model: Any, ids: list[int]) -> Tensor:
    """log q of every next token given those before it, for one unpadded sequence in float64."""
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([ids])).logits[0, :-1].double()
    return torch.log_softmax(logits, dim=-1)
