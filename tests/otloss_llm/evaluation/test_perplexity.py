"""Perplexity and transport cost of rows of token ids."""

import pytest
import torch
import transformers

from otloss_llm.costs.embedding import EmbeddingCost
from otloss_llm.evaluation import perplexity
from tests.otloss.oracles import cosine_matrix
from tests.otloss_llm import tiny_models as models
from tests.otloss_llm.oracles import in_float64, log_probabilities

VOCABULARY = 270


def tiny_model(family: str, **settings):
    """A model whose distribution is far from uniform."""
    length = {"n_positions": 64} if family == "gpt2" else {"max_position_embeddings": 64}
    return models.tiny_model(family, vocab_size=VOCABULARY, **length, **settings)


@pytest.fixture(scope="module", params=["gpt2", "llama"])
def model(request):
    return tiny_model(request.param).eval()


@pytest.fixture
def doubled(model):
    return in_float64(model)


def test_an_encoder_has_no_perplexity():
    """It sees the tokens that it has to predict."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    encoder = transformers.RobertaForCausalLM(transformers.RobertaConfig(vocab_size=50, **sizes))
    with pytest.raises(ValueError, match=r"RobertaForCausalLM\) sees the tokens to its right, so it has no perplexity"):
        perplexity(encoder, torch.arange(3, 43).view(2, 20))


@pytest.mark.parametrize("changes", [{"trainable_token_indices": [5, 17]}, {"target_modules": ["embed_tokens"]}])
def test_adapters_on_the_input_embedding(changes):
    """PEFT's layers around the embedding do not tell how many tokens it has."""
    peft = pytest.importorskip("peft")
    settings = {"target_modules": ["q_proj"], "init_lora_weights": False, "task_type": "CAUSAL_LM"} | changes
    model = peft.get_peft_model(tiny_model("llama", tie_word_embeddings=False), peft.LoraConfig(r=2, **settings)).eval()
    ids = torch.arange(3, 43).view(2, 20)
    with torch.no_grad():
        expected = model(input_ids=ids, labels=ids).loss
    assert perplexity(model, ids).nll == pytest.approx(float(expected), rel=1e-5)
    with pytest.raises(ValueError, match=f"from 0 to {VOCABULARY}, outside the model's vocabulary of {VOCABULARY}"):
        perplexity(model, torch.tensor([[0, VOCABULARY]]))


def test_virtual_tokens_are_named():
    peft = pytest.importorskip("peft")
    config = peft.PromptTuningConfig(num_virtual_tokens=3, task_type="CAUSAL_LM")
    with pytest.raises(ValueError, match="PEFT's PromptTuning, which puts virtual tokens before the text"):
        perplexity(peft.get_peft_model(tiny_model("llama"), config), torch.arange(3, 43).view(2, 20))


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_perplexity_weighs_tokens_and_ignores_the_batching(model, doubled, temperature):
    generator = torch.Generator().manual_seed(2)
    rows = torch.randint(VOCABULARY, (10, 11), generator=generator)  # the last batch of 4 is smaller
    embedding = torch.randn(VOCABULARY, 5, generator=generator)
    scores = perplexity(model, rows, batch_size=4, cost=EmbeddingCost(embedding), temperature=temperature)
    nll, transport, cost = [], [], cosine_matrix(embedding)
    for ids in rows.tolist():
        target = torch.tensor(ids[1:])
        log_q = torch.log_softmax(log_probabilities(doubled, ids) / temperature, dim=1)
        nll.append(-log_q.gather(1, target[:, None]))
        transport.append((log_q.exp() * cost[target]).sum(1))
    assert scores.nll == pytest.approx(float(torch.cat(nll).mean()), rel=2e-6)
    assert scores.transport_cost == pytest.approx(float(torch.cat(transport).mean()), rel=2e-6)
    assert scores.tokens == 100


def test_modes_are_restored():
    model = tiny_model("gpt2", resid_pdrop=0.5).train()
    model.transformer.h[0].eval()
    before = [module.training for module in model.modules()]
    ids = torch.arange(20).view(2, 10)
    assert perplexity(model, ids) == perplexity(model, ids)  # without dropout
    model.lm_head.register_forward_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        perplexity(model, ids)
    assert [module.training for module in model.modules()] == before
    assert torch.is_grad_enabled()


def test_rows_and_temperatures_that_cannot_be_scored_raise():
    gpt2 = tiny_model("gpt2")
    for message, ids, temperature in (
        (r"temperature is 0\.0, expected", torch.zeros(1, 4).int(), 0.0),
        ("65 tokens, more than the model's context of 64", torch.zeros(1, 65).int(), 1.0),
        (r"shape \(4,\) and dtype torch.int64, expected integer ids", torch.arange(4), 1.0),
        ("outside the model's vocabulary of 270", torch.full((1, 4), 270), 1.0),
    ):
        with pytest.raises(ValueError, match=message):
            perplexity(gpt2, ids, temperature=temperature)
    for ids in ([[1, 2, 3]], "one two", torch.zeros(1, 4).int().numpy()):
        with pytest.raises(TypeError, match=r"expected a tensor .* of token ids"):
            perplexity(gpt2, ids)


def test_blocks_of_texts_that_an_end_joins_are_scored():
    """Some texts are empty, as lines of WikiText are, and a block may end or begin between two of them."""
    model = tiny_model("llama", pad_token_id=2, eos_token_id=2)
    blocks = torch.arange(6, 30).view(3, 8)
    blocks[0, 3:5], blocks[1, -2:], blocks[2, :2] = 2, 2, 2
    assert perplexity(model, blocks).tokens == 21
    blocks[2, :3] = 2  # longer than any run within
    with pytest.raises(ValueError, match=r"row 2 of ids begins or ends in token 2 as in padding"):
        perplexity(model, blocks)


@pytest.mark.parametrize(("pad", "end", "length"), [(5, 2, 1), (2, 2, 2), (None, [2, 3], 2)])
def test_padded_rows_raise(pad: int | None, end: int | list[int], length: int) -> None:
    model = tiny_model("llama", pad_token_id=pad, eos_token_id=end)
    ids = torch.arange(6, 22).view(2, 8)
    token = 2 if pad is None else pad
    for place in (slice(8 - length, None), slice(length)):
        padded = ids.clone()
        padded[1, place] = token
        with pytest.raises(ValueError, match=rf"row 1 of ids begins or ends in token {token} as in padding"):
            perplexity(model, padded)
        perplexity(model, padded[1:])
    ids[:, -1] = 2  # the end of a text
    perplexity(model, ids)
