"""Forward and backward of the token losses against their peers, from hidden states and head.

Labels follow a Zipf law over the vocabulary, like words do; `u` is the share of distinct labels, on which the price of
the cost rows depends.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812 - the name everybody uses

from benchmarks.measure import interleaved, report
from otloss_llm import EMO, MLE, EmbeddingCost, linear_token_loss

CASES = ((2048, 32000, 768),)
SMALL = ((64, 500, 32),)
DENSE = "dense cross-entropy"


def zipf_labels(tokens: int, vocab: int, generator: torch.Generator) -> Tensor:
    """Token ids with probability proportional to 1 / rank."""
    weights = 1.0 / torch.arange(1, vocab + 1, dtype=torch.float64)
    return torch.multinomial(weights, tokens, replacement=True, generator=generator)


def contestants(tokens: int, vocab: int, width: int) -> tuple[dict[str, Callable[[], None]], float]:
    """One forward and backward pass each, on the same inputs; and the share of distinct labels."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(tokens, width, generator=generator).requires_grad_()
    weight = (torch.randn(vocab, width, generator=generator) * width**-0.5).requires_grad_()
    labels = zipf_labels(tokens, vocab, generator)
    cost = EmbeddingCost(weight)

    def step(loss: Callable[[], Tensor]) -> Callable[[], None]:
        def run() -> None:
            hidden.grad = weight.grad = None
            loss().backward()

        return run

    runs = {
        DENSE: step(lambda: F.cross_entropy(F.linear(hidden, weight), labels)),
        "otloss MLE (chunked)": step(lambda: linear_token_loss(hidden, weight, labels, objective=MLE()).loss),
        "otloss EMO (chunked)": step(
            lambda: linear_token_loss(hidden, weight, labels, objective=EMO(), cost=cost).loss
        ),
    }
    if hasattr(F, "linear_cross_entropy"):
        runs["F.linear_cross_entropy"] = step(lambda: F.linear_cross_entropy(hidden, weight, labels))
    try:
        from emo import EMOLoss
    except ImportError:
        print('EMOLoss is left out: pip install "otloss[bench]"')
    else:
        frozen = weight.detach().clone()
        # It shifts labels itself: one more position in front of the labels aligns them.
        shifted = torch.cat([labels[:1], labels])[None]

        def published() -> Tensor:
            logits = F.linear(hidden, weight)
            return EMOLoss(torch.cat([logits, logits[-1:]])[None], shifted, frozen)

        runs["EMOLoss 0.0.3"] = step(published)
    return runs, len(labels.unique()) / tokens


def main(*, rounds: int, small: bool) -> None:
    for tokens, vocab, width in SMALL if small else CASES:
        runs, share = contestants(tokens, vocab, width)
        medians = interleaved(runs, rounds=rounds)
        case = f"N={tokens} V={vocab} d={width} float32 u={share:.2f} Zipf labels"
        report("token_loss", case, medians, peer=DENSE, rounds=rounds, keep=not small)
