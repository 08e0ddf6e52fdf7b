"""The tokenizer that is trained where none is at hand."""

from otloss_llm.data import train_bpe_tokenizer

TEXTS = ["the cat sat on the mat", "the dog sat on the log", "naïve café, 6² = 36; 日本"] * 3


def test_tokenizer_gives_every_text_back() -> None:
    tokenizer = train_bpe_tokenizer(TEXTS, 300)
    for text in ["", " ", "a  b\n\n\tc ", "naïve 日本 🙂 \x00\ufffd", "zzz<|endoftext|>"]:
        assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    assert tokenizer.eos_token_id == tokenizer.pad_token_id == tokenizer.bos_token_id == 0
    assert tokenizer("")["input_ids"] == []
    assert 257 < len(tokenizer) <= 300
