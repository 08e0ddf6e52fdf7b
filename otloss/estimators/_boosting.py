"""Boosted trees for ordered labels: XGBoost or LightGBM inside, with the gradients of transport losses."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from otloss.estimators._base import OrdinalBase
from otloss.estimators._boosters import BOOSTERS, Part, TreeSettings, train_trees
from otloss.estimators._criterion import check_choice, check_count, check_real
from otloss.estimators._weights import split_off

SHARED_SETTINGS = (
    "n_estimators",
    "learning_rate",
    "max_depth",
    "min_child_weight",
    "subsample",
    "colsample_bytree",
    "reg_lambda",
    "hessian",
    "verbose",
)
ENOUGH_TO_HOLD_OUT = 200  # rows from which early_stopping="auto" holds some out


class OrdinalBoostingClassifier(OrdinalBase):
    """DOC"""

    def __init__(
        self,
        *,
        booster: str = "xgboost",
        categories: Any = None,
        values: Any = None,
        power: int = 2,
        cost: Any = None,
        transport: float = 1.0,
        cross_entropy: float = 0.0,
        hessian: str = "auto",
        n_estimators: int = 300,
        learning_rate: float = 0.1,
        max_depth: int = 4,
        min_child_weight: float = 1.0,
        subsample: float = 1.0,
        colsample_bytree: float = 1.0,
        reg_lambda: float = 1.0,
        booster_params: dict[str, Any] | None = None,
        class_weight: Any = None,
        decode: str = "argmax",
        calibration: str | None = None,
        calibration_fraction: float = 0.2,
        early_stopping: bool | str = "auto",
        validation_fraction: float = 0.2,
        n_iter_no_change: int = 20,
        refit: bool = True,
        n_jobs: int | None = None,
        random_state: Any = None,
        verbose: int = 0,
    ) -> None:
        self.booster = booster
        self.categories = categories
        self.values = values
        self.power = power
        self.cost = cost
        self.transport = transport
        self.cross_entropy = cross_entropy
        self.hessian = hessian
        self.n_estimators = n_estimators
        self.learning_rate = learning_rate
        self.max_depth = max_depth
        self.min_child_weight = min_child_weight
        self.subsample = subsample
        self.colsample_bytree = colsample_bytree
        self.reg_lambda = reg_lambda
        self.booster_params = booster_params
        self.class_weight = class_weight
        self.decode = decode
        self.calibration = calibration
        self.calibration_fraction = calibration_fraction
        self.early_stopping = early_stopping
        self.validation_fraction = validation_fraction
        self.n_iter_no_change = n_iter_no_change
        self.refit = refit
        self.n_jobs = n_jobs
        self.random_state = random_state
        self.verbose = verbose

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> OrdinalBoostingClassifier:
        """Fit to features X (n, d), NaN where missing, labels y (n,), and weights (n,) if given; return self.

        Raises:
            ImportError: if the library of `booster` is not installed.
            ValueError: if a label, a weight, a feature or a setting is wrong; the message says which.
        """
        self._fit(X, y, sample_weight)
        return self

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.allow_nan = True
        return tags

    def _accepts(self) -> dict[str, Any]:
        return {"dtype": np.float64, "ensure_all_finite": "allow-nan"}

    def _check_settings(self) -> None:
        super()._check_settings()
        check_choice("booster", self.booster, BOOSTERS)
        check_choice("early_stopping", self.early_stopping, (True, False, "auto"))
        for name in ("n_estimators", "max_depth", "n_iter_no_change"):
            check_count(name, getattr(self, name))
        for name in ("min_child_weight", "reg_lambda"):
            check_real(name, getattr(self, name), least=0.0)
        check_real("learning_rate", self.learning_rate, least=0.0, above=True)
        for name in ("subsample", "colsample_bytree"):
            check_real(name, getattr(self, name), least=0.0, above=True, most=1.0)
        if self.n_jobs is not None:
            check_count("n_jobs", self.n_jobs, least=-1)
        if self.booster_params is not None and not isinstance(self.booster_params, dict):
            raise TypeError(f"booster_params is {self.booster_params!r}, expected a dict of {self.booster}'s settings.")

    def _train(
        self, X: np.ndarray, positions: np.ndarray, weights: np.ndarray, *, random: np.random.RandomState
    ) -> None:
        rows = Part(X, positions, weights)[weights > 0]
        self.n_estimators_ = 0
        self._trees = None
        if len(self.classes_) == 1:
            return
        settings = self._tree_settings(seed=int(random.randint(2**31 - 1)))
        enough = len(rows.target) >= ENOUGH_TO_HOLD_OUT
        if not (enough if self.early_stopping == "auto" else self.early_stopping):
            self._trees = train_trees(self.booster, settings, rows)
        else:
            kept, held = split_off(
                rows.target, self.validation_fraction, random=random, purpose="early stopping"
            )
            self._trees = train_trees(self.booster, settings, rows[kept], rows[held])
            if self.refit:
                again = replace(settings, n_estimators=self._trees.rounds)
                self._trees = train_trees(self.booster, again, rows)
        self.n_estimators_ = self._trees.rounds

    def _tree_settings(self, *, seed: int) -> TreeSettings:
        criterion = self._criterion
        geometry = criterion.geometry
        return TreeSettings(
            positions=len(self.classes_),
            **{name: getattr(self, name) for name in SHARED_SETTINGS},
            threads=1 if self.n_jobs is None else max(self.n_jobs, 0),
            seed=seed,
            patience=self.n_iter_no_change,
            loss={**geometry, "transport": criterion.transport, "cross_entropy": criterion.cross_entropy},
            extra=self.booster_params or {},
        )

    def _logits(self, X: np.ndarray) -> np.ndarray:
        assert self._trees is not None
        return self._trees.scores(X)
