"""What all functions check of their arguments."""

import itertools
from collections.abc import Callable

import pandas as pd
import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

import otloss
from otloss._checks import broadcast_shape
from otloss.losses import document_distance

SHAPES = [(), *itertools.product(range(4)), *itertools.product(range(4), repeat=2)]


def test_shapes_broadcast_as_in_torch() -> None:
    assert broadcast_shape() == ()
    for shapes in itertools.chain(itertools.product(SHAPES, repeat=2), itertools.product(SHAPES[::2], repeat=3)):
        try:
            expected = torch.broadcast_shapes(*shapes)
        except RuntimeError:
            with pytest.raises(RuntimeError):
                broadcast_shape(*shapes)
        else:
            assert broadcast_shape(*shapes) == expected


def test_symbolic_sizes_broadcast() -> None:
    """Where torch records a graph, sizes are symbols, which have no hash."""

    def zeros(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return torch.zeros(broadcast_shape(x.shape, y.shape))

    x, y = torch.ones(3, 1), torch.ones(5)
    graph = make_fx(zeros, tracing_mode="symbolic")(x, y)
    assert graph(x, y).shape == (3, 5)
    assert graph(torch.ones(7, 1), torch.ones(9)).shape == (7, 9)  # the sizes are no constants of the graph


def test_the_advice_for_tables_works() -> None:
    series = pd.Series([0, 2, 1], index=[7, 3, 5])  # as a part of a table has it
    with pytest.raises(TypeError, match=r"target is a Series.*torch.tensor\(target.to_numpy\(\)\)"):
        otloss.ordinal_loss(torch.zeros(3, 3), series)  # type: ignore[arg-type]
    assert torch.tensor(series.to_numpy()).tolist() == [0, 2, 1]


@pytest.mark.parametrize(
    ("call", "names"),
    [
        (lambda x, y: otloss.wasserstein_1d(None, None, x, y), ("x", "y")),
        (lambda x, y: otloss.wasserstein_circular(None, None, x, y, period=1), ("x", "y")),
        (
            lambda x, y: document_distance(None, None, torch.eye(3), ids_p=x.long(), ids_q=y.long()),
            ("ids_p", "ids_q"),
        ),
    ],
    ids=["line", "circle", "documents"],
)
def test_batches_of_unlike_sizes_without_weights_are_named(
    call: Callable[[torch.Tensor, torch.Tensor], torch.Tensor], names: tuple[str, str]
) -> None:
    x, y = names
    with pytest.raises(ValueError, match=rf"do not broadcast: got {x} \(10,\), {y} \(12,\)"):
        call(torch.ones(10, 3), torch.ones(12, 3))
