"""Divergences between two causal language models with one vocabulary, token by token and without an estimate of ratios.

For texts x sampled from P, with the conditional distributions p_t = P(. | x_<t) and q_t = Q(. | x_<t),

    KL(P || Q) per token = E_x[sum_t KL(p_t || q_t)] / E_x[number of tokens]

is exact up to the sampling of x (the chain rule of the relative entropy): each term is a sum over the vocabulary, which
has far less variance than log P(x) - log Q(x). With a known source S and a student Q there are two of them:

    forward, recall        KL(S || Q) on texts of the source: what of the source the student misses
    reverse, precision     KL(Q || S) on texts of the student: what the student writes that the source does not
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from benchmarks.paper.evaluation.likelihood import padded
from otloss_llm.evaluation.perplexity import check_fit, check_temperature
from otloss_llm.models.heads import evaluation_mode

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True)
class TokenDivergence:
    """KL(P || Q) in nats per token, with what it is the difference of.

    Attributes:
        kl: mean over tokens of KL(p_t || q_t), at least 0.
        standard_error: of `kl`, from its spread over sequences.
        cross_entropy: mean of -sum_i p_t(i) log q_t(i), which is `kl + entropy`.
        entropy: mean of the entropy of p_t.
        tokens, sequences: how many were scored.
    """

    kl: float
    standard_error: float
    cross_entropy: float
    entropy: float
    tokens: int
    sequences: int


def token_divergence(
    p: PreTrainedModel,
    q: PreTrainedModel,
    sequences: Sequence[Sequence[int]],
    *,
    p_temperature: float = 1.0,
    q_temperatures: Sequence[float] = (1.0,),
    prefix_length: int = 1,
    batch_size: int = 32,
) -> list[TokenDivergence]:
    """Return KL(P || Q) per token on sequences that were sampled from P, one result for each temperature of Q.

    Args:
        p, q: models with the same vocabulary; logits are divided by the temperature. Left in the mode they were in.
        sequences: token ids, each at least one longer than `prefix_length`.
        p_temperature: at which the sequences were sampled.
        q_temperatures: above 0; one pass of the models serves all.
        prefix_length: first tokens of each sequence that are context only.

    Raises:
        ValueError: no sequence, one without a token to score or longer than a context, vocabularies of two sizes, or a
            temperature that is not positive.
    """
    for temperature in (p_temperature, *q_temperatures):
        check_temperature(temperature)
    _check_sequences(p, q, sequences, prefix_length)
    order = sorted(range(len(sequences)), key=lambda i: len(sequences[i]))
    counts = torch.tensor([len(ids) - prefix_length for ids in sequences], dtype=torch.float64)
    entropy = torch.zeros(len(sequences), dtype=torch.float64)
    crossed = torch.zeros(len(q_temperatures), len(sequences), dtype=torch.float64)
    with evaluation_mode(p), evaluation_mode(q):
        for start in range(0, len(order), batch_size):
            rows = order[start : start + batch_size]
            ids, mask = padded([sequences[i] for i in rows])
            log_p = torch.log_softmax(_logits(p, ids, mask) / p_temperature, -1)
            logits = _logits(q, ids, mask).to(log_p.device)
            scored = mask[:, 1:].to(log_p.device, copy=True)
            scored[:, : prefix_length - 1] = 0
            shares = log_p.exp()
            entropy[rows] = -(torch.where(shares > 0, shares * log_p, 0.0).sum(-1) * scored).sum(-1).double().cpu()
            for k, temperature in enumerate(q_temperatures):
                log_q = torch.log_softmax(logits / temperature, -1)
                # One sum keeps the digits of a small divergence.
                kl = torch.where(shares > 0, shares * (log_p - log_q), 0.0).sum(-1)
                crossed[k, rows] = (kl * scored).sum(-1).double().cpu()
    return [_summary(kl, entropy, counts) for kl in crossed]


def _logits(model: PreTrainedModel, ids: Tensor, mask: Tensor) -> Tensor:
    device = next(model.parameters()).device
    return model(input_ids=ids.to(device), attention_mask=mask.to(device)).logits[:, :-1].float()


def _summary(kl: Tensor, entropy: Tensor, counts: Tensor) -> TokenDivergence:
    n, tokens = len(kl), counts.sum()
    mean, mean_entropy = kl.sum() / tokens, entropy.sum() / tokens
    spread = (kl - mean * counts).square().sum().sqrt() / tokens  # the standard error of a ratio of means
    error = float(spread) * math.sqrt(n / (n - 1)) if n > 1 else math.nan
    return TokenDivergence(
        float(mean), error, float(mean + mean_entropy), float(mean_entropy), int(tokens), n
    )  # fmt: skip


def _check_sequences(
    p: PreTrainedModel, q: PreTrainedModel, sequences: Sequence[Sequence[int]], prefix_length: int
) -> None:
    if not len(sequences):
        raise ValueError("sequences is empty, expected at least one sequence of token ids.")
    lengths = [len(ids) for ids in sequences]
    if prefix_length < 1 or min(lengths) <= prefix_length:
        raise ValueError(
            f"the shortest sequence has {min(lengths)} tokens and prefix_length is {prefix_length}, expected a prefix "
            "of at least 1 and a token after it."
        )
    sizes = [model.get_output_embeddings().weight.shape[0] for model in (p, q)]
    if sizes[0] != sizes[1]:
        raise ValueError(
            f"the models have vocabularies of {sizes[0]} and {sizes[1]} tokens, expected one tokenizer; give a student "
            "that was built for the tokenizer of the source."
        )
    for model in (p, q):
        check_fit(model, max(lengths), min(map(min, sequences)), max(map(max, sequences)))
