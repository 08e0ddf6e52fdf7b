"""Products and their derivatives have the precision of their factors inside of autocast, in every mode of autograd."""

import pytest
import torch
from torch import Tensor

from otloss.costs.products import product
from tests.otloss.draws import draw

SHAPES = [((3,), (3, 4)), ((2, 3), (3, 4)), ((5, 2, 3), (3, 4)), ((2, 3), (5, 3, 4)), ((5, 1, 2, 3), (6, 3, 4))]


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*")
@pytest.mark.parametrize(("of_a", "of_b"), SHAPES)
def test_products_are_those_of_torch_with_all_derivatives(of_a: tuple[int, ...], of_b: tuple[int, ...]) -> None:
    a, b = draw(*of_a).requires_grad_(), draw(*of_b, seed=1).requires_grad_()
    torch.testing.assert_close(product(a, b), a @ b)
    assert torch.autograd.gradcheck(product, (a, b), check_forward_ad=True, check_batched_grad=True)
    assert torch.autograd.gradgradcheck(product, (a, b))


@pytest.mark.parametrize(("of_a", "of_b"), SHAPES)
def test_autocast_changes_no_digit_of_first_and_second_derivatives(
    of_a: tuple[int, ...], of_b: tuple[int, ...]
) -> None:
    a, b = (t.float().requires_grad_() for t in (draw(*of_a), draw(*of_b, seed=1)))

    def derivatives() -> list[Tensor]:
        first = torch.autograd.grad(product(a, b).square().sum(), (a, b), create_graph=True)
        return [*first, *torch.autograd.grad(sum(t.square().sum() for t in first), (a, b))]

    expected = derivatives()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert all(torch.equal(t, e) for t, e in zip(derivatives(), expected, strict=True))


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*")
def test_products_inside_of_transforms_are_those_of_torch() -> None:
    a, b = draw(5, 2, 3), draw(5, 3, 4, seed=1)
    for transform in (torch.func.jacrev, torch.func.jacfwd, torch.func.hessian):
        by_each = [
            torch.vmap(transform(lambda a, b, f=f: f(a, b).square().sum()))(a, b) for f in (product, torch.matmul)
        ]
        torch.testing.assert_close(*by_each)
