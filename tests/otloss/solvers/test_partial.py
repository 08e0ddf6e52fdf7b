"""Partial transport against POT, and its gradients against finite differences."""

import numpy as np
import ot
import pytest
import torch
from torch import Tensor

import otloss
from tests.errors import raising


def problem(batch: int = 3) -> list[Tensor]:
    """Non-uniform weights of different masses, costs, and the mass to move, which differs by problem."""
    generator = torch.Generator().manual_seed(4)
    p, q, cost = (torch.rand(batch, *s, generator=generator, dtype=torch.float64) for s in ((5,), (6,), (5, 6)))
    q = 0.7 * q
    shares = torch.tensor([0.3, 0.6, 0.95], dtype=torch.float64)[:batch]
    return [p, q, cost, shares * torch.minimum(p.sum(-1), q.sum(-1))]


def test_exact_is_that_of_pot_at_every_mass() -> None:
    p, q, cost, mass = problem()
    answer = otloss.solve(p, q, cost, mass=mass)
    for k in range(3):
        theirs = ot.partial.partial_wasserstein(p[k].numpy(), q[k].numpy(), cost[k].numpy(), m=float(mass[k]))
        np.testing.assert_allclose(float(answer.value[k]), (theirs * cost[k].numpy()).sum(), rtol=1e-9)
    torch.testing.assert_close(answer.value, otloss.emd(p, q, cost, mass=mass))
    plan = answer.plan()
    torch.testing.assert_close(plan.sum((-2, -1)), mass)
    assert (plan.sum(-1) <= p + 1e-12).all()
    assert (plan.sum(-2) <= q + 1e-12).all()
    assert (otloss.emd(p, q, cost, mass=0.0) == 0).all()
    as_tensor = otloss.emd(p, q, cost, mass=torch.tensor(0.3, dtype=torch.float64))
    torch.testing.assert_close(otloss.emd(p, q, cost, mass=0.3), as_tensor, rtol=1e-12, atol=0)
    same = p * (q.sum(-1) / p.sum(-1)).unsqueeze(-1)
    torch.testing.assert_close(otloss.emd(same, q, cost, mass=q.sum(-1)), otloss.emd(same, q, cost))


def test_entropic_tends_to_exact_and_moves_the_mass() -> None:
    p, q, cost, mass = problem()
    for dtype, rtol in ((torch.float64, 1e-4), (torch.float32, 1e-3)):
        given = [t.to(dtype) for t in (p, q, cost)]
        answer = otloss.solve(*given, epsilon=1e-3, mass=mass.to(dtype))
        torch.testing.assert_close(answer.linear_cost.double(), otloss.emd(p, q, cost, mass=mass), rtol=rtol, atol=1e-3)
        torch.testing.assert_close(answer.plan().sum((-2, -1)).double(), mass, rtol=1e-5, atol=0.0)


p0, q0, cost0, mass0 = problem()


test_bad_input = raising(
    (lambda: otloss.emd(p0, q0, cost0, mass=mass0 * torch.tensor([1, 1, 2])), "the lesser of the masses"),
    (lambda: otloss.emd(p0, q0, cost0, mass=-0.1), "mass"),
    (lambda: otloss.emd(p0, q0, cost0, mass=mass0[:2]), r"mass \(2,\)"),
    (lambda: otloss.sinkhorn(p0, q0, cost0, epsilon=0.1, mass=mass0, marginal_penalty=1.0), "expected one"),
    (lambda: otloss.emd(p0, q0, cost0, mass="half"), TypeError, "expected a number"),  # type: ignore[arg-type]
)


def test_a_part_of_the_mass_of_large_images_is_slow() -> None:
    cost = otloss.costs.GridCost((64, 64))
    with (
        pytest.warns(otloss.ConvergenceWarning, match="did not converge"),
        pytest.warns(UserWarning, match="needs a matrix of 4096 x 4096 costs"),
    ):
        otloss.sinkhorn(None, None, cost, mass=0.5, epsilon=1.0, max_iterations=1)
