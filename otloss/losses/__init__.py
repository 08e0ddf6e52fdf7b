"""Losses: ordinal labels, histograms of numbers, number tokens, critics, sets, ensembles, texts."""

from otloss._foreign import explain_missing_names as _explain_missing_names
from otloss.losses.adaptation import jdot_loss as jdot_loss
from otloss.losses.critic import critic_loss as critic_loss
from otloss.losses.critic import generator_loss as generator_loss
from otloss.losses.critic import gradient_penalty as gradient_penalty
from otloss.losses.cumulative import cumulative_log_probabilities as cumulative_log_probabilities
from otloss.losses.cumulative import decode_classes as decode_classes
from otloss.losses.documents import document_distance as document_distance
from otloss.losses.ensembles import crps as crps
from otloss.losses.histogram import histogram_labels as histogram_labels
from otloss.losses.histogram import histogram_loss as histogram_loss
from otloss.losses.histogram import histogram_mean as histogram_mean
from otloss.losses.ngrams import ngram_distance as ngram_distance
from otloss.losses.number_tokens import number_token_loss as number_token_loss
from otloss.losses.ordinal import ordinal_loss as ordinal_loss
from otloss.losses.sets import set_loss as set_loss
from otloss.losses.soft_labels import soft_labels as soft_labels
from otloss.losses.threshold import threshold_loss as threshold_loss

__all__ = [
    "critic_loss",
    "crps",
    "cumulative_log_probabilities",
    "decode_classes",
    "document_distance",
    "generator_loss",
    "gradient_penalty",
    "histogram_labels",
    "histogram_loss",
    "histogram_mean",
    "jdot_loss",
    "ngram_distance",
    "number_token_loss",
    "ordinal_loss",
    "set_loss",
    "soft_labels",
    "threshold_loss",
]

_explain_missing_names(__name__, __all__)
