"""Optimal transport as a loss, for PyTorch."""

from otloss import costs as costs
from otloss import nn as nn
from otloss._foreign import explain_missing_names as _explain_missing_names
from otloss._warm_up import warm_up as warm_up
from otloss.losses import histogram_loss as histogram_loss
from otloss.losses import number_token_loss as number_token_loss
from otloss.losses import ordinal_loss as ordinal_loss
from otloss.losses.clouds import cloud_loss as cloud_loss
from otloss.losses.documents import document_search as document_search
from otloss.solvers.assignment.match import match as match
from otloss.solvers.assignment.pair import pair as pair
from otloss.solvers.assignment.register import Registration as Registration
from otloss.solvers.assignment.register import register as register
from otloss.solvers.barycenter.barycenter import barycenter as barycenter
from otloss.solvers.barycenter.clouds import CloudBarycenter as CloudBarycenter
from otloss.solvers.barycenter.clouds import cloud_barycenter as cloud_barycenter
from otloss.solvers.bounds import lower_bound as lower_bound
from otloss.solvers.bounds import upper_bound as upper_bound
from otloss.solvers.closed_forms.circle import wasserstein_circular as wasserstein_circular
from otloss.solvers.closed_forms.gaussians import bures_wasserstein as bures_wasserstein
from otloss.solvers.closed_forms.line import cdf_distance as cdf_distance
from otloss.solvers.closed_forms.line import wasserstein_1d as wasserstein_1d
from otloss.solvers.closed_forms.sliced import sliced_wasserstein as sliced_wasserstein
from otloss.solvers.closed_forms.tree import wasserstein_tree as wasserstein_tree
from otloss.solvers.convergence import ConvergenceWarning as ConvergenceWarning
from otloss.solvers.divergence import sinkhorn_divergence as sinkhorn_divergence
from otloss.solvers.gromov.fused_gromov import FusedGromov as FusedGromov
from otloss.solvers.gromov.fused_gromov import fused_gromov as fused_gromov
from otloss.solvers.options import SmallEpsilonError as SmallEpsilonError
from otloss.solvers.ranking.soft_sort import soft_rank as soft_rank
from otloss.solvers.ranking.soft_sort import soft_sort as soft_sort
from otloss.solvers.ranking.soft_sort import soft_top_k as soft_top_k
from otloss.solvers.solve import emd as emd
from otloss.solvers.solve import sinkhorn as sinkhorn
from otloss.solvers.solve import solve as solve
from otloss.solvers.transport import Certificate as Certificate
from otloss.solvers.transport import Transport as Transport

__version__ = "0.1.0"

__all__ = [
    "Certificate",
    "CloudBarycenter",
    "ConvergenceWarning",
    "FusedGromov",
    "Registration",
    "SmallEpsilonError",
    "Transport",
    "__version__",
    "barycenter",
    "bures_wasserstein",
    "cdf_distance",
    "cloud_barycenter",
    "cloud_loss",
    "costs",
    "document_search",
    "emd",
    "fused_gromov",
    "histogram_loss",
    "lower_bound",
    "match",
    "nn",
    "number_token_loss",
    "ordinal_loss",
    "pair",
    "register",
    "sinkhorn",
    "sinkhorn_divergence",
    "sliced_wasserstein",
    "soft_rank",
    "soft_sort",
    "soft_top_k",
    "solve",
    "upper_bound",
    "warm_up",
    "wasserstein_1d",
    "wasserstein_circular",
    "wasserstein_tree",
]

_explain_missing_names(__name__, __all__)
