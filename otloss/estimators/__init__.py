"""scikit-learn classifiers of ordered labels, trained with transport losses, and recalibration of forecasts."""

from otloss._foreign import explain_missing_names as _explain_missing_names
from otloss.estimators.adaptation import TransportAdapter as TransportAdapter
from otloss.estimators.boosting import OrdinalBoostingClassifier as OrdinalBoostingClassifier
from otloss.estimators.classifier import OrdinalClassifier as OrdinalClassifier
from otloss.estimators.cumulative_link import CumulativeLinkClassifier as CumulativeLinkClassifier
from otloss.estimators.decomposition import OrdinalDecomposition as OrdinalDecomposition
from otloss.estimators.ensemble_recalibration import EnsembleRecalibration as EnsembleRecalibration
from otloss.estimators.label_order import EncodedLabelsWarning as EncodedLabelsWarning
from otloss.estimators.label_order import LabelOrderWarning as LabelOrderWarning
from otloss.estimators.likelihood import LikelihoodSummary as LikelihoodSummary
from otloss.estimators.network import OrdinalNetworkClassifier as OrdinalNetworkClassifier
from otloss.estimators.recalibration import OrdinalRecalibration as OrdinalRecalibration
from otloss.estimators.recalibration import Temperature as Temperature

__all__ = [
    "CumulativeLinkClassifier",
    "EncodedLabelsWarning",
    "EnsembleRecalibration",
    "LabelOrderWarning",
    "LikelihoodSummary",
    "OrdinalBoostingClassifier",
    "OrdinalClassifier",
    "OrdinalDecomposition",
    "OrdinalNetworkClassifier",
    "OrdinalRecalibration",
    "Temperature",
    "TransportAdapter",
]

_explain_missing_names(__name__, __all__)
