"""Networks of ordered classes in torch, and their training: L-BFGS for linear ones, Adam for hidden layers.

    softmax:      z = h W + b                            one score per position
    cumulative:   P(y <= k) = H(theta_k - f),            f = h w + b,  theta_0 = 0,  theta_k = theta_{k-1} + exp(gap_k)

with h the standardised features, or the last hidden layer of rectified units, and H by the link. The cumulative model
(proportional odds with the logit link; McCullagh 1980) shares its weights between all classes: far fewer parameters,
and ordered by construction. Its log-probabilities serve as logits, for log-softmax leaves them as they are.

Both solvers minimise   sum_i w_i L(z(x_i), y_i) / sum_i w_i  +  alpha / (2 sum_i w_i) |W|^2,

so that a weight of two is a row given twice, and `alpha` is the prior of ridge regression and of scikit-learn's 1 / C.
"""

from __future__ import annotations

from copy import deepcopy
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from scipy.optimize import Bounds, minimize
from sklearn.preprocessing import StandardScaler
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector, skip_init, vector_to_parameters

from otloss.estimators.criterion import Criterion
from otloss.estimators.features import SparseRows
from otloss.losses import cumulative_log_probabilities, ordinal_loss, threshold_loss
from otloss.losses.cumulative import quantiles

HEADS = ("softmax", "cumulative")
LOSSES = ("transport", "all_threshold", "immediate_threshold")
PATIENCE = 20  # epochs of Adam without a fall of the loss by `SMALLEST_FALL`
SMALLEST_FALL = 1e-6
_SMALLEST_START = 1e-6  # probability of a class where training starts
_SMALLEST_GAP = 1e-8  # between thresholds that meet: the rounding of derivatives is a share of it
_ROUNDED_GRADIENT = 1e-6  # of a loss at its minimum: the gain of a step is its square, which rounding hides


class OrdinalNetwork(nn.Module):
    """Logits of m >= 2 ordered classes from d features, in float64 on the CPU whatever torch's defaults are.

    Args:
        widths: of all layers but the last: the number of features, then the widths of hidden layers.
        prior: (m,) probabilities that a linear model starts from, and one with hidden layers near to.
        head: one of `HEADS`.
        random: for the weights of hidden layers, Glorot's uniform ones; a linear model starts at zero.
        link: of the cumulative model.
    """

    layers: Any  # an nn.ModuleList of nn.Linear

    def __init__(
        self, widths: tuple[int, ...], prior: np.ndarray, head: str, random: np.random.RandomState, link: str = "logit"
    ) -> None:
        super().__init__()
        self.link = link
        sizes = (*widths, 1 if head == "cumulative" else len(prior))
        self.layers = nn.ModuleList(
            skip_init(nn.Linear, inputs, outputs, dtype=torch.float64, device="cpu")
            for inputs, outputs in pairwise(sizes)
        )
        self.log_gaps: nn.Parameter | None = None
        start = np.log(prior)
        if head == "cumulative":
            thresholds = start_thresholds(prior, link)
            start = -thresholds[:1]
            self.log_gaps = nn.Parameter(torch.tensor(np.log(np.diff(thresholds)), device="cpu"))
        for layer in self.layers:
            bound = np.sqrt(6.0 / sum(layer.weight.shape)) if len(widths) > 1 else 0.0
            layer.weight.data = torch.tensor(random.uniform(-bound, bound, layer.weight.shape), device="cpu")
            nn.init.zeros_(layer.bias)
        self.layers[-1].bias.data = torch.tensor(start, device="cpu")

    def __getstate__(self) -> dict[str, Any]:
        """The parameters as arrays of numpy, so that formats for scikit-learn's models, such as skops, take them."""
        layers = [(layer.weight.detach().numpy(), layer.bias.detach().numpy()) for layer in self.layers]
        log_gaps = None if self.log_gaps is None else self.log_gaps.detach().numpy()
        return {"layers": layers, "log_gaps": log_gaps, "link": self.link}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__init__()
        self.layers = nn.ModuleList()
        for weight, bias in state["layers"]:
            layer = skip_init(nn.Linear, *reversed(weight.shape), dtype=torch.float64, device="cpu")
            layer.weight.data, layer.bias.data = (torch.tensor(part, device="cpu") for part in (weight, bias))
            self.layers.append(layer)
        log_gaps, self.link = state["log_gaps"], state["link"]
        self.log_gaps = None if log_gaps is None else nn.Parameter(torch.tensor(log_gaps, device="cpu"))

    @property
    def sizes(self) -> tuple[Any, ...]:
        """The shapes of all parameters, and the link."""
        gaps = None if self.log_gaps is None else len(self.log_gaps)
        return *(tuple(layer.weight.shape) for layer in self.layers), gaps, self.link

    def forward(self, features: Float[Tensor, "rows inputs"]) -> Float[Tensor, "rows positions"]:
        """Return logits whose softmax is the distribution over positions."""
        hidden = features
        for layer in self.layers[:-1]:
            hidden = layer(hidden).relu()
        return self.logits(self.layers[-1](hidden))

    def logits(self, scores: Float[Tensor, "rows outputs"]) -> Float[Tensor, "rows positions"]:
        """Return logits from what the last layer gives."""
        if self.log_gaps is None:
            return scores
        return cumulative_log_probabilities(scores.squeeze(1), self.log_gaps, self.link)


def start_thresholds(prior: Float[np.ndarray, " positions"], link: str) -> Float[np.ndarray, " thresholds"]:
    """Return increasing thresholds (m - 1,) of about the probabilities `prior` for a score of 0.

    Thresholds beside a class of almost no weight would be one number, and the logarithm of their gap infinite.
    """
    shares = np.maximum(prior, _SMALLEST_START)
    return np.asarray(quantiles(torch.from_numpy((shares / shares.sum()).cumsum()[:-1]), link))


def restarted(network: OrdinalNetwork, old: StandardScaler, new: StandardScaler) -> OrdinalNetwork:
    """Return a copy of the network that is the same function of features standardised by another scaler."""
    network = deepcopy(network)
    first = network.layers[0]
    scales = [np.ones(first.weight.shape[1]) if s.scale_ is None else s.scale_ for s in (old, new)]
    weight = first.weight.detach().numpy() / scales[0]
    first.bias.data += torch.from_numpy(weight @ (new.mean_ - old.mean_))
    first.weight.data = torch.from_numpy(weight * scales[1])
    return network


@dataclass(frozen=True)
class Rows:
    """Standardised features (n, d), positions (n,) and weights (n,) of training rows, in float64 on the CPU."""

    features: Tensor | SparseRows  # Sparse rows are for linear models only.
    target: Tensor
    weight: Tensor

    @classmethod
    def from_arrays(cls, features: np.ndarray | SparseRows, *others: np.ndarray) -> Rows:
        """Return rows from arrays in the order of the attributes."""
        values = features if isinstance(features, SparseRows) else torch.tensor(features, device="cpu")
        return cls(values, *(torch.tensor(part, device="cpu") for part in others))

    def __len__(self) -> int:
        return len(self.target)

    def __getitem__(self, index: np.ndarray) -> Rows:
        rows = torch.from_numpy(index)
        assert isinstance(self.features, Tensor)
        return Rows(self.features[rows], self.target[rows], self.weight[rows])


@dataclass(frozen=True)
class PenalisedLoss:
    """What training minimises over rows of total weight `mass`."""

    criterion: Criterion
    alpha: float
    mass: float
    loss: str = "transport"  # one of LOSSES

    @property
    def unit(self) -> float:
        """What training divides the loss by, as its tolerances are absolute: the weights of the terms, or at most 1."""
        return min(self.criterion.transport + self.criterion.cross_entropy, 1.0)

    @cached_property
    def geometry(self) -> dict[str, Any]:
        """The arguments of the loss that say how far classes are apart, with tensors for arrays."""
        settings = self.criterion.geometry
        return {name: torch.from_numpy(v) if isinstance(v, np.ndarray) else v for name, v in settings.items()}

    def data_loss(self, logits: Float[Tensor, "rows positions"], rows: Rows) -> Tensor:
        """Return the sum of w_i L_i over `rows`."""
        criterion = self.criterion
        if criterion.transport == 0:
            losses = nn.functional.cross_entropy(logits, rows.target, reduction="none")
            return criterion.cross_entropy * (losses @ rows.weight)
        mix = criterion.cross_entropy / criterion.transport
        if self.loss == "transport":
            losses = ordinal_loss(logits, rows.target, cross_entropy=mix, reduction="none", **self.geometry)
        else:
            losses = threshold_loss(logits, rows.target, kind=self.loss.partition("_")[0], reduction="none")
            losses = losses + mix * nn.functional.cross_entropy(logits, rows.target, reduction="none")
        return criterion.transport * (losses @ rows.weight)

    def of_batch(self, network: OrdinalNetwork, batch: Rows, *, repeated: float) -> Tensor:
        """Return the penalised mean loss in its unit, where the rows of `batch` stand for `repeated` times as many."""
        squares: Any = sum(layer.weight.square().sum() for layer in network.layers)
        loss = self.data_loss(network(batch.features), batch)
        return (repeated * loss + 0.5 * self.alpha * squares) / self.mass / self.unit


def train_lbfgs(
    network: OrdinalNetwork, objective: PenalisedLoss, rows: Rows, *, max_iter: int, tol: float
) -> tuple[int, bool]:
    """Train a linear `network` by L-BFGS; return the iterations, and whether it converged.

    Autograd goes from the loss to the scores; the products with the features are numpy's, at half the time. The
    unknowns are the weights times `_units`. Without cross-entropy thresholds may meet at the minimum: the unknowns are
    then their gaps themselves, for the derivative in the logarithm of a small gap is small wherever the minimum is.
    """
    gaps = [] if network.log_gaps is None else [network.log_gaps]
    parameters = [*network.layers.parameters(), *gaps]
    X: Any = rows.features if isinstance(rows.features, SparseRows) else rows.features.numpy()
    outputs, inputs = network.layers[0].weight.shape
    start = parameters_to_vector(parameters).detach().numpy()
    units = np.ones(len(start))
    units[: outputs * inputs] = np.tile(_units(X, objective, rows), outputs)
    count = len(gaps[0]) if gaps and objective.criterion.cross_entropy == 0 else 0
    may_meet, lowest = slice(len(start) - count, None), np.full(len(start), -np.inf)
    lowest[may_meet] = _SMALLEST_GAP
    start[may_meet] = np.maximum(np.exp(start[may_meet]), _SMALLEST_GAP)

    def vector_of(unknowns: np.ndarray) -> np.ndarray:
        vector = unknowns / units
        vector[may_meet] = np.log(vector[may_meet])
        return vector

    def value_and_gradient(unknowns: np.ndarray) -> tuple[float, np.ndarray]:
        vector = vector_of(unknowns)
        vector_to_parameters(torch.from_numpy(vector), parameters)
        W, bias = vector[: outputs * inputs].reshape(outputs, inputs), vector[outputs * inputs :][:outputs]
        scores = torch.from_numpy(X @ W.T + bias).requires_grad_()
        value = objective.data_loss(network.logits(scores), rows)
        by_scores, *by_gaps = (g.numpy() for g in torch.autograd.grad(value, [scores, *gaps]))
        by_weight = by_scores.T @ X + objective.alpha * W
        gradient = np.concatenate([by_weight.ravel(), by_scores.sum(0), *by_gaps]) / objective.mass / objective.unit
        penalised = (value.item() + 0.5 * objective.alpha * float((W * W).sum())) / objective.mass
        gradient[may_meet] /= unknowns[may_meet]
        return penalised / objective.unit, gradient / units

    result = minimize(
        value_and_gradient,
        start * units,
        jac=True,
        method="L-BFGS-B",
        bounds=Bounds(lowest, np.inf),
        options={"maxiter": max_iter, "maxfun": 5 * max_iter, "gtol": tol, "ftol": 64 * np.finfo(float).eps},
    )
    vector_to_parameters(torch.tensor(vector_of(result.x), device="cpu"), parameters)
    at_bound = (result.x <= lowest) & (result.jac > 0)
    largest = float(np.abs(np.where(at_bound, 0.0, result.jac)).max())
    # Beside success there are the limits, and line searches that end at the rounding of the loss, or far from it.
    has_converged = result.success or largest <= max(tol, _ROUNDED_GRADIENT)
    return max(int(result.nit), 1), bool(has_converged)


def _units(X: Any, objective: PenalisedLoss, rows: Rows) -> Float[np.ndarray, " features"]:
    """Return the sizes of the columns, such that the penalised loss is curved alike by all weights in these units.

    They are 1 for columns of deviation 1. Without them a feature in large units would take thousands of iterations, and
    the first step would lead where the loss overflows.
    """
    weight = rows.weight.numpy() / objective.mass
    squares = X.mean_squares(weight) if isinstance(X, SparseRows) else np.einsum("i,ij,ij->j", weight, X, X)
    penalty = objective.alpha / objective.mass
    units = np.sqrt((squares + penalty) / (1 + penalty))
    return np.where(units > 0, units, 1.0)


def train_adam(
    network: OrdinalNetwork,
    objective: PenalisedLoss,
    rows: Rows,
    *,
    held_out: Rows | None,
    epochs: int,
    patience: int,
    learning_rate: float,
    batch_size: int,
    random: np.random.RandomState,
) -> tuple[int, bool]:
    """Train `network` by Adam until the loss held out, or without such rows the loss met, no longer falls.

    With rows held out the parameters are from the best epoch, and the epochs returned are counted up to it; the
    flag says whether training ended by itself before the last epoch allowed.
    """
    optimizer = torch.optim.Adam(network.parameters(), lr=learning_rate)
    best, best_epoch, best_state = np.inf, 0, deepcopy(network.state_dict())
    reference, waited = np.inf, 0
    for epoch in range(1, epochs + 1):
        loss = _train_epoch(network, objective, rows, optimizer, batch_size, random)
        if held_out is not None:
            with torch.no_grad():
                loss = objective.data_loss(network(held_out.features), held_out).item()
            loss = loss / float(held_out.weight.sum()) / objective.unit
        if not np.isfinite(loss):
            raise ValueError(f"the loss is {loss} in training; lower learning_rate, or raise alpha.")
        if held_out is not None and loss < best:
            best, best_epoch, best_state = loss, epoch, deepcopy(network.state_dict())
        reference, waited = (loss, 0) if loss < reference - SMALLEST_FALL else (reference, waited + 1)
        if waited >= patience:
            break
    if held_out is None:
        return epoch, waited >= patience
    network.load_state_dict(best_state)
    return best_epoch, waited >= patience


def _train_epoch(
    network: OrdinalNetwork,
    objective: PenalisedLoss,
    rows: Rows,
    optimizer: torch.optim.Optimizer,
    batch_size: int,
    random: np.random.RandomState,
) -> float:
    """Go once over the rows in random batches; return the mean of the penalised losses met."""
    count = -(-len(rows) // batch_size)
    order = random.permutation(len(rows)) if count > 1 else np.arange(len(rows))
    total = 0.0
    # Batches have nearly equal sizes: a last batch of three rows would count as much as one of two hundred.
    for index in np.array_split(order, count):
        optimizer.zero_grad()
        # Each row counts by its weight, also where a batch happens to hold light rows only.
        loss = objective.of_batch(network, rows[index], repeated=len(rows) / len(index))
        loss.backward()
        optimizer.step()
        total += loss.item() * len(index) / len(rows)
    return total
