"""In which dtype an entropic problem is computed, and the logarithms of its weights."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from otloss._checks import float64_or
from otloss.solvers.histograms import of_equal_mass
from otloss.solvers.problem import Problem


def in_float64(problem: Problem) -> Problem:
    """Return the problem in float64 if the device has it, in balanced problems with equal masses."""
    return _converted(problem, problem.p, problem.q, problem.epsilon)


def detached_in_float64(problem: Problem) -> Problem:
    """Return the problem `in_float64`, without a graph, except for a cost that is in float64 already."""
    with torch.no_grad():
        return _converted(problem, *(t.detach() for t in (problem.p, problem.q, problem.epsilon)))


def _converted(problem: Problem, p: Tensor, q: Tensor, epsilon: Tensor) -> Problem:
    wide = float64_or(problem.cost.dtype, p.device)
    p, q, epsilon = p.to(wide), q.to(wide), epsilon.to(wide)
    if problem.marginal_penalty is None:
        q = of_equal_mass(p, q)
    cost = problem.cost if problem.cost.dtype == wide else problem.cost.to(wide)
    return dataclasses.replace(problem, p=p, q=q, cost=cost, epsilon=epsilon)


def is_queued(problem: Problem) -> bool:
    """Return whether the host does not wait for the work of the device: on a CPU, it does but for Triton's tests."""
    return problem.p.device.type != "cpu" or problem.impl == "triton"


def dtype_of_potentials(problem: Problem) -> torch.dtype:
    """Return float64 on a CPU also for float32 costs: the rounding of f counts in full in f / epsilon."""
    return torch.float64 if problem.p.device.type == "cpu" else problem.cost.dtype


def log_weights(problem: Problem, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return log p and log q, or in balanced problems of the mass M, log(p / M) and log(q / M)."""
    p, q = (w.detach().to(dtype) for w in (problem.p, problem.q))
    if problem.marginal_penalty is None:
        tiny = torch.finfo(dtype).tiny
        p, q = (w / w.sum(-1, keepdim=True).clamp(min=tiny) for w in (p, q))
    return p.log(), q.log()


def potential_of_plan(problem: Problem, f: Tensor) -> Tensor:
    """Return the f for which P_ij = p_i q_j exp((f_i + g_j - C_ij) / epsilon): f - epsilon log M if balanced."""
    if problem.marginal_penalty is not None:
        return f
    mass = problem.p.detach().to(f.dtype).sum(-1).clamp(min=torch.finfo(f.dtype).tiny)
    return f - (problem.epsilon.detach().to(f.dtype) * mass.log()).unsqueeze(-1)
