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
    "wasserstein_tree": lambda p: otloss.wasserstein_tree(p, TARGET, torch.tensor([-1, 0, 0, 1, 1]), torch.ones(5)),
    "sliced_wasserstein": lambda p: otloss.sliced_wasserstein(p, p.flip(0) + 1),
    "upper_bound": lambda p: otloss.upper_bound(p, TARGET, MATRIX),
    "lower_bound": lambda p: otloss.lower_bound(p, TARGET, MATRIX),
    "cloud_loss": lambda p: otloss.cloud_loss(p, p.flip(0) + 1),
    "ordinal_loss": lambda p: otloss.ordinal_loss(p, torch.tensor([0, 1, 2])),
    "threshold_loss": lambda p: otloss.losses.threshold_loss(p, torch.tensor([0, 1, 2])),
    "histogram_loss": lambda p: otloss.histogram_loss(p, torch.tensor([0.1, 0.5, 0.7]), torch.linspace(0, 1, 6)),
    "set_loss": lambda p: otloss.losses.set_loss(p.T),
    "ngram_distance": lambda p: otloss.losses.ngram_distance(p, p.flip(0) + MATRIX[:3], n=2),
    "document_distance": lambda p: otloss.losses.document_distance(p, TARGET, MATRIX),
    "critic_loss": lambda p: otloss.losses.critic_loss(p[0], p[1]),
    "generator_loss": lambda p: otloss.losses.generator_loss(p[0]),
    "jdot_loss": lambda p: otloss.losses.jdot_loss(p, MATRIX[:3], torch.tensor([0, 1, 2]), MATRIX[2:]),
    "fused_gromov": lambda p: otloss.fused_gromov(p @ p.T, p @ p.T, MATRIX[:3, :3], alpha=0.1).value,
    "soft_sort": lambda p: otloss.soft_sort(p, epsilon=0.1)[:, :2],
    "soft_rank": lambda p: otloss.soft_rank(p, epsilon=0.1)[:, :2],
    "soft_top_k": lambda p: otloss.soft_top_k(p, 2, epsilon=0.1)[:, :2],
    "match": lambda p: p[otloss.match(p @ p.T)[1]],
    "pair": lambda p: p[otloss.pair(p, p.flip(0) + MATRIX[:3])[1]],
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
        torch.manual_seed(2)  # of the projections
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
