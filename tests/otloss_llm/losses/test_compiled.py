"""`torch.compile` of a program around the fused loss: one graph, the same numbers, the same errors."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounter

from otloss_llm import EMO, MLE, EmbeddingCost, MixCE, TaiLr, TokenLoss, linear_token_loss
from tests.otloss_llm.oracles import OBJECTIVES, problem
from tests.otloss_llm.scoring import assert_all_close, fused, gradients

BACKENDS = ["eager", "aot_eager"]


@pytest.fixture(autouse=True)
def fresh_graphs() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def compiled(function: Callable[..., Any], backend: str = "aot_eager") -> Callable[..., Any]:
    return torch.compile(function, backend=backend, fullgraph=True)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("name", OBJECTIVES)
def test_one_graph_with_the_numbers_of_eager(name: str, reduction: str, backend: str) -> None:
    objective, _ = OBJECTIVES[name]
    given = problem(30, batch=(3, 5))
    settings = {"objective": objective, "cost": EmbeddingCost(given.embedding), "reduction": reduction, "chunk_size": 4}

    def score(*leaves: Tensor) -> TokenLoss:
        # Something before and after: the loss is in the middle of a graph.
        out = fused([2.0 * leaves[0], *leaves[1:]], given, **settings)
        return out._replace(loss=3.0 * out.loss)

    upstream = torch.linspace(1, 2, 15, dtype=torch.float64).reshape(3, 5) if reduction == "none" else torch.tensor(1.0)
    leaves, again = given.leaves(), given.leaves()
    got, want = compiled(score, backend)(*leaves), score(*again)
    for mine, expected in zip(got, want, strict=True):
        assert (mine is None) == (expected is None)
        if mine is not None:
            torch.testing.assert_close(mine, expected, rtol=1e-14, atol=0)
    assert not got.nll.requires_grad
    assert_all_close(
        gradients((got.loss * upstream).sum(), leaves), gradients((want.loss * upstream).sum(), again), 1e-14
    )


def test_another_objective_or_cost_is_another_graph() -> None:
    given = problem(31)
    first, other = EmbeddingCost(given.embedding), EmbeddingCost(given.embedding.flip(0))

    def score(leaves: list[Tensor], objective: Any, cost: Any) -> Tensor:
        return fused(leaves, given, objective=objective, cost=cost).loss

    run = compiled(score)
    for objective, cost in ((EMO(), first), (MLE(), None), (EMO(), other), (EMO(0.5), other), (MixCE(0.3), other)):
        leaves, again = given.leaves(), given.leaves()
        got, want = run(leaves, objective, cost), score(again, objective, cost)
        torch.testing.assert_close(got, want, rtol=1e-14, atol=0)
        assert_all_close(gradients(got, leaves), gradients(want, again), 1e-14)


class Tiny(nn.Module):
    """A model that scores itself, as people write them."""

    def __init__(self, objective: Any = None, vocab: int = 23) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.embed = nn.Embedding(vocab, 8)
        self.head = nn.Linear(8, vocab, bias=False)
        for parameter in self.parameters():
            parameter.data = torch.randn(parameter.shape, generator=generator)
        self.objective = objective or EMO()
        self.cost = EmbeddingCost(self.head.weight)

    def forward(self, ids: Tensor, labels: Tensor, num_items: Tensor | int | None = None) -> TokenLoss:
        hidden = torch.tanh(self.embed(ids))
        return linear_token_loss(
            hidden, self.head.weight, labels, objective=self.objective, cost=self.cost, num_items=num_items
        )


def batch(length: int = 9) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(length)
    ids = torch.randint(23, (2, length), generator=generator)
    labels = torch.randint(23, (2, length), generator=generator)
    labels[0, :3] = -100
    return ids, labels


@pytest.mark.parametrize("dynamic", [None, True])
def test_a_model_of_changing_lengths(dynamic: bool | None) -> None:
    eager, model = Tiny(), Tiny()
    run = torch.compile(model, backend="aot_eager", fullgraph=True, dynamic=dynamic)
    for length in (9, 4, 17):
        for number in (None, torch.tensor(40)):
            got, want = run(*batch(length), number), eager(*batch(length), number)
            torch.testing.assert_close(got.loss, want.loss)
            torch.testing.assert_close(got.nll, want.nll)
            got.loss.backward(), want.loss.backward()
    for mine, expected in zip(model.parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, expected.grad)


def test_counts_of_items_do_not_recompile() -> None:
    model, eager = Tiny(), Tiny()
    compilations = CompileCounter()
    run = torch.compile(model, backend=compilations, fullgraph=True)
    for number in range(3, 12):
        torch.testing.assert_close(run(*batch(), number).loss, eager(*batch(), number).loss)
    assert compilations.frame_count <= 2


def test_an_exported_program_would_lose_the_objective() -> None:
    with pytest.raises(Exception, match="cannot be exported"):
        torch.export.export(Tiny(), batch())


def test_training_follows_eager_step_by_step() -> None:
    eager, model = Tiny(), Tiny()
    run = compiled(model)
    for step, parameters in ((eager, eager.parameters()), (run, model.parameters())):
        optimizer = torch.optim.SGD(parameters, lr=0.5)
        for length in (5, 6, 7):
            optimizer.zero_grad()
            step(*batch(length)).loss.backward()
            optimizer.step()
    for mine, expected in zip(model.parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(mine, expected)
    torch.testing.assert_close(run(*batch()).loss, eager(*batch()).loss)


def test_frozen_head_and_no_grad(monkeypatch: pytest.MonkeyPatch) -> None:
    model, eager = Tiny(), Tiny()
    model.head.requires_grad_(False), eager.head.requires_grad_(False)
    run = compiled(model)
    got, want = run(*batch()), eager(*batch())
    got.loss.backward(), want.loss.backward()
    assert model.head.weight.grad is None
    torch.testing.assert_close(model.embed.weight.grad, eager.embed.weight.grad)

    def refuse(*args: Any) -> None:
        raise AssertionError("gradient work")

    from otloss_llm.kernels.gradients import Gradients

    monkeypatch.setattr(Gradients, "add", refuse)
    with torch.no_grad():
        out = run(*batch())
    assert not out.loss.requires_grad
    torch.testing.assert_close(out.loss, want.loss.detach())
    with pytest.raises(AssertionError, match="gradient work"):
        run(*batch())


def test_autocast() -> None:
    model, eager = Tiny(), Tiny()
    run = compiled(model)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got, want = run(*batch()), eager(*batch())
    assert got.loss.dtype == torch.float32
    torch.testing.assert_close(got.loss, want.loss, rtol=0, atol=0)
    got.loss.backward(), want.loss.backward()
    torch.testing.assert_close(model.head.weight.grad, eager.head.weight.grad, rtol=0, atol=0)


def test_errors_reach_the_caller() -> None:
    model = Tiny()
    ids, labels = batch()
    run = compiled(model)
    labels[0, 4] = 23
    with pytest.raises(ValueError, match="outside the vocabulary"):
        run(ids, labels)
    model.head.weight.data[0, 0] = float("nan")
    with pytest.raises(ValueError, match="weight"):
        run(*batch())


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_compiled_backward_has_no_second_derivative(backend: str) -> None:
    model = Tiny()
    loss = compiled(model, backend)(*batch()).loss
    message = "no second derivative" if backend == "eager" else "double backward"
    with pytest.raises(RuntimeError, match=message):
        torch.autograd.grad(loss, list(model.parameters()), create_graph=True)[0].sum().backward()


class Scaled:
    """A user's objective with a class-level default that an unfinished object would show."""

    weight = 1.0

    def __init__(self, weight: float) -> None:
        self.weight = weight

    def __call__(self, nll: Tensor, cost: Tensor | None) -> Tensor:
        return self.weight * nll


def weighted(nll: Tensor, cost: Tensor | None, *, weight: float) -> Tensor:
    assert cost is not None
    return nll + weight * cost


def test_objectives_made_inside_the_compiled_function() -> None:
    given = problem(33)
    cost = EmbeddingCost(given.embedding)
    makers: list[Callable[[], Any]] = [
        MLE, EMO, lambda: EMO(0.5), lambda: EMO(ratio_clip=2.0), lambda: EMO("transport"), lambda: TaiLr(0.3),
        lambda: TaiLr(0.3, min_weight=0.1), lambda: MixCE(0.3), lambda: partial(weighted, weight=0.3),
    ]  # fmt: skip
    for make in makers:
        torch.compiler.reset()

        def score(*leaves: Tensor, make: Callable[[], Any] = make) -> Tensor:
            return fused(list(leaves), given, objective=make(), cost=cost).loss

        leaves, again = given.leaves(), given.leaves()
        got, want = compiled(score)(*leaves), score(*again)
        torch.testing.assert_close(got, want, rtol=1e-14, atol=0)
        assert_all_close(gradients(got, leaves), gradients(want, again), 1e-14)

    outside = Scaled(3.0)
    got = compiled(lambda *leaves: fused(list(leaves), given, objective=outside, cost=cost).loss)(*given.leaves())
    torch.testing.assert_close(got, fused(given.leaves(), given, objective=Scaled(3.0), cost=cost).loss)
    with pytest.raises(Exception, match="made inside the compiled function; make it outside"):
        compiled(lambda *leaves: fused(list(leaves), given, objective=Scaled(3.0), cost=cost).loss)(*given.leaves())


def test_loss_scaling_saves_float16_gradients() -> None:
    given = problem(34, batch=(64,), vocab=512, dtype=torch.float16, ignored=0.0)
    cost = EmbeddingCost(given.embedding)

    def score(*leaves: Tensor) -> Tensor:
        return fused(list(leaves), given, objective=EMO(), cost=cost, num_items=100_000).loss

    leaves, again = given.leaves(), given.leaves()
    got = gradients(compiled(score)(*leaves) * 2.0**16, leaves)
    for mine, expected in zip(got, gradients(score(*again) * 2.0**16, again), strict=True):
        assert torch.equal(mine, expected)


def test_the_operator_keeps_its_contract() -> None:
    """torch's own checks: schema, fake shapes, autograd registration, and tracing with symbolic sizes."""
    from otloss_llm.losses import torch_compile as module

    given = problem(32, batch=(7,), vocab=11, width=3)
    hidden, weight = given.leaves()[:2]
    objective, cost = EMO(), EmbeddingCost(given.embedding)
    key = module.key_of(objective, id(objective), cost, id(cost))
    for reduction in ("mean", "none"):
        settings = (reduction, -100, 1.0, None, "auto", 3, [True, True, False])
        torch.library.opcheck(module._operator, (hidden, weight, given.labels, None, None, key, *settings))
