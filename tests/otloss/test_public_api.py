"""The public face: every name resolves, and importing the package stays light."""

import inspect

import torch

import otloss
import otloss.boosting
import otloss.losses
from otloss.solvers.problem import Settings


def test_all_lists_every_public_name() -> None:
    public = {
        name
        for name, value in vars(otloss).items()
        if not name.startswith("_") and (callable(value) or name in ("costs", "nn"))
    }
    assert public | {"__version__"} == set(otloss.__all__)
    assert list(otloss.__all__) == sorted(otloss.__all__)


def test_signatures_show_every_option() -> None:
    """`help` and completion need names and defaults: no public function takes `**options`, and no default differs."""
    shown = {
        name: inspect.signature(value).parameters
        for module in (otloss, otloss.nn, otloss.losses, otloss.boosting)
        for name, value in vars(module).items()
        if inspect.isfunction(value) or (inspect.isclass(value) and issubclass(value, torch.nn.Module))
    }
    assert not [name for name, parameters in shown.items() for p in parameters.values() if p.kind is p.VAR_KEYWORD]
    options = list(inspect.signature(Settings).parameters.values())
    for name in ("sinkhorn", "sinkhorn_divergence", "solve", "Sinkhorn", "SinkhornDivergence"):
        actual = [p for p in shown[name].values() if p.name in {option.name for option in options}]
        assert [(p.name, p.default) for p in actual] == [(p.name, p.default) for p in options], name
