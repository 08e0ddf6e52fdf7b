"""Losses over classes with an order: ordinal labels, histograms of a number, and tokens that are numbers."""

from otloss.losses.cumulative import cumulative_log_probabilities as cumulative_log_probabilities
from otloss.losses.cumulative import decode_classes as decode_classes
from otloss.losses.documents import document_distance as document_distance
from otloss.losses.histogram import histogram_labels as histogram_labels
from otloss.losses.histogram import histogram_loss as histogram_loss
from otloss.losses.histogram import histogram_mean as histogram_mean
from otloss.losses.number_tokens import number_token_loss as number_token_loss
from otloss.losses.ordinal import ordinal_loss as ordinal_loss

__all__ = [
    "cumulative_log_probabilities",
    "decode_classes",
    "document_distance",
    "histogram_labels",
    "histogram_loss",
    "histogram_mean",
    "number_token_loss",
    "ordinal_loss",
]
