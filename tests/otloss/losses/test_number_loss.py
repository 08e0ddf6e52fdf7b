"""The number-token loss against its formulas, token by token in Python numbers; gradients, dtypes, memory, errors."""

import itertools
import math
from typing import Any

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import Tensor
from torch.autograd import grad

from otloss import number_token_loss
from otloss.losses import number_tokens as numbers
from tests.errors import raising
from tests.otloss.draws import normal

NAN, INF = float("nan"), float("inf")
# Two tokens of one value, one below 0, fractions, a wide gap, text between and beside them.
VALUES = torch.tensor([NAN, 3.0, 0.0, NAN, 7.0, 3.0, -2.0, 0.5, 40.0, NAN])
Y = torch.tensor([[1, 2, 0, 4], [-100, 6, 8, 3], [5, 7, 9, 1]])
FORMS = ("wasserstein", "mse")
SETTINGS: list[dict[str, Any]] = [
    {},
    {"scaling": "absolute"},
    {"form": "mse", "scaling": "absolute"},
    {"over": "numbers"},
    {"squash": 3.0},
    {"form": "mse", "over": "numbers", "scaling": "log"},
    {"scaling": "symlog"},
    {"form": "mse", "scaling": "symlog"},
    {"scaling": "log", "text": 0.25},
    {"scaling": "squash"},
    {"scaling": "log", "squash": 5.0, "over": "numbers"},
]
every_setting = pytest.mark.parametrize("options", SETTINGS, ids=str)
Z = normal(3, 4, 10)
WIDE = VALUES.double()


def plain(z: list[float], y: int, values: list[float], options: dict[str, Any]) -> float:
    """The loss of one position by its definition."""
    form = options.get("form", "wasserstein")
    scaling = options.get("scaling", "absolute" if "squash" in options else "symlog")
    squash = options.get("squash", 9.0 if scaling == "squash" else None)
    bound = 9.0 if scaling == "symlog" else INF
    place = {
        "log": lambda v: math.copysign(math.log(1 + abs(v)), v),
        "symlog": lambda v: v if abs(v) <= 9 else math.copysign(9 + 9 * math.log10(abs(v) / 9), v),
    }.get(scaling, lambda v: v)
    distinct = sorted({v for v in values if not math.isnan(v)})
    apart = [abs(place(a) - place(b)) for a, b in itertools.combinations(distinct, 2)]

    def far(v: float, w: float) -> float:
        d = min(abs(place(v) - place(w)), bound)
        if squash is None or d == 0:
            return d
        smallest, most = min(apart), max(apart)
        return 1.0 if smallest == most else 1 + (d - smallest) * (squash - 1) / (most - smallest)

    e = [math.exp(entry - max(z)) for entry in z]
    numbers = [j for j, v in enumerate(values) if not math.isnan(v)]
    top = max(z[j] for j in numbers)
    raw = {j: 1.0 if top == -INF else math.exp(z[j] - top) for j in numbers}  # without mass on numbers L is not used
    p = {j: raw[j] / math.fsum(raw.values()) for j in numbers}
    if form == "wasserstein":
        value = math.fsum(p[j] * far(values[j], values[y]) for j in numbers)
        worst = bound if bound < INF else max(far(v, w) for v in distinct for w in distinct)
    else:
        gaps = {j: max(-bound, min(place(values[j]) - place(values[y]), bound)) for j in numbers}
        value = math.fsum(p[j] * gaps[j] for j in numbers) ** 2
        worst = min(bound, place(distinct[-1]) - place(distinct[0])) ** 2 if bound == INF else bound**2
    if options.get("over") == "numbers":
        return value
    mass = math.fsum(e[j] for j in numbers)
    beside = math.fsum(e[j] for j in range(len(z)) if j not in numbers)
    return (mass * value + beside * options.get("text", 1.01 * (worst or 1.0))) / (mass + beside)


def plain_batch(z: Tensor, y: Tensor, values: Tensor, options: dict[str, Any]) -> Tensor:
    flat = [
        0.0 if label < 0 or math.isnan(values[label]) else plain(row.tolist(), int(label), values.tolist(), options)
        for row, label in zip(z.reshape(-1, z.shape[-1]), y.reshape(-1), strict=True)
    ]
    return torch.tensor(flat, dtype=torch.float64).reshape(y.shape)


@every_setting
def test_definition_and_reductions(options: dict[str, Any]) -> None:
    expected = plain_batch(Z, Y, WIDE, options)
    number = (Y != -100) & ~VALUES[Y.clamp(min=0)].isnan()
    assert int(number.sum()) == 8
    for weight in (None, normal(3, 4, seed=2).abs(), torch.arange(12).reshape(3, 4), torch.ones(3, 4) > 0):
        w = torch.ones(3, 4).double() if weight is None else weight.double()
        call = {"sample_weight": weight, **options}
        actual = number_token_loss(Z, Y, WIDE, reduction="none", **call)
        torch.testing.assert_close(actual, expected * w, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(number_token_loss(Z, Y, WIDE, reduction="sum", **call), (expected * w).sum())
        mean = (expected * w).sum() / (w * number).sum()
        torch.testing.assert_close(number_token_loss(Z, Y, WIDE, **call), mean)
    assert number_token_loss(Z, Y, WIDE, sample_weight=torch.zeros(3, 4), **options) == 0


@given(st.data())
def test_any_small_problem(data: st.DataObject) -> None:
    vocab = data.draw(st.integers(1, 6))
    value = st.one_of(st.just(NAN), st.integers(-2, 3).map(float), st.floats(-1e3, 1e3).map(lambda v: round(v, 3)))
    values = data.draw(st.lists(value, min_size=vocab, max_size=vocab))
    numbers = [j for j, v in enumerate(values) if not math.isnan(v)]
    assume(numbers)
    logit = st.one_of(st.floats(-40, 40), st.integers(-2, 2).map(float), st.just(-INF))
    options: dict[str, Any] = {"over": data.draw(st.sampled_from(["vocabulary", "numbers"]))}
    options["scaling"] = data.draw(st.sampled_from(["absolute", "symlog", "log", "squash"]))
    if options["scaling"] != "squash":
        options["form"] = data.draw(st.sampled_from(FORMS))
    z = torch.tensor(data.draw(st.lists(logit, min_size=2 * vocab, max_size=2 * vocab))).double().reshape(2, vocab)
    read = z[:, numbers] if options["over"] == "numbers" else z
    assume((read.amax(-1) > -INF).all())
    y = torch.tensor(data.draw(st.lists(st.sampled_from([-100, *range(vocab)]), min_size=2, max_size=2)))
    v = torch.tensor(values).double()
    leaf = z.clone().requires_grad_()
    actual = number_token_loss(leaf, y, v, **options, reduction="none")
    torch.testing.assert_close(actual.detach(), plain_batch(z, y, v, options), rtol=1e-10, atol=1e-10)
    (gradient,) = grad(actual.sum(), leaf)
    assert torch.isfinite(gradient).all()
    by_torch = grad(number_token_loss(leaf, y, v, **options, reduction="sum"), leaf, create_graph=True)[0]
    torch.testing.assert_close(gradient, by_torch.detach(), rtol=1e-9, atol=1e-9)
    scale = 1 + (v[numbers].amax() - v[numbers].amin()) ** 2
    assert (gradient.sum(-1).abs() <= 1e-12 * scale).all()  # a shift of the logits changes nothing
    assert (gradient[z == -INF] == 0).all()


@every_setting
def test_second_derivatives(options: dict[str, Any]) -> None:
    """The first gradients, made by hand, equal the gradients by torch in `test_any_small_problem`."""
    weight, leaf = normal(3, 4, seed=3).abs().requires_grad_(), Z.clone().requires_grad_()

    def value(z: Tensor, w: Tensor) -> Tensor:
        return number_token_loss(z, Y, WIDE, **options, sample_weight=w)

    assert torch.autograd.gradcheck(value, (leaf, weight))
    assert torch.autograd.gradgradcheck(value, (leaf, weight), fast_mode=True)  # along random directions


@every_setting
def test_positions_alone_in_pieces_and_left_out(options: dict[str, Any], request: pytest.FixtureRequest) -> None:
    leaf = Z.clone().requires_grad_()
    whole = number_token_loss(leaf, Y, WIDE, **options, reduction="none")
    (gradient,) = grad(whole.sum(), leaf)
    alone = Z[1, 1].clone().requires_grad_()
    value = number_token_loss(alone, Y[1, 1], WIDE, **options)
    assert value.shape == ()
    torch.testing.assert_close(value, whole[1, 1], rtol=1e-12, atol=0)
    torch.testing.assert_close(grad(value, alone)[0], gradient[1, 1], rtol=1e-12, atol=1e-12)
    out = (Y == -100) | VALUES[Y.clamp(min=0)].isnan()
    for filler in (-INF, INF, NAN):
        if filler != -INF:  # in pieces of three rows, which do not divide eight
            request.getfixturevalue("small_blocks")
        leaf = Z.masked_fill(out.unsqueeze(-1), filler).requires_grad_()
        weight = torch.ones(3, 4).masked_fill(out, filler)  # weights of these are not read either
        actual = number_token_loss(leaf, Y, WIDE, **options, reduction="none", sample_weight=weight)
        torch.testing.assert_close(actual[~out], whole[~out], rtol=1e-12, atol=0)
        for graph in (False, True):
            again = grad(actual[~out].sum(), leaf, create_graph=graph, retain_graph=True)[0]
            torch.testing.assert_close(again, gradient, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("lift", [-20.0, 0.0, 20.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_narrow_logits_where_numbers_or_text_have_hardly_any_mass(dtype: torch.dtype, lift: float) -> None:
    """The loss is in float32, as exact as the logits as rounded allow; the gradient keeps its digits."""
    leaf = (Z + lift * ~VALUES.isnan()).to(dtype).requires_grad_()
    wide = leaf.detach().double().requires_grad_()
    actual, expected = (number_token_loss(z, Y, v, reduction="none") for z, v in ((leaf, VALUES), (wide, WIDE)))
    assert actual.dtype == torch.float32
    torch.testing.assert_close(actual.double(), expected, rtol=1e-5, atol=1e-9)
    by_hand, true = grad(actual.sum(), leaf)[0], grad(expected.sum(), wide)[0]
    assert by_hand.dtype == dtype
    torch.testing.assert_close(by_hand.double(), true, rtol=max(2e-4, torch.finfo(dtype).eps), atol=1e-7)


def test_what_is_not_read_and_labels_of_narrow_dtypes() -> None:
    """Logits of text over numbers; and -100, which is 156 in eight bits without a sign."""
    clean, leaf = Z.clone().requires_grad_(), Z.masked_fill(VALUES.isnan(), NAN).requires_grad_()
    actual, expected = (number_token_loss(z, Y, WIDE, over="numbers") for z in (leaf, clean))
    assert torch.equal(actual, expected)
    assert torch.equal(grad(actual, leaf)[0], grad(expected, clean)[0])
    for y in (torch.full((3, 4), -100), torch.zeros(3, 4).long()):  # no numbers at all
        value = number_token_loss(clean, y, WIDE)
        assert value == 0 == grad(value, clean)[0].abs().sum()
    values = torch.full((300,), NAN)
    values[[5, 60, 100, 156]] = torch.tensor([1.0, 2.0, 3.0, 9.0])
    for dtype, last in ((torch.int32, 100), (torch.int8, 100), (torch.uint8, 156)):
        y = torch.tensor([5, 60, last])
        each = [number_token_loss(normal(3, 300), labels, values, reduction="none") for labels in (y.to(dtype), y)]
        assert (each[0] > 0).all()
        assert torch.equal(*each)


def test_no_copy_of_the_number_positions() -> None:
    values = torch.full((5000,), NAN)
    values[:10] = torch.arange(10.0)
    leaf = torch.zeros(2000, 5000, requires_grad=True)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        number_token_loss(leaf, torch.arange(2000) % 10, values).backward()
    sizes = sorted(e.self_cpu_memory_usage for e in profile.events())
    assert sizes[-1] == leaf.nbytes
    assert sizes[-2] <= 4 * numbers._PIECE_ON_CPU < leaf.nbytes / 2


@pytest.mark.parametrize("form", ["wasserstein", "squashed", "mse"])
@pytest.mark.parametrize("over", ["vocabulary", "numbers"])
def test_it_is_that_of_ntloss_where_tokens_are_digits(form: str, over: str) -> None:
    """What is published takes the distances as they are; the default here is another one."""
    ntloss, tokenizers, transformers = map(pytest.importorskip, ("ntloss", "tokenizers", "transformers"))
    pytest.importorskip("loguru").logger.disable("ntloss")
    digits = [str(digit) for digit in range(10)]  # out of order, with text between them
    vocab = ["<unk>", "the", *digits[5:], "of", ".", *digits[:5], "sum"]
    values = torch.tensor([float(token) if token.isdigit() else NAN for token in vocab])
    words = tokenizers.models.WordLevel({token: i for i, token in enumerate(vocab)}, unk_token="<unk>")
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizers.Tokenizer(words), unk_token="<unk>")
    options: dict[str, Any] = {"squashed": {"squash": 2.5}, "mse": {"form": "mse"}}.get(form, {})
    make = ntloss.NTLossDotProduct if form == "mse" else ntloss.NTLoss
    theirs = make(tokenizer, reweigh=over == "vocabulary", **({"squash_factor": 2.5} if form == "squashed" else {}))
    labels = torch.randint(len(vocab), (6, 9), generator=torch.Generator().manual_seed(1))
    labels[0, :4] = -100
    weight, leaf = normal(6, 9, seed=2).abs(), normal(6, 9, len(vocab), seed=3).requires_grad_()
    for reduction in ("mean", "none"):
        expected = theirs(leaf, labels, loss_weights=weight, reduction=reduction)
        given: dict[str, Any] = {"over": over, "scaling": "absolute", "sample_weight": weight, **options}
        actual = number_token_loss(leaf, labels, values, reduction=reduction, **given)
        assert expected.abs().sum() > 0
        torch.testing.assert_close(actual, expected, rtol=1e-6, atol=1e-9)


V5 = torch.tensor([1.0, 2.0, 4.0, NAN, NAN])
Z5, Y5 = normal(2, 5, dtype=torch.float32), torch.tensor([0, 2])
test_bad_input = raising(
    ({"logits": Z5[:, :4]}, r"values have 5 entries, logits shape \(2, 4\).*pad the values with NaN"),
    ({"labels": Y5.float()}, TypeError, r"labels have dtype torch.float32, expected token ids.*labels.long\(\)"),
    ({"labels": torch.tensor([0, 5])}, r"1 values out of range, the first at \(1,\): 5; expected 0 to 4 or"),
    ({"ignore_index": "pad"}, TypeError, "ignore_index is 'pad', expected an int"),
    ({"ignore_index": 1.5}, TypeError, "ignore_index is 1.5, expected an int"),
    ({"labels": Y5 - 100, "ignore_index": None}, r"the first at \(0,\): -100; expected 0 to 4"),
    ({"values": -V5 / 0}, "values hold -inf at token 0, expected finite values, or NaN"),
    ({"values": V5.clone().requires_grad_()}, r"values require a gradient.*pass values.detach\(\)"),
    ({"values": V5 * 1e19, "form": "mse", "scaling": "absolute"}, 'values range from 1e.19 .*use scaling="symlog"'),
    ({"squash": 5.0, "scaling": "symlog"}, 'squash=5.0 and scaling="symlog" each bound the distances'),
    ({"text": 3.0, "over": "numbers"}, 'text=3.0 is given with over="numbers"'),
    ({"scaling": "squash", "form": "mse"}, 'squash=9.0 maps distances.*form="mse" uses the mean'),
    ({"sample_weight": torch.full((2,), 3e38), "reduction": "sum"}, "loss exceeds 3.4.*torch.float32"),
    ({"logits": Z5 - INF}, r"position \(0,\) are -inf for all tokens that count, expected a finite one"),
    call=lambda change: number_token_loss(**({"logits": Z5, "labels": Y5, "values": V5} | change)),
)
