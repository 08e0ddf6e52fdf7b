"""The cost of a user: the example of docs/contributors/design.md, run as printed, against its matrix."""

from pathlib import Path
from typing import Any

import pytest
import torch

import otloss
from otloss import nn
from otloss.costs import Cost
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
    a, b, make = example["a"].detach().double(), example["b"].double(), example["FactoredCost"]
    check_questions(make(a, b), a @ b.T)
    check_questions(make(a, b[:5]), a @ b[:5].T)  # square: staying costs something
    torch.testing.assert_close(otloss.emd(None, None, make(a, b)), otloss.emd(None, None, a @ b.T))
    p = torch.tensor([0.1, 0.3, 0.2, 0.4, 0.0], dtype=torch.float64)
    torch.testing.assert_close(
        otloss.upper_bound(p, p.flip(0), make(a, b[:5])), otloss.upper_bound(p, p.flip(0), a @ b[:5].T)
    )
    for epsilon in (0.1, 1e-3):
        expected = otloss.solve(None, None, a @ b.T, epsilon=epsilon)
        answer = otloss.solve(None, None, make(a, b), epsilon=epsilon, impl="torch")
        torch.testing.assert_close(answer.value, expected.value)
        torch.testing.assert_close(answer.plan(), expected.plan(), atol=1e-7, rtol=1e-5)


@pytest.mark.parametrize("impl", ["compiled", "torch"])
def test_the_example_has_gradients(example: dict[str, Any], impl: str) -> None:
    b, make = example["b"].double(), example["FactoredCost"]
    a = example["a"].detach().double().requires_grad_()
    for call in (
        lambda cost: otloss.sinkhorn(None, None, cost, epsilon=0.1, impl=impl),
        lambda cost: otloss.emd(None, None, cost),
    ):
        (actual,), (expected,) = (torch.autograd.grad(call(cost), a) for cost in (make(a, b), a @ b.T))
        torch.testing.assert_close(actual, expected, atol=1e-7, rtol=1e-5)


def test_the_example_in_a_module(example: dict[str, Any]) -> None:
    a = torch.nn.Parameter(example["a"].detach().clone())
    module = nn.Sinkhorn(cost=example["FactoredCost"](a, example["b"]), epsilon=0.1)
    assert [p is a for p in module.parameters()] == [True]
    assert module.double().settings["cost"].dtype == torch.float64
    with pytest.raises(ValueError, match="give them with cost_p= and cost_q="):
        otloss.sinkhorn_divergence(None, None, example["FactoredCost"](a, a), epsilon=0.1)


class Empty(Cost):
    """Without a tensor."""

    shape = (3, 3)
    T = property(lambda self: self)

    def rows(self, index: torch.Tensor) -> torch.Tensor:
        return torch.ones(len(index), 3)


def test_a_cost_without_a_tensor() -> None:
    with pytest.raises(TypeError, match="Empty has no floating tensor among its attributes, expected at least one"):
        otloss.emd(None, None, Empty())
