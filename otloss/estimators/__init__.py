"""scikit-learn classifiers of ordered labels: linear, multi-layer and boosted, trained with transport losses."""

from otloss._calibration import OrdinalRecalibration as OrdinalRecalibration
from otloss._calibration import Temperature as Temperature
from otloss.estimators._boosting import OrdinalBoostingClassifier as OrdinalBoostingClassifier
from otloss.estimators._classifier import OrdinalClassifier as OrdinalClassifier
from otloss.estimators._labels import EncodedLabelsWarning as EncodedLabelsWarning
from otloss.estimators._labels import LabelOrderWarning as LabelOrderWarning

__all__ = [
    "EncodedLabelsWarning",
    "LabelOrderWarning",
    "OrdinalBoostingClassifier",
    "OrdinalClassifier",
    "OrdinalRecalibration",
    "Temperature",
]
