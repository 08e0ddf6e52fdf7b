"""Number tokens of every kind of vocabulary: values by hand or read off the vocabulary's own spelling."""

import math
import pickle
from collections.abc import Callable
from fractions import Fraction
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

transformers = pytest.importorskip("transformers")
tokenizers = pytest.importorskip("tokenizers")

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers  # noqa: E402

from otloss_llm.costs.tokenizer_numbers import NumberTokens, read_number, token_texts, tokenizer_of  # noqa: E402
from otloss_llm.data import train_bpe_tokenizer  # noqa: E402
from tests.errors import raising  # noqa: E402

TEXT = "12 + 7 = 19, so a7 is 207 and 7 is 42.50"


# ---- vocabularies ------------------------------------------------------------------------------------------------


def wrap(backend: Tokenizer, **special: Any) -> Any:
    return transformers.PreTrainedTokenizerFast(tokenizer_object=backend, clean_up_tokenization_spaces=False, **special)


def byte_level() -> Any:
    """Digits, and pairs of them where they are frequent, with and without a blank."""
    return train_bpe_tokenizer(["1207 42 42 42 42 007 is 7 and 7 and 42"] * 4, 275)


def sentencepiece() -> Any:
    """'▁7', '7' and the byte of '7', as Llama has them."""
    pieces = [("<unk>", 0.0), ("<s>", 0.0), *((f"<0x{byte:02X}>", -9.0) for byte in range(256))]
    pieces += [("▁", -3.0), ("▁7", -2.0), ("7", -2.0), ("▁-7", -2.0), ("▁so", -2.0), ("19", -2.5), ("▁٣", -4.0)]
    backend = Tokenizer(models.Unigram(pieces, 0, byte_fallback=True))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return wrap(backend, unk_token="<unk>", bos_token="<s>")


def wordpiece() -> Any:
    words = ["[UNK]", "[PAD]", "a", "is", "7", "##7", "12", "##12", "and", ".", "##.5"]
    backend = Tokenizer(models.WordPiece({word: i for i, word in enumerate(words)}, unk_token="[UNK]"))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.BertPreTokenizer(), decoders.WordPiece()
    return wrap(backend, unk_token="[UNK]", pad_token="[PAD]")


def wordlevel() -> Any:
    """With holes among the ids."""
    words = {"<unk>": 0, "the": 1, "7": 2, "-7": 5, "0.5": 6, "5.": 7, "1,000": 8, "\u22123": 11, "seven": 12, "x7": 13}
    backend = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return wrap(backend, unk_token="<unk>")


def characters(text: str = " 0123456789+-*=.abc") -> Any:
    backend = Tokenizer(models.WordLevel({character: i for i, character in enumerate("\0" + text)}, unk_token="\0"))
    backend.pre_tokenizer = pre_tokenizers.Split(tokenizers.Regex("."), "isolated")
    backend.normalizer, backend.decoder = normalizers.Sequence([]), decoders.Fuse()
    return wrap(backend, unk_token="\0")


BUILT: dict[str, Callable[[], Any]] = {
    "byte-level BPE": byte_level,
    "SentencePiece": sentencepiece,
    "WordPiece": wordpiece,
    "WordLevel": wordlevel,
    "characters": characters,
    "slow bytes": lambda: transformers.ByT5Tokenizer(extra_ids=3),
}


@pytest.fixture(params=BUILT)
def tokenizer(request: pytest.FixtureRequest) -> Any:
    return BUILT[request.param]()


def actual(tokenizer: Any, **settings: Any) -> dict[str, float]:
    """Value by the vocabulary's own spelling."""
    values = NumberTokens.of(tokenizer, **settings).values
    return {
        tokenizer.convert_ids_to_tokens(i): float(values[i]) for i in (~values.isnan()).nonzero().squeeze(1).tolist()
    }


# ---- texts that are numbers --------------------------------------------------------------------------------------


def test_texts_that_are_numbers() -> None:
    numbers = {
        "7": 7, " 7": 7, "7 \n": 7, "\u00a07": 7, "007": 7, "1234567": 1234567, "0.5": 0.5, ".5": 0.5, "-.5": -0.5,
        "-7": -7, " +7": 7, "\u22127": -7, "12.250": 12.25, "9" * 308: float("9" * 308), "0." + "0" * 400 + "1": 0,
    }  # fmt: skip
    assert {text: read_number(text) for text in numbers} == numbers
    assert math.copysign(1, read_number("-0") or 0.0) == 1


def test_texts_that_are_not_numbers() -> None:
    for text in (
        "", " ", "-", "+", ".", "-.", "5.", "inf", "nan", "-inf", "1e5", "1_0", "0x1", "²", "½", "Ⅷ", "一", "1,000",
        "7a", "a7", "--7", "+-7", "- 7", "7 7", "1.2.3", "7-", "7%", "$7", "٣7", "7７", "\ufffd", "7\ufffd", "9" * 400,
        "seven", "٣", "७.५", "７", "１０", "𝟕",
    ):  # fmt: skip
        assert read_number(text) is None, text


# ---- what tokens add to a text -----------------------------------------------------------------------------------


def test_texts_are_those_of_decoding_one_by_one(tokenizer: Any) -> None:
    """After whatever token is another letter; together they are the text, and the tokenizer stays as it is."""
    before = tokenizer.get_vocab(), tokenizer.get_added_vocab(), tokenizer(TEXT)["input_ids"]
    texts = token_texts(tokenizer)
    assert (tokenizer.get_vocab(), tokenizer.get_added_vocab(), tokenizer(TEXT)["input_ids"]) == before
    ids = [i for i in tokenizer(TEXT, add_special_tokens=False)["input_ids"] if texts[i] is not None]
    whole = tokenizer.decode(ids, clean_up_tokenization_spaces=False)
    assert "".join(texts[i] or "" for i in ids).lstrip() == whole.lstrip()

    assert len(texts) == max(tokenizer.get_vocab().values()) + 1
    names = {i: name for name, i in tokenizer.get_vocab().items()}
    special = {*tokenizer.all_special_ids, *(i for i, kind in tokenizer.added_tokens_decoder.items() if kind.special)}
    anchor = next(i for i in sorted(names) if (texts[i] or "").strip().isalpha() and names[i] != "a")
    before_it = tokenizer.decode([anchor])
    for i, text in list(enumerate(texts))[:: 1 + len(texts) // 3000]:
        if i not in names or i in special:
            assert text is None
        else:
            pair = tokenizer.decode([anchor, i], clean_up_tokenization_spaces=False)
            assert text == pair[len(before_it) :], (i, names[i])


# ---- values ------------------------------------------------------------------------------------------------------


def test_values_with_prefixes() -> None:
    spelt = {name: float(name.lstrip("Ġ")) for name in byte_level().get_vocab() if name.lstrip("Ġ").isdecimal()}
    assert {"7", "Ġ7", "42", "Ġ42"} <= set(spelt)
    assert actual(byte_level()) == spelt
    digits = {f"<0x{0x30 + digit:02X}>": digit for digit in range(10)}
    assert actual(sentencepiece()) == {"▁7": 7, "7": 7, "▁-7": -7, "19": 19, **digits}
    assert actual(wordpiece()) == {"7": 7, "##7": 7, "12": 12, "##12": 12, "##.5": 0.5}
    assert actual(wordlevel()) == {"7": 7, "-7": -7, "0.5": 0.5, "\u22123": -3}
    assert actual(characters()) == {str(digit): digit for digit in range(10)}
    assert actual(characters("abc7٣७７²½")) == {"7": 7}


def test_added_tokens() -> None:
    tokenizer = wordpiece()
    tokenizer.add_tokens(["42", AddedToken("43", special=True)])
    special = tokenizer.convert_tokens_to_ids("43")
    assert actual(tokenizer)["42"] == 42
    assert "43" not in actual(tokenizer)
    assert actual(tokenizer, values={special: 43})["43"] == 43
    role = wrap(Tokenizer(models.WordLevel({"0": 0, "1": 1})), eos_token="0")
    assert actual(role) == {"1": 1}


def test_overrides_and_pickles() -> None:
    given = {12: np.float32(7), np.int64(1): Fraction(1, 2), 2: None, 5: math.nan, 6: 10**30}
    assert actual(wordlevel(), values=given) == {"seven": 7, "the": 0.5, "0.5": 1e30, "\u22123": -3}
    numbers = NumberTokens.of(sentencepiece(), vocab_size=300)
    assert numbers.texts[-1] is None
    assert numbers.values[-1].isnan()
    copy = pickle.loads(pickle.dumps(numbers))
    assert torch.equal(copy.values.nan_to_num(99), numbers.values.nan_to_num(99))
    assert (copy.texts, copy.name) == (numbers.texts, numbers.name)


# ---- what is missed-----------------------------------------------------------------------------------------------


MISSED = {
    "=2": 2, "$5": 5, "$.5": 0.5, "(-3": -3, "5.": 5, "7)": 7, "50%": 50, "1,000": 1000, "$12,500.75": 12500.75,
    "1e5": 1e5, "=2.5E-3": 0.0025, "\\boxed{9}": 9, "boxed{12": 12, "{4}": 4, "\u22123;": -3,
    ",000": None, "1,00": None, "5-3": None, "3/4": None, "x7": None, "2nd": None, "e5": None, "²": None, "٣": None,
    "1.2.3": None, "a=2": None,
}  # fmt: skip


def test_tokens_that_are_missed_and_how_to_add_them() -> None:
    texts = ["1", *MISSED]
    tokenizer = wrap(Tokenizer(models.WordLevel({text: i for i, text in enumerate(texts)})))
    coverage = NumberTokens.of(tokenizer).coverage()
    got = {texts[token]: value for token, value in coverage.suggested.items()}
    assert got == {text: value for text, value in MISSED.items() if value is not None}
    named = {reason: {texts[i] for i in ids} for reason, ids in coverage.missed.items()}
    assert named["thousands comma"] == {"1,000", "$12,500.75"}
    assert named["exponent"] == {"1e5", "=2.5E-3"}
    assert {"=2", "\\boxed{9}"} <= named["punctuation beside a number"]
    assert named["other"] == {text for text, value in MISSED.items() if value is None}
    added = NumberTokens.of(tokenizer, values=coverage.suggested)
    assert {texts[i]: float(added.values[i]) for i in coverage.suggested} == got
    assert not added.coverage().suggested


# ---- invalid arguments -------------------------------------------------------------------------------------------


test_invalid_sizes_and_overrides = raising(
    ({"values": dict.fromkeys((2, 5, 6, 11))}, r"has no token that is a number.*values=\{id: value\}"),
    ({"vocab_size": 13}, r"vocab_size is 13, but the tokenizer .* ids up to 13: expected at least 14"),
    ({"values": {3: 1.0}}, r"token 3, expected one of the 10 ids of the tokenizer .*convert_tokens_to_ids"),
    ({"values": {1: math.inf}}, r"values\[1\] is infinite, expected a finite number"),
    call=lambda settings: NumberTokens.of(wordlevel(), **settings),
)


def test_what_is_no_tokenizer_is_named() -> None:
    processor = SimpleNamespace(tokenizer=wordlevel())
    for given, advice in ((processor, "its attribute `tokenizer`"), ("gpt2", "AutoTokenizer.from_pretrained")):
        with pytest.raises(TypeError, match=f"expected an instance of a tokenizer of transformers: {advice}"):
            NumberTokens.of(given)


def test_the_tokenizer_of_a_processor() -> None:
    """A tokenizer may hold an engine under the same name."""
    tokenizer = wordlevel()
    assert tokenizer_of(SimpleNamespace(tokenizer=tokenizer)) is tokenizer
    tokenizer.tokenizer = object()
    assert tokenizer_of(tokenizer) is tokenizer
