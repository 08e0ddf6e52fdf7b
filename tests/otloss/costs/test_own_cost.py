"""The cost of a user: the example of docs/contributors/design.md, run as printed, against its matrix."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import otloss
from otloss import nn
from tests.otloss.oracles import check_questions

PAGE = (Path(__file__).parents[3] / "docs/contributors/design.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def example() -> dict[str, Any]:
    block = PAGE.partition("### A cost of your own")[2].partition("```python\n")[2].partition("```")[0]
    names: dict[str, Any] = {}
    torch.manual_seed(0)
    exec(compile(block, "docs/contributors/design.md", "exec"), names)
    return names


def test_the_example_uses_public_names_alone(example: dict[str, Any]) -> None:
    own = set(vars(example["FactoredCost"])) - {"__init__", "__module__", "__doc__"}
    assert not {name for name in own if name.startswith("_") and "abc" not in name and not name.startswith("__")}
    assert example["a"].grad is not None


def test_the_example_is_its_matrix(example: dict[str, Any]) -> None:
    b, make = example["b"].double(), example["FactoredCost"]
    a = example["a"].detach().double().requires_grad_()
    check_questions(make(a.detach(), b), (a @ b.T).detach())
    check_questions(make(a.detach(), b[:5]), (a @ b[:5].T).detach())  # square: staying costs something
    p = torch.tensor([0.1, 0.3, 0.2, 0.4, 0.0], dtype=torch.float64)
    calls: list[Callable[[Any], torch.Tensor]] = [
        lambda cost: otloss.emd(None, None, cost),
        lambda cost: otloss.upper_bound(p, None, cost),
        *(
            lambda cost, impl=impl, e=epsilon: otloss.sinkhorn(None, None, cost, epsilon=e, impl=impl)
            for impl in ("compiled", "torch")
            for epsilon in (0.1, 1e-3)
        ),
    ]
    for call in calls:
        actual, expected = (call(cost) for cost in (make(a, b), a @ b.T))
        torch.testing.assert_close(actual, expected)
        gradients = (torch.autograd.grad(value, a)[0] for value in (actual, expected))
        torch.testing.assert_close(*gradients, atol=1e-6, rtol=1e-5)


def test_the_example_in_a_module(example: dict[str, Any]) -> None:
    a = torch.nn.Parameter(example["a"].detach().clone())
    module = nn.Sinkhorn(cost=example["FactoredCost"](a, example["b"]), epsilon=0.1)
    assert [p is a for p in module.parameters()] == [True]
    assert module.double().settings["cost"].dtype == torch.float64
    with pytest.raises(ValueError, match="give them with cost_p= and cost_q="):
        otloss.sinkhorn_divergence(None, None, example["FactoredCost"](a, a), epsilon=0.1)
