"""torch.compile around a transport loss: the solver runs outside of the graph, and nothing changes."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import otloss

GENERATOR = torch.Generator().manual_seed(0)
MATRIX = torch.rand(5, 5, generator=GENERATOR)
TARGET = torch.full((5,), 0.2)
LOSSES: dict[str, Callable[[Tensor], Tensor]] = {
    "emd": lambda p: otloss.emd(p, TARGET, MATRIX),
    "sinkhorn": lambda p: otloss.sinkhorn(p, TARGET, MATRIX, epsilon=0.1),
    "solve": lambda p: otloss.solve(p, TARGET, MATRIX, epsilon=0.1, grad="implicit").linear_cost,
    "cdf_distance": lambda p: otloss.cdf_distance(p, TARGET),
}


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # both by the compiler itself
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize("name", LOSSES)
def test_a_compiled_function_gives_the_same(name: str) -> None:
    def value(z: Tensor) -> Tensor:
        return LOSSES[name](2 * z.softmax(-1) / 2).sum()

    z = torch.randn(3, 5, generator=torch.Generator().manual_seed(1))
    torch._dynamo.reset()
    actual = []
    for function in (value, torch.compile(value, backend="aot_eager")):
        leaf = z.clone().requires_grad_()
        result = function(leaf)
        result.backward()
        actual.append((result.detach(), leaf.grad))
    torch.testing.assert_close(actual[0], actual[1])
