"""Compiled, traced and exported programs: a loss runs outside of a compiled graph, and cannot be recorded."""

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
    "wasserstein_1d": lambda p: otloss.wasserstein_1d(p, TARGET),
    "wasserstein_circular": lambda p: otloss.wasserstein_circular(p, TARGET),
    "cloud_loss": lambda p: otloss.cloud_loss(p, p.flip(0) + 1),
    "ordinal_loss": lambda p: otloss.ordinal_loss(p, torch.tensor([0, 1, 2])),
    "soft_sort": lambda p: otloss.soft_sort(p, epsilon=0.1)[:, :2],
    "match": lambda p: p[otloss.match(p @ p.T)[1]],
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


class Recorded(torch.nn.Module):
    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name

    def forward(self, z: Tensor) -> Tensor:
        return LOSSES[self.name](z.softmax(-1))


@pytest.mark.filterwarnings("ignore")  # of the compilers
@pytest.mark.parametrize("name", LOSSES)
def test_recording_a_loss_raises_one_sentence(name: str) -> None:
    """Numbers would be constants of the recorded program."""
    module, z = Recorded(name), torch.randn(3, 5)
    for way, record in (
        ("torch.jit.trace", lambda: torch.jit.trace(module, (z,))),
        ("torch.export", lambda: torch.export.export(module, (z,))),
    ):
        with pytest.raises(RuntimeError, match=rf"^{name} reads the numbers of its tensors, so {way} cannot record it"):
            record()
    torch._dynamo.reset()
    with pytest.raises(Exception, match=r"functions of otloss read .* Leave fullgraph=True out"):
        torch.compile(module, backend="eager", fullgraph=True)(z)
