"""Calls as GeomLoss and POT take them: each raises an error that names ours."""

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch

import otloss
from otloss import nn
from otloss.costs import GridCost, PointCost

X, Y = torch.rand(4, 2, generator=torch.Generator().manual_seed(0)), torch.rand(5, 2)
P, Q, C = torch.full((4,), 1 / 4), torch.full((5,), 1 / 5), torch.rand(4, 5)
CALLS: dict[str, Callable[..., Any]] = {
    "cloud_loss": lambda **k: otloss.cloud_loss(X, Y, **k),
    "CloudLoss": nn.CloudLoss,
    "emd": lambda **k: otloss.emd(P, Q, C, **k),
    "sinkhorn": lambda **k: otloss.sinkhorn(P, Q, C, **k),
    "sinkhorn_divergence": lambda **k: otloss.sinkhorn_divergence(P, P, C[:, :4], **k),
    "solve": lambda **k: otloss.solve(P, Q, C, **k),
    "Emd": lambda **k: nn.Emd(cost=C, **k),
    "Sinkhorn": lambda **k: nn.Sinkhorn(cost=C, **k),
    "SinkhornDivergence": lambda **k: nn.SinkhornDivergence(cost=C, **k),
}
GEOMLOSS = {"reach": "marginal_penalty=", "debias": "sinkhorn_divergence", "scaling": "tolerance=", "p": "metric="}


@pytest.mark.parametrize(
    ("function", "keyword", "ours"),
    [
        *((function, *pair) for function in ("cloud_loss", "CloudLoss") for pair in GEOMLOSS.items()),
        ("cloud_loss", "loss", "kind="),
        ("sinkhorn", "blur", r"epsilon=2 \* blur\*\*2"),
        ("sinkhorn_divergence", "blur", "epsilon="),
        ("sinkhorn_divergence", "debias", "sinkhorn_divergence are debiased"),
        ("sinkhorn", "reg", "epsilon=reg"),
        ("solve", "reg_m", "marginal_penalty=reg_m"),
        ("sinkhorn", "numItermax", "max_iterations="),
        ("emd", "numItermax", "leave it out"),
        ("emd", "reg", "a function that has epsilon="),
        ("emd", "reach", "a function that has marginal_penalty="),
        ("emd", "M", "cost=M"),
        ("Emd", "log", r"solve\("),
        ("Sinkhorn", "scaling", "tolerance="),
        ("SinkhornDivergence", "blur", "epsilon="),
    ],
)
def test_a_foreign_keyword_names_ours(function: str, keyword: str, ours: str) -> None:
    with pytest.raises(TypeError, match=rf"^{function} has no option '{keyword}', .*{ours}"):
        CALLS[function](**{keyword: 0.5})


def test_other_keywords_are_those_of_python() -> None:
    with pytest.raises(TypeError, match="unexpected keyword argument 'epsilom'"):
        otloss.sinkhorn(P, Q, C, epsilom=0.1)  # type: ignore[call-arg]
    assert "reach" not in inspect.signature(otloss.cloud_loss).parameters
    assert next(iter(inspect.signature(nn.CloudLoss).parameters)) == "kind"


FIRST = r"the cost stands first, .* expected the order \(p, q, C\), as in emd\(p, q, C\)"


@pytest.mark.parametrize(
    "arguments", [(C, P, Q), (C[:, :4], P, P), (C, P.expand(3, 4), Q.expand(3, 5)), (PointCost(X, Y), P, Q)]
)
def test_the_cost_in_front_is_named(arguments: tuple[Any, Any, Any]) -> None:
    with pytest.raises(ValueError, match=FIRST):
        otloss.emd(*arguments)
    with pytest.raises(ValueError, match=FIRST):
        otloss.emd(*arguments, mass=0.5)
    for function in (otloss.sinkhorn, otloss.sinkhorn_divergence, otloss.solve):
        with pytest.raises(ValueError, match=FIRST):
            function(*arguments, epsilon=0.1)  # type: ignore[operator]
    for bound in (otloss.lower_bound, otloss.upper_bound):
        with pytest.raises(ValueError, match=FIRST):
            bound(*arguments)


@pytest.mark.parametrize("cells", [(4, 4), (2, 3, 4)])
def test_images_with_axes_of_their_own(cells: tuple[int, ...]) -> None:
    images = torch.rand(2, *cells, generator=torch.Generator().manual_seed(0))
    images = images / images.flatten(1).sum(-1).reshape(-1, *(1 for _ in cells))
    advice = rf"p has shape .*, expected \(..., {images[0].numel()}\).*images.flatten\(-{len(cells)}\)"
    for cost in (GridCost(cells), GridCost(cells).dense()):
        with pytest.raises(ValueError, match=advice):
            otloss.sinkhorn(images[0], images[1], cost, epsilon=1.0)
        with pytest.raises(ValueError, match=advice):
            otloss.emd(images, None, cost)
    flat = images.flatten(-len(cells))
    assert otloss.emd(flat[0], flat[1], GridCost(cells)) > 0


def test_complex_weights_are_not_cast() -> None:
    for call in (lambda p, c: otloss.emd(p, Q, c), lambda p, c: otloss.sinkhorn(p, Q, c, epsilon=0.1)):
        with pytest.raises(TypeError, match=r"p has dtype torch.complex64.*p.abs\(\) or p.real") as error:
            call(P.to(torch.complex64), C)
        assert ".float()" not in str(error.value)
        with pytest.raises(TypeError, match=r"cost.abs\(\) or cost.real"):
            call(P, C.to(torch.complex64))
