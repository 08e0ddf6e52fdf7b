"""The number-token loss against its formulas, token by token in Python numbers; gradients, dtypes, edges, bad input."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

import otloss.losses.number_rows as number_rows
from otloss import number_token_loss
from otloss.losses.number_line import number_line

NAN, INF = float("nan"), float("inf")
# Two tokens of one value, one below 0, fractions, a wide gap, text between and beside them.
VALUES = torch.tensor([NAN, 3.0, 0.0, NAN, 7.0, 3.0, -2.0, 0.5, 40.0, NAN])
NUMBERS = [1, 2, 4, 5, 6, 7, 8]
Y = torch.tensor([[1, 2, 0, 4], [-100, 6, 8, 3], [5, 7, 9, 1]])
FORMS = ("wasserstein", "mse", "mae", "huber")
SETTINGS: list[dict[str, Any]] = [
    {"form": form, "over": over, "scaling": scaling}
    for form, over, scaling in itertools.product(
        FORMS, ("vocabulary", "numbers"), ("absolute", "symlog", "log", "rank")
    )
]
SETTINGS += [{"over": over, "squash": 5.0, "scaling": s} for over in ("vocabulary", "numbers") for s in ("log", "rank")]
SETTINGS += [{"scaling": "squash"}, {"scaling": "squash", "squash": 3.0}, {"squash": 1.5, "over": "numbers"}]
SETTINGS += [{"form": "huber", "delta": 6.0}, {"text": 0.25}, {"form": "mse", "text": 200.0}]
every_setting = pytest.mark.parametrize("options", SETTINGS, ids=lambda o: "-".join(map(str, o.values())))
a_few_settings = pytest.mark.parametrize(
    "options",
    [{}, {"over": "numbers"}, {"squash": 5.0}, {"form": "mse"}, {"form": "huber", "over": "numbers", "scaling": "log"}],
    ids=lambda o: "-".join(map(str, o.values())),
)


def drawn(*shape: int, seed: int = 0, scale: float = 1.5, dtype: torch.dtype = torch.float64) -> Tensor:
    return (scale * torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)).to(dtype)


Z = drawn(3, 4, 10)
WIDE = VALUES.double()


def plain(z: list[float], y: int, values: list[float], options: dict[str, Any]) -> float:
    """The loss of one position by its definition."""
    form, scaling, squash = (
        options.get("form", "wasserstein"),
        options.get("scaling", "absolute"),
        options.get("squash"),
    )
    distinct = sorted({v for v in values if not math.isnan(v)})
    place = {
        "log": lambda v: math.copysign(math.log(1 + abs(v)), v),
        "rank": lambda v: distinct.index(v) / max(1, len(distinct) - 1),
        "symlog": lambda v: v if abs(v) <= 9 else math.copysign(9 + 9 * math.log10(abs(v) / 9), v),
    }.get(scaling, lambda v: v)
    points = [place(v) for v in distinct]
    apart = [abs(a - b) for a, b in itertools.combinations(points, 2)]
    squash = 9.0 if scaling == "squash" and squash is None else squash

    bound = 9.0 if scaling == "symlog" else INF

    def far(v: float, w: float) -> float:
        d = min(abs(place(v) - place(w)), bound)
        if squash is None or d == 0:
            return d
        least, most = min(apart), max(apart)
        return 1.0 if least == most else 1 + (d - least) * (squash - 1) / (most - least)

    def bend(gap: float) -> float:
        delta = options.get("delta", 1.0)
        if form == "huber":
            return 0.5 * gap * gap if abs(gap) <= delta else delta * (abs(gap) - 0.5 * delta)
        return gap * gap if form == "mse" else abs(gap)

    top = max(z)
    e = [math.exp(entry - top) for entry in z]
    numbers = [j for j, v in enumerate(values) if not math.isnan(v)]
    top_number = max(z[j] for j in numbers)
    lost = top_number == -INF  # no mass on numbers: what they are charged does not matter
    raw = {j: 1.0 if lost else math.exp(z[j] - top_number) for j in numbers}
    p = {j: raw[j] / math.fsum(raw.values()) for j in numbers}
    if form == "wasserstein":
        value = math.fsum(p[j] * far(values[j], values[y]) for j in numbers)
        worst = max(far(v, w) for v in distinct for w in distinct) if bound == INF else bound
    else:
        gaps = {j: max(-bound, min(place(values[j]) - place(values[y]), bound)) for j in numbers}
        value = bend(math.fsum(p[j] * gaps[j] for j in numbers))
        worst = bend(points[-1] - points[0] if bound == INF else bound)
    if options.get("over") == "numbers":
        return value
    text = options.get("text", 1.01 * (worst or 1.0))
    mass = math.fsum(e[j] for j in numbers)
    beside = math.fsum(e[j] for j in range(len(z)) if j not in numbers)
    return (mass * value + beside * text) / (mass + beside)


def plain_batch(z: Tensor, y: Tensor, values: Tensor, options: dict[str, Any]) -> Tensor:
    flat = [
        0.0 if label < 0 or math.isnan(values[label]) else plain(row.tolist(), int(label), values.tolist(), options)
        for row, label in zip(z.reshape(-1, z.shape[-1]), y.reshape(-1), strict=True)
    ]
    return torch.tensor(flat, dtype=torch.float64).reshape(y.shape)


def slopes(value: Tensor, *leaves: Tensor, **options: Any) -> tuple[Tensor, ...]:
    return torch.autograd.grad(value, leaves, **options)


# ---- values ------------------------------------------------------------------------------------------------------


@every_setting
def test_it_is_the_definition(options: dict[str, Any]) -> None:
    expected = plain_batch(Z, Y, WIDE, options)
    assert (expected == 0).sum() == 4  # the labels that are text or ignored
    found = number_token_loss(Z, Y, WIDE, **options, reduction="none")
    torch.testing.assert_close(found, expected, rtol=1e-13, atol=1e-13)
    weight = drawn(3, 4, seed=1).abs()
    weighted = number_token_loss(Z, Y, WIDE, **options, reduction="none", sample_weight=weight)
    torch.testing.assert_close(weighted, expected * weight, rtol=1e-13, atol=1e-13)


@a_few_settings
def test_reductions(options: dict[str, Any]) -> None:
    each = number_token_loss(Z, Y, WIDE, **options, reduction="none")
    number = (Y != -100) & ~VALUES[Y.clamp(min=0)].isnan()
    assert int(number.sum()) == 8
    for weight in (None, drawn(3, 4, seed=2).abs(), torch.arange(12).reshape(3, 4), torch.ones(3, 4) > 0):
        w = torch.ones(3, 4).double() if weight is None else weight.double()
        call = {"sample_weight": weight, **options}
        total = number_token_loss(Z, Y, WIDE, reduction="sum", **call)
        torch.testing.assert_close(total, (each * w).sum())
        torch.testing.assert_close(number_token_loss(Z, Y, WIDE, **call), (each * w).sum() / (w * number).sum())
    assert number_token_loss(Z, Y, WIDE, sample_weight=torch.zeros(3, 4), **options) == 0


@settings(deadline=None, max_examples=150)
@given(st.data())
def test_any_small_problem(data: st.DataObject) -> None:
    vocab = data.draw(st.integers(1, 6))
    value = st.one_of(st.just(NAN), st.integers(-2, 3).map(float), st.floats(-1e3, 1e3).map(lambda v: round(v, 3)))
    values = data.draw(st.lists(value, min_size=vocab, max_size=vocab))
    numbers = [j for j, v in enumerate(values) if not math.isnan(v)]
    assume(numbers)
    logit = st.one_of(st.floats(-40, 40), st.integers(-2, 2).map(float), st.just(-INF))
    options: dict[str, Any] = {"over": data.draw(st.sampled_from(["vocabulary", "numbers"]))}
    options["scaling"] = data.draw(st.sampled_from(["absolute", "symlog", "log", "rank", "squash"]))
    if options["scaling"] != "squash":
        options["form"] = data.draw(st.sampled_from(FORMS))
    z = torch.tensor(data.draw(st.lists(logit, min_size=2 * vocab, max_size=2 * vocab))).double().reshape(2, vocab)
    read = z[:, numbers] if options["over"] == "numbers" else z
    assume((read.amax(-1) > -INF).all())
    y = torch.tensor(data.draw(st.lists(st.sampled_from([-100, *range(vocab)]), min_size=2, max_size=2)))
    v = torch.tensor(values).double()
    leaf = z.clone().requires_grad_()
    found = number_token_loss(leaf, y, v, **options, reduction="none")
    torch.testing.assert_close(found.detach(), plain_batch(z, y, v, options), rtol=1e-10, atol=1e-10)
    (slope,) = slopes(found.sum(), leaf)
    assert torch.isfinite(slope).all()
    scale = 1 + (v[numbers].amax() - v[numbers].amin()) ** 2
    assert (slope.sum(-1).abs() <= 1e-12 * scale).all()  # a shift of the logits changes nothing
    assert (slope[z == -INF] == 0).all()


@a_few_settings
def test_a_batch_is_a_loop(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    leaf = Z.clone().requires_grad_()
    whole = number_token_loss(leaf, Y, WIDE, **options, reduction="none")
    (slope,) = slopes(whole.sum(), leaf)
    for i, j in itertools.product(range(3), range(4)):
        alone = Z[i, j].clone().requires_grad_()
        value = number_token_loss(alone, Y[i, j], WIDE, **options, reduction="none")
        assert value.shape == ()
        torch.testing.assert_close(value, whole[i, j], rtol=1e-14, atol=0)
        torch.testing.assert_close(slopes(value, alone)[0], slope[i, j], rtol=1e-13, atol=1e-15)
        torch.testing.assert_close(number_token_loss(alone, Y[i, j], WIDE, **options), value)
    for piece in (1, 30):  # of one row, and of three: neither divides the eight
        monkeypatch.setattr(number_rows, "_PIECE_ON_CPU", piece)
        again = number_token_loss(leaf, Y, WIDE, **options, reduction="none")
        torch.testing.assert_close(again, whole, rtol=1e-14, atol=0)
        torch.testing.assert_close(slopes(again.sum(), leaf)[0], slope, rtol=1e-13, atol=1e-15)


def test_what_the_loss_is_for() -> None:
    """6 for 5 is nearer than 9 for 5; a mean that is right by accident is no right answer to the transport cost."""
    values = torch.arange(10.0)
    near, far = (8 * torch.nn.functional.one_hot(torch.tensor(k), 10).float() for k in (6, 9))
    five = torch.tensor(5)
    assert 4 * number_token_loss(near, five, values) > number_token_loss(far, five, values)
    for form in FORMS:
        assert number_token_loss(near, five, values, form=form) < number_token_loss(far, five, values, form=form)
    ends = torch.full((10,), -INF)
    ends[[0, 8]] = 0.0  # half on 0, half on 8
    assert number_token_loss(ends, torch.tensor(4), values) == 4
    for form in ("mse", "mae", "huber"):
        assert number_token_loss(ends, torch.tensor(4), values, form=form) == 0


def test_scalings_bound_the_loss() -> None:
    """Of a vocabulary with tokens up to 10^6, the worst is what the scaling says."""
    values = torch.tensor([NAN, *(float(10**k) for k in range(7))])
    wrong = torch.full((8,), -INF).index_fill(0, torch.tensor([7]), 0.0)  # a million
    worst = {"absolute": 999999.0, "log": math.log(1e6 + 1) - math.log(2), "rank": 1.0, "squash": 9.0, "symlog": 9.0}
    for scaling, expected in worst.items():
        assert float(number_token_loss(wrong, torch.tensor(1), values, scaling=scaling)) == pytest.approx(expected)
        text = torch.full((8,), -INF).index_fill(0, torch.tensor([0]), 0.0)
        found = float(number_token_loss(text, torch.tensor(1), values, scaling=scaling))
        assert found == pytest.approx(1.01 * expected)


# ---- gradients ---------------------------------------------------------------------------------------------------


@every_setting
def test_gradients(options: dict[str, Any]) -> None:
    weight = drawn(3, 4, seed=3).abs().requires_grad_()

    def value(z: Tensor, w: Tensor) -> Tensor:
        return number_token_loss(z, Y, WIDE, **options, reduction="none", sample_weight=w)

    leaf = Z.clone().requires_grad_()
    assert torch.autograd.gradcheck(value, (leaf, weight))
    assert torch.autograd.gradgradcheck(value, (leaf, weight))
    first = slopes(value(leaf, weight).sum(), leaf, weight)
    again = slopes(value(leaf, weight).sum(), leaf, weight, create_graph=True)  # by the other way
    torch.testing.assert_close(first, tuple(g.detach() for g in again), rtol=1e-12, atol=1e-14)


@a_few_settings
def test_gradients_of_the_mean(options: dict[str, Any]) -> None:
    leaf, weight = Z.clone().requires_grad_(), drawn(3, 4, seed=4).abs().requires_grad_()
    assert torch.autograd.gradcheck(lambda z: number_token_loss(z, Y, WIDE, **options), leaf)
    assert torch.autograd.gradcheck(
        lambda z, w: number_token_loss(z, Y, WIDE, **options, sample_weight=w), (leaf, weight)
    )


@a_few_settings
def test_positions_left_out_are_not_looked_at(options: dict[str, Any]) -> None:
    out = (Y == -100) | VALUES[Y.clamp(min=0)].isnan()
    clean = Z.clone().requires_grad_()
    expected = number_token_loss(clean, Y, WIDE, **options)
    for filler in (NAN, INF, -INF):
        leaf = Z.masked_fill(out.unsqueeze(-1), filler).requires_grad_()
        weight = torch.ones(3, 4).masked_fill(out, filler)
        for sample_weight in (None, weight):
            found = number_token_loss(leaf, Y, WIDE, **options, sample_weight=sample_weight)
            torch.testing.assert_close(found, expected)
            for graph in (False, True):
                (slope,) = slopes(found, leaf, create_graph=graph, retain_graph=True)
                assert (slope[out] == 0).all()
                torch.testing.assert_close(slope, slopes(expected, clean, retain_graph=True)[0])


def test_over_numbers_looks_at_numbers_alone() -> None:
    text = VALUES.isnan()
    clean, leaf = Z.clone().requires_grad_(), Z.masked_fill(text, NAN).requires_grad_()
    found, expected = (number_token_loss(z, Y, WIDE, over="numbers") for z in (leaf, clean))
    assert torch.equal(found, expected)
    (slope,) = slopes(found, leaf)
    assert (slope[..., text] == 0).all()
    assert torch.equal(slope, slopes(expected, clean)[0])


@a_few_settings
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("shape", [(2, 3), (0,), (2, 0), ()])
def test_batches_without_numbers(options: dict[str, Any], reduction: str, shape: tuple[int, ...]) -> None:
    """Zero, and backward works: a step of training where no label happens to be a number is no accident."""
    labels = torch.full(shape, 3)
    if labels.numel() > 1:
        labels.view(-1)[0] = -100
    leaf = drawn(*shape, 10).requires_grad_()
    weight = torch.ones(shape).requires_grad_()
    for sample_weight in (None, weight):
        value = number_token_loss(leaf, labels, WIDE, **options, reduction=reduction, sample_weight=sample_weight)
        assert value.shape == (shape if reduction == "none" else ())
        assert (value == 0).all()
        for graph in (False, True):
            (slope,) = slopes(value.sum(), leaf, retain_graph=True, create_graph=graph)
            assert slope.shape == leaf.shape
            assert (slope == 0).all()
    assert (slopes(value.sum(), weight)[0] == 0).all()


# ---- masks and odd vocabularies ----------------------------------------------------------------------------------


def test_masked_tokens() -> None:
    """-inf takes a token out: the answer is that of the vocabulary without it."""
    masked = Z.clone()
    masked[..., [0, 2, 8]] = -INF
    keep = torch.tensor([1, 3, 4, 5, 6, 7, 9])
    y = torch.tensor([[1, 4, 5, 6]] * 3)
    smaller = torch.searchsorted(keep, y)
    for options in ({"text": 50.0}, {"over": "numbers"}, {"form": "mse", "text": 9.0}):
        leaf, part = masked.clone().requires_grad_(), Z[..., keep].clone().requires_grad_()
        found = number_token_loss(leaf, y, WIDE, **options)  # type: ignore[arg-type]
        expected = number_token_loss(part, smaller, WIDE[keep], **options)  # type: ignore[arg-type]
        torch.testing.assert_close(found, expected)
        (slope,) = slopes(found, leaf)
        torch.testing.assert_close(slope[..., keep], slopes(expected, part)[0])
        assert (slope[..., [0, 2, 8]] == 0).all()


@pytest.mark.parametrize("form", FORMS)
def test_all_numbers_masked_out_is_all_text(form: str) -> None:
    leaf = Z.clone().index_fill_(-1, torch.tensor(NUMBERS), -INF).requires_grad_()
    found = number_token_loss(leaf, Y, WIDE, form=form, text=7.0)
    assert float(found.detach()) == pytest.approx(7.0, abs=1e-12)
    assert (slopes(found, leaf, retain_graph=True)[0] == 0).all()
    again = slopes(found, leaf, create_graph=True)[0]
    assert torch.isfinite(again).all()
    with pytest.raises(ValueError, match=r"position \(0, 0\) are -inf for all tokens that count"):
        number_token_loss(leaf, Y, WIDE, form=form, over="numbers")


def test_numbers_of_hardly_any_mass() -> None:
    """The slopes lose no digit where the numbers hold 1e-9 of the mass, or text does."""
    for lift in (-20.0, 20.0):
        wide = Z.clone()
        wide[..., NUMBERS] += lift
        truth = wide.clone().requires_grad_()
        (expected,) = slopes(number_token_loss(truth, Y, WIDE, reduction="sum"), truth)
        narrow = wide.float().requires_grad_()
        (found,) = slopes(number_token_loss(narrow, Y, VALUES, reduction="sum"), narrow)
        held = expected != 0
        assert ((found.double() - expected)[held] / expected[held]).abs().amax() < 2e-4


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("over", ["vocabulary", "numbers"])
def test_a_single_number_and_a_single_token(form: str, over: str) -> None:
    leaf = torch.tensor([[0.0, 1.0]], requires_grad=True)
    value = number_token_loss(leaf, torch.tensor([0]), torch.tensor([5.0, NAN]), form=form, over=over)
    on_text = math.e / (1 + math.e)  # is charged 1.01, as if the worst number were 1
    assert float(value.detach()) == pytest.approx(1.01 * on_text if over == "vocabulary" else 0.0)
    assert torch.isfinite(slopes(value, leaf)[0]).all()
    alone = torch.tensor([[3.0]], requires_grad=True)
    value = number_token_loss(alone, torch.tensor([0]), torch.tensor([5.0]), form=form, over=over)
    assert value == 0
    assert slopes(value, alone)[0] == 0


def test_equal_values_are_one_number() -> None:
    """Mass may move between "3" and " 3" at no charge."""
    moved = Z.clone()
    moved[..., 1], moved[..., 5] = Z[..., 5], Z[..., 1]
    for options in ({}, {"form": "mse"}, {"squash": 4.0}, {"scaling": "rank", "over": "numbers"}):
        each = [number_token_loss(z, Y, WIDE, **options, reduction="none") for z in (Z, moved)]  # type: ignore[arg-type]
        torch.testing.assert_close(*each, rtol=1e-13, atol=1e-13)
        # with nothing but 3s the label is certain
    only = torch.full((10,), -INF, dtype=torch.float64).index_fill(0, torch.tensor([1, 5]), 0.0)
    assert number_token_loss(only, torch.tensor(5), WIDE, squash=4.0) == 0


def test_scalings_of_one_and_of_two_values() -> None:
    z = torch.tensor([0.0, 0.0])
    for scaling, expected in (("rank", 0.5), ("squash", 0.5), ("log", 0.5 * math.log(3))):
        value = number_token_loss(z, torch.tensor(0), torch.tensor([0.0, 2.0]), scaling=scaling)
        assert float(value) == pytest.approx(expected)
        assert number_token_loss(z, torch.tensor(0), torch.tensor([2.0, 2.0]), scaling=scaling) == 0


# ---- dtypes and memory -------------------------------------------------------------------------------------------


def naive(z: Tensor, y: Tensor, values: Tensor, form: str) -> Tensor:
    """What one would write down, in the dtype of the logits."""
    number = ~values.isnan()
    v = values[number].to(z.dtype)
    q = z.softmax(-1)
    if form == "wasserstein":
        row = torch.full_like(z, 1.01 * float(v.max() - v.min()))
        row[:, number] = (v - values[y].to(z.dtype).unsqueeze(-1)).abs()
        return (q * row).sum(-1)
    p, m = z[:, number].softmax(-1), q[:, number].sum(-1)
    return m * ((p * v).sum(-1) - values[y].to(z.dtype)) ** 2 + (1 - m) * 1.01 * (v.max() - v.min()) ** 2


@pytest.mark.parametrize("form", ["wasserstein", "mse"])
@pytest.mark.parametrize("lift", [-12.0, 0.0, 12.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_error_is_at_most_that_of_the_naive_formula(dtype: torch.dtype, lift: float, form: str) -> None:
    """Of the loss and of its slopes, at the logits as rounded; a tenth is the noise of the last digit."""
    values = torch.cat([torch.arange(10.0), torch.full((300,), NAN)])
    y = torch.arange(400) % 10
    z = drawn(400, 310, seed=5, scale=3.0)
    z[:, :10] += lift
    z = z.to(dtype)
    truth, ours, theirs = (z.to(d).requires_grad_() for d in (torch.float64, dtype, dtype))
    exact = number_token_loss(truth, y, values.double(), form=form, reduction="none")
    found = number_token_loss(ours, y, values, form=form, reduction="none")
    rival = naive(theirs, y, values, form)
    assert found.dtype == torch.float32
    for exact_t, found_t, rival_t in (
        (exact, found, rival),
        (slopes(exact.sum(), truth)[0], slopes(found.sum(), ours)[0], slopes(rival.sum(), theirs)[0]),
    ):
        off, rival_off = ((t.detach().double() - exact_t.detach()).abs() for t in (found_t, rival_t))
        assert off.mean() <= 1.1 * rival_off.mean()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("form", FORMS)
def test_large_logits_in_half_precision(dtype: torch.dtype, form: str) -> None:
    z = torch.tensor([[6e4, -6e4, 0.0], [-6e4, -6e4, 6e4], [-6e4, 6e4, 6e4]]).to(dtype).requires_grad_()
    y, values = torch.tensor([0, 0, 0]), torch.tensor([0.0, 200.0, NAN])
    found = number_token_loss(z, y, values, form=form, reduction="none")
    worst = {"wasserstein": 200.0, "mse": 4e4, "mae": 200.0, "huber": 199.5}[form]
    torch.testing.assert_close(found, torch.tensor([0.0, 1.01 * worst, 0.5 * 2.01 * worst]))
    assert torch.isfinite(slopes(found.sum() / 1e3, z)[0]).all()


@a_few_settings
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_own_gradients_are_those_of_torch(options: dict[str, Any], dtype: torch.dtype) -> None:
    values = VALUES.to(torch.promote_types(dtype, torch.float32))
    line = number_line(values, **{k: v for k, v in options.items() if k != "over"})
    where = (torch.arange(8),)
    y = torch.tensor([*NUMBERS, 1])
    tight = {"rtol": 1e-12, "atol": 1e-13} if dtype == torch.float64 else {"rtol": 1e-5, "atol": 1e-5}
    eps = torch.finfo(dtype).eps
    found = []
    for way in (number_rows.loss_of_rows, number_rows.plain_loss_of_rows):
        leaf = drawn(8, 10, dtype=dtype).requires_grad_()
        value = way(leaf, where, y, line, options.get("over", "vocabulary"))
        assert value.dtype == values.dtype
        slope = slopes((value * torch.arange(8)).sum(), leaf)[0]
        assert slope.dtype == dtype
        found.append((value.detach(), slope))
    torch.testing.assert_close(found[0][0], found[1][0], **tight)
    torch.testing.assert_close(found[0][1], found[1][1], rtol=max(2 * eps, tight["rtol"]), atol=1e3 * tight["atol"])


def test_dtypes_of_the_answer() -> None:
    y = torch.tensor([1, 2])
    for dtype, of_values, of_weights, expected in (
        (torch.float32, torch.float32, torch.float32, torch.float32),
        (torch.float16, torch.float32, torch.float16, torch.float32),
        (torch.float16, torch.float16, torch.float16, torch.float16),
        (torch.bfloat16, torch.bfloat16, torch.int64, torch.bfloat16),
        (torch.float32, torch.float64, torch.float32, torch.float64),
        (torch.float64, torch.float32, torch.float32, torch.float64),
        (torch.float32, torch.float32, torch.float64, torch.float64),
    ):
        leaf = drawn(2, 10, dtype=dtype).requires_grad_()
        for reduction in ("mean", "none"):
            found = number_token_loss(
                leaf, y, VALUES.to(of_values), sample_weight=torch.ones(2, dtype=of_weights), reduction=reduction
            )
            assert found.dtype == expected
            assert slopes(found.sum(), leaf)[0].dtype == dtype


@pytest.mark.parametrize(
    "options", [*({"scaling": scaling} for scaling in ("absolute", "log", "rank")), {"squash": 5.0}]
)
@pytest.mark.parametrize("wide", ["logits", "values", "weight"])
def test_an_answer_in_float64_has_its_digits(options: dict[str, Any], wide: str) -> None:
    """One wide argument makes a wide answer; the others, as they are rounded, are taken in float64 from the start."""
    y = torch.arange(400) % 10
    given = {"logits": drawn(400, 10), "values": WIDE * 0.7, "weight": drawn(400, seed=1).abs()}
    given |= {name: tensor.float() for name, tensor in given.items() if name != wide}
    for form, reduction in itertools.product(FORMS[: 1 if "squash" in options else 4], ("mean", "sum", "none")):
        found, truth = (
            number_token_loss(z, y, values, sample_weight=weight, form=form, reduction=reduction, **options)
            for z, values, weight in (given.values(), [tensor.double() for tensor in given.values()])
        )
        assert found.dtype == torch.float64
        torch.testing.assert_close(found, truth, rtol=1e-14, atol=0.0)


@pytest.mark.parametrize(
    ("reduction", "form", "wrong", "shown"),
    [("sum", "wasserstein", 9, "180000"), ("mean", "mse", 300, "90000"), ("none", "mse", 300, "90000")],
)
def test_answers_beyond_half_precision_name_the_mend(reduction: str, form: str, wrong: int, shown: str) -> None:
    values = torch.tensor([0.0, wrong, NAN])
    logits = torch.tensor([-INF, 0.0, -INF]).half().expand(20000, 3)
    labels = torch.zeros(20000, dtype=torch.long)
    message = f'reduction="{reduction}" is {shown}, expected at most 65504, .* torch.float16; give values in float32'
    with pytest.raises(ValueError, match=message):
        number_token_loss(logits, labels, values.half(), form=form, reduction=reduction)
    mended = number_token_loss(logits, labels, values, form=form, reduction=reduction)
    assert mended.dtype == torch.float32
    torch.testing.assert_close(mended, torch.full_like(mended, float(shown)))
    sevens = number_token_loss(logits[:7], labels[:7], torch.tensor([0.0, 9.0, NAN]).half(), reduction="sum")
    assert (sevens.dtype, float(sevens)) == (torch.float16, 63.0)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int16, torch.int8, torch.uint8])
def test_narrow_labels(dtype: torch.dtype) -> None:
    """A vocabulary wider than the dtype of the labels; and -100, which is 156 in eight bits without a sign."""
    values = torch.full((300,), NAN)
    values[[5, 60, 100]] = torch.tensor([1.0, 2.0, 3.0])
    z = drawn(3, 300)
    y = torch.tensor([5, 60, 100])
    assert torch.equal(number_token_loss(z, y.to(dtype), values), number_token_loss(z, y, values))
    if dtype == torch.uint8:
        values[156] = 9.0
        y = torch.tensor([5, 60, 156])
        each = [number_token_loss(z, labels, values, reduction="none") for labels in (y.to(dtype), y)]
        assert each[0][2] > 0
        assert torch.equal(*each)


def test_layouts_of_memory() -> None:
    expected = number_token_loss(Z, Y, WIDE, reduction="none")
    wide = drawn(10, 4, 7, seed=6)
    wide[:, :, ::2] = Z.permute(2, 1, 0).new_zeros(10, 4, 4)
    strided = wide[:, :, 1:7:2]
    strided.copy_(Z.permute(2, 1, 0))
    leaf = strided.permute(2, 1, 0).detach().requires_grad_()
    assert not leaf.is_contiguous()
    found = number_token_loss(leaf, Y.T.contiguous().T, WIDE.repeat_interleave(2)[::2], reduction="none")
    assert torch.equal(found, expected)
    twin = Z.clone().requires_grad_()
    value = number_token_loss(twin, Y, WIDE)
    assert torch.equal(slopes(number_token_loss(leaf, Y, WIDE), leaf)[0], slopes(value, twin)[0])
    row = Z[0, 0].clone().requires_grad_()
    shared = number_token_loss(row.expand(3, 4, 10), Y, WIDE, reduction="sum")
    apart = number_token_loss(row.repeat(3, 4, 1), Y, WIDE, reduction="sum")
    torch.testing.assert_close(slopes(shared, row), slopes(apart, row))


def test_inputs_stay_as_they_are() -> None:
    given = Z.clone().requires_grad_(), Y.clone(), WIDE.clone()
    for options in SETTINGS:
        number_token_loss(*given, **options).backward()
    assert torch.equal(given[0].detach(), Z)
    assert torch.equal(given[1], Y)
    torch.testing.assert_close(given[2], WIDE, rtol=0, atol=0, equal_nan=True)


def test_no_copy_of_the_number_positions() -> None:
    """The one tensor as large as the logits is their gradient; beside it, a few pieces."""
    vocab, rows = 5000, 2000
    values = torch.full((vocab,), NAN)
    values[:10] = torch.arange(10.0)
    leaf = torch.zeros(rows, vocab, requires_grad=True)
    labels = torch.arange(rows) % 10
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        number_token_loss(leaf, labels, values).backward()
    sizes = sorted((e.self_cpu_memory_usage for e in profile.events() if e.self_cpu_memory_usage > 0), reverse=True)
    dense = 4 * rows * vocab
    assert sizes[0] == dense
    assert sum(size >= dense / 2 for size in sizes) == 1
    assert sizes[1] <= 4 * number_rows._PIECE_ON_CPU


# ---- surroundings ------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # both by the compiler itself
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_compiled_graphs_and_surroundings_change_nothing() -> None:
    def value(z: Tensor) -> Tensor:
        return number_token_loss(2 * z / 2, Y, VALUES)

    torch._dynamo.reset()
    leaf = Z.float().requires_grad_()
    expected = value(leaf)
    (slope,) = slopes(expected, leaf)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = value(leaf)
        assert torch.equal(found, expected)
        assert torch.equal(slopes(found, leaf)[0], slope)
    found = torch.compile(value, backend="aot_eager")(leaf)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(slopes(found, leaf)[0], slope)
    with torch.device("meta"):
        assert torch.equal(value(leaf), expected)
        assert torch.equal(slopes(value(leaf), leaf)[0], slope)
    with torch.inference_mode():
        assert torch.equal(value(leaf), expected)


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")  # torch.func itself
@a_few_settings
def test_transforms_of_functions(options: dict[str, Any]) -> None:
    def value(z: Tensor) -> Tensor:
        return number_token_loss(z, Y, WIDE, **options)

    leaf = Z.clone().requires_grad_()
    (slope,) = slopes(value(leaf), leaf)
    torch.testing.assert_close(torch.func.grad(value)(Z), slope)
    along = drawn(3, 4, 10, seed=7)
    torch.testing.assert_close(torch.func.jvp(value, (Z,), (along,))[1], (slope * along).sum())
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(Z, along)
        tangent = torch.autograd.forward_ad.unpack_dual(value(dual)).tangent
    torch.testing.assert_close(tangent, (slope * along).sum())


def test_it_trains() -> None:
    """From noise to the right numbers, by the loss alone."""
    z = drawn(6, 10, seed=8).requires_grad_()
    y = torch.tensor([1, 2, 4, 6, 7, 8])
    optimiser = torch.optim.Adam([z], lr=0.3)
    for _ in range(300):
        optimiser.zero_grad()
        number_token_loss(z, y, WIDE, scaling="rank").backward()
        optimiser.step()
    torch.testing.assert_close(WIDE[z.argmax(-1)], WIDE[y])


# ---- bad input ---------------------------------------------------------------------------------------------------

V5 = torch.tensor([1.0, 2.0, 4.0, NAN, NAN])
Z5, Y5 = drawn(2, 5, dtype=torch.float32), torch.tensor([0, 2])


def call(z: Any = Z5, y: Any = Y5, v: Any = V5, **options: Any) -> Callable[[], Tensor]:
    return lambda: number_token_loss(z, y, v, **options)


@pytest.mark.parametrize(
    ("bad", "error", "message"),
    [
        (call(z=[[0.0] * 5]), TypeError, "logits is a list, expected a torch.Tensor"),
        (call(z=Z5.long()), TypeError, "logits has dtype torch.int64, expected a floating dtype"),
        (call(z=Z5[:, :4]), ValueError, r"values have 5 entries, logits shape \(2, 4\).*one value per token"),
        (call(z=torch.zeros(2, 8)), ValueError, "padded beyond the tokenizer, pad the values with NaN"),
        (call(z=torch.tensor(0.0), y=torch.tensor(0)), ValueError, r"values have 5 entries, logits shape \(\)"),
        (call(y=[0, 2]), TypeError, "labels is a list"),
        (call(y=Y5.float()), TypeError, r"labels have dtype torch.float32, expected token ids.*labels.long\(\)"),
        (call(y=Y5 > 1), TypeError, "labels have dtype torch.bool"),
        (call(y=Y5[:1]), ValueError, r"labels have shape \(1,\), expected \(2,\)"),
        (call(y=torch.tensor([0, 5])), ValueError, r"1 ids outside the vocabulary, the first at \(1,\): 5; .*0\.\.4"),
        (call(y=torch.tensor([-1, 0])), ValueError, r"the first at \(0,\): -1; expected 0..4 or ignore_index=-100"),
        (call(y=torch.tensor([-100, 0]), ignore_index=-1), ValueError, r"-100; expected 0..4 or ignore_index=-1"),
        (call(y=torch.tensor([-100, 0]), ignore_index=None), ValueError, r"the first at \(0,\): -100"),
        (call(y=Y5.to("meta")), ValueError, "labels is on meta, logits on cpu, expected one device"),
        (call(ignore_index=0.5), TypeError, "ignore_index is 0.5, expected a whole number"),
        (call(v=[1.0] * 5), TypeError, "values is a list"),
        (call(v=torch.arange(5)), TypeError, "values has dtype torch.int64, expected a floating dtype"),
        (call(v=V5.reshape(1, 5)), ValueError, r"values have shape \(1, 5\), expected \(V,\)"),
        (call(v=V5[:0]), ValueError, r"values have shape \(0,\), expected \(V,\)"),
        (call(v=V5 / 0), ValueError, "values hold inf at token 0, expected finite values, or NaN"),
        (call(v=-V5 / 0), ValueError, "values hold -inf at token 0"),
        (call(v=V5 * NAN), ValueError, "none of the 5 values is a number"),
        (call(v=V5.clone().requires_grad_()), ValueError, r"values require a gradient.*pass values.detach\(\)"),
        (call(v=torch.tensor([3e38, -3e38, 0, 0, NAN])), ValueError, "values reach from -3e.38 to 3e.38, and form"),
        (
            call(v=V5 * 1e19, form="mse"),
            ValueError,
            'values reach from 1e.19 to 4e.19.*use scaling="log" or "rank"',
        ),
        (
            call(form="transport"),
            ValueError,
            "form is 'transport', expected one of 'wasserstein', 'mse', 'mae', 'huber'",
        ),
        (call(over="all"), ValueError, "over is 'all', expected one of 'vocabulary', 'numbers'"),
        (
            call(scaling="sqrt"),
            ValueError,
            "scaling is 'sqrt', expected one of 'absolute', 'symlog', 'log', 'rank', 'squash'",
        ),
        (call(squash=5.0, scaling="symlog"), ValueError, 'squash=5.0 and scaling="symlog" each bound the distances'),
        (call(squash=1.0), ValueError, "squash is 1.0, expected a finite factor above 1"),
        (call(squash=INF), ValueError, "squash is inf"),
        (call(squash=NAN), ValueError, "squash is nan"),
        (call(squash="9"), TypeError, "squash is a str"),
        (call(squash=5.0, form="mse"), ValueError, 'squash=5.0 maps distances.*form="mse" has none'),
        (call(scaling="squash", form="mae"), ValueError, 'squash=9.0 maps distances.*form="mae" has none'),
        (call(delta=0.0), ValueError, "delta is 0.0, expected a finite number above 0"),
        (call(delta=None), TypeError, "delta is a NoneType"),
        (call(delta=2.0), ValueError, 'delta=2.0 is where form="huber" becomes linear, and form="wasserstein" has no'),
        (call(delta=0.5, form="mse"), ValueError, 'form="mse" has no such place; leave delta at 1.0, or use form="hub'),
        (call(text=-1.0), ValueError, "text is -1.0, expected a finite number above 0"),
        (call(text=True), TypeError, "text is a bool"),
        (call(text=3.0, over="numbers"), ValueError, 'text=3.0 is charged.*over="numbers" leaves out; leave text at N'),
        (
            call(sample_weight=torch.full((2,), 3e38), reduction="sum"),
            ValueError,
            'reduction="sum" is inf, expected at most 3.4.*, the largest torch.float32; give smaller weights',
        ),
        (call(text=1e39), ValueError, r"the loss of position \(0,\) exceeds the range of its dtype"),
        (call(reduction="median"), ValueError, "reduction is 'median'"),
        (call(sample_weight=[1.0, 1.0]), TypeError, "sample_weight is a list"),
        (call(sample_weight=torch.ones(1)), ValueError, r"sample_weight has shape \(1,\), expected \(2,\)"),
        (call(sample_weight=torch.ones(2).cfloat()), TypeError, "sample_weight has dtype torch.complex64"),
        (call(sample_weight=torch.tensor([1.0, -2.0])), ValueError, "sample_weight holds -2.0 at a number"),
        (call(sample_weight=torch.tensor([NAN, 1.0])), ValueError, "sample_weight holds nan"),
        (call(sample_weight=torch.ones(2, device="meta")), ValueError, "sample_weight is on meta, logits on cpu"),
        (call(z=Z5 * NAN), ValueError, "logits holds 10 NaN or .inf, the first nan"),
        (call(z=Z5.index_fill(1, torch.tensor([4]), INF)), ValueError, "logits holds 2 NaN or .inf, the first inf"),
        (call(z=Z5 - INF), ValueError, r"position \(0,\) are -inf for all tokens that count, expected a finite one"),
        (call(z=Z5[1] - INF, y=Y5[1]), ValueError, r"the logits of position \(\) are -inf"),
    ],
)
def test_bad_input(bad: Callable[[], Tensor], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        bad()
