"""The Bures-Wasserstein distance against scipy's root of a matrix, and its gradients against finite differences."""

import math

import numpy as np
import pytest
import scipy.linalg
import torch

import otloss
from otloss import bures_wasserstein
from tests.otloss.oracles import as_double, central_gradients


def truth(A: np.ndarray, B: np.ndarray) -> float:
    root = scipy.linalg.sqrtm(A)
    return float(np.trace(A + B - 2 * scipy.linalg.sqrtm(root @ B @ root)).real)


def covariance(seed: int, d: int, rank: int | None = None) -> np.ndarray:
    draw = np.random.default_rng(seed)
    factor = draw.normal(size=(d, rank or d + 1)) * (10.0 ** -np.arange(d))[:, None]
    matrix: np.ndarray = factor @ factor.T
    return matrix


def root_of(matrix: np.ndarray) -> np.ndarray:
    eigenvalues, vectors = np.linalg.eigh(matrix)
    root: np.ndarray = (vectors * np.sqrt(eigenvalues.clip(0))) @ vectors.T
    return root


def along_symmetric(A: np.ndarray, B: np.ndarray) -> np.ndarray:
    """The gradient in A by finite differences of symmetric changes, relative to its smallest eigenvalue."""
    step = 1e-3 * np.linalg.eigvalsh(A)[0]
    return central_gradients(lambda t: truth((t + t.T) / 2, B), A, step)


@pytest.mark.parametrize("d", [1, 2, 4])
def test_values_and_gradients(d: int) -> None:
    matrices = [(covariance(k, d), covariance(k + 9, d)) for k in range(3)]
    A, B = (as_double(np.stack(side), grad=True) for side in zip(*matrices, strict=True))
    means = as_double(np.random.default_rng(0).normal(size=(2, 3, d)), grad=True)
    values = bures_wasserstein(A, B, mean_p=means[0], mean_q=means[1])
    by_p, by_q, by_means = torch.autograd.grad(values.sum(), (A, B, means))
    apart = (means[0] - means[1]).detach().numpy()
    np.testing.assert_allclose(by_means[0], 2 * apart)
    for k, (a, b) in enumerate(matrices):
        assert values[k].item() == pytest.approx(truth(a, b) + (apart[k] ** 2).sum(), rel=1e-7)
        for derivative, (one, other) in ((by_p[k], (a, b)), (by_q[k], (b, a))):
            expected = along_symmetric(one, other)
            np.testing.assert_allclose(derivative, expected, rtol=1e-3, atol=1e-3 * np.abs(expected).max())


def test_equal_covariances_have_no_distance_and_no_gradient() -> None:
    for matrix in (np.eye(3), covariance(1, 3), covariance(2, 3, rank=1), np.zeros((3, 3))):
        A, B = as_double(matrix, grad=True), as_double(matrix, grad=True)
        value = bures_wasserstein(A, B)
        assert 0 <= value.item() <= 1e-14
        for derivative in torch.autograd.grad(value, (A, B)):
            assert float((derivative @ A.detach()).abs().max()) <= 1e-7
    scale = as_double(np.array(1.001), grad=True)
    near = bures_wasserstein(scale * torch.eye(4, dtype=torch.float64), torch.eye(4, dtype=torch.float64))
    assert near.item() == pytest.approx(4 * (math.sqrt(1.001) - 1) ** 2, rel=1e-9)
    (derivative,) = torch.autograd.grad(near, scale)
    assert derivative.item() == pytest.approx(4 * (1 - 1 / math.sqrt(1.001)), rel=1e-9)


@pytest.mark.parametrize("rank", [1, 2])
def test_gradients_reach_the_samples_of_singular_covariances(rank: int) -> None:
    """There are `rank` samples, in four dimensions: the covariance has no inverse, and its root no derivative."""
    draw = np.random.default_rng(rank)
    x, y = draw.normal(size=(rank, 4)), draw.normal(size=(rank + 1, 4))
    for other in (y.T @ y, np.eye(4), np.diag([1.0, 1.0, 0.0, 0.0])):
        X = as_double(x, grad=True)
        value = bures_wasserstein(X.T @ X, as_double(other))
        nuclear = np.linalg.svd(x @ root_of(other), compute_uv=False).sum()
        assert value.item() == pytest.approx((x**2).sum() + np.trace(other) - 2 * nuclear, abs=1e-7)

        def of_samples(t: np.ndarray, other: np.ndarray = other) -> float:
            roots = np.linalg.svd(t @ root_of(other), compute_uv=False).sum()
            return float((t**2).sum() - 2 * roots)

        np.testing.assert_allclose(torch.autograd.grad(value, X)[0], central_gradients(of_samples, x, 1e-6), atol=1e-6)


def test_dtypes_broadcasting_and_one_derivative() -> None:
    A, B = (as_double(covariance(k, 3)) for k in (1, 2))
    value = bures_wasserstein(A.float(), B.float())
    assert value.dtype == torch.float32
    assert value.item() == pytest.approx(bures_wasserstein(A, B).item(), rel=1e-5)
    assert bures_wasserstein(A, torch.stack([A, B]), mean_p=torch.ones(3), mean_q=torch.ones(4, 1, 3)).shape == (4, 2)
    A.requires_grad_()
    (derivative,) = torch.autograd.grad(bures_wasserstein(A, B), A, create_graph=True)
    with pytest.raises(RuntimeError, match="gives first ones only"):
        derivative.sum().backward()


@pytest.mark.parametrize(
    ("A", "options", "message"),
    [
        (torch.ones(2, 3), {}, r"has shape \(2, 3\), expected \(..., d, d\)"),
        (torch.tensor([[1.0, 0.5], [0.0, 1.0]]), {}, "covariance_p is not symmetric"),
        (torch.diag(torch.tensor([1.0, -0.5])), {}, "covariance_p has the eigenvalue -0.5"),
        (torch.eye(3), {}, "has 3 axes and covariance_q 2"),
        (torch.eye(2), {"mean_p": torch.ones(2)}, "only one of mean_p and mean_q"),
        (torch.eye(2), {"mean_p": torch.ones(3), "mean_q": torch.ones(2)}, "mean_p has shape"),
        (torch.full((2, 2), math.nan), {}, "NaN"),
    ],
)
def test_errors(A: torch.Tensor, options: dict[str, torch.Tensor], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        otloss.bures_wasserstein(A, torch.eye(2), **options)


def test_a_value_beyond_the_dtype_is_an_error() -> None:
    with pytest.raises(ValueError, match="overflow"):
        otloss.bures_wasserstein(3e38 * torch.eye(3), torch.zeros(3, 3))
