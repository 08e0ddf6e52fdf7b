"""Critic losses against closed forms, loops over samples and finite differences; the errors of common recipes."""

import pytest
import torch
from scipy import stats
from torch import Tensor, nn

import otloss
from otloss.losses import critic_loss, generator_loss, gradient_penalty
from tests.errors import raising

DRAW = torch.Generator().manual_seed(0)
REAL, FAKE = (torch.randn(6, 2, 3, dtype=torch.float64, generator=DRAW) for _ in range(2))


class Quadratic(nn.Module):
    """x^T A x / 2 - b.x, whose gradient is A x - b."""

    def __init__(self) -> None:
        super().__init__()
        A = torch.randn(6, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
        self.A, self.b = nn.Parameter(A + A.T), nn.Parameter(torch.arange(6.0, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        x = x.flatten(1)
        return (x * (x @ self.A)).sum(1, keepdim=True) / 2 - (x @ self.b).unsqueeze(1)


@pytest.mark.parametrize("one_sided", [False, True])
def test_penalty_at_known_points(one_sided: bool) -> None:
    """Real and fake in one place leave the factors no influence."""
    critic = Quadratic()
    target = 8.0
    norms = torch.stack([(critic.A @ x.flatten() - critic.b).norm() for x in REAL])
    assert (norms < target).any()
    excess = (norms - target).clamp(min=0) if one_sided else norms - target
    value = gradient_penalty(critic, REAL, REAL, target=target, one_sided=one_sided)
    torch.testing.assert_close(value, excess.square().mean())


def test_one_uniform_factor_for_each_sample() -> None:
    seen = []

    def critic(samples: Tensor) -> Tensor:
        seen.append(samples.detach())
        return samples.sum((1, 2))

    real, fake = torch.full((3000, 2, 3), 5.0), torch.full((3000, 2, 3), 1.0)
    value = gradient_penalty(critic, real, fake, generator=torch.Generator().manual_seed(2))
    torch.testing.assert_close(value, torch.tensor((6**0.5 - 1) ** 2))  # all axes
    factors = (seen[0] - 1) / 4
    torch.testing.assert_close(factors, factors[:, :1, :1].expand_as(factors))
    assert stats.kstest(factors[:, 0, 0].numpy(), "uniform").pvalue > 0.01


def test_a_critic_without_any_gradient_gets_finite_derivatives() -> None:
    """The derivative of a square root at 0 is infinite: without a small addend the weights become NaN."""
    critic = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 1))
    nn.init.zeros_(critic[2].weight)
    value = gradient_penalty(critic, torch.ones(5, 3), torch.zeros(5, 3))
    value.backward()
    assert value.item() == pytest.approx(1, abs=1e-5)
    assert all(p.grad is None or torch.isfinite(p.grad).all() for p in critic.parameters())


def test_the_best_critic_on_a_line_gives_the_distance() -> None:
    fake, real = torch.tensor([0.5, 0.0, 2.0]), torch.tensor([2.5, 3.0, 2.0])
    expected = otloss.wasserstein_1d(None, None, real, fake)
    torch.testing.assert_close(-critic_loss(real, fake), expected)  # the identity, for all mass moves one way
    torch.testing.assert_close(generator_loss(fake), -fake.mean())


def test_surroundings() -> None:
    leaf = FAKE.clone().requires_grad_()
    gradient_penalty(Quadratic(), REAL, leaf).backward()
    assert leaf.grad is None
    with torch.no_grad():
        assert not gradient_penalty(Quadratic(), REAL, FAKE).requires_grad
    half, ones = nn.Linear(3, 1, dtype=torch.bfloat16), torch.ones(2, 3).bfloat16()
    assert gradient_penalty(half, ones, ones).dtype == torch.float32


test_bad_input = raising(
    (lambda: critic_loss(torch.tensor([]), torch.ones(1)), "real has shape"),
    (lambda: gradient_penalty(lambda x: x.detach(), REAL, FAKE), "no graph"),
    (lambda: gradient_penalty(lambda x: nn.Parameter(torch.ones(6)), REAL, FAKE), "do not depend"),
    (lambda: gradient_penalty(lambda x: x.mean(), REAL, FAKE), r"scores have shape \(\), .*leave the mean"),
    (lambda: gradient_penalty(lambda x: 1 / (x.sum((1, 2)) * 0), REAL, FAKE), "the penalty"),
)
