"""Judged likelihood, sampling and the variety of samples."""

import itertools
import math
import random

import pytest
import torch
import transformers

from benchmarks.paper.evaluation.likelihood import score_texts, sequence_nll
from benchmarks.paper.evaluation.overlap import distinct_n, rouge
from benchmarks.paper.evaluation.sampling import sample_texts
from otloss_llm.data import train_bpe_tokenizer
from tests.otloss_llm import tiny_models as models
from tests.otloss_llm.oracles import in_float64, log_probabilities

TEXTS = ["the cat sat on the mat", "the dog sat on the log", "naïve café, 6² = 36; 日本"] * 3
VOCABULARY = 270


def tiny_model(family: str, **settings):
    """A model whose distribution is far from uniform, with the vocabulary of the tokenizer."""
    length = {"n_positions": 64} if family == "gpt2" else {"max_position_embeddings": 64}
    return models.tiny_model(family, vocab_size=VOCABULARY, **length, **settings)


@pytest.fixture(scope="module")
def tokenizer():
    return train_bpe_tokenizer(TEXTS, VOCABULARY)


@pytest.fixture(scope="module", params=["gpt2", "llama"])
def model(request):
    return tiny_model(request.param).eval()


@pytest.fixture(scope="module")
def gpt2():
    return tiny_model("gpt2").eval()


@pytest.fixture
def doubled(model):
    return in_float64(model)


# sequence_nll and score_texts


def test_padding_changes_nothing(model, doubled):
    generator = torch.Generator().manual_seed(3)
    lengths, prefixes = [2, 30, 7, 64, 1, 12, 12], [1, 10, 6, 1, 1, 12, 3]
    sequences = [torch.randint(VOCABULARY, (n,), generator=generator).tolist() for n in lengths]
    scores = sequence_nll(model, sequences, prefix_lengths=prefixes, batch_size=3)
    assert scores.tokens.tolist() == [1, 20, 1, 63, 0, 0, 9]
    for i, (ids, prefix) in enumerate(zip(sequences, prefixes, strict=True)):
        expected = 0.0
        if len(ids) > prefix:
            picked = -log_probabilities(doubled, ids).gather(1, torch.tensor(ids[1:])[:, None])
            expected = float(picked[prefix - 1 :].sum())
        assert float(scores.nll[i]) == pytest.approx(expected, rel=2e-6)
    assert scores.mean_nll == pytest.approx(float(scores.nll.sum()) / 94)
    assert scores.perplexity == pytest.approx(math.exp(scores.mean_nll))


def test_texts_are_scored_by_the_judges_own_tokens(gpt2, tokenizer):
    prompts, texts = ["the cat", "", "naïve"], [" sat on", "日本", ""]
    scores = score_texts(gpt2, tokenizer, texts, prompts=prompts, batch_size=2)
    nll, tokens = 0.0, 0
    for prompt, text in zip(prompts, texts, strict=True):
        context, ids = [0, *tokenizer(prompt)["input_ids"]], tokenizer(prompt + text)["input_ids"]
        new = [*context[:1], *ids]
        assert new[: len(context)] == context  # here no token straddles the border
        if text:
            nll -= float(
                log_probabilities(gpt2, new).gather(1, torch.tensor(new[1:])[:, None])[len(context) - 1 :].sum()
            )
            tokens += len(new) - len(context)
    assert (scores.tokens, scores.characters, scores.bytes) == (tokens, 9, 13)
    assert scores.nll == pytest.approx(nll, rel=1e-5)
    assert scores.nats_per_token == pytest.approx(nll / tokens, rel=1e-5)
    assert scores.bits_per_byte == pytest.approx(nll / math.log(2) / 13, rel=1e-5)
    assert scores.perplexity == pytest.approx(math.exp(nll / tokens), rel=1e-4)


# sampling


def test_sampling_is_reproducible_and_leaves_the_state(model, tokenizer):
    settings = {"num_samples": 6, "max_new_tokens": 8, "batch_size": 4, "progress": False}
    state = torch.get_rng_state()
    first = sample_texts(model, tokenizer, seed=1, **settings)
    assert torch.equal(torch.get_rng_state(), state)
    torch.rand(3)
    assert sample_texts(model, tokenizer, seed=1, **settings) == first
    assert sample_texts(model, tokenizer, seed=2, **settings) != first
    assert len({sample.token_ids for sample in first}) > 3


def test_ancestral_sampling_draws_from_the_distribution(gpt2, tokenizer):
    samples = sample_texts(gpt2, tokenizer, prompts=["the"], num_samples=4000, max_new_tokens=1, batch_size=1000)
    ids = torch.tensor([sample.token_ids[0] for sample in samples])
    with torch.no_grad():
        q = gpt2(input_ids=torch.tensor([tokenizer("the")["input_ids"]])).logits[0, -1].double().softmax(-1)
    seen = torch.bincount(ids, minlength=VOCABULARY).double()
    often = q * 4000 > 5
    assert int((seen > 0).sum()) > 50  # top-k 50, the default of transformers, is off
    chi2 = float(((seen - 4000 * q)[often] ** 2 / (4000 * q)[often]).sum())
    assert chi2 < int(often.sum()) + 5 * math.sqrt(2 * int(often.sum()))


def test_the_models_own_sampling_defaults_are_not_used(tokenizer, capfd):
    model = tiny_model("gpt2")
    settings = {"prompts": ["the", "the cat sat"], "num_samples": 3, "max_new_tokens": 8}
    plain, greedy = (
        sample_texts(model, tokenizer, **settings),
        sample_texts(model, tokenizer, temperature=0, **settings),
    )
    model.generation_config = transformers.GenerationConfig(
        do_sample=True, temperature=0.01, top_k=2, top_p=0.2, repetition_penalty=9.0, min_new_tokens=8, typical_p=0.3,
        no_repeat_ngram_size=1, num_beams=3, suppress_tokens=[1, 2, 3], max_length=4,
    )  # fmt: skip
    own = model.generation_config
    assert sample_texts(model, tokenizer, **settings) == plain
    assert sample_texts(model, tokenizer, temperature=0, **settings) == greedy
    assert model.generation_config is own
    assert capfd.readouterr().err == ""


def test_greedy_padded_batch_equals_one_by_one(model, tokenizer):
    prompts = ["the", "the cat sat on the", "", "naïve café, 6²", "log"]
    together = sample_texts(model, tokenizer, prompts=prompts, max_new_tokens=10, temperature=0, batch_size=5)
    for prompt, sample in zip(prompts, together, strict=True):
        assert sample_texts(model, tokenizer, prompts=[prompt], max_new_tokens=10, temperature=0) == [sample]
        ids = list(sample.prompt_ids)
        for expected in sample.token_ids:  # and equals plain argmax decoding without cache and padding
            with torch.no_grad():
                ids.append(int(model(input_ids=torch.tensor([ids])).logits[0, -1].argmax()))
            assert ids[-1] == expected
    assert [sample.prompt for sample in together] == prompts
    assert together[2].prompt_ids == (0,)


def test_samples_end_with_the_end_of_text(tokenizer):
    model = tiny_model("llama").eval()
    model.lm_head = torch.nn.Linear(16, VOCABULARY)
    torch.nn.init.zeros_(model.lm_head.weight)
    torch.nn.init.zeros_(model.lm_head.bias)
    model.lm_head.bias.data[0] = math.log(269)  # the end of text half the time, all else alike
    samples = sample_texts(model, tokenizer, prompts=["the"], num_samples=64, max_new_tokens=4)
    for sample in samples:
        assert sample.finished == (sample.token_ids[-1] == 0)
        assert 0 not in sample.token_ids[:-1]
        assert sample.finished or len(sample.token_ids) == 4
        assert sample.text == "the" + tokenizer.decode([t for t in sample.token_ids if t])
    assert {len(sample.token_ids) for sample in samples} == {1, 2, 3, 4}


def test_only_special_tokens_end_a_sample():
    tokenizer = train_bpe_tokenizer(TEXTS, VOCABULARY - 1)
    model = tiny_model("llama").eval()
    torch.nn.init.zeros_(model.lm_head.weight)
    # Llama's default EOS is id 2, which is a quotation mark here
    assert model.generation_config.eos_token_id == 2
    samples = sample_texts(model, tokenizer, num_samples=200, max_new_tokens=8)
    assert any(2 in sample.token_ids[:-1] for sample in samples)
    # a chat model's second end is honoured
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|turn|>"]})
    turn = tokenizer.convert_tokens_to_ids("<|turn|>")
    model.generation_config.eos_token_id = [0, turn]
    ended = [sample for sample in sample_texts(model, tokenizer, num_samples=200, max_new_tokens=8) if sample.finished]
    assert {sample.token_ids[-1] for sample in ended} == {0, turn}


# overlap


def test_distinct():
    texts = ["a b a b", "a b c", "d"]
    assert distinct_n(texts, 1) == 4 / 8
    assert distinct_n(texts, 2) == 3 / 5  # ab, ba, bc of ab ba ab, ab bc
    assert distinct_n(["abab"], 2, tokenize=list) == 2 / 3


def test_rouge_counts_words_and_the_longest_common_subsequence() -> None:
    draw = random.Random(0)
    pairs = [[draw.choices(["a", "b", "c", "d"], k=draw.randrange(1, 8)) for _ in range(2)] for _ in range(20)]
    longest = [
        max(n for n in range(9) if set(itertools.combinations(a, n)) & set(itertools.combinations(b, n)))
        for a, b in pairs
    ]
    shared = [sum(min(a.count(word), b.count(word)) for word in set(a)) for a, b in pairs]
    texts, references = (["-".join(pair[i]).upper() for pair in pairs] for i in (0, 1))
    for actual, counts in zip(rouge(texts, references), (shared, longest), strict=True):
        each = [2 * n / (len(a) + len(b)) for n, (a, b) in zip(counts, pairs, strict=True)]
        assert actual == pytest.approx(sum(each) / 20)
    assert rouge(["..."], ["a"]) == (0.0, 0.0)


# errors


def test_invalid_input_raises(gpt2, tokenizer):
    judge = transformers.GPT2LMHeadModel(transformers.GPT2Config(vocab_size=257, n_embd=8, n_layer=1, n_head=1))
    foreign = "outside the model's vocabulary of 257; was the text tokenised by another"
    for message, call in (
        ("none of the 2 sequences has a token to score", lambda: sequence_nll(gpt2, [[1], [2]])),
        ("sequence 0 has 2 tokens and prefix", lambda: sequence_nll(gpt2, [[1, 2]], prefix_lengths=[3])),
        ("1 prompts for 2 texts", lambda: score_texts(gpt2, tokenizer, ["a", "b"], prompts=["a"])),
        (foreign, lambda: score_texts(judge, tokenizer, ["the cat"])),
        (foreign, lambda: sample_texts(judge, tokenizer, prompts=["the cat"], max_new_tokens=2)),
        ("top_p is 0.0", lambda: sample_texts(gpt2, tokenizer, max_new_tokens=2, top_p=0.0)),
        (r"prompt 1 \('the .*'\.\.\.\) has \d+ tokens, .*=60 exceeds .* of 64",
         lambda: sample_texts(gpt2, tokenizer, prompts=["a", "the " * 40], max_new_tokens=60)),
        ("none of the 2 texts has the 3 tokens of an n-gram, the longest has 2", lambda: distinct_n(["a b", "c"], 3)),
        ("2 texts and 1 references", lambda: rouge(["a", "b"], ["a"])),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=message):
            call()
