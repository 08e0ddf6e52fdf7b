"""Boosting objectives: derivatives by differences and autograd, bounds by eigenvalues, kernels by their reference."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from otloss.boosting import lightgbm_metric, lightgbm_objective, xgboost_metric, xgboost_objective
from otloss.boosting import rows as rows_module
from otloss.boosting.rows import gradients_in_numpy, values_in_numpy
from tests.otloss.boosting.boosting_cases import (
    COST,
    LOSSES,
    NONE,
    VALUES,
    K,
    make,
    scores_and_labels,
    spec,
    torch_loss,
)

# ---- the derivatives ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", LOSSES)
def test_gradients_are_finite_differences_of_the_loss(name: str) -> None:
    loss = make(**LOSSES[name])
    z, y = scores_and_labels()
    weights = np.random.default_rng(1).uniform(0, 2, size=len(y))
    gradient, _ = gradients_in_numpy(z, y, weights, loss=loss, curvature=spec(loss))

    def total(scores: np.ndarray) -> np.ndarray:
        return weights * loss.class_weights[y.astype(int)] * values_in_numpy(scores, y, loss=loss)

    step = 1e-5
    for k in range(K):
        move = step * np.eye(K)[k]
        difference = (total(z + move) - total(z - move)) / (2 * step)
        np.testing.assert_allclose(gradient[:, k], difference, atol=3e-9, rtol=1e-6)
    assert np.abs(gradient).max() > 0.1


@pytest.mark.parametrize("name", LOSSES)
def test_values_are_the_definition(name: str) -> None:
    loss = make(**LOSSES[name])
    z, y = scores_and_labels()
    expected = [torch_loss(torch.tensor(row), int(label), loss).item() for row, label in zip(z, y, strict=True)]
    weights = loss.class_weights[y.astype(int)]
    np.testing.assert_allclose(weights * values_in_numpy(z, y, loss=loss), expected, atol=1e-12, rtol=1e-10)


@pytest.mark.parametrize("name", LOSSES)
def test_diagonals_against_the_whole_hessian(name: str) -> None:
    loss = make(**LOSSES[name])
    z, y = scores_and_labels()
    exact = np.stack([
        torch.autograd.functional.hessian(lambda s, y=int(label): torch_loss(s, y, loss), torch.tensor(row)).numpy()
        for row, label in zip(z, y, strict=True)
    ])  # fmt: skip
    weights = loss.class_weights[y.astype(int)]
    scale = np.abs(exact).max()
    for library in ("xgboost", "lightgbm"):
        _, bound = gradients_in_numpy(z, y, NONE, loss=loss, curvature=spec(loss, "bound", library=library))
        least = np.linalg.eigvalsh(bound[:, :, None] * np.eye(K) - exact).min()
        assert least >= -1e-12 * scale
    _, absolute = gradients_in_numpy(z, y, NONE, loss=loss, curvature=spec(loss, "absolute"))
    clamp = weights[:, None] * spec(loss).least
    diagonal = np.abs(np.diagonal(exact, axis1=1, axis2=2))
    np.testing.assert_allclose(absolute, np.maximum(diagonal, clamp), atol=1e-12 * scale, rtol=1e-7)
    if loss.transport:
        assert spec(loss).least == pytest.approx(0.01 * loss.transport * loss.furthest / (K - 1))


@pytest.mark.parametrize("seed", [0, 3])
def test_the_bound_holds_without_its_clamp_for_any_cost(seed: int) -> None:
    """And no smaller multiple of it does: somewhere it is within a factor of two."""
    classes = 2 + seed
    loss = make(classes, cost=np.random.default_rng(seed).exponential(size=(classes, classes)) ** 3)
    z, y = scores_and_labels(200, classes, seed)
    chosen = type(spec(loss))(rows_module.BOUND, 1.0, 2.0, 0.0)
    _, bound = gradients_in_numpy(z, y, NONE, loss=loss, curvature=chosen)
    ratios = []
    for row, label, diagonal in zip(z, y, bound, strict=True):
        exact = torch.autograd.functional.hessian(
            lambda s, y=int(label): torch_loss(s, y, loss), torch.tensor(row)
        ).numpy()
        assert np.linalg.eigvalsh(np.diag(diagonal) - exact).min() >= -1e-12 * np.abs(exact).max() - 1e-15
        if np.abs(row).max() < 5:  # what is left of certain rows is rounding
            root = np.diag(1 / np.sqrt(diagonal))
            ratios.append(np.linalg.eigvalsh(root @ exact @ root).max())
    assert 0.5 <= max(ratios) <= 1 + 1e-9


@pytest.mark.parametrize("x", [None, VALUES])
def test_gauss_newton_is_the_diagonal_of_the_squares_curvature(x: np.ndarray | None) -> None:
    loss = make(x=x)
    z, y = scores_and_labels()
    _, ours = gradients_in_numpy(z, y, NONE, loss=loss, curvature=spec(loss, "gauss-newton"))
    gaps = torch.tensor(loss.gaps)
    for row, diagonal in zip(z, ours, strict=True):
        J = torch.autograd.functional.jacobian(lambda s: s.softmax(0).cumsum(0)[:-1], torch.tensor(row))
        expected = 2 * (gaps[:, None] * J**2).sum(0)
        np.testing.assert_allclose(diagonal, expected.clamp(min=0.01 * float(gaps.mean())), rtol=1e-9)
    _, twice = gradients_in_numpy(z, y, NONE, loss=loss, curvature=spec(loss))
    large = ours > 1.01 * spec(loss).least
    np.testing.assert_allclose(twice[large], 2 * ours[large], rtol=1e-12)
    assert large.mean() > 0.2


@pytest.mark.parametrize("name", ["power 2", "power 1", "a cost and cross-entropy"])
def test_one_score_for_two_classes_is_bounded_alike(name: str) -> None:
    settings = dict(LOSSES[name])
    if "cost" in settings:
        settings["cost"] = COST[:2, :2]
    loss = make(2, **settings)
    margins, y = np.linspace(-6, 6, 25), np.tile([0.0, 1.0], 13)[:25]
    for library in (xgboost_objective, lightgbm_objective):
        for hessian in ("auto", "bound", "absolute"):
            objective = library(2, hessian=hessian, interface="sklearn", **settings)
            gradient, bend = objective(y, margins)
            assert gradient.shape == bend.shape == (25,)
            column, _ = objective(y, margins[:, None])
            assert column.shape == (25, 1)
            for m, label, g, h in zip(margins, y, gradient, bend, strict=True):

                def of(s: torch.Tensor, label: int = int(label)) -> torch.Tensor:
                    return torch_loss(torch.stack([torch.zeros_like(s), s]), label, loss)

                point = torch.tensor(m, requires_grad=True)
                (exact_gradient,) = torch.autograd.grad(of(point), point)
                assert g == pytest.approx(exact_gradient.item(), rel=1e-5, abs=1e-7)
                exact = torch.autograd.functional.hessian(of, torch.tensor(m)).item()
                if hessian == "bound":
                    assert h >= exact * (1 - 1e-6)
                if hessian == "absolute":
                    assert h == pytest.approx(max(abs(exact), spec(loss).least), rel=1e-4)


# ---- the kernels and their reference -----------------------------------------------------------------------------


@pytest.mark.parametrize("library", ["xgboost", "lightgbm"])
@pytest.mark.parametrize("name", LOSSES)
def test_kernels_equal_their_reference(name: str, library: str, monkeypatch: pytest.MonkeyPatch) -> None:
    objective = {"xgboost": xgboost_objective, "lightgbm": lightgbm_objective}[library]
    metric = {"xgboost": xgboost_metric, "lightgbm": lightgbm_metric}[library]
    z, y = scores_and_labels(333)
    z = z.astype(np.float32) if library == "xgboost" else np.asfortranarray(z)
    weights = np.random.default_rng(2).uniform(size=333)
    hessians = ["auto", "bound", "absolute"] + ["gauss-newton"] * ("power 2" in name)
    for hessian in hessians:
        f = objective(K, hessian=hessian, interface="sklearn", **LOSSES[name])
        by_kernel = f(y, z, weights)
        with monkeypatch.context() as patch:
            patch.setattr(rows_module, "may_run_on", lambda: False)
            reference = f(y, z, weights)
        for ours, theirs in zip(by_kernel, reference, strict=True):
            assert ours.dtype == theirs.dtype == np.float32
            assert ours.flags.f_contiguous == theirs.flags.f_contiguous == (library == "lightgbm")
            np.testing.assert_allclose(ours, theirs, rtol=3e-7, atol=1e-12)
    f = metric(K, interface="sklearn", **LOSSES[name])
    by_kernel = f(y, z, weights)
    monkeypatch.setattr(rows_module, "may_run_on", lambda: False)
    ours, theirs = (a[1] if library == "lightgbm" else a for a in (by_kernel, f(y, z, weights)))
    assert ours == pytest.approx(theirs, rel=1e-12)


@pytest.mark.parametrize("rows", [0, 1, 32, 65, 1000])
def test_any_number_of_rows_in_any_layout(rows: int) -> None:
    z, y = scores_and_labels(rows)
    objective = xgboost_objective(K, interface="sklearn", cross_entropy=0.2)
    expected = np.stack([np.concatenate(objective(y[i : i + 1], z[i : i + 1]), 1) for i in range(rows)] or [NONE])
    whole = np.zeros((rows, 2 * K))
    whole[:, ::2] = z
    whole.flags.writeable = False
    got = np.concatenate(objective(y, whole[:, ::2]), axis=1)
    np.testing.assert_allclose(got, expected.reshape(got.shape), rtol=3e-7, atol=1e-12)


@pytest.mark.parametrize("scale", [1e2, 1e30])
@pytest.mark.parametrize("name", LOSSES)
def test_large_scores_give_finite_derivatives(name: str, scale: float) -> None:
    z, y = scores_and_labels()
    for hessian in ("auto", "bound", "absolute"):
        objective = lightgbm_objective(K, hessian=hessian, interface="sklearn", **LOSSES[name])
        for answer in objective(y, z * scale):
            assert np.isfinite(answer).all()
        _, bend = objective(y, z * scale)
        weights = make(**LOSSES[name]).class_weights[y.astype(int)]
        assert (bend[weights > 0] > 0).all()


@pytest.mark.parametrize("rows", [1, 40])
def test_cross_entropy_of_large_scores_keeps_the_logarithm(rows: int) -> None:
    metric = xgboost_metric(3, transport=0, cross_entropy=1, interface="sklearn")
    assert metric(np.zeros(rows), np.tile([1e17, 1e17, 0], (rows, 1))) == pytest.approx(np.log(2), rel=1e-12)
    assert metric(np.zeros(rows), np.tile([0, 1e17, 1e17], (rows, 1))) == 1e17


@pytest.mark.parametrize("name", LOSSES)
def test_no_gradient_is_steeper_than_said(name: str) -> None:
    loss = make(**LOSSES[name])
    gradient, _ = gradients_in_numpy(*scores_and_labels(3000), NONE, loss=loss, curvature=spec(loss))
    assert 0.2 * loss.steepest < np.abs(gradient).max() <= loss.steepest


def test_weights_are_repeated_rows() -> None:
    z, y = scores_and_labels(30)
    times = np.random.default_rng(0).integers(0, 4, size=30)
    repeated = np.repeat(np.arange(30), times)
    objective = xgboost_objective(K, interface="sklearn", x=VALUES)
    for weighted, plain in zip(objective(y, z, times), objective(y[repeated], z[repeated]), strict=True):
        sums = np.zeros((30, K))
        np.add.at(sums, repeated, plain)
        np.testing.assert_allclose(weighted, sums, rtol=1e-5, atol=1e-7)
    metric = xgboost_metric(K, interface="sklearn", x=VALUES)
    assert metric(y, z, times) == pytest.approx(metric(y[repeated], z[repeated]), rel=1e-12)


def test_the_metric_is_the_mean_loss_with_weights() -> None:
    z, y = scores_and_labels()
    weights = np.random.default_rng(3).uniform(size=len(y))
    for settings in LOSSES.values():
        loss = make(**settings)
        lost = np.array([torch_loss(torch.tensor(a), int(b), loss).item() for a, b in zip(z, y, strict=True)])
        expected = (weights * lost).sum() / (weights * loss.class_weights[y.astype(int)]).sum()
        assert xgboost_metric(K, interface="sklearn", **settings)(y, z, weights) == pytest.approx(expected, rel=1e-9)
        P = torch.tensor(z).softmax(-1).numpy()
        by_probabilities = lightgbm_metric(K, interface="sklearn", predictions="probabilities", **settings)
        assert by_probabilities(y, P, weights)[1] == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("shape", [(2,), (2, 1)])
def test_one_probability_for_two_classes_is_that_of_the_second(shape: tuple[int, ...]) -> None:
    def mean(**settings: Any) -> float:
        metric = xgboost_metric(2, predictions="probabilities", interface="sklearn", **settings)
        return float(metric([0, 1], np.array([0.2, 0.6]).reshape(shape)))

    assert mean() == pytest.approx((0.2**2 + 0.4**2) / 2, rel=1e-12)
    assert mean(power=1) == pytest.approx((0.2 + 0.4) / 2, rel=1e-12)
    assert mean(transport=0, cross_entropy=1) == pytest.approx(-(np.log(0.8) + np.log(0.6)) / 2, rel=1e-12)


def test_a_whole_newton_step_with_the_bound_descends_from_undecided_rows() -> None:
    y = np.arange(K, dtype=float)
    z = np.random.default_rng(0).normal(size=(K, K)) * 0.3
    for settings in LOSSES.values():
        if "class_weight" in settings:
            continue
        loss = make(**settings)
        gradient, hessian = gradients_in_numpy(z, y, NONE, loss=loss, curvature=spec(loss, "bound"))
        after = values_in_numpy(z - gradient / hessian, y, loss=loss)
        assert (after <= values_in_numpy(z, y, loss=loss) + 1e-12).all()
