"""Ordinal losses for XGBoost and LightGBM: objectives, metrics for early stopping, and the scores to start from.

Labels are the positions 0 to K - 1 of classes in their order. Callables fit the native interfaces (`xgboost.train`,
`lightgbm.train`) or, with `interface="sklearn"`, the ones of `XGBClassifier` and `LGBMClassifier`. Neither library is
imported here. Formulas of the loss, its gradient and Hessian: `otloss.boosting.derivatives`.
"""

from otloss._foreign import explain_missing_names as _explain_missing_names
from otloss.boosting.metrics import lightgbm_metric as lightgbm_metric
from otloss.boosting.metrics import xgboost_metric as xgboost_metric
from otloss.boosting.objectives import lightgbm_objective as lightgbm_objective
from otloss.boosting.objectives import xgboost_objective as xgboost_objective
from otloss.boosting.start import start_scores as start_scores

__all__ = ["lightgbm_metric", "lightgbm_objective", "start_scores", "xgboost_metric", "xgboost_objective"]

_explain_missing_names(__name__, __all__)
