"""The functions of this package as modules: settings and tensors in the constructor, one call in `forward`.

The constructor takes the arguments of the function, by the same names and with the same defaults, that do not come with
each call; `help(otloss.nn.Emd)` lists them, and the docstring of the function explains them.

A loss takes `reduction="mean"`, "sum" or "none" over the problems of a batch. What a module is given to hold
(positions, trees, cost matrices, cost objects) moves with `.to()` and is kept in the `state_dict`; a
`torch.nn.Parameter` among it is found by `.parameters()`, and so can be trained. It stays in float32 or wider when the
model around it goes to half precision, where neighbouring positions and small costs would become equal.

The losses of critics have no module: they hold nothing, or take the network itself.
"""

from otloss._foreign import explain_missing_names as _explain_missing_names
from otloss.nn.cumulative_head import CornHead as CornHead
from otloss.nn.cumulative_head import CumulativeLinkHead as CumulativeLinkHead
from otloss.nn.distances import CdfDistance as CdfDistance
from otloss.nn.distances import Emd as Emd
from otloss.nn.distances import Sinkhorn as Sinkhorn
from otloss.nn.distances import SinkhornDivergence as SinkhornDivergence
from otloss.nn.distances import SlicedWasserstein as SlicedWasserstein
from otloss.nn.distances import Wasserstein1d as Wasserstein1d
from otloss.nn.distances import WassersteinCircular as WassersteinCircular
from otloss.nn.distances import WassersteinTree as WassersteinTree
from otloss.nn.losses import CloudLoss as CloudLoss
from otloss.nn.losses import Crps as Crps
from otloss.nn.losses import DocumentDistance as DocumentDistance
from otloss.nn.losses import HistogramLoss as HistogramLoss
from otloss.nn.losses import JdotLoss as JdotLoss
from otloss.nn.losses import NgramDistance as NgramDistance
from otloss.nn.losses import NumberTokenLoss as NumberTokenLoss
from otloss.nn.losses import OrdinalLoss as OrdinalLoss
from otloss.nn.losses import SetLoss as SetLoss
from otloss.nn.losses import ThresholdLoss as ThresholdLoss
from otloss.nn.ranking import SoftRank as SoftRank
from otloss.nn.ranking import SoftSort as SoftSort
from otloss.nn.ranking import SoftTopK as SoftTopK

__all__ = [
    "CdfDistance",
    "CloudLoss",
    "CornHead",
    "Crps",
    "CumulativeLinkHead",
    "DocumentDistance",
    "Emd",
    "HistogramLoss",
    "JdotLoss",
    "NgramDistance",
    "NumberTokenLoss",
    "OrdinalLoss",
    "SetLoss",
    "Sinkhorn",
    "SinkhornDivergence",
    "SlicedWasserstein",
    "SoftRank",
    "SoftSort",
    "SoftTopK",
    "ThresholdLoss",
    "Wasserstein1d",
    "WassersteinCircular",
    "WassersteinTree",
]

_explain_missing_names(__name__, __all__)
