"""Training of a score function: L-BFGS on all rows in float64, or Adam on batches of them.

Both minimise   sum_i w_i L(z(x_i), y_i) / sum_i w_i  +  alpha / (2 sum_i w_i) |W|^2,

so that a weight of two is a row given twice, and `alpha` is the prior of ridge regression and of scikit-learn's 1 / C.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from scipy.optimize import minimize
from torch import Tensor

from otloss.estimators.criterion import Criterion
from otloss.estimators.scores import ScoreFunction
from otloss.losses import ordinal_loss


@dataclass(frozen=True)
class Rows:
    """Standardised features (n, d), positions (n,) and weights (n,) of training rows."""

    features: Tensor
    target: Tensor
    weight: Tensor

    @classmethod
    def of(cls, features: np.ndarray, target: np.ndarray, weight: np.ndarray) -> Rows:
        """Rows in float64 on the CPU, whatever torch's defaults are."""
        return cls(*(torch.tensor(part, device="cpu") for part in (features, target, weight)))

    def __len__(self) -> int:
        return len(self.target)

    def __getitem__(self, index: np.ndarray) -> Rows:
        chosen = torch.from_numpy(index)
        return Rows(self.features[chosen], self.target[chosen], self.weight[chosen])


@dataclass(frozen=True)
class Objective:
    """Loss of all parameters over rows: the mean by weight, and the penalty's share of one unit of weight."""

    scores: ScoreFunction
    criterion: Criterion
    alpha: float

    def data_loss(self, parameters: Tensor, rows: Rows) -> Tensor:
        """Weighted mean loss, without the penalty."""
        losses = row_losses(self.scores(parameters, rows.features), rows.target, self.criterion)
        return losses @ rows.weight / rows.weight.sum()

    def value_and_gradient(self, parameters: np.ndarray, rows: Rows, mass: float) -> tuple[float, np.ndarray]:
        """Penalised loss over `rows` out of a training set of weight `mass`, and its gradient."""
        with torch.enable_grad():
            leaf = torch.tensor(parameters, device="cpu", requires_grad=True)
            value = self.data_loss(leaf, rows)
            (gradient,) = torch.autograd.grad(value, leaf)
        pull = self.alpha / mass * self.scores.penalised() * parameters
        return float(value.detach()) + 0.5 * float(pull @ parameters), gradient.numpy() + pull


def row_losses(logits: Tensor, target: Tensor, criterion: Criterion) -> Tensor:
    """Loss of each row, (n,)."""
    if criterion.transport == 0:
        return criterion.cross_entropy * torch.nn.functional.cross_entropy(logits, target, reduction="none")
    geometry: dict[str, Any] = {
        name: torch.from_numpy(value) if isinstance(value, np.ndarray) else value
        for name, value in criterion.geometry.items()
    }
    mix = criterion.cross_entropy / criterion.transport
    return criterion.transport * ordinal_loss(logits, target, cross_entropy=mix, reduction="none", **geometry)


def train_lbfgs(
    objective: Objective, start: np.ndarray, rows: Rows, *, max_iter: int, tol: float
) -> tuple[np.ndarray, int, float]:
    """Parameters, iterations, and the largest slope at the end: above `tol` where training has not converged."""
    mass = float(rows.weight.sum())

    def descended(start: np.ndarray, *, iterations: int, ftol: float) -> tuple[np.ndarray, float, int, float]:
        found = minimize(
            lambda parameters: objective.value_and_gradient(parameters, rows, mass),
            start,
            jac=True,
            method="L-BFGS-B",
            options={"maxiter": iterations, "maxfun": 5 * iterations, "gtol": tol, "ftol": ftol},
        )
        return found.x, float(found.fun), int(found.nit), float(np.abs(found.jac).max())

    parameters, value, spent, slope = descended(start, iterations=max_iter, ftol=64 * np.finfo(float).eps)
    while slope > tol and spent < max_iter:
        # A step that gains next to nothing may be a bad one: begin again from there, without the curvatures gathered.
        onward, lower, more, slope_there = descended(parameters, iterations=max_iter - spent, ftol=0.0)
        if (lower, slope_there) >= (value, slope):
            break
        parameters, value, spent, slope = onward, lower, spent + more, slope_there
    return parameters, max(spent, 1), slope


@dataclass
class Adam:
    """Adam (Kingma and Ba 2015) on one vector; what it has gathered is kept between calls of `partial_fit`."""

    mean: np.ndarray | float = 0.0
    square: np.ndarray | float = 0.0
    steps: int = 0

    def step(self, gradient: np.ndarray) -> np.ndarray:
        """What to subtract from the parameters, at a learning rate of 1."""
        self.steps += 1
        self.mean = 0.9 * self.mean + 0.1 * gradient
        self.square = 0.999 * self.square + 0.001 * gradient**2
        slope = self.mean / (1 - 0.9**self.steps)
        return np.asarray(slope / (np.sqrt(self.square / (1 - 0.999**self.steps)) + 1e-8))


def train_epoch(
    objective: Objective,
    parameters: np.ndarray,
    rows: Rows,
    *,
    adam: Adam,
    learning_rate: float,
    batch_size: int,
    random: np.random.RandomState,
) -> tuple[np.ndarray, float]:
    """New parameters after one pass over the rows in random batches, and the mean of the penalised losses met."""
    mass = float(rows.weight.sum())
    total = 0.0
    for batch in _batches(rows, batch_size, random):
        # Each row counts by its weight, also where a batch happens to hold light rows only.
        share = float(batch.weight.sum()) * len(rows) / (mass * len(batch))
        value, gradient = objective.value_and_gradient(parameters, batch, mass * share)
        parameters = parameters - learning_rate * adam.step(share * gradient)
        total += value * float(batch.weight.sum()) / mass
    return parameters, total


@dataclass(frozen=True)
class Trained:
    """Parameters, the epochs that led to them, and whether training ended before `max_iter` by itself."""

    parameters: np.ndarray
    epochs: int
    settled: bool


def train_adam(
    objective: Objective,
    parameters: np.ndarray,
    rows: Rows,
    *,
    held_out: Rows | None,
    max_iter: int,
    n_iter_no_change: int,
    tol: float,
    verbose: int,
    **settings: Any,
) -> Trained:
    """Train until the loss held out, or without such rows the loss met, no longer falls.

    With rows held out the parameters are those of the best epoch, and the epochs are counted up to it.
    """
    stopping = EarlyStopping(n_iter_no_change, tol)
    adam, settled = Adam(), False
    for epoch in range(1, max_iter + 1):
        parameters, loss = train_epoch(objective, parameters, rows, adam=adam, **settings)
        if held_out is not None:
            with torch.no_grad():
                loss = float(objective.data_loss(torch.from_numpy(parameters), held_out))
        if verbose:
            print(f"epoch {epoch}: loss {loss:.6f}{' held out' if held_out is not None else ''}")
        settled = stopping.stop_after(loss, parameters)
        if settled:
            break
    if held_out is None or stopping.parameters is None:
        return Trained(parameters, epoch, settled)
    return Trained(stopping.parameters, stopping.round, settled)


def train_adam_in_parts(
    objective: Objective,
    start: np.ndarray,
    rows: Rows,
    *,
    parts: tuple[np.ndarray, np.ndarray] | None,
    refit: bool,
    max_iter: int,
    n_iter_no_change: int,
    **settings: Any,
) -> Trained:
    """Train on the first of two `parts` of the rows while the loss of the second falls; or on all rows without parts.

    `refit` then trains on all rows from the same start, for as many epochs as were best, however the loss goes.
    """
    patience = {"max_iter": max_iter, "n_iter_no_change": n_iter_no_change}
    if parts is None:
        return train_adam(objective, start, rows, held_out=None, **patience, **settings)
    kept, held = (rows[index] for index in parts)
    found = train_adam(objective, start, kept, held_out=held, **patience, **settings)
    if not refit:
        return found
    patience = {"max_iter": found.epochs, "n_iter_no_change": found.epochs + 1}
    return replace(train_adam(objective, start, rows, held_out=None, **patience, **settings), settled=found.settled)


@dataclass
class EarlyStopping:
    """Remembers the best parameters by a loss, and says when `patience` rounds brought less than `tol`."""

    patience: int
    tol: float
    best: float = np.inf
    parameters: np.ndarray | None = None
    round: int = 0  # of the best
    _rounds: int = 0
    _waited: int = 0
    _reference: float = np.inf

    def stop_after(self, loss: float, parameters: np.ndarray) -> bool:
        """Take note of one round's loss; whether to stop."""
        if not np.isfinite(loss):
            raise ValueError(f"the loss is {loss} in training; lower learning_rate, or raise alpha.")
        self._rounds += 1
        if loss < self.best:
            self.best, self.parameters, self.round = loss, parameters, self._rounds
        if loss < self._reference - self.tol:
            self._reference, self._waited = loss, 0
        else:
            self._waited += 1
        return self._waited >= self.patience


def _batches(rows: Rows, batch_size: int, random: np.random.RandomState) -> Iterator[Rows]:
    if len(rows) <= batch_size:
        yield rows
        return
    # As equal as can be: a last batch of three rows would weigh as much as one of two hundred.
    for index in np.array_split(random.permutation(len(rows)), -(-len(rows) // batch_size)):
        yield rows[index]
