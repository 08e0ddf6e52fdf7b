"""Metrics of ordinal predictions, of labels and of probabilities, and scorers of them for scikit-learn.

`labels=` is the rank order of the classes, lowest first, at the positions 0 to K - 1. Without it an ordered pandas
Categorical tells the order; whole numbers stand for every integer from the smallest to the largest, so that 1, 2, 5
have the positions 0, 1, 4; in forecasts numbers with a fraction are sorted; text raises ValueError. The estimators and
scorers follow the same rule.

Columns of probabilities follow the sorted labels, as in scikit-learn, unless `columns=` says otherwise; columns of a
`Distribution`, which `predict_distribution` returns, are what its labels say. Classes that are absent from y_true,
y_pred or a fold keep their rank.
"""

from otloss._foreign import explain_missing_names as _explain_missing_names
from otloss.metrics.decisions import macro_mae as macro_mae
from otloss.metrics.decisions import maximum_mae as maximum_mae
from otloss.metrics.decisions import minimum_sensitivity as minimum_sensitivity
from otloss.metrics.decisions import off_by_one_accuracy as off_by_one_accuracy
from otloss.metrics.decisions import ordinal_mae as ordinal_mae
from otloss.metrics.distribution import Distribution as Distribution
from otloss.metrics.ensembles import pit_histogram as pit_histogram
from otloss.metrics.forecasts import Reliability as Reliability
from otloss.metrics.forecasts import ordinal_emd as ordinal_emd
from otloss.metrics.forecasts import ranked_probability_score as ranked_probability_score
from otloss.metrics.forecasts import threshold_calibration_error as threshold_calibration_error
from otloss.metrics.forecasts import threshold_reliability as threshold_reliability
from otloss.metrics.scorers import OrdinalScorer as OrdinalScorer
from otloss.metrics.scorers import scorer as scorer

__all__ = [
    "Distribution",
    "OrdinalScorer",
    "Reliability",
    "macro_mae",
    "maximum_mae",
    "minimum_sensitivity",
    "off_by_one_accuracy",
    "ordinal_emd",
    "ordinal_mae",
    "pit_histogram",
    "ranked_probability_score",
    "scorer",
    "threshold_calibration_error",
    "threshold_reliability",
]

_explain_missing_names(__name__, __all__)
