"""The squared Wasserstein distance between Gaussians, the Bures-Wasserstein distance of their means and covariances.

    W_2^2 = |m - k|^2 + tr A + tr B - 2 tr (A^(1/2) B A^(1/2))^(1/2)

With any factors A = L L^T and B = K K^T and the singular values L^T K = U S V^T, the trace of the root is the trace of
S, so

    W_2^2 = |m - k|^2 + |L U - K V|^2

which does not cancel where A is near B. The plan is the linear map T with T L = K V U^T, and dW/dA = I - T. It depends
on no differences of eigenvalues, so that equal eigenvalues and equal covariances are ordinary. In directions without
variance of A the map has L^+, the pseudoinverse, over singular values above rounding.

Source: R. Bhatia, T. Jain, Y. Lim, On the Bures-Wasserstein distance between positive definite matrices, 2019.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from otloss._autograd import check_no_tangent, check_no_transform, once_only
from otloss._checks import check_broadcast, check_finite, check_floating, check_last_axis, float64_or
from otloss._per_example import per_example
from otloss._public import public
from otloss.solvers.closed_forms.line import finite_in

TOLERANCE = {torch.float64: 1e-8, torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}
_NO_SECOND = (
    "a second derivative of bures_wasserstein was asked for, which gives first ones only; drop create_graph=True."
)


@public
@per_example(
    is_traced=lambda settings: False, covariance_p=2, covariance_q=2, mean_p=1, mean_q=1,
)  # fmt: skip
def bures_wasserstein(
    covariance_p: Float[Tensor, "*batch d d"],
    covariance_q: Float[Tensor, "*batch d d"],
    *,
    mean_p: Float[Tensor, "*batch d"] | None = None,
    mean_q: Float[Tensor, "*batch d"] | None = None,
) -> Float[Tensor, "*batch"]:
    """Return W_2^2 between Gaussians with these covariances and means, at the cost |x - y|^2.

    Args:
        covariance_p, covariance_q: (..., d, d), symmetric with eigenvalues >= 0 up to rounding; they may be singular.
            The leading axes of all arguments broadcast.
        mean_p, mean_q: (..., d); None for equal means.

    Returns:
        (...), at least 0, in the promoted dtype; its unit is the unit of the covariances. Differentiable once, also
        where covariances are equal or singular. The gradient of a singular covariance is the one along its own
        directions, which is what reaches the samples that it was computed from: the derivative into a direction in
        which only the other one has variance is minus infinity. Eigenvalues count as 0 by the rounding of float64:
        larger ones, as of a singular covariance that was computed in float32, have large derivatives, which nearly
        cancel for the samples.

    Raises:
        TypeError: if an argument is not a floating tensor.
        ValueError: if shapes do not fit, a number is not finite, a covariance is not symmetric or has an eigenvalue
            below 0, or only one mean is given.
        RuntimeError: if a second derivative is asked for.

    Source:
        R. Bhatia, T. Jain, Y. Lim, On the Bures-Wasserstein distance between positive definite matrices, 2019.

    Example:
        >>> import torch
        >>> wide, narrow = torch.diag(torch.tensor([4.0, 1.0])), torch.eye(2)
        >>> bures_wasserstein(wide, narrow, mean_p=torch.zeros(2), mean_q=torch.tensor([0.0, 3.0]))
        tensor(10.)
    """
    names = ("covariance_p", "covariance_q")
    A, B = (_checked(name, matrix) for name, matrix in zip(names, (covariance_p, covariance_q), strict=True))
    dtype, d = torch.promote_types(A.dtype, B.dtype), A.shape[-1]
    if B.shape[-1] != d:
        raise ValueError(f"covariance_p has {d} axes and covariance_q {B.shape[-1]}, expected as many.")
    shapes = dict(zip(names, (A.shape[:-2], B.shape[:-2]), strict=True))
    if (mean_p is None) != (mean_q is None):
        raise ValueError("only one of mean_p and mean_q is given, expected both, or none for equal means.")
    apart = None
    if mean_p is not None and mean_q is not None:
        for name, mean in (("mean_p", mean_p), ("mean_q", mean_q)):
            check_last_axis(name, check_floating(name, mean), d)
            check_finite(name, mean)
            shapes[name] = mean.shape[:-1]
            dtype = torch.promote_types(dtype, mean.dtype)
    batch = check_broadcast(**shapes)
    wide = float64_or(torch.float32, A.device)
    if mean_p is not None and mean_q is not None:
        apart = (mean_p.to(wide) - mean_q.to(wide)).square().sum(-1)
    A, B = (matrix.to(wide).expand(*batch, d, d) for matrix in (A, B))
    check_no_tangent("differentiate in reverse mode.", A, B)
    check_no_transform()
    with torch.autocast(A.device.type, enabled=False):
        value: Tensor = _Bures.apply(A, B)
    return finite_in(dtype, value if apart is None else value + apart, 2)


def _checked(name: str, matrix: Any) -> Tensor:
    check_floating(name, matrix)
    if matrix.dim() < 2 or matrix.shape[-1] != matrix.shape[-2] or matrix.shape[-1] == 0:
        raise ValueError(f"{name} has shape {tuple(matrix.shape)}, expected (..., d, d), a square covariance matrix.")
    check_finite(name, matrix)
    fixed = matrix.detach()
    allowed = TOLERANCE[matrix.dtype] * fixed.abs().amax((-2, -1))
    if ((fixed - fixed.mT).abs().amax((-2, -1)) > allowed).any():
        raise ValueError(f"{name} is not symmetric, expected a covariance matrix; pass ({name} + {name}.mT) / 2.")
    wide = fixed.to(float64_or(torch.float32, fixed.device))
    smallest = torch.linalg.eigvalsh(wide)[..., 0]
    if (smallest < -allowed).any():
        raise ValueError(
            f"{name} has the eigenvalue {float(smallest.min()):.3g}, expected none below 0: a covariance matrix."
        )
    return matrix


class _Factor(NamedTuple):
    """L = Q sqrt(eigenvalues), its pseudoinverse, and the projection on the directions with variance."""

    root: Tensor
    inverse: Tensor
    range: Tensor


def _factor(matrix: Tensor) -> _Factor:
    eigenvalues, vectors = torch.linalg.eigh((matrix + matrix.mT) / 2)
    rounding = matrix.shape[-1] * torch.finfo(matrix.dtype).eps * eigenvalues[..., -1:].abs()
    is_positive = eigenvalues > rounding
    roots = eigenvalues.clamp(min=0).sqrt()
    inverse = torch.where(is_positive, 1 / torch.where(is_positive, roots, 1.0), 0.0)
    masked = vectors * is_positive.unsqueeze(-2)
    return _Factor(vectors * roots.unsqueeze(-2), inverse.unsqueeze(-1) * vectors.mT, masked @ vectors.mT)


def _derivative(one: _Factor, other: _Factor, rotation: Tensor) -> Tensor:
    """Return I - T for the map T of `one`, with T L = K rotation, symmetric."""
    T = other.root @ rotation @ one.inverse
    among = one.range @ T @ one.range
    T = T + T.mT - (among + among.mT) / 2
    return torch.eye(T.shape[-1], dtype=T.dtype, device=T.device) - T


class _Bures(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, A: Tensor, B: Tensor) -> Tensor:
        of_p, of_q = _factor(A), _factor(B)
        U, S, Vh = torch.linalg.svd(of_p.root.mT @ of_q.root)
        if any(ctx.needs_input_grad):
            is_positive = S.shape[-1] * torch.finfo(S.dtype).eps * S[..., :1] < S
            rotation = Vh.mT @ (is_positive.unsqueeze(-1) * U.mT)
            ctx.save_for_backward(A, B, _derivative(of_p, of_q, rotation), _derivative(of_q, of_p, rotation.mT))
        return (of_p.root @ U - of_q.root @ Vh.mT).square().sum((-2, -1))

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor, ...]:
        A, B, by_p, by_q = ctx.saved_tensors
        factor = upstream[0].detach()[..., None, None]
        return tuple(once_only(factor * derivative, _NO_SECOND, upstream[0], A, B) for derivative in (by_p, by_q))
