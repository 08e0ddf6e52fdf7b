"""scikit-learn classifiers of ordered labels: linear, multi-layer and boosted, trained with transport losses."""

from otloss._calibration import OrdinalRecalibration as OrdinalRecalibration
from otloss._calibration import Temperature as Temperature
from otloss.estimators._boosting import OrdinalBoostingClassifier as OrdinalBoostingClassifier
from otloss.estimators._classifier import OrdinalClassifier as OrdinalClassifier
from otloss.estimators._labels import EncodedLabelsWarning as EncodedLabelsWarning

__all__ = [
    "EncodedLabelsWarning",
    "OrdinalBoostingClassifier",
    "OrdinalClassifier",
    "OrdinalRecalibration",
    "Temperature",
]
