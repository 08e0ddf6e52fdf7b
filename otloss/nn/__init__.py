"""The functions of this package as modules: settings and tensors in the constructor, one call in `forward`.

A loss takes `reduction="mean"`, "sum" or "none" over the problems of a batch. What a module is given to hold
(positions, trees, cost matrices, cost objects) moves with `.to()` and is kept in the `state_dict`; a
`torch.nn.Parameter` among it is found by `.parameters()`, and so can be trained. It stays in float32 or wider when the
model around it goes to half precision, where neighbouring positions and small costs would become equal.

The losses of critics have no module: they hold nothing, or take the network itself.
"""

from otloss.nn.closed_forms import CdfDistance as CdfDistance
from otloss.nn.closed_forms import SlicedWasserstein as SlicedWasserstein
from otloss.nn.closed_forms import Wasserstein1d as Wasserstein1d
from otloss.nn.closed_forms import WassersteinCircular as WassersteinCircular
from otloss.nn.closed_forms import WassersteinTree as WassersteinTree
from otloss.nn.clouds import CloudLoss as CloudLoss
from otloss.nn.cumulative import CumulativeLinkHead as CumulativeLinkHead
from otloss.nn.losses import Crps as Crps
from otloss.nn.losses import HistogramLoss as HistogramLoss
from otloss.nn.losses import JdotLoss as JdotLoss
from otloss.nn.losses import NumberTokenLoss as NumberTokenLoss
from otloss.nn.losses import OrdinalLoss as OrdinalLoss
from otloss.nn.losses import SetLoss as SetLoss
from otloss.nn.losses import SpearmanLoss as SpearmanLoss
from otloss.nn.losses import TopKLoss as TopKLoss
from otloss.nn.masks import MaskLoss as MaskLoss
from otloss.nn.masks import WassersteinDice as WassersteinDice
from otloss.nn.soft import SoftRank as SoftRank
from otloss.nn.soft import SoftSort as SoftSort
from otloss.nn.soft import SoftTopK as SoftTopK
from otloss.nn.solvers import Emd as Emd
from otloss.nn.solvers import Sinkhorn as Sinkhorn
from otloss.nn.solvers import SinkhornDivergence as SinkhornDivergence
from otloss.nn.texts import DocumentDistance as DocumentDistance
from otloss.nn.texts import NgramDistance as NgramDistance

__all__ = [
    "CdfDistance",
    "CloudLoss",
    "Crps",
    "CumulativeLinkHead",
    "DocumentDistance",
    "Emd",
    "HistogramLoss",
    "JdotLoss",
    "MaskLoss",
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
    "SpearmanLoss",
    "TopKLoss",
    "Wasserstein1d",
    "WassersteinCircular",
    "WassersteinDice",
    "WassersteinTree",
]
