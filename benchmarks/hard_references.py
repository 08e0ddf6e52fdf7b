"""Reference values and gradients of hard clouds, by a slow and safe way: `python -m benchmarks.hard_references`.

The semi-dual of entropic transport is minimised over g, f being eliminated, in float64 on dense matrices, by Newton's
method with a Cholesky factorisation, backtracking and an iteration of Sinkhorn between the steps, until nothing gets
better. It starts from POT's exact potentials, between a cloud and itself from symmetric iterations; no function of
otloss takes part. The error that is kept with a value is the largest sum of the differences of the plan's marginals.

The gradient is kept as its norm and its projections on vectors of random signs: the root of the mean square of the
projections of a difference estimates the norm of that difference.
"""

from __future__ import annotations

import argparse
import csv
import math
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import ot
import torch
from torch import Generator, Tensor

from benchmarks.hard_kinds import BLURS, KINDS, Hard
from benchmarks.measure import append, say

FILE = Path(__file__).parent / "hard_references.csv"
FIELDS = ("kind", "size", "blur", "penalty", "marginal_error", "values", "gradient_norm", "projections")
PROJECTIONS = 16
BLOCK = 2**22  # entries of a plan at a time
EXACT = 1e-13
MIN_RIDGE, MIN_SHARE, MAX_STUCK = 1e-15, 0.02, 12
LARGEST_ERROR = 1e-9  # in the marginals; rows beyond it are kept, and not compared with
STEPS, ITERATIONS = 100, 30  # Newton's steps, and Sinkhorn's iterations before them in a symmetric problem
SIZES = ("16x256", "500", "2000")
Key = tuple[str, str, str, str]


@dataclass(frozen=True)
class Reference:
    """Values of `cloud_loss`, the norm of the gradient of their sum in x, and its projections."""

    values: Tensor
    gradient_norm: float
    projections: Tensor
    marginal_error: float

    def value_error(self, values: Tensor) -> float:
        """The largest relative error."""
        return float(((values.double() - self.values) / self.values).abs().max())

    def gradient_error(self, gradient: Tensor) -> float:
        """Relative, estimated from the projections."""
        away = projected(gradient) - self.projections
        return float(away.square().mean().sqrt()) / self.gradient_norm


def projected(gradient: Tensor) -> Tensor:
    flat, generator = gradient.double().flatten(), Generator().manual_seed(0)
    signs = 2.0 * torch.randint(0, 2, (PROJECTIONS, len(flat)), generator=generator) - 1
    return signs.double() @ flat


def references() -> dict[Key, Reference]:
    """The rows of the file that converged, by kind, size, blur and penalty."""
    return {key: row for key, row in _every_row().items() if row.marginal_error <= LARGEST_ERROR}


def _every_row() -> dict[Key, Reference]:
    if not FILE.exists():
        return {}
    with FILE.open(newline="", encoding="utf-8") as stream:
        return {
            (row["kind"], row["size"], row["blur"], row["penalty"]): Reference(
                torch.tensor([float(v) for v in row["values"].split()], dtype=torch.float64),
                float(row["gradient_norm"]),
                torch.tensor([float(v) for v in row["projections"].split()], dtype=torch.float64),
                float(row["marginal_error"]),
            )
            for row in csv.DictReader(stream)
        }


def marginal_error(clouds: Hard, f: Tensor, g: Tensor, epsilon: float, rho: float | None) -> float:
    """The largest sum of differences between marginals of the plan of these potentials and what they are to be."""
    x, y, p, q, f, g = (t.detach().double() for t in (clouds.x, clouds.y, clouds.p, clouds.q, f, g))
    p, q = p / p.sum(-1, keepdim=True), q / q.sum(-1, keepdim=True)
    rows, columns = torch.zeros_like(p), torch.zeros_like(q)
    size = max(1, BLOCK // q.numel())
    for start in range(0, p.shape[-1], size):
        part = slice(start, start + size)
        cost = torch.cdist(x[..., part, :], y, compute_mode="donot_use_mm_for_euclid_dist").square()
        scores = (f[..., part, None] + g[..., None, :] - cost) / epsilon
        plan = p[..., part, None] * q[..., None, :] * scores.exp()
        rows[..., part] = plan.sum(-1)
        columns += plan.sum(-2)
    if rho is not None:
        p, q = p * (-f / rho).exp(), q * (-g / rho).exp()
    return float(((rows - p).abs().sum(-1) + (columns - q).abs().sum(-1)).max())


# ---- one problem -----------------------------------------------------------------------------------------------------


@dataclass
class Dual:
    """min over (f, g) of sum_i p_i phi(f_i) + sum_j q_j phi(g_j) + epsilon sum_ij P_ij, of one problem in float64.

    P_ij = p_i q_j exp((f_i + g_j - C_ij) / epsilon); phi(t) = -t, or rho exp(-t / rho) with a penalty rho of the
    marginals.
    """

    cost: Tensor
    p: Tensor
    q: Tensor
    rho: float | None
    epsilon: float

    def best_f(self, g: Tensor) -> Tensor:
        return self._best((g - self.cost) / self.epsilon + self.q.log(), -1)

    def best_g(self, f: Tensor) -> Tensor:
        return self._best(((f - self.cost.mT) / self.epsilon + self.p.log()).mT, -2)

    def _best(self, scores: Tensor, axis: int) -> Tensor:
        potential = -self.epsilon * torch.logsumexp(scores, axis)
        return potential if self.rho is None else potential * self.rho / (self.rho + self.epsilon)

    def plan(self, f: Tensor, g: Tensor) -> Tensor:
        scores = (f.unsqueeze(-1) + g - self.cost).div_(self.epsilon)
        return scores.add_(self.p.log().unsqueeze(-1)).add_(self.q.log()).exp_()

    def phi(self, t: Tensor) -> Tensor:
        return -t if self.rho is None else self.rho * (-t / self.rho).exp()

    def targets(self, f: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
        """What the marginals of the plan are to be."""
        if self.rho is None:
            return self.p, self.q
        return self.p * (-f / self.rho).exp(), self.q * (-g / self.rho).exp()

    def objective(self, f: Tensor, g: Tensor, mass: Tensor) -> Tensor:
        return (self.p * self.phi(f)).sum() + (self.q * self.phi(g)).sum() + self.epsilon * mass

    def value(self, f: Tensor, g: Tensor) -> float:
        """The optimum of the transport problem, less what is linear in the marginal error."""
        mass = self.p.sum() * self.q.sum() - self.plan(f, g).sum()
        constant = 0.0 if self.rho is None else self.rho * float(self.p.sum() + self.q.sum())
        return float(-(self.p * self.phi(f)).sum() - (self.q * self.phi(g)).sum() + self.epsilon * mass) + constant

    def error(self, f: Tensor, g: Tensor) -> float:
        plan, (rows, columns) = self.plan(f, g), self.targets(f, g)
        return float((plan.sum(-1) - rows).abs().sum() + (plan.sum(-2) - columns).abs().sum())

    def newton(self, g: Tensor, tolerance: float) -> Tensor:
        """A step that would have to be shortened a lot is taken again with a larger ridge."""
        best, smallest_error, stuck, ridge = g, math.inf, 0, MIN_RIDGE
        for _ in range(STEPS):
            g = self.best_g(self.best_f(g))  # no column without mass
            f = self.best_f(g)
            plan = self.plan(f, g)
            rows, columns = plan.sum(-1), plan.sum(-2)
            gradient = columns - self.targets(f, g)[1]
            error = float(gradient.abs().sum())
            stuck = 0 if error < smallest_error / 2 else stuck + 1
            best, smallest_error = (g, error) if error < smallest_error else (best, smallest_error)
            if error <= tolerance or stuck > MAX_STUCK:
                break
            step, ridge = self._step(plan, rows, columns, gradient, f, g, ridge)
            share, moved = self._moved(f, g, step, columns.sum(), float(gradient @ step))
            if share < MIN_SHARE:
                ridge *= 100
            else:
                g, ridge = moved, max(ridge / 10, MIN_RIDGE)
        return best

    def _step(
        self, plan: Tensor, rows: Tensor, columns: Tensor, gradient: Tensor, f: Tensor, g: Tensor, ridge: float
    ) -> tuple[Tensor, float]:
        """Newton's step, and the ridge that it took; the Hessian is scaled by the roots of its diagonal."""
        curved_f, curved_g = (0.0, 0.0) if self.rho is None else (
            t * self.epsilon / self.rho for t in self.targets(f, g)
        )  # fmt: skip
        scaled = plan / (rows + curved_f).sqrt().unsqueeze(-1)
        hessian = -(scaled.mT @ scaled)
        hessian.diagonal().add_(columns + curved_g)
        root = (columns + curved_g).sqrt()
        hessian /= root.unsqueeze(-1) * root
        if self.rho is None:  # the constant, which changes nothing
            unit = root / root.norm()
            hessian += unit.unsqueeze(-1) * unit
        while True:
            damped = hessian.clone()
            damped.diagonal().add_(ridge)
            factor, info = torch.linalg.cholesky_ex(damped)
            if int(info) == 0:
                step = torch.cholesky_solve((gradient / root).unsqueeze(-1), factor).squeeze(-1)
                return -step / root * self.epsilon, ridge
            ridge *= 10

    def _moved(self, f: Tensor, g: Tensor, step: Tensor, mass: Tensor, decrease: float) -> tuple[float, Tensor]:
        now, share = self.objective(f, g, mass), 1.0
        while True:
            moved = g + share * step
            f = self.best_f(moved)
            mass = self.p.sum() if self.rho is None else self.targets(f, moved)[0].sum()
            after = self.objective(f, moved, mass)
            if after <= now + 1e-4 * share * decrease + 1e-15 * abs(now) or share < MIN_SHARE:
                return share, moved
            share /= 2


def potentials(dual: Dual, *, symmetric: bool) -> tuple[Tensor, Tensor]:
    """The solution of the dual problem, to the last digits that float64 has."""
    if symmetric:
        g = torch.zeros_like(dual.q)
        for _ in range(ITERATIONS):
            g = (g + dual.best_f(g)) / 2
    else:
        _, log = ot.emd(dual.p.numpy(), dual.q.numpy(), dual.cost.numpy(), numItermax=10**9, log=True)
        g = torch.from_numpy(log["v"])
    g = dual.newton(g, EXACT)
    return dual.best_f(g), g


def of_one(x: Tensor, y: Tensor, p: Tensor, q: Tensor, blur: float, rho: float | None) -> tuple[float, Tensor, float]:
    """The value of `cloud_loss`, its gradient in x and the marginal error, of one pair of clouds in float64."""
    value, gradient, worst = 0.0, torch.zeros_like(x), 0.0
    for one, other, weights, factor in ((x, y, (p, q), 1.0), (x, x, (p, p), -0.5), (y, y, (q, q), -0.5)):
        cost = (one.unsqueeze(-2) - other).square().sum(-1)
        dual = Dual(cost, *weights, rho, 2 * blur**2)
        f, g = potentials(dual, symmetric=one is other)
        worst = max(worst, dual.error(f, g))
        value += factor / 2 * dual.value(f, g)
        if one is y:
            continue
        plan, sides = dual.plan(f, g), 1.0 if other is y else 2.0  # x is on both sides of x, x
        gradient += factor / 2 * sides * 2 * (plan.sum(-1, keepdim=True) * one - plan @ other)
    return value, gradient, worst


def reference(clouds: Hard, blur: float, rho: float | None = None) -> Reference:
    """`blur` in units of a mode."""
    x, y, p, q = (t.double() for t in (clouds.x, clouds.y, clouds.p, clouds.q))
    p, q = p / p.sum(-1, keepdim=True), q / q.sum(-1, keepdim=True)
    batch = x.shape[:-2].numel()
    parts = [t.reshape(batch, *t.shape[x.dim() - 2 :]) for t in (x, y, p, q)]
    found = [of_one(*one, blur * clouds.unit, rho) for one in zip(*parts, strict=True)]
    gradient = torch.stack([gradient for _, gradient, _ in found])
    values = torch.tensor([value for value, _, _ in found], dtype=torch.float64)
    return Reference(values, float(gradient.norm()), projected(gradient), max(error for _, _, error in found))


def main(arguments: Sequence[str] | None = None) -> None:
    """Add the rows that the file lacks."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kinds", nargs="+", default=KINDS, choices=KINDS)
    parser.add_argument("--sizes", nargs="+", default=SIZES)
    parser.add_argument("--blurs", nargs="+", type=float, default=BLURS)
    parser.add_argument("--penalty", type=float)
    options = parser.parse_args(arguments)
    for size in options.sizes:
        for kind in options.kinds:
            for blur in options.blurs:
                penalty = "" if options.penalty is None else f"{options.penalty:g}"
                key = (kind, size, f"{blur:g}", penalty)
                if key in _every_row():
                    continue
                started = time.perf_counter()
                made = reference(Hard.of(kind, size), blur, options.penalty)
                numbers = (made.values.tolist(), made.projections.tolist())
                values, projections = (" ".join(f"{v:.17g}" for v in row) for row in numbers)
                row = (*key, f"{made.marginal_error:.1e}", values, f"{made.gradient_norm:.17g}", projections)
                append(FILE, FIELDS, [dict(zip(FIELDS, row, strict=True))])
                say(f"{' '.join(key):<30} marginal error {made.marginal_error:.1e}, value {float(made.values[0]):.6g}, "
                    f"{time.perf_counter() - started:.1f} s")  # fmt: skip


if __name__ == "__main__":
    main(sys.argv[1:])
