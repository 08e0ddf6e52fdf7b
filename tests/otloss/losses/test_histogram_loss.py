"""Histogram losses against integrals, plain formulas and finite differences."""

import itertools
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.integrate import quad
from scipy.stats import norm

from otloss import cdf_distance, histogram_loss, nn
from otloss.losses import histogram_labels, histogram_mean
from tests.errors import raising
from tests.otloss.draws import normal
from tests.otloss.oracles import as_double

CENTRES = np.array([0.0, 1.0, 4.0, 6.0, 7.0])
EDGES = np.array([-0.5, 0.5, 2.5, 5.0, 6.5, 7.5])  # midway, and half a gap further at both ends
FORMS = ("two_hot", "one_hot", "gaussian")


@given(st.floats(0.0, 7.0), st.sampled_from(FORMS), st.booleans())
def test_labels_are_their_definition(value: float, form: str, by_edges: bool) -> None:
    centres = (EDGES[1:] + EDGES[:-1]) / 2 if by_edges else CENTRES
    if form == "two_hot":
        value = float(np.clip(value, centres[0], centres[-1]))
    options: dict[str, Any] = {"sigma": 0.8} if form == "gaussian" else {}
    actual = histogram_labels(as_double(np.array(value)), as_double(EDGES if by_edges else CENTRES), 5,
                             encoding=form, **options).numpy()  # fmt: skip
    assert actual.sum() == pytest.approx(1, abs=1e-12)
    if form == "two_hot":
        assert actual @ centres == pytest.approx(value, abs=1e-12)
        assert np.ptp(np.flatnonzero(actual)) <= 1
    elif form == "one_hot":
        k = int(actual.argmax())
        assert actual[k] == 1
        assert EDGES[k] <= value <= EDGES[k + 1]
    else:
        mass = np.array([quad(norm(value, 0.8).pdf, a, b)[0] for a, b in pairwise(EDGES)])
        np.testing.assert_allclose(actual, mass / mass.sum(), atol=1e-12)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("power", "bins"), [(1, CENTRES), (2, EDGES)], ids=["centres", "edges"])
def test_is_the_distance_to_the_labels(form: str, power: int, bins: np.ndarray) -> None:
    z, values = normal(9, 5, seed=0), torch.linspace(0, 6.9, 9, dtype=torch.float64)
    centres = as_double((bins[1:] + bins[:-1]) / 2 if bins.size == 6 else bins)
    labels = histogram_labels(values, as_double(bins), 5, encoding=form)
    actual = histogram_loss(z, values, as_double(bins), encoding=form, power=power, reduction="none")
    torch.testing.assert_close(actual, cdf_distance(z.softmax(-1), labels, centres, power=power))
    torch.testing.assert_close(histogram_loss(z, labels, as_double(bins), power=power, reduction="none"), actual)
    mixed = histogram_loss(z, values, as_double(bins), encoding=form, power=power, cross_entropy=0.5)
    nll = -(labels * z.log_softmax(-1)).sum(-1)
    torch.testing.assert_close(mixed, (actual + 0.5 * nll).mean())
    leaf = z[:3].requires_grad_()
    assert torch.autograd.gradgradcheck(lambda z: histogram_loss(z, values[:3], as_double(bins), encoding=form), leaf)


@pytest.mark.parametrize("sigma", [1e-4, 0.3, 1e4])
def test_gaussian_tails_keep_their_relative_accuracy(sigma: float) -> None:
    edges = np.arange(21.0)
    for value in (0.0, 3.3, 16.7, 20.0):
        actual = histogram_labels(as_double(np.array(value)), as_double(edges), 20, encoding="gaussian", sigma=sigma)
        by_tails = norm.sf(edges, value, sigma), norm.cdf(edges, value, sigma)
        mass = np.where(edges[:-1] >= value, -np.diff(by_tails[0]), np.diff(by_tails[1]))
        np.testing.assert_allclose(actual, mass / mass.sum(), rtol=1e-8, atol=1e-300)


def test_means_of_histograms() -> None:
    z, bins = normal(3, 4, 5, seed=3), as_double(CENTRES)
    torch.testing.assert_close(histogram_mean(z, bins), z.softmax(-1) @ bins)
    middles = as_double((EDGES[1:] + EDGES[:-1]) / 2)
    torch.testing.assert_close(histogram_mean(z, as_double(EDGES)), z.softmax(-1) @ middles)
    values = torch.tensor([0.2, 5.5, 7.0], dtype=torch.float64)
    torch.testing.assert_close(histogram_mean(histogram_labels(values, bins, 5).log(), bins), values)
    assert histogram_mean(torch.tensor([[-torch.inf, 0.0, -torch.inf, -torch.inf, 1e30]]), bins).item() == 7.0


@pytest.mark.parametrize(("form", "limits"), [("two_hot", (0, 7)), ("one_hot", (-0.5, 7.5)), ("gaussian", (-0.5, 7.5))])
def test_values_outside_of_the_valid_range(form: str, limits: tuple[float, float]) -> None:
    z, bins = normal(2, 5, seed=6).requires_grad_(), as_double(CENTRES)
    beyond, ends = as_double(np.array([-1.0, 7.6])), as_double(np.array(limits))
    told = rf'2 values outside of \[{limits[0]}, {limits[1]}\], .* \(0,\) is -1. .*"clamp"'
    with pytest.raises(ValueError, match=told):
        histogram_loss(z, beyond, bins, encoding=form)
    given: dict[str, Any] = {"encoding": form, "outside": "clamp"}
    torch.testing.assert_close(*(histogram_loss(z, v, bins, reduction="none", **given) for v in (beyond, ends)))
    torch.testing.assert_close(*(histogram_labels(v, bins, 5, **given) for v in (beyond, ends)))
    if form != "one_hot":
        leaf = torch.stack([beyond[0], ends.mean()]).requires_grad_()
        gradient = torch.autograd.grad(histogram_loss(z, leaf, bins, **given), leaf)[0]
        assert (gradient == 0).tolist() == [True, False]


@pytest.mark.parametrize("dtypes", [(torch.float64, torch.float32), (torch.float32, torch.bfloat16)])
def test_the_ends_of_bins_in_another_dtype_are_within_them(dtypes: tuple[torch.dtype, torch.dtype]) -> None:
    for low, high in itertools.combinations(range(-20, 21, 3), 2):
        ends, count = torch.tensor([low / 10, high / 10], dtype=torch.float64), high - low + 1
        bins = torch.linspace(low / 10, high / 10, count, dtype=torch.float64)
        found = histogram_labels(ends.to(dtypes[0]), bins.to(dtypes[1]), count).double()
        assert min(found[0, 0], found[1, -1]) > 0.95
        with pytest.raises(ValueError, match="1 values outside of"):
            histogram_labels((ends + torch.tensor([0.0, 0.05])).to(dtypes[0]), bins.to(dtypes[1]), count)


def test_large_whole_edges_are_exact() -> None:
    edges = torch.arange(11, dtype=torch.float64) * 1e8
    values = torch.tensor([99_999_999, 100_000_000, 899_999_980], dtype=torch.float64)
    for bins in (edges, edges.float(), edges.long()):
        for target in (values, values.long()):
            assert histogram_labels(target, bins, 10, encoding="one_hot").argmax(-1).tolist() == [0, 1, 8]
        with pytest.raises(ValueError, match="1 values outside of"):
            histogram_labels(values + torch.tensor([0, 0, 100_000_040]), bins, 10, encoding="one_hot")


@pytest.mark.parametrize(
    ("value", "edges", "expected"),
    [
        (torch.tensor(256.0, dtype=torch.bfloat16), torch.arange(1001.0), 256),
        (torch.tensor(0.5, dtype=torch.bfloat16), torch.linspace(0, 1, 1001), 500),
        (torch.tensor(16_777_216.0), torch.arange(16_777_214, 16_777_220, dtype=torch.float64), 2),
        (torch.tensor(259), torch.tensor([256, 258, 260], dtype=torch.bfloat16), 1),
        (torch.tensor(9000.0), torch.linspace(0, 1e4, 11).bfloat16(), 9),
        (torch.tensor(1e4), torch.linspace(0, 1e4, 11).bfloat16(), 9),
        (torch.tensor(9000), torch.linspace(0, 1e4, 11).bfloat16(), 9),
        (torch.tensor(0.4995), torch.tensor([0, 0.25, 0.5, 0.75], dtype=torch.bfloat16), 1),
        (torch.tensor(39_999.99, dtype=torch.float64), torch.tensor([0, 19_999.99, 39_999.99, 59_999.99]), 2),
        (torch.tensor(19_999_999), torch.tensor([0.5, 2e7, 3e7]), 0),
        (torch.tensor(0.3, dtype=torch.float64), torch.tensor([0.1, 0.2, 0.3, 0.4]), 2),
        (torch.tensor(50_000.249, dtype=torch.float64), 50_000 + torch.arange(40, dtype=torch.float64) / 4, 0),
        (torch.tensor(50_000.249, dtype=torch.float64), 50_000 + torch.arange(40.0) / 4, 0),
        (torch.tensor(1.0, dtype=torch.float64), torch.arange(11.0) * 0.2, 5),
    ],
)
def test_narrow_dtypes_do_not_round_what_is_exact(value: torch.Tensor, edges: torch.Tensor, expected: int) -> None:
    labels = histogram_labels(value[None], edges, len(edges) - 1, encoding="one_hot")
    assert int(labels.argmax(-1)) == expected


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_functional_transforms_where_dtypes_differ(dtype: torch.dtype) -> None:
    bins, target = torch.linspace(0, 1, 5, dtype=dtype), torch.tensor([0.2, 0.7], dtype=torch.float64)
    z = normal(2, 5, seed=1)
    (expected,) = torch.autograd.grad(histogram_loss(z.requires_grad_(), target, bins), z)
    torch.testing.assert_close(torch.func.grad(lambda z: histogram_loss(z, target, bins))(z.detach()), expected)


def test_a_module_of_float32_takes_the_ends_of_its_bins_in_float64() -> None:
    for unit in (0.1, 19_999.99):
        loss = nn.HistogramLoss(torch.arange(8.0) * unit).double()
        target = torch.tensor([1, 4, 7], dtype=torch.float64) * unit
        assert float(loss(torch.zeros(3, 8), target)) == pytest.approx(float(loss(torch.zeros(3, 8), target.float())))


def test_values_at_edges_of_another_dtype_begin_their_bin() -> None:
    kinds, tenths = (torch.float64, torch.float32, torch.float16, torch.bfloat16), torch.arange(11).double() / 10
    for of_values, of_edges in itertools.product(kinds, kinds):
        labels = histogram_labels(tenths[:10].to(of_values), tenths.to(of_edges), 10, encoding="one_hot")
        torch.testing.assert_close(labels.double(), torch.eye(10).double())


def test_dtypes_shapes_and_weights() -> None:
    bins = torch.tensor([0, 10, 20])
    z, ages = torch.zeros(2, 4, 3, dtype=torch.bfloat16), torch.tensor([[0, 5, 10, 20], [1, 2, 3, 19]])
    values = histogram_loss(z, ages, bins, reduction="none")
    assert (values.dtype, values.shape) == (torch.bfloat16, (2, 4))
    assert histogram_loss(z, ages.double(), bins).dtype == torch.float64
    weight, z = torch.arange(8.0).reshape(2, 4), z.float()
    wide = histogram_loss(z, ages, bins, reduction="none")
    weighted = histogram_loss(z, ages, bins, sample_weight=weight)
    torch.testing.assert_close(weighted, (wide * weight).sum() / weight.sum())
    torch.testing.assert_close(histogram_loss(z[0, 3], ages[0, 3], bins), wide[0, 3])
    assert histogram_loss(z[:0], ages[:0], bins, reduction="none").shape == (0, 4)
    since_1970 = torch.tensor([1_700_000_000, 1_700_000_010, 1_700_000_020])  # float64 inside
    actual = histogram_loss(z[0], since_1970[0] + ages[0], since_1970)
    torch.testing.assert_close(actual, histogram_loss(z[0], ages[0], bins))


Z, V, B = torch.zeros(2, 3), torch.tensor([1.0, 2.0]), torch.tensor([0.0, 1.0, 2.0])
test_bad_input = raising(
    ({"bins": B.flip(0)}, r"bins\[0\] is 2 and bins\[1\] is 1, expected strictly increasing"),
    ({"bins": B.clone().requires_grad_()}, "bins require a gradient"),
    ({"target": V[:, None]}, r"target has shape \(2, 1\), expected values \(2,\).*squeeze\(-1\)"),
    ({"target": torch.ones(2, 3)}, "soft labels of row 0 sum to 3"),
    ({"sigma": 1.0}, "sigma=1.0 is given with encoding='two_hot'"),
    ({"encoding": "gaussian", "sigma": 1e9}, r"sigma is 1000000000.0, so wide .* from -0.5 to 2.5"),
    ({"target": V.clone().requires_grad_(), "encoding": "one_hot"}, "target requires a gradient"),
    call=lambda change: histogram_loss(**({"logits": Z, "target": V, "bins": B} | change)),
)
