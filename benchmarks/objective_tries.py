"""Two variants of EMO that are tried in the benchmark "objectives" and no part of the library.

emo_by_entropy    (1 - w / 2) nll + w / 2 sg(min(nll / D, 3)) D, w = sg(min(H / log 20, 1)): EMO where the student
                  is uncertain, likelihood where it is sure
emo_first_half    EMO for the first half of the steps, likelihood after it
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from otloss_llm.objectives import EMO
from otloss_llm.objectives.names import FORMULAS, Entry


@dataclass(frozen=True)
class EntropyEMO:
    """EMO weighted by the entropy, with the rest of the weight on likelihood."""

    def __call__(self, nll: Tensor, cost: Tensor, entropy: Tensor) -> Tensor:
        weight = (entropy.detach() / math.log(20)).clamp(0.0, 1.0)
        return (1 - weight) * nll + weight * EMO()(nll, cost)


@dataclass
class FirstHalfEMO:
    """EMO until `steps` optimizer steps were made since the objective was, then likelihood."""

    steps: int
    left: int = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self.left = self.steps
        register_optimizer_step_post_hook(self._count)

    def _count(self, optimizer: Optimizer, *_: object) -> None:
        self.left -= 1

    def __call__(self, nll: Tensor, cost: Tensor) -> Tensor:
        return EMO()(nll, cost) if self.left > 0 else nll


TRIES = ("emo_by_entropy", "emo_first_half")


def add_tries(steps: int) -> None:
    """Make the names known, for trainings of so many steps."""
    FORMULAS["emo_by_entropy"] = Entry(EntropyEMO)
    FORMULAS["emo_first_half"] = Entry(lambda: FirstHalfEMO(steps // 2))
