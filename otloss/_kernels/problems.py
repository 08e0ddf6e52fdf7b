"""A batch of transport problems laid out flat for a solver, and the call of the compiled one."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor


@dataclass(frozen=True)
class FlatProblems:
    """B problems on the CPU, and the arrays that a solver fills.

    Attributes:
        p, q: (B, n) and (B, m), float64 weights.
        matrices: (K, n, m), float32 or float64; problem k uses matrices[owners[k]], so a shared one is not copied.
        start: (B, m) potentials of q's bins to start from, or (B, 0).
        f, g: (B, n) and (B, m), the potentials.
        cells, flows: (B, 2, n + m - 1) and (B, n + m - 1), rows and columns of the plan's cells and the mass there.
        ends: (B, 4), value, duality gap, the scale to judge the gap by, and pivots, -1 where they did not suffice.
    """

    p: Float[Tensor, "problems n"]
    q: Float[Tensor, "problems m"]
    matrices: Float[Tensor, "matrices n m"]
    owners: Int[Tensor, " problems"]
    start: Float[Tensor, "problems m_or_none"]
    f: Float[Tensor, "problems n"]
    g: Float[Tensor, "problems m"]
    cells: Int[Tensor, "problems 2 cells"]
    flows: Float[Tensor, "problems cells"]
    ends: Float[Tensor, "problems 4"]

    @classmethod
    def of(cls, p: Tensor, q: Tensor, matrix: Tensor, *, batch: torch.Size, g: Tensor | None) -> FlatProblems:
        """Lay out weights and costs whose leading axes broadcast to `batch`; `g` are potentials to start from."""
        (n, m), size = matrix.shape[-2:], batch.numel()

        def empty(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
            return torch.empty(size, *shape, dtype=dtype, device="cpu")

        return cls(
            p=_flat(p, batch),
            q=_flat(q, batch),
            matrices=matrix.detach().cpu().reshape(matrix.shape[:-2].numel(), n, m).contiguous(),
            owners=owners_of(matrix.shape[:-2], batch).reshape(size),
            start=empty(0) if g is None else _flat(g, batch),
            f=empty(n),
            g=empty(m),
            cells=empty(2, n + m - 1, dtype=torch.int64),
            flows=empty(n + m - 1),
            ends=empty(4),
        )


def owners_of(own: torch.Size, batch: torch.Size) -> Int[Tensor, "*batch"]:
    """Which matrix each problem uses, as an index into the flattened axes `own`."""
    return torch.arange(own.numel(), device="cpu").reshape(own).expand(batch).contiguous()


def solve_compiled(work: FlatProblems, *, most: int) -> None:
    """Solve by numba kernels on torch's number of threads: assignments along shortest paths, all else by the simplex.

    The simplex makes at most `most` pivots for each problem.
    """
    names = ("p", "q", "matrices", "owners", "f", "g", "cells", "flows", "ends")
    p, q, matrices, owners, *filled = (getattr(work, name).numpy() for name in names)
    start, ends = work.start.numpy(), filled[-1]
    if not _are_assignments(p, q):
        _run_simplex(start, p, q, matrices, owners, filled, most=most)
        return
    _run_assignment(start, p, matrices, owners, filled)
    rest = np.flatnonzero(ends[:, 3] < 0)  # given up
    if rest.size:
        of_rest = [array[rest] for array in filled]
        _run_simplex(start[rest], p[rest], q[rest], matrices, owners[rest], of_rest, most=most)
        for array, part in zip(filled, of_rest, strict=True):
            array[rest] = part


def _are_assignments(p: np.ndarray, q: np.ndarray) -> bool:
    """Whether all problems have as many bins on either side, all of one mass above zero."""
    if p.shape != q.shape or not p.size:
        return False
    return all(bool((w[:, 0] > 0).all()) and bool((w == w[:, :1]).all()) for w in (p, q))


def _run_assignment(
    start: np.ndarray, p: np.ndarray, matrices: np.ndarray, owners: np.ndarray, filled: list[np.ndarray]
) -> None:
    from otloss._kernels._threads import ENTRIES, run_on_threads
    from otloss._kernels.assignment import assign_problems, scratch

    count, n = p.shape
    given = (start, p, matrices, owners, *filled)
    run_on_threads(assign_problems, count, given, lambda: scratch(n), one_thread=count * n * n < ENTRIES)


def _run_simplex(
    start: np.ndarray, p: np.ndarray, q: np.ndarray, matrices: np.ndarray, owners: np.ndarray,
    filled: list[np.ndarray], *, most: int,
) -> None:  # fmt: skip
    from otloss._kernels._threads import ENTRIES, run_on_threads
    from otloss._kernels.exact import scratch, solve_problems, solve_problems_from

    (count, n), m = p.shape, q.shape[1]
    kernel, given = solve_problems, (p, q, matrices, owners, most, *filled)
    if start.shape[1]:
        kernel, given = solve_problems_from, (start, *given)
    run_on_threads(kernel, count, given, lambda: scratch(n, m, matrices.dtype), one_thread=count * n * m < ENTRIES)
    empty = ~(p.any(1) & q.any(1))
    if empty.any():
        # Without mass f_i + g_j <= C_ij is the only condition: the derivative in p_i is the least cost of its row.
        f, g, cells, flows, ends = filled
        f[empty], g[empty] = matrices[owners[empty]].min(-1), 0.0
        cells[empty], flows[empty], ends[empty] = 0, 0.0, 0.0


def _flat(weights: Tensor, batch: torch.Size) -> Tensor:
    flat = weights.detach().to("cpu", torch.float64).expand(*batch, weights.shape[-1])
    return flat.reshape(batch.numel(), weights.shape[-1]).contiguous()
