"""scikit-learn classifiers of ordered labels: linear, multi-layer and boosted, trained with transport losses."""

from otloss.estimators.boosting import OrdinalBoostingClassifier as OrdinalBoostingClassifier
from otloss.estimators.classifier import OrdinalClassifier as OrdinalClassifier
from otloss.estimators.labels import EncodedLabelsWarning as EncodedLabelsWarning
from otloss.estimators.labels import LabelOrderWarning as LabelOrderWarning
from otloss.estimators.recalibration import OrdinalRecalibration as OrdinalRecalibration
from otloss.estimators.recalibration import Temperature as Temperature

__all__ = [
    "EncodedLabelsWarning",
    "LabelOrderWarning",
    "OrdinalBoostingClassifier",
    "OrdinalClassifier",
    "OrdinalRecalibration",
    "Temperature",
]
