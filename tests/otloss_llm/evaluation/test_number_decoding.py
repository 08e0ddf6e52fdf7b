"""Distributions over numbers against an enumeration of all texts; decisions and calibration by hand."""

import math
from itertools import product
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
import transformers
from tokenizers import Tokenizer
from tokenizers.decoders import Fuse
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from tokenizers.processors import TemplateProcessing

from otloss_llm import EmbeddingCost, NumberCost
from otloss_llm.costs.tokenizer_numbers import read_number, token_texts
from otloss_llm.data import train_bpe_tokenizer
from otloss_llm.evaluation import NumberDistribution, decode_numbers, number_distributions, score_number_distributions

ASKED = ["1 + 1 =\n", "a\n"]


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return train_bpe_tokenizer(["a b 1 2 1 2"], 257, split_digits=True)


@pytest.fixture(scope="module")
def model(tokenizer: Any) -> Any:
    """Random, with most of its mass on the parts of numbers."""
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=len(tokenizer) + 2, n_positions=32, n_embd=8, n_layer=1, n_head=2, tie_word_embeddings=False
    )
    model = transformers.GPT2LMHeadModel(config).eval()
    model.lm_head = torch.nn.Linear(8, config.vocab_size)
    favoured = tokenizer.convert_tokens_to_ids(["1", "2", "7", ".", "-", "Ġ"])
    with torch.no_grad():
        model.lm_head.weight.normal_(0.0, 0.3)
        model.lm_head.bias.zero_()[favoured] = 6.0
    return model


def log_p(model: Any, ids: list[int]) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=torch.tensor([ids])).logits[0, -1].double().log_softmax(-1)


def enumerated(model: Any, tokenizer: Any, prompt: list[int], longest: int) -> dict[float, float]:
    """Every sequence of parts of numbers: its value, and the probability that no longer number follows."""
    texts = token_texts(tokenizer)
    parts = [i for i, text in enumerate(texts) if text and set(text) <= set("0123456789.+- ")]
    result: dict[float, float] = {}
    for length in range(1, longest + 1):
        for ids in product(parts, repeat=length):
            text = "".join(texts[i] or "" for i in ids).lstrip()
            if (value := read_number(text.rstrip("."))) is None or text.strip() != text or text.count(".") > 1:
                continue
            p = sum(float(log_p(model, [*prompt, *ids[:k]])[i]) for k, i in enumerate(ids))
            if math.exp(p) < 1e-3:
                continue
            if length < longest:
                after = log_p(model, [*prompt, *ids]).exp()
                more = [i for i in parts if "." not in (texts[i] or "") or "." not in text]
                p += math.log1p(-sum(float(after[i]) for i in more if set(texts[i] or "") <= set("0123456789.")))
            result[value] = result.get(value, 0.0) + math.exp(p)
    return result


def test_the_beam_finds_what_an_enumeration_finds(model: Any, tokenizer: Any) -> None:
    for prompt, answer in zip(ASKED, number_distributions(model, tokenizer, ASKED, longest=2, beam=500), strict=True):
        expected = enumerated(model, tokenizer, tokenizer(prompt)["input_ids"], 2)
        actual = dict(zip(answer.values.tolist(), (answer.probabilities * answer.mass).tolist(), strict=True))
        likely = {value for value, p in expected.items() if p > 5e-3}
        assert {1.0, 2.0, 7.0, -1.0} <= likely
        assert any(value > 9 for value in likely)
        for value in likely:
            assert actual[value] == pytest.approx(expected[value], abs=5e-3)
        assert 0.3 < answer.mass < 1.0
        assert float(answer.probabilities.sum()) == pytest.approx(1.0)


def test_a_blank_behind_a_number_ends_it() -> None:
    """Some tokenizers put blanks behind words, not in front of them."""
    words = Tokenizer(WordLevel({"a": 0, "7 ": 1, "5": 2, "4\n": 3, "2. ": 4}, unk_token="a"))
    words.decoder = Fuse()
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"vocab_size": 5, "n_positions": 8, "n_embd": 4, "n_layer": 1, "n_head": 1}
    config = transformers.GPT2Config(**sizes, bos_token_id=0, eos_token_id=0)
    model = transformers.GPT2LMHeadModel(config).eval()
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=words, unk_token="a")
    (answer,) = number_distributions(model, tokenizer, ["a"], longest=2, beam=100)
    p = {1: log_p(model, [0]).exp(), 2: log_p(model, [0, 2]).exp()}
    actual = dict(zip(answer.values.tolist(), (answer.probabilities * answer.mass).tolist(), strict=True))
    expected = {7.0: p[1][1], 4.0: p[1][3], 2.0: p[1][4], 5.0: p[1][2] * p[2][0], 57.0: p[1][2] * p[2][1],
                55.0: p[1][2] * p[2][2], 54.0: p[1][2] * p[2][3], 52.0: p[1][2] * p[2][4]}  # fmt: skip
    assert actual == pytest.approx({value: float(share) for value, share in expected.items()}, rel=1e-6)


def leading_number(text: str) -> float | None:
    """Return the number that a text begins with, read character by character, commas between thousands included."""
    text = text.lstrip()
    sign, text = (text[0], text[1:]) if text[:1] in ("-", "+") else ("", text)

    def digits(start: int) -> int:
        return next((k for k in range(start, len(text)) if text[k] not in "0123456789"), len(text)) - start

    whole, end = text[: digits(0)], digits(0)
    if 1 <= len(whole) <= 3 and whole[0] != "0":
        groups = 0
        while text[end + 4 * groups :][:1] == "," and digits(end + 4 * groups + 1) == 3:
            groups += 1
        end += 4 * groups
        whole = text[:end].replace(",", "")
    fraction = text[end + 1 : end + 1 + digits(end + 1)] if text[end : end + 1] == "." else ""
    return float(f"{sign}{whole or 0}.{fraction or 0}") if whole or fraction else None


@pytest.mark.parametrize(
    "words",
    [
        ["4", "2%", ".5kg", "7)", ".", "a", "7 ", "-", "3.5.1"],
        ["1", "25", ",", ",250", "0", "5,00", ".", " "],
        ["1,250", "-12", ",5", "00", "50,", ". ", "2,2505"],
    ],
)
def test_the_number_is_the_one_that_the_text_begins_with(words: list[str]) -> None:
    """Of all texts of three tokens, with tokens that hold the end of a number and what follows, and with commas."""
    vocabulary = {word: i for i, word in enumerate(["?", *words])}
    words = list(vocabulary)
    tokens = Tokenizer(WordLevel(vocabulary, unk_token="?"))
    tokens.decoder = Fuse()
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"vocab_size": len(words), "n_positions": 8, "n_embd": 8, "n_layer": 1, "n_head": 1}
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, bos_token_id=0, eos_token_id=0)).eval()
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=tokens, unk_token="?")
    ids = torch.cartesian_prod(*[torch.arange(len(words))] * 3)
    with torch.no_grad():
        logits = model(input_ids=torch.cat([torch.zeros_like(ids[:, :1]), ids], 1)).logits[:, :3]
    p = logits.double().log_softmax(-1).gather(-1, ids.unsqueeze(-1)).sum((1, 2)).exp()
    expected: dict[float, float] = {}
    for row, share in zip(ids.tolist(), p.tolist(), strict=True):
        value = leading_number("".join(words[i] for i in row))
        if value is not None:
            expected[value] = expected.get(value, 0.0) + share
    (answer,) = number_distributions(model, tokenizer, ["?"], longest=3, beam=500)
    actual = dict(zip(answer.values.tolist(), (answer.probabilities * answer.mass).tolist(), strict=True))
    assert actual == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(
    ("single", "prefix"), [("<s> $A", [0]), ("<s> <e> $A <e>", [0, 4]), ("$A <e>", []), ("$A", [])]
)
def test_a_prompt_begins_as_texts_do(single: str, prefix: list[int]) -> None:
    """Once, also where a chat template has written that beginning."""
    words = Tokenizer(WordLevel({"<s>": 0, "a": 1, "7": 2, "5": 3, "<e>": 4}, unk_token="a"))
    words.pre_tokenizer = WhitespaceSplit()
    words.post_processor = TemplateProcessing(single=single, special_tokens=[("<s>", 0), ("<e>", 4)])
    special = {"unk_token": "a", "bos_token": "<e>" if single == "$A <e>" else "<s>", "eos_token": "<e>"}
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=words, **special)
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"vocab_size": 5, "n_positions": 8, "n_embd": 4, "n_layer": 1, "n_head": 1}
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, bos_token_id=0, eos_token_id=4)).eval()
    p = log_p(model, [*prefix, 1]).exp()
    for prompt in ("a", " ".join([*tokenizer.convert_ids_to_tokens(prefix), "a"])):
        (answer,) = number_distributions(model, tokenizer, [prompt], longest=1)
        assert answer.mass == pytest.approx(float(p[2] + p[3]), rel=1e-6)
    # Without BOS, and with 7 for a thought in front of an answer, which prompts do not end with.
    before = "{% if m.role == 'assistant' %}7 {% endif %}"
    tokenizer.chat_template = "{% for m in messages %}" + before + "{{ m.content + ' ' }}{% endfor %}"
    (answer,) = number_distributions(model, tokenizer, [[{"role": "user", "content": "a"}]], longest=1)
    p = log_p(model, [1, 2]).exp()
    assert answer.mass == pytest.approx(float(p[2] + p[3]), rel=1e-6)


def test_the_blank_in_front_of_an_answer_is_left_to_it() -> None:
    """Llama 2 writes it, here _, as a token of its own in front of a digit, and as a part of the sign's."""
    words = Tokenizer(WordLevel({"a": 0, "_": 1, "_-": 2, "7": 3, "5": 4}, unk_token="a"))
    words.pre_tokenizer = WhitespaceSplit()
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=words, unk_token="a")
    written = "'_- ' ~ m.content[1:] if m.content[0] == '-' else '_ ' ~ m.content"
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m.content if m.role == 'user' else " + written + " }} {% endfor %}"
    )
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"vocab_size": 5, "n_positions": 8, "n_embd": 4, "n_layer": 1, "n_head": 1}
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes)).eval()
    (answer,) = number_distributions(model, tokenizer, [[{"role": "user", "content": "a"}]], longest=1)
    p = log_p(model, [0]).exp()
    assert answer.mass == pytest.approx(float(p[3] + p[4]), rel=1e-6)


SMALL: dict[str, Any] = {
    "vocab_size": 6, "d_model": 8, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2,
    "decoder_attention_heads": 2, "encoder_ffn_dim": 8, "decoder_ffn_dim": 8, "max_position_embeddings": 8,
    "pad_token_id": 5, "eos_token_id": 4, "init_std": 0.5,
}  # fmt: skip
WRITERS = {
    "bart": lambda: transformers.BartForConditionalGeneration(transformers.BartConfig(**SMALL)),
    "m2m": lambda: transformers.M2M100ForConditionalGeneration(transformers.M2M100Config(**SMALL)),
    "mbart": lambda: transformers.MBartForConditionalGeneration(transformers.MBartConfig(**SMALL)),
    "t5": lambda: transformers.T5ForConditionalGeneration(transformers.T5Config(
        vocab_size=6, d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2, pad_token_id=5, decoder_start_token_id=5)),
}  # fmt: skip


TEMPLATES = ("<s> $A <e>", "$A <e>", "$A <e> <s>", "$A")


@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("kind", WRITERS)
def test_a_decoder_reads_before_a_number_what_it_reads_in_training(kind: str, template: str) -> None:
    words = Tokenizer(WordLevel({"<s>": 0, "a": 1, "7": 2, "5": 3, "<e>": 4, "<p>": 5}, unk_token="a"))
    words.pre_tokenizer = WhitespaceSplit()
    words.decoder = Fuse()
    words.post_processor = TemplateProcessing(single=template, special_tokens=[("<s>", 0), ("<e>", 4)])
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=words, unk_token="a", pad_token="<p>")
    torch.manual_seed(0)
    model: Any = WRITERS[kind]().eval()
    prompt = " ".join(["a"] * 6)  # with what stands around it as long as the context
    if (kind, template) == ("mbart", "$A"):
        with pytest.raises(
            ValueError, match="starts a text with its last label, and the tokenizer puts no token behind"
        ):
            number_distributions(model, tokenizer, [prompt])
        return
    encoded, labels = tokenizer([prompt], return_tensors="pt"), tokenizer(text_target=["7 5"], return_tensors="pt")
    with torch.no_grad():
        logits = model(input_ids=encoded["input_ids"], labels=labels["input_ids"]).logits[0].double()
    at = labels["input_ids"][0].tolist().index(2)
    first, then = logits[at].softmax(-1), logits[at + 1].softmax(-1)
    (answer,) = number_distributions(model, tokenizer, [prompt], longest=1)
    assert answer.mass == pytest.approx(float(first[2] + first[3]), rel=1e-5)
    (answer,) = number_distributions(model, tokenizer, [prompt], longest=2)
    p = dict(zip(answer.values.tolist(), (answer.probabilities * answer.mass).tolist(), strict=True))
    assert p[75.0] == pytest.approx(float(first[2] * then[3]), rel=1e-5)


def test_one_token_is_the_softmax_over_number_tokens(model: Any, tokenizer: Any) -> None:
    (answer,) = number_distributions(model, tokenizer, ASKED[:1], longest=1)
    p = log_p(model, tokenizer("1 + 1 =\n")["input_ids"]).exp()
    values = {i: v for i, text in enumerate(token_texts(tokenizer)) if text and (v := read_number(text)) is not None}
    by_value = torch.zeros(10, dtype=torch.float64)
    for i, value in values.items():
        by_value[int(value)] += p[i]
    kept = by_value[answer.values.long()]
    torch.testing.assert_close(answer.probabilities, kept / kept.sum())
    assert answer.mass == pytest.approx(float(kept.sum()))


def test_many_improbable_numbers_of_one_token_are_not_dropped() -> None:
    """Each of them has less than 1e-4 of the probability of the best one, and together they have a tenth.

    Signs, blanks and letters are more probable, and are no number.
    """
    count, others = 2000, ["-", "+", " ", "b", "c"]
    vocabulary = ["a", *(str(k) for k in range(count)), *others]
    words = Tokenizer(WordLevel({text: i for i, text in enumerate(vocabulary)}, unk_token="a"))
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=words, unk_token="a")
    sizes: dict[str, Any] = {"vocab_size": len(vocabulary), "n_positions": 4, "n_embd": 2, "n_layer": 1, "n_head": 1}
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, bos_token_id=None, eos_token_id=None)).eval()
    share = torch.full((len(vocabulary),), 0.1 / (count - 1), dtype=torch.float64)
    share[0], share[6], share[-len(others) :] = 1e-9, 0.9, 1 / len(others)
    with torch.no_grad():
        model.transformer.ln_f.weight.zero_()
        model.transformer.ln_f.bias.copy_(torch.tensor([1.0, 0.0]))
        model.transformer.wte.weight[:, 0] = share.log().float()
    (answer,) = number_distributions(model, tokenizer, ["a"], longest=1, beam=count)
    assert len(answer.values) == count
    assert answer.mass == pytest.approx(0.5, rel=1e-5)
    assert answer.decode("mean") == pytest.approx(0.9 * 5 + 0.1 / (count - 1) * (sum(range(count)) - 5), rel=1e-5)


def test_batches_and_decisions_agree(model: Any, tokenizer: Any) -> None:
    whole = number_distributions(model, tokenizer, ASKED, longest=3)
    model.train()
    for by in ("mean", "median", 0.9):
        decoded = decode_numbers(model, tokenizer, ASKED, by=by, longest=3, batch_size=2)
        assert decoded == pytest.approx([one.decode(by) for one in whole])
    assert model.training
    model.eval()


def test_calibration_by_hand() -> None:
    p = torch.tensor([0.05, 0.55, 0.4], dtype=torch.float64)
    one = NumberDistribution(torch.tensor([1.0, 3.0, 10.0], dtype=torch.float64), p, mass=0.8)
    assert (one.decode("median"), one.decode(0.05), one.decode(0.99)) == (3.0, 1.0, 10.0)
    assert one.decode("mean") == pytest.approx(5.7)
    assert one.pit(3.0) == pytest.approx((0.05, 0.6))
    apart = 2 * (0.05 * 0.55 * 2 + 0.05 * 0.4 * 9 + 0.55 * 0.4 * 7)
    assert one.crps(4.0) == pytest.approx(0.05 * 3 + 0.55 * 1 + 0.4 * 6 - apart / 2)
    scores = score_number_distributions([one, one], [3.0, 99.0], by="mean")
    inside = [0.05, *[0.1] * 5, 0.0, 0.0, 0.0, 0.0]
    expected = [x / 0.55 / 2 for x in inside]
    expected[-1] += 0.5  # beyond all values
    assert scores.pit == pytest.approx(tuple(expected))
    assert scores.within_90 == pytest.approx(0.5)
    assert scores.mean_absolute_error == pytest.approx((2.7 + 93.3) / 2)
    assert (scores.questions, scores.number_mass) == (2, pytest.approx(0.8))


def test_numbers_of_float32_and_of_arithmetic_equal_those_that_were_read() -> None:
    values, halves = torch.tensor([0.3, 3.3], dtype=torch.float64), torch.tensor([0.5, 0.5], dtype=torch.float64)
    sure = NumberDistribution(values, halves, mass=0.9)
    expected = score_number_distributions([sure, sure], [0.3, 3.3])
    found = score_number_distributions([sure, sure], [0.1 * 3, 1.1 * 3])
    assert (found.pit, found.within_90) == (expected.pit, expected.within_90)
    assert expected.within_90 == pytest.approx(0.9)


@pytest.mark.parametrize("right", [[0.3, 3.3], [8.06], [4096.1, 5000.3], [12345.67, 34567.89], [101325.3, 2.0**30]])
def test_numbers_of_float32_are_read_as_they_are_written(right: list[float]) -> None:
    value = torch.ones(1, dtype=torch.float64)
    sure = [NumberDistribution(value * number, value, 0.9) for number in right]
    expected, narrow = score_number_distributions(sure, right), np.float32(right)
    assert expected.mean_absolute_error == 0
    for numbers in (torch.from_numpy(narrow), narrow, narrow.tolist(), list(narrow), pd.Series(narrow)):
        assert score_number_distributions(sure, numbers) == expected


def test_numbers_that_are_exact_stay() -> None:
    right = [0.125, 2**50, 2.0**40, 2.0**-20, 1234567.25, 3 / 65536]  # in float32 too, where 2^40 reads 1.0995116e12
    value = torch.ones(1, dtype=torch.float64)
    sure = [NumberDistribution(value * number, value, 0.9) for number in right]
    assert score_number_distributions(sure, right).mean_absolute_error == 0


def test_prompts_and_numbers_come_in_arrays_and_series(model: Any, tokenizer: Any) -> None:
    pd = pytest.importorskip("pandas")
    expected = decode_numbers(model, tokenizer, ASKED, longest=2)
    for prompts in (np.array(ASKED), pd.Series(ASKED, index=range(7, 7 + len(ASKED))), iter(ASKED)):
        assert decode_numbers(model, tokenizer, prompts, longest=2) == expected
    found = number_distributions(model, tokenizer, ASKED, longest=2)
    right = [float(i) for i in range(len(ASKED))]
    for numbers in (np.array(right), pd.Series(right), torch.tensor(right)):
        assert score_number_distributions(found, numbers) == score_number_distributions(found, right)


def test_invalid_settings_raise(model: Any, tokenizer: Any) -> None:
    for changes, message in (
        ({"by": "mode"}, 'by \'mode\', expected "mean", "median"'), ({"by": 1.0}, "level of a quantile"),
        ({"longest": 0}, "longest is 0"), ({"longest": 40}, "context of 32"),
        ({"by": None}, "by None"), ({"prompts": {"a": 1}}, "expected a list of texts"),
        ({"prompts": []}, "prompts is \\[\\]"), ({"prompts": "1 + 1"}, "expected a list of texts"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=message):
            decode_numbers(model, tokenizer, **{"prompts": ASKED} | changes)
    with pytest.raises(TypeError, match=r"a right number cannot be read: .*; leave out questions without one"):
        score_number_distributions([], [None])  # type: ignore[list-item]
    with pytest.raises(TypeError, match=r"batch_size is 2.5, expected a whole number"):
        decode_numbers(model, tokenizer, ASKED, batch_size=2.5)  # type: ignore[arg-type]


def test_the_default_device_changes_nothing(model: Any, tokenizer: Any) -> None:
    """The numbers of the tokenizer, the controls of a cost and the distributions."""
    generators = [torch.Generator("cpu").manual_seed(0) for _ in range(2)]

    def results(distributions: list[NumberDistribution], generator: torch.Generator) -> list[Any]:
        numbers = NumberCost.from_tokenizer(tokenizer)
        embedding = EmbeddingCost(rows)
        controls = [embedding.random_like(generator), embedding.shuffled(generator), numbers.shuffled(generator)]
        return [
            numbers.values, *(cost.rows(labels) for cost in controls),
            score_number_distributions(distributions, [2.0, 3.0]),
        ]  # fmt: skip

    rows, labels, distributions = torch.randn(9, 4), torch.arange(4), number_distributions(model, tokenizer, ASKED)
    expected = results(distributions, generators[0])
    with torch.device("meta"):
        actual = results(distributions, generators[1])
        again = number_distributions(model, tokenizer, ASKED)
    torch.testing.assert_close(actual[:-1], expected[:-1], equal_nan=True)
    assert actual[-1] == expected[-1]
    torch.testing.assert_close([d.probabilities for d in again], [d.probabilities for d in distributions])
