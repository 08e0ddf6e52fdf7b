"""Losses of a generator and its critic: the Wasserstein distance W_1 estimated by a network.

    W_1(real, fake) = max over f with |f(x) - f(y)| <= |x - y| of  mean f(real) - mean f(fake)

The critic f ascends this difference. Its Lipschitz constant is kept near 1 by

    penalty = mean over samples of (|gradient of f at z| - target)^2,   z = t real + (1 - t) fake,  t uniform in [0, 1]

or by spectral normalisation (`torch.nn.utils.parametrizations.spectral_norm`). The difference of the scores is an
estimate of W_1 and no bound, since the constant of the critic is not exactly 1.

Sources: M. Arjovsky, S. Chintala, L. Bottou, Wasserstein GAN, arXiv 1701.07875; I. Gulrajani et al., Improved training
of Wasserstein GANs, arXiv 1704.00028 (penalty); H. Petzka et al., On the regularization of Wasserstein GANs,
arXiv 1709.08894 (one-sided).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from otloss._autograd import check_no_transform
from otloss._checks import check_finite, check_floating, check_generator, check_not_negative
from otloss._public import public

# Added to the squared norm, because the square root has no derivative at 0.
_SQUARED_NORM_AT_ZERO = 1e-12


@public
def critic_loss(real: Float[Tensor, "..."], fake: Float[Tensor, "..."]) -> Float[Tensor, ""]:
    """Return mean(fake) - mean(real), whose negative is the critic's estimate of W_1.

    Args:
        real, fake: the critic's scores of data and of generated samples, in any shapes.

    Raises:
        TypeError: if one is not a floating tensor.
        ValueError: if one is empty, or holds NaN or an infinity.

    Source:
        M. Arjovsky, S. Chintala, L. Bottou, Wasserstein GAN, arXiv 1701.07875.

    Example:
        >>> critic_loss(torch.tensor([[2.0], [4.0]]), torch.tensor([[1.0], [0.0]]))
        tensor(-2.5000)
    """
    return _mean("fake", fake) - _mean("real", real)


@public
def generator_loss(fake: Float[Tensor, "..."]) -> Float[Tensor, ""]:
    """Return -mean(fake), the part of W_1 that a generator can change.

    Args:
        fake: the critic's scores of generated samples, with their graph.

    Raises:
        TypeError, ValueError: as `critic_loss`.

    Example:
        >>> generator_loss(torch.tensor([[1.0], [0.0]]))
        tensor(-0.5000)
    """
    return -_mean("fake", fake)


@public
def gradient_penalty(
    critic: Callable[[Tensor], Tensor],
    real: Float[Tensor, "batch ..."],
    fake: Float[Tensor, "batch ..."],
    *,
    target: float = 1.0,
    one_sided: bool = False,
    generator: torch.Generator | None = None,
) -> Float[Tensor, ""]:
    """Return the mean of (|gradient of the critic| - target)^2 at random points between real and fake samples.

    Add ten times of it to `critic_loss`. The norm is taken over all axes but the first. The critic has to score each
    sample by itself: batch normalisation mixes the samples of a batch, and the norms are then wrong. Use layer or group
    normalisation in its place.

    Args:
        critic: a function of (batch, ...) samples that gives one score for each, or several, which are added up.
        real, fake: samples in one shape; their graphs are not used.
        target: the norm that costs nothing.
        one_sided: only norms above the target cost.
        generator: for the uniform factor, one for each sample.

    Returns:
        A scalar, differentiable in the parameters of the critic; without a graph under `torch.no_grad()`.

    Raises:
        TypeError: if real or fake is not a floating tensor.
        ValueError: if their shapes differ, the batch is empty, a number is not finite, the target is negative, there
            are fewer scores than samples, or they do not depend on the samples.

    Source:
        I. Gulrajani et al., Improved training of Wasserstein GANs, arXiv 1704.00028, eq. 3.

    Example:
        >>> critic = torch.nn.Linear(2, 1)
        >>> critic.weight.data = torch.tensor([[3.0, 4.0]])  # a gradient of norm 5 everywhere
        >>> gradient_penalty(critic, torch.zeros(8, 2), torch.ones(8, 2)).item()
        16.0
    """
    check_not_negative("target", target)
    check_generator(generator)
    check_no_transform()
    between = _between(real, fake, generator).requires_grad_()
    with torch.enable_grad():
        scores = critic(between)
        if not isinstance(scores, Tensor):
            raise TypeError(
                f"the critic returns a {type(scores).__name__}, expected a tensor of scores; wrap it, such as in "
                "lambda x: critic(x)[0] for a tuple."
            )
        if not scores.requires_grad:
            raise ValueError(
                "the critic's scores have no graph; expected a tensor that torch computed from the samples, outside of "
                "torch.inference_mode()."
            )
        if scores.numel() < len(between):
            raise ValueError(
                f"the critic's scores have shape {tuple(scores.shape)}, expected ({len(between)}, ...): one for each "
                "sample, or several; leave the mean over the batch out of it."
            )
        (gradient,) = torch.autograd.grad(scores.sum(), between, create_graph=True, allow_unused=True)
        if gradient is None:
            raise ValueError("the critic's scores do not depend on the samples; expected critic(samples) to use them.")
        squared = gradient.flatten(1).to(torch.promote_types(gradient.dtype, torch.float32)).square().sum(-1)
        excess = (squared + _SQUARED_NORM_AT_ZERO).sqrt() - target
        value = (excess.clamp(min=0) if one_sided else excess).square().mean()
    check_finite("the penalty", value)
    return value if torch.is_grad_enabled() else value.detach()


def _between(real: Any, fake: Any, generator: torch.Generator | None) -> Tensor:
    """Return points at a random place on the line from each fake sample to its real one, without a graph."""
    for name, samples in (("real", real), ("fake", fake)):
        check_finite(name, check_floating(name, samples))
    if real.shape != fake.shape or real.dim() < 2 or not len(real):
        raise ValueError(
            f"real has shape {tuple(real.shape)} and fake {tuple(fake.shape)}, expected one shape (batch, ...) with at "
            "least one sample; draw as many fake samples as real ones, and pass numbers as (batch, 1)."
        )
    device = real.device if generator is None else generator.device
    share = torch.rand(len(real), *[1] * (real.dim() - 1), generator=generator, device=device, dtype=torch.float32)
    dtype = torch.promote_types(real.dtype, fake.dtype)
    return torch.lerp(fake.detach().to(dtype), real.detach().to(dtype), share.to(real.device, dtype))


def _mean(name: str, scores: Any) -> Tensor:
    check_finite(name, check_floating(name, scores))
    if not scores.numel():
        raise ValueError(f"{name} has shape {tuple(scores.shape)}, expected at least one score; skip empty batches.")
    return scores.mean(dtype=torch.promote_types(scores.dtype, torch.float32)).to(scores.dtype)
