"""Soft labels and threshold losses: the numbers of dlordinal and coral-pytorch, definitions, errors."""

import math

import numpy as np
import pytest
import torch
from scipy import stats

from otloss.losses import cumulative_log_probabilities, ordinal_loss, soft_labels, threshold_loss
from tests.errors import raising

KINDS = ("triangular", "binomial", "beta", "poisson")


def table(classes: int, kind: str, **settings: float) -> np.ndarray:
    return soft_labels(torch.arange(classes), classes, kind, dtype=torch.float64, **settings).numpy()


def test_five_classes_have_the_numbers_of_dlordinal() -> None:
    """dlordinal 2.7.0. Its triangles differ at the ends, its beta distributions where it rounds their parameters."""
    inner = [[0.01, 0.98, 0.01, 0, 0], [0, 0.01, 0.98, 0.01, 0], [0, 0, 0.01, 0.98, 0.01]]
    np.testing.assert_allclose(table(5, "triangular", neighbour=0.01)[1:4], inner, atol=1e-12)
    np.testing.assert_allclose(table(5, "triangular", neighbour=0.01)[0], [0.99, 0.01, 0, 0, 0], atol=1e-12)
    binomial = [[0.6561, 0.2916, 0.0486, 0.0036, 0.0001], [0.2401, 0.4116, 0.2646, 0.0756, 0.0081],
                [0.0625, 0.25, 0.375, 0.25, 0.0625]]  # fmt: skip
    np.testing.assert_allclose(table(5, "binomial")[:3], binomial, atol=1e-12)
    beta = [[0.1630623060, 0.6740152120, 0.1598546522, 0.0030671502, 6.797e-07],
            [0.0005973937, 0.1630460474, 0.6727131177, 0.1630460474, 0.0005973937]]  # fmt: skip
    np.testing.assert_allclose(table(5, "beta")[1:3], beta, atol=1e-8)


@pytest.mark.parametrize("classes", [2, 3, 7, 15])
def test_every_label_is_the_mode_of_a_distribution(classes: int) -> None:
    for kind in KINDS:
        rows = table(classes, kind)
        np.testing.assert_allclose(rows.sum(1), 1, atol=1e-12)
        assert (rows >= 0).all()
        for y, row in enumerate(rows):
            assert row.argmax() == y
            assert np.sort(row)[-2] < row[y] - 1e-3
            np.testing.assert_array_equal(np.sort(row[: y + 1]), row[: y + 1], err_msg=kind)
            np.testing.assert_array_equal(np.sort(row[y:])[::-1], row[y:], err_msg=kind)
        if kind != "poisson":
            np.testing.assert_allclose(rows, rows[::-1, ::-1], atol=1e-9)
    poisson = stats.poisson(1.5).pmf(np.arange(classes))
    np.testing.assert_allclose(table(classes, "poisson")[1], poisson / poisson.sum())


def test_moments_of_the_beta_distribution_and_labels_without_neighbours() -> None:
    beta = stats.beta(0.25 * 26, 0.75 * 26)
    np.testing.assert_allclose((beta.mean(), beta.std()), (1 / 4, 1 / 12))
    np.testing.assert_allclose(table(6, "beta")[1], np.diff(beta.cdf(np.arange(7) / 6)), atol=1e-12)
    grades = torch.randint(3, (6, 4))
    torch.testing.assert_close(soft_labels(grades, 3, neighbour=0.0), torch.nn.functional.one_hot(grades, 3).float())
    torch.testing.assert_close(soft_labels(grades.to(torch.uint16), 3), soft_labels(grades, 3))


def test_distributions_of_a_thousand_classes() -> None:
    """Their factors are beyond float64: 1,100 over 550, exp(1,100)."""
    y, k = np.arange(1100)[:, None], np.arange(1100)
    np.testing.assert_allclose(table(1100, "binomial"), stats.binom.pmf(k, 1099, (y + 0.5) / 1100), atol=1e-11)
    poisson = stats.poisson.pmf(k, y + 0.5)
    np.testing.assert_allclose(table(1100, "poisson"), poisson / poisson.sum(1, keepdims=True), atol=1e-11)


@pytest.mark.parametrize("kind", ["all", "immediate"])
def test_logits_far_from_0_keep_the_digits_of_their_differences(kind: str) -> None:
    z = torch.randint(-16, 16, (50, 5), generator=torch.Generator().manual_seed(0)) / 8
    z[:, 3] = -torch.inf
    target = torch.arange(50) % 3
    near, far = (t.clone().requires_grad_() for t in (z, z + 2.0**17))
    values = [threshold_loss(t, target, kind=kind, reduction="none") for t in (near, far)]
    torch.testing.assert_close(*values)
    torch.testing.assert_close(*(torch.autograd.grad(v.sum(), t)[0] for v, t in zip(values, (near, far), strict=True)))


@pytest.mark.parametrize("size", [1e-44, 1e38, 3e38])
def test_only_the_ratios_of_weights_count_whatever_their_sum(size: float) -> None:
    logits, target, weights = torch.arange(20.0).reshape(5, 4).cos(), torch.arange(5) % 4, torch.full((5,), size)
    for loss in (ordinal_loss, threshold_loss):
        torch.testing.assert_close(loss(logits, target, sample_weight=weights), loss(logits, target))


def test_threshold_losses_at_large_log_odds_and_periods_in_float64() -> None:
    """Softplus is linear from 20 on; a period that float32 does not have."""
    logits = torch.tensor([[20.9, 0.0]], dtype=torch.float64)
    value = threshold_loss(logits, torch.tensor([0]))
    assert value.item() == pytest.approx(math.log1p(math.exp(-20.9)), rel=1e-12)
    period = 6.504132041351429
    far = torch.tensor([[0.0, 0, 0, 0, 0, 900]], dtype=torch.float64)
    value = ordinal_loss(far, torch.tensor([0]), circular=True, period=period, power=1)
    assert value.item() == pytest.approx(period - 5, rel=1e-12)


GRADES = torch.tensor([0, 3])
test_bad_input = raising(
    (lambda: soft_labels(GRADES, 4, "beta", neighbour=0.1), r"neighbour=0\.1 is given with kind='beta'"),
    (lambda: soft_labels(GRADES, 4, neighbour=0.3), "from 0 to 2/9"),
    (lambda: soft_labels(GRADES, 3), "values out of range"),
)
SCORES = torch.tensor([0.5, -1.0, 3.0, 0.2], dtype=torch.float64)
BIASES = torch.tensor([1.0, 0.2, -0.7, -2.0], dtype=torch.float64)
TARGETS = torch.tensor([2, 0, 4, 3])


def test_all_thresholds_are_coral() -> None:
    """The numbers come from coral_loss in coral-pytorch 1.4.0, where P(y > k) = sigmoid(score + bias_k)."""
    logits = cumulative_log_probabilities(SCORES + BIASES[0], (-BIASES).diff().log())
    expected = torch.tensor([1.4041514742325547, 1.2806212274677309, 0.4669104131964259, 1.9033523144441646]).double()
    torch.testing.assert_close(threshold_loss(logits, TARGETS, reduction="none"), expected)


@pytest.mark.parametrize("kind", ["all", "immediate"])
def test_terms_of_any_distribution(kind: str) -> None:
    logits = torch.randn(6, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0), requires_grad=True)
    y = torch.tensor([0, 1, 2, 3, 4, 2])
    F = logits.softmax(-1).cumsum(-1)
    expected = []
    for row, label in enumerate(y.tolist()):
        thresholds = range(4) if kind == "all" else [k for k in (label - 1, label) if 0 <= k < 4]
        expected.append(-sum((F[row, k] if k >= label else 1 - F[row, k]).log() for k in thresholds))
    actual = threshold_loss(logits, y, kind=kind, reduction="none")
    torch.testing.assert_close(actual, torch.stack(expected))  # type: ignore[arg-type]
    soft = torch.nn.functional.one_hot(y, 5).double() * 0.7 + 0.06
    by_label = torch.stack([threshold_loss(logits, torch.full((6,), k), kind=kind, reduction="none") for k in range(5)])
    torch.testing.assert_close(threshold_loss(logits, soft, kind=kind, reduction="none"), (soft * by_label.T).sum(-1))
    assert torch.autograd.gradcheck(lambda z: threshold_loss(z, y, kind=kind), (logits,))
    assert torch.autograd.gradgradcheck(lambda z: threshold_loss(z, y, kind=kind), (logits,))


def test_all_thresholds_are_a_proper_score_with_accurate_tails() -> None:
    P = torch.tensor([0.1, 0.2, 0.4, 0.3], dtype=torch.float64)
    logits = P.log().requires_grad_()
    gradient = torch.autograd.grad(threshold_loss(logits, P), logits)[0]
    torch.testing.assert_close(gradient, torch.zeros(4).double())
    sure = torch.tensor([0.0, -40.0, -60.0])
    torch.testing.assert_close(threshold_loss(sure, torch.tensor(0)), torch.tensor(-40.0).exp() * 1)


def test_excluded_classes_and_errors() -> None:
    z = torch.tensor([[-torch.inf, 0.3, -torch.inf, 0.1]], requires_grad=True)
    threshold_loss(z, torch.tensor([2])).backward()
    assert torch.isfinite(z.grad).all()
    for y, options, message in (
        (0, {}, r"the loss of row 0 .* is infinite"), (1, {"kind": "some"}, "kind is 'some'"), (4, {}, "out of range"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=message):
            threshold_loss(z, torch.tensor([y]), **options)
