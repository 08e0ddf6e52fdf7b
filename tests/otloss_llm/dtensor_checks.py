"""Heads that are DTensors, in the functions and inside models: run by vocab_parallel_worker.py in each process."""

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from otloss_llm import (
    EMO,
    GEM,
    MLE,
    EmbeddingCost,
    ExpectedValue,
    RatingCost,
    ShardedEmbeddingCost,
    token_loss,
    token_statistics,
)
from otloss_llm.models.logit_transform import LogitTransform
from otloss_llm.training.fused import measure_transform
from tests.otloss_llm.oracles import Problem, everything, problem
from tests.otloss_llm.scoring import fused
from tests.otloss_llm.tiny_models import VOCAB, step, tiny_batch, tiny_model


def line() -> DeviceMesh:
    return init_device_mesh("cpu", (dist.get_world_size(),))


def placed(tensor: Tensor, placement: Any, mesh: DeviceMesh) -> Any:
    return distribute_tensor(tensor.detach().clone(), mesh, [placement]).requires_grad_()


def loss_of(hidden: Tensor, weight: Tensor, bias: Tensor | None, given: Problem, **settings: Any) -> Tensor:
    return fused([hidden, weight, bias], given, **{"objective": EMO()} | settings).loss  # type: ignore[list-item]


def assert_placed_like(got: Any, want: Tensor | None, tensor: Any) -> None:
    """The gradient of a DTensor: one of the same placement."""
    assert want is not None
    if isinstance(tensor, DTensor):
        assert isinstance(got, DTensor)
        assert got.placements == tensor.placements
        assert got.to_local().shape == tensor.to_local().shape
        got = got.full_tensor()
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)


def check_sharded_logits() -> None:
    """`token_loss` of logits that are sharded by columns, with all statistics, masked columns and costs of numbers."""
    mesh, given = line(), problem()
    z = torch.randn(37, 41, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    z[:, 40] = -torch.inf
    z[3, :14] = -torch.inf  # all columns of a process
    labels, weights = given.labels.clamp(max=39), torch.linspace(0.0, 2.0, 37, dtype=torch.float64)
    labels[3] = 39
    rated = RatingCost(torch.where(torch.arange(41) < 5, torch.arange(41), torch.nan).double())
    masked = lambda nll, cost, entropy: nll * cost + entropy  # noqa: E731 - the mean logit is -inf
    finite, embedding = z.nan_to_num(neginf=0.0), EmbeddingCost(given.embedding)
    for logits, objective, cost, reduction in (
        (z, masked, embedding, "none"), (z, EMO(), embedding, "mean"), (z, GEM(0.7), None, "mean"),
        (z, ExpectedValue(0.3), rated, "sum"), (finite, everything, embedding, "mean"),
    ):  # fmt: skip
        settings: dict[str, Any] = {"objective": objective, "cost": cost, "reduction": reduction}
        results = []
        for leaf in (logits.clone().requires_grad_(), placed(logits, Shard(1), mesh)):
            out = token_loss(leaf, labels, token_weight=weights, **settings)
            (out.loss * torch.linspace(1.0, 2.0, out.loss.numel(), dtype=torch.float64)).sum().backward()
            results.append((out, leaf))
        (one, whole), (out, part) = results
        torch.testing.assert_close(list(out), list(one), rtol=1e-12, atol=1e-12)
        for name in ("entropy", "logsumexp", "mean_logit", "tempered_logsumexp"):
            torch.testing.assert_close(getattr(out, name), getattr(one, name), rtol=1e-12, atol=1e-12)
        assert_placed_like(part.grad, whole.grad, part)
    with pytest.raises(ValueError, match=r"logits is a DTensor with placements \[Shard\(dim=0\)\]"):
        token_loss(placed(z, Shard(0), mesh), labels, objective=MLE())
    with pytest.raises(ValueError, match="made different calls"):
        token_loss(part, torch.tensor([dist.get_rank()]), objective=MLE())


def check_sequence_parallel_hidden_states() -> None:
    """Hidden states and labels sharded along the sequence: each process gets the gradient of its own positions."""
    mesh, given = line(), problem(2, batch=(3, 7))
    whole = given.leaves()
    one = loss_of(*whole, given)
    (1.5 * one).backward()
    want = token_statistics(*whole[:2], given.labels, bias=whole[2])
    for labels in (given.labels, distribute_tensor(given.labels, mesh, [Shard(1)])):
        hidden, head = placed(whole[0], Shard(1), mesh), [placed(tensor, Shard(0), mesh) for tensor in whole[1:]]
        loss = loss_of(hidden, *head, replace(given, labels=labels))
        torch.testing.assert_close(loss, one, rtol=1e-12, atol=1e-12)
        (1.5 * loss).backward()
        for got, leaf in zip([hidden, *head], whole, strict=True):
            assert_placed_like(got.grad, leaf.grad, got)
        for got, statistic in zip(token_statistics(hidden, head[0], labels, bias=head[1]), want, strict=True):
            torch.testing.assert_close(got, statistic)


def check_dtensor_heads() -> None:
    mesh = line()
    # 41 rows: 14, 14 and 13 of them over three processes; 1 row: the others have none.
    for given in (problem(), problem(1, vocab=1)):
        whole = given.leaves()
        sharded, everywhere = ([placed(tensor, way, mesh) for tensor in whole[1:]] for way in (Shard(0), Replicate()))
        plain, replicated = whole[0].detach().clone().requires_grad_(), placed(whole[0], Replicate(), mesh)
        cost = ShardedEmbeddingCost(placed(given.embedding, Shard(0), mesh))
        weights = torch.linspace(0.0, 2.0, given.labels.numel(), dtype=torch.float64).reshape(given.labels.shape)
        weighted: dict[str, Any] = {"objective": everything, "token_weight": weights}
        placed_weights = weighted | {"token_weight": distribute_tensor(weights, mesh, [Replicate()])}
        calls: list[tuple[Any, list[Any], dict[str, Any], dict[str, Any]]] = [
            (replicated, sharded, {}, {}), (replicated, sharded, placed_weights, weighted),
            (plain, sharded, {"process_group": mesh.get_group()}, {}),
            (replicated, sharded, {"cost": cost, "process_group": dist.group.WORLD}, {}),
            (plain, everywhere, {}, {}), (replicated, everywhere, {}, {}),
        ]  # fmt: skip
        for hidden, head, settings, of_one in calls:
            one, loss = loss_of(*whole, given, **of_one), loss_of(hidden, *head, given, **settings)
            torch.testing.assert_close(loss, one, rtol=1e-12, atol=1e-12)
            assert not isinstance(loss, DTensor)
            (1.5 * one).backward(), (1.5 * loss).backward()
            for got, want in zip((hidden, *head), whole, strict=True):
                assert_placed_like(got.grad, want.grad, got)
                got.grad = want.grad = None


def check_dtensor_errors() -> None:
    mesh, given = line(), problem()
    hidden, weight, bias = given.leaves()
    by_rows, by_columns = placed(weight, Shard(0), mesh), placed(weight, Shard(1), mesh)
    everywhere, bias_rows = placed(hidden, Replicate(), mesh), placed(bias, Shard(0), mesh)
    grid = init_device_mesh("cpu", (1, dist.get_world_size()), mesh_dim_names=("data", "model"))
    on_grid = distribute_tensor(weight.detach(), grid, [Replicate(), Shard(0)])
    for tensors, message in (
        ((hidden, by_rows, None), r"other processes may hold other tokens \(FSDP2\) or the same"),
        ((everywhere, by_columns, None), r"weight is a DTensor with placements \[Shard\(dim=1\)\]"),
        ((everywhere, by_rows, bias), "bias is a plain tensor, expected a DTensor sharded by rows"),
        ((hidden, weight, bias_rows), "bias is a DTensor with placements"),
        ((everywhere, on_grid, None), "on a mesh of one axis"),
    ):
        with pytest.raises(ValueError, match=message):
            loss_of(*tensors, given)
    with pytest.raises(ValueError, match="a sharded cost needs the rows of this process"):
        ShardedEmbeddingCost(by_columns)
    assert torch.equal(EmbeddingCost(by_rows).unit, EmbeddingCost(weight).unit)  # gathers


# ---- inside models -------------------------------------------------------------------------------------------------


def check_models_with_a_parallel_head() -> None:
    """torch's ColwiseParallel on the head (31 tokens do not divide by 2 or 3), with every form of its output."""
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    mesh, batch = line(), tiny_batch()
    outputs: list[dict[str, Any]] = [
        {"output_layouts": Replicate(), "use_local_output": False},
        {},  # each process sees its own columns of the logits
    ]
    # Gemma caps and Cohere scales its logits; the head of Phi has a bias.
    for name, forms in (("gemma2", outputs), ("cohere", outputs[1:]), ("phi", [{"output_layouts": Replicate()}])):
        plain = tiny_model(name, tie_word_embeddings=False)
        want = step(plain, batch, cost=EmbeddingCost.from_model(plain))
        expected = {key: parameter.grad for key, parameter in plain.named_parameters()}
        for index, form in enumerate(forms):
            model = tiny_model(name, tie_word_embeddings=False)
            parallelize_module(model, mesh, {"lm_head": ColwiseParallel(**form)})
            cost: Any = EmbeddingCost.from_model(model) if index % 2 else ShardedEmbeddingCost(model.lm_head.weight)
            torch.testing.assert_close(step(model, batch, cost=cost), want, rtol=1e-6, atol=0)
            for key, parameter in model.named_parameters():
                gradient: Any = parameter.grad
                full = gradient.full_tensor() if isinstance(gradient, DTensor) else gradient
                torch.testing.assert_close(full, expected[key], rtol=1e-4, atol=1e-6, msg=f"{name} {form} {key}")
    model = tiny_model("cohere", tie_word_embeddings=False)
    parallelize_module(model, mesh, {"lm_head": ColwiseParallel()})
    assert measure_transform(model, {"input_ids": batch["input_ids"]}) == LogitTransform(0.25)
    with pytest.raises(ValueError, match="changes its logits after the head"):
        step(model, batch, cost=EmbeddingCost(torch.eye(VOCAB)), transform=LogitTransform(0.5))


# ---- trainers of others ----------------------------------------------------------------------------------------------


def check_the_interface_of_torchtitan() -> None:
    """What its trainer does with a loss: hidden states of this process, labels, and the labels of all processes."""
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    from otloss_llm.training.torchtitan import ObjectiveLoss

    mesh, given = line(), problem(3, batch=(12,), bias=False, ignored=0.3)
    items = (given.labels != -100).sum()
    objective = EMO(ratio_clip=None)  # its value is nll
    whole = given.leaves()
    want = loss_of(*whole, None, given, objective=objective)
    of_hidden, of_weight = torch.autograd.grad(want, whole)
    share = len(given.labels) // dist.get_world_size()
    own = slice(dist.get_rank() * share, (dist.get_rank() + 1) * share)
    for way in ("fsdp", "tensor"):
        head, here = nn.Linear(16, 41, bias=False), own if way == "fsdp" else slice(None)
        head.weight = nn.Parameter(given.weight.clone())
        if way == "fsdp":
            fully_shard(head, mesh=mesh)
        else:
            parallelize_module(head, mesh, {"": ColwiseParallel()})
        objective_loss = ObjectiveLoss(objective, EmbeddingCost(given.embedding), chunk_size=7)
        objective_loss.set_lm_head(head)
        hidden = given.hidden[here].clone().requires_grad_()
        loss, metrics = objective_loss(hidden, given.labels[here], items)
        loss.backward()
        total = torch.stack([loss.detach(), metrics["nll/mean"]])
        if way == "fsdp":
            dist.all_reduce(total)
            gradient = head.weight.grad.full_tensor() * dist.get_world_size()  # FSDP averages
        else:
            gradient = head.weight.grad.full_tensor()  # type: ignore[operator]
        torch.testing.assert_close(total, want.detach().expand(2))
        torch.testing.assert_close(hidden.grad, of_hidden[here])
        torch.testing.assert_close(gradient, of_weight)
    with pytest.raises(ValueError, match="has no head"):
        ObjectiveLoss(EMO())(hidden, given.labels)
