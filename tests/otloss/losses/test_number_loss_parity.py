"""The number-token loss against ntloss: equal where that is right, and by how much it is off where it is not."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import huber_loss, l1_loss, mse_loss

from otloss import number_token_loss

ntloss = pytest.importorskip("ntloss")
tokenizers = pytest.importorskip("tokenizers")
transformers = pytest.importorskip("transformers")

NAN, INF = float("nan"), float("inf")
DIGITS = [str(digit) for digit in range(10)]
# Digits out of order, with text between them.
VOCAB = ["<unk>", "the", *DIGITS[5:], "of", ".", *DIGITS[:5], "sum"]
Form = Callable[..., Tensor]


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    loguru = pytest.importorskip("loguru")
    loguru.logger.disable("ntloss")
    yield
    loguru.logger.enable("ntloss")


def tokenizer_of(vocab: list[str]) -> Any:
    """Whole words between spaces, made here: nothing is downloaded."""
    words = tokenizers.models.WordLevel({token: i for i, token in enumerate(vocab)}, unk_token="<unk>")
    made = tokenizers.Tokenizer(words)
    made.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=made, unk_token="<unk>")


def values_of(vocab: list[str]) -> Tensor:
    bare = [token.lstrip("Ġ▁") for token in vocab]
    return torch.tensor([float(token) if token.isdigit() else NAN for token in bare])


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return 2 * torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def slope(value: Tensor, leaf: Tensor) -> Tensor:
    return torch.autograd.grad(value.sum(), leaf, retain_graph=True)[0]


# ---- where it is right -------------------------------------------------------------------------------------------


def huber(found: Tensor, expected: Tensor, **options: Any) -> Tensor:
    """That of torch has no gradient where the dtypes differ; ntloss hands over labels in float32."""
    return huber_loss(found, expected.to(found.dtype), **options)


DOT = ntloss.NTLossDotProduct
THEIRS: dict[str, tuple[Form, dict[str, Any], dict[str, Any]]] = {
    "wasserstein": (ntloss.NTLoss, {}, {}),
    "squashed": (ntloss.NTLoss, {"squash_factor": 2.5}, {"squash": 2.5}),
    "squashed more": (ntloss.NTLoss, {"squash_factor": 40.0}, {"squash": 40.0}),
    "squashed as digits": (ntloss.NTLoss, {}, {"scaling": "squash"}),  # digits are 9 times as far at the most anyway
    "mse": (DOT, {"loss_function": mse_loss}, {"form": "mse"}),
    "mae": (DOT, {"loss_function": l1_loss}, {"form": "mae"}),
    "huber": (DOT, {"loss_function": huber}, {"form": "huber"}),
    "huber 2.5": (DOT, {"loss_function": functools.partial(huber, delta=2.5)}, {"form": "huber", "delta": 2.5}),
}


@pytest.mark.parametrize("name", THEIRS)
@pytest.mark.parametrize("reweigh", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_equal_on_digits(name: str, reweigh: bool, dtype: torch.dtype) -> None:
    make, their_options, options = THEIRS[name]
    theirs = make(tokenizer_of(VOCAB), reweigh=reweigh, **their_options)
    over = "vocabulary" if reweigh else "numbers"
    values = values_of(VOCAB)
    labels = torch.randint(len(VOCAB), (6, 9), generator=torch.Generator().manual_seed(1))
    labels[0, :4] = -100
    weights = drawn(6, 9, seed=2).abs().to(dtype)
    weights[3] = 0
    tight = {"rtol": 1e-5, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 1e-6, "atol": 1e-9}
    leaf = drawn(6, 9, len(VOCAB)).to(dtype).requires_grad_()
    for reduction in ("mean", "sum", "none"):
        for weight in (None, weights):
            expected = theirs(leaf, labels, loss_weights=weight, reduction=reduction)
            found = number_token_loss(
                leaf, labels, values, over=over, sample_weight=weight, reduction=reduction, **options
            )
            assert expected.abs().sum() > 0
            torch.testing.assert_close(found, expected, **tight)
            torch.testing.assert_close(slope(found, leaf), slope(expected, leaf), **tight)


@pytest.mark.parametrize("name", ["wasserstein", "squashed", "mse"])
def test_equal_on_numbers_of_several_digits(name: str) -> None:
    """Bare ones, and few: with text= and scaling= at their defaults the scales are its own."""
    vocab = ["<unk>", "a", "7", "12", "100", "2", "b"]
    make, their_options, options = THEIRS[name]
    leaf = drawn(3, 5, len(vocab), seed=3).requires_grad_()
    labels = torch.randint(len(vocab), (3, 5), generator=torch.Generator().manual_seed(4))
    expected = make(tokenizer_of(vocab), digit_level=False, **their_options)(leaf, labels)
    found = number_token_loss(leaf, labels, values_of(vocab), **options)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(slope(found, leaf), slope(expected, leaf), rtol=1e-5, atol=1e-5)


# ---- where it is not ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("prefix", ["Ġ", "▁"])
@pytest.mark.parametrize("digit_level", [True, False])
def test_numbers_behind_a_space(prefix: str, digit_level: bool) -> None:
    """It takes ' 7' of a byte-level or SentencePiece vocabulary for text: no loss at such labels, and as predictions
    they are charged as the worst there is."""
    vocab = ["<unk>", *DIGITS, *(prefix + digit for digit in DIGITS), "a"]
    theirs = ntloss.NTLoss(tokenizer_of(vocab), digit_level=digit_level)
    seven, also_seven = vocab.index("7"), vocab.index(prefix + "7")
    wrong = torch.full((1, 1, len(vocab)), -10.0)
    wrong[..., vocab.index("1")] = 10.0
    label = torch.tensor([[also_seven]])
    assert theirs(wrong, label) == 0  # of a 1 for a 7
    values = values_of(vocab)
    torch.testing.assert_close(number_token_loss(wrong, label, values), torch.tensor(6.0), rtol=1e-5, atol=0)
    right = torch.full((1, 1, len(vocab)), -10.0)
    right[..., also_seven] = 10.0
    label = torch.tensor([[seven]])
    torch.testing.assert_close(theirs(right, label), torch.tensor(9.09), rtol=1e-5, atol=0)  # of a 7 for a 7
    assert number_token_loss(right, label, values) < 1e-5


def test_the_tokenizer() -> None:
    """It adds the digits that are not there: "12" is two tokens from then on, for a model that never saw those ids."""
    vocab = ["<unk>", "12", "7", "30"]
    tokenizer = tokenizer_of(vocab)
    before = tokenizer("12 7 30")["input_ids"]
    assert before == [1, 2, 3]
    with pytest.raises(IndexError):  # its own table has the size of before
        ntloss.NTLoss(tokenizer)
    assert len(tokenizer) == 4 + 9
    after = tokenizer("12 7 30")["input_ids"]
    assert len(after) == 5
    assert max(after) > 3
    # Ours sees values alone.
    values = values_of(vocab)
    assert number_token_loss(torch.zeros(3, 4), torch.tensor(before), values, text=30.0) > 0


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_batches_without_numbers(reduction: str) -> None:
    leaf = drawn(1, 3, len(VOCAB)).requires_grad_()
    labels = torch.tensor([[1, -100, 7]])
    theirs = ntloss.NTLoss(tokenizer_of(VOCAB))(leaf, labels, reduction=reduction)
    with pytest.raises(RuntimeError, match="does not require grad"):
        theirs.sum().backward()
    ours = number_token_loss(leaf, labels, values_of(VOCAB), reduction=reduction)
    ours.sum().backward()
    assert leaf.grad is not None
    assert (leaf.grad == 0).all()


def test_half_precision_with_large_values() -> None:
    """Above 65504 its costs are infinite in float16, and its gradients NaN."""
    vocab = ["<unk>", "a", "1000", "70000"]
    leaf = drawn(1, 4, 4).half().requires_grad_()
    labels = torch.tensor([[2, 3, 2, 3]])
    for make in (ntloss.NTLoss, DOT):
        theirs = make(tokenizer_of(vocab), digit_level=False)(leaf, labels)
        assert theirs == INF
        assert slope(theirs, leaf).isnan().all()
    wide = leaf.detach().double().requires_grad_()
    for options in ({}, {"form": "mse"}, {"scaling": "log"}):
        found = number_token_loss(leaf, labels, values_of(vocab), **options)  # type: ignore[arg-type]
        exact = number_token_loss(wide, labels, values_of(vocab).double(), **options)  # type: ignore[arg-type]
        torch.testing.assert_close(found, exact.float(), rtol=1e-6, atol=0)
    scaled = number_token_loss(leaf, labels, values_of(vocab), scaling="log")
    assert torch.isfinite(slope(scaled, leaf)).all()


def test_half_precision_with_many_numbers() -> None:
    """Its mean over a batch is by a sum in float16: infinite at ten thousand digits that are 8 off."""
    logits = torch.full((1, 10_000, len(VOCAB)), -20.0).half()
    logits[..., VOCAB.index("0")] = 20.0
    labels = torch.full((1, 10_000), VOCAB.index("8"))
    assert ntloss.NTLoss(tokenizer_of(VOCAB))(logits, labels) == INF
    torch.testing.assert_close(number_token_loss(logits, labels, values_of(VOCAB)), torch.tensor(8.0))


def test_scale_with_several_digits() -> None:
    """One token of a hundred thousand sets the scale of every position; a scaling bounds it."""
    vocab = ["<unk>", "a", "1", "2", "3", "100000"]
    values = values_of(vocab)
    leaf = torch.zeros(1, 1, 6, requires_grad=True)
    labels = torch.tensor([[2]])
    theirs = ntloss.NTLoss(tokenizer_of(vocab), digit_level=False)(leaf, labels)
    assert theirs > 5e4
    assert slope(theirs, leaf).abs().amax() > 8e3  # where that of a cross-entropy is below 1
    for scaling, bound in (("log", 1.01 * 12), ("rank", 1.01), ("squash", 1.01 * 9)):
        found = number_token_loss(leaf, labels, values, scaling=scaling)
        assert 0 < found < bound
        assert slope(found, leaf).abs().amax() < bound / 4


def test_numbers_masked_out() -> None:
    """Where a mask leaves text alone, it gives NaN; that is mass on text."""
    logits = drawn(1, 1, len(VOCAB)).float()
    logits[..., ~values_of(VOCAB).isnan()] = -INF
    labels = torch.tensor([[VOCAB.index("3")]])
    assert ntloss.NTLoss(tokenizer_of(VOCAB))(logits, labels).isnan()
    torch.testing.assert_close(number_token_loss(logits, labels, values_of(VOCAB)), torch.tensor(1.01 * 9))


def test_what_ignored_positions_hold() -> None:
    """A NaN at a position that is ignored reaches its gradient."""
    leaf = drawn(1, 2, len(VOCAB)).float()
    leaf[0, 1] = NAN
    leaf.requires_grad_()
    labels = torch.tensor([[VOCAB.index("3"), -100]])
    theirs = ntloss.NTLoss(tokenizer_of(VOCAB))(leaf, labels)
    ours = number_token_loss(leaf, labels, values_of(VOCAB))
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
    assert slope(theirs, leaf)[0, 1].isnan().any()
    assert (slope(ours, leaf)[0, 1] == 0).all()


def test_squash_of_two_numbers() -> None:
    """Of two numbers the nearest pair is the farthest, and its scale is 0 / 0."""
    vocab = ["<unk>", "a", "1", "5"]
    logits, labels = torch.zeros(1, 1, 4), torch.tensor([[2]])
    assert ntloss.NTLoss(tokenizer_of(vocab), digit_level=False, squash_factor=3.0)(logits, labels).isnan()
    found = number_token_loss(logits, labels, values_of(vocab), squash=3.0)
    torch.testing.assert_close(found, torch.tensor((0.0 + 1.0 + 2 * 1.01) / 4))
