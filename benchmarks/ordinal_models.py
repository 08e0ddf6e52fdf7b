"""The contestants of `benchmarks.ordinal`: ours, cross-entropy in the same models, and other packages.

Each is made by `make(seed, classes)` and has `fit(X, y)`, `predict` and `predict_proba` with one column per rank.
Settings are the defaults of each package; features are standardised for models that need it. Networks of other packages
have the hidden layer of ours and are all trained alike: Adam in batches of 200, a fifth of the rows for early stopping
on their own loss, the best epoch kept.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from sklearn.base import BaseEstimator, ClassifierMixin
from sklearn.model_selection import train_test_split
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from torch import Tensor, nn

from otloss.estimators import (
    CumulativeLinkClassifier,
    OrdinalBoostingClassifier,
    OrdinalClassifier,
    OrdinalNetworkClassifier,
)

HIDDEN = 100
EPOCHS, PATIENCE, BATCH, STEP = 300, 20, 200, 5e-3
OURS, CROSS_ENTROPY, PEER = "otloss", "cross-entropy in our model", "other package"


@dataclass(frozen=True)
class Model:
    """A contestant: its family ("linear", "network", "trees", "vote"), its group (OURS ...), and how it is made.

    A vote has members instead of `make`: its forecast is the mean of theirs, and it predicts the median of that.
    """

    name: str
    family: str
    whose: str
    make: Callable[[int, int], Any] | None
    members: tuple[str, ...] = ()


def models() -> list[Model]:
    """All contestants; ours, and the same models trained by cross-entropy, are in the same order."""
    return [*_ours(), *_votes(), *_linear_peers(), *_of_skordinal(), *_networks(), *_trees()]


# ---- ours, and cross-entropy in the same models ----------------------------------------------------------------------

_ALONE: dict[str, Any] = {"transport": 0.0, "cross_entropy": 1.0}


def _ours() -> list[Model]:
    arms = []
    for name, linear, head in (("linear", OrdinalClassifier, "softmax"),
                               ("cumulative", CumulativeLinkClassifier, "cumulative")):  # fmt: skip
        arms += _pair(name, "linear", lambda seed, linear=linear, **loss: linear(**loss))
        arms += _pair(
            f"{name} network".replace("linear ", ""), "network",
            lambda seed, head=head, **loss: OrdinalNetworkClassifier(
                head=head, hidden_layer_sizes=(HIDDEN,), random_state=seed, **loss
            ),
        )  # fmt: skip
    for booster in ("xgboost", "lightgbm"):
        arms += _pair(
            f"boosting, {booster}", "trees",
            lambda seed, booster=booster, **loss: OrdinalBoostingClassifier(
                booster=booster, random_state=seed, n_jobs=1, **loss
            ),
        )  # fmt: skip
    return arms


def _pair(name: str, family: str, make: Callable[..., Any]) -> list[Model]:
    return [
        Model(f"otloss {name}", family, OURS, lambda seed, classes: make(seed)),
        Model(f"{name}, cross-entropy", family, CROSS_ENTROPY, lambda seed, classes: make(seed, **_ALONE)),
    ]


def _votes() -> list[Model]:
    networks, trees = ("network", "cumulative network"), ("boosting, xgboost",)
    arms = []
    for name, members in (("vote of networks", networks), ("vote of networks and trees", networks + trees)):
        arms += [
            Model(f"otloss {name}", "vote", OURS, None, tuple(f"otloss {member}" for member in members)),
            Model(f"{name}, cross-entropy", "vote", CROSS_ENTROPY, None, tuple(f"{m}, cross-entropy" for m in members)),
        ]
    of_peers = ("dlordinal CLM network", "coral-pytorch CORN network")
    return [
        *arms,
        Model("vote of CLM and CORN", "vote", PEER, None, of_peers),
        Model("vote of CLM, CORN and LGBM", "vote", PEER, None, (*of_peers, "LGBMClassifier")),
    ]


# ---- linear models and trees of other packages --------------------------------------------------------------------


def _linear_peers() -> list[Model]:
    import mord
    from sklearn.linear_model import LogisticRegression

    return [
        Model("LogisticRegression", "linear", PEER, lambda s, k: _scaled(LogisticRegression(max_iter=2000))),
        Model("mord LogisticAT", "linear", PEER, lambda s, k: _scaled(mord.LogisticAT())),
        Model("mord LogisticIT", "linear", PEER, lambda s, k: _scaled(mord.LogisticIT())),
        Model("statsmodels OrderedModel", "linear", PEER, lambda s, k: _scaled(Ordered())),
    ]


def _scaled(model: Any) -> Any:
    return make_pipeline(StandardScaler(), model)


def _of_skordinal() -> list[Model]:
    """Its linear models (its LogisticAT and LogisticIT are mord's) and its network that returns probabilities."""
    from skordinal.classifiers import NNPOM, POM, OrdinalDecomposition

    return [
        Model("skordinal POM", "linear", PEER, lambda s, k: _scaled(POM())),
        Model("skordinal OrdinalDecomposition", "linear", PEER, lambda s, k: _scaled(OrdinalDecomposition())),
        Model("skordinal NNPOM", "network", PEER, lambda s, k: _scaled(NNPOM(random_state=s))),
    ]


class Ordered(ClassifierMixin, BaseEstimator):
    """Proportional odds of statsmodels, without constant or linearly dependent columns."""

    def fit(self, X: np.ndarray, y: np.ndarray) -> Ordered:
        from statsmodels.miscmodels.ordinal_model import OrderedModel

        self._kept = _independent_columns(X)
        model = OrderedModel(y, X[:, self._kept], distr="logit")
        self._fitted = model.fit(method="bfgs", maxiter=200, disp=False)
        self.classes_ = np.unique(y)
        return self

    def predict_proba(self, X: np.ndarray) -> np.ndarray:
        return np.asarray(self._fitted.model.predict(self._fitted.params, exog=X[:, self._kept]))

    def predict(self, X: np.ndarray) -> np.ndarray:
        return self.predict_proba(X).argmax(1)


def _independent_columns(X: np.ndarray) -> list[int]:
    kept: list[int] = []
    for column in range(X.shape[1]):
        tried = np.column_stack([np.ones(len(X)), X[:, [*kept, column]]])
        if np.linalg.matrix_rank(tried, tol=1e-6 * len(X) ** 0.5) == tried.shape[1]:
            kept.append(column)
    return kept


def _trees() -> list[Model]:
    from lightgbm import LGBMClassifier
    from xgboost import XGBClassifier

    return [
        Model("XGBClassifier", "trees", PEER, lambda s, k: XGBClassifier(random_state=s, n_jobs=1)),
        Model("LGBMClassifier", "trees", PEER, lambda s, k: LGBMClassifier(random_state=s, n_jobs=1, verbose=-1)),
    ]


# ---- networks with the losses of other packages -------------------------------------------------------------------


@dataclass(frozen=True)
class Head:
    """The output layer, its loss, and the map from its output to probabilities."""

    layer: nn.Module
    loss: Callable[[Tensor, Tensor], Tensor]
    proba: Callable[[Tensor], Tensor]


def _networks() -> list[Model]:
    heads = {"dlordinal CLM": _links, "coral-pytorch CORN": _corn}
    return [
        Model(f"{name} network", "network", PEER, lambda s, k, head=head: Network(head, s, k))
        for name, head in heads.items()
    ]


def _links(classes: int) -> Head:
    from dlordinal.output_layers import CLM

    def loss(proba: Tensor, y: Tensor) -> Tensor:
        return nn.functional.nll_loss(proba.clamp(min=1e-7).log(), y)

    return Head(nn.Sequential(nn.Linear(HIDDEN, 1), CLM(classes, "logit")), loss, lambda proba: proba)


def _corn(classes: int) -> Head:
    from coral_pytorch.losses import corn_loss

    def loss(z: Tensor, y: Tensor) -> Tensor:
        return corn_loss(z, y, classes)

    return Head(nn.Linear(HIDDEN, classes - 1), loss, lambda z: _of_exceedances(z.sigmoid().cumprod(-1)))


def _of_exceedances(above: Tensor) -> Tensor:
    """P(Y = k) from P(Y > k), k = 0..K-2."""
    above = above.cummin(-1).values
    padded = torch.cat([torch.ones_like(above[:, :1]), above, torch.zeros_like(above[:, :1])], -1)
    return -padded.diff(dim=-1)


class Network:
    """One hidden layer of rectified linear units and a head."""

    def __init__(self, head: Callable[[int], Head], seed: int, classes: int) -> None:
        self._head, self._seed, self._classes = head, seed, classes

    def fit(self, X: np.ndarray, y: np.ndarray) -> Network:
        self._scaler = StandardScaler().fit(X)
        inner, outer = train_test_split(np.arange(len(y)), test_size=0.2, stratify=y, random_state=self._seed)
        features, labels = self._tensor(X), torch.as_tensor(y)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self._seed)
            head = self._head(self._classes)
            self._net = nn.Sequential(nn.Linear(X.shape[1], HIDDEN), nn.ReLU(), head.layer)
            self._proba = head.proba
            self._train(head.loss, (features[inner], labels[inner]), (features[outer], labels[outer]))
        return self

    def _train(self, loss: Callable[..., Tensor], inner: tuple[Tensor, Tensor], outer: tuple[Tensor, Tensor]) -> None:
        steps = torch.optim.Adam(self._net.parameters(), lr=STEP)
        least, kept, waited = float("inf"), copy.deepcopy(self._net.state_dict()), 0
        for _ in range(EPOCHS):
            for rows in torch.randperm(len(inner[1])).split(BATCH):
                steps.zero_grad()
                loss(self._net(inner[0][rows]), inner[1][rows]).backward()
                steps.step()
            with torch.no_grad():
                now = float(loss(self._net(outer[0]), outer[1]))
            waited += 1
            if now < least:
                least, kept, waited = now, copy.deepcopy(self._net.state_dict()), 0
            if waited == PATIENCE:
                break
        self._net.load_state_dict(kept)

    def _tensor(self, X: np.ndarray) -> Tensor:
        return torch.as_tensor(self._scaler.transform(X), dtype=torch.float32)

    @torch.no_grad()
    def predict_proba(self, X: np.ndarray) -> np.ndarray:
        return self._proba(self._net(self._tensor(X))).double().numpy()

    def predict(self, X: np.ndarray) -> np.ndarray:
        return self.predict_proba(X).argmax(1)


def fitted(model: Model, X: np.ndarray, y: np.ndarray, *, seed: int, classes: int) -> Any:
    assert model.make is not None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # peers warn of iterations, feature names, a singular Hessian
        return model.make(seed, classes).fit(X, y)
