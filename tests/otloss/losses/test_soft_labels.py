"""Soft labels: the tables of dlordinal where the formulas agree, scipy's distributions, the mode, the errors."""

import numpy as np
import pytest
import torch
from scipy import stats

from otloss import ordinal_loss
from otloss.losses import soft_labels
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


def test_moments_of_the_beta_distribution() -> None:
    beta = stats.beta(0.25 * 26, 0.75 * 26)
    np.testing.assert_allclose((beta.mean(), beta.std()), (1 / 4, 1 / 12))
    np.testing.assert_allclose(table(6, "beta")[1], np.diff(beta.cdf(np.arange(7) / 6)), atol=1e-12)


def test_they_are_targets_of_the_loss() -> None:
    logits, grades = torch.randn(6, 4, 3, requires_grad=True), torch.randint(3, (6, 4))
    ordinal_loss(logits, soft_labels(grades, 3, "beta"), cross_entropy=0.2).backward()
    assert torch.isfinite(logits.grad).all()
    assert logits.grad.abs().sum() > 0
    torch.testing.assert_close(soft_labels(grades, 3, neighbour=0.0), torch.nn.functional.one_hot(grades, 3).float())


GRADES = torch.tensor([0, 3])


test_bad_input = raising(
    (lambda: soft_labels(GRADES, 4, "normal"), "kind is 'normal', expected one of"),
    (lambda: soft_labels(GRADES, 4, "beta", neighbour=0.1), r"neighbour=0\.1 is given with kind='beta'"),
    (lambda: soft_labels(GRADES, 4, neighbour=0.3), "from 0 to 2/9"),
    (lambda: soft_labels(GRADES, 3), "values out of range"),
    (lambda: soft_labels(GRADES.float(), 4), TypeError, "dtype torch.float32"),
)
