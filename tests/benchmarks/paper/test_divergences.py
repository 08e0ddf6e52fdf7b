"""Divergences of tiny models against sums over all their texts."""

import itertools
import math

import pytest
import torch
import transformers

from benchmarks.paper.evaluation.divergences import token_divergence

VOCAB, LENGTH = 4, 4


def _model(seed: int, vocab: int = VOCAB) -> transformers.PreTrainedModel:
    torch.manual_seed(seed)
    config = transformers.GPT2Config(
        vocab_size=vocab, n_positions=8, n_embd=8, n_layer=1, n_head=2, initializer_range=1.0, bos_token_id=0,
        eos_token_id=0,
    )  # fmt: skip
    return transformers.GPT2LMHeadModel(config).eval()


def _texts() -> torch.Tensor:
    return torch.tensor([(0, *rest) for rest in itertools.product(range(VOCAB), repeat=LENGTH)])


def _log_likelihood(model: transformers.PreTrainedModel, ids: torch.Tensor, temperature: float) -> torch.Tensor:
    with torch.no_grad():
        log_p = torch.log_softmax(model(ids).logits[:, :-1].double() / temperature, -1)
    return log_p.gather(-1, ids[:, 1:, None]).squeeze(-1).sum(-1)


@pytest.mark.parametrize(("p_temperature", "q_temperature"), [(1.0, 1.0), (0.7, 1.3)])
def test_on_samples_it_is_the_divergence_of_whole_texts(p_temperature: float, q_temperature: float) -> None:
    p, q, ids = _model(0), _model(1), _texts()
    log_p, log_q = _log_likelihood(p, ids, p_temperature), _log_likelihood(q, ids, q_temperature)
    exact = float((log_p.exp() * (log_p - log_q)).sum()) / LENGTH
    generator = torch.Generator().manual_seed(0)
    drawn = ids[torch.multinomial(log_p.exp(), 4000, replacement=True, generator=generator)].tolist()
    (actual,) = token_divergence(
        p, q, drawn, p_temperature=p_temperature, q_temperatures=[q_temperature], batch_size=500
    )
    assert exact > 0.1
    assert abs(actual.kl - exact) < 4 * actual.standard_error < 0.05 * exact
    entropy = -float((log_p.exp() * log_p).sum()) / LENGTH
    assert actual.entropy == pytest.approx(entropy, rel=0.05)
    assert actual.cross_entropy == pytest.approx(actual.kl + actual.entropy)
    assert (actual.tokens, actual.sequences) == (4000 * LENGTH, 4000)


def test_lengths_batches_and_prefixes_do_not_matter() -> None:
    p, q = _model(0), _model(1)
    sequences = [[0, 1, 2, 3], [0, 3], [0, 2, 2], [0, 1, 1, 1, 1]]
    actual = token_divergence(p, q, sequences, q_temperatures=[0.8, 1.0], batch_size=2)
    assert actual[1] == token_divergence(p, q, sequences, q_temperatures=[1.0], batch_size=2)[0]
    alone = [token_divergence(p, q, [ids], q_temperatures=[0.8])[0] for ids in sequences]
    total = sum(one.kl * one.tokens for one in alone)
    assert actual[0].kl == pytest.approx(total / sum(one.tokens for one in alone), rel=1e-5)
    assert math.isnan(alone[0].standard_error)
    off = [(one.kl - actual[0].kl) * one.tokens / sum(one.tokens for one in alone) for one in alone]
    assert actual[0].standard_error == pytest.approx((4 / 3 * sum(x * x for x in off)) ** 0.5, rel=1e-5)
    whole, first = (token_divergence(p, q, [[0, 1, 2, 3][:n]])[0] for n in (4, 2))
    rest = token_divergence(p, q, [[0, 1, 2, 3]], prefix_length=2)[0]
    assert rest.kl * 2 == pytest.approx(whole.kl * 3 - first.kl, rel=1e-4)
