"""The number-token loss equals that of the package ntloss where its vocabulary holds bare digits."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.nn.functional import mse_loss

from otloss import number_token_loss

ntloss = pytest.importorskip("ntloss")
tokenizers = pytest.importorskip("tokenizers")
transformers = pytest.importorskip("transformers")

DIGITS = [str(digit) for digit in range(10)]
# Digits out of order, with text between them.
VOCAB = ["<unk>", "the", *DIGITS[5:], "of", ".", *DIGITS[:5], "sum"]
VALUES = torch.tensor([float(token) if token.isdigit() else torch.nan for token in VOCAB])
# As published; the default is another one.
ABSOLUTE: dict[str, Any] = {"scaling": "absolute"}
THEIRS: dict[str, tuple[Any, dict[str, Any], dict[str, Any]]] = {
    "wasserstein": (ntloss.NTLoss, {}, ABSOLUTE),
    "squashed": (ntloss.NTLoss, {"squash_factor": 2.5}, {"squash": 2.5, **ABSOLUTE}),
    "mse": (ntloss.NTLossDotProduct, {"loss_function": mse_loss}, {"form": "mse", **ABSOLUTE}),
}


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    loguru = pytest.importorskip("loguru")
    loguru.logger.disable("ntloss")
    yield
    loguru.logger.enable("ntloss")


@pytest.mark.parametrize("name", THEIRS)
@pytest.mark.parametrize("over", ["vocabulary", "numbers"])
def test_equal_on_digits(name: str, over: str) -> None:
    make, their_options, options = THEIRS[name]
    words = tokenizers.models.WordLevel({token: i for i, token in enumerate(VOCAB)}, unk_token="<unk>")
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizers.Tokenizer(words), unk_token="<unk>")
    theirs = make(tokenizer, reweigh=over == "vocabulary", **their_options)
    generator = torch.Generator().manual_seed(1)
    labels = torch.randint(len(VOCAB), (6, 9), generator=generator)
    labels[0, :4] = -100
    weights = torch.rand(6, 9, generator=generator, dtype=torch.float64)
    leaf = (2 * torch.randn(6, 9, len(VOCAB), generator=generator, dtype=torch.float64)).requires_grad_()
    for reduction, weight in (("mean", None), ("mean", weights), ("sum", weights), ("none", weights)):
        expected = theirs(leaf, labels, loss_weights=weight, reduction=reduction)
        actual = number_token_loss(
            leaf, labels, VALUES, over=over, sample_weight=weight, reduction=reduction, **options
        )
        assert expected.abs().sum() > 0
        torch.testing.assert_close(actual, expected, rtol=1e-6, atol=1e-9)
        gradients = (torch.autograd.grad(v.sum(), leaf)[0] for v in (actual, expected))
        torch.testing.assert_close(*gradients, rtol=1e-6, atol=1e-9)
