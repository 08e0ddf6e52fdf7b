"""Boosting objectives: derivatives by differences and autograd, bounds by eigenvalues, kernels by their reference."""

import numpy as np
import pytest
import torch

from otloss.boosting import lightgbm_metric, lightgbm_objective, xgboost_metric, xgboost_objective
from otloss.boosting.derivatives import Curvature, curvature, gradients_in_numpy, values_in_numpy
from tests.otloss.boosting import boosting_cases as cases
from tests.otloss.boosting.boosting_cases import LOSSES, NONE, K, make, scores_and_labels, spec, torch_loss


@pytest.mark.parametrize("name", LOSSES)
def test_values_are_the_definition_and_gradients_their_differences(name: str) -> None:
    loss = make(**LOSSES[name])
    z, y = scores_and_labels()
    expected = [torch_loss(torch.tensor(a), int(b), LOSSES[name]).item() for a, b in zip(z, y, strict=True)]
    by_class = loss.class_weights[y.astype(int)]
    np.testing.assert_allclose(by_class * values_in_numpy(z, y, loss=loss), expected, atol=1e-12, rtol=1e-10)
    weights = np.random.default_rng(1).uniform(0, 2, size=len(y))
    gradient, _ = gradients_in_numpy(z, y, weights, loss=loss, curvature=spec(loss))
    step = 1e-5
    for k in range(K):
        move = step * np.eye(K)[k]
        difference = (values_in_numpy(z + move, y, loss=loss) - values_in_numpy(z - move, y, loss=loss)) / (2 * step)
        np.testing.assert_allclose(gradient[:, k], weights * by_class * difference, atol=3e-9, rtol=1e-6)
    assert np.abs(gradient).max() > 0.1
    gradient, _ = gradients_in_numpy(*scores_and_labels(3000), NONE, loss=loss, curvature=spec(loss))
    assert 0.2 * loss.largest_gradient < np.abs(gradient).max() <= loss.largest_gradient


@pytest.mark.parametrize("seed", [0, 3])
def test_the_bound_holds_without_its_clamp_for_any_cost(seed: int) -> None:
    """And no smaller multiple of it does: somewhere it is within a factor of two."""
    classes = 2 + seed
    settings = {"cost": np.random.default_rng(seed).exponential(size=(classes, classes)) ** 3}
    loss = make(classes, **settings)
    assert spec(loss) == Curvature(1.0, 2.0, pytest.approx(0.01 * settings["cost"].max() / (classes - 1)))
    z, y = scores_and_labels(200, classes, seed)
    _, bound = gradients_in_numpy(z, y, NONE, loss=loss, curvature=Curvature(1.0, 2.0, 0.0))
    ratios = []
    for row, label, diagonal in zip(z, y, bound, strict=True):
        exact = torch.autograd.functional.hessian(
            lambda s, y=int(label): torch_loss(s, y, settings), torch.tensor(row)
        ).numpy()
        assert np.linalg.eigvalsh(np.diag(diagonal) - exact).min() >= -1e-12 * np.abs(exact).max() - 1e-15
        if np.abs(row).max() < 5:  # what is left of certain rows is rounding
            root = np.diag(1 / np.sqrt(diagonal))
            ratios.append(np.linalg.eigvalsh(root @ exact @ root).max())
    assert 0.5 <= max(ratios) <= 1 + 1e-9


@pytest.mark.parametrize("x", [None, cases.VALUES])
def test_at_power_2_the_hessian_is_twice_the_diagonal_of_gauss_newton(x: np.ndarray | None) -> None:
    loss = make(x=x)
    z, y = scores_and_labels()
    _, actual = gradients_in_numpy(z, y, NONE, loss=loss, curvature=spec(loss))
    gaps = torch.tensor(loss.gaps)
    for row, diagonal in zip(z, actual, strict=True):
        J = torch.autograd.functional.jacobian(lambda s: s.softmax(0).cumsum(0)[:-1], torch.tensor(row))
        expected = 4 * (gaps[:, None] * J**2).sum(0)
        np.testing.assert_allclose(diagonal, expected.clamp(min=0.01 * float(gaps.mean())), rtol=1e-9)
    assert (actual > 1.01 * spec(loss).least).mean() > 0.2


@pytest.mark.parametrize("name", ["power 2", "power 1", "a cost and cross-entropy"])
def test_one_score_for_two_classes(name: str) -> None:
    settings = dict(LOSSES[name])
    if "cost" in settings:
        settings["cost"] = cases.COST[:2, :2]
    margins, y = np.linspace(-6, 6, 25), np.tile([0.0, 1.0], 13)[:25]
    for library in (xgboost_objective, lightgbm_objective):
        objective = library(2, interface="sklearn", **settings)
        gradient, hessian = objective(y, margins)
        assert gradient.shape == hessian.shape == (25,)
        assert objective(y, margins[:, None])[0].shape == (25, 1)
        for m, label, g, h in zip(margins, y, gradient, hessian, strict=True):

            def of(s: torch.Tensor, label: int = int(label)) -> torch.Tensor:
                return torch_loss(torch.stack([torch.zeros_like(s), s]), label, settings)

            point = torch.tensor(m, requires_grad=True)
            (exact,) = torch.autograd.grad(of(point), point)
            assert g == pytest.approx(exact.item(), rel=1e-5, abs=1e-7)
            if name == "power 2":
                p = 1 / (1 + np.exp(-m))
                assert h == pytest.approx(max(2 * (p * (1 - p)) ** 2, 0.01), rel=1e-5)
            else:
                assert h >= torch.autograd.functional.hessian(of, torch.tensor(m)).item() * (1 - 1e-6)


@pytest.mark.parametrize("library", ["xgboost", "lightgbm"])
@pytest.mark.parametrize("name", LOSSES)
def test_kernels_equal_their_reference_for_any_number_of_rows_in_any_layout(name: str, library: str) -> None:
    objective = {"xgboost": xgboost_objective, "lightgbm": lightgbm_objective}[library]
    loss = make(**LOSSES[name])
    shape = {"loss": loss, "curvature": curvature(loss, library=library, single=False)}
    for rows in (0, 1, 65, 333):
        z, y = scores_and_labels(rows)
        whole = np.zeros((rows, 2 * K), np.float32 if library == "xgboost" else float)
        whole[:, ::2] = z
        whole.flags.writeable = False
        weights = np.random.default_rng(2).uniform(size=rows)
        for given in (whole[:, ::2], np.asfortranarray(whole[:, ::2])):
            ours = objective(K, interface="sklearn", **LOSSES[name])(y, given, weights)
            for actual, expected in zip(ours, gradients_in_numpy(given, y, weights, **shape), strict=True):
                assert actual.dtype == np.float32
                assert rows < 2 or actual.flags.f_contiguous == (library == "lightgbm")
                np.testing.assert_allclose(actual, expected.astype(np.float32), rtol=3e-7, atol=1e-12)


@pytest.mark.parametrize("scale", [1e2, 1e30])
@pytest.mark.parametrize("name", LOSSES)
def test_large_scores_give_finite_derivatives_and_keep_the_logarithm(name: str, scale: float) -> None:
    z, y = scores_and_labels()
    gradient, hessian = lightgbm_objective(K, interface="sklearn", **LOSSES[name])(y, z * scale)
    assert np.isfinite(gradient).all()
    assert np.isfinite(hessian).all()
    assert (hessian[make(**LOSSES[name]).class_weights[y.astype(int)] > 0] > 0).all()
    metric = xgboost_metric(3, transport=0, cross_entropy=1, interface="sklearn")
    for rows in (1, 40):
        assert metric(np.zeros(rows), np.tile([1e17, 1e17, 0], (rows, 1))) == pytest.approx(np.log(2), rel=1e-12)
        assert metric(np.zeros(rows), np.tile([0, 1e17, 1e17], (rows, 1))) == 1e17


def test_the_metric_is_the_mean_loss_with_weights() -> None:
    z, y = scores_and_labels()
    weights = np.random.default_rng(3).uniform(size=len(y))
    for settings in LOSSES.values():
        lost = np.array([torch_loss(torch.tensor(a), int(b), settings).item() for a, b in zip(z, y, strict=True)])
        expected = (weights * lost).sum() / (weights * make(**settings).class_weights[y.astype(int)]).sum()
        assert xgboost_metric(K, interface="sklearn", **settings)(y, z, weights) == pytest.approx(expected, rel=1e-9)
        P = torch.tensor(z).softmax(-1).numpy()
        by_probabilities = lightgbm_metric(K, interface="sklearn", predictions="probabilities", **settings)
        assert by_probabilities(y, P, weights)[1] == pytest.approx(expected, rel=1e-9)


def test_one_probability_for_two_classes_is_that_of_the_second() -> None:
    for settings, expected in (
        ({}, (0.2**2 + 0.4**2) / 2),
        ({"transport": 0, "cross_entropy": 1}, -(np.log(0.8) + np.log(0.6)) / 2),
    ):
        metric = xgboost_metric(2, predictions="probabilities", interface="sklearn", **settings)
        for shape in ((2,), (2, 1)):
            assert metric([0, 1], np.array([0.2, 0.6]).reshape(shape)) == pytest.approx(expected, rel=1e-12)
