"""scikit-learn classifiers of ordered labels: linear, multi-layer and boosted, trained with transport losses."""

from otloss.estimators._boosting import OrdinalBoostingClassifier as OrdinalBoostingClassifier
from otloss.estimators._classifier import OrdinalClassifier as OrdinalClassifier
from otloss.estimators._labels import EncodedLabelsWarning as EncodedLabelsWarning

__all__ = ["EncodedLabelsWarning", "OrdinalBoostingClassifier", "OrdinalClassifier"]
