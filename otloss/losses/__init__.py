"""Losses over classes with an order: ordinal labels, and histograms of a number."""

from otloss.losses._histogram import histogram_labels as histogram_labels
from otloss.losses._histogram import histogram_loss as histogram_loss
from otloss.losses._histogram import histogram_mean as histogram_mean
from otloss.losses._ordinal import ordinal_loss as ordinal_loss

__all__ = ["histogram_labels", "histogram_loss", "histogram_mean", "ordinal_loss"]
